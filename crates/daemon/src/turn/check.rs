//! The check after a move: measured misses compared with predicted ones and with each VM's limit.

use std::time::Instant;

use plimsoll_protocol::decision::{Check, Initiator, Mode, Phase, State, Step, StepState, Verdict};
use plimsoll_protocol::vm::Relative;

use super::{BACK_OFF_MAX, TICK, Turns};
use crate::config::Workflow;
use crate::host::Host;
use crate::vm::MissCount;

/// Minimum references, or misses if references are not counted, for a statistical statement.
const COUNT_MIN: u64 = 50;
/// Number of standard errors by which a measurement must exceed its bound to count as a violation.
const CERTAIN: f64 = 2.0;

/// Limit and prediction of a VM.
#[derive(Debug, Clone, PartialEq)]
pub struct Promise {
    /// The VM.
    pub vm: String,
    /// Misses at its new size relative to those at the baseline.
    pub predicted: Option<Relative>,
    /// The same at its size before.
    pub before: Option<f64>,
    /// Predicted share of references that miss at the baseline; not below the minimum of the rules.
    pub baseline_ratio: f64,
    /// Minimum miss ratio distinguished from zero.
    pub ratio_min: f64,
    /// Bound on the rise over the baseline.
    pub max_loss: f64,
    /// Whether the curve covers the references that are counted, as a disk's does. A curve from traps covers others, so
    /// that only the rates before and after can be compared.
    pub by_ratio: bool,
}

/// Compares the counts after a move with those `before` it.
///
/// If references are counted, misses over references are compared with the curve's ratio at the baseline. If they are
/// not, the miss rate is compared with the rate before the move, which is assumed to be the curve's prediction for the
/// old size; a VM whose workload changed is then judged by that. `tolerance` is how far above its bound a VM may be.
#[must_use]
pub fn judge(
    promise: &Promise,
    before: Option<MissCount>,
    after: Option<MissCount>,
    tolerance: f64,
) -> Check {
    let bound = 1.0 + promise.max_loss;
    let check = |measured, by: &str, verdict, why: String| Check {
        vm: promise.vm.clone(),
        predicted: promise.predicted,
        measured,
        by: by.to_owned(),
        bound,
        verdict,
        why,
    };
    let Some(after) = after.filter(|after| after.seconds > 0.0) else {
        let why = "nothing counts its misses";
        return check(None, "nothing", Verdict::Unknown, why.to_owned());
    };
    let by = after.by;
    let measured = match (after.references, before) {
        (Some(references), _) if promise.by_ratio => {
            if references < COUNT_MIN {
                let why = format!(
                    "only {references} references came in {:.0} s",
                    after.seconds
                );
                return check(None, by, Verdict::Unknown, why);
            }
            let ratio = after.misses as f64 / references as f64;
            let error = (ratio * (1.0 - ratio) / references as f64).sqrt();
            let of_baseline = |ratio: f64| ratio.max(promise.ratio_min) / promise.baseline_ratio;
            (of_baseline(ratio), of_baseline(ratio - CERTAIN * error))
        }
        (_, Some(before)) if before.seconds > 0.0 && before.misses >= COUNT_MIN => {
            let old = before.misses as f64 / before.seconds;
            let new = after.misses as f64 / after.seconds;
            let factor = promise.before.unwrap_or(1.0) / old;
            let error = (after.misses as f64).sqrt() / after.seconds;
            (new * factor, (new - CERTAIN * error) * factor)
        }
        (_, Some(before)) if before.misses == 0 && after.misses == 0 => {
            let why = format!("nothing moved in what is counted in {:.0} s", after.seconds);
            return check(None, by, Verdict::Unknown, why);
        }
        (_, _) if after.misses < COUNT_MIN => {
            let why = format!("it missed {} times in {:.0} s", after.misses, after.seconds);
            return check(None, by, Verdict::Kept, why);
        }
        (_, _) => {
            let why = format!(
                "it missed {} times in {:.0} s, and there is too little data from before the move",
                after.misses, after.seconds
            );
            return check(None, by, Verdict::Unknown, why);
        }
    };
    let (value, surely) = measured;
    if surely > bound + tolerance {
        let why = format!(
            "measured {value:.2} of the misses at its baseline, with a limit of {bound:.2}"
        );
        check(Some(value), by, Verdict::Broken, why)
    } else {
        let why = format!("measured {value:.2} of the misses at its baseline, within {bound:.2}");
        let why = if value > bound {
            format!(
                "measured {value:.2} of the misses at its baseline: above {bound:.2}, but within the tolerance or too few to be sure"
            )
        } else {
            why
        };
        check(Some(value), by, Verdict::Kept, why)
    }
}

