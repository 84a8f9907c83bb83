//! The set of counters and its schedule: which counters exist, when each is counted,
//! and what follows from their counts.
//!
//! **Information in the counts.** Let a counter that began at `s` rise from `b` to `a` while the stream runs from `u` to
//! `v`. The `a - b` references that raised it are those to a page not used since `s`. So in this interval
//!
//! - a memory of `a` pages or more misses at most `a - b` times, because a page used since `s` has at most
//!   `a` pages used since then, including itself;
//! - a memory of `b` pages or fewer misses at least `a - b` times.
//!
//! Of two neighbours, the older one rises less; the difference is the number of references to pages last used
//! between the two starts. If the counts at that time are `y` (younger) and `o` (older), these references
//! hit from a size above `y` and at most `o` on ([`Rise`], [`Cell`]).
//!
//! **Levels.** The counters need not all be counted at the same times. A counter of age `t` resolves
//! sizes to within a given share if it is counted at intervals that are a small share of `t`.
//! Counters are therefore assigned to levels: level `l` is counted every `2^l` intervals, and a counter moves up
//! when its age is `reach` times that. Level `l` classifies the references not seen since its *seam*, the
//! counter next below it, whose start bounds the range of the lower levels.
//! Each reference is classified by one level. The seam is kept until its level's interval is over; counters
//! move only when all affected levels are at a border.
//!
//! **Pruning.** A counter is removed when its two neighbours agree within `delta`: without it, no two neighbours
//! differ by more than that, now or later, because their difference only shrinks. (The paper removes the
//! younger of two counters that agree, after which the gap is up to twice as wide.)
//!
//! The schedule is a function of the counts alone, in whole numbers, so that a reader of recorded counts
//! reconstructs the same counters as the writer.
//!
//! Source: [Wires14] §3; levels are ours, and so is counting the increments of a counter instead of a cell.
//! Cost: with `delta` 0.05, 40 counters on level 0 and about 20 on each of log2(intervals / 40) others.
//! Not here: the counting itself (`hyper_log_log`, or recorded counts in `stream`).

/// Shares are represented as whole numbers of 2^-24.
pub(super) const SHARE_ONE: u32 = 1 << 24;

/// A counter in the ladder. `sketch` does the counting; it is empty if counts are read from a stream.
#[derive(Debug, Clone)]
pub(super) struct Counter<S> {
    /// Position in the stream of the first reference it counted.
    pub(super) start: u64,
    /// Distinct pages when its level was last counted.
    pub(super) count: u64,
    /// Its increase in the last interval of its level, and the length of that interval.
    pub(super) rose: (u64, u64),
    pub(super) sketch: S,
}

/// The increase of a counter over one interval of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rise {
    /// Position at which the counter began.
    pub(super) start: u64,
    /// Distinct pages at the beginning of the interval.
    pub(super) before: u64,
    /// Distinct pages at its end.
    pub(super) after: u64,
}

impl Rise {
    pub(super) fn amount(&self) -> u64 {
        self.after - self.before
    }
}

/// Two neighbouring counters over one interval `from..until` of the stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cell {
    pub(super) younger: Rise,
    pub(super) older: Rise,
    pub(super) from: u64,
    pub(super) until: u64,
}

#[derive(Debug, Clone)]
pub(super) struct Level<S> {
    /// Older ones first.
    pub(super) counters: Vec<Counter<S>>,
    /// Start of the current interval of the level.
    pub(super) began: u64,
    /// The seam's count at the start of the interval. Not used on level 0.
    pub(super) seam: Rise,
}

/// Counters of all ages; the spacing grows with the age.
#[derive(Debug, Clone)]
pub(super) struct Ladder<S> {
    pub(super) levels: Vec<Level<S>>,
    /// In units of 2^-24.
    delta: u32,
    /// Number of complete intervals so far.
    intervals: u64,
    interval: u64,
    /// Sketches of removed counters, for reuse.
    spare: Vec<S>,
}

impl<S> Ladder<S> {
    /// Creates a ladder with one counter, from the stream's beginning. Intervals have `interval` references.
    pub(super) fn new(interval: u32, delta: u32, sketch: S) -> Self {
        let first = Counter {
            start: 0,
            count: 0,
            rose: (0, 0),
            sketch,
        };
        Self {
            levels: vec![Level {
                counters: vec![first],
                began: 0,
                seam: Rise {
                    start: 0,
                    before: 0,
                    after: 0,
                },
            }],
            delta,
            intervals: 0,
            interval: u64::from(interval),
            spare: Vec::new(),
        }
    }

