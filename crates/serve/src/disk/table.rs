//! A [`Report`] as a table for readers, within 100 columns.

use std::fmt::Write;

use plimsoll_disk::{
    CacheMode, DiskStats, EngineStats, MachineStats, PAGE_BYTES, RingStats, WriteMode,
};
use plimsoll_estimator::GhostOptions;
use plimsoll_output::{cut_front, duration, per_second, percent, printable, short, table};
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::size::ByteSize;

use super::report::{GhostsReport, PauseReport, Report};
use super::trouble::{RAM_ERRORS, UNSHARED};

/// Lines of the curve, at most; they are multiples of [`SEGMENT_PAGES`] apart.
const CURVE_LINES: u64 = 24;
const SEGMENT_PAGES: u64 = GhostOptions::SEGMENT.0;

/// The report as lines. With an earlier one, counts are those since then.
pub fn text(report: &Report, earlier: Option<&Report>) -> String {
    let mut text = String::new();
    let table = Table {
        now: &report.machine,
        earlier: earlier.map(|earlier| &earlier.machine),
    };
    table.head(report, &mut text);
    table.cache(&mut text);
    table.requests(&mut text);
    table.notices(&mut text);
    table.victim_cache(&mut text);
    if let Some(record) = &report.record {
        let lost = match record.lost {
            0 => String::new(),
            lost => format!(", {lost} references lost"),
        };
        let trace = printable(&record.trace.to_string_lossy());
        let _ = writeln!(text, "record    {trace}{lost}");
        if let Some(error) = &record.error {
            let error = printable(error);
            let _ = writeln!(
                text,
                "FAILED    the trace cannot be written, and nothing of it is kept: {error}"
            );
        }
    }
    table.disks(&report.pause, &mut text);
    if let Some(ghosts) = &report.ghosts {
        table.expected(ghosts, &mut text);
    }
    if let Some(json) = &report.curve {
        curve(json, &mut text);
    }
    text
}

struct Table<'a> {
    now: &'a MachineStats,
    earlier: Option<&'a MachineStats>,
}

