//! `plimsoll report rightsize`: the smallest size of each VM within its limit, and the memory saved.

use std::io::Write;

use plimsoll_output::TextFormatArg;
use plimsoll_protocol::size::Interval;
use plimsoll_report::rightsize::{Rightsizes, csv_over_time, text_over_time};

use super::super::Daemon;
use super::VmArgs;

/// Smallest size of each VM within its bounds on misses, and the memory that would be saved.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    of: VmArgs,
    /// Replay the curves kept since then, instead of the present curve; a time such as 14d
    #[arg(long, value_name = "TIME")]
    since: Option<Interval>,
    /// With --since, percentage of the curves whose needs are to fit, 1 to 100
    #[arg(long, value_name = "N", default_value_t = 95, requires = "since", value_parser = clap::value_parser!(u8).range(1..=100))]
    percentile: u8,
    #[command(flatten)]
    form: TextFormatArg,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let daemon = args.of.daemon()?;
    if let Some(since) = args.since {
        return over_time(args, since, &daemon, out);
    }
    let summaries = daemon.vms(args.of.vm.as_deref())?;
    let mut then = Vec::new();
    for vm in &summaries {
        let ask = |bytes| daemon.ask_of(&vm.vm, |client, vm| client.vm_what_if(vm, bytes));
        let answer = vm.promise_bytes.map(ask).transpose()?;
        then.push(answer.and_then(|answer| answer.relative_then));
    }
    let report = Rightsizes::new(&summaries, &then);
    let text = || Ok(report.text(&summaries));
    args.form.write(out, text, || Ok(report.csv()), &report)
}

/// The right size over time of the VMs.
fn over_time(
    args: &Args,
    since: Interval,
    daemon: &Daemon,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let since_unix_ms = daemon.time_before(since)?;
    let percentile = f64::from(args.percentile) / 100.0;
    let mut views = Vec::new();
    for vm in args.of.names(daemon)? {
        views.push(daemon.ask_of(&vm, |client, vm| {
            client.rightsize(vm, since_unix_ms, percentile)
        })?);
    }
    let text = || Ok(text_over_time(&views, args.percentile));
    args.form
        .write(out, text, || Ok(csv_over_time(&views)), &views)
}
