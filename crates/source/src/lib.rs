//! Sources of references: recorded traces and synthetic workloads.
//!
//! A [`Source`](plimsoll_flow::Source) returns references batch by batch. [`open`] reads a trace from
//! a file in any of the [`Format`]s, plain or compressed; [`create`] writes one;
//! [`synthetic`] generates references whose miss-ratio curve is known in closed form.
//!
//! Everything is streamed: memory use does not depend on the length of a trace, nor on
//! sizes that a trace claims (`docs/formats.md` lists the limits). The
//! exception is writing `oracle-general`, which stores each page's next reference.
//!
//! Not here: tracing a running VM (crate `trap`), and any algorithm
//! that uses more than one reference at a time.
#![forbid(unsafe_code)]

mod aligned;
mod blkparse;
mod bytes;
mod bytes_at;
mod compression;
mod contained;
mod csv;
mod details;
mod devices;
mod disk_text;
#[cfg(test)]
mod drained;
mod error;
mod format;
mod ids;
mod lackey;
mod lcs;
mod lines;
mod mooncake;
#[cfg(feature = "s3")]
mod object;
mod options;
mod oracle_general;
mod parquet;
mod parts;
mod plimsoll;
mod progress;
mod requests;
mod row;
mod spans;
mod summary;
pub mod synthetic;
mod trace;
mod twitter;
mod vscsi;
mod writer;
mod writing;

pub use blkparse::BlockEvent;
pub use compression::Compression;
pub use csv::Column;
pub use error::SourceError;
pub use format::Format;
pub use options::{Grouping, Options, TraceOption};
pub use parts::parts;
pub use progress::Progress;
pub use summary::TraceSummary;
pub use trace::{Trace, open, read};
pub use writer::{TraceWriter, WriteOptions, create, write};
