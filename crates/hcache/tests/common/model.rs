//! The naive twin of the store: the last page put under each handle, in maps, and the answers that this allows.
//!
//! A store may refuse puts and drop pages, so most of its answers are not determined; but each must be one that
//! *some* such store gives:
//!
//! - A hit is the page last put under the handle, every byte of it, not flushed, removed or missed since. A miss is
//!   recorded: a page that missed once does not come back.
//! - Counts and outcomes that reveal a page's presence agree with that.
//! - With one shard and under LRU, pages leave a pool in LRU order: whatever is found older than a page that left is an
//!   error. (Not so with compression, where a page that shares its frame may leave with another. Other policies have
//!   twins of their own in `policies.rs`.)
//! - Counters are the sums of the answers given, and account for each page: a page that was put is there or left in a
//!   way that is counted.
//!
//! Where nothing can push a page out (`Rules::roomy`), answers are determined, and must be those.

use std::collections::{BTreeMap, HashSet};
use std::ops::RangeInclusive;
use std::time::Duration;

use plimsoll_hcache::{
    Client, ClientId, ClientOptions, Counters, Error, Handle, LRU, PAGE_BYTES, Page, PoolId,
    PoolKind, PoolOptions, PoolStats, PutOutcome, Sharing, Store, StoreOptions, StoreStats,
};

use crate::content::Content;
use crate::random::mixed;

/// Client slots.
const CLIENTS: usize = 4;

/// Pools in existence, at most.
const POOLS: usize = 8;

/// Maximum number of handles of one call: some more than are processed together.
const EACH: u8 = 40;

/// Bytes that a store charges for a page beside its contents.
const DESCRIPTION_BYTES: u64 = 40;

/// What it may charge a page of one word more than that, in bytes: such pages may lie far apart.
const WORD_BYTES: u64 = 216;

const OBJECTS: [u64; 8] = [0, 1, 2, 255, 1 << 32, 1 << 63, u64::MAX - 1, u64::MAX];

/// Indices about the ends of a radix tree's nodes of any width; others are dense from 0.
const INDICES: [u32; 32] = {
    let mut indices = [0; 32];
    let mut bit = 0;
    while bit < 32 {
        indices[bit] = match bit % 3 {
            0 => u32::MAX >> bit,
            1 => (1 << bit) + 250,
            _ => (1 << (bit - 1)) - 1 + (1 << 16),
        };
        bit += 1;
    }
    indices
};

fn index_of(byte: u8) -> u32 {
    match byte.checked_sub(224) {
        Some(sparse) => INDICES[usize::from(sparse)],
        None => u32::from(byte),
    }
}

/// The assumptions that the twin may make.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// All pages fit, so that none is evicted and no put is refused except for its pool's capacity.
    pub roomy: bool,
    /// There is one shard.
    pub one_shard: bool,
    /// The page unused for the longest time leaves first.
    pub lru: bool,
    /// Compression is on.
    pub compression: bool,
    /// A frame is charged to each of those who share it.
    pub charged_each: bool,
}

/// The operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Put,
    PutRun,
    PutEach,
    Get,
    GetRun,
    GetEach,
    Peek,
    Flush,
    FlushRange,
    FlushObject,
    FlushPool,
    CreatePool,
    DestroyPool,
    Resize,
    Turn,
    DropClient,
    Stats,
}

/// How often each is done, of the sum.
pub type Weights = [(Kind, u16)];

/// For short sequences: everything happens.
pub const EVEN: &Weights = &[
    (Kind::Put, 12),
    (Kind::PutRun, 4),
    (Kind::PutEach, 3),
    (Kind::Get, 12),
    (Kind::GetRun, 1),
    (Kind::GetEach, 3),
    (Kind::Peek, 6),
    (Kind::Flush, 3),
    (Kind::FlushRange, 3),
    (Kind::FlushObject, 1),
    (Kind::FlushPool, 1),
    (Kind::CreatePool, 2),
    (Kind::DestroyPool, 1),
    (Kind::Resize, 2),
    (Kind::Turn, 2),
    (Kind::DropClient, 1),
    (Kind::Stats, 2),
];

/// An operation and its target.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    kind: Kind,
    client: u8,
    pool: u8,
    object: u8,
    index: u8,
    content: u8,
}

