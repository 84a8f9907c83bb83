//! What a killed daemon leaves in the dirty log, and what the next one does with it: after a crash of the host, after the
//! image was replaced or changed by others, and where there is no room.

mod faults_common;

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use faults_common::{MachineThread, Place, Process, Setup, SmallTmpfs, ram, serve_as_told};
use plimsoll_disk::{
    CacheMode, DirtyLog, DirtyPages as _, DiskError, DiskIdentity, DiskNumber, Location, Machine,
    WriteMode, boot_id,
};
use plimsoll_driver::{Driver, DriverOptions};
use plimsoll_skip::{Lack, skip};

#[test]
#[ignore = "a daemon for the tests of this file"]
fn serves_until_it_is_killed() {
    serve_as_told();
}

/// Writes stay dirty until a flush.
fn delayed() -> Setup {
    Setup {
        mode: CacheMode::Exclusive,
        write: WriteMode::Delayed,
        dirty_age_ms: 3_600_000,
        ..Setup::default()
    }
}

fn connect(place: &Place) -> Driver {
    Driver::connect(&ram(), &place.socket(0), DriverOptions::default()).unwrap()
}

fn block_of(image: &Path, block: u64) -> u8 {
    let mut page = [0; 4096];
    let file = fs::File::open(image).unwrap();
    file.read_exact_at(&mut page, block * 4096).unwrap();
    assert!(page.iter().all(|byte| *byte == page[0]), "a torn page");
    page[0]
}

/// What the guest reads of the block.
fn read(disk: &mut Driver, block: u64) -> u8 {
    let mut page = [0; 4096];
    disk.read(block * 4096, &mut page).unwrap();
    page[0]
}

fn write(disk: &mut Driver, block: u64, byte: u8) {
    disk.write(block * 4096, &[byte; 4096]).unwrap();
}

/// Logs that were set aside.
fn aside(place: &Place) -> Vec<PathBuf> {
    let folder = fs::read_dir(place.log().parent().unwrap()).unwrap();
    let paths = folder.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.to_str().unwrap().contains("dirty.log.aside-"))
        .collect()
}

fn identity(place: &Place) -> DiskIdentity {
    let file = fs::File::open(place.image(0)).unwrap();
    let bytes = file.metadata().unwrap().len();
    DiskIdentity::of(DiskNumber(0), &place.image(0), &file, bytes).unwrap()
}

/// Lets the daemon notice that no write is in flight.
fn rest() {
    thread::sleep(Duration::from_secs(1));
}

/// A daemon whose log, with block 5 of 0xaa, is copied before 0xbb is written there and flushed. Returns the copy.
fn older_log(process: &mut Process) -> Vec<u8> {
    let mut disk = connect(&process.place);
    write(&mut disk, 5, 0xaa);
    rest();
    let older = fs::read(process.place.log()).unwrap();
    write(&mut disk, 5, 0xbb);
    disk.flush().unwrap();
    assert_eq!(block_of(&process.place.image(0), 5), 0xbb);
    process.kill();
    older
}

#[test]
fn an_older_log_never_overwrites_what_was_flushed() {
    let mut process = Process::start(delayed());
    let older = older_log(&mut process);
    fs::write(process.place.log(), older).unwrap();
    process.restart();
    assert_eq!(read(&mut connect(&process.place), 5), 0xbb);
    assert_eq!(block_of(&process.place.image(0), 5), 0xbb);
    assert_eq!(aside(&process.place).len(), 1);
}

/// Makes a log of this boot with block 5 of 0xaa, right in everything else.
fn make_log(place: &Place, boot: &str) {
    let _ = fs::remove_file(place.log());
    let disks = [identity(place)];
    let left = DirtyLog::open(&place.log(), 64, &disks, boot).unwrap();
    let mut log = left.finish(&disks, &HashSet::new()).unwrap();
    let location = Location::new(DiskNumber(0), 5);
    log.record(location, &[0xaa; 4096]).unwrap();
}

