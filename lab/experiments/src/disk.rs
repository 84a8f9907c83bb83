//! A VM's disk with the exclusive cache: is it worth as much as guest memory, and is all data read correct?
//!
//! Guests of ours run the signed workloads of guest/workload on disks of `plimsoll disk serve`. All figures are counts of
//! pages and of disk I/O, taken from the daemon between two phases of the workload: none is a time, so an emulated
//! guest and a busy host do no harm. A guest's memory is what its kernel has to give (MemTotal): RAM without the kernel
//! itself and its table of pages. The module is loaded in guests without a cache, too, so that its ring takes as much there.
//!
//! Source of the questions and of the yardstick: \[LS07\] §6 (docs/papers.md). What was found: docs/disk-measured.md.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use plimsoll_disk::EngineStats;
use plimsoll_rig::GuestKernel;
use plimsoll_serve::disk::admin::report;
use plimsoll_vm::ConsoleEvent;

use super::{disk_right, disk_sizes};
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_rig::{DiskGuest, Setup, Told, program};

/// Longest silence of a guest; emulated ones on a busy host are slow.
pub(super) const PATIENCE: Duration = Duration::from_secs(900);
/// How long a phase waits for us to ask the daemon.
const PAUSE_MS: u64 = 2000;

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
    /// Disk I/O per page requested, at several splits
    Io,
    /// Signed files, each page verified
    Signed,
    /// All kinds of file operations, with 1 and 2 CPUs
    Stress,
    /// Effect of leaving out each admission rule
    Ablations,
    /// Daemon and QEMU killed during delayed writes
    Crash,
}

/// A guest's kernel and its reclaim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// Linux 6.1, active and inactive lists
    #[value(name = "6.1")]
    Old,
    /// Linux 6.12, active and inactive lists
    #[value(name = "6.12")]
    Classic,
    /// Linux 6.12, multi-generational LRU
    #[value(name = "6.12-mglru")]
    Generations,
}

impl Kind {
    pub(super) fn kernel(self) -> GuestKernel {
        match self {
            Self::Old => GuestKernel::V6_1,
            Self::Classic | Self::Generations => GuestKernel::V6_12,
        }
    }

    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Old => "Linux 6.1, active and inactive lists",
            Self::Classic => "Linux 6.12, active and inactive lists (mglru=0)",
            Self::Generations => "Linux 6.12, generations (mglru=1)",
        }
    }

    /// Word of the workload that makes it so; 6.1 of Debian has the lists by default.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Old | Self::Classic => "mglru=0",
            Self::Generations => "mglru=1",
        }
    }
}

/// Order in which files are visited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Order {
    /// Sequential, repeated
    Sequential,
    /// Uniformly random
    Random,
    /// By Zipf's law with exponent 1
    Zipf,
    /// A tenth of the files ten times as popular as the others
    Class,
}

impl Order {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Sequential => "sequential",
            Self::Random => "random",
            Self::Zipf => "zipf",
            Self::Class => "class",
        }
    }
}

/// State shared by the parts: options, output, and finished measurements.
pub(super) struct Lab<'a> {
    pub(super) out: &'a mut dyn Write,
    pub(super) program: PathBuf,
    pub(super) guests: Vec<Kind>,
    pub(super) orders: Vec<Order>,
    pub(super) rounds: u32,
    measured: BTreeMap<String, Cost>,
}

/// What the measured rounds of a guest cost, in pages.
#[derive(Debug, Clone, Default)]
pub(super) struct Cost {
    /// The guest's memory, as its kernel counts it.
    pub(super) memory: u64,
    /// Pages its programs read and wrote.
    pub(super) asked: u64,
    /// Pages read that the guest did not hold.
    pub(super) missed: u64,
    /// Of them, not in the cache either.
    pub(super) disk_reads: u64,
    /// Pages read from and written to storage.
    pub(super) storage: u64,
    /// Reads that would miss, by size of guest and cache together.
    curve: Vec<(u64, f64)>,
}

impl Cost {
    /// Pages from disk that the curve expects of a guest with `memory` pages; between two of the curve's points
    /// on the line through them.
    pub(super) fn expected(&self, memory: u64) -> Option<f64> {
        let after = self.curve.partition_point(|(size, _)| *size <= memory);
        let (size, reads) = *self.curve.get(after.checked_sub(1)?)?;
        let Some((next, fewer)) = self.curve.get(after) else {
            return Some(reads);
        };
        let share = (memory - size) as f64 / (next - size) as f64;
        Some(reads + (fewer - reads) * share)
    }
}

