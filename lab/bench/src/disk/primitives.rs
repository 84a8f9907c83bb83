//! The cost of the engine: hits, misses and admissions without I/O, compared to \[LS07\] table 1.
//!
//! The engine is driven as by the daemon, with guest RAM in a memfd that is written by system calls, and storage that
//! completes at once: all blocks are equal, so that a buffer that was used once needs no filling. Blocks come in
//! random order, so pages and tables are cold.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use plimsoll_disk::{
    Action, CacheMode, Contents, DiskNumber, Engine, EngineOptions, GuestData, Notice, Operation,
    OutsideRam, PAGE_BYTES, Page, Request, Segment, Status, Tag,
};
use rustix::fs::{MemfdFlags, memfd_create};

use super::serve::engine_options;
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
            ..engine_options(mode)
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
        let mut random = Random(u64::from(run));
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
        ("admission (insert, page copy)", "7.88", costs[2].clone()),
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
    writeln!(
        out,
        "Ours hashes each page when it is read and when it is admitted; reads copy it into guest RAM.\n\
         Theirs: a 2.0 GHz Xeon; sums of their lines."
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
