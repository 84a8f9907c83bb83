//! What the parts of the experiment share: guests, orders of visits, and the measured cost of a guest.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use plimsoll_disk::EngineStats;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_rig::{DiskGuest, GuestKernel, GuestOutput, Setup, cpu_time};
use plimsoll_serve::disk::admin::{Request, ask, report};
use plimsoll_vm::ConsoleEvent;
use serde::{Deserialize, Serialize};

/// Longest silence of a guest; emulated ones on a busy host are slow.
pub(super) const PATIENCE: Duration = Duration::from_secs(900);
/// How long a phase waits for our query of the daemon.
const PAUSE_MS: u64 = 2000;
/// By how much a cache grows when the measured rounds begin.
pub(super) const GROWTH_BYTES: u64 = 1 << 20;

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
    /// Shares of visits that write, in percent; empty: the default.
    pub(super) writes: Vec<u64>,
    pub(super) rounds: u32,
    pub(super) measured: BTreeMap<String, Cost>,
}

/// What the measured rounds of a guest cost, in pages.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Cost {
    /// The guest's memory, as its kernel counts it.
    pub(super) memory: u64,
    /// Pages its programs read and wrote.
    pub(super) asked: u64,
    /// Pages read that the guest did not hold.
    pub(super) missed: u64,
    /// Of them, not in the cache either.
    pub(super) disk_reads: u64,
    /// Pages that the guest evicted since it began and the cache did not take: refused, or without a slot of the ring.
    #[serde(default)]
    pub(super) lost: u64,
    /// Pages read from and written to storage.
    pub(super) storage: u64,
    /// Files its programs read or wrote, the requests of \[LS07\].
    pub(super) visits: u64,
    /// Reads and writes of storage.
    pub(super) operations: u64,
    /// CPU time of the disk daemon in µs: a process of the host, which is not emulated.
    pub(super) daemon_us: u64,
    /// Share of the reads that would miss, by size of guest and cache together.
    #[serde(skip)]
    pub(super) curve: Option<CurveJson>,
}

/// Pages from disk that a curve expects of a guest of another size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expectation {
    pub(super) expected: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Cost {
    /// What the curve expects of a guest with `memory` pages; between two of the curve's points on the line through
    /// them.
    pub(super) fn expected(&self, memory: u64) -> Option<Expectation> {
        let curve = self.curve.as_ref()?;
        let points = &curve.points;
        let after = points.partition_point(|point| point.size_pages <= memory);
        let point = points.get(after.checked_sub(1)?)?;
        let next = points.get(after).unwrap_or(point);
        let share =
            (memory - point.size_pages) as f64 / (next.size_pages - point.size_pages).max(1) as f64;
        let ratio = point.miss_ratio + (next.miss_ratio - point.miss_ratio) * share;
        let reads = |share: f64| share * curve.references as f64;
        Some(Expectation {
            expected: reads(ratio),
            low: reads(point.low),
            high: reads(point.high),
        })
    }
}

impl Lab<'_> {
    /// The shares of visits that write.
    pub(super) fn writes_or(&self, default: &[u64]) -> Vec<u64> {
        match &self.writes[..] {
            [] => default.to_vec(),
            given => given.to_vec(),
        }
    }

    /// As [`measure`]; for a repeated configuration, immediately.
    pub(super) fn measure(&mut self, setup: &Setup) -> anyhow::Result<Cost> {
        let key = format!("{setup:?}");
        if let Some(cost) = self.measured.get(&key) {
            return Ok(cost.clone());
        }
        let mut setup = setup.clone();
        setup.workload += &format!(" rounds={}", self.rounds);
        let cost = measure(&self.program, &setup)
            .with_context(|| format!("{} MiB, {:?}", setup.memory_mib, setup.serve))?;
        self.measured.insert(key, cost.clone());
        Ok(cost)
    }
}

/// Runs a guest whose workload says its phases to its end and returns the cost of its measured rounds.
///
/// # Errors
/// If it did not run to its end, or anything it read was wrong.
pub(super) fn measure(program: &Path, setup: &Setup) -> anyhow::Result<Cost> {
    let mut setup = setup.clone();
    setup.workload += &format!(" pause_ms={PAUSE_MS}");
    let mut guest = DiskGuest::start(program, &setup)?;
    let at_phase = |guest: &mut DiskGuest, wanted: &str| {
        guest.listen(
            PATIENCE,
            |event| matches!(event, ConsoleEvent::Phase { name, .. } if name == wanted),
        )
    };
    at_phase(&mut guest, "measured")?;
    let before = report(&guest.admin(), true)?;
    // A list that becomes longer restarts its counts.
    let cache_bytes = before.machine.engine.cache_bytes;
    if cache_bytes > 0 {
        let cache_bytes = cache_bytes + GROWTH_BYTES;
        ask::<()>(&guest.admin(), Request::Resize { cache_bytes })?;
    }
    // Without the reports, which are not the guest's requests.
    let daemon_before = cpu_time(guest.daemon_pid())?;
    at_phase(&mut guest, "end")?;
    let daemon_time = cpu_time(guest.daemon_pid())? - daemon_before;
    let after = report(&guest.admin(), true)?;
    let told = guest.finish(PATIENCE)?;
    guest.check_image()?;
    ensure_right(&told, &after.machine.engine)?;
    let of_files = |key| told.number("files", Some("measured"), key);
    let (was, is) = (&before.machine.engine, &after.machine.engine);
    let missed = (is.read_blocks + is.read_parts) - (was.read_blocks + was.read_parts);
    let bytes = |of: &EngineStats| of.storage_read_bytes + of.storage_written_bytes;
    let operations = |of: &EngineStats| of.storage_reads + of.storage_writes;
    Ok(Cost {
        memory: told.number("machine", None, "memory_kib")? / 4,
        asked: of_files("reads")? + of_files("writes")?,
        missed,
        disk_reads: missed - (is.hits - was.hits),
        lost: is.evictions - is.admitted + told.number("plimsoll", None, "no_slot").unwrap_or(0),
        storage: (bytes(is) - bytes(was)) / 4096,
        visits: of_files("visits")?,
        operations: operations(is) - operations(was),
        daemon_us: u64::try_from(daemon_time.as_micros())?,
        curve: after.curve,
    })
}

/// Fails unless nothing was read wrong and the guest's kernel printed no complaint.
pub(super) fn ensure_right(told: &GuestOutput, engine: &EngineStats) -> anyhow::Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, PageSize};

    #[test]
    fn between_two_points_reads_are_expected_on_the_line() {
        let points = [(10, 1.0), (20, 0.8), (30, 0.5)];
        let points = points.map(|(size, ratio)| CurvePoint::exact(PageCount(size), ratio));
        let curve = MissRatioCurve::new(points.to_vec(), 200).unwrap();
        let cost = Cost {
            curve: Some(CurveJson::new("vm", PageSize::FOUR_KIB, None, &curve)),
            ..Cost::default()
        };
        let expected = |memory| cost.expected(memory).map(|at| at.expected);
        assert_eq!(expected(9), None);
        let known = [200.0, 180.0, 160.0, 100.0, 100.0].map(Some);
        assert_eq!([10, 15, 20, 30, 99].map(expected), known);
        assert_eq!(cost.expected(15).map(|at| at.low), Some(200.0));
    }
}
