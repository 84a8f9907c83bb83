//! Why a page log cannot be read or written.

use std::io;
use std::path::PathBuf;

use plimsoll_flow::PageNumber;

use crate::record::NotARecord;

/// Why a record is invalid at its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordFault {
    /// Bits without a meaning are set.
    #[error(transparent)]
    NotARecord(#[from] NotARecord),
    /// A vCPU that the machine does not have.
    #[error("it belongs to vCPU {vcpu}, but the machine has only {vcpus}")]
    Vcpu {
        /// The vCPU.
        vcpu: u8,
        /// How many there are.
        vcpus: u32,
    },
    /// A page that is not RAM.
    #[error("page frame {frame} is outside the machine's RAM")]
    Frame {
        /// The page.
        frame: PageNumber,
    },
    /// A clock that goes back.
    #[error("vCPU {vcpu} has run {before} instructions, but its clock shows {instructions}")]
    Clock {
        /// The vCPU.
        vcpu: u8,
        /// Instructions that the records before add up to.
        before: u64,
        /// Instructions by the clock record.
        instructions: u64,
    },
    /// An interval out of sequence.
    #[error("interval {number} ends where interval {expected} is expected")]
    Interval {
        /// Its number.
        number: u64,
        /// The number that is next.
        expected: u64,
    },
    /// Records after the end, or an end inside a block of a file.
    #[error("the end of the log is followed by other records")]
    End,
}

/// Why a page log cannot be read or written. Records before an error are returned; after it a source is at its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageLogError {
    /// A file cannot be opened; nothing was read.
    #[error("cannot open '{}': {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file cannot be created.
    #[error("cannot create '{}': {source}", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Reading stopped.
    #[error("{name}, byte {offset_bytes}: cannot continue reading: {source}")]
    Read {
        /// The log.
        name: String,
        /// Bytes that were read before.
        offset_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// Writing failed: the part written so far can be read, but is truncated.
    #[error("cannot write the page log: {source}")]
    Write {
        /// The system's error.
        source: io::Error,
    },
    /// Not a page log, or of an unsupported version.
    #[error("{name} is not a page log of version 1: {reason}")]
    NotAPageLog {
        /// The log.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A part of a file is damaged.
    #[error("{name}, byte {offset_bytes}: expected {expected}")]
    Damaged {
        /// The log.
        name: String,
        /// Where the part begins.
        offset_bytes: u64,
        /// What should be there.
        expected: String,
    },
    /// A log without its end mark: its writer died or was stopped.
    #[error("{name} is truncated after {records} records")]
    Cut {
        /// The log.
        name: String,
        /// Records before the end.
        records: u64,
    },
    /// A record is invalid at its position.
    #[error("{name}, record {number}: {fault}")]
    Record {
        /// The log.
        name: String,
        /// Which record, from 1.
        number: u64,
        /// What is wrong.
        #[source]
        fault: RecordFault,
    },
    /// The description of the machine in a log or a ring is invalid.
    #[error("{name} describes an invalid machine: {reason}")]
    Description {
        /// The log.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// An invalid TLB shape.
    #[error("a TLB cannot have {entries} entries in {ways} ways: the number of sets must be a power of two, and entries at most {max}", max = crate::TlbShape::ENTRIES_MAX)]
    Tlb {
        /// Entries.
        entries: u32,
        /// Ways.
        ways: u32,
    },
    /// An invalid capacity of a ring.
    #[error("a ring cannot have a capacity of {capacity} records: it must be a power of two, at most {max}", max = crate::ring::CAPACITY_MAX)]
    Capacity {
        /// Records.
        capacity: u64,
    },
    /// The system refused the ring or access to it.
    #[error("cannot set up the ring: {source}")]
    Ring {
        /// The system's error.
        source: io::Error,
    },
    /// No writer attached to the ring.
    #[error("no writer attached to the ring: was QEMU started with the plugin?")]
    NoWriter,
    /// The ring's positions are inconsistent: its writer is faulty.
    #[error(
        "the ring's writer is at record {head}, the reader at {tail}, and the capacity is {capacity}"
    )]
    Position {
        /// Records written, according to the writer.
        head: u64,
        /// Records read.
        tail: u64,
        /// Records the ring holds.
        capacity: u64,
    },
    /// The source of the references failed.
    #[error(transparent)]
    Source(Box<dyn std::error::Error + Send + Sync>),
    /// More pages than a log can represent.
    #[error("more than {max} pages", max = crate::record::FRAME_MAX)]
    TooManyPages,
}