impl Step {
    /// Returns the step that 64 bits encode.
    pub fn new(bits: u64, weights: &Weights) -> Self {
        let [low, high, client, pool, object, index, content, _] = bits.to_le_bytes();
        let sum: u16 = weights.iter().map(|weight| weight.1).sum();
        let mut left = u16::from_le_bytes([low, high]) % sum;
        let chosen = weights.iter().find(|(_, weight)| {
            let here = left < *weight;
            left = left.saturating_sub(*weight);
            here
        });
        Self {
            kind: chosen.expect("less than the sum").0,
            client,
            pool,
            object,
            index,
            content,
        }
    }
}

type Key = (u64, u32);

/// A page that was put and is, or may be, there.
#[derive(Debug)]
struct Entry {
    content: Content,
    /// When it was last used: its place in LRU order.
    used: u64,
}

#[derive(Debug)]
struct Pool {
    id: PoolId,
    kind: PoolKind,
    group: u64,
    /// Slots, longest in it first.
    members: Vec<usize>,
    capacity: Option<u64>,
    /// Every entry is there.
    exact: bool,
    entries: BTreeMap<Key, Entry>,
    order: BTreeMap<u64, Key>,
    /// Its expected counters; `evicted_pages` only if `exact`.
    counters: Counters,
    /// Pages put where there was none, less those known to have gone.
    balance: u64,
}

impl Pool {
    fn is_private(&self) -> bool {
        self.kind == PoolKind::PrivateExclusive
    }

    fn remove(&mut self, key: Key) -> Option<Entry> {
        let entry = self.entries.remove(&key)?;
        self.order.remove(&entry.used);
        Some(entry)
    }

    fn insert(&mut self, key: Key, content: Content, now: u64) {
        self.remove(key);
        let entry = Entry { content, used: now };
        self.entries.insert(key, entry);
        self.order.insert(now, key);
    }

    fn touch(&mut self, key: Key, now: u64) {
        let entry = self.entries.get_mut(&key).expect("it was just found");
        self.order.remove(&entry.used);
        entry.used = now;
        self.order.insert(now, key);
    }

    /// Records whether a page is there, and asserts that it may be.
    fn found(&mut self, key: Key, there: bool) {
        if !self.entries.contains_key(&key) {
            assert!(!there, "{key:?} is there, but was not put, or is gone");
            return;
        }
        if !there {
            assert!(!self.exact, "{key:?} is gone, and there was room");
            self.remove(key);
        }
    }

    /// Asserts that there are as many pages as possible and necessary.
    fn bounds(&self) -> RangeInclusive<u64> {
        let most = self.entries.len() as u64;
        if self.exact { most..=most } else { 0..=most }
    }

    /// Removes the pages that a flush covers, and asserts the number it returned.
    fn flushed(&mut self, keys: &[Key], count: u64) {
        let most = keys.len() as u64;
        let least = if self.exact { most } else { 0 };
        assert!(
            (least..=most).contains(&count),
            "{count} flushed of {least} to {most}"
        );
        for key in keys {
            self.remove(*key);
        }
        self.counters.flushes += 1;
        self.counters.flushed_pages += count;
        self.balance -= count;
    }

    /// Drops the oldest pages beyond the capacity, as a pool that is exact does.
    fn shrink(&mut self, size_pages: u64) {
        while self.entries.len() as u64 > size_pages {
            let oldest = self.order.first_key_value();
            let key = *oldest.expect("each page has a place").1;
            self.remove(key);
            self.counters.evicted_pages += 1;
            self.balance -= 1;
        }
    }
}

struct Slot {
    client: Client,
    options: ClientOptions,
    /// Its expected counters.
    counters: Counters,
    /// It was never in a shared pool, which counts for all its clients together.
    alone: bool,
}

/// A store and its expected state.
pub struct Twin {
    store: Store,
    rules: Rules,
    clients: [Option<Slot>; CLIENTS],
    pools: Vec<Pool>,
    dead: Vec<PoolId>,
    client_ids: HashSet<ClientId>,
    pool_ids: HashSet<PoolId>,
    /// Number of steps, puts of runs counted singly: a time for LRU order, and a signature.
    now: u64,
    age: Duration,
    capacity_bytes: u64,
    /// Of pools that are no more.
    past: Counters,
    /// Buffer of gets; holds the result of the last one.
    page: Page,
}

