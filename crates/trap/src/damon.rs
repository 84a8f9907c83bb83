//! DAMON: how long ago sampled pages were last touched, as the kernel's data access monitor sees it.
//!
//! ```text
//!   period:  draw ─> set up ─> kdamond checks every interval ──────> snapshot: ages ─> rest
//!                                    │
//!                  clears the accessed bit of each page, and checks whether it is set again
//! ```
//!
//! DAMON is meant to find regions of similar use, which blurs single pages. Here each sampled page is a region of its own,
//! which DAMON neither merges nor splits (`kdamond`); its age is the time since the page was last touched. That
//! time has the same distribution as the time from a random time to the next touch, because a stationary stream is the same
//! backwards. So a snapshot is a set of first touches, each known to within an interval or censored at the start of the
//! window, and the estimator of first touches makes the curve of it: what DAMON sees is evaluated at the resolution of its
//! intervals, although one snapshot a period is read.
//!
//! Marking works as for idle pages, in the kernel: nothing is unmapped, no access faults, no process is stopped, and nothing
//! is called in one. Any memory: private, locked, swappable, mapped by several processes. The sample is that of `target_pages`; a process's
//! pages are watched by address, a control group's by frame. Of a control group, frames that are no longer charged to it at
//! the end are dropped.
//!
//! **Interval and window.** The interval is set so that a check finds [`SHARE_WANTED`] of the pages in use touched, and the
//! window lasts up to [`CHECKS`] of them, or the period. The number of pages is what the budget pays for: each costs its setup and its
//! reading, this thread's time, and its checks, that of kdamond; and no more than can be checked in the time of a pause, because
//! longer checks would lengthen the interval. Where the fewest pages cost more than a period's budget, the
//! next periods watch nothing until it is paid; the estimator keeps what it has.
//!
//! Cost: about 40 µs of this thread for each page and period, and 1 to 2 µs of kdamond for each page and check.
//! Not here: curves. Not seen: as for idle pages, accesses that a TLB serves, and those of devices. Of each page only the last touch before the
//! snapshot is known.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use plimsoll_flow::{
    AccessKind, FirstTouch, FirstTouches, PageNumber, Period, PeriodLosses, ReferenceBatch,
    SampleCounts, ScanCounts, Timestamp, TraceMethod, Whole as _,
};

use crate::backend::{Backend, BackendRow, GroupSupport, Observation, Sink, Yield};
use crate::config::TraceConfig;
use crate::debt::Debt;
use crate::error::TrapError;
use crate::frames::Frames;
use crate::kdamond::{Kdamond, LastTouch, Operations, Snapshot, Watch, check_damon};
use crate::process::{cpu_time, overhead_ratio};
use crate::ram::PAGE_BYTES;
use crate::rate::{RateRule, SCALE_MAX};
use crate::requirement::Requirement::{Damon, Memory};
use crate::sample::Sample;
use crate::sys::process_cpu_time;
use crate::target::{GroupTarget, TraceTarget};
use crate::target_pages::{Drawn, TargetPages, Watched, check_charges};
use crate::trial::{TouchCost, Toucher};

/// Checks of a window, if it ends before the period does, at most and at least: at most unless the budget does not pay for them
/// with the fewest pages.
const CHECKS: u32 = 128;
const CHECKS_MIN: u32 = 24;
/// Share of the pages in use that one check should find touched.
const SHARE_WANTED: f64 = 0.1;
/// Shortest time from check to check.
const INTERVAL_MIN: Duration = Duration::from_millis(1);
/// Pages of a sample, at least and at most: below, chance decides; the kernel's time to set up grows with the square.
const PAGES_MIN: u32 = 48;
const PAGES_MAX: u32 = 2048;
/// Most periods in which what one cost is paid: later, a curve would be too old.
const PAID_MAX: u32 = 8;
/// Share of the budget that a period aims at.
const BUDGET_SHARE: f64 = 0.8;
/// Largest factor by which interval and scale change from one period to the next.
const STEP_MAX: f64 = 4.0;
/// Time for a snapshot at the end of a window: the kernel waits in steps of 0.1 s.
const SNAPSHOT: Duration = Duration::from_millis(250);
/// Snapshots that are tried: one is empty where a check takes longer than two intervals.
const SNAPSHOTS: u32 = 3;

