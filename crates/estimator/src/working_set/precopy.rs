//! The course of a live migration by pre-copy: rounds, pages copied, and how long the VM is stopped.
//!
//! The first round copies all pages, each later one those that were written during the round before, until what is left is
//! little enough to be copied while the VM is stopped. A round's length follows from its pages and the bandwidth, and the
//! pages written meanwhile from the VM's [`WriteCurve`].
//! A page that is all zero takes no time to copy; what the first round leaves are the last pages in order of addresses.
//!
//! A page that a round leaves and that is written again is copied once: of the pages written within a time, the share that is written
//! again within the next follows from the same curve.
//!
//! **QEMU** looks for written pages whenever the rest of a round could be copied within the longest stop that is allowed, in steps of
//! 50 ms: so a round always leaves some pages, on average those of that time less half a step, copies for a step at least, and stops the VM when these and
//! the written ones together take no longer than allowed. A stop is therefore rarely much shorter than allowed.
//!
//! If writing keeps pace with copying, rounds come to a length at which as many pages are written as are copied: then more
//! rounds change nothing, and the migration does not end by itself.
//!
//! Within less time than one scan takes, as many pages may be written as within that scan: this upper limit is used.
//!
//! Not here: that a VM may write more slowly while it is copied; compression; the time for the state of devices.

use std::time::Duration;

use super::written::WriteCurve;

/// How a VM is migrated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrecopyOptions {
    /// Pages copied per second, above 0.
    pub pages_per_second: f64,
    /// Number of pages for which the VM is stopped.
    pub stop_pages: f64,
    /// Mean number of pages that a round leaves to the next, at most `stop_pages`.
    pub left_pages: f64,
    /// Minimum number of pages that a round copies.
    pub round_pages_min: f64,
}

/// QEMU looks for written pages after sending for so long.
const QEMU_STEP_SECONDS: f64 = 0.05;

impl PrecopyOptions {
    /// QEMU's rule, which stops a VM no longer than `stop_max` as far as can be foreseen.
    pub fn qemu(pages_per_second: f64, stop_max: Duration) -> Self {
        let seconds = stop_max.as_secs_f64();
        Self {
            pages_per_second,
            stop_pages: pages_per_second * seconds,
            left_pages: pages_per_second * (seconds - QEMU_STEP_SECONDS / 2.0).max(0.0),
            round_pages_min: pages_per_second * QEMU_STEP_SECONDS,
        }
    }
}

/// The predicted course of a migration.
#[derive(Debug, Clone, PartialEq)]
pub struct Precopy {
    /// Pages copied in each round while the VM runs.
    pub round_pages: Vec<f64>,
    /// Pages copied while it is stopped; if the migration does not end, those that are always left.
    pub stopped_pages: f64,
    /// Whether it ends by itself.
    pub ends: bool,
    /// Time while the VM runs, and while it is stopped.
    pub running_seconds: f64,
    /// Time while it is stopped.
    pub stopped_seconds: f64,
}

impl Precopy {
    /// Pages copied in all.
    pub fn pages(&self) -> f64 {
        self.round_pages.iter().sum::<f64>() + self.stopped_pages
    }
}

/// A migration ends only if less and less is left: less by this share of what a round copies.
const SHORTER_MIN: f64 = 0.01;

/// The share of the pages written within a time that are written again within the time after it.
fn written_again(writes: &WriteCurve, seconds: f64, after: f64) -> f64 {
    let [first, second, both] =
        [seconds, after, seconds + after].map(|time| writes.pages_within(time));
    ((first + second - both) / first.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0)
}

/// The pages that are to be copied. Copying one that is all zero takes no time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Contents {
    /// Number of pages.
    pub pages: u64,
    /// Share of them, 0.0 to 1.0, that is not all zero.
    pub share: f64,
    /// The same share of the last [`PrecopyOptions::left_pages`] in order of addresses, which the first round leaves.
    pub share_of_last: f64,
}

