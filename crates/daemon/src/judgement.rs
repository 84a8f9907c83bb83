//! Judgement of a promise by what was counted: measured misses compared with predicted ones and with a VM's limits.
//!
//! Not here: when counts are taken, and what follows from a broken promise (`turn/check`, `turn/relief`).

use std::time::Duration;

use plimsoll_flow::MissesPerSecond;
use plimsoll_policy::{Bound, PredictionUnit, Relative};
use plimsoll_protocol::decision::{Check, MissesCheck, StallCheck, Step, Verdict};

use crate::host::Misses;
use crate::moves::SAME_BYTES;

/// Minimum references, or misses if references are not counted, for a statistical statement.
const COUNT_MIN: u64 = 50;
/// Number of standard errors by which a measurement must exceed its bound to count as a violation.
const CERTAIN: f64 = 2.0;

/// Misses within an interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MissCount {
    /// Misses.
    pub misses: u64,
    /// References that could have missed, if they are counted.
    pub references: Option<u64>,
    /// Length of the interval.
    pub seconds: f64,
    /// The kind of misses counted.
    pub by: &'static str,
}

impl MissCount {
    /// What was counted from `first` to `last`. A count of hits that falls makes no more misses than references.
    pub fn between(first: Misses, last: Misses, seconds: f64) -> Self {
        let references = last.of.zip(first.of);
        let references = references.map(|(last, first)| last.saturating_sub(first));
        let misses = last.count.saturating_sub(first.count);
        Self {
            misses: misses.min(references.unwrap_or(u64::MAX)),
            references,
            seconds,
            by: last.by,
        }
    }

    /// Misses per second; the interval must have a length.
    pub fn per_second(&self) -> f64 {
        self.misses as f64 / self.seconds
    }
}

/// Limit and prediction of a VM.
#[derive(Debug, Clone, PartialEq)]
pub struct Promise {
    /// The VM.
    pub vm: String,
    /// Misses at its new size relative to those at the baseline.
    pub predicted: Option<Relative>,
    /// Misses per second at its new size.
    pub predicted_misses: Option<MissesPerSecond>,
    /// Relative misses at its size before.
    pub before: Option<f64>,
    /// Predicted share of references that miss at the baseline; not below the minimum of the rules.
    pub baseline_ratio: f64,
    /// Minimum miss ratio distinguished from zero.
    pub ratio_min: f64,
    /// Bounds on its misses.
    pub bound: Bound,
    /// Bound on the time that it waits, as a share, if it is promised one.
    pub max_stall: Option<f64>,
    /// Whether the curve covers the references that are counted, as a disk's does. A curve from traps covers others, so
    /// that only the rates before and after can be compared.
    pub by_ratio: bool,
}

impl Promise {
    /// How it is judged after its VM's part of a move: if the VM's own memory changed, so did its reads of the disk, hits
    /// and misses alike, and their ratio shows nothing of that.
    pub fn after(&self, step: Option<&Step>) -> Self {
        let changed = |step: &Step| step.now.direct_bytes.abs_diff(step.from.direct_bytes);
        Self {
            by_ratio: self.by_ratio && step.is_none_or(|step| changed(step) < SAME_BYTES),
            ..self.clone()
        }
    }
}

/// Result of comparing one bound with what was counted.
struct Judgement {
    measured: Option<f64>,
    verdict: Verdict,
    why: String,
}

impl Judgement {
    fn unknown(why: String) -> Self {
        Self {
            measured: None,
            verdict: Verdict::Unknown,
            why,
        }
    }
}

