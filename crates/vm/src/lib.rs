//! Virtual machines of this host: discovery, description, QMP.
//!
//! - [`QemuVm`] describes a running QEMU process according to `/proc`:
//!   name, guest-RAM mappings, virtual CPUs, monitor socket.
//! - [`Qmp`] is a client of a QEMU monitor; [`GuestStats`] is a guest's balloon statistics.
//! - [`Guest`] starts a VM that runs one of our workloads on memory or disks, from a
//!   [`GuestImage`], and hears what it tells on its console ([`ConsoleEvent`]).
//! - [`detect`] says whether KVM really runs guests here.
//!
//! Command lines, maps, monitor and console bytes come from other processes, some of
//! them from inside guests: all parsers bound what they keep and none can panic.
//!
//! Not here: touching a VM's memory (`trap`) or changing its size (`actuator`).
#![forbid(unsafe_code)]

mod accelerator;
mod agent;
mod command_line;
mod console;
mod cpio;
mod error;
mod guest;
mod guest_stats;
mod image;
mod maps;
mod process;
mod qmp;

pub use accelerator::{Accelerator, Detection, detect};
pub use agent::GuestAgent;
pub use command_line::{BackendKind, CommandLine, RamBackend, comma_words};
pub use console::{ConsoleEvent, ConsoleLine};
pub use cpio::initrd;
pub use error::VmError;
pub use guest::{AcceleratorChoice, DiskBackend, Guest, GuestConfig, GuestDisk, GuestKernel, QEMU};
pub use guest_stats::{GuestStats, KernelMemory};
pub use image::GuestImage;
pub use maps::{FileSystems, MapEntry, RamState, guest_ram, parse_maps, ram_state};
pub use process::{QemuVm, Vcpu, find, qemu_pids, running};
pub use qmp::{BlockStats, Qmp, QmpEvent, RunState};
