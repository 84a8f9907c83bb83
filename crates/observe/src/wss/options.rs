//! Selection of the estimators, and their options.

use std::num::{NonZeroU16, NonZeroU32, NonZeroUsize};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgMatches, Args as _, Command, FromArgMatches, value_parser};
use plimsoll_estimator::registry::{Feed, METHODS, Method, OptionValue, Settings};
use plimsoll_estimator::working_set::TouchedOptions;
use plimsoll_flow::{PageCount, PageSize};
use plimsoll_output::bail_usage;
use plimsoll_pagelog::machine::{Config, CostModel, Mode};

use plimsoll_protocol::size::{ByteSize, Share};

/// The size at which the miss-ratio curve reaches 5 %: the only method that needs a curve.
pub(super) const CURVE: &str = "mrc";
/// All methods.
const ALL: &str = "all";
/// The option of a logging buffer's size.
const BUFFER: &str = "buffer";

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
    /// prl: number of times a page is logged until it is hot (τ) [default: 50]
    #[arg(long, value_name = "N")]
    tau: Option<NonZeroU32>,
    /// prl, pml: number of intervals without change after which the estimate is settled (ω) [default: 4]
    #[arg(long, value_name = "N")]
    omega: Option<NonZeroU16>,
    /// prl: share of the pages logged within omega intervals that must be hot before the estimate settles [default: 10%]
    #[arg(long, value_name = "SHARE")]
    warm_up: Option<Share>,
    /// prl, pml: growth within omega intervals that is ignored; 0 is the paper's rule [default: 0.1%]
    #[arg(long, value_name = "SHARE")]
    tolerance: Option<Share>,
    /// prl: additional need of the guest's kernel (ε), added to the estimate [default: 0]
    #[arg(long, value_name = "SIZE")]
    epsilon: Option<ByteSize>,
    /// esx: pages sampled in each interval [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    sample_pages: Option<u32>,
    /// esx: random seed of the sampling [default: 0]
    #[arg(long)]
    seed: Option<u64>,
    /// Truth: window in intervals
    #[arg(long, default_value = "4", value_name = "N")]
    window: NonZeroU16,
    /// Truth: number of these intervals in which a page must have been accessed
    #[arg(long, default_value = "1", value_name = "N")]
    times: NonZeroU16,
    /// prl, pml: entries of a logging buffer [default: 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    buffer: Option<u32>,
    #[command(flatten)]
    costs: CostArgs,
}

/// A configurable cost of logging.
struct CostOption {
    name: &'static str,
    help: &'static str,
    /// Whether it is a duration. A trace has no clock, so the default there is 0.
    is_timed: bool,
    /// Inputs of the methods whose buffers have it.
    feeds: &'static [Feed],
    of: fn(&mut CostModel) -> &mut u32,
}

/// Inputs that come from logging buffers.
const LOGGED: &[Feed] = &[Feed::LoggedWalks, Feed::LoggedWrites];

