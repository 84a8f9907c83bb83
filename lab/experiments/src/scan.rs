//! Accessed-page scans compared to traps, on the same guest and at the same budget: results and costs of each.
//!
//! One guest a workload. In each round it runs untraced, traced, untraced, scanned, for equal lengths, each tracer
//! attached anew. Both are compared with the workload's closed form:
//!
//! * the working set, where 5 % of the references miss: error of each period that gave more than a bound;
//! * the curve of the whole stretch. Traps hide references that hit their hot set, scans those between two scans, so
//!   both curves are taken as shares of what reaches past twice the larger of both minimum resolvable sizes, over the
//!   same sizes.
//!
//! The costs are measured by each one's own account, and by the guest's visits a second: one minus their ratio to the
//! mean of the untraced stretches before and after.

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use plimsoll_flow::{MissRatioCurve, PageCount, TraceMethod, WorkingSet, WorkingSetBound};
use plimsoll_observe::{Observer, ObserverOptions, even_sizes};
use plimsoll_rig::GuestConfig;
use plimsoll_trap::{TraceConfig, TrapError};

use plimsoll_rig::Subject;

use plimsoll_protocol::size::{Interval, Rate};

use super::curves::Law;
use super::guests::GuestArgs;
use plimsoll_rig::median;

/// Compare accessed-page scans with traps on the same guests, at the same budget.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Size of the guests' array, in MiB
    #[arg(long, default_value_t = 128)]
    mib: u64,
    /// Rounds of each guest: untraced, traced, untraced, scanned
    #[arg(long, default_value_t = 2)]
    rounds: u32,
    /// Periods of each stretch
    #[arg(long, default_value_t = 6)]
    periods: u32,
    /// Length of a period
    #[arg(long, default_value = "5s")]
    period: Interval,
    /// Maximum share of the guest's CPU time for either
    #[arg(long, default_value = "1%")]
    budget: Rate,
    #[command(flatten)]
    guests: GuestArgs,
}

/// Workload of a guest.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Goes through the array again and again.
    Loop,
    /// Chooses pages by a law.
    Law(Law),
}

impl Kind {
    fn workload(self, mib: u64) -> String {
        match self {
            Self::Loop => format!("workload=sequential mib={mib}"),
            Self::Law(law) => law.workload(mib),
        }
    }
}

/// The closed form of a workload.
enum Truth {
    Loop(PageCount),
    Curve(MissRatioCurve),
}

impl Truth {
    fn of(kind: Kind, pages: PageCount) -> anyhow::Result<Self> {
        Ok(match kind {
            Kind::Loop => Self::Loop(pages),
            Kind::Law(law) => Self::Curve(law.lru_curve(pages)?),
        })
    }

    fn miss_ratio(&self, size: PageCount) -> f64 {
        match self {
            Self::Loop(pages) => f64::from(u8::from(size < *pages)),
            Self::Curve(curve) => curve.miss_ratio(size),
        }
    }

    fn working_set(&self) -> Option<PageCount> {
        match self {
            Self::Loop(pages) => Some(*pages),
            Self::Curve(curve) => curve.size_for(WorkingSet::MISS_RATIO),
        }
    }

    /// Mean distance of a curve, both as shares of what reaches past `from`.
    fn distance(&self, curve: &MissRatioCurve, from: PageCount, pages: PageCount) -> f64 {
        let share = |size| curve.miss_ratio(size) / curve.miss_ratio(from).max(1e-9);
        let wanted = |size| self.miss_ratio(size) / self.miss_ratio(from).max(1e-9);
        let errors: Vec<f64> = even_sizes(from, pages)
            .map(|size| (share(size) - wanted(size)).abs())
            .collect();
        errors.iter().sum::<f64>() / errors.len() as f64
    }
}

/// The result of a stretch.
struct Stretch {
    curve: MissRatioCurve,
    /// Minimum resolvable size, the median of its periods.
    hidden: PageCount,
    scale: f64,
}

/// Results of the stretches of one backend.
#[derive(Default)]
struct Tally {
    errors: Vec<f64>,
    periods: usize,
    distances: Vec<f64>,
    accounts: Vec<f64>,
    slowdowns: Vec<f64>,
    touches: u64,
    lost: u64,
}

