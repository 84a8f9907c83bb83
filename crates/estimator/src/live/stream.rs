//! Curves of references that are observed without interruption: SHARDS on a live stream.
//!
//! The sample is spatial and every reference to its pages is seen, so one stack is kept from window to window, and reuses are
//! resolved however long they take. A window's references are those between two closings. A page that the stack does not have was used
//! before the stream began, or never: that its distance is more than the pages in the stack is all that is known, as in `window`,
//! which has the estimate and its band. In contrast to offline SHARDS, first references are therefore no misses.
//!
//! **Count.** Where a few pages have most of the references, a sample has too many of them or too few by whether those pages are in it.
//! If it is known how many references there were to all pages, the missing ones are added as hits at every size, and those too many are taken
//! from the shortest distances ([Waldspurger15] §3.4), in each part of the band too.
//!
//! After a gap the stack begins anew; the distances before it stand. It holds at most [`PAGES_MAX`] pages, of which the half that was used
//! longest ago is dropped then.
//!
//! Source: \[Waldspurger15\] §3; [KM58] for what is not resolved.
//! Cost: twice the work of a stack per reference; 100 bytes a sampled page, at most 25 MB.
//! Not here: the selection of sampled pages.

use plimsoll_flow::{MissRatioCurve, PageCount, PageNumber, Whole as _};

use super::ordered::PooledEstimator;
use super::survival::Survival;
use super::window::{PartOfWindow, lru_curve, sizes_needed};
use super::{LiveEstimator, LiveInput, LiveOptions, LiveWindow};
use crate::curve::lru::{LruStack, count_reuse};

/// Most pages of a stack: with one page in 512, those of half a terabyte.
const PAGES_MAX: u64 = 1 << 18;

/// A stack that stays from window to window, and the distances in the present one.
#[derive(Debug, Clone, Default)]
struct StreamStack {
    stack: LruStack,
    /// References by reuse distance.
    reuses: Vec<u64>,
    /// Pages in the stack before each first reference.
    firsts: Vec<u64>,
    /// References that there should be in this window; `None` if that is not known.
    expected: Option<u64>,
    /// Most pages of the stack.
    pages_max: u64,
}

impl StreamStack {
    /// Forgets everything.
    fn discard(&mut self) {
        self.stack.clear();
        self.reuses.clear();
        self.firsts.clear();
        self.expected = None;
    }

    /// Drops the pages that were used longest ago.
    fn halve(&mut self) {
        let pages = self.stack.in_order();
        self.stack.clear();
        for &page in &pages[pages.len() / 2..] {
            self.stack.touch(page);
        }
    }

    /// Takes references too many from the shortest distances; returns how many are missing.
    fn correct(&mut self) -> u64 {
        let seen = self.firsts.len() as u64 + self.reuses.iter().sum::<u64>();
        let expected = self.expected.take().unwrap_or(seen);
        let mut excess = seen.saturating_sub(expected);
        for reuses in &mut self.reuses {
            let taken = excess.min(*reuses);
            (*reuses, excess) = (*reuses - taken, excess - taken);
        }
        expected.saturating_sub(seen)
    }
}

impl PartOfWindow for StreamStack {
    fn observe(&mut self, page: PageNumber) {
        if self.stack.distinct() >= self.pages_max {
            self.halve();
        }
        let before = self.stack.distinct();
        match self.stack.touch(page) {
            Some(distance) => count_reuse(&mut self.reuses, distance),
            None => self.firsts.push(before),
        }
    }

    fn pages(&self) -> u64 {
        self.stack.distinct()
    }

    fn finish(&mut self, scale: u64) -> Survival {
        let missing = self.correct();
        let mut survival = sizes_needed(&self.reuses, scale);
        if missing > 0 {
            survival.record_repeatedly(1, 1.0, missing);
        }
        for before in self.firsts.drain(..) {
            survival.record_censored(before.saturating_mul(scale), 1.0);
        }
        self.reuses.clear();
        survival
    }

    fn curve(windows: &Survival) -> Result<MissRatioCurve, plimsoll_flow::CurveError> {
        lru_curve(windows)
    }
}

/// The estimator `shards` of a live stream.
#[derive(Debug)]
pub(super) struct StreamEstimator(PooledEstimator<StreamStack>);

impl StreamEstimator {
    pub(super) fn new(options: &LiveOptions) -> Self {
        let mut pooled = PooledEstimator::<StreamStack>::new(options);
        for (part, share) in pooled.window.shares() {
            part.pages_max = PageCount(PAGES_MAX).scaled(share).0;
        }
        Self(pooled)
    }
}

impl LiveEstimator for StreamEstimator {
    fn observe(&mut self, input: &LiveInput<'_>) {
        if let LiveInput::Stream { pages, follows } = *input {
            if !follows {
                for (part, _) in self.0.window.shares() {
                    part.stack.clear();
                }
            }
            self.0.observe(&LiveInput::References(pages));
        }
    }

    fn close_window(&mut self, window: &LiveWindow) -> Option<MissRatioCurve> {
        if window.references_of_all > 0 {
            let expected = window.references_of_all as f64 / window.scale.max(1) as f64;
            for (part, share) in self.0.window.shares() {
                part.expected = Some(u64::whole((expected * share).round()));
            }
        }
        // How many pages the sample has is not known: files come and go.
        self.0.close_window(&LiveWindow {
            tracked: 0,
            ..*window
        })
    }

