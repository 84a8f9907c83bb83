//! The one call of KVM that Rust cannot check: giving a machine memory.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;

use crate::sys::SharedMemory;

/// A VM that can access no memory except what was lent to it.
#[derive(Debug)]
pub struct Vm<'memory> {
    vm: VmFd,
    slots: u32,
    memory: PhantomData<&'memory SharedMemory>,
}

impl<'memory> Vm<'memory> {
    /// Takes a VM without memory.
    pub fn new(vm: VmFd) -> Self {
        Self {
            vm,
            slots: 0,
            memory: PhantomData,
        }
    }

    /// Its descriptor.
    pub fn fd(&self) -> &VmFd {
        &self.vm
    }

    /// Lends it memory at a guest-physical address.
    pub fn lend(&mut self, address: u64, memory: &'memory SharedMemory) -> io::Result<()> {
        let range = memory.range();
        let region = kvm_userspace_memory_region {
            slot: self.slots,
            flags: 0,
            guest_phys_addr: address,
            memory_size: range.len_bytes,
            userspace_addr: range.start,
        };
        // SAFETY: the range is the whole of a mapping that is borrowed for longer than this value has the VM, so the
        // guest reaches no other memory of ours; everybody accesses it through atomics alone.
        unsafe { self.vm.set_user_memory_region(region) }?;
        self.slots += 1;
        Ok(())
    }
}
