//! `plimsoll top`: the host with its VMs and control groups, live.
//!
//! Not here: the screen (`plimsoll_top`).

use std::io::Write;

use super::{Daemon, SocketArg};

/// Show the host, its VMs and the control groups that are watched live: status, curves, history and decisions.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArg,
    /// Print one frame as text and exit
    #[arg(long)]
    once: bool,
}

/// `out` takes the frame of `--once`.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let daemon = Daemon::to_read(&args.socket)?;
    if args.once {
        return Ok(out.write_all(plimsoll_top::once(&daemon)?.as_bytes())?);
    }
    plimsoll_top::run(daemon)
}
