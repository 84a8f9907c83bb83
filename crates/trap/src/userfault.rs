//! A userfaultfd: who waits for which page, and letting them go on.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::ram::PAGE_BYTES;
use crate::sys::{self, AddressRange, UFFD_MESSAGE_BYTES, UffdUse};

/// Messages taken by one read: more than a VM has CPUs that wait at once, as a rule.
const MESSAGES: usize = 64;

/// An access that waits until its page is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Address of the access.
    pub address: u64,
    /// Whether it is a write.
    pub write: bool,
}

/// A userfaultfd on a process's memory: in minor mode, or for asynchronous write protection.
#[derive(Debug)]
pub struct Userfault {
    descriptor: OwnedFd,
    registered: Vec<AddressRange>,
}

impl Userfault {
    /// Agrees on the interface and registers `ranges`.
    ///
    /// A failure part of the way gives back what was registered before it.
    ///
    /// # Errors
    ///
    /// The system call's: EBUSY if another userfaultfd stands on a range, EINVAL if the kernel
    /// has no minor faults on shared memory.
    pub fn register(
        descriptor: OwnedFd,
        ranges: impl IntoIterator<Item = AddressRange>,
    ) -> io::Result<Self> {
        Self::register_for(UffdUse::Minor, descriptor, ranges)
    }

    /// Has writes to pages of `ranges` that are protected noted in the page
    /// tables, without anybody waiting for them.
    ///
    /// # Errors
    ///
    /// The system call's: EBUSY if another userfaultfd stands on a range, EINVAL if the kernel
    /// cannot note writes (before Linux 6.7).
    pub fn note_writes(
        descriptor: OwnedFd,
        ranges: impl IntoIterator<Item = AddressRange>,
    ) -> io::Result<Self> {
        Self::register_for(UffdUse::AsyncWriteProtect, descriptor, ranges)
    }

    fn register_for(
        purpose: UffdUse,
        descriptor: OwnedFd,
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

    /// Takes the accesses that began to wait; never waits itself.
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

    /// Maps the pages of `range` again and lets whoever waits for them go on.
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
                    // Part is done, or the target's mappings are changing: go on.
                    Some(libc::EAGAIN) => {}
                    _ => return Err(error),
                },
            }
            rest.start += passed_bytes;
            rest.len_bytes = rest.len_bytes.saturating_sub(passed_bytes);
        }
        Ok(())
    }

    /// Protects pages against writes, whether they are there or not; after [`note_writes`](Self::note_writes).
    pub(crate) fn write_protect(&self, range: AddressRange) -> io::Result<()> {
        loop {
            match sys::uffd_write_protect(self.as_fd(), range) {
                // The target's mappings are changing.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                done => return done,
            }
        }
    }

    fn wake(&self, range: AddressRange) -> io::Result<()> {
        sys::uffd_wake(self.descriptor.as_fd(), range)
    }

    /// Gives all ranges back to the kernel; whoever waits goes on.
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
    }
}
