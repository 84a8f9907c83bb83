//! First touches of a VM in computed time. Everything above the calls to the kernel is that of a running VM.

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use plimsoll_flow::Period;

use super::pace::{Pace, Spent};
use super::sampler::{SampledVm, Sampler};
use super::{ServedPeriod, observe, period_of};
use crate::backend::{Backend, Sink};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::replay::Replay;
use crate::trial::TouchCost;

/// The backend `first-touch` on a VM in computed time with one vCPU.
#[derive(Debug)]
pub struct ComputedTouches<V> {
    pub(super) sampler: Sampler<V>,
    length: Duration,
    trap_cost: Duration,
    periods: u64,
}

/// A VM in computed time.
pub trait ComputedTime: SampledVm + fmt::Debug + Send {
    /// What was taken from it.
    fn costs(&mut self) -> &mut Costs;
}

/// What was taken from a VM in computed time.
#[derive(Debug, Default)]
pub struct Costs {
    /// Since [`take`](Self::take) was called last.
    pub(super) recent: Spent,
    /// In the period, up to then.
    period: Spent,
}

impl Costs {
    pub(super) fn take(&mut self) -> Spent {
        let spent = std::mem::take(&mut self.recent);
        self.period.own += spent.own;
        self.period.trapped += spent.trapped;
        spent
    }
}

impl<V: ComputedTime> ComputedTouches<V> {
    pub(super) fn new(vm: V, trap_cost: Duration, config: &TraceConfig) -> Self {
        let begin = (vm.now(), vm.vm_time());
        let pace = Pace::new(config.budget, None, trap_cost, config.seed, begin);
        Self {
            sampler: Sampler::new(vm, pace, config.seed),
            length: config.period,
            trap_cost,
            periods: 0,
        }
    }
}

impl<V: ComputedTime> Backend for ComputedTouches<V> {
    fn run_period(&mut self, _: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let start = self.sampler.vm.now();
        while self.sampler.vm.now() < start + self.length {
            self.sampler.turn(Duration::ZERO)?;
        }
        let report = self.sampler.report()?;
        let spent = std::mem::take(&mut self.sampler.vm.costs().period);
        let served = ServedPeriod {
            report,
            fault_time: spent.trapped,
            arm_time: spent.own,
            trap_cost: self.trap_cost,
        };
        observe(&served.report, sink);
        let length = self.sampler.vm.now() - start;
        let period = period_of(&served, self.periods, length, 1);
        self.periods += 1;
        Ok(period)
    }

    fn touch_cost(&self) -> TouchCost {
        Replay::touch_cost(self.trap_cost)
    }

    fn ram_pages(&self) -> u64 {
        self.sampler.vm.pages()
    }
}
