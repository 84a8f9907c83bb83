//! Bit vector of last accesses: which timestamps of a stream are some page's last access, and how many precede one.
//!
//! Every reference gets the next timestamp; the page's previous timestamp is cleared.
//! Thus one timestamp remains for each page, in the order of last access, and
//! those after a page's own are the pages accessed since: its position in the LRU stack.
//!
//! A timestamp is a bit, and 512 of them, a cache line, are a leaf. Above the leaves is a
//! tree of wide nodes: for each of its children, a node has the number of bits set in the
//! children before it. Counting reads one value per level; clearing subtracts one from
//! all later counts of a node, which vector instructions do at once. Both use the same
//! lines, so clearing also yields the count at no extra cost. A Fenwick tree
//! takes twice as many steps as its index has bits, each in another line.
//!
//! Timestamps are assigned at the end of the vector, and a node does not yet count children that begin after
//! it: a child is added when the vector reaches it, so assigning a timestamp costs little more than setting the bit.
//! Timestamps may be assigned before older ones are cleared, because a count depends only on those before it.
//!
//! Source: [Olken81] for counting last uses in a tree; the nodes are ours.
//! Cost: clearing takes one line and log16(times / 512) nodes of one line each, assigning is O(1); 1.14 bits per time.
//! Not here: the page of each time (`lru`).

use crate::parts::last_use::NEVER;
use crate::parts::sys::{self, Work};

const WORD_BITS: usize = 64;
const LEAF_WORDS: usize = 8;
const LEAF_BITS: usize = LEAF_WORDS * WORD_BITS;
const CHILDREN: usize = 16;

/// Number of removals by which a leaf is prefetched.
const AHEAD: usize = 16;

/// 512 times, one bit each.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Leaf([u64; LEAF_WORDS]);

impl Leaf {
    const EMPTY: Self = Self([0; LEAF_WORDS]);

    /// Clears a time and returns the number of set times before it.
    // Over all words and without a branch, for vector instructions. A whole line is stored,
    // because the next removal in it loads a whole line.
    #[inline(always)]
    fn strike(&mut self, place: usize) -> u32 {
        let (word, bit) = (place / WORD_BITS, 1_u64 << (place % WORD_BITS));
        let before: &[u64; LEAF_WORDS] = window(&WORDS_BEFORE, LEAF_WORDS - word);
        let here: &[u64; LEAF_WORDS] = window(&WORD_HERE, LEAF_WORDS - word);
        let mut count = 0;
        for ((bits, before), here) in self.0.iter_mut().zip(before).zip(here) {
            count += (*bits & (before | (here & (bit - 1)))).count_ones();
            *bits &= !(here & bit);
        }
        count
    }

    #[inline(always)]
    fn marked(&self) -> u32 {
        self.0.iter().map(|bits| bits.count_ones()).sum()
    }

    /// Sets the times from `from` to before `to`.
    #[inline(always)]
    fn take(&mut self, from: usize, to: usize) {
        for (index, bits) in self.0.iter_mut().enumerate() {
            let start = index * WORD_BITS;
            *bits |= ones_below(to.saturating_sub(start)) & !ones_below(from.saturating_sub(start));
        }
    }
}

/// A word whose bits below `place` are set.
#[inline(always)]
fn ones_below(place: usize) -> u64 {
    if place < WORD_BITS {
        (1 << place) - 1
    } else {
        u64::MAX
    }
}

/// All ones for the words before the middle one. A window that begins `n` before the
/// middle has them for words before its `n`-th: a comparison of all words at once.
const WORDS_BEFORE: [u64; 2 * LEAF_WORDS] = {
    let mut words = [0; 2 * LEAF_WORDS];
    let mut word = 0;
    while word < LEAF_WORDS {
        words[word] = u64::MAX;
        word += 1;
    }
    words
};

/// All ones for the middle word.
const WORD_HERE: [u64; 2 * LEAF_WORDS] = {
    let mut words = [0; 2 * LEAF_WORDS];
    words[LEAF_WORDS] = u64::MAX;
    words
};

