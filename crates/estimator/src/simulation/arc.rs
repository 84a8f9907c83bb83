//! ARC: pages used once and pages used again in two LRU queues, whose share follows the hits in queues of what each evicted.
//!
//! Source: [Megiddo03] figure 4. Departs from it in nothing.

use super::queues::Queues;
use super::{CachePolicy, CachePolicyRow};

pub(super) const ROW: CachePolicyRow = CachePolicyRow {
    name: "arc",
    help: "Shares the cache between pages used once and more often",
    source: "[Megiddo03]",
    make: |capacity, pages| {
        Box::new(Arc {
            capacity,
            target: 0.0,
            queues: Queues::new(pages),
        })
    },
};

/// Pages used once, and those used again: in the cache,
const ONCE: usize = 0;
const AGAIN: usize = 1;
/// and evicted, but remembered.
const ONCE_GONE: usize = 2;
const AGAIN_GONE: usize = 3;

struct Arc {
    capacity: u32,
    /// Number of pages used once that the cache is to have; the quotients by which it moves are no whole numbers.
    target: f64,
    queues: Queues<4>,
}

impl Arc {
    /// Evicts and remembers one page.
    fn replace(&mut self, was_used_again: bool) {
        let once = self.queues.len(ONCE);
        let over = f64::from(once) - self.target;
        let from_once = over > 0.0 || was_used_again && over == 0.0;
        if once > 0 && from_once || self.queues.len(AGAIN) == 0 {
            let page = self.queues.pop(ONCE);
            self.queues.push(ONCE_GONE, page);
        } else {
            let page = self.queues.pop(AGAIN);
            self.queues.push(AGAIN_GONE, page);
        }
    }

    /// Makes room for a page of which nothing is known.
    fn make_room(&mut self) {
        let [once, again, once_gone, again_gone] =
            [ONCE, AGAIN, ONCE_GONE, AGAIN_GONE].map(|queue| self.queues.len(queue));
        if once + once_gone == self.capacity {
            if once < self.capacity {
                self.queues.pop(ONCE_GONE);
                self.replace(false);
            } else {
                self.queues.pop(ONCE);
            }
        } else if once + once_gone + again + again_gone >= self.capacity {
            if once + once_gone + again + again_gone == 2 * self.capacity {
                self.queues.pop(AGAIN_GONE);
            }
            self.replace(false);
        }
    }
}

impl CachePolicy for Arc {
    fn access(&mut self, page: u32) -> bool {
        let queue = self.queues.queue_of(page);
        let gone = [ONCE_GONE, AGAIN_GONE].map(|queue| f64::from(self.queues.len(queue)));
        match queue {
            Some(ONCE | AGAIN) => {
                self.queues.push(AGAIN, page);
                return true;
            }
            Some(ONCE_GONE) => {
                let step = (gone[1] / gone[0]).max(1.0);
                self.target = (self.target + step).min(f64::from(self.capacity));
                self.replace(false);
                self.queues.push(AGAIN, page);
            }
            Some(_) => {
                let step = (gone[0] / gone[1]).max(1.0);
                self.target = (self.target - step).max(0.0);
                self.replace(true);
                self.queues.push(AGAIN, page);
            }
            None => {
                self.make_room();
                self.queues.push(ONCE, page);
            }
        }
        false
    }
}

/// Figure 4 on four lists, least recently used first.
#[cfg(test)]
pub(super) fn naive(capacity: usize, stream: &[u32]) -> Vec<bool> {
    let [mut t1, mut t2, mut b1, mut b2] = [const { Vec::<u32>::new() }; 4];
    let mut p = 0.0_f64;
    let replace = |in_b2: bool,
                   p: f64,
                   t1: &mut Vec<u32>,
                   t2: &mut Vec<u32>,
                   b1: &mut Vec<u32>,
                   b2: &mut Vec<u32>| {
        let len = t1.len() as f64;
        if !t1.is_empty() && (in_b2 && len == p || len > p) || t2.is_empty() {
            b1.push(t1.remove(0));
        } else {
            b2.push(t2.remove(0));
        }
    };
    let access = |&x: &u32| {
        let forget = |list: &mut Vec<u32>| {
            let place = list.iter().position(|&page| page == x);
            place.map(|place| list.remove(place)).is_some()
        };
        if forget(&mut t1) || forget(&mut t2) {
            t2.push(x);
            return true;
        }
        if b1.contains(&x) {
            let step = if b1.len() >= b2.len() {
                1.0
            } else {
                b2.len() as f64 / b1.len() as f64
            };
            p = (p + step).min(capacity as f64);
            replace(false, p, &mut t1, &mut t2, &mut b1, &mut b2);
            forget(&mut b1);
            t2.push(x);
        } else if b2.contains(&x) {
            let step = if b2.len() >= b1.len() {
                1.0
            } else {
                b1.len() as f64 / b2.len() as f64
            };
            p = (p - step).max(0.0);
            replace(true, p, &mut t1, &mut t2, &mut b1, &mut b2);
            forget(&mut b2);
            t2.push(x);
        } else {
            if t1.len() + b1.len() == capacity {
                if t1.len() < capacity {
                    b1.remove(0);
                    replace(false, p, &mut t1, &mut t2, &mut b1, &mut b2);
                } else {
                    t1.remove(0);
                }
            } else if t1.len() + t2.len() + b1.len() + b2.len() >= capacity {
                if t1.len() + t2.len() + b1.len() + b2.len() == 2 * capacity {
                    b2.remove(0);
                }
                replace(false, p, &mut t1, &mut t2, &mut b1, &mut b2);
            }
            t1.push(x);
        }
        assert!(t1.len() + t2.len() <= capacity);
        false
    };
    stream.iter().map(access).collect()
}
