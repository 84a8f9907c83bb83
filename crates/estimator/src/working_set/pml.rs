//! Page modification logging: the pages written, once no new ones come.
//!
//! A processor with PML logs a page when a write sets its dirty flag. A page whose flag is set is not logged again, so
//! there is no telling hot pages from cold ones: what can be counted are distinct pages, in each interval (at whose end the flags are
//! cleared) and in all. The stop rule is that of \[PRL\] §4.4, on pages never logged before.
//!
//! Source: \[PRL\] §3.4, which finds by it that PML is not for working sets.
//! Cannot see: reads (a phase that only reads has no working set); how often a page is used (what was written once
//! counts for ever in the sum over all intervals).
//! Cost: O(1) a logged page; 16 bytes for each page ever logged.

use std::num::NonZeroU16;

use plimsoll_flow::{PageCount, PageNumber, WorkingSet, WorkingSetBound};

use super::estimator::WorkingSetEstimator;
use super::settling::{Settled, Settling};
use crate::parts::hash::{PageMap, page_map};

/// When [`Pml`] is sure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PmlOptions {
    /// ω: steps without a new page.
    pub omega: NonZeroU16,
    /// New pages within ω steps, as a share of all, that count as none.
    pub tolerance: f64,
}

impl Default for PmlOptions {
    fn default() -> Self {
        Self {
            omega: const { NonZeroU16::new(4).unwrap() },
            tolerance: 0.001,
        }
    }
}

/// State at the end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PmlStep {
    /// Distinct pages logged in it.
    pub written: PageCount,
    /// Distinct pages logged so far.
    pub cumulative: PageCount,
    /// How many of them were not ω steps before; `None` in the first ω steps.
    pub growth: Option<u64>,
}

/// The estimator.
#[derive(Debug, Clone)]
pub struct Pml {
    /// The step that logged each page last.
    pages: PageMap<u64>,
    written: u64,
    settling: Settling,
}

impl Pml {
    /// Returns an estimator that has seen nothing.
    #[must_use]
    pub fn new(options: PmlOptions) -> Self {
        Self {
            pages: page_map(),
            written: 0,
            settling: Settling::new(options.omega, options.tolerance),
        }
    }

    /// Pages were logged, in any order.
    pub fn log(&mut self, pages: &[PageNumber]) {
        let now = self.settling.steps();
        for &page in pages {
            self.written += u64::from(self.pages.insert(page, now) != Some(now));
        }
    }

    /// A step ends.
    pub fn end_interval(&mut self) -> PmlStep {
        let cumulative = self.pages.len() as u64;
        let growth = self.settling.step(cumulative, 0);
        PmlStep {
            written: PageCount(std::mem::take(&mut self.written)),
            cumulative: PageCount(cumulative),
            growth,
        }
    }

    /// How many steps ended.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.settling.steps()
    }

    /// When the number of pages stood still first.
    #[must_use]
    pub fn settled(&self) -> Option<Settled> {
        self.settling.settled()
    }

    /// Pages written when their number settled; those so far are the least there can be, before that.
    #[must_use]
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

    /// Bytes of heap held now.
    #[must_use]
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

    fn settled(&self) -> Option<Settled> {
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
