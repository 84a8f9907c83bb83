//! Requests of clients, and refusals.

use serde::{Deserialize, Serialize};

use crate::curve_json::MissesJson;
use crate::plan::PlanJson;
use crate::vm::{Promise, Relative, VmStatus};

/// Body of `POST /v1/apply` and `POST /v1/rollback`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// The decision's number; `null`: the newest possible one.
    #[serde(default)]
    pub decision: Option<u64>,
}

/// Body of `PATCH /v1/vms/{vm}`: what is to be changed; what is absent stays, `reset` goes back to the
/// configuration first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SettingsChange {
    /// Return to the configured settings first.
    #[serde(default)]
    pub reset: bool,
    /// Minimum size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_bytes: Option<u64>,
    /// Maximum size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// Size against which its misses are compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline_bytes: Option<u64>,
    /// Weight in proportional sharing, 1 or more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<u32>,
    /// Bound on the rise of its misses, as a share. Any of the three bounds replaces all three of the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_loss: Option<f64>,
    /// Bound on its misses per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_misses_per_second: Option<f64>,
    /// Bound on the time that it waits for misses, as a share of its vCPU time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_stall: Option<f64>,
    /// Whether the daemon may resize it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed: Option<bool>,
}

impl SettingsChange {
    /// The promise in place of the configured one; `None` if it stays.
    pub fn promise(&self) -> Option<Promise> {
        let promise = Promise {
            max_loss: self.max_loss,
            max_misses_per_second: self.max_misses_per_second,
            max_stall: self.max_stall,
        };
        (promise != Promise::default()).then_some(promise)
    }

    /// The same with another promise.
    #[must_use]
    pub fn with_promise(self, promise: Option<Promise>) -> Self {
        let promise = promise.unwrap_or_default();
        Self {
            max_loss: promise.max_loss,
            max_misses_per_second: promise.max_misses_per_second,
            max_stall: promise.max_stall,
            ..self
        }
    }
}

/// Predicted misses of a VM at another size: the answer to `GET /v1/vms/{vm}/whatif?size_bytes=N`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VmWhatIf {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// The VM.
    pub vm: String,
    /// Its current size.
    pub size_bytes: u64,
    /// Its resulting size.
    pub size_then_bytes: u64,
    /// Predicted misses per second of wall time at its current size; absent if they are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub misses: Option<MissesJson>,
    /// The same at the other size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub misses_then: Option<MissesJson>,
    /// CPU time of its vCPUs per second of wall time, by which to divide for misses per second of vCPU time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpu_seconds_per_second: Option<f64>,
    /// Predicted misses at its current size over those at the baseline.
    pub relative: Option<Relative>,
    /// The same at the other size.
    pub relative_then: Option<Relative>,
    /// Its status at that size.
    pub status_then: VmStatus,
    /// The reason, in a sentence.
    pub why: String,
}

/// Allocation if the host lost (or gained) memory: the answer to `GET /v1/whatif?lose_bytes=N`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HostWhatIf {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Memory lost; negative: gained.
    pub lose_bytes: i64,
    /// The allocation; `null` if none keeps all limits.
    pub plan: Option<PlanJson>,
    /// Why there is none.
    pub refusal: Option<String>,
}

/// An event of `GET /v1/events` (the data of a server-sent event).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A turn has ended: `GET /v1/host` has new data.
    Turn {
        /// Its number.
        turn: u64,
    },
    /// A decision was made, or its state has changed.
    Decision {
        /// Its number.
        id: u64,
    },
}

/// An answer that is a refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Refusal {
    /// [`SCHEMA`](crate::SCHEMA).
    pub schema: u32,
    /// Its kind.
    pub kind: RefusalKind,
    /// The error, its position, and the resulting state.
    pub message: String,
}

/// Kinds of refusals, each with its HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RefusalKind {
    /// 400: not understood.
    BadRequest,
    /// 401: no or a wrong token.
    Unauthorized,
    /// 403: this socket only shows.
    ReadOnly,
    /// 404: no such VM, decision or page.
    NotFound,
    /// 409: not in this state: paused, a move is under way, the proposal is no longer the newest.
    Conflict,
    /// 422: a VM's limit or minimum size forbids it.
    Guarantee,
    /// 422: it is a control group, which is only observed.
    ObservedOnly,
    /// 503: the turn loop does not answer.
    Busy,
}

impl RefusalKind {
    /// The HTTP status that it comes with.
    pub fn status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::Unauthorized => 401,
            Self::ReadOnly => 403,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::Guarantee | Self::ObservedOnly => 422,
            Self::Busy => 503,
        }
    }
}
