//! Views of the host and its VMs: the answers to `GET /v1/host` and `GET /v1/vms`.
//!
//! Sizes are bytes, times are milliseconds since 1970, ratios are shares of 1.0. `null` means "unknown", never zero.

use std::fmt;

use serde::{Deserialize, Serialize};

use plimsoll_flow::{Accelerator, TraceMethod, WorkingSetBound};
use plimsoll_policy::Bound;
pub use plimsoll_policy::Relative;

use crate::curve_json::{CurveJson, MissesJson};
use crate::decision::{Mode, Phase};
use crate::group::Groups;
pub use crate::trace::{CurveSource, TraceState, TraceView, WorkingSetView};

/// The host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HostView {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Its name.
    pub host: String,
    /// Version of the daemon.
    pub version: String,
    /// The daemon's mode.
    pub mode: Mode,
    /// Nothing is moved until `resume`.
    pub paused: bool,
    /// The phase of its workflow.
    pub phase: Phase,
    /// When the daemon started.
    pub since_unix_ms: u64,
    /// Time of this state.
    pub now_unix_ms: u64,
    /// Turns since the start.
    pub turn: u64,
    /// Interval between turns.
    pub turn_interval_ms: u64,
    /// CPU and waiting time of the last turn.
    pub turn_took_ms: f64,
    /// Where the memory is.
    pub memory: HostMemory,
    /// The VMs, by name.
    pub vms: Vec<VmSummary>,
    /// The control groups, which no allocation concerns.
    #[serde(default)]
    pub groups: Groups,
    /// Number of the decision whose move is in progress.
    pub moving: Option<u64>,
    /// Warnings for the operator, each a sentence.
    pub warnings: Vec<String>,
    /// Bytes of history on disk; `null` if it is not kept.
    pub history_bytes: Option<u64>,
    /// Resident memory of the daemon itself.
    pub daemon_resident_bytes: u64,
}

/// Where the host's memory is. `vms_direct + vms_cache + store + spare = divided`; `divided + other + free = total`
/// as far as the kernel's own counters agree when they are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HostMemory {
    /// All RAM of the host (`MemTotal`).
    pub total_bytes: u64,
    /// Memory that Plimsoll allocates: the configured total, otherwise the sum of the VMs' sizes when discovered.
    pub divided_bytes: u64,
    /// In the VMs: their RAM less their balloons.
    pub vms_direct_bytes: u64,
    /// In the caches under their disks (capacities).
    pub vms_cache_bytes: u64,
    /// In the shared page store (capacity).
    pub store_bytes: u64,
    /// Not allocated.
    pub spare_bytes: u64,
    /// Memory that can be reclaimed from the VMs now, within all limits.
    pub reclaimable_bytes: u64,
    /// Memory that the kernel can provide without swapping (`MemAvailable`).
    pub available_bytes: u64,
}

/// A VM's status with respect to its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum VmStatus {
    /// Within its limit, and could give memory.
    Safe,
    /// Within its limit, and can give nothing.
    Tight,
    /// Its measured or predicted misses are above its limit.
    Violating,
    /// Its curve is not known, or does not show what its limit needs.
    Unknown,
}

