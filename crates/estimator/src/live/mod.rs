//! Live estimators: curves of a running VM from windows of a sample of its pages.
//!
//! | estimator | input | file |
//! |---|---|---|
//! | `lru` | references in order: exact stack distances, censored at the window's ends | `ordered` |
//! | `aet` | references in order: reuse times and the AET model | `ordered` |
//! | `shards` | references in order from window to window: exact stack distances in a spatial sample | `stream` |
//! | `scans` | pages touched between two scans: the slope of their footprint | `scans` |
//! | `first-touch` | sampled pages, each observed until its first touch: the slope of their distribution | `first_touch` |
//!
//! A window is one period of a tracer. Windows are pooled weighted by the time that each represents and by the references
//! per second that were observed in it, so that the ratio of the whole times the mean rate is the mean of the misses per
//! second. A second is one of the VM as it is without the tracer. A window of unknown observed time is weighted by the time alone, and has no misses per second.
//!
//! A new estimator is one file with an implementation of [`LiveEstimator`] and a row in [`LIVE_ESTIMATORS`].
//! Not here: the schedule of windows, and the selection of sampled pages (crate `plimsoll-trap`).

mod first_touch;
mod ordered;
mod scans;
mod stream;
mod survival;
mod window;

pub use survival::Survival;
pub use window::{WindowAet, WindowLru, aet_curve, lru_curve, working_set};
use window::{WindowClock, WindowStack};

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use plimsoll_flow::{FirstTouches, MissRatioCurve, PageCount, PageNumber, Period};

use first_touch::FirstTouchCurve;
use ordered::PooledEstimator;
use scans::ScanCurve;
use stream::StreamEstimator;

