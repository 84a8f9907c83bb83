//! The guest's device-mapper target over its disk, with an hcache server of the host behind it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use plimsoll_disk::image_pool_key;
use plimsoll_hcache::{Handle, PoolOptions};
use plimsoll_rig::{DiskGuest, GuestOutput, Server, Setup};
use plimsoll_ring::{ConnectOptions, Connection};
use plimsoll_vm::ConsoleEvent;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::rig::{PATIENCE, PLIMSOLL, assert_sound, finish, report, shared_turn};

/// Serves hcache at a socket.
pub fn serve_at(socket: &Path) -> Server {
    let mut command = Command::new(PLIMSOLL);
    command
        .args(["hcache", "serve", "--capacity", "96M", "--socket"])
        .arg(socket);
    let log = socket.with_extension("log");
    Server::start(&mut command, &log, PATIENCE, |server| {
        server.log().starts_with("hcache: serving at ")
    })
    .unwrap()
}

fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("hcache");
    (folder, socket)
}

fn setup(socket: &Path, workload: &str) -> Setup {
    let serve = format!("--cache-mode none --hcache {}", socket.display());
    Setup {
        memory_mib: 128,
        ..Setup::new(&serve, workload)
    }
}

/// A count of the target's status.
fn of_target(told: &GuestOutput, key: &str) -> u64 {
    let (_, fields) = told
        .results
        .iter()
        .find(|(name, _)| name == "dm")
        .expect("a status");
    let mut words = fields["text"].split(' ').skip_while(|word| *word != key);
    words
        .nth(1)
        .unwrap_or_else(|| panic!("no {key} in {fields:?}"))
        .parse()
        .unwrap()
}

const SIGNED: &str =
    "workload=disk-signed module=copy dm=private order=random write_percent=10 files=80 rounds=2";

#[test]
fn a_guest_finds_in_the_hosts_hcache_what_it_gave_up() {
    let Some(_turn) = shared_turn() else { return };
    let (_folder, socket) = folder();
    let _server = serve_at(&socket);
    let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup(&socket, SIGNED)).unwrap();
    let (told, report) = finish(&mut guest);
    guest.check_image().unwrap();
    let behind = &report.machine.victim_cache;
    let read = told
        .number("files", Some("measured"), "disk_read_sectors")
        .unwrap()
        / 8;
    println!(
        "{} gets, {} hits of {} pages put; {read} pages read from the disk in two rounds",
        of_target(&told, "gets"),
        of_target(&told, "hits"),
        behind.puts
    );
    assert_sound(&told);
    let (gets, hits) = (of_target(&told, "gets"), of_target(&told, "hits"));
    assert!(hits > 1000 && hits * 2 >= gets, "{hits} of {gets}");
    // A get whose answer the guest has no use for any more is counted by the host alone.
    assert!(
        behind.gets >= gets && behind.hits >= hits,
        "{behind:?} by the host, {gets} gets and {hits} hits by the guest"
    );
    assert_eq!(of_target(&told, "refused_mismatch"), 0);
    assert_eq!(behind.errors, 0);
}

#[test]
fn metadata_that_the_guest_evicts_is_put() {
    let Some(_turn) = shared_turn() else { return };
    let (_folder, socket) = folder();
    let _server = serve_at(&socket);
    // Many files, so that the blocks that describe them do not stay in memory either.
    let workload = "workload=disk-signed module=copy dm=private files=12000 file_kib=4 \
                    order=random warmup=1 rounds=2";
    let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup(&socket, workload)).unwrap();
    let (told, _) = finish(&mut guest);
    guest.check_image().unwrap();
    assert_sound(&told);
    let (puts, refused) = (
        of_target(&told, "puts"),
        of_target(&told, "refused_not_uptodate"),
    );
    println!("{puts} pages put, {refused} had changed without a write");
    // Of some thousand pages of metadata, those of inodes whose times changed and were not written yet.
    assert!(puts > 10_000 && refused < 200, "{puts}, {refused}");
    assert_eq!(of_target(&told, "refused_mismatch"), 0);
}

#[test]
fn a_guest_goes_on_without_the_hosts_hcache() {
    let Some(_turn) = shared_turn() else { return };
    let (_folder, socket) = folder();
    let server = serve_at(&socket);
    let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup(&socket, SIGNED)).unwrap();
    let measured = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Phase { name, .. } if name == "measured");
    guest.listen(PATIENCE, measured).unwrap();
    let hits = report(&guest).machine.victim_cache.hits;
    drop(server);
    let (told, report) = finish(&mut guest);
    guest.check_image().unwrap();
    println!(
        "{hits} hits before, {} in all; {:?}",
        of_target(&told, "hits"),
        report.machine.victim_cache
    );
    assert_sound(&told);
    assert!(hits > 0);
    assert!(!report.machine.victim_cache.available || report.machine.victim_cache.errors > 0);
}

/// A count of the module's statistics.
fn of_module(told: &GuestOutput, key: &str) -> u64 {
    told.number("plimsoll", None, key).unwrap()
}

