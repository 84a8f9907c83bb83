//! The store stays within its capacity, clients within their limits, and invalid options are refused.

#[path = "common/content.rs"]
mod content;
#[path = "common/random.rs"]
mod random;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use content::Content;
use plimsoll_hcache::{
    Client, ClientId, ClientOptions, ClientStats, Error, Handle, PAGE_BYTES, Page, PoolId,
    PoolOptions, PutOutcome, Sharing, Store, StoreOptions,
};
use random::mixed;

const MIB: u64 = 1 << 20;
const PAGES_IN_MIB: u64 = MIB / PAGE_BYTES as u64;

fn store(capacity_bytes: u64) -> Store {
    Store::new(StoreOptions::new(capacity_bytes)).unwrap()
}

fn client(store: &Store, options: ClientOptions) -> (Client, PoolId) {
    let client = store.create_client(options).unwrap();
    let pool = client.create_pool(PoolOptions::private()).unwrap();
    (client, pool)
}

/// Handle of one of a pool's pages, 64 to an object.
fn handle(pool: PoolId, page: u64) -> Handle {
    Handle {
        pool,
        object: page / 64,
        index: u32::try_from(page % 64).expect("less than 64"),
    }
}

/// Puts noise under each number.
fn fill(client: &Client, pool: PoolId, pages: std::ops::Range<u64>) {
    for page in pages {
        client
            .put(handle(pool, page), &Content::Noise(page).page())
            .unwrap();
    }
}

/// Reads a page as a cache's user does: gets it, or else puts it.
fn read(client: &Client, pool: PoolId, number: u64) {
    let (handle, expected) = (handle(pool, number), Content::Noise(number).page());
    let mut page = [0; PAGE_BYTES];
    if client.get(handle, &mut page).unwrap() {
        assert!(page == expected, "page {number} is wrong");
    }
    client.put(handle, &expected).unwrap();
}

fn stats_of(store: &Store, id: ClientId) -> ClientStats {
    let mut clients = store.stats().clients.into_iter();
    clients.find(|client| client.id == id).expect("it is there")
}

/// Runs `load` in three threads, each called with its number and a count, until `main` is done.
fn under_load(load: impl Fn(u64, u64) + Sync, main: impl FnOnce()) {
    let is_over = AtomicBool::new(false);
    /// Sets the end flag even if `main` panics: the threads would run for ever.
    struct EndFlag<'a>(&'a AtomicBool);
    impl Drop for EndFlag<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    thread::scope(|scope| {
        let _over = EndFlag(&is_over);
        for thread in 0..3 {
            let (load, is_over) = (&load, &is_over);
            scope.spawn(move || {
                let counts = (0..).take_while(|_| !is_over.load(Ordering::Relaxed));
                counts.for_each(|count| load(thread, count));
            });
        }
        main();
    });
}

/// Options of each configuration that handles memory differently.
fn configurations(capacity_bytes: u64) -> impl Iterator<Item = StoreOptions> {
    let configurations = [
        (1, false, Sharing::Off),
        (64, false, Sharing::Off),
        (64, true, Sharing::Off),
        (64, true, Sharing::AcrossClients),
        (1024, false, Sharing::WithinClient),
    ];
    configurations
        .into_iter()
        .map(move |(shards, compression, sharing)| StoreOptions {
            shards,
            compression,
            sharing,
            ..StoreOptions::new(capacity_bytes)
        })
}

#[test]
fn memory_in_use_is_never_above_the_capacity() {
    for options in configurations(16 * MIB) {
        let store = Store::new(options).unwrap();
        let clients: Vec<_> = (0..3)
            .map(|_| client(&store, ClientOptions::new("load")))
            .collect();
        let load = |thread: u64, count: u64| {
            let (client, pool) = &clients[usize::try_from(thread).expect("one of three")];
            let page = mixed(thread << 60 ^ count) % (32 * PAGES_IN_MIB);
            let content = Content::new(mixed(page).to_le_bytes()[0], page);
            client.put(handle(*pool, page), &content.page()).unwrap();
            if count % 4096 == 4095 {
                client.flush_pool(*pool).unwrap();
            }
        };
        under_load(load, || {
            let mut most = 0;
            for turn in 0..400 {
                let stats = store.stats();
                assert!(stats.used_bytes <= stats.capacity_bytes, "{stats:?}");
                assert!(stats.metadata_bytes <= stats.used_bytes);
                most = most.max(stats.used_bytes);
                store.turn(Duration::from_millis(100 * turn));
                thread::sleep(Duration::from_millis(1));
            }
            assert!(most > 0);
        });
    }
}

