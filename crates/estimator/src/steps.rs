//! A curve while it is being built: steps downward, then the band around them.
//!
//! The band comes either from each step's own standard error or, where an
//! estimator can afford them, from *replicates*: curves of disjoint parts of the
//! sample, each estimated as the whole was. The spread of `g` replicates over
//! the root of `g` is the standard error of the whole (the random groups of survey sampling), whatever
//! made them differ: which pages were drawn, how popular they are, how far
//! distances had to be scaled. Student's quantile makes it a band of 95 %.
//!
//! Not here: errors that all replicates share, as a model's own.

use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount};

/// How many replicates a sample is split into.
pub(crate) const REPLICATES: usize = 16;

/// Returns the replicate that a hash or a running number falls to.
pub(crate) fn replicate_of(number: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "below 16")]
    let replicate = (number % REPLICATES as u64) as usize;
    replicate
}

/// 97.5 % quantile of the normal distribution.
const NORMAL: f64 = 1.960;

/// 97.5 % quantiles of Student's distribution with 1, 2, .. 15 degrees of freedom.
const STUDENT: [f64; REPLICATES - 1] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131,
];

/// How much wider than Student's a band is. That is right for replicates spread as by a normal law; those of
/// a sample of pages are skewed by the few hot ones, and a spread too small comes with an error too large.
/// By measurement on the streams of the table in `shards`; without it bands of 95 % held 85 % of some.
const SKEWED: f64 = 1.3;

/// The steps of a curve to be, from size 0 (where everything misses) upward.
pub(crate) struct Steps {
    points: Vec<CurvePoint>,
}

impl Steps {
    pub(crate) fn new() -> Self {
        Self {
            points: vec![CurvePoint::exact(PageCount(0), 1.0)],
        }
    }

    /// From `size` on, at least the last one's, the curve stands at `miss_ratio`.
    ///
    /// A ratio outside 0.0..=1.0 or above the last one's is taken to the nearest
    /// that fits: sampling errors do not make more memory miss more.
    pub(crate) fn down_to(&mut self, size: u64, miss_ratio: f64, standard_error: f64) {
        let last = self.points[self.points.len() - 1];
        let miss_ratio = miss_ratio.clamp(0.0, last.miss_ratio);
        if miss_ratio == last.miss_ratio {
            return;
        }
        let size = PageCount(size).max(last.size);
        if size == last.size {
            self.points.pop();
        }
        self.points
            .push(banded(size, miss_ratio, NORMAL * standard_error));
    }

    /// The curve is known up to `size`, and flat from its last step to there.
    pub(crate) fn flat_to(&mut self, size: u64) {
        let last = self.points[self.points.len() - 1];
        if last.size.0 < size {
            let size = PageCount(size);
            self.points.push(CurvePoint { size, ..last });
        }
    }

    /// Replaces the band by the spread of `replicates`; `unsampled` is the share
    /// of the population outside the sample, 0.0 to 1.0, which is what it can err in.
    ///
    /// Between its points a replicate is read as a straight line: its steps are
    /// as many times coarser than the curve's as there are replicates. With fewer
    /// than two, nothing is known and the band is everything.
    pub(crate) fn band(&mut self, replicates: &[MissRatioCurve], unsampled: f64) {
        if unsampled == 0.0 {
            return;
        }
        let mut lines: Vec<_> = replicates.iter().map(Line::new).collect();
        let count = lines.len() as f64;
        let quantile = match lines.len() {
            0 | 1 => f64::INFINITY,
            several => STUDENT[several.min(REPLICATES) - 2],
        };
        for point in &mut self.points {
            let (mut sum, mut squares) = (0.0, 0.0);
            for line in &mut lines {
                // As differences from the curve itself, which keeps the digits.
                let difference = line.at(point.size.0) - point.miss_ratio;
                sum += difference;
                squares += difference * difference;
            }
            let half_width = if quantile.is_finite() {
                let variance = (squares - sum * sum / count).max(0.0) / (count - 1.0);
                SKEWED * quantile * (variance / count * unsampled).sqrt()
            } else {
                1.0
            };
            *point = banded(point.size, point.miss_ratio, half_width);
        }
    }

