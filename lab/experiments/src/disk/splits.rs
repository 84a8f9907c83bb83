//! Disk I/O and the disk daemon's CPU time by share of a VM's memory in the cache under its disk: \[LS07\] figures 4, 7 to 10.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use clap::ValueEnum;
use plimsoll_rig::program;
use plimsoll_vm::detect;

use super::lab::{Cost, Kind, Order, measure};
use super::sizes::{CACHES_MIB, TOTAL_MIB, setup};
use crate::results::{Conditions, KeepArgs, Measurement, Progress, Repetition, ResultSet, Unit};

/// Shares of visits that write, in percent, of figure 10.
const WRITES: [u64; 5] = [10, 20, 30, 40, 50];

/// Measure disk I/O and the daemon's CPU time by share of a VM's memory in the cache under its disk, as in LS07, figures 4 and 7 to 10
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

    fn text(self) -> &'static str {
        match self {
            Self::None => "no cache",
            Self::Through => "pages from guest memory",
            Self::Delayed => "pages from guest memory, delayed writes",
            Self::FromStorage => "pages from storage",
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

    fn text(&self) -> String {
        let cache = match self.mode {
            Mode::None => Mode::None.text().to_owned(),
            _ => format!("{} % in the cache", self.cache.0),
        };
        format!(
            "{}, {} % writes, {cache}",
            self.order.text(),
            self.write_percent
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
            paper: "-11 to +5 %, SPECweb99 to +13 %",
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
    let conditions = progress.step("begin", || {
        Conditions::begin(&detect().accelerator.to_string(), &guest)
    })?;
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
        title: "Disk I/O and CPU time with part of a VM's memory in the cache".to_owned(),
        method: format!(
            "A guest visits signed files of 224 MiB in all, with {TOTAL_MIB} MiB of memory, of which a part is the cache under its disk in the \
             measured rounds; all that it reads is verified. Each change is that of pages read from and written to storage per page \
             that the guest's programs requested, relative to the same guest with all the memory and no cache. Delayed writes have a log of up to a \
             quarter of the cache besides. A request, as in the paper, is a visit of a file, here of 128 pages. The daemon's CPU time is that of its process \
             (user and system) from the begin of the measured rounds to their end: it runs on the host and is not emulated."
        ),
        command: match args.quick {
            true => format!("./dev lab splits --quick --seeds {seeds}"),
            false => format!("./dev lab splits --seeds {seeds}"),
        },
        measurements: figures
            .iter()
            .flat_map(|figure| measurements(figure, seeds, &measured))
            .chain(costs(&figures, seeds, &measured))
            .collect(),
        limits: vec![
            "Guests may be emulated, as the conditions state, so their times and throughput say nothing and are not shown; the daemon is a native process, so its CPU time does. \
             Its unit is µs per request; the paper's is the share of a CPU that its hypervisor used more."
                .to_owned(),
            "The daemon's CPU time is counted in 10 ms by the kernel, 11 µs for each of 896 requests; it contains what the daemon does between requests, \
             which lasts longer with a slower guest, and other users of the machine lengthen it, as the spread of the seeds shows."
                .to_owned(),
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
        of: split.text(),
        unit: Unit::Percent,
        values: (1..=seeds).map(|seed| change(split, seed)).collect(),
        paper: figure.paper.to_owned(),
        remark: String::new(),
    });
    rows.collect()
}

/// Costs of a request by the figure of the paper that they answer: what they are, their unit, and the paper's.
type RequestCost = (
    &'static str,
    &'static str,
    Unit,
    &'static str,
    fn(&Cost) -> u64,
);

const REQUEST_COSTS: [RequestCost; 3] = [
    (
        "LS07 fig. 7",
        "Reads and writes of storage per request",
        Unit::Mean,
        "throughput: up to -9 % (-20 % at 75 % in the cache)",
        |cost| cost.operations,
    ),
    (
        "LS07 fig. 7",
        "Pages read from and written to storage per request",
        Unit::Mean,
        "throughput: up to -9 % (-20 % at 75 % in the cache)",
        |cost| cost.storage,
    ),
    (
        "LS07 fig. 9",
        "CPU time of the disk daemon per request",
        Unit::Microseconds,
        "up to 3.2 % of a CPU more (6.7 % at 75 % in the cache)",
        |cost| cost.daemon_us,
    ),
];

/// What a request cost in each of the guests, those without a cache first.
fn costs(figures: &[Figure], seeds: u64, measured: &BTreeMap<String, Cost>) -> Vec<Measurement> {
    let mut splits: Vec<Split> = Vec::new();
    for split in figures.iter().flat_map(|figure| &figure.splits) {
        for split in [split.alone(), *split] {
            if !splits.contains(&split) {
                splits.push(split);
            }
        }
    }
    let of = |split: Split| match split.mode {
        Mode::None => split.text(),
        mode => format!("{}, {}", split.text(), mode.text()),
    };
    let rows = REQUEST_COSTS
        .iter()
        .flat_map(|&(item, what, unit, paper, part)| {
            splits.iter().map(move |&split| Measurement {
                item: item.to_owned(),
                what: what.to_owned(),
                column: String::new(),
                of: of(split),
                unit,
                values: (1..=seeds)
                    .map(|seed| {
                        let cost = measured.get(&split.name(seed))?;
                        (cost.visits > 0).then(|| part(cost) as f64 / cost.visits as f64)
                    })
                    .collect(),
                paper: match split.mode {
                    Mode::None => String::new(),
                    _ => paper.to_owned(),
                },
                remark: String::new(),
            })
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

    #[test]
    fn the_costs_of_a_request_are_those_of_a_visit_and_each_guest_has_one_row() {
        let figures = figures(true);
        let split = figures[0].splits[0];
        let cost = Cost {
            visits: 4,
            operations: 6,
            storage: 50,
            daemon_us: 1000,
            ..Cost::default()
        };
        let made = costs(&figures, 1, &[(split.name(1), cost)].into_iter().collect());
        let of = "zipf, 0 % writes, 25 % in the cache, pages from guest memory";
        let measured: Vec<_> = made.iter().filter(|one| one.of == of).collect();
        let values = measured.iter().map(|one| one.values[0]);
        assert_eq!(values.collect::<Vec<_>>(), [1.5, 12.5, 250.0].map(Some));
        // 0 and 30 % of writes without a cache, and the four figures.
        assert_eq!(made.len(), 3 * (2 + 4 * 2));
        let alone = made
            .iter()
            .find(|one| one.of == "zipf, 0 % writes, no cache");
        let alone = alone.unwrap();
        assert_eq!((alone.values[0], alone.paper.as_str()), (None, ""));
    }
}
