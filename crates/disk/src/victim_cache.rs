//! A victim cache for pages of the guest's disks: pools of a page store of the host, which the guest's device-mapper
//! target puts into and gets from.
//!
//! The store may be another process, which may end at any time. Then gets miss and puts are dropped. Because flushes
//! may not have reached it, a pool in which any call failed is not used again: a new one is opened in its place.

use std::io;
use std::time::Instant;

use crate::protocol::control;
use crate::{BlockSink, Page, VictimCacheStats};

/// The kind of pool to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolRequest {
    /// Of this VM alone; a get removes the page.
    Private,
    /// Of all VMs that have its key; a get leaves the page. The contents of a block must never change.
    Shared {
        /// Shared secret: clients that have it may put and get.
        key: u128,
    },
}

/// A page store with pools. Calls return within a short time: a store that does not answer has failed.
///
/// After an error it is unknown whether the call took effect; the pool is then only closed.
pub trait VictimCache: Send {
    /// Opens a pool and returns its number, which is never reused: after a store was unreachable, calls with an
    /// earlier number fail. A private pool is empty.
    ///
    /// # Errors
    /// If the store is out of reach or refuses.
    fn open(&mut self, pool: PoolRequest) -> io::Result<u32>;

    /// Closes a pool, reachable or not. The pages of a private pool are dropped.
    fn close(&mut self, pool: u32);

    /// Submits a page that is to be stored in place of the pool's earlier page of the block. If it is not stored, the
    /// pool has no page of the block. It takes effect before every later call; many may be in progress.
    ///
    /// # Errors
    /// If the store is out of reach.
    fn put(&mut self, pool: u32, block: u64, page: &Page) -> io::Result<()>;

    /// Hands the puts submitted so far to the store, without waiting for them. Returns how many were stored of those that
    /// have completed since the last call.
    ///
    /// # Errors
    /// If the store is out of reach. It is then unknown which puts, to any pool, took effect.
    fn collect_puts(&mut self) -> io::Result<u64>;

    /// Passes those of the `count` blocks from `block` on that the pool has to `found`, each at most once, with its
    /// number counted from `block`.
    ///
    /// # Errors
    /// If the store is unreachable; the pages passed before are valid.
    fn get(
        &mut self,
        pool: u32,
        block: u64,
        count: u32,
        found: &mut dyn FnMut(u32, &Page),
    ) -> io::Result<()>;

    /// Drops what the pool has for `count` blocks from `block` on.
    ///
    /// # Errors
    /// If the store is out of reach.
    fn flush(&mut self, pool: u32, block: u64, count: u32) -> io::Result<()>;

    /// Drops all the pool has.
    ///
    /// # Errors
    /// If the store is out of reach.
    fn flush_pool(&mut self, pool: u32) -> io::Result<()>;
}

/// A pool the guest has opened.
struct Pool {
    request: PoolRequest,
    /// Its number in the store; `None` after a failure.
    number: Option<u32>,
}

/// The pools of a guest, under the guest's own numbers.
pub struct Pools {
    store: Option<Box<dyn VictimCache>>,
    pools: [Option<Pool>; control::POOLS_MAX as usize],
    stats: VictimCacheStats,
}

impl Pools {
    /// Creates the pools, with a store or without.
    #[must_use]
    pub fn new(store: Option<Box<dyn VictimCache>>) -> Self {
        let stats = VictimCacheStats {
            available: store.is_some(),
            ..VictimCacheStats::default()
        };
        Self {
            store,
            pools: [const { None }; control::POOLS_MAX as usize],
            stats,
        }
    }

    /// Whether there is a store.
    #[must_use]
    pub fn available(&self) -> bool {
        self.store.is_some()
    }

    /// Opens a pool and returns the guest's number for it.
    ///
    /// # Errors
    /// If there is no store, no number is left, or the store refuses.
    pub fn open(&mut self, request: PoolRequest) -> io::Result<u32> {
        let store = self.store.as_mut().ok_or(io::ErrorKind::Unsupported)?;
        let mut numbers = (1..).zip(&mut self.pools);
        let (ours, place) = (numbers.find(|(_, pool)| pool.is_none()))
            .ok_or_else(|| io::Error::from(rustix::io::Errno::MFILE))?;
        let number = store
            .open(request)
            .inspect_err(|_| self.stats.errors += 1)?;
        *place = Some(Pool {
            request,
            number: Some(number),
        });
        self.stats.pools += 1;
        Ok(ours)
    }

