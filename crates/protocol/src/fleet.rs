//! What the VMs of many hosts need over time, and a plan of where they should run.
//!
//! A host answers with [`HostDemands`]. A [`FleetFile`] holds the answers of all hosts, so that they can be kept and
//! planned with later; a [`FleetReport`] and a [`PlacementJson`] are what `plimsoll fleet report` and `fleet place` print.

use serde::{Deserialize, Serialize};

/// Minimum length of an interval of demands, in ms: curves are kept every ten minutes.
pub const INTERVAL_MIN_MS: u64 = 60_000;
/// Maximum number of intervals of demands.
pub const INTERVALS_MAX: u64 = 10_000;

/// Whether demands are computed in intervals of `interval_ms`, of which the last may end `span_ms` after the first one's start.
pub fn are_intervals_accepted(span_ms: u64, interval_ms: u64) -> bool {
    interval_ms >= INTERVAL_MIN_MS && span_ms / interval_ms < INTERVALS_MAX
}

/// The path at which a daemon answers with [`HostDemands`].
pub fn demands_path(since_unix_ms: u64, interval_ms: u64) -> String {
    format!("/v1/demands?since_unix_ms={since_unix_ms}&interval_ms={interval_ms}")
}

/// What the VMs of a host need over time: the answer to `GET /v1/demands`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HostDemands {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Its name.
    pub host: String,
    /// Time of the answer, by the host's clock.
    pub now_unix_ms: u64,
    /// Start of the first interval, by the host's clock.
    pub since_unix_ms: u64,
    /// Length of an interval.
    pub interval_ms: u64,
    /// Processors of the host; `null` if unknown.
    pub processors: Option<u32>,
    /// All RAM of the host.
    pub total_bytes: u64,
    /// The VMs, by name; then those that are not there any more, by UUID.
    pub vms: Vec<VmDemands>,
}

/// What a VM needs over time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VmDemands {
    /// Its name; its UUID if it is not there any more.
    pub vm: String,
    /// Its UUID; `null` if it has none.
    pub uuid: Option<String>,
    /// Whether it runs on this host now. If not, it was here, and only its intervals count.
    pub present: bool,
    /// Whether its memory may be changed. If not, it needs the size that it has.
    pub managed: bool,
    /// The size that it has.
    pub size_bytes: u64,
    /// What it needs while its curve is not known: its baseline, unless its minimum or what its guest cannot give is more.
    pub unknown_need_bytes: u64,
    /// The intervals with a curve, in ascending time.
    pub intervals: Vec<IntervalDemand>,
}

/// What a VM needed in an interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct IntervalDemand {
    /// Number of the interval, from 0.
    pub interval: u32,
    /// Curves of the interval.
    pub curves: u32,
    /// The largest of the sizes that these curves require for the VM's limit, its minimum, and what its guest cannot
    /// give now.
    pub need_bytes: u64,
    /// The most CPU time of its vCPUs per second of wall time; `null` if unknown.
    pub vcpu_seconds_per_second: Option<f64>,
}

/// What was collected from a fleet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FleetFile {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// When, by the clock of the collecting machine.
    pub collected_unix_ms: u64,
    /// Those that answered.
    pub hosts: Vec<CollectedHost>,
    /// Those that did not.
    pub missing: Vec<MissingHost>,
}

/// A host that answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CollectedHost {
    /// Address of its daemon.
    pub target: String,
    /// How far its clock is ahead of the collecting machine's, to within half the time of the request; negative if behind.
    pub clock_ahead_ms: i64,
    /// Its answer.
    pub demands: HostDemands,
}

/// A host whose VMs are not known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingHost {
    /// Address of its daemon.
    pub target: String,
    /// Why, in a sentence.
    pub why: String,
}

/// What a fleet has and needs, as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FleetReport {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Length of the period into which time is folded. Periods are counted from 1970-01-01 00:00 UTC: one of a day begins at 00:00
    /// UTC, one of a week on Thursday.
    pub period_ms: u64,
    /// Length of its slots.
    pub interval_ms: u64,
    /// What all VMs need together in each slot, from the beginning of the period.
    pub need_bytes: Vec<u64>,
    /// The sum of what each VM needs at its own peak.
    pub sum_of_peaks_bytes: u64,
    /// The sizes of all VMs.
    pub size_bytes: u64,
    /// Memory that VMs may have on all hosts.
    pub capacity_bytes: u64,
    /// No placement that keeps every need has fewer hosts.
    pub hosts_at_least: u64,
    /// The hosts.
    pub hosts: Vec<HostPlace>,
    /// The VMs.
    pub vms: Vec<VmPlace>,
    /// Hosts whose clocks differ from the collecting machine's by more than 5 s; their times were moved.
    pub clocks: Vec<ClockNote>,
    /// Hosts whose VMs are not known.
    pub missing: Vec<MissingHost>,
    /// What limits the report, each a sentence.
    pub problems: Vec<String>,
}

