//! The period of backends that mark sampled pages, and then check several times which of them were touched.
//!
//! ```text
//!   period:  draw ─> mark ─> check ─> check ──> check ────> check ──────> check at the end ─> adapt rate
//!                             5 ms    6.3 ms    7.8 ms      9.8 ms   ...   the period
//! ```
//!
//! A page that was found touched is not checked again. The result for each page is the pair of checks between which it was first
//! touched after it was marked; the estimator of first touches computes a curve from these. The time from check to check grows by
//! [`GROWTH`]: the time of a touch is thus known to within a fifth of itself, and a page in use all the time costs one check. Each
//! period shifts its checks by a part of a step, so that those of several periods together are denser.
//!
//! **Rate.** The number of pages is what the budget pays for, by what each cost in the period before, and no more than are checked
//! in the time to the first check: where a check takes longer, the time of a touch would not be known better. Drawing a
//! sample is a part of that; where it takes more than [`DRAWING`] of the budget, a sample is kept for several periods. A period
//! whose budget is spent ends its checks early.
//!
//! **Time** is the CPU time of the target, as for all first touches: what waits for a CPU, or has nothing to do, touches nothing. That holds
//! all the more while its pages are checked on the only CPU. The times of checks are wall time, and none begins before as much time
//! has passed as the last one took. A control group without such a clock has wall time.
//!
//! Not here: how pages are marked; curves and working sets.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::{
    AccessKind, FirstTouch, FirstTouches, PageNumber, Period, PeriodLosses, ReferenceBatch,
    SampleCounts, ScanCounts, Timestamp, TraceMethod, Whole as _,
};

use crate::backend::{Backend, Observation, Sink};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::process::{cpu_time, overhead_ratio};
use crate::rate::{RateRule, SCALE_MAX};
use crate::sample::Sample;
use crate::target::{GroupTarget, TraceTarget};
use crate::target_pages::Drawn;
use crate::trial::TouchCost;

/// Time after marking by which the next check is later than the one before.
const GROWTH: f64 = 1.25;
/// How many times as long as marking took it is at least from there to the first check.
const FIRST_CHECK_SHARE: u32 = 2;
/// Share by which the checks of a period begin later than those of the one before: the golden ratio spreads them evenly.
const SHIFT: f64 = 0.618_033_988_749_894_9;
/// Minimum number of checks in a period, whatever they cost.
const CHECKS_MIN: u64 = 3;
/// Share of the budget that a period aims at, and that drawing samples may take.
const BUDGET_SHARE: f64 = 0.8;
const DRAWING: f64 = 0.25;
/// Pages of a sample, at least, at most, and where it is not known what they cost: fewer are too uncertain, and more hardly reduce
/// the error.
const PAGES_MIN: f64 = 48.0;
const PAGES_MAX: f64 = 4096.0;
const PAGES_FIRST: u64 = 256;
/// Periods for which a sample may be kept at most, for what it takes to draw.
const KEPT_MAX: f64 = 60.0;
/// Growth of the target's memory from which the cost of its sample is not known.
const GROWN: u64 = 2;
/// Largest factor by which the scale changes from one period to the next.
const STEP_MAX: f64 = 4.0;

