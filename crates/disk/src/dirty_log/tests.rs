//! The log among writes that fail, and processes that die.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use proptest::prelude::*;

use super::{
    ChangeTimes, DirtyLog, DirtyLogError, DirtyPages as _, DiskIdentity, ENTRY_BYTES,
    ENTRY_CHECKSUM, ENTRY_LOCATION, File, LOCATION_BITS, Layout, LeftoverPages, Medium, PAGE_BYTES,
    Page, Path, checksum, io, is_at, open, set_u64,
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

#[test]
fn a_file_is_at_its_path_until_it_is_replaced_or_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let file = open(&path, true).unwrap();
    assert!(is_at(&file, &path).unwrap());
    let other = folder.path().join("other");
    drop(open(&other, true).unwrap());
    std::fs::rename(&other, &path).unwrap();
    assert!(!is_at(&file, &path).unwrap());
    std::fs::remove_file(&path).unwrap();
    assert!(!is_at(&file, &path).unwrap());
    drop(open(&path, true).unwrap());
    let error = is_at(&file, &path.join("below")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
}

#[test]
fn all_pages_of_a_log_of_many_slots_are_found() {
    // Not a multiple of the entries of a page.
    const MANY: u64 = 300;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let open = || DirtyLog::open(&path, MANY, &disks(), "boot").unwrap();
    let mut log = open().finish(&disks(), &HashSet::new()).unwrap();
    let pages =
        || (0..MANY).map(|number| (at((number % 2) as u16, number / 2), number.to_le_bytes()[0]));
    for (location, byte) in pages() {
        log.record(location, &page(byte)).unwrap();
    }
    drop(log);
    let left = open();
    assert_eq!((contents(&left), left.torn()), (pages().collect(), 0));
    assert!(!left.is_empty() && !left.is_without_file());
    let locations: HashSet<_> = left.locations().collect();
    assert_eq!(locations, pages().map(|(location, _)| location).collect());
    // What is freed is found free again, wherever it is.
    let log = left.finish(&disks(), &[at(1, 149)].into()).unwrap();
    assert_eq!((log.len(), log.free.len()), (1, 299));
    drop(log);
    assert_eq!(contents(&open()), BTreeMap::from([(at(1, 149), 43)]));
}

#[test]
fn what_recovery_writes_to_an_image_is_no_change_by_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let mut log = log(&path);
    log.record(at(1, 1), &page(1)).unwrap();
    drop(log);
    let before = ChangeTimes::now_ns();
    assert!(before > 1_700_000_000_000_000_000, "after 2023");
    left(&path).unwrap().writing(DiskNumber(1)).unwrap();
    // Killed while it wrote: the image is as new as that.
    for (modified_ns, ours) in [
        (before, true),
        (ChangeTimes::now_ns() + 30_000_000_000, true),
        (ChangeTimes::now_ns() + 70_000_000_000, false),
    ] {
        let mut disks = disks();
        disks[1].modified_ns = Some(modified_ns);
        let left = DirtyLog::open(&path, SLOTS, &disks, "boot").unwrap();
        assert_eq!(left.set_aside().is_none(), ours, "{modified_ns}");
    }
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

/// A daemon of another build reads these bytes: whoever changes them changes the version.
#[test]
fn the_bytes_of_a_log_are_those_of_its_version() {
    const MARKS: usize = 2 << 20;
    const ENTRIES: usize = MARKS + 4096 * 16;
    const PAGES: usize = ENTRIES + PAGE_BYTES;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    drop(log(&path));
    let mut log = log(&path);
    let times = ChangeTimes {
        first_ns: 3,
        last_ns: 4,
    };
    log.mark(DiskNumber(1), times).unwrap();
    log.record(at(0, 1), &page(1)).unwrap();
    log.record(at(1, 2), &page(2)).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let words = |at: usize, count| {
        let words = bytes[at..].as_chunks::<8>().0[..count].iter();
        words
            .map(|word| u64::from_le_bytes(*word))
            .collect::<Vec<_>>()
    };
    assert_eq!(bytes.len(), PAGES + 6 * PAGE_BYTES);
    for (copy, number) in [(0, 0), (1 << 20, 1)] {
        assert_eq!(bytes[copy..copy + 12], *b"PLMSDLG1\x02\0\0\0");
        assert_eq!(
            (words(copy + 16, 1), words(copy + 32, 1)),
            (vec![SLOTS], vec![number])
        );
        assert!(bytes[copy + 40..].starts_with(b"{\"boot\":\"boot\","));
    }
    assert_eq!(words(MARKS, 4), [0, 0, 3, 4]);
    let sum = |location, sequence, byte| checksum(location, sequence, &page(byte));
    let second = 1 << 50 | 2;
    assert_eq!(words(ENTRIES, 3), [1, 1, sum(1, 1, 1)]);
    assert_eq!(words(ENTRIES + 32, 3), [second, 2, sum(second, 2, 2)]);
    assert_eq!(bytes[PAGES..PAGES + PAGE_BYTES], page(1));
    assert_eq!(bytes[PAGES + PAGE_BYTES..][..PAGE_BYTES], page(2));
    // The checksum is xxh3 of the page, with a seed that swaps the halves of the location.
    let seed = (1 << 18 | 2 << 32) ^ 2;
    assert_eq!(sum(second, 2, 2), super::xxh3_64_with_seed(&page(2), seed));
    assert_eq!(sum(1 << 33, 2, 2), super::xxh3_64_with_seed(&page(2), 0));
    // Each run has another name.
    let head = |copy: usize| &bytes[copy + 40..copy + 200];
    assert_ne!(head(0), head(1 << 20));
}

#[test]
fn names_that_fill_a_header_are_kept_and_longer_ones_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let named = |image: String| {
        let identity = DiskIdentity {
            image,
            ..identity(0, 100, 1 << 20)
        };
        [identity]
    };
    drop(log(&path));
    let finish = |disks: &[DiskIdentity]| {
        let left = DirtyLog::open(&path, SLOTS, disks, "boot").unwrap();
        left.finish(disks, &HashSet::new()).map(drop)
    };
    // What a header has besides the name, which is written by the second process into the second copy.
    finish(&named(String::new())).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let json_bytes = u32::from_le_bytes(bytes[(1 << 20) + 12..][..4].try_into().unwrap());
    let room = (1 << 20) - 40 - json_bytes as usize;
    let largest = named("a".repeat(room));
    finish(&largest).unwrap();
    let written = DirtyLog::open(&path, SLOTS, &largest, "boot").unwrap();
    assert_eq!(written.found.map(|(_, number)| number), Some(2));
    drop(written);
    let error = finish(&named("a".repeat(room + 1))).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(source, "the names of the disks are too long");
    assert!(left(&path).unwrap().is_empty());
}

#[test]
fn an_image_is_known_by_its_file_and_its_time() {
    use std::os::unix::fs::MetadataExt as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let file = open(&path, true).unwrap();
    let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_600_000_000, 7);
    file.set_modified(time).unwrap();
    let metadata = file.metadata().unwrap();
    let expected = DiskIdentity {
        disk: 3,
        image: path.display().to_string(),
        device: metadata.dev(),
        inode: metadata.ino(),
        size_bytes: 512,
        modified_ns: Some(1_600_000_000_000_000_007),
    };
    let identity = DiskIdentity::of(DiskNumber(3), &path, &file, 512).unwrap();
    assert_eq!(identity, expected);
}

#[test]
fn a_boot_has_a_name_of_its_own() {
    let boot = super::boot_id().unwrap();
    let parts: Vec<_> = boot.split('-').map(str::len).collect();
    assert_eq!(parts, [8, 4, 4, 4, 12], "{boot}");
}
