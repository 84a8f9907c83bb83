//! The store: its shards, clients and pools, and the choice of the client whose pages are evicted.
//!
//! **Locks.** The registry's lock is taken first, then that of one shard, then that of shared contents or of the free
//! list; no thread holds two shards. So a put that needs a frame releases its shard, evicts in the shard with the
//! oldest page, and retries.
//!
//! **Eviction.** From the client furthest above its target ([`schedule`]), or if none is above, from the owner of
//! the oldest page. Within the client the [eviction policy](crate::eviction) of each pool in each shard has one page that
//! would leave next; the one that came first to its place in its queue is judged, found by the timestamps that shards
//! publish: exactly in a store with one shard; with more, one in the oldest 64th of these ages.
//!
//! **The bound.** Pages and metadata are in frames below `top`, and no frame beyond it is in use; memory
//! outside the frames (pools, tables of shared contents, an observer) is subtracted from the capacity
//! before `top` is set.

mod capacity;
mod client;
mod pages;
mod pools;
mod registry;
mod statistics;
mod steps;

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use self::capacity::Bound;
use self::registry::{ClientRecord, Registry};

use crate::account::Account;
use crate::contents::Contents;
use crate::free::FreeFrames;
use crate::shard::{CHUNK_PAGES, Common, Shard, hash_within};
use crate::sync::{Arc, AtomicU32, AtomicU64, AtomicUsize, Mutex, MutexGuard, RwLock, lock};
use crate::sys::Slab;
use crate::{
    ClientId, ClientOptions, Counters, Error, PAGE_BYTES, Sharing, StoreOptions, StoreStats, packed,
};

pub use self::client::Client;

/// Capacity from which huge pages are requested for frames.
const HUGE_FROM_BYTES: u64 = 256 << 20;

/// Maximum number of frames of a store: as many as the place of a compressed page can address.
const MOST_FRAMES: u32 = packed::Place::FRAMES_MAX;

/// Number of frames below which a shard is not worth its metadata.
const LEAST_SHARD_FRAMES: u64 = 256;

/// Number of frames without which a shard can hold no page.
const FEWEST_SHARD_FRAMES: u64 = 5;

/// Bytes reserved for memory outside the frames, in addition to a share of the capacity.
const HEAP_RESERVE_BYTES: u64 = 64 << 10;

/// A page store. Cheap to clone; all clones are the same store.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

/// A shard on its own cache lines.
#[repr(align(128))]
struct LockedShard(Mutex<Shard>);

struct Inner {
    common: Arc<Common>,
    shards: Box<[LockedShard]>,
    options: StoreOptions,
    registry: Mutex<Registry>,
    /// Clients, for choosing a victim. Locked only for a short time.
    accounts: Mutex<Vec<Arc<Account>>>,
    /// Allows one resize at a time.
    bound: Mutex<Bound>,
}

