//! Write protection of a machine's memory by a userfaultfd: with a thread that handles each first write, and without.
//!
//! The classical way to track writes, done from user space. KVM drops its own mapping of a page when the
//! process's is protected, so the guest's writes are seen as any other.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use plimsoll_flow::PageNumber;
use plimsoll_trap::uffd::{
    AddressRange, PageQuery, PageScan, Userfault, UserfaultPurpose, WrittenMemory,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::tiny::Machine;
use super::written::WrittenBitmaps;
use super::{KvmError, Round, Tracker};

const PAGE_BYTES: u64 = 4096;

/// A machine's memory under a userfaultfd, all of it protected.
#[derive(Debug)]
struct ProtectedMemory {
    userfault: Userfault,
    ranges: Vec<AddressRange>,
    /// Keeps the memory of the ranges alive.
    machine: Arc<Machine>,
}

impl ProtectedMemory {
    fn new(machine: Arc<Machine>, purpose: UserfaultPurpose) -> Result<Self, KvmError> {
        let ranges = machine.ranges();
        let userfault = Userfault::open(purpose, ranges.iter().copied());
        let protected = Self {
            userfault: userfault.map_err(KvmError::call("userfaultfd"))?,
            ranges,
            machine,
        };
        for &range in &protected.ranges {
            protected.protect(range)?;
        }
        Ok(protected)
    }

    fn protect(&self, range: AddressRange) -> Result<(), KvmError> {
        let protected = self.userfault.protect(range);
        protected.map_err(KvmError::call("UFFDIO_WRITEPROTECT"))
    }

    /// Lets all writes continue, and reports none from now on.
    fn release(&self) {
        // It fails only for ranges that are no longer registered.
        let _ = self.userfault.unregister();
    }

    /// Slot and page that an address lies in.
    fn place(&self, address: u64) -> Option<(usize, u64)> {
        self.ranges.iter().enumerate().find_map(|(slot, range)| {
            let offset = address.checked_sub(range.start)?;
            (offset < range.len_bytes).then_some((slot, offset / PAGE_BYTES))
        })
    }
}

impl Drop for ProtectedMemory {
    fn drop(&mut self) {
        self.release();
    }
}

/// Write protection whose faults wait for a thread of ours.
#[derive(Debug)]
pub struct WriteProtect {
    shared: Arc<SharedState>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct SharedState {
    protected: ProtectedMemory,
    /// Held while a page is recorded and unprotected, and while a round is taken and protected again: so a page is
    /// writable only if it is recorded.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    written: WrittenBitmaps,
    /// Why the thread ended; all memory is writable then.
    failed: Option<KvmError>,
}

impl WriteProtect {
    /// Protects a machine's memory.
    ///
    /// # Errors
    ///
    /// [`KvmError::Call`]: the kernel has no such userfaultfd, or we may not open one.
    pub fn start(machine: Arc<Machine>) -> Result<Self, KvmError> {
        let written = WrittenBitmaps::new(machine.slots());
        let protected = ProtectedMemory::new(machine, UserfaultPurpose::WriteProtect)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(KvmError::call("eventfd"))?;
        let heard = stop.try_clone().map_err(KvmError::call("dup"))?;
        let shared = Arc::new(SharedState {
            protected,
            state: Mutex::new(State {
                written,
                failed: None,
            }),
        });
        let served = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("write-protect".into())
            .spawn(move || served.serve(heard.as_fd()))
            .map_err(KvmError::call("clone"))?;
        Ok(Self {
            shared,
            stop,
            thread: Some(thread),
        })
    }
}

impl SharedState {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets writes continue until `stop` is written to.
    fn serve(&self, stop: BorrowedFd<'_>) {
        if let Err(error) = self.serve_faults(stop) {
            self.protected.release();
            self.state().failed = Some(error);
        }
    }

    fn serve_faults(&self, stop: BorrowedFd<'_>) -> Result<(), KvmError> {
        let userfault = &self.protected.userfault;
        let mut faults = Vec::new();
        loop {
            let descriptors = [userfault.as_fd(), stop];
            let mut waited = descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match poll(&mut waited, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(KvmError::call("poll")(error)),
            }
            if !waited[1].revents().is_empty() {
                return Ok(());
            }
            let read = userfault.read_faults(&mut faults);
            read.map_err(KvmError::call("read of a userfaultfd"))?;
            let mut state = self.state();
            for fault in &faults {
                let Some((slot, page)) = self.protected.place(fault.address) else {
                    state.written.note(None, 0);
                    continue;
                };
                state.written.note(Some(slot), page);
                let lifted = userfault.lift_protection(AddressRange {
                    start: self.protected.ranges[slot].start + page * PAGE_BYTES,
                    len_bytes: PAGE_BYTES,
                });
                lifted.map_err(KvmError::call("UFFDIO_WRITEPROTECT"))?;
            }
        }
    }
}

impl Tracker for WriteProtect {
    fn round(&mut self) -> Result<Round, KvmError> {
        let mut state = self.shared.state();
        if let Some(error) = state.failed.take() {
            return Err(error);
        }
        let round = state.written.take();
        let protected = &self.shared.protected;
        let slots = protected.machine.slots().iter();
        for (slot, range) in slots.zip(&protected.ranges) {
            let offsets: Vec<u64> = round
                .pages()
                .iter()
                .filter_map(|&page| slot.offset_of(page))
                .collect();
            for run in offsets.chunk_by(|before, next| before + 1 == *next) {
                protected.protect(AddressRange {
                    start: range.start + run[0] * PAGE_BYTES,
                    len_bytes: run.len() as u64 * PAGE_BYTES,
                })?;
            }
        }
        Ok(round)
    }
}

impl Drop for WriteProtect {
    fn drop(&mut self) {
        self.shared.protected.release();
        // An eventfd that counts to 1 takes a write at once.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing more to report.
            let _ = thread.join();
        }
    }
}

/// Write protection whose faults the kernel serves by itself (`UFFD_FEATURE_WP_ASYNC`), read by `PAGEMAP_SCAN`.
#[derive(Debug)]
pub struct AsyncWriteProtect {
    protected: ProtectedMemory,
    pagemap: File,
    written: PageScan,
}

impl AsyncWriteProtect {
    /// Protects a machine's memory.
    ///
    /// # Errors
    ///
    /// [`KvmError::Call`]: the kernel has no such userfaultfd (from Linux 6.7 on it has), or we may not open one.
    pub fn start(machine: Arc<Machine>) -> Result<Self, KvmError> {
        let pagemap = File::open("/proc/self/pagemap");
        Ok(Self {
            pagemap: pagemap.map_err(KvmError::call("open of /proc/self/pagemap"))?,
            protected: ProtectedMemory::new(machine, UserfaultPurpose::AsyncWriteProtect)?,
            written: PageScan::new(),
        })
    }
}

impl Tracker for AsyncWriteProtect {
    fn round(&mut self) -> Result<Round, KvmError> {
        let mut pages = Vec::new();
        let slots = self.protected.machine.slots().iter();
        let query = PageQuery::WrittenAndProtected(WrittenMemory {
            is_private: false,
            is_registered: true,
        });
        for (slot, &range) in slots.zip(&self.protected.ranges) {
            let scanned = self
                .written
                .scan(self.pagemap.as_fd(), range, query, |run, _| {
                    // The kernel answers within the range that it was given.
                    let first = slot.first.0 + (run.start - range.start) / PAGE_BYTES;
                    pages.extend((first..first + run.len_bytes / PAGE_BYTES).map(PageNumber));
                });
            scanned.map_err(KvmError::call("PAGEMAP_SCAN"))?;
        }
        pages.sort_unstable();
        Ok(Round::of(pages))
    }
}
