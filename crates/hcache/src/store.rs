//! The store: its shards, clients and pools, and the choice of the client that gives up memory.
//!
//! **Locks.** The registry's lock is taken first, then that of one shard, then that of shared contents or of the free list;
//! no thread holds two shards. So a put that needs a frame releases its shard, evicts in the shard with the oldest
//! page, and retries.
//!
//! **Eviction.** From the client furthest above its target ([`schedule`]), or if none is above, from the owner of
//! the oldest page. Within the client the oldest page, found by the timestamps that shards publish: exactly in a
//! store with one shard; with more, a page in the oldest 64th of the pages' ages.
//!
//! **The bound.** Pages and metadata are in frames below `top`, and no frame beyond it is in use; memory
//! outside the frames (pools, tables of shared contents, an observer) is subtracted from the capacity
//! before `top` is set.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::account::{Account, Oldest, PoolTotals};
use crate::arena::{NIL, NoFrame};
use crate::contents::Contents;
use crate::free::FreeFrames;
use crate::packed;
use crate::schedule::{self, Activity, Claim};
use crate::shard::{
    CHUNK_PAGES, Common, Goal, Magazine, Need, POOLS, Pool, Put, RUN, Request, Shard, Step, Won,
    fold,
};
use crate::sync::{
    self, Arc, AtomicU32, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, RwLock,
    RwLockReadGuard, lock,
};
use crate::sys::{HUGE_PAGE_FRAMES, Slab};
use crate::{
    ClientId, ClientOptions, ClientStats, Counters, Error, Handle, PAGE_BYTES, Page, PoolId,
    PoolKind, PoolOptions, PoolStats, PutOutcome, Sharing, StoreOptions, StoreStats, Taken,
    Version,
};

/// Most clients a store has.
const CLIENTS: usize = 4096;

/// Most pools a client has.
const POOLS_PER_CLIENT: usize = 256;

/// Capacity from which frames are asked for in huge pages.
const HUGE_FROM_BYTES: u64 = 256 << 20;

/// How often a put makes room before it is refused.
const TRIES: usize = 16;

/// Frames or pages won under one lock, at most.
const BATCH: usize = 16;

/// Most frames a store has: what the place of a compressed page can name.
const MOST_FRAMES: u32 = packed::Place::FRAMES_MAX;

/// Frames below which a part is not worth its metadata.
const LEAST_PART_FRAMES: u64 = 256;

/// Frames without which a part can hold no page.
const FEWEST_PART_FRAMES: u64 = 5;

/// Kept off the capacity for what is outside the frames, besides a share of the capacity, in bytes.
const HEAP_RESERVE_BYTES: u64 = 64 << 10;

/// A page store. Cheap to clone; all clones are the same store.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

/// A part on cache lines of its own.
#[repr(align(128))]
struct Part(Mutex<Shard>);

struct Inner {
    common: Arc<Common>,
    parts: Box<[Part]>,
    options: StoreOptions,
    registry: Mutex<Registry>,
    /// Clients, to choose a victim among. Held for moments.
    accounts: Mutex<Vec<Arc<Account>>>,
    /// One resize at a time.
    bound: Mutex<Bound>,
}

fn same_part(left: &Request, right: &Request) -> bool {
    left.part == right.part
}

/// Frames held outside of any lock, to be copied from or to. A resize waits for them.
struct Flight<'a> {
    common: &'a Common,
    frames: [u32; RUN],
    len: usize,
    _held: RwLockReadGuard<'a, ()>,
}

impl<'a> Flight<'a> {
    fn new(common: &'a Common) -> Self {
        Self {
            common,
            frames: [NIL; RUN],
            len: 0,
            _held: sync::read(&common.in_flight),
        }
    }

    fn frames(&self) -> &[u32] {
        &self.frames[..self.len]
    }

    fn hold(&mut self, frame: u32) {
        self.frames[self.len] = frame;
        self.len += 1;
    }

    /// Takes free frames until it has `count`, or there are none.
    fn take(&mut self, count: usize) {
        let mut free = lock(&self.common.free);
        while self.len < count {
            let Some(frame) = free.pop() else { return };
            self.hold(frame);
        }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let mut free = lock(&self.common.free);
        for &frame in self.frames[..self.len]
            .iter()
            .filter(|&&frame| frame != NIL)
        {
            free.push(frame);
        }
    }
}

/// What the capacity is, and what is taken off it.
#[derive(Default)]
struct Bound {
    capacity_bytes: u64,
    outside_bytes: u64,
    /// Taken off for what is outside the frames; a resize sets it anew.
    allowed_heap_bytes: u64,
    /// Where frames end.
    top: u32,
    /// Up to here frames may have memory: `top`, unless a shrink is [unfinished](Self::unfinished).
    given_back_to: u32,
    /// A shrink met more dirty pages than it could move: something may stand beyond `top` still.
    unfinished: bool,
}

#[derive(Default)]
struct Registry {
    clients: BTreeMap<ClientId, ClientRecord>,
    pools: BTreeMap<PoolId, PoolRecord>,
    /// Numbers given to clients and shared pools.
    numbers: u32,
    /// For each slot the last generation used.
    generations: Vec<u32>,
    free_slots: BTreeSet<u32>,
    /// What happened in pools that are gone.
    departed: Counters,
    now: Duration,
    /// Clock and time at past turns.
    ages: Vec<(u64, Duration)>,
}

struct ClientRecord {
    account: Arc<Account>,
    activity: Activity,
    gets: u64,
    operations: u64,
    created: Duration,
    last_active: Duration,
    departed: Counters,
}

struct PoolRecord {
    totals: Arc<PoolTotals>,
    kind: PoolKind,
    group: u64,
    /// Contents are shared within it.
    domain: u32,
    /// The one it is charged to first.
    members: Vec<ClientId>,
    created: Duration,
}

/// A client of a store. Its operations may be called from several threads. When it is dropped,
/// everything that only it held is given back at once.
pub struct Client {
    store: Store,
    account: Arc<Account>,
}

