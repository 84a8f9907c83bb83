//! Making pages inaccessible, and accessible again.
//!
//! There are several ways to do that to a running VM; the backends use only this trait. Remote `MADV_PAGEOUT`
//! ([`RemotePageout`]) needs no code in the target. A tracer inside the target can use `MADV_DONTNEED`, which is
//! cheaper and works with a second mapping of the RAM; userfaultfd's read-write protection, once kernels have it, needs
//! neither. An accessed-page scan raises the barrier in the same way and later checks which pages were mapped again,
//! instead of waiting for the accesses.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::ram::{MappedPage, Presence};
use crate::sys::{self, AddressRange};
use crate::uffd::Userfault;

/// Maximum number of ranges in one call: the kernel's limit of a vector (`UIO_MAXIOV`).
pub const RANGES_MAX: usize = 1024;

/// A way of making pages of a VM inaccessible.
pub trait PageBarrier {
    /// Makes the pages of `ranges` (at most [`RANGES_MAX`]) inaccessible: the next access to each
    /// waits in `userfault`.
    ///
    /// This is a request: a page in use by the kernel at that time can stay accessible
    /// without an error. [`for_each_down`](Self::for_each_down) lists those.
    ///
    /// # Errors
    ///
    /// The system call's; some of the pages may be inaccessible then.
    fn raise(&mut self, ranges: &[AddressRange]) -> io::Result<()>;

    /// Calls `visit` with the index, from 0, of each page of `range` that is accessible.
    ///
    /// # Errors
    ///
    /// The system call's; `visit` has been called for the pages before.
    fn for_each_down(&mut self, range: AddressRange, visit: &mut dyn FnMut(u64)) -> io::Result<()>;

    /// Called on a CPU that the tracer is about to leave, whose queues may hold pages of the barrier.
    fn leave_cpu(&mut self) {}

    /// Makes the pages of `range` accessible again and wakes waiting accesses.
    ///
    /// # Errors
    ///
    /// The system call's; the pages before the one that failed are accessible.
    fn lower(&mut self, userfault: &Userfault, range: AddressRange) -> io::Result<()>;
}

/// Page-table entries dropped from outside by `process_madvise(MADV_PAGEOUT)`; for shared
/// memory of a process without swap.
///
/// The kernel takes a page off its LRU list while it drops the entries, puts it back through a short queue of the
/// CPU it runs on, and cannot take a page that is still in such a queue. Each call empties the queue of its own CPU
/// first. So a tracer that changes CPUs must make one more call before it moves, or pages stay in the queue that cannot
/// be made inaccessible.
#[derive(Debug)]
pub struct RemotePageout {
    pidfd: OwnedFd,
    presence: Presence,
    last: Option<AddressRange>,
}

impl RemotePageout {
    /// Works on the process behind `pidfd`, whose pagemap is `presence`.
    pub(crate) fn new(pidfd: OwnedFd, presence: Presence) -> Self {
        Self {
            pidfd,
            presence,
            last: None,
        }
    }

    /// Calls `visit` with the index, from 0, of each page of `range` that is mapped, and its page-table entry's
    /// state.
    ///
    /// # Errors
    ///
    /// The system call's; `visit` has been called for the pages before.
    pub(crate) fn for_each_mapped(
        &mut self,
        range: AddressRange,
        visit: impl FnMut(u64, MappedPage),
    ) -> io::Result<()> {
        self.presence.for_each_present(range, visit)
    }
}

impl PageBarrier for RemotePageout {
    fn raise(&mut self, ranges: &[AddressRange]) -> io::Result<()> {
        self.last = ranges.last().copied().or(self.last);
        let mut rest = ranges.to_vec();
        let mut rest = rest.as_mut_slice();
        while !rest.is_empty() {
            let mut done_bytes = sys::process_pageout(self.pidfd.as_fd(), rest)?;
            if done_bytes == 0 {
                return Err(io::Error::other("process_madvise() went through no page"));
            }
            let done = rest.iter().take_while(|range| {
                let whole = range.len_bytes <= done_bytes;
                done_bytes -= if whole { range.len_bytes } else { 0 };
                whole
            });
            let done = done.count();
            rest = &mut rest[done..];
            if let Some(cut) = rest.first_mut() {
                cut.start += done_bytes;
                cut.len_bytes -= done_bytes;
            }
        }
        Ok(())
    }

    fn for_each_down(&mut self, range: AddressRange, visit: &mut dyn FnMut(u64)) -> io::Result<()> {
        self.presence.for_each_present(range, |page, _| visit(page))
    }

    fn leave_cpu(&mut self) {
        if let Some(last) = self.last {
            // For the queue's sake; whether the range still had entries does not matter, and a
            // target that is gone shows at the next call.
            let _ = sys::process_pageout(self.pidfd.as_fd(), &[last]);
        }
    }

    fn lower(&mut self, userfault: &Userfault, range: AddressRange) -> io::Result<()> {
        userfault.resolve(range)
    }
}
