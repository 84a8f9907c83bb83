//! Records of a page log: one word of 64 bits per event.
//!
//! Lowest bit first; unnamed bits are 0. A page frame is a guest-physical address / 4096.
//!
//! | kind, bits 61..64 | event | bits 0..32 | 32..52 | 52 | 53 | 54 | 55 | 56..61 |
//! |---|---|---|---|---|---|---|---|---|
//! | 0 | page walk | frame | instructions since the vCPU's previous record | sets dirty | sets accessed | fetch | write | vCPU |
//! | 1 | clock | instructions of the vCPU since its start, bits 0..56 | | | | | | vCPU |
//! | 2 | end of an interval | its number, from 0, bits 0..56 | | | | | | 0 |
//! | 3 | mark by the guest | its number, bits 0..8 | 0 | 0 | 0 | 0 | 0 | vCPU |
//! | 4 | reference: a page enters the filter | frame | 0 | 0 | 0 | 0 | write | vCPU |
//! | 5 | reference: a page leaves the filter | frame | 0 | 0 | 0 | 0 | 0 | vCPU |
//! | 6 | accesses since the vCPU's previous count | count, bits 0..56 | | | | | | vCPU |
//! | 7 | end of the log | 0 | 0 | 0 | 0 | 0 | 0 | 0 |
//!
//! If a vCPU has executed 2^20 instructions or more since its previous record, a clock record precedes the walk.
//! At the end of an interval every vCPU's clock and count precede its record; then the accessed and dirty
//! flags of all pages are cleared and all TLBs emptied, as after INVEPT.
//!
//! The *filter* contains the pages that a vCPU used most recently, a fixed number of them in the order of their use. An
//! access to one of them makes no record. The records of pages that enter and leave are sufficient for the exact misses
//! at all sizes from the filter's up.

use plimsoll_flow::PageNumber;

/// Maximum number of vCPUs in a log.
pub const VCPUS_MAX: usize = 32;
/// Largest page frame number: 16 TiB of guest-physical addresses.
pub const FRAME_MAX: u64 = u32::MAX as u64;
/// Maximum number of instructions between a walk and its vCPU's previous record.
pub const STEP_MAX: u32 = (1 << 20) - 1;
/// Largest count, clock value and interval number.
pub const COUNT_MAX: u64 = (1 << 56) - 1;
/// Maximum capacity of a ring in records (8 GiB).
pub const RING_RECORDS_MAX: u64 = 1 << 30;

/// A page walk, after a TLB miss or a write to a page whose entry is clean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Walk {
    /// The vCPU that walked, below [`VCPUS_MAX`].
    pub vcpu: u8,
    /// The page, at most [`FRAME_MAX`].
    pub frame: PageNumber,
    /// Instructions of the vCPU since its previous record, at most [`STEP_MAX`].
    pub step_instructions: u32,
    /// Whether the access was a write.
    pub write: bool,
    /// Whether the access was an instruction fetch.
    pub fetch: bool,
    /// Whether it set the page's accessed flag.
    pub sets_accessed: bool,
    /// Whether it set the page's dirty flag.
    pub sets_dirty: bool,
}

/// An event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the others suffice")]
pub enum Record {
    /// A page walk.
    Walk(Walk),
    /// The number of instructions that a vCPU has executed since its start.
    Clock { vcpu: u8, instructions: u64 },
    /// An interval ended.
    Interval { number: u64 },
    /// The guest set a mark in its run.
    Mark {
        vcpu: u8,
        /// Number of the mark.
        id: u8,
    },
    /// A page entered a vCPU's filter: a reference.
    Enter {
        vcpu: u8,
        frame: PageNumber,
        /// Whether the access was a write.
        write: bool,
    },
    /// A page left a vCPU's filter: the least recently used one.
    Leave { vcpu: u8, frame: PageNumber },
    /// Number of memory accesses; in a log with references and a TLB of instructions, also of blocks of instructions that were
    /// fetched: the references of which `Enter` tells those past the filter.
    Accesses {
        vcpu: u8,
        /// Accesses since the vCPU's previous count.
        count: u64,
    },
    /// The end of a complete log.
    End,
}

/// A word that is not a valid record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{word:#018x} is no record of a page log: bits that must be 0 are not")]
pub struct NotARecord {
    /// The word.
    pub word: u64,
}

const KIND_SHIFT: u32 = 61;
const VCPU_SHIFT: u32 = 56;
const WRITE: u64 = 1 << 55;
const FETCH: u64 = 1 << 54;
const SETS_ACCESSED: u64 = 1 << 53;
const SETS_DIRTY: u64 = 1 << 52;
const STEP_SHIFT: u32 = 32;

/// Mark of the test workload: start of the part to analyse.
pub const MARK_BEGIN: u8 = 1;
/// Mark of the test workload: end of the part to analyse.
pub const MARK_END: u8 = 2;

