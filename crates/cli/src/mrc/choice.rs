//! Which estimator finds the curve, and how it is set.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use plimsoll_estimator::{
    Aet, AverageFootprint, CounterStacks, CounterStacksOptions, Estimator, ExactLru,
    FixedSizeShards, GhostLru, GhostOptions, ParallelLru, Shards, SpatialAet,
};
use plimsoll_flow::{PageCount, PageSize};

use super::CurveSize;
use crate::size::Rate;
use plimsoll_output::exit::UsageError;
use plimsoll_output::{bail_usage, grouped};

/// Estimator of the curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Algorithm {
    /// Exact stack distances
    Lru,
    /// Exact distances of a sample of the pages, scaled up
    Shards,
    /// SHARDS with a fixed maximum number of pages
    ShardsMax,
    /// Average eviction time: distances from reuse times, of all references or of a sample
    Aet,
    /// Distances from the growth of HyperLogLog counters
    CounterStacks,
    /// Slope of the average footprint of all windows
    Footprint,
    /// A memory of --direct pages and a ghost list of the pages it evicts
    Ghost,
    /// All estimators, compared
    All,
}

/// Unit of sampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Unit {
    /// Single references, at random
    #[default]
    References,
    /// Pages, with all their references
    Pages,
}

/// Options of the estimators. Flatten them into a verb's `Args`.
#[derive(Debug, clap::Args)]
pub struct EstimatorArgs {
    /// Estimator of the curve
    #[arg(long, value_enum, default_value_t = Algorithm::Lru)]
    estimator: Algorithm,
    /// Share to sample: of pages for shards, of references or pages for aet [default: shards 1/100, aet 1]
    #[arg(long)]
    rate: Option<Rate>,
    /// Unit that aet samples at --rate
    #[arg(long, value_enum, requires = "rate")]
    sample: Option<Unit>,
    /// Maximum number of pages of shards-max [default: 8192]
    #[arg(long, value_name = "N")]
    max_samples: Option<NonZeroUsize>,
    /// Threads of lru [default: 1]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// References per new counter of counter-stacks [default: 4096]
    #[arg(long, value_name = "N")]
    interval: Option<u32>,
    /// Record the counters of counter-stacks in this file, for later curves of any --window
    #[arg(long, value_name = "FILE")]
    stream: Option<PathBuf>,
    /// Memory in front of the ghost list: pages, or bytes with a unit
    #[arg(long, value_name = "SIZE")]
    direct: Option<CurveSize>,
    /// Capacity of the ghost list: pages, or bytes with a unit [default: 1M pages]
    #[arg(long, value_name = "SIZE")]
    ghost: Option<CurveSize>,
    /// Random seed of the sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

const SHARDS_RATE: f64 = 0.01;
const MAX_SAMPLES: usize = 8192;
/// Rate of the sampled AETs in a comparison, where none is given.
const COMPARED_RATE: f64 = 0.01;
const GHOST: PageCount = PageCount(1 << 20);
/// Four MiB of small pages.
const SEGMENT_BYTES: u64 = 4 << 20;

/// An estimator and what to call it.
pub(super) struct Contestant {
    pub(super) name: String,
    pub(super) estimator: Box<dyn Estimator>,
    /// Below this size the estimator says nothing.
    pub(super) from: PageCount,
}

impl Contestant {
    fn new(name: impl Into<String>, estimator: impl Estimator + 'static) -> Self {
        Self {
            name: name.into(),
            estimator: Box::new(estimator),
            from: PageCount(0),
        }
    }
}

impl EstimatorArgs {
    /// Whether every estimator is asked for.
    pub(super) fn is_all(&self) -> bool {
        self.estimator == Algorithm::All
    }

    /// Whether no estimator was asked for, nor set.
    pub(super) fn is_default(&self) -> bool {
        self.estimator == Algorithm::Lru && self.options().iter().all(|(_, given, _)| !given)
    }

    /// Where to record counters, if anywhere.
    pub(super) fn stream(&self) -> Option<&Path> {
        self.stream.as_deref()
    }

    /// How counters are set up.
    pub(super) fn counter_stacks_options(&self) -> CounterStacksOptions {
        let default = CounterStacksOptions::default();
        CounterStacksOptions {
            seed: self.seed,
            interval: self.interval.unwrap_or(default.interval),
            ..default
        }
    }

    /// Builds the estimator asked for; for `all`, every one.
    ///
    /// # Errors
    ///
    /// A [`UsageError`](plimsoll_output::exit::UsageError) for an option that it does not take.
    pub(super) fn contestants(&self, page_size: PageSize) -> anyhow::Result<Vec<Contestant>> {
        self.check()?;
        let compared = || self.rate.or(Rate::new(COMPARED_RATE)).unwrap_or(Rate::ONE);
        let shards = || self.rate.or(Rate::new(SHARDS_RATE)).unwrap_or(Rate::ONE);
        let one = match (self.estimator, self.rate, self.sample.unwrap_or_default()) {
            (Algorithm::Lru, ..) => self.lru(),
            (Algorithm::Shards, ..) => self.shards(shards())?,
            (Algorithm::ShardsMax, ..) => self.shards_max(),
            (Algorithm::Aet, None, _) => aet(),
            (Algorithm::Aet, Some(rate), Unit::References) => self.aet_of_references(rate)?,
            (Algorithm::Aet, Some(rate), Unit::Pages) => self.aet_of_pages(rate)?,
            (Algorithm::CounterStacks, ..) => self.counter_stacks()?,
            (Algorithm::Footprint, ..) => footprint(),
            (Algorithm::Ghost, ..) => self.ghost(page_size)?,
            (Algorithm::All, ..) => {
                let mut all = vec![
                    self.lru(),
                    self.shards(shards())?,
                    self.shards_max(),
                    aet(),
                    self.aet_of_references(compared())?,
                    self.aet_of_pages(compared())?,
                    self.counter_stacks()?,
                    footprint(),
                ];
                if self.direct.is_some() {
                    all.push(self.ghost(page_size)?);
                }
                return Ok(all);
            }
        };
        Ok(vec![one])
    }

