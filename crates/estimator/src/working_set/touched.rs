//! The working set by its definition: the pages touched within a window of time.
//!
//! The window is the last `intervals` intervals, and a page belongs to its working set if it was touched in at least
//! `times` of them. With `times` 1 that is \[Denning68\]'s W(t, T) at the ends of intervals, T being the window's
//! length; a higher number excludes pages touched only occasionally.
//!
//! Fed every touch, it is exact, and therefore the truth for the others. A log of page walks is sufficient if the TLBs
//! were empty when each interval began: the first touch of a page in an interval is then a walk.
//!
//! Cost: O(1) per touch; 24 bytes for each page ever touched, and 8 for each page and interval of the window.

use std::collections::VecDeque;
use std::num::NonZeroU16;

use plimsoll_flow::{PageCount, PageNumber, WorkingSet, WorkingSetBound};

use super::estimator::WorkingSetEstimator;
use crate::parts::hash::{PageMap, page_map};

/// Definition of a window's working set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TouchedOptions {
    /// Length of the window in intervals.
    pub intervals: NonZeroU16,
    /// Number of intervals of the window in which a page must have been touched; if it exceeds `intervals`, no page
    /// qualifies.
    pub times: NonZeroU16,
}

impl TouchedOptions {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        intervals: NonZeroU16::new(4).unwrap(),
        times: NonZeroU16::MIN,
    };
}

impl Default for TouchedOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// State at the end of an interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TouchedStep {
    /// Distinct pages touched in the interval.
    pub touched: PageCount,
    /// Distinct pages touched so far.
    pub cumulative: PageCount,
    /// The working set: pages accessed in the configured number of intervals of the window.
    pub working_set: PageCount,
}

/// Counts touched pages.
#[derive(Debug, Clone)]
pub struct TouchedPages {
    options: TouchedOptions,
    pages: PageMap<Touches>,
    /// The present interval.
    now: u64,
    current: Vec<PageNumber>,
    /// Pages of the window's earlier intervals, the oldest first.
    before: VecDeque<Vec<PageNumber>>,
    working_set: u64,
    /// State at the end of the last interval.
    last: Option<TouchedStep>,
}

#[derive(Debug, Clone, Copy)]
struct Touches {
    last: u64,
    /// Number of intervals of the window in which it was touched.
    times: u16,
}

impl TouchedPages {
    /// Returns an empty count.
    pub fn new(options: TouchedOptions) -> Self {
        Self {
            options,
            pages: page_map(),
            now: 0,
            current: Vec::new(),
            before: VecDeque::new(),
            working_set: 0,
            last: None,
        }
    }

    /// Records that a page was touched.
    pub fn touch(&mut self, page: PageNumber) {
        let now = self.now;
        let touches = self.pages.entry(page).or_insert(Touches {
            last: u64::MAX,
            times: 0,
        });
        if touches.last != now {
            touches.last = now;
            touches.times += 1;
            self.working_set += u64::from(touches.times == self.options.times.get());
            self.current.push(page);
        }
    }

    /// Ends an interval.
    pub fn end_interval(&mut self) -> TouchedStep {
        let step = TouchedStep {
            touched: PageCount(self.current.len() as u64),
            cumulative: PageCount(self.pages.len() as u64),
            working_set: PageCount(self.working_set),
        };
        self.before.push_back(std::mem::take(&mut self.current));
        if self.before.len() == usize::from(self.options.intervals.get()) {
            // Outside of the window that ends with the interval that now begins.
            for page in self.before.pop_front().unwrap_or_default() {
                if let Some(touches) = self.pages.get_mut(&page) {
                    self.working_set -= u64::from(touches.times == self.options.times.get());
                    touches.times -= 1;
                }
            }
        }
        self.now += 1;
        self.last = Some(step);
        step
    }

    /// Number of intervals that ended.
    pub fn steps(&self) -> u64 {
        self.now
    }

    /// Bytes of heap allocated now.
    pub fn memory_bytes(&self) -> usize {
        let listed: usize = self.before.iter().map(Vec::capacity).sum();
        self.pages.capacity() * size_of::<(PageNumber, Touches)>()
            + (listed + self.current.capacity()) * size_of::<PageNumber>()
    }
}

impl WorkingSetEstimator for TouchedPages {
    fn observe(&mut self, pages: &[PageNumber]) {
        for &page in pages {
            self.touch(page);
        }
    }

    fn end_interval(&mut self) -> Vec<Option<u64>> {
        let step = self.end_interval();
        vec![Some(step.touched.0), Some(step.working_set.0)]
    }

    fn working_set(&self) -> Option<WorkingSet> {
        self.last.map(|step| WorkingSet {
            size: step.working_set,
            bound: WorkingSetBound::Estimate,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn agrees_with_looking_at_all_intervals_of_the_window(
            steps in prop::collection::vec(prop::collection::vec(0_u64..30, 0..40), 1..30),
            intervals in 1_u16..6,
            times in 1_u16..7,
        ) {
            let mut touched = TouchedPages::new(TouchedOptions {
                intervals: NonZeroU16::new(intervals).unwrap(),
                times: NonZeroU16::new(times).unwrap(),
            });
            let sets: Vec<BTreeSet<u64>> = steps
                .iter()
                .map(|pages| pages.iter().copied().collect())
                .collect();
            for (end, pages) in (1..).zip(&steps) {
                for &page in pages {
                    touched.touch(PageNumber(page));
                }
                let window = &sets[end - usize::from(intervals).min(end)..end];
                let in_window = |page| window.iter().filter(|set| set.contains(page)).count();
                let all: BTreeSet<_> = sets[..end].iter().flatten().collect();
                let working_set = all
                    .iter()
                    .filter(|&&page| in_window(page) >= usize::from(times))
                    .count();
                let expected = TouchedStep {
                    touched: PageCount(sets[end - 1].len() as u64),
                    cumulative: PageCount(all.len() as u64),
                    working_set: PageCount(working_set as u64),
                };
                prop_assert_eq!(touched.end_interval(), expected);
            }
        }
    }
}
