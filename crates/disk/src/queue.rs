//! A split virtqueue from the device's side, and the virtio-blk requests in it (virtio 1.2, sections 2.7 and 5.2).
//!
//! Everything in it was written by the guest. An invalid request is answered with an error or, if it has no
//! room for a status, with a used length of 0; an invalid ring is not served until it is set up again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    VRING_USED_F_NO_NOTIFY,
};
use vm_memory::{AtomicAccess, Bytes as _, GuestAddress};

use crate::inflight::{BadRegion, InflightQueue};
use crate::{ByteRange, GuestRam, Operation, Segment};

/// Most entries of a queue.
pub(crate) const ENTRIES_MAX: u16 = 1024;
/// Most segments of a request's data that drivers are told to use.
pub(crate) const SEGMENTS_MAX: u32 = 126;
/// Most bytes of a segment that drivers are told to use.
pub(crate) const SEGMENT_BYTES_MAX: u32 = 128 << 10;
/// Most ranges of a discard or a zeroing.
pub(crate) const RANGES_MAX: u32 = 32;
/// Most sectors of such a range.
pub(crate) const RANGE_SECTORS_MAX: u32 = 1 << 22;

/// Most descriptors of a request that are looked at.
const CHAIN_MAX: usize = ENTRIES_MAX as usize + 2;
/// Most bytes of a request's data.
const DATA_BYTES_MAX: u64 = SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX as u64;
#[expect(clippy::cast_possible_truncation, reason = "1")]
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
#[expect(clippy::cast_possible_truncation, reason = "2")]
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;
const SECTOR_BYTES: u64 = 512;
const HEADER_BYTES: u64 = 16;
const RANGE_BYTES: usize = 16;

/// Why a ring is served no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum QueueFault {
    #[error("a ring is not in RAM, or not aligned")]
    Ring,
    #[error("more requests are available than the ring has entries")]
    TooMany,
    #[error("a descriptor number beyond the table")]
    Head,
    #[error("requests in flight of the previous daemon: {0}")]
    Inflight(#[from] BadRegion),
}

/// Where the parts of a ring are, guest-physical.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RingPlaces {
    pub(crate) table: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// A virtqueue that runs.
#[derive(Debug)]
pub(crate) struct Queue {
    ram: Arc<GuestRam>,
    places: RingPlaces,
    size: u16,
    /// Whether indices say when to notify, rather than flags.
    event_index: bool,
    next_available: u16,
    /// The available ring's index when it was last read.
    available_seen: u16,
    next_used: u16,
    /// Taken and not yet published as used.
    in_flight: u16,
    inflight: Option<InflightQueue>,
    /// Requests of a former daemon still to be done.
    again: VecDeque<u16>,
    /// Used, not yet published.
    batch: Vec<(u16, u32)>,
    /// Whether the driver was told not to notify.
    quiet: bool,
}

/// A descriptor of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    address: u64,
    bytes: u32,
    writable: bool,
}

/// A chain of descriptors makes no sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadChain;

impl Queue {
    /// Takes over a ring. `base` is the next request to take, unless `inflight` knows better.
    pub(crate) fn start(
        ram: Arc<GuestRam>,
        places: RingPlaces,
        size: u16,
        event_index: bool,
        base: u16,
        mut inflight: Option<InflightQueue>,
    ) -> Result<Self, QueueFault> {
        let entries = u64::from(size);
        let fits = size.is_power_of_two()
            && size <= ENTRIES_MAX
            && places.table.is_multiple_of(16)
            && places.available.is_multiple_of(2)
            && places.used.is_multiple_of(4)
            && ram.contains(places.table, 16 * entries)
            && ram.contains(places.available, 6 + 2 * entries)
            && ram.contains(places.used, 6 + 8 * entries);
        if !fits {
            return Err(QueueFault::Ring);
        }
        let mut queue = Self {
            ram,
            places,
            size,
            event_index,
            next_available: base,
            available_seen: base,
            next_used: 0,
            in_flight: 0,
            inflight: None,
            again: VecDeque::new(),
            batch: Vec::new(),
            quiet: false,
        };
        queue.next_used = queue.load(places.used + 2)?;
        if let Some(part) = &mut inflight {
            queue.again = part.recover(queue.next_used)?.into();
            #[expect(clippy::cast_possible_truncation, reason = "at most the queue's size")]
            let again = queue.again.len() as u16;
            queue.next_available = queue.next_used.wrapping_add(again);
            queue.available_seen = queue.next_available;
        }
        queue.inflight = inflight;
        Ok(queue)
    }

