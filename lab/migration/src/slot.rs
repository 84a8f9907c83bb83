//! Memory slots of a machine.

use plimsoll_flow::{PageCount, PageNumber};

/// KVM's number of the first slot that is logged.
pub(super) const FIRST_SLOT: u32 = 1;
/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;

/// A range of guest-physical memory that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Its first page frame, from 512 (2 MiB).
    pub first: PageNumber,
    /// Its length.
    pub pages: PageCount,
}

impl Slot {
    /// Its length in bytes.
    pub(super) fn len_bytes(&self) -> usize {
        // A machine's slots fit into our address space.
        usize::try_from(self.pages.0 * PAGE_BYTES).unwrap_or(usize::MAX)
    }

    /// Index of a page in it, from 0.
    pub(super) fn offset_of(&self, page: PageNumber) -> Option<u64> {
        let offset = page.0.checked_sub(self.first.0)?;
        (offset < self.pages.0).then_some(offset)
    }
}
