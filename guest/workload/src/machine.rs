//! What process 1 does to the machine: mounts, settings, memory, power.

use std::io;

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot, sysinfo};

use crate::WorkloadError;
use crate::settings::Settings;

/// Where the kernel says whether it backs memory with huge pages.
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Memory left to the kernel and to this program beside the array, in bytes.
const RESERVE_BYTES: u64 = 2 << 20;

/// Whether this process is the machine's init.
pub fn is_init() -> bool {
    rustix::process::getpid().is_init()
}

/// Mounts what an init needs, turns huge pages off, returns the kernel command line.
///
/// Huge pages would make one reference of 512 pages. A kernel without them lacks the file.
pub fn prepare() -> Result<String, WorkloadError> {
    mount_at("/proc", "proc")?;
    mount_at("/sys", "sysfs")?;
    match std::fs::write(HUGE_PAGES, "never") {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(WorkloadError::Machine {
                what: "turning huge pages off",
                source,
            });
        }
        _ => {}
    }
    std::fs::read_to_string("/proc/cmdline").map_err(|source| WorkloadError::Machine {
        what: "reading /proc/cmdline",
        source,
    })
}

/// Mounts a file system of the kernel's at `target`, unless it is there already.
pub fn mount_at(target: &'static str, kind: &str) -> Result<(), WorkloadError> {
    let mounted = std::fs::create_dir_all(target).and_then(|()| {
        match mount(kind, target, kind, MountFlags::empty(), None) {
            Err(Errno::BUSY) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    });
    mounted.map_err(|source| WorkloadError::Machine {
        what: target,
        source,
    })
}

/// Refuses an array that does not fit: the kernel would end in a panic instead.
pub fn check_memory(settings: &Settings) -> Result<(), WorkloadError> {
    let wanted = settings.array_bytes();
    let memory = sysinfo();
    let free = memory.freeram.saturating_mul(memory.mem_unit.into());
    if wanted.saturating_add(RESERVE_BYTES) > free {
        return Err(WorkloadError::Memory {
            wanted_mib: wanted >> 20,
            free_mib: free >> 20,
        });
    }
    Ok(())
}

/// Switches the machine off. Returns only if the kernel refuses.
pub fn power_off() {
    rustix::fs::sync();
    if let Err(error) = reboot(RebootCommand::PowerOff) {
        crate::console::Line::new("error")
            .rest("message", format_args!("power off: {error}"))
            .print();
    }
}
