//! `plimsoll wss`: the working set of a page log or a trace by each estimator, compared with the truth of the same run.
//!
//! Not here: the evaluation (`plimsoll_observe::wss`).

use std::io::Write;
use std::num::NonZeroU64;

use plimsoll_observe::wss::{self, EstimatorArgs, Origin, Results};
use plimsoll_output::exit::UsageError;
use plimsoll_output::{Format, OutputArgs, bail_usage};
use plimsoll_pagelog::TlbShape;
use plimsoll_pagelog::mmu::Config as MmuConfig;
use plimsoll_plot::Figure as _;

use crate::trace_args::{TraceArgs, is_same_file, reading_bar};
use plimsoll_protocol::curve_size::CurveSize;
use plimsoll_protocol::size::Count;
use plimsoll_report::working_set::WorkingSetReport;

/// Estimate the working set in a page log or a trace.
///
/// TRACE is a page log (`plimsoll run --page-log`) or a trace in any format of `plimsoll mrc`. Every estimator reads the
/// same run, and its result is compared with the pages that were really accessed.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    estimator: EstimatorArgs,
    /// Length of an interval of a trace, in references, such as 10M; a page log has its own [default: 1000000]
    #[arg(long, visible_alias = "mu", value_name = "N")]
    interval: Option<Count>,
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

/// The estimator that draws from the VM's memory.
const SAMPLED: &str = "esx";
/// References of an interval of a trace.
const INTERVAL: Count = Count(NonZeroU64::new(1_000_000).unwrap());
/// Pages that a trace's most recent references are taken to: as many as the plugin's filter has.
const FILTER_PAGES: u32 = 64;

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    args.estimator.check()?;
    if args.steps && !matches!(args.output.format(), Format::Table | Format::Csv) {
        bail_usage!("--steps: only tables and CSV have them");
    }
    let path = &args.trace.trace;
    if args
        .output
        .path()
        .is_some_and(|out| is_same_file(out, path))
    {
        bail_usage!("--out: that is the file to read, which would be lost");
    }
    let (origin, results) = if wss::begins_as_page_log(path) {
        args.page_log()?
    } else {
        args.plain_trace()?
    };
    let name = args.trace.stem();
    WorkingSetReport::new(name, origin, &args.estimator, results, args.steps)
        .write(&args.output, out)
}

impl Args {
    fn page_log(&self) -> anyhow::Result<(Origin, Results)> {
        let path = self.trace.label();
        for (given, option) in [
            (self.interval.is_some(), "--interval"),
            (self.tlb.is_some(), "--tlb"),
            (self.tlb2.is_some(), "--tlb2"),
            (self.memory.is_some(), "--memory"),
            (self.trace.page_bytes.is_some(), "--page-bytes"),
        ] {
            if given {
                bail_usage!("{option}: '{path}' is a page log, which contains that itself");
            }
        }
        if let Some(option) = self.trace.option_given() {
            bail_usage!("{option}: '{path}' is a page log, not a trace");
        }
        wss::of_log(&self.trace.trace, self.whole, &self.estimator)
    }

    fn plain_trace(&self) -> anyhow::Result<(Origin, Results)> {
        if self.whole {
            bail_usage!(
                "--whole: '{}' is no page log; a trace is always analysed whole",
                self.trace.label()
            );
        }
        let config = MmuConfig {
            tlb: self.tlb.unwrap_or_default(),
            tlb2: self.tlb2,
            filter_pages: Some(FILTER_PAGES),
            interval_references: None,
        };
        let page_size = self.trace.page_size();
        let memory = self.memory.map(|memory| memory.to_pages(page_size));
        let memory = memory.transpose();
        let memory = memory.map_err(|error| UsageError(format!("--memory: {error}")))?;
        if memory.is_some() && !self.estimator.wants(SAMPLED) {
            bail_usage!("--memory: only --estimator {SAMPLED} takes it");
        }
        let Count(interval) = self.interval.unwrap_or(INTERVAL);
        let trace = self.trace.open()?;
        let mut bar = reading_bar(trace.progress());
        let of = (page_size, memory);
        wss::of_trace(trace, &config, interval, of, &self.estimator, |accesses| {
            bar.update(accesses);
        })
    }
}