impl Store {
    /// Makes a store.
    ///
    /// # Errors
    /// Where an option is out of its range, or address space for the largest capacity cannot be reserved.
    pub fn new(options: StoreOptions) -> Result<Self, Error> {
        check(&options)?;
        let frames_of = |bytes: u64| bytes / PAGE_BYTES as u64;
        let max_frames = u32::try_from(frames_of(options.max_capacity_bytes))
            .ok()
            .filter(|&frames| frames <= MOST_FRAMES)
            .ok_or(Error::CapacityTooLarge {
                asked_bytes: options.max_capacity_bytes,
                most_bytes: u64::from(MOST_FRAMES) * PAGE_BYTES as u64,
            })?;
        let huge = options.capacity_bytes >= HUGE_FROM_BYTES;
        let slab = Slab::reserve(max_frames, huge).map_err(|error| Error::CannotReserve {
            asked_bytes: options.max_capacity_bytes,
            reason: error.to_string(),
        })?;
        let slab = Arc::new(slab);
        // A small store in many parts would be all metadata.
        let parts = frames_of(options.capacity_bytes) / LEAST_PART_FRAMES;
        let parts = options.shards.min(1 << parts.max(1).ilog2());
        let seeds = RandomState::new();
        let common = Arc::new(Common {
            free: Mutex::new(FreeFrames::new(slab.clone(), 0)),
            slab,
            contents: Contents::new(seeds.hash_one(0)),
            seeds: [1, 2, 3].map(|n| seeds.hash_one(n) | 1),
            parts,
            compression: options.compression,
            sharing: options.sharing,
            observer: options.observer.clone(),
            observe_mask: u64::from(options.observe_one_in) - 1,
            clock: AtomicU64::new(0),
            stamp_step: (frames_of(options.capacity_bytes) / (64 * parts as u64)).clamp(1, 16),
            top: AtomicU32::new(0),
            in_flight: RwLock::new(()),
            dirty_pages: AtomicU64::new(0),
            dirty_limit: AtomicU64::new(0),
            magazine_frames: AtomicUsize::new(1),
        });
        let inner = Inner {
            parts: (0..parts)
                .map(|number| Part(Mutex::new(Shard::new(number, common.clone()))))
                .collect(),
            common,
            registry: Mutex::new(Registry::default()),
            accounts: Mutex::new(Vec::new()),
            bound: Mutex::new(Bound::default()),
            options,
        };
        let capacity_bytes = inner.options.capacity_bytes;
        inner.set_bound(&mut lock(&inner.bound), capacity_bytes, 0)?;
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Makes a client.
    ///
    /// # Errors
    /// [`Error::TooManyClients`]; [`Error::OutOfRange`] for a weight outside 1 to 1 000 000 or a floor above the ceiling.
    pub fn create_client(&self, options: ClientOptions) -> Result<Client, Error> {
        check_client(&options)?;
        let mut registry = lock(&self.inner.registry);
        if registry.clients.len() >= CLIENTS {
            return Err(Error::TooManyClients(CLIENTS));
        }
        let id = ClientId(registry.next_number());
        let account = Arc::new(Account::new(id, options));
        let record = ClientRecord {
            account: account.clone(),
            activity: Activity::default(),
            gets: 0,
            operations: 0,
            created: registry.now,
            last_active: registry.now,
            departed: Counters::default(),
        };
        registry.clients.insert(id, record);
        lock(&self.inner.accounts).push(account.clone());
        self.inner.retarget(&mut registry);
        drop(registry);
        let client = Client {
            store: self.clone(),
            account,
        };
        self.inner.settle()?;
        Ok(client)
    }

    /// Changes a client's name, weight, floor and ceiling (not its group). A lower ceiling takes effect before the
    /// call returns, but for dirty pages.
    ///
    /// # Errors
    /// [`Error::NoSuchClient`], and as [`create_client`](Self::create_client).
    pub fn set_client(&self, client: ClientId, options: ClientOptions) -> Result<(), Error> {
        check_client(&options)?;
        let mut registry = lock(&self.inner.registry);
        let record = registry
            .clients
            .get(&client)
            .ok_or(Error::NoSuchClient(client))?;
        let account = record.account.clone();
        account.set_options(options);
        self.inner.retarget(&mut registry);
        drop(registry);
        self.inner.respect_ceiling(&account);
        Ok(())
    }

    /// Changes the capacity. Down takes effect before the call returns: pages are dropped, the others moved together,
    /// and the memory beyond is given back to the kernel.
    ///
    /// # Errors
    /// [`Error::CapacityTooSmall`] and [`Error::CapacityTooLarge`]; [`Error::DirtyPages`] if more are dirty than
    /// three quarters of the new capacity. The capacity is then as it was.
    pub fn resize(&self, capacity_bytes: u64) -> Result<(), Error> {
        let most_bytes = self.inner.options.max_capacity_bytes;
        if capacity_bytes > most_bytes {
            return Err(Error::CapacityTooLarge {
                asked_bytes: capacity_bytes,
                most_bytes,
            });
        }
        let mut bound = lock(&self.inner.bound);
        let outside_bytes = bound.outside_bytes;
        self.inner
            .set_bound(&mut bound, capacity_bytes, outside_bytes)
    }

    /// Sets how much memory outside the store is to be counted in its bound (an observer's), in bytes.
    ///
    /// # Errors
    /// As [`resize`](Self::resize).
    pub fn set_outside_bytes(&self, bytes: u64) -> Result<(), Error> {
        let mut bound = lock(&self.inner.bound);
        let capacity_bytes = bound.capacity_bytes;
        self.inner.set_bound(&mut bound, capacity_bytes, bytes)
    }

    /// Runs the scheduler: `now` is the time since the store began. To be called about once a second.
    pub fn turn(&self, now: Duration) {
        self.inner.turn(now);
    }

    /// Returns what the store says of itself.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        self.inner.stats()
    }
}

/// What is taken off a capacity for what is outside the frames: more than there is, so that a few pools more do not
/// move the end of the frames.
fn allowed_heap_bytes(heap_bytes: u64, capacity_bytes: u64, sharing: Sharing) -> u64 {
    // The table of shared contents grows between turns: at most an entry of 28 bytes a frame.
    let contents_bytes = match sharing {
        Sharing::Off => 0,
        _ => capacity_bytes / PAGE_BYTES as u64 * 28,
    };
    heap_bytes + heap_bytes / 8 + capacity_bytes / 256 + contents_bytes + HEAP_RESERVE_BYTES
}

fn check(options: &StoreOptions) -> Result<(), Error> {
    let range = |what, value: u64, range| Err(Error::OutOfRange { what, value, range });
    if !options.shards.is_power_of_two() || options.shards > StoreOptions::MOST_SHARDS {
        return range(
            "the number of shards",
            options.shards as u64,
            "a power of two from 1 to 1024",
        );
    }
    if !options.observe_one_in.is_power_of_two() {
        return range(
            "observe_one_in",
            options.observe_one_in.into(),
            "a power of two",
        );
    }
    if options.capacity_bytes < StoreOptions::MIN_CAPACITY_BYTES {
        return Err(Error::CapacityTooSmall {
            asked_bytes: options.capacity_bytes,
            least_bytes: StoreOptions::MIN_CAPACITY_BYTES,
        });
    }
    if options.capacity_bytes > options.max_capacity_bytes {
        return Err(Error::CapacityTooLarge {
            asked_bytes: options.capacity_bytes,
            most_bytes: options.max_capacity_bytes,
        });
    }
    Ok(())
}

