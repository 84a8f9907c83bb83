//! Pages made absent from a VM's page table, and which of them came back.
//!
//! The kernel drops the page-table entry and keeps the page (`barrier`); without a userfaultfd the
//! VM's next access is an ordinary minor fault that maps it again, and nobody waits for anybody. So
//! whether a page is mapped later tells whether it was touched.
//!
//! **Neighbours.** A fault by a read maps, along with its own page, those of the same aligned
//! [`WINDOW_PAGES`] that are in the page cache (fault-around). Whoever watches pages must
//! therefore watch at most one in each such window.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use crate::barrier::{PageBarrier, RANGES_MAX};
use crate::error::TrapError;
use crate::inject::{ends_soon, has_ended};
use crate::ram::{Mapped, PAGE_BYTES, PageRange};
use crate::sys::{AddressRange, process_cpu_time};
use crate::target::{Reached, TraceTarget};

/// Pages that one fault may map: the kernel's `fault_around_bytes` of 64 KiB.
pub const WINDOW_PAGES: u32 = 16;

/// A VM whose pages can be made absent.
#[derive(Debug)]
pub struct Absentees {
    pid: u32,
    reached: Reached,
}

impl Absentees {
    /// Opens what shows the pages of `target`; changes nothing in it.
    pub fn reach(target: &TraceTarget) -> Result<Self, TrapError> {
        Ok(Self {
            pid: target.pid,
            reached: target.reach()?,
        })
    }

    /// Pages of its RAM.
    pub fn ram_pages(&self) -> u64 {
        self.reached.layout.pages()
    }

    /// What was opened.
    pub fn reached(&mut self) -> &mut Reached {
        &mut self.reached
    }

    /// Fails if the VM's process has ended.
    pub fn check_alive(&self) -> Result<(), TrapError> {
        if has_ended(self.reached.pidfd.as_fd()) {
            return Err(TrapError::VmGone { pid: self.pid });
        }
        Ok(())
    }

    /// Runs of pages that hold something.
    pub fn populated(&mut self) -> Result<&[PageRange], TrapError> {
        let pid = self.pid;
        let pidfd = self.reached.pidfd.as_fd();
        let runs = self.reached.populated.runs();
        runs.map_err(|source| call_error(pid, has_ended(pidfd), "finding populated pages", source))
    }

    /// Makes `pages` absent: those that are in use by the kernel at that moment stay.
    pub fn drop_entries(&mut self, pages: &[u64]) -> Result<(), TrapError> {
        let layout = &self.reached.layout;
        let ranges: Vec<_> = pages
            .iter()
            .flat_map(|&page| layout.addresses(&(page..page + 1)))
            .collect();
        for ranges in ranges.chunks(RANGES_MAX) {
            let raised = self.reached.barrier.raise(ranges);
            raised.map_err(|source| self.failed("process_madvise(MADV_PAGEOUT)", source))?;
        }
        // This thread may be on another CPU next time, and the pages in a queue of this one.
        self.reached.barrier.leave_cpu();
        Ok(())
    }

    /// The addresses of a page: one range, or none outside the RAM.
    pub fn addresses(&self, page: u64) -> impl Iterator<Item = AddressRange> + '_ {
        self.reached.layout.addresses(&(page..page + 1))
    }

    /// The window of fault-around that a page lies in: windows are aligned by address.
    pub fn window_of(&self, page: u64) -> u64 {
        self.frame_of(page) / u64::from(WINDOW_PAGES)
    }

    /// How many pages of its window lie before a page.
    pub fn place_in_window(&self, page: u64) -> u64 {
        self.frame_of(page) % u64::from(WINDOW_PAGES)
    }

    /// A page's number in the address space of the VM's process; 0 outside the RAM.
    fn frame_of(&self, page: u64) -> u64 {
        let address = self.addresses(page).next().map(|range| range.start);
        address.unwrap_or_default() / PAGE_BYTES
    }

    /// Calls `visit` for each of `pages` that is mapped.
    pub fn for_each_mapped(
        &mut self,
        pages: &[u64],
        mut visit: impl FnMut(u64, Mapped),
    ) -> Result<(), TrapError> {
        let Reached {
            layout, barrier, ..
        } = &mut self.reached;
        let looked = pages.iter().try_for_each(|&page| {
            layout.addresses(&(page..page + 1)).try_for_each(|range| {
                barrier.for_each_mapped(range, |_, mapped| visit(page, mapped))
            })
        });
        looked.map_err(|source| self.failed("reading pagemap", source))
    }

    /// Makes `pages` absent, those that stay once more; returns the ones that are there all the same: in
    /// constant use, or not to be made absent. The two look alike from outside.
    pub fn make_absent(&mut self, pages: &[u64]) -> Result<Vec<u64>, TrapError> {
        let mut missed = pages.to_vec();
        for _ in 0..2 {
            self.drop_entries(&missed)?;
            let mut there = Vec::new();
            self.for_each_mapped(&missed, |page, _| there.push(page))?;
            missed = there;
        }
        Ok(missed)
    }

    /// CPU time that the VM's process has had.
    pub fn cpu_time(&self) -> Result<Duration, TrapError> {
        process_cpu_time(self.pid).map_err(|source| self.failed("reading its CPU time", source))
    }

    /// What a failed call means: an ending process fails in many ways before it is gone.
    pub fn failed(&self, call: &'static str, source: io::Error) -> TrapError {
        call_error(
            self.pid,
            ends_soon(self.reached.pidfd.as_fd()),
            call,
            source,
        )
    }
}

fn call_error(pid: u32, ended: bool, call: &'static str, source: io::Error) -> TrapError {
    if ended {
        TrapError::VmGone { pid }
    } else {
        TrapError::Call { pid, call, source }
    }
}

/// Binds a test's thread to the CPU that it is on: pages that were dropped as it is moved may wait in the queue of the CPU it
/// left, and be there all the same.
#[cfg(test)]
pub(crate) fn stay_on_this_cpu() {
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &cpus).unwrap();
}
