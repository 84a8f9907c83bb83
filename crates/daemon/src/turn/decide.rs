//! The decision of a turn: the next step of the workflow, an allocation by the policy or a self-ballooning move.

use std::time::{Duration, Instant};

use plimsoll_actuator::Holding;
use plimsoll_flow::{
    CurvePoint, MissRatioCurve, PageCount, PageSize, VmId, Whole as _, WorkingSet, WorkingSetBound,
};
use plimsoll_policy::{Allocation, Demand, PolicyError, Rules, allocate, relative};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::decision::{Decision, Initiator, Kind, Mode, Phase, State};
use plimsoll_protocol::plan::{PlanError, PlanInputs, PlanJson};
use plimsoll_protocol::request::Event;
use plimsoll_protocol::vm::CurveSource;

use super::{CACHE_LEAST_BYTES, FIRST_MOVE_TURN, PendingMove, SAME_BYTES, Stage, Turns};
use crate::config::Workflow;
use crate::host::Host;
use crate::judgement::Promise;
use crate::moves::Move;
use crate::vm::{Vm, bytes, pages};

/// Number of points of a curve used in a decision.
const RECORDED_POINTS: usize = 200;
/// Miss ratios are recorded in steps of 1 over this number.
const RECORDED_STEPS: f64 = 1e5;
/// Share of memory above its working set that a self-ballooning VM keeps.
const SELF_BALLOON_ROOM: f64 = 0.1;

/// Time for which misses count at least before a host that is short judges a move by them.
const EARLY_CHECK_MIN: Duration = Duration::from_secs(10);

impl<H: Host> Turns<H> {
    /// The total memory to allocate: what the host lacks is withheld, as far as the VMs' limits allow.
    pub(super) fn divided_bytes(&self) -> u64 {
        self.granted_bytes()
            .max(self.host_relief.planned_least_bytes)
    }

    /// The memory that VMs may be given: all that the host lacks is withheld, also what the VMs' limits need.
    pub(super) fn granted_bytes(&self) -> u64 {
        self.total_bytes().saturating_sub(self.withheld_bytes())
    }

    /// The total memory to allocate on a host that lacks nothing.
    pub(super) fn total_bytes(&self) -> u64 {
        let found = || {
            let vms = self.counted_vms().map(|vm| vm.first_bytes);
            let store = self.store_first_bytes.unwrap_or_default();
            vms.fold(store, u64::saturating_add)
        };
        let mut total = self.config.total_bytes.unwrap_or_else(found);
        if let Some(returnable) = self.returnable {
            let kept = self
                .vms
                .iter()
                .map(|(name, vm)| self.kept_above_bytes(name, vm));
            let kept = kept.fold(found(), u64::saturating_add);
            total = total.max(kept.min(returnable.bytes));
        }
        // Neither a configuration nor VMs' own reports can make a host larger than it is.
        total.min(self.host_ram.0)
    }

    pub(super) fn rules(&self) -> Rules {
        Rules {
            unit: pages(self.config.unit_bytes),
            step: self.config.step_bytes.map(pages),
            gain_min: self.config.gain_min,
            ..Rules::new(pages(self.divided_bytes().saturating_sub(self.store_bytes)))
        }
    }

    pub(super) fn demands(&self) -> Vec<Demand> {
        let demand = |(name, vm): (&String, &Vm)| {
            let settings = vm.settings();
            let holding = vm.status.holding();
            // While it is traced through its cache, only the cache changes.
            let least = match self.is_cached() {
                true => {
                    let cache = holding.cache_bytes.min(CACHE_LEAST_BYTES);
                    settings.min_bytes.max(holding.direct_bytes + cache)
                }
                false => settings.min_bytes.max(vm.kept_bytes()),
            };
            let least = match vm.gives_nothing() {
                true => least.max(vm.own_bytes()),
                false => least,
            };
            let divided = vm.can_be_divided() && (!self.is_cached() || vm.status.cache.is_some());
            let curve = vm.seen.known.as_ref().filter(|_| divided);
            let (floor, ceiling) = if divided {
                let most = self.most(vm);
                let least = least.min(most);
                (least, settings.max_bytes.min(most).max(least))
            } else {
                (holding.bytes(), holding.bytes())
            };
            Demand {
                vm: VmId(name.clone()),
                curve: curve.map(|known| recorded(&known.curve, pages(settings.baseline_bytes))),
                baseline: pages(settings.baseline_bytes),
                current: pages(holding.bytes()),
                floor: pages(floor),
                ceiling: pages(ceiling),
                bound: vm.bound(),
                shares: settings.shares,
                working_set: vm.seen.working_set.map(|set| used(set, holding)),
            }
        };
        let counted = self.vms.iter().filter(|(_, vm)| vm.is_counted);
        counted.map(demand).collect()
    }

