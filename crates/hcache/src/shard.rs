//! One shard of the store: the pages of some of the handles, under one lock.
//!
//! ```text
//! pools -> hash of objects -> radix tree of indices -> descriptors -> contents
//! ```
//!
//! Each pool has two LRU lists here. Pages enter the tail of the *warm* list. If memory runs short and
//! compression is on, the oldest warm page moves to the tail of the *cold* list, compressed if it shrinks enough,
//! as long as cold pages take less than half of the pool's memory; otherwise the oldest page is dropped. The two
//! lists in sequence form one LRU order.
//!
//! Source: \[M08\] for the structure. Its lists cover the whole store; here each shard has its own, and
//! the oldest timestamp of each is published, so the oldest page of all is found without locking them.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::account::{Account, NONE_OLD, PoolTotals};
use crate::arena::{Arena, Frames, NIL, NoFrame};
use crate::contents::{self, Contents, EntryId, Shared, repeated_word};
use crate::descriptor::{Descriptor, Place};
use crate::free::FreeFrames;
use crate::list::List;
use crate::packed::{self, Compressor, Packed};
use crate::radix::Tree;
use crate::sync::{Arc, AtomicU32, AtomicU64, AtomicUsize, Mutex, Ordering, RwLock, lock};
use crate::sys::Slab;
use crate::table::Table;
use crate::{
    ClientId, Counters, Error, Event, EventKind, Handle, Observer, PAGE_BYTES, Page, PoolId,
    PutOutcome, Sharing, Taken, Version,
};

/// What a page is charged for its metadata, in bytes: close to what it takes where objects are dense.
pub(crate) const DESCRIPTION_BYTES: u64 = 40;

/// What a page in a frame of its own is charged, in bytes.
pub(crate) const PAGE_CHARGE_BYTES: u64 = DESCRIPTION_BYTES + PAGE_BYTES as u64;

/// What a page that is one word repeated is charged, in bytes: its metadata is all it takes, so that is charged
/// as where pages lie far apart, two to a node of the tree.
const WORD_BYTES: u64 = 216;

/// What a raw page's contents take, in bytes.
const RAW_BYTES: i64 = (PAGE_BYTES as u64).cast_signed();

/// Pages dropped under one lock when many are flushed, so that nobody waits for long.
const DRAIN_PAGES: usize = 1024;

/// What all parts use.
pub(crate) struct Common {
    pub(crate) slab: Arc<Slab>,
    pub(crate) free: Mutex<FreeFrames>,
    pub(crate) contents: Contents,
    /// Secret, so that no client can choose objects whose hashes collide.
    pub(crate) seeds: [u64; 3],
    /// How many parts there are.
    pub(crate) parts: usize,
    pub(crate) compression: bool,
    pub(crate) sharing: Sharing,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    /// A page is observed if its hash has none of these bits.
    pub(crate) observe_mask: u64,
    /// Operations that gave a stamp, to within `stamp_step` a part.
    pub(crate) clock: AtomicU64,
    pub(crate) stamp_step: u64,
    /// Where the store's frames end.
    pub(crate) top: AtomicU32,
    /// Held by those who have frames outside of any lock; a resize waits for them.
    pub(crate) in_flight: RwLock<()>,
    pub(crate) dirty_pages: AtomicU64,
    /// Most pages that may be dirty.
    pub(crate) dirty_limit: AtomicU64,
    /// Most frames a part keeps at hand.
    pub(crate) magazine_frames: AtomicUsize,
}

impl Common {
    /// Hash of an object, which tells its place in a table of objects, and with an index's chunk its part.
    #[inline(always)]
    pub(crate) fn object_hash(&self, pool: u32, object: u64) -> u64 {
        fold(object ^ self.seeds[0], u64::from(pool) ^ self.seeds[1])
    }

    fn magazine_frames(&self) -> usize {
        self.magazine_frames.load(Ordering::Relaxed)
    }
}

/// Both halves of a product: a hash of two words, one of them a secret.
#[inline(always)]
pub(crate) fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    #[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
    let low = product as u64;
    low ^ (product >> 64) as u64
}

/// Frames that a part keeps at hand, so that it rarely goes to the store's list.
pub(crate) struct Magazine {
    common: Arc<Common>,
    frames: Vec<u32>,
    /// Frames given to it less those taken.
    balance: i64,
}

impl Magazine {
    /// Most frames it can be told to keep.
    pub(crate) const MOST_FRAMES: usize = 32;

    fn new(common: Arc<Common>) -> Self {
        Self {
            common,
            frames: Vec::with_capacity(Self::MOST_FRAMES + 1),
            balance: 0,
        }
    }

    /// How many are at hand.
    pub(crate) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Gives all to the store's list, where other parts find them.
    pub(crate) fn spill(&mut self) {
        self.spill_to(0);
    }

    fn spill_to(&mut self, keep: usize) {
        let mut free = lock(&self.common.free);
        for frame in self.frames.drain(keep..) {
            free.push(frame);
        }
    }

    /// Frame that the next put would take.
    fn next(&self) -> Option<u32> {
        self.frames.last().copied()
    }
}

impl Frames for Magazine {
    fn slab(&self) -> &Arc<Slab> {
        &self.common.slab
    }

    #[inline(always)]
    fn take(&mut self) -> Option<u32> {
        if self.frames.is_empty() {
            let mut free = lock(&self.common.free);
            for _ in 0..self.common.magazine_frames().div_ceil(2) {
                self.frames.extend(free.pop());
            }
        }
        let frame = self.frames.pop()?;
        self.balance -= 1;
        Some(frame)
    }

    #[inline(always)]
    fn give(&mut self, frame: u32) {
        self.balance += 1;
        // A frame beyond the end is on its way out of the store.
        if frame < self.common.top.load(Ordering::Relaxed) {
            self.frames.push(frame);
            let most = self.common.magazine_frames();
            if self.frames.len() > most {
                self.spill_to(most / 2);
            }
        }
    }
}

/// A client that is in a pool.
#[repr(align(64))] // the next part's must not share its lines
pub(crate) struct Member {
    pub(crate) id: ClientId,
    /// What it did in one part.
    pub(crate) counters: Counters,
}

impl Member {
    fn new(id: ClientId) -> Self {
        let counters = Counters::default();
        Self { id, counters }
    }
}

/// A pool that was found, and who asked.
#[derive(Clone, Copy)]
struct Found {
    slot: usize,
    member: usize,
}

