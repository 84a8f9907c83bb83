//! Hit ratios of hcache's eviction policies beside those of other caches, at equal numbers of pages.
//!
//! *Shared*: get, on a miss put, in a shared pool. *Private*: behind a client's own pages in LRU order, a third as many as the
//! private pool has; a page that the client drops is put. Ratios are of the gets. Streams: the one of the part `caches`, and
//! every trace of a directory that can be read.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::Write;

use foyer_memory::{Cache as Foyer, CacheBuilder as FoyerBuilder, S3FifoConfig};
use moka::sync::Cache as Moka;
use plimsoll_flow::Whole as _;
use plimsoll_hcache::{
    EVICTION_POLICIES, EvictionPolicyRow, PAGE_BYTES, PoolOptions, StoreOptions,
};
use quick_cache::sync::Cache as QuickCache;

use super::pages::handle;
use super::{Args, caches, store_of};
use crate::{Cli, title};

/// Sizes as shares of a stream's pages.
const SHARES: [f64; 3] = [0.02, 0.1, 0.4];
/// Size below which there are too few pages for a ratio, and for shards.
const LEAST_PAGES: u64 = 64;
/// References of the stream that is made, and its pages.
const REFERENCES: usize = 1 << 20;
const PAGES: u64 = 1 << 18;

/// Runs the part.
pub(super) fn run(_: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        "hcache: hit ratios by eviction policy, at equal numbers of pages",
    )?;
    let mut streams = vec![(
        "Zipf 0.9 with scans".to_owned(),
        caches::references(PAGES, REFERENCES)?,
    )];
    for stream in crate::bands::traces_in(&args.traces, out)? {
        streams.push((stream.name, (stream.pages)(0)?));
    }
    write!(out, "\n{:<34} {:>8}", "", "pages")?;
    let names = EVICTION_POLICIES.map(|row| row.name);
    for name in names
        .into_iter()
        .chain(["quick_c", "foyer S3", "TinyLFU"])
        .chain(names)
    {
        write!(out, " {name:>8}")?;
    }
    writeln!(out)?;
    let mut sums = [0.0; 2 * EVICTION_POLICIES.len() + 3];
    let mut rows = 0;
    for (name, references) in streams {
        let numbers = dense(&references);
        let pages = numbers.iter().collect::<HashSet<_>>().len() as u64;
        for share in SHARES {
            let size = u64::whole(pages as f64 * share);
            if size < LEAST_PAGES {
                continue;
            }
            let mut ratios = Vec::new();
            for row in EVICTION_POLICIES {
                ratios.push(shared(row, size, &numbers)?);
            }
            ratios.extend(others(usize::try_from(size)?, &numbers));
            for row in EVICTION_POLICIES {
                ratios.push(private(row, size, &numbers)?);
            }
            write!(out, "{name:<34} {size:>8}")?;
            for (sum, ratio) in sums.iter_mut().zip(&ratios) {
                *sum += ratio;
                write!(out, " {ratio:>8.4}")?;
            }
            writeln!(out)?;
            rows += 1;
        }
    }
    write!(out, "{:<34} {:>8}", "mean", "")?;
    for sum in sums {
        write!(out, " {:>8.4}", sum / f64::from(rows))?;
    }
    writeln!(out)?;
    Ok(())
}

/// Pages numbered in the order in which they occur first.
fn dense(references: &[u64]) -> Vec<u64> {
    let mut numbers = HashMap::new();
    let number = |page: &u64| {
        let next = numbers.len() as u64;
        *numbers.entry(*page).or_insert(next)
    };
    references.iter().map(number).collect()
}

fn options(row: &'static EvictionPolicyRow, size: u64) -> StoreOptions {
    StoreOptions {
        eviction: row,
        ..super::roomy(usize::try_from(size).unwrap_or(usize::MAX))
    }
}

fn shared(row: &'static EvictionPolicyRow, size: u64, numbers: &[u64]) -> anyhow::Result<f64> {
    let pool = PoolOptions {
        capacity_pages: Some(size),
        ..PoolOptions::shared(1)
    };
    let (client, pool) = store_of(options(row, size), pool)?;
    let page = [0; PAGE_BYTES];
    for &number in numbers {
        let handle = handle(pool, number);
        if !client.get_with(handle, |_| ())? {
            client.put(handle, &page)?;
        }
    }
    ratio(client.store().stats().counters.hit_ratio())
}

fn private(row: &'static EvictionPolicyRow, size: u64, numbers: &[u64]) -> anyhow::Result<f64> {
    let pool = PoolOptions {
        capacity_pages: Some(size),
        ..PoolOptions::private()
    };
    let (client, pool) = store_of(options(row, size), pool)?;
    let page = [0; PAGE_BYTES];
    // The client's own pages by their last use, and all uses in order.
    let mut own: HashMap<u64, u64> = HashMap::new();
    let mut uses = VecDeque::new();
    for (now, &number) in (0..).zip(numbers) {
        if own.insert(number, now).is_none() {
            client.get_with(handle(pool, number), |_| ())?;
        }
        uses.push_back((number, now));
        while own.len() as u64 > size / 3 {
            let Some((oldest, at)) = uses.pop_front() else {
                break;
            };
            if own.get(&oldest) == Some(&at) {
                own.remove(&oldest);
                client.put(handle(pool, oldest), &page)?;
            }
        }
    }
    ratio(client.store().stats().counters.hit_ratio())
}

fn ratio(found: Option<f64>) -> anyhow::Result<f64> {
    found.ok_or_else(|| anyhow::anyhow!("no page was got"))
}

/// Caches of other authors, of `size` values.
fn others(size: usize, numbers: &[u64]) -> [f64; 3] {
    let quick = QuickCache::new(size);
    let foyer: Foyer<u64, ()> = FoyerBuilder::new(size)
        .with_eviction_config(S3FifoConfig::default())
        .build();
    let moka = Moka::new(size as u64);
    let mut hits = [0_u64; 3];
    for &number in numbers {
        let found = [
            quick.get(&number).is_some(),
            foyer.get(&number).is_some(),
            moka.get(&number).is_some(),
        ];
        if !found[0] {
            quick.insert(number, ());
        }
        if !found[1] {
            foyer.insert(number, ());
        }
        if !found[2] {
            moka.insert(number, ());
        }
        for (hits, found) in hits.iter_mut().zip(found) {
            *hits += u64::from(found);
        }
    }
    hits.map(|hits| hits as f64 / numbers.len() as f64)
}
