//! Every system call of the dirty-page trackers that Rust cannot check: memory slots, rings, `CLEAR_DIRTY_LOG`. One safe
//! function each; layouts are asserted. userfaultfd and `PAGEMAP_SCAN` are in `plimsoll_trap::uffd`.
#![allow(unsafe_code)]

use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
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

// As in <linux/kvm.h>.
const _: () = assert!(size_of::<RingEntry>() == size_of::<kvm_dirty_gfn>());
const _: () = assert!(size_of::<kvm_dirty_gfn>() == 16);
const _: () = assert!(size_of::<kvm_clear_dirty_log>() == 24);

const KVM_CLEAR_DIRTY_LOG: libc::c_ulong = 0xC018_AEC0;
const KVM_RESET_DIRTY_RINGS: libc::c_ulong = 0xAEC7;

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
