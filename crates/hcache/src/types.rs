//! What callers of the store hand in and get back.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// The contents of a page.
pub type Page = [u8; PAGE_BYTES];

/// Number of a client; no two have the same at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u32);

/// Number of a pool; that of a pool that is gone is not used again soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId(pub u32);

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The name of a page, \[M08\]: a page of an object (a file, a disk) in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    /// Pool the page is in.
    pub pool: PoolId,
    /// Number the client gave the object.
    pub object: u64,
    /// Which page of the object.
    pub index: u32,
}

/// Who sees a pool, and what a get does to its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolKind {
    /// One client's own; a get takes the page out.
    PrivateExclusive,
    /// Of all clients of one [group](ClientOptions::group) that name the same key; a get leaves the
    /// page and makes it the most recently used. Its pages are charged to the client that has been
    /// in it longest. The pool goes with its last client.
    SharedInclusive {
        /// Key that clients of the pool have in common.
        key: u128,
    },
}

/// Options of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolOptions {
    /// Who sees it.
    pub kind: PoolKind,
    /// Capacity in pages; a put beyond it drops the pool's oldest page that is not dirty.
    pub capacity_pages: Option<u64>,
}

impl PoolOptions {
    /// Returns a private pool without a capacity of its own.
    #[must_use]
    pub fn private() -> Self {
        Self {
            kind: PoolKind::PrivateExclusive,
            capacity_pages: None,
        }
    }

    /// Returns a shared pool without a capacity of its own.
    #[must_use]
    pub fn shared(key: u128) -> Self {
        Self {
            kind: PoolKind::SharedInclusive { key },
            capacity_pages: None,
        }
    }
}

/// Options of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientOptions {
    /// Name for people; need not be unique.
    pub name: String,
    /// Its share of the capacity relative to the others', 1 to 1 000 000.
    pub weight: u32,
    /// Minimum in bytes that other clients cannot take from it.
    pub floor_bytes: u64,
    /// Maximum in bytes; `None` for no limit.
    pub ceiling_bytes: Option<u64>,
    /// Only clients of one group meet in a shared pool (the server gives each user its own).
    pub group: u64,
}

impl ClientOptions {
    /// Default weight of a client.
    pub const WEIGHT: u32 = 100;

    /// Returns a client of the usual weight without floor or ceiling.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            weight: Self::WEIGHT,
            floor_bytes: 0,
            ceiling_bytes: None,
            group: 0,
        }
    }
}

/// Which pages of the same content are stored once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// None.
    #[default]
    Off,
    /// Those of one client.
    #[serde(rename = "client")]
    WithinClient,
    /// Those of all clients; each is charged in full. A client can then find out, by the time a put takes or by
    /// what it counts as shared, that another holds a page of the same content: a side channel. Only where all
    /// clients trust each other.
    #[serde(rename = "all")]
    AcrossClients,
}

/// Options of a store.
#[derive(Clone)]
pub struct StoreOptions {
    /// Maximum memory of the store, metadata included, in bytes.
    pub capacity_bytes: u64,
    /// Largest capacity it can be resized to, in bytes: so much address space is reserved (not memory).
    pub max_capacity_bytes: u64,
    /// Independent parts, a power of two from 1 to 1024. With 1, pages leave in exact LRU order; with more,
    /// almost, and operations on different parts run at once.
    pub shards: usize,
    /// Whether cold pages are kept compressed.
    pub compression: bool,
    /// Which pages of the same content are kept once.
    pub sharing: Sharing,
    /// Told of what happens to pages, for curves.
    pub observer: Option<Arc<dyn Observer>>,
    /// The observer sees one in so many handles (chosen by hash), a power of two.
    pub observe_one_in: u32,
}

impl StoreOptions {
    /// Smallest capacity a store can have.
    pub const MIN_CAPACITY_BYTES: u64 = 1 << 20;

    /// Most shards a store can have.
    pub const MOST_SHARDS: usize = 1024;

