//! A curve under construction: first its steps downward, then the band around them.
//!
//! The band comes either from each step's own standard error or, where an
//! estimator can afford them, from *replicates*: curves of disjoint parts of the
//! sample, each estimated in the same way as the whole. The spread of `g` replicates over
//! the root of `g` is the standard error of the whole (the random groups of survey sampling), whatever
//! the cause of their differences: which pages were sampled, their popularity, or the
//! scaling of distances. Student's quantile gives a 95 % band.
//!
//! Not here: errors common to all replicates, such as those of a model.

use plimsoll_flow::{
    CurveError, CurvePoint, LogErrors, MissRatioCurve, MissesPerSecond, PageCount, Whole as _,
};

use super::log_errors::{log_errors, log_share};

/// Number of replicates into which a sample is split.
pub(crate) const REPLICATES: usize = 16;

/// Returns the replicate for a hash or a running number.
pub(crate) fn replicate_of(number: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "below 16")]
    let replicate = (number % REPLICATES as u64) as usize;
    replicate
}

/// 97.5 % quantile of the normal distribution.
pub(crate) const NORMAL: f64 = 1.960;

/// 97.5 % quantiles of Student's distribution with 1, 2, .. 15 degrees of freedom.
const STUDENT: [f64; REPLICATES - 1] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131,
];

/// Factor by which a band is wider than Student's. Student's quantile is exact for normally distributed replicates;
/// those of a sample of pages are skewed by a few hot pages, and samples with a small spread tend to have a large
/// error. Measured on the streams of the table in `shards`; without it 95 % bands contained only 85 % of some.
const SKEWED: f64 = 1.3;

/// 97.5 % quantile of Student's distribution; with less than one degree of freedom, that of one.
pub(crate) fn student(degrees: f64) -> f64 {
    let largest = STUDENT.len();
    let degrees = usize::whole(degrees.clamp(1.0, largest as f64));
    STUDENT[degrees - 1]
}

/// Half-width of a 95 % band in standard errors, for a sample with the variance of this number of equally popular
/// pages.
pub(crate) fn quantile_of(effective: f64) -> f64 {
    SKEWED * student(effective - 1.0)
}

/// Whole pages, rounded up.
pub(crate) fn ceiled(pages: f64) -> u64 {
    u64::whole(pages.ceil())
}

/// Share of references that may differ from what was observed in a short time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UnseenShare {
    /// May hit although no hit was observed: up to three observed references (95 % confidence), each with the
    /// weight of the longest stretch; all, where none was observed.
    pub(crate) below: f64,
    /// May miss although it seems to hit: censored references are assumed to continue like the others, but
    /// pages that a burst sees late for the first time may be rarely used ones.
    pub(crate) above: f64,
}

/// The steps of a curve under construction, from size 0 (where everything misses) upward.
pub(crate) struct Steps {
    points: Vec<CurvePoint>,
}

impl Steps {
    pub(crate) fn new() -> Self {
        Self {
            points: vec![CurvePoint::exact(PageCount(0), 1.0)],
        }
    }

    /// From `size` on, at least the last step's, the curve has the value `miss_ratio`.
    ///
    /// A ratio outside 0.0..=1.0 or above the last one's is replaced by the nearest
    /// valid one, because sampling errors must not make the curve rise.
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

    /// Replaces the band by the spread of `replicates`, as [`band_of`](Self::band_of) for a large number of pages.
    pub(crate) fn band(&mut self, replicates: &[MissRatioCurve], unsampled: f64) {
        self.band_of(replicates, unsampled, f64::INFINITY);
    }

    /// Replaces the band by the spread of `replicates`. `unsampled` is the share of the population outside the sample,
    /// 0.0 to 1.0, to which the sampling error is limited; `effective` is the number of equally popular pages that
    /// would have the same variance as the sampled ones. If they are few, so are the degrees of freedom, whatever the
    /// number of replicates.
    ///
    /// Between its points a replicate is interpolated linearly, because its steps are
    /// coarser than the curve's by the number of replicates. With fewer
    /// than two, nothing is known and the band is 0.0 to 1.0.
    pub(crate) fn band_of(
        &mut self,
        replicates: &[MissRatioCurve],
        unsampled: f64,
        effective: f64,
    ) {
        if unsampled == 0.0 {
            return;
        }
        let mut lines: Vec<_> = replicates.iter().map(Line::new).collect();
        let count = lines.len() as f64;
        let quantile = quantile_of(count.min(effective));
        for point in &mut self.points[1..] {
            let (mut sum, mut squares) = (0.0, 0.0);
            for line in &mut lines {
                // As differences from the curve itself, which preserves precision.
                let difference = line.at(point.size.0) - point.miss_ratio;
                sum += difference;
                squares += difference * difference;
            }
            let half_width = if count > 1.0 {
                let variance = (squares - sum * sum / count).max(0.0) / (count - 1.0);
                quantile * (variance / count * unsampled).sqrt()
            } else {
                1.0
            };
            *point = banded(point.size, point.miss_ratio, half_width);
        }
    }

