//! The requirements of a backend on a VM and on the caller, each with its check.
//!
//! The checks only read files under `/proc`, and open descriptors that are closed again.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

use plimsoll_flow::RamBacking;

use crate::claim::Claim;
use crate::config::TraceConfig;
use crate::frames::{check_frames, check_tracking};
use crate::frozen;
use crate::inject::{assess_injection, check_userfaultfd, open_pidfd};
use crate::kdamond::{Operations, check_damon};
use crate::ram::PopulatedPages;
use crate::refusal::Refusal;
use crate::sys::{self, UserfaultPurpose};
use crate::target::TraceTarget;

/// A property that VM or caller must have so that a backend can attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    /// All RAM is shared memory.
    SharedRam,
    /// All RAM is shared or private memory, not huge pages or a file.
    SmallPages,
    /// Any memory but huge pages of hugetlbfs.
    Memory,
    /// A kernel that tracks idle pages, for this caller.
    IdleTracking,
    /// A kernel with a DAMON that can watch processes and that nobody uses, for this caller.
    Damon,
    /// A control group, which a process is not.
    ControlGroup,
    /// RAM that is not locked.
    Unlocked,
    /// A VM that may not swap.
    NoSwap,
    /// The right to list the VM's pages and to make them inaccessible.
    PageAccess,
    /// A kernel with asynchronous read-write protection.
    AccessProtection,
    /// RAM on which no userfaultfd is registered, nor will be by another tracer.
    NoUserfault,
    /// A process that can be made to open a userfaultfd, and the right to do so.
    Injection,
}

impl Requirement {
    /// What every backend needs whose pages trap.
    pub const OF_TRAPS: &[Self] = &[
        Self::SharedRam,
        Self::Unlocked,
        Self::NoSwap,
        Self::PageAccess,
        Self::NoUserfault,
        Self::Injection,
    ];

    /// Refuses a VM that does not have it. Changes nothing in the VM.
    pub fn check(self, target: &TraceTarget, config: &TraceConfig) -> Result<(), Refusal> {
        let pid = target.pid;
        match self {
            Self::SharedRam => check_backing(target, is_shared),
            Self::SmallPages => {
                let is_small = |backing: &_| is_shared(backing) || *backing == RamBacking::Private;
                check_backing(target, is_small)
            }
            Self::Memory => check_backing(target, |backing| *backing != RamBacking::HugeTlb),
            Self::IdleTracking => check_tracking(),
            Self::Damon => check_damon(Operations::Process).and_then(|()| check_frames()),
            Self::ControlGroup => Err(Refusal::NoControlGroup { pid }),
            Self::Unlocked if target.locked => Err(Refusal::Locked),
            Self::NoSwap => target.check_swap(),
            // Other RAM has no pages of a file to list, and is refused for that.
            Self::PageAccess if check_backing(target, is_shared).is_ok() => {
                check_page_access(target)
            }
            Self::AccessProtection => check_access_protection(),
            Self::NoUserfault if target.userfault => Err(Refusal::UserfaultInUse),
            // One that cannot be claimed for want of privilege is refused for that.
            Self::NoUserfault => match Claim::take(pid) {
                Err(Refusal::UserfaultInUse) => Err(Refusal::UserfaultInUse),
                _ => Ok(()),
            },
            Self::Injection => {
                assess_injection(pid, config.allow_namespaced)?;
                check_debugger(pid)?;
                frozen::check(pid, Path::new("/"))?;
                check_memory_access(pid)?;
                check_userfaultfd(pid)
            }
            Self::Unlocked | Self::PageAccess => Ok(()),
        }
    }
}

fn is_shared(backing: &RamBacking) -> bool {
    matches!(backing, RamBacking::SharedMemfd | RamBacking::SharedTmpfs)
}

fn check_backing(
    target: &TraceTarget,
    is_accepted: impl Fn(&RamBacking) -> bool,
) -> Result<(), Refusal> {
    if target.ram.is_empty() {
        return Err(Refusal::NoRam { pid: target.pid });
    }
    let mut backings = target.ram.iter().map(|mapping| &mapping.backing);
    match backings.find(|backing| !is_accepted(backing)) {
        None => Ok(()),
        Some(backing) => Err(Refusal::NotSharedMemory {
            backing: backing.clone(),
        }),
    }
}

