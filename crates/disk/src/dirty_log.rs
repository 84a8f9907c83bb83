//! The dirty log: acknowledged pages that storage does not have yet, in a file, so that they survive the death of the
//! daemon.
//!
//! The file is usually on tmpfs. It is written with `pwrite` and never synced: the next process reads what the previous
//! one has written, however that process ended. A crash of the host loses it, like a disk's volatile cache.
//!
//! ```text
//! header   magic, version, slots, and which image each disk number means; one checksum over all
//! entries  of 32 bytes, one a slot: location, sequence (0: the slot is free), checksum of both and the page; 8 bytes of 0
//! pages    of 4 KiB, one a slot
//! ```
//!
//! A page goes into a free slot, then its entry is written: from then on it is recorded. Only then the entry of the
//! page it replaces is freed. Killed in between, two entries name one location: the higher sequence is the newer. An
//! entry that was not wholly written has a wrong checksum and was never acknowledged. A slot is filled only while its
//! entry is free.
//!
//! Cost: a record is two or three `pwrite`s and a hash of the page; 8 bytes a slot and about 24 a dirty page in memory.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use foldhash::fast::RandomState;
use rustix::fs::{CWD, FallocateFlags, FlockOperation, OFlags, RenameFlags};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::protocol::{set_u32, set_u64, u32_at, u64_at};
use crate::storage::in_time;
use crate::{DirtyPages, DiskNumber, Location, PAGE_BYTES, Page};

/// First word of the file: `PLMSDLG1`.
const MAGIC: u64 = u64::from_le_bytes(*b"PLMSDLG1");
const VERSION: u32 = 1;

/// Bytes of an entry; a divisor of the page size, so that no entry crosses a page boundary.
const ENTRY_BYTES: usize = 32;
/// Bits of the number of a [`Location`].
const LOCATION_BITS: u32 = 62;
const ENTRY_LOCATION: usize = 0;
const ENTRY_SEQUENCE: usize = 8;
const ENTRY_CHECKSUM: usize = 16;

const HEAD_MAGIC: usize = 0;
const HEAD_VERSION: usize = 8;
const HEAD_BYTES: usize = 12;
const HEAD_SLOTS: usize = 16;
const HEAD_CHECKSUM: usize = 24;
const HEAD_JSON_BYTES: usize = 32;
const HEAD_JSON: usize = 40;
/// Largest header: paths of 4 KiB for some hundred disks.
const HEAD_BYTES_MAX: usize = 1 << 20;

/// Maximum number of slots of a log: 4 TiB of pages.
const SLOTS_MAX: u64 = 1 << 30;

/// Why a dirty log cannot be used. It was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum DirtyLogError {
    /// A system call failed.
    #[error("cannot {what} the dirty log {}", path.display())]
    Io {
        path: PathBuf,
        /// The operation that failed.
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// Another daemon has locked it.
    #[error("the dirty log {} is in use by another daemon: stop that one first", path.display())]
    InUse { path: PathBuf },
    /// The file is not a dirty log, or one of another version.
    #[error(
        "{} is not a dirty log that can be read ({reason}): if it is one of another version of plimsoll, run that version \
         once to write its pages to storage; otherwise move it away",
        path.display()
    )]
    Foreign {
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// It holds pages of an image that is not the one configured now.
    #[error(
        "the dirty log {} holds {pages} acknowledged pages of disk {}, {was}, but that disk is now {now}: serve the old image \
         again, or move the log away and lose them",
        path.display(), disk.0
    )]
    OtherImage {
        path: PathBuf,
        /// The disk whose image differs.
        disk: DiskNumber,
        /// Number of these pages.
        pages: u64,
        /// The image they are of.
        was: String,
        /// The image configured now.
        now: String,
    },
    /// More slots than a log can have, or none.
    #[error("the dirty log must have 1 to {SLOTS_MAX} pages; got {0}")]
    Slots(u64),
}

/// Which image a disk number means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskIdentity {
    /// The disk.
    pub disk: u16,
    /// Path of the image, for messages.
    pub image: String,
    /// Device that holds its inode; 0 for a block device.
    pub device: u64,
    /// Its inode; for a block device, the device's number.
    pub inode: u64,
    /// Its size in bytes. It may grow.
    pub size_bytes: u64,
}

