//! Tracing a running VM's RAM period by period, [AET] §3.
//!
//! ```text
//!   period:  collect ─> arm ──> window: trap ... trap ──> disarm ─> rest ─> adapt the rate
//!                        │               │  ▲
//!                sampled pages     enters hot set, the set's head
//!                inaccessible      is made inaccessible in its place
//! ```
//!
//! Each period a new sample of pages is made inaccessible. The first access to one
//! traps, is recorded as a reference, and the page stays accessible as a member of
//! the hot set until as many other pages have trapped as the set holds. So
//! the result is the sequence of references that miss a FIFO of `hot_set_pages`
//! sampled pages: it is valid for memory sizes above `hot_set_pages * scale` pages.
//!
//! When the traps of a period have used up the period's time budget the window closes: all pages
//! are accessible until the next period. A window that closes early is unbiased; it only has fewer
//! references.
//!
//! Not here: curves and working sets (crate `plimsoll-estimator`), finding VMs (`plimsoll-vm`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::{
    AccessKind, PageNumber, Period, PeriodLosses, ReferenceBatch, ScanCounts, TraceMethod,
    TrapCounts,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::barrier::{PageBarrier, RANGES_MAX, RemotePageout};
use crate::error::TrapError;
use crate::hot_set::{HotSet, PageBits};
use crate::inject::{ends_soon, has_ended, take_userfaultfd};
use crate::placement::{HandlerCpu, Placement};
use crate::ram::{PAGE_BYTES, PageRange, Populated, RamLayout};
use crate::rate::{PeriodCost, RateControl, RateRule, SCALE_MAX};
use crate::sample::{Sample, mix};
use crate::sys::AddressRange;
use crate::target::TraceTarget;
use crate::trial::{TrapCost, measure_trap_cost};
use crate::userfault::{Fault, Userfault};

/// Longest wait without a look at the stop flag and the clock.
const PATIENCE: Duration = Duration::from_millis(50);
/// Pages made inaccessible, or accessible, before waiting accesses are served again.
const CHUNK_PAGES: u64 = 512;
/// Least pages that an adapted hot set has.
const HOT_SET_PAGES_MIN: u32 = 16;
/// Share of the time budget that making pages inaccessible may take; the rest is for traps.
const ARMING_SHARE: f64 = 0.25;

/// How a VM is traced.
#[derive(Debug, Clone)]
pub struct TraceConfig {
    /// Length of a period, 10 ms or more; 5 s by default, as in \[AET\] §4.1.
    pub period: Duration,
    /// Bound of the time taken from the VM's vCPUs, as a share of it; `None` for no bound.
    pub budget: Option<f64>,
    /// T of the first period: one page in T is watched.
    pub scale: u32,
    /// How T follows the VM.
    pub rate_rule: RateRule,
    /// Pages of the hot set, 1 to 4096, \[AET\] §3.2. Under [`RateRule::Budget`] it has at most a quarter
    /// of the pages that trapped in the period before (and 16, as in the first), so that a working set which shrinks
    /// to a third does not vanish in it.
    pub hot_set_pages: u32,
    /// Aligned neighbours that are sampled together, 1 to 512.
    pub group_pages: u32,
    /// Watched pages that should trap in a period; fewer raise the rate.
    pub least_pages: u64,
    /// Seed of the samples' salts.
    pub seed: u64,
    /// Where the trap handler runs.
    pub handler_cpu: HandlerCpu,
}

impl Default for TraceConfig {
    fn default() -> Self {
        Self {
            period: Duration::from_secs(5),
            budget: Some(0.01),
            scale: 128,
            rate_rule: RateRule::default(),
            hot_set_pages: 64,
            group_pages: 1,
            least_pages: 128,
            seed: 0,
            handler_cpu: HandlerCpu::default(),
        }
    }
}

