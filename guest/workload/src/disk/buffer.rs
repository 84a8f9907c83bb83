//! Memory for direct I/O: aligned to a page, in safe code.

use std::ops::{Deref, DerefMut};

/// Largest alignment that direct I/O requires.
const ALIGNMENT: usize = 4096;

/// Zeroed bytes that begin at a multiple of 4 KiB.
pub struct Buffer {
    bytes: Vec<u8>,
    offset: usize,
    len: usize,
}

impl Buffer {
    /// Sets `len` bytes aside.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + ALIGNMENT];
        let offset = bytes.as_ptr().align_offset(ALIGNMENT);
        Self { bytes, offset, len }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.offset..][..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.offset..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_aligned_and_as_long_as_asked_for() {
        let buffer = Buffer::new(5000);
        assert_eq!(
            (buffer.as_ptr().addr() % ALIGNMENT, buffer.len()),
            (0, 5000)
        );
    }
}
