//! VMs of a libvirt as it comes, traced within the limits of the daemon's unit.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use plimsoll_rig::{PATIENCE, wait_for};
use plimsoll_skip::{Lack, skip};
use plimsoll_vm::{ConsoleEvent, QemuVm};

use crate::limits::{DeviceGroup, UnitLimits};
use crate::rig::{
    Attach, Ground, Line, MIB, PLIMSOLL, ground, make_readable, shared_ground, with_backend,
};

const URI: &str = "qemu:///system";

fn virsh(words: &[&str]) -> bool {
    let mut command = Command::new("virsh");
    command.args(["--quiet", "--connect", URI]).args(words);
    command.output().is_ok_and(|output| output.status.success())
}

/// A running domain, which ends with this.
struct Domain {
    name: String,
    vm: QemuVm,
    log: PathBuf,
    /// The filter of devices that libvirt should have set, where it did not.
    devices: Option<DeviceGroup>,
    folder: tempfile::TempDir,
}

impl Drop for Domain {
    fn drop(&mut self) {
        virsh(&["destroy", &self.name]);
    }
}

impl Domain {
    /// Starts a domain of one vCPU whose RAM is shared; all else is libvirt's default.
    fn start(ground: &Ground, name: &str, workload: &str) -> Self {
        let name = format!("plimsoll-{name}-{}", std::process::id());
        let folder = tempfile::tempdir().unwrap();
        let image = ground.image.public_copy(folder.path()).unwrap();
        let log = folder.path().join("console.log");
        fs::write(&log, "").unwrap();
        make_readable(&log, 0o666);
        let words = workload.split_ascii_whitespace();
        let words: String = words.map(|word| format!(" plimsoll.{word}")).collect();
        let description = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>192</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{}</kernel><initrd>{}</initrd>\
             <cmdline>console=ttyS0 quiet panic=-1 no_timer_check{words}</cmdline></os>\
             <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\
             <on_reboot>destroy</on_reboot><devices><serial type='file'><source path='{}'/></serial>\
             <memballoon model='none'/></devices></domain>",
            image.kernel.display(),
            image.initrd.display(),
            log.display()
        );
        let file = folder.path().join("domain.xml");
        fs::write(&file, description).unwrap();
        assert!(virsh(&["create", file.to_str().unwrap()]), "{name}");
        let vm = plimsoll_vm::find(&name).unwrap();
        let mut domain = Self {
            name,
            vm,
            log,
            devices: None,
            folder,
        };
        if !domain.has_device_filter() {
            // As in libvirt's cgroup_device_acl: null, zero, full, random, urandom, ptmx and pts, KVM.
            let devices = ["1:3", "1:5", "1:7", "1:8", "1:9", "5:2", "136:*", "10:232"];
            let rules = devices.map(|device| format!("c {device} rw"));
            domain.devices = DeviceGroup::new(&domain.name, &rules);
            if let Some(group) = &domain.devices {
                group.take(domain.vm.pid);
            }
        }
        domain.until("its array", |event| {
            matches!(event, ConsoleEvent::Populated { .. })
        });
        domain
    }

    /// What the guest has reported.
    fn events(&self) -> Vec<ConsoleEvent> {
        let log = fs::read(&self.log).unwrap();
        let log = String::from_utf8_lossy(&log).into_owned();
        log.lines().filter_map(ConsoleEvent::parse).collect()
    }

    fn until(&self, what: &str, is: impl Fn(&ConsoleEvent) -> bool) {
        wait_for(what, PATIENCE, || {
            self.events().iter().any(&is).then_some(())
        });
    }

    /// Fails unless the guest works on and has found every page right.
    fn assert_goes_on(&self) {
        let rounds = || {
            let events = self.events();
            let count = events.iter().filter(|event| match event {
                ConsoleEvent::Mismatch { .. } | ConsoleEvent::Error { .. } => {
                    panic!("{}: {event:?}", self.name)
                }
                ConsoleEvent::Round { mismatches, .. } => {
                    assert_eq!(*mismatches, 0, "{}", self.name);
                    true
                }
                _ => false,
            });
            count.count()
        };
        let before = rounds();
        wait_for("three more rounds", PATIENCE, || {
            (rounds() >= before + 3).then_some(())
        });
    }

    /// A line of the process's status.
    fn status(&self, key: &str) -> String {
        let status = fs::read_to_string(format!("/proc/{}/status", self.vm.pid)).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        line.unwrap_or_default().trim().to_owned()
    }

    /// Whether a control group of the devices controller withholds devices from it.
    fn has_device_filter(&self) -> bool {
        let groups = fs::read_to_string(format!("/proc/{}/cgroup", self.vm.pid)).unwrap();
        let mut groups = groups.lines();
        let group = groups.find_map(|line| line.split_once(":devices:"));
        group.is_some_and(|(_, group)| {
            let list = fs::read_to_string(format!("/sys/fs/cgroup/devices{group}/devices.list"));
            list.is_ok_and(|list| !list.starts_with("a "))
        })
    }

    /// Descriptors of the process, which tracing must leave as they were.
    fn footprint(&self) -> Vec<String> {
        let fds = fs::read_dir(format!("/proc/{}/fd", self.vm.pid)).unwrap();
        let fds = fds.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        let mut names: Vec<_> = fds.map(|link| link.display().to_string()).collect();
        names.retain(|name| name.contains("userfaultfd") || name.contains("socket:"));
        names.sort();
        names
    }
}

