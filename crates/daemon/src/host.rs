//! The control loop's view of a host: its VMs, their actuators and the sources of their curves.
//!
//! The loop depends only on these traits, so that it runs on a simulated host as on a real one.

use std::time::Duration;

use plimsoll_actuator::{ActuatorError, MemoryStatus, VmMemory};
use plimsoll_flow::{Accelerator, GroupKind, MissRatioCurve, PageSize, WorkingSet};
use plimsoll_protocol::curve_json::{CurveJson, CurveJsonError};
use plimsoll_protocol::group::LeftOutGroups;
use plimsoll_protocol::vm::{BackendView, CurveSource, HeatRow, TraceView};
pub use plimsoll_vm::{GroupLimit, HeldRam, MemoryPressure};
use plimsoll_vm::{ListedGroup, ProcessId};

use crate::config::{Config, VmRule};

/// A running VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveredVm {
    /// Its name, unique on the host.
    pub vm: String,
    /// Its process.
    pub pid: u32,
    /// Start of that process, in clock ticks since boot, because process numbers are reused.
    pub start_ticks: u64,
    /// Its UUID, if it has one.
    pub uuid: Option<String>,
    /// What executes its instructions, if known.
    pub accelerator: Option<Accelerator>,
    /// Whether libvirt manages it.
    pub libvirt: bool,
    /// Its RAM at its start.
    pub ram_bytes: u64,
    /// Which tracing backends can observe it; empty while that is unknown.
    pub backends: Vec<BackendView>,
    /// Why the host would not get what its balloon takes.
    pub held: Option<HeldRam>,
    /// Whether it was started to receive a saved state or a migration, and had not run when it was found, before its balloon was
    /// asked, which is not yet what it will be.
    pub receives: bool,
}

impl DiscoveredVm {
    /// Its process.
    pub fn process(&self) -> ProcessId {
        ProcessId {
            pid: self.pid,
            start_ticks: self.start_ticks,
        }
    }
}

/// A control group that is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveredGroup {
    /// Its name, unique among the watched groups.
    pub name: String,
    /// What it holds.
    pub kind: GroupKind,
    /// Its path, directory and memory.
    pub listed: ListedGroup,
}

impl DiscoveredGroup {
    /// Whether another finding is of the same group, and not of one that was made again with its path.
    pub fn is_same(&self, other: &Self) -> bool {
        let (one, other) = (&self.listed, &other.listed);
        one.inode == other.inode && one.directory == other.directory
    }
}

/// The control groups of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundGroups {
    /// Those that are to be watched, by name.
    pub watched: Vec<DiscoveredGroup>,
    /// Those that match the patterns and are not.
    pub left_out: Vec<LeftOutGroups>,
    /// Warnings for the operator.
    pub warnings: Vec<String>,
}

/// The actuator and the curve source of a VM.
pub struct VmHandles {
    /// Its actuator.
    pub actuator: VmMemory,
    /// Source of its curve.
    pub feeds: Vec<Box<dyn Feed>>,
}

/// A source of a VM's curve, in its own process or thread. Ends when dropped.
pub trait Feed: Send {
    /// The source of its curves.
    fn source(&self) -> CurveSource;

    /// The latest results; never waits.
    fn seen(&mut self) -> FeedReport;

    /// Discards all observations, because the VM's memory was moved.
    fn forget(&mut self) {}
}

/// A curve and its time.
#[derive(Debug, Clone, PartialEq)]
pub struct ObservedCurve {
    /// The curve over pages.
    pub curve: MissRatioCurve,
    /// Size of those pages.
    pub page_size: PageSize,
    /// Time of the curve, since boot.
    pub since_boot: Duration,
}

impl ObservedCurve {
    /// Reads a curve that arrived at `since_boot`.
    ///
    /// # Errors
    ///
    /// The reason why it is not valid.
    pub fn read(json: &CurveJson, since_boot: Duration) -> Result<Self, CurveJsonError> {
        Ok(Self {
            curve: json.to_curve()?,
            page_size: PageSize::new(json.page_bytes)?,
            since_boot,
        })
    }
}

