//! AET: the LRU curve from reuse times alone, which a table of last accesses provides.
//!
//! The model is in `reuse_times`; this module feeds it with every reference of a stream.
//!
//! The model's own error: it assumes that every page moves down the stack at the average speed. For mixed references
//! that is accurate to a thousandth; it can be far off at sizes where loops or bursts of different kinds alternate. The
//! band shows this: it includes the estimate of a small sample of pages that are followed exactly (`witness`).
//!
//! Source: [Hu16], [AET] §2. Departs from them as stated in `reuse_times`.
//! Cost: one random memory access per reference, 4 to 24 bytes per page (`last_use`). The speed is limited by that
//! access: 6 to 8 ns, including processing, at a million consecutive pages, 7 to 18 at four million, and up to
//! twice that where page numbers are far apart. The witness adds about 1 ns.
//! Not here: samples of pages (`spatial`), and estimates for a running VM (`live`).

pub(crate) mod reuse_times;
mod spatial;

pub use reuse_times::ReuseTimes;
pub use spatial::SpatialAet;

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use crate::curve::shards::witness::{ExactCounts, Witness};
use crate::estimator::Estimator;
use crate::parts::histogram::Histogram;
use crate::parts::last_use::LastUse;

/// Number of references looked up as a block, so that their reuse times fit into a core's first-level cache.
const PIECE: usize = 4096;

/// Seed of the witness's sample; arbitrary, but constant.
const WITNESS_SEED: u64 = 0;

/// AET over all references of a stream.
///
/// The band contains the estimate and the curve of a small sample of pages that are followed exactly
/// (95 %), and therefore covers the model's own error.
#[derive(Debug, Clone)]
pub struct Aet {
    last_use: LastUse,
    times: Histogram,
    /// Times of first references.
    firsts: Histogram,
    /// Reuse times of the current block of references; 0 for a first reference.
    piece: Vec<u32>,
    references: u64,
    witness: Witness,
}

impl Aet {
    /// Returns an estimator without observations.
    pub fn new() -> Self {
        Self {
            last_use: LastUse::new(),
            times: Histogram::default(),
            firsts: Histogram::default(),
            piece: Vec::new(),
            references: 0,
            witness: Witness::new(WITNESS_SEED),
        }
    }

    /// The reuse times of all references so far.
    #[must_use]
    pub fn reuse_times(&mut self) -> ReuseTimes {
        self.times.settle();
        let mut all = ReuseTimes::of_stream(self.references, self.references as f64);
        all.record_all(&self.times);
        for (time, count) in self.firsts.counts() {
            all.record_first(time, count as f64);
        }
        all
    }
}

impl Default for Aet {
    fn default() -> Self {
        Self::new()
    }
}

impl Estimator for Aet {
    fn observe(&mut self, pages: &[PageNumber]) {
        for pages in pages.chunks(PIECE) {
            let (now, piece) = (self.references, &mut self.piece);
            let (times, firsts) = (&mut self.times, &mut self.firsts);
            let others = |now, time: Option<u64>| match time {
                Some(time) => times.record(time),
                None => firsts.record(now),
            };
            self.last_use.reuse_times(pages, now, piece, others);
            times.record_batch(piece);
            self.references += pages.len() as u64;
        }
        self.witness.observe(pages);
    }

