//! All offline algorithms and all working-set estimators by name, one row each, used by the
//! command line, the benchmarks and the fuzz target.
//!
//! To add an algorithm, write its file and its row here. Names of options are shared: two rows that
//! take an option of one name take it with the same type.
//!
//! ```
//! use plimsoll_estimator::registry::{OptionValue, Settings, algorithm};
//!
//! let mut settings = Settings::default();
//! settings.set("rate", OptionValue::Rate(0.1));
//! let built = algorithm("shards")?.build(&settings)?;
//! assert_eq!(built.label, "SHARDS at rate 1/10");
//! # Ok::<(), plimsoll_estimator::registry::BuildError>(())
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::num::{NonZeroU16, NonZeroU32, NonZeroUsize};

use plimsoll_flow::{PageCount, PageSize, rate_text};

use crate::partial::SliceOf;
use crate::parts::hash::check_rate;
use crate::working_set::{
    Pml, PmlOptions, Prl, PrlOptions, Sampling, SamplingOptions, TouchedOptions, TouchedPages,
    WorkingSetEstimator,
};
use crate::{
    Aet, AverageFootprint, CounterStacks, CounterStacksOptions, Estimator, EstimatorError,
    ExactLru, GhostLru, GhostOptions, ParallelLru, Shards, SizedLru, SpatialAet,
};

/// The type of an option's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionKind {
    /// A sampling rate, above 0.0 and at most 1.0.
    Rate,
    /// A whole number, at least 1.
    Count,
    /// The seed of a random choice; ignored by algorithms without one.
    Seed,
    /// A size in pages.
    Size,
    /// A share, 0.0 or more.
    Share,
}

impl OptionKind {
    /// Placeholder of a value in help.
    #[must_use]
    pub fn value_name(self) -> &'static str {
        match self {
            Self::Rate => "RATE",
            Self::Count => "N",
            Self::Seed => "SEED",
            Self::Size => "SIZE",
            Self::Share => "SHARE",
        }
    }
}

/// The value of an option.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OptionValue {
    /// Value of [`OptionKind::Rate`].
    Rate(f64),
    /// Value of [`OptionKind::Count`].
    Count(NonZeroUsize),
    /// Value of [`OptionKind::Seed`].
    Seed(u64),
    /// Value of [`OptionKind::Size`].
    Size(PageCount),
    /// Value of [`OptionKind::Share`].
    Share(f64),
}

impl fmt::Display for OptionValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate(rate) => f.write_str(&rate_text(*rate)),
            Self::Count(count) => write!(f, "{count}"),
            Self::Seed(seed) => write!(f, "{seed}"),
            Self::Size(pages) => write!(f, "{pages} pages"),
            Self::Share(share) => write!(f, "{} %", share * 100.0),
        }
    }
}

/// An option that an algorithm takes.
#[derive(Debug, Clone, Copy)]
pub struct OptionSpec {
    /// The name, without leading dashes.
    pub name: &'static str,
    /// The type of its value.
    pub kind: OptionKind,
    /// The default value; `None` for a required option.
    pub default: Option<OptionValue>,
    /// One line of help, in a form that can follow a colon.
    pub help: &'static str,
}

/// Options given by a user, for any row that takes them.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Page size of the trace, by which defaults in bytes are converted to pages.
    page_size: PageSize,
    values: BTreeMap<&'static str, OptionValue>,
}

impl Settings {
    /// Returns settings without values, for a trace of that page size.
    #[must_use]
    pub fn new(page_size: PageSize) -> Self {
        Self {
            page_size,
            ..Self::default()
        }
    }

    /// Sets the value of an option.
    pub fn set(&mut self, name: &'static str, value: OptionValue) {
        self.values.insert(name, value);
    }

    /// The value of an option, if it was set.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<OptionValue> {
        self.values.get(name).copied()
    }
}

/// A configured algorithm, ready to observe.
pub struct BuiltEstimator {
    /// Label in tables, with its main setting.
    pub label: String,
    /// The algorithm itself.
    pub estimator: Box<dyn Estimator>,
}

