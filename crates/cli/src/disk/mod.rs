//! `plimsoll disk`: serve a VM's disks with a cache under them, and query the server.

mod control;
mod stat;

use std::io::Write;
use std::path::PathBuf;

use clap::Subcommand;
use plimsoll_serve::disk::serve;

/// Serve a VM's disks with an exclusive cache under them, and query the server.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Serve(Box<serve::Args>),
    Stat(stat::Args),
    Resize(control::ResizeArgs),
    Enable(control::EnableArgs),
}

/// The admin socket of a disk server.
#[derive(Debug, Clone, clap::Args)]
struct SocketArg {
    /// Admin socket of the server, as given to `disk serve --admin`
    socket: PathBuf,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    match &args.verb {
        Verb::Serve(args) => serve::run(args, out),
        Verb::Stat(args) => stat::run(args, out),
        Verb::Resize(args) => control::resize(args, out),
        Verb::Enable(args) => control::enable(args, out),
    }
}
