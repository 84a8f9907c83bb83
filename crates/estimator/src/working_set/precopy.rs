//! The course of a live migration by pre-copy: rounds, pages copied, and how long the VM is stopped.
//!
//! The first round copies all pages, each later one those that were written during the round before. When the rest can
//! be copied within the longest stop that is allowed, the VM is stopped for it (QEMU); Xen stops it after a number of rounds at the
//! latest. A round's length follows from its pages and the bandwidth, and the pages written meanwhile from
//! the VM's [`WriteCurve`].
//!
//! If writing keeps pace with copying, rounds come to a length at which as many pages are written as are copied: then more
//! rounds change nothing, and the migration does not end by itself.
//!
//! Not here: that a VM may write more slowly while it is copied; pages that are compressed or all zero, which the caller
//! leaves out.

use std::time::Duration;

use super::written::WriteCurve;

/// How a VM is migrated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrecopyOptions {
    /// Pages copied per second, above 0.
    pub pages_per_second: f64,
    /// The longest stop that is allowed.
    pub stop_max: Duration,
    /// Number of rounds after which the VM is stopped in any case; `None` if never.
    pub rounds_max: Option<u32>,
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
    #[must_use]
    pub fn pages(&self) -> f64 {
        self.round_pages.iter().sum::<f64>() + self.stopped_pages
    }
}

/// A migration ends only if rounds get shorter: by this share of their pages at least.
const SHORTER_MIN: f64 = 0.01;

/// Predicts the migration of a VM of `pages` pages.
#[must_use]
pub fn precopy(pages: u64, writes: &WriteCurve, options: &PrecopyOptions) -> Precopy {
    let all = pages as f64;
    let seconds_of = |pages: f64| pages / options.pages_per_second;
    let stop_max = options.stop_max.as_secs_f64();
    let (mut rest, mut ends) = (all, true);
    let mut round_pages = Vec::new();
    while seconds_of(rest) > stop_max {
        let is_last = |max: u32| round_pages.len() >= max as usize;
        if options.rounds_max.is_some_and(is_last) {
            break;
        }
        round_pages.push(rest);
        let written = writes.pages_within(seconds_of(rest)).clamp(0.0, all);
        let is_shorter = written < rest * (1.0 - SHORTER_MIN);
        rest = written;
        if !is_shorter && options.rounds_max.is_none() && seconds_of(rest) > stop_max {
            ends = false;
            break;
        }
    }
    Precopy {
        running_seconds: round_pages.iter().copied().map(seconds_of).sum(),
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

        /// Copies it from a time on, page by page in sets, as a migration does.
        fn migrated(&self, start: f64, options: &PrecopyOptions) -> Option<(usize, u64, f64)> {
            let (mut now, mut rest, mut copied, mut rounds) = (start, RAM_PAGES, 0, 0);
            loop {
                let takes = rest as f64 / options.pages_per_second;
                if takes <= options.stop_max.as_secs_f64() {
                    return Some((rounds, copied + rest, takes));
                }
                if rounds == 100 {
                    return None;
                }
                rounds += 1;
                copied += rest;
                let pages = &self.writes[self.tick(now)..self.tick(now + takes)];
                now += takes;
                rest = pages.iter().collect::<BTreeSet<_>>().len() as u64;
            }
        }
    }

    fn options(pages_per_second: f64) -> PrecopyOptions {
        PrecopyOptions {
            pages_per_second,
            stop_max: Duration::from_millis(30),
            rounds_max: None,
        }
    }

    #[test]
    fn a_migration_goes_as_its_simulation_page_by_page() {
        let hot = zipf(30_000, 0.9, 1).take(4_000_000);
        let even = uniform(20_000, 2).take(4_000_000);
        let sequential = (0..12_000_u64).cycle().take(4_000_000);
        let streams: [Vec<u64>; 3] = [hot.collect(), even.collect(), sequential.collect()];
        let mut several_rounds = 0;
        for (stream, writes) in streams.into_iter().enumerate() {
            for writes_per_second in [2_000.0, 10_000.0, 30_000.0] {
                let vm = Vm {
                    writes: writes.clone(),
                    writes_per_second,
                };
                let curve = vm.curve(4.0, 0.01);
                for pages_per_second in [25_000.0, 50_000.0, 200_000.0] {
                    let options = options(pages_per_second);
                    let found = precopy(RAM_PAGES, &curve, &options);
                    let case = format!(
                        "stream {stream}, {writes_per_second}, {pages_per_second}: {found:?}"
                    );
                    // Observed before; migrated after that.
                    let Some((rounds, pages, stopped)) = vm.migrated(5.0, &options) else {
                        assert!(!found.ends, "{case}");
                        continue;
                    };
                    assert!(found.ends, "{case}");
                    assert!(
                        found.round_pages.len().abs_diff(rounds) <= 1,
                        "{rounds}, {case}"
                    );
                    let error = (found.pages() / pages as f64 - 1.0).abs();
                    assert!(error < 0.05, "{pages}, {case}");
                    // The pages that happen to be left at the end depend on the number of rounds.
                    if found.round_pages.len() == rounds {
                        assert!(
                            (found.stopped_seconds - stopped).abs() < 0.2 * stopped + 0.001,
                            "{stopped}, {case}"
                        );
                    }
                    several_rounds += u32::from(rounds > 2);
                }
            }
        }
        assert!(several_rounds > 5, "{several_rounds}");
    }

    #[test]
    fn writing_as_fast_as_copying_does_not_end_unless_rounds_are_limited() {
        let vm = Vm {
            writes: uniform(40_000, 3).take(2_000_000).collect(),
            writes_per_second: 100_000.0,
        };
        let curve = vm.curve(4.0, 0.01);
        let endless = options(20_000.0);
        assert!(!precopy(RAM_PAGES, &curve, &endless).ends);
        let limited = PrecopyOptions {
            rounds_max: Some(5),
            ..endless
        };
        let found = precopy(RAM_PAGES, &curve, &limited);
        assert!(found.ends && found.round_pages.len() == 5, "{found:?}");
        assert!(found.stopped_seconds > 1.0, "{found:?}");
    }

    #[test]
    fn a_vm_that_writes_nothing_is_copied_once_and_a_small_one_only_while_stopped() {
        let mut written = WrittenPages::new();
        written.scan(&[], Duration::from_millis(10));
        let curve = written.curve().unwrap();
        let found = precopy(RAM_PAGES, &curve, &options(25_000.0));
        assert_eq!(
            (found.round_pages, found.stopped_pages),
            (vec![50_000.0], 0.0)
        );
        assert!((found.running_seconds - 2.0).abs() < 1e-9);
        let found = precopy(100, &curve, &options(25_000.0));
        assert_eq!((found.round_pages, found.stopped_pages), (vec![], 100.0));
    }
}