#[test]
fn a_resize_returns_when_the_memory_is_given_back() {
    for options in configurations(32 * MIB) {
        let store = Store::new(options).unwrap();
        let (client, pool) = client(&store, ClientOptions::new("load"));
        let load = |thread: u64, count: u64| {
            read(
                &client,
                pool,
                mixed(thread << 60 ^ count) % (64 * PAGES_IN_MIB),
            );
        };
        under_load(load, || {
            for capacity_mib in [16, 32, 4, 8, 2, 24, 3, 32].repeat(4) {
                store.resize(capacity_mib * MIB).unwrap();
                let stats = store.stats();
                assert_eq!(stats.capacity_bytes, capacity_mib * MIB);
                assert!(stats.used_bytes <= stats.capacity_bytes, "{stats:?}");
                thread::sleep(Duration::from_millis(5));
                assert!(store.stats().used_bytes <= capacity_mib * MIB);
            }
        });
    }
}

#[test]
fn a_store_can_be_filled_to_nearly_its_capacity() {
    let store = store(64 * MIB);
    let (client, pool) = client(&store, ClientOptions::new("fills"));
    fill(&client, pool, 0..32 * PAGES_IN_MIB);
    let stats = store.stats();
    assert_eq!(stats.pages, 32 * PAGES_IN_MIB, "all of the first half");
    fill(&client, pool, 0..128 * PAGES_IN_MIB);
    let stats = store.stats();
    assert!(
        stats.pages * PAGE_BYTES as u64 > stats.capacity_bytes * 95 / 100,
        "{stats:?}"
    );
    assert!(stats.used_bytes <= stats.capacity_bytes);
    assert!(stats.metadata_bytes > 0);
}

#[test]
fn a_page_that_is_alone_in_its_object_takes_at_most_40_bytes_of_metadata() {
    const PAGES: u64 = 60_000;
    let store = Store::new(StoreOptions {
        // Pages of one word take metadata only.
        sharing: Sharing::WithinClient,
        shards: 1,
        ..StoreOptions::new(64 * MIB)
    })
    .unwrap();
    let (client, pool) = client(&store, ClientOptions::new("has one-page objects"));
    let handle = |page: u64| Handle {
        pool,
        object: mixed(page),
        index: 3,
    };
    let empty = store.stats();
    for page in 0..PAGES {
        assert!(
            client
                .put(handle(page), &[7; PAGE_BYTES])
                .unwrap()
                .is_stored()
        );
    }
    let full = store.stats();
    assert_eq!(full.pages, PAGES);
    let bytes = full.metadata_bytes - empty.metadata_bytes;
    assert!(bytes <= 40 * PAGES, "{bytes} for {PAGES} pages");
}

#[test]
fn capacities_out_of_range_are_refused() {
    let least_bytes = StoreOptions::MIN_CAPACITY_BYTES;
    for asked_bytes in [0, 1, 4096, least_bytes - 1] {
        let error = Error::CapacityTooSmall {
            asked_bytes,
            least_bytes,
        };
        assert_eq!(
            Store::new(StoreOptions::new(asked_bytes)).err(),
            Some(error.clone())
        );
        let store = store(2 * least_bytes);
        assert_eq!(store.resize(asked_bytes), Err(error));
        assert_eq!(store.stats().capacity_bytes, 2 * least_bytes);
    }
    let options = StoreOptions {
        max_capacity_bytes: 4 * MIB,
        ..StoreOptions::new(2 * MIB)
    };
    let store = Store::new(options.clone()).unwrap();
    assert_eq!(store.resize(4 * MIB), Ok(()));
    for asked_bytes in [4 * MIB + 1, u64::MAX] {
        let most_bytes = 4 * MIB;
        let error = Error::CapacityTooLarge {
            asked_bytes,
            most_bytes,
        };
        assert_eq!(store.resize(asked_bytes), Err(error));
        assert_eq!(store.stats().capacity_bytes, 4 * MIB);
    }
    let options = StoreOptions {
        capacity_bytes: 8 * MIB,
        ..options
    };
    let error = Error::CapacityTooLarge {
        asked_bytes: 8 * MIB,
        most_bytes: 4 * MIB,
    };
    assert_eq!(Store::new(options).err(), Some(error));
    assert!(Store::new(StoreOptions::new(least_bytes)).is_ok());
}

#[test]
fn the_minimum_that_a_refusal_names_is_accepted_and_a_page_less_is_not() {
    for sharing in [Sharing::Off, Sharing::WithinClient] {
        let store = Store::new(StoreOptions {
            sharing,
            ..StoreOptions::new(32 * MIB)
        });
        let store = store.unwrap();
        store.set_outside_bytes(8 * MIB).unwrap();
        let Err(Error::CapacityTooSmall { least_bytes, .. }) = store.resize(2 * MIB) else {
            panic!("8 MiB are held");
        };
        let less = store.resize(least_bytes - PAGE_BYTES as u64);
        assert!(matches!(less, Err(Error::CapacityTooSmall { .. })));
        assert_eq!(store.resize(least_bytes), Ok(()));
    }
}

