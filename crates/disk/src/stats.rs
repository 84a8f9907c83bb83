//! Statistics of a VM's disks. Fields are only added: a program reads those of a daemon of a later version, which runs as long as its VM.

use serde::{Deserialize, Serialize};

use crate::{CacheMode, WriteMode};

/// Counters of the engine since its start, and its current state. Pages and blocks are of 4 KiB.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStats {
    /// How pages enter the cache.
    pub mode: CacheMode,
    /// When writes reach storage.
    pub write: WriteMode,
    /// Whether the VM is to be paused, because storage refuses its writes (`--write-error`).
    pub wants_pause: bool,
    /// Why the cache disabled itself, if it did.
    pub disabled: Option<String>,
    /// Capacity of the cache in bytes.
    pub cache_bytes: u64,
    /// Pages in the cache now.
    pub cached_pages: u64,
    /// Delayed writes that are not on storage yet: pages of the log, and not of the cache.
    pub dirty_pages: u64,
    /// Maximum number of dirty pages.
    pub dirty_pages_max: u64,
    /// Frames whose location is known now.
    pub mapped_frames: u64,
    /// Whole blocks read by guests.
    pub read_blocks: u64,
    /// How many of them were served from the cache, or from the log of delayed writes.
    pub hits: u64,
    /// Whole blocks whose data is not one whole page of guest memory: such blocks are never cached. A high count
    /// suggests a file system whose blocks are smaller than 4 KiB.
    pub scattered_blocks: u64,
    /// Reads of parts of blocks.
    pub read_parts: u64,
    /// Whole blocks written by guests.
    pub written_blocks: u64,
    /// Writes of parts of blocks.
    pub written_parts: u64,
    /// Blocks written into the log instead of to storage (delayed).
    pub delayed_blocks: u64,
    /// Dirty blocks written back.
    pub written_back_blocks: u64,
    /// Write-backs that failed; the blocks stay dirty.
    pub write_back_errors: u64,
    /// Flushes done.
    pub flushes: u64,
    /// Read submissions to storage, and bytes.
    pub storage_reads: u64,
    /// Bytes read from storage.
    pub storage_read_bytes: u64,
    /// Write submissions to storage.
    pub storage_writes: u64,
    /// Bytes of writes to storage, failed ones included.
    pub storage_written_bytes: u64,
    /// I/O submissions that failed.
    pub storage_errors: u64,
    /// Evictions reported by the guest.
    pub evictions: u64,
    /// How many of them were admitted to the cache.
    pub admitted: u64,
    /// Not admitted: no location known for the frame.
    pub refused_unknown: u64,
    /// Not admitted: another frame holds the location's newest contents.
    pub refused_not_newest: u64,
    /// Not admitted: a copied page whose contents are not those of the last I/O, a violation of the admission rule.
    pub refused_mismatch: u64,
    /// Not admitted: a page that was not copied had changed, or its frame had been used again.
    pub refused_stale: u64,
    /// Not admitted: no contents were sent, or the store refused the page.
    pub refused_other: u64,
    /// Releases reported by the guest.
    pub releases: u64,
    /// Additions reported by the guest.
    pub additions: u64,
    /// Migrations reported by the guest.
    pub migrations: u64,
    /// How often all frame entries were dropped (lost notifications, a new ring, a new guest).
    pub forgotten: u64,
    /// Pages dropped from the cache because it was full.
    pub dropped: u64,
    /// With `verify`: pages served that differed from storage.
    pub wrong_served: u64,
}

/// One disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names of the others suffice")]
pub struct DiskStats {
    pub image: String,
    pub socket: String,
    pub size_bytes: u64,
    /// Whether QEMU is connected now.
    pub connected: bool,
    pub read_only: bool,
    /// Whether the host's page cache is bypassed.
    pub direct_io: bool,
    /// Queues that the guest's driver uses: 0 while the VM boots or is stopped, and for good once QEMU has lost the disk.
    pub queues: u32,
    /// Requests completed since the start.
    pub requests: u64,
    /// Reads that needed at least one block from storage.
    pub waited_reads: u64,
    /// Time that they took, from their queue to their completion, added up.
    pub read_wait_ns: u64,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Requests of an earlier daemon or connection that were repeated.
    pub resubmitted: u64,
    /// Requests that were malformed or out of range.
    pub bad_requests: u64,
    /// Connections of a guest since the start.
    pub connections: u64,
    /// Transfers to or from storage that failed for lack of space.
    pub no_space_errors: u64,
    /// Those that failed for other reasons.
    pub io_errors: u64,
    /// Accesses to the guest's RAM that failed: no huge page, a full tmpfs, or a file that was truncated.
    #[serde(default)]
    pub ram_errors: u64,
    /// Whether the guest used memory that its VM does not share with the daemon: queues there stand still, and requests fail.
    #[serde(default)]
    pub unshared: bool,
    /// The last error of a transfer.
    pub last_error: Option<String>,
    /// Dirty blocks that could not be written when it was last tried. They stay dirty, and flushes fail, or wait.
    pub unwritable_pages: u64,
    /// Whether flushes wait until these blocks are written, with the VM paused (`--write-error`).
    #[serde(default)]
    pub flushes_wait: bool,
    /// Whether a sync failed, in this daemon or an earlier one: flushes fail, because the kernel may have dropped writes.
    pub unsynced: bool,
}

/// The guest's ring of notifications.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingStats {
    /// Whether a guest has announced one.
    pub attached: bool,
    /// Whether the guest's driver uses the control disk, through which it announces one; `None` without a control disk.
    #[serde(default)]
    pub control_used: Option<bool>,
    /// Records taken.
    pub records: u64,
    /// Notifications that the guest reports as lost (no room, missed probes).
    pub lost: u64,
    /// Invalid records.
    pub bad_records: u64,
    /// How often the ring itself was invalid and was released.
    pub faults: u64,
    /// Current RAM of the guest in pages, as reported by the guest; 0 if unknown.
    pub guest_memory_pages: u64,
}

/// Pages put and got by the guest's device-mapper target.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VictimCacheStats {
    /// Whether there is an hcache behind it.
    pub available: bool,
    /// Whether that is in reach.
    #[serde(default)]
    pub in_reach: bool,
    /// Why it is not; `null` before the first attempt to reach it has ended.
    #[serde(default)]
    pub failure: Option<String>,
    /// Pools open now.
    pub pools: u64,
    /// Pages put.
    pub puts: u64,
    /// How many of them were stored.
    pub stored: u64,
    /// Pages put into the pool of an image that are not what this daemon read there, and were refused.
    pub refused_different: u64,
    /// Pages put into the pool of an image at blocks that this daemon has not read, and refused.
    pub refused_unread: u64,
    /// Time that the puts took of this daemon's thread, added up.
    pub put_ns: u64,
    /// Pages requested.
    pub gets: u64,
    /// How many of them were found.
    pub hits: u64,
    /// Time that the gets took of this daemon's thread, added up.
    pub get_ns: u64,
    /// Blocks flushed.
    pub flushed_blocks: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Operations that the server did not answer in time. The connection was given up each time, with all pools.
    pub timeouts: u64,
}

/// A VM's disks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MachineStats {
    /// Seconds since the daemon began.
    pub uptime_seconds: f64,
    /// The cache.
    pub engine: EngineStats,
    /// The disks, in order.
    pub disks: Vec<DiskStats>,
    /// The ring.
    pub ring: RingStats,
    /// The device-mapper target's pages.
    #[serde(rename = "second_chance")]
    pub victim_cache: VictimCacheStats,
}
