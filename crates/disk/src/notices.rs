//! Reader of the ring in which a guest reports events of its page frames.
//!
//! Nothing in the ring is trusted. Positions are stored here; each word that the guest may change is read once, a
//! record is copied before it is validated, a page before it is used. A batch ends at the head that was read first, and
//! has at most as many records and pages as the ring, so a guest that keeps writing cannot delay its end.
//!
//! Two tables depend on the notifications, and a loss (no room, a missed probe, an invalid record) invalidates both:
//!
//! - *Frames*: the block that each frame holds. Only I/O adds entries, and no I/O is served during a batch. The table
//!   is cleared before the first record, or at the invalid one: the rest of the batch then finds no entry that the lost
//!   notification may have concerned.
//! - *Blocks*: pages put into pools. Records themselves add entries, and a lost flush may concern a page put anywhere
//!   before it, also in this batch. So the pools are emptied after the batch; no get is served before that.
//!
//! `lost` is read after `head`, so it covers all notifications lost before any record below that head. It may already
//! include a loss after that head. The tables are then cleared early, which is correct: an entry added between the two
//! losses comes from a request that the guest made before the loss was counted, about frames it held for that request.

use std::sync::Arc;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use crate::protocol::{VERSION, control, record, ring, u16_at, u32_at, u64_at};
use crate::{
    Contents, Engine, GuestData, GuestRam, MappedRam, Notice, PAGE_BYTES, Page, RingStats,
};

/// Maximum number of records of a ring: bounds the cost of one batch.
const RECORDS_MAX: u32 = 1 << 20;
/// Maximum number of slots of a ring.
const SLOTS_MAX: u32 = 1 << 16;
/// Limit on the first position of a ring: far from the point where positions would wrap.
const POSITION_MAX: u64 = 1 << 62;

/// Number of records after which the guest may reuse their places: it may be waiting for the first of them.
const RUN: usize = 32;
const _: () = assert!(RUN * record::BYTES <= PAGE_BYTES);

/// Guest RAM that a ring can be read from.
pub trait RingMemory: GuestData {
    /// The RAM, mapped.
    fn mapped(&self) -> MappedRam<'_>;
}

impl RingMemory for GuestRam {
    fn mapped(&self) -> MappedRam<'_> {
        self.mapped()
    }
}

/// Receiver of notifications about page frames.
pub trait FrameSink {
    /// Notifications were lost: all information about frames is invalid.
    fn forget(&mut self);
    /// The next notification. An eviction may come with contents.
    fn notice(&mut self, notice: Notice, contents: Option<Contents<'_>>);
}

impl FrameSink for Engine {
    fn forget(&mut self) {
        self.forget_frames();
    }

    fn notice(&mut self, notice: Notice, contents: Option<Contents<'_>>) {
        Self::notice(self, notice, contents);
    }
}

/// Receiver of pages for pools. Pools are numbered 1 to 31 by the guest; calls for one that is not open are ignored.
pub trait BlockSink {
    /// Stores a page as a block of a pool.
    fn put(&mut self, pool: u32, block: u64, page: &Page);
    /// Invalidates `count` blocks, at least 1.
    fn flush(&mut self, pool: u32, block: u64, count: u32);
    /// Records were lost: no page put so far may be returned any more.
    fn forget(&mut self);
    /// No record of this batch follows. Puts of the batch may be completed together here.
    fn end_of_batch(&mut self);
}

/// Why a ring is not read. Nothing was written to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// Its header or a chunk is not RAM.
    #[error("the ring is not completely in the guest's RAM")]
    OutsideRam,
    /// Another magic.
    #[error("there is no ring at this address")]
    NotARing,
    /// Another version.
    #[error("the ring has version {0}; only version {VERSION} is supported")]
    Version(u32),
    /// Another nonce than announced, or 0.
    #[error("the ring's nonce is not the announced one")]
    Nonce,
    /// Invalid numbers of records, slots or chunks, unknown flags, or addresses that are not page-aligned.
    #[error("the ring's sizes are invalid")]
    Sizes,
    /// More records between tail and head than the ring has.
    #[error("the ring's positions are invalid")]
    Positions,
}

