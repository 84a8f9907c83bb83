//! The process of a traced VM, and the descriptors by which it and its pages are accessed.
//!
//! Every backend holds a [`TracedProcess`]; a [`Session`] adds what backends that make pages inaccessible need.
//!
//! **Neighbours.** A minor fault by a read maps, along with its own page, those of the same aligned
//! [`WINDOW_PAGES`] that are in the page cache (fault-around). A backend that detects touches by their mapping must
//! therefore track at most one page in each such window.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::barrier::{PageBarrier, RANGES_MAX, RemotePageout};
use crate::claim::Claim;
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::inject::{assess_injection, ends_soon, has_ended, open_pidfd, take_userfaultfd};
use crate::placement::Placement;
use crate::ram::{MappedPage, PAGE_BYTES, PageRange, PopulatedPages, RamLayout};
use crate::refusal::Refusal;
use crate::swap::SwapWatch;
use crate::sys::{AddressRange, process_cpu_time};
use crate::target::TraceTarget;
use crate::uffd::{Userfault, UserfaultPurpose};
use crate::unmapping::Unmapping;
use crate::watchdog::Watchdog;

/// Longest wait without checking the stop flag.
const PATIENCE: Duration = Duration::from_millis(50);
/// Longest time at the end of a period in which the RAM is registered with no userfaultfd.
const FREE_MAX: Duration = Duration::from_millis(100);
const REGISTERING: &str = "registering its RAM";
/// Pages that one fault may map: the kernel's `fault_around_bytes` of 64 KiB.
pub const WINDOW_PAGES: u32 = 16;

/// The process of a VM. A pidfd keeps it from being confused with a later one of the same number.
#[derive(Debug)]
pub struct TracedProcess {
    pub pid: u32,
    pub pidfd: OwnedFd,
    pub vcpus: usize,
    is_vm: bool,
    /// Held by a backend that registers the RAM.
    claim: Option<Claim>,
    /// Ends us if accesses wait for us in vain; `None` where none can wait.
    watchdog: Option<Watchdog>,
}

impl TracedProcess {
    /// Opens the process of `target`.
    pub fn open(target: &TraceTarget) -> Result<Self, TrapError> {
        Ok(Self {
            pid: target.pid,
            pidfd: open_pidfd(target.pid)?,
            vcpus: target.vcpus(),
            is_vm: target.is_vm,
            claim: None,
            watchdog: None,
        })
    }

    /// Fails if the process has ended.
    pub fn check_alive(&self) -> Result<(), TrapError> {
        if has_ended(self.pidfd.as_fd()) {
            return Err(TrapError::VmGone { pid: self.pid });
        }
        Ok(())
    }

