//! Presence scans: which sampled pages of a running VM came back since they were made absent.
//!
//! ```text
//!   period:  collect ─> make absent ─> window: look, look, ... look ─> rest ─> adapt rate and interval
//!                                                 │
//!                                pages found there were touched since the look before:
//!                                 told to the sink, and made absent again
//! ```
//!
//! No trap, no userfaultfd, no injection, no stop: a touch costs the VM one ordinary minor fault, where a trap
//! costs ten times as much. What comes out is not the order of references but, of each page, between which looks it was
//! touched: *interval-censored* reuse times. One sample is kept for the whole window, so that a page is met
//! again and again; the next period draws another.
//!
//! One page in `scale` is watched, in strata as the tracer's sample (`sample.rs`), whose size is a
//! multiple of 16 pages: so no two watched pages lie in one window of fault-around (`absent.rs`), and only a
//! page's own access maps it.
//!
//! **Interval.** Within an interval nothing is ordered, so it must be short beside the time in which the VM comes back to
//! its pages. It follows the VM: about an eighth of the pages that a window sees at all should be found touched at one look.
//! It is counted in CPU time of the VM's process: a VM that waits, or for which its host has no time, touches nothing.
//! **Rate.** The time budget closes a window, as the tracer's does; the rate is set so that it
//! pays for [`SCANS_WANTED`] looks.
//! **Writes** are told apart if asked for, by asynchronous write protection of the watched pages
//! (`write_scan.rs`), which takes a userfaultfd by injection.
//!
//! Cost: of the VM a minor fault for each page found touched (measured when attaching; a second one if it was
//! written and writes are told apart), and the CPU time of looking and making absent, as the scanner runs on its vCPU's
//! CPU. Under KVM a fault takes a violation of the second-level table besides, which is not in that account.
//!
//! Not here: curves and working sets.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::{
    AccessKind, PageNumber, Period, PeriodLosses, ReferenceBatch, ScanCounts, TraceMethod,
    TrapCounts,
};

use crate::absent::Absentees;
use crate::barrier::PageBarrier;
use crate::error::TrapError;
use crate::hot_set::PageBits;
use crate::inject::{ends_soon, take_userfaultfd};
use crate::placement::{HandlerCpu, Placement};
use crate::rate::{RateRule, SCALE_MAX};
use crate::sample::{Sample, mix};
use crate::scan_control::{ScanControl, WindowCost};
use crate::target::TraceTarget;
use crate::tracer::{cpu_time, register_error};
use crate::trial::measure_fault_cost;
use crate::userfault::Userfault;
use crate::write_scan::ASYNC_WRITES;

pub use crate::scan_control::SCANS_WANTED;

/// Longest wait without a look at the stop flag.
const PATIENCE: Duration = Duration::from_millis(50);
/// Shortest wait for the VM to get on.
const NAP_MIN: Duration = Duration::from_micros(200);
/// Pages looked at before those found are made absent again: what is touched between the two goes unseen.
const CHUNK_PAGES: usize = 64;
/// Looks that make a window whatever they cost: one alone knows no reuse.
const SCANS_MIN: u64 = 3;
/// Pages of a sample from which it tells that a VM cannot be scanned, if most of them stay.
const TRIED_MIN: u64 = 64;

/// How a VM is scanned.
#[derive(Debug, Clone)]
pub struct ScanConfig {
    /// Length of a period, 10 ms to a day; 5 s by default.
    pub period: Duration,
    /// Bound of the time taken from the VM's vCPUs, as a share of it; `None` for no bound.
    pub budget: Option<f64>,
    /// T of the first period: one page in T is watched; rounded up to a multiple of 16.
    pub scale: u32,
    /// How T follows the VM: [`RateRule::Fixed`] or [`RateRule::Budget`].
    pub rate_rule: RateRule,
    /// CPU time of the VM's process from look to look, 1 ms up to a period; `None`: it follows the VM.
    pub interval: Option<Duration>,
    /// Whether writes are told from reads.
    pub writes: bool,
    /// Seed of the samples' salts.
    pub seed: u64,
    /// Where the scanner runs.
    pub handler_cpu: HandlerCpu,
}

impl Default for ScanConfig {
    fn default() -> Self {
        Self {
            period: Duration::from_secs(5),
            budget: Some(0.01),
            scale: 128,
            rate_rule: RateRule::default(),
            interval: None,
            writes: false,
            seed: 0,
            handler_cpu: HandlerCpu::default(),
        }
    }
}

