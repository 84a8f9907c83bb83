//! PML and PRL as a machine: logging buffers, full events, and what the host's handler makes of them.
//!
//! Each vCPU has a buffer of [`Config::buffer_entries`]. Its *index* is the number of free entries; a page is logged
//! into the entry that the index says after it is counted down, so the last entry is filled first.
//!
//! - **PML** (\[PRL\] §2): a walk that sets a page's dirty flag logs it. One that finds the index 0 first makes the VM
//!   exit: the hypervisor takes all entries, on the VM's own CPU, and resets the index; nothing is missed. As the hypervisor
//!   must have all pages before it clears the dirty flags, the end of an interval makes vCPUs exit whose buffers are not empty.
//! - **PRL** (\[PRL\] §4.1, mode PAML): every walk logs its page, whatever its flags. One that finds the index 0
//!   makes it -1 and interrupts a CPU of the host; this page is missed, and so are all others until the index is reset. The VM
//!   runs on. What buffers that are not full hold is not seen.
//!
//! The host's handler (\[PRL\] §4.3) serves all VMs on one CPU. It begins the interrupt's way later, masks the
//! interrupt, and makes passes: takes the entries of all buffers that are full, then resets their indices; if others have
//! become full meanwhile, another pass follows, as in NAPI; else it unmasks the interrupt and ends. Buffers that become full while the
//! interrupt is masked send none that counts.
//!
//! Time is in cycles of one clock. A vCPU's is what it has run, times the cycles of an instruction, and what logging
//! has cost it; it is never behind the records of its VM before, so a vCPU that slept takes up where the others are.
//! What several VMs do is merged by time ([`run`]). The same records give the same results, live or from a file.
//!
//! Departs from \[PRL\]: full events are found by the address that no longer fits, as §4.1 says, and that address is counted as
//! missed ([`VmOutcome::missed_at_full`]) apart from those that the handler's work costs, which alone §5.2 counts.

mod buffer;
mod cost;
mod host;
mod merge;

use plimsoll_flow::PageNumber;

use crate::record::{Record, Walk};
use buffer::{Buffer, Put};
pub use cost::CostModel;
use host::{Full, Host};
pub use merge::run;

/// What is logged, and who empties the buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Pages whose dirty flag a write sets; the VM's own CPU.
    Pml,
    /// Pages of all walks; a CPU of the host.
    Prl,
}

/// A machine with page logging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// What is logged.
    pub mode: Mode,
    /// Entries of each vCPU's buffer: 512 in a page of memory, at least 1.
    pub buffer_entries: u32,
    /// What it costs.
    pub costs: CostModel,
}

impl Config {
    /// Entries that fit into the page of a processor that logs.
    pub const BUFFER_ENTRIES: u32 = 512;

    /// A machine of a mode with the buffers of \[PRL\] and the default costs.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self {
            mode,
            buffer_entries: Self::BUFFER_ENTRIES,
            costs: CostModel::default(),
        }
    }
}

/// What takes the pages that were logged: on a host, the process that estimates a VM's working set from its
/// one large buffer, in which it counts how often it got each page.
pub trait Sink {
    /// Pages that a buffer of a VM held, in the order in which they were logged.
    fn drained(&mut self, vm: usize, pages: &[PageNumber]);

    /// An interval of a VM ended, by when its vCPUs together had run so many instructions.
    fn interval(&mut self, vm: usize, number: u64, instructions: u64) {
        let _ = (vm, number, instructions);
    }

    /// A VM marked a place in its run.
    fn mark(&mut self, vm: usize, id: u8) {
        let _ = (vm, id);
    }
}

/// What became of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VmOutcome {
    /// Instructions of all vCPUs.
    pub instructions: u64,
    /// Page walks.
    pub walks: u64,
    /// Intervals that ended.
    pub intervals: u64,
    /// Pages that were put into a buffer: those drained, and those left.
    pub logged: u64,
    /// Times that a walk found a buffer full.
    pub full_events: u64,
    /// Times that the VM stopped for its buffers: full events, and ends of intervals.
    pub exits: u64,
    /// Pages missed as they found the buffer full: one for each full event of PRL.
    pub missed_at_full: u64,
    /// Pages missed between a full event and the reset of its index.
    pub missed_in_handler: u64,
    /// Pages that the sink got.
    pub drained: u64,
    /// Pages that were in the buffers at the end.
    pub left: u64,
    /// Cycles of all vCPUs, had nothing been logged.
    pub base_cycles: u64,
    /// Cycles that logging added to them.
    pub logging_cycles: u64,
}

impl VmOutcome {
    /// Pages that should have been logged, but were not.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.missed_at_full + self.missed_in_handler
    }

    /// Time that logging added, as a share of the time without; 0 for a VM that never ran.
    #[must_use]
    pub fn slowdown(&self) -> f64 {
        share(self.logging_cycles, self.base_cycles)
    }
}

