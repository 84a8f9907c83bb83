//! Gets: pages read, removed, prefetched, and inspected without being used.

use super::{PAGE_CHARGE_BYTES, RAW_BYTES, Request, Shard, Step};

use crate::arena::Frames;
use crate::contents::EntryId;
use crate::descriptor::{Descriptor, Place};
use crate::{ClientId, Error, EventKind, Handle, PAGE_BYTES, Page, contents, packed};

impl Shard {
    /// Calls `read` with a page's contents.
    #[inline(always)]
    pub(super) fn read<R>(&mut self, id: u32, read: impl FnOnce(&Page) -> R) -> R {
        match self.descriptors[id].place() {
            Place::Frame(frame) => self.common.slab.read(frame, read),
            place => self.read_from(place, read),
        }
    }

    fn read_from<R>(&mut self, place: Place, read: impl FnOnce(&Page) -> R) -> R {
        let Self {
            common,
            packed,
            restored,
            ..
        } = self;
        match place {
            Place::Frame(frame) => common.slab.read(frame, read),
            Place::Shared(entry) => common.contents.read(&common.slab, EntryId(entry), read),
            Place::Word(word) => {
                contents::fill(restored, word);
                read(restored)
            }
            Place::Packed(place) => {
                let place = packed::Place(place);
                let whole = packed.read(&common.slab, place, |bytes| {
                    packed::decompress(bytes, restored)
                });
                assert!(whole, "a page that the store compressed decompresses");
                read(restored)
            }
        }
    }

    /// Gets a page.
    #[inline(always)]
    pub(crate) fn get(
        &mut self,
        client: ClientId,
        hash: u64,
        handle: &Handle,
        read: impl FnOnce(&Page),
    ) -> Result<bool, Error> {
        let found = self.find_pool(client, handle.pool)?;
        let slot = found.slot;
        self.counters(found).gets += 1;
        let Some(id) = self.find(hash, handle) else {
            self.observe(client, slot, hash, handle.index, EventKind::Missed);
            return Ok(false);
        };
        let descriptor = self.descriptors[id];
        if let Place::Frame(frame) = descriptor.place() {
            self.common.slab.prefetch(frame);
        }
        self.descriptors.prefetch(descriptor.older());
        self.descriptors.prefetch(descriptor.newer());
        let inclusive = self.pool(slot).inclusive;
        if !inclusive {
            self.prefetch_ghosts(hash, handle.index);
        }
        let kind = if inclusive {
            EventKind::Kept
        } else {
            EventKind::Hit
        };
        self.observe(client, slot, hash, handle.index, kind);
        let counters = self.counters(found);
        counters.hits += 1;
        counters.decompressed_pages += u64::from(matches!(descriptor.place(), Place::Packed(_)));
        // If `read` panics, the page stays as it is.
        self.read(id, read);
        if inclusive {
            self.use_page(slot, id);
            self.unpack(slot, id);
        } else {
            self.remove_page(slot, id);
            self.remember_taken(slot, hash, handle.index);
        }
        self.publish(slot);
        Ok(true)
    }

    /// Prefetches where a page is remembered, if the policy does that.
    #[inline(always)]
    pub(super) fn prefetch_ghosts(&self, hash: u64, index: u32) {
        if self.common.eviction.remembers {
            self.ghosts.prefetch(self.common.page_hash(hash, index));
        }
    }

    /// Remembers a page that a get took out, if the policy does.
    #[inline(always)]
    fn remember_taken(&mut self, slot: usize, hash: u64, index: u32) {
        if self.common.eviction.remembers && self.pool(slot).policy.remembers_taken() {
            self.remember(slot, self.common.page_hash(hash, index));
        }
    }

    /// Gets pages, one after the other. A page in a frame of its own that the get removes is returned with its
    /// frame, which then belongs to the caller; any other is passed to `read`, which is also called for those
    /// that are not there.
    pub(crate) fn get_frames(
        &mut self,
        client: ClientId,
        run: &[Request],
        mut taken: impl FnMut(usize, u32),
        mut read: impl FnMut(usize, Result<Option<&Page>, Error>),
    ) {
        // Pages removed from one pool and not yet refunded to its client.
        let mut credit = (usize::MAX, 0);
        for request in run {
            match self.take_frame(client, request) {
                Ok(Some((slot, frame))) => {
                    if slot != credit.0 {
                        self.give_credit(credit);
                        credit = (slot, 0);
                    }
                    credit.1 += 1;
                    taken(request.number, frame);
                }
                Ok(None) => {
                    // Before `read`, which may panic.
                    self.give_credit(std::mem::replace(&mut credit, (usize::MAX, 0)));
                    let found = self.get(client, request.hash, &request.handle, |page| {
                        read(request.number, Ok(Some(page)));
                    });
                    match found {
                        Ok(true) => {}
                        Ok(false) => read(request.number, Ok(None)),
                        Err(error) => read(request.number, Err(error)),
                    }
                }
                Err(error) => {
                    self.give_credit(std::mem::replace(&mut credit, (usize::MAX, 0)));
                    read(request.number, Err(error));
                }
            }
        }
        self.give_credit(credit);
    }

