//! Idle pages: which sampled pages were not used since they were marked idle.
//!
//! ```text
//!   period:  draw ─> mark idle ─> window: look, look, ... look ─> rest ─> adapt rate and interval
//!                                           │
//!                          pages no longer idle were touched since the look before:
//!                          passed on, and marked idle again
//! ```
//!
//! Marking a page idle clears the accessed bits of all page-table entries that map it, those of KVM's second-level tables among
//! them. Nothing is unmapped, no access faults, no process is stopped, and nothing is called in one. So it works on any memory:
//! private, locked, swappable, mapped by several processes. As with accessed-page scans it is known of each page between which
//! looks it was touched.
//!
//! **A process** is sampled by its addresses, so a page that it shares counts as its own. Pages swapped out are in the sample:
//! they are touched when they are present again. Pages that are moved keep their mark.
//! **A control group** is sampled by the frames of the host's memory, of which those are kept that are charged to the group
//! or to one below it: its anonymous memory, and its page cache, mapped or not. Its processes need not be known. A frame that
//! is freed loses its mark; when it is in use again, its group is checked anew.
//! **Compound pages** (transparent huge pages) have one mark. A sampled page in one counts as touched when any part of it was.
//!
//! **Interval.** Wall time, set by the rule of accessed-page scans for looks that are dear (`scans::control`), as is the rate. Drawing a sample is a part of the
//! cost; where it takes more than [`DRAWING`] of the budget, a sample is kept for several periods.
//!
//! Cost: about 2 to 3 µs of the tracer for each page and look; a touched page costs its process one access bit that the
//! processor sets again, measured on attaching.
//!
//! Not here: curves and working sets. Not seen: an access that a processor serves from its TLB does not set the accessed bit.
//! Linux does not flush TLBs for it, so a page in use all the time may look idle until its entry is evicted. Accesses by devices
//! set no accessed bit either.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_flow::{
    AccessKind, PageNumber, Period, PeriodLosses, ReferenceBatch, SampleCounts, ScanCounts,
    TraceMethod, TrapCounts, Undisturbed,
};
use rustix::fs::{FlockOperation, flock};

use crate::backend::{Backend, BackendRow, GroupSupport, Observation, Scan, Sink, Yield};
use crate::claim::Claim;
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::frames::{
    BITMAP, Frames, PagemapEntry, Unit, check_tracking, open_frames, ranges_of_memory, word,
};
use crate::process::{TracedProcess, cpu_time};
use crate::ram::{PAGE_BYTES, RamLayout};
use crate::rate::RateRule;
use crate::refusal::Refusal;
use crate::requirement::Requirement::{IdleTracking, Memory};
use crate::sample::Sample;
use crate::scans::control::{ScanControl, WindowCost};
use crate::target::{GroupTarget, TraceTarget};
use crate::trial::{TouchCost, Toucher, measure_idle_cost};

/// Longest wait without checking the stop flag.
const PATIENCE: Duration = Duration::from_millis(50);
/// Minimum number of looks in a window, whatever they cost: one alone sees no reuse.
const LOOKS_MIN: u64 = 3;
/// Share of the budget that drawing samples may take.
const DRAWING: f64 = 0.25;
/// Prefix of the names of DAMON's threads.
const DAMON: &str = "kdamond";

/// The backend `idle`.
pub const ROW: BackendRow = BackendRow {
    method: TraceMethod::IdlePages,
    sees: "Idle pages: which sampled pages were touched between two looks, by the kernel's idle page tracking; any memory, nothing is stopped",
    needs: "CONFIG_IDLE_PAGE_TRACKING; root with CAP_SYS_ADMIN; a VM, any process, or a control group whose memory is counted",
    costs: "no fault; the tracer's own time for its looks, within the time budget",
    loses: "the order of touches within an interval; accesses that a TLB serves, and those of devices",
    yields: Yield::Scans,
    sees_reads: true,
    options: &["--scan-interval"],
    rate_rules: &[RateRule::Fixed, RateRule::Budget],
    requirements: |_| &[Memory, IdleTracking],
    trial: measure_idle_cost,
    curve_cost: None,
    attach: |target, config| {
        let pages = ProcessPages::open(target)?;
        let cost = TouchCost::measure(target.pid, measure_idle_cost)?;
        Ok(Box::new(IdleScanner::new(
            Pages::Process(pages),
            cost,
            config,
        )?))
    },
    any_process: true,
    group: Some(GroupSupport {
        check: |group| check_tracking().and_then(|()| check_charges(group)),
        attach: |group, config| {
            let pages = GroupPages::open(group)?;
            let cost = measure_idle_cost(Toucher::Thread)?;
            let cost = TouchCost {
                time: cost,
                toucher: Toucher::Thread,
            };
            Ok(Box::new(IdleScanner::new(
                Pages::Group(pages),
                cost,
                config,
            )?))
        },
    }),
};

