//! Counters and statistics of a store, its clients and its pools.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{ClientId, PoolId, PoolKind};

/// Operations and events since the start of a pool, a client or the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Counters {
    pub puts: u64,
    pub puts_replaced: u64,
    pub puts_refused: u64,
    pub gets: u64,
    pub hits: u64,
    pub flushes: u64,
    pub flushed_pages: u64,
    pub evicted_pages: u64,
    pub compressed_pages: u64,
    pub decompressed_pages: u64,
    pub incompressible_pages: u64,
    pub shared_pages: u64,
}

impl Counters {
    /// Fraction of gets that hit; `None` without gets.
    pub fn hit_ratio(&self) -> Option<f64> {
        (self.gets > 0).then(|| self.hits as f64 / self.gets as f64)
    }

    /// Adds another's counters to these.
    pub fn add(&mut self, other: &Self) {
        self.puts += other.puts;
        self.puts_replaced += other.puts_replaced;
        self.puts_refused += other.puts_refused;
        self.gets += other.gets;
        self.hits += other.hits;
        self.flushes += other.flushes;
        self.flushed_pages += other.flushed_pages;
        self.evicted_pages += other.evicted_pages;
        self.compressed_pages += other.compressed_pages;
        self.decompressed_pages += other.decompressed_pages;
        self.incompressible_pages += other.incompressible_pages;
        self.shared_pages += other.shared_pages;
    }
}

/// Statistics of one pool.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the names of the others suffice")]
pub struct PoolStats {
    pub id: PoolId,
    pub kind: PoolKind,
    /// The clients that use it, the one that has been in it longest first.
    pub members: Vec<ClientId>,
    pub capacity_pages: Option<u64>,
    pub pages: u64,
    pub compressed_pages: u64,
    /// Number of objects with a page in it.
    pub objects: u64,
    /// Time since its oldest page came to its place in its queue, to the precision of a turn: under LRU, since it was last
    /// used.
    pub oldest_age: Option<Duration>,
    /// Time of its creation, since the store began.
    pub created: Duration,
    pub counters: Counters,
}

/// Statistics of a shared pool. Its pages are charged to the pool itself.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedPoolStats {
    /// As of any pool.
    pub pool: PoolStats,
    /// Its current target, in bytes: the sum of its clients' parts.
    pub target_bytes: u64,
    /// Memory of its pages, in bytes.
    pub used_bytes: u64,
}

/// Statistics of one client. As JSON without its pools, whose kinds contain keys; its group is called `uid` there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names of the others suffice")]
pub struct ClientStats {
    pub id: ClientId,
    pub name: String,
    /// Its group (the server's: its user).
    #[serde(rename = "uid")]
    pub group: u64,
    pub weight: u32,
    /// Its minimum, in bytes.
    pub floor_bytes: u64,
    /// Its limit, in bytes.
    pub ceiling_bytes: Option<u64>,
    /// Its current target for its private pools and its memory outside of the store, in bytes.
    pub target_bytes: u64,
    /// Memory of the pages of its private pools and outside of the store, in bytes.
    pub used_bytes: u64,
    /// Memory held for it outside of the store (the server's: its ring), in bytes.
    pub outside_bytes: u64,
    /// Pages of its private pools.
    pub pages: u64,
    /// Its gets a second or its puts, whichever are more, of all pools, decayed.
    pub activity: f64,
    /// Time since its creation.
    pub age_seconds: f64,
    /// Time since its last put or get, to the precision of a turn.
    pub idle_seconds: f64,
    pub counters: Counters,
    /// Its private pools.
    #[serde(skip)]
    pub pools: Vec<PoolStats>,
}

/// Statistics of a store. Sums over shards that are read one after the other: exact when no operation is running.
/// As JSON without the clients and shared pools.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoreStats {
    /// Age of the store at its last turn.
    pub age_seconds: f64,
    /// Its current capacity, in bytes.
    pub capacity_bytes: u64,
    /// Maximum capacity, in bytes.
    pub max_capacity_bytes: u64,
    /// Memory in use, in bytes, metadata included; never above `capacity_bytes`.
    pub used_bytes: u64,
    /// Memory of metadata, in bytes.
    pub metadata_bytes: u64,
    /// Memory of frames of compressed pages, in bytes.
    pub compressed_frame_bytes: u64,
    /// Uncompressed size of those pages, in bytes.
    pub compressed_raw_bytes: u64,
    /// Number of pages in the store, by handle.
    pub pages: u64,
    /// Pages without a frame of their own, because their content is shared or is one word repeated.
    pub deduplicated_pages: u64,
    /// Counters since it was created, including clients that have left.
    pub counters: Counters,
    /// Its clients.
    #[serde(skip)]
    pub clients: Vec<ClientStats>,
    /// Its shared pools.
    #[serde(skip)]
    pub shared_pools: Vec<SharedPoolStats>,
}

impl StoreStats {
    /// All pools: those of each client, then the shared ones.
    pub fn pools(&self) -> impl Iterator<Item = &PoolStats> {
        let private = self.clients.iter().flat_map(|client| &client.pools);
        private.chain(self.shared_pools.iter().map(|shared| &shared.pool))
    }

    /// Bytes charged to clients and shared pools.
    pub fn charged_bytes(&self) -> u64 {
        let to_clients = self.clients.iter().map(|client| client.used_bytes);
        let to_pools = self.shared_pools.iter().map(|shared| shared.used_bytes);
        to_clients.chain(to_pools).sum()
    }
}
