//! A [`Report`] as OpenMetrics text, for Prometheus and its kin.
//!
//! Names begin with `plimsoll_disk_`, are in base units, and end in `_total` where they count. All have the label
//! `vm`; what is a disk's has `disk` (its number) and `image`.

use std::fmt::Display;

use plimsoll_disk::{DiskStats, MachineStats, PAGE_BYTES};
use plimsoll_protocol::families;
use plimsoll_protocol::openmetrics::{Exposition, Kind, Labels};

use super::report::Report;

/// A family of the whole machine: name, help, value.
type MachineFamily = (&'static str, &'static str, fn(&MachineStats) -> u64);
/// A family with a sample for each disk.
type DiskFamily = (&'static str, &'static str, fn(&DiskStats) -> u64);

const GAUGES: &[MachineFamily] = families! { m =>
    cache_limit_bytes: m.engine.cache_bytes, "Capacity of the cache.";
    cached_bytes: m.engine.cached_pages * PAGE_BYTES as u64, "Pages in the cache.";
    dirty_bytes: m.engine.dirty_pages * PAGE_BYTES as u64, "Delayed writes that are not on storage yet.";
    dirty_limit_bytes: m.engine.dirty_pages_max * PAGE_BYTES as u64, "Limit of dirty_bytes.";
    cache_disabled: m.engine.disabled.is_some().into(), "Whether the cache switched itself off.";
    pause_wanted: m.engine.wants_pause.into(), "Whether the VM is to be paused, because storage refuses its writes.";
    mapped_frames: m.engine.mapped_frames, "Guest frames whose location on disk is known.";
    control_used: m.ring.control_used.unwrap_or(false).into(), "Whether the guest's driver uses the control disk.";
    notices_attached: m.ring.attached.into(), "Whether a guest reports evictions.";
    guest_memory_bytes: m.ring.guest_memory_pages.saturating_mul(PAGE_BYTES as u64),
        "Memory of the guest as it reports it; 0 if it does not.";
    hcache_available: m.victim_cache.available.into(), "Whether a second-level cache is configured.";
    hcache_in_reach: m.victim_cache.in_reach.into(), "Whether the second-level cache is in reach.";
    hcache_pools: m.victim_cache.pools, "Open pools of the second-level cache.";
};

const COUNTERS: &[MachineFamily] = families! { m =>
    read_blocks: m.engine.read_blocks, "Whole blocks read.";
    hits: m.engine.hits, "Whole blocks served from the cache.";
    scattered_blocks: m.engine.scattered_blocks,
        "Whole blocks transferred to or from memory that is not one page; never cached.";
    read_parts: m.engine.read_parts, "Reads of less than a block.";
    written_blocks: m.engine.written_blocks, "Whole blocks written.";
    written_parts: m.engine.written_parts, "Writes of less than a block.";
    delayed_blocks: m.engine.delayed_blocks, "Blocks whose writes were delayed.";
    written_back_blocks: m.engine.written_back_blocks, "Dirty blocks written back.";
    write_back_errors: m.engine.write_back_errors, "Write-backs that failed.";
    flushes: m.engine.flushes, "Flushes begun, the own ones of the daemon included.";
    storage_reads: m.engine.storage_reads, "Reads of storage.";
    storage_read_bytes: m.engine.storage_read_bytes, "Bytes read from storage.";
    storage_writes: m.engine.storage_writes, "Writes to storage.";
    storage_written_bytes: m.engine.storage_written_bytes, "Bytes of writes to storage, failed ones included.";
    storage_errors: m.engine.storage_errors, "Storage requests that failed.";
    evictions: m.engine.evictions, "Evictions reported by the guest.";
    admitted: m.engine.admitted, "Evicted pages that were admitted to the cache.";
    refused_unknown: m.engine.refused_unknown, "Not admitted: no location known.";
    refused_not_newest: m.engine.refused_not_newest, "Not admitted: another frame holds newer contents.";
    refused_mismatch: m.engine.refused_mismatch, "Not admitted: the contents are not those of the last I/O.";
    refused_stale: m.engine.refused_stale, "Not admitted: a page that was not copied had changed, or its frame had been used again.";
    refused_other: m.engine.refused_other, "Not admitted for other reasons.";
    releases: m.engine.releases, "Releases reported by the guest.";
    additions: m.engine.additions, "Additions reported by the guest.";
    migrations: m.engine.migrations, "Migrations reported by the guest.";
    forgotten: m.engine.forgotten, "Times that all known frames were dropped.";
    dropped: m.engine.dropped, "Pages dropped because the cache was full.";
    wrong_served: m.engine.wrong_served, "With --verify: pages served that differed from storage.";
    notices: m.ring.records, "Records received from the guest.";
    notices_lost: m.ring.lost, "Notifications that the guest lost.";
    notices_bad: m.ring.bad_records, "Invalid records.";
    notices_faults: m.ring.faults, "Times that the ring was invalid and was detached.";
    hcache_puts: m.victim_cache.puts, "Pages put into the second-level cache.";
    hcache_stored: m.victim_cache.stored, "Pages that the second-level cache stored.";
    hcache_refused_different: m.victim_cache.refused_different,
        "Pages put into the pool of an image that differ from what was read from it.";
    hcache_refused_unread: m.victim_cache.refused_unread,
        "Pages put into the pool of an image at blocks that were not read from it.";
    hcache_gets: m.victim_cache.gets, "Pages requested from the second-level cache.";
    hcache_hits: m.victim_cache.hits, "Pages that the second-level cache returned.";
    hcache_flushed_blocks: m.victim_cache.flushed_blocks, "Blocks flushed from the second-level cache.";
    hcache_errors: m.victim_cache.errors, "Operations of the second-level cache that failed.";
    hcache_timeouts: m.victim_cache.timeouts,
        "Operations that the second-level cache did not answer in time.";
    requests: sum(m, |disk| disk.requests), "Requests of all disks.";
    resubmitted: sum(m, |disk| disk.resubmitted),
        "Requests of an earlier daemon or connection that were repeated.";
    bad_requests: sum(m, |disk| disk.bad_requests), "Requests that were malformed or out of range.";
};

