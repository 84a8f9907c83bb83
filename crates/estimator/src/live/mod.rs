//! Live estimators: curves of a running VM from windows of a sample of its pages.
//!
//! | estimator | input | file |
//! |---|---|---|
//! | `lru` | references in order: exact stack distances, censored at the window's ends | `ordered` |
//! | `aet` | references in order: reuse times and the AET model | `ordered` |
//! | `scans` | pages touched between two scans: the slope of their footprint | `scans` |
//!
//! A window is one period of a tracer. Windows are pooled weighted by the time that each represents, because the number
//! of references that a VM made in it cannot be known from outside.
//!
//! A new estimator is one file with an implementation of [`LiveEstimator`] and a row in [`LIVE_ESTIMATORS`].
//! Not here: the schedule of windows, and the selection of sampled pages (crate `plimsoll-trap`).

mod ordered;
mod scans;
mod survival;
mod window;

pub use survival::Survival;
pub use window::{WindowAet, WindowLru, aet_curve, lru_curve, working_set};

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use plimsoll_flow::{MissRatioCurve, PageCount, PageNumber};

use ordered::Pooled;
use scans::ScanCurve;

/// An algorithm that computes curves of a VM window by window.
pub trait LiveEstimator: fmt::Debug + Send {
    /// Processes the next references to sampled pages, or the pages found touched by one scan.
    fn observe(&mut self, pages: &[PageNumber]);

    /// Closes the window, in which a sampled page represents `scale` pages and which represents `seconds`, and opens
    /// the next.
    ///
    /// Returns the curve of the closed window; `None` without a reuse.
    fn close_window(&mut self, scale: u64, seconds: f64) -> Option<MissRatioCurve>;

    /// Discards the observations of the open window, which is incomplete, and opens the next.
    fn discard_window(&mut self);

    /// The curve of all windows closed so far; `None` without a reuse.
    fn curve(&self) -> Option<MissRatioCurve>;

    /// The curve of the newest windows, as far back as [`LiveOptions::reach`].
    fn recent_curve(&self) -> Option<MissRatioCurve>;
}

/// Options of a live estimator.
#[derive(Debug, Clone, Copy)]
pub struct LiveOptions {
    /// RAM of the VM in pages.
    pub ram: PageCount,
    /// Time span of [`LiveEstimator::recent_curve`]; `None` if it is not used, so that nothing is stored for it.
    pub reach: Option<Duration>,
}

/// A live estimator that users can select.
#[derive(Debug)]
pub struct LiveEstimatorRow {
    /// Name in options.
    pub name: &'static str,
    /// What it computes, for help.
    pub help: &'static str,
    /// Whether it takes references in order; otherwise scans.
    pub is_ordered: bool,
    /// Constructor.
    pub make: fn(&LiveOptions) -> Box<dyn LiveEstimator>,
}

/// Exact stack distances.
pub const LRU: &LiveEstimatorRow = &LiveEstimatorRow {
    name: "lru",
    help: "Exact reuse distances of the traced references",
    is_ordered: true,
    make: |options| Box::new(Pooled::<WindowLru>::new(options)),
};

/// The AET model.
pub const AET: &LiveEstimatorRow = &LiveEstimatorRow {
    name: "aet",
    help: "Reuse times and the AET model",
    is_ordered: true,
    make: |options| Box::new(Pooled::<WindowAet>::new(options)),
};

/// The footprint of scans.
pub const SCANS: &LiveEstimatorRow = &LiveEstimatorRow {
    name: "scans",
    help: "Footprint of the pages touched between scans",
    is_ordered: false,
    make: |options| Box::new(ScanCurve::new(options)),
};

/// All live estimators; the first one that accepts a backend's kind of references is the default.
pub const LIVE_ESTIMATORS: &[&LiveEstimatorRow] = &[LRU, AET, SCANS];

/// Results of the newest windows, with their lengths in seconds.
#[derive(Debug)]
struct Recent<T> {
    reach: Option<Duration>,
    windows: VecDeque<(T, f64)>,
}

impl<T> Recent<T> {
    fn new(reach: Option<Duration>) -> Self {
        Self {
            reach,
            windows: VecDeque::new(),
        }
    }

    /// Appends a window and drops those that are out of reach.
    fn push(&mut self, newest: impl FnOnce() -> T, seconds: f64) {
        let Some(reach) = self.reach else {
            return;
        };
        self.windows.push_back((newest(), seconds));
        let mut kept: f64 = self.windows.iter().map(|(_, seconds)| seconds).sum();
        while let Some((_, oldest)) = self.windows.front()
            && kept - oldest >= reach.as_secs_f64()
        {
            kept -= oldest;
            self.windows.pop_front();
        }
    }

    fn windows(&self) -> impl Iterator<Item = (&T, f64)> {
        self.windows
            .iter()
            .map(|(window, seconds)| (window, *seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(reach_s: Option<u64>) -> LiveOptions {
        LiveOptions {
            ram: PageCount(10_000),
            reach: reach_s.map(Duration::from_secs),
        }
    }

    /// Three windows of loops over 1000, 1000 and 3000 pages.
    fn observe(estimator: &mut dyn LiveEstimator) -> Vec<Option<MissRatioCurve>> {
        let windows = [1000, 1000, 3000].map(|size: u64| {
            let pages: Vec<_> = (0..size).cycle().take(10_000).map(PageNumber).collect();
            // A scan lists each page once.
            pages.chunks(100).for_each(|pages| estimator.observe(pages));
            estimator.close_window(1, 5.0)
        });
        windows.into_iter().collect()
    }

    #[test]
    fn every_estimator_finds_a_loop_and_pools_windows_by_their_time() {
        for row in LIVE_ESTIMATORS {
            let mut estimator = (row.make)(&options(Some(5)));
            assert!(estimator.curve().is_none(), "{}", row.name);
            assert!(estimator.recent_curve().is_none(), "{}", row.name);
            let windows = observe(&mut *estimator);
            let first = windows[0].as_ref().unwrap();
            assert!(first.miss_ratio(PageCount(900)) > 0.9, "{}", row.name);
            assert!(first.miss_ratio(PageCount(1050)) < 0.1, "{}", row.name);
            // Two windows of three fit into 1000 pages. The AET model mixes their times, so the size between the two
            // cannot be chosen freely.
            let whole = estimator.curve().unwrap().miss_ratio(PageCount(1500));
            assert!((whole - 1.0 / 3.0).abs() < 0.1, "{}: {whole}", row.name);
            let recent = estimator.recent_curve().unwrap();
            assert!(recent.miss_ratio(PageCount(1500)) > 0.9, "{}", row.name);
        }
    }

    #[test]
    fn a_window_that_is_discarded_leaves_nothing() {
        for row in LIVE_ESTIMATORS {
            let mut estimator = (row.make)(&options(None));
            let pages: Vec<_> = (0..100).cycle().take(400).map(PageNumber).collect();
            pages.chunks(50).for_each(|pages| estimator.observe(pages));
            estimator.discard_window();
            assert!(estimator.close_window(1, 1.0).is_none(), "{}", row.name);
            assert!(estimator.curve().is_none(), "{}", row.name);
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = LIVE_ESTIMATORS.iter().map(|row| row.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), LIVE_ESTIMATORS.len());
    }
}
