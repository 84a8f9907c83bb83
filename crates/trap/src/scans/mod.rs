//! Accessed-page scans: which sampled pages of a running VM were mapped again since they were unmapped.
//!
//! ```text
//!   period:  collect ─> unmap ─> window: scan, scan, ... scan ─> rest ─> adapt rate and interval
//!                                          │
//!                          pages found mapped were touched since the scan before:
//!                          passed on, and unmapped again
//! ```
//!
//! No trap, no userfaultfd, no injection, no stop: a touch costs the VM one ordinary minor fault, a tenth of a
//! trap. The result is not a sequence of references; of each page it is known between which scans it was
//! touched: *interval-censored* reuse times. One sample is kept for the whole window, so that a page is observed
//! repeatedly; the next period draws another.
//!
//! One page in `scale` is tracked, in strata as the traps' sample (`sample.rs`). The scale is a
//! multiple of 16 pages, so that no two tracked pages lie in one window of fault-around (`process.rs`), and only
//! its own access maps a page.
//!
//! **Interval.** The order of touches within an interval is unknown, so it must be short compared to the time in which
//! the VM returns to its pages. It follows the VM: about an eighth of the pages that a window observes in total should
//! be found touched by one scan. It is measured in CPU time of the VM's process: a VM that waits, or for which its host
//! has no time, touches nothing.
//! **Rate.** The time budget closes a window, as with traps; the rate is set so that the budget
//! pays for [`control::SCANS_WANTED`] scans.
//! **Writes** are distinguished on request by asynchronous write protection of the tracked pages
//! (`uffd`), which takes a userfaultfd by injection.
//!
//! Cost: a minor fault of the VM for each page found touched (measured when attaching; a second one if it was
//! written and writes are distinguished), and the CPU time of scanning and unmapping, as the scanner runs on its vCPU's
//! CPU. The scheduler may move the vCPU to an idle CPU meanwhile: then each page unmapped interrupts it, which costs it several
//! times the fault (20 to 30 µs in a nested VM). The share of its CPU time that it loses while pages are unmapped is measured on
//! attaching, and counted. Under KVM a fault costs a violation of the second-level
//! table as well, which is not in that account.
//!
//! Not here: curves and working sets.

pub mod control;
mod replayed;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::{
    AccessKind, PageNumber, Period, PeriodLosses, ReferenceBatch, ScanCounts, TraceMethod,
};

use crate::backend::{Backend, BackendRow, Observation, Scan, Sink, Yield};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::hot_set::PageBits;
use crate::process::{Population, Session, WINDOW_PAGES, cpu_time};
use crate::progress::Progress;
use crate::rate::RateRule;
use crate::requirement::Requirement::{
    Injection, NoSwap, NoUserfault, PageAccess, SharedRam, Unlocked,
};
use crate::sample::Sample;
use crate::target::TraceTarget;
use crate::trial::{TouchCost, measure_fault_cost, measure_interruption};
use crate::uffd::{Userfault, UserfaultPurpose};

use control::{ScanControl, WindowCost};

pub(crate) use replayed::ReplayedScans;

/// Longest wait without checking the stop flag.
const PATIENCE: Duration = Duration::from_millis(50);
/// Shortest wait for the VM to make progress.
const NAP_MIN: Duration = Duration::from_micros(200);
/// Number of pages scanned before those found are unmapped again: touches between the two are missed.
const CHUNK_PAGES: usize = 64;
/// Minimum number of scans in a window, whatever they cost: one alone sees no reuse.
const SCANS_MIN: u64 = 3;
/// Number of touches found for a curve with an error of [`CURVE_ERROR`](crate::CURVE_ERROR), and the CPU
/// time of the scanner for each, as measured (docs/performance.md).
const TOUCHES_PER_CURVE: u32 = 17_000;
const SCANNING_PER_TOUCH: Duration = Duration::from_micros(7);

