//! Whether a process's filter of system calls lets a tracer attach, or would end the process for it.
//!
//! A filter runs before an injected system call as before any other, and may kill the process for it. Two cases are
//! safe:
//!
//! - The kernel suspends the filter for the injected calls. It does so for a tracer with `CAP_SYS_ADMIN` and no filter
//!   of its own, which excludes a daemon under its systemd unit.
//! - The only filter is the one that QEMU sets for itself (`-sandbox on`). It is a list of calls that QEMU does not
//!   need, and QEMU itself makes the calls by which a tracer attaches. QEMU sets it before it has any RAM to trace, so
//!   in a VM with one filter, that one is QEMU's. A process that claims so falsely can only end itself.
//!
//! In any other case the filter is unknown: only a process that may suspend it may read it.

use std::fs::{self, File};
use std::io::{self, Read as _};

use crate::refusal::Refusal;

/// Bytes of a command line that are read: the kernel starts no program with more than 6 MiB.
const COMMAND_LINE_BYTES_MAX: u64 = 8 << 20;

/// The filters of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SystemCallFilter {
    None,
    /// QEMU's own and no other.
    QemuSandbox,
    Unknown,
}

impl SystemCallFilter {
    /// That of a process's main thread.
    pub fn of(pid: u32) -> io::Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        // Its process chooses how long it is.
        let mut command_line = Vec::new();
        let file = File::open(format!("/proc/{pid}/cmdline"))?;
        file.take(COMMAND_LINE_BYTES_MAX)
            .read_to_end(&mut command_line)?;
        Ok(Self::from_proc(&status, &command_line))
    }

    fn from_proc(status: &str, command_line: &[u8]) -> Self {
        let field = |key| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.trim().parse::<u32>().ok()
        };
        match (field("Seccomp:"), field("Seccomp_filters:")) {
            // A kernel without seccomp reports nothing.
            (None | Some(0), _) => Self::None,
            (Some(2), Some(1)) if has_sandbox(command_line) => Self::QemuSandbox,
            _ => Self::Unknown,
        }
    }
}

/// Whether a command line of QEMU turns its sandbox on.
fn has_sandbox(command_line: &[u8]) -> bool {
    let words: Vec<_> = command_line.split(|&byte| byte == 0).collect();
    words.windows(2).any(|pair| {
        let settings = || pair[1].split(|&byte| byte == b',');
        matches!(pair[0], b"-sandbox" | b"--sandbox")
            && settings().any(|setting| matches!(setting, b"on" | b"enable=on"))
    })
}

/// Refuses a process whose filter might end it when a tracer attaches. Changes nothing.
pub fn check(pid: u32) -> Result<(), Refusal> {
    match SystemCallFilter::of(pid) {
        Ok(SystemCallFilter::Unknown) if !can_suspend() => Err(Refusal::SeccompFilter { pid }),
        // What cannot be read is refused with its own reason on attaching.
        _ => Ok(()),
    }
}

/// Whether the kernel suspends filters for this process.
fn can_suspend() -> bool {
    const CAP_SYS_ADMIN: u32 = 21;
    let Ok(status) = fs::read_to_string("/proc/self/status") else {
        return false;
    };
    let field = |key| status.lines().find_map(|line| line.strip_prefix(key));
    let capabilities = field("CapEff:").and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    let filter = field("Seccomp:").map_or("0", str::trim);
    capabilities.is_some_and(|bits| bits >> CAP_SYS_ADMIN & 1 == 1) && filter == "0"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_single_filter_of_a_sandboxed_qemu_is_its_own() {
        let of = |mode: &str, filters: &str, command_line: &str| {
            let status = format!("Name:\tqemu\nSeccomp:\t{mode}\nSeccomp_filters:\t{filters}\n");
            let command_line = command_line.replace(' ', "\0");
            SystemCallFilter::from_proc(&status, command_line.as_bytes())
        };
        let sandboxed = "qemu -m 1G -sandbox on,obsolete=deny,spawn=deny -S";
        assert_eq!(of("0", "0", sandboxed), SystemCallFilter::None);
        assert_eq!(of("2", "1", sandboxed), SystemCallFilter::QemuSandbox);
        assert_eq!(of("2", "2", sandboxed), SystemCallFilter::Unknown);
        assert_eq!(of("1", "0", sandboxed), SystemCallFilter::Unknown);
        for other in [
            "qemu -m 1G",
            "qemu -sandbox off",
            "qemu -name on",
            "qemu -sandbox",
            "",
        ] {
            assert_eq!(of("2", "1", other), SystemCallFilter::Unknown, "{other}");
        }
        let unfiltered = SystemCallFilter::from_proc("Name:\tqemu\n", b"");
        assert_eq!(unfiltered, SystemCallFilter::None);
    }
}
