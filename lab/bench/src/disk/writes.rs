//! Disk I/O of a guest whose memory is partly in the cache, by the share of its requests that write: \[LS07\] Fig. 10,
//! simulated.
//!
//! The engine is the real one. Guest and storage are models, so every figure is a count, and the same in each run. The
//! sizes are those of \[LS07\] §6.1 divided by 16: [`FILES`] files of [`FILE`] pages, visited by Zipf's law with exponent 1, and
//! [`TOTAL`] pages of memory. A visit reads a file, or overwrites it, in chunks of 64 KiB.
//!
//! The guest replaces its pages in LRU order and writes them back as Linux does: a file's, once the file has been dirty for
//! 30 s (inspected every 5 s), or when more than a tenth of its memory is dirty, the longest dirty file first, or when one
//! of them is to be evicted. A page that was written back stays in its memory, clean. It reports each addition and
//! eviction. Storage completes at once.
//!
//! Each page that is read is compared with what was written last. The counted visits begin and end with all writes on
//! storage, so none is left out and none is of before.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use plimsoll_disk::{
    Action, CacheMode, Contents, DiskNumber, Engine, EngineOptions, GuestData, Notice, Operation,
    PAGE_BYTES, Request, Segment, Status, Tag, WriteMode,
};
use plimsoll_flow::Whole as _;

use super::primitives::Memory;
use crate::random::Random;
use crate::title;

const FILES: u64 = 500;
/// Pages of a file.
const FILE: u64 = 64;
/// Pages of guest memory and cache together.
const TOTAL: u64 = 8192;
/// Pages that a program reads or writes at once.
const CHUNK: u64 = 16;
/// Visits before the counted ones, and those.
const WARM: u64 = 1000;
const COUNTED: u64 = 2000;

const RATIOS: [f64; 6] = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5];
/// Shares of the memory that are in the cache, in percent.
const SHARES: [f64; 4] = [12.5, 25.0, 50.0, 75.0];

/// Share of a guest's memory that may be dirty before it writes back (Linux: `vm.dirty_background_ratio`).
const BACKGROUND: f64 = 0.1;
/// Time for which a file may be dirty, and interval at which that is inspected.
const EXPIRY: Duration = Duration::from_secs(30);
const FLUSHER: Duration = Duration::from_secs(5);

/// Share of the cache that may be dirty, as by default.
const DIRTY: f64 = 0.25;

/// What is simulated.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Args {
    /// Time that a visit of a file takes in the simulation, in ms
    #[arg(long, default_value_t = 50)]
    visit_ms: u64,
    /// Interval at which the simulated guest flushes its disk, as a journal does, in s; 0: never
    #[arg(long, default_value_t = 0)]
    flush_s: u64,
}

/// How the memory that a guest does not have is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Through,
    Delayed,
    /// Delayed, and the log's memory is taken from the cache's.
    LogWithin,
}

/// A page of a file.
#[derive(Debug, Clone, Copy, Default)]
struct FilePage {
    /// Where the guest holds it, and its place in the order of use.
    held: Option<(u64, u64)>,
    is_dirty: bool,
    /// What was written last.
    stamp: u64,
}

struct ModelGuest {
    engine: Engine,
    ram: Arc<Memory>,
    free: Vec<u64>,
    pages: Vec<FilePage>,
    /// Pages by their last use.
    order: BTreeMap<u64, u64>,
    /// Dirty files by the time since which they are.
    dirty_files: BTreeSet<(Duration, u64)>,
    dirty_since: BTreeMap<u64, Duration>,
    dirty_pages: u64,
    dirty_pages_max: u64,
    /// What storage holds of each page.
    storage: Vec<u64>,
    now: Duration,
    uses: u64,
    stamps: u64,
    /// Pages read from and written to storage.
    reads: u64,
    writes: u64,
}

fn at(number: u64) -> usize {
    usize::try_from(number).expect("a number of a page or file")
}