/// Marks on the pages of a target, which a touch removes.
pub trait Marks: fmt::Debug + Send + 'static {
    /// The method of the backend.
    const METHOD: TraceMethod;
    /// Shortest time from marking to the first check.
    const FIRST_CHECK_MIN: Duration;

    /// Prepares for another period. Fails if the target has ended.
    fn renew(&mut self) -> Result<(), TrapError>;

    /// Fails if the target has ended.
    fn check_alive(&self) -> Result<(), TrapError>;

    /// Draws a sample of the pages in place of the one before.
    fn draw(&mut self, sample: Sample) -> Result<Drawn, TrapError>;

    /// Number of pages in the sample.
    fn watched(&self) -> u64;

    /// Marks the sample; all its pages are waited for.
    fn arm(&mut self) -> Result<(), TrapError>;

    /// Number of pages that are waited for.
    fn waiting(&self) -> u64;

    /// Appends the pages touched since they were marked. They are waited for no more, nor are pages that left the target.
    fn check(&mut self, touched: &mut Vec<u64>) -> Result<(), TrapError>;

    /// Waits until `due` or `stop`, or the end of the target.
    fn rest(&self, stop: &AtomicBool, due: Instant);

    /// CPU time of the target since any start; `None` where that is not known.
    fn cpu_time(&self) -> Option<Duration>;

    /// vCPUs of a VM of whose time the budget is a share; 1 for others.
    fn vcpus(&self) -> usize;

    /// Number of pages, with those that have no contents.
    fn ram_pages(&self) -> u64;

    /// Pages that can have contents, by which the first sample is sized; `None` where they are not known.
    fn size_pages(&self) -> Option<u64> {
        Some(self.ram_pages())
    }

    /// Takes the memory that a process has by now; returns whether it can.
    fn follow(&mut self, _target: &TraceTarget) -> bool {
        false
    }

    /// Takes the groups that a control group has by now.
    fn follow_group(&mut self, _group: &GroupTarget) {}

    /// Removes what marks leave in the target.
    fn detach(self) -> Result<(), TrapError>
    where
        Self: Sized,
    {
        Ok(())
    }
}

/// A target whose sampled pages are marked and checked.
#[derive(Debug)]
pub struct MarkChecker<M> {
    marks: M,
    config: TraceConfig,
    touch_cost: TouchCost,
    drawn: Drawn,
    /// One page in so many is in the sample, and will be in the next.
    scale: u32,
    next_scale: u32,
    /// [`Marks::size_pages`] when the sample was drawn.
    size_pages: u64,
    /// Time for drawing the sample, the periods for which it is still kept, and the share of each in that time.
    draw_time: Duration,
    kept_for: u32,
    drawing: Duration,
    batch: ReferenceBatch,
    /// Time zero of the periods.
    start: Instant,
    /// The target's CPU time when it was read last; `None` if it has wall time.
    ran: Option<Duration>,
    periods: u64,
}

/// What a period found and took.
#[derive(Debug, Default)]
struct Window {
    /// When the sample was marked, and checked last: the target's time.
    armed: Duration,
    checked: Duration,
    samples: Vec<FirstTouch>,
    touched: Vec<u64>,
    checks: u64,
    /// Pages found by the first check, and the time that it took.
    found_first: u64,
    first_check: Duration,
    /// From marking to the last check, in wall time.
    length: Duration,
    check_time: Duration,
    fault_time: Duration,
    budget_ran_out: bool,
}

impl<M: Marks> MarkChecker<M> {
    pub fn new(marks: M, touch_cost: TouchCost, config: &TraceConfig) -> Self {
        Self {
            ran: marks.cpu_time(),
            marks,
            touch_cost,
            drawn: Drawn::default(),
            scale: 1,
            next_scale: config.scale,
            size_pages: 0,
            draw_time: Duration::ZERO,
            kept_for: 0,
            drawing: Duration::ZERO,
            batch: ReferenceBatch::new(),
            start: Instant::now(),
            periods: 0,
            config: config.clone(),
        }
    }

    /// Time that a period may take; `None` for no bound.
    fn budget(&self) -> Option<Duration> {
        self.config.period_budget(self.marks.vcpus())
    }

    /// The target's time, which stands still once it is gone.
    fn time(&mut self) -> Duration {
        match &mut self.ran {
            Some(ran) => {
                *ran = self.marks.cpu_time().map_or(*ran, |now| now.max(*ran));
                *ran
            }
            None => self.start.elapsed(),
        }
    }

    /// Draws a sample, unless the last one must be kept for what it cost.
    fn draw(&mut self) -> Result<(), TrapError> {
        self.marks.renew()?;
        let size_pages = self.marks.size_pages().unwrap_or_default();
        if self.config.rate_rule == RateRule::Budget && size_pages > self.size_pages * GROWN {
            let scale = u32::try_from(size_pages.div_ceil(PAGES_FIRST)).unwrap_or(SCALE_MAX);
            self.next_scale = self.next_scale.max(scale).min(SCALE_MAX);
            self.kept_for = 0;
        }
        if self.kept_for > 0 {
            self.kept_for -= 1;
            return Ok(());
        }
        let start = cpu_time();
        (self.scale, self.size_pages) = (self.next_scale, size_pages);
        let sample = Sample::of_period(self.scale, 1, self.config.seed, self.periods);
        self.drawn = self.marks.draw(sample)?;
        self.draw_time = cpu_time().saturating_sub(start);
        self.kept_for = self
            .budget()
            .map_or(0, |budget| periods_to_keep(self.draw_time, budget));
        self.drawing = self.draw_time / (self.kept_for + 1);
        Ok(())
    }