/// The same for objects with sizes.
pub struct BuiltSizedEstimator {
    /// Label in tables, with its main setting.
    pub label: String,
    /// The algorithm itself.
    pub estimator: SizedLru,
}

/// Why an estimator of the registry was not built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// No row has this name.
    #[error("there is no estimator '{name}', only {known}")]
    Unknown {
        /// The name.
        name: String,
        /// All names.
        known: String,
    },
    /// The estimator does not take the option.
    #[error("--{option}: {algorithm} {reason}")]
    NotTaken {
        /// The estimator.
        algorithm: &'static str,
        /// The option.
        option: String,
        /// The rest of the sentence: why not, and which estimators do.
        reason: String,
    },
    /// A required option was not given.
    #[error("--estimator {algorithm} requires --{option} {}, the {help}", kind.value_name())]
    Missing {
        /// The algorithm.
        algorithm: &'static str,
        /// The option.
        option: &'static str,
        /// The type of its value.
        kind: OptionKind,
        /// Its description.
        help: &'static str,
    },
    /// The estimator must see a stream as a whole.
    #[error("{algorithm} has no partial states; {others} have")]
    Indivisible {
        /// The estimator.
        algorithm: &'static str,
        /// Those that have.
        others: String,
    },
    /// The algorithm rejects its options.
    #[error(transparent)]
    Refused(#[from] EstimatorError),
}

/// Makes an estimator with the options of its row.
type Make<T> = fn(&Options) -> Result<T, EstimatorError>;

/// A row of the registry.
#[derive(Debug, Clone, Copy)]
pub struct Algorithm {
    /// The name on the command line.
    pub name: &'static str,
    /// One line of help.
    pub help: &'static str,
    /// The options that it takes.
    pub options: &'static [OptionSpec],
    /// Whether the curve is exact with the options' defaults.
    pub is_exact: bool,
    /// Time per reference, and memory.
    pub cost: &'static str,
    /// The paper, by its key in `docs/papers.md`.
    pub source: &'static str,
    make: Make<BuiltEstimator>,
    /// Makes the estimator for objects with sizes, if there is one.
    make_sized: Option<Make<BuiltSizedEstimator>>,
    /// What its partial states are of, if a stream may be observed in slices that are merged later.
    slice: Option<fn(&Options) -> SliceOf>,
}

/// The options of one row: given values or defaults.
struct Options<'a> {
    specs: &'static [OptionSpec],
    settings: &'a Settings,
}

impl<'a> Options<'a> {
    /// Those of the row called `name`.
    fn new(
        name: &'static str,
        specs: &'static [OptionSpec],
        settings: &'a Settings,
    ) -> Result<Self, BuildError> {
        match missing(specs, settings) {
            None => Ok(Self { specs, settings }),
            Some(option) => Err(BuildError::Missing {
                algorithm: name,
                option: option.name,
                kind: option.kind,
                help: option.help,
            }),
        }
    }

    /// The value of an option of the row, which has been checked to have one.
    fn value(&self, name: &str) -> OptionValue {
        let default = || named(self.specs, name).and_then(|option| option.default);
        let value = self.settings.get(name).or_else(default);
        value.expect("rows read their own options")
    }

    fn rate(&self) -> f64 {
        match self.value("rate") {
            OptionValue::Rate(rate) => rate,
            other => unreachable!("{other:?} for a rate"),
        }
    }

    fn count(&self, name: &str) -> NonZeroUsize {
        match self.value(name) {
            OptionValue::Count(count) => count,
            other => unreachable!("{other:?} for a count"),
        }
    }

    /// A count, at most the largest number of its type.
    fn small_count<T: TryFrom<NonZeroUsize>>(&self, name: &str, max: T) -> T {
        T::try_from(self.count(name)).unwrap_or(max)
    }

    fn seed(&self) -> u64 {
        match self.value("seed") {
            OptionValue::Seed(seed) => seed,
            other => unreachable!("{other:?} for a seed"),
        }
    }

    fn size(&self, name: &str) -> PageCount {
        match self.value(name) {
            OptionValue::Size(size) => size,
            other => unreachable!("{other:?} for a size"),
        }
    }

    fn share(&self, name: &str) -> f64 {
        match self.value(name) {
            OptionValue::Share(share) => share,
            other => unreachable!("{other:?} for a share"),
        }
    }
}