    /// The errors of the logarithms of the ratios, one for each point: each weighting leaves out one of the `replicates`, and the
    /// model's own error is a share `model` of the logarithm. None are known of fewer than two.
    pub(crate) fn log_errors(&self, replicates: &[MissRatioCurve], model: f64) -> Vec<LogErrors> {
        let mut lines: Vec<_> = replicates.iter().map(Line::new).collect();
        let count = lines.len() as f64;
        if lines.len() < 2 {
            return Vec::new();
        }
        let factor = quantile_of(count) * ((count - 1.0) / count).sqrt();
        let errors = self.points.iter().map(|point| {
            let ratios = lines.iter_mut().map(|line| line.at(point.size.0));
            let ratios: Vec<f64> = ratios.collect();
            let mean = ratios.iter().sum::<f64>() / count;
            let own = point.miss_ratio;
            let without = ratios
                .iter()
                .map(|ratio| own + (mean - ratio) / (count - 1.0));
            log_errors(own, without, factor, log_share(own) * model)
        });
        errors.collect()
    }

    /// Adds misses per second, of `rate` references per second, with the spread of those of the replicates: of their
    /// curves times their own rates, so that the band includes the error of the rate. A replicate without references has
    /// no curve. `limits` are those of an error that all replicates share, as factors of the rate, at most and at least 1.0.
    pub(crate) fn rate(
        &mut self,
        rate: f64,
        limits: [f64; 2],
        replicates: &[(Option<MissRatioCurve>, f64)],
    ) {
        let lines = replicates.iter();
        let mut lines: Vec<_> = lines
            .map(|(curve, rate)| (curve.as_ref().map(Line::new), rate))
            .collect();
        let count = lines.len() as f64;
        for point in &mut self.points {
            let expected = point.miss_ratio * rate;
            let (mut sum, mut squares) = (0.0, 0.0);
            for (line, rate) in &mut lines {
                let ratio = line.as_mut().map_or(0.0, |line| line.at(point.size.0));
                let difference = ratio * **rate - expected;
                sum += difference;
                squares += difference * difference;
            }
            let variance = (squares - sum * sum / count).max(0.0) / (count - 1.0);
            let half_width = quantile_of(count) * (variance / count).sqrt();
            // Independent of the other.
            let [low, high] = limits.map(|limit| half_width.hypot(expected * (limit - 1.0)));
            point.misses = Some(MissesPerSecond {
                expected,
                low: (expected - low).max(0.0),
                high: expected + high,
            });
        }
    }

    /// Widens the band for unobserved events at sizes up to `unseen`'s last, one entry for each size from 0: by these
    /// shares, times `share`, and by the share `unknown`, 0.0 to 1.0, over the range of all curves that end there.
    pub(crate) fn widen_near(&mut self, unseen: &[UnseenShare], share: f64, unknown: f64) {
        let near = unseen.len() as u64 - 1;
        let borders = (0..64).map(|bit| 1 << bit).take_while(|&size| size < near);
        self.cut(borders.chain([near]).collect());
        let is_near = |point: &CurvePoint| point.size.0 < near;
        let lowest = self.points.iter().find(|point| !is_near(point));
        let lowest = lowest.map_or(0.0, |point| point.low);
        let ends: Vec<u64> = self.points[1..].iter().map(|point| point.size.0).collect();
        for (point, end) in self.points.iter_mut().zip(ends).skip(1) {
            if !is_near(point) {
                break;
            }
            // The last of the sizes that the point covers.
            let last = unseen[usize::try_from(end.min(near)).unwrap_or(0)];
            let below = (point.low - lowest).max(0.0);
            point.low = (point.low - unknown * below - share * last.below).max(0.0);
            point.high = (point.high + share * last.above).min(1.0);
            point.high += unknown * (1.0 - point.high);
        }
    }

