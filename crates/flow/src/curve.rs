//! Miss-ratio curves: how often a VM would miss at every memory size.
//!
//! A curve is a step function of the size. Its points rise in size and never
//! rise in miss ratio. Between two points the ratio is that of the left one.
//! Sizes below the first point are not resolved: the ratio there is given as 1,
//! its maximum, but the references that would miss only there may not have been
//! observed, so that no bound can be checked. Each point has a
//! band `low..=high` in which the true ratio lies with the confidence that the
//! curve's estimator states; for an exact curve the band has no width.
//!
//! A ratio is a share of the references that the observer could see, and so depends on how it observes. Misses per
//! second do not: they are counts over a known time. A curve of references with a clock has both.

use std::ops::RangeInclusive;

use crate::PageCount;

/// A number of misses per second, with the 95 % band that includes the error of the rate itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MissesPerSecond {
    /// The estimate, 0.0 or more.
    pub expected: f64,
    /// Lower limit of the band, 0.0 to `expected`.
    pub low: f64,
    /// Upper limit of the band, `expected` or more.
    pub high: f64,
}

impl MissesPerSecond {
    /// Each value, multiplied by `factor`.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        self.map(|value| value * factor)
    }

    /// Applies a function that keeps the order of the values.
    #[must_use]
    pub fn map(self, each: impl Fn(f64) -> f64) -> Self {
        Self {
            expected: each(self.expected),
            low: each(self.low),
            high: each(self.high),
        }
    }

    /// Written so that a NaN anywhere fails.
    fn is_band(self) -> bool {
        0.0 <= self.low
            && self.low <= self.expected
            && self.expected <= self.high
            && self.high < f64::INFINITY
    }
}

/// One step of a [`MissRatioCurve`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurvePoint {
    /// Size in pages from which the ratio holds.
    pub size: PageCount,
    /// Share of references that miss, 0.0 to 1.0.
    pub miss_ratio: f64,
    /// Lower limit of the band, 0.0 to `miss_ratio`.
    pub low: f64,
    /// Upper limit of the band, `miss_ratio` to 1.0.
    pub high: f64,
    /// Misses per second of wall time; `None` for references without a clock.
    pub misses: Option<MissesPerSecond>,
}

impl CurvePoint {
    /// Returns a point without uncertainty: its band has no width.
    #[must_use]
    pub fn exact(size: PageCount, miss_ratio: f64) -> Self {
        Self {
            size,
            miss_ratio,
            low: miss_ratio,
            high: miss_ratio,
            misses: None,
        }
    }

    /// Whether it surely has no misses per second.
    #[must_use]
    pub fn misses_nothing(&self) -> bool {
        self.misses.is_some_and(|misses| misses.high == 0.0)
    }

    /// Share of references that miss as it is shown: 0.0 where it surely has no misses per second, also at the size of all pages.
    #[must_use]
    pub fn shown_ratio(&self) -> f64 {
        match self.misses_nothing() {
            true => 0.0,
            false => self.miss_ratio,
        }
    }

    /// Whether it is the size of all pages with contents, with which a curve of first touches ends: it misses nothing, but its ratio
    /// remains that of the point before.
    fn is_of_all_pages(&self) -> bool {
        self.misses_nothing() && self.high > 0.0
    }
}

/// Ratio below which differences are not told apart where a curve is [thinned](MissRatioCurve::thinned).
const RATIO_MIN: f64 = 1e-4;

/// The independent parts of the error of the logarithm of a point's misses, in thousandths.
///
/// The Euclidean distance of two points is the half-width of the 95 % band of the logarithm of the quotient of their misses:
/// errors that both have, such as that of the rate of all misses, cancel out.
pub type LogErrors = [i16; LOG_ERRORS];

/// Number of these parts.
pub const LOG_ERRORS: usize = 17;

/// Why points do not form a curve. Nothing was built.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CurveError {
    /// There are no points, or no references, at least in the sample.
    #[error(
        "nothing was observed, or none of it is in the sample (a higher rate samples more), so there is no miss ratio"
    )]
    Empty,
    /// Two points have the same size, or the sizes fall.
    #[error("point {index}: size of {size} pages does not exceed the point before it")]
    SizeNotRising {
        /// Index of the later of the two points, from 0.
        index: usize,
        /// Its size in pages.
        size: PageCount,
    },
    /// The miss ratio rises with the size.
    #[error("point {index}: miss ratio {miss_ratio} is above the point before it")]
    RatioRising {
        /// Index of the later of the two points, from 0.
        index: usize,
        /// Its miss ratio.
        miss_ratio: f64,
    },
    /// The ratio is not between 0 and 1, or outside its own band.
    #[error("point {index}: {low} <= {miss_ratio} <= {high} does not hold within 0 and 1")]
    OutsideBand {
        /// Index of the point, from 0.
        index: usize,
        /// Lower limit of its band.
        low: f64,
        /// Its miss ratio.
        miss_ratio: f64,
        /// Upper limit of its band.
        high: f64,
    },
    /// Misses per second outside their own band or rising with the size, or missing although other points have them.
    #[error(
        "point {index}: its misses per second are below 0, outside their band, above those of the point before it, \
         or missing although the points before it have them"
    )]
    MissesPerSecond {
        /// Index of the point, from 0.
        index: usize,
    },
}

/// Miss ratio of an LRU memory as a function of its size, with a confidence band.
#[derive(Debug, Clone, PartialEq)]
pub struct MissRatioCurve {
    points: Vec<CurvePoint>,
    references: u64,
    vcpus: Option<f64>,
    log_errors: Vec<LogErrors>,
    uncertain: PageCount,
}