fn check_client(options: &ClientOptions) -> Result<(), Error> {
    if !(1..=1_000_000).contains(&options.weight) {
        return Err(Error::OutOfRange {
            what: "the weight",
            value: options.weight.into(),
            range: "from 1 to 1 000 000",
        });
    }
    match options.ceiling_bytes {
        Some(ceiling) if ceiling < options.floor_bytes => Err(Error::OutOfRange {
            what: "the ceiling",
            value: ceiling,
            range: "at least the floor",
        }),
        _ => Ok(()),
    }
}

impl ClientRecord {
    fn claim(&self) -> Claim {
        let options = lock(&self.account.options);
        Claim {
            weight: options.weight,
            floor_bytes: options.floor_bytes,
            ceiling_bytes: options.ceiling_bytes,
            activity: self.activity.rate,
        }
    }
}

impl Registry {
    /// A number that no client and no pool's domain has.
    fn next_number(&mut self) -> u32 {
        loop {
            self.numbers = self.numbers.checked_add(1).unwrap_or(1);
            let number = self.numbers;
            let taken = self.clients.contains_key(&ClientId(number))
                || self.pools.values().any(|pool| pool.domain == number);
            if !taken {
                return number;
            }
        }
    }

    /// A number for a pool: its slot, and how often the slot was used, modulo a million.
    fn next_pool(&mut self) -> Option<PoolId> {
        let slot = match self.free_slots.pop_first() {
            Some(slot) => slot,
            None => {
                let slot = u32::try_from(self.generations.len()).ok();
                let slot = slot.filter(|&slot| slot < POOLS)?;
                self.generations.push(0);
                slot
            }
        };
        let generation = &mut self.generations[slot as usize];
        *generation = (*generation + 1) % (u32::MAX / POOLS);
        Some(PoolId(*generation * POOLS + slot))
    }

    fn free_pool(&mut self, id: PoolId) {
        self.free_slots.insert(id.0 % POOLS);
    }

    fn pools_of(&self, client: ClientId) -> impl Iterator<Item = PoolId> {
        let mine = self
            .pools
            .iter()
            .filter(move |(_, pool)| pool.members.contains(&client));
        mine.map(|(id, _)| *id)
    }

    /// How long ago a page of that stamp was last used, to a turn.
    fn age(&self, stamp: u64) -> Duration {
        let after = self.ages.partition_point(|&(clock, _)| clock < stamp);
        let used = self.ages.get(after).map_or(self.now, |&(_, at)| at);
        self.now.saturating_sub(used)
    }

    fn remember_age(&mut self, clock: u64) {
        const AGES: usize = 4096;
        if self.ages.len() == AGES {
            // Older times are kept more coarsely.
            let mut n = 0;
            self.ages.retain(|_| {
                n += 1;
                n % 2 == 0 || n > AGES / 2
            });
        }
        self.ages.push((clock, self.now));
    }
}

