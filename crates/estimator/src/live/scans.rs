//! The curve of a VM whose pages are periodically scanned instead of traced.
//!
//! For each page a window of scans gives the two scans between which it was touched: times known to within an interval.
//! The [`Footprint`] of such times is the mean number of pages fp(w) touched in an interval of length `w`. A memory of
//! fp(w) pages misses pages not touched for `w`, at the rate at which fp grows at `w`: the slope of fp, as a share of
//! its slope at 0, is the curve, per touch found. The slope is used instead of the count of long reuse times because a
//! window opens while the VM is already running: fp treats the time before a page's first touch correctly, where
//! counting would consider that touch a miss.
//!
//! **Time** is counted in touches found. The speed at which a VM accesses its pages varies with the load on the host; the
//! number of pages it touches before it reuses one does not.
//!
//! **Band.** What a window cannot know is when within an interval a page was touched. How much that matters is measured:
//! the same window is evaluated with its scans taken two by two, as if half as many had been made, and the difference of
//! the two curves, at the sizes of one interval around, is the error that the band admits. Where nothing was resolved,
//! below the pages touched in one interval and at the end of a window, the limits are those of all possible times.
//! The sampled pages are also divided into replicates by a hash of their neighbourhood; leaving out each in turn (the
//! jackknife) estimates the sampling error. Each window has another sample and observes another time: of their mean, the
//! sampling error is the root of the sum of squares, and at least what neighbouring windows differ by.
//!
//! **Quotients.** For the misses at two sizes the replicates' deviations are kept apart (`log_errors`), up to the largest size that
//! windows resolve. Beyond, the lower limit is 0 where no window shows a further fall.
//!
//! Source: \[Denning68\], \[DS78\] for the slope.
//! Cost: two map entries for each page touched in a window, and a footprint of ten histograms.
//! Not here: how touches are found (crate `plimsoll-trap`), averages over gaps (`footprint`).

use std::collections::HashMap;

use super::{LiveEstimator, LiveInput, LiveOptions, LiveWindow, Recent, from_hidden};
use crate::curve::footprint::{AverageWindow, Footprint, FootprintPoint};
use crate::parts::log_errors::{WEIGHTINGS, log_errors, log_share};
use plimsoll_flow::{
    CurvePoint, LogErrors, MissRatioCurve, MissesPerSecond, PageCount, PageNumber, SplitMix,
    Whole as _, mix,
};

/// Number of replicates into which the sample is divided.
const REPLICATES: usize = 8;
/// Number of adjacent pages that belong to the same replicate.
const NEIGHBOURS: u64 = 64;
/// Number of lengths at which fp is evaluated within one interval, and maximum number in all.
const LENGTHS_PER_INTERVAL: f64 = 8.0;
const LENGTHS_MAX: f64 = 1024.0;
/// Half-width of a 95 % band in standard errors: Student's quantile for as many replicates.
const DEVIATIONS: f64 = 2.365;
/// Error of the logarithm of the quotient of the misses at two sizes that scans themselves have, as a share of it: measured by
/// `./dev bench bands`.
const QUOTIENT_ERROR: f64 = 0.04;

/// A window of scans of one sample of pages.
#[derive(Debug, Default)]
struct ScanWindow {
    whole: Replicate,
    replicates: [Replicate; REPLICATES],
    /// The same with scans taken two by two.
    pairs: Footprint,
    last: LastTouches,
    last_of_pairs: LastTouches,
    /// The pages found by the first scan of an open pair, and the touches before it.
    pair: Vec<PageNumber>,
    pair_from: u64,
    /// Number of scans that found touches.
    scans: u64,
    /// Number of touches so far.
    end: u64,
}

/// The scans between which each page was last touched, as numbers of touches before them.
type LastTouches = HashMap<PageNumber, (u64, u64)>;

/// Times and touches of a replicate.
#[derive(Debug, Default, Clone)]
struct Replicate {
    gaps: Footprint,
    touches: u64,
}

