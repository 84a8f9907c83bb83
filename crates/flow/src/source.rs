//! The interface between producers of references and their consumers.

use crate::ReferenceBatch;

/// Yields references in order, batch by batch: a trace, a synthetic workload, the misses of a VM.
pub trait Source {
    /// Why references stop early: [`Infallible`](std::convert::Infallible) for a source that cannot fail.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Advances `batch` and fills it with the next references, at most
    /// [`ReferenceBatch::CAPACITY`] of them.
    ///
    /// `Ok(true)` means that the batch has at least one reference; `Ok(false)` means the end of the
    /// stream and an empty batch, on this call and every later one.
    ///
    /// # Errors
    ///
    /// The source's own; `batch` then holds the references before the
    /// error, and the source is at its end.
    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, Self::Error>;
}

impl<S: Source + ?Sized> Source for Box<S> {
    type Error = S::Error;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, S::Error> {
        (**self).next_batch(batch)
    }
}
