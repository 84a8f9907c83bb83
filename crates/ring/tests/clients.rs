//! Clients come, work, leave, are killed, and outlive their server.

mod common;

use plimsoll_skip::{Lack, skip};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use std::{env, fs, io, thread};

use common::{Raw, ServerThread, c_client, dial, signed, wait_until};
use plimsoll_hcache::{Handle, PoolOptions, PutOutcome, Store, StoreOptions};
use plimsoll_ring::protocol::{Geometry, Op, Request, Status};
use plimsoll_ring::{
    ClientLimits, ConnectOptions, Connection, Error, Refusal, Server, ServerOptions, Word, resize,
    stats,
};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Environment variable with the socket for [`loads_a_server_until_it_is_killed`].
const SOCKET: &str = "PLIMSOLL_TEST_SOCKET";

fn connect(running: &ServerThread) -> Connection {
    Connection::connect(running.path(), &ConnectOptions::new("test")).unwrap()
}

#[test]
fn every_call_does_what_the_store_does() {
    let running = ServerThread::new(ServerOptions::default());
    let mut connection = connect(&running);
    let pool = connection.create_pool(PoolOptions::private()).unwrap();
    let handle = |index| Handle {
        pool,
        object: u64::MAX,
        index,
    };
    let mut page = [0; 4096];
    assert!(!connection.get(handle(0), &mut page).unwrap());
    let stored = |replaced| PutOutcome::Stored { replaced };
    let put = |connection: &mut Connection, index| {
        connection
            .put(handle(index), &signed(handle(index), 1))
            .unwrap()
    };
    assert_eq!(put(&mut connection, 0), stored(false));
    assert_eq!(put(&mut connection, 0), stored(true));
    assert!(connection.get(handle(0), &mut page).unwrap());
    assert_eq!(page, signed(handle(0), 1));
    assert!(!connection.get(handle(0), &mut page).unwrap());
    for index in [0, 1, 2, 3, u32::MAX] {
        put(&mut connection, index);
    }
    assert!(connection.flush(handle(1)).unwrap());
    assert!(!connection.flush(handle(1)).unwrap());
    assert_eq!(connection.flush_range(pool, u64::MAX, 1..=2).unwrap(), 1);
    assert_eq!(connection.flush_object(pool, 0).unwrap(), 0);
    assert_eq!(connection.flush_object(pool, u64::MAX).unwrap(), 3);
    put(&mut connection, 9);
    assert_eq!(connection.flush_pool(pool).unwrap(), 1);
    #[expect(clippy::reversed_empty_ranges, reason = "what is tested")]
    let bad = connection.flush_range(pool, 0, 2..=1);
    assert!(matches!(bad, Err(Error::Bad(Status::BadRange))));
    connection.destroy_pool(pool).unwrap();
    let gone = connection.put(handle(0), &page);
    assert!(matches!(gone, Err(Error::NoSuchPool(found)) if found == pool));

    let limited = PoolOptions {
        capacity_pages: Some(2),
        ..PoolOptions::shared(77)
    };
    let shared = connection.create_pool(limited).unwrap();
    let mut second = connect(&running);
    assert_eq!(second.create_pool(PoolOptions::shared(77)).unwrap(), shared);
    let of_store = running.store.stats();
    let capacities: Vec<_> = of_store.pools().map(|pool| pool.capacity_pages).collect();
    assert!(capacities.contains(&Some(2)));
    let handle = Handle {
        pool: shared,
        object: 1,
        index: 1,
    };
    connection.put(handle, &signed(handle, 2)).unwrap();
    for _ in 0..2 {
        assert!(second.get(handle, &mut page).unwrap());
        assert_eq!(page, signed(handle, 2));
    }
}

