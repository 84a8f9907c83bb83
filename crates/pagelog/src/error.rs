//! Why a page log cannot be read or written.

use std::io;
use std::path::PathBuf;

use plimsoll_flow::PageNumber;

use crate::record::NotARecord;

/// Why a record cannot stand where it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordFault {
    /// Bits without a meaning are set.
    #[error(transparent)]
    NotARecord(#[from] NotARecord),
    /// A vCPU that the machine does not have.
    #[error("it is of vCPU {vcpu}, but the machine has {vcpus}")]
    Vcpu {
        /// The vCPU.
        vcpu: u8,
        /// How many there are.
        vcpus: u32,
    },
    /// A page that is not RAM.
    #[error("page frame {frame} lies outside the machine's RAM")]
    Frame {
        /// The page.
        frame: PageNumber,
    },
    /// A clock that goes back.
    #[error("vCPU {vcpu} has run {before} instructions, its clock says {instructions}")]
    Clock {
        /// The vCPU.
        vcpu: u8,
        /// Instructions that the records before add up to.
        before: u64,
        /// What the clock says.
        instructions: u64,
    },
    /// An interval out of its turn.
    #[error("interval {number} ends where interval {expected} should")]
    Interval {
        /// Its number.
        number: u64,
        /// The number that is next.
        expected: u64,
    },
    /// Records after the end, or an end inside a block of a file.
    #[error("the end of the log stands before other records")]
    End,
}

/// Why a page log cannot be read or written. Records before a fault are handed out; after it a source is at its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageLogError {
    /// A file cannot be opened; nothing was read.
    #[error("cannot open '{}': {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file cannot be created.
    #[error("cannot create '{}': {source}", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Reading stopped.
    #[error("{name}, byte {offset_bytes}: cannot read on: {source}")]
    Read {
        /// The log.
        name: String,
        /// Bytes that were read before.
        offset_bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// Writing stopped: what was written so far can be read, but is cut short.
    #[error("cannot write the page log: {source}")]
    Write {
        /// What the system said.
        source: io::Error,
    },
    /// The bytes are no page log of a version that is known.
    #[error("{name} is no page log of version 1: {reason}")]
    NotAPageLog {
        /// The log.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A part of a file is not what it must be.
    #[error("{name}, byte {offset_bytes}: expected {expected}")]
    Damaged {
        /// The log.
        name: String,
        /// Where the part begins.
        offset_bytes: u64,
        /// What should be there.
        expected: String,
    },
    /// A log ends before its end: who wrote it died or was stopped.
    #[error("{name} is cut short after {records} records")]
    Cut {
        /// The log.
        name: String,
        /// Records that came.
        records: u64,
    },
    /// A record cannot stand where it stands.
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
    /// A machine that cannot be: what a log or a ring says of it.
    #[error("{name} describes no machine: {reason}")]
    Description {
        /// The log.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A TLB that cannot be.
    #[error("no TLB has {entries} entries in {ways} ways: the sets must be a power of two, the entries at most {max}", max = crate::TlbShape::ENTRIES_MAX)]
    Tlb {
        /// Entries.
        entries: u32,
        /// Ways.
        ways: u32,
    },
    /// A ring of that many records cannot be.
    #[error("a ring cannot hold {capacity} records: give a power of two, at most {max}", max = crate::ring::CAPACITY_MAX)]
    Capacity {
        /// Records.
        capacity: u64,
    },
    /// The system gives no ring, or no access to it.
    #[error("cannot set up the ring: {source}")]
    Ring {
        /// What the system said.
        source: io::Error,
    },
    /// Nobody began to write into the ring.
    #[error("nothing writes into the ring: is QEMU started with the plugin?")]
    NoWriter,
    /// The ring's positions cannot be: its writer is broken.
    #[error("the ring's writer stands at record {head}, the reader at {tail} of {capacity}")]
    Position {
        /// Records written, as the writer says.
        head: u64,
        /// Records read.
        tail: u64,
        /// Records the ring holds.
        capacity: u64,
    },
    /// The source of the references failed.
    #[error(transparent)]
    Source(Box<dyn std::error::Error + Send + Sync>),
    /// More pages than a log can number.
    #[error("more than {max} pages", max = crate::record::FRAME_MAX)]
    TooManyPages,
}
