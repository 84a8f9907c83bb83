//! Accounts to which memory is charged, and the state of a pool, shared by all shards.

use crate::sync::{Arc, AtomicBool, AtomicI64, AtomicU64, Mutex, Ordering, lock};
use crate::{ClientId, ClientOptions, PoolId};

/// Stamp of the oldest page where there is no page.
pub(crate) const NONE_OLD: u64 = u64::MAX;

/// No limit.
const UNLIMITED: u64 = u64::MAX;

/// To whom memory is charged: a client for its private pools, or a shared pool.
#[repr(align(128))] // a line of its own: all threads of the client write `used_bytes`
pub(crate) struct Account {
    used_bytes: AtomicI64,
    /// The client's number; of a shared pool its domain, which is no client's number.
    pub(crate) id: ClientId,
    pub(crate) group: u64,
    /// Held for it outside of the store, from its first day to its last; part of what it uses.
    pub(crate) outside_bytes: u64,
    ceiling_bytes: AtomicU64,
    target_bytes: AtomicU64,
    pub(crate) options: ClientOptions,
    /// The pools whose pages are charged to it.
    pub(crate) pools: Mutex<Vec<Arc<PoolTotals>>>,
}

impl Account {
    pub(crate) fn new(id: ClientId, options: ClientOptions) -> Self {
        Self {
            used_bytes: AtomicI64::new(i64::try_from(options.outside_bytes).unwrap_or(i64::MAX)),
            id,
            group: options.group,
            outside_bytes: options.outside_bytes,
            ceiling_bytes: AtomicU64::new(options.ceiling_bytes.unwrap_or(UNLIMITED)),
            target_bytes: AtomicU64::new(options.floor_bytes),
            options,
            pools: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
            .load(Ordering::Relaxed)
            .max(0)
            .cast_unsigned()
    }

    /// Whether it has memory in the store.
    pub(crate) fn has_pages(&self) -> bool {
        self.used_bytes() > self.outside_bytes
    }

    pub(crate) fn floor_bytes(&self) -> u64 {
        self.options.floor_bytes
    }

    pub(crate) fn target_bytes(&self) -> u64 {
        self.target_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn set_target_bytes(&self, bytes: u64) {
        self.target_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Sets the limit of what it uses, `None` for no limit.
    pub(crate) fn set_ceiling_bytes(&self, bytes: Option<u64>) {
        self.ceiling_bytes
            .store(bytes.unwrap_or(UNLIMITED), Ordering::Relaxed);
    }

    /// Whether it uses more than its limit.
    pub(crate) fn is_above_ceiling(&self) -> bool {
        self.used_bytes() > self.ceiling_bytes.load(Ordering::Relaxed)
    }

    /// Location of the page charged to it that would be evicted next.
    pub(crate) fn oldest(&self, ages: Ages) -> Option<OldestPage> {
        let pools = lock(&self.pools);
        let oldest = pools
            .iter()
            .filter_map(|pool| OldestPage::next_evicted(pool, ages));
        oldest.min_by_key(|oldest| oldest.stamp)
    }

    /// Charges `bytes`, or refunds them if negative.
    #[inline(always)]
    pub(crate) fn charge(&self, bytes: i64) {
        self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Charges `bytes` if the total stays below the ceiling.
    #[inline(always)]
    pub(crate) fn try_charge(&self, bytes: u64) -> bool {
        let ceiling = self.ceiling_bytes.load(Ordering::Relaxed);
        let bytes = bytes.cast_signed();
        if ceiling == UNLIMITED {
            self.charge(bytes);
            return true;
        }
        let within = |used: i64| {
            let after = used + bytes;
            (after.max(0).cast_unsigned() <= ceiling).then_some(after)
        };
        self.used_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, within)
            .is_ok()
    }
}

/// Bit of a published stamp: the page is in the second queue. Stamps are below it.
const SECOND: u64 = 1 << 62;

/// How stamps of the two queues compare at a time: ages in the second one count for less.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ages {
    /// The store's clock at that time.
    pub(crate) clock: u64,
    /// By how much less.
    pub(crate) second_stays: u64,
}

impl Ages {
    /// The stamp of a page of the first queue that counts as old.
    #[inline]
    pub(crate) fn comparable(self, stamp: u64, in_second: bool) -> u64 {
        if in_second {
            let age = self.clock.saturating_sub(stamp);
            stamp.max(self.clock - age / self.second_stays)
        } else {
            stamp
        }
    }
}

/// Stamps of one shard's oldest pages, on a cache line of their own.
#[repr(align(64))]
struct Stamps([AtomicU64; 2]);

/// A pool, over all shards.
#[repr(align(128))] // as above: each put and get counts its page
pub(crate) struct PoolTotals {
    pub(crate) id: PoolId,
    pages: AtomicU64,
    capacity_pages: Option<u64>,
    /// An object has had pages beyond its first chunk, so it may be in several shards.
    large: AtomicBool,
    /// For each shard the stamps of the oldest page, and of the one to be evicted next, with [`SECOND`] if it is in the second
    /// queue.
    oldest: Box<[Stamps]>,
}

impl PoolTotals {
    pub(crate) fn new(id: PoolId, capacity_pages: Option<u64>, shards: usize) -> Self {
        Self {
            id,
            pages: AtomicU64::new(0),
            capacity_pages,
            large: AtomicBool::new(false),
            oldest: (0..shards)
                .map(|_| Stamps([AtomicU64::new(NONE_OLD), AtomicU64::new(NONE_OLD)]))
                .collect(),
        }
    }

    /// Bytes of memory it takes.
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of::<Self>() + self.oldest.len() * size_of::<Stamps>()
    }

    pub(crate) fn capacity_pages(&self) -> Option<u64> {
        self.capacity_pages
    }

    /// Counts a page, if the pool's capacity allows it.
    #[inline(always)]
    pub(crate) fn try_add_page(&self) -> bool {
        let Some(capacity) = self.capacity_pages else {
            self.pages.fetch_add(1, Ordering::Relaxed);
            return true;
        };
        let within = |pages: u64| (pages < capacity).then_some(pages + 1);
        self.pages
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, within)
            .is_ok()
    }

