//! Where references come from, to whatever consumes them.

use crate::ReferenceBatch;

/// Yields references in order, batch by batch: a trace, a synthetic workload, the misses of a VM.
pub trait Source {
    /// Why references stop before their end: [`Infallible`](std::convert::Infallible) where nothing can fail.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Advances `batch` and fills it with the next references, at most
    /// [`ReferenceBatch::CAPACITY`] of them.
    ///
    /// `Ok(true)` means at least one reference, `Ok(false)` the end and an empty
    /// batch, now and at every later call.
    ///
    /// # Errors
    ///
    /// The source's own; `batch` then holds the references that came before the
    /// fault, and the source is at its end.
    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, Self::Error>;
}

impl<S: Source + ?Sized> Source for Box<S> {
    type Error = S::Error;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, S::Error> {
        (**self).next_batch(batch)
    }
}
