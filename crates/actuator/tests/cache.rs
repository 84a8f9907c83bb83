//! Caches: of daemons that behave and that misbehave, of hcache, and of VMs without a daemon.

mod monitor;

use std::error::Error as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use monitor::{Monitor, peer};
use plimsoll_actuator::{
    Absence, ActuatorError, Delivery, DiskCache, Endpoints, FixedMemory, HcacheStore, Holding,
    MemoryPart, MemoryStatus, Progress, VmMemory,
};
use plimsoll_flow::VmId;
use plimsoll_hcache::{Store, StoreOptions};
use plimsoll_ring::{Server, ServerOptions};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(1);

/// State of a disk daemon, and how it handles a resize.
struct State {
    cache_bytes: u64,
    resize: Resize,
    deaf: bool,
}

enum Resize {
    Done,
    Refused,
    /// It closes the connection, after doing it or not.
    Broken {
        done: bool,
    },
    /// When the test sends the signal.
    Later(mpsc::Receiver<()>),
}

/// A disk daemon, which runs until the test's process ends.
struct Daemon {
    socket: PathBuf,
    state: Arc<Mutex<State>>,
    _folder: tempfile::TempDir,
}

impl Daemon {
    fn new() -> Self {
        // A daemon reserves the address space of its largest cache.
        static RESERVED: OnceLock<Vec<u8>> = OnceLock::new();
        RESERVED.get_or_init(|| Vec::with_capacity(4 << 30));
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("admin.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let state = Arc::new(Mutex::new(State {
            cache_bytes: 64 * MIB,
            resize: Resize::Done,
            deaf: false,
        }));
        let served = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, state) = (stream.unwrap(), Arc::clone(&served));
                thread::spawn(move || {
                    let mut line = String::new();
                    BufReader::new(&stream).read_line(&mut line).unwrap();
                    if let Some(answer) = answer(&serde_json::from_str(&line).unwrap(), &state) {
                        writeln!(stream, "{answer}").unwrap();
                    }
                });
            }
        });
        Self {
            socket,
            state,
            _folder: folder,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn memory(&self) -> VmMemory {
        let vm = VmId("web".into());
        let cache = DiskCache::new(&vm, peer(&self.socket), TIMEOUT);
        let direct = FixedMemory {
            vm: vm.clone(),
            memory_bytes: 512 * MIB,
        };
        VmMemory::new(vm, Box::new(direct), Some(Box::new(cache)))
    }
}

/// An answer, or none.
fn answer(request: &Value, state: &Mutex<State>) -> Option<Value> {
    let done = Some(json!({ "schema": 1, "result": null }));
    let mut locked = state.lock().unwrap();
    let State {
        cache_bytes,
        resize,
        deaf,
    } = &mut *locked;
    if *deaf {
        return None;
    }
    let Some(wanted_bytes) = request["cache_bytes"].as_u64() else {
        let engine = json!({
            "cache_bytes": *cache_bytes, "cached_pages": 16, "disabled": null, "read_blocks": 0, "hits": 0,
        });
        let machine = json!({ "engine": engine, "ring": { "guest_memory_pages": 0 } });
        return Some(json!({ "schema": 1, "result": { "machine": machine } }));
    };
    match std::mem::replace(resize, Resize::Done) {
        Resize::Done => {
            *cache_bytes = wanted_bytes;
            done
        }
        Resize::Refused => Some(json!({ "schema": 1, "error": "too large" })),
        Resize::Broken { done } => {
            if done {
                *cache_bytes = wanted_bytes;
            }
            None
        }
        Resize::Later(told) => {
            drop(locked);
            told.recv().unwrap();
            state.lock().unwrap().cache_bytes = wanted_bytes;
            done
        }
    }
}

