//! A machine for measurements: KVM, memory, and vCPUs that run \[PRL\]'s synthetic application (Fig. 2) and nothing
//! else.
//!
//! The application goes over an array page by page; at each it draws a random number and by that writes or reads one
//! word. The code is in the machine's slot 0, which is not logged, together with the page tables and a page per vCPU in
//! which it counts its operations and reads whether to halt. There is no kernel, no interrupt and no device in the
//! machine.
//!
//! x86-64 alone. Where KVM runs such a guest in the processor an operation takes nanoseconds; where KVM must emulate it
//! (as in a VM without nested virtualisation) a thousand times as long.

use std::num::NonZeroU64;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_EXIT_DIRTY_RING_FULL,
    KVM_MAX_CPUID_ENTRIES, KVM_MEM_LOG_DIRTY_PAGES, kvm_enable_cap, kvm_regs, kvm_segment,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use plimsoll_flow::{PageNumber, Whole as _};
use plimsoll_trap::uffd::AddressRange;
use vm_memory::{Bytes, MmapRegion, VolatileMemory as _, VolatileSlice};

use super::KvmError;
use super::rings::Rings;
use super::slot::FIRST_SLOT;
pub use super::slot::Slot;
use super::sys::{Memory, RingMapping, VmWithMemory};

const PAGE_BYTES: u64 = 4096;
/// Pages that one entry of a page directory maps.
const LARGE_PAGES: u64 = 512;
const GIB_PAGES: u64 = 512 * LARGE_PAGES;
/// Pages that one table of page directories maps: 512 GiB.
const FRAMES_MAX: u64 = 512 * GIB_PAGES;
/// Largest machine: 64 GiB.
const PAGES_MAX: u64 = 64 * GIB_PAGES;
const VCPUS_MAX: u32 = 16;
const SLOTS_MAX: usize = 32;
/// Smallest ring that leaves entries to use beside those that KVM keeps back.
const RING_ENTRIES_MIN: u32 = 1024;
/// Maximum time until a vCPU halts after a request.
const HALT_TIMEOUT: Duration = Duration::from_secs(30);

/// Layout of slot 0, in pages.
const PML4: u64 = 0;
const DIRECTORY_POINTERS: u64 = 1;
const CODE: u64 = 2;
const CONTROL: u64 = 3;
/// In a vCPU's page of control: operations, and whether it is to halt.
const OPERATIONS_AT: usize = 0;
const HALT_AT: usize = 8;

/// Flags of a page-table entry: present, writable, accessed; of a large page also dirty and large. With accessed and
/// dirty set from the start the processor never writes to the tables.
const TABLE: u64 = 0x23;
const LARGE_PAGE: u64 = 0xE3;

/// The random numbers' rule: x · MULTIPLIER + INCREMENT (Knuth's MMIX); the upper 31 bits of x are drawn.
pub const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
/// See [`MULTIPLIER`].
pub const INCREMENT: u64 = 1_442_695_040_888_963_407;

/// The application. rsi: address, r8: the array's first, r9: its end, r13: step in bytes; rax: random number, r10: it
/// writes below that; rbx: operations, r11: control page; rcx: passes left.
#[rustfmt::skip]
const APPLICATION: [u8; 59] = [
    0x49, 0x0f, 0xaf, 0xc6,             // operation: imul rax, r14
    0x4c, 0x01, 0xf8,                   //            add  rax, r15
    0x48, 0x89, 0xc2,                   //            mov  rdx, rax
    0x48, 0xc1, 0xea, 0x21,             //            shr  rdx, 33
    0x4c, 0x39, 0xd2,                   //            cmp  rdx, r10
    0x73, 0x05,                         //            jae  read
    0x48, 0x89, 0x06,                   //            mov  [rsi], rax
    0xeb, 0x03,                         //            jmp  next
    0x48, 0x8b, 0x16,                   // read:      mov  rdx, [rsi]
    0x4c, 0x01, 0xee,                   // next:      add  rsi, r13
    0x48, 0xff, 0xc3,                   //            inc  rbx
    0x49, 0x89, 0x1b,                   //            mov  [r11], rbx
    0x41, 0x83, 0x7b, 0x08, 0x00,       //            cmp  dword [r11 + 8], 0
    0x75, 0x0d,                         //            jne  halt
    0x4c, 0x39, 0xce,                   // check:     cmp  rsi, r9
    0x72, 0xd0,                         //            jb   operation
    0x4c, 0x89, 0xc6,                   //            mov  rsi, r8
    0x48, 0xff, 0xc9,                   //            dec  rcx
    0x75, 0xc8,                         //            jnz  operation
    0xf4,                               // halt:      hlt
    0xeb, 0xf0,                         //            jmp  check
];

