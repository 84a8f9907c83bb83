//! All that a file system and the memory management do to pages; faults that the module must survive; rules left out.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_rig::GuestKernel::{V6_1, V6_12};
use plimsoll_rig::{DiskGuest, Guest, GuestOutput, Setup, make_image};
use plimsoll_serve::disk::Report;

use crate::rig::{
    PATIENCE, PLIMSOLL, assert_right, assert_sound, has, report, run, shared_turn, tell, turn,
};

/// A stressed guest of 128 MiB.
fn stressed(serve: &str, words: &str) -> Setup {
    let workload = format!("workload=disk-stress unload=1 {words}");
    let mut setup = Setup::new(&format!("--verify {serve}"), &workload);
    setup.memory_mib = 128;
    setup
}

/// A number of the module's statistics.
fn of_module(told: &GuestOutput, key: &str) -> u64 {
    told.number("plimsoll", None, key).unwrap_or_else(|_| {
        let has = told
            .results
            .iter()
            .find_map(|(name, fields)| fields.get(key).filter(|_| name == "plimsoll"));
        let text = has.unwrap_or_else(|| panic!("the module told of no {key}"));
        text.parse().unwrap()
    })
}

fn assert_all_sound(what: &str, told: &GuestOutput, report: &Report) {
    let engine = &report.machine.engine;
    tell(what, told, engine);
    assert_sound(told);
    assert_right(engine);
    assert_eq!(report.machine.ring.bad_records, 0);
    assert_eq!(report.machine.ring.faults, 0);
    assert!(engine.evictions > 0, "{engine:?}");
    assert!(told.number("unloaded", None, "modules").unwrap() > 0);
}

#[test]
fn nothing_wrong_is_served_under_stress_with_swap_on_a_cached_disk() {
    let Some(_turn) = shared_turn() else { return };
    let words = "module=copy swap=disk anon_mib=80 rounds=4 steps=50 threads=2";
    let mut setup = stressed("--cache 48M --write delayed", words);
    (setup.vcpus, setup.queues, setup.swap_mib) = (2, 2, 64);
    let (told, report) = run(&setup);
    assert_all_sound("stress and swap on a disk", &told, &report);
    let swapped = of_module(&told, "evicted_swap");
    println!("{swapped} pages evicted from the swap cache");
    assert!(swapped > 0 && report.machine.engine.hits > 0);
}

#[test]
fn nothing_wrong_is_served_under_stress_with_pages_not_copied_and_swap_in_memory() {
    let Some(_turn) = turn() else { return };
    if !has(V6_12) {
        return;
    }
    let words = "module=lazy swap=zram rounds=4 steps=60";
    let mut setup = stressed("--cache 48M", words);
    setup.kernel = V6_12;
    let (told, report) = run(&setup);
    assert_all_sound("stress, lazy, zram", &told, &report);
    assert_eq!(of_module(&told, "copies"), 0);
    assert!(report.machine.engine.hits > 0);
}

#[test]
fn nothing_wrong_is_served_under_stress_of_a_file_system_with_blocks_smaller_than_pages() {
    let Some(_turn) = shared_turn() else { return };
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    make_image(&image, 256, false).unwrap();
    let mut format = Command::new("mke2fs");
    format.args(["-q", "-t", "ext4", "-b", "1024"]).arg(&image);
    assert!(format.status().unwrap().success());
    let words = "module=copy swap=zram rounds=4 steps=80 threads=2";
    let mut setup = stressed("--cache 48M --write delayed", words);
    (setup.vcpus, setup.queues, setup.image) = (2, 2, Some(image));
    let (told, report) = run(&setup);
    assert_all_sound("stress, blocks of 1 KiB", &told, &report);
    let metadata = of_module(&told, "evicted_unready");
    println!("{metadata} pages of metadata evicted");
    assert!(metadata > 0 && report.machine.engine.hits > 0);
}

#[test]
fn lost_notices_are_counted_and_nothing_wrong_is_served_after_them() {
    let Some(_turn) = shared_turn() else { return };
    for (kernel, vcpus) in [(V6_1, 1), (V6_12, 2)] {
        if !has(kernel) {
            continue;
        }
        let words = "module=copy module.records=256 module.slots=64 provoke=missed:3,flood:1000 \
                     swap=zram rounds=3 steps=60";
        let mut setup = stressed("--cache 48M", words);
        (setup.kernel, setup.vcpus) = (kernel, vcpus);
        let (told, report) = run(&setup);
        let (full, missed) = (
            of_module(&told, "ring_full"),
            of_module(&told, "missed_folio_migrate_flags"),
        );
        let ring = &report.machine.ring;
        let engine = &report.machine.engine;
        println!(
            "{full} records found no room, {missed} events missed, the host knows of {}",
            ring.lost
        );
        assert_all_sound("a small ring", &told, &report);
        // A flood of 1000 into 256, less what the host takes meanwhile, and 3 events missed, in each of 3 rounds.
        assert!(full > 0 && missed >= 3 * 3, "{full} {missed}");
        assert!(ring.lost >= full + missed, "{ring:?}");
        assert!(engine.forgotten > 3, "{engine:?}");
    }
}

/// Rules that a guest breaks, each of which makes an unchecked cache wrong within seconds where pages are swapped
/// to memory: they come and go in frames of which the host still thinks that they hold blocks.
///
/// Silence about migrations, and admitting pages that are not the newest, take millions of evictions to do harm in
/// a guest; a model of one shows all four (crates/disk/tests/engine.rs).
const BROKEN: [&str; 2] = ["module.fault_no_add=1", "module.fault_drop_every=3"];

fn broken(rule: &str, serve: &str, rounds: u64) -> Setup {
    let words =
        format!("module=copy {rule} swap=zram rounds={rounds} steps=80 files=24 file_kib=4096");
    stressed(&format!("--cache 64M {serve}"), &words)
}

#[test]
#[cfg_attr(not(feature = "ablation"), ignore = "needs the feature ablation")]
fn without_hashes_a_guest_that_breaks_a_rule_is_served_wrong_pages() {
    let Some(_turn) = turn() else { return };
    for rule in BROKEN {
        let setup = broken(rule, "--no-hash-check", 100);
        let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let engine = loop {
            let ended = guest.guest().is_none_or(Guest::has_ended);
            let engine = report(&guest).machine.engine;
            if engine.wrong_served > 0 {
                break engine;
            }
            assert!(!ended && Instant::now() < deadline, "{rule}: {engine:?}");
            thread::sleep(Duration::from_millis(50));
        };
        tell(rule, guest.told(), &engine);
    }
}

#[test]
fn with_hashes_a_guest_that_breaks_a_rule_is_served_nothing_wrong() {
    let Some(_turn) = shared_turn() else { return };
    for rule in BROKEN {
        let (told, report) = run(&broken(rule, "", 3));
        let engine = &report.machine.engine;
        tell(rule, &told, engine);
        assert_sound(&told);
        assert_eq!(engine.wrong_served, 0, "{engine:?}");
        assert!(engine.refused_mismatch > 0 && engine.hits > 0, "{engine:?}");
    }
}
