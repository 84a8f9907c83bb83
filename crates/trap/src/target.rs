//! What is traced, and whether it can be: the checks before anything is changed in a VM.

use std::fs;
use std::path::{Path, PathBuf};

use plimsoll_flow::{RamBacking, RamMapping};

use crate::error::TrapError;
use crate::ram::{Presence, RamLayout};
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
    pub(crate) fn presence(&self) -> Result<Presence, TrapError> {
        let pid = self.pid;
        Presence::open(pid).map_err(|source| TrapError::NoPrivilege {
            what: format!("read /proc/{pid}/pagemap"),
            source,
        })
    }

    /// vCPUs whose time the budget is a share of.
    pub(crate) fn vcpus(&self) -> usize {
        self.vcpu_threads.len().max(1)
    }

    /// Refuses what cannot be traced, without touching it.
    pub(crate) fn check(&self) -> Result<(), TrapError> {
        let is_shared =
            |backing: &_| matches!(backing, RamBacking::SharedMemfd | RamBacking::SharedTmpfs);
        self.check_backing(is_shared)?;
        if self.locked {
            return Err(TrapError::Locked);
        }
        self.check_swap(Path::new("/"))
    }

    /// Refuses RAM whose writes cannot be recorded; locked RAM and private memory are accepted.
    pub(crate) fn check_for_writes(&self) -> Result<(), TrapError> {
        self.check_backing(|backing| {
            let shared = matches!(backing, RamBacking::SharedMemfd | RamBacking::SharedTmpfs);
            shared || *backing == RamBacking::Private
        })
    }

    fn check_backing(&self, accepted: impl Fn(&RamBacking) -> bool) -> Result<(), TrapError> {
        if self.ram.is_empty() {
            return Err(TrapError::NoRam { pid: self.pid });
        }
        let refused = self.ram.iter().find(|mapping| !accepted(&mapping.backing));
        refused.map_or(Ok(()), |mapping| {
            Err(TrapError::NotSharedMemory {
                backing: mapping.backing.clone(),
            })
        })
    }

    /// Refuses a VM that may swap; proc and sys are read under `root`.
    fn check_swap(&self, root: &Path) -> Result<(), TrapError> {
        // Without the file the kernel has no swap.
        let swaps = fs::read_to_string(root.join("proc/swaps")).unwrap_or_default();
        let areas: Vec<&str> = swaps
            .lines()
            .skip(1)
            .filter_map(|line| line.split_ascii_whitespace().next())
            .collect();
        if areas.is_empty() {
            return Ok(());
        }
        let groups =
            fs::read_to_string(root.join(format!("proc/{}/cgroup", self.pid))).unwrap_or_default();
        let group = groups
            .lines()
            .find_map(|line| line.strip_prefix("0::/"))
            .unwrap_or_default();
        let cgroup = PathBuf::from("sys/fs/cgroup").join(group);
        // Swap may be forbidden to the group itself or to any above it.
        let forbidden = cgroup.ancestors().any(|group| {
            fs::read_to_string(root.join(group).join("memory.swap.max"))
                .is_ok_and(|limit| limit.trim() == "0")
        });
        if forbidden {
            return Ok(());
        }
        Err(TrapError::SwapOn {
            swap: areas.join(", "),
            cgroup: Path::new("/").join(cgroup),
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
        let error = target(RamBacking::Private).check().unwrap_err().to_string();
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
        assert!(matches!(locked.check(), Err(TrapError::Locked)));
        let none = TraceTarget {
            ram: vec![],
            ..target(RamBacking::SharedMemfd)
        };
        assert!(matches!(none.check(), Err(TrapError::NoRam { pid: 42 })));
    }

    /// A host with swap whose VM lies in the control group `vms/web`.
    fn host_with_swap(limit_of_vms: Option<&str>) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(
            "proc/swaps",
            "Filename Type Size Used Priority\n/dev/sda2 partition 4194300 0 -2\n",
        );
        write("proc/42/cgroup", "0::/vms/web\n");
        write("sys/fs/cgroup/vms/web/memory.swap.max", "max\n");
        if let Some(limit) = limit_of_vms {
            write("sys/fs/cgroup/vms/memory.swap.max", limit);
        }
        root
    }

    #[test]
    fn swap_is_refused_unless_the_vms_group_may_not_use_it() {
        let vm = target(RamBacking::SharedMemfd);
        let error = vm
            .check_swap(host_with_swap(None).path())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/dev/sda2") && error.contains("/sys/fs/cgroup/vms/web"),
            "{error}"
        );
        assert!(vm.check_swap(host_with_swap(Some("0\n")).path()).is_ok());
        assert!(vm.check_swap(tempfile::tempdir().unwrap().path()).is_ok());
    }
}
