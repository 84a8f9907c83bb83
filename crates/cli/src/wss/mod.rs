//! `plimsoll wss`: the working set of a page log or a trace by each estimator, compared with the truth of the same run.
//!
//! A page log tells the walks of a machine and, if asked for, its references (crate `plimsoll-pagelog`). A plain trace goes
//! through a model of TLB and page tables first, one instruction a reference. The records are read once, and go to
//! every estimator asked for: those of PRL and PML by way of a model of their logging buffers.

mod analysis;
mod options;
mod report;
mod steps;

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU64;
use std::path::Path;

use anyhow::Context;
use plimsoll_estimator::registry::MethodOptions;
use plimsoll_flow::{PageCount, PageSize};
use plimsoll_pagelog::log::{LogReader, is_page_log};
use plimsoll_pagelog::mmu::{Config as MmuConfig, Emulated};
use plimsoll_pagelog::{PageLogError, RecordSource, TlbShape};

use crate::mrc::CurveSize;
use crate::trace_args::{TraceArgs, reading_bar};
use analysis::{Analysis, Results};
use options::EstimatorArgs;
use plimsoll_output::{OutputArgs, bail_usage};
use plimsoll_protocol::size::ByteSize;
use report::Report;

/// Estimate the working set in a page log or a trace.
///
/// FILE is a page log (`plimsoll run --page-log`) or a trace in any format of `plimsoll mrc`. Every estimator reads the
/// same run, and its result is compared with the pages that were really accessed.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    estimator: EstimatorArgs,
    /// Length of an interval of a trace, in references; a page log has its own [default: 1000000]
    #[arg(long, visible_alias = "mu", value_name = "N")]
    interval: Option<NonZeroU64>,
    /// TLB of the model for traces, ENTRIESxWAYS [default: 64x4]
    #[arg(long, value_name = "SHAPE")]
    tlb: Option<TlbShape>,
    /// Second level of that TLB [default: none]
    #[arg(long, value_name = "SHAPE")]
    tlb2: Option<TlbShape>,
    /// Memory size of the VM that made a trace, for esx: pages, or bytes with a unit
    #[arg(long, value_name = "SIZE")]
    memory: Option<CurveSize>,
    /// Analyse the whole page log, not only the part between the guest's marks
    #[arg(long)]
    whole: bool,
    /// Show the state at the end of each interval instead of the final results (table, csv)
    #[arg(long)]
    steps: bool,
    #[command(flatten)]
    output: OutputArgs,
}

/// References of an interval of a trace.
const INTERVAL: NonZeroU64 = NonZeroU64::new(1_000_000).unwrap();
/// Pages that a trace's most recent references are taken to: as many as the plugin's filter has.
const FILTER_PAGES: u32 = 64;

/// What is said of where the records came from.
struct Origin {
    /// Such as "page log".
    kind: &'static str,
    /// What an interval counts.
    unit: &'static str,
    /// What is counted: pages of the TLB.
    page_size: PageSize,
    /// The machine, for a reader.
    machine: String,
    interval: NonZeroU64,
    /// What esx draws from, if known.
    memory: Option<PageCount>,
    /// Pages of a curve that make one of these.
    frames_per_page: u64,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// A [`UsageError`](plimsoll_output::exit::UsageError) for options that do not go together; what the log, the trace or the output
/// file says; and that there was nothing to look at.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let path = &args.trace.trace;
    if args.output.path().is_some_and(|out| is_same(out, path)) {
        bail_usage!("--out: that is the file to read, which would be lost");
    }
    let (origin, results) = if begins_as_page_log(path) {
        args.page_log()?
    } else {
        args.plain_trace()?
    };
    let report = Report::new(args.trace.stem(), origin, &args.estimator, results);
    args.output
        .write(&report.to(args.output.format(), args.steps)?, out)
}