impl AttachError {
    /// The guest's error code: a number of `errno(3)`.
    pub fn errno(self) -> u32 {
        let errno = match self {
            Self::OutsideRam => rustix::io::Errno::FAULT,
            Self::Version(_) => rustix::io::Errno::PROTONOSUPPORT,
            Self::NotARing | Self::Nonce | Self::Sizes | Self::Positions => {
                rustix::io::Errno::INVAL
            }
        };
        errno.raw_os_error().unsigned_abs()
    }
}

/// Result of reading the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainResult {
    /// Nothing new, or no ring.
    Nothing,
    /// Records, or a loss.
    Records,
    /// The ring is invalid and was released: frames and blocks were dropped, and no flush will arrive any more.
    Fault,
}

/// The ring is invalid.
struct Fault;

impl<E: std::error::Error> From<E> for Fault {
    fn from(_: E) -> Self {
        Self
    }
}

/// The reader of a guest's ring, if it has announced one.
pub struct Notices {
    ring: Option<ValidRing>,
    stats: RingStats,
    run: Box<Page>,
    page: Box<Page>,
}

impl Default for Notices {
    fn default() -> Self {
        Self {
            ring: None,
            stats: RingStats::default(),
            run: Box::new([0; PAGE_BYTES]),
            page: Box::new([0; PAGE_BYTES]),
        }
    }
}

impl Notices {
    /// Reads the ring at a guest-physical address from now on, from where its last reader stopped. A previous ring is
    /// released in any case. The caller drops its information about frames and blocks.
    ///
    /// # Errors
    /// If there is no such ring, or one that cannot be read.
    pub fn attach(
        &mut self,
        ram: Arc<dyn RingMemory>,
        address: u64,
        nonce: u64,
    ) -> Result<(), AttachError> {
        self.detach();
        let ring = ValidRing::new(ram, address, nonce)?;
        ring.store(ring::AT_ATTACHED, nonce)
            .map_err(|_| AttachError::OutsideRam)?;
        self.stats.attached = true;
        self.ring = Some(ring);
        Ok(())
    }

    /// Releases the ring and marks it as released. Its memory is not accessed afterwards.
    pub fn detach(&mut self) {
        if let Some(ring) = self.let_go()
            && ring.is_still_there().is_ok()
        {
            // Nobody is left to receive an error.
            let _ = ring.store(ring::AT_ATTACHED, 0);
        }
    }

    /// Stops using the ring without writing to it: its memory may have another use by now (the guest was reset).
    pub fn abandon(&mut self) {
        self.let_go();
    }

    fn let_go(&mut self) -> Option<ValidRing> {
        self.stats.attached = false;
        self.stats.guest_memory_pages = 0;
        self.ring.take()
    }

    /// Nonce of the ring that is read.
    pub fn nonce(&self) -> Option<u64> {
        self.ring.as_ref().map(|ring| ring.nonce)
    }

    /// Position after the last slot that was read; only increases while the same ring is attached.
    pub fn slots_read(&self) -> u64 {
        self.ring.as_ref().map_or(0, |ring| ring.slot_tail)
    }

    /// Replaces the mapping of RAM. Returns whether the ring, if there is one, is in it; otherwise it was released.
    pub fn remap(&mut self, ram: &Arc<dyn RingMemory>) -> bool {
        let Some(ring) = &mut self.ring else {
            return true;
        };
        if ring.is_in(ram.mapped()) {
            ring.ram = Arc::clone(ram);
            return true;
        }
        self.stats.faults += 1;
        self.let_go();
        false
    }

