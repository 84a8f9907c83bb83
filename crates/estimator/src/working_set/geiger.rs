//! Geiger: what a VM's cache evicts and reads again, told from its disk requests alone.
//!
//! A request moves a disk's block between its *location* and a *frame* of the VM's memory, and the frame holds that block from
//! then on. When a request names a frame for another location, the block that was in it has been evicted. Evicted
//! blocks enter a ghost buffer; a block read again is found in it at a depth, and memory larger by that
//! much would have saved the read. The working set is the VM's memory and the least of the ghost that saves all but 5 % of
//! the reads repeated.
//!
//! Source: [Jones06]. Not taken from it: which blocks were freed on disk (its knowledge of file
//! systems), and evictions seen by a frame's reuse for a process's own memory, which needs page tables.
//! Cannot see: a working set smaller than the memory (then nothing is read again, and the memory is only an upper
//! bound); reads served from the guest's cache; where in the ghost a block is whose frame was reused without a request. Such
//! reads are counted apart, as not to be saved.
//! Cost: O(1) a block of a request, and the ghost's; 64 bytes for each frame ever named, and the ghost's.

use plimsoll_flow::{
    CurveError, MissRatioCurve, PageCount, PageNumber, WorkingSet, WorkingSetBound,
};

use crate::ghost::{GhostBuffer, GhostError, GhostOptions};
use crate::hash::{PageMap, page_map};

/// The estimator. Frames are pages of the VM's memory, locations pages of its disks.
///
/// ```
/// use plimsoll_estimator::working_set::Geiger;
/// use plimsoll_estimator::GhostOptions;
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let memory = PageCount(4);
/// let mut geiger = Geiger::new(GhostOptions::new(memory, PageCount(4096)))?;
/// // A loop over six blocks in four frames.
/// for n in 0..600 {
///     geiger.read(PageNumber(n % 4), PageNumber(n % 6));
/// }
/// assert_eq!(geiger.evictions(), 596);
/// assert_eq!(geiger.repeated(), 594);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Geiger {
    ghost: GhostBuffer,
    /// The location that each frame holds, and the frame of each location held.
    locations: PageMap<PageNumber>,
    frames: PageMap<PageNumber>,
    evictions: u64,
    unplaced: u64,
    /// Whether anything fell off the ghost's end, and reads not found in it since.
    has_dropped: bool,
    unknown: u64,
}

impl Geiger {
    /// Returns an estimator for a VM whose memory is `options.direct`. The ghost's memory is allocated here.
    ///
    /// # Errors
    ///
    /// [`GhostError`] if the sizes are none, or the host has no memory for them.
    pub fn new(options: GhostOptions) -> Result<Self, GhostError> {
        Ok(Self {
            ghost: GhostBuffer::new(options)?,
            locations: page_map(),
            frames: page_map(),
            evictions: 0,
            unplaced: 0,
            has_dropped: false,
            unknown: 0,
        })
    }

    /// A block was read from `location` into `frame`.
    pub fn read(&mut self, frame: PageNumber, location: PageNumber) {
        match self.frames.remove(&location) {
            // It would not be read if it were still there.
            Some(held_in) => {
                self.locations.remove(&held_in);
                self.evictions += 1;
                self.unplaced += 1;
            }
            None => {
                self.ghost.set_cached(self.ghost.options().direct);
                let found = self.ghost.missed(location).is_some();
                self.unknown += u64::from(!found && self.has_dropped);
            }
        }
        self.place(frame, location);
    }

    /// A block was written from `frame` to `location`.
    pub fn write(&mut self, frame: PageNumber, location: PageNumber) {
        match self.frames.remove(&location) {
            // The block's newest content is elsewhere now, or where it was.
            Some(held_in) => {
                self.locations.remove(&held_in);
            }
            // What was evicted under this location is of no use to anybody.
            None => self.ghost.released(location),
        }
        self.place(frame, location);
    }

    fn place(&mut self, frame: PageNumber, location: PageNumber) {
        if let Some(evicted) = self.locations.insert(frame, location) {
            self.frames.remove(&evicted);
            self.has_dropped |= self.ghost.remembered() == self.ghost.options().ghost;
            self.ghost.evicted(evicted);
            self.evictions += 1;
        }
        self.frames.insert(location, frame);
    }

    /// Evictions told so far.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Reads of blocks that are known to have been evicted before.
    #[must_use]
    pub fn repeated(&self) -> u64 {
        let found: u64 = self.ghost.segment_hits().iter().sum();
        found + self.unplaced
    }

    /// Those of [`repeated`](Self::repeated) whose eviction was not seen, and so not how far back it was.
    #[must_use]
    pub fn unplaced(&self) -> u64 {
        self.unplaced
    }

    /// Reads of which nobody knows whether they were repeated: the ghost had forgotten what it held longest.
    #[must_use]
    pub fn unknown(&self) -> u64 {
        self.unknown
    }

    /// The VM's memory and the least of the ghost, in whole segments, with which 5 % of the repeated reads remain.
    ///
    /// Without repeated reads the memory is the most that was seen to be needed, whatever of [`unknown`](Self::unknown) reads may
    /// have been repeated. What is found is a lower bound where the whole ghost
    /// does not save as many, and where more than 5 % of the reads that may be repeated are unknown.
    #[must_use]
    pub fn working_set(&self) -> WorkingSet {
        let GhostOptions {
            direct,
            ghost,
            segment,
        } = self.ghost.options();
        let mut left = self.repeated();
        if left == 0 {
            return WorkingSet {
                size: direct,
                bound: WorkingSetBound::AtMost,
            };
        }
        let enough = WorkingSet::MISS_RATIO * left as f64;
        let known = self.unknown as f64 <= WorkingSet::MISS_RATIO * (left + self.unknown) as f64;
        let bound = if known {
            WorkingSetBound::Estimate
        } else {
            WorkingSetBound::AtLeast
        };
        for (index, hits) in (1..).zip(self.ghost.segment_hits()) {
            left -= hits;
            if left as f64 <= enough {
                return WorkingSet {
                    size: PageCount(direct.0 + ghost.0.min(segment.0.saturating_mul(index))),
                    bound,
                };
            }
        }
        WorkingSet {
            size: PageCount(direct.0 + ghost.0),
            bound: WorkingSetBound::AtLeast,
        }
    }

