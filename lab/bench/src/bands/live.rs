//! Coverage and width of the bands of live curves, by backend, on a VM that replays references.
//!
//! A VM of [`PAGES`] pages makes [`RATE`] references a second; it is observed for [`PERIODS`] periods at the default
//! settings, after it has run for a while. A trace is replayed at the speed at which it lasts as long. The truth is exact LRU
//! over the references of the observed time, in misses a second: the share of the curve times its references a second.
//! A curve of first touches covers the time since the last change of phase that it noticed, by which it chooses its samples:
//! its truth is that of the time since the oldest of them was armed.
//!
//! The first reference of a trace to a page needs at least as many pages as were referenced before it, and at most all: all of the
//! RAM has contents, so the page was used at an unknown time before. Where that matters the truth is an interval, and a band
//! holds it if the two meet.
//!
//! *From*: the smallest size with a claim, as a share of the pages touched; sizes are [`SIZES`] even ones from there to
//! all of these pages. *Held*: share of sizes whose truth is in the band, over all seeds. *Given*: mean width of the band as a
//! share of the curve's references. *Needed*: the width that would have held the truth at 95 % of the sizes, if each side of
//! every band were wider by the same factor: infinite where a band has no width. *Quotients*: the same for the misses at a
//! size divided by those at a larger one, [`QUOTIENTS`] of the pages times [`BELOW`], as a promise compares them: share
//! held; share that is *vague*, because its band is wider than [`VAGUE`] times the quotient; and of the others, the mean width as a share of
//! the quotient, given and needed, where sides are measured in logarithms.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context as _;
use plimsoll_estimator::LruStack;
use plimsoll_estimator::live::{
    FIRST_TOUCH, LRU, LiveEstimatorRow, LiveOptions, LiveWindow, SCANS,
};
use plimsoll_flow::{
    MissRatioCurve, MissesPerSecond, PageCount, PageNumber, Period, TraceMethod, Whole as _,
};
use plimsoll_observe::input_of;
use plimsoll_source::synthetic::Pattern;
use plimsoll_trap::{Observation, ReplayedVm, TraceConfig};

use super::{Args, HELD_MIN, Stream, pages_of, uniform, wanted, zipf};
use crate::{Cli, title};

/// Pages of the VM, and references a second.
const PAGES: u64 = 1 << 15;
const RATE: u64 = 100_000;
/// Length of a period in seconds, and number of periods.
pub(super) const PERIOD: u64 = 5;
const PERIODS: usize = 12;
/// Share of the references before the observation.
const WARM: f64 = 1.0 / 6.0;
/// Number of sizes at which a curve is compared.
const SIZES: u64 = 64;
/// Error, as a share of the references, that does not count against a band.
const ROUNDING: f64 = 1e-3;
/// Sizes as shares of the pages to which others are compared, and the others as shares of each.
const QUOTIENTS: [f64; 3] = [0.6, 0.8, 0.95];
const BELOW: [f64; 5] = [0.6, 0.8, 0.9, 0.95, 0.98];
const VAGUE: f64 = 2.0;
pub(super) const TRAP_COST: Duration = Duration::from_micros(60);

pub(super) const BACKENDS: [(TraceMethod, &LiveEstimatorRow); 3] = [
    (TraceMethod::Traps, LRU),
    (TraceMethod::AccessedPageScans, SCANS),
    (TraceMethod::FirstTouches, FIRST_TOUCH),
];

fn made_streams() -> Vec<Stream> {
    let references = u64::whole(((PERIODS as u64 * PERIOD * RATE) as f64 / (1.0 - WARM)).ceil());
    let patterns = [
        ("uniform", uniform(PAGES, references)),
        ("Zipf 0.6", zipf(PAGES, 0.6, references)),
        ("Zipf 0.9", zipf(PAGES, 0.9, references)),
        ("Zipf 1.2", zipf(PAGES, 1.2, references)),
        (
            "class",
            Pattern::Class {
                pages: PageCount(PAGES),
                references,
            },
        ),
        (
            "loop",
            Pattern::Loop {
                pages: PageCount(PAGES),
                references,
            },
        ),
    ];
    let made = patterns.into_iter().map(|(name, pattern)| Stream {
        name: name.into(),
        pages: Box::new(move |seed| pages_of(pattern.clone(), seed)),
    });
    let phase = Stream {
        name: "phase".into(),
        pages: Box::new(move |seed| {
            let observed = PERIODS as u64 * PERIOD * RATE;
            let mut pages = pages_of(uniform(PAGES / 4, references - observed / 2), seed)?;
            pages.extend(pages_of(uniform(PAGES, observed / 2), !seed)?);
            Ok(pages)
        }),
    };
    made.chain([phase]).collect()
}

