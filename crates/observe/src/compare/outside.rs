//! Observation of a VM's pages from outside: the curve at 5 % by traps and by scans, written pages, sampled pages.

use std::collections::HashSet;

use crate::{Observer, ObserverOptions, target_of, working_set_band};
use anyhow::ensure;
use plimsoll_estimator::working_set;
use plimsoll_estimator::working_set::SamplingStep;
use plimsoll_flow::{PageCount, PageNumber, PageSize, TraceMethod, WorkingSet, WorkingSetBound};
use plimsoll_trap::{BackendRow, TraceConfig};

use super::{Answer, Figure, Method, Subject};
use plimsoll_protocol::size::ByteSize;

/// One page in this number is tracked in the first period; later ones follow the budget.
const SCALE: u32 = 16;

fn bytes(pages: PageCount) -> u64 {
    pages.to_bytes(PageSize::FOUR_KIB)
}

fn figure(set: WorkingSet) -> Figure {
    Figure::new(bytes(set.size)).bound(set.bound)
}

/// The size at which the curve of the trapped references falls to 5 %.
pub(super) fn curve(subject: &Subject<'_>) -> Answer {
    let method = Method {
        estimator: "curve at 5 %, traps",
        sees: "references to sampled pages, in order",
        whole_vm: false,
    };
    observe(subject, method, TraceMethod::Traps)
}

/// The size at which the curve of the touches between scans falls to 5 %.
pub(super) fn accessed(subject: &Subject<'_>) -> Answer {
    let method = Method {
        estimator: "curve at 5 %, accessed-page scan",
        sees: "which sampled pages were touched between two scans",
        whole_vm: false,
    };
    observe(subject, method, TraceMethod::AccessedPageScans)
}

/// The settings of every backend; a round is one period.
fn config(subject: &Subject<'_>) -> TraceConfig {
    TraceConfig {
        period: subject.options.interval,
        budget: Some(subject.options.budget),
        scale: SCALE,
        ..TraceConfig::default()
    }
}

fn observe(subject: &Subject<'_>, method: Method, by: TraceMethod) -> Answer {
    subject.run(method, |answer| {
        ensure!(!subject.stopped(), "stopped");
        let options = ObserverOptions::default();
        let mut observer = Observer::attach(subject.vm, by, &config(subject), &options)?;
        let (mut seconds, mut taken, mut lost) = (0.0, 0.0, 0);
        let (mut last, mut resolution) = (None, 0);
        for _ in 0..subject.options.rounds {
            let observed = observer.period(subject.stop)?;
            let period = &observed.period;
            let length = period.length.as_secs_f64();
            seconds += length;
            taken += period.overhead_ratio * length;
            lost += period.losses.lost();
            if period.method == TraceMethod::AccessedPageScans {
                resolution = resolution.max(period.resolution_pages());
            }
            if let Some(set) = observed.working_set {
                answer.rounds_bytes.push(bytes(set.size));
                last = Some(set);
            }
            if subject.stopped() {
                break;
            }
        }
        let curve = observer.curve();
        observer.detach()?;
        if seconds > 0.0 {
            answer.overhead_ratio = Some(taken / seconds);
        }
        if lost > 0 {
            answer.note = Some(format!("{lost} references may be missing"));
        }
        let Some(last) = last else {
            anyhow::bail!("no page was touched while the VM was observed");
        };
        // From the curve over all rounds if there is one, otherwise the bound of the last round.
        let mut set = curve.as_ref().map_or(last, working_set);
        // Sizes below the number of pages touched between two scans cannot be resolved.
        if set.bound == WorkingSetBound::Estimate && set.size.0 <= resolution {
            set.bound = WorkingSetBound::AtMost;
        }
        let band = curve.as_ref().and_then(working_set_band);
        answer.working_set = Some(Figure {
            low_bytes: band.map(|(low, _)| bytes(low)),
            high_bytes: band.and_then(|(_, high)| high).map(bytes),
            ..figure(set)
        });
        Ok(())
    })
}

