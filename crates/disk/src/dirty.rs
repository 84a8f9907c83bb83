//! Dirty blocks: delayed writes not yet on storage, in the order in which they must be written. Their contents are in the
//! [dirty log](DirtyPages).
//!
//! A block is *waiting*, *being written* (and perhaps overwritten meanwhile), or *held* after a failed write until the
//! next turn; after that it waits to be written *again*. It carries the number of the oldest write that storage lacks. A flush covers all writes up to a number
//! and is complete when no block has an older one, so a block that is overwritten repeatedly cannot delay it forever.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::time::Duration;

use foldhash::fast::RandomState;

use crate::{DirtyPages, DiskNumber, Location, Page};

/// Dirty pages of an engine without a log: they end with the process.
#[derive(Default)]
pub(crate) struct PagesInMemory(HashMap<Location, Box<Page>, RandomState>);

impl DirtyPages for PagesInMemory {
    fn record(&mut self, location: Location, page: &Page) -> io::Result<()> {
        self.0.insert(location, Box::new(*page));
        Ok(())
    }

    fn read(&mut self, location: Location, page: &mut Page) -> io::Result<()> {
        let found = self.0.get(&location).ok_or(io::ErrorKind::NotFound)?;
        page.copy_from_slice(&found[..]);
        Ok(())
    }

    fn clean(&mut self, location: Location) {
        self.0.remove(&location);
    }
}

/// Number of a delayed write, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct WriteNumber(pub u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waiting,
    Writing {
        /// The first write since its start.
        after: Option<WriteNumber>,
    },
    /// The write failed; it is retried at the next turn.
    Held,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    /// The oldest write that storage lacks.
    since: WriteNumber,
    /// Time of the write `since`.
    born: Duration,
    phase: Phase,
    /// Whether it could not be written when it was last tried.
    failed: bool,
}

#[derive(Default)]
struct Disk {
    /// Blocks to be written, by their oldest write.
    waiting: BTreeMap<WriteNumber, Location>,
    /// Blocks being written or held, by their oldest write.
    others: BTreeMap<WriteNumber, Location>,
    /// Number of its blocks that failed.
    failed: usize,
    /// Number of those that are held.
    held: usize,
}

/// The dirty blocks of a VM's disks.
#[derive(Default)]
pub(crate) struct Dirty {
    blocks: HashMap<Location, Block, RandomState>,
    disks: BTreeMap<DiskNumber, Disk>,
    last: WriteNumber,
    writing: usize,
    /// Waiting blocks that failed.
    again: BTreeSet<Location>,
}

/// The state of a block after its write-back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteBackResult {
    /// It is on storage.
    Clean,
    /// It was overwritten meanwhile, or writing failed: it is still dirty.
    StillDirty,
}

impl Dirty {
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn contains(&self, location: Location) -> bool {
        self.blocks.contains_key(&location)
    }

    /// Number of blocks being written.
    pub(crate) fn writing(&self) -> usize {
        self.writing
    }

    /// Number of dirty blocks of the disk.
    pub(crate) fn of_disk(&self, disk: DiskNumber) -> usize {
        self.disks
            .get(&disk)
            .map_or(0, |disk| disk.waiting.len() + disk.others.len())
    }

    pub(crate) fn locations(&self) -> impl Iterator<Item = Location> {
        self.blocks.keys().copied()
    }

    /// The number of the newest write.
    pub(crate) fn last(&self) -> WriteNumber {
        self.last
    }

    /// Records a write of the block that storage lacks.
    pub(crate) fn write(&mut self, location: Location, now: Duration) {
        self.last.0 += 1;
        let number = self.last;
        let block = self.blocks.entry(location).or_insert_with(|| {
            let disk = self.disks.entry(location.disk()).or_default();
            disk.waiting.insert(number, location);
            Block {
                since: number,
                born: now,
                phase: Phase::Waiting,
                failed: false,
            }
        });
        if let Phase::Writing { after } = &mut block.phase {
            after.get_or_insert(number);
        }
    }

