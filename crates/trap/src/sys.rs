//! Every system call of this crate that Rust cannot check: userfaultfd, ptrace, pagemap scans,
//! `process_madvise`. One safe function each; layouts are asserted.
#![allow(unsafe_code)]

use std::io;
use std::mem;
#[cfg(test)]
use std::os::fd::AsFd;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A number of pages or bytes of this address space, as an index: the same width on x86-64.
pub fn usize_of(value: u64) -> usize {
    const _: () = assert!(size_of::<usize>() == size_of::<u64>());
    #[expect(
        clippy::cast_possible_truncation,
        reason = "of the same width, asserted above"
    )]
    {
        value as usize
    }
}

/// A range of addresses in the process that a call works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct AddressRange {
    /// First address, page-aligned.
    pub start: u64,
    /// Length in bytes, a whole number of pages.
    pub len_bytes: u64,
}

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRegister {
    range: AddressRange,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioContinue {
    range: AddressRange,
    mode: u64,
    mapped: i64,
}

#[repr(C)]
struct UffdioProtect {
    range: AddressRange,
    mode: u64,
}

/// A run of addresses found by a pagemap scan.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct PageRegion {
    /// First address.
    pub start: u64,
    /// The address behind the last.
    pub end: u64,
    categories: u64,
}

impl PageRegion {
    /// Whether the page table maps it by huge pages; known of private memory whose written pages are queried.
    pub fn is_huge(&self) -> bool {
        self.categories & PAGE_IS_HUGE != 0
    }
}

#[repr(C)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

// As in <linux/userfaultfd.h> and <linux/fs.h>.
const _: () = assert!(size_of::<UffdioApi>() == 24);
const _: () = assert!(size_of::<UffdioRegister>() == 32);
const _: () = assert!(size_of::<UffdioContinue>() == 32);
const _: () = assert!(size_of::<UffdioProtect>() == 24);
const _: () = assert!(size_of::<PageRegion>() == 24);
const _: () = assert!(size_of::<PmScanArg>() == 96);
// `AddressRange` is handed to process_madvise as an array of iovec.
const _: () = assert!(size_of::<AddressRange>() == size_of::<libc::iovec>());
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

const UFFD_API: u64 = 0xAA;
const UFFDIO_API: libc::c_ulong = 0xC018_AA3F;
const UFFDIO_REGISTER: libc::c_ulong = 0xC020_AA00;
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_AA01;
const UFFDIO_WAKE: libc::c_ulong = 0x8010_AA02;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xC018_AA06;
const UFFDIO_CONTINUE: libc::c_ulong = 0xC020_AA07;
const UFFDIO_RWPROTECT: libc::c_ulong = 0xC018_AA09;
const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
/// Request to a userfaultfd device node for a new descriptor.
pub const USERFAULTFD_IOC_NEW: u64 = 0xAA00;

const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
const UFFD_FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
const UFFD_FEATURE_RWP: u64 = 1 << 17;
const UFFD_FEATURE_RWP_ASYNC: u64 = 1 << 18;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_REGISTER_MODE_MINOR: u64 = 1 << 2;
const UFFDIO_REGISTER_MODE_RWP: u64 = 1 << 3;
/// To protect; without it, protection is lifted. The same bit for protection against writes and against every access.
const PROTECT: u64 = 1;
const PM_SCAN_WP_MATCHING: u64 = 1;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_WPALLOWED: u64 = 1 << 0;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;
const PAGE_IS_ACCESSED: u64 = 1 << 9;

/// The purpose of a userfaultfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UserfaultPurpose {
    /// Accesses to pages that are in the page cache but not mapped wait for us.
    Minor,
    /// Writes to protected pages wait for us. Needs Linux 6.4.
    WriteProtect,
    /// The kernel records writes to protected pages in the page tables and lets them continue. Needs Linux 6.7.
    AsyncWriteProtect,
    /// The same for every access. Needs read-write protection, in kernels after Linux 7.1.
    AsyncAccessProtect,
}