/// The backend `damon`.
pub const ROW: BackendRow = BackendRow {
    method: TraceMethod::Damon,
    sees: "DAMON: how long ago sampled pages were last touched, each a region of its own; any memory, nothing is stopped",
    needs: "CONFIG_DAMON_SYSFS with CONFIG_DAMON_VADDR (processes) or CONFIG_DAMON_PADDR (control groups), Linux 6.2; root; no other user of DAMON",
    costs: "no fault; the time of kdamond and of the tracer, within the time budget",
    loses: "all touches of a page but its last before the snapshot; accesses that a TLB serves, and those of devices",
    yields: Yield::FirstTouches,
    sees_reads: true,
    options: &["--scan-interval"],
    rate_rules: &[RateRule::Fixed, RateRule::Budget],
    requirements: |_| &[Memory, Damon],
    trial: |_| {
        // DAMON is not started for a trial: a touch takes no fault, and what it takes is below what could be measured.
        check_damon(Operations::Process)?;
        Ok(Duration::ZERO)
    },
    curve_cost: None,
    attach: |target, config| {
        let pages = TargetPages::of_process(target)?;
        Ok(Box::new(DamonSampler::new(pages, config)?))
    },
    any_process: true,
    group: Some(GroupSupport {
        check: |group| check_damon(Operations::Physical).and_then(|()| check_charges(group)),
        attach: |group, config| {
            let pages = TargetPages::of_group(group)?;
            Ok(Box::new(DamonSampler::new(pages, config)?))
        },
    }),
};

/// How many pages are sampled, and how often each is checked.
#[derive(Debug, Clone, Copy)]
struct Control {
    rule: RateRule,
    scale: u32,
    interval: Duration,
    interval_max: Duration,
    is_interval_fixed: bool,
    checks: u32,
}

/// Results and costs of a window.
#[derive(Debug, Clone, Copy, Default)]
struct WindowCost {
    /// Pages watched, those of them touched in the window, and in its last interval.
    pages: u64,
    touched: u64,
    touched_last: u64,
    /// CPU time of a check of all pages.
    check: Duration,
    /// Of this thread and of kdamond.
    spent: Duration,
    /// `None` for no bound.
    budget: Option<Duration>,
}

impl Control {
    fn new(config: &TraceConfig) -> Self {
        let interval_max = (config.period / CHECKS_MIN).max(INTERVAL_MIN);
        Self {
            rule: config.rate_rule,
            scale: config.scale,
            interval: config
                .scan_interval
                .unwrap_or(config.period / CHECKS)
                .clamp(INTERVAL_MIN, interval_max),
            interval_max,
            is_interval_fixed: config.scan_interval.is_some(),
            checks: CHECKS,
        }
    }

    /// After a window without a snapshot: a check of the sample took longer than two intervals.
    fn lengthen(&mut self) {
        if !self.is_interval_fixed {
            self.interval = self.interval.mul_f64(STEP_MAX).min(self.interval_max);
        }
    }

    fn adapt(&mut self, cost: &WindowCost) {
        if cost.pages == 0 {
            return;
        }
        let pause = self.interval;
        if !self.is_interval_fixed {
            let share = cost.touched_last as f64 / cost.touched.max(1) as f64;
            let factor = (SHARE_WANTED / share.max(1e-9)).clamp(1.0 / STEP_MAX, STEP_MAX);
            let interval = self.interval.mul_f64(factor);
            self.interval = interval.clamp(INTERVAL_MIN, self.interval_max);
        }
        if let (RateRule::Budget, Some(budget)) = (self.rule, cost.budget) {
            let pages = cost.pages as f64;
            let each = cost.spent.as_secs_f64() / pages;
            let affordable = budget.as_secs_f64() * BUDGET_SHARE / each.max(1e-9);
            let checks =
                f64::from(self.checks) * (affordable / f64::from(PAGES_MIN)).clamp(0.5, 2.0);
            self.checks = u32::whole(checks).clamp(CHECKS_MIN, CHECKS);
            let checkable = pages * pause.as_secs_f64() / cost.check.as_secs_f64().max(1e-9);
            let wanted = affordable.min(checkable);
            let wanted = wanted.clamp(PAGES_MIN.into(), PAGES_MAX.into());
            let factor = (pages / wanted).clamp(1.0 / STEP_MAX, STEP_MAX);
            let scale = f64::from(self.scale) * factor;
            self.scale = u32::whole(scale.clamp(1.0, f64::from(SCALE_MAX)).round());
        }
    }
}

