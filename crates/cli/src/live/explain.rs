//! `plimsoll explain`: decisions about a VM, with reasons and results.

use std::io::Write;

use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::client::Client;
use plimsoll_protocol::decision::{Decision, DecisionsView};
use plimsoll_report::decision::{csv, text};

use super::{DECISIONS_PAGE, Daemon, QueryArgs};
use plimsoll_output::{TextFormat, printable};

/// Explain decisions about a VM: reasons, predictions and measured results, newest first.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the VM
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    vm: String,
    /// Maximum number of decisions
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    #[command(flatten)]
    look: QueryArgs,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let daemon = Daemon::to_read(&args.look.socket)?;
    let mut decisions = daemon.ask_of(&args.vm, Client::explain)?;
    let limit = usize::try_from(args.limit)?;
    // The first answer has the newest.
    while let Some(last) = decisions.last().filter(|_| decisions.len() < limit) {
        let before = Some(last.id);
        let page =
            daemon.ask(|client| client.decisions(Some(&args.vm), before, Some(DECISIONS_PAGE)))?;
        if page.is_empty() {
            break;
        }
        decisions.extend(page);
    }
    decisions.truncate(limit);
    let of_vm = |decision: &Decision| text(decision, Some(&args.vm));
    let sentences = match &*decisions {
        [] => format!("No decision has touched {} yet.\n", printable(&args.vm)),
        all => all.iter().map(of_vm).collect::<Vec<_>>().join("\n"),
    };
    let mut view = DecisionsView {
        schema: SCHEMA,
        decisions,
    };
    if args.look.form.output == TextFormat::Csv {
        for decision in &mut view.decisions {
            decision.steps.retain(|step| step.vm == args.vm);
        }
    }
    let csv = || Ok(csv(&view.decisions.iter().collect::<Vec<_>>()));
    args.look.form.write(out, || Ok(sentences), csv, &view)
}
