//! A split virtqueue from the device's side, and the virtio-blk requests in it (virtio 1.2, sections 2.7 and 5.2).
//!
//! All of it is written by the guest and untrusted. An invalid request is answered with an error or, if it has no room
//! for a status, with a used length of 0; an invalid ring is not served until it is set up again.

mod request;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    VRING_USED_F_NO_NOTIFY,
};
use vm_memory::AtomicAccess;

use crate::OutsideRam;
use crate::inflight::{BadRegion, InflightQueue};
use crate::memory::GuestRam;

pub(crate) use self::request::RANGE_SECTORS_MAX;
pub(crate) use self::request::RANGES_MAX;
pub(crate) use self::request::Refusal;
pub(crate) use self::request::RequestKind;
pub(crate) use self::request::SEGMENT_BYTES_MAX;
pub(crate) use self::request::SEGMENTS_MAX;
pub(crate) use self::request::Shape;
pub use self::request::fuzz_request;
pub(crate) use self::request::parse_request;

/// Maximum number of entries of a queue.
pub(crate) const ENTRIES_MAX: u16 = 1024;

/// Maximum number of descriptors of a request that are read.
const CHAIN_MAX: usize = ENTRIES_MAX as usize + 2;

/// Why a ring is no longer served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum QueueFault {
    #[error("a ring is not in RAM, or not aligned")]
    Ring,
    #[error("RAM of a ring, of an indirect table or of a status cannot be accessed")]
    Ram(#[from] OutsideRam),
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

/// A running virtqueue.
#[derive(Debug)]
pub(crate) struct Queue {
    ram: Arc<GuestRam>,
    places: RingPlaces,
    size: u16,
    /// Whether indices determine when to notify, rather than flags.
    event_index: bool,
    next_available: u16,
    /// The available ring's index when it was last read.
    available_seen: u16,
    next_used: u16,
    /// Taken and not yet published as used.
    in_flight: u16,
    inflight: Option<InflightQueue>,
    /// Requests of an earlier daemon that are to be repeated.
    again: VecDeque<u16>,
    /// Completed, but not yet published in the used ring.
    batch: Vec<(u16, u32)>,
    /// Whether the driver's notifications are suppressed.
    quiet: bool,
}

/// A descriptor of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    address: u64,
    bytes: u32,
    writable: bool,
}

impl Piece {
    /// Whether all of it is RAM.
    pub(crate) fn is_in(&self, ram: &GuestRam) -> bool {
        ram.contains(self.address, self.bytes.into())
    }
}

/// Why a request has no chain of descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadChain {
    /// The guest's is invalid.
    Invalid,
    /// It is in RAM that cannot be accessed.
    Ram(OutsideRam),
}

impl Queue {
    /// Takes over a ring. `base` is the next request to take, unless `inflight` has requests.
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
        Ok(self.ram.mapped().load(address, Ordering::Acquire)?)
    }

    fn store(&self, value: u16, address: u64) -> Result<(), QueueFault> {
        let ram = self.ram.mapped();
        Ok(ram.store(value.to_le(), address, Ordering::Release)?)
    }

    fn slot(&self, index: u16) -> u64 {
        u64::from(index & (self.size - 1))
    }

    /// Index of the next request to take, from which a frontend resumes.
    pub(crate) fn next_available(&self) -> u16 {
        self.next_available
    }

    /// The RAM that holds it.
    pub(crate) fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Takes the next request: its head, and whether an earlier daemon had taken it.
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

    /// Records that a request completed, with `written` bytes of its buffers written.
    pub(crate) fn done(&mut self, head: u16, written: u32) {
        self.batch.push((head, written));
    }

    /// Publishes the completed requests to the guest; returns whether the guest is to be signalled.
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
            self.ram.mapped().write(place, &element)?;
            self.next_used = self.next_used.wrapping_add(1);
        }
        self.store(self.next_used, self.places.used + 2)?;
        if let Some(inflight) = &self.inflight {
            inflight.completed(self.batch.iter().map(|&(head, _)| head), self.next_used);
        }
        self.batch.clear();
        self.in_flight -= count;
        // The index must be visible before the driver's notification setting is read.
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

    /// Suppresses the driver's notifications while the ring is being polled anyway.
    pub(crate) fn disable_notifications(&mut self) -> Result<(), QueueFault> {
        // With an event index, the driver notifies once, and then not until the index is changed.
        if !self.event_index && !self.quiet {
            #[expect(clippy::cast_possible_truncation, reason = "1")]
            self.store(VRING_USED_F_NO_NOTIFY as u16, self.places.used)?;
            self.quiet = true;
        }
        Ok(())
    }

    /// Enables the driver's notification of the next request; returns whether there is one already.
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
            return Err(BadChain::Invalid);
        }
        let at = table
            .checked_add(16 * u64::from(next))
            .ok_or(BadChain::Invalid)?;
        if !ram.contains(at, 16) {
            return Err(BadChain::Invalid);
        }
        let mut descriptor = [0; 16];
        ram.mapped()
            .read(at, &mut descriptor)
            .map_err(BadChain::Ram)?;
        let address = u64::from_le_bytes(descriptor[..8].try_into().expect("8 bytes"));
        let bytes = u32::from_le_bytes(descriptor[8..12].try_into().expect("4 bytes"));
        let flags = u32::from(u16::from_le_bytes([descriptor[12], descriptor[13]]));
        if flags & VRING_DESC_F_INDIRECT != 0 {
            let nested = indirect || flags & VRING_DESC_F_NEXT != 0;
            if nested || bytes == 0 || !bytes.is_multiple_of(16) {
                return Err(BadChain::Invalid);
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
    Err(BadChain::Invalid)
}
