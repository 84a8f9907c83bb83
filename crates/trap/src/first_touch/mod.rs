//! First touches: random pages are made inaccessible, each until its next access, which traps and is its only one.
//!
//! ```text
//!   draw ─> arm ──> waiting ──> first touch: traps, the page is accessible for good
//!                         └───> withdrawn untouched: too old, or traps are over the budget
//! ```
//!
//! Pages are drawn from the whole RAM, at the times of a Poisson stream in the VM's CPU time, at the rate that the time budget
//! pays for (`pace`). A page without contents is counted, and another is drawn. The result is the time from a random time
//! to the next touch of a random page, for always new pages (`sampler`): one trap a sample, whatever the VM's size and speed.
//!
//! A thread of its own draws and serves, from attaching to detaching, so that nothing that happens between two periods or in
//! an estimator keeps an access waiting. As long as an access can wait, it waits for no other thread, and the watchdog
//! guards it: reports leave it by a channel, requests reach it as flags.
//!
//! A page without contents has no minor fault, and gets its contents without a trap. So pages that lose theirs while
//! they wait (a balloon, free page reporting, unplugged memory) are found by a check of each waiting page, once a minute
//! and before the RAM is free, and end untouched at the check before.
//!
//! From the end of a period's window to the next period the RAM is registered with no userfaultfd, so that QEMU can register
//! it (`TracedProcess::window_end`). Pages stay unmapped meanwhile; those that were touched are found mapped
//! afterwards, and their touches lie between two known times. Where so many pages wait that checking them is dear, the RAM
//! stays registered for some periods.
//!
//! Not here: curves (crate `plimsoll-estimator`).

mod computed;
mod computed_time;
mod pace;
mod replayed;
mod sampler;
#[cfg(test)]
mod tests;
mod vm;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use plimsoll_flow::{FirstTouches, Period, TraceMethod};

use crate::account::TrapAccount;
use crate::backend::{Backend, BackendRow, Observation, Sink, Yield};
use crate::barrier::PageBarrier;
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::placement::HandlerCpu;
use crate::process::{Session, TracedProcess, cpu_time};
use crate::rate::RateRule;
use crate::requirement::Requirement;
use crate::target::TraceTarget;
use crate::trial::{TouchCost, measure_trap_cost};
use crate::uffd::UserfaultPurpose;
use crate::watchdog;

pub use computed::{ComputedSampler, ComputedVm, PageClass};
use pace::Pace;
pub(crate) use replayed::replayed_touches;
use sampler::{Report, SampledVm as _, Sampler};
use vm::TrappedVm;

/// Number of periods in which the CPU time of an estimator is paid back; more is never charged.
const PAID_BACK_MAX: u32 = 16;
/// Longest wait without checking the stop flag.
const PATIENCE: Duration = Duration::from_millis(50);

/// Number of samples for a curve with an error below [`CURVE_ERROR`](crate::CURVE_ERROR), CPU time besides the trap for
/// each, and CPU time for a curve, as measured (docs/performance.md).
const SAMPLES_PER_CURVE: u32 = 200;
const ARMING: Duration = Duration::from_micros(200);
const ESTIMATE: Duration = Duration::from_millis(10);

/// The backend `first-touch`.
pub const ROW: BackendRow = BackendRow {
    method: TraceMethod::FirstTouches,
    sees: "First touches: the time from a random time to the next touch of a random page, for VMs of any size and speed",
    needs: "userfaultfd minor faults (Linux 6.1); shared RAM, neither locked nor swappable",
    costs: "one trap and one arming per sampled page, 60 to 250 µs in all, within the time budget",
    loses: "the order of accesses, pages without contents",
    yields: Yield::FirstTouches,
    sees_reads: true,
    options: &[],
    rate_rules: &[RateRule::Fixed, RateRule::Budget],
    requirements: |_| Requirement::OF_TRAPS,
    trial: |toucher| measure_trap_cost(HandlerCpu::Follow, toucher).map(|cost| cost.whole),
    curve_cost: Some(|trap| (trap + ARMING) * SAMPLES_PER_CURVE + ESTIMATE),
    attach: |target, config| Ok(Box::new(FirstTouchSampler::attach(target, config)?)),
    any_process: false,
    group: None,
};

/// Requests to the thread that serves.
#[derive(Debug, Default)]
struct Requests {
    /// The window has ended.
    report: AtomicBool,
    /// The next period has begun.
    go_on: AtomicBool,
    end: AtomicBool,
    /// CPU time that others spent for this backend, in nanoseconds.
    charged_ns: AtomicU64,
}

/// A period as the thread that serves reports it.
#[derive(Debug)]
struct ServedPeriod {
    report: Report,
    fault_time: Duration,
    arm_time: Duration,
    trap_cost: Duration,
}