/// Refuses a group if the kernel does not report to which group pages are charged, or where memory is.
fn check_charges(_: &GroupTarget) -> Result<(), Refusal> {
    open_frames(true)?;
    memory_of_host().map(drop)
}

fn memory_of_host() -> Result<Vec<Range<u64>>, Refusal> {
    let what = || "find the host's memory in /proc/iomem".to_owned();
    let ranges = ranges_of_memory().map_err(|source| Refusal::NoPrivilege {
        what: what(),
        source,
    })?;
    match ranges.is_empty() {
        true => Err(Refusal::NoPrivilege {
            what: what(),
            source: io::Error::from_raw_os_error(libc::EPERM),
        }),
        false => Ok(ranges),
    }
}

/// Another program that has the bitmap of idle pages open. Ours are not among them: they mark only pages of their target.
fn other_user() -> Option<String> {
    let program = |pid: u32| {
        let file = fs::metadata(format!("/proc/{pid}/exe")).ok()?;
        Some((file.dev(), file.ino()))
    };
    let ours = program(std::process::id());
    processes().find_map(|pid| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
        let mut links = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        let uses = links.any(|link| link.as_os_str() == BITMAP);
        let is_other = uses && program(pid) != ours;
        is_other.then(|| format!("process {pid} ({})", name_of(pid)))
    })
}

/// A thread of DAMON, which marks pages idle as well: where it samples a page of the target just before a look, a touch is
/// missed. It is left alone.
#[must_use]
pub fn damon_thread() -> Option<u32> {
    processes().find(|&pid| name_of(pid).starts_with(DAMON))
}

fn processes() -> impl Iterator<Item = u32> {
    let listing = fs::read_dir("/proc").into_iter().flatten().flatten();
    listing.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn name_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    // The name is the process's own choice.
    name.trim_end().escape_debug().to_string()
}

/// A page that is watched.
#[derive(Debug, Clone, Copy)]
struct Watched {
    /// Its number: that of a VM's page, the page's address of another process, the frame of a control group.
    page: u64,
    /// The frame that it had at the last look; 0 for none.
    frame: u64,
    /// The first frame of what it belongs to.
    head: u64,
}

/// What a drawn sample is made of.
#[derive(Debug, Clone, Copy, Default)]
struct Drawn {
    swapped: u64,
    huge: u64,
    cache: u64,
    /// Whose use is not tracked, as that of huge pages of hugetlbfs.
    untracked: u64,
}

impl Drawn {
    fn count(&mut self, frame: u64, unit: Unit) {
        self.huge += u64::from(unit.flags.is_head() || unit.head != frame);
        self.cache += u64::from(!unit.flags.is_anonymous());
    }
}

/// A process's pages.
#[derive(Debug)]
struct ProcessPages {
    process: TracedProcess,
    target: TraceTarget,
    layout: RamLayout,
    pagemap: File,
    _claim: Claim,
}

impl ProcessPages {
    fn open(target: &TraceTarget) -> Result<Self, TrapError> {
        let process = TracedProcess::open(target)?;
        let claim = Claim::take(target.pid)?;
        Ok(Self {
            pagemap: Self::pagemap(&process)?,
            process,
            layout: Self::layout(target),
            target: target.clone(),
            _claim: claim,
        })
    }

