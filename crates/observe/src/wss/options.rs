//! Selection of the estimators, and their options.

use std::num::{NonZeroU16, NonZeroU32, NonZeroUsize};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgMatches, Args as _, Command, FromArgMatches, value_parser};
use plimsoll_estimator::registry::{METHODS, OptionValue, Settings};
use plimsoll_estimator::working_set::TouchedOptions;
use plimsoll_flow::{PageCount, PageSize};
use plimsoll_pagelog::machine::{Config, CostModel, Mode};

use plimsoll_protocol::size::{ByteSize, Share};

/// The size at which the miss-ratio curve reaches 5 %: the only method that needs a curve.
pub(super) const CURVE: &str = "mrc";
/// All methods.
const ALL: &str = "all";

/// Parses the name of a method of the registry, `mrc` or `all`.
fn method_parser() -> impl TypedValueParser<Value = String> {
    let rows = METHODS.iter();
    let rows = rows.map(|method| PossibleValue::new(method.name).help(method.help));
    let others = [
        PossibleValue::new(CURVE).help("Size at which the miss-ratio curve reaches 5 %"),
        PossibleValue::new(ALL).help("All of them"),
    ];
    PossibleValuesParser::new(rows.chain(others))
}

/// Options of the estimators and their logging buffers. Flatten them into a verb's `Args`.
#[derive(Debug, clap::Args)]
pub struct EstimatorArgs {
    /// Working-set estimator
    #[arg(long, default_value = ALL, value_parser = method_parser())]
    estimator: String,
    /// prl: number of times a page is logged until it is hot (τ)
    #[arg(long, default_value = "50", value_name = "N")]
    tau: NonZeroU32,
    /// prl, pml: number of intervals without change after which the estimate is settled (ω)
    #[arg(long, default_value = "4", value_name = "N")]
    omega: NonZeroU16,
    /// prl: share of the pages logged within omega intervals that must be hot before the estimate settles
    #[arg(long, default_value = "10%", value_name = "SHARE")]
    warm_up: Share,
    /// prl, pml: growth within omega intervals that is ignored; 0 is the paper's rule
    #[arg(long, default_value = "0.1%", value_name = "SHARE")]
    tolerance: Share,
    /// prl: additional need of the guest's kernel (ε), added to the estimate
    #[arg(long, default_value = "0", value_name = "SIZE")]
    epsilon: ByteSize,
    /// esx: pages sampled in each interval
    #[arg(long, default_value = "100", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    sample_pages: u32,
    /// esx: random seed of the sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Truth: window in intervals
    #[arg(long, default_value = "4", value_name = "N")]
    window: NonZeroU16,
    /// Truth: number of these intervals in which a page must have been accessed
    #[arg(long, default_value = "1", value_name = "N")]
    times: NonZeroU16,
    /// prl, pml: entries of a logging buffer
    #[arg(long, default_value = "512", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    buffer: u32,
    #[command(flatten)]
    costs: CostArgs,
}

/// A configurable cost of logging.
struct CostOption {
    name: &'static str,
    help: &'static str,
    /// Whether it is a duration. A trace has no clock, so the default there is 0.
    is_timed: bool,
    of: fn(&mut CostModel) -> &mut u32,
}

const COSTS: [CostOption; 5] = [
    CostOption {
        name: "instruction-cost",
        help: "An instruction, in thousandths of a cycle",
        is_timed: false,
        of: |model| &mut model.instruction_thousandths,
    },
    CostOption {
        name: "exit-cost",
        help: "A VM exit (pml)",
        is_timed: false,
        of: |model| &mut model.exit_cycles,
    },
    CostOption {
        name: "latency-cost",
        help: "Latency of the interrupt to the host's CPU (prl)",
        is_timed: true,
        of: |model| &mut model.latency_cycles,
    },
    CostOption {
        name: "interrupt-cost",
        help: "The interrupt's handler, without draining (prl)",
        is_timed: true,
        of: |model| &mut model.interrupt_cycles,
    },
    CostOption {
        name: "drain-cost",
        help: "Draining an entry of a buffer",
        is_timed: true,
        of: |model| &mut model.entry_cycles,
    },
];

