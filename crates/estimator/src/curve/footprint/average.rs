//! What the average window touches, by its length, and the curve that follows from it.

use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount};

use super::FootprintPoint;
use crate::curve::aet::reuse_times::whole_pages;
use crate::parts::steps::Steps;

/// Lengths with their counts, in no order.
pub(super) type Lengths = Vec<(f64, u64)>;

/// How many lengths lie above one, and what they sum to.
#[derive(Debug, Clone)]
pub(super) struct Tail {
    /// Rising.
    pub(super) lengths: Vec<f64>,
    /// Of the lengths from each index on, and 0 behind the last.
    pub(super) counts: Vec<f64>,
    pub(super) sums: Vec<f64>,
}

impl Tail {
    pub(super) fn new(mut lengths: Lengths) -> Self {
        lengths.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let (mut counts, mut sums) = (vec![0.0], vec![0.0]);
        let (mut count, mut sum) = (0.0, 0.0);
        for &(length, times) in lengths.iter().rev() {
            count += times as f64;
            sum += length * times as f64;
            counts.push(count);
            sums.push(sum);
        }
        counts.reverse();
        sums.reverse();
        Self {
            lengths: lengths.into_iter().map(|(length, _)| length).collect(),
            counts,
            sums,
        }
    }

    /// Index of the first length above `length`.
    pub(super) fn above(&self, length: f64) -> usize {
        self.lengths.partition_point(|&other| other <= length)
    }

    pub(super) fn count_above(&self, length: f64) -> f64 {
        self.counts[self.above(length)]
    }

    /// Sum of how far lengths lie above `length`.
    pub(super) fn excess(&self, length: f64) -> f64 {
        let index = self.above(length);
        self.sums[index] - length * self.counts[index]
    }

    /// How many lie above, on the average over lengths within half of `width`.
    pub(super) fn mean_count_above(&self, length: f64, width: f64) -> f64 {
        if width == 0.0 {
            return self.count_above(length);
        }
        let from = (length - width / 2.0).max(0.0);
        let to = length + width / 2.0;
        (self.excess(from) - self.excess(to)) / (to - from)
    }
}

/// The average window for gaps of given lengths.
#[derive(Debug, Clone)]
pub(super) struct Windows {
    pub(super) gaps: Tail,
    pub(super) pages: f64,
    pub(super) ticks: f64,
}

impl Windows {
    /// Pages in the average window of so many ticks.
    pub(super) fn pages_in(&self, window: f64) -> f64 {
        let window = window.clamp(0.0, self.ticks);
        let windows = self.ticks - window + 1.0;
        // Whole numbers while they are below 2^53, so that only the division rounds.
        let pages = (self.pages * windows - self.gaps.excess(window)) / windows;
        pages.max(0.0)
    }

    /// The longest window whose average has at most so many pages.
    pub(super) fn window_of(&self, pages: f64) -> f64 {
        if pages >= self.pages_in(self.ticks) {
            return self.ticks;
        }
        // Of gaps all else being equal, the first whose window has more pages.
        let lengths = &self.gaps.lengths;
        let index = lengths.partition_point(|&length| self.pages_in(length) <= pages);
        let from = index.checked_sub(1).map_or(0.0, |before| lengths[before]);
        let to = lengths
            .get(index)
            .map_or(self.ticks, |&length| length.min(self.ticks));
        // Up to there, no gap ends: pages * windows is a straight line in the window.
        let missing = self.pages - pages;
        let slope = self.gaps.counts[index] - missing;
        let window = (self.gaps.sums[index] - missing * (self.ticks + 1.0)) / slope;
        if slope > 0.0 {
            window.clamp(from, to)
        } else {
            from
        }
    }
}

/// The average footprint by window length, and the curve derived from it.
#[derive(Debug, Clone)]
pub struct AverageWindow {
    /// All gaps as short as they can be: the most pages.
    pub(super) most: Windows,
    pub(super) middle: Windows,
    /// All gaps as long as they can be: the least pages.
    pub(super) least: Windows,
    /// Reuse times.
    pub(super) shortest: Tail,
    pub(super) middles: Tail,
    pub(super) longest: Tail,
    /// Ages of pages at the end: longest, middle, shortest.
    pub(super) lasts: [Tail; 3],
    /// Ticks that a reuse time is spread over: half of what it is known to.
    pub(super) width: f64,
    pub(super) unseen: f64,
    pub(super) is_exact: bool,
}

