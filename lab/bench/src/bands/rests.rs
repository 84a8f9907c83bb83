//! What intermittent tracking saves and loses, on a VM that replays references.
//!
//! A VM is observed for [`PERIODS`] periods under each rule that decides when tracing rests: never, when
//! [`ALIKE_PERIODS`] working sets are alike (a simple rule, as a yardstick), and when the curve has converged. Rests end
//! as on a running VM, by the share of random pages that a period touches or by their length; CPU time and reads of a
//! replayed VM never change.
//!
//! After each period the newest curve is compared with the exact curve of the last [`WINDOW`] periods, also during a rest and
//! after it until there is another. *Held* and *error*: as of the bands of live curves, over the periods from
//! the [`WINDOW`]th on. *Traced*: share of the periods in which tracing ran. *Rests*: their number, mean over the seeds.

use std::collections::{HashSet, VecDeque};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context as _;
use plimsoll_estimator::live::{LiveEstimator, LiveOptions, LiveWindow};
use plimsoll_estimator::working_set;
use plimsoll_flow::{MissRatioCurve, PageCount, TraceMethod, WorkingSet, WorkingSetBound};
use plimsoll_observe::input_of;
use plimsoll_observe::intermittent::{CHECKED_PAGES, Convergence, REST_PERIODS_MAX, Signals};
use plimsoll_trap::{Backend, ReplayedVm, TraceConfig};

use super::live::{
    BACKENDS, Found, PERIOD, TRAP_COST, Tally, Truth, distances, numbered, references_per_second,
};
use super::{Args, Stream, pages_of, uniform, wanted, zipf};
use crate::random::Random;
use crate::{Cli, title};

/// Pages of the VM, and references a second.
const PAGES: u64 = 1 << 13;
const RATE: u64 = 20_000;
/// Observed periods, and periods that a curve covers.
const PERIODS: usize = 60;
const WINDOW: usize = 6;
/// The yardstick: periods whose working sets differ by less than a share.
const ALIKE_PERIODS: usize = 3;
const ALIKE: f64 = 0.15;

/// When tracing rests.
enum Rule {
    Never,
    WorkingSets(VecDeque<u64>),
    Curves(Convergence),
}

impl Rule {
    fn all() -> [(&'static str, Self); 3] {
        [
            ("never rests", Self::Never),
            ("working sets", Self::WorkingSets(VecDeque::new())),
            ("convergence", Self::Curves(Convergence::default())),
        ]
    }

    /// Whether tracing rests after a period with these results.
    fn rests(&mut self, curve: Option<&MissRatioCurve>) -> bool {
        let set = curve.map(|curve| {
            let set = working_set(curve);
            // Below its first point a curve is not known.
            let is_resolved = curve.points()[0].size < set.size;
            WorkingSet {
                bound: if is_resolved {
                    set.bound
                } else {
                    WorkingSetBound::AtMost
                },
                ..set
            }
        });
        match self {
            Self::Never => false,
            Self::WorkingSets(recent) => {
                let Some(set) = set.filter(|set| set.bound == WorkingSetBound::Estimate) else {
                    recent.clear();
                    return false;
                };
                recent.push_back(set.size.0);
                if recent.len() > ALIKE_PERIODS {
                    recent.pop_front();
                }
                let most = recent.iter().max().map_or(0.0, |&size| size as f64);
                let least = recent.iter().min().map_or(0.0, |&size| size as f64);
                recent.len() == ALIKE_PERIODS && most - least <= ALIKE * most
            }
            Self::Curves(convergence) => convergence.add(curve, set),
        }
    }

    fn restart(&mut self) {
        match self {
            Self::Never => {}
            Self::WorkingSets(recent) => recent.clear(),
            Self::Curves(convergence) => *convergence = Convergence::default(),
        }
    }
}

fn made_streams() -> Vec<Stream> {
    let references = PERIODS as u64 * PERIOD * RATE;
    let stream = |name: &str, pages: Box<dyn Fn(u64) -> anyhow::Result<Vec<u64>>>| Stream {
        name: name.into(),
        pages,
    };
    // Uniform over a share of the pages, one share after the other.
    let phases = |shares: &'static [u64]| {
        move |seed: u64| {
            let length = references / shares.len() as u64;
            let mut pages = Vec::new();
            for (seed, share) in (seed << 8..).zip(shares) {
                pages.extend(pages_of(uniform(PAGES * share / 8, length), seed)?);
            }
            Ok(pages)
        }
    };
    vec![
        stream(
            "uniform",
            Box::new(move |seed| pages_of(uniform(PAGES, references), seed)),
        ),
        stream(
            "Zipf 0.9",
            Box::new(move |seed| pages_of(zipf(PAGES, 0.9, references), seed)),
        ),
        stream("two phases", Box::new(phases(&[2, 8]))),
        stream("six phases", Box::new(phases(&[2, 8, 4, 8, 2, 6]))),
        stream(
            "growing",
            Box::new(move |seed| {
                let drawn = pages_of(uniform(1 << 20, references), seed)?;
                let pages = drawn.into_iter().zip(0..).map(|(page, at)| {
                    let used = PAGES / 8 + PAGES * 7 / 8 * at / references;
                    (page * used) >> 20
                });
                Ok(pages.collect())
            }),
        ),
    ]
}

