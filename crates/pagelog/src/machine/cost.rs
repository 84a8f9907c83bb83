//! Costs of page logging, in cycles.

/// Cycles of each event. All are estimates; the defaults have the order of magnitude measured on x86.
///
/// - A VM exit and the entry after it cost hundreds to thousands of cycles (Intel, *Understanding VM exits*, 2009); through
///   KVM's handler and back some 1400 to 2500 (LKML, 4 Dec 2020, on AMD's `vmload` in `svm_vcpu_run`): 2000.
/// - An interrupt between processors takes about a microsecond to arrive: 2000. Where it arrives, it makes the host's own
///   VM exit (\[PRL\] §4.2), and is masked and unmasked: 3000.
/// - Taking an entry is a load, and an increment in the VM's large buffer, which exceeds the caches for large working sets:
///   10 to 18 ns by `plimsoll-bench pagelog`: 40.
/// - Logging a page is a store of 8 bytes by the processor; \[PRL\] §5.3.1 measured no cost (0.001 %): 1.
/// - A two-dimensional page walk reads up to 24 entries, mostly from caches; it is a cost of the machine, not of
///   logging: 50.
/// - An instruction takes one cycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CostModel {
    /// An instruction, in thousandths of a cycle.
    pub instruction_thousandths: u32,
    /// A page walk, with or without logging.
    pub walk_cycles: u32,
    /// Putting a page into a buffer.
    pub logged_cycles: u32,
    /// A VM exit with its handler, excluding the draining of entries, and the VM entry.
    pub exit_cycles: u32,
    /// Taking an entry out of a buffer and counting it.
    pub entry_cycles: u32,
    /// Resetting the index of a buffer.
    pub reset_cycles: u32,
    /// Time from a full event to the start of the handler on the host's CPU.
    pub latency_cycles: u32,
    /// Start and end of that handler.
    pub interrupt_cycles: u32,
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            instruction_thousandths: 1000,
            walk_cycles: 50,
            logged_cycles: 1,
            exit_cycles: 2000,
            entry_cycles: 40,
            reset_cycles: 100,
            latency_cycles: 2000,
            interrupt_cycles: 3000,
        }
    }
}

impl CostModel {
    /// Cycles of a VM exit that drains this number of entries.
    pub(super) fn exit(&self, entries: u64) -> u64 {
        u64::from(self.exit_cycles) + self.taken(entries)
    }

    /// Cycles of draining this number of entries of a buffer and resetting its index.
    pub(super) fn taken(&self, entries: u64) -> u64 {
        entries * u64::from(self.entry_cycles) + u64::from(self.reset_cycles)
    }
}