    /// The maximum that a VM can hold, regardless of its limits.
    pub(super) fn most(&self, vm: &Vm) -> u64 {
        match &self.config.workflow {
            Workflow::Cache { keep: true, .. } => u64::MAX,
            _ if vm.status.cache.is_none() => vm.own_most_bytes(),
            _ => vm.own_most_bytes().max(vm.settings().baseline_bytes),
        }
    }

    pub(super) fn plan_inputs(&self) -> Option<PlanInputs> {
        if self.vms.is_empty() {
            return None;
        }
        let page_size = PageSize::FOUR_KIB;
        Some(PlanInputs::new(
            &self.demands(),
            &self.rules(),
            self.config.policy,
            page_size,
        ))
    }

    pub(super) fn decide(&mut self, now: Instant) {
        // A host that is short waits for no check: it is judged by what was counted so far, and what cannot be judged yet
        // is watched.
        let checking = self.active.as_ref().and_then(|active| match &active.stage {
            Stage::Checking(warm_up) => Some(warm_up.moved),
            Stage::Moving(_) => None,
        });
        let least = self.config.check_after.min(EARLY_CHECK_MIN);
        let early = |moved: &Instant| now.duration_since(*moved) >= least;
        if let Some(moved) = checking.filter(|moved| self.is_withheld_outstanding() && early(moved))
        {
            self.check(moved, now);
        }
        if self.active.is_some() {
            return;
        }
        let pending = self.next_move(now);
        // A host that is short does not wait.
        let cooling =
            self.cooldown_until.is_some_and(|until| now < until) && !self.is_withheld_outstanding();
        if self.config.mode == Mode::Act
            && !self.paused
            && !cooling
            && self.turn >= FIRST_MOVE_TURN
            && let Some(pending) = &pending
            && !self.way_back_is_lost(pending)
        {
            let pending = pending.clone();
            self.begin(pending, Initiator::Daemon, None, now);
            return;
        }
        self.propose(pending);
    }

    /// Whether a move would take memory from VMs that could not get it back after a crash, because their sizes cannot be kept on disk.
    /// A host that is short does not wait for its disk.
    fn way_back_is_lost(&mut self, pending: &PendingMove) -> bool {
        let mut moves = pending.moves.iter();
        let takes = moves.any(|(_, from, to)| to.bytes() < from.bytes());
        if !takes || !self.config.gives_back_on_exit || self.is_withheld_outstanding() {
            return false;
        }
        // That the disk is full shows when something is written.
        let earlier = match self.history.warnings().is_empty() {
            true => self.mark_resized(&pending.moves),
            false => Vec::new(),
        };
        let is_lost = !self.history.warnings().is_empty();
        if is_lost {
            for (name, mark) in earlier {
                let _ = self.history.put_mark(&name, mark);
            }
            let why = "nothing is taken from VMs until history is on disk again: after a crash they would not get it back";
            self.warnings.push(why.to_owned());
        }
        is_lost
    }