/// A VM in one line of a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VmSummary {
    /// Its name.
    pub vm: String,
    /// Its QEMU process.
    pub pid: u32,
    /// Its UUID; `null` if it has none.
    #[serde(default)]
    pub uuid: Option<String>,
    /// What executes its instructions; `null` if unknown.
    pub accelerator: Option<Accelerator>,
    /// Whether libvirt manages it.
    pub libvirt: bool,
    /// Its status with respect to its limit.
    pub status: VmStatus,
    /// Why, in a sentence.
    pub why: String,
    /// The state in which its vCPUs do not run, by QEMU's name, such as `paused`; absent while they run, or if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
    /// Its RAM at start: the maximum of its guest memory.
    pub ram_bytes: u64,
    /// Memory of its own: RAM less balloon.
    pub direct_bytes: u64,
    /// Capacity of the exclusive cache under its disk.
    pub cache_bytes: u64,
    /// Its size: both together.
    pub size_bytes: u64,
    /// Its target size, if decided.
    pub target_bytes: Option<u64>,
    /// Its limit.
    pub settings: Settings,
    /// Its working set, by its curve.
    pub working_set: Option<WorkingSetView>,
    /// Predicted misses at its present size per second of wall time; absent if its curve is not known, or does not
    /// resolve that size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub misses: Option<MissesJson>,
    /// CPU time of its vCPUs per second of wall time while the curve was observed; absent if unknown. Misses per second
    /// divided by it are misses per second of vCPU time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpu_seconds_per_second: Option<f64>,
    /// How long it waits for a miss, by which `max_stall` becomes a number of misses.
    #[serde(default)]
    pub miss_cost: MissCost,
    /// Share of the time between the last two readings, a turn or less apart, in which a thread of its QEMU waited for
    /// memory of the host; absent if no control group of its own reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_stall_ratio: Option<f64>,
    /// Predicted misses at its present size over those at its baseline; `null` if its curve is not known, or does not
    /// resolve that size.
    pub relative: Option<Relative>,
    /// Memory that could be taken from it within its limit, of what its guest can give.
    pub reclaimable_bytes: Option<u64>,
    /// Smallest size within its limit and its minimum; at least `kept_bytes`.
    pub promise_bytes: Option<u64>,
    /// The part of its own memory that its guest cannot give, by the guest's statistics; all of it, up to the baseline,
    /// without them, and all of it without a balloon.
    #[serde(default)]
    pub kept_bytes: u64,
    /// Where its curve comes from.
    pub curve_source: Option<CurveSource>,
    /// References behind the curve.
    pub references: u64,
    /// When the curve was made.
    pub curve_unix_ms: Option<u64>,
    /// How it is traced; `null` if it is not.
    pub trace: Option<TraceView>,
    /// Its balloon; `null` if it has none that can be reached.
    pub balloon: Option<BalloonView>,
    /// Its cache under the disk; `null` if it has none.
    pub cache: Option<CacheView>,
    /// Which tracing backends can observe it; empty while unknown. A userfaultfd on its RAM does not count as an
    /// obstacle here, because it may belong to the daemon's own tracer.
    #[serde(default, deserialize_with = "known_backends")]
    pub backends: Vec<BackendView>,
    /// Sizes reported by it or by its disk daemon that the kernel rules out, and that were therefore not used.
    #[serde(default)]
    pub refused_claims: u64,
}

/// What a VM is promised about its misses; all that is given holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Promise {
    /// Bound on their rise over those at the baseline, as a share; `null` if there is none.
    #[serde(default)]
    pub max_loss: Option<f64>,
    /// Bound on their number per second; `null` if there is none.
    #[serde(default)]
    pub max_misses_per_second: Option<f64>,
    /// Bound on the time that it waits for them, as a share of its vCPU time; `null` if there is none.
    #[serde(default)]
    pub max_stall: Option<f64>,
}

/// Where the cost of a miss comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum MissCostSource {
    /// Measured by the daemon of its disks: the time of reads from storage, over the blocks that were read.
    DiskDaemon,
    /// Measured by QEMU's block layer: the time of reads, over their number.
    BlockStatistics,
    /// Not measured: the configured value.
    #[default]
    Assumed,
}

impl VmSummary {
    /// Whether it is emulated: its times do not carry over to real hardware.
    pub fn is_emulated(&self) -> bool {
        self.accelerator == Some(Accelerator::Tcg)
    }
}

impl MissCostSource {
    /// What was done to find the cost, as a sentence without an end.
    pub fn description(self) -> &'static str {
        match self {
            Self::DiskDaemon => "measured per block read from storage, by its disk daemon",
            Self::BlockStatistics => "measured per read of its disks, by QEMU's block statistics",
            Self::Assumed => "assumed, as configured: nothing measures it",
        }
    }
}

/// How long a VM waits for a miss.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MissCost {
    /// The time, above 0.
    pub ms: f64,
    /// Where it comes from.
    pub source: MissCostSource,
}

impl MissCost {
    /// A cost that is not measured.
    pub const fn assumed(ms: f64) -> Self {
        Self {
            ms,
            source: MissCostSource::Assumed,
        }
    }
}

impl Default for MissCost {
    /// Several reads of a flash disk, an eighth of one of a rotating disk.
    fn default() -> Self {
        Self::assumed(1.0)
    }
}

impl fmt::Display for MissCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms", (self.ms * 1000.0).round() / 1000.0)
    }
}

impl Promise {
    /// What holds for a VM without a promise of its own.
    pub const DEFAULT: Self = Self::on_loss(0.05);

