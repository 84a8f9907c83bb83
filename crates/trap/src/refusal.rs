//! Why a VM cannot be traced in its present state, found before anything is changed in it.
//!
//! A refusal has two parts: one sentence on the obstacle (its `Display`), and one line on what to change
//! ([`Refusal::change`]). `attach` reports both, and an assessment of a VM reports the same.

use std::io;
use std::path::PathBuf;

use plimsoll_flow::RamBacking;

/// Why a VM cannot be traced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum Refusal {
    /// The mapping list is empty.
    #[error("no mapping of guest RAM was found in process {pid}")]
    NoRam { pid: u32 },
    /// Most backends make pages inaccessible, which needs RAM of a kind that other processes do not have.
    #[error("process {pid} is not a VM, and this backend observes only RAM of VMs")]
    NotAVm { pid: u32 },
    /// Most backends observe the address space of a process.
    #[error("{} is a control group, and this backend observes processes one at a time", directory.display())]
    ControlGroup { directory: PathBuf },
    /// A page cache is charged to control groups.
    #[error("process {pid} is not a control group, and this backend observes only those")]
    NoControlGroup { pid: u32 },
    /// Guest RAM without a page cache that keeps its pages.
    #[error("the VM's RAM is {backing}, which cannot be traced from outside")]
    NotSharedMemory {
        /// What the RAM consists of instead.
        backing: RamBacking,
    },
    /// Locked pages stay accessible.
    #[error("the VM's RAM is locked in memory, so its pages cannot be made inaccessible")]
    Locked,
    /// With swap, making a page inaccessible would write it to disk.
    #[error(
        "swap is on ({swap}) and the VM may use it, so its pages would be swapped out instead of trapped"
    )]
    SwapOn {
        /// The swap areas of the host.
        swap: String,
        cgroup: PathBuf,
    },
    /// The kernel was built without it.
    #[error("the kernel does not track idle pages: there is no {missing}")]
    NoIdleTracking { missing: &'static str },
    /// Pages cannot be found in the kernel's lists.
    #[error("the kernel does not list page frames: there is no {missing}")]
    NoFrames { missing: &'static str },
    /// The kernel was built without it.
    #[error("the kernel has no DAMON that can be set up: there is no {missing}")]
    NoDamon { missing: &'static str },
    /// The kernel was built without it, or forbids it.
    #[error("the kernel does not let BPF programs observe its page cache ({source})")]
    NoPageCacheTracing {
        #[source]
        source: io::Error,
    },
    /// Whoever uses it would lose what it measures.
    #[error("DAMON is in use by {by}, which is left alone")]
    DamonInUse { by: String },
    /// Marks have no owner.
    #[error("pages are marked idle by {by}, whose marks and ours could not be told apart")]
    IdleMarksInUse { by: String },
    /// One userfaultfd for each mapping is all the kernel allows.
    #[error(
        "another userfaultfd is registered on the VM's RAM (a post-copy migration, a background snapshot, or another \
         tracer, such as that of plimsolld)"
    )]
    UserfaultInUse,
    /// The process belongs to a container or sandbox, whose user is not this host's.
    #[error(
        "process {pid} is in a user namespace of its own, and attaching lends it, for about a millisecond, a descriptor \
         that the kernel withholds from such processes"
    )]
    ForeignUserNamespace { pid: u32 },
    /// A filter of system calls that may end the process for the calls by which a tracer attaches.
    #[error(
        "process {pid} has a seccomp filter that could end it for the system calls by which a tracer attaches"
    )]
    SeccompFilter { pid: u32 },
    /// A program in whose mode system calls have other numbers.
    #[error("process {pid} runs a 32-bit program, in which a tracer makes no system calls")]
    NarrowProgram { pid: u32 },
    /// No system call can be made in another process on this processor.
    #[error("attaching makes system calls in the process, which is supported on x86-64 only")]
    NoInjection,
    /// The kernel allows one tracer of a process.
    #[error(
        "process {pid} is traced by process {tracer} ({program}), and the kernel allows one tracer of a process"
    )]
    Debugged {
        pid: u32,
        tracer: u32,
        /// The name of that process.
        program: String,
    },
    /// The process is frozen by its control group.
    #[error(
        "process {pid} is frozen by its control group, as that of a paused container, and no call in it returns"
    )]
    Frozen { pid: u32 },
    /// Neither the tracer may open the userfaultfd device, nor the process a userfaultfd.
    #[error(
        "/dev/userfaultfd cannot be opened ({source}), nor may process {pid} call userfaultfd() itself"
    )]
    NoUserfaultfd {
        pid: u32,
        #[source]
        source: io::Error,
    },
    /// The descriptor lent to the process did not arrive.
    #[error(
        "process {pid} cannot receive a descriptor of /dev/userfaultfd: a security module (AppArmor, SELinux) withholds it, \
         or the process has too many files open"
    )]
    DescriptorWithheld { pid: u32 },
    /// A migration or a snapshot, which may need a userfaultfd itself and reads all memory.
    #[error("QEMU may need the VM's memory for itself: {why}")]
    MemoryTransfer {
        /// What QEMU does with it.
        why: String,
    },
    /// The kernel did not let us.
    #[error("no privilege to {what} ({source})")]
    NoPrivilege {
        what: String,
        #[source]
        source: io::Error,
    },
    /// The same of files that show all of the host's memory, or change how the kernel watches it.
    #[error("no privilege to {what} ({source})")]
    NoAdmin {
        what: String,
        #[source]
        source: io::Error,
    },
    /// A part of the interface is missing.
    #[error("the kernel has no {missing} ({source})")]
    KernelTooOld {
        missing: &'static str,
        #[source]
        source: io::Error,
    },
}

