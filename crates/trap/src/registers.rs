//! The registers of a thread, as far as a system call needs them: what differs between processors.
//!
//! Elsewhere than on x86-64 no call is made: [`SYSCALL_INSTRUCTION`] is `None`, and there are no registers.

use crate::sys::Registers;

/// The instruction `syscall`.
#[cfg(target_arch = "x86_64")]
pub const SYSCALL_INSTRUCTION: Option<[u8; 2]> = Some([0x0f, 0x05]);
/// There is no instruction that is used.
#[cfg(not(target_arch = "x86_64"))]
pub const SYSCALL_INSTRUCTION: Option<[u8; 2]> = None;

#[cfg(target_arch = "x86_64")]
impl Registers {
    /// Makes the next step a system call, by the instruction at `address`.
    pub fn set_call(&mut self, address: u64, number: libc::c_long, args: [u64; 4]) {
        let registers = &mut self.0;
        registers.rip = address;
        registers.rax = number.cast_unsigned();
        // No system call to restart: the interrupted one is restarted once everything is restored.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx, registers.r10] = args;
    }

    /// Whether the instruction at `address` was the last one.
    pub fn has_called(&self, address: u64) -> bool {
        self.0.rip == address + 2
    }

    /// What the call returned.
    pub fn result(&self) -> u64 {
        self.0.rax
    }

    /// The address below which the stack is free.
    pub fn stack_end(&self) -> u64 {
        /// Bytes below the stack pointer that a function may use without moving it.
        const RED_ZONE_BYTES: u64 = 128;
        self.0.rsp - RED_ZONE_BYTES
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Registers {
    /// Makes the next step a system call, by the instruction at `address`.
    pub fn set_call(&mut self, _address: u64, _number: libc::c_long, _args: [u64; 4]) {
        match *self {}
    }

    /// Whether the instruction at `address` was the last one.
    pub fn has_called(&self, _address: u64) -> bool {
        match *self {}
    }

    /// What the call returned.
    pub fn result(&self) -> u64 {
        match *self {}
    }

    /// The address below which the stack is free.
    pub fn stack_end(&self) -> u64 {
        match *self {}
    }
}
