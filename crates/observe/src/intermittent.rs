//! Intermittent tracking: tracing rests while a VM's phase is steady, and wakes when it changes (\[AET\] §3.4).
//!
//! A phase is steady when the curve has [converged](Convergence): another period would hardly change it. The backend then
//! detaches. While it rests, some hundred random pages are checked once a period, and the CPU time and the reads of the VM's process are
//! counted. Tracing resumes, with new estimates, when one of these differs from what it was in the first period of the
//! rest, or after [`REST_PERIODS_MAX`] periods. Until then the last curve and
//! working set remain valid.
//!
//! Departs from the source in the signals: its are counts of instructions and page faults in the VM.
//!
//! Not noticed: that other pages are used in the same number, with the same reads and CPU time, before the rest ends by
//! itself.

use std::fs;
use std::time::Duration;

use plimsoll_flow::{MissRatioCurve, PageCount, Period, TraceMethod, WorkingSet, WorkingSetBound};
use plimsoll_trap::{Backend, BackendRow, TraceConfig, TrapError};
use plimsoll_vm::QemuVm;

use crate::ObserveError;
use crate::follow::Follower;

/// Successive periods without a change after which a curve has converged.
const STEADY_PERIODS: u32 = 3;
/// Share by which the mean width of the band may fall in a period, and a size differ or the reach of the curve grow.
const NARROWS: f64 = 0.05;
const GROWS: f64 = 0.02;
/// Misses that differ by less, as a share of those at the first size, are alike, whatever the bands.
const ROUNDING: f64 = 1e-3;
/// Maximum length of a rest.
pub const REST_PERIODS_MAX: u32 = 60;
/// Rates that differ by less than this share are alike.
const ALIKE: f64 = 0.15;
/// Differences of the VM's CPU time (share of a CPU) and reads (bytes per second) that are always alike.
const CPU_ALIKE: f64 = 0.05;
const READS_ALIKE: f64 = 1e6;
/// Pages checked once a period of a rest.
pub const CHECKED_PAGES: usize = 400;
/// Standard deviations by which shares of touched pages may differ by chance.
const DEVIATIONS: f64 = 3.5;

/// Decides when tracing rests.
#[derive(Debug)]
pub(crate) struct Intermittence {
    vm: QemuVm,
    row: &'static BackendRow,
    config: TraceConfig,
    convergence: Convergence,
    rest: Option<Rest>,
}

/// Whether more periods would still change a curve.
///
/// It would not if in several successive periods
/// - the curve and the one before are in each other's band at all sizes of either, give or take a fiftieth of a size,
/// - the band did not become narrower than it ever was: it rests on as many references as the time that the curve covers holds,
/// - and the curve reached no further: its cold part, the pages first touched lately, has stopped growing.
///
/// A working set that is only a bound, as that of a curve which has not fallen yet, never counts as converged.
#[derive(Debug, Default)]
pub struct Convergence {
    last: Option<MissRatioCurve>,
    /// Mean width of the narrowest band so far.
    narrowest: Option<f64>,
    steady: u32,
}

impl Convergence {
    /// Takes the results of a period; returns whether the curve has converged.
    pub fn add(&mut self, curve: Option<&MissRatioCurve>, working_set: Option<WorkingSet>) -> bool {
        let is_estimate = working_set.is_some_and(|set| set.bound == WorkingSetBound::Estimate);
        let Some(curve) = curve.filter(|_| is_estimate) else {
            *self = Self::default();
            return false;
        };
        let last = self.last.replace(curve.clone());
        let found = last.and_then(|last| width_if_alike(&last, curve));
        let narrowest = self.narrowest.filter(|_| found.is_some());
        let is_steady = found.is_some_and(|width| {
            narrowest.is_none_or(|narrowest| width >= narrowest * (1.0 - NARROWS))
        });
        self.narrowest = found.map(|width| narrowest.map_or(width, |before| before.min(width)));
        self.steady = if is_steady { self.steady + 1 } else { 0 };
        self.steady >= STEADY_PERIODS
    }
}

