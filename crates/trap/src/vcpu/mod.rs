//! A machine of our own with one virtual CPU of KVM, for trials: its program touches pages, one after the other.
//!
//! A page that is absent costs a vCPU more than a thread: KVM leaves the guest, and where the guest is interruptible,
//! as all systems' programs are, it lets a kernel thread resolve the fault while the vCPU halts. So the machine has an
//! interrupt controller in the kernel and the interrupt flag set. Its program runs in ring 3, in 64-bit mode: a KVM
//! without hardware support emulates all else.
//!
//! Not here: the cost of a touch (`trial`).

mod sys;

use std::io;

use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};

use crate::ram::PAGE_BYTES;
use crate::sys::SharedMemory;
use sys::Vm;

/// Pages of the machine's own memory, at address 0: tables, program, task segment, and pages that are always present.
pub const OWN_PAGES: usize = 16;
/// The first of the pages that are always present.
pub const PRESENT_PAGE: u64 = 8;
/// First page of the memory to be touched.
pub const TOUCHED_PAGE: u64 = 1024;
/// Pages in `OWN_PAGES`: tables of three levels, the program, the task segment with three pages of zeros for its I/O
/// map.
const TABLE4: usize = 0;
const TABLE3: usize = 1;
const TABLE2: usize = 2;
const PROGRAM: usize = 3;
const TASK: u64 = 4;
/// Present, writable, user, accessed; of a large page also dirty and large.
const TABLE: u64 = 0x27;
const LARGE_PAGE: u64 = 0xe7;
const LARGE_PAGE_BYTES: u64 = 2 << 20;

/// rsi: address of a page, rdx: bytes to the next one, rcx: number of pages.
#[rustfmt::skip]
const CODE: [u8; 16] = [
    0x48, 0xff, 0x06,       // touch: inc qword [rsi]
    0x48, 0x01, 0xd6,       //        add rsi, rdx
    0x48, 0xff, 0xc9,       //        dec rcx
    0x75, 0xf5,             //        jnz touch
    0xe6, 0x10,             //        out 0x10, al
    0xf4, 0xf4, 0xf4,
];

/// The machine.
#[derive(Debug)]
pub struct Machine<'memory> {
    vcpu: VcpuFd,
    _vm: Vm<'memory>,
}

impl<'memory> Machine<'memory> {
    /// Makes a machine of `own` memory of [`OWN_PAGES`] and of memory to be touched.
    ///
    /// # Errors
    ///
    /// Why `/dev/kvm` cannot be used.
    pub fn new(own: &'memory SharedMemory, touched: &'memory SharedMemory) -> io::Result<Self> {
        let set = |page: usize, word: usize, value| own.set_word(page, word, value);
        set(TABLE4, 0, (TABLE3 as u64 * PAGE_BYTES) | TABLE);
        set(TABLE3, 0, (TABLE2 as u64 * PAGE_BYTES) | TABLE);
        for entry in 0..512 {
            set(
                TABLE2,
                entry,
                (entry as u64 * LARGE_PAGE_BYTES) | LARGE_PAGE,
            );
        }
        for (word, bytes) in CODE.chunks_exact(8).enumerate() {
            let bytes = bytes.try_into().map_err(io::Error::other)?;
            set(PROGRAM, word, u64::from_le_bytes(bytes));
        }

        let kvm = Kvm::new()?;
        let mut vm = Vm::new(kvm.create_vm()?);
        // Three pages below the firmware's place, as QEMU has them.
        vm.fd().set_tss_address(0xfffb_d000)?;
        vm.fd().create_irq_chip()?;
        vm.lend(0, own)?;
        vm.lend(TOUCHED_PAGE * PAGE_BYTES, touched)?;
        let vcpu = vm.fd().create_vcpu(0)?;
        let mut registers = vcpu.get_sregs()?;
        let code = kvm_segment {
            limit: u32::MAX,
            selector: 0x33,
            type_: 11,
            present: 1,
            dpl: 3,
            s: 1,
            l: 1,
            g: 1,
            ..kvm_segment::default()
        };
        let data = kvm_segment {
            selector: 0x2b,
            type_: 3,
            l: 0,
            db: 1,
            ..code
        };
        registers.cs = code;
        (registers.ds, registers.es, registers.ss) = (data, data, data);
        (registers.fs, registers.gs) = (data, data);
        registers.tr.base = TASK * PAGE_BYTES;
        registers.tr.limit = 0x2fff;
        (registers.tr.present, registers.tr.type_) = (1, 11);
        registers.tr.selector = 0x38;
        registers.cr0 = 0x8005_0033;
        registers.cr3 = TABLE4 as u64 * PAGE_BYTES;
        registers.cr4 = 0x620;
        registers.efer = 0x501;
        vcpu.set_sregs(&registers)?;
        Ok(Self { vcpu, _vm: vm })
    }

    /// Touches `count` pages from `first`, each `stride` pages after the one before.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::Other`] if KVM ended the run in another way than the program does.
    pub fn touch(&mut self, first: u64, count: u64, stride: u64) -> io::Result<()> {
        self.vcpu.set_regs(&kvm_regs {
            rip: PROGRAM as u64 * PAGE_BYTES,
            // Interruptible; all ports are permitted.
            rflags: 0x3202,
            rsi: first * PAGE_BYTES,
            rdx: stride * PAGE_BYTES,
            rcx: count,
            ..kvm_regs::default()
        })?;
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::IoOut(..)) => return Ok(()),
                Ok(other) => return Err(io::Error::other(format!("KVM ended a run by {other:?}"))),
                Err(error) => {
                    let error = io::Error::from(error);
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_skip::{Lack, skip};
    use std::sync::atomic::Ordering;

    #[test]
    fn the_program_touches_the_pages_it_was_given() {
        let own = SharedMemory::new(OWN_PAGES).unwrap();
        let touched = SharedMemory::new(32).unwrap();
        let mut machine = match Machine::new(&own, &touched) {
            Ok(machine) => machine,
            Err(error) => return skip(Lack::Kvm, format_args!("no KVM: {error}")),
        };
        machine.touch(TOUCHED_PAGE + 1, 3, 10).unwrap();
        machine.touch(TOUCHED_PAGE, 2, 1).unwrap();
        let pages = 0..32;
        let counts: Vec<_> = pages
            .map(|page| touched.word(page).load(Ordering::Relaxed))
            .collect();
        let mut expected = vec![0; 32];
        (expected[0], expected[1], expected[11], expected[21]) = (1, 2, 1, 1);
        assert_eq!(counts, expected);
    }
}
