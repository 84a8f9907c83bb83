//! Page modification logging: the pages written, once there are no new ones.
//!
//! A processor with PML logs a page when a write sets its dirty flag. A page whose flag is set is not logged again, so
//! hot pages cannot be distinguished from cold ones: only distinct pages can be counted, in each interval (at whose end
//! the flags are cleared) and in total. The stop rule is that of \[PRL\] §4.4, applied to pages never logged before.
//!
//! Source: \[PRL\] §3.4, which concludes from it that PML is not suitable for working sets.
//! Not observed: reads (a phase that only reads has no working set); frequency of use (a page written once
//! counts permanently in the total).
//! Cost: O(1) per logged page; 16 bytes for each page ever logged.

use std::num::NonZeroU16;

use plimsoll_flow::{PageCount, PageNumber, WorkingSet, WorkingSetBound};

use super::estimator::WorkingSetEstimator;
use super::settling::{SettledSize, StopRule};
use crate::parts::hash::{PageMap, page_map};

/// Conditions under which [`Pml`] settles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PmlOptions {
    /// ω: number of steps without a new page.
    pub omega: NonZeroU16,
    /// New pages within ω steps, as a share of all, that are ignored.
    pub tolerance: f64,
}

impl PmlOptions {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        omega: NonZeroU16::new(4).unwrap(),
        tolerance: 0.001,
    };
}

impl Default for PmlOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// State at the end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PmlStep {
    /// Distinct pages logged in the step.
    pub written: PageCount,
    /// Distinct pages logged so far.
    pub cumulative: PageCount,
    /// Increase of this number within ω steps; `None` in the first ω steps.
    pub growth: Option<u64>,
}

/// The PML estimator.
#[derive(Debug, Clone)]
pub struct Pml {
    /// The step in which each page was last logged.
    pages: PageMap<u64>,
    written: u64,
    settling: StopRule,
}

impl Pml {
    /// Returns an estimator without observations.
    pub fn new(options: PmlOptions) -> Self {
        Self {
            pages: page_map(),
            written: 0,
            settling: StopRule::new(options.omega, options.tolerance),
        }
    }

    /// Records logged pages, in any order.
    pub fn log(&mut self, pages: &[PageNumber]) {
        let now = self.settling.steps();
        for &page in pages {
            self.written += u64::from(self.pages.insert(page, now) != Some(now));
        }
    }

    /// Ends a step.
    pub fn end_interval(&mut self) -> PmlStep {
        let cumulative = self.pages.len() as u64;
        let growth = self.settling.step(cumulative, 0);
        PmlStep {
            written: PageCount(std::mem::take(&mut self.written)),
            cumulative: PageCount(cumulative),
            growth,
        }
    }

    /// Number of steps that ended.
    pub fn steps(&self) -> u64 {
        self.settling.steps()
    }

    /// The time at which the number of pages was first constant.
    pub fn settled(&self) -> Option<SettledSize> {
        self.settling.settled()
    }

    /// Pages written when their number settled; before that, those so far, as a lower bound.
    pub fn working_set(&self) -> WorkingSet {
        match self.settled() {
            Some(settled) => WorkingSet {
                size: settled.size,
                bound: WorkingSetBound::Estimate,
            },
            None => WorkingSet {
                size: PageCount(self.pages.len() as u64),
                bound: WorkingSetBound::AtLeast,
            },
        }
    }

    /// Bytes of heap allocated now.
    pub fn memory_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<(PageNumber, u64)>()
    }
}

impl WorkingSetEstimator for Pml {
    fn observe(&mut self, pages: &[PageNumber]) {
        self.log(pages);
    }

    fn end_interval(&mut self) -> Vec<Option<u64>> {
        let step = self.end_interval();
        vec![Some(step.written.0), Some(step.cumulative.0)]
    }

    fn working_set(&self) -> Option<WorkingSet> {
        (self.steps() > 0).then(|| self.working_set())
    }

    fn settled(&self) -> Option<SettledSize> {
        self.settled()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn pages_are_counted_once_an_interval_and_once_in_all(
            steps in prop::collection::vec(prop::collection::vec(0_u64..30, 0..40), 1..20),
        ) {
            let mut pml = Pml::new(PmlOptions::default());
            let mut all: BTreeSet<u64> = BTreeSet::new();
            for pages in steps {
                let of_step: BTreeSet<_> = pages.iter().copied().collect();
                all.extend(&of_step);
                pml.log(&pages.iter().copied().map(PageNumber).collect::<Vec<_>>());
                let step = pml.end_interval();
                prop_assert_eq!(step.written.0, of_step.len() as u64);
                prop_assert_eq!(step.cumulative.0, all.len() as u64);
            }
        }
    }

    #[test]
    fn a_phase_that_only_reads_has_no_working_set() {
        let mut pml = Pml::new(PmlOptions::default());
        for _ in 0..20 {
            pml.end_interval();
        }
        assert_eq!(pml.settled(), None);
        assert_eq!(pml.working_set().size, PageCount(0));
    }

    #[test]
    fn what_was_written_once_counts_for_ever() {
        let mut pml = Pml::new(PmlOptions::default());
        pml.log(&(0..1000).map(PageNumber).collect::<Vec<_>>());
        for _ in 0..5 {
            pml.log(&(0..10).map(PageNumber).collect::<Vec<_>>());
            pml.end_interval();
        }
        assert_eq!(pml.working_set().size, PageCount(1000));
        assert_eq!(pml.settled().map(|settled| settled.step), Some(4));
    }
}
