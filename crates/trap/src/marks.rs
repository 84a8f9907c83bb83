//! Marks on sampled pages: the period of the backends that mark pages, and scan which of them were touched since.
//!
//! ```text
//!   period:  draw ─> mark ─> window: scan, scan, ... scan ─> rest ─> adapt rate and interval
//!                                      │
//!                     pages touched since the scan before:
//!                     passed on, and marked again
//! ```
//!
//! As with accessed-page scans it is known of each page between which scans it was touched.
//!
//! **Interval.** Wall time, set by the rule of accessed-page scans for costly scans (`scans::control`), as is the rate. Drawing a
//! sample is a part of the cost; where it takes more than [`DRAWING`] of the budget, a sample is kept for several periods.
//!
//! Not here: how pages are marked; curves and working sets.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::{
    Period, PeriodLosses, ReferenceBatch, SampleCounts, ScanCounts, TraceMethod, TrapCounts,
    Undisturbed,
};

use crate::backend::{Backend, Observation, Scan, Sink};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::process::{cpu_time, overhead_ratio};
use crate::sample::Sample;
use crate::scans::control::{ScanControl, WindowCost};
use crate::target::{GroupTarget, TraceTarget};
use crate::target_pages::Drawn;
use crate::trial::TouchCost;

/// Minimum number of scans in a window, whatever they cost: one alone sees no reuse.
const SCANS_MIN: u64 = 3;
/// Share of the budget that drawing samples may take.
const DRAWING: f64 = 0.25;

/// Marks on the pages of a target, which a touch removes.
pub trait Marks: fmt::Debug + Send + 'static {
    /// The method of the backend.
    const METHOD: TraceMethod;

    /// Prepares for another period. Fails if the target has ended.
    fn renew(&mut self) -> Result<(), TrapError>;

    /// Fails if the target has ended.
    fn check_alive(&self) -> Result<(), TrapError>;

    /// Draws a sample of the pages in place of the one before.
    fn draw(&mut self, sample: Sample) -> Result<Drawn, TrapError>;

    /// Number of pages in the sample.
    fn watched(&self) -> u64;

    /// Marks the sample.
    fn arm(&mut self) -> Result<(), TrapError>;

    /// Appends the pages touched since they were marked, ascending, and marks them again.
    fn scan(&mut self, touched: &mut ReferenceBatch) -> Result<(), TrapError>;

    /// Waits until `due` or `stop`, or the end of the target.
    fn rest(&self, stop: &AtomicBool, due: Instant);

    /// vCPUs of a VM of whose time the budget is a share; 1 for others.
    fn vcpus(&self) -> usize;

    /// Number of pages, with those that have no contents.
    fn ram_pages(&self) -> u64;

    /// Takes the memory that a process has by now; returns whether it can.
    fn follow(&mut self, _target: &TraceTarget) -> bool {
        false
    }

    /// Takes the groups that a control group has by now.
    fn follow_group(&mut self, _group: &GroupTarget) {}

    /// Removes what marks leave in the target.
    fn detach(self) -> Result<(), TrapError>;
}

/// A target whose sampled pages are marked and scanned.
#[derive(Debug)]
pub struct MarkScanner<M> {
    marks: M,
    config: TraceConfig,
    control: ScanControl,
    touch_cost: TouchCost,
    drawn: Drawn,
    /// One page in so many is in the sample.
    scale: u32,
    /// Periods for which the sample is kept.
    kept_for: u32,
    batch: ReferenceBatch,
    touched: HashSet<u64>,
    periods: u64,
}

impl<M: Marks> MarkScanner<M> {
    pub fn new(marks: M, touch_cost: TouchCost, config: &TraceConfig) -> Self {
        let control = ScanControl::new(
            config.rate_rule,
            config.scale,
            config.scan_interval,
            config.period,
            1,
        );
        Self {
            marks,
            control: control.for_costly_scans(config.period),
            touch_cost,
            drawn: Drawn::default(),
            scale: 1,
            kept_for: 0,
            batch: ReferenceBatch::new(),
            touched: HashSet::new(),
            periods: 0,
            config: config.clone(),
        }
    }

    /// Time that a period may take; `None` for no bound.
    fn budget(&self) -> Option<Duration> {
        self.config.period_budget(self.marks.vcpus())
    }

    /// Draws a sample, unless the last one must be kept for what it cost.
    fn draw(&mut self) -> Result<(), TrapError> {
        self.marks.renew()?;
        if self.kept_for > 0 {
            self.kept_for -= 1;
            return Ok(());
        }
        let start = cpu_time();
        self.scale = self.control.scale();
        let sample = Sample::of_period(self.scale, 1, self.config.seed, self.periods);
        self.drawn = self.marks.draw(sample)?;
        let took = cpu_time().saturating_sub(start);
        self.kept_for = self
            .budget()
            .map_or(0, |budget| periods_to_keep(took, budget));
        Ok(())
    }

