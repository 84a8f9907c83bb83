//! The curve of a VM from sampled pages that are each observed until their first touch.
//!
//! Pages are drawn evenly at even times. The time from there to the next touch of the page has a distribution F, and the
//! mean number of pages touched in an interval of length t is N F(t) for N pages: the footprint, which is concave. A
//! memory of N F(t) pages misses the pages not touched for t, at the rate at which the footprint grows at t: its slope.
//! `docs/first-touch.md` derives this, with its errors, and compares estimates of F.
//!
//! **Rolling.** Samples count if they were armed within the last [`LiveOptions::reach`], or [`WINDOW`], and since the
//! last change of phase (`change`). A sample that is still untouched is censored: its time exceeds the time for which it
//! has waited; so is one of which the end of the wait is unknown because its window is discarded. Every curve is that of
//! all samples that count, so that a window, the newest windows and all windows have the same one.
//!
//! **Time** is the VM's CPU time, at an even speed (`speed`); misses a second are in wall time.
//!
//! **Resolution.** A ratio is a share of the references past the resolution: those to pages that were not touched
//! for the resolution time, which is the time in which [`RESOLUTION_SHARE`] of the pages and [`RESOLUTION_TOUCHES`] samples
//! are touched, at least [`RESOLUTION_MIN`] and at least the typical time from arming a page to its first check. The curve starts at the number of pages touched
//! in that time, or at the upper limit of that number for one of the two minimum times, because sizes that may be reached sooner have misses that are
//! not resolved, and its misses a second there are the rate of these references,
//! in pages of 4 KiB. The curve ends at the pages touched within the longest time observed; beyond, what remains may miss or
//! not, and the band reaches down to 0. A memory of all pages with contents misses none of
//! them. A VM that touches fewer pages than are resolved has a curve of one point (`seldom`).
//!
//! **Band.** The samples are weighted at random (the Bayesian bootstrap of \[Rubin81\]), those armed in the same stretch
//! of time alike because they see the same phase of the VM, and the mixture's weights are estimated again. A fall for which no touch is evidence is limited by the rule of three: had touches been as
//! frequent as 3 in the time waited, one would have been seen with a probability of 95 %. After a change of phase the band contains
//! that of all touches since then (`phase`), also of samples that were armed before.
//!
//! Source: \[Xiang13\] for the slope; the estimate of F is ours (`mixture`).
//! Cost: memory for the samples that count; 5 to 12 ms for each curve; there is one for each eighth of the window, and one when the touches have doubled.
//! Not here: how pages are drawn and armed (crate `plimsoll-trap`).

mod cells;
mod change;
mod mixture;
mod phase;
mod seldom;
mod speed;

use std::cell::OnceCell;
use std::collections::VecDeque;
use std::time::Duration;

use plimsoll_flow::{
    CurvePoint, FirstTouch, FirstTouches, LogErrors, MissRatioCurve, MissesPerSecond, PageCount,
    SplitMix, Timestamp, Whole as _, mix,
};

use super::{LiveEstimator, LiveInput, LiveOptions, LiveWindow};
use crate::parts::log_errors::{WEIGHTINGS, log_errors, log_share};
use crate::parts::steps::NORMAL;
use cells::{Cells, Time};
use mixture::{Component, Mixture};
use phase::Phase;
use speed::Batches;