impl ModelGuest {
    fn new(memory: u64, options: EngineOptions) -> anyhow::Result<Self> {
        let pages = at(FILES * FILE);
        Ok(Self {
            engine: Engine::new(options, None)?,
            ram: Arc::new(Memory::new(memory)?),
            free: (0..memory).rev().collect(),
            pages: vec![FilePage::default(); pages],
            order: BTreeMap::new(),
            dirty_files: BTreeSet::new(),
            dirty_since: BTreeMap::new(),
            dirty_pages: 0,
            dirty_pages_max: u64::whole(memory as f64 * BACKGROUND),
            storage: vec![0; pages],
            now: Duration::ZERO,
            uses: 0,
            stamps: 0,
            reads: 0,
            writes: 0,
        })
    }

    /// Reads or overwrites a file.
    fn visit(&mut self, file: u64, writes: bool) -> anyhow::Result<()> {
        for first in (file * FILE..(file + 1) * FILE).step_by(at(CHUNK)) {
            let mut missing: Vec<u64> = Vec::new();
            for page in first..first + CHUNK {
                if self.pages[at(page)].held.is_none() {
                    self.add(page)?;
                    if !writes {
                        missing.push(page);
                    }
                }
                self.touch(page);
            }
            for run in missing.chunk_by(|left, right| left + 1 == *right) {
                self.read(run)?;
            }
            if writes {
                for page in first..first + CHUNK {
                    self.overwrite(page)?;
                }
            }
            while self.dirty_pages > self.dirty_pages_max {
                let oldest = self.dirty_files.first().context("dirty pages are files'")?;
                self.write_back(oldest.1)?;
            }
        }
        Ok(())
    }

    /// Lets a visit's time pass.
    fn pass(&mut self, args: &Args) -> anyhow::Result<()> {
        let before = self.now;
        self.now += Duration::from_millis(args.visit_ms);
        let is_due = |every: Duration| {
            before.as_millis() / every.as_millis() != self.now.as_millis() / every.as_millis()
        };
        let flush = args.flush_s > 0 && is_due(Duration::from_secs(args.flush_s));
        if is_due(FLUSHER) {
            while let Some(&(since, file)) = self.dirty_files.first()
                && since + EXPIRY <= self.now
            {
                self.write_back(file)?;
            }
        }
        self.engine.turn(self.now);
        self.settle()?;
        if flush {
            self.submit(Operation::Flush)?;
        }
        Ok(())
    }

    /// Writes everything to storage.
    fn sync(&mut self) -> anyhow::Result<()> {
        while let Some(&(_, file)) = self.dirty_files.first() {
            self.write_back(file)?;
        }
        self.submit(Operation::Flush)?;
        ensure!(
            self.storage
                .iter()
                .zip(&self.pages)
                .all(|(stored, page)| *stored == page.stamp),
            "storage lacks a write after a flush"
        );
        Ok(())
    }

    fn touch(&mut self, page: u64) {
        self.uses += 1;
        let uses = self.uses;
        if let Some((_, used)) = &mut self.pages[at(page)].held {
            self.order.remove(used);
            self.order.insert(uses, page);
            *used = uses;
        }
    }

    /// Gives a page a frame.
    fn add(&mut self, page: u64) -> anyhow::Result<()> {
        let frame = match self.free.pop() {
            Some(frame) => frame,
            None => self.evict()?,
        };
        self.engine.notice(Notice::Add { frame }, None);
        self.uses += 1;
        self.order.insert(self.uses, page);
        self.pages[at(page)].held = Some((frame, self.uses));
        Ok(())
    }

    /// Takes the frame of the page that was not used for longest.
    fn evict(&mut self) -> anyhow::Result<u64> {
        let (_, page) = self.order.pop_first().context("a page is held")?;
        if self.pages[at(page)].is_dirty {
            self.write_back(page / FILE)?;
        }
        let held = self.pages[at(page)].held.take();
        let (frame, _) = held.context("it is held")?;
        let mut contents = [0; PAGE_BYTES];
        self.ram
            .0
            .read_exact_at(&mut contents, frame * PAGE_BYTES as u64)?;
        let notice = Notice::Evict { frame };
        self.engine
            .notice(notice, Some(Contents::Copied(&contents)));
        self.settle()?;
        Ok(frame)
    }

    fn segments(&self, pages: &[u64]) -> anyhow::Result<Vec<Segment>> {
        let segment = |page: &u64| {
            let (frame, _) = self.pages[at(*page)].held.context("it is held")?;
            Ok(Segment {
                address: frame * PAGE_BYTES as u64,
                bytes: 4096,
            })
        };
        pages.iter().map(segment).collect()
    }

