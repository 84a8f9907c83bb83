//! Signed files read and overwritten: all reads right, and most of them from the cache.

use plimsoll_rig::GuestKernel::{V6_1, V6_12};
use plimsoll_rig::Setup;

use crate::rig::{assert_right, assert_sound, has, run, shared_turn, tell};

/// Memory of the guest and of the cache in MiB. Either way they hold all files together, and the guest alone does not.
const LARGE_GUEST: (u64, u64) = (128, 48);
const LARGE_CACHE: (u64, u64) = (112, 72);

#[test]
fn files_are_right_whatever_their_order_their_writes_and_the_split_of_memory() {
    let Some(_turn) = shared_turn() else { return };
    let (mut reads, mut blocks, mut hits) = (0, 0, 0);
    // Each order with each kernel and each way to write; each share of writes with each of both.
    for (order, write_percent, write, kernel, vcpus, (memory_mib, cache_mib)) in [
        ("sequential", 0, "through", V6_1, 1, LARGE_GUEST),
        ("sequential", 50, "delayed", V6_12, 2, LARGE_CACHE),
        ("random", 10, "delayed", V6_1, 2, LARGE_CACHE),
        ("random", 50, "through", V6_12, 1, LARGE_GUEST),
        ("zipf", 10, "through", V6_12, 2, LARGE_CACHE),
        ("zipf", 50, "delayed", V6_1, 1, LARGE_GUEST),
        ("class", 10, "through", V6_1, 1, LARGE_CACHE),
        ("class", 0, "delayed", V6_12, 1, LARGE_GUEST),
    ] {
        if !has(kernel) {
            continue;
        }
        let workload = format!(
            "workload=disk-signed module=copy order={order} write_percent={write_percent} files=80 warmup=1 rounds=2"
        );
        let mut setup = Setup::new(
            &format!("--cache {cache_mib}M --write {write} --verify"),
            &workload,
        );
        (setup.kernel, setup.vcpus, setup.memory_mib) = (kernel, vcpus, memory_mib);
        setup.queues = u16::try_from(vcpus).unwrap();
        let (told, report) = run(&setup);
        let engine = &report.machine.engine;
        let what = format!(
            "{order}, {write_percent} % writes {write}, Linux {}, {vcpus} CPUs, {memory_mib}+{cache_mib} MiB",
            kernel.series()
        );
        tell(&what, &told, engine);
        assert_sound(&told);
        assert_right(engine);
        assert_eq!(report.machine.ring.lost, 0);
        assert!(engine.hits * 2 >= engine.read_blocks, "{what}: {engine:?}");
        for phase in ["warmup", "measured"] {
            reads += told.number("files", Some(phase), "reads").unwrap();
        }
        (blocks, hits) = (blocks + engine.read_blocks, hits + engine.hits);
    }
    println!(
        "{reads} pages read and verified, {blocks} of them not from memory, {hits} from the cache"
    );
    assert!(hits > 0);
}

#[test]
fn metadata_that_the_guest_evicts_is_kept() {
    let Some(_turn) = shared_turn() else { return };
    // Many files, so that the blocks that describe them do not stay in memory either.
    let workload =
        "workload=disk-signed module=copy files=12000 file_kib=4 order=random warmup=1 rounds=2";
    let mut setup = Setup::new("--cache 72M --verify", workload);
    setup.memory_mib = 112;
    let (told, report) = run(&setup);
    let engine = &report.machine.engine;
    tell("metadata", &told, engine);
    assert_sound(&told);
    assert_right(engine);
    let of_module = |key| told.number("plimsoll", None, key).unwrap();
    let (copies, metadata) = (of_module("copies"), of_module("evicted_unready"));
    println!("{copies} pages were copied, {metadata} were not");
    assert!(metadata > 100, "{metadata}");
    // Some frames are used again before the host reads them.
    assert!(engine.admitted >= copies + metadata / 2, "{engine:?}");
}

#[test]
fn a_guest_that_decrypts_in_place_switches_the_cache_off_and_reads_right() {
    let Some(_turn) = shared_turn() else { return };
    // A device's pages go when it is closed: only what is larger than memory is evicted.
    let workload = "workload=disk-crypt module=copy files=1 file_kib=98304 warmup=0 rounds=2";
    let mut setup = Setup::new("--cache 40M --verify", workload);
    setup.formatted = false;
    setup.memory_mib = 112;
    let (told, report) = run(&setup);
    let engine = &report.machine.engine;
    tell("dm-crypt", &told, engine);
    println!("dm-crypt: {:?}", engine.disabled);
    assert_sound(&told);
    assert!(engine.disabled.is_some(), "{engine:?}");
    assert!(engine.refused_mismatch > 0 && engine.evictions > engine.refused_mismatch);
    assert_eq!((engine.wrong_served, engine.hits), (0, 0));
}
