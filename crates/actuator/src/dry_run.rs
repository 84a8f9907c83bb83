//! Memory that is observed and never changed.

use crate::progress::Part;
use crate::{ActuatorError, BalloonRecord, MemoryPart, Observation};

/// A memory part that is observed; its targets are never sent.
#[derive(Debug)]
pub struct DryRun(Box<dyn MemoryPart>);

impl DryRun {
    /// Observes `part`.
    pub fn new(mut part: Box<dyn MemoryPart>) -> Self {
        // Nothing has been set yet, so restoring cannot fail.
        let _ = part.want_statistics(false);
        Self(part)
    }
}

impl MemoryPart for DryRun {
    fn poll(&mut self, failures: &mut Vec<ActuatorError>) -> Observation {
        self.0.poll(failures)
    }

    fn part(&self) -> Part {
        self.0.part()
    }

    fn record(&self) -> BalloonRecord {
        self.0.record()
    }

    fn resume(&mut self, record: BalloonRecord) {
        self.0.resume(record);
    }

    fn set(&mut self, _target_bytes: u64) -> Result<(), ActuatorError> {
        Ok(())
    }
}
