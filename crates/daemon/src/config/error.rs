//! Errors of a configuration.

use std::io;
use std::path::PathBuf;

/// Why a configuration was rejected; the one in force, if any, stays.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// An unreadable file or directory.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Larger than any configuration, or no regular file.
    #[error("{}: expected a regular file of at most {} KiB", path.display(), bytes_max >> 10)]
    NoFile {
        /// The file.
        path: PathBuf,
        /// Maximum size.
        bytes_max: u64,
    },
    /// A syntax error.
    #[error("{}:{line}: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The parser's message.
        message: String,
    },
    /// A key that does not exist.
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
    /// A value that its key does not accept.
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
        /// What is accepted.
        expected: String,
    },
    /// Contradictory keys.
    #[error("{place}: {key}: {message}")]
    Contradiction {
        /// File and line of the key, or `by default`.
        place: String,
        /// The key.
        key: String,
        /// What it contradicts, and how to resolve it.
        message: String,
    },
}
