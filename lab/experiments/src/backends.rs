//! Backends compared on the same guests and at the same budget: results and costs of each.
//!
//! One guest a workload and size. In each round it runs untraced for a while, then traced by each backend in turn,
//! untraced after each, each tracer attached anew. All are compared with the workload's closed form:
//!
//! * the working set, where 5 % of the references miss: error of each period that gave more than a bound;
//! * the curve of the whole stretch. Traps hide references that hit their hot set, scans those between two scans, first
//!   touches those sooner than their resolution. So curves are taken as shares of what reaches past a smallest size,
//!   over all sizes from there: twice the backend's own minimum resolvable size, at least a 64th of the array
//!   (`curve`), and that of the backend whose size is the largest (`common`);
//! * the time until both are good: a working set within 10 % and a curve within 0.03, for the first time.
//!
//! The costs are measured by each one's own account, and by the guest's visits a second: one minus their ratio to the
//! mean of the untraced stretches before and after.

use std::io::Write;
use std::str::FromStr as _;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use plimsoll_flow::{MissRatioCurve, PageCount, TraceMethod, WorkingSet, WorkingSetBound};
use plimsoll_observe::{Observer, ObserverOptions, even_sizes};
use plimsoll_protocol::size::{Interval, Rate};
use plimsoll_rig::{GuestConfig, Subject, median};
use plimsoll_source::synthetic::{class_curve, curve_sizes};
use plimsoll_trap::{BACKENDS, TraceConfig, TrapError};

use crate::curves::Law;
use crate::guests::{GuestArgs, Guests};

/// Compare backends on the same guests, at the same budget.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Backends to compare; unless given, all that see reads and give a curve
    #[arg(long, value_delimiter = ',', value_parser = TraceMethod::from_str)]
    backends: Vec<TraceMethod>,
    /// Workloads of the guests
    #[arg(long, value_delimiter = ',', default_value = "loop,uniform,class,zipf")]
    workloads: Vec<Kind>,
    /// Sizes of the guests' arrays, in MiB
    #[arg(long, value_delimiter = ',', default_value = "128", value_parser = clap::value_parser!(u64).range(10..))]
    mib: Vec<u64>,
    /// Rounds of each guest: untraced, then traced by each backend with an untraced stretch after it
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Periods of each stretch
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..))]
    periods: u32,
    /// Length of a period
    #[arg(long, default_value = "5s")]
    period: Interval,
    /// Maximum share of the guest's CPU time for each
    #[arg(long, default_value = "1%")]
    budget: Rate,
    #[command(flatten)]
    guests: GuestArgs,
}

