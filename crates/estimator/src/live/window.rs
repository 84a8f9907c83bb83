//! Curves of a live stream, observed in windows.
//!
//! A tracer opens a window on a running VM, observes a spatial sample of its
//! pages, and closes the window. Most first observations of a page are not first references:
//! the page was used before the window, and all that is known is that its reuse distance
//! is at least the number of pages seen in the window so far. Counting these as misses (as
//! for a whole trace) would overestimate the misses of every short window; ignoring them
//! would lose the long distances. They are *censored observations*, which the
//! product-limit estimate (`survival`) handles:
//!
//! - distance `d` in the sample: `(d + 1) * scale` pages were needed; first reference after `k`
//!   pages: more than `k * scale`. [`lru_curve`] reads P(needed > c) as the miss ratio at c.
//! - reuse time `t` in the sample: `t * scale`; first reference after `t` references: more than `t * scale`.
//!   [`aet_curve`] takes the AET integral of it.
//!
//! A window must be longer than the largest distance that it is to resolve; up to
//! there no page has to be seen more than twice. Where the estimate ends with an
//! unresolved share, the curve stays flat. Windows of one phase are pooled by [`Survival::merge`]; a reference
//! in a sample of one in `scale` represents `scale` references, which is the factor there. Windows that
//! may belong to different phases are resolved first ([`Survival::resolved`]) and weighted by the time each represents.
//!
//! **Band.** A window is divided into 16 parts by a hash of the page's neighbourhood (64 pages, because
//! neighbours behave alike, and tracers may sample them together), each with its own stack or
//! clock. The band is the spread of their curves, which includes the effects of references clustered by page and
//! of scaled distances. Where the number of tracked pages is known, a part's sizes and references are scaled by the pages it
//! has, because how many of them fall to a part is no error of the whole; what remains is that of the share that is touched. Measured over 100 pairs of windows at scale 16, the 95 % band contained
//! the truth at 99 % of sizes for a uniform stream, but at 83 % for Zipf's, where the few hottest
//! pages are mostly outside the sample, which contains no information about them. Only more windows, each
//! with another sample, provide it. At scale 1 the band is too wide: all pages are observed, but treated as a sample.
//! The misses at two sizes are compared by what each part changes at both (`log_errors`).
//!
//! **Behind a hot set.** A tracer sees only references that miss its hot set of `H` sampled pages,
//! replaced first in, first out. The curve is then that of the references seen: P(needed > c) = LRU's
//! misses at `c` / the hot set's misses. Simulated (`H` of 64 and 512; uniform, class, Zipf's streams and a
//! loop mixed with Zipf's; 4096 sampled pages), its mean absolute error from `H * scale` up is 0.002 to 0.010 by
//! stack, and 0.016 by reuse time at worst (the mixture). At scale 1 nearly all of it lies below
//! `2 H`: there the set evicts pages that LRU would have kept, and the curve is too high by up to
//! 0.13. Shifting sizes by parts of `H` made most streams worse, so nothing is corrected; the band is lower by as much
//! there, and the curve begins at `H * scale` (`ordered`).
//!
//! Source: the estimator is [KM58]'s; its use on reuse distances in windows is ours.
//! Cost: twice the work of a stack per reference (`lru`), or two look-ups. Memory is proportional to the pages of a
//! window, not to its length.
//! Not here: the schedule of windows, and the selection of sampled pages.

use std::fmt;

use plimsoll_flow::{
    CurveError, MissRatioCurve, PageNumber, Whole as _, WorkingSet, WorkingSetBound,
};

use crate::curve::aet::reuse_times::{Tail, steps_of_tail};
use crate::curve::lru::{LruStack, count_reuse};
use crate::live::LiveWindow;
use crate::live::survival::Survival;
use crate::parts::hash::PageHash;
use crate::parts::histogram::Histogram;
use crate::parts::last_use::LastUse;
use crate::parts::steps::{REPLICATES, Steps, replicate_of};

/// Binary logarithm of the number of adjacent pages that belong to the same part: 64 pages.
const NEIGHBOURS_BITS: u32 = 6;
/// Error of the logarithm of the quotient of the misses at two sizes that windows and scaled distances have, as a share of it:
/// measured by `./dev bench bands`.
const QUOTIENT_ERROR: f64 = 0.04;

/// The part of the sample to which a page belongs.
fn part_of(page: PageNumber) -> usize {
    let neighbours = PageNumber(page.0 >> NEIGHBOURS_BITS);
    replicate_of(PageHash::seeded(0).of(neighbours))
}

