//! Bit vector of last accesses with a tree of sums: the number of set bits before a time.
//!
//! A bit is set until its page leaves or is used again. Clearing one decrements every later sum
//! within its node on each of the tree's levels; a node has 32 children.

use super::{GhostError, filled};
use crate::parts::sys;

/// A sequence of times, with the number of valid ones before each.
///
/// An unused time counts as valid. It is after all used ones, so it is counted for none of them.
#[derive(Debug, Clone)]
pub(super) struct Depths {
    pub(super) words: Vec<u64>,
    /// Valid times before each word, within its group of 32.
    pub(super) groups: Vec<[u16; CHILDREN]>,
    /// Valid times before each group, within its block of 32.
    pub(super) blocks: Vec<[u16; CHILDREN]>,
    /// Valid times before each block, within its region of 32.
    pub(super) regions: Vec<[u32; CHILDREN]>,
    /// Valid times before each region.
    pub(super) totals: Vec<u32>,
}

pub(super) const CHILDREN: usize = 32;
pub(super) const WORD_BITS: usize = 64;
pub(super) const GROUP_BITS: usize = CHILDREN * WORD_BITS;
pub(super) const BLOCK_BITS: usize = CHILDREN * GROUP_BITS;
pub(super) const REGION_BITS: usize = CHILDREN * BLOCK_BITS;

impl Depths {
    pub(super) fn new(times: usize, pages: u64) -> Result<Self, GhostError> {
        // One more, so that a search beyond the last time ends.
        let times = times + 1;
        let mut depths = Self {
            words: filled(0, times.div_ceil(WORD_BITS), pages)?,
            groups: filled([0; CHILDREN], times.div_ceil(GROUP_BITS), pages)?,
            blocks: filled([0; CHILDREN], times.div_ceil(BLOCK_BITS), pages)?,
            regions: filled([0; CHILDREN], times.div_ceil(REGION_BITS), pages)?,
            totals: filled(0, times.div_ceil(REGION_BITS), pages)?,
        };
        depths.reset();
        Ok(depths)
    }

    /// Marks all times as valid.
    pub(super) fn reset(&mut self) {
        self.words.fill(u64::MAX);
        self.groups
            .fill(std::array::from_fn(|child| as_short(child * WORD_BITS)));
        self.blocks
            .fill(std::array::from_fn(|child| as_short(child * GROUP_BITS)));
        self.regions
            .fill(std::array::from_fn(|child| as_time(child * BLOCK_BITS)));
        for (region, total) in self.totals.iter_mut().enumerate() {
            *total = as_time(region * REGION_BITS);
        }
    }

    #[inline(always)]
    pub(super) fn marked_before(&self, time: usize) -> u32 {
        let within = self.words[time / WORD_BITS] & ((1 << (time % WORD_BITS)) - 1);
        // No sum exceeds the number of times, which fits into 32 bits.
        self.totals[time / REGION_BITS]
            .wrapping_add(self.regions[time / REGION_BITS][time / BLOCK_BITS % CHILDREN])
            .wrapping_add(u32::from(
                self.blocks[time / BLOCK_BITS][time / GROUP_BITS % CHILDREN],
            ))
            .wrapping_add(u32::from(
                self.groups[time / GROUP_BITS][time / WORD_BITS % CHILDREN],
            ))
            .wrapping_add(within.count_ones())
    }

    /// Removes a valid time.
    #[inline(always)]
    pub(super) fn strike(&mut self, time: usize) {
        self.words[time / WORD_BITS] &= !(1 << (time % WORD_BITS));
        let word = time / WORD_BITS % CHILDREN;
        take_one(&mut self.groups[time / GROUP_BITS], &ONE_AFTER, word);
        let group = time / GROUP_BITS % CHILDREN;
        take_one(&mut self.blocks[time / BLOCK_BITS], &ONE_AFTER, group);
        let block = time / BLOCK_BITS % CHILDREN;
        for marked in &mut self.regions[time / REGION_BITS][block + 1..] {
            *marked = marked.wrapping_sub(1);
        }
        for total in &mut self.totals[time / REGION_BITS + 1..] {
            *total = total.wrapping_sub(1);
        }
    }

    /// Prefetches the counts that determine the depth of a time. Any number is allowed.
    #[inline(always)]
    pub(super) fn fetch(&self, time: usize) {
        sys::prefetch(&self.words, time / WORD_BITS);
        sys::prefetch(&self.groups, time / GROUP_BITS);
    }

    /// The first valid time from `time` on, used or not.
    pub(super) fn next_marked(&self, time: usize) -> usize {
        let mut word = time / WORD_BITS;
        let mut bits = self.words[word] & (u64::MAX << (time % WORD_BITS));
        while bits == 0 {
            word += 1;
            bits = self.words[word];
        }
        word * WORD_BITS + bits.trailing_zeros() as usize
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.words.capacity() * size_of::<u64>()
            + (self.groups.capacity() + self.blocks.capacity()) * size_of::<[u16; CHILDREN]>()
            + self.regions.capacity() * size_of::<[u32; CHILDREN]>()
            + self.totals.capacity() * size_of::<u32>()
    }
}

/// From index `CHILDREN - 1 - child` on: the decrements of the children's sums for a removal from `child`.
pub(super) const ONE_AFTER: [u16; 2 * CHILDREN] = {
    let mut ones = [0; 2 * CHILDREN];
    let mut index = CHILDREN;
    while index < ones.len() {
        ones[index] = 1;
        index += 1;
    }
    ones
};

/// Decrements the sums of all children after `child` by a few vector subtractions.
#[inline(always)]
pub(super) fn take_one(sums: &mut [u16; CHILDREN], ones: &[u16; 2 * CHILDREN], child: usize) {
    for (sum, one) in sums
        .iter_mut()
        .zip(&ones[CHILDREN - 1 - child..][..CHILDREN])
    {
        *sum = sum.wrapping_sub(*one);
    }
}

#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "there are fewer than 2^32 times"
)]
pub(super) fn as_time(time: usize) -> u32 {
    time as u32
}

#[expect(clippy::cast_possible_truncation, reason = "at most 31 * 2048")]
pub(super) fn as_short(marked: usize) -> u16 {
    marked as u16
}