    /// The highest level whose interval ends with the present one.
    pub(super) fn due(&self) -> usize {
        let ends = (self.intervals + 1).trailing_zeros() as usize;
        ends.min(self.levels.len() - 1)
    }

    /// Ends a level's interval at `until`, after those of all lower levels. `distinct` is the number of pages
    /// in the last interval. `measure` returns each counter's present count, called from the younger
    /// ones to the older, given the previous count. `None` if a count is impossible.
    pub(super) fn end_stretch(
        &mut self,
        level: usize,
        until: u64,
        distinct: u64,
        mut measure: impl FnMut(&mut Counter<S>, Rise) -> Option<u64>,
        cells: &mut impl FnMut(&Cell),
    ) -> Option<()> {
        let from = self.levels[level].began;
        let mut younger = if level == 0 {
            Rise {
                start: from,
                before: 0,
                after: distinct,
            }
        } else {
            self.seam_rise(level)
        };
        // An older counter includes everything that the younger one has counted.
        let mut least = if level == 0 { 0 } else { younger.after };
        for counter in self.levels[level].counters.iter_mut().rev() {
            let after = measure(counter, younger)?;
            if after < least.max(counter.count) {
                return None;
            }
            let older = Rise {
                start: counter.start,
                before: counter.count,
                after,
            };
            least = after;
            counter.rose = (older.amount(), until - from);
            counter.count = older.after;
            if level == 0 && counter.start == from {
                // The present interval's own counter; its number of distinct pages is known exactly.
                continue;
            }
            cells(&Cell {
                younger,
                older,
                from,
                until,
            });
            younger = older;
        }
        Some(())
    }

    /// The increase of the counter next below `level`, since the beginning of the level's interval.
    pub(super) fn seam_rise(&self, level: usize) -> Rise {
        Rise {
            after: self.seam_of(level).count,
            ..self.levels[level].seam
        }
    }

    fn seam_of(&self, level: usize) -> &Counter<S> {
        let below = self.levels[..level].iter().rev();
        let mut oldest = below.filter_map(|level| level.counters.first());
        oldest
            .next()
            .expect("the present interval has a counter on level 0")
    }

    /// Called after all levels up to `due` have ended their interval at `now`, the end of an interval: prunes, moves
    /// counters up, and starts the next intervals and the next counter, whose sketch is created by `fresh`, from a
    /// spare one if available.
    pub(super) fn turn(&mut self, now: u64, due: usize, fresh: impl FnOnce(Option<S>) -> S) {
        self.intervals += 1;
        let ends = self.intervals.trailing_zeros() as usize;
        self.prune(due);
        let mut sketch = Some(fresh(self.spare.pop()));
        self.levels[0].counters.push(Counter {
            start: now,
            count: 0,
            rose: (0, 0),
            sketch: sketch.take().expect("just made"),
        });
        // From the top, so that a counter moves up by one level at a time; it is older at the next border in any case.
        for level in (0..=due).rev() {
            if level >= ends {
                continue;
            }
            let Some(age) = self.age_to_leave(level) else {
                continue;
            };
            let counters = &self.levels[level].counters;
            let leaving = counters.partition_point(|counter| now - counter.start >= age);
            if leaving == 0 {
                continue;
            }
            let leaving: Vec<_> = self.levels[level].counters.drain(..leaving).collect();
            if level + 1 == self.levels.len() {
                self.levels.push(Level {
                    counters: Vec::new(),
                    began: now,
                    seam: Rise {
                        start: now,
                        before: 0,
                        after: 0,
                    },
                });
            }
            self.levels[level + 1].counters.extend(leaving);
        }
        for level in 0..self.levels.len().min(ends + 1) {
            self.levels[level].began = now;
            if level > 0 {
                let seam = self.seam_of(level);
                self.levels[level].seam = Rise {
                    start: seam.start,
                    before: seam.count,
                    after: seam.count,
                };
            }
        }
    }

    /// The age in references from which a counter belongs above `level`; `None` if nothing is pruned.
    fn age_to_leave(&self, level: usize) -> Option<u64> {
        let reach = (2 * u64::from(SHARE_ONE)).checked_div(u64::from(self.delta))?;
        let length = self.interval.checked_shl(u32::try_from(level).ok()?)?;
        length.checked_mul(reach.max(2))
    }

