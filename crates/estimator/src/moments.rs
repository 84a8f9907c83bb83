//! Moments of a stream: which of them are some page's last use, and how many lie after one.
//!
//! Every reference takes the next moment; the page's previous moment is struck
//! out. So the moments left are one for each page, in the order of last use, and
//! those after a page's own are the pages used since: its place in the LRU stack.
//!
//! A moment is a bit. Bits are counted in blocks of 512, the blocks' counts lie
//! in a binary indexed tree (Fenwick 1994). The block being filled enters the tree
//! when it is full, so that taking a moment costs nothing but its bit.
//!
//! Cost: O(log(moments / 512)) for a count or a strike, O(1) to take a moment.
//! Not here: which page a moment belongs to (`lru`).

const WORD_BITS: usize = 64;
const BLOCK_WORDS: usize = 8;
const BLOCK_BITS: usize = BLOCK_WORDS * WORD_BITS;

/// A bounded row of moments, taken in order and struck out in any order.
#[derive(Debug, Clone)]
pub(crate) struct Moments {
    /// Bit `m` stands if moment `m` was taken and not struck out.
    words: Vec<u64>,
    /// Counts of the full blocks as a binary indexed tree; entry 0 is not used.
    tree: Vec<usize>,
    next: usize,
    standing: usize,
}

impl Moments {
    /// Returns a row with room for `capacity` moments, rounded up to whole blocks,
    /// of which the first `standing` are taken.
    pub(crate) fn new(capacity: usize, standing: usize) -> Self {
        let mut moments = Self {
            words: Vec::new(),
            tree: Vec::new(),
            next: 0,
            standing: 0,
        };
        moments.reset(capacity, standing);
        moments
    }

    /// Starts again as [`new`](Self::new) does, keeping the memory.
    pub(crate) fn reset(&mut self, capacity: usize, standing: usize) {
        let blocks = capacity.max(standing).div_ceil(BLOCK_BITS);
        self.words.clear();
        self.words.resize(standing / WORD_BITS, u64::MAX);
        self.words.resize(blocks * BLOCK_WORDS, 0);
        if !standing.is_multiple_of(WORD_BITS) {
            self.words[standing / WORD_BITS] = (1 << (standing % WORD_BITS)) - 1;
        }
        self.tree.clear();
        self.tree.resize(blocks + 1, 0);
        for block in 0..standing / BLOCK_BITS {
            self.add(block, BLOCK_BITS);
        }
        self.next = standing;
        self.standing = standing;
    }

    /// How many moments stand.
    pub(crate) fn standing(&self) -> usize {
        self.standing
    }

    /// Whether no moment is left to take.
    pub(crate) fn is_full(&self) -> bool {
        self.next == self.words.len() * WORD_BITS
    }

    /// Takes the next moment; there must be one.
    pub(crate) fn take(&mut self) -> usize {
        let moment = self.next;
        self.words[moment / WORD_BITS] |= 1 << (moment % WORD_BITS);
        self.standing += 1;
        self.next += 1;
        if self.next.is_multiple_of(BLOCK_BITS) {
            let block = moment / BLOCK_BITS;
            let words = &self.words[block * BLOCK_WORDS..][..BLOCK_WORDS];
            self.add(block, ones(words));
        }
        moment
    }

    /// Strikes out a moment that stands.
    pub(crate) fn strike(&mut self, moment: usize) {
        debug_assert!(self.words[moment / WORD_BITS] >> (moment % WORD_BITS) & 1 == 1);
        self.words[moment / WORD_BITS] &= !(1 << (moment % WORD_BITS));
        self.standing -= 1;
        let block = moment / BLOCK_BITS;
        if block < self.next / BLOCK_BITS {
            let mut node = block + 1;
            while node < self.tree.len() {
                self.tree[node] -= 1;
                node += node & node.wrapping_neg();
            }
        }
    }

    /// Returns how many moments stand before `moment`.
    pub(crate) fn standing_before(&self, moment: usize) -> usize {
        let block = moment / BLOCK_BITS;
        let word = moment / WORD_BITS;
        let mut count = ones(&self.words[block * BLOCK_WORDS..word]);
        count += (self.words[word] & ((1 << (moment % WORD_BITS)) - 1)).count_ones() as usize;
        let mut node = block;
        while node > 0 {
            count += self.tree[node];
            node &= node - 1;
        }
        count
    }

    /// Adds a full block's count to the tree.
    fn add(&mut self, block: usize, count: usize) {
        let mut node = block + 1;
        while node < self.tree.len() {
            self.tree[node] += count;
            node += node & node.wrapping_neg();
        }
    }
}

fn ones(words: &[u64]) -> usize {
    words.iter().map(|word| word.count_ones() as usize).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn counts_agree_with_a_list_of_the_standing_moments(
            standing in 0_usize..2_000,
            strikes in prop::collection::vec(prop::option::of(any::<prop::sample::Index>()), 1..2_000),
        ) {
            let mut moments = Moments::new(4_096, standing);
            let mut list: Vec<usize> = (0..standing).collect();
            for strike in strikes {
                match strike {
                    Some(index) if !list.is_empty() => {
                        moments.strike(list.remove(index.index(list.len())));
                    }
                    _ => list.push(moments.take()),
                }
            }
            prop_assert_eq!(moments.standing(), list.len());
            for (before, &moment) in list.iter().enumerate() {
                prop_assert_eq!(moments.standing_before(moment), before);
            }
        }
    }

    #[test]
    fn a_row_is_full_when_every_moment_was_taken() {
        let mut moments = Moments::new(BLOCK_BITS, 0);
        for expected in 0..BLOCK_BITS {
            assert!(!moments.is_full());
            assert_eq!(moments.take(), expected);
        }
        assert!(moments.is_full());
    }
}