impl Table<'_> {
    /// A count since the earlier report, or since the start of a daemon that was restarted in between.
    fn since(&self, of: impl Fn(&MachineStats) -> u64) -> u64 {
        let now = of(self.now);
        let earlier = self.earlier.map_or(0, of);
        now.checked_sub(earlier).unwrap_or(now)
    }

    fn engine(&self, of: impl Fn(&EngineStats) -> u64) -> String {
        short(self.since(|stats| of(&stats.engine)) as f64)
    }

    fn ring(&self, of: impl Fn(&RingStats) -> u64) -> String {
        short(self.since(|stats| of(&stats.ring)) as f64)
    }

    fn head(&self, report: &Report, text: &mut String) {
        let before_seconds = self.earlier.map_or(0.0, |earlier| earlier.uptime_seconds);
        let seconds = self.now.uptime_seconds - before_seconds;
        let engine = &self.now.engine;
        let _ = writeln!(
            text,
            "VM        {}, {}, {}; counted in {}",
            printable(&report.vm),
            match engine.mode {
                CacheMode::None => "no cache",
                CacheMode::Exclusive => "exclusive cache",
                CacheMode::FromStorage => "cache filled from storage",
            },
            match engine.write {
                WriteMode::Through => "writes go through",
                WriteMode::Delayed => "writes are delayed",
            },
            duration(if seconds < 0.0 {
                self.now.uptime_seconds
            } else {
                seconds
            }),
        );
    }

    fn cache(&self, text: &mut String) {
        let engine = &self.now.engine;
        if engine.mode != CacheMode::None {
            let cached = engine.cached_pages * PAGE_BYTES as u64;
            let _ = write!(
                text,
                "cache     {} of {} ({}), {} dropped",
                size(cached),
                size(engine.cache_bytes),
                percent(cached as f64 / (engine.cache_bytes as f64).max(1.0)),
                self.engine(|e| e.dropped),
            );
            if engine.write == WriteMode::Delayed || engine.dirty_pages > 0 {
                let _ = write!(
                    text,
                    "; {} of at most {} dirty",
                    size(engine.dirty_pages * PAGE_BYTES as u64),
                    size(engine.dirty_pages_max * PAGE_BYTES as u64),
                );
            }
            text.push('\n');
        }
        if let Some(why) = &engine.disabled {
            let why = printable(why);
            let _ = writeln!(text, "DISABLED  {why}; `plimsoll disk enable` restarts it");
        }
        if engine.mode != CacheMode::None
            && engine.scattered_blocks > (engine.read_blocks + engine.written_blocks) / 2
        {
            text.push_str(
                "UNCACHED  most blocks are not whole pages: the file system's block size is not 4 KiB\n",
            );
        }
        if engine.wrong_served > 0 {
            let _ = writeln!(
                text,
                "WRONG     {} pages served differed from storage",
                engine.wrong_served
            );
        }
    }

    fn requests(&self, text: &mut String) {
        let reads = self.since(|stats| stats.engine.read_blocks);
        let hits = self.since(|stats| stats.engine.hits);
        let _ = writeln!(
            text,
            "reads     {} blocks, {} from the cache; {} partial",
            short(reads as f64),
            share(hits, reads),
            self.engine(|e| e.read_parts),
        );
        let _ = write!(
            text,
            "writes    {} blocks, {} partial, {} flushes",
            self.engine(|e| e.written_blocks),
            self.engine(|e| e.written_parts),
            self.engine(|e| e.flushes),
        );
        if self.now.engine.write == WriteMode::Delayed {
            let _ = write!(
                text,
                "; {} delayed, {} written back, {} failed",
                self.engine(|e| e.delayed_blocks),
                self.engine(|e| e.written_back_blocks),
                self.engine(|e| e.write_back_errors),
            );
        }
        let bytes = |of: fn(&EngineStats) -> u64| size(self.since(|stats| of(&stats.engine)));
        let disks = |of: fn(&plimsoll_disk::DiskStats) -> u64| {
            self.since(|stats| stats.disks.iter().map(of).fold(0, u64::saturating_add))
        };
        let wait = match disks(|disk| disk.waited_reads) {
            0 => String::new(),
            waited => {
                let ms = disks(|disk| disk.read_wait_ns) as f64 / 1e6 / waited as f64;
                format!("; a read waits {ms:.2} ms")
            }
        };
        let _ = writeln!(
            text,
            "\nstorage   {} reads ({}), {} writes ({}), {} errors{wait}",
            self.engine(|e| e.storage_reads),
            bytes(|e| e.storage_read_bytes),
            self.engine(|e| e.storage_writes),
            bytes(|e| e.storage_written_bytes),
            self.engine(|e| e.storage_errors),
        );
    }

    fn notices(&self, text: &mut String) {
        let ring = &self.now.ring;
        if !ring.attached && ring.records == 0 {
            if self.now.engine.mode != CacheMode::None {
                text.push_str(match ring.control_used {
                    Some(true) => "notices   none from the guest: is its module loaded?\n",
                    Some(false) => "notices   none: the guest does not use the control disk\n",
                    None => "notices   none: there is no control disk\n",
                });
            }
            return;
        }
        let _ = writeln!(
            text,
            "evictions {}, {} admitted; {} unknown, {} not newest, {} stale, {} mismatched, {} other",
            self.engine(|e| e.evictions),
            self.engine(|e| e.admitted),
            self.engine(|e| e.refused_unknown),
            self.engine(|e| e.refused_not_newest),
            self.engine(|e| e.refused_stale),
            self.engine(|e| e.refused_mismatch),
            self.engine(|e| e.refused_other),
        );
        let _ = writeln!(
            text,
            "notices   {}; {} lost, {} bad, {} ring faults, {} times all frames dropped",
            if ring.attached {
                self.ring(|r| r.records)
            } else {
                format!("{}, ring detached", self.ring(|r| r.records))
            },
            self.ring(|r| r.lost),
            self.ring(|r| r.bad_records),
            self.ring(|r| r.faults),
            self.engine(|e| e.forgotten),
        );
    }

    fn victim_cache(&self, text: &mut String) {
        let now = &self.now.victim_cache;
        if !now.available && now.pools == 0 && now.puts == 0 && now.gets == 0 {
            return;
        }
        let puts = self.since(|stats| stats.victim_cache.puts);
        let gets = self.since(|stats| stats.victim_cache.gets);
        let _ = writeln!(
            text,
            "hcache    {}, {} pools; {} put, {} stored, {} ns a put; {} got, {} hit, {} ns a get; {} flushed, {} errors, {} of them timeouts",
            if now.in_reach {
                "in reach"
            } else {
                "out of reach"
            },
            now.pools,
            short(puts as f64),
            short(self.since(|stats| stats.victim_cache.stored) as f64),
            self.since(|stats| stats.victim_cache.put_ns) / puts.max(1),
            short(gets as f64),
            share(self.since(|stats| stats.victim_cache.hits), gets),
            self.since(|stats| stats.victim_cache.get_ns) / gets.max(1),
            short(self.since(|stats| stats.victim_cache.flushed_blocks) as f64),
            short(self.since(|stats| stats.victim_cache.errors) as f64),
            short(self.since(|stats| stats.victim_cache.timeouts) as f64),
        );
        if let (false, Some(why)) = (now.in_reach, &now.failure) {
            let _ = writeln!(text, "          {}", printable(why));
        }
        let different = self.since(|stats| stats.victim_cache.refused_different);
        let unread = self.since(|stats| stats.victim_cache.refused_unread);
        if different > 0 || unread > 0 {
            let _ = writeln!(
                text,
                "          {} refused as not what the image holds, {} as not read from it",
                short(different as f64),
                short(unread as f64),
            );
        }
    }

    fn disks(&self, pause: &PauseReport, text: &mut String) {
        if self.now.disks.is_empty() {
            return;
        }
        let count = |number: usize, of: fn(&DiskStats) -> u64| {
            short(self.since(|stats| stats.disks.get(number).map_or(0, of)) as f64)
        };
        text.push('\n');
        text.push_str(
            &table!(self.now.disks.iter().enumerate(), |(number, disk)| {
                Right "disk": number,
                Left "image": cut_front(&printable(&disk.image), 34),
                Right "size": size(disk.size_bytes),
                Left "": if disk.read_only { "ro" } else { "rw" },
                Left "I/O": if disk.direct_io { "direct" } else { "buffered" },
                Left "guest": match (disk.connected, disk.queues) {
                    (false, _) => "-",
                    (true, 0) => "no queue",
                    (true, _) => "connected",
                },
                Right "requests": count(number, |disk| disk.requests),
                Right "in flight": disk.in_flight,
                Right "bad": count(number, |disk| disk.bad_requests),
            }),
        );
        for (number, disk) in self.now.disks.iter().enumerate() {
            self.failures(number, disk, text);
        }
        if self.now.engine.wants_pause {
            if pause.paused {
                text.push_str("PAUSED    the VM, until its writes succeed (--write-error)\n");
            } else {
                let why = printable(pause.error.as_deref().unwrap_or("it did not run"));
                let _ = writeln!(
                    text,
                    "WAITING   writes, until they succeed (--write-error); the VM was not paused: {why}"
                );
            }
        }
    }

    fn failures(&self, number: usize, disk: &DiskStats, text: &mut String) {
        let count = |of: fn(&DiskStats) -> u64| {
            short(self.since(|stats| stats.disks.get(number).map_or(0, of)) as f64)
        };
        if let Some(error) = &disk.last_error {
            let _ = writeln!(
                text,
                "ERRORS    disk {number}: {} for lack of space, {} others; the last: {}",
                count(|disk| disk.no_space_errors),
                count(|disk| disk.io_errors),
                printable(error),
            );
        }
        if disk.ram_errors > 0 {
            let _ = writeln!(
                text,
                "RAM       disk {number}: {} accesses to the guest's RAM failed ({RAM_ERRORS})",
                count(|disk| disk.ram_errors),
            );
        }
        if disk.unshared {
            let _ = writeln!(text, "UNSHARED  disk {number}: {UNSHARED}");
        }
        if disk.unwritable_pages > 0 {
            let _ = writeln!(
                text,
                "UNWRITTEN disk {number}: {} cannot be written; they stay dirty, and flushes {}",
                pages_size(disk.unwritable_pages),
                if disk.flushes_wait { "wait" } else { "fail" },
            );
        }
        if disk.unsynced {
            let _ = writeln!(
                text,
                "UNSYNCED  disk {number}: a sync failed, so flushes fail until `plimsoll disk enable`"
            );
        }
    }

    fn expected(&self, ghosts: &GhostsReport, text: &mut String) {
        let Some(expected) = &ghosts.expected else {
            return;
        };
        let behind = match ghosts.direct_pages {
            Some(pages) => format!(" behind {} of guest memory", pages_size(pages)),
            None => String::new(),
        };
        let _ = writeln!(
            text,
            "\n{:>11}  {:>6}  {:>13}  expected from {} reads{behind}",
            "cache",
            "hit %",
            "band",
            short(ghosts.reads as f64),
        );
        let present = self.now.engine.cache_bytes / PAGE_BYTES as u64;
        let present = present.next_multiple_of(ghosts.segment_pages.max(1));
        for at in expected {
            let now = if at.cache_pages == present {
                let counted = hundredths(ghosts.hits, ghosts.reads);
                format!("  now; counted {counted}")
            } else {
                String::new()
            };
            let _ = writeln!(
                text,
                "{:>11}  {:>6.1}  {:>5.1} .. {:>4.1}{now}",
                pages_size(at.cache_pages),
                at.hit_ratio * 100.0,
                at.low * 100.0,
                at.high * 100.0,
            );
        }
        let band = &ghosts.band;
        let _ = match (&band.why_unknown, band.statistical.zip(band.replacement)) {
            (Some(why), _) => writeln!(text, "the band covers everything: {why}"),
            (None, Some((statistical, replacement))) => writeln!(
                text,
                "band now: noise {}, order {} ({} of evictions out of it), unreported evictions {}",
                percent(statistical),
                percent(replacement),
                percent(band.out_of_order),
                percent(band.unreported.unwrap_or_default()),
            ),
            (None, None) => Ok(()),
        };
    }
}

