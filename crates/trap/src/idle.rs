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
//! **The sample** is that of `target_pages`. Pages of a process that are swapped out are touched when they are present again;
//! pages that are moved keep their mark. A frame of a control group that is freed loses its mark; when it is in use again, its
//! group is checked anew.
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
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::{
    AccessKind, PageNumber, Period, PeriodLosses, ReferenceBatch, SampleCounts, ScanCounts,
    TraceMethod, TrapCounts, Undisturbed,
};

use crate::backend::{Backend, BackendRow, GroupSupport, Observation, Scan, Sink, Yield};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::frames::{BITMAP, Frames, IdleMarks, check_tracking, open_frames, open_marks};
use crate::process::cpu_time;
use crate::rate::RateRule;
use crate::refusal::Refusal;
use crate::requirement::Requirement::{IdleTracking, Memory};
use crate::sample::Sample;
use crate::scans::control::{ScanControl, WindowCost};
use crate::target::{GroupTarget, TraceTarget};
use crate::target_pages::{Drawn, TargetPages, Watched, check_charges};
use crate::trial::{TouchCost, Toucher, measure_idle_cost};

/// Minimum number of looks in a window, whatever they cost: one alone sees no reuse.
const LOOKS_MIN: u64 = 3;
/// Share of the budget that drawing samples may take.
const DRAWING: f64 = 0.25;

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
        let pages = TargetPages::of_process(target)?;
        let cost = TouchCost::measure(target.pid, measure_idle_cost)?;
        Ok(Box::new(IdleScanner::new(pages, cost, config)?))
    },
    any_process: true,
    group: Some(GroupSupport {
        check: |group| check_tracking().and_then(|()| check_charges(group)),
        attach: |group, config| {
            let pages = TargetPages::of_group(group)?;
            let cost = measure_idle_cost(Toucher::Thread)?;
            let cost = TouchCost {
                time: cost,
                toucher: Toucher::Thread,
            };
            Ok(Box::new(IdleScanner::new(pages, cost, config)?))
        },
    }),
};

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

fn processes() -> impl Iterator<Item = u32> {
    let listing = fs::read_dir("/proc").into_iter().flatten().flatten();
    listing.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn name_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    // The name is the process's own choice.
    name.trim_end().escape_debug().to_string()
}

/// A target whose pages are looked at. Dropped, it leaves only marks, which nothing but another tracer notices.
#[derive(Debug)]
struct IdleScanner {
    pages: TargetPages,
    frames: Frames,
    marks: IdleMarks,
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
    fn new(
        pages: TargetPages,
        touch_cost: TouchCost,
        config: &TraceConfig,
    ) -> Result<Self, TrapError> {
        if let Some(by) = other_user() {
            return Err(Refusal::IdleMarksInUse { by }.into());
        }
        Ok(Self {
            marks: open_marks()?,
            frames: open_frames(pages.needs_groups())?,
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
        self.pages.renew()?;
        if self.kept_for > 0 {
            self.kept_for -= 1;
            return Ok(());
        }
        let start = cpu_time();
        self.scale = self.control.scale();
        let sample = Sample::of_period(self.scale, 1, self.config.seed, self.periods);
        self.drawn = self.pages.draw(&self.frames, sample, &mut self.watched)?;
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
        let marked = self.marks.make_idle(&self.heads);
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
        let (pages, frames, marks) = (&self.pages, &self.frames, &self.marks);
        let (batch, heads) = (&mut self.batch, &mut self.heads);
        // Neighbours often belong to one compound page.
        let mut last = (0, true);
        let mut is_idle = |head| -> io::Result<bool> {
            if last.0 != head {
                last = (head, marks.is_idle(head)?);
            }
            Ok(last.1)
        };
        let looked = self.watched.iter_mut().try_for_each(|watched| {
            let is_touched = match pages {
                TargetPages::Process(pages) => {
                    pages.locate(frames, watched)? && !is_idle(watched.head)?
                }
                TargetPages::Group(_) if is_idle(watched.head)? => false,
                TargetPages::Group(pages) => match pages.charged(frames, watched.frame)? {
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
            if let Err(gone) = self.pages.check_alive() {
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
        self.pages.count()
    }

    fn follow(&mut self, target: &TraceTarget) -> Result<bool, TrapError> {
        Ok(self.pages.follow(target))
    }

    fn follow_group(&mut self, group: &GroupTarget) {
        self.pages.follow_group(group);
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
}
