//! Programs in C for these tests, and the limits of the daemon's systemd unit around any command, read out of the unit file.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use plimsoll_skip::{Lack, skip};

use crate::rig::make_readable;

const UNIT: &str = include_str!("../../../../packaging/systemd/plimsolld.service");

/// A program of `tests/live/c`, compiled where any user may run it.
pub fn compile(name: &str, folder: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/live/c/{name}.c"));
    let program = folder.join(name);
    let mut compiler = Command::new("cc");
    compiler
        .args(["-Wall", "-O1", "-pthread", "-o"])
        .arg(&program);
    match compiler.arg(source).status() {
        Ok(status) => assert!(status.success(), "{name}.c: {status}"),
        Err(error) => {
            skip(Lack::Program, format_args!("cc: {error}"));
            return None;
        }
    }
    make_readable(folder, 0o755);
    make_readable(&program, 0o755);
    Some(program)
}

/// The numbers of this machine's system calls by their names.
fn numbers() -> HashMap<String, String> {
    let words = [
        "-dM",
        "-E",
        "-include",
        "sys/syscall.h",
        "-x",
        "c",
        "/dev/null",
    ];
    let output = Command::new("cc").args(words).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let number = |line: &str| {
        let (name, number) = line.strip_prefix("#define __NR_")?.split_once(' ')?;
        Some((name.to_owned(), number.to_owned()))
    };
    text.lines().filter_map(number).collect()
}

/// The system calls of a set such as `@system-service`, by systemd's own list.
fn calls_of_set(set: &str, calls: &mut BTreeSet<String>) -> Result<(), String> {
    let mut command = Command::new("systemd-analyze");
    let output = command.args(["syscall-filter", "--no-pager", set]).output();
    let output = output.map_err(|error| format!("systemd-analyze: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = text.lines().skip(1).map(str::trim);
    for word in words.filter(|word| !word.is_empty() && !word.starts_with('#')) {
        if word.starts_with('@') {
            calls_of_set(word, calls)?;
        } else {
            calls.insert(word.to_owned());
        }
    }
    Ok(())
}

/// The value of a setting of the unit.
fn setting(key: &str) -> &'static str {
    let mut values = UNIT
        .lines()
        .filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let value = values
        .next()
        .unwrap_or_else(|| panic!("the unit sets no {key}"));
    assert_eq!(values.next(), None, "{key} is set twice");
    value
}

/// The unit's address families, memory, namespaces, file systems and control groups, and its capabilities, system calls and
/// devices.
pub struct UnitLimits {
    /// Words before a command that put it under the limits.
    words: Vec<String>,
    _devices: Option<DeviceGroup>,
    _folder: tempfile::TempDir,
}

impl UnitLimits {
    /// Reads them; `None` after saying what is missing here to apply them.
    pub fn read() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let program = compile("limits", folder.path())?;
        let restrict = compile("restrict", folder.path())?;
        let filter = filter_of_unit()
            .inspect_err(|why| skip(Lack::Program, why))
            .ok()?;
        assert_eq!(setting("SystemCallErrorNumber"), "EPERM");
        assert_eq!(setting("NoNewPrivileges"), "yes");
        let devices = DeviceGroup::new("unit", &devices_of_unit());
        let mut words = Vec::new();
        if let Some(group) = &devices {
            let enter = format!("echo $$ >{}/cgroup.procs && exec \"$@\"", group.0.display());
            words.extend(["sh".to_owned(), "-c".to_owned(), enter, "sh".to_owned()]);
        }
        let capabilities = setting("CapabilityBoundingSet").split_ascii_whitespace();
        let capabilities = capabilities.map(|name| {
            let name = name.strip_prefix("CAP_").expect("a capability");
            format!(",+{}", name.to_ascii_lowercase())
        });
        let bounds = format!("--bounding-set=-all{}", capabilities.collect::<String>());
        let unshare = ["unshare", "--mount", "--propagation", "private"];
        words.extend(unshare.map(str::to_owned));
        let protect = format!(
            "{} && {} && exec \"$@\"",
            read_only_system_of_unit(),
            protection_of_unit()
        );
        words.extend(["sh".to_owned(), "-c".to_owned(), protect, "sh".to_owned()]);
        words.extend(["setpriv".to_owned(), "--no-new-privs".to_owned(), bounds]);
        words.extend([restrict.display().to_string(), families_of_unit()]);
        words.extend([program.display().to_string(), "1".to_owned(), filter]);
        Some(Self {
            words,
            _devices: devices,
            _folder: folder,
        })
    }

    /// A command under the limits.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).arg(program);
        command
    }

    /// What a command prints under the limits.
    pub fn output(&self, program: &str, words: &[&str]) -> String {
        let mut command = self.command(program);
        let output = command.args(words).stderr(Stdio::inherit()).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    }
}

