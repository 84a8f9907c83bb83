//! VMs that a backend cannot follow within its budget.
//!
//! A curve by traps needs pages to trap again within a window, and a list of the VM's pages. Where the list alone takes
//! more than the budget, or the budget ends before the VM comes back to its pages, first touches give the curve that traps
//! cannot. First touches need no list, but what they cost besides samples (waking up, checking the pages that wait,
//! counting the VM's pages, estimating) can take more than a very small budget, and then no page is drawn.
//!
//! Of very few tracked pages, each stands for more memory than the share at which a working set is read.

use std::fmt;
use std::time::Duration;

use plimsoll_flow::{Period, TraceMethod, WorkingSet};
use plimsoll_trap::{BackendRow, Yield};

/// Time that listing a populated page takes: 12 ms a GiB.
const LISTING: Duration = Duration::from_nanos(45);
/// Share of a period below which its window was closed early.
pub const WINDOW_MIN: f64 = 0.25;
/// Share of the traps below which reuses are too few.
const REUSES_MIN: f64 = 0.1;

/// Tracked pages below which no size is known, unless all pages are tracked: each is more than the share of misses at which
/// a working set is read.
const PAGES_MIN: u64 = 20;
const _: () = assert!(PAGES_MIN as f64 * WorkingSet::MISS_RATIO >= 1.0);

/// Whether so few pages were tracked in a period that it shows no size.
pub fn has_few_pages(period: &Period) -> bool {
    let is_sample = match BackendRow::of(period.method).yields {
        Yield::References | Yield::Scans => period.scale > 1,
        // The one has bands, the others average over periods, or know how many there are.
        Yield::FirstTouches | Yield::Sample | Yield::Stream => false,
    };
    is_sample && period.tracked_pages < PAGES_MIN
}

/// Why a trace of a VM shows little.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TracingLimit {
    /// Listing its pages takes more than the budget of a period.
    TooLarge {
        /// Time of a list.
        listing: Duration,
        /// Budget of a period.
        budget: Duration,
    },
    /// The budget ended before the VM came back to its pages.
    TooFast {
        /// How long pages were armed.
        window: Duration,
    },
    /// All that first touches cost besides samples takes more than the budget of a period.
    FixedCosts {
        /// Time that it took, over the time that the VM's vCPUs had.
        ratio: f64,
        /// The budget, as such a share.
        budget_ratio: f64,
    },
    /// Too few pages are tracked.
    FewPages {
        /// Their number, below 20.
        tracked_pages: u64,
    },
}

impl TracingLimit {
    /// Determines the limit that a period showed; `budget` is the vCPU time that one may take.
    pub fn of(period: &Period, budget: Option<Duration>) -> Option<Self> {
        let of_budget = budget.and_then(|budget| match period.method {
            TraceMethod::Traps => Self::of_traps(period, budget),
            TraceMethod::FirstTouches => Self::of_first_touches(period, budget),
            _ => None,
        });
        let tracked_pages = period.tracked_pages;
        let few = (period.populated_pages > 0 && has_few_pages(period))
            .then_some(Self::FewPages { tracked_pages });
        of_budget.or(few)
    }

    fn of_first_touches(period: &Period, budget: Duration) -> Option<Self> {
        // A burst of traps is paid back without draws too, but not by more than the budget.
        let is_starved = period.samples.drawn == 0 && period.arm_time > budget;
        let taken = (period.fault_time + period.arm_time).as_secs_f64();
        is_starved.then(|| Self::FixedCosts {
            ratio: period.overhead_ratio * period.arm_time.as_secs_f64() / taken,
            budget_ratio: period.overhead_ratio * budget.as_secs_f64() / taken,
        })
    }

    fn of_traps(period: &Period, budget: Duration) -> Option<Self> {
        let listing = LISTING.mul_f64(period.populated_pages as f64);
        if listing > budget {
            return Some(Self::TooLarge { listing, budget });
        }
        let taken = period.traps.taken;
        let reuses = taken.saturating_sub(period.distinct_pages);
        let is_early = period.window.as_secs_f64() < period.length.as_secs_f64() * WINDOW_MIN;
        let is_too_fast =
            period.budget_exhausted && is_early && (reuses as f64) < taken as f64 * REUSES_MIN;
        is_too_fast.then_some(Self::TooFast {
            window: period.window,
        })
    }
}

