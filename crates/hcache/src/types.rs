//! Arguments and results of the store's operations.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::descriptor::Key;
use crate::eviction::{EVICTION_POLICIES, EvictionPolicyRow};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// The contents of a page.
pub type Page = [u8; PAGE_BYTES];

/// Number of a client; unique among the clients that exist at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClientId(pub u32);

/// Number of a pool; that of a closed pool is not reused soon.
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
    /// Number that the client assigned to the object.
    pub object: u64,
    /// Index of the page in the object.
    pub index: u32,
}

impl Handle {
    #[inline(always)]
    pub(crate) fn key(&self) -> Key {
        Key::new(self.pool, self.object)
    }
}

/// Which clients use a pool, and what a get does to its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolKind {
    /// One client's own; a get takes the page out.
    PrivateExclusive,
    /// Of all clients of one [group](ClientOptions::group) that name the same key; a get leaves the
    /// page and counts as a use of it. Its pages are charged to the pool itself, which has a part of the target
    /// of each client that gets from it. The pool goes with its last client.
    SharedInclusive {
        /// Key that clients of the pool have in common.
        key: u128,
    },
}

impl PoolKind {
    /// Whether several clients may use the pool.
    pub(crate) fn is_shared(self) -> bool {
        matches!(self, Self::SharedInclusive { .. })
    }
}

/// Options of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolOptions {
    /// Its kind.
    pub kind: PoolKind,
    /// Capacity in pages; a put beyond it evicts another page of the pool.
    pub capacity_pages: Option<u64>,
}

impl PoolOptions {
    /// Returns a private pool without a capacity of its own.
    pub fn private() -> Self {
        Self {
            kind: PoolKind::PrivateExclusive,
            capacity_pages: None,
        }
    }

    /// Returns a shared pool without a capacity of its own.
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
    /// Minimum in bytes, which other clients cannot take from it.
    pub floor_bytes: u64,
    /// Maximum in bytes; `None` for no limit.
    pub ceiling_bytes: Option<u64>,
    /// Only clients of one group can share a pool (the server has one group for each user).
    pub group: u64,
    /// Memory held for it outside of the store in bytes (the server's: its ring). It counts in the capacity, and to the
    /// client as if it were pages: in what it uses, against its target and its maximum.
    pub outside_bytes: u64,
}

impl ClientOptions {
    /// Default weight of a client.
    pub const WEIGHT: u32 = 100;

    /// Returns a client of the usual weight without floor or ceiling.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            weight: Self::WEIGHT,
            floor_bytes: 0,
            ceiling_bytes: None,
            group: 0,
            outside_bytes: 0,
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
    /// Those of all clients; each is charged in full. A client can then find out, by the duration of a put or by its
    /// count of shared pages, that another holds a page of the same content: a side channel. Only where all
    /// clients trust each other.
    #[serde(rename = "all")]
    AcrossClients,
}

/// Options of a store.
#[derive(Clone)]
pub struct StoreOptions {
    /// Maximum memory of the store, metadata included, in bytes.
    pub capacity_bytes: u64,
    /// Maximum capacity to which it can be resized, in bytes: this much address space is reserved (not memory).
    pub max_capacity_bytes: u64,
    /// Number of shards, a power of two from 1 to 1024. With 1, pages leave exactly in the order of the policy; with more,
    /// almost, and operations on different shards run concurrently.
    pub shards: usize,
    /// Whether cold pages are compressed.
    pub compression: bool,
    /// Which pages of the same content are stored once.
    pub sharing: Sharing,
    /// Which pages are evicted when memory runs short, one of [`EVICTION_POLICIES`].
    pub eviction: &'static EvictionPolicyRow,
    /// Receives events of pages, for curves.
    pub observer: Option<Arc<dyn Observer>>,
    /// The observer receives the events of one in this many handles (chosen by hash), a power of two.
    pub observe_one_in: u32,
}

impl StoreOptions {
    /// Minimum capacity of a store.
    pub const MIN_CAPACITY_BYTES: u64 = 1 << 20;