impl Inner {
    #[inline(always)]
    fn part(&self, number: usize) -> MutexGuard<'_, Shard> {
        lock(&self.parts[number].0)
    }

    /// Part that a chunk of an object's pages is in.
    #[inline(always)]
    fn part_of(&self, hash: u64, index: u32) -> usize {
        let mixed = fold(hash ^ u64::from(index / CHUNK_PAGES), self.common.seeds[2]);
        (mixed >> 54) as usize & (self.parts.len() - 1)
    }

    /// Bytes held outside the slab.
    fn heap_bytes(&self) -> u64 {
        let parts: usize = (0..self.parts.len())
            .map(|part| self.part(part).heap_bytes())
            .sum();
        let registry = lock(&self.registry);
        let pools = registry
            .pools
            .values()
            .map(|pool| pool.totals.heap_bytes() + size_of::<PoolRecord>());
        let clients =
            registry.clients.len() * 2 * (size_of::<ClientRecord>() + size_of::<Account>());
        let ages = registry.ages.capacity() * size_of::<(u64, Duration)>();
        (parts + pools.sum::<usize>() + clients + ages) as u64 + self.common.contents.bytes()
    }

    /// Sees to it that what is held outside the slab is taken off the capacity.
    fn settle(&self) -> Result<(), Error> {
        let heap_bytes = self.heap_bytes();
        let mut bound = lock(&self.bound);
        let allowed = allowed_heap_bytes(heap_bytes, bound.capacity_bytes, self.options.sharing);
        let too_much = bound.allowed_heap_bytes.saturating_sub(allowed) > HEAP_RESERVE_BYTES * 2;
        if heap_bytes <= bound.allowed_heap_bytes && !too_much {
            return Ok(());
        }
        let Bound {
            capacity_bytes,
            outside_bytes,
            ..
        } = *bound;
        self.set_bound(&mut bound, capacity_bytes, outside_bytes)
    }

    /// Changes capacity and what is taken off it.
    fn set_bound(
        &self,
        bound: &mut Bound,
        capacity_bytes: u64,
        outside_bytes: u64,
    ) -> Result<(), Error> {
        if bound.unfinished {
            self.clear_beyond(bound.top)
                .map_err(|NoFrame| self.dirty_error(capacity_bytes))?;
            self.give_back(bound)?;
        }
        let heap_bytes = self.heap_bytes();
        let allowed_heap_bytes =
            allowed_heap_bytes(heap_bytes, capacity_bytes, self.options.sharing);
        let taken = allowed_heap_bytes.saturating_add(outside_bytes);
        let frames = capacity_bytes.saturating_sub(taken) / PAGE_BYTES as u64;
        let least_frames = self.parts.len() as u64 * FEWEST_PART_FRAMES;
        if frames < least_frames || capacity_bytes < StoreOptions::MIN_CAPACITY_BYTES {
            let least_bytes = taken.saturating_add(least_frames * PAGE_BYTES as u64);
            return Err(Error::CapacityTooSmall {
                asked_bytes: capacity_bytes,
                least_bytes: least_bytes.max(StoreOptions::MIN_CAPACITY_BYTES),
            });
        }
        let mut top = u32::try_from(frames).expect("checked when the store was made");
        if self.options.capacity_bytes >= HUGE_FROM_BYTES && top >= HUGE_PAGE_FRAMES {
            // A huge page across the end would take memory beyond it.
            top -= top % HUGE_PAGE_FRAMES;
        }
        let common = &self.common;
        let dirty_limit = u64::from(top) / 4 * 3;
        let old_limit = common.dirty_limit.swap(dirty_limit, Ordering::SeqCst);
        if common.dirty_pages.load(Ordering::SeqCst) > dirty_limit {
            common.dirty_limit.store(old_limit, Ordering::SeqCst);
            return Err(self.dirty_error(capacity_bytes));
        }
        let magazine_frames =
            (top as usize / (64 * self.parts.len())).clamp(1, Magazine::MOST_FRAMES);
        common
            .magazine_frames
            .store(magazine_frames, Ordering::Relaxed);
        let held = bound.top - lock(&common.free).len();
        // In this order, so that a frame given back meanwhile is not handed out beyond the end, nor lost below it.
        common.top.store(top, Ordering::SeqCst);
        lock(&common.free).set_top(top);
        // Who took frames before that has put them in by then.
        sync::wait_for_readers(&common.in_flight);
        let old_top = std::mem::replace(&mut bound.top, top);
        bound.capacity_bytes = bound.capacity_bytes.max(capacity_bytes);
        bound.outside_bytes = outside_bytes;
        bound.allowed_heap_bytes = allowed_heap_bytes;
        if top < old_top {
            bound.unfinished = true;
            bound.given_back_to = bound.given_back_to.max(old_top);
            self.retarget(&mut lock(&self.registry));
            self.drop_frames(u64::from(held.saturating_sub(top)));
            self.clear_beyond(top)
                .map_err(|NoFrame| self.dirty_error(capacity_bytes))?;
            self.give_back(bound)?;
        }
        bound.capacity_bytes = capacity_bytes;
        self.retarget(&mut lock(&self.registry));
        Ok(())
    }

    fn dirty_error(&self, asked_bytes: u64) -> Error {
        let dirty_pages = self.common.dirty_pages.load(Ordering::Relaxed);
        Error::DirtyPages {
            asked_bytes,
            dirty_pages,
        }
    }

    fn give_back(&self, bound: &mut Bound) -> Result<(), Error> {
        // Nothing stands beyond the end, but somebody may be reading what he took out of there.
        sync::wait_for_readers(&self.common.in_flight);
        let given = self.common.slab.give_back(bound.top..bound.given_back_to);
        given.map_err(|error| Error::CannotGiveBack {
            reason: error.to_string(),
        })?;
        bound.given_back_to = bound.top;
        bound.unfinished = false;
        Ok(())
    }

    /// Drops pages until so many frames are won, or nothing can be dropped.
    fn drop_frames(&self, mut frames: u64) {
        while frames > 0 {
            let won = self.evict_somebody(256, Goal::Pages);
            if won.pages == 0 {
                return;
            }
            frames = frames.saturating_sub(won.frames);
        }
    }

    /// Moves everything out of frames from `top` on.
    fn clear_beyond(&self, top: u32) -> Result<(), NoFrame> {
        for part in 0..self.parts.len() {
            self.with_room(|| {
                let mut part = self.part(part);
                part.trim()?;
                part.relocate(top)
            })?;
        }
        self.with_room(|| {
            let take = || lock(&self.common.free).pop();
            self.common.contents.relocate(&self.common.slab, top, take)
        })
    }

    /// Tries until there are frames enough, as long as something can be dropped.
    fn with_room(&self, mut attempt: impl FnMut() -> Result<(), NoFrame>) -> Result<(), NoFrame> {
        /// How often nothing could be dropped before that is believed: frames may be on their way through other
        /// threads.
        const FUTILE: usize = 64;
        let mut futile = 0;
        loop {
            match attempt() {
                Ok(()) => return Ok(()),
                Err(NoFrame) if futile == FUTILE => return Err(NoFrame),
                Err(NoFrame) if self.evict_somebody(256, Goal::Pages).pages > 0 => {}
                Err(NoFrame) => {
                    futile += 1;
                    for part in 0..self.parts.len() {
                        self.part(part).magazine.spill();
                    }
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Computes targets anew.
    fn retarget(&self, registry: &mut Registry) {
        let capacity_bytes = u64::from(self.common.top.load(Ordering::Relaxed)) * PAGE_BYTES as u64;
        let claims: Vec<Claim> = registry.clients.values().map(ClientRecord::claim).collect();
        let mut targets = Vec::new();
        schedule::targets(capacity_bytes, &claims, &mut targets);
        for (record, target) in registry.clients.values().zip(targets) {
            record.account.set_target_bytes(target);
        }
    }

    fn turn(&self, now: Duration) {
        let mut activity: HashMap<ClientId, (u64, u64)> = HashMap::new();
        for part in 0..self.parts.len() {
            let mut part = self.part(part);
            // Without frames to do it with, it waits for a later turn.
            let _ = part.trim();
            for member in part.pools.iter().flatten().flat_map(|pool| pool.members()) {
                let (gets, operations) = activity.entry(member.id).or_default();
                *gets += member.counters.gets;
                *operations += member.counters.gets + member.counters.puts;
            }
        }
        let mut registry = lock(&self.registry);
        let elapsed = now.saturating_sub(registry.now);
        registry.now = registry.now.max(now);
        let now = registry.now;
        registry.remember_age(self.common.clock.load(Ordering::Relaxed));
        for (id, record) in &mut registry.clients {
            let (gets, operations) = activity.get(id).copied().unwrap_or_default();
            // Counts fall when the client leaves a pool.
            record
                .activity
                .update(gets.saturating_sub(record.gets), elapsed);
            if operations > record.operations {
                record.last_active = now;
            }
            (record.gets, record.operations) = (gets, operations);
        }
        self.retarget(&mut registry);
        drop(registry);
        // What does not fit is tried again at the next turn.
        let _ = self.settle();
    }

    /// Wins frames (or drops pages) of whoever is to give them up.
    fn evict_somebody(&self, count: usize, goal: Goal) -> Won {
        let mut without: Vec<ClientId> = Vec::new();
        loop {
            let Some(victim) = self.victim(&without) else {
                return Won::default();
            };
            let won = self.evict_from(&victim, count, goal);
            if won.pages > 0 {
                return won;
            }
            without.push(victim.id);
        }
    }

    /// Who is to give up memory, but for some.
    fn victim(&self, without: &[ClientId]) -> Option<Arc<Account>> {
        let accounts = lock(&self.accounts);
        let evictable =
            |account: &Account| account.used_bytes() > 0 && !without.contains(&account.id);
        let usage = accounts.iter().map(|account| {
            let target = account.target_bytes();
            (
                account.used_bytes(),
                target,
                account.floor_bytes().min(target),
                evictable(account),
            )
        });
        if let Some(victim) = schedule::victim(usage) {
            return Some(accounts[victim].clone());
        }
        let oldest = |above_floor: bool| {
            let some = accounts.iter().filter(|account| {
                evictable(account) && (!above_floor || account.used_bytes() > account.floor_bytes())
            });
            some.min_by_key(|account| account.oldest().map_or(u64::MAX, |oldest| oldest.stamp))
                .cloned()
        };
        oldest(true).or_else(|| oldest(false))
    }

    /// Drops a client's pages until it is below its ceiling, or only dirty ones are left.
    fn respect_ceiling(&self, account: &Account) {
        while account.is_above_ceiling() && self.evict_from(account, BATCH, Goal::Pages).pages > 0 {
        }
    }

    /// Wins frames (or drops pages) of one client, its oldest first.
    fn evict_from(&self, account: &Account, count: usize, goal: Goal) -> Won {
        self.evict_oldest(|| account.oldest(), count, goal)
    }

    /// Drops pages of one pool, its oldest first.
    fn evict_from_pool(&self, pool: &Arc<PoolTotals>, count: usize) -> Won {
        self.evict_oldest(|| Oldest::of(pool, true), count, Goal::Pages)
    }

    /// Evicts where the oldest page is.
    fn evict_oldest(&self, oldest: impl Fn() -> Option<Oldest>, count: usize, goal: Goal) -> Won {
        // What is published may be out of date by the time the part is locked: the page may be gone or young.
        // Then any page of that part will do.
        for attempt in 0..=self.parts.len() {
            let Some(oldest) = oldest() else { break };
            let clock = self.common.clock.load(Ordering::Relaxed);
            let slack = clock.saturating_sub(oldest.stamp) / 64;
            let until = if attempt == 0 {
                oldest.next.max(oldest.stamp + slack)
            } else {
                u64::MAX
            };
            let won = self
                .part(oldest.part)
                .evict(oldest.pool.id, until, count, goal);
            if won.pages > 0 {
                return won;
            }
        }
        Won::default()
    }

    /// How many frames to win at once: few in a small store, where each counts.
    fn batch(&self) -> usize {
        (self.common.top.load(Ordering::Relaxed) as usize / 8192).clamp(1, BATCH)
    }

    fn put<F: FnOnce(&mut Page)>(
        &self,
        client: ClientId,
        handle: Handle,
        dirty: bool,
        fill: F,
    ) -> Result<PutOutcome, Error> {
        let hash = self.common.object_hash(handle.pool.0, handle.object);
        let part = self.part_of(hash, handle.index);
        let mut put = Put {
            hash,
            handle,
            dirty,
            fill: Some(fill),
            object: NIL,
            frame: None,
            counted: false,
        };
        self.put_at(client, part, &mut put)
    }

    /// Puts, as often as room has to be made for it.
    fn put_at<F: FnOnce(&mut Page)>(
        &self,
        client: ClientId,
        part: usize,
        put: &mut Put<F>,
    ) -> Result<PutOutcome, Error> {
        for _ in 0..TRIES {
            let need = match self.part(part).put(client, put)? {
                Ok(outcome) => return Ok(outcome),
                Err(need) => need,
            };
            let won = match need {
                Need::Frames => self.evict_somebody(self.batch(), Goal::Memory),
                Need::Ceiling(account) => self.evict_from(&account, self.batch(), Goal::Memory),
                Need::PoolCapacity(pool) => self.evict_from_pool(&pool, 1),
                Need::Clean => Won::default(),
            };
            if won.pages == 0 {
                break;
            }
        }
        let flushed = self.part(part).refuse(client, put.hash, &put.handle)?;
        Ok(PutOutcome::Refused { flushed })
    }

    fn get_group(
        &self,
        client: ClientId,
        handles: &[Handle],
        read: &mut impl FnMut(usize, Result<Option<&Page>, Error>),
    ) {
        let mut requests = self.requests(handles);
        let requests = &mut requests[..handles.len()];
        self.prefetch(
            client,
            requests,
            &[Step::Link, Step::Descriptor, Step::Contents],
        );
        let mut flight = Flight::new(&self.common);
        let mut numbers = [0; RUN];
        for run in requests.chunk_by(same_part) {
            let taken = |number, frame| {
                numbers[flight.len] = number;
                flight.hold(frame);
            };
            self.part(run[0].part)
                .get_frames(client, run, taken, &mut *read);
        }
        for (&frame, &number) in flight.frames().iter().zip(&numbers) {
            self.common
                .slab
                .read(frame, |page| read(number, Ok(Some(page))));
        }
    }

    fn put_group(
        &self,
        client: ClientId,
        handles: &[Handle],
        fill: &mut impl FnMut(usize, &mut Page),
        done: &mut impl FnMut(usize, Result<PutOutcome, Error>),
    ) {
        let mut requests = self.requests(handles);
        let requests = &mut requests[..handles.len()];
        let mut flight = Flight::new(&self.common);
        // In a small store each page counts: there they go in one by one.
        let count = handles
            .len()
            .min(self.common.top.load(Ordering::Relaxed) as usize / 256);
        flight.take(count);
        if flight.len < count {
            self.evict_somebody(count - flight.len, Goal::Memory);
            flight.take(count);
        }
        for (request, &frame) in requests.iter().zip(flight.frames()) {
            self.common
                .slab
                .write(frame, |page| fill(request.number, page));
        }
        self.prefetch(client, requests, &[Step::Link]);
        let mut outcomes = [const { None }; RUN];
        let mut at = 0;
        for run in requests.chunk_by(same_part) {
            let home = run[0].part;
            let mut part = self.part(home);
            for request in run {
                let frame = flight.frames().get(at).copied();
                let mut put = Put {
                    hash: request.hash,
                    handle: request.handle,
                    dirty: false,
                    fill: frame
                        .is_none()
                        .then_some(|page: &mut Page| fill(request.number, page)),
                    object: request.object,
                    frame,
                    counted: false,
                };
                let outcome = match part.put(client, &mut put) {
                    Ok(Ok(outcome)) => Ok(outcome),
                    Err(error) => Err(error),
                    Ok(Err(_)) => {
                        drop(part);
                        let outcome = self.put_at(client, home, &mut put);
                        part = self.part(home);
                        outcome
                    }
                };
                if put.frame.is_none() && frame.is_some() {
                    flight.frames[at] = NIL;
                }
                outcomes[request.number] = Some(outcome);
                at += 1;
            }
        }
        // `done` may call the store.
        drop(flight);
        for (number, outcome) in outcomes.into_iter().enumerate() {
            if let Some(outcome) = outcome {
                done(number, outcome);
            }
        }
    }

    /// Asks for what stands between handles and their pages ahead of its use: one step for all of them before the
    /// next step for any, so that they wait for memory together.
    fn prefetch(&self, client: ClientId, requests: &mut [Request], steps: &[Step]) {
        if requests.len() < 2 {
            return;
        }
        for &step in steps {
            for run in requests.chunk_by_mut(same_part) {
                self.part(run[0].part).prefetch(client, run, step);
            }
        }
    }

    /// Requests for handles, those of a part one behind the other, and otherwise in their order.
    fn requests(&self, handles: &[Handle]) -> [Request; RUN] {
        /// Parts told apart; with more of them, those of one part are not all together, which costs a lock more.
        const PARTS: usize = 64;
        let mut places = [(0, 0); RUN];
        let mut starts = [0; PARTS + 1];
        for (place, handle) in places.iter_mut().zip(handles) {
            let hash = self.common.object_hash(handle.pool.0, handle.object);
            let part = self.part_of(hash, handle.index);
            *place = (part, hash);
            starts[part % PARTS + 1] += 1;
        }
        for part in 0..PARTS.min(self.parts.len()) {
            starts[part + 1] += starts[part];
        }
        let nothing = Request {
            number: 0,
            part: 0,
            hash: 0,
            handle: handles[0],
            object: NIL,
            candidate: NIL,
        };
        let mut requests = [nothing; RUN];
        for (number, (&handle, (part, hash))) in handles.iter().zip(places).enumerate() {
            let at = &mut starts[part % PARTS];
            requests[*at] = Request {
                number,
                part,
                hash,
                handle,
                ..nothing
            };
            *at += 1;
        }
        requests
    }

    /// Drops an object's pages of a range, in each part that may have some.
    fn flush_range(
        &self,
        client: ClientId,
        pool: PoolId,
        object: u64,
        indices: RangeInclusive<u32>,
    ) -> Result<u64, Error> {
        let hash = self.common.object_hash(pool.0, object);
        let home = self.part_of(hash, 0);
        let mut first = true;
        let mut pages = 0;
        let mut flush = |part: usize, mut indices: RangeInclusive<u32>| -> Result<bool, Error> {
            loop {
                let flushed = self.part(part).flush_range(
                    client,
                    hash,
                    pool,
                    object,
                    indices.clone(),
                    first,
                )?;
                first = false;
                pages += flushed.pages;
                match flushed.next {
                    Some(next) => indices = next..=*indices.end(),
                    None => return Ok(flushed.large),
                }
            }
        };
        let large = flush(home, indices.clone())?;
        if !large || indices.is_empty() {
            return Ok(pages);
        }
        let chunks = indices.start() / CHUNK_PAGES..=indices.end() / CHUNK_PAGES;
        if chunks.clone().count() < self.parts.len() {
            for chunk in chunks {
                let start = (chunk * CHUNK_PAGES).max(*indices.start());
                let end = (chunk * CHUNK_PAGES + (CHUNK_PAGES - 1)).min(*indices.end());
                flush(self.part_of(hash, start), start..=end)?;
            }
        } else {
            for part in (0..self.parts.len()).filter(|&part| part != home) {
                flush(part, indices.clone())?;
            }
        }
        Ok(pages)
    }
}

impl Inner {
    fn stats(&self) -> StoreStats {
        let registry = lock(&self.registry);
        let mut parts = PartsStats::default();
        for part in 0..self.parts.len() {
            parts.add(&self.part(part));
        }
        let pool = |(id, record): (&PoolId, &PoolRecord)| {
            let counted = parts.pools.get(id).copied().unwrap_or_default();
            PoolStats {
                id: *id,
                kind: record.kind,
                members: record.members.clone(),
                capacity_pages: record.totals.capacity_pages(),
                pages: counted.pages,
                dirty_pages: counted.dirty,
                compressed_pages: counted.packed,
                objects: counted.objects,
                oldest_age: Oldest::of(&record.totals, false)
                    .map(|oldest| registry.age(oldest.stamp)),
                created: record.created,
                counters: counted.counters,
            }
        };
        let client = |(id, record): (&ClientId, &ClientRecord)| {
            let charged = registry
                .pools
                .iter()
                .filter(|(_, pool)| pool.members.first() == Some(id));
            let pools: Vec<PoolStats> = charged.map(pool).collect();
            let mut counters = record.departed;
            counters.add(&parts.clients.get(id).copied().unwrap_or_default());
            let options = lock(&record.account.options);
            ClientStats {
                id: *id,
                name: options.name.clone(),
                group: options.group,
                weight: options.weight,
                floor_bytes: options.floor_bytes,
                ceiling_bytes: options.ceiling_bytes,
                target_bytes: record.account.target_bytes(),
                used_bytes: record.account.used_bytes(),
                pages: pools.iter().map(|pool| pool.pages).sum(),
                activity: record.activity.rate,
                created: record.created,
                last_active: record.last_active,
                counters,
                pools,
            }
        };
        let mut counters = registry.departed;
        parts
            .pools
            .values()
            .for_each(|pool| counters.add(&pool.counters));
        let clients: Vec<ClientStats> = registry.clients.iter().map(client).collect();
        let age = registry.now;
        drop(registry);
        let heap_bytes = self.heap_bytes();
        let bound = lock(&self.bound);
        let free = u64::from(lock(&self.common.free).len()) + parts.free_frames;
        let frame_bytes = PAGE_BYTES as u64;
        let held = u64::from(bound.top).saturating_sub(free) * frame_bytes;
        let outside = heap_bytes + bound.outside_bytes;
        StoreStats {
            capacity_bytes: bound.capacity_bytes,
            max_capacity_bytes: self.options.max_capacity_bytes,
            used_bytes: held + outside,
            metadata_bytes: parts.metadata_frames * frame_bytes + outside,
            compressed_frame_bytes: parts.packed_frames * frame_bytes,
            compressed_raw_bytes: parts.pools.values().map(|pool| pool.packed).sum::<u64>()
                * frame_bytes,
            pages: parts.pools.values().map(|pool| pool.pages).sum(),
            dirty_pages: self.common.dirty_pages.load(Ordering::Relaxed),
            deduplicated_pages: parts
                .deduplicated_pages
                .saturating_sub(self.common.contents.entries() as u64),
            age,
            counters,
            clients,
        }
    }
}

/// Sums over parts.
#[derive(Default)]
struct PartsStats {
    pools: HashMap<PoolId, Counted>,
    /// What each client did in the pools it is in.
    clients: HashMap<ClientId, Counters>,
    metadata_frames: u64,
    packed_frames: u64,
    free_frames: u64,
    /// Pages without a frame of their own.
    deduplicated_pages: u64,
}

#[derive(Clone, Copy, Default)]
struct Counted {
    pages: u64,
    dirty: u64,
    packed: u64,
    objects: u64,
    counters: Counters,
}

impl PartsStats {
    fn add(&mut self, part: &Shard) {
        self.metadata_frames += part.metadata_frames() as u64;
        self.packed_frames += part.packed_frames();
        self.free_frames += part.magazine.len() as u64;
        for pool in part.pools.iter().flatten() {
            let sum = self.pools.entry(pool.id).or_default();
            sum.pages += pool.pages();
            sum.dirty += pool.dirty;
            sum.packed += pool.packed;
            // An object in several parts is counted in each; see `PoolStats::objects`.
            sum.objects += pool.objects;
            sum.counters.add(&pool.counters());
            for member in pool.members() {
                self.clients
                    .entry(member.id)
                    .or_default()
                    .add(&member.counters);
            }
            self.deduplicated_pages += pool.frameless;
        }
    }
}

impl Client {
    /// Its number.
    #[must_use]
    pub fn id(&self) -> ClientId {
        self.account.id
    }

    /// The store it is a client of.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    fn inner(&self) -> &Inner {
        &self.store.inner
    }

    /// Part that a page is in, and the hash of its object.
    #[inline(always)]
    fn locate(&self, handle: &Handle) -> (MutexGuard<'_, Shard>, u64) {
        let inner = self.inner();
        let hash = inner.common.object_hash(handle.pool.0, handle.object);
        (inner.part(inner.part_of(hash, handle.index)), hash)
    }

    /// Makes a pool, or joins the shared pool of that key in the client's group (whose capacity then stays as it is).
    ///
    /// # Errors
    /// [`Error::TooManyPools`]; [`Error::CapacityTooSmall`] and [`Error::DirtyPages`] if there is no room for what the store
    /// keeps of a pool.
    pub fn create_pool(&self, options: PoolOptions) -> Result<PoolId, Error> {
        let id = self.inner().create_pool(&self.account, options)?;
        self.inner().settle().inspect_err(|_| {
            // There is no room for it.
            let _ = self.inner().leave_pool(&self.account, id);
        })?;
        Ok(id)
    }

    /// Leaves a pool; with its last client it is destroyed and its pages, dirty ones too, are dropped.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn destroy_pool(&self, pool: PoolId) -> Result<(), Error> {
        self.inner().leave_pool(&self.account, pool)
    }

    /// Changes the most pages a pool may hold. Down takes effect before the call returns, but for dirty pages.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn set_pool_capacity(
        &self,
        pool: PoolId,
        capacity_pages: Option<u64>,
    ) -> Result<(), Error> {
        let totals = self.inner().part(0).totals(self.id(), pool)?;
        totals.set_capacity_pages(capacity_pages);
        let most = capacity_pages.unwrap_or(u64::MAX);
        loop {
            let above = totals.pages().saturating_sub(most);
            let count = usize::try_from(above).unwrap_or(usize::MAX).min(256);
            if count == 0 || self.inner().evict_from_pool(&totals, count).pages == 0 {
                return Ok(());
            }
        }
    }

    /// Puts a page.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn put(&self, handle: Handle, page: &Page) -> Result<PutOutcome, Error> {
        self.put_with(handle, |frame| frame.copy_from_slice(page))
    }

    /// Puts the page that `fill` writes. `fill` is called at most once, with a frame of arbitrary former
    /// contents, of which it must leave nothing, and with a part of the store locked: it must not call the
    /// store. If it panics, no page is left.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn put_with(
        &self,
        handle: Handle,
        fill: impl FnOnce(&mut Page),
    ) -> Result<PutOutcome, Error> {
        self.inner().put(self.id(), handle, false, fill)
    }

    /// Puts a page that is not on storage yet: it is not dropped before it is [marked clean](Self::mark_clean), and a
    /// get leaves it there. Refused if three quarters of the store are dirty.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn put_dirty(&self, handle: Handle, page: &Page) -> Result<PutOutcome, Error> {
        self.inner()
            .put(self.id(), handle, true, |frame| frame.copy_from_slice(page))
    }

    /// Gets a page into `page`, which is left alone if there is none. Returns whether there was.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn get(&self, handle: Handle, page: &mut Page) -> Result<bool, Error> {
        self.get_with(handle, |frame| page.copy_from_slice(frame))
    }

    /// Gets a page by `read`, called if there is one, with a part of the store locked: it must not call the store.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    #[inline]
    pub fn get_with(&self, handle: Handle, read: impl FnOnce(&Page)) -> Result<bool, Error> {
        let (mut part, hash) = self.locate(&handle);
        part.get(self.id(), hash, &handle, read)
    }

    /// Gets pages, as [`get`](Self::get) would one after the other, but waiting for memory for many of them
    /// together: where handles are at random, several times as fast. `read` is told each one's number in
    /// `handles`, in no order; it may run with a part of the store locked: it must not call the store.
    pub fn get_each(
        &self,
        handles: &[Handle],
        mut read: impl FnMut(usize, Result<Option<&Page>, Error>),
    ) {
        for (group, handles) in handles.chunks(RUN).enumerate() {
            let mut read =
                |n: usize, page: Result<Option<&Page>, Error>| read(group * RUN + n, page);
            self.inner().get_group(self.id(), handles, &mut read);
        }
    }

    /// Puts pages, as [`put_with`](Self::put_with) would one after the other, but waiting for memory for many
    /// of them together. `fill` writes the page of that number in `handles`, at most once, and must leave
    /// nothing of what was there; `done` is told what became of it, in order. `fill` may run with a part of the
    /// store locked: it must not call the store.
    pub fn put_each(
        &self,
        handles: &[Handle],
        mut fill: impl FnMut(usize, &mut Page),
        mut done: impl FnMut(usize, Result<PutOutcome, Error>),
    ) {
        for (group, handles) in handles.chunks(RUN).enumerate() {
            let mut fill = |n: usize, page: &mut Page| fill(group * RUN + n, page);
            let mut done =
                |n: usize, outcome: Result<PutOutcome, Error>| done(group * RUN + n, outcome);
            self.inner()
                .put_group(self.id(), handles, &mut fill, &mut done);
        }
    }

    /// Copies a page, without taking it out or making it recently used.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn peek(&self, handle: Handle, page: &mut Page) -> Result<Option<Version>, Error> {
        let (mut part, hash) = self.locate(&handle);
        part.peek(self.id(), hash, &handle, page)
    }

    /// Drops a page, dirty or not. Returns whether it was there.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn flush(&self, handle: Handle) -> Result<bool, Error> {
        let (mut part, hash) = self.locate(&handle);
        part.flush(self.id(), hash, &handle)
    }

    /// Drops an object's pages of a range of indices. Returns how many there were.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn flush_range(
        &self,
        pool: PoolId,
        object: u64,
        indices: RangeInclusive<u32>,
    ) -> Result<u64, Error> {
        self.inner().flush_range(self.id(), pool, object, indices)
    }

    /// Drops an object's pages. Returns how many there were.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn flush_object(&self, pool: PoolId, object: u64) -> Result<u64, Error> {
        self.flush_range(pool, object, 0..=u32::MAX)
    }

    /// Drops all pages of a pool. Returns how many there were.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn flush_pool(&self, pool: PoolId) -> Result<u64, Error> {
        let inner = self.inner();
        let mut flushed = 0;
        for number in 0..inner.parts.len() {
            flushed += inner
                .part(number)
                .flush_pool(self.id(), pool, number == 0)?;
        }
        Ok(flushed)
    }

    /// Makes a page the most recently used one of its pool. Returns whether it is there.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn move_to_tail(&self, handle: Handle) -> Result<bool, Error> {
        let (mut part, hash) = self.locate(&handle);
        part.move_to_tail(self.id(), hash, &handle)
    }

    /// Takes out the least recently used page of a pool, dirty or not, into `page`: in a store of one part
    /// exactly that, with more to within a few operations.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn take_head(&self, pool: PoolId, page: &mut Page) -> Result<Option<Taken>, Error> {
        let inner = self.inner();
        let totals = inner.part(0).totals(self.id(), pool)?;
        while let Some(oldest) = Oldest::of(&totals, false) {
            if let Some(taken) = inner.part(oldest.part).take_head(self.id(), pool, page)? {
                return Ok(Some(taken));
            }
        }
        Ok(None)
    }

    /// Marks a page dirty. Returns whether it is there.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`]; [`Error::TooManyDirtyPages`] if three quarters of the store are dirty.
    pub fn mark_dirty(&self, handle: Handle) -> Result<bool, Error> {
        let (mut part, hash) = self.locate(&handle);
        part.mark_dirty(self.id(), hash, &handle)
    }

    /// Marks a page clean if its contents are still those of `version` (from [`peek`](Self::peek)). Returns whether
    /// it did.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn mark_clean(&self, handle: Handle, version: Version) -> Result<bool, Error> {
        let (mut part, hash) = self.locate(&handle);
        part.mark_clean(self.id(), hash, &handle, version)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.inner().remove_client(&self.account);
    }
}