    /// Closes a pool; returns false if there is no such pool.
    pub fn close(&mut self, pool: u32) -> bool {
        let place = (pool as usize).wrapping_sub(1);
        let Some(pool) = self.pools.get_mut(place).and_then(Option::take) else {
            return false;
        };
        self.stats.pools -= 1;
        if let (Some(store), Some(number)) = (&mut self.store, pool.number) {
            store.close(number);
        }
        true
    }

    /// Closes all pools.
    pub fn close_all(&mut self) {
        for pool in 1..=control::POOLS_MAX {
            self.close(pool);
        }
    }

    /// Passes those of `count` blocks, at most 64, that are stored to `found` with their number from `block`. Returns a
    /// bit for each of them.
    pub fn get(
        &mut self,
        pool: u32,
        block: u64,
        count: u32,
        found: &mut dyn FnMut(u32, &Page),
    ) -> u64 {
        let mut hits = 0u64;
        let begin = Instant::now();
        self.call(pool, |store, number| {
            store.get(number, block, count, &mut |index, page| {
                debug_assert!(index < count && hits & 1 << index == 0);
                hits |= 1 << index;
                found(index, page);
            })
        });
        add_time(&mut self.stats.get_ns, begin);
        self.stats.gets += u64::from(count);
        self.stats.hits += u64::from(hits.count_ones());
        hits
    }

    /// Counts the puts that have completed. If any may have failed, all pools count as failed.
    fn collect_puts(&mut self) {
        let Some(store) = &mut self.store else { return };
        match store.collect_puts() {
            Ok(stored) => self.stats.stored += stored,
            Err(_) => {
                self.stats.errors += 1;
                for pool in self.pools.iter_mut().flatten() {
                    if let Some(number) = pool.number.take() {
                        store.close(number);
                    }
                }
            }
        }
    }

    /// Reopens pools that failed. To be called periodically.
    pub fn turn(&mut self) {
        self.collect_puts();
        let Some(store) = &mut self.store else { return };
        let failed = (self.pools.iter_mut().flatten()).filter(|pool| pool.number.is_none());
        for pool in failed {
            match store.open(pool.request) {
                Ok(number) => pool.number = Some(number),
                Err(_) => return,
            }
        }
    }

    /// Statistics of the pools.
    #[must_use]
    pub fn stats(&self) -> VictimCacheStats {
        self.stats.clone()
    }

    /// Calls the store for an open pool that has not failed. After an error the pool counts as failed.
    fn call<T>(
        &mut self,
        pool: u32,
        call: impl FnOnce(&mut dyn VictimCache, u32) -> io::Result<T>,
    ) -> Option<T> {
        let store = self.store.as_deref_mut()?;
        let place = (pool as usize).wrapping_sub(1);
        let pool = self.pools.get_mut(place)?.as_mut()?;
        let number = pool.number?;
        match call(store, number) {
            Ok(answer) => Some(answer),
            Err(_) => {
                self.stats.errors += 1;
                pool.number = None;
                store.close(number);
                None
            }
        }
    }
}

fn add_time(sum_ns: &mut u64, begin: Instant) {
    let ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    *sum_ns = sum_ns.saturating_add(ns);
}

impl BlockSink for Pools {
    fn put(&mut self, pool: u32, block: u64, page: &Page) {
        self.stats.puts += 1;
        let begin = Instant::now();
        self.call(pool, |store, number| store.put(number, block, page));
        add_time(&mut self.stats.put_ns, begin);
    }

    fn end_of_batch(&mut self) {
        let begin = Instant::now();
        self.collect_puts();
        add_time(&mut self.stats.put_ns, begin);
    }

    fn flush(&mut self, pool: u32, block: u64, count: u32) {
        self.stats.flushed_blocks += u64::from(count);
        self.call(pool, |store, number| store.flush(number, block, count));
    }

    /// Empties the private pools. Shared ones stay: the contents of their blocks never change, and other VMs use them
    /// too.
    fn forget(&mut self) {
        for pool in 1..=control::POOLS_MAX {
            let private = self.pools[pool as usize - 1]
                .as_ref()
                .is_some_and(|pool| pool.request == PoolRequest::Private);
            if private {
                self.call(pool, |store, number| store.flush_pool(number));
            }
        }
    }
}