/// The backend `scan`.
pub const ROW: BackendRow = BackendRow {
    method: TraceMethod::AccessedPageScans,
    sees: "Accessed-page scans: which sampled pages were touched between two scans; cheaper, and needs no userfaultfd",
    needs: "process_madvise (Linux 5.10) and pagemap; shared RAM, neither locked nor swappable",
    costs: "a minor fault per page touched between two scans, and an interrupt of vCPUs on other CPUs, within the time budget",
    loses: "the order of touches within a scan interval",
    yields: Yield::Scans,
    sees_reads: true,
    options: &["--scan-interval", "--writes"],
    rate_rules: &[RateRule::Fixed, RateRule::Budget],
    requirements: |config| {
        if config.writes {
            &[
                SharedRam,
                Unlocked,
                NoSwap,
                PageAccess,
                NoUserfault,
                Injection,
            ]
        } else {
            &[SharedRam, Unlocked, NoSwap, PageAccess]
        }
    },
    trial: measure_fault_cost,
    curve_cost: Some(|fault| (fault + SCANNING_PER_TOUCH) * TOUCHES_PER_CURVE),
    attach: |target, config| Ok(Box::new(AccessedPageScanner::attach(target, config)?)),
    any_process: false,
    group: None,
};

/// A VM whose pages are scanned. Dropped, it leaves only unmapped pages, which the VM maps again when it needs them.
#[derive(Debug)]
struct AccessedPageScanner {
    session: Session,
    writes: Option<Userfault>,
    config: TraceConfig,
    control: ScanControl,
    touch_cost: TouchCost,
    /// Share of its CPU time that a vCPU on another CPU loses while pages are unmapped.
    interruption: f64,
    progress: Progress,
    /// The sample's populated pages, ascending.
    watched: Vec<u64>,
    /// Those of them that were touched in this window.
    touched: PageBits,
    batch: ReferenceBatch,
    periods: u64,
}

/// Counters of the current window.
#[derive(Debug, Default)]
struct Window {
    scans: u64,
    touches: u64,
    writes: u64,
    distinct_pages: u64,
    /// Pages found by the last scan.
    last_touches: u64,
    dropped_pages: u64,
    arm_time: Duration,
    scan_time: Duration,
    /// CPU time that interrupts took of the VM.
    interrupted: Duration,
    length: Duration,
    /// CPU time of the VM's process in it.
    cpu_time: Duration,
    budget_ran_out: bool,
}

impl AccessedPageScanner {
    fn attach(target: &TraceTarget, config: &TraceConfig) -> Result<Self, TrapError> {
        let mut session = Session::open(target, config)?;
        let touch_cost = TouchCost::measure(target.pid, measure_fault_cost)?;
        let interruption = measure_interruption()?;
        let writes = config.writes.then(|| {
            let purpose = UserfaultPurpose::AsyncWriteProtect;
            session
                .process
                .userfault(config, purpose, session.layout.ranges())
        });
        Ok(Self {
            writes: writes.transpose()?,
            control: ScanControl::new(
                config.rate_rule,
                config.scale,
                config.scan_interval,
                config.period,
                WINDOW_PAGES,
            ),
            touch_cost,
            interruption,
            progress: Progress::new(session.process.pid, touch_cost.time),
            watched: Vec::new(),
            touched: PageBits::new(session.ram_pages()),
            batch: ReferenceBatch::new(),
            periods: 0,
            config: config.clone(),
            session,
        })
    }

    /// Finds the populated pages and draws this period's sample of them.
    fn collect(&mut self, scale: u32) -> Result<Population, TrapError> {
        let sample = Sample::of_period(scale, 1, self.config.seed, self.periods);
        // Strata are whole windows, also where the RAM begins within one.
        let shift = self.session.place_in_window(0);
        let mut watched = std::mem::take(&mut self.watched);
        watched.clear();
        let population = self.session.collect(|run| {
            let pages = sample.runs_in(run.start + shift..run.end + shift).flatten();
            watched.extend(pages.map(|page| page - shift));
        })?;
        // A second mapping could begin elsewhere in a window.
        watched.dedup_by_key(|&mut page| self.session.window_of(page));
        self.watched = watched;
        Ok(population)
    }

    /// Unmaps the sample; returns how many pages of it stay mapped.
    fn arm(&mut self, window: &mut Window) -> Result<u64, TrapError> {
        let start = cpu_time();
        let before = self.vm_time();
        let watched = std::mem::take(&mut self.watched);
        let mut stayed = 0;
        for pages in watched.chunks(CHUNK_PAGES) {
            self.protect(pages)?;
            stayed += self.session.unmap_firmly(pages)?;
        }
        let tried = watched.len() as u64;
        self.watched = watched;
        window.dropped_pages += tried;
        self.account_for_interrupts(window, before);
        window.arm_time = cpu_time().saturating_sub(start);
        Ok(stayed)
    }