    /// Reads pages that follow each other.
    fn read(&mut self, run: &[u64]) -> anyhow::Result<()> {
        let segments = self.segments(run)?;
        self.submit(Operation::Read {
            offset: run[0] * PAGE_BYTES as u64,
            segments: segments.clone(),
        })?;
        for (page, segment) in run.iter().zip(segments) {
            let mut stamp = [0; 8];
            self.ram.0.read_exact_at(&mut stamp, segment.address)?;
            ensure!(
                u64::from_le_bytes(stamp) == self.pages[at(*page)].stamp,
                "page {page} was read wrong"
            );
        }
        Ok(())
    }

    fn overwrite(&mut self, page: u64) -> anyhow::Result<()> {
        self.stamps += 1;
        let state = &mut self.pages[at(page)];
        let (frame, _) = state.held.context("it is held")?;
        state.stamp = self.stamps;
        let contents = stamped(self.stamps);
        self.ram
            .0
            .write_all_at(&contents, frame * PAGE_BYTES as u64)?;
        if !std::mem::replace(&mut state.is_dirty, true) {
            self.dirty_pages += 1;
        }
        let since = *self.dirty_since.entry(page / FILE).or_insert(self.now);
        self.dirty_files.insert((since, page / FILE));
        Ok(())
    }

    /// Writes a file's dirty pages to the disk.
    fn write_back(&mut self, file: u64) -> anyhow::Result<()> {
        let pages = (file * FILE..(file + 1) * FILE).filter(|page| self.pages[at(*page)].is_dirty);
        let dirty: Vec<u64> = pages.collect();
        for run in dirty.chunk_by(|left, right| left + 1 == *right) {
            let segments = self.segments(run)?;
            self.submit(Operation::Write {
                offset: run[0] * PAGE_BYTES as u64,
                segments,
                durable: false,
            })?;
            for page in run {
                self.pages[at(*page)].is_dirty = false;
            }
            self.dirty_pages -= run.len() as u64;
        }
        if let Some(since) = self.dirty_since.remove(&file) {
            self.dirty_files.remove(&(since, file));
        }
        Ok(())
    }

    fn submit(&mut self, operation: Operation) -> anyhow::Result<()> {
        self.engine.submit(Request {
            disk: DiskNumber(0),
            tag: Tag(0),
            operation,
            ram: Arc::<Memory>::clone(&self.ram) as Arc<dyn GuestData>,
        });
        self.settle()?;
        let done = self.engine.next_completed().context("nothing completed")?;
        ensure!(done.status == Status::Ok, "a request failed");
        Ok(())
    }

    /// Carries out what the engine submits to storage.
    fn settle(&mut self) -> anyhow::Result<()> {
        while let Some(submission) = self.engine.next_submission() {
            let buffer = match submission.action {
                Action::Read { offset, mut buffer } => {
                    let first = at(offset) / PAGE_BYTES;
                    for (stored, page) in self.storage[first..]
                        .iter()
                        .zip(buffer.chunks_exact_mut(PAGE_BYTES))
                    {
                        page.copy_from_slice(&stamped(*stored));
                        self.reads += 1;
                    }
                    Some(buffer)
                }
                Action::Write { offset, buffer, .. } => {
                    let first = at(offset) / PAGE_BYTES;
                    for (stored, page) in self.storage[first..]
                        .iter_mut()
                        .zip(buffer.chunks_exact(PAGE_BYTES))
                    {
                        *stored = u64::from_le_bytes(page[..8].try_into()?);
                        self.writes += 1;
                    }
                    Some(buffer)
                }
                Action::Sync => None,
                Action::Discard(_) | Action::Zero { .. } => bail!("nothing is freed"),
            };
            self.engine.carried_out(submission.id, Ok(()), buffer);
        }
        Ok(())
    }
}

fn stamped(stamp: u64) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    page[..8].copy_from_slice(&stamp.to_le_bytes());
    page
}