    /// A VM's pages are numbered through its RAM; other processes' by their addresses, so that a number stays the same page
    /// while mappings come and go.
    fn layout(target: &TraceTarget) -> RamLayout {
        if target.is_vm {
            target.layout()
        } else {
            RamLayout::by_address(target.layout().ranges())
        }
    }

    /// Opened anew for each period: a file that was opened before the process executed another program shows nothing.
    fn pagemap(process: &TracedProcess) -> Result<File, TrapError> {
        let opened = File::open(format!("/proc/{}/pagemap", process.pid));
        opened.map_err(process.failed("opening its pagemap"))
    }

    fn entry(&self, address: u64) -> io::Result<PagemapEntry> {
        match word(&self.pagemap, address / PAGE_BYTES) {
            // Of an address space that is gone.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(PagemapEntry(0)),
            other => other.map(PagemapEntry),
        }
    }

    fn draw(
        &self,
        frames: &Frames,
        sample: Sample,
        watched: &mut Vec<Watched>,
    ) -> io::Result<Drawn> {
        let mut drawn = Drawn::default();
        let mappings = self.layout.mappings().zip(&self.target.ram);
        for ((first, range), mapping) in mappings {
            // Of a private mapping of a file, the process's own pages.
            let is_private =
                !self.target.is_vm && mapping.backing == plimsoll_flow::RamBacking::Private;
            let pages = first..first + range.len_bytes / PAGE_BYTES;
            for page in sample.runs_in(pages).flatten() {
                let entry = self.entry(range.start + (page - first) * PAGE_BYTES)?;
                if is_private && entry.is_file_or_shared() {
                    continue;
                }
                let Some(frame) = entry.frame() else {
                    if entry.is_swapped() {
                        drawn.swapped += 1;
                        watched.push(Watched {
                            page,
                            frame: 0,
                            head: 0,
                        });
                    }
                    continue;
                };
                let Some(unit) = frames.unit(frame)? else {
                    drawn.untracked += 1;
                    continue;
                };
                if unit.flags.is_zeros() {
                    continue;
                }
                if !unit.flags.is_listed() {
                    drawn.untracked += 1;
                    continue;
                }
                drawn.count(frame, unit);
                watched.push(Watched {
                    page,
                    frame,
                    head: unit.head,
                });
            }
        }
        Ok(drawn)
    }

    /// Finds where a page is by now; returns whether it has a frame.
    fn locate(&self, frames: &Frames, watched: &mut Watched) -> io::Result<bool> {
        let address = self
            .layout
            .addresses(&(watched.page..watched.page + 1))
            .next();
        let entry = address.map_or(Ok(PagemapEntry(0)), |range| self.entry(range.start))?;
        let frame = entry.frame().unwrap_or(0);
        if frame != 0 && frame != watched.frame {
            watched.head = frames.unit(frame)?.map_or(frame, |unit| unit.head);
        }
        watched.frame = frame;
        Ok(frame != 0)
    }
}

/// A control group's pages.
#[derive(Debug)]
struct GroupPages {
    target: GroupTarget,
    memory: Vec<Range<u64>>,
    /// Its directory, locked against other tracers.
    _lock: File,
}

impl GroupPages {
    fn open(group: &GroupTarget) -> Result<Self, TrapError> {
        let gone = |_| TrapError::GroupGone {
            directory: group.directory.clone(),
        };
        let lock = File::open(&group.directory).map_err(gone)?;
        let locked = flock(&lock, FlockOperation::NonBlockingLockExclusive);
        if locked == Err(rustix::io::Errno::WOULDBLOCK) {
            let by = "another tracer of the same control group".to_owned();
            return Err(Refusal::IdleMarksInUse { by }.into());
        }
        Ok(Self {
            target: group.clone(),
            memory: memory_of_host()?,
            _lock: lock,
        })
    }

    /// What a frame belongs to, if that is charged to the group.
    fn charged(&self, frames: &Frames, frame: u64) -> io::Result<Option<Unit>> {
        let unit = match frames.unit(frame) {
            // Memory that was taken away.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
            other => other?,
        };
        let Some(unit) = unit.filter(|unit| unit.flags.is_listed()) else {
            return Ok(None);
        };
        let group = frames.group(unit.head)?;
        let is_charged = self.target.inodes.binary_search(&group).is_ok();
        Ok(is_charged.then_some(unit))
    }

