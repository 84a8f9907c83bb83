//! The offline algorithms that make curves, one row each.

use std::num::NonZeroUsize;
use std::thread::available_parallelism;

use plimsoll_flow::{PageCount, rate_text};

use super::options::{Options, SEED, count, missing, named, not_taken, rate, spec, unknown};
use super::{BuildError, OptionKind, OptionSpec, OptionValue, Settings};
use crate::partial::SliceOf;
use crate::parts::hash::check_rate;
use crate::{
    Aet, AverageFootprint, CounterStacks, CounterStacksOptions, Estimator, EstimatorError,
    ExactLru, GhostLru, GhostOptions, ParallelLru, Shards, SizedLru, SpatialAet,
};

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

/// Size of a segment of a ghost list: 4 MiB.
const SEGMENT_BYTES: u64 = 4 << 20;

/// All offline algorithms.
pub const ALGORITHMS: &[Algorithm] = &[
    Algorithm {
        name: "lru",
        help: "Exact stack distances",
        options: &[count(
            "threads",
            1,
            "threads to run on, at most one a processor",
        )],
        is_exact: true,
        cost: "O(log pages) a reference; 13 bytes a page, and 30 MB a thread if there are several",
        source: "[Mattson70], [Olken81]",
        make: |options| {
            // More would take memory and gain nothing.
            let processors = available_parallelism().unwrap_or(NonZeroUsize::MIN);
            let threads = options.count("threads").min(processors);
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
            let segment = PageCount::from_bytes(SEGMENT_BYTES, options.page_size());
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

/// Each option of any algorithm once, with the rows that take it.
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
    pub fn samples_on_request(&self) -> bool {
        let default = named(self.options, "rate").and_then(|rate| rate.default);
        default == Some(OptionValue::Rate(1.0))
    }

    /// The first required option that was not given.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::{batch_of, curve_of, uniform};
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
            "--ratio: shards takes only --rate, --seed"
        );
        assert_eq!(
            option("footprint", "ratio"),
            "--ratio: footprint takes no options"
        );
    }
}