/// The references of a stream, in numbers without gaps, in the order of the pages.
pub(super) fn numbered(pages: &[u64]) -> Vec<u32> {
    let distinct: BTreeSet<u64> = pages.iter().copied().collect();
    let numbers: HashMap<u64, u32> = distinct.into_iter().zip(0..).collect();
    pages.iter().map(|page| numbers[page]).collect()
}

/// Stack distances, each with its lower and upper limit: a page's first one may be any beyond the pages seen.
pub(super) fn distances(references: &[u32], pages: u64) -> anyhow::Result<Vec<[u32; 2]>> {
    let mut stack = LruStack::new();
    let distances = references.iter().map(|&page| {
        let seen = stack.distinct();
        let distance = stack.touch(PageNumber(u64::from(page)));
        let limits = distance.map_or([seen, pages], |distance| [distance; 2]);
        Ok([u32::try_from(limits[0])?, u32::try_from(limits[1])?])
    });
    distances.collect()
}

/// Misses by size of some references.
pub(super) struct Truth {
    /// By size: references that miss in it for certain, and those that may.
    misses: [Vec<u64>; 2],
    seconds: f64,
}

impl Truth {
    /// Of references with these distances, each at least and at most, out of `pages`.
    pub(super) fn of(found: &[[u32; 2]], pages: usize, step: Duration) -> Self {
        let misses = [0, 1].map(|limit| {
            let mut distances = vec![0; pages + 1];
            for distance in found {
                distances[distance[limit] as usize] += 1;
            }
            // At index n: the references that miss in n pages.
            let mut longer = 0;
            for count in distances.iter_mut().rev() {
                longer += *count;
                *count = longer;
            }
            distances
        });
        Self {
            misses,
            seconds: step.as_secs_f64() * found.len() as f64,
        }
    }

    /// The possible misses per second that are nearest to `expected`.
    fn misses_per_second(&self, size: PageCount, expected: f64) -> f64 {
        let size = usize::try_from(size.0).unwrap_or(usize::MAX);
        let [least, most] = [0, 1].map(|limit: usize| {
            let misses = &self.misses[limit];
            misses[size.min(misses.len() - 1)] as f64 / self.seconds
        });
        expected.clamp(least, most)
    }
}

/// A curve.
pub(super) struct Found {
    curve: MissRatioCurve,
    /// References a second of which its ratios are shares.
    rate: f64,
    /// The time from which on it covers the references.
    from: Duration,
}

impl Found {
    /// A curve of a VM for which a backend counts `rate` references a second, unless the curve has a rate of its own.
    pub(super) fn new(curve: MissRatioCurve, rate: f64) -> Self {
        let first = curve.points()[0];
        let misses = first.misses.filter(|_| first.miss_ratio > 0.0);
        let rate = misses.map_or(rate, |misses| misses.expected / first.miss_ratio);
        Self {
            curve,
            rate,
            from: Duration::ZERO,
        }
    }
}

/// Observes the VM for all periods.
fn observed(
    vm: &ReplayedVm,
    (method, row): (TraceMethod, &LiveEstimatorRow),
    seed: u64,
) -> anyhow::Result<Option<Found>> {
    let config = TraceConfig {
        period: Duration::from_secs(PERIOD),
        seed,
        ..TraceConfig::default()
    };
    let mut backend = vm
        .attach(method, &config)?
        .context("a backend that gives a curve")?;
    let mut estimator = (row.make)(&LiveOptions {
        ram: PageCount(vm.ram_pages),
        reach: None,
    });
    let (mut rate, mut touched) = (0.0, Vec::new());
    for _ in 0..PERIODS {
        let period = backend.run_period(&AtomicBool::new(false), &mut |seen| {
            if let Observation::FirstTouches { samples, .. } = seen {
                let ended = samples.ended.iter();
                let ended = ended.filter(|sample| sample.touched_by.is_some());
                touched.extend(ended.map(|sample| sample.armed));
            }
            estimator.observe(&input_of(seen));
        })?;
        estimator.close_window(&LiveWindow::of(&period));
        rate += references_per_second(&period) / PERIODS as f64;
    }
    let curve = estimator.curve();
    Ok(curve.map(|curve| {
        // As many of the newest as are in the curve.
        touched.sort_unstable();
        let counted = usize::try_from(curve.references()).unwrap_or(usize::MAX);
        let from = touched.len().checked_sub(counted);
        let from = from.and_then(|from| touched.get(from)).copied();
        let from = from.unwrap_or_default();
        Found {
            from,
            ..Found::new(curve, rate)
        }
    }))
}