impl Args {
    fn page_log(&self) -> anyhow::Result<(Origin, Results)> {
        let path = self.trace.trace.display();
        for (given, option) in [
            (self.interval.is_some(), "--interval"),
            (self.tlb.is_some(), "--tlb"),
            (self.tlb2.is_some(), "--tlb2"),
            (self.memory.is_some(), "--memory"),
            (self.trace.format.is_some(), "--format"),
        ] {
            if given {
                bail_usage!("{option}: '{path}' is a page log, which contains that itself");
            }
        }
        let mut log = LogReader::open(&self.trace.trace)?;
        let description = log.description().clone();
        let Some(interval) = description.interval_instructions else {
            anyhow::bail!(
                "'{path}' has no intervals: it was recorded without interval_instructions"
            );
        };
        let page_size = description.tlb_page;
        let tlb = description
            .tlb
            .map_or("no TLB".to_owned(), |tlb| format!("TLB {tlb}"));
        let tlb = match page_size {
            PageSize::FOUR_KIB => tlb,
            other => format!("{tlb} of {} pages", ByteSize(other.bytes())),
        };
        let origin = Origin {
            kind: "page log",
            unit: "instructions",
            page_size,
            machine: format!("{}, {tlb}, emulated (TCG)", vcpus(description.vcpus)),
            interval,
            memory: Some(PageCount::from_bytes(description.ram_bytes, page_size)),
            frames_per_page: page_size.bytes() / PageSize::FOUR_KIB.bytes(),
        };
        let mut analysis = Analysis::new(&self.estimator, &description, self.methods(&origin));
        let marked = !self.whole;
        let cut = read(&mut log, |records| analysis.take(records, marked))?;
        let mut results = analysis.finish();
        results.totals = log.totals();
        results.cut = cut;
        Ok((origin, results))
    }

    fn plain_trace(&self) -> anyhow::Result<(Origin, Results)> {
        let interval = self.interval.unwrap_or(INTERVAL);
        let config = MmuConfig {
            tlb: self.tlb.unwrap_or_default(),
            tlb2: self.tlb2,
            filter_pages: Some(FILTER_PAGES),
            interval_references: Some(interval),
        };
        let trace = self.trace.open()?;
        let mut bar = reading_bar(trace.progress());
        let mut source = Emulated::new(trace, &config)?;
        let page_size = self.trace.page_bytes;
        let second = self.tlb2.map_or(String::new(), |tlb| format!(" and {tlb}"));
        let origin = Origin {
            kind: "trace",
            unit: "references",
            page_size,
            machine: format!(
                "TLB {}{second} modelled, an instruction a reference",
                config.tlb
            ),
            interval,
            memory: self.memory.map(|memory| memory.to_pages(page_size)),
            frames_per_page: 1,
        };
        let description = source.description().clone();
        let mut analysis = Analysis::new(&self.estimator, &description, self.methods(&origin));
        read(&mut source, |records| {
            analysis.take(records, false);
            bar.update(analysis.accesses());
        })?;
        Ok((origin, analysis.finish()))
    }

    fn methods(&self, origin: &Origin) -> MethodOptions {
        self.estimator.methods(origin.page_size, origin.memory)
    }
}

/// Hands the records of a source on to its end. Returns why it ended early, if it was cut short.
fn read(
    source: &mut dyn RecordSource,
    mut take: impl FnMut(&[plimsoll_pagelog::record::Record]),
) -> anyhow::Result<Option<String>> {
    let mut batch = Vec::new();
    loop {
        match source.next_batch(&mut batch) {
            Ok(true) => take(&batch),
            Ok(false) => return Ok(None),
            // A run that was killed leaves such a log; what it has is as good as that of any other.
            Err(error @ PageLogError::Cut { .. }) => {
                take(&batch);
                return Ok(Some(error.to_string()));
            }
            Err(error) => return Err(error).context("nothing was estimated"),
        }
    }
}

fn vcpus(count: u32) -> String {
    match count {
        1 => "1 vCPU".to_owned(),
        count => format!("{count} vCPUs"),
    }
}

/// Whether an ordinary file is a page log by its first bytes; a pipe is not looked into.
fn begins_as_page_log(path: &Path) -> bool {
    let mut head = [0; 8];
    path.is_file()
        && File::open(path).is_ok_and(|mut file| file.read_exact(&mut head).is_ok())
        && is_page_log(&head)
}

fn is_same(one: &Path, other: &Path) -> bool {
    let canonical = |path: &Path| path.canonicalize().ok().filter(|path| path.is_file());
    canonical(one).is_some_and(|one| canonical(other) == Some(one))
}