    fn draw(
        &self,
        frames: &Frames,
        sample: Sample,
        watched: &mut Vec<Watched>,
    ) -> io::Result<Drawn> {
        let mut drawn = Drawn::default();
        for memory in &self.memory {
            for frame in sample.runs_in(memory.clone()).flatten() {
                if let Some(unit) = self.charged(frames, frame)? {
                    drawn.count(frame, unit);
                    watched.push(Watched {
                        page: frame,
                        frame,
                        head: unit.head,
                    });
                }
            }
        }
        Ok(drawn)
    }
}

/// Whose pages are watched.
#[derive(Debug)]
enum Pages {
    Process(ProcessPages),
    Group(GroupPages),
}

impl Pages {
    /// The error of a failed call.
    fn failed(&self, call: &'static str) -> impl FnOnce(io::Error) -> TrapError + Copy + '_ {
        move |source| match self {
            Self::Process(pages) => pages.process.failed(call)(source),
            Self::Group(_) => TrapError::Call {
                pid: std::process::id(),
                call,
                source,
            },
        }
    }

    /// Waits until `due` or `stop`, or the end of a process.
    fn rest(&self, stop: &AtomicBool, due: Instant) {
        match self {
            Self::Process(pages) => pages.process.rest(stop, due),
            Self::Group(_) => {
                while !stop.load(Ordering::Relaxed) {
                    let left = due.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    thread::sleep(left.min(PATIENCE));
                }
            }
        }
    }

    /// vCPUs of a VM of whose time the budget is a share; a process and a group count as one.
    fn vcpus(&self) -> usize {
        match self {
            Self::Process(pages) => pages.process.vcpus,
            Self::Group(_) => 1,
        }
    }
}

/// A target whose pages are looked at. Dropped, it leaves only marks, which nothing but another tracer notices.
#[derive(Debug)]
struct IdleScanner {
    pages: Pages,
    frames: Frames,
    config: TraceConfig,
    control: ScanControl,
    touch_cost: TouchCost,
    /// The sample, in ascending order of its pages.
    watched: Vec<Watched>,
    drawn: Drawn,
    /// One page in so many is in it.
    scale: u32,
    /// Periods for which it is kept.
    kept_for: u32,
    batch: ReferenceBatch,
    touched: HashSet<u64>,
    heads: Vec<u64>,
    periods: u64,
}

impl IdleScanner {
    fn new(pages: Pages, touch_cost: TouchCost, config: &TraceConfig) -> Result<Self, TrapError> {
        if let Some(by) = other_user() {
            return Err(Refusal::IdleMarksInUse { by }.into());
        }
        Ok(Self {
            frames: open_frames(matches!(pages, Pages::Group(_)))?,
            pages,
            control: ScanControl::new(
                config.rate_rule,
                config.scale,
                config.scan_interval,
                config.period,
                1,
            )
            .for_dear_looks(config.period),
            touch_cost,
            watched: Vec::new(),
            drawn: Drawn::default(),
            scale: 1,
            kept_for: 0,
            batch: ReferenceBatch::new(),
            touched: HashSet::new(),
            heads: Vec::new(),
            periods: 0,
            config: config.clone(),
        })
    }

    /// Time that a period may take; `None` for no bound.
    fn budget(&self) -> Option<Duration> {
        let share = self.config.budget? * self.pages.vcpus() as f64;
        Some(self.config.period.mul_f64(share))
    }

    /// Draws a sample, unless the last one must be kept for what it cost.
    fn draw(&mut self) -> Result<(), TrapError> {
        if let Pages::Process(pages) = &mut self.pages {
            pages.process.check_alive()?;
            pages.pagemap = ProcessPages::pagemap(&pages.process)?;
        }
        if self.kept_for > 0 {
            self.kept_for -= 1;
            return Ok(());
        }
        let start = cpu_time();
        self.scale = self.control.scale();
        let sample = Sample::of_period(self.scale, 1, self.config.seed, self.periods);
        self.watched.clear();
        let drawn = match &self.pages {
            Pages::Process(pages) => pages.draw(&self.frames, sample, &mut self.watched),
            Pages::Group(pages) => pages.draw(&self.frames, sample, &mut self.watched),
        };
        self.drawn = drawn.map_err(self.pages.failed("drawing a sample of its pages"))?;
        let took = cpu_time().saturating_sub(start);
        self.kept_for = self
            .budget()
            .map_or(0, |budget| periods_to_keep(took, budget));
        Ok(())
    }