/// Pages written, among all pages.
pub(super) fn written(subject: &Subject<'_>) -> Answer {
    let method = Method {
        estimator: "write scan",
        sees: "every page written, none that is only read",
        whole_vm: false,
    };
    subject.run(method, |answer| {
        ensure!(!subject.stopped(), "stopped");
        let config = TraceConfig {
            budget: None,
            scale: 1,
            scan_interval: Some(subject.options.interval),
            ..config(subject)
        };
        let mut scanner =
            BackendRow::of(TraceMethod::WriteScans).attach(&target_of(subject.vm)?, &config)?;
        let mut pages: HashSet<PageNumber> = HashSet::new();
        for _ in 0..subject.options.rounds {
            let mut of_round = Vec::new();
            let period = scanner.run_period(subject.stop, &mut |seen| {
                of_round.extend_from_slice(seen.pages());
            })?;
            if subject.stopped() {
                break;
            }
            pages.extend(of_round);
            answer
                .rounds_bytes
                .push(bytes(PageCount(period.distinct_pages)));
        }
        scanner.detach()?;
        ensure!(!answer.rounds_bytes.is_empty(), "stopped");
        answer.note = Some(format!(
            "{} in all rounds",
            ByteSize(bytes(PageCount(pages.len() as u64))).rounded()
        ));
        let mut rounds = answer.rounds_bytes.clone();
        rounds.sort_unstable();
        answer.working_set =
            Some(Figure::new(rounds[rounds.len() / 2]).bound(WorkingSetBound::AtLeast));
        Ok(())
    })
}

/// The share of a few random pages that is touched in a round, times the memory they were drawn from.
pub(super) fn sampled(subject: &Subject<'_>) -> Answer {
    let method = Method {
        estimator: "sampling (VMware)",
        sees: "whether random pages are touched in a round",
        whole_vm: false,
    };
    subject.run(method, |answer| {
        ensure!(!subject.stopped(), "stopped");
        let config = TraceConfig {
            sample_pages: subject.options.sample_pages,
            // Different pages in each run.
            seed: u64::from(std::process::id()) << 32,
            ..config(subject)
        };
        let mut sampler =
            BackendRow::of(TraceMethod::SampledPages).attach(&target_of(subject.vm)?, &config)?;
        let (mut touched, mut sampled, mut lost) = (0_u32, 0_u32, 0);
        let mut memory = PageCount(0);
        for _ in 0..subject.options.rounds {
            let period = sampler.run_period(subject.stop, &mut |_| ())?;
            if subject.stopped() {
                break;
            }
            memory = PageCount(period.populated_pages);
            let count = |pages: u64| u32::try_from(pages).unwrap_or(u32::MAX);
            let (of_round, drawn) = (count(period.distinct_pages), count(period.tracked_pages));
            let share = f64::from(of_round) / f64::from(drawn.max(1));
            answer.rounds_bytes.push(bytes(memory.scaled(share)));
            touched = touched.saturating_add(of_round);
            sampled = sampled.saturating_add(drawn);
            lost += period.losses.lost();
        }
        sampler.detach()?;
        ensure!(sampled > 0, "stopped before a round had ended");
        let share = f64::from(touched) / f64::from(sampled);
        let all = SamplingStep {
            touched,
            sampled,
            size: memory.scaled(share),
            smoothed: memory.scaled(share),
            memory,
        };
        let (low, high) = all.confidence();
        answer.working_set = Some(Figure {
            low_bytes: Some(bytes(low)),
            high_bytes: Some(bytes(high)),
            ..Figure::new(bytes(all.size))
        });
        answer.note = Some(match lost {
            0 => format!("{touched} of {sampled} pages touched"),
            lost => format!("{touched} of {sampled} pages touched, {lost} of them never unmapped"),
        });
        Ok(())
    })
}
