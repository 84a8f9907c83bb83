//! The free frames.
//!
//! Their list is stored in the frames themselves: a *trunk* is a free frame that lists up to 1023 others and the next
//! trunk. So the list takes no extra memory, and allocating a frame reads the trunk, which is in the CPU's cache, and
//! not the frame.

use std::ops::Range;

use crate::PAGE_BYTES;
use crate::arena::NIL;
use crate::sync::Arc;
use crate::sys::Slab;

/// Number of frames that a trunk lists: its words, less that of the next trunk's number.
const TRUNK_FRAMES: u32 = 1023;
const _: () = assert!(TRUNK_FRAMES as usize + 1 == PAGE_BYTES / 4);

/// Free frames below `top`.
pub(crate) struct FreeFrames {
    slab: Arc<Slab>,
    /// Newest trunk, or NIL; all trunks after it are full.
    trunk: u32,
    /// Number of frames that `trunk` lists.
    named: u32,
    /// Number of frames in trunks, including the trunks.
    listed: u32,
    /// Frames never used since the store grew to include them.
    fresh: Range<u32>,
    /// Frames from here on may not be used.
    top: u32,
}

impl FreeFrames {
    /// Returns all frames below `top`.
    pub(crate) fn new(slab: Arc<Slab>, top: u32) -> Self {
        Self {
            slab,
            trunk: NIL,
            named: 0,
            listed: 0,
            fresh: 0..top,
            top,
        }
    }

    /// Number of free frames.
    pub(crate) fn len(&self) -> u32 {
        self.listed + (self.fresh.end - self.fresh.start)
    }

    /// Takes a frame: preferably one that already has memory.
    pub(crate) fn pop(&mut self) -> Option<u32> {
        self.pop_listed().or_else(|| self.fresh.next())
    }

    fn pop_listed(&mut self) -> Option<u32> {
        if self.trunk == NIL {
            return None;
        }
        self.listed -= 1;
        if self.named > 0 {
            let frame = self.word(self.trunk, self.named);
            self.named -= 1;
            return Some(frame);
        }
        let frame = self.trunk;
        self.trunk = self.word(frame, 0);
        self.named = if self.trunk == NIL { 0 } else { TRUNK_FRAMES };
        Some(frame)
    }

    /// Returns a frame. One that no longer belongs to the store is dropped.
    pub(crate) fn push(&mut self, frame: u32) {
        if frame >= self.top {
            return;
        }
        self.listed += 1;
        if self.trunk == NIL || self.named == TRUNK_FRAMES {
            self.set_word(frame, 0, self.trunk);
            self.trunk = frame;
            self.named = 0;
        } else {
            self.named += 1;
            self.set_word(self.trunk, self.named, frame);
        }
    }

    /// Moves the end of the store's frames. From now on no frame beyond it is handed out; frames
    /// between an old, lower end and the new one must be held by nobody.
    pub(crate) fn set_top(&mut self, top: u32) {
        let fresh = self.fresh.start.min(top)..top;
        let new = Self {
            slab: self.slab.clone(),
            trunk: NIL,
            named: 0,
            listed: 0,
            fresh,
            top,
        };
        let mut old = std::mem::replace(self, new);
        while let Some(frame) = old.pop_listed() {
            self.push(frame);
        }
    }

    fn word(&self, frame: u32, word: u32) -> u32 {
        let at = word as usize * 4;
        self.slab.read(frame, |page| {
            u32::from_le_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]])
        })
    }

    fn set_word(&self, frame: u32, word: u32, value: u32) {
        let at = word as usize * 4;
        self.slab.write(frame, |page| {
            page[at..at + 4].copy_from_slice(&value.to_le_bytes());
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn all(free: &mut FreeFrames) -> BTreeSet<u32> {
        let len = free.len();
        let frames: BTreeSet<u32> = std::iter::from_fn(|| free.pop()).collect();
        assert_eq!(frames.len(), len as usize, "each frame once");
        frames
    }

    #[test]
    fn every_frame_is_handed_out_once_through_many_trunks() {
        let slab = Arc::new(Slab::reserve(5000, false).unwrap());
        let mut free = FreeFrames::new(slab, 5000);
        assert_eq!(all(&mut free), (0..5000).collect());
        for frame in (0..5000).rev() {
            free.push(frame);
        }
        assert_eq!(free.len(), 5000);
        assert_eq!(all(&mut free), (0..5000).collect());
        assert_eq!(free.pop(), None);
    }

    #[test]
    fn the_end_moves_down_and_up() {
        let slab = Arc::new(Slab::reserve(4000, false).unwrap());
        let mut free = FreeFrames::new(slab, 3000);
        let held: Vec<u32> = (0..2000).filter_map(|_| free.pop()).collect();
        free.set_top(1500);
        assert_eq!(free.len(), 0);
        for frame in held {
            free.push(frame);
        }
        assert_eq!(free.len(), 1500, "frames beyond the end are forgotten");
        free.set_top(1000);
        free.set_top(3500);
        assert_eq!(all(&mut free), (0..3500).collect());
        free.push(1);
        free.set_top(4000);
        let expected: BTreeSet<u32> = std::iter::once(1).chain(3500..4000).collect();
        assert_eq!(all(&mut free), expected);
    }
}
