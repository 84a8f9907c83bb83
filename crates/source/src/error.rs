//! Errors of traces and workloads, with their positions.

use std::io;

use crate::{Format, TraceOption};

/// Why a source or a trace writer stopped.
///
/// A reading source hands out every reference before the fault and is at its
/// end after it. `name` is the trace's path, or "standard input".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The trace could not be opened; nothing was read.
    #[error("cannot open '{name}': {source}")]
    Open {
        /// The trace.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// The bytes stopped coming, or could not be decompressed.
    #[error("cannot read '{name}' after {offset_bytes} bytes (decompressed): {source}")]
    Read {
        /// The trace.
        name: String,
        /// Bytes that came before the fault, counted after decompression.
        offset_bytes: u64,
        /// The error of the system or the decompressor.
        source: io::Error,
    },
    /// A line of text does not match its format.
    #[error("{name}, line {line}: expected {expected}, found {found}")]
    Line {
        /// The trace.
        name: String,
        /// Line number, from 1.
        line: u64,
        /// The expected contents.
        expected: String,
        /// What stands there: escaped, quoted, cut to a short excerpt.
        found: String,
    },
    /// A line, or a CSV record, is longer than any of its format.
    #[error("{name}, line {line}: longer than {limit_bytes} bytes; is this a text trace?")]
    LineTooLong {
        /// The trace.
        name: String,
        /// Line number, from 1.
        line: u64,
        /// The bound, in bytes.
        limit_bytes: usize,
    },
    /// The trace ends within a record.
    #[error(
        "{name}, byte {offset_bytes}: the last record has {found_bytes} bytes \
         instead of {expected_bytes}"
    )]
    Truncated {
        /// The trace.
        name: String,
        /// Where the record starts, in bytes after decompression, from 0.
        offset_bytes: u64,
        /// Bytes that are there.
        found_bytes: usize,
        /// Bytes in a whole record.
        expected_bytes: usize,
    },
    /// A part of a binary trace does not match its format.
    #[error("{name}, byte {offset_bytes}: expected {expected}, found {found}")]
    Record {
        /// The trace.
        name: String,
        /// Where the part starts, in bytes after decompression, from 0.
        offset_bytes: u64,
        /// The expected contents.
        expected: String,
        /// What stands there: escaped, quoted, cut to a short excerpt.
        found: String,
    },
    /// A table cannot be read on.
    #[error("{name}, row {row}: {reason}")]
    Table {
        /// The trace.
        name: String,
        /// The row that could not be read, from 1; 0 stands for all of the table.
        row: u64,
        /// What is wrong.
        reason: String,
    },
    /// A format that is read from its end, given as a stream; nothing was read.
    #[error("{name}: {format} is read from its end: it must be an uncompressed regular file")]
    NotSeekable {
        /// The trace.
        name: String,
        /// The format.
        format: Format,
    },
    /// An option that the trace's format does not use; nothing was read.
    #[error("{name}: --{option} is not used by {format} traces, only by: {users}")]
    OptionNotUsed {
        /// The trace.
        name: String,
        /// Its format.
        format: Format,
        /// The option.
        option: TraceOption,
        /// The formats that use it.
        users: String,
    },
    /// Neither the name nor the first bytes identify the format.
    #[error(
        "{name}: unknown format, it begins with {found}; use --format with one of: {}",
        Format::list()
    )]
    UnknownFormat {
        /// The trace.
        name: String,
        /// How it begins: escaped, quoted, cut to a short excerpt.
        found: String,
    },
    /// A name that no format has.
    #[error("'{name}' is not a trace format; known formats: {}", Format::list())]
    NoSuchFormat {
        /// The name, cut to a short excerpt.
        name: String,
    },
    /// A format that is read but not written; nothing was created.
    #[error("{format} traces are read, but not written")]
    NotWritten {
        /// The format.
        format: Format,
    },
    /// A compression that is read but not written; nothing was created.
    #[error("{name}: xz is read, but not written; name the output .gz, .zst, or neither")]
    CompressionNotWritten {
        /// The output.
        name: String,
    },
    /// The output could not be created.
    #[error("cannot create '{name}': {source}")]
    Create {
        /// The output.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// The output could not be written. A file of that name is as it was before; a pipe has
    /// an incomplete trace.
    #[error("{name}: cannot write the trace: {source}")]
    Write {
        /// The output.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// A workload that cannot be: nothing was generated.
    #[error("no such workload: {reason}")]
    Workload {
        /// What is wrong with it.
        reason: String,
    },
}

/// Bytes of foreign input an error shows.
const EXCERPT_BYTES: usize = 48;

/// Quotes foreign bytes for an error: escaped to printable ASCII and cut short.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "nothing".to_owned();
    }
    let shown = &bytes[..bytes.len().min(EXCERPT_BYTES)];
    let more = if shown.len() < bytes.len() { "..." } else { "" };
    format!("'{}'{more}", shown.escape_ascii())
}
