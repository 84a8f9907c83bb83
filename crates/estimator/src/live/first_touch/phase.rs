//! The curve of a phase that began shortly before, for its band: from all its touches, whenever the touched pages were armed.
//!
//! The pages that a VM touches first in a new phase had not been touched for long, so their samples were armed before the phase.
//! The samples armed since the change contain neither these touches nor lags longer than the phase, so that their curve is too low.
//! Therefore every touch since the change counts here. At a lag t these touches are those of the samples armed from t before
//! the change until t before now, A(t) of them, of which each was observed at this lag within the phase:
//!
//! - the share of them that were touched by then is that of the pages touched in an interval of length t which ends in the
//!   phase: the size;
//! - the touches at lags from t on, each weighted by 1/A(t), are its misses: touches of pages that had not been touched for t.
//!
//! In a VM that does the same all the time the second is the slope of the first, and one distribution gives both
//! (`mixture`). After a change it is not, and both are counted: the misses between lags in a ratio of
//! [`LAGS_RATIO`], and made to
//! fall by pooling neighbours that rise. Nothing is known of lags beyond the oldest sample.
//!
//! **Withdrawals.** Many touches at once use up the budget of traps, and then all samples are withdrawn. What
//! happens to their pages afterwards is not observed, and not like what happened before. So at a lag t only those times count before
//! which no sample was withdrawn for t, and A(t) are the samples that could have been touched at them.
//!
//! **Band.** The touches of each stretch of the phase vary more than independent ones where the VM does
//! different things in turn: the limits are those of Student's distribution for the spread of [`STRETCHES`] of them, at
//! least that of independent touches. In the times that were not observed nothing may have been missed, or as much as
//! in the others.
//!
//! Not here: the curve itself (`mixture`), whose edges this one blurs.
//!
//! A phase that lasts longer than half of the time before it is better known from the samples armed in it, if none were
//! withdrawn, and one that lasts longer than that time in any case.
//!
//! Cost: sorting the samples, and a pass over them for each point.

use std::time::Duration;

use plimsoll_flow::{
    CurvePoint, FirstTouch, MissRatioCurve, MissesPerSecond, PageCount, Whole as _,
};

use super::{RESOLUTION_MIN, RESOLUTION_SHARE, RESOLUTION_TOUCHES, RULE_OF_THREE};

/// Touches are counted between lags of at least this ratio, and as far apart as there are so many.
const LAGS_RATIO: f64 = 1.25;
const TOUCHES_MIN: usize = 20;
/// Number of points of a curve for each such range.
const POINTS: u32 = 4;
/// Number of stretches of the phase, and the 97.5 % quantile of Student's distribution for the spread of as many.
const STRETCHES: usize = 16;
const STUDENT: f64 = 2.131;
/// Samples that are withdrawn within this time, in seconds, one after the other, are all: at least so many.
const WITHDRAWN_WITHIN: f64 = 0.01;
const WITHDRAWN: usize = 8;
/// Minimum number of samples that were observed at a lag.
const OBSERVED_MIN: usize = 40;

/// A sample, in seconds of the VM.
#[derive(Debug, Clone, Copy)]
struct Sample {
    armed: f64,
    /// Until when it was observed.
    until: f64,
    is_touched: bool,
}

impl Sample {
    fn of(sample: &FirstTouch) -> Self {
        let least = sample.untouched_until.as_secs_f64();
        let until = sample
            .touched_by
            .map(|by| f64::midpoint(least, by.as_secs_f64()));
        Self {
            armed: sample.armed.as_secs_f64(),
            until: until.unwrap_or(least),
            is_touched: until.is_some(),
        }
    }
}

/// The samples around a phase.
#[derive(Debug)]
pub(super) struct Phase {
    /// In the order in which they were armed.
    samples: Vec<Sample>,
    /// Times at which all samples were withdrawn, rising.
    withdrawn: Vec<f64>,
    since: f64,
    now: f64,
    /// The longest lag that is known.
    reach: f64,
}

/// Touches at lags of a range.
#[derive(Debug, Clone, Copy)]
struct Bin {
    from: f64,
    to: f64,
    /// By stretch: the sum of their weights.
    sums: [f64; STRETCHES],
    squares: f64,
    /// Weight of one.
    weight: f64,
}

