//! The page log of real, emulated guests: QEMU 7.2 and 10 with the plugin, guests whose references are known, and every
//! record held against what they must be.

mod rig;

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use plimsoll_pagelog::record::{MARK_BEGIN, MARK_END, Record, Walk};
use plimsoll_pagelog::ring::Ring;
use plimsoll_pagelog::{RecordSource as _, TlbShape};
use rig::{Machine, PLIMSOLL, Qemu, each_qemu, ground};
use serde_json::Value;

/// Instructions of an interval.
const INTERVAL: u64 = 10_000_000;
/// An interval ends at the first look at a page after its instructions: a timer's tick, if nothing else.
const LATE_MAX: u64 = 1_000_000;
/// Pages of an array of 24 MiB.
const ARRAY: u64 = 6144;
/// Pages that the kernel and the program itself may use meanwhile.
const NOISE: u64 = 1500;
/// Pages of the filter.
const FILTER: usize = 64;
/// First page frame above 4 GiB.
const ABOVE_4G: u64 = 1 << 20;

/// What makes a machine repeatable: clocks that follow its instructions, and random numbers from a seed.
const REPEATABLE: &[&str] = &[
    "-icount",
    "shift=5,sleep=off",
    "-rtc",
    "base=2020-01-01,clock=vm",
    "-seed",
    "1",
];

/// A repeatable machine of one vCPU whose array of 24 MiB is passed over again and again, every second pass writing.
fn arrays() -> Machine {
    Machine {
        memory_mib: 192,
        vcpus: 1,
        workload: "workload=arrays array=RWRW mib=24 seconds=4",
        extra: REPEATABLE,
    }
}

/// Fails unless accessed and dirty flags are set by the first walk, and the first for a write, of each interval.
fn assert_flags(records: &[Record]) {
    let (mut accessed, mut dirty) = (BTreeSet::new(), BTreeSet::new());
    for record in records {
        match *record {
            Record::Interval { .. } => {
                accessed.clear();
                dirty.clear();
            }
            Record::Walk(walk) => {
                assert_eq!(walk.sets_accessed, accessed.insert(walk.frame), "{walk:?}");
                let sets_dirty = walk.write && dirty.insert(walk.frame);
                assert_eq!(walk.sets_dirty, sets_dirty, "{walk:?}");
            }
            _ => {}
        }
    }
    assert!(accessed.len() > dirty.len());
}

/// Fails unless the filter of each vCPU is a set of at most [`FILTER`] pages, which holds every page that is walked to.
fn assert_filter(records: &[Record], vcpus: usize) {
    let mut filters = vec![BTreeSet::new(); vcpus];
    let mut entering = None;
    for record in records {
        let follows = std::mem::take(&mut entering);
        match *record {
            Record::Enter { vcpu, frame, .. } => {
                let filter = &mut filters[usize::from(vcpu)];
                if filter.len() == FILTER {
                    entering = Some(vcpu);
                }
                assert!(filter.insert(frame), "{record:?}");
            }
            Record::Leave { vcpu, frame } => {
                assert_eq!(follows, Some(vcpu), "{record:?}");
                assert!(filters[usize::from(vcpu)].remove(&frame), "{record:?}");
            }
            Record::Walk(walk) => {
                let filter = &filters[usize::from(walk.vcpu)];
                assert!(filter.contains(&walk.frame), "{record:?}");
            }
            _ => {}
        }
        if let Some(vcpu) = follows {
            assert_eq!(filters[usize::from(vcpu)].len(), FILTER, "{record:?}");
        }
    }
    assert!(filters.iter().all(|filter| filter.len() == FILTER));
}

fn walks(records: &[Record]) -> impl Iterator<Item = &Walk> {
    records.iter().filter_map(|record| match record {
        Record::Walk(walk) => Some(walk),
        _ => None,
    })
}

fn distinct(records: &[Record]) -> u64 {
    walks(records)
        .map(|walk| walk.frame)
        .collect::<BTreeSet<_>>()
        .len() as u64
}

