//! The pages of a process or a control group that kernel interfaces about frames can sample, for the backends `idle` and
//! `damon`.
//!
//! **A process** is sampled by its addresses, so a page that it shares counts as its own. Pages swapped out are in the sample.
//! **A control group** is sampled by the frames of the host's memory, of which those are kept that are charged to the group
//! or to one below it: its anonymous memory, and its page cache, mapped or not. Its processes need not be known.
//!
//! Cost: 2 to 3 µs for each page of a sample; for a control group, a word of two files for each frame of the host in it.
//! Not here: which of the pages are touched.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::claim::Claim;
use crate::error::TrapError;
use crate::frames::{Frames, PagemapEntry, Unit, ranges_of_memory, word};
use crate::process::{TracedProcess, rest_until};
use crate::ram::{PAGE_BYTES, RamLayout};
use crate::refusal::Refusal;
use crate::sample::Sample;
use crate::target::{GroupTarget, TraceTarget};

/// Refuses a group if the kernel does not report to which group pages are charged, or where memory is.
pub fn check_charges(_: &GroupTarget) -> Result<(), Refusal> {
    Frames::open(true)?;
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

/// A page that is watched.
#[derive(Debug, Clone, Copy)]
pub struct Watched {
    /// Its number: that of a VM's page, the page's address of another process, the frame of a control group.
    pub page: u64,
    /// The frame that it had at the last scan; 0 for none.
    pub frame: u64,
    /// The first frame of what it belongs to.
    pub head: u64,
}

/// What a drawn sample is made of.
#[derive(Debug, Clone, Copy, Default)]
pub struct Drawn {
    pub swapped: u64,
    pub huge: u64,
    pub cache: u64,
    /// Whose use is not tracked, as that of huge pages of hugetlbfs.
    pub untracked: u64,
}

impl Drawn {
    /// Counts of a sample of which one page in `thinning` is kept, at random.
    pub fn thin(&mut self, thinning: u64) {
        for count in [
            &mut self.swapped,
            &mut self.huge,
            &mut self.cache,
            &mut self.untracked,
        ] {
            *count /= thinning;
        }
    }

    fn count(&mut self, frame: u64, unit: Unit) {
        self.huge += u64::from(unit.flags.is_head() || unit.head != frame);
        self.cache += u64::from(!unit.flags.is_anonymous());
    }
}

/// A process's pages.
#[derive(Debug)]
pub struct ProcessPages {
    pub process: TracedProcess,
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
        let regions = self.layout.regions().zip(&self.target.ram);
        for (region, mapping) in regions {
            // Of a private mapping of a file, the process's own pages.
            let is_private =
                !self.target.is_vm && mapping.backing == plimsoll_flow::RamBacking::Private;
            for page in sample.runs_in(region.pages()).flatten() {
                let entry = self.entry(region.addresses(&(page..page + 1)).start)?;
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

    /// The address of a page, if it has one by now.
    pub fn address(&self, page: u64) -> Option<u64> {
        let mut addresses = self.layout.addresses(&(page..page + 1));
        addresses.next().map(|range| range.start)
    }

    /// Finds where a page is by now; returns whether it has a frame.
    pub fn locate(&self, frames: &Frames, watched: &mut Watched) -> io::Result<bool> {
        let address = self.address(watched.page);
        let entry = address.map_or(Ok(PagemapEntry(0)), |address| self.entry(address))?;
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
pub struct GroupPages {
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
    pub fn charged(&self, frames: &Frames, frame: u64) -> io::Result<Option<Unit>> {
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
pub enum TargetPages {
    Process(ProcessPages),
    Group(GroupPages),
}

impl TargetPages {
    /// Those of a process, which is claimed against other tracers.
    pub fn of_process(target: &TraceTarget) -> Result<Self, TrapError> {
        ProcessPages::open(target).map(Self::Process)
    }

    /// Those of a control group, which is claimed against other tracers.
    pub fn of_group(group: &GroupTarget) -> Result<Self, TrapError> {
        GroupPages::open(group).map(Self::Group)
    }

    /// Whether drawing from them needs the groups of frames.
    pub fn needs_groups(&self) -> bool {
        matches!(self, Self::Group(_))
    }

    /// Prepares for another period. Fails if the process has ended.
    pub fn renew(&mut self) -> Result<(), TrapError> {
        match self {
            Self::Process(pages) => {
                pages.process.check_alive()?;
                pages.pagemap = ProcessPages::pagemap(&pages.process)?;
            }
            // The host may have got more.
            Self::Group(pages) => pages.memory = memory_of_host()?,
        }
        Ok(())
    }

    /// Fails if the process has ended.
    pub fn check_alive(&self) -> Result<(), TrapError> {
        match self {
            Self::Process(pages) => pages.process.check_alive(),
            Self::Group(_) => Ok(()),
        }
    }

    /// Draws a sample, in ascending order of its pages, in place of `watched`.
    pub fn draw(
        &self,
        frames: &Frames,
        sample: Sample,
        watched: &mut Vec<Watched>,
    ) -> Result<Drawn, TrapError> {
        watched.clear();
        let drawn = match self {
            Self::Process(pages) => pages.draw(frames, sample, watched),
            Self::Group(pages) => pages.draw(frames, sample, watched),
        };
        drawn.map_err(self.failed("drawing a sample of its pages"))
    }

    /// CPU time that the target has used; `None` for a control group of version 1, whose CPU time another hierarchy accounts for.
    pub fn cpu_time(&self) -> Option<Duration> {
        match self {
            Self::Process(pages) => pages.process.cpu_time().ok(),
            Self::Group(pages) => {
                let stat = fs::read_to_string(pages.target.directory.join("cpu.stat")).ok()?;
                usage_of(&stat)
            }
        }
    }

    /// Number of pages, with those that have no contents; for a control group, of the host.
    pub fn count(&self) -> u64 {
        match self {
            Self::Process(pages) => pages.target.layout().pages(),
            Self::Group(pages) => {
                let memory = pages.memory.iter();
                memory.map(|range| range.end - range.start).sum()
            }
        }
    }

    /// Takes the memory that the process has by now; returns whether this is a process.
    pub fn follow(&mut self, target: &TraceTarget) -> bool {
        let Self::Process(pages) = self else {
            return false;
        };
        pages.layout = ProcessPages::layout(target);
        pages.target = target.clone();
        true
    }

    /// Takes the groups that the control group has by now.
    pub fn follow_group(&mut self, group: &GroupTarget) {
        if let Self::Group(pages) = self {
            pages.target = group.clone();
        }
    }

    /// The error of a failed call.
    pub fn failed(&self, call: &'static str) -> impl FnOnce(io::Error) -> TrapError + Copy + '_ {
        move |source| match self {
            Self::Process(pages) => pages.process.failed(call)(source),
            Self::Group(pages) => TrapError::GroupCall {
                directory: pages.target.directory.clone(),
                call,
                source,
            },
        }
    }

    /// Waits until `due` or `stop`, or the end of a process.
    pub fn rest(&self, stop: &AtomicBool, due: Instant) {
        match self {
            Self::Process(pages) => pages.process.rest(stop, due),
            Self::Group(_) => rest_until(stop, due, || false),
        }
    }

    /// vCPUs of a VM of whose time the budget is a share; a process and a group count as one.
    pub fn vcpus(&self) -> usize {
        match self {
            Self::Process(pages) => pages.process.vcpus,
            Self::Group(_) => 1,
        }
    }
}

/// The CPU time in the `cpu.stat` of a control group of version 2, with all groups below it.
fn usage_of(stat: &str) -> Option<Duration> {
    let mut lines = stat.lines();
    let usage_us = lines.find_map(|line| line.strip_prefix("usage_usec "))?;
    usage_us.parse().ok().map(Duration::from_micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_time_of_a_group_is_read_where_there_is_one() {
        let stat = "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n";
        assert_eq!(usage_of(stat), Some(Duration::from_micros(1500)));
        // Of version 1.
        assert_eq!(usage_of("nr_periods 0\nnr_throttled 0\n"), None);
    }
}
