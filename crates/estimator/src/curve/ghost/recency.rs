//! A bounded number of pages in the order of their last use, each with its exact depth.
//!
//! An open-addressing table stores the time at which each page was last used, and `depths` counts the
//! pages used after that time.

use plimsoll_flow::PageNumber;

use super::depths::{Depths, as_time};
use super::{GhostError, as_index, check_pages, filled};
use crate::parts::hash::PageHash;
use crate::parts::sys;

/// A bounded number of pages in the order of their last use, each with its exact depth.
#[derive(Debug, Clone)]
pub(super) struct Recency {
    pub(super) hash: PageHash,
    /// Open addressing with linear probing; home slots are in the order of the hash.
    pub(super) slots: Vec<Slot>,
    /// The page of each time.
    pub(super) pages: Vec<PageNumber>,
    pub(super) depths: Depths,
    /// The time to be assigned next.
    pub(super) next: usize,
    /// No valid time is before this one.
    pub(super) oldest: usize,
    pub(super) len: usize,
    pub(super) capacity: usize,
    /// Number of pages dropped from the end.
    pub(super) dropped: u64,
}

/// A page's slot in the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub(super) page: PageNumber,
    /// [`FREE`] if the slot is free.
    pub(super) time: u32,
}

/// A time that is never assigned.
pub(super) const FREE: u32 = u32::MAX;

/// Number of references by which the table's lines are prefetched.
pub(super) const AHEAD: usize = 32;

