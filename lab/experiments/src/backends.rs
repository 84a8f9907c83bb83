//! Backends compared on the same guests and at the same budget: results and costs of each.
//!
//! One guest a workload and size. In each round it runs untraced for a while, then traced by each backend in turn,
//! untraced after each, each tracer attached anew. All are compared with the workload's closed form:
//!
//! * the working set, where 5 % of the observed references miss: error of each period that gave more than a bound;
//! * the curve of the whole stretch. Traps hide references that hit their hot set, scans those between two scans, first
//!   touches those sooner than their resolution. So curves are taken as shares of what reaches past a smallest size,
//!   over all sizes from there: twice the backend's own minimum resolvable size, of first touches the first point of the
//!   curve, at least a 64th of the array (`curve`), and that of the backend whose size is the largest (`common`);
//! * its band in misses a second, against the guest's visits a second times the closed form, from its first point on: the share of
//!   the sizes at which it holds them (`held`), and its mean width as a share of the misses at the first (`wide`);
//! * the time until both are good: a working set within 10 % and a curve within 0.03, for the first time.
//!
//! `--csv` and `--plot` take the curve after each period from a 64th of the array on, the same for all backends. Sizes
//! below its smallest one a backend does not resolve: its ratio is taken to be 1 there, and beyond it its curve continues from
//! the true ratio at that size.
//!
//! The costs are measured by each one's own account, and by the guest's visits a second: one minus their ratio to the
//! mean of the untraced stretches before and after.

use std::io::Write;
use std::path::PathBuf;
use std::str::FromStr as _;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use plimsoll_flow::{
    CurvePoint, MissRatioCurve, PageCount, TraceMethod, Whole as _, WorkingSet, WorkingSetBound,
};
use plimsoll_observe::{Observer, ObserverOptions, even_sizes};
use plimsoll_output::{csv_table, write_file};
use plimsoll_plot::{Axis, Chart, Series, SeriesStyle, Unit};
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
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "loop,loops,mixed,uniform,class,zipf"
    )]
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
    /// Write the error of each curve after each period to this file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw the mean of these errors over all guests to by-touches.svg and by-time.svg in this directory
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    guests: GuestArgs,
}

