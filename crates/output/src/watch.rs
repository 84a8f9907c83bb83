//! Repetition of a report until Ctrl-C.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::stop_flag;

/// Queries a report every `seconds` until Ctrl-C, and writes it as `form` formats it and the one before. Tables replace
/// each other on a terminal, and are separated by an empty line elsewhere.
///
/// # Errors
///
/// Those of `query`, of `form`, and of writing.
pub fn watch<R>(
    seconds: u64,
    is_table: bool,
    query: impl Fn() -> anyhow::Result<R>,
    form: impl Fn(&R, &R) -> anyhow::Result<Vec<u8>>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let stop = stop_flag()?;
    let interval = Duration::from_secs(seconds);
    let clears = is_table && std::io::stdout().is_terminal();
    let mut earlier = query()?;
    while sleep(interval, &stop) {
        let report = query()?;
        if clears {
            write!(out, "\x1b[H\x1b[2J")?;
        }
        out.write_all(&form(&report, &earlier)?)?;
        if is_table && !clears {
            writeln!(out)?;
        }
        out.flush()?;
        earlier = report;
    }
    Ok(())
}

/// Sleeps for `interval`. Returns false if `stop` was set.
fn sleep(interval: Duration, stop: &AtomicBool) -> bool {
    let end = Instant::now() + interval;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if stop.load(Ordering::Relaxed) || left.is_zero() {
            return !stop.load(Ordering::Relaxed);
        }
        thread::sleep(left.min(Duration::from_millis(50)));
    }
}