/// Workload of a guest.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Kind {
    /// Goes through the array again and again
    Loop,
    /// Chooses all pages equally often
    Uniform,
    /// Chooses each page of a tenth ten times as often as each other page; the size is rounded down to whole tens
    Class,
    /// Chooses pages by 1 / rank
    Zipf,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::Uniform => "uniform",
            Self::Class => "class",
            Self::Zipf => "zipf",
        }
    }

    /// The size of the array for a size that was asked for.
    fn mib(self, mib: u64) -> u64 {
        match self {
            Self::Class => mib / 10 * 10,
            Self::Loop | Self::Uniform | Self::Zipf => mib,
        }
    }

    fn workload(self, mib: u64) -> String {
        match self {
            Self::Loop => format!("workload=sequential mib={mib}"),
            // A share h of the visits goes to a tenth alone: 1 + 10 h / (1 - h) = 10 times as many as to other pages.
            Self::Class => format!(
                "workload=uniform mib={mib} hot_ratio=0.4737 hot_mib={}",
                mib / 10
            ),
            Self::Uniform => Law::Uniform.workload(mib),
            Self::Zipf => Law::Zipf(1.0).workload(mib),
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
            Kind::Uniform => Self::Curve(Law::Uniform.lru_curve(pages)?),
            Kind::Class => Self::Curve(class_curve(pages, &curve_sizes(pages))?),
            Kind::Zipf => Self::Curve(Law::Zipf(1.0).lru_curve(pages)?),
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
}

impl Stretch {
    /// The smallest size at which its curve is taken.
    fn from(&self, pages: PageCount) -> PageCount {
        smallest(self.hidden, pages)
    }
}

/// The smallest size at which the curve of a backend with this minimum resolvable size is taken.
fn smallest(hidden: PageCount, pages: PageCount) -> PageCount {
    PageCount((hidden.0 * 2).clamp(pages.0 / 64, pages.0 / 2))
}

/// Results of the stretches of one backend.
#[derive(Default)]
struct Tally {
    errors: Vec<f64>,
    periods: usize,
    distances: Vec<f64>,
    common: Vec<f64>,
    from_mib: Vec<f64>,
    good_after_s: Vec<f64>,
    accounts: Vec<f64>,
    slowdowns: Vec<f64>,
    touches: u64,
    lost: u64,
}

/// Length of an untraced stretch.
const UNTRACED: Duration = Duration::from_secs(10);
/// Largest errors of a working set and a curve that are good.
const GOOD_SET: f64 = 0.1;
const GOOD_CURVE: f64 = 0.03;

/// Runs the experiment.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let guests = args.guests.prepare()?;
    let config = TraceConfig {
        period: args.period.get(),
        budget: Some(args.budget.get()),
        ..TraceConfig::default()
    };
    let mut backends = args.backends.clone();
    if backends.is_empty() {
        let rows = BACKENDS.iter().filter(|row| row.gives_curve());
        backends.extend(rows.map(|row| row.method));
    }
    writeln!(
        out,
        "guest          MiB  backend      working set off by  (worst)   found     curve  from MiB  common  \
         good after  account  slower by  touches  lost"
    )?;
    for &mib in &args.mib {
        for &kind in &args.workloads {
            let mib = kind.mib(mib);
            compare(args, &guests, (kind, mib), (&backends, &config), out)?;
        }
    }
    Ok(())
}

/// Compares the backends on one guest.
fn compare(
    args: &Args,
    guests: &Guests,
    (kind, mib): (Kind, u64),
    (backends, config): (&[TraceMethod], &TraceConfig),
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let pages = PageCount(mib * 256);
    let truth = Truth::of(kind, pages)?;
    let guest = GuestConfig {
        memory_mib: guests.memory_mib(mib),
        ..GuestConfig::new(kind.name(), &kind.workload(mib))
    };
    let Some(mut subject) = guests.boot(guest, out)? else {
        return Ok(());
    };
    let mut tallies: Vec<_> = backends.iter().map(|_| Tally::default()).collect();
    let mut untraced = Vec::new();
    let mut before = left_alone(&mut subject)?;
    for _ in 0..args.rounds {
        let mut stretches = Vec::new();
        for (&method, tally) in backends.iter().zip(&mut tallies) {
            let start = Instant::now();
            let stretch = watch(
                &subject,
                (method, config),
                args.periods,
                (&truth, pages),
                tally,
            )
            .with_context(|| format!("{} {mib} MiB, {}", kind.name(), method.name()))?;
            let speed = speed(&mut subject, start, Instant::now())?;
            let after = left_alone(&mut subject)?;
            tally
                .slowdowns
                .push(1.0 - speed / f64::midpoint(before, after));
            untraced.push(after);
            before = after;
            stretches.push(stretch);
        }
        let common = stretches
            .iter()
            .flatten()
            .map(|stretch| stretch.from(pages));
        let common = common.max().unwrap_or_default();
        for (stretch, tally) in stretches.iter().zip(&mut tallies) {
            let Some(stretch) = stretch else { continue };
            let (curve, from) = (&stretch.curve, stretch.from(pages));
            tally.distances.push(truth.distance(curve, from, pages));
            tally.common.push(truth.distance(curve, common, pages));
            tally.from_mib.push(from.0 as f64 / 256.0);
        }
    }
    for (method, tally) in backends.iter().zip(&tallies) {
        tally.row(kind.name(), mib, method.name(), out)?;
    }
    writeln!(
        out,
        "               (under {}; {:.0} thousand visits a second untraced; pages the guest found wrong: {})",
        subject.accelerator(),
        median(untraced) / 1e3,
        subject.listen()?.mismatches()
    )?;
    Ok(())
}