impl Bin {
    /// Touches per page and second.
    fn slope(&self) -> f64 {
        self.sums.iter().sum::<f64>() / (self.to - self.from)
    }

    /// Half-width of the band of the slope.
    fn half_width(&self) -> f64 {
        let count = STRETCHES as f64;
        let mean = self.sums.iter().sum::<f64>() / count;
        let spread: f64 = self.sums.iter().map(|sum| (sum - mean).powi(2)).sum();
        let variance = (spread * count / (count - 1.0)).max(self.squares);
        (STUDENT * variance.sqrt()).max(RULE_OF_THREE * self.weight) / (self.to - self.from)
    }

    fn join(&mut self, next: &Self) {
        self.to = next.to;
        self.weight = self.weight.max(next.weight);
        self.squares += next.squares;
        for (sum, other) in self.sums.iter_mut().zip(next.sums) {
            *sum += other;
        }
    }
}

impl Phase {
    /// The phase since `since`, where samples were armed from `start` on; `None` if it
    /// lasts too long.
    pub(super) fn new<'a>(
        samples: impl Iterator<Item = &'a FirstTouch>,
        [start, since, now]: [Duration; 3],
    ) -> Option<Self> {
        let (reach, length) = (since.saturating_sub(start), now.saturating_sub(since));
        if reach <= length {
            return None;
        }
        let mut samples: Vec<Sample> = samples.map(Sample::of).collect();
        samples.sort_unstable_by(|one, other| one.armed.total_cmp(&other.armed));
        let now = now.as_secs_f64();
        let mut phase = Self {
            withdrawn: withdrawals(samples.iter().copied(), now),
            samples,
            since: since.as_secs_f64(),
            now,
            reach: reach.as_secs_f64(),
        };
        let is_even = phase.withdrawn.iter().all(|&at| at < phase.since);
        if reach <= length.saturating_mul(2) && is_even {
            return None;
        }
        while phase.at(phase.reach).count() < OBSERVED_MIN {
            phase.reach *= 0.9;
            if phase.reach < RESOLUTION_MIN {
                return None;
            }
        }
        Some(phase)
    }

    /// The samples that were observed at a lag within the phase, or touched before.
    fn at(&self, lag: f64) -> impl Iterator<Item = &Sample> {
        let armed_by = |time: f64| self.samples.partition_point(|sample| sample.armed <= time);
        let from = armed_by(self.since - lag);
        let samples = self.samples[from..armed_by(self.now - lag).max(from)].iter();
        samples.filter(move |sample| {
            let next = self.withdrawn.partition_point(|&at| at <= sample.armed);
            let withdrawn = self.withdrawn.get(next);
            withdrawn.is_none_or(|&at| at >= sample.armed + lag)
        })
    }

    /// Share of the pages touched in an interval of this length.
    fn share(&self, lag: f64) -> f64 {
        let (mut touched, mut all) = (0.0, 0.0);
        for sample in self.at(lag) {
            all += 1.0;
            let is_touched = sample.is_touched && sample.until <= sample.armed + lag;
            touched += f64::from(u8::from(is_touched));
        }
        if all > 0.0 { touched / all } else { 0.0 }
    }

    /// Share of the phase before which no sample was withdrawn for so long.
    fn observed(&self, lag: f64) -> f64 {
        let (mut unobserved, mut upto) = (0.0, self.since);
        for &at in &self.withdrawn {
            let end = (at + lag).min(self.now);
            unobserved += (end - at.max(upto)).max(0.0);
            upto = upto.max(end);
        }
        1.0 - unobserved / (self.now - self.since)
    }

    /// The curve of a VM with `population` pages that takes `busy` seconds of CPU time a second; `None` if too little was
    /// touched for one.
    pub(super) fn curve(&self, population: u64, busy: f64) -> Option<MissRatioCurve> {
        let touches = self.samples.iter().filter(|sample| {
            sample.is_touched
                && sample.until >= self.since
                && sample.until - sample.armed <= self.reach
        });
        let mut touches: Vec<(f64, f64)> = touches
            .map(|sample| (sample.until - sample.armed, sample.until))
            .collect();
        touches.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
        let count = touches.len();
        let resolved = |lag: f64| lag >= RESOLUTION_MIN && self.share(lag) >= RESOLUTION_SHARE;
        let first = (count as f64 / 2.0).min(RESOLUTION_TOUCHES);
        let first = touches
            .iter()
            .enumerate()
            .position(|(at, &(lag, _))| at as f64 >= first && resolved(lag))?;
        let bins = self.bins(&touches[first..]);
        let falling = fall(&bins);
        let pages = population as f64 * busy;
        // Lag, slope and half-width at the middle of each bin.
        let middle = |bin: &Bin| {
            (
                f64::midpoint(bin.from, bin.to),
                [bin.slope(), bin.half_width()],
            )
        };
        let middles: Vec<_> = falling.iter().map(middle).collect();
        let from = bins.first()?.from;
        let lags = bins.iter().flat_map(|bin| {
            let step = (bin.to - bin.from) / f64::from(POINTS);
            (0..POINTS).map(move |at| (bin.from + step * f64::from(at), step))
        });
        let [slope, error] = interpolated(&middles, from);
        let mut points: Vec<CurvePoint> = Vec::new();
        // Misses never rise with the size, so that their upper limit is that of all smaller sizes too.
        let (mut highest, mut most) = (1.0_f64, f64::INFINITY);
        for (lag, step) in lags.chain([(self.reach, 0.0)]) {
            // The mean up to the next point.
            let [expected, half_width] = interpolated(&middles, lag + step / 2.0);
            let observed = self.observed(lag);
            let ratio = (expected / slope).min(1.0);
            most = most.min(expected + half_width).max(expected);
            let spread = (half_width / slope).hypot(ratio * error / slope);
            highest = highest.min(ratio + spread).max(ratio);
            let size = PageCount(u64::whole((self.share(lag) * population as f64).ceil()));
            let size = points.last().map_or(size, |last| size.max(last.size));
            points.pop_if(|last| last.size == size);
            points.push(CurvePoint {
                size,
                miss_ratio: ratio,
                low: ((ratio - spread) * observed).clamp(0.0, ratio),
                high: highest,
                misses: pages.is_finite().then(|| {
                    let slopes = MissesPerSecond {
                        expected,
                        low: ((expected - half_width) * observed).max(0.0),
                        high: most,
                    };
                    slopes.scaled(pages)
                }),
            });
        }
        MissRatioCurve::new(points, count as u64).ok()
    }

    /// Counts touches: lags, rising, and times.
    fn bins(&self, touches: &[(f64, f64)]) -> Vec<Bin> {
        let from = touches[0].0;
        let mut ends: Vec<f64> = Vec::new();
        let mut count = 0;
        for &(lag, _) in touches {
            count += 1;
            if count >= TOUCHES_MIN && lag >= ends.last().copied().unwrap_or(from) * LAGS_RATIO {
                ends.push(lag);
                count = 0;
            }
        }
        // What is left after the last end belongs to it.
        ends.pop();
        ends.push(self.reach);
        let mut bins: Vec<Bin> = Vec::new();
        let mut rest = touches.iter().peekable();
        for to in ends {
            let from = bins.last().map_or(from, |last| last.to);
            let observed = self.at(f64::midpoint(from, to)).count().max(1);
            let weight = 1.0 / observed as f64;
            let mut bin = Bin {
                from,
                to,
                sums: [0.0; STRETCHES],
                squares: 0.0,
                weight,
            };
            while let Some(&(_, time)) = rest.next_if(|touch| touch.0 <= to) {
                let share = (time - self.since) / (self.now - self.since);
                let stretch = usize::whole(share.clamp(0.0, 0.999) * STRETCHES as f64);
                bin.sums[stretch] += weight;
                bin.squares += weight * weight;
            }
            if bin.to > bin.from {
                bins.push(bin);
            }
        }
        bins
    }
}