#[test]
fn a_page_cache_flushed_at_once_is_kept() {
    let Some(_turn) = shared_turn() else { return };
    for how in ["drop", "reclaim"] {
        let (_folder, socket) = folder();
        let _server = serve_at(&socket);
        let workload = format!(
            "workload=disk-signed module=copy dm=private files=48 rounds=2 flush={how} trim=1"
        );
        let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup(&socket, &workload)).unwrap();
        let (told, report) = finish(&mut guest);
        guest.check_image().unwrap();
        assert_sound(&told);
        let (puts, lost) = (
            of_target(&told, "puts"),
            of_target(&told, "refused_no_room"),
        );
        let others = ["busy", "doubted", "not_uptodate", "closed"];
        let others = others.map(|why| of_target(&told, &format!("refused_{why}")));
        println!(
            "{how}: {puts} pages put, {lost} found no slot, {others:?} were not offered; \
             {} waits, {} in vain; {:?}",
            of_module(&told, "waits"),
            of_module(&told, "waits_in_vain"),
            report.machine.victim_cache
        );
        // 48 MiB, before each of three rounds and before the end. Some may be busy, or in doubt if the host is late.
        let dropped = puts + lost + others.iter().sum::<u64>();
        assert!(dropped >= 4 * 48 * 256, "{puts}, {lost}, {others:?}");
        // On a host that runs the daemon at all; at times all are kept.
        assert!(puts > lost, "{puts} put, {lost} lost");
        // What the discards covered, and no more than the disk.
        assert!(report.machine.victim_cache.flushed_blocks >= 48 * 256);
        assert_eq!(report.machine.victim_cache.errors, 0);
    }
}

#[test]
fn a_daemon_that_stands_still_delays_a_flush_by_one_wait() {
    let Some(_turn) = shared_turn() else { return };
    let (_folder, socket) = folder();
    let _server = serve_at(&socket);
    // So few that nothing is evicted before.
    let workload = "workload=disk-signed module=copy dm=private files=32 warmup=0 rounds=1 \
                    flush=reclaim pause_ms=4000";
    let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup(&socket, workload)).unwrap();
    let flushes =
        |event: &ConsoleEvent| matches!(event, ConsoleEvent::Phase { name, .. } if name == "flush");
    guest.listen(PATIENCE, flushes).unwrap();
    let daemon = Pid::from_raw(guest.daemon_pid().try_into().unwrap()).unwrap();
    kill_process(daemon, Signal::STOP).unwrap();
    let flushed = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Result { name, .. } if name == "flush");
    let listened = guest.listen(PATIENCE, flushed);
    kill_process(daemon, Signal::CONT).unwrap();
    listened.unwrap();
    let (told, _) = finish(&mut guest);
    guest.check_image().unwrap();
    assert_sound(&told);
    let (waits, in_vain) = (of_module(&told, "waits"), of_module(&told, "waits_in_vain"));
    println!(
        "{waits} waits, {in_vain} in vain; {} pages lost",
        of_module(&told, "no_slot")
    );
    assert_eq!((waits, in_vain), (1, 1));
    assert!(of_module(&told, "no_slot") > 7000);
}

#[test]
fn a_target_that_is_suspended_while_cpus_come_and_go_reads_right() {
    let Some(_turn) = shared_turn() else { return };
    let (_folder, socket) = folder();
    let _server = serve_at(&socket);
    let workload =
        "workload=disk-raw module=copy dm=private seconds=8 threads=3 suspend_ms=150 cpus_ms=400";
    let mut setup = setup(&socket, workload);
    (setup.formatted, setup.image_mib) = (false, 96);
    (setup.vcpus, setup.queues) = (2, 2);
    let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup).unwrap();
    let (told, _) = finish(&mut guest);
    guest.check_image().unwrap();
    let of_raw = |key| told.number("raw", None, key).unwrap();
    println!(
        "{} pages verified, {} hits; {} suspensions, CPUs stopped {} times",
        of_raw("reads"),
        of_target(&told, "hits"),
        of_raw("suspensions"),
        of_raw("cpu_stops")
    );
    assert_sound(&told);
    assert!(of_raw("suspensions") > 0 && of_raw("cpu_stops") > 0);
    assert!(of_target(&told, "hits") > 0);
}

/// Blocks written and read by the guests of a shared disk.
const BLOCKS: u32 = 2048;

#[test]
fn guests_of_a_read_only_disk_share_what_the_host_keeps_of_it() {
    let Some(_turn) = shared_turn() else { return };
    let (_folder, socket) = folder();
    let _server = serve_at(&socket);
    let about = format!("workload=disk-crash blocks={BLOCKS} seed=7");
    let writes = 2 * BLOCKS;
    let mut setup = setup(&socket, &format!("{about} writes={writes}"));
    (setup.formatted, setup.image_mib) = (false, 32);
    let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup).unwrap();
    let (told, _) = finish(&mut guest);
    assert_sound(&told);

    guest.setup().read_only = true;
    guest.restart_daemon().unwrap();
    // A client of the same image puts every second block, as the daemon of a guest that evicts them does.
    let mut client = Connection::connect(&socket, &ConnectOptions::new("client")).unwrap();
    let image = File::open(guest.folder().join("disk.img")).unwrap();
    let key = image_pool_key(&image).unwrap();
    let pool = client.create_pool(PoolOptions::shared(key)).unwrap();
    for index in (0..BLOCKS).step_by(2) {
        let mut page = [0; 4096];
        image
            .read_exact_at(&mut page, u64::from(index) * 4096)
            .unwrap();
        let handle = Handle {
            pool,
            object: 0,
            index,
        };
        client.put(handle, &page).unwrap();
    }
    for name in ["first", "second"] {
        let shared = "module=copy dm=shared:plimsoll-disk";
        guest
            .boot(&format!("{about} verify=1 upto={writes} {shared}"))
            .unwrap();
        let (told, _) = finish(&mut guest);
        let (gets, hits) = (of_target(&told, "gets"), of_target(&told, "hits"));
        println!(
            "the {name} guest: {gets} gets, {hits} hits of {} blocks put",
            BLOCKS / 2
        );
        assert_sound(&told);
        assert_eq!(hits, u64::from(BLOCKS / 2));
        assert!(gets >= u64::from(BLOCKS));
    }
}