/// Results of a feed of a VM.
#[derive(Debug, Clone, Default)]
pub struct FeedReport {
    /// The newest curve.
    pub curve: Option<ObservedCurve>,
    /// The working set, in pages of 4 KiB.
    pub working_set: Option<WorkingSet>,
    /// How it is traced; without the time of the last period.
    pub trace: Option<TraceView>,
    /// That time, since boot.
    pub last_period: Option<Duration>,
    /// Rows of the heatmap since the last poll.
    pub heat: Vec<HeatRow>,
    /// Bytes of RAM that a cell of them covers.
    pub heat_cell_bytes: u64,
    /// Warnings for the operator.
    pub warning: Option<String>,
}

/// A host.
pub trait Host: Send {
    /// The configuration was read again.
    fn reconfigured(&mut self, _: &Config) {}

    /// Whether its VMs were looked for to the end, or are not expected to be; may wait a moment for that.
    fn has_discovered(&self) -> bool {
        true
    }

    /// The VMs that run now, and errors of discovery.
    fn vms(&mut self) -> (Vec<DiscoveredVm>, Vec<String>);

    /// Creates the actuator and the curve source of a VM.
    fn open(&mut self, found: &DiscoveredVm, rule: &VmRule, config: &Config) -> VmHandles;

    /// The control groups that are to be watched now.
    fn groups(&mut self) -> FoundGroups;

    /// Starts to observe a control group.
    fn open_group(&mut self, found: &DiscoveredGroup, config: &Config) -> Vec<Box<dyn Feed>>;

    /// All RAM of the host, and the part that the kernel could provide without swapping, in bytes.
    fn ram(&mut self) -> (u64, u64);

    /// Time that the host's tasks lost to a lack of memory; `None` if the kernel does not report it.
    fn pressure(&mut self) -> Option<MemoryPressure>;

    /// The same of a VM's threads; `None` if no control group of the VM alone reports it.
    fn pressure_of(&mut self, found: &DiscoveredVm) -> Option<MemoryPressure>;

    /// The limits of memory of the control groups in which a VM's process is.
    fn memory_limits_of(&mut self, found: &DiscoveredVm) -> Vec<GroupLimit>;

    /// The capacity of the shared page store in bytes, if there is one.
    fn store(&mut self) -> Option<Result<u64, ActuatorError>>;

    /// Changes the capacity of the shared page store.
    ///
    /// # Errors
    ///
    /// The reason why it keeps its old capacity, as far as is known.
    fn resize_store(&mut self, capacity_bytes: u64) -> Result<(), ActuatorError>;
}

/// A counter that rises with every miss of a VM, and the kind of misses that it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Misses {
    /// Misses since some time.
    pub count: u64,
    /// References that could have missed, if they are counted.
    pub of: Option<u64>,
    /// The kind of misses counted.
    pub by: &'static str,
}

impl Misses {
    /// Reads of disks as misses.
    const BY_QEMU: &str = "reads of its disks by QEMU's account";

    /// Whether counts like this one are not in every poll: libvirt is queried for them at longer intervals.
    pub fn is_rare(&self) -> bool {
        self.by == Self::BY_QEMU
    }

    /// Reads the counters from a poll of a VM's actuator: blocks read from storage where its disk is served by us, reads of
    /// the disks that QEMU serves (a miss of the page cache is no page fault if a program reads the file), else the guest's
    /// own report of pages that it had to read.
    pub fn of(status: &MemoryStatus) -> Option<Self> {
        if let Some(disk) = &status.disk {
            return Some(Self {
                count: disk.read_blocks.saturating_sub(disk.hits),
                of: Some(disk.read_blocks),
                by: "blocks read from storage",
            });
        }
        // A disk daemon that does not answer now counts again later.
        if status.cache.is_some() {
            return None;
        }
        // A VM without a disk, or that never read one, has its files elsewhere.
        if let Some(blocks) = status.blocks.filter(|blocks| blocks.reads > 0) {
            return Some(Self {
                count: blocks.reads,
                of: None,
                by: Self::BY_QEMU,
            });
        }
        let guest = status.guest.as_ref().filter(|guest| !guest.is_stale())?;
        Some(Self {
            count: guest.major_faults?,
            of: None,
            by: "major faults by the guest's account",
        })
    }
}
