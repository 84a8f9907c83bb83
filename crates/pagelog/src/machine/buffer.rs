//! A vCPU's logging buffer and its index.

use plimsoll_flow::PageNumber;

/// The logged pages in order, and the number of free entries.
#[derive(Debug)]
pub(super) struct Buffer {
    entries: Vec<PageNumber>,
    /// Number of free entries; -1 while logging is suspended.
    index: i64,
    capacity: u32,
}

/// Result of logging a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Put {
    /// The page was stored.
    Logged,
    /// No entry is free.
    Full,
    /// Logging was already suspended.
    Suspended,
}

impl Buffer {
    /// An empty buffer of `capacity` entries.
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            entries: Vec::new(),
            index: capacity.into(),
            capacity,
        }
    }

    /// Logs a page if there is a free entry.
    pub(super) fn put(&mut self, page: PageNumber) -> Put {
        match self.index {
            ..0 => Put::Suspended,
            0 => Put::Full,
            _ => {
                self.index -= 1;
                self.entries.push(page);
                Put::Logged
            }
        }
    }

    /// Decrements the index of a full buffer below 0: nothing is logged until it is reset.
    pub(super) fn suspend(&mut self) {
        self.index = -1;
    }

    /// Pages logged since the last reset.
    pub(super) fn entries(&self) -> &[PageNumber] {
        &self.entries
    }

    /// Empties it.
    pub(super) fn reset(&mut self) {
        self.entries.clear();
        self.index = self.capacity.into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_entries_are_filled_before_a_page_finds_it_full() {
        let mut buffer = Buffer::new(512);
        for page in 0..512 {
            assert_eq!(buffer.put(PageNumber(page)), Put::Logged);
        }
        assert_eq!(buffer.put(PageNumber(600)), Put::Full);
        buffer.suspend();
        assert_eq!(buffer.put(PageNumber(601)), Put::Suspended);
        assert_eq!(buffer.entries().len(), 512);
        buffer.reset();
        assert_eq!(buffer.put(PageNumber(602)), Put::Logged);
        assert_eq!(buffer.entries(), [PageNumber(602)]);
    }
}