    fn load<T: AtomicAccess>(&self, address: u64) -> Result<T, QueueFault> {
        let loaded = self
            .ram
            .mapped()
            .load(GuestAddress(address), Ordering::Acquire);
        loaded.map_err(|_| QueueFault::Ring)
    }

    fn store(&self, value: u16, address: u64) -> Result<(), QueueFault> {
        let stored =
            self.ram
                .mapped()
                .store(value.to_le(), GuestAddress(address), Ordering::Release);
        stored.map_err(|_| QueueFault::Ring)
    }

    fn slot(&self, index: u16) -> u64 {
        u64::from(index & (self.size - 1))
    }

    /// The next request to take after those taken: what a frontend resumes from.
    pub(crate) fn next_available(&self) -> u16 {
        self.next_available
    }

    /// The RAM it is in.
    pub(crate) fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Takes the next request: its head, and whether a former daemon had taken it.
    pub(crate) fn pop(&mut self) -> Result<Option<(u16, bool)>, QueueFault> {
        if let Some(head) = self.again.pop_front() {
            self.in_flight += 1;
            return Ok(Some((head, true)));
        }
        if self.next_available == self.available_seen {
            self.available_seen = u16::from_le(self.load(self.places.available + 2)?);
            let available = self.available_seen.wrapping_sub(self.next_available);
            if available > self.size {
                return Err(QueueFault::TooMany);
            }
            if available == 0 {
                return Ok(None);
            }
        }
        if self.in_flight == self.size {
            return Err(QueueFault::TooMany);
        }
        let entry = self.places.available + 4 + 2 * self.slot(self.next_available);
        let head = u16::from_le(self.load(entry)?);
        if head >= self.size {
            return Err(QueueFault::Head);
        }
        self.next_available = self.next_available.wrapping_add(1);
        self.in_flight += 1;
        if let Some(inflight) = &mut self.inflight {
            inflight.fetched(head);
        }
        Ok(Some((head, false)))
    }

    /// Collects the descriptors of a request.
    pub(crate) fn chain(&self, head: u16, pieces: &mut Vec<Piece>) -> Result<(), BadChain> {
        chain(&self.ram, self.places.table, self.size.into(), head, pieces)
    }

    /// Notes that a request is done, `written` bytes of its buffers having been written.
    pub(crate) fn done(&mut self, head: u16, written: u32) {
        self.batch.push((head, written));
    }

    /// Tells the guest what is done; whether it wants to be signalled.
    pub(crate) fn publish(&mut self) -> Result<bool, QueueFault> {
        let Ok(count) = u16::try_from(self.batch.len()) else {
            return Err(QueueFault::TooMany);
        };
        if count == 0 {
            return Ok(false);
        }
        let old = self.next_used;
        for &(head, written) in &self.batch {
            if let Some(inflight) = &self.inflight {
                inflight.completing(head);
            }
            let mut element = [0; 8];
            element[..4].copy_from_slice(&u32::from(head).to_le_bytes());
            element[4..].copy_from_slice(&written.to_le_bytes());
            let place = self.places.used + 4 + 8 * self.slot(self.next_used);
            let written = self.ram.mapped().write_obj(element, GuestAddress(place));
            written.map_err(|_| QueueFault::Ring)?;
            self.next_used = self.next_used.wrapping_add(1);
        }
        self.store(self.next_used, self.places.used + 2)?;
        if let Some(inflight) = &self.inflight {
            inflight.completed(self.batch.iter().map(|&(head, _)| head), self.next_used);
        }
        self.batch.clear();
        self.in_flight -= count;
        // The index must be visible before what the driver asks for is read.
        fence(Ordering::SeqCst);
        if self.event_index {
            let event =
                u16::from_le(self.load(self.places.available + 4 + 2 * u64::from(self.size))?);
            let since_event = self.next_used.wrapping_sub(event).wrapping_sub(1);
            Ok(since_event < self.next_used.wrapping_sub(old))
        } else {
            let flags = u16::from_le(self.load(self.places.available)?);
            Ok(u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0)
        }
    }

    /// Asks the driver not to notify while the ring is being looked at anyway.
    pub(crate) fn disable_notifications(&mut self) -> Result<(), QueueFault> {
        // By index it notifies once, and then not until it is asked to.
        if !self.event_index && !self.quiet {
            #[expect(clippy::cast_possible_truncation, reason = "1")]
            self.store(VRING_USED_F_NO_NOTIFY as u16, self.places.used)?;
            self.quiet = true;
        }
        Ok(())
    }

