//! AET: the LRU curve from reuse times alone, which a table of last uses gives.
//!
//! Let P(t) be the share of references whose page was not used within the last
//! `t` references (first references: never). A page in an LRU memory moves one
//! place down the stack when a page from below it is used; at age `t` the chance of
//! that is P(t). So after `A` references it has moved by the area under P from 0 to `A`,
//! and leaves a memory of `c` pages at the age `A(c)` at which that area is `c`:
//!
//! ```text
//!             A(c)
//!     c   =    ∫  P(t) dt             miss ratio at c  =  P(A(c))
//!             0
//! ```
//!
//! The draft's sum from 0 to A(c) is that integral for a P that steps at whole numbers; read
//! as an integral, the edge is right: a loop over `n` pages hits from `n` pages on,
//! and misses at `n - 1`.
//!
//! [`SampledAet`] watches a random share of references until their page is
//! used next. A stream has as many references without a next one as without a
//! previous one, so the ones still watched at the end are its first references.
//!
//! Source: [Hu16], [AET] §2. Departs in the integral, and in keeping reuse times to 1/1024 (`histogram`).
//! Cost: O(1) a reference, one random access to memory; 32 to 64 bytes a page, or a watched reference.
//! Not here: spatial samples in windows (`window`). The model's own error: it takes a page's way down the stack
//! for the average one, which is right to 0.01 where references mix, and can be far off where
//! bursts or loops of different kinds alternate.

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber, ReferenceBatch};

use crate::hash::{PageMap, check_rate, mix, page_map};
use crate::histogram::Histogram;
use crate::last_use::{FETCH, LastUse};
use crate::steps::{REPLICATES, Steps, replicate_of};
use crate::{Estimator, EstimatorError};

/// AET over all references of a stream.
///
/// The curve's band has no width: nothing is drawn. The model's own error is not in it.
#[derive(Debug, Clone)]
pub struct Aet {
    last_use: LastUse,
    reuse_times: Histogram,
    references: u64,
}

impl Aet {
    /// Returns an estimator that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        Self {
            last_use: LastUse::new(),
            reuse_times: Histogram::default(),
            references: 0,
        }
    }

    /// Returns an estimator that samples each reference with chance `rate`, above 0.0 and at most 1.0;
    /// which ones, `seed` decides.
    ///
    /// # Errors
    ///
    /// [`EstimatorError::RateOutOfRange`] for any other rate.
    pub fn sampled(rate: f64, seed: u64) -> Result<SampledAet, EstimatorError> {
        check_rate(rate)?;
        let mut random = Random { state: mix(seed) };
        Ok(SampledAet {
            rate,
            gap: random.gap(rate),
            random,
            watched: page_map(),
            parts: vec![Histogram::default(); REPLICATES],
            sampled: [0; REPLICATES],
            references: 0,
        })
    }
}

impl Default for Aet {
    fn default() -> Self {
        Self::new()
    }
}

impl Estimator for Aet {
    fn observe(&mut self, batch: &ReferenceBatch) {
        for pages in batch.pages().chunks(FETCH) {
            self.last_use.fetch(pages);
            for &page in pages {
                let now = self.references;
                if let Some(before) = self.last_use.replace(page, now) {
                    self.reuse_times.record(now - before);
                }
                self.references += 1;
            }
        }
    }

    fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        steps_of_counts(&self.reuse_times, self.references).into_curve(self.references)
    }
}

/// AET over a random share of the references; made by [`Aet::sampled`].
///
/// The band is that of drawing references: 16 parts of the sample, taken in
/// turn, spread so far (95 %). The model's own error is not in it.
#[derive(Debug, Clone)]
pub struct SampledAet {
    rate: f64,
    random: Random,
    /// References until the next one sampled; 0 for the one at hand.
    gap: u64,
    watched: PageMap<Watched>,
    /// Reuse times of sampled references, one histogram for each part.
    parts: Vec<Histogram>,
    /// References sampled, by part.
    sampled: [u64; REPLICATES],
    references: u64,
}

/// A sampled reference whose page was not used again yet.
#[derive(Debug, Clone, Copy)]
struct Watched {
    since: u64,
    part: usize,
}

