//! The pages of a machine that were written since the round before: a bit for each.

use plimsoll_flow::PageNumber;

use super::slot::Slot;
use super::{Round, each_set};

/// A bit for each page of each slot.
#[derive(Debug)]
pub(super) struct WrittenBitmaps {
    slots: Vec<Slot>,
    bitmaps: Vec<Vec<u64>>,
    lost: u64,
}

impl WrittenBitmaps {
    pub(super) fn new(slots: &[Slot]) -> Self {
        let bitmap = |slot: &Slot| vec![0; slot.len_bytes().div_ceil(4096 * 64)];
        Self {
            bitmaps: slots.iter().map(bitmap).collect(),
            slots: slots.to_vec(),
            lost: 0,
        }
    }

    /// Records a write to a page of a slot, both counted from 0, or that there is no such page.
    pub(super) fn note(&mut self, slot: Option<usize>, offset: u64) {
        match self.word(slot, offset) {
            Some(word) => *word |= 1 << (offset % 64),
            None => self.lost += 1,
        }
    }

    /// Counts writes to pages that are not known.
    pub(super) fn lose(&mut self, writes: u64) {
        self.lost += writes;
    }

    fn word(&mut self, slot: Option<usize>, offset: u64) -> Option<&mut u64> {
        let index = slot?;
        (offset < self.slots.get(index)?.pages.0).then_some(())?;
        self.bitmaps[index].get_mut(usize::try_from(offset / 64).ok()?)
    }

    /// Takes the pages recorded since the last call.
    pub(super) fn take(&mut self) -> Round {
        let mut pages = Vec::new();
        for (slot, bitmap) in self.slots.iter().zip(&mut self.bitmaps) {
            each_set(bitmap, slot.pages.0, |page| {
                pages.push(PageNumber(slot.first.0 + page));
            });
            bitmap.fill(0);
        }
        pages.sort_unstable();
        let mut round = Round::of(pages);
        round.lost = std::mem::take(&mut self.lost);
        round
    }
}
