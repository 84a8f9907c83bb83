//! The guest's end of the ring of notifications: `struct plimsoll_ring` and its records.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use plimsoll_disk::protocol::{VERSION, record, ring};

use crate::{Bank, PAGE_BYTES, Page, Ram};

/// The size of a ring. Numbers are powers of two.
#[derive(Debug, Clone)]
pub struct RingOptions {
    /// Number of records.
    pub records: u32,
    /// Number of page slots; may be 0.
    pub slots: u32,
    /// Bytes of a chunk, at least a page.
    pub chunk_bytes: u32,
    /// Whether evictions come without contents.
    pub lazy: bool,
    /// The nonce that distinguishes the ring from others.
    pub nonce: u64,
}

impl Default for RingOptions {
    fn default() -> Self {
        Self {
            records: 1024,
            slots: 256,
            chunk_bytes: 64 << 10,
            lazy: false,
            nonce: 0x706c_696d_736f_6c6c,
        }
    }
}

/// A record of a ring, valid or not. Kinds and flags are those of [`record`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Record {
    /// [`record::EVICT`] and the like, or any other number.
    pub kind: u16,
    /// [`record::DATA`] and [`record::SWAP`].
    pub flags: u16,
    /// Number of blocks to flush.
    pub count: u32,
    /// Page frame number, or first block.
    pub page: u64,
    /// Frame moved to, or pool.
    pub other: u64,
    /// Number of the slot, with [`record::DATA`].
    pub slot: u64,
}

impl Record {
    /// A record of a page; all other fields are 0.
    pub fn new(kind: u16, page: u64) -> Self {
        Self {
            kind,
            page,
            ..Self::default()
        }
    }

    /// The record's bytes in the ring.
    pub fn to_bytes(self) -> [u8; record::BYTES] {
        let mut bytes = [0; record::BYTES];
        let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        set(record::AT_TYPE, &self.kind.to_le_bytes());
        set(record::AT_FLAGS, &self.flags.to_le_bytes());
        set(record::AT_COUNT, &self.count.to_le_bytes());
        set(record::AT_PAGE, &self.page.to_le_bytes());
        set(record::AT_OTHER, &self.other.to_le_bytes());
        set(record::AT_SLOT, &self.slot.to_le_bytes());
        bytes
    }
}

/// A ring of notifications in RAM, which [`ControlDisk::attach`](crate::ControlDisk::attach) announces to the host.
pub struct NoticeRing {
    ram: Arc<Ram>,
    options: RingOptions,
    header: u64,
    chunks: Vec<u64>,
    head: u64,
    slot_head: u64,
    lost: u64,
}

impl NoticeRing {
    /// Makes an empty ring.
    pub fn new(ram: &Arc<Ram>, options: RingOptions) -> Self {
        let chunk_bytes = u64::from(options.chunk_bytes);
        let count = (slots_at(&options) + u64::from(options.slots) * PAGE_BYTES as u64)
            .div_ceil(chunk_bytes);
        let header = ram.allocate(Bank::Low, PAGE_BYTES);
        let chunks: Vec<_> = (0..count)
            .map(|_| ram.allocate(Bank::High, options.chunk_bytes as usize))
            .collect();
        let mut ring = Self {
            ram: Arc::clone(ram),
            options,
            header,
            chunks,
            head: 0,
            slot_head: 0,
            lost: 0,
        };
        ring.raw_header();
        ring
    }

    /// Writes all constant fields of the header.
    fn raw_header(&mut self) {
        let options = &self.options;
        let mut bytes = ring::MAGIC.to_le_bytes().to_vec();
        let chunks = u32::try_from(self.chunks.len()).unwrap_or(u32::MAX);
        for word in [
            VERSION,
            options.chunk_bytes,
            options.records,
            options.slots,
            chunks,
            u32::from(options.lazy),
        ] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(options.nonce.to_le_bytes());
        self.ram.write(self.header, &bytes);
        for (at, chunk) in (0..).zip(&self.chunks) {
            let place = self.header + ring::AT_CHUNK as u64 + 8 * at;
            self.ram.write(place, &chunk.to_le_bytes());
        }
    }

    /// Guest-physical address of the header.
    pub fn address(&self) -> u64 {
        self.header
    }

    /// The nonce that distinguishes the ring from others.
    pub fn nonce(&self) -> u64 {
        self.options.nonce
    }

