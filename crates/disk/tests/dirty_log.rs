//! The dirty log: what a killed daemon leaves to the next one, and which logs are refused.

use std::collections::{HashMap, HashSet};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, thread};

use plimsoll_disk::{
    ChangeTimes, DirtyLog, DirtyLogError, DirtyPages as _, DiskIdentity, DiskNumber, LeftoverPages,
    Location, PAGE_BYTES, Page,
};
use plimsoll_flow::SplitMix;

const SLOTS: u64 = 64;
const BLOCKS: u64 = 48;
const BOOT: &str = "a-boot";

fn identity(inode: u64, size_bytes: u64) -> DiskIdentity {
    DiskIdentity {
        disk: 0,
        image: "/images/a".into(),
        device: 1,
        inode,
        size_bytes,
        modified_ns: Some(5_000_000_000),
    }
}

/// The image of most tests.
fn image() -> [DiskIdentity; 1] {
    [identity(7, 1 << 30)]
}

fn open(path: &Path) -> Result<LeftoverPages, DirtyLogError> {
    DirtyLog::open(path, SLOTS, &image(), BOOT)
}

/// A log that keeps nothing of what was left.
fn emptied(left: LeftoverPages) -> Result<DirtyLog, DirtyLogError> {
    left.finish(&image(), &HashSet::new())
}

fn log(path: &Path) -> DirtyLog {
    emptied(open(path).unwrap()).unwrap()
}

fn at(block: u64) -> Location {
    Location::new(DiskNumber(0), block)
}

/// A page that identifies the operation that wrote it.
fn signed(operation: u64) -> Page {
    let mut page = [0; PAGE_BYTES];
    for (index, word) in page.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&mixed(operation ^ (index as u64) << 48).to_le_bytes());
    }
    page[..8].copy_from_slice(&operation.to_le_bytes());
    page
}

fn mixed(number: u64) -> u64 {
    SplitMix(number).bits()
}

/// The operation of this number, of a sequence: a block, and whether it is recorded or cleaned.
fn operation(number: u64) -> (Location, bool) {
    let random = mixed(number);
    (at(random % BLOCKS), !(random >> 32).is_multiple_of(4))
}

/// Directory in which [`loads_a_log_until_it_is_killed`] finds its log and records its progress, and its first
/// operation.
const LOG: &str = "PLIMSOLL_TEST_DIRTY_LOG";
const DONE: &str = "PLIMSOLL_TEST_DONE";
const FIRST: &str = "PLIMSOLL_TEST_FIRST";

/// The child of the test below; without its variables it does nothing.
#[test]
fn loads_a_log_until_it_is_killed() {
    let Some(path) = env::var_os(LOG) else { return };
    let mut log = log(Path::new(&path));
    let done = OpenOptions::new()
        .write(true)
        .open(env::var_os(DONE).unwrap())
        .unwrap();
    let first: u64 = env::var(FIRST).unwrap().parse().unwrap();
    for number in first.. {
        match operation(number) {
            (location, true) => log.record(location, &signed(number)).unwrap(),
            (location, false) => log.clean(location),
        }
        done.write_all_at(&(number + 1).to_le_bytes(), 0).unwrap();
    }
}

#[test]
fn a_daemon_killed_50_times_loses_nothing_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let done = folder.path().join("done");
    let mut operations = 0;
    for round in 0..50u64 {
        let first = round << 32;
        fs::write(&done, first.to_le_bytes()).unwrap();
        let read_done = || {
            let bytes = fs::read(&done).unwrap();
            u64::from_le_bytes(bytes.try_into().unwrap())
        };
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "loads_a_log_until_it_is_killed"])
            .env(LOG, &path)
            .env(DONE, &done)
            .env(FIRST, first.to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while read_done() == first {
            assert!(child.try_wait().unwrap().is_none(), "the child has ended");
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_micros(mixed(round) % 20_000));
        child.kill().unwrap();
        child.wait().unwrap();

        let end = read_done();
        operations += end - first;
        let mut twin = HashMap::new();
        for number in first..end {
            match operation(number) {
                (location, true) => twin.insert(location, number),
                (location, false) => twin.remove(&location),
            };
        }
        let left = open(&path).unwrap();
        let mut found: HashMap<_, _> = left
            .pages()
            .map(|found| {
                let (location, page) = found.unwrap();
                let number = u64::from_le_bytes(page[..8].try_into().unwrap());
                assert_eq!(*page, signed(number), "a torn page");
                (location, number)
            })
            .collect();
        // The operation in progress is done or not.
        let (under_way, records) = operation(end);
        let (before, now) = (twin.remove(&under_way), found.remove(&under_way));
        let after = records.then_some(end);
        assert!(now == before || now == after, "round {round}: {now:?}");
        assert!(found == twin, "round {round}");
    }
    println!("{operations} operations");
}

