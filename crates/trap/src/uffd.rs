//! userfaultfd and `PAGEMAP_SCAN`: the safe interface to both, and their only one in this workspace.
//!
//! Two calls can fail although nothing is wrong. `UFFDIO_WRITEPROTECT` and `UFFDIO_CONTINUE` return EAGAIN while
//! the mappings of the process change, and are repeated. `PAGEMAP_SCAN` stops early when its vector is full, and is
//! continued where it stopped. A kernel that reports more regions than the vector holds, or no progress, is an error.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::ram::PAGE_BYTES;
use crate::sys::{self, PageRegion, UFFD_MESSAGE_BYTES};

pub use crate::sys::{AddressRange, UserfaultPurpose};

/// Number of messages taken by one read: usually more than a VM has CPUs that wait at once.
const MESSAGES: usize = 64;
/// Number of regions of written pages taken from the kernel by one call.
const REGIONS: usize = 4096;

/// An access that waits until its page is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Address of the access.
    pub address: u64,
    /// Whether it is a write.
    pub write: bool,
}

/// A userfaultfd on a process's memory. Dropped, it gives the memory back to the kernel.
#[derive(Debug)]
pub struct Userfault {
    descriptor: OwnedFd,
    registered: Vec<AddressRange>,
}

impl Userfault {
    /// Opens a userfaultfd on our own memory and registers `ranges`.
    ///
    /// # Errors
    ///
    /// As [`register`](Self::register), and EPERM without the privilege.
    pub fn open(
        purpose: UserfaultPurpose,
        ranges: impl IntoIterator<Item = AddressRange>,
    ) -> io::Result<Self> {
        Self::register(sys::userfaultfd()?, purpose, ranges)
    }

    /// Negotiates the interface and registers `ranges`, which lie in the address space on which `descriptor` was
    /// opened.
    ///
    /// After a failure, the ranges registered before it are unregistered.
    ///
    /// # Errors
    ///
    /// The system call's: EBUSY if another userfaultfd is registered on a range, EINVAL if the kernel lacks
    /// what `purpose` needs.
    pub fn register(
        descriptor: OwnedFd,
        purpose: UserfaultPurpose,
        ranges: impl IntoIterator<Item = AddressRange>,
    ) -> io::Result<Self> {
        sys::uffd_api(descriptor.as_fd(), purpose)?;
        let mut userfault = Self {
            descriptor,
            registered: Vec::new(),
        };
        for range in ranges {
            sys::uffd_register(userfault.descriptor.as_fd(), range, purpose)?;
            userfault.registered.push(range);
        }
        Ok(userfault)
    }

