//! Idle pages: which sampled pages were not used since they were marked idle.
//!
//! The period is that of all backends that mark sampled pages (`marks`).
//!
//! Marking a page idle clears the accessed bits of all page-table entries that map it, those of KVM's second-level tables among
//! them. Nothing is unmapped, no access faults, no process is stopped, and nothing is called in one. So it works on any memory:
//! private, locked, swappable, mapped by several processes.
//!
//! **The sample** is that of `target_pages`. Pages of a process that are swapped out are touched when they are present again;
//! pages that are moved keep their mark. A frame of a control group that is freed loses its mark; if it is charged elsewhere then, it is
//! waited for no more.
//! **Compound pages** (transparent huge pages) have one mark. A sampled page in one counts as touched when any part of it was.
//!
//! Cost: about 2 to 3 µs of the tracer for each page and check; a touched page costs its process one access bit that the
//! processor sets again, measured on attaching.
//!
//! Not here: curves and working sets. Not seen: an access that a processor serves from its TLB does not set the accessed bit.
//! Linux does not flush TLBs for it, so a page in use all the time may stay marked idle until its entry is evicted. Accesses by devices
//! set no accessed bit either.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use plimsoll_flow::TraceMethod;

use crate::backend::{BackendRow, GroupSupport, Yield};
use crate::error::TrapError;
use crate::frames::{BITMAP, Frames, IdleMarks, check_tracking};
use crate::marks::{MarkChecker, Marks};
use crate::rate::RateRule;
use crate::refusal::Refusal;
use crate::requirement::Requirement::{IdleTracking, Memory};
use crate::sample::Sample;
use crate::target::{GroupTarget, TraceTarget};
use crate::target_pages::{Drawn, TargetPages, Watched, check_charges};
use crate::trial::{TouchCost, Toucher, measure_idle_cost};

/// Before this time, too many accesses are still served by TLB entries older than the mark: until other pages, or another process,
/// have displaced them.
const TLB_TIME: Duration = Duration::from_millis(5);

/// The backend `idle`.
pub const ROW: BackendRow = BackendRow {
    method: TraceMethod::IdlePages,
    sees: "Idle pages: when sampled pages were first touched after they were marked, by the kernel's idle page tracking; any memory, nothing is stopped",
    needs: "CONFIG_IDLE_PAGE_TRACKING; root with CAP_SYS_ADMIN; a VM, any process, or a control group whose memory is counted",
    costs: "no fault; the tracer's own time for its checks, within the time budget",
    loses: "all touches of a page but the first, known to within a fifth of its time; accesses that a TLB serves, and those of devices",
    yields: Yield::FirstTouches,
    sees_reads: true,
    options: &["--scan-interval"],
    rate_rules: &[RateRule::Fixed, RateRule::Budget],
    requirements: |_| &[Memory, IdleTracking],
    trial: measure_idle_cost,
    curve_cost: None,
    attach: |target, config| {
        let pages = TargetPages::of_process(target)?;
        let cost = TouchCost::measure(target.pid, measure_idle_cost)?;
        Ok(Box::new(MarkChecker::new(
            IdlePages::open(pages)?,
            cost,
            config,
        )))
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
            Ok(Box::new(MarkChecker::new(
                IdlePages::open(pages)?,
                cost,
                config,
            )))
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

/// Marks of the kernel's idle page tracking. Dropped, they stay, which nothing but another tracer notices.
#[derive(Debug)]
struct IdlePages {
    pages: TargetPages,
    frames: Frames,
    marks: IdleMarks,
    /// The sample, in ascending order of its pages.
    watched: Vec<Watched>,
    /// Those of it that are not known to be touched.
    waiting: Vec<Watched>,
    heads: Vec<u64>,
}

impl IdlePages {
    fn open(pages: TargetPages) -> Result<Self, TrapError> {
        if let Some(by) = other_user() {
            return Err(Refusal::IdleMarksInUse { by }.into());
        }
        Ok(Self {
            marks: IdleMarks::open()?,
            frames: Frames::open(pages.needs_groups())?,
            pages,
            watched: Vec::new(),
            waiting: Vec::new(),
            heads: Vec::new(),
        })
    }
}

impl Marks for IdlePages {
    const METHOD: TraceMethod = TraceMethod::IdlePages;
    const FIRST_CHECK_MIN: Duration = TLB_TIME;

    fn renew(&mut self) -> Result<(), TrapError> {
        self.pages.renew()
    }

    fn check_alive(&self) -> Result<(), TrapError> {
        self.pages.check_alive()
    }

    fn draw(&mut self, sample: Sample) -> Result<Drawn, TrapError> {
        self.pages.draw(&self.frames, sample, &mut self.watched)
    }

    fn watched(&self) -> u64 {
        self.watched.len() as u64
    }

    fn arm(&mut self) -> Result<(), TrapError> {
        self.waiting.clone_from(&self.watched);
        let present = self.watched.iter().filter(|watched| watched.frame != 0);
        // In the order in which they are checked, so that as much time passes for each.
        self.heads.extend(present.map(|watched| watched.head));
        self.heads.dedup();
        let marked = self.marks.make_idle(&self.heads);
        self.heads.clear();
        marked.map_err(self.pages.failed("marking pages idle"))
    }

    fn waiting(&self) -> u64 {
        self.waiting.len() as u64
    }

    fn check(&mut self, touched: &mut Vec<u64>) -> Result<(), TrapError> {
        let (pages, frames, marks) = (&self.pages, &self.frames, &self.marks);
        // Neighbours often belong to one compound page.
        let mut last = (0, true);
        let mut is_idle = |head| -> io::Result<bool> {
            if last.0 != head {
                last = (head, marks.is_idle(head)?);
            }
            Ok(last.1)
        };
        let mut is_waited_for = |watched: &mut Watched| -> io::Result<bool> {
            let is_untouched = match pages {
                TargetPages::Process(pages) => {
                    !pages.locate(frames, watched)? || is_idle(watched.head)?
                }
                TargetPages::Group(_) if is_idle(watched.head)? => true,
                // Freed, and perhaps in use elsewhere.
                TargetPages::Group(pages) if pages.charged(frames, watched.frame)?.is_none() => {
                    return Ok(false);
                }
                TargetPages::Group(_) => false,
            };
            if !is_untouched {
                touched.push(watched.page);
            }
            Ok(is_untouched)
        };
        let mut checked = Ok(());
        self.waiting.retain_mut(|watched| {
            is_waited_for(watched).unwrap_or_else(|error| {
                checked = Err(error);
                true
            })
        });
        checked.map_err(self.pages.failed("reading whether its pages are idle"))
    }

    fn rest(&self, stop: &AtomicBool, due: Instant) {
        self.pages.rest(stop, due);
    }

    fn cpu_time(&self) -> Option<Duration> {
        self.pages.cpu_time()
    }

    fn vcpus(&self) -> usize {
        self.pages.vcpus()
    }

    fn ram_pages(&self) -> u64 {
        self.pages.count()
    }

    fn size_pages(&self) -> Option<u64> {
        // A control group's frames may lie anywhere in the host's memory.
        matches!(self.pages, TargetPages::Process(_)).then(|| self.pages.count())
    }

    fn follow(&mut self, target: &TraceTarget) -> bool {
        self.pages.follow(target)
    }

    fn follow_group(&mut self, group: &GroupTarget) {
        self.pages.follow_group(group);
    }
}