/// Distance between two curves over a set of sizes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurveDistance {
    /// Mean of the absolute differences in miss ratio, 0.0 to 1.0 (the field's MAE).
    pub mean_absolute_error: f64,
    /// Largest absolute difference in miss ratio, 0.0 to 1.0.
    pub max_absolute_error: f64,
    /// Size of the largest difference, in pages.
    pub max_at: PageCount,
}

/// The steepest fall of a curve, such as that of a loop at the size at which it begins to fit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cliff {
    /// The size at which the ratio has completed half of the fall.
    pub size: PageCount,
    /// Miss ratio before the fall, 0.0 to 1.0.
    pub from: f64,
    /// Miss ratio after it, 0.0 to `from`.
    pub to: f64,
}

impl Cliff {
    /// Minimum fall of the miss ratio that counts as a cliff.
    pub const FALL_MIN: f64 = 0.05;
    /// Maximum width of the fall, as a share of the size.
    pub const WIDTH: f64 = 0.02;
    /// Below this size, a step of one page exceeds that share and no cliff is reported.
    pub const SIZE_MIN: PageCount = PageCount(100);

    /// The miss ratio half of the way down.
    #[must_use]
    pub fn middle(&self) -> f64 {
        f64::midpoint(self.from, self.to)
    }
}

impl MissRatioCurve {
    /// Builds a curve from its points and the number of references behind it.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] without points, or without references unless their rate is known: that there were none in
    /// a time is an observation. Else the first point
    /// that breaks the order of sizes, the order of ratios or of misses per second, or its own band.
    pub fn new(points: Vec<CurvePoint>, references: u64) -> Result<Self, CurveError> {
        let is_timed = points.iter().any(|point| point.misses.is_some());
        if points.is_empty() || (references == 0 && !is_timed) {
            return Err(CurveError::Empty);
        }
        for (index, point) in points.iter().enumerate() {
            let &CurvePoint {
                size,
                miss_ratio,
                low,
                high,
                misses,
            } = point;
            // Written so that a NaN anywhere fails.
            if !(0.0 <= low && low <= miss_ratio && miss_ratio <= high && high <= 1.0) {
                return Err(CurveError::OutsideBand {
                    index,
                    low,
                    miss_ratio,
                    high,
                });
            }
            if misses.is_some_and(|misses| !misses.is_band()) {
                return Err(CurveError::MissesPerSecond { index });
            }
            let Some(before) = index.checked_sub(1).map(|before| points[before]) else {
                continue;
            };
            if size <= before.size {
                return Err(CurveError::SizeNotRising { index, size });
            }
            if miss_ratio > before.miss_ratio {
                return Err(CurveError::RatioRising { index, miss_ratio });
            }
            let falls = match (before.misses, misses) {
                (Some(before), Some(misses)) => misses.expected <= before.expected,
                (before, misses) => before.is_none() && misses.is_none(),
            };
            if !falls {
                return Err(CurveError::MissesPerSecond { index });
            }
        }
        Ok(Self {
            points,
            references,
            vcpus: None,
            log_errors: Vec::new(),
            uncertain: PageCount(0),
        })
    }

    /// Returns the curve with misses per second where the rate of the references behind its ratios is exactly known, as
    /// that of counted reads is: the ratios and their bands times `rate`, 0.0 or more. A rate that is not a finite number
    /// is ignored.
    #[must_use]
    pub fn with_references_per_second(mut self, rate: f64) -> Self {
        if rate.is_finite() && rate >= 0.0 {
            for point in &mut self.points {
                let ratios = MissesPerSecond {
                    expected: point.miss_ratio,
                    low: point.low,
                    high: point.high,
                };
                point.misses = Some(ratios.scaled(rate));
            }
        }
        self
    }

    /// Returns the curve with the CPU time of the VM's vCPUs, all together, per second of wall time while it was
    /// observed; one that is not a finite number above 0.0 is ignored.
    #[must_use]
    pub fn with_vcpus(self, vcpus: Option<f64>) -> Self {
        Self {
            vcpus: vcpus.filter(|vcpus| vcpus.is_finite() && *vcpus > 0.0),
            ..self
        }
    }

    /// CPU time of the VM's vCPUs, all together, per second of wall time while it was observed; `None` if unknown.
    #[must_use]
    pub fn vcpus(&self) -> Option<f64> {
        self.vcpus
    }

    /// Returns the curve with the errors of its first points, one each; there are none for those points at whose sizes misses
    /// that were not observed matter more. More than there are points are ignored.
    #[must_use]
    pub fn with_log_errors(mut self, mut errors: Vec<LogErrors>) -> Self {
        errors.truncate(self.points.len());
        self.log_errors = errors;
        self
    }

    /// The errors of the first points, one each; empty if they are not known.
    #[must_use]
    pub fn log_errors(&self) -> &[LogErrors] {
        &self.log_errors
    }

    /// By how many pages the sizes may be too large, all by the same number: what [`shifted`](Self::shifted) left uncertain.
    #[must_use]
    pub fn uncertain(&self) -> PageCount {
        self.uncertain
    }

    /// Returns the curve of a memory of whose pages `uncertain` are uncertain, as a curve that was
    /// [shifted](Self::shifted) is.
    #[must_use]
    pub fn with_uncertain(self, uncertain: PageCount) -> Self {
        Self { uncertain, ..self }
    }

