//! A guest's memory statistics, reported through its balloon.
//!
//! They are not trusted: the guest may report anything.
//!
//! Source: Virtual I/O Device (VIRTIO) 1.2, §5.5.6.3; QEMU, docs/interop/virtio-balloon-stats.

use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

use crate::meminfo;

/// Age in intervals from which statistics are stale: the guest hangs, is stopped, or has lost its driver.
const STALE_INTERVALS: u64 = 5;

/// A guest's memory statistics; counts since it booted. `None` for values that it does not report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GuestStats {
    /// Age of these statistics, in s: by the time of day, unless a [`StatsClock`] has measured it.
    pub age_s: u64,
    /// When QEMU received them, by its time of day, in s since 1970.
    pub updated_unix_s: u64,
    /// Interval of the requests, in s; 0 for never.
    pub interval_s: u64,
    /// Memory that the guest manages.
    pub total_bytes: Option<u64>,
    /// Unused memory.
    pub free_bytes: Option<u64>,
    /// Memory available without swapping.
    pub available_bytes: Option<u64>,
    /// Page cache.
    pub disk_caches_bytes: Option<u64>,
    /// Page faults that required disk I/O.
    pub major_faults: Option<u64>,
    /// Read from its swap.
    pub swap_in_bytes: Option<u64>,
    /// Written to its swap.
    pub swap_out_bytes: Option<u64>,
    /// Processes that its kernel killed for lack of memory; older versions of QEMU and Linux do not report it.
    pub oom_kills: Option<u64>,
}

/// Memory statistics of a guest's kernel from its `/proc`; counts since it booted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelMemory {
    /// Memory committed to processes (`Committed_AS`).
    pub committed_bytes: u64,
    /// Memory available without swapping (`MemAvailable`).
    pub available_bytes: u64,
    /// Free swap (`SwapFree`).
    pub swap_free_bytes: u64,
    /// File pages that were evicted and soon accessed again (`workingset_refault_file`).
    pub refaulted_pages: u64,
    /// Pages read from its swap (`pswpin`).
    pub swapped_in_pages: u64,
    /// Page faults that required disk I/O (`pgmajfault`).
    pub major_faults: u64,
}

impl KernelMemory {
    /// Parses the contents of `/proc/meminfo` and `/proc/vmstat`; `None` if a line is missing. Refaults that a
    /// kernel does not count, and the free swap of a guest without swap, are 0.
    pub fn of_proc(memory: &str, vmstat: &str) -> Option<Self> {
        let bytes = |name| meminfo::bytes(memory, name);
        // Before Linux 5.9 only refaults of files were counted.
        let refaults = ["workingset_refault_file", "workingset_refault"]
            .map(|name| meminfo::count(vmstat, name));
        Some(Self {
            committed_bytes: bytes("Committed_AS")?,
            available_bytes: bytes("MemAvailable")?,
            swap_free_bytes: bytes("SwapFree").unwrap_or(0),
            refaulted_pages: refaults[0].or(refaults[1]).unwrap_or(0),
            swapped_in_pages: meminfo::count(vmstat, "pswpin")?,
            major_faults: meminfo::count(vmstat, "pgmajfault")?,
        })
    }
}

impl GuestStats {
    /// Whether the last report is overdue, or none is requested.
    pub fn is_stale(&self) -> bool {
        self.age_s > self.interval_s.saturating_mul(STALE_INTERVALS)
    }

    /// Age of `unix_s`, in s; 0 if the clock was set back since.
    pub fn age_s_of(unix_s: u64) -> u64 {
        let since = Duration::from_secs(unix_s);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        now.unwrap_or_default().saturating_sub(since).as_secs()
    }

    /// Parses a balloon's property `guest-stats`, which does not contain `interval_s`; `Some(None)` if the guest never
    /// reported any statistics, `None` if the value has another form.
    pub(crate) fn of_qmp(property: &Value) -> Option<Option<Self>> {
        let told_unix_s = property["last-update"].as_u64()?;
        if told_unix_s == 0 {
            return Some(None);
        }
        // QEMU sets all bits of values that the guest did not report.
        let value = |key: &str| property["stats"][key].as_u64().filter(|&n| n != u64::MAX);
        Some(Some(Self {
            age_s: Self::age_s_of(told_unix_s),
            updated_unix_s: told_unix_s,
            interval_s: 0,
            total_bytes: value("stat-total-memory"),
            free_bytes: value("stat-free-memory"),
            available_bytes: value("stat-available-memory"),
            disk_caches_bytes: value("stat-disk-caches"),
            major_faults: value("stat-major-faults"),
            swap_in_bytes: value("stat-swap-in"),
            swap_out_bytes: value("stat-swap-out"),
            oom_kills: value("stat-oom-kill"),
        }))
    }
}

/// Measures the age of a guest's statistics by the clock since boot, so that setting the time of day makes them neither
/// older nor younger. The first ones alone are dated by the time of day.
#[derive(Debug, Default)]
pub struct StatsClock {
    latest: Option<SeenStats>,
}

