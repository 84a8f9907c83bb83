//! How a VM is traced: the settings of all backends, with their limits.

use std::time::Duration;

use crate::error::TrapError;
use crate::placement::HandlerCpu;
use crate::rate::{RateRule, SCALE_MAX};

/// How a VM is traced.
#[derive(Debug, Clone)]
pub struct TraceConfig {
    /// Length of a period, 10 ms to a day; 5 s by default, as in \[AET\] §4.1.
    pub period: Duration,
    /// Upper bound of the time taken from the VM's vCPUs, as a share of it; `None` for no bound.
    pub budget: Option<f64>,
    /// One page in `scale` is tracked in the first period, 1 to [`SCALE_MAX`]. Accessed-page scans round it up to
    /// a multiple of 16. Write scans track no more in any period, and under [`RateRule::Budget`] fewer of large memory.
    pub scale: u32,
    /// How the scale follows the VM.
    pub rate_rule: RateRule,
    /// Where the trap handler, or the scanner, runs.
    pub handler_cpu: HandlerCpu,
    /// Seed of the samples' salts.
    pub seed: u64,
    /// Traps: capacity of the hot set, 1 to 4096 pages, \[AET\] §3.2. Under [`RateRule::Budget`] it is at most an
    /// eighth of the pages that trapped in the period before (and 16, as in the first): a curve begins at the size that
    /// it hides, and a working set which shrinks to a sixth does not vanish in it.
    pub hot_set_pages: u32,
    /// Traps: aligned neighbours that are sampled together, 1 to 512.
    pub group_pages: u32,
    /// Traps: tracked pages that should trap in a period; if fewer do, the rate is raised.
    pub least_pages: u64,
    /// Scans: time from one to the next, 1 ms up to a period; CPU time of the VM's process for
    /// accessed-page scans. `None`: accessed-page scans follow the VM, write scans take a sixteenth of the period. Marked pages: time
    /// to the first check. DAMON: time from check to check.
    pub scan_interval: Option<Duration>,
    /// Accessed-page scans: whether writes are distinguished from reads.
    pub writes: bool,
    /// Sampled pages: pages drawn in a period, 1 to 1,000,000; 100 by default, as in \[Waldspurger02\] §5.3.
    pub sample_pages: usize,
    /// Whether tracing rests while the VM's phase is steady, which observers (crate observe) do above the backends.
    pub intermittent: bool,
    /// Whether to attach to a process in a user namespace of its own, where attaching requires calls made in it.
    pub allow_namespaced: bool,
}

impl Default for TraceConfig {
    fn default() -> Self {
        Self {
            period: Duration::from_secs(5),
            budget: Some(0.01),
            scale: 128,
            rate_rule: RateRule::default(),
            handler_cpu: HandlerCpu::default(),
            seed: 0,
            hot_set_pages: 64,
            group_pages: 1,
            least_pages: 128,
            scan_interval: None,
            writes: false,
            sample_pages: 100,
            intermittent: false,
            allow_namespaced: false,
        }
    }
}

impl TraceConfig {
    /// Shortest period.
    pub const PERIOD_MIN: Duration = Duration::from_millis(10);
    /// Longest period.
    pub const PERIOD_MAX: Duration = Duration::from_hours(24);
    /// Shortest time from one scan to the next; the longest is a period.
    pub const SCAN_INTERVAL_MIN: Duration = Duration::from_millis(1);

    /// Time that a period may take from so many CPUs; `None` for no bound.
    pub(crate) fn period_budget(&self, cpus: usize) -> Option<Duration> {
        Some(self.period.mul_f64(self.budget? * cpus as f64))
    }

    /// Refuses a setting out of range, and a rate rule that is not in `rate_rules`.
    pub(crate) fn check(&self, rate_rules: &[RateRule]) -> Result<(), TrapError> {
        let refuse = |setting, value: String, accepted| {
            Err(TrapError::Setting {
                setting,
                value,
                accepted,
            })
        };
        if !(Self::PERIOD_MIN..=Self::PERIOD_MAX).contains(&self.period) {
            return refuse("period", format!("{:?}", self.period), "10 ms to a day");
        }
        let is_share = |budget: f64| budget > 0.0 && budget <= 1.0;
        if let Some(budget) = self.budget.filter(|&budget| !is_share(budget)) {
            return refuse("budget", budget.to_string(), "above 0 to 1 (100 %)");
        }
        if !(1..=SCALE_MAX).contains(&self.scale) {
            let accepted = "1 to 262144";
            return refuse("tracking rate of 1 in", self.scale.to_string(), accepted);
        }
        if !rate_rules.contains(&self.rate_rule) {
            let value = format!("{:?}", self.rate_rule);
            return refuse("rate rule", value, "what this backend has: Fixed or Budget");
        }
        if !(1..=4096).contains(&self.hot_set_pages) {
            return refuse("hot set", self.hot_set_pages.to_string(), "1 to 4096 pages");
        }
        if !(1..=512).contains(&self.group_pages) {
            let value = self.group_pages.to_string();
            return refuse("sampling group", value, "1 to 512 pages");
        }
        let bounds = Self::SCAN_INTERVAL_MIN..=self.period;
        let out_of_range = |interval: &Duration| !bounds.contains(interval);
        if let Some(interval) = self.scan_interval.filter(out_of_range) {
            return refuse("scan interval", format!("{interval:?}"), "1 ms to a period");
        }
        if !(1..=1_000_000).contains(&self.sample_pages) {
            let value = self.sample_pages.to_string();
            return refuse("sample", value, "1 to 1000000 pages");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changes a setting.
    type Change = fn(&mut TraceConfig);

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let cases: [(Change, &str); 12] = [
            (|config| config.budget = Some(f64::NAN), "budget"),
            (|config| config.budget = Some(0.0), "budget"),
            (|config| config.scale = 0, "tracking rate"),
            (|config| config.scale = SCALE_MAX + 1, "tracking rate"),
            (|config| config.rate_rule = RateRule::Log, "rate rule"),
            (|config| config.period = Duration::ZERO, "period"),
            (|config| config.hot_set_pages = 5000, "hot set"),
            (|config| config.group_pages = 0, "sampling group"),
            (
                |config| config.scan_interval = Some(Duration::ZERO),
                "scan interval",
            ),
            (
                |config| config.scan_interval = Some(Duration::from_secs(6)),
                "scan interval",
            ),
            (|config| config.sample_pages = 0, "sample"),
            (|config| config.sample_pages = 2_000_000, "sample"),
        ];
        let rules = [RateRule::Fixed, RateRule::Budget];
        for (change, name) in cases {
            let mut config = TraceConfig::default();
            change(&mut config);
            let refused = config.check(&rules).unwrap_err().to_string();
            assert!(refused.starts_with(name), "{refused}");
        }
        assert!(TraceConfig::default().check(&rules).is_ok());
        let logarithmic = TraceConfig {
            rate_rule: RateRule::Log,
            ..TraceConfig::default()
        };
        assert!(logarithmic.check(&[RateRule::Log]).is_ok());
    }
}