/// Time for which a sample counts, unless [`LiveOptions::reach`] is set.
const WINDOW: Duration = Duration::from_secs(60);
/// A curve is computed again after this share of the window, so that short periods do not cost more than long ones.
const RENEWED: u32 = 8;
/// Share of the pages that are touched within the resolution time, ..
const RESOLUTION_SHARE: f64 = 1.0 / 128.0;
/// .. and number of samples from whose touches the slope at that time is estimated: in the time of fewer it is not known.
const RESOLUTION_TOUCHES: f64 = 40.0;
/// Minimum resolution time in seconds: far above that of a trap.
const RESOLUTION_MIN: f64 = 1e-3;
/// Maximum share of the pages between two points of a curve.
const STEP_MAX: f64 = 1.0 / 512.0;
/// Rounds in which the speeds of batches and the distribution are estimated in turn.
const SPEED_ROUNDS: u32 = 3;
/// Number of stretches of time of which the samples have the same random weight: what a VM does in one of them, all of its
/// samples see.
const BLOCKS: usize = 16;
/// Rounds of three steps for each.
const WEIGHTING_ROUNDS: u32 = 25;
/// Half-width of a 95 % band in standard deviations of the weightings: the normal distribution's, times a factor that
/// was measured, for which components there are is an estimate too.
const DEVIATIONS: f64 = NORMAL * 1.75;
/// Factor of the upper half of the band if samples were withdrawn because of a burst: nothing is drawn until the budget has
/// paid for it, so that times with many misses have fewer samples. Measured on the CloudPhysics trace.
const INTERRUPTED: f64 = 1.6;
/// Error of the logarithm of the quotient of the misses at two sizes that the mixture itself has, as a share of it:
/// measured by `./dev bench bands`.
const QUOTIENT_ERROR: f64 = 0.08;
/// Events that would have been observed with a probability of 95 %: -ln 0.05.
const RULE_OF_THREE: f64 = 3.0;

/// The live estimator of first touches.
#[derive(Debug)]
pub(super) struct FirstTouchCurve {
    window: Duration,
    ram: PageCount,
    ended: VecDeque<FirstTouch>,
    waiting: Vec<FirstTouch>,
    /// Number of the newest of `ended` that belong to the open window.
    open: usize,
    /// The VM's time at which the last window was closed, and `changed` then.
    closed: Duration,
    changed_before: Duration,
    population: u64,
    /// Starts and ends of the periods, from the last one before the window on.
    ends: VecDeque<Timestamp>,
    /// The last change of phase, in the VM's time.
    changed: Duration,
    /// The curve of the samples, once it was computed.
    curve: OnceCell<Option<MissRatioCurve>>,
    /// Whether no sample came since.
    is_current: bool,
    /// Wall time at which the next curve is due.
    due: Duration,
    /// Touches that are observed then if it is due earlier, because it has many more.
    due_touches: usize,
}

impl FirstTouchCurve {
    pub(super) fn new(options: &LiveOptions) -> Self {
        Self {
            window: options.reach.unwrap_or(WINDOW),
            ram: options.ram,
            ended: VecDeque::new(),
            waiting: Vec::new(),
            open: 0,
            closed: Duration::ZERO,
            changed_before: Duration::ZERO,
            population: 0,
            ends: VecDeque::new(),
            changed: Duration::ZERO,
            curve: OnceCell::new(),
            is_current: false,
            due: Duration::ZERO,
            due_touches: 0,
        }
    }

    fn add(&mut self, touches: &FirstTouches<'_>) {
        let now = touches.now;
        self.follow(touches.from, now);
        self.ended.extend(touches.ended);
        self.open += touches.ended.len();
        self.waiting.clear();
        self.waiting.extend(touches.waiting);
        self.population = touches.population_pages.min(self.ram.0);
        let from = self.vm_time_at(now.wall.saturating_sub(self.window));
        self.keep_from(from);
        let change = change::last_change(self.since_change(), from, now.vm);
        if let Some(change) = change {
            self.changed = change;
        }
        let is_known = matches!(self.curve.get(), Some(Some(_)));
        let touched = self.since_change().filter(|one| one.touched_by.is_some());
        let touches = touched.count();
        let is_due = now.wall >= self.due || touches >= self.due_touches;
        self.is_current = change.is_some() || is_due || !is_known;
        if self.is_current {
            self.curve.take();
            self.due = now.wall.saturating_add(self.window / RENEWED);
            self.due_touches = (touches * 2).max(1);
        }
    }

    /// Adds a period to the ends, and drops those before the window.
    fn follow(&mut self, from: Timestamp, now: Timestamp) {
        let is_before =
            |one: Timestamp, other: Timestamp| one.vm < other.vm || one.wall < other.wall;
        if is_before(now, from) {
            return;
        }
        if self.ends.back().is_some_and(|&last| is_before(from, last)) {
            // Another process, whose times are not comparable.
            self.ends.clear();
            self.ended.clear();
            self.open = 0;
            self.closed = Duration::ZERO;
            (self.changed, self.changed_before) = (Duration::ZERO, Duration::ZERO);
        }
        self.ends.extend([from, now]);
        let start = now.wall.saturating_sub(self.window);
        while self.ends.get(1).is_some_and(|second| second.wall <= start) {
            self.ends.pop_front();
        }
    }