impl DiskIdentity {
    /// The identity of an open image of `size_bytes`.
    ///
    /// # Errors
    /// The result of `fstat(2)`.
    pub fn of(disk: DiskNumber, image: &Path, file: &File, size_bytes: u64) -> io::Result<Self> {
        use std::os::unix::fs::FileTypeExt as _;
        let metadata = file.metadata()?;
        let (device, inode) = if metadata.file_type().is_block_device() {
            (0, metadata.rdev())
        } else {
            (metadata.dev(), metadata.ino())
        };
        Ok(Self {
            disk: disk.0,
            image: image.display().to_string(),
            device,
            inode,
            size_bytes,
        })
    }

    /// Whether pages of `self` can be written to `now`.
    fn is_still(&self, now: &Self) -> bool {
        self.device == now.device && self.inode == now.inode && self.size_bytes <= now.size_bytes
    }

    fn describe(&self) -> String {
        let Self {
            image,
            device,
            inode,
            size_bytes,
            ..
        } = self;
        format!("{image} (device {device}, inode {inode}, {size_bytes} bytes)")
    }
}

/// The layout of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    head_bytes: u64,
    slots: u64,
}

impl Layout {
    fn entry(self, slot: u64) -> u64 {
        self.head_bytes + slot * ENTRY_BYTES as u64
    }

    fn page(self, slot: u64) -> u64 {
        self.entry(self.slots).next_multiple_of(PAGE_BYTES as u64) + slot * PAGE_BYTES as u64
    }

    fn file_bytes(self) -> u64 {
        self.page(self.slots)
    }
}

/// The checksum of a recorded page.
fn checksum(location: u64, sequence: u64, page: &Page) -> u64 {
    // The seed distinguishes the page from the same contents at another location or time.
    xxh3_64_with_seed(page, location.rotate_left(32) ^ sequence)
}

fn header(slots: u64, disks: &[DiskIdentity]) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec(disks)?;
    let bytes = (HEAD_JSON + json.len()).next_multiple_of(PAGE_BYTES);
    if bytes > HEAD_BYTES_MAX {
        return Err(io::Error::other("the names of the disks are too long"));
    }
    let number = |n: usize| u32::try_from(n).map_err(io::Error::other);
    let mut header = vec![0; bytes];
    set_u64(&mut header, HEAD_MAGIC, MAGIC);
    set_u32(&mut header, HEAD_VERSION, VERSION);
    set_u32(&mut header, HEAD_BYTES, number(bytes)?);
    set_u64(&mut header, HEAD_SLOTS, slots);
    set_u32(&mut header, HEAD_JSON_BYTES, number(json.len())?);
    header[HEAD_JSON..HEAD_JSON + json.len()].copy_from_slice(&json);
    let sum = xxh3_64(&header); // Of a header without it.
    set_u64(&mut header, HEAD_CHECKSUM, sum);
    Ok(header)
}

/// Reads a header, or returns its error.
fn read_header(file: &File) -> io::Result<Result<(Layout, Vec<DiskIdentity>), String>> {
    let file_bytes = file.metadata()?.len();
    if file_bytes < PAGE_BYTES as u64 {
        return Ok(Err(format!("its size is {file_bytes} bytes")));
    }
    let mut header = vec![0; PAGE_BYTES];
    file.read_exact_at(&mut header, 0)?;
    if u64_at(&header, HEAD_MAGIC) != MAGIC {
        return Ok(Err("it begins otherwise".into()));
    }
    let version = u32_at(&header, HEAD_VERSION);
    if version != VERSION {
        return Ok(Err(format!("version {version}, not {VERSION}")));
    }
    let head_bytes = u32_at(&header, HEAD_BYTES) as usize;
    let slots = u64_at(&header, HEAD_SLOTS);
    if !(PAGE_BYTES..=HEAD_BYTES_MAX).contains(&head_bytes)
        || !head_bytes.is_multiple_of(PAGE_BYTES)
        || !(1..=SLOTS_MAX).contains(&slots)
    {
        return Ok(Err("its header is damaged".into()));
    }
    let layout = Layout {
        head_bytes: head_bytes as u64,
        slots,
    };
    if file_bytes != layout.file_bytes() {
        let right = layout.file_bytes();
        return Ok(Err(format!("its size is {file_bytes} bytes, not {right}")));
    }
    header.resize(head_bytes, 0);
    file.read_exact_at(&mut header, 0)?;
    let sum = u64_at(&header, HEAD_CHECKSUM);
    set_u64(&mut header, HEAD_CHECKSUM, 0);
    let json = header[HEAD_JSON..].get(..u32_at(&header, HEAD_JSON_BYTES) as usize);
    let disks = json.and_then(|json| serde_json::from_slice(json).ok());
    Ok(match disks {
        Some(disks) if sum == xxh3_64(&header) => Ok((layout, disks)),
        _ => Err("its header is damaged".into()),
    })
}

