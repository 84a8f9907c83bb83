//! Errors of traces and workloads, with their positions.

use std::io;
use std::path::Path;

use crate::{Compression, Format, TraceOption};

/// Why a source or a trace writer stopped.
///
/// A source returns every reference before the error and is then at its
/// end. `name` is the trace's path, without control characters, or "standard input".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum SourceError {
    /// The trace could not be opened; nothing was read.
    #[error("cannot open '{name}': {source}")]
    Open { name: String, source: io::Error },
    /// The bytes could not be read or decompressed.
    #[error("cannot read '{name}' after {offset_bytes} bytes (decompressed): {source}")]
    Read {
        name: String,
        /// Bytes before the error, counted after decompression.
        offset_bytes: u64,
        source: io::Error,
    },
    /// A line of text does not match its format.
    #[error("{name}, line {line}: expected {expected}, found {found}")]
    Line {
        name: String,
        line: u64,
        expected: String,
        /// The actual contents: escaped, quoted, truncated to a short excerpt.
        found: String,
    },
    /// A line, or a CSV record, exceeds the maximum length.
    #[error("{name}, line {line}: longer than {limit_bytes} bytes; is this a text trace?")]
    LineTooLong {
        name: String,
        line: u64,
        limit_bytes: usize,
    },
    /// The trace ends within a record.
    #[error(
        "{name}, byte {offset_bytes}: the last record has {found_bytes} bytes \
         instead of {expected_bytes}"
    )]
    Truncated {
        name: String,
        /// Start of the record, in bytes after decompression, from 0.
        offset_bytes: u64,
        /// Number of bytes available.
        found_bytes: usize,
        /// Number of bytes in a complete record.
        expected_bytes: usize,
    },
    /// A part of a binary trace does not match its format.
    #[error("{name}, byte {offset_bytes}: expected {expected}, found {found}")]
    Record {
        name: String,
        /// Start of the part, in bytes after decompression, from 0.
        offset_bytes: u64,
        expected: String,
        /// The actual contents: escaped, quoted, truncated to a short excerpt.
        found: String,
    },
    /// A table cannot be read further.
    #[error("{name}, row {row}: {reason}")]
    Table {
        name: String,
        /// The row that could not be read, from 1; 0 for the whole table.
        row: u64,
        reason: String,
    },
    /// The format is read from its end, but the trace is a stream; nothing was read.
    #[error("{name}: {format} is read from its end: it must be an uncompressed regular file")]
    NotSeekable { name: String, format: Format },
    /// An option does not apply to the trace's format; nothing was read.
    #[error("{name}: --{option} is not used by {format} traces, only by: {users}")]
    OptionNotUsed {
        name: String,
        format: Format,
        option: TraceOption,
        /// The formats that use it.
        users: String,
    },
    /// The only device that was to be read did not occur in the trace, which was read to its end.
    #[error("{name}: device '{device}' does not occur in it")]
    NoSuchDevice { name: String, device: String },
    /// Neither the name nor the first bytes identify the format.
    #[error(
        "{name}: unknown format, it begins with {found}; use --format with one of: {}",
        Format::list()
    )]
    UnknownFormat {
        name: String,
        /// Its first bytes: escaped, quoted, truncated to a short excerpt.
        found: String,
    },
    /// No format has this name.
    #[error("'{name}' is not a trace format; known formats: {}", Format::list())]
    NoSuchFormat {
        /// The name, truncated to a short excerpt.
        name: String,
    },
    /// The format can be read but not written; nothing was created.
    #[error("{format} traces are read, but not written")]
    NotWritten { format: Format },
    /// The compression can be read but not written; nothing was created.
    #[error(
        "{name}: {compression} is read, but not written; name the output .gz, .zst, or neither"
    )]
    CompressionNotWritten {
        name: String,
        compression: Compression,
    },
    /// The format is read from its end, so that a file compressed as a whole could not be read; nothing was created.
    #[error(
        "{name}: {format} is not compressed as a whole: it could not be read from its end; name the output without .bz2, .gz, .xz or .zst"
    )]
    NotCompressed { name: String, format: Format },
    /// The output could not be created.
    #[error("cannot create '{name}': {source}")]
    Create { name: String, source: io::Error },
    /// The output could not be written. An existing file of that name is unchanged; a pipe has received
    /// an incomplete trace.
    #[error("{name}: cannot write the trace: {source}")]
    Write { name: String, source: io::Error },
    /// The workload is invalid; nothing was generated.
    #[error("no such workload: {reason}")]
    Workload { reason: String },
}

/// What errors call a file: its path without control characters, which could move a terminal's cursor.
pub(crate) fn name_of(path: &Path) -> String {
    let name = path.to_string_lossy();
    name.replace(char::is_control, "\u{fffd}")
}

/// Maximum number of input bytes quoted in an error.
const EXCERPT_BYTES: usize = 48;

/// Quotes input bytes for an error: escaped to printable ASCII and truncated.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "nothing".to_owned();
    }
    let shown = &bytes[..bytes.len().min(EXCERPT_BYTES)];
    let more = if shown.len() < bytes.len() { "..." } else { "" };
    format!("'{}'{more}", shown.escape_ascii())
}
