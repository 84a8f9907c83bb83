//! Transfers between guest memory and storage: the blocks they cover, and the pieces they consist of.

use crate::{ByteRange, GuestData, Location, OutsideRam, PAGE_BYTES, Segment};

/// [`PAGE_BYTES`], for offsets.
pub(super) const BLOCK: u64 = PAGE_BYTES as u64;

/// Part of a transfer: one block's bytes in one stretch of guest memory.
pub(super) struct Piece {
    pub(super) address: u64,
    pub(super) bytes: u32,
    /// Whether it is the first piece of its block.
    pub(super) begins: bool,
    pub(super) location: Location,
    /// The frame that holds the block, if block and frame coincide.
    pub(super) frame: Option<u64>,
    /// Of a write: the hash of the block.
    pub(super) hash: u64,
}

/// A range of blocks to be transferred by one submission.
pub(super) struct Run {
    pub(super) offset: u64,
    pub(super) bytes: usize,
    pub(super) pieces: Vec<Piece>,
}

impl Run {
    pub(super) fn new(offset: u64) -> Self {
        Self {
            offset,
            bytes: 0,
            pieces: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, location: Location, parts: &[Segment], frame: Option<u64>) {
        for (number, part) in parts.iter().enumerate() {
            self.pieces.push(Piece {
                address: part.address,
                bytes: part.bytes,
                begins: number == 0,
                location,
                frame,
                hash: 0,
            });
            self.bytes += part.bytes as usize;
        }
    }
}

impl Piece {
    pub(super) fn segment(&self) -> Segment {
        Segment {
            address: self.address,
            bytes: self.bytes,
        }
    }
}

/// Blocks of a disk from `first` up to, but excluding, `end`.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    pub(super) first: u64,
    pub(super) end: u64,
}

impl Blocks {
    /// The blocks of which the range has at least one byte.
    pub(super) fn touched(range: ByteRange) -> Self {
        Self {
            first: range.offset / BLOCK,
            end: (range.offset + range.bytes).div_ceil(BLOCK),
        }
    }

    /// The blocks that lie wholly in the range.
    pub(super) fn within(range: ByteRange) -> Self {
        Self {
            first: range.offset.div_ceil(BLOCK),
            end: (range.offset + range.bytes) / BLOCK,
        }
    }

    pub(super) fn count(self) -> u64 {
        self.end.saturating_sub(self.first)
    }

    pub(super) fn contains(self, location: Location) -> bool {
        (self.first..self.end).contains(&location.block())
    }
}

/// The frame that holds all bytes of a block, if there is one.
pub(super) fn frame_of(parts: &[Segment], whole: bool, ram: &dyn GuestData) -> Option<u64> {
    match parts {
        [part] if whole && part.address % BLOCK == 0 => {
            Some(part.address / BLOCK).filter(|&frame| ram.is_ram(frame))
        }
        _ => None,
    }
}

/// An offset within a page.
pub(super) fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(PAGE_BYTES)
}

/// Copies the first bytes of `bytes` to the parts.
pub(super) fn copy_to(
    ram: &dyn GuestData,
    parts: impl IntoIterator<Item = Segment>,
    bytes: &[u8],
) -> Result<(), OutsideRam> {
    let mut at = 0;
    for part in parts {
        let end = at + part.bytes as usize;
        ram.write(part.address, &bytes[at..end])?;
        at = end;
    }
    Ok(())
}

/// Copies the parts to the first bytes of `bytes`.
pub(super) fn copy_from(
    ram: &dyn GuestData,
    parts: impl IntoIterator<Item = Segment>,
    bytes: &mut [u8],
) -> Result<(), OutsideRam> {
    let mut at = 0;
    for part in parts {
        let end = at + part.bytes as usize;
        ram.read(part.address, &mut bytes[at..end])?;
        at = end;
    }
    Ok(())
}

/// The pieces, with those adjacent in guest memory merged.
pub(super) fn stretches(pieces: &[Piece]) -> impl Iterator<Item = Segment> {
    let mut pieces = pieces.iter().map(Piece::segment).peekable();
    std::iter::from_fn(move || {
        let mut stretch = pieces.next()?;
        while let Some(next) = pieces.next_if(|next| {
            stretch.address.checked_add(u64::from(stretch.bytes)) == Some(next.address)
        }) {
            stretch.bytes += next.bytes;
        }
        Some(stretch)
    })
}