/// What a former daemon left: the first step of opening a [`DirtyLog`]. The log is locked.
pub struct LeftoverPages {
    path: PathBuf,
    slots: u64,
    disks: Vec<DiskIdentity>,
    /// None if there was no log.
    file: Option<(File, Layout)>,
    /// Slot and newest valid sequence by location.
    pages: HashMap<Location, (u64, u64), RandomState>,
    torn: u64,
}

impl LeftoverPages {
    /// Number of pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there are no pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Entries ignored because they were not wholly written, and so never acknowledged.
    #[must_use]
    pub fn torn(&self) -> u64 {
        self.torn
    }

    /// The pages, in the order of their locations.
    pub fn pages(&self) -> impl Iterator<Item = io::Result<(Location, Box<Page>)>> + '_ {
        let mut places: Vec<_> = self
            .pages
            .iter()
            .map(|(at, (slot, _))| (*at, *slot))
            .collect();
        places.sort_unstable();
        let file = self.file.as_ref();
        places.into_iter().filter_map(move |(location, slot)| {
            let (file, layout) = file?;
            let mut page = Box::new([0; PAGE_BYTES]);
            let read = file.read_exact_at(&mut page[..], layout.page(slot));
            Some(read.map(|()| (location, page)))
        })
    }

    /// Creates a new, empty log; to be called when all pages are on stable storage.
    ///
    /// # Errors
    /// If the new log cannot be made; the old one is then unchanged.
    pub fn finish(self) -> Result<DirtyLog, DirtyLogError> {
        let failed = |what, source| DirtyLogError::Io {
            path: self.path.clone(),
            what,
            source,
        };
        // Made beside it and moved over it when it is whole. The lock on the old one is held until then.
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let beside = PathBuf::from(name);
        let file = open(&beside, true).map_err(|error| failed("make", error))?;
        lock(&file, &self.path)?;
        let in_use = || DirtyLogError::InUse {
            path: self.path.clone(),
        };
        if !is_at(&file, &beside).map_err(|error| failed("make", error))? {
            return Err(in_use());
        }
        let make = || -> io::Result<Layout> {
            let header = header(self.slots, &self.disks)?;
            let layout = Layout {
                head_bytes: header.len() as u64,
                slots: self.slots,
            };
            file.set_len(0)?;
            file.write_all_at(&header, 0)?;
            // Allocate all of it now: a file system that is full later must not turn a guest's write into an error.
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, layout.file_bytes())?;
            // A daemon that found no log must not replace one that another daemon has created since.
            let flags = match self.file {
                Some(_) => RenameFlags::empty(),
                None => RenameFlags::NOREPLACE,
            };
            rustix::fs::renameat_with(CWD, &beside, CWD, &self.path, flags)?;
            Ok(layout)
        };
        let layout = make().map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => in_use(),
            _ => failed("write", error),
        })?;
        Ok(DirtyLog {
            path: self.path,
            layout,
            file: Box::new(file),
            places: HashMap::default(),
            free: (0..self.slots).rev().collect(),
            doubtful: Vec::new(),
            sequence: 0,
        })
    }
}

fn open(path: &Path, create: bool) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .mode(0o600)
        .custom_flags(i32::try_from(OFlags::NOFOLLOW.bits()).map_err(io::Error::other)?)
        .open(path)
}

