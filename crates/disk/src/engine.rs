//! Decisions about a VM's requests: which blocks the cache serves, which I/O storage must do, and which of the pages that
//! the guest evicts are admitted.
//!
//! The engine does no I/O and never blocks. Its inputs are requests and notifications, in the order in which the guest made
//! them; its outputs are I/O submissions and completed requests. So it is one sequence of decisions, which a test can replay
//! with storage that completes in any order.
//!
//! **Admission.** A page that the guest evicts is stored under block s only if its frame's last I/O was with s (P2S), that frame was
//! the last one of s (S2P), no other transfer used s meanwhile, and the page's hash is that of the data that the
//! I/O moved. **Invalidation.** Every write, discard and zeroing of s replaces or drops the copy of s before it is carried out.
//! \[LS07\] §3; the hash is an addition: guests that decrypt in place break the other rules without a notification.
//!
//! **Delayed writes** stay in the cache as dirty pages and in the [dirty log](DirtyPages), which outlives the process.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState as FastState;
use plimsoll_hcache::{Error, Version};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::buffers::Buffers;
use crate::busy::{Busy, Use};
use crate::cache::Cache;
use crate::dirty::{Dirty, WriteNumber, Written};
use crate::frames::{Frames, Held, Ticket};
use crate::segments::Cursor;
use crate::{
    Action, Buffer, ByteRange, CacheMode, Completed, Contents, DirtyPages, DiskNumber,
    EngineOptions, EngineStats, GuestData, Location, Notice, Observer, Operation, Order, OrderId,
    OutsideRam, PAGE_BYTES, Page, Request, Segment, Status, Tag, WriteMode,
};

/// [`PAGE_BYTES`], for offsets.
const BLOCK: u64 = PAGE_BYTES as u64;
/// Most bytes of one order to storage.
const ORDER_BYTES_MAX: usize = 1 << 20;
/// Most blocks written back by one order, and most being written back at a time.
const WRITE_BACK_BLOCKS: usize = 64;
const WRITING_BLOCKS_MAX: usize = 16 * WRITE_BACK_BLOCKS;
/// Of ranges longer than this (256 MiB) the observer is not told.
const OBSERVED_BLOCKS_MAX: u64 = 1 << 16;
/// A cache disables itself when this many pages did not have the contents of their last I/O, and they are more than
/// one in so many of those looked at, of late.
const MISMATCHES_MAX: u64 = 64;
const MISMATCH_ONE_IN: u64 = 20;
/// Most pages read into the cache at a time ([`CacheMode::FromStorage`]).
const FILLS_MAX: usize = 4096;
/// Looks after which older ones count half.
const LOOKS: u64 = 4096;

/// What becomes of a VM's requests: the cache, and orders to the storage of its disks.
pub struct Engine {
    options: EngineOptions,
    seed: u64,
    frames: Frames,
    cache: Option<Cache>,
    cache_bytes: u64,
    /// What it is to be, while dirty pages are in the way.
    wanted_bytes: u64,
    dirty: Dirty,
    log: Option<Box<dyn DirtyPages>>,
    observer: Option<Box<dyn Observer>>,
    busy: Busy,
    requests: HashMap<RequestId, Running, FastState>,
    orders: HashMap<OrderId, Outstanding, FastState>,
    flushes: Vec<Flush>,
    /// Disks whose storage once failed to make writes stable. It tells only once, and may have dropped them: no flush of
    /// such a disk can succeed any more.
    unsynced: HashSet<DiskNumber>,
    fills: usize,
    ready: VecDeque<Order>,
    completed: VecDeque<Completed>,
    buffers: Buffers,
    scratch: Box<Page>,
    next_number: u64,
    now: Duration,
    turned: Duration,
    disabled: Option<String>,
    looks: Looks,
    stats: EngineStats,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RequestId(u64);

/// A request that is not completed.
struct Running {
    disk: DiskNumber,
    tag: Tag,
    /// Orders it waits for, and 1 while it is being looked at.
    left: u32,
    failed: bool,
    /// Whether all that is dirty must be on storage before it completes.
    flush: bool,
}

/// A request that waits for dirty blocks.
struct Flush {
    request: RequestId,
    disk: DiskNumber,
    upto: WriteNumber,
}

/// What an order is for.
enum Outstanding {
    /// Part of a read.
    Read {
        request: RequestId,
        ram: Arc<dyn GuestData>,
        pieces: Vec<Piece>,
        ticket: Ticket,
    },
    /// Part of a write.
    Write {
        request: RequestId,
        pieces: Vec<Piece>,
        ticket: Ticket,
    },
    /// A flush.
    Sync { request: RequestId },
    /// A change of a range.
    Change { request: RequestId },
    /// Dirty blocks.
    WriteBack {
        disk: DiskNumber,
        blocks: Vec<(Location, Version)>,
    },
    /// A page for the cache ([`CacheMode::FromStorage`]).
    Fill { location: Location },
    /// What a page served from the cache must be.
    Verify { location: Location, hash: u64 },
}

/// Part of a transfer: one block's bytes in one stretch of guest memory.
struct Piece {
    address: u64,
    bytes: u32,
    /// Whether it is the first of its block.
    begins: bool,
    location: Location,
    /// The frame that holds the block, if it is all of the block and all of the frame.
    frame: Option<u64>,
    /// Of a write: the hash of the block.
    hash: u64,
}

/// A stretch of blocks to be transferred by one order.
struct Run {
    offset: u64,
    bytes: usize,
    pieces: Vec<Piece>,
}

/// How often pages were looked at and found other than they should be, of late.
#[derive(Default)]
struct Looks {
    looks: u64,
    mismatches: u64,
}

impl Engine {
    /// Makes an engine.
    ///
    /// # Errors
    /// If there is no memory for the cache, or it is too small.
    pub fn new(options: EngineOptions, observer: Option<Box<dyn Observer>>) -> Result<Self, Error> {
        let cache = match options.mode {
            CacheMode::None => None,
            CacheMode::Exclusive | CacheMode::FromStorage => {
                Some(Cache::new(options.cache_bytes, options.cache_bytes_max)?)
            }
        };
        Ok(Self {
            cache_bytes: options.cache_bytes,
            wanted_bytes: options.cache_bytes,
            options,
            seed: RandomState::new().hash_one(0),
            frames: Frames::new(),
            cache,
            dirty: Dirty::default(),
            log: None,
            observer,
            busy: Busy::default(),
            requests: HashMap::default(),
            orders: HashMap::default(),
            flushes: Vec::new(),
            unsynced: HashSet::new(),
            fills: 0,
            ready: VecDeque::new(),
            completed: VecDeque::new(),
            buffers: Buffers::default(),
            scratch: Box::new([0; PAGE_BYTES]),
            next_number: 0,
            now: Duration::ZERO,
            turned: Duration::ZERO,
            disabled: None,
            looks: Looks::default(),
            stats: EngineStats::default(),
        })
    }

