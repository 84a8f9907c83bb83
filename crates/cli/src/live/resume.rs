//! `plimsoll resume`: let memory be moved again.

use std::io::Write;

use plimsoll_protocol::client::Client;

use super::{Daemon, SocketArg, warn_if_not_stored};

/// Allow the daemon to move memory again, within its mode.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArg,
}

/// If it fails, the daemon stays paused.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let done = Daemon::to_change(&args.socket)?.ask(Client::resume)?;
    writeln!(out, "resumed")?;
    warn_if_not_stored(&done);
    Ok(())
}
