//! A miniature of a store: one pool's replacement on page numbers alone, for curves of policies that are not stack algorithms.
//!
//! It takes the events of a sample of a client's pages, and answers which of its gets would hit in a store that gives the
//! client so many pages, by the [policy](crate::EvictionPolicy) itself. A sample of one in *n* pages in a miniature of one in *n* of
//! the size has about the hit ratio of the whole (\[Waldspurger17\]). Several miniatures yield points of a curve.
//!
//! The events are those of a store of another size. A get that missed there is followed by a put; if it hits here,
//! that put would not have happened, and is no use of the page. A get that hit there is not; if it misses here, the client would have
//! put the page, and the miniature does.
//!
//! Cost: three to six lines of memory an event; 16 bytes a page, 16 a remembered one, and 8 to 16 of index for each,
//! all reserved at the start. Not here: contents, shards, compression.

use crate::arena::NIL;
use crate::eviction::{EvictionPolicy, EvictionPolicyRow, UseEffect, Verdict};
use crate::ghost::remembered_pages;

/// Number of the list of remembered pages, after the two queues.
const GHOSTS: usize = 2;

/// A page of one list.
#[derive(Debug, Clone, Copy)]
struct Slot {
    page: u32,
    older: u32,
    newer: u32,
    /// Bits 0..2 the list: 0 and 1 are the policy's queues. Above them of a remembered page how many pages had left before,
    /// wrapped; of others bit 2 if a put is owed, and the uses.
    bits: u32,
}

const LIST: u32 = 0b11;
const LIST_BITS: u32 = 2;
/// A put would not have happened: its get missed in the store and hit here.
const PUT_IS_OWED: u32 = 1 << LIST_BITS;
const USES_SHIFT: u32 = LIST_BITS + 1;

impl Slot {
    fn list(&self) -> usize {
        (self.bits & LIST) as usize
    }

    fn uses(&self) -> u8 {
        u8::try_from(self.bits >> USES_SHIFT).expect("at most USES_MAX")
    }

    fn set_uses(&mut self, uses: u8) {
        let others = self.bits & (LIST | PUT_IS_OWED);
        self.bits = others | u32::from(uses) << USES_SHIFT;
    }
}

#[derive(Debug, Clone, Copy)]
struct List {
    oldest: u32,
    newest: u32,
    pages: u32,
}

/// A simulated pool of a fixed number of pages.
pub struct Miniature {
    policy: Box<dyn EvictionPolicy>,
    size_pages: u32,
    /// Number of pages that it had when one was last evicted, or has had since if that is more.
    reached_pages: u32,
    ghosts_max: u32,
    /// Number of pages that left.
    left: u32,
    slots: Vec<Slot>,
    /// First free slot, linked by `newer`.
    free: u32,
    lists: [List; 3],
    /// Slots by the hash of their page, linear probing, at most half full.
    index: Box<[u32]>,
}

impl std::fmt::Debug for Miniature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Miniature of {} pages", self.size_pages)
    }
}

impl Miniature {
    /// Maximum number of pages of a miniature.
    pub const MOST_PAGES: u32 = 1 << 28;

    /// Makes an empty one of `size_pages`, at most [`MOST_PAGES`](Self::MOST_PAGES), under a policy.
    pub fn new(row: &EvictionPolicyRow, size_pages: u32) -> Self {
        let size_pages = size_pages.min(Self::MOST_PAGES);
        let ghosts_max = if row.remembers {
            remembered_pages(size_pages)
        } else {
            0
        };
        let slots = size_pages + ghosts_max;
        Self {
            policy: (row.make)(),
            size_pages,
            reached_pages: 0,
            ghosts_max,
            left: 0,
            slots: Vec::with_capacity(slots as usize),
            free: NIL,
            lists: [List {
                oldest: NIL,
                newest: NIL,
                pages: 0,
            }; 3],
            index: vec![NIL; (2 * slots as usize).next_power_of_two().max(2)].into(),
        }
    }

