//! Errors of changing and querying memory.

use std::error::Error;

use plimsoll_flow::VmId;

/// Whether a target may be in force although setting it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// Nothing was sent, or it was refused: the target before it is in force.
    No,
    /// It was sent but not answered: either target may be in force. Setting it again resolves this.
    Maybe,
}

/// Why memory was not changed or queried. Each variant states which target is in force.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum ActuatorError {
    /// A size out of range; nothing was sent.
    #[error("{what} cannot be set to {target_bytes} bytes: {why}; its size is unchanged")]
    Target {
        what: String,
        target_bytes: u64,
        why: String,
    },
    /// A target that was not set, or may not have been set.
    #[error("{what} was not set to {target_bytes} bytes: {}", match sent {
        Delivery::No => "its target is unchanged",
        Delivery::Maybe => "either this target or the previous one is in force",
    })]
    Set {
        what: String,
        target_bytes: u64,
        sent: Delivery,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A failed query; nothing was changed.
    #[error("{what} cannot be queried; the last known value is kept")]
    Query {
        what: String,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The reported size exceeds a limit known from the kernel; nothing was changed, and the last known value is kept.
    #[error(
        "{what} reports {claimed_bytes} bytes, of which the kernel allows at most {limit_bytes}: the report is refused"
    )]
    Claim {
        what: String,
        /// The reported size.
        claimed_bytes: u64,
        /// The limit known from the kernel.
        limit_bytes: u64,
    },
    /// The last target is still being set, which completes without a further request; nothing was sent.
    #[error("{what} is still being set to {target_bytes} bytes; nothing was sent")]
    Busy { what: String, target_bytes: u64 },
    /// A VM whose own memory cannot be changed; nothing was sent.
    #[error("VM {0} has neither a monitor nor a balloon: its memory cannot be changed")]
    NoBalloon(VmId),
    /// There is no cache under the VM's disk; nothing was sent.
    #[error("VM {0} has no cache under its disk")]
    NoCache(VmId),
}

impl ActuatorError {
    /// Whether a target may be in force although setting it failed; `None` if the error is not about setting one.
    pub fn sent(&self) -> Option<Delivery> {
        match self {
            Self::Set { sent, .. } => Some(*sent),
            Self::Query { .. } | Self::Claim { .. } => None,
            _ => Some(Delivery::No),
        }
    }
}
