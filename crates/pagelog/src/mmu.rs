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
use std::collections::hash_map::Entry;
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

/// The intervals in which a frame's flags were last set, from 1; 0 for never. In all other intervals they are clear.
#[derive(Debug, Clone, Copy, Default)]
struct Flags {
    accessed: u64,
    dirty: u64,
}

/// The MMU of one vCPU and its page tables.
#[derive(Debug)]
pub struct Mmu {
    tlb: Tlb,
    tlb2: Option<Tlb>,
    filter: Option<Filter>,
    /// The frames' numbers.
    frames: HashMap<PageNumber, u32, RandomState>,
    /// By number.
    flags: Vec<Flags>,
    interval: u64,
    /// Accesses so far, at the last record with the vCPU's clock, and at the last count.
    accesses: u64,
    clocked: u64,
    counted: u64,
}

impl Mmu {
    /// A machine that has not run.
    pub fn new(config: &Config) -> Self {
        Self {
            tlb: Tlb::new(config.tlb),
            tlb2: config.tlb2.map(Tlb::new),
            filter: config.filter_pages.map(Filter::new),
            frames: HashMap::default(),
            flags: Vec::new(),
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
        let frame = self.frame_of(page)?;
        self.access_frame(page, frame, write, records);
        Ok(())
    }

    /// The number of a page's frame; assigns the next one on first access.
    fn frame_of(&mut self, page: PageNumber) -> Result<u32, PageLogError> {
        match self.frames.entry(page) {
            Entry::Occupied(frame) => Ok(*frame.get()),
            Entry::Vacant(place) => {
                let next = u32::try_from(self.flags.len());
                let frame = *place.insert(next.map_err(|_| PageLogError::TooManyPages)?);
                self.flags.push(Flags::default());
                Ok(frame)
            }
        }
    }

    fn access_frame(
        &mut self,
        page: PageNumber,
        number: u32,
        write: bool,
        records: &mut Vec<Record>,
    ) {
        self.accesses += 1;
        let vcpu = 0;
        let frame = PageNumber(number.into());
        if let Some(filter) = &mut self.filter
            && let Some(left) = filter.access(frame)
        {
            records.push(Record::Enter { vcpu, frame, write });
            if let Some(frame) = left {
                records.push(Record::Leave { vcpu, frame });
            }
        }
        if self.tlb.serves(page, write) {
            return;
        }
        if let Some(second) = &mut self.tlb2
            && second.serves(page, write)
        {
            self.tlb.fill(page, second.is_dirty(page));
            return;
        }
        let flags = &mut self.flags[number as usize];
        let now = self.interval + 1;
        let walk = Walk {
            vcpu,
            frame,
            step_instructions: 0,
            write,
            fetch: false,
            sets_accessed: flags.accessed != now,
            sets_dirty: write && flags.dirty != now,
        };
        flags.accessed = now;
        if write {
            flags.dirty = now;
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

/// Converts references to the records of a machine with one vCPU, one instruction each. Unknown kinds count as reads.
pub struct EmulatedRecords<S> {
    source: S,
    config: Config,
    mmu: Mmu,
    description: Description,
    batch: ReferenceBatch,
    /// The frames of the batch's pages, found all at once: so the processor waits for several places of memory at a time.
    frames: Vec<u32>,
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
            frames: Vec::new(),
            made: 0,
            left: config.interval_references.map_or(u64::MAX, NonZeroU64::get),
            ended: false,
        })
    }

    fn next_references(&mut self) -> Result<bool, PageLogError> {
        let next = self.source.next_batch(&mut self.batch);
        let is_more = next.map_err(|error| PageLogError::Source(Box::new(error)))?;
        self.frames.clear();
        for &page in self.batch.pages() {
            self.frames.push(self.mmu.frame_of(page)?);
        }
        Ok(is_more)
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
            let frame = self.frames[self.made];
            self.made += 1;
            self.mmu.access_frame(page, frame, write, records);
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