/// A target of which DAMON samples pages. Dropped, it ends that.
#[derive(Debug)]
struct DamonSampler {
    pages: TargetPages,
    frames: Frames,
    kdamond: Kdamond,
    config: TraceConfig,
    control: Control,
    watched: Vec<Watched>,
    /// Pages with contents, by the last sample.
    population_pages: u64,
    batch: ReferenceBatch,
    /// Time zero of the samples.
    start: Instant,
    periods: u64,
    debt: Debt,
}

/// What a window found and took.
#[derive(Debug, Default)]
struct Window {
    snapshot: Option<Snapshot>,
    length: Duration,
    kdamond: Duration,
}

impl DamonSampler {
    fn new(pages: TargetPages, config: &TraceConfig) -> Result<Self, TrapError> {
        Ok(Self {
            frames: Frames::open(pages.needs_groups())?,
            kdamond: Kdamond::take()?,
            pages,
            control: Control::new(config),
            config: config.clone(),
            watched: Vec::new(),
            population_pages: 0,
            batch: ReferenceBatch::new(),
            start: Instant::now(),
            periods: 0,
            debt: Debt::default(),
        })
    }

    /// Time that a period may take; `None` for no bound.
    fn budget(&self) -> Option<Duration> {
        self.config.period_budget(self.pages.vcpus())
    }

    /// Draws a sample, and finds of how many pages with contents it is one.
    fn draw(&mut self) -> Result<Drawn, TrapError> {
        self.pages.renew()?;
        let scale = self.control.scale;
        let sample = Sample::of_period(scale, 1, self.config.seed, self.periods);
        let mut drawn = self.pages.draw(&self.frames, sample, &mut self.watched)?;
        // What a page costs is not known at first, and a rate may have been set for a smaller target.
        let is_first = self.periods == 0 && self.control.rule == RateRule::Budget;
        let most = if is_first { PAGES_MIN } else { PAGES_MAX };
        self.population_pages = self.watched.len() as u64 * u64::from(scale);
        let thinning = self.watched.len().div_ceil(most as usize).max(1);
        if thinning > 1 {
            let mut index = 0;
            self.watched.retain(|_| {
                index += 1;
                index % thinning == 0
            });
            drawn.thin(thinning as u64);
            let thinning = u32::try_from(thinning).unwrap_or(u32::MAX);
            self.control.scale = scale.saturating_mul(thinning).min(SCALE_MAX);
        }
        Ok(drawn)
    }

    /// Addresses of the watched pages, in the target's address space or in physical memory; orders the pages by them.
    fn addresses(&mut self) -> Vec<u64> {
        let address = |watched: Watched| match &self.pages {
            TargetPages::Process(pages) => pages.address(watched.page),
            TargetPages::Group(_) => Some(watched.frame * PAGE_BYTES),
        };
        let addresses;
        (addresses, self.watched) = by_address(&self.watched, address);
        addresses
    }

