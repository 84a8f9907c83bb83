//! Curves from pages in memory.

use std::io::Write;
use std::num::NonZeroUsize;

use plimsoll_estimator::registry::{ALGORITHMS, OptionValue};
use plimsoll_estimator::{Estimator, ParallelLru};
use plimsoll_flow::PageCount;

use crate::measure::{Clock, Result, Stream, run as measured};
use crate::registered::{Set, registered};
use crate::workload::{Kind, Law};
use crate::yardsticks::{
    FenwickLru, InversionLru, OlkenLru, PlainAet, PlainCounterStacks, PlainFixedSizeShards,
    PlainShards,
};
use crate::{Cli, title};

type Make = Box<dyn Fn(u64) -> Box<dyn Estimator>>;

/// Targets of a line; 0.0 where there is none.
#[derive(Debug, Clone, Copy, Default)]
struct Bar {
    /// Million references a second.
    speed: f64,
    /// Mean absolute error at most, if above zero.
    mean_absolute_error: f64,
    /// Largest error at most, if above zero.
    max_error: f64,
    /// Bytes of memory at most, if above zero.
    memory_bytes: usize,
}

/// An estimator of ours on streams, and the yardsticks that do the same.
struct Line {
    name: &'static str,
    make: Make,
    streams: Vec<(Kind, Bar)>,
    yardsticks: Vec<(&'static str, Make)>,
    clock: Clock,
    /// Below this size the estimator gives no estimate.
    from: PageCount,
}

/// Memory in front of the ghost, and the sizes for which it gives no estimate.
const DIRECT: PageCount = PageCount(256 << 10);

const fn zipf(pages: u64) -> Kind {
    Kind::new(Law::Zipf, pages)
}

const fn uniform(pages: u64) -> Kind {
    Kind::new(Law::Uniform, pages)
}

const fn scattered(kind: Kind) -> Kind {
    Kind {
        scattered: true,
        ..kind
    }
}

const MILLION: u64 = 1_000_000;
const SMALL: u64 = 64 << 10;

fn speed(speed: f64) -> Bar {
    Bar {
        speed,
        ..Bar::default()
    }
}

fn boxed<E: Estimator + 'static>(make: impl Fn(u64) -> E + 'static) -> Make {
    Box::new(move |seed| Box::new(make(seed)))
}

/// The estimator of a row of the registry.
fn row(name: &'static str, set: Set) -> Make {
    Box::new(move |seed| registered(name, set, seed))
}

const fn count(number: usize) -> OptionValue {
    OptionValue::Count(NonZeroUsize::new(number).unwrap())
}