    /// The time of the VM at a wall time within the periods that are kept.
    fn vm_time_at(&self, wall: Duration) -> Duration {
        self.between(wall, |end| end.wall, |end| end.vm)
    }

    fn wall_time_at(&self, vm: Duration) -> Duration {
        self.between(vm, |end| end.vm, |end| end.wall)
    }

    /// One time where the other is `at`, as if the VM had run evenly between two ends.
    fn between(
        &self,
        at: Duration,
        known: impl Fn(&Timestamp) -> Duration,
        wanted: impl Fn(&Timestamp) -> Duration,
    ) -> Duration {
        let after = self.ends.partition_point(|end| known(end) <= at);
        let neighbours = (self.ends.get(after.wrapping_sub(1)), self.ends.get(after));
        match neighbours {
            (Some(first), Some(second)) => {
                let share = (at - known(first)).as_secs_f64()
                    / (known(second) - known(first)).as_secs_f64();
                let length = (wanted(second) - wanted(first)).as_secs_f64() * share;
                let length = Duration::try_from_secs_f64(length).unwrap_or(Duration::MAX);
                wanted(first).saturating_add(length).min(wanted(second))
            }
            (Some(end), None) | (None, Some(end)) => wanted(end),
            (None, None) => Duration::ZERO,
        }
    }

    /// CPU time of the VM per wall time since the oldest sample that counts.
    fn busy(&self) -> f64 {
        let Some(&now) = self.ends.back() else {
            return 0.0;
        };
        let oldest = self.since_change().map(|sample| sample.armed).min();
        let from = oldest.unwrap_or_default();
        let ran = now.vm.saturating_sub(from).as_secs_f64();
        ran / now
            .wall
            .saturating_sub(self.wall_time_at(from))
            .as_secs_f64()
    }

    /// Drops the samples that were armed before.
    fn keep_from(&mut self, from: Duration) {
        let closed = self.ended.len() - self.open;
        let mut index = 0;
        let mut dropped = 0;
        self.ended.retain(|sample| {
            let kept = sample.armed >= from;
            dropped += usize::from(!kept && index >= closed);
            index += 1;
            kept
        });
        self.open -= dropped;
        self.waiting.retain(|sample| sample.armed >= from);
    }

    fn samples(&self) -> impl Iterator<Item = &FirstTouch> + Clone {
        self.ended.iter().chain(&self.waiting)
    }

    /// Those armed since the last change of phase.
    fn since_change(&self) -> impl Iterator<Item = &FirstTouch> + Clone {
        self.samples().filter(|sample| sample.armed >= self.changed)
    }

    /// The curve of the present phase.
    fn computed(&self) -> Option<MissRatioCurve> {
        let of = |sample: &FirstTouch| (sample.armed.as_secs_f64(), Time::of(sample));
        let samples: Vec<_> = self.since_change().map(of).collect();
        let busy = self.busy();
        let now = self.ends.back()?.vm;
        let curve = if let Some((shape, speed)) = Shape::at_even_speed(&samples) {
            let interrupted = phase::were_withdrawn(self.samples(), now);
            let upper = if interrupted { INTERRUPTED } else { 1.0 };
            shape.curve(self.population, busy * speed, upper)?
        } else {
            let times: Vec<Time> = samples.iter().map(|&(_, time)| time).collect();
            seldom::curve(&times, self.population, busy)?
        };
        let start = self.samples().map(|sample| sample.armed).min()?;
        let phase = Phase::new(self.samples(), [start, self.changed, now]);
        let curve = match phase.and_then(|phase| phase.curve(self.population, busy)) {
            Some(other) => widened(&curve, &other)?,
            None => curve,
        };
        up_to_all(curve, PageCount(self.population))
    }
}

impl LiveEstimator for FirstTouchCurve {
    fn observe(&mut self, input: &LiveInput<'_>) {
        if let LiveInput::FirstTouches(touches) = input {
            self.add(touches);
        }
    }