/// A replayed VM and its true distances.
struct Replayed {
    references: Vec<u32>,
    distances: Vec<[u32; 2]>,
    pages: u64,
    step: Duration,
}

impl Replayed {
    fn of(stream: &Stream, seed: u64) -> anyhow::Result<Self> {
        let references = numbered(&(stream.pages)(seed)?);
        let pages = references
            .iter()
            .max()
            .map_or(1, |&page| u64::from(page) + 1);
        let seconds = (PERIODS as u64 * PERIOD) as f64;
        Ok(Self {
            step: Duration::from_secs_f64(seconds / references.len() as f64),
            distances: distances(&references, pages)?,
            references,
            pages,
        })
    }

    /// References before the end of a number of periods.
    fn until(&self, periods: usize) -> usize {
        self.references.len() * periods / PERIODS
    }

    fn attach(
        &self,
        method: TraceMethod,
        periods: usize,
        seed: u64,
    ) -> anyhow::Result<Box<dyn Backend>> {
        let config = TraceConfig {
            period: Duration::from_secs(PERIOD),
            seed,
            ..TraceConfig::default()
        };
        let vm = ReplayedVm {
            references: Arc::from(&self.references[self.until(periods)..]),
            ram_pages: self.pages,
            step: self.step,
            trap_cost: TRAP_COST,
        };
        vm.attach(method, &config)?
            .context("a backend that gives a curve")
    }

    /// What a period shows of random pages.
    fn signals(&self, period: usize, checked: &HashSet<u32>) -> Signals {
        let references = &self.references[self.until(period)..self.until(period + 1)];
        let touched: HashSet<_> = references
            .iter()
            .filter(|page| checked.contains(page))
            .collect();
        Signals {
            touched: touched.len() as u64,
            checked: checked.len() as u64,
            cpu: 1.0,
            reads: 0.0,
        }
    }
}

/// Results of a rule on a stream.
#[derive(Default)]
struct Outcome {
    tally: Tally,
    traced: f64,
    rests: f64,
}

/// A rest in progress.
struct Rest {
    checked: HashSet<u32>,
    first: Option<Signals>,
    periods: u32,
}

