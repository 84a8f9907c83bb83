//! A source: the pages that a processor logs while a VM runs.
//!
//! *PML* logs a page when a write sets its dirty flag, *PRL* at every page walk (\[PRL\] §2, §4). A QEMU
//! plugin (`qemu/pagelog`) tells every walk of an emulated machine ([`record`]) into a ring of shared memory ([`ring`]),
//! which a file can keep ([`log`]). What of it a processor's logging buffers would bring to the host, and at
//! what cost, is a model here ([`machine`]), so a file gives the same as the run it was taken from. Plain traces of
//! references become records by a model of TLB and page tables ([`mmu`]).
//!
//! Rings and files come from elsewhere: every word is checked ([`PageLogError`]).
//!
//! Not here: estimating working sets (crate `plimsoll-estimator`), starting machines.

mod check;
mod description;
mod error;
pub mod kvm;
pub mod log;
pub mod machine;
pub mod mmu;
pub mod record;
pub mod ring;
mod sys;

pub use description::{Description, TlbShape, TlbShapeError};
pub use error::{PageLogError, RecordFault};
use record::Record;

/// Records a batch holds at most.
pub const BATCH_RECORDS: usize = 1 << 14;

/// Something that yields the records of one machine, in order.
pub trait RecordSource {
    /// The machine.
    fn description(&self) -> &Description;

    /// Empties `batch` and fills it with the records that come next, at most [`BATCH_RECORDS`] of them.
    ///
    /// `Ok(true)` means at least one record, `Ok(false)` the end and an empty batch, now and at every later call.
    /// [`Record::End`] is not among them.
    ///
    /// # Errors
    ///
    /// A [`PageLogError`]; `batch` then holds the records that came before the fault, and the source is at its end.
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
