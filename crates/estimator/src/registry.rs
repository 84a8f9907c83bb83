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
//! let built = algorithm("shards").unwrap().build(&settings)?;
//! assert_eq!(built.label, "SHARDS at rate 1/10");
//! # Ok::<(), plimsoll_estimator::registry::BuildError>(())
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;

use plimsoll_flow::{PageCount, PageSize};

use crate::working_set::{
    Pml, PmlOptions, Prl, PrlOptions, Sampling, SamplingOptions, TouchedOptions, TouchedPages,
    WorkingSetEstimator,
};
use crate::{
    Aet, AverageFootprint, CounterStacks, CounterStacksOptions, Estimator, EstimatorError,
    ExactLru, FixedSizeShards, GhostLru, GhostOptions, ParallelLru, Shards, SpatialAet,
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
}

impl fmt::Display for OptionValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate(rate) => f.write_str(&share(*rate)),
            Self::Count(count) => write!(f, "{count}"),
            Self::Seed(seed) => write!(f, "{seed}"),
            Self::Size(pages) => write!(f, "{pages} pages"),
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

/// Options given by a user, for any algorithm that takes them.
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

/// Why an algorithm of the registry was not built.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
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
    /// The algorithm rejects its options.
    #[error(transparent)]
    Refused(#[from] EstimatorError),
}

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
    make: fn(&Options) -> Result<BuiltEstimator, EstimatorError>,
}

/// The options of one row: given values or defaults.
struct Options<'a> {
    row: &'a Algorithm,
    settings: &'a Settings,
}

impl Options<'_> {
    /// The value of an option of the row, which has been checked to have one.
    fn value(&self, name: &str) -> OptionValue {
        let default = || self.row.option(name).and_then(|option| option.default);
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
}

const fn rate(default: f64) -> OptionSpec {
    OptionSpec {
        name: "rate",
        kind: OptionKind::Rate,
        default: Some(OptionValue::Rate(default)),
        help: "share of the pages to sample",
    }
}

const fn count(name: &'static str, default: usize, help: &'static str) -> OptionSpec {
    OptionSpec {
        name,
        kind: OptionKind::Count,
        default: Some(OptionValue::Count(NonZeroUsize::new(default).unwrap())),
        help,
    }
}

const SEED: OptionSpec = OptionSpec {
    name: "seed",
    kind: OptionKind::Seed,
    default: Some(OptionValue::Seed(0)),
    help: "seed of the sampling",
};

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
            let label = format!("SHARDS at rate {}", share(rate));
            built(label, Shards::new(rate, options.seed())?)
        },
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
            built(label, FixedSizeShards::new(pages, options.seed()))
        },
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
            if rate >= 1.0 {
                return built("AET", Aet::new());
            }
            let label = format!("AET of {} of the pages", share(rate));
            built(label, SpatialAet::new(rate, options.seed())?)
        },
    },
    Algorithm {
        name: "counter-stacks",
        help: "Distances from the growth of HyperLogLog counters",
        options: &[count("interval", 4096, "references per new counter"), SEED],
        is_exact: false,
        cost: "O(1) a reference; logarithmic in the stream's length",
        source: "[Wires14]",
        make: |options| {
            let options = CounterStacksOptions {
                seed: options.seed(),
                // An interval beyond 32 bits also exceeds the maximum, and is refused.
                interval: u32::try_from(options.count("interval").get()).unwrap_or(u32::MAX),
                ..CounterStacksOptions::default()
            };
            let stacks = CounterStacks::new(options).map_err(EstimatorError::from)?;
            built("Counter Stacks", stacks)
        },
    },
    Algorithm {
        name: "footprint",
        help: "Slope of the average footprint of all windows",
        options: &[],
        is_exact: false,
        cost: "O(1) a reference; 4 to 24 bytes a page",
        source: "[Xiang13]",
        make: |_| built("average footprint", AverageFootprint::new()),
    },
    Algorithm {
        name: "ghost",
        help: "A memory of --direct pages and a ghost list of the pages it evicts",
        options: &[
            OptionSpec {
                name: "direct",
                kind: OptionKind::Size,
                default: None,
                help: "size of the memory in front of the ghost list",
            },
            OptionSpec {
                name: "ghost",
                kind: OptionKind::Size,
                default: Some(OptionValue::Size(PageCount(1 << 20))),
                help: "capacity of the ghost list",
            },
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

/// A share, written as a fraction 1/n if it is one.
fn share(share: f64) -> String {
    let parts = (1.0 / share).round();
    if parts > 1.0 && parts < 1e15 && 1.0 / parts == share {
        format!("1/{parts}")
    } else {
        share.to_string()
    }
}

/// The row with this name.
#[must_use]
pub fn algorithm(name: &str) -> Option<&'static Algorithm> {
    ALGORITHMS.iter().find(|row| row.name == name)
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
    /// The option with this name, if the algorithm takes it.
    #[must_use]
    pub fn option(&self, name: &str) -> Option<&OptionSpec> {
        self.options.iter().find(|option| option.name == name)
    }

    /// Whether it samples pages only on request and uses all of them by default.
    #[must_use]
    pub fn samples_on_request(&self) -> bool {
        let default = self.option("rate").and_then(|rate| rate.default);
        default == Some(OptionValue::Rate(1.0))
    }

    /// The first required option that was not given.
    #[must_use]
    pub fn missing(&self, settings: &Settings) -> Option<&OptionSpec> {
        let required = self.options.iter().filter(|o| o.default.is_none());
        required
            .into_iter()
            .find(|o| settings.get(o.name).is_none())
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
        if let Some(option) = self.missing(settings) {
            return Err(BuildError::Missing {
                algorithm: self.name,
                option: option.name,
                kind: option.kind,
                help: option.help,
            });
        }
        Ok((self.make)(&Options {
            row: self,
            settings,
        })?)
    }
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

/// The options of every method.
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs, reason = "the names of the others suffice")]
pub struct MethodOptions {
    pub truth: TouchedOptions,
    pub prl: PrlOptions,
    pub pml: PmlOptions,
    pub esx: SamplingOptions,
    /// Memory of the VM, from which `esx` samples.
    pub memory: Option<PageCount>,
}

