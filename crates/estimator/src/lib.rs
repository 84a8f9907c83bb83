//! Estimates miss-ratio curves and working sets from references; one file per algorithm.
//!
//! | directory | contents | trait | registry |
//! |---|---|---|---|
//! | `curve/` | curves of a whole stream, where first references miss at every size | [`Estimator`] | [`registry::ALGORITHMS`] |
//! | `live/` | curves of a running VM in windows and by samples, where first references are censored, not misses | [`live::LiveEstimator`] | [`live::LIVE_ESTIMATORS`] |
//! | `simulation/` | miss ratios of eviction policies at chosen sizes | [`simulation::CachePolicy`] | [`simulation::CACHE_POLICIES`] |
//! | `working_set/` | sizes without a curve, from pages that were logged or touched | [`working_set::WorkingSetEstimator`] | [`registry::METHODS`] |
//! | `partial/` | curves of streams that are observed in slices, which are merged later | [`Partial`] | rows of [`registry::ALGORITHMS`] |
//! | `parts/` | shared components | | |
//!
//! [`ByGroup`] runs one of them for each device of a trace, [`ByInterval`] one for each interval of its time, and [`Comparison`] several
//! beside the exact curve.
//!
//! Some kinds of curves have no row, because their input is not a plain stream of references: [`FilteredLru`]
//! (records of the filters of processors), [`GhostBuffer`] (evictions and misses of a real memory), [`Footprint`] (reuse times
//! known within bounds), [`SizedLru`] (objects with sizes) and [`PrefixLru`] (requests for several pages in order, which
//! [`PrefixPages`] turns into a plain stream for the others).
//!
//! ```
//! use plimsoll_estimator::{Estimator, ExactLru, Shards};
//! use plimsoll_flow::{PageCount, PageNumber};
//!
//! let pages: Vec<_> = (0..1000).cycle().take(10_000).map(PageNumber).collect();
//! let estimators: [Box<dyn Estimator>; 2] =
//!     [Box::new(ExactLru::new()), Box::new(Shards::new(0.1, 42)?)];
//! for mut estimator in estimators {
//!     estimator.observe(&pages);
//!     let curve = estimator.curve()?;
//!     assert_eq!(curve.miss_ratio(PageCount(500)), 1.0);
//!     assert!((curve.miss_ratio(PageCount(1100)) - 0.1).abs() < 1e-9);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Not here: sources of references, and decisions based on a curve. No I/O.
#![cfg_attr(
    test,
    expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "tests choose their numbers"
    )
)]

mod by_group;
mod by_interval;
mod comparison;
mod curve;
mod error;
mod estimator;
pub mod live;
mod partial;
mod parts;
mod prefix_pages;
pub mod registry;
pub mod simulation;
pub mod working_set;

pub use by_group::{ByGroup, threads as group_threads};
pub use by_interval::ByInterval;
pub use comparison::{Compared, ComparedEstimator, Comparison, Errors};
pub use curve::aet::{Aet, ReuseTimes, SpatialAet};
pub use curve::counter_stacks::{
    CounterStacks, CounterStacksError, CounterStacksOptions, CounterStream, StreamError,
    StreamWindow, StreamWriter,
};
pub use curve::footprint::{
    AverageFootprint, AverageWindow, Footprint, FootprintError, FootprintPoint,
};
pub use curve::ghost::{BandParts, GhostBuffer, GhostError, GhostLru, GhostOptions, GuestGhosts};
pub use curve::lru::{ExactLru, FilteredLru, LruStack, ParallelLru, PrefixLru};
pub use curve::shards::Shards;
pub use curve::sized::{SizedCurves, SizedLru};
pub use error::EstimatorError;
pub use estimator::Estimator;
pub use live::{Survival, WindowAet, WindowLru, aet_curve, lru_curve, working_set};
pub use partial::{ParsedPartial, Partial, PartialError, SliceOf};
pub use parts::ratio::ratio_error;
pub use prefix_pages::PrefixPages;
