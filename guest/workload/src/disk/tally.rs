//! Counters of a disk workload, and the report of a wrong block.

use super::block::{BLOCK_BYTES, Name};
use crate::console::Line;

/// Wrong blocks reported individually; the others are counted.
const TOLD_MAX: u64 = 16;
/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;

/// Counts of one thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    /// Steps, or visits to files.
    pub ops: u64,
    /// Bytes read and verified.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Blocks that were not what they should have been.
    pub mismatches: u64,
}

impl Tally {
    /// Pages read, the last one perhaps in part.
    pub fn read_pages(&self) -> u64 {
        self.read_bytes.div_ceil(PAGE_BYTES)
    }

    /// Pages written.
    pub fn written_pages(&self) -> u64 {
        self.written_bytes.div_ceil(PAGE_BYTES)
    }

    /// Adds what another thread counted.
    pub fn add(&mut self, other: &Self) {
        self.ops += other.ops;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.mismatches += other.mismatches;
    }

    /// What was counted since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            ops: self.ops - before.ops,
            read_bytes: self.read_bytes - before.read_bytes,
            written_bytes: self.written_bytes - before.written_bytes,
            mismatches: self.mismatches - before.mismatches,
        }
    }

    /// Verifies `bytes` as the start of a block: `len` bytes of `expected`, then zeros.
    pub fn verify(&mut self, bytes: &[u8], expected: Name, len: usize) {
        self.read_bytes += bytes.len() as u64;
        let signed = len.min(bytes.len());
        let sound = signed == 0 || bytes[..signed] == expected.block()[..signed];
        if !sound || bytes[signed..].iter().any(|&byte| byte != 0) {
            self.wrong(bytes, expected, len);
        }
    }

    /// Counts a wrong block, and reports the expected and the actual contents.
    pub fn wrong(&mut self, bytes: &[u8], expected: Name, len: usize) {
        self.mismatches += 1;
        if self.mismatches > TOLD_MAX {
            return;
        }
        let line = Line::new("MISMATCH")
            .with("page", expected.number / 4)
            .with("file", expected.file)
            .with("block", expected.number)
            .with("signed_bytes", len)
            .with("expected", format_args!("{:#x}", expected.generation));
        let name = Name::of(bytes);
        let found = match (name, bytes.first_chunk::<8>()) {
            (Some(name), _) => name.generation.into(),
            (None, Some(word)) => u64::from_le_bytes(*word),
            (None, None) => 0,
        };
        let line = line.with("found", format_args!("{found:#x}"));
        match name {
            Some(name) => line
                .with("is", "block")
                .with("found_file", name.file)
                .with("found_block", name.number)
                .with("found_seed", name.seed),
            None if bytes.iter().all(|&byte| byte == 0) => line.with("is", "zeros"),
            None => line.with("is", "garbage"),
        }
        .print();
    }
}

/// Verifies consecutive whole blocks, numbered from `first.number` on.
pub fn verify_blocks(tally: &mut Tally, bytes: &[u8], first: Name) {
    for (block, number) in bytes.chunks(BLOCK_BYTES).zip(first.number..) {
        tally.verify(block, Name { number, ..first }, BLOCK_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_what_was_signed_and_then_zeros() {
        let name = Name {
            file: 3,
            ..Name::default()
        };
        let mut bytes = name.block();
        let mut tally = Tally::default();
        tally.verify(&bytes, name, BLOCK_BYTES);
        tally.verify(&bytes[..100], name, BLOCK_BYTES);
        assert_eq!(tally.mismatches, 0);
        tally.verify(&bytes, name, 100);
        assert_eq!(tally.mismatches, 1, "old bytes behind what was cut off");
        bytes[100..].fill(0);
        tally.verify(&bytes, name, 100);
        tally.verify(&[0; BLOCK_BYTES], name, 0);
        assert_eq!(tally.mismatches, 1);
        tally.verify(&bytes, name, BLOCK_BYTES);
        assert_eq!(tally.mismatches, 2, "a hole in place of what was written");
        assert_eq!(tally.read_bytes, 5 * 1024 + 100);
        assert_eq!(tally.read_pages(), 2);
    }
}
