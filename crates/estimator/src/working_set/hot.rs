//! The pages to load first when a VM resumes from a snapshot: those that a run used most steadily.
//!
//! A run is cut into intervals, and a page is the hotter the more of them it is used in; among equals, the earlier its
//! first use. The number of intervals counts rather than that of references, because a page that is loaded saves one
//! fault, however often it is used; use in many intervals is what recurs in the next run, and a page of start-up alone comes
//! after those, in the order in which it was needed.
//!
//! Cost: a table lookup for each page and interval; 32 bytes for each distinct page.
//! Not here: the cutting into intervals, and loading.

use plimsoll_flow::PageNumber;

use crate::parts::hash::{PageMap, page_map};

/// A page and its uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HotPage {
    /// The page.
    pub page: PageNumber,
    /// Number of intervals in which it was used.
    pub intervals: u32,
    /// Number of references, or of intervals where references are not counted.
    pub uses: u64,
}

/// Uses of the pages of a run.
#[derive(Debug, Clone)]
pub struct HotPages {
    pages: PageMap<Uses>,
    interval: u32,
    references: u64,
}

#[derive(Debug, Clone, Copy)]
struct Uses {
    last_interval: u32,
    intervals: u32,
    uses: u64,
    /// Its place among the first uses of all pages.
    first: u64,
}

impl HotPages {
    /// Returns an empty record, in the first interval.
    pub fn new() -> Self {
        Self {
            pages: page_map(),
            interval: 0,
            references: 0,
        }
    }

    /// Adds references of the interval, in order.
    pub fn observe(&mut self, pages: &[PageNumber]) {
        self.references += pages.len() as u64;
        for &page in pages {
            let first = self.pages.len() as u64;
            let uses = self.pages.entry(page).or_insert(Uses {
                last_interval: u32::MAX,
                intervals: 0,
                uses: 0,
                first,
            });
            uses.uses += 1;
            if uses.last_interval != self.interval {
                uses.last_interval = self.interval;
                uses.intervals += 1;
            }
        }
    }

    /// Begins the next interval.
    pub fn end_interval(&mut self) {
        self.interval = (self.interval + 1).min(u32::MAX - 1);
    }

    /// Number of references so far.
    pub fn references(&self) -> u64 {
        self.references
    }

    /// Number of distinct pages so far.
    pub fn distinct(&self) -> u64 {
        self.pages.len() as u64
    }

    /// At most so many pages, the hottest first.
    pub fn hottest(&self, pages: u64) -> Vec<HotPage> {
        let mut all: Vec<_> = self.pages.iter().collect();
        all.sort_unstable_by_key(|(_, uses)| (std::cmp::Reverse(uses.intervals), uses.first));
        all.truncate(usize::try_from(pages).unwrap_or(usize::MAX));
        let pages = all.into_iter().map(|(&page, uses)| HotPage {
            page,
            intervals: uses.intervals,
            uses: uses.uses,
        });
        pages.collect()
    }
}

impl Default for HotPages {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::{batch_of, zipf};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn hot_of(intervals: &[Vec<u64>]) -> HotPages {
        let mut hot = HotPages::new();
        for pages in intervals {
            hot.observe(&batch_of(pages.iter().copied()));
            hot.end_interval();
        }
        hot
    }

    proptest! {
        #[test]
        fn pages_are_in_the_order_of_their_intervals_and_then_of_their_first_use(
            intervals in prop::collection::vec(prop::collection::vec(0_u64..20, 0..30), 1..8),
            pages in 0_u64..25,
        ) {
            let all: Vec<u64> = intervals.concat();
            let count = |page: u64| intervals.iter().filter(|interval| interval.contains(&page)).count() as u32;
            let first = |page: u64| all.iter().position(|&other| other == page);
            let mut expected: Vec<u64> = all.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
            expected.sort_by_key(|&page| (u32::MAX - count(page), first(page)));
            let expected: Vec<_> = expected.into_iter().take(pages as usize).map(|page| HotPage {
                page: PageNumber(page),
                intervals: count(page),
                uses: all.iter().filter(|&&other| other == page).count() as u64,
            }).collect();
            let hot = hot_of(&intervals);
            prop_assert_eq!(hot.hottest(pages), expected);
            prop_assert_eq!(hot.references(), all.len() as u64);
            prop_assert_eq!(hot.distinct(), all.into_iter().collect::<BTreeSet<_>>().len() as u64);
        }
    }

    #[test]
    fn the_pages_of_one_run_are_those_of_the_next_run_of_the_workload() {
        // A service: start-up once, then requests to a skewed set of pages that differ from run to run.
        let run = |seed| -> Vec<Vec<u64>> {
            let start_up: Vec<u64> = (1 << 20..(1 << 20) + 3_000).collect();
            let mut requests = zipf(60_000, 1.1, seed);
            let served = (0..20).map(|_| requests.by_ref().take(20_000).collect());
            [start_up].into_iter().chain(served).collect()
        };
        let (before, next) = (run(1), run(2));
        let touches: Vec<u64> = next.concat();
        let next_pages: BTreeSet<u64> = touches.iter().copied().collect();
        let hot = hot_of(&before);
        let list: BTreeSet<_> = hot
            .hottest(next_pages.len() as u64 * 13 / 10)
            .into_iter()
            .map(|hot| hot.page.0)
            .collect();
        let covered = touches.iter().filter(|page| list.contains(page)).count();
        assert!(
            covered as f64 >= 0.9 * touches.len() as f64,
            "{covered} of {}",
            touches.len()
        );
    }
}