    /// From marking, which took so long, to the first check.
    fn first_check(&self, marking: Duration) -> Duration {
        let given = self.config.scan_interval;
        let least = given.unwrap_or_else(|| M::FIRST_CHECK_MIN.max(marking * FIRST_CHECK_SHARE));
        least.mul_f64(GROWTH.powf((self.periods as f64 * SHIFT).fract()))
    }

    /// Marks the sample, and checks it until `end` or `stop`, or until `before` and what it takes use up the budget.
    fn run_window(
        &mut self,
        stop: &AtomicBool,
        end: Instant,
        before: Duration,
    ) -> Result<Window, TrapError> {
        let budget = self.budget();
        let (start, cpu, time) = (Instant::now(), cpu_time(), self.time());
        self.marks.arm()?;
        let marking = start.elapsed();
        // Pages are checked in the order in which they were marked: the middle of each stands for all.
        let begun = start + marking / 2;
        let armed = (time + self.time()) / 2;
        let mut window = Window {
            armed,
            checked: armed,
            ..Window::default()
        };
        let mut next = self.first_check(marking);
        loop {
            self.marks.rest(stop, (begun + next).min(end));
            if let Err(gone) = self.marks.check_alive() {
                // The observations stay valid; the next period reports it.
                return match window.checks {
                    0 => Err(gone),
                    _ => Ok(window),
                };
            }
            let (from, cpu_before, time) = (begun.elapsed(), cpu_time(), self.time());
            let known = window.touched.len();
            self.marks.check(&mut window.touched)?;
            let to = begun.elapsed();
            let checked = (time + self.time()) / 2;
            let found = window.touched.len() - known;
            let sample = FirstTouch {
                armed,
                untouched_until: window.checked,
                touched_by: Some(checked),
                pages: 1,
            };
            window.samples.extend(std::iter::repeat_n(sample, found));
            (window.checked, window.length) = (checked, to);
            window.checks += 1;
            if window.checks == 1 {
                window.found_first = found as u64;
                window.first_check = to - from;
            }
            let now = cpu_time();
            window.check_time = now.saturating_sub(cpu);
            let touches = u32::try_from(window.touched.len()).unwrap_or(u32::MAX);
            window.fault_time = self.touch_cost.time * touches;
            let taken = before + window.check_time + window.fault_time;
            let another = now.saturating_sub(cpu_before);
            window.budget_ran_out = window.checks >= CHECKS_MIN
                && budget.is_some_and(|budget| taken + another > budget);
            if window.budget_ran_out
                || stop.load(Ordering::Relaxed)
                || Instant::now() >= end
                || self.marks.waiting() == 0
            {
                return Ok(window);
            }
            next = next.mul_f64(GROWTH).max(to + (to - from));
        }
    }

    /// Sets the scale for what a period took, with its share of drawing, and for the time of its first check.
    fn adapt(&mut self, spent: Duration, first_check: Duration) {
        let tracked = self.marks.watched() as f64;
        if self.config.rate_rule != RateRule::Budget {
            return;
        }
        let budget = self.budget().map(|budget| budget.as_secs_f64());
        let affordable = budget.map_or(PAGES_MAX, |budget| {
            let each = spent.as_secs_f64() / tracked.max(1.0);
            budget * BUDGET_SHARE / each.max(f64::MIN_POSITIVE)
        });
        let first = self.config.scan_interval.unwrap_or(M::FIRST_CHECK_MIN);
        let checkable = first.as_secs_f64() * tracked.max(1.0)
            / first_check.as_secs_f64().max(f64::MIN_POSITIVE);
        let wanted = affordable.min(checkable).clamp(PAGES_MIN, PAGES_MAX);
        let factor = tracked / wanted;
        // A finer sample takes longer to draw: of a small control group on a large host, nearly all of its cost.
        let finest = budget.map_or(0.0, |budget| {
            self.draw_time.as_secs_f64() / (budget * DRAWING * KEPT_MAX)
        });
        let factor_limited = factor.clamp(1.0 / STEP_MAX, STEP_MAX).max(finest);
        let scale = f64::from(self.scale) * factor_limited;
        self.next_scale = u32::whole(scale.ceil().clamp(1.0, f64::from(SCALE_MAX)));
        if factor >= STEP_MAX {
            // Far too large to be kept.
            self.kept_for = 0;
        }
    }
}

