//! The LRU stack of objects with sizes.
//!
//! Every reference gets the next time, at which a tree of sums (Fenwick 1994) has the object's size; its size at the former time
//! is taken out. The sizes after an object's time are those of the objects referenced since. When the times are used up, those
//! in use are numbered from 0 in their order, and at least as many are free.
//!
//! Cost: O(log times) per reference; an entry of a table and 16 to 32 bytes of tree per object.

use plimsoll_flow::PageNumber;

use crate::parts::hash::{PageMap, page_map};

/// Minimum number of times.
const TIMES_MIN: usize = 1 << 10;

#[derive(Debug, Clone, Copy)]
struct Object {
    time: u32,
    bytes: u32,
}

/// A reference to an object that was referenced before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reuse {
    /// Sizes of the other objects referenced since.
    pub(super) others_bytes: u64,
    /// Its size at its last reference.
    pub(super) own_bytes: u32,
}

#[derive(Debug, Clone)]
pub(super) struct SizedStack {
    objects: PageMap<Object>,
    /// Sums of sizes by time: the entry `i` is of the `i & -i` times up to time `i - 1`.
    sums: Vec<u64>,
    next: usize,
    total_bytes: u64,
}

impl SizedStack {
    pub(super) fn new() -> Self {
        Self {
            objects: page_map(),
            sums: vec![0; TIMES_MIN + 1],
            next: 0,
            total_bytes: 0,
        }
    }

    /// Moves an object to the top, with a size.
    ///
    /// # Panics
    ///
    /// At 2^31 objects.
    pub(super) fn touch(&mut self, object: u64, bytes: u32) -> Option<Reuse> {
        if self.next + 1 == self.sums.len() {
            self.number_anew();
        }
        let time = u32::try_from(self.next).expect("fewer than 2^31 objects");
        self.next += 1;
        let before = self
            .objects
            .insert(PageNumber(object), Object { time, bytes });
        let reuse = before.map(|Object { time, bytes }| {
            let time = time as usize;
            let others_bytes = self.total_bytes - self.sum_to(time);
            self.add(time, u64::from(bytes).wrapping_neg());
            self.total_bytes -= u64::from(bytes);
            Reuse {
                others_bytes,
                own_bytes: bytes,
            }
        });
        self.add(time as usize, bytes.into());
        self.total_bytes += u64::from(bytes);
        reuse
    }

    /// Sizes of all objects together.
    pub(super) fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let entry = size_of::<(PageNumber, Object)>() + 1;
        self.objects.capacity() * entry + self.sums.capacity() * size_of::<u64>()
    }

    /// Sum of the sizes up to a time.
    fn sum_to(&self, time: usize) -> u64 {
        let mut index = time + 1;
        let mut sum = 0_u64;
        while index > 0 {
            sum = sum.wrapping_add(self.sums[index]);
            index &= index - 1;
        }
        sum
    }

    fn add(&mut self, time: usize, bytes: u64) {
        let mut index = time + 1;
        while index < self.sums.len() {
            self.sums[index] = self.sums[index].wrapping_add(bytes);
            index += index & index.wrapping_neg();
        }
    }

    fn number_anew(&mut self) {
        let mut objects: Vec<_> = self.objects.values_mut().collect();
        objects.sort_unstable_by_key(|object| object.time);
        let times = (objects.len() * 2).max(TIMES_MIN);
        self.sums.clear();
        self.sums.resize(times + 1, 0);
        self.next = objects.len();
        for (time, object) in objects.into_iter().enumerate() {
            object.time = u32::try_from(time).expect("fewer than 2^31 objects");
            self.sums[time + 1] = object.bytes.into();
        }
        // Each entry is added to the next one that contains it.
        for index in 1..self.sums.len() {
            let above = index + (index & index.wrapping_neg());
            if above < self.sums.len() {
                self.sums[above] = self.sums[above].wrapping_add(self.sums[index]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::uniform;

    #[test]
    fn distances_stay_right_when_times_are_numbered_anew() {
        let mut stack = SizedStack::new();
        let mut list: Vec<(u64, u32)> = Vec::new();
        for (object, size) in uniform(700, 1).zip(uniform(50, 2)).take(6_000) {
            let size = size as u32 + 1;
            let place = list.iter().position(|&(other, _)| other == object);
            let expected = place.map(|place| {
                let others_bytes = list[..place].iter().map(|&(_, size)| u64::from(size)).sum();
                Reuse {
                    others_bytes,
                    own_bytes: list.remove(place).1,
                }
            });
            list.insert(0, (object, size));
            assert_eq!(stack.touch(object, size), expected);
        }
        let total: u64 = list.iter().map(|&(_, size)| u64::from(size)).sum();
        assert_eq!(stack.total_bytes(), total);
    }
}
