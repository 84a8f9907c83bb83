//! A server of hcache in a process of its own, as `server` and `soak` use it.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use plimsoll_hcache::{Store, StoreOptions};
use plimsoll_ring::{Server, ServerOptions};
use serde::{Deserialize, Serialize};

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
    let stats = || serde_json::to_string(&Figures::of(&store)).expect("JSON has room for it");
    server.run(&stats, &|bytes| store.resize(bytes))?;
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
    let text = plimsoll_ring::stats(socket, Duration::from_secs(30))?;
    Ok(serde_json::from_str(&text)?)
}

/// The figures reported by such a process.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Figures {
    pub(super) capacity_bytes: u64,
    pub(super) used_bytes: u64,
    pub(super) pages: u64,
    pub(super) evicted_pages: u64,
    /// The names of its clients.
    pub(super) clients: Vec<String>,
}

impl Figures {
    fn of(store: &Store) -> Self {
        let stats = store.stats();
        let clients = stats.clients.into_iter();
        Self {
            capacity_bytes: stats.capacity_bytes,
            used_bytes: stats.used_bytes,
            pages: stats.pages,
            evicted_pages: stats.counters.evicted_pages,
            clients: clients.map(|client| client.name).collect(),
        }
    }
}
