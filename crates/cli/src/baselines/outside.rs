//! What is seen of a VM's pages from outside: the curve at 5 % by traps and by scans, pages written, pages sampled.

use std::collections::HashSet;

use anyhow::ensure;
use plimsoll_estimator::working_set;
use plimsoll_estimator::working_set::SamplingStep;
use plimsoll_flow::{PageCount, PageNumber, PageSize, TraceMethod, WorkingSet, WorkingSetBound};
use plimsoll_trap::{SampledPages, ScanConfig, TraceConfig, WriteScanner};

use super::{Answer, Found, Subject, Way};
use crate::observe::{LiveEstimator, Observer, WatchConfig, target_of, working_set_band};
use crate::size::ByteSize;

/// Of a sample of pages, one in so many in the first period; later ones follow the budget.
const SCALE: u32 = 16;

fn bytes(pages: PageCount) -> u64 {
    pages.to_bytes(PageSize::FOUR_KIB)
}

fn found(set: WorkingSet) -> Found {
    use plimsoll_flow::WorkingSetBound::{AtLeast, AtMost, Estimate};
    Found::new(bytes(set.size)).bound(match set.bound {
        Estimate => "estimate",
        AtLeast => "at_least",
        AtMost => "at_most",
    })
}

/// Where the curve of the references that trapped comes to 5 %.
pub(super) fn curve(subject: &Subject<'_>) -> Answer {
    let way = Way {
        estimator: "curve at 5 %, traps",
        sees: "references to sampled pages, in order",
        whole_vm: false,
    };
    let config = TraceConfig {
        period: subject.options.interval,
        budget: Some(subject.options.budget),
        scale: SCALE,
        ..TraceConfig::default()
    };
    watch(subject, way, config.into())
}

/// Where the curve of the touches between scans comes to 5 %.
pub(super) fn presence(subject: &Subject<'_>) -> Answer {
    let way = Way {
        estimator: "curve at 5 %, presence scan",
        sees: "which sampled pages were touched between two looks",
        whole_vm: false,
    };
    let config = ScanConfig {
        period: subject.options.interval,
        budget: Some(subject.options.budget),
        scale: SCALE,
        ..ScanConfig::default()
    };
    watch(subject, way, WatchConfig::Scans(config))
}

fn watch(subject: &Subject<'_>, way: Way, config: WatchConfig) -> Answer {
    subject.go(way, |answer| {
        ensure!(!subject.stopped(), "stopped");
        let mut observer = Observer::attach(subject.vm, config, LiveEstimator::Lru)?;
        let (mut seconds, mut taken, mut lost) = (0.0, 0.0, 0);
        let (mut last, mut hidden) = (None, 0);
        for _ in 0..subject.options.rounds {
            let period = observer.period(subject.stop)?;
            let length = period.report.length.as_secs_f64();
            seconds += length;
            taken += period.report.overhead_ratio * length;
            lost += period.report.losses.lost();
            if period.report.method == TraceMethod::AccessedPageScans {
                hidden = hidden.max(period.report.resolution_pages());
            }
            if let Some(set) = period.working_set {
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
            anyhow::bail!("no page was touched while the VM was watched");
        };
        // Over all rounds if there is a curve of them, else what the last round was bounded by.
        let mut set = curve.as_ref().map_or(last, working_set);
        // Nothing smaller is told apart than what is touched between two looks.
        if set.bound == WorkingSetBound::Estimate && set.size.0 <= hidden {
            set.bound = WorkingSetBound::AtMost;
        }
        let band = curve.as_ref().and_then(working_set_band);
        answer.working_set = Some(Found {
            low_bytes: band.map(|(low, _)| bytes(low)),
            high_bytes: band.and_then(|(_, high)| high).map(bytes),
            ..found(set)
        });
        Ok(())
    })
}

/// Pages written, of all pages.
pub(super) fn written(subject: &Subject<'_>) -> Answer {
    let way = Way {
        estimator: "write scan",
        sees: "every page written, none that is only read",
        whole_vm: false,
    };
    subject.go(way, |answer| {
        ensure!(!subject.stopped(), "stopped");
        let mut scanner = WriteScanner::attach(&target_of(subject.vm)?)?;
        let mut pages: HashSet<PageNumber> = HashSet::new();
        // What was protected while it attached is not of a round.
        scanner.scan(&mut |_| ())?;
        for _ in 0..subject.options.rounds {
            if !subject.wait(subject.options.interval) {
                break;
            }
            let scan = scanner.scan(&mut |batch| pages.extend(batch.pages()))?;
            answer
                .rounds_bytes
                .push(bytes(PageCount(scan.written_pages)));
        }
        scanner.detach()?;
        ensure!(!answer.rounds_bytes.is_empty(), "stopped");
        answer.note = Some(format!(
            "{} in all rounds",
            ByteSize(bytes(PageCount(pages.len() as u64))).rounded()
        ));
        let mut rounds = answer.rounds_bytes.clone();
        rounds.sort_unstable();
        answer.working_set = Some(Found::new(rounds[rounds.len() / 2]).bound("at_least"));
        Ok(())
    })
}

/// The share of a few random pages that is touched in a round, times the memory they were drawn from.
pub(super) fn sampled(subject: &Subject<'_>) -> Answer {
    let way = Way {
        estimator: "sampling (VMware)",
        sees: "whether random pages are touched in a round",
        whole_vm: false,
    };
    subject.go(way, |answer| {
        ensure!(!subject.stopped(), "stopped");
        let mut pages = SampledPages::attach(&target_of(subject.vm)?)?;
        let (mut touched, mut sampled, mut lost) = (0_u32, 0_u32, 0);
        let mut memory = PageCount(0);
        // Other pages each time that it is asked.
        let seed = u64::from(std::process::id()) << 32;
        for round in 0..subject.options.rounds {
            memory = PageCount(pages.populated_pages()?);
            pages.draw(subject.options.sample_pages, seed | u64::from(round))?;
            if !subject.wait(subject.options.interval) {
                break;
            }
            let touches = pages.look()?;
            let count = |pages: &[PageNumber]| u32::try_from(pages.len()).unwrap_or(u32::MAX);
            let (of_round, drawn) = (count(&touches.touched), count(&touches.sampled));
            let share = f64::from(of_round) / f64::from(drawn.max(1));
            answer.rounds_bytes.push(bytes(memory.scaled(share)));
            touched = touched.saturating_add(of_round);
            sampled = sampled.saturating_add(drawn);
            lost += touches.lost;
        }
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
        answer.working_set = Some(Found {
            low_bytes: Some(bytes(low)),
            high_bytes: Some(bytes(high)),
            ..Found::new(bytes(all.size))
        });
        answer.note = Some(match lost {
            0 => format!("{touched} of {sampled} pages touched"),
            lost => format!("{touched} of {sampled} pages touched, {lost} of them never absent"),
        });
        Ok(())
    })
}