    fn close_window(&mut self, _: &LiveWindow) -> Option<MissRatioCurve> {
        self.open = 0;
        self.closed = self.ends.back().map_or(Duration::ZERO, |end| end.vm);
        self.changed_before = self.changed;
        self.recent_curve()
    }

    fn discard_window(&mut self) {
        self.curve.take();
        self.is_current = true;
        let mut unknown = self.ended.split_off(self.ended.len() - self.open);
        unknown.extend(self.waiting.drain(..));
        self.open = 0;
        // The discarded touches may have looked like a change of phase.
        self.changed = self.changed_before;
        while self.ends.back().is_some_and(|end| end.vm > self.closed) {
            self.ends.pop_back();
        }
        // Without the samples that waited when the window was opened, only pages that are touched soon would be left.
        unknown.retain(|sample| sample.armed < self.closed);
        self.ended
            .extend(unknown.into_iter().map(|sample| FirstTouch {
                untouched_until: sample.untouched_until.min(self.closed),
                touched_by: None,
                ..sample
            }));
    }

    fn curve(&self) -> Option<MissRatioCurve> {
        match self.is_current {
            true => self.recent_curve(),
            false => self.computed(),
        }
    }

    fn recent_curve(&self) -> Option<MissRatioCurve> {
        self.curve.get_or_init(|| self.computed()).clone()
    }
}

impl Time {
    fn of(sample: &FirstTouch) -> Self {
        let after = |time: Duration| time.saturating_sub(sample.armed).as_secs_f64();
        let above = after(sample.untouched_until);
        Self {
            above,
            upto: sample.touched_by.map(|by| after(by).max(above)),
        }
    }

    fn scaled(self, factor: f64) -> Self {
        Self {
            above: self.above * factor,
            upto: self.upto.map(|upto| upto * factor),
        }
    }
}

/// The estimated distribution at rising times, from the resolution time to the longest observed.
#[derive(Debug)]
struct Shape {
    steps: Vec<Step>,
    /// The same by other weightings of the samples.
    others: Vec<Vec<Step>>,
    /// By step: the slope that could have remained unnoticed from there on.
    unnoticed: Vec<f64>,
    touches: u64,
}

/// The distribution at one time.
#[derive(Debug, Clone, Copy)]
struct Step {
    /// Share of the pages touched within the time.
    share: f64,
    /// Its slope from there on, per second.
    slope: f64,
}

impl Shape {
    /// The distribution in the time of a VM whose speed is always the same, by samples with the times at which they
    /// were armed, and the mean speed; `None` with fewer touches, or pages touched in all the time observed, than the resolution
    /// needs.
    fn at_even_speed(samples: &[(f64, Time)]) -> Option<(Self, f64)> {
        let mut times: Vec<Time> = samples.iter().map(|&(_, time)| time).collect();
        if (touches(&times) as f64) < RESOLUTION_TOUCHES {
            return None;
        }
        let mut cells = Cells::new(&times)?;
        let mut mixture = Mixture::fit(&cells);
        let mut mean = 1.0;
        if let Some(batches) = Batches::new(samples) {
            let mut speeds = batches.speeds(|time| mixture.share(time));
            let one_speed = speeds.at_one_speed;
            let mut best = one_speed + speed::GAIN_MIN;
            for _ in 0..SPEED_ROUNDS {
                if speeds.likelihood - one_speed < speed::GAIN_TRIED {
                    break;
                }
                let scaled = samples.iter().zip(&speeds.of_samples);
                let scaled = scaled.map(|((_, time), speed)| time.scaled(*speed));
                let even: Vec<Time> = scaled.collect();
                let even_cells = Cells::new(&even)?;
                let next = Mixture::fit(&even_cells);
                let mean_of_even = speeds.of_samples.iter().sum::<f64>() / samples.len() as f64;
                speeds = batches.speeds(|time| next.share(time));
                if speeds.likelihood > best {
                    best = speeds.likelihood;
                    (times, cells, mixture, mean) = (even, even_cells, next, mean_of_even);
                }
            }
        }
        let mut order: Vec<usize> = (0..samples.len()).collect();
        order.sort_by(|&one, &other| samples[one].0.total_cmp(&samples[other].0));
        Some((Self::new(&times, &order, &cells, mixture)?, mean))
    }

