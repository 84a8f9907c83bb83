//! `plimsoll report mrc`: curves.

use std::io::Write;

use plimsoll_output::{Format, OutputArgs, printable};
use plimsoll_plot::Figure as _;
use plimsoll_protocol::subject::Subject;
use plimsoll_report::curves::Curves;

use super::VmArgs;

/// Miss-ratio curves: the share of references that miss at every size, with its band.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    of: VmArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let daemon = args.of.daemon()?;
    let keys = args.of.keys_with_groups(&daemon)?;
    let views = keys.iter().map(|key| daemon.ask_by(key, Subject::ask));
    let views = views.collect::<anyhow::Result<Vec<_>>>()?;
    if args.output.format() != Format::Table && views.iter().all(|view| view.curve().is_none()) {
        for view in &views {
            eprintln!(
                "plimsoll: {}: its curve is not available yet",
                printable(view.name())
            );
        }
    }
    Curves(views).write(&args.output, out)
}