#[test]
fn batches_larger_than_the_ring_come_back_in_order() {
    let running = ServerThread::new(ServerOptions::default());
    let options = ConnectOptions {
        entries: 8,
        slots: 5,
        ..ConnectOptions::new("batch")
    };
    let mut connection = Connection::connect(running.path(), &options).unwrap();
    let pool = connection.create_pool(PoolOptions::private()).unwrap();
    let handle = |index| Handle {
        pool,
        object: 5,
        index,
    };
    for op in [Op::Put, Op::Get] {
        let (mut submitted, mut reaped) = (0, 0);
        while reaped < 3000 {
            while submitted < 3000
                && let Some(mut slot) = connection.reserve()
            {
                let user_data = u64::from(submitted);
                if op == Op::Put {
                    *connection.page(&mut slot) = signed(handle(submitted), 3);
                    connection
                        .submit_put(handle(submitted), slot, user_data)
                        .unwrap();
                } else {
                    connection
                        .submit_get(handle(submitted), slot, user_data)
                        .unwrap();
                }
                submitted += 1;
            }
            connection.wait().unwrap();
            while let Some(done) = connection.reap().unwrap() {
                assert_eq!(
                    (done.user_data, done.status),
                    (u64::from(reaped), Status::Ok)
                );
                let mut slot = done.slot.unwrap();
                assert_eq!(*connection.page(&mut slot), signed(handle(reaped), 3));
                connection.release(slot);
                reaped += 1;
            }
        }
        assert_eq!((connection.free_slots(), connection.room()), (5, 8));
    }
    // More than the ring holds, without slots, and a simple call in the middle.
    for index in 0..20 {
        connection
            .submit_flush(handle(index), u64::from(index))
            .unwrap();
    }
    assert!(connection.put(handle(0), &[0; 4096]).unwrap().is_stored());
    for index in 0..20 {
        connection.wait().unwrap();
        let done = connection.reap().unwrap().unwrap();
        assert_eq!((done.user_data, done.value), (index, 0));
    }
    assert!(connection.reap().unwrap().is_none());
    connection.wait().unwrap();
}

#[test]
fn many_clients_join_and_leave_and_see_only_their_own_pages() {
    let running = ServerThread::new(ServerOptions {
        workers: 2,
        ..ServerOptions::default()
    });
    let hits = AtomicU64::new(0);
    thread::scope(|scope| {
        for worker in 0..6_u64 {
            let (running, hits) = (&running, &hits);
            scope.spawn(move || {
                for life in 0..30 {
                    let of = worker << 32 | life;
                    let mut connection = connect(running);
                    let pool = connection.create_pool(PoolOptions::private()).unwrap();
                    for index in 0..100 {
                        let handle = Handle {
                            pool,
                            object: 1,
                            index,
                        };
                        connection.put(handle, &signed(handle, of)).unwrap();
                    }
                    for index in 0..100 {
                        let handle = Handle {
                            pool,
                            object: 1,
                            index,
                        };
                        let mut page = [0; 4096];
                        if connection.get(handle, &mut page).unwrap() {
                            assert!(page == signed(handle, of), "wrong bytes");
                            hits.fetch_add(1, Relaxed);
                        }
                    }
                }
            });
        }
    });
    assert!(hits.load(Relaxed) > 6 * 30 * 50);
    assert_eq!(running.counters().clients_joined, 180);
    running.wait_until_empty();
}

/// Not a test of its own: the child of the next one.
#[test]
#[ignore = "run by a_killed_client_gives_everything_back"]
fn loads_a_server_until_it_is_killed() {
    let path = PathBuf::from(env::var_os(SOCKET).expect("a socket"));
    let mut connection = Connection::connect(path, &ConnectOptions::new("child")).unwrap();
    let pool = connection.create_pool(PoolOptions::private()).unwrap();
    for index in 0.. {
        while connection.free_slots() == 0 {
            connection.wait().unwrap();
            while let Some(done) = connection.reap().unwrap() {
                connection.release(done.slot);
            }
        }
        let slot = connection.reserve().unwrap();
        let handle = Handle {
            pool,
            object: 0,
            index: index % 1000,
        };
        connection.submit_put(handle, slot, 0).unwrap();
    }
}

