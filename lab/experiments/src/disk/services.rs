//! The miss-ratio curve of a real database with a light task beside it, predicted by the cache under its VM's disk and measured in VMs of
//! other sizes: \[LS07\] figure 12.
//!
//! The guest is the Debian of lab/programs, whose whole root is on the disk: pages of programs, database and the task's files compete for its
//! memory as in the paper. The database is made once; each guest gets a copy.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use plimsoll_flow::PageSize;
use plimsoll_plot::{Axis, Chart, Point, Series, SeriesStyle, Unit as AxisUnit};
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_rig::{ProgramsImage, Setup, program};
use plimsoll_vm::detect;
use tempfile::TempDir;

use super::lab::{Cost, GROWTH_BYTES, Kind, measure};
use crate::results::{Conditions, KeepArgs, Measurement, Progress, Repetition, ResultSet, Unit};

const GUEST: Kind = Kind::Old;
/// The job of lab/programs.
const JOB: &str = "tpch-light";
/// Queries of a round.
const QUERIES: f64 = 22.0;
/// RAM of the guest and its cache together, in MiB, and the part in the cache while misses are predicted.
const TOTAL_MIB: u64 = 240;
const CACHE_MIB: u64 = 128;
/// RAM of guests without a cache whose misses are predicted, in MiB.
const SIZES_MIB: [u64; 6] = [120, 136, 152, 176, TOTAL_MIB, 288];
/// RAM of the guest that makes the database.
const MAKER_MIB: u64 = 256;

/// Predict the misses of a database with a light task beside it in VMs of other sizes, and measure them, as in LS07, figure 12
///
/// Takes about 15 minutes for a seed with emulated guests. A guest that was measured is not measured again.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Measured rounds of the queries, after one that is not measured
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of seeds, each with another order of the queries [default: 3; 1 with --quick]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// One size beside that of guest and cache together
    #[arg(long)]
    quick: bool,
    /// Directory of measurements already made, which are not repeated
    #[arg(long, default_value = "target/lab/services")]
    state: PathBuf,
    #[command(flatten)]
    keep: KeepArgs,
}

/// The guests of a seed.
#[derive(Debug)]
struct Seed {
    /// With a part of the memory in the cache.
    split: Cost,
    /// Without a cache, by RAM in MiB.
    alone: BTreeMap<u64, Cost>,
}

/// Runs the experiment.
///
/// # Errors
///
/// Without the image of lab/programs; why a guest did not come to its end, or that its queries had another outcome than those before. What was
/// measured before is kept and not repeated.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let sizes = match args.quick {
        true => &[SIZES_MIB[1], TOTAL_MIB][..],
        false => &SIZES_MIB,
    };
    let seeds = args.seeds.unwrap_or(if args.quick { 1 } else { 3 });
    let programs = ProgramsImage::locate(GUEST.kernel())?;
    let plimsoll = program("plimsoll")?;
    let settings = format!("{}, {} rounds", GUEST.text(), args.rounds);
    let steps = usize::try_from(seeds)? * (sizes.len() + 1) + 2;
    let mut progress = Progress::begin(&args.state, &settings, steps)?;
    let guest = format!("Debian 12, {}, one vCPU", GUEST.text());
    let conditions = progress.step("begin", || {
        Conditions::begin(&detect().accelerator.to_string(), &guest)
    })?;
    let made = args.state.join("made.img");
    progress.step("made", || {
        copy(&programs.disk, &made)?;
        let work = "rounds=0 warmup=0";
        measure(&plimsoll, &setup(&made, work, MAKER_MIB, 0)).map(drop)
    })?;
    let mut measured = Vec::new();
    for seed in 1..=seeds {
        let mut guest = |ram_mib, cache_mib| {
            let name = format!("{ram_mib}-{cache_mib}-{seed}");
            let step = progress.step(&name, || {
                let folder = TempDir::new_in(&args.state)?;
                let image = folder.path().join("disk.img");
                copy(&made, &image)?;
                let work = format!("rounds={} warmup=1 seed={seed}", args.rounds);
                let cost = measure(&plimsoll, &setup(&image, &work, ram_mib, cache_mib))?;
                let curve = cost.curve.clone();
                Ok((cost, curve))
            });
            let (cost, curve): (Cost, Option<CurveJson>) = step?;
            anyhow::Ok(Cost { curve, ..cost })
        };
        measured.push(Seed {
            split: guest(TOTAL_MIB - CACHE_MIB, CACHE_MIB)?,
            alone: sizes
                .iter()
                .map(|&ram_mib| anyhow::Ok((ram_mib, guest(ram_mib, 0)?)))
                .collect::<anyhow::Result<_>>()?,
        });
    }
    let conditions = conditions.ended()?;
    let quick = if args.quick { " --quick" } else { "" };
    let command = format!("plimsoll lab services --keep docs/results{quick} --seeds {seeds}");
    let set = ResultSet {
        command,
        ..result_set(&measured, args.rounds, conditions)?
    };
    let chart = chart(&measured, args.rounds);
    args.keep.keep(set, vec![("curve", chart)], out)
}

