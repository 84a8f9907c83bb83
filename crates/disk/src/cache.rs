//! The cache's pages: one private pool of an hcache store with one shard, so that pages leave in exact LRU order.
//!
//! Each can be dropped at any time: what storage lacks is in the [dirty log](crate::DirtyPages).
//!
//! The store's periodic work is not done: there is one client, and rebuilding its metadata takes long.

use plimsoll_hcache::{
    Client, ClientOptions, Error, Handle, LRU, Page, PoolId, PoolOptions, Store, StoreOptions,
};

use crate::{DiskNumber, Location};

/// Pages moved, dropped or returned in a step of a resize: about a millisecond.
const STEP_PAGES: usize = 1024;

pub(crate) struct Cache {
    store: Store,
    client: Client,
    pool: PoolId,
}

impl Cache {
    /// Makes a cache of at most `bytes` bytes, metadata included, that can be resized up to `bytes_max`.
    pub(crate) fn new(bytes: u64, bytes_max: u64) -> Result<Self, Error> {
        let store = Store::new(StoreOptions {
            capacity_bytes: bytes,
            max_capacity_bytes: bytes_max.max(bytes),
            shards: 1,
            eviction: LRU,
            ..StoreOptions::new(bytes)
        })?;
        let client = store.create_client(ClientOptions::new("disk"))?;
        let pool = client.create_pool(PoolOptions::private())?;
        Ok(Self {
            store,
            client,
            pool,
        })
    }

    fn handle(&self, location: Location) -> Handle {
        Handle {
            pool: self.pool,
            object: object(location.disk(), location.block() >> 32),
            index: index(location.block()),
        }
    }

    /// Reads a page and removes it. Returns whether it was there.
    pub(crate) fn take(&self, location: Location, read: impl FnOnce(&Page)) -> bool {
        self.client
            .get_with(self.handle(location), read)
            .expect("the pool is there as long as its client")
    }

    /// Puts a page at the tail. Returns whether the store took it.
    pub(crate) fn put(&self, location: Location, page: &Page) -> bool {
        self.client
            .put(self.handle(location), page)
            .is_ok_and(plimsoll_hcache::PutOutcome::is_stored)
    }

    /// Drops a page, if it is there.
    pub(crate) fn drop_page(&self, location: Location) {
        let _ = self.client.flush(self.handle(location));
    }

    /// Drops a disk's pages of these blocks.
    pub(crate) fn drop_range(&self, disk: DiskNumber, first: u64, last: u64) {
        const INDICES: u64 = 1 << 32;
        let mut from = first;
        while from <= last {
            let high = from / INDICES;
            let to = last.min(high * INDICES + (INDICES - 1));
            let indices = index(from)..=index(to);
            let _ = self
                .client
                .flush_range(self.pool, object(disk, high), indices);
            from = to + 1;
        }
    }

    /// Drops all pages.
    pub(crate) fn clear(&self) {
        let _ = self.client.flush_pool(self.pool);
    }

    /// Changes the capacity in bytes by a step. Returns whether it is the one requested.
    pub(crate) fn resize_step(&self, bytes: u64) -> Result<bool, Error> {
        self.store.resize_step(bytes, STEP_PAGES)
    }

    /// The capacity in bytes: while it is reduced, the memory that may be in use.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.store.stats().capacity_bytes
    }

    /// Pages held, and pages dropped since the start because there was no room.
    pub(crate) fn pages(&self) -> (u64, u64) {
        let stats = self.store.stats();
        (stats.pages, stats.counters.evicted_pages)
    }
}

fn object(disk: DiskNumber, high: u64) -> u64 {
    u64::from(disk.0) << 18 | high
}

#[expect(clippy::cast_possible_truncation, reason = "the rest is in the object")]
fn index(block: u64) -> u32 {
    block as u32
}