    /// The next step of the workflow, if there is one.
    pub(super) fn next_move(&mut self, now: Instant) -> Option<PendingMove> {
        self.infeasible = None;
        if !self.self_ballooned
            && let Some(pending) = self.self_balloon()
        {
            self.self_ballooned = true;
            return Some(pending);
        }
        self.self_ballooned = false;
        match (self.config.workflow.clone(), self.phase) {
            (Workflow::Trap, _) => self.divide(),
            (
                Workflow::Cache {
                    direct_ratio,
                    every,
                    ..
                },
                Phase::Whole,
            ) => {
                let due = self
                    .gave_back
                    .is_none_or(|at| now.duration_since(at) >= every);
                // A host that is short takes from caches.
                (due && !self.host_relief.is_short())
                    .then(|| self.shrink_into_caches(direct_ratio))
                    .flatten()
            }
            (
                Workflow::Cache {
                    trace_for, keep, ..
                },
                Phase::Tracing,
            ) => {
                if now.duration_since(self.phase_since) < trace_for {
                    return None;
                }
                self.divide().or_else(|| {
                    let why = "No reallocation is worth a move, so the caches' memory goes back.";
                    (!keep).then(|| self.give_back(why)).flatten()
                })
            }
            _ => None,
        }
    }

    /// An allocation by the policy.
    pub(super) fn divide(&mut self) -> Option<PendingMove> {
        let inputs = self.inputs.clone()?;
        let (demands, rules) = (self.demands(), self.rules());
        if demands.iter().all(|demand| demand.curve.is_none()) {
            // The cost of a move is unknown.
            return None;
        }
        let allocation = match allocate(&demands, &rules, self.config.policy) {
            Ok(allocation) => allocation,
            Err(error) => {
                self.guarantee = matches!(error, PolicyError::Infeasible { .. });
                let error = PlanError::of_policy(error, &demands, PageSize::FOUR_KIB);
                self.infeasible = Some(format!("memory cannot be allocated: {error}"));
                return None;
            }
        };
        let moves: Vec<_> = allocation
            .targets
            .iter()
            .filter_map(|target| {
                let vm = self.vms.get(&target.vm.0)?;
                let from = vm.status.holding();
                let size = bytes(target.size);
                if size.abs_diff(from.bytes()) < SAME_BYTES {
                    return None;
                }
                Some((target.vm.0.clone(), from, self.split(vm, size)))
            })
            .collect();
        if moves.is_empty() {
            return None;
        }
        let promises = demands
            .iter()
            .zip(&allocation.targets)
            .filter_map(|(demand, target)| {
                let curve = demand.curve.as_ref()?;
                Some(Promise {
                    vm: demand.vm.0.clone(),
                    predicted: target.relative,
                    predicted_misses: target.misses,
                    before: target.relative_now.map(|now| now.expected),
                    baseline_ratio: curve.miss_ratio(demand.baseline).max(rules.miss_ratio_min),
                    ratio_min: rules.miss_ratio_min,
                    bound: demand.bound,
                    max_stall: self
                        .vms
                        .get(&demand.vm.0)
                        .and_then(|vm| vm.settings().promise.max_stall),
                    by_ratio: self
                        .vms
                        .get(&demand.vm.0)
                        .and_then(|vm| vm.seen.known.as_ref())
                        .is_some_and(|known| known.source == CurveSource::Disk),
                })
            })
            .collect();
        let [then, now] = [allocation.geometric_mean, allocation.geometric_mean_now]
            .map(|mean| format!("{mean:.2}"));
        let change = match allocation.geometric_mean - allocation.geometric_mean_now {
            _ if then == now => "stay at",
            ..0.0 => "fall to",
            // On a host that is short, all may have to give.
            _ => "rise to",
        };
        let held: u64 = demands.iter().map(|demand| demand.current.0).sum();
        let missing = match held.saturating_sub(rules.total.0) {
            0 => String::new(),
            pages => {
                let mib = bytes(PageCount(pages)).div_ceil(1 << 20);
                format!("The VMs have {mib} MiB more than the total to allocate. ")
            }
        };
        let mut reason = format!(
            "{missing}Misses {change} {then} of those at the baselines (geometric mean over {} VMs, now {now}), and each of these stays within its limit{}.",
            demands
                .iter()
                .filter(|demand| demand.curve.is_some())
                .count(),
            exceptions(&demands, &allocation),
        );
        reason.push_str(&margins(&demands, &allocation));
        reason.push_str(&self.miss_costs());
        Some(PendingMove {
            kind: Kind::Divide,
            plan: Some(PlanJson::new(
                &demands,
                &rules,
                self.config.policy,
                &allocation,
                PageSize::FOUR_KIB,
            )),
            inputs: Some(inputs),
            moves,
            promises,
            reason,
            takes_back: None,
        })
    }

