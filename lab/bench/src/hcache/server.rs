//! The page rate of hcache's server compared to redis and memcached, all on Unix sockets in processes of their own.
//!
//! One client, one connection, pages of 4 KiB that are all there. A batch is sent completely, then its answers are
//! awaited; of a stream (hcache alone) up to 127 operations are in flight. Values are made and checked, a word in each
//! line, by the same code, within the measured time. Bar: 5 times the better of each other server's rates.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use plimsoll_hcache::{Page, PoolId, PoolOptions};
use plimsoll_ring::protocol::Status;
use plimsoll_ring::{ConnectOptions, Connection, Slot};

use super::memcached::Memcached;
use super::page_server::PageServer;
use super::pages::{handle, is_signed, sign};
use super::redis::Redis;
use super::region::load_average;
use super::serve;
use crate::child::ChildProcess;
use crate::measure::{Clock, Watch, at_least, median};
use crate::random::Random;
use crate::{Cli, title};

/// What is measured with.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Pages in each server, in MiB
    #[arg(long, default_value_t = 256)]
    pages_mib: usize,
    /// Operations between two looks at the clock
    #[arg(long, default_value_t = 32768)]
    operations: usize,
}

/// hcache, a call a page.
struct Single(Connection, PoolId);

impl PageServer for Single {
    fn put(&mut self, numbers: &[u64], fill: &mut dyn FnMut(u64, &mut Page)) -> anyhow::Result<()> {
        let mut page = [0; 4096];
        for &number in numbers {
            fill(number, &mut page);
            let stored = self.0.put(handle(self.1, number), &page)?;
            anyhow::ensure!(stored.is_stored(), "hcache refused page {number}");
        }
        Ok(())
    }

    fn get(&mut self, numbers: &[u64], read: &mut dyn FnMut(u64, &Page)) -> anyhow::Result<()> {
        let mut page = [0; 4096];
        for &number in numbers {
            let found = self.0.get(handle(self.1, number), &mut page)?;
            anyhow::ensure!(found, "hcache lost page {number}");
            read(number, &page);
        }
        Ok(())
    }
}

/// hcache, with as many operations in flight as there are slots.
struct Batches(Connection, PoolId);

impl Batches {
    /// Takes a slot, waiting for one if need be.
    fn slot(&mut self, done: &mut dyn FnMut(u64, &Page)) -> anyhow::Result<Slot> {
        loop {
            if let Some(slot) = self.0.reserve() {
                return Ok(slot);
            }
            self.reap(done)?;
        }
    }

    /// Waits for completions, and hands their pages to `done`.
    fn reap(&mut self, done: &mut dyn FnMut(u64, &Page)) -> anyhow::Result<()> {
        self.0.wait()?;
        while let Some(mut completion) = self.0.reap()? {
            let number = completion.user_data;
            anyhow::ensure!(
                completion.status == Status::Ok,
                "hcache answers {:?} to page {number}",
                completion.status
            );
            if let Some(slot) = &mut completion.slot {
                done(number, self.0.page(slot));
            }
            self.0.release(completion.slot);
        }
        Ok(())
    }

    /// Lets the server begin while the rest of a batch is made.
    fn published(&mut self, number: usize) {
        if number % 16 == 15 {
            self.0.publish();
        }
    }
}

impl PageServer for Batches {
    fn put(&mut self, numbers: &[u64], fill: &mut dyn FnMut(u64, &mut Page)) -> anyhow::Result<()> {
        for (at, &number) in numbers.iter().enumerate() {
            let mut slot = self.slot(&mut |_, _| ())?;
            fill(number, self.0.page(&mut slot));
            self.0.submit_put(handle(self.1, number), slot, number)?;
            self.published(at);
        }
        while self.0.under_way() > 0 {
            self.reap(&mut |_, _| ())?;
        }
        Ok(())
    }

    fn get(&mut self, numbers: &[u64], read: &mut dyn FnMut(u64, &Page)) -> anyhow::Result<()> {
        for (at, &number) in numbers.iter().enumerate() {
            let slot = self.slot(read)?;
            self.0.submit_get(handle(self.1, number), slot, number)?;
            self.published(at);
        }
        while self.0.under_way() > 0 {
            self.reap(read)?;
        }
        Ok(())
    }
}

/// A way to use a server, and its results.
struct Line {
    server: usize,
    way: &'static str,
    client: Box<dyn PageServer>,
    batch: usize,
    put_rates: Vec<f64>,
    get_rates: Vec<f64>,
}

