//! A translation lookaside buffer.

use plimsoll_flow::PageNumber;

use crate::TlbShape;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    page: PageNumber,
    dirty: bool,
}

/// Sets of entries, each with the most recently used first.
#[derive(Debug)]
pub(super) struct Tlb {
    entries: Vec<Option<Entry>>,
    ways: usize,
    sets: u64,
}

impl Tlb {
    pub(super) fn new(shape: TlbShape) -> Self {
        Self {
            entries: vec![None; shape.entries() as usize],
            ways: shape.ways() as usize,
            sets: shape.sets().into(),
        }
    }

    /// Whether an access hits; the entry, if there is one, becomes the most recently used.
    #[inline]
    pub(super) fn serves(&mut self, page: PageNumber, write: bool) -> bool {
        let set = self.set(page);
        let found = set.iter().position(|entry| is_of(entry, page));
        let Some(place) = found else {
            return false;
        };
        set[..=place].rotate_right(1);
        set[0].is_some_and(|entry| entry.dirty || !write)
    }

    /// Whether a page's entry is dirty.
    pub(super) fn is_dirty(&mut self, page: PageNumber) -> bool {
        let set = self.set(page);
        let mut entries = set.iter().flatten();
        entries.any(|entry| entry.page == page && entry.dirty)
    }

    /// Inserts a page as the most recently used of its set, in place of its own entry or of the least recently used.
    pub(super) fn fill(&mut self, page: PageNumber, dirty: bool) {
        let set = self.set(page);
        let found = set.iter().position(|entry| is_of(entry, page));
        let place = found.unwrap_or(set.len() - 1);
        set[..=place].rotate_right(1);
        set[0] = Some(Entry { page, dirty });
    }

    pub(super) fn flush(&mut self) {
        self.entries.fill(None);
    }

    fn set(&mut self, page: PageNumber) -> &mut [Option<Entry>] {
        let set = usize::try_from(page.0 & (self.sets - 1)).expect("a TLB is small");
        &mut self.entries[set * self.ways..][..self.ways]
    }
}

fn is_of(entry: &Option<Entry>, page: PageNumber) -> bool {
    entry.is_some_and(|entry| entry.page == page)
}
