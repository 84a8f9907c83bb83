//! Errors of inspecting and controlling VMs.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::group_name::escaped;
use crate::identity::AllowedUsers;

/// An error about a VM. Each variant states the effect on the VM; where none is stated, nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum VmError {
    /// No process has this id, or it ended while it was inspected.
    #[error("there is no process {pid}, or it has just ended")]
    NoSuchProcess { pid: u32 },
    /// The process is not QEMU.
    #[error("process {pid} is not a QEMU system emulator but {program}")]
    NotQemu { pid: u32, program: String },
    /// The process has no memory that could be observed.
    #[error(
        "process {pid} ({name}) has no memory of its own: it is a thread of the kernel, or about to end"
    )]
    NoMemory { pid: u32, name: String },
    /// The number of a thread, whose memory is its process's.
    #[error("{pid} is a thread of process {process}: name the process")]
    Thread { pid: u32, process: u32 },
    /// There is no control group with this path or name.
    #[error(
        "there is no control group {path:?}, by path or by name; {}",
        looked(looked_in)
    )]
    NoSuchGroup {
        path: String,
        /// The directories of control groups.
        looked_in: Vec<String>,
    },
    /// A control group is named by nothing.
    #[error(
        "no control group is named after 'cgroup:' (the command that should print it printed nothing?); 'cgroup:/' is the root, with all groups"
    )]
    EmptyGroupName,
    /// Several control groups have this name; use a path.
    #[error(
        "several control groups are named {name:?}: use a path, one of {}",
        list(paths)
    )]
    AmbiguousGroup {
        name: String,
        /// Printable paths of the groups with this name.
        paths: Vec<String>,
    },
    /// The control group was removed.
    #[error("control group {} was removed", directory.display())]
    GroupGone { directory: PathBuf },
    /// The memory of the control group is not counted apart.
    #[error(
        "the memory of control group {} is not counted apart: the memory controller is not enabled for it",
        directory.display()
    )]
    GroupWithoutMemory { directory: PathBuf },
    /// The process does not qualify as a VM of this host.
    #[error("process {pid} is not a VM of this host: {why}")]
    NotOfThisHost { pid: u32, why: String },
    /// The process id was reused by another process.
    #[error(
        "process {pid} has another start time: the one that was meant has ended, and its process id was reused"
    )]
    OtherProcess { pid: u32 },
    /// No running VM has this name.
    #[error(
        "no running VM is named {name:?}; running: {} (VMs of users other than {} are found by process id alone)",
        list(running),
        AllowedUsers::DEFAULT_NAMES.join(", ")
    )]
    NoSuchName { name: String, running: Vec<String> },
    /// Several VMs have this name; use a process id.
    #[error("several VMs are named {name:?}: use a process id, one of {pids:?}")]
    AmbiguousName {
        name: String,
        /// Process ids of the VMs with this name.
        pids: Vec<u32>,
    },
    /// This user is not permitted to read a file of the process.
    #[error("not permitted to read {}: run as root or as the VM's user", path.display())]
    NotPermitted {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file of the host could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A malformed line in a process's memory map.
    #[error("line {line} of the memory map is malformed: {text:?}")]
    Maps {
        line: usize,
        /// The line, truncated to 120 characters.
        text: String,
    },
    /// No mapping of the process can be its guest's RAM.
    #[error("process {pid} has no mapping that could be guest RAM of {expected_mib} MiB")]
    NoGuestRam {
        pid: u32,
        /// Size of the guest's RAM according to the command line, in MiB.
        expected_mib: u64,
    },
    /// The VM has no monitor at a Unix socket of its own.
    #[error("the VM has no monitor socket known by path")]
    NoMonitor,
    /// None of several monitors can be used.
    #[error("no monitor of {} can be used: {}", .0.len(), with_causes(.0))]
    NoFreeMonitor(Vec<Self>),
    /// The monitor sent no greeting in time: it serves one client at a time.
    #[error(
        "the monitor at {} sends no greeting: another client is connected to it, or QEMU hangs",
        socket.display()
    )]
    QmpTaken { socket: PathBuf },
    /// No monitor answers at the socket.
    #[error("no QMP monitor answers at {}", socket.display())]
    QmpConnect {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The monitor did not answer in time: the command may or may not take effect.
    #[error("QMP command {command:?} was not answered within {timeout:?}")]
    QmpTimeout { command: String, timeout: Duration },
    /// The monitor's connection broke: the command may or may not have taken effect.
    #[error("QMP command {command:?}: the connection broke")]
    QmpBroken {
        command: String,
        #[source]
        source: io::Error,
    },
    /// The monitor's output is not valid QMP; the connection can no longer be used.
    #[error("the monitor's answer is not valid QMP: {what}")]
    QmpProtocol { what: String },
    /// QEMU refused the command.
    #[error("QMP command {command:?} was refused: {description} ({class})")]
    QmpRefused {
        command: String,
        /// QEMU's class of error.
        class: String,
        description: String,
    },
    /// The agent in the guest failed to carry out a request; nothing was changed.
    #[error("the guest's agent at {}: {what}", socket.display())]
    Agent {
        /// The socket that connects to it.
        socket: PathBuf,
        /// What went wrong; may contain the agent's message.
        what: String,
    },
}

impl VmError {
    /// Converts an error of reading `path` to the variant with its meaning for the user.
    pub(crate) fn of_file(path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::NotPermitted { path, source },
            _ => Self::File { path, source },
        }
    }

    /// Whether a monitor kept its client waiting until the time limit.
    pub fn took_its_time(&self) -> bool {
        match self {
            Self::QmpTimeout { .. } | Self::QmpTaken { .. } => true,
            Self::NoFreeMonitor(errors) => errors.iter().any(Self::took_its_time),
            _ => false,
        }
    }
}

/// Errors with their causes, one after the other.
fn with_causes(errors: &[VmError]) -> String {
    let with_cause = |error: &VmError| match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    };
    errors.iter().map(with_cause).collect::<Vec<_>>().join("; ")
}

/// Names, which processes choose, without what a terminal could obey.
fn list(words: &[String]) -> String {
    if words.is_empty() {
        return "nothing".into();
    }
    let words: Vec<_> = words.iter().map(|word| escaped(word)).collect();
    words.join(" | ")
}

fn looked(directories: &[String]) -> String {
    if directories.is_empty() {
        return "no control groups that can count memory are mounted".into();
    }
    format!("looked in {}", list(directories))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_is_not_found_names_where_it_was_looked_for() {
        let error = |looked_in: &[&str]| VmError::NoSuchGroup {
            path: "web".to_owned(),
            looked_in: looked_in.iter().map(ToString::to_string).collect(),
        };
        let text = error(&["/sys/fs/cgroup"]).to_string();
        assert!(text.ends_with("; looked in /sys/fs/cgroup"), "{text}");
        let text = error(&[]).to_string();
        assert!(
            text.ends_with("; no control groups that can count memory are mounted"),
            "{text}"
        );
    }

    #[test]
    fn names_that_a_terminal_could_obey_are_escaped() {
        let error = VmError::NoSuchName {
            name: "a\u{1b}[2J".to_owned(),
            running: vec!["web".to_owned(), "b\u{1b}[31m\nc".to_owned()],
        };
        let text = error.to_string();
        assert!(text.contains(r"running: web | b\u{1b}[31m\nc ("), "{text}");
        assert!(!text.contains(char::is_control), "{text}");
    }
}