    /// Removes counters on the levels up to `due` whose neighbours agree.
    fn prune(&mut self, due: usize) {
        if self.delta == 0 {
            return;
        }
        let kept_share = u128::from(SHARE_ONE - self.delta);
        // The oldest counter of these levels is the seam of the next level, or the stream's first: it is kept.
        let mut older = None;
        for level in (0..=due).rev() {
            let youngest_below = self.levels[..level].iter().rev();
            let below = youngest_below
                .filter_map(|level| level.counters.first())
                .map(|counter| counter.count)
                .next();
            let counters = std::mem::take(&mut self.levels[level].counters);
            let mut kept = Vec::with_capacity(counters.len() + 1);
            let mut coming = counters.into_iter().peekable();
            while let Some(counter) = coming.next() {
                let younger = coming.peek().map(|counter| counter.count).or(below);
                let agree = older.zip(younger).is_some_and(|(older, younger)| {
                    u128::from(younger) * u128::from(SHARE_ONE) >= u128::from(older) * kept_share
                });
                if agree {
                    self.spare.push(counter.sketch);
                } else {
                    older = Some(counter.count);
                    kept.push(counter);
                }
            }
            self.levels[level].counters = kept;
        }
    }

    /// Count of the stream's first counter.
    pub(super) fn distinct(&self) -> u64 {
        self.counters()
            .map(|counter| counter.count)
            .max()
            .unwrap_or(0)
    }

    /// All counters, in unspecified order.
    pub(super) fn counters(&self) -> impl Iterator<Item = &Counter<S>> {
        self.levels.iter().flat_map(|level| &level.counters)
    }

    /// All sketches, of counters and spare.
    pub(super) fn sketches(&self) -> impl Iterator<Item = &S> {
        let spare = self.spare.iter();
        self.counters().map(|counter| &counter.sketch).chain(spare)
    }

    /// Bytes of heap allocated, excluding those of the sketches.
    pub(super) fn memory_bytes(&self) -> usize {
        let counters = self.levels.iter().map(|level| level.counters.capacity());
        counters.sum::<usize>() * size_of::<Counter<S>>()
            + self.levels.capacity() * size_of::<Level<S>>()
            + self.spare.capacity() * size_of::<S>()
    }
}

#[cfg(test)]
mod tests {
    use super::super::place;
    use super::super::sizes::{CountError, Sizes};
    use super::*;
    use crate::parts::naive::{NaiveStack, counter_stack_misses};
    use plimsoll_flow::{MissRatioCurve, PageCount};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// A counter stack that counts with sets, so that any error is the ladder's.
    struct SetStack {
        ladder: Ladder<BTreeSet<u64>>,
        sizes: Sizes,
    }

    impl SetStack {
        fn end(&mut self, pages: &[u64], now: usize, due: usize) {
            for level in 0..=due {
                let from = self.ladder.levels[level].began as usize;
                let last = self.ladder.levels[0].began as usize;
                let distinct = pages[last..now].iter().collect::<BTreeSet<_>>().len();
                let sizes = &mut self.sizes;
                let measure = |counter: &mut Counter<BTreeSet<u64>>, _| {
                    counter.sketch.extend(&pages[from..now]);
                    let seen: BTreeSet<_> = pages[counter.start as usize..now].iter().collect();
                    assert_eq!(
                        seen.len(),
                        counter.sketch.len(),
                        "a counter missed something"
                    );
                    Some(seen.len() as u64)
                };
                let place = &mut |cell: &Cell| place(cell, sizes);
                let ended =
                    self.ladder
                        .end_stretch(level, now as u64, distinct as u64, measure, place);
                assert!(ended.is_some());
            }
        }
    }

    /// The curve, and the maximum number of counters.
    fn run(pages: &[u64], interval: usize, delta: f64) -> (MissRatioCurve, usize) {
        let delta = (delta * f64::from(SHARE_ONE)) as u32;
        let mut stack = SetStack {
            ladder: Ladder::new(interval as u32, delta, BTreeSet::new()),
            sizes: Sizes::default(),
        };
        let mut counters = 0;
        for from in (0..pages.len()).step_by(interval) {
            let until = pages.len().min(from + interval);
            let mut naive = NaiveStack::default();
            for distance in pages[from..until]
                .iter()
                .filter_map(|&page| naive.touch(page))
            {
                stack.sizes.exactly(distance + 1, 1.0);
            }
            let last = until == pages.len();
            let levels = stack.ladder.levels.len();
            let due = if last { levels - 1 } else { stack.ladder.due() };
            stack.end(pages, until, due);
            if !last {
                let fresh = |_| BTreeSet::new();
                stack.ladder.turn(until as u64, due, fresh);
            }
            counters = counters.max(stack.ladder.counters().count());
        }
        let curve = stack
            .sizes
            .curve(pages.len() as u64, CountError::NONE)
            .unwrap();
        (curve, counters)
    }