/// Predicts the migration of a VM.
pub fn precopy(memory: &Contents, writes: &WriteCurve, options: &PrecopyOptions) -> Precopy {
    let all = memory.pages as f64 * memory.share;
    let seconds_of = |pages: f64| pages / options.pages_per_second;
    let (mut rest, mut ends) = (all, true);
    let mut round_pages = Vec::new();
    while rest > options.stop_pages {
        let share = if round_pages.is_empty() {
            memory.share_of_last
        } else {
            1.0
        };
        let copied = (rest - options.left_pages * share)
            .max(options.round_pages_min)
            .min(rest);
        round_pages.push(copied);
        // Pages may be written again and again within one scan: so within less time, as many may be written.
        let resolved = |pages: f64| seconds_of(pages).max(writes.scan_seconds());
        let written = writes.pages_within(resolved(copied)).clamp(0.0, all);
        let again = match round_pages[..] {
            [.., before, _] => written_again(writes, resolved(before), resolved(copied)),
            _ => written / all,
        };
        let before = rest;
        rest = ((rest - copied) * (1.0 - again) + written).min(all);
        let is_shorter = rest < before - SHORTER_MIN * copied;
        if !is_shorter && rest > options.stop_pages {
            ends = false;
            break;
        }
    }
    Precopy {
        // The sum of no numbers is -0.0.
        running_seconds: round_pages.iter().copied().map(seconds_of).sum::<f64>() + 0.0,
        stopped_seconds: seconds_of(rest),
        stopped_pages: rest,
        round_pages,
        ends,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::{uniform, zipf};
    use crate::working_set::WrittenPages;
    use plimsoll_flow::PageNumber;
    use std::collections::BTreeSet;

    const RAM_PAGES: u64 = 50_000;
    const RAM: Contents = Contents {
        pages: RAM_PAGES,
        share: 1.0,
        share_of_last: 1.0,
    };

    /// A VM that writes a page of a stream at each tick, and at some ticks none.
    struct Vm {
        writes: Vec<u64>,
        writes_per_second: f64,
    }

    impl Vm {
        fn tick(&self, seconds: f64) -> usize {
            ((seconds * self.writes_per_second) as usize).min(self.writes.len())
        }

        /// The curve from scans of its first seconds.
        fn curve(&self, seconds: f64, scan_seconds: f64) -> WriteCurve {
            let mut written = WrittenPages::new();
            for scan in 0..(seconds / scan_seconds).round() as u32 {
                let from = f64::from(scan) * scan_seconds;
                let pages = &self.writes[self.tick(from)..self.tick(from + scan_seconds)];
                let pages: BTreeSet<_> = pages.iter().copied().map(PageNumber).collect();
                let pages: Vec<_> = pages.into_iter().collect();
                written.scan(&pages, Duration::from_secs_f64(scan_seconds));
            }
            written.curve().unwrap()
        }

        /// Copies it from a time on, page by page in sets, in steps of 50 ms as QEMU does.
        fn migrated(&self, start: f64, pages_per_second: f64, stop_max: f64) -> Option<Copied> {
            let mut rest: BTreeSet<u64> = (0..RAM_PAGES).collect();
            let step_pages = (pages_per_second * 0.05) as usize;
            let stop_pages = (pages_per_second * stop_max) as usize;
            let (mut now, mut looked, mut at, mut copied, mut rounds) = (start, start, 0, 0, 0);
            loop {
                for _ in 0..step_pages.min(rest.len()) {
                    let next = rest.range(at..).next().or(rest.first());
                    at = *next.unwrap();
                    rest.remove(&at);
                    copied += 1;
                }
                now += 0.05;
                if rest.len() <= stop_pages {
                    rest.extend(&self.writes[self.tick(looked)..self.tick(now)]);
                    looked = now;
                    rounds += 1;
                    if rest.len() <= stop_pages {
                        let stopped = rest.len() as f64 / pages_per_second;
                        return Some((rounds, (copied + rest.len()) as f64, stopped));
                    }
                }
                if now > start + 40.0 {
                    return None;
                }
            }
        }
    }

    /// Rounds, pages, and seconds while it is stopped.
    type Copied = (usize, f64, f64);

    fn within(found: f64, expected: f64, share: f64) -> bool {
        (found - expected).abs() <= share * expected
    }

    #[test]
    fn a_migration_goes_as_its_simulation_page_by_page() {
        let hot: Vec<u64> = zipf(30_000, 0.9, 1).take(1_000_000).collect();
        let even: Vec<u64> = uniform(20_000, 2).take(1_000_000).collect();
        let sequential: Vec<u64> = (0..12_000_u64).cycle().take(1_000_000).collect();
        let (mut several_rounds, mut endless) = (0, 0);
        for (stream, writes) in [hot, even, sequential].iter().enumerate() {
            for writes_per_second in [500.0, 2_000.0, 8_000.0, 20_000.0] {
                let writes = writes.clone();
                let vm = Vm {
                    writes,
                    writes_per_second,
                };
                let curve = vm.curve(4.0, 0.01);
                for pages_per_second in [12_500.0, 25_000.0, 50_000.0] {
                    let stop_max = Duration::from_millis(300);
                    let options = PrecopyOptions::qemu(pages_per_second, stop_max);
                    let found = precopy(&RAM, &curve, &options);
                    // Observed before; migrated after that.
                    let copied = vm.migrated(5.0, pages_per_second, 0.3);
                    let case = format!(
                        "stream {stream}, {writes_per_second}, {pages_per_second}: {found:?}, {copied:?}"
                    );
                    let Some((rounds, pages, stopped)) = copied else {
                        endless += 1;
                        assert!(!found.ends, "{case}");
                        continue;
                    };
                    // At the edge, the sizes of steps decide.
                    if found.ends {
                        // If rounds shrink slowly, how many there are depends on the last pages of each.
                        if writes_per_second * 2.0 <= pages_per_second {
                            assert!(found.round_pages.len().abs_diff(rounds) <= 1, "{case}");
                        }
                        assert!(within(found.pages(), pages, 0.2), "{case}");
                        assert!(within(found.stopped_seconds, stopped, 0.2), "{case}");
                    } else {
                        assert!(rounds > 5, "{case}");
                    }
                    several_rounds += u32::from(rounds > 2);
                }
            }
        }
        assert!(
            several_rounds > 5 && endless > 1,
            "{several_rounds}, {endless}"
        );
    }

    #[test]
    fn what_the_first_round_leaves_takes_as_long_as_its_own_pages_that_are_not_zero() {
        let mut written = WrittenPages::new();
        written.scan(&[], Duration::from_millis(10));
        let writes = written.curve().unwrap();
        let options = PrecopyOptions::qemu(20_000.0, Duration::from_millis(300));
        for share_of_last in [0.0, 0.5, 1.0] {
            let memory = Contents {
                share: 0.5,
                share_of_last,
                ..RAM
            };
            let found = precopy(&memory, &writes, &options);
            assert_eq!(found.stopped_pages, 5_500.0 * share_of_last, "{found:?}");
            assert_eq!(found.pages(), 25_000.0, "{found:?}");
        }
    }

    #[test]
    fn writing_as_fast_as_copying_does_not_end() {
        let vm = Vm {
            writes: uniform(40_000, 3).take(2_000_000).collect(),
            writes_per_second: 100_000.0,
        };
        let curve = vm.curve(4.0, 0.01);
        let found = precopy(
            &RAM,
            &curve,
            &PrecopyOptions::qemu(20_000.0, Duration::from_millis(300)),
        );
        assert!(!found.ends, "{found:?}");
    }

    #[test]
    fn a_set_that_is_rewritten_within_a_scan_is_not_taken_for_a_part_of_it() {
        // 20,000 pages within 20 ms, again and again.
        let vm = Vm {
            writes: (0..20_000_u64).cycle().take(4_000_000).collect(),
            writes_per_second: 1_000_000.0,
        };
        let options = PrecopyOptions::qemu(40_000.0, Duration::from_millis(300));
        for scan_seconds in [0.02, 0.5] {
            let found = precopy(&RAM, &vm.curve(4.0, scan_seconds), &options);
            assert!(!found.ends, "{scan_seconds}: {found:?}");
        }
    }

    #[test]
    fn a_vm_that_writes_nothing_is_copied_once_and_a_small_one_only_while_stopped() {
        let mut written = WrittenPages::new();
        written.scan(&[], Duration::from_millis(10));
        let curve = written.curve().unwrap();
        let options = PrecopyOptions::qemu(25_000.0, Duration::from_millis(300));
        let small = Contents { pages: 40, ..RAM };
        let found = precopy(&small, &curve, &options);
        assert_eq!((found.round_pages, found.stopped_pages), (vec![], 40.0));
        assert!(found.running_seconds.is_sign_positive());
        let found = precopy(&RAM, &curve, &options);
        assert_eq!(found.round_pages.len(), 1);
        assert!(within(found.stopped_seconds, 0.275, 1e-9), "{found:?}");
    }
}
