//! Guests whose storage is full or fails: they learn of it or are paused, as configured, and never read anything wrong.
//!
//! Full is a tmpfs that is smaller than the image. Failures are those of nbdkit, whose disk is a file by nbdfuse: it fails a
//! share of the requests, and delays all.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use plimsoll_rig::{DiskGuest, GuestOutput, Server, Setup, host, make_image};
use plimsoll_serve::disk::Report;
use plimsoll_skip::{Lack, skip};
use plimsoll_vm::ConsoleEvent;

use super::seeds;
use crate::rig::{PATIENCE, PLIMSOLL, any_time, finish, report, shared_turn};
use crate::second_chance::serve_at;

/// Size of the images, of which all is written.
const IMAGE_MIB: u64 = 48;
/// Space for them at first.
const SPACE_MIB: u64 = 24;

/// A tmpfs until it is dropped.
struct SmallFileSystem {
    folder: tempfile::TempDir,
}

impl SmallFileSystem {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let size = format!("size={SPACE_MIB}m");
        run(
            "mount",
            &["-t", "tmpfs", "-o", &size, "tmpfs"],
            folder.path(),
        );
        Self { folder }
    }

    fn image(&self) -> PathBuf {
        let image = self.folder.path().join("disk.img");
        make_image(&image, IMAGE_MIB, false).unwrap();
        image
    }

    fn grow(&self) {
        let size = format!("remount,size={}m", 2 * IMAGE_MIB);
        run("mount", &["-o", &size], self.folder.path());
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        // Lazily: a test that failed may leave a daemon for a moment.
        let _ = Command::new("umount")
            .arg("-l")
            .arg(self.folder.path())
            .status();
    }
}

fn run(program: &str, words: &[&str], path: &Path) {
    let output = Command::new(program)
        .args(words)
        .arg(path)
        .output()
        .unwrap();
    assert!(output.status.success(), "{program} {words:?}: {output:?}");
}

/// A file whose reads and writes fail at times while the trigger exists.
struct FailingFile {
    folder: tempfile::TempDir,
    _server: Server,
}

impl FailingFile {
    fn new(read_percent: u8, write_percent: u8, delay_ms: u8) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        make_image(at("store.img").as_ref(), IMAGE_MIB, false).unwrap();
        File::create(at("disk.img")).unwrap();
        let mut command = Command::new("nbdfuse");
        command.args([&at("disk.img"), "--command", "nbdkit", "-s"]);
        command.args(["--filter=error", "--filter=delay", "file", &at("store.img")]);
        command.arg(format!("error-file={}", at("fails")));
        command.arg(format!("error-pread-rate={read_percent}%"));
        command.arg(format!("error-pwrite-rate={write_percent}%"));
        command.arg(format!("rdelay={delay_ms}ms"));
        command.arg(format!("wdelay={delay_ms}ms"));
        let log = folder.path().join("log");
        let image = folder.path().join("disk.img");
        let is_there = |_: &Server| fs::metadata(&image).is_ok_and(|file| file.len() > 0);
        let server = Server::start(&mut command, &log, PATIENCE, is_there).unwrap();
        Self {
            folder,
            _server: server,
        }
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("disk.img")
    }

    fn fail(&self) {
        File::create(self.folder.path().join("fails")).unwrap();
    }

    fn work(&self) {
        fs::remove_file(self.folder.path().join("fails")).unwrap();
    }
}

impl Drop for FailingFile {
    fn drop(&mut self) {
        let _ = Command::new("fusermount3")
            .args(["-u", "-z"])
            .arg(self.image())
            .status();
    }
}

/// What a daemon does with a write that storage refuses, and what the guest is to see of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WriteError {
    Report,
    Enospc,
    Stop,
}

/// A guest on an image, drawn.
fn setup(image: PathBuf, error: WriteError, random: &mut Rng, hcache: Option<&Path>) -> Setup {
    let (write, option) = (
        if random.bool() { "through" } else { "delayed" },
        match error {
            WriteError::Report => "report",
            WriteError::Enospc => "enospc",
            WriteError::Stop => "stop",
        },
    );
    let mut serve = format!("--cache 16M --write {write} --write-error {option}");
    if write == "delayed" {
        serve.push_str(&format!(" --dirty-age {}ms", [50, 1000][random.usize(..2)]));
    }
    let mut workload = format!(
        "workload=disk-raw module=copy direct=1 errors={} threads={} seconds=6 write_percent={} seed={}",
        u8::from(error == WriteError::Report),
        random.u8(1..=3),
        random.u8(20..=60),
        random.u32(1..)
    );
    if let Some(socket) = hcache {
        serve.push_str(&format!(" --hcache {}", socket.display()));
        workload.push_str(" dm=private");
    }
    let mut setup = Setup::new(&serve, &workload);
    (setup.formatted, setup.image_mib) = (false, IMAGE_MIB);
    (setup.image, setup.monitor) = (Some(image), error != WriteError::Report);
    (setup.vcpus, setup.memory_mib) = (random.u32(1..=2), 128);
    setup.queues = random.u16(1..=4);
    println!("{serve}: {workload}");
    setup
}

