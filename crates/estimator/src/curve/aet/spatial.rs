//! AET from all references to some of the pages, drawn by hash.
//!
//! Reuse times are counted in references of the whole stream, so they need no scaling, unlike distances in such a
//! sample. The sampling error is in the number of references: `N_s` where `R N` were expected. The surplus is
//! subtracted as in `shards`, by regression on the pages' popularity `r`: references with reuse times above `t` have
//! the part `(N_s - R N) W(t) / sum(r^2)` of it, where `W(t)` is the popularity summed over these references. A surplus
//! caused by a hot page is therefore subtracted from its short times, and that of a uniform stream evenly from all
//! times. A deficit of more than three standard deviations is attributed to hot pages outside the sample, which are
//! reused at once.
//!
//! Source: [AET] §2 for the sample, [Waldspurger15] for sampling by hash; the correction is that of `shards`.
//! Cost: a hash per reference (vectorised), and one table look-up for each sampled reference.
//! Not here: windows of a running VM (`window`).

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use crate::curve::aet::reuse_times::ReuseTimes;
use crate::curve::shards::witness::Witness;
use crate::error::EstimatorError;
use crate::estimator::Estimator;
use crate::parts::hash::{PageMap, PageSample, SampledPage, page_map};
use crate::parts::histogram::{Histogram, bucket_of};
use crate::parts::last_use::map_bytes;

/// A deficit of this many standard deviations or more is not attributed to the sampled pages;
/// one that is smaller by at least one deviation is wholly attributed to them.
const DEFICIT_DISMISSED: f64 = 3.0;

/// AET over all references to a share of the pages.
///
/// The band contains the estimate and the curve of a small sample of pages that are followed exactly
/// (95 %), and therefore covers the errors of the model and of the sampling.
///
/// ```
/// use plimsoll_estimator::{Estimator, SpatialAet};
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let pages: Vec<_> = (0..10_000).cycle().take(100_000).map(PageNumber).collect();
/// let mut aet = SpatialAet::new(0.05, 7)?;
/// aet.observe(&pages);
/// // In a loop every page determines the size, and every page is used equally often.
/// assert!((aet.curve()?.miss_ratio(PageCount(10_000)) - 0.1).abs() < 1e-9);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct SpatialAet {
    sample: PageSample,
    pages: PageMap<PageUse>,
    times: Histogram,
    /// Times of first references.
    firsts: Histogram,
    /// Summed popularity of the pages of reuses, by bucket of `times`.
    weights: Vec<f64>,
    /// References to sampled pages.
    sampled: u64,
    references: u64,
    /// The sampled references of the current block; empty between batches.
    at_hand: Vec<SampledPage>,
    witness: Witness,
}

/// A sampled page.
#[derive(Debug, Clone, Copy)]
struct PageUse {
    last: u64,
    uses: u64,
}

impl SpatialAet {
    /// Samples a share `rate` of the pages, above 0.0 and at most 1.0, selected by `seed`.
    ///
    /// # Errors
    ///
    /// [`EstimatorError::RateOutOfRange`] for any other rate.
    pub fn new(rate: f64, seed: u64) -> Result<Self, EstimatorError> {
        Ok(Self {
            sample: PageSample::new(rate, seed)?,
            pages: page_map(),
            times: Histogram::default(),
            firsts: Histogram::default(),
            weights: Vec::new(),
            sampled: 0,
            references: 0,
            at_hand: Vec::new(),
            witness: Witness::new(seed),
        })
    }

    /// Number of references to sampled pages.
    pub fn sampled(&self) -> u64 {
        self.sampled
    }

    /// The reuse times of the whole stream, times the sampling rate, as estimated from the sample;
    /// empty without a sampled reference.
    pub fn reuse_times(&self) -> ReuseTimes {
        if self.sampled == 0 {
            return ReuseTimes::new();
        }
        let sampled = self.sampled as f64;
        let expected = self.sample.rate() * self.references as f64;
        // Sum over the pages of the square of their references; first references add their page's part.
        let weight = self.weights.iter().sum::<f64>() + sampled;
        let surplus = sampled - expected;
        let deviations = surplus / weight.sqrt();
        let surplus = surplus * (DEFICIT_DISMISSED + deviations).clamp(0.0, 1.0);
        let mut times = ReuseTimes::of_stream(self.references, expected);
        let mut longer = expected;
        let (mut misses, mut miss_weight) = (sampled, weight);
        let mut fall_to = |time, corrected: f64| {
            let corrected = corrected.clamp(0.0, longer);
            times.record(time, longer - corrected);
            longer = corrected;
        };
        // The part of the deficit not attributed to the sampled pages.
        fall_to(1, misses - surplus);
        for (time, count) in self.times.counts() {
            misses -= count as f64;
            miss_weight -= self.weights[bucket_of(time)];
            fall_to(time, misses - surplus * miss_weight / weight);
        }
        for (time, count) in self.firsts.counts() {
            times.record_first(time, longer * count as f64 / self.pages.len() as f64);
        }
        times
    }