    fn run_window(
        &mut self,
        stop: &AtomicBool,
        end: Instant,
        before: Duration,
        sink: Sink<'_>,
    ) -> Result<Window, TrapError> {
        let (budget, interval) = (self.budget(), self.control.interval());
        let mut window = Window::default();
        let (start, cpu) = (Instant::now(), cpu_time());
        loop {
            self.marks
                .rest(stop, (start + window.length + interval).min(end));
            if let Err(gone) = self.marks.check_alive() {
                // The observations stay valid; the next period reports it.
                return if window.touches > 0 {
                    Ok(window)
                } else {
                    Err(gone)
                };
            }
            self.batch.advance();
            self.marks.scan(&mut self.batch)?;
            let to = start.elapsed();
            sink(&Observation::Scan(Scan {
                from: window.length,
                to,
                touched: &self.batch,
            }));
            window.length = to;
            window.scans += 1;
            window.touches += self.batch.len() as u64;
            self.touched
                .extend(self.batch.pages().iter().map(|page| page.0));
            window.scan_time = cpu_time().saturating_sub(cpu);
            window.fault_time =
                self.touch_cost.time * u32::try_from(window.touches).unwrap_or(u32::MAX);
            let taken = before + window.scan_time + window.fault_time;
            let next = window.scan_time.div_f64(window.scans as f64);
            window.budget_ran_out =
                window.scans >= SCANS_MIN && budget.is_some_and(|budget| taken + next >= budget);
            if window.budget_ran_out || stop.load(Ordering::Relaxed) || Instant::now() >= end {
                return Ok(window);
            }
        }
    }
}

/// For how many periods a sample is kept that took so long to draw.
fn periods_to_keep(took: Duration, budget: Duration) -> u32 {
    let share = took.as_secs_f64() / (budget.as_secs_f64() * DRAWING).max(f64::MIN_POSITIVE);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped before the cast"
    )]
    let periods = share.clamp(0.0, 1000.0) as u32;
    periods
}

/// What a window found and took.
#[derive(Debug, Default)]
struct Window {
    scans: u64,
    touches: u64,
    length: Duration,
    scan_time: Duration,
    fault_time: Duration,
    budget_ran_out: bool,
}

impl<M: Marks> Backend for MarkScanner<M> {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let (start, cpu) = (Instant::now(), cpu_time());
        let end = start + self.config.period;
        self.touched.clear();
        self.draw()?;
        let collect_time = cpu_time().saturating_sub(cpu);
        self.marks.arm()?;
        let arm_time = cpu_time().saturating_sub(cpu);
        let window = self.run_window(stop, end, arm_time, sink)?;
        self.marks.rest(stop, end);

        let (length, scale) = (start.elapsed(), self.scale);
        let taken = window.fault_time + arm_time + window.scan_time;
        let (scans, tracked) = (window.scans.max(1), self.marks.watched());
        let drawn = self.drawn;
        let distinct_pages = self.touched.len() as u64;
        let period = Period {
            index: self.periods,
            method: M::METHOD,
            length,
            window: window.length,
            undisturbed: Undisturbed::whole(window.length),
            scale,
            populated_pages: (tracked - drawn.swapped) * u64::from(scale),
            tracked_pages: tracked,
            distinct_pages,
            traps: TrapCounts::default(),
            scans: ScanCounts {
                scans: window.scans,
                interval: window.length.div_f64(scans as f64),
                touches: window.touches,
                writes: 0,
                resolution_pages: u32::try_from(window.touches.div_ceil(scans)).unwrap_or(u32::MAX),
                swapped_pages: drawn.swapped,
                huge_pages: drawn.huge,
                cache_pages: drawn.cache,
            },
            samples: SampleCounts::default(),
            rearmed_pages: window.touches + tracked,
            fault_time: window.fault_time,
            arm_time: arm_time + window.scan_time,
            collect_time,
            overhead_ratio: overhead_ratio(taken, length, self.marks.vcpus()),
            budget_exhausted: window.budget_ran_out,
            losses: PeriodLosses {
                stayed_accessible: drawn.untracked,
                ..PeriodLosses::default()
            },
        };
        self.periods += 1;
        self.control.adapt(&WindowCost {
            scans: window.scans,
            touches: window.touches,
            watched_pages: tracked - drawn.swapped,
            distinct_pages,
            arm_seconds: arm_time.as_secs_f64(),
            scan_seconds: (window.scan_time + window.fault_time).as_secs_f64(),
            budget_seconds: self.budget().map(|budget| budget.as_secs_f64()),
        });
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

    #[test]
    fn a_sample_is_kept_until_its_cost_is_a_quarter_of_the_budget() {
        let ms = Duration::from_millis;
        for (took, kept) in [(0, 0), (12, 0), (13, 1), (26, 2), (1_000_000, 1000)] {
            assert_eq!(periods_to_keep(ms(took), ms(50)), kept, "{took} ms");
        }
    }
}
