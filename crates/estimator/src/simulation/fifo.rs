//! First in, first out. A use changes nothing.

use super::queues::Queues;
use super::{CachePolicy, CachePolicyRow};

pub(super) const ROW: CachePolicyRow = CachePolicyRow {
    name: "fifo",
    help: "First in, first out",
    source: "[Mattson70]",
    make: |capacity, pages| {
        Box::new(Fifo {
            capacity,
            queue: Queues::new(pages),
        })
    },
};

struct Fifo {
    capacity: u32,
    queue: Queues<1>,
}

impl CachePolicy for Fifo {
    fn access(&mut self, page: u32) -> bool {
        if self.queue.queue_of(page).is_some() {
            return true;
        }
        if self.queue.len(0) == self.capacity {
            self.queue.pop(0);
        }
        self.queue.push(0, page);
        false
    }
}

/// The policy on a list, oldest first.
#[cfg(test)]
pub(super) fn naive(capacity: usize, stream: &[u32]) -> Vec<bool> {
    let mut list = Vec::new();
    let access = |&page: &u32| {
        let hit = list.contains(&page);
        if !hit {
            list.push(page);
            if list.len() > capacity {
                list.remove(0);
            }
        }
        hit
    };
    stream.iter().map(access).collect()
}