    /// `order` has the samples in the order in which they were armed.
    fn new(times: &[Time], order: &[usize], cells: &Cells, mut mixture: Mixture) -> Option<Self> {
        let touches = touches(times);
        let grid = grid(cells, &mixture);
        let fitted = mixture.weights.clone();
        mixture.loosen(cells);
        let tables: Vec<Vec<Step>> = mixture
            .components
            .iter()
            .map(|component| steps_of(component, &grid))
            .collect();
        let steps = mixed(&tables, &fitted);
        let least = RESOLUTION_TOUCHES.min(touches as f64 / 2.0) / cells.total;
        let resolution_share = RESOLUTION_SHARE.max(least);
        let resolution_time = RESOLUTION_MIN.max(unresolved_time(times));
        let weights = mixture.weights.clone();
        let others = (1..=WEIGHTINGS as u64).map(|seed| {
            // The figures of docs/first-touch.md were measured by these numbers.
            let mut random = SplitMix(mix(seed));
            let mut counts = vec![0.0; cells.cells.len()];
            for block in order.chunks(order.len().div_ceil(BLOCKS)) {
                // Exponentially distributed, of mean 1; of a number above 0 and at most 1.
                let weight = -(random.unit() + f64::EPSILON / 2.0).ln();
                for &sample in block {
                    counts[cells.places[sample]] += weight;
                }
            }
            mixture.weights.clone_from(&weights);
            mixture.improve(&counts, WEIGHTING_ROUNDS);
            mixed(&tables, &mixture.weights)
        });
        let others: Vec<Vec<Step>> = others.collect();
        // Sizes that are reached sooner have misses that are not resolved, and a band has to contain those of sizes that may be.
        let last = grid.len() - 1;
        let resolved = grid[..last].partition_point(|&time| time < resolution_time);
        let reached = steps[resolved].share;
        let mut reached_by_others = others.iter().map(|steps| steps[resolved].share);
        let share_min = resolution_share.max(reached + deviation(&mut reached_by_others, reached));
        let first = (resolved..=last).find(|&at| steps[at].share >= share_min)?;
        let others = others.iter().map(|steps| steps[first..].to_vec()).collect();
        let unnoticed = unnoticed(times, &grid[first..], &steps[first..]);
        Some(Self {
            steps: steps[first..].to_vec(),
            others,
            unnoticed,
            touches,
        })
    }

