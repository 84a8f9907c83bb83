//! The common interface of the algorithms that compute a miss-ratio curve of a whole stream.

use plimsoll_flow::{CurveError, MissRatioCurve, PageCount, PageNumber};

/// An algorithm that turns references into a miss-ratio curve.
pub trait Estimator: Send {
    /// Processes the pages of the next references of the stream, as many as the caller has: pieces of
    /// [`ReferenceBatch::CAPACITY`](plimsoll_flow::ReferenceBatch::CAPACITY) stay in a core's cache.
    fn observe(&mut self, pages: &[PageNumber]);

    /// Returns the curve of everything observed so far. More references may be observed afterwards.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if no reference was observed (or sampled).
    fn curve(&mut self) -> Result<MissRatioCurve, CurveError>;

    /// Bytes of heap allocated now, as computed by the estimator.
    fn memory_bytes(&self) -> usize;

    /// The smallest size that the curve resolves; below it only the band is meaningful.
    fn smallest_size(&self) -> PageCount {
        PageCount(0)
    }
}