    fn memory_bytes(&self) -> usize {
        self.last_use.memory_bytes()
            + self.times.memory_bytes()
            + self.firsts.memory_bytes()
            + self.piece.capacity() * size_of::<u32>()
            + self.witness.memory_bytes()
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        let times = self.reuse_times();
        let certain = ExactCounts {
            first_references: self.firsts.counts().map(|(_, count)| count).sum(),
            references: self.references,
        };
        certain.narrow(&self.witness.widen(&times.curve()?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpatialAet;
    use crate::curve::aet::reuse_times::{Tail, steps_of_tail};
    use crate::curve::lru::ExactLru;
    use crate::parts::naive;
    use crate::parts::streams::{Random, batch_of, curve_of, cycle, uniform, zipf};
    use plimsoll_flow::PageCount;
    use proptest::prelude::*;

    fn aet(pages: impl IntoIterator<Item = u64>) -> MissRatioCurve {
        curve_of(&mut Aet::new(), pages)
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
    fn streams_that_mix_are_right_to_a_thousandth() {
        for seed in 1..=5 {
            let uniform: Vec<_> = uniform(10_000, seed).take(300_000).collect();
            let zipf: Vec<_> = zipf(10_000, 1.0, seed).take(300_000).collect();
            for pages in [uniform, zipf] {
                let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
                let sizes = (1..=120).map(|step| PageCount(step * 100));
                let distance = aet(pages).distance(&exact, sizes).unwrap();
                assert!(distance.mean_absolute_error <= 0.001, "{distance:?}");
            }
        }
    }

    #[test]
    fn regarding_the_beginning_makes_short_streams_right() {
        type Stream = fn(u64) -> Box<dyn Iterator<Item = u64>>;
        let streams: [(&str, Stream); 4] = [
            ("uniform", |seed| Box::new(uniform(10_000, seed))),
            ("Zipf 0.8", |seed| Box::new(zipf(10_000, 0.8, seed))),
            ("Zipf 1.2", |seed| Box::new(zipf(10_000, 1.2, seed))),
            ("two classes", |seed| Box::new(two_classes(10_000, seed))),
        ];
        for (name, stream) in streams {
            let (mut plain_error, mut error) = (0.0, 0.0);
            for seed in 1..=5 {
                let pages: Vec<_> = stream(seed).take(100_000).collect();
                let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
                let mut aet = Aet::new();
                aet.observe(&batch_of(pages));
                // The area under the share of all references, whatever their times.
                let ages = aet.reuse_times().ages();
                let plain = steps_of_tail(
                    ages.iter().map(|age| Tail {
                        time: age.references,
                        share_above: age.miss_ratio,
                        standard_error: 0.0,
                    }),
                    0,
                );
                let sizes = || (1..=120).map(|step| PageCount(step * 100));
                let mean = |curve: MissRatioCurve| {
                    let distance = curve.distance(&exact, sizes()).unwrap();
                    distance.mean_absolute_error / 5.0
                };
                plain_error += mean(plain.into_curve(1).unwrap());
                error += mean(aet.curve().unwrap());
            }
            println!("{name}: {plain_error:.5} {error:.5}");
            assert!(error <= 0.001, "{name}: {error}");
            assert!(error <= plain_error / 5.0, "{name}: {error} {plain_error}");
        }
    }

    /// A tenth of the pages ten times as popular.
    fn two_classes(pages: u64, seed: u64) -> impl Iterator<Item = u64> {
        let mut random = Random::new(seed);
        std::iter::repeat_with(move || {
            let hot = pages / 10;
            if random.share() < 10.0 / 19.0 {
                (random.share() * hot as f64) as u64
            } else {
                hot + (random.share() * (pages - hot) as f64) as u64
            }
        })
    }

    /// Up and down repeatedly.
    fn sawtooth(pages: u64) -> impl Iterator<Item = u64> {
        (0..pages).chain((0..pages).rev()).cycle()
    }

    /// Alternating loops over one half of the pages and uniform references to the other.
    fn phases(pages: u64, seed: u64) -> impl Iterator<Item = u64> {
        let (mut looped, mut mixed) = (cycle(pages / 2), uniform(pages / 2, seed));
        (0..).map(move |now: u64| {
            if (now / (pages * 2)).is_multiple_of(2) {
                looped.next().unwrap()
            } else {
                pages / 2 + mixed.next().unwrap()
            }
        })
    }

    /// Share of sizes up to 1.2 times the pages at which the band holds the exact curve.
    fn coverage(curve: &MissRatioCurve, exact: &MissRatioCurve, pages: u64) -> f64 {
        let sizes = (1..=240).map(|step| PageCount(step * pages / 200));
        let held = sizes.filter(|&size| {
            let (point, truth) = (curve.at(size), exact.miss_ratio(size));
            point.low - 1e-9 <= truth && truth <= point.high + 1e-9
        });
        held.count() as f64 / 240.0
    }

    #[test]
    fn the_bands_of_all_forms_hold_the_exact_curve() {
        const PAGES: u64 = 30_000;
        type Stream = fn(u64) -> Box<dyn Iterator<Item = u64>>;
        let streams: [(&str, Stream); 9] = [
            ("uniform", |seed| Box::new(uniform(PAGES, seed))),
            ("zipf 0.6", |seed| Box::new(zipf(PAGES, 0.6, seed))),
            ("zipf 0.8", |seed| Box::new(zipf(PAGES, 0.8, seed))),
            ("zipf 1.0", |seed| Box::new(zipf(PAGES, 1.0, seed))),
            ("zipf 1.2", |seed| Box::new(zipf(PAGES, 1.2, seed))),
            ("loop", |_| Box::new(cycle(PAGES))),
            ("two classes", |seed| Box::new(two_classes(PAGES, seed))),
            ("phases", |seed| Box::new(phases(PAGES, seed))),
            ("sawtooth", |_| Box::new(sawtooth(PAGES))),
        ];
        type Form = fn(u64) -> Box<dyn Estimator>;
        let forms: [(&str, Form); 2] = [
            ("all references", |seed| {
                let witness = Witness::new(seed);
                Box::new(Aet {
                    witness,
                    ..Aet::new()
                })
            }),
            ("pages", |seed| {
                Box::new(SpatialAet::new(0.05, seed).unwrap())
            }),
        ];
        let mut held = [0.0; 2];
        for (name, stream) in streams {
            let mut of_stream = [0.0; 2];
            for seed in 1..=5 {
                let pages: Vec<_> = stream(seed).take(400_000).collect();
                let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
                for (held, (_, form)) in of_stream.iter_mut().zip(forms) {
                    let curve = curve_of(&mut *form(seed), pages.iter().copied());
                    *held += coverage(&curve, &exact, PAGES) / 5.0;
                }
            }
            println!("{name}: {of_stream:.3?}");
            for (held, of_stream) in held.iter_mut().zip(of_stream) {
                assert!(of_stream >= 0.9, "{name}: {of_stream}");
                *held += of_stream / streams.len() as f64;
            }
        }
        for (held, (name, _)) in held.into_iter().zip(forms) {
            assert!(held >= 0.95, "{name}: {held}");
        }
    }

    #[test]
    fn without_references_there_is_no_curve() {
        assert_eq!(Aet::new().curve(), Err(CurveError::Empty));
        let mut aet = Aet::new();
        aet.observe(&[]);
        assert_eq!(aet.curve(), Err(CurveError::Empty));
    }

    #[test]
    fn streams_at_the_edges_have_their_curve() {
        // One reference; one page; all distinct; ids at both ends.
        let ratio = |pages: &[u64], size| aet(pages.iter().copied()).miss_ratio(PageCount(size));
        assert_eq!(ratio(&[7], 1), 1.0);
        assert_eq!(ratio(&[0; 10], 1), 0.1);
        let distinct: Vec<_> = (0..10_000).collect();
        assert_eq!(ratio(&distinct, 20_000), 1.0);
        let ends: Vec<_> = [0, u64::MAX, 1, u64::MAX - 1].repeat(25);
        assert_eq!((ratio(&ends, 3), ratio(&ends, 4)), (1.0, 0.04));
    }

    proptest! {
        #[test]
        fn the_curve_agrees_with_its_definition(
            pages in prop::collection::vec(0_u64..30, 1..150),
            size in 0_u64..40,
            batch in 1_usize..200,
        ) {
            let expected = naive::aet_miss_ratio(&pages, size);
            let mut aet = Aet::new();
            for pages in pages.chunks(batch) {
                aet.observe(&batch_of(pages.iter().copied()));
            }
            let found = aet.curve().unwrap().miss_ratio(PageCount(size));
            prop_assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        }
    }
}
