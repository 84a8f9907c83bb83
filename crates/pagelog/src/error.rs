//! Why a page log cannot be read or written.

use std::io;
use std::path::{Path, PathBuf};

use plimsoll_flow::PageNumber;

use crate::record::NotARecord;

/// Why a record is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the others suffice")]
pub enum RecordFault {
    /// Undefined bits are set.
    #[error(transparent)]
    NotARecord(#[from] NotARecord),
    /// A vCPU that the machine does not have.
    #[error("it belongs to vCPU {vcpu}, but the machine has only {vcpus}")]
    Vcpu {
        vcpu: u8,
        /// Number of the machine's vCPUs.
        vcpus: u32,
    },
    /// A page that is not RAM.
    #[error("page frame {frame} is outside the machine's RAM")]
    Frame { frame: PageNumber },
    /// A clock that runs backwards.
    #[error("vCPU {vcpu} has run {before} instructions, but its clock shows {instructions}")]
    Clock {
        vcpu: u8,
        /// Sum of the instructions in the records before.
        before: u64,
        /// Instructions according to the clock record.
        instructions: u64,
    },
    /// An interval out of sequence.
    #[error("interval {number} ends where interval {expected} is expected")]
    Interval { number: u64, expected: u64 },
    /// Records after the end, or an end inside a block of a file.
    #[error("the end of the log is followed by other records")]
    End,
}

/// What errors call a file: its path without control characters, which could move a terminal's cursor.
pub(crate) fn name_of(path: &Path) -> String {
    let name = path.to_string_lossy();
    name.replace(char::is_control, "\u{fffd}")
}

/// Why a page log cannot be read or written. A source returns the records before the error and is then at its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum PageLogError {
    /// A file cannot be opened; nothing was read.
    #[error("cannot open '{}': {source}", name_of(path))]
    Open { path: PathBuf, source: io::Error },
    /// A file cannot be created.
    #[error("cannot create '{}': {source}", name_of(path))]
    Create { path: PathBuf, source: io::Error },
    /// Reading failed.
    #[error("{name}, byte {offset_bytes}: cannot continue reading: {source}")]
    Read {
        name: String,
        /// Bytes read before the error.
        offset_bytes: u64,
        source: io::Error,
    },
    /// Writing failed: the part written so far is readable, but truncated.
    #[error("cannot write the page log: {source}")]
    Write { source: io::Error },
    /// Not a page log, or of an unsupported version.
    #[error("{name} is not a page log of version 1: {reason}")]
    NotAPageLog { name: String, reason: String },
    /// A part of a file is damaged.
    #[error("{name}, byte {offset_bytes}: expected {expected}")]
    Damaged {
        name: String,
        /// Start of the damaged part, in bytes.
        offset_bytes: u64,
        expected: String,
    },
    /// A log without its end mark: its writer died or was stopped.
    #[error("{name} is truncated after {records} records")]
    Cut {
        name: String,
        /// Records before the end.
        records: u64,
    },
    /// A record is invalid at its position.
    #[error("{name}, record {number}: {fault}")]
    Record {
        name: String,
        /// Which record, from 1.
        number: u64,
        #[source]
        fault: RecordFault,
    },
    /// The description of the machine in a log or a ring is invalid.
    #[error("{name} describes an invalid machine: {reason}")]
    Description { name: String, reason: String },
    /// The TLB shape is invalid.
    #[error("a TLB cannot have {entries} entries in {ways} ways: the number of sets must be a power of two, and entries at most {max}", max = crate::TlbShape::ENTRIES_MAX)]
    Tlb { entries: u32, ways: u32 },
    /// The capacity of a ring is invalid.
    #[error("a ring cannot have a capacity of {capacity} records: it must be a power of two, at most {max}", max = crate::record::RING_RECORDS_MAX)]
    Capacity {
        /// Requested capacity in records.
        capacity: u64,
    },
    /// The system refused to create or open the ring.
    #[error("cannot set up the ring: {source}")]
    Ring { source: io::Error },
    /// No writer attached to the ring.
    #[error("no writer attached to the ring: was QEMU started with the plugin?")]
    NoWriter,
    /// The ring's positions are inconsistent: its writer is faulty.
    #[error(
        "the ring's writer is at record {head}, the reader at {tail}, and the capacity is {capacity}"
    )]
    Position {
        /// Number of records written, according to the writer.
        head: u64,
        tail: u64,
        /// Capacity of the ring in records.
        capacity: u64,
    },
    /// The source of the references failed.
    #[error(transparent)]
    Source(Box<dyn std::error::Error + Send + Sync>),
    /// More pages than a log can represent.
    #[error("more than {max} pages", max = crate::record::FRAME_MAX)]
    TooManyPages,
}
