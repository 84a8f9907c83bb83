//! The number of pages touched by an average window, by its length, and the curve derived from it.

use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount, Whole as _};

use super::FootprintPoint;
use crate::curve::aet::reuse_times::whole_pages;
use crate::parts::steps::Steps;

/// Lengths with their counts, unordered.
pub(super) type Lengths = Vec<(f64, u64)>;

/// Number and sum of the lengths above a given one.
#[derive(Debug, Clone)]
pub(super) struct Tail {
    /// In ascending order.
    pub(super) lengths: Vec<f64>,
    /// Number of lengths from each index on; 0 after the last.
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

    /// Sum of the differences between `length` and all greater lengths.
    pub(super) fn excess(&self, length: f64) -> f64 {
        let index = self.above(length);
        self.sums[index] - length * self.counts[index]
    }

    /// Number of lengths above `length`, averaged over lengths within half of `width`.
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
    /// Pages in the average window of this many ticks.
    pub(super) fn pages_in(&self, window: f64) -> f64 {
        let window = window.clamp(0.0, self.ticks);
        let windows = self.ticks - window + 1.0;
        // Whole numbers while they are below 2^53, so that only the division is rounded.
        let pages = (self.pages * windows - self.gaps.excess(window)) / windows;
        pages.max(0.0)
    }

    /// The longest window whose average has at most this many pages.
    pub(super) fn window_of(&self, pages: f64) -> f64 {
        if pages >= self.pages_in(self.ticks) {
            return self.ticks;
        }
        // The first gap whose window has more pages.
        let lengths = &self.gaps.lengths;
        let index = lengths.partition_point(|&length| self.pages_in(length) <= pages);
        let from = index.checked_sub(1).map_or(0.0, |before| lengths[before]);
        let to = lengths
            .get(index)
            .map_or(self.ticks, |&length| length.min(self.ticks));
        // No gap ends before that, so pages * windows is linear in the window.
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
    /// With all gaps at their shortest, which gives the most pages.
    pub(super) most: Windows,
    pub(super) middle: Windows,
    /// With all gaps at their longest, which gives the fewest pages.
    pub(super) least: Windows,
    /// Reuse times.
    pub(super) shortest: Tail,
    pub(super) middles: Tail,
    pub(super) longest: Tail,
    /// Ages of pages at the end of the stream: longest, middle, shortest.
    pub(super) lasts: [Tail; 3],
    /// Ticks over which a reuse time is smoothed: half of its uncertainty.
    pub(super) width: f64,
    pub(super) is_exact: bool,
}

/// Maximum number of points on a curve from censored times, apart from the few powers of two.
pub(super) const POINTS: u64 = 512;

impl AverageWindow {
    /// Pages touched by a window of this many ticks, averaged over all such windows: fp.
    pub fn at(&self, window: f64) -> FootprintPoint {
        let pages = self.middle.pages_in(window);
        FootprintPoint {
            low: self.least.pages_in(window).min(pages),
            pages,
            high: self.most.pages_in(window).max(pages),
        }
    }

    /// The working set: pages touched in this many ticks before the end, \[Denning68\].
    pub fn working_set(&self, window: f64) -> FootprintPoint {
        let [low, pages, high] = [0, 1, 2].map(|bound| {
            let lasts: &Tail = &self.lasts[bound];
            self.middle.pages - lasts.count_above(window)
        });
        FootprintPoint { low, pages, high }
    }

    /// Returns the miss-ratio curve.
    ///
    /// With the number of `references` known, its unit is misses per reference. Otherwise it is misses per
    /// recorded touch: a page touched several times between two scans counts once, so the curve lies
    /// above that of the references.
    ///
    /// The band follows from the bounds of the times. For exactly known times it has no width.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] for fewer than one reference.
    pub fn curve(&self, references: Option<f64>) -> Result<MissRatioCurve, CurveError> {
        let touches = self.middle.pages + self.middles.counts[0];
        let references = references.unwrap_or(touches);
        let whole = u64::whole(references.round());
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
            let high = ratio(self.longest.count_above(shortest_window));
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
                misses: None,
            });
        }
        // Where everything fits, only first touches miss.
        points.push(CurvePoint::exact(PageCount(pages), ratio(0.0).min(before)));
        points
    }
}

/// Sizes from 1 up to below `pages`, rising: powers of two, and evenly spaced ones from [`POINTS`] on.
pub(super) fn sizes_below(pages: u64) -> Vec<u64> {
    let step = pages.div_ceil(POINTS).max(1);
    let powers = (0..u64::BITS)
        .map(|bit| 1 << bit)
        .take_while(|&size| size < step);
    let even = (1..).map(|nth| nth * step).take_while(|&size| size < pages);
    powers.chain(even).filter(|&size| size < pages).collect()
}
