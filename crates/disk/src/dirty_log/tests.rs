//! The log among writes that fail, and processes that die.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use proptest::prelude::*;

use super::{
    DirtyLog, DirtyLogError, DirtyPages as _, DiskIdentity, File, LeftoverPages, Medium,
    PAGE_BYTES, Page, Path, io, open,
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
