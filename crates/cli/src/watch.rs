//! Showing a report again and again.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_output::stop_flag;

/// Asks for a report every so many seconds until Ctrl-C, and writes what `form` makes of it and the one before. Tables
/// replace each other on a terminal, and are parted by an empty line elsewhere.
///
/// # Errors
/// Those of asking, forming and writing.
pub fn watch<R>(
    seconds: u64,
    is_table: bool,
    ask: impl Fn() -> anyhow::Result<R>,
    form: impl Fn(&R, &R) -> anyhow::Result<Vec<u8>>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let stop = stop_flag()?;
    let interval = Duration::from_secs(seconds);
    let clears = is_table && std::io::stdout().is_terminal();
    let mut earlier = ask()?;
    while sleep(interval, &stop) {
        let report = ask()?;
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

/// Sleeps for a while. Returns whether nobody asked to stop.
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
