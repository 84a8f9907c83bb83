//! Each invalid input gets its answer, is counted, and affects only its sender.

mod common;

use std::io::Write;
use std::time::Duration;

use common::{Raw, ServerThread, dial, entry, reply, signed, wait_for_end, wait_until};
use plimsoll_hcache::{Handle, PoolId, PoolOptions};
use plimsoll_ring::protocol::{
    CREATE_CAPACITY, CREATE_SHARED, Op, REQUEST_BYTES_MAX, Reply, Request, Status, Submission,
    VERSION, message,
};
use plimsoll_ring::{ClientLimits, ConnectOptions, Connection, Refusal, ServerOptions, Word};

#[test]
fn each_bad_entry_gets_its_status_and_the_ring_goes_on() {
    let running = ServerThread::new(ServerOptions::default());
    let mut other = Raw::connect(running.path(), 4, 1);
    let foreign = other.pool();
    let mut raw = Raw::connect(running.path(), 8, 2);
    let pool = raw.pool();
    let put = entry(Op::Put, pool);
    for (bad, status) in [
        (Submission { op: 9, ..put }, Status::BadOp),
        (Submission { op: 255, ..put }, Status::BadOp),
        (Submission { flags: 1, ..put }, Status::BadFlags),
        (Submission { reserved: 1, ..put }, Status::BadFlags),
        (
            Submission {
                flags: CREATE_SHARED | CREATE_CAPACITY | 4,
                ..entry(Op::CreatePool, pool)
            },
            Status::BadFlags,
        ),
        (Submission { slot: 2, ..put }, Status::BadSlot),
        (
            Submission {
                slot: u32::MAX,
                ..entry(Op::Get, pool)
            },
            Status::BadSlot,
        ),
        (
            Submission {
                index: 2,
                last: 1,
                ..entry(Op::FlushRange, pool)
            },
            Status::BadRange,
        ),
        (entry(Op::Put, foreign), Status::NoSuchPool),
        (entry(Op::Get, foreign), Status::NoSuchPool),
        (entry(Op::Flush, foreign), Status::NoSuchPool),
        (entry(Op::FlushRange, foreign), Status::NoSuchPool),
        (entry(Op::FlushObject, foreign), Status::NoSuchPool),
        (entry(Op::FlushPool, foreign), Status::NoSuchPool),
        (entry(Op::DestroyPool, foreign), Status::NoSuchPool),
        (entry(Op::Get, PoolId(u32::MAX)), Status::NoSuchPool),
    ] {
        assert_eq!(raw.call(bad), (status, 0), "{bad:?}");
    }
    // An entry that was never written holds what was there a round ago.
    for _ in 0..8 {
        assert_eq!(raw.call(put).0, Status::Ok);
    }
    raw.written = raw.written.wrapping_add(1);
    raw.publish();
    assert_eq!(raw.completion().status, Status::Torn as i32);
    raw.tell_head(raw.reaped);
    assert_eq!(raw.call(put), (Status::Ok, 1));
    running.wait_for("all entries counted", |counters| {
        counters.entries == 1 + 1 + 16 + 8 + 1 + 1
    });
    let counters = running.counters();
    let counted = [
        counters.bad_torn,
        counters.bad_op,
        counters.bad_flags,
        counters.bad_slot,
        counters.bad_range,
        counters.bad_no_such_pool,
        counters.bad_too_many_pools,
        counters.bad_failed,
    ];
    assert_eq!(counted, [1, 2, 3, 2, 1, 8, 0, 0]);
}

#[test]
fn an_entry_at_the_very_first_place_that_was_not_written_is_torn() {
    let running = ServerThread::new(ServerOptions::default());
    let mut raw = Raw::connect(running.path(), 4, 1);
    raw.publish_tail(1);
    assert_eq!(raw.completion().status, Status::Torn as i32);
}

#[test]
fn positions_that_cannot_be_end_the_client_and_free_its_share() {
    let running = ServerThread::new(ServerOptions::default());
    let mut witness = Raw::connect(running.path(), 4, 1);
    let pool = witness.pool();
    assert_eq!(witness.call(entry(Op::Put, pool)).0, Status::Ok);
    let corruptions: [fn(&mut Raw); 5] = [
        |raw| raw.publish_tail(raw.written + 5),
        |raw| raw.publish_tail(raw.written - 1),
        |raw| raw.publish_tail(raw.written.wrapping_add(1 << 31)),
        |raw| {
            raw.tell_head(raw.reaped + 1);
            raw.publish_tail(raw.written + 1);
        },
        |raw| {
            raw.tell_head(raw.reaped - 2);
            raw.publish_tail(raw.written + 1);
        },
    ];
    for (at, corrupt) in (0..).zip(corruptions) {
        let mut raw = Raw::connect(running.path(), 4, 1);
        let pool = raw.pool();
        assert_eq!(raw.call(entry(Op::Put, pool)).0, Status::Ok);
        assert_eq!(running.store.stats().pages, 2);
        corrupt(&mut raw);
        wait_for_end(&mut raw.socket);
        running.wait_for("the client gone", |counters| {
            counters.clients_left == at + 1
        });
        assert_eq!(running.counters().closed_corrupt_ring, at + 1);
        assert_eq!(running.store.stats().pages, 1);
    }
    assert_eq!(witness.call(entry(Op::Get, pool)).0, Status::Ok);
}

