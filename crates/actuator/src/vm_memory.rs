//! All memory of one VM.

use std::time::Instant;

use plimsoll_flow::VmId;

use crate::follow::{Absence, Follower, Patience};
use crate::{Actuator, ActuatorError, Balloon, DiskCache, Look};

/// Who changes a VM's own memory.
#[derive(Debug)]
#[non_exhaustive]
pub enum Direct {
    /// Its balloon, by QEMU's monitor.
    Balloon(Box<Balloon>),
    /// libvirt, whose the monitor is.
    #[cfg(feature = "libvirt")]
    Libvirt(Box<crate::Domain>),
    /// Nobody: it has no monitor.
    Fixed {
        /// The VM.
        vm: VmId,
        /// Its RAM.
        memory_bytes: u64,
    },
}

/// All memory of one VM.
#[derive(Debug)]
pub struct VmMemory {
    direct: Direct,
    cache: Option<DiskCache>,
}

impl VmMemory {
    /// A VM's own memory, and the cache under its disk if it has one.
    #[must_use]
    pub fn new(direct: Direct, cache: Option<DiskCache>) -> Self {
        Self { direct, cache }
    }
}

impl Actuator for VmMemory {
    fn vm(&self) -> &VmId {
        match &self.direct {
            Direct::Balloon(balloon) => balloon.vm(),
            #[cfg(feature = "libvirt")]
            Direct::Libvirt(domain) => domain.vm(),
            Direct::Fixed { vm, .. } => vm,
        }
    }

    fn look(&mut self) -> Look {
        let mut failures = Vec::new();
        let (part, guest) = match &mut self.direct {
            Direct::Balloon(balloon) => {
                let asked = balloon.look();
                (balloon.part(), asked)
            }
            #[cfg(feature = "libvirt")]
            Direct::Libvirt(domain) => {
                let asked = domain.look();
                (domain.part(), asked)
            }
            Direct::Fixed { memory_bytes, .. } => {
                let now = Instant::now();
                let mut follower = Follower::new(Patience::default());
                follower.see(*memory_bytes, now);
                let absence = Some(Absence::NoDevice);
                (follower.part(Some(*memory_bytes), absence, now), Ok(None))
            }
        };
        let guest = guest.unwrap_or_else(|error| {
            failures.push(error);
            None
        });
        let disk = self
            .cache
            .as_mut()
            .and_then(|cache| cache.look(&mut failures));
        Look {
            direct: part,
            cache: self.cache.as_ref().map(DiskCache::part),
            guest,
            disk,
            failures,
        }
    }

    fn set_direct(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        match &mut self.direct {
            Direct::Balloon(balloon) => balloon.set(target_bytes),
            #[cfg(feature = "libvirt")]
            Direct::Libvirt(domain) => domain.set(target_bytes),
            Direct::Fixed { vm, .. } => Err(ActuatorError::NoBalloon(vm.clone())),
        }
    }

    fn set_cache(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        match &mut self.cache {
            Some(cache) => cache.set(target_bytes),
            None => Err(ActuatorError::NoCache(self.vm().clone())),
        }
    }
}
