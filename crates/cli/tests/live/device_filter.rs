//! VMs behind a device filter of control groups of version 2, a BPF program, as systemd and libvirt set on a unified hierarchy.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use plimsoll_skip::{Lack, skip};

use crate::hostile::SHARED;
use crate::limits::compile;
use crate::refusals::{AS_NOBODY, WORKLOAD, has_setpriv};
use crate::rig::{Attach, boot_with, shared_ground};

/// A control group whose processes can open only some devices. Dropped, it is removed.
struct FilteredGroup {
    path: PathBuf,
    /// The hierarchy, if it was mounted for this group.
    mount: Option<tempfile::TempDir>,
}

impl FilteredGroup {
    /// Makes one; `None` after reporting why there is none.
    fn new(name: &str, devices: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let program = compile("devices", folder.path())?;
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let mounted = mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let path = words.next()?;
            (words.next()? == "cgroup2").then(|| PathBuf::from(path))
        });
        let (root, mount) = match mounted {
            Some(path) => (path, None),
            None => {
                let mount = tempfile::tempdir().unwrap();
                let mut command = Command::new("mount");
                command.args(["-t", "cgroup2", "none"]).arg(mount.path());
                if !command.status().is_ok_and(|status| status.success()) {
                    skip(
                        Lack::Host,
                        "no hierarchy of control groups of version 2 can be mounted here",
                    );
                    return None;
                }
                (mount.path().to_owned(), Some(mount))
            }
        };
        let path = root.join(format!("plimsoll-{name}-{}", std::process::id()));
        if let Err(error) = fs::create_dir(&path) {
            skip(Lack::Root, format_args!("{}: {error}", path.display()));
            return None;
        }
        let group = Self { path, mount };
        let output = Command::new(program)
            .arg(&group.path)
            .args(devices)
            .output()
            .unwrap();
        if !output.status.success() {
            let complaint = String::from_utf8_lossy(&output.stderr);
            skip(
                Lack::Host,
                format_args!(
                    "this kernel takes no device filter by BPF: {}",
                    complaint.trim()
                ),
            );
            return None;
        }
        Some(group)
    }

    /// Words before a command that move it into the group.
    fn words(&self) -> [String; 4] {
        let enter = format!(
            "echo $$ >{}/cgroup.procs && exec \"$@\"",
            self.path.display()
        );
        ["sh", "-c", &enter, "sh"].map(str::to_owned)
    }
}

impl Drop for FilteredGroup {
    fn drop(&mut self) {
        // Its processes have ended; else it stays, which harms nothing.
        let _ = fs::remove_dir(&self.path);
        if let Some(mount) = &self.mount {
            let _ = Command::new("umount").arg(mount.path()).status();
        }
    }
}

#[test]
fn a_vm_behind_a_device_filter_of_version_2_is_traced() {
    let Some(ground) = shared_ground() else {
        return;
    };
    if !has_setpriv() {
        return;
    }
    if !Path::new("/dev/userfaultfd").exists() {
        skip(Lack::Userfaultfd, "this host has no /dev/userfaultfd");
        return;
    }
    // As in libvirt's cgroup_device_acl: null, zero, full, random, urandom, ptmx and pts, KVM.
    let devices = ["1:3", "1:5", "1:7", "1:8", "1:9", "5:2", "136:*", "10:232"];
    let Some(group) = FilteredGroup::new("filter", &devices) else {
        return;
    };
    let words = group.words();
    let prefix: Vec<&str> = words.iter().map(String::as_str).collect();
    // The filter is in force, for root as well.
    let read = |device: &str| {
        let mut command = Command::new(prefix[0]);
        command.args(&prefix[1..]).args(["head", "-c", "1", device]);
        command.output().unwrap()
    };
    assert!(read("/dev/zero").status.success());
    let denied = read("/dev/userfaultfd");
    let complaint = String::from_utf8_lossy(&denied.stderr).into_owned();
    assert!(complaint.contains("Operation not permitted"), "{complaint}");

    let prefix = [&prefix[..], &AS_NOBODY].concat();
    let mut guest = boot_with(&ground, &prefix, &SHARED, WORKLOAD);
    let its_groups = fs::read_to_string(format!("/proc/{}/cgroup", guest.pid())).unwrap();
    let name = group.path.file_name().unwrap().to_str().unwrap();
    assert!(its_groups.contains(&format!("0::/{name}")), "{its_groups}");
    let footprint = guest.footprint();
    let outcome = Attach::start(&guest.pid(), "--budget 20% --period 1s --periods 2").end();
    outcome.assert_quiet_success();
    assert!(outcome.periods().all(|period| period.number("traps") > 0.0));
    guest.assert_left_as(&footprint);
    guest.assert_goes_on();
}
