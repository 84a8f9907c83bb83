//! `plimsoll disk resize` and `plimsoll disk enable`: change a running cache.

use std::io::Write;

use super::SocketArg;
use super::admin::{Request, ask};
use crate::size::ByteSize;

/// Change the memory of a running cache, up to its --cache-max.
///
/// A smaller one holds when the command returns: pages are dropped, dirty ones after they are written back.
#[derive(Debug, clap::Args)]
pub struct ResizeArgs {
    #[command(flatten)]
    socket: SocketArg,
    /// New size
    size: ByteSize,
}

/// Let a cache that switched itself off begin again, empty.
///
/// `disk stat` says why it did. If the guest still reads its disk in a way that breaks the cache's rules
/// (such as dm-crypt, which changes pages in place), it will switch itself off again.
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
