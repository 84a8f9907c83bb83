//! Schedules of a few threads, thousands of each, explored by shuttle: in any order of their steps, answers are
//! linearizable for each handle and the store stays within its capacity.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p plimsoll-hcache --release --test shuttle`
#![cfg(shuttle)]

#[path = "common/history.rs"]
mod history;
#[path = "common/random.rs"]
mod random;

use std::sync::Arc;

use history::{Call, Clock, Record, Recorder, Rules, check};
use plimsoll_hcache::{
    Client, ClientOptions, EVICTION_POLICIES, Error, EvictionPolicyRow, Handle, LRU, PAGE_BYTES,
    PoolId, PoolOptions, Sharing, Store, StoreOptions,
};
use plimsoll_skip::longer;
use shuttle::thread;

/// Schedules of each scenario and each way to choose them.
const SCHEDULES: usize = 2000;

/// Capacity of a store with pages to spare, in bytes.
const ROOMY_BYTES: u64 = 4 << 20;

const PRIVATE: Rules = Rules {
    shared: false,
    drops: false,
};
const DROPPING: Rules = Rules {
    shared: false,
    drops: true,
};

/// Explores a scenario by random schedules, and by those that few preemptions make.
fn explore(scenario: fn()) {
    shuttle::check_random(scenario, longer(SCHEDULES));
    shuttle::check_pct(scenario, longer(SCHEDULES), 3);
}

/// A store of two shards and a client's pool in it.
struct Scene {
    clock: Arc<Clock>,
    client: Arc<Client>,
    pool: PoolId,
}

impl Scene {
    fn new(capacity_bytes: u64, pool: PoolOptions) -> Self {
        let options = StoreOptions::new(capacity_bytes);
        Self::of(options, pool)
    }

    fn of(options: StoreOptions, pool: PoolOptions) -> Self {
        let options = StoreOptions {
            shards: 2,
            ..options
        };
        let client = Store::new(options)
            .unwrap()
            .create_client(ClientOptions::new("scene"))
            .unwrap();
        let pool = client.create_pool(pool).unwrap();
        Self {
            clock: Arc::default(),
            client: Arc::new(client),
            pool,
        }
    }

    fn private() -> Self {
        Self::new(ROOMY_BYTES, PoolOptions::private())
    }

    fn handle(&self, object: u64) -> Handle {
        Handle {
            pool: self.pool,
            object,
            index: 0,
        }
    }

    /// Starts a thread and records what it calls.
    fn start(
        &self,
        calls: impl FnOnce(&mut Recorder) + Send + 'static,
    ) -> thread::JoinHandle<Record> {
        let (clock, client) = (self.clock.clone(), self.client.clone());
        thread::spawn(move || {
            let mut recorder = Recorder::new(&clock, &client);
            calls(&mut recorder);
            recorder.finish()
        })
    }

    /// Waits for threads, peeks at the pages once more, and checks all records.
    fn check<const N: usize>(
        self,
        rules: Rules,
        threads: [thread::JoinHandle<Record>; N],
        handles: &[Handle],
    ) {
        let mut records = Vec::from(threads.map(|thread| thread.join().unwrap()));
        let mut recorder = Recorder::new(&self.clock, &self.client);
        for handle in handles {
            recorder.peek(*handle);
            recorder.get(*handle);
            recorder.get(*handle);
        }
        records.push(recorder.finish());
        check(records, rules);
        let stats = self.client.store().stats();
        assert!(stats.used_bytes <= stats.capacity_bytes);
    }
}

#[test]
fn put_beside_get() {
    explore(|| {
        let scene = Scene::private();
        let handle = scene.handle(1);
        let threads = [
            scene.start(move |calls| calls.put(handle)),
            scene.start(move |calls| {
                calls.get(handle);
                calls.get(handle);
            }),
        ];
        scene.check(PRIVATE, threads, &[handle]);
    });
}

#[test]
fn put_beside_put_beside_get() {
    explore(|| {
        let scene = Scene::private();
        let handle = scene.handle(1);
        let threads = [
            scene.start(move |calls| calls.put(handle)),
            scene.start(move |calls| {
                calls.put(handle);
                calls.get(handle);
            }),
            scene.start(move |calls| {
                calls.get(handle);
                calls.peek(handle);
            }),
        ];
        scene.check(PRIVATE, threads, &[handle]);
    });
}

