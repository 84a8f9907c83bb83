//! Requests of virtio-blk, parsed from a chain of descriptors (virtio 1.2, section 5.2).
//!
//! All of it is written by the guest and untrusted. An invalid request is refused with a status, if it has room for
//! one.

use std::sync::Arc;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};

use super::{Piece, chain};

use crate::{ByteRange, GuestRam, Operation, Segment};

/// Maximum number of data segments of a request announced to drivers.
pub(crate) const SEGMENTS_MAX: u32 = 126;

/// Maximum bytes of a segment announced to drivers.
pub(crate) const SEGMENT_BYTES_MAX: u32 = 128 << 10;

/// Maximum number of ranges of a discard or a zeroing.
pub(crate) const RANGES_MAX: u32 = 32;

/// Maximum number of sectors of such a range.
pub(crate) const RANGE_SECTORS_MAX: u32 = 1 << 22;

/// Maximum number of bytes of a request's data.
const DATA_BYTES_MAX: u64 = SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX as u64;

#[expect(clippy::cast_possible_truncation, reason = "1")]
pub(super) const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;

#[expect(clippy::cast_possible_truncation, reason = "2")]
pub(super) const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;

const SECTOR_BYTES: u64 = 512;

const HEADER_BYTES: u64 = 16;

const RANGE_BYTES: usize = 16;

/// The requests that a disk accepts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) size_bytes: u64,
    /// Unit of transfers, 512 or 4096.
    pub(crate) block_bytes: u32,
    pub(crate) read_only: bool,
    /// Whether it supports only flushes, no discards or zeroing (the control disk).
    pub(crate) plain: bool,
    /// Whether writes must be stable when they complete.
    pub(crate) durable: bool,
}

/// The operation of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Disk(Operation),
    /// The serial number.
    Identity(Vec<Segment>),
    /// Nothing: ranges without length.
    Nothing,
}

/// A valid request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ParsedRequest {
    pub(crate) kind: RequestKind,
    /// Address of its status byte.
    pub(crate) status: u64,
    /// Bytes of data it moves.
    pub(crate) data_bytes: u32,
    /// Bytes of its buffers that are written if it succeeds.
    pub(crate) written: u32,
}

/// A request that is invalid, or that this disk does not support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// Address of its status byte, if it has one.
    pub(crate) status: Option<u64>,
    /// The status.
    pub(crate) answer: u8,
}

impl Refusal {
    /// A request without a place for a status.
    pub(crate) const UNANSWERABLE: Self = Self {
        status: None,
        answer: IOERR,
    };
}

/// The pieces from byte `skip` on, without the last `drop` bytes.
fn segments(pieces: &[Piece], skip: u64, drop: u64) -> Vec<Segment> {
    let total: u64 = pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
    let mut left = total.saturating_sub(skip + drop);
    let mut skip = skip;
    let mut segments = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let skipped = skip.min(piece.bytes.into());
        skip -= skipped;
        let bytes = (u64::from(piece.bytes) - skipped).min(left);
        left -= bytes;
        if bytes > 0 {
            #[expect(clippy::cast_possible_truncation, reason = "at most the piece's")]
            segments.push(Segment {
                address: piece.address + skipped,
                bytes: bytes as u32,
            });
        }
    }
    segments
}

fn read_segments(ram: &GuestRam, segments: &[Segment], bytes: &mut [u8]) -> Option<()> {
    let mut at = 0;
    for segment in segments {
        let end = bytes.len().min(at + segment.bytes as usize);
        let part = &mut bytes[at..end];
        ram.mapped().read(segment.address, part).ok()?;
        at = end;
    }
    (at == bytes.len()).then_some(())
}

