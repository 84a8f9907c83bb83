//! References by the size from which they hit, where that is only known to lie between two sizes.
//!
//! Three sums are accumulated: the estimate, in which the hit probability of a reference between two sizes
//! rises linearly from the lower to the upper one; and two limits, in which
//! it hits from the lower size on, or only from the upper one on. Weights may be negative, because they are
//! differences of counts with errors; only their sums are meaningful.
//!
//! Sizes are stored to 1/1024 (`histogram`); 32 bytes for each possible size.

use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount, Whole as _};

use crate::parts::histogram::{bucket_of, floor_of};

#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    /// Hits from this size on.
    jump: f64,
    /// Change of the hits gained per page from this size on.
    slope: f64,
    /// Hits from this size on, at the limit of fewest misses.
    early: f64,
    /// Hits from this size on, at the limit of most misses.
    late: f64,
}

/// Standard deviations covered by the band: all but one in eighty of a normal distribution.
const DEVIATIONS: f64 = 2.5;

/// Relative errors of counts and of values derived from them.
#[derive(Debug, Clone, Copy)]
pub(super) struct CountError {
    /// Relative root-mean-square error of one count.
    deviation: f64,
    /// Distinct pages of the whole stream.
    distinct: f64,
}

impl CountError {
    /// The errors of counters with `2^precision` registers, for a stream with this number of distinct pages.
    pub(super) fn new(precision: u32, distinct: u64) -> Self {
        Self {
            deviation: 1.04 / f64::from(1_u32 << precision).sqrt(),
            distinct: distinct.max(1) as f64,
        }
    }

    #[cfg(test)]
    pub(super) const NONE: Self = Self {
        deviation: 0.0,
        distinct: 1.0,
    };

    fn of_sizes(&self) -> f64 {
        DEVIATIONS * self.deviation
    }

    /// A counter's rise has the relative error of its count, and an additional error in the number of registers it
    /// changes. In a whole stream, counters of `size` pages change about `m * distinct / size` registers for the first
    /// time, which is as precise as a count of that many events.
    fn of_misses(&self, size: u64) -> f64 {
        let share = (size as f64 / self.distinct).min(1.0);
        DEVIATIONS * self.deviation * (1.0 + 2.0 * share).sqrt()
    }
}

/// References by the size from which they hit.
#[derive(Debug, Clone, Default)]
pub(super) struct Sizes {
    buckets: Vec<Bucket>,
}

impl Sizes {
    fn bucket(&mut self, index: usize) -> &mut Bucket {
        if index >= self.buckets.len() {
            self.buckets.resize(index + 1, Bucket::default());
        }
        &mut self.buckets[index]
    }

    /// Adds `mass` references that hit from `size` on.
    pub(super) fn exactly(&mut self, size: u64, mass: f64) {
        self.bucket(bucket_of(size)).jump += mass;
        self.bounds(size, size, mass);
    }

    /// Adds `mass` references that hit from a size above `low` and at most `high` on, uniformly distributed.
    pub(super) fn between(&mut self, low: u64, high: u64, mass: f64) {
        let (first, last) = (bucket_of(low), bucket_of(high));
        if first == last {
            self.bucket(last).jump += mass;
            return;
        }
        let slope = mass / (floor_of(last) - floor_of(first)) as f64;
        self.bucket(last).slope -= slope;
        self.bucket(first).slope += slope;
    }

    /// Adds `mass` references that hit from no size below `early` on, and from `late` on at the latest.
    pub(super) fn bounds(&mut self, early: u64, late: u64, mass: f64) {
        self.early(early, mass);
        self.late(late, mass);
    }

    /// Adds `mass` references that may hit from `size` on.
    pub(super) fn early(&mut self, size: u64, mass: f64) {
        self.bucket(bucket_of(size)).early += mass;
    }

    /// Adds `mass` references that certainly hit from `size` on.
    pub(super) fn late(&mut self, size: u64, mass: f64) {
        let bucket = bucket_of(size);
        let above = usize::from(floor_of(bucket) < size);
        self.bucket(bucket + above).late += mass;
    }

    /// Returns the miss ratio of a stream of `references`. The band lies between the limits, widened by
    /// the errors of the counts.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] without references.
    pub(super) fn curve(
        &self,
        references: u64,
        error: CountError,
    ) -> Result<MissRatioCurve, CurveError> {
        let all = references as f64;
        let mut sums = Vec::with_capacity(self.buckets.len());
        let (mut hits, mut slope, mut early, mut late) = (0.0, 0.0, 0.0, 0.0);
        let mut size_before = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            let size = floor_of(index);
            hits += slope * (size - size_before) as f64 + bucket.jump;
            slope += bucket.slope;
            early += bucket.early;
            late += bucket.late;
            sums.push((hits, early, late));
            size_before = size;
        }
        let at = |size: f64| {
            let index = bucket_of(u64::whole(size)).min(sums.len() - 1);
            sums[index]
        };
        let mut points = vec![CurvePoint::exact(PageCount(0), 1.0)];
        let mut ratio = 1.0_f64;
        for (index, &(hits, ..)) in sums.iter().enumerate().skip(1) {
            let size = floor_of(index);
            ratio = ratio.min((1.0 - hits / all).max(0.0));
            let largest = floor_of(index + 1) - 1;
            let (_, early, _) = at(largest as f64 * (1.0 + error.of_sizes()));
            let (.., late) = at(size as f64 * (1.0 - error.of_sizes()));
            let of_misses = error.of_misses(size);
            let low = (1.0 - early / all) * (1.0 - of_misses);
            let high = (1.0 - late / all) * (1.0 + of_misses);
            let point = CurvePoint {
                size: PageCount(size),
                miss_ratio: ratio,
                low: low.clamp(0.0, ratio),
                high: high.clamp(ratio, 1.0),
                misses: None,
            };
            let last = points[points.len() - 1];
            if (point.miss_ratio, point.low, point.high) != (last.miss_ratio, last.low, last.high) {
                points.push(point);
            }
        }
        MissRatioCurve::new(points, references)
    }

    /// Bytes of heap allocated.
    pub(super) fn memory_bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }
}
