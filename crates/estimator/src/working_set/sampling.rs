//! Sampling: the number of touched pages among a few random pages in an interval.
//!
//! At the start of an interval some pages of the VM are drawn and their mappings invalidated, so that the next access
//! to each is observed. The share touched by the interval's end, times the VM's memory, estimates the memory touched in
//! it. The number of touched pages in the sample is binomial, which gives a confidence interval: at 100 pages it is up
//! to 20 % of the memory wide.
//!
//! Source: [Waldspurger02] §5.3: uniform draws anew each interval, 100 pages and 30 s by default, and two moving
//! averages, a slow one for a stable figure and a fast one for a growing need, of which the larger is used. Its gains
//! are not published; ours are `GAINS`. Its third average, the fast one with the touches of the interval in
//! progress, equals the fast one at an interval's end and is omitted. Departs in the added confidence interval: Clopper
//! and Pearson's, whose coverage is never below the stated 95 %.
//!
//! Not observed: frequency of use (a page touched once counts like one used all the time); a share much
//! below 1 / pages sampled.
//! Cost: O(1) per touch; at most one fault for each sampled page and interval.

use std::num::NonZeroU32;

use plimsoll_flow::{PageCount, PageNumber, SplitMix, WorkingSet, WorkingSetBound, mix};

use super::estimator::WorkingSetEstimator;
use crate::parts::hash::{PageMap, page_map};

/// Weight of the newest estimate in the slow moving average, and in the fast one.
const GAINS: [f64; 2] = [0.2, 0.6];

/// Options of [`Sampling`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingOptions {
    /// Number of pages drawn for each interval; all pages of a smaller memory.
    pub pages: NonZeroU32,
    /// Seed of the draws.
    pub seed: u64,
}

impl SamplingOptions {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        pages: NonZeroU32::new(100).unwrap(),
        seed: 0,
    };
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The moving averages of the share touched, 0.0 to 1.0: rises with the fast one, falls with the slow one.
#[derive(Debug, Clone, Copy, Default)]
pub struct SampledShare(Option<[f64; 2]>);

impl SampledShare {
    /// Adds the share touched in an interval; returns the larger average.
    pub fn add(&mut self, share: f64) -> f64 {
        let averages = self.0.unwrap_or([share; 2]);
        let averages = [0, 1].map(|at: usize| averages[at] + GAINS[at] * (share - averages[at]));
        self.0 = Some(averages);
        averages[0].max(averages[1])
    }
}

/// State at the end of an interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingStep {
    /// Pages of the sample that were touched.
    pub touched: u32,
    /// Pages in the sample.
    pub sampled: u32,
    /// Share touched, times the memory.
    pub size: PageCount,
    /// The larger of the two moving averages, which the source reports.
    pub smoothed: PageCount,
    /// The memory from which the sample was drawn.
    pub memory: PageCount,
}

impl SamplingStep {
    /// The limits of the confidence interval of the memory touched in the interval, of at least 95 %.
    ///
    /// Takes time in proportion to the sample.
    pub fn confidence(&self) -> (PageCount, PageCount) {
        let (low, high) = clopper_pearson(self.touched, self.sampled);
        (self.memory.scaled(low), self.memory.scaled(high))
    }
}

/// The sampling estimator. Pages are numbered from 0 to the memory's end, without the hole of guest-physical addresses.
///
/// ```
/// use plimsoll_estimator::working_set::{Sampling, SamplingOptions};
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let mut sampling = Sampling::new(SamplingOptions::default(), PageCount(10_000));
/// // The VM touches the first half of its memory; the monitor sees only pages that it invalidated.
/// let traps: Vec<PageNumber> = sampling.sample().filter(|page| page.0 < 5_000).collect();
/// for page in traps {
///     sampling.touch(page);
/// }
/// let step = sampling.end_interval();
/// let (low, high) = step.confidence();
/// assert!(low <= step.size && step.size <= high);
/// ```
#[derive(Debug, Clone)]
pub struct Sampling {
    options: SamplingOptions,
    memory: PageCount,
    random: SplitMix,
    /// The sample, and whether each page was touched.
    sample: PageMap<bool>,
    touched: u32,
    average: SampledShare,
    /// State at the end of the last interval.
    last: Option<SamplingStep>,
}