#[test]
fn flush_pool_beside_puts() {
    explore(|| {
        let scene = Scene::private();
        let handles = [1, 2, 3].map(|object| scene.handle(object));
        let pool = scene.pool;
        let threads = [
            scene.start(move |calls| {
                for handle in handles {
                    calls.put(handle);
                }
            }),
            scene.start(move |calls| {
                let count = calls.flush_all(&handles, Call::FlushPool, |client| {
                    client.flush_pool(pool).unwrap()
                });
                assert!(count <= 3);
            }),
            scene.start(move |calls| {
                calls.get(handles[2]);
                calls.put(handles[0]);
                calls.flush(handles[0]);
            }),
        ];
        scene.check(PRIVATE, threads, &handles);
    });
}

#[test]
fn flush_object_beside_puts() {
    explore(|| {
        let scene = Scene::private();
        let handles = [0, 1, u32::MAX].map(|index| Handle {
            index,
            ..scene.handle(9)
        });
        let pool = scene.pool;
        let threads = [
            scene.start(move |calls| {
                for handle in handles {
                    calls.put(handle);
                }
            }),
            scene.start(move |calls| {
                calls.flush_all(&handles, Call::Flush(None), |client| {
                    client.flush_object(pool, 9).unwrap()
                });
            }),
            scene.start(move |calls| {
                calls.flush_all(&handles[1..], Call::Flush(None), |client| {
                    client.flush_range(pool, 9, 1..=u32::MAX).unwrap()
                });
            }),
        ];
        scene.check(PRIVATE, threads, &handles);
    });
}

#[test]
fn a_shared_page_beside_its_flush() {
    explore(|| {
        let scene = Scene::new(ROOMY_BYTES, PoolOptions::shared(1));
        let handle = scene.handle(1);
        let threads = [
            scene.start(move |calls| calls.put(handle)),
            scene.start(move |calls| {
                calls.get(handle);
                calls.get(handle);
            }),
            scene.start(move |calls| {
                calls.peek(handle);
                calls.flush(handle);
            }),
        ];
        scene.check(
            Rules {
                shared: true,
                drops: false,
            },
            threads,
            &[handle],
        );
    });
}

#[test]
fn a_client_goes_beside_gets_of_another() {
    explore(|| {
        let scene = Scene::new(ROOMY_BYTES, PoolOptions::shared(1));
        let store = scene.client.store().clone();
        let first = Arc::new(store.create_client(ClientOptions::new("goes")).unwrap());
        assert_eq!(first.create_pool(PoolOptions::shared(1)), Ok(scene.pool));
        let own = first.create_pool(PoolOptions::private()).unwrap();
        let page = Handle {
            pool: own,
            ..scene.handle(1)
        };
        assert!(first.put(page, &[1; PAGE_BYTES]).unwrap().is_stored());
        let handle = scene.handle(1);
        let threads = [
            scene.start(move |calls| {
                calls.put(handle);
                calls.get(handle);
            }),
            scene.start(move |calls| {
                calls.get(handle);
            }),
        ];
        let gone = thread::spawn(move || drop(first));
        gone.join().unwrap();
        scene.check(
            Rules {
                shared: true,
                drops: false,
            },
            threads,
            &[handle],
        );
        assert_eq!(store.stats().clients.len(), 0);
        assert_eq!(store.stats().pages, 0);
    });
}

#[test]
fn a_pool_is_destroyed_beside_puts_and_gets() {
    explore(|| {
        let scene = Scene::private();
        let (client, handle) = (scene.client.clone(), scene.handle(1));
        let destroys = thread::spawn(move || assert_eq!(client.destroy_pool(handle.pool), Ok(())));
        let users = [0, 1].map(|_| {
            let client = scene.client.clone();
            thread::spawn(move || {
                let mut page = [0; PAGE_BYTES];
                let gone = Error::NoSuchPool(handle.pool);
                match client.put(handle, &[1; PAGE_BYTES]) {
                    Ok(outcome) => assert!(outcome.is_stored()),
                    Err(error) => assert_eq!(error, gone),
                }
                match client.get(handle, &mut page) {
                    Ok(hit) => assert!(!hit || page == [1; PAGE_BYTES]),
                    Err(error) => assert_eq!(error, gone),
                }
            })
        });
        destroys.join().unwrap();
        for user in users {
            user.join().unwrap();
        }
        let stats = scene.client.store().stats();
        assert_eq!((stats.pages, stats.pools().count()), (0, 0));
        assert_eq!(stats.charged_bytes(), 0);
    });
}