impl UserfaultPurpose {
    /// The missing feature of a kernel that refuses it.
    pub(crate) fn kernel_feature(self) -> &'static str {
        match self {
            Self::Minor => "minor faults on shared memory",
            Self::WriteProtect => "write protection of absent pages (Linux 6.4)",
            Self::AsyncWriteProtect => "asynchronous write protection (Linux 6.7)",
            Self::AsyncAccessProtect => {
                "asynchronous read-write protection (UFFD_FEATURE_RWP_ASYNC, after Linux 7.1)"
            }
        }
    }

    fn features(self) -> u64 {
        match self {
            Self::Minor => UFFD_FEATURE_MINOR_SHMEM,
            Self::WriteProtect => UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_UNPOPULATED,
            Self::AsyncWriteProtect => {
                UFFD_FEATURE_WP_ASYNC
                    | UFFD_FEATURE_WP_UNPOPULATED
                    | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
            }
            Self::AsyncAccessProtect => UFFD_FEATURE_RWP | UFFD_FEATURE_RWP_ASYNC,
        }
    }

    fn mode(self) -> u64 {
        match self {
            Self::Minor => UFFDIO_REGISTER_MODE_MINOR,
            Self::WriteProtect | Self::AsyncWriteProtect => UFFDIO_REGISTER_MODE_WP,
            Self::AsyncAccessProtect => UFFDIO_REGISTER_MODE_RWP,
        }
    }
}

/// Pages that a scan of a pagemap lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageQuery {
    /// Written since they were protected against writes ([`UserfaultPurpose::AsyncWriteProtect`]), or never protected.
    Written(WrittenMemory),
    /// The same, and protected in the same step. KVM then takes all of the range out of the VM's page tables, so that the VM's
    /// next access to each of its pages, written or not, is a fault.
    WrittenAndProtected(WrittenMemory),
    /// Present in memory that is not registered for that.
    Unregistered,
    /// Present.
    Present,
    /// Swapped out.
    Swapped,
    /// Present, and accessed since they were protected against every access ([`UserfaultPurpose::AsyncAccessProtect`]) or
    /// populated since.
    Accessed,
}

/// A kind of memory in which written pages are queried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrittenMemory {
    /// Private memory, where pages that were only read are recognised by their contents: zeros, or a file's page. Kernels before
    /// 6.17 do not recognise a huge page of zeros.
    pub is_private: bool,
    /// All of it is registered, and the query fails with EPERM if not. Otherwise, what is not registered is not listed.
    pub is_registered: bool,
}

/// One message of a userfaultfd, in bytes.
pub const UFFD_MESSAGE_BYTES: usize = 32;
/// Event number of a page fault.
pub const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
/// Flag of a page fault by a write.
pub const UFFD_PAGEFAULT_FLAG_WRITE: u64 = 1;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Opens a userfaultfd on our own address space.
pub fn userfaultfd() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: userfaultfd(2) takes one integer and touches no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let fd = libc::c_int::try_from(fd).map_err(io::Error::other)?;
    check(fd)?;
    // SAFETY: the call succeeded, so `fd` is open and nobody else's yet.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Negotiates the userfaultfd interface with the kernel, with the features that `purpose` needs.
