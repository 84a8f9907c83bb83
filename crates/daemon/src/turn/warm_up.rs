//! The time between a move and its check, in which VMs fill what they gained.
//!
//! A VM that was given memory first misses as before, until the memory holds what it uses. Each miss that is counted
//! fills a page. A VM has warmed up when it has missed once for each page that it gained, or for each that its curve has use
//! for, or when its misses have nearly ceased. Readahead fills several pages with one counted fault, so that the count may
//! never get there; the wait therefore ends after [`WAITS_MAX`] times the length of a measurement.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use plimsoll_protocol::decision::Step;

use crate::vm::{Vm, bytes, pages};

/// Longest wait, in lengths of a measurement.
pub const WAITS_MAX: u32 = 5;
/// Part of what is to be filled; a VM that fills less within the length of a measurement has nothing more to fill.
const CEASED: u64 = 50;

/// A VM that fills what it gained.
#[derive(Debug)]
struct Fill {
    vm: String,
    /// Its count of misses at the end of the move.
    from: u64,
    /// Pages to fill.
    wanted: u64,
    filled: u64,
    /// Time and filled pages at the last look at whether it ceased.
    marked: (Instant, u64),
    is_warm: bool,
}

/// The wait after a move, and the measurement that follows.
#[derive(Debug)]
pub(super) struct WarmUp {
    /// End of the move.
    pub(super) moved: Instant,
    fills: Vec<Fill>,
    /// Start of the measurement.
    since: Option<Instant>,
    /// Whether the longest wait has passed.
    gave_up: bool,
    judged: Instant,
}

impl WarmUp {
    /// Begins at the end of a move of these steps. A VM whose misses nothing counts is not waited for: it cannot be
    /// checked either.
    pub(super) fn begin(steps: &[Step], vms: &BTreeMap<String, Vm>, now: Instant) -> Self {
        let fills = steps.iter().filter_map(|step| {
            let vm = vms.get(&step.vm)?;
            let (old, new) = (pages(step.from.size_bytes()), pages(step.now.size_bytes()));
            let points = vm.seen.known.as_ref().map(|known| known.curve.points());
            let used = points.map_or(new, |points| {
                let within = points.partition_point(|point| point.size <= new);
                within.checked_sub(1).map_or(old, |last| points[last].size)
            });
            let wanted = used.0.saturating_sub(old.0);
            let from = vm.misses()?.count;
            (wanted > 0).then(|| Fill {
                vm: step.vm.clone(),
                from,
                wanted,
                filled: 0,
                marked: (now, 0),
                is_warm: false,
            })
        });
        let fills: Vec<_> = fills.collect();
        Self {
            moved: now,
            since: fills.is_empty().then_some(now),
            fills,
            gave_up: false,
            judged: now,
        }
    }

    /// Whether a VM gained memory to fill.
    pub(super) fn involves(&self, vm: &str) -> bool {
        self.fills.iter().any(|fill| fill.vm == vm)
    }

    /// Whether the VMs without memory to fill are to be judged; true once within each time `after`.
    pub(super) fn is_due(&mut self, after: Duration, now: Instant) -> bool {
        let due = now.duration_since(self.judged) >= after;
        if due {
            self.judged = now;
        }
        due
    }

    /// The time since which every VM has filled what it gained; `after` is the length of a measurement.
    pub(super) fn ended(
        &mut self,
        vms: &BTreeMap<String, Vm>,
        after: Duration,
        now: Instant,
    ) -> Option<Instant> {
        if self.since.is_some() {
            return self.since;
        }
        for fill in self.fills.iter_mut().filter(|fill| !fill.is_warm) {
            let count = vms.get(&fill.vm).and_then(Vm::misses);
            // A VM that has ended or whose counter began again fills nothing that can be counted.
            let Some(filled) = count.and_then(|misses| misses.count.checked_sub(fill.from)) else {
                fill.is_warm = true;
                continue;
            };
            fill.filled = filled;
            fill.is_warm = filled >= fill.wanted;
            let (at, before) = fill.marked;
            if now.duration_since(at) >= after {
                fill.is_warm |= filled.saturating_sub(before) <= fill.wanted / CEASED;
                fill.marked = (now, filled);
            }
        }
        self.gave_up = now.duration_since(self.moved) >= after * WAITS_MAX;
        if self.gave_up || self.fills.iter().all(|fill| fill.is_warm) {
            self.since = Some(now);
        }
        self.since
    }

    /// How long it took, as a sentence that follows the reason of a decision; empty if there was nothing to fill.
    pub(super) fn text(&self) -> String {
        let Some(since) = self.since.filter(|_| !self.fills.is_empty()) else {
            return String::new();
        };
        let mib = |count| bytes(plimsoll_flow::PageCount(count)) >> 20;
        let fills = self.fills.iter();
        let fills = fills.map(|fill| {
            let filled = mib(fill.filled.min(fill.wanted));
            format!("{} {filled} of {} MiB", fill.vm, mib(fill.wanted))
        });
        let why = if self.gave_up {
            ", the longest wait"
        } else {
            ""
        };
        format!(
            " The measurement began {:.0} s after the move{why}; by then had filled what it gained: {}.",
            since.duration_since(self.moved).as_secs_f64(),
            fills.collect::<Vec<_>>().join(", ")
        )
    }
}