#[test]
fn a_capacity_above_the_machine_is_refused() {
    for capacity_bytes in [u64::MAX, 1 << 62, 1 << 48] {
        let error = Store::new(StoreOptions::new(capacity_bytes)).err();
        let is_refusal = matches!(
            error,
            Some(
                Error::CannotReserve { .. }
                    | Error::CapacityTooLarge { .. }
                    | Error::OutOfRange { .. }
            )
        );
        assert!(is_refusal, "{capacity_bytes}: {error:?}");
    }
}

#[test]
fn options_out_of_range_are_refused() {
    let out_of_range = |options: StoreOptions, given: u64| {
        let error = Store::new(options).err();
        assert!(
            matches!(error, Some(Error::OutOfRange { value, .. }) if value == given),
            "{error:?}"
        );
    };
    for shards in [0, 3, 63, 2048, usize::MAX] {
        let options = StoreOptions {
            shards,
            ..StoreOptions::new(MIB)
        };
        out_of_range(options, shards as u64);
    }
    for observe_one_in in [0, 3, u32::MAX] {
        let options = StoreOptions {
            observe_one_in,
            ..StoreOptions::new(MIB)
        };
        out_of_range(options, observe_one_in.into());
    }
    let store = store(MIB);
    for weight in [0, 1_000_001] {
        let options = ClientOptions {
            weight,
            ..ClientOptions::new("weight")
        };
        let error = store.create_client(options).err();
        let is_refusal =
            matches!(error, Some(Error::OutOfRange { value, .. }) if value == weight.into());
        assert!(is_refusal, "{error:?}");
    }
    assert_eq!(store.stats().clients.len(), 0);
}

#[test]
fn too_many_clients_and_pools_are_refused_and_the_bound_holds() {
    let store = store(8 * MIB);
    let (client, pool) = client(&store, ClientOptions::new("first"));
    fill(&client, pool, 0..16 * PAGES_IN_MIB);
    let mut clients = Vec::new();
    let error = loop {
        match store.create_client(ClientOptions::new("one of many")) {
            Ok(client) => clients.push(client),
            Err(error) => break error,
        }
        assert!(clients.len() < 1 << 20);
    };
    assert!(matches!(error, Error::TooManyClients(_)), "{error:?}");
    assert!(store.stats().used_bytes <= 8 * MIB);
    assert!(clients.pop().is_some());
    let last = store
        .create_client(ClientOptions::new("room for one"))
        .unwrap();
    let mut pools = 0;
    let error = loop {
        match last.create_pool(PoolOptions::private()) {
            Ok(_) => pools += 1,
            Err(error) => break error,
        }
        assert!(pools < 1 << 20);
    };
    // Its own maximum, or that of a store of this capacity.
    let is_maximum = matches!(error, Error::TooManyPools(_) | Error::NoPoolLeft { .. });
    assert!(is_maximum, "{error:?}");
    assert!(store.stats().used_bytes <= 8 * MIB);
    drop((clients, last));
    fill(&client, pool, 0..16 * PAGES_IN_MIB);
    let stats = store.stats();
    assert!(stats.used_bytes <= 8 * MIB);
    assert!(stats.pages > 7 * PAGES_IN_MIB, "{stats:?}");
}

#[test]
fn memory_outside_counts_in_the_bound() {
    let store = store(16 * MIB);
    let (client, pool) = client(&store, ClientOptions::new("fills"));
    fill(&client, pool, 0..32 * PAGES_IN_MIB);
    store.set_outside_bytes(8 * MIB).unwrap();
    let stats = store.stats();
    assert!(
        stats.used_bytes <= 16 * MIB && stats.pages <= 8 * PAGES_IN_MIB,
        "{stats:?}"
    );
    fill(&client, pool, 0..32 * PAGES_IN_MIB);
    assert!(store.stats().pages <= 8 * PAGES_IN_MIB);
    assert!(store.set_outside_bytes(u64::MAX).is_err());
    store.set_outside_bytes(0).unwrap();
    fill(&client, pool, 0..32 * PAGES_IN_MIB);
    assert!(store.stats().pages > 14 * PAGES_IN_MIB);
}

