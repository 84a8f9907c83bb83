//! `plimsoll apply`: carry out what the daemon proposes.

use std::io::Write;

use plimsoll_protocol::client::Client;

use super::decisions::{ChoiceArgs, carry_out};

/// Carry out the daemon's proposal.
///
/// The exit code is 4 if a VM's limit or minimum size now forbids it (nothing is moved), 5 if it was done only partly.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    choice: ChoiceArgs,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// [`Forbidden`](plimsoll_output::exit::Forbidden) if a guarantee is in the way, [`PartialResult`](plimsoll_output::exit::PartialResult) if only a part
/// was done, and why it failed.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    carry_out(&args.choice, Client::apply, out)
}
