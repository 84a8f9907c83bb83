//! Errors of building an estimator.

use crate::{CounterStacksError, GhostError};

/// Why an estimator was not built. Nothing was observed or allocated.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EstimatorError {
    /// A sampling rate outside its range.
    #[error("the sampling rate must be above 0 and at most 1; got {rate}")]
    RateOutOfRange {
        /// The requested rate.
        rate: f64,
    },
    /// The options of Counter Stacks are out of range.
    #[error(transparent)]
    CounterStacks(#[from] CounterStacksError),
    /// The sizes of a ghost buffer are out of range, or there is no memory for them.
    #[error(transparent)]
    Ghost(#[from] GhostError),
}
