//! Puts: pages stored under new handles, replaced, and stored once where contents are equal.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::pool::PoolMember;
use super::{CHUNK_PAGES, Need, PAGE_CHARGE_BYTES, RAW_BYTES, Shard, WORD_BYTES, pool_in, some};

use crate::arena::{Frames, NoFrame};
use crate::contents::{ShareResult, repeated_word};
use crate::descriptor::{Descriptor, IDS, Owner, Place};
use crate::sync::Ordering;
use crate::table::ObjectRef;
use crate::{ClientId, Error, EventKind, Handle, PAGE_BYTES, Page, PutOutcome, Sharing};

/// A put in progress.
pub(crate) struct Put<F> {
    pub(crate) hash: u64,
    pub(crate) handle: Handle,
    /// Writes the page, if it does not come in a frame.
    pub(crate) fill: Option<F>,
    /// The object found by the prefetch.
    pub(crate) object: ObjectRef,
    /// A frame with the page, until the store takes it.
    pub(crate) frame: Option<u32>,
    pub(crate) counted: bool,
}

impl Shard {
    /// Puts a page, or returns what it needs first. In that case an older page stays.
    pub(crate) fn put<F: FnOnce(&mut Page)>(
        &mut self,
        client: ClientId,
        put: &mut Put<F>,
    ) -> Result<Result<PutOutcome, Need>, Error> {
        let found = self.find_pool(client, put.handle.pool)?;
        let slot = found.slot;
        if let (None, Some(frame)) = (put.frame, self.magazine.next()) {
            self.common.slab.prefetch(frame);
        }
        if !put.counted {
            put.counted = true;
            self.counters(found).puts += 1;
            self.observe(client, slot, put.hash, put.handle.index, EventKind::Put);
            self.prefetch_ghosts(put.hash, put.handle.index);
        }
        let key = put.handle.key();
        if !self.table.is(put.object, key, &self.descriptors) {
            put.object = self.table.find(put.hash, key, &self.descriptors);
        }
        let root = put.object.some().map(|object| self.table.root(object));
        let older =
            root.and_then(|root| some(self.tree.find(root, put.handle.index, &self.descriptors)));
        let outcome = match older {
            Some(older) => self.replace(found, older, put),
            None => self.insert(found, put),
        };
        self.publish(slot);
        Ok(outcome)
    }

    /// Replaces a page's contents. If it needs something first, the older contents stay.
    pub(super) fn replace<F: FnOnce(&mut Page)>(
        &mut self,
        found: PoolMember,
        id: u32,
        put: &mut Put<F>,
    ) -> Result<PutOutcome, Need> {
        let slot = found.slot;
        if let Place::Frame(older) = self.descriptors[id].place() {
            self.use_page(slot, id);
            if let Some(frame) = put.frame.take() {
                self.magazine.give(older);
                self.descriptors[id].set_place(Place::Frame(frame));
            }
        } else {
            let account = &self.pool(slot).account;
            if !account.try_charge(PAGE_BYTES as u64) {
                return Err(Need::Ceiling(account.clone()));
            }
            let Some(frame) = put.frame.take().or_else(|| self.magazine.take()) else {
                self.pool(slot).account.charge(-RAW_BYTES);
                return Err(Need::Frames);
            };
            self.use_page(slot, id);
            self.vacate(slot, id);
            self.pool(slot).charged_bytes += RAW_BYTES;
            self.descriptors[id].set_place(Place::Frame(frame));
        }
        self.descriptors[id].set_incompressible(false);
        self.counters(found).puts_replaced += 1;
        self.fill(slot, id, put);
        if self.common.sharing != Sharing::Off {
            self.share(found, id);
        }
        Ok(PutOutcome::Stored { replaced: true })
    }