fn curve(json: &CurveJson, text: &mut String) {
    let sizes: Vec<_> = json.points.iter().map(|point| point.size_pages).collect();
    let (Some(&last), baseline) = (sizes.last(), json.baseline_pages.unwrap_or(0)) else {
        return;
    };
    // Sizes 0 and 1 precede the curve proper.
    let first = sizes.iter().copied().find(|size| *size > 1).unwrap_or(0);
    let step = (last - first).div_ceil(CURVE_LINES);
    let step = step.next_multiple_of(SEGMENT_PAGES).max(SEGMENT_PAGES);
    let mut lines: Vec<_> = (0..=CURVE_LINES)
        .map(|line| first + line * step)
        .take_while(|size| *size <= last)
        .collect();
    if baseline >= first && !lines.contains(&baseline) {
        lines.push(baseline);
        lines.sort_unstable();
    }
    let rates = |rate: &str, band: &str| match json.points.last() {
        Some(last) if last.misses.is_some() => format!("  {rate:>8}  {band:<17}"),
        _ => String::new(),
    };
    let _ = writeln!(
        text,
        "\n{:>11}{}  {:>6}  of {} reads, by guest memory and cache together",
        "memory",
        rates("misses/s", "(band)"),
        "miss %",
        short(json.references as f64)
    );
    for size in lines {
        let misses = json.miss_ratio(size);
        let now = if size == baseline { "  now" } else { "" };
        let (rate, band) = json
            .misses_at(size)
            .map_or_else(Default::default, |misses| {
                let limits = [misses.misses_low_per_second, misses.misses_high_per_second];
                let [low, high] = limits.map(per_second);
                let rate = per_second(misses.misses_per_second);
                (rate, format!("({low} to {high})"))
            });
        let _ = writeln!(
            text,
            "{:>11}{}  {:>6.1}{now}",
            pages_size(size),
            rates(&rate, &band),
            misses * 100.0
        );
    }
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).rounded()
}

