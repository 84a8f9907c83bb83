//! References in, miss-ratio curve or working set out; one file per algorithm.
//!
//! | estimator | input | result | file |
//! |---|---|---|---|
//! | [`ExactLru`] | a whole stream | the LRU curve, exactly | `lru` |
//! | [`ParallelLru`] | the same, on several threads | the same | `parallel` |
//! | [`Shards`] | a share of its pages | the LRU curve, with a band | `shards` |
//! | [`FixedSizeShards`] | a bounded number of its pages | the same in bounded memory | `fixed_size` |
//! | [`Aet`] | all references | the LRU curve by a model of reuse times | `aet` |
//! | [`SampledAet`], [`SpatialAet`] | a share of references, or of pages | the same | `sampled_aet`, `spatial_aet` |
//! | [`shared_curve`] | the [`ReuseTimes`] of several streams | the curve of a memory that they share | `shared` |
//! | [`CounterStacks`] | all references | the LRU curve from counts of distinct pages, and of any window | `counter_stacks` |
//! | [`AverageFootprint`] | all references | the LRU curve from the footprint of all windows | `footprint` |
//! | [`ScanFootprint`] | which pages were touched between scans | the same, with what scans leave open in its band | `footprint` |
//! | [`FilteredLru`] | what passes the filters of processors | the LRU curve from the filters' size up, exactly | `filtered_lru` |
//! | [`GhostLru`], [`GhostBuffer`] | what a memory evicts and misses | the curve from that memory's size up | `ghost` |
//! | [`WindowLru`], [`WindowAet`] | a sample of pages, for a while | a [`Survival`], poolable, and from it the curve | `window` |
//!
//! All but the last take a stream from its beginning, and what takes references shares the trait
//! [`Estimator`]; first references miss at every size there. The last take a running VM in windows,
//! where a first reference only says that its page was not used for a while.
//!
//! ```
//! use plimsoll_estimator::{Estimator, ExactLru, Shards};
//! use plimsoll_flow::{AccessKind, PageCount, PageNumber, ReferenceBatch};
//!
//! let mut batch = ReferenceBatch::new();
//! for page in (0..1000).cycle().take(10_000) {
//!     batch.push(PageNumber(page), AccessKind::Read);
//! }
//! let estimators: [Box<dyn Estimator>; 2] =
//!     [Box::new(ExactLru::new()), Box::new(Shards::new(0.1, 42)?)];
//! for mut estimator in estimators {
//!     estimator.observe(&batch);
//!     let curve = estimator.curve()?;
//!     assert_eq!(curve.miss_ratio(PageCount(500)), 1.0);
//!     assert!((curve.miss_ratio(PageCount(1100)) - 0.1).abs() < 1e-9);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Working sets that need no curve (page logs, sampled pages, disk requests, shrinking) are in [`mod@working_set`].
//!
//! Not here: where references come from, and what is decided from a curve. No I/O.
#![cfg_attr(
    test,
    expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "tests choose their numbers"
    )
)]

mod aet;
mod bursts;
mod counter_stacks;
mod filter;
mod filtered_lru;
mod fixed_size;
mod footprint;
mod ghost;
mod hash;
mod histogram;
mod last_use;
pub mod live;
mod lru;
mod moments;
mod parallel;
mod reuse_times;
mod reuses;
mod row;
mod sampled_aet;
mod sampled_stack;
mod shards;
mod shared;
mod spatial_aet;
mod steps;
mod survival;
mod sys;
mod watch;
mod window;
mod witness;
pub mod working_set;

#[cfg(test)]
mod naive;
#[cfg(test)]
mod streams;

pub use aet::Aet;
pub use counter_stacks::{
    CounterStacks, CounterStacksError, CounterStacksOptions, CounterStream, StreamError,
    StreamWriter,
};
pub use filtered_lru::FilteredLru;
pub use fixed_size::FixedSizeShards;
pub use footprint::{
    AverageFootprint, AverageWindow, Footprint, FootprintError, FootprintPoint, ScanFootprint,
};
pub use ghost::{GhostBuffer, GhostError, GhostLru, GhostOptions};
pub use lru::{ExactLru, LruStack};
pub use parallel::ParallelLru;
pub use reuse_times::ReuseTimes;
pub use sampled_aet::SampledAet;
pub use shards::Shards;
pub use shared::{Share, SharedError, SharedMemory, SharedVm, shared_curve};
pub use spatial_aet::SpatialAet;
pub use survival::Survival;
pub use window::{WindowAet, WindowLru, aet_curve, lru_curve, working_set};

use plimsoll_flow::{CurveError, MissRatioCurve, ReferenceBatch};

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
}

/// Why an estimator was not built. Nothing was observed and nothing is left behind.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EstimatorError {
    /// A share of pages or references that there is not.
    #[error("the sampling rate must be above 0 and at most 1; got {rate}")]
    RateOutOfRange {
        /// The rate that was asked for.
        rate: f64,
    },
}