#[test]
fn memory_held_for_a_client_is_its_own_share_of_the_bound() {
    for options in configurations(32 * MIB) {
        let store = Store::new(options).unwrap();
        let (small, small_in) = client(&store, ClientOptions::new("small"));
        let holding = |mib| ClientOptions {
            outside_bytes: mib * MIB,
            ..ClientOptions::new("holds")
        };
        let (large, large_in) = client(&store, holding(8));
        let (idle, _) = client(&store, holding(2));
        for turn in 0..16 {
            store.turn(Duration::from_secs(10 * turn));
            let start = turn * 4 * PAGES_IN_MIB;
            for page in start..start + 4 * PAGES_IN_MIB {
                read(&small, small_in, page);
                read(&large, large_in, page);
            }
        }
        let stats = store.stats();
        assert!(stats.used_bytes <= 32 * MIB, "{stats:?}");
        let targets: u64 = stats.clients.iter().map(|client| client.target_bytes).sum();
        assert!((28 * MIB..=32 * MIB).contains(&targets), "{targets}");
        let [of_small, of_large] = [&small, &large].map(|client| stats_of(&store, client.id()));
        assert_eq!(
            (of_small.outside_bytes, of_large.outside_bytes),
            (0, 8 * MIB)
        );
        // Both are as busy: what the one holds outside, it has less of in the store.
        let difference = of_small.used_bytes.abs_diff(of_large.used_bytes);
        assert!(difference <= 4 * MIB, "{of_small:?} {of_large:?}");
        assert!(of_large.pages + 1000 < of_small.pages);
        assert!(of_small.used_bytes > 10 * MIB, "{of_small:?}");
        // There is room for so much, and the rest of a ceiling is for pages.
        let too_much = store.create_client(holding(30)).err();
        assert!(
            matches!(too_much, Some(Error::CapacityTooSmall { .. })),
            "{too_much:?}"
        );
        assert_eq!(store.stats().capacity_bytes, 32 * MIB);
        let above = ClientOptions {
            ceiling_bytes: Some(MIB),
            ..holding(2)
        };
        let above = store.create_client(above).err();
        assert!(matches!(above, Some(Error::OutOfRange { .. })), "{above:?}");
        let low = ClientOptions {
            ceiling_bytes: Some(3 * MIB),
            ..holding(2)
        };
        let (low, low_in) = client(&store, low);
        fill(&low, low_in, 0..4 * PAGES_IN_MIB);
        let of_low = stats_of(&store, low.id());
        assert!(
            of_low.used_bytes <= 3 * MIB && of_low.pages > 0,
            "{of_low:?}"
        );
        // When they leave, it is the others'.
        drop((low, large, idle));
        (0..32 * PAGES_IN_MIB).for_each(|page| read(&small, small_in, 1 << 40 | page));
        assert!(stats_of(&store, small.id()).used_bytes > 28 * MIB);
    }
}

#[test]
fn a_million_objects_are_flushed_at_once() {
    const OBJECTS: u64 = 1_000_000;
    let options = StoreOptions {
        sharing: Sharing::WithinClient,
        ..StoreOptions::new(1024 * MIB)
    };
    let store = Store::new(options).unwrap();
    let (client, pool) = client(&store, ClientOptions::new("many"));
    let empty = store.stats();
    for object in 0..OBJECTS {
        let handle = Handle {
            pool,
            object,
            index: 0,
        };
        client.put(handle, &[0; PAGE_BYTES]).unwrap();
    }
    let full = store.stats();
    assert_eq!(full.pages, OBJECTS);
    assert_eq!(full.clients[0].pools[0].objects, OBJECTS);
    assert_eq!(client.flush_pool(pool), Ok(OBJECTS));
    let flushed = store.stats();
    assert_eq!(flushed.pages, 0);
    assert_eq!(flushed.clients[0].pools[0].objects, 0);
    assert_eq!(flushed.clients[0].used_bytes, 0);
    let grown = flushed.metadata_bytes.saturating_sub(empty.metadata_bytes);
    let most = full.metadata_bytes / 4;
    assert!(grown <= most, "{empty:?}, {full:?}, {flushed:?}");
    // Pages find room again where they were.
    fill(&client, pool, 0..900 * PAGES_IN_MIB);
    assert_eq!(store.stats().pages, 900 * PAGES_IN_MIB);
}

#[test]
fn a_client_that_goes_gives_all_back() {
    let store = store(64 * MIB);
    let (stays, stays_in) = client(&store, ClientOptions::new("stays"));
    fill(&stays, stays_in, 0..PAGES_IN_MIB);
    let before = store.stats();
    let (goes, goes_in) = client(&store, ClientOptions::new("goes"));
    fill(&goes, goes_in, 0..32 * PAGES_IN_MIB);
    assert_eq!(store.stats().pages, 33 * PAGES_IN_MIB);
    drop(goes);
    let after = store.stats();
    assert_eq!(after.pages, before.pages);
    assert!(
        after.used_bytes <= before.used_bytes + MIB,
        "{before:?}, {after:?}"
    );
    assert_eq!(after.clients.len(), 1);
    let mut page = [0; PAGE_BYTES];
    for number in 0..PAGES_IN_MIB {
        assert_eq!(stays.get(handle(stays_in, number), &mut page), Ok(true));
        assert!(page == Content::Noise(number).page());
    }
}