#[test]
fn a_shared_pool_is_joined_beside_its_last_client_leaving() {
    explore(|| {
        let scene = Scene::new(ROOMY_BYTES, PoolOptions::shared(1));
        let (client, pool) = (scene.client.clone(), scene.pool);
        let handle = scene.handle(1);
        assert!(client.put(handle, &[1; PAGE_BYTES]).unwrap().is_stored());
        let store = client.store().clone();
        let leaves = thread::spawn(move || assert_eq!(client.destroy_pool(pool), Ok(())));
        let joins = thread::spawn(move || {
            let client = store.create_client(ClientOptions::new("joins")).unwrap();
            let joined = client.create_pool(PoolOptions::shared(1)).unwrap();
            let handle = Handle {
                pool: joined,
                object: 1,
                index: 0,
            };
            let mut page = [0; PAGE_BYTES];
            let hit = client.get(handle, &mut page).unwrap();
            // The old pool with its page, or a new one.
            assert_eq!(hit, joined == pool);
            assert!(client.put(handle, &[2; PAGE_BYTES]).unwrap().is_stored());
            assert_eq!(client.get(handle, &mut page), Ok(true));
            assert_eq!(page, [2; PAGE_BYTES]);
            client
        });
        leaves.join().unwrap();
        let joined = joins.join().unwrap();
        let stats = joined.store().stats();
        assert_eq!(stats.pages, 1);
        let mut pools = stats.pools();
        let only = pools.next().unwrap();
        assert_eq!(only.members, [joined.id()]);
        assert!(pools.next().is_none());
    });
}

/// Shrinks the store in a thread of its own, and waits for it.
fn shrink(client: Arc<Client>) {
    let resizes = thread::spawn(move || {
        let store = client.store();
        store.resize(StoreOptions::MIN_CAPACITY_BYTES).unwrap();
        let used_bytes = store.stats().used_bytes;
        assert!(
            used_bytes <= StoreOptions::MIN_CAPACITY_BYTES,
            "{used_bytes}"
        );
    });
    resizes.join().unwrap();
}

#[test]
fn resize_down_beside_put_and_get() {
    explore(|| {
        let scene = Scene::private();
        let handles = [1, 2].map(|object| scene.handle(object));
        let client = scene.client.clone();
        for object in 100..110 {
            client.put(scene.handle(object), &[1; PAGE_BYTES]).unwrap();
        }
        let threads = [
            scene.start(move |calls| {
                calls.put(handles[0]);
                calls.put(handles[1]);
            }),
            scene.start(move |calls| {
                calls.get(handles[0]);
                calls.put(handles[0]);
            }),
        ];
        shrink(client);
        scene.check(DROPPING, threads, &handles);
    });
}

#[test]
fn puts_beside_puts_where_a_pool_is_full() {
    explore(|| {
        let options = PoolOptions {
            capacity_pages: Some(2),
            ..PoolOptions::private()
        };
        let scene = Scene::new(ROOMY_BYTES, options);
        let handles = [1, 2, 3, 4].map(|object| scene.handle(object));
        let threads = [
            scene.start(move |calls| {
                calls.put(handles[0]);
                calls.put(handles[1]);
                calls.get(handles[2]);
            }),
            scene.start(move |calls| {
                calls.put(handles[2]);
                calls.put(handles[3]);
                calls.get(handles[0]);
            }),
        ];
        let client = scene.client.clone();
        scene.check(DROPPING, threads, &[]);
        let stats = client.store().stats();
        let pool = &stats.clients[0].pools[0];
        assert!(pool.pages <= 2, "{pool:?}");
    });
}

#[test]
fn puts_beside_puts_where_the_store_is_full() {
    explore(|| {
        let scene = Scene::new(StoreOptions::MIN_CAPACITY_BYTES, PoolOptions::private());
        for object in 100..400 {
            scene
                .client
                .put(scene.handle(object), &[1; PAGE_BYTES])
                .unwrap();
        }
        let handles = [1, 2].map(|object| scene.handle(object));
        let threads = handles.map(|handle| {
            scene.start(move |calls| {
                calls.put(handle);
                calls.put(handles[0]);
                calls.get(handle);
            })
        });
        scene.check(DROPPING, threads, &handles);
    });
}

const SHARED: Rules = Rules {
    shared: true,
    drops: false,
};

/// A pool without clients.
const FOREIGN: PoolId = PoolId(0);

