//! Coverage and width of the confidence bands: how often they contain the exact curve.
//!
//! Every estimator that is not exact observes every kind of stream and every trace, each with a number of seeds; for
//! synthetic streams the references differ with the seed as well, for traces the page numbers, which are shifted by a
//! constant, so that estimators without a seed draw other pages, too.
//!
//! *Held* is the share of sizes at which the exact miss ratio lies within the band, pooled over the seeds:
//! at even sizes up to the footprint, and at sizes even in their logarithm, where small sizes count
//! as much as large ones. *Width* is the mean of high less low over the same sizes.

mod disk;
mod live;
pub(crate) mod rests;

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use plimsoll_estimator::registry::{ALGORITHMS, OptionValue, Settings};
use plimsoll_estimator::{Estimator, ExactLru, GhostLru, GhostOptions};
use plimsoll_flow::{
    AccessKind, MissRatioCurve, PageCount, PageNumber, ReferenceBatch, Source, Whole as _,
};
use plimsoll_source::synthetic::{Pattern, Workload};

use crate::registered::{Set, registered};
use crate::{Cli, title};

/// Measure how often bands hold the exact curve.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Seeds of each estimator and stream
    #[arg(long, default_value_t = 20)]
    seeds: u64,
    /// The first seed; the tests of the estimators take small ones
    #[arg(long, default_value_t = 1000)]
    first_seed: u64,
    /// Thousands of references in a made stream
    #[arg(long, default_value_t = 1000)]
    thousands: u64,
    /// Only streams whose name holds this
    #[arg(long)]
    stream: Option<String>,
    /// A trace to take beside the made streams
    #[arg(long)]
    trace: Vec<PathBuf>,
    /// A directory whose traces are taken, those that can be read
    #[arg(long, default_value = "target/traces")]
    traces: PathBuf,
    /// Write the table of live curves to this file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// Pages of the made streams.
const PAGES: u64 = 100_000;
/// Pages of streams that use a few pages much, most of which no sample has.
const HOT_PAGES: u64 = 50;

/// Maximum number of references taken of a trace.
const TRACE_MAX: usize = 1_000_000;

/// The target share of sizes at which a band contains the exact curve.
const HELD_MIN: f64 = 0.95;

/// Rounding error that does not count against a band.
const ROUNDING: f64 = 1e-9;

/// An estimator under test: its name, and how it is made from a seed and the stream's footprint in pages.
type Trial = (String, Box<dyn Fn(u64, u64) -> Box<dyn Estimator>>);

/// Rows with other options than their defaults.
const VARIANTS: [(&str, Set); 3] = [
    ("shards", &[("rate", OptionValue::Rate(0.1))]),
    (
        "shards-max",
        &[(
            "max-samples",
            OptionValue::Count(NonZeroUsize::new(1024).unwrap()),
        )],
    ),
    ("aet", &[("rate", OptionValue::Rate(0.01))]),
];

/// Every estimator of the registry that is not exact, the variants, and a ghost buffer by the footprint.
fn trials() -> Vec<Trial> {
    let whole = Settings::default();
    let rows = ALGORITHMS.iter();
    let rows = rows.filter(|row| !row.is_exact && row.missing(&whole).is_none());
    let defaults = rows.map(|row| (row.name, &[] as Set));
    let mut trials: Vec<Trial> = defaults
        .chain(VARIANTS)
        .map(|(row, set)| -> Trial {
            let options = set.iter().map(|(name, value)| format!(" --{name} {value}"));
            let name = options.fold(row.to_owned(), |name, option| name + &option);
            (name, Box::new(move |seed, _| registered(row, set, seed)))
        })
        .collect();
    trials.push((
        "ghost of half the pages behind a quarter".to_owned(),
        Box::new(|_, pages| {
            let options = GhostOptions {
                direct: PageCount((pages / 4).max(1)),
                ghost: PageCount((pages / 2).max(1)),
                segment: PageCount((pages / 100).max(1)),
            };
            Box::new(GhostLru::new(options).expect("sizes that fit"))
        }),
    ));
    trials
}