/// Sizes needed by the references of one window.
///
/// ```
/// use plimsoll_estimator::{WindowLru, lru_curve};
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// // Every eighth page of a loop over 800, for one round and a half.
/// let pages: Vec<_> = (0..800).step_by(8).cycle().take(150).map(PageNumber).collect();
/// let mut window = WindowLru::new();
/// window.observe(&pages);
/// let curve = lru_curve(&window.finish(8))?;
/// assert_eq!(curve.miss_ratio(PageCount(799)), 1.0);
/// assert_eq!(curve.miss_ratio(PageCount(800)), 0.0);
/// # Ok::<(), plimsoll_flow::CurveError>(())
/// ```
pub type WindowLru = Window<WindowStack>;

/// Reuse times of the references of one window.
pub type WindowAet = Window<WindowClock>;

/// The references of one window: those to all its pages, and those to the pages of each part.
#[derive(Debug, Clone)]
pub struct Window<P> {
    whole: P,
    parts: Vec<P>,
}

/// What a window keeps of the references to some of its pages.
pub trait PartOfWindow: Clone + Default + fmt::Debug + Send {
    /// Processes a reference.
    fn observe(&mut self, page: PageNumber);

    /// Number of pages referred to.
    fn pages(&self) -> u64;

    /// Closes the window, in which one in `scale` pages was observed, and is ready for the next.
    fn finish(&mut self, scale: u64) -> Survival;

    /// The curve of windows.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if nothing was observed.
    fn curve(windows: &Survival) -> Result<MissRatioCurve, CurveError>;
}

impl<P: PartOfWindow> Window<P> {
    /// Opens the first window.
    #[must_use]
    pub fn new() -> Self {
        Self {
            whole: P::default(),
            parts: vec![P::default(); REPLICATES],
        }
    }

    /// What is kept of all its pages, and of those of each part, with the share of the pages that each has.
    pub(super) fn shares(&mut self) -> impl Iterator<Item = (&mut P, f64)> {
        let parts = self.parts.iter_mut();
        let parts = parts.map(|part| (part, 1.0 / REPLICATES as f64));
        std::iter::once((&mut self.whole, 1.0)).chain(parts)
    }

    /// Processes the next references to sampled pages.
    pub fn observe(&mut self, pages: &[PageNumber]) {
        for &page in pages {
            self.whole.observe(page);
            self.parts[part_of(page)].observe(page);
        }
    }

    /// Closes the window, in which one in `scale` pages was observed, and opens the next.
    ///
    /// Returns the sizes in pages that its references needed, or their reuse times in references to all pages.
    pub fn finish(&mut self, scale: u64) -> Survival {
        self.close(&LiveWindow {
            scale,
            ..LiveWindow::default()
        })
    }

    /// The same for a window of which the time and the number of tracked pages are known.
    pub(crate) fn close(&mut self, window: &LiveWindow) -> Survival {
        let (touched, scale) = (self.whole.pages(), window.scale as f64);
        let mean = touched as f64 / REPLICATES as f64;
        let whole = self.whole.finish(window.scale);
        let before = window.references_before as f64 / whole.observations().max(1) as f64;
        let counted = (1.0 - before).max(0.0);
        // How many of the tracked pages a part has is known and no error of the whole; how many of them are touched is one.
        let untouched = 1.0 - touched as f64 / window.tracked as f64;
        let chance = match window.tracked {
            0 => 1.0,
            _ => untouched.max(0.0).sqrt(),
        };
        let parts = self.parts.iter_mut().map(|part| {
            let pages = part.pages() as f64;
            let (represented, seconds) = if pages > 0.0 {
                let expected = mean + chance * (pages - mean);
                (expected / pages * scale * REPLICATES as f64, 1.0)
            } else {
                (scale * REPLICATES as f64, chance)
            };
            let whole = u64::whole(represented.round()).max(1);
            let seconds = if touched > 0 { seconds } else { 1.0 };
            let part = part.finish(whole);
            part.timed(window, represented * counted, seconds)
        });
        let parts = parts.collect();
        whole.timed(window, scale * counted, 1.0).with_parts(parts)
    }
}

impl<P: PartOfWindow> Default for Window<P> {
    fn default() -> Self {
        Self::new()
    }
}

