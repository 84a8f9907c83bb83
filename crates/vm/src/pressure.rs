//! Pressure stall information (PSI): how long tasks of a host or a control group waited for memory.
//!
//! Source: Linux, Documentation/accounting/psi.rst and admin-guide/cgroup-v2.rst (`memory.pressure`).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cgroup::path_in;

const HOST: &str = "/proc/pressure/memory";
/// Where version 2 of control groups is mounted, alone or beside version 1.
const CGROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// Time lost to a lack of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct MemoryPressure {
    /// Time in which at least one task waited, since the host booted or the group was created.
    pub some_total: Duration,
    /// Time in which all tasks waited at once.
    pub full_total: Duration,
}

impl MemoryPressure {
    /// The host's; `None` if the kernel does not report it.
    pub fn of_host() -> Option<Self> {
        Self::read(Path::new(HOST))
    }

    fn read(path: &Path) -> Option<Self> {
        Self::parse(&fs::read_to_string(path).ok()?)
    }

    /// Parses the contents of `/proc/pressure/memory` or `memory.pressure`; `None` if they have another form.
    pub fn parse(text: &str) -> Option<Self> {
        let line = |kind: &str| {
            let mut lines = text.lines();
            let line = lines.find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))?;
            let mut words = line.split_ascii_whitespace();
            let total = words.find_map(|word| word.strip_prefix("total="))?;
            Some(Duration::from_micros(total.parse().ok()?))
        };
        Some(Self {
            some_total: line("some")?,
            full_total: line("full")?,
        })
    }
}

/// A control group of version 2, by its path below the root, which it is not.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ControlGroup(String);

impl ControlGroup {
    /// The group of a VM's process: the unit (scope or service) of systemd, and so of libvirt, that it belongs to, which
    /// also contains the groups of its threads, else the process's own. `None` if it has none but the root, or if it is
    /// outside this process's namespace.
    ///
    /// Other processes may be in the group too.
    pub fn of_vm(pid: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)
    }

    /// Parses the contents of `/proc/PID/cgroup`.
    pub fn parse(text: &str) -> Option<Self> {
        let names: Vec<_> = path_in(text, "")?.split('/').collect();
        if names.contains(&"") {
            return None;
        }
        let is_unit = |name: &&str| name.ends_with(".scope") || name.ends_with(".service");
        let length = names
            .iter()
            .rposition(is_unit)
            .map_or(names.len(), |at| at + 1);
        Some(Self(names[..length].join("/")))
    }

    /// Whether processes of `other` count in this group too.
    pub fn contains(&self, other: &Self) -> bool {
        let rest = other.0.strip_prefix(&self.0);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Its pressure; `None` if the kernel does not report it.
    pub fn pressure(&self) -> Option<MemoryPressure> {
        let file = |root: &str| PathBuf::from(root).join(&self.0).join("memory.pressure");
        CGROUPS
            .iter()
            .find_map(|root| MemoryPressure::read(&file(root)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_lines_are_parsed_and_other_forms_are_refused() {
        let text = "some avg10=12.50 avg60=1.00 avg300=0.10 total=2500000\n\
                    full avg10=3.25 avg60=0.50 avg300=0.00 total=1000001\n";
        let expected = MemoryPressure {
            some_total: Duration::from_millis(2500),
            full_total: Duration::from_micros(1_000_001),
        };
        assert_eq!(MemoryPressure::parse(text), Some(expected));
        for bad in [
            "",
            "some avg10=1.00 total=1\n",
            "some avg10=0 total=x\nfull avg10=0 total=1\n",
            "some avg10=1.00\nfull avg10=0.00\n",
        ] {
            assert_eq!(MemoryPressure::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_vms_group_is_its_unit_or_its_own() {
        let group = |text: &str| ControlGroup::parse(text).map(|group| group.0);
        let libvirt = r"machine.slice/machine-qemu\x2d1\x2dweb.scope";
        for (text, expected) in [
            (format!("0::/{libvirt}/libvirt/emulator\n"), Some(libvirt)),
            (
                "9:memory:/a\n0::/system.slice/vm@web.service\n".into(),
                Some("system.slice/vm@web.service"),
            ),
            ("0::/vms/web\n".into(), Some("vms/web")),
            (
                "0::/user@1.service/app.slice/run-1.scope/x\n".into(),
                Some("user@1.service/app.slice/run-1.scope"),
            ),
            ("0::/\n".into(), None),
            ("9:memory:/a\n".into(), None),
            ("0::/../a.scope\n".into(), None),
            ("0::/a/./b\n".into(), None),
            ("0:://etc\n".into(), None),
            ("0::/a//b\n".into(), None),
            (String::new(), None),
        ] {
            assert_eq!(group(&text).as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn a_group_contains_itself_and_those_below_it() {
        let group = |path: &str| ControlGroup::parse(&format!("0::/{path}")).unwrap();
        assert!(group("vms/web").contains(&group("vms/web")));
        assert!(group("vms").contains(&group("vms/web")));
        assert!(!group("vms/web").contains(&group("vms/web-2")));
        assert!(!group("vms/web").contains(&group("vms")));
    }

    #[test]
    fn a_group_has_the_pressure_that_the_kernel_reports() {
        assert_eq!(ControlGroup::of_vm(u32::MAX), None);
        let ours = ControlGroup::of_vm(std::process::id());
        if let Some(ours) = ours.and_then(|group| group.pressure()) {
            assert!(ours.full_total <= ours.some_total, "{ours:?}");
        }
    }
}