fn lines() -> Vec<Line> {
    let none = Bar::default;
    let exact = || -> Vec<(&'static str, Make)> {
        vec![
            ("hash table and Fenwick tree", boxed(|_| FenwickLru::new())),
            ("hash table and Olken's tree", boxed(|_| OlkenLru::new())),
        ]
    };
    let offline = || -> Vec<(&'static str, Make)> {
        vec![("inversions by merge sort", boxed(|_| InversionLru::new()))]
    };
    let exact_streams = vec![
        (uniform(SMALL), speed(25.0)),
        (zipf(SMALL), speed(25.0)),
        (uniform(MILLION), speed(8.0)),
        (zipf(MILLION), speed(8.0)),
        (scattered(uniform(MILLION)), speed(8.0)),
        (zipf(2 * MILLION), none()),
        (Kind::new(Law::Loop, MILLION), none()),
    ];
    let accurate = Bar {
        mean_absolute_error: 0.002,
        max_error: 0.02,
        ..none()
    };
    vec![
        Line {
            name: "exact LRU, online",
            make: row("lru", &[]),
            streams: exact_streams,
            yardsticks: exact(),
            clock: Clock::Cpu,
            from: PageCount(0),
        },
        Line {
            name: "exact LRU, offline, 1 thread (wall)",
            make: boxed(|_| ParallelLru::new(NonZeroUsize::MIN)),
            streams: vec![
                (uniform(MILLION), speed(20.0)),
                (zipf(MILLION), speed(20.0)),
            ],
            yardsticks: offline(),
            clock: Clock::Wall,
            from: PageCount(0),
        },
        Line {
            name: "exact LRU, offline, 2 threads (wall)",
            make: row("lru", const { &[("threads", count(2))] }),
            streams: vec![
                (uniform(MILLION), speed(36.0)),
                (zipf(MILLION), speed(36.0)),
            ],
            yardsticks: Vec::new(),
            clock: Clock::Wall,
            from: PageCount(0),
        },
        Line {
            name: "SHARDS at 1/100",
            make: row("shards", &[]),
            streams: vec![
                (zipf(4 * MILLION), speed(300.0)),
                (zipf(2 * MILLION), none()),
                (uniform(MILLION), none()),
            ],
            yardsticks: vec![("SHARDS-adj, plain", boxed(|_| PlainShards::new(0.01)))],
            clock: Clock::Cpu,
            from: PageCount(0),
        },
        Line {
            name: "SHARDS at 1/1000",
            make: row("shards", &[("rate", OptionValue::Rate(0.001))]),
            streams: vec![
                (zipf(4 * MILLION), speed(600.0)),
                (zipf(2 * MILLION), none()),
                (uniform(MILLION), none()),
            ],
            yardsticks: vec![("SHARDS-adj, plain", boxed(|_| PlainShards::new(0.001)))],
            clock: Clock::Cpu,
            from: PageCount(0),
        },
        Line {
            name: "SHARDS of 8192 pages",
            make: row("shards-max", &[]),
            streams: [zipf(2 * MILLION), uniform(MILLION)]
                .map(|kind| {
                    let bar = Bar {
                        speed: 80.0,
                        mean_absolute_error: 0.0016,
                        memory_bytes: 1 << 20,
                        ..none()
                    };
                    (kind, bar)
                })
                .into(),
            yardsticks: vec![(
                "fixed size, weighted",
                boxed(|_| PlainFixedSizeShards::new(8192)),
            )],
            clock: Clock::Cpu,
            from: PageCount(0),
        },
        Line {
            name: "SHARDS of 65536 pages",
            make: row("shards-max", const { &[("max-samples", count(65536))] }),
            streams: vec![(zipf(4 * MILLION), accurate), (uniform(MILLION), accurate)],
            yardsticks: vec![(
                "fixed size, weighted",
                boxed(|_| PlainFixedSizeShards::new(65536)),
            )],
            clock: Clock::Cpu,
            from: PageCount(0),
        },
        Line {
            name: "AET",
            make: row("aet", &[]),
            streams: vec![
                (zipf(MILLION), speed(120.0)),
                (uniform(MILLION), speed(120.0)),
                (zipf(4 * MILLION), speed(60.0)),
                (uniform(4 * MILLION), speed(60.0)),
                (scattered(zipf(4 * MILLION)), speed(60.0)),
                (scattered(uniform(4 * MILLION)), speed(60.0)),
            ],
            yardsticks: vec![("hash table and histogram", boxed(|_| PlainAet::new()))],
            clock: Clock::Cpu,
            from: PageCount(0),
        },
        Line {
            name: "AET of 1/100 of the pages",
            make: row("aet", &[("rate", OptionValue::Rate(0.01))]),
            streams: vec![(zipf(4 * MILLION), none()), (uniform(MILLION), none())],
            yardsticks: Vec::new(),
            clock: Clock::Cpu,
            from: PageCount(0),
        },
        Line {
            name: "Counter Stacks",
            make: row("counter-stacks", &[]),
            streams: vec![
                (
                    zipf(2 * MILLION),
                    Bar {
                        speed: 10.0,
                        mean_absolute_error: 0.01,
                        max_error: 0.1,
                        ..none()
                    },
                ),
                (uniform(MILLION), none()),
            ],
            yardsticks: vec![(
                "all counters at each reference, p 12, every 100 K",
                boxed(|_| PlainCounterStacks::new(12, 100_000)),
            )],
            clock: Clock::Cpu,
            from: PageCount(0),
        },
        Line {
            name: "average footprint",
            make: row("footprint", &[]),
            streams: vec![(zipf(2 * MILLION), none()), (uniform(MILLION), none())],
            yardsticks: Vec::new(),
            clock: Clock::Cpu,
            from: PageCount(0),
        },
        Line {
            name: "ghost of 1 M pages behind 256 K",
            make: row("ghost", &[("direct", OptionValue::Size(DIRECT))]),
            streams: vec![(zipf(2 * MILLION), none()), (uniform(MILLION), none())],
            yardsticks: Vec::new(),
            clock: Clock::Cpu,
            from: DIRECT,
        },
    ]
}

