//! How far a trace has been read, on standard error when that is a terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use plimsoll_source::Progress;

/// A bar that follows a trace being read; it vanishes when it is dropped.
#[derive(Debug)]
pub struct ReadingBar {
    bar: ProgressBar,
    progress: Progress,
    /// When the rate was last worked out.
    said: Instant,
}

/// How often the rate is worked out: faster than that nobody reads it.
const EVERY: Duration = Duration::from_millis(200);

impl ReadingBar {
    /// Shows a bar for a file, a counter for a pipe, and nothing if standard error is no terminal.
    #[must_use]
    pub fn new(progress: Progress) -> Self {
        let (bar, template) = match progress.total_bytes() {
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
            progress,
            said: Instant::now(),
        }
    }

    /// Brings the bar up to date after `references`; cheap enough for every batch.
    pub fn update(&mut self, references: u64) {
        self.bar.set_position(self.progress.read_bytes());
        if self.bar.is_hidden() || self.said.elapsed() < EVERY {
            return;
        }
        self.said = Instant::now();
        let rate = references as f64 / self.bar.elapsed().as_secs_f64() / 1e6;
        self.bar.set_message(format!("{rate:.1} M references/s"));
    }
}

impl Drop for ReadingBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
