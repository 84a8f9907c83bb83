//! Why tracing a VM was refused or ended. Each variant says what to do and what the VM is left with.

use std::io;
use std::path::PathBuf;

use plimsoll_flow::RamBacking;

/// Why a VM could not be traced, or no longer. Whatever it says, the VM runs on
/// with its memory as it was: a tracer that gives up takes its traps with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrapError {
    /// The mapping list is empty.
    #[error("no mapping of guest RAM was found in process {pid}; nothing was changed in it")]
    NoRam {
        /// Process of the VM.
        pid: u32,
    },
    /// Guest RAM that no page cache stands behind.
    #[error(
        "the VM's RAM is {backing}, which cannot be traced from outside; start it with \
         '-object memory-backend-memfd,id=ram,size=SIZE,share=on -machine memory-backend=ram' \
         (libvirt: <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>); \
         nothing was changed in it"
    )]
    NotSharedMemory {
        /// What stands behind the RAM instead.
        backing: RamBacking,
    },
    /// Locked pages stay accessible.
    #[error(
        "the VM's RAM is locked in memory, so its pages cannot be made inaccessible; start it \
         without '-overcommit mem-lock=on' (libvirt: without <locked/>); nothing was changed in it"
    )]
    Locked,
    /// With swap, making a page inaccessible would write it to disk.
    #[error(
        "swap is on ({swap}) and the VM may use it, so its pages would be swapped out instead of \
         trapped; set memory.swap.max to 0 in {cgroup} or turn swap off; nothing was changed in it"
    )]
    SwapOn {
        /// The swap areas of the host.
        swap: String,
        /// Control group of the VM.
        cgroup: PathBuf,
    },
    /// One userfaultfd for each mapping is all the kernel allows.
    #[error(
        "another userfaultfd is registered on the VM's RAM (a post-copy migration, a background snapshot \
         or another tracer); wait for it to end; nothing was changed in the VM"
    )]
    UserfaultInUse,
    /// The kernel did not let us.
    #[error(
        "no privilege to {what}; run as root or with CAP_SYS_PTRACE, CAP_SYS_NICE and \
         CAP_CHECKPOINT_RESTORE; nothing was changed in the VM"
    )]
    NoPrivilege {
        /// What was refused.
        what: String,
        /// How the kernel said no.
        #[source]
        source: io::Error,
    },
    /// A part of the interface is missing.
    #[error(
        "the kernel has no {missing}: tracing needs Linux 6.1 or later with CONFIG_USERFAULTFD; \
         nothing was changed in the VM"
    )]
    KernelTooOld {
        /// What is missing.
        missing: &'static str,
        /// How the kernel said so.
        #[source]
        source: io::Error,
    },
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
    VmGone {
        /// Process of the VM.
        pid: u32,
    },
    /// The kind of a setting does not matter here: its value does.
    #[error("{setting} of {value} is outside {accepted}; nothing was changed in the VM")]
    Setting {
        /// Name of the setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        accepted: &'static str,
    },
    /// The call could not be put into the VM's process. Its thread was set back.
    #[error(
        "cannot inject userfaultfd() into process {pid}: {step} failed; its thread continues unchanged"
    )]
    Injection {
        /// Process of the VM.
        pid: u32,
        /// The step that failed.
        step: String,
        /// How.
        #[source]
        source: io::Error,
    },
    /// A call failed that should not have. The traps are removed when the tracer is dropped.
    #[error("{call} failed while tracing process {pid}; the traps are removed")]
    Call {
        /// Process of the VM.
        pid: u32,
        /// The call that failed.
        call: &'static str,
        /// How.
        #[source]
        source: io::Error,
    },
}
