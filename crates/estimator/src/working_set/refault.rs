//! Zballoond's rule: shrink a VM until it misses pages it gave up, and give that memory back.
//!
//! The guest's kernel counts the pages that it reads again after it evicted them (refaults of the page cache,
//! swap-ins). While there are none, the VM has more than its working set. The VM therefore starts at the memory
//! committed to its processes (Committed_AS), is shrunk in small steps while nothing is missed, and gets missed memory
//! back. The smallest size without a miss is the working set.
//!
//! Source: [Chiang13] as described in \[PRL\] §6; numbers given in neither are ours. Departs in its end: it stops where
//! Zballoond continues to follow the guest. Departs in what it returns: at most what was taken since nothing was missed, because
//! a guest in a loop misses a page many times in a step. Not observed: a page that is used less often than once per step; the
//! working set of a guest that cannot be shrunk or has nowhere to evict to (without swap, memory of processes is never
//! missed, because the guest fails first; set `floor` above the size it needs to survive). Cost: a step per 5 % between
//! Committed_AS and the working set, and the misses at the end: memory is really taken.

use plimsoll_flow::{PageCount, WorkingSet, WorkingSetBound};

/// How [`Refault`] shrinks the VM.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RefaultOptions {
    /// Share of its size, above 0.0 and below 1.0, that the VM gives up in a step.
    pub shrink: f64,
    /// Number of refaults in a step that is ignored, because a kernel never stops reading entirely.
    pub quiet: u64,
    /// Number of steps to wait for a balloon that has stopped before its target, until its position is accepted.
    pub patience: u32,
    /// Minimum size of the VM.
    pub floor: PageCount,
    /// Maximum size of the VM: all of its memory.
    pub ceiling: PageCount,
}

impl RefaultOptions {
    /// Returns the default options for these limits.
    pub fn between(floor: PageCount, ceiling: PageCount) -> Self {
        Self {
            shrink: 0.05,
            quiet: 0,
            patience: 5,
            floor: floor.min(ceiling),
            ceiling,
        }
    }
}

/// Tolerance for reaching a target, as a share of it, because balloons move in blocks. A smaller change does not count
/// as movement, either.
const SLACK: f64 = 0.01;

/// Observation at the end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefaultObservation {
    /// The VM's current size, according to its balloon.
    pub size: PageCount,
    /// Pages read again since the observation before.
    pub refaults: u64,
    /// Memory committed to its processes, if the guest reports it.
    pub committed: Option<PageCount>,
}

/// State of [`Refault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefaultPhase {
    /// No observation yet.
    Starting,
    /// The VM gives up memory and misses nothing.
    Shrinking,
    /// It missed pages and gets memory back.
    Growing,
    /// The working set has been found; the VM has this size.
    Settled,
}

/// The rule that maps one observation to the next target.
///
/// ```
/// use plimsoll_estimator::working_set::{Refault, RefaultObservation, RefaultOptions};
/// use plimsoll_flow::PageCount;
///
/// let mut rule = Refault::new(RefaultOptions::between(PageCount(1_000), PageCount(100_000)));
/// let mut size = PageCount(100_000);
/// while rule.working_set().is_none() {
///     // A guest that reads again what it has less than 40 000 pages, and does what it is told.
///     let refaults = 40_000_u64.saturating_sub(size.0);
///     let committed = Some(PageCount(60_000));
///     size = rule.step(RefaultObservation { size, refaults, committed });
/// }
/// let found = rule.working_set().unwrap().size.0;
/// assert!((40_000..42_000).contains(&found), "{found}");
/// ```
#[derive(Debug, Clone)]
pub struct Refault {
    options: RefaultOptions,
    phase: RefaultPhase,
    target: PageCount,
    /// The size to which the balloon was last seen to move, and the number of steps it has been there short of its
    /// target.
    moved_to: PageCount,
    waited: u32,
    /// The smallest size at which nothing was missed.
    quiet_at: Option<PageCount>,
    steps: u32,
    refaults: u64,
    found: Option<WorkingSet>,
}

impl Refault {
    /// Returns a rule without observations. If the limits are in the wrong order, the upper one is used for both.
    pub fn new(mut options: RefaultOptions) -> Self {
        options.floor = options.floor.min(options.ceiling);
        Self {
            options,
            phase: RefaultPhase::Starting,
            target: options.ceiling,
            moved_to: options.ceiling,
            waited: 0,
            quiet_at: None,
            steps: 0,
            refaults: 0,
            found: None,
        }
    }

