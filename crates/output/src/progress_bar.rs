//! Progress of reading a trace, on standard error if that is a terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that follows a trace being read; it is erased when it is dropped.
#[derive(Debug)]
pub struct ReadingBar<F> {
    bar: ProgressBar,
    read_bytes: F,
    /// When the rate was last computed.
    updated: Instant,
}

/// Interval between two computations of the rate: nobody reads it faster.
const EVERY: Duration = Duration::from_millis(200);

impl<F: Fn() -> u64> ReadingBar<F> {
    /// Shows a bar for a file of known length, a counter for a pipe, and nothing if standard error is
    /// no terminal. `read_bytes` returns how much was read so far.
    pub fn new(total_bytes: Option<u64>, read_bytes: F) -> Self {
        let (bar, template) = match total_bytes {
            Some(total) => (
                ProgressBar::new(total),
                "{bar:30} {percent:>3} %  {binary_bytes} of {binary_total_bytes}  \
                 {msg}  {eta} left",
            ),
            None => (
                ProgressBar::new_spinner(),
                "{spinner} {binary_bytes} read  {msg}  {elapsed}",
            ),
        };
        let style = ProgressStyle::with_template(template);
        let bar = bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self {
            bar,
            read_bytes,
            updated: Instant::now(),
        }
    }

    /// Updates the bar after `references`; cheap enough to call after every batch.
    pub fn update(&mut self, references: u64) {
        self.bar.set_position((self.read_bytes)());
        if self.bar.is_hidden() || self.updated.elapsed() < EVERY {
            return;
        }
        self.updated = Instant::now();
        let rate = references as f64 / self.bar.elapsed().as_secs_f64() / 1e6;
        self.bar.set_message(format!("{rate:.1} M references/s"));
    }
}

impl<F> Drop for ReadingBar<F> {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
