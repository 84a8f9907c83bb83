//! Model of a machine with PML or PRL: logging buffers, full events, and the host's handler.
//!
//! Each vCPU has a buffer of [`Config::buffer_entries`]. Its *index* is the number of free entries; a page is logged
//! into the entry at the index after it is decremented, so the last entry is filled first.
//!
//! - **PML** (\[PRL\] §2): a walk that sets a page's dirty flag logs it. If the index is 0, the VM first
//!   exits: the hypervisor takes all entries, on the VM's own CPU, and resets the index; nothing is missed. Because the
//!   hypervisor needs all pages before it clears the dirty flags, vCPUs with non-empty buffers also exit at the end of an
//!   interval.
//! - **PRL** (\[PRL\] §4.1, mode PAML): every walk logs its page, whatever its flags. If the index is 0,
//!   it becomes -1 and a CPU of the host is interrupted; this page is missed, and so are all others until the index is
//!   reset. The VM continues to run. The contents of buffers that are not full are not delivered.
//!
//! The host's handler (\[PRL\] §4.3) serves all VMs on one CPU. It starts after the interrupt's latency, masks the
//! interrupt, and makes passes: it takes the entries of all full buffers, then resets their indices. If others have
//! become full meanwhile, another pass follows, as in NAPI; otherwise it unmasks the interrupt and ends. Buffers that
//! become full while the interrupt is masked cause no further interrupt.
//!
//! Time is in cycles of one clock. A vCPU's time is its instructions times the cycles per instruction, plus the cost of
//! logging. It is never earlier than the previous records of its VM, so a vCPU that slept resumes at the time of the
//! others. Records of several VMs are merged by time ([`run`]). The same records give the same results, live or from a
//! file.
//!
//! Departs from \[PRL\]: a full event is detected at the address that no longer fits, as in §4.1, and that address is counted as
//! missed ([`VmOutcome::missed_at_full`]), separately from those missed while the handler works, the only ones that §5.2 counts.

mod buffer;
mod cost;
mod host;
mod merge;

use plimsoll_flow::PageNumber;

use crate::record::{Record, Walk};
use buffer::{Buffer, Put};
pub use cost::CostModel;
use host::{FullBuffer, Host};
pub use merge::run;

/// Which pages are logged, and which CPU empties the buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// PML: pages whose dirty flag is set by a write; emptied by the VM's own CPU.
    Pml,
    /// PRL: pages of all walks; emptied by a CPU of the host.
    Prl,
}

/// Configuration of a machine with page logging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Mode of logging.
    pub mode: Mode,
    /// Entries of each vCPU's buffer, at least 1; a page of memory has 512.
    pub buffer_entries: u32,
    /// Costs of logging.
    pub costs: CostModel,
}

impl Config {
    /// Number of entries in a processor's logging page.
    pub const BUFFER_ENTRIES: u32 = 512;

    /// A machine with the given mode, the buffer size of \[PRL\] and the default costs.
    pub fn new(mode: Mode) -> Self {
        Self {
            mode,
            buffer_entries: Self::BUFFER_ENTRIES,
            costs: CostModel::default(),
        }
    }
}

/// Receiver of logged pages. On a host, this is the process that estimates a VM's working set from the VM's
/// large buffer, in which it counts each page.
pub trait Sink {
    /// Receives the pages of a buffer of a VM, in the order in which they were logged.
    fn drained(&mut self, vm: usize, pages: &[PageNumber]);

    /// An interval of a VM ended, after this total number of instructions of its vCPUs.
    fn interval(&mut self, vm: usize, number: u64, instructions: u64) {
        let _ = (vm, number, instructions);
    }

    /// A VM set a mark in its run.
    fn mark(&mut self, vm: usize, id: u8) {
        let _ = (vm, id);
    }
}

