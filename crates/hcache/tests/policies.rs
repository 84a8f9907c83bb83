//! Each eviction policy against its naive twin: queues of numbers, searched from end to end, after the publications.
//!
//! The twin holds a pool of a fixed number of pages in a store of one shard and, without contents, a miniature of
//! that size.

use std::collections::VecDeque;

use plimsoll_hcache::{
    Client, ClientOptions, EVICTION_POLICIES, EvictionPolicyRow, Handle, Miniature, PAGE_BYTES,
    PoolId, PoolOptions, Store, StoreOptions, eviction_policy,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// A page and a count of its uses.
type Entry = (u32, u8);

/// The naive pool of a policy.
trait Naive {
    /// A get; `exclusive`: it takes the page out.
    fn get(&mut self, page: u32, exclusive: bool) -> bool;
    fn put(&mut self, page: u32);
    fn flush(&mut self, page: u32);
    fn pages(&self) -> Vec<u32>;
}

fn at(queue: &VecDeque<Entry>, page: u32) -> Option<usize> {
    queue.iter().position(|entry| entry.0 == page)
}

fn take(queue: &mut VecDeque<Entry>, page: u32) -> bool {
    let found = at(queue, page);
    found.map(|at| queue.remove(at)).is_some()
}

/// The most recently used page last.
struct NaiveLru {
    size: usize,
    queue: VecDeque<Entry>,
}

impl Naive for NaiveLru {
    fn get(&mut self, page: u32, exclusive: bool) -> bool {
        let found = take(&mut self.queue, page);
        if found && !exclusive {
            self.queue.push_back((page, 0));
        }
        found
    }

    fn put(&mut self, page: u32) {
        take(&mut self.queue, page);
        self.queue.push_back((page, 0));
        if self.queue.len() > self.size {
            self.queue.pop_front();
        }
    }

    fn flush(&mut self, page: u32) {
        take(&mut self.queue, page);
    }

    fn pages(&self) -> Vec<u32> {
        self.queue.iter().map(|entry| entry.0).collect()
    }
}

/// \[Zhang24\] algorithm 1: the newest page last, and the hand as the place of the page that it is at.
struct NaiveSieve {
    size: usize,
    queue: VecDeque<Entry>,
    hand: usize,
}

impl NaiveSieve {
    fn remove(&mut self, page: u32) -> bool {
        let Some(at) = at(&self.queue, page) else {
            return false;
        };
        self.queue.remove(at);
        self.hand -= usize::from(at < self.hand);
        self.wrap();
        true
    }

    /// Beyond the newest page, the hand goes back to the oldest.
    fn wrap(&mut self) {
        if self.hand >= self.queue.len() {
            self.hand = 0;
        }
    }
}

impl Naive for NaiveSieve {
    fn get(&mut self, page: u32, exclusive: bool) -> bool {
        if exclusive {
            return self.remove(page);
        }
        let found = at(&self.queue, page);
        if let Some(at) = found {
            self.queue[at].1 = 1;
        }
        found.is_some()
    }

    fn put(&mut self, page: u32) {
        if self.get(page, false) {
            return;
        }
        while self.queue.len() >= self.size {
            if self.queue[self.hand].1 > 0 {
                self.queue[self.hand].1 = 0;
                self.hand += 1;
            } else {
                self.queue.remove(self.hand);
            }
            self.wrap();
        }
        self.queue.push_back((page, 0));
    }

    fn flush(&mut self, page: u32) {
        self.remove(page);
    }

    fn pages(&self) -> Vec<u32> {
        self.queue.iter().map(|entry| entry.0).collect()
    }
}

/// \[Yang23\] algorithm 1.
struct NaiveS3Fifo {
    size: usize,
    small: VecDeque<Entry>,
    main: VecDeque<Entry>,
    /// All pages that left, the last one last, and none in the place of one that was put again.
    left: Vec<Option<u32>>,
    /// Number of pages at the last eviction, or since if that is more.
    reached: usize,
}

impl NaiveS3Fifo {
    fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn evict(&mut self) {
        let tenth = self.small.len() * 10 >= self.len();
        let before = self.len();
        if !self.small.is_empty() && tenth {
            let (page, uses) = self.small.pop_front().unwrap();
            if uses > 1 {
                self.main.push_back((page, 0));
            } else {
                self.left.push(Some(page));
            }
        } else {
            let (page, uses) = self.main.pop_front().unwrap();
            if uses > 0 {
                self.main.push_back((page, uses - 1));
            }
        }
        if self.len() < before {
            self.reached = before;
        }
    }
}

impl Naive for NaiveS3Fifo {
    fn get(&mut self, page: u32, exclusive: bool) -> bool {
        if exclusive {
            let found = take(&mut self.small, page) || take(&mut self.main, page);
            if found {
                self.left.push(Some(page));
            }
            return found;
        }
        let mut both = self.small.iter_mut().chain(&mut self.main);
        let found = both.find(|entry| entry.0 == page);
        if let Some(entry) = found {
            entry.1 = (entry.1 + 1).min(3);
            return true;
        }
        false
    }

    fn put(&mut self, page: u32) {
        if self.get(page, false) {
            return;
        }
        while self.len() >= self.size {
            self.evict();
        }
        self.reached = self.reached.max(self.len());
        let remembered = self.reached - self.reached / 10;
        let mut latest = self.left.iter_mut().rev().take(remembered);
        let ghost = latest.find(|left| **left == Some(page));
        if let Some(ghost) = ghost {
            *ghost = None;
            self.main.push_back((page, 0));
        } else {
            self.small.push_back((page, 0));
        }
    }

    fn flush(&mut self, page: u32) {
        take(&mut self.small, page);
        take(&mut self.main, page);
    }

    fn pages(&self) -> Vec<u32> {
        let both = self.small.iter().chain(&self.main);
        both.map(|entry| entry.0).collect()
    }
}

fn naive(row: &EvictionPolicyRow, size: usize) -> Box<dyn Naive> {
    match row.name {
        "lru" => Box::new(NaiveLru {
            size,
            queue: VecDeque::new(),
        }),
        "sieve" => Box::new(NaiveSieve {
            size,
            queue: VecDeque::new(),
            hand: 0,
        }),
        "s3-fifo" => Box::new(NaiveS3Fifo {
            size,
            small: VecDeque::new(),
            main: VecDeque::new(),
            left: Vec::new(),
            reached: 0,
        }),
        name => panic!("{name} has no twin"),
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// A get and, if it misses, a put.
    Fetch(u32),
    Get(u32),
    Put(u32),
    Flush(u32),
}

fn op(pages: u32) -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..pages).prop_map(Op::Fetch),
        // Few pages are used often, as in every cache that is worth it.
        8 => (0..pages / 4 + 1).prop_map(Op::Fetch),
        2 => (0..pages).prop_map(Op::Get),
        3 => (0..pages).prop_map(Op::Put),
        1 => (0..pages).prop_map(Op::Flush),
    ]
}

