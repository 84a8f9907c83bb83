//! The daemon's decisions, their reasons and their results.

use plimsoll_policy::Relative;
use serde::{Deserialize, Serialize};

use crate::plan::{PlanInputs, PlanJson};

/// The daemon's mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Trace and show.
    #[default]
    Observe,
    /// Propose moves; an operator may apply them.
    Advise,
    /// Move.
    Act,
}

/// Where in the workflow of \[LS07\] fig. 6 the host is. With curves from traps it is always [`Whole`](Self::Whole).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The VMs have all their memory themselves.
    #[default]
    Whole,
    /// Their memory is being moved into the caches under their disks.
    Shrinking,
    /// They are traced through the caches.
    Tracing,
    /// Memory goes from victims' caches to beneficiaries'.
    Moving,
    /// The result is being measured.
    Checking,
    /// The caches' memory goes back to the VMs.
    GivingBack,
}

/// A decision, with its inputs, steps and results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Decision {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Its number; rising, never used twice.
    pub id: u64,
    /// When it was taken.
    pub unix_ms: u64,
    /// Its kind.
    pub kind: Kind,
    /// Who initiated it.
    pub by: Initiator,
    /// The mode at that time.
    pub mode: Mode,
    /// Its state.
    pub state: State,
    /// Why it was taken, and why it ended as it did, in sentences.
    pub reason: String,
    /// The policy's inputs, which reproduce [`plan`](Self::plan). `null` for moves without a policy.
    pub inputs: Option<PlanInputs>,
    /// The policy's result.
    pub plan: Option<PlanJson>,
    /// The steps, in the order of VMs.
    pub steps: Vec<Step>,
    /// Measurements after it.
    pub checks: Vec<Check>,
    /// The decision that this one takes back.
    pub takes_back: Option<u64>,
    /// The decision that took this one back.
    pub taken_back_by: Option<u64>,
    /// When it ended.
    pub ended_unix_ms: Option<u64>,
}

/// Kinds of decisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// VMs get other sizes.
    Divide,
    /// VMs' memory goes into their caches; their sizes stay.
    IntoCaches,
    /// VMs get memory back: from their caches, because a guest runs short, or at the daemon's end.
    GiveBack,
    /// The moves of an earlier decision are undone.
    Rollback,
}

/// Who initiated a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Initiator {
    /// The turn loop.
    Daemon,
    /// An operator, by the command line, the page or the API.
    Operator,
}

/// State of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It waits for an operator.
    Proposed,
    /// A newer proposal stands in its place.
    Superseded,
    /// Memory is being moved.
    Moving,
    /// The move is done, its result is being measured.
    Checking,
    /// Done; every VM that could be measured stayed within its limit.
    Kept,
    /// A VM exceeded its limit or the move failed: it is being, or was, rolled back.
    RolledBack,
    /// Partly done: some step failed and its VM keeps its size.
    Partly,
    /// Nothing was moved.
    Failed,
    /// Stopped by `pause`, a shutdown or the end of a VM; memory already moved stays.
    Stopped,
}

impl State {
    /// Whether nothing more comes of it.
    pub fn has_ended(self) -> bool {
        !matches!(self, Self::Proposed | Self::Moving | Self::Checking)
    }
}

/// A VM's size, by its parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HoldingView {
    /// Of its own: RAM less balloon.
    pub direct_bytes: u64,
    /// Capacity of the cache under its disk.
    pub cache_bytes: u64,
}

impl HoldingView {
    /// Both together.
    pub fn size_bytes(self) -> u64 {
        self.direct_bytes.saturating_add(self.cache_bytes)
    }
}

/// Progress of one VM's part in a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum StepState {
    /// It waits for memory that other VMs have to free.
    Waiting,
    /// It gives memory.
    Shrinking,
    /// It takes memory.
    Growing,
    /// It has its new size.
    Done,
    /// It gives memory, but slowly.
    Late,
    /// Its balloon does not move; it keeps its size.
    Stuck,
    /// Its guest cannot give as much, or ran short of memory and got some back.
    Short,
    /// Its target could not be set; it keeps its size.
    Failed,
    /// The VM has ended.
    Gone,
}

impl StepState {
    /// Whether nothing more will be moved.
    pub fn has_ended(self) -> bool {
        matches!(
            self,
            Self::Done | Self::Stuck | Self::Short | Self::Failed | Self::Gone
        )
    }
}

/// One VM's part in a move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Step {
    /// The VM.
    pub vm: String,
    /// Its former size.
    pub from: HoldingView,
    /// Its target.
    pub to: HoldingView,
    /// Its last observed size.
    pub now: HoldingView,
    /// Its progress.
    pub state: StepState,
    /// The error, and the VM's resulting size.
    pub error: Option<String>,
}

/// Measurement of one VM after a move, with its prediction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Check {
    /// The VM.
    pub vm: String,
    /// Misses at the new size over those at the baseline, as predicted.
    pub predicted: Option<Relative>,
    /// The same, as measured; `null` if it could not be.
    pub measured: Option<f64>,
    /// Source of the measurement.
    pub by: String,
    /// 1.0 plus `max_loss`; `null` if the VM is not promised one.
    pub bound: Option<f64>,
    /// Its misses per second beside their bound; absent if the VM is not promised one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub misses: Option<MissesCheck>,
    /// How long its QEMU waited for memory of the host beside its bound; absent if it gave no memory, or that is not
    /// measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall: Option<StallCheck>,
    /// Verdict on the limit.
    pub verdict: Verdict,
    /// Why, in a sentence.
    pub why: String,
}

/// Misses per second after a move, as predicted and measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MissesCheck {
    /// As predicted; `null` without a curve.
    pub predicted_per_second: Option<f64>,
    /// Upper limit of the prediction's band.
    pub predicted_high_per_second: Option<f64>,
    /// As measured; `null` if they could not be.
    pub measured_per_second: Option<f64>,
    /// `max_misses_per_second`, or what `max_stall` allows if that is less.
    pub bound_per_second: f64,
}

/// Share of the time in which a thread of a VM's QEMU waited for memory of the host.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct StallCheck {
    /// Before the move; `null` if it was not measured.
    pub before_ratio: Option<f64>,
    /// Since the move.
    pub measured_ratio: f64,
    /// Its `max_stall`, otherwise 0.05.
    pub bound_ratio: f64,
}

/// Whether a limit was kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It was.
    Kept,
    /// It was not.
    Broken,
    /// Too little data.
    Unknown,
}

/// The answer to `GET /v1/decisions`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DecisionsView {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Newest first.
    pub decisions: Vec<Decision>,
}
