//! Least recently used: simulated like the others, to compare its curve at the same sizes.

use super::queues::Queues;
use super::{CachePolicy, CachePolicyRow};

pub(super) const ROW: CachePolicyRow = CachePolicyRow {
    name: "lru",
    help: "Least recently used; --estimator has its whole curve in one pass",
    source: "[Mattson70]",
    make: |capacity, pages| {
        Box::new(Lru {
            capacity,
            queue: Queues::new(pages),
        })
    },
};

struct Lru {
    capacity: u32,
    queue: Queues<1>,
}

impl CachePolicy for Lru {
    fn access(&mut self, page: u32) -> bool {
        let hit = self.queue.queue_of(page).is_some();
        if !hit && self.queue.len(0) == self.capacity {
            self.queue.pop(0);
        }
        self.queue.push(0, page);
        hit
    }
}

/// The policy on a list, most recent first.
#[cfg(test)]
pub(super) fn naive(capacity: usize, stream: &[u32]) -> Vec<bool> {
    let mut list: Vec<u32> = Vec::new();
    let access = |&page: &u32| {
        let depth = list.iter().position(|&other| other == page);
        if let Some(depth) = depth {
            list.remove(depth);
        }
        list.insert(0, page);
        list.truncate(capacity);
        depth.is_some()
    };
    stream.iter().map(access).collect()
}