///
/// # Errors
///
/// EINVAL if the kernel lacks one: it refuses those that it has never heard of, and leaves out those that this machine
/// cannot have.
pub fn uffd_api(uffd: BorrowedFd<'_>, purpose: UserfaultPurpose) -> io::Result<()> {
    let mut api = UffdioApi {
        api: UFFD_API,
        features: purpose.features(),
        ioctls: 0,
    };
    // SAFETY: UFFDIO_API reads and writes the 24 bytes of `api`, which we borrow mutably.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) })?;
    match api.features & purpose.features() == purpose.features() {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// Registers `range`, which lies in the address space on which `uffd` was opened, with `uffd`.
pub fn uffd_register(
    uffd: BorrowedFd<'_>,
    range: AddressRange,
    purpose: UserfaultPurpose,
) -> io::Result<()> {
    let mut register = UffdioRegister {
        range,
        mode: purpose.mode(),
        ioctls: 0,
    };
    // SAFETY: UFFDIO_REGISTER reads and writes the 32 bytes of `register`, which we
    // borrow mutably. It changes how faults in `range` are served, not what memory holds.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) })?;
    Ok(())
}

/// Unregisters `range` and wakes the threads that wait in it.
pub fn uffd_unregister(uffd: BorrowedFd<'_>, range: AddressRange) -> io::Result<()> {
    // SAFETY: UFFDIO_UNREGISTER only reads the 16 bytes of `range`.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_UNREGISTER, &raw const range) })?;
    Ok(())
}

/// Wakes the threads that wait in `range`; the access is retried.
pub fn uffd_wake(uffd: BorrowedFd<'_>, range: AddressRange) -> io::Result<()> {
    // SAFETY: UFFDIO_WAKE only reads the 16 bytes of `range`.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WAKE, &raw const range) })?;
    Ok(())
}

/// Protects `range` as `purpose` says, or lifts that and wakes the threads that wait in it. Against writes, pages are protected
/// whether they are present or not; against every access, those that are present or swapped out.
pub fn uffd_protect(
    uffd: BorrowedFd<'_>,
    range: AddressRange,
    purpose: UserfaultPurpose,
    protect: bool,
) -> io::Result<()> {
    let request = UffdioProtect {
        range,
        mode: if protect { PROTECT } else { 0 },
    };
    let ioctl = match purpose {
        UserfaultPurpose::AsyncAccessProtect => UFFDIO_RWPROTECT,
        _ => UFFDIO_WRITEPROTECT,
    };
    // SAFETY: UFFDIO_WRITEPROTECT and UFFDIO_RWPROTECT only read the 24 bytes of `request`. They change how accesses to
    // `range` are served, not what memory holds.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), ioctl, &raw const request) })?;
    Ok(())
}

/// Lists the runs of `range` that `query` asks for.
///
/// Returns how many of `regions` were filled, and the address that the kernel reached: short
/// of the end when `regions` was too small.
///
/// # Errors
///
/// The system call's, or that the kernel claims to have filled more than there is room for.
pub fn pagemap_scan(
    pagemap: BorrowedFd<'_>,
    range: AddressRange,
    query: PageQuery,
    regions: &mut [PageRegion],
) -> io::Result<(usize, u64)> {
    // A page has all categories of `mask`, none of `without`, and one of `any_of` unless that is 0.
    let (flags, mask, without, any_of) = match query {
        PageQuery::Written(memory) | PageQuery::WrittenAndProtected(memory) => {
            let WrittenMemory {
                is_private,
                is_registered,
            } = memory;
            // What is not registered is all written.
            let (check, written) = if is_registered {
                (PM_SCAN_CHECK_WPASYNC, PAGE_IS_WRITTEN)
            } else {
                (0, PAGE_IS_WRITTEN | PAGE_IS_WPALLOWED)
            };
            let protect = match query {
                PageQuery::WrittenAndProtected(_) => PM_SCAN_WP_MATCHING,
                _ => 0,
            };
            let unwritten = if is_private {
                PAGE_IS_PFNZERO | PAGE_IS_FILE
            } else {
                0
            };
            // The kernel also calls what was never there written, unless it was protected before.
            let there = if is_private || !is_registered {
                PAGE_IS_PRESENT | PAGE_IS_SWAPPED
            } else {
                0
            };
            (protect | check, written, unwritten, there)
        }
        PageQuery::Unregistered => (0, PAGE_IS_PRESENT, PAGE_IS_WPALLOWED, 0),
        PageQuery::Present => (0, PAGE_IS_PRESENT, 0, 0),
        PageQuery::Swapped => (0, PAGE_IS_SWAPPED, 0, 0),
        PageQuery::Accessed => (0, PAGE_IS_PRESENT | PAGE_IS_ACCESSED, 0, 0),
    };
    // Shared memory is queried as the kernel's fast path wants it. Huge pages of it are split whatever part is protected.
    let huge = match query {
        PageQuery::Written(memory) if memory.is_private => PAGE_IS_HUGE,
        _ => 0,
    };
    let mut request = PmScanArg {
        size: size_of::<PmScanArg>() as u64,
        flags,
        start: range.start,
        end: range.start + range.len_bytes,
        walk_end: 0,
        regions: regions.as_mut_ptr().expose_provenance() as u64,
        regions_len: regions.len() as u64,
        max_pages: 0,
        category_inverted: without,
        category_mask: mask | without,
        category_anyof_mask: any_of,
        return_mask: mask | huge,
    };
    // SAFETY: PAGEMAP_SCAN reads and writes the 96 bytes of `request` and writes at most
    // `regions_len` regions to `regions`, both borrowed mutably. A region holds only integers.
    // What it changes in the other process is how writes are noted, not what memory holds.
    let filled =
        check(unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut request) })?;
    let filled = usize::try_from(filled).map_err(io::Error::other)?;
    if filled > regions.len() {
        return Err(io::Error::other("the scan overran its vector"));
    }
    Ok((filled, request.walk_end))
}

