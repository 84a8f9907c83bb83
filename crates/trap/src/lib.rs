//! Backends that observe the RAM of a running VM from outside, and some the memory of any process or control group.
//!
//! | backend | observes | file |
//! |---|---|---|
//! | `trap` | each access to sampled pages, in order, by userfaultfd | `traps` |
//! | `scan` | which sampled pages were mapped again between two scans | `scans` |
//! | `write-scan` | which pages were written between two scans | `write_scan` |
//! | `sample` | which of a few random pages were touched in a period | `sampled_pages` |
//! | `first-touch` | the time to the next touch of random pages, by userfaultfd | `first_touch` |
//! | `rwp` | when sampled pages were first accessed after they were protected, by userfaultfd; kernels that do not exist yet | `rwp` |
//! | `idle` | when sampled pages were first touched after they were marked, by idle page tracking | `idle` |
//! | `damon` | how long ago sampled pages were last touched, by the kernel's data access monitor | `damon` |
//! | `page-cache` | each use of sampled pages of a control group's page cache, in order, by BPF programs | `page_cache` |
//!
//! Each is an implementation of [`Backend`], attached by its [`BackendRow`] to an unmodified QEMU.
//! Nothing is left in the VM's process: detaching, or the death of the tracer, gives the RAM back to the kernel.
//!
//! Source: \[AET\] §3 and, for the hot set, Zhao et al. 2009 (docs/papers.md). Departs from
//! it in the trap (userfaultfd on the host instead of reserved page-table bits in the
//! hypervisor), in the sample (one group of pages in each stratum, `sample.rs`), and
//! in the time budget that closes a period's window (`traps`).
//!
//! Cost: a trap takes 10 to 60 µs from the VM, a minor fault a tenth of that; [`measure_trap_cost`] and
//! [`measure_fault_cost`] measure both here.
//!
//! Not here: estimating curves, finding VMs, printing.

mod account;
mod assess;
mod backend;
mod barrier;
mod choice;
mod claim;
mod config;
mod damon;
mod debt;
mod error;
mod first_touch;
mod frames;
mod frozen;
mod hot_set;
mod idle;
mod inject;
mod kdamond;
mod marks;
mod page_cache;
mod placement;
mod process;
mod progress;
mod ram;
mod rate;
mod refusal;
mod registers;
mod registry;
mod replay;
mod requirement;
mod rwp;
mod sample;
mod sampled_pages;
mod scans;
mod seccomp;
mod stopped;
mod swap;
mod sys;
mod target;
mod target_pages;
mod traps;
mod trial;
pub mod uffd;
mod unmapping;
#[cfg(target_arch = "x86_64")]
mod vcpu;
#[cfg(not(target_arch = "x86_64"))]
#[path = "no_vcpu.rs"]
mod vcpu;
mod watchdog;
mod write_scan;

pub use assess::{Assessment, assess, assess_group};
pub use backend::{Backend, BackendRow, GroupSupport, Observation, Scan, Sink, Yield};
pub use choice::{
    BackendSetting, CURVE_ERROR, Candidate, Choice, CurveCost, Verdict, why_unobserved,
};
pub use config::TraceConfig;
pub use error::TrapError;
pub use first_touch::{ComputedSampler, ComputedVm, PageClass};
pub use frames::parse_iomem;
pub use inject::assess_injection;
pub use kdamond::damon_thread;
pub use placement::HandlerCpu;
pub use rate::{PeriodCost, RateControl, RateRule, SCALE_MAX};
pub use refusal::Refusal;
pub use registry::BACKENDS;
pub use replay::ReplayedVm;
pub use target::{GroupTarget, TraceTarget};
pub use trial::{TouchCost, Toucher, TrapCost, measure_fault_cost, measure_trap_cost};
pub use watchdog::stay_ready;