    /// Processes the observation at the end of a step and returns the VM's target size for the next one.
    ///
    /// Counts before the first observation are ignored.
    pub fn step(&mut self, seen: RefaultObservation) -> PageCount {
        match self.phase {
            RefaultPhase::Settled => return self.target,
            RefaultPhase::Starting => {
                self.phase = RefaultPhase::Shrinking;
                return self.aim(seen.committed.unwrap_or(seen.size));
            }
            RefaultPhase::Shrinking | RefaultPhase::Growing => {}
        }
        self.steps += 1;
        self.refaults = self.refaults.saturating_add(seen.refaults);
        if seen.size.0.abs_diff(self.moved_to.0) > self.target.scaled(SLACK).0 {
            self.moved_to = seen.size;
            self.waited = 0;
        }
        if seen.refaults > self.options.quiet {
            return self.grow(seen);
        }
        let reached = match self.phase {
            RefaultPhase::Growing => seen.size >= self.target.scaled(1.0 - SLACK),
            _ => seen.size <= self.target.scaled(1.0 + SLACK),
        };
        if !reached {
            self.waited += 1;
            if self.waited <= self.options.patience {
                return self.target;
            }
        }
        match self.phase {
            RefaultPhase::Growing => self.settle(seen.size, WorkingSetBound::Estimate),
            _ if !reached || self.target <= self.options.floor => {
                self.settle(seen.size, WorkingSetBound::AtMost)
            }
            _ => {
                self.quiet_at = Some(seen.size);
                let less = self.target.min(seen.size).scaled(1.0 - self.options.shrink);
                self.aim(less)
            }
        }
    }

    /// Gives back what was missed, at least 1 %, because a balloon ignores smaller changes. What lacks is never more than what was
    /// taken since nothing was missed, however often the guest missed it in a step; at that size it misses once more what had
    /// been evicted.
    fn grow(&mut self, seen: RefaultObservation) -> PageCount {
        let growing = self.phase == RefaultPhase::Growing;
        let ceiling = self.options.ceiling;
        if growing && seen.size >= ceiling.scaled(1.0 - SLACK) {
            return self.settle(ceiling, WorkingSetBound::AtLeast);
        }
        let least = seen.size.scaled(SLACK).0.max(1);
        let more = PageCount(seen.size.0.saturating_add(seen.refaults.max(least)));
        let quiet_at = self.quiet_at.filter(|quiet| more > *quiet);
        let more = quiet_at.map_or(more, |quiet| quiet.max(seen.size));
        let is_short = seen.size < self.target.scaled(1.0 - SLACK);
        let is_at_quiet = self.quiet_at.is_some_and(|quiet| self.target >= quiet);
        if growing && (is_short || is_at_quiet) {
            self.waited += 1;
            if self.waited <= self.options.patience {
                self.target = self.target.max(more.min(ceiling));
                return self.target;
            }
            if is_short {
                return self.settle(seen.size, WorkingSetBound::AtLeast);
            }
            // It needs more than it did.
            self.quiet_at = None;
            return self.grow(seen);
        }
        self.phase = RefaultPhase::Growing;
        self.aim(more)
    }

    fn aim(&mut self, size: PageCount) -> PageCount {
        self.target = size.clamp(self.options.floor, self.options.ceiling);
        self.waited = 0;
        self.target
    }

    fn settle(&mut self, size: PageCount, bound: WorkingSetBound) -> PageCount {
        self.phase = RefaultPhase::Settled;
        self.found = Some(WorkingSet { size, bound });
        self.aim(size)
    }

    /// Its state.
    pub fn phase(&self) -> RefaultPhase {
        self.phase
    }

    /// Number of steps after the first observation, until it settled.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Number of pages that the guest read again in these steps.
    pub fn refaults(&self) -> u64 {
        self.refaults
    }