    /// Widens the band for a share `far` of references beyond the size `near` that may be `below` less or `above` more:
    /// by these at that size, and in proportion to the hits at smaller sizes and to the misses at larger ones.
    pub(crate) fn widen_to(&mut self, near: u64, far: f64, below: f64, above: f64) {
        for point in &mut self.points[1..] {
            let part = if point.size.0 < near {
                (1.0 - point.miss_ratio) / (1.0 - far).max(f64::MIN_POSITIVE)
            } else {
                point.miss_ratio / far.max(f64::MIN_POSITIVE)
            };
            let part = part.min(1.0);
            point.low = (point.low - part * below).max(0.0);
            point.high = (point.high + part * above).min(1.0);
        }
    }

    /// Widens the band for possible errors of the sizes, from size `from` on: the whole band may be shifted by
    /// `quantum` pages, and the curve itself by `drift * sqrt(size)` pages more. What lies before `from` is not shifted.
    pub(crate) fn slide(&mut self, from: u64, quantum: f64, drift: f64) {
        let unshifted = from.saturating_sub(1);
        let reach = |size: u64| quantum + drift * (size as f64).sqrt();
        let less = |size: u64, by: f64| size.saturating_sub(ceiled(by));
        let more = |size: u64, by: f64| size.saturating_add(ceiled(by));
        let mut cuts = vec![from.max(1)];
        for (at, point) in self.points.iter().enumerate().skip(1) {
            let size = point.size.0;
            let before = less(size, reach(size));
            if before > self.points[at - 1].size.0 {
                cuts.push(before);
            }
            let after = more(size, reach(size));
            if self
                .points
                .get(at + 1)
                .is_none_or(|next| after < next.size.0)
            {
                cuts.push(after);
            }
        }
        let points = self.points.clone();
        self.cut(cuts);
        let ends: Vec<u64> = self.points[1..].iter().map(|point| point.size.0).collect();
        // Of `points`: the first within the quantum before, and the first beyond the quantum after.
        let (mut first, mut end) = (0, 0);
        for (at, point) in self.points.iter_mut().enumerate().skip(1) {
            let size = point.size.0;
            if size < from {
                continue;
            }
            let last = ends.get(at).map_or(size, |end| end - 1);
            let earliest = less(size, quantum).max(unshifted);
            while points.get(first + 1).is_some_and(|p| p.size.0 <= earliest) {
                first += 1;
            }
            end = end.max(first);
            while points
                .get(end)
                .is_some_and(|p| p.size.0 <= more(last, quantum))
            {
                end += 1;
            }
            for (index, other) in points[first..end].iter().enumerate() {
                if other.size.0 <= last {
                    point.high = point.high.max(other.high);
                }
                let next = points.get(first + index + 1);
                if next.is_none_or(|next| next.size.0 > size) {
                    point.low = point.low.min(other.low);
                }
            }
            let marked = |size: u64| points[points.partition_point(|p| p.size.0 <= size) - 1];
            let before = less(size, reach(last)).max(unshifted);
            point.high = point.high.max(marked(before).miss_ratio);
            point.low = point.low.min(marked(more(last, reach(last))).miss_ratio);
        }
    }

    /// Inserts points at `sizes` where there are none.
    fn cut(&mut self, mut sizes: Vec<u64>) {
        sizes.sort_unstable();
        let mut points: Vec<CurvePoint> = Vec::with_capacity(self.points.len() + sizes.len());
        let mut sizes = sizes.into_iter().peekable();
        for (at, &point) in self.points.iter().enumerate() {
            points.push(point);
            let next = self.points.get(at + 1).map(|next| next.size.0);
            while let Some(size) = sizes.next_if(|&size| next.is_none_or(|next| size < next)) {
                if points.last().is_some_and(|last| last.size.0 < size) {
                    let size = PageCount(size);
                    points.push(CurvePoint { size, ..point });
                }
            }
        }
        self.points = points;
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
        misses: None,
    }
}

/// A curve, interpolated linearly between its points, for rising sizes.
struct Line<'curve> {
    points: &'curve [CurvePoint],
    /// Index of the first point beyond the last size.
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
    fn what_lies_before_the_sizes_in_doubt_is_not_shifted_into_them() {
        let slid = |from| {
            let mut steps = Steps::new();
            steps.down_to(10, 0.5, 0.0);
            steps.down_to(20, 0.3, 0.0);
            steps.slide(from, 15.0, 0.0);
            let high = |size| {
                let after = steps.points.partition_point(|point| point.size.0 <= size);
                steps.points[after - 1].high
            };
            [9, 10, 19, 20, 34, 35].map(high)
        };
        assert_eq!(slid(0), [1.0, 1.0, 1.0, 1.0, 1.0, 0.3]);
        assert_eq!(slid(11), [1.0, 0.5, 0.5, 0.5, 0.5, 0.3]);
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
