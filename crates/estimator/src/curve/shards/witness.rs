//! A witness: a small exactly followed sample of the pages, used to bound the error of a model's estimate.
//!
//! A model of reuse times or of counts can have errors that are not visible in its own data. A sample
//! of the pages with their true LRU distances has no model error, only a sampling error,
//! which can be estimated. The band of an estimate with a witness is therefore
//! the hull of both bands: wherever the two disagree, it extends from one to the other.
//!
//! The witness's distances are multiples of the number of pages that one sampled page represents, so the band at a
//! size also includes the witness's steps just before and after it: a cliff that the witness shows
//! one step too late is still inside.
//!
//! Cost: that of `fixed_size`.
//! Not here: an improved estimate. The miss ratio remains the model's.

use std::num::NonZeroUsize;

use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount, PageNumber};

use super::Shards;
use crate::estimator::Estimator;

/// Maximum number of pages that the witness follows.
const SAMPLES: NonZeroUsize = NonZeroUsize::new(2048).unwrap();

/// A sample of the pages of a stream under exact LRU.
#[derive(Debug, Clone)]
pub(crate) struct Witness {
    sample: Shards,
}

impl Witness {
    /// Returns an empty witness; `seed` selects the pages it follows.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            sample: Shards::fixed_size(SAMPLES, seed),
        }
    }

    /// Processes the next references of the stream: all of them, not a sample.
    pub(crate) fn observe(&mut self, pages: &[PageNumber]) {
        self.sample.observe(pages);
    }

    /// Bytes of heap allocated now.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.sample.memory_bytes()
    }

    /// Returns an estimate of the same stream with a band that contains its own and the witness's.
    ///
    /// A witness without references to its pages has no information: the band is then 0.0 to 1.0.
    ///
    /// # Errors
    ///
    /// Only those of an invalid `estimate`.
    pub(crate) fn widen(
        &mut self,
        estimate: &MissRatioCurve,
    ) -> Result<MissRatioCurve, CurveError> {
        let seen = self.sample.curve();
        let seen = seen.as_ref().map_or(&[][..], MissRatioCurve::points);
        MissRatioCurve::new(hull(estimate.points(), seen), estimate.references())
    }
}

/// Exact counts of an estimator that processes every reference.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExactCounts {
    /// Number of first references, which equals the number of pages.
    pub(crate) first_references: u64,
    pub(crate) references: u64,
}

impl ExactCounts {
    /// Narrows the band to known limits: first references miss at every size, and no others do where all pages fit.
    pub(crate) fn narrow(self, curve: &MissRatioCurve) -> Result<MissRatioCurve, CurveError> {
        let cold = self.first_references as f64 / self.references as f64;
        let footprint = PageCount(self.first_references);
        let mut points = curve.points().to_vec();
        let at = points.partition_point(|point| point.size < footprint);
        if at > 0 && points.get(at).is_none_or(|point| point.size > footprint) {
            points.insert(at, curve.at(footprint));
        }
        for point in &mut points {
            point.low = point.low.max(cold.min(point.miss_ratio));
            if point.size >= footprint {
                point.high = point.miss_ratio.max(cold);
            }
        }
        MissRatioCurve::new(points, curve.references())
    }
}

