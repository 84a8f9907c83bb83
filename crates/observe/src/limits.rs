//! VMs that full tracing cannot follow: they are too large or too fast for its budget.
//!
//! A curve by traps needs pages to trap again within a window, and a list of the VM's pages. Where the list alone takes
//! more than the budget, or the budget ends before the VM comes back to its pages, first touches give the curve that traps
//! cannot.

use std::fmt;
use std::time::Duration;

use plimsoll_flow::{Period, TraceMethod};

/// Time that listing a populated page takes: 12 ms a GiB.
const LISTING: Duration = Duration::from_nanos(45);
/// Share of a period below which its window was closed early.
pub const WINDOW_MIN: f64 = 0.25;
/// Share of the traps below which reuses are too few.
const REUSES_MIN: f64 = 0.1;

/// Why full tracing of a VM shows little.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FullTracingLimit {
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
}

impl FullTracingLimit {
    /// Determines the limit that a period showed; `budget` is the vCPU time that one may take.
    pub fn of(period: &Period, budget: Option<Duration>) -> Option<Self> {
        let budget = budget.filter(|_| period.method == TraceMethod::Traps)?;
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

impl fmt::Display for FullTracingLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: &Duration| time.as_secs_f64() * 1e3;
        match self {
            Self::TooLarge { listing, budget } => write!(
                f,
                "the VM is too large for --backend trap: listing its pages takes {:.0} ms, and the budget of a period is {:.0} ms",
                ms(listing),
                ms(budget)
            )?,
            Self::TooFast { window } => write!(
                f,
                "the VM is too fast for --backend trap: the budget was used up after {:.0} ms, before it came back to its pages",
                ms(window)
            )?,
        }
        f.write_str("; use --backend first-touch")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::{TrapCounts, Undisturbed};

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
        let limit = |period: &Period| FullTracingLimit::of(period, Some(Duration::from_millis(50)));
        let large = limit(&period(16 << 18, 5000, 800, 100)).unwrap();
        assert!(matches!(large, FullTracingLimit::TooLarge { .. }));
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
            FullTracingLimit::of(&period(16 << 18, 40, 800, 790), None),
            None
        );
        let other = Period {
            method: TraceMethod::FirstTouches,
            ..period(16 << 18, 40, 800, 790)
        };
        assert_eq!(limit(&other), None);
    }
}
