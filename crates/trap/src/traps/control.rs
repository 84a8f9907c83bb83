//! Tracking rate and hot set, which follow the VM from period to period.

use plimsoll_flow::{Period, Whole as _};

use crate::config::TraceConfig;
use crate::rate::{PeriodCost, RateControl, RateRule, SCALE_MAX};

/// Minimum size of an adapted hot set in pages.
const HOT_SET_PAGES_MIN: u32 = 16;
/// Share of the time budget that making pages inaccessible may take; the rest is for traps.
const ARMING_SHARE: f64 = 0.25;

/// Sets both for the next period.
#[derive(Debug, Clone)]
pub struct TrapControl {
    rate: RateControl,
    /// Number of pages that trapped in the last period with any traps.
    distinct_pages_before: Option<u64>,
    /// Running mean of the time for arming and disarming one page.
    pub arming_seconds_per_page: f64,
}

impl TrapControl {
    pub fn new(config: &TraceConfig) -> Self {
        Self {
            rate: RateControl::new(config.rate_rule, config.scale, config.least_pages),
            distinct_pages_before: None,
            arming_seconds_per_page: 2e-6,
        }
    }

    /// One page in this many is watched.
    pub fn scale(&self) -> u32 {
        self.rate.scale()
    }

    /// Pages of this period's hot set; see [`TraceConfig::hot_set_pages`].
    pub fn hot_set_pages(&self, config: &TraceConfig) -> u32 {
        if config.rate_rule != RateRule::Budget {
            return config.hot_set_pages;
        }
        let eighth = self.distinct_pages_before.unwrap_or_default() / 8;
        let eighth = u32::try_from(eighth).unwrap_or(u32::MAX);
        eighth.max(HOT_SET_PAGES_MIN).min(config.hot_set_pages)
    }

    /// Follows a period with a `budget` in seconds, `trap_cost` being that of a trap where none was taken.
    pub fn adapt(&mut self, report: &Period, budget: Option<f64>, trap_cost: f64) {
        self.distinct_pages_before = Some(report.distinct_pages).filter(|&pages| pages > 0);
        if report.tracked_pages > 0 {
            let latest = report.arm_time.as_secs_f64() / report.tracked_pages as f64;
            self.arming_seconds_per_page += (latest - self.arming_seconds_per_page) / 4.0;
        }
        let Some(budget) = budget else {
            return self.rate.adapt(&PeriodCost {
                pressure: 0.0,
                affordable_traps: f64::INFINITY,
                traps: report.traps.taken,
                distinct_pages: report.distinct_pages,
                budget_ran_out: false,
                scale_min: 1,
            });
        };
        let all_traps = (report.traps.taken + report.traps.strays).max(1) as f64;
        let seconds_per_trap = if report.traps.taken == 0 {
            trap_cost
        } else {
            report.fault_time.as_secs_f64() / all_traps
        };
        let whole_period = report.length.as_secs_f64() / report.window.as_secs_f64().max(1e-9);
        let arming_seconds = report.populated_pages as f64 * self.arming_seconds_per_page;
        let scale_min = (arming_seconds / (budget * ARMING_SHARE)).clamp(1.0, f64::from(SCALE_MAX));
        self.rate.adapt(&PeriodCost {
            pressure: report.fault_time.as_secs_f64() * whole_period / budget,
            affordable_traps: (budget - report.arm_time.as_secs_f64()).max(0.0) / seconds_per_trap,
            traps: report.traps.taken,
            distinct_pages: report.distinct_pages,
            budget_ran_out: report.budget_exhausted,
            scale_min: u32::whole(scale_min.ceil()),
        });
    }
}