/// References a second by what a period counted.
pub(super) fn references_per_second(period: &Period) -> f64 {
    (period.references() * u64::from(period.scale)) as f64 / period.window.as_secs_f64()
}

/// Results of one backend on one stream.
#[derive(Default)]
pub(super) struct Tally {
    /// By size and seed: the error in half-widths of the band.
    deviations: Vec<f64>,
    widths: Vec<f64>,
    errors: Vec<f64>,
    from: Vec<f64>,
    /// By quotient and seed: its error in half-widths of the band, and the width as a share.
    quotients: Vec<(f64, f64)>,
}

impl Tally {
    pub(super) fn add(&mut self, found: &Found, truth: &Truth, pages: u64) {
        let (curve, rate) = (&found.curve, found.rate);
        let first = curve.points()[0].size.0.max(pages / SIZES);
        self.from.push(first as f64 / pages as f64);
        for step in 0..SIZES {
            let size = PageCount(first + pages.saturating_sub(first) * step / SIZES);
            let point = curve.at(size);
            let misses = point.misses.unwrap_or(MissesPerSecond {
                expected: point.miss_ratio * rate,
                low: point.low * rate,
                high: point.high * rate,
            });
            let band = misses.scaled(1.0 / rate);
            let error = truth.misses_per_second(size, misses.expected) / rate - band.expected;
            let limit = if error > 0.0 { band.high } else { band.low };
            let half_width = (limit - band.expected).abs();
            let beyond = (error.abs() - ROUNDING).max(0.0);
            self.deviations.push(if beyond > 0.0 {
                beyond / half_width
            } else {
                0.0
            });
            self.widths.push(band.high - band.low);
            self.errors.push(error.abs());
        }
        for share in QUOTIENTS {
            let baseline = PageCount(pages).scaled(share);
            for below in BELOW {
                self.add_quotient(found, truth, [baseline.scaled(below), baseline]);
            }
        }
    }

    fn add_quotient(&mut self, found: &Found, truth: &Truth, [size, baseline]: [PageCount; 2]) {
        let (curve, rate) = (&found.curve, found.rate);
        if !curve.resolves(size) {
            return;
        }
        let [found, true_quotient] = {
            let found = [size, baseline].map(|size| curve.miss_ratio(size));
            let truth = [(size, found[0]), (baseline, found[1])]
                .map(|(size, found)| truth.misses_per_second(size, found * rate) / rate);
            [found, truth].map(|[ratio, divisor]| ratio.max(ROUNDING) / divisor.max(ROUNDING))
        };
        let band = curve.quotient_band(size, baseline, ROUNDING);
        let limit = if true_quotient > found {
            band.end()
        } else {
            band.start()
        };
        let error = (true_quotient / found).ln().abs();
        let deviation = if error > ROUNDING {
            (error - ROUNDING) / (limit / found).ln().abs()
        } else {
            0.0
        };
        self.quotients
            .push((deviation, (band.end() - band.start()) / found));
    }

    /// Share of the quotients held, and that of vague ones; width of the bands of the others, given and needed.
    pub(super) fn quotients(&self) -> [f64; 4] {
        let all = self.quotients.iter();
        let held = all.clone().filter(|(deviation, _)| *deviation <= 1.0);
        let known = all.filter(|(_, width)| *width <= VAGUE);
        let (mut deviations, widths): (Vec<f64>, Vec<f64>) = known.copied().unzip();
        let given = mean(&widths);
        let needed = given * quantile(&mut deviations);
        let (count, known) = (self.quotients.len() as f64, widths.len() as f64);
        [
            held.count() as f64 / count,
            1.0 - known / count,
            given,
            needed,
        ]
    }