/// Runs the experiment.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let guests = args.guests.prepare()?;
    let pages = PageCount(args.mib * 256);
    let (period, budget) = (args.period.get(), Some(args.budget.get()));
    let kinds = [
        ("loop", Kind::Loop),
        ("uniform", Kind::Law(Law::Uniform)),
        ("zipf", Kind::Law(Law::Zipf(1.0))),
    ];
    let config = TraceConfig {
        period,
        budget,
        ..TraceConfig::default()
    };
    let backends = [TraceMethod::Traps, TraceMethod::AccessedPageScans];
    let heading = "guest    backend  working set off by  (worst)   found     curve  account  slower by  \
                   touches  lost  1 page in";
    writeln!(out, "{heading}")?;
    for (name, kind) in kinds {
        let guest = GuestConfig {
            memory_mib: args.mib + 96,
            ..GuestConfig::new(name, &kind.workload(args.mib))
        };
        let truth = Truth::of(kind, pages)?;
        let wanted = truth.working_set().context("the law never falls to 5 %")?;
        let Some(mut subject) = guests.boot(guest, out)? else {
            continue;
        };
        let mut tallies = [Tally::default(), Tally::default()];
        let (mut scales, mut untraced) = ([0.0; 2], Vec::new());
        let length = period * args.periods;
        let mut before = left_alone(&mut subject, length)?;
        for _ in 0..args.rounds {
            let mut stretches = Vec::new();
            for (&method, tally) in backends.iter().zip(&mut tallies) {
                let start = Instant::now();
                let watched = watch(&subject, (method, &config), args.periods, wanted, tally);
                stretches.push(watched?);
                let speed = speed(&mut subject, start, Instant::now())?;
                let after = left_alone(&mut subject, length)?;
                tally
                    .slowdowns
                    .push(1.0 - speed / f64::midpoint(before, after));
                untraced.push(after);
                before = after;
            }
            let hidden = stretches.iter().map(|stretch| stretch.hidden.0).max();
            let from = PageCount(hidden.unwrap_or_default() * 2).min(PageCount(pages.0 / 2));
            for ((stretch, tally), scale) in stretches.iter().zip(&mut tallies).zip(&mut scales) {
                tally
                    .distances
                    .push(truth.distance(&stretch.curve, from, pages));
                *scale = stretch.scale;
            }
        }
        for ((backend, tally), scale) in backends.iter().zip(&tallies).zip(scales) {
            tally.row(name, backend.name(), scale, out)?;
        }
        let [trap, scan] = &tallies;
        writeln!(
            out,
            "         scan over trap: working set {}, curve {}, account {}",
            ratio(&scan.errors, &trap.errors),
            ratio(&scan.distances, &trap.distances),
            ratio(&scan.accounts, &trap.accounts),
        )?;
        writeln!(
            out,
            "         (under {}; {} MiB, {:.0} thousand visits a second untraced; pages the guest found wrong: {})",
            subject.accelerator(),
            args.mib,
            median(untraced) / 1e3,
            subject.listen()?.mismatches()
        )?;
    }
    Ok(())
}

impl Tally {
    fn row(
        &self,
        name: &str,
        backend: &str,
        scale: f64,
        out: &mut dyn Write,
    ) -> std::io::Result<()> {
        let worst = self.errors.iter().copied().fold(0.0, f64::max);
        let percent = |values: &[f64]| {
            if values.is_empty() {
                "-".to_owned()
            } else {
                format!("{:.1} %", median(values.to_vec()) * 100.0)
            }
        };
        writeln!(
            out,
            "{name:<8} {backend:<7}  {:>18}  {:>7}  {:>3} of {:<3} {:>6.3}  {:>7}  {:>9}  {:>7}  {:>4}  {scale:>9.0}",
            percent(&self.errors),
            format!("{:.1} %", worst * 100.0),
            self.errors.len(),
            self.periods,
            median(self.distances.clone()),
            percent(&self.accounts),
            percent(&self.slowdowns),
            self.touches,
            self.lost,
        )
    }
}

/// The ratio of two medians, for display.
fn ratio(of: &[f64], to: &[f64]) -> String {
    if of.is_empty() || to.is_empty() {
        return "-".to_owned();
    }
    let ratio = median(of.to_vec()) / median(to.to_vec()).max(1e-9);
    format!("{ratio:.2}")
}

/// Observes a guest for a number of periods, attached anew.
fn watch(
    subject: &Subject,
    (method, config): (TraceMethod, &TraceConfig),
    periods: u32,
    wanted: PageCount,
    tally: &mut Tally,
) -> anyhow::Result<Stretch> {
    let mut observer = Observer::attach(&subject.vm, method, config, &ObserverOptions::default())?;
    let stop = AtomicBool::new(false);
    let (mut hidden, mut scales) = (Vec::new(), Vec::new());
    for _ in 0..periods {
        let period = match observer.period(&stop) {
            Ok(period) => period,
            Err(error @ TrapError::VmGone { .. }) => return Err(error.into()),
            Err(error) => return Err(error).context("the guest is no longer watched"),
        };
        let report = &period.period;
        tally.periods += 1;
        tally.touches += report.references();
        tally.lost += report.losses.lost();
        tally.accounts.push(report.overhead_ratio);
        let set = period.working_set;
        if let Some(set) = set.filter(|set| set.bound == WorkingSetBound::Estimate) {
            let error = set.size.0 as f64 / wanted.0 as f64 - 1.0;
            tally.errors.push(error.abs());
        }
        hidden.push(report.resolution_pages() as f64);
        scales.push(f64::from(report.scale));
    }
    let curve = observer.curve().context("no page was used twice")?;
    observer.detach()?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a number of pages"
    )]
    let hidden = PageCount(median(hidden) as u64);
    Ok(Stretch {
        curve,
        hidden,
        scale: median(scales),
    })
}

/// Visits a second of an untraced guest over this time.
fn left_alone(subject: &mut Subject, length: Duration) -> anyhow::Result<f64> {
    let start = Instant::now();
    std::thread::sleep(length);
    speed(subject, start, Instant::now())
}

/// Visits a second between two times.
fn speed(subject: &mut Subject, from: Instant, to: Instant) -> anyhow::Result<f64> {
    let (visits, took) = subject.listen()?.visits(from, to);
    Ok(visits as f64 / took.as_secs_f64().max(1e-9))
}
