//! hcache compared to caches of values: get, else put.
//!
//! Each cache runs in a process of its own and has the same capacity in bytes. hcache counts its metadata towards it;
//! the others take a number of values, here that of the pages alone, each an `Arc<[u8]>`. A page that is found is
//! either copied out, or read in place: one line of it. Every page is checked to be the one requested.

use std::io::Write;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Instant;

use foyer_memory::{Cache as Foyer, CacheBuilder as FoyerBuilder, S3FifoConfig};
use moka::policy::EvictionPolicy;
use moka::sync::Cache as Moka;
use plimsoll_flow::{PageCount, ReferenceBatch, Source};
use plimsoll_hcache::{Client, LRU, PAGE_BYTES, Page, PoolId, PoolOptions, StoreOptions};
use plimsoll_source::synthetic::{Pattern, Workload};

use super::pages::handle;
use super::region::proc_bytes;
use super::store_of;
use crate::child;
use crate::measure::median;
use crate::{Cli, title};

/// References that fill the cache first, and those that are measured, in a process.
const REFERENCES: usize = 1 << 19;

/// Of so many references, `SCANNED` go through pages in turn.
const STRETCH: usize = 1 << 15;
const SCANNED: usize = 1 << 12;

/// A cache in a process of its own.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    #[arg(value_enum)]
    which: CacheKind,
    #[arg(long)]
    mib: usize,
    #[arg(long)]
    threads: usize,
    #[arg(long)]
    copied: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum CacheKind {
    Hcache,
    HcacheLru,
    Moka,
    MokaLru,
    QuickCache,
    Foyer,
    FoyerS3Fifo,
}

impl CacheKind {
    const ALL: [(Self, &str, &str); 7] = [
        (Self::Hcache, "hcache", "hcache, default policy"),
        (Self::HcacheLru, "hcache-lru", "hcache, LRU"),
        (Self::Moka, "moka", "moka, TinyLFU"),
        (Self::MokaLru, "moka-lru", "moka, LRU"),
        (
            Self::QuickCache,
            "quick-cache",
            "quick_cache, Clock-Pro/S3-FIFO",
        ),
        (Self::Foyer, "foyer", "foyer, LRU"),
        (Self::FoyerS3Fifo, "foyer-s3-fifo", "foyer, S3-FIFO"),
    ];
}

/// Operations that all of them support.
trait Cache: Sync {
    /// Passes page `number` to `read` if it is there.
    fn look(&self, number: u64, read: impl FnOnce(&[u8])) -> bool;
    fn keep(&self, number: u64, page: &Page);
    fn pages(&self) -> u64;
}

struct OwnCache(Client, PoolId);

impl Cache for OwnCache {
    fn look(&self, number: u64, read: impl FnOnce(&[u8])) -> bool {
        let found = self.0.get_with(handle(self.1, number), |page| read(page));
        found.expect("the pool is there")
    }

    fn keep(&self, number: u64, page: &Page) {
        self.0
            .put(handle(self.1, number), page)
            .expect("the pool is there");
    }

    fn pages(&self) -> u64 {
        self.0.store().stats().pages
    }
}

type Value = Arc<[u8]>;

impl Cache for Moka<u64, Value> {
    fn look(&self, number: u64, read: impl FnOnce(&[u8])) -> bool {
        self.get(&number).map(|page| read(&page)).is_some()
    }

    fn keep(&self, number: u64, page: &Page) {
        self.insert(number, Arc::from(&page[..]));
    }

    fn pages(&self) -> u64 {
        self.run_pending_tasks();
        self.entry_count()
    }
}

impl Cache for quick_cache::sync::Cache<u64, Value> {
    fn look(&self, number: u64, read: impl FnOnce(&[u8])) -> bool {
        self.get(&number).map(|page| read(&page)).is_some()
    }

    fn keep(&self, number: u64, page: &Page) {
        self.insert(number, Arc::from(&page[..]));
    }

    fn pages(&self) -> u64 {
        self.len() as u64
    }
}

impl Cache for Foyer<u64, Value> {
    fn look(&self, number: u64, read: impl FnOnce(&[u8])) -> bool {
        self.get(&number).map(|page| read(page.value())).is_some()
    }

    fn keep(&self, number: u64, page: &Page) {
        self.insert(number, Arc::from(&page[..]));
    }

    fn pages(&self) -> u64 {
        self.entries() as u64
    }
}

/// Runs the part: each cache in turn, with one thread and with two, as many times as configured.
pub(super) fn run(cli: &Cli, args: &super::Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "hcache beside caches of values: get, else put; {} MiB, Zipf 0.9 over 4 x that, 1/{} scans",
            args.cache_mib,
            STRETCH / SCANNED
        ),
    )?;
    writeln!(
        out,
        "\n{:<32} {:>17} {:>17} {:>10} {:>9} {:>9}",
        "", "copied out, M/s", "in place, M/s", "hit ratio", "pages", "peak RSS"
    )?;
    writeln!(
        out,
        "{:<32} {:>8} {:>8} {:>8} {:>8} {:>10} {:>9} {:>9}",
        "threads", "1", "2", "1", "2", "", "", "B/page"
    )?;
    let ways = [(true, "1"), (true, "2"), (false, "1"), (false, "2")];
    let mut rates = CacheKind::ALL.map(|_| ways.map(|_| Vec::new()));
    let mut held = CacheKind::ALL.map(|_| [0.0; 3]);
    let mib = args.cache_mib.to_string();
    for _ in 0..cli.runs.clamp(1, 3) {
        for (number, (_, name, _)) in CacheKind::ALL.iter().enumerate() {
            for (way, &(copied, threads)) in ways.iter().enumerate() {
                let mut words = vec!["hcache-cache", name, "--mib", &mib, "--threads", threads];
                if copied {
                    words.push("--copied");
                }
                let found = child::numbers(words)?;
                let &[rate, ratio, pages, bytes] = &found[..] else {
                    anyhow::bail!("a process of ours printed {found:?}");
                };
                rates[number][way].push(rate);
                if way == 0 {
                    held[number] = [ratio, pages, bytes];
                }
            }
        }
    }
    for (((_, _, title), rates), [ratio, pages, bytes]) in
        CacheKind::ALL.iter().zip(rates).zip(held)
    {
        let [a, b, c, d] = rates.map(median);
        writeln!(
            out,
            "{title:<32} {a:>8.2} {b:>8.2} {c:>8.2} {d:>8.2} {ratio:>10.3} {pages:>9.0} {bytes:>9.0}"
        )?;
    }
    Ok(())
}

