//! The pages used last, in the order of their use.

use plimsoll_flow::PageNumber;

/// An exact LRU list of few pages.
#[derive(Debug)]
pub(super) struct Filter {
    /// The page used last in front.
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

    /// Uses a page: `None` if it was there, else the page that leaves for it, if one must.
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
