//! `plimsoll disk`: a VM's disks with a cache under them.

pub mod admin;
mod control;
pub mod ghosts;
pub mod metrics;
pub mod options;
pub mod report;
mod second_chance;
pub mod serve;
mod stat;
pub mod table;

use std::io::Write;
use std::path::PathBuf;

use clap::Subcommand;

/// Serve a VM's disks with an exclusive cache, and show its statistics.
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

/// The admin socket of a daemon.
#[derive(Debug, Clone, clap::Args)]
struct SocketArg {
    /// Admin socket of the daemon, as given to `disk serve --admin`
    socket: PathBuf,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// A [`UsageError`](plimsoll_output::exit::UsageError) for what cannot be asked for,
/// [`Unreachable`](plimsoll_output::exit::Unreachable) if no daemon answers, and why something failed.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    match &args.verb {
        Verb::Serve(args) => serve::run(args, out),
        Verb::Stat(args) => stat::run(args, out),
        Verb::Resize(args) => control::resize(args, out),
        Verb::Enable(args) => control::enable(args, out),
    }
}