fn pages_size(pages: u64) -> String {
    size(pages.saturating_mul(PAGE_BYTES as u64))
}

fn share(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        _ => percent(part as f64 / whole as f64),
    }
}

fn hundredths(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        _ => format!("{:.1}", part as f64 / whole as f64 * 100.0),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::RecordReport;
    use super::super::report::tests::example;
    use super::*;
    use plimsoll_disk::VictimCacheStats;
    use plimsoll_protocol::curve_json::{MissesJson, PointJson};

    #[test]
    fn the_table_is_the_documented_one() {
        let text = text(&example(), None);
        let expected = "\
VM        web, exclusive cache, writes are delayed; counted in 2 h
cache     62.5 MiB of 64 MiB (97.7 %), 133.0k dropped; 480 KiB of at most 16 MiB dirty
reads     1.0M blocks, 75.0 % from the cache; 12 partial
writes    40.0k blocks, 0 partial, 300 flushes; 40.0k delayed, 39.9k written back, 0 failed
storage   30.0k reads (1 GiB), 9000 writes (150 MiB), 0 errors; a read waits 0.50 ms
evictions 900.0k, 899.0k admitted; 900 unknown, 0 not newest, 100 stale, 0 mismatched, 0 other
notices   1.9M; 0 lost, 0 bad, 0 ring faults, 0 times all frames dropped

disk  image                                  size      I/O       guest      requests  in flight  bad
   0  /var/lib/images/web.raw               8 GiB  rw  direct    connected      2.3M          3    0
   1  …\u{fffd}[2J that is long, and longer.iso  700 MiB  ro  buffered  -                 0          0    2

      cache   hit %           band  expected from 990.0k reads behind 192 MiB of guest memory
     32 MiB    40.0   35.0 .. 45.0
     64 MiB    75.0   70.0 .. 80.0  now; counted 74.9
    128 MiB    90.0   85.0 .. 95.0
band now: noise 1.0 %, order 3.0 % (87.5 % of evictions out of it), unreported evictions 0.0 %
";
        assert_eq!(text, expected, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100));
    }

    #[test]
    fn with_an_earlier_report_counts_are_those_in_between() {
        let (earlier, mut now) = (example(), example());
        now.machine.uptime_seconds += 2.0;
        now.machine.engine.read_blocks += 400;
        now.machine.engine.hits += 100;
        now.machine.disks[0].requests += 500;
        let told = text(&now, Some(&earlier));
        assert!(told.contains("counted in 2 s\n"), "{told}");
        assert!(told.contains("reads     400 blocks, 25.0 % from the cache"));
        assert!(told.contains(" connected       500 "), "{told}");
        // QEMU has lost the disk and the control disk.
        now.machine.disks[0].queues = 0;
        now.machine.ring = RingStats {
            control_used: Some(false),
            ..RingStats::default()
        };
        let told = text(&now, Some(&earlier));
        assert!(told.contains(" no queue       500 "), "{told}");
        assert!(told.contains("notices   none: the guest does not use the control disk\n"));
        // A daemon that was restarted counts from its start.
        now.machine.uptime_seconds = 1.0;
        now.machine.engine.read_blocks = 8;
        now.machine.engine.hits = 4;
        let told = text(&now, Some(&earlier));
        assert!(told.contains("counted in 1 s\n"), "{told}");
        assert!(
            told.contains("reads     8 blocks, 50.0 % from the cache"),
            "{told}"
        );
    }

    #[test]
    fn a_cache_that_switched_itself_off_says_why_and_a_silent_guest_is_reported() {
        let mut report = example();
        report.machine.engine.disabled = Some("12 of 100 evictions mismatched".to_owned());
        report.machine.ring = RingStats {
            control_used: Some(true),
            ..RingStats::default()
        };
        let told = text(&report, None);
        let line = "DISABLED  12 of 100 evictions mismatched; `plimsoll disk enable` restarts it\n";
        assert!(told.contains(line), "{told}");
        assert!(told.contains("notices   none from the guest"), "{told}");
    }

    #[test]
    fn disks_that_fail_are_told_below_the_table() {
        let mut report = example();
        let disk = &mut report.machine.disks[0];
        disk.no_space_errors = 7;
        disk.last_error = Some("No space left".to_owned());
        disk.ram_errors = 5;
        disk.unshared = true;
        disk.unwritable_pages = 2;
        disk.unsynced = true;
        report.machine.engine.wants_pause = true;
        report.pause.paused = true;
        let told = text(&report, None);
        let lines = "\
ERRORS    disk 0: 7 for lack of space, 0 others; the last: No space left
RAM       disk 0: 5 accesses to the guest's RAM failed (no free huge page, a full tmpfs, or a truncated file)
UNSHARED  disk 0: the guest uses memory that QEMU does not share: queues there stand still, and requests fail; all memory must have share=on
UNWRITTEN disk 0: 8 KiB cannot be written; they stay dirty, and flushes fail
UNSYNCED  disk 0: a sync failed, so flushes fail until `plimsoll disk enable`
PAUSED    the VM, until its writes succeed (--write-error)
";
        assert!(told.contains(lines), "{told}");
        report.pause = PauseReport {
            paused: false,
            error: Some("no greeting".to_owned()),
        };
        let line = "WAITING   writes, until they succeed (--write-error); the VM was not paused: no greeting\n";
        report.machine.disks[0].flushes_wait = true;
        let told = text(&report, None);
        assert!(told.contains(line) && !told.contains("PAUSED"), "{told}");
        assert!(
            told.contains("they stay dirty, and flushes wait\n"),
            "{told}"
        );
    }

    #[test]
    fn an_hcache_that_is_out_of_reach_is_shown_with_the_reason() {
        let mut report = example();
        report.machine.victim_cache = VictimCacheStats {
            available: true,
            failure: Some("the hcache server refuses: no room".to_owned()),
            ..VictimCacheStats::default()
        };
        let told = text(&report, None);
        let lines = "0 errors, 0 of them timeouts\n          the hcache server refuses: no room\n";
        assert!(
            told.contains("hcache    out of reach, ") && told.contains(lines),
            "{told}"
        );
    }

    #[test]
    fn a_trace_that_cannot_be_written_is_shown_as_that() {
        let mut report = example();
        report.record = Some(RecordReport {
            trace: "/t.ids".into(),
            lost: 9,
            error: Some("No space left".to_owned()),
        });
        let lines = "\
record    /t.ids, 9 references lost
FAILED    the trace cannot be written, and nothing of it is kept: No space left
";
        let told = text(&report, None);
        assert!(told.contains(lines), "{told}");
    }

    #[test]
    fn a_curve_begins_at_the_guests_memory_and_shows_the_present_size() {
        let point = |size_pages, miss_ratio| PointJson {
            size_pages,
            miss_ratio,
            low: 0.0,
            high: miss_ratio,
            misses: None,
        };
        let mut report = example();
        report.curve = Some(CurveJson {
            schema: 1,
            vm: "web".to_owned(),
            page_bytes: 4096,
            references: 9000,
            baseline_pages: Some(65_600),
            vcpu_seconds_per_second: None,
            uncertain_pages: 0,
            log_errors_permille: Vec::new(),
            points: vec![
                point(0, 1.0),
                point(1, 1.0),
                point(49_152, 0.9),
                point(65_536, 0.25),
                point(81_920, 0.2),
            ],
        });
        let told = text(&report, None);
        let begin = "     memory  miss %  of 9000 reads, by guest memory and cache together\n    192 MiB    90.0\n";
        assert!(told.contains(begin), "{told}");
        assert!(told.contains("    256 MiB    25.0  now\n"), "{told}");
        assert!(told.ends_with("    320 MiB    20.0\n"), "{told}");
        for point in &mut report.curve.as_mut().unwrap().points {
            point.misses = Some(MissesJson {
                misses_per_second: 2.5,
                misses_low_per_second: 0.0,
                misses_high_per_second: 12_345.0,
            });
        }
        let told = text(&report, None);
        let rated = "    256 MiB       2.5  (0 to 12.3k)         25.0  now\n";
        assert!(told.contains(rated), "{told}");
    }
}
