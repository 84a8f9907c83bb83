//! The common interface of working-set estimators that are fed pages and intervals.

use plimsoll_flow::{PageCount, PageNumber, WorkingSet};

use super::SettledSize;

/// An estimator of a working set, fed pages interval by interval.
///
/// The registry's row determines which pages: accessed ones, or those logged by a processor.
pub trait WorkingSetEstimator: std::fmt::Debug + Send {
    /// Processes pages of the present interval, in any order.
    fn observe(&mut self, pages: &[PageNumber]);

    /// Ends an interval. Returns the row's columns, in their order; `None` for a value that is not known yet.
    fn end_interval(&mut self) -> Vec<Option<u64>>;

    /// The working set so far; `None` before the first interval ended.
    fn working_set(&self) -> Option<WorkingSet>;

    /// The time at which the size first settled, for estimators that wait for it.
    fn settled(&self) -> Option<SettledSize> {
        None
    }

    /// The part of the working set that is assumed and not measured (\[PRL\]'s ε).
    fn assumed(&self) -> PageCount {
        PageCount(0)
    }

    /// Lower and upper limit of the 95 % confidence interval, for estimators that sample.
    fn confidence(&self) -> Option<(PageCount, PageCount)> {
        None
    }
}