    /// The error of a failed call. The calls on an ending process fail in many ways before it is gone.
    pub fn failed(&self, call: &'static str) -> impl FnOnce(io::Error) -> TrapError + Copy + '_ {
        move |source| {
            let pid = self.pid;
            // The wait below is not a hang.
            self.unguard();
            // Calls on an ending process find no memory, or read none; after other errors the VM would end with us.
            let may_end = source.raw_os_error().is_none_or(|code| code == libc::ESRCH);
            let pidfd = self.pidfd.as_fd();
            if has_ended(pidfd) || may_end && ends_soon(pidfd) {
                TrapError::VmGone { pid }
            } else {
                TrapError::Call { pid, call, source }
            }
        }
    }

    /// Takes a userfaultfd on the address space of the process and registers `ranges` with it; claims the process against
    /// other tracers. A watchdog that was started demands heartbeats from now on.
    pub fn userfault(
        &mut self,
        config: &TraceConfig,
        purpose: UserfaultPurpose,
        ranges: impl IntoIterator<Item = AddressRange>,
    ) -> Result<Userfault, TrapError> {
        assess_injection(self.pid, config.allow_namespaced)?;
        self.claim = Some(Claim::take(self.pid)?);
        let uffd = take_userfaultfd(self.pid, self.pidfd.as_fd())?;
        let userfault = Userfault::new(uffd, purpose, ranges);
        let userfault = userfault.map_err(|source| self.unregistrable(purpose, source))?;
        // From here on an access to a page that is not mapped waits for us.
        self.guard()?;
        let registered = userfault.register();
        registered.map_err(|source| self.unregistrable(purpose, source))?;
        Ok(userfault)
    }

    /// Why memory cannot be registered.
    pub fn unregistrable(&self, purpose: UserfaultPurpose, source: io::Error) -> TrapError {
        match source.raw_os_error() {
            Some(libc::EBUSY) => Refusal::UserfaultInUse.into(),
            // A mapping is no longer there, which a VM's RAM is.
            Some(libc::EINVAL) if !self.is_vm => TrapError::RamChanged { pid: self.pid },
            Some(libc::EINVAL) => Refusal::KernelTooOld {
                missing: purpose.kernel_feature(),
                source,
            }
            .into(),
            // By a security module: who may open a userfaultfd may register memory.
            Some(libc::EACCES) => Refusal::of_missing(purpose.kernel_feature(), source).into(),
            _ => self.failed(REGISTERING)(source),
        }
    }

    /// Registers the RAM again.
    ///
    /// # Errors
    ///
    /// [`TrapError::Interrupted`] if QEMU itself, or somebody else, has a userfaultfd on it by now.
    pub fn register(&self, userfault: &Userfault) -> Result<(), TrapError> {
        userfault
            .register()
            .map_err(|source| match source.raw_os_error() {
                Some(libc::EBUSY) => TrapError::Interrupted(Refusal::UserfaultInUse),
                _ => self.failed(REGISTERING)(source),
            })
    }

    /// Gives the RAM back to the kernel, unless the process ends anyway.
    pub fn unregister(&self, userfault: &Userfault) -> Result<(), TrapError> {
        match userfault.unregister() {
            // Parts of a process's memory are unmapped at any time.
            Err(error)
                if !self.is_vm
                    && matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOMEM)) =>
            {
                Ok(())
            }
            other => match other.map_err(self.failed("giving its RAM back")) {
                Err(TrapError::VmGone { .. }) => Ok(()),
                other => other,
            },
        }
    }

    /// Starts the watchdog, which demands nothing yet.
    pub fn start_watchdog(&mut self) -> Result<(), TrapError> {
        let watchdog = Watchdog::start(self.pid);
        self.watchdog = Some(watchdog.map_err(self.failed("starting the watchdog"))?);
        Ok(())
    }

    /// Demands heartbeats from now on: accesses may wait for us.
    pub fn guard(&self) -> Result<(), TrapError> {
        let guarded = self.watchdog.as_ref().map_or(Ok(()), Watchdog::arm);
        guarded.map_err(self.failed("waking the watchdog"))
    }

    /// Demands no more heartbeats: no access can wait.
    pub fn unguard(&self) {
        self.watchdog.iter().for_each(Watchdog::disarm);
    }

    /// A heartbeat.
    pub fn beat(&self) {
        self.watchdog.iter().for_each(Watchdog::beat);
    }

    /// Waits up to `patience` for an access that traps; returns whether there may be one. Fails if the process has ended.
    pub fn await_fault(
        &self,
        userfault: &Userfault,
        patience: Duration,
    ) -> Result<bool, TrapError> {
        let patience = Timespec::try_from(patience).map_err(io::Error::other);
        let patience = patience.map_err(self.failed("a wait"))?;
        let mut fds = [
            PollFd::from_borrowed_fd(userfault.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.pidfd.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, Some(&patience)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(false),
            Ok(_) => {}
            Err(error) => return Err(self.failed("poll()")(error.into())),
        }
        if !fds[1].revents().is_empty() {
            return Err(TrapError::VmGone { pid: self.pid });
        }
        Ok(true)
    }

    /// Waits until `end`, the end of the process or `stop`.
    pub fn rest(&self, stop: &AtomicBool, end: Instant) {
        rest_until(stop, end, || has_ended(self.pidfd.as_fd()));
    }

    /// CPU time that all threads of the process have used.
    pub fn cpu_time(&self) -> Result<Duration, TrapError> {
        process_cpu_time(self.pid).map_err(self.failed("reading its CPU time"))
    }

    /// `taken` as a share of the vCPUs' time over `length`.
    pub fn overhead_ratio(&self, taken: Duration, length: Duration) -> f64 {
        overhead_ratio(taken, length, self.vcpus)
    }

    /// The end of a period's window, before the end of the period itself: in between, QEMU can register a userfaultfd
    /// on its RAM. It must do so once to enable background snapshots.
    pub fn window_end(config: &TraceConfig, start: Instant) -> Instant {
        start + config.period - (config.period / 10).min(FREE_MAX)
    }

    /// vCPU time that a period may take; `None` for no bound.
    pub fn budget_seconds(&self, config: &TraceConfig) -> Option<f64> {
        Some(config.period_budget(self.vcpus)?.as_secs_f64())
    }
}