/// Fails unless the log begins and ends with the guest's marks, each after the state of all vCPUs.
fn assert_marks(records: &[Record], vcpus: usize) {
    let marks: Vec<_> = records
        .iter()
        .enumerate()
        .filter_map(|(at, record)| match record {
            Record::Mark { id, .. } => Some((at, *id)),
            _ => None,
        })
        .collect();
    let states = 2 * vcpus;
    assert_eq!(marks, [(states, MARK_BEGIN), (records.len() - 1, MARK_END)]);
    for (at, _) in marks {
        for (vcpu, pair) in records[at - states..at].chunks(2).enumerate() {
            let of_vcpu = matches!(
                pair,
                [Record::Clock { vcpu: clock, .. }, Record::Accesses { vcpu: count, .. }]
                    if usize::from(*clock) == vcpu && usize::from(*count) == vcpu
            );
            assert!(of_vcpu, "{pair:?}");
        }
    }
}

/// Fails unless intervals of one vCPU have their instructions.
fn assert_intervals(records: &[Record]) {
    let (mut begin, mut clock, mut accesses) = (None, 0, 0);
    let mut intervals = 0;
    for record in records {
        match *record {
            Record::Clock { instructions, .. } => clock = instructions,
            Record::Walk(walk) => clock += u64::from(walk.step_instructions),
            Record::Mark { id: MARK_BEGIN, .. } => begin = Some(clock),
            Record::Accesses { count, .. } => accesses = count,
            Record::Interval { number } => {
                assert_eq!(number, intervals);
                intervals += 1;
                let late = clock - begin.unwrap() - intervals * INTERVAL;
                assert!(late < LATE_MAX, "interval {number} ends {late} late");
                // An instruction in three to thirty accesses memory, and blocks that are fetched have a few.
                assert!(
                    (INTERVAL / 30..INTERVAL * 2 / 3).contains(&accesses),
                    "{accesses}"
                );
            }
            _ => {}
        }
    }
    assert!(intervals >= 5, "{intervals}");
}

#[test]
fn an_array_that_is_passed_over_is_walked_to_and_referred_to_page_by_page() {
    let Some(ground) = ground() else { return };
    for qemu in each_qemu(&ground) {
        let options = "--between-marks --interval 10M --references --itlb 64x4 --tlb2 512x4";
        let run = ground.record(&qemu, &arrays(), options);
        let description = &run.description;
        assert_eq!(description.plugin_api, qemu.api);
        assert_eq!((description.vcpus, description.ram_bytes), (1, 192 << 20));
        assert_eq!(description.tlb2, TlbShape::new(512, 4).ok());
        assert_marks(&run.records, 1);
        assert_intervals(&run.records);
        assert_flags(&run.records);
        assert_filter(&run.records, 1);
        let pages = distinct(&run.records);
        assert!((ARRAY..ARRAY + NOISE).contains(&pages), "{pages}");
        assert!(walks(&run.records).any(|walk| walk.fetch && !walk.write));
        let visits = run.told("done", "ops") / ARRAY;
        assert!(visits >= 10, "{visits}");
        // The last pass may be cut short; now and then an interrupt or the end of an interval divides a visit in two.
        for place in ["first", "middle", "last"] {
            let frame = run.told("placed", place);
            let entered = run.records.iter().filter(
                |record| matches!(record, Record::Enter { frame: page, .. } if page.0 == frame),
            );
            let entered = entered.count() as u64;
            assert!(
                (visits..visits + 4).contains(&entered),
                "{place}: {entered} of {visits}"
            );
            // Each visit begins with a read; the write to the page that is now in the TLB walks again.
            let of_page = |write| {
                let walks = walks(&run.records);
                walks
                    .filter(|walk| walk.frame.0 == frame && walk.write == write)
                    .count() as u64
            };
            let (read, written) = (of_page(false), of_page(true));
            assert!(
                (visits..visits + 4).contains(&read),
                "{place}: {read} of {visits}"
            );
            let half = visits / 2;
            assert!(
                (half..half + 4).contains(&written),
                "{place}: {written} of {half}"
            );
        }
    }
}