    /// # Errors
    ///
    /// [`CurveError::Empty`] if there were no `references`.
    pub(crate) fn into_curve(self, references: u64) -> Result<MissRatioCurve, CurveError> {
        MissRatioCurve::new(self.points, references)
    }
}

fn banded(size: PageCount, miss_ratio: f64, half_width: f64) -> CurvePoint {
    CurvePoint {
        size,
        miss_ratio,
        low: (miss_ratio - half_width).max(0.0),
        high: (miss_ratio + half_width).min(1.0),
    }
}

/// A curve read as straight lines between its points, at rising sizes.
struct Line<'curve> {
    points: &'curve [CurvePoint],
    /// Index of the first point beyond the size read last.
    next: usize,
}

impl<'curve> Line<'curve> {
    fn new(curve: &'curve MissRatioCurve) -> Self {
        Self {
            points: curve.points(),
            next: 0,
        }
    }

    fn at(&mut self, size: u64) -> f64 {
        while self.points.get(self.next).is_some_and(|p| p.size.0 <= size) {
            self.next += 1;
        }
        let (size_before, ratio_before) = match self.next.checked_sub(1) {
            None => (0, 1.0),
            Some(before) => (self.points[before].size.0, self.points[before].miss_ratio),
        };
        match self.points.get(self.next) {
            None => ratio_before,
            Some(after) => {
                let way = (size - size_before) as f64 / (after.size.0 - size_before) as f64;
                ratio_before + way * (after.miss_ratio - ratio_before)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(u64, f64)]) -> MissRatioCurve {
        let mut steps = Steps::new();
        for &(size, ratio) in points {
            steps.down_to(size, ratio, 0.0);
        }
        steps.into_curve(1).unwrap()
    }

    #[test]
    fn steps_only_go_down_and_stay_within_a_share() {
        let curve = curve(&[(2, 0.5), (4, 0.7), (6, 0.4), (6, 0.3), (8, -0.1)]);
        let points: Vec<_> = curve
            .points()
            .iter()
            .map(|p| (p.size.0, p.miss_ratio))
            .collect();
        assert_eq!(points, [(0, 1.0), (2, 0.5), (6, 0.3), (8, 0.0)]);
    }

    #[test]
    fn two_replicates_give_the_band_of_their_spread() {
        let mut steps = Steps::new();
        steps.down_to(10, 0.5, 0.0);
        steps.band(&[curve(&[(10, 0.49)]), curve(&[(10, 0.51)])], 1.0);
        let point = steps.points[1];
        // Standard error of their mean: 0.01.
        let half_width = SKEWED * 0.127_06;
        assert!((point.high - (0.5 + half_width)).abs() < 1e-9);
        assert!((point.low - (0.5 - half_width)).abs() < 1e-9);
    }

    #[test]
    fn a_band_of_one_replicate_or_none_is_everything() {
        for replicates in [vec![], vec![curve(&[(10, 0.4)])]] {
            let mut steps = Steps::new();
            steps.down_to(10, 0.5, 0.0);
            steps.band(&replicates, 1.0);
            assert_eq!((steps.points[1].low, steps.points[1].high), (0.0, 1.0));
        }
    }

    #[test]
    fn a_sample_of_everything_has_no_band_even_without_replicates() {
        let mut steps = Steps::new();
        steps.down_to(10, 0.5, 0.0);
        steps.band(&[], 0.0);
        assert_eq!(steps.points[1], CurvePoint::exact(PageCount(10), 0.5));
    }

    #[test]
    fn replicates_are_read_as_straight_lines() {
        let curve = curve(&[(10, 0.5), (20, 0.1)]);
        let mut line = Line::new(&curve);
        let ratios = [0, 5, 10, 15, 20, 99].map(|size| line.at(size));
        for (ratio, expected) in ratios.into_iter().zip([1.0, 0.75, 0.5, 0.3, 0.1, 0.1]) {
            assert!((ratio - expected).abs() < 1e-12);
        }
    }
}
