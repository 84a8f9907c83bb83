//! The log among writes that fail, and processes that die.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use proptest::prelude::*;

use super::{
    DirtyLog, DirtyLogError, DirtyPages as _, DiskIdentity, ENTRY_BYTES, ENTRY_CHECKSUM,
    ENTRY_LOCATION, File, LOCATION_BITS, Layout, LeftoverPages, Medium, PAGE_BYTES, Page, Path,
    checksum, io, open, set_u64,
};
use crate::{DiskNumber, Location};

const SLOTS: u64 = 6;

fn identity(disk: u16, inode: u64, size_bytes: u64) -> DiskIdentity {
    DiskIdentity {
        disk,
        image: format!("/images/{inode}"),
        device: 9,
        inode,
        size_bytes,
        modified_ns: Some(0),
    }
}

fn disks() -> [DiskIdentity; 2] {
    [identity(0, 100, 1 << 20), identity(1, 101, 1 << 20)]
}

fn left(path: &Path) -> Result<LeftoverPages, DirtyLogError> {
    DirtyLog::open(path, SLOTS, &disks(), "boot")
}

/// A log in which nothing is left.
fn log(path: &Path) -> DirtyLog {
    let left = left(path).unwrap();
    left.finish(&disks(), &HashSet::new()).unwrap()
}

fn at(disk: u16, block: u64) -> Location {
    Location::new(DiskNumber(disk), block)
}

fn page(byte: u8) -> Page {
    let mut page = [byte; PAGE_BYTES];
    page[0] = !byte;
    page
}

/// What is left, as the byte that the pages are made of.
fn contents(left: &LeftoverPages) -> BTreeMap<Location, u8> {
    let pages = left.pages().map(|found| {
        let (location, found) = found.unwrap();
        assert_eq!(*found, page(found[1]), "a torn page");
        (location, found[1])
    });
    pages.collect()
}

/// Accepts writes until its end: of the last write only a part is stored, and nothing afterwards.
struct FailingWriter {
    file: File,
    writes_left: Arc<AtomicU64>,
    /// Bytes of the last write, in 256ths.
    part: u8,
}

impl Medium for FailingWriter {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let left = self.writes_left.load(Relaxed);
        self.writes_left.store(left.saturating_sub(1), Relaxed);
        match left {
            0 => Err(io::Error::other("dead")),
            1 => {
                let written = bytes.len() * usize::from(self.part) / 256;
                self.file.write_at(&bytes[..written], offset)?;
                Err(io::Error::other("killed"))
            }
            _ => self.file.write_at(bytes, offset),
        }
    }

    fn read_all_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        Medium::read_all_at(&self.file, bytes, offset)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Killed before or during any write, a log has all that was acknowledged, and all or nothing of the operation
    /// in progress.
    #[test]
    fn what_was_acknowledged_is_recovered(
        steps in proptest::collection::vec((0u64..8, any::<u8>(), 0u8..4), 1..60),
        writes in 1u64..100,
        part in any::<u8>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dirty");
        let mut log = log(&path);
        let writes_left = Arc::new(AtomicU64::new(writes));
        let file = open(&path, false).unwrap();
        log.file = Box::new(FailingWriter { file, writes_left: writes_left.clone(), part });
        let mut twin = BTreeMap::new();
        let mut allowed = vec![twin.clone()];
        for (block, byte, kind) in steps {
            let location = at((block % 2) as u16, block);
            if kind == 0 {
                log.clean(location);
                twin.remove(&location);
            } else if twin.len() as u64 == SLOTS && !twin.contains_key(&location) {
                let full = log.record(location, &page(byte)).unwrap_err();
                prop_assert_eq!(full.kind(), io::ErrorKind::StorageFull);
            } else if log.free.is_empty() {
                // A location in a full log cannot be overwritten, because both pages need a slot for a short time.
                prop_assert!(log.record(location, &page(byte)).is_err());
            } else {
                let recorded = log.record(location, &page(byte));
                prop_assert!(recorded.is_ok() || writes_left.load(Relaxed) == 0);
                twin.insert(location, byte);
                if recorded.is_ok() {
                    let mut read = [0; PAGE_BYTES];
                    log.read(location, &mut read).unwrap();
                    prop_assert_eq!(read, page(byte));
                }
            }
            if writes_left.load(Relaxed) == 0 {
                allowed.push(twin);
                break;
            }
            allowed = vec![twin.clone()];
        }
        drop(log);
        let left = left(&path).unwrap();
        let found = contents(&left);
        prop_assert!(allowed.contains(&found), "{found:?} is none of {allowed:?}");
        prop_assert!(left.torn() <= 1);
        let empty = left.finish(&disks(), &HashSet::new()).unwrap();
        prop_assert!(empty.is_empty());
    }
}

