//! S3-FIFO: a small queue that pages pass, a main queue for those that proved useful, and a memory of those that did not.
//!
//! A page enters the small queue, or the main one if it is remembered. While the small queue has a tenth of the pages or
//! more, its oldest page is judged: with two uses or more it goes to the main queue, otherwise it is evicted and
//! remembered. Of the main queue the oldest page goes to the tail with one use less, and is evicted without uses.
//!
//! Source: \[Yang23\] §4.1. Departs from it in this: the tenth is of the pages that the pool has in the shard, because the
//! store has no fixed number of pages for it; pages that a get took out of a private pool are remembered too.
//! Cost: a use is a write to a line that was read anyway; 4.8 bytes a page for the memory of those that left.

use super::{EvictionPolicy, EvictionPolicyRow, Queue, USES_MAX, UseEffect, Verdict};

pub(super) static ROW: EvictionPolicyRow = EvictionPolicyRow {
    name: "s3-fifo",
    summary: "of a small queue for new pages, whose useful ones move to a main queue",
    source: "[Yang23]",
    cost: "a use counts; 4.8 bytes a page for pages that left",
    is_stack: false,
    second_stays: SMALL_ONE_IN - 1,
    remembers: true,
    make: || Box::new(S3Fifo),
};

const SMALL: Queue = Queue::First;
const MAIN: Queue = Queue::Second;

/// The small queue has one in so many pages.
const SMALL_ONE_IN: u64 = 10;
/// Number of uses with which a page moves from the small queue to the main one.
const USEFUL: u8 = 2;

struct S3Fifo;

impl EvictionPolicy for S3Fifo {
    fn enter(&self, remembered: bool, _pages: [u32; 2]) -> Queue {
        if remembered { MAIN } else { SMALL }
    }

    fn used(&self, uses: u8) -> UseEffect {
        UseEffect::Counted((uses + 1).min(USES_MAX))
    }

    fn next(&self, [small, main]: [u32; 2]) -> Queue {
        let (small, main) = (u64::from(small), u64::from(main));
        if small > 0 && small * SMALL_ONE_IN >= small + main {
            SMALL
        } else {
            MAIN
        }
    }

    fn judge(&mut self, queue: Queue, uses: u8) -> Verdict {
        match queue {
            SMALL if uses >= USEFUL => Verdict::Kept {
                queue: MAIN,
                uses: 0,
            },
            SMALL => Verdict::Evicted { remembered: true },
            MAIN if uses > 0 => Verdict::Kept {
                queue: MAIN,
                uses: uses - 1,
            },
            MAIN => Verdict::Evicted { remembered: false },
        }
    }

    fn remembers_taken(&self) -> bool {
        true
    }
}