    /// Asks the driver to notify of the next request; whether there is one already.
    pub(crate) fn enable_notifications(&mut self) -> Result<bool, QueueFault> {
        if self.event_index {
            let event = self.places.used + 4 + 8 * u64::from(self.size);
            self.store(self.next_available, event)?;
        } else if self.quiet {
            self.store(0, self.places.used)?;
            self.quiet = false;
        }
        fence(Ordering::SeqCst);
        let available: u16 = self.load(self.places.available + 2)?;
        Ok(u16::from_le(available) != self.next_available)
    }
}

fn chain(
    ram: &GuestRam,
    table: u64,
    entries: u32,
    head: u16,
    pieces: &mut Vec<Piece>,
) -> Result<(), BadChain> {
    pieces.clear();
    let (mut table, mut entries) = (table, entries);
    let mut next = u32::from(head);
    let mut indirect = false;
    // As many steps as there can be pieces, and one into an indirect table.
    for _ in 0..=CHAIN_MAX {
        if next >= entries {
            return Err(BadChain);
        }
        let at = table.checked_add(16 * u64::from(next)).ok_or(BadChain)?;
        let descriptor: [u8; 16] = ram
            .mapped()
            .read_obj(GuestAddress(at))
            .map_err(|_| BadChain)?;
        let address = u64::from_le_bytes(descriptor[..8].try_into().expect("8 bytes"));
        let bytes = u32::from_le_bytes(descriptor[8..12].try_into().expect("4 bytes"));
        let flags = u32::from(u16::from_le_bytes([descriptor[12], descriptor[13]]));
        if flags & VRING_DESC_F_INDIRECT != 0 {
            let nested = indirect || flags & VRING_DESC_F_NEXT != 0;
            if nested || bytes == 0 || !bytes.is_multiple_of(16) {
                return Err(BadChain);
            }
            (table, entries, next, indirect) = (address, bytes / 16, 0, true);
            continue;
        }
        if bytes > 0 {
            let writable = flags & VRING_DESC_F_WRITE != 0;
            pieces.push(Piece {
                address,
                bytes,
                writable,
            });
        }
        if flags & VRING_DESC_F_NEXT == 0 {
            return Ok(());
        }
        next = u16::from_le_bytes([descriptor[14], descriptor[15]]).into();
    }
    Err(BadChain)
}

/// What a disk can be asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) size_bytes: u64,
    /// Unit of transfers, 512 or 4096.
    pub(crate) block_bytes: u32,
    pub(crate) read_only: bool,
    /// Whether it can be flushed only (the control disk): neither discarded nor zeroed.
    pub(crate) plain: bool,
    /// Whether writes must be stable when they complete.
    pub(crate) durable: bool,
}

/// What a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Asked {
    Disk(Operation),
    /// The serial number.
    Identity(Vec<Segment>),
    /// Nothing: ranges without length.
    Nothing,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) asked: Asked,
    /// Where its status byte goes.
    pub(crate) status: u64,
    /// Bytes of data it moves.
    pub(crate) data_bytes: u32,
    /// Bytes of its buffers that are written if it succeeds.
    pub(crate) written: u32,
}

/// A request that makes no sense, or asks for what this disk cannot do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refused {
    /// Where its status byte goes, if it has one.
    pub(crate) status: Option<u64>,
    /// The status.
    pub(crate) answer: u8,
}

impl Refused {
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
        let from = GuestAddress(segment.address);
        ram.mapped().read_slice(&mut bytes[at..end], from).ok()?;
        at = end;
    }
    (at == bytes.len()).then_some(())
}