#[test]
fn what_could_not_be_freed_is_freed_later() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    log.record(at(0, 1), &page(1)).unwrap();
    let file = std::mem::replace(
        &mut log.file,
        Box::new(FailingWriter {
            file: open(&path, false).unwrap(),
            writes_left: Arc::default(),
            part: 0,
        }),
    );
    log.clean(at(0, 1));
    assert!(log.record(at(0, 2), &page(2)).is_err());
    log.file = file;
    log.record(at(0, 3), &page(3)).unwrap();
    drop(log);
    let left = left(&path).unwrap();
    assert_eq!(contents(&left), BTreeMap::from([(at(0, 3), 3)]));
}

#[test]
fn a_log_whose_pages_are_all_clean_is_removed_though_an_entry_could_not_be_freed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    log.record(at(0, 1), &page(1)).unwrap();
    assert!(!log.is_empty());
    log.file = Box::new(FailingWriter {
        file: open(&path, false).unwrap(),
        writes_left: Arc::default(),
        part: 0,
    });
    log.clean(at(0, 1));
    assert!(log.is_empty() && log.close().unwrap());
    assert!(!path.exists(), "the next daemon would write the page again");
}

/// The bytes of an entry of a log of [`SLOTS`].
fn entry(path: &Path, slot: u64) -> [u8; ENTRY_BYTES] {
    let mut bytes = [0; ENTRY_BYTES];
    let layout = Layout { slots: SLOTS };
    let file = open(path, false).unwrap();
    Medium::read_all_at(&file, &mut bytes, layout.entry(slot)).unwrap();
    bytes
}

fn set_entry(path: &Path, slot: u64, bytes: &[u8]) {
    let layout = Layout { slots: SLOTS };
    let file = open(path, false).unwrap();
    Medium::write_at(&file, bytes, layout.entry(slot)).unwrap();
}

#[test]
fn of_two_entries_of_a_block_the_newer_counts_wherever_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    log.record(at(0, 1), &page(1)).unwrap();
    let first = entry(&path, 0);
    log.record(at(0, 1), &page(2)).unwrap();
    let second = entry(&path, 1);
    // Killed before the older one was freed, which is before the newer one.
    set_entry(&path, 0, &first);
    drop(log);
    let old = left(&path).unwrap();
    assert_eq!(contents(&old), BTreeMap::from([(at(0, 1), 2)]));
    // In the next process as well, which keeps the page and gets a newer one; its slot is the first.
    let kept = [at(0, 1)].into();
    let mut log = old.finish(&disks(), &kept).unwrap();
    log.record(at(0, 1), &page(3)).unwrap();
    set_entry(&path, 1, &second);
    drop(log);
    let left = left(&path).unwrap();
    assert_eq!(contents(&left), BTreeMap::from([(at(0, 1), 3)]));
}

#[test]
fn a_location_of_too_many_bits_is_none_though_its_checksum_is_right() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    log.record(at(0, 1), &page(1)).unwrap();
    drop(log);
    let number = at(0, 1).number() | 1 << LOCATION_BITS;
    let mut bytes = entry(&path, 0);
    set_u64(&mut bytes, ENTRY_LOCATION, number);
    set_u64(&mut bytes, ENTRY_CHECKSUM, checksum(number, 1, &page(1)));
    set_entry(&path, 0, &bytes);
    let left = left(&path).unwrap();
    assert_eq!((left.len(), left.torn()), (0, 1));
}

#[test]
fn pages_beyond_the_end_of_their_image_are_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    log.record(at(0, 256), &page(1)).unwrap();
    log.record(at(1, 255), &page(2)).unwrap();
    drop(log);
    let left = left(&path).unwrap();
    assert_eq!(contents(&left), BTreeMap::from([(at(1, 255), 2)]));
    assert_eq!(left.set_aside().map(|aside| aside.pages), Some(1));
}

#[test]
fn a_header_is_replaced_beside_the_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    drop(log(&path));
    drop(log(&path));
    // The first copy, as if its writer had been killed.
    let file = open(&path, false).unwrap();
    Medium::write_at(&file, &[0xff; 4096], 0).unwrap();
    drop(file);
    assert!(left(&path).unwrap().is_empty());
}
