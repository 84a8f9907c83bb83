//! What the kernel counts beside us: reclaim, and requests to the disk.

use std::fs;

use crate::WorkloadError;
use crate::console::Line;

/// Reported lines of `/proc/vmstat`; those a kernel lacks are omitted.
const VMSTAT: [&str; 12] = [
    "pgmajfault",
    "pgpgin",
    "pgpgout",
    "pswpin",
    "pswpout",
    "pgsteal_kswapd",
    "pgsteal_direct",
    "pgsteal_file",
    "pgsteal_anon",
    "workingset_refault_file",
    "workingset_refault_anon",
    "pgmigrate_success",
];
/// Reported fields of `/sys/block/DISK/stat`, by position.
const DISK: [(usize, &str); 4] = [
    (0, "disk_reads"),
    (2, "disk_read_sectors"),
    (4, "disk_writes"),
    (6, "disk_write_sectors"),
];

/// Counters at one time, by name.
pub struct Counters(Vec<(&'static str, u64)>);

impl Counters {
    /// Reads them; `disk` is the name of a block device.
    pub fn now(disk: &str) -> Result<Self, WorkloadError> {
        let read = |path: &str| fs::read_to_string(path).map_err(WorkloadError::during(path));
        let vmstat = read("/proc/vmstat")?;
        let stat = read(&format!("/sys/block/{disk}/stat"))?;
        let stat: Vec<&str> = stat.split_ascii_whitespace().collect();
        let of_vmstat = VMSTAT.into_iter().filter_map(|name| {
            let line = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
            Some((name, vmstat.lines().find_map(line)?))
        });
        let of_disk = DISK
            .into_iter()
            .filter_map(|(place, name)| Some((name, stat.get(place)?.parse().ok()?)));
        Ok(Self(of_vmstat.chain(of_disk).collect()))
    }

    /// Adds what was counted since `before` to a line.
    pub fn told_since(&self, before: &Self, mut line: Line) -> Line {
        for ((name, now), (_, then)) in self.0.iter().zip(&before.0) {
            line = line.with(name, now.saturating_sub(*then));
        }
        line
    }
}
