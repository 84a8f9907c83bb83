//! S3-FIFO: a small queue that pages pass, a main queue for those that proved useful, and a memory of those that did not.
//!
//! A page enters the small queue, or the main one if it is remembered. The small queue's oldest page moves to the main
//! queue with two uses or more, otherwise it is evicted and remembered. The main queue's oldest page goes to its new end
//! with one use less, and is evicted without uses.
//!
//! Source: [Yang23] §4.1, with the authors' later changes in libCacheSim: while the cache fills, pages enter the main queue
//! once the small one is full; the main queue is judged if it has more than nine tenths, otherwise the small one; the memory
//! has nine tenths as many pages as the cache. Departs from them in this: the small queue has one page at least, while
//! theirs lets no page into caches of fewer than 20.

use super::queues::Queues;
use super::{CachePolicy, CachePolicyRow};

pub(super) const ROW: CachePolicyRow = CachePolicyRow {
    name: "s3-fifo",
    help: "A small queue for new pages, whose useful ones move to a main queue",
    source: "[Yang23]",
    make: |capacity, pages| {
        let small = (capacity / 10).max(1);
        Box::new(S3Fifo {
            capacity,
            small,
            ghosts: u32::try_from(u64::from(capacity) * 9 / 10).unwrap_or(capacity),
            has_evicted: false,
            queues: Queues::new(pages),
        })
    },
};

const SMALL: usize = 0;
const MAIN: usize = 1;
const GHOST: usize = 2;
/// Number of uses with which a page moves from the small queue to the main one.
const USEFUL: u8 = 2;
/// The most uses that count.
const USES_MAX: u8 = 3;

struct S3Fifo {
    capacity: u32,
    /// Pages of the small queue.
    small: u32,
    /// The most pages remembered.
    ghosts: u32,
    has_evicted: bool,
    /// A page's mark is the number of its uses.
    queues: Queues<3>,
}

impl S3Fifo {
    fn remember(&mut self, page: u32) {
        if self.ghosts == 0 {
            return;
        }
        if self.queues.len(GHOST) == self.ghosts {
            self.queues.pop(GHOST);
        }
        self.queues.push(GHOST, page);
    }

    fn evict_from_main(&mut self) {
        loop {
            let page = self.queues.pop(MAIN);
            match self.queues.mark(page) {
                0 => return,
                uses => {
                    self.queues.set_mark(page, uses.min(USES_MAX) - 1);
                    self.queues.push(MAIN, page);
                }
            }
        }
    }

    /// Evicts a page, unless all pages of the small queue move to the main one.
    fn evict(&mut self) {
        self.has_evicted = true;
        if self.queues.len(MAIN) > self.capacity - self.small || self.queues.len(SMALL) == 0 {
            return self.evict_from_main();
        }
        while self.queues.len(SMALL) > 0 {
            let page = self.queues.pop(SMALL);
            if self.queues.mark(page) < USEFUL {
                return self.remember(page);
            }
            self.queues.set_mark(page, 0);
            self.queues.push(MAIN, page);
        }
    }
}

impl CachePolicy for S3Fifo {
    fn access(&mut self, page: u32) -> bool {
        let queue = self.queues.queue_of(page);
        if let Some(SMALL | MAIN) = queue {
            let uses = self.queues.mark(page).saturating_add(1);
            self.queues.set_mark(page, uses);
            return true;
        }
        self.queues.remove(page);
        while self.queues.len(SMALL) + self.queues.len(MAIN) >= self.capacity {
            self.evict();
        }
        let fills_main = !self.has_evicted && self.queues.len(SMALL) >= self.small;
        let enters = if queue.is_some() || fills_main {
            MAIN
        } else {
            SMALL
        };
        self.queues.set_mark(page, 0);
        self.queues.push(enters, page);
        false
    }
}

/// The policy on three lists, oldest first.
#[cfg(test)]
pub(super) fn naive(capacity: usize, stream: &[u32]) -> Vec<bool> {
    let [mut small, mut main] = [const { Vec::<(u32, u32)>::new() }; 2];
    let mut ghost: Vec<u32> = Vec::new();
    let small_size = (capacity / 10).max(1);
    let mut is_filling = true;
    let access = |&page: &u32| {
        for entry in small.iter_mut().chain(&mut main) {
            if entry.0 == page {
                entry.1 += 1;
                return true;
            }
        }
        let place = ghost.iter().position(|&other| other == page);
        if let Some(place) = place {
            ghost.remove(place);
        }
        while small.len() + main.len() == capacity {
            is_filling = false;
            if main.len() > capacity - small_size || small.is_empty() {
                while main[0].1 > 0 {
                    let (other, uses) = main.remove(0);
                    main.push((other, uses.min(3) - 1));
                }
                main.remove(0);
            } else {
                while !small.is_empty() {
                    let (other, uses) = small.remove(0);
                    if uses >= 2 {
                        main.push((other, 0));
                    } else {
                        ghost.push(other);
                        if ghost.len() > capacity * 9 / 10 {
                            ghost.remove(0);
                        }
                        break;
                    }
                }
            }
        }
        if place.is_some() || is_filling && small.len() >= small_size {
            main.push((page, 0));
        } else {
            small.push((page, 0));
        }
        false
    };
    stream.iter().map(access).collect()
}