impl Store {
    /// Maximum number of clients of a store.
    pub const MOST_CLIENTS: usize = 4096;

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
        // A small store in many shards would be all metadata.
        let shards = frames_of(options.capacity_bytes) / LEAST_SHARD_FRAMES;
        let shards = options.shards.min(1 << shards.max(1).ilog2());
        let seeds = RandomState::new();
        let common = Arc::new(Common {
            free: Mutex::new(FreeFrames::new(slab.clone(), 0)),
            slab,
            contents: Contents::new(seeds.hash_one(0)),
            seeds: [1, 2, 3].map(|n| seeds.hash_one(n) | 1),
            shards,
            compression: options.compression,
            sharing: options.sharing,
            eviction: options.eviction,
            observer: options.observer.clone(),
            observe_mask: u64::from(options.observe_one_in) - 1,
            clock: AtomicU64::new(0),
            stamp_step: (frames_of(options.capacity_bytes) / (64 * shards as u64)).clamp(1, 16),
            top: AtomicU32::new(0),
            in_flight: RwLock::new(()),
            magazine_frames: AtomicUsize::new(1),
        });
        let inner = Inner {
            shards: (0..shards)
                .map(|number| LockedShard(Mutex::new(Shard::new(number, common.clone()))))
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
    /// [`Error::TooManyClients`]; [`Error::OutOfRange`] for a weight outside 1 to 1 000 000, or a floor or memory outside
    /// of the store above the ceiling; [`Error::CapacityTooSmall`] and [`Error::CannotShrink`] if there is no room for that memory.
    pub fn create_client(&self, options: ClientOptions) -> Result<Client, Error> {
        check_client(&options)?;
        let outside_bytes = options.outside_bytes;
        self.inner.hold_outside(outside_bytes)?;
        let mut registry = lock(&self.inner.registry);
        if registry.clients.len() >= Self::MOST_CLIENTS {
            drop(registry);
            self.inner.release_outside(outside_bytes);
            return Err(Error::TooManyClients(Self::MOST_CLIENTS));
        }
        let id = ClientId(registry.next_number());
        let account = Arc::new(Account::new(id, options));
        let record = ClientRecord {
            account: account.clone(),
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

    /// Changes the capacity. A reduction takes effect before the call returns: pages are dropped, the others are
    /// compacted, and the memory beyond is returned to the kernel.
    ///
    /// # Errors
    /// [`Error::CapacityTooSmall`] and [`Error::CapacityTooLarge`]; [`Error::CannotShrink`] if other operations hold too
    /// much of the memory: the reduction is then unfinished, and the next resize finishes it.
    pub fn resize(&self, capacity_bytes: u64) -> Result<(), Error> {
        self.check_most(capacity_bytes)?;
        let mut bound = lock(&self.inner.bound);
        let outside_bytes = bound.outside_bytes;
        self.inner
            .set_bound(&mut bound, capacity_bytes, outside_bytes)
    }

    /// As [`resize`](Self::resize), together with [`set_outside_bytes`](Self::set_outside_bytes): where both fall, no page is
    /// dropped for memory outside the store that is about to be released.
    ///
    /// # Errors
    /// As [`resize`](Self::resize).
    pub fn resize_with_outside(
        &self,
        capacity_bytes: u64,
        outside_bytes: u64,
    ) -> Result<(), Error> {
        self.check_most(capacity_bytes)?;
        let mut bound = lock(&self.inner.bound);
        self.inner
            .set_bound(&mut bound, capacity_bytes, outside_bytes)
    }

    /// Changes the capacity by a step, for a caller that must not wait for a whole [`resize`](Self::resize): to be repeated until it returns
    /// `true`. A step of a reduction moves or drops about `pages_max` pages, or returns the memory of as many to the
    /// kernel; the capacity that [`stats`](Self::stats) reports falls as memory is returned. If an earlier reduction is
    /// unfinished, it is finished first.
    ///
    /// A store that compresses or shares contents is reduced in one step.
    ///
    /// # Errors
    /// As [`resize`](Self::resize). With [`Error::CannotShrink`] a reduction may be unfinished: it goes on with the next step.
    pub fn resize_step(&self, capacity_bytes: u64, pages_max: usize) -> Result<bool, Error> {
        self.check_most(capacity_bytes)?;
        let mut bound = lock(&self.inner.bound);
        (self.inner).resize_step(&mut bound, capacity_bytes, pages_max.max(1))
    }

    fn check_most(&self, asked_bytes: u64) -> Result<(), Error> {
        let most_bytes = self.inner.options.max_capacity_bytes;
        if asked_bytes > most_bytes {
            return Err(Error::CapacityTooLarge {
                asked_bytes,
                most_bytes,
            });
        }
        Ok(())
    }

    /// The capacity in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        lock(&self.inner.bound).capacity_bytes
    }

    /// Sets how much memory outside the store counts towards its capacity (an observer's), in bytes.
    ///
    /// # Errors
    /// As [`resize`](Self::resize).
    pub fn set_outside_bytes(&self, bytes: u64) -> Result<(), Error> {
        let mut bound = lock(&self.inner.bound);
        let target_bytes = bound.target_bytes;
        self.inner.set_bound(&mut bound, target_bytes, bytes)
    }

    /// Sets among how many [groups](ClientOptions::group) the numbers of pools are [shared](crate::Share), so that no group
    /// takes all: 1 at first.
    pub fn set_groups(&self, groups: usize) {
        lock(&self.inner.registry).groups = groups;
    }

    /// Runs the scheduler: `now` is the time since the store began. To be called about once a second.
    pub fn turn(&self, now: Duration) {
        self.inner.turn(now);
    }

    /// Returns the store's statistics.
    pub fn stats(&self) -> StoreStats {
        self.inner.stats()
    }
}

/// Bytes subtracted from a capacity for memory outside the frames: more than is used, so that a few more pools do not
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
        Some(ceiling) if ceiling < options.floor_bytes.max(options.outside_bytes) => {
            Err(Error::OutOfRange {
                what: "the ceiling",
                value: ceiling,
                range: "at least the floor, and the memory outside of the store (a ring)",
            })
        }
        _ => Ok(()),
    }
}

impl Inner {
    #[inline(always)]
    fn shard(&self, number: usize) -> MutexGuard<'_, Shard> {
        lock(&self.shards[number].0)
    }

    /// The shard of a chunk of an object's pages.
    #[inline(always)]
    fn shard_of(&self, hash: u64, index: u32) -> usize {
        let mixed = hash_within(hash, index / CHUNK_PAGES, self.common.seeds[2]);
        (mixed >> 54) as usize & (self.shards.len() - 1)
    }
}