impl Inner {
    fn create_pool(&self, account: &Arc<Account>, options: PoolOptions) -> Result<PoolId, Error> {
        let mut registry = lock(&self.registry);
        let shared = matches!(options.kind, PoolKind::SharedInclusive { .. });
        let existing = registry.pools.iter().find_map(|(id, pool)| {
            let same = shared && pool.kind == options.kind && pool.group == account.group;
            same.then(|| (*id, pool.members.contains(&account.id)))
        });
        if let Some((id, true)) = existing {
            return Ok(id);
        }
        if registry.pools_of(account.id).count() >= POOLS_PER_CLIENT {
            return Err(Error::TooManyPools(POOLS_PER_CLIENT));
        }
        if let Some((id, false)) = existing {
            let record = registry.pools.get_mut(&id).expect("it was just found");
            record.members.push(account.id);
            for part in 0..self.parts.len() {
                self.part(part).join(id, account.id);
            }
            return Ok(id);
        }
        let id = registry
            .next_pool()
            .ok_or(Error::TooManyPools(POOLS as usize))?;
        let domain = if shared {
            registry.next_number()
        } else {
            account.id.0
        };
        let totals = Arc::new(PoolTotals::new(
            id,
            options.capacity_pages,
            self.parts.len(),
        ));
        for part in 0..self.parts.len() {
            self.part(part).add_pool(Pool::new(
                id,
                shared,
                domain,
                account.clone(),
                totals.clone(),
            ));
        }
        lock(&account.pools).push(totals.clone());
        let record = PoolRecord {
            totals,
            kind: options.kind,
            group: account.group,
            domain,
            members: vec![account.id],
            created: registry.now,
        };
        registry.pools.insert(id, record);
        Ok(id)
    }