/// Compares the counts after a move with those `before` it, for each bound that the VM is promised; `tolerance` is how
/// far above a bound it may be, as a share.
pub fn judge(
    promise: &Promise,
    before: Option<MissCount>,
    after: Option<MissCount>,
    tolerance: f64,
) -> Check {
    let before = before.filter(|before| before.seconds > 0.0);
    let after = after.filter(|after| after.seconds > 0.0);
    let bound = promise.bound.max_loss.map(|max_loss| 1.0 + max_loss);
    let most = promise.bound.max_misses_per_second;
    let judged = |judge: &dyn Fn(MissCount) -> Judgement| match after {
        Some(after) => judge(after),
        None => Judgement::unknown("nothing counts its misses".to_owned()),
    };
    let rise =
        bound.map(|bound| judged(&|after| judge_rise(promise, before, after, bound, tolerance)));
    let number =
        most.map(|most| judged(&|after| judge_number(promise, before, after, most, tolerance)));
    let judgements = [&rise, &number];
    let judgements: Vec<_> = judgements.into_iter().flatten().collect();
    let any = |verdict| {
        judgements
            .iter()
            .any(|judgement| judgement.verdict == verdict)
    };
    let mut why: Vec<_> = judgements
        .iter()
        .map(|judgement| judgement.why.as_str())
        .collect();
    why.dedup();
    Check {
        vm: promise.vm.clone(),
        predicted: promise.predicted,
        measured: rise.as_ref().and_then(|rise| rise.measured),
        by: after.map_or("nothing", |after| after.by).to_owned(),
        bound,
        misses: most.map(|most| MissesCheck {
            predicted_per_second: promise.predicted_misses.map(|misses| misses.expected),
            predicted_high_per_second: promise.predicted_misses.map(|misses| misses.high),
            measured_per_second: number.as_ref().and_then(|number| number.measured),
            bound_per_second: most,
        }),
        stall: None,
        verdict: if any(Verdict::Broken) {
            Verdict::Broken
        } else if any(Verdict::Unknown) {
            Verdict::Unknown
        } else {
            Verdict::Kept
        },
        why: why.join("; "),
    }
}

/// Adds to a check of a VM that gave memory what its QEMU waited for memory of the host: nothing that a guest or a curve
/// reports shows that. It is not blamed for waiting as long before the move.
pub fn guard(
    mut check: Check,
    before: Option<f64>,
    measured: f64,
    bound: f64,
    tolerance: f64,
) -> Check {
    check.stall = Some(StallCheck {
        before_ratio: before,
        measured_ratio: measured,
        bound_ratio: bound,
    });
    if measured <= bound * (1.0 + tolerance) {
        return check;
    }
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    check.why = format!(
        "{}; its QEMU waited for memory of the host in {} of the time, with a limit of {}",
        check.why,
        percent(measured),
        percent(bound)
    );
    match before {
        Some(before) if measured <= before * (1.0 + tolerance) => {
            check.why += ", but as much before the move";
            if check.verdict == Verdict::Kept {
                check.verdict = Verdict::Unknown;
            }
        }
        _ => check.verdict = Verdict::Broken,
    }
    check
}

/// Whether counts of so long show how much the VM misses, for each of its bounds: those of an idle VM do not.
pub fn is_measured(check: &Check, length: Duration) -> bool {
    let number = |misses: &MissesCheck| {
        let count = misses.measured_per_second.unwrap_or(0.0) * length.as_secs_f64();
        count >= COUNT_MIN as f64
    };
    (check.bound.is_none() || check.measured.is_some()) && check.misses.as_ref().is_none_or(number)
}

/// Judges misses relative to the baseline.
///
/// If references are counted, misses over references are compared with the curve's ratio at the baseline. If they are
/// not, the miss rate is compared with the rate before the move, which is assumed to be the curve's prediction for the
/// old size; a VM whose workload changed is then judged by that. Misses that did not rise with the move are not blamed
/// on it.
fn judge_rise(
    promise: &Promise,
    before: Option<MissCount>,
    after: MissCount,
    bound: f64,
    tolerance: f64,
) -> Judgement {
    let (value, surely, risen) = match (after.references, before) {
        (Some(references), _) if promise.by_ratio => {
            if references < COUNT_MIN {
                return Judgement::unknown(format!(
                    "only {references} references came in {:.0} s",
                    after.seconds
                ));
            }
            let ratio_of = |misses: u64, references: u64| {
                let ratio = misses as f64 / references as f64;
                (
                    ratio,
                    CERTAIN * (ratio * (1.0 - ratio) / references as f64).sqrt(),
                )
            };
            let (ratio, error) = ratio_of(after.misses, references);
            let of_baseline = |ratio: f64| ratio.max(promise.ratio_min) / promise.baseline_ratio;
            let counted = |before: MissCount| {
                let references = before.references.filter(|count| *count >= COUNT_MIN)?;
                Some(ratio_of(before.misses, references))
            };
            let risen = before
                .and_then(counted)
                .map_or(f64::INFINITY, |(was, of_was)| {
                    (ratio - error) / (was + of_was).max(promise.ratio_min)
                });
            (of_baseline(ratio), of_baseline(ratio - error), risen)
        }
        (_, Some(before)) if after.misses >= COUNT_MIN => {
            // One miss, where there was none.
            let was = before.per_second().max(1.0 / before.seconds);
            let risen = at_least_per_second(after) / at_most_per_second(before);
            let factor = promise.before.unwrap_or(1.0);
            (after.per_second() / was * factor, risen * factor, risen)
        }
        (_, Some(before)) if before.misses == 0 && after.misses == 0 => {
            return Judgement::unknown(format!(
                "nothing moved in what is counted in {:.0} s",
                after.seconds
            ));
        }
        (_, _) if after.misses < COUNT_MIN => {
            return Judgement {
                measured: None,
                verdict: Verdict::Kept,
                why: format!("it missed {} times in {:.0} s", after.misses, after.seconds),
            };
        }
        (_, _) => {
            return Judgement::unknown(format!(
                "it missed {} times in {:.0} s, and there is too little data from before the move",
                after.misses, after.seconds
            ));
        }
    };
    let what = format!("measured {value:.2} of the misses at its baseline");
    let (verdict, why) = if surely > bound + tolerance && risen <= 1.0 + tolerance {
        (
            Verdict::Unknown,
            format!("{what}, with a limit of {bound:.2}, but as many before the move"),
        )
    } else if surely > bound + tolerance {
        (
            Verdict::Broken,
            format!("{what}, with a limit of {bound:.2}"),
        )
    } else if value > bound {
        let why =
            format!("{what}: above {bound:.2}, but within the tolerance or too few to be sure");
        (Verdict::Kept, why)
    } else {
        (Verdict::Kept, format!("{what}, within {bound:.2}"))
    };
    Judgement {
        measured: Some(value),
        verdict,
        why,
    }
}