/// A clock that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockNote {
    /// The host.
    pub host: String,
    /// How far it is ahead; negative if behind.
    pub ahead_ms: i64,
}

/// What placing is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    /// Every VM gets what it needs, with the least memory moved between hosts.
    #[default]
    Fit,
    /// The same, with as few hosts as possible.
    FewestHosts,
}

/// Where the VMs of a fleet should run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlacementJson {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// What it is for.
    pub goal: Goal,
    /// Whether every VM has what it needs on its host, at all times, after the moves.
    pub fits: bool,
    /// Whether any one host may be lost after the moves, and its VMs still fit on the others; `null` if not asked for.
    pub survives_loss: Option<bool>,
    /// Whether no placement is better for the goal.
    pub is_optimal: bool,
    /// Hosts with a VM, and with `fewest-hosts` those kept for a loss: before, after, and the number below which no placement gets.
    pub hosts_used: BoundedCount,
    /// Bytes of VMs to be moved, and what must be moved at least.
    pub moved_bytes: BoundedBytes,
    /// The moves, in an order in which each target has room for what its VMs need when it comes.
    pub moves: Vec<VmMove>,
    /// So many of them, the last, wait for each other: no order was found in which each target has room and rules are kept.
    #[serde(default)]
    pub moves_without_order: u64,
    /// All VMs, with the sizes that they need.
    pub vms: Vec<VmPlace>,
    /// The hosts after the moves.
    pub hosts: Vec<HostPlace>,
    /// What is not as asked for, each a sentence.
    pub problems: Vec<String>,
}

/// A number of hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundedCount {
    /// Now.
    pub before: u64,
    /// After the moves.
    pub after: u64,
    /// No placement that keeps every need has fewer.
    pub at_least: u64,
}

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundedBytes {
    /// Of this plan.
    pub planned: u64,
    /// No placement in which every VM gets what it needs moves less.
    pub at_least: u64,
}

/// A VM that moves to another host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmMove {
    /// Its name.
    pub vm: String,
    /// Its UUID; `null` if it has none.
    pub uuid: Option<String>,
    /// Name of the host on which it runs.
    pub from: String,
    /// Name of the host to which it moves.
    pub to: String,
    /// Its size, which is copied.
    pub size_bytes: u64,
    /// By how much the VMs that its new host then has, itself among them, exceed that host's memory for VMs with the sizes that they
    /// have now: so much they must give before.
    #[serde(default)]
    pub shrink_first_bytes: u64,
    /// The least time that copying takes; `null` without a bandwidth.
    pub copy_s: Option<f64>,
    /// Why.
    pub reason: MoveReason,
}

/// Why a VM moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MoveReason {
    /// Its host cannot give all its VMs what they need, or a rule forbids its place.
    Relief,
    /// Its host is emptied.
    Emptying,
    /// It makes room for another VM.
    Room,
}

/// A VM's place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmPlace {
    /// Its name.
    pub vm: String,
    /// Its UUID; `null` if it has none.
    pub uuid: Option<String>,
    /// Name of its host after the moves.
    pub host: String,
    /// The size that it has.
    pub size_bytes: u64,
    /// The most that it needs at any time: its right size.
    pub need_bytes: u64,
    /// The most processors that it needs at any time; `null` if unknown.
    pub processors: Option<f64>,
    /// Share of the time for which its need was measured; it counts with its largest otherwise.
    pub known_ratio: f64,
}

/// A host after the moves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostPlace {
    /// Its name.
    pub host: String,
    /// Number of its VMs.
    pub vms: u64,
    /// Memory that its VMs may have together.
    pub capacity_bytes: u64,
    /// What its VMs need at the time when they need most.
    pub peak_bytes: u64,
    /// The sum of what each of them needs at its own peak.
    pub sum_of_peaks_bytes: u64,
    /// Share of its processors that is needed at the time when most are; `null` if unknown, of the host or of all its
    /// VMs. VMs of unknown use count as none beside others.
    pub processors_ratio: Option<f64>,
    /// Whether its VMs fit on the other hosts if it is lost; `null` if not asked for.
    pub survives_loss: Option<bool>,
}