impl SampledAet {
    /// How many references were sampled.
    #[must_use]
    pub fn sampled(&self) -> u64 {
        self.sampled.iter().sum()
    }

    fn observe_page(&mut self, page: PageNumber) {
        let now = self.references;
        self.references += 1;
        if let Some(watched) = self.watched.remove(&page) {
            self.parts[watched.part].record(now - watched.since);
        }
        if self.gap > 0 {
            self.gap -= 1;
            return;
        }
        let part = replicate_of(self.sampled());
        self.sampled[part] += 1;
        self.watched.insert(page, Watched { since: now, part });
        self.gap = self.random.gap(self.rate);
    }
}

impl Estimator for SampledAet {
    fn observe(&mut self, batch: &ReferenceBatch) {
        for &page in batch.pages() {
            self.observe_page(page);
        }
    }

    fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        let mut whole = Histogram::default();
        for part in &self.parts {
            whole.add(part);
        }
        let sampled = self.sampled();
        let mut steps = steps_of_counts(&whole, sampled);
        let parts = self.parts.iter().zip(self.sampled);
        let curves =
            parts.map(|(part, sampled)| steps_of_counts(part, sampled).into_curve(sampled));
        let curves: Vec<_> = curves.flatten().collect();
        steps.band(&curves, 1.0 - self.rate);
        steps.into_curve(sampled)
    }
}

/// Random gaps between sampled references, with `SplitMix64` for the bits.
#[derive(Debug, Clone)]
struct Random {
    state: u64,
}

impl Random {
    /// How many references to pass over so that each is sampled with chance `rate`.
    fn gap(&mut self, rate: f64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // Above 0 and at most 1, so that its logarithm is finite.
        let share = ((mix(self.state) >> 11) + 1) as f64 / (1_u64 << 53) as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and a gap beyond 2^64 is as good as 2^64"
        )]
        let gap = (share.ln() / (-rate).ln_1p()) as u64;
        gap
    }
}

/// Returns the curve of `references` of which `reuse_times` are known, the rest being first ones.
fn steps_of_counts(reuse_times: &Histogram, references: u64) -> Steps {
    let mut longer = references;
    let tail = reuse_times.counts().map(|(time, count)| {
        longer -= count;
        Tail {
            time,
            share_above: longer as f64 / references as f64,
            standard_error: 0.0,
        }
    });
    // First references are infinite, and nothing ends in between.
    steps_of_tail(tail, 0)
}

/// P at one reuse time.
pub(crate) struct Tail {
    /// The reuse time, in references.
    pub(crate) time: u64,
    /// Share of references with longer ones, 0.0 to 1.0.
    pub(crate) share_above: f64,
    /// Of that share.
    pub(crate) standard_error: f64,
}

/// Returns the curve of references whose reuse times have the tail `P`, given where it
/// falls, and known (if flat) up to `largest`.
pub(crate) fn steps_of_tail(tail: impl Iterator<Item = Tail>, largest: u64) -> Steps {
    let mut steps = Steps::new();
    let (mut area, mut height, mut before) = (0.0, 1.0, 0);
    for Tail {
        time,
        share_above,
        standard_error,
    } in tail
    {
        area += height * (time - before) as f64;
        steps.down_to(whole_pages(area), share_above, standard_error);
        (height, before) = (share_above, time);
    }
    area += height * largest.saturating_sub(before) as f64;
    steps.flat_to(whole_pages(area));
    steps
}

