//! Accessed-page scans of a replayed VM.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use plimsoll_flow::{AccessKind, PageNumber, Period, ReferenceBatch, ScanCounts, TraceMethod};

use super::SCANS_MIN;
use super::control::{ScanControl, WindowCost};
use crate::backend::{Backend, Observation, Scan, Sink};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::hot_set::PageBits;
use crate::process::WINDOW_PAGES;
use crate::replay::{ARM, FAULT, LOOK, Replay};
use crate::sample::Sample;
use crate::trial::TouchCost;

/// The backend `scan` on a replayed VM.
#[derive(Debug)]
pub struct ReplayedScans {
    replay: Replay,
    config: TraceConfig,
    control: ScanControl,
    /// Sampled pages that are unmapped.
    unmapped: PageBits,
    touched: PageBits,
    periods: u64,
}

impl ReplayedScans {
    pub fn new(replay: Replay, config: &TraceConfig) -> Self {
        let pages = replay.vm.ram_pages;
        Self {
            replay,
            control: ScanControl::new(
                config.rate_rule,
                config.scale,
                config.scan_interval,
                config.period,
                WINDOW_PAGES,
            ),
            unmapped: PageBits::new(pages),
            touched: PageBits::new(pages),
            periods: 0,
            config: config.clone(),
        }
    }
}

impl Backend for ReplayedScans {
    fn run_period(&mut self, _: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let (start, config) = (self.replay.now, &self.config);
        let (scale, pages) = (self.control.scale(), self.replay.vm.ram_pages);
        let end = start + config.period;
        let sample = Sample::of_period(scale, 1, config.seed, self.periods);
        let watched: Vec<u64> = sample.runs_in(0..pages).flatten().collect();
        self.unmapped.clear();
        self.touched.clear();
        for &page in &watched {
            self.unmapped.set(page, true);
        }
        let times = |one: Duration, many: u64| one * u32::try_from(many).unwrap_or(u32::MAX);
        let arm_time = times(ARM, watched.len() as u64);
        let budget = config.budget.map(|budget| config.period.mul_f64(budget));
        let (mut scans, mut touches, mut distinct_pages) = (0, 0, 0);
        let (mut batch, mut found) = (ReferenceBatch::new(), Vec::new());
        let mut from = start;
        // What scans and faults took, and what the pages that stay unmapped will.
        let spent = |scans: u64, touches: u64| {
            times(LOOK, scans * watched.len() as u64) + times(ARM + FAULT, touches)
        };
        let budget_ran_out = loop {
            let due = (from + self.control.interval()).min(end);
            while let Some(page) = self.replay.next_before(due) {
                if self.unmapped.get(page) {
                    self.unmapped.set(page, false);
                    found.push(page);
                }
            }
            let taken = arm_time + spent(scans, touches + found.len() as u64);
            let next = spent(scans, touches).checked_div(u32::try_from(scans).unwrap_or(u32::MAX));
            let is_spent = budget.is_some_and(|budget| taken + next.unwrap_or_default() >= budget);
            let budget_ran_out = scans + 1 >= SCANS_MIN && is_spent;
            let is_last = budget_ran_out || self.replay.now >= end;
            found.sort_unstable();
            batch.advance();
            for page in found.drain(..) {
                batch.push(PageNumber(page), AccessKind::Unknown);
                distinct_pages += u64::from(self.touched.set(page, true));
                self.unmapped.set(page, true);
            }
            scans += 1;
            touches += batch.len() as u64;
            let to = self.replay.now.max(from + Duration::from_micros(1));
            sink(&Observation::Scan(Scan {
                from: from - start,
                to: to - start,
                touched: &batch,
            }));
            from = to;
            if is_last {
                break budget_ran_out;
            }
        };
        let window = self.replay.now.saturating_sub(start);
        self.replay.skip_to(end);
        let length = self.replay.now.saturating_sub(start);
        let taken = arm_time + spent(scans, touches);
        let resolution = touches.div_ceil(scans);
        let period = Period {
            index: self.periods,
            scale,
            populated_pages: pages,
            tracked_pages: watched.len() as u64,
            distinct_pages,
            scans: ScanCounts {
                scans,
                interval: window.div_f64(scans as f64),
                touches,
                resolution_pages: u32::try_from(resolution).unwrap_or(u32::MAX),
                ..ScanCounts::default()
            },
            rearmed_pages: touches,
            fault_time: times(FAULT, touches),
            arm_time: taken - times(FAULT, touches),
            overhead_ratio: taken.as_secs_f64() / length.as_secs_f64(),
            budget_exhausted: budget_ran_out,
            ..Period::empty(TraceMethod::AccessedPageScans, length, window)
        };
        self.periods += 1;
        self.control.adapt(&WindowCost {
            scans,
            touches,
            distinct_pages,
            arm_seconds: arm_time.as_secs_f64(),
            scan_seconds: (taken - arm_time).as_secs_f64(),
            budget_seconds: budget.map(|budget| budget.as_secs_f64()),
        });
        Ok(period)
    }

    fn touch_cost(&self) -> TouchCost {
        Replay::touch_cost(FAULT)
    }

    fn ram_pages(&self) -> u64 {
        self.replay.vm.ram_pages
    }
}
