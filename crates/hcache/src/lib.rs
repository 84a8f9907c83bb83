//! hcache: a page store of put, get and flush that several clients share (\[M08\]).
//!
//! **The guarantee.** A get returns the page last put under its handle that was not flushed since, or misses.
//!
//! Everything else is left to the store: a put may be refused, a page may be dropped at any time, and no client
//! can rely on a capacity. Each operation takes effect at one point in time between its call and its return,
//! for each handle (it is linearizable per handle; `flush_object`, `flush_range` and `flush_pool` are one such
//! operation for each page they cover, not one for all of them).
//!
//! A handle is a pool, a 64-bit object and a 32-bit index of a page in it. A *private* pool is exclusive: a get
//! takes the page out. A *shared* pool is inclusive: several clients hold it, and a get leaves the page there, which counts
//! as a use when the [policy](EVICTION_POLICIES) chooses the pages to evict. A put under a handle that has a page replaces the page, or,
//! if it is refused, flushes it: in no case is the older page left.
//!
//! ```
//! use plimsoll_hcache::{ClientOptions, Handle, PoolOptions, Store, StoreOptions};
//!
//! let store = Store::new(StoreOptions::new(16 << 20))?;
//! let client = store.create_client(ClientOptions::new("web"))?;
//! let pool = client.create_pool(PoolOptions::private())?;
//! let handle = Handle { pool, object: 7, index: 3 };
//! let mut page = [0; 4096];
//!
//! assert!(client.put(handle, &[9; 4096])?.is_stored());
//! assert!(client.get(handle, &mut page)? && page == [9; 4096]);
//! assert!(!client.get(handle, &mut page)?, "a private pool gives a page once");
//! # Ok::<(), plimsoll_hcache::Error>(())
//! ```

mod account;
mod arena;
mod contents;
mod descriptor;
mod eviction;
mod free;
mod ghost;
mod list;
mod miniature;
mod packed;
mod radix;
mod schedule;
mod shard;
mod share;
mod stats;
mod store;
mod sync;
mod sys;
mod table;
mod types;

pub use eviction::{
    EVICTION_POLICIES, EvictionPolicy, EvictionPolicyRow, LRU, Queue, USES_MAX, UseEffect, Verdict,
    eviction_policy,
};
pub use miniature::Miniature;
pub use share::Share;
pub use stats::{ClientStats, Counters, PoolStats, SharedPoolStats, StoreStats};
pub use store::{Client, Store};
pub use types::{
    ClientId, ClientOptions, Error, Event, EventKind, Handle, Observer, PAGE_BYTES, Page, PoolId,
    PoolKind, PoolOptions, PutOutcome, Sharing, StoreOptions,
};
