//! The dirty log: acknowledged pages that storage does not have yet, in a file, so that they survive the death of the
//! daemon.
//!
//! The file is on tmpfs. It is written with `pwrite` and never synced: the next process reads what the previous one has
//! written, however that process ended. A crash of the host loses it, like a disk's volatile cache. Should it survive
//! (it was copied, or put on a disk), it is older than the image and must not be written over it: so a log of another
//! boot is set aside, and so are the pages of an image that was replaced, or changed by anyone but the daemon.
//!
//! ```text
//! header   magic, version, slots, boot, run, and which image each disk number means; one checksum over all. Two copies
//! marks    of 16 bytes, one a disk: when our writes may have changed its image
//! entries  of 32 bytes, one a slot: location, sequence (0: the slot is free), checksum of both and the page; 8 bytes of 0
//! pages    of 4 KiB, one a slot
//! ```
//!
//! A page goes into a free slot, then its entry is written: from then on it is recorded. Only then the entry of the
//! page it replaces is freed. Killed in between, two entries name one location: the higher sequence is the newer. An
//! entry that was not wholly written has a wrong checksum and was never acknowledged. A slot is filled only while its
//! entry is free.
//!
//! The next daemon goes on with the same file: it frees what it has written to storage, and keeps the rest.
//!
//! Cost: a record is two or three `pwrite`s and a hash of the page, a read a `pread`; 8 bytes a slot and about 24 a dirty
//! page in memory.

mod header;
mod leftover;

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use foldhash::fast::RandomState;
use rustix::fs::{FlockOperation, OFlags};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::header::{Found, HEAD_BYTES};
use crate::protocol::set_u64;
use crate::storage::in_time;
use crate::{DirtyPages, DiskNumber, Location, PAGE_BYTES, Page};

pub use self::header::ChangeTimes;
pub use self::leftover::LeftoverPages;

/// Bytes of an entry; a divisor of the page size, so that no entry crosses a page boundary.
const ENTRY_BYTES: usize = 32;
/// Bits of the number of a [`Location`].
const LOCATION_BITS: u32 = 62;
const ENTRY_LOCATION: usize = 0;
const ENTRY_SEQUENCE: usize = 8;
const ENTRY_CHECKSUM: usize = 16;

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
    #[error("the dirty log {} is in use by another daemon: give this VM another --name or --state, or stop that one", path.display())]
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
    /// It holds pages of an image that is not served: it is the log of another VM.
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
    /// When it was last modified, in ns since 1970; `None` for a block device, which does not tell.
    pub modified_ns: Option<i64>,
}

impl DiskIdentity {
    /// The identity of an open image of `size_bytes`.
    ///
    /// # Errors
    /// The result of `fstat(2)`.
    pub fn of(disk: DiskNumber, image: &Path, file: &File, size_bytes: u64) -> io::Result<Self> {
        use std::os::unix::fs::FileTypeExt as _;
        let metadata = file.metadata()?;
        let is_device = metadata.file_type().is_block_device();
        let (device, inode) = if is_device {
            (0, metadata.rdev())
        } else {
            (metadata.dev(), metadata.ino())
        };
        let modified_ns = metadata
            .mtime()
            .saturating_mul(1_000_000_000)
            .saturating_add(metadata.mtime_nsec());
        Ok(Self {
            disk: disk.0,
            // A relative one names another image in another directory.
            image: std::path::absolute(image)?.display().to_string(),
            device,
            inode,
            size_bytes,
            modified_ns: (!is_device).then_some(modified_ns),
        })
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

/// Pages that were not written to storage: a log that was renamed, or pages of some disks, moved to a log of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetAside {
    /// Path of the log.
    pub log: PathBuf,
    /// Its path now.
    pub now: PathBuf,
    /// Acknowledged pages in it.
    pub pages: u64,
    /// Acknowledged pages that the log had.
    pub of_pages: u64,
    /// Why.
    pub reason: String,
}

impl std::fmt::Display for SetAside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            log,
            now,
            pages,
            of_pages,
            reason,
        } = self;
        let (log, now) = (log.display(), now.display());
        if pages == of_pages {
            write!(
                f,
                "the dirty log {log} with {pages} acknowledged pages was set aside as {now} and not written to storage: {reason}"
            )
        } else {
            write!(
                f,
                "{pages} of {of_pages} acknowledged pages of the dirty log {log} were set aside as {now} and not written to \
                 storage: {reason}"
            )
        }
    }
}

/// The layout of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    slots: u64,
}

impl Layout {
    fn entry(self, slot: u64) -> u64 {
        HEAD_BYTES + slot * ENTRY_BYTES as u64
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
    fn read_all_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;
}

impl Medium for File {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn read_all_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(bytes, offset)
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
    /// Locks the log at `path` and reads what the previous daemon left in it; [`LeftoverPages::finish`] then makes it a
    /// log of `slots` pages. The file need not exist. `boot` is the [present boot](boot_id) of the host.
    ///
    /// A log of another boot is [set aside](LeftoverPages::set_aside), and so are the pages of an image of the same path that
    /// was replaced or changed by others.
    ///
    /// # Errors
    /// If it is in use, cannot be read, or holds pages of images that are not among `disks`.
    pub fn open(
        path: &Path,
        slots: u64,
        disks: &[DiskIdentity],
        boot: &str,
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
            boot: boot.to_owned(),
            file: None,
            found: None,
            pages: HashMap::default(),
            used: Vec::new(),
            torn: 0,
            set_aside: None,
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
        match header::read(&file).map_err(|error| failed("read", error))? {
            Found::Unfinished => {}
            Found::Foreign(reason) => {
                return Err(DirtyLogError::Foreign {
                    path: path.to_owned(),
                    reason,
                });
            }
            Found::Log {
                head,
                layout,
                number,
            } => {
                left.scan(&file, layout)
                    .map_err(|error| failed("read", error))?;
                left.found = Some((layout, number));
                if let Some(stale) = left.stale(&file, &head, disks)? {
                    return left.set_stale_aside(file, &head, stale);
                }
            }
        }
        left.file = Some(file);
        Ok(left)
    }

    /// Number of pages that it can hold.
    pub fn slots(&self) -> u64 {
        self.layout.slots
    }

    /// Records when our writes may change the disk's image: before the first write is submitted, as long as writes are
    /// in flight, and when none is any more.
    ///
    /// # Errors
    /// If it cannot be recorded: the next daemon may then take our writes for those of others.
    pub fn mark(&self, disk: DiskNumber, times: ChangeTimes) -> io::Result<()> {
        header::write_mark(&*self.file, disk, times)
    }

    /// Number of pages recorded and not clean.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether all pages are clean.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Removes the log if it is empty; returns whether it was.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn close(mut self) -> io::Result<bool> {
        if !self.is_empty() {
            self.settle();
            return Ok(false);
        }
        fs::remove_file(&self.path)?;
        Ok(true)
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

    fn read(&mut self, location: Location, page: &mut Page) -> io::Result<()> {
        let slot = self.places.get(&location).ok_or(io::ErrorKind::NotFound)?;
        self.file.read_all_at(page, self.layout.page(*slot))
    }

    fn clean(&mut self, location: Location) {
        self.settle();
        if let Some(slot) = self.places.remove(&location) {
            self.release(slot);
        }
    }
}

/// The host's present boot, as the kernel names it.
///
/// # Errors
/// If the kernel does not tell.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

#[cfg(test)]
mod tests;
