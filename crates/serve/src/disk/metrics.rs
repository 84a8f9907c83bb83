//! A [`Report`] as OpenMetrics text, for Prometheus and its kin.
//!
//! Names begin with `plimsoll_disk_`, are in base units, and end in `_total` where they count. All have the label
//! `vm`; what is a disk's has `disk` (its number) and `image`.

use std::fmt::Display;

use plimsoll_disk::{DiskStats, MachineStats, PAGE_BYTES};
use plimsoll_protocol::openmetrics::{Exposition, Kind, Labels};

use super::report::Report;

/// A family of the whole machine: name, help, value.
type MachineFamily = (&'static str, &'static str, fn(&MachineStats) -> u64);
/// A family with a sample for each disk.
type DiskFamily = (&'static str, &'static str, fn(&DiskStats) -> u64);

const GAUGES: [MachineFamily; 10] = [
    ("cache_limit_bytes", "Capacity of the cache.", |m| {
        m.engine.cache_bytes
    }),
    ("cached_bytes", "Pages in the cache.", |m| {
        m.engine.cached_pages * PAGE_BYTES as u64
    }),
    (
        "dirty_bytes",
        "Pages in the cache that are not on storage yet.",
        |m| m.engine.dirty_pages * PAGE_BYTES as u64,
    ),
    ("dirty_limit_bytes", "Limit of dirty_bytes.", |m| {
        m.engine.dirty_pages_max * PAGE_BYTES as u64
    }),
    (
        "cache_disabled",
        "Whether the cache switched itself off.",
        |m| m.engine.disabled.is_some().into(),
    ),
    (
        "mapped_frames",
        "Guest frames whose location on disk is known.",
        |m| m.engine.mapped_frames,
    ),
    (
        "notices_attached",
        "Whether a guest reports evictions.",
        |m| m.ring.attached.into(),
    ),
    (
        "guest_memory_bytes",
        "Memory of the guest as it reports it; 0 if it does not.",
        |m| m.ring.guest_memory_pages.saturating_mul(PAGE_BYTES as u64),
    ),
    (
        "hcache_available",
        "Whether a second-level cache is configured.",
        |m| m.victim_cache.available.into(),
    ),
    (
        "hcache_pools",
        "Open pools of the second-level cache.",
        |m| m.victim_cache.pools,
    ),
];

const COUNTERS: [MachineFamily; 41] = [
    ("read_blocks", "Whole blocks read.", |m| {
        m.engine.read_blocks
    }),
    ("hits", "Whole blocks served from the cache.", |m| {
        m.engine.hits
    }),
    (
        "scattered_blocks",
        "Whole blocks transferred to or from memory that is not one page; never cached.",
        |m| m.engine.scattered_blocks,
    ),
    ("read_parts", "Reads of less than a block.", |m| {
        m.engine.read_parts
    }),
    ("written_blocks", "Whole blocks written.", |m| {
        m.engine.written_blocks
    }),
    ("written_parts", "Writes of less than a block.", |m| {
        m.engine.written_parts
    }),
    (
        "delayed_blocks",
        "Blocks written into the cache only.",
        |m| m.engine.delayed_blocks,
    ),
    ("written_back_blocks", "Dirty blocks written back.", |m| {
        m.engine.written_back_blocks
    }),
    ("write_back_errors", "Write-backs that failed.", |m| {
        m.engine.write_back_errors
    }),
    ("flushes", "Completed flushes.", |m| m.engine.flushes),
    ("storage_reads", "Reads of storage.", |m| {
        m.engine.storage_reads
    }),
    ("storage_read_bytes", "Bytes read from storage.", |m| {
        m.engine.storage_read_bytes
    }),
    ("storage_writes", "Writes to storage.", |m| {
        m.engine.storage_writes
    }),
    ("storage_written_bytes", "Bytes written to storage.", |m| {
        m.engine.storage_written_bytes
    }),
    ("storage_errors", "Storage requests that failed.", |m| {
        m.engine.storage_errors
    }),
    ("evictions", "Evictions reported by the guest.", |m| {
        m.engine.evictions
    }),
    (
        "admitted",
        "Evicted pages that were admitted to the cache.",
        |m| m.engine.admitted,
    ),
    ("refused_unknown", "Not admitted: no location known.", |m| {
        m.engine.refused_unknown
    }),
    (
        "refused_not_newest",
        "Not admitted: another frame holds newer contents.",
        |m| m.engine.refused_not_newest,
    ),
    (
        "refused_mismatch",
        "Not admitted: the contents are not those of the last I/O.",
        |m| m.engine.refused_mismatch,
    ),
    (
        "refused_stale",
        "Not admitted: the frame had been used again.",
        |m| m.engine.refused_stale,
    ),
    ("refused_other", "Not admitted for other reasons.", |m| {
        m.engine.refused_other
    }),
    ("releases", "Releases reported by the guest.", |m| {
        m.engine.releases
    }),
    ("additions", "Additions reported by the guest.", |m| {
        m.engine.additions
    }),
    ("migrations", "Migrations reported by the guest.", |m| {
        m.engine.migrations
    }),
    (
        "forgotten",
        "Times that all known frames were dropped.",
        |m| m.engine.forgotten,
    ),
    (
        "dropped",
        "Pages dropped because the cache was full.",
        |m| m.engine.dropped,
    ),
    (
        "wrong_served",
        "With --verify: pages served that differed from storage.",
        |m| m.engine.wrong_served,
    ),
    ("notices", "Records received from the guest.", |m| {
        m.ring.records
    }),
    ("notices_lost", "Notifications that the guest lost.", |m| {
        m.ring.lost
    }),
    ("notices_bad", "Invalid records.", |m| m.ring.bad_records),
    (
        "notices_faults",
        "Times that the ring was invalid and was detached.",
        |m| m.ring.faults,
    ),
    (
        "hcache_puts",
        "Pages put into the second-level cache.",
        |m| m.victim_cache.puts,
    ),
    (
        "hcache_stored",
        "Pages that the second-level cache stored.",
        |m| m.victim_cache.stored,
    ),
    (
        "hcache_gets",
        "Pages requested from the second-level cache.",
        |m| m.victim_cache.gets,
    ),
    (
        "hcache_hits",
        "Pages that the second-level cache returned.",
        |m| m.victim_cache.hits,
    ),
    (
        "hcache_flushed_blocks",
        "Blocks flushed from the second-level cache.",
        |m| m.victim_cache.flushed_blocks,
    ),
    (
        "hcache_errors",
        "Operations of the second-level cache that failed.",
        |m| m.victim_cache.errors,
    ),
    ("requests", "Requests of all disks.", |m| {
        sum(m, |disk| disk.requests)
    }),
    (
        "resubmitted",
        "Requests of an earlier daemon or connection that were repeated.",
        |m| sum(m, |disk| disk.resubmitted),
    ),
    (
        "bad_requests",
        "Requests that were malformed or out of range.",
        |m| sum(m, |disk| disk.bad_requests),
    ),
];