#[test]
fn a_log_that_survived_the_hosts_crash_is_not_written_to_storage() {
    let mut process = Process::start(delayed());
    older_log(&mut process);
    make_log(&process.place, "another");
    process.restart();
    assert_eq!(read(&mut connect(&process.place), 5), 0xbb);
    process.kill();
    assert_eq!(block_of(&process.place.image(0), 5), 0xbb);
    assert_eq!(aside(&process.place).len(), 1);
    // Of this boot it is written: the boot alone made the difference.
    make_log(&process.place, &boot_id().unwrap());
    process.restart();
    assert_eq!(read(&mut connect(&process.place), 5), 0xaa);
}

#[test]
fn an_image_that_was_restored_in_place_is_left_as_it_is() {
    for replaced in [false, true] {
        let mut process = Process::start(delayed());
        let image = process.place.image(0);
        let mut disk = connect(&process.place);
        write(&mut disk, 1, 0x11);
        disk.flush().unwrap();
        let backup = fs::read(&image).unwrap();
        write(&mut disk, 1, 0x22);
        write(&mut disk, 2, 0x22);
        rest();
        process.kill();
        if replaced {
            fs::remove_file(&image).unwrap();
        }
        fs::write(&image, &backup).unwrap();
        process.restart();
        disk.reconnect().unwrap();
        assert_eq!((read(&mut disk, 1), read(&mut disk, 2)), (0x11, 0));
        assert_eq!((block_of(&image, 1), block_of(&image, 2)), (0x11, 0));
        assert_eq!(aside(&process.place).len(), 1, "replaced: {replaced}");
    }
}

#[test]
fn a_replaced_image_costs_the_other_disks_nothing() {
    for write_mode in [WriteMode::Delayed, WriteMode::Through] {
        let mut process = Process::start(Setup {
            disks: 2,
            ..delayed()
        });
        let connect = |place: &Place, disk: usize| {
            Driver::connect(&ram(), &place.socket(disk), DriverOptions::default()).unwrap()
        };
        let mut disks = [connect(&process.place, 0), connect(&process.place, 1)];
        for disk in &mut disks {
            write(disk, 1, 0x11);
            disk.flush().unwrap();
            write(disk, 1, 0x22);
            write(disk, 2, 0x22);
        }
        rest();
        process.kill();
        let images = [process.place.image(0), process.place.image(1)];
        let backup = fs::read(&images[0]).unwrap();
        let old = images[0].with_extension("old");
        fs::rename(&images[0], &old).unwrap();
        fs::write(&images[0], &backup).unwrap();

        let mut options = process.place.options();
        options.engine.write = write_mode;
        let machine = Machine::new(options).unwrap();
        let recovery = machine.recovery().clone();
        let set_aside = recovery.set_aside.unwrap();
        let message = set_aside.to_string();
        assert!(message.contains(images[0].to_str().unwrap()), "{message}");
        assert!(!message.contains(images[1].to_str().unwrap()), "{message}");
        assert_eq!((recovery.written_pages, recovery.kept_pages), (2, 0));
        assert_eq!(aside(&process.place), std::slice::from_ref(&set_aside.now));
        let found = |image: &Path| [block_of(image, 1), block_of(image, 2)];
        assert_eq!(found(&images[0]), [0x11, 0], "as it was restored");
        assert_eq!(found(&images[1]), [0x22, 0x22]);
        drop(machine);

        // The old image and what was set aside are whole together.
        fs::rename(&old, &images[0]).unwrap();
        fs::rename(&set_aside.now, process.place.log()).unwrap();
        let machine = Machine::new(process.place.options()).unwrap();
        assert_eq!(machine.recovery().written_pages, 2);
        assert_eq!(found(&images[0]), [0x22, 0x22]);
    }
}

