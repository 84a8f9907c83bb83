#![allow(clippy::cast_possible_truncation, reason = "sizes of tests are small")]

use std::env;
use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use plimsoll_disk::protocol::control;
use plimsoll_disk::{
    Direct, DiskOptions, Machine, MachineHandle, MachineOptions, PAGE_BYTES, Socket,
    VictimCacheStats,
};
use plimsoll_driver::{
    ControlDisk, Driver, DriverOptions, FrontendError, NoticeRing, Ram, RamOptions, RingOptions,
};
use plimsoll_hcache::{Store, StoreOptions};
use plimsoll_ring::{Server, ServerOptions};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::*;

/// A server in a thread, until it is dropped.
struct ServerThread {
    stop: plimsoll_ring::StopHandle,
    thread: Option<thread::JoinHandle<()>>,
}

impl ServerThread {
    fn at(socket: &Path) -> Self {
        Self::of(socket, 32 << 20)
    }

    fn of(socket: &Path, capacity_bytes: u64) -> Self {
        let store = Store::new(StoreOptions::new(capacity_bytes)).unwrap();
        let server = Server::bind(socket, store.clone(), ServerOptions::default()).unwrap();
        let stop = server.stop_handle();
        let run = move || server.run(&|| "{}".to_owned(), &|bytes| store.resize(bytes));
        let serve = move || run().unwrap();
        Self {
            stop,
            thread: Some(thread::spawn(serve)),
        }
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn found(behind: &mut HcacheClient, pool: u32, block: u64, count: u32) -> Vec<(u32, u8)> {
    let mut found = Vec::new();
    let each = &mut |index, page: &Page| found.push((index, page[4095]));
    behind.get(pool, block, count, each).unwrap();
    found.sort_unstable();
    found
}

fn put(behind: &mut HcacheClient, pool: u32, blocks: impl IntoIterator<Item = u64>) {
    for block in blocks {
        let content = [block.to_le_bytes()[0]; 4096];
        behind.put(pool, block, &content).unwrap();
    }
}

#[test]
fn puts_in_progress_are_counted_once_and_precede_every_later_call() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("hcache");
    let served = ServerThread::at(&socket);
    let mut behind = HcacheClient::new(&socket, "test");
    let pool = opened(&mut behind, PoolRequest::Private);
    // More than there are slots.
    put(&mut behind, pool, 0..1000);
    // A get waits for them.
    assert_eq!(found(&mut behind, pool, 1000, 1), []);
    assert_eq!(behind.collect_puts().unwrap(), 1000);
    assert_eq!(behind.collect_puts().unwrap(), 0);
    put(&mut behind, pool, 1000..1003);
    behind.flush(pool, 1001, 1).unwrap();
    assert_eq!(
        found(&mut behind, pool, 999, 4),
        [(0, 231), (1, 232), (3, 234)]
    );
    put(&mut behind, pool, [7]);
    put(&mut behind, pool, [7]);
    behind.flush_pool(pool).unwrap();
    assert_eq!(found(&mut behind, pool, 0, 100), []);
    assert_eq!(behind.collect_puts().unwrap(), 5);
    drop(served);
    put(&mut behind, pool, [1]);
    assert!(behind.get(pool, 1, 1, &mut |_, _| panic!("found")).is_err());
    assert!(behind.put(pool, 1, &[0; 4096]).is_err());
    assert_eq!(behind.collect_puts().unwrap(), 0, "of no connection");
}

#[test]
fn pages_come_back_until_they_are_taken_or_flushed() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("hcache");
    let _served = ServerThread::at(&socket);
    let mut behind = HcacheClient::new(&socket, "test");
    let private = opened(&mut behind, PoolRequest::Private);
    let shared = opened(&mut behind, PoolRequest::Shared { key: 7 });
    // Across the border of two objects, and more than there are slots.
    let begin: u32 = (3 << OBJECT_SHIFT) - 100;
    for pool in [private, shared] {
        put(&mut behind, pool, (begin..begin + 200).map(u64::from));
    }
    let all: Vec<_> = (0..200_u32)
        .map(|i| (i, (begin + i).to_le_bytes()[0]))
        .collect();
    let begin = u64::from(begin);
    assert_eq!(found(&mut behind, private, begin, 200), all);
    assert_eq!(found(&mut behind, private, begin, 200), []);
    assert_eq!(found(&mut behind, shared, begin, 200), all);
    // A few one by one, many as ranges.
    behind.flush(shared, begin + 10, 2).unwrap();
    behind.flush(shared, begin + 50, 100).unwrap();
    let left = found(&mut behind, shared, begin, 200);
    let kept = |i| !(10..12).contains(&i) && !(50..150).contains(&i);
    let expected: Vec<_> = all.iter().copied().filter(|(i, _)| kept(*i)).collect();
    assert_eq!(left, expected);
    // What another client of the same key has.
    let mut other = HcacheClient::new(&socket, "other");
    let same = opened(&mut other, PoolRequest::Shared { key: 7 });
    assert_eq!(found(&mut other, same, begin, 200), expected);
    behind.flush_pool(shared).unwrap();
    assert_eq!(found(&mut other, same, begin, 200), []);

