//! What process 1 does to the machine: mounts, settings, memory, power.

use std::io;

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot, sysinfo};

use crate::WorkloadError;

/// The kernel's setting for huge pages.
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Contains a directory for each CPU, among others.
const CPUS: &str = "/sys/devices/system/cpu";

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

/// As init, starts the CPUs that the kernel did not start (`maxcpus=1`). Returns the number of running CPUs.
///
/// A kernel patches its own text while it starts and when it loads a module, and QEMU 7.2's emulator may
/// run a half-patched instruction on another CPU. So they are started when all that is over.
pub fn start_cpus() -> Result<usize, WorkloadError> {
    if is_init() {
        switch_cpus(true)?;
    }
    Ok(std::thread::available_parallelism().map_or(1, |cpus| cpus.get()))
}

/// Starts or stops all CPUs that can be stopped.
pub fn switch_cpus(on: bool) -> Result<(), WorkloadError> {
    let failed = |source| WorkloadError::Machine {
        what: "starting or stopping CPUs",
        source,
    };
    let (is, becomes) = if on { ("0", "1") } else { ("1", "0") };
    for entry in std::fs::read_dir(CPUS).map_err(failed)? {
        // A CPU that cannot be switched off has no such file, or refuses; nor has what is no CPU.
        let switch = entry.map_err(failed)?.path().join("online");
        if std::fs::read_to_string(&switch).is_ok_and(|text| text.trim() == is) {
            match std::fs::write(&switch, becomes) {
                Err(error) if on || error.kind() != io::ErrorKind::PermissionDenied => {
                    return Err(failed(error));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Refuses an array that does not fit: the kernel would end in a panic instead.
pub fn check_memory(wanted_bytes: u64) -> Result<(), WorkloadError> {
    let memory = sysinfo();
    let free = memory.freeram.saturating_mul(memory.mem_unit.into());
    if wanted_bytes.saturating_add(RESERVE_BYTES) > free {
        return Err(WorkloadError::Memory {
            wanted_mib: wanted_bytes >> 20,
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