impl Twin {
    /// Makes a store of those options, and its twin.
    pub fn new(options: StoreOptions, roomy: bool) -> Self {
        let rules = Rules {
            roomy,
            one_shard: options.shards == 1,
            lru: options.eviction.name == LRU.name,
            compression: options.compression,
            charged_each: options.sharing == Sharing::AcrossClients,
        };
        let capacity_bytes = options.capacity_bytes;
        Self {
            store: Store::new(options).expect("options in their ranges"),
            rules,
            clients: [const { None }; CLIENTS],
            pools: Vec::new(),
            dead: Vec::new(),
            client_ids: HashSet::new(),
            pool_ids: HashSet::new(),
            now: 0,
            age: Duration::ZERO,
            capacity_bytes,
            past: Counters::default(),
            page: [0xa5; PAGE_BYTES],
        }
    }

    /// Does one step on both.
    ///
    /// # Panics
    ///
    /// If the store's answer is not allowed.
    pub fn step(&mut self, step: Step) {
        self.now += 1;
        let slot = usize::from(step.client) % CLIENTS;
        if self.clients[slot].is_none() {
            self.create_client(slot, step);
        }
        match step.kind {
            Kind::CreatePool => return self.create_pool(slot, step),
            Kind::Resize => return self.resize(step),
            Kind::PutEach => return self.put_each(slot, step),
            Kind::GetEach => return self.get_each(slot, step),
            Kind::Turn => {
                self.age += Duration::from_millis(500);
                return self.store.turn(self.age);
            }
            Kind::DropClient => return self.drop_client(slot),
            Kind::Stats => return self.check_stats(),
            _ => {}
        }
        if step.pool >= 248 {
            return self.foreign(slot, step);
        }
        let of_client = |at: &usize| self.pools[*at].members.contains(&slot);
        let count = (0..self.pools.len()).filter(of_client).count();
        if count == 0 {
            return self.create_pool(slot, step);
        }
        let mut own = (0..self.pools.len()).filter(of_client);
        let at = own
            .nth(usize::from(step.pool) % count)
            .expect("less than the count");
        let key = (OBJECTS[usize::from(step.object % 8)], index_of(step.index));
        match step.kind {
            Kind::Put => self.put(slot, at, key, step.content),
            Kind::PutRun => {
                for more in 0..u32::from(step.content / 2) {
                    self.now += 1;
                    let kind = step.content ^ u8::try_from(more / 4).expect("less than 128");
                    self.put(slot, at, (key.0, more), kind);
                }
            }
            Kind::Get => self.get(slot, at, key, step.content),
            Kind::GetRun => {
                for index in 0..=u8::MAX {
                    self.now += 1;
                    self.get(slot, at, (key.0, index_of(index)), 0);
                }
            }
            Kind::Peek => self.peek(slot, at, key),
            Kind::Flush => self.flush(slot, at, key),
            Kind::FlushRange => {
                let end = match step.content {
                    0..64 => u32::from(step.content).wrapping_add(key.1),
                    _ => index_of(step.content),
                };
                self.flush_range(slot, at, key.0, key.1..=end);
            }
            Kind::FlushObject => {
                if step.content.is_multiple_of(2) {
                    self.flush_range(slot, at, key.0, 0..=u32::MAX);
                } else {
                    self.flush_object(slot, at, key.0);
                }
            }
            Kind::FlushPool => drop(self.flush_pool(slot, at)),
            Kind::DestroyPool => {
                let id = self.pools[at].id;
                assert_eq!(self.client(slot).destroy_pool(id), Ok(()));
                self.leave(slot, at);
            }
            kind => unreachable!("{kind:?} was done above"),
        }
    }

    /// Reads all expected pages, and asserts that the store holds nothing else. Returns all counters.
    ///
    /// # Panics
    ///
    /// If that fails.
    pub fn finish(mut self) -> Counters {
        self.check_stats();
        for at in 0..self.pools.len() {
            let slot = self.pools[at].members[0];
            let keys: Vec<Key> = self.pools[at].entries.keys().copied().collect();
            for key in keys {
                self.peek(slot, at, key);
            }
            // Each was inspected, so the rest is there, unless an inspection made room to decompress into.
            let pages = self.pools[at].entries.len();
            let flushed = self.flush_pool(slot, at);
            assert!(
                self.rules.compression || flushed == pages as u64,
                "{flushed} of {pages}"
            );
        }
        self.check_stats();
        for slot in 0..CLIENTS {
            if self.clients[slot].is_some() {
                self.drop_client(slot);
            }
        }
        let stats = self.store.stats();
        assert_eq!(stats.pages, 0);
        assert_eq!(
            (stats.compressed_raw_bytes, stats.deduplicated_pages),
            (0, 0)
        );
        assert!(stats.clients.is_empty());
        // What is left is metadata.
        assert_eq!(stats.used_bytes, stats.metadata_bytes);
        stats.counters
    }