/// Workload of a guest.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Kind {
    /// Goes through the array again and again
    Loop,
    /// Two loops: 70 % of the visits go through a fifth of the array, the others through the rest
    Loops,
    /// Half of the visits go through one half of the array again and again, the others choose any page of the other
    Mixed,
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
            Self::Loops => "loops",
            Self::Mixed => "mixed",
            Self::Uniform => "uniform",
            Self::Class => "class",
            Self::Zipf => "zipf",
        }
    }

    /// The size of the array for a size that was asked for.
    fn mib(self, mib: u64) -> u64 {
        match self {
            Self::Class | Self::Loops => mib / 10 * 10,
            Self::Mixed => mib / 2 * 2,
            Self::Loop | Self::Uniform | Self::Zipf => mib,
        }
    }

    fn workload(self, mib: u64) -> String {
        match self {
            Self::Loop => format!("workload=sequential mib={mib}"),
            Self::Loops => format!(
                "workload=sequential mib={mib} loop_ratio=0.7 loop_mib={}",
                mib / 5
            ),
            Self::Mixed => format!(
                "workload=uniform mib={mib} loop_ratio=0.5 loop_mib={}",
                mib / 2
            ),
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
            // Of t visits per page of the array: the share of its pages that they touch, and its slope.
            Kind::Loops => Self::Curve(touched_curve(pages, |t| {
                let loops = [(0.7, 0.2), (0.3, 0.8)];
                let touched = loops.map(|(visits, pages)| f64::min(visits * t, pages));
                let slopes =
                    loops.map(|(visits, pages)| if visits * t < pages { visits } else { 0.0 });
                (touched.iter().sum(), slopes.iter().sum())
            })?),
            Kind::Mixed => Self::Curve(touched_curve(pages, |t| {
                let (turn, slope) = if t < 1.0 { (t, 1.0) } else { (1.0, 0.0) };
                (
                    f64::midpoint(turn, -(-t).exp_m1()),
                    f64::midpoint(slope, (-t).exp()),
                )
            })?),
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

    /// Where 5 % miss of the references that miss at `hidden` pages, which are all that a backend observes.
    fn working_set(&self, hidden: PageCount) -> Option<PageCount> {
        match self {
            Self::Loop(pages) => Some(*pages),
            Self::Curve(curve) => curve.size_for(WorkingSet::MISS_RATIO * curve.miss_ratio(hidden)),
        }
    }

    /// Mean distance of a curve from a 64th of the pages on, of which it resolves those from `from` on.
    fn distance_of_all(
        &self,
        curve: Option<&MissRatioCurve>,
        from: PageCount,
        pages: PageCount,
    ) -> f64 {
        let least = PageCount(pages.0 / 64);
        let known = self.miss_ratio(from) / self.miss_ratio(least).max(1e-9);
        let errors: Vec<f64> = even_sizes(least, pages)
            .map(|size| {
                let share = match curve {
                    Some(curve) if size >= from => {
                        known * curve.miss_ratio(size) / curve.miss_ratio(from).max(1e-9)
                    }
                    _ => 1.0,
                };
                (share - self.miss_ratio(size) / self.miss_ratio(least).max(1e-9)).abs()
            })
            .collect();
        errors.iter().sum::<f64>() / errors.len() as f64
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

/// The curve of references that touch a share of `pages` within a time, with a slope: a memory of that size misses at
/// that rate.
fn touched_curve(
    pages: PageCount,
    touched: impl Fn(f64) -> (f64, f64),
) -> anyhow::Result<MissRatioCurve> {
    let point = |size: PageCount| {
        let share = size.0 as f64 / pages.0 as f64;
        let (mut low, mut high) = (0.0, 100.0);
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            if touched(middle).0 < share {
                low = middle;
            } else {
                high = middle;
            }
        }
        let miss_ratio = if size < pages { touched(high).1 } else { 0.0 };
        CurvePoint::exact(size, miss_ratio)
    };
    let sizes = curve_sizes(pages);
    Ok(MissRatioCurve::new(
        sizes.into_iter().map(point).collect(),
        u64::MAX,
    )?)
}

/// The curve of a stretch after one of its periods, for `--csv` and `--plot`.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    period: usize,
    /// Accesses that the backend observed so far, each at the cost of a trap or a minor fault.
    touches: u64,
    /// Time taken from the guest's vCPU so far, by the backend's account.
    taken_s: f64,
    error: f64,
}

/// The result of a stretch.
struct Stretch {
    curve: MissRatioCurve,
    /// The smallest size at which it is taken.
    from: PageCount,
}

/// The smallest size at which the curve of a backend with this minimum resolvable size is taken.
fn smallest(method: TraceMethod, hidden: PageCount, pages: PageCount) -> PageCount {
    let sure = match method {
        TraceMethod::FirstTouches => hidden.0,
        // Past pages in constant use, such as a stack.
        _ => hidden.0 * 2,
    };
    PageCount(sure.clamp(pages.0 / 64, pages.0 / 2))
}

/// Share of the sizes from the curve's first point on at which the band of its misses per second contains those of a
/// guest that makes `visits` a second, and the mean width of the band as a share of its misses at the first point.
fn band(
    truth: &Truth,
    curve: &MissRatioCurve,
    visits: f64,
    pages: PageCount,
) -> Option<(f64, f64)> {
    let first = curve.points()[0].size.max(PageCount(pages.0 / 64));
    let most = curve.misses_per_second(first)?.expected;
    let bands = even_sizes(first, pages).filter_map(|size| {
        let band = curve.misses_per_second(size)?;
        let wanted = truth.miss_ratio(size) * visits;
        let is_held = band.low - ROUNDING * most <= wanted && wanted <= band.high + ROUNDING * most;
        Some((f64::from(u8::from(is_held)), (band.high - band.low) / most))
    });
    let (held, widths): (Vec<f64>, Vec<f64>) = bands.unzip();
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
    Some((mean(held), mean(widths)))
}

/// Results of the stretches of one backend.
#[derive(Default)]
struct Tally {
    held: Vec<f64>,
    widths: Vec<f64>,
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
    progress: Vec<Progress>,
}

/// Length of an untraced stretch.
const UNTRACED: Duration = Duration::from_secs(5);
/// Largest errors of a working set and a curve that are good.
const GOOD_SET: f64 = 0.1;
const GOOD_CURVE: f64 = 0.03;
/// Error, as a share of the misses at a curve's first point, that does not count against a band.
const ROUNDING: f64 = 1e-3;

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
        let rows = BACKENDS.iter().filter(|row| row.curve_cost.is_some());
        backends.extend(rows.map(|row| row.method));
    }
    writeln!(
        out,
        "guest          MiB  backend      working set off by  (worst)   found     curve  from MiB  common   held   wide  \
         good after  account  slower by  touches  lost"
    )?;
    let mut all = Vec::new();
    for &mib in &args.mib {
        for &kind in &args.workloads {
            let mib = kind.mib(mib);
            let tallies = compare(args, &guests, (kind, mib), (&backends, &config), out)?;
            let of = |(&backend, tally)| Guest {
                kind,
                mib,
                backend,
                tally,
            };
            all.extend(backends.iter().zip(tallies).map(of));
        }
    }
    if let Some(path) = &args.csv {
        std::fs::write(path, csv(&all)).with_context(|| path.display().to_string())?;
    }
    if let Some(folder) = &args.plot {
        let by_touches = Axis::new("observed touches", Unit::Count);
        let by_time = Axis::new("time taken from the guest", Unit::Seconds);
        let charts = [
            (
                "by-touches.svg",
                by_touches,
                (|after| after.touches as f64) as Measure,
            ),
            ("by-time.svg", by_time, |after| after.taken_s),
        ];
        for (name, x, measure) in charts {
            let svg = chart(&all, &backends, (x, measure), args).to_svg();
            write_file(&folder.join(name), svg.as_bytes())?;
        }
    }
    Ok(())
}

