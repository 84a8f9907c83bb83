//! The types that Plimsoll's stages exchange, and the arithmetic that several of them share.
//!
//! ```text
//! source ──> references ──> estimator ──> curve ──> policy ──> target ──> actuator
//! ```
//!
//! Every stage uses the types of this crate and depends on no other stage.
//! Numbers that could be confused ([`PageNumber`], [`PageCount`]) have
//! types of their own. Stages exchange references in a [`ReferenceBatch`], never
//! one by one.
//!
//! Not here: I/O of any kind, and any algorithm that computes a curve.
#![forbid(unsafe_code)]

mod curve;
mod first_touch;
mod number;
mod page;
mod period;
mod rate;
mod reference;
mod source;
mod vm;
mod working_set;

pub use curve::{
    Cliff, CurveDistance, CurveError, CurvePoint, LOG_ERRORS, LogErrors, MissRatioCurve,
    MissesPerSecond,
};
pub use first_touch::{FirstTouch, FirstTouches, Timestamp};
pub use number::{MIX_FACTORS, SplitMix, Whole, mix};
pub use page::{PageCount, PageNumber, PageSize, PageSizeError};
pub use period::{
    Period, PeriodLosses, SampleCounts, ScanCounts, TraceMethod, TrapCounts, Undisturbed,
    UnknownTraceMethod,
};
pub use rate::rate_text;
pub use reference::{AccessKind, Details, LogicalTime, Reference, ReferenceBatch};
pub use source::Source;
pub use vm::{Accelerator, GroupKind, RamBacking, RamMapping, VmId};
pub use working_set::{WorkingSet, WorkingSetBound};