const COSTS: [CostOption; 5] = [
    CostOption {
        name: "instruction-cost",
        help: "An instruction, in thousandths of a cycle",
        is_timed: false,
        feeds: LOGGED,
        of: |model| &mut model.instruction_thousandths,
    },
    CostOption {
        name: "exit-cost",
        help: "A VM exit (pml)",
        is_timed: false,
        feeds: &[Feed::LoggedWrites],
        of: |model| &mut model.exit_cycles,
    },
    CostOption {
        name: "latency-cost",
        help: "Latency of the interrupt to the host's CPU (prl)",
        is_timed: true,
        feeds: &[Feed::LoggedWalks],
        of: |model| &mut model.latency_cycles,
    },
    CostOption {
        name: "interrupt-cost",
        help: "The interrupt's handler, without draining (prl)",
        is_timed: true,
        feeds: &[Feed::LoggedWalks],
        of: |model| &mut model.interrupt_cycles,
    },
    CostOption {
        name: "drain-cost",
        help: "Draining an entry of a buffer",
        is_timed: true,
        feeds: LOGGED,
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

/// Whether a method takes an option: one of its own, or one of the logging buffers that feed it.
fn takes(method: &Method, option: &str) -> bool {
    let cost = COSTS.iter().find(|cost| cost.name == option);
    match cost {
        Some(cost) => cost.feeds.contains(&method.feed),
        None if option == BUFFER => LOGGED.contains(&method.feed),
        None => method.options.iter().any(|row| row.name == option),
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
    pub fn wants(&self, method: &str) -> bool {
        self.estimator == ALL || self.estimator == method
    }

    /// ε, the part of prl's result that is not measured, in pages.
    pub fn epsilon(&self, page_size: PageSize) -> PageCount {
        let ByteSize(bytes) = self.epsilon.unwrap_or(ByteSize(0));
        PageCount::from_bytes(bytes, page_size)
    }

    /// The window of the truth.
    pub fn truth(&self) -> TouchedOptions {
        TouchedOptions {
            intervals: self.window,
            times: self.times,
        }
    }

    /// Refuses options that contradict each other, and those of methods that are not selected. The truth is always computed.
    ///
    /// # Errors
    ///
    /// A [`UsageError`](plimsoll_output::exit::UsageError) that names the option.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.times > self.window {
            bail_usage!(
                "--times {}: at most --window, which is {} intervals",
                self.times,
                self.window
            );
        }
        if let Some(share) = self.warm_up.filter(|share| share.get() > 1.0) {
            bail_usage!("--warm-up {share}: at most 1, which is 100%");
        }
        for option in self.given() {
            let takers = METHODS.iter().filter(|method| takes(method, option));
            let takers: Vec<_> = takers.map(|method| method.name).collect();
            if !takers.iter().any(|taker| self.wants(taker)) {
                bail_usage!(
                    "--{option}: --estimator {} does not take it, only {}",
                    self.estimator,
                    takers.join(", ")
                );
            }
        }
        Ok(())
    }

    /// The options of single methods that were given, but for those of the truth.
    fn given(&self) -> impl Iterator<Item = &'static str> {
        let given = [
            ("tau", self.tau.is_some()),
            ("omega", self.omega.is_some()),
            ("warm-up", self.warm_up.is_some()),
            ("tolerance", self.tolerance.is_some()),
            ("epsilon", self.epsilon.is_some()),
            ("sample-pages", self.sample_pages.is_some()),
            ("seed", self.seed.is_some()),
            (BUFFER, self.buffer.is_some()),
        ];
        let costs = COSTS.iter().zip(self.costs.0);
        let costs = costs.map(|(cost, cycles)| (cost.name, cycles.is_some()));
        given
            .into_iter()
            .chain(costs)
            .filter_map(|(option, is_given)| is_given.then_some(option))
    }

    /// The options of every method, for a VM with this page size and, if known, this amount of memory.
    pub(super) fn settings(&self, page_size: PageSize, memory: Option<PageCount>) -> Settings {
        let mut settings = Settings::new(page_size);
        let count = |count: u32| {
            OptionValue::Count(NonZeroUsize::new(count as usize).unwrap_or(NonZeroUsize::MIN))
        };
        let share = |share: Option<Share>| share.map(|share| OptionValue::Share(share.get()));
        let given = [
            ("tau", self.tau.map(|tau| count(tau.get()))),
            ("omega", self.omega.map(|omega| count(omega.get().into()))),
            ("sample-pages", self.sample_pages.map(count)),
            ("window", Some(count(self.window.get().into()))),
            ("times", Some(count(self.times.get().into()))),
            ("warm-up", share(self.warm_up)),
            ("tolerance", share(self.tolerance)),
            ("epsilon", Some(OptionValue::Size(self.epsilon(page_size)))),
            ("seed", self.seed.map(OptionValue::Seed)),
            ("memory", memory.map(OptionValue::Size)),
        ];
        for (name, value) in given {
            if let Some(value) = value {
                settings.set(name, value);
            }
        }
        settings
    }

    /// The machine that contains the logging buffers.
    pub(super) fn machine(&self, mode: Mode, has_clock: bool) -> Config {
        let default = Config::new(mode);
        Config {
            buffer_entries: self.buffer.unwrap_or(default.buffer_entries),
            costs: self.costs.model(has_clock),
            ..default
        }
    }
}