    /// Refuses options that the estimator asked for does not take.
    fn check(&self) -> anyhow::Result<()> {
        if self.rate.is_some() && self.estimator == Algorithm::Lru {
            bail_usage!("--rate: lru uses every reference; only shards and aet sample");
        }
        if self.stream.is_some() && self.is_all() {
            bail_usage!("--stream: record with --estimator counter-stacks alone");
        }
        for (option, given, takers) in self.options() {
            if given && !self.is_all() && !takers.contains(&self.estimator) {
                bail_usage!(
                    "{option}: {} does not take it; {} does",
                    name_of(self.estimator),
                    takers
                        .iter()
                        .copied()
                        .map(name_of)
                        .collect::<Vec<_>>()
                        .join(" or ")
                );
            }
        }
        Ok(())
    }

    /// Options that not every estimator takes: whether it was given, and who does.
    fn options(&self) -> [(&'static str, bool, &'static [Algorithm]); 8] {
        use Algorithm::{Aet, CounterStacks, Ghost, Lru, Shards, ShardsMax};
        [
            ("--rate", self.rate.is_some(), &[Shards, Aet]),
            ("--sample", self.sample.is_some(), &[Aet]),
            ("--max-samples", self.max_samples.is_some(), &[ShardsMax]),
            ("--threads", self.threads.is_some(), &[Lru]),
            ("--interval", self.interval.is_some(), &[CounterStacks]),
            ("--stream", self.stream.is_some(), &[CounterStacks]),
            ("--direct", self.direct.is_some(), &[Ghost]),
            ("--ghost", self.ghost.is_some(), &[Ghost]),
        ]
    }

    fn lru(&self) -> Contestant {
        match self.threads {
            Some(threads) if threads.get() > 1 => {
                let name = format!("exact LRU, {threads} threads");
                Contestant::new(name, ParallelLru::new(threads))
            }
            _ => Contestant::new("exact LRU", ExactLru::new()),
        }
    }

    fn shards(&self, rate: Rate) -> anyhow::Result<Contestant> {
        let shards = Shards::new(rate.get(), self.seed)?;
        Ok(Contestant::new(format!("SHARDS at rate {rate}"), shards))
    }

    fn shards_max(&self) -> Contestant {
        let pages = self
            .max_samples
            .or(NonZeroUsize::new(MAX_SAMPLES))
            .unwrap_or(NonZeroUsize::MIN);
        let name = format!("SHARDS of {} pages", grouped(pages.get() as f64));
        Contestant::new(name, FixedSizeShards::new(pages, self.seed))
    }

    fn aet_of_references(&self, rate: Rate) -> anyhow::Result<Contestant> {
        let aet = Aet::sampled(rate.get(), self.seed)?;
        Ok(Contestant::new(format!("AET at rate {rate}"), aet))
    }

    fn aet_of_pages(&self, rate: Rate) -> anyhow::Result<Contestant> {
        let aet = SpatialAet::new(rate.get(), self.seed)?;
        Ok(Contestant::new(format!("AET of {rate} of the pages"), aet))
    }

    fn counter_stacks(&self) -> anyhow::Result<Contestant> {
        let options = self.counter_stacks_options();
        let stacks = CounterStacks::new(options).map_err(|error| usage(&error))?;
        Ok(Contestant::new("Counter Stacks", stacks))
    }

    fn ghost(&self, page_size: PageSize) -> anyhow::Result<Contestant> {
        let Some(direct) = self.direct else {
            bail_usage!(
                "--estimator ghost requires --direct SIZE, the size of the memory in front of it"
            );
        };
        let direct = direct.to_pages(page_size);
        let ghost = self.ghost.map_or(GHOST, |size| size.to_pages(page_size));
        let options = GhostOptions {
            direct,
            ghost,
            segment: PageCount::from_bytes(SEGMENT_BYTES, page_size).max(PageCount(1)),
        };
        let contestant = Contestant::new(
            format!("ghost behind {} pages", grouped(direct.0 as f64)),
            GhostLru::new(options).map_err(|error| usage(&error))?,
        );
        Ok(Contestant {
            from: direct,
            ..contestant
        })
    }
}

fn aet() -> Contestant {
    Contestant::new("AET", Aet::new())
}

fn footprint() -> Contestant {
    Contestant::new("average footprint", AverageFootprint::new())
}

/// What an estimator refuses, the command line asked for.
fn usage(error: &dyn std::error::Error) -> anyhow::Error {
    UsageError(error.to_string()).into()
}

fn name_of(algorithm: Algorithm) -> String {
    algorithm
        .to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}