    /// Returns the accesses that began to wait; never waits itself.
    ///
    /// # Errors
    ///
    /// The system call's; no access was taken.
    pub fn read_faults(&self, faults: &mut Vec<Fault>) -> io::Result<()> {
        faults.clear();
        let mut bytes = [0; MESSAGES * UFFD_MESSAGE_BYTES];
        let len_bytes = match rustix::io::read(&self.descriptor, &mut bytes) {
            Ok(len_bytes) => len_bytes,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        let messages = bytes[..len_bytes].chunks_exact(UFFD_MESSAGE_BYTES);
        faults.extend(messages.filter_map(parse_fault));
        Ok(())
    }

    /// Maps the pages of `range` again and wakes the accesses that wait for them.
    ///
    /// Pages that are mapped already, and pages that the file no longer holds, are passed
    /// over; accesses to those are tried again and then served by the kernel.
    ///
    /// # Errors
    ///
    /// The system call's: ESRCH when the process is gone. The pages before are mapped.
    pub fn resolve(&self, range: AddressRange) -> io::Result<()> {
        let mut rest = range;
        while rest.len_bytes > 0 {
            let (mapped_bytes, result) = sys::uffd_continue(self.descriptor.as_fd(), rest);
            let mut passed_bytes = mapped_bytes;
            match result {
                Ok(()) => return Ok(()),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EEXIST | libc::EFAULT) => {
                        let start = rest.start + mapped_bytes;
                        self.wake(AddressRange {
                            start,
                            len_bytes: PAGE_BYTES,
                        })?;
                        passed_bytes += PAGE_BYTES;
                    }
                    // Part is done, or the target's mappings are changing: continue.
                    Some(libc::EAGAIN) => {}
                    _ => return Err(error),
                },
            }
            rest.start += passed_bytes;
            rest.len_bytes = rest.len_bytes.saturating_sub(passed_bytes);
        }
        Ok(())
    }

    /// Protects pages against writes, whether they are present or not.
    ///
    /// # Errors
    ///
    /// The system call's; some of the pages may be protected.
    pub fn write_protect(&self, range: AddressRange) -> io::Result<()> {
        self.set_write_protection(range, true)
    }

    /// Lifts the protection against writes and wakes the accesses that wait for a page of `range`.
    ///
    /// # Errors
    ///
    /// The system call's; some of the pages may be protected still.
    pub fn lift_write_protection(&self, range: AddressRange) -> io::Result<()> {
        self.set_write_protection(range, false)
    }

    fn set_write_protection(&self, range: AddressRange, protect: bool) -> io::Result<()> {
        loop {
            match sys::uffd_write_protect(self.as_fd(), range, protect) {
                // The target's mappings are changing.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                done => return done,
            }
        }
    }

    fn wake(&self, range: AddressRange) -> io::Result<()> {
        sys::uffd_wake(self.descriptor.as_fd(), range)
    }

    /// Unregisters all ranges; waiting accesses continue.
    ///
    /// # Errors
    ///
    /// The last system call's that failed; every range was tried.
    pub fn unregister(&self) -> io::Result<()> {
        // Each range is given back even if one before it could not be.
        let results = self
            .registered
            .iter()
            .map(|&range| sys::uffd_unregister(self.as_fd(), range));
        results.fold(Ok(()), Result::and)
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Lists the pages written since they were protected ([`UserfaultPurpose::AsyncWriteProtect`]) and protects
/// them again in the same step, so that no write falls between two scans.
#[derive(Debug)]
pub struct WrittenPages {
    regions: Vec<PageRegion>,
}

impl WrittenPages {
    /// Allocates the buffer for the kernel's results.
    #[must_use]
    pub fn new() -> Self {
        Self {
            regions: vec![PageRegion::default(); REGIONS],
        }
    }

    /// Calls `visit` for each run of pages in `range` that were written, in ascending order.
    ///
    /// `pagemap` is that of the process in which `range` lies.
    ///
    /// # Errors
    ///
    /// The system call's; `visit` has been called for the runs before.
    pub fn scan(
        &mut self,
        pagemap: BorrowedFd<'_>,
        range: AddressRange,
        mut visit: impl FnMut(AddressRange),
    ) -> io::Result<()> {
        let end = range.start + range.len_bytes;
        let mut at = range.start;
        while at < end {
            let rest = AddressRange {
                start: at,
                len_bytes: end - at,
            };
            let (filled, walked) = sys::pagemap_scan_written(pagemap, rest, &mut self.regions)?;
            for region in &self.regions[..filled] {
                visit(AddressRange {
                    start: region.start,
                    len_bytes: region.end.min(end).saturating_sub(region.start),
                });
            }
            // Without progress the scan would never end.
            if walked <= at {
                return Err(io::Error::other("the scan made no progress"));
            }
            at = walked;
        }
        Ok(())
    }
}

impl Default for WrittenPages {
    fn default() -> Self {
        Self::new()
    }
}

/// Reads one `struct uffd_msg`; `None` for events other than a page fault.
fn parse_fault(message: &[u8]) -> Option<Fault> {
    let word = |at: usize| {
        Some(u64::from_ne_bytes(
            message.get(at..at + 8)?.try_into().ok()?,
        ))
    };
    (*message.first()? == sys::UFFD_EVENT_PAGEFAULT).then_some(())?;
    Some(Fault {
        write: word(8)? & sys::UFFD_PAGEFAULT_FLAG_WRITE != 0,
        address: word(16)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_as_the_kernel_lays_it_out() {
        let mut message = [0u8; UFFD_MESSAGE_BYTES];
        message[0] = 0x12;
        message[8] = 1;
        message[16..24].copy_from_slice(&0x7f00_1234_5000u64.to_ne_bytes());
        assert_eq!(
            parse_fault(&message),
            Some(Fault {
                address: 0x7f00_1234_5000,
                write: true
            })
        );
        message[0] = 0x13;
        assert_eq!(parse_fault(&message), None);
        assert_eq!(parse_fault(&[0x12; 20]), None);
    }
}
