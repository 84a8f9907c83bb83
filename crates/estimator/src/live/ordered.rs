//! Live curves of ordered references: windows of exact distances, or of reuse times, pooled.
//!
//! The estimators of single windows are in `window`. Each window is resolved separately before it is pooled, because
//! the VM may be in another phase in the next one.

use plimsoll_flow::{CurvePoint, MissRatioCurve, MissesPerSecond, PageCount};

use super::{LiveEstimator, LiveInput, LiveOptions, LiveWindow, Recent, from_hidden};
use crate::live::survival::Survival;
use crate::live::window::{PartOfWindow, Window};
use crate::parts::log_errors::with_model_error;

/// Error of the ratio at the hidden size, at most, as measured (`window`); at twice that size there is none.
const HOT_SET_EXCESS: f64 = 0.13;
/// Number of steps in which it is taken back.
const HOT_SET_STEPS: u64 = 8;

/// An estimator of windows, with the pooled results of all windows so far.
#[derive(Debug)]
pub(super) struct PooledEstimator<P> {
    pub(super) window: Window<P>,
    pooled: Pooled,
    recent: Recent<(Survival, PageCount)>,
}

/// The results of windows.
#[derive(Debug, Default)]
struct Pooled {
    survival: Survival,
    /// The largest size that any of them hides: below, some of the misses were not observed.
    hidden: PageCount,
}

impl Pooled {
    fn pool(&mut self, (window, hidden): &(Survival, PageCount), seconds: f64) {
        self.survival.pool(window, seconds);
        if !window.is_empty() {
            self.hidden = self.hidden.max(*hidden);
        }
    }

    /// The curve; `None` without a reuse.
    fn curve<P: PartOfWindow>(&self) -> Option<MissRatioCurve> {
        if self.survival.events() == 0 {
            return None;
        }
        let curve = P::curve(&self.survival).ok()?;
        widened(&from_hidden(curve, self.hidden))
    }
}

/// Lowers the lower limits where the spread of the parts does not show the error: beyond the last size that a window
/// resolved, from which on the curve is flat, and up to twice the hidden size, with which it begins, because a hot set
/// evicts pages that LRU would keep.
fn widened(curve: &MissRatioCurve) -> Option<MissRatioCurve> {
    let (first, last) = (curve.points().first()?, curve.points().last()?);
    let hidden = first.size.0 as f64;
    let steps = 1..=HOT_SET_STEPS;
    let mut sizes: Vec<PageCount> = steps
        .map(|step| PageCount(first.size.0 + first.size.0 * step / HOT_SET_STEPS))
        .collect();
    sizes.extend(curve.points().iter().map(|point| point.size));
    sizes.retain(|&size| size <= last.size);
    sizes.sort_unstable();
    sizes.dedup();
    let excess = |point: &CurvePoint| {
        let size = point.size.0 as f64;
        if point.miss_ratio <= last.miss_ratio {
            point.miss_ratio
        } else if hidden > 0.0 && size < 2.0 * hidden {
            HOT_SET_EXCESS * (2.0 - size / hidden)
        } else {
            0.0
        }
    };
    // Share of the misses that is left without them.
    let left = |point: &CurvePoint| (1.0 - excess(point) / point.miss_ratio.max(1e-9)).max(0.0);
    let points = sizes.iter().map(|&size| {
        let point = CurvePoint {
            size,
            ..curve.at(size)
        };
        let low = point.low.min(point.miss_ratio - excess(&point)).max(0.0);
        let misses = point.misses.map(|misses| MissesPerSecond {
            low: misses.low.min(misses.expected * left(&point)),
            ..misses
        });
        CurvePoint {
            low,
            misses,
            ..point
        }
    });
    let widened = curve.with_points(points.collect()).ok()?;
    let known = widened.log_errors().iter().zip(widened.points());
    let known = known.take_while(|(_, point)| point.miss_ratio > last.miss_ratio);
    let errors = known.map(|(&errors, point)| with_model_error(errors, left(point)));
    let errors = errors.collect();
    Some(widened.with_log_errors(errors))
}

impl<P: PartOfWindow> PooledEstimator<P> {
    pub(super) fn new(options: &LiveOptions) -> Self {
        Self {
            window: Window::new(),
            pooled: Pooled::default(),
            recent: Recent::new(options.reach),
        }
    }
}

impl<P: PartOfWindow> LiveEstimator for PooledEstimator<P> {
    fn observe(&mut self, input: &LiveInput<'_>) {
        if let LiveInput::References(pages) = input {
            self.window.observe(pages);
        }
    }

    fn close_window(&mut self, window: &LiveWindow) -> Option<MissRatioCurve> {
        let survival = self.window.close(window).without_thin_tail();
        let resolved = (survival.resolved(), window.hidden);
        self.pooled.pool(&resolved, window.seconds);
        self.recent.push(|| resolved, window.seconds);
        let hidden = window.hidden;
        Pooled { survival, hidden }.curve::<P>()
    }

    fn discard_window(&mut self) {
        self.window = Window::new();
    }

    fn curve(&self) -> Option<MissRatioCurve> {
        self.pooled.curve::<P>()
    }

    fn recent_curve(&self) -> Option<MissRatioCurve> {
        let mut pooled = Pooled::default();
        for (window, seconds) in self.recent.windows() {
            pooled.pool(window, seconds);
        }
        pooled.curve::<P>()
    }
}
