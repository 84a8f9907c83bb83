//! The driver's side of a split virtqueue (virtio 1.2 §2.7) of a block device.
//!
//! Each descriptor has a page of its own beside the rings; a request uses the page of its first descriptor for its
//! header, its status, its ranges and its indirect table.

use std::cmp;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vhost::VringConfigData;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_bindings::virtio_ring::VRING_USED_F_NO_NOTIFY;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::error::OperationContext as _;
use crate::{Bank, FrontendError, PAGE_BYTES, Ram};

/// Offsets of a request's parts in the page of its first descriptor.
const STATUS_AT: u64 = 16;
const ID_AT: u64 = 32;
const RANGES_AT: u64 = 64;
const TABLE_AT: u64 = 1024;
/// Maximum number of ranges of a discard or a write of zeros.
const RANGES_MAX: usize = 32;
/// Maximum number of data segments of a request.
const SEGMENTS_MAX: usize = 126;
/// Length of a device's identification.
pub(crate) const ID_BYTES: u32 = 20;
/// A status that no device returns.
const NO_STATUS: u8 = 0xff;

/// A piece of RAM that holds data of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
}

/// A request to a device. Offsets and lengths are in sectors of 512 bytes.
#[derive(Debug, Clone, Copy)]
pub enum Request<'a> {
    /// Read from `sector` on into the segments.
    Read {
        /// First sector.
        sector: u64,
        /// Destination, at most 126.
        segments: &'a [Segment],
    },
    /// Write the segments from `sector` on.
    Write {
        /// First sector.
        sector: u64,
        /// Source, at most 126.
        segments: &'a [Segment],
    },
    /// Make all writes stable.
    Flush,
    /// Read the identification.
    Identify,
    /// Discard ranges: first sector and number of sectors, at most 32.
    Discard(&'a [(u64, u32)]),
    /// Zero ranges: first sector and number of sectors, at most 32.
    WriteZeroes {
        /// The ranges.
        ranges: &'a [(u64, u32)],
        /// Whether their storage may be freed.
        unmap: bool,
    },
}

/// The status returned by a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok,
    /// Failed.
    IoError,
    /// The device does not support the request.
    Unsupported,
    /// The device did not write the status.
    Missing,
    /// An invalid status.
    Unknown(u8),
}

impl Status {
    fn of(byte: u8) -> Self {
        match u32::from(byte) {
            VIRTIO_BLK_S_OK => Self::Ok,
            VIRTIO_BLK_S_IOERR => Self::IoError,
            VIRTIO_BLK_S_UNSUPP => Self::Unsupported,
            _ if byte == NO_STATUS => Self::Missing,
            _ => Self::Unknown(byte),
        }
    }
}

/// A completed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The tag with which it was submitted.
    pub tag: u64,
    /// Its status.
    pub status: Status,
    /// Number of bytes that the device reports as written, including the status.
    pub written: u32,
    /// Page of the request's first descriptor.
    pub(crate) page: u64,
}

/// An entry of a descriptor table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Descriptor {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// `VRING_DESC_F_*`.
    pub flags: u16,
    /// The next one, with `VRING_DESC_F_NEXT`.
    pub next: u16,
}

impl Descriptor {
    /// Another follows (`VRING_DESC_F_NEXT`).
    pub const NEXT: u16 = 1;
    /// The device writes to this buffer (`VRING_DESC_F_WRITE`).
    pub const WRITE: u16 = 2;
    /// The buffer is a table of descriptors (`VRING_DESC_F_INDIRECT`).
    pub const INDIRECT: u16 = 4;

    fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// A request in flight.
struct InFlight {
    tag: u64,
    /// Descriptors it holds.
    descriptors: Vec<u16>,
}

/// A virtqueue.
///
/// Its methods are of two kinds: those that follow the virtio rules, and those whose names begin with `raw`, which can
/// violate any of them. After a call of the second kind, the first kind is no longer usable.
pub struct Virtqueue {
    ram: Arc<Ram>,
    number: usize,
    size: u16,
    event_index: bool,
    indirect: bool,
    /// Guest-physical addresses of the three parts, and of the descriptors' own pages.
    descriptors: u64,
    available: u64,
    used: u64,
    pages: u64,
    free: Vec<u16>,
    requests: Vec<Option<InFlight>>,
    next_available: u16,
    next_used: u16,
    /// `next_available` when the device was last checked for whether it requires a kick.
    kicked: u16,
    /// Completed requests that were not yet returned.
    done: VecDeque<Completion>,
    kick: EventFd,
    call: EventFd,
    chain: Vec<Descriptor>,
}

impl Virtqueue {
    pub(crate) fn new(
        ram: &Arc<Ram>,
        number: usize,
        size: u16,
        event_index: bool,
        indirect: bool,
    ) -> Result<Self, FrontendError> {
        assert!(size.is_power_of_two(), "virtio asks for a power of two");
        let entries = usize::from(size);
        let eventfd = || EventFd::new(EFD_NONBLOCK).to("make an eventfd");
        Ok(Self {
            ram: Arc::clone(ram),
            number,
            size,
            event_index,
            indirect,
            descriptors: ram.allocate(Bank::Low, 16 * entries),
            available: ram.allocate(Bank::Low, 2 * entries + 6),
            used: ram.allocate(Bank::Low, 8 * entries + 6),
            pages: ram.allocate(Bank::Low, PAGE_BYTES * entries),
            free: (0..size).rev().collect(),
            requests: (0..size).map(|_| None).collect(),
            next_available: 0,
            next_used: 0,
            kicked: 0,
            done: VecDeque::new(),
            kick: eventfd()?,
            call: eventfd()?,
            chain: Vec::new(),
        })
    }