#[test]
fn kills_during_writes_and_changes_of_an_images_owner_are_no_changes_of_others() {
    let mut process = Process::start(Setup {
        dirty_age_ms: 20,
        ..delayed()
    });
    let mut disk = connect(&process.place);
    for round in 0..30_u8 {
        for block in 0..64 {
            write(&mut disk, block, round + 1);
        }
        // From amid write-backs to after them.
        thread::sleep(Duration::from_millis(7 * u64::from(round)));
        process.kill();
        // As libvirt does when it starts a VM.
        std::os::unix::fs::chown(process.place.image(0), None, Some(u32::from(round))).ok();
        process.restart();
        disk.reconnect().unwrap();
        for block in 0..64 {
            assert_eq!(read(&mut disk, block), round + 1, "block {block}");
        }
        assert_eq!(aside(&process.place), [""; 0].map(PathBuf::from));
    }
}

#[test]
fn delayed_writes_need_a_directory_in_memory() {
    let place = Place::within(delayed(), Path::new("/var/tmp"), Path::new("/var/tmp"));
    let on_disk = rustix::fs::statfs("/var/tmp").unwrap().f_type != 0x0102_1994;
    if !on_disk {
        return skip(Lack::Host, "/var/tmp is on tmpfs");
    }
    let refused = Machine::new(place.options()).err().unwrap();
    assert!(
        matches!(refused, DiskError::StateOnDisk { .. }),
        "{refused}"
    );
    assert!(!place.log().exists());
    // Writes that go through need no log.
    let mut options = place.options();
    options.engine.write = WriteMode::Through;
    assert!(Machine::new(options).is_ok());
}

#[test]
fn recovery_needs_no_room_for_a_second_log() {
    let Some(small) = SmallTmpfs::new(20) else {
        return;
    };
    // 16.5 MiB of pages and their entries.
    let setup = Setup {
        cache_bytes: 64 << 20,
        dirty_pages_max: 4096,
        ..delayed()
    };
    let mut process = Process::at(Place::within(setup, Path::new("/var/tmp"), small.path()));
    let mut disk = connect(&process.place);
    for round in 1..4 {
        for block in 0..1000 {
            write(&mut disk, block, round);
        }
        // Nor for another header, if the file system is full by then.
        let rest = small.path().join("rest");
        process.kill();
        let _ = fs::write(&rest, vec![1; 20 << 20]);
        process.restart();
        disk.reconnect().unwrap();
        for block in 0..1000 {
            assert_eq!(read(&mut disk, block), round);
        }
        fs::remove_file(&rest).unwrap();
    }
    process.kill();
    // With other sizes, too.
    for pages in [4200, 2000] {
        process.place.setup.dirty_pages_max = pages;
        process.restart();
        disk.reconnect().unwrap();
        write(&mut disk, 0, 9);
        process.kill();
    }
}

#[test]
fn a_failed_sync_is_remembered_until_it_is_accepted() {
    let start = |boot: &str| {
        let place = Place::new(delayed());
        let record = serde_json::json!({"boot": boot, "images": [identity(&place)]});
        let file = place.log().with_file_name("unsynced.json");
        fs::write(&file, record.to_string()).unwrap();
        (MachineThread::at(place), file)
    };
    let (running, file) = start(&boot_id().unwrap());
    let mut disk = connect(&running.place);
    write(&mut disk, 1, 1);
    assert!(disk.flush().is_err(), "a sync of this boot failed");
    assert!(file.exists());
    running.handle.enable().unwrap();
    disk.flush().unwrap();
    assert_eq!(block_of(&running.place.image(0), 1), 1);
    assert!(!file.exists());
    // What a host that was booted since has is what its storage has.
    let (running, _) = start("another");
    let mut disk = connect(&running.place);
    write(&mut disk, 1, 1);
    disk.flush().unwrap();
}

/// Fills the file system; what it returns frees it again when it is removed.
fn fill(folder: &Path) -> PathBuf {
    let path = folder.join("fill");
    let mut file = fs::File::create(&path).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    path
}