impl ScanWindow {
    /// Processes the pages touched since the previous scan, each listed once.
    fn observe(&mut self, touched: &[PageNumber]) {
        if touched.is_empty() {
            return;
        }
        let (from, to) = (self.end, self.end + touched.len() as u64);
        for &page in touched {
            let before = self.last.insert(page, (from, to));
            for part in [&mut self.whole, &mut self.replicates[replicate_of(page)]] {
                part.touches += 1;
                record(&mut part.gaps, before, from, to);
            }
        }
        self.pair.extend(touched);
        self.end = to;
        self.scans += 1;
        if self.scans.is_multiple_of(2) {
            self.close_pair();
        }
    }

    /// Records the pages that one of the last two scans found.
    fn close_pair(&mut self) {
        self.pair.sort_unstable();
        self.pair.dedup();
        let (from, to) = (self.pair_from, self.end);
        for page in self.pair.drain(..) {
            let before = self.last_of_pairs.insert(page, (from, to));
            record(&mut self.pairs, before, from, to);
        }
        self.pair_from = to;
    }

    /// By replicate: the factor from what is found in the others to all. How many of the sampled pages a replicate has is
    /// known and no error of the whole; how many of them are touched is one.
    fn growths(&self, tracked: u64) -> [f64; REPLICATES] {
        let mut touched = [0.0; REPLICATES];
        for &page in self.last.keys() {
            touched[replicate_of(page)] += 1.0;
        }
        let all = self.last.len() as f64;
        let chance = match tracked {
            0 => 1.0,
            _ => (1.0 - all / tracked as f64).max(0.0).sqrt(),
        };
        let mean = all / REPLICATES as f64;
        touched.map(|touched| {
            let left_out = mean + (1.0 - chance) * (touched - mean);
            all / (all - left_out).max(1.0)
        })
    }

    /// Ends the window and returns its curve; `None` if nothing was touched.
    fn finish(&mut self, observed: &LiveWindow) -> Option<WindowCurve> {
        let (scale, seconds) = (observed.scale, observed.observed_seconds);
        let limits = observed.rate_limits();
        let mut window = std::mem::take(self);
        window.close_pair();
        let end = window.end;
        let growths = window.growths(observed.tracked);
        for (&page, &(from, to)) in &window.last {
            for part in [
                &mut window.whole,
                &mut window.replicates[replicate_of(page)],
            ] {
                let recorded = part.gaps.record_last(end - to, end - from);
                recorded.ok()?;
            }
        }
        for &(from, to) in window.last_of_pairs.values() {
            window.pairs.record_last(end - to, end - from).ok()?;
        }
        let whole = window.whole.gaps.over(end).ok()?;
        let pairs = window.pairs.over(end).ok()?;
        let end = end as f64;
        let interval = end / window.scans.max(1) as f64;
        let step = (interval / LENGTHS_PER_INTERVAL).max(end / LENGTHS_MAX);
        let shape = Shape {
            lengths: (0..)
                .map(|index| f64::from(index) * step)
                .take_while(|&length| length < end)
                .chain([end])
                .collect(),
            half: interval / 2.0,
            scale: scale as f64,
        };
        let touches = window.whole.touches as f64;
        let middle = shape.of(touches / end, &|length| whole.at(length).pages);
        let coarse = Shape {
            lengths: shape.lengths.clone(),
            half: interval,
            scale: scale as f64,
        };
        let coarse = coarse.of(touches / end, &|length| pairs.at(length).pages);
        let bounds = Bounds::new(&shape, &whole, touches / end, interval);
        let replicates = window.replicates.iter().zip(growths).map(|(part, grow)| {
            let average = part.gaps.over(window.end).ok();
            let rate = (window.whole.touches - part.touches) as f64 / end;
            let without = |length: f64| {
                let left_out = average.as_ref().map_or(0.0, |part| part.at(length).pages);
                (whole.at(length).pages - left_out) * grow
            };
            // Fewer touches, but of pages that were scaled up to the same number.
            shape.of(rate * grow, &without)
        });
        let replicates: Vec<Steps> = replicates.collect();
        // Touches found per second, of all pages; and by the touches outside each replicate.
        let rate = |touches: f64| touches * scale as f64 / seconds;
        let without: [f64; REPLICATES] = std::array::from_fn(|at| {
            let others = (window.whole.touches - window.replicates[at].touches) as f64;
            rate(others * growths[at])
        });
        let ones = [1.0; REPLICATES];

        let sizes = middle.0.iter().map(|&(size, _)| size);
        let ratio_deviations = sizes.map(|size| deviations(&replicates, &ones, size));
        let ratio_deviations: Vec<_> = ratio_deviations.collect();
        let steps = middle.0.iter().zip(&ratio_deviations);
        let steps = steps.map(|(&(size, miss_ratio), deviations_here)| {
            let difference = coarse.at(size) - miss_ratio;
            let [low, high] = bounds.at(size).unwrap_or([miss_ratio; 2]);
            let ratio = Estimate {
                expected: miss_ratio,
                low: low.min(miss_ratio),
                high: high.max(miss_ratio),
                difference,
                variance: variance(deviations_here),
            };
            let scaled = ratio.scaled(rate(touches));
            let misses = Estimate {
                low: scaled.low * limits[0],
                high: scaled.high * limits[1],
                variance: variance(&deviations(&replicates, &without, size)),
                ..scaled
            };
            (size, [ratio, misses])
        });
        Some(WindowCurve {
            steps: steps.collect(),
            deviations: ratio_deviations,
            interval: whole_pages(whole.at(interval).pages * shape.scale),
            touches: window.whole.touches,
            rate: (seconds > 0.0).then(|| rate(touches)),
        })
    }
}

