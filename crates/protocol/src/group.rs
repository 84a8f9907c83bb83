//! Views of the control groups that a daemon watches: the answers to `GET /v1/groups`.
//!
//! A control group is only observed. It has no limit that Plimsoll keeps, no promise and no predicted size, and no allocation counts
//! its memory, which is in part that of VMs.
//!
//! Names and paths are chosen by whoever may create groups; [`GroupSummary::path`] is as the kernel has it.

use plimsoll_flow::GroupKind;
use serde::{Deserialize, Serialize};

use crate::curve_json::CurveJson;
use crate::trace::{CurveSource, TraceView, WorkingSetView};

/// The control groups of a host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Groups {
    /// Those that are watched, by name.
    pub watched: Vec<GroupSummary>,
    /// Those that match the configured patterns and are not watched, by reason.
    pub left_out: Vec<LeftOutGroups>,
}

/// Control groups that are not watched for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LeftOutGroups {
    /// The reason, in a sentence.
    pub why: String,
    /// Their number.
    pub count: u64,
    /// The paths of some of them, printable.
    pub paths: Vec<String>,
}

/// A control group in one line of a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GroupSummary {
    /// Its name, unique among the watched ones: from its path, or its printable path if several have one name.
    pub group: String,
    /// What it holds, judged by its path.
    pub kind: GroupKind,
    /// Its path below the root of its hierarchy.
    pub path: String,
    /// The version of control groups, 1 or 2.
    pub cgroup_version: u8,
    /// Memory charged to it and to the groups below it: of its processes, and page cache; `null` if the kernel does not
    /// report it.
    pub charged_bytes: Option<u64>,
    /// Its own limit of memory; `null` without one.
    pub limit_bytes: Option<u64>,
    /// Its working set, by its curve; `null` while unknown.
    pub working_set: Option<WorkingSetView>,
    /// Where its curve comes from.
    pub curve_source: Option<CurveSource>,
    /// References behind the curve.
    pub references: u64,
    /// When the curve was made.
    pub curve_unix_ms: Option<u64>,
    /// How it is traced; `null` if it is not.
    pub trace: Option<TraceView>,
    /// Warnings about it, each a sentence.
    pub warnings: Vec<String>,
}

/// The control groups of a host: the answer to `GET /v1/groups`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GroupsView {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Those that are watched, and those that are not.
    #[serde(flatten)]
    pub groups: Groups,
}

/// A control group in full: the answer to `GET /v1/groups/{group}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GroupView {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Its entry in lists.
    #[serde(flatten)]
    pub summary: GroupSummary,
    /// Its curve; `null` while unknown.
    pub curve: Option<CurveJson>,
}
