//! Numbered items in frames of the store's own slab, so that metadata counts towards the
//! store's bound like pages.

use std::ops::{Index, IndexMut};

use crate::sync::Arc;
use crate::sys::{Block, Slab};

/// No item.
pub(crate) const NIL: u32 = u32::MAX;

/// The source of frames.
pub(crate) trait Frames {
    /// The slab that holds them.
    fn slab(&self) -> &Arc<Slab>;
    /// Takes a frame, if there is one.
    fn take(&mut self) -> Option<u32>;
    /// Returns a frame.
    fn give(&mut self, frame: u32);
}

/// No frame was available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoFrame;

/// An item of an arena, which can store the number of the next free one.
pub(crate) trait Slot: Copy {
    /// The value with which a new block is filled.
    const EMPTY: Self;
    /// The next free item, in a free item.
    fn next_free(&self) -> u32;
    /// Makes the item a free one.
    fn set_free(&mut self, next: u32);
    /// In a free item, another one that is likely to be inserted some insertions after it.
    fn later_free(&self) -> u32 {
        self.next_free()
    }
    /// Stores that other one.
    fn set_later_free(&mut self, _later: u32) {}
}

/// Number of insertions by which free items are prefetched ahead: following their list would wait for each.
const AHEAD: usize = 8;

/// Items of one type, numbered from 0.
pub(crate) struct Arena<T: Slot> {
    blocks: Vec<Block<T>>,
    /// One above the highest number ever assigned.
    end: u32,
    /// First of the free items below `end`.
    free: u32,
    live: u32,
    /// The items freed last, the next to be overwritten at `freed_at`.
    freed: [u32; AHEAD],
    freed_at: usize,
}

impl<T: Slot> Arena<T> {
    #[expect(clippy::cast_possible_truncation, reason = "4096 at most")]
    const ITEMS: u32 = Block::<T>::ITEMS as u32;

    /// Returns an arena without a frame.
    pub(crate) fn new() -> Self {
        Self {
            blocks: Vec::new(),
            end: 0,
            free: NIL,
            live: 0,
            freed: [NIL; AHEAD],
            freed_at: 0,
        }
    }

    /// Number of items in use.
    pub(crate) fn live(&self) -> u32 {
        self.live
    }

    /// One above the highest number ever assigned.
    pub(crate) fn end(&self) -> u32 {
        self.end
    }

    /// Number of frames it holds.
    pub(crate) fn frames(&self) -> usize {
        self.blocks.len()
    }

    /// Number of frames it would hold without fragmentation.
    pub(crate) fn frames_needed(&self) -> usize {
        self.live.div_ceil(Self::ITEMS) as usize
    }

    /// Bytes it takes outside its frames.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.blocks.capacity() * size_of::<Block<T>>()
    }

    /// Ensures that `count` items can be inserted.
    #[inline(always)]
    pub(crate) fn ensure(&mut self, count: u32, frames: &mut impl Frames) -> Result<(), NoFrame> {
        while self.blocks.len() as u64 * u64::from(Self::ITEMS)
            < u64::from(self.live) + u64::from(count)
        {
            let frame = frames.take().ok_or(NoFrame)?;
            self.blocks.push(Block::new(frames.slab(), frame, T::EMPTY));
        }
        Ok(())
    }

    /// Inserts an item; room for it was [ensured](Self::ensure).
    #[inline(always)]
    pub(crate) fn insert(&mut self, item: T) -> u32 {
        self.live += 1;
        if self.free == NIL {
            let id = self.end;
            self.end += 1;
            self[id] = item;
            return id;
        }
        let id = self.free;
        self.free = self[id].next_free();
        self.prefetch(self[id].later_free());
        self[id] = item;
        id
    }

    /// Frees an item.
    #[inline(always)]
    pub(crate) fn remove(&mut self, id: u32) {
        let next = self.free;
        let later = std::mem::replace(&mut self.freed[self.freed_at], id);
        self.freed_at = (self.freed_at + 1) % AHEAD;
        let item = &mut self[id];
        item.set_free(next);
        item.set_later_free(later);
        self.free = id;
        self.live -= 1;
    }

    /// The item of a number that was valid at some time; the item may be free now.
    #[inline(always)]
    pub(crate) fn get(&self, id: u32) -> Option<&T> {
        let block = self.blocks.get((id / Self::ITEMS) as usize)?;
        Some(&block[(id % Self::ITEMS) as usize])
    }

    /// Prefetches an item.
    #[inline(always)]
    pub(crate) fn prefetch(&self, id: u32) {
        if let Some(block) = self.blocks.get((id / Self::ITEMS) as usize) {
            block.prefetch((id % Self::ITEMS) as usize, 0);
        }
    }

    /// Prefetches a cache line of an item, at this offset in bytes from its beginning.
    #[inline(always)]
    pub(crate) fn prefetch_within(&self, id: u32, offset_bytes: usize) {
        if let Some(block) = self.blocks.get((id / Self::ITEMS) as usize) {
            block.prefetch((id % Self::ITEMS) as usize, offset_bytes);
        }
    }

    /// Moves blocks out of frames from `top` on. If frames run out, the blocks already moved stay moved.
    pub(crate) fn relocate(
        &mut self,
        top: u32,
        mut take: impl FnMut() -> Option<u32>,
    ) -> Result<(), NoFrame> {
        for block in self.blocks.iter_mut().filter(|block| block.frame() >= top) {
            block.relocate(take().ok_or(NoFrame)?);
        }
        Ok(())
    }

    /// Releases all frames; the items are gone.
    pub(crate) fn clear(&mut self, frames: &mut impl Frames) {
        for block in self.blocks.drain(..) {
            frames.give(block.into_frame());
        }
        *self = Self::new();
    }
}

impl<T: Slot> Index<u32> for Arena<T> {
    type Output = T;

    #[inline(always)]
    fn index(&self, id: u32) -> &T {
        &self.blocks[(id / Self::ITEMS) as usize][(id % Self::ITEMS) as usize]
    }
}

impl<T: Slot> IndexMut<u32> for Arena<T> {
    #[inline(always)]
    fn index_mut(&mut self, id: u32) -> &mut T {
        &mut self.blocks[(id / Self::ITEMS) as usize][(id % Self::ITEMS) as usize]
    }
}
