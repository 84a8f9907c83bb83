//! What can be wrong with a configuration.

use std::io;
use std::path::PathBuf;

/// Why a configuration was not taken; the one in force, if any, stays.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A file or folder that cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Larger than any configuration, or no regular file.
    #[error("{}: expected a regular file of at most {} KiB", path.display(), bytes_max >> 10)]
    NoFile {
        /// Which.
        path: PathBuf,
        /// Most bytes taken.
        bytes_max: u64,
    },
    /// No TOML.
    #[error("{}:{line}: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What the parser says.
        message: String,
    },
    /// A key that means nothing.
    #[error("{}:{line}: unknown key '{key}'{hint}", path.display())]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The key, with its section.
        key: String,
        /// `; did you mean '...'?`, or nothing.
        hint: String,
    },
    /// A value that its key does not take.
    #[error("{}:{line}: {key} = {value}: expected {expected}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The key, with its section.
        key: String,
        /// The value as it is written.
        value: String,
        /// What is taken.
        expected: String,
    },
    /// Keys that contradict each other.
    #[error("{place}: {key}: {message}")]
    Contradiction {
        /// File and line of the key, or `by default`.
        place: String,
        /// The key.
        key: String,
        /// What it contradicts, and what to do.
        message: String,
    },
}
