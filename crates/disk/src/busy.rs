//! In-flight transfers to and from storage, by block, and their collisions.
//!
//! The data of a transfer counts as a block's contents only if nothing else accessed the block meanwhile.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use crate::{DiskNumber, Location, SubmissionId};

#[derive(Clone, Copy, Default)]
struct Transfers {
    reads: u32,
    /// How many of them are reads into the cache.
    fills: u32,
    writes: u32,
    raced: bool,
}

/// The purpose of a block's transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Fill,
    Write,
}

/// A change of many blocks at once.
struct WideChange {
    submission: SubmissionId,
    disk: DiskNumber,
    first: u64,
    last: u64,
}

#[derive(Default)]
pub(crate) struct BusyBlocks {
    blocks: HashMap<Location, Transfers, RandomState>,
    wide: Vec<WideChange>,
}

impl BusyBlocks {
    /// Records that a transfer of the block begins.
    pub(crate) fn begin(&mut self, location: Location, what: Use) {
        let is_wide = self.is_wide(location);
        let block = self.blocks.entry(location).or_default();
        block.raced |= is_wide
            || match what {
                Use::Read | Use::Fill => block.writes > 0 || block.fills > 0,
                Use::Write => block.reads + block.writes > 0,
            };
        match what {
            Use::Read => block.reads += 1,
            Use::Fill => {
                // Another read would leave the block both in the guest and in the cache.
                block.raced |= block.reads > 0;
                block.reads += 1;
                block.fills += 1;
            }
            Use::Write => block.writes += 1,
        }
    }

    /// Records that a transfer ended. Returns whether nothing else accessed the block meanwhile.
    pub(crate) fn end(&mut self, location: Location, what: Use) -> bool {
        let Some(block) = self.blocks.get_mut(&location) else {
            return false;
        };
        match what {
            Use::Read => block.reads -= 1,
            Use::Fill => {
                block.reads -= 1;
                block.fills -= 1;
            }
            Use::Write => block.writes -= 1,
        }
        let alone = !block.raced;
        if block.reads + block.writes == 0 {
            self.blocks.remove(&location);
        }
        alone
    }

    /// Records that the block's contents change without a transfer.
    pub(crate) fn disturb(&mut self, location: Location) {
        if let Some(block) = self.blocks.get_mut(&location) {
            block.raced = true;
        }
    }

    /// Records that this submission changes the blocks from `first` to `last`.
    pub(crate) fn begin_wide(
        &mut self,
        submission: SubmissionId,
        disk: DiskNumber,
        first: u64,
        last: u64,
    ) {
        let raced = |location: Location, block: &mut Transfers| {
            if location.disk() == disk && (first..=last).contains(&location.block()) {
                block.raced = true;
            }
        };
        if (last - first) < self.blocks.len() as u64 {
            for number in first..=last {
                let location = Location::new(disk, number);
                if let Some(block) = self.blocks.get_mut(&location) {
                    raced(location, block);
                }
            }
        } else {
            for (location, block) in &mut self.blocks {
                raced(*location, block);
            }
        }
        self.wide.push(WideChange {
            submission,
            disk,
            first,
            last,
        });
    }

    /// Records that the submission ended.
    pub(crate) fn end_wide(&mut self, submission: SubmissionId) {
        self.wide.retain(|wide| wide.submission != submission);
    }

    /// Whether the block is being written.
    pub(crate) fn is_written(&self, location: Location) -> bool {
        self.is_wide(location)
            || self
                .blocks
                .get(&location)
                .is_some_and(|block| block.writes > 0)
    }

    fn is_wide(&self, location: Location) -> bool {
        self.wide.iter().any(|wide| {
            wide.disk == location.disk() && (wide.first..=wide.last).contains(&location.block())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: Location = Location::new(DiskNumber(1), 5);

    #[test]
    fn transfers_that_meet_know_nothing() {
        for (first, second, alone) in [
            (Use::Read, Use::Read, true),
            (Use::Read, Use::Write, false),
            (Use::Write, Use::Read, false),
            (Use::Write, Use::Write, false),
            (Use::Fill, Use::Read, false),
            (Use::Read, Use::Fill, false),
        ] {
            let mut busy = BusyBlocks::default();
            busy.begin(BLOCK, first);
            busy.begin(BLOCK, second);
            assert_eq!(busy.end(BLOCK, first), alone, "{first:?} {second:?}");
            assert_eq!(busy.end(BLOCK, second), alone, "{first:?} {second:?}");
            busy.begin(BLOCK, second);
            assert!(busy.end(BLOCK, second), "all is over");
        }
    }

    #[test]
    fn a_wide_change_meets_those_before_and_after_it() {
        for wide in [(5, 5), (0, 1 << 40)] {
            let mut busy = BusyBlocks::default();
            busy.begin(BLOCK, Use::Read);
            busy.begin_wide(SubmissionId(9), BLOCK.disk(), wide.0, wide.1);
            assert!(busy.is_written(BLOCK));
            assert!(!busy.end(BLOCK, Use::Read));
            busy.begin(BLOCK, Use::Read);
            busy.end_wide(SubmissionId(9));
            assert!(!busy.end(BLOCK, Use::Read));
            busy.begin(BLOCK, Use::Read);
            assert!(busy.end(BLOCK, Use::Read) && !busy.is_written(BLOCK));
        }
        let mut busy = BusyBlocks::default();
        busy.begin_wide(SubmissionId(1), DiskNumber(2), 0, 100);
        busy.begin_wide(SubmissionId(2), BLOCK.disk(), 6, 100);
        assert!(!busy.is_written(BLOCK));
    }
}