/// Attaches to a VM within the unit's limits.
fn attach_within(limits: &UnitLimits, vm: &str, options: &str) -> Attach {
    let mut command = limits.command(PLIMSOLL);
    command.args(["attach", vm, "-o", "json"]);
    Attach::spawn(command.args(with_backend(options)))
}

/// The working sets that were found, in MiB; `None` where there is only a bound.
fn working_sets<'a>(lines: impl Iterator<Item = &'a Line>) -> Vec<Option<f64>> {
    lines
        .map(|line| line.estimate().map(|pages| pages / MIB as f64))
        .collect()
}

#[test]
fn the_limits_of_the_unit_are_in_force() {
    let Some(_ground) = shared_ground() else {
        return;
    };
    let Some(limits) = UnitLimits::read() else {
        return;
    };
    let status = limits.output("cat", &["/proc/self/status"]);
    let field = |key| status.lines().find_map(|line| line.strip_prefix(key));
    assert_eq!(field("NoNewPrivs:").map(str::trim), Some("1"));
    assert_eq!(field("Seccomp:").map(str::trim), Some("2"));
    let effective = u64::from_str_radix(field("CapEff:").unwrap().trim(), 16).unwrap();
    // CAP_MKNOD and CAP_SYS_ADMIN, capabilities(7).
    assert_eq!(effective >> 27 & 1, 0, "{effective:x}");
    assert_eq!(effective >> 21 & 1, 0, "{effective:x}");
    assert_ne!(effective >> 19 & 1, 0, "{effective:x}");
    if let Err(error) = Command::new("python3").arg("-V").output() {
        skip(Lack::Program, format_args!("python3: {error}"));
        return;
    }
    let probes = limits.output("python3", &["-c", PROBES]);
    let expected = "AF_UNIX True\nAF_NETLINK False\nread and execute True\nwrite and execute False\nnamespace False\n\
                    real time False\n/run True\n/tmp False\n/etc False\n/proc/sys/vm False\n";
    assert_eq!(probes, expected);
}

/// Prints what is allowed.
const PROBES: &str = "
import ctypes, mmap, os, socket, tempfile
def probe(name, act):
    try:
        act()
        print(name, True)
    except OSError:
        print(name, False)
def unshare():
    if ctypes.CDLL(None).unshare(0x20000):
        raise OSError