/// Configuration of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineConfig {
    /// Its memory, in slots that do not overlap.
    pub slots: Vec<Slot>,
    /// Its vCPUs, 1 to 16.
    pub vcpus: u32,
    /// Entries of each vCPU's ring of written pages, a power of two from 1024; 0: no rings but a dirty log.
    pub ring_entries: u32,
}

/// The work of a vCPU on an array.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// The array; it lies in one slot.
    pub array: Slot,
    /// Stride in pages, from 1.
    pub stride_pages: NonZeroU64,
    /// Share of operations that write, 0.0 to 1.0.
    pub write_ratio: f64,
    /// Passes over the array; `None`: for ever.
    pub passes: Option<NonZeroU64>,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// A VM with memory.
#[derive(Debug)]
pub struct Machine {
    vm: VmWithMemory,
    slots: Vec<Slot>,
    memory: Vec<Memory>,
    /// Slot 0: tables, application, control pages.
    base: Memory,
    vcpus: u32,
    rings: Option<Rings>,
}

/// A vCPU of a machine.
#[derive(Debug)]
pub struct Vcpu {
    fd: VcpuFd,
    machine: Arc<Machine>,
    index: usize,
}

impl Machine {
    /// Makes a machine with its vCPUs; its memory is zero.
    ///
    /// # Errors
    ///
    /// [`KvmError::Unavailable`] without KVM, [`KvmError::Machine`] for one that cannot be, [`KvmError::Unsupported`]
    /// if KVM has no rings, [`KvmError::Call`].
    pub fn new(config: &MachineConfig) -> Result<(Arc<Self>, Vec<Vcpu>), KvmError> {
        config.check()?;
        let kvm = Kvm::new().map_err(|error| KvmError::Unavailable {
            source: error.into(),
        })?;
        let vm = kvm.create_vm().map_err(KvmError::call("KVM_CREATE_VM"))?;
        if config.ring_entries > 0 {
            enable_rings(&vm, config.ring_entries)?;
        }
        let gibs = config.gibs();
        let base = new_memory(CONTROL + u64::from(config.vcpus) + gibs.len() as u64)?;
        write_base(&base, config.vcpus, &gibs).map_err(|reason| KvmError::Machine { reason })?;
        let mut vm = VmWithMemory::new(vm);
        let set = vm.add_slot(0, Arc::clone(&base));
        set.map_err(KvmError::call("KVM_SET_USER_MEMORY_REGION"))?;
        let mut memory = Vec::new();
        for slot in &config.slots {
            let region = new_memory(slot.pages.0)?;
            let set = vm.add_slot(slot.first.0 * PAGE_BYTES, Arc::clone(&region));
            set.map_err(KvmError::call("KVM_SET_USER_MEMORY_REGION"))?;
            memory.push(region);
        }
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        let cpuid = cpuid.map_err(KvmError::call("KVM_GET_SUPPORTED_CPUID"))?;
        let mut fds = Vec::new();
        for index in 0..config.vcpus {
            let vcpu = vm.fd().create_vcpu(index.into());
            let vcpu = vcpu.map_err(KvmError::call("KVM_CREATE_VCPU"))?;
            let set = vcpu.set_cpuid2(&cpuid);
            set.map_err(KvmError::call("KVM_SET_CPUID2"))?;
            enter_long_mode(&vcpu)?;
            fds.push(vcpu);
        }
        let rings = (config.ring_entries > 0)
            .then(|| {
                let count = usize::try_from(config.ring_entries).unwrap_or(usize::MAX);
                let rings = fds.iter().map(|vcpu| RingMapping::new(vcpu, count));
                let rings = rings.collect::<Result<_, _>>();
                let rings = rings.map_err(KvmError::call("mmap of a dirty ring"))?;
                Ok(Rings::new(rings, &config.slots))
            })
            .transpose()?;
        let machine = Arc::new(Self {
            vm,
            slots: config.slots.clone(),
            memory,
            base,
            vcpus: config.vcpus,
            rings,
        });
        let vcpu = |(index, fd)| Vcpu {
            fd,
            machine: Arc::clone(&machine),
            index,
        };
        let vcpus = fds.into_iter().enumerate().map(vcpu).collect();
        Ok((machine, vcpus))
    }