    fn run_window(&mut self, stop: &AtomicBool, end: Instant) -> Result<Window, TrapError> {
        let addresses = self.addresses();
        let failed = self.pages.failed("using DAMON");
        if addresses.is_empty() {
            return Ok(Window::default());
        }
        let pid = match &self.pages {
            TargetPages::Process(pages) => Some(pages.process.pid),
            TargetPages::Group(_) => None,
        };
        let interval = self.control.interval;
        let watch = Watch {
            pid,
            pages: &addresses,
            interval,
        };
        self.kdamond.start(&watch).map_err(failed)?;
        let from = Instant::now();
        let thread = self.kdamond.thread();
        let least = from + interval * CHECKS_MIN;
        let latest = (end - (SNAPSHOT + interval).min(self.config.period / 2)).max(least);
        let checks = self.control.checks;
        self.pages.rest(stop, latest.min(from + interval * checks));
        let mut window = Window::default();
        for _ in 0..SNAPSHOTS {
            self.pages.check_alive()?;
            let asked = from.elapsed();
            self.kdamond.copy().map_err(failed)?;
            window.length = from.elapsed();
            if let Some(snapshot) = self.kdamond.read().map_err(failed)? {
                window.length = snapshot.taken(asked, window.length);
                window.snapshot = Some(snapshot);
                break;
            }
        }
        let time = thread.and_then(|thread| process_cpu_time(thread).ok());
        window.kdamond = time.unwrap_or_default();
        self.kdamond.stop().map_err(failed)?;
        Ok(window)
    }

    /// The first touches of a snapshot, and the pages touched.
    fn first_touches(
        &mut self,
        window: &Window,
        from: Duration,
    ) -> Result<Vec<FirstTouch>, TrapError> {
        self.batch.advance();
        let Some(snapshot) = &window.snapshot else {
            return Ok(Vec::new());
        };
        let intervals = snapshot.intervals.max(1);
        let interval = window.length / intervals;
        let mut samples = Vec::with_capacity(self.watched.len());
        for (watched, last) in self.watched.iter().zip(&snapshot.last_touches) {
            if let TargetPages::Group(pages) = &self.pages {
                let charged = pages.charged(&self.frames, watched.frame);
                let is_gone = charged
                    .map_err(self.pages.failed("reading which pages are charged to it"))?
                    .is_none();
                if is_gone {
                    continue;
                }
            }
            let (untouched, touched) = match *last {
                LastTouch::Ago(ago) => {
                    self.batch
                        .push(PageNumber(watched.page), AccessKind::Unknown);
                    let ago = ago.min(intervals - 1);
                    (interval * ago, Some(interval * (ago + 1)))
                }
                LastTouch::Never => (window.length, None),
            };
            samples.push(FirstTouch {
                armed: from,
                untouched_until: from + untouched,
                touched_by: touched.map(|touched| from + touched),
                pages: 1,
            });
        }
        Ok(samples)
    }
}

/// Pages that have an address, with it, ascending as DAMON takes them: a VM's pages are numbered by its memory backends, whose
/// addresses need not rise.
fn by_address(
    watched: &[Watched],
    address: impl Fn(Watched) -> Option<u64>,
) -> (Vec<u64>, Vec<Watched>) {
    let located = watched
        .iter()
        .filter_map(|&watched| Some((address(watched)?, watched)));
    let mut located: Vec<_> = located.collect();
    located.sort_unstable_by_key(|&(address, _)| address);
    located.into_iter().unzip()
}