    /// Marks the units `heads` idle.
    fn mark(&mut self) -> Result<(), TrapError> {
        self.heads.sort_unstable();
        self.heads.dedup();
        let marked = self.frames.make_idle(&self.heads);
        self.heads.clear();
        marked.map_err(self.pages.failed("marking pages idle"))
    }

    /// Marks the whole sample.
    fn arm(&mut self) -> Result<(), TrapError> {
        let present = self.watched.iter().filter(|watched| watched.frame != 0);
        self.heads.extend(present.map(|watched| watched.head));
        self.mark()
    }

    /// Collects the pages touched since they were marked, and marks them again.
    fn look(&mut self) -> Result<(), TrapError> {
        self.batch.advance();
        let (pages, frames) = (&self.pages, &self.frames);
        let (batch, heads) = (&mut self.batch, &mut self.heads);
        // Neighbours often belong to one compound page.
        let mut last = (0, true);
        let mut is_idle = |head| -> io::Result<bool> {
            if last.0 != head {
                last = (head, frames.is_idle(head)?);
            }
            Ok(last.1)
        };
        let looked = self.watched.iter_mut().try_for_each(|watched| {
            let is_touched = match pages {
                Pages::Process(pages) => pages.locate(frames, watched)? && !is_idle(watched.head)?,
                Pages::Group(_) if is_idle(watched.head)? => false,
                Pages::Group(pages) => match pages.charged(frames, watched.frame)? {
                    Some(unit) => {
                        watched.head = unit.head;
                        true
                    }
                    None => false,
                },
            };
            if is_touched {
                batch.push(PageNumber(watched.page), AccessKind::Unknown);
                heads.push(watched.head);
            }
            io::Result::Ok(())
        });
        looked.map_err(self.pages.failed("looking at its pages"))?;
        self.mark()
    }

    fn run_window(
        &mut self,
        stop: &AtomicBool,
        end: Instant,
        before: Duration,
        sink: Sink<'_>,
    ) -> Result<Window, TrapError> {
        let (budget, interval) = (self.budget(), self.control.interval());
        let mut window = Window::default();
        let (start, cpu) = (Instant::now(), cpu_time());
        loop {
            self.pages
                .rest(stop, (start + window.length + interval).min(end));
            if let Pages::Process(pages) = &self.pages
                && let Err(gone) = pages.process.check_alive()
            {
                // The observations stay valid; the next period reports it.
                return if window.touches > 0 {
                    Ok(window)
                } else {
                    Err(gone)
                };
            }
            self.look()?;
            let to = start.elapsed();
            sink(&Observation::Scan(Scan {
                from: window.length,
                to,
                touched: &self.batch,
            }));
            window.length = to;
            window.looks += 1;
            window.touches += self.batch.len() as u64;
            self.touched
                .extend(self.batch.pages().iter().map(|page| page.0));
            window.look_time = cpu_time().saturating_sub(cpu);
            window.fault_time =
                self.touch_cost.time * u32::try_from(window.touches).unwrap_or(u32::MAX);
            let taken = before + window.look_time + window.fault_time;
            let next = window.look_time.div_f64(window.looks as f64);
            window.budget_ran_out =
                window.looks >= LOOKS_MIN && budget.is_some_and(|budget| taken + next >= budget);
            if window.budget_ran_out || stop.load(Ordering::Relaxed) || Instant::now() >= end {
                return Ok(window);
            }
        }
    }
}

/// For how many periods a sample is kept that took so long to draw.
fn periods_to_keep(took: Duration, budget: Duration) -> u32 {
    let share = took.as_secs_f64() / (budget.as_secs_f64() * DRAWING).max(f64::MIN_POSITIVE);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped before the cast"
    )]
    let periods = share.clamp(0.0, 1000.0) as u32;
    periods
}

