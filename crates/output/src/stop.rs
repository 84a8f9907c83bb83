//! Requests to end a run, SIGINT and SIGTERM, and to suspend it, SIGTSTP.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM, SIGTSTP};

/// Returns a flag that becomes true at SIGINT or SIGTERM; a second signal ends the process.
///
/// # Errors
///
/// The system's, if no handler can be installed.
pub fn stop_flag() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the second signal finds the flag set.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}

/// Makes Ctrl-Z do nothing, for programs that others wait for.
///
/// # Errors
///
/// As [`stop_flag`].
pub fn ignore_suspension() -> io::Result<()> {
    signal_hook::flag::register(SIGTSTP, Arc::default()).map(drop)
}
