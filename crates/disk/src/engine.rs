//! Decisions about a VM's requests: which blocks the cache serves, which I/O storage must do, and which of the pages
//! that the guest evicts are admitted.
//!
//! The engine does no I/O and never blocks. Its inputs are requests and notifications, in the order in which the guest
//! made them; its outputs are I/O submissions and completed requests. So it is one sequence of decisions, which a test
//! can replay with storage that completes in any order.
//!
//! **Admission.** A page that the guest evicts is stored under block s only if its frame's last I/O was with s (P2S),
//! that frame was the last one of s (S2P), no other transfer used s meanwhile, and the page's hash is that of the data
//! that the I/O moved. **Invalidation.** Every write, discard and zeroing of s replaces or drops the copy of s before
//! it is carried out. \[LS07\] §3; the hash is an addition: guests that decrypt in place break the other rules without
//! a notification.
//!
//! **Delayed writes** are in the [dirty log](DirtyPages) alone until storage has them. The guest still holds such a page, so
//! a copy in the cache would displace one that is nowhere else; it is admitted like any other page, when it is evicted.

mod admission;
mod failures;
mod read;
mod transfer;
mod write;
mod write_back;

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState as FastState;
use plimsoll_hcache::Error;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::admission::InspectionCounts;
use self::failures::Failures;
use self::transfer::Piece;

use crate::buffers::Buffers;
use crate::busy::{BusyBlocks, Use};
use crate::cache::Cache;
use crate::dirty::{Dirty, PagesInMemory, WriteNumber};
use crate::frames::{FrameContents, Frames, Ticket};
use crate::sys::Arena;
use crate::{
    Action, Buffer, ByteRange, CacheMode, Contents, DirtyPages, DiskNumber, EngineOptions,
    EngineStats, GuestData, Location, Notice, Observer, Operation, PAGE_BYTES, Page, Request,
    RequestResult, ServedImages, Status, Submission, SubmissionId, Tag,
};

pub use self::failures::StorageErrors;

/// Maximum number of bytes of one submission to storage.
const SUBMISSION_BYTES_MAX: usize = 1 << 20;

/// The observer is not notified of ranges longer than this (256 MiB).
const OBSERVED_BLOCKS_MAX: u64 = 1 << 16;

