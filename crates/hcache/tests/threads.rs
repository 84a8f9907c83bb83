//! Threads that use the same handles at once: their answers are linearizable for each handle.

#[path = "common/history.rs"]
mod history;
#[path = "common/random.rs"]
mod random;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use history::{Call, Clock, Operation, Record, Recorder, Rules, check, operation};
use plimsoll_hcache::{
    Client, ClientOptions, Handle, PAGE_BYTES, PoolId, PoolOptions, PutOutcome, Sharing, Store,
    StoreOptions,
};
use random::mixed;

const THREADS: u64 = 4;

/// Histories of each kind of store and pool.
const ROUNDS: u64 = if cfg!(debug_assertions) { 100 } else { 1500 };

/// Calls of a thread in a history.
const CALLS: u64 = 12;

/// Handles in a history.
const HANDLES: u32 = 3;

/// A pool without clients.
const FOREIGN: PoolId = PoolId(0);

/// Handles that only one thread uses, in a call beside those of the history: more than are processed together.
const OTHERS: u32 = 20;

const ROOMY_BYTES: u64 = 128 << 20;

/// Handles that only one thread puts and gets in a round.
fn others(pool: PoolId, round: u64, thread: u64) -> impl Iterator<Item = Handle> {
    let object = other_object(round, thread);
    (0..OTHERS).map(move |index| Handle {
        pool,
        object,
        index,
    })
}

fn other_object(round: u64, thread: u64) -> u64 {
    1 << 32 | round << 8 | thread
}

/// Handles for one call: the history's twice, others, and one of a foreign pool between.
fn each(all: &[Handle], others: impl Iterator<Item = Handle>, chance: u64) -> Vec<Handle> {
    let mut each: Vec<Handle> = others.collect();
    for (number, handle) in (0..).zip(all.iter().chain(all)) {
        let at = usize::try_from(chance >> (8 * number) & 0xff).expect("a byte");
        each.insert(at % (each.len() + 1), *handle);
    }
    let foreign = Handle {
        pool: FOREIGN,
        ..all[0]
    };
    each.insert(each.len() / 2, foreign);
    each
}

/// What a thread does to the pages of one round.
fn play(recorder: &mut Recorder, pool: PoolId, round: u64, thread: u64, drops: bool) {
    let handle = |index| Handle {
        pool,
        object: round,
        index,
    };
    let all: Vec<Handle> = (0..HANDLES).map(handle).collect();
    let each = |chance| each(&all, others(pool, round, thread), mixed(chance));
    for call in 0..CALLS {
        let chance = mixed(thread << 56 ^ call << 8 ^ round << 16);
        let which = usize::try_from(chance >> 40).expect("24 bits") % all.len();
        let handle = all[which];
        match chance % 32 {
            0..8 => recorder.put(handle),
            8..10 => recorder.put_each(&each(chance), FOREIGN),
            10..18 => {
                recorder.get(handle);
            }
            18..20 => recorder.get_each(&each(chance), FOREIGN),
            20..25 => recorder.peek(handle),
            25..29 => recorder.flush(handle),
            29 => {
                let count = recorder.flush_all(&all, Call::Flush(None), |client| {
                    client.flush_object(pool, round).unwrap()
                });
                assert!(count <= u64::from(HANDLES));
            }
            30 => {
                let count = recorder.flush_all(&all[1..], Call::Flush(None), |client| {
                    client.flush_range(pool, round, 1..=u32::MAX).unwrap()
                });
                assert!(count < u64::from(HANDLES));
            }
            _ if drops => {
                // Others that need room.
                for index in 0..32 {
                    recorder.put(Handle {
                        object: u64::MAX - chance % 65536,
                        index,
                        pool,
                    });
                }
            }
            _ => {
                let others = (0..THREADS).flat_map(|thread| others(pool, round, thread));
                let all: Vec<Handle> = all.iter().copied().chain(others).collect();
                recorder.flush_all(&all, Call::FlushPool, |client| {
                    client.flush_pool(pool).unwrap()
                });
            }
        }
    }
    recorder.flush_all(&[], Call::Flush(None), |client| {
        client
            .flush_object(pool, other_object(round, thread))
            .unwrap()
    });
}