/// One for the children from the middle on.
const CHILDREN_AFTER: [u32; 2 * CHILDREN] = {
    let mut children = [0; 2 * CHILDREN];
    let mut child = CHILDREN;
    while child < 2 * CHILDREN {
        children[child] = 1;
        child += 1;
    }
    children
};

/// Returns `LENGTH` of the items from `start`.
#[inline(always)]
fn window<T, const LENGTH: usize>(items: &'static [T], start: usize) -> &'static [T; LENGTH] {
    items[start..]
        .first_chunk()
        .expect("a window starts in the first half")
}

/// For each child, the number of set times in the children before it. Counts wrap where a
/// removal meets a child that is not counted yet.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Node([u32; CHILDREN]);

impl Node {
    /// Counts a removal in a child and returns the number of set times in the children before it.
    #[inline(always)]
    fn strike(&mut self, child: usize) -> u32 {
        let before = self.0[child];
        let after: &[u32; CHILDREN] = window(&CHILDREN_AFTER, CHILDREN - 1 - child);
        for (count, after) in self.0.iter_mut().zip(after) {
            *count = count.wrapping_sub(*after);
        }
        before
    }
}

/// A bounded vector of fewer than 2^32 times, assigned in order and cleared in any order.
#[derive(Debug, Clone, Default)]
pub(crate) struct AccessTree {
    leaves: Vec<Leaf>,
    /// All levels, the lowest first.
    nodes: Vec<Node>,
    /// Start of each level.
    levels: Vec<usize>,
    next: usize,
    marked: usize,
}

impl AccessTree {
    /// Returns a vector with room for `capacity` times, rounded up to whole leaves,
    /// of which the first `marked` are set.
    pub(crate) fn new(capacity: usize, marked: usize) -> Self {
        let mut times = Self::default();
        times.reset(capacity, marked);
        times
    }

    /// Resets the vector to the state after [`new`](Self::new), keeping its memory.
    pub(crate) fn reset(&mut self, capacity: usize, marked: usize) {
        let mut width = capacity.max(marked).div_ceil(LEAF_BITS);
        self.leaves.clear();
        self.leaves.resize(width, Leaf::EMPTY);
        self.levels.clear();
        let mut nodes = 0;
        while width > 1 {
            self.levels.push(nodes);
            width = width.div_ceil(CHILDREN);
            nodes += width;
        }
        self.nodes.clear();
        self.nodes.resize(nodes, Node([0; CHILDREN]));
        (self.next, self.marked) = (0, 0);
        self.take(marked);
    }

    /// Copies the state of another vector, keeping the memory.
    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.leaves.clone_from(&other.leaves);
        self.nodes.clone_from(&other.nodes);
        self.levels.clone_from(&other.levels);
        (self.next, self.marked) = (other.next, other.marked);
    }

    /// Number of set times.
    pub(crate) fn marked(&self) -> usize {
        self.marked
    }

    /// Number of times left to assign.
    pub(crate) fn room(&self) -> usize {
        self.leaves.len() * LEAF_BITS - self.next
    }

    /// The time to be assigned next.
    pub(crate) fn next(&self) -> usize {
        self.next
    }

    /// Assigns the next `count` times; there must be room.
    pub(crate) fn take(&mut self, count: usize) {
        let end = self.next + count;
        while self.next < end {
            let (leaf, from) = (self.next / LEAF_BITS, self.next % LEAF_BITS);
            if from == 0 {
                self.count_in(leaf);
            }
            let taken = (LEAF_BITS - from).min(end - self.next);
            self.leaves[leaf].take(from, from + taken);
            self.next += taken;
        }
        self.marked += count;
    }

    /// Assigns a time for each entry of `before`, and clears the earlier time stored in the entry,
    /// if it is not [`NEVER`]. Appends one entry for each to `distances`: the number of set times
    /// between the two, [`NEVER`] if there is only one.
    pub(crate) fn replace(&mut self, before: &[u32], distances: &mut Vec<u32>) {
        distances.clear();
        sys::vectorised(Replace {
            times: self,
            before,
            distances,
        });
    }

    /// As [`replace`](Self::replace) for one time, which is cleared.
    pub(crate) fn replace_one(&mut self, before: usize) -> usize {
        self.take(1);
        let deeper = sys::vectorised(Removal {
            times: self,
            time: before,
        });
        self.marked - 1 - deeper as usize
    }

    /// Clears a set time without assigning one. Returns the number of set times after it.
    pub(crate) fn remove(&mut self, time: usize) -> usize {
        let before = sys::vectorised(Removal { times: self, time });
        self.marked - before as usize
    }

    /// Replaces each of `times`, which must be set, by the number of set times before it.
    pub(crate) fn number<'a>(&self, times: impl Iterator<Item = &'a mut u32>) {
        sys::vectorised(Number { row: self, times });
    }

    /// Clears times as [`replace`](Self::replace) does, without assigning or counting any. Until
    /// [`count_anew`](Self::count_anew) is called, no other method may be used.
    pub(crate) fn strike_uncounted(&mut self, time: u32) {
        let time = time as usize;
        let word = &mut self.leaves[time / LEAF_BITS].0[time % LEAF_BITS / WORD_BITS];
        *word &= !(1 << (time % WORD_BITS));
        self.marked -= 1;
    }

    /// Recomputes all counts, from the first leaf to the last.
    pub(crate) fn count_anew(&mut self) {
        sys::vectorised(Recount(self));
    }

    /// Bytes of heap allocated now.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.leaves.capacity() * size_of::<Leaf>()
            + self.nodes.capacity() * size_of::<Node>()
            + self.levels.capacity() * size_of::<usize>()
    }

    /// Clears a set time and returns the number of set times before it.
    #[inline(always)]
    fn strike(&mut self, time: usize) -> u32 {
        let leaf = time / LEAF_BITS;
        let mut before = self.leaves[leaf].strike(time % LEAF_BITS);
        let mut child = leaf;
        for &level in &self.levels {
            before += self.nodes[level + child / CHILDREN].strike(child % CHILDREN);
            child /= CHILDREN;
        }
        self.marked -= 1;
        before
    }

    /// Returns the number of set times before `time`.
    #[inline(always)]
    fn marked_before(&self, time: usize) -> u32 {
        let leaf = time / LEAF_BITS;
        let mut bits = self.leaves[leaf];
        let mut before = bits.strike(time % LEAF_BITS);
        let mut child = leaf;
        for &level in &self.levels {
            before += self.nodes[level + child / CHILDREN].0[child % CHILDREN];
            child /= CHILDREN;
        }
        before
    }

    /// Enters the count before a leaf that the vector now reaches.
    #[inline(always)]
    fn count_in(&mut self, leaf: usize) {
        let Some(mut last) = leaf.checked_sub(1) else {
            return;
        };
        // The count of the child before, and of all children of its node up to its end.
        let mut marked = self.leaves[last].marked();
        for &level in &self.levels {
            let node = &mut self.nodes[level + last / CHILDREN].0;
            marked += node[last % CHILDREN];
            if (last + 1) % CHILDREN != 0 {
                node[last % CHILDREN + 1] = marked;
                return;
            }
            last /= CHILDREN;
        }
    }
}

