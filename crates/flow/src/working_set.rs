//! Working sets: how much memory a VM really needs.

use std::fmt;

use crate::PageCount;

/// How a working-set figure stands to the true one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkingSetBound {
    /// The figure estimates the working set itself.
    Estimate,
    /// The observation ended before the working set was seen whole: it is at least this.
    AtLeast,
    /// Everything touched fitted into what the observation cannot look below: it is at most this.
    AtMost,
}

/// The memory that keeps a VM's miss ratio at or under a stated share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkingSet {
    /// Size in pages.
    pub size: PageCount,
    /// Whether that is the working set or only a bound of it.
    pub bound: WorkingSetBound,
}

impl WorkingSet {
    /// The miss ratio at which a curve's working set is read, \[AET\] §4.2: 5 %.
    pub const MISS_RATIO: f64 = 0.05;
}

impl fmt::Display for WorkingSetBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Estimate => "estimate",
            Self::AtLeast => "at_least",
            Self::AtMost => "at_most",
        })
    }
}