    /// The curve of a VM that takes `busy` seconds of CPU time a second; the upper half of its band is `upper` times as wide as
    /// the weightings make it.
    fn curve(&self, population: u64, busy: f64, upper: f64) -> Option<MissRatioCurve> {
        let pages = population as f64;
        let first = self.steps[0];
        let mut others: Vec<_> = self
            .others
            .iter()
            .map(|steps| Along { steps, at: 0 })
            .collect();
        let firsts: Vec<f64> = others
            .iter_mut()
            .map(|other| other.slope(first.share))
            .collect();
        let mut points: Vec<CurvePoint> = Vec::new();
        let mut errors: Vec<LogErrors> = Vec::new();
        // Misses never rise with the size, so that their upper limit is that of all smaller sizes too.
        let mut highest = f64::INFINITY;
        for (step, unnoticed) in self.steps.iter().zip(&self.unnoticed) {
            let ratio = |slope: f64, first: f64| {
                if slope > 0.0 {
                    (slope / first).min(1.0)
                } else {
                    0.0
                }
            };
            let before = points.last().map_or(1.0, |point| point.miss_ratio);
            let miss_ratio = ratio(step.slope, first.slope).min(before);
            let slopes: Vec<f64> = others
                .iter_mut()
                .map(|other| other.slope(step.share))
                .collect();
            let mut ratios = slopes
                .iter()
                .zip(&firsts)
                .map(|(&slope, &first)| ratio(slope, first));
            let spread = deviation(&mut ratios, miss_ratio);
            let mut high = miss_ratio + (upper * spread).max(ratio(*unnoticed, first.slope));
            // The slope itself is the misses, and its own spread includes the error of their rate.
            let slope = miss_ratio * first.slope;
            let slope_spread = deviation(&mut slopes.iter().copied(), slope);
            let slope_high = slope + (upper * slope_spread).max(unnoticed.min(first.slope));
            highest = highest.min(slope_high).max(slope);
            let size = PageCount(u64::whole((step.share * pages).ceil()));
            if let Some(last) = points.pop_if(|last| last.size >= size) {
                // Of the times in which as many pages are touched, each limits the misses.
                high = high.min(last.high);
                errors.truncate(points.len());
            }
            if errors.len() == points.len() && *unnoticed <= upper * slope_spread {
                let shares = slopes.iter().map(|slope| slope / first.slope);
                let own = slope / first.slope;
                let factor = upper * DEVIATIONS / (WEIGHTINGS as f64).sqrt();
                errors.push(log_errors(
                    own,
                    shares,
                    factor,
                    log_share(own) * QUOTIENT_ERROR,
                ));
            }
            points.push(CurvePoint {
                size,
                miss_ratio,
                low: (miss_ratio - spread).clamp(0.0, miss_ratio),
                high: high.clamp(miss_ratio, 1.0),
                misses: (pages * busy).is_finite().then(|| {
                    let slopes = MissesPerSecond {
                        expected: slope,
                        low: (slope - slope_spread).max(0.0),
                        high: highest,
                    };
                    slopes.scaled(pages * busy)
                }),
            });
        }
        if let Some(last) = points.last_mut() {
            // Where the observation ends, nothing is known of what remains.
            last.low = 0.0;
            if let Some(misses) = &mut last.misses {
                misses.low = 0.0;
            }
        }
        let curve = MissRatioCurve::new(points, self.touches).ok()?;
        Some(curve.with_log_errors(errors))
    }
}

/// Number of times that end with a touch.
fn touches(times: &[Time]) -> u64 {
    times.iter().filter(|time| time.upto.is_some()).count() as u64
}

/// Half-width of the band around a mean, by the values of the weightings.
fn deviation(values: &mut dyn Iterator<Item = f64>, mean: f64) -> f64 {
    let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
    DEVIATIONS * (squares / WEIGHTINGS as f64).sqrt()
}

/// A curve with a band that contains that of `other` too, without errors of quotients: those of `other` are not known.
fn widened(curve: &MissRatioCurve, other: &MissRatioCurve) -> Option<MissRatioCurve> {
    let (first, resolved) = (curve.points()[0].size, other.points()[0].size);
    let both = curve.points().iter().chain(other.points());
    let mut sizes: Vec<PageCount> = both.map(|point| point.size).collect();
    sizes.retain(|&size| size >= first);
    sizes.sort_unstable();
    sizes.dedup();
    let points = sizes.into_iter().map(|size| {
        let point = CurvePoint {
            size,
            ..curve.at(size)
        };
        if size < resolved {
            return point;
        }
        let wider = other.at(size);
        let misses = point.misses.zip(wider.misses);
        let misses = misses.map(|(one, other)| MissesPerSecond {
            low: one.low.min(other.low),
            high: one.high.max(other.high),
            ..one
        });
        CurvePoint {
            low: point.low.min(wider.low),
            high: point.high.max(wider.high),
            misses: misses.or(point.misses),
            ..point
        }
    });
    MissRatioCurve::new(points.collect(), curve.references()).ok()
}

/// The curve up to a memory of all pages with contents, which misses none of them, unless it ends there. Its ratio remains
/// that of the largest size observed: relative to the misses of such a memory there would be no bound.
fn up_to_all(curve: MissRatioCurve, population: PageCount) -> Option<MissRatioCurve> {
    let mut points = curve.points().to_vec();
    let last = *points.last()?;
    if last.size >= population {
        // So many were touched that the working set may be all of them.
        return Some(curve);
    }
    points.push(CurvePoint {
        size: population,
        low: 0.0,
        misses: last.misses.map(|misses| misses.scaled(0.0)),
        ..last
    });
    curve.with_points(points).ok()
}