    fn client(&self, slot: usize) -> &Client {
        &self.clients[slot]
            .as_ref()
            .expect("made when chosen")
            .client
    }

    fn count(&mut self, slot: usize, at: usize, change: impl Fn(&mut Counters)) {
        change(&mut self.pools[at].counters);
        change(
            &mut self.clients[slot]
                .as_mut()
                .expect("made when chosen")
                .counters,
        );
    }

    fn handle(&self, at: usize, key: Key) -> Handle {
        Handle {
            pool: self.pools[at].id,
            object: key.0,
            index: key.1,
        }
    }

    fn create_client(&mut self, slot: usize, step: Step) {
        let mut options = ClientOptions {
            group: u64::from(step.client / 128),
            weight: 1 + u32::from(step.content) * 3_000,
            ..ClientOptions::new(format!("client {slot}"))
        };
        if !self.rules.roomy {
            options.floor_bytes = u64::from(step.object) << 11;
            let ceiling_bytes = (step.index < 128).then(|| u64::from(step.index) << 14);
            options.ceiling_bytes = ceiling_bytes.filter(|bytes| *bytes >= options.floor_bytes);
        }
        let client = self.store.create_client(options.clone()).unwrap();
        assert!(self.client_ids.insert(client.id()), "a number used twice");
        self.clients[slot] = Some(Slot {
            client,
            options,
            counters: Counters::default(),
            alone: true,
        });
    }

    fn drop_client(&mut self, slot: usize) {
        for at in (0..self.pools.len()).rev() {
            if self.pools[at].members.contains(&slot) {
                self.leave(slot, at);
            }
        }
        self.clients[slot] = None;
    }

    fn leave(&mut self, slot: usize, at: usize) {
        self.pools[at].members.retain(|member| *member != slot);
        if self.pools[at].members.is_empty() {
            let pool = self.pools.swap_remove(at);
            self.past.add(&pool.counters);
            self.dead.push(pool.id);
        }
    }

    fn create_pool(&mut self, slot: usize, step: Step) {
        if self.pools.len() == POOLS {
            return;
        }
        let options = if step.content < 128 {
            PoolOptions::private()
        } else {
            PoolOptions::shared(u128::from(step.content % 3) << 100)
        };
        let group = self.clients[slot]
            .as_ref()
            .expect("made when chosen")
            .options
            .group;
        let capacity_pages = (step.index < 128).then(|| u64::from(step.object) * 2);
        let options = PoolOptions {
            capacity_pages,
            ..options
        };
        let id = self.client(slot).create_pool(options).unwrap();
        let client = self.clients[slot].as_mut().expect("made when chosen");
        client.alone &= options.kind == PoolKind::PrivateExclusive;
        let is_same = |pool: &&mut Pool| {
            !pool.is_private() && pool.kind == options.kind && pool.group == group
        };
        if let Some(pool) = self.pools.iter_mut().find(is_same) {
            assert_eq!(pool.id, id);
            if !pool.members.contains(&slot) {
                pool.members.push(slot);
            }
            return;
        }
        assert!(self.pool_ids.insert(id), "a number used twice");
        self.pools.push(Pool {
            id,
            kind: options.kind,
            group,
            members: vec![slot],
            capacity: capacity_pages,
            // Else it is not determined which pages are the oldest.
            exact: self.rules.roomy
                && (capacity_pages.is_none() || self.rules.one_shard && self.rules.lru),
            entries: BTreeMap::new(),
            order: BTreeMap::new(),
            counters: Counters::default(),
            balance: 0,
        });
    }

    fn resize(&mut self, step: Step) {
        let capacity_bytes = if self.rules.roomy {
            ROOMY_BYTES - (u64::from(step.content) << 12)
        } else {
            (1 << 20) + (u64::from(step.content) << 13)
        };
        self.store.resize(capacity_bytes).unwrap();
        self.capacity_bytes = capacity_bytes;
        let stats = self.store.stats();
        assert!(stats.used_bytes <= self.capacity_bytes);
    }