/// Judges misses per second. A VM that was given a size whose prediction exceeds its bound, because its baseline gives
/// no less, is held to the prediction. Misses that did not rise with the move are not blamed on it.
fn judge_number(
    promise: &Promise,
    before: Option<MissCount>,
    after: MissCount,
    most: f64,
    tolerance: f64,
) -> Judgement {
    let text = |value| PredictionUnit::PerSecond.text(value);
    let high = promise.predicted_misses.map_or(0.0, |misses| misses.high);
    let limit = most.max(high) * (1.0 + tolerance);
    let (value, surely) = (after.per_second(), at_least_per_second(after));
    let (what, bound) = (format!("measured {}", text(value)), text(most));
    let (verdict, why) = match before.map(|before| before.per_second()) {
        _ if value <= most => (Verdict::Kept, format!("{what}, within {bound}")),
        _ if surely <= limit && high > most => (
            Verdict::Kept,
            format!(
                "{what}: above {bound}, as predicted: its baseline, or a lower maximum, gives no less"
            ),
        ),
        _ if surely <= limit => (
            Verdict::Kept,
            format!("{what}: above {bound}, but within the tolerance or too few to be sure"),
        ),
        Some(before) if surely <= before * (1.0 + tolerance) => (
            Verdict::Unknown,
            format!(
                "{what}, with a limit of {bound}, but as many before the move: {}",
                text(before)
            ),
        ),
        _ => (Verdict::Broken, format!("{what}, with a limit of {bound}")),
    };
    Judgement {
        measured: Some(value),
        verdict,
        why,
    }
}

/// Misses per second of which the count is certain evidence.
fn at_least_per_second(count: MissCount) -> f64 {
    (count.misses as f64 - CERTAIN * (count.misses as f64).sqrt()) / count.seconds
}

/// The most misses per second that such a count leaves likely, also a count of none (the limit of a Poisson count).
fn at_most_per_second(count: MissCount) -> f64 {
    let root = (count.misses as f64 + 1.0).sqrt() + CERTAIN / 2.0;
    root * root / count.seconds
}

#[cfg(test)]
mod tests {
    use plimsoll_protocol::decision::StepState;

    use super::*;
    use plimsoll_protocol::decision::HoldingView;

    fn promise() -> Promise {
        Promise {
            vm: "web".to_owned(),
            predicted: None,
            before: Some(1.0),
            predicted_misses: None,
            baseline_ratio: 0.2,
            ratio_min: 0.001,
            bound: Bound::on_loss(0.25),
            max_stall: None,
            by_ratio: true,
        }
    }

    fn counted(misses: u64, references: Option<u64>, seconds: f64) -> Option<MissCount> {
        Some(MissCount {
            misses,
            references,
            seconds,
            by: "a count",
        })
    }