    /// What a miss costs the VMs to which that matters, as sentences that follow the reason.
    fn miss_costs(&self) -> String {
        let promised = |vm: &&Vm| vm.settings().promise.max_stall.is_some();
        let text = |vm: &Vm| {
            let (cost, how) = (vm.miss_cost, vm.miss_cost.source.description());
            format!(" {}: a miss costs {cost}, {how}.", vm.found.vm)
        };
        self.vms.values().filter(promised).map(text).collect()
    }

    /// How a VM's memory is split in the present phase.
    pub(super) fn split(&self, vm: &Vm, size_bytes: u64) -> Holding {
        let has = vm.status.holding();
        let direct_bytes = if self.is_cached() && self.phase != Phase::Whole {
            has.direct_bytes.min(size_bytes)
        } else if vm.status.cache.is_some() {
            let own = size_bytes.saturating_sub(has.cache_bytes.min(CACHE_LEAST_BYTES));
            own.min(vm.own_most_bytes())
        } else {
            size_bytes
        };
        Holding {
            direct_bytes,
            cache_bytes: size_bytes - direct_bytes,
        }
    }

    pub(super) fn shrink_into_caches(&self, direct_ratio: f64) -> Option<PendingMove> {
        let moves: Vec<_> = self
            .vms
            .iter()
            .filter(|(_, vm)| vm.can_be_divided() && vm.is_resizable() && vm.status.cache.is_some())
            .filter_map(|(name, vm)| {
                let from = vm.status.holding();
                let direct = u64::whole(from.bytes() as f64 * direct_ratio);
                let direct_bytes = (direct - direct % SAME_BYTES).max(SAME_BYTES);
                let least_bytes = vm.floor_bytes.max(vm.status.direct.min_bytes);
                let direct_bytes = direct_bytes.max(least_bytes);
                let to = Holding {
                    direct_bytes,
                    cache_bytes: from.bytes().saturating_sub(direct_bytes),
                };
                (direct_bytes < from.direct_bytes).then(|| (name.clone(), from, to))
            })
            .collect();
        let reason = format!(
            "Memory goes into the caches under the VMs' disks, {:.0} % stays their own, so that what they use can be seen.",
            direct_ratio * 100.0
        );
        (!moves.is_empty()).then(|| PendingMove::new(Kind::IntoCaches, moves, reason))
    }

    pub(super) fn give_back(&self, why: &str) -> Option<PendingMove> {
        let moves: Vec<_> = self
            .vms
            .iter()
            .filter(|(_, vm)| vm.can_be_divided() && vm.can_grow())
            .filter_map(|(name, vm)| {
                let from = vm.status.holding();
                let own = from.bytes().saturating_sub(CACHE_LEAST_BYTES);
                let direct_bytes = own.min(vm.own_most_bytes());
                let to = Holding {
                    direct_bytes,
                    cache_bytes: from.bytes() - direct_bytes,
                };
                (from != to && from.cache_bytes > CACHE_LEAST_BYTES)
                    .then(|| (name.clone(), from, to))
            })
            .collect();
        (!moves.is_empty()).then(|| PendingMove::new(Kind::GiveBack, moves, why))
    }

