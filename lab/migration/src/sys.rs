//! Every system call of the page logs that Rust cannot check: memory slots, rings, `CLEAR_DIRTY_LOG`,
//! write protection by userfaultfd, `PAGEMAP_SCAN`. One safe function each; layouts are asserted.
#![allow(unsafe_code)]

use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use kvm_bindings::{
    KVM_DIRTY_LOG_PAGE_OFFSET, kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1,
    kvm_dirty_gfn, kvm_userspace_memory_region,
};
use kvm_ioctls::{VcpuFd, VmFd};
use vm_memory::MmapRegion;

/// An entry of a vCPU's ring of written pages, as the kernel and we both see it.
#[derive(Debug, Default)]
#[repr(C)]
pub struct RingEntry {
    /// Bit 0: the kernel wrote it; bit 1: we took it.
    pub flags: AtomicU32,
    /// Address space (bits 16..32) and slot (bits 0..16).
    pub slot: AtomicU32,
    /// Page within the slot.
    pub offset: AtomicU64,
}

/// Addresses of our own process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
struct UffdioWriteProtect {
    range: AddressRange,
    mode: u64,
}

/// A stretch of pages that `PAGEMAP_SCAN` found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PageRegion {
    /// First address.
    pub start: u64,
    /// Address after the last one.
    pub end: u64,
    categories: u64,
}

#[repr(C)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

// As in <linux/kvm.h>, <linux/userfaultfd.h> and <linux/fs.h>.
const _: () = assert!(size_of::<RingEntry>() == size_of::<kvm_dirty_gfn>());
const _: () = assert!(size_of::<kvm_dirty_gfn>() == 16);
const _: () = assert!(size_of::<kvm_clear_dirty_log>() == 24);
const _: () = assert!(size_of::<UffdioApi>() == 24);
const _: () = assert!(size_of::<UffdioRegister>() == 32);
const _: () = assert!(size_of::<UffdioWriteProtect>() == 24);
const _: () = assert!(size_of::<PageRegion>() == 24);
const _: () = assert!(size_of::<PmScanArg>() == 96);

const KVM_CLEAR_DIRTY_LOG: libc::c_ulong = 0xC018_AEC0;
const KVM_RESET_DIRTY_RINGS: libc::c_ulong = 0xAEC7;

const UFFD_API: u64 = 0xAA;
const UFFDIO_API: libc::c_ulong = 0xC018_AA3F;
const UFFDIO_REGISTER: libc::c_ulong = 0xC020_AA00;
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_AA01;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xC018_AA06;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
/// Faults by write protection are told.
pub const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
/// Pages that were never touched can be protected too.
pub const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
/// A write to a protected page unprotects it and goes on.
pub const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
/// One message of a userfaultfd, in bytes.
pub const UFFD_MESSAGE_BYTES: usize = 32;
/// Event number of a page fault.
pub const UFFD_EVENT_PAGEFAULT: u8 = 0x12;

const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
const PAGE_IS_WRITTEN: u64 = 1 << 1;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Memory of a guest, mapped here as long as this lives, and as long as any VM that was given it.
pub type Memory = Arc<MmapRegion>;

/// A VM with the memory it was given, which it so outlives never.
#[derive(Debug)]
pub struct VmWithMemory {
    vm: VmFd,
    memory: Vec<Memory>,
}

impl VmWithMemory {
    /// Takes a VM that has no memory yet.
    pub fn new(vm: VmFd) -> Self {
        Self {
            vm,
            memory: Vec::new(),
        }
    }

    /// The VM. Memory is given to it by [`set_slot`](Self::set_slot) alone.
    pub fn fd(&self) -> &VmFd {
        &self.vm
    }

    /// Gives the VM a slot of memory; the slot's number is the next one, from 0.
    pub fn add_slot(&mut self, address: u64, memory: Memory) -> io::Result<()> {
        self.memory.push(memory);
        let slot = self.memory.len() - 1;
        let set = self.set_slot(slot, address, 0);
        if set.is_err() {
            self.memory.pop();
        }
        set
    }

    /// Sets the flags of a slot that lies at `address`.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn set_slot(&self, slot: usize, address: u64, flags: u32) -> io::Result<()> {
        let memory = &self.memory[slot];
        let region = kvm_userspace_memory_region {
            slot: u32::try_from(slot).map_err(io::Error::other)?,
            flags,
            guest_phys_addr: address,
            memory_size: memory.size() as u64,
            userspace_addr: memory.as_ptr().addr() as u64,
        };
        // SAFETY: the range is the whole of a mapping that this value holds for as long as it has
        // the VM, so the guest can reach no other memory of ours. Nobody holds a Rust
        // reference into it: `MmapRegion` gives volatile access alone.
        Ok(unsafe { self.vm.set_user_memory_region(region) }?)
    }
}

/// Protects pages of a slot whose bit in `bitmap` is set against writes and forgets that they were written.
///
/// `first` is a multiple of 64; `pages` is too, unless it reaches the slot's end.
///
/// # Panics
///
/// If `bitmap` has not a bit for each page.
pub fn clear_dirty_log(
    vm: &VmFd,
    slot: u32,
    first: u64,
    pages: u32,
    bitmap: &mut [u64],
) -> io::Result<()> {
    assert!(bitmap.len() as u64 * 64 >= u64::from(pages));
    let clear = kvm_clear_dirty_log {
        slot,
        num_pages: pages,
        first_page: first,
        __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 {
            dirty_bitmap: bitmap.as_mut_ptr().cast(),
        },
    };
    // SAFETY: KVM_CLEAR_DIRTY_LOG reads the 24 bytes of `clear` and a bit for each of `pages` pages
    // from the bitmap, which has as many (asserted).
    check(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CLEAR_DIRTY_LOG, &raw const clear) })?;
    Ok(())
}