const DISK_GAUGES: &[DiskFamily] = families! { d =>
    image_size_bytes: d.size_bytes, "Size of the disk.";
    image_connected: d.connected.into(), "Whether QEMU is connected.";
    image_queues: d.queues.into(), "Queues that the guest's driver uses; of none the guest is not served.";
    image_read_only: d.read_only.into(), "Whether the disk is read-only.";
    image_direct_io: d.direct_io.into(), "Whether I/O bypasses the host's page cache.";
    image_unwritable_bytes: d.unwritable_pages * PAGE_BYTES as u64,
        "Dirty blocks that could not be written when it was last tried; flushes fail meanwhile.";
    image_unsynced: d.unsynced.into(), "Whether a sync failed: flushes fail since.";
    image_unshared: d.unshared.into(), "Whether the guest used memory that its VM does not share.";
    image_in_flight: d.in_flight, "Requests in flight.";
};

const DISK_COUNTERS: &[DiskFamily] = families! { d =>
    image_requests: d.requests, "Completed requests.";
    image_resubmitted: d.resubmitted, "Requests of an earlier daemon or connection that were repeated.";
    image_bad_requests: d.bad_requests, "Requests that were malformed or out of range.";
    image_no_space_errors: d.no_space_errors, "Transfers that failed for lack of space.";
    image_io_errors: d.io_errors, "Transfers that failed for other reasons.";
    image_ram_errors: d.ram_errors, "Accesses to the guest's RAM that failed.";
    image_connections: d.connections, "Connections of a guest.";
    image_waited_reads: d.waited_reads, "Reads that needed at least one block from storage.";
};

fn sum(machine: &MachineStats, of: fn(&DiskStats) -> u64) -> u64 {
    machine.disks.iter().map(of).sum()
}

/// Writes the report as OpenMetrics text.
pub fn text(report: &Report) -> String {
    let mut text = Exposition::new("plimsoll_disk_");
    let machine = &report.machine;
    let vm: (&str, &dyn Display) = ("vm", &report.vm);
    let uptime = ("uptime_seconds", "Time since the daemon's start.");
    text.single(Kind::Gauge, uptime, &[vm], machine.uptime_seconds);
    for (kind, families) in [(Kind::Gauge, GAUGES), (Kind::Counter, COUNTERS)] {
        for &(name, help, value) in families {
            text.single(kind, (name, help), &[vm], value(machine));
        }
    }
    for (kind, families) in [(Kind::Gauge, DISK_GAUGES), (Kind::Counter, DISK_COUNTERS)] {
        for &(name, help, value) in families {
            let mut family = text.family(kind, name, help);
            for (number, disk) in machine.disks.iter().enumerate() {
                let labels: Labels<'_> = &[vm, ("disk", &number), ("image", &disk.image)];
                family.sample(labels, value(disk));
            }
        }
    }
    let help = "Time that reads of which blocks came from storage took, added up.";
    let mut family = text.family(Kind::Counter, "image_read_wait_seconds", help);
    for (number, disk) in machine.disks.iter().enumerate() {
        let labels: Labels<'_> = &[vm, ("disk", &number), ("image", &disk.image)];
        family.sample(labels, disk.read_wait_ns as f64 / 1e9);
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