    /// The bounds on misses that keep it, for a VM that uses `vcpus` seconds of vCPU time per second and waits for each
    /// miss as `cost` states. While `vcpus` is unknown, the default `max_loss` holds in place of `max_stall`.
    pub fn bound(&self, vcpus: Option<f64>, cost: MissCost) -> Bound {
        let of_stall = self.max_stall.zip(vcpus);
        let of_stall = of_stall.map(|(share, vcpus)| share * vcpus / (cost.ms * 1e-3));
        let numbers = self.max_misses_per_second.into_iter().chain(of_stall);
        let in_place = Self::DEFAULT
            .max_loss
            .filter(|_| self.max_stall.is_some() && vcpus.is_none());
        Bound {
            max_loss: self.max_loss.or(in_place),
            max_misses_per_second: numbers.reduce(f64::min),
        }
    }

    /// A bound on the rise of misses alone.
    pub const fn on_loss(max_loss: f64) -> Self {
        Self {
            max_loss: Some(max_loss),
            max_misses_per_second: None,
            max_stall: None,
        }
    }
}

impl fmt::Display for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| (share * 1e4).round() / 100.0;
        let loss = |share| format!("{} % more misses than at its baseline", percent(share));
        let number =
            |misses: f64| format!("{} misses per second", (misses * 100.0).round() / 100.0);
        let stall = |share| format!("{} % of its vCPU time waiting for misses", percent(share));
        let parts = [
            self.max_loss.map(loss),
            self.max_misses_per_second.map(number),
            self.max_stall.map(stall),
        ];
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        write!(f, "at most {}", parts.join(" and "))
    }
}

/// A VM's limits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Settings {
    /// Minimum size.
    pub min_bytes: u64,
    /// Maximum size.
    pub max_bytes: u64,
    /// Size against which its misses are compared.
    pub baseline_bytes: u64,
    /// Weight in proportional sharing, 1 or more.
    pub shares: u32,
    /// What it is promised about its misses.
    #[serde(flatten)]
    pub promise: Promise,
    /// Whether the daemon may resize it.
    pub managed: bool,
}

/// Whether a tracing backend can observe a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct BackendView {
    /// The backend.
    pub backend: TraceMethod,
    /// The obstacles, in the order in which attaching meets them; empty if the backend can attach.
    pub refusals: Vec<BackendRefusal>,
}

/// Reads assessments, and skips those of backends unknown to this version: a daemon of a later version may have more, and
/// the rest of its answer can still be used.
fn known_backends<'de, D>(field: D) -> Result<Vec<BackendView>, D::Error>
where
    D: serde::Deserializer<'de>,
{
    let all = Vec::<serde_json::Value>::deserialize(field)?.into_iter();
    let known = all.filter(|view| TraceMethod::deserialize(&view["backend"]).is_ok());
    let views = known.map(|view| serde_json::from_value(view).map_err(serde::de::Error::custom));
    views.collect()
}

/// Why a backend cannot observe a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct BackendRefusal {
    /// A short name for programs.
    pub name: String,
    /// The reason, in a sentence.
    pub why: String,
    /// What to change, in one line.
    pub change: String,
}

/// How a balloon follows its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum BalloonState {
    /// No target was set by this daemon.
    Idle,
    /// It moves towards its target.
    Following,
    /// It has reached its target.
    Reached,
    /// It moves more slowly than expected.
    Late,
    /// It does not move.
    Stuck,
    /// The guest has no driver for it.
    Absent,
    /// The actuator reports a state that this version does not support.
    Unknown,
}

/// A balloon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct BalloonView {
    /// Its guest memory.
    pub actual_bytes: u64,
    /// Its last requested size.
    pub target_bytes: Option<u64>,
    /// How it follows its target.
    pub state: BalloonState,
    /// Available memory as last reported by the guest.
    pub guest_available_bytes: Option<u64>,
    /// Age of the guest's statistics; `null` if it never gave any.
    pub statistics_age_ms: Option<u64>,
}

/// A cache under a VM's disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CacheView {
    /// Its capacity.
    pub capacity_bytes: u64,
    /// Memory in use.
    pub used_bytes: u64,
    /// Blocks read by the VM.
    pub read_blocks: u64,
    /// Those served from the cache.
    pub hits: u64,
    /// Why it switched itself off, if it did.
    pub disabled: Option<String>,
}

/// A VM in full: the answer to `GET /v1/vms/{vm}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VmView {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Its entry in lists of VMs.
    #[serde(flatten)]
    pub summary: VmSummary,
    /// Its curve; `null` while unknown.
    pub curve: Option<CurveJson>,
    /// Predicted misses at the curve's sizes over those at its baseline, by which `max_loss` is kept; absent while unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub relative_points: Vec<RelativePoint>,
}

/// Predicted misses at a size over those at the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct RelativePoint {
    /// Size in pages from which they hold.
    pub size_pages: u64,
    /// The quotient, with the limits of its band.
    #[serde(flatten)]
    pub relative: Relative,
}