    /// Streams whose working set appears, disappears and reappears.
    fn phases() -> impl Strategy<Value = Vec<u64>> {
        let phase = (0_u64..60, 1_u64..50, any::<bool>(), 1_usize..120);
        let phase = phase.prop_flat_map(|(first, pages, in_turn, references)| {
            let picks = prop::collection::vec(0..pages, references);
            picks.prop_map(move |picks| {
                let picks = picks.into_iter().zip(0_u64..);
                let page = |(pick, turn)| first + if in_turn { turn % pages } else { pick };
                picks.map(page).collect::<Vec<_>>()
            })
        });
        prop::collection::vec(phase, 1..8).prop_map(|phases| phases.concat())
    }

    proptest! {
        // The twin recounts every counter after every reference.
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn counting_after_every_reference_is_exact_lru(pages in phases(), size in 1_usize..120) {
            let pages = &pages[..pages.len().min(200)];
            let misses = NaiveStack::misses(pages, size);
            prop_assert_eq!(counter_stack_misses(pages, 1, size), (misses, misses));
            let (curve, _) = run(pages, 1, 0.0);
            let point = curve.at(PageCount(size as u64));
            let truth = misses as f64 / pages.len() as f64;
            prop_assert!((point.low - truth).abs() < 1e-9);
            prop_assert!((point.high - truth).abs() < 1e-9);
        }
    }

    proptest! {
        #[test]
        fn whatever_is_pruned_and_whenever_counted_the_truth_is_between_the_edges(
            pages in phases(),
            interval in 1_usize..40,
            delta in prop_oneof![Just(0.0), 0.01_f64..0.5],
            size in 1_usize..120,
        ) {
            let (curve, _) = run(&pages, interval, delta);
            let point = curve.at(PageCount(size as u64));
            let all = pages.len() as f64;
            let truth = NaiveStack::misses(&pages, size) as f64 / all;
            prop_assert!(point.low <= truth + 1e-9, "{} {truth}", point.low);
            prop_assert!(truth <= point.high + 1e-9, "{} {truth}", point.high);
            if delta == 0.0 {
                // Distances within intervals are also known here.
                let (fewest, most) = counter_stack_misses(&pages, interval, size);
                prop_assert!(fewest as f64 / all <= point.low + 1e-9);
                prop_assert!(point.high <= most as f64 / all + 1e-9);
            }
        }

        #[test]
        fn what_hits_nowhere_are_the_first_references(
            pages in phases(),
            interval in 1_usize..40,
            delta in prop_oneof![Just(0.0), 0.01_f64..0.5],
        ) {
            let (curve, _) = run(&pages, interval, delta);
            let distinct = pages.iter().collect::<BTreeSet<_>>().len() as f64;
            let last = curve.miss_ratio(PageCount(u64::MAX));
            prop_assert!((last - distinct / pages.len() as f64).abs() < 1e-9);
        }
    }

    #[test]
    fn counters_grow_with_the_logarithm_of_the_stream() {
        let pages: Vec<_> = (0..6_000).collect();
        let counters = [1_500, 3_000, 6_000].map(|end| run(&pages[..end], 2, 0.1).1);
        assert!(counters[0] < 110, "{counters:?}");
        let growth = [counters[1] - counters[0], counters[2] - counters[1]];
        assert!(growth.iter().all(|&growth| growth <= 20), "{counters:?}");
        let (_, all) = run(&pages[..1_500], 2, 0.0);
        assert_eq!(all, 750);
    }

    #[test]
    fn a_loop_needs_no_counters_but_the_youngest() {
        let pages: Vec<_> = (0..20).cycle().take(6_000).collect();
        let (curve, counters) = run(&pages, 2, 0.1);
        assert!(counters < 40, "{counters}");
        let ratio = curve.miss_ratio(PageCount(20));
        assert!((ratio - 20.0 / 6_000.0).abs() < 1e-9, "{ratio}");
    }
}
