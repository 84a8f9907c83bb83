//! Ghost entries of a shard: hashes of pages that left it not long ago, for policies that treat such a page differently.
//!
//! A bucket is one cache line: the fingerprints, of 16 bits, of the last 31 pages of this bucket that left. A page's hash
//! determines its bucket. How many other pages of its bucket left since, times the number of buckets, is about how many left in
//! all; so a small pool can disregard entries that it would not have if it had a table of its own. Of pages that
//! were never here, at most one in two thousand is taken for one that was.
//!
//! Source: the table of \[Yang23\] §4.2, with buckets in place of timestamps. Cost: two bytes an entry, one line a call. Entries
//! are in frames of the store, one at a time as they are needed; a resize drops them. All pools of a shard have them in common,
//! so a client with many evictions shortens the memory of others; that costs them hits, nothing else.

use crate::arena::Frames;
use crate::sys::Block;

/// Fingerprints of a bucket.
const ENTRIES: usize = 31;
/// Number of the last one.
const LAST: u16 = 31;

/// A line: the number of the newest fingerprint, and fingerprints; 0 is none.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Bucket([u16; ENTRIES + 1]);

/// The ghost entries of a shard.
pub(crate) struct GhostTable {
    blocks: Vec<Block<Bucket>>,
    /// Number of buckets that it has once all frames are there.
    buckets: usize,
}

impl GhostTable {
    /// Returns a table that remembers nothing.
    pub(crate) fn new() -> Self {
        Self {
            blocks: Vec::new(),
            buckets: 0,
        }
    }

    /// Number of frames that it has.
    pub(crate) fn frames(&self) -> usize {
        self.blocks.len()
    }