#[test]
fn a_killed_client_gives_everything_back() {
    let running = ServerThread::new(ServerOptions::default());
    let mut witness = connect(&running);
    let pool = witness.create_pool(PoolOptions::private()).unwrap();
    let handle = Handle {
        pool,
        object: 1,
        index: 1,
    };
    witness.put(handle, &signed(handle, 4)).unwrap();
    for life in 1..=5 {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "loads_a_server_until_it_is_killed", "--ignored"])
            .env(SOCKET, running.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("pages of the child", || running.store.stats().pages >= 500);
        child.kill().unwrap();
        child.wait().unwrap();
        running.wait_for("the child gone", |counters| counters.clients_left == life);
        let left = running.store.stats();
        assert_eq!((left.pages, left.clients.len()), (1, 1));
    }
    let mut page = [0; 4096];
    assert!(witness.get(handle, &mut page).unwrap());
    assert_eq!(page, signed(handle, 4));
}

#[test]
fn a_page_that_was_got_stays_in_its_slot_when_the_server_ends() {
    let mut running = ServerThread::new(ServerOptions::default());
    let mut connection = connect(&running);
    let pool = connection.create_pool(PoolOptions::private()).unwrap();
    let handle = Handle {
        pool,
        object: 1,
        index: 1,
    };
    connection.put(handle, &signed(handle, 4)).unwrap();
    let slot = connection.reserve().unwrap();
    connection.submit_get(handle, slot, 0).unwrap();
    connection.wait().unwrap();
    running.stop();
    let done = connection.reap().unwrap().unwrap();
    assert_eq!(done.status, Status::Ok);
    let mut slot = done.slot.unwrap();
    assert_eq!(*connection.page(&mut slot), signed(handle, 4));
}

#[test]
fn a_client_that_closed_its_socket_keeps_no_memory_of_slots() {
    let running = ServerThread::new(ServerOptions::default());
    let Raw { region, socket, .. } = Raw::connect(running.path(), 4, 2);
    region.write_slot(1, &[7; 4096]);
    drop(socket);
    running.wait_until_empty();
    let mut page = [1; 4096];
    region.read_slot(1, &mut page);
    assert_eq!(page, [0; 4096]);
}

#[test]
fn a_client_sees_the_end_of_its_server_and_comes_back_to_the_next() {
    let mut running = ServerThread::new(ServerOptions::default());
    let mut waiting = connect(&running);
    let mut busy = connect(&running);
    let pool = busy.create_pool(PoolOptions::private()).unwrap();
    let handle = Handle {
        pool,
        object: 0,
        index: 0,
    };
    thread::scope(|scope| {
        let busy = scope.spawn(move || {
            loop {
                if let Err(error) = busy.put(handle, &[1; 4096]) {
                    return error;
                }
            }
        });
        let entries = running.counters().entries;
        running.wait_for("load", |counters| counters.entries > entries + 100);
        running.stop();
        assert!(matches!(busy.join().unwrap(), Error::Disconnected));
    });
    assert!(matches!(waiting.flush(handle), Err(Error::Disconnected)));
    assert!(matches!(waiting.flush(handle), Err(Error::Disconnected)));

    let unreachable = Connection::connect(running.path(), &ConnectOptions::new(""));
    assert!(matches!(unreachable, Err(Error::Unreachable { .. })));
    let store = Store::new(StoreOptions::new(16 << 20)).unwrap();
    let next = Server::bind(running.path(), store.clone(), ServerOptions::default()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            next.run(&String::new, &|bytes| store.resize(bytes))
                .unwrap();
        });
        let mut again = connect(&running);
        let pool = again.create_pool(PoolOptions::private());
        next.stop_handle().stop();
        assert!(pool.is_ok());
    });
}

#[test]
fn a_socket_is_taken_over_only_from_the_dead_and_removed_only_by_its_own_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hcache");
    let store = Store::new(StoreOptions::new(16 << 20)).unwrap();
    let bind = || Server::bind(&path, store.clone(), ServerOptions::default());

    fs::write(&path, "precious").unwrap();
    assert_eq!(bind().err().unwrap().kind(), io::ErrorKind::AlreadyExists);
    fs::remove_file(&path).unwrap();

    // What a killed server leaves.
    drop(UnixListener::bind(&path).unwrap());
    let first = bind().unwrap();
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    assert_eq!(bind().err().unwrap().kind(), io::ErrorKind::AddrInUse);

    fs::remove_file(&path).unwrap();
    let second = bind().unwrap();
    drop(first);
    assert!(path.exists());
    drop(second);
    assert!(!path.exists());
}