/// The stack of a window, and the distances in it.
#[derive(Debug, Clone, Default)]
pub struct WindowStack {
    stack: LruStack,
    /// References by reuse distance.
    reuses: Vec<u64>,
}

/// The sizes that references needed which were reused at these distances in a sample of one page in `scale`.
pub(super) fn sizes_needed(reuses: &[u64], scale: u64) -> Survival {
    let mut survival = Survival::new();
    for (needed, &reuses) in (1_u64..).zip(reuses) {
        if reuses > 0 {
            survival.record_repeatedly(needed.saturating_mul(scale), 1.0, reuses);
        }
    }
    survival
}

impl PartOfWindow for WindowStack {
    fn observe(&mut self, page: PageNumber) {
        if let Some(distance) = self.stack.touch(page) {
            count_reuse(&mut self.reuses, distance);
        }
    }

    fn pages(&self) -> u64 {
        self.stack.distinct()
    }

    fn finish(&mut self, scale: u64) -> Survival {
        let mut survival = sizes_needed(&self.reuses, scale);
        // Each page was new once: the k-th when k - 1 had been seen.
        for seen in 0..self.stack.distinct() {
            survival.record_censored(seen.saturating_mul(scale), 1.0);
        }
        self.stack.clear();
        self.reuses.clear();
        survival
    }

    fn curve(windows: &Survival) -> Result<MissRatioCurve, CurveError> {
        lru_curve(windows)
    }
}

/// Counts of the references of a window, and of their reuse times.
#[derive(Debug, Clone)]
pub struct WindowClock {
    last_use: LastUse,
    now: u64,
    /// Reuse times in references seen.
    reuses: Histogram,
    /// Number of references before each page's first.
    firsts: Vec<u64>,
}

impl Default for WindowClock {
    fn default() -> Self {
        Self {
            last_use: LastUse::new(),
            now: 0,
            reuses: Histogram::default(),
            firsts: Vec::new(),
        }
    }
}

impl PartOfWindow for WindowClock {
    fn observe(&mut self, page: PageNumber) {
        match self.last_use.replace(page, self.now) {
            Some(before) => self.reuses.record(self.now - before),
            None => self.firsts.push(self.now),
        }
        self.now += 1;
    }

    fn pages(&self) -> u64 {
        self.firsts.len() as u64
    }

    fn finish(&mut self, scale: u64) -> Survival {
        let mut survival = Survival::new();
        for (time, times) in self.reuses.counts() {
            survival.record_repeatedly(time.saturating_mul(scale), 1.0, times);
        }
        for time in self.firsts.drain(..) {
            survival.record_censored(time.saturating_mul(scale), 1.0);
        }
        self.last_use.clear();
        self.reuses.clear();
        self.now = 0;
        survival
    }

    fn curve(windows: &Survival) -> Result<MissRatioCurve, CurveError> {
        aet_curve(windows)
    }
}

/// Returns the curve of references that needed `sizes`, in pages.
///
/// Its last point is the largest size with any information.
///
/// # Errors
///
/// [`CurveError::Empty`] if nothing was observed.
pub fn lru_curve(sizes: &Survival) -> Result<MissRatioCurve, CurveError> {
    curve_of(sizes, |sizes| {
        let mut steps = Steps::new();
        for step in sizes.steps() {
            steps.down_to(step.value, step.share_above, step.standard_error);
        }
        steps.flat_to(sizes.largest());
        steps
    })
}

/// Returns the curve of references with `reuse_times`, in references, by AET.
///
/// Its last point is the largest size with any information.
///
/// # Errors
///
/// [`CurveError::Empty`] if nothing was observed.
pub fn aet_curve(reuse_times: &Survival) -> Result<MissRatioCurve, CurveError> {
    curve_of(reuse_times, |reuse_times| {
        let tail = reuse_times.steps().into_iter().map(|step| Tail {
            time: step.value,
            share_above: step.share_above,
            standard_error: step.standard_error,
        });
        steps_of_tail(tail, reuse_times.largest())
    })
}

