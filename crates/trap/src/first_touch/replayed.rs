//! First touches of a replayed VM.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use plimsoll_flow::{AccessKind, PageNumber, Period};

use super::pace::{Pace, Spent};
use super::sampler::{SampledVm, Sampler, Trap};
use super::{ServedPeriod, observe, period_of};
use crate::backend::{Backend, Sink};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::hot_set::PageBits;
use crate::replay::{ARM, LOOK, Replay};
use crate::trial::TouchCost;

/// The backend `first-touch` on a replayed VM.
#[derive(Debug)]
pub struct ReplayedTouches {
    sampler: Sampler<ReplayedPages>,
    length: Duration,
    periods: u64,
}

#[derive(Debug)]
struct ReplayedPages {
    replay: Replay,
    armed: PageBits,
    spent: Spent,
    /// All that was spent in the period.
    fault_time: Duration,
    arm_time: Duration,
}

impl ReplayedTouches {
    pub fn new(replay: Replay, config: &TraceConfig) -> Self {
        let begin = (replay.now, replay.now);
        let trap_cost = replay.vm.trap_cost;
        let pages = ReplayedPages {
            armed: PageBits::new(replay.vm.ram_pages),
            replay,
            spent: Spent::default(),
            fault_time: Duration::ZERO,
            arm_time: Duration::ZERO,
        };
        let pace = Pace::new(config.budget, None, trap_cost, config.seed, begin);
        Self {
            sampler: Sampler::new(pages, pace, config.seed),
            length: config.period,
            periods: 0,
        }
    }
}

impl Backend for ReplayedTouches {
    fn run_period(&mut self, _: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let start = self.sampler.vm.replay.now;
        while self.sampler.vm.replay.now < start + self.length {
            self.sampler.turn(Duration::ZERO)?;
        }
        let report = self.sampler.report()?;
        let vm = &mut self.sampler.vm;
        let served = ServedPeriod {
            report,
            fault_time: std::mem::take(&mut vm.fault_time),
            arm_time: std::mem::take(&mut vm.arm_time),
            trap_cost: vm.replay.vm.trap_cost,
        };
        observe(&served.report, sink);
        let period = period_of(&served, self.periods, vm.replay.now - start, 1);
        self.periods += 1;
        Ok(period)
    }

    fn touch_cost(&self) -> TouchCost {
        Replay::touch_cost(self.sampler.vm.replay.vm.trap_cost)
    }

    fn ram_pages(&self) -> u64 {
        self.sampler.vm.pages()
    }
}

impl SampledVm for ReplayedPages {
    fn now(&self) -> Duration {
        self.replay.now
    }

    fn vm_time(&self) -> Duration {
        self.replay.now
    }

    fn pages(&self) -> u64 {
        self.replay.vm.ram_pages
    }

    fn populated_pages(&mut self) -> Result<u64, TrapError> {
        Ok(self.pages())
    }

    fn is_populated(&mut self, _: u64) -> Result<bool, TrapError> {
        Ok(true)
    }

    fn arm(&mut self, pages: &[u64]) -> Result<Vec<u64>, TrapError> {
        for &page in pages {
            self.armed.set(page, true);
            self.spent.own += ARM;
        }
        Ok(Vec::new())
    }

    fn window_of(&self, page: u64) -> u64 {
        page
    }

    fn accessible(&mut self, _: &[u64]) -> Result<Vec<u64>, TrapError> {
        Ok(Vec::new())
    }

    fn disarm(&mut self, page: u64) -> Result<(), TrapError> {
        self.spent.own += LOOK;
        self.armed.set(page, false);
        Ok(())
    }

    fn serve(&mut self, until: Duration, traps: &mut Vec<Trap>) -> Result<(), TrapError> {
        while let Some(page) = self.replay.next_before(until) {
            if self.armed.get(page) {
                self.armed.set(page, false);
                traps.push(Trap {
                    page: Some(PageNumber(page)),
                    kind: AccessKind::Unknown,
                    after: self.replay.now,
                    by: self.replay.now,
                });
                self.spent.trapped += self.replay.vm.trap_cost;
                break;
            }
        }
        Ok(())
    }

    fn take_spent(&mut self) -> Spent {
        let spent = std::mem::take(&mut self.spent);
        self.arm_time += spent.own;
        self.fault_time += spent.trapped;
        spent
    }
}
