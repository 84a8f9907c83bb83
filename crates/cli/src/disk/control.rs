//! `plimsoll disk resize` and `plimsoll disk enable`: change a running cache.

use std::io::Write;

use super::SocketArg;
use super::admin::{Request, ask};
use crate::size::ByteSize;

/// Resize a running cache, up to its --cache-max.
///
/// When the command returns, the new size is in force: pages were dropped, dirty ones after they were written back.
#[derive(Debug, clap::Args)]
pub struct ResizeArgs {
    #[command(flatten)]
    socket: SocketArg,
    /// New size
    size: ByteSize,
}

/// Switch on a cache that switched itself off. It starts empty.
///
/// `disk stat` shows why it was switched off. If the guest still accesses its disk in a way that breaks the cache's rules
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