#[test]
fn what_a_client_writes_over_the_head_of_its_ring_changes_nothing() {
    let running = ServerThread::new(ServerOptions::default());
    let mut raw = Raw::connect(running.path(), 4, 1);
    let pool = raw.pool();
    for word in [
        Word::Magic,
        Word::Version,
        Word::Entries,
        Word::Slots,
        Word::SubmissionHead,
        Word::CompletionTail,
    ] {
        raw.region.overwrite(word as usize, &[0xff; 4]);
    }
    let slot = Submission {
        slot: 1,
        ..entry(Op::Put, pool)
    };
    // The server's own word is correct again with the next completion, and the ring has as many places as before.
    for _ in 0..6 {
        raw.write(slot);
        raw.publish();
        let expected = raw.reaped + 1;
        wait_until("the tail", || {
            let tail = raw.region.word(Word::CompletionTail);
            tail.load(std::sync::atomic::Ordering::Acquire) == expected
        });
        assert_eq!(raw.completion().status, Status::BadSlot as i32);
        raw.tell_head(raw.reaped);
    }
}

#[test]
fn a_client_that_takes_no_completions_is_waited_for_and_loses_none() {
    let running = ServerThread::new(ServerOptions::default());
    let mut raw = Raw::connect(running.path(), 4, 1);
    for _ in 0..4 {
        raw.write(entry(Op::Nop, PoolId(0)));
    }
    raw.publish();
    wait_until("a full ring of completions", || raw.ready() == 4);
    for _ in 0..4 {
        raw.write(entry(Op::Nop, PoolId(0)));
    }
    raw.publish();
    // Others are served meanwhile, and the worker sleeps.
    let mut other = Raw::connect(running.path(), 4, 1);
    assert_eq!(other.call(entry(Op::Nop, PoolId(0))).0, Status::Ok);
    let sleeps = running.counters().worker_sleeps;
    running.wait_for("a sleep", |counters| counters.worker_sleeps > sleeps);
    assert_eq!(raw.ready(), 4);
    raw.completion();
    raw.tell_head(1);
    for _ in 0..4 {
        raw.completion();
    }
    assert_eq!(raw.ready(), 0);
    raw.tell_head(5);
    for _ in 0..3 {
        raw.completion();
    }
}

#[test]
fn a_pool_too_many_is_refused() {
    let running = ServerThread::new(ServerOptions::default());
    let mut connection = Connection::connect(running.path(), &ConnectOptions::new("many")).unwrap();
    let mut made = 0;
    let refused = loop {
        match connection.create_pool(PoolOptions::private()) {
            Ok(_) => made += 1,
            Err(error) => break error,
        }
        assert!(made <= 32);
    };
    assert!(matches!(refused, plimsoll_ring::Error::TooManyPools));
    assert_eq!(made, 32);
    assert_eq!(running.counters().bad_too_many_pools, 1);
}

fn hello(entries: u32, slots: u32, name: &[u8]) -> Request {
    Request::Hello {
        version: VERSION,
        entries,
        slots,
        flags: 0,
        name: name.to_vec(),
    }
}

#[test]
fn a_hello_that_cannot_be_met_is_refused_with_its_reason() {
    let running = ServerThread::new(ServerOptions::default());
    let with = |version, flags| Request::Hello {
        version,
        entries: 4,
        slots: 1,
        flags,
        name: Vec::new(),
    };
    for (request, refusal) in [
        (with(VERSION + 1, 0), Refusal::Version),
        (with(VERSION, 1), Refusal::Version),
        (hello(0, 1, b""), Refusal::Geometry),
        (hello(3, 1, b""), Refusal::Geometry),
        (hello(8192, 1, b""), Refusal::Geometry),
        (hello(4, 0, b""), Refusal::Geometry),
        (hello(4, u32::MAX, b""), Refusal::Geometry),
        (hello(4, 1, &[b'x'; 65]), Refusal::Name),
        (hello(4, 1, b"two\nlines"), Refusal::Name),
        (hello(4, 1, &[0xff]), Refusal::Name),
    ] {
        let mut socket = dial(running.path());
        socket.write_all(&request.to_bytes()).unwrap();
        let (answer, descriptors) = reply(&mut socket);
        assert!(
            matches!(answer, Reply::Refused(found, _) if found == refusal),
            "{answer:?}"
        );
        assert!(descriptors.is_empty());
        wait_for_end(&mut socket);
    }
    let counters = running.counters();
    let counted = [
        counters.refused_version,
        counters.refused_geometry,
        counters.refused_name,
        counters.clients_joined,
    ];
    assert_eq!(counted, [2, 5, 3, 0]);
}