/// The last statistics of a guest.
#[derive(Debug)]
struct SeenStats {
    updated_unix_s: u64,
    /// Their age when they were first read, in s.
    age_s: u64,
    /// When they were first, and last read, since boot.
    first: Duration,
    last: Duration,
}

impl StatsClock {
    /// Sets the age of statistics that were just read.
    pub fn measure(&mut self, stats: &mut GuestStats) {
        let now = clock_gettime(ClockId::Boottime);
        self.measure_at(stats, Duration::try_from(now).unwrap_or_default());
    }

    /// The same at a time since boot.
    pub fn measure_at(&mut self, stats: &mut GuestStats, now: Duration) {
        let seen = match self.latest.take() {
            Some(seen) if seen.updated_unix_s == stats.updated_unix_s => {
                SeenStats { last: now, ..seen }
            }
            // They came after the ones before were last read.
            Some(seen) => SeenStats {
                updated_unix_s: stats.updated_unix_s,
                age_s: stats.age_s.min(now.saturating_sub(seen.last).as_secs()),
                first: now,
                last: now,
            },
            None => SeenStats {
                updated_unix_s: stats.updated_unix_s,
                age_s: stats.age_s,
                first: now,
                last: now,
            },
        };
        let since = now.saturating_sub(seen.first).as_secs();
        stats.age_s = seen.age_s.saturating_add(since);
        self.latest = Some(seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_step_of_the_time_of_day_makes_statistics_neither_older_nor_younger() {
        let mut clock = StatsClock::default();
        // At a time since boot, QEMU's time of the statistics, and their age by the time of day.
        let mut age_s = |now_s, updated_unix_s, age_s| {
            let mut stats = GuestStats {
                age_s,
                updated_unix_s,
                ..GuestStats::default()
            };
            clock.measure_at(&mut stats, Duration::from_secs(now_s));
            stats.age_s
        };
        assert_eq!(age_s(100, 5000, 2), 2);
        // Set back by an hour: a guest that hangs is not young.
        assert_eq!(age_s(130, 5000, 0), 32);
        // Set forward by an hour: the same, and what comes then is not old.
        assert_eq!(age_s(140, 5000, 3642), 42);
        assert_eq!(age_s(150, 8650, 1), 1);
        assert_eq!(age_s(155, 8655, 7200), 5);
        assert_eq!(age_s(160, 8655, 7205), 10);
    }

    #[test]
    fn what_the_guest_does_not_tell_is_none() {
        let stats = json!({
            "stat-free-memory": 4096,
            "stat-htlb-pgfail": u64::MAX,
            "stat-oom-kill": 3,
            "stat-swap-in": -1,
            "stat-swap-out": "much",
        });
        let told = GuestStats::of_qmp(&json!({ "stats": stats, "last-update": 1 }));
        let told = told.unwrap().unwrap();
        assert!(told.age_s > 1_000_000_000, "{told:?}");
        let expected = GuestStats {
            age_s: told.age_s,
            updated_unix_s: 1,
            free_bytes: Some(4096),
            oom_kills: Some(3),
            ..GuestStats::default()
        };
        assert_eq!(told, expected);
        assert_eq!(GuestStats::of_qmp(&json!({ "last-update": 0 })), Some(None));
        assert_eq!(GuestStats::of_qmp(&json!({ "stats": {} })), None);
        assert_eq!(GuestStats::of_qmp(&json!([])), None);
    }

    #[test]
    fn a_kernels_own_words_are_read() {
        let meminfo = "MemAvailable:   700 kB\nCommitted_AS:\t300 kB\nSwapFree: 8 kB\n";
        let vmstat =
            "workingset_refault_anon 2\nworkingset_refault_file 3\npswpin 4\npgmajfault 5\n";
        let expected = KernelMemory {
            committed_bytes: 300 << 10,
            available_bytes: 700 << 10,
            swap_free_bytes: 8 << 10,
            refaulted_pages: 3,
            swapped_in_pages: 4,
            major_faults: 5,
        };
        assert_eq!(KernelMemory::of_proc(meminfo, vmstat), Some(expected));
        assert_eq!(KernelMemory::of_proc(vmstat, meminfo), None);
        let endless = format!("MemAvailable: 1\nCommitted_AS: {}\n", u64::MAX);
        assert_eq!(KernelMemory::of_proc(&endless, vmstat), None);
    }

    #[test]
    fn stale_is_what_is_older_than_it_should_be() {
        let told = |age_s, interval_s| GuestStats {
            age_s,
            interval_s,
            ..GuestStats::default()
        };
        assert!(!told(10, 2).is_stale());
        assert!(told(11, 2).is_stale());
        assert!(told(1, 0).is_stale());
        assert_eq!(GuestStats::age_s_of(u64::MAX), 0);
    }
}
