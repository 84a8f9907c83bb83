//! Error of curves of first touches against exact LRU, by the number of traps.
//!
//! A computed VM makes 10 000 references a second. Each sample is a page drawn at random, armed at a random time after
//! a fifth of the stream, and observed until its next reference, at most for a fifth of the stream: one trap, or none.
//! The truth is exact LRU of the references after the first fifth. Both are compared at 64 even sizes, from a 64th of the
//! pages to the mean number of pages referenced within the longest observation; what a larger memory would miss was not
//! observed. The truth is an average over all phases of a stream, so the samples are presented in random order, which
//! keeps the estimator from noticing a phase and dropping what was before.
//!
//! | estimate | what it is |
//! |---|---|
//! | `mixture` | the live estimator |
//! | `strata` | the same, with one draw in each of as many equal ranges of pages, and of times |
//! | `majorant` | the least concave majorant of the empirical distribution: the plain maximum-likelihood estimate |
//! | `reuse` | half as many pages, each armed once more after its first touch: the reuse times, weighted by the page's estimated rate |

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use plimsoll_estimator::LruStack;
use plimsoll_estimator::live::{FIRST_TOUCH, LiveInput, LiveOptions};
use plimsoll_flow::{
    FirstTouch, FirstTouches, MissRatioCurve, PageCount, PageNumber, Timestamp, Whole as _,
};

use crate::random::Random;
use crate::title;

/// Measure the error of curves of first touches by the number of traps.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Samples in each run
    #[arg(long, value_delimiter = ',', default_values_t = [500, 2000, 6000])]
    traps: Vec<usize>,
    /// Draws of the sample for each stream and number
    #[arg(long, default_value_t = 20)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 1000)]
    first_seed: u64,
    /// Thousands of references in a made stream
    #[arg(long, default_value_t = 6000)]
    thousands: usize,
    /// Pages of a made stream
    #[arg(long, default_value_t = 65_536)]
    pages: usize,
    /// Only streams whose name holds this
    #[arg(long)]
    stream: Option<String>,
    /// A directory whose traces are taken, those that can be read
    #[arg(long, default_value = "target/traces")]
    traces: PathBuf,
    /// Write the result of every run to this file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// Share of a stream before anything is measured, and maximum length of an observation.
const WARM: f64 = 0.2;
const OBSERVED: f64 = 0.2;
/// Number of sizes at which curves are compared.
const SIZES: usize = 64;
/// References a second.
const RATE: f64 = 1e4;
/// Error that does not count against a band.
const ROUNDING: f64 = 1e-3;

type Stream = (String, Vec<u32>);

fn made(args: &Args) -> Vec<Stream> {
    let (pages, references) = (args.pages, args.thousands * 1000);
    let mut random = Random::new(args.first_seed);
    let mut stream = |name: &str, next: &mut dyn FnMut(&mut Random, usize) -> usize| -> Stream {
        let mut page =
            |at| u32::try_from(next(&mut random, at)).expect("pages are numbered in 32 bits");
        (name.to_owned(), (0..references).map(&mut page).collect())
    };
    let half = pages / 2;
    let mut streams = vec![
        stream("uniform", &mut |random, _| random.below(pages)),
        stream("class", &mut |random, _| {
            if random.chance(0.9) {
                random.below(pages / 8)
            } else {
                pages / 8 + random.below(pages - pages / 8)
            }
        }),
    ];
    for alpha in [0.9, 1.2] {
        let mut sums: Vec<f64> = Vec::new();
        for rank in 1..=pages {
            let before = sums.last().copied().unwrap_or_default();
            sums.push(before + (rank as f64).powf(-alpha));
        }
        let order = Random::new(args.first_seed).order(pages);
        streams.push(stream(&format!("Zipf {alpha}"), &mut |random, _| {
            let drawn = random.unit() * sums[pages - 1];
            order[sums.partition_point(|&sum| sum < drawn).min(pages - 1)]
        }));
    }
    streams.push(stream("loop", &mut |_, at| at % pages));
    let mut turn = 0;
    streams.push(stream("half loop, half uniform", &mut |random, _| {
        if random.chance(0.5) {
            turn += 1;
            turn % half
        } else {
            half + random.below(half)
        }
    }));
    let mut turns = [0, 0];
    streams.push(stream("two loops", &mut |random, _| {
        if random.chance(0.7) {
            turns[0] += 1;
            turns[0] % (pages / 8)
        } else {
            turns[1] += 1;
            pages / 8 + turns[1] % half
        }
    }));
    streams.push(stream("phases of uniform", &mut |random, at| {
        let shares = [4, 1, 2, 8];
        random.below(pages / shares[at * 20 / references % 4])
    }));
    streams.push(stream("sawtooth", &mut |_, at| {
        let at = at % (2 * pages);
        at.min(2 * pages - 1 - at)
    }));
    streams
}