/// Runs the part.
pub(crate) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "hcache's server beside redis and memcached: {} MiB of pages, Unix sockets",
            args.pages_mib
        ),
    )?;
    writeln!(out, "{}", load_average()?)?;
    let folder = tempfile::tempdir()?;
    let socket = |name| folder.path().join(name);
    let capacity_mib = 2 * args.pages_mib;
    let (ours, redis, memcached) = (socket("hcache"), socket("redis"), socket("memcached"));
    let _servers = [
        serve::start(&ours, capacity_mib as u64, false)?,
        start_redis(folder.path(), &redis, capacity_mib)?,
        start_memcached(&memcached, capacity_mib)?,
    ];

    let mut lines = Vec::new();
    let mut add = |server, way, client, batch| {
        lines.push(Line {
            server,
            way,
            client,
            batch,
            put_rates: Vec::new(),
            get_rates: Vec::new(),
        });
    };
    let connection = || -> anyhow::Result<_> {
        let mut connection = Connection::connect(&ours, &ConnectOptions::new("bench"))?;
        let pool = connection.create_pool(PoolOptions::shared(1))?;
        Ok((connection, pool))
    };
    let (single, pool) = connection()?;
    add(0, "one by one", Box::new(Single(single, pool)), 1);
    for (batch, way) in [
        (16, "batches of 16"),
        (64, "batches of 64"),
        (4096, "a stream"),
    ] {
        let (batches, pool) = connection()?;
        add(0, way, Box::new(Batches(batches, pool)), batch);
    }
    let pipelined = [(1, "one by one"), (16, "16 in a row"), (64, "64 in a row")];
    for (batch, way) in pipelined {
        add(1, way, Box::new(Redis::connect(&redis)?), batch);
    }
    for (batch, way) in pipelined {
        add(
            2,
            way,
            Box::new(Memcached::connect(&memcached, false)?),
            batch,
        );
    }
    let quiet = Memcached::connect(&memcached, true)?;
    add(2, "64 in a row, noreply", Box::new(quiet), 64);

    measure(cli, args, &mut lines)?;
    report(lines, out)
}

fn measure(cli: &Cli, args: &Args, lines: &mut [Line]) -> anyhow::Result<()> {
    let pages = args.pages_mib * 256;
    let all: Vec<_> = (0..pages as u64).collect();
    let mut fill = |number, page: &mut Page| sign(page, number);
    let mut wrong = 0_u64;
    let mut read = |number, page: &Page| wrong += u64::from(!is_signed(page, number));
    for server in 0..3 {
        let line = lines.iter_mut().find(|line| line.server == server);
        let line = line.expect("each server has a line");
        for numbers in all.chunks(64) {
            line.client.put(numbers, &mut fill)?;
        }
    }
    let mut random = Random::new(1);
    for _ in 0..cli.runs.max(1) {
        for line in &mut *lines {
            let mut order = || -> Vec<_> {
                (0..args.operations)
                    .map(|_| random.below(pages) as u64)
                    .collect()
            };
            let (puts, gets) = (order(), order());
            let watch = Watch::start(Clock::Wall);
            for numbers in puts.chunks(line.batch) {
                line.client.put(numbers, &mut fill)?;
            }
            line.put_rates
                .push(args.operations as f64 / watch.seconds());
            let watch = Watch::start(Clock::Wall);
            for numbers in gets.chunks(line.batch) {
                line.client.get(numbers, &mut read)?;
            }
            line.get_rates
                .push(args.operations as f64 / watch.seconds());
        }
    }
    anyhow::ensure!(wrong == 0, "{wrong} pages had wrong bytes");
    Ok(())
}

fn report(lines: Vec<Line>, out: &mut dyn Write) -> anyhow::Result<()> {
    const SERVERS: [&str; 3] = ["hcache", "redis", "memcached"];
    writeln!(
        out,
        "\n{:<12} {:<24} {:>14} {:>14}",
        "", "", "put, K pages/s", "get, K pages/s"
    )?;
    let mut best = [[0.0_f64; 2]; 3];
    for line in lines {
        let rates = [line.put_rates, line.get_rates].map(|rates| median(rates) / 1e3);
        for (best, rate) in best[line.server].iter_mut().zip(rates) {
            *best = best.max(rate);
        }
        let [put, get] = rates;
        writeln!(
            out,
            "{:<12} {:<24} {put:>14.0} {get:>14.0}",
            SERVERS[line.server], line.way
        )?;
    }
    writeln!(out)?;
    for server in 1..3 {
        for (at, what) in ["put", "get"].into_iter().enumerate() {
            let ratio = best[0][at] / best[server][at];
            writeln!(
                out,
                "best of hcache beside best of {}, {what}: {ratio:.1} x  {}",
                SERVERS[server],
                at_least(ratio, 5.0, " x")
            )?;
        }
    }
    Ok(())
}

/// Starts redis: nothing written to disk, least recently used pages dropped.
fn start_redis(folder: &Path, socket: &Path, capacity_mib: usize) -> anyhow::Result<ChildProcess> {
    let mut command = Command::new("redis-server");
    command.args(["--port", "0", "--save", "", "--appendonly", "no"]);
    command.args(["--daemonize", "no", "--maxmemory-policy", "allkeys-lru"]);
    command.arg("--maxmemory").arg(format!("{capacity_mib}mb"));
    command
        .arg("--dir")
        .arg(folder)
        .arg("--unixsocket")
        .arg(socket);
    let running = ChildProcess::start(command.stdout(Stdio::null()))?;
    serve::wait_for("redis", || Redis::connect(socket).is_ok())?;
    Ok(running)
}

/// Starts memcached.
fn start_memcached(socket: &Path, capacity_mib: usize) -> anyhow::Result<ChildProcess> {
    let mut command = Command::new("memcached");
    // As root it requires a user; it must keep the present one to reach its socket.
    command.args(["-u", "root", "-m", &capacity_mib.to_string(), "-s"]);
    let running = ChildProcess::start(command.arg(socket))?;
    serve::wait_for("memcached", || Memcached::connect(socket, false).is_ok())?;
    Ok(running)
}
