//! Miss ratios of any eviction policy at chosen sizes, by simulating a small cache on a sample of the pages.
//!
//! LRU is a stack: one pass gives every size. Other policies have no such order; each size is a simulation of its own. It is
//! affordable because a cache of `R C` pages, on the references to a share `R` of the pages, chosen by their hash,
//! has about the miss ratio of `C` pages on all references. At `R = 1` it is the simulation itself, and exact. Sizes are
//! scaled by the share of the distinct pages that were really sampled, so that a loop keeps its place.
//!
//! The references to sampled pages are kept, 4 bytes each, so that sizes may be chosen when the number of pages is known,
//! and several policies see one reading. Pages are numbered in the order of their first use, and policies look them up in
//! arrays.
//!
//! **Correction.** A sample may lack a hot page or have one too many, an error that all policies share. What it does to LRU
//! is known: the ratio is multiplied by that of LRU's exact curve of all references ([`ExactLru`]) over that of LRU
//! simulated on the sample at the same size (a ratio estimator), because references to a hot page that the sample lacks change all
//! policies' ratios by one factor. This is ours; it costs a pass of exact LRU, and is left out at `R = 1`, where it is 1.
//!
//! Source: \[Waldspurger17\] §3; departs from it in the correction, and in that the sample is kept.
//! Cost: exact LRU for each reference; for a share `R` of them 4 bytes, and 10 to 30 ns for each size and policy.
//! Not here: the page store's policies and its \[Waldspurger17\] miniatures (crate `hcache`). A stage uses no other crate than
//! `flow`, and those judge pages that clients take out, in two queues of a shard, which cannot express ARC or W-TinyLFU.

mod arc;
mod fifo;
mod lru;
mod queues;
mod s3_fifo;
mod sieve;
mod w_tinylfu;

use std::fmt;
use std::sync::OnceLock;

use plimsoll_flow::{CurveError, MissRatioCurve, PageCount, PageNumber};

use crate::curve::lru::ExactLru;
use crate::error::EstimatorError;
use crate::estimator::Estimator as _;
use crate::parts::hash::{PageMap, PageSample, SampledPage, page_map};
use crate::parts::steps::ceiled;

/// Pages of a small cache from which on it says something of a policy.
const SMALL_PAGES_MIN: f64 = 8.0;

/// References that are simulated between two checks of [`MiniSim::points_checked`].
const PIECE: usize = 1 << 20;

/// A cache of a fixed number of pages.
pub trait CachePolicy {
    /// References a page; returns whether it was in the cache, where it is afterwards unless the policy does not admit it.
    fn access(&mut self, page: u32) -> bool;
}

/// A row of the registry: an eviction policy to simulate.
pub struct CachePolicyRow {
    /// The name on the command line.
    pub name: &'static str,
    /// One line of help.
    pub help: &'static str,
    /// The paper, by its key in `docs/papers.md`.
    pub source: &'static str,
    /// Makes an empty cache of `capacity` pages, at least one, for a stream of pages below the second number.
    make: fn(u32, u32) -> Box<dyn CachePolicy>,
}

impl fmt::Debug for CachePolicyRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// All policies that can be simulated.
pub static CACHE_POLICIES: [&CachePolicyRow; 6] = [
    &fifo::ROW,
    &lru::ROW,
    &arc::ROW,
    &s3_fifo::ROW,
    &sieve::ROW,
    &w_tinylfu::ROW,
];

/// The policy of a name.
pub fn cache_policy(name: &str) -> Option<&'static CachePolicyRow> {
    CACHE_POLICIES.into_iter().find(|row| row.name == name)
}

/// The miss ratio of a policy at a size. Unlike a curve's, it may rise with the size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SimulatedPoint {
    /// Size of the cache.
    pub size: PageCount,
    /// Share of references that miss, 0.0 to 1.0.
    pub miss_ratio: f64,
}

