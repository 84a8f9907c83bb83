//! `plimsoll hcache stat`: what a store holds, for whom, and what other capacities would bring.

use std::io::Write;

use anyhow::Context as _;
use clap::ValueEnum;

use super::report::Report;
use super::{SocketArgs, TIMEOUT, metrics, table, told};
use crate::curve_json::SCHEMA;
use crate::watch::watch;
use plimsoll_output::bail_usage;

/// Show the contents of a store by client, and predictions for other capacities.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArgs,
    /// Output format
    #[arg(short = 'o', long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    output: Format,
    /// Repeat at this interval, with rates, until Ctrl-C
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "1",
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    watch: Option<u64>,
    /// Show each client's curve: its hit ratio at other sizes of its share
    #[arg(long)]
    curves: bool,
}

/// Output formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Columns for people to read
    Table,
    /// JSON with "schema": 1, one object per line
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
        return Ok(out.write_all(&form(args, &ask(args)?, None)?)?);
    };
    let is_table = args.output == Format::Table;
    let between = |report: &Report, earlier: &Report| form(args, report, Some(earlier));
    watch(seconds, is_table, || ask(args), between, out)
}

fn ask(args: &Args) -> anyhow::Result<Report> {
    let text = plimsoll_ring::stats(&args.socket.socket, TIMEOUT).map_err(told)?;
    let mut report: Report =
        serde_json::from_str(&text).context("unexpected answer of the server")?;
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

fn form(args: &Args, report: &Report, earlier: Option<&Report>) -> anyhow::Result<Vec<u8>> {
    Ok(match args.output {
        Format::Table => table::text(report, earlier, args.curves).into_bytes(),
        Format::Json => (serde_json::to_string(report)? + "\n").into_bytes(),
        Format::Metrics => metrics::text(report).into_bytes(),
    })
}
