//! Requests to end a run, SIGINT, SIGTERM and SIGHUP, and to suspend it, SIGTSTP; what would end it at a limit, SIGXFSZ.

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

/// Signals within this time of the first one are the same request: timeout(1) sends one to its child and one to the child's group.
const ONE_REQUEST: Duration = Duration::from_millis(500);

/// Whether a signal was ignored when this process began, as SIGHUP is by `nohup`; also if that is unknown.
pub(crate) fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut lines = status.lines();
    let ignored = lines.find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    ignored.is_none_or(|bits| bits >> (signal - 1) & 1 == 1)
}

/// Returns a flag that becomes true at SIGINT or SIGTERM, and at SIGHUP (the terminal was closed) unless that is ignored; a SIGINT or SIGTERM
/// half a second later or more ends the process.
///
/// # Errors
///
/// The system's, if no handler can be installed or no thread started.
pub fn stop_flag() -> io::Result<Arc<AtomicBool>> {
    let stop = daemon_stop_flag()?;
    if !is_ignored(SIGHUP) {
        flag::register(SIGHUP, Arc::clone(&stop))?;
    }
    Ok(stop)
}

/// As [`stop_flag`], for a daemon, to which SIGHUP means something else.
///
/// # Errors
///
/// As [`stop_flag`].
pub fn daemon_stop_flag() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let is_second = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_shutdown(signal, 1, Arc::clone(&is_second))?;
        flag::register(signal, Arc::clone(&stop))?;
    }
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            if signals.forever().next().is_some() {
                thread::sleep(ONE_REQUEST);
                is_second.store(true, Ordering::Relaxed);
            }
        })?;
    Ok(stop)
}

/// Makes Ctrl-Z do nothing, for programs that others wait for.
///
/// # Errors
///
/// As [`stop_flag`].
pub fn ignore_suspension() -> io::Result<()> {
    flag::register(SIGTSTP, Arc::default()).map(drop)
}

/// Makes a write beyond the limit of the size of files (`ulimit -f`) fail as on a full disk, instead of ending the process.
///
/// # Errors
///
/// As [`stop_flag`].
pub fn outlive_file_size_limit() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}
