//! userfaultfd and `PAGEMAP_SCAN`: the safe interface to both, and their only one in this workspace.
//!
//! Two calls can fail although nothing is wrong. Protecting pages and `UFFDIO_CONTINUE` return EAGAIN while
//! the mappings of the process change, and are repeated. `PAGEMAP_SCAN` stops early when its vector is full, and is
//! continued where it stopped. A kernel that reports more regions than the vector holds, or no progress, is an error.

use std::io;
use std::iter::successors;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use plimsoll_flow::AccessKind;

use crate::ram::{HUGE_PAGE_BYTES, PAGE_BYTES};
use crate::sys::{self, PageRegion, UFFD_MESSAGE_BYTES};

pub use crate::sys::{AddressRange, PageQuery, UserfaultPurpose, WrittenMemory};

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

impl Fault {
    /// Its kind.
    pub fn kind(&self) -> AccessKind {
        if self.write {
            AccessKind::Write
        } else {
            AccessKind::Read
        }
    }
}

/// Bytes unregistered by one call, during which the process can neither map memory nor, before Linux 6.4, serve faults: of
/// memory registered for write protection the kernel walks all page tables, 20 ms a GiB.
const PIECE_BYTES: u64 = 64 << 20;

/// A userfaultfd on a process's memory. Dropped, it gives the memory back to the kernel.
///
/// The kernel allows one userfaultfd on a mapping. So memory can be registered and unregistered any number of times, and
/// be free for others in between.
#[derive(Debug)]
pub struct Userfault {
    descriptor: OwnedFd,
    purpose: UserfaultPurpose,
    ranges: Vec<AddressRange>,
    /// Kernels before 6.17 let one userfaultfd unregister the ranges of another.
    is_registered: AtomicBool,
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
        let userfault = Self::new(sys::userfaultfd()?, purpose, ranges)?;
        userfault.register()?;
        Ok(userfault)
    }

    /// Negotiates the interface for `ranges`, which lie in the address space on which `descriptor` was opened; registers
    /// none of them yet.
    ///
    /// # Errors
    ///
    /// The system call's: EINVAL if the kernel lacks what `purpose` needs.
    pub fn new(
        descriptor: OwnedFd,
        purpose: UserfaultPurpose,
        ranges: impl IntoIterator<Item = AddressRange>,
    ) -> io::Result<Self> {
        sys::uffd_api(descriptor.as_fd(), purpose)?;
        Ok(Self {
            descriptor,
            purpose,
            ranges: ranges.into_iter().collect(),
            is_registered: AtomicBool::new(false),
        })
    }

    /// Registers all ranges, unless they are.
    ///
    /// # Errors
    ///
    /// The system call's, and no range is registered: EBUSY if another userfaultfd is registered on one, EINVAL if the
    /// kernel lacks what the purpose needs.
    pub fn register(&self) -> io::Result<()> {
        if self.is_registered.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        for (index, &range) in self.ranges.iter().enumerate() {
            if let Err(error) = sys::uffd_register(self.as_fd(), range, self.purpose) {
                self.is_registered.store(false, Ordering::Relaxed);
                // One that cannot be given back now is when the descriptor closes.
                let _ = self.give_back(&self.ranges[..index]);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Registers one range, which may be registered already.
    ///
    /// # Errors
    ///
    /// The system call's: EBUSY if another userfaultfd is registered on it, EINVAL or ENOMEM if it is not mapped any more,
    /// ESRCH if the address space is gone.
    pub fn add(&self, range: AddressRange) -> io::Result<()> {
        sys::uffd_register(self.as_fd(), range, self.purpose)
    }

    /// Lets these ranges, each of which was registered or is gone, be the ones to give back. What is left out is given back when
    /// the descriptor closes, in one piece.
    pub fn set_ranges(&mut self, ranges: impl IntoIterator<Item = AddressRange>) {
        self.ranges = ranges.into_iter().collect();
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

    /// Protects pages as the purpose says: against writes, whether they are present or not; or against every access, those that
    /// are present or swapped out.
    ///
    /// # Errors
    ///
    /// The system call's; some of the pages may be protected.
    pub fn protect(&self, range: AddressRange) -> io::Result<()> {
        self.set_protection(range, true)
    }

    /// Lifts the protection and wakes the accesses that wait for a page of `range`.
    ///
    /// # Errors
    ///
    /// The system call's; some of the pages may be protected still.
    pub fn lift_protection(&self, range: AddressRange) -> io::Result<()> {
        self.set_protection(range, false)
    }

    fn set_protection(&self, range: AddressRange, protect: bool) -> io::Result<()> {
        loop {
            match sys::uffd_protect(self.as_fd(), range, self.purpose, protect) {
                // The target's mappings are changing.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                done => return done,
            }
        }
    }

    fn wake(&self, range: AddressRange) -> io::Result<()> {
        sys::uffd_wake(self.descriptor.as_fd(), range)
    }

    /// Unregisters all ranges; waiting accesses continue, and all protection is lifted.
    ///
    /// # Errors
    ///
    /// The first system call's that failed; every range was tried.
    pub fn unregister(&self) -> io::Result<()> {
        if !self.is_registered.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        self.give_back(&self.ranges)
    }

    fn give_back(&self, ranges: &[AddressRange]) -> io::Result<()> {
        // Each piece is given back even if one before it could not be.
        let pieces = ranges
            .iter()
            .flat_map(|&range| pieces_of(range, self.purpose));
        let results = pieces.map(|piece| sys::uffd_unregister(self.as_fd(), piece));
        results.fold(Ok(()), Result::and)
    }
}

impl Drop for Userfault {
    fn drop(&mut self) {
        // Closing the descriptor would give everything back in one piece.
        let _ = self.unregister();
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Lists runs of pages by what the kernel has recorded of them.
#[derive(Debug)]
pub struct PageScan {
    regions: Vec<PageRegion>,
}

impl PageScan {
    /// Allocates the buffer for the kernel's results.
    pub fn new() -> Self {
        Self {
            regions: vec![PageRegion::default(); REGIONS],
        }
    }

    /// Calls `visit` for each run of pages in `range` that `query` asks for, in ascending order. If `query` is for what was written
    /// of private memory, the second argument is whether the run is mapped by huge pages.
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
        query: PageQuery,
        mut visit: impl FnMut(AddressRange, bool),
    ) -> io::Result<()> {
        let end = range.start + range.len_bytes;
        let mut at = range.start;
        while at < end {
            let rest = AddressRange {
                start: at,
                len_bytes: end - at,
            };
            let (filled, walked) = sys::pagemap_scan(pagemap, rest, query, &mut self.regions)?;
            for region in &self.regions[..filled] {
                let run = AddressRange {
                    start: region.start,
                    len_bytes: region.end.min(end).saturating_sub(region.start),
                };
                visit(run, region.is_huge());
            }
            let listed_end = self.regions[..filled].last().map_or(at, |last| last.end);
            // Where the kernel says that it stopped is where it last found its own buffer full, even if it went on from there: with
            // room left in ours, it reached the end.
            at = if filled < self.regions.len() {
                end
            } else {
                walked.max(listed_end)
            };
        }
        Ok(())
    }
}

impl Default for PageScan {
    fn default() -> Self {
        Self::new()
    }
}

/// Cuts a range so that unregistering one piece takes a few milliseconds at most, and no huge page is split.
fn pieces_of(range: AddressRange, purpose: UserfaultPurpose) -> impl Iterator<Item = AddressRange> {
    let end = range.start + range.len_bytes;
    let piece_bytes = match purpose {
        UserfaultPurpose::Minor => u64::MAX,
        UserfaultPurpose::WriteProtect
        | UserfaultPurpose::AsyncWriteProtect
        | UserfaultPurpose::AsyncAccessProtect => PIECE_BYTES,
    };
    let cut = move |start: u64| {
        let aligned = start.saturating_add(piece_bytes) / HUGE_PAGE_BYTES;
        (aligned * HUGE_PAGE_BYTES).min(end)
    };
    let starts = successors(Some(range.start), move |&start| {
        Some(cut(start)).filter(|&next| next < end)
    });
    starts.map(move |start| AddressRange {
        start,
        len_bytes: cut(start) - start,
    })
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

    #[test]
    fn pieces_cover_a_range_and_end_at_huge_pages() {
        let range = AddressRange {
            start: 0x7000_0000_1000,
            len_bytes: 3 * PIECE_BYTES + PAGE_BYTES,
        };
        for purpose in [UserfaultPurpose::Minor, UserfaultPurpose::AsyncWriteProtect] {
            let pieces: Vec<_> = pieces_of(range, purpose).collect();
            let mut next = range.start;
            for piece in &pieces {
                assert_eq!(piece.start, next);
                next += piece.len_bytes;
            }
            assert_eq!(next, range.start + range.len_bytes);
            let (_, cut) = pieces.split_last().unwrap();
            for piece in cut {
                assert_eq!((piece.start + piece.len_bytes) % HUGE_PAGE_BYTES, 0);
                assert!(piece.len_bytes <= PIECE_BYTES);
            }
            assert_eq!(pieces.len() > 1, purpose != UserfaultPurpose::Minor);
        }
    }

    #[test]
    fn ranges_are_registered_again_and_another_userfaultfds_are_left_alone() {
        let memory = sys::SharedMemory::new(4).unwrap();
        let purpose = UserfaultPurpose::Minor;
        let (first, second) = match (
            Userfault::open(purpose, [memory.range()]),
            sys::userfaultfd().and_then(|fd| Userfault::new(fd, purpose, [memory.range()])),
        ) {
            (Ok(first), Ok(second)) => (first, second),
            (first, second) => {
                plimsoll_skip::skip(
                    plimsoll_skip::Lack::Userfaultfd,
                    format_args!("no minor faults on this host: {first:?} {second:?}"),
                );
                return;
            }
        };
        let is_busy = |userfault: &Userfault| match userfault.register() {
            Ok(()) => false,
            Err(error) => error.raw_os_error() == Some(libc::EBUSY),
        };
        assert!(is_busy(&second));
        // Neither gives back what the other has registered.
        second.unregister().unwrap();
        assert!(is_busy(&second));
        first.unregister().unwrap();
        second.register().unwrap();
        first.unregister().unwrap();
        assert!(is_busy(&first));
        drop(second);
        first.register().unwrap();
    }
}