    // Of two that opened one shared pool, one closes it.
    let twice = opened(&mut behind, PoolRequest::Shared { key: 7 });
    behind.close(twice).unwrap();
    put(&mut behind, shared, [1]);
    assert_eq!(found(&mut behind, shared, 1, 1), [(0, 1)]);

    put(&mut behind, private, [1]);
    behind.close(private).unwrap();
    assert!(behind.put(private, 1, &[0; 4096]).is_err());
    let again = behind.open(PoolRequest::Private).unwrap();
    assert!(again > shared);
    assert_eq!(found(&mut behind, again, 1, 1), []);
}

#[test]
fn a_server_that_goes_takes_its_pools_and_another_is_found_later() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("hcache");
    let mut behind = HcacheClient::new(&socket, "test");
    let none = behind.open(PoolRequest::Private).unwrap_err();
    assert_eq!(none.kind(), io::ErrorKind::NotConnected);
    let served = ServerThread::at(&socket);
    let pool = opened(&mut behind, PoolRequest::Private);
    put(&mut behind, pool, [1]);
    drop(served);
    assert!(behind.get(pool, 1, 1, &mut |_, _| panic!("found")).is_err());
    assert!(behind.flush(pool, 1, 1).is_err());
    let _served = ServerThread::at(&socket);
    let other = opened(&mut behind, PoolRequest::Private);
    assert!(other > pool);
    assert!(behind.put(pool, 1, &[0; 4096]).is_err());
    assert_eq!(found(&mut behind, other, 1, 1), []);
    put(&mut behind, other, [1]);
}

#[test]
fn a_server_that_refuses_the_ring_is_out_of_reach_for_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("hcache");
    // The ring takes 2 MiB.
    let served = ServerThread::of(&socket, 2 << 20);
    let mut behind = HcacheClient::new(&socket, "test");
    let latest = Instant::now() + CONNECTING_MAX;
    while behind.failure().is_none() && Instant::now() < latest {
        assert!(!behind.is_in_reach());
        thread::sleep(Duration::from_millis(10));
    }
    let why = behind.failure().unwrap();
    assert!(why.starts_with("the hcache server refuses: "), "{why}");
    drop(served);
    let _served = ServerThread::at(&socket);
    opened(&mut behind, PoolRequest::Private);
    assert_eq!(behind.failure(), None);
}