    /// Calls the caller's function to write a page's frame. If it panics, the page is dropped and the panic continues.
    pub(super) fn fill<F: FnOnce(&mut Page)>(&mut self, slot: usize, id: u32, put: &mut Put<F>) {
        let Place::Frame(frame) = self.descriptors[id].place() else {
            unreachable!("pages are filled in frames")
        };
        let Some(fill) = put.fill.take() else { return };
        let slab = self.common.slab.clone();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| slab.write(frame, fill))) {
            self.remove_page(slot, id);
            self.publish(slot);
            resume_unwind(panic);
        }
    }

    /// Inserts a page that is not there.
    pub(super) fn insert<F: FnOnce(&mut Page)>(
        &mut self,
        found: PoolMember,
        put: &mut Put<F>,
    ) -> Result<PutOutcome, Need> {
        let slot = found.slot;
        let pool = self.pool(slot);
        if !pool.totals.try_add_page() {
            return Err(Need::PoolCapacity(pool.totals.clone()));
        }
        if !pool.account.try_charge(PAGE_CHARGE_BYTES) {
            pool.totals.remove_page();
            return Err(Need::Ceiling(pool.account.clone()));
        }
        match self.insert_descriptor(slot, put) {
            Ok(id) => {
                let pool = self.pool(slot);
                pool.charged_bytes += PAGE_CHARGE_BYTES.cast_signed();
                self.fill(slot, id, put);
                if self.common.sharing != Sharing::Off {
                    self.share(found, id);
                }
                Ok(PutOutcome::Stored { replaced: false })
            }
            Err(NoFrame) => {
                let pool = self.pool(slot);
                pool.totals.remove_page();
                pool.account.charge(-PAGE_CHARGE_BYTES.cast_signed());
                Err(Need::Frames)
            }
        }
    }

    /// Inserts a page with an empty frame. On failure nothing is changed.
    fn insert_descriptor<F>(&mut self, slot: usize, put: &mut Put<F>) -> Result<u32, NoFrame> {
        let index = put.handle.index;
        if self.descriptors.live() == IDS {
            return Err(NoFrame);
        }
        self.descriptors.ensure(1, &mut self.magazine)?;
        let brought = put.frame;
        let frame = brought.or_else(|| self.magazine.take()).ok_or(NoFrame)?;
        let stamp = self.next_stamp();
        let owner = Owner::Sole(put.handle.key());
        let page = Descriptor::new(owner, index, Place::Frame(frame), stamp);
        let id = self.descriptors.insert(page);
        let Self {
            table,
            tree,
            descriptors,
            magazine,
            ..
        } = self;
        if table
            .add_page(tree, descriptors, (put.hash, put.object), id, magazine)
            .is_err()
        {
            self.descriptors.remove(id);
            self.give_unless(brought, frame);
            return Err(NoFrame);
        }
        put.frame = None;
        let Self {
            pools,
            ghosts,
            common,
            ..
        } = self;
        let pool = pool_in(pools, slot);
        if put.object == ObjectRef::NONE {
            pool.objects += 1;
            if index >= CHUNK_PAGES {
                pool.totals.set_large();
            }
        }
        let mut remembered = false;
        if common.eviction.remembers {
            let pages = pool.ghosts.remembered(pool.pages());
            let page_hash = common.page_hash(put.hash, index);
            remembered = ghosts.take(page_hash, &pool.ghosts, pages);
        }
        let pages = pool.queue_pages();
        let queue = pool.policy.enter(remembered, pages);
        self.append(slot, id, queue.index());
        Ok(id)
    }

    /// Releases a frame, unless it is the caller's.
    fn give_unless(&mut self, brought: Option<u32>, frame: u32) {
        if brought.is_none() {
            self.magazine.give(frame);
        }
    }

    /// Removes the frame of a page that was just filled, if its content allows it to be stored without one.
    fn share(&mut self, found: PoolMember, id: u32) {
        let slot = found.slot;
        let Place::Frame(frame) = self.descriptors[id].place() else {
            return;
        };
        let across = self.common.sharing == Sharing::AcrossClients;
        let pool = self.pool(slot);
        let domain = if across { 0 } else { pool.domain };
        // Pages without frames must not fill the store with metadata alone.
        let shards_metadata = self.metadata_frames() * self.common.shards;
        if shards_metadata * 8 > self.common.top.load(Ordering::Relaxed) as usize {
            return;
        }
        let common = self.common.clone();
        if let Some(word) = common.slab.read(frame, repeated_word) {
            self.magazine.give(frame);
            self.descriptors[id].set_place(Place::Word(word));
            self.counters(found).shared_pages += 1;
            let pool = self.pool(slot);
            pool.charge(WORD_BYTES.cast_signed() - RAW_BYTES);
            pool.frameless += 1;
            return;
        }
        let shared = common.contents.share(&common.slab, domain, frame);
        let (ShareResult::Existing(entry) | ShareResult::New(entry)) = shared;
        self.descriptors[id].set_place(Place::Shared(entry.0));
        self.pool(slot).frameless += 1;
        if let ShareResult::Existing(_) = shared {
            self.magazine.give(frame);
            self.counters(found).shared_pages += 1;
            // If clients share it, the frame has no single owner: each is charged for it.
            if !across {
                self.pool(slot).charge(-RAW_BYTES);
            }
        }
    }
}