    /// The waiting blocks of the disk that lack a write up to `upto`, oldest first.
    pub(crate) fn oldest(
        &self,
        disk: DiskNumber,
        upto: WriteNumber,
    ) -> impl Iterator<Item = Location> {
        self.disks
            .get(&disk)
            .into_iter()
            .flat_map(move |disk| disk.waiting.range(..=upto).map(|(_, location)| *location))
    }

    /// The waiting blocks of all disks that have been dirty since before `then`, oldest first within a disk.
    pub(crate) fn born_before(&self, then: Duration) -> impl Iterator<Item = Location> {
        self.disks.values().flat_map(move |disk| {
            disk.waiting
                .values()
                .copied()
                .take_while(move |location| self.blocks[location].born < then)
        })
    }

    /// The waiting block of all disks that was dirtied first.
    pub(crate) fn oldest_of_all(&self) -> Option<Location> {
        self.disks
            .values()
            .filter_map(|disk| disk.waiting.first_key_value())
            .min()
            .map(|(_, location)| *location)
    }

    /// Whether the block could not be written when it was last tried.
    pub(crate) fn has_failed(&self, location: Location) -> bool {
        self.blocks.get(&location).is_some_and(|block| block.failed)
    }

    /// Number of the disk's blocks that could not be written when it was last tried.
    pub(crate) fn failed(&self, disk: DiskNumber) -> usize {
        self.disks.get(&disk).map_or(0, |disk| disk.failed)
    }

    /// Whether a block of the disk could not be written and was not tried again since.
    pub(crate) fn is_held(&self, disk: DiskNumber) -> bool {
        self.disks.get(&disk).is_some_and(|disk| disk.held > 0)
    }

    /// The waiting blocks that failed before.
    pub(crate) fn again(&self) -> impl Iterator<Item = Location> {
        self.again.iter().copied()
    }

    /// Records that an earlier process could not write a waiting block.
    pub(crate) fn fail(&mut self, location: Location) {
        if let Some(block) = self.blocks.get_mut(&location)
            && !block.failed
        {
            block.failed = true;
            self.disks.entry(location.disk()).or_default().failed += 1;
            self.again.insert(location);
        }
    }

    /// Whether the block waits to be written.
    pub(crate) fn waits(&self, location: Location) -> bool {
        self.blocks
            .get(&location)
            .is_some_and(|block| block.phase == Phase::Waiting)
    }

    /// Marks a waiting block as being written.
    pub(crate) fn start(&mut self, location: Location) {
        let Some(block) = self.blocks.get_mut(&location) else {
            return;
        };
        block.phase = Phase::Writing { after: None };
        self.writing += 1;
        self.again.remove(&location);
        let disk = self.disks.entry(location.disk()).or_default();
        disk.waiting.remove(&block.since);
        disk.others.insert(block.since, location);
    }

    /// Records the result of writing the block.
    pub(crate) fn finish(
        &mut self,
        location: Location,
        written: bool,
        now: Duration,
    ) -> WriteBackResult {
        let Some(block) = self.blocks.get_mut(&location) else {
            return WriteBackResult::Clean;
        };
        let Phase::Writing { after } = block.phase else {
            return WriteBackResult::StillDirty;
        };
        self.writing -= 1;
        let disk = self.disks.entry(location.disk()).or_default();
        disk.others.remove(&block.since);
        disk.failed -= usize::from(block.failed);
        block.failed = !written;
        disk.failed += usize::from(block.failed);
        match (written, after) {
            (true, None) => {
                self.blocks.remove(&location);
                WriteBackResult::Clean
            }
            (true, Some(after)) => {
                block.since = after;
                block.born = now;
                block.phase = Phase::Waiting;
                disk.waiting.insert(block.since, location);
                WriteBackResult::StillDirty
            }
            (false, _) => {
                block.phase = Phase::Held;
                disk.held += 1;
                disk.others.insert(block.since, location);
                WriteBackResult::StillDirty
            }
        }
    }

