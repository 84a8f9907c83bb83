//! Fixed-size SHARDS: a sample with a maximum number of pages, whose rate falls as the stream grows.
//!
//! It starts with all pages. When the maximum is exceeded, the pages with the largest hashes
//! are dropped, an eighth of the sample at once, and the new rate is the one at which the
//! first dropped page is just not sampled. The remaining pages were in the sample
//! from the start, and are exactly the sample at that rate.
//!
//! A reference counts `1 / R` with the rate `R` at its own time, and its size is its distance scaled by that
//! rate; counts are never rescaled. (The original rescales old counts with the rate,
//! which reduces counts that are exact.) The correction and the band are those
//! of `shards`, in the form of `reuses` for a falling rate.
//!
//! Until the first page is dropped the curve is exact, and its band has no width.
//!
//! Source: [Waldspurger15] §4.3; departs in the counts' scale, in the correction, and in dropping many pages at once.
//! Cost: one hash per reference; that of `shards` for the sampled ones. Memory is proportional to the number of
//! samples (60 bytes each) and to the logarithm of the largest size: below 1 MiB for 8192.
//! Not here: a fixed rate (`shards`).

use std::num::NonZeroUsize;

use crate::curve::shards::Shards;
use crate::curve::shards::bursts::Bursts;
use crate::parts::hash::PageSample;

/// Buckets per doubling of the size, as a power of two.
const WHOLE_BITS: u32 = 8;

/// The distance in pages up to which bursts are used.
pub(super) const NEAR: usize = 512;