/// The smallest whole size that is not under `pages`, but for the rounding of sums.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not negative, and a size beyond 2^64 pages is as good as 2^64"
)]
fn whole_pages(pages: f64) -> u64 {
    (pages * (1.0 - 1e-10)).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lru::ExactLru;
    use crate::naive;
    use crate::streams::{batch_of, curve_of, cycle, uniform, zipf};
    use plimsoll_flow::PageCount;
    use proptest::prelude::*;

    fn aet(pages: impl IntoIterator<Item = u64>) -> MissRatioCurve {
        curve_of(&mut Aet::new(), pages)
    }

    fn sampled(rate: f64, seed: u64, pages: impl IntoIterator<Item = u64>) -> MissRatioCurve {
        curve_of(&mut Aet::sampled(rate, seed).unwrap(), pages)
    }

    #[test]
    fn a_loop_fits_at_its_size_and_not_a_page_below() {
        for pages in [1, 2, 100, 2_047, 2_049, 10_007] {
            let curve = aet(cycle(pages).take(20 * pages as usize));
            assert_eq!(curve.miss_ratio(PageCount(pages - 1)), 1.0);
            assert_eq!(curve.miss_ratio(PageCount(pages)), 0.05);
        }
    }

    #[test]
    fn streams_that_mix_are_right_to_a_hundredth() {
        let uniform: Vec<_> = uniform(10_000, 1).take(300_000).collect();
        let zipf: Vec<_> = zipf(10_000, 1.0, 1).take(300_000).collect();
        for pages in [uniform, zipf] {
            let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
            let sizes = || (1..=120).map(|step| PageCount(step * 100));
            let error = |curve: MissRatioCurve| {
                let distance = curve.distance(&exact, sizes()).unwrap();
                distance.mean_absolute_error
            };
            let full = error(aet(pages.iter().copied()));
            assert!(full <= 0.01, "{full}");
            for seed in 0..5 {
                let sample = error(sampled(0.01, seed, pages.iter().copied()));
                assert!(sample <= 0.02, "seed {seed}: {sample}");
            }
        }
    }

    #[test]
    fn the_band_of_a_sample_holds_the_full_curve() {
        let pages: Vec<_> = zipf(10_000, 0.8, 3).take(200_000).collect();
        let full = aet(pages.iter().copied());
        let (mut held, mut all) = (0, 0);
        for seed in 0..20 {
            let curve = sampled(0.01, seed, pages.iter().copied());
            for size in (1..=100).map(|step| PageCount(step * 100)) {
                let (point, truth) = (curve.at(size), full.miss_ratio(size));
                held += i32::from(point.low <= truth && truth <= point.high);
                all += 1;
            }
        }
        let coverage = f64::from(held) / f64::from(all);
        assert!(coverage >= 0.9, "{coverage}");
    }

    #[test]
    fn a_share_of_the_references_is_sampled() {
        for (seed, rate) in [(1, 0.5), (2, 0.1), (3, 0.01)] {
            let mut aet = Aet::sampled(rate, seed).unwrap();
            aet.observe(&batch_of(cycle(1_000).take(200_000)));
            let expected = rate * 200_000.0;
            let deviation = (aet.sampled() as f64 - expected).abs();
            assert!(deviation < 5.0 * expected.sqrt(), "{}", aet.sampled());
        }
    }

    #[test]
    fn without_references_there_is_no_curve() {
        assert_eq!(Aet::new().curve(), Err(CurveError::Empty));
        let sampled = Aet::sampled(0.1, 1).unwrap();
        assert_eq!(sampled.curve(), Err(CurveError::Empty));
        assert!(Aet::sampled(0.0, 1).is_err());
    }

    proptest! {
        #[test]
        fn the_curve_agrees_with_its_definition(
            pages in prop::collection::vec(0_u64..30, 1..150),
            size in 0_u64..40,
        ) {
            let expected = naive::aet_miss_ratio(&pages, size);
            let found = aet(pages).miss_ratio(PageCount(size));
            prop_assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        }

        #[test]
        fn sampling_every_reference_is_no_sampling(
            pages in prop::collection::vec(0_u64..50, 1..500),
            seed in any::<u64>(),
        ) {
            prop_assert_eq!(sampled(1.0, seed, pages.iter().copied()), aet(pages));
        }

        #[test]
        fn whatever_is_sampled_makes_a_curve(
            pages in prop::collection::vec(0_u64..50, 1..500),
            rate in 0.001_f64..1.0,
            seed in any::<u64>(),
        ) {
            let mut aet = Aet::sampled(rate, seed).unwrap();
            aet.observe(&batch_of(pages));
            prop_assert_eq!(aet.curve().is_ok(), aet.sampled() > 0);
        }
    }
}