#[test]
fn a_log_in_use_is_refused_and_an_empty_one_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    assert!(matches!(open(&path), Err(DirtyLogError::InUse { .. })));
    log.record(at(1), &signed(1)).unwrap();
    assert_eq!(log.len(), 1);
    assert!(!log.close().unwrap(), "not empty");

    let left = open(&path).unwrap();
    assert_eq!((left.len(), left.torn()), (1, 0));
    assert!(matches!(open(&path), Err(DirtyLogError::InUse { .. })));
    let log = emptied(left).unwrap();
    assert!(matches!(open(&path), Err(DirtyLogError::InUse { .. })));
    assert!(log.close().unwrap());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn of_two_daemons_that_found_no_log_one_makes_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let (first, second) = (open(&path).unwrap(), open(&path).unwrap());
    let mut log = emptied(first).unwrap();
    log.record(at(1), &signed(1)).unwrap();
    assert!(matches!(emptied(second), Err(DirtyLogError::InUse { .. })));
    drop(log);
    assert_eq!(open(&path).unwrap().len(), 1);
}

#[test]
fn pages_stay_until_the_next_daemon_says_they_are_on_storage() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    for block in [5, 3, 9] {
        log.record(at(block), &signed(block)).unwrap();
    }
    log.record(at(3), &signed(33)).unwrap();
    log.clean(at(9));
    drop(log);
    for _ in 0..2 {
        // Dropped before it is finished: as if it had died.
        let left = open(&path).unwrap();
        let pages: Vec<_> = left.pages().map(Result::unwrap).collect();
        let expected = [(at(3), Box::new(signed(33))), (at(5), Box::new(signed(5)))];
        assert_eq!(pages, expected);
    }
    // Another size and other disks from now on.
    let other = DiskIdentity {
        disk: 1,
        ..identity(8, 1 << 20)
    };
    let disks = [identity(7, 1 << 30), other];
    let left = DirtyLog::open(&path, 2, &disks, BOOT).unwrap();
    let mut log = left.finish(&disks, &HashSet::new()).unwrap();
    assert!(log.is_empty());
    let second = Location::new(DiskNumber(1), 0);
    log.record(second, &signed(1)).unwrap();
    log.record(at(0), &signed(2)).unwrap();
    let full = log.record(at(1), &signed(3)).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    drop(log);
    assert_eq!(DirtyLog::open(&path, 2, &disks, BOOT).unwrap().len(), 2);
}

/// A log with one page, of block 8.
fn log_of_one(path: &Path) {
    let mut log = log(path);
    log.record(at(8), &signed(1)).unwrap();
}

#[test]
fn the_log_of_another_vm_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    log_of_one(&path);
    let other = DiskIdentity {
        image: "/images/b".into(),
        ..identity(8, 4096)
    };
    let number = DiskIdentity {
        disk: 1,
        ..identity(7, 1 << 30)
    };
    for disks in [vec![other.clone()], vec![number], vec![]] {
        let refused = DirtyLog::open(&path, SLOTS, &disks, BOOT).map(|left| left.len());
        let Err(DirtyLogError::OtherImage { pages: 1, .. }) = refused else {
            panic!("{refused:?} with {disks:?}")
        };
    }
    let refused = DirtyLog::open(&path, SLOTS, &[other], BOOT).err().unwrap();
    assert_eq!(
        refused.to_string(),
        format!(
            "the dirty log {} holds 1 acknowledged pages of disk 0, /images/a (device 1, inode 7, 1073741824 bytes), but that \
             disk is now /images/b (device 1, inode 8, 4096 bytes): serve the old image again, or move the log away and lose them",
            path.display()
        )
    );
    // The image was moved, and grew.
    let moved = DiskIdentity {
        image: "/elsewhere".into(),
        ..identity(7, 2 << 30)
    };
    let left = DirtyLog::open(&path, SLOTS, &[moved], BOOT).unwrap();
    assert_eq!((left.len(), left.set_aside()), (1, None));
    // Once it is empty, any set of disks may use it.
    drop(emptied(left).unwrap());
    assert!(DirtyLog::open(&path, SLOTS, &[identity(8, 1)], BOOT).is_ok());
}