impl Sampling {
    /// Returns an estimator for a VM of `memory` pages, with its first sample drawn.
    pub fn new(options: SamplingOptions, memory: PageCount) -> Self {
        let mut sampling = Self {
            options,
            memory,
            random: SplitMix(mix(options.seed ^ 0x9e37_79b9_7f4a_7c15)),
            sample: page_map(),
            touched: 0,
            average: SampledShare::default(),
            last: None,
        };
        sampling.draw();
        sampling
    }

    /// The pages to invalidate for the present interval.
    pub fn sample(&self) -> impl Iterator<Item = PageNumber> + '_ {
        self.sample.keys().copied()
    }

    /// Records that a page was touched; ignores pages outside the sample.
    pub fn touch(&mut self, page: PageNumber) {
        if let Some(touched) = self.sample.get_mut(&page) {
            self.touched += u32::from(!*touched);
            *touched = true;
        }
    }

    /// Ends the interval and draws another sample.
    pub fn end_interval(&mut self) -> SamplingStep {
        let sampled = u32::try_from(self.sample.len()).unwrap_or(u32::MAX);
        let share = f64::from(self.touched) / f64::from(sampled.max(1));
        let smoothed = self.average.add(share);
        let step = SamplingStep {
            touched: self.touched,
            sampled,
            size: self.memory.scaled(share),
            smoothed: self.memory.scaled(smoothed),
            memory: self.memory,
        };
        self.draw();
        self.last = Some(step);
        step
    }

    /// Draws a sample without replacement: for each of the last numbers, a random page up to it or, if that is taken,
    /// the number itself (Floyd's algorithm).
    fn draw(&mut self) {
        self.sample.clear();
        self.touched = 0;
        let memory = self.memory.0;
        let first = memory.saturating_sub(u64::from(self.options.pages.get()));
        for place in first..memory {
            let page = PageNumber(self.random.below(place + 1));
            let free = !self.sample.contains_key(&page);
            let page = if free { page } else { PageNumber(place) };
            self.sample.insert(page, false);
        }
    }
}

/// Number of bisection steps: enough for full precision.
const HALVINGS: u32 = 60;

/// The shares at which `hits` or more of `all`, or `hits` or fewer, have a probability of 2.5 %.
fn clopper_pearson(hits: u32, all: u32) -> (f64, f64) {
    let low = match hits {
        0 => 0.0,
        _ => share_at(0.975, |share| at_most(hits - 1, all, share)),
    };
    let high = if hits >= all {
        1.0
    } else {
        share_at(0.025, |share| at_most(hits, all, share))
    };
    (low, high)
}

/// The share at which a probability that falls with the share is `level`.
fn share_at(level: f64, chance: impl Fn(f64) -> f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        if chance(middle) > level {
            low = middle;
        } else {
            high = middle;
        }
    }
    f64::midpoint(low, high)
}

/// The probability of `hits` or fewer among `all`, with a hit probability of `share`, above 0 and below 1.
fn at_most(hits: u32, all: u32, share: f64) -> f64 {
    // As logarithms, because the first term alone may underflow.
    let odds = (share / (1.0 - share)).ln();
    let mut term = f64::from(all) * (1.0 - share).ln();
    let mut chance = term.exp();
    for hit in 1..=hits {
        term += odds + (f64::from(all - hit + 1) / f64::from(hit)).ln();
        chance += term.exp();
    }
    chance
}

impl WorkingSetEstimator for Sampling {
    fn observe(&mut self, pages: &[PageNumber]) {
        for &page in pages {
            self.touch(page);
        }
    }

    fn end_interval(&mut self) -> Vec<Option<u64>> {
        let step = self.end_interval();
        let (low, high) = step.confidence();
        [step.size, low, high, step.smoothed]
            .map(|pages| Some(pages.0))
            .into()
    }

