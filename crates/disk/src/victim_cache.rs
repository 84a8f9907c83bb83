//! A victim cache for pages of the guest's disks: pools of a page store of the host, which the guest's device-mapper
//! target puts into and gets from.
//!
//! The store may be another process, which may end at any time. Then gets miss and puts are dropped. Because flushes
//! may not have reached it, a pool in which any call failed is not used again: a new one is opened in its place.

use std::io;
use std::time::Instant;

use crate::protocol::control;
use crate::{BlockSink, ImageNumber, Page, ServedImages, Verdict, VictimCacheStats};

/// The kind of pool to open in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolRequest {
    /// Of this VM alone; a get removes the page.
    Private,
    /// Of all daemons that serve the same image; a get leaves the page. Only what a daemon has read from the image is
    /// put into it.
    Shared {
        /// Identity of the image ([`image_pool_key`](crate::image_pool_key)).
        key: u128,
    },
}

/// The kind of pool that a guest opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestPool {
    /// Of this guest alone.
    Private,
    /// Of all guests of a read-only image.
    Image {
        /// Serial number of its disk.
        serial: String,
        /// Number of the image's block that is the pool's block 0.
        first_block: u64,
    },
}

/// A page store with pools. It is called by the thread that serves the VM's I/O: each call returns within a second, all
/// calls while the store does not answer in much less, together.
///
/// After an error it is unknown whether the call took effect; the pool is then only closed. A store that did not answer
/// in time gives [`TimedOut`](io::ErrorKind::TimedOut).
pub trait VictimCache: Send {
    /// Whether the store is in reach, as far as is known without waiting.
    fn is_in_reach(&mut self) -> bool;

    /// Why it is not, for a reader; `None` while it is, and before the first attempt to reach it has ended.
    fn failure(&self) -> Option<String>;

    /// Opens a pool and returns its number, which is never reused: after a store was unreachable, calls with an
    /// earlier number fail. A private pool is empty.
    ///
    /// # Errors
    /// If the store is out of reach or refuses.
    fn open(&mut self, pool: PoolRequest) -> io::Result<u32>;

    /// Closes a pool, reachable or not. The pages of a private pool are dropped, or never returned again.
    ///
    /// # Errors
    /// If the store is out of reach; the pool is closed all the same.
    fn close(&mut self, pool: u32) -> io::Result<()>;

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
    /// The image whose blocks it holds, and the number of the first of them.
    image: Option<(ImageNumber, u64)>,
    /// Its number in the store; `None` after a failure.
    number: Option<u32>,
}

/// The pools of a guest, under the guest's own numbers.
pub struct Pools {
    store: Option<Box<dyn VictimCache>>,
    images: ServedImages,
    pools: [Option<Pool>; control::POOLS_MAX as usize],
    stats: VictimCacheStats,
}

impl Pools {
    /// Creates the pools, with a store or without. Guests can share those of `images`.
    pub fn new(store: Option<Box<dyn VictimCache>>, images: ServedImages) -> Self {
        let stats = VictimCacheStats {
            available: store.is_some(),
            ..VictimCacheStats::default()
        };
        Self {
            store,
            images,
            pools: [const { None }; control::POOLS_MAX as usize],
            stats,
        }
    }

    /// Whether there is a store.
    pub fn available(&self) -> bool {
        self.store.is_some()
    }

