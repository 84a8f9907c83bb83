//! Copies a machine's memory while it runs, as a live migration does: all pages, then in rounds those written
//! meanwhile, and the last ones while it is stopped (\[PRL\] §3.3).

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::time::{Duration, Instant};

use plimsoll_flow::PageNumber;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{Bytes as _, WriteVolatile as _};

use super::tiny::{Machine, Runner};
use super::{KvmError, Tracker};

const PAGE_BYTES: usize = 4096;
/// Maximum length of a range of pages that is copied at once.
const RUN_PAGES_MAX: usize = 4096;

/// Rounds while the machine runs, including the first one with all pages: those of Xen 4.7, which \[PRL\] used.
const ROUNDS_MAX: u32 = 5;
/// Number of written pages at or below which the machine is stopped to copy them, as in Xen.
const FEW_PAGES: u64 = 50;

/// The result of a pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pass {
    /// Pages copied in each round; the last one while the machine was stopped.
    pub round_pages: Vec<u64>,
    /// Total time, from the start of tracking until the machine continues.
    pub took: Duration,
    /// How long the machine was stopped.
    pub stopped: Duration,
    /// Operations of the machine meanwhile.
    pub operations: u64,
    /// Entries of the tracker that named no page.
    pub lost: u64,
    /// Number of times that a vCPU was stopped because its ring was full.
    pub full_exits: u64,
    /// Number of pages whose copy differs from the machine's memory.
    pub wrong_pages: u64,
}

impl Pass {
    /// All pages copied.
    pub fn pages(&self) -> u64 {
        self.round_pages.iter().sum()
    }
}

/// Copies the memory of a running machine to a new file in RAM and lets it continue.
///
/// Without a tracker (`start` returns `None`) it is stopped all the time. Copies are compared, outside of the measured
/// time, before it continues.
///
/// # Errors
///
/// Those of the tracker and of the machine, which may then be stopped.
pub fn precopy(
    machine: &Machine,
    runner: &mut Runner,
    start: impl FnOnce() -> Result<Option<Box<dyn Tracker>>, KvmError>,
) -> Result<Pass, KvmError> {
    let mut copy = Copy::new(machine)?;
    let all = machine.slots().iter().flat_map(|slot| {
        let first = slot.first.0;
        (first..first + slot.pages.0).map(PageNumber)
    });
    let mut pages: Vec<PageNumber> = all.collect();
    pages.sort_unstable();
    let mut pass = Pass::default();
    let operations = machine.operations();
    let begin = Instant::now();
    let mut tracker = start()?;
    if let Some(tracker) = &mut tracker {
        for round in 0..ROUNDS_MAX {
            // The tracker has not reported any of the pages of the first round.
            let told = (round > 0).then_some(tracker.as_mut());
            copy.take(&pages, told)?;
            pass.round_pages.push(pages.len() as u64);
            let round = tracker.round()?;
            pass.lost += round.lost;
            pass.full_exits += round.full_exits;
            pages = round.pages;
            if pages.len() as u64 <= FEW_PAGES {
                break;
            }
        }
    }
    let stop = Instant::now();
    runner.pause()?;
    if let Some(tracker) = &mut tracker {
        let round = tracker.round()?;
        pass.lost += round.lost;
        pass.full_exits += round.full_exits;
        pages.extend(round.pages);
        pages.sort_unstable();
        pages.dedup();
    }
    copy.take(&pages, None)?;
    pass.round_pages.push(pages.len() as u64);
    pass.stopped = stop.elapsed();
    pass.took = begin.elapsed();
    pass.operations = machine.operations() - operations;
    drop(tracker);
    pass.wrong_pages = copy.wrong_pages()?;
    runner.resume()?;
    Ok(pass)
}

/// A machine's memory in a file, slot after slot.
struct Copy<'machine> {
    machine: &'machine Machine,
    file: File,
}

impl<'machine> Copy<'machine> {
    fn new(machine: &'machine Machine) -> Result<Self, KvmError> {
        let bytes = machine.slots().iter().map(|slot| slot.len_bytes() as u64);
        let file = memfd_create("plimsoll-copy", MemfdFlags::CLOEXEC)
            .and_then(|file| ftruncate(&file, bytes.sum()).map(|()| file));
        let file = file.map_err(KvmError::call("memfd_create"))?;
        Ok(Self {
            machine,
            file: file.into(),
        })
    }

    /// Copies pages, ascending.
    fn take(
        &mut self,
        pages: &[PageNumber],
        mut tracker: Option<&mut (dyn Tracker + '_)>,
    ) -> Result<(), KvmError> {
        for pages in pages.chunks(RUN_PAGES_MAX) {
            if let Some(tracker) = &mut tracker {
                tracker.before_copy(pages)?;
            }
            for run in pages.chunk_by(|before, next| before.0 + 1 == next.0) {
                self.take_run(run)
                    .map_err(KvmError::call("write of a copy"))?;
            }
        }
        Ok(())
    }

    /// Copies consecutive pages, which may lie in slots that meet.
    fn take_run(&mut self, run: &[PageNumber]) -> io::Result<()> {
        let mut slot_at = 0u64;
        for (slot, memory) in self.machine.memory() {
            let inside: Vec<u64> = run
                .iter()
                .filter_map(|&page| slot.offset_of(page))
                .collect();
            if let Some(&first) = inside.first() {
                let at = usize::try_from(first).map_err(io::Error::other)? * PAGE_BYTES;
                let part = memory.subslice(at, inside.len() * PAGE_BYTES);
                let part = part.map_err(io::Error::other)?;
                self.file.seek(SeekFrom::Start(slot_at + at as u64))?;
                self.file
                    .write_all_volatile(&part)
                    .map_err(io::Error::other)?;
            }
            slot_at += slot.len_bytes() as u64;
        }
        Ok(())
    }

    /// Counts pages that differ from the machine's, which is stopped.
    fn wrong_pages(&mut self) -> Result<u64, KvmError> {
        self.compare().map_err(KvmError::call("read of a copy"))
    }

    fn compare(&mut self) -> io::Result<u64> {
        use std::io::Read as _;
        let (mut copied, mut held) = (vec![0; PAGE_BYTES * 64], vec![0; PAGE_BYTES * 64]);
        let mut wrong = 0;
        self.file.seek(SeekFrom::Start(0))?;
        for (slot, memory) in self.machine.memory() {
            let len_bytes = slot.len_bytes();
            for at in (0..len_bytes).step_by(copied.len()) {
                let bytes = (len_bytes - at).min(copied.len());
                self.file.read_exact(&mut copied[..bytes])?;
                let read = memory.read_slice(&mut held[..bytes], at);
                read.map_err(io::Error::other)?;
                let pages = copied[..bytes].chunks(PAGE_BYTES);
                let pages = pages.zip(held[..bytes].chunks(PAGE_BYTES));
                wrong += pages.filter(|(copied, held)| copied != held).count() as u64;
            }
        }
        Ok(wrong)
    }
}
