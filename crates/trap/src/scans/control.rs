//! How dense accessed-page scans are, in pages and in time. Pure: the same costs give the same settings.
//!
//! Two numbers follow the VM from period to period. The *interval* is right when an eighth of the pages in use are
//! found touched by one scan: a longer one hides the curve's lower part, a shorter one pays for scans that see nothing.
//! It is corrected by how far that share is off, at most fourfold. The *scale* is set so that four
//! fifths of the time budget pay for [`SCANS_WANTED`] scans, of which everything but the faults themselves grows with
//! the pages tracked; while fewer than [`LEAST_PAGES`] tracked pages would be in use it is not coarsened further.

use std::time::Duration;

use plimsoll_flow::Whole as _;

use crate::rate::{RateRule, SCALE_MAX};

/// Number of scans wanted in a window: each page in use is found touched about eight times.
pub const SCANS_WANTED: u64 = 64;
/// Minimum number of tracked pages in use for a sample to be representative.
const LEAST_PAGES: u64 = 128;
/// Share of the pages in use that should be found touched by one scan.
const SHARE_WANTED: f64 = 0.125;
/// Shortest time from scan to scan.
const INTERVAL_MIN: Duration = Duration::from_millis(1);
/// Time from scan to scan in the first period.
const INTERVAL_FIRST: Duration = Duration::from_millis(10);
/// Minimum number of scans that fit into a period.
const SCANS_MIN: u32 = 16;
/// Number of scans in a period from which the interval follows what they saw.
const SCANS_TELLING: u64 = 3;
/// Largest factor that either number changes by from one period to the next.
const STEP_MAX: f64 = 4.0;
/// Share of the budget that the scans wanted may take.
const BUDGET_SHARE: f64 = 0.8;

/// Costs and observations of a window.
#[derive(Debug, Clone, Copy)]
pub struct WindowCost {
    /// Scans.
    pub scans: u64,
    /// Pages found touched, over all scans.
    pub touches: u64,
    /// Watched pages found touched at least once.
    pub distinct_pages: u64,
    /// Time for unmapping the sample.
    pub arm_seconds: f64,
    /// Time for scans and faults.
    pub scan_seconds: f64,
    /// Time budget of a period; `None` for no bound.
    pub budget_seconds: Option<f64>,
}

/// Sets rate and interval from period to period.
#[derive(Debug, Clone, Copy)]
pub struct ScanControl {
    rule: RateRule,
    scale: u32,
    interval: Duration,
    interval_max: Duration,
    is_interval_fixed: bool,
    /// The scale is a multiple of it.
    step: u32,
}

impl ScanControl {
    /// Starts at one page in `scale`, rounded up to a multiple of `step`, which keeps tracked pages apart, and at `interval`,
    /// which stays if it is given.
    pub fn new(
        rule: RateRule,
        scale: u32,
        interval: Option<Duration>,
        period: Duration,
        step: u32,
    ) -> Self {
        let interval_max = (period / SCANS_MIN).max(INTERVAL_MIN);
        Self {
            rule,
            scale: multiple(scale, step),
            interval: interval.unwrap_or(INTERVAL_FIRST.min(interval_max)),
            interval_max,
            is_interval_fixed: interval.is_some(),
            step,
        }
    }

    /// T: one page in this many is tracked; a multiple of the step.
    pub fn scale(&self) -> u32 {
        self.scale
    }

    /// Time from scan to scan.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// Sets both for the next period.
    pub fn adapt(&mut self, cost: &WindowCost) {
        if cost.scans == 0 {
            return;
        }
        let scans = cost.scans as f64;
        // One or two scans of an idle VM do not show how often to scan.
        if !self.is_interval_fixed && cost.scans >= SCANS_TELLING {
            let share = cost.touches as f64 / (scans * cost.distinct_pages.max(1) as f64);
            let factor = (SHARE_WANTED / share.max(1e-9)).clamp(1.0 / STEP_MAX, STEP_MAX);
            self.interval = self
                .interval
                .mul_f64(factor)
                .clamp(INTERVAL_MIN, self.interval_max);
        }
        if let (RateRule::Budget, Some(budget)) = (self.rule, cost.budget_seconds) {
            let wanted = cost.arm_seconds + cost.scan_seconds / scans * SCANS_WANTED as f64;
            let factor = wanted / (budget * BUDGET_SHARE);
            let spare = cost.distinct_pages as f64 / LEAST_PAGES as f64;
            let factor = if factor > 1.0 {
                factor.min(spare.max(1.0))
            } else {
                factor
            };
            let factor = factor.clamp(1.0 / STEP_MAX, STEP_MAX);
            let scale =
                u32::whole((f64::from(self.scale) * factor).clamp(1.0, f64::from(SCALE_MAX)));
            self.scale = multiple(scale, self.step);
        }
    }
}

