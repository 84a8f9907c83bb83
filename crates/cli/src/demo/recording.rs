//! What a run of the demo leaves behind: the guests' words and what their tracers saw.

use std::time::Instant;

use plimsoll_flow::{PageCount, VmId};
use plimsoll_trap::TraceConfig;
use plimsoll_vm::Detection;

use crate::experiment::{ConsoleLog, Observed};
use crate::lab::curves::Law;

/// A run.
#[derive(Debug)]
pub(super) struct Recording {
    /// Release of the host's Linux; empty if it is not told.
    pub kernel: String,
    /// CPUs of the host.
    pub cpus: usize,
    /// What ran the guests' instructions.
    pub detection: Detection,
    /// How they were traced.
    pub config: TraceConfig,
    /// When both guests were up.
    pub begin: Instant,
    /// From when to when they were traced.
    pub traced: (Instant, Instant),
    /// When the last step was over, or the run was stopped.
    pub end: Instant,
    /// The stepping guest.
    pub steps: Watched,
    /// The one with references of a known law.
    pub zipf: Watched,
    /// That law.
    pub law: Law,
    /// Pages over which it holds.
    pub law_pages: PageCount,
}

/// A guest of the run.
#[derive(Debug)]
pub(super) struct Watched {
    /// Its name.
    pub vm: VmId,
    /// Its RAM.
    pub ram_bytes: u64,
    /// What it said.
    pub console: ConsoleLog,
    /// What its tracer saw.
    pub observed: Observed,
}

/// Returns the working sets that held at some time between two moments, in order.
pub(super) fn sizes_during(
    steps: &[(Instant, PageCount)],
    from: Instant,
    to: Instant,
) -> Vec<PageCount> {
    let ends = steps.iter().skip(1).map(|&(at, _)| Some(at)).chain([None]);
    steps
        .iter()
        .zip(ends)
        .filter(|&(&(begin, _), end)| begin < to && end.is_none_or(|end| end > from))
        .map(|(&(_, pages), _)| pages)
        .collect()
}

/// Runs that never were, for tests.
#[cfg(test)]
pub(super) mod made_up {
    use std::time::Duration;

    use plimsoll_flow::{WorkingSet, WorkingSetBound};
    use plimsoll_trap::{Losses, PeriodReport};
    use plimsoll_vm::{Accelerator, ConsoleEvent};

    use super::*;
    use crate::experiment::Traced;
    use crate::observe::Period;

    /// Pages in a MiB.
    pub(in super::super) const MIB: u64 = 256;

    const SECOND: Duration = Duration::from_secs(1);

    /// A run in which the stepping guest stays 3 s at each first size while its tracer finds the second,
    /// in periods of 1 s at one page in `scale`. Both are left alone for 1 s before and after, and are a tenth slower while traced.
    pub(in super::super) fn recording(sizes: &[(u64, u64)], scale: u32) -> Recording {
        let begin = Instant::now();
        let from = begin + SECOND;
        let seconds = 3 * u32::try_from(sizes.len()).unwrap();
        let to = from + SECOND * seconds;
        let end = to + SECOND;
        let (mut steps, mut periods) = (Vec::new(), Vec::new());
        for second in 0..seconds + 2 {
            let at = begin + SECOND * second;
            // The first size holds from the begin, the last to the end.
            let index = (second.saturating_sub(1) / 3) as usize;
            let (truth, found) = sizes[index.min(sizes.len() - 1)];
            let is_traced = (1..=seconds).contains(&second);
            if second == 0 || (is_traced && second % 3 == 1 && second > 1) {
                steps.push((at, step(truth)));
            }
            if is_traced {
                periods.push(traced(at, found, scale));
            }
            let visits = if is_traced { 900 } else { 1000 };
            steps.push((at + SECOND, round(truth, visits)));
        }
        let zipf = steps
            .iter()
            .filter_map(|(at, event)| match event {
                ConsoleEvent::Round { ops, .. } => Some((*at, round(MIB, *ops))),
                _ => None,
            })
            .collect();
        let again = periods
            .iter()
            .map(|period: &Traced| traced(period.start, MIB, scale));
        Recording {
            kernel: "<6.1>".to_owned(),
            cpus: 2,
            detection: Detection {
                accelerator: Accelerator::Tcg,
                reason: "it was asked for".to_owned(),
            },
            config: TraceConfig {
                period: SECOND,
                ..TraceConfig::default()
            },
            begin,
            traced: (from, to),
            end,
            zipf: watched("zipf", zipf, again.collect()),
            steps: watched("steps", steps, periods),
            law: Law::Zipf(1.0),
            law_pages: PageCount(MIB),
        }
    }

    fn watched(name: &str, events: Vec<(Instant, ConsoleEvent)>, periods: Vec<Traced>) -> Watched {
        Watched {
            vm: VmId(name.to_owned()),
            ram_bytes: 320 << 20,
            console: ConsoleLog(events),
            observed: Observed {
                periods,
                curves: None,
            },
        }
    }

    fn step(pages: u64) -> ConsoleEvent {
        ConsoleEvent::Step {
            index: 0,
            pages: PageCount(pages),
            start_ms: 0,
        }
    }

    fn round(pages: u64, ops: u64) -> ConsoleEvent {
        ConsoleEvent::Round {
            index: 0,
            pages: PageCount(pages),
            ops,
            ms: 1000,
            total_ops: 0,
            mismatches: 0,
        }
    }

    fn traced(start: Instant, found: u64, scale: u32) -> Traced {
        Traced {
            start,
            end: start + SECOND,
            period: Period {
                report: PeriodReport {
                    period: 0,
                    length: SECOND,
                    window: SECOND,
                    scale,
                    hot_set_pages: 64,
                    populated_pages: 1 << 16,
                    tracked_pages: 512,
                    distinct_pages: 256,
                    traps: 512,
                    write_traps: 0,
                    stray_traps: 0,
                    rearmed_pages: 1024,
                    trap_time: SECOND / 200,
                    rearm_time: SECOND / 200,
                    collect_time: SECOND / 1000,
                    overhead_ratio: 0.01,
                    budget_ran_out: false,
                    losses: Losses::default(),
                },
                working_set: Some(WorkingSet {
                    size: PageCount(found),
                    bound: WorkingSetBound::Estimate,
                }),
                curve: None,
                distance: None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_sizes_of_a_stretch_are_those_that_held_in_it() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let steps = [
            (at(0), PageCount(1)),
            (at(10), PageCount(2)),
            (at(20), PageCount(3)),
        ];
        let sizes = |from, to| {
            let sizes = sizes_during(&steps, at(from), at(to)).into_iter();
            sizes.map(|pages| pages.0).collect::<Vec<_>>()
        };
        assert_eq!(sizes(0, 10), [1]);
        assert_eq!(sizes(5, 15), [1, 2]);
        assert_eq!(sizes(5, 25), [1, 2, 3]);
        assert_eq!(sizes(30, 40), [3]);
        assert!(sizes_during(&[], at(0), at(1)).is_empty());
    }
}