/// Runs one cache and prints million references a second, the hit ratio, pages held, and bytes
/// of peak resident memory that each costs.
pub(crate) fn run_one(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let bytes = args.mib << 20;
    let values = bytes / PAGE_BYTES;
    let all = references(values as u64 * 4, 2 * REFERENCES * args.threads)?;
    let references: Vec<_> = all.chunks(2 * REFERENCES).collect();
    let before = proc_bytes("/proc/self/status", "VmRSS")?;
    let figures = match args.which {
        which @ (CacheKind::Hcache | CacheKind::HcacheLru) => {
            let mut options = StoreOptions::new(bytes as u64);
            if which == CacheKind::HcacheLru {
                options.eviction = LRU;
            }
            let (client, pool) = store_of(options, PoolOptions::shared(1))?;
            drive(&OwnCache(client, pool), &references, args.copied)?
        }
        CacheKind::Moka => drive(&Moka::new(values as u64), &references, args.copied)?,
        CacheKind::MokaLru => {
            let builder = Moka::builder().max_capacity(values as u64);
            let cache = builder.eviction_policy(EvictionPolicy::lru()).build();
            drive(&cache, &references, args.copied)?
        }
        CacheKind::QuickCache => {
            let cache = quick_cache::sync::Cache::new(values);
            drive(&cache, &references, args.copied)?
        }
        CacheKind::Foyer => {
            let cache: Foyer<u64, Value> = FoyerBuilder::new(values).build();
            drive(&cache, &references, args.copied)?
        }
        CacheKind::FoyerS3Fifo => {
            let builder = FoyerBuilder::new(values).with_eviction_config(S3FifoConfig::default());
            let cache: Foyer<u64, Value> = builder.build();
            drive(&cache, &references, args.copied)?
        }
    };
    let [rate, ratio, pages] = figures;
    let peak = proc_bytes("/proc/self/status", "VmHWM")?.saturating_sub(before);
    writeln!(out, "{rate} {ratio} {pages} {}", peak as f64 / pages)?;
    Ok(())
}

/// Page numbers: those of a Zipf law, and every so often a stretch of pages in turn.
pub(super) fn references(pages: u64, count: usize) -> anyhow::Result<Vec<u64>> {
    let mut workload = Workload::of(Pattern::Zipf {
        pages: PageCount(pages),
        alpha: 0.9,
        references: count as u64,
    });
    workload.scrambled = true;
    let mut source = workload.source()?;
    let mut found = Vec::with_capacity(count);
    loop {
        let mut batch = ReferenceBatch::new();
        if !source.next_batch(&mut batch)? {
            break;
        }
        found.extend(batch.pages().iter().map(|page| page.0));
    }
    let mut next = 0;
    for stretch in found.chunks_mut(STRETCH) {
        for number in stretch.iter_mut().take(SCANNED) {
            *number = next % pages;
            next += 1;
        }
    }
    Ok(found)
}

/// Returns million references a second, the hit ratio, and pages held at the end.
fn drive<C: Cache>(cache: &C, references: &[&[u64]], copied: bool) -> anyhow::Result<[f64; 3]> {
    let start = Barrier::new(references.len() + 1);
    let filled = Barrier::new(references.len() + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = references
            .iter()
            .map(|references| {
                let (start, filled) = (&start, &filled);
                scope.spawn(move || {
                    let (warm, measured) = references.split_at(REFERENCES);
                    start.wait();
                    serve(cache, warm, copied);
                    filled.wait();
                    serve(cache, measured, copied)
                })
            })
            .collect();
        start.wait();
        filled.wait();
        let watch = Instant::now();
        let mut hits = 0;
        for thread in threads {
            hits += thread.join().expect("a page is the one asked for");
        }
        let seconds = watch.elapsed().as_secs_f64();
        let all = (REFERENCES * references.len()) as f64;
        let rate = all / 1e6 / seconds;
        Ok([rate, hits as f64 / all, cache.pages() as f64])
    })
}

/// Returns the number of hits.
fn serve<C: Cache>(cache: &C, references: &[u64], copied: bool) -> u64 {
    let mut buffer = [0; PAGE_BYTES];
    let mut fresh = [0; PAGE_BYTES];
    let mut hits = 0;
    for &number in references {
        let mut seen = [0; 8];
        let found = cache.look(number, |page| {
            if copied {
                buffer.copy_from_slice(page);
                seen.copy_from_slice(&buffer[..8]);
            } else {
                seen.copy_from_slice(&page[..8]);
            }
        });
        if found {
            assert_eq!(u64::from_le_bytes(seen), number, "a wrong page");
            hits += 1;
        } else {
            fresh[..8].copy_from_slice(&number.to_le_bytes());
            cache.keep(number, &fresh);
        }
    }
    std::hint::black_box(&buffer);
    hits
}