    fn working_set(&self) -> Option<WorkingSet> {
        self.last.map(|step| WorkingSet {
            size: step.size,
            bound: WorkingSetBound::Estimate,
        })
    }

    fn confidence(&self) -> Option<(PageCount, PageCount)> {
        self.last.map(|step| step.confidence())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn options(pages: u32, seed: u64) -> SamplingOptions {
        SamplingOptions {
            pages: NonZeroU32::new(pages).unwrap(),
            seed,
        }
    }

    /// Runs an interval in which all pages below `touched` are touched.
    fn interval(sampling: &mut Sampling, touched: u64) -> SamplingStep {
        let pages: Vec<_> = sampling.sample().filter(|page| page.0 < touched).collect();
        for page in pages {
            sampling.touch(page);
            sampling.touch(page);
        }
        sampling.end_interval()
    }

    #[test]
    fn the_confidence_is_that_of_the_tables() {
        // Clopper and Pearson's exact limits of 95 %.
        for (hits, all, low, high) in [
            (0, 100, 0.0, 0.036_217),
            (1, 100, 0.000_253, 0.054_459),
            (50, 100, 0.398_321, 0.601_679),
            (100, 100, 0.963_783, 1.0),
            (4, 20, 0.057_334, 0.436_614),
        ] {
            let found = clopper_pearson(hits, all);
            assert!((found.0 - low).abs() < 2e-6, "{hits} of {all}: {found:?}");
            assert!((found.1 - high).abs() < 2e-6, "{hits} of {all}: {found:?}");
        }
    }

    #[test]
    fn the_confidence_holds_the_truth_in_95_of_100_intervals() {
        for touched in [300, 2_500, 5_000, 9_900] {
            let mut sampling = Sampling::new(options(100, 7), PageCount(10_000));
            let steps = (0..2_000).map(|_| interval(&mut sampling, touched));
            let held = steps.filter(|step| {
                let (low, high) = step.confidence();
                (low..=high).contains(&PageCount(touched))
            });
            let held = held.count();
            assert!(held >= 1_880, "{touched}: {held} of 2000");
        }
    }

    #[test]
    fn samples_are_uniform_and_of_distinct_pages() {
        let mut drawn = [0_u32; 50];
        let mut sampling = Sampling::new(options(10, 1), PageCount(50));
        for _ in 0..20_000 {
            let sample: BTreeSet<_> = sampling.sample().collect();
            assert_eq!(sample.len(), 10);
            for page in sample {
                drawn[page.0 as usize] += 1;
            }
            sampling.end_interval();
        }
        // 4000 each, with a standard deviation of 57.
        assert!(
            drawn.iter().all(|n| (3_740..=4_260).contains(n)),
            "{drawn:?}"
        );
    }

    #[test]
    fn a_memory_smaller_than_the_sample_is_seen_whole() {
        let mut sampling = Sampling::new(options(100, 0), PageCount(40));
        let step = interval(&mut sampling, 30);
        assert_eq!(
            (step.touched, step.sampled, step.size),
            (30, 40, PageCount(30))
        );
        let mut nothing = Sampling::new(options(100, 0), PageCount(0));
        assert_eq!(interval(&mut nothing, 30).size, PageCount(0));
    }

    #[test]
    fn what_is_smoothed_rises_fast_and_falls_slowly() {
        let mut sampling = Sampling::new(options(1_000, 0), PageCount(1_000));
        for (touched, smoothed) in [(0, 0), (1_000, 600), (1_000, 840), (0, 336), (0, 230)] {
            let found = interval(&mut sampling, touched).smoothed.0;
            assert!(found.abs_diff(smoothed) <= 1, "{found} for {smoothed}");
        }
    }

    #[test]
    fn a_touch_outside_the_sample_is_not_noticed() {
        let mut sampling = Sampling::new(options(3, 0), PageCount(100));
        let sample: BTreeSet<_> = sampling.sample().collect();
        for page in (0..200)
            .map(PageNumber)
            .filter(|page| !sample.contains(page))
        {
            sampling.touch(page);
        }
        assert_eq!(sampling.end_interval().touched, 0);
    }
}
