//! `plimsoll report promises`: what became of the promises that decisions made.

use std::io::Write;

use plimsoll_output::TextFormatArg;
use plimsoll_protocol::decision::Decision;
use plimsoll_protocol::size::Interval;
use plimsoll_report::promises::PromisesReport;

use super::super::{DECISIONS_PAGE, Daemon};
use super::VmArgs;

/// Promises that decisions made, and how many were kept, broken and taken back.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    of: VmArgs,
    /// Period covered
    #[arg(long, value_name = "TIME", default_value = "168h")]
    since: Interval,
    #[command(flatten)]
    form: TextFormatArg,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let daemon = args.of.daemon()?;
    let since_unix_ms = daemon.time_before(args.since)?;
    let decisions = decisions(&daemon, since_unix_ms)?;
    let of = args.of.vm.as_deref();
    let report = PromisesReport::new(since_unix_ms, daemon.vms(of)?, &decisions, of);
    let form = args.form;
    form.write(out, || Ok(report.text()), || Ok(report.csv()), &report)
}

/// The decisions since then. Those that affect one VM would not include all that promised it something: a VM whose size
/// stays is promised the same.
fn decisions(daemon: &Daemon, since_unix_ms: u64) -> anyhow::Result<Vec<Decision>> {
    let mut all: Vec<Decision> = Vec::new();
    loop {
        let before = all.last().map(|decision| decision.id);
        let page = daemon.ask(|client| client.decisions(None, before, Some(DECISIONS_PAGE)))?;
        let whole = page.len() == DECISIONS_PAGE;
        let recent = page
            .into_iter()
            .take_while(|decision| decision.unix_ms >= since_unix_ms);
        let found = all.len();
        all.extend(recent);
        if !whole || all.len() < found + DECISIONS_PAGE {
            return Ok(all);
        }
    }
}
