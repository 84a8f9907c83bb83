//! The store against its naive twin: random operations of several clients on pools of each kind, with pages of each
//! content, in stores of each configuration.

#[path = "common/content.rs"]
mod content;
#[path = "common/model.rs"]
mod model;
#[path = "common/random.rs"]
mod random;

use model::{EVEN, Kind, ROOMY_BYTES, Step, Twin, Weights};
use plimsoll_hcache::{EVICTION_POLICIES, EvictionPolicyRow, Sharing, StoreOptions};
use proptest::collection::vec;
use proptest::prelude::*;
use random::mixed;

/// Steps of a long run.
const STEPS: u64 = if cfg!(debug_assertions) {
    100_000
} else {
    300_000
};

/// For long runs: pools live long enough to fill.
const LONG: &Weights = &[
    (Kind::Put, 13_000),
    (Kind::PutRun, 200),
    (Kind::PutEach, 200),
    (Kind::Get, 10_000),
    (Kind::GetRun, 10),
    (Kind::GetEach, 200),
    (Kind::Peek, 2_500),
    (Kind::Flush, 1_000),
    (Kind::FlushRange, 50),
    (Kind::FlushObject, 30),
    (Kind::FlushPool, 3),
    (Kind::CreatePool, 8),
    (Kind::DestroyPool, 2),
    (Kind::Resize, 10),
    (Kind::Turn, 30),
    (Kind::DropClient, 1),
    (Kind::Stats, 20),
];

const SHARINGS: [Sharing; 3] = [Sharing::Off, Sharing::WithinClient, Sharing::AcrossClients];

fn options(
    roomy: bool,
    shards: usize,
    compression: bool,
    sharing: Sharing,
    eviction: &'static EvictionPolicyRow,
) -> StoreOptions {
    StoreOptions {
        eviction,
        max_capacity_bytes: if roomy { ROOMY_BYTES } else { 4 << 20 },
        shards,
        compression,
        sharing,
        ..StoreOptions::new(if roomy { ROOMY_BYTES } else { 1 << 20 })
    }
}

/// Runs a long sequence in a store of each sharing and number of shards.
fn run_long(roomy: bool, compression: bool) {
    for (seed, (index, sharing)) in (0_u64..).zip(SHARINGS.into_iter().enumerate()) {
        for (turn, shards) in [1, 64].into_iter().enumerate() {
            // Each policy with each number of shards; each with two of the three sharings.
            let eviction = EVICTION_POLICIES[(index + turn) % EVICTION_POLICIES.len()];
            println!(
                "roomy {roomy}, compression {compression}, {sharing:?}, {shards} shards, {eviction:?}"
            );
            let options = options(roomy, shards, compression, sharing, eviction);
            let mut twin = Twin::new(options, roomy);
            for number in 0..STEPS {
                twin.step(Step::new(mixed(number ^ seed << 40), LONG));
            }
            let counters = twin.finish();
            // Pages of a store that shares contents are not compressed.
            let packs = compression && !roomy && sharing == Sharing::Off;
            let unpacked = counters.decompressed_pages;
            assert!(!packs || unpacked > STEPS / 300, "{counters:?}");
            assert!(counters.compressed_pages >= unpacked, "{counters:?}");
            assert!(counters.evicted_pages > 0 || roomy);
            assert_eq!(counters.shared_pages > 0, sharing != Sharing::Off);
        }
    }
}

#[test]
fn a_roomy_store_gives_back_all_it_was_given() {
    run_long(true, false);
}

#[test]
fn a_roomy_store_that_compresses_gives_back_all_it_was_given() {
    run_long(true, true);
}

#[test]
fn a_full_store_gives_back_what_it_was_given_or_nothing() {
    run_long(false, false);
}

#[test]
fn a_full_store_that_compresses_gives_back_what_it_was_given_or_nothing() {
    run_long(false, true);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn short_sequences_agree(
        steps in vec(any::<u64>(), 1..600),
        roomy in any::<bool>(),
        shards in prop_oneof![2 => Just(1), 1 => Just(2), 1 => Just(64)],
        compression in any::<bool>(),
        sharing in prop::sample::select(&SHARINGS[..]),
        eviction in prop::sample::select(&EVICTION_POLICIES[..]),
    ) {
        let options = options(roomy, shards, compression, sharing, eviction);
        let mut twin = Twin::new(options, roomy);
        for bits in steps {
            twin.step(Step::new(bits, EVEN));
        }
        twin.finish();
    }
}
