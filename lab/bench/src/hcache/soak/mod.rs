//! Minutes of mixed load at full capacity: clients join, leave and are killed, the store is resized, and every byte
//! returned is checked.
//!
//! A page is made from its identity: pool, object, index and the time of its put, which is its generation. Each
//! handle has one client that puts it at a time; that client requires from every get the very generation it last
//! put, and a miss once the handle was flushed, refused, or (in a private pool) got. In the pool that all
//! share, a client also gets what others put, and requires that a handle's generations never decrease. A killed
//! client's successor starts when the server has removed its predecessor.
//!
//! Meanwhile the server's own figures must stay within its bound at every sample, the kernel's count of its memory
//! must stay within that bound plus a margin, and the memory beyond what it accounts for must not grow from the
//! first quarter to the last.

mod client;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::child::{ChildProcess, ourselves};
use crate::hcache::region::proc_bytes;
use crate::hcache::serve::{Figures, figures, start};
use crate::measure::median;
use crate::random::Random;
use crate::title;
pub(crate) use client::{Args as ClientArgs, run as run_client};

/// Memory beyond the store's bound that the server may take: code, stacks, rings of clients, buffers.
const MARGIN_BYTES: u64 = 16 << 20;

/// Growth that is ignored: the varying number of rings at the time of a sample causes as much.
const GROWTH_BYTES: f64 = (4 << 20) as f64;

/// Time between two samples.
const LOOK: Duration = Duration::from_millis(100);

/// How long, how large.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// How long the load lasts, in minutes
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Capacity of the store, in MiB
    #[arg(long, default_value_t = 256)]
    mib: u64,
    /// Clients at the same time
    #[arg(long, default_value_t = 4)]
    clients: u64,
    /// What all randomness comes from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Whether cold pages are compressed
    #[arg(long)]
    compression: bool,
}

/// Counts of the clients, which report them once a second.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    puts: u64,
    gets: u64,
    hits: u64,
    flushes: u64,
}

impl Tally {
    fn numbers(&mut self) -> [&mut u64; 4] {
        [
            &mut self.puts,
            &mut self.gets,
            &mut self.hits,
            &mut self.flushes,
        ]
    }

    fn add(&mut self, mut other: Self) {
        for (sum, number) in self.numbers().into_iter().zip(other.numbers()) {
            *sum += *number;
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let mut tally = Self::default();
        let mut words = line.split_whitespace();
        for number in tally.numbers() {
            *number = words.next()?.parse().ok()?;
        }
        Some(tally)
    }
}

/// A client's process.
struct Client {
    process: ChildProcess,
    name: String,
    tally: Receiver<Tally>,
    /// When it is killed, unless it leaves before.
    killed_at: Instant,
}

/// The state of a client's place.
enum Place {
    Taken(Client),
    /// Waiting until the server has freed this name.
    Leaving(String),
}

/// Observations of a run.
#[derive(Default)]
struct RunObservations {
    violations: Vec<String>,
    looks: u64,
    joined: u64,
    left: u64,
    killed: u64,
    resizes: u64,
    tally: Tally,
    /// Maximum used share of the capacity.
    fullest: f64,
    /// Anonymous memory of the server, less its initial value and what the store accounts for, at each sample.
    beyond: Vec<f64>,
    /// At samples when the store was full at its largest capacity.
    resident: Vec<f64>,
    proportional: Vec<f64>,
}

/// Runs the load; an error if anything invalid was observed.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    anyhow::ensure!(args.clients > 0, "--clients must be at least 1");
    title(
        out,
        &format!(
            "hcache under {} minutes of load: {} MiB, {} clients, seed {}{}",
            args.minutes,
            args.mib,
            args.clients,
            args.seed,
            if args.compression { ", LZ4" } else { "" }
        ),
    )?;
    out.flush()?;
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("hcache");
    let mut server = start(&socket, args.mib, args.compression)?;
    let status = format!("/proc/{}/status", server.0.id());
    let empty = proc_bytes(&status, "RssAnon")?;
    let mut seen = RunObservations::default();
    let mut random = Random::new(args.seed);
    let mut places: Vec<_> = (0..args.clients)
        .map(|_| Place::Leaving(String::new()))
        .collect();
    let begin = Instant::now();
    let length = Duration::from_secs_f64(args.minutes * 60.0);
    let mut resized_at = begin + Duration::from_secs(5);
    let mut last = Figures::default();
    let (full_bytes, mut is_full) = (args.mib << 20, true);
    while begin.elapsed() < length && seen.violations.len() < 10 {
        thread::sleep(LOOK);
        if let Some(status) = server.0.try_wait()? {
            seen.violations.push(format!("the server ended: {status}"));
            break;
        }
        if Instant::now() >= resized_at {
            is_full = !is_full;
            let (sixteenths, pause_ms) = match is_full {
                true => (16, 4000 + random.bits() % 16_000),
                false => (1 + random.bits() % 15, 500 + random.bits() % 3000),
            };
            let bytes = full_bytes / 16 * sixteenths;
            plimsoll_ring::resize(&socket, bytes, Duration::from_secs(60))?;
            seen.resizes += 1;
            resized_at = Instant::now() + Duration::from_millis(pause_ms);
        }
        last = figures(&socket)?;
        look(&last, server.0.id(), empty, full_bytes, &mut seen)?;
        for (number, place) in (0..).zip(&mut places) {
            step(args, &socket, number, place, &last, &mut random, &mut seen)?;
        }
    }
    for place in places {
        if let Place::Taken(mut client) = place {
            // Killed like the others, after its last report.
            client.process.0.kill()?;
            let status = client.process.0.wait()?;
            ended(&client, status, &mut seen);
        }
    }
    report(&mut seen, &last, empty, out)
}