/// Whether the file is (still) the one at this path.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(there) => Ok((ours.dev(), ours.ino()) == (there.dev(), there.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn lock(file: &File, path: &Path) -> Result<(), DirtyLogError> {
    // A process that was just forked holds the lock until it executes another program.
    let locked =
        in_time(
            || match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => Ok(true),
                Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
                Err(error) => Err(DirtyLogError::Io {
                    path: path.to_owned(),
                    what: "lock",
                    source: error.into(),
                }),
            },
        )?;
    if locked {
        Ok(())
    } else {
        Err(DirtyLogError::InUse {
            path: path.to_owned(),
        })
    }
}

/// The medium of a log. Tests replace it by one that fails.
trait Medium: Send {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
}

impl Medium for File {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }
}

/// An open dirty log; locked against others until it is dropped.
///
/// The next daemon writes all pages in it to storage. So a page must be [clean](DirtyPages::clean) before a later write
/// of the block that bypasses the log is acknowledged.
pub struct DirtyLog {
    path: PathBuf,
    layout: Layout,
    file: Box<dyn Medium>,
    /// Slots in use.
    places: HashMap<Location, u64, RandomState>,
    free: Vec<u64>,
    /// Slots whose entries must be freed, but could not be overwritten.
    doubtful: Vec<u64>,
    sequence: u64,
}

impl DirtyLog {
    /// Locks the log at `path` and reads what the previous daemon left in it; [`LeftoverPages::finish`] then creates a log
    /// of `slots` pages for these disks. The file need not exist.
    ///
    /// # Errors
    /// If it is in use, cannot be read, or holds pages of other images than `disks`.
    pub fn open(
        path: &Path,
        slots: u64,
        disks: &[DiskIdentity],
    ) -> Result<LeftoverPages, DirtyLogError> {
        if !(1..=SLOTS_MAX).contains(&slots) {
            return Err(DirtyLogError::Slots(slots));
        }
        let failed = |what, source| DirtyLogError::Io {
            path: path.to_owned(),
            what,
            source,
        };
        let mut left = LeftoverPages {
            path: path.to_owned(),
            slots,
            disks: disks.to_vec(),
            file: None,
            pages: HashMap::default(),
            torn: 0,
        };
        let file = match open(path, false) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(left),
            Err(error) => return Err(failed("open", error)),
        };
        lock(&file, path)?;
        if !is_at(&file, path).map_err(|error| failed("read", error))? {
            // Another daemon has removed or replaced it since it was opened.
            return Err(DirtyLogError::InUse {
                path: path.to_owned(),
            });
        }
        let (layout, was) = read_header(&file)
            .map_err(|error| failed("read", error))?
            .map_err(|reason| DirtyLogError::Foreign {
                path: path.to_owned(),
                reason,
            })?;
        left.scan(&file, layout)
            .map_err(|error| failed("read", error))?;
        left.check(&was)?;
        left.file = Some((file, layout));
        Ok(left)
    }

    /// Number of pages recorded and not clean.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether all pages are clean.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Removes the log if it is empty; returns whether it was.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn close(mut self) -> io::Result<bool> {
        self.settle();
        let empty = self.places.is_empty() && self.doubtful.is_empty();
        if empty {
            fs::remove_file(&self.path)?;
        }
        Ok(empty)
    }

    /// Frees the entry of a slot, now or when it can be overwritten.
    fn release(&mut self, slot: u64) {
        match (self.file).write_at(&[0; ENTRY_BYTES], self.layout.entry(slot)) {
            Ok(()) => self.free.push(slot),
            Err(_) => self.doubtful.push(slot),
        }
    }

    /// Retries freeing the entries that could not be overwritten.
    fn settle(&mut self) {
        for slot in std::mem::take(&mut self.doubtful) {
            self.release(slot);
        }
    }
}

