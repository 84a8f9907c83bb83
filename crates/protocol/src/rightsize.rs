//! The right size of a VM over time, from the curves of its history.

use serde::{Deserialize, Serialize};

/// The size that would have sufficed for most of an interval: the answer to `GET /v1/vms/{vm}/rightsize`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct RightsizeView {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// The VM.
    pub vm: String,
    /// Start of the interval.
    pub since_unix_ms: u64,
    /// Share of the curves whose smallest size within the bound is to fit, above 0.0 to 1.0.
    pub percentile: f64,
    /// Curves of the interval.
    pub curves: u64,
    /// Days (of UTC) with a curve.
    pub days: u64,
    /// What it has.
    pub size_bytes: u64,
    /// The right size: what follows holds if it had always had it. `null` without curves.
    pub right_bytes: Option<u64>,
    /// Share of the days for which the right size of all other days would have been within the bound for the same
    /// share of the curves; `null` below two days.
    pub confidence: Option<f64>,
    /// Share of the curves by which it would have been within its bound.
    pub kept_ratio: Option<f64>,
    /// The same on the worst day.
    pub kept_worst_day_ratio: Option<f64>,
    /// Predicted misses over those at the baseline: the geometric mean of the curves.
    pub relative: Option<f64>,
    /// Predicted misses a second, the mean of the curves that have them.
    pub misses_per_second: Option<f64>,
    /// The same at the baseline.
    pub misses_at_baseline_per_second: Option<f64>,
}