    #[test]
    fn a_miss_ratio_is_set_against_that_at_the_baseline() {
        // 0.2 at the baseline: 0.24 is 1.2 times as much, 0.30 is 1.5 times.
        let verdict = |misses| {
            let check = judge(&promise(), None, counted(misses, Some(10_000), 10.0), 0.03);
            (check.verdict, (check.measured.unwrap() * 100.0).round())
        };
        assert_eq!(verdict(2400), (Verdict::Kept, 120.0));
        assert_eq!(verdict(3000), (Verdict::Broken, 150.0));
        // Above the bound, but not by more than the tolerance.
        assert_eq!(verdict(2558), (Verdict::Kept, 128.0));
    }

    #[test]
    fn few_references_accuse_nobody() {
        let check = judge(&promise(), None, counted(18, Some(60), 10.0), 0.0);
        // 0.3 of 60 may as well be 0.18.
        assert_eq!(check.verdict, Verdict::Kept);
        let check = judge(&promise(), None, counted(40, Some(40), 10.0), 0.0);
        assert_eq!((check.verdict, check.measured), (Verdict::Unknown, None));
        let check = judge(&promise(), None, None, 0.0);
        assert_eq!(check.verdict, Verdict::Unknown);
    }

    #[test]
    fn a_rate_is_set_against_the_rate_before() {
        let before = counted(1000, None, 10.0);
        let verdict = |misses| judge(&promise(), before, counted(misses, None, 10.0), 0.03).verdict;
        assert_eq!(verdict(1200), Verdict::Kept);
        assert_eq!(verdict(2000), Verdict::Broken);
        // It began at half of its baseline's misses, so it may double them and more.
        let half = Promise {
            before: Some(0.5),
            ..promise()
        };
        let check = judge(&half, before, counted(2000, None, 10.0), 0.03);
        assert_eq!((check.verdict, check.measured), (Verdict::Kept, Some(1.0)));
        // Nearly no misses before: few after are harmless, many are significant.
        let idle = counted(3, None, 10.0);
        let verdict = |misses| judge(&promise(), idle, counted(misses, None, 10.0), 0.03).verdict;
        assert_eq!(verdict(20), Verdict::Kept);
        assert_eq!(verdict(500), Verdict::Broken);
        let none = counted(0, None, 10.0);
        let verdict = |misses| judge(&promise(), none, counted(misses, None, 10.0), 0.03).verdict;
        assert_eq!(
            (verdict(49), verdict(50_000)),
            (Verdict::Kept, Verdict::Broken)
        );
        // A counter that does not change is no evidence.
        let still = counted(0, None, 10.0);
        let check = judge(&promise(), still, still, 0.0);
        assert_eq!(check.verdict, Verdict::Unknown);
        // References that the curve does not cover are no measure of it.
        let traps = Promise {
            by_ratio: false,
            ..promise()
        };
        let before = counted(900, Some(1000), 10.0);
        let check = judge(&traps, before, counted(950, Some(1000), 10.0), 0.03);
        assert_eq!(check.verdict, Verdict::Kept, "{check:?}");
    }

    #[test]
    fn as_many_misses_as_before_the_move_are_not_blamed_on_it() {
        let over = Promise {
            before: Some(1.4),
            ..promise()
        };
        let before = counted(10_000, None, 10.0);
        let verdict = |misses| judge(&over, before, counted(misses, None, 10.0), 0.03).verdict;
        assert_eq!(verdict(10_000), Verdict::Unknown);
        assert_eq!(verdict(15_000), Verdict::Broken);
        let before = counted(3000, Some(10_000), 10.0);
        let verdict = |misses| {
            let after = counted(misses, Some(10_000), 10.0);
            judge(&promise(), before, after, 0.03).verdict
        };
        assert_eq!(verdict(3000), Verdict::Unknown);
        assert_eq!(verdict(6000), Verdict::Broken);
    }

