//! Why tracing a VM was refused or ended. Each variant states what to do and the resulting state of the VM.

use std::io;
use std::path::PathBuf;

use crate::refusal::Refusal;
use crate::stopped::CALL_MAX;

/// Why a VM could not be traced, or no longer. In every case the VM continues to run
/// with its memory unchanged: a tracer that ends removes its traps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum TrapError {
    /// The VM cannot be traced as it is.
    #[error("{0}; {change}; nothing was changed", change = .0.change())]
    Refused(Refusal),
    /// No backend for such targets can trace it, each for its reasons.
    #[error(
        "no backend can: {0}; 'plimsoll doctor TARGET' shows what to change; nothing was changed"
    )]
    NoneCan(String),
    /// While it was traced, the VM changed so that it cannot be traced.
    #[error("tracing was ended, because {0}; {change}; the traps were removed", change = .0.change())]
    Interrupted(Refusal),
    /// Pages were made inaccessible and stayed accessible.
    #[error(
        "{accessible} of {tried} pages stayed accessible: another process has mapped the VM's RAM \
         (a vhost-user daemon), or its pages are pinned (device assignment); the traps were removed"
    )]
    StayedAccessible {
        /// Pages that were to be made inaccessible.
        tried: u64,
        /// Those of them that stayed accessible.
        accessible: u64,
    },
    /// The VM's process is gone, on its own account.
    #[error("the VM ended: its process {pid} is gone")]
    VmGone { pid: u32 },
    /// A process that is no VM is gone.
    #[error("process {pid} has ended")]
    ProcessGone { pid: u32 },
    /// A control group was removed.
    #[error("control group {} was removed", directory.display())]
    GroupGone { directory: PathBuf },
    /// RAM was plugged or unplugged. Nothing is traced until the tracer attaches again.
    #[error("the RAM of process {pid} changed while it was traced; the traps were removed")]
    RamChanged { pid: u32 },
    /// A setting is out of range.
    #[error("{setting} of {value} is outside {accepted}; nothing was changed")]
    Setting {
        setting: &'static str,
        value: String,
        accepted: &'static str,
    },
    /// The call could not be injected into the VM's process. Its thread was restored.
    #[error(
        "cannot inject userfaultfd() into process {pid}: {step} failed; its thread continues unchanged"
    )]
    Injection {
        pid: u32,
        step: String,
        #[source]
        source: io::Error,
    },
    /// The process delays an injected call: another thread of it has exchanged what the call works on, for a file that
    /// it serves itself. The call was interrupted and the thread restored.
    #[error(
        "process {pid} delays {step}, which was injected into it, for more than {} s; \
         its thread continues unchanged",
        CALL_MAX.as_secs()
    )]
    InjectionDelayed { pid: u32, step: String },
    /// As [`TrapError::InjectionDelayed`], by a call that cannot be interrupted.
    #[error(
        "process {pid} delays {step}, which was injected into it, and the call cannot be interrupted; \
         when it returns, process {keeper}, which must not be ended, lets its thread continue unchanged"
    )]
    InjectionHeld {
        pid: u32,
        step: String,
        /// The process that waits for it.
        keeper: u32,
    },
    /// A call failed that should not have. The traps are removed when the tracer is dropped.
    #[error("{call} failed while tracing process {pid}; the traps are removed")]
    Call {
        pid: u32,
        call: &'static str,
        #[source]
        source: io::Error,
    },
    /// The same, of a control group, in which nothing is changed.
    #[error("{call} failed while tracing control group '{}'", directory.display())]
    GroupCall {
        directory: PathBuf,
        call: &'static str,
        #[source]
        source: io::Error,
    },
}

impl From<Refusal> for TrapError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}
