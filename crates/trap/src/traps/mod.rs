//! Traps: every access to a sampled page, in order, \[AET\] §3.
//!
//! ```text
//!   period:  collect ─> arm ──> window: trap ... trap ──> disarm ─> rest ─> adapt the rate
//!                        │               │  ▲
//!                sampled pages     enters hot set, the set's head
//!                inaccessible      is made inaccessible in its place
//! ```
//!
//! Each period a new sample of pages is made inaccessible. The first access to one
//! traps and is recorded as a reference, and the page stays accessible as a member of
//! the hot set until as many other pages have trapped as the set holds. The result
//! is the sequence of references that miss a queue of `hot_set_pages`
//! sampled pages: it resolves memory sizes above `hot_set_pages * scale` pages.
//!
//! When the traps of a period have used up the period's time budget the window closes: all pages
//! are accessible until the next period. A window that closed early is as exact about the
//! references in it; there are only fewer.
//!
//! The RAM is registered with the userfaultfd only while a window is open. Between two windows nothing can trap, and
//! QEMU can register the RAM itself.
//!
//! Files: `arm` makes pages inaccessible and accessible, `serve` answers the accesses that trap, `control` follows the
//! VM, `replayed` traps a computed one.
//! Not here: curves and working sets (crate `plimsoll-estimator`), finding VMs (`plimsoll-vm`).

mod arm;
mod control;
mod replayed;
mod serve;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::{Period, PeriodLosses, ReferenceBatch, TraceMethod, TrapCounts};

use crate::account::TrapAccount;
use crate::backend::{Backend, BackendRow, Observation, Sink, Yield};
use crate::barrier::{PageBarrier, RemotePageout};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::hot_set::{HotSet, PageBits};
use crate::placement::HandlerCpu;
use crate::process::{Population, Session, TracedProcess};
use crate::progress::Progress;
use crate::ram::PageRange;
use crate::rate::RateRule;
use crate::requirement::Requirement;
use crate::sample::Sample;
use crate::target::TraceTarget;
use crate::trial::{TouchCost, Toucher, measure_trap_cost};
use crate::uffd::{Fault, Userfault, UserfaultPurpose};
use control::TrapControl;

pub(crate) use replayed::ReplayedTraps;

/// Longest wait without checking the stop flag and the clock.
const PATIENCE: Duration = Duration::from_millis(50);
/// Number of traps for a curve with an error of [`CURVE_ERROR`](crate::CURVE_ERROR): more than the most that were measured
/// (docs/performance.md).
const TRAPS_PER_CURVE: u32 = 4200;

/// The backend `trap`.
pub const ROW: BackendRow = BackendRow {
    method: TraceMethod::Traps,
    sees: "Traps: every access to a sampled page that is not in the hot set, in order",
    needs: "userfaultfd minor faults (Linux 6.1); shared RAM, neither locked nor swappable",
    costs: "10 to 60 µs of the VM's time per trap, under KVM 100 µs or more where wake-ups are slow; within the time budget",
    loses: "accesses to pages in the hot set, first touches of pages without contents",
    yields: Yield::References,
    sees_reads: true,
    options: &["--hot-set", "--group", "--least-pages"],
    rate_rules: &[
        RateRule::Fixed,
        RateRule::Linear,
        RateRule::Log,
        RateRule::Budget,
    ],
    requirements: |_| Requirement::OF_TRAPS,
    trial: |toucher| measure_trap_cost(HandlerCpu::Follow, toucher).map(|cost| cost.whole),
    curve_cost: Some(|trap| trap * TRAPS_PER_CURVE),
    attach: |target, config| Ok(Box::new(Tracer::attach(target, config)?)),
    any_process: false,
    group: None,
};

/// A VM whose RAM is being traced. Dropped, it removes its traps.
#[derive(Debug)]
struct Tracer<B: PageBarrier = RemotePageout> {
    session: Session<B>,
    userfault: Userfault,
    config: TraceConfig,
    control: TrapControl,
    account: TrapAccount,
    progress: Progress,
    toucher: Toucher,
    /// The populated pages of the current sample, as runs.
    watched: Vec<PageRange>,
    sample: Sample,
    recording: bool,
    /// Whether all of the sample has been made inaccessible.
    is_armed: bool,
    hot: HotSet,
    /// Number of pages made inaccessible and not known to be accessible again.
    raised: PageBits,
    /// Pages that left the hot set and could not be made inaccessible yet.
    stuck: Vec<u64>,
    /// Pages that trapped in this window.
    trapped: PageBits,
    batch: ReferenceBatch,
    faults: Vec<Fault>,
    periods: u64,
    /// How long it takes to make one page inaccessible when that is fast.
    rearming: Duration,
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

impl Tracer<RemotePageout> {
    fn attach(target: &TraceTarget, config: &TraceConfig) -> Result<Self, TrapError> {
        let mut session = Session::open(target, config)?;
        let (account, toucher) = TrapAccount::measure(target, config)?;
        let userfault =
            session
                .process
                .userfault(config, UserfaultPurpose::Minor, session.layout.ranges())?;
        // Until the first window.
        session.process.unregister(&userfault)?;
        session.process.start_watchdog()?;
        Ok(Self::assemble(session, userfault, account, toucher, config))
    }
}

impl<B: PageBarrier> Tracer<B> {
    fn assemble(
        session: Session<B>,
        userfault: Userfault,
        account: TrapAccount,
        toucher: Toucher,
        config: &TraceConfig,
    ) -> Self {
        let pages = session.ram_pages();
        let progress = Progress::new(session.process.pid, account.running());
        Self {
            session,
            userfault,
            progress,
            control: TrapControl::new(config),
            account,
            toucher,
            watched: Vec::new(),
            sample: Sample::new(config.scale, config.group_pages, 0),
            recording: false,
            is_armed: false,
            hot: HotSet::new(config.hot_set_pages as usize, pages),
            raised: PageBits::new(pages),
            stuck: Vec::new(),
            trapped: PageBits::new(pages),
            batch: ReferenceBatch::new(),
            faults: Vec::new(),
            periods: 0,
            rearming: Duration::from_micros(20),
            counts: Counts::default(),
            config: config.clone(),
        }
    }