    /// Passes on all records that were in the ring at the call, in order.
    pub fn drain(&mut self, frames: &mut dyn FrameSink, blocks: &mut dyn BlockSink) -> DrainResult {
        let Some(ring) = &mut self.ring else {
            return DrainResult::Nothing;
        };
        let mut batch = Batch {
            frames,
            blocks,
            stats: &mut self.stats,
            page: &mut self.page,
            forgotten: false,
        };
        let drained = ring.drain(&mut batch, &mut self.run);
        if !matches!(drained, Ok(DrainResult::Nothing)) {
            batch.blocks.end_of_batch();
        }
        if batch.forgotten {
            batch.blocks.forget();
        }
        drained.unwrap_or_else(|Fault| {
            frames.forget();
            blocks.forget();
            self.stats.faults += 1;
            self.detach();
            DrainResult::Fault
        })
    }

    /// Statistics of the ring.
    pub fn stats(&self) -> RingStats {
        self.stats.clone()
    }
}

/// Where a batch goes.
struct Batch<'a> {
    frames: &'a mut dyn FrameSink,
    blocks: &'a mut dyn BlockSink,
    stats: &'a mut RingStats,
    page: &'a mut Page,
    forgotten: bool,
}

impl Batch<'_> {
    fn forget(&mut self) {
        // Once is enough: no record of a batch adds information about frames, and blocks are handled after it.
        if !self.forgotten {
            self.frames.forget();
            self.forgotten = true;
        }
    }
}

/// A validated ring.
struct ValidRing {
    ram: Arc<dyn RingMemory>,
    address: u64,
    nonce: u64,
    records: u64,
    slots: u64,
    /// Where the slots begin, in bytes, in the chunks laid one after the other.
    slots_start: u64,
    chunk_bytes: u64,
    chunks: Vec<u64>,
    tail: u64,
    slot_tail: u64,
    lost: u64,
}

impl ValidRing {
    fn new(ram: Arc<dyn RingMemory>, address: u64, nonce: u64) -> Result<Self, AttachError> {
        let mut header = [0; PAGE_BYTES];
        if !address.is_multiple_of(PAGE_BYTES as u64) {
            return Err(AttachError::Sizes);
        }
        ram.mapped()
            .read(address, &mut header)
            .map_err(|_| AttachError::OutsideRam)?;
        if u64_at(&header, ring::AT_MAGIC) != ring::MAGIC {
            return Err(AttachError::NotARing);
        }
        let version = u32_at(&header, ring::AT_VERSION);
        if version != VERSION {
            return Err(AttachError::Version(version));
        }
        if nonce == 0 || u64_at(&header, ring::AT_NONCE) != nonce {
            return Err(AttachError::Nonce);
        }
        let chunk_bytes = u32_at(&header, ring::AT_CHUNK_BYTES);
        let records = u32_at(&header, ring::AT_RECORDS);
        let slots = u32_at(&header, ring::AT_SLOTS);
        let chunks = u32_at(&header, ring::AT_CHUNKS);
        let flags = u32_at(&header, ring::AT_FLAGS);
        let slots_start =
            (u64::from(records) * record::BYTES as u64).next_multiple_of(PAGE_BYTES as u64);
        let bytes = slots_start + u64::from(slots) * PAGE_BYTES as u64;
        let sizes_fit = chunk_bytes.is_power_of_two()
            && chunk_bytes as usize >= PAGE_BYTES
            && records.is_power_of_two()
            && records <= RECORDS_MAX
            && (slots == 0 || slots.is_power_of_two())
            && slots <= SLOTS_MAX
            && chunks <= ring::CHUNKS_MAX
            && u64::from(chunks) * u64::from(chunk_bytes) >= bytes;
        if !sizes_fit || flags & !ring::LAZY != 0 {
            return Err(AttachError::Sizes);
        }
        let chunks: Vec<u64> = (0..chunks as usize)
            .map(|chunk| u64_at(&header, ring::AT_CHUNK + 8 * chunk))
            .collect();
        if chunks
            .iter()
            .any(|chunk| !chunk.is_multiple_of(PAGE_BYTES as u64))
        {
            return Err(AttachError::Sizes);
        }
        let attached = Self {
            address,
            nonce,
            records: records.into(),
            slots: slots.into(),
            slots_start,
            chunk_bytes: chunk_bytes.into(),
            chunks,
            tail: u64_at(&header, ring::AT_TAIL),
            slot_tail: u64_at(&header, ring::AT_SLOT_TAIL),
            lost: u64_at(&header, ring::AT_LOST),
            ram,
        };
        if !attached.is_in(attached.ram.mapped()) {
            return Err(AttachError::OutsideRam);
        }
        let waiting = u64_at(&header, ring::AT_HEAD).checked_sub(attached.tail);
        if waiting.is_none_or(|waiting| waiting > attached.records)
            || attached.tail.max(attached.slot_tail) > POSITION_MAX
        {
            return Err(AttachError::Positions);
        }
        Ok(attached)
    }

