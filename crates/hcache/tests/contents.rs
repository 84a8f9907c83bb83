//! Pages that are compressed or share a frame: their contents, their charges, and their removal.

#[path = "common/content.rs"]
mod content;
#[path = "common/random.rs"]
mod random;

use content::Content;
use plimsoll_hcache::{
    Client, ClientOptions, Counters, Handle, PAGE_BYTES, Page, PoolId, PoolOptions, Sharing, Store,
    StoreOptions,
};
use random::mixed;

const MIB: u64 = 1 << 20;
const PAGES_IN_MIB: u64 = MIB / PAGE_BYTES as u64;

const SHARINGS: [Sharing; 3] = [Sharing::Off, Sharing::WithinClient, Sharing::AcrossClients];

/// Stores of each configuration.
fn stores(capacity_bytes: u64) -> impl Iterator<Item = Store> {
    let options = SHARINGS.into_iter().flat_map(move |sharing| {
        [(1, false), (1, true), (64, false), (64, true)].map(|(shards, compression)| StoreOptions {
            shards,
            compression,
            sharing,
            max_capacity_bytes: 2 * capacity_bytes,
            ..StoreOptions::new(capacity_bytes)
        })
    });
    options.map(|options| Store::new(options).unwrap())
}

fn packing(capacity_bytes: u64, shards: usize) -> Store {
    let options = StoreOptions {
        shards,
        compression: true,
        ..StoreOptions::new(capacity_bytes)
    };
    Store::new(options).unwrap()
}

fn client(store: &Store) -> (Client, PoolId) {
    let client = store.create_client(ClientOptions::new("client")).unwrap();
    let pool = client.create_pool(PoolOptions::private()).unwrap();
    (client, pool)
}

fn handle(pool: PoolId, page: u64) -> Handle {
    Handle {
        pool,
        object: page / 100,
        index: u32::try_from(page % 100 * 37).expect("less than 3700"),
    }
}

/// Pages of all kinds.
fn mixture(page: u64) -> Page {
    Content::new(mixed(page).to_le_bytes()[0], page).page()
}

/// Pages that shrink to less than a half.
fn lines(page: u64) -> Page {
    Content::Lines(page).page()
}

fn put(client: &Client, pool: PoolId, pages: std::ops::Range<u64>, content: fn(u64) -> Page) {
    for page in pages {
        client.put(handle(pool, page), &content(page)).unwrap();
    }
}

/// Peeks at pages, which must be correct if they are there; returns how many were.
fn look(
    client: &Client,
    pool: PoolId,
    pages: std::ops::Range<u64>,
    content: fn(u64) -> Page,
) -> u64 {
    let mut found = [0; PAGE_BYTES];
    let looks = pages.filter(|page| {
        let there = client.peek(handle(pool, *page), &mut found).unwrap();
        assert!(!there || found == content(*page), "page {page} is wrong");
        there
    });
    looks.count() as u64
}

/// Asserts that neither pages nor charges are left, and that the store holds only metadata.
fn check_empty(store: &Store) {
    let stats = store.stats();
    assert_eq!(stats.pages, 0);
    assert_eq!(
        (stats.compressed_raw_bytes, stats.compressed_frame_bytes),
        (0, 0)
    );
    assert_eq!(stats.deduplicated_pages, 0);
    assert!(
        stats.clients.iter().all(|client| client.used_bytes == 0),
        "{stats:?}"
    );
    assert_eq!(stats.used_bytes, stats.metadata_bytes);
}

#[test]
fn a_store_that_compresses_holds_more_pages_than_frames() {
    for shards in [1, 64] {
        let store = packing(8 * MIB, shards);
        let (client, pool) = client(&store);
        put(&client, pool, 0..32 * PAGES_IN_MIB, lines);
        let full = store.stats();
        assert!(full.used_bytes <= full.capacity_bytes);
        assert!(full.pages > 10 * PAGES_IN_MIB, "{full:?}");
        let counted = full.clients[0].pools[0].compressed_pages;
        assert_eq!(full.compressed_raw_bytes, counted * PAGE_BYTES as u64);
        assert!(
            full.compressed_frame_bytes * 2 < full.compressed_raw_bytes,
            "{full:?}"
        );
        assert!(full.counters.compressed_pages >= counted && counted > 4 * PAGES_IN_MIB);
        assert_eq!(look(&client, pool, 0..32 * PAGES_IN_MIB, lines), full.pages);
        // The youngest are there.
        let oldest = 32 * PAGES_IN_MIB - full.pages;
        let there = look(&client, pool, oldest..32 * PAGES_IN_MIB, lines);
        assert!(there * 10 >= full.pages * 9, "{there} of {}", full.pages);
        let mut page = [0; PAGE_BYTES];
        let mut hits = 0;
        for number in 0..32 * PAGES_IN_MIB {
            if client.get(handle(pool, number), &mut page).unwrap() {
                assert!(page == lines(number), "page {number} is wrong");
                hits += 1;
            }
        }
        assert_eq!(hits, full.pages);
        assert_eq!(store.stats().counters.decompressed_pages, counted);
        check_empty(&store);
    }
}

