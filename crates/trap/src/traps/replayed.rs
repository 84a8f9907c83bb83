//! Traps of a replayed VM.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use plimsoll_flow::{
    AccessKind, PageNumber, Period, ReferenceBatch, TraceMethod, TrapCounts, Undisturbed,
};

use super::control::TrapControl;
use crate::backend::{Backend, Observation, Sink};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::hot_set::{HotSet, PageBits};
use crate::replay::{ARM, Replay};
use crate::sample::Sample;
use crate::trial::TouchCost;

/// The backend `trap` on a replayed VM.
#[derive(Debug)]
pub struct ReplayedTraps {
    replay: Replay,
    config: TraceConfig,
    control: TrapControl,
    hot: HotSet,
    /// Sampled pages that are inaccessible.
    armed: PageBits,
    trapped: PageBits,
    periods: u64,
}

impl ReplayedTraps {
    pub fn new(replay: Replay, config: &TraceConfig) -> Self {
        let pages = replay.vm.ram_pages;
        Self {
            replay,
            control: TrapControl::new(config),
            hot: HotSet::new(config.hot_set_pages as usize, pages),
            armed: PageBits::new(pages),
            trapped: PageBits::new(pages),
            periods: 0,
            config: config.clone(),
        }
    }
}

impl Backend for ReplayedTraps {
    fn run_period(&mut self, _: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let (start, config) = (self.replay.now, &self.config);
        let (scale, pages) = (self.control.scale(), self.replay.vm.ram_pages);
        let hot_set_pages = self.control.hot_set_pages(config);
        self.hot.restart(hot_set_pages);
        self.armed.clear();
        self.trapped.clear();
        let sample = Sample::of_period(scale, config.group_pages, config.seed, self.periods);
        let mut tracked_pages = 0;
        for page in sample.runs_in(0..pages).flatten() {
            self.armed.set(page, true);
            tracked_pages += 1;
        }
        let arm_time = ARM * u32::try_from(tracked_pages).unwrap_or(u32::MAX);
        let trap_cost = self.replay.vm.trap_cost;
        let budget = config.budget.map(|budget| config.period.mul_f64(budget));
        let (mut fault_time, mut taken, mut distinct_pages) = (Duration::ZERO, 0, 0);
        let mut batch = ReferenceBatch::new();
        let mut filled = (start, 0);
        let is_spent =
            |fault_time: Duration| budget.is_some_and(|budget| fault_time + arm_time >= budget);
        while !is_spent(fault_time) {
            let Some(page) = self.replay.next_before(start + config.period) else {
                break;
            };
            if !self.armed.get(page) {
                continue;
            }
            self.armed.set(page, false);
            batch.push(PageNumber(page), AccessKind::Unknown);
            taken += 1;
            distinct_pages += u64::from(self.trapped.set(page, true));
            if let Some(head) = self.hot.enter(page) {
                self.armed.set(head, true);
            } else {
                filled = (self.replay.now, taken);
            }
            fault_time += trap_cost;
            if batch.is_full() {
                sink(&Observation::References(&batch));
                batch.advance();
            }
        }
        sink(&Observation::References(&batch));
        let window = self.replay.now.saturating_sub(start);
        let filled = if self.hot.is_full() {
            filled
        } else {
            (start, taken)
        };
        let undisturbed = Undisturbed {
            references_before: filled.1,
            ..Undisturbed::whole(self.replay.now.saturating_sub(filled.0))
        };
        self.replay.skip_to(start + config.period);
        let length = self.replay.now.saturating_sub(start);
        let period = Period {
            index: self.periods,
            undisturbed,
            scale,
            populated_pages: pages,
            tracked_pages,
            distinct_pages,
            traps: TrapCounts {
                taken,
                hot_set_pages,
                ..TrapCounts::default()
            },
            rearmed_pages: tracked_pages,
            fault_time,
            arm_time,
            overhead_ratio: (fault_time + arm_time).as_secs_f64() / length.as_secs_f64(),
            budget_exhausted: is_spent(fault_time),
            ..Period::empty(TraceMethod::Traps, length, window)
        };
        self.periods += 1;
        let budget = budget.map(|budget| budget.as_secs_f64());
        self.control.adapt(&period, budget, trap_cost.as_secs_f64());
        Ok(period)
    }

    fn touch_cost(&self) -> TouchCost {
        Replay::touch_cost(self.replay.vm.trap_cost)
    }

    fn ram_pages(&self) -> u64 {
        self.replay.vm.ram_pages
    }
}