#[test]
fn statistics_of_any_size_arrive_and_who_does_not_read_them_holds_up_nobody() {
    let text = "x".repeat(8 << 20);
    let answer = text.clone();
    let running = ServerThread::with_stats(
        ServerOptions {
            idle_timeout: Duration::from_millis(500),
            ..ServerOptions::default()
        },
        move || answer.clone(),
    );
    let mut deaf = dial(running.path());
    deaf.write_all(&Request::Stats.to_bytes().repeat(100))
        .unwrap();
    for _ in 0..3 {
        assert!(stats(running.path(), TIMEOUT).unwrap() == text);
    }
    running.wait_for("the deaf one closed", |counters| {
        counters.closed_timeout == 1
    });
    let mut rest = Vec::new();
    deaf.read_to_end(&mut rest).unwrap_or_default();
    assert!(rest.len() < text.len());
}

#[test]
fn the_capacity_is_changed_over_the_socket() {
    let running = ServerThread::new(ServerOptions::default());
    resize(running.path(), 32 << 20, TIMEOUT).unwrap();
    assert_eq!(running.store.stats().capacity_bytes, 32 << 20);
    for bad in [0, 1 << 60] {
        let refused = resize(running.path(), bad, TIMEOUT);
        let refusal = Refusal::Store;
        assert!(matches!(refused, Err(Error::Refused { refusal: found, .. }) if found == refusal));
    }
    assert_eq!(running.store.stats().capacity_bytes, 32 << 20);
    assert_eq!(running.counters().resizes, 1);
    assert_eq!(running.counters().refused_store, 2);
    let nowhere = running.folder().join("nowhere");
    assert!(matches!(
        resize(&nowhere, 1, TIMEOUT),
        Err(Error::Unreachable { .. })
    ));
    assert!(matches!(
        stats(&nowhere, TIMEOUT),
        Err(Error::Unreachable { .. })
    ));
}

#[test]
fn a_server_that_does_not_answer_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hcache");
    let _mute = UnixListener::bind(&path).unwrap();
    let options = ConnectOptions {
        timeout: Duration::from_millis(50),
        ..ConnectOptions::new("")
    };
    let result = Connection::connect(&path, &options);
    assert!(matches!(result, Err(Error::Io(error)) if error.kind() == io::ErrorKind::TimedOut));
}

#[test]
fn the_c_client_does_all_calls_and_sees_the_end() {
    let mut running = ServerThread::new(ServerOptions::default());
    let mut child = Command::new(c_client(running.folder()))
        .arg(running.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "done\n");
    running.stop();
    assert!(child.wait().unwrap().success());
}

#[test]
fn the_c_header_has_the_layout_of_this_crate() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(c_client(folder.path())).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let numbers: Vec<i64> = text
        .lines()
        .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
        .collect();
    let mut expected = vec![
        i64::from(plimsoll_ring::protocol::VERSION),
        i64::from(plimsoll_ring::protocol::MAGIC),
        i64::try_from(plimsoll_ring::protocol::NAME_BYTES_MAX).unwrap(),
        i64::from(Geometry::ENTRIES_MAX),
        i64::from(Geometry::SLOTS_MAX),
    ];
    use plimsoll_ring::protocol::message;
    expected.extend(
        [
            message::HELLO,
            message::STATS,
            message::RESIZE,
            message::WELCOME,
            message::STATS_TEXT,
            message::RESIZED,
            message::REFUSED,
        ]
        .map(i64::from),
    );
    expected.extend(
        [
            Word::Magic,
            Word::Version,
            Word::Entries,
            Word::Slots,
            Word::SubmissionTail,
            Word::SubmissionHead,
            Word::CompletionTail,
            Word::CompletionHead,
            Word::ServerSleeping,
            Word::ClientSleeping,
        ]
        .map(|word| i64::try_from(word as usize).unwrap()),
    );
    expected.push(i64::try_from(Geometry::SUBMISSIONS_AT).unwrap());
    expected.extend(Op::ALL.map(|op| op as i64));
    expected.extend([1, 2]);
    let good = [Status::Ok, Status::Miss, Status::Refused];
    expected.extend(
        good.into_iter()
            .chain(Status::BAD)
            .map(|status| status as i64),
    );
    // Offsets in entries, as in docs/hcache-protocol.md, and as the words of `Submission` and `RawCompletion`
    // are assembled.
    expected.extend([0, 4, 5, 6, 8, 12, 16, 24, 28, 32, 40, 48, 56]);
    expected.extend([0, 8, 12, 16]);
    assert_eq!(numbers, expected, "{text}");
}