/// Parses a request from its descriptors, which may be split anywhere.
pub(crate) fn parse_request(
    ram: &GuestRam,
    pieces: &[Piece],
    shape: &Shape,
) -> Result<ParsedRequest, Refusal> {
    let readable = pieces.iter().take_while(|piece| !piece.writable).count();
    let (out, input) = pieces.split_at(readable);
    let in_order = input.iter().all(|piece| piece.writable);
    let refused = |answer, status| Refusal { status, answer };
    let status = input
        .last()
        .filter(|_| in_order)
        .and_then(|last| last.address.checked_add(u64::from(last.bytes) - 1))
        .filter(|status| ram.contains(*status, 1))
        .ok_or(refused(IOERR, None))?;
    let bad = refused(IOERR, Some(status));
    let unsupported = refused(UNSUPP, Some(status));
    if !pieces.iter().all(|piece| piece.is_in(ram)) {
        return Err(bad);
    }

    let mut header = [0; 16];
    match out.first() {
        Some(first) if u64::from(first.bytes) >= HEADER_BYTES => {
            ram.mapped()
                .read(first.address, &mut header)
                .map_err(|_| bad)?;
        }
        _ => read_segments(ram, &segments(out, 0, 0), &mut header).ok_or(bad)?,
    }
    let kind = u32::from_le_bytes(header[..4].try_into().expect("4 bytes"));
    let sector = u64::from_le_bytes(header[8..].try_into().expect("8 bytes"));
    let total =
        |pieces: &[Piece]| -> u64 { pieces.iter().map(|piece| u64::from(piece.bytes)).sum() };
    let out_bytes = total(out) - HEADER_BYTES;
    let in_bytes = total(input) - 1;
    if out_bytes > DATA_BYTES_MAX || in_bytes > DATA_BYTES_MAX {
        return Err(bad);
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "both below 2^32: see above"
    )]
    let wanted = |kind, data_bytes: u64, written: u64| {
        Ok(ParsedRequest {
            kind,
            status,
            data_bytes: data_bytes as u32,
            written: written as u32 + 1,
        })
    };
    let range = |bytes: u64| {
        let offset = sector.checked_mul(SECTOR_BYTES)?;
        let end = offset.checked_add(bytes)?;
        let unit = u64::from(shape.block_bytes);
        let fits = bytes > 0
            && end <= shape.size_bytes
            && offset.is_multiple_of(unit)
            && bytes.is_multiple_of(unit);
        fits.then_some(offset)
    };
    match kind {
        VIRTIO_BLK_T_IN => {
            let offset = range(in_bytes).filter(|_| out_bytes == 0).ok_or(bad)?;
            let segments = segments(input, 0, 1);
            wanted(
                RequestKind::Disk(Operation::Read { offset, segments }),
                in_bytes,
                in_bytes,
            )
        }
        VIRTIO_BLK_T_OUT => {
            let offset = range(out_bytes)
                .filter(|_| in_bytes == 0 && !shape.read_only)
                .ok_or(bad)?;
            let operation = Operation::Write {
                offset,
                segments: segments(out, HEADER_BYTES, 0),
                durable: shape.durable,
            };
            wanted(RequestKind::Disk(operation), out_bytes, 0)
        }
        VIRTIO_BLK_T_FLUSH => wanted(RequestKind::Disk(Operation::Flush), 0, 0),
        VIRTIO_BLK_T_GET_ID => wanted(RequestKind::Identity(segments(input, 0, 1)), 0, in_bytes),
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES if !shape.plain => {
            let mut bytes = [0; RANGE_BYTES * RANGES_MAX as usize];
            let bytes = usize::try_from(out_bytes)
                .ok()
                .filter(|bytes| *bytes > 0 && bytes.is_multiple_of(RANGE_BYTES) && !shape.read_only)
                .and_then(|length| bytes.get_mut(..length))
                .ok_or(bad)?;
            read_segments(ram, &segments(out, HEADER_BYTES, 0), bytes).ok_or(bad)?;
            ranges_request(bytes, kind == VIRTIO_BLK_T_WRITE_ZEROES, shape)
                .map_err(|unknown_flags| if unknown_flags { unsupported } else { bad })
                .and_then(|kind| {
                    let ranges = (bytes.len() / RANGE_BYTES) as u64;
                    wanted(kind, ranges * RANGE_CHARGE_BYTES, 0)
                })
        }
        _ => Err(unsupported),
    }
}

/// Bytes in flight charged for a range: its cost does not depend on its length.
const RANGE_CHARGE_BYTES: u64 = 1 << 20;

