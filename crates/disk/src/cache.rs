//! The cache's pages: one private pool of an hcache store with one shard, so that pages leave in exact LRU order.

use std::time::Duration;

use plimsoll_hcache::{
    Client, ClientOptions, Error, Handle, Page, PoolId, PoolOptions, Store, StoreOptions, Version,
};

use crate::{DiskNumber, Location};

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

    /// Reads a page and removes it, unless it is dirty. Returns whether it was there.
    pub(crate) fn take(&self, location: Location, read: impl FnOnce(&Page)) -> bool {
        self.client
            .get_with(self.handle(location), read)
            .expect("the pool is there as long as its client")
    }

    /// Copies a page.
    pub(crate) fn peek(&self, location: Location, page: &mut Page) -> Option<Version> {
        self.client
            .peek(self.handle(location), page)
            .expect("the pool is there as long as its client")
    }

    /// Puts a clean page at the tail. Returns whether the store took it.
    pub(crate) fn put(&self, location: Location, page: &Page) -> bool {
        self.client
            .put(self.handle(location), page)
            .is_ok_and(plimsoll_hcache::PutOutcome::is_stored)
    }

    /// Puts a dirty page at the tail. Returns whether the store took it.
    pub(crate) fn put_dirty(&self, location: Location, page: &Page) -> bool {
        self.client
            .put_dirty(self.handle(location), page)
            .is_ok_and(plimsoll_hcache::PutOutcome::is_stored)
    }

    /// Makes a page, if it is still cached, the most recently used one.
    pub(crate) fn move_to_tail(&self, location: Location) {
        // It may have been dropped meanwhile.
        let _ = self.client.move_to_tail(self.handle(location));
    }

    /// Marks the page clean if its contents are still those of `version`.
    pub(crate) fn mark_clean(&self, location: Location, version: Version) -> bool {
        self.client
            .mark_clean(self.handle(location), version)
            .unwrap_or(false)
    }

    /// Drops a page, dirty or not. Returns whether it was there.
    pub(crate) fn drop_page(&self, location: Location) -> bool {
        self.client.flush(self.handle(location)).unwrap_or(false)
    }

    /// Drops a disk's pages of these blocks, dirty or not.
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

    /// Drops all pages, dirty or not.
    pub(crate) fn clear(&self) {
        let _ = self.client.flush_pool(self.pool);
    }

    /// Changes the capacity in bytes.
    pub(crate) fn resize(&self, bytes: u64) -> Result<(), Error> {
        self.store.resize(bytes)
    }

    /// Runs the store's periodic maintenance.
    pub(crate) fn turn(&self, now: Duration) {
        self.store.turn(now);
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
