//! A request's data, block by block.

use crate::{PAGE_BYTES, Segment};

/// Iterates over a range of a disk and the guest memory that belongs to it, one block at a time.
pub(crate) struct Cursor<'a> {
    offset: u64,
    segments: &'a [Segment],
    /// Bytes consumed of the first of them.
    taken: u32,
}

/// The part of a block that a request concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockPart {
    pub block: u64,
    /// First byte in it.
    pub start: usize,
    /// Its length in bytes.
    pub bytes: usize,
}

impl BlockPart {
    pub(crate) fn is_whole(self) -> bool {
        self.bytes == PAGE_BYTES
    }

    /// One past the last byte, on the disk.
    pub(crate) fn end(self) -> u64 {
        self.block * PAGE_BYTES as u64 + (self.start + self.bytes) as u64
    }
}

impl<'a> Cursor<'a> {
    /// `segments` is the guest memory for the disk's bytes from `offset` on.
    pub(crate) fn new(offset: u64, segments: &'a [Segment]) -> Self {
        Self {
            offset,
            segments,
            taken: 0,
        }
    }

    /// Advances to the next block, and sets `parts` to its memory.
    pub(crate) fn next_block(&mut self, parts: &mut Vec<Segment>) -> Option<BlockPart> {
        parts.clear();
        let block = self.offset / PAGE_BYTES as u64;
        let start = usize::try_from(self.offset % PAGE_BYTES as u64).unwrap_or(0);
        let mut bytes = 0;
        while let Some(segment) = self.segments.first() {
            let room = PAGE_BYTES - start - bytes;
            if room == 0 {
                break;
            }
            let left = segment.bytes - self.taken;
            let part = left.min(u32::try_from(room).unwrap_or(left));
            if part > 0 {
                parts.push(Segment {
                    address: segment.address.saturating_add(u64::from(self.taken)),
                    bytes: part,
                });
            }
            bytes += part as usize;
            self.taken += part;
            if self.taken == segment.bytes {
                self.segments = &self.segments[1..];
                self.taken = 0;
            }
        }
        self.offset += bytes as u64;
        (bytes > 0).then_some(BlockPart {
            block,
            start,
            bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block, where in it, how many bytes, and in which memory.
    type Step = (u64, usize, usize, Vec<(u64, u32)>);

    fn walk(offset: u64, segments: &[(u64, u32)]) -> Vec<Step> {
        let segments: Vec<Segment> = segments
            .iter()
            .map(|&(address, bytes)| Segment { address, bytes })
            .collect();
        let mut cursor = Cursor::new(offset, &segments);
        let mut parts = Vec::new();
        std::iter::from_fn(|| {
            let within = cursor.next_block(&mut parts)?;
            let parts = parts.iter().map(|part| (part.address, part.bytes));
            Some((within.block, within.start, within.bytes, parts.collect()))
        })
        .collect()
    }

    #[test]
    fn pages_are_blocks() {
        assert_eq!(
            walk(8192, &[(0x1000, 4096), (0x9000, 8192)]),
            [
                (2, 0, 4096, vec![(0x1000, 4096)]),
                (3, 0, 4096, vec![(0x9000, 4096)]),
                (4, 0, 4096, vec![(0xa000, 4096)]),
            ]
        );
    }

    #[test]
    fn blocks_are_cut_where_they_end_and_joined_where_memory_does() {
        assert_eq!(
            walk(3584, &[(0x1200, 1024), (0x5000, 0), (0x7e00, 4096)]),
            [
                (0, 3584, 512, vec![(0x1200, 512)]),
                (1, 0, 4096, vec![(0x1400, 512), (0x7e00, 3584)]),
                (2, 0, 512, vec![(0x8c00, 512)]),
            ]
        );
        assert_eq!(walk(0, &[]), []);
    }
}