/// The work of [`Times::replace`].
struct Replace<'a> {
    times: &'a mut AccessTree,
    before: &'a [u32],
    distances: &'a mut Vec<u32>,
}

impl Work for Replace<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut marked = u32::try_from(self.times.marked).expect("times are below 2^32");
        self.times.take(self.before.len());
        self.distances.resize(self.before.len(), NEVER);
        // A loop, because closures passed to iterators may not be inlined.
        for (index, (&before, distance)) in self.before.iter().zip(self.distances).enumerate() {
            if let Some(&ahead) = self.before.get(index.wrapping_add(AHEAD)) {
                sys::prefetch(&self.times.leaves, ahead as usize / LEAF_BITS);
            }
            if before == NEVER {
                marked = marked.wrapping_add(1);
            } else {
                let deeper = self.times.strike(before as usize);
                *distance = marked.wrapping_sub(deeper).wrapping_sub(1);
            }
        }
    }
}

/// The removal of one time.
struct Removal<'a> {
    times: &'a mut AccessTree,
    time: usize,
}

impl Work for Removal<'_> {
    type Output = u32;

    #[inline(always)]
    fn run(self) -> u32 {
        self.times.strike(self.time)
    }
}

/// The work of [`Times::number`].
struct Number<'a, M> {
    row: &'a AccessTree,
    times: M,
}

