//! The handler of full events on a CPU of the host.

use super::{CostModel, HostOutcome, Time};

/// A buffer that was found full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full {
    pub(super) vm: usize,
    pub(super) vcpu: usize,
}

/// State of the CPU.
#[derive(Debug, Default)]
enum Phase {
    /// Something else; the interrupt is not masked.
    #[default]
    Idle,
    /// An interrupt is on its way, and arrives then.
    Called(Time),
    /// The handler takes the entries of these buffers, until then.
    Pass(Vec<Full>, Time),
}

/// The CPU of the host that serves all VMs.
#[derive(Debug, Default)]
pub(super) struct Host {
    phase: Phase,
    /// Buffers that are full and in no pass, in the order in which they became so.
    waiting: Vec<Full>,
    outcome: HostOutcome,
    /// When it last had something to do.
    worked: Time,
}

impl Host {
    /// Reports a full buffer; an interrupt that is pending or masked covers all.
    pub(super) fn interrupt(&mut self, full: Full, now: Time, costs: &CostModel) {
        self.waiting.push(full);
        if matches!(self.phase, Phase::Idle) {
            self.outcome.interrupts += 1;
            self.phase = Phase::Called(now.after_cycles(costs.latency_cycles.into()));
        }
    }

    /// Returns the buffers of the next pass that has ended by a time; each has so many entries.
    pub(super) fn pass_ended_by(
        &mut self,
        now: Time,
        entries: u32,
        costs: &CostModel,
    ) -> Option<Vec<Full>> {
        if let Phase::Called(at) = self.phase
            && at <= now
        {
            self.begin(at, costs.interrupt_cycles.into(), entries, costs);
        }
        match &mut self.phase {
            Phase::Pass(buffers, until) if *until <= now => {
                let (buffers, until) = (std::mem::take(buffers), *until);
                if self.waiting.is_empty() {
                    self.phase = Phase::Idle;
                } else {
                    self.begin(until, 0, entries, costs);
                }
                Some(buffers)
            }
            _ => None,
        }
    }

    /// Begins a pass over what is full.
    fn begin(&mut self, at: Time, cycles_before: u64, entries: u32, costs: &CostModel) {
        let buffers = std::mem::take(&mut self.waiting);
        let cycles = cycles_before + buffers.len() as u64 * costs.taken(entries.into());
        self.worked = at.after_cycles(cycles);
        self.outcome.passes += 1;
        self.outcome.busy_cycles = self.outcome.busy_cycles.saturating_add(cycles);
        self.phase = Phase::Pass(buffers, self.worked);
    }

    /// Results at the end of all VMs.
    pub(super) fn outcome(&self, ended: Time) -> HostOutcome {
        HostOutcome {
            elapsed_cycles: ended.max(self.worked).cycles(),
            ..self.outcome
        }
    }
}