/// Maps the page-cache pages of `range` and wakes the threads that wait for them.
///
/// Returns the bytes mapped before the first page that could not be, with its error.
pub fn uffd_continue(uffd: BorrowedFd<'_>, range: AddressRange) -> (u64, io::Result<()>) {
    let mut request = UffdioContinue {
        range,
        mode: 0,
        mapped: 0,
    };
    // SAFETY: UFFDIO_CONTINUE reads and writes the 32 bytes of `request`, which we borrow
    // mutably. It maps pages that the file behind the range already holds, so what
    // memory contains does not change.
    let result = check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_CONTINUE, &raw mut request) });
    (u64::try_from(request.mapped).unwrap_or(0), result.map(drop))
}

/// Drops the page-table entries of another process for `ranges` (at most 1024).
///
/// On shared memory without swap the contents stay in the page cache. Returns the
/// bytes that the kernel processed; fewer than requested if it stopped early.
pub fn process_pageout(pidfd: BorrowedFd<'_>, ranges: &[AddressRange]) -> io::Result<u64> {
    // SAFETY: process_madvise(2) reads `ranges.len()` iovecs from `ranges`, which has the
    // layout of an iovec array (asserted above). The addresses belong to the other
    // process; MADV_PAGEOUT never changes what its memory contains.
    let advised = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            pidfd.as_raw_fd(),
            ranges.as_ptr(),
            ranges.len(),
            libc::MADV_PAGEOUT,
            0,
        )
    };
    u64::try_from(advised).map_err(|_| io::Error::last_os_error())
}

/// CPU time that all threads of a process have used, up to the present.
pub fn process_cpu_time(pid: u32) -> io::Result<Duration> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    let (mut clock, mut time) = (
        0,
        libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        },
    );
    // SAFETY: clock_getcpuclockid(3) writes one clock id to `clock`, which we borrow mutably.
    let error = unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error));
    }
    // SAFETY: clock_gettime(2) writes one timespec to `time`, which we borrow mutably.
    check(unsafe { libc::clock_gettime(clock, &raw mut time) })?;
    let seconds = u64::try_from(time.tv_sec).map_err(io::Error::other)?;
    let nanoseconds = u64::try_from(time.tv_nsec).map_err(io::Error::other)?;
    Ok(Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds))
}

/// The registers of a stopped thread.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub struct Registers(pub libc::user_regs_struct);

/// There are none: no calls are made in other processes.
#[cfg(not(target_arch = "x86_64"))]
#[derive(Clone, Copy)]
pub enum Registers {}

const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;
const PTRACE_O_SUSPEND_SECCOMP: u32 = 1 << 21;