/// A row of the registry: an estimator of working sets that needs no curve.
#[derive(Debug, Clone, Copy)]
pub struct Method {
    /// The name on the command line.
    pub name: &'static str,
    /// One line of help.
    pub help: &'static str,
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
    make: fn(&MethodOptions) -> Option<Box<dyn WorkingSetEstimator>>,
}

impl Method {
    /// Builds the method; `None` if it needs a memory size and there is none.
    #[must_use]
    pub fn build(&self, options: &MethodOptions) -> Option<Box<dyn WorkingSetEstimator>> {
        (self.make)(options)
    }
}

/// All estimators of working sets that are fed pages. The first is the truth with which the others are compared.
pub const METHODS: &[Method] = &[
    Method {
        name: "truth",
        help: "Pages really touched",
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
        make: |options| Some(Box::new(TouchedPages::new(options.truth))),
    },
    Method {
        name: "prl",
        help: "Pages logged often by page reference logging",
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
        make: |options| Some(Box::new(Prl::new(options.prl))),
    },
    Method {
        name: "pml",
        help: "Pages logged by page modification logging",
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
        make: |options| Some(Box::new(Pml::new(options.pml))),
    },
    Method {
        name: "esx",
        help: "VMware's sampling of random pages",
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
            let memory = options.memory?;
            Some(Box::new(Sampling::new(options.esx, memory)))
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
            let mut built = row.build(&settings).unwrap();
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
    fn a_missing_option_is_named() {
        let ghost = algorithm("ghost").unwrap();
        let error = ghost.build(&Settings::default()).err().unwrap().to_string();
        assert_eq!(
            error,
            "--estimator ghost requires --direct SIZE, the size of the memory in front of the ghost list"
        );
    }

    #[test]
    fn every_method_fills_its_columns_and_has_a_size() {
        let options = MethodOptions {
            memory: Some(PageCount(100)),
            ..MethodOptions::default()
        };
        let pages: Vec<_> = (0..50).map(PageNumber).collect();
        for method in METHODS {
            let mut estimator = method.build(&options).unwrap();
            assert_eq!(estimator.working_set(), None, "{}", method.name);
            estimator.observe(&pages);
            assert_eq!(estimator.end_interval().len(), method.columns.len());
            assert!(estimator.working_set().is_some());
            assert!(method.plotted.column < method.columns.len());
        }
        assert!(METHODS[3].build(&MethodOptions::default()).is_none());
    }
}
