//! SIEVE: a queue in the order of entry, and a hand that moves from the oldest page to the newest.
//!
//! The hand passes pages that were used, which are then unused again, and evicts the first one that was not. From the
//! newest page it goes back to the oldest.
//!
//! Source: [Zhang24] §3.1, algorithm 1. Departs from it in nothing.

use super::queues::{NONE, Queues};
use super::{CachePolicy, CachePolicyRow};

pub(super) const ROW: CachePolicyRow = CachePolicyRow {
    name: "sieve",
    help: "A hand evicts the first page unused since it last came by",
    source: "[Zhang24]",
    make: |capacity, pages| {
        Box::new(Sieve {
            capacity,
            queue: Queues::new(pages),
            hand: NONE,
        })
    },
};

struct Sieve {
    capacity: u32,
    /// A page's mark is 1 if it was used.
    queue: Queues<1>,
    /// The page that is judged next; [`NONE`] for the oldest.
    hand: u32,
}

impl Sieve {
    fn evict(&mut self) {
        loop {
            let page = match self.hand {
                NONE => self.queue.oldest(0),
                hand => hand,
            };
            self.hand = self.queue.newer(page);
            if self.queue.mark(page) == 0 {
                self.queue.remove(page);
                return;
            }
            self.queue.set_mark(page, 0);
        }
    }
}

impl CachePolicy for Sieve {
    fn access(&mut self, page: u32) -> bool {
        if self.queue.queue_of(page).is_some() {
            self.queue.set_mark(page, 1);
            return true;
        }
        if self.queue.len(0) == self.capacity {
            self.evict();
        }
        self.queue.set_mark(page, 0);
        self.queue.push(0, page);
        false
    }
}

/// The policy on a list of pages and whether they were used, newest first, as the paper draws it.
#[cfg(test)]
pub(super) fn naive(capacity: usize, stream: &[u32]) -> Vec<bool> {
    let mut list: Vec<(u32, bool)> = Vec::new();
    // Place of the hand, counted from the oldest page.
    let mut hand = 0;
    let access = |&page: &u32| {
        if let Some(entry) = list.iter_mut().find(|(other, _)| *other == page) {
            entry.1 = true;
            return true;
        }
        if list.len() == capacity {
            loop {
                let place = list.len() - 1 - hand;
                if list[place].1 {
                    list[place].1 = false;
                    hand = (hand + 1) % list.len();
                } else {
                    list.remove(place);
                    break;
                }
            }
            // Of the newest page the hand goes back to the oldest.
            if hand == list.len() {
                hand = 0;
            }
        }
        list.insert(0, (page, false));
        false
    };
    stream.iter().map(access).collect()
}