/// A value of a window's curve, and what is known of its error.
#[derive(Debug, Clone, Copy, Default)]
struct Estimate {
    expected: f64,
    /// Limits of what was not resolved.
    low: f64,
    high: f64,
    /// By how much it differs with half as many scans.
    difference: f64,
    /// Of the sample.
    variance: f64,
}

impl Estimate {
    fn scaled(self, factor: f64) -> Self {
        Self {
            expected: self.expected * factor,
            low: self.low * factor,
            high: self.high * factor,
            difference: self.difference * factor,
            variance: self.variance * factor * factor,
        }
    }

    /// Whether it is known to within the error of the sample.
    fn is_resolved(&self) -> bool {
        (self.high - self.expected).max(self.expected - self.low) <= 1e-9 + self.variance.sqrt()
    }

    /// Adds that of an independent sample.
    fn add(&mut self, other: Self) {
        self.expected += other.expected;
        self.low += other.low;
        self.high += other.high;
        self.difference += other.difference;
        self.variance += other.variance;
    }

    /// The limits of the band, with the largest `difference` of the sizes around.
    fn band(&self, difference: f64) -> [f64; 2] {
        let half_width = difference + DEVIATIONS * self.variance.sqrt();
        [
            self.low.min(self.expected - half_width).max(0.0),
            self.high.max(self.expected + half_width),
        ]
    }
}

/// The largest difference at sizes up to `near` pages away from each.
fn differences_near(values: &[(u64, f64)], near: u64) -> Vec<f64> {
    let (mut from, mut to) = (0, 0);
    let at = values.iter().map(|&(size, _)| {
        while values[from].0.saturating_add(near) < size {
            from += 1;
        }
        while values
            .get(to)
            .is_some_and(|other| other.0 <= size.saturating_add(near))
        {
            to += 1;
        }
        let around = values[from..to].iter();
        around.fold(0.0_f64, |largest, other| largest.max(other.1.abs()))
    });
    at.collect()
}

/// The curve of a window: sizes, rising, and the ratio and the misses per second from each on.
#[derive(Debug, Clone)]
struct WindowCurve {
    steps: Vec<(u64, [Estimate; 2])>,
    /// By step: the deviations of the ratio.
    deviations: Vec<[f32; REPLICATES]>,
    /// Pages touched in one interval.
    interval: u64,
    touches: u64,
    /// Touches found per second, if the time is known.
    rate: Option<f64>,
}