/// The steps of `estimate`, also cut at the steps of `seen`, with a band that contains both.
fn hull(estimate: &[CurvePoint], seen: &[CurvePoint]) -> Vec<CurvePoint> {
    let certain_miss = CurvePoint::exact(PageCount(0), 1.0);
    let mut points: Vec<CurvePoint> = Vec::with_capacity(estimate.len() + seen.len());
    let (mut at, mut seen_at) = (0, 0);
    loop {
        let next = |points: &[CurvePoint], at: usize| points.get(at).map(|point| point.size);
        let sizes = [next(estimate, at), next(seen, seen_at)];
        let Some(size) = sizes.into_iter().flatten().min() else {
            return points;
        };
        at += usize::from(sizes[0] == Some(size));
        seen_at += usize::from(sizes[1] == Some(size));
        let own = at.checked_sub(1).map_or(certain_miss, |at| estimate[at]);
        // The step at this size, the one before and the one after.
        let around = &seen[seen_at.saturating_sub(2)..(seen_at + 1).min(seen.len())];
        let (lowest, highest): (f64, f64) = if around.is_empty() {
            (0.0, 1.0)
        } else {
            (1.0, 0.0)
        };
        let nothing_before = if seen_at < 2 { 1.0 } else { 0.0_f64 };
        let low = around.iter().fold(lowest, |low, p| low.min(p.low));
        let high = around.iter().fold(highest, |high, p| high.max(p.high));
        points.push(CurvePoint {
            size,
            miss_ratio: own.miss_ratio,
            low: low.min(own.low),
            high: high.max(nothing_before).max(own.high),
            misses: None,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::lru::ExactLru;
    use crate::parts::streams::{batch_of, curve_of, cycle, uniform, zipf};

    fn flat(ratios: &[(u64, f64)]) -> MissRatioCurve {
        let points = ratios
            .iter()
            .map(|&(size, ratio)| CurvePoint::exact(PageCount(size), ratio));
        MissRatioCurve::new(points.collect(), 1).unwrap()
    }

    #[test]
    fn the_band_of_any_estimate_holds_the_truth() {
        type Stream = fn(u64) -> Box<dyn Iterator<Item = u64>>;
        // An estimate that is wrong everywhere: only the witness can save the band.
        let wrong = flat(&[(0, 1.0), (1, 0.5)]);
        let streams: [(&str, Stream); 3] = [
            ("uniform", |seed| Box::new(uniform(20_000, seed))),
            ("zipf", |seed| Box::new(zipf(20_000, 1.0, seed))),
            ("loop", |_| Box::new(cycle(20_000))),
        ];
        for (name, stream) in streams {
            let (mut held, mut all) = (0, 0);
            for seed in 0..5 {
                let pages: Vec<_> = stream(seed).take(400_000).collect();
                let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
                let mut witness = Witness::new(seed);
                witness.observe(&batch_of(pages));
                let curve = witness.widen(&wrong).unwrap();
                for size in (1..=240).map(|step| PageCount(step * 100)) {
                    let (point, truth) = (curve.at(size), exact.miss_ratio(size));
                    held += i32::from(point.low <= truth && truth <= point.high);
                    all += 1;
                }
            }
            let coverage = f64::from(held) / f64::from(all);
            assert!(coverage >= 0.95, "{name}: {coverage}");
        }
    }

    #[test]
    fn what_is_certain_narrows_a_band_and_no_more() {
        let wide = |size, miss_ratio| CurvePoint {
            size: PageCount(size),
            miss_ratio,
            low: 0.0,
            high: 1.0,
            misses: None,
        };
        let curve = MissRatioCurve::new(vec![wide(0, 1.0), wide(10, 0.5), wide(90, 0.2)], 100);
        let certain = ExactCounts {
            first_references: 40,
            references: 200,
        };
        let narrowed = certain.narrow(&curve.unwrap()).unwrap();
        let band = |size| {
            let point = narrowed.at(PageCount(size));
            (point.low, point.miss_ratio, point.high)
        };
        assert_eq!(band(5), (0.2, 1.0, 1.0));
        assert_eq!(band(39), (0.2, 0.5, 1.0));
        assert_eq!(band(40), (0.2, 0.5, 0.5));
        assert_eq!(band(90), (0.2, 0.2, 0.2));
    }

    #[test]
    fn the_estimate_itself_stays() {
        let estimate = flat(&[(0, 1.0), (10, 0.5), (3_000, 0.25)]);
        let mut witness = Witness::new(1);
        witness.observe(&batch_of(cycle(5_000).take(50_000)));
        let curve = witness.widen(&estimate).unwrap();
        for size in (0..6_000).map(PageCount) {
            assert_eq!(curve.miss_ratio(size), estimate.miss_ratio(size));
        }
        assert_eq!(curve.references(), estimate.references());
    }

    #[test]
    fn a_witness_that_saw_nothing_knows_nothing() {
        let curve = Witness::new(1)
            .widen(&flat(&[(0, 1.0), (10, 0.5)]))
            .unwrap();
        assert_eq!(
            (curve.at(PageCount(50)).low, curve.at(PageCount(50)).high),
            (0.0, 1.0)
        );
    }
}