#[test]
fn bad_messages_close_their_connection_and_no_other() {
    let options = ServerOptions {
        idle_timeout: Duration::from_millis(300),
        ..ServerOptions::default()
    };
    let running = ServerThread::new(options);
    let mut witness = Raw::connect(running.path(), 4, 1);
    let bytes_of = |length: u32, kind: u32, payload: usize| {
        let head = [length.to_le_bytes(), kind.to_le_bytes()];
        [head.as_flattened(), &vec![0; payload]].concat()
    };
    let send = |bytes: &[u8]| {
        let mut socket = dial(running.path());
        socket.write_all(bytes).unwrap();
        socket
    };
    let closed = |bytes: &[u8]| wait_for_end(&mut send(bytes));
    closed(&bytes_of(REQUEST_BYTES_MAX + 1, message::HELLO, 0));
    closed(&bytes_of(u32::MAX, message::HELLO, 100));
    closed(&bytes_of(0, message::WELCOME, 0));
    closed(&bytes_of(4, message::STATS, 4));
    closed(&bytes_of(8, message::HELLO, 8));
    // The end in the middle of a message.
    drop(send(&bytes_of(100, message::HELLO, 99)));
    drop(send(&[1]));
    // Half a message and then silence; silence from the beginning.
    closed(&bytes_of(100, message::HELLO, 99));
    closed(&[]);
    // A message where none is permitted.
    let mut raw = Raw::connect(running.path(), 4, 1);
    raw.socket.write_all(&Request::Stats.to_bytes()).unwrap();
    wait_for_end(&mut raw.socket);
    let hello = hello(4, 1, b"").to_bytes();
    closed(&[&hello[..], &hello].concat());

    running.wait_for("all counted", |counters| counters.closed_torn == 2);
    let counters = running.counters();
    let counted = [
        counters.closed_oversized,
        counters.closed_unknown,
        counters.closed_malformed,
        counters.closed_timeout,
        counters.closed_unexpected,
    ];
    assert_eq!(counted, [2, 1, 2, 2, 2]);
    // The witness has been silent on its socket for longer than the timeout: with a ring it may.
    assert_eq!(witness.call(entry(Op::Nop, PoolId(0))).0, Status::Ok);
}

#[test]
fn clients_past_the_limits_are_refused() {
    let connect = |running: &ServerThread| {
        Connection::connect(running.path(), &ConnectOptions::new("")).map_err(|error| match error {
            plimsoll_ring::Error::Refused { refusal, .. } => refusal,
            error => panic!("{error}"),
        })
    };
    let running = ServerThread::new(ServerOptions {
        max_clients: 2,
        ..ServerOptions::default()
    });
    let first = connect(&running).unwrap();
    let _second = connect(&running).unwrap();
    assert_eq!(connect(&running).err(), Some(Refusal::TooManyClients));
    drop(first);
    running.wait_for("one gone", |counters| counters.clients_left == 1);
    assert!(connect(&running).is_ok());

    let running = ServerThread::new(ServerOptions {
        limits: ClientLimits {
            max_clients: 1,
            ceiling_bytes: Some(1 << 20),
            weight: 7,
            ..ClientLimits::default()
        },
        ..ServerOptions::default()
    });
    let _first = connect(&running).unwrap();
    let stats = running.store.stats().clients.remove(0);
    assert_eq!((stats.ceiling_bytes, stats.weight), (Some(1 << 20), 7));
    assert_eq!(connect(&running).err(), Some(Refusal::TooManyOfUser));

    // A floor that the store cannot give.
    let running = ServerThread::new(ServerOptions {
        limits: ClientLimits {
            weight: 0,
            ..ClientLimits::default()
        },
        ..ServerOptions::default()
    });
    assert_eq!(connect(&running).err(), Some(Refusal::Store));
}

#[test]
fn a_hostile_neighbour_changes_nobodys_pages() {
    let running = ServerThread::new(ServerOptions::default());
    let mut good = Connection::connect(running.path(), &ConnectOptions::new("good")).unwrap();
    let pool = good.create_pool(PoolOptions::private()).unwrap();
    let mut bad = Raw::connect(running.path(), 64, 4);
    // Every operation on the good client's pool and the numbers beside it.
    let mut random = 1_u64;
    for round in 0..200 {
        let handle = Handle {
            pool,
            object: 0,
            index: round,
        };
        assert!(good.put(handle, &signed(handle, 0)).unwrap().is_stored());
        for _ in 0..64 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let op = Op::ALL[(random >> 33) as usize % Op::ALL.len()];
            bad.write(Submission {
                index: (random >> 40) as u32 % 256,
                slot: (random >> 50) as u32 % 8,
                last: 255,
                ..entry(op, PoolId(pool.0 ^ (random >> 62) as u32))
            });
        }
        bad.publish();
        for _ in 0..64 {
            bad.completion();
        }
        bad.tell_head(bad.reaped);
    }
    for index in 0..200 {
        let handle = Handle {
            pool,
            object: 0,
            index,
        };
        let mut page = [0; 4096];
        assert!(good.get(handle, &mut page).unwrap());
        assert_eq!(page, signed(handle, 0));
    }
}
