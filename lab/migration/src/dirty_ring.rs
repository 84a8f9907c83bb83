//! KVM's dirty rings: each vCPU's written pages in the order of their first write (`KVM_CAP_DIRTY_LOG_RING`).
//!
//! An entry is taken when the kernel has marked it dirty, and given back by marking it for a reset;
//! `KVM_RESET_DIRTY_RINGS` then protects its page again. A vCPU whose ring is full leaves the guest, has all rings
//! drained, and continues.

use std::sync::Arc;

use super::tiny::Machine;
use super::{KvmError, Round, Tracker};

/// The dirty rings of a machine.
#[derive(Debug)]
pub struct DirtyRing {
    machine: Arc<Machine>,
}

impl DirtyRing {
    /// Begins to log a machine that was made with rings.
    ///
    /// # Errors
    ///
    /// [`KvmError::Machine`] if it was made without, [`KvmError::Call`].
    pub fn start(machine: Arc<Machine>) -> Result<Self, KvmError> {
        let Some(rings) = machine.rings() else {
            return Err(KvmError::Machine {
                reason: "it was made without rings".into(),
            });
        };
        // Entries left by an earlier tracker.
        rings.round(machine.vm())?;
        machine.set_logging(true)?;
        Ok(Self { machine })
    }
}

impl Tracker for DirtyRing {
    fn round(&mut self) -> Result<Round, KvmError> {
        match self.machine.rings() {
            Some(rings) => rings.round(self.machine.vm()),
            None => Ok(Round::default()),
        }
    }
}

impl Drop for DirtyRing {
    fn drop(&mut self) {
        // If it stays enabled, the machine only loses some time.
        let _ = self.machine.set_logging(false);
    }
}