impl WindowCurve {
    /// The ratio and the misses per second at a size, and the deviations of the ratio.
    fn at(&self, size: u64) -> ([Estimate; 2], &[f32; REPLICATES]) {
        let after = self.steps.partition_point(|&(other, _)| other <= size);
        let at = after.saturating_sub(1);
        (self.steps[at].1, &self.deviations[at])
    }

    fn curve(&self) -> Option<MissRatioCurve> {
        let parts = self.deviations.iter().map(|own| {
            let mut parts = [0.0; WEIGHTINGS];
            for (part, &deviation) in parts.iter_mut().zip(own) {
                *part = f64::from(deviation);
            }
            parts
        });
        points_of(
            &self.steps,
            parts,
            self.interval,
            self.rate.is_some(),
            self.touches,
        )
    }
}

/// The curve of steps, with misses per second if `is_rated`; `None` if nothing was touched.
fn points_of(
    steps: &[(u64, [Estimate; 2])],
    deviations: impl Iterator<Item = [f64; WEIGHTINGS]>,
    interval: u64,
    is_rated: bool,
    touches: u64,
) -> Option<MissRatioCurve> {
    if touches == 0 {
        return None;
    }
    let differences = [0, 1].map(|kind: usize| {
        let values = steps
            .iter()
            .map(|(size, both)| (*size, both[kind].difference));
        differences_near(&values.collect::<Vec<_>>(), interval)
    });
    // They never rise, apart from rounding errors.
    let mut before = [1.0_f64, f64::INFINITY];
    let last = steps.last()?.1.map(|both| both.expected);
    let points = steps.iter().enumerate().map(|(at, &(size, both))| {
        let [ratio, misses] = [0, 1].map(|kind: usize| {
            let [low, high] = both[kind].band(differences[kind][at]);
            before[kind] = before[kind].min(both[kind].expected);
            let expected = before[kind];
            // Where the windows end, nothing is known of what remains.
            let low = if expected > last[kind] { low } else { 0.0 };
            MissesPerSecond {
                expected,
                low: low.min(expected),
                high: high.max(expected),
            }
        });
        CurvePoint {
            size: PageCount(size),
            miss_ratio: ratio.expected,
            low: ratio.low,
            high: ratio.high.min(1.0),
            misses: is_rated.then_some(misses),
        }
    });
    let curve = MissRatioCurve::new(points.collect(), touches).ok()?;
    let known = steps
        .iter()
        .rposition(|(_, [ratio, _])| ratio.is_resolved() && ratio.expected > last[0]);
    let errors = steps.iter().zip(deviations).map(|((_, both), parts)| {
        let Estimate {
            expected,
            high,
            difference,
            ..
        } = both[0];
        let others = parts.iter().map(|part| expected + part);
        let more = difference.abs().max(high - expected);
        let resolution = log_share(expected + more) - log_share(expected);
        let model = QUOTIENT_ERROR * log_share(expected) - resolution;
        log_errors(expected, others, DEVIATIONS, model)
    });
    let errors: Vec<LogErrors> = errors.take(known.map_or(0, |last| last + 1)).collect();
    Some(curve.with_log_errors(errors))
}

/// Records a touch between two scans, and the time since the one before.
fn record(gaps: &mut Footprint, before: Option<(u64, u64)>, from: u64, to: u64) {
    let recorded = match before {
        None => gaps.record_first(from, to),
        Some((from_before, to_before)) => gaps.record(from - to_before, to - from_before - 1),
    };
    recorded.expect("scans that found something are a tick long, or two together");
}

fn replicate_of(page: PageNumber) -> usize {
    let hash = (page.0 / NEIGHBOURS).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
    usize::try_from(hash).map_or(0, |hash| hash % REPLICATES)
}

/// By replicate: the deviation of the miss ratio at a size times a rate without it from the mean, such that the sum of the squares is
/// the variance of the whole (the jackknife).
fn deviations(replicates: &[Steps], rates: &[f64; REPLICATES], size: u64) -> [f32; REPLICATES] {
    let mut values = *rates;
    for (value, part) in values.iter_mut().zip(replicates) {
        *value *= part.at(size);
    }
    let count = REPLICATES as f64;
    let mean = values.iter().sum::<f64>() / count;
    let factor = ((count - 1.0) / count).sqrt();
    #[expect(clippy::cast_possible_truncation, reason = "an error needs no more")]
    let deviation = |value: f64| ((value - mean) * factor) as f32;
    values.map(deviation)
}

