//! Targets in, memory moved.
//!
//! What serves a VM is memory of its own (its RAM less its balloon) and a cache under its disk. Both change by a target that
//! is followed later, or never: a balloon is filled by the guest, which may be slow, unable or unwilling. So an
//! [`Actuator`] is told targets and then looked at again and again, and no call takes longer than its time-out. One thread
//! can drive all VMs of a host.
//!
//! | | |
//! |---|---|
//! | [`VmMemory`] | a VM's balloon and its disk's cache |
//! | [`DryRun`] | the same interface; moves nothing |
//! | [`HcacheStore`] | capacity of the host's hcache, which belongs to no VM |
//!
//! What a VM may hold without being told anything more is never counted too low ([`Part::reserved_bytes`]): an unfinished, a
//! lost and a broken promise count as the larger of the sizes they lie between. A guest that lies about its balloon is
//! believed by them; what the host really holds of a VM's RAM is told by [`ram_held_bytes`].
//!
//! Not here: who should get how much (`policy`), and in which order (the daemon).
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