    /// Opens a pool and returns the guest's number for it.
    ///
    /// # Errors
    /// If there is no store, no number is left, the store refuses, or there is no such image to be shared.
    pub fn open(&mut self, pool: &GuestPool) -> io::Result<u32> {
        let store = self.store.as_mut().ok_or(io::ErrorKind::Unsupported)?;
        let (request, image) = match pool {
            GuestPool::Private => (PoolRequest::Private, None),
            GuestPool::Image {
                serial,
                first_block,
            } => {
                let image = self.images.open(serial)?;
                if *first_block >= self.images.blocks(image) {
                    return Err(rustix::io::Errno::INVAL.into());
                }
                let key = self.images.key(image).ok_or(io::ErrorKind::Unsupported)?;
                (PoolRequest::Shared { key }, Some((image, *first_block)))
            }
        };
        let mut numbers = (1..).zip(&mut self.pools);
        let (ours, place) = (numbers.find(|(_, pool)| pool.is_none()))
            .ok_or_else(|| io::Error::from(rustix::io::Errno::MFILE))?;
        let opened = store.open(request);
        note(&mut self.stats, &opened);
        let number = opened?;
        *place = Some(Pool {
            request,
            image,
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
            note(&mut self.stats, &store.close(number));
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
        if let Some((at, left)) = self.place(pool, block) {
            let most = count.min(u32::try_from(left).unwrap_or(u32::MAX));
            self.call(pool, |store, number| {
                store.get(number, at, most, &mut |index, page| {
                    debug_assert!(index < most && hits & 1 << index == 0);
                    hits |= 1 << index;
                    found(index, page);
                })
            });
        }
        add_time(&mut self.stats.get_ns, begin);
        self.stats.gets += u64::from(count);
        self.stats.hits += u64::from(hits.count_ones());
        hits
    }

    /// Counts the puts that have completed. If any may have failed, all pools count as failed.
    fn collect_puts(&mut self) {
        let Some(store) = &mut self.store else { return };
        let collected = store.collect_puts();
        note(&mut self.stats, &collected);
        match collected {
            Ok(stored) => self.stats.stored += stored,
            Err(_) => {
                for pool in self.pools.iter_mut().flatten() {
                    if let Some(number) = pool.number.take() {
                        // Out of reach, it has closed it already.
                        let _ = store.close(number);
                    }
                }
            }
        }
    }

    /// Reopens pools that failed, and those of images that have changed under other keys. To be called periodically.
    pub fn turn(&mut self) {
        self.collect_puts();
        let Some(store) = &mut self.store else { return };
        let mut reachable = true;
        for pool in self.pools.iter_mut().flatten() {
            let request = match pool.image {
                None => Some(pool.request),
                Some((image, _)) => (self.images.key(image)).map(|key| PoolRequest::Shared { key }),
            };
            if request != Some(pool.request)
                && let Some(number) = pool.number.take()
            {
                note(&mut self.stats, &store.close(number));
            }
            // A pool of an image that does not tell its state stays closed.
            let Some(request) = request else { continue };
            pool.request = request;
            if pool.number.is_none() && reachable {
                let opened = store.open(request);
                // Until it is in reach, one failure is counted, not one each time.
                self.stats.timeouts += u64::from(is_timeout(&opened));
                pool.number = opened.ok();
                reachable = pool.number.is_some();
            }
        }
    }

    /// The block of the store's pool that is this block of a guest's pool, and how many there are from it on. `None` for a
    /// pool that is not open, and a block outside of its image.
    fn place(&self, pool: u32, block: u64) -> Option<(u64, u64)> {
        let place = (pool as usize).wrapping_sub(1);
        let Some((image, first_block)) = self.pools.get(place)?.as_ref()?.image else {
            return Some((block, control::BLOCKS_MAX - block));
        };
        let at = first_block.checked_add(block)?;
        let left = self.images.blocks(image).checked_sub(at)?;
        (left > 0).then_some((at, left))
    }

    /// Whether a page may be put at a block of the store's pool.
    fn admits(&mut self, pool: u32, at: u64, page: &Page) -> bool {
        let place = (pool as usize).wrapping_sub(1);
        let pool = self.pools.get(place).and_then(Option::as_ref);
        let Some((image, _)) = pool.and_then(|pool| pool.image) else {
            return true;
        };
        match self.images.judge(image, at, page) {
            Verdict::Same => return true,
            Verdict::Different => self.stats.refused_different += 1,
            Verdict::NotRead => self.stats.refused_unread += 1,
        }
        false
    }

    fn is_private(&self, pool: u32) -> bool {
        let place = (pool as usize).wrapping_sub(1);
        let pool = self.pools.get(place).and_then(Option::as_ref);
        pool.is_some_and(|pool| pool.request == PoolRequest::Private)
    }

    /// Statistics of the pools.
    #[must_use]
    pub fn stats(&mut self) -> VictimCacheStats {
        let in_reach = (self.store.as_mut()).is_some_and(|store| store.is_in_reach());
        VictimCacheStats {
            in_reach,
            failure: self.store.as_ref().and_then(|store| store.failure()),
            ..self.stats.clone()
        }
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
        let answer = call(store, number);
        note(&mut self.stats, &answer);
        if answer.is_err() {
            pool.number = None;
            // Out of reach, it has closed it already.
            let _ = store.close(number);
        }
        answer.ok()
    }
}

fn add_time(sum_ns: &mut u64, begin: Instant) {
    let ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    *sum_ns = sum_ns.saturating_add(ns);
}

/// Counts a call that failed.
fn note<T>(stats: &mut VictimCacheStats, result: &io::Result<T>) {
    stats.errors += u64::from(result.is_err());
    stats.timeouts += u64::from(is_timeout(result));
}

fn is_timeout<T>(result: &io::Result<T>) -> bool {
    (result.as_ref()).is_err_and(|error| error.kind() == io::ErrorKind::TimedOut)
}

impl BlockSink for Pools {
    fn put(&mut self, pool: u32, block: u64, page: &Page) {
        self.stats.puts += 1;
        let begin = Instant::now();
        if let Some((at, _)) = self.place(pool, block)
            && self.admits(pool, at, page)
        {
            self.call(pool, |store, number| store.put(number, at, page));
        }
        add_time(&mut self.stats.put_ns, begin);
    }

    fn end_of_batch(&mut self) {
        let begin = Instant::now();
        self.collect_puts();
        add_time(&mut self.stats.put_ns, begin);
    }

    /// Of a private pool. The contents of an image's blocks never change, and other VMs use its pool too.
    fn flush(&mut self, pool: u32, block: u64, count: u32) {
        self.stats.flushed_blocks += u64::from(count);
        if self.is_private(pool) {
            self.call(pool, |store, number| store.flush(number, block, count));
        }
    }

    /// Empties the private pools, as [`flush`](Self::flush).
    fn forget(&mut self) {
        for pool in 1..=control::POOLS_MAX {
            if self.is_private(pool) {
                self.call(pool, |store, number| store.flush_pool(number));
            }
        }
    }
}
