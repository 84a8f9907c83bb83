//! Writing dirty pages back, for flushes, for their age, and to make room.

use std::collections::BTreeMap;

use super::transfer::BLOCK;
use super::{Engine, Flush, Outstanding, RequestId};

use crate::dirty::WriteBackResult;
use crate::{Action, DiskNumber, Location, PAGE_BYTES, Page};

/// Maximum number of blocks written back by one submission, and of blocks being written back at a time.
const WRITE_BACK_BLOCKS: usize = 64;

const WRITING_BLOCKS_MAX: usize = 16 * WRITE_BACK_BLOCKS;

impl Engine {
    /// Starts everything that can start: flushes whose blocks are written, and write-backs.
    pub(super) fn pump(&mut self) {
        let (dirty, syncing) = (&self.dirty, &self.syncing);
        let mut written: BTreeMap<DiskNumber, Vec<RequestId>> = BTreeMap::new();
        for flush in self.flushes.extract_if(.., |flush| {
            !syncing.contains(&flush.disk) && dirty.is_written(flush.disk, flush.upto)
        }) {
            written.entry(flush.disk).or_default().push(flush.request);
        }
        for (disk, requests) in written {
            if self.unsynced.contains(&disk) {
                for request in requests {
                    self.part_done(request, false);
                }
            } else {
                self.syncing.insert(disk);
                self.submit_io(disk, Action::Sync, Outstanding::Sync { disk, requests });
            }
        }
        while self.dirty.writing() < WRITING_BLOCKS_MAX {
            let Some(location) = self.next_to_write() else {
                break;
            };
            self.write_back(location);
        }
    }

    /// The block to be written back next, if any.
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
        // What failed before holds nobody up: it is tried again, one by one.
        let again = self.dirty.again().find(can);
        if again.is_some() {
            return again;
        }
        let many = self.dirty.len() - self.dirty.writing() > self.dirty_max() / 2;
        if many || self.disabled.is_some() {
            return self.dirty.oldest_of_all().filter(can);
        }
        let then = self.now.checked_sub(self.options.dirty_age_max)?;
        self.dirty.born_before(then).find(can)
    }

    /// Submits the write of a dirty block and of those that follow it.
    fn write_back(&mut self, first: Location) {
        let disk = first.disk();
        let mut locations = vec![first];
        // A block that failed is written alone, so that it keeps no neighbour from storage.
        while !self.dirty.has_failed(first) && locations.len() < WRITE_BACK_BLOCKS {
            let next = Location::new(disk, first.block() + locations.len() as u64);
            if !self.dirty.waits(next) || self.busy.is_written(next) || self.dirty.has_failed(next)
            {
                break;
            }
            locations.push(next);
        }
        let mut buffer = self.buffers.take(locations.len() * PAGE_BYTES);
        let pages = buffer.chunks_exact_mut(PAGE_BYTES);
        let mut read = locations.iter().zip(pages).map(|(location, bytes)| {
            let page = <&mut Page>::try_from(bytes).expect("of a page's length");
            self.log.read(*location, page)
        });
        let readable = read.position(|read| read.is_err());
        let blocks = match readable {
            None => locations,
            Some(0) => {
                // As if storage had refused it: it stays dirty, and flushes fail.
                self.buffers.give_back(buffer);
                self.dirty.start(first);
                self.was_written_back(disk, &[first], false);
                return;
            }
            // What cannot be read is written alone, later.
            Some(count) => {
                buffer.set_len(count * PAGE_BYTES);
                locations[..count].to_vec()
            }
        };
        for location in &blocks {
            self.dirty.start(*location);
        }
        let action = Action::Write {
            offset: first.block() * BLOCK,
            buffer,
        };
        self.submit_io(disk, action, Outstanding::WriteBack { disk, blocks });
    }

    pub(super) fn was_written_back(&mut self, disk: DiskNumber, blocks: &[Location], ok: bool) {
        let mut halted = false;
        for &location in blocks {
            let had_failed = self.dirty.has_failed(location);
            if had_failed == ok {
                self.failures.has_news();
            }
            let result = self.dirty.finish(location, ok, self.now);
            if ok || !self.dirty.has_failed(location) {
                halted |= self.no_longer_halts(location);
            }
            if result == WriteBackResult::StillDirty {
                continue;
            }
            self.stats.written_back_blocks += 1;
            self.log.clean(location);
        }
        if !ok && blocks.len() > 1 {
            // Perhaps one of them alone: each is tried by itself before anyone is told.
            self.dirty.retry(Some(disk));
            return;
        }
        self.stats.write_back_errors += u64::from(!ok);
        if halted || !ok {
            self.tell_flushes(disk);
        }
    }

    /// Fails the disk's flushes that wait for blocks.
    pub(super) fn fail_flushes(&mut self, disk: DiskNumber) {
        let dirty = &self.dirty;
        let waits =
            |flush: &mut Flush| flush.disk == disk && !dirty.is_written(flush.disk, flush.upto);
        let failed: Vec<_> = self.flushes.extract_if(.., waits).collect();
        for flush in failed {
            self.part_done(flush.request, false);
        }
    }
}