#[test]
fn a_flood_takes_nothing_below_a_floor() {
    for options in configurations(32 * MIB) {
        let store = Store::new(options).unwrap();
        let kept = 7 * PAGES_IN_MIB;
        let options = ClientOptions {
            floor_bytes: 8 * MIB,
            ..ClientOptions::new("floor")
        };
        let (quiet, quiet_in) = client(&store, options);
        let (busy, busy_in) = client(&store, ClientOptions::new("floods"));
        fill(&quiet, quiet_in, 0..kept);
        for turn in 0..64 {
            store.turn(Duration::from_secs(10 * turn));
            let start = turn * PAGES_IN_MIB;
            (start..start + 2 * PAGES_IN_MIB).for_each(|page| read(&busy, busy_in, 1 << 40 | page));
        }
        assert_eq!(stats_of(&store, quiet.id()).pages, kept);
        let mut page = [0; PAGE_BYTES];
        for number in 0..kept {
            assert_eq!(quiet.get(handle(quiet_in, number), &mut page), Ok(true));
            assert!(page == Content::Noise(number).page());
        }
    }
}

#[test]
fn others_that_use_shared_pools_displace_no_private_pages() {
    for options in configurations(32 * MIB) {
        let store = Store::new(options).unwrap();
        let (first, private) = client(&store, ClientOptions::new("joins first"));
        let filler = store.create_client(ClientOptions::new("fills")).unwrap();
        let shared: Vec<_> = (0..8)
            .map(|key| {
                let pool = first.create_pool(PoolOptions::shared(key)).unwrap();
                assert_eq!(filler.create_pool(PoolOptions::shared(key)), Ok(pool));
                pool
            })
            .collect();
        let own_pages = 8 * PAGES_IN_MIB;
        for turn in 0..60 {
            let own = turn * 200..turn * 200 + 200;
            own.for_each(|page| read(&first, private, page % own_pages));
            for pool in &shared {
                let pages = turn * 500..turn * 500 + 500;
                pages.for_each(|page| read(&filler, *pool, page));
            }
            store.turn(Duration::from_secs(turn));
        }
        assert_eq!(stats_of(&store, first.id()).pages, own_pages);
        let stats = store.stats();
        let filled: u64 = stats.shared_pools.iter().map(|one| one.pool.pages).sum();
        assert!(filled > 16 * PAGES_IN_MIB, "{filled}");
        // Without the pools, all is as with one pool.
        for pool in shared {
            filler.destroy_pool(pool).unwrap();
            first.destroy_pool(pool).unwrap();
        }
        fill(&first, private, 0..64 * PAGES_IN_MIB);
        assert!(stats_of(&store, first.id()).pages > 24 * PAGES_IN_MIB);
    }
}

#[test]
fn a_shared_pool_has_what_private_pages_leave_idle() {
    let store = store(32 * MIB);
    let (idle, private) = client(&store, ClientOptions::new("idle"));
    let shared = idle.create_pool(PoolOptions::shared(1)).unwrap();
    let user = store.create_client(ClientOptions::new("user")).unwrap();
    assert_eq!(user.create_pool(PoolOptions::shared(1)), Ok(shared));
    fill(&idle, private, 0..24 * PAGES_IN_MIB);
    for turn in 0..600 {
        store.turn(Duration::from_secs(turn));
        (0..200).for_each(|page| read(&user, shared, turn * 200 + page));
    }
    let left = stats_of(&store, idle.id()).pages;
    assert!(left < PAGES_IN_MIB, "{left}");
    let [shared] = &*store.stats().shared_pools else {
        panic!("{:?}", store.stats());
    };
    assert!(shared.pool.pages > 24 * PAGES_IN_MIB, "{shared:?}");
}

