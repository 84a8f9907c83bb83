//! How a VM or a control group is traced, and what that shows.
//!
//! `null` means "unknown", never zero.

use serde::{Deserialize, Serialize};

use plimsoll_flow::{TraceMethod, WorkingSetBound};

/// How the references behind a curve were observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CurveSource {
    /// Traps on sampled pages of the VM's RAM.
    Trap,
    /// Accessed-page scans of its RAM, which have no order within a scan.
    Scan,
    /// First touches of sampled pages of its RAM.
    FirstTouch,
    /// Uses of sampled pages of its page cache.
    PageCache,
    /// The cache under its disk and the ghost list behind it.
    Disk,
}

impl CurveSource {
    /// What was observed, as the end of "from ...".
    pub fn description(self) -> &'static str {
        match self {
            Self::Trap => "traps on its RAM",
            Self::Scan => "accessed-page scans of its RAM",
            Self::FirstTouch => "first touches of sampled pages of its RAM",
            Self::PageCache => "uses of its page cache",
            Self::Disk => "its disk's cache and the ghost list behind it",
        }
    }
}

impl From<TraceMethod> for CurveSource {
    fn from(method: TraceMethod) -> Self {
        match method {
            TraceMethod::Traps => Self::Trap,
            TraceMethod::FirstTouches
            | TraceMethod::AccessProtection
            | TraceMethod::IdlePages
            | TraceMethod::Damon => Self::FirstTouch,
            TraceMethod::PageCache => Self::PageCache,
            TraceMethod::AccessedPageScans
            | TraceMethod::WriteScans
            | TraceMethod::SampledPages => Self::Scan,
        }
    }
}

/// A working set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct WorkingSetView {
    /// Its size.
    pub bytes: u64,
    /// Whether that is an estimate or only a bound.
    pub bound: WorkingSetBound,
}

/// Whether a tracer runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TraceState {
    /// It runs, and no period has ended yet.
    Starting,
    /// It has reported a period.
    Tracing,
    /// It does not run; it is started again after a pause.
    Failed,
    /// It is not started, because the backend, or none of those that give a curve, can observe this VM or control group.
    Refused,
}

/// How a VM or a control group is traced.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TraceView {
    /// Whether the tracer runs.
    pub state: TraceState,
    /// How it observes pages.
    pub method: TraceMethod,
    /// Why it failed, or is not started; of a VM then also what can observe it by hand.
    pub error: Option<String>,
    /// The tracer's process.
    pub pid: Option<u32>,
    /// Periods so far.
    pub periods: u64,
    /// Fraction of its pages that is armed.
    pub tracking_rate: f64,
    /// Pages that are armed.
    pub tracked_pages: u64,
    /// Traps per second in the last period; 0 with scans.
    pub traps_per_second: f64,
    /// Pages per second that scans found touched in the last period; 0 with traps.
    pub touches_per_second: f64,
    /// Time taken by its tracer, as a share of the VM's CPU time; of a control group, of one CPU.
    pub overhead_ratio: f64,
    /// References that may be missing, in all periods.
    pub lost: u64,
    /// Reports of the tracer that could not be read; their losses are not in `lost`.
    pub lost_lines: u64,
    /// Times that the tracer was restarted.
    pub restarts: u64,
    /// When the last period ended.
    pub last_unix_ms: Option<u64>,
}