/// What the guest counted of its requests that failed.
fn failed(output: &GuestOutput) -> [u64; 3] {
    ["failed_reads", "failed_writes", "failed_flushes"]
        .map(|key| output.number("raw", None, key).unwrap())
}

/// Fails unless all was right, and the guest's kernel spoke of failed requests only if they are reported.
fn assert_right(output: &GuestOutput, report: &Report, error: WriteError) {
    assert_eq!(output.mismatches, Some(0), "{output:?}");
    assert_eq!(report.machine.engine.wrong_served, 0);
    let expected = |text: &String| error == WriteError::Report && text.contains("I/O error");
    assert!(output.kernel.iter().all(expected), "{:?}", output.kernel);
    if error != WriteError::Report {
        assert_eq!(failed(output), [0; 3]);
        assert_eq!(output.number("kernel", None, "complaints").unwrap(), 0);
    }
}

/// Waits until the daemon reports it, while the guest works.
fn wait_until(guest: &mut DiskGuest, is_so: impl Fn(&Report) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so(&report(guest)) {
        let done = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Done { .. });
        let done = guest.hears(Duration::from_millis(50), done).unwrap();
        assert!(!done && Instant::now() < deadline, "{:?}", report(guest));
    }
}

fn may_mount() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip(Lack::Root, "only root may mount a file system");
    }
    root
}

#[test]
fn a_guest_whose_storage_is_full_learns_of_it_or_is_paused_and_reads_right() {
    let Some(_turn) = shared_turn() else { return };
    if !may_mount() {
        return;
    }
    for seed in seeds(20) {
        let mut random = Rng::with_seed(seed);
        println!("seed {seed}");
        for error in [
            WriteError::Report,
            [WriteError::Enospc, WriteError::Stop][random.usize(..2)],
        ] {
            let small = SmallFileSystem::new();
            let setup = setup(small.image(), error, &mut random, None);
            let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup).unwrap();
            wait_until(&mut guest, |report| {
                report.machine.disks[0].no_space_errors > 0
                    && (error == WriteError::Report || report.machine.engine.wants_pause)
            });
            thread::sleep(any_time(&mut random, 1500));
            if random.bool() && (error == WriteError::Report || !host::qemu_may_lose_disks()) {
                guest.kill_daemon();
                guest.restart_daemon().unwrap();
                thread::sleep(any_time(&mut random, 1500));
            }
            small.grow();
            let (output, report) = finish(&mut guest);
            let [reads, writes, flushes] = failed(&output);
            println!(
                "{} pages verified; {writes} writes and {flushes} flushes failed, {reads} reads",
                output.number("raw", None, "reads").unwrap()
            );
            assert_right(&output, &report, error);
            assert_eq!(reads, 0);
            assert!(error != WriteError::Report || writes + flushes > 0);
            guest.check_image().unwrap();
        }
    }
}

#[test]
fn a_guest_whose_storage_fails_learns_of_it_or_is_paused_and_reads_right() {
    let Some(_turn) = shared_turn() else { return };
    if !may_mount() {
        return;
    }
    if let Err(why) = host::installed(&[
        ("nbdkit", "--version"),
        ("nbdfuse", "--version"),
        ("fusermount3", "--version"),
    ]) {
        skip(Lack::Program, why);
        return;
    }
    for seed in seeds(20) {
        let mut random = Rng::with_seed(seed);
        println!("seed {seed}");
        for error in [WriteError::Report, WriteError::Stop] {
            // A guest that is not to learn of errors cannot be spared those of reads.
            let reads = if error == WriteError::Report {
                random.u8(2..20)
            } else {
                0
            };
            let failing = FailingFile::new(reads, random.u8(2..20), random.u8(..3));
            let socket = failing.folder.path().join("hcache");
            let hcache = (error == WriteError::Report && random.bool()).then(|| serve_at(&socket));
            let behind = hcache.is_some().then_some(&*socket);
            let setup = setup(failing.image(), error, &mut random, behind);
            let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup).unwrap();
            let measured = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Phase { name, .. } if name == "measured");
            guest.listen(PATIENCE, measured).unwrap();
            failing.fail();
            let began = Instant::now();
            let (output, report) = finish(&mut guest);
            failing.work();
            let [reads, writes, flushes] = failed(&output);
            println!(
                "{} pages verified in {} s; {reads} reads, {writes} writes and {flushes} flushes failed; {} errors of storage",
                output.number("raw", None, "reads").unwrap(),
                began.elapsed().as_secs(),
                report.machine.disks[0].io_errors
            );
            assert_right(&output, &report, error);
            assert!(report.machine.disks[0].io_errors > 0);
            assert!(error != WriteError::Report || reads > 0 && writes + flushes > 0);
            guest.check_image().unwrap();
        }
    }
}