/// The results of an estimator on one stream: sums over sizes and seeds.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    even: Sizes,
    log: Sizes,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sizes {
    count: f64,
    held: f64,
    width: f64,
    squares: f64,
}

impl Sizes {
    fn add(&mut self, curve: &MissRatioCurve, exact: &MissRatioCurve, sizes: &[PageCount]) {
        for &size in sizes {
            let (point, truth) = (curve.at(size), exact.miss_ratio(size));
            let holds = point.low - ROUNDING <= truth && truth <= point.high + ROUNDING;
            self.count += 1.0;
            self.held += f64::from(u8::from(holds));
            self.width += point.high - point.low;
            self.squares += (point.miss_ratio - truth).powi(2);
        }
    }

    fn held(&self) -> f64 {
        self.held / self.count
    }
}

/// The sizes at which curves are inspected.
fn even_sizes(footprint: u64) -> Vec<PageCount> {
    let mut sizes: Vec<_> = (1..=500_u64)
        .map(|step| PageCount((footprint * step / 500).max(1)))
        .collect();
    sizes.dedup();
    sizes
}

fn log_sizes(footprint: u64) -> Vec<PageCount> {
    let ratio = (footprint as f64).ln();
    let size = |step: u32| PageCount(u64::whole((ratio * f64::from(step) / 200.0).exp().round()));
    let mut sizes: Vec<_> = (1..=200).map(size).collect();
    sizes.dedup();
    sizes
}

/// A test stream: its pages, from a seed.
pub(crate) struct Stream {
    pub(crate) name: String,
    pub(crate) pages: Box<dyn Fn(u64) -> anyhow::Result<Vec<u64>>>,
}

/// Takes `references` pages of a pattern.
fn pages_of(pattern: Pattern, seed: u64) -> anyhow::Result<Vec<u64>> {
    let workload = Workload {
        seed,
        ..Workload::of(pattern)
    };
    let mut source = workload.source()?;
    let (mut pages, mut batch) = (Vec::new(), ReferenceBatch::new());
    while source.next_batch(&mut batch)? {
        pages.extend(batch.pages().iter().map(|page| page.0));
    }
    Ok(pages)
}

fn zipf(pages: u64, alpha: f64, references: u64) -> Pattern {
    Pattern::Zipf {
        pages: PageCount(pages),
        alpha,
        references,
    }
}

fn uniform(pages: u64, references: u64) -> Pattern {
    Pattern::Uniform {
        pages: PageCount(pages),
        references,
    }
}

/// Takes the next page of one stream or the other, as `first` decides at each reference.
fn interleaved(
    references: u64,
    mut first: impl FnMut(u64) -> bool,
    one: impl IntoIterator<Item = u64>,
    other: impl IntoIterator<Item = u64>,
) -> Vec<u64> {
    let (mut one, mut other) = (one.into_iter(), other.into_iter());
    let next = |now| {
        if first(now) { one.next() } else { other.next() }
    };
    (0..references).map_while(next).collect()
}