impl ScanConfig {
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
        let is_share = |budget: f64| budget > 0.0 && budget <= 1.0;
        if let Some(budget) = self.budget.filter(|&budget| !is_share(budget)) {
            return refuse("budget", budget.to_string(), "above 0 to 1 (100 %)");
        }
        if !(1..=SCALE_MAX).contains(&self.scale) {
            let accepted = "1 to 262144";
            return refuse("tracking rate of 1 in", self.scale.to_string(), accepted);
        }
        if matches!(self.rate_rule, RateRule::Linear | RateRule::Log) {
            let value = format!("{:?}", self.rate_rule);
            return refuse("rate rule", value, "what scans know: Fixed and Budget");
        }
        let bounds = Duration::from_millis(1)..=self.period;
        if let Some(interval) = self.interval.filter(|interval| !bounds.contains(interval)) {
            return refuse("scan interval", format!("{interval:?}"), "1 ms to a period");
        }
        Ok(())
    }
}

/// One look: what was touched since the one before.
#[derive(Debug)]
pub struct Scan<'a> {
    /// When the look before was: CPU time of the VM's process since the window's beginning.
    pub from: Duration,
    /// When this one was, likewise; later than `from`.
    pub to: Duration,
    /// The watched pages touched in between, each once, in order of their numbers: kinds are known if
    /// writes are told apart, and a page both read and written is written.
    pub touched: &'a ReferenceBatch,
}

