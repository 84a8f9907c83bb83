//! A VM's disk with the exclusive cache: is it worth as much as guest memory, and is all data read correct?
//!
//! Guests of ours run the signed workloads of guest/workload on disks of `plimsoll disk serve`. All figures are counts
//! of pages and of disk I/O, taken from the daemon between two phases of the workload: none is a time, so an emulated
//! guest and a busy host do no harm. A guest's memory is what its kernel has to give (MemTotal): RAM without the kernel
//! itself and its table of pages. The module is loaded in guests without a cache, too, so that its ring takes as much
//! there.
//!
//! Source of the questions and of the yardstick: \[LS07\] §6 (docs/papers.md). Results: docs/disk-measured.md.

mod lab;
mod right;
pub mod services;
mod sizes;
pub mod splits;

use std::collections::BTreeMap;
use std::io::Write;

use clap::ValueEnum;
use plimsoll_rig::program;

use lab::{Kind, Lab, Order};

/// Run VMs on disks with an exclusive cache: measure hits and predictions, and verify all data read.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only this part; may be repeated [default: all]
    #[arg(long, value_enum, value_name = "NAME")]
    only: Vec<Part>,
    /// Only these guests; parts other than prediction, lru and stress use the first [default: all]
    #[arg(long, value_enum, value_name = "GUEST")]
    guest: Vec<Kind>,
    /// Only this order of visits [default: all]
    #[arg(long, value_enum, value_name = "ORDER")]
    order: Vec<Order>,
    /// Only this share of visits that write, in percent [default: 0 and 10]
    #[arg(long, value_name = "PERCENT")]
    writes: Vec<u64>,
    /// Measured rounds; a round has as many visits as there are files
    #[arg(long, default_value_t = 2)]
    rounds: u32,
    /// Rounds of the stress
    #[arg(long, default_value_t = 40)]
    stress_rounds: u32,
    /// Number of kills of the daemon, and of QEMU
    #[arg(long, default_value_t = 50)]
    kills: u32,
}

/// A part of the experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Compare the curve of a VM with 3/4 of its memory in the cache with VMs of other sizes without a cache
    Prediction,
    /// Compare guest X and cache Y with a guest of X + Y
    Lru,
    /// Signed files, each page verified
    Signed,
    /// All kinds of file operations, with 1 and 2 CPUs
    Stress,
    /// Effect of leaving out each admission rule
    Ablations,
    /// Daemon and QEMU killed during delayed writes
    Crash,
}

/// Runs the requested parts.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let or_all = |part| args.only.is_empty() || args.only.contains(&part);
    let mut lab = Lab {
        out,
        program: program("plimsoll")?,
        guests: given_or_all(&args.guest),
        orders: given_or_all(&args.order),
        writes: args.writes.clone(),
        rounds: args.rounds,
        measured: BTreeMap::new(),
    };
    writeln!(
        lab.out,
        "Guests are emulated (TCG) unless this host has KVM; all figures are counts.\n"
    )?;
    if or_all(Part::Prediction) {
        sizes::prediction(&mut lab)?;
    }
    if or_all(Part::Lru) {
        sizes::lru(&mut lab)?;
    }
    if or_all(Part::Signed) {
        right::signed(&mut lab)?;
    }
    if or_all(Part::Stress) {
        right::stress(&mut lab, args.stress_rounds)?;
    }
    if or_all(Part::Ablations) {
        right::ablations(&mut lab)?;
    }
    if or_all(Part::Crash) {
        right::crash(&mut lab, args.kills)?;
    }
    Ok(())
}

fn given_or_all<T: ValueEnum + Copy>(given: &[T]) -> Vec<T> {
    if given.is_empty() {
        T::value_variants().to_vec()
    } else {
        given.to_vec()
    }
}
