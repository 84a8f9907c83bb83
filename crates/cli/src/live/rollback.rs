//! `plimsoll rollback`: take a decision back.

use std::io::Write;

use plimsoll_protocol::client::Client;

use super::decisions::{ChoiceArgs, carry_out};

/// Take a decision back: its VMs get what they had before it.
///
/// Ends with 4 if a promise or a floor forbids it (nothing is moved), with 5 if only a part was done.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    choice: ChoiceArgs,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// Those of [`apply`](super::apply::run).
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    carry_out(&args.choice, Client::roll_back, out)
}
