//! Two threads compared to one.

use std::io::Write;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use plimsoll_hcache::{Client, ClientOptions, Handle, PoolId, PoolOptions, Store};

use super::bounds::{Lines, locked_reads};
use super::pages::handle;
use super::region::{Region, load_average};
use super::{Args, roomy};
use crate::measure::{at_least, median};
use crate::random::Random;
use crate::{Cli, title};

/// Operations of each thread in a run.
const OPERATIONS: usize = 1 << 18;

/// Size of the table whose lines bound the lookups, in MiB.
const TABLE_MIB: usize = 4;

/// Pages of each thread that stay in its CPU's caches.
const WARM: usize = 64;

/// Data of a thread.
struct Worker {
    from: Region,
    to: Region,
    random: Random,
}

impl Worker {
    fn copies(&mut self, pages: usize) {
        for _ in 0..OPERATIONS {
            let from = self.random.below(pages);
            let to = self.random.below(pages);
            *self.to.page_mut(to) = *self.from.page(from);
        }
    }

    /// A get, and a put if it missed: in a private pool about every second one does, so that each
    /// operation moves one page.
    fn mix(&mut self, client: &Client, pool: PoolId, pages: usize) -> anyhow::Result<()> {
        for _ in 0..OPERATIONS {
            let number = self.random.below(pages);
            let handle = handle(pool, number as u64);
            if !client.get(handle, self.to.page_mut(number))? {
                client.put(handle, self.from.page(number))?;
            }
        }
        Ok(())
    }

    fn lookups(&mut self, client: &Client, pool: PoolId) -> anyhow::Result<()> {
        let mut page = [0; 4096];
        for _ in 0..4 * OPERATIONS {
            let handle = Handle {
                index: 5000,
                ..handle(pool, self.random.below(self.from.pages()) as u64)
            };
            anyhow::ensure!(!client.get(handle, &mut page)?, "found what was not put");
        }
        Ok(())
    }
}

/// Runs the part.
pub(super) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let pages = args.region_mib * 64;
    let cpus = thread::available_parallelism()?;
    title(
        out,
        &format!("hcache: two threads beside one, {cpus} CPUs, random order, wall time"),
    )?;
    if cpus.get() < 2 {
        writeln!(out, "SKIPPED: there is one CPU")?;
        return Ok(());
    }
    writeln!(out, "{}", load_average()?)?;
    let mut workers = Vec::new();
    for seed in 1..=2 {
        workers.push(Worker {
            from: Region::new(pages, true)?,
            to: Region::new(pages, true)?,
            random: Random::new(seed),
        });
    }
    let store = Store::new(roomy(2 * pages))?;
    let client = |name| -> anyhow::Result<_> {
        let client = store.create_client(ClientOptions::new(name))?;
        let pool = client.create_pool(PoolOptions::private())?;
        Ok((client, pool))
    };
    let clients = [client("one")?, client("two")?];
    let warm_clients = [client("one, warm")?, client("two, warm")?];
    writeln!(
        out,
        "\n{:<36} {:>12} {:>12} {:>7}",
        "", "one, M/s", "two, M/s", "ratio"
    )?;
    let copies = |worker: &mut Worker, _| {
        worker.copies(pages);
        Ok(())
    };
    let warm_copies = |worker: &mut Worker, _| {
        worker.copies(WARM);
        Ok(())
    };
    let own = |worker: &mut Worker, thread: usize| {
        let (client, pool) = &clients[thread];
        worker.mix(client, *pool, pages)
    };
    let warm = |worker: &mut Worker, thread: usize| {
        let (client, pool) = &warm_clients[thread];
        worker.mix(client, *pool, WARM)
    };
    let same = |worker: &mut Worker, _| {
        let (client, pool) = &clients[0];
        worker.mix(client, *pool, pages)
    };
    let own_lookups = |worker: &mut Worker, thread: usize| {
        let (client, pool) = &clients[thread];
        worker.lookups(client, *pool)
    };
    let same_lookups = |worker: &mut Worker, _| {
        let (client, pool) = &clients[0];
        worker.lookups(client, *pool)
    };
    let table = Lines::new(TABLE_MIB);
    let reads = |worker: &mut Worker, _| {
        locked_reads(&table, 4 * OPERATIONS, &mut worker.random);
        Ok(())
    };
    let lines: [(&str, usize, Bar, Work); 8] = [
        ("copies, cold", OPERATIONS, Bar::Bound, &copies),
        (
            "put and get, cold, a client each",
            OPERATIONS,
            Bar::Asked,
            &own,
        ),
        (
            "put and get, cold, the same pool",
            OPERATIONS,
            Bar::Asked,
            &same,
        ),
        (
            "copies, 64 pages a thread",
            OPERATIONS,
            Bar::Bound,
            &warm_copies,
        ),
        (
            "put and get, 64 pages a client",
            OPERATIONS,
            Bar::Asked,
            &warm,
        ),
        (
            "random lines, a lock each",
            4 * OPERATIONS,
            Bar::Bound,
            &reads,
        ),
        (
            "gets that miss, a client each",
            4 * OPERATIONS,
            Bar::Asked,
            &own_lookups,
        ),
        (
            "gets that miss, the same pool",
            4 * OPERATIONS,
            Bar::Asked,
            &same_lookups,
        ),
    ];
    let mut rates = lines.map(|_| [Vec::new(), Vec::new(), Vec::new()]);
    // The first round fills the store and does not count.
    for round in 0..=cli.runs.max(1) {
        for ((_, operations, _, work), rates) in lines.iter().zip(&mut rates) {
            let one = *operations as f64 / 1e6 / together(&mut workers[..1], *work)?;
            let two = 2.0 * *operations as f64 / 1e6 / together(&mut workers, *work)?;
            if round > 0 {
                rates[0].push(one);
                rates[1].push(two);
                rates[2].push(two / one);
            }
        }
    }
    for ((name, _, bar, _), [one, two, ratio]) in lines.iter().zip(rates) {
        let ratio = median(ratio);
        let note = match bar {
            Bar::Asked => at_least(ratio, 1.8, " x"),
            Bar::Bound => "what memory allows".to_owned(),
        };
        let (one, two) = (median(one), median(two));
        writeln!(
            out,
            "{name:<36} {one:>12.2} {two:>12.2} {ratio:>5.2} x  {note}"
        )?;
    }
    Ok(())
}

/// The purpose of a line.
#[derive(Clone, Copy)]
enum Bar {
    Asked,
    Bound,
}

type Work<'a> = &'a (dyn Fn(&mut Worker, usize) -> anyhow::Result<()> + Sync);

/// Lets all workers run concurrently; returns seconds until the last has finished.
fn together(workers: &mut [Worker], work: Work) -> anyhow::Result<f64> {
    let start = Barrier::new(workers.len() + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter_mut()
            .enumerate()
            .map(|(number, worker)| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    work(worker, number)
                })
            })
            .collect();
        start.wait();
        let watch = Instant::now();
        for thread in threads {
            thread.join().expect("a worker does not panic")?;
        }
        Ok(watch.elapsed().as_secs_f64())
    })
}
