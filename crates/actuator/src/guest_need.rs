//! What a guest needs of the memory that it has, by its own statistics.
//!
//! A guest can give what its kernel calls available: unused memory and page cache. Nothing but swap takes the rest, and
//! a guest without swap that loses some of it kills processes. The statistics are not trusted: a guest that reports too
//! much to be available harms itself, and one that reports too little keeps what it has, which a balloon that does not
//! move achieves as well.
//!
//! The age of a report that was made before the first poll is known by the time of day alone, which may have been set
//! since, so that the first report is not used.
//!
//! A report is set against the size of the time at which it was made: a balloon that inflates has taken some of what an
//! older report calls available.

use std::ops::RangeInclusive;

use plimsoll_flow::{MissRatioCurve, PageCount, PageSize};
use plimsoll_vm::GuestStats;

/// Age from which statistics are not used, in s, even if the guest reports at longer intervals.
pub const STATS_AGE_MAX_S: u64 = 15;
/// Room that a guest keeps of what it has available: a share of its RAM, with its limits in bytes.
const SLACK_RAM_SHARE: u64 = 16;
const SLACK_BYTES: (u64, u64) = (16 << 20, 1 << 30);

/// Memory that a VM keeps available when it is shrunk, in bytes: a sixteenth of its RAM, 16 MiB to 1 GiB.
pub fn slack_bytes(ram_bytes: u64) -> u64 {
    (ram_bytes / SLACK_RAM_SHARE).clamp(SLACK_BYTES.0, SLACK_BYTES.1)
}

/// A guest's memory by its newest report.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GuestNeed {
    /// The part of the VM's own memory that the guest cannot give, without its swap.
    pub needed_bytes: u64,
    /// By how much that grew since the report before; 0 without one.
    pub growth_bytes: u64,
    /// Memory available to its processes.
    pub available_bytes: u64,
    /// The part of it that is unused; 0 if the guest does not report that.
    pub free_bytes: u64,
    /// Page faults that required disk I/O, a second, between the last two reports.
    pub major_faults_per_second: Option<f64>,
    /// Processes killed for lack of memory since it booted, if it reports that.
    pub oom_kills: Option<u64>,
}

impl GuestNeed {
    /// The need of a guest with `own_bytes` of memory by one report; `None` if it does not report what is available.
    pub fn of(stats: &GuestStats, own_bytes: u64) -> Option<Self> {
        let available_bytes = stats.available_bytes?;
        Some(Self {
            needed_bytes: own_bytes.saturating_sub(available_bytes),
            growth_bytes: 0,
            available_bytes,
            free_bytes: stats.free_bytes.unwrap_or(0).min(available_bytes),
            major_faults_per_second: None,
            oom_kills: stats.oom_kills,
        })
    }

    /// Converts a curve of the pages that the VM used while it was traced into one of the VM's sizes, of which it had
    /// `own_bytes`, by adding the memory that its guest neither uses nor can give. `swap_bytes` is the size of the guest's
    /// known swap, which takes such memory.
    ///
    /// A curve of used pages would evict that memory first, but a balloon does not get it: what a guest gives is page cache
    /// and unused memory.
    pub fn in_vm_sizes(
        &self,
        curve: MissRatioCurve,
        own_bytes: u64,
        swap_bytes: u64,
    ) -> MissRatioCurve {
        let used_bytes = curve.touched_size().to_bytes(PageSize::FOUR_KIB);
        let idle = self.idle_bytes(own_bytes, used_bytes, swap_bytes);
        let [least, most] = [idle.start(), idle.end()]
            .map(|bytes| PageCount::from_bytes(*bytes, PageSize::FOUR_KIB));
        curve.shifted(least, most)
    }

    /// The memory, at least and at most, that the guest neither uses nor can give, if it used `used_bytes`: parts of its
    /// kernel, and of processes that are idle.
    ///
    /// Which of the memory that is not used is of which kind is not known. It is no more than the guest cannot give, and none
    /// of what it reports as unused; and no less than all that it can give would leave.
    fn idle_bytes(&self, own_bytes: u64, used_bytes: u64, swap_bytes: u64) -> RangeInclusive<u64> {
        let idle = own_bytes.saturating_sub(used_bytes);
        let gives = self.available_bytes.saturating_add(swap_bytes);
        let most = self.needed_bytes.saturating_sub(swap_bytes);
        let most = most.min(idle.saturating_sub(self.free_bytes));
        idle.saturating_sub(gives).min(most)..=most
    }
}