    /// The addresses of its parts in vhost-user messages.
    pub(crate) fn addresses(&self) -> VringConfigData {
        VringConfigData {
            queue_max_size: self.size,
            queue_size: self.size,
            flags: 0,
            desc_table_addr: self.ram.host_address(self.descriptors),
            used_ring_addr: self.ram.host_address(self.used),
            avail_ring_addr: self.ram.host_address(self.available),
            log_addr: None,
        }
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    pub(crate) fn eventfds(&self) -> (&EventFd, &EventFd) {
        (&self.kick, &self.call)
    }

    pub(crate) fn call_descriptor(&self) -> RawFd {
        self.call.as_raw_fd()
    }

    /// Number of requests submitted and not yet seen as completed.
    pub fn in_flight(&self) -> usize {
        self.requests.iter().flatten().count()
    }

    fn page(&self, descriptor: u16) -> u64 {
        self.pages + u64::from(descriptor) * PAGE_BYTES as u64
    }

    /// Makes a request available to the device, which [`notify`](Self::notify) announces.
    ///
    /// # Errors
    /// [`FrontendError::Full`].
    ///
    /// # Panics
    /// With too many segments or ranges.
    pub fn submit(&mut self, request: &Request<'_>, tag: u64) -> Result<(), FrontendError> {
        let &head = self.free.last().ok_or(FrontendError::Full)?;
        self.make_chain(head, request);
        let needed = if self.indirect { 1 } else { self.chain.len() };
        if self.free.len() < needed {
            return Err(FrontendError::Full);
        }
        let descriptors = self.free.split_off(self.free.len() - needed);
        // The head is the descriptor freed last, so that a request finds its page in the cache.
        if self.indirect {
            let table = self.page(head) + TABLE_AT;
            let count = self.chain.len();
            let mut bytes = [0; 16 * (SEGMENTS_MAX + 2)];
            for (at, descriptor) in self.chain.iter_mut().enumerate() {
                if at + 1 < count {
                    descriptor.flags |= Descriptor::NEXT;
                    descriptor.next = u16::try_from(at + 1).expect("checked");
                }
                bytes[16 * at..16 * at + 16].copy_from_slice(&descriptor.bytes());
            }
            self.ram.write(table, &bytes[..16 * count]);
            let pointer = Descriptor {
                address: table,
                bytes: u32::try_from(16 * count).expect("checked"),
                flags: Descriptor::INDIRECT,
                next: 0,
            };
            self.raw_descriptor(head, &pointer);
        } else {
            let numbers: Vec<_> = descriptors.iter().rev().copied().collect();
            for at in 0..numbers.len() {
                let mut descriptor = self.chain[at];
                if let Some(&next) = numbers.get(at + 1) {
                    descriptor.flags |= Descriptor::NEXT;
                    descriptor.next = next;
                }
                self.raw_descriptor(numbers[at], &descriptor);
            }
        }
        self.requests[usize::from(head)] = Some(InFlight { tag, descriptors });
        self.raw_offer(head);
        Ok(())
    }

    /// Writes the request's data in the page of `head` and lists the request's descriptors in `chain`.
    fn make_chain(&mut self, head: u16, request: &Request<'_>) {
        let page = self.page(head);
        let (kind, sector) = match *request {
            Request::Read { sector, .. } => (VIRTIO_BLK_T_IN, sector),
            Request::Write { sector, .. } => (VIRTIO_BLK_T_OUT, sector),
            Request::Flush => (VIRTIO_BLK_T_FLUSH, 0),
            Request::Identify => (VIRTIO_BLK_T_GET_ID, 0),
            Request::Discard(_) => (VIRTIO_BLK_T_DISCARD, 0),
            Request::WriteZeroes { .. } => (VIRTIO_BLK_T_WRITE_ZEROES, 0),
        };
        let mut header = [0; 17];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..16].copy_from_slice(&sector.to_le_bytes());
        header[16] = NO_STATUS;
        self.ram.write(page, &header);

        let piece = |address, bytes, flags| Descriptor {
            address,
            bytes,
            flags,
            next: 0,
        };
        self.chain.clear();
        self.chain.push(piece(page, 16, 0));
        match *request {
            Request::Read { segments, .. } | Request::Write { segments, .. } => {
                assert!(segments.len() <= SEGMENTS_MAX, "too many segments");
                let reads = matches!(request, Request::Read { .. });
                let flags = if reads { Descriptor::WRITE } else { 0 };
                let pieces = segments.iter();
                self.chain
                    .extend(pieces.map(|s| piece(s.address, s.bytes, flags)));
            }
            Request::Flush => {}
            Request::Identify => {
                let id = piece(page + ID_AT, ID_BYTES, Descriptor::WRITE);
                self.chain.push(id);
            }
            Request::Discard(ranges) | Request::WriteZeroes { ranges, .. } => {
                assert!(ranges.len() <= RANGES_MAX, "too many ranges");
                let unmap = matches!(request, Request::WriteZeroes { unmap: true, .. });
                let mut bytes = [0; 16 * RANGES_MAX];
                for (bytes, (sector, sectors)) in bytes.chunks_mut(16).zip(ranges) {
                    bytes[..8].copy_from_slice(&sector.to_le_bytes());
                    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
                    bytes[12] = u8::from(unmap);
                }
                let bytes = &bytes[..16 * ranges.len()];
                self.ram.write(page + RANGES_AT, bytes);
                let len = u32::try_from(bytes.len()).expect("checked");
                self.chain.push(piece(page + RANGES_AT, len, 0));
            }
        }
        let status = piece(page + STATUS_AT, 1, Descriptor::WRITE);
        self.chain.push(status);
    }

    /// Notifies the device of submitted requests, if it requires that.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn notify(&mut self) -> Result<(), FrontendError> {
        let (old, new) = (self.kicked, self.next_available);
        if old == new {
            return Ok(());
        }
        self.kicked = new;
        // Available requests must be visible before the device's notification setting is read.
        fence(Ordering::SeqCst);
        let wanted = if self.event_index {
            let at = self.used + 4 + 8 * u64::from(self.size);
            let event: u16 = self.ram.load(at, Ordering::Acquire);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            let flags: u16 = self.ram.load(self.used, Ordering::Acquire);
            u32::from(flags) & VRING_USED_F_NO_NOTIFY == 0
        };
        if wanted { self.raw_kick() } else { Ok(()) }
    }

    /// The next completed request, if there is one.
    ///
    /// # Errors
    /// [`FrontendError::NotInFlight`].
    pub fn poll(&mut self) -> Result<Option<Completion>, FrontendError> {
        match self.done.pop_front() {
            Some(completion) => Ok(Some(completion)),
            None => self.take_used(),
        }
    }