#[test]
fn two_vcpus_and_memory_above_the_hole_are_told_by_their_frames() {
    let Some(ground) = ground() else { return };
    for qemu in each_qemu(&ground) {
        let machine = Machine {
            memory_mib: 5120,
            vcpus: 2,
            workload: "workload=arrays array=WWRR mib=24 seconds=2 step_ms=1000 threads=2",
            extra: &[],
        };
        let options = "--between-marks --interval 10M --references";
        let run = ground.record(&qemu, &machine, options);
        assert_eq!(
            (run.description.vcpus, run.description.below_4g_bytes),
            (2, 2 << 30)
        );
        assert_marks(&run.records, 2);
        assert_flags(&run.records);
        assert_filter(&run.records, 2);
        let pages = distinct(&run.records);
        assert!((ARRAY..ARRAY + NOISE).contains(&pages), "{pages}");
        for place in ["first", "middle", "last"] {
            let frame = run.told("placed", place);
            assert!(frame >= ABOVE_4G, "{place}: {frame:#x}");
            assert!(
                walks(&run.records).any(|walk| walk.frame.0 == frame),
                "{place}"
            );
        }
        // Each vCPU passes over its own half.
        for vcpu in 0..2 {
            let own: Vec<_> = walks(&run.records)
                .filter(|walk| walk.vcpu == vcpu)
                .map(|&walk| Record::Walk(walk))
                .collect();
            assert!(distinct(&own) >= ARRAY / 2, "vCPU {vcpu}");
        }
    }
}

#[test]
fn a_repeatable_machine_gives_the_same_log_again() {
    let Some(ground) = ground() else { return };
    for qemu in each_qemu(&ground) {
        let machine = Machine {
            workload: "workload=zipf mib=16 seconds=1",
            ..arrays()
        };
        let record = || {
            let run = ground.record(&qemu, &machine, "--interval 10M --references");
            let mut records = run.records;
            // How far a machine runs on that powers itself off is the host's affair.
            let end = Record::Mark {
                vcpu: 0,
                id: MARK_END,
            };
            let end = records.iter().position(|record| *record == end);
            records.truncate(end.expect("an end"));
            records
        };
        let (one, other) = (record(), record());
        assert!(one.len() > 100_000, "{}", one.len());
        let differs = one.iter().zip(&other).position(|(one, other)| one != other);
        assert_eq!((differs, one.len()), (None, other.len()));
    }
}