/// Rows of the registry that have lines of their own above.
const LINED: [&str; 7] = [
    "lru",
    "shards",
    "shards-max",
    "aet",
    "counter-stacks",
    "footprint",
    "ghost",
];

/// A line for each other row of the registry, with its defaults.
fn other_lines() -> impl Iterator<Item = Line> {
    let rows = ALGORITHMS.iter();
    let rows = rows.filter(|algorithm| !LINED.contains(&algorithm.name));
    rows.map(|algorithm| Line {
        name: algorithm.name,
        make: row(algorithm.name, &[]),
        streams: vec![
            (zipf(2 * MILLION), Bar::default()),
            (uniform(MILLION), Bar::default()),
        ],
        yardsticks: Vec::new(),
        clock: Clock::Cpu,
        from: PageCount(0),
    })
}

/// Measures every line and prints it.
pub(crate) fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "Estimators: {} M references from memory, median of {} runs, one core",
            cli.millions, cli.runs
        ),
    )?;
    writeln!(
        out,
        "M/s: million references a second of CPU time, curve included. MAE and max: means over the runs (and seeds); \
         max forgives\nsizes off by 1 %. The exact curve is by our exact LRU, which is tested against naive twins."
    )?;
    let lines: Vec<_> = lines()
        .into_iter()
        .chain(other_lines())
        .filter(|line| cli.wants(line.name))
        .collect();
    let mut kinds: Vec<Kind> = Vec::new();
    for line in &lines {
        for (kind, _) in &line.streams {
            if !kinds.contains(kind) {
                kinds.push(*kind);
            }
        }
    }
    for kind in kinds {
        let stream = Stream::new(kind.batches(cli.millions * MILLION)?)?;
        writeln!(
            out,
            "\n{:<50} {:>8} {:>9} {:>9} {:>10}",
            kind.to_string(),
            "M/s",
            "MAE",
            "max",
            "memory"
        )?;
        for line in &lines {
            let Some((_, bar)) = line.streams.iter().find(|(other, _)| *other == kind) else {
                continue;
            };
            let ours = measured(&stream, cli.runs, line.clock, line.from, &line.make)?;
            write_row(out, line.name, &ours, &verdict(&ours, bar))?;
            for (name, make) in &line.yardsticks {
                // A reference implementation's speed varies little compared to its distance, and it is slow.
                let result = measured(&stream, 1, line.clock, line.from, make)?;
                let ratio = format!("ours is {:.1} x as fast", ours.speed / result.speed);
                write_row(out, &format!("  beside: {name}"), &result, &ratio)?;
            }
            out.flush()?;
        }
    }
    Ok(())
}

fn write_row(out: &mut dyn Write, name: &str, result: &Result, note: &str) -> std::io::Result<()> {
    writeln!(
        out,
        "{name:<50} {:>8.1} {:>9.5} {:>9.4} {:>6.1} MiB  {note}",
        result.speed,
        result.mean_absolute_error,
        result.max_error,
        result.memory_bytes as f64 / f64::from(1 << 20),
    )
}

/// The target, and whether it was reached.
fn verdict(result: &Result, bar: &Bar) -> String {
    let mut asked = Vec::new();
    let mut reached = true;
    if bar.speed > 0.0 {
        asked.push(format!("{} M/s", bar.speed));
        reached &= result.speed >= bar.speed;
    }
    if bar.mean_absolute_error > 0.0 {
        asked.push(format!("MAE {}", bar.mean_absolute_error));
        reached &= result.mean_absolute_error <= bar.mean_absolute_error;
    }
    if bar.max_error > 0.0 {
        asked.push(format!("max {}", bar.max_error));
        reached &= result.max_error <= bar.max_error;
    }
    if bar.memory_bytes > 0 {
        asked.push(format!("{} MiB", bar.memory_bytes >> 20));
        reached &= result.memory_bytes <= bar.memory_bytes;
    }
    match (asked.is_empty(), reached) {
        (true, _) => String::new(),
        (false, true) => format!("bar: {}: reached", asked.join(", ")),
        (false, false) => format!("bar: {}: NOT REACHED", asked.join(", ")),
    }
}
