//! Where references come from: recorded traces and synthetic workloads.
//!
//! A [`Source`](plimsoll_flow::Source) hands out references batch by batch. [`open`] reads a trace from
//! a file in any of the [`Format`]s, plain or compressed; [`create`] writes one;
//! [`synthetic`] makes references whose miss-ratio curve is known in closed form.
//!
//! Everything streams: memory does not grow with the length of a trace, nor with
//! anything a trace says about itself (`docs/formats.md` lists the bounds). The
//! exception is writing `oracle-general`, which stores the future.
//!
//! Not here: sources that watch a running VM (crate `trap`), and any algorithm
//! that looks at more than one reference at a time.
#![forbid(unsafe_code)]

mod blkparse;
mod bytes;
mod compression;
mod csv;
mod disk_csv;
#[cfg(test)]
mod drained;
mod error;
mod format;
mod ids;
mod lackey;
mod lines;
mod oracle_general;
mod parquet;
mod plimsoll;
mod progress;
mod requests;
mod spans;
pub mod synthetic;
mod trace;
mod vscsi;
mod writer;

pub use blkparse::BlockEvent;
pub use compression::Compression;
pub use csv::Column;
pub use error::SourceError;
pub use format::Format;
pub use progress::Progress;
pub use trace::{Options, Trace, open, read};
pub use writer::{TraceWriter, WriteOptions, create, write};