impl Recency {
    pub(super) fn new(capacity: u64) -> Result<Self, GhostError> {
        check_pages(capacity)?;
        let pages = capacity;
        let capacity = as_index(capacity);
        // After renumbering at least half of the times are free, and a third of the slots are always free.
        let times = capacity + capacity + capacity / 2 + 64;
        let slots = (capacity + 1) * 2;
        let free = Slot {
            page: PageNumber(0),
            time: FREE,
        };
        Ok(Self {
            hash: PageHash::salted(),
            slots: filled(free, slots, pages)?,
            pages: filled(PageNumber(0), times, pages)?,
            depths: Depths::new(times, pages)?,
            next: 0,
            oldest: 0,
            len: 0,
            capacity,
            dropped: 0,
        })
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether a page was ever dropped from the end; if so, a page that is not found need not be new.
    pub(super) fn has_dropped(&self) -> bool {
        self.dropped > 0
    }

    /// Makes a page the most recent. Returns the number of pages before it, if it was present.
    pub(super) fn touch(&mut self, page: PageNumber) -> Option<u64> {
        self.touch_at(page, self.home_of(page))
    }

    /// Makes each of `pages` the most recent, in turn. Reports for each how many pages were before it, if it was
    /// present, and, as of the time before, the number of pages and whether any had been dropped from the end.
    pub(super) fn touch_all(
        &mut self,
        pages: &[PageNumber],
        mut each: impl FnMut(Option<u64>, u64, bool),
    ) {
        let mut homes = [0; AHEAD];
        for (place, &page) in pages.iter().take(AHEAD).enumerate() {
            homes[place] = self.fetch(page);
        }
        for (index, &page) in pages.iter().enumerate() {
            let home = homes[index % AHEAD];
            if let Some(&page) = pages.get(index + AHEAD) {
                homes[index % AHEAD] = self.fetch(page);
            }
            // Its slot has arrived in the cache by now; usually it is the home slot.
            let soon = homes[(index + AHEAD / 2) % AHEAD];
            self.depths.fetch(self.slots[soon].time as usize);
            let (reach, has_dropped) = (self.len(), self.has_dropped());
            each(self.touch_at(page, home), reach, has_dropped);
        }
    }

    /// Prefetches a page's slot and returns its position.
    #[inline(always)]
    pub(super) fn fetch(&self, page: PageNumber) -> usize {
        let home = self.home_of(page);
        sys::prefetch(&self.slots, home);
        home
    }

    #[inline(always)]
    pub(super) fn touch_at(&mut self, page: PageNumber, home: usize) -> Option<u64> {
        if self.next == self.pages.len() {
            self.number_anew();
        }
        let index = self.index_from(page, home);
        let now = self.next;
        let before = std::mem::replace(
            &mut self.slots[index],
            Slot {
                page,
                time: as_time(now),
            },
        );
        self.pages[now] = page;
        self.next += 1;
        if before.time == FREE {
            self.len += 1;
            if self.len > self.capacity {
                self.drop_oldest();
            }
            return None;
        }
        Some(self.depth_and_strike(before.time))
    }

    /// Removes a page. Returns the number of pages before it, if it was present.
    pub(super) fn remove(&mut self, page: PageNumber) -> Option<u64> {
        let index = self.index_from(page, self.home_of(page));
        let time = self.slots[index].time;
        if time == FREE {
            return None;
        }
        let depth = self.depth_and_strike(time);
        self.free(index);
        self.len -= 1;
        Some(depth)
    }

    /// Removes a page's time and returns the number of other pages with later ones.
    #[inline(always)]
    pub(super) fn depth_and_strike(&mut self, time: u32) -> u64 {
        let time = time as usize;
        let deeper = u64::from(self.depths.marked_before(time));
        self.depths.strike(time);
        self.len as u64 - 1 - deeper
    }

    /// Drops the page at the end.
    pub(super) fn drop_oldest(&mut self) {
        if self.dropped.is_multiple_of(DROPS_FETCHED as u64) {
            self.fetch_oldest();
        }
        let oldest = self.depths.next_marked(self.oldest);
        let index = self.index_of(self.pages[oldest]);
        self.depths.strike(oldest);
        self.free(index);
        self.oldest = oldest + 1;
        self.len -= 1;
        self.dropped += 1;
    }

    /// Prefetches the slots of the pages that will be dropped soon.
    pub(super) fn fetch_oldest(&self) {
        let mut time = self.oldest;
        for nth in 0..2 * DROPS_FETCHED {
            time = self.depths.next_marked(time);
            if time >= self.next {
                return;
            }
            if nth >= DROPS_FETCHED {
                // Freeing a slot inspects those after it, up to the next cache line.
                let home = self.fetch(self.pages[time]);
                sys::prefetch(&self.slots, home + SLOTS_OF_A_LINE);
            }
            time += 1;
        }
    }

    /// Renumbers the valid times from the front, in their order.
    pub(super) fn number_anew(&mut self) {
        for slot in &mut self.slots {
            if slot.time != FREE {
                slot.time = self.depths.marked_before(slot.time as usize);
            }
        }
        let mut time = self.oldest;
        for to in 0..self.len {
            time = self.depths.next_marked(time);
            self.pages[to] = self.pages[time];
            time += 1;
        }
        self.depths.reset();
        self.next = self.len;
        self.oldest = 0;
    }

    /// Returns the same pages with another capacity; drops the oldest if it is smaller.
    pub(super) fn resized(&self, capacity: u64) -> Result<Self, GhostError> {
        let mut resized = Self::new(capacity)?;
        let mut time = self.oldest;
        for _ in 0..self.len {
            time = self.depths.next_marked(time);
            resized.touch(self.pages[time]);
            time += 1;
        }
        resized.dropped += self.dropped;
        Ok(resized)
    }

    /// Removes all pages, keeping the memory.
    pub(super) fn clear(&mut self) {
        for slot in &mut self.slots {
            slot.time = FREE;
        }
        self.depths.reset();
        self.next = 0;
        self.oldest = 0;
        self.len = 0;
        self.dropped = 0;
    }

    /// The slot at which a search for the page begins.
    #[inline(always)]
    pub(super) fn home_of(&self, page: PageNumber) -> usize {
        let scaled = u128::from(self.hash.of(page)) * self.slots.len() as u128;
        #[expect(clippy::cast_possible_truncation, reason = "below the number of slots")]
        let home = (scaled >> 64) as usize;
        home
    }

    pub(super) fn index_of(&self, page: PageNumber) -> usize {
        self.index_from(page, self.home_of(page))
    }

    /// The page's slot, or the free slot where it belongs.
    #[inline(always)]
    pub(super) fn index_from(&self, page: PageNumber, home: usize) -> usize {
        let mut index = home;
        loop {
            let slot = self.slots[index];
            if slot.page == page || slot.time == FREE {
                // A free slot may still have the number of a page that left.
                return index;
            }
            index = self.after(index);
        }
    }

    #[inline(always)]
    pub(super) fn after(&self, index: usize) -> usize {
        if index + 1 == self.slots.len() {
            0
        } else {
            index + 1
        }
    }

    /// Frees a slot, moving back pages that could not be found behind it.
    pub(super) fn free(&mut self, index: usize) {
        let slots = self.slots.len();
        let way = |from: usize, to: usize| {
            if to >= from {
                to - from
            } else {
                to + slots - from
            }
        };
        let mut hole = index;
        let mut index = self.after(index);
        while self.slots[index].time != FREE {
            let home = self.home_of(self.slots[index].page);
            if way(home, index) >= way(hole, index) {
                self.slots[hole] = self.slots[index];
                hole = index;
            }
            index = self.after(index);
        }
        self.slots[hole].time = FREE;
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
            + self.pages.capacity() * size_of::<PageNumber>()
            + self.depths.memory_bytes()
    }
}

pub(super) const SLOTS_OF_A_LINE: usize = 64 / size_of::<Slot>();

/// Number of drops between two prefetches of the next ones.
pub(super) const DROPS_FETCHED: usize = 16;