#[test]
fn clients_are_not_above_their_ceilings_by_a_shared_pool() {
    let store = store(32 * MIB);
    let limited = || ClientOptions {
        ceiling_bytes: Some(4 * MIB),
        ..ClientOptions::new("limited")
    };
    let clients = [client(&store, limited()), client(&store, limited())];
    let shared = clients.each_ref().map(|(client, _)| {
        let pool = client.create_pool(PoolOptions::shared(1));
        pool.unwrap()
    })[0];
    for turn in 0..100 {
        for (at, (client, private)) in clients.iter().enumerate() {
            // Now the one pool is used more, now the other.
            let [in_private, in_shared] = if turn / 20 % 2 == 0 {
                [900, 100]
            } else {
                [100, 900]
            };
            let start = (at as u64) << 32 | turn << 10;
            (start..start + in_private).for_each(|page| read(client, *private, page));
            (start..start + in_shared).for_each(|page| read(client, shared, page));
        }
        store.turn(Duration::from_secs(turn));
        let stats = store.stats();
        let of_clients: u64 = stats.clients.iter().map(|client| client.used_bytes).sum();
        let of_pool = stats.shared_pools[0].used_bytes;
        assert!(of_clients + of_pool <= 8 * MIB, "{of_clients} {of_pool}");
        match turn % 40 {
            19 => assert!(of_pool < 4 * MIB, "{of_pool}"),
            39 => assert!(of_pool > 4 * MIB, "{of_pool}"),
            _ => {}
        }
    }
    // Who has no limit brings none.
    let free = store.create_client(ClientOptions::new("free")).unwrap();
    assert_eq!(free.create_pool(PoolOptions::shared(1)), Ok(shared));
    fill(&free, shared, 0..16 * PAGES_IN_MIB);
    assert!(store.stats().shared_pools[0].used_bytes > 12 * MIB);
}

#[test]
fn no_client_is_above_its_ceiling() {
    for options in configurations(32 * MIB) {
        let store = Store::new(options).unwrap();
        let options = ClientOptions {
            ceiling_bytes: Some(4 * MIB),
            ..ClientOptions::new("ceiling")
        };
        let (low, pool) = client(&store, options);
        let load = |thread: u64, count: u64| {
            read(
                &low,
                pool,
                mixed(thread << 60 ^ count) % (16 * PAGES_IN_MIB),
            );
        };
        under_load(load, || {
            for turn in 0..100 {
                store.turn(Duration::from_secs(turn));
                assert!(stats_of(&store, low.id()).used_bytes <= 4 * MIB);
                thread::sleep(Duration::from_millis(1));
            }
        });
        fill(&low, pool, 0..16 * PAGES_IN_MIB);
        let used_bytes = stats_of(&store, low.id()).used_bytes;
        assert!((3 * MIB..=4 * MIB).contains(&used_bytes), "{used_bytes}");
    }
}

/// Reads at random from more than the store holds, by each client's share of `reads`, for some turns of a second.
fn play(store: &Store, clients: &[(Client, PoolId)], reads: &[u64], seconds: std::ops::Range<u64>) {
    for second in seconds {
        for ((client, pool), reads) in clients.iter().zip(reads) {
            for read_number in 0..*reads {
                let random = mixed(second << 32 ^ read_number ^ u64::from(pool.0) << 56);
                read(client, *pool, random % (48 * PAGES_IN_MIB));
            }
        }
        store.turn(Duration::from_secs(second));
    }
}

#[test]
fn weights_of_1_to_3_give_1_to_3_of_the_memory() {
    let store = store(32 * MIB);
    let weighed = |weight| ClientOptions {
        weight,
        ..ClientOptions::new("weighed")
    };
    let clients = [client(&store, weighed(100)), client(&store, weighed(300))];
    play(&store, &clients, &[2000, 2000], 1..40);
    let used = clients
        .each_ref()
        .map(|(client, _)| stats_of(&store, client.id()).used_bytes);
    let ratio = used[1] as f64 / used[0] as f64;
    assert!((2.7..3.3).contains(&ratio), "{used:?}");
    assert!(used[0] + used[1] > 30 * MIB, "{used:?}");
}

#[test]
fn what_an_idle_client_has_goes_to_a_busy_one_and_back() {
    let store = store(32 * MIB);
    let clients = [(); 2].map(|()| client(&store, ClientOptions::new("equal")));
    let used = || {
        clients
            .each_ref()
            .map(|(client, _)| stats_of(&store, client.id()).used_bytes)
    };
    play(&store, &clients, &[2000, 2000], 1..40);
    let ratio = used()[1] as f64 / used()[0] as f64;
    assert!((0.9..1.1).contains(&ratio), "{:?}", used());
    play(&store, &clients, &[2000, 0], 40..60);
    let soon = used();
    play(&store, &clients, &[2000, 0], 60..640);
    let late = used();
    assert!(late[1] < soon[1], "{soon:?}, {late:?}");
    assert!(late[1] < 2 * MIB && late[0] > 28 * MIB, "{late:?}");
    play(&store, &clients, &[2000, 2000], 640..700);
    let ratio = used()[1] as f64 / used()[0] as f64;
    assert!((0.9..1.1).contains(&ratio), "{:?}", used());
}

