//! Ghost entries of a shard: hashes of pages that left it not long ago, for policies that treat such a page differently.
//!
//! Each pool counts the pages that leave it in the shard. An entry has the count of that time, and its page is remembered
//! until as many pages have left as the pool may remember. A page's hash determines its bucket, which is one cache line of entries, the newest first; a
//! new one displaces the oldest. Of pages that were never here, at most one in four thousand is taken for one that was.
//!
//! Source: the table of \[Yang23\] §4.2. Cost: five bytes for each page that can be remembered, one line a call. Entries
//! are in frames of the store, taken as they are needed; a resize drops them. All pools of a shard have them in common,
//! so a client with many evictions displaces entries of others; that costs them hits, nothing else.

use std::ops::{Div, Sub};

use crate::arena::Frames;
use crate::sys::Block;

/// Entries of a bucket.
const ENTRIES: usize = 16;
/// Pages per bucket, on average: so few that about one in ten buckets has not enough entries for its pages.
const USED: usize = 12;
/// Bits of a count that an entry has.
const COUNT_BITS: u32 = 16;
const COUNT: u32 = (1 << COUNT_BITS) - 1;

/// A line of entries: above a count, as many bits of the page's hash; 0 is none.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Bucket([u32; ENTRIES]);

/// Number of pages that left and are remembered, of a pool of so many: nine tenths, which is the main queue's part.
pub(crate) fn remembered_pages<N>(pages: N) -> N
where
    N: Copy + From<u8> + Sub<Output = N> + Div<Output = N>,
{
    pages - pages / N::from(10)
}

/// State of a pool in a shard for policies with ghosts.
#[derive(Debug, Default)]
pub(crate) struct PoolGhosts {
    /// Number of pages that left.
    left: u64,
    /// Number of pages that the pool had when one was last evicted, or has had since if that is more: gets do not make it less.
    size_pages: u64,
}

impl PoolGhosts {
    /// Records that a page is evicted from a pool of `pages`.
    pub(crate) fn set_size(&mut self, pages: u64) {
        self.size_pages = pages;
    }

    /// Number of pages that are remembered, given that the pool has `pages` now. Raises the size to `pages`.
    pub(crate) fn remembered(&mut self, pages: u64) -> u64 {
        self.size_pages = self.size_pages.max(pages);
        remembered_pages(self.size_pages)
    }
}

/// The ghost entries of a shard.
pub(crate) struct GhostTable {
    blocks: Box<[Option<Block<Bucket>>]>,
    frames: usize,
    buckets: usize,
    /// The store's end for which this size is.
    top: u32,
    /// Low bits of a count that entries leave out, so that the pages that can be remembered span at most a quarter of an
    /// entry's counts: a wrapped count is not taken for a recent one.
    dropped_bits: u32,
}

impl GhostTable {
    /// Returns a table that remembers nothing.
    pub(crate) fn new() -> Self {
        Self {
            blocks: Box::default(),
            frames: 0,
            buckets: 0,
            top: 0,
            dropped_bits: 0,
        }
    }

    /// Number of frames that it has.
    pub(crate) fn frames(&self) -> usize {
        self.frames
    }

