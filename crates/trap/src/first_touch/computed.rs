//! A VM that only exists as numbers: draws and touches of a VM of any size, in computed time.
//!
//! Each page belongs to a class by a hash of its number and is touched at the random times of its class, so that
//! nothing is stored but the armed pages. Everything above the calls to the kernel is that of a running VM.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use plimsoll_flow::{AccessKind, PageCount, PageNumber};

use super::computed_time::{ComputedTime, ComputedTouches, Costs};
use super::pace::{Dice, Spent};
use super::sampler::{SampledVm, Trap};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::sample::mix;

/// Time that a draw takes.
const DRAW: Duration = Duration::from_micros(1);

/// Pages that are touched alike.
#[derive(Debug, Clone, Copy)]
pub struct PageClass {
    /// Share of the RAM, 0.0 to 1.0.
    pub share: f64,
    /// How often each of its pages is touched in a second.
    pub touches_per_second: f64,
}

/// A computed VM. The rest of its RAM, which belongs to no class, has no contents.
#[derive(Debug, Clone)]
pub struct ComputedVm {
    /// Pages of its RAM.
    pub ram_pages: u64,
    /// Classes of its pages.
    pub classes: Vec<PageClass>,
    /// Cost of arming a page.
    pub arm_cost: Duration,
    /// Cost of a trap.
    pub trap_cost: Duration,
}

impl ComputedVm {
    /// Attaches to it.
    ///
    /// # Errors
    ///
    /// [`TrapError::Setting`] for a setting out of range.
    pub fn attach(&self, config: &TraceConfig) -> Result<ComputedSampler, TrapError> {
        config.check(super::ROW.rate_rules)?;
        let model = Model {
            vm: self.clone(),
            now: Duration::ZERO,
            due: HashMap::new(),
            touches: BinaryHeap::new(),
            dice: Dice::new(mix(config.seed + 1)),
            costs: Costs::default(),
        };
        Ok(ComputedTouches::new(model, self.trap_cost, config))
    }

    /// Pages touched in a time span.
    pub fn footprint_pages(&self, span: Duration) -> f64 {
        let of = |class: &PageClass| {
            let touched = 1.0 - (-class.touches_per_second * span.as_secs_f64()).exp();
            class.share * touched
        };
        self.ram_pages as f64 * self.classes.iter().map(of).sum::<f64>()
    }

    /// Pages touched for the first time within a second, `span` after a random time: the misses per second of a memory
    /// of [`footprint_pages`](Self::footprint_pages) of it.
    pub fn misses_per_second(&self, span: Duration) -> f64 {
        let of = |class: &PageClass| {
            let rate = class.touches_per_second;
            class.share * rate * (-rate * span.as_secs_f64()).exp()
        };
        self.ram_pages as f64 * self.classes.iter().map(of).sum::<f64>()
    }
}

/// The backend `first-touch` on a computed VM.
pub type ComputedSampler = ComputedTouches<Model>;

impl ComputedSampler {
    /// Bytes that the waiting samples take, about.
    pub fn waiting_bytes(&self) -> usize {
        self.sampler.waiting_bytes()
    }

    /// Touches each armed page within `span`, as a VM does that goes through all of its memory.
    pub fn touch_all_within(&mut self, span: Duration) {
        let waiting: Vec<u64> = self.sampler.waiting_pages().collect();
        let model = &mut self.sampler.vm;
        for page in waiting {
            let due = model.now + span.mul_f64(model.dice.uniform());
            model.due.insert(page, due);
            model.touches.push(Reverse((due, page)));
        }
    }
}

/// The state of a computed VM.
#[derive(Debug)]
pub struct Model {
    vm: ComputedVm,
    now: Duration,
    /// When each armed page is touched.
    due: HashMap<u64, Duration>,
    /// The same in order; of pages that were disarmed too.
    touches: BinaryHeap<Reverse<(Duration, u64)>>,
    dice: Dice,
    costs: Costs,
}

impl Model {
    fn class_of(&self, page: u64) -> Option<&PageClass> {
        let mut place = (mix(page + 1) >> 11) as f64 / (1u64 << 53) as f64;
        self.vm.classes.iter().find(|class| {
            place -= class.share;
            place < 0.0
        })
    }
}

impl SampledVm for Model {
    fn now(&self) -> Duration {
        self.now
    }

    fn vm_time(&self) -> Duration {
        self.now
    }

    fn pages(&self) -> u64 {
        self.vm.ram_pages
    }

    fn populated_pages(&mut self) -> Result<u64, TrapError> {
        let share: f64 = self.vm.classes.iter().map(|class| class.share).sum();
        let ram = PageCount(self.vm.ram_pages);
        Ok(ram.scaled(share).min(ram).0)
    }

    fn is_populated(&mut self, page: u64) -> Result<bool, TrapError> {
        self.costs.recent.own += DRAW;
        Ok(self.class_of(page).is_some())
    }

    fn arm(&mut self, pages: &[u64]) -> Result<Vec<u64>, TrapError> {
        for &page in pages {
            self.now += self.vm.arm_cost;
            self.costs.recent.own += self.vm.arm_cost;
            let rate = self
                .class_of(page)
                .map_or(0.0, |class| class.touches_per_second);
            let seconds = self.dice.exponential() / rate;
            // Beyond that nobody waits.
            if seconds < 1e6 {
                let due = self.now + Duration::from_secs_f64(seconds);
                self.due.insert(page, due);
                self.touches.push(Reverse((due, page)));
            }
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
        self.costs.recent.own += DRAW;
        self.due.remove(&page);
        if self.touches.len() > self.due.len() * 2 + 1024 {
            let due = &self.due;
            self.touches
                .retain(|Reverse((at, page))| due.get(page) == Some(at));
        }
        Ok(())
    }

    fn serve(&mut self, until: Duration, traps: &mut Vec<Trap>) -> Result<(), TrapError> {
        let until = until.max(self.now);
        while let Some(&Reverse((at, page))) = self.touches.peek()
            && at <= until
        {
            self.touches.pop();
            if self.due.get(&page) != Some(&at) {
                continue;
            }
            self.due.remove(&page);
            let by = at.max(self.now);
            traps.push(Trap {
                page: Some(PageNumber(page)),
                kind: AccessKind::Unknown,
                after: at,
                by,
            });
            self.now = by + self.vm.trap_cost;
            self.costs.recent.trapped += self.vm.trap_cost;
            return Ok(());
        }
        self.now = until;
        Ok(())
    }

    fn take_spent(&mut self) -> Spent {
        self.costs.take()
    }
}

impl ComputedTime for Model {
    fn costs(&mut self) -> &mut Costs {
        &mut self.costs
    }
}