/// A sample of a stream, on which policies are simulated.
///
/// ```
/// use plimsoll_estimator::simulation::{MiniSim, cache_policy};
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let pages: Vec<_> = (0..100).cycle().take(10_000).map(PageNumber).collect();
/// let mut simulation = MiniSim::new(1.0, 0)?;
/// simulation.observe(&pages);
/// let points = simulation.points(cache_policy("w-tinylfu").unwrap(), &[PageCount(50), PageCount(100)])?;
/// assert!(points[0].miss_ratio < 0.6); // LRU would miss always
/// assert_eq!(points[1].miss_ratio, 0.01);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct MiniSim {
    sample: PageSample,
    /// Numbers of the sampled pages, by their hashes.
    numbers: PageMap<u32>,
    /// The references to them.
    stream: Vec<u32>,
    references: u64,
    /// LRU of all references, unless all are sampled.
    exact: Option<ExactLru>,
    exact_curve: OnceLock<MissRatioCurve>,
    /// The sampled references of a batch; a work buffer.
    chosen: Vec<SampledPage>,
}

impl MiniSim {
    /// Samples a share `rate` of the pages, above 0.0 and at most 1.0, selected by `seed`.
    ///
    /// # Errors
    ///
    /// [`EstimatorError::RateOutOfRange`] for any other rate.
    pub fn new(rate: f64, seed: u64) -> Result<Self, EstimatorError> {
        let sample = PageSample::new(rate, seed)?;
        Ok(Self {
            sample,
            numbers: page_map(),
            stream: Vec::new(),
            references: 0,
            exact: (rate < 1.0).then(ExactLru::new),
            exact_curve: OnceLock::new(),
            chosen: Vec::new(),
        })
    }

    /// Processes the pages of the next references.
    ///
    /// # Panics
    ///
    /// At 2^32 sampled pages.
    pub fn observe(&mut self, pages: &[PageNumber]) {
        self.sample.select(pages, &mut self.chosen);
        for page in &self.chosen {
            let next = u32::try_from(self.numbers.len()).expect("fewer than 2^32 sampled pages");
            let number = *self.numbers.entry(PageNumber(page.hash)).or_insert(next);
            self.stream.push(number);
        }
        if let Some(exact) = &mut self.exact {
            exact.observe(pages);
            self.exact_curve = OnceLock::new();
        }
        self.references += pages.len() as u64;
    }

    /// Number of references observed.
    pub fn references(&self) -> u64 {
        self.references
    }

    /// Number of those to sampled pages.
    pub fn sampled(&self) -> u64 {
        self.stream.len() as u64
    }

    /// Number of distinct pages.
    pub fn footprint(&self) -> PageCount {
        let sampled = self.numbers.len() as u64;
        PageCount(self.exact.as_ref().map_or(sampled, ExactLru::distinct))
    }

    /// The smallest size at which the small cache holds a few pages; below it the correction is all there is, and all
    /// policies seem to be LRU. 1 if all references are simulated.
    pub fn resolved_from(&self) -> PageCount {
        match &self.exact {
            Some(_) => PageCount(ceiled(SMALL_PAGES_MIN / self.share())),
            None => PageCount(1),
        }
    }

    /// The share of the distinct pages that is sampled.
    fn share(&self) -> f64 {
        let sampled = self.numbers.len() as f64;
        self.exact
            .as_ref()
            .map_or(1.0, |exact| sampled / exact.distinct() as f64)
    }

    /// Simulates a policy at each of some sizes. A size of no page misses always.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if no reference was sampled.
    pub fn points(
        &self,
        row: &CachePolicyRow,
        sizes: &[PageCount],
    ) -> Result<Vec<SimulatedPoint>, CurveError> {
        self.points_checked(row, sizes, || Ok(()))
    }

    /// The same, with a check every million references at least, such as one for an interrupt.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if no reference was sampled, and that of the check, which ends the simulation.
    pub fn points_checked<E: From<CurveError>>(
        &self,
        row: &CachePolicyRow,
        sizes: &[PageCount],
        check: impl Fn() -> Result<(), E>,
    ) -> Result<Vec<SimulatedPoint>, E> {
        if self.stream.is_empty() {
            return Err(CurveError::Empty.into());
        }
        if let (Some(exact), None) = (&self.exact, self.exact_curve.get()) {
            // Another thread may have set it to the same.
            let _ = self.exact_curve.set(exact.distances().curve()?);
        }
        let points = sizes.iter().map(|&size| {
            let sampled = self.simulated(row, size, &check)?;
            let correction = match self.exact_curve.get() {
                // At least the first reference misses.
                Some(exact) => exact.miss_ratio(size) / self.simulated(&lru::ROW, size, &check)?,
                None => 1.0,
            };
            Ok(SimulatedPoint {
                size,
                miss_ratio: (sampled * correction).min(1.0),
            })
        });
        points.collect()
    }

