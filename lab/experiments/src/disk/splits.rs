//! Disk I/O by share of a VM's memory in the cache under its disk: \[LS07\] figures 4, 8 and 10.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use clap::ValueEnum;
use plimsoll_rig::program;

use super::lab::{Cost, Kind, Order, measure};
use super::sizes::{CACHES_MIB, TOTAL_MIB, setup};
use crate::results::{Conditions, KeepArgs, Measurement, Progress, Repetition, ResultSet, Unit};

/// Shares of visits that write, in percent, of figure 10.
const WRITES: [u64; 5] = [10, 20, 30, 40, 50];

/// Measure disk I/O by share of a VM's memory in the cache under its disk, as in LS07, figures 4, 8 and 10
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The guest's kernel
    #[arg(long, value_enum, default_value_t = Kind::Old)]
    guest: Kind,
    /// Measured rounds; a round has as many visits as there are files
    #[arg(long, default_value_t = 2)]
    rounds: u32,
    /// Number of seeds, each of which measures everything anew [default: 3; 1 with --quick]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// One order, two shares and one ratio of writes
    #[arg(long)]
    quick: bool,
    /// Directory of measurements already made, which are not repeated
    #[arg(long, default_value = "target/lab/splits")]
    state: PathBuf,
    #[command(flatten)]
    keep: KeepArgs,
}

/// How a cache is filled, and what becomes of writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mode {
    /// No cache.
    None,
    /// Evicted pages come from guest memory; writes go through.
    Through,
    /// The same; writes are delayed.
    Delayed,
    /// Evicted pages are read from storage.
    FromStorage,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Through => "through",
            Self::Delayed => "delayed",
            Self::FromStorage => "from-storage",
        }
    }

    /// Arguments of the disk daemon.
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::None | Self::Through => &[],
            Self::Delayed => &["--write", "delayed"],
            Self::FromStorage => &["--cache-mode", "from-storage"],
        }
    }
}

/// A guest to be measured.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Split {
    order: Order,
    write_percent: u64,
    mode: Mode,
    /// Share of the memory in the cache in percent, and the cache in MiB.
    cache: (f64, u64),
}

impl Split {
    fn name(&self, seed: u64) -> String {
        format!(
            "{}-{}-{}-{}-{seed}",
            self.order.text(),
            self.write_percent,
            self.mode.name(),
            self.cache.1
        )
    }

    /// The same guest without a cache.
    fn alone(self) -> Self {
        Self {
            mode: Mode::None,
            cache: (0.0, 0),
            ..self
        }
    }
}

/// A figure of the paper: what it varies, and what it reports.
struct Figure {
    item: &'static str,
    what: &'static str,
    paper: &'static str,
    splits: Vec<Split>,
}

fn figures(quick: bool) -> Vec<Figure> {
    let orders = match quick {
        true => &[Order::Zipf][..],
        false => Order::value_variants(),
    };
    let writes = match quick {
        true => &WRITES[2..3],
        false => &WRITES[..],
    };
    let caches = match quick {
        true => &CACHES_MIB[1..3],
        false => &CACHES_MIB[..],
    };
    let of = |mode, orders: &[Order], writes: &[u64]| -> Vec<Split> {
        let mut splits = Vec::new();
        for &order in orders {
            for &write_percent in writes {
                splits.extend(caches.iter().map(|&cache| Split {
                    order,
                    write_percent,
                    mode,
                    cache,
                }));
            }
        }
        splits
    };
    vec![
        Figure {
            item: "LS07 fig. 8",
            what: "Evicted pages come from guest memory, read only",
            paper: "-11 to +5 %",
            splits: of(Mode::Through, orders, &[0]),
        },
        Figure {
            item: "LS07 fig. 4",
            what: "Evicted pages are read from storage, read only",
            paper: "\"substantial\" increase",
            splits: of(Mode::FromStorage, &[Order::Zipf], &[0]),
        },
        Figure {
            item: "LS07 fig. 10",
            what: "With writes that go through",
            paper: "up to +7 % (50 % of writes)",
            splits: of(Mode::Through, &[Order::Zipf], writes),
        },
        Figure {
            item: "LS07 fig. 10",
            what: "With delayed writes",
            paper: "0 %",
            splits: of(Mode::Delayed, &[Order::Zipf], writes),
        },
    ]
}