#[test]
fn a_client_that_fills_the_store_before_it_reads_is_not_idle() {
    let store = store(32 * MIB);
    let clients = [(); 2].map(|()| client(&store, ClientOptions::new("equal")));
    let (putter, pool) = &clients[1];
    for second in 1..40 {
        fill(putter, *pool, second * 2000..(second + 1) * 2000);
        play(&store, &clients[..1], &[2000], second..second + 1);
    }
    let used = clients
        .each_ref()
        .map(|(client, _)| stats_of(&store, client.id()).used_bytes);
    let ratio = used[1] as f64 / used[0] as f64;
    assert!((0.9..1.1).contains(&ratio), "{used:?}");
}

#[test]
fn no_group_takes_the_pools_of_others() {
    let store = Store::new(StoreOptions {
        shards: 1,
        ..StoreOptions::new(64 * MIB)
    });
    let store = store.unwrap();
    let mut counts = [0; 5];
    store.set_groups(counts.len());
    let client = |group| {
        let options = ClientOptions {
            group,
            ..ClientOptions::new("of a group")
        };
        store.create_client(options).unwrap()
    };
    let mut clients: Vec<Client> = Vec::new();
    for (group, count) in (0..).zip(&mut counts) {
        let error = 'group: loop {
            clients.push(client(group));
            let client = clients.last().unwrap();
            loop {
                match client.create_pool(PoolOptions::private()) {
                    Ok(_) => *count += 1,
                    Err(Error::TooManyPools(_)) => break,
                    Err(error) => break 'group error,
                }
            }
        };
        let last = group == 4;
        let is_refusal = matches!(error, Error::NoPoolLeft { own, free, .. } if own == *count && (free == 0) == last);
        assert!(is_refusal, "{error}");
    }
    // A tenth for each, and what the first did not leave.
    assert_eq!(counts, [4096 - 4 * 409, 409, 409, 409, 409]);
}

#[test]
fn pools_without_pages_take_little_from_others() {
    let store = Store::new(StoreOptions {
        shards: 8,
        ..StoreOptions::new(12 * MIB)
    });
    let store = store.unwrap();
    store.set_groups(2);
    let of_group = |group| ClientOptions {
        group,
        ..ClientOptions::new("of a group")
    };
    let (victim, pool) = client(&store, of_group(1));
    fill(&victim, pool, 0..4000);
    let before = stats_of(&store, victim.id()).used_bytes;
    let mut clients = Vec::new();
    let error = 'all: loop {
        clients.push(store.create_client(of_group(2)).unwrap());
        for _ in 0..32 {
            if let Err(error) = clients.last().unwrap().create_pool(PoolOptions::private()) {
                break 'all error;
            }
        }
        assert!(clients.len() < 64);
    };
    assert!(matches!(error, Error::NoPoolLeft { .. }), "{error}");
    let after = stats_of(&store, victim.id()).used_bytes;
    assert!(after as f64 > before as f64 * 0.8, "{after} of {before}");
    // Nor are others kept out.
    client(&store, of_group(1));
}

#[test]
fn a_panic_in_a_closure_leaves_no_torn_page() {
    let store = store(4 * MIB);
    let (client, pool) = client(&store, ClientOptions::new("panics"));
    let handle = handle(pool, 0);
    let mut page = [0; PAGE_BYTES];
    for there in [false, true] {
        if there {
            assert!(client.put(handle, &[1; PAGE_BYTES]).unwrap().is_stored());
        }
        let put = || {
            client.put_with(handle, |frame| {
                frame[..2048].fill(2);
                panic!("half-way");
            })
        };
        assert!(catch_unwind(AssertUnwindSafe(put)).is_err());
        assert_eq!(client.get(handle, &mut page), Ok(false));
        assert_eq!(store.stats().pages, 0);
    }
    assert!(client.put(handle, &[3; PAGE_BYTES]).unwrap().is_stored());
    let get = || client.get_with(handle, |_| panic!("reading"));
    assert!(catch_unwind(AssertUnwindSafe(get)).is_err());
    if client.get(handle, &mut page).unwrap() {
        assert_eq!(page, [3; PAGE_BYTES]);
    }
    assert!(client.put(handle, &[4; PAGE_BYTES]).unwrap().is_stored());
    assert_eq!(client.get(handle, &mut page), Ok(true));
    assert_eq!(page, [4; PAGE_BYTES]);
}