impl Shards {
    /// Samples at most `max_samples` pages at a time, selected by `seed`.
    ///
    /// ```
    /// use std::num::NonZeroUsize;
    /// use plimsoll_estimator::{Estimator, Shards};
    /// use plimsoll_flow::{PageCount, PageNumber};
    ///
    /// let pages: Vec<_> = (0..50_000).cycle().take(500_000).map(PageNumber).collect();
    /// let mut shards = Shards::fixed_size(NonZeroUsize::new(1_000).unwrap(), 7);
    /// shards.observe(&pages);
    /// assert!(shards.rate() < 0.025);
    /// let size = shards.curve()?.size_for(0.5).unwrap();
    /// assert!(size.0.abs_diff(50_000) < 2_500, "{size}");
    /// # Ok::<(), plimsoll_flow::CurveError>(())
    /// ```
    pub fn fixed_size(max_samples: NonZeroUsize, seed: u64) -> Self {
        let bursts = Bursts::new(seed, NEAR);
        let sample = PageSample::whole(seed);
        Self::of(sample, max_samples.get(), WHOLE_BITS, bursts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::lru::ExactLru;
    use crate::estimator::Estimator as _;
    use crate::parts::streams::{batch_of, curve_of, cycle, uniform, zipf};
    use plimsoll_flow::{CurveError, PageCount};
    use proptest::prelude::*;

    fn fixed(max_samples: usize, seed: u64) -> Shards {
        Shards::fixed_size(NonZeroUsize::new(max_samples).unwrap(), seed)
    }

    /// Mean absolute error over seeds 0 to 4 with 2048 samples.
    fn error(pages: &[u64]) -> f64 {
        let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
        let errors = (0..5).map(|seed| {
            let curve = curve_of(&mut fixed(2_048, seed), pages.iter().copied());
            let sizes = (1..=600).map(|step| PageCount(step * 100));
            curve.distance(&exact, sizes).unwrap().mean_absolute_error
        });
        errors.sum::<f64>() / 5.0
    }

    #[test]
    fn even_and_skewed_streams_are_right_to_half_a_percent() {
        let even: Vec<_> = uniform(50_000, 2).take(1_000_000).collect();
        let skewed: Vec<_> = zipf(50_000, 1.0, 2).take(1_000_000).collect();
        for (pages, bound) in [(even, 0.005), (skewed, 0.005)] {
            let error = error(&pages);
            assert!(error <= bound, "{error}");
        }
    }

    #[test]
    fn a_loop_keeps_its_cliff() {
        let pages: Vec<_> = cycle(50_000).take(1_000_000).collect();
        for seed in 0..5 {
            let mut shards = fixed(2_048, seed);
            let size = curve_of(&mut shards, pages.iter().copied()).size_for(0.5);
            assert!(size.unwrap().0.abs_diff(50_000) <= 1_000, "{size:?}");
        }
    }

    /// A few hundred hot pages among so many others that no bursts can be used at the end.
    #[test]
    fn the_band_holds_small_sizes_where_the_sample_does_not_resolve_them() {
        let (mut others, mut hot) = (uniform(200_000, 3), zipf(1_000, 1.3, 3));
        let pages: Vec<_> = (0..2_000_000)
            .map(|at| match at % 2 {
                0 => hot.next().unwrap(),
                _ => 1_000 + others.next().unwrap(),
            })
            .collect();
        let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
        let sizes = || (0..40).map(|step| PageCount(1.36_f64.powi(step) as u64));
        let (mut coverage, mut error) = (0.0, 0.0);
        for seed in 0..10 {
            let mut shards = fixed(256, seed);
            let curve = curve_of(&mut shards, pages.iter().copied());
            assert!(shards.rate() < 1.0 / 512.0);
            let smallest = shards.smallest_size();
            assert_eq!(smallest.0, (0.5 / shards.rate()).ceil() as u64);
            let near = curve.at(PageCount(300));
            assert!(near.high - near.low > 0.1, "{near:?}");
            coverage += curve.band_coverage(&exact, sizes()).unwrap() / 10.0;
            let distance = curve.distance(&exact, sizes()).unwrap();
            error += distance.mean_absolute_error / 10.0;
        }
        assert!(coverage >= 0.9 && error <= 0.12, "{coverage}, {error}");
    }

    #[test]
    fn memory_stays_within_its_bound() {
        let mut shards = fixed(8_192, 1);
        shards.observe(&batch_of(uniform(1 << 22, 1).take(2_000_000)));
        shards.observe(&batch_of(0..3_000_000));
        let bytes = shards.memory_bytes();
        assert!(bytes <= 1 << 20, "{bytes}");
        assert!(shards.rate() < 0.01);
    }

    #[test]
    fn without_references_there_is_no_curve() {
        let mut shards = fixed(1, 1);
        assert_eq!(shards.curve(), Err(CurveError::Empty));
        shards.observe(&[]);
        assert_eq!(shards.curve(), Err(CurveError::Empty));
        shards.observe(&batch_of([u64::MAX]));
        assert_eq!(shards.curve().unwrap().miss_ratio(PageCount(1)), 1.0);
    }

    proptest! {
        #[test]
        fn with_room_for_all_pages_it_is_exact(
            pages in prop::collection::vec(0_u64..200, 1..2_000),
            seed in any::<u64>(),
        ) {
            let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
            prop_assert_eq!(curve_of(&mut fixed(200, seed), pages), exact);
        }

        #[test]
        fn the_sample_is_never_too_large_and_batches_do_not_matter(
            pages in prop::collection::vec(
                prop_oneof![0_u64..500, (0_u64..500).prop_map(|n| u64::MAX - n)],
                1..3_000,
            ),
            max_samples in prop_oneof![1_usize..4, 1_usize..300],
            seed in any::<u64>(),
            batch in 1_usize..700,
        ) {
            let (mut shards, mut in_batches) = (fixed(max_samples, seed), fixed(max_samples, seed));
            shards.observe(&batch_of(pages.iter().copied()));
            for pages in pages.chunks(batch) {
                in_batches.observe(&batch_of(pages.iter().copied()));
            }
            prop_assert!(shards.pages() <= max_samples);
            prop_assert_eq!(shards.rate(), in_batches.rate());
            prop_assert_eq!(shards.curve().unwrap(), in_batches.curve().unwrap());
        }
    }
}
