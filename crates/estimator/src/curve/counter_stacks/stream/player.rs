//! Reconstructs the counters from a record of their counts, and the curve of a window of the stream.

use plimsoll_flow::Whole as _;

use super::coding::{floor_of, take_zigzag};
use super::column::Column;
use crate::curve::counter_stacks::hyper_log_log::COUNT_MAX;
use crate::curve::counter_stacks::ladder::{Cell, Counter, Ladder, Rise};
use crate::curve::counter_stacks::place;
use crate::curve::counter_stacks::sizes::Sizes;

/// The counters, reconstructed from their counts.
pub(super) struct Player {
    pub(super) ladder: Ladder<()>,
    pub(super) now: u64,
}

impl Player {
    pub(super) fn new(interval: u32, delta: u32) -> Self {
        Self {
            ladder: Ladder::new(interval, delta, ()),
            now: 0,
        }
    }

    /// Replays an interval; `None` if its counts are impossible.
    pub(super) fn play(&mut self, column: &Column<'_>, mut cells: impl FnMut(&Cell)) -> Option<()> {
        let now = self.now.checked_add(column.references)?;
        let due = if column.last {
            self.ladder.levels.len() - 1
        } else {
            self.ladder.due()
        };
        let mut rises = column.rises;
        let mut measure = |counter: &mut Counter<()>, younger: Rise| {
            let rise = i64::try_from(younger.amount()).ok()?;
            let rise = rise.checked_sub(take_zigzag(&mut rises)?)?;
            let count = counter.count.checked_add_signed(rise)?;
            (rise >= 0 && count <= COUNT_MAX).then_some(count)
        };
        for level in 0..=due {
            self.ladder
                .end_stretch(level, now, column.distinct, &mut measure, &mut cells)?;
        }
        if !rises.is_empty() {
            return None;
        }
        self.now = now;
        if column.last {
            self.ladder
                .levels
                .iter_mut()
                .for_each(|level| level.began = now);
        } else {
            self.ladder.turn(now, due, |_| ());
        }
        Some(())
    }

    /// Whether everything before `to` was counted.
    pub(super) fn is_past(&self, to: u64) -> bool {
        self.ladder.levels.iter().all(|level| level.began >= to)
    }

    /// Continues levels that were not counted before a truncated record's end with the last rise of their counters.
    pub(super) fn forecast(&self, mut cells: impl FnMut(&Cell)) {
        let mut seam_after = 0;
        for stretch in &self.ladder.levels {
            let mut younger = Rise {
                after: seam_after,
                ..stretch.seam
            };
            for counter in stretch.counters.iter().rev() {
                let (rise, during) = counter.rose;
                let length = u128::from(self.now - stretch.began);
                let rise = u128::from(rise) * length / u128::from(during.max(1));
                let rise = u64::try_from(rise)
                    .unwrap_or(u64::MAX)
                    .min(younger.amount());
                let older = Rise {
                    start: counter.start,
                    before: counter.count,
                    after: counter.count + rise,
                };
                if length > 0 {
                    cells(&Cell {
                        younger,
                        older,
                        from: stretch.began,
                        until: self.now,
                    });
                }
                younger = older;
                seam_after = older.after;
            }
        }
    }
}

/// References within a part of the stream to pages last accessed in it.
pub(super) struct Window {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) sizes: Sizes,
    /// Largest count of a counter that began in the window.
    pub(super) distinct: u64,
}

impl Window {
    /// Adds reuses within an interval.
    pub(super) fn add_reuses(&mut self, reuses: &[(u64, u64)]) {
        for &(bucket, reuses) in reuses {
            // A reuse at distance d hits from size d + 1 on.
            let (low, high) = (floor_of(bucket), floor_of(bucket + 1));
            if high - low == 1 {
                self.sizes.exactly(high, reuses as f64);
            } else {
                self.sizes.between(low, high, reuses as f64);
                self.sizes.bounds(low + 1, high, reuses as f64);
            }
        }
    }

    pub(super) fn add(&mut self, cell: &Cell) {
        self.add_cell(cell, false);
    }

    pub(super) fn add_forecast(&mut self, cell: &Cell) {
        self.add_cell(cell, true);
    }

    pub(super) fn add_cell(&mut self, cell: &Cell, forecast: bool) {
        let &Cell {
            younger,
            older,
            from,
            until,
        } = cell;
        // Pages last used before the window are new to it.
        if younger.start < self.from || younger.start >= self.to || from >= self.to {
            return;
        }
        let inner = if older.start >= self.from {
            older
        } else {
            younger
        };
        self.distinct = self.distinct.max(inner.after);
        let whole = older.start >= self.from && until <= self.to && !forecast;
        if whole {
            place(cell, &mut self.sizes);
            return;
        }
        // Part of the interval may lie after the window's end, and part of the range between the two counters'
        // starts before its beginning; both are counted in proportion.
        let inside = (self.to.min(until) - from) as f64 / (until - from) as f64;
        let since = |start: u64| (younger.start - start) as f64;
        let known = if older.start >= self.from {
            1.0
        } else {
            since(self.from) / since(older.start)
        };
        let mass = (younger.amount() as f64 - older.amount() as f64) * inside;
        let part = |from: u64, to: u64, share: f64| {
            let way = u64::whole(((to - from) as f64 * share).round());
            from + way.min(to - from)
        };
        let low = part(younger.before, younger.after, inside / 2.0);
        let high = part(older.before, older.after, inside / 2.0);
        self.sizes
            .between(low, part(low, high.max(low), known), mass * known);
        // For the lower limit of misses: the whole part, or no rise of older pages.
        let all = if forecast {
            younger.amount() as f64
        } else {
            mass / inside
        };
        self.sizes.early(younger.before + 1, all.max(0.0));
    }
}