/// For how many periods a sample is kept that took so long to draw.
fn periods_to_keep(took: Duration, budget: Duration) -> u32 {
    let share = took.as_secs_f64() / (budget.as_secs_f64() * DRAWING).max(f64::MIN_POSITIVE);
    u32::whole(share.clamp(0.0, 1000.0))
}

impl<M: Marks> Backend for MarkChecker<M> {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let (start, cpu, from) = (Instant::now(), cpu_time(), self.time());
        let end = start + self.config.period;
        self.draw()?;
        let collect_time = cpu_time().saturating_sub(cpu);
        let mut window = self.run_window(stop, end, self.drawing)?;
        let untouched = FirstTouch {
            armed: window.armed,
            untouched_until: window.checked,
            touched_by: None,
            pages: 1,
        };
        let withdrawn = self.marks.waiting();
        let waiting = usize::try_from(withdrawn).unwrap_or(usize::MAX);
        window
            .samples
            .extend(std::iter::repeat_n(untouched, waiting));
        self.marks.rest(stop, end);

        let (length, scale, drawn) = (start.elapsed(), self.scale, self.drawn);
        let tracked = self.marks.watched();
        let population_pages = tracked * u64::from(scale);
        self.batch.advance();
        window.touched.sort_unstable();
        for &page in &window.touched {
            self.batch.push(PageNumber(page), AccessKind::Unknown);
        }
        let wall = start.saturating_duration_since(self.start);
        let (from, now) = match self.ran {
            Some(_) => (from, self.time()),
            None => (wall, wall + length),
        };
        sink(&Observation::FirstTouches {
            samples: FirstTouches {
                ended: &window.samples,
                waiting: &[],
                from: Timestamp { vm: from, wall },
                now: Timestamp {
                    vm: now,
                    wall: wall + length,
                },
                population_pages,
            },
            touched: &self.batch,
        });
        let distinct_pages = window.touched.len() as u64;
        let taken = collect_time + window.check_time + window.fault_time;
        let period = Period {
            index: self.periods,
            scale,
            populated_pages: (tracked - drawn.swapped) * u64::from(scale),
            tracked_pages: tracked,
            distinct_pages,
            scans: ScanCounts {
                scans: window.checks,
                interval: window.length.div_f64(window.checks.max(1) as f64),
                touches: distinct_pages,
                resolution_pages: u32::try_from(window.found_first).unwrap_or(u32::MAX),
                swapped_pages: drawn.swapped,
                huge_pages: drawn.huge,
                cache_pages: drawn.cache,
                ..ScanCounts::default()
            },
            samples: SampleCounts {
                drawn: tracked,
                begun: tracked,
                touched: distinct_pages,
                withdrawn,
                vanished: tracked - distinct_pages - withdrawn,
                ..SampleCounts::default()
            },
            rearmed_pages: tracked,
            fault_time: window.fault_time,
            arm_time: collect_time + window.check_time,
            collect_time,
            overhead_ratio: overhead_ratio(taken, length, self.marks.vcpus()),
            budget_exhausted: window.budget_ran_out,
            losses: PeriodLosses {
                stayed_accessible: drawn.untracked,
                ..PeriodLosses::default()
            },
            ..Period::empty(M::METHOD, length, window.length)
        };
        self.periods += 1;
        self.adapt(
            self.drawing + window.check_time + window.fault_time,
            window.first_check,
        );
        Ok(period)
    }

    fn detach(self: Box<Self>) -> Result<(), TrapError> {
        self.marks.detach()
    }

    fn touch_cost(&self) -> TouchCost {
        self.touch_cost
    }

    fn ram_pages(&self) -> u64 {
        self.marks.ram_pages()
    }

    fn follow(&mut self, target: &TraceTarget) -> Result<bool, TrapError> {
        Ok(self.marks.follow(target))
    }

    fn follow_group(&mut self, group: &GroupTarget) {
        self.marks.follow_group(group);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Marks of a target of which so many pages have contents; one page of `host` in the scale is read to draw a sample.
    #[derive(Debug)]
    struct Model {
        pages: u64,
        host: u64,
        is_group: bool,
        watched: u64,
    }

    impl Marks for Model {
        const METHOD: TraceMethod = TraceMethod::IdlePages;
        const FIRST_CHECK_MIN: Duration = Duration::from_millis(1);

        fn renew(&mut self) -> Result<(), TrapError> {
            Ok(())
        }

        fn check_alive(&self) -> Result<(), TrapError> {
            Ok(())
        }

        fn draw(&mut self, sample: Sample) -> Result<Drawn, TrapError> {
            self.watched = sample.runs_in(0..self.pages).flatten().count() as u64;
            Ok(Drawn::default())
        }

        fn watched(&self) -> u64 {
            self.watched
        }

        fn arm(&mut self) -> Result<(), TrapError> {
            Ok(())
        }

        fn waiting(&self) -> u64 {
            0
        }

        fn check(&mut self, _: &mut Vec<u64>) -> Result<(), TrapError> {
            Ok(())
        }

        fn rest(&self, _: &AtomicBool, _: Instant) {}

        fn cpu_time(&self) -> Option<Duration> {
            None
        }

        fn vcpus(&self) -> usize {
            1
        }

        fn ram_pages(&self) -> u64 {
            self.host
        }

        fn size_pages(&self) -> Option<u64> {
            (!self.is_group).then_some(self.host)
        }

        fn detach(self) -> Result<(), TrapError> {
            Ok(())
        }
    }

    /// Tracked pages, and the time for drawing them, after `periods` in which a page drawn from costs 1 µs and one tracked 50 µs.
    fn settled(pages: u64, host: u64, is_group: bool, periods: u32) -> (u64, f64) {
        let model = Model {
            pages,
            host,
            is_group,
            watched: 0,
        };
        let cost = TouchCost {
            time: Duration::ZERO,
            toucher: crate::trial::Toucher::Thread,
        };
        let mut checker = MarkChecker::new(model, cost, &TraceConfig::default());
        let drawn_from = if is_group { host } else { pages };
        let draw_time = |scale: u32| Duration::from_micros(drawn_from / u64::from(scale));
        for _ in 0..periods {
            checker.kept_for = 0;
            checker.draw().unwrap();
            checker.draw_time = draw_time(checker.scale);
            let budget = checker.budget().unwrap();
            let drawing = checker.draw_time / (periods_to_keep(checker.draw_time, budget) + 1);
            let tracked = checker.marks.watched();
            let spent = drawing + Duration::from_micros(50 * tracked);
            checker.adapt(spent, Duration::from_nanos(tracked * 500));
            checker.periods += 1;
        }
        checker.kept_for = 0;
        checker.draw().unwrap();
        (
            checker.marks.watched(),
            draw_time(checker.scale).as_secs_f64(),
        )
    }

    #[test]
    fn the_sample_is_what_the_budget_pays_for_however_sparse_the_target() {
        // A VM of 64 GiB, a process with contents in 40 MiB of 4 TiB, and a small control group on a host of 256 GiB.
        for (pages, host, is_group, least) in [
            (1 << 24, 1 << 24, false, 500),
            (10_000, 1 << 30, false, 500),
            (8192, 1 << 26, true, 48),
            (10, 1 << 26, true, 0),
        ] {
            let (tracked, draw_s) = settled(pages, host, is_group, 15);
            assert!((least..1000).contains(&tracked), "{tracked} of {pages}");
            // At most a minute's worth of a quarter of the budget.
            assert!(draw_s < 1.0, "{draw_s} s to draw {tracked} of {pages}");
        }
    }

    #[test]
    fn a_sample_is_kept_until_its_cost_is_a_quarter_of_the_budget() {
        let ms = Duration::from_millis;
        for (took, kept) in [(0, 0), (12, 0), (13, 1), (26, 2), (1_000_000, 1000)] {
            assert_eq!(periods_to_keep(ms(took), ms(50)), kept, "{took} ms");
        }
    }
}