/// What became of the CPU of the host that serves full events of PRL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostOutcome {
    /// Interrupts that it took.
    pub interrupts: u64,
    /// Passes over full buffers; in each, one or more.
    pub passes: u64,
    /// Cycles that its handler ran.
    pub busy_cycles: u64,
    /// Cycles from the start to the end of the VM that ran longest, or to the end of the handler's work.
    pub elapsed_cycles: u64,
}

impl HostOutcome {
    /// Share of the CPU's time that its handler took, 0.0 to 1.0.
    #[must_use]
    pub fn load(&self) -> f64 {
        share(self.busy_cycles, self.elapsed_cycles)
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

/// What became of all.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome {
    /// The VMs, in the order in which they were given.
    pub vms: Vec<VmOutcome>,
    /// The host's CPU.
    pub host: HostOutcome,
}

/// A point in time, in thousandths of a cycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Time(u64);

impl Time {
    const PER_CYCLE: u64 = 1000;

    fn after_cycles(self, cycles: u64) -> Self {
        Self(
            self.0
                .saturating_add(cycles.saturating_mul(Self::PER_CYCLE)),
        )
    }

    fn after_instructions(self, instructions: u64, costs: &CostModel) -> Self {
        let thousandths = u64::from(costs.instruction_thousandths);
        Self(
            self.0
                .saturating_add(instructions.saturating_mul(thousandths)),
        )
    }

    fn cycles(self) -> u64 {
        self.0 / Self::PER_CYCLE
    }
}

#[derive(Debug)]
struct Vcpu {
    instructions: u64,
    time: Time,
    buffer: Buffer,
}

#[derive(Debug)]
struct Vm {
    vcpus: Vec<Vcpu>,
    /// When its last record was.
    now: Time,
    outcome: VmOutcome,
}

impl Vm {
    /// When the VM's next record is, if it is this one.
    fn time_of(&self, record: &Record, costs: &CostModel) -> Time {
        let (vcpu, instructions) = match *record {
            Record::Walk(walk) => (walk.vcpu, u64::from(walk.step_instructions)),
            Record::Clock { vcpu, instructions } => {
                let before = self.vcpus[usize::from(vcpu)].instructions;
                (vcpu, instructions.saturating_sub(before))
            }
            _ => return self.now,
        };
        let time = self.vcpus[usize::from(vcpu)].time;
        time.after_instructions(instructions, costs).max(self.now)
    }

    /// Lets the vCPU of a record run up to it.
    fn run_to(&mut self, record: &Record, at: Time) {
        self.now = at;
        let vcpu = match *record {
            Record::Walk(walk) => {
                let vcpu = &mut self.vcpus[usize::from(walk.vcpu)];
                vcpu.instructions += u64::from(walk.step_instructions);
                vcpu
            }
            Record::Clock { vcpu, instructions } => {
                let vcpu = &mut self.vcpus[usize::from(vcpu)];
                vcpu.instructions = vcpu.instructions.max(instructions);
                vcpu
            }
            _ => return,
        };
        vcpu.time = at;
    }

    fn instructions(&self) -> u64 {
        let each = self.vcpus.iter().map(|vcpu| vcpu.instructions);
        each.fold(0, u64::saturating_add)
    }

    /// Takes the entries of a vCPU's buffer in a VM exit.
    fn exit(&mut self, number: usize, vcpu: usize, costs: &CostModel, sink: &mut dyn Sink) {
        let buffer = &mut self.vcpus[vcpu].buffer;
        let entries = buffer.entries().len() as u64;
        sink.drained(number, buffer.entries());
        buffer.reset();
        self.outcome.drained += entries;
        self.outcome.exits += 1;
        self.charge(vcpu, costs.exit(entries));
    }

    /// Makes logging cost a vCPU time.
    fn charge(&mut self, vcpu: usize, cycles: u64) {
        let time = &mut self.vcpus[vcpu].time;
        *time = time.after_cycles(cycles);
        let logging = &mut self.outcome.logging_cycles;
        *logging = logging.saturating_add(cycles);
    }
}

/// Machines whose pages are logged, under one host.
#[derive(Debug)]
pub struct Machine {
    config: Config,
    vms: Vec<Vm>,
    host: Host,
}

impl Machine {
    /// Makes VMs of so many vCPUs each, that have not run yet.
    ///
    /// # Panics
    ///
    /// If the buffers have no entries.
    #[must_use]
    pub fn new(config: &Config, vcpus: &[u32]) -> Self {
        assert!(config.buffer_entries > 0, "a buffer has entries");
        let vcpu = |_| Vcpu {
            instructions: 0,
            time: Time::default(),
            buffer: Buffer::new(config.buffer_entries),
        };
        let vm = |&vcpus: &u32| Vm {
            vcpus: (0..vcpus).map(vcpu).collect(),
            now: Time::default(),
            outcome: VmOutcome::default(),
        };
        Self {
            config: *config,
            vms: vcpus.iter().map(vm).collect(),
            host: Host::default(),
        }
    }