    fn trace(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let start = Instant::now();
        let end = start + self.config.period;
        let scale = self.control.scale();
        self.counts = Counts::default();
        self.session.follow_vcpu();
        let hot_set_pages = self.control.hot_set_pages(&self.config);
        self.hot.restart(hot_set_pages);
        let population = self.collect(scale)?;

        let window_start = Instant::now();
        let window_end = TracedProcess::window_end(&self.config, start);
        self.session.process.register(&self.userfault)?;
        self.recording = true;
        self.progress.opens();
        let guarded = self.session.process.guard();
        let armed = guarded.and_then(|()| self.arm(stop, sink));
        self.account.window_begins();
        self.is_armed = true;
        self.progress.observes(self.counts.traps.taken);
        let watched = armed.and_then(|()| self.watch(stop, window_end, sink));
        self.account.window_ends();
        self.progress.closes();
        let window = window_start.elapsed();
        (self.recording, self.is_armed) = (false, false);
        let rested = watched.and_then(|budget_exhausted| {
            // A VM that is to be left at once maps its pages itself.
            if !stop.load(Ordering::Relaxed) {
                self.disarm(sink)?;
            }
            let process = &self.session.process;
            process.unregister(&self.userfault)?;
            process.unguard();
            self.progress.rests();
            process.rest(stop, end);
            self.progress.rested();
            self.raised.clear();
            self.stuck.clear();
            self.trapped.clear();
            self.flush(sink);
            Ok(budget_exhausted)
        });
        let budget_exhausted = match rested {
            // The observations stay valid; the next period reports that the VM is gone.
            Err(TrapError::VmGone { .. }) if self.counts.traps.taken > 0 => false,
            other => other?,
        };

        self.counts.fault_time = self.account.settle();
        let mut undisturbed = self.progress.settle(self.account.trap_cost());
        if !self.hot.is_full() {
            // None of them would miss in a memory as large as the hot set.
            undisturbed.references_before = self.counts.traps.taken;
        }
        let tracked_pages = self.watched.iter().map(|run| run.end - run.start).sum();
        let length = start.elapsed();
        let taken = self.counts.fault_time + self.counts.arm_time;
        let period = Period {
            index: self.periods,
            undisturbed,
            scale,
            populated_pages: population.pages,
            tracked_pages,
            distinct_pages: self.counts.distinct_pages,
            traps: TrapCounts {
                hot_set_pages,
                ..self.counts.traps
            },
            rearmed_pages: self.counts.rearmed_pages,
            fault_time: self.counts.fault_time,
            arm_time: self.counts.arm_time,
            collect_time: population.time,
            overhead_ratio: self.session.process.overhead_ratio(taken, length),
            budget_exhausted,
            losses: PeriodLosses {
                first_touches_unseen: population.new_pages,
                ..self.counts.losses
            },
            ..Period::empty(TraceMethod::Traps, length, window)
        };
        self.periods += 1;
        let budget = self.session.process.budget_seconds(&self.config);
        let trap_cost = self.account.trap_cost().as_secs_f64();
        self.control.adapt(&period, budget, trap_cost);
        Ok(period)
    }

    /// Phase 3: finds the populated pages and draws this period's sample of them.
    fn collect(&mut self, scale: u32) -> Result<Population, TrapError> {
        self.sample = Sample::of_period(
            scale,
            self.config.group_pages,
            self.config.seed,
            self.periods,
        );
        self.watched.clear();
        let (sample, watched) = (self.sample, &mut self.watched);
        self.session
            .collect(|run| watched.extend(sample.runs_in(run)))
    }

    fn flush(&mut self, sink: Sink<'_>) {
        if !self.batch.is_empty() {
            sink(&Observation::References(&self.batch));
            self.batch.advance();
        }
    }
}

impl<B: PageBarrier + std::fmt::Debug + Send> Backend for Tracer<B> {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        self.session.process.check_alive()?;
        let period = self.trace(stop, sink);
        self.flush(sink);
        period
    }

    fn touch_cost(&self) -> TouchCost {
        TouchCost {
            time: self.account.trap_cost(),
            toucher: self.toucher,
        }
    }

    fn ram_pages(&self) -> u64 {
        self.session.ram_pages()
    }
}
