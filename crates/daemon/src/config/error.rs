//! Errors of a configuration.

use std::io;
use std::path::PathBuf;

/// Why a configuration was rejected; the one in force, if any, stays.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum ConfigError {
    /// An unreadable file or directory.
    #[error("{}: cannot be read: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// Larger than any configuration, or no regular file.
    #[error("{}: expected a regular file of at most {} KiB", path.display(), bytes_max >> 10)]
    NoFile { path: PathBuf, bytes_max: u64 },
    #[error("{}:{line}: {message}", path.display())]
    Syntax {
        path: PathBuf,
        line: usize,
        message: String,
    },
    /// A key that does not exist.
    #[error("{}:{line}: unknown key '{key}'{hint}", path.display())]
    UnknownKey {
        path: PathBuf,
        line: usize,
        /// The key, with its section.
        key: String,
        /// `; did you mean '...'?`, or nothing.
        hint: String,
    },
    /// A value that its key does not accept.
    #[error("{}:{line}: {key} = {value}: expected {expected}", path.display())]
    Value {
        path: PathBuf,
        line: usize,
        /// The key, with its section.
        key: String,
        /// The value as it is written.
        value: String,
        expected: String,
    },
    /// Contradictory keys.
    #[error("{place}: {key}: {message}")]
    Contradiction {
        /// File and line of the key, or `by default`.
        place: String,
        key: String,
        /// What it contradicts, and how to resolve it.
        message: String,
    },
}

impl ConfigError {
    /// The key, with its section, if it concerns one.
    pub(super) fn key(&self) -> Option<&str> {
        match self {
            Self::Read { .. } | Self::NoFile { .. } | Self::Syntax { .. } => None,
            Self::UnknownKey { key, .. }
            | Self::Value { key, .. }
            | Self::Contradiction { key, .. } => Some(key),
        }
    }

    /// The line of its file, if it concerns one.
    pub(super) fn line(&self) -> Option<usize> {
        match self {
            Self::Read { .. } | Self::NoFile { .. } => None,
            Self::Syntax { line, .. }
            | Self::UnknownKey { line, .. }
            | Self::Value { line, .. } => Some(*line),
            Self::Contradiction { place, .. } => place.rsplit_once(':')?.1.parse().ok(),
        }
    }
}