/// Decides about a VM's requests: the cache, and I/O submissions to the storage of its disks.
pub struct Engine {
    options: EngineOptions,
    seed: u64,
    frames: Frames,
    cache: Option<Cache>,
    dirty: Dirty,
    log: Box<dyn DirtyPages>,
    observer: Option<Box<dyn Observer>>,
    images: ServedImages,
    busy: BusyBlocks,
    requests: HashMap<RequestId, PendingRequest, FastState>,
    submissions: HashMap<SubmissionId, (DiskNumber, Outstanding), FastState>,
    failures: Failures,
    flushes: Vec<Flush>,
    /// Disks whose storage once failed to make writes stable. The kernel reports such a failure only once and may have
    /// dropped the writes, so no flush of such a disk can succeed any more.
    unsynced: HashSet<DiskNumber>,
    /// Disks with a sync in flight. There is one at a time: the kernel tells of a failure once, and of two syncs only one
    /// would learn that both have failed.
    syncing: HashSet<DiskNumber>,
    fills: usize,
    ready: VecDeque<Submission>,
    completed: VecDeque<RequestResult>,
    buffers: Buffers,
    scratch: Box<Page>,
    next_number: u64,
    now: Duration,
    disabled: Option<String>,
    looks: InspectionCounts,
    stats: EngineStats,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RequestId(u64);

/// A request that is not completed.
struct PendingRequest {
    disk: DiskNumber,
    tag: Tag,
    /// Submissions it waits for, plus 1 while it is being inspected.
    left: u32,
    failed: bool,
    /// Which dirty blocks of the disk must be stable before it completes, with all that was written through.
    flush: Option<FlushOf>,
    /// Whether it reads blocks from storage.
    reads_storage: bool,
}

#[derive(Debug, Clone, Copy)]
enum FlushOf {
    /// All that there are when the rest of the request is done.
    All,
    /// Those up to this write.
    Upto(WriteNumber),
}

/// A request that waits for dirty blocks.
struct Flush {
    request: RequestId,
    disk: DiskNumber,
    upto: WriteNumber,
}

/// The purpose of a submission.
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
        offset: u64,
    },
    /// A sync, for these flushes.
    Sync {
        disk: DiskNumber,
        requests: Vec<RequestId>,
    },
    /// A change of a range; of one that zeroes, the range and whether to free it.
    Change {
        request: RequestId,
        zeroed: Option<(ByteRange, bool)>,
    },
    /// Dirty blocks.
    WriteBack {
        disk: DiskNumber,
        blocks: Vec<Location>,
    },
    /// A page for the cache ([`CacheMode::FromStorage`]).
    Fill { location: Location },
    /// Compares a page served from the cache, of this hash, with storage.
    Verify { location: Location, hash: u64 },
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
            options,
            seed: RandomState::new().hash_one(0),
            frames: Frames::new(),
            cache,
            dirty: Dirty::default(),
            log: Box::new(PagesInMemory::default()),
            observer,
            images: ServedImages::default(),
            busy: BusyBlocks::default(),
            requests: HashMap::default(),
            submissions: HashMap::default(),
            failures: Failures::default(),
            flushes: Vec::new(),
            unsynced: HashSet::new(),
            syncing: HashSet::new(),
            fills: 0,
            ready: VecDeque::new(),
            completed: VecDeque::new(),
            buffers: Buffers::default(),
            scratch: Box::new([0; PAGE_BYTES]),
            next_number: 0,
            now: Duration::ZERO,
            disabled: None,
            looks: InspectionCounts::default(),
            stats: EngineStats::default(),
        })
    }

    /// Keeps dirty pages in this log, so that they outlive the process. Without one, they are in memory of the engine's own.
    /// To be called before the first request.
    pub fn set_dirty_log(&mut self, log: Box<dyn DirtyPages>) {
        self.log = log;
    }

    /// Takes buffers of the ring's registered memory.
    pub(crate) fn use_arena(&mut self, arena: Arc<Arena>) {
        self.buffers.set_arena(arena);
    }

    /// Records in `images` what is read from storage.
    pub fn record_reads(&mut self, images: ServedImages) {
        self.images = images;
    }

    /// Serves and writes a page of the log that an earlier process had acknowledged, and could not write. To be called
    /// before the first request. Returns whether that is possible: not without a cache.
    pub fn restore(&mut self, location: Location) -> bool {
        if self.cache.is_none() {
            return false;
        }
        self.dirty.write(location, self.now);
        self.dirty.fail(location);
        true
    }

    /// Lets all flushes of the disk fail: its storage failed to make earlier writes stable.
    pub fn sync_failed(&mut self, disk: DiskNumber) {
        self.unsynced.insert(disk);
    }

    /// The disks whose storage failed to make writes stable.
    pub fn unsynced(&self) -> &HashSet<DiskNumber> {
        &self.unsynced
    }

    /// Submits a guest's request. All notifications that the guest sent before it must have been passed on first.
    pub fn submit(&mut self, request: Request) {
        let Request {
            disk,
            tag,
            operation,
            ram,
        } = request;
        let id = RequestId(self.number());
        let running = PendingRequest {
            disk,
            tag,
            left: 1,
            failed: false,
            flush: None,
            reads_storage: false,
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
                self.want_flush(id, FlushOf::All);
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
                    self.want_flush(id, FlushOf::All);
                }
            }
        }
        self.part_done(id, true);
        self.pump();
    }

    /// A notification of the guest, in the order of its ring. An eviction has `contents`.
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

    /// Drops the frame tables, because notifications were lost or another kernel runs in the guest.
    pub fn forget_frames(&mut self) {
        self.frames.clear();
        self.stats.forgotten += 1;
    }

    /// How many blocks of a disk are in the log and not yet on storage.
    pub fn dirty_pages(&self, disk: DiskNumber) -> u64 {
        self.dirty.of_disk(disk) as u64
    }

    /// Drops everything cached of a disk and its frame entries: the guest is gone, and others may write to its storage.
    /// What is not on storage yet stays.
    pub fn forget_disk(&mut self, disk: DiskNumber) {
        self.frames.forget_where(|location| location.disk() == disk);
        if let Some(cache) = &self.cache {
            cache.drop_range(disk, 0, Location::BLOCKS_MAX - 1);
        }
        if let Some(observer) = &mut self.observer {
            observer.cleared();
        }
    }

    /// Processes the result of a submission. A transfer that moved fewer bytes than requested has failed.
    pub fn carried_out(
        &mut self,
        submission: SubmissionId,
        result: io::Result<()>,
        buffer: Option<Buffer>,
    ) {
        let Some((disk, outstanding)) = self.submissions.remove(&submission) else {
            return;
        };
        let over = match result {
            Ok(()) => Some((outstanding, buffer, true)),
            Err(error) => {
                let pauses = self.failed(disk, &error);
                let over = match (&outstanding, pauses) {
                    (Outstanding::WriteBack { blocks, .. }, _) if blocks.len() == 1 => {
                        match pauses {
                            true => self.halt(blocks[0]),
                            false => _ = self.no_longer_halts(blocks[0]),
                        }
                        Some((outstanding, buffer))
                    }
                    (_, true) => self.hold(submission, disk, outstanding, buffer),
                    (_, false) => Some((outstanding, buffer)),
                };
                over.map(|(outstanding, buffer)| (outstanding, buffer, false))
            }
        };
        if let Some((outstanding, buffer, ok)) = over {
            self.concluded(submission, outstanding, ok, buffer);
        }
        self.pump();
    }

    /// Processes an order that is over: done, or failed.
    fn concluded(
        &mut self,
        submission: SubmissionId,
        outstanding: Outstanding,
        ok: bool,
        buffer: Option<Buffer>,
    ) {
        self.no_longer_held(submission, ok);
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
                ..
            } => {
                self.was_written(&pieces, ticket, ok);
                self.part_done(request, ok);
            }
            Outstanding::Sync { disk, requests } => {
                self.syncing.remove(&disk);
                if !ok {
                    self.unsynced.insert(disk);
                }
                for request in requests {
                    self.part_done(request, ok);
                }
            }
            Outstanding::Change { request, .. } => {
                self.busy.end_wide(submission);
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
                // Unless it was written meanwhile, or the guest has released it.
                let newest = self.frames.newest(location);
                let unchanged = newest.and_then(|frame| self.frames.held(frame))
                    == Some(FrameContents::Contents(location, hash));
                if unchanged && ok && self.hash(bytes) != hash {
                    self.stats.wrong_served += 1;
                }
            }
        }
        if let Some(buffer) = buffer {
            self.buffers.give_back(buffer);
        }
    }

    /// The next I/O to submit to storage.
    pub fn next_submission(&mut self) -> Option<Submission> {
        self.ready.pop_front()
    }

    /// The next completed request.
    pub fn next_completed(&mut self) -> Option<RequestResult> {
        self.completed.pop_front()
    }

    /// Statistics of the engine.
    pub fn stats(&self) -> EngineStats {
        let (cached_pages, dropped) = self.cache.as_ref().map_or((0, 0), Cache::pages);
        EngineStats {
            mode: self.options.mode,
            write: self.options.write,
            disabled: self.disabled.clone(),
            cache_bytes: self.cache.as_ref().map_or(0, Cache::capacity_bytes),
            cached_pages,
            dirty_pages: self.dirty.len() as u64,
            dirty_pages_max: self.dirty_max() as u64,
            mapped_frames: self.frames.known(),
            dropped,
            wants_pause: self.wants_pause(),
            ..self.stats.clone()
        }
    }

    /// Changes the memory of the cache, in bytes, by a step of about a millisecond; to be repeated until it returns `true`.
    /// Requests are served between the steps. The size in the [statistics](Self::stats) is the memory that may be in
    /// use, and falls as it is returned to the kernel. A reduction that was begun is finished before one to another size
    /// begins.
    ///
    /// # Errors
    /// If it is too small or too large; the cache is then unchanged. If operations in progress hold its memory; the next step
    /// goes on.
    pub fn resize_step(&mut self, cache_bytes: u64) -> Result<bool, Error> {
        let Some(cache) = &self.cache else {
            return Err(Error::CapacityTooLarge {
                asked_bytes: cache_bytes,
                most_bytes: 0,
            });
        };
        cache.resize_step(cache_bytes)
    }

    /// Restarts a cache that disabled itself, and lets flushes of disks that failed to sync succeed again.
    pub fn enable(&mut self) {
        self.unsynced.clear();
        self.disabled = None;
        self.looks = InspectionCounts::default();
    }

    /// To be called periodically (every 100 ms): writes back blocks that have been dirty for too long. `now` counts
    /// from the engine's start.
    pub fn turn(&mut self, now: Duration) {
        self.now = now;
        self.repeat();
        self.pump();
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn hash(&self, bytes: &[u8]) -> u64 {
        xxh3_64_with_seed(bytes, self.seed)
    }

    /// Whether the frame tables are needed.
    fn knows_frames(&self) -> bool {
        self.cache.is_some() && self.disabled.is_none()
    }

    fn dirty_max(&self) -> usize {
        usize::try_from(self.options.dirty_pages_max).unwrap_or(usize::MAX)
    }

    /// Submits I/O to storage.
    fn submit_io(
        &mut self,
        disk: DiskNumber,
        action: Action,
        outstanding: Outstanding,
    ) -> SubmissionId {
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
            | Outstanding::Change { request, .. } => Some(*request),
            _ => None,
        };
        if let Some(running) = request.and_then(|request| self.requests.get_mut(&request)) {
            running.left += 1;
        }
        let id = SubmissionId(self.number());
        self.submissions.insert(id, (disk, outstanding));
        self.ready.push_back(Submission { id, disk, action });
        id
    }

    /// Records that part of a request completed.
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
        if let Some(flush) = running.flush.take()
            && !running.failed
        {
            running.left = 1;
            let upto = match flush {
                FlushOf::All => {
                    self.dirty.retry(Some(disk));
                    self.dirty.last()
                }
                FlushOf::Upto(upto) => upto,
            };
            self.flushes.push(Flush {
                request,
                disk,
                upto,
            });
            return;
        }
        let status = if running.failed {
            Status::IoError
        } else {
            Status::Ok
        };
        let result = RequestResult {
            disk,
            tag: running.tag,
            status,
            read_storage: running.reads_storage,
        };
        self.requests.remove(&request);
        self.completed.push_back(result);
    }

    fn want_flush(&mut self, request: RequestId, flush: FlushOf) {
        if let Some(running) = self.requests.get_mut(&request) {
            running.flush = Some(flush);
        }
    }

    fn fail(&mut self, request: RequestId) {
        if let Some(running) = self.requests.get_mut(&request) {
            running.failed = true;
        }
    }
}

#[cfg(test)]
mod tests;