/// A pool of `size` pages in a store of one shard.
struct Pool(Client, PoolId);

impl Pool {
    fn new(row: &'static EvictionPolicyRow, size: usize, shared: bool) -> Self {
        let options = StoreOptions {
            shards: 1,
            eviction: row,
            ..StoreOptions::new(64 << 20)
        };
        let client = Store::new(options).unwrap();
        let client = client.create_client(ClientOptions::new("c")).unwrap();
        let options = if shared {
            PoolOptions::shared(1)
        } else {
            PoolOptions::private()
        };
        let options = PoolOptions {
            capacity_pages: Some(size as u64),
            ..options
        };
        let pool = client.create_pool(options).unwrap();
        Self(client, pool)
    }

    fn handle(&self, page: u32) -> Handle {
        Handle {
            pool: self.1,
            object: u64::from(page % 3),
            index: page,
        }
    }

    fn get(&self, page: u32) -> bool {
        self.0.get(self.handle(page), &mut [0; PAGE_BYTES]).unwrap()
    }

    fn put(&self, page: u32) {
        let outcome = self.0.put(self.handle(page), &[1; PAGE_BYTES]);
        assert!(outcome.unwrap().is_stored());
    }

    fn has(&self, page: u32) -> bool {
        let found = self.0.peek(self.handle(page), &mut [0; PAGE_BYTES]);
        found.unwrap()
    }
}

