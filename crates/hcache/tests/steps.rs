//! A capacity that is reduced in steps: what is kept, what is reported, and what is served between the steps.
#![allow(clippy::cast_possible_truncation, reason = "all numbers are small")]

#[allow(dead_code, reason = "noise suffices here")]
#[path = "common/content.rs"]
mod content;
#[path = "common/random.rs"]
mod random;

use std::collections::BTreeSet;

use content::Content;
use plimsoll_hcache::{
    Client, ClientOptions, Error, Handle, PAGE_BYTES, PoolId, PoolOptions, Sharing, Store,
    StoreOptions,
};
use random::mixed;

const MIB: u64 = 1 << 20;
const PAGES_IN_STEP: usize = 16;

fn store(shards: usize, edit: impl FnOnce(&mut StoreOptions)) -> (Store, Client, PoolId) {
    let mut options = StoreOptions {
        shards,
        max_capacity_bytes: 32 * MIB,
        ..StoreOptions::new(16 * MIB)
    };
    edit(&mut options);
    let store = Store::new(options).unwrap();
    let client = store.create_client(ClientOptions::new("steps")).unwrap();
    let pool = client.create_pool(PoolOptions::private()).unwrap();
    (store, client, pool)
}

fn handle(pool: PoolId, page: u64) -> Handle {
    // Far apart, so that there is much metadata.
    Handle {
        pool,
        object: page % 3,
        index: (page as u32).wrapping_mul(0x9e37_79b1),
    }
}

fn put(client: &Client, pool: PoolId, page: u64) {
    let content = Content::Noise(page).page();
    client.put(handle(pool, page), &content).unwrap();
}

/// The numbers below `count` whose pages are there, all of which must be right.
fn kept(client: &Client, pool: PoolId, count: u64) -> BTreeSet<u64> {
    let mut page = [0; PAGE_BYTES];
    let there = |number: &u64| {
        let found = client.peek(handle(pool, *number), &mut page).unwrap();
        if found {
            assert!(page == Content::Noise(*number).page(), "page {number}");
        }
        found
    };
    (0..count).filter(there).collect()
}

#[test]
fn a_reduction_in_steps_keeps_the_newest_pages_and_reports_what_is_in_use() {
    const COUNT: u64 = 6000;
    for shards in [1, 4] {
        for target in [15 * MIB, 9 * MIB, 2 * MIB] {
            let (store, client, pool) = store(shards, |_| {});
            (0..COUNT).for_each(|page| put(&client, pool, page));
            let before = store.stats();
            let mut last = before.capacity_bytes;
            let mut pages = before.pages;
            let mut steps = 0;
            while !store.resize_step(target, PAGES_IN_STEP).unwrap() {
                let stats = store.stats();
                assert!(stats.capacity_bytes <= last && stats.capacity_bytes > target);
                assert!(stats.used_bytes <= stats.capacity_bytes, "{stats:?}");
                assert!(pages - stats.pages <= 2 * 64, "a step drops many pages");
                (last, pages) = (stats.capacity_bytes, stats.pages);
                steps += 1;
            }
            let stats = store.stats();
            assert_eq!(stats.capacity_bytes, target);
            assert!(stats.used_bytes <= target, "{stats:?}");
            let moved_at_least = (before.used_bytes - target) / PAGE_BYTES as u64 / 256;
            assert!(steps > moved_at_least, "{steps} steps");
            let kept = kept(&client, pool, COUNT);
            assert_eq!(kept.len() as u64, stats.pages);
            // As many as when it is resized at once, but for batches of evictions and unused metadata.
            let (twin, other, other_pool) = self::store(shards, |_| {});
            (0..COUNT).for_each(|page| put(&other, other_pool, page));
            twin.resize(target).unwrap();
            let difference = twin.stats().pages.abs_diff(stats.pages);
            let unused = target / PAGE_BYTES as u64 / 16;
            assert!(
                difference <= unused + 256 + 64 * shards as u64,
                "{difference} pages"
            );
            if shards == 1 {
                // A page in some thousands is taken for one that was there before, and kept longer.
                let oldest = COUNT - stats.pages;
                let older = kept.range(..oldest).count();
                assert!(older <= 2, "{older} pages");
                assert!((oldest + older as u64..COUNT).all(|page| kept.contains(&page)));
            }
            // Memory that is free is used again.
            (COUNT..2 * COUNT).for_each(|page| put(&client, pool, page));
            assert!(store.stats().used_bytes <= target);
            assert!(store.stats().pages + 64 >= stats.pages);
        }
    }
}

