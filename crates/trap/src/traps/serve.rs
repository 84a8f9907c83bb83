//! Answering the accesses that trap, within the period's time budget.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{PATIENCE, Tracer};
use crate::backend::Sink;
use crate::barrier::PageBarrier;
use crate::error::TrapError;
use crate::uffd::Fault;

impl<B: PageBarrier> Tracer<B> {
    /// Serves traps until the period ends, its budget is used up, or `stop`; returns whether the
    /// budget ended it.
    pub(super) fn watch(
        &mut self,
        stop: &AtomicBool,
        end: Instant,
        sink: Sink<'_>,
    ) -> Result<bool, TrapError> {
        let budget = self.session.process.budget_seconds(&self.config);
        let mut retried = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            if budget.is_some_and(|budget| self.spent_seconds() >= budget) {
                return Ok(true);
            }
            self.session.follow_vcpu();
            if retried.elapsed() >= PATIENCE && !self.stuck.is_empty() {
                self.rearm_stuck()?;
                retried = Instant::now();
            }
            self.serve(left.min(PATIENCE), sink)?;
        }
        Ok(false)
    }

    /// Time taken in this period so far, with what making all pages accessible again will take.
    fn spent_seconds(&self) -> f64 {
        let taken = self.counts.fault_time + self.counts.arm_time;
        let arming_pages = self.watched.len() as f64 * f64::from(self.config.group_pages);
        taken.as_secs_f64() + arming_pages * self.control.arming_seconds_per_page / 2.0
    }

    /// Waits up to `patience` for accesses and serves all that wait by then.
    pub(super) fn serve(&mut self, patience: Duration, sink: Sink<'_>) -> Result<(), TrapError> {
        self.session.process.beat();
        let mut faults = std::mem::take(&mut self.faults);
        // First without a wait: the next access often waits by the time its vCPU lets this thread run again.
        let read = self
            .read_faults(&mut faults)
            .and_then(|()| match faults.is_empty() {
                true => self.await_faults(patience, &mut faults),
                false => Ok(()),
            });
        let served =
            read.and_then(|()| faults.iter().try_for_each(|&fault| self.serve_fault(fault)));
        self.faults = faults;
        if self.batch.is_full() {
            self.flush(sink);
        }
        served
    }

    fn read_faults(&self, faults: &mut Vec<Fault>) -> Result<(), TrapError> {
        let read = self.userfault.read_faults(faults);
        read.map_err(self.session.process.failed("reading the userfaultfd"))
    }

    /// Waits up to `patience` for accesses and reads them.
    fn await_faults(&self, patience: Duration, faults: &mut Vec<Fault>) -> Result<(), TrapError> {
        let has_ready = self
            .session
            .process
            .await_fault(&self.userfault, patience)?;
        if has_ready {
            self.read_faults(faults)?;
        }
        Ok(())
    }

    fn serve_fault(&mut self, fault: Fault) -> Result<(), TrapError> {
        let start = Instant::now();
        let page = self.session.layout.page_at(fault.address);
        let watched = page.filter(|page| {
            self.recording && self.sample.contains(page.0) && !self.hot.contains(page.0)
        });
        if let Some(page) = watched {
            self.batch.push(page, fault.kind());
            self.counts.traps.taken += 1;
            self.counts.traps.writes += u64::from(fault.write);
            self.counts.distinct_pages += u64::from(self.trapped.set(page.0, true));
            let was_full = self.hot.is_full();
            // Before the access continues: its vCPU could be at the head's page next.
            if let Some(head) = self.hot.enter(page.0) {
                self.rearm_head(head)?;
            }
            if self.is_armed && !was_full && self.hot.is_full() {
                self.progress.observes(self.counts.traps.taken);
            }
        } else {
            self.counts.traps.strays += 1;
        }
        if let Some(page) = page {
            self.raised.set(page.0, false);
        }
        self.session
            .release_access(&self.userfault, fault.address)?;
        self.counts.fault_time += self.account.charge(start.elapsed());
        self.progress.trapped(1);
        Ok(())
    }
}
