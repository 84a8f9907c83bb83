//! The dirty log: what a killed daemon leaves to the next one, and which logs are refused.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, thread};

use plimsoll_disk::{
    DirtyLog, DirtyLogError, DirtyPages as _, DiskIdentity, DiskNumber, LeftoverPages, Location,
    PAGE_BYTES, Page,
};

const SLOTS: u64 = 64;
const BLOCKS: u64 = 48;

fn identity(inode: u64, size_bytes: u64) -> DiskIdentity {
    DiskIdentity {
        disk: 0,
        image: "/images/a".into(),
        device: 1,
        inode,
        size_bytes,
    }
}

fn open(path: &Path) -> Result<LeftoverPages, DirtyLogError> {
    DirtyLog::open(path, SLOTS, &[identity(7, 1 << 30)])
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
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
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
    let mut log = open(Path::new(&path)).unwrap().finish().unwrap();
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
    let mut log = open(&path).unwrap().finish().unwrap();
    assert!(matches!(open(&path), Err(DirtyLogError::InUse { .. })));
    log.record(at(1), &signed(1)).unwrap();
    assert_eq!(log.len(), 1);
    assert!(!log.close().unwrap(), "not empty");

    let left = open(&path).unwrap();
    assert_eq!((left.len(), left.torn()), (1, 0));
    assert!(matches!(open(&path), Err(DirtyLogError::InUse { .. })));
    let log = left.finish().unwrap();
    assert!(matches!(open(&path), Err(DirtyLogError::InUse { .. })));
    assert!(log.close().unwrap());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn of_two_daemons_that_found_no_log_one_makes_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let (first, second) = (open(&path).unwrap(), open(&path).unwrap());
    let mut log = first.finish().unwrap();
    log.record(at(1), &signed(1)).unwrap();
    assert!(matches!(second.finish(), Err(DirtyLogError::InUse { .. })));
    drop(log);
    assert_eq!(open(&path).unwrap().len(), 1);
}

#[test]
fn pages_stay_until_the_next_daemon_says_they_are_on_storage() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = open(&path).unwrap().finish().unwrap();
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
    let left = DirtyLog::open(&path, 2, &disks).unwrap();
    let mut log = left.finish().unwrap();
    assert!(log.is_empty());
    let second = Location::new(DiskNumber(1), 0);
    log.record(second, &signed(1)).unwrap();
    log.record(at(0), &signed(2)).unwrap();
    let full = log.record(at(1), &signed(3)).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    drop(log);
    assert_eq!(DirtyLog::open(&path, 2, &disks).unwrap().len(), 2);
}

#[test]
fn pages_of_another_image_are_not_given_away() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = open(&path).unwrap().finish().unwrap();
    log.record(at(8), &signed(1)).unwrap();
    drop(log);
    let device = DiskIdentity {
        device: 2,
        ..identity(7, 1 << 30)
    };
    let number = DiskIdentity {
        disk: 1,
        ..identity(7, 1 << 30)
    };
    for disks in [
        vec![identity(8, 1 << 30)],
        vec![identity(7, (1 << 30) - 512)],
        vec![device],
        vec![number],
        vec![],
    ] {
        let refused = DirtyLog::open(&path, SLOTS, &disks).map(|left| left.len());
        let Err(DirtyLogError::OtherImage { pages: 1, .. }) = refused else {
            panic!("{refused:?} with {disks:?}")
        };
    }
    assert_eq!(
        DirtyLog::open(&path, SLOTS, &[identity(8, 4096)])
            .err()
            .unwrap()
            .to_string(),
        format!(
            "the dirty log {} holds 1 acknowledged pages of disk 0, /images/a (device 1, inode 7, 1073741824 bytes), but that \
             disk is now /images/a (device 1, inode 8, 4096 bytes): serve the old image again, or move the log away and lose them",
            path.display()
        )
    );
    let grown = DiskIdentity {
        image: "/elsewhere".into(),
        ..identity(7, 2 << 30)
    };
    let left = DirtyLog::open(&path, SLOTS, &[grown]).unwrap();
    // Once it is empty, any set of disks may use it.
    drop(left.finish().unwrap());
    assert!(DirtyLog::open(&path, SLOTS, &[identity(8, 1)]).is_ok());
}

#[test]
fn a_file_that_is_no_log_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = open(&path).unwrap().finish().unwrap();
    log.record(at(8), &signed(1)).unwrap();
    drop(log);
    let whole = fs::read(&path).unwrap();
    type Change = fn(&mut Vec<u8>);
    let changes: [(&str, Change); 9] = [
        ("empty", Vec::clear),
        ("short", |bytes| bytes.truncate(4095)),
        ("zeros", |bytes| bytes.fill(0)),
        ("magic", |bytes| bytes[0] ^= 1),
        ("version", |bytes| bytes[8] = 2),
        ("header's length", |bytes| bytes[13] = 0xff),
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
    for slots in [0, u64::MAX] {
        let refused = DirtyLog::open(&path, slots, &[]).err();
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
    let mut log = open(&path).unwrap().finish().unwrap();
    for block in 0..3 {
        log.record(at(block), &signed(block)).unwrap();
    }
    drop(log);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    // The entries begin after a page of header: one's location, and another one's page, that after 2 KiB of entries.
    file.write_all_at(&[1], PAGE_BYTES as u64 + 7).unwrap();
    file.write_all_at(&[1], 2 * PAGE_BYTES as u64 + PAGE_BYTES as u64 + 100)
        .unwrap();
    let left = open(&path).unwrap();
    assert_eq!((left.len(), left.torn()), (1, 2));
    let (location, page) = left.pages().next().unwrap().unwrap();
    assert_eq!((location, *page), (at(2), signed(2)));
}
