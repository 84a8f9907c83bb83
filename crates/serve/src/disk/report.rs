//! The report of a disk server, schema 1: what `disk stat -o json` prints.

use std::path::PathBuf;

use plimsoll_disk::{MachineStats, PAGE_BYTES};
use plimsoll_flow::PageCount;
use plimsoll_protocol::curve_json::{CurveJson, SCHEMA};
use serde::{Deserialize, Serialize};

/// A VM's disks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the VM.
    pub vm: String,
    /// Disks, cache, ring.
    pub machine: MachineStats,
    /// Hit ratios predicted for other sizes; `null` with `--ghost 0`.
    pub ghosts: Option<GhostsReport>,
    /// The trace being recorded.
    pub record: Option<RecordReport>,
    /// What became of pausing the VM while storage refuses its writes.
    #[serde(default)]
    pub pause: PauseReport,
    /// Share of reads that miss at each size of guest memory and cache together; present if it was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub curve: Option<CurveJson>,
}

/// Prediction of hit ratios at other sizes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GhostsReport {
    /// Memory of the guest; `null` if it is unknown: sizes of the curve are then those behind it.
    pub direct_pages: Option<u64>,
    /// Length of the curve beyond it.
    pub reach_pages: u64,
    /// Pages from one point of the curve to the next.
    pub segment_pages: u64,
    /// Memory that the prediction takes in the daemon.
    pub memory_bytes: u64,
    /// Whole blocks read since the curve's counts began.
    pub reads: u64,
    /// Blocks of `reads` served from the cache.
    pub hits: u64,
    /// Hit ratios of caches of other sizes, smallest first; `null` while too few blocks were read.
    pub expected: Option<Vec<HitPrediction>>,
    /// What the curve's band consists of.
    pub band: BandReport,
}

/// The parts of the curve's band at the present size of the cache, as shares of the reads, 0.0 to 1.0.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BandReport {
    /// Two standard errors of the counts.
    pub statistical: Option<f64>,
    /// What the order in which the guest's kernel replaces pages may change.
    pub replacement: Option<f64>,
    /// Reads of blocks that the guest held by all reports: their evictions were lost or refused.
    pub unreported: Option<f64>,
    /// Share of evictions out of the order in which blocks were read; 1.0 while too few were observed.
    pub out_of_order: f64,
    /// Why the band covers everything; `null` if it does not.
    pub why_unknown: Option<String>,
}

/// The hit ratio of a cache of another size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HitPrediction {
    /// Size of the cache, in whole segments.
    pub cache_pages: u64,
    /// Share of reads that it would serve, 0.0 to 1.0.
    pub hit_ratio: f64,
    /// Lower limit of its band.
    pub low: f64,
    /// Upper limit of its band.
    pub high: f64,
}

/// A trace being recorded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordReport {
    /// The trace.
    pub trace: PathBuf,
    /// References that were not recorded.
    pub lost: u64,
    /// Why the trace cannot be written, so that nothing of it is kept; `null` if it can.
    #[serde(default)]
    pub error: Option<String>,
}

/// The VM, which is to be paused while `machine.engine.wants_pause`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseReport {
    /// Whether the server has paused it.
    pub paused: bool,
    /// Why it could not be paused, or resumed; `null` if that did not fail.
    pub error: Option<String>,
}

impl Report {
    /// A report of what is served, with nothing that is optional but the prediction.
    pub fn new(vm: &str, machine: MachineStats, ghosts: Option<GhostsReport>) -> Self {
        Self {
            schema: SCHEMA,
            vm: vm.to_owned(),
            machine,
            ghosts,
            record: None,
            pause: PauseReport::default(),
            curve: None,
        }
    }
}

/// Pages that the cache may hold.
pub fn cache_pages(machine: &MachineStats) -> PageCount {
    PageCount(machine.engine.cache_bytes / PAGE_BYTES as u64)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use plimsoll_disk::{
        CacheMode, DiskStats, EngineStats, RingStats, VictimCacheStats, WriteMode,
    };
    use plimsoll_protocol::disk_admin;

    #[test]
    fn what_the_server_reports_is_what_the_daemon_reads() {
        let report = example();
        let text = serde_json::to_string(&report).unwrap();
        let read: disk_admin::DiskStat = serde_json::from_str(&text).unwrap();
        let MachineStats {
            engine,
            disks,
            ring,
            ..
        } = report.machine;
        let expected = disk_admin::DiskStat {
            direct_pages: ring.guest_memory_pages,
            cache_bytes: engine.cache_bytes,
            cached_pages: engine.cached_pages,
            disabled: engine.disabled,
            read_blocks: engine.read_blocks,
            hits: engine.hits,
            // Nobody uses the second disk.
            disks_used: false,
            read_wait_ns: Some(disks.iter().map(|disk| disk.read_wait_ns).sum()),
        };
        assert_eq!(read, expected);
        assert!(read.read_blocks > 0 && read.cache_bytes > 0);
    }

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
            waited_reads: 60_000,
            read_wait_ns: 30_000_000_000,
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
                control_used: Some(true),
                records: 1_904_055,
                guest_memory_pages: 49_152,
                ..RingStats::default()
            },
            victim_cache: VictimCacheStats::default(),
        };
        let mut report = Report::new("web", machine, None);
        let at = |cache_pages, hit_ratio| HitPrediction {
            cache_pages,
            hit_ratio,
            low: hit_ratio - 0.05,
            high: hit_ratio + 0.05,
        };
        report.ghosts = Some(GhostsReport {
            direct_pages: Some(49_152),
            reach_pages: 81_920,
            segment_pages: 1024,
            memory_bytes: 4 << 20,
            reads: 990_000,
            hits: 742_000,
            expected: Some(vec![at(8192, 0.4), at(16_384, 0.75), at(32_768, 0.9)]),
            band: BandReport {
                statistical: Some(0.01),
                replacement: Some(0.03),
                unreported: Some(0.0),
                out_of_order: 0.875,
                why_unknown: None,
            },
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

    #[test]
    fn what_a_later_version_reports_besides_is_ignored() {
        let report = example();
        let mut json = serde_json::to_value(&report).unwrap();
        let machine = &mut json["machine"];
        for place in ["/engine", "/disks/0", "/ring", "/second_chance", ""] {
            machine.pointer_mut(place).unwrap()["since_added"] = 1.into();
        }
        assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
    }
}
