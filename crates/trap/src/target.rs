//! What is traced, and whether it can be: the checks before anything is changed in a VM.

use std::path::Path;

use plimsoll_flow::{RamBacking, RamMapping};

use crate::ram::{Presence, RamLayout};
use crate::refusal::Refusal;
use crate::swap;
use crate::sys::AddressRange;

/// A VM as a backend needs it: a process with guest RAM and vCPU threads.
#[derive(Debug, Clone)]
pub struct TraceTarget {
    /// The VM's process.
    pub pid: u32,
    /// Its guest RAM, in the order in which pages are numbered.
    pub ram: Vec<RamMapping>,
    /// Whether the RAM is locked in memory.
    pub locked: bool,
    /// Threads of its vCPUs; empty if unknown, which counts as one vCPU.
    pub vcpu_threads: Vec<u32>,
}

impl TraceTarget {
    /// How its pages are numbered.
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

    /// vCPUs whose time the budget is a share of.
    pub(crate) fn vcpus(&self) -> usize {
        self.vcpu_threads.len().max(1)
    }

    /// Refuses RAM whose accesses cannot be observed: RAM that is not shared, is locked, or may be swapped out. Changes nothing.
    ///
    /// # Errors
    ///
    /// [`Refusal::NoRam`], [`Refusal::NotSharedMemory`], [`Refusal::Locked`] or [`Refusal::SwapOn`].
    pub fn check(&self) -> Result<(), Refusal> {
        let is_shared =
            |backing: &_| matches!(backing, RamBacking::SharedMemfd | RamBacking::SharedTmpfs);
        self.check_backing(is_shared)?;
        if self.locked {
            return Err(Refusal::Locked);
        }
        swap::check(self.pid, Path::new("/"))
    }

    /// Refuses RAM whose writes cannot be recorded; locked RAM and private memory are accepted. Changes nothing.
    ///
    /// # Errors
    ///
    /// [`Refusal::NoRam`] or [`Refusal::NotSharedMemory`].
    pub fn check_for_writes(&self) -> Result<(), Refusal> {
        self.check_backing(|backing| {
            let shared = matches!(backing, RamBacking::SharedMemfd | RamBacking::SharedTmpfs);
            shared || *backing == RamBacking::Private
        })
    }

    fn check_backing(&self, accepted: impl Fn(&RamBacking) -> bool) -> Result<(), Refusal> {
        if self.ram.is_empty() {
            return Err(Refusal::NoRam { pid: self.pid });
        }
        let refused = self.ram.iter().find(|mapping| !accepted(&mapping.backing));
        refused.map_or(Ok(()), |mapping| {
            Err(Refusal::NotSharedMemory {
                backing: mapping.backing.clone(),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(backing: RamBacking) -> TraceTarget {
        let mapping = RamMapping {
            address: 0x7f00_0000_0000,
            len_bytes: 1 << 20,
            file_offset_bytes: 0,
            backing,
        };
        TraceTarget {
            pid: 42,
            ram: vec![mapping],
            locked: false,
            vcpu_threads: vec![],
        }
    }

    #[test]
    fn ram_that_is_not_shared_is_refused_with_the_way_out() {
        let refusal = target(RamBacking::Private).check().unwrap_err();
        let error = format!("{refusal}; {}", refusal.change());
        assert!(error.contains("private memory") && error.contains("memory-backend-memfd"));
        let error = target(RamBacking::HugeTlb).check().unwrap_err().to_string();
        assert!(error.contains("huge pages"), "{error}");
    }

    #[test]
    fn locked_ram_and_no_ram_are_refused() {
        let locked = TraceTarget {
            locked: true,
            ..target(RamBacking::SharedMemfd)
        };
        assert!(matches!(locked.check(), Err(Refusal::Locked)));
        let none = TraceTarget {
            ram: vec![],
            ..target(RamBacking::SharedMemfd)
        };
        assert!(matches!(none.check(), Err(Refusal::NoRam { pid: 42 })));
    }
}