/// An algorithm that computes curves of a VM window by window.
pub trait LiveEstimator: fmt::Debug + Send {
    /// Processes the next observations. Input of another kind than [`LiveEstimatorRow::takes`] is ignored.
    fn observe(&mut self, input: &LiveInput<'_>);

    /// Closes the window and opens the next.
    ///
    /// Returns the curve of the closed window; `None` without a reuse.
    fn close_window(&mut self, window: &LiveWindow) -> Option<MissRatioCurve>;

    /// Discards the observations of the open window, which is incomplete, and opens the next.
    fn discard_window(&mut self);

    /// The curve of all windows closed so far; `None` without a reuse.
    fn curve(&self) -> Option<MissRatioCurve>;

    /// The curve of the newest windows, as far back as [`LiveOptions::reach`].
    fn recent_curve(&self) -> Option<MissRatioCurve>;
}

/// How a window was observed.
#[derive(Debug, Clone, Copy, Default)]
pub struct LiveWindow {
    /// Number of pages that a sampled page represents.
    pub scale: u64,
    /// Number of sampled pages, touched or not; 0 if unknown, and then the band is wider.
    pub tracked: u64,
    /// Time that the window represents, in seconds.
    pub seconds: f64,
    /// Seconds that the VM would have taken undisturbed for what it did while pages were observed; 0.0 if unknown, and then
    /// there are no misses per second.
    pub observed_seconds: f64,
    /// The same at least and at most, which widens the band of misses per second; 0.0 if unknown.
    pub observed_limits: [f64; 2],
    /// References to all pages, sampled or not, by an estimate that does not depend on which are; 0 if there is none.
    pub references_of_all: u64,
    /// References before that time, which do not count in it.
    pub references_before: u64,
    /// The size below which the misses of a memory were not observed: what the hot set holds.
    pub hidden: PageCount,
}

impl LiveWindow {
    /// The window of a period.
    #[must_use]
    pub fn of(period: &Period) -> Self {
        Self {
            scale: u64::from(period.scale),
            tracked: period.tracked_pages,
            seconds: period.length.as_secs_f64(),
            observed_seconds: period.undisturbed.observed.as_secs_f64(),
            observed_limits: period.undisturbed.limits.map(|limit| limit.as_secs_f64()),
            references_of_all: period.scans.touches_of_all,
            references_before: period.undisturbed.references_before,
            hidden: PageCount(period.resolution_pages()),
        }
    }
}

impl LiveWindow {
    /// Factors of a count per second: the limits of the observed time, at most and at least.
    fn rate_limits(&self) -> [f64; 2] {
        let [least, most] = self.observed_limits;
        [most, least].map(|limit| {
            if limit > 0.0 {
                self.observed_seconds / limit
            } else {
                1.0
            }
        })
    }
}

/// Observations of a running VM.
#[derive(Debug, Clone, Copy)]
pub enum LiveInput<'a> {
    /// The next references to sampled pages, in order.
    References(&'a [PageNumber]),
    /// The next references to sampled pages, in order, from window to window.
    Stream {
        /// Their pages.
        pages: &'a [PageNumber],
        /// Whether none was missed between those before and these, and the sample is the same.
        follows: bool,
    },
    /// The pages found touched by one scan, each once.
    Scan(&'a [PageNumber]),
    /// The first touches of one period.
    FirstTouches(FirstTouches<'a>),
}

/// A kind of observations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LiveInputKind {
    /// [`LiveInput::References`].
    References,
    /// [`LiveInput::Stream`].
    Stream,
    /// [`LiveInput::Scan`].
    Scans,
    /// [`LiveInput::FirstTouches`].
    FirstTouches,
}

/// Options of a live estimator.
#[derive(Debug, Clone, Copy)]
pub struct LiveOptions {
    /// RAM of the VM in pages.
    pub ram: PageCount,
    /// Time span of [`LiveEstimator::recent_curve`]; `None` if it is not used, so that nothing is stored for it. It is
    /// also the time for which `first-touch` keeps a sample, with `None` a minute.
    pub reach: Option<Duration>,
}

/// A live estimator that users can select.
#[derive(Debug)]
pub struct LiveEstimatorRow {
    /// Name in options.
    pub name: &'static str,
    /// What it computes, for help.
    pub help: &'static str,
    /// The kind of observations that it processes.
    pub takes: LiveInputKind,
    /// Constructor.
    pub make: fn(&LiveOptions) -> Box<dyn LiveEstimator>,
}

/// Exact stack distances.
pub const LRU: &LiveEstimatorRow = &LiveEstimatorRow {
    name: "lru",
    help: "Exact reuse distances of the traced references",
    takes: LiveInputKind::References,
    make: |options| Box::new(PooledEstimator::<WindowStack>::new(options)),
};

/// The AET model.
pub const AET: &LiveEstimatorRow = &LiveEstimatorRow {
    name: "aet",
    help: "Reuse times and the AET model",
    takes: LiveInputKind::References,
    make: |options| Box::new(PooledEstimator::<WindowClock>::new(options)),
};

/// Stack distances in a spatial sample that is observed without interruption.
pub const SHARDS: &LiveEstimatorRow = &LiveEstimatorRow {
    name: "shards",
    help: "Exact reuse distances of sampled pages, from window to window",
    takes: LiveInputKind::Stream,
    make: |options| Box::new(StreamEstimator::new(options)),
};

/// The footprint of scans.
pub const SCANS: &LiveEstimatorRow = &LiveEstimatorRow {
    name: "scans",
    help: "Footprint of the pages touched between scans",
    takes: LiveInputKind::Scans,
    make: |options| Box::new(ScanCurve::new(options)),
};

/// The distribution of first touches.
pub const FIRST_TOUCH: &LiveEstimatorRow = &LiveEstimatorRow {
    name: "first-touch",
    help: "Footprint of sampled pages that are each observed until their first touch",
    takes: LiveInputKind::FirstTouches,
    make: |options| Box::new(FirstTouchCurve::new(options)),
};

/// All live estimators; the first one that accepts a backend's kind of observations is the default.
pub const LIVE_ESTIMATORS: &[&LiveEstimatorRow] = &[LRU, AET, SHARDS, SCANS, FIRST_TOUCH];

/// The curve from the size `hidden` on: of smaller memories nothing is known.
fn from_hidden(curve: MissRatioCurve, hidden: PageCount) -> MissRatioCurve {
    let rest = curve.points().iter().filter(|point| point.size > hidden);
    let points = std::iter::once(curve.at(hidden)).chain(rest.copied());
    curve.with_points(points.collect()).unwrap_or(curve)
}

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
    use crate::parts::streams::Random;

    fn options(reach_s: Option<u64>) -> LiveOptions {
        LiveOptions {
            ram: PageCount(10_000),
            reach: reach_s.map(Duration::from_secs),
        }
    }

    fn window(seconds: f64) -> LiveWindow {
        LiveWindow {
            scale: 1,
            tracked: 0,
            seconds,
            observed_seconds: seconds,
            hidden: PageCount(0),
            ..LiveWindow::default()
        }
    }

    /// The estimators that pool windows. The other one is rolling.
    fn pooling() -> impl Iterator<Item = &'static &'static LiveEstimatorRow> {
        let is_pooling = |row: &&&LiveEstimatorRow| row.takes != LiveInputKind::FirstTouches;
        LIVE_ESTIMATORS.iter().filter(is_pooling)
    }

    fn observe_all<'a>(
        estimator: &mut dyn LiveEstimator,
        kind: LiveInputKind,
        chunks: impl Iterator<Item = &'a [PageNumber]>,
    ) {
        for pages in chunks {
            estimator.observe(&match kind {
                LiveInputKind::Scans => LiveInput::Scan(pages),
                LiveInputKind::Stream => LiveInput::Stream {
                    pages,
                    follows: true,
                },
                _ => LiveInput::References(pages),
            });
        }
    }