    /// VMs that shrink to their working set, \[M08\] §7.
    pub(super) fn self_balloon(&self) -> Option<PendingMove> {
        let moves: Vec<_> = self
            .vms
            .iter()
            .filter(|(_, vm)| vm.rule.self_balloon == Some(true) && vm.settings().managed)
            .filter(|(_, vm)| vm.is_known() && vm.is_resizable() && vm.is_counted)
            .filter_map(|(name, vm)| {
                let settings = vm.settings();
                let from = vm.status.holding();
                let unit = self.config.unit_bytes.max(1);
                let wanted = self.self_balloon_wants(vm)?;
                let to = Holding {
                    direct_bytes: wanted,
                    ..from
                };
                // Small steps back and forth are useless.
                let step = (settings.baseline_bytes / 20).max(unit);
                (wanted.abs_diff(from.direct_bytes) >= step).then(|| (name.clone(), from, to))
            })
            .collect();
        if moves.is_empty() {
            return None;
        }
        let promises = moves.iter();
        let promises = promises.filter_map(|(name, _, to)| self.self_balloon_promise(name, *to));
        let promises = promises.collect();
        let reason = "Each of these VMs gets its working set and a tenth; what it gives up backs the page store.";
        Some(PendingMove {
            promises,
            ..PendingMove::new(Kind::Divide, moves, reason)
        })
    }

    /// The prediction against which a self-ballooning VM's new size is checked. Without a curve nothing is predicted:
    /// its misses are then compared with those before the move.
    pub(super) fn self_balloon_promise(&self, name: &str, to: Holding) -> Option<Promise> {
        let vm = self.vms.get(name)?;
        let (rules, settings) = (self.rules(), vm.settings());
        let baseline = pages(settings.baseline_bytes);
        let known = vm.seen.known.as_ref();
        let relative_at =
            |bytes| known.and_then(|known| relative(&known.curve, baseline, pages(bytes), &rules));
        let baseline_ratio = known.map_or(0.0, |known| known.curve.miss_ratio(baseline));
        Some(Promise {
            vm: name.to_owned(),
            predicted: relative_at(to.bytes()),
            predicted_misses: known
                .and_then(|known| known.curve.misses_per_second(pages(to.bytes()))),
            before: relative_at(vm.size_bytes()).map(|now| now.expected),
            baseline_ratio: baseline_ratio.max(rules.miss_ratio_min),
            ratio_min: rules.miss_ratio_min,
            bound: vm.bound(),
            max_stall: settings.promise.max_stall,
            by_ratio: known.is_some_and(|known| known.source == CurveSource::Disk),
        })
    }

    /// The size of a self-ballooning VM: its working set and a tenth, within its limits. A working set that is only a
    /// lower bound takes nothing from it.
    pub(super) fn self_balloon_wants(&self, vm: &Vm) -> Option<u64> {
        let set = vm.seen.working_set.as_ref()?;
        let settings = vm.settings();
        let wanted = u64::whole(bytes(set.size) as f64 * (1.0 + SELF_BALLOON_ROOM));
        let most = vm.whole_bytes();
        let wanted = wanted.min(most);
        let wanted = wanted.max(vm.kept_bytes());
        let whole = wanted.checked_next_multiple_of(self.config.unit_bytes.max(1));
        let size = whole.unwrap_or(most).clamp(settings.min_bytes, most);
        Some(match set.bound {
            _ if vm.gives_nothing() => size.max(vm.own_bytes()),
            WorkingSetBound::Estimate | WorkingSetBound::AtMost => size,
            WorkingSetBound::AtLeast => size.max(vm.status.direct.actual_bytes),
        })
    }

    /// Makes a proposal pending, in place of the earlier one.
    pub(super) fn propose(&mut self, pending: Option<PendingMove>) {
        let Some(pending) = pending else {
            self.withdraw();
            return;
        };
        if let Some((decision, old)) = &mut self.proposal {
            let sizes = |pending: &PendingMove| {
                let sizes = pending.moves.iter().map(|(vm, _, to)| (vm.clone(), *to));
                (pending.kind, sizes.collect::<Vec<_>>())
            };
            if sizes(old) == sizes(&pending) {
                decision.reason.clone_from(&pending.reason);
                decision.plan.clone_from(&pending.plan);
                decision.inputs.clone_from(&pending.inputs);
                *old = pending;
                return;
            }
        }
        self.withdraw();
        let decision = self.decision(&pending, Initiator::Daemon, State::Proposed);
        if self.config.mode == Mode::Advise {
            self.keep(&decision);
            self.shared.tell(Event::Decision { id: decision.id });
        }
        self.proposal = Some((decision, pending));
    }