    /// The share of disk reads that would remain at sizes from the VM's memory up, but for those not placed.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if there was none.
    pub fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        self.ghost.curve()
    }

    /// Forgets all counts and keeps what is where.
    pub fn clear_counts(&mut self) {
        self.ghost.clear_counts();
        (self.evictions, self.unplaced, self.unknown) = (0, 0, 0);
    }

    /// Bytes of heap held now.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let entries = self.locations.capacity() + self.frames.capacity();
        self.ghost.memory_bytes() + entries * size_of::<(PageNumber, PageNumber)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::naive::NaiveStack;
    use proptest::prelude::*;

    fn options(memory: u64, ghost: u64) -> GhostOptions {
        GhostOptions {
            direct: PageCount(memory),
            ghost: PageCount(ghost),
            segment: PageCount(1),
        }
    }

    /// A guest with an LRU page cache of so many frames: its disk reads go to the estimator.
    fn guest(geiger: &mut Geiger, frames: usize, blocks: impl IntoIterator<Item = u64>) -> u64 {
        let mut cache: Vec<(u64, u64)> = Vec::new();
        let mut reads = 0;
        for block in blocks {
            let frame = match cache.iter().position(|&(_, held)| held == block) {
                Some(at) => cache.remove(at).0,
                None => {
                    let frame = if cache.len() < frames {
                        cache.len() as u64
                    } else {
                        cache.pop().unwrap().0
                    };
                    geiger.read(PageNumber(frame), PageNumber(block));
                    reads += 1;
                    frame
                }
            };
            cache.insert(0, (frame, block));
        }
        reads
    }

    #[test]
    fn a_loop_larger_than_the_memory_is_found() {
        let mut geiger = Geiger::new(options(100, 200)).unwrap();
        guest(&mut geiger, 100, (0..150).cycle().take(15_000));
        assert_eq!(
            geiger.working_set(),
            WorkingSet {
                size: PageCount(150),
                bound: WorkingSetBound::Estimate
            }
        );
        assert_eq!(geiger.unplaced(), 0);
    }

    #[test]
    fn a_working_set_smaller_than_the_memory_is_only_bounded() {
        let mut geiger = Geiger::new(options(100, 200)).unwrap();
        guest(&mut geiger, 100, (0..20).cycle().take(15_000));
        let expected = WorkingSet {
            size: PageCount(100),
            bound: WorkingSetBound::AtMost,
        };
        assert_eq!(geiger.working_set(), expected);
    }

    #[test]
    fn a_ghost_too_small_gives_a_lower_bound() {
        let mut geiger = Geiger::new(options(10, 20)).unwrap();
        guest(&mut geiger, 10, (0..20).chain(0..50).cycle().take(7_000));
        assert!(geiger.unknown() > 2_000);
        let expected = WorkingSet {
            size: PageCount(20),
            bound: WorkingSetBound::AtLeast,
        };
        assert_eq!(geiger.working_set(), expected);
    }

    #[test]
    fn a_block_read_while_it_seemed_to_be_there_was_evicted_unseen() {
        let mut geiger = Geiger::new(options(4, 8)).unwrap();
        geiger.read(PageNumber(0), PageNumber(70));
        // Frame 0 was given to a process, and the block is read again into another one.
        geiger.read(PageNumber(1), PageNumber(70));
        assert_eq!(
            (geiger.repeated(), geiger.unplaced(), geiger.evictions()),
            (1, 1, 1)
        );
        assert_eq!(geiger.working_set().bound, WorkingSetBound::AtLeast);
        // That frame 0 is used for another block evicts nothing any more.
        geiger.read(PageNumber(0), PageNumber(71));
        assert_eq!(geiger.evictions(), 1);
    }

    #[test]
    fn a_written_block_is_in_the_frame_it_was_written_from() {
        let mut geiger = Geiger::new(options(4, 8)).unwrap();
        geiger.write(PageNumber(0), PageNumber(70));
        geiger.write(PageNumber(0), PageNumber(70));
        assert_eq!(geiger.evictions(), 0);
        geiger.write(PageNumber(0), PageNumber(71));
        assert_eq!(geiger.evictions(), 1);
        // Written again before it was read: nobody misses the old content.
        geiger.write(PageNumber(1), PageNumber(70));
        geiger.read(PageNumber(2), PageNumber(72));
        assert_eq!(geiger.repeated(), 0);
    }

    proptest! {
        #[test]
        fn repeated_reads_are_those_that_a_larger_memory_saves(
            blocks in prop::collection::vec(0_u64..30, 1..600),
            frames in 1_usize..12,
            more in 1_usize..25,
        ) {
            let mut geiger = Geiger::new(options(frames as u64, 64)).unwrap();
            let reads = guest(&mut geiger, frames, blocks.iter().copied());
            prop_assert_eq!(reads as usize, NaiveStack::misses(&blocks, frames));
            let larger = NaiveStack::misses(&blocks, frames + more) as f64;
            let found = geiger.curve().unwrap().miss_ratio(PageCount((frames + more) as u64));
            prop_assert!((found * reads as f64 - larger).abs() < 1e-6);
        }
    }
}