/// Reads a request out of its descriptors, which may be cut anywhere.
pub(crate) fn parse_request(
    ram: &GuestRam,
    pieces: &[Piece],
    shape: &Shape,
) -> Result<Wanted, Refused> {
    let readable = pieces.iter().take_while(|piece| !piece.writable).count();
    let (out, input) = pieces.split_at(readable);
    let in_order = input.iter().all(|piece| piece.writable);
    let refused = |answer, status| Refused { status, answer };
    let status = input
        .last()
        .filter(|_| in_order)
        .and_then(|last| last.address.checked_add(u64::from(last.bytes) - 1))
        .filter(|status| ram.contains(*status, 1))
        .ok_or(refused(IOERR, None))?;
    let bad = refused(IOERR, Some(status));
    let unsupported = refused(UNSUPP, Some(status));
    let in_ram = |piece: &Piece| ram.contains(piece.address, piece.bytes.into());
    if !pieces.iter().all(in_ram) {
        return Err(bad);
    }

    let mut header = [0; 16];
    match out.first() {
        Some(first) if u64::from(first.bytes) >= HEADER_BYTES => {
            let from = GuestAddress(first.address);
            ram.mapped()
                .read_slice(&mut header, from)
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
    let wanted = |asked, data_bytes: u64, written: u64| {
        Ok(Wanted {
            asked,
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
                Asked::Disk(Operation::Read { offset, segments }),
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
            wanted(Asked::Disk(operation), out_bytes, 0)
        }
        VIRTIO_BLK_T_FLUSH => wanted(Asked::Disk(Operation::Flush), 0, 0),
        VIRTIO_BLK_T_GET_ID => wanted(Asked::Identity(segments(input, 0, 1)), 0, in_bytes),
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
                .and_then(|asked| {
                    let ranges = (bytes.len() / RANGE_BYTES) as u64;
                    wanted(asked, ranges * RANGE_CHARGE_BYTES, 0)
                })
        }
        _ => Err(unsupported),
    }
}

/// What a range counts as, of the bytes under way: its costs do not depend on its length.
const RANGE_CHARGE_BYTES: u64 = 1 << 20;

/// A discard or a zeroing; the error says whether flags are the reason.
fn ranges_request(bytes: &[u8], zeroes: bool, shape: &Shape) -> Result<Asked, bool> {
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
        Asked::Nothing
    } else if zeroes {
        Asked::Disk(Operation::WriteZeroes {
            ranges,
            unmap,
            durable: shape.durable,
        })
    } else {
        Asked::Disk(Operation::Discard(ranges))
    })
}

/// Reads a request out of arbitrary guest memory: `bytes` are its first 64 KiB, a table of 16 descriptors first. What is
/// read must be within the disk and within RAM.
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

