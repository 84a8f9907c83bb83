//! A model of TLBs, page tables and filter that converts references into a page log.
//!
//! It follows the same rules as the plugin (`qemu/pagelog`), and tests compare the two:
//!
//! - A TLB's set is the page's number modulo the number of sets; in a set the least recently used entry is replaced. An
//!   entry has a page and a dirty bit.
//! - An access walks if no TLB has the page, or if it is a write and the entry is clean; the walk makes the entry dirty if
//!   it was for a write.
//! - The second level is looked up after a miss in the first. A hit there that can serve the access copies the entry
//!   into the first level, and is not a walk. A walk fills both.
//! - A walk sets the page's accessed flag, and for a write the dirty flag, if they were clear.
//! - The end of an interval clears all flags and empties all TLBs. The filter is kept.
//! - The filter contains the most recently used pages; its records precede the access's walk: the page that enters, then
//!   the one that leaves.
//!
//! [`EmulatedRecords`] converts a plain trace of references into a page log.

mod filter;
mod tlb;

use std::collections::HashMap;
use std::num::NonZeroU64;

use foldhash::fast::RandomState;
use plimsoll_flow::{AccessKind, PageNumber, PageSize, ReferenceBatch, Source};

use crate::record::{FRAME_MAX, Record, STEP_MAX, Walk};
use crate::{BATCH_RECORDS, Description, PageLogError, RecordSource, TlbShape};
use filter::Filter;
use tlb::Tlb;

/// Configuration of a machine's TLBs, filter and intervals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The TLB.
    pub tlb: TlbShape,
    /// Its second level.
    pub tlb2: Option<TlbShape>,
    /// Pages in the filter, at most 65 536; without it the log has walks only.
    pub filter_pages: Option<u32>,
    /// Length of an interval in references; `None` for no intervals.
    pub interval_references: Option<NonZeroU64>,
}

impl Default for Config {
    /// The TLB of \[PRL\] and nothing else.
    fn default() -> Self {
        Self {
            tlb: TlbShape::default(),
            tlb2: None,
            filter_pages: None,
            interval_references: None,
        }
    }
}

/// A page's frame, and the interval in which its flags were last set; in all other intervals they are clear.
#[derive(Debug, Clone, Copy)]
struct Frame {
    number: u32,
    accessed: Option<u64>,
    dirty: Option<u64>,
}

/// The MMU of one vCPU and its page tables.
#[derive(Debug)]
pub struct Mmu {
    tlb: Tlb,
    tlb2: Option<Tlb>,
    filter: Option<Filter>,
    frames: HashMap<PageNumber, Frame, RandomState>,
    interval: u64,
    /// Accesses so far, at the last record with the vCPU's clock, and at the last count.
    accesses: u64,
    clocked: u64,
    counted: u64,
}

impl Mmu {
    /// A machine that has not run.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Self {
            tlb: Tlb::new(config.tlb),
            tlb2: config.tlb2.map(Tlb::new),
            filter: config.filter_pages.map(Filter::new),
            frames: HashMap::default(),
            interval: 0,
            accesses: 0,
            clocked: 0,
            counted: 0,
        }
    }

    /// Accesses a page with one instruction; appends at most four records. Frames are assigned in the order of the
    /// first accesses to pages.
    ///
    /// # Errors
    ///
    /// [`PageLogError::TooManyPages`] if all frames are assigned.
    pub fn access(
        &mut self,
        page: PageNumber,
        write: bool,
        records: &mut Vec<Record>,
    ) -> Result<(), PageLogError> {
        self.accesses += 1;
        let vcpu = 0;
        if let Some(filter) = &mut self.filter
            && let Some(left) = filter.access(page)
        {
            let frame = frame_of(&mut self.frames, page)?.number;
            let frame = PageNumber(frame.into());
            records.push(Record::Enter { vcpu, frame, write });
            if let Some(left) = left.and_then(|page| self.frames.get(&page)) {
                let frame = PageNumber(left.number.into());
                records.push(Record::Leave { vcpu, frame });
            }
        }
        if self.tlb.serves(page, write) {
            return Ok(());
        }
        if let Some(second) = &mut self.tlb2
            && second.serves(page, write)
        {
            self.tlb.fill(page, second.is_dirty(page));
            return Ok(());
        }
        let frame = frame_of(&mut self.frames, page)?;
        let now = Some(self.interval);
        let walk = Walk {
            vcpu,
            frame: PageNumber(frame.number.into()),
            step_instructions: 0,
            write,
            fetch: false,
            sets_accessed: frame.accessed != now,
            sets_dirty: write && frame.dirty != now,
        };
        frame.accessed = now;
        if write {
            frame.dirty = now;
        }
        self.tlb.fill(page, write);
        if let Some(second) = &mut self.tlb2 {
            second.fill(page, write);
        }
        let step = u32::try_from(self.accesses - self.clocked).ok();
        let step_instructions = step.filter(|&step| step <= STEP_MAX).unwrap_or_else(|| {
            let instructions = self.accesses;
            records.push(Record::Clock { vcpu, instructions });
            0
        });
        self.clocked = self.accesses;
        records.push(Record::Walk(Walk {
            step_instructions,
            ..walk
        }));
        Ok(())
    }

    /// Ends an interval.
    pub fn end_interval(&mut self, records: &mut Vec<Record>) {
        self.count(records);
        let number = self.interval;
        records.push(Record::Interval { number });
        self.interval += 1;
        self.tlb.flush();
        if let Some(second) = &mut self.tlb2 {
            second.flush();
        }
    }

    /// Writes records of the clock and the count.
    pub fn count(&mut self, records: &mut Vec<Record>) {
        let (vcpu, instructions) = (0, self.accesses);
        let count = self.accesses - self.counted;
        records.push(Record::Clock { vcpu, instructions });
        records.push(Record::Accesses { vcpu, count });
        self.clocked = self.accesses;
        self.counted = self.accesses;
    }
}

