//! When each page was last used: the one table an online estimator asks at every reference.
//!
//! At a million pages the table outgrows the caches, and a look-up costs a trip to
//! memory. So a page and its moment lie side by side (one trip, where the
//! standard table takes two), and a batch's places can be asked for together
//! before they are needed one by one (trips overlap instead of queueing).
//!
//! Open addressing with linear probing, at most half full, under
//! a random key: no choice of page numbers makes it slow.
//!
//! Cost: 32 to 64 bytes a page.
//! Not here: forgetting single pages; nobody who keeps this table does.

use std::hint::black_box;

use plimsoll_flow::PageNumber;

use crate::hash::PageHash;

/// How many places a caller does well to [`fetch`](LastUse::fetch) at once: more
/// than a core keeps on their way, few enough to stay in its first-level cache.
pub(crate) const FETCH: usize = 32;

#[derive(Debug, Clone, Copy)]
struct Slot {
    page: PageNumber,
    /// [`FREE`] if no page is here.
    moment: u64,
}

/// The moment that no stream reaches.
const FREE: u64 = u64::MAX;

/// A page's last moment of use, for every page used.
#[derive(Debug, Clone)]
pub(crate) struct LastUse {
    hash: PageHash,
    /// A power of two of them, at least twice as many as pages.
    slots: Vec<Slot>,
    pages: usize,
}

impl LastUse {
    pub(crate) fn new() -> Self {
        Self {
            hash: PageHash::salted(),
            slots: free_slots(64),
            pages: 0,
        }
    }

    /// Sets a page's moment, below `u64::MAX`, and returns the one before, if any.
    pub(crate) fn replace(&mut self, page: PageNumber, moment: u64) -> Option<u64> {
        let index = self.index_of(page);
        let slot = &mut self.slots[index];
        let before = std::mem::replace(slot, Slot { page, moment }).moment;
        if before != FREE {
            return Some(before);
        }
        self.pages += 1;
        if self.pages * 2 > self.slots.len() {
            self.grow();
        }
        None
    }

    /// Brings the places of `pages` on their way from memory, all at once.
    pub(crate) fn fetch(&self, pages: &[PageNumber]) {
        let moments = pages
            .iter()
            .map(|&page| self.slots[self.home_of(page)].moment);
        black_box(moments.fold(0, |all, moment| all ^ moment));
    }

    /// The moments of all pages, in no order.
    pub(crate) fn moments_mut(&mut self) -> impl Iterator<Item = &mut u64> {
        let moments = self.slots.iter_mut().map(|slot| &mut slot.moment);
        moments.filter(|moment| **moment != FREE)
    }

    /// Forgets every page, keeping the memory.
    pub(crate) fn clear(&mut self) {
        let slots = self.slots.len();
        self.slots.clear();
        self.slots.resize(slots, free_slots(1)[0]);
        self.pages = 0;
    }

    /// Where a search for the page begins.
    fn home_of(&self, page: PageNumber) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "only the low bits count")]
        let hash = self.hash.of(page) as usize;
        hash & (self.slots.len() - 1)
    }

    /// Where the page is, or the free place where it belongs.
    fn index_of(&self, page: PageNumber) -> usize {
        let mut index = self.home_of(page);
        while self.slots[index].moment != FREE && self.slots[index].page != page {
            index = (index + 1) & (self.slots.len() - 1);
        }
        index
    }

    fn grow(&mut self) {
        let twice = free_slots(self.slots.len() * 2);
        for slot in std::mem::replace(&mut self.slots, twice) {
            if slot.moment != FREE {
                let index = self.index_of(slot.page);
                self.slots[index] = slot;
            }
        }
    }
}

fn free_slots(count: usize) -> Vec<Slot> {
    let free = Slot {
        page: PageNumber(0),
        moment: FREE,
    };
    vec![free; count]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn the_table_agrees_with_an_ordered_map(
            uses in prop::collection::vec((0_u64..600, 0_u64..1_000_000), 1..3_000),
        ) {
            let (mut table, mut map) = (LastUse::new(), BTreeMap::new());
            for &(page, moment) in &uses {
                prop_assert_eq!(table.replace(PageNumber(page), moment), map.insert(page, moment));
            }
            let mut moments: Vec<_> = table.moments_mut().map(|moment| *moment).collect();
            let mut expected: Vec<_> = map.into_values().collect();
            moments.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(moments, expected);
            table.clear();
            prop_assert_eq!(table.moments_mut().count(), 0);
            prop_assert_eq!(table.replace(PageNumber(uses[0].0), 1), None);
        }
    }
}
