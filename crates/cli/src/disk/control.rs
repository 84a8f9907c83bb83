//! `plimsoll disk resize` and `plimsoll disk enable`: change a running cache.

use std::io::Write;

use plimsoll_protocol::size::ByteSize;
use plimsoll_serve::disk::admin::{Request, ask};

use super::SocketArg;

/// Change the memory of a running cache, up to its --cache-max.
///
/// A smaller size is in force when the command returns: pages are dropped, dirty ones after they are written back.
#[derive(Debug, clap::Args)]
pub struct ResizeArgs {
    #[command(flatten)]
    socket: SocketArg,
    /// New size
    size: ByteSize,
}

/// Restart, empty, a cache that switched itself off.
///
/// `disk stat` shows why it did. If the guest still breaks the cache's rules (such as with dm-crypt, which changes
/// pages in place), the cache will switch itself off again.
#[derive(Debug, clap::Args)]
pub struct EnableArgs {
    #[command(flatten)]
    socket: SocketArg,
}

/// Runs `resize`; `out` is standard output, or a buffer in tests.
pub fn resize(args: &ResizeArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let cache_bytes = args.size.0;
    ask::<()>(&args.socket.socket, Request::Resize { cache_bytes })?;
    writeln!(out, "cache {}", args.size.rounded())?;
    Ok(())
}

/// Runs `enable`; `out` is standard output, or a buffer in tests.
pub fn enable(args: &EnableArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    ask::<()>(&args.socket.socket, Request::Enable)?;
    writeln!(out, "enabled")?;
    Ok(())
}