    /// Keeps dirty pages in this log as well, so that they outlive the process. Without one, delayed writes do not.
    pub fn set_dirty_log(&mut self, log: Box<dyn DirtyPages>) {
        self.log = Some(log);
    }

    /// Takes a request of a guest. All notices that the guest gave before must have been handed over.
    pub fn submit(&mut self, request: Request) {
        let Request {
            disk,
            tag,
            operation,
            ram,
        } = request;
        let id = RequestId(self.number());
        let running = Running {
            disk,
            tag,
            left: 1,
            failed: false,
            flush: false,
        };
        self.requests.insert(id, running);
        match operation {
            Operation::Read { offset, segments } => self.read(id, disk, &ram, offset, &segments),
            Operation::Write {
                offset,
                segments,
                durable,
            } => self.write(id, disk, &ram, offset, &segments, durable),
            Operation::Flush => {
                self.stats.flushes += 1;
                self.want_flush(id);
            }
            Operation::Discard(ranges) => {
                for range in ranges {
                    self.discard(id, disk, range);
                }
            }
            Operation::WriteZeroes {
                ranges,
                unmap,
                durable,
            } => {
                for range in ranges {
                    self.zero(id, disk, range, unmap);
                }
                if durable {
                    self.want_flush(id);
                }
            }
        }
        self.part_done(id, true);
        self.pump();
    }

    /// The guest tells of a frame, in the order of its ring. `contents` come with an eviction.
    pub fn notice(&mut self, notice: Notice, contents: Option<Contents<'_>>) {
        let knows = self.knows_frames();
        match notice {
            Notice::Evict { frame } => {
                self.stats.evictions += 1;
                if knows {
                    self.evict(frame, contents);
                    self.frames.release(frame);
                }
            }
            Notice::Release { frame } => {
                self.stats.releases += 1;
                self.frames.release(frame);
            }
            Notice::Add { frame } => {
                self.stats.additions += 1;
                self.frames.release(frame);
            }
            Notice::Migrate { frame, to } => {
                self.stats.migrations += 1;
                self.frames.migrate(frame, to);
            }
        }
    }

    /// Forgets which frame holds what: notices were lost, or another kernel runs in the guest.
    pub fn forget_frames(&mut self) {
        self.frames.clear();
        self.stats.forgotten += 1;
    }

    /// Drops everything cached of a disk and forgets its frames: the guest is gone, and others may write to its
    /// storage. Returns how many blocks could not be dropped, because they are not on storage yet: a flush
    /// before failed.
    pub fn forget_disk(&mut self, disk: DiskNumber) -> u64 {
        self.frames.forget_where(|location| location.disk() == disk);
        let left = self.dirty.of_disk(disk) as u64;
        if let Some(cache) = &self.cache
            && left == 0
        {
            cache.drop_range(disk, 0, Location::BLOCKS_MAX - 1);
        }
        if let Some(observer) = &mut self.observer {
            observer.cleared();
        }
        left
    }

