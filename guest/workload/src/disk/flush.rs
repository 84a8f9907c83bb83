//! Empties the page cache in one go, in the two ways there are: by the administrator's switch, which gives up clean pages
//! while memory is free, and by reclaim, as if others needed the memory.
//!
//! Reclaim is that of a control group, because that of the whole machine needs memory pressure, and how much of the
//! page cache it takes is then left to chance. So the workload's process is moved into a group of its own first.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use super::Scene;
use super::settings::Flush;
use super::setup::memory_kib;
use crate::WorkloadError;
use crate::clock::Time;
use crate::console::Line;
use crate::machine::mount_at;

const GROUPS: &str = "/sys/fs/cgroup";
const GROUP: &str = "/sys/fs/cgroup/workload";
/// More than any guest has: the kernel stops when nothing is left to reclaim.
const ALL: &str = "64G";

/// Prepares for flushes: pages read from now on can be flushed.
pub fn prepare(how: Flush) -> Result<(), WorkloadError> {
    if how != Flush::Reclaim {
        return Ok(());
    }
    mount_at(GROUPS, "cgroup2")?;
    let entered = || {
        fs::write(Path::new(GROUPS).join("cgroup.subtree_control"), "+memory")?;
        fs::create_dir_all(GROUP)?;
        fs::write(Path::new(GROUP).join("cgroup.procs"), "1")
    };
    entered().map_err(WorkloadError::during(GROUP))
}

/// Writes dirty pages and empties the page cache; reports how many pages were in it before and after.
pub fn flush(scene: &Scene, how: Flush) -> Result<(), WorkloadError> {
    if how == Flush::No {
        return Ok(());
    }
    rustix::fs::sync();
    scene.phase("flush");
    let (before_kib, start) = (cached_kib()?, Time::now());
    match how {
        Flush::No => {}
        Flush::Drop => fs::write("/proc/sys/vm/drop_caches", "1")
            .map_err(WorkloadError::during("/proc/sys/vm/drop_caches"))?,
        Flush::Reclaim => reclaimed(fs::write(Path::new(GROUP).join("memory.reclaim"), ALL))
            .map_err(WorkloadError::during("memory.reclaim"))?,
    }
    Line::new("result")
        .with("name", "flush")
        .with("pages", before_kib / 4)
        .with("left", cached_kib()? / 4)
        .with("ms", Time::now().ms_since(start))
        .print();
    Ok(())
}

/// Pages of files and devices, as far as reclaim could take them.
fn cached_kib() -> Result<u64, WorkloadError> {
    Ok(memory_kib("Active(file)")? + memory_kib("Inactive(file)")?)
}

/// The kernel reports that less than requested was reclaimed, as it always is here.
fn reclaimed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
        other => other,
    }
}