    /// Three windows of loops over 1000, 1000 and 3000 pages.
    fn observe(
        estimator: &mut dyn LiveEstimator,
        kind: LiveInputKind,
    ) -> Vec<Option<MissRatioCurve>> {
        let windows = [1000, 1000, 3000].map(|size: u64| {
            let pages: Vec<_> = (0..size).cycle().take(10_000).map(PageNumber).collect();
            // A scan lists each page once.
            observe_all(estimator, kind, pages.chunks(100));
            estimator.close_window(&window(5.0))
        });
        windows.into_iter().collect()
    }

    #[test]
    fn every_estimator_finds_a_loop_and_pools_windows_by_their_time() {
        for row in pooling() {
            let mut estimator = (row.make)(&options(Some(5)));
            assert!(estimator.curve().is_none(), "{}", row.name);
            assert!(estimator.recent_curve().is_none(), "{}", row.name);
            let windows = observe(&mut *estimator, row.takes);
            let first = windows[0].as_ref().unwrap();
            assert!(first.miss_ratio(PageCount(900)) > 0.9, "{}", row.name);
            assert!(first.miss_ratio(PageCount(1050)) < 0.1, "{}", row.name);
            // Two windows of three fit into 1000 pages. The AET model mixes their times, so the size between the two
            // cannot be chosen freely.
            let whole = estimator.curve().unwrap().miss_ratio(PageCount(1500));
            assert!((whole - 1.0 / 3.0).abs() < 0.1, "{}: {whole}", row.name);
            let recent = estimator.recent_curve().unwrap();
            // A stream has seen a tenth of the last loop's references before.
            let least = match row.takes {
                LiveInputKind::Stream => 0.89,
                _ => 0.9,
            };
            assert!(recent.miss_ratio(PageCount(1500)) > least, "{}", row.name);
        }
    }

