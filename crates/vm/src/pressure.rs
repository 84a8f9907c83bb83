//! Pressure stall information (PSI): how long tasks of a host or a control group waited for memory.
//!
//! Source: Linux, Documentation/accounting/psi.rst and admin-guide/cgroup-v2.rst (`memory.pressure`).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const HOST: &str = "/proc/pressure/memory";
/// Where version 2 of control groups is mounted, alone or beside version 1.
const CGROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// Time lost to a lack of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct MemoryPressure {
    /// Share of the last 10 s in which at least one task waited, 0.0 to 1.0.
    pub some_ratio: f64,
    /// Time in which at least one task waited, since the host booted or the group was created.
    pub some_total: Duration,
    /// Share of the last 10 s in which all tasks waited at once, 0.0 to 1.0.
    pub full_ratio: f64,
    /// Time in which all tasks waited at once.
    pub full_total: Duration,
}

impl MemoryPressure {
    /// The host's; `None` if the kernel does not report it.
    #[must_use]
    pub fn of_host() -> Option<Self> {
        Self::read(Path::new(HOST))
    }

    /// That of a process's control group, of version 2; `None` if it has none or the kernel does not report it. The
    /// root group has that of the host.
    #[must_use]
    pub fn of_process(pid: u32) -> Option<Self> {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
        // A group outside this process's namespace is named by a path that leads out of it.
        if group.split('/').any(|part| part == "..") {
            return None;
        }
        if group.is_empty() {
            return Self::of_host();
        }
        let file = |root: &str| PathBuf::from(root).join(group).join("memory.pressure");
        CGROUPS.iter().find_map(|root| Self::read(&file(root)))
    }

    fn read(path: &Path) -> Option<Self> {
        Self::parse(&fs::read_to_string(path).ok()?)
    }

    /// Parses the contents of `/proc/pressure/memory` or `memory.pressure`; `None` if they have another form.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let line = |kind: &str| {
            let mut lines = text.lines();
            let line = lines.find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))?;
            let value = |key: &str| {
                let mut words = line.split_ascii_whitespace();
                words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
            };
            let percent: f64 = value("avg10")?.parse().ok()?;
            let total = Duration::from_micros(value("total")?.parse().ok()?);
            Some((percent / 100.0, total))
        };
        let (some_ratio, some_total) = line("some")?;
        let (full_ratio, full_total) = line("full")?;
        Some(Self {
            some_ratio,
            some_total,
            full_ratio,
            full_total,
        })
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
            some_ratio: 0.125,
            some_total: Duration::from_millis(2500),
            full_ratio: 0.0325,
            full_total: Duration::from_micros(1_000_001),
        };
        assert_eq!(MemoryPressure::parse(text), Some(expected));
        for bad in [
            "",
            "some avg10=1.00 total=1\n",
            "some avg10=x total=1\nfull avg10=0 total=1\n",
            "some avg10=1.00\nfull avg10=0.00\n",
        ] {
            assert_eq!(MemoryPressure::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_process_has_the_pressure_of_its_group_where_the_kernel_reports_any() {
        assert_eq!(MemoryPressure::of_process(u32::MAX), None);
        if let Some(ours) = MemoryPressure::of_process(std::process::id()) {
            assert!(ours.full_total <= ours.some_total, "{ours:?}");
        }
    }
}