fn variance(deviations: &[f32; REPLICATES]) -> f64 {
    deviations.iter().map(|&part| f64::from(part).powi(2)).sum()
}

/// Sizes, rising, and the miss ratio from each on.
struct Steps(Vec<(u64, f64)>);

impl Steps {
    fn at(&self, size: u64) -> f64 {
        let after = self.0.partition_point(|&(other, _)| other <= size);
        after.checked_sub(1).map_or(1.0, |index| self.0[index].1)
    }
}

/// The lengths at which fp is evaluated, and the factor from fp to sizes.
struct Shape {
    lengths: Vec<f64>,
    /// Half the length of the interval over which a slope is computed.
    half: f64,
    scale: f64,
}

impl Shape {
    /// The slope at a length, as a share of `rate`.
    fn slope(&self, rate: f64, pages_in: &dyn Fn(f64) -> f64, length: f64) -> f64 {
        let end = self.lengths.last().copied().unwrap_or_default();
        let (from, to) = ((length - self.half).max(0.0), (length + self.half).min(end));
        let touches = (to - from) * rate;
        // All touches may be in one replicate: without it nothing is touched, and nothing is missed.
        if touches > 0.0 {
            (pages_in(to) - pages_in(from)) / touches
        } else {
            0.0
        }
    }

    fn of(&self, rate: f64, pages_in: &dyn Fn(f64) -> f64) -> Steps {
        let mut steps: Vec<(u64, f64)> = vec![(0, 1.0)];
        for &length in &self.lengths {
            let (size_before, before) = steps.last().copied().unwrap_or_default();
            let size = whole_pages(pages_in(length) * self.scale).max(size_before);
            let ratio = self.slope(rate, pages_in, length).clamp(0.0, before);
            // Of lengths with the same pages the longest is used.
            if size == size_before {
                steps.pop();
            }
            steps.push((size, ratio));
        }
        Steps(steps)
    }
}

/// Rounds up, because a memory of that many whole pages is needed.
fn whole_pages(pages: f64) -> u64 {
    u64::whole((pages - 1e-6).ceil())
}

/// Bounds of the curve from times that are known to within an interval.
struct Bounds {
    /// By length: the maximum and minimum number of pages touched, and the slopes of both.
    most: Vec<f64>,
    least: Vec<f64>,
    slopes_of_most: Vec<f64>,
    slopes_of_least: Vec<f64>,
    /// Number of lengths within one interval, and of those that are longer than the window but for two.
    unseen: usize,
    seen: usize,
}

impl Bounds {
    fn new(shape: &Shape, whole: &AverageWindow, rate: f64, interval: f64) -> Self {
        let end = shape.lengths.last().copied().unwrap_or_default();
        let pages = |bound: fn(FootprintPoint) -> f64| move |length| bound(whole.at(length));
        let (most, least) = (pages(|point| point.high), pages(|point| point.low));
        let sizes = |pages_in: &dyn Fn(f64) -> f64| {
            let mut largest = 0.0_f64;
            let rising = shape.lengths.iter().map(|&length| {
                largest = largest.max(pages_in(length) * shape.scale);
                largest
            });
            rising.collect()
        };
        let slopes = |pages_in: &dyn Fn(f64) -> f64| {
            let slope = |&length: &f64| shape.slope(rate, pages_in, length);
            shape.lengths.iter().map(slope).collect()
        };
        Self {
            most: sizes(&most),
            least: sizes(&least),
            slopes_of_most: slopes(&most),
            slopes_of_least: slopes(&least),
            unseen: shape.lengths.partition_point(|&length| length < interval),
            seen: shape
                .lengths
                .partition_point(|&length| length < end - 2.0 * interval),
        }
    }