/// Misses with their band, in one unit for all sizes of a curve.
struct Level {
    expected: f64,
    low: f64,
    high: f64,
}

impl Level {
    /// Misses per second if the curve has them: its ratios are shares of what it begins with, whose error they lack.
    fn at(curve: &MissRatioCurve, size: PageCount) -> Self {
        let point = curve.at(size);
        match point.misses {
            Some(misses) => Self {
                expected: misses.expected,
                low: misses.low,
                high: misses.high,
            },
            None => Self {
                expected: point.miss_ratio,
                low: point.low,
                high: point.high,
            },
        }
    }
}

/// The mean width of the band, if a period changed the curve by no more than the bands allow and left its reach as it
/// was.
fn width_if_alike(last: &MissRatioCurve, now: &MissRatioCurve) -> Option<f64> {
    let sizes = [last, now].map(|curve| curve.points().iter().map(|point| point.size));
    let [of_last, of_now] = sizes;
    // Below its first point a curve makes no claim.
    let first = last.points()[0].size.max(now.points()[0].size);
    let sizes = of_last.chain(of_now).filter(|size| *size >= first);
    let rounding = ROUNDING * Level::at(now, first).expected;
    // A step may also move a little.
    let within = |value: f64, band: &MissRatioCurve, size: PageCount| {
        let [low, high] =
            [1.0 + GROWS, 1.0 - GROWS].map(|by| Level::at(band, size.scaled(by).max(first)));
        (low.low - rounding..=high.high + rounding).contains(&value)
    };
    let (mut width, mut count) = (0.0, 0.0);
    for size in sizes {
        let (then, point) = (Level::at(last, size), Level::at(now, size));
        if !within(then.expected, now, size) || !within(point.expected, last, size) {
            return None;
        }
        width += point.high - point.low;
        count += 1.0;
    }
    let touched = |curve: &MissRatioCurve| curve.touched_size().0 as f64;
    let grew = touched(now) > touched(last) * (1.0 + GROWS);
    (!grew).then_some(width / count)
}

/// A rest in progress.
#[derive(Debug)]
struct Rest {
    periods: u32,
    /// Counts at the end of the last period.
    counts: Option<Counts>,
    first: Option<Signals>,
    curve: Option<MissRatioCurve>,
    working_set: Option<WorkingSet>,
}

/// Counts of the VM's process since its start.
#[derive(Debug, Clone, Copy)]
struct Counts {
    cpu: Duration,
    read_bytes: u64,
}

/// What a period of a rest shows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Signals {
    /// Pages found touched, of those checked.
    pub touched: u64,
    /// Pages checked.
    pub checked: u64,
    /// CPUs used.
    pub cpu: f64,
    /// Bytes read per second.
    pub reads: f64,
}

/// Results that remain valid during a rest.
#[derive(Debug, Clone)]
pub(crate) struct LastResults {
    /// The last curve.
    pub(crate) curve: Option<MissRatioCurve>,
    /// The last working set.
    pub(crate) working_set: Option<WorkingSet>,
}

impl Intermittence {
    pub(crate) fn new(vm: &QemuVm, row: &'static BackendRow, config: &TraceConfig) -> Self {
        Self {
            vm: vm.clone(),
            row,
            config: config.clone(),
            convergence: Convergence::default(),
            rest: None,
        }
    }

    pub(crate) fn is_resting(&self) -> bool {
        self.rest.is_some()
    }

    /// After a traced period: the backend for a rest, if the phase is steady and pages can be checked.
    pub(crate) fn settle(
        &mut self,
        curve: Option<&MissRatioCurve>,
        working_set: Option<WorkingSet>,
    ) -> Option<Box<dyn Backend>> {
        if !self.convergence.add(curve, working_set) {
            return None;
        }
        self.convergence = Convergence::default();
        let config = TraceConfig {
            sample_pages: CHECKED_PAGES,
            ..self.config.clone()
        };
        let checker = BackendRow::of(TraceMethod::SampledPages);
        let checker = Follower::attach(&(&self.vm).into(), checker, &config).ok()?;
        self.rest = Some(Rest {
            periods: 0,
            counts: Counts::of(self.vm.pid),
            first: None,
            curve: curve.cloned(),
            working_set,
        });
        Some(Box::new(checker))
    }