    /// Curve of two windows, each of another sample of one page in 16 unless it is a stream, of a VM that refers to `pages` pages evenly.
    fn curve_of_even_references(row: &LiveEstimatorRow, pages: u64, seed: u64) -> MissRatioCurve {
        let mut random = Random::new(seed);
        let mut estimator = (row.make)(&options(None));
        let mut is_sampled = Vec::new();
        for _ in 0..2 {
            if is_sampled.is_empty() || row.takes != LiveInputKind::Stream {
                is_sampled = (0..pages)
                    .map(|_| random.next().is_multiple_of(16))
                    .collect();
            }
            // Seven pages in eight are found touched at the end, a hundredth between two scans.
            for _ in 0..200 {
                let references = (0..pages / 100).map(|_| random.next() % pages);
                let sampled = references.filter(|&page| is_sampled[page as usize]);
                let mut seen: Vec<_> = sampled.map(PageNumber).collect();
                if row.takes == LiveInputKind::Scans {
                    seen.sort_unstable();
                    seen.dedup();
                }
                observe_all(&mut *estimator, row.takes, std::iter::once(&*seen));
            }
            estimator.close_window(&LiveWindow {
                scale: 16,
                tracked: is_sampled.iter().filter(|&&sampled| sampled).count() as u64,
                ..window(5.0)
            });
        }
        estimator.curve().unwrap()
    }

    #[test]
    fn quotients_of_misses_are_known_better_than_the_misses() {
        let pages = 8192;
        for row in pooling() {
            let (mut held, mut all, mut widths) = (0, 0, [0.0, 0.0]);
            for seed in 0..20 {
                let curve = curve_of_even_references(row, pages, seed);
                let without = curve.clone().with_log_errors(Vec::new());
                for baseline in [0.5, 0.65, 0.75] {
                    for below in [0.6, 0.9, 0.97] {
                        let baseline = PageCount(pages).scaled(baseline);
                        let size = baseline.scaled(below);
                        let missed = |size: PageCount| (pages - size.0) as f64;
                        let truth = missed(size) / missed(baseline);
                        let band = curve.quotient_band(size, baseline, 1e-3);
                        held += u32::from(band.contains(&truth));
                        all += 1;
                        widths[0] += band.end() - band.start();
                        let band = without.quotient_band(size, baseline, 1e-3);
                        widths[1] += band.end() - band.start();
                    }
                }
            }
            assert!(held * 100 >= all * 95, "{}: {held} of {all}", row.name);
            assert!(widths[0] < widths[1] / 2.0, "{}: {widths:?}", row.name);
        }
    }

    #[test]
    fn the_misses_left_where_windows_end_are_not_known() {
        for row in pooling() {
            let curve = curve_of_even_references(row, 8192, 1);
            let last = *curve.points().last().unwrap();
            assert_eq!(last.low, 0.0, "{}: {last:?}", row.name);
            let known = curve.log_errors().len();
            assert!(
                0 < known && known < curve.points().len(),
                "{}: {known}",
                row.name
            );
        }
    }

    #[test]
    fn misses_per_second_are_counts_over_the_time_and_an_idle_window_has_none() {
        for row in pooling() {
            let mut estimator = (row.make)(&options(None));
            let windows = observe(&mut *estimator, row.takes);
            let misses =
                |curve: &MissRatioCurve, size| curve.misses_per_second(PageCount(size)).unwrap();
            // Of 10 000 references in 5 s.
            let all = misses(windows[0].as_ref().unwrap(), 900);
            assert!(
                (all.expected - 2000.0).abs() < 200.0,
                "{}: {all:?}",
                row.name
            );
            let whole = misses(&estimator.curve().unwrap(), 1500).expected;
            assert!(
                (whole - 2000.0 / 3.0).abs() < 200.0,
                "{}: {whole}",
                row.name
            );
            estimator.close_window(&window(15.0));
            let half = misses(&estimator.curve().unwrap(), 1500).expected;
            assert!(
                (half / whole - 0.5).abs() < 1e-9,
                "{}: {half} {whole}",
                row.name
            );
        }
    }

