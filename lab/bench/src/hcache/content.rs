//! Compression, and pages of the same content: rates, and how many pages the same memory holds.

use std::io::Write;
use std::time::Duration;

use anyhow::Context as _;

use plimsoll_hcache::{Page, PoolOptions, Sharing, StoreOptions};

use super::pages::handle;
use super::region::Region;
use super::{Args, store_of};
use crate::measure::{Clock, Watch};
use crate::random::Random;
use crate::title;

/// What pages hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    /// Random bytes.
    Random,
    /// LZ4 makes about a half of it: a half of each line random, the rest the same in all.
    Half,
    /// LZ4 makes about a quarter of it.
    Quarter,
    /// Zeros.
    Zero,
    /// A tenth zero, 4 tenths halves, 2 quarters, 3 random; a quarter of all pages are one of 256 contents.
    Mix,
}

impl Content {
    fn fill(self, page: &mut Page, random: &mut Random) {
        let mut lines = |random_words: usize, seed: u64| {
            let mut random = Random::new(seed);
            for line in page.chunks_exact_mut(128) {
                line.copy_from_slice(&[0x20; 128]);
                for word in line.chunks_exact_mut(8).take(random_words) {
                    word.copy_from_slice(&random.bits().to_le_bytes());
                }
            }
        };
        let seed = random.bits();
        match self {
            Self::Random => lines(16, seed),
            Self::Half => lines(7, seed),
            Self::Quarter => lines(3, seed),
            Self::Zero => page.fill(0),
            Self::Mix => {
                let seed = match random.below(4) {
                    0 => random.below(256) as u64,
                    _ => seed,
                };
                let kind = match Random::new(seed).below(10) {
                    0 => Self::Zero,
                    1..5 => Self::Half,
                    5..7 => Self::Quarter,
                    _ => Self::Random,
                };
                kind.fill(page, &mut Random::new(seed));
            }
        }
    }
}

/// Runs the part.
pub(super) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let capacity_mib = args.region_mib / 8;
    title(
        out,
        &format!(
            "hcache: compression and sharing; {} MiB put into a store of {capacity_mib} MiB",
            args.region_mib / 2
        ),
    )?;
    writeln!(
        out,
        "\n{:<22} {:<14} {:>8} {:>9} {:>9} {:>7} {:>10} {:>8}",
        "content", "switches", "put, ns", "got, ns", "pages", "x raw", "compressed", "shared"
    )?;
    let pages = args.region_mib * 128;
    for (name, content) in [
        ("incompressible", Content::Random),
        ("about 2:1", Content::Half),
        ("about 4:1", Content::Quarter),
        ("zeros", Content::Zero),
        ("mix", Content::Mix),
    ] {
        let mut region = Region::new(pages, true)?;
        let mut random = Random::new(7);
        for number in 0..pages {
            content.fill(region.page_mut(number), &mut random);
        }
        let raw = (capacity_mib * 256) as f64;
        for (switches, compression, sharing) in [
            ("none", false, Sharing::Off),
            ("LZ4", true, Sharing::Off),
            ("sharing", false, Sharing::WithinClient),
            ("LZ4, sharing", true, Sharing::WithinClient),
        ] {
            let mut options = StoreOptions::new((capacity_mib as u64) << 20);
            options.compression = compression;
            options.sharing = sharing;
            let held = of_store(options, &region)?;
            writeln!(
                out,
                "{name:<22} {switches:<14} {:>8.0} {:>9.0} {:>9} {:>7.2} {:>10} {:>8}",
                held.put_ns,
                held.got_ns,
                held.pages,
                held.pages as f64 / raw,
                held.compressed,
                held.shared
            )?;
        }
    }
    Ok(())
}

struct ContentResult {
    put_ns: f64,
    got_ns: f64,
    pages: u64,
    compressed: u64,
    shared: u64,
}

/// Puts all pages, and gets those that are left in another order; every byte is compared.
fn of_store(options: StoreOptions, region: &Region) -> anyhow::Result<ContentResult> {
    let (client, pool) = store_of(options, PoolOptions::shared(1))?;
    let pages = region.pages();
    let watch = Watch::start(Clock::Cpu);
    for number in 0..pages {
        client.put(handle(pool, number as u64), region.page(number))?;
        if number % (pages / 16).max(1) == 0 {
            client.store().turn(Duration::from_secs(number as u64));
        }
    }
    let put_ns = watch.seconds() * 1e9 / pages as f64;
    let stats = client.store().stats();
    anyhow::ensure!(
        stats.used_bytes <= stats.capacity_bytes,
        "{} of {} bytes are used",
        stats.used_bytes,
        stats.capacity_bytes
    );
    let mut page = [0; 4096];
    let mut left = Vec::new();
    for number in 0..pages {
        if client.peek(handle(pool, number as u64), &mut page)? {
            anyhow::ensure!(
                &page == region.page(number),
                "page {number} has wrong bytes"
            );
            left.push(number);
        }
    }
    let order = Random::new(9).order(left.len());
    let watch = Watch::start(Clock::Cpu);
    let mut hits = 0_u64;
    for at in order {
        hits += u64::from(client.get(handle(pool, left[at] as u64), &mut page)?);
    }
    let got_ns = watch.seconds() * 1e9 / left.len().max(1) as f64;
    anyhow::ensure!(hits > 0, "no page is left");
    let pool_stats = stats.pools().next().context("the store has a pool")?;
    Ok(ContentResult {
        put_ns,
        got_ns,
        pages: stats.pages,
        compressed: pool_stats.compressed_pages,
        shared: stats.deduplicated_pages,
    })
}
