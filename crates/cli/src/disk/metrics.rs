//! A [`Report`] as OpenMetrics text, for Prometheus and its kin.
//!
//! Names begin with `plimsoll_disk_`, are in base units, and end in `_total` where they count. All have the label
//! `vm`; what is a disk's has `disk` (its number) and `image`.

use std::fmt::{self, Write};

use plimsoll_disk::{DiskStats, MachineStats, PAGE_BYTES};

use super::report::Report;
use crate::openmetrics::{self, Escaped};

/// A number of the whole: name, meaning, value.
type Whole = (&'static str, &'static str, fn(&MachineStats) -> u64);
/// A number of each disk.
type OfDisk = (&'static str, &'static str, fn(&DiskStats) -> u64);

const GAUGES: [Whole; 10] = [
    ("cache_limit_bytes", "Memory the cache may take.", |m| {
        m.engine.cache_bytes
    }),
    ("cached_bytes", "Pages in the cache.", |m| {
        m.engine.cached_pages * PAGE_BYTES as u64
    }),
    ("dirty_bytes", "Of them not on storage yet.", |m| {
        m.engine.dirty_pages * PAGE_BYTES as u64
    }),
    ("dirty_limit_bytes", "Most that may be.", |m| {
        m.engine.dirty_pages_max * PAGE_BYTES as u64
    }),
    (
        "cache_disabled",
        "Whether the cache switched itself off.",
        |m| m.engine.disabled.is_some().into(),
    ),
    (
        "mapped_frames",
        "Guest frames whose location is known.",
        |m| m.engine.mapped_frames,
    ),
    (
        "notices_attached",
        "Whether a guest tells of evictions.",
        |m| m.ring.attached.into(),
    ),
    (
        "guest_memory_bytes",
        "Memory of the guest as it says; 0 if it does not.",
        |m| m.ring.guest_memory_pages.saturating_mul(PAGE_BYTES as u64),
    ),
    ("hcache_available", "Whether an hcache is behind.", |m| {
        m.second_chance.available.into()
    }),
    ("hcache_pools", "Pools open.", |m| m.second_chance.pools),
];