/// A guest whose root is the image; `cache_mib` of its memory are in the cache in the measured rounds, 0: there is none.
fn setup(image: &Path, work: &str, ram_mib: u64, cache_mib: u64) -> Setup {
    let serve = match cache_mib {
        0 => "--cache-mode none".to_owned(),
        _ => format!("--cache {}M", cache_mib - (GROWTH_BYTES >> 20)),
    };
    let workload = format!("job={JOB} {work} module=copy module.slots=1024");
    Setup {
        kernel: GUEST.kernel(),
        memory_mib: ram_mib,
        image: Some(image.to_owned()),
        boots_image: true,
        ..Setup::new(&serve, &workload)
    }
}

/// Copies an image, most of which is holes.
fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let copied = Command::new("cp")
        .args(["--sparse=always", "--reflink=auto"])
        .args([from, to])
        .output()
        .context("cp")?;
    ensure!(
        copied.status.success(),
        "cp: {}",
        String::from_utf8_lossy(&copied.stderr)
    );
    Ok(())
}

fn result_set(measured: &[Seed], rounds: u32, conditions: Conditions) -> anyhow::Result<ResultSet> {
    let queries = f64::from(rounds) * QUERIES;
    type Value<'a> = &'a dyn Fn(&Seed, u64) -> Option<f64>;
    let row = |what: &str, of: String, unit, paper: &str, value: &dyn Fn(&Seed) -> Option<f64>| {
        Measurement {
            item: "LS07 fig. 12".to_owned(),
            what: what.to_owned(),
            of,
            column: String::new(),
            unit,
            values: measured.iter().map(value).collect(),
            paper: paper.to_owned(),
            remark: String::new(),
        }
    };
    let misses = |seed: &Seed, ram_mib| Some(seed.alone.get(&ram_mib)?.missed as f64 / queries);
    let expected = |seed: &Seed, ram_mib| Some(expected(seed, ram_mib)? / queries);
    let topics: [(&str, Unit, Value<'_>); 3] = [
        ("Pages read per query by RAM: measured", Unit::Mean, &misses),
        (
            "Pages read per query by RAM: predicted",
            Unit::Mean,
            &expected,
        ),
        (
            "Pages read by RAM: error of the prediction",
            Unit::Percent,
            &error,
        ),
    ];
    let sizes = measured.first().into_iter();
    let sizes: Vec<u64> = sizes.flat_map(|seed| seed.alone.keys().copied()).collect();
    let mut measurements = Vec::new();
    for (what, unit, value) in topics {
        measurements.extend(sizes.iter().map(|&ram_mib| {
            let paper = match (unit, ram_mib.cmp(&TOTAL_MIB)) {
                (Unit::Percent, Ordering::Less) => "within 9 % (fig. 11, without the task)",
                (Unit::Percent, Ordering::Greater) => "within 15 % (fig. 11, without the task)",
                _ => "",
            };
            let of = format!("{ram_mib} MiB");
            row(what, of, unit, paper, &|seed| value(seed, ram_mib))
        }));
    }
    let what = "Pages read from storage per query with part of the memory in the cache";
    let of = format!(
        "{} MiB and a cache of {CACHE_MIB} MiB",
        TOTAL_MIB - CACHE_MIB
    );
    measurements.push(row(what, of.clone(), Unit::Mean, "", &|seed| {
        Some(seed.split.disk_reads as f64 / queries)
    }));
    let what = "Evicted pages that the cache did not take, from the guest's start on";
    measurements.push(row(what, of, Unit::Count, "", &|seed| {
        Some(seed.split.lost as f64)
    }));
    let what = "Sizes whose measured pages are within the curve's band";
    let of = format!("of {}", sizes.len());
    measurements.push(row(what, of, Unit::Count, "", &|seed| {
        let inside = sizes.iter().filter(|&&ram_mib| is_in_band(seed, ram_mib));
        Some(inside.count() as f64)
    }));
    let seeds = u64::try_from(measured.len())?;
    Ok(ResultSet {
        title: "Misses of TPC-H with a light background task, predicted and measured".to_owned(),
        method: format!(
            "PostgreSQL answers the 22 queries of TPC-H, one after the other, in an order by the seed; after each of them a light task reads one of 256 files of 1 MiB, \
             each in its turn. Each result is compared with that of the first round. The curve is that of a guest with {} MiB of RAM whose disk has a cache of {CACHE_MIB} MiB \
             under it, in {rounds} rounds after one of warm-up. Guests with the RAM of each row and without a cache measure it. All pages read are counted by the \
             disk's daemon: those of the database, of the task and of the guest's programs. The error is that of the predicted against the measured pages.",
            TOTAL_MIB - CACHE_MIB,
        ),
        measurements,
        limits: vec![
            "All figures are counts, none is a time: guests may be emulated, as the conditions state.".to_owned(),
            "The paper's database has 512 MiB of memory and its task reads a file of 4 MiB every 2.5 s, of 500. Here all is smaller (21 MB of data as text, some 50 MB with \
             indexes), and the task reads by queries, not by time, because an emulated guest's time depends on the host's load."
                .to_owned(),
            "PostgreSQL reads through the kernel's page cache into 8 MiB of shared buffers of its own, whose hits nobody sees; of the paper's database nothing is known.".to_owned(),
            "With part of the memory in the cache, the guest reads some pages more from storage than with all of it: metadata of file systems, which are evicted without their \
             contents, and whose frames were used again before the host had read them (guest/module/README.md)."
                .to_owned(),
            "With less memory the prediction is too high where the curve is steep, because the guest's kernel does not evict in LRU order. For a cache it holds: with real caches of 8 and \
             24 MiB the guest of 112 MiB read 4503 and 1728 pages per query from storage, and the curve has 4483 and 1697 there (seed 1, one run each). Guests with so much more \
             memory read fewer, because the kernel puts more of the pages that it reads again on its active list: 9 % in the guest of 112 MiB, 30 % in that of 120 and 54 % in that of 152. \
             Pages that are read once, as those of the task, are not on it. Without the task the guest of 152 MiB read what the curve has for 3 MiB more (an error of 52 % all the same), \
             with it for 9 MiB more. The ring of the guest's module, 4.5 MiB, is in all guests and so no cause."
                .to_owned(),
            "The files of the task are more than any of these guests' memory and none is read twice in a run, so that no memory saves their reads, as in the paper.".to_owned(),
        ],
        raw: serde_json::to_value(
            measured
                .iter()
                .map(|seed| (&seed.split, &seed.split.curve, &seed.alone))
                .collect::<Vec<_>>(),
        )?,
        ..ResultSet::new("services", conditions, (seeds, Repetition::Seed))
    })
}

/// Pages that the curve predicts for the guest with so much RAM.
fn expected(seed: &Seed, ram_mib: u64) -> Option<f64> {
    let alone = seed.alone.get(&ram_mib)?;
    Some(seed.split.expected(alone.memory)?.expected)
}

/// Whether the pages that the guest read are within the curve's band.
fn is_in_band(seed: &Seed, ram_mib: u64) -> bool {
    seed.alone.get(&ram_mib).is_some_and(|alone| {
        let expected = seed.split.expected(alone.memory);
        expected.is_some_and(|at| (at.low..=at.high).contains(&(alone.missed as f64)))
    })
}

/// Error of the predicted pages relative to those that were read.
fn error(seed: &Seed, ram_mib: u64) -> Option<f64> {
    let missed = seed.alone.get(&ram_mib)?.missed;
    (missed > 0).then_some(())?;
    Some(expected(seed, ram_mib)? / missed as f64 - 1.0)
}

/// The curve of the first seed, and the measured misses of all.
fn chart(measured: &[Seed], rounds: u32) -> Chart {
    let queries = f64::from(rounds) * QUERIES;
    let bytes = |pages: u64| (pages * PageSize::FOUR_KIB.bytes()) as f64;
    let mut dots: Vec<(f64, f64)> = measured
        .iter()
        .flat_map(|seed| seed.alone.values())
        .map(|cost| (bytes(cost.memory), cost.missed as f64 / queries))
        .collect();
    dots.sort_by(|one, other| one.0.total_cmp(&other.0));
    let until = dots.last().map_or(0.0, |(memory, _)| *memory);
    let mut predicted = Series::new("predicted", SeriesStyle::Line, []);
    for curve in measured
        .iter()
        .take(1)
        .filter_map(|seed| seed.split.curve.as_ref())
    {
        let reads = |ratio: f64| ratio * curve.references as f64 / queries;
        let points = curve.points.iter().map(|point| Point {
            x: bytes(point.size_pages),
            y: reads(point.miss_ratio),
            low: reads(point.low),
            high: reads(point.high),
        });
        // Before the first, which is what the guest has, nothing is known.
        let known = |point: &Point| point.x > 0.0 && point.x <= until;
        predicted.points.extend(points.filter(known));
    }
    let title = "Misses of TPC-H with a light background task";
    let subtitle = format!(
        "predicted with half of the memory in the cache under the disk, and measured without a cache; accelerator {}",
        detect().accelerator
    );
    let x = Axis::new("memory", AxisUnit::Bytes);
    let y = Axis::new("pages read per query", AxisUnit::Count);
    let dots = Series::new("measured", SeriesStyle::Dots, dots);
    Chart::new(title, &subtitle, [x, y], [predicted, dots])
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount};

    /// Memory in pages is its RAM in MiB here, times 100.
    fn seed(alone: [u64; 3]) -> Seed {
        let points = [(13600, 0.5), (24000, 0.25), (28800, 0.2)];
        let points = points.map(|(size, ratio)| CurvePoint::exact(PageCount(size), ratio));
        let curve = MissRatioCurve::new(points.to_vec(), 44_000).unwrap();
        let guest = |(ram_mib, missed)| {
            let cost = Cost {
                memory: ram_mib * 100,
                missed,
                ..Cost::default()
            };
            (ram_mib, cost)
        };
        Seed {
            split: Cost {
                curve: Some(CurveJson::new("vm", PageSize::FOUR_KIB, None, &curve)),
                ..Cost::default()
            },
            alone: [136, 240, 288].into_iter().zip(alone).map(guest).collect(),
        }
    }

    #[test]
    fn errors_are_those_of_the_curve_at_the_memory_of_each_guest() {
        let conditions = Conditions::begin("tcg", "none").unwrap();
        let measured = [seed([20_000, 11_000, 8_000]), seed([22_000, 11_000, 0])];
        let set = result_set(&measured, 2, conditions).unwrap();
        let values = |what: &str, of: &str| {
            let mut rows = set.measurements.iter();
            let row = rows.find(|one| one.what.ends_with(what) && one.of == of);
            let values = row.unwrap().values.iter();
            let rounded = |value: f64| (value * 1e6).round() / 1e6;
            values.map(|one| one.map(rounded)).collect::<Vec<_>>()
        };
        // 2 rounds of 22 queries.
        assert_eq!(values("measured", "240 MiB"), [Some(250.0); 2]);
        assert_eq!(values("predicted", "136 MiB"), [Some(500.0); 2]);
        let error = "error of the prediction";
        assert_eq!(values(error, "136 MiB"), [Some(0.1), Some(0.0)]);
        // The curve of the test has no width.
        assert_eq!(values("band", "of 3"), [Some(1.0), Some(2.0)]);
        // Of a guest that read nothing there is no relative error.
        assert_eq!(values(error, "288 MiB"), [Some(0.1), None]);
        assert_eq!(chart(&measured, 2).series[1].points.len(), 6);
    }
}