/// Waits at most 20 s.
fn wait_for(what: &str, ready: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !ready() {
        assert!(Instant::now() < end, "no {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A thin image on a file system of its own, of which blocks 16 to 19 are allocated.
fn thin(mut setup: Setup, small: &SmallTmpfs) -> Place {
    setup.direct = false;
    let place = Place::within(setup, small.path(), Path::new("/dev/shm"));
    let image = OpenOptions::new().write(true).open(place.image(0)).unwrap();
    image.write_all_at(&[1; 4 * 4096], 16 * 4096).unwrap();
    place
}

/// A machine whose thin image has no room for more, and a guest; there is room again when the file is removed.
fn full(small: &SmallTmpfs) -> (MachineThread, PathBuf, Driver) {
    let running = MachineThread::at(thin(delayed(), small));
    let filled = fill(small.path());
    let disk = connect(&running.place);
    (running, filled, disk)
}

#[test]
fn blocks_without_room_hold_nobody_back_and_stay_dirty_over_restarts() {
    let Some(small) = SmallTmpfs::new(2) else {
        return;
    };
    let mut process = Process::at(thin(delayed(), &small));
    let image = process.place.image(0);
    let filled = fill(small.path());
    let mut disk = connect(&process.place);
    // One order of eight blocks, of which the first four have no room.
    disk.write(12 * 4096, &[2; 8 * 4096]).unwrap();
    assert!(disk.flush().is_err());
    let stored = || (16..20).all(|block| block_of(&image, block) == 2);
    wait_for("neighbours on storage", stored);
    assert_eq!(block_of(&image, 12), 0);
    for _ in 0..2 {
        process.kill();
        process.restart();
        disk.reconnect().unwrap();
        for block in 12..20 {
            assert_eq!(read(&mut disk, block), 2, "block {block}");
        }
        assert!(disk.flush().is_err(), "it has no room yet");
    }
    fs::remove_file(filled).unwrap();
    disk.flush().unwrap();
    assert!((12..20).all(|block| block_of(&image, block) == 2));
}

#[test]
fn what_a_guest_left_is_flushed_at_the_end_or_said_to_be_missing() {
    for has_room in [false, true] {
        let Some(small) = SmallTmpfs::new(2) else {
            return;
        };
        let (mut running, filled, mut disk) = full(&small);
        disk.write(12 * 4096, &[2; 8 * 4096]).unwrap();
        drop(disk);
        running.wait_for("an idle disk", |stats| !stats.disks[0].connected);
        if has_room {
            fs::remove_file(filled).unwrap();
            running.end().unwrap();
            let image = running.place.image(0);
            assert!((12..20).all(|block| block_of(&image, block) == 2));
        } else {
            let error = running.end().unwrap_err().to_string();
            let missing = "image0 could not be flushed; what was written through since the last flush may be lost; \
                           4 pages stay in the dirty log, and the next daemon writes them";
            assert!(error.ends_with(missing), "{error}");
        }
    }
}

#[test]
fn a_block_without_room_fails_no_other_write_of_a_guest_that_knows_no_flush() {
    let Some(small) = SmallTmpfs::new(2) else {
        return;
    };
    let (running, filled, mut disk) = full(&small);
    write(&mut disk, 12, 2);
    assert!(disk.flush().is_err());
    drop(disk);
    running.wait_for("an idle disk", |stats| !stats.disks[0].connected);
    let options = DriverOptions {
        flush: false,
        ..DriverOptions::default()
    };
    let mut disk = running.connect(&ram(), 0, options);
    write(&mut disk, 16, 3);
    assert_eq!(block_of(&running.place.image(0), 16), 3);
    assert!(disk.write(13 * 4096, &[3; 4096]).is_err(), "it has no room");
    assert_eq!(running.stats().disks[0].unwritable_pages, 1);
    fs::remove_file(filled).unwrap();
    write(&mut disk, 13, 3);
}

#[test]
fn an_image_is_the_same_from_every_directory() {
    let image = fs::File::open("Cargo.toml").unwrap();
    let identity = DiskIdentity::of(DiskNumber(0), Path::new("Cargo.toml"), &image, 1).unwrap();
    let here = std::env::current_dir().unwrap().join("Cargo.toml");
    assert_eq!(identity.image, here.display().to_string());
}

#[test]
fn errors_are_counted_by_kind_and_blocks_are_written_when_there_is_room() {
    let Some(small) = SmallTmpfs::new(2) else {
        return;
    };
    let (mut running, filled, mut disk) = full(&small);
    disk.write(12 * 4096, &[2; 8 * 4096]).unwrap();
    assert!(disk.flush().is_err());
    let stats = running.wait_for("four blocks without room", |stats| {
        stats.disks[0].unwritable_pages == 4 && stats.engine.dirty_pages == 4
    });
    assert!(stats.disks[0].no_space_errors >= 4);
    assert_eq!(stats.disks[0].io_errors, 0);
    let error = stats.disks[0].last_error.as_deref().unwrap();
    assert!(error.contains("No space left"), "{error}");
    assert!(!stats.engine.wants_pause);
    // A block that is not needed any more is no longer missing; the others are written without a flush.
    disk.discard(12 * 4096, 4096).unwrap();
    assert_eq!(running.stats().disks[0].unwritable_pages, 3);
    fs::remove_file(filled).unwrap();
    running.wait_for("clean blocks", |stats| stats.engine.dirty_pages == 0);
    assert_eq!(running.stats().disks[0].unwritable_pages, 0);
    disk.flush().unwrap();
    running.stop();
}

#[test]
fn with_a_vm_that_can_be_paused_nothing_fails_for_lack_of_space() {
    for write_mode in [WriteMode::Through, WriteMode::Delayed] {
        let Some(small) = SmallTmpfs::new(2) else {
            return;
        };
        let setup = Setup {
            write: write_mode,
            pause_without_space: true,
            ..delayed()
        };
        let mut running = MachineThread::at(thin(setup, &small));
        let filled = fill(small.path());
        let mut disk = connect(&running.place);
        thread::scope(|scope| {
            let writes = scope.spawn(|| {
                disk.write(12 * 4096, &[3; 8 * 4096]).unwrap();
                disk.flush().unwrap();
            });
            running.wait_for("a wish to pause", |stats| stats.engine.wants_pause);
            thread::sleep(Duration::from_millis(500));
            assert!(!writes.is_finished(), "it waits for room");
            fs::remove_file(filled).unwrap();
            writes.join().unwrap();
        });
        assert!((12..20).all(|block| block_of(&running.place.image(0), block) == 3));
        running.wait_for("no wish to pause", |stats| !stats.engine.wants_pause);
        // Zeros, too.
        let filled = fill(small.path());
        thread::scope(|scope| {
            let zeroes = scope.spawn(|| disk.write_zeroes(64 * 4096, 4096, false).unwrap());
            running.wait_for("a wish to pause", |stats| stats.engine.wants_pause);
            assert!(!zeroes.is_finished());
            fs::remove_file(&filled).unwrap();
            zeroes.join().unwrap();
        });
        // A guest that goes while its writes wait: they fail, and the disk is free for the next one.
        let filled = fill(small.path());
        let request = plimsoll_driver::Request::WriteZeroes {
            ranges: &[(80 * 8, 8)],
            unmap: false,
        };
        disk.submit(0, &request, 1).unwrap();
        running.wait_for("a wish to pause", |stats| stats.engine.wants_pause);
        drop(disk);
        running.wait_for("an idle disk", |stats| !stats.disks[0].connected);
        assert!(!running.stats().engine.wants_pause);
        fs::remove_file(filled).unwrap();
        running.stop();
    }
}