#[test]
fn another_user_is_let_in_only_if_listed() {
    const NOBODY: u32 = 65_534;
    if !rustix::process::geteuid().is_root() {
        skip(Lack::Root, "only root can take another user's part");
        return;
    }
    for (allowed, answer) in [
        (vec![], "Permission denied\n"),
        (vec![NOBODY], "connected\n"),
    ] {
        let running = ServerThread::new(ServerOptions {
            mode: 0o666,
            allowed_uids: allowed.clone(),
            ..ServerOptions::default()
        });
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(running.folder(), open).unwrap();
        let output = Command::new(c_client(running.folder()))
            .arg(running.path())
            .arg("only connect")
            .uid(NOBODY)
            .gid(NOBODY)
            .output()
            .unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), answer);
        running.wait_for("the answer to be counted", |counters| {
            counters.refused_not_allowed == u64::from(allowed.is_empty())
                && counters.clients_joined == allowed.len() as u64
        });
    }
}

#[test]
fn a_user_who_opens_connections_shuts_out_nobody_else() {
    let nobody = rustix::process::Uid::from_raw(65_534);
    if !rustix::process::geteuid().is_root() {
        skip(Lack::Root, "only root can take another user's part");
        return;
    }
    let running = ServerThread::new(ServerOptions {
        mode: 0o666,
        allowed_uids: vec![nobody.as_raw()],
        limits: ClientLimits {
            max_clients: 1,
            ..ClientLimits::default()
        },
        max_clients: 2,
        idle_timeout: Duration::from_secs(600),
        ..ServerOptions::default()
    });
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(running.folder(), open).unwrap();
    let connect = || Connection::connect(running.path(), &ConnectOptions::new(""));
    thread::scope(|scope| {
        let user = scope.spawn(|| {
            // Of this thread alone.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            let silent = [(); 100].map(|()| UnixStream::connect(running.path()).unwrap());
            let refused = connect().err().expect("to be refused");
            assert!(
                matches!(refused, Error::Refused { refusal, .. } if refusal == Refusal::TooManyClients),
                "{refused}"
            );
            silent
        });
        let silent = user.join().unwrap();
        let _one = connect().expect("root is let in");
        drop(silent);
    });
}

