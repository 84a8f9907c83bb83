//! AET from a random share of the references.
//!
//! A sampled reference is watched until its page is used next: that is its reuse time, forward. A stream
//! has as many references without a next one as without a previous one, so the
//! ones still watched at the end are its first references.
//!
//! Between two sampled references, a random and geometric gap apart, all there is to do is to
//! see whether a page is watched (`watch`).
//!
//! Source: [Hu16] §4, [AET] §2.
//! Cost: about 1 ns a reference besides that of the witness, and for the sampled ones a table's.
//! Not here: all references (`aet`), all references of some pages (`spatial_aet`).

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber, ReferenceBatch};

use crate::hash::{check_rate, mix};
use crate::histogram::Histogram;
use crate::reuse_times::ReuseTimes;
use crate::watch::Watch;
use crate::witness::Witness;
use crate::{Estimator, EstimatorError};

/// AET over a random share of the references; made by [`Aet::sampled`](crate::Aet::sampled).
///
/// The band holds the estimate and what a small sample of pages says that is followed exactly
/// (95 %), and so the error of the model and of the draw.
#[derive(Debug, Clone)]
pub struct SampledAet {
    rate: f64,
    random: Random,
    /// References to pass over before the next one sampled.
    gap: u64,
    /// When the reference was that waits for its page's next one.
    watch: Watch<u64>,
    /// Which of the references at hand may end a wait; empty in between.
    suspects: Vec<usize>,
    times: Histogram,
    sampled: u64,
    references: u64,
    witness: Witness,
}

impl SampledAet {
    pub(crate) fn new(rate: f64, seed: u64) -> Result<Self, EstimatorError> {
        check_rate(rate)?;
        let mut random = Random { state: mix(seed) };
        Ok(Self {
            rate,
            gap: random.gap(rate),
            random,
            watch: Watch::new(),
            suspects: Vec::new(),
            times: Histogram::default(),
            sampled: 0,
            references: 0,
            witness: Witness::new(seed),
        })
    }

    /// How many references were sampled.
    #[must_use]
    pub fn sampled(&self) -> u64 {
        self.sampled
    }

    /// The reuse times of the sampled references.
    #[must_use]
    pub fn reuse_times(&self) -> ReuseTimes {
        let mut all = ReuseTimes::of_stream(self.references, self.sampled as f64);
        all.record_all(&self.times);
        for &since in self.watch.values() {
            // Seen from the end of the stream, a last reference is a first one.
            all.record_first(self.references - 1 - since, 1.0);
        }
        all
    }

    /// Takes in references none of which is sampled.
    fn pass_over(&mut self, pages: &[PageNumber]) {
        let mut suspects = std::mem::take(&mut self.suspects);
        self.watch.suspects(pages, |index| suspects.push(index));
        for index in suspects.drain(..) {
            self.end_watch(pages[index], self.references + index as u64);
        }
        self.suspects = suspects;
        self.references += pages.len() as u64;
    }

    fn end_watch(&mut self, page: PageNumber, now: u64) {
        if let Some(since) = self.watch.remove(page) {
            self.times.record(now - since);
        }
    }

    fn sample(&mut self, page: PageNumber) {
        self.end_watch(page, self.references);
        self.watch.insert(page, self.references);
        self.sampled += 1;
        self.references += 1;
        self.gap = self.random.gap(self.rate);
    }
}

impl Estimator for SampledAet {
    fn observe(&mut self, batch: &ReferenceBatch) {
        let mut rest = batch.pages();
        while let Some(gap) = usize::try_from(self.gap)
            .ok()
            .filter(|&gap| gap < rest.len())
        {
            self.pass_over(&rest[..gap]);
            self.sample(rest[gap]);
            rest = &rest[gap + 1..];
        }
        self.pass_over(rest);
        self.gap -= rest.len() as u64;
        self.witness.observe(batch);
    }