    fn discard_window(&mut self) {
        for (part, _) in self.0.window.shares() {
            part.discard();
        }
    }

    fn curve(&self) -> Option<MissRatioCurve> {
        self.0.curve()
    }

    fn recent_curve(&self) -> Option<MissRatioCurve> {
        self.0.recent_curve()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::lru::ExactLru;
    use crate::live::{LiveWindow, SHARDS};
    use crate::parts::streams::curve_of;
    use plimsoll_flow::PageCount;
    use proptest::prelude::*;

    fn close(estimator: &mut dyn LiveEstimator) -> Option<MissRatioCurve> {
        estimator.close_window(&LiveWindow {
            scale: 1,
            seconds: 1.0,
            observed_seconds: 1.0,
            ..LiveWindow::default()
        })
    }

    fn observe(estimator: &mut dyn LiveEstimator, pages: impl Iterator<Item = u64>, follows: bool) {
        let pages: Vec<_> = pages.map(PageNumber).collect();
        estimator.observe(&LiveInput::Stream {
            pages: &pages,
            follows,
        });
    }

    fn estimator() -> Box<dyn LiveEstimator> {
        (SHARDS.make)(&LiveOptions {
            ram: PageCount(1 << 20),
            reach: None,
        })
    }

    #[test]
    fn a_reuse_across_windows_is_resolved_unless_there_is_a_gap() {
        for follows in [true, false] {
            let mut estimator = estimator();
            observe(&mut *estimator, 0..1000, true);
            assert!(close(&mut *estimator).is_none(), "nothing was used twice");
            observe(&mut *estimator, 0..1000, follows);
            let curve = close(&mut *estimator);
            assert_eq!(curve.is_some(), follows);
            if let Some(curve) = curve {
                assert_eq!(curve.miss_ratio(PageCount(999)), 1.0);
                assert_eq!(curve.miss_ratio(PageCount(1000)), 0.0);
                assert_eq!(curve.references(), 1000);
            }
        }
    }

    #[test]
    fn what_was_resolved_before_a_gap_in_a_window_stands() {
        let mut estimator = estimator();
        observe(&mut *estimator, (0..500).chain(0..500), true);
        observe(&mut *estimator, 0..500, false);
        let curve = close(&mut *estimator).unwrap();
        assert_eq!(curve.references(), 1500);
        assert_eq!(curve.miss_ratio(PageCount(500)), 0.0);
        assert_eq!(curve.miss_ratio(PageCount(499)), 1.0);
    }

    #[test]
    fn a_hot_page_in_the_sample_or_not_makes_no_difference_if_all_references_are_counted() {
        // Half of 8000 references go to one page, the others around 1000 pages, of which every fourth is sampled.
        let cold: Vec<u64> = (0..4000)
            .map(|at| at % 1000)
            .filter(|page| page % 4 == 0)
            .collect();
        for is_sampled in [true, false] {
            let mut estimator = estimator();
            let hot = [5000; 4].iter().filter(|_| is_sampled);
            let each = cold.iter().flat_map(|page| hot.clone().chain([page]));
            observe(&mut *estimator, each.copied(), true);
            let curve = estimator.close_window(&LiveWindow {
                scale: 4,
                seconds: 1.0,
                observed_seconds: 1.0,
                references_of_all: 8000,
                ..LiveWindow::default()
            });
            let curve = curve.unwrap();
            assert_eq!(curve.references(), 2000);
            let misses = curve.miss_ratio(PageCount(900));
            assert!((misses - 0.5).abs() < 0.01, "{misses}");
            let rate = curve.misses_per_second(PageCount(900)).unwrap();
            assert!((rate.expected - 4000.0).abs() < 80.0, "{rate:?}");
        }
    }

    #[test]
    fn a_stack_that_is_full_keeps_the_pages_used_last() {
        let mut estimator = estimator();
        let all = PAGES_MAX + 2;
        observe(&mut *estimator, 0..all, true);
        close(&mut *estimator);
        // Of the half that was kept, and of the other.
        observe(&mut *estimator, [all - 1, all - 2, 0, 1].into_iter(), true);
        let curve = close(&mut *estimator).unwrap();
        assert!((curve.miss_ratio(PageCount(2)) - 0.5).abs() < 1e-9);
        assert!((curve.miss_ratio(PageCount(1 << 30)) - 0.5).abs() < 1e-9);
    }

    proptest! {
        /// The exact twin: first references, which miss there at every size, are unresolved here.
        #[test]
        fn reuses_are_those_of_exact_lru_however_the_stream_is_divided(
            pages in prop::collection::vec(0_u64..60, 2..400),
            every in 1_usize..100,
        ) {
            let mut stack = StreamStack {
                pages_max: PAGES_MAX,
                ..StreamStack::default()
            };
            let mut reuses = Vec::new();
            for window in pages.chunks(every) {
                window.iter().for_each(|&page| stack.observe(PageNumber(page)));
                reuses.resize(reuses.len().max(stack.reuses.len()), 0);
                for (all, window) in reuses.iter_mut().zip(&stack.reuses) {
                    *all += window;
                }
                stack.finish(1);
            }
            let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
            for size in 0..70 {
                let hits: u64 = reuses.iter().take(size).sum();
                let ratio = 1.0 - hits as f64 / pages.len() as f64;
                prop_assert!((exact.miss_ratio(PageCount(size as u64)) - ratio).abs() < 1e-9);
            }
        }
    }
}