    /// The minimum and maximum miss ratio possible at a size that is not resolved.
    fn at(&self, size: u64) -> Option<[f64; 2]> {
        let longest = |pages: &[f64]| pages.partition_point(|&pages| pages <= size as f64);
        let shortest = longest(&self.most).saturating_sub(1);
        let high = if shortest < self.unseen {
            1.0
        } else {
            self.slopes_of_least[shortest]
        };
        let last = longest(&self.least);
        let low = self.slopes_of_most[last.min(self.least.len() - 1)];
        let is_resolved = shortest >= self.unseen && last < self.seen;
        (!is_resolved).then_some([low.max(0.0), high.max(0.0)])
    }
}

/// Curves of windows, averaged: misses per second by the time that each represents, ratios by the references in it.
#[derive(Debug, Clone)]
struct MeanCurve {
    sizes: Vec<u64>,
    /// By size: ratio and misses per second, each multiplied by the window's weight.
    sums: Vec<[Sum; 2]>,
    /// By size: the weighted deviations of the ratio. Those of different windows are independent, so that each window has
    /// every second place, with random signs.
    deviations: Vec<[f64; WEIGHTINGS]>,
    /// Seconds times references per second, or seconds where these are unknown; and seconds.
    weights: [f64; 2],
    /// Number of windows in which anything was touched.
    windows: u32,
    /// Whether all of these had misses per second.
    is_rated: bool,
    touches: u64,
    /// The largest size below which one of them has no information.
    hidden: PageCount,
    /// The largest number of pages touched in an interval.
    interval: u64,
}

/// The sum of the windows' estimates.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    of: Estimate,
    /// The last window's, and the sum of the squared differences between neighbours.
    last: f64,
    squares: f64,
}

/// Sizes at which curves are averaged: all up to this one, then steps of a fraction of the size.
const SIZES_SINGLE: u64 = 256;

impl MeanCurve {
    /// Creates an empty average for a VM of `ram` pages.
    fn new(ram: PageCount) -> Self {
        let next = |size: &u64| Some(size + (size / SIZES_SINGLE).max(1));
        let sizes: Vec<_> = std::iter::successors(Some(0), next)
            .take_while(|&size| size <= ram.0)
            .collect();
        Self {
            sums: vec![[Sum::default(); 2]; sizes.len()],
            deviations: vec![[0.0; WEIGHTINGS]; sizes.len()],
            sizes,
            weights: [0.0; 2],
            windows: 0,
            is_rated: true,
            touches: 0,
            hidden: PageCount(0),
            interval: 0,
        }
    }

    /// Adds the curve of a window that represents `seconds`; `None` for one in which nothing was touched.
    fn add(&mut self, curve: Option<&WindowCurve>, hidden: PageCount, seconds: f64) {
        self.weights[1] += seconds;
        let Some(curve) = curve else {
            return;
        };
        self.is_rated &= curve.rate.is_some();
        let weights = [seconds * curve.rate.unwrap_or(1.0), seconds];
        let mut random = SplitMix(mix(u64::from(self.windows)));
        let odd = usize::from(!self.windows.is_multiple_of(2));
        let places: [(usize, f64); REPLICATES] = std::array::from_fn(|replicate| {
            let sign = if random.unit() < 0.5 { -1.0 } else { 1.0 };
            (2 * replicate + odd, sign * weights[0])
        });
        let sums = self.sums.iter_mut().zip(&mut self.deviations);
        for (&size, (sums, deviations)) in self.sizes.iter().zip(sums) {
            let (both, own) = curve.at(size);
            for (&(place, factor), &deviation) in places.iter().zip(own) {
                deviations[place] += factor * f64::from(deviation);
            }
            let both = sums.iter_mut().zip(both).zip(weights);
            for ((sum, estimate), weight) in both {
                let weighted = estimate.scaled(weight);
                if self.windows > 0 {
                    sum.squares += (weighted.expected - sum.last).powi(2);
                }
                sum.last = weighted.expected;
                sum.of.add(weighted);
            }
        }
        self.weights[0] += weights[0];
        self.windows += 1;
        self.hidden = self.hidden.max(hidden);
        self.interval = self.interval.max(curve.interval);
        self.touches = self.touches.saturating_add(curve.touches);
    }