    /// Its memory.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Operations that its vCPUs have done since they began their work.
    pub fn operations(&self) -> u64 {
        (0..self.vcpus)
            .map(|vcpu| {
                let at = control_at(vcpu) + OPERATIONS_AT;
                let slice = self.base.as_volatile_slice();
                // Inside, as `write_base` found.
                slice.load::<u64>(at, Ordering::Relaxed).unwrap_or(0)
            })
            .sum()
    }

    /// Writes a word into each page, so that all are there, and no two alike.
    ///
    /// # Errors
    ///
    /// [`KvmError::Machine`], which would be a fault of ours.
    pub fn populate(&self) -> Result<(), KvmError> {
        for (slot, memory) in self.memory() {
            for page in (0..slot.len_bytes()).step_by(4096) {
                let word = slot.first.0 * PAGE_BYTES + page as u64;
                let stored = memory.store(word, page, Ordering::Relaxed);
                stored.map_err(|error| KvmError::Machine {
                    reason: error.to_string(),
                })?;
            }
        }
        Ok(())
    }

    /// Halts all vCPUs after their current operation, or lets them run.
    pub(super) fn set_halt(&self, halt: bool) {
        for vcpu in 0..self.vcpus {
            let slice = self.base.as_volatile_slice();
            let at = control_at(vcpu) + HALT_AT;
            // Inside, as `write_base` found.
            let _ = slice.store(u32::from(halt), at, Ordering::Relaxed);
        }
    }

    pub(super) fn vm(&self) -> &VmFd {
        self.vm.fd()
    }

    pub(super) fn has_rings(&self) -> bool {
        self.rings.is_some()
    }

    pub(super) fn rings(&self) -> Option<&Rings> {
        self.rings.as_ref()
    }

    /// Its slots with KVM's numbers.
    pub(super) fn numbered_slots(&self) -> impl Iterator<Item = (u32, &Slot)> {
        (FIRST_SLOT..).zip(&self.slots)
    }

    /// Addresses of its slots' memory in our address space.
    pub(super) fn ranges(&self) -> Vec<AddressRange> {
        let range = |memory: &Memory| AddressRange {
            start: memory.as_ptr().addr() as u64,
            len_bytes: memory.size() as u64,
        };
        self.memory.iter().map(range).collect()
    }

    /// The memory of each slot.
    pub(super) fn memory(&self) -> impl Iterator<Item = (&Slot, VolatileSlice<'_>)> {
        let slices = self.memory.iter().map(|memory| memory.as_volatile_slice());
        self.slots.iter().zip(slices)
    }

    /// Has KVM log all slots, or not.
    pub(super) fn set_logging(&self, on: bool) -> Result<(), KvmError> {
        let flags = if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        for (index, slot) in self.slots.iter().enumerate() {
            let set = self
                .vm
                .set_slot(index + 1, slot.first.0 * PAGE_BYTES, flags);
            set.map_err(KvmError::call("KVM_SET_USER_MEMORY_REGION"))?;
        }
        Ok(())
    }
}

impl MachineConfig {
    fn check(&self) -> Result<(), KvmError> {
        let wrong = |reason: String| Err(KvmError::Machine { reason });
        if !(1..=VCPUS_MAX).contains(&self.vcpus) {
            return wrong(format!("{} vCPUs: expected 1 to {VCPUS_MAX}", self.vcpus));
        }
        let entries = self.ring_entries;
        if entries != 0 && (entries < RING_ENTRIES_MIN || !entries.is_power_of_two()) {
            return wrong(format!(
                "rings of {entries} entries: expected a power of two from {RING_ENTRIES_MIN}"
            ));
        }
        if self.slots.is_empty() || self.slots.len() > SLOTS_MAX {
            return wrong(format!(
                "{} slots: expected 1 to {SLOTS_MAX}",
                self.slots.len()
            ));
        }
        for Slot { first, pages } in &self.slots {
            let end = first.0.checked_add(pages.0);
            let fits = first.0 >= LARGE_PAGES && end.is_some_and(|end| end <= FRAMES_MAX);
            if !fits || !(1..=PAGES_MAX).contains(&pages.0) {
                return wrong(format!(
                    "{pages} pages from page frame {first}: expected 1 to {PAGES_MAX}, within {LARGE_PAGES} to {FRAMES_MAX}"
                ));
            }
        }
        Ok(())
    }

