//! The LRU stack of a sample of pages, and of disjoint parts of the sample, with one common table.
//!
//! A sampled page has one slot: its hash (which identifies the page, because hashing is a bijection), the time of
//! its last use in the whole sample and in its part, and two numbers for the caller.
//! A reference therefore costs one cache miss. Valid times are bits in vectors, as in `access_tree`,
//! but these vectors are short and grow at their end: most references are to pages used
//! recently, whose distance is read from the last block of bits. The tree of counts (Fenwick 1994) is used only for
//! the rest.
//!
//! A page's part is determined by its hash (`steps`). The distances of a part are those of a sample that
//! consists of it alone, so every part gives an estimate of the same kind as the whole. While all pages are sampled their
//! distances are exact, and no part is needed: the stack is divided when the first page is dropped, and the parts then have
//! the pages in the order of the whole.
//!
//! Cost: 24 bytes per slot, 4/3 to 4 slots per page; 1 byte of bit vectors per page; O(log(pages / 128)) per reference.
//! Not here: selecting the sampled pages (`hash`), deriving the curve from distances (`reuses`).

use crate::parts::access_bits::{AccessBits, WORD_BITS};
use crate::parts::hash::PageHash;
use crate::parts::steps::{REPLICATES, replicate_of};
use crate::parts::sys::prefetch;

/// A sampled page.
#[derive(Debug, Clone, Copy)]
struct Slot {
    hash: u64,
    weights: Weights,
    /// Its last use in the whole sample; [`FREE`] for a free slot.
    time: u32,
    /// Its last use in its part, if the stack is divided.
    part_time: u32,
}

/// Weights of the accesses to a page: all of them, and those after many other pages. Initially 0.
///
/// In single precision, to keep slots small: a sum of equal weights is exact up to 2^24 of them, and then saturates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Weights {
    pub(crate) all: f32,
    pub(crate) far: f32,
}

const NO_WEIGHTS: Weights = Weights { all: 0.0, far: 0.0 };

/// A time that is never assigned.
const FREE: u32 = u32::MAX;

const NO_PAGE: Slot = Slot {
    hash: 0,
    weights: NO_WEIGHTS,
    time: FREE,
    part_time: FREE,
};

/// Result of an access to a page.
#[derive(Debug, PartialEq)]
pub(crate) struct Use<'stack> {
    /// Other sampled pages used since its last use, in the whole and in its part (0 in an undivided stack); `None` on first
    /// use.
    pub(crate) distances: Option<Distances>,
    /// The caller's weights of the page.
    pub(crate) weights: &'stack mut Weights,
}

/// Distances of one reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Distances {
    pub(crate) whole: usize,
    pub(crate) part: usize,
}

/// Minimum number of times before pages are renumbered.
const TIMES_MIN: usize = 512;

/// Times per page after renumbering: three of four are free.
const TIMES_PER_PAGE: usize = 4;

/// The pages of a sample in the order of their last use, as a whole and by part.
#[derive(Debug, Clone)]
pub(crate) struct SampledStack {
    /// A secret odd factor.
    salt: u64,
    /// A power of two of slots, at most three in four in use.
    slots: Vec<Slot>,
    /// 64 minus the number of bits in a slot's index.
    shift: u32,
    pages: usize,
    whole: AccessBits,
    /// Empty before the stack is divided.
    parts: [AccessBits; REPLICATES],
    is_divided: bool,
    /// Number of times at which pages are renumbered.
    times: usize,
}

const SLOTS_MIN_BITS: u32 = 6;

impl SampledStack {
    /// Returns an empty stack, divided into parts or not.
    pub(crate) fn new(is_divided: bool) -> Self {
        Self {
            salt: PageHash::salted().of(plimsoll_flow::PageNumber(0)) | 1,
            slots: vec![NO_PAGE; 1 << SLOTS_MIN_BITS],
            shift: 64 - SLOTS_MIN_BITS,
            pages: 0,
            whole: AccessBits::default(),
            parts: Default::default(),
            is_divided,
            times: TIMES_MIN,
        }
    }

    /// Number of pages in the sample.
    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// Number of pages in each part of a divided stack.
    pub(crate) fn part_pages(&self) -> [usize; REPLICATES] {
        self.parts.each_ref().map(AccessBits::marked)
    }

    /// Prefetches the page's slot.
    pub(crate) fn prefetch(&self, hash: u64) {
        prefetch(&self.slots, self.home_of(hash));
    }

