//! How much the order of replacement matters to a guest's reads, and how far the guest departs from an order.
//!
//! A memory of `d` pages that evicts at random is computed in expectation, for [`SIZES`] values of `d` at once: a page
//! that enters is still there later with probability `exp(-h)`, where `h` is the sum of evictions per
//! page of that memory since. A page that enters a full memory evicts one; a page that is read leaves it. All this on a
//! sample of pages by a hash, with sizes in proportion. What such a memory would have missed beyond LRU, or the
//! reverse, shows how much a kernel's order can change.
//!
//! A memory that evicts in the order in which pages were read (first in, first out) is computed on the same sample, with
//! the guest's own memory in it: a page read from the disk is there until the memory has missed as often as
//! it has pages. Kernels come close to that for files that are read, not mapped.
//!
//! In a second, smaller sample the pages that the guest holds are listed in the order in which they were read.
//! First in, first out would evict the first of them. A page from the first sixteenth of the list counts as in order,
//! because kernels move pages in groups.

use plimsoll_flow::{PageCount, PageNumber};

use super::grid::{SIZES, sizes};
use crate::parts::hash::{PageHash, PageMap, page_map};

/// Pages of the sample behind the guest.
const SAMPLE_MAX: usize = 1 << 12;
/// Pages of the sample within the guest.
const HELD_MAX: usize = 512;
/// Evictions below which nothing is known of their order.
const EVICTIONS_MIN: f64 = 32.0;
/// Part of the pages that counts as the oldest.
const OLDEST: usize = 16;
/// A page that is there with a probability below `exp` of minus this is dropped.
const GONE: f64 = 7.0;

/// Random replacement beside LRU, and the order of evictions.
#[derive(Debug, Clone)]
pub(super) struct Replacement {
    hash: PageHash,
    sizes: [f64; SIZES],
    behind: Behind,
    in_turn: InTurn,
    held: Held,
}

/// A sample of the pages read, for memories that evict in that order.
#[derive(Debug, Clone)]
struct InTurn {
    hash_max: u64,
    /// For each page, the misses of each memory when the page entered it last.
    pages: PageMap<Turns>,
    /// Pages in the guest.
    held: f64,
    misses: [f64; SIZES],
    reads: f64,
    /// Misses less those of LRU.
    more: [f64; SIZES],
}

#[derive(Debug, Clone)]
struct Turns {
    entered: [f64; SIZES],
    is_held: bool,
}

/// A sample of the pages that left the guest.
#[derive(Debug, Clone)]
struct Behind {
    /// Pages of the sample have a hash of at most this.
    hash_max: u64,
    /// Evictions per page of each memory when the page entered.
    entered: PageMap<[f64; SIZES]>,
    /// The same now.
    evictions: [f64; SIZES],
    /// Expected pages in each memory.
    pages: [f64; SIZES],
    reads: f64,
    /// Misses of random replacement less those of LRU.
    more: [f64; SIZES],
}

/// A sample of the pages in the guest, in the order of their reads.
#[derive(Debug, Clone)]
struct Held {
    hash_max: u64,
    order: Vec<PageNumber>,
    reads: f64,
    /// Reads of pages that are in the list.
    again: f64,
    evictions: f64,
    out_of_order: f64,
}

impl Replacement {
    pub(super) fn new(ghost: PageCount) -> Self {
        Self {
            hash: PageHash::salted(),
            sizes: sizes(ghost),
            behind: Behind {
                hash_max: u64::MAX,
                entered: page_map(),
                evictions: [0.0; SIZES],
                pages: [0.0; SIZES],
                reads: 0.0,
                more: [0.0; SIZES],
            },
            in_turn: InTurn {
                hash_max: u64::MAX,
                pages: page_map(),
                held: 0.0,
                misses: [0.0; SIZES],
                reads: 0.0,
                more: [0.0; SIZES],
            },
            held: Held {
                hash_max: u64::MAX,
                order: Vec::new(),
                reads: 0.0,
                again: 0.0,
                evictions: 0.0,
                out_of_order: 0.0,
            },
        }
    }

    /// Restarts the counts and the sample of pages in the guest. Memories of other sizes begin with what these had.
    pub(super) fn restart(&mut self, ghost: PageCount) {
        let new = Self::new(ghost);
        self.sizes = new.sizes;
        self.held = new.held;
        (self.behind.reads, self.behind.more) = (0.0, [0.0; SIZES]);
        (self.in_turn.reads, self.in_turn.more) = (0.0, [0.0; SIZES]);
    }