    /// Executes the step in a pool that does not, or no longer, belong to the client.
    fn foreign(&mut self, slot: usize, step: Step) {
        let of_others = self
            .pools
            .iter()
            .filter(|pool| !pool.members.contains(&slot));
        let ids = of_others
            .map(|pool| pool.id)
            .chain(self.dead.iter().copied());
        let ids: Vec<PoolId> = ids.chain([PoolId(0), PoolId(u32::MAX)]).collect();
        let id = ids[usize::from(step.content) % ids.len()];
        if self
            .pools
            .iter()
            .any(|pool| pool.id == id && pool.members.contains(&slot))
        {
            return;
        }
        let handle = Handle {
            pool: id,
            object: OBJECTS[usize::from(step.object % 8)],
            index: index_of(step.index),
        };
        let mut page = [0x5a; PAGE_BYTES];
        let client = self.client(slot);
        let error = Error::NoSuchPool(id);
        assert_eq!(client.put(handle, &page), Err(error.clone()));
        assert_eq!(
            client.put_with(handle, |_| panic!("called")),
            Err(error.clone())
        );
        assert_eq!(client.get(handle, &mut page), Err(error.clone()));
        assert_eq!(
            client.get_with(handle, |_| panic!("called")),
            Err(error.clone())
        );
        assert_eq!(client.peek(handle, &mut page), Err(error.clone()));
        assert_eq!(client.flush(handle), Err(error.clone()));
        assert_eq!(
            client.flush_range(id, handle.object, 0..=u32::MAX),
            Err(error.clone())
        );
        assert_eq!(client.flush_object(id, handle.object), Err(error.clone()));
        assert_eq!(client.flush_pool(id), Err(error.clone()));
        assert_eq!(client.destroy_pool(id), Err(error));
        assert_eq!(page, [0x5a; PAGE_BYTES]);
    }

    fn put(&mut self, slot: usize, at: usize, key: Key, kind: u8) {
        let content = Content::new(kind, self.now);
        let page = content.page();
        let handle = self.handle(at, key);
        let outcome = if kind.is_multiple_of(8) {
            self.client(slot).put_with(handle, |frame| *frame = page)
        } else {
            self.client(slot).put(handle, &page)
        };
        self.was_put(slot, at, key, content, outcome.unwrap());
    }

    /// Records the outcome of a put, and asserts that it is allowed.
    fn was_put(&mut self, slot: usize, at: usize, key: Key, content: Content, outcome: PutOutcome) {
        let now = self.now;
        let pool = &mut self.pools[at];
        let size_pages = pool.entries.len() as u64;
        let (PutOutcome::Stored {
            replaced: was_there,
        }
        | PutOutcome::Refused { flushed: was_there }) = outcome;
        pool.found(key, was_there);
        if pool.exact {
            // Another page than this one must make room, if there is one that may.
            let is_full = !was_there && pool.capacity.is_some_and(|most| size_pages >= most);
            if is_full {
                pool.shrink(pool.capacity.map_or(0, |most| most.saturating_sub(1)));
            }
            let fits = was_there
                || pool
                    .capacity
                    .is_none_or(|most| (pool.entries.len() as u64) < most);
            assert!(
                outcome.is_stored() == fits,
                "{outcome:?}: {size_pages} pages of {:?}",
                pool.capacity
            );
        }
        if outcome.is_stored() {
            pool.balance += u64::from(!was_there);
            pool.insert(key, content, now);
        } else {
            pool.balance -= u64::from(was_there);
            pool.remove(key);
        }
        self.count(slot, at, |counters| {
            counters.puts += 1;
            counters.puts_replaced += u64::from(outcome.is_stored() && was_there);
            counters.puts_refused += u64::from(!outcome.is_stored());
            counters.flushed_pages += u64::from(!outcome.is_stored() && was_there);
        });
    }

    /// Asserts that the page in the buffer is the one under `key`.
    fn check_page(&self, at: usize, key: Key) {
        let Some(entry) = self.pools[at].entries.get(&key) else {
            panic!("{key:?} is there, but was not put, or is gone");
        };
        let expected = entry.content.page();
        if self.page != expected {
            let wrong = (0..PAGE_BYTES).filter(|byte| self.page[*byte] != expected[*byte]);
            let wrong: Vec<usize> = wrong.collect();
            panic!(
                "{key:?} of {:?}: {} bytes of {:?} are wrong, from {}",
                self.pools[at].id,
                wrong.len(),
                entry.content,
                wrong[0],
            );
        }
    }