/// The frame of a page; assigns a new one on first access.
fn frame_of(
    frames: &mut HashMap<PageNumber, Frame, RandomState>,
    page: PageNumber,
) -> Result<&mut Frame, PageLogError> {
    let next = frames.len() as u64;
    match frames.entry(page) {
        std::collections::hash_map::Entry::Occupied(frame) => Ok(frame.into_mut()),
        std::collections::hash_map::Entry::Vacant(place) => Ok(place.insert(Frame {
            number: u32::try_from(next).map_err(|_| PageLogError::TooManyPages)?,
            accessed: None,
            dirty: None,
        })),
    }
}

/// Converts references to the records of a machine with one vCPU, one instruction each. Unknown kinds count as reads.
pub struct EmulatedRecords<S> {
    source: S,
    config: Config,
    mmu: Mmu,
    description: Description,
    batch: ReferenceBatch,
    /// Number of the batch's references already converted.
    made: usize,
    /// References left in the interval.
    left: u64,
    ended: bool,
}

impl<S: Source> EmulatedRecords<S> {
    /// Creates a machine that executes the references of a source.
    ///
    /// The RAM in its description is the maximum that frame numbers can address, not the memory used.
    ///
    /// # Errors
    ///
    /// [`PageLogError::Description`] for an invalid filter.
    pub fn new(source: S, config: &Config) -> Result<Self, PageLogError> {
        let description = Description {
            ram_bytes: (FRAME_MAX + 1) << 12,
            below_4g_bytes: 4 << 30,
            vcpus: 1,
            walks: true,
            references: config.filter_pages.is_some(),
            only_between_marks: false,
            interval_instructions: config.interval_references,
            filter_pages: config.filter_pages.unwrap_or(0),
            tlb: Some(config.tlb),
            tlb2: config.tlb2,
            itlb: None,
            plugin_api: 0,
            tlb_page: PageSize::FOUR_KIB,
        };
        description.validate("the machine")?;
        Ok(Self {
            source,
            config: *config,
            mmu: Mmu::new(config),
            description,
            batch: ReferenceBatch::new(),
            made: 0,
            left: config.interval_references.map_or(u64::MAX, NonZeroU64::get),
            ended: false,
        })
    }

    fn next_references(&mut self) -> Result<bool, PageLogError> {
        let next = self.source.next_batch(&mut self.batch);
        next.map_err(|error| PageLogError::Source(Box::new(error)))
    }

    fn fill(&mut self, records: &mut Vec<Record>) -> Result<(), PageLogError> {
        // An access makes up to four records, the end of an interval three more.
        while records.len() + 7 <= BATCH_RECORDS {
            if self.made == self.batch.len() {
                self.made = 0;
                if !self.next_references()? {
                    self.ended = true;
                    self.mmu.count(records);
                    return Ok(());
                }
            }
            let page = self.batch.pages()[self.made];
            let write = self.batch.kinds()[self.made] == AccessKind::Write;
            self.made += 1;
            self.mmu.access(page, write, records)?;
            self.left -= 1;
            if self.left == 0
                && let Some(references) = self.config.interval_references
            {
                self.left = references.get();
                self.mmu.end_interval(records);
            }
        }
        Ok(())
    }

    /// Returns the source.
    pub fn into_inner(self) -> S {
        self.source
    }
}

impl<S: Source> RecordSource for EmulatedRecords<S> {
    fn description(&self) -> &Description {
        &self.description
    }

    fn next_batch(&mut self, batch: &mut Vec<Record>) -> Result<bool, PageLogError> {
        batch.clear();
        if self.ended {
            return Ok(false);
        }
        let filled = self.fill(batch);
        self.ended |= filled.is_err();
        filled?;
        Ok(!batch.is_empty())
    }
}

#[cfg(test)]
mod tests;