fn made_streams(references: u64) -> Vec<Stream> {
    let stream = |name: &str, pages: Box<dyn Fn(u64) -> anyhow::Result<Vec<u64>>>| Stream {
        name: name.into(),
        pages,
    };
    let count = usize::try_from(references).unwrap_or(usize::MAX);
    let mut streams = vec![stream(
        "uniform",
        Box::new(move |seed| pages_of(uniform(PAGES, references), seed)),
    )];
    for alpha in [0.6, 0.8, 1.0, 1.2] {
        streams.push(stream(
            &format!("Zipf {alpha:.1}"),
            Box::new(move |seed| pages_of(zipf(PAGES, alpha, references), seed)),
        ));
    }
    let sawtooth = |at: u64| (at % (2 * PAGES)).min(2 * PAGES - 1 - at % (2 * PAGES));
    streams.extend([
        stream(
            "loop",
            Box::new(move |_| Ok((0..PAGES).cycle().take(count).collect())),
        ),
        stream(
            "two classes",
            Box::new(move |seed| {
                let pages = PageCount(PAGES);
                pages_of(Pattern::Class { pages, references }, seed)
            }),
        ),
        stream(
            "sawtooth",
            Box::new(move |_| Ok((0..references).map(sawtooth).collect())),
        ),
        stream(
            "phases of loop and uniform",
            Box::new(move |seed| {
                let mixed = pages_of(uniform(PAGES / 2, references), seed)?;
                let mixed = mixed.into_iter().map(|page| page + PAGES / 2);
                let is_loop = |now: u64| (now / (2 * PAGES)).is_multiple_of(2);
                Ok(interleaved(
                    references,
                    is_loop,
                    (0..PAGES / 2).cycle(),
                    mixed,
                ))
            }),
        ),
        stream(
            "half loop, half Zipf 1.0",
            Box::new(move |seed| {
                let coins = pages_of(uniform(2, references), seed ^ 1 << 40)?;
                let skewed = pages_of(zipf(PAGES / 2, 1.0, references), seed)?;
                let skewed = skewed.into_iter().map(|page| page + PAGES / 2);
                let mut coins = coins.into_iter();
                let is_loop = |_| coins.next() == Some(0);
                Ok(interleaved(
                    references,
                    is_loop,
                    (0..PAGES / 2).cycle(),
                    skewed,
                ))
            }),
        ),
        stream(
            "half loop, half 50 pages",
            Box::new(move |seed| {
                let hot = pages_of(uniform(HOT_PAGES, references), seed)?;
                let cold = (HOT_PAGES..PAGES).cycle();
                Ok(interleaved(
                    references,
                    |now| now.is_multiple_of(2),
                    hot,
                    cold,
                ))
            }),
        ),
        stream(
            "loop, then 50 pages",
            Box::new(move |seed| {
                let hot = pages_of(uniform(HOT_PAGES, references), seed)?;
                let cold = (HOT_PAGES..PAGES).cycle();
                Ok(interleaved(
                    references,
                    |now| now >= references / 2,
                    hot,
                    cold,
                ))
            }),
        ),
        stream("one page", Box::new(move |_| Ok(vec![7; count]))),
        stream(
            "all distinct",
            Box::new(move |_| Ok((0..references).collect())),
        ),
    ]);
    streams
}

fn trace_stream(path: &Path) -> anyhow::Result<Stream> {
    let mut trace = plimsoll_source::open(path, &plimsoll_source::Options::default())?;
    let (mut pages, mut batch) = (Vec::new(), ReferenceBatch::new());
    while pages.len() < TRACE_MAX && trace.next_batch(&mut batch)? {
        pages.extend(batch.pages().iter().map(|page| page.0));
    }
    anyhow::ensure!(!pages.is_empty(), "no reference in it");
    let name = path.file_name().unwrap_or_default();
    Ok(Stream {
        name: name.to_string_lossy().into_owned(),
        pages: Box::new(move |_| Ok(pages.clone())),
    })
}

/// The streams to measure: those made, the traces requested, and those of the directory that can be read.
fn wanted(made: Vec<Stream>, args: &Args, out: &mut dyn Write) -> anyhow::Result<Vec<Stream>> {
    let mut streams = made;
    for path in &args.trace {
        streams.push(trace_stream(path).with_context(|| path.display().to_string())?);
    }
    streams.extend(traces_in(&args.traces, out)?);
    if let Some(only) = &args.stream {
        streams.retain(|stream| stream.name.contains(only.as_str()));
    }
    Ok(streams)
}

/// The traces of a directory that can be read.
pub(crate) fn traces_in(directory: &Path, out: &mut dyn Write) -> anyhow::Result<Vec<Stream>> {
    let mut streams = Vec::new();
    let Ok(folder) = std::fs::read_dir(directory) else {
        writeln!(out, "SKIPPED: no traces in {}", directory.display())?;
        return Ok(streams);
    };
    let mut paths = folder
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()?;
    paths.sort();
    for path in paths {
        match trace_stream(&path) {
            Ok(stream) => streams.push(stream),
            Err(error) => writeln!(out, "SKIPPED: {}: {error:#}", path.display())?,
        }
    }
    Ok(streams)
}