    fn get(&mut self, slot: usize, at: usize, key: Key, how: u8) {
        let handle = self.handle(at, key);
        let mut page = self.page;
        let hit = if how.is_multiple_of(8) {
            let mut calls = 0;
            let hit = self.client(slot).get_with(handle, |frame| {
                page = *frame;
                calls += 1;
            });
            assert_eq!(Ok(calls == 1), hit);
            hit
        } else {
            self.client(slot).get(handle, &mut page)
        };
        let hit = hit.unwrap();
        assert!(hit || self.page == page, "a miss wrote into the page");
        self.page = page;
        self.was_got(slot, at, key, hit);
    }

    /// Records the result of a get, whose page is in the buffer if it hit, and asserts that it is allowed.
    fn was_got(&mut self, slot: usize, at: usize, key: Key, hit: bool) {
        if hit {
            self.check_page(at, key);
        }
        let now = self.now;
        let pool = &mut self.pools[at];
        pool.found(key, hit);
        if hit && pool.is_private() {
            pool.remove(key);
            pool.balance -= 1;
        } else if hit && !pool.is_private() {
            pool.touch(key, now);
        }
        self.count(slot, at, |counters| {
            counters.gets += 1;
            counters.hits += u64::from(hit);
        });
    }

    /// Handles for one call: of any of the client's pools, some of them twice, and some of pools that are not its own
    /// (`None`).
    fn handles_of_each(&self, slot: usize, step: Step) -> Vec<(Handle, Option<(usize, Key)>)> {
        let of_client = |at: &usize| self.pools[*at].members.contains(&slot);
        let own: Vec<usize> = (0..self.pools.len()).filter(of_client).collect();
        let handles = (0..step.content % (EACH + 1)).map(|number| {
            let [which, pool, object, index, ..] =
                mixed(self.now << 8 ^ u64::from(number / 2)).to_le_bytes();
            let object = if which < 128 { step.object } else { object };
            // Neighbours, as a file is read, or far ones.
            let index = match which % 4 {
                0 => index,
                1 => step.index,
                _ => step.index.wrapping_add(number),
            };
            let key = (OBJECTS[usize::from(object % 8)], index_of(index));
            let place = (which % 32 > 0 && !own.is_empty())
                .then(|| (own[usize::from(pool) % own.len()], key));
            let foreign = Handle {
                pool: PoolId(u32::from(pool % 2)),
                object: key.0,
                index: key.1,
            };
            let handle = place.map_or(foreign, |(at, key)| self.handle(at, key));
            (handle, place)
        });
        handles.collect()
    }

    fn put_each(&mut self, slot: usize, step: Step) {
        let each = self.handles_of_each(slot, step);
        let handles: Vec<Handle> = each.iter().map(|(handle, _)| *handle).collect();
        let first = self.now + 1;
        let contents: Vec<Content> = (0u8..)
            .zip(first..)
            .map(|(number, now)| Content::new(step.index.wrapping_add(number / 4), now))
            .take(each.len())
            .collect();
        let mut fills = vec![0; each.len()];
        let mut outcomes = Vec::new();
        let fill = |number: usize, frame: &mut Page| {
            fills[number] += 1;
            *frame = contents[number].page();
        };
        let done = |number, outcome| {
            assert_eq!(number, outcomes.len(), "puts are done in order");
            outcomes.push(outcome);
        };
        self.client(slot).put_each(&handles, fill, done);
        assert_eq!(outcomes.len(), each.len());
        for (number, (outcome, (handle, place))) in outcomes.into_iter().zip(each).enumerate() {
            self.now += 1;
            let Some((at, key)) = place else {
                assert!(fills[number] <= 1);
                assert_eq!(outcome, Err(Error::NoSuchPool(handle.pool)));
                continue;
            };
            let outcome = outcome.unwrap();
            assert!(fills[number] == 1 || fills[number] == 0 && !outcome.is_stored());
            self.was_put(slot, at, key, contents[number], outcome);
        }
    }

