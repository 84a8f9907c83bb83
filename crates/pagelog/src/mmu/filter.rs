//! The most recently used pages, in the order of their use.

use plimsoll_flow::PageNumber;

/// An exact LRU list of a few pages.
#[derive(Debug)]
pub(super) struct Filter {
    /// The pages, most recently used first.
    pages: Vec<PageNumber>,
    capacity: usize,
}

impl Filter {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            pages: Vec::new(),
            capacity: capacity as usize,
        }
    }

    /// Accesses a page: `None` if it was in the filter, otherwise the page that it displaces, if any.
    #[inline]
    pub(super) fn access(&mut self, page: PageNumber) -> Option<Option<PageNumber>> {
        if let Some(place) = self.pages.iter().position(|&there| there == page) {
            self.pages[..=place].rotate_right(1);
            return None;
        }
        let left = if self.pages.len() == self.capacity {
            self.pages.pop()
        } else {
            None
        };
        self.pages.insert(0, page);
        Some(left)
    }
}
