//! Carrying out a decision and waiting for its end: `apply` and `rollback`.

use std::io::{self, Write};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use anyhow::bail;
use plimsoll_output::exit::PartialResult;
use plimsoll_output::{TextFormatArg, stop_flag};
use plimsoll_protocol::client::{Client, ClientError};
use plimsoll_protocol::decision::{Decision, State};
use plimsoll_protocol::request::Choice;
use plimsoll_report::decision::{csv, text};

use super::{Daemon, SocketArg};

/// Interval of polling a decision that is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Options shared by `apply` and `rollback`.
#[derive(Debug, Clone, clap::Args)]
pub struct ChoiceArgs {
    #[command(flatten)]
    socket: SocketArg,
    /// Number of the decision [default: the newest possible one]
    #[arg(long, value_name = "N")]
    decision: Option<u64>,
    /// Wait until memory has been moved and the result has been measured
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    form: TextFormatArg,
}

/// Requests that a decision be carried out, prints it, and optionally waits for its end.
pub fn carry_out(
    args: &ChoiceArgs,
    ask: impl FnOnce(&Client, Choice) -> Result<Decision, ClientError>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let daemon = Daemon::to_change(&args.socket)?;
    let choice = Choice {
        decision: args.decision,
    };
    let mut decision = daemon.ask(|client| ask(client, choice))?;
    if args.wait {
        decision = wait(&daemon, decision)?;
    }
    args.form.write(
        out,
        || Ok(text(&decision, None)),
        || Ok(csv(&[&decision])),
        &decision,
    )?;
    outcome(&decision)
}

/// Polls a decision until it has ended; reports its progress on standard error.
fn wait(daemon: &Daemon, mut decision: Decision) -> anyhow::Result<Decision> {
    let stop = stop_flag()?;
    let mut said = None;
    while !decision.state.has_ended() {
        if said != Some(decision.state) {
            said = Some(decision.state);
            // Nobody may be listening; the result is reported all the same.
            let _ = writeln!(io::stderr(), "{}", now_doing(&decision));
        }
        thread::sleep(LOOK_EVERY);
        if stop.load(Ordering::Relaxed) {
            bail!(
                "no longer waiting; decision {} goes on, and `plimsoll pause` would stop it",
                decision.id
            );
        }
        let id = decision.id;
        decision = daemon.ask(|client| client.decision(id)).map_err(|error| {
            error.context(format!("decision {id} was started; its outcome is unknown"))
        })?;
    }
    Ok(decision)
}

fn now_doing(decision: &Decision) -> String {
    let what = match decision.state {
        State::Checking => "memory was moved; measuring what came of it",
        State::Moving => "moving memory",
        _ => "not begun",
    };
    format!("decision {}: {what}", decision.id)
}

/// How a decision that has ended, or was just begun, ends the verb.
fn outcome(decision: &Decision) -> anyhow::Result<()> {
    let id = decision.id;
    match decision.state {
        State::Partly => Err(PartialResult(format!(
            "decision {id} was carried out in part: each VM has what is shown as its size now"
        ))
        .into()),
        State::Stopped => Err(PartialResult(format!(
            "decision {id} was stopped: what was moved by then stays moved"
        ))
        .into()),
        State::Failed => bail!("decision {id} failed: nothing was moved"),
        State::RolledBack => {
            bail!("decision {id} was rolled back: the VMs return to their previous sizes")
        }
        State::Superseded => bail!("decision {id} was not carried out: a newer one took its place"),
        State::Proposed | State::Moving | State::Checking | State::Kept => Ok(()),
    }
}