impl TraceConfig {
    fn check(&self) -> Result<(), TrapError> {
        let refuse = |setting, value: String, accepted| {
            Err(TrapError::Setting {
                setting,
                value,
                accepted,
            })
        };
        if self.period < Duration::from_millis(10) || self.period > Duration::from_secs(86_400) {
            return refuse("period", format!("{:?}", self.period), "10 ms to a day");
        }
        if let Some(budget) = self
            .budget
            .filter(|budget| !(*budget > 0.0 && *budget <= 1.0))
        {
            return refuse("budget", budget.to_string(), "above 0 to 1 (100 %)");
        }
        if !(1..=SCALE_MAX).contains(&self.scale) {
            return refuse(
                "tracking rate of 1 in",
                self.scale.to_string(),
                "1 to 262144",
            );
        }
        if !(1..=4096).contains(&self.hot_set_pages) {
            return refuse("hot set", self.hot_set_pages.to_string(), "1 to 4096 pages");
        }
        if !(1..=512).contains(&self.group_pages) {
            return refuse(
                "sampling group",
                self.group_pages.to_string(),
                "1 to 512 pages",
            );
        }
        Ok(())
    }
}

/// A VM whose RAM is being traced. Dropped, it takes its traps with it.
#[derive(Debug)]
pub struct Tracer<B: PageBarrier = RemotePageout> {
    pid: u32,
    pidfd: OwnedFd,
    vcpus: usize,
    layout: RamLayout,
    populated: Populated,
    userfault: Userfault,
    barrier: B,
    config: TraceConfig,
    rate: RateControl,
    trap_cost: TrapCost,
    placement: Placement,
    /// The pages of the current sample that hold something, as runs.
    watched: Vec<PageRange>,
    sample: Sample,
    recording: bool,
    hot: HotSet,
    /// Pages made inaccessible and not known to be accessible again.
    raised: PageBits,
    /// Pages that left the hot set and could not be made inaccessible yet.
    stuck: Vec<u64>,
    /// Pages that trapped in this window.
    trapped: PageBits,
    batch: ReferenceBatch,
    faults: Vec<Fault>,
    periods: u64,
    populated_pages_before: Option<u64>,
    /// Pages that trapped in the last period that saw any.
    distinct_pages_before: Option<u64>,
    /// Running mean of what arming and disarming one page takes.
    arming_seconds_per_page: f64,
    counts: Counts,
}

/// Counters of the current period; see [`Period`].
#[derive(Debug, Default)]
struct Counts {
    distinct_pages: u64,
    traps: TrapCounts,
    rearmed_pages: u64,
    fault_time: Duration,
    arm_time: Duration,
    losses: PeriodLosses,
}

/// Takes the references of a period, in order.
pub type Sink<'a> = &'a mut dyn FnMut(&ReferenceBatch);

impl Tracer<RemotePageout> {
    /// Attaches to a running VM from outside; traces nothing yet.
    ///
    /// # Errors
    ///
    /// Every [`TrapError`]; the VM is left as it was.
    pub fn attach(target: &TraceTarget, config: TraceConfig) -> Result<Self, TrapError> {
        config.check()?;
        let reached = target.reach()?;
        let trap_cost = measure_trap_cost(config.handler_cpu)?;
        let uffd = take_userfaultfd(target.pid, reached.pidfd.as_fd())?;
        let userfault = Userfault::register(uffd, reached.layout.ranges())
            .map_err(register_error(target.pid, "minor faults on shared memory"))?;
        let parts = Parts {
            pidfd: reached.pidfd,
            layout: reached.layout,
            populated: reached.populated,
            userfault,
            barrier: reached.barrier,
            trap_cost,
        };
        Ok(Self::assemble(target, config, parts))
    }
}

/// What a userfaultfd that could not be put to its use means; `missing` is what an old kernel lacks.
pub fn register_error(pid: u32, missing: &'static str) -> impl FnOnce(io::Error) -> TrapError {
    move |source| match source.raw_os_error() {
        Some(libc::EBUSY) => TrapError::UserfaultInUse,
        Some(libc::EINVAL) => TrapError::KernelTooOld { missing, source },
        _ => TrapError::Call {
            pid,
            call: "registering its RAM",
            source,
        },
    }
}

/// What a tracer is made of besides its target and settings.
struct Parts<B> {
    pidfd: OwnedFd,
    layout: RamLayout,
    populated: Populated,
    userfault: Userfault,
    barrier: B,
    trap_cost: TrapCost,
}

