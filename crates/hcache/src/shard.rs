//! One shard of the store: the pages of some of the handles, under one lock.
//!
//! ```text
//! pools -> hash of objects -> radix tree of indices -> descriptors -> contents
//! ```
//!
//! Each pool has here the two queues of its [eviction policy](crate::eviction) and the *cold* list. If memory runs short, the
//! policy judges the oldest pages of its queues. A page that it gives up is dropped or, if compression is on, moves
//! to the tail of the cold list, compressed if it shrinks enough, as long as cold pages take less than half of the
//! pool's memory; beyond that, cold pages are dropped, the oldest first. Under LRU, cold list and queue form one LRU order.
//!
//! Every page has a stamp: when it came to its place in its list. The stamp of the page that would leave next is published,
//! so that the shard with the oldest one is found without locking them.
//!
//! Source: \[M08\] for the structure. Its lists cover the whole store and are in LRU order.

mod evict;
mod flush;
mod get;
mod magazine;
mod memory;
mod pool;
mod put;

use self::pool::PoolMember;

use crate::account::{Account, Ages, NONE_OLD, PoolTotals};
use crate::arena::{Arena, Frames, NIL};
use crate::contents::{Contents, EntryId};
use crate::descriptor::{Descriptor, Key, Owner, POOLS, Place};
use crate::eviction::{EvictionPolicyRow, Queue, UseEffect};
use crate::free::FreeFrames;
use crate::ghost::{GhostTable, remembered_pages};
use crate::list::List;
use crate::packed::{Compressor, Packed};
use crate::radix::Tree;
use crate::sync::{Arc, AtomicU32, AtomicU64, AtomicUsize, Mutex, Ordering, RwLock};
use crate::sys::Slab;
use crate::table::{Hasher, ObjectRef, Table};
use crate::{
    ClientId, Counters, Error, Event, EventKind, Handle, Observer, PAGE_BYTES, Page, PoolId,
    Sharing, packed,
};

pub(crate) use self::magazine::Magazine;
pub(crate) use self::pool::Member;
pub(crate) use self::pool::Pool;
pub(crate) use self::put::Put;

/// Bytes charged for a page's metadata: close to its actual size where objects are dense.
pub(crate) const DESCRIPTION_BYTES: u64 = 40;

/// Bytes charged for a page in a frame of its own.
pub(crate) const PAGE_CHARGE_BYTES: u64 = DESCRIPTION_BYTES + PAGE_BYTES as u64;

/// Bytes charged for a page that is one word repeated: it takes only metadata, charged as where pages lie far apart,
/// two to a node of the tree.
const WORD_BYTES: u64 = 216;

/// Bytes charged for a raw page's contents.
const RAW_BYTES: i64 = (PAGE_BYTES as u64).cast_signed();

/// Pages dropped under one lock when many are flushed, to bound the time for which other threads wait.
const DRAIN_PAGES: usize = 1024;

/// Number of the cold list among a pool's lists, after the two queues.
const COLD: usize = 2;

/// Number of frames below which a shard has none for pages that left.
const LEAST_GHOST_FRAMES: usize = 64;

/// State shared by all shards.
pub(crate) struct Common {
    pub(crate) slab: Arc<Slab>,
    pub(crate) free: Mutex<FreeFrames>,
    pub(crate) contents: Contents,
    /// Secret, so that no client can choose objects whose hashes collide.
    pub(crate) seeds: [u64; 3],
    pub(crate) shards: usize,
    pub(crate) compression: bool,
    pub(crate) sharing: Sharing,
    pub(crate) eviction: &'static EvictionPolicyRow,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    /// A page is observed if its hash has none of these bits.
    pub(crate) observe_mask: u64,
    /// Number of operations that assigned a stamp, to within `stamp_step` a shard.
    pub(crate) clock: AtomicU64,
    pub(crate) stamp_step: u64,
    /// End of the store's frames.
    pub(crate) top: AtomicU32,
    /// Shared by threads that hold frames outside of any lock; a resize waits for them.
    pub(crate) in_flight: RwLock<()>,
    /// Maximum number of frames that a shard keeps in reserve.
    pub(crate) magazine_frames: AtomicUsize,
}