    /// An order was carried out, or failed. A transfer that moved fewer bytes than asked for has failed.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the order is over, and so is its result"
    )]
    pub fn carried_out(&mut self, order: OrderId, result: io::Result<()>, buffer: Option<Buffer>) {
        let Some(outstanding) = self.orders.remove(&order) else {
            return;
        };
        let ok = result.is_ok();
        if !ok {
            self.stats.storage_errors += 1;
        }
        let bytes = buffer.as_deref().unwrap_or_default();
        match outstanding {
            Outstanding::Read {
                request,
                ram,
                pieces,
                ticket,
            } => {
                let ok = self.was_read(&*ram, &pieces, ticket, ok.then_some(bytes));
                self.part_done(request, ok);
            }
            Outstanding::Write {
                request,
                pieces,
                ticket,
            } => {
                self.was_written(&pieces, ticket, ok);
                self.part_done(request, ok);
            }
            Outstanding::Sync { request } => {
                if let Some(running) = self.requests.get(&request)
                    && !ok
                {
                    self.unsynced.insert(running.disk);
                }
                self.part_done(request, ok);
            }
            Outstanding::Change { request } => {
                self.busy.end_wide(order);
                self.part_done(request, ok);
            }
            Outstanding::WriteBack { disk, blocks } => self.was_written_back(disk, &blocks, ok),
            Outstanding::Fill { location } => {
                self.fills -= 1;
                let alone = self.busy.end(location, Use::Fill);
                let page = <&Page>::try_from(bytes);
                if let (true, true, Ok(page), Some(cache)) = (alone, ok, page, &self.cache)
                    && self.disabled.is_none()
                    && cache.put(location, page)
                {
                    self.stats.admitted += 1;
                } else {
                    self.stats.refused_other += 1;
                }
            }
            Outstanding::Verify { location, hash } => {
                // Unless it was written meanwhile, or the guest has let go of it.
                let newest = self.frames.newest(location);
                let unchanged = newest.and_then(|frame| self.frames.held(frame))
                    == Some(Held::Contents(location, hash));
                if unchanged && ok && self.hash(bytes) != hash {
                    self.stats.wrong_served += 1;
                }
            }
        }
        if let Some(buffer) = buffer {
            self.buffers.give_back(buffer);
        }
        self.pump();
    }

    /// The next order to give to storage.
    pub fn next_order(&mut self) -> Option<Order> {
        self.ready.pop_front()
    }

    /// The next request that is done.
    pub fn next_completed(&mut self) -> Option<Completed> {
        self.completed.pop_front()
    }

    /// What it says of itself.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        let (cached_pages, dropped) = self.cache.as_ref().map_or((0, 0), Cache::pages);
        EngineStats {
            mode: self.options.mode,
            write: self.options.write,
            disabled: self.disabled.clone(),
            cache_bytes: self.cache.as_ref().map_or(0, |_| self.cache_bytes),
            cached_pages,
            dirty_pages: self.dirty.len() as u64,
            dirty_pages_max: self.dirty_max() as u64,
            mapped_frames: self.frames.known(),
            dropped,
            ..self.stats.clone()
        }
    }

    /// Changes the memory of the cache, in bytes. Smaller takes effect before the call returns.
    ///
    /// # Errors
    /// If it is too small or too large, or dirty pages are in the way: these are being written back from now on, so
    /// that it can be tried again. The cache is then as it was.
    pub fn resize(&mut self, cache_bytes: u64) -> Result<(), Error> {
        let Some(cache) = &self.cache else {
            return Err(Error::CapacityTooLarge {
                asked_bytes: cache_bytes,
                most_bytes: 0,
            });
        };
        let resized = cache.resize(cache_bytes);
        match &resized {
            Ok(()) => {
                self.cache_bytes = cache_bytes;
                self.wanted_bytes = cache_bytes;
            }
            // From now on fewer may be dirty, so that it can be tried again.
            Err(Error::DirtyPages { .. }) => self.wanted_bytes = cache_bytes,
            Err(_) => {}
        }
        while matches!(resized, Err(Error::DirtyPages { .. }))
            && self.dirty.writing() < WRITING_BLOCKS_MAX
        {
            let oldest = self.dirty.oldest_of_all();
            let Some(location) = oldest.filter(|oldest| !self.busy.is_written(*oldest)) else {
                break;
            };
            self.write_back(location);
        }
        resized
    }

    /// Lets a cache that disabled itself begin again.
    pub fn enable(&mut self) {
        self.disabled = None;
        self.looks = Looks::default();
    }

    /// To be called now and then (every 100 ms): writes back what has been dirty for long. `now` counts from the
    /// engine's start.
    pub fn turn(&mut self, now: Duration) {
        self.now = now;
        if let Some(cache) = &self.cache
            && now.saturating_sub(self.turned) >= Duration::from_secs(1)
        {
            self.turned = now;
            cache.turn(now);
        }
        self.dirty.retry();
        self.pump();
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn hash(&self, bytes: &[u8]) -> u64 {
        xxh3_64_with_seed(bytes, self.seed)
    }

    /// Whether it matters which frame holds what.
    fn knows_frames(&self) -> bool {
        self.cache.is_some() && self.disabled.is_none()
    }

    fn dirty_max(&self) -> usize {
        let half = self.cache_bytes.min(self.wanted_bytes) / BLOCK / 2;
        usize::try_from(self.options.dirty_pages_max.min(half)).unwrap_or(usize::MAX)
    }

    /// Gives an order to storage.
    fn order(&mut self, disk: DiskNumber, action: Action, outstanding: Outstanding) -> OrderId {
        match &action {
            Action::Read { buffer, .. } => {
                self.stats.storage_reads += 1;
                self.stats.storage_read_bytes += buffer.len() as u64;
            }
            Action::Write { buffer, .. } => {
                self.stats.storage_writes += 1;
                self.stats.storage_written_bytes += buffer.len() as u64;
            }
            Action::Sync | Action::Discard(_) | Action::Zero { .. } => {}
        }
        let request = match &outstanding {
            Outstanding::Read { request, .. }
            | Outstanding::Write { request, .. }
            | Outstanding::Sync { request }
            | Outstanding::Change { request } => Some(*request),
            _ => None,
        };
        if let Some(running) = request.and_then(|request| self.requests.get_mut(&request)) {
            running.left += 1;
        }
        let id = OrderId(self.number());
        self.orders.insert(id, outstanding);
        self.ready.push_back(Order { id, disk, action });
        id
    }

    /// Part of a request is done.
    fn part_done(&mut self, request: RequestId, ok: bool) {
        let Some(running) = self.requests.get_mut(&request) else {
            return;
        };
        running.failed |= !ok;
        running.left -= 1;
        if running.left > 0 {
            return;
        }
        let disk = running.disk;
        if running.flush && !running.failed {
            running.flush = false;
            running.left = 1;
            let upto = self.dirty.last();
            self.flushes.push(Flush {
                request,
                disk,
                upto,
            });
            return;
        }
        let (tag, failed) = (running.tag, running.failed);
        self.requests.remove(&request);
        let status = if failed { Status::IoError } else { Status::Ok };
        self.completed.push_back(Completed { disk, tag, status });
    }

    fn want_flush(&mut self, request: RequestId) {
        if let Some(running) = self.requests.get_mut(&request) {
            running.flush = true;
        }
    }

    fn read(
        &mut self,
        request: RequestId,
        disk: DiskNumber,
        ram: &Arc<dyn GuestData>,
        offset: u64,
        segments: &[Segment],
    ) {
        let frames_end = ram.frames_end();
        let mut parts = Vec::new();
        let mut run = Run::new(offset);
        let mut cursor = Cursor::new(offset, segments);
        while let Some(within) = cursor.next_block(&mut parts) {
            let location = Location::new(disk, within.block);
            let whole = within.is_whole();
            if whole {
                self.stats.read_blocks += 1;
                if let Some(observer) = &mut self.observer {
                    observer.missed(location);
                }
            } else {
                self.stats.read_parts += 1;
            }
            let frame = frame_of(&parts, whole, frames_end);
            self.stats.scattered_blocks += u64::from(whole && frame.is_none());
            let served = match (whole, &self.cache) {
                (_, None) => None,
                (true, _) => self.serve(location, &**ram, &parts, frame),
                (false, _) => self.serve_part(location, &**ram, &parts, within.start),
            };
            if let Some(served) = served {
                if served.is_err() {
                    self.fail(request);
                }
                self.read_run(request, disk, ram, &mut run, within.end());
            } else {
                run.add(location, &parts, frame);
                if run.bytes >= ORDER_BYTES_MAX {
                    self.read_run(request, disk, ram, &mut run, within.end());
                }
            }
        }
        self.read_run(request, disk, ram, &mut run, 0);
    }

    fn fail(&mut self, request: RequestId) {
        if let Some(running) = self.requests.get_mut(&request) {
            running.failed = true;
        }
    }

    /// Serves a whole block from the cache, if it is there.
    fn serve(
        &mut self,
        location: Location,
        ram: &dyn GuestData,
        parts: &[Segment],
        frame: Option<u64>,
    ) -> Option<Result<(), OutsideRam>> {
        let cache = self.cache.as_ref()?;
        let is_dirty = self.dirty.contains(location);
        if self.disabled.is_some() && !is_dirty {
            return None;
        }
        let seed = self.seed;
        let mut hash = 0;
        let mut copied = Ok(());
        let found = cache.take(location, |page| {
            copied = copy_to(ram, parts, page);
            hash = xxh3_64_with_seed(page, seed);
        });
        if !found {
            return None;
        }
        self.stats.hits += 1;
        if let Some(frame) = frame.filter(|_| self.disabled.is_none()) {
            self.frames.set(frame, Held::Contents(location, hash));
        } else {
            self.release_frames(parts);
        }
        if self.options.verify && !is_dirty {
            let action = Action::Read {
                offset: location.block() * BLOCK,
                buffer: self.buffers.take(PAGE_BYTES),
            };
            let verify = Outstanding::Verify { location, hash };
            self.order(location.disk(), action, verify);
        }
        Some(copied)
    }

    /// Serves part of a block from the cache, if storage does not have it yet.
    fn serve_part(
        &mut self,
        location: Location,
        ram: &dyn GuestData,
        parts: &[Segment],
        start: usize,
    ) -> Option<Result<(), OutsideRam>> {
        let cache = self.cache.as_ref()?;
        if !self.dirty.contains(location) {
            return None;
        }
        cache.peek(location, &mut self.scratch)?;
        let copied = copy_to(ram, parts, &self.scratch[start..]);
        self.release_frames(parts);
        Some(copied)
    }

    fn release_frames(&mut self, parts: &[Segment]) {
        for part in parts {
            let last = part
                .address
                .saturating_add(u64::from(part.bytes).saturating_sub(1));
            for frame in part.address / BLOCK..=last / BLOCK {
                self.frames.release(frame);
            }
        }
    }

    /// Orders what has gathered to be read, and begins anew at `next`.
    fn read_run(
        &mut self,
        request: RequestId,
        disk: DiskNumber,
        ram: &Arc<dyn GuestData>,
        run: &mut Run,
        next: u64,
    ) {
        let run = std::mem::replace(run, Run::new(next));
        if run.bytes == 0 {
            return;
        }
        let ticket = Ticket(self.number());
        self.begin_pieces(&run.pieces, ticket, Use::Read);
        let action = Action::Read {
            offset: run.offset,
            buffer: self.buffers.take(run.bytes),
        };
        let outstanding = Outstanding::Read {
            request,
            ram: Arc::clone(ram),
            pieces: run.pieces,
            ticket,
        };
        self.order(disk, action, outstanding);
    }

    fn begin_pieces(&mut self, pieces: &[Piece], ticket: Ticket, what: Use) {
        if self.cache.is_none() {
            return;
        }
        for piece in pieces {
            if piece.begins {
                self.busy.begin(piece.location, what);
            }
            match piece.frame.filter(|_| self.disabled.is_none()) {
                Some(frame) => self
                    .frames
                    .set(frame, Held::Pending(piece.location, ticket)),
                None => self.release_frames(&[piece.segment()]),
            }
        }
    }

    /// Hands what was read to the guest, `None` if reading failed. Returns whether all is well.
    fn was_read(
        &mut self,
        ram: &dyn GuestData,
        pieces: &[Piece],
        ticket: Ticket,
        bytes: Option<&[u8]>,
    ) -> bool {
        let copied = bytes.is_some_and(|bytes| copy_to_stretches(ram, pieces, bytes).is_ok());
        if self.cache.is_none() {
            return copied;
        }
        let mut at = 0;
        for piece in pieces {
            let end = at + piece.bytes as usize;
            let alone = piece.begins && self.busy.end(piece.location, Use::Read);
            if let Some(frame) = piece.frame {
                match bytes.filter(|_| alone && copied) {
                    Some(bytes) => {
                        let hash = self.hash(&bytes[at..end]);
                        self.frames.finish(frame, piece.location, ticket, hash);
                    }
                    None => self.frames.abandon(frame, piece.location, ticket),
                }
            }
            at = end;
        }
        copied
    }

    fn write(
        &mut self,
        request: RequestId,
        disk: DiskNumber,
        ram: &Arc<dyn GuestData>,
        offset: u64,
        segments: &[Segment],
        durable: bool,
    ) {
        let frames_end = ram.frames_end();
        let mut parts = Vec::new();
        let mut run = Run::new(offset);
        let mut cursor = Cursor::new(offset, segments);
        while let Some(within) = cursor.next_block(&mut parts) {
            let location = Location::new(disk, within.block);
            let whole = within.is_whole();
            if whole {
                self.stats.written_blocks += 1;
            } else {
                self.stats.written_parts += 1;
            }
            if let Some(observer) = &mut self.observer {
                observer.released(location);
            }
            let frame = frame_of(&parts, whole, frames_end);
            self.stats.scattered_blocks += u64::from(whole && frame.is_none());
            let is_dirty = self.dirty.contains(location);
            let delay = is_dirty
                || (whole
                    && !durable
                    && self.options.write == WriteMode::Delayed
                    && self.knows_frames()
                    && self.dirty.len() < self.dirty_max());
            if delay {
                match self.write_cached(location, &**ram, &parts, within.start, frame) {
                    Ok(true) => {
                        if durable {
                            self.want_flush(request);
                        }
                        self.write_run(request, disk, ram, &mut run, within.end(), durable);
                        continue;
                    }
                    // The cache does not take it.
                    Ok(false) => {}
                    Err(_) => {
                        self.fail(request);
                        self.write_run(request, disk, ram, &mut run, within.end(), durable);
                        continue;
                    }
                }
            }
            if let Some(cache) = &self.cache {
                cache.drop_page(location);
                self.frames.forget(location);
            }
            run.add(location, &parts, frame);
            if run.bytes >= ORDER_BYTES_MAX {
                self.write_run(request, disk, ram, &mut run, within.end(), durable);
            }
        }
        self.write_run(request, disk, ram, &mut run, 0, durable);
    }

    /// Writes a block, or from `start` on a part of a dirty one, into the cache. Returns whether that was done;
    /// never `Ok(false)` for a dirty block.
    fn write_cached(
        &mut self,
        location: Location,
        ram: &dyn GuestData,
        parts: &[Segment],
        start: usize,
        frame: Option<u64>,
    ) -> Result<bool, CannotWrite> {
        let whole = parts.iter().map(|part| part.bytes as usize).sum::<usize>() == PAGE_BYTES;
        let mut page = [0; PAGE_BYTES];
        let result = (|| {
            let cache = self.cache.as_ref().ok_or(CannotWrite)?;
            if !whole {
                cache.peek(location, &mut page).ok_or(CannotWrite)?;
            }
            copy_from(ram, parts, &mut page[start..]).map_err(|_| CannotWrite)?;
            self.store_dirty(location, &page)
        })();
        if matches!(result, Ok(true)) {
            if let Some(frame) = frame.filter(|_| self.disabled.is_none()) {
                let hash = self.hash(&page[..]);
                self.frames.set(frame, Held::Contents(location, hash));
            } else {
                self.frames.forget(location);
                self.release_frames(parts);
            }
            self.stats.delayed_blocks += 1;
        }
        result
    }

    /// Makes a page the newest contents of a block, in the log and then in the cache.
    fn store_dirty(&mut self, location: Location, page: &Page) -> Result<bool, CannotWrite> {
        let is_dirty = self.dirty.contains(location);
        let cache = self.cache.as_ref().ok_or(CannotWrite)?;
        if let Some(log) = &mut self.log
            && log.record(location, page).is_err()
        {
            self.stats.storage_errors += 1;
            return if is_dirty {
                Err(CannotWrite)
            } else {
                Ok(false)
            };
        }
        if !cache.put_dirty(location, page) {
            // A page that is there is replaced, never refused: this one was not.
            if let Some(log) = &mut self.log {
                log.clean(location);
            }
            return if is_dirty {
                Err(CannotWrite)
            } else {
                Ok(false)
            };
        }
        self.dirty.write(location, self.now);
        self.busy.disturb(location);
        Ok(true)
    }

    /// Orders what has gathered to be written, and begins anew at `next`.
    fn write_run(
        &mut self,
        request: RequestId,
        disk: DiskNumber,
        ram: &Arc<dyn GuestData>,
        run: &mut Run,
        next: u64,
        durable: bool,
    ) {
        let mut run = std::mem::replace(run, Run::new(next));
        if run.bytes == 0 {
            return;
        }
        let mut buffer = self.buffers.take(run.bytes);
        if copy_from_stretches(&**ram, &run.pieces, &mut buffer).is_err() {
            self.buffers.give_back(buffer);
            self.fail(request);
            return;
        }
        let ticket = Ticket(self.number());
        self.begin_pieces(&run.pieces, ticket, Use::Write);
        if self.knows_frames() {
            // Of what is being written, which the guest may change meanwhile.
            let mut at = 0;
            for piece in &mut run.pieces {
                let end = at + piece.bytes as usize;
                if piece.frame.is_some() {
                    piece.hash = self.hash(&buffer[at..end]);
                }
                at = end;
            }
        }
        let action = Action::Write {
            offset: run.offset,
            buffer,
            durable,
        };
        let outstanding = Outstanding::Write {
            request,
            pieces: run.pieces,
            ticket,
        };
        self.order(disk, action, outstanding);
    }

    fn was_written(&mut self, pieces: &[Piece], ticket: Ticket, ok: bool) {
        if self.cache.is_none() {
            return;
        }
        for piece in pieces {
            let alone = piece.begins && self.busy.end(piece.location, Use::Write);
            match piece.frame {
                Some(frame) if alone && ok => {
                    self.frames
                        .finish(frame, piece.location, ticket, piece.hash);
                }
                Some(frame) => self.frames.abandon(frame, piece.location, ticket),
                None => {}
            }
        }
    }

    fn discard(&mut self, request: RequestId, disk: DiskNumber, range: ByteRange) {
        if range.bytes == 0 {
            return;
        }
        if self.cache.is_some() {
            let touched = Blocks::touched(range);
            self.forget_blocks(disk, touched);
            for location in self.dirty_in(disk, touched) {
                // Contents may be anything from now on: even what is being written, and what was to be.
                if Blocks::within(range).contains(location) && self.dirty.drop_block(location) {
                    self.was_cleaned(location);
                }
            }
            self.drop_clean(disk, touched);
            self.clear_if_clean();
        }
        self.change(request, disk, range, Action::Discard(range));
    }

    fn zero(&mut self, request: RequestId, disk: DiskNumber, range: ByteRange, unmap: bool) {
        if range.bytes == 0 {
            return;
        }
        if self.cache.is_some() {
            let touched = Blocks::touched(range);
            self.forget_blocks(disk, touched);
            for location in self.dirty_in(disk, touched) {
                // Whatever is being written for it now, zeros are written after it.
                if self.zero_cached(location, range).is_err() {
                    self.fail(request);
                    return;
                }
            }
            self.drop_clean(disk, touched);
        }
        self.change(request, disk, range, Action::Zero { range, unmap });
    }

    /// Overwrites by zeros what of a dirty block is in the range.
    fn zero_cached(&mut self, location: Location, range: ByteRange) -> Result<(), CannotWrite> {
        let begin = location.block() * BLOCK;
        let from = range.offset.saturating_sub(begin).min(BLOCK);
        let to = (range.offset + range.bytes)
            .saturating_sub(begin)
            .min(BLOCK);
        let mut page = [0; PAGE_BYTES];
        let cache = self.cache.as_ref().ok_or(CannotWrite)?;
        cache.peek(location, &mut page).ok_or(CannotWrite)?;
        page[index(from)..index(to)].fill(0);
        self.store_dirty(location, &page).map(|_| ())
    }

    /// Orders a change of a range.
    fn change(&mut self, request: RequestId, disk: DiskNumber, range: ByteRange, action: Action) {
        let order = self.order(disk, action, Outstanding::Change { request });
        if self.cache.is_some() {
            let Blocks { first, end } = Blocks::touched(range);
            self.busy.begin_wide(order, disk, first, end - 1);
        }
    }

    /// No frame holds these blocks any more.
    fn forget_blocks(&mut self, disk: DiskNumber, blocks: Blocks) {
        if blocks.count() <= self.frames.blocks() as u64 {
            for number in blocks.first..blocks.end {
                self.frames.forget(Location::new(disk, number));
            }
        } else {
            self.frames
                .forget_where(|location| location.disk() == disk && blocks.contains(location));
        }
        if let Some(observer) = &mut self.observer
            && blocks.count() <= OBSERVED_BLOCKS_MAX
        {
            for number in blocks.first..blocks.end {
                observer.released(Location::new(disk, number));
            }
        }
    }

    fn dirty_in(&self, disk: DiskNumber, blocks: Blocks) -> Vec<Location> {
        if blocks.count() <= self.dirty.len() as u64 {
            (blocks.first..blocks.end)
                .map(|number| Location::new(disk, number))
                .filter(|location| self.dirty.contains(*location))
                .collect()
        } else {
            self.dirty
                .locations()
                .filter(|location| location.disk() == disk && blocks.contains(*location))
                .collect()
        }
    }

    /// Drops the cached pages of these blocks that are not dirty.
    fn drop_clean(&self, disk: DiskNumber, blocks: Blocks) {
        let Some(cache) = &self.cache else { return };
        let mut dirty: Vec<u64> = self
            .dirty_in(disk, blocks)
            .into_iter()
            .map(Location::block)
            .collect();
        dirty.sort_unstable();
        let mut from = blocks.first;
        for number in dirty {
            if from < number {
                cache.drop_range(disk, from, number - 1);
            }
            from = number + 1;
        }
        if from < blocks.end {
            cache.drop_range(disk, from, blocks.end - 1);
        }
    }

    /// A dirty block became clean by being dropped.
    fn was_cleaned(&mut self, location: Location) {
        if let Some(cache) = &self.cache {
            cache.drop_page(location);
        }
        if let Some(log) = &mut self.log {
            log.clean(location);
        }
    }

    /// The guest evicts a frame.
    fn evict(&mut self, frame: u64, contents: Option<Contents<'_>>) {
        let Some(held) = self.frames.held(frame) else {
            self.stats.refused_unknown += 1;
            return;
        };
        let Held::Contents(location, _) = held else {
            self.stats.refused_other += 1;
            return;
        };
        let newest = self.frames.newest(location);
        if self.options.newest_check && newest != Some(frame) {
            self.stats.refused_not_newest += 1;
            return;
        }
        if self.options.mode == CacheMode::FromStorage {
            self.fill(location);
            return;
        }
        let lazy = matches!(contents, Some(Contents::Lazy(_)));
        let page = match contents {
            Some(Contents::Copied(page)) => Some(page),
            Some(Contents::Lazy(ram)) => ram
                .read(frame * BLOCK, &mut self.scratch[..])
                .is_ok()
                .then_some(&*self.scratch),
            None => None,
        };
        let Some(page) = page else {
            self.stats.refused_other += 1;
            return;
        };
        if self.options.hash_check {
            // Of the newest I/O with the block, whichever frame it was.
            let newest = newest.and_then(|frame| self.frames.held(frame));
            let Some(Held::Contents(_, hash)) = newest else {
                self.stats.refused_unknown += 1;
                return;
            };
            let matches = self.hash(page) == hash;
            if !matches && lazy {
                self.stats.refused_stale += 1;
                return;
            }
            let broken = self.looks.look(matches);
            if !matches {
                self.stats.refused_mismatch += 1;
                if broken {
                    self.disable();
                }
                return;
            }
        }
        let Some(cache) = &self.cache else { return };
        if self.dirty.contains(location) {
            cache.move_to_tail(location);
        } else if !cache.put(location, page) {
            self.stats.refused_other += 1;
            return;
        }
        self.stats.admitted += 1;
        if let Some(observer) = &mut self.observer {
            observer.evicted(location);
        }
    }

    /// Orders a page for the cache from storage.
    fn fill(&mut self, location: Location) {
        if self.dirty.contains(location) || self.fills == FILLS_MAX {
            self.stats.refused_other += 1;
            return;
        }
        self.fills += 1;
        self.busy.begin(location, Use::Fill);
        let action = Action::Read {
            offset: location.block() * BLOCK,
            buffer: self.buffers.take(PAGE_BYTES),
        };
        self.order(location.disk(), action, Outstanding::Fill { location });
        if let Some(observer) = &mut self.observer {
            observer.evicted(location);
        }
    }

    fn disable(&mut self) {
        self.disabled = Some(format!(
            "{} of the last {} evicted pages did not hold what was last read from or written to their blocks: the guest changes \
             pages in place (as dm-crypt does), or its notices are wrong",
            self.looks.mismatches, self.looks.looks
        ));
        self.frames.clear();
        self.clear_if_clean();
    }

    /// A disabled cache holds dirty pages alone, until they are written.
    fn clear_if_clean(&mut self) {
        if let Some(cache) = &self.cache
            && self.disabled.is_some()
            && self.dirty.len() == 0
        {
            cache.clear();
        }
    }

    /// Begins what can begin: flushes whose blocks are written, and write-backs.
    fn pump(&mut self) {
        let mut at = 0;
        while at < self.flushes.len() {
            let Flush { disk, upto, .. } = self.flushes[at];
            if self.dirty.is_written(disk, upto) {
                let Flush { request, .. } = self.flushes.swap_remove(at);
                let synced = !self.unsynced.contains(&disk);
                if synced {
                    self.order(disk, Action::Sync, Outstanding::Sync { request });
                }
                self.part_done(request, synced);
            } else {
                at += 1;
            }
        }
        while self.dirty.writing() < WRITING_BLOCKS_MAX {
            let Some(location) = self.next_to_write() else {
                break;
            };
            self.write_back(location);
        }
    }

    /// The block to be written back next, if one is to.
    fn next_to_write(&self) -> Option<Location> {
        if self.dirty.len() == self.dirty.writing() {
            return None;
        }
        let can = |location: &Location| !self.busy.is_written(*location);
        let for_flush = self
            .flushes
            .iter()
            .find_map(|flush| self.dirty.oldest(flush.disk, flush.upto).find(can));
        if for_flush.is_some() {
            return for_flush;
        }
        let many = self.dirty.len() - self.dirty.writing() > self.dirty_max() / 2;
        if many || self.disabled.is_some() {
            return self.dirty.oldest_of_all().filter(can);
        }
        let then = self.now.checked_sub(self.options.dirty_age_max)?;
        self.dirty.born_before(then).find(can)
    }

    /// Orders a dirty block and those that follow it to be written.
    fn write_back(&mut self, first: Location) {
        let Some(cache) = &self.cache else { return };
        let disk = first.disk();
        let mut locations = vec![first];
        while locations.len() < WRITE_BACK_BLOCKS {
            let next = Location::new(disk, first.block() + locations.len() as u64);
            if !self.dirty.waits(next) || self.busy.is_written(next) {
                break;
            }
            locations.push(next);
        }
        let mut buffer = self.buffers.take(locations.len() * PAGE_BYTES);
        let mut blocks = Vec::with_capacity(locations.len());
        for (location, bytes) in locations.iter().zip(buffer.chunks_exact_mut(PAGE_BYTES)) {
            let page = <&mut Page>::try_from(bytes).expect("of a page's length");
            let version = cache
                .peek(*location, page)
                .expect("a dirty page is not dropped");
            self.dirty.start(*location);
            blocks.push((*location, version));
        }
        let action = Action::Write {
            offset: first.block() * BLOCK,
            buffer,
            durable: false,
        };
        self.order(disk, action, Outstanding::WriteBack { disk, blocks });
    }

    fn was_written_back(&mut self, disk: DiskNumber, blocks: &[(Location, Version)], ok: bool) {
        for &(location, version) in blocks {
            if self.dirty.finish(location, ok, self.now) == Written::StillDirty {
                continue;
            }
            self.stats.written_back_blocks += 1;
            if let Some(cache) = &self.cache {
                cache.mark_clean(location, version);
                if self.frames.newest(location).is_some() {
                    // The guest holds it, and will tell when it does no more.
                    cache.drop_page(location);
                }
            }
            if let Some(log) = &mut self.log {
                log.clean(location);
            }
        }
        if ok {
            self.clear_if_clean();
            return;
        }
        self.stats.write_back_errors += blocks.len() as u64;
        let failed = self
            .flushes
            .extract_if(.., |flush| flush.disk == disk)
            .collect::<Vec<_>>();
        for flush in failed {
            self.part_done(flush.request, false);
        }
    }
}