/// Number of different pages in a run against the store: few, and in a large store, because it may take one page for another
/// that left.
const FEW_PAGES: u32 = 24;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    #[test]
    fn a_store_evicts_as_its_policy_is_published(
        ops in vec(op(FEW_PAGES), 1..500),
        size in 1_usize..20,
        shared in any::<bool>(),
        row in prop::sample::select(&EVICTION_POLICIES[..]),
    ) {
        let pool = Pool::new(row, size, shared);
        let mut twin = naive(row, size);
        for op in ops {
            match op {
                Op::Fetch(page) => {
                    let hit = pool.get(page);
                    prop_assert_eq!(hit, twin.get(page, !shared), "{:?}", page);
                    if !hit {
                        pool.put(page);
                        twin.put(page);
                    }
                }
                Op::Get(page) => prop_assert_eq!(pool.get(page), twin.get(page, !shared)),
                Op::Put(page) => {
                    pool.put(page);
                    twin.put(page);
                }
                Op::Flush(page) => {
                    pool.0.flush(pool.handle(page)).unwrap();
                    twin.flush(page);
                }
            }
            let mut left = twin.pages();
            left.sort_unstable();
            let there = (0..FEW_PAGES).filter(|&page| pool.has(page));
            prop_assert_eq!(there.collect::<Vec<_>>(), left);
        }
    }

    #[test]
    fn a_miniature_holds_the_pages_of_its_policy(
        ops in vec(op(60), 1..800),
        size in 0_u32..40,
        exclusive in any::<bool>(),
        row in prop::sample::select(&EVICTION_POLICIES[..]),
    ) {
        let mut miniature = Miniature::new(row, size);
        let mut twin = naive(row, size as usize);
        let bytes = miniature.memory_bytes();
        for op in ops {
            match op {
                _ if size == 0 => {
                    let (Op::Fetch(page) | Op::Get(page) | Op::Put(page) | Op::Flush(page)) = op;
                    miniature.put(page);
                    prop_assert!(!miniature.get(page, !exclusive, false));
                }
                Op::Fetch(page) => {
                    // Of a larger store, where it hit, or of a smaller one, where it missed and is put.
                    let missed = page % 2 == 0;
                    let hit = miniature.get(page, !exclusive, missed);
                    prop_assert_eq!(hit, twin.get(page, exclusive));
                    if !hit {
                        twin.put(page);
                    }
                    let is_put = if exclusive { !hit } else { missed };
                    if is_put {
                        miniature.put(page);
                    }
                }
                // A get that missed and is not followed by a put: the flush takes back that it is owed.
                Op::Get(page) if exclusive => {
                    prop_assert_eq!(miniature.get(page, false, true), twin.get(page, true));
                }
                Op::Get(_) => {}
                Op::Put(page) => {
                    miniature.put(page);
                    twin.put(page);
                }
                Op::Flush(page) => {
                    miniature.flush(page);
                    twin.flush(page);
                }
            }
            prop_assert_eq!(miniature.pages() as usize, twin.pages().len());
        }
        prop_assert_eq!(miniature.memory_bytes(), bytes, "all memory is taken at the start");
        if size > 0 {
            for page in twin.pages() {
                prop_assert!(miniature.get(page, true, false));
            }
        }
    }
}

#[test]
fn every_policy_is_found_by_its_name() {
    for row in EVICTION_POLICIES {
        assert_eq!(eviction_policy(row.name).unwrap().name, row.name);
    }
    assert!(eviction_policy("clock").is_none());
}

/// A scan through a pool of pages in use: LRU drops them all, the others keep most.
#[test]
fn a_scan_does_not_take_the_place_of_pages_in_use() {
    for row in EVICTION_POLICIES {
        let pool = Pool::new(row, 200, true);
        let fetch = |page| {
            if !pool.get(page) {
                pool.put(page);
            }
        };
        for _ in 0..5 {
            (0..100).for_each(fetch);
        }
        (1000..1300).for_each(fetch);
        let kept = (0..100).filter(|&page| pool.has(page)).count();
        assert_eq!(kept, if row.name == "lru" { 0 } else { 100 }, "{row:?}");
    }
}

/// All pages of a large pool were used: a put goes through all of them, in steps between which the shard is not locked.
#[test]
fn a_put_finds_room_among_pages_that_were_all_used() {
    for row in EVICTION_POLICIES {
        let pool = Pool::new(row, 900, true);
        for _ in 0..5 {
            for page in 0..900 {
                if !pool.get(page) {
                    pool.put(page);
                }
            }
        }
        pool.put(5000);
        assert!(pool.has(5000), "{row:?}");
        assert_eq!((0..900).filter(|&page| pool.has(page)).count(), 899);
    }
}
