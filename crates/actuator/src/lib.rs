//! Targets in, memory moved.
//!
//! A VM is served by guest memory (its RAM less its balloon) and by a cache under its disk. Both follow a target
//! later, or never: a balloon is filled by the guest, which may be slow, unable or unwilling. So an
//! [`Actuator`] is given targets and then polled, and no call takes longer than its time-out. One thread
//! can drive all VMs of a host.
//!
//! | | |
//! |---|---|
//! | [`VmMemory`] | a VM's balloon and its disk's cache |
//! | [`DryRun`] | the same interface; moves nothing |
//! | [`HcacheStore`] | capacity of the host's hcache, which belongs to no VM |
//!
//! The memory that a VM may take without a further request is never underestimated ([`Part::reserved_bytes`]): a resize that is
//! unfinished, lost or failed counts as the larger of its two sizes. A guest's report about its balloon is trusted;
//! [`ram_held_bytes`] measures the RAM that the host really holds for a VM.
//!
//! Not here: the choice of sizes (`policy`), and the order of moves (the daemon).
#![forbid(unsafe_code)]

mod balloon;
mod disk_cache;
mod dry_run;
mod error;
mod follow;
mod hcache;
mod host;
#[cfg(feature = "libvirt")]
mod libvirt;
mod resizing;
mod vm_memory;

pub use balloon::{Balloon, BalloonSettings};
pub use disk_cache::DiskCache;
pub use dry_run::{DryRun, Wish};
pub use error::{ActuatorError, Sent};
pub use follow::{Absence, Part, Patience, Progress};
pub use hcache::HcacheStore;
pub use host::ram_held_bytes;
#[cfg(feature = "libvirt")]
pub use libvirt::{Domain, DomainInfo, Virsh};
pub use plimsoll_protocol::disk_admin::DiskStat;
pub use plimsoll_vm::GuestStats;
pub use vm_memory::{Direct, VmMemory};

use plimsoll_flow::VmId;

/// Moves one VM's memory.
pub trait Actuator: Send {
    /// The VM.
    fn vm(&self) -> &VmId;

    /// Asks how things stand. What cannot be asked now is told in [`Look::failures`], and the parts say what was known last.
    fn look(&mut self) -> Look;

    /// Sets the VM's own memory (RAM less balloon), rounded down to 4 KiB; the guest follows later.
    ///
    /// # Errors
    ///
    /// Says whether the target was sent; either way [`Part::reserved_bytes`] covers it.
    fn set_direct(&mut self, target_bytes: u64) -> Result<(), ActuatorError>;

    /// Sets the capacity of the cache under the VM's disk, which follows within seconds.
    ///
    /// # Errors
    ///
    /// [`ActuatorError::NoCache`], [`ActuatorError::Busy`] while the last target is not answered; the outcome of what was
    /// started is told by [`look`](Self::look).
    fn set_cache(&mut self, target_bytes: u64) -> Result<(), ActuatorError>;
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
    /// Both together.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.direct_bytes.saturating_add(self.cache_bytes)
    }
}

/// How a VM's memory stands.
#[derive(Debug)]
pub struct Look {
    /// Memory of its own.
    pub direct: Part,
    /// The cache under its disk; `None` if it has none.
    pub cache: Option<Part>,
    /// What the guest says of its memory; `None` if it could not be asked now, or has no balloon.
    pub guest: Option<GuestStats>,
    /// What its disk's daemon says; `None` if it could not be asked now, or there is none.
    pub disk: Option<DiskStat>,
    /// What could not be asked, or was not done as told, since the last look.
    pub failures: Vec<ActuatorError>,
}

impl Look {
    /// What the VM has, by the last answers.
    #[must_use]
    pub fn holding(&self) -> Holding {
        self.sum(|part| part.actual_bytes)
    }

    /// What has to be counted as the VM's: the most that it may have without being told anything more.
    #[must_use]
    pub fn reserved(&self) -> Holding {
        self.sum(|part| part.reserved_bytes)
    }

    /// Whether both parts are what was last asked of them.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let settled = |part: &Part| matches!(part.progress, Progress::Untold | Progress::Reached);
        settled(&self.direct) && self.cache.as_ref().is_none_or(settled)
    }

    fn sum(&self, bytes: impl Fn(&Part) -> u64) -> Holding {
        Holding {
            direct_bytes: bytes(&self.direct),
            cache_bytes: self.cache.as_ref().map_or(0, bytes),
        }
    }
}