    /// Removes a page with its frame, if the get removes it and it is in a frame of its own.
    #[inline(always)]
    fn take_frame(
        &mut self,
        client: ClientId,
        request: &Request,
    ) -> Result<Option<(usize, u32)>, Error> {
        let found = self.find_pool(client, request.handle.pool)?;
        let slot = found.slot;
        if self.pool(slot).inclusive {
            return Ok(None);
        }
        let Some(id) = self.find_requested(request) else {
            return Ok(None);
        };
        let page = &self.descriptors[id];
        let Place::Frame(frame) = page.place() else {
            return Ok(None);
        };
        self.observe(
            client,
            slot,
            request.hash,
            request.handle.index,
            EventKind::Hit,
        );
        let counters = self.counters(found);
        counters.gets += 1;
        counters.hits += 1;
        self.detach(slot, id);
        self.descriptors.remove(id);
        self.remember_taken(slot, request.hash, request.handle.index);
        self.publish(slot);
        Ok(Some((slot, frame)))
    }

    /// Refunds the charges of the pages removed.
    fn give_credit(&mut self, (slot, pages): (usize, u64)) {
        if pages > 0 {
            let pool = self.pool(slot);
            pool.charge(-(pages * PAGE_CHARGE_BYTES).cast_signed());
            pool.totals.remove_pages(pages);
        }
    }

    /// Takes one step towards the pages of a batch: prefetches what the next step reads.
    #[inline(always)]
    pub(crate) fn prefetch(&self, client: ClientId, run: &mut [Request], step: Step) {
        for request in run {
            let Handle { pool, index, .. } = request.handle;
            if step == Step::Contents {
                let Some(page) = self.descriptors.get(request.candidate) else {
                    continue;
                };
                self.descriptors.prefetch(page.older());
                self.descriptors.prefetch(page.newer());
                if let Place::Frame(frame) = page.place() {
                    self.common.slab.prefetch(frame);
                }
                continue;
            }
            let key = request.handle.key();
            // In pools of other clients nothing is looked up, because the time taken would reveal what is there.
            if step == Step::Link && self.find_pool(client, pool).is_ok() {
                self.prefetch_ghosts(request.hash, index);
                request.object = self.table.find(request.hash, key, &self.descriptors);
            }
            if !self.table.is(request.object, key, &self.descriptors) {
                continue;
            }
            let root = self.table.root(request.object);
            if step == Step::Link {
                self.tree.prefetch(root, index);
            } else {
                request.candidate = self.tree.candidate(root, index);
                self.descriptors.prefetch(request.candidate);
            }
        }
    }

    /// Finds the page of a request: its candidate, if that is still valid.
    #[inline(always)]
    fn find_requested(&self, request: &Request) -> Option<u32> {
        let Handle { index, .. } = request.handle;
        let key = request.handle.key();
        let is_it = |page: &&Descriptor| page.index == index && self.table.has(page, key);
        match self.descriptors.get(request.candidate).filter(is_it) {
            Some(_) => Some(request.candidate),
            None => self.find(request.hash, &request.handle),
        }
    }

    /// Stores a compressed page raw again, if a frame is in reserve; its contents are in the buffer.
    fn unpack(&mut self, slot: usize, id: u32) {
        let place = self.descriptors[id].place();
        if !matches!(place, Place::Packed(_)) {
            return;
        }
        if !self.pool(slot).account.try_charge(PAGE_BYTES as u64) {
            return;
        }
        let Some(frame) = self.magazine.take() else {
            self.pool(slot).account.charge(-RAW_BYTES);
            return;
        };
        let restored = &*self.restored;
        self.common
            .slab
            .write(frame, |page| page.copy_from_slice(restored));
        self.vacate(slot, id);
        self.descriptors[id].set_place(Place::Frame(frame));
        self.pool(slot).charged_bytes += RAW_BYTES;
    }

    /// Copies a page without any change to the store.
    pub(crate) fn peek(
        &mut self,
        client: ClientId,
        hash: u64,
        handle: &Handle,
        page: &mut Page,
    ) -> Result<bool, Error> {
        self.find_pool(client, handle.pool)?;
        let Some(id) = self.find(hash, handle) else {
            return Ok(false);
        };
        self.read(id, |frame| *page = *frame);
        Ok(true)
    }
}
