//! The live verbs: queries and commands to plimsolld.
//!
//! | verbs | |
//! |---|---|
//! | `vms`, `show`, `top`, `report`, `whatif`, `explain` | read; served by the read-only socket too |
//! | `apply`, `rollback`, `set`, `pause`, `resume` | change something |
//!
//! Names of VMs and sentences of the daemon may hold what somebody in a guest chose: every one goes through
//! `printable` before it gets to a terminal.

mod decisions;

pub mod apply;
pub mod explain;
pub mod pause;
pub mod report;
pub mod resume;
pub mod rollback;
pub mod set;
pub mod show;
pub mod top;
pub mod vms;
pub mod whatif;

pub use plimsoll_report::daemon::{Daemon, SocketArg};

use plimsoll_output::{TextFormatArg, printable};
use plimsoll_protocol::answer::Acknowledgement;

/// Number of decisions read at a time.
const DECISIONS_PAGE: usize = 100;

/// Connection to the daemon, and output format.
#[derive(Debug, Clone, clap::Args)]
pub struct QueryArgs {
    #[command(flatten)]
    socket: SocketArg,
    #[command(flatten)]
    form: TextFormatArg,
}

/// Writes to standard error that a change is in the daemon's memory alone, if it is.
fn warn_if_not_stored(done: &Acknowledgement) {
    if let Some(why) = &done.not_stored {
        eprintln!(
            "plimsoll: warning: this holds until the daemon ends, and is lost then: {}",
            printable(why)
        );
    }
}
