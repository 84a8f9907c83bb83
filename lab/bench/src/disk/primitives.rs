//! The cost of the engine: hits, misses and admissions without I/O, compared to \[LS07\] table 1; and that table line by
//! line: the mapping tables and the cache alone, without hashes and copies.
//!
//! The engine is driven as by the daemon, with guest RAM in a memfd that is written by system calls, and storage that
//! completes at once: all blocks are equal, so that a buffer that was used once needs no filling. Blocks come in
//! random order, so pages and tables are cold.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use plimsoll_disk::{
    Action, CacheMode, Contents, DiskNumber, Engine, EngineOptions, GuestData, Location,
    MappingTables, Notice, Operation, OutsideRam, PAGE_BYTES, Page, Request, Segment, Status, Tag,
};
use plimsoll_hcache::{ClientOptions, Handle, LRU, PoolOptions, Store, StoreOptions};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::Cli;
use crate::measure::{Clock, Watch, median};
use crate::random::Random;
use crate::title;

/// Blocks read, admitted and read again.
const BLOCKS: usize = 16384;
/// The cache has room for them all.
const CACHE_BYTES: u64 = 96 << 20;

/// What all blocks are filled with.
const FILL: u8 = 0x5a;

/// RAM in a file, of so many frames.
pub(super) struct Memory(pub(super) File, u64);

impl Memory {
    pub(super) fn new(frames: u64) -> anyhow::Result<Self> {
        let file = File::from(memfd_create("plimsoll-bench", MemfdFlags::CLOEXEC)?);
        file.set_len(frames * PAGE_BYTES as u64)?;
        Ok(Self(file, frames))
    }
}

impl GuestData for Memory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam> {
        let outside = OutsideRam {
            address,
            bytes: bytes.len(),
        };
        self.0.read_exact_at(bytes, address).map_err(|_| outside)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideRam> {
        let outside = OutsideRam {
            address,
            bytes: bytes.len(),
        };
        self.0.write_all_at(bytes, address).map_err(|_| outside)
    }

    fn is_ram(&self, frame: u64) -> bool {
        frame < self.1
    }
}

/// An engine whose storage completes at once.
struct EngineDriver {
    engine: Engine,
    ram: Arc<Memory>,
    contents: Vec<Page>,
    next_tag: u64,
}

impl EngineDriver {
    fn new(mode: CacheMode) -> anyhow::Result<Self> {
        let ram = Memory::new(BLOCKS as u64)?;
        let contents = vec![[FILL; PAGE_BYTES]; BLOCKS];
        ram.0.write_all_at(contents.as_flattened(), 0)?;
        let options = EngineOptions {
            cache_bytes: CACHE_BYTES,
            cache_bytes_max: CACHE_BYTES,
            mode,
            ..EngineOptions::default()
        };
        Ok(Self {
            engine: Engine::new(options, None)?,
            ram: Arc::new(ram),
            contents,
            next_tag: 0,
        })
    }

    /// Reads a block into the frame of its number.
    fn read(&mut self, block: u64) -> anyhow::Result<()> {
        let at = block * PAGE_BYTES as u64;
        let tag = Tag(self.next_tag);
        self.next_tag += 1;
        self.engine.submit(Request {
            disk: DiskNumber(0),
            tag,
            operation: Operation::Read {
                offset: at,
                segments: vec![Segment {
                    address: at,
                    bytes: 4096,
                }],
            },
            ram: Arc::<Memory>::clone(&self.ram),
        });
        while let Some(submission) = self.engine.next_submission() {
            let Action::Read { mut buffer, .. } = submission.action else {
                anyhow::bail!("a submission that is no read");
            };
            if buffer.last() != Some(&FILL) {
                buffer.fill(FILL);
            }
            self.engine.carried_out(submission.id, Ok(()), Some(buffer));
        }
        let completed = self.engine.next_completed();
        let right = completed.is_some_and(|done| done.tag == tag && done.status == Status::Ok);
        anyhow::ensure!(right, "a read was not completed");
        Ok(())
    }

    fn evict(&mut self, frame: u64) -> anyhow::Result<()> {
        let page = &self.contents[usize::try_from(frame)?];
        let notice = Notice::Evict { frame };
        self.engine.notice(notice, Some(Contents::Copied(page)));
        Ok(())
    }
}

