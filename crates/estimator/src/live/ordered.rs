//! Live curves of ordered references: windows of exact distances, or of reuse times, pooled.
//!
//! The estimators of single windows are in `window`. Each window is resolved separately before it is pooled, because
//! the VM may be in another phase in the next one.

use plimsoll_flow::MissRatioCurve;

use super::{LiveEstimator, LiveInput, LiveOptions, LiveWindow, Recent};
use crate::live::survival::Survival;
use crate::live::window::{PartOfWindow, Window};

/// An estimator of windows, with the pooled results of all windows so far.
#[derive(Debug)]
pub(super) struct PooledEstimator<P> {
    window: Window<P>,
    pooled: Survival,
    recent: Recent<Survival>,
}

impl<P: PartOfWindow> PooledEstimator<P> {
    pub(super) fn new(options: &LiveOptions) -> Self {
        Self {
            window: Window::new(),
            pooled: Survival::new(),
            recent: Recent::new(options.reach),
        }
    }
}

/// The curve; `None` without a reuse.
fn curve_of<P: PartOfWindow>(survival: &Survival) -> Option<MissRatioCurve> {
    if survival.events() == 0 {
        return None;
    }
    P::curve(survival).ok()
}

impl<P: PartOfWindow> LiveEstimator for PooledEstimator<P> {
    fn observe(&mut self, input: &LiveInput<'_>) {
        if let LiveInput::References(pages) = input {
            self.window.observe(pages);
        }
    }

    fn close_window(&mut self, window: &LiveWindow) -> Option<MissRatioCurve> {
        let survival = self.window.finish(window.scale).timed(window);
        let resolved = survival.resolved();
        self.pooled.pool(&resolved, window.seconds);
        self.recent.push(|| resolved, window.seconds);
        curve_of::<P>(&survival)
    }

    fn discard_window(&mut self) {
        self.window = Window::new();
    }

    fn curve(&self) -> Option<MissRatioCurve> {
        curve_of::<P>(&self.pooled)
    }

    fn recent_curve(&self) -> Option<MissRatioCurve> {
        let mut pooled = Survival::new();
        for (window, seconds) in self.recent.windows() {
            pooled.pool(window, seconds);
        }
        curve_of::<P>(&pooled)
    }
}