/// What a window found and took.
#[derive(Debug, Default)]
struct Window {
    looks: u64,
    touches: u64,
    length: Duration,
    look_time: Duration,
    fault_time: Duration,
    budget_ran_out: bool,
}

impl Backend for IdleScanner {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let (start, cpu) = (Instant::now(), cpu_time());
        let end = start + self.config.period;
        self.touched.clear();
        self.draw()?;
        let collect_time = cpu_time().saturating_sub(cpu);
        self.arm()?;
        let arm_time = cpu_time().saturating_sub(cpu);
        let window = self.run_window(stop, end, arm_time, sink)?;
        self.pages.rest(stop, end);

        let (length, scale) = (start.elapsed(), self.scale);
        let taken = window.fault_time + arm_time + window.look_time;
        let (looks, tracked) = (window.looks.max(1), self.watched.len() as u64);
        let drawn = self.drawn;
        let distinct_pages = self.touched.len() as u64;
        let period = Period {
            index: self.periods,
            method: TraceMethod::IdlePages,
            length,
            window: window.length,
            undisturbed: Undisturbed::whole(window.length),
            scale,
            populated_pages: (tracked - drawn.swapped) * u64::from(scale),
            tracked_pages: tracked,
            distinct_pages,
            traps: TrapCounts::default(),
            scans: ScanCounts {
                scans: window.looks,
                interval: window.length.div_f64(looks as f64),
                touches: window.touches,
                writes: 0,
                resolution_pages: u32::try_from(window.touches.div_ceil(looks)).unwrap_or(u32::MAX),
                swapped_pages: drawn.swapped,
                huge_pages: drawn.huge,
                cache_pages: drawn.cache,
            },
            samples: SampleCounts::default(),
            rearmed_pages: window.touches + tracked,
            fault_time: window.fault_time,
            arm_time: arm_time + window.look_time,
            collect_time,
            overhead_ratio: taken.as_secs_f64()
                / (length.as_secs_f64() * self.pages.vcpus() as f64),
            budget_exhausted: window.budget_ran_out,
            losses: PeriodLosses {
                stayed_accessible: drawn.untracked,
                ..PeriodLosses::default()
            },
        };
        self.periods += 1;
        self.control.adapt(&WindowCost {
            scans: window.looks,
            touches: window.touches,
            watched_pages: tracked - drawn.swapped,
            distinct_pages,
            arm_seconds: arm_time.as_secs_f64(),
            scan_seconds: (window.look_time + window.fault_time).as_secs_f64(),
            budget_seconds: self.budget().map(|budget| budget.as_secs_f64()),
        });
        Ok(period)
    }

    fn detach(self: Box<Self>) -> Result<(), TrapError> {
        Ok(())
    }

    fn touch_cost(&self) -> TouchCost {
        self.touch_cost
    }

    fn ram_pages(&self) -> u64 {
        match &self.pages {
            Pages::Process(pages) => pages.target.layout().pages(),
            Pages::Group(pages) => pages
                .memory
                .iter()
                .map(|range| range.end - range.start)
                .sum(),
        }
    }

    fn follow(&mut self, target: &TraceTarget) -> Result<bool, TrapError> {
        let Pages::Process(pages) = &mut self.pages else {
            return Ok(false);
        };
        pages.layout = ProcessPages::layout(target);
        pages.target = target.clone();
        Ok(true)
    }

    fn follow_group(&mut self, group: &GroupTarget) {
        if let Pages::Group(pages) = &mut self.pages {
            pages.target = group.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_kept_until_its_cost_is_a_quarter_of_the_budget() {
        let ms = Duration::from_millis;
        for (took, kept) in [(0, 0), (12, 0), (13, 1), (26, 2), (1_000_000, 1000)] {
            assert_eq!(periods_to_keep(ms(took), ms(50)), kept, "{took} ms");
        }
    }

    #[test]
    fn a_thread_of_damon_is_found_by_its_name_alone() {
        // Whatever runs on this host, it is none of ours.
        assert_ne!(damon_thread(), Some(std::process::id()));
    }
}