    /// References of two classes, of which a hot set of so many pages lets through what it does not hold.
    fn behind_a_hot_set(hot_set: usize) -> Vec<PageNumber> {
        let mut random = Random::new(3);
        let mut held = VecDeque::new();
        let mut seen = Vec::new();
        for _ in 0..200_000 {
            let is_hot = random.next() % 10 < 6;
            let page = if is_hot {
                random.next() % 1000
            } else {
                1000 + random.next() % 3000
            };
            if !held.contains(&page) {
                held.push_back(page);
                if held.len() > hot_set {
                    held.pop_front();
                }
                seen.push(PageNumber(page));
            }
        }
        seen
    }

    #[test]
    fn misses_per_second_do_not_move_with_the_hot_set_and_ratios_do() {
        for row in [LRU, AET] {
            let curves = [16, 200].map(|hot_set| {
                let mut estimator = (row.make)(&options(None));
                estimator.observe(&LiveInput::References(&behind_a_hot_set(hot_set)));
                estimator.close_window(&window(10.0)).unwrap()
            });
            for size in [500, 1000, 2000, 3000] {
                let size = PageCount(size);
                let [few, many] = curves
                    .each_ref()
                    .map(|curve| curve.misses_per_second(size).unwrap());
                let moved = (few.expected / many.expected - 1.0).abs();
                assert!(moved < 0.05, "{} at {size}: {few:?} {many:?}", row.name);
                assert!(
                    few.low <= many.expected && many.expected <= few.high,
                    "{}",
                    row.name
                );
                let [few, many] = curves.each_ref().map(|curve| curve.miss_ratio(size));
                assert!(many / few > 1.05, "{} at {size}: {few} {many}", row.name);
            }
        }
    }

    #[test]
    fn a_window_that_is_discarded_leaves_nothing() {
        for row in pooling() {
            let mut estimator = (row.make)(&options(None));
            let pages: Vec<_> = (0..100).cycle().take(400).map(PageNumber).collect();
            observe_all(&mut *estimator, row.takes, pages.chunks(50));
            estimator.discard_window();
            assert!(
                estimator.close_window(&window(1.0)).is_none(),
                "{}",
                row.name
            );
            assert!(estimator.curve().is_none(), "{}", row.name);
        }
    }

    #[test]
    fn a_curve_begins_at_the_size_that_is_hidden() {
        for row in pooling() {
            let mut estimator = (row.make)(&options(Some(5)));
            let pages: Vec<_> = (0..3000).cycle().take(10_000).map(PageNumber).collect();
            observe_all(&mut *estimator, row.takes, pages.chunks(100));
            let hidden = PageCount(500);
            let window = LiveWindow {
                hidden,
                ..window(5.0)
            };
            let curves = [
                estimator.close_window(&window),
                estimator.curve(),
                estimator.recent_curve(),
            ];
            for curve in curves {
                let first = curve.unwrap().points()[0];
                assert_eq!(
                    (first.size, first.miss_ratio),
                    (hidden, 1.0),
                    "{}",
                    row.name
                );
            }
        }
    }

    #[test]
    fn what_no_window_resolves_may_miss_or_not() {
        let mut estimator = (LRU.make)(&options(None));
        // Every other reference is to a page that is never used again.
        let pages = (0..20_000).map(|at| PageNumber(if at % 2 == 0 { at % 200 } else { at }));
        estimator.observe(&LiveInput::References(&pages.collect::<Vec<_>>()));
        let curve = estimator.close_window(&window(5.0)).unwrap();
        let resolved = curve.at(PageCount(50));
        assert!(resolved.low > 0.9, "{resolved:?}");
        let beyond = curve.at(PageCount(5000));
        assert!(beyond.low == 0.0 && beyond.miss_ratio > 0.4, "{beyond:?}");
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = LIVE_ESTIMATORS.iter().map(|row| row.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), LIVE_ESTIMATORS.len());
    }
}
