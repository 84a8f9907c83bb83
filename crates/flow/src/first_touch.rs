//! First touches: sampled pages, each made inaccessible once and observed until its next touch.
//!
//! All times are the VM's own: CPU time of its process since any start. So a VM that is idle, paused, or waits for a CPU of
//! its host does not grow older, and its speed does not blur the time after which a page is touched again.
//!
//! Not here: how pages are sampled (`plimsoll-trap`), and the curve made of them (`plimsoll-estimator`).

use std::time::Duration;

/// A sampled page, from the time at which it became inaccessible to its first touch afterwards.
///
/// The touch happened after [`untouched_until`](Self::untouched_until) and not after
/// [`touched_by`](Self::touched_by): the two are equal where touches are trapped, and differ where pages are only
/// checked now and then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstTouch {
    /// When the page became inaccessible.
    pub armed: Duration,
    /// Until when it is known to be untouched, `armed` or later.
    pub untouched_until: Duration,
    /// When it is known to have been touched; `None` if it is still untouched, or no longer observed.
    pub touched_by: Option<Duration>,
    /// Size of the page in units of 4 KiB, 1 or more: a huge page is touched as a whole.
    pub pages: u32,
}

/// A time on the clock of the VM, and in wall time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timestamp {
    /// CPU time of the VM's process, all vCPUs together, since any start.
    pub vm: Duration,
    /// Wall time since any start.
    pub wall: Duration,
}

/// The first touches of a period.
#[derive(Debug, Clone, Copy)]
pub struct FirstTouches<'a> {
    /// Pages whose observation ended in the period: touched, or no longer observed.
    pub ended: &'a [FirstTouch],
    /// Pages that are still inaccessible at the end of the period.
    pub waiting: &'a [FirstTouch],
    /// Start of the period.
    pub from: Timestamp,
    /// End of the period.
    pub now: Timestamp,
    /// Pages of 4 KiB with contents from which the sample is drawn.
    pub population_pages: u64,
}
