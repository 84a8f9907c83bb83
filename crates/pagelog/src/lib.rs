//! Source of the pages that a processor logs while a VM runs.
//!
//! *PML* logs a page when a write sets its dirty flag, *PRL* at every page walk (\[PRL\] §2, §4). A QEMU plugin
//! (`qemu/pagelog`) writes every walk of an emulated machine ([`record`]) into a ring in shared memory ([`ring`]),
//! which can be stored in a file ([`log`]). A model ([`machine`]) computes which pages a processor's logging buffers
//! would deliver to the host, and at what cost, so a file gives the same results as the run it was recorded from. A
//! model of TLB and page tables ([`mmu`]) converts plain traces of references into records.
//!
//! Rings and files are untrusted input: every word is checked ([`PageLogError`]).
//!
//! Not here: estimating working sets (crate `plimsoll-estimator`), starting machines.

mod check;
mod description;
mod error;
pub mod log;
pub mod machine;
pub mod mmu;
pub mod record;
pub mod ring;
mod sys;

pub use description::{Description, TlbShape, TlbShapeError};
pub use error::{PageLogError, RecordFault};
use record::Record;

/// Maximum number of records in a batch.
pub const BATCH_RECORDS: usize = 1 << 14;

/// A source of the records of one machine, in order.
pub trait RecordSource {
    /// The machine.
    fn description(&self) -> &Description;

    /// Replaces the contents of `batch` with the next records, at most [`BATCH_RECORDS`].
    ///
    /// `Ok(true)` means at least one record; `Ok(false)` means the end and an empty batch, also at every later call.
    /// [`Record::End`] is never returned.
    ///
    /// # Errors
    ///
    /// A [`PageLogError`]; `batch` then holds the records before the error, and the source is at its end.
    fn next_batch(&mut self, batch: &mut Vec<Record>) -> Result<bool, PageLogError>;
}

impl<S: RecordSource + ?Sized> RecordSource for Box<S> {
    fn description(&self) -> &Description {
        (**self).description()
    }

    fn next_batch(&mut self, batch: &mut Vec<Record>) -> Result<bool, PageLogError> {
        (**self).next_batch(batch)
    }
}

impl<S: RecordSource + ?Sized> RecordSource for &mut S {
    fn description(&self) -> &Description {
        (**self).description()
    }

    fn next_batch(&mut self, batch: &mut Vec<Record>) -> Result<bool, PageLogError> {
        (**self).next_batch(batch)
    }
}