    /// Returns the 95 % band of the misses at `size` divided by those at `baseline`, where miss ratios below `least` (above
    /// 0.0) count as that: for each number of pages by which the sizes may be too large.
    ///
    /// Where the common errors of the two are not known, they count as independent: the upper limit is that at `size` over the
    /// lower one at `baseline`, and the lower limit the other way round. Misses never rise with the size: a smaller size has
    /// at least as many as the baseline, a larger one at most as many, and the baseline itself exactly 1.0, as has a smaller
    /// size that surely misses nothing.
    #[must_use]
    pub fn quotient_band(
        &self,
        size: PageCount,
        baseline: PageCount,
        least: f64,
    ) -> RangeInclusive<f64> {
        // With more pages the quotient falls only where the misses at the size do.
        let lows = self.shifts(size).map(|shift| {
            let of = |size: PageCount| PageCount(size.0.saturating_add(shift));
            self.quotient_of(of(size), of(baseline), least).0
        });
        lows.fold(f64::INFINITY, f64::min)..=self.quotient_high(size, baseline, least)
    }

    /// The upper limit of [`quotient_band`](Self::quotient_band).
    #[must_use]
    pub fn quotient_high(&self, size: PageCount, baseline: PageCount, least: f64) -> f64 {
        // With more pages the quotient rises only where the misses at the baseline fall.
        let highs = self.shifts(baseline).map(|shift| {
            let of = |size: PageCount| PageCount(size.0.saturating_add(shift));
            self.quotient_of(of(size), of(baseline), least).1
        });
        highs.fold(0.0, f64::max)
    }

    /// By how many pages `from` may be too large, as far as that changes the misses there.
    fn shifts(&self, from: PageCount) -> impl Iterator<Item = u64> {
        let falls = self.points[self.points_upto(from)..].iter();
        let shifts = falls.map(move |point| point.size.0 - from.0);
        std::iter::once(0).chain(shifts.take_while(|&shift| shift <= self.uncertain.0))
    }

    /// The limits for sizes that are certain.
    fn quotient_of(&self, size: PageCount, baseline: PageCount, least: f64) -> (f64, f64) {
        let over = |ratio: f64, divisor: f64| ratio.max(least) / divisor.max(least);
        let (point, divisor) = (self.at(size), self.at(baseline));
        if size == baseline || (size < baseline && point.misses_nothing()) {
            return (1.0, 1.0);
        }
        let mut low = over(point.low, divisor.high);
        let mut high = over(point.high, divisor.low);
        if let Some((known, half_width)) = self.log_half_width(size, baseline) {
            let factor = half_width.exp();
            let most = over(known * factor, divisor.miss_ratio);
            low = over(point.miss_ratio / factor, divisor.miss_ratio);
            // A size above the baseline may have no errors of its own.
            high = if size > baseline {
                high.min(most)
            } else {
                most
            };
        }
        if size < baseline {
            (low.max(1.0), high.max(1.0))
        } else {
            (low.min(1.0), high.min(1.0))
        }
    }

    /// The half-width of the band of the logarithm of the quotient of the misses at two sizes, and the
    /// miss ratio at the first, or at the largest size below it whose errors are known; `None` if those of the other are not.
    fn log_half_width(&self, size: PageCount, other: PageCount) -> Option<(f64, f64)> {
        let known = self.points_upto(size).min(self.log_errors.len());
        let at = known.checked_sub(1)?;
        let other = self
            .log_errors
            .get(self.points_upto(other).checked_sub(1)?)?;
        let pairs = self.log_errors[at].iter().zip(other);
        let differences = pairs.map(|(&one, &other)| f64::from(one) - f64::from(other));
        let squares: f64 = differences.map(|difference| difference * difference).sum();
        Some((self.points[at].miss_ratio, squares.sqrt() / 1000.0))
    }

    /// Returns the misses per second of wall time at `size`; `None` for references without a clock, and below the
    /// first point, where they are not resolved.
    #[must_use]
    pub fn misses_per_second(&self, size: PageCount) -> Option<MissesPerSecond> {
        self.at(size).misses
    }

    /// Returns the curve of a memory that also holds pages which this one does not show: `most` of them, so that its
    /// sizes are larger by that, or fewer, down to `least`, for which its band reaches down. The size of all pages, with which a
    /// curve of first touches ends, has these already.
    ///
    /// `least` above `most` counts as `most`.
    #[must_use]
    pub fn shifted(mut self, least: PageCount, most: PageCount) -> Self {
        let uncertain = most.0.saturating_sub(least.0);
        let all = (self.points.len() > 1)
            .then(|| self.points.pop_if(|last| last.is_of_all_pages()))
            .flatten();
        // Of the sizes at which a point holds, the largest has the lowest limit.
        let lowest: Vec<_> = (1..self.points.len())
            .map(|next| {
                let last = self.points[next].size.0 - 1;
                self.at(PageCount(last.saturating_add(uncertain)))
            })
            .collect();
        for (point, lowest) in self.points.iter_mut().zip(lowest) {
            point.low = point.low.min(lowest.low);
            if let (Some(misses), Some(lowest)) = (&mut point.misses, lowest.misses) {
                misses.low = misses.low.min(lowest.low);
            }
        }
        for point in &mut self.points {
            point.size.0 = point.size.0.saturating_add(most.0);
        }
        self.points.dedup_by_key(|point| point.size);
        let touched = self.touched_size();
        self.points.extend(all.map(|all| CurvePoint {
            size: all.size.max(PageCount(touched.0.saturating_add(1))),
            ..all
        }));
        self.points.dedup_by_key(|point| point.size);
        self.log_errors.truncate(self.points.len());
        self.uncertain.0 = self.uncertain.0.saturating_add(uncertain);
        self
    }