/// Protects again the pages whose entries were taken out of the rings; returns how many entries that were.
pub fn reset_dirty_rings(vm: &VmFd) -> io::Result<u64> {
    // SAFETY: KVM_RESET_DIRTY_RINGS has no argument and touches no memory of ours.
    let reset = check(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_RESET_DIRTY_RINGS) })?;
    Ok(u64::try_from(reset).unwrap_or(0))
}

/// A vCPU's ring, mapped.
#[derive(Debug)]
pub struct RingMapping {
    entries: *mut RingEntry,
    count: usize,
}

// SAFETY: the mapping belongs to the value alone, may be reached from any thread, and is only
// ever accessed through atomics.
unsafe impl Send for RingMapping {}
// SAFETY: as above; every access through a shared borrow is atomic.
unsafe impl Sync for RingMapping {}

impl RingMapping {
    /// Maps a vCPU's ring of `count` entries: as many as the VM's rings were made with.
    pub fn new(vcpu: &VcpuFd, count: usize) -> io::Result<Self> {
        let offset = i64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * 4096;
        // SAFETY: asks for a new mapping at an address of the kernel's choice, so it overlaps nothing;
        // the descriptor is open as long as `vcpu` is borrowed.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                count * size_of::<RingEntry>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                offset,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            entries: address.cast(),
            count,
        })
    }
}

impl Deref for RingMapping {
    type Target = [RingEntry];

    fn deref(&self) -> &[RingEntry] {
        // SAFETY: the mapping has `count` entries, lives as long as `self`, and is page-aligned. An
        // entry is atomics alone, so the kernel may change it meanwhile.
        unsafe { std::slice::from_raw_parts(self.entries, self.count) }
    }
}

impl Drop for RingMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length and no borrow of it outlives `self`.
        unsafe { libc::munmap(self.entries.cast(), self.count * size_of::<RingEntry>()) };
    }
}

/// Opens a userfaultfd on our own address space and agrees on `features`.
pub fn userfaultfd(features: u64) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: userfaultfd(2) takes one integer and touches no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let fd = check(libc::c_int::try_from(fd).map_err(io::Error::other)?)?;
    // SAFETY: the call succeeded, so `fd` is open and nobody else's yet.
    let uffd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut api = UffdioApi {
        api: UFFD_API,
        features,
        ioctls: 0,
    };
    // SAFETY: UFFDIO_API reads and writes the 24 bytes of `api`, which we borrow mutably.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) })?;
    Ok(uffd)
}

/// Makes `range` one whose pages can be protected against writes.
pub fn uffd_register(uffd: BorrowedFd<'_>, range: AddressRange) -> io::Result<()> {
    let mut register = UffdioRegister {
        range,
        mode: UFFDIO_REGISTER_MODE_WP,
        ioctls: 0,
    };
    // SAFETY: UFFDIO_REGISTER reads and writes the 32 bytes of `register`, which we borrow mutably. It
    // changes how faults in `range` are served, not what memory holds.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) })?;
    Ok(())
}

/// Unprotects `range`, gives it back to the kernel and wakes whoever waits in it.
pub fn uffd_unregister(uffd: BorrowedFd<'_>, range: AddressRange) -> io::Result<()> {
    // SAFETY: UFFDIO_UNREGISTER only reads the 16 bytes of `range`.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_UNREGISTER, &raw const range) })?;
    Ok(())
}

/// Protects `range` against writes, or unprotects it and wakes whoever waits in it.
pub fn uffd_write_protect(
    uffd: BorrowedFd<'_>,
    range: AddressRange,
    protect: bool,
) -> io::Result<()> {
    let request = UffdioWriteProtect {
        range,
        mode: u64::from(protect),
    };
    loop {
        // SAFETY: UFFDIO_WRITEPROTECT only reads the 24 bytes of `request`. A write that meets the
        // protection waits; what memory holds does not change.
        match check(unsafe {
            libc::ioctl(uffd.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw const request)
        }) {
            // Our mappings are changing: again.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
            result => return result.map(drop),
        }
    }
}

/// Finds pages of our own `range` that were written since they were protected, and protects them again.
///
/// Fills `regions` from its start; returns how many of them, and the address up to which was looked.
pub fn pagemap_scan_written(
    pagemap: BorrowedFd<'_>,
    range: AddressRange,
    regions: &mut [PageRegion],
) -> io::Result<(usize, u64)> {
    let mut scan = PmScanArg {
        size: size_of::<PmScanArg>() as u64,
        flags: PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
        start: range.start,
        end: range.start + range.len_bytes,
        walk_end: 0,
        vec: regions.as_mut_ptr().addr() as u64,
        vec_len: regions.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: PAGE_IS_WRITTEN,
        category_anyof_mask: 0,
        return_mask: PAGE_IS_WRITTEN,
    };
    // SAFETY: PAGEMAP_SCAN reads and writes the 96 bytes of `scan` and writes at most `vec_len` regions
    // to `vec`; we borrow both mutably, and regions are integers alone. It changes how the
    // next write to a page is served, not what memory holds.
    let found = check(unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) })?;
    let found = usize::try_from(found).unwrap_or(0).min(regions.len());
    Ok((found, scan.walk_end))
}
