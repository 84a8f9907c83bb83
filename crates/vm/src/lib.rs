//! Virtual machines of this host, and other processes and groups whose memory can be observed: discovery, description, QMP.
//!
//! - [`AllowedUsers`] determines which processes are VMs of this host; a [`PeerSocket`] is a socket at which only the
//!   right process may listen.
//! - [`Target`] is what can be observed: a VM, any other [`MemoryProcess`], or a control group ([`MemoryGroup`]).
//! - [`GroupListing`] finds the control groups that match a [`GroupPattern`]; a [`GroupName`] is a name for readers.
//! - [`QemuVm`] describes a running QEMU process according to `/proc`:
//!   name, guest-RAM mappings, virtual CPUs, monitor socket.
//! - [`Qmp`] is a client of a QEMU monitor; [`GuestStats`] is a guest's balloon statistics, [`BlockReads`] are the
//!   reads of its disks.
//! - [`Transfer`] is an operation of QEMU on a VM's whole memory, such as a migration.
//! - [`ConsoleEvent`] is a line that a guest of `guest/workload` writes on its console.
//! - [`HeldRam`] is why a host would not get what a balloon takes.
//! - [`MemoryPressure`] is the time that a host or a VM's [`ControlGroup`] lost to a lack of memory.
//! - [`HostKernel`] holds the kernel's release, switches and features.
//! - [`own_program`] is where this process's program can be started once more.
//! - [`detect`] determines whether KVM can run guests here.
//!
//! Command lines, maps, monitor and console bytes come from other processes, some of
//! them from inside guests: all parsers bound the memory they use, and none can panic.
//!
//! Not here: accessing a VM's memory (`trap`), changing its size (`actuator`), starting guests other than
//! [`BareGuest`] (`lab/rig`).
#![forbid(unsafe_code)]

mod accelerator;
mod agent;
mod bare_guest;
mod block_reads;
mod cgroup;
mod command_line;
mod console;
mod contents;
mod dying;
mod error;
mod group_list;
mod group_name;
mod guest_stats;
mod held_ram;
mod identity;
mod kernel;
mod maps;
mod meminfo;
mod own_program;
mod pressure;
mod process;
mod qmp;
mod target;
mod transfer;
mod vcpu_clock;

pub use accelerator::{Detection, KvmSupport, QEMU, detect, qemu_program};
pub use agent::GuestAgent;
pub use bare_guest::{BareGuest, BareGuestEvent};
pub use block_reads::BlockReads;
pub use cgroup::{
    CgroupMount, CgroupVersion, GroupLimit, MemoryGroup, memory_limits, parse_members,
};
pub use command_line::{
    BackendKind, BackendUsage, CommandLine, OptionValues, RamBackend, comma_words, escape_commas,
    parse_uuid, qemu_options,
};
pub use console::{ConsoleEvent, ConsoleLine, Stalls};
pub use dying::{LastSignal, dying_with_us};
pub use error::VmError;
pub use group_list::{GroupFault, GroupListing, GroupPattern, ListedGroup, find_group};
pub use group_name::{GroupName, escaped};
pub use guest_stats::{GuestStats, KernelMemory, StatsClock};
pub use held_ram::HeldRam;
pub use identity::{AllowedUsers, Listener, PeerSocket, ProcessId};
pub use kernel::{Cgroups, HostKernel};
pub use maps::{
    FileSystems, MapEntry, ProcessRam, RamState, guest_ram, parse_maps, process_ram, ram_state,
};
pub use meminfo::HostMemory;
pub use own_program::own_program;
pub use pressure::{ControlGroup, MemoryPressure};
pub use process::{MemoryProcess, QemuVm, Vcpu, find, qemu_pids, running, second_name};
pub use qmp::{Qmp, RunState, VmRam};
pub use target::Target;
pub use transfer::{Transfer, TransferWatch};
pub use vcpu_clock::VcpuClock;
