//! `plimsoll pause`: have nothing moved from now on.

use std::io::Write;

use plimsoll_protocol::client::Client;

use super::{Daemon, SocketArg, warn_if_not_stored};

/// Stop all moves; a move in progress stops where it is.
///
/// VMs are still traced and shown. `plimsoll resume` ends the pause.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArg,
}

/// If it fails, the daemon moves memory as before.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let done = Daemon::to_change(&args.socket)?.ask(Client::pause)?;
    writeln!(out, "paused: nothing is moved until `plimsoll resume`")?;
    warn_if_not_stored(&done);
    Ok(())
}