    /// Makes blocks whose write failed, of one disk or all, wait again.
    pub(crate) fn retry(&mut self, only: Option<DiskNumber>) {
        for (number, disk) in &mut self.disks {
            if disk.failed == 0 || only.is_some_and(|only| only != *number) {
                continue;
            }
            let held: Vec<(WriteNumber, Location)> = disk
                .others
                .iter()
                .filter(|(_, location)| self.blocks[location].phase == Phase::Held)
                .map(|(number, location)| (*number, *location))
                .collect();
            for (number, location) in held {
                disk.others.remove(&number);
                disk.held -= 1;
                disk.waiting.insert(number, location);
                self.again.insert(location);
                if let Some(block) = self.blocks.get_mut(&location) {
                    block.phase = Phase::Waiting;
                }
            }
        }
    }

    /// Drops a block whose contents are no longer needed. Returns whether it is clean now: not while it is being
    /// written.
    pub(crate) fn drop_block(&mut self, location: Location) -> bool {
        let Some(block) = self.blocks.get(&location) else {
            return true;
        };
        if matches!(block.phase, Phase::Writing { .. }) {
            return false;
        }
        let (since, failed) = (block.since, block.failed);
        let held = block.phase == Phase::Held;
        self.blocks.remove(&location);
        self.again.remove(&location);
        let disk = self.disks.entry(location.disk()).or_default();
        disk.failed -= usize::from(failed);
        disk.held -= usize::from(held);
        disk.waiting.remove(&since);
        disk.others.remove(&since);
        true
    }