#[test]
fn a_log_of_another_boot_or_of_a_changed_image_is_set_aside() {
    let changed = |modified_ns| DiskIdentity {
        modified_ns: Some(modified_ns),
        ..identity(7, 1 << 30)
    };
    let device = DiskIdentity {
        device: 2,
        ..identity(7, 1 << 30)
    };
    for (now, boot, reason) in [
        (identity(7, 1 << 30), "later", "the host was booted"),
        (identity(8, 1 << 30), BOOT, "/images/a was replaced"),
        (identity(7, (1 << 30) - 512), BOOT, "/images/a was replaced"),
        (device, BOOT, "/images/a was replaced"),
        (changed(5_000_000_001), BOOT, "changed by others"),
        (changed(4_999_999_999), BOOT, "changed by others"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dirty");
        log_of_one(&path);
        let bytes = fs::read(&path).unwrap();
        let disks = [now];
        let left = DirtyLog::open(&path, SLOTS, &disks, boot).unwrap();
        let aside = left.set_aside().unwrap().clone();
        assert!(left.is_empty() && left.pages().next().is_none());
        assert_eq!((&aside.log, aside.pages), (&path, 1));
        assert!(
            fs::read(&aside.now).unwrap() == bytes,
            "renamed, not changed"
        );
        let message = aside.to_string();
        for part in [
            path.to_str().unwrap(),
            aside.now.to_str().unwrap(),
            reason,
            "1 acknowledged pages",
        ] {
            assert!(message.contains(part), "{message}");
        }
        // A new log begins in its place, and a second one set aside has another name.
        let mut log = left.finish(&disks, &HashSet::new()).unwrap();
        log.record(at(1), &signed(1)).unwrap();
        drop(log);
        let left = DirtyLog::open(&path, SLOTS, &disks, "latest").unwrap();
        assert_ne!(left.set_aside().unwrap().now, aside.now);
    }
    // What holds nothing is used again.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    drop(log(&path));
    let left = DirtyLog::open(&path, SLOTS, &image(), "later").unwrap();
    assert_eq!(left.set_aside(), None);
}

/// Disk 0 is the image of most tests, disk 1 another one.
fn two_images() -> [DiskIdentity; 2] {
    let other = DiskIdentity {
        disk: 1,
        image: "/images/b".into(),
        ..identity(8, 1 << 20)
    };
    [identity(7, 1 << 30), other]
}

fn on_second(block: u64) -> Location {
    Location::new(DiskNumber(1), block)
}

/// The pages that are left, as the numbers that [`signed`] them.
fn operations(left: &LeftoverPages) -> Vec<(Location, u64)> {
    let pages = left.pages().map(|found| {
        let (location, page) = found.unwrap();
        let number = u64::from_le_bytes(page[..8].try_into().unwrap());
        assert_eq!(*page, signed(number));
        (location, number)
    });
    pages.collect()
}

#[test]
fn a_replaced_image_sets_aside_its_own_pages_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let disks = two_images();
    let open = |path: &Path, disks: &[DiskIdentity]| DirtyLog::open(path, SLOTS, disks, BOOT);
    let left = open(&path, &disks).unwrap();
    let mut log = left.finish(&disks, &HashSet::new()).unwrap();
    for block in 0..3 {
        log.record(at(block), &signed(block)).unwrap();
        log.record(on_second(block), &signed(10 + block)).unwrap();
    }
    // Newer contents in another slot.
    log.record(at(1), &signed(21)).unwrap();
    let times = ChangeTimes::at(5_000_000_000).until(6_000_000_000);
    // A clock that is set back does not make the time of before another's.
    let back = ChangeTimes::at(5_000_000_000_000).until(1_000_000_000_000);
    let (first, last) = (back.first_ns, back.last_ns);
    assert_eq!((first, last), (1_000_000_000_000, 5_000_000_000_000));
    log.mark(DiskNumber(0), times).unwrap();
    drop(log);

    let replaced = [identity(9, 1 << 30), disks[1].clone()];
    let mut asides = Vec::new();
    for _ in 0..2 {
        // The first one is killed before it has finished: the second one finds the same again.
        let left = open(&path, &replaced).unwrap();
        let others = [(on_second(0), 10), (on_second(1), 11), (on_second(2), 12)];
        assert_eq!(operations(&left), others);
        let aside = left.set_aside().unwrap().clone();
        assert_eq!((aside.pages, aside.of_pages), (3, 6));
        let message = aside.to_string();
        let parts = ["3 of 6 acknowledged pages", "/images/a was replaced"];
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        assert!(!message.contains("/images/b"), "{message}");
        asides.push(aside.now);
    }
    let second = format!("{}-2", asides[0].display());
    assert_eq!(asides[1].to_str(), Some(second.as_str()));
    let left = open(&path, &replaced).unwrap();
    let last = left.set_aside().unwrap().now.clone();
    let log = left.finish(&replaced, &[on_second(1)].into()).unwrap();
    assert_eq!(log.len(), 1);
    drop(log);
    let left = open(&path, &replaced).unwrap();
    assert_eq!(operations(&left), [(on_second(1), 11)]);
    assert_eq!(left.set_aside(), None);
    drop(left);

    // With the old image, which was written while the daemon was killed, each of them is the log of its pages.
    let mut written = disks.clone();
    written[0].modified_ns = Some(6_500_000_000);
    for aside in [&asides[0], &asides[1], &last] {
        let left = open(aside, &written).unwrap();
        assert_eq!(operations(&left), [(at(0), 0), (at(1), 21), (at(2), 2)]);
        assert_eq!((left.torn(), left.set_aside()), (0, None));
    }
    let names: HashSet<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(
        names,
        [path, asides[0].clone(), asides[1].clone(), last].into()
    );
}

