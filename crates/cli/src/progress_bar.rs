//! How far a trace has been read, on standard error when that is a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use plimsoll_source::Progress;

/// A bar that follows a trace being read; it vanishes when it is dropped.
#[derive(Debug)]
pub struct ReadingBar {
    bar: ProgressBar,
    progress: Progress,
}

impl ReadingBar {
    /// Shows a bar for a file, a counter for a pipe, and nothing if standard error is no terminal.
    #[must_use]
    pub fn new(progress: Progress) -> Self {
        let (bar, template) = match progress.total_bytes() {
            Some(total) => (
                ProgressBar::new(total),
                "{bar:30} {percent:>3} %  {binary_bytes} of {binary_total_bytes}  \
                 {binary_bytes_per_sec}  {eta} left",
            ),
            None => (
                ProgressBar::new_spinner(),
                "{spinner} {binary_bytes} read  {binary_bytes_per_sec}  {elapsed}",
            ),
        };
        let style = ProgressStyle::with_template(template);
        let bar = bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, progress }
    }

    /// Brings the bar up to date; cheap enough for every batch.
    pub fn update(&self) {
        self.bar.set_position(self.progress.read_bytes());
    }
}

impl Drop for ReadingBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
