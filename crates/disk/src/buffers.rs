//! A pool of reusable transfer buffers.

use std::sync::Arc;

use crate::sys::{Arena, SLOT_BYTES};
use crate::{Buffer, PAGE_BYTES};

/// Number of size classes; sizes are powers of two of pages.
const CLASSES: usize = 9;
/// Bytes of unused buffers kept in each size class: 16 MiB in all.
const KEPT_BYTES: usize = 2 << 20;

/// Unused buffers. Fresh memory costs a page fault for each 4 KiB, more than copying a page.
#[derive(Default)]
pub(crate) struct Buffers {
    free: [Vec<Buffer>; CLASSES],
    /// Where to take them first.
    arena: Option<Arc<Arena>>,
}

impl Buffers {
    /// Takes buffers of this arena while it has any.
    pub(crate) fn set_arena(&mut self, arena: Arc<Arena>) {
        self.arena = Some(arena);
    }

    /// A buffer of that length with arbitrary contents.
    pub(crate) fn take(&mut self, len: usize) -> Buffer {
        if let Some(arena) = self.arena.as_ref().filter(|_| len <= SLOT_BYTES)
            && let Some(buffer) = arena.take(len)
        {
            return buffer;
        }
        let Some(class) = class(len) else {
            return Buffer::new(len);
        };
        let mut buffer = self.free[class]
            .pop()
            .unwrap_or_else(|| Buffer::new(PAGE_BYTES << class));
        buffer.set_len(len);
        buffer
    }

    /// Returns a buffer that is no longer in use to the pool.
    pub(crate) fn give_back(&mut self, buffer: Buffer) {
        if buffer.is_of(self.arena.as_ref()) {
            return;
        }
        let Some(class) = class(buffer.capacity()) else {
            return;
        };
        let is_of_class = buffer.capacity() == PAGE_BYTES << class;
        if is_of_class && self.free[class].len() < KEPT_BYTES / (PAGE_BYTES << class) {
            self.free[class].push(buffer);
        }
    }
}

/// The smallest class whose buffers hold `len` bytes.
fn class(len: usize) -> Option<usize> {
    let pages = len.div_ceil(PAGE_BYTES).next_power_of_two();
    let class = pages.trailing_zeros() as usize;
    (class < CLASSES).then_some(class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_for_a_length_that_it_holds() {
        let mut buffers = Buffers::default();
        let buffer = buffers.take(3 * PAGE_BYTES);
        let start = buffer.as_ptr();
        buffers.give_back(buffer);
        assert_ne!(buffers.take(PAGE_BYTES).as_ptr(), start);
        let again = buffers.take(4 * PAGE_BYTES - 512);
        assert_eq!((again.as_ptr(), again.len()), (start, 4 * PAGE_BYTES - 512));
        assert_eq!(buffers.take(64 << 20).len(), 64 << 20);
    }
}