/// Runs the part.
pub(super) fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "disk: what the engine costs without I/O, us a page, {BLOCKS} blocks in random order"
        ),
    )?;
    // No cache, miss, admission, hit, copy by a system call, copy in memory.
    let mut costs: [Vec<f64>; 6] = Default::default();
    for run in 0..cli.runs.max(1) {
        let mut random = Random::new(u64::from(run));
        let order = random.order(BLOCKS);
        let mut plain = EngineDriver::new(CacheMode::None)?;
        costs[0].push(each(&order, |block| plain.read(block))?);
        let mut cached = EngineDriver::new(CacheMode::Exclusive)?;
        costs[1].push(each(&order, |block| cached.read(block))?);
        let order = random.order(BLOCKS);
        costs[2].push(each(&order, |frame| cached.evict(frame))?);
        let order = random.order(BLOCKS);
        costs[3].push(each(&order, |block| cached.read(block))?);
        let stats = cached.engine.stats();
        anyhow::ensure!(
            (stats.admitted, stats.hits) == (BLOCKS as u64, BLOCKS as u64),
            "not all pages were admitted and hit: {stats:?}"
        );
        let order = random.order(BLOCKS);
        let from = random.order(BLOCKS);
        let mut pages = from.iter();
        let mut next = || *pages.next().expect("as many");
        costs[4].push(each(&order, |frame| {
            let page = &plain.contents[next()];
            Ok(plain.ram.0.write_all_at(page, frame * PAGE_BYTES as u64)?)
        })?);
        let mut pages = from.iter();
        let mut next = || *pages.next().expect("as many");
        costs[5].push(each(&order, |frame| {
            plain.contents[usize::try_from(frame)?] = cached.contents[next()];
            Ok(())
        })?);
    }
    writeln!(out, "\n{:<40} {:>8} {:>8}", "", "ours", "[LS07]")?;
    let lines = [
        ("read, no cache", "", costs[0].clone()),
        ("read, miss (lookup)", "0.28", costs[1].clone()),
        ("admission (insert, page copy)", "7.95", costs[2].clone()),
        (
            "read, hit (lookup, delete, page copy)",
            "8.16",
            costs[3].clone(),
        ),
        ("page copy into guest RAM (pwrite)", "", costs[4].clone()),
        ("page copy in memory", "7.82", costs[5].clone()),
    ];
    for (name, theirs, costs) in lines {
        writeln!(out, "{name:<40} {:>8.2} {theirs:>8}", median(costs))?;
    }
    single_operations(cli, out)?;
    writeln!(
        out,
        "\nOurs hashes each page when it is read and when it is admitted; reads copy it into guest RAM.\n\
         Theirs: a 2.0 GHz Xeon; above, sums of their lines."
    )?;
    Ok(())
}

/// CPU time of each piece of work, in microseconds.
fn each(order: &[usize], mut work: impl FnMut(u64) -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let watch = Watch::start(Clock::Cpu);
    for &number in order {
        work(number as u64)?;
    }
    Ok(watch.seconds() * 1e6 / order.len() as f64)
}

/// The lines of \[LS07\] table 1, each alone.
fn single_operations(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut costs: [Vec<f64>; 7] = Default::default();
    for run in 0..cli.runs.max(1) {
        let mut random = Random::new(u64::from(run));
        let mut tables = MappingTables::new();
        let at = |block| Location::new(DiskNumber(0), block);
        let mut order = || random.order(BLOCKS);
        costs[1].push(each(&order(), |block| {
            tables.insert(block, at(block), block);
            Ok(())
        })?);
        let mut agreed = 0;
        costs[0].push(each(&order(), |frame| {
            agreed += usize::from(tables.agree(frame));
            Ok(())
        })?);
        costs[2].push(each(&order(), |frame| {
            tables.delete(frame);
            Ok(())
        })?);
        anyhow::ensure!(agreed == BLOCKS && !tables.agree(0), "wrong tables");

        // As the engine's.
        let store = Store::new(StoreOptions {
            shards: 1,
            eviction: LRU,
            ..StoreOptions::new(CACHE_BYTES)
        })?;
        let client = store.create_client(ClientOptions::new("bench"))?;
        let pool = client.create_pool(PoolOptions::private())?;
        let handle = |block: u64| Handle {
            pool,
            object: 0,
            index: u32::try_from(block).unwrap_or(u32::MAX),
        };
        let mut put = |block| {
            // What the page holds does not matter.
            let outcome = client.put_with(handle(2 * block), |_| {})?;
            anyhow::ensure!(outcome.is_stored(), "the store is full");
            Ok(())
        };
        costs[4].push(each(&order(), &mut put)?);
        costs[6].push(each(&order(), &mut put)?);
        costs[3].push(each(&order(), |block| {
            let between = handle(2 * block + 1);
            anyhow::ensure!(
                !client.get_with(between, |_| {})?,
                "a page that was never put"
            );
            Ok(())
        })?);
        costs[5].push(each(&order(), |block| {
            anyhow::ensure!(client.flush(handle(2 * block))?, "a page is missing");
            Ok(())
        })?);
    }
    let names = [
        ("mapping tables: lookup in both", "0.28"),
        ("mapping tables: insert", "0.06"),
        ("mapping tables: delete", "0.06"),
        ("cache: lookup", "0.28"),
        ("cache: insert, without the page copy", "0.13"),
        ("cache: delete", "0.06"),
        ("cache: move to tail (insert again)", "0.05"),
    ];
    writeln!(out)?;
    for ((name, theirs), costs) in names.iter().zip(costs) {
        writeln!(out, "{name:<40} {:>8.3} {theirs:>8}", median(costs))?;
    }
    Ok(())
}
