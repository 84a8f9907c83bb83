//! Tracing options shared by all verbs that trace, derived from the registry of backends.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use plimsoll_estimator::live::{LIVE_ESTIMATORS, LiveEstimatorRow, LiveInputKind};
use plimsoll_flow::{TraceMethod, Whole as _};
use plimsoll_output::bail_usage;
use plimsoll_trap::{
    BACKENDS, BackendRow, BackendSetting, HandlerCpu, RateRule, SCALE_MAX, TraceConfig,
};

use plimsoll_protocol::size::{Interval, QuantityError, Rate};
use plimsoll_vm::QemuVm;

use crate::choose;

/// How far the inverse of a rate may be from a whole number, as a share of it: 0.33 is meant for 1/3.
const RATE_SLACK: f64 = 0.02;

/// How to trace; shared by all verbs that do.
#[derive(Debug, Clone, clap::Args)]
pub struct TracingArgs {
    /// Method of tracing
    #[arg(long, value_parser = backends(), default_value = BackendSetting::AUTO)]
    pub backend: BackendSetting,
    /// Length of a period
    #[arg(long, default_value = "5s")]
    pub period: Interval,
    /// Maximum share of the VM's CPU time that tracing may take; "none" for no limit
    #[arg(long, default_value = "1%")]
    pub budget: Budget,
    /// Traps and scans: tracking rate (share of the pages traced) in the first period, such as 1/128; write scans: the
    /// highest rate, lower for large memory unless --rate-rule is fixed; first touches: with --rate-rule fixed, share of
    /// the pages drawn in each period
    #[arg(long, default_value = "1/128")]
    rate: Rate,
    /// How the tracking rate is adapted
    #[arg(long, value_enum, default_value_t = Rule::Budget)]
    rate_rule: Rule,
    /// Traps: capacity of the hot-page set (pages left mapped after a trap) [default: 64]
    #[arg(long, value_name = "PAGES")]
    hot_set: Option<u32>,
    /// Traps: neighbouring pages that are sampled together [default: 1]
    #[arg(long, value_name = "PAGES")]
    group: Option<u32>,
    /// Traps: minimum number of tracked pages that should trap in a period; if fewer do, the rate is raised [default: 128]
    #[arg(long, value_name = "PAGES")]
    least_pages: Option<u64>,
    /// Scans: time from one to the next, CPU time of the VM for accessed-page scans [default: adapted to the VM]. idle and rwp: time
    /// from marking pages to the first check [default: 5 ms, 1 ms]. damon: time from check to check [default: adapted]
    #[arg(long, value_name = "TIME")]
    scan_interval: Option<Interval>,
    /// Accessed-page scans: distinguish writes from reads
    #[arg(long)]
    writes: bool,
    /// Sampled pages: pages drawn in each period [default: 100]
    #[arg(long, value_name = "PAGES")]
    sample: Option<u32>,
    /// Let tracing rest while the VM's phase is steady; it resumes when CPU time, reads or a sample of its pages change
    #[arg(long)]
    intermittent: bool,
    /// Run the trap handler, or the scanner, on any CPU instead of the busiest vCPU's
    #[arg(long)]
    any_cpu: bool,
    /// Attach even to a process in a user namespace of its own, such as a container's
    #[arg(long)]
    allow_namespaced: bool,
    /// Random seed of the samples
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Parser of a backend's name.
fn backends() -> impl TypedValueParser<Value = BackendSetting> {
    let rows = BACKENDS.iter();
    let names = rows.map(|row| PossibleValue::new(row.name()).help(row.sees));
    let auto = PossibleValue::new(BackendSetting::AUTO).help(BackendSetting::AUTO_HELP);
    PossibleValuesParser::new(names.chain([auto])).try_map(|name| match &*name {
        BackendSetting::AUTO => Ok(BackendSetting::Auto),
        name => name.parse().map(BackendSetting::Method),
    })
}

/// Parser of the name of an estimator of references in order.
pub fn estimators() -> impl TypedValueParser<Value = &'static LiveEstimatorRow> {
    let rows = || {
        let is_ordered = |row: &&&LiveEstimatorRow| row.takes == LiveInputKind::References;
        LIVE_ESTIMATORS.iter().filter(is_ordered)
    };
    let names = rows().map(|row| PossibleValue::new(row.name).help(row.help));
    PossibleValuesParser::new(names).try_map(move |name| {
        let row = rows().copied().find(|row| row.name == name);
        row.ok_or("not an estimator of traced references")
    })
}

/// How the tracking rate follows the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Rule {
    /// The rate is constant
    Fixed,
    /// Each traced page stands for 128 more pages after a period over budget, for 64 fewer after one with too few traps
    Linear,
    /// Like linear, with steps that grow with the logarithm of the excess
    Log,
    /// Sets the rate directly from the time budget
    Budget,
}

/// An upper bound on the tracing time, or none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Budget(Option<f64>);

