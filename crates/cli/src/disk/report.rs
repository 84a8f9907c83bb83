//! What a daemon says of a VM's disks, schema 1: what `disk stat -o json` writes.

use std::path::PathBuf;

use plimsoll_disk::MachineStats;
use plimsoll_flow::{PageCount, PageSize};
use serde::{Deserialize, Serialize};

use super::ghosts::{Prediction, cache_pages};
use crate::curve_json::{CurveJson, SCHEMA};

/// A VM's disks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the VM.
    pub vm: String,
    /// Disks, cache, ring.
    pub machine: MachineStats,
    /// What other sizes would bring; `null` with `--ghost 0`.
    pub ghosts: Option<GhostsReport>,
    /// Where references are recorded, if they are.
    pub record: Option<RecordReport>,
    /// Share of reads that miss at each size of guest memory and cache together; there if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub curve: Option<CurveJson>,
}

/// What other sizes would bring.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GhostsReport {
    /// Memory of the guest; `null` if nobody knows: sizes of the curve are then those behind it.
    pub direct_pages: Option<u64>,
    /// The curve ends so far above it.
    pub reach_pages: u64,
    /// Pages from one point of the curve to the next.
    pub segment_pages: u64,
    /// Memory of the daemon that it takes.
    pub memory_bytes: u64,
    /// Whole blocks read since the curve's counts began.
    pub reads: u64,
    /// Of them, served from the cache.
    pub hits: u64,
    /// What caches of other sizes would bring, rising; `null` if that is not known (yet).
    pub expected: Option<Vec<Expected>>,
}

/// What a cache of another size would bring.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Expected {
    /// Its size.
    pub cache_pages: u64,
    /// Share of reads that it would serve.
    pub hit_ratio: f64,
}

/// Where references are recorded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordReport {
    /// The trace.
    pub trace: PathBuf,
    /// References that could not be written as fast as they came, or at all.
    pub lost: u64,
}

impl Report {
    /// Gathers what there is to say, without the curve.
    #[must_use]
    pub fn new(
        vm: &str,
        machine: MachineStats,
        prediction: Option<&Prediction>,
        record: Option<RecordReport>,
    ) -> Self {
        let cache = cache_pages(&machine);
        let ghosts = prediction.map(|told| GhostsReport {
            direct_pages: told.direct.map(|pages| pages.0),
            reach_pages: told.reach.0,
            segment_pages: told.segment.0,
            memory_bytes: told.memory_bytes,
            reads: told.counted.0,
            hits: told.counted.1,
            expected: told.at_sizes(cache).map(|sizes| {
                let expected = sizes.into_iter().map(|at| Expected {
                    cache_pages: at.cache.0,
                    hit_ratio: at.hit_ratio,
                });
                expected.collect()
            }),
        });
        Self {
            schema: SCHEMA,
            vm: vm.to_owned(),
            machine,
            ghosts,
            record,
            curve: None,
        }
    }
}

/// The curve of a VM with what it has now, guest memory and cache, as its baseline.
#[must_use]
pub fn curve(vm: &str, machine: &MachineStats, told: &Prediction) -> Option<CurveJson> {
    let direct = told.direct.unwrap_or_default().0;
    let now = PageCount(direct.saturating_add(cache_pages(machine).0));
    let curve = told.curve.as_ref()?;
    Some(CurveJson::new(vm, PageSize::FOUR_KIB, Some(now), curve))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use plimsoll_disk::{
        CacheMode, DiskStats, EngineStats, RingStats, SecondChanceStats, WriteMode,
    };

    /// A VM with a busy disk and an idle one, and of an awkward name.
    pub fn example() -> Report {
        let disk = DiskStats {
            image: "/var/lib/images/web.raw".to_owned(),
            socket: "/run/plimsoll/web/disk0.sock".to_owned(),
            size_bytes: 8 << 30,
            connected: true,
            direct_io: true,
            queues: 2,
            requests: 2_345_678,
            in_flight: 3,
            connections: 1,
            ..DiskStats::default()
        };
        let idle = DiskStats {
            image: "/srv/a \"name\"\\\n\u{1b}[2J that is long, and longer.iso".to_owned(),
            size_bytes: 700 << 20,
            read_only: true,
            bad_requests: 2,
            ..DiskStats::default()
        };
        let machine = MachineStats {
            uptime_seconds: 7200.0,
            engine: EngineStats {
                mode: CacheMode::Exclusive,
                write: WriteMode::Delayed,
                cache_bytes: 64 << 20,
                cached_pages: 16_000,
                dirty_pages: 120,
                dirty_pages_max: 4096,
                mapped_frames: 40_000,
                read_blocks: 1_000_000,
                hits: 750_000,
                scattered_blocks: 7,
                read_parts: 12,
                written_blocks: 40_000,
                delayed_blocks: 40_000,
                written_back_blocks: 39_880,
                flushes: 300,
                storage_reads: 30_000,
                storage_read_bytes: 1 << 30,
                storage_writes: 9_000,
                storage_written_bytes: 150 << 20,
                evictions: 900_000,
                admitted: 899_000,
                refused_unknown: 900,
                refused_stale: 100,
                releases: 4_000,
                additions: 1_000_000,
                migrations: 55,
                dropped: 133_000,
                ..EngineStats::default()
            },
            disks: vec![disk, idle],
            ring: RingStats {
                attached: true,
                records: 1_904_055,
                guest_memory_pages: 49_152,
                ..RingStats::default()
            },
            second_chance: SecondChanceStats::default(),
        };
        let mut report = Report::new("web", machine, None, None);
        let at = |cache_pages, hit_ratio| Expected {
            cache_pages,
            hit_ratio,
        };
        report.ghosts = Some(GhostsReport {
            direct_pages: Some(49_152),
            reach_pages: 81_920,
            segment_pages: 1024,
            memory_bytes: 4 << 20,
            reads: 990_000,
            hits: 742_000,
            expected: Some(vec![at(8192, 0.4), at(16_384, 0.75), at(32_768, 0.9)]),
        });
        report
    }

    #[test]
    fn json_survives_being_written_and_read() {
        let report = example();
        let text = serde_json::to_string(&report).unwrap();
        let begin = r#"{"schema":1,"vm":"web","machine":{"uptime_seconds":7200.0,"engine":{"mode":"exclusive","write":"delayed","#;
        assert!(text.starts_with(begin), "{text}");
        assert!(!text.contains("\"curve\""));
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    }
}
