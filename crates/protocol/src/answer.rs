//! The daemon's answers other than the types of [`vm`](crate::vm), [`decision`](crate::decision) and
//! [`request`](crate::request).

use serde::{Deserialize, Serialize};

use crate::decision::Decision;
use crate::plan::PlanJson;
use crate::vm::VmSummary;

/// The VMs of a host: the answer to `GET /v1/vms`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VmsView {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// By name.
    pub vms: Vec<VmSummary>,
}

/// The proposal that `apply` would carry out: the answer to `GET /v1/plan`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ProposalView {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// The decision that waits, without its `inputs`; `null` if nothing is worth a move.
    pub proposal: Option<Decision>,
}

/// Whether a decision is reproduced from its recorded inputs: the answer to `GET /v1/decisions/{id}/replay`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ReplayView {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// The decision's number.
    pub id: u64,
    /// Whether the policy reproduces the recorded plan.
    pub agrees: bool,
    /// Its current result; `null` if it refuses.
    pub plan: Option<PlanJson>,
    /// The reason, in a sentence.
    pub why: String,
}

/// The answer to requests that return no data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Acknowledgement {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Why a change is kept in memory alone, so that it would be lost if the daemon ended now; absent if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_stored: Option<String>,
}

impl Acknowledgement {
    /// Nothing is to be stored, or all is.
    pub const DONE: Self = Self {
        schema: crate::SCHEMA,
        not_stored: None,
    };
}

/// A VM whose limits were changed: the answer to `PATCH /v1/vms/{vm}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ChangedVm {
    /// As of any change.
    #[serde(flatten)]
    pub acknowledgement: Acknowledgement,
    /// The VM with its limits now.
    #[serde(flatten)]
    pub vm: VmSummary,
}