/// Takes the looks of a period, in order.
pub type ScanSink<'a> = &'a mut dyn FnMut(&Scan<'_>);

/// A VM whose pages are scanned. Dropped, it leaves nothing but pages that the VM maps again when it wants them.
#[derive(Debug)]
pub struct PresenceScanner {
    pid: u32,
    vcpus: usize,
    absentees: Absentees,
    writes: Option<Userfault>,
    config: ScanConfig,
    control: ScanControl,
    fault_cost: Duration,
    placement: Placement,
    /// The sample's pages that hold something, rising.
    watched: Vec<u64>,
    /// Those of them that were touched in this window.
    touched: PageBits,
    batch: ReferenceBatch,
    periods: u64,
    populated_pages_before: Option<u64>,
}

/// Counters of the window under way.
#[derive(Debug, Default)]
struct Window {
    scans: u64,
    touches: u64,
    writes: u64,
    distinct_pages: u64,
    /// Pages found at the last look.
    last_touches: u64,
    dropped_pages: u64,
    arm_time: Duration,
    scan_time: Duration,
    length: Duration,
    /// CPU time of the VM's process in it.
    cpu_time: Duration,
    budget_ran_out: bool,
}

impl PresenceScanner {
    /// Attaches to a running VM from outside; scans nothing yet.
    ///
    /// # Errors
    ///
    /// Every [`TrapError`]; the VM is left as it was.
    pub fn attach(target: &TraceTarget, config: ScanConfig) -> Result<Self, TrapError> {
        config.check()?;
        let mut absentees = Absentees::reach(target)?;
        let fault_cost = measure_fault_cost()?;
        let reached = absentees.reached();
        let pages = reached.layout.pages();
        let writes = if config.writes {
            let uffd = take_userfaultfd(target.pid, reached.pidfd.as_fd())?;
            let noted = Userfault::note_writes(uffd, reached.layout.ranges());
            Some(noted.map_err(register_error(target.pid, ASYNC_WRITES))?)
        } else {
            None
        };
        Ok(Self {
            pid: target.pid,
            vcpus: target.vcpus(),
            absentees,
            writes,
            control: ScanControl::new(
                config.rate_rule,
                config.scale,
                config.interval,
                config.period,
            ),
            fault_cost,
            placement: Placement::new(config.handler_cpu, target.pid, &target.vcpu_threads),
            watched: Vec::new(),
            touched: PageBits::new(pages),
            batch: ReferenceBatch::new(),
            periods: 0,
            populated_pages_before: None,
            config,
        })
    }

    /// What a minor fault costs on this host, measured before attaching.
    #[must_use]
    pub fn fault_cost(&self) -> Duration {
        self.fault_cost
    }

    /// Pages of the VM's RAM.
    #[must_use]
    pub fn ram_pages(&self) -> u64 {
        self.absentees.ram_pages()
    }

    /// Scans for one period and hands each look to `sink`, in order.
    ///
    /// Ends early, with a report on what was, when `stop` becomes true or the VM ends.
    ///
    /// # Errors
    ///
    /// [`TrapError::VmGone`] when the VM has ended before anything was seen in this period,
    /// [`TrapError::StayedAccessible`] when its pages cannot be made absent, [`TrapError::Call`] for
    /// what should not happen. Looks up to there have been handed over.
    pub fn run_period(
        &mut self,
        stop: &AtomicBool,
        sink: ScanSink<'_>,
    ) -> Result<Period, TrapError> {
        self.absentees.check_alive()?;
        let start = Instant::now();
        let end = start + self.config.period;
        let scale = self.control.scale();
        self.follow();
        let (populated_pages, first_touches_unseen) = self.collect(scale)?;
        let collect_time = start.elapsed();
        let mut window = Window::default();
        self.touched.clear();
        let stayed_accessible = self.arm(&mut window)?;
        match self.watch(stop, end, &mut window, sink) {
            // What was seen of it stands; the next period tells that it is gone.
            Err(TrapError::VmGone { .. }) if window.touches > 0 => {}
            other => other?,
        }
        while !stop.load(Ordering::Relaxed) && self.absentees.check_alive().is_ok() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(PATIENCE));
        }

        let length = start.elapsed();
        let fault_time = self.fault_time(&window);
        let arm_time = window.arm_time + window.scan_time;
        let taken = (fault_time + arm_time).as_secs_f64();
        let resolution = window.touches.div_ceil(window.scans.max(1));
        let mean = window.cpu_time.as_secs_f64() / window.scans.max(1) as f64;
        let report = Period {
            index: self.periods,
            method: TraceMethod::AccessedPageScans,
            length,
            window: window.length,
            scale,
            populated_pages,
            tracked_pages: self.watched.len() as u64,
            distinct_pages: window.distinct_pages,
            traps: TrapCounts::default(),
            scans: ScanCounts {
                scans: window.scans,
                interval: Duration::from_secs_f64(mean),
                touches: window.touches,
                writes: window.writes,
                resolution_pages: u32::try_from(resolution).unwrap_or(u32::MAX),
            },
            rearmed_pages: window.dropped_pages,
            fault_time,
            arm_time,
            collect_time,
            overhead_ratio: taken / (length.as_secs_f64() * self.vcpus as f64),
            budget_exhausted: window.budget_ran_out,
            losses: PeriodLosses {
                stayed_accessible,
                left_hot_set_accessible: 0,
                first_touches_unseen,
            },
        };
        self.periods += 1;
        self.control.adapt(&WindowCost {
            scans: window.scans,
            touches: window.touches,
            distinct_pages: window.distinct_pages,
            arm_seconds: window.arm_time.as_secs_f64(),
            scan_seconds: (window.scan_time + fault_time).as_secs_f64(),
            budget_seconds: self.budget_seconds(),
        });
        Ok(report)
    }

    fn follow(&mut self) {
        let barrier = &mut self.absentees.reached().barrier;
        self.placement.follow(|| barrier.leave_cpu());
    }

    /// Finds the pages that hold something and draws this period's sample of them; returns how many they are,
    /// and how many are new.
    fn collect(&mut self, scale: u32) -> Result<(u64, u64), TrapError> {
        let salt = mix(self.config.seed ^ mix(self.periods + 1));
        let sample = Sample::new(scale, 1, salt);
        // Strata are whole windows, also where the RAM begins within one.
        let shift = self.absentees.place_in_window(0);
        let runs = self.absentees.populated()?;
        let populated_pages = runs.iter().map(|run| run.end - run.start).sum();
        self.watched.clear();
        for run in runs {
            let pages = sample.runs_in(run.start + shift..run.end + shift).flatten();
            self.watched.extend(pages.map(|page| page - shift));
        }
        // A second mapping could begin elsewhere in a window.
        let absentees = &self.absentees;
        self.watched
            .dedup_by_key(|&mut page| absentees.window_of(page));
        let before = self.populated_pages_before.replace(populated_pages);
        let unseen = before.map_or(0, |before| populated_pages - before.min(populated_pages));
        Ok((populated_pages, unseen))
    }

    /// Makes the sample absent; returns how many pages of it are there all the same.
    fn arm(&mut self, window: &mut Window) -> Result<u64, TrapError> {
        let start = cpu_time();
        let watched = std::mem::take(&mut self.watched);
        let mut stayed = 0;
        for pages in watched.chunks(CHUNK_PAGES) {
            self.protect(pages)?;
            stayed += self.absentees.make_absent(pages)?.len() as u64;
        }
        let tried = watched.len() as u64;
        self.watched = watched;
        window.dropped_pages += tried;
        window.arm_time = cpu_time().saturating_sub(start);
        if tried >= TRIED_MIN && stayed * 2 > tried {
            return Err(TrapError::StayedAccessible {
                tried,
                accessible: stayed,
            });
        }
        Ok(stayed)
    }

    /// Protects pages against writes, if those are told apart.
    fn protect(&self, pages: &[u64]) -> Result<(), TrapError> {
        let Some(userfault) = &self.writes else {
            return Ok(());
        };
        let failed = |source| self.absentees.failed("write-protecting pages", source);
        for &page in pages {
            for range in self.absentees.addresses(page) {
                userfault.write_protect(range).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Looks again and again until the period ends, its budget is used up, or `stop`.
    fn watch(
        &mut self,
        stop: &AtomicBool,
        end: Instant,
        window: &mut Window,
        sink: ScanSink<'_>,
    ) -> Result<(), TrapError> {
        let start = Instant::now();
        let begin = self.absentees.cpu_time()?;
        let mut from = Duration::ZERO;
        loop {
            let due = begin + from + self.control.interval();
            let mut now = self.absentees.cpu_time()?;
            let mut nap = NAP_MIN;
            while now < due && !stop.load(Ordering::Relaxed) {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let sooner = (due - now) / u32::try_from(self.vcpus).unwrap_or(u32::MAX);
                std::thread::sleep(sooner.max(nap).min(PATIENCE).min(left));
                let before = std::mem::replace(&mut now, self.absentees.cpu_time()?);
                // A VM that sleeps is asked ever more rarely.
                nap = if now > before {
                    NAP_MIN
                } else {
                    (nap * 2).min(PATIENCE)
                };
            }
            let spent = |window: &Window| {
                let taken = self.fault_time(window) + window.arm_time + window.scan_time;
                let next = window.scan_time.as_secs_f64() / window.scans.max(1) as f64;
                let budget = self.budget_seconds();
                budget.is_some_and(|budget| taken.as_secs_f64() + next >= budget)
            };
            window.budget_ran_out = window.scans + 1 >= SCANS_MIN && spent(window);
            let is_last =
                window.budget_ran_out || stop.load(Ordering::Relaxed) || Instant::now() >= end;
            self.follow();
            let to = (now.saturating_sub(begin)).max(from + Duration::from_micros(1));
            self.look(window, is_last)?;
            window.length = start.elapsed();
            window.cpu_time = to;
            sink(&Scan {
                from,
                to,
                touched: &self.batch,
            });
            from = to;
            if is_last {
                return Ok(());
            }
        }
    }

    /// Collects the pages that are there, and makes them absent again unless this look is the last.
    fn look(&mut self, window: &mut Window, is_last: bool) -> Result<(), TrapError> {
        let start = cpu_time();
        self.batch.advance();
        let watched = std::mem::take(&mut self.watched);
        let looked = watched
            .chunks(CHUNK_PAGES)
            .try_for_each(|pages| self.look_at(pages, window, is_last));
        self.watched = watched;
        let pages = self.batch.pages();
        window.scans += 1;
        window.last_touches = pages.len() as u64;
        window.touches += pages.len() as u64;
        let writes = self.batch.kinds().iter();
        window.writes += writes.filter(|&&kind| kind == AccessKind::Write).count() as u64;
        for page in pages {
            window.distinct_pages += u64::from(self.touched.set(page.0, true));
        }
        window.scan_time += cpu_time().saturating_sub(start);
        looked
    }

    fn look_at(
        &mut self,
        pages: &[u64],
        window: &mut Window,
        is_last: bool,
    ) -> Result<(), TrapError> {
        let tells_writes = self.writes.is_some();
        let (mut there, mut written) = (Vec::new(), Vec::new());
        let batch = &mut self.batch;
        self.absentees.for_each_mapped(pages, |page, mapped| {
            let kind = match (tells_writes, mapped.unprotected) {
                (false, _) => AccessKind::Unknown,
                (true, false) => AccessKind::Read,
                (true, true) => AccessKind::Write,
            };
            batch.push(PageNumber(page), kind);
            there.push(page);
            if kind == AccessKind::Write {
                written.push(page);
            }
        })?;
        if is_last {
            return Ok(());
        }
        // In this order: an absent page keeps its protection in a marker.
        self.protect(&written)?;
        window.dropped_pages += there.len() as u64;
        self.absentees.drop_entries(&there)
    }

    /// Time that the VM spent in faults, with those that it will take for pages left absent.
    fn fault_time(&self, window: &Window) -> Duration {
        let to_come = window.distinct_pages - window.last_touches.min(window.distinct_pages);
        let faults = window.touches + window.writes + to_come;
        self.fault_cost * u32::try_from(faults).unwrap_or(u32::MAX)
    }

    /// Time of the vCPUs that a period may take, in seconds.
    fn budget_seconds(&self) -> Option<f64> {
        let share = self.config.budget?;
        Some(share * self.config.period.as_secs_f64() * self.vcpus as f64)
    }

    /// Ends; what is absent comes back when the VM wants it.
    ///
    /// # Errors
    ///
    /// [`TrapError::Call`] if the kernel does not lift the protection against writes; closing the
    /// descriptor, which happens all the same, lifts it too.
    pub fn detach(mut self) -> Result<(), TrapError> {
        let lifted = self.writes.take().map_or(Ok(()), |uffd| uffd.unregister());
        match lifted {
            Err(source) if !ends_soon(self.absentees.reached().pidfd.as_fd()) => {
                Err(TrapError::Call {
                    pid: self.pid,
                    call: "giving its RAM back",
                    source,
                })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_skip::{Lack, skip};
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    use super::*;
    use crate::absent::WINDOW_PAGES;
    use crate::absent::stay_on_this_cpu;
    use crate::ram::usize_of;
    use crate::sys::SharedMemory;

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let default = ScanConfig::default;
        let cases = [
            (
                ScanConfig {
                    budget: Some(f64::NAN),
                    ..default()
                },
                "budget",
            ),
            (
                ScanConfig {
                    budget: Some(0.0),
                    ..default()
                },
                "budget",
            ),
            (
                ScanConfig {
                    scale: 0,
                    ..default()
                },
                "tracking rate",
            ),
            (
                ScanConfig {
                    scale: SCALE_MAX + 1,
                    ..default()
                },
                "tracking rate",
            ),
            (
                ScanConfig {
                    rate_rule: RateRule::Log,
                    ..default()
                },
                "rate rule",
            ),
            (
                ScanConfig {
                    period: Duration::ZERO,
                    ..default()
                },
                "period",
            ),
            (
                ScanConfig {
                    interval: Some(Duration::ZERO),
                    ..default()
                },
                "scan interval",
            ),
            (
                ScanConfig {
                    interval: Some(Duration::from_secs(6)),
                    ..default()
                },
                "scan interval",
            ),
        ];
        for (config, name) in cases {
            let refused = config.check().unwrap_err().to_string();
            assert!(refused.starts_with(name), "{refused}");
        }
        assert!(default().check().is_ok());
    }

    #[test]
    fn each_look_tells_what_was_touched_since_the_one_before() {
        const PAGES: usize = 3200;
        stay_on_this_cpu();
        let memory = SharedMemory::new(PAGES).unwrap();
        let config = ScanConfig {
            period: Duration::from_millis(500),
            budget: None,
            scale: 16,
            rate_rule: RateRule::Fixed,
            interval: Some(Duration::from_millis(2)),
            handler_cpu: HandlerCpu::Any,
            ..ScanConfig::default()
        };
        let mut scanner = match PresenceScanner::attach(&memory.as_target(), config) {
            Ok(scanner) => scanner,
            Err(error) => {
                skip(
                    Lack::Userfaultfd,
                    format_args!("no pages can be made absent on this host: {error}"),
                );
                return;
            }
        };
        let mut touched_before = Vec::new();
        let mut looks = 0;
        // The host may unmap a page by itself, or hold one for a moment.
        let (mut compared, mut strange) = (0, 0);
        let stop = AtomicBool::new(false);
        // All of the first look's, a part of the second's, and so on.
        let mut sampled = Vec::new();
        // Looks come with the CPU time of the process.
        let is_done = AtomicBool::new(false);
        let spin = || {
            while !is_done.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        };
        let mut sink = |scan: &Scan<'_>| {
            assert!(scan.from < scan.to);
            let found: Vec<_> = scan.touched.pages().iter().map(|page| page.0).collect();
            if looks == 1 {
                sampled.clone_from(&found);
                assert!((190..=201).contains(&sampled.len()), "{}", sampled.len());
            } else {
                compared += touched_before.len();
                let missing = |from: &[u64], of: &[u64]| {
                    of.iter().filter(|page| !from.contains(page)).count()
                };
                strange += missing(&found, &touched_before) + missing(&touched_before, &found);
            }
            let touch: Vec<u64> = match looks {
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
            looks += 1;
        };
        let report = std::thread::scope(|scope| {
            scope.spawn(spin);
            let report = catch_unwind(AssertUnwindSafe(|| scanner.run_period(&stop, &mut sink)));
            is_done.store(true, Ordering::Relaxed);
            report
        });
        let report = report.unwrap_or_else(|panic| resume_unwind(panic)).unwrap();
        assert_eq!(report.scans.scans, looks);
        assert!(looks > 10, "{looks} looks");
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
            let control = ScanControl::new(RateRule::Fixed, scale, None, Duration::from_secs(1));
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