    /// Returns the request of this tag if it is completed, without waiting. Those of larger tags, which nobody waits for
    /// any more, are dropped; others are kept for [`poll`](Self::poll).
    pub(crate) fn poll_for(&mut self, tag: u64) -> Result<Option<Completion>, FrontendError> {
        while let Some(completion) = self.take_used()? {
            match completion.tag.cmp(&tag) {
                cmp::Ordering::Equal => return Ok(Some(completion)),
                cmp::Ordering::Greater => {}
                cmp::Ordering::Less => self.done.push_back(completion),
            }
        }
        Ok(None)
    }

    fn take_used(&mut self) -> Result<Option<Completion>, FrontendError> {
        if self.raw_used_index() == self.next_used {
            return Ok(None);
        }
        let (id, written) = self.raw_used_entry(self.next_used);
        self.next_used = self.next_used.wrapping_add(1);
        let queue = self.number;
        let not_in_flight = FrontendError::NotInFlight { queue, id };
        let Ok(head) = u16::try_from(id) else {
            return Err(not_in_flight);
        };
        let request = self.requests.get_mut(usize::from(head));
        let Some(request) = request.and_then(Option::take) else {
            return Err(not_in_flight);
        };
        self.free.extend(request.descriptors);
        let page = self.page(head);
        let mut status = [0];
        self.ram.read(page + STATUS_AT, &mut status);
        Ok(Some(Completion {
            tag: request.tag,
            status: Status::of(status[0]),
            written,
            page,
        }))
    }

    /// The identification returned by a completed request. To be read before the next request is submitted.
    pub(crate) fn identification(&self, completion: &Completion) -> [u8; ID_BYTES as usize] {
        let mut id = [0; ID_BYTES as usize];
        self.ram.read(completion.page + ID_AT, &mut id);
        id
    }

    /// Requests a call for the next completed request; returns whether there is one already.
    pub(crate) fn arm(&mut self) -> bool {
        if self.event_index {
            let at = self.available + 4 + 2 * u64::from(self.size);
            self.ram.store(at, self.next_used, Ordering::Release);
            // The setting must be visible before the ring is searched for completed requests.
            fence(Ordering::SeqCst);
        }
        !self.done.is_empty() || self.raw_used_index() != self.next_used
    }

    /// Writes an entry of the descriptor table.
    ///
    /// # Panics
    /// Outside of the table.
    pub fn raw_descriptor(&mut self, number: u16, descriptor: &Descriptor) {
        assert!(number < self.size, "outside of the table");
        let at = self.descriptors + 16 * u64::from(number);
        self.ram.write(at, &descriptor.bytes());
    }

    /// Writes any number to the next entry of the ring of available descriptors, and advances the index.
    pub fn raw_offer(&mut self, head: u16) {
        let entry = u64::from(self.next_available % self.size);
        let at = self.available + 4 + 2 * entry;
        self.ram.store(at, head, Ordering::Relaxed);
        self.raw_available_index(self.next_available.wrapping_add(1));
    }

    /// Sets the index of available descriptors.
    pub fn raw_available_index(&mut self, index: u16) {
        self.next_available = index;
        self.ram.store(self.available + 2, index, Ordering::Release);
    }

    /// The index of available descriptors.
    pub fn available_index(&self) -> u16 {
        self.next_available
    }

    /// Kicks the device, even if it does not require that.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn raw_kick(&mut self) -> Result<(), FrontendError> {
        self.kick.write(1).to("kick a queue")
    }

    /// Number of entries that the device has used since the queue began, modulo 2^16.
    pub fn raw_used_index(&self) -> u16 {
        self.ram.load(self.used + 2, Ordering::Acquire)
    }

    /// The entry that the device used as number `index`: first descriptor and bytes written.
    pub fn raw_used_entry(&self, index: u16) -> (u32, u32) {
        let mut entry = [0; 8];
        let at = self.used + 4 + 8 * u64::from(index % self.size);
        self.ram.read(at, &mut entry);
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| entry[at + byte]));
        (word(0), word(4))
    }
}