/// Runs the requested parts.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let or_all = |part| args.only.is_empty() || args.only.contains(&part);
    let mut lab = Lab {
        out,
        program: program("plimsoll")?,
        guests: given_or_all(&args.guest),
        orders: given_or_all(&args.order),
        rounds: args.rounds,
        measured: BTreeMap::new(),
    };
    writeln!(
        lab.out,
        "Guests are emulated (TCG) unless this host has KVM; all figures are counts.\n"
    )?;
    if or_all(Part::Prediction) {
        disk_sizes::prediction(&mut lab)?;
    }
    if or_all(Part::Lru) {
        disk_sizes::lru(&mut lab)?;
    }
    if or_all(Part::Io) {
        disk_sizes::io(&mut lab)?;
    }
    if or_all(Part::Signed) {
        disk_right::signed(&mut lab)?;
    }
    if or_all(Part::Stress) {
        disk_right::stress(&mut lab, args.stress_rounds)?;
    }
    if or_all(Part::Ablations) {
        disk_right::ablations(&mut lab)?;
    }
    if or_all(Part::Crash) {
        disk_right::crash(&mut lab, args.kills)?;
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

impl Lab<'_> {
    /// Runs a guest of signed files to its end and returns the cost of its measured rounds; for a repeated configuration, immediately.
    ///
    /// # Errors
    /// If it did not run to its end, or anything it read was wrong.
    pub(super) fn measure(&mut self, setup: &Setup) -> anyhow::Result<Cost> {
        let key = format!("{setup:?}");
        if let Some(cost) = self.measured.get(&key) {
            return Ok(cost.clone());
        }
        let mut setup = setup.clone();
        setup.workload += &format!(" pause_ms={PAUSE_MS} rounds={}", self.rounds);
        let cost = measure(&self.program, &setup)
            .with_context(|| format!("{} MiB, {:?}", setup.memory_mib, setup.serve))?;
        self.measured.insert(key, cost.clone());
        Ok(cost)
    }
}

fn measure(program: &std::path::Path, setup: &Setup) -> anyhow::Result<Cost> {
    let mut guest = DiskGuest::start(program, setup)?;
    let at_phase = |guest: &mut DiskGuest, wanted: &str| {
        guest.listen(
            PATIENCE,
            |event| matches!(event, ConsoleEvent::Phase { name, .. } if name == wanted),
        )?;
        report(&guest.admin(), true)
    };
    let before = at_phase(&mut guest, "measured")?;
    let after = at_phase(&mut guest, "end")?;
    let told = guest.finish(PATIENCE)?;
    guest.check_image()?;
    ensure_right(&told, &after.machine.engine)?;
    let of_files = |key| told.number("files", Some("measured"), key);
    let (was, is) = (&before.machine.engine, &after.machine.engine);
    let missed = (is.read_blocks + is.read_parts) - (was.read_blocks + was.read_parts);
    let bytes = |of: &EngineStats| of.storage_read_bytes + of.storage_written_bytes;
    Ok(Cost {
        memory: told.number("machine", None, "memory_kib")? / 4,
        asked: of_files("reads")? + of_files("writes")?,
        missed,
        disk_reads: missed - (is.hits - was.hits),
        storage: (bytes(is) - bytes(was)) / 4096,
        curve: after
            .curve
            .map(|curve| counted_since(before.curve.as_ref(), &curve))
            .unwrap_or_default(),
    })
}

/// Fails unless nothing was read wrong and the guest's kernel had nothing to complain of.
pub(super) fn ensure_right(told: &Told, engine: &EngineStats) -> anyhow::Result<()> {
    ensure!(
        told.mismatches == Some(0) && engine.wrong_served == 0,
        "the guest found {:?} wrong blocks, {} pages were served wrong",
        told.mismatches,
        engine.wrong_served
    );
    ensure!(
        engine.disabled.is_none(),
        "the cache switched itself off: {:?}",
        engine.disabled
    );
    let complaints = told.number("kernel", None, "complaints")?;
    ensure!(
        complaints == 0,
        "the guest's kernel complains: {:?}",
        told.kernel
    );
    Ok(())
}

/// Reads that miss at each size of `curve`, without those of an earlier state of it.
fn counted_since(before: Option<&CurveJson>, curve: &CurveJson) -> Vec<(u64, f64)> {
    let misses = |curve: &CurveJson, size: u64| {
        let after = curve
            .points
            .partition_point(|point| point.size_pages <= size);
        let at = after.checked_sub(1).and_then(|at| curve.points.get(at));
        at.map_or(1.0, |point| point.miss_ratio) * curve.references as f64
    };
    let sizes = curve.points.iter().map(|point| point.size_pages);
    sizes
        .map(|size| {
            let earlier = before.map_or(0.0, |before| misses(before, size));
            (size, misses(curve, size) - earlier)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_protocol::curve_json::{PointJson, SCHEMA};

    fn curve(references: u64, points: &[(u64, f64)]) -> CurveJson {
        let point = |&(size_pages, miss_ratio): &(u64, f64)| PointJson {
            size_pages,
            miss_ratio,
            low: miss_ratio,
            high: miss_ratio,
        };
        CurveJson {
            schema: SCHEMA,
            vm: String::new(),
            page_bytes: 4096,
            references,
            baseline_pages: None,
            points: points.iter().map(point).collect(),
        }
    }

    #[test]
    fn what_was_counted_before_is_taken_off_at_each_size() {
        let before = curve(100, &[(10, 1.0), (30, 0.5)]);
        let after = curve(300, &[(10, 1.0), (20, 0.8), (30, 0.5)]);
        let counted = counted_since(Some(&before), &after);
        assert_eq!(counted, [(10, 200.0), (20, 140.0), (30, 100.0)]);
        let cost = Cost {
            curve: counted,
            ..Cost::default()
        };
        let expected = [9, 10, 15, 29, 30, 99].map(|memory| cost.expected(memory));
        let known = [200.0, 170.0, 104.0, 100.0, 100.0].map(Some);
        assert_eq!(expected[0], None);
        assert_eq!(expected[1..], known);
    }
}
