//! A server of hcache in a process of its own, as `server` and `soak` use it.

use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use plimsoll_hcache::{Store, StoreOptions};
use plimsoll_ring::{Server, ServerOptions};

use crate::child::{ChildProcess, ourselves};

/// What the process is told.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    #[arg(long)]
    socket: PathBuf,
    #[arg(long)]
    mib: u64,
    #[arg(long)]
    compression: bool,
}

/// Serves until standard input ends, as it does when the process that started this one is gone.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut options = StoreOptions::new(args.mib << 20);
    options.compression = args.compression;
    let store = Store::new(options)?;
    let server = Server::bind(&args.socket, store.clone(), ServerOptions::default())?;
    let stop = server.stop_handle();
    thread::spawn(move || {
        // Whether it succeeds or fails, nobody is there any more.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        stop.stop();
    });
    server.run(&|| Figures::of(&store, &server).text())?;
    Ok(())
}

/// Starts such a process and waits until it answers.
pub(super) fn start(socket: &Path, mib: u64, compression: bool) -> anyhow::Result<ChildProcess> {
    let mib = mib.to_string();
    let path = socket.to_str().context("a path that is no text")?;
    let mut words = vec!["hcache-serve", "--socket", path, "--mib", &mib];
    if compression {
        words.push("--compression");
    }
    let running = ChildProcess::start(ourselves(words)?.stdin(Stdio::piped()))?;
    wait_for("the hcache server", || figures(socket).is_ok())?;
    Ok(running)
}

/// Waits until a server is ready.
pub(super) fn wait_for(what: &str, ready: impl Fn() -> bool) -> anyhow::Result<()> {
    for _ in 0..1000 {
        if ready() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(10));
    }
    anyhow::bail!("{what} does not answer after 10 s")
}

/// Queries the figures of such a process.
pub(super) fn figures(socket: &Path) -> anyhow::Result<Figures> {
    Figures::parse(&plimsoll_ring::stats(socket, Duration::from_secs(30))?)
}

/// The figures reported by such a process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Figures {
    pub(super) capacity_bytes: u64,
    pub(super) used_bytes: u64,
    pub(super) pages: u64,
    pub(super) puts: u64,
    pub(super) hits: u64,
    pub(super) evicted_pages: u64,
    pub(super) ring_bytes: u64,
    pub(super) joined: u64,
    pub(super) left: u64,
    pub(super) clients: Vec<String>,
}

impl Figures {
    fn of(store: &Store, server: &Server) -> Self {
        let (stats, counters) = (store.stats(), server.counters());
        Self {
            capacity_bytes: stats.capacity_bytes,
            used_bytes: stats.used_bytes,
            pages: stats.pages,
            puts: stats.counters.puts,
            hits: stats.counters.hits,
            evicted_pages: stats.counters.evicted_pages,
            ring_bytes: counters.ring_bytes,
            joined: counters.clients_joined,
            left: counters.clients_left,
            clients: stats
                .clients
                .into_iter()
                .map(|client| client.name)
                .collect(),
        }
    }

    /// Numbers in the order of the fields, then names, which have no spaces here.
    fn text(&self) -> String {
        let mut text = String::new();
        for number in [
            self.capacity_bytes,
            self.used_bytes,
            self.pages,
            self.puts,
            self.hits,
            self.evicted_pages,
            self.ring_bytes,
            self.joined,
            self.left,
        ] {
            write!(text, "{number} ").expect("a string takes all");
        }
        text + &self.clients.join(" ")
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut words = text.split_whitespace();
        let mut number =
            || -> anyhow::Result<u64> { Ok(words.next().context("too few figures")?.parse()?) };
        Ok(Self {
            capacity_bytes: number()?,
            used_bytes: number()?,
            pages: number()?,
            puts: number()?,
            hits: number()?,
            evicted_pages: number()?,
            ring_bytes: number()?,
            joined: number()?,
            left: number()?,
            clients: words.map(str::to_owned).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_as_they_were_written() {
        let figures = Figures {
            capacity_bytes: 1,
            used_bytes: 2,
            pages: 3,
            puts: 4,
            hits: 5,
            evicted_pages: 6,
            ring_bytes: 7,
            joined: 8,
            left: 9,
            clients: vec!["a".to_owned(), "b".to_owned()],
        };
        assert_eq!(Figures::parse(&figures.text()).unwrap(), figures);
        assert!(Figures::parse("1 2 3").is_err());
    }
}