impl Refusal {
    /// What a failed use of a part of the kernel's interface means.
    pub(crate) fn of_missing(missing: &'static str, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::NoPrivilege {
                what: format!("use {missing}"),
                source,
            },
            _ => Self::KernelTooOld { missing, source },
        }
    }

    /// What to change so that the VM can be traced, in one line.
    pub fn change(&self) -> String {
        match self {
            Self::NoRam { .. } => "start it with '-m SIZE', or wait until it has started".to_owned(),
            Self::NotAVm { .. } => {
                "use --backend rwp, idle or damon, where the kernel has them, or write-scan"
                    .to_owned()
            }
            Self::ControlGroup { .. } => {
                "use --backend idle, damon or page-cache, where the kernel has them, or trace a process of the group".to_owned()
            }
            Self::NoControlGroup { .. } => "name its control group (cgroup:PATH), or use another backend".to_owned(),
            Self::NotSharedMemory { .. } => {
                "start it with '-object memory-backend-memfd,id=ram,size=SIZE,share=on -machine memory-backend=ram' \
                 (libvirt: <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>)"
                    .to_owned()
            }
            Self::Locked => {
                "start it without '-overcommit mem-lock=on' (libvirt: without <locked/>)".to_owned()
            }
            Self::SwapOn { cgroup, .. } => format!(
                "set memory.swap.max to 0 in {} or turn swap off",
                cgroup.display()
            ),
            Self::NoIdleTracking { .. } => {
                "boot a kernel with CONFIG_IDLE_PAGE_TRACKING, or use --backend damon where nobody else uses DAMON".to_owned()
            }
            Self::NoFrames { .. } => {
                "boot a kernel with CONFIG_PROC_PAGE_MONITOR, and for control groups with CONFIG_MEMCG"
                    .to_owned()
            }
            Self::NoDamon { .. } => {
                "boot a kernel with CONFIG_DAMON_SYSFS, CONFIG_DAMON_VADDR and CONFIG_DAMON_PADDR (Linux 6.2 or later)"
                    .to_owned()
            }
            Self::NoPageCacheTracing { .. } => {
                "run as root (CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN) on Linux 6.1 or later with CONFIG_DEBUG_INFO_BTF and \
                 CONFIG_FUNCTION_TRACER, or use another backend"
                    .to_owned()
            }
            Self::DamonInUse { .. } => {
                "end that (for kdamonds of others: write off to their state, and 0 to \
                 /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds), or use another backend"
                    .to_owned()
            }
            Self::UserfaultInUse | Self::IdleMarksInUse { .. } => {
                "wait for it to end; tracers of plimsolld end by 'systemctl stop plimsolld'".to_owned()
            }
            Self::ForeignUserNamespace { .. } => {
                "add --allow-namespaced (for plimsolld, allow_namespaced = true in a [[vm]] rule), or use --backend scan (VMs), idle or \
                 damon, which lend it nothing"
                    .to_owned()
            }
            Self::SeccompFilter { .. } => {
                "use --backend scan (VMs), idle or damon, which make no calls in it, or run 'plimsoll attach' as root of the host \
                 outside of the daemon's unit, where the filter can be suspended"
                    .to_owned()
            }
            Self::NarrowProgram { .. } | Self::NoInjection => {
                "use --backend scan or sample (VMs), idle or damon, which make no calls in it".to_owned()
            }
            Self::Debugged { tracer, .. } => {
                format!("detach the debugger or end process {tracer}")
            }
            Self::Frozen { .. } => {
                "thaw it (docker unpause, podman unpause, systemctl thaw), or use --backend idle or damon, where the kernel has them"
                    .to_owned()
            }
            Self::NoUserfaultfd { .. } => {
                "run as root of the host, or let this user open /dev/userfaultfd for reading and writing".to_owned()
            }
            Self::DescriptorWithheld { .. } => {
                "allow '/dev/userfaultfd rw' in its profile, raise its limit of open files, or use --backend scan, which lends \
                 it nothing"
                    .to_owned()
            }
            Self::MemoryTransfer { .. } => {
                "wait until the VM runs here, and nothing else is done with its memory".to_owned()
            }
            Self::NoPrivilege { .. } => {
                "run as root of the host, or with CAP_SYS_PTRACE, CAP_SYS_NICE and CAP_CHECKPOINT_RESTORE there; if root is refused, allow it in \
                 SELinux's policy (ausearch -m avc), or use --backend scan (VMs)"
                    .to_owned()
            }
            Self::NoAdmin { .. } => {
                "run as root with CAP_SYS_ADMIN and a writable /sys/kernel/mm (the unit of plimsolld withholds both; \
                 docs/configuration.md has a drop-in), or use another backend"
                    .to_owned()
            }
            Self::KernelTooOld { .. } => {
                "boot a kernel that has it, or use another backend (most need Linux 6.1 or later with CONFIG_USERFAULTFD)"
                    .to_owned()
            }
        }
    }

    /// A short name that programs can compare.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::NoRam { .. } => "no-ram",
            Self::NotAVm { .. } => "not-a-vm",
            Self::ControlGroup { .. } => "control-group",
            Self::NoControlGroup { .. } => "not-a-control-group",
            Self::NotSharedMemory { .. } => "not-shared-memory",
            Self::Locked => "locked",
            Self::SwapOn { .. } => "swap-on",
            Self::NoIdleTracking { .. } => "no-idle-tracking",
            Self::NoFrames { .. } => "no-frames",
            Self::NoDamon { .. } => "no-damon",
            Self::NoPageCacheTracing { .. } => "no-page-cache-tracing",
            Self::DamonInUse { .. } => "damon-in-use",
            Self::IdleMarksInUse { .. } => "idle-marks-in-use",
            Self::UserfaultInUse => "userfault-in-use",
            Self::ForeignUserNamespace { .. } => "foreign-user-namespace",
            Self::SeccompFilter { .. } => "seccomp-filter",
            Self::NarrowProgram { .. } => "32-bit-program",
            Self::NoInjection => "no-injection",
            Self::Debugged { .. } => "debugged",
            Self::Frozen { .. } => "frozen",
            Self::NoUserfaultfd { .. } => "no-userfaultfd",
            Self::DescriptorWithheld { .. } => "descriptor-withheld",
            Self::MemoryTransfer { .. } => "memory-transfer",
            Self::NoPrivilege { .. } => "no-privilege",
            Self::NoAdmin { .. } => "no-admin",
            Self::KernelTooOld { .. } => "kernel-too-old",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_waits_to_be_started_is_not_said_to_migrate() {
        let why = "it has not been started yet".to_owned();
        let text = Refusal::MemoryTransfer { why }.to_string();
        assert!(!text.contains("migrating"), "{text}");
    }

    #[test]
    fn a_refusal_is_one_sentence_and_one_line_on_what_to_change() {
        let denied = || io::Error::from_raw_os_error(libc::EPERM);
        let refusals = [
            Refusal::NoRam { pid: 42 },
            Refusal::NotSharedMemory {
                backing: RamBacking::Private,
            },
            Refusal::NotAVm { pid: 42 },
            Refusal::ControlGroup {
                directory: "/sys/fs/cgroup/web".into(),
            },
            Refusal::NoControlGroup { pid: 42 },
            Refusal::Locked,
            Refusal::SwapOn {
                swap: "/dev/sda2".to_owned(),
                cgroup: "/sys/fs/cgroup/web".into(),
            },
            Refusal::NoIdleTracking {
                missing: "/sys/kernel/mm/page_idle/bitmap",
            },
            Refusal::NoFrames {
                missing: "/proc/kpageflags",
            },
            Refusal::NoPageCacheTracing { source: denied() },
            Refusal::NoDamon {
                missing: "/sys/kernel/mm/damon/admin/kdamonds",
            },
            Refusal::DamonInUse {
                by: "kdamond.0 (process 77), of 1 that others have set up".to_owned(),
            },
            Refusal::IdleMarksInUse {
                by: "process 77 (marker)".to_owned(),
            },
            Refusal::UserfaultInUse,
            Refusal::ForeignUserNamespace { pid: 42 },
            Refusal::SeccompFilter { pid: 42 },
            Refusal::NarrowProgram { pid: 42 },
            Refusal::NoInjection,
            Refusal::Debugged {
                pid: 42,
                tracer: 77,
                program: "gdb".to_owned(),
            },
            Refusal::Frozen { pid: 42 },
            Refusal::MemoryTransfer {
                why: "it is being saved".to_owned(),
            },
            Refusal::NoPrivilege {
                what: "try".to_owned(),
                source: denied(),
            },
            Refusal::NoAdmin {
                what: "use DAMON".to_owned(),
                source: denied(),
            },
            Refusal::KernelTooOld {
                missing: "userfaultfd",
                source: denied(),
            },
        ];
        let mut names = Vec::new();
        for refusal in &refusals {
            for text in [refusal.to_string(), refusal.change()] {
                assert!(
                    !text.contains('\n') && !text.contains("  ") && !text.ends_with('.'),
                    "{text}"
                );
            }
            names.push(refusal.name());
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), refusals.len());
    }
}
