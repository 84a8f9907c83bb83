//! Frames that a shard keeps in reserve, so that it need not access the store's free list for each.

use super::Common;

use crate::arena::Frames;
use crate::sync::{Arc, Ordering, lock};
use crate::sys::Slab;

/// A shard's reserve of frames, which makes access to the store's list rare.
pub(crate) struct Magazine {
    pub(super) common: Arc<Common>,
    pub(super) frames: Vec<u32>,
    /// Number of frames added to it less those taken.
    pub(super) balance: i64,
}

impl Magazine {
    /// Maximum number of frames it can reserve.
    pub(crate) const MOST_FRAMES: usize = 32;

    pub(super) fn new(common: Arc<Common>) -> Self {
        Self {
            common,
            frames: Vec::with_capacity(Self::MOST_FRAMES + 1),
            balance: 0,
        }
    }

    /// Number of frames in reserve.
    pub(crate) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Returns all to the store's list, where other shards find them.
    pub(crate) fn spill(&mut self) {
        self.spill_to(0);
    }

    fn spill_to(&mut self, keep: usize) {
        let mut free = lock(&self.common.free);
        for frame in self.frames.drain(keep..) {
            free.push(frame);
        }
    }

    /// The frame that the next put would use.
    pub(super) fn next(&self) -> Option<u32> {
        self.frames.last().copied()
    }
}

impl Frames for Magazine {
    fn slab(&self) -> &Arc<Slab> {
        &self.common.slab
    }

    #[inline(always)]
    fn take(&mut self) -> Option<u32> {
        if self.frames.is_empty() {
            let mut free = lock(&self.common.free);
            for _ in 0..self.common.magazine_frames().div_ceil(2) {
                self.frames.extend(free.pop());
            }
        }
        let frame = self.frames.pop()?;
        self.balance -= 1;
        Some(frame)
    }

    #[inline(always)]
    fn give(&mut self, frame: u32) {
        self.balance += 1;
        // A frame beyond the end is about to leave the store.
        if frame < self.common.top.load(Ordering::Relaxed) {
            self.frames.push(frame);
            let most = self.common.magazine_frames();
            if self.frames.len() > most {
                self.spill_to(most / 2);
            }
        }
    }
}