/// Samples the server's figures and the kernel's.
fn look(
    figures: &Figures,
    process: u32,
    empty: u64,
    full_bytes: u64,
    seen: &mut RunObservations,
) -> anyhow::Result<()> {
    let folder = format!("/proc/{process}");
    let own = proc_bytes(&format!("{folder}/status"), "RssAnon")?.saturating_sub(empty);
    seen.looks += 1;
    if figures.used_bytes > full_bytes / 16 * 15 {
        let rollup = format!("{folder}/smaps_rollup");
        seen.resident.push(proc_bytes(&rollup, "Rss")? as f64);
        seen.proportional.push(proc_bytes(&rollup, "Pss")? as f64);
    }
    seen.beyond.push(own as f64 - figures.used_bytes as f64);
    let fullness = figures.used_bytes as f64 / figures.capacity_bytes as f64;
    seen.fullest = seen.fullest.max(fullness);
    if figures.used_bytes > figures.capacity_bytes {
        seen.violations.push(format!(
            "{} of {} bytes are used",
            figures.used_bytes, figures.capacity_bytes
        ));
    }
    if own > figures.capacity_bytes + MARGIN_BYTES {
        seen.violations.push(format!(
            "the kernel counts {own} bytes of the server's, {} are its bound",
            figures.capacity_bytes
        ));
    }
    Ok(())
}

/// Starts a client, or handles the end of one.
fn step(
    args: &Args,
    socket: &Path,
    number: u64,
    place: &mut Place,
    figures: &Figures,
    random: &mut Random,
    seen: &mut RunObservations,
) -> anyhow::Result<()> {
    match place {
        Place::Leaving(name) if !figures.clients.contains(name) => {
            let name = format!("place-{number}-{}", seen.joined);
            *place = Place::Taken(join(args, socket, number, name, random)?);
            seen.joined += 1;
        }
        Place::Leaving(_) => {}
        Place::Taken(client) => {
            let due = Instant::now() >= client.killed_at;
            if due {
                client.process.0.kill()?;
            }
            let status = match due {
                true => Some(client.process.0.wait()?),
                false => client.process.0.try_wait()?,
            };
            if let Some(status) = status {
                ended(client, status, seen);
                *place = Place::Leaving(std::mem::take(&mut client.name));
            }
        }
    }
    Ok(())
}