impl<B: PageBarrier> Tracer<B> {
    fn assemble(target: &TraceTarget, config: TraceConfig, parts: Parts<B>) -> Self {
        let pages = parts.layout.pages();
        Self {
            pid: target.pid,
            pidfd: parts.pidfd,
            vcpus: target.vcpus(),
            populated: parts.populated,
            userfault: parts.userfault,
            barrier: parts.barrier,
            rate: RateControl::new(config.rate_rule, config.scale, config.least_pages),
            trap_cost: parts.trap_cost,
            placement: Placement::new(config.handler_cpu, target.pid, &target.vcpu_threads),
            watched: Vec::new(),
            sample: Sample::new(config.scale, config.group_pages, 0),
            recording: false,
            hot: HotSet::new(config.hot_set_pages as usize, pages),
            raised: PageBits::new(pages),
            stuck: Vec::new(),
            trapped: PageBits::new(pages),
            batch: ReferenceBatch::new(),
            faults: Vec::new(),
            periods: 0,
            populated_pages_before: None,
            distinct_pages_before: None,
            arming_seconds_per_page: 2e-6,
            counts: Counts::default(),
            layout: parts.layout,
            config,
        }
    }

    /// What a trap costs on this host, measured before attaching.
    #[must_use]
    pub fn trap_cost(&self) -> TrapCost {
        self.trap_cost
    }

    /// Pages of the VM's RAM.
    #[must_use]
    pub fn ram_pages(&self) -> u64 {
        self.layout.pages()
    }

