//! One estimator for each group of references: the curves of all devices of a trace from one reading.
//!
//! References of several thousand groups alternate, and an estimator is slow if it gets one at a time. They are
//! therefore collected by group and handed on in stretches of [`STRETCH`]. Groups are independent, so the order among
//! them does not matter, and each curve is the one that its references would give alone. When [`READY`] stretches are there, each
//! processor hands on some of the groups.
//!
//! A group gets its estimator with its first stretch. One that is shorter gets it in the end, when each group's is dropped before
//! the next one's is made: most groups of a trace are short, and their estimators then use the same memory, in the caches.
//!
//! Cost: one store per reference beside the estimators' own; up to `8 STRETCH` bytes for each group, and `8 STRETCH READY` for all,
//! beside their memory.
//! Not here: the numbers of the groups, which the source assigns.

use std::sync::{Mutex, PoisonError};
use std::thread;

use plimsoll_flow::PageNumber;

use crate::estimator::Estimator;

/// Number of references that are collected for a group: 64 KiB, which is less than most estimators take. The other groups
/// displace the tables of an estimator from the caches, so they should serve many references at once.
const STRETCH: usize = 8192;

/// Number of stretches that are collected before they are handed on: much more work than starting threads.
const READY: usize = 32;

/// How many groups are handed on at a time.
pub fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Calls `each` for all items, on as many threads as there are processors.
fn for_each<T>(items: impl Iterator<Item = T> + Send, each: impl Fn(T) + Sync) {
    let left = Mutex::new(items);
    let work = || {
        loop {
            let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(item) = next else { return };
            each(item);
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads() {
            scope.spawn(work);
        }
        work();
    });
}

/// An estimator for each group.
pub struct ByGroup<M> {
    make: M,
    groups: Vec<Group>,
    /// Stretches that are not handed on yet.
    ready: usize,
}

/// The references of one group.
#[derive(Default)]
struct Group {
    /// From the first stretch on.
    estimator: Option<Box<dyn Estimator>>,
    /// References not handed on yet.
    pending: Vec<PageNumber>,
    /// Number of references handed on.
    references: u64,
}

impl Group {
    fn hand_on(&mut self, make: impl FnOnce() -> Box<dyn Estimator>) {
        let estimator = self.estimator.get_or_insert_with(make);
        estimator.observe(&self.pending);
        self.references += self.pending.len() as u64;
        self.pending.clear();
    }
}

impl<M: Fn() -> Box<dyn Estimator> + Sync> ByGroup<M> {
    /// Groups whose estimators `make` makes, all alike.
    pub fn new(make: M) -> Self {
        Self {
            make,
            groups: Vec::new(),
            ready: 0,
        }
    }

    /// Processes references, each with the number of its group. Groups are numbered from 0 without large gaps.
    ///
    /// # Panics
    ///
    /// If there are not as many groups as pages.
    pub fn observe(&mut self, pages: &[PageNumber], groups: &[u32]) {
        assert_eq!(pages.len(), groups.len(), "a group for each reference");
        for (&page, &group) in pages.iter().zip(groups) {
            let index = group as usize;
            if self.groups.len() <= index {
                self.groups.resize_with(index + 1, Group::default);
            }
            let group = &mut self.groups[index];
            group.pending.push(page);
            if group.pending.len().is_multiple_of(STRETCH) {
                self.ready += 1;
                if self.ready == READY {
                    self.hand_on();
                }
            }
        }
    }

    fn hand_on(&mut self) {
        self.ready = 0;
        let groups = self.groups.iter_mut();
        for_each(
            groups.filter(|group| group.pending.len() >= STRETCH),
            |group| group.hand_on(&self.make),
        );
    }

    /// What `each` makes of the groups, by number: of how many references each has, and of its estimator, to which all were
    /// handed on.
    pub fn finish<T: Send>(self, each: impl Fn(u64, &mut dyn Estimator) -> T + Sync) -> Vec<T> {
        let make = self.make;
        let mut made: Vec<Option<T>> = Vec::new();
        made.resize_with(self.groups.len(), || None);
        for_each(self.groups.into_iter().zip(&mut made), |(group, made)| {
            let mut estimator = group.estimator.unwrap_or_else(&make);
            estimator.observe(&group.pending);
            let references = group.references + group.pending.len() as u64;
            *made = Some(each(references, &mut *estimator));
        });
        made.into_iter().flatten().collect()
    }

    /// Bytes of heap allocated now.
    pub fn memory_bytes(&self) -> usize {
        let groups = self.groups.iter().map(|group| {
            let pending = group.pending.capacity() * size_of::<PageNumber>();
            let estimator = group.estimator.as_ref();
            pending + estimator.map_or(0, |estimator| estimator.memory_bytes())
        });
        groups.sum::<usize>() + self.groups.capacity() * size_of::<Group>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ExactLru, Shards};
    use proptest::prelude::*;
    use std::num::NonZeroUsize;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn every_group_has_the_curve_of_its_references_alone(
            // Some groups are longer than a stretch, others are not, and some are empty.
            references in prop::collection::vec((0_u64..80, 0_u32..9), 1..3_000),
            times in 1_usize..150,
            batch in 1_usize..9_000,
            sampled in any::<bool>(),
        ) {
            let make = || -> Box<dyn Estimator> {
                match sampled {
                    true => Box::new(Shards::fixed_size(NonZeroUsize::new(30).unwrap(), 1)),
                    false => Box::new(ExactLru::new()),
                }
            };
            let mut all = ByGroup::new(make);
            let references = references.repeat(times);
            let references = references.iter().map(|&(page, group)| (PageNumber(page), group * group / 4));
            let (pages, groups): (Vec<_>, Vec<_>) = references.clone().unzip();
            for (pages, groups) in pages.chunks(batch).zip(groups.chunks(batch)) {
                all.observe(pages, groups);
            }
            let found = all.finish(|count, estimator| (count, estimator.curve()));
            for (number, (count, curve)) in found.into_iter().enumerate() {
                let of_group = references.clone().filter(|&(_, of)| of as usize == number);
                let pages: Vec<_> = of_group.map(|(page, _)| page).collect();
                let mut alone = make();
                alone.observe(&pages);
                prop_assert_eq!(count, pages.len() as u64);
                prop_assert_eq!(curve, alone.curve());
            }
        }
    }
}