#[test]
fn the_hot_pages_of_a_run_cover_the_next_run_of_the_guest() {
    let Some(ground) = ground() else { return };
    let qemu = Qemu::of_the_system();
    let folder = tempfile::tempdir().unwrap();
    let [before, next] = [
        ("before", "workload=zipf mib=32 alpha=0.8 seconds=12 seed=1"),
        ("next", "workload=zipf mib=32 alpha=0.8 seconds=12 seed=2"),
    ]
    .map(|(name, workload)| {
        let log = folder.path().join(name);
        let machine = Machine {
            memory_mib: 256,
            workload,
            ..arrays()
        };
        // What is used after the array is there: as if the machine, which is the same up to then, were resumed from a
        // snapshot of that time.
        ground.record_in(&log, &qemu, &machine, "--interval 10M --between-marks");
        log
    });
    let list = |top: u64| -> Value {
        let mut command = Command::new(PLIMSOLL);
        command.args([
            "report",
            "hot",
            "-o",
            "json",
            "--top",
            &top.to_string(),
            "--from",
        ]);
        command.arg(&before).arg("--check").arg(&next);
        let output = command.output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let used = list(1 << 40)["check"]["used_bytes"].as_u64().unwrap();
    for share in [100, 130] {
        let found = list(used * share / 100);
        let covered = |key: &str| found["check"][key].as_f64().unwrap();
        let (uses, pages) = (covered("uses_covered"), covered("pages_covered"));
        println!("{share} % of {used} bytes: {uses:.4} of its walks, {pages:.4} of its pages");
        assert!(
            share == 100 || (uses >= 0.9 && pages >= 0.9),
            "{uses} {pages}"
        );
    }
}

#[test]
fn a_machine_whose_reader_dies_goes_on_and_counts_what_is_lost() {
    let Some(ground) = ground() else { return };
    for qemu in each_qemu(&ground) {
        let ring = Ring::create(1 << 14).unwrap();
        let plugin = ground.plugin(&qemu);
        let ring_path = ring.path().display().to_string();
        let options = format!("file={plugin},ring={ring_path},ram={}", 192 << 20);
        let machine = Machine {
            workload: "workload=arrays array=RWRW mib=16 seconds=2",
            ..arrays()
        };
        let guest = ground.start(&qemu, &machine, &["-plugin", &options]);
        let mut reader = ring
            .wait_for_writer(Duration::from_secs(60), || true)
            .unwrap();
        let mut batch = Vec::new();
        for _ in 0..4 {
            assert!(reader.next_batch(&mut batch).unwrap());
        }
        drop(reader);
        let (code, out, errors) = guest.end();
        assert_eq!(code, Some(0), "{errors}");
        assert!(out.contains("plimsoll: done "), "{out}");
        assert!(
            errors.contains("the guest goes on, what follows is lost"),
            "{errors}"
        );
        let lost = errors.lines().find_map(|line| {
            let (before, _) = line.rsplit_once(" lost")?;
            before.rsplit(' ').next()?.parse::<u64>().ok()
        });
        assert!(lost.is_some_and(|lost| lost > 100_000), "{errors}");
    }
}

#[test]
fn what_the_plugin_cannot_do_is_refused_before_the_guest_starts() {
    let Some(ground) = ground() else { return };
    for qemu in each_qemu(&ground) {
        let plugin = ground.plugin(&qemu);
        let ring = Ring::create(16).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let junk = folder.path().join("junk");
        std::fs::write(&junk, [0; 8192]).unwrap();
        let path = ring.path().display().to_string();
        let good = format!("ring={path},ram=201326592");
        let with = |options: &str| format!("{good},{options}");
        for (options, complaint) in [
            (
                "ram=201326592".to_owned(),
                "ring=PATH and ram=BYTES must be given",
            ),
            (
                format!("ring={path}"),
                "ring=PATH and ram=BYTES must be given",
            ),
            (
                format!("ring={path},ram=1000"),
                "ram=1000: expected a number from 4096",
            ),
            (
                format!("ring={path},ram=8191"),
                "ram=8191: expected a multiple of 4096",
            ),
            (
                format!("ring={path},ram=5368709120"),
                "below_4g: expected at most ram",
            ),
            (with("below_4g=402653184"), "below_4g: expected at most ram"),
            (with("tlb=64"), "tlb=64: expected a number from 1"),
            (with("tlb=64x0"), "tlb=0: expected a number from 1 to 64"),
            (with("tlb=60x4"), "entries / ways must be a power of two"),
            (with("tlb2=x"), "tlb2=x: expected a number"),
            (
                with("itlb=99999999x1"),
                "itlb=99999999x1: expected a number",
            ),
            (with("tlb_page=8192"), "expected 4096 or 2097152"),
            (
                with("interval_instructions=10"),
                "expected a number from 1000",
            ),
            (
                with("interval_instructions=-1"),
                "expected a number from 1000",
            ),
            (with("walks=maybe"), "walks=maybe: expected on or off"),
            (with("walks=off"), "nothing is left to record"),
            (
                with("references=on,tlb_page=2097152"),
                "references=on needs tlb_page=4096",
            ),
            (with("filter=0"), "filter=0: expected a number from 1"),
            (with("colour=red"), "there is no option colour"),
            (
                "ring=/nowhere,ram=201326592".to_owned(),
                "ring /nowhere: No such file",
            ),
            (
                format!("ring={},ram=201326592", junk.display()),
                "nobody reads it",
            ),
            ("ring=/dev/null,ram=201326592".to_owned(), "not a ring"),
        ] {
            let options = format!("file={plugin},{options}");
            let guest = ground.start(&qemu, &arrays(), &["-plugin", &options]);
            let (code, _, errors) = guest.end();
            assert_eq!(code, Some(1), "{options}: {errors}");
            assert!(errors.contains(complaint), "{options}: {errors}");
        }
    }
}

#[test]
fn a_log_that_cannot_be_is_refused_by_the_command() {
    let Some(ground) = ground() else { return };
    let qemu = Qemu::of_the_system();
    for (options, qemu_arguments, code, complaint) in [
        (
            "--page-log /nowhere/log",
            "",
            1,
            "cannot create the page log /nowhere/log",
        ),
        ("--page-log /dev/null", "-accel kvm", 2, "must emulate"),
        (
            "--page-log /dev/null --plugin /nowhere.so",
            "",
            1,
            "/nowhere.so",
        ),
        ("--page-log /dev/null --interval 10", "", 2, "at least 1000"),
        ("--page-log /dev/null --tlb 60x4", "", 2, "power of two"),
        ("--interval 10M", "", 2, "--page-log"),
    ] {
        let (found, errors) = ground.refused(&qemu, options, qemu_arguments);
        assert_eq!(found, Some(code), "{options} {qemu_arguments}: {errors}");
        assert!(errors.contains(complaint), "{options}: {errors}");
    }
}