impl std::str::FromStr for Budget {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" {
            return Ok(Self(None));
        }
        text.parse::<Rate>().map(|share| Self(Some(share.get())))
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            // Rounded to what was meant: 0.07 is no binary fraction.
            Some(share) => write!(f, "{} %", (share * 1e8).round() / 1e6),
            None => f.write_str("none"),
        }
    }
}

impl TracingArgs {
    /// The backends to choose from, of which there is one unless the choice is left to us, and their settings.
    ///
    /// # Errors
    ///
    /// A [`UsageError`](plimsoll_output::exit::UsageError) for a rate whose inverse is not a whole number of pages, and
    /// for options that do not apply to the backend.
    pub fn watch(&self) -> anyhow::Result<(Vec<&'static BackendRow>, TraceConfig)> {
        let mut rows: Vec<_> = match self.backend {
            BackendSetting::Method(method) => vec![BackendRow::of(method)],
            BackendSetting::Auto => {
                let rows = BACKENDS.iter().copied();
                // Those with a cost for VMs, the others for other targets.
                rows.filter(|row| row.curve_cost.is_some() || row.any_process)
                    .collect()
            }
        };
        let given = [
            ("--hot-set", self.hot_set.is_some()),
            ("--group", self.group.is_some()),
            ("--least-pages", self.least_pages.is_some()),
            ("--scan-interval", self.scan_interval.is_some()),
            ("--writes", self.writes),
            ("--sample", self.sample.is_some()),
        ];
        for (option, _) in given.into_iter().filter(|&(_, given)| given) {
            rows.retain(|row| row.options.contains(&option));
            if rows.is_empty() {
                bail_usage!("{}", goes_with(option));
            }
        }
        let rate_rule = self.rate_rule.rule();
        rows.retain(|row| row.rate_rules.contains(&rate_rule));
        if rows.is_empty() {
            bail_usage!(
                "--backend {} goes with --rate-rule budget or fixed",
                self.backend
            );
        }
        let default = TraceConfig::default();
        let sample = self
            .sample
            .map(|pages| usize::try_from(pages).unwrap_or(usize::MAX));
        let config = TraceConfig {
            period: self.period.get(),
            budget: self.budget.0,
            scale: self.scale()?,
            rate_rule,
            handler_cpu: if self.any_cpu {
                HandlerCpu::Any
            } else {
                HandlerCpu::Follow
            },
            seed: self.seed,
            hot_set_pages: self.hot_set_pages(),
            group_pages: self.group.unwrap_or(default.group_pages),
            least_pages: self.least_pages.unwrap_or(default.least_pages),
            scan_interval: self.scan_interval.map(Interval::get),
            writes: self.writes,
            sample_pages: sample.unwrap_or(default.sample_pages),
            intermittent: self.intermittent,
            allow_namespaced: self.allow_namespaced,
        };
        Ok((rows, config))
    }

    /// The backend for a VM.
    ///
    /// # Errors
    ///
    /// As [`watch`](Self::watch) and [`choose`].
    pub fn method_for(&self, vm: &QemuVm) -> anyhow::Result<TraceMethod> {
        let (backends, config) = self.watch()?;
        Ok(match self.backend {
            BackendSetting::Method(method) => method,
            BackendSetting::Auto => choose(vm, &backends, &config)?.row.method,
        })
    }

    /// vCPU time that a period of a VM with `vcpus` may take; `None` for no bound.
    pub fn budget_of_period(&self, vcpus: usize) -> Option<Duration> {
        let share = self.budget.0? * vcpus as f64;
        Some(self.period.get().mul_f64(share))
    }

    /// Capacity of the hot set.
    pub fn hot_set_pages(&self) -> u32 {
        let default = TraceConfig::default().hot_set_pages;
        self.hot_set.unwrap_or(default)
    }

    fn scale(&self) -> anyhow::Result<u32> {
        let scale = (1.0 / self.rate.get()).round();
        if scale > f64::from(SCALE_MAX) {
            bail_usage!("--rate {}: the minimum is 1/{SCALE_MAX}", self.rate);
        }
        if (1.0 / self.rate.get() - scale).abs() > RATE_SLACK * scale {
            bail_usage!(
                "--rate {}: expected 1 over a whole number, such as 1/{scale}",
                self.rate
            );
        }
        if self.budget.0.is_none() && self.rate_rule == Rule::Budget {
            bail_usage!(
                "--rate-rule budget requires a budget: add --rate-rule fixed, or remove --budget none"
            );
        }
        Ok(u32::whole(scale))
    }
}

/// An error that lists the backends to which an option applies.
fn goes_with(option: &str) -> String {
    let rows = BACKENDS.iter().filter(|row| row.options.contains(&option));
    let names: Vec<_> = rows.map(|row| row.name()).collect();
    format!("{option} requires --backend {}", names.join(" or "))
}

impl Rule {
    fn rule(self) -> RateRule {
        match self {
            Self::Fixed => RateRule::Fixed,
            Self::Linear => RateRule::Linear,
            Self::Log => RateRule::Log,
            Self::Budget => RateRule::Budget,
        }
    }
}