    /// The steps, rising in size; never empty.
    #[must_use]
    pub fn points(&self) -> &[CurvePoint] {
        &self.points
    }

    /// The size of the pages that were touched while it was observed: that of the last point, or of the one before that of all
    /// pages.
    #[must_use]
    pub fn touched_size(&self) -> PageCount {
        let touched = self.points.iter().rfind(|point| !point.is_of_all_pages());
        touched.unwrap_or(&self.points[0]).size
    }

    /// Number of references behind the curve; for a sampled curve, those in the sample.
    #[must_use]
    pub fn references(&self) -> u64 {
        self.references
    }

    /// Whether the curve makes a claim about `size`: it does from its first point on.
    #[must_use]
    pub fn resolves(&self, size: PageCount) -> bool {
        size >= self.points[0].size
    }

    /// Returns the value of the curve at `size`, as a point of that size.
    ///
    /// A size that is not [resolved](Self::resolves) has the maximum, 1.0 with a band of 1.0..=1.0.
    #[must_use]
    pub fn at(&self, size: PageCount) -> CurvePoint {
        match self.points_upto(size) {
            0 => CurvePoint::exact(size, 1.0),
            after => CurvePoint {
                size,
                ..self.points[after - 1]
            },
        }
    }

    /// The number of points up to `size`, of which the last holds there.
    fn points_upto(&self, size: PageCount) -> usize {
        self.points.partition_point(|point| point.size <= size)
    }

    /// Returns the miss ratio at `size`, 0.0 to 1.0.
    #[must_use]
    pub fn miss_ratio(&self, size: PageCount) -> f64 {
        self.at(size).miss_ratio
    }

    /// Returns the smallest size whose miss ratio is at most `miss_ratio`, or
    /// `None` if no size reaches it: first references miss at every size.
    #[must_use]
    pub fn size_for(&self, miss_ratio: f64) -> Option<PageCount> {
        if miss_ratio >= 1.0 {
            return Some(PageCount(0));
        }
        let index = self
            .points
            .partition_point(|point| point.miss_ratio > miss_ratio);
        self.points.get(index).map(|point| point.size)
    }

    /// Returns the steepest fall within 2 % of the size, if it qualifies as a cliff: at least
    /// [`Cliff::FALL_MIN`], at [`Cliff::SIZE_MIN`] or above.
    #[must_use]
    pub fn cliff(&self) -> Option<Cliff> {
        let mut before = 0;
        let mut steepest: Option<Cliff> = None;
        for (index, point) in self.points.iter().enumerate() {
            if point.size < Cliff::SIZE_MIN {
                continue;
            }
            // The ratio at the smallest size at which the fall may have begun.
            let begin = point.size.scaled(1.0 - Cliff::WIDTH);
            while before < index && self.points[before].size <= begin {
                before += 1;
            }
            let from = before
                .checked_sub(1)
                .map_or(1.0, |at| self.points[at].miss_ratio);
            let least = steepest.map_or(Cliff::FALL_MIN, |steepest| steepest.from - steepest.to);
            if from - point.miss_ratio > least {
                steepest = Some(Cliff {
                    size: point.size,
                    from,
                    to: point.miss_ratio,
                });
            }
        }
        let cliff = steepest?;
        let size = self.size_for(cliff.middle())?;
        Some(Cliff { size, ..cliff })
    }

    /// Distance from the true curve's cliff to the size at which this curve reaches the cliff's middle ratio, as a
    /// share of the cliff's size; `None` if `truth` has no cliff, or this curve does not fall to its middle.
    #[must_use]
    pub fn cliff_position_error(&self, truth: &Self) -> Option<f64> {
        let cliff = truth.cliff()?;
        let found = self.size_for(cliff.middle())?;
        Some(found.0.abs_diff(cliff.size.0) as f64 / cliff.size.0 as f64)
    }

    /// Share of `sizes` whose true ratio lies within the curve's band; `None` without a band or sizes.
    #[must_use]
    pub fn band_coverage(
        &self,
        truth: &Self,
        sizes: impl IntoIterator<Item = PageCount>,
    ) -> Option<f64> {
        if self.points.iter().all(|point| point.low == point.high) {
            return None;
        }
        let (mut within, mut all) = (0.0, 0.0);
        for size in sizes {
            let (point, ratio) = (self.at(size), truth.miss_ratio(size));
            all += 1.0;
            if point.low <= ratio && ratio <= point.high {
                within += 1.0;
            }
        }
        (all > 0.0).then(|| within / all)
    }

    /// Compares two curves at each of `sizes`; `None` if there are none.
    #[must_use]
    pub fn distance(
        &self,
        other: &Self,
        sizes: impl IntoIterator<Item = PageCount>,
    ) -> Option<CurveDistance> {
        self.distance_up_to(other, sizes, 0.0)
    }

    /// Compares the curve with a true one as [`distance`](Self::distance) does, forgiving sizes
    /// that are off by a share `slack`, 0.0 to 1.0: no difference counts between the ratios that `truth` has that much
    /// below and above a size. So a cliff that is slightly misplaced does not count as an error of its whole height.
    #[must_use]
    pub fn distance_up_to(
        &self,
        truth: &Self,
        sizes: impl IntoIterator<Item = PageCount>,
        slack: f64,
    ) -> Option<CurveDistance> {
        let mut sum = 0.0;
        let mut count = 0.0;
        let mut max = (0.0, None);
        for size in sizes {
            let ratio = self.miss_ratio(size);
            let high = truth.miss_ratio(size.scaled(1.0 - slack));
            let low = truth.miss_ratio(size.scaled(1.0 + slack));
            let difference = (ratio - high).max(low - ratio).max(0.0);
            sum += difference;
            count += 1.0;
            if max.1.is_none() || difference > max.0 {
                max = (difference, Some(size));
            }
        }
        max.1.map(|max_at| CurveDistance {
            mean_absolute_error: sum / count,
            max_absolute_error: max.0,
            max_at,
        })
    }