    /// The working set, once it is found. An upper bound if the VM never missed anything, a lower one
    /// if it misses pages with all of its memory.
    pub fn working_set(&self) -> Option<WorkingSet> {
        self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A guest that needs `need` pages and whose balloon moves at most `speed` pages per step.
    fn run(options: RefaultOptions, need: u64, committed: Option<u64>, speed: u64) -> Refault {
        let mut rule = Refault::new(options);
        let mut size = options.ceiling.0;
        for _ in 0..2_000 {
            let target = rule.step(RefaultObservation {
                size: PageCount(size),
                refaults: need.saturating_sub(size),
                committed: committed.map(PageCount),
            });
            if rule.working_set().is_some() {
                return rule;
            }
            assert!((options.floor..=options.ceiling).contains(&target));
            size = target
                .0
                .clamp(size.saturating_sub(speed), size.saturating_add(speed));
        }
        panic!("did not settle: {rule:?}");
    }

    fn options() -> RefaultOptions {
        RefaultOptions::between(PageCount(2_000), PageCount(100_000))
    }

    #[test]
    fn it_starts_at_what_was_committed_and_takes_five_percent_a_step() {
        let mut rule = Refault::new(options());
        let quiet = |size| RefaultObservation {
            size,
            refaults: 0,
            committed: Some(PageCount(60_000)),
        };
        // Counts before the first observation are ignored.
        let first = RefaultObservation {
            refaults: 99,
            ..quiet(PageCount(100_000))
        };
        assert_eq!(rule.step(first), PageCount(60_000));
        assert_eq!(rule.step(quiet(PageCount(60_000))), PageCount(57_000));
        assert_eq!(rule.step(quiet(PageCount(57_000))), PageCount(54_150));
        // The target is not reached yet: it waits.
        assert_eq!(rule.step(quiet(PageCount(56_000))), PageCount(54_150));
        assert_eq!(rule.steps(), 3);
    }

    #[test]
    fn a_guest_that_never_misses_anything_has_an_upper_bound() {
        let rule = run(options(), 0, None, u64::MAX);
        let found = rule.working_set().unwrap();
        assert_eq!(found.bound, WorkingSetBound::AtMost);
        assert_eq!(found.size, PageCount(2_000));
    }

    #[test]
    fn a_balloon_that_is_stuck_ends_it_where_it_is() {
        let rule = run(options(), 0, Some(50_000), 0);
        let found = rule.working_set().unwrap();
        assert_eq!(found.bound, WorkingSetBound::AtMost);
        assert_eq!(found.size, PageCount(100_000));
        assert_eq!(rule.steps(), 6);
    }

    #[test]
    fn a_guest_that_misses_with_all_its_memory_has_a_lower_bound() {
        let rule = run(options(), 150_000, Some(90_000), u64::MAX);
        let found = rule.working_set().unwrap();
        assert_eq!(found.bound, WorkingSetBound::AtLeast);
        assert_eq!(found.size, PageCount(100_000));
    }

    #[test]
    fn a_guest_that_does_not_get_its_memory_back_has_a_lower_bound() {
        let mut rule = Refault::new(options());
        for _ in 0..20 {
            rule.step(RefaultObservation {
                size: PageCount(30_000),
                refaults: 5_000,
                committed: None,
            });
        }
        let expected = WorkingSet {
            size: PageCount(30_000),
            bound: WorkingSetBound::AtLeast,
        };
        assert_eq!(rule.working_set(), Some(expected));
    }

    #[test]
    fn a_guest_that_misses_a_page_many_times_gets_no_more_than_was_taken() {
        let mut rule = Refault::new(options());
        let (need, mut size, mut evicted) = (50_000, PageCount(100_000), 0);
        while rule.working_set().is_none() {
            // In a loop over more than it has, it misses everything; with enough, once what was evicted.
            let lacks = size.0 < need;
            let refaults = if lacks {
                70_000
            } else {
                std::mem::take(&mut evicted)
            };
            if lacks {
                evicted = 5_000;
            }
            let committed = Some(PageCount(60_000));
            size = rule.step(RefaultObservation {
                size,
                refaults,
                committed,
            });
        }
        let found = rule.working_set().unwrap();
        assert_eq!(found.bound, WorkingSetBound::Estimate);
        assert!((50_000..53_000).contains(&found.size.0), "{found:?}");
    }

    #[test]
    fn a_guest_that_comes_to_need_more_gets_it() {
        let mut rule = Refault::new(options());
        let (mut need, mut size) = (50_000_u64, PageCount(100_000));
        while rule.working_set().is_none() {
            if rule.phase() == RefaultPhase::Growing {
                need = 80_000;
            }
            let refaults = need.saturating_sub(size.0);
            let committed = Some(PageCount(60_000));
            size = rule.step(RefaultObservation {
                size,
                refaults,
                committed,
            });
        }
        let found = rule.working_set().unwrap();
        assert_eq!(found.bound, WorkingSetBound::Estimate);
        assert!((80_000..85_000).contains(&found.size.0), "{found:?}");
    }

    proptest! {
        #[test]
        fn what_is_found_is_within_a_step_of_the_need(
            need in 4_000_u64..90_000,
            committed in prop::option::of(1_000_u64..200_000),
            speed in prop_oneof![Just(u64::MAX), 2_000_u64..20_000],
        ) {
            let rule = run(options(), need, committed, speed);
            let found = rule.working_set().unwrap();
            prop_assert_eq!(found.bound, WorkingSetBound::Estimate);
            let size = found.size.0 as f64;
            prop_assert!(size >= need as f64 * 0.98, "{size} of {need}");
            prop_assert!(size <= need as f64 * 1.06 + 2.0, "{size} of {need}");
        }
    }
}
