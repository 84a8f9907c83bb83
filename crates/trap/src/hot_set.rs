//! The hot page set: pages that trapped recently and are left accessible, [AET] §3.2.
//!
//! A queue, first in first out: a trapped page enters at the tail; when more than
//! `capacity` are in, the head leaves and is made inaccessible again.

use std::collections::VecDeque;

use crate::sys::usize_of;

/// Pages left accessible.
#[derive(Debug)]
pub struct HotSet {
    queue: VecDeque<u64>,
    member: PageBits,
    capacity: usize,
}

impl HotSet {
    /// Returns an empty set of at most `capacity` pages with numbers below `pages`.
    pub fn new(capacity: usize, pages: u64) -> Self {
        Self {
            queue: VecDeque::with_capacity(capacity + 1),
            member: PageBits::new(pages),
            capacity,
        }
    }

    /// Empties the set, which has room for `pages` from then on.
    pub fn restart(&mut self, pages: u32) {
        for page in self.queue.drain(..) {
            self.member.set(page, false);
        }
        self.capacity = pages as usize;
    }

    /// Whether the next page that enters it takes the place of another.
    pub fn is_full(&self) -> bool {
        self.queue.len() >= self.capacity
    }

    /// Whether `page` is in the set.
    pub fn contains(&self, page: u64) -> bool {
        self.member.get(page)
    }

    /// Adds `page`, which is not in the set, at the tail; returns the page that must leave for it.
    pub fn enter(&mut self, page: u64) -> Option<u64> {
        self.member.set(page, true);
        self.queue.push_back(page);
        if self.queue.len() <= self.capacity {
            return None;
        }
        let head = self.queue.pop_front()?;
        self.member.set(head, false);
        Some(head)
    }
}

/// A bit for each page.
#[derive(Debug)]
pub struct PageBits {
    words: Vec<u64>,
}

impl PageBits {
    /// Returns a clear bit for each page below `pages`.
    pub fn new(pages: u64) -> Self {
        let words = usize::try_from(pages.div_ceil(64)).expect("a VM's pages fit into memory");
        Self {
            words: vec![0; words],
        }
    }

    /// The bit of `page`.
    pub fn get(&self, page: u64) -> bool {
        self.words[usize_of(page / 64)] >> (page % 64) & 1 == 1
    }

    /// Sets the bit of `page`; returns whether that changed it.
    pub fn set(&mut self, page: u64, value: bool) -> bool {
        let word = &mut self.words[usize_of(page / 64)];
        let before = *word;
        *word = before & !(1 << (page % 64)) | u64::from(value) << (page % 64);
        *word != before
    }

    /// Clears all bits.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_in_is_the_first_out() {
        let mut hot = HotSet::new(2, 10);
        assert_eq!([7, 3, 9].map(|page| hot.enter(page)), [None, None, Some(7)]);
        assert_eq!(
            [7, 3, 9].map(|page| hot.contains(page)),
            [false, true, true]
        );
        hot.restart(1);
        assert!(!hot.contains(9));
        assert_eq!([7, 3].map(|page| hot.enter(page)), [None, Some(7)]);
    }

    #[test]
    fn a_bit_tells_whether_it_changed() {
        let mut bits = PageBits::new(65);
        assert!(bits.set(64, true));
        assert!(!bits.set(64, true));
        assert!(bits.get(64) && !bits.get(0));
        bits.clear();
        assert!(!bits.get(64));
    }
}
