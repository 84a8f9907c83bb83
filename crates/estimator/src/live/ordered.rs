//! Live curves of ordered references: windows of exact distances, or of reuse times, pooled.
//!
//! The estimators of single windows are in `window`. Each window is resolved separately before it is pooled, because
//! the VM may be in another phase in the next one.

use std::fmt;

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use super::{LiveEstimator, LiveInput, LiveOptions, Recent};
use crate::live::survival::Survival;
use crate::live::window::{WindowAet, WindowLru, aet_curve, lru_curve};

/// An estimator of single windows.
pub(super) trait Window: Default + fmt::Debug + Send {
    fn observe(&mut self, pages: &[PageNumber]);
    fn finish(&mut self, scale: u64) -> Survival;
    fn curve_of(survival: &Survival) -> Result<MissRatioCurve, CurveError>;
}

impl Window for WindowLru {
    fn observe(&mut self, pages: &[PageNumber]) {
        Self::observe(self, pages);
    }

    fn finish(&mut self, scale: u64) -> Survival {
        Self::finish(self, scale)
    }

    fn curve_of(survival: &Survival) -> Result<MissRatioCurve, CurveError> {
        lru_curve(survival)
    }
}

impl Window for WindowAet {
    fn observe(&mut self, pages: &[PageNumber]) {
        Self::observe(self, pages);
    }

    fn finish(&mut self, scale: u64) -> Survival {
        Self::finish(self, scale)
    }

    fn curve_of(survival: &Survival) -> Result<MissRatioCurve, CurveError> {
        aet_curve(survival)
    }
}

/// An estimator of windows, with the pooled results of all windows so far.
#[derive(Debug)]
pub(super) struct PooledEstimator<W> {
    window: W,
    pooled: Survival,
    recent: Recent<Survival>,
}

impl<W: Window> PooledEstimator<W> {
    pub(super) fn new(options: &LiveOptions) -> Self {
        Self {
            window: W::default(),
            pooled: Survival::new(),
            recent: Recent::new(options.reach),
        }
    }
}

/// The curve; `None` without a reuse.
fn curve_of<W: Window>(survival: &Survival) -> Option<MissRatioCurve> {
    if survival.events() == 0 {
        return None;
    }
    W::curve_of(survival).ok()
}

impl<W: Window> LiveEstimator for PooledEstimator<W> {
    fn observe(&mut self, input: &LiveInput<'_>) {
        if let LiveInput::References(pages) = input {
            self.window.observe(pages);
        }
    }

    fn close_window(&mut self, scale: u64, seconds: f64) -> Option<MissRatioCurve> {
        let survival = self.window.finish(scale);
        let resolved = survival.resolved();
        self.pooled.merge(&resolved, seconds);
        self.recent.push(|| resolved, seconds);
        curve_of::<W>(&survival)
    }

    fn discard_window(&mut self) {
        self.window = W::default();
    }

    fn curve(&self) -> Option<MissRatioCurve> {
        curve_of::<W>(&self.pooled)
    }

    fn recent_curve(&self) -> Option<MissRatioCurve> {
        let mut pooled = Survival::new();
        for (window, seconds) in self.recent.windows() {
            pooled.merge(window, seconds);
        }
        curve_of::<W>(&pooled)
    }
}
