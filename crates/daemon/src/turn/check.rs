//! The check after a move: misses and stalls since then, the verdict, and a rollback if a promise was broken.

use std::time::{Duration, Instant};

use plimsoll_protocol::decision::{Check, Initiator, Mode, Phase, State, Step, StepState, Verdict};

use super::discover::poll_now;
use super::{ActiveDecision, Stage, TICK, Turns};
use crate::config::Workflow;
use crate::host::Host;
use crate::judgement::{Promise, guard, is_measured, judge};
use crate::vm::{UncheckedPromise, Vm};

/// Share of the time in which a thread of a VM's QEMU may wait for memory of the host after it gave some, if the VM is
/// promised no `max_stall`.
const STALL_MAX: f64 = 0.05;

/// The part of a move by which a VM gave memory that a rollback would return to it.
fn gave<'a>(steps: &'a [Step], vm: &Vm) -> Option<&'a Step> {
    let settings = vm.settings();
    let most = settings.max_bytes.max(settings.min_bytes);
    steps.iter().find(|step| {
        step.vm == vm.found.vm && step.now.size_bytes() < step.from.size_bytes().min(most)
    })
}

/// The check of a VM by what was counted and felt in the time `before` a move and the time `after` it. A move from
/// which the VM has no less memory is not blamed for its misses.
fn checked(
    promise: &Promise,
    vm: &Vm,
    steps: &[Step],
    before: [Instant; 2],
    after: [Instant; 2],
    tolerance: f64,
) -> Check {
    let [counted_before, counted] =
        [before, after].map(|[from, until]| vm.misses_between(from, until));
    let step = steps.iter().find(|step| step.vm == promise.vm);
    let promise = promise.after(step);
    let mut check = judge(&promise, counted_before, counted, tolerance);
    if gave(steps, vm).is_none() {
        if check.verdict == Verdict::Broken {
            check.verdict = Verdict::Unknown;
            check.why += ", but the move took nothing from it that it may have";
        }
        return check;
    }
    let [felt_before, felt] = [before, after].map(|[from, until]| vm.stalled_between(from, until));
    match felt {
        Some(felt) => {
            let bound = promise.max_stall.unwrap_or(STALL_MAX);
            guard(check, felt_before, felt, bound, tolerance)
        }
        None => check,
    }
}
impl<H: Host> Turns<H> {
    /// Counts misses after a move, and judges the move once there is enough to judge it by. A VM that gained nothing has
    /// nothing to fill: it is judged also while the others still fill.
    pub(super) fn measure(&mut self, now: Instant) {
        let Some(active) = &mut self.active else {
            return;
        };
        let Stage::Checking(warm_up) = &mut active.stage else {
            return;
        };
        let promised = |name: &str| active.promises.iter().any(|promise| promise.vm == name);
        let vms = self.vms.iter_mut();
        let mut vms: Vec<_> = vms
            .filter_map(|(name, vm)| promised(name).then_some(vm))
            .collect();
        poll_now(vms.iter_mut().map(|vm| &mut **vm));
        for vm in vms {
            vm.count(now);
            vm.feel(self.host.pressure_of(&vm.found), now);
        }
        let after = self.config.check_after;
        let (began, moved) = (active.began, warm_up.moved);
        if let Some(since) = warm_up.ended(&self.vms, after, now) {
            if now.duration_since(since) >= after {
                active.decision.reason.push_str(&warm_up.text());
                self.check(since, now);
            }
        } else if warm_up.is_due(after, now) {
            let before = began
                .checked_sub(now.duration_since(moved))
                .unwrap_or(began);
            let broken = active.promises.iter().any(|promise| {
                !warm_up.involves(&promise.vm)
                    && self.vms.get(&promise.vm).is_some_and(|vm| {
                        let steps = &active.decision.steps;
                        let (before, after) = ([before, began], [moved, now]);
                        let tolerance = self.config.tolerance;
                        checked(promise, vm, steps, before, after, tolerance).verdict
                            == Verdict::Broken
                    })
            });
            if broken {
                self.check(moved, now);
            }
        }
    }

