//! The working set of a page log or a trace by each estimator, compared with the truth of the same run.
//!
//! A page log contains the page walks of a machine and optionally its references (crate `plimsoll-pagelog`). A plain
//! trace is first converted by a model of TLB and page tables, with one instruction per reference. The records are read
//! once and passed to every selected estimator; PRL and PML receive them through a model of their logging buffers.

mod analysis;
mod findings;
mod options;
mod steps;

use std::fs::File;
use std::io::Read;
use std::num::NonZeroU64;
use std::path::Path;

use anyhow::Context;
use plimsoll_flow::{PageCount, PageSize, Source};
use plimsoll_output::printable_path;
use plimsoll_pagelog::log::{LogReader, is_page_log};
use plimsoll_pagelog::mmu::{Config, EmulatedRecords};
use plimsoll_pagelog::record::Record;
use plimsoll_pagelog::{Description, PageLogError, RecordSource};
use plimsoll_protocol::size::ByteSize;

pub(crate) use analysis::page_walked;
pub use analysis::{LoggingEffect, Results};
pub use findings::Finding;
pub use options::EstimatorArgs;
pub use steps::{Step, Steps};

use analysis::Analysis;

/// Origin of the records of a run.
#[derive(Debug)]
pub struct Origin {
    /// "page log" or "trace".
    pub kind: &'static str,
    /// What an interval counts: "instructions" or "references".
    pub unit: &'static str,
    /// Page size of the results: that of the TLB.
    pub page_size: PageSize,
    /// Description of the machine, as a phrase.
    pub machine: String,
    /// Length of an interval, in `unit`.
    pub interval: NonZeroU64,
    /// Memory that esx draws from, if known.
    pub memory: Option<PageCount>,
    /// Number of the curves' pages in one page of the results.
    pub frames_per_page: u64,
}

/// The instructions in an interval of a log.
///
/// # Errors
///
/// If it has no intervals.
pub(crate) fn interval_of(description: &Description, path: &Path) -> anyhow::Result<NonZeroU64> {
    description.interval_instructions.with_context(|| {
        format!(
            "'{}' has no intervals: it was recorded without interval_instructions; `run --page-log` gives it, and `--interval 10M` sets their length",
            printable_path(path)
        )
    })
}

/// Evaluates a page log: the part between the guest's marks, or the `whole` log.
///
/// # Errors
///
/// The log cannot be read, or has no intervals. A truncated log is evaluated up to its last valid record
/// ([`Results::cut`]).
pub fn of_log(path: &Path, whole: bool, args: &EstimatorArgs) -> anyhow::Result<(Origin, Results)> {
    let mut log = LogReader::open(path)?;
    let description = log.description().clone();
    let interval = interval_of(&description, path)?;
    let page_size = description.tlb_page;
    let tlb = description
        .tlb
        .map_or("no TLB".to_owned(), |tlb| format!("TLB {tlb}"));
    let tlb = match page_size {
        PageSize::FOUR_KIB => tlb,
        other => format!("{tlb} of {} pages", ByteSize(other.bytes())),
    };
    let vcpus = match description.vcpus {
        1 => "1 vCPU".to_owned(),
        count => format!("{count} vCPUs"),
    };
    let origin = Origin {
        kind: "page log",
        unit: "instructions",
        page_size,
        machine: format!("{vcpus}, {tlb}, emulated (TCG)"),
        interval,
        memory: Some(PageCount::from_bytes(description.ram_bytes, page_size)),
        frames_per_page: page_size.bytes() / PageSize::FOUR_KIB.bytes(),
    };
    let mut analysis = Analysis::new(args, &description, args.settings(page_size, origin.memory));
    let cut = read(&mut log, |records| analysis.take(records, !whole))
        .context("nothing was estimated")?;
    let mut results = analysis.finish();
    results.totals = log.totals();
    results.cut = cut;
    Ok((origin, results))
}

/// Evaluates a trace by a model of a machine with these TLBs, whose `interval` is in references. `progress` receives
/// the number of references so far.
///
/// # Errors
///
/// Why the trace cannot be read, or that it has pages outside the memory.
pub fn of_trace<S: Source>(
    trace: S,
    config: &Config,
    interval: NonZeroU64,
    (page_size, memory): (PageSize, Option<PageCount>),
    args: &EstimatorArgs,
    mut progress: impl FnMut(u64),
) -> anyhow::Result<(Origin, Results)>
where
    EmulatedRecords<S>: RecordSource,
{
    let config = Config {
        interval_references: Some(interval),
        ..*config
    };
    let mut source = EmulatedRecords::new(trace, &config)?;
    let second = config
        .tlb2
        .map_or(String::new(), |tlb| format!(" and {tlb}"));
    let origin = Origin {
        kind: "trace",
        unit: "references",
        page_size,
        machine: format!(
            "TLB {}{second} modelled, an instruction a reference",
            config.tlb
        ),
        interval,
        memory,
        frames_per_page: 1,
    };
    let description = source.description().clone();
    let mut analysis = Analysis::new(args, &description, args.settings(page_size, memory));
    read(&mut source, |records| {
        analysis.take(records, false);
        progress(analysis.accesses());
    })
    .context("nothing was estimated")?;
    anyhow::ensure!(
        analysis.accesses() > 0,
        "nothing was observed: the trace has no references"
    );
    let results = analysis.finish();
    if let (Some(page), Some(memory)) = (results.highest_page, memory) {
        anyhow::ensure!(
            page.0 < memory.0,
            "--memory: the trace uses page {page}, but in a memory of {memory} pages the last is page {}; nothing was estimated",
            memory.0.saturating_sub(1)
        );
    }
    Ok((origin, results))
}

/// Passes the records of a source to `take`. Returns the reason if the log is truncated.
///
/// # Errors
///
/// Why it cannot be read.
pub(crate) fn read(
    source: &mut dyn RecordSource,
    mut take: impl FnMut(&[Record]),
) -> anyhow::Result<Option<String>> {
    let mut batch = Vec::new();
    loop {
        match source.next_batch(&mut batch) {
            Ok(true) => take(&batch),
            Ok(false) => return Ok(None),
            // A run that was killed leaves such a log; its records are valid.
            Err(error @ PageLogError::Cut { .. }) => {
                take(&batch);
                return Ok(Some(error.to_string()));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether a regular file is a page log according to its first bytes; a pipe is not read.
pub fn begins_as_page_log(path: &Path) -> bool {
    let mut head = [0; 8];
    path.is_file()
        && File::open(path).is_ok_and(|mut file| file.read_exact(&mut head).is_ok())
        && is_page_log(&head)
}