    /// After a period of a rest, which is then reported as one of the backend that rests: the last results, and whether
    /// the rest is over.
    pub(crate) fn check(&mut self, period: &mut Period) -> Option<(LastResults, bool)> {
        let rest = self.rest.as_mut()?;
        rest.periods += 1;
        let now = Counts::of(self.vm.pid);
        let seconds = period.length.as_secs_f64();
        let signals = rest.counts.zip(now).map(|(before, now)| Signals {
            touched: period.distinct_pages,
            checked: period.tracked_pages,
            cpu: now.cpu.saturating_sub(before.cpu).as_secs_f64() / seconds,
            reads: now.read_bytes.saturating_sub(before.read_bytes) as f64 / seconds,
        });
        rest.counts = now;
        let is_over = match (signals, rest.first) {
            (None, _) => true,
            (Some(now), None) => {
                rest.first = Some(now);
                false
            }
            (Some(now), Some(first)) => now.differ(first) || rest.periods >= REST_PERIODS_MAX,
        };
        period.method = self.row.method;
        let last = LastResults {
            curve: rest.curve.clone(),
            working_set: rest.working_set,
        };
        Some((last, is_over))
    }

    /// Ends a rest: attaches the backend again.
    pub(crate) fn wake(&mut self) -> Result<Box<dyn Backend>, TrapError> {
        self.rest = None;
        match Follower::attach(&(&self.vm).into(), self.row, &self.config) {
            Ok(backend) => Ok(Box::new(backend)),
            Err(ObserveError::Trace { source, .. }) => Err(source),
            Err(ObserveError::Vm { .. }) => Err(TrapError::VmGone { pid: self.vm.pid }),
        }
    }
}

impl Counts {
    /// `None` if the process has ended, or may not be read.
    fn of(pid: u32) -> Option<Self> {
        let read = |file| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
        Self::parsed(&read("stat")?, &read("io")?)
    }

    fn parsed(stat: &str, io: &str) -> Option<Self> {
        // The name before may contain anything.
        let (_, rest) = stat.rsplit_once(')')?;
        let mut ticks = rest.split_whitespace().skip(11);
        let mut next = || ticks.next()?.parse::<u64>().ok();
        let ticks = next()?.saturating_add(next()?);
        let read = io.lines().find_map(|line| line.strip_prefix("rchar: "))?;
        Some(Self {
            // Ticks of 10 ms, as every architecture of KVM reports them.
            cpu: Duration::from_millis(ticks.saturating_mul(10)),
            read_bytes: read.trim().parse().ok()?,
        })
    }
}