#[test]
fn pages_put_got_and_flushed_between_the_steps_are_right() {
    for seed in 0..30 {
        let shards = [1, 2, 4][seed as usize % 3];
        let (store, client, pool) = store(shards, |_| {});
        let (mut next, mut dice) = (0, seed);
        let mut page = [0; PAGE_BYTES];
        for target in [9 * MIB, 3 * MIB, 12 * MIB, 5 * MIB] {
            while next < 5000 || !store.resize_step(target, PAGES_IN_STEP).unwrap() {
                for _ in 0..8 {
                    dice = mixed(dice);
                    let other = (dice >> 8) % (next + 1);
                    match dice % 8 {
                        0..4 => {
                            put(&client, pool, next);
                            next += 1;
                        }
                        4..6 => {
                            let found = client.get(handle(pool, other), &mut page).unwrap();
                            let right = || page == Content::Noise(other).page();
                            assert!(!found || right(), "page {other}");
                        }
                        6 => drop(client.flush(handle(pool, other)).unwrap()),
                        // It rebuilds the metadata, so that pages get other numbers.
                        _ if dice >> 60 == 0 => store.turn(std::time::Duration::ZERO),
                        _ => {}
                    }
                }
            }
            // Some turns finish a reduction at once.
            let stats = store.stats();
            assert!(stats.used_bytes <= stats.capacity_bytes, "{stats:?}");
            assert_eq!(stats.capacity_bytes, target);
            let kept = kept(&client, pool, next);
            assert_eq!(kept.len() as u64, stats.pages);
            next = next.max(5000);
        }
    }
}

#[test]
fn a_reduction_below_the_metadata_of_the_former_pages_ends_and_leaves_a_store_that_works() {
    const COUNT: u64 = 60_000;
    for shards in [1, 4] {
        let (store, client, pool) = store(shards, |options| {
            options.max_capacity_bytes = 256 * MIB;
            options.capacity_bytes = 256 * MIB;
        });
        (0..COUNT).for_each(|page| put(&client, pool, page));
        while !store.resize_step(2 * MIB, 1024).unwrap() {}
        let stats = store.stats();
        assert_eq!(stats.capacity_bytes, 2 * MIB);
        assert!(stats.used_bytes <= 2 * MIB, "{stats:?}");
        assert_eq!(kept(&client, pool, COUNT).len() as u64, stats.pages);
        (COUNT..COUNT + 1000).for_each(|page| put(&client, pool, page));
        assert!(store.stats().pages > 100, "{:?}", store.stats());
        assert_eq!(store.resize_step(16 * MIB, 1024), Ok(true));
        (COUNT..COUNT + 1000).for_each(|page| put(&client, pool, page));
        let all = kept(&client, pool, COUNT + 1000);
        assert_eq!(all.range(COUNT..).count(), 1000);
    }
}

#[test]
fn a_reduction_drops_hardly_more_pages_than_it_must() {
    const COUNT: u64 = 60_000;
    let pages_of = |capacity_bytes| {
        let (store, client, pool) = store(1, |options| {
            (options.capacity_bytes, options.max_capacity_bytes) = (capacity_bytes, 128 * MIB);
        });
        (0..COUNT).for_each(|page| put(&client, pool, page));
        (store.stats().pages, store, client, pool)
    };
    for target in [2 * MIB, 16 * MIB, 64 * MIB, 112 * MIB] {
        let (fresh, ..) = pages_of(target);
        for in_steps in [false, true] {
            let (_, store, client, pool) = pages_of(128 * MIB);
            if in_steps {
                while !store.resize_step(target, 256).unwrap() {}
            } else {
                store.resize(target).unwrap();
            }
            let left = store.stats().pages;
            (COUNT..2 * COUNT).for_each(|page| put(&client, pool, page));
            let full = store.stats().pages;
            // A batch of evictions; and in steps a sixteenth of the memory may be metadata that is unused.
            let least = if in_steps { fresh - fresh / 16 } else { fresh };
            let batch = fresh / 128 + 2;
            assert!(
                left + batch >= full && full + batch >= least,
                "{target} in steps: {in_steps}: {left} pages are left of {full} and {fresh}"
            );
        }
    }
}

#[test]
fn a_store_of_compressed_or_shared_pages_is_reduced_too() {
    let edits: [fn(&mut StoreOptions); 2] = [
        |options| options.compression = true,
        |options| options.sharing = Sharing::WithinClient,
    ];
    for edit in edits {
        let (store, client, pool) = store(1, edit);
        (0..6000).for_each(|page| put(&client, pool, page));
        while !store.resize_step(4 * MIB, PAGES_IN_STEP).unwrap() {}
        let stats = store.stats();
        assert!(stats.used_bytes <= 4 * MIB, "{stats:?}");
        assert_eq!(kept(&client, pool, 6000).len() as u64, stats.pages);
    }
}

#[test]
fn a_capacity_that_is_not_possible_changes_nothing() {
    let (store, client, pool) = store(1, |_| {});
    (0..1000).for_each(|page| put(&client, pool, page));
    let before = store.stats();
    assert!(matches!(
        store.resize_step(64 * MIB, 1),
        Err(Error::CapacityTooLarge { .. })
    ));
    assert!(matches!(
        store.resize_step(1000, 1),
        Err(Error::CapacityTooSmall { .. })
    ));
    assert_eq!(store.stats(), before);
    // It grows in one step.
    assert_eq!(store.resize_step(32 * MIB, 1), Ok(true));
    assert_eq!(store.stats().capacity_bytes, 32 * MIB);
    assert_eq!(kept(&client, pool, 1000).len(), 1000);
}