#[test]
fn an_image_that_is_not_served_any_more_refuses_the_log_whatever_else_is_stale() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let disks = two_images();
    let left = DirtyLog::open(&path, SLOTS, &disks, BOOT).unwrap();
    let mut log = left.finish(&disks, &HashSet::new()).unwrap();
    log.record(at(1), &signed(1)).unwrap();
    log.record(on_second(1), &signed(2)).unwrap();
    drop(log);
    let before = fs::read(&path).unwrap();
    let refused = DirtyLog::open(&path, SLOTS, &[identity(9, 1 << 30)], BOOT).err();
    assert!(matches!(
        refused,
        Some(DirtyLogError::OtherImage {
            disk: DiskNumber(1),
            ..
        })
    ));
    assert!(fs::read(&path).unwrap() == before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    // Two stale images are both named, and the whole log is renamed.
    let mut changed = disks.clone();
    changed[0].inode = 9;
    changed[1].modified_ns = Some(0);
    let left = DirtyLog::open(&path, SLOTS, &changed, BOOT).unwrap();
    let aside = left.set_aside().unwrap();
    assert!(left.is_empty() && left.is_without_file());
    assert_eq!((aside.pages, aside.of_pages), (2, 2));
    assert!(fs::read(&aside.now).unwrap() == before);
    let message = aside.to_string();
    assert!(
        message.contains("/images/a was replaced") && message.contains("/images/b was changed"),
        "{message}"
    );
}

#[test]
fn our_own_writes_are_not_taken_for_those_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    log.record(at(8), &signed(1)).unwrap();
    let second = 1_000_000_000;
    let open = |modified_ns| {
        let now = DiskIdentity {
            modified_ns: Some(modified_ns),
            ..identity(7, 1 << 30)
        };
        let left = DirtyLog::open(&path, SLOTS, &[now], BOOT).unwrap();
        left.set_aside().is_none()
    };
    let times = ChangeTimes::at(5 * second).until(100 * second);
    log.mark(DiskNumber(0), times).unwrap();
    drop(log);
    // From the last time of rest to some time after the last write was submitted.
    for modified_s in [5, 100, 159] {
        assert!(open(modified_s * second), "{modified_s} s");
    }
    // The clock was set back while writes were in flight: the image has the time of before until one of them ends.
    let back = times.until(2 * second);
    assert_eq!((back.first_ns, back.last_ns), (2 * second, 160 * second));
    assert!(!open(4 * second));
}