    /// The mean curve; `None` without curves.
    fn curve(&self) -> Option<MissRatioCurve> {
        let windows = f64::from(self.windows);
        let steps = self.sizes.iter().zip(&self.sums).map(|(&size, sums)| {
            let of = |kind: usize| {
                let Sum { of, squares, .. } = sums[kind];
                // Of n independent windows, from the n - 1 differences of two.
                let between = squares / 2.0 * windows / (windows - 1.0).max(1.0);
                let variance = of.variance.max(between);
                Estimate { variance, ..of }.scaled(1.0 / self.weights[kind])
            };
            (size, [of(0), of(1)])
        });
        let steps: Vec<_> = steps.collect();
        let weight = self.weights[0];
        let deviations = self
            .deviations
            .iter()
            .map(|parts| parts.map(|part| part / weight));
        let curve = points_of(
            &steps,
            deviations,
            self.interval,
            self.is_rated,
            self.touches,
        )?;
        Some(from_hidden(curve, self.hidden))
    }
}

/// The live estimator of scans.
#[derive(Debug)]
pub(super) struct ScanCurve {
    window: ScanWindow,
    pooled: MeanCurve,
    ram: PageCount,
    recent: Recent<(Option<WindowCurve>, PageCount)>,
}

impl ScanCurve {
    pub(super) fn new(options: &LiveOptions) -> Self {
        Self {
            window: ScanWindow::default(),
            pooled: MeanCurve::new(options.ram),
            ram: options.ram,
            recent: Recent::new(options.reach),
        }
    }
}

impl LiveEstimator for ScanCurve {
    fn observe(&mut self, input: &LiveInput<'_>) {
        if let LiveInput::Scan(pages) = input {
            self.window.observe(pages);
        }
    }

    fn close_window(&mut self, window: &LiveWindow) -> Option<MissRatioCurve> {
        let seconds = window.seconds;
        let curve = self.window.finish(window);
        self.pooled.add(curve.as_ref(), window.hidden, seconds);
        let whole = curve.as_ref().and_then(WindowCurve::curve);
        self.recent.push(|| (curve, window.hidden), seconds);
        whole.map(|curve| from_hidden(curve, window.hidden))
    }

    fn discard_window(&mut self) {
        self.window = ScanWindow::default();
    }

    fn curve(&self) -> Option<MissRatioCurve> {
        self.pooled.curve()
    }

    fn recent_curve(&self) -> Option<MissRatioCurve> {
        let mut mean = MeanCurve::new(self.ram);
        for ((curve, hidden), seconds) in self.recent.windows() {
            mean.add(curve.as_ref(), *hidden, seconds);
        }
        mean.curve()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(scale: u64, observed_seconds: f64) -> LiveWindow {
        LiveWindow {
            scale,
            observed_seconds,
            ..LiveWindow::default()
        }
    }

    /// Scans of a stream with this number of touches per interval.
    fn scanned(pages: impl Iterator<Item = u64>, touches: usize, scans: u32) -> ScanWindow {
        let pages: Vec<u64> = pages.take(touches * scans as usize).collect();
        let mut window = ScanWindow::default();
        for pages in pages.chunks(touches) {
            let mut touched: Vec<_> = pages.iter().copied().map(PageNumber).collect();
            touched.sort_unstable();
            touched.dedup();
            window.observe(&touched);
        }
        window
    }

    fn curve_of(window: &mut ScanWindow, scale: u64) -> MissRatioCurve {
        window
            .finish(&observed(scale, 1.0))
            .unwrap()
            .curve()
            .unwrap()
    }

    fn random(pages: u64) -> impl Iterator<Item = u64> {
        let mut state = 7_u64;
        std::iter::repeat_with(move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % pages
        })
    }

    #[test]
    fn a_vm_that_touches_one_page_has_a_curve() {
        let mut window = scanned(std::iter::repeat(7), 1, 20);
        let curve = curve_of(&mut window, 16);
        assert!(curve.miss_ratio(PageCount(16)) < 0.1, "{curve:?}");
    }