/// Polls until no resize is in progress.
fn settled(memory: &mut VmMemory) -> MemoryStatus {
    loop {
        let status = memory.poll();
        if !matches!(status.cache.unwrap().progress, Progress::Following { .. }) {
            return status;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// MiB that the cache has, and MiB that are reserved for it.
fn mib(status: &MemoryStatus) -> (u64, u64) {
    let cache = |holding: Holding| holding.cache_bytes / MIB;
    (cache(status.holding()), cache(status.reserved()))
}

#[test]
fn a_cache_that_is_set_counts_with_its_larger_size_until_it_is() {
    let daemon = Daemon::new();
    let mut memory = daemon.memory();
    let status = memory.poll();
    assert_eq!(mib(&status), (64, 64));
    assert_eq!(status.disk.unwrap().cached_pages, 16);
    assert_eq!(status.cache.unwrap().progress, Progress::NoTarget);

    for (target_mib, meanwhile) in [(128, (64, 128)), (32, (128, 128))] {
        let (tell, told) = mpsc::channel();
        daemon.state().resize = Resize::Later(told);
        memory.set_cache(target_mib * MIB).unwrap();
        assert_eq!(mib(&memory.poll()), meanwhile);
        let error = memory.set_cache(MIB).unwrap_err();
        assert!(matches!(error, ActuatorError::Busy { .. }), "{error}");
        tell.send(()).unwrap();
        let status = settled(&mut memory);
        assert_eq!(mib(&status), (target_mib, target_mib));
        assert_eq!(status.cache.unwrap().progress, Progress::Reached);
        assert!(status.failures.is_empty(), "{status:?}");
    }
}

#[test]
fn a_refused_size_leaves_the_one_before() {
    let daemon = Daemon::new();
    let mut memory = daemon.memory();
    memory.poll();
    daemon.state().resize = Resize::Refused;
    memory.set_cache(1 << 40).unwrap();
    let status = settled(&mut memory);
    assert_eq!(mib(&status), (64, 64));
    assert_eq!(status.cache.unwrap().target_bytes, None);
    let [error] = &status.failures[..] else {
        panic!("{status:?}");
    };
    assert_eq!(error.sent(), Some(Delivery::No));
    let cause = error.source().unwrap().to_string();
    assert_eq!(cause, "the daemon refuses: too large");
}

#[test]
fn a_resize_that_broke_off_is_in_doubt_whether_it_was_done_or_not() {
    for done in [false, true] {
        let daemon = Daemon::new();
        let mut memory = daemon.memory();
        memory.poll();
        daemon.state().resize = Resize::Broken { done };
        memory.set_cache(128 * MIB).unwrap();
        // A poll may come in the middle.
        let failures = loop {
            let status = memory.poll();
            if !status.failures.is_empty() {
                break status.failures;
            }
            thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(failures[0].sent(), Some(Delivery::Maybe));
        let status = memory.poll();
        assert_eq!(mib(&status), (if done { 128 } else { 64 }, 128));
        assert!(status.cache.unwrap().in_doubt);
        memory.set_cache(64 * MIB).unwrap();
        let status = settled(&mut memory);
        assert_eq!(mib(&status), (64, 64));
        assert!(!status.cache.unwrap().in_doubt);
    }
}

#[test]
fn a_daemon_that_says_nothing_leaves_what_was_known() {
    let daemon = Daemon::new();
    let mut memory = daemon.memory();
    memory.poll();
    daemon.state().deaf = true;
    let status = memory.poll();
    assert_eq!((mib(&status), &status.disk), ((64, 64), &None));
    assert!(
        matches!(status.failures[..], [ActuatorError::Query { .. }]),
        "{status:?}"
    );
    std::fs::remove_file(&daemon.socket).unwrap();
    memory.set_cache(32 * MIB).unwrap();
    let status = settled(&mut memory);
    assert_eq!(mib(&status), (64, 64));
    assert_eq!(status.failures[0].sent(), Some(Delivery::No));
}

#[test]
fn a_claim_that_the_kernel_rules_out_is_refused() {
    let daemon = Daemon::new();
    let mut memory = daemon.memory();
    assert_eq!(mib(&memory.poll()), (64, 64));
    for claimed_bytes in [1 << 63, u64::MAX, 1 << 40] {
        daemon.state().cache_bytes = claimed_bytes;
        let status = memory.poll();
        assert_eq!((mib(&status), &status.disk), ((64, 64), &None));
        assert_eq!(status.reserved().cache_bytes, 64 * MIB);
        assert!(
            matches!(status.failures[..], [ActuatorError::Claim { .. }]),
            "{status:?}"
        );
    }
}

#[test]
fn a_vm_without_monitor_or_cache_cannot_be_changed() {
    let endpoints = Endpoints {
        vm: VmId("plain".into()),
        memory_bytes: 512 * MIB,
        ..Endpoints::default()
    };
    let mut failures = Vec::new();
    let mut memory = VmMemory::open(&endpoints, &mut failures);
    assert!(failures.is_empty(), "{failures:?}");
    let status = memory.poll();
    assert_eq!(status.holding().bytes(), 512 * MIB);
    assert_eq!(status.reserved(), status.holding());
    assert_eq!(status.direct.progress, Progress::Absent(Absence::NoDevice));
    assert!(status.cache.is_none() && status.failures.is_empty());
    let error = memory.set_direct(MIB).unwrap_err();
    assert!(matches!(error, ActuatorError::NoBalloon(_)), "{error}");
    let error = memory.set_cache(MIB).unwrap_err();
    assert!(matches!(error, ActuatorError::NoCache(_)), "{error}");
}

#[test]
fn a_dry_run_moves_nothing() {
    let (daemon, monitor) = (Daemon::new(), Monitor::new());
    let vm = VmId("web".into());
    let endpoints = Endpoints {
        vm,
        memory_bytes: 512 * MIB,
        monitors: vec![monitor.peer()],
        disk_admin: Some(peer(&daemon.socket)),
        dry_run: true,
        ..Endpoints::default()
    };
    let mut failures = Vec::new();
    let mut dry = VmMemory::open(&endpoints, &mut failures);
    assert!(failures.is_empty(), "{failures:?}");
    let had = dry.poll().holding();
    dry.set_direct(256 * MIB).unwrap();
    dry.set_cache(320 * MIB).unwrap();
    let status = dry.poll();
    assert_eq!((status.holding(), status.reserved()), (had, had));
    assert!(status.is_settled());
    assert_eq!(monitor.targets(), [0; 0]);
    assert_eq!(monitor.state().interval_s, 0);
    assert_eq!(daemon.state().cache_bytes, 64 * MIB);
}

fn polled(part: &mut dyn MemoryPart) -> Vec<ActuatorError> {
    let mut failures = Vec::new();
    part.poll(&mut failures);
    failures
}

#[test]
fn hcache_is_set_and_seen() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hcache");
    let mut options = StoreOptions::new(16 << 20);
    options.max_capacity_bytes = 32 << 20;
    let store = Store::new(options).unwrap();
    let server = Arc::new(Server::bind(&path, store.clone(), ServerOptions::default()).unwrap());
    let (stop, running) = (server.stop_handle(), Arc::clone(&server));
    let resized = store.clone();
    let stats = move || {
        let stats = store.stats();
        json!({ "store": {
            "capacity_bytes": stats.capacity_bytes,
            "max_capacity_bytes": stats.max_capacity_bytes,
        }})
        .to_string()
    };
    let run = move || running.run(&stats, &|bytes| resized.resize(bytes));
    let thread = thread::spawn(move || run().unwrap());

    let mut hcache = HcacheStore::new(path, Duration::from_secs(20));
    let until_settled = |hcache: &mut HcacheStore| loop {
        let failures = polled(hcache);
        if !matches!(hcache.part().progress, Progress::Following { .. }) {
            return failures;
        }
        thread::sleep(Duration::from_millis(5));
    };
    assert!(polled(&mut hcache).is_empty());
    assert_eq!(hcache.part().actual_bytes, 16 * MIB);
    assert_eq!(hcache.part().max_bytes, Some(32 * MIB));
    hcache.set(24 * MIB).unwrap();
    assert_eq!(hcache.part().reserved_bytes, 24 * MIB);
    assert!(until_settled(&mut hcache).is_empty());
    assert_eq!(hcache.part().actual_bytes, 24 * MIB);
    hcache.set(64 * MIB).unwrap();
    let failures = until_settled(&mut hcache);
    assert_eq!(failures[0].sent(), Some(Delivery::No), "{failures:?}");
    assert_eq!(hcache.part().reserved_bytes, 24 * MIB);
    stop.stop();
    thread.join().unwrap();
    drop(server);
    let failures = polled(&mut hcache);
    assert!(
        matches!(failures[..], [ActuatorError::Query { .. }]),
        "{failures:?}"
    );
    assert_eq!(hcache.part().actual_bytes, 24 * MIB);
}
