//! Why a guest could not be started or did not do what was expected.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use plimsoll_vm::VmError;

/// Each variant states the resulting state of the guest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum GuestError {
    /// An error of the guest's process, or of its monitor.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// A part of the image could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The image of our guests is not there.
    #[error("no guest image: {what}; run './dev setup' to make one")]
    NoImage {
        /// The missing item, and where it was searched for.
        what: String,
    },
    /// The disk of real programs is not there.
    #[error("no guest of real programs: {} does not exist; lab/programs/build.sh makes it, as root", disk.display())]
    NoPrograms {
        /// Where it was searched for.
        disk: PathBuf,
    },
    /// Invalid settings of a guest; nothing was started.
    #[error("guest cannot be started with {what}")]
    GuestConfig {
        /// The setting and what was expected.
        what: String,
    },
    /// QEMU did not start; no process is left.
    #[error("{program} could not be started")]
    GuestStart {
        program: String,
        #[source]
        source: io::Error,
    },
    /// The guest did not print the expected line; it still runs.
    #[error(
        "the guest did not say what was waited for within {timeout:?}; it said last: {}",
        list(last)
    )]
    GuestSilent {
        timeout: Duration,
        last: Vec<String>,
    },
    /// The guest ended before it printed the expected line.
    #[error(
        "the guest has ended ({status}); it said last: {}; QEMU said: {qemu}",
        list(last)
    )]
    GuestEnded {
        /// How QEMU ended.
        status: String,
        last: Vec<String>,
        /// End of what QEMU wrote to its standard error.
        qemu: String,
    },
    /// The guest's workload failed with an error.
    #[error("the guest's workload failed: {message}")]
    GuestFailed { message: String },
    /// The guest was started without a monitor socket.
    #[error("guest {name} has no QMP socket")]
    NoQmp { name: String },
}

fn list(words: &[String]) -> String {
    if words.is_empty() {
        "nothing".into()
    } else {
        words.join(" | ")
    }
}