    /// The share of the sample's references that miss in a cache of this size scaled down.
    fn simulated<E>(
        &self,
        row: &CachePolicyRow,
        size: PageCount,
        check: impl Fn() -> Result<(), E>,
    ) -> Result<f64, E> {
        let pages = u32::try_from(self.numbers.len()).expect("counted when they were numbered");
        let scaled = (size.0 as f64 * self.share()).round();
        // A larger cache than there are pages is as good as one for all of them, which policies with parts exceed.
        let capacity = PageCount(1).scaled(scaled.min(f64::from(u32::MAX))).0;
        let Some(capacity) = u32::try_from(capacity).ok().filter(|&pages| pages > 0) else {
            return Ok(1.0);
        };
        let mut cache = (row.make)(capacity, pages);
        let mut misses = 0;
        for piece in self.stream.chunks(PIECE) {
            misses += piece.iter().filter(|&&page| !cache.access(page)).count();
            check()?;
        }
        Ok(misses as f64 / self.stream.len() as f64)
    }

    /// Bytes of heap allocated now, without those of a simulation.
    pub fn memory_bytes(&self) -> usize {
        let exact = self.exact.as_ref().map_or(0, |exact| exact.memory_bytes());
        self.stream.capacity() * size_of::<u32>()
            + self.numbers.capacity() * size_of::<(PageNumber, u32)>()
            + exact
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::{batch_of, cycle, uniform, zipf};
    use proptest::prelude::*;

    type Naive = fn(usize, &[u32]) -> Vec<bool>;

    const TWINS: [(&CachePolicyRow, Naive); 6] = [
        (&fifo::ROW, fifo::naive),
        (&lru::ROW, lru::naive),
        (&arc::ROW, arc::naive),
        (&s3_fifo::ROW, s3_fifo::naive),
        (&sieve::ROW, sieve::naive),
        (&w_tinylfu::ROW, w_tinylfu::naive),
    ];

    #[test]
    fn every_policy_has_a_twin_and_a_name_of_its_own() {
        let names = CACHE_POLICIES.map(|row| row.name);
        assert_eq!(TWINS.map(|(row, _)| row.name), names);
        for name in names {
            assert_eq!(cache_policy(name).unwrap().name, name);
        }
        assert!(cache_policy("belady").is_none());
    }

    proptest! {
        #[test]
        fn every_policy_hits_as_its_naive_twin(
            pages in prop::collection::vec((0_u32..60).prop_map(|page| page * page / 60), 1..600),
            loops in 0_u32..50,
            capacity in prop_oneof![1_usize..4, 1_usize..60],
        ) {
            // A loop in between brings out what scans do.
            let mut pages = pages;
            pages.extend((0..loops).chain(0..loops));
            pages.extend_from_within(..pages.len() / 2);
            for (row, naive) in TWINS {
                let mut cache = (row.make)(u32::try_from(capacity).unwrap(), 60);
                let hits: Vec<_> = pages.iter().map(|&page| cache.access(page)).collect();
                prop_assert_eq!(hits, naive(capacity, &pages), "{}", row.name);
            }
        }

        #[test]
        fn the_whole_as_sample_is_the_simulation_itself(
            pages in prop::collection::vec(0_u64..40, 1..500),
            size in 0_u64..50,
            seed in any::<u64>(),
        ) {
            let mut simulation = MiniSim::new(1.0, seed).unwrap();
            simulation.observe(&batch_of(pages.iter().copied()));
            let small: Vec<_> = pages.iter().map(|&page| page as u32).collect();
            for (row, naive) in TWINS {
                let points = simulation.points(row, &[PageCount(size)]).unwrap();
                let misses = match size {
                    0 => pages.len(),
                    size => naive(size as usize, &small).iter().filter(|&&hit| !hit).count(),
                };
                let expected = misses as f64 / pages.len() as f64;
                prop_assert!((points[0].miss_ratio - expected).abs() < 1e-12, "{}", row.name);
            }
        }
    }

    const SIZES: u64 = 12;

    /// Mean absolute difference of a sample of a tenth from the whole.
    fn error(pages: &[u64], row: &CachePolicyRow) -> f64 {
        let simulate = |rate| {
            let mut simulation = MiniSim::new(rate, 3).unwrap();
            simulation.observe(&batch_of(pages.iter().copied()));
            let footprint = simulation.footprint().0;
            let sizes: Vec<_> = (1..=SIZES)
                .map(|step| PageCount(footprint * step / SIZES))
                .collect();
            simulation.points(row, &sizes).unwrap()
        };
        let (sampled, whole) = (simulate(0.1), simulate(1.0));
        let pairs = sampled.iter().zip(&whole);
        pairs
            .map(|(one, other)| (one.miss_ratio - other.miss_ratio).abs())
            .sum::<f64>()
            / SIZES as f64
    }

    #[test]
    fn a_sample_is_right_to_a_percent_under_every_policy() {
        let streams: [Vec<u64>; 3] = [
            uniform(20_000, 1).take(80_000).collect(),
            zipf(20_000, 0.9, 1).take(80_000).collect(),
            cycle(5_000).take(40_000).collect(),
        ];
        for pages in streams {
            for row in CACHE_POLICIES {
                let error = error(&pages, row);
                assert!(error <= 0.01, "{}: {error}", row.name);
            }
        }
    }

    #[test]
    fn a_sample_that_lacks_hot_pages_or_has_too_many_is_right_too() {
        let loop_then_hot: Vec<_> = (0..400_000)
            .map(|place| match place {
                ..200_000 => 1_000 + place % 30_000,
                _ => place * 7_919 % 40,
            })
            .collect();
        let simulate = |rate, seed| {
            let mut simulation = MiniSim::new(rate, seed).unwrap();
            simulation.observe(&batch_of(loop_then_hot.iter().copied()));
            let sizes = [15_000, 25_000].map(PageCount);
            CACHE_POLICIES.map(|row| simulation.points(row, &sizes).unwrap())
        };
        let whole = simulate(1.0, 0);
        for seed in 0..5 {
            for (sampled, whole) in simulate(0.1, seed).iter().zip(&whole) {
                for (one, other) in sampled.iter().zip(whole) {
                    let error = (one.miss_ratio - other.miss_ratio).abs();
                    assert!(error < 0.02, "{seed}: {one:?} {other:?}");
                }
            }
        }
    }

    #[test]
    fn lru_by_simulation_is_the_curve_of_the_estimator() {
        let pages: Vec<_> = zipf(2_000, 0.8, 1).take(20_000).collect();
        let mut exact = ExactLru::new();
        exact.observe(&batch_of(pages.iter().copied()));
        let curve = exact.curve().unwrap();
        for rate in [1.0, 0.3] {
            let mut simulation = MiniSim::new(rate, 3).unwrap();
            simulation.observe(&batch_of(pages.iter().copied()));
            let sizes = [1, 10, 300, 1_500, 5_000].map(PageCount);
            for point in simulation.points(&lru::ROW, &sizes).unwrap() {
                let expected = curve.miss_ratio(point.size);
                assert!((point.miss_ratio - expected).abs() < 1e-9, "{point:?}");
            }
        }
    }

    #[test]
    fn a_check_that_fails_ends_a_simulation() {
        let mut simulation = MiniSim::new(1.0, 1).unwrap();
        simulation.observe(&batch_of(cycle(9).take(3 * PIECE)));
        let checks = std::cell::Cell::new(0);
        let check = || {
            checks.set(checks.get() + 1);
            if checks.get() == 2 {
                Err(CurveError::Empty)
            } else {
                Ok(())
            }
        };
        let points = simulation.points_checked(&fifo::ROW, &[PageCount(5)], check);
        assert_eq!((points, checks.get()), (Err(CurveError::Empty), 2));
    }

    #[test]
    fn without_a_sampled_page_there_are_no_points() {
        let mut simulation = MiniSim::new(1e-12, 1).unwrap();
        simulation.observe(&batch_of(0..100));
        assert_eq!(
            simulation.points(&fifo::ROW, &[PageCount(1)]),
            Err(CurveError::Empty)
        );
        assert!(MiniSim::new(0.0, 1).is_err());
    }
}