/// Rounds up.
fn multiple(scale: u32, step: u32) -> u32 {
    scale.clamp(1, SCALE_MAX).next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_secs(5);

    /// A guest that goes through `pages` again and again in `pass` seconds, scanned at 5 µs a page.
    fn cost_of_loop(control: &ScanControl, pages: f64, pass: f64) -> WindowCost {
        let watched = pages / f64::from(control.scale());
        let touched = watched * (control.interval().as_secs_f64() / pass).min(1.0);
        let a_scan = (watched * 0.5 + touched * 6.0) * 1e-6;
        WindowCost {
            scans: 20,
            touches: u64::whole(touched * 20.0),
            distinct_pages: u64::whole(watched),
            arm_seconds: watched * 5e-6,
            scan_seconds: a_scan * 20.0,
            budget_seconds: Some(0.05),
        }
    }

    #[test]
    fn an_idle_vm_is_not_scanned_ever_more_closely() {
        let mut control = ScanControl::new(RateRule::Budget, 128, None, PERIOD, 16);
        let before = control.interval();
        for _ in 0..10 {
            control.adapt(&WindowCost {
                scans: 1,
                touches: 20,
                distinct_pages: 20,
                arm_seconds: 1.0,
                scan_seconds: 0.001,
                budget_seconds: Some(0.05),
            });
        }
        assert_eq!((control.scale(), control.interval()), (128, before));
    }

    #[test]
    fn a_loop_is_scanned_eight_times_a_pass_within_the_budget() {
        for (pages, pass) in [(60_000.0, 0.05), (8_000.0, 0.02), (60_000.0, 1.0)] {
            let mut control = ScanControl::new(RateRule::Budget, 128, None, PERIOD, 16);
            for _ in 0..10 {
                control.adapt(&cost_of_loop(&control, pages, pass));
            }
            let scans = pass / control.interval().as_secs_f64();
            assert!((6.0..=10.0).contains(&scans), "{scans} scans a pass");
            let cost = cost_of_loop(&control, pages, pass);
            let wanted = cost.arm_seconds + cost.scan_seconds / 20.0 * 64.0;
            assert!(wanted <= 0.05, "{wanted} s for the scans wanted");
        }
    }

    #[test]
    fn a_rate_too_dear_is_kept_where_a_coarser_one_would_see_too_little() {
        let mut control = ScanControl::new(RateRule::Budget, 128, None, PERIOD, 16);
        let dear = WindowCost {
            scans: 4,
            touches: 200,
            distinct_pages: 128,
            arm_seconds: 0.01,
            scan_seconds: 0.04,
            budget_seconds: Some(0.05),
        };
        control.adapt(&dear);
        assert_eq!(control.scale(), 128);
        control.adapt(&WindowCost {
            distinct_pages: 1280,
            ..dear
        });
        assert_eq!(control.scale(), 512);
    }

    #[test]
    fn what_is_given_stays_and_idleness_is_scanned_ever_more_rarely() {
        let idle = WindowCost {
            scans: 10,
            touches: 0,
            distinct_pages: 0,
            arm_seconds: 0.001,
            scan_seconds: 0.001,
            budget_seconds: Some(0.05),
        };
        let given = Duration::from_millis(3);
        let mut control = ScanControl::new(RateRule::Fixed, 20, Some(given), PERIOD, 16);
        control.adapt(&idle);
        assert_eq!((control.scale(), control.interval()), (32, given));
        let mut control = ScanControl::new(RateRule::Budget, 128, None, PERIOD, 16);
        for _ in 0..10 {
            control.adapt(&idle);
        }
        assert_eq!((control.scale(), control.interval()), (16, PERIOD / 16));
    }
}