    fn observe_page(&mut self, page: PageNumber, now: u64) {
        self.sampled += 1;
        let seen = self
            .pages
            .entry(page)
            .or_insert(PageUse { last: now, uses: 0 });
        let before = std::mem::replace(&mut seen.last, now);
        seen.uses += 1;
        if seen.uses == 1 {
            self.firsts.record(now);
            return;
        }
        // A page with r references has r * r pairs of references: one for its first, and two for
        // each earlier one with every later one. So no second pass is needed.
        let weight = 2.0 * (seen.uses - 1) as f64;
        let time = now - before;
        self.times.record(time);
        let bucket = bucket_of(time);
        if bucket >= self.weights.len() {
            self.weights.resize(bucket + 1, 0.0);
        }
        self.weights[bucket] += weight;
    }
}

impl Estimator for SpatialAet {
    fn observe(&mut self, pages: &[PageNumber]) {
        let mut at_hand = std::mem::take(&mut self.at_hand);
        self.sample.select(pages, &mut at_hand);
        for sampled in at_hand.drain(..) {
            let now = self.references + sampled.place as u64;
            self.observe_page(pages[sampled.place], now);
        }
        self.at_hand = at_hand;
        self.references += pages.len() as u64;
        self.witness.observe(pages);
    }

    fn memory_bytes(&self) -> usize {
        map_bytes(&self.pages)
            + self.times.memory_bytes()
            + self.firsts.memory_bytes()
            + self.weights.capacity() * size_of::<f64>()
            + self.at_hand.capacity() * size_of::<SampledPage>()
            + self.witness.memory_bytes()
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        let estimate = self.reuse_times().curve()?;
        // The number of observed references, not of those that they represent.
        let estimate = MissRatioCurve::new(estimate.points().to_vec(), self.sampled())?;
        self.witness.widen(&estimate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::aet::Aet;
    use crate::curve::lru::ExactLru;
    use crate::parts::naive;
    use crate::parts::streams::{batch_of, curve_of, cycle, uniform, zipf};
    use plimsoll_flow::PageCount;
    use proptest::prelude::*;

    fn spatial(rate: f64, seed: u64, pages: impl IntoIterator<Item = u64>) -> MissRatioCurve {
        curve_of(&mut SpatialAet::new(rate, seed).unwrap(), pages)
    }

    fn mean_error(curve: &MissRatioCurve, exact: &MissRatioCurve, pages: u64) -> f64 {
        let sizes = (1..=120).map(|step| PageCount(step * pages / 100));
        curve.distance(exact, sizes).unwrap().mean_absolute_error
    }

    #[test]
    fn streams_that_mix_are_right_to_two_hundredths() {
        let uniform: Vec<_> = uniform(50_000, 1).take(500_000).collect();
        let zipf: Vec<_> = zipf(50_000, 1.0, 1).take(500_000).collect();
        for pages in [uniform, zipf] {
            let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
            let errors = (0..10).map(|seed| {
                mean_error(&spatial(0.02, seed, pages.iter().copied()), &exact, 50_000)
            });
            let error = errors.sum::<f64>() / 10.0;
            assert!(error <= 0.02, "{error}");
        }
    }

    #[test]
    fn a_loop_is_exact_whatever_is_drawn() {
        let exact = curve_of(&mut ExactLru::new(), cycle(20_000).take(200_000));
        for seed in 0..5 {
            let curve = spatial(0.01, seed, cycle(20_000).take(200_000));
            assert!(mean_error(&curve, &exact, 20_000) < 1e-9);
        }
    }

    #[test]
    fn a_rate_that_is_none_is_refused_and_no_sample_is_no_curve() {
        for rate in [0.0, -1.0, 2.0, f64::NAN] {
            assert!(SpatialAet::new(rate, 0).is_err());
        }
        let mut aet = SpatialAet::new(1e-12, 1).unwrap();
        aet.observe(&batch_of(0..100));
        assert_eq!(aet.curve(), Err(CurveError::Empty));
    }

    proptest! {
        #[test]
        fn all_pages_are_no_sample(
            pages in prop::collection::vec(0_u64..50, 1..500),
            seed in any::<u64>(),
            batch in 1_usize..200,
        ) {
            let mut aet = SpatialAet::new(1.0, seed).unwrap();
            for pages in pages.chunks(batch) {
                aet.observe(&batch_of(pages.iter().copied()));
            }
            let curve = aet.curve().unwrap();
            for size in 0..60 {
                let expected = naive::aet_miss_ratio(&pages, size);
                let found = curve.miss_ratio(PageCount(size));
                prop_assert!((found - expected).abs() < 1e-9, "{found} {expected}");
            }
            let mut full = Aet::new();
            full.observe(&batch_of(pages));
            let (found, full) = (aet.reuse_times(), full.reuse_times());
            prop_assert!((found.first_references() - full.first_references()).abs() < 1e-9);
        }

        #[test]
        fn whatever_is_sampled_makes_a_curve(
            pages in prop::collection::vec(0_u64..200, 1..500),
            rate in 0.001_f64..1.0,
            seed in any::<u64>(),
        ) {
            let mut aet = SpatialAet::new(rate, seed).unwrap();
            aet.observe(&batch_of(pages));
            prop_assert_eq!(aet.curve().is_ok(), aet.sampled() > 0);
        }
    }
}