#[test]
fn flush_pool_beside_gets_of_a_shared_pool() {
    explore(|| {
        let scene = Scene::new(ROOMY_BYTES, PoolOptions::shared(1));
        let handles = [1, 2, 3].map(|object| scene.handle(object));
        let pool = scene.pool;
        let mut recorder = Recorder::new(&scene.clock, &scene.client);
        recorder.put_each(&handles, FOREIGN);
        let before = recorder.finish();
        let threads = [
            scene.start(move |calls| {
                calls.flush_all(&handles, Call::FlushPool, |client| {
                    let count = client.flush_pool(pool).unwrap();
                    assert_eq!(count, 3);
                    count
                });
                calls.get(handles[0]);
            }),
            scene.start(move |calls| {
                calls.get(handles[0]);
                calls.peek(handles[2]);
                calls.get_each(&handles, FOREIGN);
            }),
        ];
        let threads = threads.map(|thread| thread.join().unwrap());
        check(threads.into_iter().chain([before]).collect(), SHARED);
        let stats = scene.client.store().stats();
        assert_eq!((stats.pages, stats.clients[0].used_bytes), (0, 0));
    });
}

#[test]
fn a_replacing_put_in_a_full_store_beside_peeks() {
    explore(|| {
        let scene = Scene::new(StoreOptions::MIN_CAPACITY_BYTES, PoolOptions::private());
        let handles = [1, 2].map(|object| scene.handle(object));
        for object in 100..400 {
            let handle = scene.handle(object);
            scene.client.put(handle, &[1; PAGE_BYTES]).unwrap();
        }
        let mut recorder = Recorder::new(&scene.clock, &scene.client);
        recorder.put(handles[0]);
        recorder.put(handles[1]);
        let before = recorder.finish();
        let threads = [
            scene.start(move |calls| {
                calls.put(handles[0]);
                calls.put_each(&[handles[1], handles[0], handles[1]], FOREIGN);
            }),
            scene.start(move |calls| {
                // A page that is replaced is there before and after.
                calls.peek(handles[0]);
                calls.peek(handles[1]);
                calls.peek(handles[0]);
            }),
        ];
        let records = threads.map(|thread| thread.join().unwrap());
        check(records.into_iter().chain([before]).collect(), DROPPING);
        let stats = scene.client.store().stats();
        assert!(stats.used_bytes <= stats.capacity_bytes);
    });
}

/// A full store that compresses, with or without sharing, under concurrent operations.
fn explore_full(sharing: Sharing, shared: bool, eviction: &'static EvictionPolicyRow) {
    let scenario = move || {
        let options = StoreOptions {
            compression: true,
            sharing,
            eviction,
            max_capacity_bytes: 2 * StoreOptions::MIN_CAPACITY_BYTES,
            ..StoreOptions::new(StoreOptions::MIN_CAPACITY_BYTES + (128 << 10))
        };
        let pool = if shared {
            PoolOptions::shared(1)
        } else {
            PoolOptions::private()
        };
        let scene = Scene::of(options, pool);
        let (first, second) = (
            [1, 2, 3].map(|object| scene.handle(object)),
            scene.handle(2),
        );
        for object in 100..400_u64 {
            let mut page = [7; PAGE_BYTES];
            page[..8].copy_from_slice(&(object / 2).to_le_bytes());
            scene.client.put(scene.handle(object), &page).unwrap();
        }
        let client = scene.client.clone();
        let threads = [
            scene.start(move |calls| {
                calls.put_each(&[first[0], second, first[2], first[0]], FOREIGN);
                calls.get_each(&first, FOREIGN);
            }),
            scene.start(move |calls| {
                calls.get_each(&[second, first[0], second], FOREIGN);
                calls.put(second);
                calls.peek(second);
            }),
        ];
        shrink(client);
        let (client, pool) = (scene.client.clone(), scene.pool);
        let rules = Rules {
            shared,
            drops: true,
        };
        scene.check(rules, threads, &first);
        client.flush_pool(pool).unwrap();
        let stats = client.store().stats();
        assert_eq!((stats.pages, stats.clients[0].used_bytes), (0, 0));
        assert_eq!(stats.used_bytes, stats.metadata_bytes);
    };
    shuttle::check_random(scenario, longer(SCHEDULES / 4));
    shuttle::check_pct(scenario, longer(SCHEDULES / 4), 3);
}

#[test]
fn groups_beside_a_resize_of_a_store_that_compresses() {
    explore_full(Sharing::Off, false, EVICTION_POLICIES[0]);
}

#[test]
fn groups_beside_a_resize_of_a_shared_pool_that_compresses() {
    for eviction in EVICTION_POLICIES {
        explore_full(Sharing::Off, true, eviction);
    }
}

#[test]
fn groups_beside_a_resize_of_a_store_that_compresses_and_shares() {
    explore_full(Sharing::WithinClient, false, LRU);
}