/// Waits until `end` or `stop`, or until `is_over`.
pub fn rest_until(stop: &AtomicBool, end: Instant, is_over: impl Fn() -> bool) {
    while !stop.load(Ordering::Relaxed) && !is_over() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        std::thread::sleep(left.min(PATIENCE));
    }
}

/// `taken` as a share of the time of so many CPUs over `length`.
pub fn overhead_ratio(taken: Duration, length: Duration, cpus: usize) -> f64 {
    taken.as_secs_f64() / (length.as_secs_f64() * cpus as f64)
}

/// Pages with contents at the start of a period.
#[derive(Debug, Clone, Copy)]
pub struct Population {
    pub pages: u64,
    /// Populated since the period before: their first touches were not observed.
    pub new_pages: u64,
    /// How long finding them took.
    pub time: Duration,
}

/// A VM whose pages can be made inaccessible.
#[derive(Debug)]
pub struct Session<B: PageBarrier = RemotePageout> {
    pub process: TracedProcess,
    pub layout: RamLayout,
    pub barrier: B,
    populated: PopulatedPages,
    placement: Placement,
    pages_before: Option<u64>,
    /// `None` if swap does not matter to the barrier.
    swap: Option<SwapWatch>,
    pub unmapping: Unmapping,
}

impl Session {
    /// Refuses a VM whose pages cannot be made inaccessible and opens the files that list them; changes nothing in it.
    pub fn open(target: &TraceTarget, config: &TraceConfig) -> Result<Self, TrapError> {
        let process = TracedProcess::open(target)?;
        let swap = SwapWatch::new(target.pid);
        // The watch has begun, so no change of swap goes undetected between the two.
        target.check_swap()?;
        let layout = target.layout();
        let populated = target.populated()?;
        let presence = target.presence()?;
        let pidfd = process.pidfd.try_clone().map_err(process.failed("dup()"))?;
        let barrier = RemotePageout::new(pidfd, presence);
        let session = Self::assemble(process, layout, populated, barrier, target, config);
        Ok(Self {
            swap: Some(swap),
            ..session
        })
    }

    /// Calls `visit` for each of `pages` that is mapped.
    pub fn for_each_mapped(
        &mut self,
        pages: &[u64],
        mut visit: impl FnMut(u64, MappedPage),
    ) -> Result<(), TrapError> {
        let (layout, barrier) = (&self.layout, &mut self.barrier);
        let read = pages.iter().try_for_each(|&page| {
            layout.addresses(&(page..page + 1)).try_for_each(|range| {
                barrier.for_each_mapped(range, |_, mapped| visit(page, mapped))
            })
        });
        read.map_err(self.process.failed("reading pagemap"))
    }

    /// Unmaps `pages`; those in use by the kernel at that time stay mapped.
    pub fn unmap(&mut self, pages: &[u64]) -> Result<(), TrapError> {
        let runs: Vec<_> = pages.iter().map(|&page| page..page + 1).collect();
        self.raise(&runs)?;
        // This thread may run on another CPU next time, and the pages be in a queue of this one.
        self.barrier.leave_cpu();
        Ok(())
    }

    /// Unmaps `pages`, trying twice; returns how many are mapped all the same: in constant use, or pinned. The two cannot be
    /// distinguished from outside.
    ///
    /// # Errors
    ///
    /// As [`Unmapping::record`], and those of the calls.
    pub fn unmap_firmly(&mut self, pages: &[u64]) -> Result<u64, TrapError> {
        let tried = self.mapped_of(pages)?.len() as u64;
        let mut missed = pages.to_vec();
        for _ in 0..2 {
            self.unmap(&missed)?;
            missed = self.mapped_of(&missed)?;
        }
        let stayed = missed.len() as u64;
        self.unmapping.record(tried, stayed)?;
        Ok(stayed)
    }

    fn mapped_of(&mut self, pages: &[u64]) -> Result<Vec<u64>, TrapError> {
        let mut mapped = Vec::new();
        self.for_each_mapped(pages, |page, _| mapped.push(page))?;
        Ok(mapped)
    }
}

impl<B: PageBarrier> Session<B> {
    /// Creates a session from its parts.
    pub fn assemble(
        process: TracedProcess,
        layout: RamLayout,
        populated: PopulatedPages,
        barrier: B,
        target: &TraceTarget,
        config: &TraceConfig,
    ) -> Self {
        Self {
            process,
            layout,
            barrier,
            populated,
            placement: Placement::new(config.handler_cpu, target.pid, &target.busy_threads()),
            pages_before: None,
            swap: None,
            unmapping: Unmapping::default(),
        }
    }