/// Plays rounds in several threads, while another disturbs the store.
fn run(
    client: &Client,
    pool: PoolId,
    shared: bool,
    drops: bool,
    disturb: impl Fn(&Store, u64) + Sync,
) {
    let (clock, barrier) = (Clock::default(), Barrier::new(4));
    let is_over = AtomicBool::new(false);
    let records: Vec<Record> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (clock, barrier) = (&clock, &barrier);
                scope.spawn(move || {
                    let mut recorder = Recorder::new(clock, client);
                    let mut failure = None;
                    for round in 0..ROUNDS {
                        // The others wait for this thread, even if it failed.
                        barrier.wait();
                        if failure.is_none() {
                            let play = || play(&mut recorder, pool, round, thread, drops);
                            failure = catch_unwind(AssertUnwindSafe(play)).err();
                        }
                    }
                    if let Some(panic) = failure {
                        resume_unwind(panic);
                    }
                    recorder.finish()
                })
            })
            .collect();
        scope.spawn(|| {
            for turn in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                disturb(client.store(), turn);
                thread::yield_now();
            }
        });
        let joined: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        is_over.store(true, Ordering::Relaxed);
        joined.into_iter().map(|record| record.unwrap()).collect()
    });
    check(records, Rules { shared, drops });
}

fn run_all(capacity_bytes: u64, drops: bool, disturb: impl Fn(&Store, u64) + Sync) {
    for (compression, sharing, shards) in [
        (false, Sharing::Off, 1),
        (false, Sharing::WithinClient, 64),
        (true, Sharing::Off, 64),
        (true, Sharing::AcrossClients, 1),
    ] {
        let store = Store::new(StoreOptions {
            shards,
            compression,
            sharing,
            max_capacity_bytes: capacity_bytes + (4 << 20),
            ..StoreOptions::new(capacity_bytes)
        });
        let store = store.unwrap();
        for shared in [false, true] {
            let client = store.create_client(ClientOptions::new("threads")).unwrap();
            let options = if shared {
                PoolOptions::shared(1)
            } else {
                PoolOptions::private()
            };
            let pool = client.create_pool(options).unwrap();
            run(&client, pool, shared, drops, &disturb);
        }
    }
}

fn turn(store: &Store, number: u64) {
    store.turn(Duration::from_millis(100 * number));
}

#[test]
fn a_roomy_store_is_linearizable_for_each_handle() {
    run_all(ROOMY_BYTES, false, turn);
}

#[test]
fn a_full_store_is_linearizable_for_each_handle() {
    run_all(1 << 20, true, turn);
}

#[test]
fn a_store_that_is_resized_is_linearizable_for_each_handle() {
    run_all(2 << 20, true, |store, number| {
        turn(store, number);
        store.resize((1 << 20) * (1 + number % 4)).unwrap();
        let stats = store.stats();
        assert!(stats.used_bytes <= stats.capacity_bytes);
    });
}

#[test]
fn clients_that_come_and_go_leave_the_pages_of_others_alone() {
    let store = Store::new(StoreOptions::new(ROOMY_BYTES)).unwrap();
    let client = store.create_client(ClientOptions::new("stays")).unwrap();
    let pool = client.create_pool(PoolOptions::shared(7)).unwrap();
    let came = AtomicU64::new(0);
    run(&client, pool, true, false, |store, number| {
        came.fetch_add(1, Ordering::Relaxed);
        let other = store.create_client(ClientOptions::new("goes")).unwrap();
        assert_eq!(other.create_pool(PoolOptions::shared(7)), Ok(pool));
        let own = other.create_pool(PoolOptions::private()).unwrap();
        let handle = Handle {
            pool: own,
            object: number % 8,
            index: 0,
        };
        assert!(other.put(handle, &[1; PAGE_BYTES]).unwrap().is_stored());
    });
    assert!(came.into_inner() > 0);
    let stats = store.stats();
    assert_eq!(stats.clients.len(), 1);
    let pools: Vec<_> = stats.pools().map(|pool| pool.pages).collect();
    assert_eq!(pools, [stats.pages]);
}