fn named(specs: &'static [OptionSpec], name: &str) -> Option<&'static OptionSpec> {
    specs.iter().find(|option| option.name == name)
}

/// The first required option that was not given.
fn missing(specs: &'static [OptionSpec], settings: &Settings) -> Option<&'static OptionSpec> {
    let mut required = specs.iter().filter(|option| option.default.is_none());
    required.find(|option| settings.get(option.name).is_none())
}

/// The sentence after the name of a row that does not take an option, which `takers` do.
fn not_taken(specs: &[OptionSpec], takers: &[&str]) -> String {
    if !takers.is_empty() {
        return format!("does not take it; {} does", takers.join(" or "));
    }
    let taken: Vec<_> = specs.iter().map(|option| option.name).collect();
    match &*taken {
        [] => "takes no options".to_owned(),
        names => format!("takes only {}", names.join(", ")),
    }
}

fn unknown(name: &str, known: impl Iterator<Item = &'static str>) -> BuildError {
    BuildError::Unknown {
        name: name.to_owned(),
        known: known.collect::<Vec<_>>().join(", "),
    }
}

const fn rate(default: f64) -> OptionSpec {
    let default = Some(OptionValue::Rate(default));
    spec(
        "rate",
        OptionKind::Rate,
        default,
        "share of the pages to sample",
    )
}

const fn spec(
    name: &'static str,
    kind: OptionKind,
    default: Option<OptionValue>,
    help: &'static str,
) -> OptionSpec {
    OptionSpec {
        name,
        kind,
        default,
        help,
    }
}

const fn share_of(name: &'static str, default: f64, help: &'static str) -> OptionSpec {
    let default = Some(OptionValue::Share(default));
    spec(name, OptionKind::Share, default, help)
}

const fn count(name: &'static str, default: usize, help: &'static str) -> OptionSpec {
    let default = Some(OptionValue::Count(NonZeroUsize::new(default).unwrap()));
    spec(name, OptionKind::Count, default, help)
}

const SEED: OptionSpec = spec(
    "seed",
    OptionKind::Seed,
    Some(OptionValue::Seed(0)),
    "seed of the sampling",
);

/// Size of a segment of a ghost list: 4 MiB.
const SEGMENT_BYTES: u64 = 4 << 20;

/// All offline algorithms.
pub const ALGORITHMS: &[Algorithm] = &[
    Algorithm {
        name: "lru",
        help: "Exact stack distances",
        options: &[count("threads", 1, "threads to run on")],
        is_exact: true,
        cost: "O(log pages) a reference; 13 bytes a page",
        source: "[Mattson70], [Olken81]",
        make: |options| {
            let threads = options.count("threads");
            if threads.get() == 1 {
                return built("exact LRU", ExactLru::new());
            }
            let label = format!("exact LRU, {threads} threads");
            built(label, ParallelLru::new(threads))
        },
        make_sized: Some(|_| {
            Ok(BuiltSizedEstimator {
                label: "exact LRU of objects".to_owned(),
                estimator: SizedLru::exact(),
            })
        }),
        slice: Some(|_| SliceOf::Lru),
    },
    Algorithm {
        name: "shards",
        help: "Exact distances of a sample of the pages, scaled up",
        options: &[rate(0.01), SEED],
        is_exact: false,
        cost: "1 ns a reference, more for sampled ones; 60 bytes a sampled page",
        source: "[Waldspurger15]",
        make: |options| {
            let rate = options.rate();
            let label = format!("SHARDS at rate {}", rate_text(rate));
            built(label, Shards::new(rate, options.seed())?)
        },
        make_sized: Some(|options| {
            let rate = options.rate();
            Ok(BuiltSizedEstimator {
                label: format!("LRU of {} of the objects", rate_text(rate)),
                estimator: SizedLru::sampled(rate, options.seed())?,
            })
        }),
        slice: Some(|options| SliceOf::Shards {
            rate: options.rate(),
            seed: options.seed(),
        }),
    },
    Algorithm {
        name: "shards-max",
        help: "SHARDS with a fixed maximum number of pages",
        options: &[count("max-samples", 8192, "maximum number of pages"), SEED],
        is_exact: false,
        cost: "1 ns a reference, more for sampled ones; 60 bytes a sampled page",
        source: "[Waldspurger15] §4.3",
        make: |options| {
            let pages = options.count("max-samples");
            let label = format!("SHARDS of {pages} pages");
            built(label, Shards::fixed_size(pages, options.seed()))
        },
        make_sized: None,
        slice: Some(|options| SliceOf::ShardsMax {
            max_samples: options.count("max-samples"),
            seed: options.seed(),
        }),
    },
    Algorithm {
        name: "aet",
        help: "Average eviction time: distances from reuse times, of all pages or of a sample",
        options: &[rate(1.0), SEED],
        is_exact: false,
        cost: "O(1) a reference; 4 to 24 bytes a page",
        source: "[Hu16]",
        make: |options| {
            let rate = options.rate();
            check_rate(rate)?;
            if rate >= 1.0 {
                return built("AET", Aet::new());
            }
            let label = format!("AET of {} of the pages", rate_text(rate));
            built(label, SpatialAet::new(rate, options.seed())?)
        },
        make_sized: None,
        slice: None,
    },
    Algorithm {
        name: "counter-stacks",
        help: "Distances from the growth of HyperLogLog counters",
        options: &[count("interval", 4096, "references per new counter"), SEED],
        is_exact: false,
        cost: "O(1) a reference; logarithmic in the stream's length",
        source: "[Wires14]",
        make: |options| {
            let counters = CounterStacksOptions {
                seed: options.seed(),
                ..CounterStacksOptions::default()
            };
            let stacks = counters.with_interval(options.count("interval").get());
            let stacks = stacks.and_then(CounterStacks::new);
            let stacks = stacks.map_err(EstimatorError::from)?;
            built("Counter Stacks", stacks)
        },
        make_sized: None,
        slice: None,
    },
    Algorithm {
        name: "footprint",
        help: "Slope of the average footprint of all windows",
        options: &[],
        is_exact: false,
        cost: "O(1) a reference; 4 to 24 bytes a page",
        source: "[Xiang13]",
        make: |_| built("average footprint", AverageFootprint::new()),
        make_sized: None,
        slice: None,
    },
    Algorithm {
        name: "ghost",
        help: "A memory of --direct pages and a ghost list of the pages it evicts",
        options: &[
            spec(
                "direct",
                OptionKind::Size,
                None,
                "size of the memory in front of the ghost list",
            ),
            spec(
                "ghost",
                OptionKind::Size,
                Some(OptionValue::Size(PageCount(1 << 20))),
                "capacity of the ghost list",
            ),
        ],
        is_exact: false,
        cost: "O(1) trips to memory a reference; 53 bytes a page, allocated at the start",
        source: "[LS07], [Patterson95]",
        make: |options| {
            let direct = options.size("direct");
            let segment = PageCount::from_bytes(SEGMENT_BYTES, options.settings.page_size);
            let ghost = GhostLru::new(GhostOptions {
                direct,
                ghost: options.size("ghost"),
                segment: segment.max(PageCount(1)),
            });
            let label = format!("ghost behind {direct} pages");
            built(label, ghost.map_err(EstimatorError::from)?)
        },
        make_sized: None,

        slice: None,
    },
];

fn built(
    label: impl Into<String>,
    estimator: impl Estimator + 'static,
) -> Result<BuiltEstimator, EstimatorError> {
    Ok(BuiltEstimator {
        label: label.into(),
        estimator: Box::new(estimator),
    })
}

/// The row with this name.
///
/// # Errors
///
/// [`BuildError::Unknown`] if there is none.
pub fn algorithm(name: &str) -> Result<&'static Algorithm, BuildError> {
    let mut rows = ALGORITHMS.iter();
    let names = ALGORITHMS.iter().map(|row| row.name);
    let row = rows.find(|row| row.name == name);
    row.ok_or_else(|| unknown(name, names))
}

/// The row of [`METHODS`] with this name.
///
/// # Errors
///
/// [`BuildError::Unknown`] if there is none.
pub fn method(name: &str) -> Result<&'static Method, BuildError> {
    let mut rows = METHODS.iter();
    let names = METHODS.iter().map(|row| row.name);
    let row = rows.find(|row| row.name == name);
    row.ok_or_else(|| unknown(name, names))
}