    /// Bytes that it takes outside its frames.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.blocks.capacity() * size_of::<Block<Bucket>>()
    }

    /// Changes the number of pages that it remembers; if it differs by more than an eighth, all entries are dropped.
    pub(crate) fn set_entries(&mut self, entries: usize, frames: &mut impl Frames) {
        let buckets = entries.div_ceil(ENTRIES);
        // The capacity left to pages changes a little with each client that comes and goes.
        if buckets.abs_diff(self.buckets) > self.buckets / 8 {
            self.clear(frames);
            self.buckets = buckets;
        }
    }

    /// Releases its frames; all entries are dropped.
    pub(crate) fn clear(&mut self, frames: &mut impl Frames) {
        for block in self.blocks.drain(..) {
            frames.give(block.into_frame());
        }
    }

    /// Releases the frames from `top` on and some others; their entries are dropped.
    pub(crate) fn leave_frames(&mut self, top: u32, frames: &mut impl Frames) {
        let first = self.blocks.iter().position(|block| block.frame() >= top);
        for block in self.blocks.drain(first.unwrap_or(self.blocks.len())..) {
            frames.give(block.into_frame());
        }
    }

    /// Remembers the page of a hash, unless memory for it is missing.
    pub(crate) fn insert(&mut self, hash: u64, frames: &mut impl Frames) {
        let (block, bucket, fingerprint) = self.place(hash);
        if block >= self.blocks.len() {
            let frames_max = self.buckets.div_ceil(Block::<Bucket>::ITEMS);
            if self.blocks.len() >= frames_max {
                return;
            }
            let Some(frame) = frames.take() else { return };
            let empty = Bucket([0; ENTRIES + 1]);
            self.blocks.push(Block::new(frames.slab(), frame, empty));
            if block >= self.blocks.len() {
                return;
            }
        }
        let Bucket(line) = &mut self.blocks[block][bucket];
        let next = line[0] % LAST + 1;
        line[0] = next;
        line[usize::from(next)] = fingerprint;
    }

    /// Whether the page of a hash is among about the last `entries` that were remembered; it is forgotten then.
    #[inline]
    pub(crate) fn take(&mut self, hash: u64, entries: usize) -> bool {
        if self.blocks.is_empty() {
            return false;
        }
        let most = entries.div_ceil(self.buckets);
        let (block, bucket, fingerprint) = self.place(hash);
        let Some(block) = self.blocks.get_mut(block) else {
            return false;
        };
        let Bucket(line) = &mut block[bucket];
        let (mut at, mut seen) = (line[0], 0);
        for _ in 0..ENTRIES {
            if at == 0 || seen == most {
                return false;
            }
            let entry = line[usize::from(at)];
            let before = if at == 1 { LAST } else { at - 1 };
            if entry == fingerprint {
                line[usize::from(at)] = 0;
                if at == line[0] {
                    // Its place is the next one's.
                    line[0] = before;
                }
                return true;
            }
            seen += usize::from(entry != 0);
            at = before;
        }
        false
    }

    /// Prefetches the line of a hash.
    #[inline(always)]
    pub(crate) fn prefetch(&self, hash: u64) {
        let (block, bucket, _) = self.place(hash);
        if let Some(block) = self.blocks.get(block) {
            block.prefetch(bucket, 0);
        }
    }

    /// Block and bucket of a hash, and its fingerprint.
    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "bits of a hash, and below 2^26 buckets"
    )]
    fn place(&self, hash: u64) -> (usize, usize, u16) {
        let bucket = (((hash >> 32) * self.buckets as u64) >> 32) as usize;
        let fingerprint = (hash as u16).max(1);
        (
            bucket / Block::<Bucket>::ITEMS,
            bucket % Block::<Bucket>::ITEMS,
            fingerprint,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of pages that one frame remembers.
    const FRAME_ENTRIES: usize = Block::<Bucket>::ITEMS * ENTRIES;
    const ALL: usize = usize::MAX;
    use crate::radix::testing::Budget;

    fn hash(number: u64) -> u64 {
        let mixed = (number ^ number >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ mixed >> 32
    }

    #[test]
    fn the_latest_pages_are_remembered_once_and_old_ones_forgotten() {
        let mut frames = Budget::new(4);
        let mut ghosts = GhostTable::new();
        ghosts.set_entries(4 * FRAME_ENTRIES, &mut frames);
        let count = 20 * FRAME_ENTRIES as u64;
        for number in 0..count {
            ghosts.insert(hash(number), &mut frames);
        }
        assert_eq!(ghosts.frames(), 4);
        // Half as many as there are entries are remembered nearly all, twice as many hardly any.
        let latest = count - 2 * FRAME_ENTRIES as u64..count;
        let found = latest
            .clone()
            .filter(|&number| ghosts.take(hash(number), ALL));
        assert!(found.count() > 2 * FRAME_ENTRIES * 99 / 100);
        // Some have the fingerprint of an older page of their bucket.
        let again = latest
            .clone()
            .filter(|&number| ghosts.take(hash(number), ALL));
        assert!(again.count() < 20);
        let old = 0..count - 8 * FRAME_ENTRIES as u64;
        let wrong = old.filter(|&number| ghosts.take(hash(number), ALL)).count();
        assert!(wrong < 20 * FRAME_ENTRIES / 500, "{wrong}");
    }

    #[test]
    fn a_small_pool_disregards_what_left_before_as_many_pages_as_it_remembers() {
        let mut frames = Budget::new(4);
        let mut ghosts = GhostTable::new();
        let all = 4 * FRAME_ENTRIES as u64;
        ghosts.set_entries(4 * FRAME_ENTRIES, &mut frames);
        for number in 0..2 * all {
            ghosts.insert(hash(number), &mut frames);
        }
        let few = FRAME_ENTRIES;
        let end = 2 * all;
        let old = end - 4 * few as u64..end - 2 * few as u64;
        let found = old.filter(|&number| ghosts.take(hash(number), few));
        assert!(found.count() < few / 20);
        let young = end - few as u64 / 2..end;
        let found = young.filter(|&number| ghosts.take(hash(number), few));
        assert!(found.count() > few / 2 * 9 / 10);
    }

    /// One page that comes and goes again and again takes one place.
    #[test]
    fn a_page_that_returns_leaves_its_place_to_the_next() {
        let mut frames = Budget::new(1);
        let mut ghosts = GhostTable::new();
        ghosts.set_entries(1, &mut frames);
        ghosts.insert(7, &mut frames);
        for _ in 0..100 {
            ghosts.insert(8, &mut frames);
            assert!(ghosts.take(8, ALL));
        }
        assert!(ghosts.take(7, ALL) && !ghosts.take(7, ALL));
    }

    #[test]
    fn without_a_frame_nothing_is_remembered_and_frames_come_back() {
        let mut frames = Budget::new(1);
        let mut ghosts = GhostTable::new();
        ghosts.insert(1, &mut frames);
        assert!(!ghosts.take(1, ALL));
        ghosts.set_entries(2 * FRAME_ENTRIES, &mut frames);
        for number in 0..100 {
            ghosts.insert(hash(number), &mut frames);
        }
        assert_eq!((ghosts.frames(), frames.take()), (1, None));
        ghosts.leave_frames(0, &mut frames);
        assert_eq!(ghosts.frames(), 0);
        assert!(frames.take().is_some());
    }
}