    fn leave_pool(&self, account: &Arc<Account>, id: PoolId) -> Result<(), Error> {
        let mut registry = lock(&self.registry);
        let record = registry
            .pools
            .get_mut(&id)
            .filter(|pool| pool.members.contains(&account.id));
        let record = record.ok_or(Error::NoSuchPool(id))?;
        let was_charged = record.members[0] == account.id;
        record.members.retain(|&member| member != account.id);
        let next = record.members.first().copied();
        let totals = record.totals.clone();
        if was_charged {
            lock(&account.pools).retain(|pool| pool.id != id);
        }
        let mut done = Counters::default();
        let mut heir = None;
        if let Some(next) = next {
            let next = registry.clients.get(&next).filter(|_| was_charged);
            let next = next.map(|record| record.account.clone());
            for part in 0..self.parts.len() {
                done.add(&self.part(part).leave(id, account.id, next.as_ref()));
            }
            if let Some(next) = next {
                lock(&next.pools).push(totals);
                heir = Some(next);
            }
        } else {
            registry.pools.remove(&id);
            for part in 0..self.parts.len() {
                self.part(part).close_pool(id);
            }
            drop(registry);
            let mut all = Counters::default();
            for part in 0..self.parts.len() {
                while self.part(part).drain_pool(id) {}
                done.add(&self.part(part).leave(id, account.id, None));
                all.add(&self.part(part).remove_pool(id));
            }
            registry = lock(&self.registry);
            registry.departed.add(&all);
            registry.free_pool(id);
        }
        if let Some(client) = registry.clients.get_mut(&account.id) {
            client.departed.add(&done);
        }
        drop(registry);
        if let Some(heir) = heir {
            self.respect_ceiling(&heir);
        }
        Ok(())
    }

    fn remove_client(&self, account: &Arc<Account>) {
        let pools: Vec<PoolId> = lock(&self.registry).pools_of(account.id).collect();
        for pool in pools {
            // It is a member: the pool is there.
            let _ = self.leave_pool(account, pool);
        }
        let mut registry = lock(&self.registry);
        registry.clients.remove(&account.id);
        lock(&self.accounts).retain(|other| other.id != account.id);
        self.retarget(&mut registry);
        drop(registry);
        // To have more room again is not urgent: where it fails, the next turn does it.
        let _ = self.settle();
    }
}