/// Observes a VM under a rule.
fn observe(
    vm: &Replayed,
    backend: usize,
    mut rule: Rule,
    seed: u64,
    outcome: &mut Outcome,
) -> anyhow::Result<()> {
    let (method, row) = BACKENDS[backend];
    let estimator = || -> Box<dyn LiveEstimator> {
        (row.make)(&LiveOptions {
            ram: PageCount(vm.pages),
            reach: Some(Duration::from_secs(PERIOD * WINDOW as u64)),
        })
    };
    let mut random = Random::new(seed);
    let (mut tracing, mut estimates) = (vm.attach(method, 0, seed)?, estimator());
    let mut rest: Option<Rest> = None;
    let mut found: Option<Found> = None;
    for period in 0..PERIODS {
        if let Some(resting) = &mut rest {
            resting.periods += 1;
            let now = vm.signals(period, &resting.checked);
            let first = *resting.first.get_or_insert(now);
            if now.differ(first) || resting.periods >= REST_PERIODS_MAX {
                rest = None;
                (tracing, estimates) = (vm.attach(method, period + 1, seed)?, estimator());
            }
        } else {
            outcome.traced += 1.0;
            let ran = tracing.run_period(&AtomicBool::new(false), &mut |seen| {
                estimates.observe(&input_of(seen));
            })?;
            estimates.close_window(&LiveWindow::of(&ran));
            let curve = estimates.recent_curve();
            if rule.rests(curve.as_ref()) {
                rule.restart();
                outcome.rests += 1.0;
                let pages = random.order(usize::try_from(vm.pages)?).into_iter();
                let checked = pages.take(CHECKED_PAGES).map(u32::try_from);
                rest = Some(Rest {
                    checked: checked.collect::<Result<_, _>>()?,
                    first: None,
                    periods: 0,
                });
            }
            found = curve
                .map(|curve| Found::new(curve, references_per_second(&ran)))
                .or(found);
        }
        if let (Some(found), Some(from)) = (&found, (period + 1).checked_sub(WINDOW)) {
            let window = vm.until(from)..vm.until(period + 1);
            let pages = usize::try_from(vm.pages)?;
            let truth = Truth::of(&vm.distances[window], pages, vm.step);
            outcome.tally.add(found, &truth, vm.pages);
        }
    }
    Ok(())
}

/// Measures every rule on every stream; prints a table.
pub(crate) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "Intermittent tracking: {} seeds from {}, {PERIODS} periods of {PERIOD} s, {PAGES} pages, {RATE} references a second",
            args.seeds, args.first_seed
        ),
    )?;
    writeln!(
        out,
        "{:<24} {:<12} {:<13} {:>6} {:>7} {:>7} {:>6}",
        "stream", "backend", "rests by", "held", "error", "traced", "rests"
    )?;
    for stream in wanted(made_streams(), args, out)? {
        let mut outcomes: Vec<[Outcome; 3]> = BACKENDS.iter().map(|_| Default::default()).collect();
        for seed in args.first_seed..args.first_seed + args.seeds {
            let vm = Replayed::of(&stream, seed)?;
            for (backend, outcomes) in outcomes.iter_mut().enumerate() {
                if !cli.wants(&BACKENDS[backend].0.to_string()) {
                    continue;
                }
                for ((_, rule), outcome) in Rule::all().into_iter().zip(outcomes) {
                    observe(&vm, backend, rule, seed, outcome)?;
                }
            }
        }
        for ((method, _), outcomes) in BACKENDS.into_iter().zip(outcomes) {
            for ((rule, _), mut outcome) in Rule::all().into_iter().zip(outcomes) {
                if outcome.traced == 0.0 {
                    continue;
                }
                let [_, held, error, ..] = outcome.tally.row();
                let (seeds, periods) = (args.seeds as f64, PERIODS as f64);
                writeln!(
                    out,
                    "{:<24} {method:<12} {rule:<13} {held:>6.3} {error:>7.4} {:>7.3} {:>6.1}",
                    stream.name,
                    outcome.traced / (seeds * periods),
                    outcome.rests / seeds
                )?;
            }
        }
        out.flush()?;
    }
    Ok(())
}
