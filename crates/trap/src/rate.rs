//! The tracking rate: how many pages each watched page represents.
//!
//! At a tracking rate of 1/T ([`scale`](RateControl::scale) T), one page in T is watched. Once a
//! period T is set anew from the cost and the observations of the period:
//!
//! * [`RateRule::Fixed`] leaves it.
//! * [`RateRule::Linear`] adds 128 when the period cost too much, subtracts 64 when it observed too few
//!   pages ([AET] §3.4, equations 3 and 5).
//! * [`RateRule::Log`] adds `128 (ln(r / Sr) + 1)` instead, so that a rate far off is corrected in a
//!   few periods (equation 4). The natural logarithm reproduces the paper's 4 periods from 1/128 to 1/1280.
//! * [`RateRule::Budget`] sets T in one step so that a stated share of the traps that the time budget
//!   pays for falls on first touches, which leaves the rest for the reuses that a curve is made of.
//!
//! The paper's r is traps per memory access, and Sr = 1e-6. Without a hardware counter of accesses
//! (most clouds, and emulation) `r / Sr` is the time that traps took over the time they may take.

use plimsoll_flow::Whole as _;

/// Step by which the published rules lower the tracking rate.
const STEP_UP: f64 = 128.0;
/// Step by which they raise it.
const STEP_DOWN: u32 = 64;
/// Share of the affordable traps that first touches may take; see [`RateRule::Budget`].
/// A fifth leaves room for a working set that grows threefold between two periods.
const FIRST_TOUCH_SHARE: f64 = 0.2;
/// How much the budget rule widens the rate when a window closed before any reuse was observed.
const WIDEN: u32 = 4;
/// Largest T: beyond it a page represents a GiB.
pub const SCALE_MAX: u32 = 1 << 18;

/// How the tracking rate follows the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RateRule {
    /// Not at all.
    Fixed,
    /// In fixed steps.
    Linear,
    /// In steps that grow with the logarithm of the excess.
    Log,
    /// Straight to what the time budget pays for.
    #[default]
    Budget,
}

/// Observations of a period that the tracking rate depends on.
#[derive(Debug, Clone, Copy)]
pub struct PeriodCost {
    /// Time that traps took over the time they may take, had the whole period been watched.
    pub pressure: f64,
    /// Traps that the time budget of a period pays for, besides making the sample inaccessible.
    pub affordable_traps: f64,
    /// Traps taken.
    pub traps: u64,
    /// Watched pages that trapped at least once.
    pub distinct_pages: u64,
    /// Whether the budget ran out before the period did.
    pub budget_ran_out: bool,
    /// Minimum T at which making the sample inaccessible stays within its part of the budget.
    pub scale_min: u32,
}

/// Sets the tracking rate from period to period. Pure: the same costs give the same rates.
#[derive(Debug, Clone, Copy)]
pub struct RateControl {
    rule: RateRule,
    scale: u32,
    least_pages: u64,
}

impl RateControl {
    /// Starts at one page in `scale`, and wants at least `least_pages` watched pages to trap.
    pub fn new(rule: RateRule, scale: u32, least_pages: u64) -> Self {
        Self {
            rule,
            scale: scale.clamp(1, SCALE_MAX),
            least_pages,
        }
    }

    /// T: one page in this many is watched.
    pub fn scale(&self) -> u32 {
        self.scale
    }

    /// Sets the rate for the next period.
    pub fn adapt(&mut self, cost: &PeriodCost) {
        let scale = f64::from(self.scale);
        let next = match self.rule {
            RateRule::Fixed => return,
            RateRule::Linear if cost.pressure > 1.0 => scale + STEP_UP,
            RateRule::Log if cost.pressure > 1.0 => scale + STEP_UP * (cost.pressure.ln() + 1.0),
            RateRule::Linear | RateRule::Log if cost.distinct_pages < self.least_pages => {
                f64::from(self.scale.saturating_sub(STEP_DOWN))
            }
            RateRule::Linear | RateRule::Log => return,
            RateRule::Budget => self.within_budget(cost),
        };
        let next = u32::whole(next.clamp(1.0, f64::from(SCALE_MAX)).round());
        self.scale = next.max(if self.rule == RateRule::Budget {
            cost.scale_min
        } else {
            1
        });
    }

