//! `plimsoll rollback`: take a decision back.

use std::io::Write;

use plimsoll_protocol::client::Client;

use super::decisions::{ChoiceArgs, carry_out};

/// Undo a decision: its VMs return to their previous sizes.
///
/// The exit code is 4 if a VM's limit or minimum size forbids it (nothing is moved), 5 if it was done only partly.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    choice: ChoiceArgs,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    carry_out(&args.choice, Client::roll_back, out)
}