    /// Returns a store of a fixed capacity, four shards a processor, nothing compressed, nothing shared.
    #[must_use]
    pub fn new(capacity_bytes: u64) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            capacity_bytes,
            max_capacity_bytes: capacity_bytes,
            // Enough that threads rarely meet, few enough that what each holds stays in the cache.
            shards: (4 * processors).next_power_of_two().min(Self::MOST_SHARDS),
            compression: false,
            sharing: Sharing::Off,
            observer: None,
            observe_one_in: 1,
        }
    }
}

/// Outcome of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// The page is in the store.
    Stored {
        /// Whether another page was there under the handle.
        replaced: bool,
    },
    /// It is not; nor is any older page under the handle.
    Refused {
        /// Whether another page was there and was flushed.
        flushed: bool,
    },
}

impl PutOutcome {
    /// Whether the page was stored.
    #[must_use]
    pub fn is_stored(self) -> bool {
        matches!(self, Self::Stored { .. })
    }
}

/// Tells a page's contents from those put later under the same handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Version(pub u64);

/// A page that [`Client::take_head`](crate::Client::take_head) took out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// Name it had.
    pub handle: Handle,
    /// Whether it was dirty.
    pub dirty: bool,
}

/// Kind of event of an observed page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// A get found it and took it out.
    Hit,
    /// A get found it and left it there (a shared pool's, or dirty).
    Kept,
    /// A get did not find it.
    Missed,
    /// It was put (stored or refused).
    Put,
    /// Its owner flushed it, whether or not it was there.
    Flushed,
}

/// Event of an observed page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Client that did it.
    pub client: ClientId,
    /// Identity of the page: a hash of its handle.
    pub page: u64,
    /// What it was.
    pub kind: EventKind,
}

/// Receives events as they happen: gathered by the store's shards they would come in another order, and of
/// the order curves are made.
pub trait Observer: Send + Sync {
    /// Takes events. Called with a part of the store locked: it must not call the store.
    fn observe(&self, events: &[Event]);
}

/// Why an operation failed. The store is unchanged, unless a variant states otherwise.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The pool does not exist, or is not this client's (the answer is the same for both).
    #[error("this client has no pool {0}")]
    NoSuchPool(PoolId),
    /// The client does not exist any more.
    #[error("there is no client {0}")]
    NoSuchClient(ClientId),
    /// There is no room for another client.
    #[error("the store already has its maximum of {0} clients")]
    TooManyClients(usize),
    /// There is no room for another pool.
    #[error("the client already has its maximum of {0} pools")]
    TooManyPools(usize),
    /// A capacity below the smallest one.
    #[error("a capacity of {asked_bytes} bytes is too small: the minimum is {least_bytes} bytes")]
    CapacityTooSmall {
        /// The requested value.
        asked_bytes: u64,
        /// Least capacity that does.
        least_bytes: u64,
    },
    /// A capacity beyond what was reserved.
    #[error(
        "a capacity of {asked_bytes} bytes is too large: the store was created for at most {most_bytes} bytes"
    )]
    CapacityTooLarge {
        /// The requested value.
        asked_bytes: u64,
        /// Most it can be.
        most_bytes: u64,
    },
    /// The address space for the largest capacity could not be reserved.
    #[error("cannot reserve {asked_bytes} bytes of address space: {reason}")]
    CannotReserve {
        /// The requested value.
        asked_bytes: u64,
        /// The kernel's error.
        reason: String,
    },
    /// The store cannot shrink below its dirty pages; write them back first.
    #[error(
        "cannot shrink to {asked_bytes} bytes: {dirty_pages} dirty pages must be written back first"
    )]
    DirtyPages {
        /// The requested value.
        asked_bytes: u64,
        /// Pages that may not be dropped.
        dirty_pages: u64,
    },
    /// Three quarters of the store's pages are dirty already.
    #[error("{0} pages are dirty, which is the maximum")]
    TooManyDirtyPages(u64),
    /// The kernel refused to free memory.
    #[error("cannot return memory to the kernel: {reason}")]
    CannotGiveBack {
        /// The kernel's error.
        reason: String,
    },
    /// A number outside its range.
    #[error("{what} is {value}, but must be {range}")]
    OutOfRange {
        /// Which option.
        what: &'static str,
        /// What was given.
        value: u64,
        /// What would do.
        range: &'static str,
    },
}
