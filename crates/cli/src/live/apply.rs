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

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    carry_out(&args.choice, Client::apply, out)
}