fn traces(args: &Args, out: &mut dyn Write) -> anyhow::Result<Vec<Stream>> {
    let streams = crate::bands::traces_in(&args.traces, out)?;
    let numbered = streams.into_iter().map(|stream| {
        let mut numbers = HashMap::new();
        let pages = (stream.pages)(0)?.into_iter().map(|page| {
            let next = u32::try_from(numbers.len()).expect("a trace of fewer than 2^32 pages");
            *numbers.entry(page).or_insert(next)
        });
        Ok((stream.name, pages.collect()))
    });
    numbered.collect()
}

/// A stream with its truth.
struct Subject {
    pages: usize,
    references: usize,
    /// By page: when it was referenced.
    uses: Vec<Vec<u32>>,
    sizes: Vec<PageCount>,
    /// By size: misses per reference.
    truth: Vec<f64>,
    /// Hits by reuse distance, and the references of which they are a share.
    reuses: Vec<u64>,
    counted: usize,
}

impl Subject {
    fn new(stream: &[u32]) -> Self {
        let pages = stream.iter().max().map_or(0, |&page| page as usize + 1);
        let mut uses = vec![Vec::new(); pages];
        for (at, &page) in (0_u32..).zip(stream) {
            uses[page as usize].push(at);
        }
        let mut subject = Self {
            pages,
            references: stream.len(),
            uses,
            sizes: Vec::new(),
            truth: Vec::new(),
            reuses: vec![0; pages + 1],
            counted: stream.len() - stream.len() / 5,
        };
        let (from, to) = ((pages / SIZES).max(1), subject.reach().max(2));
        let size = |step| PageCount((from + (to - from.min(to)) * step / SIZES) as u64);
        subject.sizes = (0..SIZES).map(size).collect();

        let warm = stream.len() - subject.counted;
        let mut stack = LruStack::new();
        for (at, &page) in stream.iter().enumerate() {
            if let Some(distance) = stack.touch(PageNumber(u64::from(page)))
                && at >= warm
            {
                subject.reuses[usize::try_from(distance).unwrap_or(pages)] += 1;
            }
        }
        let truth = subject.sizes.iter().map(|&size| subject.misses(size));
        subject.truth = truth.collect();
        subject
    }

    /// Misses per reference of exact LRU.
    fn misses(&self, size: PageCount) -> f64 {
        let size = usize::try_from(size.0).unwrap_or(self.pages);
        let hits: u64 = self.reuses[..size.min(self.pages)].iter().sum();
        1.0 - hits as f64 / self.counted as f64
    }

    /// Mean number of pages referenced within the longest observation.
    fn reach(&self) -> usize {
        let touched = |start: f64| {
            let observed = |page: &usize| self.wait(*page, start).is_some();
            (0..self.pages).filter(observed).count()
        };
        let starts = 20;
        let span = (1.0 - WARM - OBSERVED) * self.references as f64;
        let start = |at: usize| WARM * self.references as f64 + span * at as f64 / starts as f64;
        (0..starts).map(|at| touched(start(at))).sum::<usize>() / starts
    }

    /// References from `start` until the page is referenced next, if they are not too many.
    fn wait(&self, page: usize, start: f64) -> Option<f64> {
        let uses = &self.uses[page];
        let next = uses.partition_point(|&at| f64::from(at) < start);
        // A reference takes its whole turn, so that no wait is 0.
        let wait = f64::from(*uses.get(next)?) + 1.0 - start;
        (wait <= OBSERVED * self.references as f64).then_some(wait)
    }

    /// Draws samples: pages, the times at which they are armed, and for how long they wait.
    fn draw(&self, count: usize, is_stratified: bool, random: &mut Random) -> Vec<Draw> {
        let order = random.order(count);
        let (from, span) = (WARM, 1.0 - WARM - OBSERVED);
        let draw = |(at, &stratum): (usize, &usize)| {
            let (page, time) = if is_stratified {
                let within = |stratum: usize, random: &mut Random| {
                    (stratum as f64 + random.unit()) / count as f64
                };
                (within(stratum, random), within(at, random))
            } else {
                (random.unit(), random.unit())
            };
            let page = usize::whole(page * self.pages as f64).min(self.pages - 1);
            let armed = (from + span * time) * self.references as f64;
            Draw {
                page,
                armed,
                wait: self.wait(page, armed),
            }
        };
        order.iter().enumerate().map(draw).collect()
    }

