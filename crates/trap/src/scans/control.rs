//! How dense accessed-page scans are, in pages and in time. Pure: the same costs give the same settings.
//!
//! Two numbers follow the VM from period to period. The *interval* is right when an eighth of the pages in use are
//! found touched by one scan: a longer one hides the curve's lower part, a shorter one pays for scans that see nothing.
//! It is corrected by how far that share is off, at most fourfold. The *scale* is set so that four
//! fifths of the time budget pay for [`SCANS_WANTED`] scans, of which everything but the faults themselves grows with
//! the pages tracked; while fewer than [`LEAST_PAGES`] tracked pages would be in use it is not coarsened further.

//!
//! **Costly scans.** A scan of idle pages costs the same for every page watched, touched or not, so a budget may pay for few, and
//! a window of so many intervals end before the target comes back to its pages. Then what was touched is not all that is in
//! use, and intervals by that rule become ever shorter. With [`ScanControl::for_costly_scans`], all watched pages count as in use while a
//! window shows hardly any page twice, and a scan should find so many touched that those which the budget pays for find each page
//! [`TIMES_SEEN`] times.

use std::time::Duration;

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
/// How often costly scans should find each page in use touched, and the largest share that one scan should find.
const TIMES_SEEN: f64 = 3.0;
const SHARE_MAX: f64 = 0.5;
/// Minimum number of costly scans that fit into a period.
const COSTLY_SCANS_MIN: u32 = 4;

/// Costs and observations of a window.
#[derive(Debug, Clone, Copy)]
pub struct WindowCost {
    /// Scans.
    pub scans: u64,
    /// Pages found touched, over all scans.
    pub touches: u64,
    /// Watched pages, and those of them found touched at least once.
    pub watched_pages: u64,
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
    is_dear: bool,
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
            is_dear: false,
        }
    }

    /// For scans that cost the same for every watched page.
    pub fn for_costly_scans(self, period: Duration) -> Self {
        Self {
            interval_max: (period / COSTLY_SCANS_MIN).max(INTERVAL_MIN),
            is_dear: true,
            ..self
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
        let is_short = self.is_dear && cost.touches < 2 * cost.distinct_pages;
        let pages_in_use = match is_short {
            true => cost.watched_pages,
            false => cost.distinct_pages,
        };
        let share_wanted = match cost.budget_seconds.filter(|_| self.is_dear) {
            Some(budget) => {
                let affordable = budget * BUDGET_SHARE / (cost.scan_seconds / scans).max(1e-9);
                (TIMES_SEEN / affordable.max(1.0)).clamp(SHARE_WANTED, SHARE_MAX)
            }
            None => SHARE_WANTED,
        };
        // One or two scans of an idle VM do not show how often to scan.
        if !self.is_interval_fixed && cost.scans >= SCANS_TELLING {
            let share = cost.touches as f64 / (scans * pages_in_use.max(1) as f64);
            let factor = (share_wanted / share.max(1e-9)).clamp(1.0 / STEP_MAX, STEP_MAX);
            self.interval = self
                .interval
                .mul_f64(factor)
                .clamp(INTERVAL_MIN, self.interval_max);
        }
        if let (RateRule::Budget, Some(budget)) = (self.rule, cost.budget_seconds) {
            let wanted = cost.arm_seconds + cost.scan_seconds / scans * SCANS_WANTED as f64;
            let factor = wanted / (budget * BUDGET_SHARE);
            let spare = pages_in_use as f64 / LEAST_PAGES as f64;
            let factor = if factor > 1.0 {
                factor.min(spare.max(1.0))
            } else {
                factor
            };
            let factor = factor.clamp(1.0 / STEP_MAX, STEP_MAX);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "clamped to 1..=SCALE_MAX before the cast"
            )]
            let scale = (f64::from(self.scale) * factor).clamp(1.0, f64::from(SCALE_MAX)) as u32;
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

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "thousands of pages"
    )]
    /// A guest that goes through `pages` again and again in `pass` seconds, scanned at 5 µs a page.
    fn cost_of_loop(control: &ScanControl, pages: f64, pass: f64) -> WindowCost {
        let watched = pages / f64::from(control.scale());
        let touched = watched * (control.interval().as_secs_f64() / pass).min(1.0);
        let a_scan = (watched * 0.5 + touched * 6.0) * 1e-6;
        WindowCost {
            scans: 20,
            touches: (touched * 20.0) as u64,
            watched_pages: watched as u64,
            distinct_pages: watched as u64,
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
                watched_pages: 20,
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

    /// A window of a target that accesses `pages` at random, each once in `pass` seconds on average, in which a scan
    /// costs `page_us` for each watched page and the budget of 50 ms ends the window.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "thousands of pages"
    )]
    fn cost_of_costly_scans(
        control: &ScanControl,
        pages: f64,
        pass: f64,
        page_us: f64,
    ) -> (WindowCost, f64) {
        let watched = (pages / f64::from(control.scale())).floor();
        let scan = watched * page_us * 1e-6;
        let interval = control.interval().as_secs_f64();
        let scans = (0.05 / scan)
            .clamp(3.0, PERIOD.as_secs_f64() / interval)
            .floor();
        let touched = |time: f64| watched * (1.0 - (-time / pass).exp());
        let cost = WindowCost {
            scans: scans as u64,
            touches: (touched(interval) * scans) as u64,
            watched_pages: watched as u64,
            distinct_pages: touched(interval * scans) as u64,
            arm_seconds: scan,
            scan_seconds: scan * scans,
            budget_seconds: Some(0.05),
        };
        (cost, scans * interval / pass)
    }

    #[test]
    fn costly_scans_are_spread_until_pages_are_seen_again() {
        for (pages, pass, page_us) in [
            (40_000.0, 0.3, 25.0),
            (40_000.0, 0.3, 2.0),
            (16_384.0, 0.02, 25.0),
        ] {
            let control = ScanControl::new(RateRule::Budget, 128, None, PERIOD, 1);
            let mut control = control.for_costly_scans(PERIOD);
            for _ in 0..12 {
                control.adapt(&cost_of_costly_scans(&control, pages, pass, page_us).0);
            }
            // It settles, and does not swing between too long and too short.
            for _ in 0..4 {
                let (cost, passes) = cost_of_costly_scans(&control, pages, pass, page_us);
                assert!((1.5..16.0).contains(&passes), "{passes} passes of {pass} s");
                assert!(cost.distinct_pages >= 100, "{cost:?}");
                control.adapt(&cost);
            }
        }
    }

    #[test]
    fn a_rate_too_dear_is_kept_where_a_coarser_one_would_see_too_little() {
        let mut control = ScanControl::new(RateRule::Budget, 128, None, PERIOD, 16);
        let dear = WindowCost {
            scans: 4,
            touches: 200,
            watched_pages: 128,
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
            watched_pages: 0,
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