    /// Whether header and chunks are wholly in the RAM.
    fn is_in(&self, ram: MappedRam<'_>) -> bool {
        ram.contains(self.address, PAGE_BYTES as u64)
            && (self.chunks.iter()).all(|&chunk| ram.contains(chunk, self.chunk_bytes))
    }

    fn load(&self, at: usize, order: Ordering) -> Result<u64, Fault> {
        Ok(self.ram.mapped().load(self.address + at as u64, order)?)
    }

    fn store(&self, at: usize, value: u64) -> Result<(), Fault> {
        let address = self.address + at as u64;
        Ok(self.ram.mapped().store(value, address, Release)?)
    }

    /// Whether the memory still appears to be this ring and may be written to. A heuristic: a reset guest's memory
    /// could match.
    fn is_still_there(&self) -> Result<(), Fault> {
        let same = self.load(ring::AT_MAGIC, Relaxed)? == ring::MAGIC
            && self.load(ring::AT_NONCE, Relaxed)? == self.nonce;
        if same { Ok(()) } else { Err(Fault) }
    }

    /// Copies from the chunks. The range does not leave a page.
    fn copy(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        let chunk = usize::try_from(offset / self.chunk_bytes)?;
        let address = self.chunks[chunk] + offset % self.chunk_bytes;
        Ok(self.ram.mapped().read(address, bytes)?)
    }

    /// Lets the guest reuse the places of all records and pages read so far.
    fn release_places(&self) -> Result<(), Fault> {
        // The tail first: a later reader, if this one dies in between, then finds no record whose slot is gone.
        self.store(ring::AT_TAIL, self.tail)?;
        self.store(ring::AT_SLOT_TAIL, self.slot_tail)
    }

    fn drain(&mut self, batch: &mut Batch<'_>, run: &mut Page) -> Result<DrainResult, Fault> {
        let head = self.load(ring::AT_HEAD, Acquire)?;
        let lost = self.load(ring::AT_LOST, Acquire)?;
        batch.stats.guest_memory_pages = self.load(ring::AT_MEMORY_PAGES, Relaxed)?;
        if head == self.tail && lost == self.lost {
            return Ok(DrainResult::Nothing);
        }
        self.is_still_there()?;
        let waiting = head.checked_sub(self.tail).ok_or(Fault)?;
        if waiting > self.records {
            return Err(Fault);
        }
        if lost != self.lost {
            let more = lost.saturating_sub(self.lost);
            batch.stats.lost = batch.stats.lost.saturating_add(more);
            self.lost = lost;
            batch.forget();
        }
        // As the guest saw it when it published `head`: no slot beyond this can have been filled before.
        let slots_end = self.slot_tail + self.slots;
        while self.tail < head {
            let first = self.tail % self.records;
            let count = (head - self.tail)
                .min(RUN as u64 - first % RUN as u64)
                .min(self.records - first);
            let bytes = &mut run[..usize::try_from(count)? * record::BYTES];
            self.copy(first * record::BYTES as u64, bytes)?;
            for raw in bytes.chunks_exact(record::BYTES) {
                let data = self.take_slot(raw, slots_end, batch.page)?;
                batch.stats.records += 1;
                match Event::of(raw, &*self.ram) {
                    Some(Event::Notice(notice)) => {
                        let contents = match notice {
                            Notice::Evict { .. } if data => Some(Contents::Copied(batch.page)),
                            Notice::Evict { .. } => {
                                Some(Contents::Lazy(&*self.ram as &dyn GuestData))
                            }
                            _ => None,
                        };
                        batch.frames.notice(notice, contents);
                    }
                    Some(Event::Put { pool, block }) => batch.blocks.put(pool, block, batch.page),
                    Some(Event::Flush { pool, block, count }) => {
                        batch.blocks.flush(pool, block, count);
                    }
                    None => {
                        batch.stats.bad_records += 1;
                        batch.forget();
                    }
                }
            }
            self.tail += count;
            self.release_places()?;
        }
        // Also without a record, if the guest has changed them.
        self.release_places()?;
        Ok(DrainResult::Records)
    }

