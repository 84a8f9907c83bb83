//! One estimator for each group of references: the curves of all devices of a trace from one reading.
//!
//! References of several thousand groups alternate, and an estimator is slow if it gets one at a time. They are
//! therefore collected by group and handed on in stretches of [`STRETCH`]. Groups are independent, so the order among
//! them does not matter, and each curve is the one that its references would give alone.
//!
//! Cost: one store per reference beside the estimators' own; up to `8 STRETCH` bytes for each group beside their memory.
//! Not here: the numbers of the groups, which the source assigns.

use plimsoll_flow::PageNumber;

use crate::estimator::Estimator;

/// Number of references that are collected for a group: 16 KiB, so that the tables of an estimator, which the other groups have
/// displaced from the caches meanwhile, serve many references.
const STRETCH: usize = 2048;

/// An estimator for each group.
pub struct ByGroup<M> {
    make: M,
    groups: Vec<Group>,
}

/// The references of one group.
pub struct Group {
    estimator: Box<dyn Estimator>,
    /// References not handed on yet.
    pending: Vec<PageNumber>,
    references: u64,
}

impl Group {
    fn hand_on(&mut self) {
        self.estimator.observe(&self.pending);
        self.references += self.pending.len() as u64;
        self.pending.clear();
    }

    /// Number of references observed.
    #[must_use]
    pub fn references(&self) -> u64 {
        self.references
    }

    /// The estimator of this group.
    pub fn estimator(&mut self) -> &mut dyn Estimator {
        &mut *self.estimator
    }
}

impl<M: FnMut() -> Box<dyn Estimator>> ByGroup<M> {
    /// Groups whose estimators `make` makes, all alike.
    pub fn new(make: M) -> Self {
        Self {
            make,
            groups: Vec::new(),
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
            while self.groups.len() <= index {
                self.groups.push(Group {
                    estimator: (self.make)(),
                    pending: Vec::new(),
                    references: 0,
                });
            }
            let group = &mut self.groups[index];
            group.pending.push(page);
            if group.pending.len() == STRETCH {
                group.hand_on();
            }
        }
    }

    /// The groups by number, with all references handed on.
    pub fn groups(&mut self) -> &mut [Group] {
        self.groups.iter_mut().for_each(Group::hand_on);
        &mut self.groups
    }

    /// Bytes of heap allocated now.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let groups = self.groups.iter().map(|group| {
            let pending = group.pending.capacity() * size_of::<PageNumber>();
            pending + group.estimator.memory_bytes()
        });
        groups.sum::<usize>() + self.groups.capacity() * size_of::<Group>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ExactLru, FixedSizeShards};
    use proptest::prelude::*;
    use std::num::NonZeroUsize;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn every_group_has_the_curve_of_its_references_alone(
            references in prop::collection::vec((0_u64..80, 0_u32..5), 1..4_000),
            batch in 1_usize..900,
            sampled in any::<bool>(),
        ) {
            let make = || -> Box<dyn Estimator> {
                match sampled {
                    true => Box::new(FixedSizeShards::new(NonZeroUsize::new(30).unwrap(), 1)),
                    false => Box::new(ExactLru::new()),
                }
            };
            let mut all = ByGroup::new(make);
            let (pages, groups): (Vec<_>, Vec<_>) =
                references.iter().map(|&(page, group)| (PageNumber(page), group)).unzip();
            for (pages, groups) in pages.chunks(batch).zip(groups.chunks(batch)) {
                all.observe(pages, groups);
            }
            for (number, group) in all.groups().iter_mut().enumerate() {
                let of_group = references.iter().filter(|&&(_, of)| of as usize == number);
                let pages: Vec<_> = of_group.map(|&(page, _)| PageNumber(page)).collect();
                let mut alone = make();
                alone.observe(&pages);
                prop_assert_eq!(group.references(), pages.len() as u64);
                prop_assert_eq!(group.estimator().curve(), alone.curve());
            }
        }
    }
}