    /// Prefetches the times of the page, whose slot should have arrived; without effect if it is not in its home slot.
    #[inline]
    pub(crate) fn prefetch_times(&self, hash: u64) {
        let slot = self.slots[self.home_of(hash)];
        self.whole.prefetch(slot.time);
        self.parts[replicate_of(hash)].prefetch(slot.part_time);
    }

    /// Moves a page to the top; `DIVIDED` is whether the stack is divided.
    #[inline(always)]
    pub(crate) fn touch<const DIVIDED: bool>(&mut self, hash: u64) -> Use<'_> {
        debug_assert_eq!(DIVIDED, self.is_divided);
        if self.whole.taken() >= self.times {
            self.number_anew();
        }
        let mut index = self.home_of(hash);
        // One test for both ends of the search: a free slot's hash is not inspected.
        while self.slots[index].hash != hash || self.slots[index].time == FREE {
            if self.slots[index].time == FREE {
                let index = self.insert(index, hash);
                return Use {
                    distances: None,
                    weights: &mut self.slots[index].weights,
                };
            }
            index = (index + 1) & (self.slots.len() - 1);
        }
        let slot = &mut self.slots[index];
        // A page used last in the whole sample was also used last in its part, and keeps its time.
        let distances = if slot.time == self.whole.last() {
            Distances { whole: 0, part: 0 }
        } else {
            let whole = self.whole.strike(slot.time);
            slot.time = self.whole.take();
            let mut part = 0;
            if DIVIDED {
                let bits = &mut self.parts[replicate_of(hash)];
                part = bits.strike(slot.part_time);
                slot.part_time = bits.take();
            }
            Distances { whole, part }
        };
        Use {
            distances: Some(distances),
            weights: &mut slot.weights,
        }
    }

    /// Drops the pages with the largest hashes, keeping `keep` (at least 1, and less than present), and divides the stack if
    /// it is not. Returns the smallest hash that was dropped, which is above 0.
    pub(crate) fn keep_smallest(&mut self, keep: usize) -> u64 {
        let mut hashes: Vec<u64> = self.taken().map(|slot| slot.hash).collect();
        let (_, &mut dropped, _) = hashes.select_nth_unstable(keep);
        for slot in &mut self.slots {
            if slot.time != FREE && slot.hash >= dropped {
                self.whole.strike(slot.time);
                if self.is_divided {
                    self.parts[replicate_of(slot.hash)].strike(slot.part_time);
                }
                *slot = NO_PAGE;
            }
        }
        self.pages = keep;
        // The remaining slots must be found again by a search that stops at a free one.
        self.place_anew(self.shift);
        self.number_anew();
        if !self.is_divided {
            self.divide();
        }
        dropped
    }

    /// Gives every page a time in its part. The times of the whole have just been renumbered.
    fn divide(&mut self) {
        let mut in_order = vec![0; self.pages];
        for (index, slot) in self.slots.iter().enumerate() {
            if slot.time != FREE {
                in_order[slot.time as usize] = index;
            }
        }
        for index in in_order {
            let slot = &mut self.slots[index];
            slot.part_time = self.parts[replicate_of(slot.hash)].take();
        }
        self.is_divided = true;
    }

    /// Bytes of heap allocated.
    pub(crate) fn memory_bytes(&self) -> usize {
        let rows = self
            .parts
            .iter()
            .map(AccessBits::memory_bytes)
            .sum::<usize>();
        self.slots.capacity() * size_of::<Slot>() + self.whole.memory_bytes() + rows
    }

    fn taken(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter(|slot| slot.time != FREE)
    }

    /// The slot at which a search for the page begins.
    #[inline]
    fn home_of(&self, hash: u64) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "below the number of slots")]
        let home = (hash.wrapping_mul(self.salt) >> self.shift) as usize;
        home
    }

    /// Inserts a page into the free slot where it belongs. Returns its index.
    #[cold]
    fn insert(&mut self, index: usize, hash: u64) -> usize {
        let part_time = match self.is_divided {
            true => self.parts[replicate_of(hash)].take(),
            false => FREE,
        };
        self.slots[index] = Slot {
            hash,
            weights: NO_WEIGHTS,
            time: self.whole.take(),
            part_time,
        };
        self.pages += 1;
        if self.pages * 4 <= self.slots.len() * 3 {
            return index;
        }
        self.place_anew(self.shift - 1);
        let mut index = self.home_of(hash);
        while self.slots[index].hash != hash || self.slots[index].time == FREE {
            index = (index + 1) & (self.slots.len() - 1);
        }
        index
    }

    /// Inserts every page into a new table whose indices have `64 - shift` bits.
    fn place_anew(&mut self, shift: u32) {
        let slots = vec![NO_PAGE; 1 << (64 - shift)];
        let before = std::mem::replace(&mut self.slots, slots);
        self.shift = shift;
        for slot in before {
            if slot.time != FREE {
                let mut index = self.home_of(slot.hash);
                while self.slots[index].time != FREE {
                    index = (index + 1) & (self.slots.len() - 1);
                }
                self.slots[index] = slot;
            }
        }
    }

    /// Renumbers the valid times from 0, in their order.
    #[cold]
    fn number_anew(&mut self) {
        let ranks = self.whole.ranks();
        let part_ranks = self.parts.each_ref().map(AccessBits::ranks);
        for slot in self.slots.iter_mut().filter(|slot| slot.time != FREE) {
            slot.time = self.whole.rank(&ranks, slot.time);
            if self.is_divided {
                let part = replicate_of(slot.hash);
                slot.part_time = self.parts[part].rank(&part_ranks[part], slot.part_time);
            }
        }
        self.whole.number_anew();
        self.parts.iter_mut().for_each(AccessBits::number_anew);
        // Stays below the value that means "free".
        let most = FREE as usize - WORD_BITS;
        self.times = (self.pages * TIMES_PER_PAGE).clamp(TIMES_MIN, most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::naive::NaiveStack;
    use proptest::prelude::*;

    /// A stack moved to the front, as a whole and by part, from which pages can be dropped.
    #[derive(Default)]
    struct Twin {
        pages: Vec<u64>,
        touched: Vec<u64>,
    }

    impl Twin {
        fn distances(&self, hash: u64) -> Option<Distances> {
            let before = &self.pages[..self.pages.iter().position(|&page| page == hash)?];
            let same_part = |page: &&u64| *page % 16 == hash % 16;
            Some(Distances {
                whole: before.len(),
                part: before.iter().filter(same_part).count(),
            })
        }

        /// Returns distances, and how often the page was touched before.
        fn touch(&mut self, hash: u64) -> (Option<Distances>, f64) {
            let distances = self.distances(hash);
            let before = self.touched.iter().filter(|&&page| page == hash).count();
            self.pages.retain(|&page| page != hash);
            self.pages.insert(0, hash);
            self.touched.push(hash);
            (distances, before as f64)
        }

        fn keep_smallest(&mut self, keep: usize) -> u64 {
            let mut sorted = self.pages.clone();
            sorted.sort_unstable();
            let dropped = sorted[keep];
            self.pages.retain(|&page| page < dropped);
            self.touched.retain(|&page| page < dropped);
            dropped
        }
    }

    proptest! {
        #[test]
        fn uses_and_drops_agree_with_a_list(
            steps in prop_oneof![
                prop::collection::vec((0_u64..40, 0_usize..400), 1..3_000),
                prop::collection::vec((0_u64..900, 0_usize..2_000), 1..3_000),
            ],
            spread in prop_oneof![Just(1_u64), Just(16), any::<u64>().prop_map(|n| n | 1)],
            is_divided in any::<bool>(),
        ) {
            let (mut stack, mut twin) = (SampledStack::new(is_divided), Twin::default());
            for (page, drop) in steps {
                let hash = page.wrapping_mul(spread);
                let (mut expected, weight) = twin.touch(hash);
                let found = match stack.is_divided {
                    true => stack.touch::<true>(hash),
                    false => {
                        if let Some(expected) = &mut expected {
                            expected.part = 0;
                        }
                        stack.touch::<false>(hash)
                    }
                };
                prop_assert_eq!((found.distances, f64::from(found.weights.all)), (expected, weight));
                found.weights.all += 1.0;
                if drop < 3 && stack.pages() > drop + 1 {
                    let keep = stack.pages() - drop - 1;
                    prop_assert_eq!(stack.keep_smallest(keep), twin.keep_smallest(keep));
                }
                prop_assert_eq!(stack.pages(), twin.pages.len());
            }
            if stack.is_divided {
                prop_assert_eq!(stack.part_pages().iter().sum::<usize>(), stack.pages());
            }
        }
    }

    #[test]
    fn a_large_stack_agrees_with_a_list() {
        let mut random = crate::parts::streams::Random::new(3);
        let (mut stack, mut naive) = (SampledStack::new(true), NaiveStack::default());
        for _ in 0..60_000 {
            // Mostly near, at times far: the words, the last blocks and the tree all answer.
            let page = (random.share().powi(4) * 6_000.0) as u64;
            let found = stack.touch::<true>(page).distances;
            let found = found.map(|distances| distances.whole as u64);
            assert_eq!(found, naive.touch(page));
        }
    }
}