/// The times at which a curve has points: the edges, and as many between them as it needs.
fn grid(cells: &Cells, mixture: &Mixture) -> Vec<f64> {
    let share = |time: f64| mixture.share(time);
    let mut grid = Vec::new();
    for pair in cells.edges.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        let steps = ((share(to) - share(from)) / STEP_MAX)
            .ceil()
            .clamp(1.0, 1.0 / STEP_MAX);
        let mut step = 0.0;
        while step < steps {
            grid.push(from + (to - from) * step / steps);
            step += 1.0;
        }
    }
    grid.push(cells.longest());
    grid
}

fn steps_of(component: &Component, grid: &[f64]) -> Vec<Step> {
    let step = |&time: &f64| Step {
        share: component.share(time),
        slope: component.slope(time),
    };
    grid.iter().map(step).collect()
}

fn mixed(tables: &[Vec<Step>], weights: &[f64]) -> Vec<Step> {
    let zero = Step {
        share: 0.0,
        slope: 0.0,
    };
    let mut sums = vec![zero; tables.first().map_or(0, Vec::len)];
    for (table, &weight) in tables.iter().zip(weights) {
        for (sum, step) in sums.iter_mut().zip(table) {
            sum.share += weight * step.share;
            sum.slope += weight * step.slope;
        }
    }
    sums
}

/// Time below which touches are not resolved: the median upper limit of those that are uncertain by more than their lower limit, as
/// of touches before the first check of a page; 0 if most touches up to that time are known better.
fn unresolved_time(times: &[Time]) -> f64 {
    let touched = times.iter().filter_map(|time| {
        let upto = time.upto?;
        Some((upto, upto - time.above > time.above))
    });
    let touched: Vec<(f64, bool)> = touched.collect();
    let unresolved = touched.iter().filter(|(_, is_unresolved)| *is_unresolved);
    let limit = median(unresolved.map(|(upto, _)| *upto).collect()).unwrap_or_default();
    let count = |wanted: bool| {
        let below = touched.iter().filter(|(upto, _)| *upto <= limit);
        below
            .filter(|(_, is_unresolved)| *is_unresolved == wanted)
            .count()
    };
    if count(true) > count(false) {
        limit
    } else {
        0.0
    }
}

/// The middle one of some values; `None` if there are none.
fn median(mut values: Vec<f64>) -> Option<f64> {
    let middle = values.len() / 2;
    (middle < values.len()).then(|| *values.select_nth_unstable_by(middle, f64::total_cmp).1)
}

/// The slope that could have remained unnoticed from each time of the grid on.
fn unnoticed(times: &[Time], grid: &[f64], steps: &[Step]) -> Vec<f64> {
    let mut ends: Vec<f64> = times
        .iter()
        .map(|time| time.upto.unwrap_or(time.above))
        .collect();
    ends.sort_by(|one, other| other.total_cmp(one));
    let mut ends = ends.into_iter().peekable();
    let is_open = times.iter().any(|time| time.upto.is_none());
    // From the longest time down: the samples that waited longer, and for how long they did in all.
    let (mut waited, mut samples, mut since) = (0.0, 0.0, f64::INFINITY);
    let mut slopes: Vec<f64> = Vec::with_capacity(grid.len());
    for (&time, step) in grid.iter().zip(steps).rev() {
        if samples > 0.0 {
            waited += samples * (since - time);
        }
        since = time;
        while let Some(end) = ends.next_if(|&end| end > time) {
            waited += end - time;
            samples += 1.0;
        }
        slopes.push(if waited > 0.0 {
            RULE_OF_THREE * (1.0 - step.share) / waited
        } else if is_open {
            f64::INFINITY
        } else {
            0.0
        });
    }
    slopes.reverse();
    slopes
}

/// A walk along a distribution, for rising shares.
struct Along<'a> {
    steps: &'a [Step],
    at: usize,
}

impl Along<'_> {
    /// The slope where the distribution reaches a share.
    fn slope(&mut self, share: f64) -> f64 {
        while let Some(next) = self.steps.get(self.at + 1)
            && next.share <= share
        {
            self.at += 1;
        }
        self.steps[self.at].slope
    }
}

#[cfg(test)]
mod tests;