impl Signals {
    /// Whether they differ from those of the `first` period of a rest by more than chance explains.
    pub fn differ(self, first: Self) -> bool {
        let far = |now: f64, before: f64, alike: f64| (now - before).abs() > ALIKE * before + alike;
        let (now, before) = (self.checked as f64, first.checked as f64);
        if now == 0.0 || before == 0.0 {
            return true;
        }
        let share = (self.touched + first.touched) as f64 / (now + before);
        let variance = share * (1.0 - share) * (1.0 / now + 1.0 / before);
        let shares = self.touched as f64 / now - first.touched as f64 / before;
        shares.abs() > DEVIATIONS * variance.sqrt()
            || far(self.cpu, first.cpu, CPU_ALIKE)
            || far(self.reads, first.reads, READS_ALIKE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::CurvePoint;

    const FIRST: Signals = Signals {
        touched: 120,
        checked: 400,
        cpu: 1.0,
        reads: 10e6,
    };

    /// A curve that falls from 1 to `last` at 100 pages, with a band of this half-width, and reaches to `end`.
    fn curve(last: f64, half_width: f64, end: u64) -> MissRatioCurve {
        let points = [(10, 1.0), (100, last), (end, last * 0.5)];
        let points = points.map(|(size, miss_ratio): (u64, f64)| CurvePoint {
            size: PageCount(size),
            miss_ratio,
            low: (miss_ratio - half_width).max(0.0),
            high: (miss_ratio + half_width).min(1.0),
            misses: None,
        });
        MissRatioCurve::new(points.to_vec(), 1000).unwrap()
    }

    /// After how many periods of these curves, one after the other, it has converged.
    fn converged(curves: impl IntoIterator<Item = MissRatioCurve>) -> Option<usize> {
        let set = WorkingSet {
            size: PageCount(100),
            bound: WorkingSetBound::Estimate,
        };
        let mut convergence = Convergence::default();
        let mut curves = curves.into_iter();
        curves.position(|curve| convergence.add(Some(&curve), Some(set)))
    }

    #[test]
    fn a_curve_has_converged_when_periods_change_neither_it_nor_its_band_nor_its_reach() {
        // The first to compare with, and three that are alike.
        assert_eq!(converged(vec![curve(0.3, 0.05, 1000); 9]), Some(3));
        // Within each other's band, or not.
        // Misses per second, whose bands begin with the curve: below its first point it has none.
        let rated = curve(0.3, 0.05, 1000).with_references_per_second(1e4);
        assert!(rated.points()[0].misses.is_some());
        assert_eq!(converged(vec![rated; 9]), Some(3));
        let swaying =
            |by: f64| (0..9).map(move |at| curve(0.3 + by * f64::from(at % 2), 0.05, 1000));
        assert_eq!(converged(swaying(0.04)), Some(3));
        assert_eq!(converged(swaying(0.06)), None);
        // A band that narrows as references accumulate: by less than 5 % from the tenth on.
        let narrowing =
            |count: i32| (1..=count).map(|at| curve(0.3, 0.1 / f64::from(at).sqrt(), 1000));
        let at = converged(narrowing(20)).unwrap();
        assert!((10..14).contains(&at), "{at}");
        assert_eq!(converged(narrowing(9)), None);
        // Pages that were never touched before.
        let growing = |by: u64| (0..9).map(move |at| curve(0.3, 0.05, 1000 + by * at));
        assert_eq!(converged(growing(50)), None);
        assert_eq!(converged(growing(10)), Some(3));
    }

    #[test]
    fn without_a_working_set_nothing_has_converged() {
        let mut convergence = Convergence::default();
        let alike = curve(0.3, 0.05, 1000);
        let bound = WorkingSet {
            size: PageCount(100),
            bound: WorkingSetBound::AtLeast,
        };
        for set in [None, Some(bound)] {
            assert!((0..9).all(|_| !convergence.add(Some(&alike), set)));
        }
        assert!((0..9).all(|_| !convergence.add(None, None)));
    }

    #[test]
    fn a_rest_ends_when_a_signal_differs_by_more_than_chance() {
        for (now, differ) in [
            (FIRST, false),
            (
                Signals {
                    touched: 150,
                    ..FIRST
                },
                false,
            ),
            (
                Signals {
                    touched: 170,
                    ..FIRST
                },
                true,
            ),
            (
                Signals {
                    touched: 75,
                    ..FIRST
                },
                true,
            ),
            (Signals { cpu: 1.15, ..FIRST }, false),
            (Signals { cpu: 0.7, ..FIRST }, true),
            (
                Signals {
                    reads: 12e6,
                    ..FIRST
                },
                false,
            ),
            (
                Signals {
                    reads: 20e6,
                    ..FIRST
                },
                true,
            ),
            (
                Signals {
                    checked: 0,
                    ..FIRST
                },
                true,
            ),
        ] {
            assert_eq!(now.differ(FIRST), differ, "{now:?}");
        }
    }

    #[test]
    fn counts_are_read_past_a_name_with_brackets() {
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20";
        let counts = Counts::parsed(stat, "rchar: 77\nwchar: 1\n").unwrap();
        assert_eq!(
            (counts.cpu, counts.read_bytes),
            (Duration::from_secs(3), 77)
        );
        assert!(Counts::parsed("7 (a) S 1", "rchar: 7").is_none());
    }
}