/// What a pool has in one part.
#[repr(align(64))] // as above
pub(crate) struct Pool {
    pub(crate) id: PoolId,
    /// A get leaves the page.
    inclusive: bool,
    /// It is being destroyed: nobody finds it any more.
    leaving: bool,
    members: Vec<Member>,
    /// What members that left did, and what happened without any.
    others: Counters,
    /// Contents are shared with pages of the same domain only.
    domain: u32,
    /// Whom its pages are charged to.
    account: Arc<Account>,
    totals: Arc<PoolTotals>,
    warm: List,
    cold: List,
    /// What pages in the cold list are charged, in bytes.
    cold_bytes: u64,
    /// What its pages here are charged, in bytes. Below zero where contents shared with other parts were charged
    /// there.
    charged_bytes: i64,
    pub(crate) dirty: u64,
    pub(crate) packed: u64,
    /// Pages that share a frame or need none.
    pub(crate) frameless: u64,
    pub(crate) objects: u64,
    /// The lists' oldest pages when their stamps were last published; `None` if that must be done anew.
    published: Option<[Option<u32>; 4]>,
}

impl Pool {
    /// Returns what a new pool has in a part: nothing.
    pub(crate) fn new(
        id: PoolId,
        inclusive: bool,
        domain: u32,
        account: Arc<Account>,
        totals: Arc<PoolTotals>,
    ) -> Self {
        Self {
            id,
            inclusive,
            leaving: false,
            members: vec![Member::new(account.id)],
            others: Counters::default(),
            domain,
            account,
            totals,
            warm: List::new(),
            cold: List::new(),
            cold_bytes: 0,
            charged_bytes: 0,
            dirty: 0,
            packed: 0,
            frameless: 0,
            objects: 0,
            published: None,
        }
    }

    /// The oldest pages that are not dirty: the cold list's and the warm one's.
    #[inline(always)]
    fn oldest_clean(&mut self, descriptors: &Arena<Descriptor>) -> [Option<u32>; 2] {
        [
            self.cold.oldest_clean(descriptors),
            self.warm.oldest_clean(descriptors),
        ]
        .map(some)
    }

    /// Pages it has here.
    pub(crate) fn pages(&self) -> u64 {
        u64::from(self.warm.len()) + u64::from(self.cold.len())
    }

    /// Who is in it.
    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// What happened in it.
    pub(crate) fn counters(&self) -> Counters {
        let mut sum = self.others;
        for member in &self.members {
            sum.add(&member.counters);
        }
        sum
    }

    fn heap_bytes(&self) -> usize {
        size_of::<Self>() + self.members.capacity() * size_of::<Member>()
    }

    fn charge(&mut self, bytes: i64) {
        self.charged_bytes += bytes;
        self.account.charge(bytes);
    }
}

/// What a put needs that another part, or another's pages, must give up first.
pub(crate) enum Need {
    /// Frames.
    Frames,
    /// This client, whom the pool is charged to, is at its ceiling.
    Ceiling(Arc<Account>),
    /// The pool is at its capacity.
    PoolCapacity(Arc<PoolTotals>),
    /// Too many pages are dirty: nothing will help.
    Clean,
}

/// A put on its way.
pub(crate) struct Put<F> {
    pub(crate) hash: u64,
    pub(crate) handle: Handle,
    pub(crate) dirty: bool,
    /// Writes the page, if no frame brings it.
    pub(crate) fill: Option<F>,
    /// The object's record if it was looked up ahead, or `NIL`.
    pub(crate) object: u32,
    /// A frame with the page, until the store takes it.
    pub(crate) frame: Option<u32>,
    pub(crate) counted: bool,
}

/// A step from a handle to its page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// To the line of the tree that names it.
    Link,
    /// To its descriptor.
    Descriptor,
    /// To its neighbours in the list and its contents.
    Contents,
}

/// Most handles that go through the store together.
pub(crate) const RUN: usize = 64;

/// One of many gets or puts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    /// Its number among them.
    pub(crate) number: usize,
    pub(crate) part: usize,
    pub(crate) hash: u64,
    pub(crate) handle: Handle,
    /// The object's record when that was looked up ahead, or `NIL`.
    pub(crate) object: u32,
    /// The page the tree led to when that was looked up ahead, or `NIL`.
    pub(crate) candidate: u32,
}

/// What eviction is to win.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Memory: a page may be compressed instead of dropped.
    Memory,
    /// Fewer pages.
    Pages,
}

/// What eviction won.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Won {
    /// Pages dropped or compressed.
    pub(crate) pages: u64,
    /// Frames that came free.
    pub(crate) frames: u64,
}

/// What a flush of an object's range dropped in one part.
pub(crate) struct Flushed {
    pub(crate) pages: u64,
    /// From this index on there may be more.
    pub(crate) next: Option<u32>,
    /// Objects of the pool may have pages in other parts.
    pub(crate) large: bool,
}

/// One part of the store.
pub(crate) struct Shard {
    number: usize,
    common: Arc<Common>,
    pub(crate) magazine: Magazine,
    table: Table,
    tree: Tree,
    descriptors: Arena<Descriptor>,
    packed: Packed,
    /// If the store compresses.
    compressor: Option<Compressor>,
    /// By the slot in a pool's number.
    pub(crate) pools: Vec<Option<Box<Pool>>>,
    stamp: u64,
    versions: u32,
    /// Where a page is restored that is not raw in a frame.
    restored: Box<Page>,
}

/// Slot of a pool in each part's table of pools.
pub(crate) fn slot(pool: PoolId) -> usize {
    (pool.0 % POOLS) as usize
}

/// Most pools a store has.
pub(crate) const POOLS: u32 = 4096;

impl Shard {
    pub(crate) fn new(number: usize, common: Arc<Common>) -> Self {
        Self {
            number,
            magazine: Magazine::new(common.clone()),
            table: Table::new(),
            tree: Tree::new(),
            descriptors: Arena::new(),
            packed: Packed::new(),
            pools: Vec::new(),
            stamp: 0,
            versions: 0,
            compressor: common.compression.then(Compressor::new),
            restored: Box::new([0; PAGE_BYTES]),
            common,
        }
    }

    /// Frames of metadata.
    pub(crate) fn metadata_frames(&self) -> usize {
        self.table.frames() + self.tree.frames() + self.descriptors.frames()
    }

    /// Frames of compressed pages.
    pub(crate) fn packed_frames(&self) -> u64 {
        self.packed.frames().into()
    }

