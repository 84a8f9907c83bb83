//! `plimsoll report wss`: working sets over time, or one VM's by every way there is.

use std::io::Write;

use plimsoll_output::{Format, OutputArgs};
use plimsoll_plot::Figure as _;
use plimsoll_protocol::size::Interval;
use plimsoll_protocol::subject::Subject;
use plimsoll_report::history::Histories;

use super::{VmArgs, compare};

/// Default number of points in tables, and in other outputs.
const TABLE_POINTS: u16 = 24;
const POINTS: u16 = 500;

/// Working sets over time, with sizes and misses; or, with --compare, one VM's by every available estimator.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    of: VmArgs,
    /// Period covered
    #[arg(long, value_name = "TIME", default_value = "1h")]
    since: Interval,
    /// Maximum number of points in time per VM, at most 2000 [default: 24 in a table, else 500]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=2000))]
    points: Option<u16>,
    /// Measure the running VM now by every available estimator, without the daemon: results, costs and times
    #[arg(long, requires = "vm", conflicts_with_all = ["since", "points"])]
    compare: bool,
    #[command(flatten)]
    how: compare::ComparisonArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let format = args.output.format();
    if let (true, Some(vm)) = (args.compare, &args.of.vm) {
        return compare::run(vm, &args.how, &args.of.socket, &args.output, out);
    }
    let daemon = args.of.daemon()?;
    let since_unix_ms = daemon.time_before(args.since)?;
    let points = args.points.unwrap_or(match format {
        Format::Table => TABLE_POINTS,
        _ => POINTS,
    });
    let mut histories = Vec::new();
    for key in args.of.keys_with_groups(&daemon)? {
        histories.push(daemon.ask_by(&key, |client, key| {
            Subject::ask_history(client, key, since_unix_ms, points.into())
        })?);
    }
    Histories(histories).write(&args.output, out)
}