    /// From, held, mean error, width given and needed.
    pub(super) fn row(&mut self) -> [f64; 5] {
        let held = self.deviations.iter().filter(|&&one| one <= 1.0).count();
        let held = held as f64 / self.deviations.len() as f64;
        let given = mean(&self.widths);
        let needed = given * quantile(&mut self.deviations);
        [mean(&self.from), held, mean(&self.errors), given, needed]
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The 95 % quantile of deviations; not a number without any.
fn quantile(deviations: &mut [f64]) -> f64 {
    deviations.sort_by(f64::total_cmp);
    let at = deviations.get(deviations.len() * 95 / 100);
    at.copied().unwrap_or(f64::NAN)
}

/// Measures every backend on every stream; prints a table.
pub(super) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let is_wanted = |method: TraceMethod| cli.wants(&format!("live {method}"));
    if !BACKENDS.iter().any(|&(method, _)| is_wanted(method)) {
        return Ok(());
    }
    title(
        out,
        &format!(
            "Bands of live curves: {} seeds from {}, {PERIODS} periods of {PERIOD} s, {PAGES} pages, {RATE} references a second",
            args.seeds, args.first_seed
        ),
    )?;
    let mut csv = match &args.csv {
        Some(path) => {
            let mut file = File::create(path).with_context(|| path.display().to_string())?;
            writeln!(
                file,
                "stream,backend,from,held,error,given,needed,quotients,vague,quotients_given,quotients_needed"
            )?;
            Some(file)
        }
        None => None,
    };
    writeln!(
        out,
        "{:<28} {:<12} {:>6} {:>6} {:>7} {:>7} {:>7}   {:>9} {:>6} {:>6} {:>6}",
        "stream",
        "backend",
        "from",
        "held",
        "error",
        "given",
        "needed",
        "quotients",
        "vague",
        "given",
        "needed"
    )?;
    for stream in wanted(made_streams(), args, out)? {
        let mut tallies = BACKENDS.map(|_| Tally::default());
        for seed in args.first_seed..args.first_seed + args.seeds {
            measure(&stream, seed, &mut tallies, &is_wanted)?;
        }
        for ((method, _), mut tally) in BACKENDS.into_iter().zip(tallies) {
            if tally.from.is_empty() {
                continue;
            }
            let [from, held, error, given, needed] = tally.row();
            let [quotients, vague, width, need] = tally.quotients();
            let (name, is_under) = (&stream.name, held < HELD_MIN || quotients < HELD_MIN);
            writeln!(
                out,
                "{name:<28} {method:<12} {from:>6.3} {held:>6.3} {error:>7.4} {given:>7.3} {needed:>7.3}   {quotients:>9.3} {vague:>6.3} {width:>6.3} {need:>6.3}{}",
                if is_under { "  UNDER" } else { "" }
            )?;
            if let Some(csv) = &mut csv {
                writeln!(
                    csv,
                    "{name},{method},{from:.4},{held:.4},{error:.5},{given:.4},{needed:.4},{quotients:.4},{vague:.4},{width:.4},{need:.4}"
                )?;
            }
        }
        out.flush()?;
    }
    Ok(())
}

fn measure(
    stream: &Stream,
    seed: u64,
    tallies: &mut [Tally],
    is_wanted: &dyn Fn(TraceMethod) -> bool,
) -> anyhow::Result<()> {
    let references = numbered(&(stream.pages)(seed)?);
    let pages = references.iter().max().map_or(1, |&page| page as usize + 1);
    let warm = usize::whole(references.len() as f64 * WARM);
    let observed_s = (PERIODS as u64 * PERIOD) as f64;
    let step = Duration::from_secs_f64(observed_s / (references.len() - warm) as f64);
    let distances = distances(&references, pages as u64)?;
    let vm = ReplayedVm {
        references: Arc::from(&references[warm..]),
        ram_pages: pages as u64,
        step,
        trap_cost: TRAP_COST,
    };
    for ((method, row), tally) in BACKENDS.into_iter().zip(tallies) {
        if !is_wanted(method) {
            continue;
        }
        if let Some(found) = observed(&vm, (method, row), seed)? {
            let from = usize::whole(found.from.as_secs_f64() / step.as_secs_f64());
            let truth = Truth::of(&distances[warm + from..], pages, step);
            tally.add(&found, &truth, pages as u64);
        }
    }
    Ok(())
}
