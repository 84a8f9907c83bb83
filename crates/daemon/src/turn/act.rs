//! Carrying a decision out: a move begins, advances with every tick, ends, stops or is rolled back.

use std::collections::BTreeMap;
use std::time::Instant;

use plimsoll_actuator::{ActuatorError, Holding, Progress};
use plimsoll_output::exit::with_causes;
use plimsoll_protocol::decision::{Decision, Initiator, Kind, Phase, State, Step, StepState};
use plimsoll_protocol::request::Event;

use super::discover::poll_now;
use super::{
    ActiveDecision, CACHE_LEAST_BYTES, PendingMove, SAME_BYTES, STORE, Stage, Turns, WarmUp,
};
use crate::history::ResizeMark;
use crate::host::Host;
use crate::moves::{self, Move, MoveProgress, REQUESTS_MAX};
use crate::vm::Vm;

/// Change of a VM's size that is kept while it goes on.
const STEP_KEPT_BYTES: u64 = 32 << 20;

/// How a move is stopped: [`Move::stop`] or [`Move::leave`].
type StopWay = fn(&mut Move, &mut BTreeMap<String, moves::MovableVm<'_>>, &mut dyn FnMut());

fn sizes_now(steps: &[Step]) -> Vec<u64> {
    steps.iter().map(|step| step.now.size_bytes()).collect()
}

impl<H: Host> Turns<H> {
    /// Begins a move; a proposal that it carries out keeps its number.
    pub(super) fn begin(
        &mut self,
        pending: PendingMove,
        by: Initiator,
        proposed: Option<Decision>,
        now: Instant,
    ) {
        let mut decision = match proposed {
            Some(proposed) => proposed,
            None => self.decision(&pending, by, State::Moving),
        };
        if self
            .proposal
            .as_ref()
            .is_some_and(|(of, _)| of.id != decision.id)
        {
            self.withdraw();
        }
        self.proposal = None;
        self.has_moved = true;
        decision.state = State::Moving;
        decision.by = by;
        self.forget_earlier_targets(&pending.moves);
        let under_way = Move::begin(pending.moves.clone(), now);
        decision.steps = under_way.steps();
        tracing::info!(decision = decision.id, kind = ?decision.kind, "memory is moved: {}", decision.reason);
        self.mark_resized(&pending.moves);
        for (name, _, to) in &pending.moves {
            if let Some(vm) = self.vms.get_mut(name) {
                vm.target_bytes = Some(to.bytes());
            }
        }
        if self.is_cached() {
            self.enter(
                match pending.kind {
                    Kind::IntoCaches => Phase::Shrinking,
                    Kind::GiveBack => Phase::GivingBack,
                    Kind::Divide | Kind::Rollback => Phase::Moving,
                },
                now,
            );
        }
        self.keep(&decision);
        self.shared.tell(Event::Decision { id: decision.id });
        let kept_sizes = sizes_now(&decision.steps);
        self.active = Some(ActiveDecision {
            decision,
            promises: pending.promises,
            stage: Stage::Moving(under_way),
            kept_sizes,
            began: now,
        });
        self.advance(now);
    }

    /// Stores that VMs are about to be resized; returns what was stored before of those of which that is something else.
    pub(super) fn mark_resized(
        &self,
        moves: &[(String, Holding, Holding)],
    ) -> Vec<(String, ResizeMark)> {
        let mut earlier = Vec::new();
        for (name, from, to) in moves {
            let Some(vm) = self.vms.get(name) else {
                continue;
            };
            let before = self.history.mark(name);
            let mark = before.next(vm.found.process(), vm.first_bytes, *from, *to);
            if mark != before {
                let _ = self.history.put_mark(name, mark);
                earlier.push((name.clone(), before));
            }
        }
        earlier
    }

    /// Sets targets to the present size: of balloons that have had no command since this daemon began, and of balloons and
    /// caches whose last one may not have arrived, so that nothing follows them unnoticed or stays reserved for them; and
    /// of the VMs of a move that still follow an earlier one. What has not answered may have changed, and is left alone.
    pub(super) fn forget_earlier_targets(&mut self, parts: &[(String, Holding, Holding)]) {
        let mut vms = Vec::new();
        for (name, vm) in &mut self.vms {
            let direct = &vm.status.direct;
            let untold = matches!(direct.progress, Progress::NoTarget);
            let follows = direct.target_bytes != Some(direct.actual_bytes)
                && parts.iter().any(|(vm, ..)| vm == name);
            let is_old = (untold || direct.in_doubt || follows) && vm.is_resizable();
            let cache = vm.status.cache.as_ref();
            let in_doubt = cache.is_some_and(|cache| cache.in_doubt);
            if (is_old || in_doubt) && vm.settings().managed && vm.is_known() {
                vms.push((name, vm, is_old, in_doubt));
            }
        }
        poll_now(vms.iter_mut().map(|(_, vm, ..)| &mut **vm));
        let until = Instant::now() + REQUESTS_MAX;
        for (name, vm, is_old, in_doubt) in &mut vms {
            // What is left is reset before the next move.
            if Instant::now() >= until {
                break;
            }
            let (direct, cache) = (vm.status.direct, vm.status.cache);
            let mut failures = Vec::new();
            if *is_old && moves::is_fresh(&direct) {
                failures.extend(vm.actuator.set_direct(direct.actual_bytes).err());
            }
            if let Some(cache) = cache.filter(|cache| *in_doubt && moves::is_fresh(cache)) {
                failures.extend(vm.actuator.set_cache(cache.actual_bytes).err());
            }
            // A resize of a cache that goes on is no failure.
            failures.retain(|failure| !matches!(failure, ActuatorError::Busy { .. }));
            for failure in failures {
                tracing::warn!(vm = *name, "{}", with_causes(&failure));
            }
            (self.progress)();
        }
        poll_now(vms.into_iter().map(|(_, vm, ..)| vm));
    }

    /// Advances a move in progress by one tick.
    pub(super) fn advance(&mut self, now: Instant) {
        let divided = self.granted_bytes().saturating_sub(self.store_bytes);
        let why_withheld = self.why_withheld();
        let Some(active) = &mut self.active else {
            return;
        };
        match &mut active.stage {
            Stage::Moving(under_way) => {
                under_way.why_withheld = why_withheld;
                let vms = self.vms.iter_mut();
                poll_now(vms.filter_map(|(name, vm)| under_way.polls(name).then_some(vm)));
                let mut held = held(&mut self.vms);
                let progressed = under_way.advance(&mut held, divided, now, &mut self.progress);
                drop(held);
                let steps = under_way.steps();
                let sizes = sizes_now(&steps);
                let moved = |(kept, now): (&u64, &u64)| kept.abs_diff(*now) >= STEP_KEPT_BYTES;
                let changed = active
                    .decision
                    .steps
                    .iter()
                    .map(|step| &step.state)
                    .ne(steps.iter().map(|step| &step.state))
                    || active.kept_sizes.iter().zip(&sizes).any(moved);
                if changed {
                    active.kept_sizes = sizes;
                }
                active.decision.steps = steps;
                let told = changed.then(|| active.decision.clone());
                if let Some(decision) = told {
                    self.keep(&decision);
                    self.shared.tell(Event::Decision { id: decision.id });
                }
                if progressed != MoveProgress::InProgress {
                    self.moved(progressed, now);
                }
            }
            Stage::Checking(_) => self.measure(now),
        }
    }

    /// Handles the end of a move.
    pub(super) fn moved(&mut self, progressed: MoveProgress, now: Instant) {
        let Some(mut active) = self.active.take() else {
            return;
        };
        // Counts of misses begin here: a part that ended before was not polled since.
        let takes_part = |name: &str| active.decision.steps.iter().any(|step| step.vm == name);
        let vms = self.vms.iter_mut();
        poll_now(vms.filter_map(|(name, vm)| takes_part(name).then_some(vm)));
        for step in &active.decision.steps {
            if let Some(vm) = self.vms.get_mut(&step.vm) {
                vm.target_bytes = None;
                vm.count(now);
                if active.decision.kind != Kind::Divide {
                    vm.moved();
                }
                if step.state == StepState::Short {
                    vm.spare(self.config.cooldown, now);
                }
            }
            if let Some(error) = &step.error {
                tracing::warn!(decision = active.decision.id, vm = step.vm, "{error}");
            }
        }
        let partly = progressed == MoveProgress::Partly;
        if active.decision.kind == Kind::Divide && !active.promises.is_empty() {
            active.decision.state = State::Checking;
            if partly {
                active.decision.reason.push_str(" Some VMs could not be resized as decided; memory that they did not free was not given to others.");
            }
            if self.is_cached() {
                self.enter(Phase::Checking, now);
            }
            self.keep(&active.decision);
            self.shared.tell(Event::Decision {
                id: active.decision.id,
            });
            active.stage = Stage::Checking(WarmUp::begin(&active.decision.steps, &self.vms, now));
            self.active = Some(active);
            return;
        }
        // Memory that goes back to VMs is not lent anew.
        if active.decision.kind != Kind::GiveBack {
            self.back_store();
        }
        let state = if partly { State::Partly } else { State::Kept };
        if self.is_cached() {
            let phase = self.phase_by_holdings();
            self.enter(phase, now);
            if phase == Phase::Whole {
                self.gave_back = Some(now);
            }
        }
        if active.decision.kind == Kind::Rollback {
            // What did not get its memory back still has what was too little.
            let done = |step: &&Step| step.state == StepState::Done;
            for step in active.decision.steps.iter().filter(done) {
                if let Some(vm) = self.vms.get_mut(&step.vm) {
                    vm.broken = None;
                }
            }
        }
        if active.decision.kind == Kind::Divide {
            self.cooldown_until = Some(now + self.config.cooldown);
        }
        self.end(active.decision, state, None);
    }

    /// Adds the memory released by self-ballooning VMs to the page store, once a check found that they can do without
    /// it.
    pub(super) fn back_store(&mut self) {
        let Some(first) = self.store_first_bytes else {
            return;
        };
        let given: u64 = self
            .vms
            .values()
            .filter(|vm| vm.rule.self_balloon == Some(true))
            .map(|vm| {
                // What it has, and what it is about to get back.
                let its = vm.reserved_bytes();
                let its = its.max(self.self_balloon_wants(vm).unwrap_or(0));
                vm.settings().baseline_bytes.saturating_sub(its)
            })
            .fold(0, u64::saturating_add);
        let reserved = self.counted_vms().map(Vm::reserved_bytes);
        let reserved = reserved.fold(0, u64::saturating_add);
        // What others have got meanwhile, or the host lacks, is not lent as well.
        let free = self.granted_bytes().saturating_sub(reserved);
        let capacity = first.saturating_add(given);
        let capacity = capacity.min(free.max(self.store_bytes));
        if capacity.abs_diff(self.store_bytes) < SAME_BYTES {
            return;
        }
        let _ = self
            .history
            .put_cache(STORE, capacity.max(self.store_bytes));
        self.resize_store(capacity);
    }

    pub(super) fn resize_store(&mut self, capacity_bytes: u64) {
        match self.host.resize_store(capacity_bytes) {
            Ok(()) => self.store_bytes = self.store_bytes.max(capacity_bytes),
            Err(error) => self.warnings.push(format!(
                "the page store keeps its size: {}",
                with_causes(&error)
            )),
        }
    }

    pub(super) fn mark_taken_back(&mut self, id: u64) {
        let by = self.active.as_ref().map(|active| active.decision.id);
        if let Some(mut decision) = self.history.decision(id) {
            decision.taken_back_by = by;
            self.keep(&decision);
        }
    }

    pub(super) fn end(&mut self, mut decision: Decision, state: State, why: Option<&str>) {
        decision.state = state;
        decision.ended_unix_ms = Some(self.unix_ms());
        decision.reason.push_str(why.unwrap_or_default());
        tracing::info!(decision = decision.id, state = ?state, "a decision has ended");
        self.keep(&decision);
        // Who waited for it sees that nothing is in progress, and what VMs have.
        self.publish();
        self.shared.tell(Event::Decision { id: decision.id });
    }

    /// A move back to the sizes before a decision; `None` if there is nothing to move.
    pub(super) fn rollback_move(&self, decision: &Decision, why: &str) -> Option<PendingMove> {
        let moves: Vec<_> = decision
            .steps
            .iter()
            .filter_map(|step| {
                let vm = self.vms.get(&step.vm)?;
                let settings = vm.settings();
                if !settings.managed {
                    return None;
                }
                let from = vm.status.holding();
                // Guarantees given since then hold.
                let most = settings
                    .max_bytes
                    .min(self.most(vm))
                    .max(settings.min_bytes);
                let size = step.from.size_bytes().clamp(settings.min_bytes, most);
                let to = match decision.kind {
                    // Sizes are rolled back; how they are split depends on the phase.
                    Kind::Divide => self.split(vm, size),
                    _ if size != step.from.size_bytes() => self.split(vm, size),
                    _ => Holding {
                        direct_bytes: step.from.direct_bytes,
                        cache_bytes: step.from.cache_bytes,
                    },
                };
                // What its balloon takes does not come back to the host.
                let to = match vm.is_resizable() {
                    true => to,
                    false => Holding {
                        direct_bytes: to.direct_bytes.max(from.direct_bytes),
                        ..to
                    },
                };
                let same = to.direct_bytes.abs_diff(from.direct_bytes) < SAME_BYTES
                    && to.cache_bytes.abs_diff(from.cache_bytes) < SAME_BYTES;
                (!same).then(|| (step.vm.clone(), from, to))
            })
            .collect();
        let reason = format!("Decision {} is rolled back. {why}", decision.id);
        (!moves.is_empty()).then(|| PendingMove {
            takes_back: Some(decision.id),
            ..PendingMove::new(Kind::Rollback, moves, reason)
        })
    }

    /// The phase is `Whole` if no cache holds more than its minimum.
    pub(super) fn phase_by_holdings(&self) -> Phase {
        let empty = |vm: &Vm| vm.status.holding().cache_bytes <= CACHE_LEAST_BYTES;
        if self
            .vms
            .values()
            .filter(|vm| vm.can_be_divided())
            .all(empty)
        {
            Phase::Whole
        } else {
            Phase::Tracing
        }
    }

    /// Stops a move where it is; a check is abandoned.
    pub(super) fn stop(&mut self, why: &str) {
        self.stop_by(Move::stop, &format!("{why}; what was moved stays."));
    }

    /// Stops a move by `way`, for this reason.
    pub(super) fn stop_by(&mut self, way: StopWay, why: &str) {
        let Some(mut active) = self.active.take() else {
            return;
        };
        if let Stage::Moving(under_way) = &mut active.stage {
            way(under_way, &mut held(&mut self.vms), &mut self.progress);
            active.decision.steps = under_way.steps();
        }
        self.leave_unchecked(&active, None);
        for vm in self.vms.values_mut() {
            vm.target_bytes = None;
        }
        if self.is_cached() {
            let phase = self.phase_by_holdings();
            self.enter(phase, Instant::now());
        }
        self.end(active.decision, State::Stopped, Some(&format!(" {why}")));
    }

    pub(super) fn shut_down(&mut self) {
        self.stop("The daemon was shut down");
        if self.config.gives_back_on_exit {
            self.return_memory();
        }
        self.want_statistics(false);
        self.keep_last_curves(self.vms.iter());
        let _ = self.history.flush();
    }
}

impl<H: Host> Turns<H> {
    /// Enables guest statistics, or restores the earlier setting. VMs are queried concurrently: a monitor may hang.
    pub(super) fn want_statistics(&mut self, wanted: bool) {
        std::thread::scope(|scope| {
            for vm in self.vms.values_mut() {
                scope.spawn(move || {
                    if let Err(error) = vm.actuator.want_statistics(wanted) {
                        tracing::warn!(vm = vm.found.vm, "{}", with_causes(&error));
                    }
                });
            }
        });
        self.keep_balloons();
    }
}

/// The actuators that a move may use.
pub(super) fn held(vms: &mut BTreeMap<String, Vm>) -> BTreeMap<String, moves::MovableVm<'_>> {
    let counted = vms.iter_mut().filter(|(_, vm)| vm.is_counted);
    let held = counted.map(|(name, vm)| {
        let held = moves::MovableVm {
            swap_bytes: vm.swap_bytes(),
            miss_cost_ms: vm.miss_cost.ms,
            first_bytes: vm.first_bytes,
            unanswered: vm.unanswered(),
            actuator: &mut vm.actuator,
            status: &mut vm.status,
        };
        (name.clone(), held)
    });
    held.collect()
}
