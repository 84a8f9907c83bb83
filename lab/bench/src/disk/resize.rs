//! A cache that becomes smaller: the longest step, for which the disks are not served, and all of it, beside a resize at once.

use std::io::Write;

use plimsoll_hcache::{ClientOptions, Handle, PAGE_BYTES, PoolOptions, Store, StoreOptions};

use crate::measure::{Clock, Watch};
use crate::random::Random;
use crate::title;

const MIB: u64 = 1 << 20;
/// Capacity before, and those after.
const FROM_MIB: u64 = 2048;
const TO_MIB: [u64; 4] = [1984, 1024, 256, 64];
/// Pages of a step, as in the disk server.
const STEP_PAGES: usize = 1024;

/// A full store, as a disk's cache: blocks in random order, of one object.
fn full() -> anyhow::Result<Store> {
    let store = Store::new(StoreOptions {
        shards: 1,
        ..StoreOptions::new(FROM_MIB * MIB)
    })?;
    let client = store.create_client(ClientOptions::new("disk"))?;
    let pool = client.create_pool(PoolOptions::private())?;
    let pages = usize::try_from(FROM_MIB * MIB)? / PAGE_BYTES;
    for block in Random::new(1).order(2 * pages) {
        let handle = Handle {
            pool,
            object: 0,
            index: u32::try_from(block)?,
        };
        client.put(handle, &[0x5a; PAGE_BYTES])?;
    }
    // Its pages are dropped with it.
    std::mem::forget(client);
    Ok(store)
}

/// Runs the part.
pub(super) fn run(out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "disk: a full cache of {FROM_MIB} MiB becomes smaller, CPU time in ms, in steps of {STEP_PAGES} pages"
        ),
    )?;
    writeln!(
        out,
        "\n{:<10} {:>10} {:>12} {:>8} {:>14}",
        "to MiB", "at once", "all steps", "steps", "longest step"
    )?;
    for to_mib in TO_MIB {
        let store = full()?;
        let watch = Watch::start(Clock::Cpu);
        store.resize(to_mib * MIB)?;
        let at_once = watch.seconds();
        drop(store);
        let store = full()?;
        let (mut all, mut longest, mut steps) = (0.0, 0.0_f64, 0);
        let mut done = false;
        while !done {
            let watch = Watch::start(Clock::Cpu);
            done = store.resize_step(to_mib * MIB, STEP_PAGES)?;
            let step = watch.seconds();
            (all, longest, steps) = (all + step, longest.max(step), steps + 1);
        }
        writeln!(
            out,
            "{to_mib:<10} {:>10.1} {:>12.1} {steps:>8} {:>14.2}",
            at_once * 1e3,
            all * 1e3,
            longest * 1e3
        )?;
        out.flush()?;
    }
    Ok(())
}
