//! All memory of one VM.

use plimsoll_flow::VmId;

use crate::endpoints::{Endpoints, Role};
use crate::guest_need::NeedTracker;
use crate::registry::open;
use crate::{ActuatorError, BalloonRecord, FixedMemory, MemoryPart, MemoryStatus};

/// All memory of one VM: its own, and the cache under its disk if it has one.
#[derive(Debug)]
pub struct VmMemory {
    vm: VmId,
    direct: Box<dyn MemoryPart>,
    cache: Option<Box<dyn MemoryPart>>,
    need: NeedTracker,
}

impl VmMemory {
    /// The memory of a VM, consisting of these parts.
    pub fn new(vm: VmId, direct: Box<dyn MemoryPart>, cache: Option<Box<dyn MemoryPart>>) -> Self {
        Self {
            vm,
            direct,
            cache,
            need: NeedTracker::default(),
        }
    }

    /// The memory of a VM, using the first available actuator of each role. Errors of skipped actuators are added
    /// to `failures`.
    pub fn open(endpoints: &Endpoints, failures: &mut Vec<ActuatorError>) -> Self {
        let vm = endpoints.vm.clone();
        let direct = open(Role::Direct, endpoints, failures).unwrap_or_else(|| {
            Box::new(FixedMemory {
                vm: vm.clone(),
                memory_bytes: endpoints.memory_bytes,
            })
        });
        Self::new(vm, direct, open(Role::Cache, endpoints, failures))
    }

    /// The VM.
    pub fn vm(&self) -> &VmId {
        &self.vm
    }

    /// Returns the state at the last poll; before the first one every part counts with its maximum.
    pub fn status(&self) -> MemoryStatus {
        MemoryStatus {
            direct: self.direct.part(),
            cache: self.cache.as_ref().map(|cache| cache.part()),
            ..MemoryStatus::default()
        }
    }

    /// Queries all parts. Failed queries are in [`MemoryStatus::failures`]; their parts keep the last known values.
    pub fn poll(&mut self) -> MemoryStatus {
        let mut failures = Vec::new();
        let direct = self.direct.poll(&mut failures);
        let cache = self.cache.as_mut().map(|cache| cache.poll(&mut failures));
        let cache = cache.unwrap_or_default();
        let part = self.direct.part();
        let guest = direct.guest.or(cache.guest);
        MemoryStatus {
            direct: part,
            cache: self.cache.as_ref().map(|cache| cache.part()),
            need: self.need.observe(guest.as_ref(), part.actual_bytes),
            guest,
            disk: cache.disk.or(direct.disk),
            blocks: direct.blocks,
            stopped: direct.stopped,
            failures,
        }
    }

    /// Queries the cache under the VM's disk alone, which waits for no monitor, and updates its part of `status`.
    pub fn poll_cache(&mut self, status: &mut MemoryStatus) {
        if let Some(cache) = &mut self.cache {
            let observed = cache.poll(&mut status.failures);
            status.disk = observed.disk.or(status.disk.take());
            status.cache = Some(cache.part());
        }
    }

    /// What a later process needs to go on with its balloon.
    pub fn record(&self) -> BalloonRecord {
        self.direct.record()
    }

    /// Takes what an earlier process recorded of its balloon; to be called before the first poll.
    pub fn resume(&mut self, record: BalloonRecord) {
        self.direct.resume(record);
    }

    /// Whether the guest is to report statistics; see [`MemoryPart::want_statistics`].
    ///
    /// # Errors
    ///
    /// Those of its own memory.
    pub fn want_statistics(&mut self, wanted: bool) -> Result<(), ActuatorError> {
        self.direct.want_statistics(wanted)
    }

    /// Sets the VM's own memory (RAM less balloon), rounded down to 4 KiB; the guest follows later.
    ///
    /// # Errors
    ///
    /// The error states whether the target was sent; either way [`Part::reserved_bytes`](crate::Part::reserved_bytes)
    /// covers it.
    pub fn set_direct(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        self.direct.set(target_bytes)
    }

    /// Sets the capacity of the cache under the VM's disk, which follows within seconds.
    ///
    /// # Errors
    ///
    /// [`ActuatorError::NoCache`], [`ActuatorError::Busy`] while the last target is pending; [`poll`](Self::poll)
    /// reports the outcome of a resize that was started.
    pub fn set_cache(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        match &mut self.cache {
            Some(cache) => cache.set(target_bytes),
            None => Err(ActuatorError::NoCache(self.vm.clone())),
        }
    }
}