    fn memory_bytes(&self) -> usize {
        self.watch.memory_bytes()
            + self.suspects.capacity() * size_of::<usize>()
            + self.times.memory_bytes()
            + self.witness.memory_bytes()
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        let estimate = self.reuse_times().curve()?;
        self.witness.widen(&estimate)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aet::Aet;
    use crate::lru::ExactLru;
    use crate::naive;
    use crate::streams::{batch_of, curve_of, cycle, uniform, zipf};
    use plimsoll_flow::PageCount;
    use proptest::prelude::*;

    fn sampled(rate: f64, seed: u64, pages: impl IntoIterator<Item = u64>) -> MissRatioCurve {
        curve_of(&mut Aet::sampled(rate, seed).unwrap(), pages)
    }

    #[test]
    fn streams_that_mix_are_right_to_two_hundredths() {
        let uniform: Vec<_> = uniform(10_000, 1).take(300_000).collect();
        let zipf: Vec<_> = zipf(10_000, 1.0, 1).take(300_000).collect();
        for pages in [uniform, zipf] {
            let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
            for seed in 0..5 {
                let curve = sampled(0.01, seed, pages.iter().copied());
                let sizes = (1..=120).map(|step| PageCount(step * 100));
                let error = curve.distance(&exact, sizes).unwrap().mean_absolute_error;
                assert!(error <= 0.02, "seed {seed}: {error}");
            }
        }
    }

    #[test]
    fn a_share_of_the_references_is_sampled() {
        for (seed, rate) in [(1, 0.5), (2, 0.1), (3, 0.01), (4, 0.001), (5, 0.0001)] {
            let mut aet = Aet::sampled(rate, seed).unwrap();
            aet.observe(&batch_of(cycle(1_000).take(400_000)));
            let expected = rate * 400_000.0;
            let deviation = (aet.sampled() as f64 - expected).abs();
            assert!(deviation < 5.0 * expected.sqrt(), "{}", aet.sampled());
        }
    }

    #[test]
    fn a_rate_that_is_none_is_refused() {
        for rate in [0.0, -1.0, 2.0, f64::NAN] {
            assert!(Aet::sampled(rate, 0).is_err());
        }
        let mut sampled = Aet::sampled(0.1, 1).unwrap();
        assert_eq!(sampled.curve(), Err(CurveError::Empty));
    }

    proptest! {
        #[test]
        fn sampling_every_reference_is_no_sampling(
            pages in prop::collection::vec(0_u64..50, 1..500),
            seed in any::<u64>(),
        ) {
            let curve = sampled(1.0, seed, pages.iter().copied());
            // Times are forward: those of the stream from its end.
            let pages: Vec<_> = pages.into_iter().rev().collect();
            for size in 0..60 {
                let expected = naive::aet_miss_ratio(&pages, size);
                let found = curve.miss_ratio(PageCount(size));
                prop_assert!((found - expected).abs() < 1e-9, "{found} {expected}");
            }
        }

        #[test]
        fn each_sampled_reference_waits_for_its_pages_next_one(
            pages in prop::collection::vec(0_u64..50, 1..500),
            rate in 0.001_f64..1.0,
            seed in any::<u64>(),
            batch in 1_usize..200,
        ) {
            let mut aet = Aet::sampled(rate, seed).unwrap();
            for pages in pages.chunks(batch) {
                aet.observe(&batch_of(pages.iter().copied()));
            }
            // The same draw, and the definition.
            let mut random = Random { state: mix(seed) };
            let (mut at, mut sampled, mut times) = (0_u64, 0, Vec::new());
            loop {
                at = at.saturating_add(random.gap(rate));
                let Some(&page) = usize::try_from(at).ok().and_then(|at| pages.get(at)) else {
                    break;
                };
                sampled += 1;
                let next = pages[at as usize + 1..].iter().position(|&other| other == page);
                times.extend(next.map(|next| next as u64 + 1));
                at += 1;
            }
            prop_assert_eq!(aet.sampled(), sampled);
            times.sort_unstable();
            let found = aet.times.counts();
            let found: Vec<_> = found.flat_map(|(time, count)| vec![time; count as usize]).collect();
            prop_assert_eq!(found, times);
            prop_assert_eq!(aet.curve().is_ok(), sampled > 0);
        }
    }
}
