//! The daemon's log: to the journal with fields if systemd started it, else to stderr as lines.
//!
//! Messages about a VM or a decision have the fields `vm` and `decision`, which the journal stores as `PLIMSOLL_VM` and
//! `PLIMSOLL_DECISION`: `journalctl -u plimsolld PLIMSOLL_VM=web`.

use std::fs::{self, Metadata};
use std::io::{self, IsTerminal};
use std::os::unix::fs::MetadataExt;

use tracing::level_filters::LevelFilter;
use tracing::{Level, warn};
use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};

/// Prefix of field names in the journal.
const PREFIX: &str = "PLIMSOLL";

/// Starts the log for messages of `level` or more severe, until the end of the process.
///
/// # Errors
///
/// If a log was started before, which continues.
pub fn begin(level: Level) -> Result<(), TryInitError> {
    let level = LevelFilter::from_level(level);
    let registry = tracing_subscriber::registry();
    if !stderr_is_journal() {
        return registry.with(lines().with_filter(level)).try_init();
    }
    match journal() {
        Ok(layer) => registry.with(layer.with_filter(level)).try_init(),
        Err(error) => {
            registry.with(lines().with_filter(level)).try_init()?;
            warn!("no fields in the log: the journal's socket cannot be reached: {error}");
            Ok(())
        }
    }
}

fn lines<S>() -> impl Layer<S>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
}

fn journal() -> io::Result<tracing_journald::Layer> {
    let layer = tracing_journald::layer()?
        .with_field_prefix(Some(PREFIX.to_owned()))
        .with_priority_mappings(PriorityMappings {
            info: Priority::Informational,
            debug: Priority::Debug,
            ..PriorityMappings::new()
        });
    Ok(layer)
}

/// Whether stderr goes to the journal: the variable alone is inherited by every child of a service.
fn stderr_is_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").ok();
    let stderr = fs::metadata("/proc/self/fd/2").ok();
    stream
        .zip(stderr)
        .is_some_and(|(stream, stderr)| is_stream(&stream, &stderr))
}

/// Whether `stream`, device and inode as systemd writes them, is `file`.
fn is_stream(stream: &str, file: &Metadata) -> bool {
    let numbers = stream.split_once(':');
    let numbers =
        numbers.and_then(|(device, inode)| Some((device.parse().ok()?, inode.parse().ok()?)));
    numbers == Some((file.dev(), file.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_stream_that_systemd_made_is_the_journal() {
        let file = fs::metadata("/proc/self/exe").unwrap();
        let named = format!("{}:{}", file.dev(), file.ino());
        assert!(is_stream(&named, &file));
        let other = format!("{}:{}", file.dev(), file.ino() + 1);
        for wrong in ["", ":", "1", "x:y", &other, &named[1..]] {
            assert!(!is_stream(wrong, &file), "{wrong}");
        }
    }
}