impl Backend for DamonSampler {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let (start, cpu) = (Instant::now(), cpu_time());
        let end = start + self.config.period;
        let from = self.start.elapsed();
        let is_paying = self.debt.is_due(self.budget());
        let drawn = match is_paying {
            true => {
                self.pages.check_alive()?;
                self.watched.clear();
                Drawn::default()
            }
            false => self.draw()?,
        };
        let scale = self.control.scale;
        let collect_time = cpu_time().saturating_sub(cpu);
        let window = self.run_window(stop, end)?;
        let samples = self.first_touches(&window, from)?;
        let arm_time = cpu_time().saturating_sub(cpu) + window.kdamond;
        self.pages.rest(stop, end);
        let length = start.elapsed();
        let now = from + length;
        let tracked = samples.len() as u64;
        let population_pages = self.population_pages;
        let timestamp = |time| Timestamp {
            vm: time,
            wall: time,
        };
        sink(&Observation::FirstTouches {
            samples: FirstTouches {
                ended: &samples,
                waiting: &[],
                from: timestamp(from),
                now: timestamp(now),
                population_pages,
            },
            touched: &self.batch,
        });
        let intervals = window.snapshot.as_ref().map_or(0, |found| found.intervals);
        let last = window.snapshot.iter().flat_map(|found| &found.last_touches);
        let touched_last = last.filter(|last| **last == LastTouch::Ago(0)).count() as u64;
        let distinct_pages = self.batch.len() as u64;
        let period = Period {
            index: self.periods,
            scale,
            populated_pages: population_pages.saturating_sub(drawn.swapped * u64::from(scale)),
            tracked_pages: tracked,
            distinct_pages,
            scans: ScanCounts {
                scans: u64::from(intervals),
                interval: window.length / intervals.max(1),
                touches: distinct_pages,
                resolution_pages: u32::try_from(touched_last).unwrap_or(u32::MAX),
                swapped_pages: drawn.swapped,
                huge_pages: drawn.huge,
                cache_pages: drawn.cache,
                ..ScanCounts::default()
            },
            samples: SampleCounts {
                drawn: self.watched.len() as u64,
                begun: tracked,
                touched: distinct_pages,
                withdrawn: tracked - distinct_pages,
                vanished: self.watched.len() as u64 - tracked,
                ..SampleCounts::default()
            },
            rearmed_pages: u64::from(intervals) * tracked,
            arm_time,
            collect_time,
            overhead_ratio: overhead_ratio(arm_time, length, self.pages.vcpus()),
            budget_exhausted: is_paying,
            losses: PeriodLosses {
                stayed_accessible: drawn.untracked,
                ..PeriodLosses::default()
            },
            ..Period::empty(TraceMethod::Damon, length, window.length)
        };
        self.periods += 1;
        self.debt.settle(arm_time, self.budget(), PAID_MAX);
        if window.snapshot.is_none() && !self.watched.is_empty() {
            self.control.lengthen();
        }
        self.control.adapt(&WindowCost {
            pages: tracked,
            touched: distinct_pages,
            touched_last,
            check: window.kdamond / intervals.max(1),
            spent: arm_time,
            budget: self.budget(),
        });
        Ok(period)
    }

    fn touch_cost(&self) -> TouchCost {
        TouchCost {
            time: Duration::ZERO,
            toucher: Toucher::Thread,
        }
    }

    fn ram_pages(&self) -> u64 {
        self.pages.count()
    }

    fn follow(&mut self, target: &TraceTarget) -> Result<bool, TrapError> {
        Ok(self.pages.follow(target))
    }

    fn follow_group(&mut self, group: &GroupTarget) {
        self.pages.follow_group(group);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::usize_of;

    /// A target that touches `pages` at random, each once in `pass` seconds, on a machine on which setting up a page costs
    /// `setup` seconds, and checking it `check`.
    #[derive(Debug, Clone, Copy)]
    struct Target {
        pages: f64,
        pass: f64,
        setup: f64,
        check: f64,
        budget_ms: u64,
    }

    impl Target {
        fn window(&self, control: &Control) -> WindowCost {
            let watched = (self.pages / f64::from(control.scale)).floor();
            let interval = self.interval(control);
            let checks = f64::from(control.checks).min(5.0 / interval);
            let touched = |time: f64| u64::whole(watched * (1.0 - (-time / self.pass).exp()));
            WindowCost {
                pages: u64::whole(watched),
                touched: touched(interval * checks),
                touched_last: touched(interval),
                check: Duration::from_secs_f64(watched * self.check),
                spent: Duration::from_secs_f64(watched * (self.setup + self.check * checks)),
                budget: Some(Duration::from_millis(self.budget_ms)),
            }
        }

        /// From check to check, in seconds.
        fn interval(&self, control: &Control) -> f64 {
            let watched = (self.pages / f64::from(control.scale)).floor();
            control.interval.as_secs_f64() + watched * self.check
        }

        fn adapted(&self) -> Control {
            let mut control = Control::new(&TraceConfig::default());
            for _ in 0..30 {
                control.adapt(&self.window(&control));
            }
            control
        }
    }

    #[test]
    fn pages_and_checks_are_what_the_budget_pays_for() {
        for (pages, pass, budget_ms) in [
            (16_384.0, 0.02, 50),
            (40_000.0, 0.3, 50),
            (40_000.0, 0.3, 10),
            (2_000_000.0, 2.0, 50),
        ] {
            let target = Target {
                pages,
                pass,
                setup: 40e-6,
                check: 2e-6,
                budget_ms,
            };
            let control = target.adapted();
            let window = target.window(&control);
            let passes = target.interval(&control) / pass;
            assert!(
                (0.07..0.14).contains(&passes),
                "{passes} passes in an interval"
            );
            assert!(window.pages >= 40, "{window:?}");
            let share = window.spent.as_secs_f64() / (budget_ms as f64 / 1e3);
            assert!((0.6..1.0).contains(&share), "{share} of {budget_ms} ms");
        }
    }

    /// As in an emulated guest at a budget of 10 %, which would pay for 1,400 pages and checks of 20 ms.
    #[test]
    fn no_more_pages_are_watched_than_can_be_checked_in_time() {
        let target = Target {
            pages: 24_576.0,
            pass: 0.06,
            setup: 150e-6,
            check: 15e-6,
            budget_ms: 500,
        };
        let control = target.adapted();
        let passes = target.interval(&control) / target.pass;
        assert!((0.07..0.14).contains(&passes), "{passes}");
        let window = target.window(&control);
        assert!((150..260).contains(&window.pages), "{window:?}");
    }

    #[test]
    fn pages_of_a_second_memory_backend_below_the_first_are_watched_in_order() {
        let page = |page| Watched {
            page,
            frame: 1,
            head: 1,
        };
        let address =
            |watched: Watched| [Some(9 << 12), None, Some(4 << 12)][usize_of(watched.page)];
        let (addresses, watched) = by_address(&[page(0), page(1), page(2)], address);
        assert_eq!(addresses, [4 << 12, 9 << 12]);
        let pages: Vec<_> = watched.iter().map(|watched| watched.page).collect();
        assert_eq!(pages, [2, 0]);
    }

    #[test]
    fn counts_of_a_sample_are_thinned_with_it() {
        let mut drawn = Drawn {
            swapped: 819,
            huge: 8192,
            ..Drawn::default()
        };
        drawn.thin(171);
        assert_eq!((drawn.swapped, drawn.huge, drawn.cache), (4, 47, 0));
    }

    #[test]
    fn an_interval_too_short_for_a_check_grows_unless_it_is_given() {
        let mut control = Control::new(&TraceConfig::default());
        let before = control.interval;
        control.lengthen();
        assert!(control.interval > before && control.interval <= control.interval_max);
        let given = TraceConfig {
            scan_interval: Some(Duration::from_millis(7)),
            ..TraceConfig::default()
        };
        let mut fixed = Control::new(&given);
        fixed.lengthen();
        assert_eq!(fixed.interval, Duration::from_millis(7));
    }

    #[test]
    fn an_idle_target_is_checked_ever_more_rarely_and_an_interval_that_is_given_stays() {
        let idle = WindowCost {
            pages: 100,
            budget: Some(Duration::from_millis(50)),
            ..WindowCost::default()
        };
        let mut control = Control::new(&TraceConfig::default());
        let given = TraceConfig {
            scan_interval: Some(Duration::from_millis(7)),
            rate_rule: RateRule::Fixed,
            ..TraceConfig::default()
        };
        let mut fixed = Control::new(&given);
        for _ in 0..10 {
            control.adapt(&idle);
            fixed.adapt(&idle);
        }
        assert_eq!(control.interval, control.interval_max);
        assert_eq!(
            (fixed.interval, fixed.scale),
            (Duration::from_millis(7), 128)
        );
    }
}