/// Makes a history of calls, each with its start and end.
fn history(calls: &[(u64, u64, Call)]) -> Vec<Operation> {
    let calls = calls.iter().copied();
    calls
        .map(|(start, end, call)| operation(start, end, call))
        .collect()
}

fn put(page: u64) -> Call {
    let outcome = PutOutcome::Stored { replaced: false };
    Call::Put { page, outcome }
}

fn put_over(page: u64) -> Call {
    let outcome = PutOutcome::Stored { replaced: true };
    Call::Put { page, outcome }
}

const PRIVATE: Rules = Rules {
    shared: false,
    drops: false,
};
const SHARED: Rules = Rules {
    shared: true,
    drops: false,
};
const DROPPING: Rules = Rules {
    shared: false,
    drops: true,
};

#[test]
fn the_check_knows_a_page_that_was_given_twice() {
    let twice = history(&[
        (0, 1, put(7)),
        (2, 5, Call::Get(Some(7))),
        (3, 4, Call::Get(Some(7))),
    ]);
    assert!(!PRIVATE.explain(&twice));
    assert!(!DROPPING.explain(&twice));
    assert!(SHARED.explain(&twice));
}

#[test]
fn the_check_knows_a_page_older_than_the_last_put_or_flush() {
    let older = history(&[
        (0, 1, put(7)),
        (2, 3, put_over(8)),
        (4, 5, Call::Get(Some(7))),
    ]);
    assert!(!DROPPING.explain(&older));
    let overlapping = history(&[(0, 1, put(7)), (2, 5, put(8)), (3, 4, Call::Get(Some(7)))]);
    assert!(PRIVATE.explain(&overlapping));
    let flushed = history(&[
        (0, 1, put(7)),
        (2, 3, Call::Flush(None)),
        (4, 5, Call::Get(Some(7))),
    ]);
    assert!(!DROPPING.explain(&flushed));
    let pool_flushed = history(&[
        (0, 1, put(7)),
        (2, 3, Call::FlushPool),
        (4, 5, Call::Get(Some(7))),
    ]);
    assert!(!DROPPING.explain(&pool_flushed));
    let overlapping = history(&[
        (0, 3, put(7)),
        (2, 4, Call::FlushPool),
        (5, 6, Call::Get(Some(7))),
    ]);
    assert!(PRIVATE.explain(&overlapping));
}

#[test]
fn the_check_knows_puts_of_one_call_that_changed_places() {
    let mut puts = history(&[
        (0, 3, put(7)),
        (0, 4, put_over(8)),
        (5, 6, Call::Get(Some(8))),
    ]);
    puts[1].after = Some(7);
    assert!(PRIVATE.explain(&puts));
    puts[2].call = Call::Get(Some(7));
    assert!(!DROPPING.explain(&puts));
}

#[test]
fn the_check_knows_a_page_from_the_future() {
    let future = history(&[(0, 1, Call::Get(Some(7))), (2, 3, put(7))]);
    assert!(!SHARED.explain(&future));
    let overlapping = history(&[(0, 2, Call::Get(Some(7))), (1, 3, put(7))]);
    assert!(SHARED.explain(&overlapping));
}

#[test]
fn the_check_allows_a_miss_only_where_pages_may_drop() {
    let missed = history(&[(0, 1, put(7)), (2, 3, Call::Get(None))]);
    assert!(!PRIVATE.explain(&missed));
    assert!(DROPPING.explain(&missed));
    let back = history(&[
        (0, 1, put(7)),
        (2, 3, Call::Peek(None)),
        (4, 5, Call::Peek(Some(7))),
    ]);
    assert!(!DROPPING.explain(&back));
}
