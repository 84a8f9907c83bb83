//! The calls by which pages of a running VM are drawn, armed and served.

use std::cell::Cell;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use plimsoll_flow::PageNumber;

use super::pace::Spent;
use super::sampler::{SampledVm, Trap};
use crate::account::TrapAccount;
use crate::barrier::{PageBarrier, RemotePageout};
use crate::error::TrapError;
use crate::process::{Session, cpu_time};
use crate::sys::process_cpu_time;
use crate::uffd::{Fault, Userfault};

/// Longest wait without a heartbeat.
const PATIENCE: Duration = Duration::from_millis(50);
/// Pages between two others that are read along with them rather than by another call.
const GAP_PAGES: u64 = 64;

/// The time of a VM: the CPU time of its process without what traps used.
///
/// Pages that are armed together are touched one after the other. The time that the traps of some would add to the others' is
/// half a millisecond under KVM, in which a small VM touches all of its pages.
#[derive(Debug)]
struct VmClock {
    /// CPU time of a trap, as in a trial.
    trap: Duration,
    /// That of all traps so far.
    trapping: Duration,
    /// The time as it was read last.
    last: Cell<Duration>,
}

impl VmClock {
    fn new(trap: Duration) -> Self {
        Self {
            trap,
            trapping: Duration::ZERO,
            last: Cell::default(),
        }
    }

    /// That many accesses have trapped. Most of the time of a trap is used before its access waits.
    fn trapped(&mut self, accesses: usize) {
        self.trapping += self.trap * u32::try_from(accesses).unwrap_or(u32::MAX);
    }

    /// The time of a VM whose process has used `ran`; `None` if that is gone, for which the time stands still.
    fn time(&self, ran: Option<Duration>) -> Duration {
        if let Some(ran) = ran {
            // Some traps use less than those of a trial, and the time never goes back.
            let time = ran.saturating_sub(self.trapping);
            self.last.set(time.max(self.last.get()));
        }
        self.last.get()
    }
}

/// A VM whose pages trap while its RAM is registered. All calls must come from one thread.
#[derive(Debug)]
pub struct TrappedVm<B: PageBarrier = RemotePageout> {
    // Closed first: the watchdog of the session guards until then.
    userfault: Userfault,
    session: Session<B>,
    account: TrapAccount,
    faults: Vec<Fault>,
    /// Time of the VM at which no access waited.
    quiet: Duration,
    clock: VmClock,
    /// CPU time of this thread when it was accounted for last, and the part of it that served accesses since then.
    cpu_time: Duration,
    serving: Duration,
    /// Cost of traps since it was taken last.
    trapped: Duration,
    /// What was spent on other things in this period.
    pub arm_time: Duration,
}

impl<B: PageBarrier + std::fmt::Debug> TrappedVm<B> {
    pub fn new(session: Session<B>, userfault: Userfault, account: TrapAccount) -> Self {
        let mut vm = Self {
            userfault,
            session,
            clock: VmClock::new(account.running()),
            account,
            faults: Vec::new(),
            quiet: Duration::ZERO,
            cpu_time: cpu_time(),
            serving: Duration::ZERO,
            trapped: Duration::ZERO,
            arm_time: Duration::ZERO,
        };
        vm.quiet = vm.vm_time();
        vm
    }

    /// Starts to require heartbeats.
    pub fn guard(&self) -> Result<(), TrapError> {
        self.session.process.guard()
    }

    /// Registers the RAM with no userfaultfd; its pages stay unmapped. Returns the VM's time from which touches may
    /// have gone unnoticed.
    pub fn free(&mut self) -> Result<Duration, TrapError> {
        self.session.process.unregister(&self.userfault)?;
        self.session.process.unguard();
        Ok(self.quiet)
    }

    /// Registers the RAM again; returns the VM's time until which touches may have gone unnoticed.
    ///
    /// # Errors
    ///
    /// As [`TracedProcess::register`](crate::process::TracedProcess::register).
    pub fn take_back(&mut self) -> Result<Duration, TrapError> {
        // Pages are unmapped already: from the registration on an access may wait.
        self.session.process.guard()?;
        self.session.process.register(&self.userfault)?;
        self.quiet = self.vm_time();
        Ok(self.quiet)
    }

    /// Ends a period: returns the cost of its traps. Fails if the VM may swap by now.
    pub fn settle(&mut self) -> Result<Duration, TrapError> {
        self.session.check_swap()?;
        Ok(self.account.settle())
    }

    /// The cost of a trap to the VM, as far as it is known.
    pub fn trap_cost(&self) -> Duration {
        self.account.trap_cost()
    }

    /// Gives the RAM back to the kernel.
    pub fn release(&self) -> Result<(), TrapError> {
        self.session.process.unregister(&self.userfault)
    }