/// Opens the files that list and show the VM's pages, and makes none of the pages inaccessible.
fn check_page_access(target: &TraceTarget) -> Result<(), Refusal> {
    target.populated()?;
    target.presence()?;
    // The kernel checks the privilege before it reads the list of ranges, which is empty.
    let pidfd = open_pidfd(target.pid);
    // A process that has ended is reported as that on attaching.
    let tried = pidfd.map_or(Ok(0), |pidfd| sys::process_pageout(pidfd.as_fd(), &[]));
    tried.map(drop).map_err(|source| {
        let missing = "process_madvise(MADV_PAGEOUT) of another process";
        Refusal::of_missing(missing, source)
    })
}

/// Negotiates for memory of our own, and registers none.
fn check_access_protection() -> Result<(), Refusal> {
    let purpose = UserfaultPurpose::AsyncAccessProtect;
    let offered = sys::userfaultfd().and_then(|fd| sys::uffd_api(fd.as_fd(), purpose));
    offered.map_err(|source| Refusal::of_missing(purpose.kernel_feature(), source))
}

/// Refuses a process that another one traces: the kernel allows one tracer.
fn check_debugger(pid: u32) -> Result<(), Refusal> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let Some(tracer) = tracer_of(&status) else {
        return Ok(());
    };
    let program = fs::read_to_string(format!("/proc/{tracer}/comm")).unwrap_or_default();
    // The name is the process's own choice.
    let program = program.trim_end().escape_debug().to_string();
    Err(Refusal::Debugged {
        pid,
        tracer,
        program,
    })
}

/// The process that traces another one, from the text of its `/proc/PID/status`.
fn tracer_of(status: &str) -> Option<u32> {
    let tracer = status
        .lines()
        .find_map(|line| line.strip_prefix("TracerPid:"))?;
    tracer.trim().parse().ok().filter(|&tracer| tracer != 0)
}

/// Opens the process's memory, for which the kernel requires the same right as for attaching to it.
fn check_memory_access(pid: u32) -> Result<(), Refusal> {
    let opened = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/mem"));
    match opened {
        Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
            Err(Refusal::NoPrivilege {
                what: format!("trace process {pid} (opening its memory)"),
                source,
            })
        }
        // One that has ended is reported as that on attaching.
        _ => Ok(()),
    }
}

impl TraceTarget {
    /// Opens the files behind its RAM.
    pub(crate) fn populated(&self) -> Result<PopulatedPages, Refusal> {
        let pid = self.pid;
        PopulatedPages::open(pid, &self.layout(), &self.ram).map_err(|source| {
            Refusal::NoPrivilege {
                what: format!("read /proc/{pid}/map_files"),
                source,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;

    use plimsoll_flow::RamMapping;

    use super::*;

    #[test]
    fn ram_that_is_not_shared_is_refused_with_the_way_to_share_it() {
        let target = |backing| TraceTarget {
            pid: 42,
            is_vm: true,
            ram: vec![RamMapping {
                address: 0x7f00_0000_0000,
                len_bytes: 1 << 20,
                file_offset_bytes: 0,
                backing,
            }],
            locked: false,
            userfault: false,
            vcpu_threads: vec![],
        };
        let private = check_backing(&target(RamBacking::Private), is_shared).unwrap_err();
        assert!(private.to_string().contains("private memory"), "{private}");
        assert!(private.change().contains("memory-backend-memfd"));
        let huge = check_backing(&target(RamBacking::HugeTlb), is_shared).unwrap_err();
        assert!(huge.to_string().contains("huge pages"), "{huge}");
    }

    #[test]
    fn the_tracer_of_a_process_is_read_from_its_status() {
        assert_eq!(tracer_of("Name:\tqemu\nTracerPid:\t0\nUid:\t0\n"), None);
        assert_eq!(tracer_of("Name:\tqemu\nTracerPid:\t77\n"), Some(77));
        for text in [
            "",
            "TracerPid:",
            "TracerPid:\t-1",
            "TracerPid:\t99999999999",
        ] {
            assert_eq!(tracer_of(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_process_that_another_one_traces_is_refused_with_the_tracers_name() {
        // strace is one; where it is not installed, the status file's text alone is tested.
        let Ok(mut strace) = Command::new("strace")
            .args(["-qq", "-e", "trace=none", "sleep", "30"])
            .process_group(0)
            .spawn()
        else {
            plimsoll_skip::skip(plimsoll_skip::Lack::Program, "strace is not installed");
            return;
        };
        let children = format!("/proc/{0}/task/{0}/children", strace.id());
        let refusal = (0..500).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            let child = fs::read_to_string(&children).ok()?.trim().parse().ok()?;
            check_debugger(child).err()
        });
        let group = rustix::process::Pid::from_child(&strace);
        rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
        strace.wait().unwrap();
        let refusal = refusal.expect("a refusal").to_string();
        assert!(refusal.contains("strace"), "{refusal}");
    }
}