/// Sets reports against sizes; to be called at every poll.
#[derive(Debug, Default)]
pub(crate) struct NeedTracker {
    last: Option<(GuestStats, GuestNeed)>,
    /// Date of the report at the first poll.
    first_unix_s: Option<u64>,
    /// Size at the last poll.
    actual_bytes: u64,
}

impl NeedTracker {
    /// The guest's need at a poll that found this size; `None` without statistics, or if they are stale.
    pub fn observe(&mut self, stats: Option<&GuestStats>, actual_bytes: u64) -> Option<GuestNeed> {
        // A new report was made since the last poll, while the VM had at most this.
        let largest_bytes = self.actual_bytes.max(actual_bytes);
        self.actual_bytes = actual_bytes;
        let stats = stats?;
        let first_unix_s = *self.first_unix_s.get_or_insert(stats.updated_unix_s);
        if self.last.is_none() && stats.updated_unix_s == first_unix_s {
            return None;
        }
        if stats.is_stale() || stats.age_s > STATS_AGE_MAX_S {
            return None;
        }
        if let Some((last, need)) = &self.last
            && last.updated_unix_s == stats.updated_unix_s
        {
            return Some(*need);
        }
        let mut need = GuestNeed::of(stats, largest_bytes)?;
        if let Some((last, before)) = &self.last {
            need.growth_bytes = need.needed_bytes.saturating_sub(before.needed_bytes);
            need.major_faults_per_second = faults_per_second(last, stats);
        }
        self.last = Some((*stats, need));
        Some(need)
    }
}