impl fmt::Display for TracingLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: &Duration| time.as_secs_f64() * 1e3;
        let other = "; use --backend first-touch";
        match self {
            Self::TooLarge { listing, budget } => write!(
                f,
                "the VM is too large for --backend trap: listing its pages takes {:.0} ms, and the budget of a period is {:.0} ms{other}",
                ms(listing),
                ms(budget)
            ),
            Self::TooFast { window } => write!(
                f,
                "the VM is too fast for --backend trap: the budget was used up after {:.0} ms, before it came back to its pages{other}",
                ms(window)
            ),
            Self::FixedCosts {
                ratio,
                budget_ratio,
            } => write!(
                f,
                "nothing is learned, because the budget is too small for --backend first-touch: its fixed costs are {} of the VM's CPU time, \
                 and the budget is {}; with one of {} half of it is left for samples",
                percent(*ratio),
                percent(*budget_ratio),
                percent((ratio * 2.0).min(1.0))
            ),
            Self::FewPages { tracked_pages } => write!(
                f,
                "no size is known from fewer than {PAGES_MIN} tracked pages, and {tracked_pages} are tracked; raise --rate or --budget"
            ),
        }
    }
}

/// A share as a percentage with two digits: budgets can be far below 1 %.
fn percent(share: f64) -> String {
    let percent = share * 100.0;
    // Without the zeros of a fixed number of decimals.
    let rounded = format!("{percent:.1e}").parse().unwrap_or(percent);
    format!("{rounded} %")
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::{TrapCounts, Undisturbed};

    #[test]
    fn a_budget_below_the_fixed_costs_of_first_touches_is_stated_with_what_it_would_need() {
        let second = Duration::from_secs(1);
        let starved = Period {
            arm_time: Duration::from_micros(3200),
            fault_time: Duration::from_micros(800),
            // Two vCPUs.
            overhead_ratio: 0.002,
            ..Period::empty(TraceMethod::FirstTouches, second, second)
        };
        let limit = |period: &Period, us| TracingLimit::of(period, Some(Duration::from_micros(us)));
        let said = limit(&starved, 200).unwrap().to_string();
        assert!(
            said.contains("0.16 % of") && said.contains("is 0.01 %;") && said.contains("0.32 %"),
            "{said}"
        );
        // What traps took is paid back.
        assert_eq!(limit(&starved, 3300), None);
        let mut sampled = starved;
        sampled.samples.drawn = 1;
        assert_eq!(limit(&sampled, 200), None);
        assert_eq!(TracingLimit::of(&starved, None), None);
    }

    fn period(populated_pages: u64, window_ms: u64, taken: u64, distinct_pages: u64) -> Period {
        Period {
            undisturbed: Undisturbed::default(),
            scale: 128,
            populated_pages,
            tracked_pages: 1000,
            distinct_pages,
            traps: TrapCounts {
                taken,
                ..TrapCounts::default()
            },
            overhead_ratio: 0.01,
            budget_exhausted: window_ms < 5000,
            ..Period::empty(
                TraceMethod::Traps,
                Duration::from_secs(5),
                Duration::from_millis(window_ms),
            )
        }
    }

    #[test]
    fn a_vm_too_large_or_too_fast_is_named_and_no_other() {
        let limit = |period: &Period| TracingLimit::of(period, Some(Duration::from_millis(50)));
        let large = limit(&period(16 << 18, 5000, 800, 100)).unwrap();
        assert!(matches!(large, TracingLimit::TooLarge { .. }));
        let fast = limit(&period(1 << 18, 40, 800, 790)).unwrap();
        let said = fast.to_string();
        assert!(
            said.contains("after 40 ms") && said.ends_with("--backend first-touch"),
            "{said}"
        );
        // Reuses in a window that the budget ended.
        assert_eq!(limit(&period(1 << 18, 40, 800, 100)), None);
        // An idle VM.
        assert_eq!(limit(&period(1 << 18, 5000, 8, 8)), None);
        // Without a budget there is no limit.
        assert_eq!(
            TracingLimit::of(&period(16 << 18, 40, 800, 790), None),
            None
        );
        let other = Period {
            method: TraceMethod::FirstTouches,
            arm_time: Duration::from_millis(10),
            ..period(16 << 18, 40, 800, 790)
        };
        assert_eq!(limit(&other), None);
    }
}
