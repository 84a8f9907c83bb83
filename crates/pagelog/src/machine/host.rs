//! The handler of full events on a CPU of the host.

use super::{CostModel, HostOutcome, Time};

/// A full buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FullBuffer {
    pub(super) vm: usize,
    pub(super) vcpu: usize,
}

/// State of the CPU.
#[derive(Debug, Default)]
enum Phase {
    /// Other work; the interrupt is not masked.
    #[default]
    Idle,
    /// An interrupt is pending and arrives at this time.
    Called(Time),
    /// The handler drains these buffers until this time.
    Pass(Vec<FullBuffer>, Time),
}

/// The CPU of the host that serves all VMs.
#[derive(Debug, Default)]
pub(super) struct Host {
    phase: Phase,
    /// Full buffers that are not part of a pass, in the order in which they became full.
    waiting: Vec<FullBuffer>,
    outcome: HostOutcome,
    /// Time at which it last had work.
    worked: Time,
}

impl Host {
    /// Reports a full buffer; a pending or masked interrupt covers it.
    pub(super) fn interrupt(&mut self, full: FullBuffer, now: Time, costs: &CostModel) {
        self.waiting.push(full);
        if matches!(self.phase, Phase::Idle) {
            self.outcome.interrupts += 1;
            self.phase = Phase::Called(now.after_cycles(costs.latency_cycles.into()));
        }
    }

    /// Returns the buffers of the next pass that has ended by a given time; each has this number of entries.
    pub(super) fn pass_ended_by(
        &mut self,
        now: Time,
        entries: u32,
        costs: &CostModel,
    ) -> Option<Vec<FullBuffer>> {
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

    /// Starts a pass over all full buffers.
    fn begin(&mut self, at: Time, cycles_before: u64, entries: u32, costs: &CostModel) {
        let buffers = std::mem::take(&mut self.waiting);
        let cycles = cycles_before + buffers.len() as u64 * costs.taken(entries.into());
        self.worked = at.after_cycles(cycles);
        self.outcome.passes += 1;
        self.outcome.busy_cycles = self.outcome.busy_cycles.saturating_add(cycles);
        self.phase = Phase::Pass(buffers, self.worked);
    }

    /// Results when all VMs have ended.
    pub(super) fn outcome(&self, ended: Time) -> HostOutcome {
        HostOutcome {
            elapsed_cycles: ended.max(self.worked).cycles(),
            ..self.outcome
        }
    }
}