    /// Returns the curve at exactly `sizes`, which must rise.
    ///
    /// # Errors
    ///
    /// [`CurveError::SizeNotRising`] if they do not, [`CurveError::Empty`] if there are none.
    pub fn at_sizes(&self, sizes: &[PageCount]) -> Result<Self, CurveError> {
        let points = sizes.iter().map(|&size| self.at(size)).collect();
        self.with_points(points)
    }

    /// The curve with other points, each of which has the errors of that of this curve which holds at its size.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_points(&self, points: Vec<CurvePoint>) -> Result<Self, CurveError> {
        Ok(Self {
            vcpus: self.vcpus,
            log_errors: self.log_errors_of(&points),
            uncertain: self.uncertain,
            ..Self::new(points, self.references)?
        })
    }

    fn log_errors_of(&self, points: &[CurvePoint]) -> Vec<LogErrors> {
        let errors = points.iter().map_while(|point| {
            let at = self.points_upto(point.size).checked_sub(1)?;
            self.log_errors.get(at).copied()
        });
        errors.collect()
    }

    /// Returns a curve of at most `points` points (at least 2) that follows this one.
    ///
    /// The first and the last point are kept, and of those between, the ones at
    /// even distances along the curve, counting size, ratio, and the ratio's logarithm down to 0.0001 alike. Flat parts take
    /// few points, cliffs take many. A point's upper limits are also those of the points left out after it. So no size keeps a bound on
    /// its misses that it does not keep on this curve; on a bound relative to those at a baseline, see
    /// [`thinned_around`](Self::thinned_around).
    #[must_use]
    pub fn thinned(&self, points: usize) -> Self {
        self.thinned_around(points, &[])
    }

    /// [`thinned`](Self::thinned) with the points that hold at these sizes, such as a baseline: misses over those at one of them are
    /// not smaller than on this curve.
    #[must_use]
    pub fn thinned_around(&self, points: usize, sizes: &[PageCount]) -> Self {
        let budget = points.max(2);
        if self.points.len() <= budget {
            return self.clone();
        }
        let needed = sizes.iter().map(|size| self.points_upto(*size));
        let needed: Vec<usize> = needed.filter_map(|after| after.checked_sub(1)).collect();
        let budget = budget.saturating_sub(needed.len()).max(2);
        let (first, last) = (self.points[0], self.points[self.points.len() - 1]);
        let width = (last.size.0 - first.size.0) as f64;
        let height = (first.miss_ratio - last.miss_ratio).max(f64::MIN_POSITIVE);
        let log = |point: &CurvePoint| point.miss_ratio.max(RATIO_MIN).ln();
        let log_height = (log(&first) - log(&last)).max(f64::MIN_POSITIVE);
        let travelled = |point: &CurvePoint| {
            (point.size.0 - first.size.0) as f64 / width
                + (first.miss_ratio - point.miss_ratio) / height
                + (log(&first) - log(point)) / log_height
        };
        let step = 3.0 / (budget - 1) as f64;
        let mut kept = vec![first];
        let mut next = step;
        let mut chosen = 1;
        for (at, pair) in (1..).zip(self.points[1..].windows(2)) {
            // Of the points within one step, the last is kept: it has
            // the value at which the curve arrives.
            let is_next = travelled(&pair[1]) >= next && chosen < budget - 1;
            if is_next || needed.contains(&at) {
                kept.push(pair[0]);
                next = next.max(travelled(&pair[0])) + step;
                chosen += usize::from(is_next);
            }
        }
        kept.push(last);
        let mut at = 0;
        for point in &self.points {
            if kept.get(at + 1).is_some_and(|next| next.size <= point.size) {
                at += 1;
            }
            let kept = &mut kept[at];
            kept.high = kept.high.max(point.high);
            if let (Some(kept), Some(left_out)) = (&mut kept.misses, point.misses) {
                kept.high = kept.high.max(left_out.high);
            }
        }
        Self {
            log_errors: self.log_errors_of(&kept),
            points: kept,
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn curve(points: &[(u64, f64)]) -> MissRatioCurve {
        let points = points
            .iter()
            .map(|&(size, ratio)| CurvePoint::exact(PageCount(size), ratio));
        MissRatioCurve::new(points.collect(), 100).unwrap()
    }

    #[test]
    fn a_cliff_is_a_fall_within_a_fiftieth_of_its_size() {
        let slope = curve(&[(1000, 0.7), (1100, 0.5), (1200, 0.3)]);
        assert_eq!(slope.cliff().map(|cliff| cliff.size), Some(PageCount(1000)));
        let gentle: Vec<_> = (0..100)
            .map(|i| (200 + 10 * i, 0.9 - 0.009 * i as f64))
            .collect();
        let mut points = vec![(1, 0.9)];
        points.extend(&gentle);
        assert_eq!(curve(&points).cliff(), None);
        points.extend([(5000, 0.008), (5050, 0.005)]);
        points.retain(|point| point.0 < 700 || point.0 > 1190);
        // From 0.459 at 690 pages to the value at 5000.
        let cliff = curve(&points).cliff().unwrap();
        assert!(
            (cliff.from - 0.459).abs() < 1e-12 && cliff.to < 0.01,
            "{cliff:?}"
        );
        assert_eq!(curve(&[(99, 0.1)]).cliff(), None);
        assert_eq!(
            curve(&[(100, 0.1)]).cliff().map(|cliff| cliff.size),
            Some(PageCount(100))
        );
    }

    #[test]
    fn a_cliff_beside_its_place_is_forgiven_up_to_the_slack() {
        let (truth, late) = (curve(&[(1000, 0.1)]), curve(&[(1010, 0.1)]));
        let sizes = || (900..1100).map(PageCount);
        let strict = late.distance(&truth, sizes()).unwrap();
        assert!((strict.max_absolute_error - 0.9).abs() < 1e-12);
        let forgiving = late.distance_up_to(&truth, sizes(), 0.011).unwrap();
        assert_eq!(forgiving.max_absolute_error, 0.0);
        let wrong = late.distance_up_to(&truth, sizes(), 0.005).unwrap();
        assert!((wrong.max_absolute_error - 0.9).abs() < 1e-12);
    }

    #[test]
    fn a_curve_holds_its_ratio_from_the_left() {
        let curve = curve(&[(2, 0.5), (4, 0.25)]);
        let ratios = [0, 1, 2, 3, 4, 1000].map(|size| curve.miss_ratio(PageCount(size)));
        assert_eq!(ratios, [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]);
    }

    #[test]
    fn the_size_for_a_ratio_is_the_smallest_that_reaches_it() {
        let curve = curve(&[(2, 0.5), (4, 0.25), (6, 0.25), (8, 0.1)]);
        let size_for = |ratio| curve.size_for(ratio).map(|size| size.0);
        assert_eq!(
            [1.0, 0.7, 0.5, 0.3, 0.25, 0.1, 0.05].map(size_for),
            [Some(0), Some(2), Some(2), Some(4), Some(4), Some(8), None]
        );
    }

    #[test]
    fn the_distance_names_mean_and_worst_size() {
        let (a, b) = (curve(&[(1, 0.8), (3, 0.2)]), curve(&[(1, 0.6), (3, 0.2)]));
        let distance = a.distance(&b, (1..5).map(PageCount)).unwrap();
        assert!((distance.mean_absolute_error - 0.1).abs() < 1e-12);
        assert!((distance.max_absolute_error - 0.2).abs() < 1e-12);
        assert_eq!(distance.max_at, PageCount(1));
        assert_eq!(a.distance(&b, []), None);
    }

    #[test]
    fn what_is_not_a_curve_is_refused_with_its_place() {
        let new = |points: &[(u64, f64)]| {
            let points = points
                .iter()
                .map(|&(size, ratio)| CurvePoint::exact(PageCount(size), ratio));
            MissRatioCurve::new(points.collect(), 1).unwrap_err()
        };
        assert_eq!(new(&[]), CurveError::Empty);
        assert_eq!(
            new(&[(1, 0.5), (1, 0.4)]),
            CurveError::SizeNotRising {
                index: 1,
                size: PageCount(1)
            }
        );
        assert_eq!(
            new(&[(1, 0.5), (2, 0.6)]),
            CurveError::RatioRising {
                index: 1,
                miss_ratio: 0.6
            }
        );
        assert!(matches!(
            new(&[(1, f64::NAN)]),
            CurveError::OutsideBand { index: 0, .. }
        ));
        assert!(matches!(
            new(&[(1, 1.5)]),
            CurveError::OutsideBand { index: 0, .. }
        ));
    }

    #[test]
    fn a_cliff_survives_thinning() {
        let points: Vec<_> = (0..10_000)
            .map(|size| (size, if size < 6_000 { 0.9 } else { 0.1 }))
            .collect();
        let thin = curve(&points).thinned(20);
        assert!(thin.points().len() <= 20);
        assert_eq!(thin.size_for(0.5), Some(PageCount(6_000)));
    }

    #[test]
    fn no_upper_limit_is_lost_by_thinning() {
        let points = (0..1000).map(|size| CurvePoint {
            high: if size == 500 {
                0.9
            } else {
                0.5 - size as f64 * 1e-4
            },
            ..CurvePoint::exact(PageCount(size), 0.5 - size as f64 * 1e-4)
        });
        let whole = MissRatioCurve::new(points.collect(), 100).unwrap();
        let whole = whole.with_references_per_second(10.0);
        let thin = whole.thinned(8);
        for size in (0..1000).map(PageCount) {
            let (thin, whole) = (thin.at(size), whole.at(size));
            assert!(thin.high >= whole.high, "{size}");
            assert!(thin.misses.unwrap().high >= whole.misses.unwrap().high);
        }
        let raised = thin.points().iter().filter(|point| point.high == 0.9);
        assert_eq!(raised.count(), 1);
    }

    #[test]
    fn misses_over_those_at_a_size_that_is_kept_are_not_smaller_on_a_thinned_curve() {
        // Its ratio falls most where it is small.
        let points: Vec<_> = (0..5000)
            .map(|size| (size, 0.9 * 0.998_f64.powi(i32::try_from(size).unwrap())))
            .collect();
        let whole = curve(&points);
        for baseline in (10..5000).step_by(61).map(PageCount) {
            let thin = whole.thinned_around(200, &[baseline]);
            assert!(thin.points().len() <= 200);
            for size in (0..5000).step_by(7).map(PageCount) {
                let [of, by] =
                    [&whole, &thin].map(|curve| *curve.quotient_band(size, baseline, 1e-3).end());
                assert!(by >= of, "{by} of {of} at {size} over {baseline}");
            }
        }
        // Without it by little.
        let thin = whole.thinned(1000);
        for size in (0..5000).map(PageCount) {
            let [of, by] = [&whole, &thin].map(|curve| curve.miss_ratio(size).max(1e-3));
            assert!(by / of < 1.03, "{by} of {of} at {size}");
        }
    }

    #[test]
    fn the_rate_stays_with_a_curve_that_is_thinned_or_cut() {
        let points: Vec<_> = (0..100)
            .map(|size| (size, 1.0 - size as f64 / 100.0))
            .collect();
        let rated = curve(&points)
            .with_references_per_second(2e6)
            .with_vcpus(Some(4.0));
        let sizes = [PageCount(0), PageCount(50)];
        for curve in [
            rated.thinned(5),
            rated.at_sizes(&sizes).unwrap(),
            rated.clone(),
        ] {
            let at = |size| curve.misses_per_second(PageCount(size)).unwrap().expected;
            assert_eq!(at(0), 2e6);
            assert_eq!(curve.vcpus(), rated.vcpus());
        }
        let shifted = rated.shifted(PageCount(10), PageCount(10));
        assert_eq!(shifted.misses_per_second(PageCount(9)), None);
        let at = shifted.misses_per_second(PageCount(60)).unwrap();
        assert_eq!((at.low, at.expected, at.high), (1e6, 1e6, 1e6));
        for rate in [-1.0, f64::NAN, f64::INFINITY] {
            let unrated = curve(&points).with_references_per_second(rate);
            assert_eq!(unrated.misses_per_second(PageCount(0)), None);
            assert_eq!(unrated.with_vcpus(Some(rate)).vcpus(), None);
        }
    }

    fn with_bands(points: &[(u64, f64)]) -> MissRatioCurve {
        let points = curve(points).points().to_vec().into_iter();
        let points = points.map(|point| CurvePoint {
            low: point.miss_ratio * 0.5,
            high: (point.miss_ratio * 2.0).min(1.0),
            ..point
        });
        MissRatioCurve::new(points.collect(), 100).unwrap()
    }

    /// Errors of which each part but the first two is that of every point.
    fn errors(own: i16, other: i16) -> LogErrors {
        let mut errors = [700; LOG_ERRORS];
        errors[..2].copy_from_slice(&[own, other]);
        errors
    }

    #[test]
    fn errors_of_both_sizes_cancel_out_in_their_quotient() {
        let whole = with_bands(&[(10, 0.4), (20, 0.2), (30, 0.1), (40, 0.0)]);
        let band = |curve: &MissRatioCurve, size| {
            let band = curve.quotient_band(PageCount(size), PageCount(30), 0.01);
            [*band.start(), *band.end()]
        };
        // Unknown errors are independent: 0.1 to 0.4 over 0.05 to 0.2; but a smaller size never misses less.
        assert_eq!(band(&whole, 20), [1.0, 8.0]);
        assert_eq!(band(&whole, 30), [1.0, 1.0]);
        assert_eq!(band(&whole, 35), [0.25, 1.0]);
        // Without misses at the smaller size there are none at the baseline.
        let mut points = whole.points().to_vec();
        for (point, expected) in points.iter_mut().zip([9.0, 0.0, 0.0, 0.0]) {
            point.misses = Some(MissesPerSecond {
                expected,
                low: 0.0,
                high: expected,
            });
        }
        let held = whole.with_points(points).unwrap();
        assert_eq!(band(&held, 20), [1.0, 1.0]);
        assert_eq!(band(&held, 10), [1.0, 16.0]);
        let known = [errors(300, 0), errors(100, 0), errors(70, 40)].to_vec();
        let known = whole.clone().with_log_errors(known);
        let near = |found: [f64; 2], expected: [f64; 2]| {
            let differences = found.iter().zip(expected).map(|(one, other)| one - other);
            assert!(
                differences.map(f64::abs).sum::<f64>() < 1e-9,
                "{found:?} {expected:?}"
            );
        };
        let factor = 0.05_f64.exp();
        near(band(&known, 20), [2.0 / factor, 2.0 * factor]);
        near(band(&known, 30), [1.0, 1.0]);
        // The own band of a size has not the error at the baseline.
        let exact =
            curve(&[(10, 0.4), (20, 0.2)]).with_log_errors(vec![errors(0, 0), errors(50, 0)]);
        let at_baseline = exact.quotient_band(PageCount(10), PageCount(20), 0.01);
        near(
            [*at_baseline.start(), *at_baseline.end()],
            [2.0 / factor, 2.0 * factor],
        );
        // Of 40 pages no more is known than that they miss no more than 30 do, nor than both bands allow.
        near(band(&known, 40), [0.1, 0.2]);
        // Of a quotient by their misses no more than the bands.
        let unknown = known.quotient_band(PageCount(20), PageCount(40), 0.01);
        assert_eq!(unknown, 10.0..=40.0);
        let least = known.quotient_band(PageCount(20), PageCount(30), 0.15);
        assert_eq!(least, 0.2 / factor / 0.15..=0.2 * factor / 0.15);
        // Points that are left out or lie between others have the errors of those before them.
        let cut = known.at_sizes(&[PageCount(15), PageCount(20), PageCount(45)]);
        let cut = cut.unwrap();
        assert_eq!(
            cut.log_errors(),
            [errors(300, 0), errors(100, 0)],
            "{cut:?}"
        );
        assert_eq!(known.thinned(2).log_errors(), [errors(300, 0)]);
        let more = whole.clone().with_log_errors(vec![errors(0, 0); 9]);
        assert_eq!(more.log_errors().len(), 4);
    }

    #[test]
    fn the_band_of_a_shifted_quotient_holds_that_of_every_number_of_further_pages() {
        let own = curve(&[(10, 0.8), (20, 0.7), (30, 0.1), (50, 0.04)]);
        let errors = vec![errors(0, 0); 4];
        for own in [own.clone(), own.with_log_errors(errors)] {
            let shifted = own.clone().shifted(PageCount(2), PageCount(12));
            assert_eq!(shifted.uncertain(), PageCount(10));
            for (size, baseline) in [(25, 32), (30, 45), (40, 36), (60, 60), (22, 63)] {
                let band = shifted.quotient_band(PageCount(size), PageCount(baseline), 0.001);
                for further in 2..=12 {
                    let [ratio, divisor] =
                        [size, baseline].map(|size| own.miss_ratio(PageCount(size - further)));
                    let quotient = ratio / divisor;
                    assert!(
                        *band.start() <= quotient && quotient <= *band.end(),
                        "{quotient} of {size} and {baseline} with {further}: {band:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_band_of_a_shifted_curve_holds_the_curve_of_every_number_of_further_pages() {
        let points: Vec<_> = (1..100)
            .map(|size| (size * 7, 1.0 - size as f64 / 100.0))
            .collect();
        let rated = curve(&points).with_references_per_second(1000.0);
        let shifted = rated.clone().shifted(PageCount(30), PageCount(200));
        for further in 30..=200 {
            for size in 207..1000 {
                let (of, band) = (
                    rated.at(PageCount(size - further)),
                    shifted.at(PageCount(size)),
                );
                assert!(band.low <= of.miss_ratio && of.miss_ratio <= band.high);
                let (of, band) = (of.misses.unwrap(), band.misses.unwrap());
                assert!(band.low <= of.expected && of.expected <= band.high);
            }
        }
        let size = PageCount(400);
        let most = rated.at(PageCount(200));
        assert_eq!(shifted.at(size).miss_ratio, most.miss_ratio);
        // No lower than the fewest of them, but for a step between two sizes.
        assert!(shifted.at(size).low >= rated.at(PageCount(377)).miss_ratio);
        let huge = rated.shifted(PageCount(0), PageCount(u64::MAX));
        assert_eq!(huge.points().len(), 1);
    }

    #[test]
    fn the_size_of_all_pages_has_what_a_curve_is_shifted_by() {
        let touched = curve(&[(16, 0.9), (100, 0.25)]).with_references_per_second(1000.0);
        let all = |size| CurvePoint {
            size: PageCount(size),
            low: 0.0,
            misses: Some(MissesPerSecond {
                low: 0.0,
                expected: 0.0,
                high: 0.0,
            }),
            ..touched.points()[1]
        };
        let ends = |all_pages, further| {
            let points = [touched.points(), &[all(all_pages)]].concat();
            let curve = touched.with_points(points).unwrap();
            assert_eq!(curve.touched_size(), PageCount(100));
            let shifted = curve.shifted(PageCount(0), PageCount(further));
            let last = shifted.points().last().unwrap().size.0;
            assert!(
                shifted
                    .misses_per_second(PageCount(100 + further))
                    .unwrap()
                    .low
                    > 0.0
            );
            (shifted.touched_size().0, last)
        };
        assert_eq!(ends(500, 300), (400, 500));
        assert_eq!(ends(300, 300), (400, 401));
    }

    #[test]
    fn misses_that_rise_or_are_missing_or_outside_their_band_are_refused() {
        let refused = |misses: [Option<(f64, f64, f64)>; 2]| {
            let points = misses.iter().zip(1..).map(|(misses, size)| CurvePoint {
                misses: misses.map(|(low, expected, high)| MissesPerSecond {
                    expected,
                    low,
                    high,
                }),
                ..CurvePoint::exact(PageCount(size), 0.5)
            });
            match MissRatioCurve::new(points.collect(), 1) {
                Err(CurveError::MissesPerSecond { index }) => Some(index),
                Err(other) => panic!("{other}"),
                Ok(_) => None,
            }
        };
        let good = Some((1.0, 2.0, 3.0));
        assert_eq!(refused([good, good]), None);
        assert_eq!(refused([good, None]), Some(1));
        assert_eq!(refused([None, good]), Some(1));
        assert_eq!(refused([good, Some((2.0, 2.5, 3.0))]), Some(1));
        assert_eq!(refused([Some((-1.0, 2.0, 3.0)), good]), Some(0));
        assert_eq!(refused([Some((1.0, f64::NAN, 3.0)), good]), Some(0));
        assert_eq!(refused([Some((1.0, 2.0, f64::INFINITY)), good]), Some(0));
    }

    proptest! {
        #[test]
        fn thinning_keeps_the_ends_and_stays_near(
            drops in prop::collection::vec((1u64..100, 0.0f64..1.0), 3..200),
            budget in 2usize..50,
        ) {
            let total: f64 = drops.iter().map(|(_, drop)| drop).sum::<f64>() + 1.0;
            let (mut size, mut ratio) = (0, 1.0);
            let points: Vec<_> = drops.iter().map(|(step, drop)| {
                size += step;
                ratio = (ratio - drop / total).max(0.0);
                (size, ratio)
            }).collect();
            let whole = curve(&points);
            let thin = whole.thinned(budget);
            prop_assert!(thin.points().len() <= budget);
            prop_assert_eq!(thin.points().first(), whole.points().first());
            prop_assert_eq!(thin.points().last(), whole.points().last());
            for pair in thin.points().windows(2) {
                prop_assert!(pair[0].size < pair[1].size);
            }
        }
    }
}