    /// Serves the accesses that wait; returns whether there were any.
    fn answer(&mut self, is_awaited: bool, traps: &mut Vec<Trap>) -> Result<bool, TrapError> {
        let mut faults = std::mem::take(&mut self.faults);
        let read = self.userfault.read_faults(&mut faults);
        self.clock.trapped(faults.len());
        let by = self.vm_time();
        // If the thread was waiting for it, an access is read as soon as it happens.
        let after = if is_awaited { by } else { self.quiet };
        let answered = read
            .map_err(self.session.process.failed("reading the userfaultfd"))
            .and_then(|()| {
                faults.iter().try_for_each(|fault| {
                    traps.push(Trap {
                        page: self.session.layout.page_at(fault.address),
                        kind: fault.kind(),
                        after,
                        by,
                    });
                    self.release_access(fault.address)
                })
            });
        let is_empty = faults.is_empty();
        if is_empty {
            self.quiet = by;
        }
        self.faults = faults;
        answered.map(|()| !is_empty)
    }

    fn release_access(&mut self, address: u64) -> Result<(), TrapError> {
        let start = Instant::now();
        self.session.release_access(&self.userfault, address)?;
        let elapsed = start.elapsed();
        self.serving += elapsed;
        self.trapped += self.account.charge(elapsed);
        Ok(())
    }
}

impl<B: PageBarrier + std::fmt::Debug> SampledVm for TrappedVm<B> {
    fn now(&self) -> Duration {
        now()
    }

    fn vm_time(&self) -> Duration {
        self.clock
            .time(process_cpu_time(self.session.process.pid).ok())
    }

    fn pages(&self) -> u64 {
        self.session.ram_pages()
    }

    fn populated_pages(&mut self) -> Result<u64, TrapError> {
        self.session.populated_pages()
    }

    fn is_populated(&mut self, page: u64) -> Result<bool, TrapError> {
        self.session.is_populated(page)
    }

    fn arm(&mut self, pages: &[u64]) -> Result<Vec<u64>, TrapError> {
        let tried = self.accessible(pages)?.len() as u64;
        let mut missed = pages.to_vec();
        // A page in use by the kernel at that time stays accessible: once more for those.
        for _ in 0..2 {
            let runs: Vec<_> = missed.iter().map(|&page| page..page + 1).collect();
            self.session.raise(&runs)?;
            self.session.barrier.leave_cpu();
            missed = self.accessible(&missed)?;
            if missed.is_empty() {
                break;
            }
        }
        self.session.unmapping.record(tried, missed.len() as u64)?;
        Ok(missed)
    }

    fn window_of(&self, page: u64) -> u64 {
        self.session.window_of(page)
    }

    fn accessible(&mut self, pages: &[u64]) -> Result<Vec<u64>, TrapError> {
        let mut accessible = Vec::new();
        for run in pages.chunk_by(|one, other| other.saturating_sub(*one) <= GAP_PAGES) {
            let mut wanted = run.iter().copied().peekable();
            for range in self
                .session
                .layout
                .addresses(&(run[0]..run[run.len() - 1] + 1))
            {
                let Some(PageNumber(first)) = self.session.layout.page_at(range.start) else {
                    continue;
                };
                let mut add = |index| {
                    let page = first + index;
                    while wanted.next_if(|&it| it < page).is_some() {}
                    accessible.extend(wanted.next_if_eq(&page));
                };
                self.session
                    .barrier
                    .for_each_down(range, &mut add)
                    .map_err(self.session.process.failed("reading pagemap"))?;
            }
        }
        Ok(accessible)
    }

    fn disarm(&mut self, page: u64) -> Result<(), TrapError> {
        for range in self.session.layout.addresses(&(page..page + 1)) {
            self.session
                .barrier
                .lower(&self.userfault, range)
                .map_err(self.session.process.failed("making pages accessible again"))?;
        }
        Ok(())
    }

    fn serve(&mut self, until: Duration, traps: &mut Vec<Trap>) -> Result<(), TrapError> {
        self.session.process.beat();
        // What came while this thread did something else.
        let has_answered = self.answer(false, traps)?;
        let patience = until.saturating_sub(now()).min(PATIENCE);
        if has_answered || patience.is_zero() {
            return Ok(());
        }
        self.session.follow_vcpu();
        self.session
            .process
            .await_fault(&self.userfault, patience)?;
        self.answer(true, traps).map(drop)
    }

    fn take_spent(&mut self) -> Spent {
        let now = cpu_time();
        let own = now.saturating_sub(std::mem::replace(&mut self.cpu_time, now));
        let own = own.saturating_sub(std::mem::take(&mut self.serving));
        self.arm_time += own;
        Spent {
            own,
            trapped: std::mem::take(&mut self.trapped),
        }
    }
}

/// Time since the first use: the same for all backends of this process, so that times before and after a VM is attached
/// anew are comparable.
pub fn now() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_that_traps_use_is_not_the_vms_and_it_never_goes_back() {
        let us = Duration::from_micros;
        let mut clock = VmClock::new(us(40));
        assert_eq!(clock.time(Some(us(1000))), us(1000));
        clock.trapped(2);
        assert_eq!(clock.time(Some(us(1500))), us(1420));
        // These used less.
        clock.trapped(3);
        assert_eq!(clock.time(Some(us(1510))), us(1420));
        assert_eq!(clock.time(None), us(1420));
        assert_eq!(clock.time(Some(us(1700))), us(1500));
    }
}