    /// Bytes that it takes outside its frames.
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.blocks)
    }

    /// Sets the number of pages that it remembers, a function of the store's end `top`; if it differs by more than an eighth, all
    /// entries are dropped.
    #[inline]
    pub(crate) fn set_entries(
        &mut self,
        top: u32,
        entries: impl Fn() -> usize,
        frames: &mut impl Frames,
    ) {
        if top != self.top {
            self.top = top;
            self.resize(entries(), frames);
        }
    }

    fn resize(&mut self, entries: usize, frames: &mut impl Frames) {
        let buckets = entries.div_ceil(USED);
        // The capacity left to pages changes a little with each client that comes and goes.
        if buckets.abs_diff(self.buckets) > self.buckets / 8 {
            self.clear(frames);
            let blocks = buckets.div_ceil(Block::<Bucket>::ITEMS);
            self.blocks = (0..blocks).map(|_| None).collect();
            self.buckets = buckets;
            let quarter = 1 << (COUNT_BITS - 2);
            self.dropped_bits = entries.div_ceil(quarter).next_power_of_two().ilog2();
        }
    }

    /// Releases its frames; all entries are dropped.
    pub(crate) fn clear(&mut self, frames: &mut impl Frames) {
        self.leave_frames(0, frames);
    }

    /// Releases the frames from `top` on; their entries are dropped.
    pub(crate) fn leave_frames(&mut self, top: u32, frames: &mut impl Frames) {
        for place in &mut self.blocks {
            if let Some(block) = place.take_if(|block| block.frame() >= top) {
                frames.give(block.into_frame());
                self.frames -= 1;
            }
        }
    }

    /// Counts the page of a hash among those that left `pool`, and remembers it unless memory for it is missing.
    pub(crate) fn insert(&mut self, hash: u64, pool: &mut PoolGhosts, frames: &mut impl Frames) {
        let entry = self.entry(hash, pool);
        pool.left += 1;
        let (block, bucket) = self.place(hash);
        let Some(place) = self.blocks.get_mut(block) else {
            return;
        };
        if place.is_none() {
            let Some(frame) = frames.take() else { return };
            let empty = Bucket([0; ENTRIES]);
            *place = Some(Block::new(frames.slab(), frame, empty));
            self.frames += 1;
        }
        if let Some(block) = place {
            let Bucket(line) = &mut block[bucket];
            line.copy_within(..ENTRIES - 1, 1);
            line[0] = entry;
        }
    }

    /// Whether the page of a hash is among the last `pages` that left `pool`; it is forgotten then.
    #[inline]
    pub(crate) fn take(&mut self, hash: u64, pool: &PoolGhosts, pages: u64) -> bool {
        let now = self.entry(hash, pool);
        let age_max = (pages >> self.dropped_bits).min(COUNT.into());
        let (block, bucket) = self.place(hash);
        let Some(Some(block)) = self.blocks.get_mut(block) else {
            return false;
        };
        let Bucket(line) = &mut block[bucket];
        let same = |entry: u32| (entry ^ now) <= COUNT;
        // All are compared, because that takes a few vector instructions.
        let any = line.iter().fold(false, |any, &entry| any | same(entry));
        let is_young = |entry: u32| u64::from(now.wrapping_sub(entry) & COUNT) <= age_max;
        let found = if any {
            line.iter()
                .position(|&entry| same(entry) && is_young(entry))
        } else {
            None
        };
        if let Some(at) = found {
            line.copy_within(at + 1.., at);
            line[ENTRIES - 1] = 0;
        }
        found.is_some()
    }

    /// Prefetches the line of a hash.
    #[inline(always)]
    pub(crate) fn prefetch(&self, hash: u64) {
        let (block, bucket) = self.place(hash);
        if let Some(Some(block)) = self.blocks.get(block) {
            block.prefetch(bucket, 0);
        }
    }

    /// The entry of a page that leaves now.
    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "bits of a hash and of a count"
    )]
    fn entry(&self, hash: u64, pool: &PoolGhosts) -> u32 {
        let hash = (hash as u32 >> COUNT_BITS).max(1);
        hash << COUNT_BITS | (pool.left >> self.dropped_bits) as u32 & COUNT
    }

    /// Block of a hash, and bucket in it.
    #[inline(always)]
    fn place(&self, hash: u64) -> (usize, usize) {
        let bucket = (((hash >> 32) * self.buckets as u64) >> 32) as usize;
        (
            bucket / Block::<Bucket>::ITEMS,
            bucket % Block::<Bucket>::ITEMS,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::radix::testing::Budget;

    /// Number of pages that one frame remembers.
    const FRAME_PAGES: usize = Block::<Bucket>::ITEMS * USED;

    fn hash(number: u64) -> u64 {
        let mixed = (number ^ number >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ mixed >> 32
    }

    #[test]
    fn the_latest_pages_are_remembered_once_and_old_ones_forgotten() {
        for frame_count in [4, 400] {
            let mut frames = Budget::new(frame_count);
            let mut ghosts = GhostTable::new();
            let mut pool = PoolGhosts::default();
            let pages = (frame_count as usize * FRAME_PAGES) as u64;
            ghosts.resize(frame_count as usize * FRAME_PAGES, &mut frames);
            let count = 5 * pages;
            for number in 0..count {
                ghosts.insert(hash(number), &mut pool, &mut frames);
            }
            assert_eq!(ghosts.frames(), frame_count as usize);
            let mut found = |from_age: u64, to_age: u64| {
                let numbers = count - to_age..count - from_age;
                let found = numbers.filter(|&number| ghosts.take(hash(number), &pool, pages));
                found.count() as f64 / (to_age - from_age) as f64
            };
            assert!(found(pages + pages / 8, count) < 0.001);
            assert!(found(0, pages) > 0.96);
            // Some have the bits of another page of their bucket.
            assert!(found(0, pages) < 0.001);
        }
    }

    /// However many buckets there are, and whatever other pools do.
    #[test]
    fn a_small_pool_remembers_its_own_last_pages_exactly() {
        let mut frames = Budget::new(40);
        let mut ghosts = GhostTable::new();
        let (mut small, mut busy) = (PoolGhosts::default(), PoolGhosts::default());
        ghosts.resize(20 * FRAME_PAGES, &mut frames);
        for number in 0..3000 {
            ghosts.insert(hash(number), &mut small, &mut frames);
            ghosts.insert(hash(number + (1 << 40)), &mut busy, &mut frames);
        }
        let is_remembered = |number: u64| ghosts.take(hash(number), &small, 200);
        let remembered = (0..3000).map(is_remembered);
        let expected = (0..3000).map(|number| number >= 2800);
        assert!(remembered.eq(expected));
    }

    /// One page that comes and goes again and again takes one place.
    #[test]
    fn a_page_that_returns_leaves_its_place_to_the_next() {
        let mut frames = Budget::new(1);
        let mut ghosts = GhostTable::new();
        let mut pool = PoolGhosts::default();
        ghosts.resize(1, &mut frames);
        let (first, other) = (7 << 16, 8 << 16);
        ghosts.insert(first, &mut pool, &mut frames);
        for _ in 0..100 {
            ghosts.insert(other, &mut pool, &mut frames);
            assert!(ghosts.take(other, &pool, 1));
        }
        assert!(!ghosts.take(first, &pool, 100), "older than that");
        assert!(ghosts.take(first, &pool, 101) && !ghosts.take(first, &pool, 101));
    }

    #[test]
    fn without_a_frame_nothing_is_remembered_and_frames_come_back() {
        let mut frames = Budget::new(1);
        let mut ghosts = GhostTable::new();
        let mut pool = PoolGhosts::default();
        ghosts.insert(hash(1), &mut pool, &mut frames);
        assert!(!ghosts.take(hash(1), &pool, 100));
        ghosts.resize(2 * FRAME_PAGES, &mut frames);
        for number in 0..100 {
            ghosts.insert(hash(number), &mut pool, &mut frames);
        }
        assert_eq!((ghosts.frames(), frames.take()), (1, None));
        ghosts.leave_frames(0, &mut frames);
        assert_eq!(ghosts.frames(), 0);
        assert!(frames.take().is_some());
    }
}