    /// The curve of the live estimator.
    fn curve(&self, draws: &[Draw]) -> Option<MissRatioCurve> {
        let longest = OBSERVED * self.references as f64;
        let time = |references: f64| Duration::from_secs_f64(references / RATE);
        let touch = |(at, draw): (usize, &Draw)| {
            let armed = time(at as f64);
            FirstTouch {
                armed,
                untouched_until: armed + time(draw.wait.unwrap_or(longest)),
                touched_by: draw.wait.map(|wait| armed + time(wait)),
                pages: 1,
            }
        };
        let mut order = Random::new(draws.len() as u64).order(draws.len());
        let ended: Vec<_> = order
            .drain(..)
            .map(|at| &draws[at])
            .enumerate()
            .map(touch)
            .collect();
        let mut estimator = (FIRST_TOUCH.make)(&LiveOptions {
            ram: PageCount(self.pages as u64),
            reach: Some(Duration::MAX),
        });
        let end = time(self.references as f64);
        estimator.observe(&LiveInput::FirstTouches(FirstTouches {
            ended: &ended,
            waiting: &[],
            from: Timestamp::default(),
            now: Timestamp { vm: end, wall: end },
            population_pages: self.pages as u64,
        }));
        estimator.curve()
    }

    /// By size: misses per reference.
    fn majorant(&self, draws: &[Draw]) -> Vec<f64> {
        let mut waits: Vec<f64> = draws.iter().filter_map(|draw| draw.wait).collect();
        waits.sort_by(f64::total_cmp);
        let shares = (1..=waits.len()).map(|upto| upto as f64 / draws.len() as f64);
        let longest = OBSERVED * self.references as f64;
        let end = (longest, waits.len() as f64 / draws.len() as f64);
        let mut corners = vec![(0.0, 0.0)];
        for next in waits.iter().copied().zip(shares).chain([end]) {
            while let [.., before, last] = corners[..]
                && (last.1 - before.1) * (next.0 - last.0)
                    <= (next.1 - last.1) * (last.0 - before.0)
            {
                corners.pop();
            }
            corners.push(next);
        }
        let at = |size: &PageCount| {
            let share = size.0 as f64 / self.pages as f64;
            let after = corners.partition_point(|corner| corner.1 < share);
            let Some([from, to]) = after
                .checked_sub(1)
                .and_then(|before| corners.get(before..before + 2))
                .and_then(|pair| <[_; 2]>::try_from(pair).ok())
            else {
                return 0.0;
            };
            ((to.1 - from.1) / (to.0 - from.0) * self.pages as f64).min(1.0)
        };
        self.sizes.iter().map(at).collect()
    }

    /// By size: misses per reference, from the first reuse after the first touch.
    fn reuse(&self, draws: &[Draw]) -> Vec<f64> {
        let longest = OBSERVED * self.references as f64;
        let mut waits: Vec<f64> = draws.iter().filter_map(|draw| draw.wait).collect();
        waits.sort_by(f64::total_cmp);
        // A page's rate, by both of its intervals: unbiased if it is touched at random.
        let reuses = draws.iter().filter_map(|draw| {
            let wait = draw.wait?;
            let reuse = self.wait(draw.page, draw.armed + wait);
            Some((
                reuse.unwrap_or(f64::INFINITY),
                1.0 / (wait + reuse.unwrap_or(longest)),
            ))
        });
        let reuses: Vec<_> = reuses.collect();
        let scale = self.pages as f64 / draws.len() as f64;
        let at = |size: &PageCount| {
            // The time in which as many pages are touched.
            let rank = usize::whole(size.0 as f64 / scale);
            let Some(&time) = waits.get(rank) else {
                return 0.0;
            };
            let longer = reuses.iter().filter(|reuse| reuse.0 > time);
            (longer.map(|reuse| reuse.1).sum::<f64>() * scale).min(1.0)
        };
        self.sizes.iter().map(at).collect()
    }

    /// Mean and largest error of misses per reference.
    fn error(&self, found: &[f64]) -> (f64, f64) {
        let errors = found
            .iter()
            .zip(&self.truth)
            .map(|(one, truth)| (one - truth).abs());
        let (sum, max) = errors.fold((0.0, 0.0_f64), |(sum, max), one| (sum + one, max.max(one)));
        (sum / found.len() as f64, max)
    }
}

/// A sampled page.
struct Draw {
    page: usize,
    /// In references, as `wait`.
    armed: f64,
    wait: Option<f64>,
}

/// Results of one number of traps on one stream.
#[derive(Default)]
struct Tally {
    /// By estimate: mean errors of misses per reference.
    errors: BTreeMap<&'static str, Vec<f64>>,
    /// Mean errors of the ratio.
    ratios: Vec<f64>,
    /// Error of each size in half-widths of its band.
    deviations: Vec<f64>,
    widths: Vec<f64>,
}