#[test]
fn a_panic_among_many_pages_loses_and_leaks_nothing() {
    const PAGES: u64 = 40;
    for options in configurations(8 * MIB) {
        let store = Store::new(options).unwrap();
        let (client, pool) = client(&store, ClientOptions::new("panics"));
        let empty = store.stats().used_bytes;
        let handles: Vec<Handle> = (0..PAGES).map(|page| handle(pool, page)).collect();
        let old = |number: usize| Content::Noise(number as u64).page();
        let new = |number: usize| Content::Lines(number as u64).page();
        let mut found = [0; PAGE_BYTES];
        for at in [0, 7, 15, 16, 39] {
            client.put_each(&handles, |number, frame| *frame = old(number), |_, _| {});
            assert_eq!(store.stats().pages, PAGES);
            let put = || {
                let fill = |number: usize, frame: &mut Page| {
                    frame.fill(0xee);
                    assert_ne!(number, at, "half-way");
                    *frame = new(number);
                };
                client.put_each(&handles, fill, |_, _| {});
            };
            assert!(catch_unwind(AssertUnwindSafe(put)).is_err());
            let left = store.stats();
            let there = |number: &usize| {
                let there = client.peek(handles[*number], &mut found).unwrap();
                assert!(!there || found == old(*number) || found == new(*number));
                there
            };
            let there = (0..handles.len()).filter(there).count() as u64;
            assert!(there >= PAGES - 1, "{there} are left");
            assert_eq!(left.pages, there);
            assert!(left.clients[0].used_bytes >= there * 40);

            // Those of the call that were not read yet are gone, as if they had been.
            let get = || client.get_each(&handles, |number, _| assert_ne!(number, at, "half-way"));
            assert!(catch_unwind(AssertUnwindSafe(get)).is_err());
            let left = store.stats();
            let mut hits = 0;
            client.get_each(&handles, |number, page| {
                if let Some(page) = page.unwrap() {
                    assert!(*page == old(number) || *page == new(number));
                    hits += 1;
                }
            });
            assert_eq!(left.pages, hits);

            // `done` is called for each put that was made.
            let mut told = 0;
            let put = || {
                let done = |number, outcome: Result<PutOutcome, Error>| {
                    told += u64::from(outcome.unwrap().is_stored());
                    assert_ne!(number, at, "half-way");
                };
                client.put_each(&handles, |number, frame| *frame = old(number), done);
            };
            assert!(catch_unwind(AssertUnwindSafe(put)).is_err());
            let pages = store.stats().pages;
            assert!(pages >= told && pages <= PAGES);
            assert_eq!(client.flush_pool(pool), Ok(pages));

            let stats = store.stats();
            assert_eq!((stats.pages, stats.clients[0].used_bytes), (0, 0));
            assert_eq!(stats.used_bytes, stats.metadata_bytes);
            assert!(stats.used_bytes <= empty + MIB / 4, "{stats:?}");
        }
        // No frame was lost either: as many pages find room as before.
        fill(&client, pool, 0..16 * PAGES_IN_MIB);
        let full = store.stats();
        let free_bytes = full.capacity_bytes - full.used_bytes;
        assert!(free_bytes < MIB, "{full:?}");
        store.resize(4 * MIB).unwrap();
        assert!(store.stats().used_bytes <= 4 * MIB);
    }
}

#[test]
fn frames_on_their_way_are_within_the_bound_when_a_resize_returns() {
    for options in configurations(16 * MIB) {
        let store = Store::new(options).unwrap();
        let (client, pool) = client(&store, ClientOptions::new("load"));
        let load = |thread: u64, count: u64| {
            let numbers = (0..48).map(|page| mixed(thread << 60 ^ count << 8 ^ page));
            let numbers: Vec<u64> = numbers.map(|random| random % (32 * PAGES_IN_MIB)).collect();
            let handles: Vec<Handle> = numbers.iter().map(|page| handle(pool, *page)).collect();
            client.get_each(&handles, |number, page| {
                if let Some(page) = page.unwrap() {
                    assert!(*page == Content::Noise(numbers[number]).page());
                }
            });
            let fill =
                |number: usize, frame: &mut Page| *frame = Content::Noise(numbers[number]).page();
            client.put_each(&handles, fill, |_, outcome| assert!(outcome.is_ok()));
        };
        under_load(load, || {
            for capacity_mib in [8, 16, 2, 12, 3, 16].repeat(3) {
                store.resize(capacity_mib * MIB).unwrap();
                for _ in 0..5 {
                    let stats = store.stats();
                    assert!(stats.used_bytes <= capacity_mib * MIB, "{stats:?}");
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        fill(&client, pool, 0..16 * PAGES_IN_MIB);
        let pages = store.stats().pages;
        assert!(pages > 12 * PAGES_IN_MIB, "{pages}");
        assert_eq!(client.flush_pool(pool), Ok(pages));
        let stats = store.stats();
        assert_eq!(stats.clients[0].used_bytes, 0);
        assert_eq!(stats.used_bytes, stats.metadata_bytes);
    }
}