/// Visits by Zipf's law with exponent 1, each a read or a write. The files and the dice are the same at every ratio.
fn visits(ratio: f64) -> Vec<(u64, bool)> {
    let mut shares: Vec<f64> = Vec::new();
    let mut sum = 0.0;
    for rank in 1..=FILES {
        sum += 1.0 / rank as f64;
        shares.push(sum);
    }
    let mut random = Random::new(10);
    (0..WARM + COUNTED)
        .map(|_| {
            let dice = random.unit() * sum;
            let file = shares.partition_point(|share| *share <= dice) as u64;
            (file.min(FILES - 1), random.chance(ratio))
        })
        .collect()
}

/// Pages read and written per page requested.
#[derive(Debug, Clone, Copy)]
struct Cost {
    reads: f64,
    writes: f64,
}

impl Cost {
    fn both(self) -> f64 {
        self.reads + self.writes
    }
}

/// Runs a guest with this share of the memory in the cache, in percent; 0: there is no cache.
fn simulate(args: &Args, ratio: f64, share: f64, mode: Mode) -> anyhow::Result<Cost> {
    let behind = u64::whole(TOTAL as f64 * share / 100.0);
    let options = if behind == 0 {
        EngineOptions::default()
    } else {
        let cache = match mode {
            Mode::LogWithin => u64::whole(behind as f64 / (1.0 + DIRTY)),
            Mode::Through | Mode::Delayed => behind,
        };
        let cache_bytes = cache * PAGE_BYTES as u64;
        EngineOptions {
            cache_bytes,
            cache_bytes_max: cache_bytes,
            write: match mode {
                Mode::Through => WriteMode::Through,
                Mode::Delayed | Mode::LogWithin => WriteMode::Delayed,
            },
            dirty_pages_max: u64::whole(cache as f64 * DIRTY),
            mode: CacheMode::Exclusive,
            ..EngineOptions::default()
        }
    };
    let mut guest = ModelGuest::new(TOTAL - behind, options)?;
    let mut before = (0, 0);
    for (number, (file, writes)) in (0..).zip(visits(ratio)) {
        if number == WARM {
            guest.sync()?;
            before = (guest.reads, guest.writes);
        }
        guest.visit(file, writes)?;
        guest.pass(args)?;
    }
    guest.sync()?;
    let stats = guest.engine.stats();
    ensure!(
        stats.refused_mismatch == 0 && stats.disabled.is_none(),
        "evicted pages were refused: {stats:?}"
    );
    let requested = (COUNTED * FILE) as f64;
    Ok(Cost {
        reads: (guest.reads - before.0) as f64 / requested,
        writes: (guest.writes - before.1) as f64 / requested,
    })
}

/// Runs the part.
pub(super) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "disk: pages read from and written to storage per page requested, simulated ({FILES} files of {} KiB, {} MiB)",
            FILE * 4,
            TOTAL * 4 / 1024
        ),
    )?;
    let flushes = match args.flush_s {
        0 => "never flushes its disk".to_owned(),
        seconds => format!("flushes its disk every {seconds} s"),
    };
    writeln!(
        out,
        "Zipf; {WARM} visits, then {COUNTED} counted; a visit takes {} ms, and the guest {flushes}.\n\
         In parentheses: pages written. Change: to no cache at the same share of writes.\n\
         [LS07] Fig. 10, half in the cache: delayed writes add nothing, write-through about 7 % at 50 % of writes.\n\n\
         {:<22} {:>15}{}",
        args.visit_ms,
        "writes",
        "no cache",
        SHARES
            .map(|share| format!("{:>23}", format!("{share} % in cache")))
            .concat()
    )?;
    for ratio in RATIOS {
        let alone = simulate(args, ratio, 0.0, Mode::Through)?;
        for (mode, name) in [
            (Mode::Through, "through"),
            (Mode::Delayed, "delayed"),
            (Mode::LogWithin, "delayed, log within"),
        ] {
            if ratio == 0.0 && mode != Mode::Through {
                continue;
            }
            let name = format!("{:>3.0} % {name}", ratio * 100.0);
            let cell = |cost: Cost| format!("{:.3} ({:.3})", cost.both(), cost.writes);
            write!(out, "{name:<22} {:>15}", cell(alone))?;
            for share in SHARES {
                let cost = simulate(args, ratio, share, mode)?;
                let change = (cost.both() / alone.both() - 1.0) * 100.0;
                write!(out, "{:>15}{change:>+6.1} %", cell(cost))?;
                out.flush()?;
            }
            writeln!(out)?;
        }
    }
    Ok(())
}
