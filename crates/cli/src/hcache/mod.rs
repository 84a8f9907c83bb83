//! `plimsoll hcache`: serve a page store that processes share, and query the server.

mod bench;
mod resize;
mod stat;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use plimsoll_output::exit::Unreachable;
use plimsoll_serve::hcache::serve;

/// Serve a page store that processes share, and query the server.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Serve(serve::Args),
    Stat(stat::Args),
    Resize(resize::Args),
    Bench(bench::Args),
}

/// The socket of a server.
#[derive(Debug, Clone, clap::Args)]
struct SocketArgs {
    /// Socket of the server
    #[arg(long, value_name = "PATH", default_value = "/run/plimsoll-hcache.sock")]
    socket: PathBuf,
}

/// How long a server may take to answer a query.
const QUERY_MAX: Duration = Duration::from_secs(10);
/// How long it may take to carry out a change; dropping the pages of a large store takes time.
const CHANGE_MAX: Duration = Duration::from_secs(60);

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    match &args.verb {
        Verb::Serve(args) => serve::run(args, out),
        Verb::Stat(args) => stat::run(args, out),
        Verb::Resize(args) => resize::run(args, out),
        Verb::Bench(args) => bench::run(args, out),
    }
}

/// An error of a verb: a server that is unreachable, or does not answer in time, has an exit code of its own.
fn failure(error: plimsoll_ring::Error) -> anyhow::Error {
    use plimsoll_ring::Error;
    use std::io::ErrorKind::{TimedOut, WouldBlock};
    match &error {
        Error::Unreachable { .. } | Error::TimedOut => Unreachable(error.into()).into(),
        Error::Io(why) if matches!(why.kind(), TimedOut | WouldBlock) => {
            Unreachable(error.into()).into()
        }
        _ => error.into(),
    }
}
