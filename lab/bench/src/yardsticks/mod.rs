//! Reference implementations of the same work, with which our estimators are compared.
//!
//! These are the textbook forms, as in public curve engines, over a fast hash table (`hashbrown`) and with the usual
//! structures. They are here and not in `estimator` because nobody should use them.

mod aet;
mod counter_stacks;
mod fenwick;
mod inversions;
mod olken;
mod shards;

pub(crate) use aet::PlainAet;
pub(crate) use counter_stacks::PlainCounterStacks;
pub(crate) use fenwick::FenwickLru;
pub(crate) use inversions::InversionLru;
pub(crate) use olken::OlkenLru;
pub(crate) use shards::{PlainFixedSizeShards, PlainShards};

use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount, mix};

/// Weights by size in pages from which references hit, as a histogram whose steps make the curve.
#[derive(Debug, Clone, Default)]
struct Hits {
    /// By the smallest memory that hits.
    weights: Vec<f64>,
}

impl Hits {
    fn add(&mut self, size_pages: usize, weight: f64) {
        if size_pages >= self.weights.len() {
            self.weights.resize(size_pages + 1, 0.0);
        }
        self.weights[size_pages] += weight;
    }

    /// The curve of a stream of `references`, which may be a corrected number.
    fn curve(&self, references: f64) -> Result<MissRatioCurve, CurveError> {
        let mut points = vec![CurvePoint::exact(PageCount(0), 1.0)];
        let mut misses = references;
        let mut last: f64 = 1.0;
        for (size, &weight) in self.weights.iter().enumerate().skip(1) {
            misses -= weight;
            let ratio = (misses / references).clamp(0.0, last);
            if ratio < last {
                points.push(CurvePoint::exact(PageCount(size as u64), ratio));
                last = ratio;
            }
        }
        MissRatioCurve::new(points, u64::from(references > 0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_estimator::{Estimator, ExactLru};
    use plimsoll_flow::PageNumber;

    fn pages() -> Vec<PageNumber> {
        let page = |i| PageNumber(mix(i) % 700 * (mix(i * 3) % 5));
        (0..60_000).map(page).collect()
    }

    #[test]
    fn the_exact_ones_are_exact() {
        let mut exact = ExactLru::new();
        exact.observe(&pages());
        let exact = exact.curve().unwrap();
        let yardsticks: [Box<dyn Estimator>; 5] = [
            Box::new(OlkenLru::new()),
            Box::new(FenwickLru::new()),
            Box::new(InversionLru::new()),
            Box::new(PlainShards::new(1.0)),
            Box::new(PlainFixedSizeShards::new(1 << 20)),
        ];
        for (index, mut yardstick) in yardsticks.into_iter().enumerate() {
            yardstick.observe(&pages());
            let curve = yardstick.curve().unwrap();
            let sizes = (0..4_000).map(PageCount);
            let error = curve.distance(&exact, sizes).unwrap().max_absolute_error;
            assert!(error < 1e-9, "yardstick {index}: {error}");
        }
    }

    #[test]
    fn the_others_are_close() {
        let mut exact = ExactLru::new();
        exact.observe(&pages());
        let exact = exact.curve().unwrap();
        let yardsticks: [(Box<dyn Estimator>, f64); 2] = [
            (Box::new(PlainAet::new()), 0.01),
            (Box::new(PlainCounterStacks::new(12, 100)), 0.1),
        ];
        for (index, (mut yardstick, bound)) in yardsticks.into_iter().enumerate() {
            yardstick.observe(&pages());
            let curve = yardstick.curve().unwrap();
            let sizes = (1..1_400).map(PageCount);
            let error = curve.distance(&exact, sizes).unwrap().mean_absolute_error;
            assert!(error < bound, "yardstick {index}: {error}");
        }
    }
}