/// At most so many points on a curve from censored times, and the logarithm's few.
pub(super) const POINTS: u64 = 512;

impl AverageWindow {
    /// Pages touched by a window of so many ticks, on the average over all of them: fp.
    #[must_use]
    pub fn at(&self, window: f64) -> FootprintPoint {
        let pages = self.middle.pages_in(window);
        FootprintPoint {
            low: self.least.pages_in(window).min(pages),
            pages,
            high: self.most.pages_in(window).max(pages),
        }
    }

    /// The working set: pages touched in the last so many ticks before the end, \[Denning68\].
    #[must_use]
    pub fn working_set(&self, window: f64) -> FootprintPoint {
        let [low, pages, high] = [0, 1, 2].map(|bound| {
            let lasts: &Tail = &self.lasts[bound];
            self.middle.pages - lasts.count_above(window)
        });
        FootprintPoint { low, pages, high }
    }

    /// Returns the miss-ratio curve.
    ///
    /// With the number of `references` known, its unit is misses per reference. Without, it is misses per
    /// touch recorded: a page touched several times between two scans counts once, and the curve stands
    /// higher than that of the references.
    ///
    /// The band is that of the times' bounds. For times known to the tick it has no width.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] for fewer than one reference.
    pub fn curve(&self, references: Option<f64>) -> Result<MissRatioCurve, CurveError> {
        let touches = self.middle.pages + self.middles.counts[0];
        let references = references.unwrap_or(touches);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number of references; one beyond 2^64 is as good as 2^64"
        )]
        let whole = references.round() as u64;
        if whole == 0 {
            return Err(CurveError::Empty);
        }
        let ratio = |reuses: f64| ((self.middle.pages + reuses) / references).min(1.0);
        if self.is_exact {
            return self.exact_steps(ratio).into_curve(whole);
        }
        MissRatioCurve::new(self.bounded_points(ratio), whole)
    }

    pub(super) fn exact_steps(&self, ratio: impl Fn(f64) -> f64) -> Steps {
        let mut steps = Steps::new();
        for (&time, &longer) in self.longest.lengths.iter().zip(&self.longest.counts[1..]) {
            let size = whole_pages(self.middle.pages_in(time));
            steps.down_to(size, ratio(longer), 0.0);
        }
        steps.flat_to(whole_pages(self.middle.pages));
        steps
    }

    pub(super) fn bounded_points(&self, ratio: impl Fn(f64) -> f64) -> Vec<CurvePoint> {
        let pages = whole_pages(self.middle.pages);
        let mut points = vec![CurvePoint::exact(PageCount(0), 1.0)];
        let sizes = sizes_below(pages);
        let mut before = 1.0;
        for (&size, next) in sizes.iter().zip(sizes.iter().skip(1).chain([&pages])) {
            let shortest_window = self.most.window_of(size as f64);
            let high = if shortest_window < self.unseen {
                1.0
            } else {
                ratio(self.longest.count_above(shortest_window))
            };
            let longest_window = self.least.window_of((next - 1) as f64);
            let low = ratio(self.shortest.count_above(longest_window)).min(high);
            let window = self.middle.window_of(size as f64);
            let share = ratio(self.middles.mean_count_above(window, self.width));
            before = share.clamp(low, high).min(before);
            points.push(CurvePoint {
                size: PageCount(size),
                miss_ratio: before,
                low,
                high,
            });
        }
        // Where everything fits, only first touches miss.
        points.push(CurvePoint::exact(PageCount(pages), ratio(0.0).min(before)));
        points
    }
}

/// Sizes from 1 on below `pages`, rising: powers of two, and from [`POINTS`] evenly spaced ones on those.
pub(super) fn sizes_below(pages: u64) -> Vec<u64> {
    let step = pages.div_ceil(POINTS).max(1);
    let powers = (0..u64::BITS)
        .map(|bit| 1 << bit)
        .take_while(|&size| size < step);
    let even = (1..).map(|nth| nth * step).take_while(|&size| size < pages);
    powers.chain(even).filter(|&size| size < pages).collect()
}