    /// Traces one period and hands its references to `sink`, in order.
    ///
    /// Ends early, with a report on what was, when `stop` becomes true or the VM ends.
    ///
    /// # Errors
    ///
    /// [`TrapError::VmGone`] when the VM has ended before anything was seen in this period,
    /// [`TrapError::StayedAccessible`] when its pages cannot be trapped, [`TrapError::Call`] for
    /// what should not happen. References up to there have been handed over.
    pub fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        if has_ended(self.pidfd.as_fd()) {
            return Err(TrapError::VmGone { pid: self.pid });
        }
        let report = self.run_period_unchecked(stop, sink);
        self.flush(sink);
        report
    }

    /// The address space of an ending process fails in many ways before it is gone.
    fn gone_if_it_ends<T>(&self, result: Result<T, TrapError>) -> Result<T, TrapError> {
        match result {
            Err(TrapError::Call { .. }) if ends_soon(self.pidfd.as_fd()) => {
                Err(TrapError::VmGone { pid: self.pid })
            }
            other => other,
        }
    }

    fn run_period_unchecked(
        &mut self,
        stop: &AtomicBool,
        sink: Sink<'_>,
    ) -> Result<Period, TrapError> {
        let start = Instant::now();
        let end = start + self.config.period;
        let scale = self.rate.scale();
        self.counts = Counts::default();
        self.placement.follow(|| self.barrier.leave_cpu());
        let collected = self.collect(scale);
        let hot_set_pages = self.hot_set_pages();
        self.hot.restart(hot_set_pages);
        let (populated_pages, collect_time) = self.gone_if_it_ends(collected)?;

        let window_start = Instant::now();
        self.recording = true;
        let armed = self.arm(sink);
        let watched = armed.and_then(|()| self.watch(stop, end, sink));
        let window = window_start.elapsed();
        self.recording = false;
        let rested = watched.and_then(|budget_exhausted| {
            self.disarm(sink)?;
            self.flush(sink);
            self.rest(stop, end)?;
            Ok(budget_exhausted)
        });
        let budget_exhausted = match self.gone_if_it_ends(rested) {
            // What was seen of it stands; the next period tells that it is gone.
            Err(TrapError::VmGone { .. }) if self.counts.traps.taken > 0 => false,
            other => other?,
        };

        let tracked_pages = self.watched.iter().map(|run| run.end - run.start).sum();
        let length = start.elapsed();
        let taken = self.counts.fault_time + self.counts.arm_time;
        let report = Period {
            index: self.periods,
            method: TraceMethod::Traps,
            length,
            window,
            scale,
            populated_pages,
            tracked_pages,
            distinct_pages: self.counts.distinct_pages,
            traps: TrapCounts {
                hot_set_pages,
                ..self.counts.traps
            },
            scans: ScanCounts::default(),
            rearmed_pages: self.counts.rearmed_pages,
            fault_time: self.counts.fault_time,
            arm_time: self.counts.arm_time,
            collect_time,
            overhead_ratio: taken.as_secs_f64() / (length.as_secs_f64() * self.vcpus as f64),
            budget_exhausted,
            losses: self.counts.losses,
        };
        self.periods += 1;
        self.adapt(&report);
        Ok(report)
    }

    /// Pages of this period's hot set; see [`TraceConfig::hot_set_pages`].
    fn hot_set_pages(&self) -> u32 {
        if self.config.rate_rule != RateRule::Budget {
            return self.config.hot_set_pages;
        }
        let quarter = self.distinct_pages_before.unwrap_or_default() / 4;
        let quarter = u32::try_from(quarter).unwrap_or(u32::MAX);
        quarter
            .max(HOT_SET_PAGES_MIN)
            .min(self.config.hot_set_pages)
    }

    /// Phase 3: finds the pages that hold something and draws this period's sample of them.
    fn collect(&mut self, scale: u32) -> Result<(u64, Duration), TrapError> {
        let start = Instant::now();
        let salt = mix(self.config.seed ^ mix(self.periods + 1));
        self.sample = Sample::new(scale, self.config.group_pages, salt);
        let failed = self.failed("finding populated pages");
        let runs = self.populated.runs().map_err(failed)?;
        let populated_pages = runs.iter().map(|run| run.end - run.start).sum();
        self.watched.clear();
        for run in runs {
            self.watched.extend(self.sample.runs_in(run.clone()));
        }
        let before = self.populated_pages_before.replace(populated_pages);
        self.counts.losses.first_touches_unseen =
            before.map_or(0, |before| populated_pages - before.min(populated_pages));
        Ok((populated_pages, start.elapsed()))
    }

    /// Phase 2: makes the sampled pages inaccessible; serves accesses that trap meanwhile.
    fn arm(&mut self, sink: Sink<'_>) -> Result<(), TrapError> {
        let watched = std::mem::take(&mut self.watched);
        let armed = self.arm_runs(&watched, sink);
        self.watched = watched;
        let stayed_accessible = armed?;
        self.counts.losses.stayed_accessible = stayed_accessible;
        let tried = self.counts.rearmed_pages;
        if self.periods == 0 && stayed_accessible * 2 > tried {
            return Err(TrapError::StayedAccessible {
                tried,
                accessible: stayed_accessible,
            });
        }
        Ok(())
    }

    fn arm_runs(&mut self, runs: &[PageRange], sink: Sink<'_>) -> Result<u64, TrapError> {
        for chunk in chunks(runs) {
            self.raise(&chunk)?;
            self.serve(Duration::ZERO, sink)?;
        }
        // A page in use by the kernel at that moment stays accessible: once more for those.
        let missed = self.accessible_of(runs)?;
        for chunk in chunks(&missed) {
            self.raise(&chunk)?;
            self.serve(Duration::ZERO, sink)?;
        }
        let escaped = self.accessible_of(&missed)?;
        for page in escaped.iter().cloned().flatten() {
            self.raised.set(page, false);
        }
        Ok(escaped.iter().map(|run| run.end - run.start).sum())
    }

    fn raise(&mut self, runs: &[PageRange]) -> Result<(), TrapError> {
        let start = cpu_time();
        let ranges: Vec<_> = runs
            .iter()
            .flat_map(|run| self.layout.addresses(run))
            .collect();
        for ranges in ranges.chunks(RANGES_MAX) {
            self.barrier
                .raise(ranges)
                .map_err(self.failed("process_madvise(MADV_PAGEOUT)"))?;
        }
        for page in runs.iter().cloned().flatten() {
            self.counts.rearmed_pages += u64::from(self.raised.set(page, true));
        }
        self.counts.arm_time += cpu_time().saturating_sub(start);
        Ok(())
    }

    /// Lists the pages of `runs` that should be inaccessible and are not.
    fn accessible_of(&mut self, runs: &[PageRange]) -> Result<Vec<PageRange>, TrapError> {
        let start = cpu_time();
        let mut accessible = Vec::new();
        for run in runs {
            for range in self.layout.addresses(run) {
                let Some(PageNumber(first)) = self.layout.page_at(range.start) else {
                    continue;
                };
                let raised = &self.raised;
                self.barrier
                    .for_each_down(range, &mut |index| {
                        let page = first + index;
                        if raised.get(page) {
                            accessible.push(page..page + 1);
                        }
                    })
                    .map_err(self.failed("reading pagemap"))?;
            }
        }
        self.counts.arm_time += cpu_time().saturating_sub(start);
        Ok(accessible)
    }

    /// Serves traps until the period ends, its budget is used up, or `stop`; tells whether it was
    /// the budget.
    fn watch(
        &mut self,
        stop: &AtomicBool,
        end: Instant,
        sink: Sink<'_>,
    ) -> Result<bool, TrapError> {
        let mut retried = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            if self
                .budget_seconds()
                .is_some_and(|budget| self.spent_seconds() >= budget)
            {
                return Ok(true);
            }
            self.placement.follow(|| self.barrier.leave_cpu());
            if retried.elapsed() >= PATIENCE && !self.stuck.is_empty() {
                self.rearm_stuck()?;
                retried = Instant::now();
            }
            self.serve(left.min(PATIENCE), sink)?;
        }
        Ok(false)
    }

    /// Time of the vCPUs that a period may take, in seconds.
    fn budget_seconds(&self) -> Option<f64> {
        let share = self.config.budget?;
        Some(share * self.config.period.as_secs_f64() * self.vcpus as f64)
    }

    /// Time taken in this period so far, with what making all pages accessible again will take.
    fn spent_seconds(&self) -> f64 {
        let taken = self.counts.fault_time + self.counts.arm_time;
        let arming_pages = self.watched.len() as f64 * f64::from(self.config.group_pages);
        taken.as_secs_f64() + arming_pages * self.arming_seconds_per_page / 2.0
    }

    /// Waits up to `patience` for accesses and serves all that wait by then.
    fn serve(&mut self, patience: Duration, sink: Sink<'_>) -> Result<(), TrapError> {
        let patience = Timespec::try_from(patience).map_err(io::Error::other);
        let patience = patience.map_err(self.failed("a wait"))?;
        let mut fds = [
            PollFd::from_borrowed_fd(self.userfault.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.pidfd.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, Some(&patience)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(self.failed("poll()")(error.into())),
        }
        if !fds[1].revents().is_empty() {
            return Err(TrapError::VmGone { pid: self.pid });
        }
        let mut faults = std::mem::take(&mut self.faults);
        let read = self.userfault.read_faults(&mut faults);
        let served = read
            .map_err(self.failed("reading the userfaultfd"))
            .and_then(|()| faults.iter().try_for_each(|&fault| self.serve_fault(fault)));
        self.faults = faults;
        if self.batch.is_full() {
            self.flush(sink);
        }
        served
    }

    fn serve_fault(&mut self, fault: Fault) -> Result<(), TrapError> {
        let start = Instant::now();
        let page = self.layout.page_at(fault.address);
        let watched = page.filter(|page| {
            self.recording && self.sample.contains(page.0) && !self.hot.contains(page.0)
        });
        if let Some(page) = watched {
            let kind = if fault.write {
                AccessKind::Write
            } else {
                AccessKind::Read
            };
            self.batch.push(page, kind);
            self.counts.traps.taken += 1;
            self.counts.traps.writes += u64::from(fault.write);
            self.counts.distinct_pages += u64::from(self.trapped.set(page.0, true));
            // Before the access goes on: its vCPU could be at the head's page next.
            if let Some(head) = self.hot.enter(page.0) {
                self.rearm_head(head)?;
            }
        } else {
            self.counts.traps.strays += 1;
        }
        if let Some(page) = page {
            self.raised.set(page.0, false);
        }
        let range = AddressRange {
            start: fault.address & !(PAGE_BYTES - 1),
            len_bytes: PAGE_BYTES,
        };
        self.barrier
            .lower(&self.userfault, range)
            .map_err(self.failed("letting an access go on"))?;
        self.counts.fault_time += start.elapsed() + self.trap_cost.outside_handler;
        Ok(())
    }

    /// Makes the page that leaves the hot set inaccessible.
    fn rearm_head(&mut self, head: u64) -> Result<(), TrapError> {
        self.counts.rearmed_pages += 1;
        // A page in use by the kernel at that moment stays accessible: once more, then later.
        if !self.try_rearm(head)? && !self.try_rearm(head)? {
            self.counts.losses.left_hot_set_accessible += 1;
            self.stuck.push(head);
        }
        Ok(())
    }

    /// Tries again with the pages that could not be made inaccessible when they left the hot set.
    fn rearm_stuck(&mut self) -> Result<(), TrapError> {
        let start = cpu_time();
        let mut stuck = std::mem::take(&mut self.stuck);
        let mut failed = Ok(());
        stuck.retain(|&page| match self.try_rearm(page) {
            Ok(done) => !done,
            Err(error) => {
                failed = Err(error);
                true
            }
        });
        self.stuck = stuck;
        self.counts.arm_time += cpu_time().saturating_sub(start);
        failed
    }

    /// Makes a page inaccessible; tells whether it is.
    fn try_rearm(&mut self, page: u64) -> Result<bool, TrapError> {
        let run = page..page + 1;
        let ranges: Vec<_> = self.layout.addresses(&run).collect();
        self.barrier
            .raise(&ranges)
            .map_err(self.failed("process_madvise(MADV_PAGEOUT)"))?;
        let mut accessible = false;
        for &range in &ranges {
            self.barrier
                .for_each_down(range, &mut |_| accessible = true)
                .map_err(self.failed("reading pagemap"))?;
        }
        self.raised.set(page, !accessible);
        Ok(!accessible)
    }

    /// Makes the window's pages accessible again.
    fn disarm(&mut self, sink: Sink<'_>) -> Result<(), TrapError> {
        let watched = std::mem::take(&mut self.watched);
        let still: Vec<PageRange> = watched
            .iter()
            .cloned()
            .flatten()
            .filter(|&page| self.raised.get(page))
            .map(|page| page..page + 1)
            .collect();
        self.watched = watched;
        for chunk in chunks(&still) {
            let start = cpu_time();
            for run in join_neighbours(&chunk) {
                for range in self.layout.addresses(&run) {
                    self.barrier
                        .lower(&self.userfault, range)
                        .map_err(self.failed("making pages accessible again"))?;
                }
            }
            self.counts.arm_time += cpu_time().saturating_sub(start);
            self.serve(Duration::ZERO, sink)?;
        }
        self.raised.clear();
        self.stuck.clear();
        self.trapped.clear();
        Ok(())
    }

    /// Waits for the period's end; the VM runs free.
    fn rest(&mut self, stop: &AtomicBool, end: Instant) -> Result<(), TrapError> {
        while !stop.load(Ordering::Relaxed) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.serve(left.min(PATIENCE), &mut |_| {})?;
        }
        Ok(())
    }

    fn adapt(&mut self, report: &Period) {
        self.distinct_pages_before = Some(report.distinct_pages).filter(|&pages| pages > 0);
        if report.tracked_pages > 0 {
            let latest = report.arm_time.as_secs_f64() / report.tracked_pages as f64;
            self.arming_seconds_per_page += (latest - self.arming_seconds_per_page) / 4.0;
        }
        let Some(budget) = self.budget_seconds() else {
            return self.rate.adapt(&PeriodCost {
                pressure: 0.0,
                affordable_traps: f64::INFINITY,
                traps: report.traps.taken,
                distinct_pages: report.distinct_pages,
                budget_ran_out: false,
                scale_min: 1,
            });
        };
        let all_traps = (report.traps.taken + report.traps.strays).max(1) as f64;
        let seconds_per_trap = if report.traps.taken == 0 {
            self.trap_cost.whole.as_secs_f64()
        } else {
            report.fault_time.as_secs_f64() / all_traps
        };
        let whole_period = report.length.as_secs_f64() / report.window.as_secs_f64().max(1e-9);
        let arming_seconds = report.populated_pages as f64 * self.arming_seconds_per_page;
        let scale_min = (arming_seconds / (budget * ARMING_SHARE)).clamp(1.0, f64::from(SCALE_MAX));
        self.rate.adapt(&PeriodCost {
            pressure: report.fault_time.as_secs_f64() * whole_period / budget,
            affordable_traps: (budget - report.arm_time.as_secs_f64()).max(0.0) / seconds_per_trap,
            traps: report.traps.taken,
            distinct_pages: report.distinct_pages,
            budget_ran_out: report.budget_exhausted,
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "clamped to 1..=SCALE_MAX"
            )]
            scale_min: scale_min.ceil() as u32,
        });
    }

    fn flush(&mut self, sink: Sink<'_>) {
        if !self.batch.is_empty() {
            sink(&self.batch);
            self.batch.advance();
        }
    }

    /// Removes the traps and ends.
    ///
    /// # Errors
    ///
    /// [`TrapError::Call`] if the kernel does not take the RAM back; closing the descriptor,
    /// which happens all the same, removes every trap.
    pub fn detach(self) -> Result<(), TrapError> {
        match self.userfault.unregister() {
            Err(source) if !ends_soon(self.pidfd.as_fd()) => Err(TrapError::Call {
                pid: self.pid,
                call: "giving its RAM back",
                source,
            }),
            _ => Ok(()),
        }
    }

    fn failed(&self, call: &'static str) -> impl FnOnce(io::Error) -> TrapError + use<B> {
        let pid = self.pid;
        move |source| TrapError::Call { pid, call, source }
    }
}