    /// When a VM's next record is, if it is this one.
    ///
    /// # Panics
    ///
    /// If there is no such VM or vCPU.
    #[must_use]
    pub fn time_of(&self, vm: usize, record: &Record) -> Time {
        self.vms[vm].time_of(record, &self.config.costs)
    }

    /// Takes the next record of a VM. Those of several VMs are to come in the order of their times.
    ///
    /// # Panics
    ///
    /// If there is no such VM or vCPU: records of a [`RecordSource`](crate::RecordSource) have those of its description.
    pub fn push(&mut self, vm: usize, record: &Record, sink: &mut dyn Sink) {
        let at = self.time_of(vm, record);
        self.work_until(at, sink);
        self.vms[vm].run_to(record, at);
        match *record {
            Record::Walk(walk) => self.walk(vm, &walk, sink),
            Record::Interval { number } => self.interval(vm, number, sink),
            Record::Mark { id, .. } => sink.mark(vm, id),
            Record::Clock { .. }
            | Record::Enter { .. }
            | Record::Leave { .. }
            | Record::Accesses { .. }
            | Record::End => {}
        }
    }

    fn walk(&mut self, number: usize, walk: &Walk, sink: &mut dyn Sink) {
        let costs = &self.config.costs;
        let vm = &mut self.vms[number];
        let vcpu = usize::from(walk.vcpu);
        vm.outcome.walks += 1;
        vm.vcpus[vcpu].time = vm.vcpus[vcpu].time.after_cycles(costs.walk_cycles.into());
        if self.config.mode == Mode::Pml && !walk.sets_dirty {
            return;
        }
        let put = vm.vcpus[vcpu].buffer.put(walk.frame);
        match (put, self.config.mode) {
            (Put::Logged, _) => {}
            (Put::Full, Mode::Pml) => {
                vm.outcome.full_events += 1;
                vm.exit(number, vcpu, costs, sink);
                vm.vcpus[vcpu].buffer.put(walk.frame);
            }
            (Put::Full, Mode::Prl) => {
                vm.vcpus[vcpu].buffer.suspend();
                vm.outcome.full_events += 1;
                vm.outcome.missed_at_full += 1;
                let full = Full { vm: number, vcpu };
                self.host.interrupt(full, vm.now, costs);
                return;
            }
            (Put::Suspended, _) => {
                vm.outcome.missed_in_handler += 1;
                return;
            }
        }
        vm.outcome.logged += 1;
        vm.charge(vcpu, costs.logged_cycles.into());
    }

    fn interval(&mut self, number: usize, interval: u64, sink: &mut dyn Sink) {
        if self.config.mode == Mode::Pml {
            self.exit_all(number, sink);
        }
        let vm = &mut self.vms[number];
        vm.outcome.intervals += 1;
        sink.interval(number, interval, vm.instructions());
    }

    /// Makes the vCPUs of a VM exit whose buffers are not empty.
    fn exit_all(&mut self, number: usize, sink: &mut dyn Sink) {
        let vm = &mut self.vms[number];
        for vcpu in 0..vm.vcpus.len() {
            if !vm.vcpus[vcpu].buffer.entries().is_empty() {
                vm.exit(number, vcpu, &self.config.costs, sink);
            }
        }
    }

    /// Lets the host's handler do what it does up to a time.
    fn work_until(&mut self, now: Time, sink: &mut dyn Sink) {
        let (entries, costs) = (self.config.buffer_entries, &self.config.costs);
        while let Some(pass) = self.host.pass_ended_by(now, entries, costs) {
            for Full { vm: number, vcpu } in pass {
                let vm = &mut self.vms[number];
                let buffer = &mut vm.vcpus[vcpu].buffer;
                sink.drained(number, buffer.entries());
                vm.outcome.drained += buffer.entries().len() as u64;
                buffer.reset();
            }
        }
    }

    /// Ends the run: the handler finishes its work, PML is switched off, which takes what its buffers hold.
    pub fn finish(mut self, sink: &mut dyn Sink) -> Outcome {
        let ended = self.vms.iter().map(|vm| vm.now).max().unwrap_or_default();
        self.work_until(Time(u64::MAX), sink);
        for number in 0..self.vms.len() {
            if self.config.mode == Mode::Pml {
                self.exit_all(number, sink);
            }
            let costs = &self.config.costs;
            let vm = &mut self.vms[number];
            let instructions = vm.instructions();
            let outcome = &mut vm.outcome;
            let left = vm
                .vcpus
                .iter()
                .map(|vcpu| vcpu.buffer.entries().len() as u64);
            outcome.left = left.sum();
            outcome.instructions = instructions;
            let walks = outcome.walks.saturating_mul(costs.walk_cycles.into());
            let base = Time::default().after_instructions(instructions, costs);
            outcome.base_cycles = base.after_cycles(walks).cycles();
        }
        Outcome {
            vms: self.vms.iter().map(|vm| vm.outcome).collect(),
            host: self.host.outcome(ended),
        }
    }
}

#[cfg(test)]
mod tests;