/// Costs of logging that were given, in the order of [`COSTS`].
#[derive(Debug, Clone, Default)]
struct CostArgs([Option<u32>; COSTS.len()]);

impl clap::Args for CostArgs {
    fn augment_args(command: Command) -> Command {
        let mut default = CostModel::default();
        let args = COSTS.map(|cost| {
            let zero = if cost.is_timed { "; for a trace 0" } else { "" };
            let cycles = *(cost.of)(&mut default);
            Arg::new(cost.name)
                .long(cost.name)
                .value_name("N")
                .value_parser(value_parser!(u32))
                .help(format!("{} [default: {cycles}{zero}]", cost.help))
                .help_heading("Costs of logging, in cycles")
        });
        command.args(args)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for CostArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(COSTS.map(|cost| matches.get_one(cost.name).copied())))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl CostArgs {
    /// The cost model. A trace has no clock, so its handlers take no time by default.
    fn model(&self, has_clock: bool) -> CostModel {
        let mut model = CostModel::default();
        if !has_clock {
            model.reset_cycles = 0;
        }
        for (cost, given) in COSTS.iter().zip(self.0) {
            let cycles = (cost.of)(&mut model);
            *cycles = match given {
                Some(given) => given,
                None if cost.is_timed && !has_clock => 0,
                None => *cycles,
            };
        }
        model
    }
}

impl EstimatorArgs {
    /// One method with its defaults.
    ///
    /// # Errors
    ///
    /// No method has this name.
    pub fn of(method: &str) -> Result<Self, clap::Error> {
        let given = ["wss", "--estimator", method];
        let command = Self::augment_args(Command::new("wss"));
        Self::from_arg_matches(&command.try_get_matches_from(given)?)
    }

    /// Whether a method is selected, alone or with all.
    #[must_use]
    pub fn wants(&self, method: &str) -> bool {
        self.estimator == ALL || self.estimator == method
    }

    /// ε, the part of prl's result that is not measured, in pages.
    #[must_use]
    pub fn epsilon(&self, page_size: PageSize) -> PageCount {
        PageCount::from_bytes(self.epsilon.0, page_size)
    }

    /// The window of the truth.
    #[must_use]
    pub fn truth(&self) -> TouchedOptions {
        TouchedOptions {
            intervals: self.window,
            times: self.times,
        }
    }

    /// The options of every method, for a VM with this page size and, if known, this amount of memory.
    pub(super) fn settings(&self, page_size: PageSize, memory: Option<PageCount>) -> Settings {
        let mut settings = Settings::new(page_size);
        let counts = [
            ("tau", self.tau.get()),
            ("omega", self.omega.get().into()),
            ("sample-pages", self.sample_pages),
            ("window", self.window.get().into()),
            ("times", self.times.get().into()),
        ];
        for (name, count) in counts {
            let count = NonZeroUsize::new(count as usize).unwrap_or(NonZeroUsize::MIN);
            settings.set(name, OptionValue::Count(count));
        }
        settings.set("warm-up", OptionValue::Share(self.warm_up.get()));
        settings.set("tolerance", OptionValue::Share(self.tolerance.get()));
        settings.set("epsilon", OptionValue::Size(self.epsilon(page_size)));
        settings.set("seed", OptionValue::Seed(self.seed));
        if let Some(memory) = memory {
            settings.set("memory", OptionValue::Size(memory));
        }
        settings
    }

    /// The machine that contains the logging buffers.
    pub(super) fn machine(&self, mode: Mode, has_clock: bool) -> Config {
        Config {
            buffer_entries: self.buffer,
            costs: self.costs.model(has_clock),
            ..Config::new(mode)
        }
    }
}
