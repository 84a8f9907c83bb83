//! Write protection of a machine's memory by a userfaultfd: with a thread that hears of each first write, and without.
//!
//! The classical way to track writes, done from user space. KVM drops its own mapping of a page when the
//! process's is protected, so the guest's writes are seen as any other.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use plimsoll_flow::PageNumber;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::sys::{self, AddressRange, PageRegion, UFFD_MESSAGE_BYTES};
use super::tiny::Machine;
use super::written::Written;
use super::{KvmError, Round, Tracker};

/// Messages taken by one read: more than a machine has vCPUs that wait at once.
const MESSAGES: usize = 64;
/// Stretches of written pages taken by one scan.
const REGIONS: usize = 4096;
const PAGE_BYTES: u64 = 4096;

/// A machine's memory under a userfaultfd, all of it protected.
#[derive(Debug)]
struct Protected {
    uffd: OwnedFd,
    ranges: Vec<AddressRange>,
    /// Holds what the ranges lie in.
    machine: Arc<Machine>,
}

impl Protected {
    fn new(machine: Arc<Machine>, features: u64) -> Result<Self, KvmError> {
        let features = features | sys::UFFD_FEATURE_WP_UNPOPULATED;
        let uffd = sys::userfaultfd(features).map_err(KvmError::call("userfaultfd"))?;
        let mut protected = Self {
            uffd,
            ranges: Vec::new(),
            machine,
        };
        for range in protected.machine.ranges() {
            let registered = sys::uffd_register(protected.uffd.as_fd(), range);
            registered.map_err(KvmError::call("UFFDIO_REGISTER"))?;
            protected.ranges.push(range);
            protected.protect(range, true)?;
        }
        Ok(protected)
    }

    fn protect(&self, range: AddressRange, protect: bool) -> Result<(), KvmError> {
        let result = sys::uffd_write_protect(self.uffd.as_fd(), range, protect);
        result.map_err(KvmError::call("UFFDIO_WRITEPROTECT"))
    }

    /// Lets all writes go on, from now on without being told.
    fn release(&self) {
        for &range in &self.ranges {
            // It fails only for what is not registered any more.
            let _ = sys::uffd_unregister(self.uffd.as_fd(), range);
        }
    }

    /// Slot and page that an address lies in.
    fn place(&self, address: u64) -> Option<(usize, u64)> {
        self.ranges.iter().enumerate().find_map(|(slot, range)| {
            let offset = address.checked_sub(range.start)?;
            (offset < range.len_bytes).then_some((slot, offset / PAGE_BYTES))
        })
    }
}

impl Drop for Protected {
    fn drop(&mut self) {
        self.release();
    }
}

/// Write protection whose faults wait for a thread of ours.
#[derive(Debug)]
pub struct WriteProtect {
    shared: Arc<Shared>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    protected: Protected,
    /// Held while a page is noted and unprotected, and while a round is taken and protected again: so a page is
    /// writable only if it is noted.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    written: Written,
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
        let written = Written::new(machine.slots());
        let protected = Protected::new(machine, sys::UFFD_FEATURE_PAGEFAULT_FLAG_WP)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(KvmError::call("eventfd"))?;
        let heard = stop.try_clone().map_err(KvmError::call("dup"))?;
        let shared = Arc::new(Shared {
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

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets writes go on until `stop` is written to.
    fn serve(&self, stop: BorrowedFd<'_>) {
        if let Err(error) = self.serve_faults(stop) {
            self.protected.release();
            self.state().failed = Some(error);
        }
    }

    fn serve_faults(&self, stop: BorrowedFd<'_>) -> Result<(), KvmError> {
        let uffd = self.protected.uffd.as_fd();
        let mut bytes = [0; MESSAGES * UFFD_MESSAGE_BYTES];
        loop {
            let mut waited = [uffd, stop].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match poll(&mut waited, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(KvmError::call("poll")(error)),
            }
            if !waited[1].revents().is_empty() {
                return Ok(());
            }
            let len_bytes = match rustix::io::read(uffd, &mut bytes) {
                Ok(len_bytes) => len_bytes,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(KvmError::call("read of a userfaultfd")(error)),
            };
            let mut state = self.state();
            for message in bytes[..len_bytes].chunks_exact(UFFD_MESSAGE_BYTES) {
                let fault = fault_address(message);
                match fault.and_then(|address| self.protected.place(address)) {
                    Some((slot, page)) => {
                        state.written.note(Some(slot), page);
                        self.protected.protect(
                            AddressRange {
                                start: self.protected.ranges[slot].start + page * PAGE_BYTES,
                                len_bytes: PAGE_BYTES,
                            },
                            false,
                        )?;
                    }
                    None => state.written.note(None, 0),
                }
            }
        }
    }
}

/// Address of a page fault by a `struct uffd_msg`; `None` for other events.
fn fault_address(message: &[u8]) -> Option<u64> {
    (*message.first()? == sys::UFFD_EVENT_PAGEFAULT).then_some(())?;
    let address = message.get(16..24)?.try_into().ok()?;
    Some(u64::from_ne_bytes(address))
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
                protected.protect(
                    AddressRange {
                        start: range.start + run[0] * PAGE_BYTES,
                        len_bytes: run.len() as u64 * PAGE_BYTES,
                    },
                    true,
                )?;
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
            // A thread that panicked has nothing more to tell.
            let _ = thread.join();
        }
    }
}

/// Write protection whose faults the kernel serves by itself (`UFFD_FEATURE_WP_ASYNC`), read by `PAGEMAP_SCAN`.
#[derive(Debug)]
pub struct AsyncWriteProtect {
    protected: Protected,
    pagemap: File,
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
            protected: Protected::new(machine, sys::UFFD_FEATURE_WP_ASYNC)?,
        })
    }
}

impl Tracker for AsyncWriteProtect {
    fn round(&mut self) -> Result<Round, KvmError> {
        let mut regions = vec![PageRegion::default(); REGIONS];
        let mut pages = Vec::new();
        let slots = self.protected.machine.slots().iter();
        for (slot, range) in slots.zip(&self.protected.ranges) {
            let end = range.start + range.len_bytes;
            let mut start = range.start;
            while start < end {
                let rest = AddressRange {
                    start,
                    len_bytes: end - start,
                };
                let scan = sys::pagemap_scan_written(self.pagemap.as_fd(), rest, &mut regions);
                let (found, walked) = scan.map_err(KvmError::call("PAGEMAP_SCAN"))?;
                for region in &regions[..found] {
                    let page = |address: u64| slot.first.0 + (address - range.start) / PAGE_BYTES;
                    // The kernel answers within what it was asked for.
                    pages.extend((page(region.start)..page(region.end)).map(PageNumber));
                }
                if walked <= start {
                    return Err(KvmError::Call {
                        call: "PAGEMAP_SCAN",
                        source: std::io::Error::other("it did not get on"),
                    });
                }
                start = walked;
            }
        }
        pages.sort_unstable();
        Ok(Round::of(pages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_page_fault_has_an_address() {
        let mut message = [0; UFFD_MESSAGE_BYTES];
        message[0] = 0x12;
        message[16..24].copy_from_slice(&0x7f00_1234_5000u64.to_ne_bytes());
        assert_eq!(fault_address(&message), Some(0x7f00_1234_5000));
        message[0] = 0x13;
        assert_eq!(fault_address(&message), None);
        assert_eq!(fault_address(&[0x12; 20]), None);
    }
}
