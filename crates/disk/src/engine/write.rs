//! Writes, discards and zeroing: through to storage, or into the log as dirty pages.

use std::sync::Arc;

use super::transfer::{BLOCK, Blocks, Piece, Run, copy_from, frame_of, index, stretches};
use super::{Engine, FlushOf, OBSERVED_BLOCKS_MAX, Outstanding, RequestId, SUBMISSION_BYTES_MAX};

use crate::busy::Use;
use crate::dirty::WriteNumber;
use crate::frames::{FrameContents, Ticket};
use crate::segments::Cursor;
use crate::{
    Action, ByteRange, DiskNumber, GuestData, Location, PAGE_BYTES, Page, Segment, WriteMode,
};

/// A dirty block cannot be written: the log or the guest's memory failed.
#[derive(Debug)]
struct CannotWrite;

impl Engine {
    pub(super) fn write(
        &mut self,
        request: RequestId,
        disk: DiskNumber,
        ram: &Arc<dyn GuestData>,
        offset: u64,
        segments: &[Segment],
        durable: bool,
    ) {
        if durable {
            // By a sync, which learns of all failures: the kernel may tell one of several writes of one.
            self.want_flush(request, FlushOf::Upto(WriteNumber::default()));
        }
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
            let frame = frame_of(&parts, whole, &**ram);
            self.stats.scattered_blocks += u64::from(whole && frame.is_none());
            let is_dirty = self.dirty.contains(location);
            let delay = is_dirty
                || (whole
                    && !durable
                    && self.options.write == WriteMode::Delayed
                    && self.knows_frames()
                    && self.dirty.len() < self.dirty_max());
            if delay {
                match self.write_dirty(location, &**ram, &parts, within.start, frame) {
                    Ok(true) => {
                        if durable {
                            self.want_flush(request, FlushOf::Upto(self.dirty.last()));
                        }
                        self.write_run(request, disk, ram, &mut run, within.end());
                        continue;
                    }
                    // The log does not take it.
                    Ok(false) => {}
                    Err(_) => {
                        self.fail(request);
                        self.write_run(request, disk, ram, &mut run, within.end());
                        continue;
                    }
                }
            }
            if let Some(cache) = &self.cache {
                cache.drop_page(location);
                self.frames.forget(location);
            }
            run.add(location, &parts, frame);
            if run.bytes >= SUBMISSION_BYTES_MAX {
                self.write_run(request, disk, ram, &mut run, within.end());
            }
        }
        self.write_run(request, disk, ram, &mut run, 0);
    }

    /// Writes a block, or from `start` on a part of a dirty one, into the log. Returns whether that was done;
    /// never `Ok(false)` for a dirty block.
    fn write_dirty(
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
            if !whole {
                (self.log.read(location, &mut page)).map_err(|_| CannotWrite)?;
            }
            copy_from(ram, parts.iter().copied(), &mut page[start..]).map_err(|_| CannotWrite)?;
            self.store_dirty(location, &page)
        })();
        if matches!(result, Ok(true)) {
            if let Some(frame) = frame.filter(|_| self.disabled.is_none()) {
                let hash = self.hash(&page[..]);
                self.frames
                    .set(frame, FrameContents::Contents(location, hash));
            } else {
                self.frames.forget(location);
                self.release_frames(parts);
            }
            self.stats.delayed_blocks += 1;
        }
        result
    }

    /// Makes a page the newest contents of a block: in the log, and no more in the cache.
    fn store_dirty(&mut self, location: Location, page: &Page) -> Result<bool, CannotWrite> {
        if self.log.record(location, page).is_err() {
            self.stats.storage_errors += 1;
            return if self.dirty.contains(location) {
                Err(CannotWrite)
            } else {
                Ok(false)
            };
        }
        if let Some(cache) = &self.cache {
            cache.drop_page(location);
        }
        self.dirty.write(location, self.now);
        self.busy.disturb(location);
        Ok(true)
    }

    /// Submits the write of the collected blocks, and starts a new run at `next`.
    fn write_run(
        &mut self,
        request: RequestId,
        disk: DiskNumber,
        ram: &Arc<dyn GuestData>,
        run: &mut Run,
        next: u64,
    ) {
        let mut run = std::mem::replace(run, Run::new(next));
        if run.bytes == 0 {
            return;
        }
        let mut buffer = self.buffers.take(run.bytes);
        if copy_from(&**ram, stretches(&run.pieces), &mut buffer).is_err() {
            self.buffers.give_back(buffer);
            self.fail(request);
            return;
        }
        let ticket = Ticket(self.number());
        self.begin_pieces(&run.pieces, ticket, Use::Write);
        if self.knows_frames() {
            // Hash the buffer that is written, because the guest may change its memory meanwhile.
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
        };
        let outstanding = Outstanding::Write {
            request,
            pieces: run.pieces,
            ticket,
            offset: run.offset,
        };
        self.submit_io(disk, action, outstanding);
    }

    pub(super) fn was_written(&mut self, pieces: &[Piece], ticket: Ticket, ok: bool) {
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

    pub(super) fn discard(&mut self, request: RequestId, disk: DiskNumber, range: ByteRange) {
        if range.bytes == 0 {
            return;
        }
        if self.cache.is_some() {
            let touched = Blocks::touched(range);
            self.forget_blocks(disk, touched);
            let mut halted = false;
            for location in self.dirty_in(disk, touched) {
                // Contents may be anything from now on: even what is being written, and what was to be.
                if Blocks::within(range).contains(location) && self.dirty.drop_block(location) {
                    self.log.clean(location);
                    halted |= self.no_longer_halts(location);
                }
            }
            if halted {
                self.tell_flushes(disk);
            }
            self.drop_cached(disk, touched);
        }
        self.change(request, disk, range, Action::Discard(range));
    }

    pub(super) fn zero(
        &mut self,
        request: RequestId,
        disk: DiskNumber,
        range: ByteRange,
        unmap: bool,
    ) {
        if range.bytes == 0 {
            return;
        }
        if self.cache.is_some() {
            let touched = Blocks::touched(range);
            self.forget_blocks(disk, touched);
            for location in self.dirty_in(disk, touched) {
                // Zeros are written after any write of it in progress.
                if self.zero_dirty(location, range).is_err() {
                    self.fail(request);
                    return;
                }
            }
            self.drop_cached(disk, touched);
        }
        self.change(request, disk, range, Action::Zero { range, unmap });
    }

    /// Zeroes the part of a dirty block that lies in the range.
    fn zero_dirty(&mut self, location: Location, range: ByteRange) -> Result<(), CannotWrite> {
        let begin = location.block() * BLOCK;
        let from = range.offset.saturating_sub(begin).min(BLOCK);
        let to = (range.offset + range.bytes)
            .saturating_sub(begin)
            .min(BLOCK);
        let mut page = [0; PAGE_BYTES];
        (self.log.read(location, &mut page)).map_err(|_| CannotWrite)?;
        page[index(from)..index(to)].fill(0);
        self.store_dirty(location, &page).map(|_| ())
    }

    /// Submits a change of a range.
    fn change(&mut self, request: RequestId, disk: DiskNumber, range: ByteRange, action: Action) {
        let zeroed = match action {
            Action::Zero { range, unmap } => Some((range, unmap)),
            _ => None,
        };
        let submission = self.submit_io(disk, action, Outstanding::Change { request, zeroed });
        if self.cache.is_some() {
            let Blocks { first, end } = Blocks::touched(range);
            self.busy.begin_wide(submission, disk, first, end - 1);
        }
    }

    /// Removes the frame entries of these blocks.
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

    /// Drops the cached pages of these blocks.
    fn drop_cached(&self, disk: DiskNumber, blocks: Blocks) {
        if let Some(cache) = &self.cache
            && blocks.count() > 0
        {
            cache.drop_range(disk, blocks.first, blocks.end - 1);
        }
    }
}