    /// The guest read a page that is not in it, found in the ghost list behind `beyond` others.
    pub(super) fn missed(&mut self, page: PageNumber, beyond: Option<u64>) {
        let hash = self.hash.of(page);
        let hits = self.sizes.map(|size| {
            f64::from(u8::from(
                beyond.is_some_and(|beyond| (beyond as f64) < size),
            ))
        });
        if hash <= self.behind.hash_max {
            let there = self.behind.remove(page);
            self.behind.reads += 1.0;
            for size in 0..SIZES {
                self.behind.more[size] += hits[size] - there[size];
            }
        }
        if hash <= self.in_turn.hash_max {
            let there = self.in_turn.enter(page, &self.sizes, self.hash);
            self.in_turn.reads += 1.0;
            for size in 0..SIZES {
                self.in_turn.more[size] += hits[size] - f64::from(u8::from(there[size]));
            }
        }
        self.held.read(page, hash, self.hash);
    }

    /// A page left the guest.
    pub(super) fn evicted(&mut self, page: PageNumber) {
        let hash = self.hash.of(page);
        if hash <= self.behind.hash_max {
            self.behind.remove(page);
            self.behind.enter(page, &self.sizes);
            if self.behind.entered.len() > SAMPLE_MAX {
                self.behind.thin_out(self.hash);
            }
        }
        if hash <= self.in_turn.hash_max {
            self.in_turn.evicted(page, &self.sizes, self.hash);
        }
        if hash <= self.held.hash_max {
            self.held.evicted(page);
        }
    }

    /// A page was overwritten or freed.
    pub(super) fn released(&mut self, page: PageNumber) {
        self.behind.remove(page);
        self.held.order.retain(|&other| other != page);
    }

    /// What another order may change in the share of reads that miss, 0.0 to 1.0: the larger difference of the order of
    /// reads, and of no order so far as the guest departs from that.
    pub(super) fn differences(&self) -> [f64; SIZES] {
        let out_of_order = self.out_of_order();
        std::array::from_fn(|size| {
            let random = self.behind.more[size] / self.behind.reads.max(1.0);
            let in_turn = self.in_turn.more[size] / self.in_turn.reads.max(1.0);
            (random.abs() * out_of_order).max(in_turn.abs())
        })
    }

    pub(super) fn out_of_order(&self) -> f64 {
        if self.held.evictions < EVICTIONS_MIN {
            return 1.0;
        }
        self.held.out_of_order / self.held.evictions
    }

    pub(super) fn unreported(&self) -> f64 {
        self.held.again / self.held.reads.max(1.0)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let page = size_of::<(PageNumber, [f64; SIZES])>() + 1;
        (self.behind.entered.capacity() + self.in_turn.pages.capacity()) * page
            + self.held.order.capacity() * size_of::<PageNumber>()
    }
}

impl Behind {
    /// Share of the pages in the sample.
    fn rate(&self) -> f64 {
        self.hash_max as f64 / u64::MAX as f64
    }

    /// Removes a page. Returns the probability that it was in each memory.
    fn remove(&mut self, page: PageNumber) -> [f64; SIZES] {
        let Some(entered) = self.entered.remove(&page) else {
            return [0.0; SIZES];
        };
        let there = self.there(&entered);
        for (pages, there) in self.pages.iter_mut().zip(there) {
            *pages = (*pages - there).max(0.0);
        }
        there
    }

    fn there(&self, entered: &[f64; SIZES]) -> [f64; SIZES] {
        std::array::from_fn(|size| (entered[size] - self.evictions[size]).exp())
    }

    fn enter(&mut self, page: PageNumber, sizes: &[f64; SIZES]) {
        let rate = self.rate();
        for ((pages, evictions), size) in self.pages.iter_mut().zip(&mut self.evictions).zip(sizes)
        {
            let most = (size * rate).max(1.0);
            *pages += 1.0;
            if *pages > most {
                *evictions += (*pages - most) / most;
                *pages = most;
            }
        }
        self.entered.insert(page, self.evictions);
    }

