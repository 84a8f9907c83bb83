//! The page store against its naive twin: whatever is asked of a store of 1 MiB, in any order, is answered as it may be.
#![no_main]

#[path = "../../crates/hcache/tests/common/content.rs"]
mod content;
#[path = "../../crates/hcache/tests/common/model.rs"]
mod model;
#[path = "../../crates/hcache/tests/common/random.rs"]
mod random;

use libfuzzer_sys::fuzz_target;
use plimsoll_hcache::{Sharing, StoreOptions};

use model::{EVEN, Step, Twin};

fuzz_target!(|input: &[u8]| {
    let Some((choice, steps)) = input.split_first() else {
        return;
    };
    let options = StoreOptions {
        max_capacity_bytes: 4 << 20,
        shards: if choice & 1 == 0 { 1 } else { 16 },
        compression: choice & 2 == 0,
        sharing: match choice >> 2 & 3 {
            0 | 1 => Sharing::Off,
            2 => Sharing::WithinClient,
            _ => Sharing::AcrossClients,
        },
        ..StoreOptions::new(1 << 20)
    };
    let mut twin = Twin::new(options, false);
    for step in steps.as_chunks().0 {
        twin.step(Step::new(u64::from_le_bytes(*step), EVEN));
    }
    twin.finish();
});