    /// Protects pages against writes, if those are distinguished.
    fn protect(&self, pages: &[u64]) -> Result<(), TrapError> {
        let Some(userfault) = &self.writes else {
            return Ok(());
        };
        for &page in pages {
            for range in self.session.layout.addresses(&(page..page + 1)) {
                userfault
                    .protect(range)
                    .map_err(self.session.process.failed("write-protecting pages"))?;
            }
        }
        Ok(())
    }

    /// Scans again and again until the period ends, its budget is used up, or `stop`.
    fn watch(
        &mut self,
        stop: &AtomicBool,
        end: Instant,
        window: &mut Window,
        sink: Sink<'_>,
    ) -> Result<(), TrapError> {
        let start = Instant::now();
        let begin = self.session.process.cpu_time()?;
        let mut from = Duration::ZERO;
        loop {
            let due = begin + from + self.control.interval();
            let mut now = self.session.process.cpu_time()?;
            let mut nap = NAP_MIN;
            while now < due && !stop.load(Ordering::Relaxed) {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let sooner =
                    (due - now) / u32::try_from(self.session.process.vcpus).unwrap_or(u32::MAX);
                std::thread::sleep(sooner.max(nap).min(PATIENCE).min(left));
                let before = std::mem::replace(&mut now, self.session.process.cpu_time()?);
                // A VM that sleeps is polled ever more rarely.
                nap = if now > before {
                    NAP_MIN
                } else {
                    (nap * 2).min(PATIENCE)
                };
            }
            let spent = |window: &Window| {
                let taken = self.fault_time(window) + window.arm_time + window.scan_time;
                let next = window.scan_time.as_secs_f64() / window.scans.max(1) as f64;
                let budget = self.session.process.budget_seconds(&self.config);
                budget.is_some_and(|budget| taken.as_secs_f64() + next >= budget)
            };
            window.budget_ran_out = window.scans + 1 >= SCANS_MIN && spent(window);
            let is_last =
                window.budget_ran_out || stop.load(Ordering::Relaxed) || Instant::now() >= end;
            self.session.follow_vcpu();
            let to = (now.saturating_sub(begin)).max(from + Duration::from_micros(1));
            self.scan(window, is_last)?;
            window.length = start.elapsed();
            window.cpu_time = to;
            sink(&Observation::Scan(Scan {
                from,
                to,
                touched: &self.batch,
            }));
            from = to;
            if is_last {
                return Ok(());
            }
        }
    }

    /// Collects the pages that are mapped, and unmaps them again unless this scan is the last.
    fn scan(&mut self, window: &mut Window, is_last: bool) -> Result<(), TrapError> {
        let start = cpu_time();
        self.batch.advance();
        let watched = std::mem::take(&mut self.watched);
        let scanned = watched
            .chunks(CHUNK_PAGES)
            .try_for_each(|pages| self.scan_chunk(pages, window, is_last));
        self.watched = watched;
        let pages = self.batch.pages();
        window.scans += 1;
        window.last_touches = pages.len() as u64;
        window.touches += pages.len() as u64;
        let writes = self.batch.kinds().iter();
        window.writes += writes.filter(|&&kind| kind == AccessKind::Write).count() as u64;
        self.progress.trapped(pages.len() as u64);
        for page in pages {
            window.distinct_pages += u64::from(self.touched.set(page.0, true));
        }
        window.scan_time += cpu_time().saturating_sub(start);
        scanned
    }

    fn scan_chunk(
        &mut self,
        pages: &[u64],
        window: &mut Window,
        is_last: bool,
    ) -> Result<(), TrapError> {
        let has_kinds = self.writes.is_some();
        let (mut mapped_pages, mut written) = (Vec::new(), Vec::new());
        let batch = &mut self.batch;
        self.session.for_each_mapped(pages, |page, mapped| {
            let kind = match (has_kinds, mapped.unprotected) {
                (false, _) => AccessKind::Unknown,
                (true, false) => AccessKind::Read,
                (true, true) => AccessKind::Write,
            };
            batch.push(PageNumber(page), kind);
            mapped_pages.push(page);
            if kind == AccessKind::Write {
                written.push(page);
            }
        })?;
        if is_last {
            return Ok(());
        }
        // In this order: an unmapped page keeps its protection in a marker.
        self.protect(&written)?;
        window.dropped_pages += mapped_pages.len() as u64;
        let before = self.vm_time();
        self.session.unmap(&mapped_pages)?;
        self.account_for_interrupts(window, before);
        Ok(())
    }