/// Results of one VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VmOutcome {
    /// Instructions of all vCPUs.
    pub instructions: u64,
    /// Page walks.
    pub walks: u64,
    /// Intervals that ended.
    pub intervals: u64,
    /// Pages written to a buffer: those drained, and those left.
    pub logged: u64,
    /// Times that a walk found a buffer full.
    pub full_events: u64,
    /// Times that the VM stopped for its buffers: full events, and ends of intervals.
    pub exits: u64,
    /// Pages missed because the buffer was full: one for each full event of PRL.
    pub missed_at_full: u64,
    /// Pages missed between a full event and the reset of its index.
    pub missed_in_handler: u64,
    /// Pages delivered to the sink.
    pub drained: u64,
    /// Pages left in the buffers at the end.
    pub left: u64,
    /// Cycles of all vCPUs, excluding logging.
    pub base_cycles: u64,
    /// Additional cycles caused by logging.
    pub logging_cycles: u64,
}

impl VmOutcome {
    /// Pages that should have been logged but were missed.
    pub fn missed(&self) -> u64 {
        self.missed_at_full + self.missed_in_handler
    }

    /// Time added by logging, as a share of the time without; 0 for a VM that never ran.
    pub fn slowdown(&self) -> f64 {
        share(self.logging_cycles, self.base_cycles)
    }
}

/// Results of the host CPU that serves full events of PRL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostOutcome {
    /// Number of interrupts.
    pub interrupts: u64,
    /// Number of passes over full buffers; at least one per interrupt.
    pub passes: u64,
    /// Cycles that its handler ran.
    pub busy_cycles: u64,
    /// Cycles from the start to the end of the VM that ran longest, or to the end of the handler's work.
    pub elapsed_cycles: u64,
}

impl HostOutcome {
    /// Share of the CPU's time that its handler took, 0.0 to 1.0.
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

/// Results of a run.
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
    /// Time of its last record.
    now: Time,
    outcome: VmOutcome,
}

impl Vm {
    /// The time of the VM's next record, if it is this one.
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

    /// Advances the vCPU of a record to the record's time.
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

    /// Adds a cost to a vCPU's time.
    fn charge(&mut self, vcpu: usize, cycles: u64) {
        let time = &mut self.vcpus[vcpu].time;
        *time = time.after_cycles(cycles);
        let logging = &mut self.outcome.logging_cycles;
        *logging = logging.saturating_add(cycles);
    }
}

/// VMs with page logging on one host.
#[derive(Debug)]
pub struct Machine {
    config: Config,
    vms: Vec<Vm>,
    host: Host,
}

impl Machine {
    /// Creates VMs with these numbers of vCPUs, which have not run yet.
    ///
    /// # Panics
    ///
    /// If the buffers have no entries.
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

    /// The time of a VM's next record, if it is this one.
    ///
    /// # Panics
    ///
    /// If there is no such VM or vCPU.
    pub fn time_of(&self, vm: usize, record: &Record) -> Time {
        self.vms[vm].time_of(record, &self.config.costs)
    }

    /// Processes the next record of a VM. Records of several VMs must be passed in the order of their times.
    ///
    /// # Panics
    ///
    /// If there is no such VM or vCPU. The records of a [`RecordSource`](crate::RecordSource) always match its
    /// description.
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
                let full = FullBuffer { vm: number, vcpu };
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

    /// Makes all vCPUs of a VM exit whose buffers are not empty.
    fn exit_all(&mut self, number: usize, sink: &mut dyn Sink) {
        let vm = &mut self.vms[number];
        for vcpu in 0..vm.vcpus.len() {
            if !vm.vcpus[vcpu].buffer.entries().is_empty() {
                vm.exit(number, vcpu, &self.config.costs, sink);
            }
        }
    }

    /// Advances the host's handler to a time.
    fn work_until(&mut self, now: Time, sink: &mut dyn Sink) {
        let (entries, costs) = (self.config.buffer_entries, &self.config.costs);
        while let Some(pass) = self.host.pass_ended_by(now, entries, costs) {
            for FullBuffer { vm: number, vcpu } in pass {
                let vm = &mut self.vms[number];
                let buffer = &mut vm.vcpus[vcpu].buffer;
                sink.drained(number, buffer.entries());
                vm.outcome.drained += buffer.entries().len() as u64;
                buffer.reset();
            }
        }
    }

    /// Ends the run: the handler completes its work; PML is disabled, which drains its buffers.
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
