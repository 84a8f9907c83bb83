//! Speed and accuracy of estimators and readers, compared with yardsticks in the same run.
//!
//! Every figure is measured in the present run: references a second of CPU time (of wall time where threads are the
//! subject), the median of several runs, from pages in memory to the finished curve. The target of a line is printed
//! beside it. `docs/performance.md` explains what bounds each.
#![forbid(unsafe_code)]

mod bands;
mod child;
mod computed;
mod disk;
mod estimators;
mod file;
mod first_touch;
mod fleet;
mod hcache;
mod long;
mod measure;
mod pagelog;
mod policy;
mod python;
mod random;
mod reading;
mod registered;
mod simulation;
mod threads;
mod trap;
mod turns;
mod volumes;
mod workload;
mod yardsticks;

use std::io::Write;

use std::cell::Cell;

use clap::{Args, Command, Parser, Subcommand};

/// Measure estimators and readers beside yardsticks.
#[derive(Debug, Parser)]
#[command(name = "plimsoll-bench")]
struct Cli {
    #[command(subcommand)]
    part: Option<Part>,
    /// References in each run, in millions
    #[arg(long, default_value_t = 20, global = true)]
    millions: u64,
    /// Runs of each line, the median of which counts; sampling estimators take another seed in each
    #[arg(long, default_value_t = 5, global = true)]
    runs: u32,
    /// Only lines whose name holds this
    #[arg(long, global = true)]
    only: Option<String>,
    /// Whether a line was named so.
    #[arg(skip)]
    has_line: Cell<bool>,
}

#[derive(Debug, Clone, Subcommand)]
enum Part {
    /// Curves from pages in memory
    Estimators,
    /// Two threads of exact LRU beside one, in turn
    Threads,
    /// Traces from files in the page cache
    Reading,
    /// Eviction policies on samples of traces beside full simulation
    Simulation(simulation::Args),
    /// Curves of 4030 volumes from one reading beside that of one volume
    Volumes,
    /// Whole processes from a trace's file to its curve
    File(file::Args),
    /// A process of `file` beside which ours are measured
    #[command(hide = true)]
    FileYardstick(file::YardstickArgs),
    /// More than 2^32 references of a loop, whose curve is known
    Long,
    /// How often bands hold the exact curve, and how wide they are
    Bands(bands::Args),
    /// What intermittent tracking saves and loses
    Intermittent(bands::Args),
    /// Error of curves of first touches by the number of traps
    FirstTouch(first_touch::Args),
    /// What a trap costs
    Trap,
    /// First touches of computed VMs of up to 1 TiB
    Computed,
    /// Memory divided among VMs: time, and distance from the optimum
    Policy,
    /// VMs placed on many hosts: time, and distance from the bound and from the best
    Fleet,
    /// The Python package beside the crates that it wraps
    Python(python::Args),
    /// A turn of the daemon over many VMs
    Turns,
    /// Page logs: records a second, and what draining them takes of the host
    Pagelog(pagelog::Args),
    /// Pages in hcache beside copies and other caches
    Hcache(hcache::Args),
    /// hcache's server beside redis and memcached
    HcacheServer(hcache::ServerArgs),
    /// Ten minutes of clients that come, go and are killed, every page checked
    HcacheSoak(hcache::SoakArgs),
    /// A VM's disk beside QEMU's own, and what its cache costs
    Disk(disk::Args),
    /// A daemon, for `disk`
    #[command(hide = true)]
    DiskServe(disk::ServeArgs),
    /// One cache, for `hcache`
    #[command(hide = true)]
    HcacheCache(hcache::CacheArgs),
    /// A server, for `hcache-server` and `hcache-soak`
    #[command(hide = true)]
    HcacheServe(hcache::ServeArgs),
    /// A client, for `hcache-soak`
    #[command(hide = true)]
    HcacheSoakClient(hcache::SoakClientArgs),
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    let mut out = std::io::stdout().lock();
    let result = match &cli.part {
        Some(Part::Estimators) => estimators::run(&cli, &mut out),
        Some(Part::Threads) => threads::run(&cli, &mut out),
        Some(Part::Reading) => reading::run(&cli, &mut out),
        Some(Part::Simulation(args)) => simulation::run(&cli, args, &mut out),
        Some(Part::Volumes) => volumes::run(&cli, &mut out),
        Some(Part::File(args)) => file::run(&cli, args, &mut out),
        Some(Part::FileYardstick(args)) => file::run_yardstick(args, &mut out),
        Some(Part::Long) => long::run(&mut out),
        Some(Part::Bands(args)) => bands::run(&cli, args, &mut out),
        Some(Part::Intermittent(args)) => bands::rests::run(&cli, args, &mut out),
        Some(Part::FirstTouch(args)) => first_touch::run(args, &mut out),
        Some(Part::Trap) => trap::run(&mut out),
        Some(Part::Computed) => computed::run(&mut out),
        Some(Part::Policy) => policy::run(&cli, &mut out),
        Some(Part::Fleet) => fleet::run(&cli, &mut out),
        Some(Part::Python(args)) => python::run(&cli, args, &mut out),
        Some(Part::Turns) => turns::run(&mut out),
        Some(Part::Pagelog(args)) => pagelog::run(&cli, args, &mut out),
        Some(Part::Hcache(args)) => hcache::run(&cli, args, &mut out),
        Some(Part::HcacheServer(args)) => hcache::run_server(&cli, args, &mut out),
        Some(Part::HcacheServe(args)) => hcache::serve(args),
        Some(Part::HcacheSoak(args)) => hcache::run_soak(args, &mut out),
        Some(Part::HcacheSoakClient(args)) => hcache::run_soak_client(args, &mut out),
        Some(Part::Disk(args)) => disk::run(&cli, args, &mut out),
        Some(Part::DiskServe(args)) => disk::serve(args),
        Some(Part::HcacheCache(args)) => hcache::run_one_cache(args, &mut out),
        None => {
            estimators::run(&cli, &mut out)?;
            threads::run(&cli, &mut out)?;
            reading::run(&cli, &mut out)?;
            file::run(&cli, &defaults(), &mut out)?;
            volumes::run(&cli, &mut out)?;
            long::run(&mut out)?;
            bands::run(&cli, &defaults(), &mut out)?;
            trap::run(&mut out)?;
            policy::run(&cli, &mut out)?;
            fleet::run(&cli, &mut out)?;
            hcache::run(&cli, &defaults(), &mut out)?;
            hcache::run_server(&cli, &defaults(), &mut out)?;
            disk::run(&cli, &defaults(), &mut out)
        }
    };
    if let (Ok(()), Some(only), false) = (&result, &cli.only, cli.has_line.get()) {
        anyhow::bail!("--only {only}: no line's name holds this");
    }
    result
}

/// The options of a part that is given none.
fn defaults<A: Args>() -> A {
    let matches = A::augment_args(Command::new("plimsoll-bench")).get_matches_from([""]);
    A::from_arg_matches(&matches).expect("every option has a default")
}

impl Cli {
    fn wants(&self, name: &str) -> bool {
        let only = self.only.as_ref();
        let wanted = only.is_none_or(|only| name.contains(only.as_str()));
        self.has_line.set(self.has_line.get() || wanted);
        wanted
    }
}

/// Writes a part's title.
fn title(out: &mut dyn Write, text: &str) -> std::io::Result<()> {
    writeln!(out, "\n{text}\n{}", "-".repeat(text.chars().count()))
}