/// What one backend made of a guest.
struct Guest {
    kind: Kind,
    mib: u64,
    backend: TraceMethod,
    tally: Tally,
}

fn csv(guests: &[Guest]) -> String {
    let rows = guests.iter().flat_map(|guest| {
        let progress = guest.tally.progress.iter();
        progress.map(move |after| (guest, after))
    });
    csv_table!(rows, |(guest, after)| {
        "workload": guest.kind.name(),
        "mib": guest.mib,
        "backend": guest.backend.name(),
        "period": after.period,
        "touches": after.touches,
        "taken_s": format!("{:.4}", after.taken_s),
        "curve_error": format!("{:.4}", after.error),
    })
}

/// A quantity after a period.
type Measure = fn(&Progress) -> f64;

/// By backend: the mean error by the mean of `measure`, after each period.
fn chart(
    guests: &[Guest],
    backends: &[TraceMethod],
    (x, measure): (Axis, Measure),
    args: &Args,
) -> Chart {
    let series = backends.iter().map(|&backend| {
        let of_backend = guests.iter().filter(|guest| guest.backend == backend);
        let progress: Vec<_> = of_backend.flat_map(|guest| &guest.tally.progress).collect();
        let points = (0..args.periods as usize).filter_map(|period| {
            let rows = progress.iter().filter(|after| after.period == period);
            let mean = |value: Measure| {
                let values: Vec<f64> = rows.clone().map(|after| value(after)).collect();
                values.iter().sum::<f64>() / values.len() as f64
            };
            let point = (mean(measure), mean(|after| after.error));
            point.0.is_finite().then_some(point)
        });
        Series::new(backend.name(), SeriesStyle::Line, points)
    });
    let subtitle = format!(
        "mean of {} workloads at {} sizes, a budget of {}",
        args.workloads.len(),
        args.mib.len(),
        args.budget
    );
    let y = Axis::new("mean error from a 64th of the array on", Unit::Count);
    Chart::new("Error of a curve by its cost", subtitle, [x, y], series)
}