/// A point in the history of a VM, or of a control group, which has neither cache nor target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Sample {
    /// Time of the point.
    pub unix_ms: u64,
    /// Memory of its own; charged to a control group.
    pub direct_bytes: u64,
    /// Capacity of its cache.
    pub cache_bytes: u64,
    /// Its target, if decided.
    pub target_bytes: Option<u64>,
    /// Its working set.
    pub working_set_bytes: Option<u64>,
    /// Whether that is a bound; `null` without one, or from a daemon of an earlier version. A mean of which a part is a bound is such a
    /// bound.
    #[serde(default)]
    pub working_set_bound: Option<WorkingSetBound>,
    /// Predicted misses at its size over those at its baseline.
    pub relative: Option<f64>,
    /// Misses a second, measured at its disk.
    pub misses_per_second: Option<f64>,
    /// Time taken by its tracer.
    pub overhead_ratio: Option<f64>,
    /// References that its tracer may have missed in the interval of this point.
    pub lost: u64,
}

/// The history of a VM or of a control group: the answer to `GET /v1/vms/{vm}/history` and `GET /v1/groups/{group}/history`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HistoryView {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// The VM or the control group.
    pub vm: String,
    /// Its points, in ascending time.
    pub samples: Vec<Sample>,
}

/// The curves that are kept of a VM: the answer to `GET /v1/vms/{vm}/curves`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct KeptCurves {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// The VM.
    pub vm: String,
    /// Its curves, in ascending time, with at most 48 steps each.
    pub curves: Vec<KeptCurve>,
}

/// A curve that is kept of a VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct KeptCurve {
    /// When it was kept.
    pub unix_ms: u64,
    /// The curve.
    pub curve: CurveJson,
}

/// Activity by region of a VM's RAM: the answer to `GET /v1/vms/{vm}/heatmap`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HeatmapView {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// The VM.
    pub vm: String,
    /// Size of a cell's region of RAM.
    pub cell_bytes: u64,
    /// Its periods, rising in time.
    pub rows: Vec<HeatRow>,
}

/// A period of a heatmap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HeatRow {
    /// When it ended.
    pub unix_ms: u64,
    /// Pages used in each cell, scaled up from the sample.
    pub pages: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_of_a_later_version_is_left_out() {
        #[derive(Debug, Deserialize)]
        struct Views {
            #[serde(deserialize_with = "known_backends")]
            backends: Vec<BackendView>,
        }
        let read = |text: &str| serde_json::from_str::<Views>(text);
        let views = read(
            r#"{"backends":[{"backend":"telepathy","refusals":[{"kind":7}]},{"backend":"trap","refusals":[]}]}"#,
        );
        let views = views.unwrap().backends;
        assert_eq!(views.len(), 1);
        assert_eq!(views[0].backend, TraceMethod::Traps);
        let error = read(r#"{"backends":[{"backend":"trap"}]}"#).unwrap_err();
        assert!(error.to_string().contains("refusals"), "{error}");
    }

    #[test]
    fn a_stall_is_a_number_of_misses_if_the_vcpu_time_is_known() {
        let stall = Promise {
            max_stall: Some(0.01),
            ..Promise::default()
        };
        // Half a vCPU may wait 5 ms per second: five misses.
        let bound = stall.bound(Some(0.5), MissCost::default());
        assert_eq!(
            (bound.max_loss, bound.max_misses_per_second),
            (None, Some(5.0))
        );
        // Misses that cost a quarter of that may be four times as many.
        let measured = MissCost {
            ms: 0.25,
            source: MissCostSource::BlockStatistics,
        };
        let bound = stall.bound(Some(0.5), measured);
        assert_eq!(bound.max_misses_per_second, Some(20.0));
        assert_eq!(stall.bound(None, measured), Bound::on_loss(0.05));
        let all = Promise {
            max_loss: Some(0.25),
            max_misses_per_second: Some(20.0),
            ..stall
        };
        let bound = all.bound(Some(4.0), MissCost::default());
        assert_eq!(
            (bound.max_loss, bound.max_misses_per_second),
            (Some(0.25), Some(20.0))
        );
        let bound = all.bound(Some(0.5), MissCost::default());
        assert_eq!(bound.max_misses_per_second, Some(5.0));
        assert_eq!(
            all.to_string(),
            "at most 25 % more misses than at its baseline and 20 misses per second and 1 % of its vCPU time waiting \
             for misses"
        );
    }
}