/// A dirty block cannot be written: the log or the guest's memory failed.
#[derive(Debug)]
struct CannotWrite;

impl Run {
    fn new(offset: u64) -> Self {
        Self {
            offset,
            bytes: 0,
            pieces: Vec::new(),
        }
    }

    fn add(&mut self, location: Location, parts: &[Segment], frame: Option<u64>) {
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
    fn segment(&self) -> Segment {
        Segment {
            address: self.address,
            bytes: self.bytes,
        }
    }
}

impl Looks {
    /// Counts a look. Returns whether too many did not match.
    fn look(&mut self, matches: bool) -> bool {
        if self.looks >= LOOKS {
            self.looks /= 2;
            self.mismatches /= 2;
        }
        self.looks += 1;
        self.mismatches += u64::from(!matches);
        self.mismatches >= MISMATCHES_MAX && self.mismatches * MISMATCH_ONE_IN > self.looks
    }
}

/// Blocks of a disk from `first` to before `end`.
#[derive(Clone, Copy)]
struct Blocks {
    first: u64,
    end: u64,
}

impl Blocks {
    /// Those of which the range has any byte.
    fn touched(range: ByteRange) -> Self {
        Self {
            first: range.offset / BLOCK,
            end: (range.offset + range.bytes).div_ceil(BLOCK),
        }
    }

