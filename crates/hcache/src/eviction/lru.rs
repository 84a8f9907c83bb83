//! Least recently used: one queue, at whose tail a page that is used goes.
//!
//! Source: \[Mattson70\]. Cost: a use takes the page out of the queue and links it in again, six lines of memory in all.

use super::{EvictionPolicy, EvictionPolicyRow, Queue, UseEffect, Verdict};

pub(super) static ROW: EvictionPolicyRow = EvictionPolicyRow {
    name: "lru",
    summary: "the page that was not used for the longest time",
    source: "[Mattson70]",
    cost: "a use moves the page; no memory",
    is_stack: true,
    second_stays: 1,
    remembers: false,
    make: || Box::new(Lru),
};

struct Lru;

impl EvictionPolicy for Lru {
    fn enter(&self, _remembered: bool, _pages: [u32; 2]) -> Queue {
        Queue::First
    }

    fn used(&self, _uses: u8) -> UseEffect {
        UseEffect::Moved(Queue::First)
    }

    fn next(&self, _pages: [u32; 2]) -> Queue {
        Queue::First
    }

    fn judge(&mut self, _queue: Queue, _uses: u8) -> Verdict {
        Verdict::Evicted { remembered: false }
    }
}