    /// Whether storage has all writes of the disk up to `upto`.
    pub(crate) fn is_written(&self, disk: DiskNumber, upto: WriteNumber) -> bool {
        self.disks.get(&disk).is_none_or(|disk| {
            let first = |map: &BTreeMap<WriteNumber, Location>| {
                map.first_key_value().is_none_or(|(n, _)| *n > upto)
            };
            first(&disk.waiting) && first(&disk.others)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn at(number: u64) -> Location {
        Location::new(DiskNumber(u16::from(number % 2 == 1)), number)
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write(u64),
        Start(u64),
        Finish(u64, bool),
        Drop(u64),
        Retry,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..6u64).prop_map(Step::Write),
            3 => (0..6u64).prop_map(Step::Start),
            3 => (0..6u64, prop::bool::weighted(0.8)).prop_map(|(n, ok)| Step::Finish(n, ok)),
            1 => (0..6u64).prop_map(Step::Drop),
            1 => Just(Step::Retry),
        ]
    }

    proptest! {
        /// Against a twin that keeps every write of every block until storage has it or a newer one.
        #[test]
        fn a_flush_waits_for_all_it_covers(steps in prop::collection::vec(step(), 1..120)) {
            let mut dirty = Dirty::default();
            let mut lacking: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
            let mut writing: BTreeMap<u64, u64> = BTreeMap::new();
            for step in &steps {
                match *step {
                    Step::Write(n) => {
                        dirty.write(at(n), Duration::ZERO);
                        lacking.entry(n).or_default().push(dirty.last().0);
                    }
                    Step::Start(n) => if dirty.waits(at(n)) {
                        dirty.start(at(n));
                        writing.insert(n, dirty.last().0);
                    }
                    Step::Finish(n, ok) => if let Some(upto) = writing.remove(&n) {
                        let after = dirty.finish(at(n), ok, Duration::ZERO);
                        if ok {
                            let left = lacking.get_mut(&n).unwrap();
                            left.retain(|write| *write > upto);
                            if left.is_empty() {
                                lacking.remove(&n);
                            }
                        }
                        prop_assert_eq!(after == WriteBackResult::Clean, !lacking.contains_key(&n));
                    }
                    Step::Drop(n) => if dirty.drop_block(at(n)) {
                        lacking.remove(&n);
                    } else {
                        prop_assert!(writing.contains_key(&n));
                    }
                    Step::Retry => dirty.retry(None),
                }
                prop_assert_eq!(dirty.len(), lacking.len());
                prop_assert_eq!(dirty.writing(), writing.len());
                for disk in 0..2 {
                    let failed = |n: &&u64| **n % 2 == disk && dirty.has_failed(at(**n));
                    let number = DiskNumber(u16::try_from(disk).unwrap());
                    prop_assert_eq!(dirty.failed(number), lacking.keys().filter(failed).count());
                }
                for disk in 0..2 {
                    let held = |n: u64| n % 2 == disk && dirty.has_failed(at(n)) && !dirty.waits(at(n)) && !writing.contains_key(&n);
                    let number = DiskNumber(u16::try_from(disk).unwrap());
                    prop_assert_eq!(dirty.is_held(number), (0..6).any(held));
                }
                let again: Vec<_> = (0..6).map(at).filter(|at| dirty.has_failed(*at) && dirty.waits(*at)).collect();
                let mut waiting: Vec<_> = dirty.again().collect();
                waiting.sort_by_key(|at| at.block());
                prop_assert_eq!(waiting, again);
                for disk in 0..2 {
                    let oldest = lacking.iter().filter(|(n, _)| **n % 2 == disk).map(|(_, w)| w[0]).min();
                    for upto in 0..=dirty.last().0 {
                        let number = DiskNumber(u16::try_from(disk).unwrap());
                        prop_assert_eq!(
                            dirty.is_written(number, WriteNumber(upto)),
                            oldest.is_none_or(|oldest| oldest > upto)
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn pages_in_memory_go_when_they_are_clean() {
        let mut pages = PagesInMemory::default();
        let mut page = [0; crate::PAGE_BYTES];
        pages.record(at(2), &[7; crate::PAGE_BYTES]).unwrap();
        pages.read(at(2), &mut page).unwrap();
        assert_eq!(page[0], 7);
        pages.clean(at(2));
        let gone = pages.read(at(2), &mut page).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_oldest_write_comes_first_even_if_overwritten() {
        let mut dirty = Dirty::default();
        for number in [4, 2, 0, 4] {
            dirty.write(at(number), Duration::from_secs(number));
        }
        let all: Vec<_> = dirty.oldest(DiskNumber(0), dirty.last()).collect();
        assert_eq!(all, [at(4), at(2), at(0)]);
        assert_eq!(dirty.oldest_of_all(), Some(at(4)));
        assert_eq!(
            dirty.born_before(Duration::from_secs(4)).count(),
            0,
            "the oldest is young"
        );
        dirty.write(at(1), Duration::ZERO);
        assert_eq!(dirty.oldest_of_all(), Some(at(4)), "of all disks");
    }

    #[test]
    fn what_failed_on_one_disk_is_retried_without_the_others() {
        let mut dirty = Dirty::default();
        for number in [2, 3, 4] {
            dirty.write(at(number), Duration::ZERO);
            dirty.start(at(number));
            dirty.finish(at(number), false, Duration::ZERO);
        }
        assert_eq!(dirty.of_disk(DiskNumber(0)), 2);
        dirty.retry(Some(DiskNumber(1)));
        assert_eq!(dirty.again().collect::<Vec<_>>(), [at(3)]);
        assert!(!dirty.waits(at(2)) && dirty.waits(at(3)) && !dirty.waits(at(4)));
        dirty.retry(None);
        assert_eq!(dirty.again().count(), 3);
        assert_eq!(
            [DiskNumber(0), DiskNumber(1)].map(|disk| dirty.of_disk(disk)),
            [2, 1]
        );
    }

    #[test]
    fn a_block_overwritten_while_it_is_written_is_as_old_as_its_write_back() {
        let mut dirty = Dirty::default();
        let second = Duration::from_secs;
        dirty.write(at(2), second(1));
        dirty.start(at(2));
        dirty.write(at(2), second(2));
        dirty.finish(at(2), true, second(5));
        assert_eq!(dirty.born_before(second(5)).next(), None);
        assert_eq!(dirty.born_before(second(6)).next(), Some(at(2)));
    }

    #[test]
    fn what_an_earlier_process_could_not_write_is_counted_once_and_written_again() {
        let mut dirty = Dirty::default();
        dirty.write(at(2), Duration::ZERO);
        for _ in 0..2 {
            dirty.fail(at(2));
        }
        dirty.fail(at(4));
        assert_eq!((dirty.failed(DiskNumber(0)), dirty.len()), (1, 1));
        assert_eq!(dirty.again().collect::<Vec<_>>(), [at(2)]);
        dirty.start(at(2));
        assert_eq!(dirty.again().next(), None);
        assert_eq!(
            dirty.finish(at(2), true, Duration::ZERO),
            WriteBackResult::Clean
        );
        assert_eq!(dirty.failed(DiskNumber(0)), 0);
    }
}
