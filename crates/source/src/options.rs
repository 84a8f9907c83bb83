//! Options of reading a trace, and the formats that use each option.

use std::fmt;

use plimsoll_flow::PageSize;

use crate::{BlockEvent, Column, Format};

/// Options of reading a trace. By default everything is inferred from the trace itself.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The format; `None` infers it from the file's name, then from its first bytes.
    pub format: Option<Format>,
    /// Page size by which addresses and offsets are converted to pages (`lackey` and block I/O).
    pub page_size: PageSize,
    /// The page column (`csv`, `parquet`); `None` selects the one named `page`, in `csv` also
    /// the only one.
    pub page_column: Option<Column>,
    /// The column of keys, any text, instead of a page column (`csv`).
    pub key_column: Option<Column>,
    /// The column that distinguishes reads from writes (`csv`, `parquet`); `None` selects the one named `op`, if
    /// there is one (in `parquet`, of strings).
    pub op_column: Option<Column>,
    /// The column of the objects' sizes in bytes (`csv`); `None` selects the one named `size`, if there is one.
    pub size_column: Option<Column>,
    /// The column of times in seconds (`csv`); `None` selects the one named `time`, if there is one.
    pub time_column: Option<Column>,
    /// The only row groups to read, by their numbers from 0 (`parquet`).
    pub row_groups: Option<Vec<usize>>,
    /// Whether instruction fetches count, as reads (`lackey`).
    pub instructions: bool,
    /// The only device whose requests count, by its name in a trace of block requests; `None` reads all devices, with
    /// disjoint page numbers. A trace in which it does not occur ends with
    /// [`SourceError::NoSuchDevice`](crate::SourceError::NoSuchDevice).
    pub device: Option<String>,
    /// The event of a request that counts as its reference (`blkparse`).
    pub block_event: Option<BlockEvent>,
    /// Whether batches have the references' times.
    pub times: bool,
    /// Whether batches have the referenced objects' sizes.
    pub sizes: bool,
    /// The groups whose numbers batches have, if any.
    pub groups: Option<Grouping>,
}

/// What divides the references of a trace into groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grouping {
    /// The device, volume, tenant or client; pages are then numbered within each device, as if it was read alone.
    Device,
    /// The request of several references; groups are numbered in the order of the requests, modulo 2^32.
    Request,
}

/// An option of [`Options`] that not every format uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceOption {
    /// [`Options::page_column`].
    PageColumn,
    /// [`Options::key_column`].
    KeyColumn,
    /// [`Options::op_column`].
    OpColumn,
    /// [`Options::size_column`].
    SizeColumn,
    /// [`Options::time_column`].
    TimeColumn,
    /// [`Options::row_groups`].
    RowGroups,
    /// [`Options::instructions`].
    Instructions,
    /// [`Options::device`].
    Device,
    /// [`Options::block_event`].
    Event,
    /// [`Options::times`].
    Times,
    /// [`Options::sizes`].
    Sizes,
    /// [`Options::groups`] of devices.
    ByDevice,
    /// [`Options::groups`] of requests.
    ByRequest,
}

impl TraceOption {
    /// Every option.
    pub const ALL: [Self; 13] = [
        Self::PageColumn,
        Self::KeyColumn,
        Self::OpColumn,
        Self::SizeColumn,
        Self::TimeColumn,
        Self::RowGroups,
        Self::Instructions,
        Self::Device,
        Self::Event,
        Self::Times,
        Self::Sizes,
        Self::ByDevice,
        Self::ByRequest,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::PageColumn => "page-column",
            Self::KeyColumn => "key-column",
            Self::OpColumn => "op-column",
            Self::SizeColumn => "size-column",
            Self::TimeColumn => "time-column",
            Self::RowGroups => "row-groups",
            Self::Instructions => "instructions",
            Self::Device => "device",
            Self::Event => "event",
            Self::Times => "every",
            Self::Sizes => "object-sizes",
            Self::ByDevice => "by",
            Self::ByRequest => "prefix",
        }
    }

    /// Whether commands take it; others are for programs that read traces.
    pub fn is_of_commands(self) -> bool {
        self != Self::RowGroups
    }

    pub(crate) fn is_given(self, options: &Options) -> bool {
        match self {
            Self::PageColumn => options.page_column.is_some(),
            Self::KeyColumn => options.key_column.is_some(),
            Self::OpColumn => options.op_column.is_some(),
            Self::SizeColumn => options.size_column.is_some(),
            Self::TimeColumn => options.time_column.is_some(),
            Self::RowGroups => options.row_groups.is_some(),
            Self::Instructions => options.instructions,
            Self::Device => options.device.is_some(),
            Self::Event => options.block_event.is_some(),
            Self::Times => options.times,
            Self::Sizes => options.sizes,
            Self::ByDevice => options.groups == Some(Grouping::Device),
            Self::ByRequest => options.groups == Some(Grouping::Request),
        }
    }
}

impl fmt::Display for TraceOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
