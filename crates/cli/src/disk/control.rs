//! `plimsoll disk resize` and `plimsoll disk enable`: change a running cache.

use std::io::Write;

use plimsoll_disk::MachineStats;
use plimsoll_protocol::size::ByteSize;
use plimsoll_serve::disk::Report;
use plimsoll_serve::disk::admin::{Request, ask};

use super::SocketArg;

/// Change the memory of a running cache, up to its --cache-max.
///
/// A smaller size is in force when the command returns. Delayed writes are in a log of their own, and stay.
#[derive(Debug, clap::Args)]
pub struct ResizeArgs {
    #[command(flatten)]
    socket: SocketArg,
    /// New size
    size: ByteSize,
}

/// Restart, empty, a cache that switched itself off, and accept what a failed sync has lost.
///
/// `disk stat` shows why the cache did. If the guest still breaks the cache's rules (such as with dm-crypt, which changes
/// pages in place), the cache will switch itself off again. Disks whose storage failed to make writes stable, UNSYNCED in
/// `disk stat`, fail all flushes until this command: writes before the failed sync may be lost.
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
    let socket = &args.socket.socket;
    let before: Report = ask(socket, Request::Stat)?;
    ask::<()>(socket, Request::Enable)?;
    let MachineStats { engine, disks, .. } = &before.machine;
    if let Some(why) = &engine.disabled {
        writeln!(
            out,
            "enabled: the cache, which had switched itself off: {why}"
        )?;
    }
    for (number, disk) in disks.iter().enumerate().filter(|(_, disk)| disk.unsynced) {
        writeln!(
            out,
            "enabled: flushes of disk {number} ({}); writes before the failed sync may be lost",
            disk.image
        )?;
    }
    if engine.disabled.is_none() && disks.iter().all(|disk| !disk.unsynced) {
        writeln!(out, "nothing was switched off")?;
    }
    Ok(())
}