impl<H: Host> Turns<H> {
    /// Judges an allocation by the measurements since.
    pub(super) fn check(&mut self, since: Instant, now: Instant) {
        let Some(mut active) = self.active.take() else {
            return;
        };
        // At least two counts: they come with the turns.
        let length = now
            .duration_since(since)
            .max(self.config.turn_interval * 2 + TICK);
        let before = active.began.checked_sub(length).unwrap_or(active.began);
        let checks: Vec<Check> = active
            .promises
            .iter()
            .filter_map(|promise| {
                let vm = self.vms.get(&promise.vm)?;
                Some(judge(
                    promise,
                    vm.misses_between(before, active.began),
                    vm.misses_between(since, now),
                    self.config.tolerance,
                ))
            })
            .collect();
        let mut broken = Vec::new();
        for check in &checks {
            let told = (check.verdict == Verdict::Broken).then(|| check.why.clone());
            if let Some(why) = &told {
                tracing::warn!(decision = active.decision.id, vm = check.vm, "{why}");
                broken.push(format!("{}: {why}", check.vm));
            }
            if let Some(vm) = self.vms.get_mut(&check.vm) {
                vm.broken = told;
            }
        }
        active.decision.checks = checks;
        let moved = |step: &Step| step.state == StepState::Done;
        let all = active.decision.steps.iter().all(moved);
        if broken.is_empty() {
            self.taken_back = 0;
            self.cooldown_until = Some(now + self.config.cooldown);
            let state = if all { State::Kept } else { State::Partly };
            let by_policy = active.decision.inputs.is_some();
            self.end(active.decision, state, None);
            self.back_store();
            self.after_check(by_policy, now);
            return;
        }
        self.taken_back = (self.taken_back + 1).min(BACK_OFF_MAX);
        self.cooldown_until = Some(now + self.config.cooldown * 2_u32.pow(self.taken_back));
        let why = format!(
            " A VM exceeded its limit, so the move is rolled back: {}.",
            broken.join("; ")
        );
        if self.paused || (self.config.mode != Mode::Act && active.decision.by == Initiator::Daemon)
        {
            let why = format!(
                "{why} It stays until somebody rolls it back: the daemon does not act now."
            );
            let by_policy = active.decision.inputs.is_some();
            self.end(active.decision, State::Stopped, Some(&why));
            self.after_check(by_policy, now);
            return;
        }
        let id = active.decision.id;
        let pending = self.rollback_move(&active.decision, "Its check found a promise broken.");
        self.end(active.decision, State::RolledBack, Some(&why));
        if let Some(pending) = pending {
            self.begin(pending, Initiator::Daemon, None, now);
            self.mark_taken_back(id);
        }
    }

    /// The phase that follows a check; a move without a policy decision leaves it to be derived from the caches' sizes.
    pub(super) fn after_check(&mut self, by_policy: bool, now: Instant) {
        let Workflow::Cache { keep, .. } = self.config.workflow else {
            return;
        };
        if !by_policy {
            let phase = self.phase_by_holdings();
            self.enter(phase, now);
            return;
        }
        self.enter(Phase::Tracing, now);
        if keep || self.paused {
            return;
        }
        let why = "The division is done, so the caches' memory goes back to the VMs.";
        if let Some(pending) = self.give_back(why) {
            if self.config.mode == Mode::Act {
                self.begin(pending, Initiator::Daemon, None, now);
            } else {
                self.propose(Some(pending));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn promise() -> Promise {
        Promise {
            vm: "web".to_owned(),
            predicted: None,
            before: Some(1.0),
            baseline_ratio: 0.2,
            ratio_min: 0.001,
            max_loss: 0.25,
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
        assert_eq!(verdict(500), Verdict::Unknown);
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
}