    /// Moves the calling thread to the busiest vCPU's CPU, if that is wanted and due.
    pub fn follow_vcpu(&mut self) {
        self.placement.follow(|| self.barrier.leave_cpu());
    }

    /// Records that the busiest vCPU is probably on another CPU by now.
    pub fn suspect_other_cpu(&mut self) {
        self.placement.suspect();
    }

    /// Calls `visit` for each run of populated pages, in ascending order. Fails if the VM may swap by now.
    pub fn collect(&mut self, visit: impl FnMut(PageRange)) -> Result<Population, TrapError> {
        let start = Instant::now();
        self.check_swap()?;
        let runs = self.populated.runs();
        let runs = runs.map_err(self.process.failed("finding populated pages"))?;
        let pages = runs.iter().map(|run| run.end - run.start).sum();
        runs.iter().cloned().for_each(visit);
        let before = self.pages_before.replace(pages);
        Ok(Population {
            pages,
            new_pages: before.map_or(0, |before| pages - before.min(pages)),
            time: start.elapsed(),
        })
    }

    /// Fails if the VM may swap by now.
    pub fn check_swap(&self) -> Result<(), TrapError> {
        let checked = self.swap.as_ref().map_or(Ok(()), SwapWatch::check);
        checked.map_err(TrapError::Interrupted)
    }

    /// Pages that have contents, without a list of them.
    pub fn populated_pages(&self) -> Result<u64, TrapError> {
        let pages = self.populated.pages();
        pages.map_err(self.process.failed("counting populated pages"))
    }

    /// Whether a page has contents.
    pub fn is_populated(&self, page: u64) -> Result<bool, TrapError> {
        let is_populated = self.populated.has(page);
        is_populated.map_err(self.process.failed("finding a populated page"))
    }

    /// Makes the pages of `runs` inaccessible; those in use by the kernel at that time stay accessible. Fails, before
    /// any page could be written to it, if swap was turned on.
    pub fn raise(&mut self, runs: &[PageRange]) -> Result<(), TrapError> {
        let ranges: Vec<_> = runs
            .iter()
            .flat_map(|run| self.layout.addresses(run))
            .collect();
        for ranges in ranges.chunks(RANGES_MAX) {
            if let Some(swap) = &mut self.swap {
                swap.check_if_changed().map_err(TrapError::Interrupted)?;
            }
            self.barrier
                .raise(ranges)
                .map_err(self.process.failed("process_madvise(MADV_PAGEOUT)"))?;
        }
        Ok(())
    }

    /// Lets the access to `address` that waits go on: its page is accessible again.
    pub fn release_access(&mut self, userfault: &Userfault, address: u64) -> Result<(), TrapError> {
        let page = AddressRange {
            start: address & !(PAGE_BYTES - 1),
            len_bytes: PAGE_BYTES,
        };
        let released = self.barrier.lower(userfault, page);
        released.map_err(self.process.failed("letting an access go on"))
    }

    /// Pages of the VM's RAM.
    pub fn ram_pages(&self) -> u64 {
        self.layout.pages()
    }

    /// The fault-around window that a page lies in: windows are aligned by address.
    pub fn window_of(&self, page: u64) -> u64 {
        self.frame_of(page) / u64::from(WINDOW_PAGES)
    }

    /// How many pages of its window lie before a page.
    pub fn place_in_window(&self, page: u64) -> u64 {
        self.frame_of(page) % u64::from(WINDOW_PAGES)
    }

    /// A page's number in the address space of the VM's process; 0 outside the RAM.
    fn frame_of(&self, page: u64) -> u64 {
        let mut ranges = self.layout.addresses(&(page..page + 1));
        ranges.next().map_or(0, |range| range.start / PAGE_BYTES)
    }
}

/// CPU time of the calling thread: what it takes from a vCPU whose CPU it shares. Time in which
/// the host ran something else does not count.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    // A CPU time is never negative.
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_security_module_denies_is_refused() {
        let pid = std::process::id();
        let process = TracedProcess {
            pid,
            pidfd: open_pidfd(pid).unwrap(),
            vcpus: 1,
            is_vm: true,
            claim: None,
            watchdog: None,
        };
        let denied = io::Error::from_raw_os_error(libc::EACCES);
        let error = process.unregistrable(UserfaultPurpose::Minor, denied);
        assert!(
            matches!(error, TrapError::Refused(Refusal::NoPrivilege { .. })),
            "{error}"
        );
    }
}