    #[test]
    fn a_ratio_of_disk_reads_says_nothing_about_memory_of_the_vms_own() {
        let had = HoldingView {
            direct_bytes: 512 << 20,
            cache_bytes: 64 << 20,
        };
        let step = |now| Step {
            vm: "web".to_owned(),
            from: had,
            to: now,
            now,
            state: StepState::Done,
            error: None,
        };
        let after = |now| promise().after(Some(&step(now))).by_ratio;
        let less_cache = HoldingView {
            cache_bytes: 4 << 20,
            ..had
        };
        let less_memory = HoldingView {
            direct_bytes: 128 << 20,
            ..had
        };
        assert_eq!((after(less_cache), after(less_memory)), (true, false));
        // A fifth were hits; ten times as many reads, of which hardly any is one, are 1.2 times the ratio.
        let before = counted(800, Some(1000), 10.0);
        let judged = |promise: &Promise| {
            let promise = Promise {
                baseline_ratio: 0.8,
                ..promise.clone()
            };
            judge(&promise, before, counted(9600, Some(10_000), 10.0), 0.03).verdict
        };
        assert_eq!(judged(&promise()), Verdict::Kept);
        let by_rate = promise().after(Some(&step(less_memory)));
        assert_eq!(judged(&by_rate), Verdict::Broken);
    }

    #[test]
    fn misses_per_second_are_set_against_their_bound() {
        let absolute = |predicted: Option<f64>| Promise {
            bound: Bound {
                max_loss: None,
                max_misses_per_second: Some(20.0),
            },
            predicted_misses: predicted.map(|high| MissesPerSecond {
                expected: 0.9 * high,
                low: 0.0,
                high,
            }),
            ..promise()
        };
        let verdict = |predicted, before, after| {
            let (before, after) = (counted(before, None, 10.0), counted(after, None, 10.0));
            let check = judge(&absolute(predicted), before, after, 0.03);
            assert_eq!((check.measured, check.bound), (None, None));
            check.verdict
        };
        assert_eq!(verdict(Some(15.0), 1, 190), Verdict::Kept);
        // Ten times as many misses as before, and within what it is promised.
        assert_eq!(verdict(None, 10, 199), Verdict::Kept);
        assert_eq!(verdict(Some(15.0), 10, 400), Verdict::Broken);
        // 22 per second may as well be 20.
        assert_eq!(verdict(Some(15.0), 10, 220), Verdict::Kept);
        // Its baseline itself gives 50 per second.
        assert_eq!(verdict(Some(50.0), 10, 480), Verdict::Kept);
        assert_eq!(verdict(Some(50.0), 10, 700), Verdict::Broken);
        // It missed as often before.
        assert_eq!(verdict(Some(15.0), 400, 410), Verdict::Unknown);
        let check = judge(&absolute(Some(15.0)), None, counted(400, None, 10.0), 0.03);
        let misses = check.misses.unwrap();
        assert_eq!(
            (misses.measured_per_second, misses.bound_per_second),
            (Some(40.0), 20.0)
        );
        assert_eq!(check.why, "measured 40.0/s, with a limit of 20.0/s");
    }

    #[test]
    fn a_vm_whose_qemu_waits_for_memory_since_it_gave_some_is_not_kept() {
        let kept = || judge(&promise(), None, counted(2000, Some(10_000), 10.0), 0.03);
        let verdict = |before, measured| {
            let check = guard(kept(), before, measured, 0.05, 0.03);
            let stall = check.stall.unwrap();
            assert_eq!(
                (stall.before_ratio, stall.measured_ratio),
                (before, measured)
            );
            check.verdict
        };
        assert_eq!(verdict(Some(0.0), 0.05), Verdict::Kept);
        assert_eq!(verdict(Some(0.0), 0.06), Verdict::Broken);
        assert_eq!(verdict(None, 0.06), Verdict::Broken);
        assert_eq!(verdict(Some(0.06), 0.06), Verdict::Unknown);
        assert_eq!(verdict(Some(0.06), 0.5), Verdict::Broken);
        let why = guard(kept(), Some(0.0), 0.125, 0.01, 0.03).why;
        let expected =
            "; its QEMU waited for memory of the host in 12.5 % of the time, with a limit of 1.0 %";
        assert!(why.ends_with(expected), "{why}");
    }

    #[test]
    fn a_vm_that_is_promised_both_bounds_keeps_both() {
        let both = Promise {
            bound: Bound {
                max_misses_per_second: Some(20.0),
                ..promise().bound
            },
            ..promise()
        };
        let verdict = |misses, references| {
            let after = counted(misses, Some(references), 100.0);
            judge(&both, None, after, 0.03).verdict
        };
        assert_eq!(verdict(1900, 9500), Verdict::Kept);
        assert_eq!(verdict(1900, 5000), Verdict::Broken);
        assert_eq!(verdict(3000, 15_000), Verdict::Broken);
    }
}
