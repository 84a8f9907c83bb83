//! Sums over the periods of a trace.

use std::time::Duration;

use plimsoll_flow::{Period, ScanCounts, TraceMethod};

/// Sums over all periods.
#[derive(Debug, Default)]
pub struct Totals {
    /// Number of periods.
    pub periods: u64,
    pub(super) traps: u64,
    /// Scans, and the touches that they found.
    pub(super) scans: u64,
    pub(super) touches: u64,
    pub(super) rearmed_pages: u64,
    pub(super) lost: u64,
    pub(super) first_touches_unseen: u64,
    pub(super) length: Duration,
    pub(super) trap_time: Duration,
    pub(super) rearm_time: Duration,
    pub(super) collect_time: Duration,
    overhead_seconds: f64,
    /// Whether the count of all references corrected what was sampled.
    pub(super) corrected: bool,
    /// Of the last period.
    pub(super) kinds: Option<ScanCounts>,
    pub(super) tracked_pages: u64,
    /// Smallest resolution of any period so far, in pages: no curve is defined below it.
    pub(super) resolution_pages: Option<u64>,
}

impl Totals {
    pub(super) fn add(&mut self, report: &Period) {
        self.periods += 1;
        self.traps += report.traps.taken;
        self.touches += report.scans.touches;
        self.scans += report.scans.scans;
        self.corrected |= report.scans.touches_of_all > 0;
        self.rearmed_pages += report.rearmed_pages;
        self.lost += report.losses.lost();
        self.first_touches_unseen += report.losses.first_touches_unseen;
        self.length += report.length;
        self.trap_time += report.fault_time;
        self.rearm_time += report.arm_time;
        self.collect_time += report.collect_time;
        self.overhead_seconds += report.overhead_ratio * report.length.as_secs_f64();
        self.kinds = reports_kinds(report.method).then_some(report.scans);
        self.tracked_pages = report.tracked_pages;
        let resolution = report.resolution_pages();
        // A period of scans in which nothing was touched resolves nothing.
        if resolution > 0 {
            self.resolution_pages = Some(
                self.resolution_pages
                    .map_or(resolution, |pages| pages.min(resolution)),
            );
        }
    }

    pub(super) fn overhead_ratio(&self) -> f64 {
        self.overhead_seconds / self.length.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// Whether a method reports in which kinds of memory its sampled pages lie.
pub(super) fn reports_kinds(method: TraceMethod) -> bool {
    matches!(method, TraceMethod::IdlePages | TraceMethod::Damon)
}
