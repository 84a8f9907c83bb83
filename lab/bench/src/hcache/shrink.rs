//! How long puts wait while a full store shrinks to a quarter.
//!
//! A thread puts pages one by one, each timed by the wall clock, for as long as the resize takes, and before it for a second.
//! On a machine with other load, the times before show what that load does.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_hcache::{Client, PAGE_BYTES, PoolId, PoolOptions, StoreOptions};

use super::pages::{handle, sign};
use super::{Args, store_of};
use crate::random::Random;
use crate::{Cli, title};

/// Runs the part.
pub(super) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "hcache: puts while a store of {} MiB shrinks to a quarter",
            args.region_mib
        ),
    )?;
    writeln!(
        out,
        "\n{:<20} {:>9} {:>24} {:>24}",
        "", "resize", "puts before, ms", "puts meanwhile, ms"
    )?;
    writeln!(
        out,
        "{:<20} {:>9} {:>8} {:>7} {:>7} {:>8} {:>7} {:>7}",
        "pages", "s", "longest", "99.9 %", "99 %", "longest", "99.9 %", "99 %"
    )?;
    for (name, compression) in [("raw", false), ("compressed in part", true)] {
        for _ in 0..cli.runs.clamp(1, 3) {
            let capacity_bytes = (args.region_mib as u64) << 20;
            let options = StoreOptions {
                compression,
                ..StoreOptions::new(capacity_bytes)
            };
            let (client, pool) = store_of(options, PoolOptions::private())?;
            let pages = capacity_bytes / PAGE_BYTES as u64;
            let mut page = [0; PAGE_BYTES];
            for number in Random::new(1).order(usize::try_from(pages)?) {
                sign(&mut page, number as u64);
                client.put(handle(pool, number as u64), &page)?;
            }
            let before = timed(&client, pool, pages, || {
                thread::sleep(Duration::from_secs(1));
                Ok(())
            })?;
            let watch = Instant::now();
            let meanwhile = timed(&client, pool, pages, || {
                Ok(client.store().resize(capacity_bytes / 4)?)
            })?;
            write!(out, "{name:<20} {:>9.2}", watch.elapsed().as_secs_f64())?;
            for times in [before, meanwhile] {
                let [longest, thousandth, hundredth] = tail(times);
                write!(out, " {longest:>8.2} {thousandth:>7.3} {hundredth:>7.3}")?;
            }
            writeln!(out)?;
        }
    }
    Ok(())
}

/// The times of puts of random pages while `work` runs, in nanoseconds.
fn timed(
    client: &Client,
    pool: PoolId,
    pages: u64,
    work: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Vec<u64>> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let putting = scope.spawn(|| {
            let mut random = Random::new(3);
            let mut times = Vec::with_capacity(1 << 22);
            let page = [5; PAGE_BYTES];
            while !stop.load(Ordering::Relaxed) {
                let number = random.below(usize::try_from(pages)?) as u64;
                let watch = Instant::now();
                client.put(handle(pool, number), &page)?;
                times.push(u64::try_from(watch.elapsed().as_nanos())?);
            }
            anyhow::Ok(times)
        });
        let worked = work();
        stop.store(true, Ordering::Relaxed);
        let times = putting.join().expect("a put does not panic")?;
        worked?;
        Ok(times)
    })
}

/// The longest time, and those that a thousandth and a hundredth exceed, in milliseconds.
fn tail(mut times: Vec<u64>) -> [f64; 3] {
    times.sort_unstable();
    let at = |share: usize| times.get(times.len().saturating_sub(1 + times.len() / share));
    let ms = |time: Option<&u64>| time.map_or(0.0, |&ns| ns as f64 / 1e6);
    [ms(times.last()), ms(at(1000)), ms(at(100))]
}
