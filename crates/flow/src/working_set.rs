//! Working sets: the memory that a VM needs to keep its miss ratio low.

use std::fmt;

use crate::PageCount;

/// How a working-set figure relates to the true size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum WorkingSetBound {
    /// The figure estimates the working set itself.
    Estimate,
    /// A lower bound: the observation ended before the whole working set was seen.
    AtLeast,
    /// An upper bound: everything that was touched fits below the minimum resolvable size.
    AtMost,
}

/// The memory that keeps a VM's miss ratio at or under a stated share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkingSet {
    /// Size in pages.
    pub size: PageCount,
    /// Whether the size is an estimate or a bound.
    pub bound: WorkingSetBound,
}

impl WorkingSetBound {
    /// The name in every output: `estimate`, `at_least` or `at_most`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Estimate => "estimate",
            Self::AtLeast => "at_least",
            Self::AtMost => "at_most",
        }
    }

    /// The sign written before the figure in a table: nothing, `≥ ` or `≤ `.
    pub fn sign(self) -> &'static str {
        match self {
            Self::Estimate => "",
            Self::AtLeast => "≥ ",
            Self::AtMost => "≤ ",
        }
    }
}

impl WorkingSet {
    /// The miss ratio at which a curve's working set is read, \[AET\] §4.2: 5 %.
    pub const MISS_RATIO: f64 = 0.05;
}

impl fmt::Display for WorkingSetBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
