//! The memory of a VM without a monitor: its RAM, which cannot be changed.

use std::time::Instant;

use plimsoll_flow::VmId;

use crate::endpoints::{ActuatorRow, Role};
use crate::progress::{Absence, Part, Patience, Tracker};
use crate::{ActuatorError, MemoryPart, Observation};

pub(crate) static ROW: ActuatorRow = ActuatorRow {
    name: "fixed",
    summary: "the RAM of a VM without a monitor, which cannot be changed",
    role: Role::Direct,
    open: |endpoints| {
        let (vm, memory_bytes) = (endpoints.vm.clone(), endpoints.memory_bytes);
        Ok(Some(Box::new(FixedMemory { vm, memory_bytes })))
    },
};

/// Memory that cannot be changed.
#[derive(Debug)]
pub struct FixedMemory {
    /// The VM.
    pub vm: VmId,
    /// Its RAM.
    pub memory_bytes: u64,
}

impl MemoryPart for FixedMemory {
    fn poll(&mut self, _failures: &mut Vec<ActuatorError>) -> Observation {
        Observation::default()
    }

    fn part(&self) -> Part {
        let now = Instant::now();
        let mut tracker = Tracker::new(Patience::default());
        tracker.see(self.memory_bytes, now);
        tracker.part(Some(self.memory_bytes), Some(Absence::NoDevice), now)
    }

    fn set(&mut self, _target_bytes: u64) -> Result<(), ActuatorError> {
        Err(ActuatorError::NoBalloon(self.vm.clone()))
    }
}
