//! Types shared by a disk's queues, its cache and its storage.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::Buffer;

/// Bytes of a page and of a block.
pub const PAGE_BYTES: usize = 4096;

/// The contents of a page.
pub type Page = [u8; PAGE_BYTES];

/// Number of a disk of the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DiskNumber(pub u16);

/// A block of a disk of the VM: where a page of contents is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location(u64);

impl Location {
    /// Blocks of a disk are numbered below this: disks of up to 4 EiB.
    pub const BLOCKS_MAX: u64 = 1 << 50;
    /// Disks are numbered below this.
    pub const DISKS_MAX: u16 = 1 << 12;

    /// The block `block` (of 4 KiB, below [`BLOCKS_MAX`](Self::BLOCKS_MAX)) of a disk.
    pub const fn new(disk: DiskNumber, block: u64) -> Self {
        debug_assert!(block < Self::BLOCKS_MAX && disk.0 < Self::DISKS_MAX);
        Self((disk.0 as u64) << 50 | block)
    }

    /// The location with that [`number`](Self::number).
    pub(crate) fn from_number(number: u64) -> Self {
        Self(number)
    }

    /// The disk.
    pub fn disk(self) -> DiskNumber {
        DiskNumber((self.0 >> 50) as u16)
    }

    /// Block of the disk.
    pub fn block(self) -> u64 {
        self.0 & (Self::BLOCKS_MAX - 1)
    }

    /// Disk and block in one number, below 2^62: the identity of the page in curves.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.disk().0, self.block())
    }
}

/// Guest memory that data is copied from and to. Addresses are guest-physical, supplied by the guest and not to be
/// trusted.
pub trait GuestData: Send + Sync {
    /// Copies from the guest.
    ///
    /// # Errors
    /// [`OutsideRam`] if any byte of the range is; the contents of `bytes` are then undefined.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam>;

    /// Copies to the guest.
    ///
    /// # Errors
    /// [`OutsideRam`] if any byte of the range is; part of it may have been written.
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideRam>;

    /// Whether the page frame is RAM, by its number.
    fn is_ram(&self, frame: u64) -> bool;
}

/// A range of guest-physical addresses is not wholly RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes at guest-physical {address:#x} are not RAM")]
pub struct OutsideRam {
    /// First address of the range.
    pub address: u64,
    /// Length of the range in bytes.
    pub bytes: usize,
}

/// A piece of a request's data in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
}

/// A range of a disk, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Identifies a request until it is completed. Chosen by the submitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tag(pub u64);

/// Request of a guest. Ranges are within the disk and multiples of 512 bytes, which the submitter has checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Read the data from `offset` on into `segments`.
    Read {
        /// First byte.
        offset: u64,
        /// Destination of the data.
        segments: Vec<Segment>,
    },
    /// Write `segments` to the disk from `offset` on.
    Write {
        /// First byte.
        offset: u64,
        /// Source of the data.
        segments: Vec<Segment>,
        /// Whether it must be on stable storage before it completes (the disk has no volatile cache for this guest).
        durable: bool,
    },
    /// All writes completed so far must be on stable storage before this completes.
    Flush,
    /// The ranges' contents are no longer needed; reads return arbitrary data until the next write.
    Discard(Vec<ByteRange>),
    /// The ranges read as zeros; with `unmap` their storage may be freed.
    WriteZeroes {
        /// The ranges.
        ranges: Vec<ByteRange>,
        /// Whether their storage may be freed.
        unmap: bool,
        /// As for a write.
        durable: bool,
    },
}

/// A guest's request. Holds the guest's memory until it is completed.
pub struct Request {
    /// The disk.
    pub disk: DiskNumber,
    /// Its identifier.
    pub tag: Tag,
    /// The operation.
    pub operation: Operation,
    /// The memory that holds the segments.
    pub ram: Arc<dyn GuestData>,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok,
    /// Failed; a read's buffer and a written range hold arbitrary mixtures of old and new.
    IoError,
    /// The disk cannot do this.
    Unsupported,
}

/// A completed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestResult {
    /// The disk.
    pub disk: DiskNumber,
    /// Its identifier.
    pub tag: Tag,
    /// Its result.
    pub status: Status,
    /// Whether it is a read of which the cache did not serve all.
    pub read_storage: bool,
}

/// Identifies a submission until it is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SubmissionId(pub u64);

/// I/O submission to the storage of a disk.
pub enum Action {
    /// Read into the buffer from `offset` on.
    Read {
        /// First byte.
        offset: u64,
        /// Destination, of the length to be read.
        buffer: Buffer,
    },
    /// Write the buffer to the storage from `offset` on.
    Write {
        /// First byte.
        offset: u64,
        /// The data.
        buffer: Buffer,
    },
    /// Make everything carried out so far stable.
    Sync,
    /// Free the range (its contents become arbitrary).
    Discard(ByteRange),
    /// Make the range read as zeros; with `unmap` by freeing it, where the storage can.
    Zero {
        /// The range.
        range: ByteRange,
        /// Whether to free it.
        unmap: bool,
    },
}

