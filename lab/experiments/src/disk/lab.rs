//! What the parts of the experiment share: guests, orders of visits, and the measured cost of a guest.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use plimsoll_disk::EngineStats;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_rig::{DiskGuest, GuestKernel, GuestOutput, Setup};
use plimsoll_serve::disk::admin::report;
use plimsoll_vm::ConsoleEvent;

/// Longest silence of a guest; emulated ones on a busy host are slow.
pub(super) const PATIENCE: Duration = Duration::from_secs(900);
/// How long a phase waits for our query of the daemon.
const PAUSE_MS: u64 = 2000;

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
    pub(super) measured: BTreeMap<String, Cost>,
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

fn measure(program: &Path, setup: &Setup) -> anyhow::Result<Cost> {
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

/// Reads that miss at each size of `curve`, without those of an earlier state of it.
fn counted_since(before: Option<&CurveJson>, curve: &CurveJson) -> Vec<(u64, f64)> {
    let misses = |curve: &CurveJson, size: u64| curve.miss_ratio(size) * curve.references as f64;
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
            misses: None,
        };
        CurveJson {
            schema: SCHEMA,
            vm: String::new(),
            page_bytes: 4096,
            references,
            baseline_pages: None,
            vcpu_seconds_per_second: None,
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