/// Parses a discard or a zeroing; the error shows whether flags are the reason.
fn ranges_request(bytes: &[u8], zeroes: bool, shape: &Shape) -> Result<RequestKind, bool> {
    const UNMAP: u32 = 1;
    let mut ranges = Vec::new();
    let mut unmap = zeroes;
    for entry in bytes.chunks_exact(RANGE_BYTES) {
        let sector = u64::from_le_bytes(entry[..8].try_into().expect("8 bytes"));
        let sectors = u32::from_le_bytes(entry[8..12].try_into().expect("4 bytes"));
        let flags = u32::from_le_bytes(entry[12..].try_into().expect("4 bytes"));
        if flags & !(if zeroes { UNMAP } else { 0 }) != 0 {
            return Err(true);
        }
        // Freed only if all of them may be.
        unmap &= flags & UNMAP != 0;
        let bytes = u64::from(sectors) * SECTOR_BYTES;
        let offset = sector.checked_mul(SECTOR_BYTES).ok_or(false)?;
        let end = offset.checked_add(bytes).ok_or(false)?;
        let unit = u64::from(shape.block_bytes);
        let aligned = offset.is_multiple_of(unit) && bytes.is_multiple_of(unit);
        if end > shape.size_bytes || sectors > RANGE_SECTORS_MAX || !aligned {
            return Err(false);
        }
        if bytes > 0 {
            ranges.push(ByteRange { offset, bytes });
        }
    }
    Ok(if ranges.is_empty() {
        RequestKind::Nothing
    } else if zeroes {
        RequestKind::Disk(Operation::WriteZeroes {
            ranges,
            unmap,
            durable: shape.durable,
        })
    } else {
        RequestKind::Disk(Operation::Discard(ranges))
    })
}

/// Parses a request from arbitrary guest memory: `bytes` are its first 64 KiB, beginning with a table of 16
/// descriptors. The request must be within the disk and within RAM.
///
/// # Panics
/// If it is not.
#[doc(hidden)]
pub fn fuzz_request(bytes: &[u8]) {
    use crate::{GuestData as _, RamRegion};
    const RAM_BYTES: u64 = 64 << 10;
    thread_local! {
        static RAM: GuestRam = {
            let file = rustix::fs::memfd_create("fuzz", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
            let file = std::fs::File::from(file);
            file.set_len(RAM_BYTES).expect("its length");
            let file = Arc::new(file);
            let region = RamRegion { address: 0, bytes: RAM_BYTES, file, offset: 0 };
            GuestRam::new(vec![region]).expect("RAM")
        };
    }
    RAM.with(|ram| {
        let used = usize::try_from(RAM_BYTES).map_or(bytes.len(), |most| bytes.len().min(most));
        ram.write(0, &bytes[..used]).expect("in RAM");
        for plain in [false, true] {
            let shape = Shape {
                size_bytes: 1 << 30,
                block_bytes: if plain { 512 } else { 4096 },
                read_only: false,
                plain,
                durable: false,
            };
            let mut pieces = Vec::new();
            if chain(ram, 0, 16, 0, &mut pieces).is_ok()
                && let Ok(wanted) = parse_request(ram, &pieces, &shape)
            {
                wanted.check(ram, &shape);
            }
        }
    });
}

impl ParsedRequest {
    /// Asserts the properties on which the code that carries a request out relies.
    pub(crate) fn check(&self, ram: &GuestRam, shape: &Shape) {
        assert!(ram.contains(self.status, 1), "a status outside RAM");
        let (offset, segments) = match &self.kind {
            RequestKind::Disk(
                Operation::Read { offset, segments }
                | Operation::Write {
                    offset, segments, ..
                },
            ) => (*offset, segments),
            RequestKind::Disk(
                Operation::Discard(ranges) | Operation::WriteZeroes { ranges, .. },
            ) => {
                assert!(!ranges.is_empty() && ranges.iter().all(|range| range.bytes > 0));
                assert!(
                    ranges
                        .iter()
                        .all(|range| range.offset + range.bytes <= shape.size_bytes)
                );
                return;
            }
            RequestKind::Identity(segments) => {
                assert!(
                    segments
                        .iter()
                        .all(|s| ram.contains(s.address, s.bytes.into()))
                );
                return;
            }
            _ => return,
        };
        let bytes: u64 = segments
            .iter()
            .map(|segment| u64::from(segment.bytes))
            .sum();
        assert!(
            segments
                .iter()
                .all(|s| ram.contains(s.address, s.bytes.into()))
        );
        assert!(
            bytes == u64::from(self.data_bytes)
                && bytes.is_multiple_of(u64::from(shape.block_bytes))
        );
        assert!(
            bytes > 0 && offset + bytes <= shape.size_bytes,
            "outside the disk"
        );
    }
}