/// Measures every estimator on every stream and prints a table for each; those of live curves are called `live trap`, ..
pub(crate) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    live::run(cli, args, out)?;
    disk::run(cli, args, out)?;
    let estimators: Vec<_> = trials()
        .into_iter()
        .filter(|(name, _)| cli.wants(name))
        .collect();
    if estimators.is_empty() {
        return Ok(());
    }
    title(
        out,
        &format!(
            "Bands of 95 %: {} seeds from {}, {} K references over {} K pages, and traces",
            args.seeds,
            args.first_seed,
            args.thousands,
            PAGES / 1000
        ),
    )?;
    writeln!(
        out,
        "Held: share of sizes whose exact miss ratio lies in the band, at 500 even sizes up to the footprint and at \
         200 sizes\neven in their logarithm; width: high less low, mean; RMS: error of the miss ratio itself."
    )?;
    let streams = wanted(made_streams(args.thousands * 1000), args, out)?;
    let mut tallies = vec![vec![Tally::default(); streams.len()]; estimators.len()];
    for (at, stream) in streams.iter().enumerate() {
        for seed in args.first_seed..args.first_seed + args.seeds {
            let batches = batches_of(&(stream.pages)(seed)?, seed << 32);
            let mut lru = ExactLru::new();
            batches.iter().for_each(|batch| lru.observe(batch.pages()));
            let (exact, footprint) = (lru.curve()?, lru.distinct());
            let (even, log) = (even_sizes(footprint), log_sizes(footprint));
            for ((_, make), tallies) in estimators.iter().zip(&mut tallies) {
                let mut estimator = make(seed, footprint);
                batches
                    .iter()
                    .for_each(|batch| estimator.observe(batch.pages()));
                // A sample without a reference has no curve, and the estimator reports that.
                if let Ok(curve) = estimator.curve() {
                    tallies[at].even.add(&curve, &exact, &even);
                    tallies[at].log.add(&curve, &exact, &log);
                }
            }
        }
    }
    for ((name, _), tallies) in estimators.iter().zip(&tallies) {
        write_table(out, name, &streams, tallies)?;
    }
    Ok(())
}

/// The references in batches, their page numbers shifted by `offset`.
fn batches_of(pages: &[u64], offset: u64) -> Vec<ReferenceBatch> {
    let batch_of = |pages: &[u64]| {
        let mut batch = ReferenceBatch::new();
        for page in pages {
            batch.push(PageNumber(page.wrapping_add(offset)), AccessKind::Unknown);
        }
        batch
    };
    pages
        .chunks(ReferenceBatch::CAPACITY)
        .map(batch_of)
        .collect()
}

fn write_table(
    out: &mut dyn Write,
    name: &str,
    streams: &[Stream],
    tallies: &[Tally],
) -> anyhow::Result<()> {
    writeln!(
        out,
        "\n{name:<42} {:>7} {:>8} {:>8}   {:>7} {:>8} {:>8}",
        "held", "width", "RMS", "h. log", "w. log", "RMS log"
    )?;
    for (stream, tally) in streams.iter().zip(tallies) {
        if tally.even.count == 0.0 {
            writeln!(out, "  {:<40} no page sampled", stream.name)?;
            continue;
        }
        write!(out, "  {:<40}", stream.name)?;
        for (sizes, gap) in [(tally.even, " "), (tally.log, "   ")] {
            let (width, rms) = (
                sizes.width / sizes.count,
                (sizes.squares / sizes.count).sqrt(),
            );
            write!(out, "{gap}{:>7.3} {width:>8.5} {rms:>8.5}", sizes.held())?;
        }
        let worst = tally.even.held().min(tally.log.held());
        writeln!(out, "{}", if worst < HELD_MIN { "  UNDER" } else { "" })?;
    }
    out.flush()?;
    Ok(())
}
