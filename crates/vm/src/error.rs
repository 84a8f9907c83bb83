//! Why something about a VM could not be found out or done.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Each variant says what the VM is left with; those without a word on it changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// No process has this id, or it ended while it was inspected.
    #[error("there is no process {pid}, or it has just ended")]
    NoSuchProcess {
        /// The process id.
        pid: u32,
    },
    /// The process is something else.
    #[error("process {pid} is not a QEMU system emulator but {program}")]
    NotQemu {
        /// The process id.
        pid: u32,
        /// The program it runs.
        program: String,
    },
    /// The process is none that can be a VM of this host.
    #[error("process {pid} is not a VM of this host: {why}")]
    NotOfThisHost {
        /// The process id.
        pid: u32,
        /// What is against it.
        why: String,
    },
    /// The process id was used again.
    #[error("process {pid} has another start: the VM has ended, and its process id was used again")]
    OtherProcess {
        /// The process id.
        pid: u32,
    },
    /// No running VM has this name.
    #[error("no running VM is named {name:?}; running: {}", list(running))]
    NoSuchName {
        /// The requested name.
        name: String,
        /// Names of the VMs that run.
        running: Vec<String>,
    },
    /// Several VMs have this name; use a process id.
    #[error("several VMs are named {name:?}: use a process id, one of {pids:?}")]
    AmbiguousName {
        /// The requested name.
        name: String,
        /// Processes of the VMs so named.
        pids: Vec<u32>,
    },
    /// The kernel hides a file of the process from this user.
    #[error("not permitted to read {}: run as root or as the VM's user", path.display())]
    NotPermitted {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A file of the host could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A line of a process's maps that is not what the kernel writes.
    #[error("line {line} of the memory map is malformed: {text:?}")]
    Maps {
        /// Line number, from 1.
        line: usize,
        /// The line, cut to 120 characters.
        text: String,
    },
    /// No mapping of the process can be its guest's RAM.
    #[error("process {pid} has no mapping that could be guest RAM of {expected_mib} MiB")]
    NoGuestRam {
        /// The process id.
        pid: u32,
        /// Size of the guest's RAM by the command line, in MiB.
        expected_mib: u64,
    },
    /// A VM without a monitor at a Unix socket of its own.
    #[error("VM {vm} has no monitor socket known by path")]
    NoMonitor {
        /// The VM.
        vm: String,
    },
    /// A monitor that does not greet in time: it serves one client at a time.
    #[error(
        "the monitor at {} sends no greeting: another client is connected to it, or QEMU hangs",
        socket.display()
    )]
    QmpTaken {
        /// The socket.
        socket: PathBuf,
    },
    /// A monitor socket without an answer.
    #[error("no QMP monitor answers at {}", socket.display())]
    QmpConnect {
        /// The socket.
        socket: PathBuf,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// The monitor did not answer in time: the command may or may not take effect.
    #[error("QMP command {command:?} was not answered within {timeout:?}")]
    QmpTimeout {
        /// The command.
        command: String,
        /// How long was waited.
        timeout: Duration,
    },
    /// The monitor's connection broke: the command may or may not have taken effect.
    #[error("QMP command {command:?}: the connection broke")]
    QmpBroken {
        /// The command.
        command: String,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// What the monitor sent is not QMP; the connection is of no more use.
    #[error("the monitor's answer is not valid QMP: {what}")]
    QmpProtocol {
        /// What is wrong with it.
        what: String,
    },
    /// QEMU refused the command.
    #[error("QMP command {command:?} was refused: {description} ({class})")]
    QmpRefused {
        /// The command.
        command: String,
        /// QEMU's class of error.
        class: String,
        /// QEMU's words.
        description: String,
    },
    /// An agent in the guest did not carry out a request; nothing was changed.
    #[error("the guest's agent at {}: {what}", socket.display())]
    Agent {
        /// The socket that leads to it.
        socket: PathBuf,
        /// What went wrong, perhaps in its own words.
        what: String,
    },
}

impl VmError {
    /// An error of reading `path`, classified by its meaning for the user.
    pub(crate) fn of_file(path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::NotPermitted { path, source },
            _ => Self::File { path, source },
        }
    }
}

fn list(words: &[String]) -> String {
    if words.is_empty() {
        "nothing".into()
    } else {
        words.join(" | ")
    }
}
