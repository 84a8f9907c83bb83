//! `plimsoll explain`: decisions about a VM, with reasons and results.

use std::io::Write;

use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::client::Client;
use plimsoll_protocol::decision::DecisionsView;

use super::decisions::{csv, text};
use super::{Daemon, QueryArgs, write_json};
use plimsoll_output::{TextFormat, printable};

/// Explain decisions about a VM: reasons, predictions and measured results, newest first.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the VM
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    vm: String,
    /// Maximum number of decisions
    #[arg(long, value_name = "N", default_value_t = 10)]
    limit: usize,
    #[command(flatten)]
    look: QueryArgs,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// Those of asking the daemon and of writing.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let daemon = Daemon::to_read(&args.look.socket)?;
    let mut decisions = daemon.ask_of(&args.vm, Client::explain)?;
    decisions.truncate(args.limit);
    match args.look.form.output {
        TextFormat::Table if decisions.is_empty() => {
            writeln!(out, "No decision has touched {} yet.", printable(&args.vm))?;
        }
        TextFormat::Table => {
            for (index, decision) in decisions.iter().enumerate() {
                if index > 0 {
                    writeln!(out)?;
                }
                out.write_all(text(decision, Some(&args.vm)).as_bytes())?;
            }
        }
        TextFormat::Csv => {
            for decision in &mut decisions {
                decision.steps.retain(|step| step.vm == args.vm);
            }
            out.write_all(csv(&decisions.iter().collect::<Vec<_>>()).as_bytes())?;
        }
        TextFormat::Json => {
            let view = DecisionsView {
                schema: SCHEMA,
                decisions,
            };
            write_json(&view, out)?;
        }
    }
    Ok(())
}
