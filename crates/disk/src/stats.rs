//! What a VM's disks say of themselves.

use serde::{Deserialize, Serialize};

use crate::{CacheMode, WriteMode};

/// Counters of the engine since it began, and its state now. Pages and blocks are of 4 KiB.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineStats {
    /// How pages enter the cache.
    pub mode: CacheMode,
    /// When writes reach storage.
    pub write: WriteMode,
    /// Why the cache switched itself off, if it did.
    pub disabled: Option<String>,
    /// Bytes the cache may take.
    pub cache_bytes: u64,
    /// Pages in the cache now.
    pub cached_pages: u64,
    /// Of them, not on storage yet.
    pub dirty_pages: u64,
    /// Most that may be.
    pub dirty_pages_max: u64,
    /// Frames whose location is known now.
    pub mapped_frames: u64,
    /// Whole blocks read by guests.
    pub read_blocks: u64,
    /// Of them, served from the cache.
    pub hits: u64,
    /// Whole blocks read or written by memory that is not one page: such blocks are never cached. Many of them
    /// are a file system whose blocks are smaller than 4 KiB.
    pub scattered_blocks: u64,
    /// Reads of parts of blocks.
    pub read_parts: u64,
    /// Whole blocks written by guests.
    pub written_blocks: u64,
    /// Writes of parts of blocks.
    pub written_parts: u64,
    /// Blocks written into the cache instead of to storage (delayed).
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
    /// Bytes written to storage.
    pub storage_written_bytes: u64,
    /// I/O submissions that failed.
    pub storage_errors: u64,
    /// Evictions reported by the guest.
    pub evictions: u64,
    /// Of them, pages admitted to the cache.
    pub admitted: u64,
    /// Not admitted: no location known for the frame.
    pub refused_unknown: u64,
    /// Not admitted: another frame holds the location's newest contents.
    pub refused_not_newest: u64,
    /// Not admitted: the contents are not those of the last I/O. A copied page: the admission rule was broken.
    pub refused_mismatch: u64,
    /// Not admitted: a page that was not copied had been used again.
    pub refused_stale: u64,
    /// Not admitted: no contents came, or the store refused the page.
    pub refused_other: u64,
    /// Releases reported by the guest.
    pub releases: u64,
    /// Additions reported by the guest.
    pub additions: u64,
    /// Migrations reported by the guest.
    pub migrations: u64,
    /// Times all frames were forgotten (lost notices, a new ring, a new guest).
    pub forgotten: u64,
    /// Pages dropped from the cache because it was full.
    pub dropped: u64,
    /// With `verify`: pages served that differed from storage.
    pub wrong_served: u64,
}

/// One disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskStats {
    /// Its image.
    pub image: String,
    /// Its socket.
    pub socket: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Whether a guest is connected now.
    pub connected: bool,
    /// Whether it can be written.
    pub read_only: bool,
    /// Whether the host's page cache is passed by.
    pub direct_io: bool,
    /// Queues in use.
    pub queues: u32,
    /// Requests done since the start.
    pub requests: u64,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Requests of a former daemon or connection done again.
    pub resubmitted: u64,
    /// Requests that were malformed or out of range.
    pub bad_requests: u64,
    /// Connections of a guest since the start.
    pub connections: u64,
}

/// The guest's ring of notices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RingStats {
    /// Whether a guest has announced one.
    pub attached: bool,
    /// Records taken.
    pub records: u64,
    /// Notifications that the guest reports as lost (no room, missed probes).
    pub lost: u64,
    /// Records that made no sense.
    pub bad_records: u64,
    /// Times the ring itself made no sense and was let go.
    pub faults: u64,
    /// Current RAM of the guest in pages, as reported by the guest; 0 if unknown.
    pub guest_memory_pages: u64,
}

/// Pages put and got by the guest's device-mapper target.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VictimCacheStats {
    /// Whether there is an hcache behind it.
    pub available: bool,
    /// Pools open now.
    pub pools: u64,
    /// Pages put.
    pub puts: u64,
    /// Of them, stored.
    pub stored: u64,
    /// Pages requested.
    pub gets: u64,
    /// Of them, found.
    pub hits: u64,
    /// Blocks flushed.
    pub flushed_blocks: u64,
    /// Operations that failed.
    pub errors: u64,
}

/// A VM's disks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
