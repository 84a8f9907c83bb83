//! A guest as its host sees it: RAM, and the ring that its module writes.
#![allow(
    dead_code,
    missing_docs,
    clippy::cast_possible_truncation,
    clippy::missing_panics_doc,
    reason = "for tests, each of which uses a part of it; sizes are small"
)]

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use plimsoll_disk::protocol::{VERSION, control, record, ring};
use plimsoll_disk::{GuestData, MappedRam, OutsideRam, PAGE_BYTES, Page, RingMemory};
pub use plimsoll_driver::Record;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

pub const RAM_BYTES: u64 = 1 << 20;
/// Where a second piece of RAM begins, after a hole.
pub const HIGH: u64 = 1 << 32;
pub const HIGH_BYTES: u64 = 256 << 10;
pub const FRAMES_END: u64 = (HIGH + HIGH_BYTES) / PAGE_BYTES as u64;
pub const HEADER: u64 = 0x8000;
pub const NONCE: u64 = 0x5eed;

/// RAM in anonymous memory.
pub struct Ram(pub GuestMemoryMmap<()>);

impl Ram {
    pub fn new() -> Arc<Self> {
        let ranges = [
            (GuestAddress(0), RAM_BYTES as usize),
            (GuestAddress(HIGH), HIGH_BYTES as usize),
        ];
        Arc::new(Self(GuestMemoryMmap::from_ranges(&ranges).unwrap()))
    }
}

impl GuestData for Ram {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam> {
        let outside = OutsideRam {
            address,
            bytes: bytes.len(),
        };
        (self.0.read_slice(bytes, GuestAddress(address))).map_err(|_| outside)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideRam> {
        let outside = OutsideRam {
            address,
            bytes: bytes.len(),
        };
        (self.0.write_slice(bytes, GuestAddress(address))).map_err(|_| outside)
    }

    fn is_ram(&self, frame: u64) -> bool {
        frame < RAM_BYTES / PAGE_BYTES as u64
            || (HIGH / PAGE_BYTES as u64..FRAMES_END).contains(&frame)
    }
}

impl RingMemory for Ram {
    fn mapped(&self) -> MappedRam<'_> {
        MappedRam::from(&self.0)
    }
}

/// The guest's module: the writer of a ring.
pub struct Guest {
    pub ram: Arc<Ram>,
    pub records: u64,
    pub slots: u64,
    pub head: u64,
    pub slot_head: u64,
}

/// Chunks of two pages, in an order of their own, the last one in high RAM.
pub const CHUNK_BYTES: u64 = 2 * PAGE_BYTES as u64;
pub const CHUNKS: [u64; 3] = [0x2_0000, 0x1_0000, HIGH + 0x6000];

impl Guest {
    /// A ring of 256 records (two pages) and 4 slots, not announced yet.
    pub fn new() -> Self {
        let guest = Self {
            ram: Ram::new(),
            records: 256,
            slots: 4,
            head: 0,
            slot_head: 0,
        };
        guest.set(ring::AT_MAGIC, ring::MAGIC);
        guest.set_u32(ring::AT_VERSION, VERSION);
        guest.set_u32(ring::AT_CHUNK_BYTES, CHUNK_BYTES as u32);
        guest.set_u32(ring::AT_RECORDS, 256);
        guest.set_u32(ring::AT_SLOTS, 4);
        guest.set_u32(ring::AT_CHUNKS, CHUNKS.len() as u32);
        guest.set(ring::AT_NONCE, NONCE);
        for (index, chunk) in CHUNKS.into_iter().enumerate() {
            guest.set(ring::AT_CHUNK + 8 * index, chunk);
        }
        guest
    }

    pub fn set(&self, at: usize, value: u64) {
        let address = GuestAddress(HEADER + at as u64);
        self.ram.0.store(value, address, Release).unwrap();
    }

    pub fn set_u32(&self, at: usize, value: u32) {
        let address = GuestAddress(HEADER + at as u64);
        self.ram.0.store(value, address, Release).unwrap();
    }

    pub fn get(&self, at: usize) -> u64 {
        let address = GuestAddress(HEADER + at as u64);
        self.ram.0.load(address, Acquire).unwrap()
    }

    fn write_chunks(&self, offset: u64, bytes: &[u8]) {
        let address = CHUNKS[(offset / CHUNK_BYTES) as usize] + offset % CHUNK_BYTES;
        self.ram.write(address, bytes).unwrap();
    }

    /// Whether a record has room.
    pub fn has_room(&self) -> bool {
        self.head - self.get(ring::AT_TAIL) < self.records
    }

    /// Whether a slot is free for a page.
    pub fn has_slot(&self) -> bool {
        self.slot_head - self.get(ring::AT_SLOT_TAIL) < self.slots
    }

    /// Publishes a record, whether or not there is room.
    pub fn post(&mut self, record: Record) {
        let place = self.head % self.records;
        self.write_chunks(place * record::BYTES as u64, &record.to_bytes());
        self.head += 1;
        self.set(ring::AT_HEAD, self.head);
    }

    /// Publishes a record and a page, whether or not there is room.
    pub fn post_page(&mut self, mut record: Record, page: &Page) {
        let place = self.slot_head % self.slots;
        self.write_chunks((2 + place) * PAGE_BYTES as u64, page);
        record.flags |= record::DATA;
        record.slot = self.slot_head;
        self.slot_head += 1;
        self.set(ring::AT_SLOT_HEAD, self.slot_head);
        self.post(record);
    }

    pub fn put(&mut self, pool: u64, block: u64, page: &Page) {
        let record = Record {
            other: pool,
            ..Record::new(record::PUT, block)
        };
        self.post_page(record, page);
    }

    pub fn flush(&mut self, pool: u64, block: u64, count: u32) {
        self.post(Record {
            other: pool,
            count,
            ..Record::new(record::FLUSH, block)
        });
    }

    /// Counts a loss.
    pub fn lose(&self, count: u64) {
        self.set(ring::AT_LOST, self.get(ring::AT_LOST) + count);
    }
}

/// A command, as it is written to the control disk.
pub fn command(command: u32, sequence: u64, arguments: &[u64]) -> [u8; 512] {
    let mut bytes = [0; 512];
    let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    set(control::COMMAND_MAGIC, &control::MAGIC.to_le_bytes());
    set(control::COMMAND_VERSION, &VERSION.to_le_bytes());
    set(control::COMMAND_COMMAND, &command.to_le_bytes());
    set(control::COMMAND_SEQUENCE, &sequence.to_le_bytes());
    for (index, argument) in arguments.iter().enumerate() {
        set(control::COMMAND_ARG + 8 * index, &argument.to_le_bytes());
    }
    bytes
}

/// Offset at which a get is read, in bytes.
pub fn get_offset(pool: u64, block: u64) -> u64 {
    (pool << control::POOL_SHIFT | block << control::BLOCK_SHIFT) * 512
}