#[test]
fn pages_that_do_not_shrink_stay_raw_and_are_tried_once() {
    let store = packing(4 * MIB, 1);
    let (client, pool) = client(&store);
    let noise = |page| Content::Noise(page).page();
    put(&client, pool, 0..8 * PAGES_IN_MIB, noise);
    let stats = store.stats();
    let tried = stats.counters.incompressible_pages;
    assert!((1..=8 * PAGES_IN_MIB).contains(&tried), "{stats:?}");
    assert_eq!(
        (stats.counters.compressed_pages, stats.compressed_raw_bytes),
        (0, 0)
    );
    assert_eq!(look(&client, pool, 0..8 * PAGES_IN_MIB, noise), stats.pages);
}

#[test]
fn a_shared_pool_of_compressed_pages_gives_them_again_and_again() {
    let store = packing(4 * MIB, 64);
    let client = store.create_client(ClientOptions::new("client")).unwrap();
    let pool = client.create_pool(PoolOptions::shared(1)).unwrap();
    put(&client, pool, 0..16 * PAGES_IN_MIB, lines);
    let before = store.stats();
    let handles: Vec<Handle> = (0..16 * PAGES_IN_MIB)
        .map(|page| handle(pool, page))
        .collect();
    for _ in 0..2 {
        client.get_each(&handles, |number, page| {
            if let Some(page) = page.unwrap() {
                assert!(*page == lines(number as u64), "page {number} is wrong");
            }
        });
    }
    let after = store.stats();
    assert_eq!(
        (after.pages, after.counters.hits),
        (before.pages, 2 * before.pages)
    );
    assert!(
        after.counters.decompressed_pages > PAGES_IN_MIB,
        "{after:?}"
    );
    assert!(after.used_bytes <= after.capacity_bytes);
}

#[test]
fn compressed_and_shared_pages_keep_their_contents_when_they_move() {
    for store in stores(8 * MIB) {
        let (client, pool) = client(&store);
        for turn in 0..3 {
            store.resize(16 * MIB).unwrap();
            let pages = 0..24 * PAGES_IN_MIB;
            put(&client, pool, pages.clone(), |page| {
                mixture(page % 1000 + page / 4000)
            });
            put(&client, pool, pages.start..2 * PAGES_IN_MIB, mixture);
            for capacity_mib in [12, 6, 3, 7, 2] {
                let before = store.stats();
                store.resize(capacity_mib * MIB).unwrap();
                let after = store.stats();
                assert!(after.used_bytes <= capacity_mib * MIB, "{after:?}");
                assert!(after.pages <= before.pages);
                let there = look(&client, pool, 0..2 * PAGES_IN_MIB, mixture)
                    + look(&client, pool, 2 * PAGES_IN_MIB..pages.end, |page| {
                        mixture(page % 1000 + page / 4000)
                    });
                assert_eq!(there, after.pages, "in turn {turn}");
            }
            assert!(store.stats().pages > PAGES_IN_MIB);
        }
        let left = store.stats().pages;
        assert_eq!(client.flush_pool(pool), Ok(left));
        check_empty(&store);
    }
}

#[test]
fn a_store_of_compressed_pages_shrinks_and_goes_on_compressing() {
    let store = packing(16 * MIB, 64);
    let (client, pool) = client(&store);
    for capacity_mib in [16, 12, 8, 4] {
        let before = store.stats();
        store.resize(capacity_mib * MIB).unwrap();
        let after = store.stats();
        assert!(after.used_bytes <= capacity_mib * MIB && after.pages <= before.pages);
        let there = look(&client, pool, 0..48 * PAGES_IN_MIB, lines);
        assert_eq!(there, after.pages);
        // Older pages are dropped, so that packed frames are everywhere and some have holes.
        put(&client, pool, 0..48 * PAGES_IN_MIB, lines);
        let full = store.stats();
        assert!(full.pages > capacity_mib * PAGES_IN_MIB, "{full:?}");
        assert!(
            full.compressed_raw_bytes * 3 > capacity_mib * MIB,
            "{full:?}"
        );
        let there = look(&client, pool, 0..48 * PAGES_IN_MIB, lines);
        assert_eq!(there, full.pages);
    }
}