/// Returns the steps of the whole with the band of its parts, if it has any.
fn curve_of(
    survival: &Survival,
    steps_of: impl Fn(&Survival) -> Steps,
) -> Result<MissRatioCurve, CurveError> {
    let mut steps = steps_of(survival);
    let mut errors = Vec::new();
    if !survival.parts().is_empty() {
        let parts = survival.parts().iter();
        let curves = parts.map(|part| {
            let curve = steps_of(part).into_curve(part.observations());
            (curve.ok(), part.references_per_second().unwrap_or_default())
        });
        let rated: Vec<_> = curves.collect();
        let curves: Vec<_> = rated
            .iter()
            .filter_map(|(curve, _)| curve.clone())
            .collect();
        steps.band(&curves, 1.0);
        errors = steps.log_errors(&curves, QUOTIENT_ERROR);
        if let Some(rate) = survival.references_per_second() {
            steps.rate(rate, survival.rate_limits(), &rated);
        }
    }
    let curve = steps.into_curve(survival.observations())?;
    Ok(curve.with_log_errors(errors))
}

/// Reads the working set from a curve: the smallest size that misses at most [`WorkingSet::MISS_RATIO`].
///
/// If the curve does not fall that far, the working set is at least the
/// size of the pages touched.
#[must_use]
pub fn working_set(curve: &MissRatioCurve) -> WorkingSet {
    match curve.size_for(WorkingSet::MISS_RATIO) {
        Some(size) => WorkingSet {
            size,
            bound: WorkingSetBound::Estimate,
        },
        None => WorkingSet {
            size: curve.touched_size(),
            bound: WorkingSetBound::AtLeast,
        },
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_flow::PageCount;

    use super::*;
    use crate::curve::lru::ExactLru;
    use crate::parts::streams::{Random, curve_of, cycle, uniform, zipf};
    use proptest::prelude::*;

    const PAGES: u64 = 4_096;

    fn numbers(pages: impl Iterator<Item = u64>) -> Vec<PageNumber> {
        pages.map(PageNumber).collect()
    }

    /// Pools windows of `references` each over a stream; returns both curves.
    fn windows(
        stream: impl Iterator<Item = u64>,
        references: usize,
        count: usize,
    ) -> [MissRatioCurve; 2] {
        let stream = numbers(stream.take(references * count));
        let (mut lru, mut aet) = (WindowLru::new(), WindowAet::new());
        let (mut sizes, mut times) = (Survival::new(), Survival::new());
        for pages in stream.chunks(references) {
            lru.observe(pages);
            aet.observe(pages);
            sizes.merge(&lru.finish(1), 1.0);
            times.merge(&aet.finish(1), 1.0);
        }
        [lru_curve(&sizes).unwrap(), aet_curve(&times).unwrap()]
    }

    /// Mean absolute error over the sizes up to `share` of all pages.
    fn error(curve: &MissRatioCurve, share: f64, truth: impl Fn(PageCount) -> f64) -> f64 {
        let sizes =
            (1..=100).map(|step| PageCount((f64::from(step) * share * PAGES as f64) as u64 / 100));
        let errors = sizes.map(|size| (curve.miss_ratio(size) - truth(size)).abs());
        errors.sum::<f64>() / 100.0
    }

    #[test]
    fn windows_of_one_and_a_half_footprints_give_the_uniform_curve() {
        let truth = |size: PageCount| 1.0 - size.0 as f64 / PAGES as f64;
        let once = PAGES as usize * 3 / 2;
        for seed in 1..=5 {
            for (count, bound) in [(1, 0.02), (10, 0.01)] {
                // With 1.5 references per page, e^-1.5 of the pages are never seen: 22 %.
                for curve in windows(uniform(PAGES, seed), once, count) {
                    let error = error(&curve, 0.75, truth);
                    assert!(error <= bound, "seed {seed}, {count} windows: {error}");
                }
            }
        }
    }

    #[test]
    fn short_windows_of_a_skewed_stream_give_the_curve_of_the_long_one() {
        let stream: Vec<_> = zipf(PAGES, 1.0, 1).take(2_000_000).collect();
        let exact = curve_of(&mut ExactLru::new(), stream);
        for seed in 1..=5 {
            for curve in windows(zipf(PAGES, 1.0, seed), PAGES as usize * 4, 5) {
                let error = error(&curve, 0.75, |size| exact.miss_ratio(size));
                assert!(error <= 0.01, "seed {seed}: {error}");
            }
        }
    }

    #[test]
    fn a_loop_seen_one_and_a_half_times_has_its_cliff() {
        for curve in windows(cycle(PAGES), PAGES as usize * 3 / 2, 1) {
            assert_eq!(curve.miss_ratio(PageCount(PAGES - 1)), 1.0);
            assert_eq!(curve.miss_ratio(PageCount(PAGES)), 0.0);
            let found = working_set(&curve);
            assert_eq!(found.size, PageCount(PAGES));
            assert_eq!(found.bound, WorkingSetBound::Estimate);
        }
    }

    #[test]
    fn a_loop_not_seen_whole_is_a_bound() {
        for curve in windows(cycle(PAGES), PAGES as usize / 2, 1) {
            let found = working_set(&curve);
            assert_eq!(found.bound, WorkingSetBound::AtLeast);
            assert_eq!(found.size, PageCount(PAGES / 2 - 1));
        }
    }

    /// Share of sizes whose true ratio lies in the band, over 15 pairs of windows at scale 16.
    fn coverage(mut stream: impl Iterator<Item = u64>, truth: impl Fn(PageCount) -> f64) -> f64 {
        let pages = 4 * PAGES;
        let mut random = Random::new(99);
        let (mut held, mut all) = (0, 0);
        for _ in 0..15 {
            let (mut window, mut sizes) = (WindowLru::new(), Survival::new());
            for _ in 0..2 {
                let sampled: Vec<_> = (0..pages).map(|_| random.share() < 1.0 / 16.0).collect();
                let seen = stream.by_ref().take(4 * pages as usize);
                window.observe(&numbers(seen.filter(|&page| sampled[page as usize])));
                sizes.merge(&window.finish(16), 16.0);
            }
            let curve = lru_curve(&sizes).unwrap();
            for size in (1..=90).map(|step| PageCount(step * pages / 100)) {
                let (point, truth) = (curve.at(size), truth(size));
                held += i32::from(point.low <= truth && truth <= point.high);
                all += 1;
            }
        }
        f64::from(held) / f64::from(all)
    }

    #[test]
    fn the_band_of_an_even_stream_holds_the_truth() {
        let truth = |size: PageCount| 1.0 - size.0 as f64 / (4 * PAGES) as f64;
        let coverage = coverage(uniform(4 * PAGES, 2), truth);
        assert!(coverage >= 0.95, "{coverage}");
    }

    #[test]
    fn the_band_of_a_skewed_stream_holds_the_truth_mostly() {
        let stream = zipf(4 * PAGES, 1.0, 1).take(1_000_000);
        let exact = curve_of(&mut ExactLru::new(), stream);
        let coverage = coverage(zipf(4 * PAGES, 1.0, 2), |size| exact.miss_ratio(size));
        // Measured 0.83 over 100 pairs; the module's section on the band states why it is not 0.95.
        assert!(coverage >= 0.70, "{coverage}");
    }

    #[test]
    fn a_window_in_which_nothing_happened_is_no_curve() {
        assert_eq!(
            lru_curve(&WindowLru::new().finish(16)),
            Err(CurveError::Empty)
        );
        assert_eq!(
            aet_curve(&WindowAet::new().finish(16)),
            Err(CurveError::Empty)
        );
    }

    proptest! {
        #[test]
        fn a_finished_window_leaves_nothing_to_the_next(
            first in prop::collection::vec(0_u64..100, 0..300),
            second in prop::collection::vec(0_u64..100, 1..300),
            scale in 1_u64..1000,
        ) {
            let (first, second) = (numbers(first.into_iter()), numbers(second.into_iter()));
            let (mut reused, mut fresh) = (WindowLru::new(), WindowLru::new());
            reused.observe(&first);
            reused.finish(1);
            reused.observe(&second);
            fresh.observe(&second);
            prop_assert_eq!(lru_curve(&reused.finish(scale)), lru_curve(&fresh.finish(scale)));
            let (mut reused, mut fresh) = (WindowAet::new(), WindowAet::new());
            reused.observe(&first);
            reused.finish(1);
            reused.observe(&second);
            fresh.observe(&second);
            prop_assert_eq!(aet_curve(&reused.finish(scale)), aet_curve(&fresh.finish(scale)));
        }

        #[test]
        fn any_scale_makes_a_curve(
            pages in prop::collection::vec(any::<u64>(), 1..50),
            scale in prop_oneof![1_u64..100, Just(u64::MAX), any::<u64>()],
        ) {
            let pages = numbers(pages.iter().chain(&pages).copied());
            let (mut lru, mut aet) = (WindowLru::new(), WindowAet::new());
            lru.observe(&pages);
            aet.observe(&pages);
            prop_assert!(lru_curve(&lru.finish(scale)).is_ok());
            prop_assert!(aet_curve(&aet.finish(scale)).is_ok());
        }
    }
}