    /// Those of which the range has all bytes.
    fn within(range: ByteRange) -> Self {
        Self {
            first: range.offset.div_ceil(BLOCK),
            end: (range.offset + range.bytes) / BLOCK,
        }
    }

    fn count(self) -> u64 {
        self.end.saturating_sub(self.first)
    }

    fn contains(self, location: Location) -> bool {
        (self.first..self.end).contains(&location.block())
    }
}

/// The frame that is all of a block's bytes in guest memory, if one is.
fn frame_of(parts: &[Segment], whole: bool, frames_end: u64) -> Option<u64> {
    match parts {
        [part] if whole && part.address % BLOCK == 0 => {
            Some(part.address / BLOCK).filter(|frame| *frame < frames_end)
        }
        _ => None,
    }
}

/// An offset within a page.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(PAGE_BYTES)
}

/// Copies the first bytes of `bytes` to the parts.
fn copy_to(ram: &dyn GuestData, parts: &[Segment], bytes: &[u8]) -> Result<(), OutsideRam> {
    let mut at = 0;
    for part in parts {
        let end = at + part.bytes as usize;
        ram.write(part.address, &bytes[at..end])?;
        at = end;
    }
    Ok(())
}

/// Copies the parts to the first bytes of `bytes`.
fn copy_from(ram: &dyn GuestData, parts: &[Segment], bytes: &mut [u8]) -> Result<(), OutsideRam> {
    let mut at = 0;
    for part in parts {
        let end = at + part.bytes as usize;
        ram.read(part.address, &mut bytes[at..end])?;
        at = end;
    }
    Ok(())
}

/// The pieces, those that follow each other in guest memory as one.
fn stretches(pieces: &[Piece]) -> impl Iterator<Item = Segment> {
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

/// As [`copy_to`], for pieces.
fn copy_to_stretches(
    ram: &dyn GuestData,
    pieces: &[Piece],
    bytes: &[u8],
) -> Result<(), OutsideRam> {
    let mut at = 0;
    for stretch in stretches(pieces) {
        let end = at + stretch.bytes as usize;
        ram.write(stretch.address, &bytes[at..end])?;
        at = end;
    }
    Ok(())
}

/// As [`copy_from`], for pieces.
fn copy_from_stretches(
    ram: &dyn GuestData,
    pieces: &[Piece],
    bytes: &mut [u8],
) -> Result<(), OutsideRam> {
    let mut at = 0;
    for stretch in stretches(pieces) {
        let end = at + stretch.bytes as usize;
        ram.read(stretch.address, &mut bytes[at..end])?;
        at = end;
    }
    Ok(())
}