    /// Which GiB its memory lies in, ascending, from 0.
    fn gibs(&self) -> Vec<u64> {
        let of_slot = |slot: &Slot| {
            slot.first.0 / GIB_PAGES..(slot.first.0 + slot.pages.0).div_ceil(GIB_PAGES)
        };
        let mut gibs: Vec<u64> = self.slots.iter().flat_map(of_slot).chain([0]).collect();
        gibs.sort_unstable();
        gibs.dedup();
        gibs
    }
}

fn control_at(vcpu: u32) -> usize {
    // A vCPU's number is small.
    usize::try_from((CONTROL + u64::from(vcpu)) * PAGE_BYTES).unwrap_or(usize::MAX)
}

fn new_memory(pages: u64) -> Result<Memory, KvmError> {
    let region = usize::try_from(pages * PAGE_BYTES)
        .map_err(|error| error.to_string())
        .and_then(|bytes| MmapRegion::new(bytes).map_err(|error| error.to_string()));
    region.map(Arc::new).map_err(|reason| KvmError::Machine {
        reason: format!("{pages} pages of memory: {reason}"),
    })
}

fn enable_rings(vm: &VmFd, entries: u32) -> Result<(), KvmError> {
    let bytes = u64::from(entries) * 16;
    // The first one is x86's older name of the same.
    let found = [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING]
        .into_iter()
        .find_map(|cap| {
            let most = u64::try_from(vm.check_extension_raw(cap.into())).ok()?;
            (most > 0).then_some((cap, most))
        });
    let Some((cap, most)) = found else {
        return Err(KvmError::Unsupported {
            what: "KVM_CAP_DIRTY_LOG_RING",
        });
    };
    if bytes > most {
        return Err(KvmError::Machine {
            reason: format!(
                "rings of {entries} entries: this kernel has at most {}",
                most / 16
            ),
        });
    }
    let mut enable = kvm_enable_cap {
        cap,
        ..Default::default()
    };
    enable.args[0] = bytes;
    vm.enable_cap(&enable)
        .map_err(KvmError::call("KVM_ENABLE_CAP"))
}

/// Writes the page tables and the application.
fn write_base(base: &MmapRegion, vcpus: u32, gibs: &[u64]) -> Result<(), String> {
    let slice = base.as_volatile_slice();
    let write = |page: u64, entry: u64, value: u64| {
        let at =
            usize::try_from(page * PAGE_BYTES + entry * 8).map_err(|error| error.to_string())?;
        let stored = slice.store(value, at, Ordering::Relaxed);
        stored.map_err(|error| error.to_string())
    };
    write(PML4, 0, (DIRECTORY_POINTERS * PAGE_BYTES) | TABLE)?;
    for (directory, &gib) in (CONTROL + u64::from(vcpus)..).zip(gibs) {
        write(DIRECTORY_POINTERS, gib, (directory * PAGE_BYTES) | TABLE)?;
        for entry in 0..512 {
            let address = (gib * GIB_PAGES + entry * LARGE_PAGES) * PAGE_BYTES;
            write(directory, entry, address | LARGE_PAGE)?;
        }
    }
    let at = usize::try_from(CODE * PAGE_BYTES).map_err(|error| error.to_string())?;
    let written = slice.write_slice(&APPLICATION, at);
    written.map_err(|error| error.to_string())
}

/// Sets a vCPU's system registers to 64-bit code with paging, at the highest privilege.
fn enter_long_mode(vcpu: &VcpuFd) -> Result<(), KvmError> {
    const CR0_PE_MP_ET_NE_WP_PG: u64 = 0x8001_0033;
    const CR4_PAE: u64 = 0x20;
    const EFER_LME_LMA: u64 = 0x500;
    let segment = |selector, kind, code: bool| kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_: kind,
        present: 1,
        db: u8::from(!code),
        s: 1,
        l: u8::from(code),
        g: 1,
        ..Default::default()
    };
    let sregs = vcpu.get_sregs();
    let mut sregs = sregs.map_err(KvmError::call("KVM_GET_SREGS"))?;
    sregs.cs = segment(8, 11, true);
    let data = segment(16, 3, false);
    (sregs.ds, sregs.es, sregs.fs) = (data, data, data);
    (sregs.gs, sregs.ss) = (data, data);
    sregs.cr0 = CR0_PE_MP_ET_NE_WP_PG;
    sregs.cr3 = PML4 * PAGE_BYTES;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME_LMA;
    vcpu.set_sregs(&sregs)
        .map_err(KvmError::call("KVM_SET_SREGS"))
}