/// Opens a pool as soon as there is a connection.
fn opened(behind: &mut HcacheClient, pool: PoolRequest) -> u32 {
    loop {
        match behind.open(pool) {
            Ok(pool) => return pool,
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Environment variable with the socket of a server process.
const SOCKET: &str = "PLIMSOLL_TEST_HCACHE_SOCKET";

#[test]
#[ignore = "a server for a test of this file"]
fn serves_until_it_is_killed() {
    let socket = env::var_os(SOCKET).expect("started by a test");
    let served = ServerThread::at(socket.as_ref());
    loop {
        thread::park();
        assert!(served.thread.is_some());
    }
}

/// A server in a process of its own: this test program again.
struct ServerProcess(Child);

impl ServerProcess {
    fn at(socket: &Path) -> Self {
        let test = concat!(module_path!(), "::serves_until_it_is_killed");
        let (_, test) = test.split_once("::").expect("the crate's name first");
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--ignored"])
            .env(SOCKET, socket)
            .stdout(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

const BLOCKS: u64 = 512;

/// A guest whose disk and pool are used at random, and its daemon.
struct Guest {
    disk: Driver,
    control: ControlDisk,
    ring: NoticeRing,
    pool: u32,
    /// How often each block was written.
    versions: Vec<u64>,
    hits: u64,
    random: fastrand::Rng,
    handle: MachineHandle,
    thread: Option<JoinHandle<()>>,
    _folder: TempDir,
}

impl Guest {
    fn behind(hcache: &Path) -> Self {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let at = |name: &str| folder.path().join(name);
        let image = File::create(at("image")).unwrap();
        image.set_len(BLOCKS * PAGE_BYTES as u64).unwrap();
        let mut machine = Machine::new(MachineOptions {
            disks: vec![DiskOptions {
                image: at("image"),
                socket: Socket::Path(at("disk")),
                read_only: false,
                serial: String::new(),
                queues: 1,
                direct: Direct::Auto,
            }],
            control: Some(Socket::Path(at("control"))),
            victim_cache: Some(Box::new(HcacheClient::new(hcache, "test"))),
            sweep: false,
            ..MachineOptions::default()
        })
        .unwrap();
        let handle = machine.handle();
        let thread = Some(thread::spawn(move || machine.run().unwrap()));
        let ram = Ram::new(&RamOptions::default()).unwrap();
        let connect = |name| Driver::connect(&ram, &at(name), DriverOptions::default()).unwrap();
        let disk = connect("disk");
        let mut control = ControlDisk::new(connect("control"));
        let ring = NoticeRing::new(&ram, RingOptions::default());
        control.attach(&ring).unwrap();
        let pool = loop {
            match control.command(control::POOL_OPEN, [control::POOL_PRIVATE, 0, 0, 0]) {
                Ok(pool) => break pool.try_into().unwrap(),
                Err(FrontendError::Refused(_)) => thread::sleep(Duration::from_millis(10)),
                Err(error) => panic!("{error}"),
            }
        };
        let mut guest = Self {
            disk,
            control,
            ring,
            pool,
            versions: vec![0; BLOCKS as usize],
            hits: 0,
            random: fastrand::Rng::with_seed(18),
            handle,
            thread,
            _folder: folder,
        };
        for block in 0..BLOCKS {
            guest.write(block);
        }
        guest
    }

    fn contents(&self, block: u64) -> Page {
        let mut page = [self.versions[block as usize] as u8; PAGE_BYTES];
        page[..8].copy_from_slice(&block.to_le_bytes());
        page[8..16].copy_from_slice(&self.versions[block as usize].to_le_bytes());
        page
    }

    /// As the target does: what the pool has of the block is flushed, then it is written.
    fn write(&mut self, block: u64) {
        let count = match self.random.u32(..64) {
            0 => 1 << OBJECT_SHIFT,
            1..4 => FLUSHES_MAX + 1,
            _ => 1,
        };
        self.ring.flush(self.pool, block, count);
        self.versions[block as usize] += 1;
        let page = self.contents(block);
        self.disk.write(block * PAGE_BYTES as u64, &page).unwrap();
    }

    /// A block is written, put, got or read.
    fn step(&mut self) {
        let block = self.random.u64(..BLOCKS);
        let contents = self.contents(block);
        match self.random.u32(..8) {
            0 => self.write(block),
            1..5 => {
                self.ring.put(self.pool, block, &contents);
                self.control.kick().unwrap();
            }
            5..7 => {
                let found = self.control.get(self.pool, block, 1).unwrap();
                if let Some(page) = &found[0] {
                    self.hits += 1;
                    assert_eq!(page[..16], contents[..16], "block {block} is stale");
                    assert_eq!(**page, contents);
                }
            }
            _ => {
                let mut page = [0; PAGE_BYTES];
                self.disk
                    .read(block * PAGE_BYTES as u64, &mut page)
                    .unwrap();
                assert_eq!(page, contents);
            }
        }
    }

    fn stats(&self) -> VictimCacheStats {
        self.handle.stats().unwrap().victim_cache
    }

    /// Steps until this many more gets have hit.
    fn hit(&mut self, more: u64) {
        let upto = self.hits + more;
        while self.hits < upto {
            self.step();
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.handle.stop().unwrap();
        let ran = self.thread.take().unwrap().join();
        if !thread::panicking() {
            ran.unwrap();
        }
    }
}

#[test]
fn a_server_that_is_stopped_holds_up_one_request_and_gives_nothing_stale_when_it_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("hcache");
    let server = ServerProcess::at(&socket);
    let mut guest = Guest::behind(&socket);
    for stops in 1..=3 {
        guest.hit(200);
        assert_eq!(guest.stats().timeouts, stops - 1);
        thread::scope(|scope| {
            // In the midst of whatever it does.
            let pause = Duration::from_micros(guest.random.u64(..5000));
            let server = &server;
            scope.spawn(move || {
                thread::sleep(pause);
                server.signal(Signal::STOP);
            });
            while guest.stats().timeouts < stops {
                guest.step();
            }
        });
        let hits = guest.hits;
        for _ in 0..1000 {
            guest.step();
        }
        // A pool without a server: one request has waited, and no other.
        let stats = guest.stats();
        assert_eq!((stats.timeouts, guest.hits), (stops, hits));
        server.signal(Signal::CONT);
    }
    guest.hit(200);
    // Nor does the end of the guest wait, nor one that comes meanwhile.
    server.signal(Signal::STOP);
    let mut late = HcacheClient::new(&socket, "late");
    for _ in 0..1000 {
        let none = late.open(PoolRequest::Private).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::NotConnected);
    }
    drop(guest);
}