impl Wanted {
    /// That a request is as whoever carries it out relies on.
    fn check(&self, ram: &GuestRam, shape: &Shape) {
        assert!(ram.contains(self.status, 1), "a status outside RAM");
        let (offset, segments) = match &self.asked {
            Asked::Disk(
                Operation::Read { offset, segments }
                | Operation::Write {
                    offset, segments, ..
                },
            ) => (*offset, segments),
            Asked::Disk(Operation::Discard(ranges) | Operation::WriteZeroes { ranges, .. }) => {
                assert!(!ranges.is_empty() && ranges.iter().all(|range| range.bytes > 0));
                assert!(
                    ranges
                        .iter()
                        .all(|range| range.offset + range.bytes <= shape.size_bytes)
                );
                return;
            }
            Asked::Identity(segments) => {
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

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::{GuestData as _, RamRegion};

    const TABLE: u64 = 0;
    const AVAILABLE: u64 = 0x1000;
    const USED: u64 = 0x2000;
    const INDIRECT: u64 = 0x3000;
    const HEADER: u64 = 0x4000;
    const STATUS: u64 = 0x5000;
    const DATA: u64 = 0x8000;
    const RAM_BYTES: u64 = 0x40000;
    const PLACES: RingPlaces = RingPlaces {
        table: TABLE,
        available: AVAILABLE,
        used: USED,
    };

    // The bits of a descriptor's flags, a field of 16.
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const NESTED: u16 = 4;

    fn ram() -> Arc<GuestRam> {
        let file =
            rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let file = File::from(file);
        file.set_len(RAM_BYTES).expect("its length");
        let file = Arc::new(file);
        let region = RamRegion {
            address: 0,
            bytes: RAM_BYTES,
            file,
            offset: 0,
        };
        Arc::new(GuestRam::new(vec![region]).expect("RAM"))
    }

    fn describe(
        ram: &GuestRam,
        table: u64,
        index: u64,
        address: u64,
        bytes: u32,
        flags: u16,
        next: u16,
    ) {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..12].copy_from_slice(&bytes.to_le_bytes());
        descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
        descriptor[14..].copy_from_slice(&next.to_le_bytes());
        ram.write(table + 16 * index, &descriptor).expect("in RAM");
    }

    fn header(ram: &GuestRam, kind: u32, sector: u64) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        ram.write(HEADER, &header).expect("in RAM");
    }

    fn shape() -> Shape {
        Shape {
            size_bytes: 1 << 20,
            block_bytes: 512,
            read_only: false,
            plain: false,
            durable: true,
        }
    }

    fn piece(address: u64, bytes: u32, writable: bool) -> Piece {
        Piece {
            address,
            bytes,
            writable,
        }
    }

    fn parse(ram: &GuestRam, pieces: &[Piece], shape: &Shape) -> Result<Wanted, Refused> {
        let parsed = parse_request(ram, pieces, shape);
        if let Ok(wanted) = &parsed {
            wanted.check(ram, shape);
        }
        parsed
    }

    const BAD: Refused = Refused {
        status: Some(STATUS),
        answer: IOERR,
    };
    const UNSUPPORTED: Refused = Refused {
        status: Some(STATUS),
        answer: UNSUPP,
    };

    #[test]
    fn a_request_may_be_cut_anywhere() {
        let ram = ram();
        header(&ram, VIRTIO_BLK_T_IN, 8);
        let segment = |address, bytes| Segment { address, bytes };
        let read = |segments, data_bytes| {
            let asked = Asked::Disk(Operation::Read {
                offset: 4096,
                segments,
            });
            Ok(Wanted {
                asked,
                status: STATUS,
                data_bytes,
                written: data_bytes + 1,
            })
        };
        let plain = [
            piece(HEADER, 16, false),
            piece(DATA, 1024, true),
            piece(STATUS, 1, true),
        ];
        assert_eq!(
            parse(&ram, &plain, &shape()),
            read(vec![segment(DATA, 1024)], 1024)
        );
        let cut = [
            piece(HEADER, 3, false),
            piece(HEADER + 3, 13, false),
            piece(DATA, 1, true),
            piece(DATA + 0x1000, 510, true),
            piece(STATUS - 1, 2, true),
        ];
        let segments = vec![
            segment(DATA, 1),
            segment(DATA + 0x1000, 510),
            segment(STATUS - 1, 1),
        ];
        assert_eq!(parse(&ram, &cut, &shape()), read(segments, 512));

        header(&ram, VIRTIO_BLK_T_OUT, 8);
        ram.write(DATA, &ram_bytes(&ram, HEADER, 16))
            .expect("in RAM");
        let joined = [piece(DATA, 16 + 512, false), piece(STATUS, 1, true)];
        let operation = Operation::Write {
            offset: 4096,
            segments: vec![segment(DATA + 16, 512)],
            durable: true,
        };
        let wanted = Wanted {
            asked: Asked::Disk(operation),
            status: STATUS,
            data_bytes: 512,
            written: 1,
        };
        assert_eq!(parse(&ram, &joined, &shape()), Ok(wanted));
    }

    fn ram_bytes(ram: &GuestRam, address: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        ram.read(address, &mut read).expect("in RAM");
        read
    }

    #[test]
    fn requests_that_make_no_sense_are_refused() {
        let ram = ram();
        let (head, status) = (piece(HEADER, 16, false), piece(STATUS, 1, true));
        let transfer = |kind, sector, bytes, shape: &Shape| {
            header(&ram, kind, sector);
            let data = piece(DATA, bytes, kind == VIRTIO_BLK_T_IN);
            parse(&ram, &[head, data, status], shape)
        };
        // Beyond the end, across it, where sectors overflow, of no whole sector, of none.
        for (sector, bytes) in [
            (2048, 512),
            (2047, 1024),
            (1 << 55, 512),
            (u64::MAX, 512),
            (0, 511),
        ] {
            assert_eq!(
                transfer(VIRTIO_BLK_T_IN, sector, bytes, &shape()),
                Err(BAD),
                "{sector} {bytes}"
            );
            assert_eq!(
                transfer(VIRTIO_BLK_T_OUT, sector, bytes, &shape()),
                Err(BAD),
                "{sector} {bytes}"
            );
        }
        header(&ram, VIRTIO_BLK_T_IN, 0);
        assert_eq!(parse(&ram, &[head, status], &shape()), Err(BAD));
        // Data of the other direction.
        assert_eq!(
            parse(&ram, &[head, piece(DATA, 512, false), status], &shape()),
            Err(BAD)
        );
        header(&ram, VIRTIO_BLK_T_OUT, 0);
        assert_eq!(
            parse(&ram, &[head, piece(DATA, 512, true), status], &shape()),
            Err(BAD)
        );
        // Smaller than a block; a write to what cannot be written.
        let large = Shape {
            block_bytes: 4096,
            ..shape()
        };
        assert_eq!(transfer(VIRTIO_BLK_T_IN, 1, 4096, &large), Err(BAD));
        assert_eq!(transfer(VIRTIO_BLK_T_IN, 8, 512, &large), Err(BAD));
        assert!(transfer(VIRTIO_BLK_T_IN, 8, 4096, &large).is_ok());
        let read_only = Shape {
            read_only: true,
            ..shape()
        };
        assert_eq!(transfer(VIRTIO_BLK_T_OUT, 0, 512, &read_only), Err(BAD));
        // A short header; no status; data before the header's direction ends.
        assert_eq!(
            parse(&ram, &[piece(HEADER, 15, false), status], &shape()),
            Err(BAD)
        );
        assert_eq!(
            parse(&ram, &[head, piece(DATA, 512, false)], &shape()),
            Err(Refused::UNANSWERABLE)
        );
        assert_eq!(
            parse(&ram, &[status, head], &shape()),
            Err(Refused::UNANSWERABLE)
        );
        assert_eq!(parse(&ram, &[], &shape()), Err(Refused::UNANSWERABLE));
        // Pieces outside RAM: a status, or anything else.
        for (address, bytes) in [
            (RAM_BYTES - 1, 2),
            (RAM_BYTES, 1),
            (u64::MAX, 2),
            (0, u32::MAX),
        ] {
            header(&ram, VIRTIO_BLK_T_IN, 0);
            let (nowhere, data) = (piece(address, bytes, true), piece(DATA, 512, true));
            let refused = parse(&ram, &[head, data, nowhere], &shape());
            assert_eq!(refused, Err(Refused::UNANSWERABLE), "{address:#x}");
            assert_eq!(parse(&ram, &[head, nowhere, status], &shape()), Err(BAD));
            let nowhere = piece(address, bytes, false);
            assert_eq!(parse(&ram, &[nowhere, data, status], &shape()), Err(BAD));
        }
        // What is unknown, and what a control disk does not do.
        header(&ram, 99, 0);
        assert_eq!(parse(&ram, &[head, status], &shape()), Err(UNSUPPORTED));
        header(&ram, VIRTIO_BLK_T_DISCARD, 0);
        let plain = Shape {
            plain: true,
            ..shape()
        };
        assert_eq!(
            parse(&ram, &[head, piece(DATA, 16, false), status], &plain),
            Err(UNSUPPORTED)
        );
    }

    #[test]
    fn ranges_are_held_against_the_disk_and_the_flags() {
        let ram = ram();
        let ranges = |kind, entries: &[(u64, u32, u32)]| {
            header(&ram, kind, 0);
            let mut bytes = Vec::new();
            for (sector, sectors, flags) in entries {
                bytes.extend(sector.to_le_bytes());
                bytes.extend(sectors.to_le_bytes());
                bytes.extend(flags.to_le_bytes());
            }
            ram.write(DATA, &bytes).expect("in RAM");
            let data = piece(DATA, u32::try_from(bytes.len()).expect("short"), false);
            let pieces = [piece(HEADER, 16, false), data, piece(STATUS, 1, true)];
            parse(&ram, &pieces, &shape()).map(|wanted| wanted.asked)
        };
        let range = |offset, bytes| ByteRange { offset, bytes };
        let (discard, zeroes) = (VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES);
        let wanted = Asked::Disk(Operation::Discard(vec![range(512, 1024), range(0, 512)]));
        assert_eq!(
            ranges(discard, &[(1, 2, 0), (7, 0, 0), (0, 1, 0)]),
            Ok(wanted)
        );
        let zeroed = |unmap| {
            Asked::Disk(Operation::WriteZeroes {
                ranges: vec![range(0, 512)],
                unmap,
                durable: shape().durable,
            })
        };
        assert_eq!(ranges(zeroes, &[(0, 1, 1)]), Ok(zeroed(true)));
        assert_eq!(ranges(zeroes, &[(0, 1, 0)]), Ok(zeroed(false)));
        assert_eq!(ranges(zeroes, &[(0, 0, 1)]), Ok(Asked::Nothing));
        assert_eq!(ranges(discard, &[(0, 1, 1)]), Err(UNSUPPORTED));
        assert_eq!(ranges(zeroes, &[(0, 1, 2)]), Err(UNSUPPORTED));
        assert_eq!(ranges(discard, &[(2047, 2, 0)]), Err(BAD));
        assert_eq!(ranges(discard, &[(1 << 55, 1, 0)]), Err(BAD));
        assert_eq!(ranges(discard, &[(u64::MAX, u32::MAX, 0)]), Err(BAD));
        assert_eq!(ranges(discard, &[]), Err(BAD));
        assert_eq!(
            ranges(discard, &[(0, 1, 0); RANGES_MAX as usize + 1]),
            Err(BAD)
        );
        assert!(ranges(discard, &[(0, 1, 0); RANGES_MAX as usize]).is_ok());
    }

    #[test]
    fn chains_that_make_no_sense_are_refused() {
        let ram = ram();
        let mut pieces = Vec::new();
        let mut walk = |head| chain(&ram, TABLE, 8, head, &mut pieces).map(|()| pieces.len());
        describe(&ram, TABLE, 0, DATA, 16, NEXT, 1);
        describe(&ram, TABLE, 1, DATA, 0, NEXT, 2);
        describe(&ram, TABLE, 2, DATA, 16, WRITE, 0);
        assert_eq!(walk(0), Ok(2));
        // Cycles, numbers beyond the table.
        describe(&ram, TABLE, 2, DATA, 16, NEXT, 0);
        assert_eq!(walk(0), Err(BadChain));
        describe(&ram, TABLE, 2, DATA, 16, NEXT, 8);
        assert_eq!(walk(0), Err(BadChain));
        assert_eq!(walk(8), Err(BadChain));
        // Indirect tables: a good one, one in another, one with a successor, of odd size, empty, outside RAM.
        describe(&ram, TABLE, 2, INDIRECT, 32, NESTED, 0);
        describe(&ram, INDIRECT, 0, DATA, 16, NEXT, 1);
        describe(&ram, INDIRECT, 1, DATA, 16, WRITE, 0);
        assert_eq!(walk(0), Ok(3));
        describe(&ram, INDIRECT, 1, DATA, 16, NEXT, 2);
        assert_eq!(walk(0), Err(BadChain));
        describe(&ram, INDIRECT, 1, INDIRECT, 16, NESTED, 0);
        assert_eq!(walk(0), Err(BadChain));
        for (address, bytes, flags) in [
            (INDIRECT, 32, NESTED | NEXT),
            (INDIRECT, 31, NESTED),
            (INDIRECT, 0, NESTED),
            (RAM_BYTES - 8, 16, NESTED),
            (u64::MAX - 8, 16, NESTED),
        ] {
            describe(&ram, TABLE, 2, address, bytes, flags, 0);
            assert_eq!(walk(0), Err(BadChain));
        }
    }

    fn offer(ram: &GuestRam, index: u16, heads: &[u16], size: u16) {
        for (at, head) in (index..).zip(heads) {
            let place = AVAILABLE + 4 + 2 * u64::from(at % size);
            ram.write(place, &head.to_le_bytes()).expect("in RAM");
        }
        let count = u16::try_from(heads.len()).expect("few");
        ram.write(AVAILABLE + 2, &index.wrapping_add(count).to_le_bytes())
            .expect("in RAM");
    }

    fn used(ram: &GuestRam) -> u16 {
        u16::from_le_bytes(ram_bytes(ram, USED + 2, 2).try_into().expect("2 bytes"))
    }

    #[test]
    fn requests_are_taken_once_and_told_in_batches() {
        let ram = ram();
        let mut queue = Queue::start(Arc::clone(&ram), PLACES, 4, true, 0, None).expect("a queue");
        assert_eq!(queue.pop(), Ok(None));
        assert_eq!(queue.enable_notifications(), Ok(false));
        offer(&ram, 0, &[3, 1, 2], 4);
        assert_eq!(queue.enable_notifications(), Ok(true));
        for head in [3, 1, 2] {
            assert_eq!(queue.pop(), Ok(Some((head, false))));
        }
        assert_eq!(queue.pop(), Ok(None));
        queue.done(1, 7);
        queue.done(3, 1);
        // The driver wants to hear of the first one.
        assert_eq!(queue.publish(), Ok(true));
        assert_eq!(used(&ram), 2);
        let element: Vec<u8> = [1u32, 7]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        assert_eq!(ram_bytes(&ram, USED + 4, 8), element);
        // And not again before it asks.
        queue.done(2, 1);
        assert_eq!(queue.publish(), Ok(false));
        ram.write(AVAILABLE + 4 + 2 * 4, &3u16.to_le_bytes())
            .expect("in RAM");
        offer(&ram, 3, &[0], 4);
        assert_eq!(queue.pop(), Ok(Some((0, false))));
        queue.done(0, 1);
        assert_eq!(queue.publish(), Ok(true));
        assert_eq!((used(&ram), queue.next_available()), (4, 4));
    }

    #[test]
    fn without_indices_flags_say_when_to_notify() {
        let ram = ram();
        let mut queue = Queue::start(Arc::clone(&ram), PLACES, 4, false, 0, None).expect("a queue");
        queue.disable_notifications().expect("in RAM");
        assert_eq!(ram_bytes(&ram, USED, 2), [1, 0]);
        offer(&ram, 0, &[0, 1], 4);
        queue.pop().expect("a request");
        queue.done(0, 1);
        assert_eq!(queue.publish(), Ok(true));
        ram.write(AVAILABLE, &[1, 0]).expect("in RAM");
        queue.pop().expect("a request");
        queue.done(1, 1);
        assert_eq!(queue.publish(), Ok(false));
        assert_eq!(queue.enable_notifications(), Ok(false));
        assert_eq!(ram_bytes(&ram, USED, 2), [0, 0]);
    }

    #[test]
    fn a_ring_that_makes_no_sense_is_a_fault() {
        let ram = ram();
        let start =
            |places, size| Queue::start(Arc::clone(&ram), places, size, true, 0, None).map(drop);
        let odd = |table, available, used| RingPlaces {
            table,
            available,
            used,
        };
        assert_eq!(start(PLACES, 3), Err(QueueFault::Ring));
        assert_eq!(start(PLACES, 2048), Err(QueueFault::Ring));
        assert_eq!(start(odd(8, AVAILABLE, USED), 4), Err(QueueFault::Ring));
        assert_eq!(
            start(odd(TABLE, AVAILABLE + 1, USED), 4),
            Err(QueueFault::Ring)
        );
        assert_eq!(
            start(odd(TABLE, AVAILABLE, USED + 2), 4),
            Err(QueueFault::Ring)
        );
        assert_eq!(
            start(odd(TABLE, AVAILABLE, RAM_BYTES - 8), 4),
            Err(QueueFault::Ring)
        );
        assert_eq!(
            start(odd(u64::MAX - 15, AVAILABLE, USED), 4),
            Err(QueueFault::Ring)
        );

        let queue = || Queue::start(Arc::clone(&ram), PLACES, 4, true, 0, None).expect("a queue");
        offer(&ram, 5, &[], 4);
        assert_eq!(queue().pop(), Err(QueueFault::TooMany));
        offer(&ram, 0, &[4], 4);
        assert_eq!(queue().pop(), Err(QueueFault::Head));
        // More requests than descriptors, without waiting for any.
        let mut queue = queue();
        offer(&ram, 0, &[0, 1, 2, 3], 4);
        while queue.pop().expect("requests").is_some() {}
        offer(&ram, 4, &[0], 4);
        assert_eq!(queue.pop(), Err(QueueFault::TooMany));
    }

    #[test]
    fn a_queue_takes_up_where_a_former_daemon_was_killed() {
        use crate::inflight::Inflight;
        let ram = ram();
        let file = Inflight::make(1, 4).expect("a memfd");
        let region = Inflight::map(file, 0, Inflight::bytes(1, 4), 1, 4).expect("a region");
        let part = || region.queue(0, 4);
        let start =
            |base| Queue::start(Arc::clone(&ram), PLACES, 4, true, base, part()).expect("a queue");
        let mut first = start(0);
        offer(&ram, 0, &[2, 0, 3], 4);
        for _ in 0..3 {
            first.pop().expect("a request");
        }
        first.done(0, 1);
        first.publish().expect("told");
        drop(first);
        // Heads 2 and 3 again, oldest first, then what comes after all three; the base told is of no use.
        let mut second = start(1);
        offer(&ram, 3, &[0], 4);
        assert_eq!(second.pop(), Ok(Some((2, true))));
        assert_eq!(second.pop(), Ok(Some((3, true))));
        assert_eq!(second.pop(), Ok(Some((0, false))));
        assert_eq!((second.pop(), used(&ram)), (Ok(None), 1));
    }

    proptest::proptest! {
        #[test]
        fn any_memory_gives_a_request_within_bounds_or_none(bytes in proptest::collection::vec(0u8.., 0..512)) {
            fuzz_request(&bytes);
        }
    }
}