probe('AF_UNIX', lambda: socket.socket(socket.AF_UNIX))
probe('AF_NETLINK', lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
probe('read and execute', lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC))
probe('write and execute', lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC))
probe('namespace', unshare)
probe('real time', lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
for path in ['/run', '/tmp', '/etc']:
    probe(path, lambda: tempfile.TemporaryFile(dir=path))
probe('/proc/sys/vm', lambda: open('/proc/sys/vm/stat_interval', 'r+'))
";

#[test]
fn vms_of_a_stock_libvirt_are_traced_within_the_units_limits() {
    let Some(ground) = ground() else { return };
    if !virsh(&["version"]) {
        skip(Lack::Live, format_args!("there is no libvirt at {URI}"));
        return;
    }
    let Some(limits) = UnitLimits::read() else {
        return;
    };
    if !fs::exists("/sys/kernel/security/apparmor").unwrap() {
        skip(
            Lack::Host,
            "this host has no AppArmor: the profiles of libvirt's VMs are left out",
        );
    }
    let start = |mib: u64| {
        let workload = format!("workload=uniform mib={mib} write_ratio=0.5");
        (
            mib,
            Domain::start(&ground, &format!("uniform-{mib}"), &workload),
        )
    };
    let domains = [start(24), start(64)];
    // Long enough that a busy host's guest passes over its array several times in each.
    let options = "--rate 1/16 --rate-rule fixed --budget none --period 5s --periods 5";
    let before = domains.each_ref().map(|(_, domain)| {
        // As libvirt starts them: of another user, sandboxed, with a /dev of its own.
        assert_ne!(domain.status("Uid:").split_whitespace().next(), Some("0"));
        assert_eq!(domain.status("Seccomp:"), "2");
        let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).unwrap();
        assert_ne!(of(&domain.vm.pid.to_string()), of("self"));
        assert!(domain.devices.is_none() || domain.has_device_filter());
        domain.footprint()
    });
    let tracers = domains
        .each_ref()
        .map(|(_, domain)| attach_within(&limits, &domain.name, options));
    for (((mib, domain), tracer), before) in domains.into_iter().zip(tracers).zip(before) {
        let ended = tracer.end();
        ended.assert_quiet_success();
        let found = working_sets(ended.periods());
        println!("{}: {mib} MiB used, found {found:?}", domain.name);
        let truth = mib as f64 * 0.95;
        let error =
            |found: &Option<f64>| found.map_or(f64::INFINITY, |found| (found / truth - 1.0).abs());
        let median = plimsoll_rig::median(found.iter().map(error));
        assert!(median <= 0.1, "{mib} MiB used, found {found:?}");
        let lost: f64 = ended.periods().map(|period| period.number("lost")).sum();
        println!("lost {lost}, median error {median:.3}");
        assert_eq!(domain.footprint(), before);
        domain.assert_goes_on();
    }
}

#[test]
fn a_traced_domain_is_saved_and_restored_and_traced_again() {
    let Some(ground) = ground() else { return };
    if !virsh(&["version"]) {
        skip(Lack::Live, format_args!("there is no libvirt at {URI}"));
        return;
    }
    let mut domain = Domain::start(&ground, "saved", "workload=uniform mib=64 write_ratio=0.5");
    let file = domain.folder.path().join("saved");
    let options = "--rate 1/8 --rate-rule fixed --budget none --period 1s";
    for _ in 0..2 {
        let tracer = Attach::start(&domain.vm.pid.to_string(), options);
        tracer.next();
        assert!(virsh(&["save", &domain.name, file.to_str().unwrap()]));
        // libvirt holds the monitor, so the names of QEMU's threads show it.
        let ended = tracer.end();
        assert_eq!(ended.code, Some(0), "{}", ended.complaint);
        let said = "it is being migrated or saved";
        assert!(ended.complaint.contains(said), "{}", ended.complaint);
        assert!(virsh(&["restore", file.to_str().unwrap()]));
        domain.vm = plimsoll_vm::find(&domain.name).unwrap();
        // What the console's log has yet to receive may be of the time before; CPUs that run are not.
        wait_for("a restored domain that runs", PATIENCE, || {
            domain.vm.transfer(None).unwrap().is_none().then_some(())
        });
        domain.assert_goes_on();
    }
    let ended = Attach::start(
        &domain.vm.pid.to_string(),
        "--budget 10% --period 500ms --periods 2",
    );
    ended.end().assert_quiet_success();
    domain.assert_goes_on();
}

#[test]
fn a_domain_is_attached_to_and_left_ten_times_and_goes_on() {
    let Some(ground) = ground() else { return };
    if !virsh(&["version"]) {
        skip(Lack::Live, format_args!("there is no libvirt at {URI}"));
        return;
    }
    let Some(limits) = UnitLimits::read() else {
        return;
    };
    let domain = Domain::start(&ground, "again", "workload=uniform mib=16 write_ratio=0.5");
    let before = domain.footprint();
    for backend in ["trap", "scan --writes"].iter().cycle().take(10) {
        let options = format!("--backend {backend} --period 200ms --periods 1");
        let begin = std::time::Instant::now();
        attach_within(&limits, &domain.name, &options)
            .end()
            .assert_quiet_success();
        assert!(begin.elapsed() < Duration::from_secs(60));
        assert_eq!(domain.footprint(), before);
    }
    domain.assert_goes_on();
}