impl Record {
    /// Decodes a word.
    ///
    /// # Errors
    ///
    /// [`NotARecord`] if undefined bits are set.
    pub fn decode(word: u64) -> Result<Self, NotARecord> {
        let vcpu = (word >> VCPU_SHIFT) as u8 & 31;
        let frame = PageNumber(word & FRAME_MAX);
        let count = word & COUNT_MAX;
        let (record, used) = match word >> KIND_SHIFT {
            0 => {
                let step_instructions = (word >> STEP_SHIFT) as u32 & STEP_MAX;
                let walk = Walk {
                    vcpu,
                    frame,
                    step_instructions,
                    write: word & WRITE != 0,
                    fetch: word & FETCH != 0,
                    sets_accessed: word & SETS_ACCESSED != 0,
                    sets_dirty: word & SETS_DIRTY != 0,
                };
                (Self::Walk(walk), word)
            }
            1 => {
                let instructions = count;
                (Self::Clock { vcpu, instructions }, word)
            }
            2 => (Self::Interval { number: count }, count),
            3 => {
                #[expect(clippy::cast_possible_truncation, reason = "eight bits")]
                let id = word as u8;
                let used = u64::from(id) | u64::from(vcpu) << VCPU_SHIFT;
                (Self::Mark { vcpu, id }, used)
            }
            4 => {
                let write = word & WRITE != 0;
                let used = frame.0 | u64::from(vcpu) << VCPU_SHIFT | (word & WRITE);
                (Self::Enter { vcpu, frame, write }, used)
            }
            5 => {
                let used = frame.0 | u64::from(vcpu) << VCPU_SHIFT;
                (Self::Leave { vcpu, frame }, used)
            }
            6 => (Self::Accesses { vcpu, count }, word),
            _ => (Self::End, 0),
        };
        let mask = (1 << KIND_SHIFT) - 1;
        if word & mask == used & mask {
            Ok(record)
        } else {
            Err(NotARecord { word })
        }
    }

    /// Encodes the record as a word; values too large for their fields are truncated.
    pub fn encode(self) -> u64 {
        let of = |kind: u64, vcpu: u8| kind << KIND_SHIFT | (u64::from(vcpu) & 31) << VCPU_SHIFT;
        match self {
            Self::Walk(walk) => {
                let flag = |set: bool, bit: u64| if set { bit } else { 0 };
                of(0, walk.vcpu)
                    | flag(walk.write, WRITE)
                    | flag(walk.fetch, FETCH)
                    | flag(walk.sets_accessed, SETS_ACCESSED)
                    | flag(walk.sets_dirty, SETS_DIRTY)
                    | u64::from(walk.step_instructions & STEP_MAX) << STEP_SHIFT
                    | (walk.frame.0 & FRAME_MAX)
            }
            Self::Clock { vcpu, instructions } => of(1, vcpu) | (instructions & COUNT_MAX),
            Self::Interval { number } => of(2, 0) | (number & COUNT_MAX),
            Self::Mark { vcpu, id } => of(3, vcpu) | u64::from(id),
            Self::Enter { vcpu, frame, write } => {
                of(4, vcpu) | if write { WRITE } else { 0 } | (frame.0 & FRAME_MAX)
            }
            Self::Leave { vcpu, frame } => of(5, vcpu) | (frame.0 & FRAME_MAX),
            Self::Accesses { vcpu, count } => of(6, vcpu) | (count & COUNT_MAX),
            Self::End => of(7, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_word_is_a_record_that_is_that_word_or_none(word: u64) {
            match Record::decode(word) {
                Ok(record) => prop_assert_eq!(record.encode(), word),
                Err(error) => prop_assert_eq!(error.word, word),
            }
        }
    }

    #[test]
    fn each_kind_survives_the_way() {
        let frame = PageNumber(FRAME_MAX);
        let walk = Walk {
            vcpu: 31,
            frame,
            step_instructions: STEP_MAX,
            write: true,
            fetch: false,
            sets_accessed: true,
            sets_dirty: false,
        };
        for record in [
            Record::Walk(walk),
            Record::Clock {
                vcpu: 3,
                instructions: COUNT_MAX,
            },
            Record::Interval { number: 7 },
            Record::Mark { vcpu: 1, id: 255 },
            Record::Enter {
                vcpu: 2,
                frame,
                write: true,
            },
            Record::Leave { vcpu: 2, frame },
            Record::Accesses { vcpu: 0, count: 9 },
            Record::End,
        ] {
            assert_eq!(Record::decode(record.encode()), Ok(record));
        }
    }

    #[test]
    fn bits_without_a_meaning_are_refused() {
        for word in [
            2 << KIND_SHIFT | 1 << VCPU_SHIFT,
            3 << KIND_SHIFT | 256,
            4 << KIND_SHIFT | 1 << 40,
            5 << KIND_SHIFT | WRITE,
            7 << KIND_SHIFT | 1,
        ] {
            assert_eq!(Record::decode(word), Err(NotARecord { word }));
        }
    }
}