/// Runs the experiment.
///
/// # Errors
///
/// Why a guest did not come to its end, or what it read wrong; what was measured before is kept and not repeated.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let figures = figures(args.quick);
    let seeds = args.seeds.unwrap_or(if args.quick { 1 } else { 3 });
    let mut names: Vec<String> = Vec::new();
    for split in figures.iter().flat_map(|figure| &figure.splits) {
        names.extend([split.name(0), split.alone().name(0)]);
    }
    names.sort_unstable();
    names.dedup();
    let settings = format!("{}, {} rounds", args.guest.text(), args.rounds);
    let mut progress = Progress::begin(
        &args.state,
        &settings,
        names.len() * usize::try_from(seeds)? + 2,
    )?;
    let guest = format!("{}, one vCPU", args.guest.text());
    let conditions = progress.step("begin", || Conditions::begin("tcg", &guest))?;
    let mut measured: BTreeMap<String, Cost> = BTreeMap::new();
    let program = program("plimsoll")?;
    for seed in 1..=seeds {
        for figure in &figures {
            for split in &figure.splits {
                for split in [split.alone(), *split] {
                    let name = split.name(seed);
                    if measured.contains_key(&name) {
                        continue;
                    }
                    let cost = progress.step(&name, || {
                        let (_, cache_mib) = split.cache;
                        let (order, writes) = (split.order, split.write_percent);
                        let ram_mib = TOTAL_MIB - cache_mib;
                        let mut setup = setup(args.guest, order, writes, ram_mib, cache_mib);
                        let arguments = split.mode.arguments().iter();
                        setup.serve.extend(arguments.map(|word| (*word).to_owned()));
                        setup.workload += &format!(" rounds={} seed={seed}", args.rounds);
                        measure(&program, &setup)
                    })?;
                    measured.insert(name, cost);
                }
            }
        }
    }
    let conditions = progress.step("end", || conditions.ended())?;
    let set = ResultSet {
        title: "Disk I/O with part of a VM's memory in the cache".to_owned(),
        method: format!(
            "A guest visits signed files of 224 MiB in all, with {TOTAL_MIB} MiB of memory, of which a part is the cache under its disk in the \
             measured rounds; all that it reads is verified. Each figure is the change of pages read from and written to storage per page \
             that the guest's programs requested, relative to the same guest with all the memory and no cache. Delayed writes have a log of up to a \
             quarter of the cache besides."
        ),
        command: match args.quick {
            true => format!("./dev lab splits --quick --seeds {seeds}"),
            false => format!("./dev lab splits --seeds {seeds}"),
        },
        measurements: figures
            .iter()
            .flat_map(|figure| measurements(figure, seeds, &measured))
            .collect(),
        limits: vec![
            "Counts, no times: the guests are emulated.".to_owned(),
            "The workloads are our own, of the orders that the paper's microbenchmarks have; its four services are not among them."
                .to_owned(),
        ],
        raw: serde_json::to_value(&measured)?,
        ..ResultSet::new("splits", conditions, (seeds, Repetition::Seed))
    };
    args.keep.keep(set, Vec::new(), out)
}

fn measurements(
    figure: &Figure,
    seeds: u64,
    measured: &BTreeMap<String, Cost>,
) -> Vec<Measurement> {
    let per_page = |split: Split, seed| {
        let cost = measured.get(&split.name(seed))?;
        (cost.asked > 0).then(|| cost.storage as f64 / cost.asked as f64)
    };
    let change =
        |split: Split, seed| Some(per_page(split, seed)? / per_page(split.alone(), seed)? - 1.0);
    let rows = figure.splits.iter().map(|&split| Measurement {
        item: figure.item.to_owned(),
        what: format!("Change of disk I/O per page: {}", figure.what),
        column: String::new(),
        of: format!(
            "{}, {} % writes, {} % in the cache",
            split.order.text(),
            split.write_percent,
            split.cache.0
        ),
        unit: Unit::Percent,
        values: (1..=seeds).map(|seed| change(split, seed)).collect(),
        paper: figure.paper.to_owned(),
        remark: String::new(),
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_relative_to_the_same_guest_without_a_cache() {
        let figures = figures(false);
        let figure = &figures[2];
        let split = figure.splits[0];
        assert_eq!((split.write_percent, split.mode), (10, Mode::Through));
        let cost = |storage| Cost {
            asked: 100,
            storage,
            ..Cost::default()
        };
        let measured = [
            (split.name(1), cost(53)),
            (split.alone().name(1), cost(50)),
            (split.name(2), cost(40)),
        ];
        let made = measurements(figure, 2, &measured.into_iter().collect());
        let change = made[0].values[0].unwrap();
        assert!((change - 0.06).abs() < 1e-9, "{change}");
        // Without the guest that it is compared with.
        assert_eq!(made[0].values[1], None);
        assert_eq!(made[0].of, "zipf, 10 % writes, 12.5 % in the cache");
    }
}