/// CPU time of the calling thread: what it takes from a vCPU whose CPU it shares. Time in which
/// the host ran something else is not the tracer's.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    // A CPU time is never negative.
    Duration::try_from(time).unwrap_or_default()
}

/// Cuts runs into lists of at most [`CHUNK_PAGES`] pages and [`RANGES_MAX`] runs.
fn chunks(runs: &[PageRange]) -> Vec<Vec<PageRange>> {
    let mut chunks = vec![Vec::new()];
    let mut pages = 0;
    for run in runs {
        let mut rest = run.clone();
        while !rest.is_empty() {
            if pages == CHUNK_PAGES || chunks.last().is_some_and(|chunk| chunk.len() == RANGES_MAX)
            {
                chunks.push(Vec::new());
                pages = 0;
            }
            let cut = rest.end.min(rest.start + CHUNK_PAGES - pages);
            pages += cut - rest.start;
            if let Some(chunk) = chunks.last_mut() {
                chunk.push(rest.start..cut);
            }
            rest.start = cut;
        }
    }
    chunks
}

/// Joins runs that follow each other without a gap.
fn join_neighbours(runs: &[PageRange]) -> Vec<PageRange> {
    let mut joined: Vec<PageRange> = Vec::new();
    for run in runs {
        match joined.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => joined.push(run.clone()),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use plimsoll_skip::{Lack, skip};
    use std::collections::VecDeque;
    use std::fs::File;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::inject::open_pidfd;
    use crate::ram::{Presence, usize_of};
    use crate::sys::{SharedMemory, userfaultfd};

    /// The barrier of a tracer inside its target: `MADV_DONTNEED` on our own memory.
    struct LocalDontneed {
        memory: Arc<SharedMemory>,
        presence: Presence,
        raised: Arc<AtomicBool>,
    }

    impl PageBarrier for LocalDontneed {
        fn raise(&mut self, ranges: &[AddressRange]) -> io::Result<()> {
            ranges
                .iter()
                .try_for_each(|&range| self.memory.dontneed(range))?;
            self.raised.store(true, Ordering::Release);
            Ok(())
        }

        fn for_each_down(
            &mut self,
            range: AddressRange,
            visit: &mut dyn FnMut(u64),
        ) -> io::Result<()> {
            self.presence.for_each_present(range, |page, _| visit(page))
        }

        fn lower(&mut self, userfault: &Userfault, range: AddressRange) -> io::Result<()> {
            userfault.resolve(range)
        }
    }

    const PAGES: usize = 300;

    /// Lets a thread write `pages` in order under a tracer on the very same memory; returns
    /// what the tracer saw and how often each page's counter was raised.
    fn traced(
        config: TraceConfig,
        pages: &[usize],
    ) -> Result<(Vec<u64>, Period, Vec<u64>), TrapError> {
        let pid = std::process::id();
        let missing = |source| TrapError::NoPrivilege {
            what: "trap".to_owned(),
            source,
        };
        let memory = Arc::new(SharedMemory::new(PAGES).map_err(missing)?);
        let layout = RamLayout::new([memory.range()]);
        let file = File::from(memory.file().try_clone_to_owned().map_err(missing)?);
        let raised = Arc::new(AtomicBool::new(false));
        let parts = Parts {
            pidfd: open_pidfd(pid)?,
            populated: Populated::of_file(&layout, file),
            userfault: Userfault::register(userfaultfd().map_err(missing)?, layout.ranges())
                .map_err(missing)?,
            layout,
            barrier: LocalDontneed {
                memory: Arc::clone(&memory),
                presence: Presence::open(pid).map_err(missing)?,
                raised: Arc::clone(&raised),
            },
            trap_cost: TrapCost {
                whole: Duration::ZERO,
                outside_handler: Duration::ZERO,
            },
        };
        let target = TraceTarget {
            pid,
            ram: vec![],
            locked: false,
            vcpu_threads: vec![],
        };
        let mut tracer = Tracer::assemble(&target, config, parts);
        let mut seen = Vec::new();
        let stop = AtomicBool::new(false);
        let report = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !raised.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                for &page in pages {
                    memory.word(page).fetch_add(1, Ordering::Relaxed);
                }
                stop.store(true, Ordering::Relaxed);
            });
            let sink = &mut |batch: &ReferenceBatch| {
                seen.extend(batch.pages().iter().map(|page| page.0));
            };
            tracer.run_period(&stop, sink)
        })?;
        tracer.detach()?;
        let counters = (0..PAGES).map(|page| memory.word(page).load(Ordering::Relaxed));
        Ok((seen, report, counters.collect()))
    }

    /// Which references a queue of hot pages lets through, told without the tracer's means.
    fn misses_of_naive_queue(pages: impl Iterator<Item = u64>, capacity: usize) -> Vec<u64> {
        let mut queue = VecDeque::new();
        let mut misses = Vec::new();
        for page in pages {
            if !queue.contains(&page) {
                misses.push(page);
                queue.push_back(page);
                if queue.len() > capacity {
                    queue.pop_front();
                }
            }
        }
        misses
    }

    fn config(scale: u32, hot_set_pages: u32) -> TraceConfig {
        TraceConfig {
            period: Duration::from_secs(60),
            budget: None,
            scale,
            rate_rule: RateRule::Fixed,
            hot_set_pages,
            group_pages: 2,
            ..TraceConfig::default()
        }
    }

    /// Page numbers that repeat at many distances.
    fn wandering(count: u64) -> Vec<usize> {
        (0..count)
            .map(|step| usize_of(mix(step) % (1 + step % PAGES as u64)))
            .collect()
    }

    #[test]
    fn the_references_are_those_that_miss_a_naive_queue_of_the_sampled_pages() {
        for (scale, hot_set_pages) in [(1, 1), (1, 16), (4, 8), (7, 400)] {
            let pages = wandering(3000);
            let (seen, report, counters) = match traced(config(scale, hot_set_pages), &pages) {
                Ok(traced) => traced,
                Err(TrapError::NoPrivilege { source, .. }) => {
                    skip(
                        Lack::Userfaultfd,
                        format_args!("this process may not trap its own memory: {source}"),
                    );
                    return;
                }
                Err(error) => panic!("{error:?}"),
            };
            let sample = Sample::new(scale, 2, mix(mix(1)));
            let sampled = pages
                .iter()
                .map(|&page| page as u64)
                .filter(|&page| sample.contains(page));
            assert_eq!(seen, misses_of_naive_queue(sampled, hot_set_pages as usize));
            assert_eq!(report.traps.taken, seen.len() as u64);
            assert_eq!(report.traps.writes, report.traps.taken);
            assert_eq!(report.losses, PeriodLosses::default());
            // The traced thread lost nothing of what it wrote.
            let mut expected = vec![0; PAGES];
            pages.iter().for_each(|&page| expected[page] += 1);
            assert_eq!(counters, expected);
        }
    }

    #[test]
    fn runs_are_cut_into_chunks_without_loss() {
        let runs = vec![0..5, 7..2000, 3000..3001];
        let chunks = chunks(&runs);
        let pages = |runs: &[PageRange]| runs.iter().cloned().flatten().collect::<Vec<_>>();
        assert_eq!(
            chunks
                .iter()
                .flat_map(|chunk| pages(chunk))
                .collect::<Vec<_>>(),
            pages(&runs)
        );
        assert!(
            chunks
                .iter()
                .all(|chunk| pages(chunk).len() as u64 <= CHUNK_PAGES)
        );
        assert_eq!(join_neighbours(&[0..1, 1..2, 3..4]), [0..2, 3..4]);
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let refused = |config: TraceConfig| config.check().unwrap_err().to_string();
        let default = TraceConfig::default;
        assert!(
            refused(TraceConfig {
                budget: Some(f64::NAN),
                ..default()
            })
            .contains("budget")
        );
        assert!(
            refused(TraceConfig {
                scale: 0,
                ..default()
            })
            .contains("tracking rate")
        );
        assert!(
            refused(TraceConfig {
                hot_set_pages: 5000,
                ..default()
            })
            .contains("hot set")
        );
        assert!(
            refused(TraceConfig {
                group_pages: 0,
                ..default()
            })
            .contains("group")
        );
        assert!(
            refused(TraceConfig {
                period: Duration::ZERO,
                ..default()
            })
            .contains("period")
        );
    }
}