    #[test]
    fn a_loop_falls_at_its_size_though_every_page_was_met_a_first_time() {
        // Scan intervals that divide the loop's length, and ones that do not.
        for touches in [100, 90] {
            let curve = curve_of(&mut scanned((0..1000).cycle(), touches, 64), 16);
            let at = |share: f64| curve.at(PageCount(whole_pages(16_000.0 * share)));
            assert!(at(0.8).miss_ratio > 0.99, "{:?}", at(0.8));
            assert!(at(1.0).miss_ratio < 0.02, "{:?}", at(1.0));
            // The position of the cliff is known to within three intervals, plus the sampling error.
            assert!(at(0.65).low > 0.9, "{:?}", at(0.65));
            assert!(at(1.0).low < 0.02, "{:?}", at(1.0));
            let set = curve.size_for(0.05).unwrap().0;
            assert!((15_200..=16_000).contains(&set), "{set}");
        }
    }

    #[test]
    fn a_loop_that_is_gone_through_faster_and_slower_falls_at_its_size() {
        let mut pages = (0..1000).cycle();
        let mut window = ScanWindow::default();
        for scan in 0..200 {
            // Between 0 and 240 pages.
            let count = scan * 37 % 241;
            let touched: Vec<_> = pages.by_ref().take(count).map(PageNumber).collect();
            window.observe(&touched);
        }
        let curve = curve_of(&mut window, 1);
        let at = |size| curve.miss_ratio(PageCount(size));
        assert!(
            at(750) > 0.95 && at(1000) < 0.03,
            "{} {}",
            at(750),
            at(1000)
        );
    }

    #[test]
    fn a_loop_shorter_than_an_interval_is_known_to_fit_and_no_more() {
        let curve = curve_of(&mut scanned((0..100).cycle(), 450, 20), 1);
        assert_eq!(curve.size_for(0.05), Some(PageCount(100)));
        let below = curve.at(PageCount(60));
        assert_eq!(below.high, 1.0);
        assert!(below.low < 0.01, "{below:?}");
    }

    #[test]
    fn the_band_of_even_references_holds_the_closed_form() {
        for (touches, scans) in [(125, 64), (500, 32), (60, 100)] {
            let curve = curve_of(&mut scanned(random(1000), touches, scans), 1);
            // Per touch found; an interval has fewer touches than references.
            let seen = 1000.0 * (1.0 - (-(touches as f64) / 1000.0).exp());
            let truth = |size: u64| (1.0 - size as f64 / 1000.0) * touches as f64 / seen;
            let (mut held, mut error) = (0, 0.0);
            let sizes: Vec<u64> = (touches as u64..950).step_by(5).collect();
            for &size in &sizes {
                let point = curve.at(PageCount(size));
                held += usize::from(point.low <= truth(size) && truth(size) <= point.high);
                error += (point.miss_ratio - truth(size)).abs();
            }
            let (held, error) = (held as f64 / sizes.len() as f64, error / sizes.len() as f64);
            assert!(error < 0.03, "{touches} {scans}: {error}");
            assert!(held >= 0.9, "{touches} {scans}: {held}");
        }
    }

    #[test]
    fn nothing_touched_is_no_curve() {
        assert!(ScanWindow::default().finish(&observed(1, 1.0)).is_none());
        let mut idle = scanned(std::iter::empty(), 10, 5);
        assert!(idle.finish(&observed(1, 1.0)).is_none());
    }

    #[test]
    fn windows_are_averaged_by_their_time() {
        let mut mean = MeanCurve::new(PageCount(4000));
        assert!(mean.curve().is_none());
        for (pages, seconds) in [(1000, 3.0), (3000, 1.0)] {
            let mut window = scanned((0..pages).cycle(), 100, 100);
            mean.add(
                window.finish(&observed(1, 0.0)).as_ref(),
                PageCount(0),
                seconds,
            );
        }
        let curve = mean.curve().unwrap();
        assert!((curve.miss_ratio(PageCount(500)) - 1.0).abs() < 0.01);
        assert!((curve.miss_ratio(PageCount(2000)) - 0.25).abs() < 0.01);
        assert!(curve.miss_ratio(PageCount(3100)) < 0.01);
    }
}