    /// Accounts for the interrupts of the vCPUs that ran while pages were unmapped, since the VM had used `before`. Its end is
    /// noticed elsewhere.
    fn account_for_interrupts(&mut self, window: &mut Window, before: Duration) {
        let together = self.vm_time().saturating_sub(before);
        let interrupted = together.mul_f64(self.interruption);
        self.progress.interrupted(interrupted);
        window.interrupted += interrupted;
    }

    /// CPU time of the VM's process; 0 once it is gone.
    fn vm_time(&self) -> Duration {
        self.session.process.cpu_time().unwrap_or_default()
    }

    /// Time that the VM spent in faults and interrupts, plus the time it will spend on pages left unmapped.
    fn fault_time(&self, window: &Window) -> Duration {
        let to_come = window.distinct_pages - window.last_touches.min(window.distinct_pages);
        let faults = window.touches + window.writes + to_come;
        self.touch_cost.time * u32::try_from(faults).unwrap_or(u32::MAX) + window.interrupted
    }
}

impl Backend for AccessedPageScanner {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        self.session.process.check_alive()?;
        let start = Instant::now();
        let end = start + self.config.period;
        let scale = self.control.scale();
        self.session.follow_vcpu();
        let population = self.collect(scale)?;
        let mut window = Window::default();
        self.touched.clear();
        self.progress.opens();
        let stayed_accessible = self.arm(&mut window)?;
        self.progress.observes(0);
        match self.watch(stop, end, &mut window, sink) {
            // The observations stay valid; the next period reports that the VM is gone.
            Err(TrapError::VmGone { .. }) if window.touches > 0 => {}
            other => other?,
        }
        self.progress.closes();
        self.progress.rests();
        self.session.process.rest(stop, end);
        self.progress.rested();