/// Whether all of some samples, those that a tracer has at the time `now`, were withdrawn at once before.
pub(super) fn were_withdrawn<'a>(
    samples: impl Iterator<Item = &'a FirstTouch>,
    now: Duration,
) -> bool {
    !withdrawals(samples.map(Sample::of), now.as_secs_f64()).is_empty()
}

/// The times at which all samples were withdrawn, rising.
fn withdrawals(samples: impl Iterator<Item = Sample>, now: f64) -> Vec<f64> {
    let ended = samples.filter(|sample| !sample.is_touched && sample.until < now);
    let mut ended: Vec<f64> = ended.map(|sample| sample.until).collect();
    ended.sort_unstable_by(f64::total_cmp);
    let together = ended.chunk_by(|one, next| next - one < WITHDRAWN_WITHIN);
    let together = together.filter(|all| all.len() >= WITHDRAWN);
    together.map(|all| all[0]).collect()
}

/// Joins neighbours until the slopes fall.
fn fall(bins: &[Bin]) -> Vec<Bin> {
    let mut joined: Vec<Bin> = Vec::new();
    for &bin in bins {
        joined.push(bin);
        while let [.., before, last] = joined[..]
            && last.slope() >= before.slope()
        {
            joined.pop();
            if let Some(end) = joined.last_mut() {
                end.join(&last);
            }
        }
    }
    joined
}