/// `None` if the counter or the clock went back.
fn faults_per_second(before: &GuestStats, after: &GuestStats) -> Option<f64> {
    let faults = after.major_faults?.checked_sub(before.major_faults?)?;
    let seconds = after.updated_unix_s.checked_sub(before.updated_unix_s)?;
    Some(faults as f64 / seconds.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use plimsoll_flow::{CurvePoint, MissesPerSecond};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn report(updated_unix_s: u64, available_mib: u64, major_faults: u64) -> GuestStats {
        GuestStats {
            updated_unix_s,
            interval_s: 2,
            available_bytes: Some(available_mib * MIB),
            major_faults: Some(major_faults),
            ..GuestStats::default()
        }
    }

    #[test]
    fn a_report_is_set_against_the_size_before_it_not_against_what_a_balloon_took_since() {
        let mut tracker = NeedTracker::default();
        let mut needed_mib = |stats: Option<&GuestStats>, actual_mib: u64| {
            let need = tracker.observe(stats, actual_mib * MIB);
            need.map(|need| need.needed_bytes / MIB)
        };
        assert_eq!(needed_mib(None, 512), None);
        // Nothing shows how old the first report is.
        assert_eq!(needed_mib(Some(&report(8, 400, 0)), 512), None);
        assert_eq!(needed_mib(Some(&report(8, 400, 0)), 512), None);
        let first = report(10, 300, 0);
        assert_eq!(needed_mib(Some(&first), 512), Some(212));
        // The balloon inflates, and the report is the old one.
        assert_eq!(needed_mib(Some(&first), 400), Some(212));
        assert_eq!(needed_mib(Some(&first), 300), Some(212));
        // The next one may be of any time since.
        assert_eq!(needed_mib(Some(&report(12, 88, 0)), 300), Some(212));
        assert_eq!(needed_mib(Some(&report(14, 80, 0)), 290), Some(220));
        // It is no less than nothing, whatever the guest reports.
        let lie = GuestStats {
            available_bytes: Some(u64::MAX),
            ..report(16, 0, 0)
        };
        assert_eq!(needed_mib(Some(&lie), 290), Some(0));
    }

    #[test]
    fn stale_reports_and_those_without_available_memory_are_not_used() {
        let mut tracker = NeedTracker::default();
        assert_eq!(tracker.observe(Some(&report(8, 300, 0)), MIB), None);
        let old = |age_s, interval_s| GuestStats {
            age_s,
            interval_s,
            ..report(10, 300, 0)
        };
        assert!(tracker.observe(Some(&old(10, 2)), MIB).is_some());
        assert_eq!(tracker.observe(Some(&old(11, 2)), MIB), None);
        assert!(tracker.observe(Some(&old(15, 60)), MIB).is_some());
        assert_eq!(tracker.observe(Some(&old(16, 60)), MIB), None);
        let silent = GuestStats {
            available_bytes: None,
            ..report(20, 0, 0)
        };
        assert_eq!(tracker.observe(Some(&silent), MIB), None);
    }

    #[test]
    fn growth_is_that_since_the_report_before_and_shrinking_is_none() {
        let mut tracker = NeedTracker::default();
        let mut growth_mib = |stats: GuestStats| {
            let need = tracker.observe(Some(&stats), 512 * MIB);
            need.map(|need| need.growth_bytes / MIB)
        };
        assert_eq!(growth_mib(report(10, 400, 0)), None);
        assert_eq!(growth_mib(report(12, 400, 0)), Some(0));
        assert_eq!(growth_mib(report(14, 300, 0)), Some(100));
        assert_eq!(growth_mib(report(14, 300, 0)), Some(100));
        assert_eq!(growth_mib(report(16, 350, 0)), Some(0));
    }

    #[test]
    fn what_a_guest_neither_uses_nor_can_give_is_known_within_what_it_reports() {
        let idle_mib = |own: u64, (available, free): (u64, u64), used: u64, swap: u64| {
            let stats = GuestStats {
                free_bytes: Some(free * MIB),
                ..report(10, available, 0)
            };
            let need = GuestNeed::of(&stats, own * MIB).unwrap();
            let idle = need.idle_bytes(own * MIB, used * MIB, swap * MIB);
            (idle.start() / MIB, idle.end() / MIB)
        };
        // All of its page cache is in use: most of what is not used is its kernel's.
        assert_eq!(idle_mib(256, (190, 5), 195, 0), (0, 56));
        // It is idle, and its page cache too.
        assert_eq!(idle_mib(4096, (3600, 100), 200, 0), (296, 496));
        // All of its processes' memory is in use, and the rest is free.
        assert_eq!(idle_mib(4096, (2000, 1990), 2080, 0), (16, 26));
        // The same memory of idle processes is taken by swap.
        assert_eq!(idle_mib(4096, (96, 90), 1000, 0), (3000, 3006));
        assert_eq!(idle_mib(4096, (96, 90), 1000, 8192), (0, 0));
        // False reports: neither is there less than no such memory, nor more than is not used.
        assert_eq!(idle_mib(256, (1 << 40, 1 << 40), 195, 0), (0, 0));
        assert_eq!(idle_mib(256, (0, 1 << 40), 195, 0), (61, 61));
        assert_eq!(idle_mib(256, (0, 0), 1000, 0), (0, 0));
    }

    /// Also if the curve ends with the size of all pages with contents, idle ones among them.
    #[test]
    fn pages_with_contents_that_were_not_touched_count_as_idle() {
        let mib = |mib: u64| PageCount::from_bytes(mib * MIB, PageSize::FOUR_KIB);
        let point = |size_mib, expected: f64| CurvePoint {
            size: mib(size_mib),
            miss_ratio: 0.5,
            low: 0.0,
            high: 1.0,
            misses: Some(MissesPerSecond {
                low: expected,
                expected,
                high: expected,
            }),
        };
        let stats = GuestStats {
            free_bytes: Some(56 * MIB),
            ..report(8, 112, 0)
        };
        let need = GuestNeed::of(&stats, 512 * MIB).unwrap();
        for points in [
            vec![point(100, 9.0)],
            vec![point(100, 9.0), point(456, 0.0)],
        ] {
            let curve = MissRatioCurve::new(points, 10).unwrap();
            let curve = need.in_vm_sizes(curve, 512 * MIB, 0);
            assert_eq!(curve.touched_size(), mib(456));
            assert_eq!(curve.uncertain(), mib(56));
        }
    }

    #[test]
    fn faults_are_counted_between_reports_and_a_counter_that_goes_back_is_no_rate() {
        let mut tracker = NeedTracker::default();
        let mut rate = |stats: GuestStats| {
            let need = tracker.observe(Some(&stats), 512 * MIB)?;
            need.major_faults_per_second
        };
        assert_eq!(rate(report(8, 300, 0)), None);
        assert_eq!(rate(report(10, 300, 100)), None);
        assert_eq!(rate(report(12, 300, 150)), Some(25.0));
        assert_eq!(rate(report(14, 300, 50)), None);
        assert_eq!(rate(report(13, 300, 60)), None);
    }
}
