//! Starts guests, daemons and servers for tests, experiments and benchmarks, and waits for them with deadlines.
//!
//! | module | starts |
//! |---|---|
//! | `guest` | [`Guest`]: a VM that boots one of our workloads from a [`GuestImage`] |
//! | `subject` | [`Subject`]: a guest with the log of its console |
//! | `programs` | [`ProgramGuest`]: a guest that runs a real program again and again |
//! | `traces` | nothing: the state that a tracer must leave unchanged |
//! | `disk_guest` | [`DiskGuest`]: images, a disk daemon, and a guest on its disks |
//! | `server` | [`Server`]: any daemon of ours, with its log |
//! | `wait` | nothing: polls with a deadline |
//! | `host` | nothing: the requirements of tests with guests on a host |
//!
//! Not here: finding and describing VMs (`plimsoll-vm`), anything that users install.
#![forbid(unsafe_code)]

mod disk_guest;
mod error;
mod guest;
pub mod host;
mod image;
mod programs;
mod server;
mod subject;
mod traces;
mod wait;

pub use disk_guest::{DiskGuest, Fields, GuestOutput, Setup, make_image, make_tools_image};
pub use error::GuestError;
pub use guest::{AcceleratorChoice, Boot, DiskBackend, Guest, GuestConfig, GuestDisk, GuestKernel};
pub use host::median;
pub use image::{GuestImage, ProgramsImage};
/// The firmware image of a guest without an operating system ([`Boot::Bare`]), for QEMU's `-bios`.
pub use plimsoll_kvm_guest::IMAGE as BARE_GUEST_IMAGE;
pub use programs::{JOBS, ProgramGuest};
pub use server::{Server, cpu_time, has_ended, program, send};
pub use subject::{ConsoleLog, PATIENCE, Round, Subject};
pub use traces::Footprint;
pub use wait::{POLL, try_wait_for, wait_for};