    /// Copies the page that came with a record. Returns whether one did.
    fn take_slot(&mut self, raw: &[u8], slots_end: u64, page: &mut Page) -> Result<bool, Fault> {
        if u16_at(raw, record::AT_FLAGS) & record::DATA == 0 {
            return Ok(false);
        }
        let slot = u64_at(raw, record::AT_SLOT);
        if slot < self.slot_tail || slot >= slots_end {
            return Err(Fault);
        }
        let place = slot % self.slots;
        self.copy(self.slots_start + place * PAGE_BYTES as u64, page)?;
        self.slot_tail = slot + 1;
        Ok(true)
    }
}

/// Contents of a record.
enum Event {
    Notice(Notice),
    Put { pool: u32, block: u64 },
    Flush { pool: u32, block: u64, count: u32 },
}

impl Event {
    /// `None` if the record is invalid.
    fn of(raw: &[u8], ram: &dyn GuestData) -> Option<Self> {
        let flags = u16_at(raw, record::AT_FLAGS);
        let count = u32_at(raw, record::AT_COUNT);
        let page = u64_at(raw, record::AT_PAGE);
        let other = u64_at(raw, record::AT_OTHER);
        let kind = u16_at(raw, record::AT_TYPE);
        let (flags_known, data) = match kind {
            record::EVICT => (record::DATA | record::SWAP, flags & record::DATA != 0),
            record::PUT => (record::DATA, true),
            record::FLUSH => (0, false),
            _ => (record::SWAP, false),
        };
        if flags & !flags_known != 0 || data != (flags & record::DATA != 0) {
            return None;
        }
        let frame = |frame: u64| ram.is_ram(frame).then_some(frame);
        let pool = || {
            let pool = u32::try_from(other).ok()?;
            (1..=control::POOLS_MAX).contains(&pool).then_some(pool)
        };
        Some(match kind {
            record::EVICT => Self::Notice(Notice::Evict {
                frame: frame(page)?,
            }),
            record::RELEASE => Self::Notice(Notice::Release {
                frame: frame(page)?,
            }),
            record::ADD => Self::Notice(Notice::Add {
                frame: frame(page)?,
            }),
            record::MIGRATE => Self::Notice(Notice::Migrate {
                frame: frame(page)?,
                to: frame(other)?,
            }),
            record::PUT if page < control::BLOCKS_MAX => Self::Put {
                pool: pool()?,
                block: page,
            },
            record::FLUSH
                if count > 0
                    && page < control::BLOCKS_MAX
                    && u64::from(count) <= control::BLOCKS_MAX - page =>
            {
                Self::Flush {
                    pool: pool()?,
                    block: page,
                    count,
                }
            }
            _ => return None,
        })
    }
}
