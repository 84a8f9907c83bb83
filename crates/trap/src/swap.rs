//! Whether a VM may swap, now and while it is traced.
//!
//! Making a page inaccessible with swap on would write it to disk. So a VM that may swap is not traced, and tracing
//! ends as soon as it may. The kernel marks an open `/proc/swaps` as changed when swap is turned on or off; a check of
//! that mark costs one poll(2), so each call that makes pages inaccessible can begin with it. The limits of the control
//! groups are read once a period.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::refusal::Refusal;

const SWAPS: &str = "/proc/swaps";

/// Detects that a VM may swap that could not before.
#[derive(Debug)]
pub struct SwapWatch {
    pid: u32,
    /// `None` where the kernel has no swap.
    swaps: Option<File>,
}

impl SwapWatch {
    /// Watches the VM that is process `pid`, from now on.
    pub fn new(pid: u32) -> Self {
        Self {
            pid,
            swaps: File::open(SWAPS).ok(),
        }
    }

    /// Refuses the VM if swap was turned on since the last call and the VM may use it.
    pub fn check_if_changed(&mut self) -> Result<(), Refusal> {
        match &self.swaps {
            Some(swaps) if has_changed(swaps) => self.check(),
            _ => Ok(()),
        }
    }

    /// Refuses the VM if it may swap.
    pub fn check(&self) -> Result<(), Refusal> {
        check(self.pid, Path::new("/"))
    }
}

/// Whether the list of swap areas has changed since the last check of the same file; an error counts as a change.
fn has_changed(swaps: &File) -> bool {
    let swaps = swaps.as_fd();
    let mut fds = [PollFd::new(&swaps, PollFlags::PRI)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    match poll(&mut fds, Some(&now)) {
        Ok(_) => fds[0].revents().contains(PollFlags::PRI),
        Err(rustix::io::Errno::INTR) => false,
        Err(_) => true,
    }
}

/// Refuses a VM that may swap; proc and sys are read under `root`.
pub fn check(pid: u32, root: &Path) -> Result<(), Refusal> {
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
    let groups = fs::read_to_string(root.join(format!("proc/{pid}/cgroup"))).unwrap_or_default();
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
    Err(Refusal::SwapOn {
        swap: areas.join(", "),
        cgroup: Path::new("/").join(cgroup),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let refused = check(42, host_with_swap(None).path()).unwrap_err();
        let error = format!("{refused}; {}", refused.change());
        assert!(
            error.contains("/dev/sda2") && error.contains("/sys/fs/cgroup/vms/web"),
            "{error}"
        );
        assert!(check(42, host_with_swap(Some("0\n")).path()).is_ok());
        assert!(check(42, tempfile::tempdir().unwrap().path()).is_ok());
    }
}