impl Hasher for Arc<Common> {
    #[inline(always)]
    fn hash(&self, key: Key) -> u64 {
        self.object_hash(key)
    }
}

impl Common {
    /// Hash of an object, which determines its position in a table of objects and, with an index's chunk, its shard.
    #[inline(always)]
    pub(crate) fn object_hash(&self, key: Key) -> u64 {
        fold(
            spread(key.object) ^ self.seeds[0],
            u64::from(key.pool) ^ self.seeds[1],
        )
    }

    /// Hash of a page, from that of its object.
    #[inline(always)]
    pub(crate) fn page_hash(&self, object_hash: u64, index: u32) -> u64 {
        hash_within(object_hash, index, self.seeds[2])
    }

    /// Number of pages that a shard remembers, if it had a page in each of its frames.
    fn ghost_entries(&self, top: u32) -> usize {
        let frames = top as usize / self.shards;
        if self.eviction.remembers && frames >= LEAST_GHOST_FRAMES {
            remembered_pages(frames)
        } else {
            0
        }
    }

    /// How the stamps of pages compare now.
    pub(crate) fn ages(&self) -> Ages {
        Ages {
            clock: self.clock.load(Ordering::Relaxed),
            second_stays: self.eviction.second_stays,
        }
    }

    fn magazine_frames(&self) -> usize {
        self.magazine_frames.load(Ordering::Relaxed)
    }
}

/// Moves a number's low bits to the high ones too. Otherwise, with a secret near 0 or 2^64, the products of consecutive numbers
/// would differ in few bits, and so would their hashes.
#[inline(always)]
fn spread(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Hash of a number within an object, such as an index.
#[inline(always)]
pub(crate) fn hash_within(object_hash: u64, number: u32, seed: u64) -> u64 {
    fold(object_hash ^ spread(number.into()), seed)
}

/// Both halves of a product combined: a hash of two words, one of them a secret.
#[inline(always)]
fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    #[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
    let low = product as u64;
    low ^ (product >> 64) as u64
}

/// What a put needs freed in another shard, or by another's pages, before it can proceed.
pub(crate) enum Need {
    Frames,
    /// Memory of this client, to whom the pool is charged and who is at its ceiling.
    Ceiling(Arc<Account>),
    PoolCapacity(Arc<PoolTotals>),
}

/// A step from a handle to its page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// To the line of the tree that names it.
    Link,
    Descriptor,
    /// To its neighbours in the list and its contents.
    Contents,
}

/// Maximum number of handles that are processed together.
pub(crate) const RUN: usize = 64;

/// One of many gets or puts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    /// Its number among them.
    pub(crate) number: usize,
    pub(crate) shard: usize,
    pub(crate) hash: u64,
    pub(crate) handle: Handle,
    /// The object found by the prefetch.
    pub(crate) object: ObjectRef,
    /// The page found by the prefetch, or `NIL`.
    pub(crate) candidate: u32,
}

/// The goal of an eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Memory: a page may be compressed instead of dropped.
    Memory,
    /// Fewer pages.
    Pages,
}

/// The result of an eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct EvictionGain {
    /// Pages dropped or compressed.
    pub(crate) pages: u64,
    /// Frames freed.
    pub(crate) frames: u64,
    /// Pages judged and kept.
    pub(crate) kept: u64,
}

/// The result of flushing an object's range in one shard.
pub(crate) struct FlushResult {
    pub(crate) pages: u64,
    /// From this index on there may be more.
    pub(crate) next: Option<u32>,
    /// Objects of the pool may have pages in other shards.
    pub(crate) large: bool,
}

/// One shard of the store: the pages whose hashes lead to it.
pub(crate) struct Shard {
    number: usize,
    common: Arc<Common>,
    pub(crate) magazine: Magazine,
    table: Table<Arc<Common>>,
    tree: Tree,
    descriptors: Arena<Descriptor>,
    /// Descriptors below this one are known to be of pages below the end of the frames, in a shrink in steps.
    swept: u32,
    packed: Packed,
    ghosts: GhostTable,
    /// Set if the store compresses.
    compressor: Option<Compressor>,
    /// Pools by the slot in their number.
    pub(crate) pools: Vec<Option<Box<Pool>>>,
    stamp: u64,
    /// Buffer into which a page is decompressed.
    restored: Box<Page>,
}