#[test]
fn users_who_take_what_they_get_leave_the_others_their_parts() {
    if !rustix::process::geteuid().is_root() {
        skip(Lack::Root, "only root can take another user's part");
        return;
    }
    let users = [65_531, 65_532, 65_533];
    let serve = |max_clients| {
        let running = ServerThread::new(ServerOptions {
            mode: 0o666,
            allowed_uids: users.to_vec(),
            max_clients,
            idle_timeout: Duration::from_secs(600),
            ..ServerOptions::default()
        });
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(running.folder(), open).unwrap();
        running
    };
    // Clients of a user, as many as it gets, and why there are no more.
    let take = |running: &ServerThread, user: u32, options: ConnectOptions| {
        let take = move |path: &Path| {
            let id = rustix::process::Uid::from_raw(user);
            // Of this thread alone.
            rustix::thread::set_thread_res_uid(id, id, id).unwrap();
            let mut clients = Vec::new();
            loop {
                match Connection::connect(path, &options) {
                    Ok(client) => clients.push(client),
                    Err(Error::Refused { refusal, text }) => return (clients, refusal, text),
                    Err(error) => panic!("{error}"),
                }
            }
        };
        let path = running.path();
        thread::scope(|scope| scope.spawn(move || take(path)).join().unwrap())
    };
    let usual = || ConnectOptions::new("");
    let running = serve(8);
    let (first, refusal, text) = take(&running, users[0], usual());
    assert_eq!(
        (first.len(), refusal),
        (5, Refusal::TooManyOfUser),
        "{text}"
    );
    assert!(text.contains("reserved"), "{text}");
    let (second, refusal, text) = take(&running, users[1], usual());
    assert_eq!(
        (second.len(), refusal),
        (1, Refusal::TooManyOfUser),
        "{text}"
    );
    let (third, ..) = take(&running, users[2], usual());
    let (own, refusal, text) = take(&running, 0, usual());
    assert_eq!((third.len(), own.len()), (1, 1));
    assert_eq!(refusal, Refusal::TooManyClients, "{text}");
    drop((first, second, third, own));

    // Rings of 4 MiB, of 32 for all of them.
    let large = || ConnectOptions {
        slots: 1000,
        ..usual()
    };
    let roomy = serve(256);
    let taken = users.map(|user| take(&roomy, user, large()));
    assert_eq!(taken.each_ref().map(|taken| taken.0.len()), [5, 1, 1]);
    assert!(taken.iter().all(|taken| taken.1 == Refusal::Store));
    assert_eq!(take(&roomy, 0, large()).0.len(), 1);
    running.wait_until_empty();

    // Connections, 8 for clients and 64 others.
    let silent = |user: u32| {
        let path = running.path();
        let connect = move || {
            let id = rustix::process::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(id, id, id).unwrap();
            [(); 72].map(|()| UnixStream::connect(path).unwrap())
        };
        thread::scope(|scope| scope.spawn(connect).join().unwrap())
    };
    let _silent = [silent(users[0]), silent(users[1])];
    assert_eq!(take(&running, users[2], usual()).0.len(), 5);
}

#[test]
fn a_connection_without_a_ring_ends_whatever_it_requests() {
    let running = ServerThread::new(ServerOptions {
        idle_timeout: Duration::from_secs(600),
        ringless_timeout: Duration::from_millis(300),
        ..ServerOptions::default()
    });
    let _client = Connection::connect(running.path(), &ConnectOptions::new("stays")).unwrap();
    let mut greedy = dial(running.path());
    let request = Request::Stats.to_bytes();
    let mut answer = [0; 10];
    while greedy.write_all(&request).is_ok() && greedy.read_exact(&mut answer).is_ok() {
        thread::sleep(Duration::from_millis(1));
    }
    let counters = running.counters();
    assert!(counters.stats > 2, "{counters:?}");
    assert_eq!((counters.closed_timeout, counters.clients_left), (1, 0));
}

#[test]
fn rings_are_charged_to_their_clients_and_leave_room_for_pages() {
    let running = ServerThread::new(ServerOptions::default());
    let large = ConnectOptions {
        slots: 2000,
        ..ConnectOptions::new("large")
    };
    let mut clients = Vec::new();
    let refused = loop {
        match Connection::connect(running.path(), &large) {
            Ok(client) => clients.push(client),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(&refused, Error::Refused { refusal: Refusal::Store, text } if text.contains("ring")),
        "{refused}"
    );
    // Half of 64 MiB, for rings of some 8 MB.
    assert_eq!(clients.len(), 4);
    let stats = running.store.stats();
    let rings: u64 = stats
        .clients
        .iter()
        .map(|client| client.outside_bytes)
        .sum();
    assert_eq!(rings, running.counters().ring_bytes);
    assert!((30 << 20..=32 << 20).contains(&rings), "{rings}");
    assert!(stats.used_bytes > rings && stats.used_bytes <= 64 << 20);
    assert!(
        stats
            .clients
            .iter()
            .all(|client| client.used_bytes == client.outside_bytes)
    );
    // A small one still fits, and all is given back.
    let small = ConnectOptions {
        slots: 1,
        ..ConnectOptions::new("small")
    };
    drop(Connection::connect(running.path(), &small).unwrap());
    drop(clients);
    running.wait_until_empty();
    wait_until("rings given back", || {
        running.store.stats().used_bytes < 4 << 20
    });
}