impl Tally {
    fn row(&self, name: &str, mib: u64, backend: &str, out: &mut dyn Write) -> std::io::Result<()> {
        let worst = self.errors.iter().copied().fold(0.0, f64::max);
        let shown = |values: &[f64], show: &dyn Fn(f64) -> String| match values {
            [] => "-".to_owned(),
            _ => show(median(values.to_vec())),
        };
        let percent = |value: f64| format!("{:.1} %", value * 100.0);
        let third = |value: f64| format!("{value:.3}");
        writeln!(
            out,
            "{name:<8} {mib:>9}  {backend:<11}  {:>18}  {:>7}  {:>3} of {:<3} {:>6}  {:>8}  {:>6}  {:>10}  {:>7}  {:>9}  {:>7}  {:>4}",
            shown(&self.errors, &percent),
            percent(worst),
            self.errors.len(),
            self.periods,
            shown(&self.distances, &third),
            shown(&self.from_mib, &|mib| format!("{mib:.1}")),
            shown(&self.common, &third),
            // A stretch that never was good counts as one that would be at any later time.
            shown(&self.good_after_s, &|seconds| if seconds.is_finite() {
                format!("{seconds:.0} s")
            } else {
                "never".to_owned()
            }),
            shown(&self.accounts, &percent),
            shown(&self.slowdowns, &percent),
            self.touches,
            self.lost,
        )
    }
}

/// Observes a guest for a number of periods, attached anew; `None` if no curve came of it.
fn watch(
    subject: &Subject,
    (method, config): (TraceMethod, &TraceConfig),
    periods: u32,
    (truth, pages): (&Truth, PageCount),
    tally: &mut Tally,
) -> anyhow::Result<Option<Stretch>> {
    let wanted = truth.working_set().context("the law never falls to 5 %")?;
    let mut observer = Observer::attach(&subject.vm, method, config, &ObserverOptions::default())?;
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    let (mut hidden, mut good_after_s) = (Vec::new(), f64::INFINITY);
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
        let set = set.filter(|set| set.bound == WorkingSetBound::Estimate);
        let error = set.map(|set| (set.size.0 as f64 / wanted.0 as f64 - 1.0).abs());
        tally.errors.extend(error);
        hidden.push(report.resolution_pages() as f64);
        if good_after_s.is_infinite() && error.is_some_and(|error| error <= GOOD_SET) {
            let from = smallest(whole(median(hidden.clone())), pages);
            let curve = observer.curve();
            if curve.is_some_and(|curve| truth.distance(&curve, from, pages) <= GOOD_CURVE) {
                good_after_s = start.elapsed().as_secs_f64();
            }
        }
    }
    tally.good_after_s.push(good_after_s);
    let curve = observer.curve();
    observer.detach()?;
    let hidden = whole(median(hidden));
    Ok(curve.map(|curve| Stretch { curve, hidden }))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a number of pages"
)]
fn whole(pages: f64) -> PageCount {
    PageCount(pages as u64)
}

/// Visits a second of an untraced guest.
fn left_alone(subject: &mut Subject) -> anyhow::Result<f64> {
    let start = Instant::now();
    std::thread::sleep(UNTRACED);
    speed(subject, start, Instant::now())
}

/// Visits a second between two times.
fn speed(subject: &mut Subject, from: Instant, to: Instant) -> anyhow::Result<f64> {
    let (visits, took) = subject.listen()?.visits(from, to);
    Ok(visits as f64 / took.as_secs_f64().max(1e-9))
}
