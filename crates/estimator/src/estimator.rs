//! What every algorithm has in common that makes a miss-ratio curve of a whole stream.

use plimsoll_flow::{CurveError, MissRatioCurve, PageCount, ReferenceBatch};

/// An algorithm that turns references into a miss-ratio curve.
pub trait Estimator {
    /// Takes in the next references of the stream.
    fn observe(&mut self, batch: &ReferenceBatch);

    /// Returns the curve of everything observed so far. Observing may go on after it.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if no reference was seen (or sampled).
    fn curve(&mut self) -> Result<MissRatioCurve, CurveError>;

    /// Bytes of heap that the estimator holds now, by its own account.
    fn memory_bytes(&self) -> usize;

    /// The smallest size that the curve resolves; below it only the band is meaningful.
    fn smallest_size(&self) -> PageCount {
        PageCount(0)
    }
}
