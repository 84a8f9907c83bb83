//! The curve of a VM of which hardly any touches were observed, or that touches fewer pages in all the time observed than
//! the resolution needs.
//!
//! That nothing is touched is an observation too. If n samples were observed for at least a time t and d of them were
//! touched within it, then at most the upper limit of d / n of the pages are. A memory of so many misses what is touched
//! after t, at the slope there, which is at most the mean one between t / 2 and t because slopes fall: the touches in between
//! over the time for which samples waited in between. So the curve has one point, for half of the longest wait, below
//! which nothing is resolved and beyond which nothing is known but that misses do not rise.
//!
//! **Band.** The upper limits are those of numbers of independent touches: see [`count_max`].

use plimsoll_flow::{CurvePoint, MissRatioCurve, MissesPerSecond, PageCount, Whole as _};

use super::cells::Time;
use super::{RESOLUTION_SHARE, RULE_OF_THREE, touches};
use crate::parts::steps::NORMAL;

/// The curve of a VM with `population` pages that takes `busy` seconds of CPU time a second; `None` if no sample waited.
pub(super) fn curve(times: &[Time], population: u64, busy: f64) -> Option<MissRatioCurve> {
    let end = |time: &Time| time.upto.unwrap_or(time.above);
    let longest = times.iter().map(end).fold(0.0, f64::max);
    let at = longest / 2.0;
    let touched = |from: f64, to: f64| {
        let touches = times.iter().filter(|time| {
            let may_be = |upto: f64| from < upto && time.above < to;
            time.upto.is_some_and(may_be)
        });
        touches.count() as f64
    };
    let waited = |from: f64, to: f64| {
        let waits = times
            .iter()
            .map(|time| (time.above.min(to) - from).max(0.0));
        waits.sum::<f64>()
    };
    let is_observed = |time: &&Time| time.upto.is_some() || time.above >= at;
    let observed = times.iter().filter(is_observed).count() as f64;
    let share = (count_max(touched(0.0, at)) / observed).clamp(RESOLUTION_SHARE, 1.0);
    let from = at / 2.0;
    let expected = touched(from, f64::INFINITY) / waited(from, f64::INFINITY);
    let high = count_max(touched(from, at)) / waited(from, at);
    let misses = MissesPerSecond {
        expected,
        low: 0.0,
        high: high.max(expected),
    };
    let point = CurvePoint {
        size: PageCount(u64::whole((share * population as f64).ceil())),
        // All that is not hidden by the resolution misses here.
        miss_ratio: if expected > 0.0 { 1.0 } else { 0.0 },
        low: 0.0,
        high: 1.0,
        misses: Some(misses.scaled(population as f64 * busy)),
    };
    MissRatioCurve::new(vec![point], touches(times)).ok()
}

/// The upper limit of the mean of a Poisson distribution of which a number was drawn: for 0 the rule of three.
fn count_max(count: f64) -> f64 {
    count + NORMAL * count.sqrt() + RULE_OF_THREE
}