        let length = start.elapsed();
        let fault_time = self.fault_time(&window);
        let arm_time = window.arm_time + window.scan_time;
        let scanning = window.scan_time.div_f64(window.touches.max(1) as f64);
        let undisturbed = self.progress.settle(self.touch_cost.time + scanning);
        let resolution = window.touches.div_ceil(window.scans.max(1));
        let mean = window.cpu_time.as_secs_f64() / window.scans.max(1) as f64;
        let process = &self.session.process;
        let period = Period {
            index: self.periods,
            undisturbed,
            scale,
            populated_pages: population.pages,
            tracked_pages: self.watched.len() as u64,
            distinct_pages: window.distinct_pages,
            scans: ScanCounts {
                scans: window.scans,
                interval: Duration::from_secs_f64(mean),
                touches: window.touches,
                writes: window.writes,
                resolution_pages: u32::try_from(resolution).unwrap_or(u32::MAX),
                ..ScanCounts::default()
            },
            rearmed_pages: window.dropped_pages,
            fault_time,
            arm_time,
            collect_time: population.time,
            overhead_ratio: process.overhead_ratio(fault_time + arm_time, length),
            budget_exhausted: window.budget_ran_out,
            losses: PeriodLosses {
                stayed_accessible,
                first_touches_unseen: population.new_pages,
                ..PeriodLosses::default()
            },
            ..Period::empty(TraceMethod::AccessedPageScans, length, window.length)
        };
        self.periods += 1;
        self.control.adapt(&WindowCost {
            scans: window.scans,
            touches: window.touches,
            distinct_pages: window.distinct_pages,
            arm_seconds: window.arm_time.as_secs_f64(),
            scan_seconds: (window.scan_time + fault_time).as_secs_f64(),
            budget_seconds: process.budget_seconds(&self.config),
        });
        Ok(period)
    }

    fn detach(self: Box<Self>) -> Result<(), TrapError> {
        let process = &self.session.process;
        self.writes
            .as_ref()
            .map_or(Ok(()), |userfault| process.unregister(userfault))
    }

    fn touch_cost(&self) -> TouchCost {
        self.touch_cost
    }

    fn ram_pages(&self) -> u64 {
        self.session.ram_pages()
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    use super::*;
    use crate::placement::HandlerCpu;
    use crate::placement::stay_on_this_cpu;
    use crate::sys::SharedMemory;
    use crate::sys::usize_of;

    #[test]
    fn each_scan_finds_what_was_touched_since_the_one_before() {
        const PAGES: usize = 3200;
        stay_on_this_cpu().unwrap();
        let memory = SharedMemory::new(PAGES).unwrap();
        let config = TraceConfig {
            period: Duration::from_millis(500),
            budget: None,
            scale: 16,
            rate_rule: RateRule::Fixed,
            scan_interval: Some(Duration::from_millis(2)),
            handler_cpu: HandlerCpu::Any,
            ..TraceConfig::default()
        };
        let mut scanner = match ROW.attach(&memory.as_target(), &config) {
            Ok(scanner) => scanner,
            Err(error) => {
                plimsoll_skip::skip(
                    plimsoll_skip::Lack::Userfaultfd,
                    format_args!("no pages can be unmapped on this host: {error}"),
                );
                return;
            }
        };
        let mut touched_before = Vec::new();
        let mut scans = 0;
        // The host may unmap a page by itself, or hold one for a short time.
        let (mut compared, mut strange) = (0, 0);
        let stop = AtomicBool::new(false);
        // All of the first scan's, a part of the second's, and so on.
        let mut sampled = Vec::new();
        // Scans come with the CPU time of the process.
        let is_done = AtomicBool::new(false);
        let spin = || {
            while !is_done.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        };
        let mut sink = |seen: &Observation<'_>| {
            let Observation::Scan(scan) = seen else {
                panic!("{seen:?}");
            };
            assert!(scan.from < scan.to);
            let found: Vec<_> = scan.touched.pages().iter().map(|page| page.0).collect();
            if scans == 1 {
                sampled.clone_from(&found);
                assert!((190..=201).contains(&sampled.len()), "{}", sampled.len());
            } else {
                compared += touched_before.len();
                let missing = |from: &[u64], of: &[u64]| {
                    of.iter().filter(|page| !from.contains(page)).count()
                };
                strange += missing(&found, &touched_before) + missing(&touched_before, &found);
            }
            let touch: Vec<u64> = match scans {
                0 => (0..PAGES as u64).collect(),
                part => sampled
                    .iter()
                    .copied()
                    .filter(|page| page % 5 < part % 4)
                    .collect(),
            };
            for &page in &touch {
                memory.word(usize_of(page)).load(Ordering::Relaxed);
            }
            touched_before = touch;
            scans += 1;
        };
        let report = std::thread::scope(|scope| {
            scope.spawn(spin);
            let report = catch_unwind(AssertUnwindSafe(|| scanner.run_period(&stop, &mut sink)));
            is_done.store(true, Ordering::Relaxed);
            report
        });
        let report = report.unwrap_or_else(|panic| resume_unwind(panic)).unwrap();
        assert_eq!(report.scans.scans, scans);
        assert!(scans > 10, "{scans} scans");
        assert!(compared > 1000, "{compared} touches");
        assert!(strange * 50 <= compared, "{strange} of {compared}");
        assert_eq!(report.distinct_pages, sampled.len() as u64);
        assert_eq!(report.tracked_pages, sampled.len() as u64);
        assert_eq!((report.losses.lost(), report.scans.writes), (0, 0));
        scanner.detach().unwrap();
    }

    #[test]
    fn no_two_watched_pages_share_a_window_of_fault_around() {
        for scale in [1, 16, 17, 100, 4096] {
            let second = Duration::from_secs(1);
            let control = ScanControl::new(RateRule::Fixed, scale, None, second, WINDOW_PAGES);
            let sample = Sample::new(control.scale(), 1, 7);
            let windows: Vec<_> = sample
                .runs_in(0..100_000)
                .flatten()
                .map(|page| page / u64::from(WINDOW_PAGES))
                .collect();
            assert!(!windows.is_empty());
            assert!(windows.windows(2).all(|pair| pair[0] < pair[1]), "{scale}");
        }
    }
}