/// Each option of any algorithm once, with the rows that take it.
#[must_use]
pub fn options() -> Vec<(OptionSpec, Vec<&'static Algorithm>)> {
    let mut all: Vec<(OptionSpec, Vec<&'static Algorithm>)> = Vec::new();
    for row in ALGORITHMS {
        for option in row.options {
            match all.iter_mut().find(|(other, _)| other.name == option.name) {
                Some((_, rows)) => rows.push(row),
                None => all.push((*option, vec![row])),
            }
        }
    }
    all
}

impl Algorithm {
    /// The option with this name.
    ///
    /// # Errors
    ///
    /// [`BuildError::NotTaken`] if the algorithm does not take it.
    pub fn option(&self, name: &str) -> Result<&'static OptionSpec, BuildError> {
        named(self.options, name).ok_or_else(|| {
            let takers = names(|row| named(row.options, name).is_some());
            let reason = match name {
                "rate" if self.is_exact => {
                    let takers = takers.join(" and ");
                    format!("uses every reference; only {takers} sample")
                }
                _ => not_taken(self.options, &takers),
            };
            BuildError::NotTaken {
                algorithm: self.name,
                option: name.to_owned(),
                reason,
            }
        })
    }

    /// Whether it samples pages only on request and uses all of them by default.
    #[must_use]
    pub fn samples_on_request(&self) -> bool {
        let default = named(self.options, "rate").and_then(|rate| rate.default);
        default == Some(OptionValue::Rate(1.0))
    }

    /// The first required option that was not given.
    #[must_use]
    pub fn missing(&self, settings: &Settings) -> Option<&'static OptionSpec> {
        missing(self.options, settings)
    }

    /// Builds the algorithm. Settings that it does not take are ignored.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if an option is missing or out of its range.
    ///
    /// # Panics
    ///
    /// If a value has another type than its option.
    pub fn build(&self, settings: &Settings) -> Result<BuiltEstimator, BuildError> {
        let options = Options::new(self.name, self.options, settings)?;
        Ok((self.make)(&options)?)
    }

    /// Builds the algorithm for objects with sizes.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if there is none, or an option is missing or out of its range.
    ///
    /// # Panics
    ///
    /// If a value has another type than its option.
    pub fn build_sized(&self, settings: &Settings) -> Result<BuiltSizedEstimator, BuildError> {
        let Some(make) = self.make_sized else {
            let takers = ALGORITHMS.iter().filter(|row| row.make_sized.is_some());
            let takers: Vec<_> = takers.map(|row| row.name).collect();
            return Err(BuildError::NotTaken {
                algorithm: self.name,
                option: "object-sizes".to_owned(),
                reason: not_taken(self.options, &takers),
            });
        };
        Ok(make(&Options::new(self.name, self.options, settings)?)?)
    }

    /// Whether a stream may be observed in slices, whose partial states are merged.
    #[must_use]
    pub fn has_slices(&self) -> bool {
        self.slice.is_some()
    }

    /// What partial states of the algorithm with these settings are of. Settings that it does not take are ignored.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if it has none, or if an option is missing.
    pub fn slice(&self, settings: &Settings) -> Result<SliceOf, BuildError> {
        let options = Options::new(self.name, self.options, settings)?;
        let slice = self.slice.ok_or_else(|| BuildError::Indivisible {
            algorithm: self.name,
            others: names(Self::has_slices).join(", "),
        })?;
        Ok(slice(&options))
    }
}