    fn get_each(&mut self, slot: usize, step: Step) {
        let each = self.handles_of_each(slot, step);
        let handles: Vec<Handle> = each.iter().map(|(handle, _)| *handle).collect();
        let mut hits = Vec::new();
        let mut others = Vec::new();
        self.client(slot)
            .get_each(&handles, |number, page| match page {
                Ok(Some(page)) => hits.push((number, *page)),
                Ok(None) => others.push((number, None)),
                Err(error) => others.push((number, Some(error))),
            });
        let mut numbers: Vec<usize> = hits.iter().map(|(number, _)| *number).collect();
        numbers.extend(others.iter().map(|(number, _)| *number));
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..each.len()), "each is read once");
        // A handle that occurs twice may miss before it hits.
        for (number, page) in hits {
            self.now += 1;
            let (at, key) = each[number].1.expect("no hit in a foreign pool");
            self.page = page;
            self.was_got(slot, at, key, true);
        }
        for (number, error) in others {
            let (handle, place) = each[number];
            match (place, error) {
                (Some((at, key)), None) => self.was_got(slot, at, key, false),
                (None, Some(error)) => assert_eq!(error, Error::NoSuchPool(handle.pool)),
                (_, answer) => panic!("{handle:?}: {answer:?}"),
            }
        }
    }

    fn peek(&mut self, slot: usize, at: usize, key: Key) {
        let mut page = self.page;
        let there = self
            .client(slot)
            .peek(self.handle(at, key), &mut page)
            .unwrap();
        assert!(there || self.page == page, "a miss wrote into the page");
        self.page = page;
        if there {
            self.check_page(at, key);
        }
        self.pools[at].found(key, there);
    }

    fn flush(&mut self, slot: usize, at: usize, key: Key) {
        let there = self.client(slot).flush(self.handle(at, key)).unwrap();
        let pool = &mut self.pools[at];
        pool.found(key, there);
        pool.remove(key);
        pool.balance -= u64::from(there);
        self.count(slot, at, |counters| {
            counters.flushes += 1;
            counters.flushed_pages += u64::from(there);
        });
    }

    fn flush_range(&mut self, slot: usize, at: usize, object: u64, indices: RangeInclusive<u32>) {
        let id = self.pools[at].id;
        let count = self
            .client(slot)
            .flush_range(id, object, indices.clone())
            .unwrap();
        self.flushed(slot, at, count, |key| {
            key.0 == object && indices.contains(&key.1)
        });
    }

    fn flush_object(&mut self, slot: usize, at: usize, object: u64) {
        let count = self
            .client(slot)
            .flush_object(self.pools[at].id, object)
            .unwrap();
        self.flushed(slot, at, count, |key| key.0 == object);
    }

    fn flush_pool(&mut self, slot: usize, at: usize) -> u64 {
        let count = self.client(slot).flush_pool(self.pools[at].id).unwrap();
        self.flushed(slot, at, count, |_| true);
        assert_eq!(self.pools[at].balance - self.uncounted(at), 0);
        if self.pools.iter().all(|pool| pool.entries.is_empty()) {
            let stats = self.store.stats();
            assert_eq!(stats.charged_bytes(), 0);
        }
        count
    }

    fn flushed(&mut self, slot: usize, at: usize, count: u64, covers: impl Fn(&Key) -> bool) {
        let keys = self.pools[at].entries.keys().copied();
        let keys: Vec<Key> = keys.filter(covers).collect();
        self.pools[at].flushed(&keys, count);
        let slot = self.clients[slot].as_mut().expect("made when chosen");
        slot.counters.flushes += 1;
        slot.counters.flushed_pages += count;
    }

    /// Pages evicted from a pool, as the store counts them, less those that the twin has recorded.
    fn uncounted(&self, at: usize) -> u64 {
        let pool = &self.pools[at];
        let stats = self.store.stats();
        let found = stats.pools().find(|stats| stats.id == pool.id);
        let found = found.expect("it is there");
        found.counters.evicted_pages - pool.counters.evicted_pages
    }

    fn check_stats(&mut self) {
        let stats = self.store.stats();
        assert_eq!(stats.capacity_bytes, self.capacity_bytes);
        assert!(stats.used_bytes <= stats.capacity_bytes, "{stats:?}");
        assert!(stats.metadata_bytes <= stats.used_bytes);
        assert!(stats.compressed_frame_bytes <= stats.used_bytes);
        assert_eq!(stats.age_seconds, self.age.as_secs_f64());
        let clients = self.clients.iter().flatten();
        assert_eq!(stats.clients.len(), clients.count());
        let mut sums = self.past;
        let mut pages = 0;
        for client in self.clients.iter().flatten() {
            let mut all = stats.clients.iter();
            let found = all.find(|stats| stats.id == client.client.id());
            let found = found.expect("each client has its statistics");
            let options = &client.options;
            assert_eq!(found.name, options.name);
            assert_eq!(found.weight, options.weight);
            assert_eq!(found.floor_bytes, options.floor_bytes);
            assert_eq!(found.ceiling_bytes, options.ceiling_bytes);
            if let Some(ceiling) = options.ceiling_bytes {
                assert!(found.used_bytes <= ceiling, "{found:?}");
            }
            if client.alone {
                assert_eq!(asked(&found.counters), asked(&client.counters));
            }
            let private = found.pools.iter().map(|pool| pool.pages);
            assert_eq!(found.pages, private.sum::<u64>());
            let is_own = |pool: &PoolStats| {
                pool.kind == PoolKind::PrivateExclusive && pool.members == [found.id]
            };
            assert!(found.pools.iter().all(is_own));
        }
        assert_eq!(stats.pools().count(), self.pools.len());
        for pool in &self.pools {
            let found = stats.pools().find(|stats| stats.id == pool.id);
            let found = found.expect("each pool has its statistics");
            let members = pool.members.iter().map(|slot| self.client(*slot).id());
            assert_eq!(found.members, members.collect::<Vec<_>>());
            assert_eq!(
                (found.kind, found.capacity_pages),
                (pool.kind, pool.capacity)
            );
            assert!(
                pool.bounds().contains(&found.pages),
                "{found:?}, {:?}",
                pool.bounds()
            );
            assert!(found.objects <= found.pages);
            assert!(found.objects > 0 || found.pages == 0);
            assert!(found.compressed_pages <= found.pages);
            assert_eq!(found.oldest_age.is_some(), found.pages > 0);
            let most = pool.capacity.unwrap_or(u64::MAX);
            assert!(found.pages <= most, "{found:?}");
            assert_eq!(asked(&found.counters), asked(&pool.counters));
            let gone = found.counters.evicted_pages - pool.counters.evicted_pages;
            assert_eq!(found.pages + gone, pool.balance, "{found:?}");
            if pool.exact {
                let objects: HashSet<u64> = pool.entries.keys().map(|key| key.0).collect();
                let objects = objects.len() as u64;
                // One whose pages are in several parts may count in each.
                assert!(
                    found.objects == objects || !self.rules.one_shard && found.objects > objects
                );
                assert_eq!(gone, 0);
            }
            pages += found.pages;
            sums.add(&pool.counters);
        }
        assert_eq!(stats.pages, pages);
        assert_eq!(asked(&stats.counters), asked(&sums));
        assert!(stats.counters.evicted_pages >= sums.evicted_pages);
        check_charges(&stats, self.rules.charged_each);
    }
}

