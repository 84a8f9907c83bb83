//! Sets memory targets of VMs and observes their progress.
//!
//! A VM is served by memory of its own (its RAM less its balloon) and by a cache under its disk. Both are given a
//! target that they reach later, or never: the guest fills the balloon, and may be slow, unable or unwilling. A
//! [`MemoryPart`] is therefore set once and polled until it has settled, and every call has a time limit. One thread can serve all
//! VMs of a host.
//!
//! | | |
//! |---|---|
//! | [`registry`] | all actuators, and how those of a VM are found |
//! | [`Balloon`], [`Domain`], [`FixedMemory`] | a VM's own memory, through QEMU's monitor or libvirt, or fixed |
//! | [`DiskCache`] | the cache under a VM's disk |
//! | [`HcacheStore`] | the capacity of the host's page store, which belongs to no VM |
//! | [`DryRun`] | observes any of them and changes nothing |
//! | [`VmMemory`] | the parts of one VM |
//!
//! The memory that a VM may hold without a further request is never underestimated ([`Part::reserved_bytes`]): while a
//! change is unfinished or its outcome unknown, the larger size counts. The balloon size that a guest reports is not
//! verified.
//!
//! Not here: the sizes (`policy`) and the order of changes (the daemon).
#![forbid(unsafe_code)]

mod balloon;
mod disk_cache;
mod dry_run;
mod endpoints;
mod error;
mod fixed;
mod guest_need;
mod hcache;
#[cfg(feature = "libvirt")]
mod libvirt;
mod outdated_size;
mod progress;
pub mod registry;
mod resize;
mod stats_interval;
mod vm_memory;

pub use balloon::{Balloon, BalloonSettings};
pub use disk_cache::{DiskCache, ask_disk_daemon};
pub use dry_run::DryRun;
pub use endpoints::{ActuatorRow, Endpoints, Role};
pub use error::{ActuatorError, Delivery};
pub use fixed::FixedMemory;
pub use guest_need::{GuestNeed, STATS_AGE_MAX_S, slack_bytes};
pub use hcache::HcacheStore;
#[cfg(feature = "libvirt")]
pub use libvirt::{Domain, DomainInfo, Virsh, libvirt_names};
pub use plimsoll_protocol::disk_admin::DiskStat;
pub use plimsoll_vm::{BlockReads, GuestStats, StatsClock};
pub use progress::{Absence, Part, Patience, Progress, Tracker};
pub use vm_memory::VmMemory;

use std::fmt::Debug;

use outdated_size::OutdatedSize;
use stats_interval::StatsInterval;

/// Memory whose size can be observed and set: of a VM, or of a store that all VMs share.
pub trait MemoryPart: Debug + Send {
    /// Queries the part. Failed queries, and a change that failed since the last poll, are added to `failures`.
    fn poll(&mut self, failures: &mut Vec<ActuatorError>) -> Observation;

    /// Size and progress at the last poll.
    fn part(&self) -> Part;

    /// What a later process needs to go on with its balloon.
    fn record(&self) -> BalloonRecord {
        BalloonRecord::default()
    }

    /// Takes what an earlier process recorded of its balloon; to be called before the first poll.
    fn resume(&mut self, _record: BalloonRecord) {}

    /// Turns the guest's statistics on or off where that has to be done explicitly; they are on at first. Turning them
    /// off restores the interval that was set before this process changed it.
    ///
    /// # Errors
    ///
    /// The interval may still be the one that was set here.
    fn want_statistics(&mut self, _wanted: bool) -> Result<(), ActuatorError> {
        Ok(())
    }

    /// Sets its target, in bytes.
    ///
    /// # Errors
    ///
    /// The error states whether the target was sent; either way [`Part::reserved_bytes`] covers it.
    fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError>;
}

/// What a process that opens a VM's balloon later needs to go on with it, and cannot observe then.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BalloonRecord {
    /// Whether the total that its guest reports was seen to exclude what the balloon took.
    pub total_excludes_balloon: bool,
    /// Interval of its guest's statistics before a process of ours set it, in s, 0 for none; `None` unless one did.
    pub former_interval_s: Option<u64>,
}

impl BalloonRecord {
    /// That of a balloon with this state.
    fn of(size: &OutdatedSize, interval: &StatsInterval) -> Self {
        Self {
            total_excludes_balloon: size.total_excludes_balloon,
            former_interval_s: interval.former_s,
        }
    }

    /// Puts it into the state of a balloon that was just opened.
    fn restore(self, size: &mut OutdatedSize, interval: &mut StatsInterval) {
        size.total_excludes_balloon = self.total_excludes_balloon;
        interval.former_s = self.former_interval_s;
    }
}

/// Results of a poll other than the size.
#[derive(Debug, Default)]
pub struct Observation {
    /// The guest's memory statistics.
    pub guest: Option<GuestStats>,
    /// The disk daemon's counts.
    pub disk: Option<DiskStat>,
    /// Reads of the disks that QEMU serves itself.
    pub blocks: Option<BlockReads>,
    /// The state in which the VM's vCPUs do not run, such as `paused`; `None` while they run, or if that is not known.
    pub stopped: Option<String>,
}

impl Observation {
    fn of_guest(
        query: Result<Option<GuestStats>, ActuatorError>,
        failures: &mut Vec<ActuatorError>,
    ) -> Self {
        let guest = query.unwrap_or_else(|error| {
            failures.push(error);
            None
        });
        Self {
            guest,
            ..Self::default()
        }
    }
}

/// Memory that serves a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Holding {
    /// Its RAM less its balloon.
    pub direct_bytes: u64,
    /// Capacity of the cache under its disk.
    pub cache_bytes: u64,
}

impl Holding {
    /// The sum of both.
    pub fn bytes(self) -> u64 {
        self.direct_bytes.saturating_add(self.cache_bytes)
    }
}

/// The state of a VM's memory.
#[derive(Debug, Default)]
pub struct MemoryStatus {
    /// Its own memory.
    pub direct: Part,
    /// The cache under its disk; `None` if it has none.
    pub cache: Option<Part>,
    /// The guest's memory statistics; `None` without a balloon, or if the query failed.
    pub guest: Option<GuestStats>,
    /// The guest's need by these statistics; `None` unless they are recent.
    pub need: Option<GuestNeed>,
    /// The disk daemon's counts; `None` without one, or if the query failed.
    pub disk: Option<DiskStat>,
    /// Reads of the disks that QEMU serves itself; `None` if there are none, or they were not queried.
    pub blocks: Option<BlockReads>,
    /// The state in which its vCPUs do not run, such as `paused`; `None` while they run, or if that is not known.
    pub stopped: Option<String>,
    /// Queries and changes that failed since the last poll.
    pub failures: Vec<ActuatorError>,
}

impl MemoryStatus {
    /// The VM's memory by the last successful queries.
    pub fn holding(&self) -> Holding {
        self.sum(|part| part.actual_bytes)
    }

    /// The memory attributed to the VM: the most that it may hold without a further request.
    pub fn reserved(&self) -> Holding {
        self.sum(|part| part.reserved_bytes)
    }

    /// Whether both parts have reached their targets.
    pub fn is_settled(&self) -> bool {
        let settled = |part: &Part| matches!(part.progress, Progress::NoTarget | Progress::Reached);
        settled(&self.direct) && self.cache.as_ref().is_none_or(settled)
    }

    fn sum(&self, bytes: impl Fn(&Part) -> u64) -> Holding {
        Holding {
            direct_bytes: bytes(&self.direct),
            cache_bytes: self.cache.as_ref().map_or(0, bytes),
        }
    }
}