    /// Drops the pages that are hardly anywhere, and if these are few, every second page.
    fn thin_out(&mut self, hash: PageHash) {
        let largest = self.evictions[SIZES - 1];
        self.entered
            .retain(|_, entered| largest - entered[SIZES - 1] < GONE);
        if self.entered.len() <= SAMPLE_MAX / 4 * 3 {
            return;
        }
        self.hash_max /= 2;
        let leave = self
            .entered
            .extract_if(|&page, _| hash.of(page) > self.hash_max);
        let leave: Vec<_> = leave.map(|(_, entered)| entered).collect();
        for entered in leave {
            let there = self.there(&entered);
            for (pages, there) in self.pages.iter_mut().zip(there) {
                *pages = (*pages - there).max(0.0);
            }
        }
        // Later reads count as much as earlier ones.
        self.reads /= 2.0;
        self.more = self.more.map(|more| more / 2.0);
    }
}

impl InTurn {
    /// A page was read: it enters the guest, and the memories that do not have it. Returns which had it.
    fn enter(&mut self, page: PageNumber, sizes: &[f64; SIZES], hash: PageHash) -> [bool; SIZES] {
        let rate = self.hash_max as f64 / u64::MAX as f64;
        let turns = self.pages.entry(page).or_insert(Turns {
            entered: [f64::NEG_INFINITY; SIZES],
            is_held: false,
        });
        let there = std::array::from_fn(|size| {
            let there = self.misses[size] - turns.entered[size] < self.held + sizes[size] * rate;
            if !there {
                self.misses[size] += 1.0;
                turns.entered[size] = self.misses[size];
            }
            there
        });
        if !std::mem::replace(&mut turns.is_held, true) {
            self.held += 1.0;
        }
        if self.pages.len() > SAMPLE_MAX {
            self.thin_out(sizes[SIZES - 1] * rate, hash);
        }
        there
    }

    /// A page left the guest. One that it was not seen to read was written.
    fn evicted(&mut self, page: PageNumber, sizes: &[f64; SIZES], hash: PageHash) {
        if !self.pages.get(&page).is_some_and(|turns| turns.is_held) {
            let there = self.enter(page, sizes, hash);
            // It was written as long ago as a page was read that leaves the guest in turn.
            if let Some(turns) = self.pages.get_mut(&page) {
                let entered = turns.entered.iter_mut().zip(there);
                for (entered, _) in entered.filter(|(_, there)| !there) {
                    *entered -= self.held;
                }
            }
        }
        if let Some(turns) = self.pages.get_mut(&page)
            && std::mem::replace(&mut turns.is_held, false)
        {
            self.held -= 1.0;
        }
    }

    /// Drops the pages that are nowhere, and if these are few, every second page.
    fn thin_out(&mut self, largest: f64, hash: PageHash) {
        let (misses, pages) = (self.misses[SIZES - 1], self.held + largest);
        self.pages
            .retain(|_, turns| turns.is_held || misses - turns.entered[SIZES - 1] < pages);
        if self.pages.len() <= SAMPLE_MAX / 4 * 3 {
            return;
        }
        self.hash_max /= 2;
        let hash_max = self.hash_max;
        self.pages.retain(|&page, turns| {
            turns.entered = turns.entered.map(|misses| misses / 2.0);
            hash.of(page) <= hash_max
        });
        let held = self.pages.values().filter(|turns| turns.is_held);
        self.held = held.count() as f64;
        self.misses = self.misses.map(|misses| misses / 2.0);
        self.reads /= 2.0;
        self.more = self.more.map(|more| more / 2.0);
    }
}

impl Held {
    fn read(&mut self, page: PageNumber, hash: u64, hashes: PageHash) {
        if hash > self.hash_max {
            return;
        }
        self.reads += 1.0;
        if let Some(place) = self.order.iter().position(|&other| other == page) {
            self.again += 1.0;
            self.order.remove(place);
        }
        self.order.push(page);
        if self.order.len() > HELD_MAX {
            self.hash_max /= 2;
            let hash_max = self.hash_max;
            self.order.retain(|&page| hashes.of(page) <= hash_max);
        }
    }

    fn evicted(&mut self, page: PageNumber) {
        let Some(place) = self.order.iter().position(|&other| other == page) else {
            return;
        };
        self.evictions += 1.0;
        if place * OLDEST > self.order.len() {
            self.out_of_order += 1.0;
        }
        self.order.remove(place);
    }
}
