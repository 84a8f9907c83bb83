//! Merges the records of several VMs by time.

use super::{Config, Machine, Outcome, Sink};
use crate::record::Record;
use crate::{PageLogError, RecordSource};

/// The remaining records of a VM.
struct RemainingRecords<'a> {
    source: &'a mut dyn RecordSource,
    batch: Vec<Record>,
    next: usize,
}

impl RemainingRecords<'_> {
    /// The next record; `None` at the end.
    fn peek(&mut self) -> Result<Option<Record>, PageLogError> {
        if self.next == self.batch.len() {
            self.next = 0;
            let more = self.source.next_batch(&mut self.batch);
            // Records before an error do not make a complete run.
            if !more? {
                return Ok(None);
            }
        }
        Ok(self.batch.get(self.next).copied())
    }
}

/// Runs VMs, each by its records, to their ends under one host; records of equal time in the order of the VMs.
///
/// # Errors
///
/// The first error of a source; the sink has then received everything before it.
///
/// # Panics
///
/// If the buffers have no entries, or a source returns a vCPU that its description does not have.
pub fn run(
    config: &Config,
    sources: &mut [&mut dyn RecordSource],
    sink: &mut dyn Sink,
) -> Result<Outcome, PageLogError> {
    let vcpus: Vec<u32> = sources.iter().map(|vm| vm.description().vcpus).collect();
    let mut machine = Machine::new(config, &vcpus);
    let ahead = |source| RemainingRecords {
        source,
        batch: Vec::new(),
        next: 0,
    };
    let mut vms: Vec<RemainingRecords> = sources.iter_mut().map(|vm| ahead(&mut **vm)).collect();
    loop {
        let mut first = None;
        for (number, vm) in vms.iter_mut().enumerate() {
            if let Some(record) = vm.peek()? {
                let time = machine.time_of(number, &record);
                if first.is_none_or(|(earliest, _, _)| time < earliest) {
                    first = Some((time, number, record));
                }
            }
        }
        let Some((_, number, record)) = first else {
            return Ok(machine.finish(sink));
        };
        machine.push(number, &record, sink);
        vms[number].next += 1;
    }
}