fn ptrace(
    request: libc::c_uint,
    tid: libc::pid_t,
    address: usize,
    data: *mut libc::c_void,
) -> io::Result<()> {
    // SAFETY: private to this file; each caller below passes as `data` either a plain number
    // where its request takes one, or a pointer to memory of the size that it reads or writes.
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Becomes the tracer of a thread without stopping it.
pub fn ptrace_seize(tid: libc::pid_t) -> io::Result<()> {
    ptrace(libc::PTRACE_SEIZE, tid, 0, ptr::null_mut())
}

/// Suspends the seccomp filter of a stopped thread until its tracer detaches.
pub fn ptrace_suspend_seccomp(tid: libc::pid_t) -> io::Result<()> {
    let options = usize::try_from(PTRACE_O_SUSPEND_SECCOMP).map_err(io::Error::other)?;
    ptrace(
        libc::PTRACE_SETOPTIONS,
        tid,
        0,
        ptr::without_provenance_mut(options),
    )
}

/// Requests a seized thread to stop.
pub fn ptrace_interrupt(tid: libc::pid_t) -> io::Result<()> {
    ptrace(libc::PTRACE_INTERRUPT, tid, 0, ptr::null_mut())
}

/// Lets a stopped thread continue, with `signal` (0 for none).
pub fn ptrace_continue(tid: libc::pid_t, signal: libc::c_int) -> io::Result<()> {
    ptrace(libc::PTRACE_CONT, tid, 0, as_data(signal))
}

/// A signal's number where ptrace(2) takes a pointer.
fn as_data(signal: libc::c_int) -> *mut libc::c_void {
    ptr::without_provenance_mut(usize::try_from(signal).unwrap_or(0))
}

/// Lets a stopped thread execute one instruction.
pub fn ptrace_step(tid: libc::pid_t) -> io::Result<()> {
    ptrace(libc::PTRACE_SINGLESTEP, tid, 0, ptr::null_mut())
}

/// Lets a stopped thread continue, with `signal` (0 for none), and detaches from it.
pub fn ptrace_detach(tid: libc::pid_t, signal: libc::c_int) -> io::Result<()> {
    ptrace(libc::PTRACE_DETACH, tid, 0, as_data(signal))
}

/// Reads the registers of a stopped thread.
#[cfg(target_arch = "x86_64")]
pub fn ptrace_registers(tid: libc::pid_t) -> io::Result<Registers> {
    // SAFETY: the struct holds only integers, for which all-zero bytes are a value.
    let mut registers: libc::user_regs_struct = unsafe { mem::zeroed() };
    // PTRACE_GETREGS writes one user_regs_struct.
    ptrace(libc::PTRACE_GETREGS, tid, 0, (&raw mut registers).cast())?;
    Ok(Registers(registers))
}

/// Sets the registers of a stopped thread.
#[cfg(target_arch = "x86_64")]
pub fn ptrace_set_registers(tid: libc::pid_t, registers: &Registers) -> io::Result<()> {
    // PTRACE_SETREGS reads one user_regs_struct.
    ptrace(
        libc::PTRACE_SETREGS,
        tid,
        0,
        (&raw const registers.0).cast_mut().cast(),
    )
}

/// Reads the registers of a stopped thread: not on this processor.
#[cfg(not(target_arch = "x86_64"))]
pub fn ptrace_registers(_tid: libc::pid_t) -> io::Result<Registers> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Sets the registers of a stopped thread: there are none.
#[cfg(not(target_arch = "x86_64"))]
pub fn ptrace_set_registers(_tid: libc::pid_t, registers: &Registers) -> io::Result<()> {
    match *registers {}
}

/// Reads which signals a stopped thread blocks, bit `n - 1` for signal `n`.
pub fn ptrace_signal_mask(tid: libc::pid_t) -> io::Result<u64> {
    let mut mask = 0u64;
    // PTRACE_GETSIGMASK writes as many bytes as its address argument states.
    ptrace(
        PTRACE_GETSIGMASK,
        tid,
        size_of::<u64>(),
        (&raw mut mask).cast(),
    )?;
    Ok(mask)
}

/// Sets which signals a stopped thread blocks.
pub fn ptrace_set_signal_mask(tid: libc::pid_t, mask: u64) -> io::Result<()> {
    // PTRACE_SETSIGMASK reads as many bytes as its address argument states.
    ptrace(
        PTRACE_SETSIGMASK,
        tid,
        size_of::<u64>(),
        (&raw const mask).cast_mut().cast(),
    )
}

/// Runs `work` in a child process, which ends with it; returns the child's process id.
///
/// The child has all signals blocked that can be, and a session of its own, so that what ends us
/// does not end it.
pub fn fork(work: impl FnOnce()) -> io::Result<libc::pid_t> {
    // SAFETY: a sigset is plain bytes, for which zero is a value, and is filled before use;
    // both calls only read and write the two sets, which we own.
    let before = unsafe {
        let (mut all, mut before) = (mem::zeroed(), mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    // SAFETY: in the child only this thread goes on. What it may use there is what no other
    // thread can have left locked: system calls, and memory from malloc, which glibc
    // makes usable again in the child. It leaves by _exit, so nothing of ours is cleaned up twice.
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::setsid();
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            libc::_exit(i32::from(done.is_err()));
        }
        child
    };
    let forked = check(child);
    // SAFETY: only reads the set that was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    forked
}

/// Closes all descriptors but `kept`, which are in ascending order. For a child process that needs only those.
pub fn close_all_but(kept: &[std::os::fd::RawFd]) {
    let mut first = 0;
    for end in kept
        .iter()
        .map(|kept| kept.unsigned_abs())
        .chain([libc::c_uint::MAX])
    {
        if first < end {
            // SAFETY: close_range(2) touches no memory of ours. Descriptors that others own are closed, but this
            // process is a copy in which nobody goes on to use them.
            unsafe { libc::close_range(first, end - 1, 0) };
        }
        first = end.saturating_add(1);
    }
}

/// Waits until a traced thread changes state; returns the status as wait(2) encodes it.
pub fn wait_for_thread(tid: libc::pid_t) -> io::Result<libc::c_int> {
    loop {
        match wait(tid, 0) {
            Ok(status) => return Ok(status.unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The same for at most `limit`; `None` if its state has not changed. Takes a pending SIGCHLD, which the calling thread
/// must block.
pub fn wait_for_thread_within(
    tid: libc::pid_t,
    limit: Duration,
) -> io::Result<Option<libc::c_int>> {
    /// Where SIGCHLD is ignored, the state is read this often.
    const INTERVAL_NS: libc::c_long = 10_000_000;
    let interval = libc::timespec {
        tv_sec: 0,
        tv_nsec: INTERVAL_NS,
    };
    let start = Instant::now();
    loop {
        let status = wait(tid, libc::WNOHANG)?;
        if status.is_some() || start.elapsed() >= limit {
            return Ok(status);
        }
        // SAFETY: a sigset is plain bytes, for which zero is a value; both calls only touch the set and the time, which
        // we own, and no information about the signal is requested.
        unsafe {
            let mut child = mem::zeroed();
            libc::sigaddset(&raw mut child, libc::SIGCHLD);
            libc::sigtimedwait(&raw const child, ptr::null_mut(), &raw const interval);
        }
    }
}

fn wait(tid: libc::pid_t, flags: libc::c_int) -> io::Result<Option<libc::c_int>> {
    let mut status = 0;
    // SAFETY: waitpid(2) writes one int to `status`, which we borrow mutably.
    let changed = check(unsafe { libc::waitpid(tid, &raw mut status, flags | libc::__WALL) })?;
    Ok((changed != 0).then_some(status))
}

/// Shared memory of our own, mapped, on which a host's ability to trap is tried out.
#[derive(Debug)]
pub struct SharedMemory {
    address: *mut libc::c_void,
    len_bytes: usize,
    #[cfg(test)]
    file: OwnedFd,
}

// SAFETY: the mapping belongs to the value alone, may be reached from any thread, and is
// only ever accessed through atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; every access through a shared borrow is atomic.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps `pages` pages of a new memfd, each written once: a page that was only read is dropped
    /// from the page cache, rather than unmapped, when it is made inaccessible.
    pub fn new(pages: usize) -> io::Result<Self> {
        let len_bytes = pages * 4096;
        let file = rustix::fs::memfd_create("plimsoll-trial", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, len_bytes as u64)?;
        // SAFETY: asks for a new mapping at an address of the kernel's choice, so it
        // overlaps nothing; `file` is open and as long as the mapping.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Locked pages cannot be made inaccessible, and a tracer locks all of its memory.
        // SAFETY: munlock(2) on our own mapping only allows the kernel to reclaim its pages.
        unsafe { libc::munlock(address, len_bytes) };
        let memory = Self {
            address,
            len_bytes,
            #[cfg(test)]
            file,
        };
        for page in 0..pages {
            memory.word(page).store(0, Ordering::Relaxed);
        }
        Ok(memory)
    }

    /// The address of the memory in our address space.
    pub fn range(&self) -> AddressRange {
        AddressRange {
            start: self.address.addr() as u64,
            len_bytes: self.len_bytes as u64,
        }
    }

    /// Maps the file anew: it keeps all pages, and the page table has none.
    #[cfg(test)]
    pub fn map_anew(&self) {
        // SAFETY: replaces our own mapping, which is only accessed through atomics, by one of the same file.
        let address = unsafe {
            libc::mmap(
                self.address,
                self.len_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                self.file.as_raw_fd(),
                0,
            )
        };
        assert_eq!(address, self.address, "{}", io::Error::last_os_error());
    }

    /// The file behind it.
    #[cfg(test)]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The first word of a page, through which it can be read and written.
    ///
    /// # Panics
    ///
    /// If the mapping has no page `page`.
    pub fn word(&self, page: usize) -> &AtomicU64 {
        self.words(page, 0)
    }

    /// Stores a value in the word `index` of page `page`.
    ///
    /// # Panics
    ///
    /// If the mapping has no such page, or a page no such word.
    #[cfg(target_arch = "x86_64")]
    pub fn set_word(&self, page: usize, index: usize, value: u64) {
        self.words(page, index).store(value, Ordering::Relaxed);
    }

    fn words(&self, page: usize, index: usize) -> &AtomicU64 {
        assert!(
            page < self.len_bytes / 4096 && index < 512,
            "word {index} of page {page} is outside the mapping"
        );
        // SAFETY: the word lies inside the mapping (asserted), which lives as long as
        // `self`; it is aligned, and all access to the mapping goes through atomics.
        unsafe { &*self.address.cast::<AtomicU64>().add(page * 512 + index) }
    }

    /// Drops the page-table entries of `range`, which must lie inside; contents stay in the file.
    ///
    /// # Panics
    ///
    /// If `range` is not inside the mapping.
    #[cfg(test)]
    pub fn dontneed(&self, range: AddressRange) -> io::Result<()> {
        let whole = self.range();
        assert!(
            range.start >= whole.start
                && range.start + range.len_bytes <= whole.start + whole.len_bytes
        );
        let offset = usize_of(range.start - whole.start);
        // SAFETY: the range lies inside our mapping (asserted). MADV_DONTNEED on a shared
        // file mapping only drops page-table entries: the next access finds the same bytes.
        check(unsafe {
            libc::madvise(
                self.address.byte_add(offset),
                usize_of(range.len_bytes),
                libc::MADV_DONTNEED,
            )
        })?;
        Ok(())
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length and no borrow of it
        // outlives `self`. Failure would only leave it mapped.
        unsafe { libc::munmap(self.address, self.len_bytes) };
    }
}