#[test]
fn what_could_not_be_written_is_kept_in_the_same_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    for block in 0..10 {
        log.record(at(block), &signed(block)).unwrap();
    }
    drop(log);
    let inode = || std::os::unix::fs::MetadataExt::ino(&fs::metadata(&path).unwrap());
    let before = inode();
    let kept: HashSet<_> = [at(3), at(7)].into();
    // More slots and another disk are asked for; as long as pages are kept, the slots stay.
    let disks = [
        identity(7, 1 << 30),
        DiskIdentity {
            disk: 1,
            ..identity(9, 1 << 20)
        },
    ];
    let left = DirtyLog::open(&path, 2 * SLOTS, &disks, BOOT).unwrap();
    let mut log = left.finish(&disks, &kept).unwrap();
    assert_eq!((log.len(), log.slots()), (2, SLOTS));
    log.record(at(7), &signed(77)).unwrap();
    log.record(Location::new(DiskNumber(1), 0), &signed(5))
        .unwrap();
    drop(log);
    let left = DirtyLog::open(&path, 2 * SLOTS, &disks, BOOT).unwrap();
    let pages: Vec<_> = left.pages().map(Result::unwrap).collect();
    let expected = [
        (at(3), Box::new(signed(3))),
        (at(7), Box::new(signed(77))),
        (Location::new(DiskNumber(1), 0), Box::new(signed(5))),
    ];
    assert_eq!(pages, expected);
    let log = left.finish(&disks, &HashSet::new()).unwrap();
    assert_eq!((log.len(), log.slots()), (0, 2 * SLOTS));
    assert_eq!(inode(), before, "no second file");
}

#[test]
fn a_file_that_is_no_log_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    log.record(at(8), &signed(1)).unwrap();
    drop(log);
    let whole = fs::read(&path).unwrap();
    type Change = fn(&mut Vec<u8>);
    let changes: [(&str, Change); 7] = [
        ("short", |bytes| bytes.truncate(4095)),
        ("magic", |bytes| bytes[0] ^= 1),
        ("version", |bytes| bytes[8] = 1),
        ("header's length", |bytes| bytes[15] = 0xff),
        ("slots", |bytes| bytes[16] ^= 1),
        ("disks", |bytes| bytes[60] ^= 1),
        ("cut off", |bytes| bytes.truncate(bytes.len() - 1)),
    ];
    for (name, change) in changes {
        let mut bytes = whole.clone();
        change(&mut bytes);
        fs::write(&path, &bytes).unwrap();
        let refused = open(&path).map(|left| left.len());
        assert!(
            matches!(refused, Err(DirtyLogError::Foreign { .. })),
            "{name}"
        );
        assert!(fs::read(&path).unwrap() == bytes, "{name}");
    }
    // Of an earlier version, whose header was shorter; and too short for any.
    for (bytes, reason) in [
        (&whole[..40], "version 1, not 2"),
        (&whole[..39], "its size is 39 bytes"),
        (&[b'x'; 40][..], "it begins otherwise"),
    ] {
        let mut bytes = bytes.to_vec();
        bytes[8] = 1;
        fs::write(&path, bytes).unwrap();
        let refused = open(&path).err().unwrap().to_string();
        assert!(refused.contains(&format!("({reason})")), "{refused}");
    }
    // Killed while it was made, before anything was recorded.
    for unfinished in [Vec::new(), vec![0; whole.len()]] {
        fs::write(&path, unfinished).unwrap();
        drop(emptied(open(&path).unwrap()).unwrap());
        assert!(open(&path).unwrap().is_empty());
    }
    for slots in [0, u64::MAX] {
        let refused = DirtyLog::open(&path, slots, &[], BOOT).err();
        assert!(matches!(refused, Some(DirtyLogError::Slots(_))));
    }
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(matches!(open(&link).err(), Some(DirtyLogError::Io { .. })));
}

#[test]
fn pages_with_a_wrong_checksum_are_counted_and_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    for block in 0..3 {
        log.record(at(block), &signed(block)).unwrap();
    }
    drop(log);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    // The file ends with the pages, which begin a page after the entries: one's location, and another one's page.
    let pages = file.metadata().unwrap().len() - SLOTS * PAGE_BYTES as u64;
    file.write_all_at(&[1], pages - PAGE_BYTES as u64 + 7)
        .unwrap();
    file.write_all_at(&[1], pages + PAGE_BYTES as u64 + 100)
        .unwrap();
    let left = open(&path).unwrap();
    assert_eq!((left.len(), left.torn()), (1, 2));
    let (location, page) = left.pages().next().unwrap().unwrap();
    assert_eq!((location, *page), (at(2), signed(2)));
}