impl Vcpu {
    /// Sets it to the start of a work.
    ///
    /// # Errors
    ///
    /// [`KvmError::Machine`] if its array is not the machine's, or no share; [`KvmError::Call`].
    pub fn begin(&mut self, work: &Work) -> Result<(), KvmError> {
        let array = work.array;
        let last = array
            .pages
            .0
            .checked_sub(1)
            .and_then(|pages| array.first.0.checked_add(pages));
        let inside = last.is_some_and(|last| {
            let mut slots = self.machine.slots.iter();
            slots.any(|slot| {
                [array.first.0, last]
                    .iter()
                    .all(|&page| slot.offset_of(PageNumber(page)).is_some())
            })
        });
        if !inside || !(0.0..=1.0).contains(&work.write_ratio) {
            return Err(KvmError::Machine {
                reason: format!("{work:?}: expected an array in one slot and a share from 0 to 1"),
            });
        }
        let writes_below = u64::whole((work.write_ratio * f64::from(1u32 << 31)).round());
        let control = CONTROL + self.index as u64;
        let regs = kvm_regs {
            rax: work.seed,
            rcx: work.passes.map_or(u64::MAX, NonZeroU64::get),
            rsi: array.first.0 * PAGE_BYTES,
            r8: array.first.0 * PAGE_BYTES,
            r9: (array.first.0 + array.pages.0) * PAGE_BYTES,
            r10: writes_below,
            r11: control * PAGE_BYTES,
            r13: work.stride_pages.get().saturating_mul(PAGE_BYTES),
            r14: MULTIPLIER,
            r15: INCREMENT,
            rip: CODE * PAGE_BYTES,
            // Bit 1 is always set; interrupts are off.
            rflags: 2,
            ..Default::default()
        };
        self.fd
            .set_regs(&regs)
            .map_err(KvmError::call("KVM_SET_REGS"))
    }

    /// Runs until it halts; true if its work is done.
    ///
    /// # Errors
    ///
    /// [`KvmError::Vcpu`] if it leaves the guest in any other way, [`KvmError::Call`].
    pub fn run(&mut self) -> Result<bool, KvmError> {
        loop {
            let exit = match self.fd.run() {
                Ok(VcpuExit::Hlt) => break,
                Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                    if let Some(rings) = &self.machine.rings {
                        rings.drain_full(self.machine.vm())?;
                        continue;
                    }
                    "a full ring, but there are none".to_owned()
                }
                Ok(exit) => format!("{exit:?}"),
                Err(error) if error.errno() == libc::EINTR => continue,
                Err(error) => return Err(KvmError::call("KVM_RUN")(error)),
            };
            return Err(KvmError::Vcpu {
                vcpu: self.index,
                exit,
            });
        }
        let regs = self.fd.get_regs().map_err(KvmError::call("KVM_GET_REGS"))?;
        Ok(regs.rcx == 0)
    }
}

/// A machine's vCPUs, each in a thread of its own.
#[derive(Debug)]
pub struct Runner {
    machine: Arc<Machine>,
    threads: Vec<Thread>,
}

#[derive(Debug)]
struct Thread {
    orders: mpsc::Sender<Order>,
    halts: mpsc::Receiver<Result<bool, KvmError>>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Paused,
    Done,
}

#[derive(Debug)]
enum Order {
    Begin(Work),
    GoOn,
}

impl Runner {
    /// Gives each vCPU a thread; they wait for work.
    ///
    /// # Errors
    ///
    /// [`KvmError::Call`] if there can be no more threads.
    pub fn new(machine: Arc<Machine>, vcpus: Vec<Vcpu>) -> Result<Self, KvmError> {
        let mut threads = Vec::new();
        for mut vcpu in vcpus {
            let (orders, ordered) = mpsc::channel();
            let (halted, halts) = mpsc::channel();
            thread::Builder::new()
                .name(format!("vcpu {}", vcpu.index))
                .spawn(move || {
                    for order in ordered {
                        let begun = match order {
                            Order::Begin(work) => vcpu.begin(&work),
                            Order::GoOn => Ok(()),
                        };
                        let result = begun.and_then(|()| vcpu.run());
                        if halted.send(result).is_err() {
                            break;
                        }
                    }
                })
                .map_err(KvmError::call("clone"))?;
            threads.push(Thread {
                orders,
                halts,
                state: State::Done,
            });
        }
        Ok(Self { machine, threads })
    }

