//! A source: the references of a running VM's RAM, by traps set from outside or by looking now and then.
//!
//! [`Tracer::attach`] takes a userfaultfd on the address space of an unmodified QEMU whose
//! guest RAM is shared memory, and [`Tracer::run_period`] makes a sample of the RAM's pages inaccessible,
//! records the accesses that trap, and lets them go on. Nothing is left in the VM's
//! process: detaching, or the death of the tracer, gives the RAM back to the kernel.
//!
//! Source: \[AET\] §3 and, for the hot set, Zhao et al. 2009 (docs/papers.md). Departs from
//! it in the trap (userfaultfd on the host instead of reserved page-table bits in the
//! hypervisor), in the sample (one group of pages from each stratum, `sample.rs`), and
//! in the time budget that closes a period's window (`tracer.rs`).
//!
//! Three more ways of looking need no trap. [`PresenceScanner`] makes sampled pages absent and asks later which
//! came back: cheaper by far, but what lies between two looks has no order. [`SampledPages`] does so
//! once, with random pages, as ESX does. [`WriteScanner`] lists exactly the pages written between two scans.
//!
//! Cost: a trap takes 10 to 60 µs from the VM; [`measure_trap_cost`] says how much here.
//!
//! Not here: estimating curves, finding VMs, printing.

mod absent;
mod barrier;
mod error;
mod hot_set;
mod inject;
mod placement;
mod ram;
mod rate;
mod sample;
mod sampled_pages;
mod scan;
mod scan_control;
mod sys;
mod target;
mod tracer;
mod trial;
mod userfault;
mod write_scan;

pub use barrier::{PageBarrier, RANGES_MAX, RemotePageout};
pub use error::TrapError;
pub use placement::HandlerCpu;
pub use rate::{PeriodCost, RateControl, RateRule, SCALE_MAX};
pub use sampled_pages::{SampledPages, SampledTouches};
pub use scan::{PresenceScanner, SCANS_WANTED, Scan, ScanConfig, ScanSink};
pub use sys::AddressRange;
pub use target::TraceTarget;
pub use tracer::{Sink, TraceConfig, Tracer};
pub use trial::{TrapCost, measure_fault_cost, measure_trap_cost};
pub use userfault::{Fault, Userfault};
pub use write_scan::{WriteScan, WriteScanner};
