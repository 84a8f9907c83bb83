//! The target of tracing: the process of a VM with its RAM and vCPU threads, any other process with its memory, or a control
//! group.

use std::path::{Path, PathBuf};
use std::{fs, io};

use plimsoll_flow::RamMapping;

use crate::ram::{Presence, RamLayout};
use crate::refusal::Refusal;
use crate::swap;
use crate::sys::AddressRange;

/// A VM as a backend needs it: a process with guest RAM and vCPU threads; or another process with its memory.
#[derive(Debug, Clone)]
pub struct TraceTarget {
    /// The process.
    pub pid: u32,
    /// Whether it runs a VM.
    pub is_vm: bool,
    /// Its guest RAM, in the order in which pages are numbered; the memory of another process.
    pub ram: Vec<RamMapping>,
    /// Whether the RAM is locked in memory.
    pub locked: bool,
    /// Whether a userfaultfd is registered on some of the RAM.
    pub userfault: bool,
    /// Threads of its vCPUs; empty if unknown, which counts as one vCPU.
    pub vcpu_threads: Vec<u32>,
}

/// A control group as a backend needs it: the memory that is charged to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupTarget {
    /// Its directory.
    pub directory: PathBuf,
    /// Inodes of the directories of the group and of those below it, ascending, by which the kernel names the group of a
    /// page.
    pub inodes: Vec<u64>,
}

#[cfg(test)]
impl crate::sys::SharedMemory {
    /// The memory described as the RAM of a VM, which is this process.
    pub(crate) fn as_target(&self) -> TraceTarget {
        let AddressRange { start, len_bytes } = self.range();
        TraceTarget {
            pid: std::process::id(),
            is_vm: true,
            ram: vec![RamMapping {
                address: start,
                len_bytes,
                file_offset_bytes: 0,
                backing: plimsoll_flow::RamBacking::SharedMemfd,
            }],
            locked: false,
            userfault: false,
            vcpu_threads: vec![],
        }
    }
}

impl TraceTarget {
    /// The numbering of its pages.
    pub(crate) fn layout(&self) -> RamLayout {
        RamLayout::new(self.ram.iter().map(|mapping| AddressRange {
            start: mapping.address,
            len_bytes: mapping.len_bytes,
        }))
    }

    /// Opens its pagemap.
    pub(crate) fn presence(&self) -> Result<Presence, Refusal> {
        let pid = self.pid;
        Presence::open(pid).map_err(|source| Refusal::NoPrivilege {
            what: format!("read /proc/{pid}/pagemap"),
            source,
        })
    }

    /// Number of vCPUs of whose time the budget is a share.
    pub(crate) fn vcpus(&self) -> usize {
        self.vcpu_threads.len().max(1)
    }

    /// Threads of which the busy ones run the guest: the vCPUs, or where those are unknown, all of the process.
    pub(crate) fn busy_threads(&self) -> Vec<u32> {
        if !self.vcpu_threads.is_empty() {
            return self.vcpu_threads.clone();
        }
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid));
        let tasks = tasks.into_iter().flatten();
        let number = |task: io::Result<fs::DirEntry>| task.ok()?.file_name().to_str()?.parse().ok();
        tasks.filter_map(number).collect()
    }

    /// Refuses a VM that may swap.
    pub(crate) fn check_swap(&self) -> Result<(), Refusal> {
        swap::check(self.pid, Path::new("/"))
    }
}