impl Action {
    /// Whether it changes the storage's contents.
    pub(crate) fn is_change(&self) -> bool {
        match self {
            Self::Write { .. } | Self::Discard(_) | Self::Zero { .. } => true,
            Self::Read { .. } | Self::Sync => false,
        }
    }
}

/// A submission to the storage of a disk. Submissions may be carried out in any order and concurrently; a submission
/// that must follow another is issued only after the first is carried out.
pub struct Submission {
    /// Its identifier.
    pub id: SubmissionId,
    /// The disk.
    pub disk: DiskNumber,
    /// The operation.
    pub action: Action,
}

/// Notification of the guest about a page frame (`PLIMSOLL_EVICT` etc. in `guest/module/plimsoll_protocol.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// Reclaim evicts the frame, whose contents are as they were last read or written.
    Evict {
        /// Page frame number.
        frame: u64,
    },
    /// The frame leaves the page cache for another reason.
    Release {
        /// Page frame number.
        frame: u64,
    },
    /// The frame enters the page cache.
    Add {
        /// Page frame number.
        frame: u64,
    },
    /// Its contents move to another frame.
    Migrate {
        /// Page frame number.
        frame: u64,
        /// Page frame number of the destination.
        to: u64,
    },
}

/// Contents that came with an eviction.
#[derive(Clone, Copy)]
pub enum Contents<'a> {
    /// A copy made by the guest when it evicted the page.
    Copied(&'a Page),
    /// The current contents of the frame, which may have been used again since.
    Lazy(&'a dyn GuestData),
}

/// How pages enter the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheMode {
    /// There is no cache.
    None,
    /// From guest memory, as the guest evicts them; \[LS07\] §3.
    #[default]
    Exclusive,
    /// Read again from storage when the guest evicts them, for comparison; \[LS07\] fig. 4.
    FromStorage,
}

/// When a write reaches storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WriteMode {
    /// Before it completes.
    #[default]
    Through,
    /// Later: at a flush, when too many pages are dirty, or when they have been dirty for too long.
    Delayed,
}

/// What is done when storage refuses a write, as by QEMU's `werror`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WriteErrorAction {
    /// The guest is told.
    #[default]
    Report,
    /// If there is no space, the VM is to be paused until there is; else the guest is told.
    NoSpace,
    /// The VM is to be paused until the write succeeds.
    Stop,
}

/// Options of the engine.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// How pages enter the cache.
    pub mode: CacheMode,
    /// Bytes of memory for the cache, metadata included.
    pub cache_bytes: u64,
    /// Maximum capacity in bytes to which the cache can be resized.
    pub cache_bytes_max: u64,
    /// When writes reach storage.
    pub write: WriteMode,
    /// Maximum number of dirty pages.
    pub dirty_pages_max: u64,
    /// Maximum time for which a page stays dirty.
    pub dirty_age_max: Duration,
    /// What is done when storage refuses a write.
    pub write_error: WriteErrorAction,
    /// Whether contents are admitted only if they are those of the last I/O, by their hash. Off only for experiments.
    pub hash_check: bool,
    /// Whether a page is admitted only if its frame is the newest one of its location. Off only for experiments.
    pub newest_check: bool,
    /// Compare each page served from the cache with storage, and count those that differ. For experiments: costs a
    /// read.
    pub verify: bool,
}

impl Default for EngineOptions {
    /// Without a cache.
    fn default() -> Self {
        Self {
            mode: CacheMode::None,
            cache_bytes: 0,
            cache_bytes_max: 0,
            write: WriteMode::Through,
            dirty_pages_max: 0,
            dirty_age_max: Duration::from_secs(30),
            write_error: WriteErrorAction::Report,
            hash_check: true,
            newest_check: true,
            verify: false,
        }
    }
}

/// Receives references above the guest's own memory, in order: the input of a ghost list.
pub trait Observer: Send {
    /// The guest read a block that it does not have in memory.
    fn missed(&mut self, page: Location);
    /// The guest evicted a page that can be cached.
    fn evicted(&mut self, page: Location);
    /// The block was written or freed: copies of its old contents are stale.
    fn released(&mut self, page: Location);
    /// All earlier information is invalid.
    fn cleared(&mut self);
}

/// The dirty pages: delayed writes that storage does not have yet. They are nowhere else in the daemon.
pub trait DirtyPages: Send {
    /// Stores the page in place of an earlier one of the location. When this returns, it survives the process, if the
    /// pages outlive it at all.
    ///
    /// # Errors
    /// If it could not be written. The page kept before, if any, is then still there.
    fn record(&mut self, location: Location, page: &Page) -> std::io::Result<()>;

    /// Copies the location's page.
    ///
    /// # Errors
    /// If there is none, or it cannot be read; the contents of `page` are then undefined.
    fn read(&mut self, location: Location, page: &mut Page) -> std::io::Result<()>;

    /// Removes the location's page: it is on storage, or no longer needed.
    fn clean(&mut self, location: Location);
}