    fn within_budget(&self, cost: &PeriodCost) -> f64 {
        let scale = f64::from(self.scale);
        let wanted = (cost.affordable_traps * FIRST_TOUCH_SHARE).max(self.least_pages as f64);
        let reuses = cost.traps - cost.distinct_pages.min(cost.traps);
        if cost.budget_ran_out && reuses * 8 < cost.traps {
            // The window closed on first touches alone: the VM touches more than was observed.
            return scale * f64::from(WIDEN);
        }
        let touched_pages = cost.distinct_pages as f64 * scale;
        // An idle VM would be watched whole; approach that in steps, because its next touches are unknown.
        (touched_pages / wanted).max(scale / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM whose traps fall as 1/T: at T = 128 it exceeds the bound `excess` times.
    fn periods_until(rule: RateRule, scale: u32, excess: f64) -> usize {
        let mut control = RateControl::new(rule, 128, 0);
        for period in 1.. {
            let pressure = excess * 128.0 / f64::from(control.scale());
            control.adapt(&PeriodCost {
                pressure,
                affordable_traps: 1000.0,
                traps: 0,
                distinct_pages: 0,
                budget_ran_out: false,
                scale_min: 1,
            });
            if control.scale() >= scale {
                return period;
            }
        }
        unreachable!()
    }

    #[test]
    fn gems_of_the_paper_takes_nine_linear_periods_and_four_logarithmic_ones() {
        // Table 3: a trap ratio of 1.45e-5 where 1e-6 is wanted.
        assert_eq!(periods_until(RateRule::Linear, 1280, 14.5), 9);
        assert_eq!(periods_until(RateRule::Log, 1280, 14.5), 4);
    }

    fn cost(traps: u64, distinct_pages: u64) -> PeriodCost {
        PeriodCost {
            pressure: 0.5,
            affordable_traps: 1000.0,
            traps,
            distinct_pages,
            budget_ran_out: false,
            scale_min: 1,
        }
    }

    #[test]
    fn too_few_pages_raise_the_rate_by_a_step_but_never_above_one() {
        let mut control = RateControl::new(RateRule::Log, 128, 100);
        for expected in [64, 1, 1] {
            control.adapt(&cost(50, 50));
            assert_eq!(control.scale(), expected);
        }
        control.adapt(&cost(500, 500));
        assert_eq!(control.scale(), 1);
    }

    #[test]
    fn the_budget_rule_aims_at_a_fifth_of_the_traps_it_can_pay_for() {
        let mut control = RateControl::new(RateRule::Budget, 128, 100);
        // 64 000 pages touched, 200 watched pages wanted.
        control.adapt(&cost(900, 500));
        assert_eq!(control.scale(), 320);
    }

    #[test]
    fn a_window_without_reuse_widens_the_rate_at_once() {
        let mut control = RateControl::new(RateRule::Budget, 128, 100);
        control.adapt(&PeriodCost {
            budget_ran_out: true,
            ..cost(1000, 990)
        });
        assert_eq!(control.scale(), 512);
    }

    #[test]
    fn an_idle_vm_is_approached_in_halves_down_to_what_the_scan_may_cost() {
        let mut control = RateControl::new(RateRule::Budget, 128, 100);
        for expected in [64, 32, 24, 24] {
            control.adapt(&PeriodCost {
                scale_min: 24,
                ..cost(0, 0)
            });
            assert_eq!(control.scale(), expected);
        }
    }

    #[test]
    fn a_fixed_rate_stays() {
        let mut control = RateControl::new(RateRule::Fixed, 16, 100);
        control.adapt(&PeriodCost {
            pressure: 1e6,
            ..cost(1_000_000, 1)
        });
        assert_eq!(control.scale(), 16);
    }
}