    /// Judges an allocation by the measurements since.
    pub(super) fn check(&mut self, since: Instant, now: Instant) {
        let Some(mut active) = self.active.take() else {
            return;
        };
        let after = now.duration_since(since);
        let length = self.before_length(after);
        let before = active.began.checked_sub(length).unwrap_or(active.began);
        let checks: Vec<Check> = active
            .promises
            .iter()
            .filter_map(|promise| {
                let vm = self.vms.get(&promise.vm)?;
                Some(checked(
                    promise,
                    vm,
                    &active.decision.steps,
                    [before, active.began],
                    [since, now],
                    self.config.tolerance,
                ))
            })
            .collect();
        self.leave_unchecked(&active, Some(now));
        let mut broken = Vec::new();
        for check in &checks {
            let told = (check.verdict == Verdict::Broken).then(|| check.why.clone());
            if let Some(why) = &told {
                tracing::warn!(decision = active.decision.id, vm = check.vm, "{why}");
                broken.push(format!("{}: {why}", check.vm));
            }
            let Some(vm) = self.vms.get_mut(&check.vm) else {
                continue;
            };
            if told.is_some() {
                // The rollback may get nothing: its promise remains unchecked.
                vm.spare(self.config.cooldown, now);
            } else if is_measured(check, after) && gave(&active.decision.steps, vm).is_some() {
                if check.verdict == Verdict::Kept {
                    vm.keeps_promise();
                }
                vm.unchecked = None;
            }
            vm.broken = told;
        }
        active.decision.checks = checks;
        let moved = |step: &Step| step.state == StepState::Done;
        let all = active.decision.steps.iter().all(moved);
        self.cooldown_until = Some(now + self.config.cooldown);
        if broken.is_empty() {
            let state = if all { State::Kept } else { State::Partly };
            let by_policy = active.decision.inputs.is_some();
            self.end(active.decision, state, None);
            self.back_store();
            self.after_check(by_policy, now);
            return;
        }
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

    /// Remembers the promises to VMs whose own memory a decision took, before its check or without one; misses count from
    /// `since`, or from their last count.
    pub(super) fn leave_unchecked(&mut self, active: &ActiveDecision, since: Option<Instant>) {
        let length = self.before_length(Duration::ZERO);
        let before = active.began.checked_sub(length).unwrap_or(active.began);
        for promise in &active.promises {
            let Some(vm) = self.vms.get_mut(&promise.vm) else {
                continue;
            };
            let Some(step) = gave(&active.decision.steps, vm) else {
                continue;
            };
            if step.now.direct_bytes < step.from.direct_bytes {
                let since = since.or(vm.counted_at()).unwrap_or(active.began);
                let latest = UncheckedPromise {
                    promise: promise.after(Some(step)),
                    step: step.clone(),
                    before: vm.misses_between(before, active.began),
                    since,
                };
                // What an earlier move took and nobody could judge is owed as well, by what was counted before that.
                vm.unchecked = Some(match vm.unchecked.take() {
                    Some(earlier) => latest.after(&earlier),
                    None => latest,
                });
            }
        }
    }

    /// Length of the time before a move with which a measurement of this length is compared: at least two counts, which
    /// come with the turns.
    fn before_length(&self, after: Duration) -> Duration {
        let turns = self.config.turn_interval * 2 + TICK;
        after.max(turns).max(self.config.check_after)
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
        let why = "The reallocation is complete, so the caches' memory goes back to the VMs.";
        if let Some(pending) = self.give_back(why) {
            if self.config.mode == Mode::Act {
                self.begin(pending, Initiator::Daemon, None, now);
            } else {
                self.propose(Some(pending));
            }
        }
    }
}