const COUNTERS: [Whole; 41] = [
    ("read_blocks", "Whole blocks read.", |m| {
        m.engine.read_blocks
    }),
    ("hits", "Of them served from the cache.", |m| m.engine.hits),
    (
        "scattered_blocks",
        "Whole blocks moved by memory that is not one page; never cached.",
        |m| m.engine.scattered_blocks,
    ),
    ("read_parts", "Reads of parts of blocks.", |m| {
        m.engine.read_parts
    }),
    ("written_blocks", "Whole blocks written.", |m| {
        m.engine.written_blocks
    }),
    ("written_parts", "Writes of parts of blocks.", |m| {
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
    ("flushes", "Flushes done.", |m| m.engine.flushes),
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
    ("storage_errors", "Storage orders that failed.", |m| {
        m.engine.storage_errors
    }),
    ("evictions", "Evictions told by the guest.", |m| {
        m.engine.evictions
    }),
    ("admitted", "Of them pages that were admitted.", |m| {
        m.engine.admitted
    }),
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
        "Not admitted: contents are not those of the last I/O.",
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
    ("releases", "Releases told by the guest.", |m| {
        m.engine.releases
    }),
    ("additions", "Additions told by the guest.", |m| {
        m.engine.additions
    }),
    ("migrations", "Migrations told by the guest.", |m| {
        m.engine.migrations
    }),
    ("forgotten", "Times all frames were forgotten.", |m| {
        m.engine.forgotten
    }),
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
    ("notices", "Records of the guest.", |m| m.ring.records),
    ("notices_lost", "Notices the guest lost.", |m| m.ring.lost),
    ("notices_bad", "Records that made no sense.", |m| {
        m.ring.bad_records
    }),
    (
        "notices_faults",
        "Times the ring made no sense and was let go.",
        |m| m.ring.faults,
    ),
    ("hcache_puts", "Pages put.", |m| m.second_chance.puts),
    ("hcache_stored", "Of them stored.", |m| {
        m.second_chance.stored
    }),
    ("hcache_gets", "Pages asked for.", |m| m.second_chance.gets),
    ("hcache_hits", "Of them found.", |m| m.second_chance.hits),
    ("hcache_flushed_blocks", "Blocks flushed.", |m| {
        m.second_chance.flushed_blocks
    }),
    ("hcache_errors", "Operations that failed.", |m| {
        m.second_chance.errors
    }),
    ("requests", "Requests of all disks.", |m| {
        sum(m, |disk| disk.requests)
    }),
    (
        "resubmitted",
        "Requests of a former daemon or connection done again.",
        |m| sum(m, |disk| disk.resubmitted),
    ),
    (
        "bad_requests",
        "Requests that were malformed or out of range.",
        |m| sum(m, |disk| disk.bad_requests),
    ),
];

const DISK_GAUGES: [OfDisk; 5] = [
    ("image_size_bytes", "Size of the disk.", |d| d.size_bytes),
    ("image_connected", "Whether a guest is connected.", |d| {
        d.connected.into()
    }),
    ("image_read_only", "Whether it cannot be written.", |d| {
        d.read_only.into()
    }),
    (
        "image_direct_io",
        "Whether the host's page cache is passed by.",
        |d| d.direct_io.into(),
    ),
    ("image_in_flight", "Requests in flight.", |d| d.in_flight),
];

const DISK_COUNTERS: [OfDisk; 4] = [
    ("image_requests", "Requests done.", |d| d.requests),
    (
        "image_resubmitted",
        "Requests of a former daemon or connection done again.",
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
    let mut text = String::new();
    // A string takes whatever is written to it.
    let _ = write(report, &mut text);
    text
}

fn write(report: &Report, text: &mut String) -> fmt::Result {
    let machine = &report.machine;
    let vm = format!("vm=\"{}\"", Escaped(&report.vm));
    let name = "uptime_seconds";
    head(text, name, "gauge", "How long ago the daemon began.")?;
    writeln!(text, "{PREFIX}{name}{{{vm}}} {}", machine.uptime_seconds)?;
    for (name, help, value) in GAUGES {
        head(text, name, "gauge", help)?;
        writeln!(text, "{PREFIX}{name}{{{vm}}} {}", value(machine))?;
    }
    for (name, help, value) in COUNTERS {
        head(text, name, "counter", help)?;
        writeln!(text, "{PREFIX}{name}_total{{{vm}}} {}", value(machine))?;
    }
    for (families, kind, ending) in [
        (&DISK_GAUGES[..], "gauge", ""),
        (&DISK_COUNTERS[..], "counter", "_total"),
    ] {
        for (name, help, value) in families {
            head(text, name, kind, help)?;
            for (number, disk) in machine.disks.iter().enumerate() {
                let image = Escaped(&disk.image);
                let labels = format!("{vm},disk=\"{number}\",image=\"{image}\"");
                writeln!(text, "{PREFIX}{name}{ending}{{{labels}}} {}", value(disk))?;
            }
        }
    }
    let expected = report.ghosts.iter().flat_map(|ghosts| &ghosts.expected);
    let name = "expected_hit_ratio";
    head(
        text,
        name,
        "gauge",
        "Share of reads a cache of that size would serve.",
    )?;
    for at in expected.flatten() {
        let bytes = at.cache_pages * PAGE_BYTES as u64;
        let labels = format!("{vm},cache_bytes=\"{bytes}\"");
        writeln!(text, "{PREFIX}{name}{{{labels}}} {}", at.hit_ratio)?;
    }
    if let Some(record) = &report.record {
        let name = "record_lost";
        head(text, name, "counter", "References not recorded.")?;
        writeln!(text, "{PREFIX}{name}_total{{{vm}}} {}", record.lost)?;
    }
    text.push_str("# EOF\n");
    Ok(())
}

const PREFIX: &str = "plimsoll_disk_";

fn head(text: &mut String, name: &str, kind: &str, help: &str) -> fmt::Result {
    openmetrics::head(text, PREFIX, name, kind, help)
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
    fn every_sample_follows_its_family() {
        let text = text(&example());
        let mut family = "";
        let mut families = Vec::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().unwrap();
                assert!(!families.contains(&family), "{family} twice");
                families.push(family);
            } else if !line.starts_with('#') {
                let name = line.split(['{', ' ']).next().unwrap();
                assert!(
                    name.strip_suffix("_total").unwrap_or(name) == family,
                    "{line}"
                );
            }
        }
        assert!(families.len() > 55);
        assert!(text.contains("\nplimsoll_disk_cache_limit_bytes{vm=\"web\"} 67108864\n"));
        assert!(text.contains("\nplimsoll_disk_hits_total{vm=\"web\"} 750000\n"));
        let expected =
            "plimsoll_disk_expected_hit_ratio{vm=\"web\",cache_bytes=\"67108864\"} 0.75\n";
        assert!(text.contains(expected), "{text}");
        assert!(text.ends_with("\n# EOF\n"));
    }
}
