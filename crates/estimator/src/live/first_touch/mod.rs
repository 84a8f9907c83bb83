//! The curve of a VM from sampled pages that are each observed until their first touch.
//!
//! Pages are drawn evenly at even times. The time from there to the next touch of the page has a distribution F, and the
//! mean number of pages touched in an interval of length t is N F(t) for N pages: the footprint, which is concave. A
//! memory of N F(t) pages misses the pages not touched for t, at the rate at which the footprint grows at t: its slope.
//! `docs/first-touch.md` derives this, with its errors.
//!
//! **Rolling.** Samples count if they were armed within the last [`LiveOptions::reach`], or [`WINDOW`]. A sample that
//! is still untouched is censored: its time exceeds the time for which it has waited. Every curve is that of all samples
//! that count, so that a window, the newest windows and all windows have the same one.
//!
//! **Resolution.** The ratio is the share of the references past the resolution: those to pages that were not touched
//! for the resolution time, which is the time in which [`RESOLUTION_TOUCHES`] samples were touched, at least
//! [`RESOLUTION_MIN`]. The curve starts there, and
//! [`references_per_second`](MissRatioCurve::references_per_second) is the rate of these references in pages per second.
//!
//! Source: \[Xiang13\] for the slope, \[KM58\] for censored times.
//! Cost: memory for the samples that count.
//! Not here: how pages are drawn and armed (crate `plimsoll-trap`).

use std::collections::VecDeque;
use std::time::Duration;

use plimsoll_flow::{CurvePoint, FirstTouch, FirstTouches, MissRatioCurve, PageCount};

use super::{LiveEstimator, LiveInput, LiveOptions};

/// Time for which a sample counts, unless [`LiveOptions::reach`] is set.
const WINDOW: Duration = Duration::from_secs(60);
/// Number of touched samples from which the slope at the resolution time is estimated.
const RESOLUTION_TOUCHES: f64 = 30.0;
/// Minimum resolution time in seconds: far above that of a trap.
const RESOLUTION_MIN: f64 = 1e-3;
/// 97.5 % quantile of the normal distribution.
const NORMAL: f64 = 1.960;

/// The live estimator of first touches.
#[derive(Debug)]
pub(super) struct FirstTouchCurve {
    window: Duration,
    ram: PageCount,
    ended: VecDeque<FirstTouch>,
    waiting: Vec<FirstTouch>,
    /// Number of the newest of `ended` that belong to the open window.
    open: usize,
    population: u64,
}

impl FirstTouchCurve {
    pub(super) fn new(options: &LiveOptions) -> Self {
        Self {
            window: options.reach.unwrap_or(WINDOW),
            ram: options.ram,
            ended: VecDeque::new(),
            waiting: Vec::new(),
            open: 0,
            population: 0,
        }
    }

    fn add(&mut self, touches: &FirstTouches<'_>) {
        let from = touches.now.saturating_sub(self.window);
        self.ended.retain(|sample| sample.armed >= from);
        let counts = |sample: &&FirstTouch| sample.armed >= from;
        let before = self.ended.len();
        self.ended.extend(touches.ended.iter().filter(counts));
        self.open += self.ended.len() - before;
        self.waiting.clear();
        self.waiting.extend(touches.waiting.iter().filter(counts));
        self.population = touches.population_pages.min(self.ram.0);
    }

    /// The times of all samples that count, rising.
    fn times(&self) -> Vec<Time> {
        let mut times: Vec<_> = self
            .ended
            .iter()
            .chain(&self.waiting)
            .map(Time::of)
            .collect();
        times.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        times
    }
}

impl LiveEstimator for FirstTouchCurve {
    fn observe(&mut self, input: &LiveInput<'_>) {
        if let LiveInput::FirstTouches(touches) = input {
            self.add(touches);
        }
    }

    fn close_window(&mut self, _scale: u64, _seconds: f64) -> Option<MissRatioCurve> {
        self.open = 0;
        self.curve()
    }

    fn discard_window(&mut self) {
        self.ended
            .truncate(self.ended.len().saturating_sub(self.open));
        self.open = 0;
        self.waiting.clear();
    }

    fn curve(&self) -> Option<MissRatioCurve> {
        curve_of(&self.times(), self.population)
    }

    fn recent_curve(&self) -> Option<MissRatioCurve> {
        self.curve()
    }
}

/// The time from a sample's start to its first touch.
#[derive(Debug, Clone, Copy)]
struct Time {
    seconds: f64,
    /// Whether the time is only known to exceed `seconds`.
    is_censored: bool,
}

