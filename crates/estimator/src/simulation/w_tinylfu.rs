//! W-TinyLFU: a small LRU window, from which a page enters the main cache if it is used more often than the page it displaces.
//!
//! The window has a hundredth of the cache. The main cache is a segmented LRU: pages enter its probation, and a use there
//! moves them to its protected four fifths, whose oldest page goes back. Uses are counted up to 15, and all counts are
//! halved after ten uses for each page of the cache.
//!
//! Source: [Einziger17] §3 and §4. Departs from it in this: counts are exact, where the paper's sketch estimates them by hashes
//! and the first use in a Bloom filter.

use super::queues::Queues;
use super::{CachePolicy, CachePolicyRow};

pub(super) const ROW: CachePolicyRow = CachePolicyRow {
    name: "w-tinylfu",
    help: "Admits from a small window what is used more often than what it displaces",
    source: "[Einziger17]",
    make: |capacity, pages| {
        let window = (capacity / 100).max(1);
        let main = capacity - window;
        Box::new(WTinyLfu {
            window,
            main,
            protected: u32::try_from(u64::from(main) * 4 / 5).unwrap_or(main),
            uses: 0,
            halved: 0,
            counts: vec![Count::default(); pages as usize],
            queues: Queues::new(pages),
        })
    },
};

const WINDOW: usize = 0;
const PROBATION: usize = 1;
const PROTECTED: usize = 2;
/// The most uses of a page that are counted.
const COUNT_MAX: u8 = 15;
/// Uses after which counts are halved, for each page of the cache.
const SAMPLE: u64 = 10;

/// Number of uses of a page, as of a number of halvings.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    halved: u32,
    uses: u8,
}

struct WTinyLfu {
    /// Maximum numbers of pages.
    window: u32,
    main: u32,
    protected: u32,
    /// Uses since the counts were halved.
    uses: u64,
    /// How often they were halved.
    halved: u32,
    counts: Vec<Count>,
    queues: Queues<3>,
}

impl WTinyLfu {
    fn uses_of(&self, page: u32) -> u8 {
        let count = self.counts[page as usize];
        let halvings = self.halved.wrapping_sub(count.halved);
        count.uses.checked_shr(halvings).unwrap_or(0)
    }

    fn count(&mut self, page: u32) {
        let uses = (self.uses_of(page) + 1).min(COUNT_MAX);
        self.counts[page as usize] = Count {
            halved: self.halved,
            uses,
        };
        self.uses += 1;
        if self.uses == SAMPLE * u64::from(self.window + self.main) {
            self.uses = 0;
            self.halved = self.halved.wrapping_add(1);
        }
    }

    /// The window's oldest page enters the main cache, or leaves.
    fn end_window(&mut self) {
        let page = self.queues.pop(WINDOW);
        if self.queues.len(PROBATION) + self.queues.len(PROTECTED) == self.main {
            let queue = match self.queues.len(PROBATION) {
                0 => PROTECTED,
                _ => PROBATION,
            };
            if self.main == 0 || self.uses_of(page) <= self.uses_of(self.queues.oldest(queue)) {
                return;
            }
            self.queues.pop(queue);
        }
        self.queues.push(PROBATION, page);
    }
}

impl CachePolicy for WTinyLfu {
    fn access(&mut self, page: u32) -> bool {
        self.count(page);
        match self.queues.queue_of(page) {
            Some(WINDOW) => self.queues.push(WINDOW, page),
            Some(_) => {
                self.queues.push(PROTECTED, page);
                if self.queues.len(PROTECTED) > self.protected {
                    let oldest = self.queues.pop(PROTECTED);
                    self.queues.push(PROBATION, oldest);
                }
            }
            None => {
                self.queues.push(WINDOW, page);
                if self.queues.len(WINDOW) > self.window {
                    self.end_window();
                }
                return false;
            }
        }
        true
    }
}

/// The policy on three lists, oldest first, with a table of counts that are halved one by one.
#[cfg(test)]
pub(super) fn naive(capacity: usize, stream: &[u32]) -> Vec<bool> {
    let mut counts = std::collections::BTreeMap::<u32, u32>::new();
    let [mut window, mut probation, mut protected] = [const { Vec::<u32>::new() }; 3];
    let window_size = (capacity / 100).max(1);
    let main_size = capacity - window_size;
    let mut hits = Vec::new();
    for (time, &page) in (1..).zip(stream) {
        let count = counts.entry(page).or_default();
        *count = (*count + 1).min(15);
        if time % (10 * capacity) == 0 {
            counts.values_mut().for_each(|count| *count /= 2);
        }
        let was_in = |list: &mut Vec<u32>| {
            let before = list.len();
            list.retain(|&other| other != page);
            list.len() < before
        };
        if was_in(&mut window) {
            window.push(page);
            hits.push(true);
            continue;
        }
        if was_in(&mut probation) || was_in(&mut protected) {
            protected.push(page);
            if protected.len() > main_size * 4 / 5 {
                probation.push(protected.remove(0));
            }
            hits.push(true);
            continue;
        }
        hits.push(false);
        window.push(page);
        if window.len() <= window_size {
            continue;
        }
        let candidate = window.remove(0);
        if probation.len() + protected.len() < main_size {
            probation.push(candidate);
        } else if main_size > 0 {
            let victims = if probation.is_empty() {
                &mut protected
            } else {
                &mut probation
            };
            if counts[&candidate] > counts[&victims[0]] {
                victims.remove(0);
                probation.push(candidate);
            }
        }
    }
    hits
}