    /// Starts a work on each vCPU, which must have completed the one before; a vCPU without one waits.
    ///
    /// # Errors
    ///
    /// [`KvmError::Stuck`]. An error in a work is reported by the next wait or pause.
    pub fn begin(&mut self, works: &[Work]) -> Result<(), KvmError> {
        self.machine.set_halt(false);
        for (vcpu, (thread, work)) in self.threads.iter_mut().zip(works).enumerate() {
            thread.order(vcpu, Order::Begin(*work))?;
        }
        Ok(())
    }

    /// Waits until all work is done, at most `timeout`.
    ///
    /// # Errors
    ///
    /// [`KvmError::Stuck`], and why a vCPU could not run.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), KvmError> {
        let deadline = Instant::now() + timeout;
        for (vcpu, thread) in self.threads.iter_mut().enumerate() {
            thread.wait(vcpu, timeout, deadline)?;
        }
        Ok(())
    }

    /// Halts all vCPUs.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn pause(&mut self) -> Result<(), KvmError> {
        self.machine.set_halt(true);
        self.wait(HALT_TIMEOUT)
    }

    /// Lets vCPUs that were halted continue.
    ///
    /// # Errors
    ///
    /// [`KvmError::Stuck`] if a thread is gone.
    pub fn resume(&mut self) -> Result<(), KvmError> {
        self.machine.set_halt(false);
        for (vcpu, thread) in self.threads.iter_mut().enumerate() {
            if thread.state == State::Paused {
                thread.order(vcpu, Order::GoOn)?;
            }
        }
        Ok(())
    }
}

impl Thread {
    fn order(&mut self, vcpu: usize, order: Order) -> Result<(), KvmError> {
        let sent = self.orders.send(order);
        sent.map_err(|_| KvmError::Stuck { vcpu, seconds: 0 })?;
        self.state = State::Running;
        Ok(())
    }

    fn wait(&mut self, vcpu: usize, timeout: Duration, deadline: Instant) -> Result<(), KvmError> {
        if self.state != State::Running {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(halt) = self.halts.recv_timeout(left) else {
            return Err(KvmError::Stuck {
                vcpu,
                seconds: timeout.as_secs(),
            });
        };
        // A vCPU that could not run has no state from which to continue.
        self.state = State::Done;
        if !halt? {
            self.state = State::Paused;
        }
        Ok(())
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        // The threads end when their vCPU has halted and their channels are closed.
        self.machine.set_halt(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::PageCount;

    fn config() -> MachineConfig {
        MachineConfig {
            slots: vec![Slot {
                first: PageNumber(512),
                pages: PageCount(64),
            }],
            vcpus: 1,
            ring_entries: 0,
        }
    }

    #[test]
    fn a_machine_that_cannot_be_is_refused_before_anything_is_made() {
        let refused = |change: &dyn Fn(&mut MachineConfig)| {
            let mut config = config();
            change(&mut config);
            config.check().map_err(|error| error.to_string())
        };
        assert!(refused(&|_| ()).is_ok());
        for (change, reason) in [
            (
                &(|config: &mut MachineConfig| config.vcpus = 17) as &dyn Fn(&mut MachineConfig),
                "17 vCPUs: expected 1 to 16",
            ),
            (
                &|config| config.ring_entries = 1000,
                "rings of 1000 entries: expected a power of two from 1024",
            ),
            (&|config| config.slots.clear(), "0 slots"),
            (
                &|config| config.slots[0].first.0 = 511,
                "64 pages from page frame 511",
            ),
            (
                &|config| config.slots[0].first.0 = u64::MAX,
                "64 pages from page frame 18446744073709551615",
            ),
            (
                &|config| config.slots[0].pages.0 = 0,
                "0 pages from page frame 512",
            ),
        ] {
            let error = refused(change).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn the_tables_map_each_gib_that_a_slot_lies_in() {
        let mut config = config();
        config.slots.push(Slot {
            first: PageNumber(5 * GIB_PAGES - 1),
            pages: PageCount(2),
        });
        assert_eq!(config.gibs(), [0, 4, 5]);
    }
}