/// The values at a lag, linear between those at the lags of `middles`.
fn interpolated(middles: &[(f64, [f64; 2])], lag: f64) -> [f64; 2] {
    let after = middles.partition_point(|middle| middle.0 <= lag);
    match (middles.get(after.wrapping_sub(1)), middles.get(after)) {
        (Some(before), Some(after)) => {
            let way = (lag - before.0) / (after.0 - before.0);
            [0, 1].map(|of: usize| before.1[of] + way * (after.1[of] - before.1[of]))
        }
        (Some(one), None) | (None, Some(one)) => one.1,
        (None, None) => [0.0; 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::Random;

    /// Samples of a VM that touches half of its pages at random, each every second; from the time `loads` on others in turn.
    fn samples(loads: f64) -> Vec<FirstTouch> {
        let mut random = Random::new(11);
        let (mut all, mut armed) = (Vec::new(), 0.0);
        while armed < 60.0 {
            let is_hot = random.share() < 0.5;
            // A tenth of the pages a second.
            let load = loads + random.share() * 5.0;
            let end = if is_hot {
                armed - (1.0 - random.share()).ln()
            } else {
                load
            };
            let touched_by = (end >= armed && end < 60.0).then(|| Duration::from_secs_f64(end));
            all.push(FirstTouch {
                armed: Duration::from_secs_f64(armed),
                untouched_until: touched_by.unwrap_or(Duration::from_secs(60)),
                touched_by,
                pages: 1,
            });
            // The pace trebles after 30 s.
            armed += if armed < 30.0 { 0.006 } else { 0.002 };
        }
        all
    }

    fn curve(samples: &[FirstTouch], since: u64) -> Option<MissRatioCurve> {
        let times = [0, since, 60].map(Duration::from_secs);
        Phase::new(samples.iter(), times)?.curve(10_000, 1.0)
    }

    #[test]
    fn steady_touches_give_the_same_curve_whatever_the_pace_before() {
        let samples = samples(100.0);
        assert!(curve(&samples, 20).is_none());
        for since in [45, 50] {
            let curve = curve(&samples, since).unwrap();
            // Of 5000 pages at random a memory of c misses 5000 - c a second.
            for size in [500, 1500, 2500, 3500, 4500] {
                let misses = curve.misses_per_second(PageCount(size)).unwrap();
                let truth = 5000.0 - size as f64;
                assert!(
                    (misses.expected - truth).abs() < 500.0,
                    "{since} {size}: {misses:?}"
                );
            }
        }
    }

    #[test]
    fn what_a_phase_loads_is_missed_by_all_sizes_below_it() {
        let curve = curve(&samples(56.0), 56).unwrap();
        // In an interval of t: half of 1 - exp(-t), and what was loaded in it, a fifth at most.
        for (size, truth) in [(6500, 1289.0), (6800, 1124.0)] {
            let misses = curve.misses_per_second(PageCount(size)).unwrap();
            assert!(
                misses.low <= truth && truth <= misses.high,
                "{size}: {misses:?}"
            );
            assert!(
                (misses.expected - truth).abs() < 200.0,
                "{size}: {misses:?}"
            );
        }
    }
}