    /// Maximum number of shards of a store.
    pub const MOST_SHARDS: usize = 1024;

    /// Returns a store of a fixed capacity, four shards a processor, nothing compressed, nothing shared.
    pub fn new(capacity_bytes: u64) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            capacity_bytes,
            max_capacity_bytes: capacity_bytes,
            // Enough that threads rarely contend, few enough that each shard's data stays in the cache.
            shards: (4 * processors).next_power_of_two().min(Self::MOST_SHARDS),
            compression: false,
            sharing: Sharing::Off,
            eviction: EVICTION_POLICIES[0],
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
        /// Whether another page was stored under the handle.
        replaced: bool,
    },
    /// The page is not stored; nor is any older page under the handle.
    Refused {
        /// Whether another page was stored and was flushed.
        flushed: bool,
    },
}

impl PutOutcome {
    /// Whether the page was stored.
    pub fn is_stored(self) -> bool {
        matches!(self, Self::Stored { .. })
    }
}

/// Kind of event of an observed page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// A get found it and removed it.
    Hit,
    /// A get found it and left it in place, in a shared pool.
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
    /// Client that caused it.
    pub client: ClientId,
    /// Identity of the page: a hash of its handle.
    pub page: u64,
    /// Its kind.
    pub kind: EventKind,
    /// Whether its pool is shared, so that a get leaves the page.
    pub inclusive: bool,
}

/// Receives events as they happen: events collected by each shard would arrive in another order, and curves depend on
/// the order.
pub trait Observer: Send + Sync {
    /// Receives events. Called with a shard of the store locked: it must not call the store.
    fn observe(&self, events: &[Event]);
}

/// Why an operation failed. The store is unchanged, unless a variant states otherwise.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The pool does not exist, or is not this client's (the answer is the same for both).
    #[error("this client has no pool {0}")]
    NoSuchPool(PoolId),
    /// The maximum number of clients is reached.
    #[error("the store already has its maximum of {0} clients")]
    TooManyClients(usize),
    /// The maximum number of pools is reached.
    #[error("the client already has its maximum of {0} pools")]
    TooManyPools(usize),
    /// No pool is left, or what is left is [reserved](crate::Share) for clients of other groups.
    #[error(
        "no pool is left: clients of group {group} have {own} of the store's {most}, and the {free} that are free are reserved for others"
    )]
    NoPoolLeft {
        /// The client's group.
        group: u64,
        /// Number of pools of the group.
        own: u64,
        /// Number of pools that nobody has.
        free: u64,
        /// Maximum number of pools of a store.
        most: u64,
    },
    /// A capacity below the minimum.
    #[error("a capacity of {asked_bytes} bytes is too small: the minimum is {least_bytes} bytes")]
    CapacityTooSmall {
        /// The requested value.
        asked_bytes: u64,
        /// Minimum capacity.
        least_bytes: u64,
    },
    /// A capacity above the reserved maximum.
    #[error(
        "a capacity of {asked_bytes} bytes is too large: the store was created for at most {most_bytes} bytes"
    )]
    CapacityTooLarge {
        /// The requested value.
        asked_bytes: u64,
        /// Maximum capacity.
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
    /// Operations in progress hold memory beyond the new end. No more of it is handed out; the reported capacity stays until
    /// the next resize or step, which finishes the reduction.
    #[error(
        "cannot free memory for a capacity of {asked_bytes} bytes now: operations in progress hold it"
    )]
    CannotShrink {
        /// The requested value.
        asked_bytes: u64,
    },
    /// The kernel refused to free memory.
    #[error("cannot return memory to the kernel: {reason}")]
    CannotGiveBack {
        /// The kernel's error.
        reason: String,
    },
    /// A number outside its range.
    #[error("{what} is {value}, but must be {range}")]
    OutOfRange {
        /// The option.
        what: &'static str,
        /// The value given.
        value: u64,
        /// The accepted range.
        range: &'static str,
    },
}