    /// Bytes of memory that one of this size takes.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.slots.capacity() * size_of::<Slot>()
            + self.index.len() * size_of::<u32>()
            + size_of_val(&*self.policy)
    }

    /// Number of pages in it.
    pub fn pages(&self) -> u32 {
        self.lists[0].pages + self.lists[1].pages
    }

    /// A get. `page`: bits of a hash of it. `inclusive`: in a shared pool. `missed`: it missed in the store, so a put of the page
    /// is expected. Returns whether it hits here.
    pub fn get(&mut self, page: u32, inclusive: bool, missed: bool) -> bool {
        let found = self.find(page).filter(|&slot| !self.is_ghost(slot));
        match found {
            Some(slot) if inclusive => {
                self.use_page(slot);
                let bits = &mut self.slots[slot as usize].bits;
                *bits = *bits & !PUT_IS_OWED | if missed { PUT_IS_OWED } else { 0 };
            }
            Some(slot) if self.policy.remembers_taken() && self.ghosts_max > 0 => {
                self.remember(slot);
            }
            Some(slot) => self.remove(slot),
            None if inclusive && !missed => self.put(page),
            None => {}
        }
        found.is_some()
    }

    /// A put.
    pub fn put(&mut self, page: u32) {
        let found = self.find(page);
        if let Some(slot) = found.filter(|&slot| !self.is_ghost(slot)) {
            let bits = &mut self.slots[slot as usize].bits;
            let is_owed = *bits & PUT_IS_OWED != 0;
            *bits &= !PUT_IS_OWED;
            if !is_owed {
                self.use_page(slot);
            }
            return;
        }
        if self.size_pages == 0 {
            return;
        }
        while self.pages() >= self.size_pages {
            self.evict_one();
        }
        self.reached_pages = self.reached_pages.max(self.pages());
        let mut remembered = false;
        if let Some(slot) = found.filter(|&slot| self.is_ghost(slot)) {
            remembered = self.left_since(slot) <= remembered_pages(self.reached_pages);
            self.remove(slot);
        }
        let queue = self.policy.enter(remembered, self.queue_pages());
        let slot = self.insert(page);
        self.append(slot, queue.index());
    }

    /// A flush: the page leaves, if it is there, and is not remembered.
    pub fn flush(&mut self, page: u32) {
        if let Some(slot) = self.find(page).filter(|&slot| !self.is_ghost(slot)) {
            self.remove(slot);
        }
    }

    fn queue_pages(&self) -> [u32; 2] {
        [self.lists[0].pages, self.lists[1].pages]
    }

    fn is_ghost(&self, slot: u32) -> bool {
        self.slots[slot as usize].list() == GHOSTS
    }

    fn use_page(&mut self, slot: u32) {
        match self.policy.used(self.slots[slot as usize].uses()) {
            UseEffect::Counted(uses) => self.slots[slot as usize].set_uses(uses),
            UseEffect::Moved(queue) => {
                self.unlink(slot);
                self.append(slot, queue.index());
            }
        }
    }

    fn evict_one(&mut self) {
        let queue = self.policy.next(self.queue_pages());
        let slot = self.lists[queue.index()].oldest;
        let uses = self.slots[slot as usize].uses();
        match self.policy.judge(queue, uses) {
            Verdict::Kept { queue, uses } => {
                self.unlink(slot);
                self.slots[slot as usize].set_uses(uses);
                self.append(slot, queue.index());
            }
            Verdict::Evicted { remembered } => {
                self.reached_pages = self.pages();
                if remembered && self.ghosts_max > 0 {
                    self.remember(slot);
                } else {
                    self.remove(slot);
                }
            }
        }
    }

    /// Makes a page a remembered one.
    fn remember(&mut self, slot: u32) {
        self.unlink(slot);
        self.slots[slot as usize].bits = self.left << LIST_BITS;
        self.append(slot, GHOSTS);
        self.left = self.left.wrapping_add(1);
        // This one at least is young enough.
        while self.left_since(self.lists[GHOSTS].oldest) > self.ghosts_max {
            self.remove(self.lists[GHOSTS].oldest);
        }
    }

    /// Number of pages that left since a remembered one did, itself included.
    fn left_since(&self, slot: u32) -> u32 {
        let left = self.slots[slot as usize].bits >> LIST_BITS;
        self.left.wrapping_sub(left) << LIST_BITS >> LIST_BITS
    }

    fn append(&mut self, slot: u32, list: usize) {
        let newest = self.lists[list].newest;
        let page = &mut self.slots[slot as usize];
        page.older = newest;
        page.newer = NIL;
        page.bits = page.bits & !LIST | u32::try_from(list).expect("three lists");
        match newest {
            NIL => self.lists[list].oldest = slot,
            newest => self.slots[newest as usize].newer = slot,
        }
        self.lists[list].newest = slot;
        self.lists[list].pages += 1;
    }

    fn unlink(&mut self, slot: u32) {
        let page = self.slots[slot as usize];
        let Slot { older, newer, .. } = page;
        let list = &mut self.lists[page.list()];
        list.pages -= 1;
        match older {
            NIL => list.oldest = newer,
            older => self.slots[older as usize].newer = newer,
        }
        match newer {
            NIL => list.newest = older,
            newer => self.slots[newer as usize].older = older,
        }
    }

    /// Makes a slot that is in no list. There are as many as pages and ghosts at most.
    fn insert(&mut self, page: u32) -> u32 {
        let new = Slot {
            page,
            older: NIL,
            newer: NIL,
            bits: 0,
        };
        let slot = if self.free == NIL {
            self.slots.push(new);
            u32::try_from(self.slots.len() - 1).expect("at most twice MOST_PAGES")
        } else {
            let slot = self.free;
            self.free = self.slots[slot as usize].newer;
            self.slots[slot as usize] = new;
            slot
        };
        let mut at = self.home(page);
        while self.index[at] != NIL {
            at = self.after(at);
        }
        self.index[at] = slot;
        slot
    }

    /// Frees a slot.
    fn remove(&mut self, slot: u32) {
        self.unlink(slot);
        let mut hole = self.home(self.slots[slot as usize].page);
        while self.index[hole] != slot {
            hole = self.after(hole);
        }
        // The entries after it move up, unless that puts them before their home.
        let mut at = self.after(hole);
        while self.index[at] != NIL {
            let home = self.home(self.slots[self.index[at] as usize].page);
            let mask = self.index.len() - 1;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.index[hole] = self.index[at];
                hole = at;
            }
            at = self.after(at);
        }
        self.index[hole] = NIL;
        // In no list: an eviction may forget the page that a put found to be remembered.
        let freed = &mut self.slots[slot as usize];
        (freed.newer, freed.bits) = (self.free, 0);
        self.free = slot;
    }

    fn find(&self, page: u32) -> Option<u32> {
        let mut at = self.home(page);
        loop {
            let slot = self.index[at];
            if slot == NIL {
                return None;
            }
            if self.slots[slot as usize].page == page {
                return Some(slot);
            }
            at = self.after(at);
        }
    }

    fn home(&self, page: u32) -> usize {
        page.wrapping_mul(0x9e37_79b1) as usize >> 4 & (self.index.len() - 1)
    }

    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.index.len() - 1)
    }
}
