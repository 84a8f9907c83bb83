//! Short bit vector of last accesses: which times are some page's last use, and how many of them follow a given one.
//!
//! It is `access_tree` for the few pages of a sample: the vector grows at its end
//! as times are assigned, and clearing a time also computes its distance. Most distances are short, and
//! are counted in the last words of bits; only the others use the tree (Fenwick 1994) of the counts of
//! 512 bits each.
//!
//! Inlined into its callers, which are compiled for the processor (`sys::vectorised`): most of the work is counting bits.
//!
//! Cost: O(1) for short distances, O(log(times / 512)) for long ones; 1/8 byte per time.
//! Not here: the page of each time.

use crate::parts::sys::prefetch;

pub(crate) const WORD_BITS: usize = u64::BITS as usize;
const BLOCK_WORDS: usize = 8;
const BLOCK_BITS: usize = BLOCK_WORDS * WORD_BITS;

/// Times, assigned in order and cleared in any order.
#[derive(Debug, Clone, Default)]
pub(crate) struct AccessBits {
    /// Bit `m` is set if time `m` was assigned and not cleared; whole blocks of them.
    words: Vec<u64>,
    /// Counts of the blocks before the last one as a binary indexed tree, from 1.
    tree: Vec<u32>,
    taken: usize,
    marked: usize,
}

impl AccessBits {
    /// Number of times assigned.
    pub(crate) fn taken(&self) -> usize {
        self.taken
    }

    /// The time assigned last, which must still be set.
    #[inline]
    pub(crate) fn last(&self) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "rows end below 2^32")]
        let last = self.taken.wrapping_sub(1) as u32;
        last
    }

    /// Prefetches the line of a time; any value is allowed.
    #[inline]
    pub(crate) fn prefetch(&self, time: u32) {
        prefetch(&self.words, time as usize / WORD_BITS);
    }

    /// Assigns the next time.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> u32 {
        if self.taken == self.words.len() * WORD_BITS {
            self.add_block();
        }
        self.words[self.taken / WORD_BITS] |= 1 << (self.taken % WORD_BITS);
        self.taken += 1;
        self.marked += 1;
        self.last()
    }

    /// Clears a time that is set, and returns the number of set times after it.
    #[inline(always)]
    pub(crate) fn strike(&mut self, time: u32) -> usize {
        let time = time as usize;
        let (word, bit) = (time / WORD_BITS, time % WORD_BITS);
        let block = time / BLOCK_BITS;
        let mut after = (self.words[word] >> bit >> 1).count_ones();
        self.words[word] &= !(1 << bit);
        self.marked -= 1;
        let last_word = self.taken.wrapping_sub(1) / WORD_BITS;
        if block < self.tree.len().wrapping_sub(1) && !self.tree.is_empty() {
            // The words after it in its own block are counted directly, the blocks after it by the tree.
            for word in &self.words[word + 1..(block + 1) * BLOCK_WORDS] {
                after = after.wrapping_add(word.count_ones());
            }
            after = after.wrapping_add(self.blocks_before(self.tree.len() - 1));
            after = after.wrapping_sub(self.blocks_before(block + 1));
            for word in &self.words[(self.tree.len() - 1) * BLOCK_WORDS..] {
                after = after.wrapping_add(word.count_ones());
            }
            let mut node = block + 1;
            while node < self.tree.len() {
                self.tree[node] -= 1;
                node += node & node.wrapping_neg();
            }
        } else {
            for word in &self.words[word + 1..=last_word.max(word)] {
                after = after.wrapping_add(word.count_ones());
            }
        }
        after as usize
    }

    /// Sum of the counts of the first `blocks` blocks.
    #[inline(always)]
    fn blocks_before(&self, blocks: usize) -> u32 {
        let (mut node, mut count) = (blocks, 0_u32);
        while node > 0 {
            count = count.wrapping_add(self.tree[node]);
            node &= node - 1;
        }
        count
    }

    /// Starts a block; the one before it is added to the tree.
    #[cold]
    fn add_block(&mut self) {
        if self.tree.is_empty() {
            self.tree.push(0);
        }
        if let Some(first) = self.words.len().checked_sub(BLOCK_WORDS) {
            let node = self.tree.len();
            let mut count = ones(&self.words[first..]);
            let mut below = node - 1;
            while below > (node & (node - 1)) {
                count += self.tree[below];
                below &= below - 1;
            }
            self.tree.push(count);
        }
        self.words.extend([0; BLOCK_WORDS]);
    }

    /// For each word, the number of set times before it.
    pub(crate) fn ranks(&self) -> Vec<u32> {
        let ranks = self.words.iter().scan(0, |before, word| {
            let rank = *before;
            *before += word.count_ones();
            Some(rank)
        });
        ranks.collect()
    }

    /// The number of set times before this one.
    pub(crate) fn rank(&self, ranks: &[u32], time: u32) -> u32 {
        let (word, bit) = (time as usize / WORD_BITS, time as usize % WORD_BITS);
        ranks[word] + (self.words[word] & ((1 << bit) - 1)).count_ones()
    }

    /// The number of set times.
    pub(crate) fn marked(&self) -> usize {
        self.marked
    }

    /// Resets the vector, keeping its memory.
    pub(crate) fn clear(&mut self) {
        self.words.clear();
        self.tree.clear();
        self.taken = 0;
        self.marked = 0;
    }

    /// Renumbers the set times from 0, as if they had just been assigned.
    pub(crate) fn number_anew(&mut self) {
        let marked = self.marked;
        self.clear();
        while self.taken < marked {
            if self.taken == self.words.len() * WORD_BITS {
                self.add_block();
            }
            let bits = WORD_BITS.min(marked - self.taken);
            self.words[self.taken / WORD_BITS] = u64::MAX >> (WORD_BITS - bits);
            self.taken += bits;
        }
        self.marked = marked;
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.words.capacity() * size_of::<u64>() + self.tree.capacity() * size_of::<u32>()
    }
}

fn ones(words: &[u64]) -> u32 {
    words.iter().map(|word| word.count_ones()).sum()
}
