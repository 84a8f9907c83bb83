//! `plimsoll hcache resize`: change the capacity of a store.

use std::io::Write;

use super::{SocketArgs, TIMEOUT, told};
use crate::size::ByteSize;

/// Change the capacity of a running store, up to its --max-capacity.
///
/// When the command returns, the new capacity is in force. Only root and the server's own user may do this.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArgs,
    /// New capacity
    size: ByteSize,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    plimsoll_ring::resize(&args.socket.socket, args.size.0, TIMEOUT).map_err(told)?;
    writeln!(out, "capacity {}", args.size.rounded())?;
    Ok(())
}
