//! Why memory could not be moved, or not be seen.

use std::error::Error;

use plimsoll_flow::VmId;

/// Whether a target that could not be set may be in force all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// Nothing was sent, or it was refused: the target before it is in force.
    No,
    /// It was sent and not answered: either target may be in force, and setting it again settles it.
    Maybe,
}

/// Each variant says what the VM is left with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ActuatorError {
    /// A size that cannot be; nothing was sent.
    #[error("{what} cannot be set to {target_bytes} bytes: {why}; its size is unchanged")]
    Target {
        /// Whose.
        what: String,
        /// The size.
        target_bytes: u64,
        /// What is wrong with it.
        why: String,
    },
    /// A target that was not set, or not surely.
    #[error("{what} was not set to {target_bytes} bytes: {}", match sent {
        Sent::No => "its target is unchanged",
        Sent::Maybe => "either this target or the previous one is in force",
    })]
    Set {
        /// What was to be set.
        what: String,
        /// To how much.
        target_bytes: u64,
        /// What is in force.
        sent: Sent,
        /// What went wrong.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// Something that could not be asked; nothing was changed, and what was known last stands.
    #[error("{what} cannot be queried; the last known value is kept")]
    Ask {
        /// What was asked.
        what: String,
        /// What went wrong.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The last target is still being set, which ends by itself; nothing was sent.
    #[error("{what} is still being set to {target_bytes} bytes")]
    Busy {
        /// Whose.
        what: String,
        /// To how much.
        target_bytes: u64,
    },
    /// There is nobody to set a VM's own memory by; nothing was sent.
    #[error("VM {0} has neither a monitor nor a balloon: its memory cannot be changed")]
    NoBalloon(VmId),
    /// There is no cache under the VM's disk; nothing was sent.
    #[error("VM {0} has no cache under its disk")]
    NoCache(VmId),
}

impl ActuatorError {
    /// Whether a target may be in force although setting it failed; `None` if the error is not about setting one.
    #[must_use]
    pub fn sent(&self) -> Option<Sent> {
        match self {
            Self::Set { sent, .. } => Some(*sent),
            Self::Ask { .. } => None,
            _ => Some(Sent::No),
        }
    }
}
