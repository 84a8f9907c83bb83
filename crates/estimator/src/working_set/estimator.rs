//! What every estimator of a working set has in common that is fed pages and intervals.

use plimsoll_flow::{PageCount, PageNumber, WorkingSet};

use super::Settled;

/// An estimator of a working set, fed pages interval by interval.
///
/// The registry's row determines which pages: those accessed, or those that a processor logged.
pub trait WorkingSetEstimator: std::fmt::Debug {
    /// Takes in pages of the present interval, in any order.
    fn observe(&mut self, pages: &[PageNumber]);

    /// Ends an interval. Returns the row's columns, in their order, `None` where a number is unknown yet.
    fn end_interval(&mut self) -> Vec<Option<u64>>;

    /// The working set so far; `None` before the first interval ended.
    fn working_set(&self) -> Option<WorkingSet>;

    /// When the size settled first, for those that wait for it.
    fn settled(&self) -> Option<Settled> {
        None
    }

    /// The part of the working set that is assumed and not measured (\[PRL\]'s ε).
    fn assumed(&self) -> PageCount {
        PageCount(0)
    }

    /// Lower and upper limit of 95 % confidence, for those that sample.
    fn confidence(&self) -> Option<(PageCount, PageCount)> {
        None
    }
}
