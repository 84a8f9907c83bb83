//! Reads: blocks from the cache, and the others from storage.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::transfer::{BLOCK, Piece, Run, copy_to, frame_of, stretches};
use super::{Engine, Outstanding, RequestId, SUBMISSION_BYTES_MAX};

use crate::busy::Use;
use crate::frames::{FrameContents, Ticket};
use crate::segments::Cursor;
use crate::{Action, DiskNumber, GuestData, Location, PAGE_BYTES, Segment};

/// A block in the daemon's memory cannot be served: the log or the guest's memory failed.
#[derive(Debug)]
struct CannotServe;

impl Engine {
    pub(super) fn read(
        &mut self,
        request: RequestId,
        disk: DiskNumber,
        ram: &Arc<dyn GuestData>,
        offset: u64,
        segments: &[Segment],
    ) {
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
            let frame = frame_of(&parts, whole, &**ram);
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
                if run.bytes >= SUBMISSION_BYTES_MAX {
                    self.read_run(request, disk, ram, &mut run, within.end());
                }
            }
        }
        self.read_run(request, disk, ram, &mut run, 0);
    }

    /// Serves a whole block from the cache or the log, if it is there.
    fn serve(
        &mut self,
        location: Location,
        ram: &dyn GuestData,
        parts: &[Segment],
        frame: Option<u64>,
    ) -> Option<Result<(), CannotServe>> {
        let cache = self.cache.as_ref()?;
        let is_dirty = self.dirty.contains(location);
        let seed = self.seed;
        let mut hash = 0;
        let mut copied = Ok(());
        let found = cache.take(location, |page| {
            copied = copy_to(ram, parts.iter().copied(), page);
            hash = xxh3_64_with_seed(page, seed);
        });
        if !found {
            if !is_dirty {
                return None;
            }
            if self.log.read(location, &mut self.scratch).is_err() {
                return Some(Err(CannotServe));
            }
            copied = copy_to(ram, parts.iter().copied(), &self.scratch[..]);
            hash = self.hash(&self.scratch[..]);
        }
        self.stats.hits += 1;
        if let Some(frame) = frame.filter(|_| copied.is_ok() && self.disabled.is_none()) {
            self.frames
                .set(frame, FrameContents::Contents(location, hash));
        } else {
            self.release_frames(parts);
        }
        if self.options.verify && !is_dirty {
            let action = Action::Read {
                offset: location.block() * BLOCK,
                buffer: self.buffers.take(PAGE_BYTES),
            };
            let verify = Outstanding::Verify { location, hash };
            self.submit_io(location.disk(), action, verify);
        }
        Some(copied.map_err(|_| CannotServe))
    }

    /// Serves part of a block from the log, if storage does not have its contents yet.
    fn serve_part(
        &mut self,
        location: Location,
        ram: &dyn GuestData,
        parts: &[Segment],
        start: usize,
    ) -> Option<Result<(), CannotServe>> {
        if !self.dirty.contains(location) {
            return None;
        }
        self.release_frames(parts);
        let read = self.log.read(location, &mut self.scratch);
        let copied =
            read.is_ok() && copy_to(ram, parts.iter().copied(), &self.scratch[start..]).is_ok();
        Some(copied.then_some(()).ok_or(CannotServe))
    }

    pub(super) fn release_frames(&mut self, parts: &[Segment]) {
        for part in parts {
            let last = part
                .address
                .saturating_add(u64::from(part.bytes).saturating_sub(1));
            for frame in part.address / BLOCK..=last / BLOCK {
                self.frames.release(frame);
            }
        }
    }

    /// Submits the read of the collected blocks, and starts a new run at `next`.
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
        if let Some(running) = self.requests.get_mut(&request) {
            running.reads_storage = true;
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
        self.submit_io(disk, action, outstanding);
    }

    pub(super) fn begin_pieces(&mut self, pieces: &[Piece], ticket: Ticket, what: Use) {
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
                    .set(frame, FrameContents::Pending(piece.location, ticket)),
                None => self.release_frames(&[piece.segment()]),
            }
        }
    }

    /// Copies the data read to the guest; `None` if reading failed. Returns whether all copies succeeded.
    pub(super) fn was_read(
        &mut self,
        ram: &dyn GuestData,
        pieces: &[Piece],
        ticket: Ticket,
        bytes: Option<&[u8]>,
    ) -> bool {
        if let Some(bytes) = bytes {
            self.record_whole_blocks(pieces, bytes);
        }
        let copied = bytes.is_some_and(|bytes| copy_to(ram, stretches(pieces), bytes).is_ok());
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

    /// Records the blocks that were read as a whole, for pools of images.
    fn record_whole_blocks(&self, pieces: &[Piece], bytes: &[u8]) {
        let Some(first) = pieces.first() else { return };
        let disk = first.location.disk();
        if !self.images.records(disk) {
            return;
        }
        // The pieces are consecutive; only the first block and the last one may be partial.
        let mut at = 0;
        for block in pieces.chunk_by(|one, next| one.location == next.location) {
            let length: usize = block.iter().map(|piece| piece.bytes as usize).sum();
            if length == PAGE_BYTES {
                let block = block[0].location.block();
                self.images.was_read(disk, block, &bytes[at..at + length]);
            }
            at += length;
        }
    }
}