/// The names of some rows.
fn names(which: impl Fn(&Algorithm) -> bool) -> Vec<&'static str> {
    let rows = ALGORITHMS.iter().filter(|row| which(row));
    rows.map(|row| row.name).collect()
}

/// Input of a working-set estimator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feed {
    /// Pages of all page walks, with the numbers used by the TLB.
    Walks,
    /// The same pages, numbered from 0 to the end of the memory.
    RamPages,
    /// Pages of all walks as drained from the buffers of page reference logging (PRL).
    LoggedWalks,
    /// Pages of first writes as drained from the buffers of page modification logging (PML).
    LoggedWrites,
}

impl Feed {
    /// One line of help.
    #[must_use]
    pub fn help(self) -> &'static str {
        match self {
            Self::Walks => "pages of all accesses, or of all page walks",
            Self::RamPages => "the same pages, numbered from 0 to the end of the memory",
            Self::LoggedWalks => "pages of page walks, as drained from the buffers of PRL",
            Self::LoggedWrites => "pages of first writes, as drained from the buffers of PML",
        }
    }
}

/// How a method's size is plotted over the intervals of a run.
#[derive(Debug, Clone, Copy)]
pub struct PlotLine {
    /// Name of the line.
    pub label: &'static str,
    /// Index of its column.
    pub column: usize,
    /// Indices of the columns of its lower and upper limit.
    pub band: Option<(usize, usize)>,
}

