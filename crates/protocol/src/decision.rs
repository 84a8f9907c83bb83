//! What the daemon decided, why, and what came of it.

use plimsoll_policy::Relative;
use serde::{Deserialize, Serialize};

use crate::plan::{PlanInputs, PlanJson};

/// What the daemon may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Trace and show.
    #[default]
    Observe,
    /// Say what it would move; an operator may apply it.
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
    /// What came of it is measured.
    Checking,
    /// The caches' memory goes back to the VMs.
    GivingBack,
}

/// A decision, with all that led to it and all that came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Decision {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Its number; rising, never used twice.
    pub id: u64,
    /// When it was taken.
    pub unix_ms: u64,
    /// What kind.
    pub kind: Kind,
    /// Who took it.
    pub by: By,
    /// The mode at that time.
    pub mode: Mode,
    /// What has become of it.
    pub state: State,
    /// Why it was taken, and why it ended as it did, in sentences.
    pub reason: String,
    /// What the policy was given; it gives [`plan`](Self::plan) again. `null` for moves that need no policy.
    pub inputs: Option<PlanInputs>,
    /// What the policy gave.
    pub plan: Option<PlanJson>,
    /// What is moved, in the order of VMs.
    pub steps: Vec<Step>,
    /// What was measured after it.
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
    /// The caches' memory goes back; sizes stay.
    GiveBack,
    /// What an earlier decision moved is moved back.
    Rollback,
}

/// Who takes decisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// The turn loop.
    Daemon,
    /// Somebody at the command line, the page or the API.
    Operator,
}

/// What has become of a decision.
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
    /// Done, and every promise that could be measured was kept.
    Kept,
    /// A promise was broken or the move failed: it is being, or was, taken back.
    RolledBack,
    /// Done in part: some step failed and its VM keeps what it has.
    Partly,
    /// Nothing was moved.
    Failed,
    /// Stopped by `pause`, a shutdown or an end of a VM; what was moved stays.
    Stopped,
}

impl State {
    /// Whether nothing more comes of it.
    #[must_use]
    pub fn has_ended(self) -> bool {
        !matches!(self, Self::Proposed | Self::Moving | Self::Checking)
    }
}

/// What a VM has.
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
    #[must_use]
    pub fn size_bytes(self) -> u64 {
        self.direct_bytes.saturating_add(self.cache_bytes)
    }
}

/// How far one VM's part in a move is.
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
    /// Its balloon does not move; it keeps what it has.
    Stuck,
    /// Its target could not be set; it keeps what it has.
    Failed,
    /// The VM has ended.
    Gone,
}

impl StepState {
    /// Whether nothing more will be moved.
    #[must_use]
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Done | Self::Stuck | Self::Failed | Self::Gone)
    }
}

/// One VM's part in a move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Step {
    /// The VM.
    pub vm: String,
    /// What it had.
    pub from: HoldingView,
    /// What it is to have.
    pub to: HoldingView,
    /// What it was last seen to have.
    pub now: HoldingView,
    /// How far it is.
    pub state: StepState,
    /// What went wrong, and what the VM is left with.
    pub error: Option<String>,
}

/// What was measured of one VM after a move, beside what was predicted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Check {
    /// The VM.
    pub vm: String,
    /// Misses at the new size over those at the baseline, as predicted.
    pub predicted: Option<Relative>,
    /// The same, as measured; `null` if it could not be.
    pub measured: Option<f64>,
    /// By what it was measured.
    pub by: String,
    /// 1.0 and what may be lost.
    pub bound: f64,
    /// What follows.
    pub verdict: Verdict,
    /// Why, in a sentence.
    pub why: String,
}

/// Whether a promise was kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It was.
    Kept,
    /// It was not.
    Broken,
    /// Too little was measured to say.
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