/// Slot of a pool in each shard's table of pools.
#[inline]
pub(crate) fn slot(pool: PoolId) -> usize {
    (pool.0 % POOLS) as usize
}

impl Shard {
    pub(crate) fn new(number: usize, common: Arc<Common>) -> Self {
        Self {
            number,
            magazine: Magazine::new(common.clone()),
            table: Table::new(common.clone()),
            tree: Tree::new(),
            descriptors: Arena::new(),
            swept: 0,
            packed: Packed::new(),
            ghosts: GhostTable::new(),
            pools: Vec::new(),
            stamp: 0,
            compressor: common.compression.then(Compressor::new),
            restored: Box::new([0; PAGE_BYTES]),
            common,
        }
    }

    /// Frames of metadata.
    pub(crate) fn metadata_frames(&self) -> usize {
        self.page_metadata_frames() + self.ghosts.frames()
    }

    /// Frames of metadata of the pages that are here.
    pub(crate) fn page_metadata_frames(&self) -> usize {
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
            + self.ghosts.heap_bytes()
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

    /// Makes the pool impossible to find from now on.
    pub(crate) fn close_pool(&mut self, id: PoolId) {
        if let Some(pool) = self.any_pool(id) {
            pool.leaving = true;
        }
    }

    /// Removes a pool without pages; returns its counters.
    pub(crate) fn remove_pool(&mut self, id: PoolId) -> Counters {
        let pool = self.pools.get_mut(slot(id)).and_then(Option::take);
        while self.pools.pop_if(|last| last.is_none()).is_some() {}
        if self.pools.capacity() > 2 * self.pools.len() + 16 {
            self.pools.shrink_to_fit();
        }
        pool.map(|pool| pool.counters()).unwrap_or_default()
    }

    /// Adds a client to a pool.
    pub(crate) fn join(&mut self, id: PoolId, client: ClientId) {
        if let Some(pool) = self.any_pool(id) {
            pool.members.push(Member::new(client));
        }
    }

    /// Removes a client from a pool. Returns the client's counters in it.
    pub(crate) fn leave(&mut self, id: PoolId, client: ClientId) -> Counters {
        let Some(pool) = self.any_pool(id) else {
            return Counters::default();
        };
        let Some(at) = pool.members.iter().position(|member| member.id == client) else {
            return Counters::default();
        };
        let left = pool.members.remove(at).counters;
        pool.others.add(&left);
        left
    }

    /// Refuses a put: an older page is dropped too. Returns whether there was one.
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

    /// The pool of that number, without an ownership check.
    fn any_pool(&mut self, id: PoolId) -> Option<&mut Pool> {
        let pool = self.pools.get_mut(slot(id))?.as_mut()?;
        (pool.id == id).then_some(pool)
    }

    /// Finds a pool of which the client is a member.
    #[inline(always)]
    fn find_pool(&self, client: ClientId, id: PoolId) -> Result<PoolMember, Error> {
        let slot = slot(id);
        let pool = self.pools.get(slot).and_then(Option::as_deref);
        let pool = pool.filter(|pool| pool.id == id && !pool.leaving);
        let member =
            pool.and_then(|pool| pool.members.iter().position(|member| member.id == client));
        match member {
            Some(member) => Ok(PoolMember { slot, member }),
            None => Err(Error::NoSuchPool(id)),
        }
    }

    /// Counters of the caller's operations.
    #[inline(always)]
    fn counters(&mut self, found: PoolMember) -> &mut Counters {
        &mut self.pool(found.slot).members[found.member].counters
    }

    #[inline(always)]
    fn pool(&mut self, slot: usize) -> &mut Pool {
        pool_in(&mut self.pools, slot)
    }

    /// Finds a page's descriptor.
    #[inline(always)]
    fn find(&self, hash: u64, handle: &Handle) -> Option<u32> {
        let object = self.table.find(hash, handle.key(), &self.descriptors);
        let root = self.table.root(object.some()?);
        some(self.tree.find(root, handle.index, &self.descriptors))
    }

    /// Next stamp: above all others of this shard, and above most that other shards assigned before.
    #[inline(always)]
    fn next_stamp(&mut self) -> u64 {
        let step = self.common.stamp_step;
        self.stamp += 1;
        if self.stamp.is_multiple_of(step) || step == 1 {
            let before = self.common.clock.fetch_add(step, Ordering::Relaxed);
            // A multiple of the step, and above all stamps that this shard has assigned.
            self.stamp = self.stamp.max((before / step + 1) * step);
        }
        self.stamp
    }

    #[inline(always)]
    fn observe(&self, client: ClientId, slot: usize, hash: u64, index: u32, kind: EventKind) {
        if let Some(observer) = &self.common.observer {
            let page = self.common.page_hash(hash, index);
            if page & self.common.observe_mask == 0 {
                let inclusive = self.pools[slot].as_ref().is_some_and(|pool| pool.inclusive);
                observer.observe(&[Event {
                    client,
                    page,
                    kind,
                    inclusive,
                }]);
            }
        }
    }

    /// Removes an object without pages, or whose only page is about to be freed.
    fn remove_object(&mut self, slot: usize, object: ObjectRef) {
        let Self {
            pools,
            table,
            descriptors,
            magazine,
            ..
        } = self;
        table.remove(object, descriptors, magazine);
        pool_in(pools, slot).objects -= 1;
    }

    /// Counts pages that left an object's tree.
    fn lose_pages(&mut self, slot: usize, record: u32, count: u32) {
        let object = &mut self.table[record];
        object.pages -= count;
        match object.pages {
            0 => self.remove_object(slot, ObjectRef::record(record)),
            1 => self.table.contract(record, &mut self.descriptors),
            _ => {}
        }
    }

    /// Bytes charged for a page's contents now, without its descriptor.
    #[inline]
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

    /// Releases the memory of a page's contents; returns the bytes that were charged for it.
    #[inline]
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

    /// Removes a page from its list and its tree, and frees its frame.
    #[inline(always)]
    fn remove_page(&mut self, slot: usize, id: u32) {
        self.detach(slot, id);
        self.forget(slot, id);
    }

    /// Removes a page from its list and its tree.
    #[inline(always)]
    fn detach(&mut self, slot: usize, id: u32) {
        self.unlink(slot, id);
        let page = &self.descriptors[id];
        match page.owner() {
            Owner::Sole(_) => self.remove_object(slot, ObjectRef::page(id)),
            Owner::Record(record) => {
                let root = &mut self.table[record].root;
                self.tree.remove(root, page.index, &self.descriptors);
                self.lose_pages(slot, record, 1);
            }
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

    /// Releases the memory of a page's contents; its place is then invalid.
    #[inline(always)]
    fn vacate(&mut self, slot: usize, id: u32) {
        let place = self.descriptors[id].place();
        let released = self.release(place);
        let pool = self.pool(slot);
        pool.packed -= u64::from(matches!(place, Place::Packed(_)));
        pool.frameless -= u64::from(matches!(place, Place::Shared(_) | Place::Word(_)));
        pool.charge(-released.cast_signed());
    }

    /// Removes a page from its list.
    #[inline(always)]
    fn unlink(&mut self, slot: usize, id: u32) {
        let list = self.descriptors[id].list();
        let cold_bytes = if list == COLD {
            self.content_bytes(self.descriptors[id].place()) + DESCRIPTION_BYTES
        } else {
            0
        };
        let Self {
            pools, descriptors, ..
        } = self;
        let pool = pool_in(pools, slot);
        pool.lists[list].remove(descriptors, id);
        pool.cold_bytes -= cold_bytes;
        // Its number may be reused, with another stamp.
        if pool
            .published
            .is_some_and(|heads| heads.contains(&Some(id)))
        {
            pool.published = None;
        }
    }

    /// Records the use of a page that stays.
    #[inline]
    fn use_page(&mut self, slot: usize, id: u32) {
        let Self {
            pools, descriptors, ..
        } = self;
        let page = &mut descriptors[id];
        let pool = pool_in(pools, slot);
        let queue = if page.list() == COLD {
            let pages = pool.queue_pages();
            pool.policy.enter(true, pages)
        } else {
            match pool.policy.used(page.uses()) {
                UseEffect::Counted(uses) => {
                    page.set_uses(uses);
                    return;
                }
                UseEffect::Moved(queue) => queue,
            }
        };
        self.move_page(slot, id, queue, 0);
    }

    /// Moves a page to the tail of a queue.
    #[inline]
    fn move_page(&mut self, slot: usize, id: u32, queue: Queue, uses: u8) {
        self.unlink(slot, id);
        let stamp = self.next_stamp();
        let page = &mut self.descriptors[id];
        page.set_stamp(stamp);
        page.set_uses(uses);
        self.append(slot, id, queue.index());
    }

    /// Appends a page that is in no list.
    #[inline(always)]
    fn append(&mut self, slot: usize, id: u32, list: usize) {
        let Self {
            pools, descriptors, ..
        } = self;
        descriptors[id].set_list(list);
        pool_in(pools, slot).lists[list].push_tail(descriptors, id);
    }

    /// Remembers that the page of that hash left a pool.
    fn remember(&mut self, slot: usize, page_hash: u64) {
        let Self {
            pools,
            ghosts,
            magazine,
            common,
            ..
        } = self;
        let top = common.top.load(Ordering::Relaxed);
        ghosts.set_entries(top, || common.ghost_entries(top), magazine);
        ghosts.insert(page_hash, &mut pool_in(pools, slot).ghosts, magazine);
    }

    /// Publishes the stamps of the pool's oldest page and of the next to be evicted, if they may have changed.
    #[inline(always)]
    fn publish(&mut self, slot: usize) {
        let number = self.number;
        let Self {
            pools, descriptors, ..
        } = self;
        let pool = pool_in(pools, slot);
        let [first, second, cold] = pool.lists.each_ref().map(|list| some(list.oldest()));
        let heads = [first, second, cold, pool.next_evicted()];
        if pool.published == Some(heads) {
            return;
        }
        pool.published = Some(heads);
        let stamp = |id: Option<u32>| id.map_or(NONE_OLD, |id| descriptors[id].stamp());
        pool.totals.publish(
            number,
            stamp(first).min(stamp(second)).min(stamp(cold)),
            stamp(heads[3]),
            heads[3].is_some_and(|id| descriptors[id].list() == Queue::Second.index()),
        );
    }

    /// The pool's oldest page.
    fn oldest(&self, slot: usize) -> Option<u32> {
        let pool = self.pools[slot].as_ref()?;
        let heads = pool.lists.iter();
        heads
            .filter_map(|list| some(list.oldest()))
            .min_by_key(|&id| self.descriptors[id].stamp())
    }
}

#[inline]
fn some(id: u32) -> Option<u32> {
    (id != NIL).then_some(id)
}

/// The pool of a slot that was found under the lock that is still held.
#[inline(always)]
fn pool_in(pools: &mut [Option<Box<Pool>>], slot: usize) -> &mut Pool {
    pools[slot]
        .as_mut()
        .expect("the slot was found under this lock")
}

/// The pages of a list, the oldest first.
fn ids(list: &List, descriptors: &Arena<Descriptor>) -> impl Iterator<Item = u32> {
    std::iter::successors(some(list.oldest()), |&id| some(descriptors[id].newer()))
}

/// All pages of a shard, in no order; changes to them must not affect their lists.
fn pages(pools: &[Option<Box<Pool>>], descriptors: &Arena<Descriptor>) -> Vec<u32> {
    let lists = pools.iter().flatten().flat_map(|pool| &pool.lists);
    lists.flat_map(|list| ids(list, descriptors)).collect()
}

/// Pages of a chunk: adjacent pages stay in one shard.
pub(crate) const CHUNK_PAGES: u32 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    /// Also where the secret is within a thousandth of 0, 2^63 or 2^64.
    #[test]
    fn hashes_of_consecutive_indices_are_even() {
        for seed in [u64::MAX - (1 << 52), 1 << 63 | 5 << 51 | 7, 1 << 52 | 1] {
            for object_hash in [0, 0x0123_4567_89ab_cdef, u64::MAX] {
                for shift in [0, 32, 54] {
                    let hashes = (0..8000).map(|index| hash_within(object_hash, index, seed));
                    let sampled = hashes.filter(|hash| hash >> shift & 7 == 0).count();
                    assert!(
                        (850..1150).contains(&sampled),
                        "{seed:x} {shift}: {sampled}"
                    );
                }
            }
        }
    }
}