    pub(super) fn withdraw(&mut self) {
        if let Some((mut decision, _)) = self.proposal.take()
            && self.history.decision(decision.id).is_some()
        {
            decision.state = State::Superseded;
            decision.ended_unix_ms = Some(self.unix_ms());
            self.keep(&decision);
        }
    }

    pub(super) fn decision(&self, pending: &PendingMove, by: Initiator, state: State) -> Decision {
        let steps = Move::begin(pending.moves.clone(), Instant::now()).steps();
        Decision {
            schema: SCHEMA,
            id: self.history.next_id(),
            unix_ms: self.unix_ms(),
            kind: pending.kind,
            by,
            mode: self.config.mode,
            state,
            reason: pending.reason.clone(),
            inputs: pending.inputs.clone(),
            plan: pending.plan.clone(),
            steps,
            checks: Vec::new(),
            takes_back: pending.takes_back,
            taken_back_by: None,
            ended_unix_ms: None,
        }
    }
}

/// The VMs with a curve of which an allocation does not show that they stay within their limits, as the end of a
/// sentence: a VM is given its baseline whatever its misses there.
fn exceptions(demands: &[Demand], allocation: &Allocation) -> String {
    let targets = demands.iter().zip(&allocation.targets);
    let known = targets.filter(|(demand, _)| demand.curve.is_some());
    let texts = known.filter_map(|(demand, target)| {
        let why = match demand.bound.predictions(target.relative, target.misses) {
            None => "not predicted",
            Some(predictions) if predictions.iter().any(|it| it.margin() < 0.0) => "may exceed it",
            Some(_) => return None,
        };
        Some(format!("{} ({why})", target.vm))
    });
    match texts.collect::<Vec<_>>() {
        texts if texts.is_empty() => String::new(),
        texts => format!(", except {}", texts.join(", ")),
    }
}

/// The predictions of the VMs that give memory, or may exceed their bounds, beside these, as sentences that follow the
/// reason.
fn margins(demands: &[Demand], allocation: &Allocation) -> String {
    let targets = demands.iter().zip(&allocation.targets);
    let texts = targets.flat_map(|(demand, target)| {
        let gives = target.size < demand.current;
        let predictions = demand.bound.predictions(target.relative, target.misses);
        let stated = predictions.into_iter().flatten();
        let stated = stated.filter(move |prediction| gives || prediction.margin() < 0.0);
        stated.map(move |prediction| format!(" {}: {prediction}.", target.vm))
    });
    texts.collect()
}

/// How much of its memory a VM uses, as far as a policy may rely on it. A working set that is only a lower bound frees
/// no memory: the VM then counts as using at least all that it holds.
pub(super) fn used(set: WorkingSet, holding: Holding) -> PageCount {
    match set.bound {
        WorkingSetBound::Estimate | WorkingSetBound::AtMost => set.size,
        WorkingSetBound::AtLeast => set.size.max(pages(holding.bytes())),
    }
}

/// A curve as used in decisions and recorded with them: few points and digits, to limit the space of a year of
/// decisions. The rounding error is far smaller than a confidence band; misses are compared with those at the baseline, where the
/// curve is as it was, also if its sizes are uncertain.
pub(super) fn recorded(curve: &MissRatioCurve, baseline: PageCount) -> MissRatioCurve {
    let uncertain = curve.uncertain().0;
    let further = (0..=4).map(|part| uncertain / 4 * part);
    let sizes = further.map(|further| PageCount(baseline.0.saturating_add(further)));
    let thinned = curve.thinned_around(RECORDED_POINTS, &sizes.collect::<Vec<_>>());
    let rounded = |ratio: f64| (ratio * RECORDED_STEPS).round() / RECORDED_STEPS;
    let rounded_misses = |misses: f64| (misses * 1000.0).round() / 1000.0;
    let points = thinned.points().iter().map(|point| CurvePoint {
        size: point.size,
        miss_ratio: rounded(point.miss_ratio),
        low: rounded(point.low),
        high: rounded(point.high),
        misses: point.misses.map(|misses| misses.map(rounded_misses)),
    });
    // Rounding keeps the monotonicity of a curve.
    thinned.with_points(points.collect()).unwrap_or(thinned)
}
