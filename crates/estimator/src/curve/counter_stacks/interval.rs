//! Exact reuse distances inside one interval of the stream.
//!
//! Counters that start at interval borders cannot distinguish events between two borders. An
//! interval is short, so the definition can be evaluated directly: each page has the timestamp of
//! its last access, each timestamp that is some page's last access is a bit, and the number of pages accessed
//! since is the number of bits after the page's own ([Olken81], without the tree, because
//! the bits of one interval fit into the first-level cache).
//!
//! The table of pages is never cleared: an entry of an earlier interval counts as free.
//!
//! Cost: one probe of a table of 32 to 64 bytes for each reference of the interval; for a count, at most 16
//! words of bits and one sum for every 512 references since the last use.

/// Number of words counted together: one entry of `groups`.
const GROUP_WORDS: usize = 8;

#[derive(Debug, Clone, Copy)]
struct Slot {
    page: u64,
    /// Interval number (never 0 for a used slot), then the time within it.
    interval: u32,
    time: u32,
}

#[inline(always)]
fn ones(words: &[u64]) -> u32 {
    let mut ones = 0_u32;
    for word in words {
        ones = ones.wrapping_add(word.count_ones());
    }
    ones
}

/// The LRU stack of one interval.
#[derive(Debug, Clone)]
pub(super) struct Interval {
    /// Number of slots: a power of two, at least twice the number of references in an interval.
    slots: Vec<Slot>,
    /// Secret multiplier of hashes; the high bits of the product select the slot, so that slots cannot be predicted.
    salt: u64,
    shift: u32,
    number: u32,
    /// Bit `t` is set if the reference at time `t` is the last one to its page.
    words: Vec<u64>,
    /// Number of set bits in each group of words.
    groups: Vec<u32>,
    references: u32,
    distinct: u32,
}

impl Interval {
    /// Creates a stack with room for `length` references, at least 1.
    pub(super) fn new(length: u32, salt: u64) -> Self {
        let length = length as usize;
        let slots = (2 * length).next_power_of_two();
        let words = length.div_ceil(64);
        let free = Slot {
            page: 0,
            interval: 0,
            time: 0,
        };
        Self {
            slots: vec![free; slots],
            salt: salt | 1,
            shift: u64::BITS - slots.trailing_zeros(),
            number: 1,
            words: vec![0; words],
            groups: vec![0; words.div_ceil(GROUP_WORDS)],
            references: 0,
            distinct: 0,
        }
    }

    /// Number of references in the interval so far.
    pub(super) fn references(&self) -> u32 {
        self.references
    }

    /// Number of distinct pages in the interval so far.
    pub(super) fn distinct(&self) -> u32 {
        self.distinct
    }

    /// Processes the next reference; there must be room for it. Returns the number of other pages used since
    /// the page's last use in this interval, or `None` if there was none.
    #[inline(always)]
    pub(super) fn touch(&mut self, page: u64, hash: u64) -> Option<u32> {
        let now = self.references;
        self.references += 1;
        let (word, bit) = (now as usize / 64, now % 64);
        self.words[word] |= 1 << bit;
        self.groups[word / GROUP_WORDS] += 1;
        let mask = self.slots.len() - 1;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "fewer bits than an index has"
        )]
        let mut index = (hash.wrapping_mul(self.salt) >> self.shift) as usize & mask;
        loop {
            let slot = &mut self.slots[index];
            if slot.interval != self.number {
                *slot = Slot {
                    page,
                    interval: self.number,
                    time: now,
                };
                self.distinct += 1;
                return None;
            }
            if slot.page == page {
                let before = slot.time;
                slot.time = now;
                let word = before as usize / 64;
                self.words[word] &= !(1 << (before % 64));
                self.groups[word / GROUP_WORDS] -= 1;
                // The page's new bit is after the old one.
                return Some(self.standing_after(before) - 1);
            }
            index = (index + 1) & mask;
        }
    }

    /// Number of bits set after time `before`.
    #[inline(always)]
    fn standing_after(&self, before: u32) -> u32 {
        let (first, last) = (before as usize / 64, (self.references as usize - 1) / 64);
        let in_first = (self.words[first] >> (before % 64)).count_ones();
        let (group, group_last) = (first / GROUP_WORDS, last / GROUP_WORDS);
        if group == group_last {
            return in_first + ones(&self.words[first + 1..=last]);
        }
        let mut marked = in_first + ones(&self.words[first + 1..(group + 1) * GROUP_WORDS]);
        for &group in &self.groups[group + 1..=group_last] {
            marked = marked.wrapping_add(group);
        }
        marked
    }

    /// Resets the stack for the next interval, keeping its memory.
    pub(super) fn clear(&mut self) {
        let words = self.references.div_ceil(64) as usize;
        self.words[..words].fill(0);
        self.groups.fill(0);
        (self.references, self.distinct) = (0, 0);
        self.number = match self.number.checked_add(1) {
            Some(number) => number,
            None => {
                self.slots.iter_mut().for_each(|slot| slot.interval = 0);
                1
            }
        };
    }

    /// Bytes of heap allocated.
    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
            + self.words.capacity() * size_of::<u64>()
            + self.groups.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::naive::NaiveStack;
    use plimsoll_flow::mix;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn distances_agree_with_a_list_moved_to_the_front_interval_by_interval(
            pages in prop_oneof![
                prop::collection::vec(0_u64..40, 1..2_000),
                prop::collection::vec(0_u64..3_000, 1..9_000),
                prop::collection::vec(any::<u64>(), 1..200),
            ],
            length in prop_oneof![1_u32..200, Just(5_000_u32)],
            salt in any::<u64>(),
        ) {
            let mut interval = Interval::new(length, salt);
            // The state after nearly 4 billion intervals.
            interval.number = u32::MAX - 2;
            for pages in pages.chunks(length as usize) {
                let mut naive = NaiveStack::default();
                for &page in pages {
                    let expected = naive.touch(page).map(|distance| distance as u32);
                    prop_assert_eq!(interval.touch(page, mix(page)), expected);
                }
                interval.clear();
            }
        }
    }

    #[test]
    fn one_hash_for_all_pages_is_slow_but_right() {
        let mut interval = Interval::new(300, 9);
        for page in 0..150 {
            assert_eq!(interval.touch(page, 5), None);
        }
        for page in 0..150 {
            assert_eq!(interval.touch(page, 5), Some(149));
        }
        assert_eq!((interval.references(), interval.distinct()), (300, 150));
    }
}