/// A VM whose first touches are observed. Dropped, it removes its traps.
#[derive(Debug)]
struct FirstTouchSampler {
    pid: u32,
    vcpus: usize,
    ram_pages: u64,
    config: TraceConfig,
    /// Half of a period's budget.
    charge_max: Duration,
    cost: TouchCost,
    requests: Arc<Requests>,
    reports: Receiver<ServedPeriod>,
    /// `None` once it has ended.
    server: Option<JoinHandle<Result<(), TrapError>>>,
    /// CPU time of the thread that runs periods, at the end of the last one.
    cpu_time: Option<Duration>,
    /// CPU time of the estimator that was not charged yet.
    owed: Duration,
    periods: u64,
}

impl FirstTouchSampler {
    fn attach(target: &TraceTarget, config: &TraceConfig) -> Result<Self, TrapError> {
        let mut session = Session::open(target, config)?;
        let (account, toucher) = TrapAccount::measure(target, config)?;
        session.process.start_watchdog()?;
        let userfault =
            session
                .process
                .userfault(config, UserfaultPurpose::Minor, session.layout.ranges())?;
        let cost = TouchCost {
            time: account.trap_cost(),
            toucher,
        };
        let open = move || TrappedVm::new(session, userfault, account);
        Self::start(target, config, cost, open)
    }

    /// Starts the thread that serves the VM that `open` returns.
    fn start<B: PageBarrier + std::fmt::Debug + Send + 'static>(
        target: &TraceTarget,
        config: &TraceConfig,
        cost: TouchCost,
        open: impl FnOnce() -> TrappedVm<B> + Send + 'static,
    ) -> Result<Self, TrapError> {
        let (requests, (sender, reports)) = (Arc::<Requests>::default(), mpsc::channel());
        let layout = target.layout();
        let (vcpus, ram_pages) = (target.vcpus(), layout.pages());
        let per_second = config.budget.map(|budget| budget * vcpus as f64);
        let fixed = (config.rate_rule == RateRule::Fixed)
            .then(|| ram_pages as f64 / f64::from(config.scale) / config.period.as_secs_f64());
        let (seed, requested) = (config.seed, Arc::clone(&requests));
        let serve = move || {
            // A VM waits for this thread.
            let _ = watchdog::raise_priority();
            let vm = open();
            let begin = (vm.now(), vm.vm_time());
            let pace = Pace::new(per_second, fixed, vm.trap_cost(), seed, begin);
            serve(Sampler::new(vm, pace, seed), &requested, &sender)
        };
        let server = thread::Builder::new().name("first-touch".to_owned());
        let server = server.spawn(serve).map_err(|source| TrapError::Call {
            pid: target.pid,
            call: "starting a thread",
            source,
        })?;
        Ok(Self {
            pid: target.pid,
            vcpus,
            ram_pages,
            config: config.clone(),
            charge_max: per_second
                .map_or(Duration::ZERO, |budget| config.period.mul_f64(budget / 2.0)),
            cost,
            requests,
            reports,
            server: Some(server),
            cpu_time: None,
            owed: Duration::ZERO,
            periods: 0,
        })
    }

    /// Waits until `end` of the window or `stop`, and then for the report.
    fn wait(&mut self, stop: &AtomicBool, end: Instant) -> Result<ServedPeriod, TrapError> {
        let mut is_requested = false;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            // Once: a second report would be taken for that of the next period.
            if !is_requested && (left.is_zero() || stop.load(Ordering::Relaxed)) {
                is_requested = true;
                self.requests.report.store(true, Ordering::Release);
            }
            match self
                .reports
                .recv_timeout(left.min(PATIENCE).max(Duration::from_millis(1)))
            {
                Ok(served) => return Ok(served),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    self.end()?;
                    return Err(TrapError::VmGone { pid: self.pid });
                }
            }
        }
    }

    /// Ends the thread that serves; returns its error.
    fn end(&mut self) -> Result<(), TrapError> {
        self.requests.end.store(true, Ordering::Release);
        let Some(server) = self.server.take() else {
            return Ok(());
        };
        server.thread().unpark();
        server.join().unwrap_or_else(|_| {
            Err(TrapError::Call {
                pid: self.pid,
                call: "sampling its pages",
                source: io::Error::other("the thread that serves it panicked"),
            })
        })
    }
}

/// Samples and serves until it is requested to end.
fn serve<B: PageBarrier + std::fmt::Debug>(
    mut sampler: Sampler<TrappedVm<B>>,
    requests: &Requests,
    reports: &Sender<ServedPeriod>,
) -> Result<(), TrapError> {
    sampler.vm.guard()?;
    while !requests.end.load(Ordering::Acquire) {
        if requests.report.swap(false, Ordering::AcqRel) {
            requests.go_on.store(false, Ordering::Release);
            let rest = free(&mut sampler)?;
            // Without a receiver the end has been requested.
            let _ = reports.send(report(&mut sampler)?);
            if let Some(from) = rest {
                let is_over = || {
                    requests.go_on.load(Ordering::Acquire) || requests.end.load(Ordering::Acquire)
                };
                while !is_over() {
                    thread::park_timeout(PATIENCE);
                }
                if requests.end.load(Ordering::Acquire) {
                    break;
                }
                let by = sampler.vm.take_back()?;
                sampler.find_touched(from, by)?;
            }
        }
        let charged = requests.charged_ns.swap(0, Ordering::AcqRel);
        match sampler.turn(Duration::from_nanos(charged)) {
            Err(TrapError::VmGone { pid }) => {
                // The observations stay valid; the next period reports that the VM is gone.
                if let Ok(served) = report(&mut sampler) {
                    let _ = reports.send(served);
                }
                return Err(TrapError::VmGone { pid });
            }
            other => other?,
        }
    }
    sampler.vm.release()
}

