//! SIEVE: one queue in the order in which pages entered, and a hand that moves through it from the oldest to the newest.
//!
//! The hand passes pages that were used, which are then unused again, and evicts the first one that was not. From the newest
//! page it goes back to the oldest. A use marks the page and moves nothing.
//!
//! The queue is kept in two parts: the pages before the hand, which it passed, and those after it. A page that is passed
//! moves from the head of the part after the hand to the tail of the part before it, which keeps its place in the whole.
//! Where the hand goes back, the parts change roles.
//!
//! Source: \[Zhang24\] §3.1, algorithm 1. Departs from it in nothing. Cost: a use is a write to a line that was read anyway.

use super::{EvictionPolicy, EvictionPolicyRow, Queue, UseEffect, Verdict};

pub(super) static ROW: EvictionPolicyRow = EvictionPolicyRow {
    name: "sieve",
    summary: "by a hand that passes the pages used since it last came by",
    source: "[Zhang24]",
    cost: "a use marks the page; no memory",
    is_stack: false,
    second_stays: 1,
    remembers: false,
    make: || {
        Box::new(Sieve {
            after_hand: Queue::First,
        })
    },
};

struct Sieve {
    /// The part of the queue after the hand, or the other one if it is empty.
    after_hand: Queue,
}

impl Sieve {
    /// The part after the hand. From the newest page the hand goes back to the oldest, and the parts change roles.
    fn part_after_hand(&self, pages: [u32; 2]) -> Queue {
        if pages[self.after_hand.index()] > 0 {
            self.after_hand
        } else {
            self.after_hand.other()
        }
    }
}

impl EvictionPolicy for Sieve {
    fn enter(&self, _remembered: bool, pages: [u32; 2]) -> Queue {
        self.part_after_hand(pages)
    }

    fn used(&self, _uses: u8) -> UseEffect {
        UseEffect::Counted(1)
    }

    fn next(&self, pages: [u32; 2]) -> Queue {
        self.part_after_hand(pages)
    }

    fn judge(&mut self, queue: Queue, uses: u8) -> Verdict {
        self.after_hand = queue;
        if uses > 0 {
            Verdict::Kept {
                queue: queue.other(),
                uses: 0,
            }
        } else {
            Verdict::Evicted { remembered: false }
        }
    }
}