/// A row of the registry: an estimator of working sets that needs no curve.
#[derive(Debug, Clone, Copy)]
pub struct Method {
    /// The name on the command line.
    pub name: &'static str,
    /// One line of help.
    pub help: &'static str,
    /// The options that it takes.
    pub options: &'static [OptionSpec],
    /// Its input.
    pub feed: Feed,
    /// Whether it refers to the last interval alone instead of the whole run.
    pub of_last_interval: bool,
    /// The time to which its size refers, if it does not settle; `None` for a method whose size settles.
    pub reported: Option<&'static str>,
    /// Names of the columns of each interval's result.
    pub columns: &'static [&'static str],
    /// How it is plotted.
    pub plotted: PlotLine,
    /// The paper, by its key in `docs/papers.md`.
    pub source: &'static str,
    make: fn(&Options) -> Box<dyn WorkingSetEstimator>,
}

impl Method {
    /// The option with this name.
    ///
    /// # Errors
    ///
    /// [`BuildError::NotTaken`] if the method does not take it.
    pub fn option(&self, name: &str) -> Result<&'static OptionSpec, BuildError> {
        named(self.options, name).ok_or_else(|| {
            let takers = METHODS.iter();
            let takers = takers.filter(|row| named(row.options, name).is_some());
            let takers: Vec<_> = takers.map(|row| row.name).collect();
            BuildError::NotTaken {
                algorithm: self.name,
                option: name.to_owned(),
                reason: not_taken(self.options, &takers),
            }
        })
    }

    /// Builds the method. Settings that it does not take are ignored.
    ///
    /// # Errors
    ///
    /// [`BuildError::Missing`] if a required option was not given.
    ///
    /// # Panics
    ///
    /// If a value has another type than its option.
    pub fn build(&self, settings: &Settings) -> Result<Box<dyn WorkingSetEstimator>, BuildError> {
        let options = Options::new(self.name, self.options, settings)?;
        Ok((self.make)(&options))
    }
}

const OMEGA: OptionSpec = count(
    "omega",
    PrlOptions::DEFAULT.omega.get() as usize,
    "number of intervals without change after which the estimate is settled",
);

const TOLERANCE: OptionSpec = share_of(
    "tolerance",
    PrlOptions::DEFAULT.tolerance,
    "growth within omega intervals that is ignored; 0 is the paper's rule",
);