    #[inline(always)]
    pub(crate) fn remove_page(&self) {
        self.remove_pages(1);
    }

    #[inline(always)]
    pub(crate) fn remove_pages(&self, pages: u64) {
        self.pages.fetch_sub(pages, Ordering::Relaxed);
    }

    pub(crate) fn is_large(&self) -> bool {
        self.large.load(Ordering::Acquire)
    }

    pub(crate) fn set_large(&self) {
        self.large.store(true, Ordering::Release);
    }

    /// Publishes the stamps of a shard's oldest page and of the one to be evicted next, which may be in the second queue.
    pub(crate) fn publish(&self, shard: usize, any: u64, next: u64, in_second: bool) {
        let next = if in_second { next | SECOND } else { next };
        self.oldest[shard].0[0].store(any, Ordering::Relaxed);
        self.oldest[shard].0[1].store(next, Ordering::Relaxed);
    }
}

/// Location of a pool's page that is first in some order.
pub(crate) struct OldestPage {
    pub(crate) pool: Arc<PoolTotals>,
    pub(crate) shard: usize,
    pub(crate) stamp: u64,
    /// Stamp of the oldest page of the other shards.
    pub(crate) next: u64,
}

impl OldestPage {
    /// The oldest page of a pool.
    pub(crate) fn of(pool: &Arc<PoolTotals>) -> Option<Self> {
        Self::first_of(pool, |stamps| stamps.0[0].load(Ordering::Relaxed))
    }

    /// The page of a pool that would be evicted next, with a comparable stamp.
    pub(crate) fn next_evicted(pool: &Arc<PoolTotals>, ages: Ages) -> Option<Self> {
        Self::first_of(pool, |stamps| match stamps.0[1].load(Ordering::Relaxed) {
            NONE_OLD => NONE_OLD,
            stamp => ages.comparable(stamp & !SECOND, stamp & SECOND != 0),
        })
    }

    fn first_of(pool: &Arc<PoolTotals>, stamp_of: impl Fn(&Stamps) -> u64) -> Option<Self> {
        let (mut shard, mut stamp, mut next) = (0, NONE_OLD, NONE_OLD);
        for (number, stamps) in pool.oldest.iter().enumerate() {
            let other = stamp_of(stamps);
            if other < stamp {
                (shard, next, stamp) = (number, stamp, other);
            } else {
                next = next.min(other);
            }
        }
        let pool = pool.clone();
        (stamp != NONE_OLD).then_some(Self {
            pool,
            shard,
            stamp,
            next,
        })
    }
}
