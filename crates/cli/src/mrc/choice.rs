//! Which estimator makes the curve, and its options: both from the registry's rows.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgMatches, Command, FromArgMatches, value_parser};
use plimsoll_estimator::registry::{
    ALGORITHMS, Algorithm, BuildError, BuiltEstimator, BuiltSizedEstimator, OptionKind, OptionSpec,
    OptionValue, Settings, algorithm, options,
};
use plimsoll_estimator::{CounterStacksOptions, SliceOf};
use plimsoll_flow::PageSize;
use plimsoll_output::bail_usage;
use plimsoll_output::exit::UsageError;

use plimsoll_protocol::curve_size::CurveSize;
use plimsoll_protocol::size::{Rate, Share};

/// The algorithm whose counters can be recorded.
const RECORDED: &str = "counter-stacks";
/// Rate at which a comparison samples with algorithms that sample on request, if none is given.
const COMPARED_RATE: f64 = 0.01;

/// What `--estimator` names.
#[derive(Debug, Clone, Copy)]
enum Choice {
    One(&'static Algorithm),
    All,
}

/// Parses the name of an algorithm, or `all`.
fn choice_parser() -> impl TypedValueParser<Value = Choice> {
    let rows = ALGORITHMS.iter();
    let names = rows.map(|row| PossibleValue::new(row.name).help(row.help));
    let all = PossibleValue::new("all").help("All estimators, compared");
    PossibleValuesParser::new(names.chain([all])).map(|name| match algorithm(&name) {
        Ok(row) => Choice::One(row),
        Err(_) => Choice::All,
    })
}

/// Options of the estimators. Flatten them into a verb's `Args`.
#[derive(Debug, clap::Args)]
pub struct EstimatorArgs {
    /// Estimator of the curve
    #[arg(long, default_value = "lru", value_parser = choice_parser())]
    estimator: Choice,
    #[command(flatten)]
    options: OptionArgs,
    /// Record the counters of counter-stacks in this file, for later curves of any --window that begins and ends with an interval
    #[arg(long, value_name = "FILE")]
    stream: Option<PathBuf>,
}

/// The options of all rows that were given.
#[derive(Debug, Clone, Default)]
struct OptionArgs(Vec<(OptionSpec, GivenValue)>);

/// A value as it was given: a size may be in bytes, whose pages depend on the trace.
#[derive(Debug, Clone, Copy)]
enum GivenValue {
    Value(OptionValue),
    Size(CurveSize),
}

impl clap::Args for OptionArgs {
    fn augment_args(command: Command) -> Command {
        command.args(options().iter().map(|(option, rows)| arg_of(option, rows)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for OptionArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut all = Self::default();
        all.update_from_arg_matches(matches)?;
        Ok(all)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        let given = options().into_iter().filter_map(|(option, _)| {
            let value = match option.kind {
                OptionKind::Rate => {
                    let rate = matches.get_one::<Rate>(option.name)?;
                    GivenValue::Value(OptionValue::Rate(rate.get()))
                }
                OptionKind::Count => {
                    let count = matches.get_one::<NonZeroUsize>(option.name)?;
                    GivenValue::Value(OptionValue::Count(*count))
                }
                OptionKind::Seed => {
                    let seed = matches.get_one::<u64>(option.name)?;
                    GivenValue::Value(OptionValue::Seed(*seed))
                }
                OptionKind::Share => {
                    let share = matches.get_one::<Share>(option.name)?;
                    GivenValue::Value(OptionValue::Share(share.get()))
                }
                OptionKind::Size => GivenValue::Size(*matches.get_one::<CurveSize>(option.name)?),
            };
            Some((option, value))
        });
        self.0 = given.collect();
        Ok(())
    }
}

/// An option of the registry as one of the command line.
fn arg_of(option: &OptionSpec, rows: &[&Algorithm]) -> Arg {
    let arg = Arg::new(option.name)
        .long(option.name)
        .value_name(option.kind.value_name())
        .help(help_of(option, rows))
        .allow_negative_numbers(true);
    match option.kind {
        OptionKind::Rate => arg.value_parser(value_parser!(Rate)),
        OptionKind::Count => arg.value_parser(value_parser!(NonZeroUsize)),
        OptionKind::Seed => arg.value_parser(value_parser!(u64)),
        OptionKind::Share => arg.value_parser(value_parser!(Share)),
        OptionKind::Size => arg.value_parser(value_parser!(CurveSize)),
    }
}

/// The help of an option: which rows take it, and their defaults.
fn help_of(option: &OptionSpec, rows: &[&Algorithm]) -> String {
    let default = |row: &Algorithm| row.option(option.name).ok()?.default;
    if option.kind == OptionKind::Seed {
        let default = option
            .default
            .map_or_else(String::new, |seed| seed.to_string());
        return format!("Random seed of the sampling [default: {default}]");
    }
    let takers: Vec<_> = rows.iter().map(|row| row.name).collect();
    let defaults = rows
        .iter()
        .filter_map(|row| Some((row.name, default(row)?)));
    let defaults: Vec<_> = defaults
        .map(|(name, default)| match rows.len() {
            1 => default.to_string(),
            _ => format!("{name} {default}"),
        })
        .collect();
    let end = match defaults.is_empty() {
        true => " [required]".to_owned(),
        false => format!(" [default: {}]", defaults.join(", ")),
    };
    format!("{}: {}{end}", takers.join(", "), option.help)
}

impl EstimatorArgs {
    /// Whether every estimator is compared.
    pub(super) fn is_all(&self) -> bool {
        matches!(self.estimator, Choice::All)
    }

    /// Whether no estimator was chosen, nor any option of one.
    pub(super) fn is_default(&self) -> bool {
        self.is_exact_lru() && self.stream.is_none() && self.options.0.is_empty()
    }

    /// Whether it is exact LRU, by default or by name.
    pub(super) fn is_exact_lru(&self) -> bool {
        matches!(self.estimator, Choice::One(row) if row.name == ALGORITHMS[0].name)
    }

    /// Where to record counters, if anywhere.
    pub(super) fn stream(&self) -> Option<&Path> {
        self.stream.as_deref()
    }

    /// How recorded counters are set up.
    pub(super) fn counter_stacks_options(&self) -> anyhow::Result<CounterStacksOptions> {
        let mut options = CounterStacksOptions::default();
        for (option, value) in &self.options.0 {
            match *value {
                GivenValue::Value(OptionValue::Seed(seed)) => options.seed = seed,
                GivenValue::Value(OptionValue::Count(count)) if option.name == "interval" => {
                    let set = options.with_interval(count.get());
                    options = set.map_err(|error| UsageError(error.to_string()))?;
                }
                _ => {}
            }
        }
        Ok(options)
    }

    fn settings(&self, page_size: PageSize) -> anyhow::Result<Settings> {
        let mut settings = Settings::new(page_size);
        for (option, value) in &self.options.0 {
            let value = match *value {
                GivenValue::Value(value) => value,
                GivenValue::Size(size) => {
                    let pages = size.to_pages(page_size);
                    let name = option.name;
                    OptionValue::Size(
                        pages.map_err(|error| UsageError(format!("--{name}: {error}")))?,
                    )
                }
            };
            settings.set(option.name, value);
        }
        Ok(settings)
    }

    /// Builds the estimator that was chosen; for `all`, every one whose required options are given, and those
    /// that sample on request both with all pages and with a sample.
    pub(super) fn build(&self, page_size: PageSize) -> anyhow::Result<Vec<BuiltEstimator>> {
        self.check()?;
        let settings = self.settings(page_size)?;
        let usage = |error: BuildError| UsageError(error.to_string());
        let rows = match self.estimator {
            Choice::One(row) => return Ok(vec![row.build(&settings).map_err(usage)?]),
            Choice::All => ALGORITHMS.iter(),
        };
        let mut all = Vec::new();
        for row in rows.filter(|row| row.missing(&settings).is_none()) {
            let mut settings = settings.clone();
            if row.samples_on_request() {
                let rate = settings.get("rate");
                settings.set("rate", OptionValue::Rate(1.0));
                all.push(row.build(&settings).map_err(usage)?);
                settings.set("rate", rate.unwrap_or(OptionValue::Rate(COMPARED_RATE)));
            }
            all.push(row.build(&settings).map_err(usage)?);
        }
        Ok(all)
    }

    /// Builds the chosen estimator for objects with sizes.
    pub(super) fn build_sized(&self) -> anyhow::Result<BuiltSizedEstimator> {
        self.check()?;
        let Choice::One(row) = self.estimator else {
            bail_usage!("--object-sizes: name one estimator");
        };
        // Options of sizes belong to estimators of pages.
        let settings = self.settings(PageSize::default())?;
        let built = row.build_sized(&settings);
        Ok(built.map_err(|error| UsageError(error.to_string()))?)
    }

    /// The rate and the seed of a sample; other options are refused.
    pub(super) fn sample(&self, default_rate: f64) -> anyhow::Result<(f64, u64)> {
        let (mut rate, mut seed) = (default_rate, 0);
        for (option, value) in &self.options.0 {
            match *value {
                GivenValue::Value(OptionValue::Rate(given)) => rate = given,
                GivenValue::Value(OptionValue::Seed(given)) => seed = given,
                _ => bail_usage!("--{}: a sample takes only rate and seed", option.name),
            }
        }
        Ok((rate, seed))
    }

    /// Builds the one estimator that was chosen.
    pub(super) fn build_one(&self, page_size: PageSize) -> anyhow::Result<BuiltEstimator> {
        let mut all = self.build(page_size)?;
        match (all.pop(), &*all) {
            (Some(one), []) => Ok(one),
            _ => bail_usage!("--estimator all prints no curve; name one"),
        }
    }

    /// What the partial states of the chosen estimator are of.
    pub(super) fn slice(&self, page_size: PageSize) -> anyhow::Result<SliceOf> {
        self.check()?;
        let Choice::One(row) = self.estimator else {
            bail_usage!("--partial: choose one estimator");
        };
        let settings = self.settings(page_size)?;
        if settings.get("threads").is_some() {
            bail_usage!("--threads: a slice is read by one thread; read several slices at once");
        }
        let slice = row.slice(&settings);
        slice.map_err(|error| UsageError(format!("--partial: {error}")).into())
    }

    /// Refuses options that the chosen estimator does not take.
    fn check(&self) -> anyhow::Result<()> {
        let Choice::One(row) = self.estimator else {
            if self.stream.is_some() {
                bail_usage!("--stream: record with --estimator {RECORDED} alone");
            }
            return Ok(());
        };
        for (option, _) in &self.options.0 {
            let taken = row.option(option.name);
            taken.map_err(|error| UsageError(error.to_string()))?;
        }
        if self.stream.is_some() && row.name != RECORDED {
            bail_usage!("--stream: {} does not take it; {RECORDED} does", row.name);
        }
        Ok(())
    }
}
