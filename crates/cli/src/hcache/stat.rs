//! `plimsoll hcache stat`: what a store holds, for whom, and what other capacities would bring.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::ValueEnum;

use super::report::Report;
use super::{SocketArgs, TIMEOUT, metrics, table, told};
use crate::attach::stop_flag;
use crate::bail_usage;
use crate::curve_json::SCHEMA;

/// Show what a store holds, for whom, and what more or less capacity would bring.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArgs,
    /// Form of the result
    #[arg(short = 'o', long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    output: Format,
    /// Show it again and again, with rates, until Ctrl-C
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "1",
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    watch: Option<u64>,
    /// Give each client's curve: the hit ratio if its share were of another size
    #[arg(long)]
    curves: bool,
}

/// Forms of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Columns for a reader
    Table,
    /// JSON with "schema": 1, an object a line
    Json,
    /// OpenMetrics text, for Prometheus
    Metrics,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if args.output == Format::Metrics && (args.watch.is_some() || args.curves) {
        bail_usage!("-o metrics is one exposition: it goes without --watch and --curves");
    }
    let Some(seconds) = args.watch else {
        let report = ask(args)?;
        return show(args, &report, None, out);
    };
    let stop = stop_flag()?;
    let interval = Duration::from_secs(seconds);
    let clears = args.output == Format::Table && std::io::stdout().is_terminal();
    let mut earlier = ask(args)?;
    while sleep(interval, &stop) {
        let report = ask(args)?;
        if clears {
            write!(out, "\x1b[H\x1b[2J")?;
        }
        show(args, &report, Some(&earlier), out)?;
        if args.output == Format::Table && !clears {
            writeln!(out)?;
        }
        out.flush()?;
        earlier = report;
    }
    Ok(())
}

fn ask(args: &Args) -> anyhow::Result<Report> {
    let text = plimsoll_ring::stats(&args.socket.socket, TIMEOUT).map_err(told)?;
    let mut report: Report =
        serde_json::from_str(&text).context("the server says what this program does not know")?;
    anyhow::ensure!(
        report.schema == SCHEMA,
        "the server speaks schema {}, this program {SCHEMA}",
        report.schema
    );
    if !args.curves {
        for client in &mut report.clients {
            client.curve = None;
        }
    }
    Ok(report)
}

fn show(
    args: &Args,
    report: &Report,
    earlier: Option<&Report>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    match args.output {
        Format::Table => out.write_all(table::text(report, earlier, args.curves).as_bytes())?,
        Format::Json => writeln!(out, "{}", serde_json::to_string(report)?)?,
        Format::Metrics => out.write_all(metrics::text(report).as_bytes())?,
    }
    Ok(())
}

/// Sleeps for a while. Returns whether nobody asked to stop.
pub(crate) fn sleep(interval: Duration, stop: &AtomicBool) -> bool {
    let end = Instant::now() + interval;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if stop.load(Ordering::Relaxed) || left.is_zero() {
            return !stop.load(Ordering::Relaxed);
        }
        thread::sleep(left.min(Duration::from_millis(50)));
    }
}