/// Asserts that clients are charged for all that the store holds: frames of their pages to the byte,
/// compressed pages for no more than their frames, pages of one word for no more than their metadata.
pub fn check_charges(stats: &StoreStats, charged_each: bool) {
    let charged_bytes = stats.charged_bytes() - stats.pages * DESCRIPTION_BYTES;
    let held_bytes = stats.used_bytes - stats.metadata_bytes;
    assert!(
        charged_bytes + stats.compressed_frame_bytes >= held_bytes,
        "{charged_bytes} charged of {held_bytes}: {stats:?}"
    );
    let each_bytes = if charged_each {
        PAGE_BYTES as u64
    } else {
        WORD_BYTES
    };
    let most_bytes = held_bytes + stats.deduplicated_pages * each_bytes;
    assert!(
        charged_bytes <= most_bytes,
        "{charged_bytes} charged of {held_bytes}: {stats:?}"
    );
    let compressed: u64 = stats.pools().map(|pool| pool.compressed_pages).sum();
    assert_eq!(
        stats.compressed_raw_bytes,
        compressed * PAGE_BYTES as u64,
        "{stats:?}"
    );
    assert!(stats.compressed_frame_bytes <= stats.compressed_raw_bytes);
}

/// Capacity in which all pages fit that a twin puts.
pub const ROOMY_BYTES: u64 = 160 << 20;

/// The counters that answers determine.
fn asked(counters: &Counters) -> Counters {
    Counters {
        evicted_pages: 0,
        compressed_pages: 0,
        decompressed_pages: 0,
        incompressible_pages: 0,
        shared_pages: 0,
        ..*counters
    }
}
