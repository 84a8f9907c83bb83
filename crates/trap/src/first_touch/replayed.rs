//! First touches of a replayed VM.

use std::time::Duration;

use plimsoll_flow::{AccessKind, PageNumber};

use super::computed_time::{ComputedTime, ComputedTouches, Costs};
use super::pace::Spent;
use super::sampler::{SampledVm, Trap};
use crate::backend::Backend;
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::hot_set::PageBits;
use crate::replay::{ARM, LOOK, Replay};

#[derive(Debug)]
struct ReplayedPages {
    replay: Replay,
    armed: PageBits,
    costs: Costs,
}

/// The backend `first-touch` on a replayed VM.
pub fn replayed_touches(replay: Replay, config: &TraceConfig) -> impl Backend + use<> {
    let trap_cost = replay.vm.trap_cost;
    let pages = ReplayedPages {
        armed: PageBits::new(replay.vm.ram_pages),
        replay,
        costs: Costs::default(),
    };
    ComputedTouches::new(pages, trap_cost, config)
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
            self.costs.recent.own += ARM;
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
        self.costs.recent.own += LOOK;
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
                self.costs.recent.trapped += self.replay.vm.trap_cost;
                break;
            }
        }
        Ok(())
    }

    fn take_spent(&mut self) -> Spent {
        self.costs.take()
    }
}

impl ComputedTime for ReplayedPages {
    fn costs(&mut self) -> &mut Costs {
        &mut self.costs
    }
}