#[test]
fn nothing_is_charged_when_nothing_is_left() {
    for store in stores(2 * MIB) {
        let (first, first_in) = client(&store);
        let second_in = first.create_pool(PoolOptions::private()).unwrap();
        let other = store.create_client(ClientOptions::new("other")).unwrap();
        let other_in = other.create_pool(PoolOptions::private()).unwrap();
        let shared_in = first.create_pool(PoolOptions::shared(1)).unwrap();
        assert_eq!(other.create_pool(PoolOptions::shared(1)), Ok(shared_in));
        let users = [
            (&first, first_in),
            (&first, second_in),
            (&other, other_in),
            (&other, shared_in),
        ];
        for round in 0..8 {
            for number in 0..4000 {
                let chance = mixed(round << 32 | number);
                let (client, pool) = users[usize::try_from(chance % 4).expect("one of four")];
                let handle = handle(pool, chance >> 8 & 0x3ff);
                let mut page = mixture(chance >> 20 & 0xfff);
                match chance >> 32 & 15 {
                    0..8 => drop(client.put(handle, &page).unwrap()),
                    8 => client.put_each(&[handle; 3], |_, frame| *frame = page, |_, _| {}),
                    9..11 => drop(client.get(handle, &mut page).unwrap()),
                    11 => client.get_each(&[handle; 2], |_, _| {}),
                    12..14 => drop(client.flush(handle).unwrap()),
                    14 => drop(
                        client
                            .flush_range(pool, handle.object, 0..=handle.index)
                            .unwrap(),
                    ),
                    _ => drop(client.flush(handle).unwrap()),
                }
            }
            let stats = store.stats();
            assert!(stats.charged_bytes() > 0 && stats.used_bytes <= stats.capacity_bytes);
            for (client, pool) in users {
                client.flush_pool(pool).unwrap();
            }
            check_empty(&store);
        }
    }
}

#[test]
fn a_shared_pool_is_charged_its_pages_whoever_joins_and_leaves() {
    for store in stores(2 * MIB) {
        let mut client = store.create_client(ClientOptions::new("first")).unwrap();
        let pool = client.create_pool(PoolOptions::shared(1)).unwrap();
        for generation in 0..6 {
            let next = store.create_client(ClientOptions::new("next")).unwrap();
            assert_eq!(next.create_pool(PoolOptions::shared(1)), Ok(pool));
            let start = generation * 300;
            put(&next, pool, start..start + 700, mixture);
            let before = store.stats();
            let [of_pool] = &*before.shared_pools else {
                panic!("{before:?}");
            };
            assert_eq!(of_pool.pool.pages, before.pages);
            assert_eq!(of_pool.used_bytes, before.charged_bytes());
            if generation % 2 == 0 {
                client.destroy_pool(pool).unwrap();
            }
            drop(client);
            let after = store.stats();
            assert_eq!(after.charged_bytes(), before.charged_bytes());
            assert_eq!(after.pages, before.pages);
            look(&next, pool, 0..start + 700, mixture);
            client = next;
        }
        let left = store.stats().pages;
        assert_eq!(client.flush_pool(pool), Ok(left));
        check_empty(&store);
        client.destroy_pool(pool).unwrap();
        assert_eq!(store.stats().shared_pools, []);
    }
}

#[test]
fn counters_tell_of_each_page_that_was_compressed_or_shared() {
    let options = StoreOptions {
        sharing: Sharing::WithinClient,
        ..StoreOptions::new(8 * MIB)
    };
    let store = Store::new(options).unwrap();
    let (client, pool) = client(&store);
    put(&client, pool, 0..10, |_| [0; PAGE_BYTES]);
    put(&client, pool, 10..20, |_| Content::Noise(1).page());
    let stats = store.stats();
    let expected = Counters {
        puts: 20,
        // One of the noise is the first.
        shared_pages: 19,
        ..Counters::default()
    };
    assert_eq!(stats.counters, expected);
    assert_eq!((stats.pages, stats.deduplicated_pages), (20, 19));
    // One frame, and 40 bytes a page.
    put(&client, pool, 0..10, |_| Content::Noise(1).page());
    assert_eq!(store.stats().charged_bytes(), PAGE_BYTES as u64 + 20 * 40);
}

#[test]
fn what_happens_to_the_pages_of_private_pools_counts_for_their_client() {
    let options = StoreOptions {
        compression: true,
        ..StoreOptions::new(4 * MIB)
    };
    let store = Store::new(options).unwrap();
    let (client, pool) = client(&store);
    put(&client, pool, 0..4000, mixture);
    let of_client = || {
        let stats = store.stats();
        (stats.clients[0].counters, stats.counters)
    };
    let (counters, of_store) = of_client();
    assert!(counters.evicted_pages > 0 && counters.compressed_pages > 0);
    assert!(counters.incompressible_pages > 0);
    assert_eq!(counters, of_store);
    client.destroy_pool(pool).unwrap();
    assert_eq!(of_client(), (counters, counters));
}

#[test]
fn counters_do_not_fall_while_a_pool_is_destroyed() {
    let store = Store::new(StoreOptions::new(64 * MIB)).unwrap();
    let client = store.create_client(ClientOptions::new("client")).unwrap();
    let mut puts = 0;
    for _ in 0..20 {
        let pool = client.create_pool(PoolOptions::private()).unwrap();
        put(&client, pool, 0..10_000, |_| [0; PAGE_BYTES]);
        puts += 10_000;
        std::thread::scope(|scope| {
            let destroyer = scope.spawn(|| client.destroy_pool(pool).unwrap());
            while !destroyer.is_finished() {
                let stats = store.stats();
                assert_eq!(stats.counters.puts, puts);
                assert_eq!(stats.clients[0].counters.puts, puts);
            }
        });
    }
}
