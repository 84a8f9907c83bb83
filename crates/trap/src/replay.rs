//! A VM that replays recorded references, in computed time: what its backends see can be compared with the exact curve.
//!
//! Every reference takes the same time. Traps and faults use up the budget, but take no time: the clock is that of a VM
//! which does not run meanwhile. Samples, hot sets, rates and schedules are those of a
//! running VM; only the calls to the kernel are missing. Costs are assumed, not measured.
//!
//! Not here: the references (crate `plimsoll-source`), comparisons (`plimsoll-bench`).

use std::sync::Arc;
use std::time::Duration;

use plimsoll_flow::TraceMethod;

use crate::backend::{Backend, BackendRow};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::trial::{TouchCost, Toucher};

/// A VM that replays references, with one vCPU.
#[derive(Debug, Clone)]
pub struct ReplayedVm {
    /// Its pages in the order in which it refers to them; all of its RAM has contents.
    pub references: Arc<[u32]>,
    /// Pages of its RAM, more than the largest page number.
    pub ram_pages: u64,
    /// Time from a reference to the next.
    pub step: Duration,
    /// Cost of a trap.
    pub trap_cost: Duration,
}

/// Cost of making a page inaccessible, of a minor fault, and of looking at a page in a scan.
pub(crate) const ARM: Duration = Duration::from_micros(5);
pub(crate) const FAULT: Duration = Duration::from_micros(6);
pub(crate) const LOOK: Duration = Duration::from_nanos(500);

impl ReplayedVm {
    /// Attaches to it at its start; `None` for a method by which no curve is made of all accesses.
    ///
    /// # Errors
    ///
    /// [`TrapError::Setting`] for a setting out of range.
    pub fn attach(
        &self,
        method: TraceMethod,
        config: &TraceConfig,
    ) -> Result<Option<Box<dyn Backend>>, TrapError> {
        config.check(BackendRow::of(method).rate_rules)?;
        let replay = Replay {
            vm: self.clone(),
            at: 0,
            now: Duration::ZERO,
        };
        Ok(match method {
            TraceMethod::Traps => Some(Box::new(crate::traps::ReplayedTraps::new(replay, config))),
            TraceMethod::AccessedPageScans => {
                Some(Box::new(crate::scans::ReplayedScans::new(replay, config)))
            }
            TraceMethod::FirstTouches => Some(Box::new(crate::first_touch::replayed_touches(
                replay, config,
            ))),
            _ => None,
        })
    }
}

/// The progress of a replayed VM.
#[derive(Debug, Clone)]
pub(crate) struct Replay {
    pub(crate) vm: ReplayedVm,
    at: usize,
    pub(crate) now: Duration,
}

impl Replay {
    /// The next reference, if it comes before `end`; otherwise it is `end` then.
    pub(crate) fn next_before(&mut self, end: Duration) -> Option<u64> {
        let next = self.now + self.vm.step;
        match self.vm.references.get(self.at) {
            Some(&page) if next <= end => {
                self.at += 1;
                self.now = next;
                Some(u64::from(page))
            }
            _ => {
                self.now = self.now.max(end);
                None
            }
        }
    }

    /// Lets the VM run unobserved until `end`.
    pub(crate) fn skip_to(&mut self, end: Duration) {
        let steps = end.saturating_sub(self.now).as_nanos() / self.vm.step.as_nanos().max(1);
        self.at = self
            .at
            .saturating_add(usize::try_from(steps).unwrap_or(usize::MAX));
        self.now = self.now.max(end);
    }

    /// What a touch costs that takes `time`.
    pub(crate) fn touch_cost(time: Duration) -> TouchCost {
        TouchCost {
            time,
            toucher: Toucher::Thread,
        }
    }
}
