//! `plimsoll hcache resize`: change the capacity of a store.

use std::io::Write;

use plimsoll_protocol::size::ByteSize;

use super::{CHANGE_MAX, SocketArgs, failure};

/// Change the capacity of a running store, up to its --max-capacity.
///
/// A smaller capacity is in force when the command returns. Allowed to root and to the server's own user.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArgs,
    /// New capacity
    size: ByteSize,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    plimsoll_ring::resize(&args.socket.socket, args.size.0, CHANGE_MAX).map_err(failure)?;
    writeln!(out, "capacity {}", args.size.rounded())?;
    Ok(())
}