/// The numbers of the address families that the unit allows, separated by commas.
fn families_of_unit() -> String {
    for key in [
        "MemoryDenyWriteExecute",
        "RestrictNamespaces",
        "RestrictRealtime",
    ] {
        assert_eq!(setting(key), "yes");
    }
    let families = setting("RestrictAddressFamilies").split_ascii_whitespace();
    let number = |family| match family {
        "AF_UNIX" => "1",
        "AF_INET" => "2",
        "AF_INET6" => "10",
        other => panic!("{other}"),
    };
    families.map(number).collect::<Vec<_>>().join(",")
}

/// Shell commands that make the file system read-only in a mount namespace, but for the unit's paths.
fn read_only_system_of_unit() -> String {
    assert_eq!(setting("ProtectSystem"), "strict");
    assert_eq!(setting("ProtectHome"), "read-only");
    assert_eq!(setting("ProtectKernelTunables"), "yes");
    let paths = setting("ReadWritePaths").split_ascii_whitespace();
    let paths = paths.map(|path| path.trim_start_matches('-'));
    // What lies in /sys is the business of other settings.
    let writable: Vec<_> = paths.filter(|path| !path.starts_with("/sys/")).collect();
    let bind = writable
        .iter()
        .map(|path| format!("mount --bind {path} {path} && "));
    // ProtectSystem=strict leaves out /dev, /proc and /sys.
    let kept: Vec<_> = ["/dev", "/proc", "/sys"]
        .iter()
        .chain(&writable)
        .copied()
        .collect();
    format!(
        "{}mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && mount -o remount,bind,ro /sys && \
         awk '$5 !~ \"^({})(/|$)\" {{ print $5 }}' /proc/self/mountinfo | \
         while read -r at; do mount -o remount,bind,ro \"$at\" || exit 1; done",
        bind.collect::<String>(),
        kept.join("|")
    )
}

/// The numbers of the system calls that the unit allows, separated by commas.
fn filter_of_unit() -> Result<String, String> {
    let mut calls = BTreeSet::new();
    for word in setting("SystemCallFilter").split_ascii_whitespace() {
        assert!(!word.starts_with('~'), "a list of what is forbidden");
        if word.starts_with('@') {
            calls_of_set(word, &mut calls)?;
        } else {
            calls.insert(word.to_owned());
        }
    }
    assert!(calls.len() > 100, "{calls:?}");
    let numbers = numbers();
    // Those that this machine does not have are left out, as systemd does.
    let allowed = calls.iter().filter_map(|call| numbers.get(call).cloned());
    Ok(allowed.collect::<Vec<_>>().join(","))
}

/// Shell commands that make control groups read-only in a mount namespace, but for the unit's paths.
fn protection_of_unit() -> String {
    assert_eq!(setting("ProtectControlGroups"), "yes");
    let root = "/sys/fs/cgroup";
    let paths = setting("ReadWritePaths").split_ascii_whitespace();
    let writable = paths
        .map(|path| path.trim_start_matches('-'))
        .filter(|path| path.starts_with(root) && fs::exists(path).unwrap());
    let writable = writable.map(|path| format!(" && mount --bind {path} {path}"));
    format!(
        "mount --rbind {root} {root}{} && awk '$5 ~ \"^{root}\" && $5 !~ /procs$/ {{ print $5 }}' /proc/self/mountinfo | \
         while read -r at; do mount -o remount,bind,ro \"$at\" || exit 1; done",
        writable.collect::<String>()
    )
}

/// The rules of the unit's device policy.
fn devices_of_unit() -> Vec<String> {
    // `closed` allows these of its own accord: systemd.resource-control(5).
    const PSEUDO_DEVICES: [&str; 6] = ["c 1:3", "c 1:5", "c 1:7", "c 1:8", "c 1:9", "c 5:0"];
    assert_eq!(setting("DevicePolicy"), "closed");
    let (path, access) = setting("DeviceAllow").split_once(' ').unwrap();
    let device = fs::metadata(path).expect("the unit's device").rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let pseudo = PSEUDO_DEVICES.iter().map(|device| format!("{device} rw"));
    pseudo
        .chain([format!("c {major}:{minor} {access}")])
        .collect()
}

/// A control group whose processes can open only some devices. Dropped, it is removed.
#[derive(Debug)]
pub struct DeviceGroup(PathBuf);

impl DeviceGroup {
    /// Makes one; `None` after saying why there is none.
    pub fn new(name: &str, rules: &[String]) -> Option<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        // Tests that run beside each other each have their own.
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("plimsoll-{name}-{}-{number}", std::process::id());
        let path = Path::new("/sys/fs/cgroup/devices").join(name);
        if let Err(error) = fs::create_dir(&path) {
            skip(
                Lack::Root,
                format_args!(
                    "a filter of devices is left out: {}: {error}",
                    path.display()
                ),
            );
            return None;
        }
        fs::write(path.join("devices.deny"), "a").unwrap();
        for rule in rules {
            fs::write(path.join("devices.allow"), rule).unwrap();
        }
        Some(Self(path))
    }

    /// Moves a process into it.
    pub fn take(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for DeviceGroup {
    fn drop(&mut self) {
        // Its processes have ended; else it stays, which harms nothing.
        let _ = fs::remove_dir(&self.0);
    }
}