const DISK_GAUGES: [DiskFamily; 5] = [
    ("image_size_bytes", "Size of the disk.", |d| d.size_bytes),
    ("image_connected", "Whether a guest is connected.", |d| {
        d.connected.into()
    }),
    ("image_read_only", "Whether the disk is read-only.", |d| {
        d.read_only.into()
    }),
    (
        "image_direct_io",
        "Whether I/O bypasses the host's page cache.",
        |d| d.direct_io.into(),
    ),
    ("image_in_flight", "Requests in flight.", |d| d.in_flight),
];

const DISK_COUNTERS: [DiskFamily; 4] = [
    ("image_requests", "Completed requests.", |d| d.requests),
    (
        "image_resubmitted",
        "Requests of an earlier daemon or connection that were repeated.",
        |d| d.resubmitted,
    ),
    (
        "image_bad_requests",
        "Requests that were malformed or out of range.",
        |d| d.bad_requests,
    ),
    ("image_connections", "Connections of a guest.", |d| {
        d.connections
    }),
];

fn sum(machine: &MachineStats, of: fn(&DiskStats) -> u64) -> u64 {
    machine.disks.iter().map(of).sum()
}

/// Writes the report as OpenMetrics text.
#[must_use]
pub fn text(report: &Report) -> String {
    let mut text = Exposition::new("plimsoll_disk_");
    let machine = &report.machine;
    let vm: (&str, &dyn Display) = ("vm", &report.vm);
    let uptime = ("uptime_seconds", "Time since the daemon's start.");
    text.single(Kind::Gauge, uptime, &[vm], machine.uptime_seconds);
    for (kind, families) in [(Kind::Gauge, &GAUGES[..]), (Kind::Counter, &COUNTERS[..])] {
        for &(name, help, value) in families {
            text.single(kind, (name, help), &[vm], value(machine));
        }
    }
    for (kind, families) in [
        (Kind::Gauge, &DISK_GAUGES[..]),
        (Kind::Counter, &DISK_COUNTERS[..]),
    ] {
        for &(name, help, value) in families {
            let mut family = text.family(kind, name, help);
            for (number, disk) in machine.disks.iter().enumerate() {
                let labels: Labels<'_> = &[vm, ("disk", &number), ("image", &disk.image)];
                family.sample(labels, value(disk));
            }
        }
    }
    let help = "Share of reads that a cache of that size would serve.";
    let mut family = text.family(Kind::Gauge, "expected_hit_ratio", help);
    let expected = report.ghosts.iter().flat_map(|ghosts| &ghosts.expected);
    for at in expected.flatten() {
        let bytes = at.cache_pages * PAGE_BYTES as u64;
        family.sample(&[vm, ("cache_bytes", &bytes)], at.hit_ratio);
    }
    if let Some(record) = &report.record {
        let lost = ("record_lost", "References that were not recorded.");
        text.single(Kind::Counter, lost, &[vm], record.lost);
    }
    text.finish()
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::example;
    use super::*;

    #[test]
    fn an_images_name_cannot_leave_its_label() {
        let text = text(&example());
        let line = "plimsoll_disk_image_bad_requests_total{vm=\"web\",disk=\"1\",image=\"/srv/a \\\"name\\\"\\\\\\n\u{1b}[2J that is long, and longer.iso\"} 2\n";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn every_family_is_there_with_its_samples() {
        let text = text(&example());
        assert!(text.matches("# TYPE ").count() > 55);
        assert!(text.contains("\nplimsoll_disk_cache_limit_bytes{vm=\"web\"} 67108864\n"));
        assert!(text.contains("\nplimsoll_disk_hits_total{vm=\"web\"} 750000\n"));
        let expected =
            "plimsoll_disk_expected_hit_ratio{vm=\"web\",cache_bytes=\"67108864\"} 0.75\n";
        assert!(text.contains(expected), "{text}");
        assert!(text.ends_with("\n# EOF\n"));
    }
}