/// Compares the backends on one guest.
fn compare(
    args: &Args,
    guests: &Guests,
    (kind, mib): (Kind, u64),
    (backends, config): (&[TraceMethod], &TraceConfig),
    out: &mut dyn Write,
) -> anyhow::Result<Vec<Tally>> {
    let pages = PageCount(mib * 256);
    let truth = Truth::of(kind, pages)?;
    let guest = GuestConfig {
        memory_mib: guests.memory_mib(mib),
        ..GuestConfig::new(kind.name(), &kind.workload(mib))
    };
    let Some(mut subject) = guests.boot(guest, out)? else {
        return Ok(Vec::new());
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
            let found = stretch
                .as_ref()
                .and_then(|stretch| band(&truth, &stretch.curve, speed, pages));
            tally.held.extend(found.map(|(held, _)| held));
            tally.widths.extend(found.map(|(_, width)| width));
            let after = left_alone(&mut subject)?;
            tally
                .slowdowns
                .push(1.0 - speed / f64::midpoint(before, after));
            untraced.push(after);
            before = after;
            stretches.push(stretch);
        }
        let common = stretches.iter().flatten().map(|stretch| stretch.from);
        let common = common.max().unwrap_or_default();
        for (stretch, tally) in stretches.iter().zip(&mut tallies) {
            let Some(stretch) = stretch else { continue };
            let (curve, from) = (&stretch.curve, stretch.from);
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
    Ok(tallies)
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
            "{name:<8} {mib:>9}  {backend:<11}  {:>18}  {:>7}  {:>3} of {:<3} {:>6}  {:>8}  {:>6}  {:>5}  {:>5}  {:>10}  {:>7}  {:>9}  {:>7}  {:>4}",
            shown(&self.errors, &percent),
            percent(worst),
            self.errors.len(),
            self.periods,
            shown(&self.distances, &third),
            shown(&self.from_mib, &|mib| format!("{mib:.1}")),
            shown(&self.common, &third),
            shown(&self.held, &third),
            shown(&self.widths, &third),
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
    let mut observer = Observer::attach(&subject.vm, method, config, &ObserverOptions::default())?;
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    let (mut resolutions, mut hidden) = (Vec::new(), pages);
    let mut good_after_s = f64::INFINITY;
    let mut spent = Progress::default();
    for index in 0..periods as usize {
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
        let curve = observer.curve();
        if method == TraceMethod::FirstTouches {
            // As small as the samples so far resolve.
            let first = curve.as_ref().map(|curve| curve.points()[0].size);
            hidden = first.unwrap_or(pages);
        } else {
            resolutions.push(report.resolution_pages() as f64);
            hidden = PageCount(u64::whole(median(resolutions.clone())));
        }
        let from = smallest(method, hidden, pages);
        let wanted = truth.working_set(hidden).unwrap_or(pages);
        let set = period.working_set;
        let set = set.filter(|set| set.bound == WorkingSetBound::Estimate);
        let error = set.map(|set| (set.size.0 as f64 / wanted.0 as f64 - 1.0).abs());
        tally.errors.extend(error);
        spent = Progress {
            period: index,
            touches: spent.touches + report.references(),
            taken_s: spent.taken_s + report.overhead_ratio * report.length.as_secs_f64(),
            error: truth.distance_of_all(curve.as_ref(), from, pages),
        };
        tally.progress.push(spent);
        let is_good = |curve: &_| truth.distance(curve, from, pages) <= GOOD_CURVE;
        if good_after_s.is_infinite()
            && error.is_some_and(|error| error <= GOOD_SET)
            && curve.as_ref().is_some_and(is_good)
        {
            good_after_s = start.elapsed().as_secs_f64();
        }
    }
    tally.good_after_s.push(good_after_s);
    let curve = observer.curve();
    observer.detach()?;
    let from = smallest(method, hidden, pages);
    Ok(curve.map(|curve| Stretch { curve, from }))
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