impl DirtyPages for DirtyLog {
    fn record(&mut self, location: Location, page: &Page) -> io::Result<()> {
        self.settle();
        let slot = self.free.pop().ok_or(io::ErrorKind::StorageFull)?;
        let sequence = self.sequence + 1;
        let mut entry = [0; ENTRY_BYTES];
        set_u64(&mut entry, ENTRY_LOCATION, location.number());
        set_u64(&mut entry, ENTRY_SEQUENCE, sequence);
        let sum = checksum(location.number(), sequence, page);
        set_u64(&mut entry, ENTRY_CHECKSUM, sum);
        let written = (self.file)
            .write_at(page, self.layout.page(slot))
            .and_then(|()| (self.file).write_at(&entry, self.layout.entry(slot)));
        if let Err(error) = written {
            self.release(slot);
            return Err(error);
        }
        self.sequence = sequence;
        if let Some(old) = self.places.insert(location, slot) {
            self.release(old);
        }
        Ok(())
    }

    fn clean(&mut self, location: Location) {
        self.settle();
        if let Some(slot) = self.places.remove(&location) {
            self.release(slot);
        }
    }
}

impl LeftoverPages {
    /// Finds the newest valid entry of each location.
    fn scan(&mut self, file: &File, layout: Layout) -> io::Result<()> {
        let mut entries = vec![0; PAGE_BYTES];
        let mut page = Box::new([0; PAGE_BYTES]);
        let per_page = (PAGE_BYTES / ENTRY_BYTES) as u64;
        for first in (0..layout.slots).step_by(PAGE_BYTES / ENTRY_BYTES) {
            let count = per_page.min(layout.slots - first);
            let bytes = usize::try_from(count).map_err(io::Error::other)? * ENTRY_BYTES;
            file.read_exact_at(&mut entries[..bytes], layout.entry(first))?;
            for (slot, entry) in (first..).zip(entries[..bytes].chunks_exact(ENTRY_BYTES)) {
                if entry.iter().all(|byte| *byte == 0) {
                    continue;
                }
                let number = u64_at(entry, ENTRY_LOCATION);
                let sequence = u64_at(entry, ENTRY_SEQUENCE);
                file.read_exact_at(&mut page[..], layout.page(slot))?;
                if number >> LOCATION_BITS != 0
                    || checksum(number, sequence, &page) != u64_at(entry, ENTRY_CHECKSUM)
                {
                    self.torn += 1;
                    continue;
                }
                let location = Location::from_number(number);
                let newest = self.pages.entry(location).or_insert((slot, sequence));
                if newest.1 < sequence {
                    *newest = (slot, sequence);
                }
            }
        }
        Ok(())
    }

    /// Checks that the pages belong to the disks configured now.
    fn check(&self, was: &[DiskIdentity]) -> Result<(), DirtyLogError> {
        let mut pages: HashMap<u16, (u64, u64)> = HashMap::new();
        for location in self.pages.keys() {
            let (count, blocks) = pages.entry(location.disk().0).or_default();
            *count += 1;
            *blocks = (*blocks).max(location.block() + 1);
        }
        for (disk, (count, blocks)) in pages {
            let find = |disks: &[DiskIdentity]| disks.iter().find(|id| id.disk == disk).cloned();
            let (was, now) = (find(was), find(&self.disks));
            let fits = |now: &DiskIdentity| blocks <= now.size_bytes.div_ceil(PAGE_BYTES as u64);
            if let (Some(was), Some(now)) = (&was, &now)
                && was.is_still(now)
                && fits(now)
            {
                continue;
            }
            let describe = |identity: Option<DiskIdentity>, none: &str| {
                identity.map_or(none.to_owned(), |identity| identity.describe())
            };
            return Err(DirtyLogError::OtherImage {
                path: self.path.clone(),
                disk: DiskNumber(disk),
                pages: count,
                was: describe(was, "an unknown image"),
                now: describe(now, "not served"),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
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
        }
    }

    fn disks() -> [DiskIdentity; 2] {
        [identity(0, 100, 1 << 20), identity(1, 101, 1 << 20)]
    }

    fn left(path: &Path) -> Result<LeftoverPages, DirtyLogError> {
        DirtyLog::open(path, SLOTS, &disks())
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
            let mut log = left(&path).unwrap().finish().unwrap();
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
            let empty = left.finish().unwrap();
            prop_assert!(empty.is_empty());
        }
    }

    #[test]
    fn what_could_not_be_freed_is_freed_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dirty");
        let mut log = left(&path).unwrap().finish().unwrap();
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
}