impl Time {
    fn of(sample: &FirstTouch) -> Self {
        let least = sample.untouched_until.saturating_sub(sample.armed);
        let most = sample.touched_by.map(|by| by.saturating_sub(sample.armed));
        Self {
            seconds: most
                .map_or(least, |most| (least + most.max(least)) / 2)
                .as_secs_f64(),
            is_censored: most.is_none(),
        }
    }
}

/// A corner of a concave distribution function.
#[derive(Debug, Clone, Copy)]
struct Corner {
    seconds: f64,
    share: f64,
}

/// The least concave majorant of the product-limit estimate of rising times.
fn majorant(times: &[Time]) -> Vec<Corner> {
    let mut corners = vec![Corner {
        seconds: 0.0,
        share: 0.0,
    }];
    let mut above = 1.0;
    for (at, time) in times.iter().enumerate() {
        if !time.is_censored {
            above *= 1.0 - 1.0 / (times.len() - at) as f64;
        } else if at + 1 < times.len() {
            continue;
        }
        let next = Corner {
            seconds: time.seconds,
            share: 1.0 - above,
        };
        while let [.., before, last] = corners[..]
            && (last.share - before.share) * (next.seconds - last.seconds)
                <= (next.share - last.share) * (last.seconds - before.seconds)
        {
            corners.pop();
        }
        corners.push(next);
    }
    corners
}

fn curve_of(times: &[Time], population: u64) -> Option<MissRatioCurve> {
    let touched = times.iter().filter(|time| !time.is_censored).count();
    if touched == 0 {
        return None;
    }
    let pages = population as f64;
    let share_min = RESOLUTION_TOUCHES.min(touched as f64 / 2.0) / times.len() as f64;
    let mut points: Vec<CurvePoint> = Vec::new();
    let mut rate = 0.0;
    for pair in majorant(times).windows(2) {
        let [from, to] = [pair[0], pair[1]];
        let slope = (to.share - from.share) / (to.seconds - from.seconds);
        if to.seconds <= RESOLUTION_MIN || to.share < share_min || !slope.is_finite() {
            continue;
        }
        if points.is_empty() {
            rate = slope;
        }
        let miss_ratio = (slope / rate).clamp(0.0, 1.0);
        let events = ((to.share - from.share) * times.len() as f64).max(1.0);
        let error = miss_ratio * NORMAL / events.sqrt();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of the pages"
        )]
        let size = PageCount((from.share * pages).ceil() as u64);
        if points.last().is_some_and(|last| last.size >= size) {
            points.pop();
        }
        points.push(CurvePoint {
            size,
            miss_ratio,
            low: (miss_ratio - error).max(0.0),
            high: (miss_ratio + error).min(1.0),
        });
    }
    let curve = MissRatioCurve::new(points, touched as u64).ok()?;
    Some(curve.with_references_per_second(rate * pages))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(armed_ms: u64, after_ms: u64) -> FirstTouch {
        let touched = Duration::from_millis(armed_ms + after_ms);
        FirstTouch {
            armed: Duration::from_millis(armed_ms),
            untouched_until: touched,
            touched_by: Some(touched),
            pages: 1,
        }
    }

    fn estimator() -> FirstTouchCurve {
        FirstTouchCurve::new(&LiveOptions {
            ram: PageCount(10_000),
            reach: None,
        })
    }

    #[test]
    fn a_loop_is_found_with_its_rate() {
        // 1000 of 4000 pages in turn, every 500 ms; the others are never touched.
        let ended: Vec<_> = (0..500).map(|at| touch(at * 10, at % 500 + 1)).collect();
        let waiting: Vec<_> = (0..1500)
            .map(|at| FirstTouch {
                armed: Duration::from_millis(at),
                untouched_until: Duration::from_secs(10),
                touched_by: None,
                pages: 1,
            })
            .collect();
        let mut estimator = estimator();
        assert!(estimator.curve().is_none());
        estimator.observe(&LiveInput::FirstTouches(FirstTouches {
            ended: &ended,
            waiting: &waiting,
            now: Duration::from_secs(10),
            population_pages: 4000,
        }));
        let curve = estimator.close_window(1, 10.0).unwrap();
        assert!(curve.miss_ratio(PageCount(980)) > 0.999);
        assert_eq!(curve.miss_ratio(PageCount(1000)), 0.0);
        let rate = curve.references_per_second().unwrap();
        assert!((rate - 2000.0).abs() < 20.0, "{rate}");
    }
}