    /// Bytes it takes outside the slab.
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of::<Self>()
            + PAGE_BYTES
            + self.compressor.as_ref().map_or(0, |_| Compressor::BYTES)
            + self.table.heap_bytes()
            + self.tree.heap_bytes()
            + self.descriptors.heap_bytes()
            + self.magazine.frames.capacity() * 4
            + self.pools.capacity() * size_of::<Option<Box<Pool>>>()
            + self
                .pools
                .iter()
                .flatten()
                .map(|pool| pool.heap_bytes())
                .sum::<usize>()
    }

    /// Adds a pool.
    pub(crate) fn add_pool(&mut self, pool: Pool) {
        let slot = slot(pool.id);
        if self.pools.len() <= slot {
            self.pools.reserve_exact(slot + 1 - self.pools.len());
            self.pools.resize_with(slot + 1, || None);
        }
        self.pools[slot] = Some(Box::new(pool));
    }

    /// From now on nobody finds the pool.
    pub(crate) fn close_pool(&mut self, id: PoolId) {
        if let Some(pool) = self.any_pool(id) {
            pool.leaving = true;
        }
    }

    /// Removes a pool without pages; returns what happened in it.
    pub(crate) fn remove_pool(&mut self, id: PoolId) -> Counters {
        let pool = self.pools.get_mut(slot(id)).and_then(Option::take);
        while self.pools.pop_if(|last| last.is_none()).is_some() {}
        if self.pools.capacity() > 2 * self.pools.len() + 16 {
            self.pools.shrink_to_fit();
        }
        pool.map(|pool| pool.counters()).unwrap_or_default()
    }

    /// Takes a client into a pool.
    pub(crate) fn join(&mut self, id: PoolId, client: ClientId) {
        if let Some(pool) = self.any_pool(id) {
            pool.members.push(Member::new(client));
        }
    }

    /// Takes a client out of a pool that others are in, and charges it to the next one if it was charged to
    /// that client. Returns what the client did in it.
    pub(crate) fn leave(
        &mut self,
        id: PoolId,
        client: ClientId,
        next: Option<&Arc<Account>>,
    ) -> Counters {
        let Some(pool) = self.any_pool(id) else {
            return Counters::default();
        };
        let Some(at) = pool.members.iter().position(|member| member.id == client) else {
            return Counters::default();
        };
        let left = pool.members.remove(at).counters;
        pool.others.add(&left);
        if let Some(next) = next {
            pool.account.charge(-pool.charged_bytes);
            pool.account = next.clone();
            pool.account.charge(pool.charged_bytes);
        }
        left
    }

    /// What is known of a pool of the client's in all parts.
    pub(crate) fn totals(
        &mut self,
        client: ClientId,
        id: PoolId,
    ) -> Result<Arc<PoolTotals>, Error> {
        let found = self.find_pool(client, id)?;
        Ok(self.pool(found.slot).totals.clone())
    }

    /// Refuses a put: no older page is left either. Returns whether there was one.
    pub(crate) fn refuse(
        &mut self,
        client: ClientId,
        hash: u64,
        handle: &Handle,
    ) -> Result<bool, Error> {
        let found = self.find_pool(client, handle.pool)?;
        let older = self.find(hash, handle);
        let counters = self.counters(found);
        counters.puts_refused += 1;
        counters.flushed_pages += u64::from(older.is_some());
        if let Some(older) = older {
            self.remove_page(found.slot, older);
            self.publish(found.slot);
        }
        Ok(older.is_some())
    }

    /// The pool of that number, whoever asks.
    fn any_pool(&mut self, id: PoolId) -> Option<&mut Pool> {
        let pool = self.pools.get_mut(slot(id))?.as_mut()?;
        (pool.id == id).then_some(pool)
    }

    /// Finds a pool that is the client's.
    #[inline(always)]
    fn find_pool(&self, client: ClientId, id: PoolId) -> Result<Found, Error> {
        let slot = slot(id);
        let pool = self.pools.get(slot).and_then(Option::as_deref);
        let pool = pool.filter(|pool| pool.id == id && !pool.leaving);
        let member =
            pool.and_then(|pool| pool.members.iter().position(|member| member.id == client));
        match member {
            Some(member) => Ok(Found { slot, member }),
            None => Err(Error::NoSuchPool(id)),
        }
    }

    /// Counters of what is done by the one who asked.
    #[inline(always)]
    fn counters(&mut self, found: Found) -> &mut Counters {
        &mut self.pool(found.slot).members[found.member].counters
    }

    #[inline(always)]
    fn pool(&mut self, slot: usize) -> &mut Pool {
        pool_in(&mut self.pools, slot)
    }

    /// Finds a page's descriptor.
    #[inline(always)]
    fn find(&self, hash: u64, handle: &Handle) -> Option<u32> {
        let object = some(self.table.find(hash, handle.pool.0, handle.object))?;
        some(
            self.tree
                .find(self.table[object].root, handle.index, &self.descriptors),
        )
    }

    /// Next stamp: later than all others here, and than most elsewhere that were given before.
    #[inline(always)]
    fn next_stamp(&mut self) -> u64 {
        let step = self.common.stamp_step;
        self.stamp += 1;
        if self.stamp.is_multiple_of(step) || step == 1 {
            let before = self.common.clock.fetch_add(step, Ordering::Relaxed);
            // A multiple of the step, and after all stamps this part has given.
            self.stamp = self.stamp.max((before / step + 1) * step);
        }
        self.stamp
    }

    #[inline(always)]
    fn observe(&self, client: ClientId, hash: u64, index: u32, kind: EventKind) {
        if let Some(observer) = &self.common.observer {
            let page = fold(hash ^ u64::from(index), self.common.seeds[2]);
            if page & self.common.observe_mask == 0 {
                observer.observe(&[Event { client, page, kind }]);
            }
        }
    }

    /// Puts a page, or tells what it needs first. As long as it needs something, an older page stays.
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
            self.observe(client, put.hash, put.handle.index, EventKind::Put);
        }
        let Handle {
            pool,
            object,
            index,
        } = put.handle;
        if !self.table.is(put.object, pool.0, object) {
            put.object = self.table.find(put.hash, pool.0, object);
        }
        let older = some(put.object).map(|object| self.table[object].root);
        let older = older.and_then(|root| some(self.tree.find(root, index, &self.descriptors)));
        let outcome = match older {
            Some(older) => self.replace(found, older, put),
            None => self.insert(found, put),
        };
        self.publish(slot);
        Ok(outcome)
    }

    fn may_dirty(&self) -> bool {
        self.common.dirty_pages.load(Ordering::Relaxed)
            < self.common.dirty_limit.load(Ordering::Relaxed)
    }

    /// Replaces a page's contents. As long as it needs something, the older ones stay.
    fn replace<F: FnOnce(&mut Page)>(
        &mut self,
        found: Found,
        id: u32,
        put: &mut Put<F>,
    ) -> Result<PutOutcome, Need> {
        let slot = found.slot;
        if put.dirty && !self.descriptors[id].is_dirty() && !self.may_dirty() {
            return Err(Need::Clean);
        }
        if let Place::Frame(older) = self.descriptors[id].place() {
            self.touch(slot, id);
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
            self.touch(slot, id);
            self.vacate(slot, id);
            self.pool(slot).charged_bytes += RAW_BYTES;
            self.descriptors[id].set_place(Place::Frame(frame));
        }
        self.set_dirty(slot, id, put.dirty);
        self.descriptors[id].version = self.next_version();
        self.descriptors[id].set_incompressible(false);
        self.counters(found).puts_replaced += 1;
        self.fill(slot, id, put);
        if self.common.sharing != Sharing::Off {
            self.share(found, id);
        }
        Ok(PutOutcome::Stored { replaced: true })
    }

    /// Lets the caller write a page's frame. If he panics, the page goes and the panic goes on.
    fn fill<F: FnOnce(&mut Page)>(&mut self, slot: usize, id: u32, put: &mut Put<F>) {
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
    fn insert<F: FnOnce(&mut Page)>(
        &mut self,
        found: Found,
        put: &mut Put<F>,
    ) -> Result<PutOutcome, Need> {
        let slot = found.slot;
        if put.dirty && !self.may_dirty() {
            return Err(Need::Clean);
        }
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
                if put.dirty {
                    self.set_dirty(slot, id, true);
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

    /// Enters a page with an empty frame. On failure all is as it was.
    fn insert_descriptor<F>(&mut self, slot: usize, put: &mut Put<F>) -> Result<u32, NoFrame> {
        let index = put.handle.index;
        self.descriptors.ensure(1, &mut self.magazine)?;
        let brought = put.frame;
        let frame = brought.or_else(|| self.magazine.take()).ok_or(NoFrame)?;
        let found = some(put.object);
        let record = match found {
            Some(record) => record,
            None => match self.insert_object(slot, put.hash, put.handle) {
                Ok(record) => record,
                Err(NoFrame) => {
                    self.give_unless(brought, frame);
                    return Err(NoFrame);
                }
            },
        };
        let stamp = self.next_stamp();
        let version = self.next_version();
        let id = self.descriptors.insert(Descriptor::new(
            record,
            index,
            Place::Frame(frame),
            stamp,
            version,
        ));
        let inserted = self.tree.insert(
            &mut self.table[record].root,
            index,
            id,
            &self.descriptors,
            &mut self.magazine,
        );
        if inserted.is_err() {
            self.descriptors.remove(id);
            if found.is_none() {
                self.remove_object(slot, record);
            }
            self.give_unless(brought, frame);
            return Err(NoFrame);
        }
        put.frame = None;
        self.table[record].pages += 1;
        let Self {
            pools, descriptors, ..
        } = self;
        let pool = pool_in(pools, slot);
        pool.warm.push_tail(descriptors, id);
        Ok(id)
    }

    /// Gives a frame back, unless the caller brought it.
    fn give_unless(&mut self, brought: Option<u32>, frame: u32) {
        if brought.is_none() {
            self.magazine.give(frame);
        }
    }

    fn insert_object(&mut self, slot: usize, hash: u64, handle: Handle) -> Result<u32, NoFrame> {
        let Self {
            pools,
            table,
            magazine,
            ..
        } = self;
        let pool = pool_in(pools, slot);
        let record = table.insert(hash, handle.pool.0, handle.object, magazine)?;
        pool.objects += 1;
        if handle.index >= CHUNK_PAGES {
            pool.totals.set_large();
        }
        Ok(record)
    }

    /// Removes an object without pages.
    fn remove_object(&mut self, slot: usize, record: u32) {
        let Self {
            pools,
            table,
            magazine,
            ..
        } = self;
        let pool = pool_in(pools, slot);
        table.remove(record, magazine);
        pool.objects -= 1;
    }

    /// Keeps a page that was just filled without a frame of its own, if its content allows.
    fn share(&mut self, found: Found, id: u32) {
        let slot = found.slot;
        let Place::Frame(frame) = self.descriptors[id].place() else {
            return;
        };
        let across = self.common.sharing == Sharing::AcrossClients;
        let pool = self.pool(slot);
        let domain = if across { 0 } else { pool.domain };
        // Pages without frames may not fill the store with metadata alone.
        let parts_metadata = self.metadata_frames() * self.common.parts;
        if parts_metadata * 8 > self.common.top.load(Ordering::Relaxed) as usize {
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
        let (Shared::Existing(entry) | Shared::New(entry)) = shared;
        self.descriptors[id].set_place(Place::Shared(entry.0));
        self.pool(slot).frameless += 1;
        if let Shared::Existing(_) = shared {
            self.magazine.give(frame);
            self.counters(found).shared_pages += 1;
            // Across clients nobody can say whose the frame is: each is charged for it.
            if !across {
                self.pool(slot).charge(-RAW_BYTES);
            }
        }
    }

    /// What a page's contents are charged now, without its description.
    fn content_bytes(&self, place: Place) -> u64 {
        match place {
            Place::Frame(_) | Place::Shared(_) => PAGE_BYTES as u64,
            Place::Packed(place) => {
                let place = packed::Place(place);
                self.packed
                    .read(&self.common.slab, place, |bytes| bytes.len() as u64)
            }
            Place::Word(_) => WORD_BYTES,
        }
    }

    /// Gives up what holds a page's contents; returns what that was charged.
    fn release(&mut self, place: Place) -> u64 {
        let bytes = self.content_bytes(place);
        match place {
            Place::Frame(frame) => self.magazine.give(frame),
            Place::Packed(place) => {
                if let Some(frame) = self.packed.remove(&self.common.slab, packed::Place(place)) {
                    self.magazine.give(frame);
                }
            }
            Place::Shared(entry) => match self.common.contents.release(EntryId(entry)) {
                Some(frame) => self.magazine.give(frame),
                None if self.common.sharing == Sharing::AcrossClients => {}
                None => return 0,
            },
            Place::Word(_) => {}
        }
        bytes
    }

    /// Takes a page out: of its list, its tree, its frame.
    #[inline(always)]
    fn remove_page(&mut self, slot: usize, id: u32) {
        self.detach(slot, id);
        self.forget(slot, id);
    }

    /// Takes a page out of its list and its tree.
    #[inline(always)]
    fn detach(&mut self, slot: usize, id: u32) {
        self.set_dirty(slot, id, false);
        self.unlink(slot, id);
        let Descriptor { object, index, .. } = self.descriptors[id];
        let record = &mut self.table[object];
        self.tree.remove(&mut record.root, index, &self.descriptors);
        record.pages -= 1;
        if record.pages == 0 {
            self.remove_object(slot, object);
        }
    }

    /// Frees a page that is in no list and no tree any more.
    #[inline(always)]
    fn forget(&mut self, slot: usize, id: u32) {
        self.vacate(slot, id);
        self.descriptors.remove(id);
        let pool = self.pool(slot);
        pool.charge(-DESCRIPTION_BYTES.cast_signed());
        pool.totals.remove_page();
    }

    /// Gives up what holds a page's contents; its place is void then.
    #[inline(always)]
    fn vacate(&mut self, slot: usize, id: u32) {
        let place = self.descriptors[id].place();
        let released = self.release(place);
        let pool = self.pool(slot);
        pool.packed -= u64::from(matches!(place, Place::Packed(_)));
        pool.frameless -= u64::from(matches!(place, Place::Shared(_) | Place::Word(_)));
        pool.charge(-released.cast_signed());
    }

    /// Takes a page out of its list.
    #[inline(always)]
    fn unlink(&mut self, slot: usize, id: u32) {
        let cold_bytes = if self.descriptors[id].is_cold() {
            self.content_bytes(self.descriptors[id].place()) + DESCRIPTION_BYTES
        } else {
            0
        };
        let Self {
            pools, descriptors, ..
        } = self;
        let pool = pool_in(pools, slot);
        if descriptors[id].is_cold() {
            pool.cold.remove(descriptors, id);
            pool.cold_bytes -= cold_bytes;
            descriptors[id].set_cold(false);
        } else {
            pool.warm.remove(descriptors, id);
        }
        // Its number may come back, with another stamp.
        if pool
            .published
            .is_some_and(|heads| heads.contains(&Some(id)))
        {
            pool.published = None;
        }
    }

    /// Makes a page the most recently used one.
    fn touch(&mut self, slot: usize, id: u32) {
        self.unlink(slot, id);
        let stamp = self.next_stamp();
        self.descriptors[id].set_stamp(stamp);
        let Self {
            pools, descriptors, ..
        } = self;
        let pool = pool_in(pools, slot);
        pool.warm.push_tail(descriptors, id);
    }

    /// Marks a page dirty or clean.
    #[inline(always)]
    fn set_dirty(&mut self, slot: usize, id: u32, dirty: bool) {
        if self.descriptors[id].is_dirty() == dirty {
            return;
        }
        self.descriptors[id].set_dirty(dirty);
        let Self {
            pools,
            descriptors,
            common,
            ..
        } = self;
        let pool = pool_in(pools, slot);
        if dirty {
            pool.dirty += 1;
            common.dirty_pages.fetch_add(1, Ordering::Relaxed);
        } else {
            pool.dirty -= 1;
            common.dirty_pages.fetch_sub(1, Ordering::Relaxed);
            let list = if descriptors[id].is_cold() {
                &mut pool.cold
            } else {
                &mut pool.warm
            };
            list.mark_clean(descriptors, id);
        }
    }

    fn next_version(&mut self) -> u32 {
        self.versions = self.versions.wrapping_add(1);
        self.versions
    }

    /// Publishes the stamps of the pool's oldest pages, if they may have changed.
    #[inline(always)]
    fn publish(&mut self, slot: usize) {
        let number = self.number;
        let Self {
            pools, descriptors, ..
        } = self;
        let pool = pool_in(pools, slot);
        let heads = [
            pool.warm.oldest(),
            pool.cold.oldest(),
            pool.warm.oldest_clean(descriptors),
            pool.cold.oldest_clean(descriptors),
        ]
        .map(some);
        if pool.published == Some(heads) {
            return;
        }
        pool.published = Some(heads);
        let stamp = |id: Option<u32>| id.map_or(NONE_OLD, |id| descriptors[id].stamp());
        pool.totals.publish(
            number,
            stamp(heads[0]).min(stamp(heads[1])),
            stamp(heads[2]).min(stamp(heads[3])),
        );
    }

    /// Lets `read` see a page's contents.
    #[inline(always)]
    fn read<R>(&mut self, id: u32, read: impl FnOnce(&Page) -> R) -> R {
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
            self.observe(client, hash, handle.index, EventKind::Missed);
            return Ok(false);
        };
        let descriptor = self.descriptors[id];
        if let Place::Frame(frame) = descriptor.place() {
            self.common.slab.prefetch(frame);
        }
        self.descriptors.prefetch(descriptor.older);
        self.descriptors.prefetch(descriptor.newer);
        let inclusive = self.pool(slot).inclusive;
        let kind = if inclusive || descriptor.is_dirty() {
            EventKind::Kept
        } else {
            EventKind::Hit
        };
        self.observe(client, hash, handle.index, kind);
        let counters = self.counters(found);
        counters.hits += 1;
        counters.decompressed_pages += u64::from(matches!(descriptor.place(), Place::Packed(_)));
        // If `read` panics, the page stays as it is.
        self.read(id, read);
        if inclusive {
            self.touch(slot, id);
            self.unpack(slot, id);
            self.publish(slot);
        } else if !descriptor.is_dirty() {
            self.remove_page(slot, id);
            self.publish(slot);
        }
        Ok(true)
    }

    /// Gets pages, one after the other. One that stands in a frame of its own and is taken out by a get comes
    /// with its frame, which is the caller's then; any other is read by `read`, which is also told of those
    /// that are not there.
    pub(crate) fn get_frames(
        &mut self,
        client: ClientId,
        run: &[Request],
        mut taken: impl FnMut(usize, u32),
        mut read: impl FnMut(usize, Result<Option<&Page>, Error>),
    ) {
        // Pages taken out of one pool and not yet given back to its client.
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

    /// Takes a page out with its frame, if a get takes it out and it stands in a frame of its own.
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
        let (Place::Frame(frame), false) = (page.place(), page.is_dirty()) else {
            return Ok(None);
        };
        self.observe(client, request.hash, request.handle.index, EventKind::Hit);
        let counters = self.counters(found);
        counters.gets += 1;
        counters.hits += 1;
        self.detach(slot, id);
        self.descriptors.remove(id);
        self.publish(slot);
        Ok(Some((slot, frame)))
    }

    /// Gives back what pages taken out were charged.
    fn give_credit(&mut self, (slot, pages): (usize, u64)) {
        if pages > 0 {
            let pool = self.pool(slot);
            pool.charge(-(pages * PAGE_CHARGE_BYTES).cast_signed());
            pool.totals.remove_pages(pages);
        }
    }

    /// Takes one step towards the pages of a run: asks for what the step after it reads.
    #[inline(always)]
    pub(crate) fn prefetch(&self, client: ClientId, run: &mut [Request], step: Step) {
        for request in run {
            let Handle {
                pool,
                object,
                index,
            } = request.handle;
            if step == Step::Contents {
                let Some(page) = self.descriptors.get(request.candidate) else {
                    continue;
                };
                self.descriptors.prefetch(page.older);
                self.descriptors.prefetch(page.newer);
                if let Place::Frame(frame) = page.place() {
                    self.common.slab.prefetch(frame);
                }
                continue;
            }
            // In others' pools nothing is looked up: the time it takes would tell what is there.
            if step == Step::Link && self.find_pool(client, pool).is_ok() {
                request.object = self.table.find(request.hash, pool.0, object);
            }
            if !self.table.is(request.object, pool.0, object) {
                continue;
            }
            let root = self.table[request.object].root;
            if step == Step::Link {
                self.tree.prefetch(root, index);
            } else {
                request.candidate = self.tree.candidate(root, index);
                self.descriptors.prefetch(request.candidate);
            }
        }
    }

    /// Finds the page of a request: its candidate, if that still is the one.
    #[inline(always)]
    fn find_requested(&self, request: &Request) -> Option<u32> {
        let Handle {
            pool,
            object,
            index,
        } = request.handle;
        let is_it =
            |page: &&Descriptor| page.index == index && self.table.is(page.object, pool.0, object);
        match self.descriptors.get(request.candidate).filter(is_it) {
            Some(_) => Some(request.candidate),
            None => self.find(request.hash, &request.handle),
        }
    }

    /// Keeps a compressed page raw again, if a frame is at hand; its contents stand in the buffer.
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

    /// Copies a page, changing nothing.
    pub(crate) fn peek(
        &mut self,
        client: ClientId,
        hash: u64,
        handle: &Handle,
        page: &mut Page,
    ) -> Result<Option<Version>, Error> {
        self.find_pool(client, handle.pool)?;
        let Some(id) = self.find(hash, handle) else {
            return Ok(None);
        };
        self.read(id, |frame| *page = *frame);
        Ok(Some(Version(self.descriptors[id].version.into())))
    }

    /// Drops a page.
    pub(crate) fn flush(
        &mut self,
        client: ClientId,
        hash: u64,
        handle: &Handle,
    ) -> Result<bool, Error> {
        let found = self.find_pool(client, handle.pool)?;
        self.observe(client, hash, handle.index, EventKind::Flushed);
        self.counters(found).flushes += 1;
        let Some(id) = self.find(hash, handle) else {
            return Ok(false);
        };
        self.counters(found).flushed_pages += 1;
        self.remove_page(found.slot, id);
        self.publish(found.slot);
        Ok(true)
    }

    /// Drops up to a thousand pages of an object.
    pub(crate) fn flush_range(
        &mut self,
        client: ClientId,
        hash: u64,
        pool: PoolId,
        object: u64,
        indices: RangeInclusive<u32>,
        first: bool,
    ) -> Result<Flushed, Error> {
        let found = self.find_pool(client, pool)?;
        let slot = found.slot;
        self.counters(found).flushes += u64::from(first);
        let large = self.pool(slot).totals.is_large();
        let Some(record) = some(self.table.find(hash, pool.0, object)) else {
            return Ok(Flushed {
                pages: 0,
                next: None,
                large,
            });
        };
        let mut flushed = Vec::new();
        let end = *indices.end();
        self.tree.drain_range(
            &mut self.table[record].root,
            indices,
            DRAIN_PAGES,
            &self.descriptors,
            |id| flushed.push(id),
        );
        self.table[record].pages -=
            u32::try_from(flushed.len()).expect("an object has 2^32 pages at most");
        if self.table[record].pages == 0 {
            self.remove_object(slot, record);
        }
        let last = flushed.last().map(|&id| self.descriptors[id].index);
        let full = flushed.len() == DRAIN_PAGES;
        let next = last.filter(|&last| full && last < end).map(|last| last + 1);
        for &id in &flushed {
            self.observe(client, hash, self.descriptors[id].index, EventKind::Flushed);
            self.set_dirty(slot, id, false);
            self.unlink(slot, id);
            self.forget(slot, id);
        }
        self.counters(found).flushed_pages += flushed.len() as u64;
        self.publish(slot);
        self.clear_if_empty();
        Ok(Flushed {
            pages: flushed.len() as u64,
            next,
            large,
        })
    }

    /// Drops all pages of a pool; returns how many. All under one lock, so that no page that is there now is
    /// left, however it is used meanwhile.
    pub(crate) fn flush_pool(
        &mut self,
        client: ClientId,
        pool: PoolId,
        first: bool,
    ) -> Result<u64, Error> {
        let found = self.find_pool(client, pool)?;
        self.counters(found).flushes += u64::from(first);
        let mut dropped = 0;
        while let Some(id) = self.oldest(found.slot) {
            if self.common.observer.is_some() {
                let Descriptor { object, index, .. } = self.descriptors[id];
                let hash = self.common.object_hash(pool.0, self.table[object].object);
                self.observe(client, hash, index, EventKind::Flushed);
            }
            self.remove_page(found.slot, id);
            dropped += 1;
        }
        self.counters(found).flushed_pages += dropped;
        self.publish(found.slot);
        self.clear_if_empty();
        Ok(dropped)
    }

    /// Drops up to a thousand pages of a pool that is closed; returns whether there may be more.
    pub(crate) fn drain_pool(&mut self, pool: PoolId) -> bool {
        let slot = slot(pool);
        for _ in 0..DRAIN_PAGES {
            let Some(id) = self.oldest(slot) else {
                self.clear_if_empty();
                return false;
            };
            self.remove_page(slot, id);
        }
        true
    }

    /// The pool's oldest page, dirty or not.
    fn oldest(&self, slot: usize) -> Option<u32> {
        let pool = self.pools[slot].as_ref()?;
        let heads = [pool.cold.oldest(), pool.warm.oldest()];
        heads
            .into_iter()
            .filter_map(some)
            .min_by_key(|&id| self.descriptors[id].stamp())
    }

    /// Makes a page the most recently used one.
    pub(crate) fn move_to_tail(
        &mut self,
        client: ClientId,
        hash: u64,
        handle: &Handle,
    ) -> Result<bool, Error> {
        let slot = self.find_pool(client, handle.pool)?.slot;
        let found = self.find(hash, handle);
        if let Some(id) = found {
            self.touch(slot, id);
            self.publish(slot);
        }
        Ok(found.is_some())
    }

    /// Takes out the oldest page.
    pub(crate) fn take_head(
        &mut self,
        client: ClientId,
        pool: PoolId,
        page: &mut Page,
    ) -> Result<Option<Taken>, Error> {
        let slot = self.find_pool(client, pool)?.slot;
        let Some(id) = self.oldest(slot) else {
            return Ok(None);
        };
        self.read(id, |frame| *page = *frame);
        let descriptor = self.descriptors[id];
        let object = self.table[descriptor.object].object;
        let taken = Taken {
            handle: Handle {
                pool,
                object,
                index: descriptor.index,
            },
            dirty: descriptor.is_dirty(),
        };
        self.remove_page(slot, id);
        self.publish(slot);
        Ok(Some(taken))
    }

    /// Marks a page dirty.
    pub(crate) fn mark_dirty(
        &mut self,
        client: ClientId,
        hash: u64,
        handle: &Handle,
    ) -> Result<bool, Error> {
        let slot = self.find_pool(client, handle.pool)?.slot;
        let Some(id) = self.find(hash, handle) else {
            return Ok(false);
        };
        if !self.descriptors[id].is_dirty() && !self.may_dirty() {
            return Err(Error::TooManyDirtyPages(
                self.common.dirty_limit.load(Ordering::Relaxed),
            ));
        }
        self.set_dirty(slot, id, true);
        self.publish(slot);
        Ok(true)
    }

    /// Marks a page clean if it is still of that version.
    pub(crate) fn mark_clean(
        &mut self,
        client: ClientId,
        hash: u64,
        handle: &Handle,
        version: Version,
    ) -> Result<bool, Error> {
        let slot = self.find_pool(client, handle.pool)?.slot;
        let found = self.find(hash, handle);
        let Some(id) = found.filter(|&id| u64::from(self.descriptors[id].version) == version.0)
        else {
            return Ok(false);
        };
        self.set_dirty(slot, id, false);
        self.publish(slot);
        Ok(true)
    }

    /// Wins `count` frames (or drops as many pages) from a pool's pages last used at `until` or before, the
    /// oldest first.
    pub(crate) fn evict(&mut self, pool: PoolId, until: u64, count: usize, goal: Goal) -> Won {
        let slot = slot(pool);
        if self.any_pool(pool).is_none() {
            return Won::default();
        }
        let before = self.magazine.balance;
        let mut won = Won::default();
        // A page whose content is kept once for several, or nowhere, or does not shrink, wins no frame.
        for _ in 0..count.saturating_mul(8).max(256) {
            let enough = match goal {
                Goal::Memory => won.frames,
                Goal::Pages => won.pages,
            };
            if enough >= count as u64 || !self.evict_one(slot, until, goal) {
                break;
            }
            won.pages += 1;
            won.frames = (self.magazine.balance - before).max(0).cast_unsigned();
        }
        self.magazine.spill();
        self.publish(slot);
        won
    }

    /// Drops or compresses the oldest page that is not dirty, if it is that old. Returns whether it did.
    fn evict_one(&mut self, slot: usize, until: u64, goal: Goal) -> bool {
        let Self {
            pools,
            descriptors,
            common,
            ..
        } = self;
        let pool = pool_in(pools, slot);
        let oldest = pool.oldest_clean(descriptors);
        let stamp = |id: &u32| descriptors[*id].stamp();
        if common.compression && goal == Goal::Memory {
            let cold_is_small = pool.cold_bytes.cast_signed() * 2 <= pool.charged_bytes;
            // One that was dirty when younger ones were cooled is too late for a place among them.
            let newest_cold = some(pool.cold.newest()).map_or(0, |id| stamp(&id));
            let [cold, warm] = oldest;
            let in_order = warm.filter(|id| stamp(id) > newest_cold);
            if let Some(id) = in_order.filter(|_| cold_is_small || cold.is_none())
                && self.cool(slot, id)
            {
                return true;
            }
        }
        self.drop_oldest(slot, until)
    }

    /// Drops the oldest page that is not dirty, if it is that old. Returns whether it did.
    fn drop_oldest(&mut self, slot: usize, until: u64) -> bool {
        let Self {
            pools,
            descriptors,
            tree,
            table,
            ..
        } = self;
        let pool = pool_in(pools, slot);
        let oldest = pool.oldest_clean(descriptors);
        let stamp = |id: &u32| descriptors[*id].stamp();
        let old = oldest.into_iter().flatten().filter(|id| stamp(id) <= until);
        let Some(id) = old.min_by_key(stamp) else {
            return false;
        };
        // The next one's way through the tree, ahead of its turn.
        if let Some(next) = some(descriptors[id].newer) {
            let next = &descriptors[next];
            tree.prefetch(table[next.object].root, next.index);
            descriptors.prefetch(next.newer);
        }
        pool.others.evicted_pages += 1;
        self.remove_page(slot, id);
        true
    }

    /// Moves the warm list's oldest clean page to the tail of the cold list, compressed if that pays. Returns
    /// whether it did.
    fn cool(&mut self, slot: usize, id: u32) -> bool {
        self.unlink(slot, id);
        if let Place::Shared(entry) = self.descriptors[id].place()
            && let Some(frame) = self
                .common
                .contents
                .take_only(EntryId(entry), self.common.top.load(Ordering::SeqCst))
        {
            self.descriptors[id].set_place(Place::Frame(frame));
            self.pool(slot).frameless -= 1;
        }
        if let Place::Frame(frame) = self.descriptors[id].place()
            && !self.descriptors[id].is_incompressible()
        {
            self.compress(slot, id, frame);
        }
        let cold_bytes = self.content_bytes(self.descriptors[id].place()) + DESCRIPTION_BYTES;
        let Self {
            pools, descriptors, ..
        } = self;
        let pool = pool_in(pools, slot);
        descriptors[id].set_cold(true);
        pool.cold.push_tail(descriptors, id);
        pool.cold_bytes += cold_bytes;
        matches!(descriptors[id].place(), Place::Packed(_))
    }

    fn compress(&mut self, slot: usize, id: u32, frame: u32) {
        let Self {
            common,
            packed,
            compressor,
            magazine,
            ..
        } = self;
        let Some(compressor) = compressor else { return };
        let Some(bytes) = common.slab.read(frame, |page| compressor.compress(page)) else {
            self.descriptors[id].set_incompressible(true);
            self.pool(slot).others.incompressible_pages += 1;
            return;
        };
        let saved = RAW_BYTES - (bytes.len() as u64).cast_signed();
        // Where no packed frame has room, the page's own becomes one: the compressed bytes are in a buffer.
        let mut becomes_packed = false;
        let own_frame = || {
            becomes_packed = true;
            Some(frame)
        };
        let place = packed.insert(&common.slab, bytes, own_frame);
        let place = place.expect("it was offered a frame");
        if !becomes_packed {
            magazine.give(frame);
        }
        self.descriptors[id].set_place(Place::Packed(place.0));
        let pool = self.pool(slot);
        pool.packed += 1;
        pool.others.compressed_pages += 1;
        pool.charge(-saved);
    }

    /// Moves everything here out of frames from `top` on, but for shared contents. On failure some was moved,
    /// and the rest stands where it was.
    pub(crate) fn relocate(&mut self, top: u32) -> Result<(), NoFrame> {
        self.magazine.spill();
        let Self {
            table,
            tree,
            descriptors,
            magazine,
            packed,
            pools,
            common,
            ..
        } = self;
        table.relocate(top, || magazine.take())?;
        tree.relocate(top, || magazine.take())?;
        descriptors.relocate(top, || magazine.take())?;
        let mut outcome = Ok(());
        // A packed frame moves with all of its pages.
        let mut moved: HashMap<u32, u32> = HashMap::new();
        for id in pages(pools, descriptors) {
            let Place::Packed(place) = descriptors[id].place() else {
                continue;
            };
            let from = packed::Place(place).frame();
            if from < top || moved.contains_key(&from) {
                continue;
            }
            let Some(to) = magazine.take() else {
                outcome = Err(NoFrame);
                break;
            };
            packed.relocate(&common.slab, from, to);
            moved.insert(from, to);
        }
        for id in pages(pools, descriptors) {
            let place = descriptors[id].place();
            let to = match place {
                Place::Frame(frame) if frame >= top => {
                    let Some(to) = magazine.take() else {
                        outcome = Err(NoFrame);
                        continue;
                    };
                    common.slab.copy(frame, to);
                    Place::Frame(to)
                }
                Place::Packed(place) => match moved.get(&packed::Place(place).frame()) {
                    Some(&to) => Place::Packed(packed::Place(place).moved_to(to).0),
                    None => continue,
                },
                _ => continue,
            };
            descriptors[id].set_place(to);
        }
        outcome
    }

    /// Rebuilds the metadata if much of what it takes is unused.
    pub(crate) fn trim(&mut self) -> Result<(), NoFrame> {
        let needed = self.table.frames_needed()
            + self.tree.frames_needed()
            + self.descriptors.frames_needed();
        if self.metadata_frames() <= needed + needed / 4 + 2 {
            return Ok(());
        }
        let mut reserve = Reserve {
            common: self.common.clone(),
            frames: Vec::new(),
        };
        reserve
            .frames
            .extend(std::iter::from_fn(|| self.magazine.take()).take(needed + 2));
        let (mut table, mut tree, mut descriptors) = (Table::new(), Tree::new(), Arena::new());
        match self.copy_metadata(&mut table, &mut tree, &mut descriptors, &mut reserve) {
            Ok(lists) => {
                for (pool, lists) in self.pools.iter_mut().flatten().zip(lists) {
                    (pool.warm, pool.cold) = lists;
                    pool.published = None;
                }
                std::mem::swap(&mut self.table, &mut table);
                std::mem::swap(&mut self.tree, &mut tree);
                std::mem::swap(&mut self.descriptors, &mut descriptors);
                for slot in 0..self.pools.len() {
                    if self.pools[slot].is_some() {
                        self.publish(slot);
                    }
                }
                self.give_up(table, tree, descriptors, reserve);
                Ok(())
            }
            Err(NoFrame) => {
                self.give_up(table, tree, descriptors, reserve);
                Err(NoFrame)
            }
        }
    }

    fn give_up(
        &mut self,
        mut table: Table,
        mut tree: Tree,
        mut descriptors: Arena<Descriptor>,
        reserve: Reserve,
    ) {
        table.clear(&mut self.magazine);
        tree.clear(&mut self.magazine);
        descriptors.clear(&mut self.magazine);
        for frame in reserve.frames {
            self.magazine.give(frame);
        }
    }

    /// Enters all pages into new tables. Returns each pool's lists in them, the warm one first.
    fn copy_metadata(
        &self,
        table: &mut Table,
        tree: &mut Tree,
        descriptors: &mut Arena<Descriptor>,
        frames: &mut Reserve,
    ) -> Result<Vec<(List, List)>, NoFrame> {
        let mut all = Vec::new();
        for pool in self.pools.iter().flatten() {
            let mut copy = |list: &List| -> Result<List, NoFrame> {
                let mut new = List::new();
                for old in ids(list, &self.descriptors) {
                    let mut page = self.descriptors[old];
                    let object = &self.table[page.object];
                    let hash = self.common.object_hash(object.pool, object.object);
                    let found = some(table.find(hash, object.pool, object.object));
                    let record = match found {
                        Some(record) => record,
                        None => table.insert(hash, object.pool, object.object, frames)?,
                    };
                    descriptors.ensure(1, frames)?;
                    page.object = record;
                    let id = descriptors.insert(page);
                    tree.insert(&mut table[record].root, page.index, id, descriptors, frames)?;
                    table[record].pages += 1;
                    new.push_tail(descriptors, id);
                }
                Ok(new)
            };
            let warm = copy(&pool.warm)?;
            let cold = copy(&pool.cold)?;
            all.push((warm, cold));
        }
        Ok(all)
    }

    /// Gives all metadata up where no page is left.
    fn clear_if_empty(&mut self) {
        if self.descriptors.live() == 0 {
            self.table.clear(&mut self.magazine);
            self.tree.clear(&mut self.magazine);
            self.descriptors.clear(&mut self.magazine);
        }
    }
}

/// Frames taken beforehand.
struct Reserve {
    common: Arc<Common>,
    frames: Vec<u32>,
}

impl Frames for Reserve {
    fn slab(&self) -> &Arc<Slab> {
        &self.common.slab
    }

    fn take(&mut self) -> Option<u32> {
        self.frames.pop()
    }

    fn give(&mut self, frame: u32) {
        self.frames.push(frame);
    }
}

fn some(id: u32) -> Option<u32> {
    (id != NIL).then_some(id)
}

/// The pool of a slot that was found under the lock still held.
#[inline(always)]
fn pool_in(pools: &mut [Option<Box<Pool>>], slot: usize) -> &mut Pool {
    pools[slot]
        .as_mut()
        .expect("the slot was found under this lock")
}

/// The pages of a list, the oldest first.
fn ids(list: &List, descriptors: &Arena<Descriptor>) -> impl Iterator<Item = u32> {
    std::iter::successors(some(list.oldest()), |&id| some(descriptors[id].newer))
}

/// All pages of a part, in no order; what changes in them must leave their lists alone.
fn pages(pools: &[Option<Box<Pool>>], descriptors: &Arena<Descriptor>) -> Vec<u32> {
    let lists = pools
        .iter()
        .flatten()
        .flat_map(|pool| [&pool.warm, &pool.cold]);
    lists.flat_map(|list| ids(list, descriptors)).collect()
}

/// Pages of a chunk: pages that lie together stay in one part.
pub(crate) const CHUNK_PAGES: u32 = 256;