/// All estimators of working sets that are fed pages. The first is the truth with which the others are compared.
pub const METHODS: &[Method] = &[
    Method {
        name: "truth",
        help: "Pages really touched",
        options: &[
            count(
                "window",
                TouchedOptions::DEFAULT.intervals.get() as usize,
                "window in intervals",
            ),
            count(
                "times",
                TouchedOptions::DEFAULT.times.get() as usize,
                "number of these intervals in which a page must have been accessed",
            ),
        ],
        feed: Feed::Walks,
        of_last_interval: false,
        reported: Some("at the end"),
        columns: &["touched_pages", "truth_pages"],
        plotted: PlotLine {
            label: "truth",
            column: 1,
            band: None,
        },
        source: "[Denning68]",
        make: |options| {
            Box::new(TouchedPages::new(TouchedOptions {
                intervals: options.small_count("window", NonZeroU16::MAX),
                times: options.small_count("times", NonZeroU16::MAX),
            }))
        },
    },
    Method {
        name: "prl",
        help: "Pages logged often by page reference logging",
        options: &[
            count(
                "tau",
                PrlOptions::DEFAULT.tau.get() as usize,
                "number of times a page is logged until it is hot",
            ),
            OMEGA,
            share_of(
                "warm-up",
                PrlOptions::DEFAULT.warm_up,
                "share of the pages logged within omega intervals that must be hot before the estimate settles",
            ),
            TOLERANCE,
            spec(
                "epsilon",
                OptionKind::Size,
                Some(OptionValue::Size(PrlOptions::DEFAULT.epsilon)),
                "additional need of the guest's kernel, added to the estimate",
            ),
        ],
        feed: Feed::LoggedWalks,
        of_last_interval: false,
        reported: None,
        columns: &["prl_hot_pages", "prl_growth_pages"],
        plotted: PlotLine {
            label: "prl: hot pages",
            column: 0,
            band: None,
        },
        source: "[PRL] §4.4",
        make: |options| {
            Box::new(Prl::new(PrlOptions {
                tau: options.small_count("tau", NonZeroU32::MAX),
                omega: options.small_count("omega", NonZeroU16::MAX),
                warm_up: options.share("warm-up"),
                tolerance: options.share("tolerance"),
                epsilon: options.size("epsilon"),
            }))
        },
    },
    Method {
        name: "pml",
        help: "Pages logged by page modification logging",
        options: &[OMEGA, TOLERANCE],
        feed: Feed::LoggedWrites,
        of_last_interval: false,
        reported: None,
        columns: &["pml_written_pages", "pml_cumulative_pages"],
        plotted: PlotLine {
            label: "pml: pages written so far",
            column: 1,
            band: None,
        },
        source: "[PRL] §3.4",
        make: |options| {
            Box::new(Pml::new(PmlOptions {
                omega: options.small_count("omega", NonZeroU16::MAX),
                tolerance: options.share("tolerance"),
            }))
        },
    },
    Method {
        name: "esx",
        help: "VMware's sampling of random pages",
        options: &[
            count(
                "sample-pages",
                SamplingOptions::DEFAULT.pages.get() as usize,
                "pages sampled in each interval",
            ),
            SEED,
            spec("memory", OptionKind::Size, None, "memory of the VM"),
        ],
        feed: Feed::RamPages,
        of_last_interval: true,
        reported: Some("last interval"),
        columns: &[
            "esx_pages",
            "esx_low_pages",
            "esx_high_pages",
            "esx_smoothed_pages",
        ],
        plotted: PlotLine {
            label: "esx: sampled, 95 %",
            column: 0,
            band: Some((1, 2)),
        },
        source: "[Waldspurger02] §5.3",
        make: |options| {
            let sampling = SamplingOptions {
                pages: options.small_count("sample-pages", NonZeroU32::MAX),
                seed: options.seed(),
                ..SamplingOptions::DEFAULT
            };
            Box::new(Sampling::new(sampling, options.size("memory")))
        },
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::{batch_of, curve_of, uniform};
    use plimsoll_flow::PageNumber;

    #[test]
    fn every_row_builds_with_its_defaults_and_makes_a_curve() {
        let mut settings = Settings::default();
        settings.set("direct", OptionValue::Size(PageCount(100)));
        let pages: Vec<_> = uniform(1_000, 1).take(200_000).collect();
        let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
        for row in ALGORITHMS {
            assert_eq!(row.slice(&settings).is_ok(), row.has_slices());
            let mut built = row.build(&settings).unwrap();
            if let Ok(slice) = row.slice(&settings) {
                assert_eq!(slice.to_string(), built.label);
            }
            built.estimator.observe(&batch_of(pages.iter().copied()));
            let curve = built.estimator.curve().unwrap();
            if row.is_exact {
                assert_eq!(curve, exact, "{}", row.name);
            }
            assert!(built.estimator.smallest_size() <= PageCount(100));
        }
    }

    #[test]
    fn names_are_unique_and_options_of_one_name_have_one_type() {
        for (index, row) in ALGORITHMS.iter().enumerate() {
            assert!(
                ALGORITHMS[..index]
                    .iter()
                    .all(|other| other.name != row.name)
            );
            assert!(!row.help.is_empty() && !row.cost.is_empty() && !row.source.is_empty());
        }
        for (option, rows) in options() {
            for row in rows {
                assert_eq!(row.option(option.name).unwrap().kind, option.kind);
            }
        }
    }

    #[test]
    fn objects_with_sizes_have_the_curve_of_pages_if_all_are_alike() {
        let mut settings = Settings::default();
        settings.set("rate", OptionValue::Rate(1.0));
        let pages: Vec<_> = uniform(100, 1).take(2_000).collect();
        let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
        for row in ALGORITHMS.iter().filter(|row| row.make_sized.is_some()) {
            let mut built = row.build_sized(&settings).unwrap();
            let pages = batch_of(pages.iter().copied());
            built.estimator.observe(&pages, &vec![1; pages.len()]);
            let curves = built.estimator.curves().unwrap();
            assert_eq!((&curves.by_requests, &curves.by_bytes), (&exact, &exact));
        }
        let error = algorithm("aet").unwrap().build_sized(&settings);
        assert_eq!(
            error.err().unwrap().to_string(),
            "--object-sizes: aet does not take it; lru or shards does"
        );
    }

    #[test]
    fn a_rate_is_a_share() {
        for row in ALGORITHMS.iter().filter(|row| row.option("rate").is_ok()) {
            for rate in [0.0, -1.0, 1.5, f64::INFINITY, f64::NAN] {
                let mut settings = Settings::default();
                settings.set("rate", OptionValue::Rate(rate));
                let error = row.build(&settings).err().map(|error| error.to_string());
                assert!(
                    error.is_some_and(|error| error.contains("at most 1")),
                    "{} {rate}",
                    row.name
                );
            }
        }
    }

    #[test]
    fn a_missing_option_is_named() {
        let ghost = algorithm("ghost").unwrap();
        let error = ghost.build(&Settings::default()).err().unwrap().to_string();
        assert_eq!(
            error,
            "--estimator ghost requires --direct SIZE, the size of the memory in front of the ghost list"
        );
    }

    #[test]
    fn a_name_or_an_option_that_is_not_there_is_refused_with_those_that_are() {
        let text = |error: Option<BuildError>| error.unwrap().to_string();
        assert_eq!(
            text(algorithm("lfu").err()),
            "there is no estimator 'lfu', only lru, shards, shards-max, aet, counter-stacks, footprint, ghost"
        );
        assert_eq!(
            text(method("lru").err()),
            "there is no estimator 'lru', only truth, prl, pml, esx"
        );
        let option = |name, option| text(algorithm(name).unwrap().option(option).err());
        assert_eq!(
            option("lru", "rate"),
            "--rate: lru uses every reference; only shards and aet sample"
        );
        assert_eq!(
            option("aet", "threads"),
            "--threads: aet does not take it; lru does"
        );
        assert_eq!(
            option("shards", "ratio"),
            "--ratio: shards takes only rate, seed"
        );
        assert_eq!(
            option("footprint", "ratio"),
            "--ratio: footprint takes no options"
        );
        let option = |name, option| text(method(name).unwrap().option(option).err());
        assert_eq!(
            option("pml", "tau"),
            "--tau: pml does not take it; prl does"
        );
    }

    #[test]
    fn every_method_fills_its_columns_and_has_a_size() {
        let mut settings = Settings::default();
        settings.set("memory", OptionValue::Size(PageCount(100)));
        let pages: Vec<_> = (0..50).map(PageNumber).collect();
        for method in METHODS {
            let mut estimator = method.build(&settings).unwrap();
            assert_eq!(estimator.working_set(), None, "{}", method.name);
            estimator.observe(&pages);
            assert_eq!(estimator.end_interval().len(), method.columns.len());
            assert!(estimator.working_set().is_some());
            assert!(method.plotted.column < method.columns.len());
        }
        let error = METHODS[3].build(&Settings::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--estimator esx requires --memory SIZE, the memory of the VM"
        );
    }
}
