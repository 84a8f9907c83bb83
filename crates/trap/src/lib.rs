//! A source: the references of a running VM's RAM, by traps set from outside.
//!
//! [`Tracer::attach`] takes a userfaultfd on the address space of an unmodified QEMU whose
//! guest RAM is shared memory, and [`Tracer::run_period`] makes a sample of the RAM's pages inaccessible,
//! records the accesses that trap, and lets them go on. Nothing is left in the VM's
//! process: detaching, or the death of the tracer, gives the RAM back to the kernel.
//!
//! Source: \[AET\] §3 and, for the hot set, Zhao et al. 2009 (docs/papers.md). Departs from
//! it in the trap (userfaultfd on the host instead of reserved page-table bits in the
//! hypervisor), in the sample (one group of pages in each stratum, `sample.rs`), and
//! in the time budget that closes a period's window (`tracer.rs`).
//!
//! Cost: a trap takes 10 to 60 µs from the VM; [`measure_trap_cost`] says how much here.
//!
//! Not here: estimating curves, finding VMs, printing.

mod barrier;
mod error;
mod hot_set;
mod inject;
mod placement;
mod ram;
mod rate;
mod sample;
mod sys;
mod target;
mod tracer;
mod trial;
mod userfault;

pub use barrier::{PageBarrier, RANGES_MAX, RemotePageout};
pub use error::TrapError;
pub use placement::HandlerCpu;
pub use rate::{PeriodCost, RateControl, RateRule, SCALE_MAX};
pub use sys::AddressRange;
pub use target::TraceTarget;
pub use tracer::{Losses, PeriodReport, Sink, TraceConfig, Tracer};
pub use trial::{TrapCost, measure_trap_cost};
pub use userfault::{Fault, Userfault};