/// Starts a client that leaves by itself, or is killed before, in about a quarter of a minute.
fn join(
    args: &Args,
    socket: &Path,
    place: u64,
    name: String,
    random: &mut Random,
) -> anyhow::Result<Client> {
    let seconds = 2.0 + (random.bits() % 20_000) as f64 / 1e3;
    let killed_after = match random.chance(0.5) {
        true => Duration::from_millis(random.bits() % 15_000),
        false => Duration::from_secs(3600),
    };
    // All clients together have records of several times what the store holds.
    let pages = (args.mib * 256 * 3 / args.clients).max(client::OBJECT_PAGES);
    let mut command = ourselves([
        "hcache-soak-client".to_owned(),
        format!("--socket={}", socket.display()),
        format!("--name={name}"),
        format!("--place={place}"),
        format!("--places={}", args.clients),
        format!("--pages={pages}"),
        format!("--seed={}", random.bits()),
        format!("--seconds={seconds}"),
    ])?;
    let mut process = ChildProcess::start(command.stdout(Stdio::piped()))?;
    let tally = listen(&mut process.0)?;
    Ok(Client {
        process,
        name,
        tally,
        killed_at: Instant::now() + killed_after,
    })
}

/// Reads a client's output until it ends, and sends its last report.
fn listen(process: &mut Child) -> anyhow::Result<Receiver<Tally>> {
    let output = process.stdout.take().context("a client without output")?;
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let lines = BufReader::new(output).lines().map_while(Result::ok);
        let last = lines.filter_map(|line| Tally::parse(&line)).last();
        // Nobody listens any more if the run has failed.
        let _ = sender.send(last.unwrap_or_default());
    });
    Ok(receiver)
}

fn ended(client: &Client, status: ExitStatus, seen: &mut RunObservations) {
    if let Ok(tally) = client.tally.recv() {
        seen.tally.add(tally);
    }
    match status.code() {
        Some(0) => seen.left += 1,
        None => seen.killed += 1,
        Some(client::WRONG) => {
            let what = format!("{} got what it should not have", client.name);
            seen.violations.push(what);
        }
        Some(code) => seen
            .violations
            .push(format!("{} ended with {code}", client.name)),
    }
}

fn report(
    seen: &mut RunObservations,
    last: &Figures,
    empty: u64,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    // The first tenth fills the store.
    let quarters = |values: &[f64]| -> Option<[f64; 2]> {
        let steady = &values[values.len() / 10..];
        let quarter = steady.len() / 4;
        (quarter > 0).then(|| {
            let (first, last) = (&steady[..quarter], &steady[steady.len() - quarter..]);
            [median(first.to_vec()), median(last.to_vec())]
        })
    };
    let tally = seen.tally;
    writeln!(
        out,
        "\nclients: {} joined, {} left, {} were killed; {} resizes; {} looks",
        seen.joined, seen.left, seen.killed, seen.resizes, seen.looks
    )?;
    writeln!(
        out,
        "pages, as clients last said: {} puts, {} gets, {} hits, each checked wholly; {} flushes",
        tally.puts, tally.gets, tally.hits, tally.flushes
    )?;
    writeln!(
        out,
        "at the last look: {} pages, {} of {} bytes used, {} evicted; fullest {:.1} %",
        last.pages,
        last.used_bytes,
        last.capacity_bytes,
        last.evicted_pages,
        seen.fullest * 100.0
    )?;
    writeln!(
        out,
        "memory of the server, {:.1} MiB anonymous before the first client, medians:",
        mib(empty as f64)
    )?;
    for (name, values) in [
        ("resident (RSS) when full", &seen.resident),
        ("proportional (PSS) when full", &seen.proportional),
        ("anonymous, beyond the store's own account", &seen.beyond),
    ] {
        let Some([first, last]) = quarters(values) else {
            writeln!(out, "  {name:<42} too few looks to tell")?;
            continue;
        };
        writeln!(
            out,
            "  {name:<42} first quarter {:>7.1} MiB, last {:>7.1} MiB",
            mib(first),
            mib(last)
        )?;
        if last - first > GROWTH_BYTES {
            let what = format!("{name} grew by {:.1} MiB", mib(last - first));
            seen.violations.push(what);
        }
    }
    if seen.tally.hits == 0 {
        seen.violations.push("no get ever found a page".to_owned());
    }
    for violation in &seen.violations {
        writeln!(out, "VIOLATION: {violation}")?;
    }
    anyhow::ensure!(
        seen.violations.is_empty(),
        "the bar (bound kept, no wrong byte, no growth) is NOT REACHED"
    );
    writeln!(out, "bar: bound kept, no wrong byte, no growth: reached")?;
    Ok(())
}