    /// Reports that reclaim takes a frame; `contents` are its contents. Returns whether there was room.
    pub fn evict(&mut self, frame: u64, contents: Option<&Page>) -> bool {
        self.post(record::EVICT, frame, 0, 0, contents)
    }

    /// Reports that a frame leaves the page cache. Returns whether there was room.
    pub fn release(&mut self, frame: u64) -> bool {
        self.post(record::RELEASE, frame, 0, 0, None)
    }

    /// Reports that a frame enters the page cache. Returns whether there was room.
    pub fn add(&mut self, frame: u64) -> bool {
        self.post(record::ADD, frame, 0, 0, None)
    }

    /// Reports that contents move to another frame. Returns whether there was room.
    pub fn migrate(&mut self, frame: u64, to: u64) -> bool {
        self.post(record::MIGRATE, frame, to, 0, None)
    }

    /// Puts a page into a pool. Returns whether there was room.
    pub fn put(&mut self, pool: u32, block: u64, contents: &Page) -> bool {
        self.post(record::PUT, block, u64::from(pool), 0, Some(contents))
    }

    /// Flushes blocks of a pool. Returns whether there was room.
    pub fn flush(&mut self, pool: u32, block: u64, count: u32) -> bool {
        self.post(record::FLUSH, block, u64::from(pool), count, None)
    }

    /// As the module does: a record without room is lost, and counted as lost before the next record.
    fn post(
        &mut self,
        kind: u16,
        page: u64,
        other: u64,
        count: u32,
        contents: Option<&Page>,
    ) -> bool {
        let slots = u64::from(self.options.slots);
        let no_record = self.head - self.tail() >= u64::from(self.options.records);
        let no_slot = contents.is_some() && self.slot_head - self.slot_tail() >= slots;
        if no_record || no_slot {
            self.lose(1);
            return false;
        }
        let mut record = Record {
            kind,
            flags: 0,
            count,
            page,
            other,
            slot: 0,
        };
        if let Some(contents) = contents {
            record.flags = record::DATA;
            record.slot = self.slot_head;
            self.raw_slot(contents);
        }
        self.raw_record(&record);
        true
    }

    /// Counts lost notifications.
    pub fn lose(&mut self, count: u64) {
        self.lost += count;
        self.store(ring::AT_LOST, self.lost);
    }

    /// Number of notifications reported as lost.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Number of records that the host has taken.
    pub fn tail(&self) -> u64 {
        self.load(ring::AT_TAIL)
    }

    /// Number of slots that the host has taken.
    pub fn slot_tail(&self) -> u64 {
        self.load(ring::AT_SLOT_TAIL)
    }

    /// Number of records published.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The nonce that the host publishes while it reads the ring.
    pub fn attached(&self) -> u64 {
        self.load(ring::AT_ATTACHED)
    }

    /// Publishes any record, with or without room.
    pub fn raw_record(&mut self, record: &Record) {
        let number = self.head % u64::from(self.options.records);
        let at = self.place(number * record::BYTES as u64);
        self.ram.write(at, &record.to_bytes());
        self.raw_head(self.head + 1);
    }

    /// Fills the next slot, with or without room; returns its number.
    ///
    /// # Panics
    /// If the ring has no slots.
    pub fn raw_slot(&mut self, contents: &Page) -> u64 {
        let slot = self.slot_head;
        let number = slot % u64::from(self.options.slots);
        let at = self.place(slots_at(&self.options) + number * PAGE_BYTES as u64);
        self.ram.write(at, contents);
        self.slot_head += 1;
        self.store(ring::AT_SLOT_HEAD, self.slot_head);
        slot
    }

    /// Sets the number of records published.
    pub fn raw_head(&mut self, head: u64) {
        self.head = head;
        self.store(ring::AT_HEAD, head);
    }

    /// Address in RAM of byte `at` of the chunks' contents.
    fn place(&self, at: u64) -> u64 {
        let chunk_bytes = u64::from(self.options.chunk_bytes);
        let chunk = usize::try_from(at / chunk_bytes).expect("64-bit");
        self.chunks[chunk] + at % chunk_bytes
    }

    fn load(&self, at: usize) -> u64 {
        self.ram.load(self.header + at as u64, Ordering::Acquire)
    }

    fn store(&self, at: usize, value: u64) {
        self.ram
            .store(self.header + at as u64, value, Ordering::Release);
    }
}

/// Offset of the slots in the chunks' contents.
fn slots_at(options: &RingOptions) -> u64 {
    (u64::from(options.records) * record::BYTES as u64).next_multiple_of(PAGE_BYTES as u64)
}