impl<'m, M: Iterator<Item = &'m mut u32>> Work for Number<'_, M> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for time in self.times {
            *time = self.row.marked_before(*time as usize);
        }
    }
}

/// The work of [`Times::count_anew`].
struct Recount<'a>(&'a mut AccessTree);

impl Work for Recount<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for leaf in 0..self.0.next.div_ceil(LEAF_BITS) {
            self.0.count_in(leaf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Expected result of `replace`, by a sorted list of the set times.
    fn replace_in_list(list: &mut Vec<u32>, before: u32, now: u32) -> u32 {
        let distance = match list.binary_search(&before) {
            Ok(index) => {
                list.remove(index);
                (list.len() - index) as u32
            }
            Err(_) => NEVER,
        };
        list.push(now);
        distance
    }

    proptest! {
        #[test]
        fn distances_agree_with_a_list_of_the_standing_moments(
            // Up to four levels of nodes.
            marked in prop_oneof![0_usize..2_000, 0_usize..300_000],
            strikes in prop::collection::vec(prop::option::of(any::<prop::sample::Index>()), 1..2_000),
            cut in 1_usize..700,
        ) {
            let mut times = AccessTree::new(marked + strikes.len(), marked);
            let mut list: Vec<u32> = (0..marked as u32).collect();
            let mut shadow = times.clone();
            let mut found = Vec::new();
            for strikes in strikes.chunks(cut) {
                let start = times.next();
                let (mut before, mut expected) = (Vec::new(), Vec::new());
                for (now, strike) in (start as u32..).zip(strikes) {
                    let index = strike.filter(|_| !list.is_empty()).map(|at| at.index(list.len()));
                    before.push(index.map_or(NEVER, |index| list[index]));
                    expected.push(replace_in_list(&mut list, before[before.len() - 1], now));
                }
                times.replace(&before, &mut found);
                prop_assert_eq!(&found, &expected);
                prop_assert_eq!(times.marked(), list.len());
                shadow.take(before.len());
                before.iter().filter(|&&b| b != NEVER).for_each(|&b| shadow.strike_uncounted(b));
            }
            let mut numbers = list.clone();
            times.number(numbers.iter_mut());
            prop_assert!(numbers.iter().copied().eq(0..list.len() as u32));
            // Clearing first and counting later gives the same vector.
            shadow.count_anew();
            let mut numbers = list.clone();
            shadow.number(numbers.iter_mut());
            prop_assert!(numbers.iter().copied().eq(0..list.len() as u32));
            prop_assert_eq!(shadow.marked(), list.len());
        }
    }

    #[test]
    fn every_way_of_counting_gives_the_same() {
        // The portable version, compared with the one selected by `sys`.
        let mut chosen = AccessTree::new(40_000, 20_000);
        let mut plain = chosen.clone();
        let before: Vec<u32> = (0..20_000).map(|i| i * 7_919 % 20_000).collect();
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        chosen.replace(&before, &mut found);
        Replace {
            times: &mut plain,
            before: &before,
            distances: &mut expected,
        }
        .run();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_row_has_room_until_every_moment_was_taken() {
        let mut times = AccessTree::new(LEAF_BITS, 0);
        for taken in 0..LEAF_BITS {
            assert_eq!((times.next(), times.room()), (taken, LEAF_BITS - taken));
            times.take(1);
        }
        assert_eq!(times.room(), 0);
    }
}