/// Registers the RAM with no userfaultfd, if the budget allows the checks before and after; returns since when.
fn free<B: PageBarrier + std::fmt::Debug>(
    sampler: &mut Sampler<TrappedVm<B>>,
) -> Result<Option<Duration>, TrapError> {
    if !sampler.affords_rest() {
        return Ok(None);
    }
    sampler.end_vanished()?;
    sampler.vm.free().map(Some)
}

fn report<B: PageBarrier + std::fmt::Debug>(
    sampler: &mut Sampler<TrappedVm<B>>,
) -> Result<ServedPeriod, TrapError> {
    Ok(ServedPeriod {
        report: sampler.report()?,
        fault_time: sampler.vm.settle()?,
        arm_time: std::mem::take(&mut sampler.vm.arm_time),
        trap_cost: sampler.vm.trap_cost(),
    })
}

/// Passes the samples of a period on.
fn observe(report: &Report, sink: Sink<'_>) {
    sink(&Observation::FirstTouches {
        samples: FirstTouches {
            ended: &report.ended,
            waiting: &report.waiting,
            from: report.from,
            now: report.now,
            population_pages: report.populated_pages,
        },
        touched: &report.touched,
    });
}

fn period_of(served: &ServedPeriod, index: u64, length: Duration, vcpus: usize) -> Period {
    let report = &served.report;
    let taken = served.fault_time + served.arm_time;
    let tracked_pages = report.samples.waiting + report.ended.len() as u64;
    let scale = report.populated_pages.div_ceil(tracked_pages.max(1)).max(1);
    Period {
        index,
        scale: u32::try_from(scale).unwrap_or(u32::MAX),
        populated_pages: report.populated_pages,
        tracked_pages,
        distinct_pages: report.samples.touched,
        traps: report.traps,
        samples: report.samples,
        rearmed_pages: report.armed_pages,
        fault_time: served.fault_time,
        arm_time: served.arm_time,
        overhead_ratio: taken.as_secs_f64() / (length.as_secs_f64() * vcpus as f64),
        budget_exhausted: report.is_overdrawn,
        losses: report.losses,
        ..Period::empty(TraceMethod::FirstTouches, length, length)
    }
}

impl Backend for FirstTouchSampler {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let start = Instant::now();
        // Since the last period this thread estimated.
        let estimating = self
            .cpu_time
            .map_or(Duration::ZERO, |before| cpu_time().saturating_sub(before));
        // An estimator that takes more than the budget is reported, and must not end the sampling: what it took is
        // paid back in this period and the next ones.
        self.owed = (self.owed + estimating).min(self.charge_max * PAID_BACK_MAX);
        let charged = self.owed.min(self.charge_max);
        self.owed -= charged;
        let charged_ns = u64::try_from(charged.as_nanos()).unwrap_or(u64::MAX);
        self.requests
            .charged_ns
            .fetch_add(charged_ns, Ordering::AcqRel);
        self.requests.go_on.store(true, Ordering::Release);
        if let Some(server) = &self.server {
            server.thread().unpark();
        }
        let cpu = cpu_time();
        let mut served = self.wait(stop, TracedProcess::window_end(&self.config, start))?;
        let end = start + self.config.period;
        while !stop.load(Ordering::Relaxed) && Instant::now() < end {
            thread::sleep(end.saturating_duration_since(Instant::now()).min(PATIENCE));
        }
        served.arm_time += estimating;
        self.cost.time = served.trap_cost;
        observe(&served.report, sink);
        let period = period_of(&served, self.periods, start.elapsed(), self.vcpus);
        self.periods += 1;
        self.cpu_time = Some(cpu);
        Ok(period)
    }

    fn detach(mut self: Box<Self>) -> Result<(), TrapError> {
        match self.end() {
            // There is nothing left to restore.
            Err(TrapError::VmGone { .. }) => Ok(()),
            other => other,
        }
    }

    fn touch_cost(&self) -> TouchCost {
        self.cost
    }

    fn ram_pages(&self) -> u64 {
        self.ram_pages
    }
}

impl Drop for FirstTouchSampler {
    fn drop(&mut self) {
        // An error has been reported by then, or the VM is restored all the same.
        let _ = self.end();
    }
}