/// Measures every stream and prints a table.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "First touches: {} draws from seed {}, {} K references over {} K pages, and traces",
            args.seeds,
            args.first_seed,
            args.thousands,
            args.pages / 1024
        ),
    )?;
    writeln!(
        out,
        "Mean error of misses per reference at 64 sizes: median of the draws (least to largest). Ratio: of the \
         mixture's\nmiss ratio, a share of the references past its resolution. Held: sizes whose ratio is in the band of \
         95 %; needed: factor\nby which the band would hold 95 % of them."
    )?;
    let mut csv = match &args.csv {
        Some(path) => {
            let mut file = File::create(path).with_context(|| path.display().to_string())?;
            writeln!(file, "stream,traps,seed,estimate,mean_error,max_error")?;
            Some(file)
        }
        None => None,
    };
    let mut streams = made(args);
    streams.extend(traces(args, out)?);
    if let Some(only) = &args.stream {
        streams.retain(|stream| stream.0.contains(only.as_str()));
    }
    for (name, stream) in streams {
        let subject = Subject::new(&stream);
        drop(stream);
        writeln!(out, "\n{name}: {} pages", subject.pages)?;
        for &traps in &args.traps {
            let mut tally = Tally::default();
            for seed in args.first_seed..args.first_seed + args.seeds {
                let runs = tally.add(&subject, traps, seed);
                if let Some(csv) = &mut csv {
                    for (estimate, (mean, max)) in runs {
                        writeln!(csv, "{name},{traps},{seed},{estimate},{mean:.6},{max:.6}")?;
                    }
                }
            }
            tally.write(traps, out)?;
        }
        out.flush()?;
    }
    Ok(())
}

impl Tally {
    /// Adds one draw; returns mean and largest error by estimate.
    fn add(
        &mut self,
        subject: &Subject,
        traps: usize,
        seed: u64,
    ) -> Vec<(&'static str, (f64, f64))> {
        let mut random = Random::new(seed << 32 | traps as u64);
        let even = subject.draw(traps, false, &mut random);
        let strata = subject.draw(traps, true, &mut random);
        let mut runs = vec![
            ("majorant", subject.majorant(&even)),
            ("reuse", subject.reuse(&even[..traps / 2])),
        ];
        for (estimate, draws) in [("mixture", &even), ("strata", &strata)] {
            let Some(curve) = subject.curve(draws) else {
                continue;
            };
            let rate = curve.points()[0]
                .misses
                .map_or(0.0, |misses| misses.expected)
                / RATE;
            let misses = |&size: &PageCount| (curve.miss_ratio(size) * rate).min(1.0);
            runs.push((estimate, subject.sizes.iter().map(misses).collect()));
            if estimate == "strata" {
                self.band(subject, &curve);
            }
        }
        let runs = runs.into_iter().map(|(estimate, found)| {
            let error = subject.error(&found);
            self.errors.entry(estimate).or_default().push(error.0);
            (estimate, error)
        });
        runs.collect()
    }

    /// Adds the band at the sizes that are resolved.
    fn band(&mut self, subject: &Subject, curve: &MissRatioCurve) {
        let resolution = curve.points()[0].size;
        let after = subject.sizes.partition_point(|&size| size < resolution);
        if after == subject.sizes.len() {
            return;
        }
        let whole = subject.misses(resolution);
        let mut errors = 0.0;
        for (&size, truth) in subject.sizes[after..].iter().zip(&subject.truth[after..]) {
            let (point, truth) = (curve.at(size), truth / whole.max(f64::MIN_POSITIVE));
            let error = truth - point.miss_ratio;
            errors += error.abs();
            let limit = if error > 0.0 { point.high } else { point.low };
            let half_width = (limit - point.miss_ratio).abs();
            self.deviations
                .push((error.abs() - ROUNDING).max(0.0) / half_width.max(1e-12));
            self.widths.push(point.high - point.low);
        }
        self.ratios
            .push(errors / (subject.sizes.len() - after) as f64);
    }

    fn write(&mut self, traps: usize, out: &mut dyn Write) -> std::io::Result<()> {
        write!(out, "{traps:>7}")?;
        for estimate in ["majorant", "reuse", "mixture", "strata"] {
            let [least, median, largest] = spread(self.errors.entry(estimate).or_default());
            write!(out, "  {estimate} {median:.4} ({least:.4} to {largest:.4})")?;
        }
        let [_, ratio, _] = spread(&mut self.ratios);
        let held = self.deviations.iter().filter(|&&one| one <= 1.0).count();
        self.deviations.sort_by(f64::total_cmp);
        let needed = self.deviations.get(self.deviations.len() * 95 / 100);
        writeln!(
            out,
            "  ratio {ratio:.4}  held {:.3} width {:.3} needed {:.2}",
            held as f64 / self.deviations.len() as f64,
            self.widths.iter().sum::<f64>() / self.widths.len() as f64,
            needed.copied().unwrap_or(f64::NAN)
        )
    }
}

/// Least, median and largest.
fn spread(values: &mut [f64]) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    match values {
        [] => [f64::NAN; 3],
        [first, ..] => [*first, values[values.len() / 2], values[values.len() - 1]],
    }
}
