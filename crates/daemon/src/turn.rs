//! The control loop: discover VMs, take their curves, allocate, move, check, roll back.
//!
//! A *turn* reads all inputs and decides; between turns, once a second, a *tick* advances a move in progress and
//! answers commands. One thread does all of it. Nothing here waits for a guest: a balloon gets its target and is polled later.
//!
//! ```text
//!  trap curves:   Whole ── divide ──> Moving ──> Checking ──> Whole
//!  [LS07] fig. 6: Whole ── into caches ──> Shrinking ──> Tracing ── divide ──> Moving ──> Checking
//!                   ^                                       ^                                │
//!                   └──────── GivingBack <── give back ─────┴── (caches are kept) <──────────┘
//! ```
//!
//! If a check finds a VM above its limit, the reallocation is rolled back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use plimsoll_actuator::{Holding, Progress};
use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, PageSize, VmId, WorkingSetBound};
use plimsoll_policy::{Demand, PolicyError, Rules, allocate, promise_size, relative};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::decision::{
    By, Check, Decision, Kind, Mode, Phase, State, Step, StepState, Verdict,
};
use plimsoll_protocol::plan::{PlanError, PlanInputs, PlanJson};
use plimsoll_protocol::request::{Choice, Event, RefusalKind, SettingsChange};
use plimsoll_protocol::vm::{
    CurveSource, HeatmapView, HostMemory, HostView, RelativeView, Sample, Standing, VmSummary,
    WorkingSetView,
};

use crate::check::{Promise, judge};
use crate::clock::unix_ms;
use crate::config::{Config, Workflow};
use crate::history::{History, Moment};
use crate::host::{Found, Host};
use crate::moves::{self, Move, Progressed};
use crate::shared::{Command, Refused, Shared, Snapshot, host_name};
use crate::vm::{Vm, bytes, pages};

/// From one tick to the next.
pub const TICK: Duration = Duration::from_secs(1);
/// Sizes of one VM nearer to each other than this are the same.
const SAME_BYTES: u64 = 1 << 20;
/// What a cache under a disk keeps when its memory goes back: its daemon refuses to do with less than its books need.
const CACHE_LEAST_BYTES: u64 = 4 << 20;
/// The first turn in which something is moved: what was before it is what a check compares with.
const FIRST_MOVE_TURN: u64 = 4;
/// Cooldown doubles with every division taken back, up to so many times.
const BACK_OFF_MAX: u32 = 5;
/// What history knows the page store by; no VM has such a name.
const STORE: &str = "\0store";
/// VMs looked at at once: one whose monitor hangs holds up few others.
const LOOKS_AT_ONCE: usize = 16;
/// Largest size that may be set by hand.
const SIZE_MAX: u64 = 1 << 50;
/// Points of a curve that a decision is made by.
const RECORDED_POINTS: usize = 200;
/// Miss ratios are recorded in steps of one part of so many.
const RECORDED_STEPS: f64 = 1e5;
/// Room above its working set that a self-ballooning VM keeps, as a share.
const SELF_BALLOON_ROOM: f64 = 0.1;

/// A move that could be begun.
#[derive(Debug, Clone, PartialEq)]
struct Draft {
    kind: Kind,
    inputs: Option<PlanInputs>,
    plan: Option<PlanJson>,
    moves: Vec<(String, Holding, Holding)>,
    promises: Vec<Promise>,
    reason: String,
    takes_back: Option<u64>,
}

/// A decision under way.
struct Going {
    decision: Decision,
    promises: Vec<Promise>,
    stage: Stage,
    /// When it began.
    began: Instant,
}

enum Stage {
    Moving(Move),
    /// Measured since.
    Checking(Instant),
}

/// The loop and all it knows.
pub struct Turns<H: Host> {
    config: Config,
    reload: Box<dyn FnMut() -> Result<Config, String> + Send>,
    host: H,
    history: Arc<History>,
    shared: Arc<Shared>,
    vms: BTreeMap<String, Vm>,
    paused: bool,
    phase: Phase,
    phase_since: Instant,
    going: Option<Going>,
    proposal: Option<(Decision, Draft)>,
    cooldown_until: Option<Instant>,
    taken_back: u32,
    turn: u64,
    next_turn: Instant,
    turn_took: Duration,
    since_unix_ms: u64,
    warnings: Vec<String>,
    /// What the policy said against a division.
    infeasible: Option<String>,
    /// Whether that is because promises do not fit.
    guarantee: bool,
    inputs: Option<PlanInputs>,
    store_bytes: u64,
    /// RAM of the host: all, and what the kernel could give without swapping.
    host_ram: (u64, u64),
    /// Whether the last draft was one of self-ballooning: others come in between.
    self_ballooned: bool,
    /// When the last memory was given back from caches.
    gave_back: Option<Instant>,
    /// The page store's capacity when it was first seen: memory that is not the VMs'.
    store_first_bytes: Option<u64>,
    hostname: String,
}

impl<H: Host> Turns<H> {
    /// Begins where an earlier daemon ended, as far as `history` tells. `reload` reads the configuration again.
    pub fn new(
        config: Config,
        reload: Box<dyn FnMut() -> Result<Config, String> + Send>,
        host: H,
        shared: Arc<Shared>,
        now: Instant,
    ) -> Self {
        let history = Arc::clone(&shared.history);
        let mut turns = Self {
            paused: history.paused() || history.began_anew(),
            phase: Phase::Whole,
            phase_since: now,
            config,
            reload,
            host,
            history,
            shared,
            vms: BTreeMap::new(),
            going: None,
            proposal: None,
            cooldown_until: None,
            taken_back: 0,
            turn: 0,
            next_turn: now,
            turn_took: Duration::ZERO,
            since_unix_ms: unix_ms(),
            warnings: Vec::new(),
            infeasible: None,
            guarantee: false,
            inputs: None,
            store_bytes: 0,
            host_ram: (u64::MAX, 0),
            self_ballooned: false,
            gave_back: None,
            store_first_bytes: None,
            hostname: host_name(),
        };
        turns.recover();
        turns
    }

    /// What an earlier daemon had begun is not gone on with: what it moved stays, and is told.
    fn recover(&mut self) {
        if self.history.began_anew() {
            tracing::warn!(
                "whether moving was paused is forgotten, so it is paused: resume it if that is right"
            );
        }
        for mut decision in self.history.unfinished() {
            let proposed = decision.state == State::Proposed;
            decision.state = if proposed {
                State::Superseded
            } else {
                State::Stopped
            };
            if !proposed {
                decision.reason.push_str(
                    " The daemon ended while this was under way; what was moved stays. Roll it back to undo it.",
                );
                tracing::warn!(
                    decision = decision.id,
                    "a move was under way when the daemon ended; what was moved stays"
                );
            }
            decision.ended_unix_ms = Some(unix_ms());
            self.keep(&decision);
        }
        // VMs that were shrunk into their caches are traced on.
        if self.is_cached()
            && self
                .history
                .phase()
                .is_some_and(|phase| phase != Phase::Whole)
        {
            self.phase = Phase::Tracing;
        }
    }

    /// Keeps a decision, on disk if that is possible: history says itself when it is not.
    fn keep(&self, decision: &Decision) {
        let _ = self.history.put_decision(decision);
    }

    /// Runs until every [`Shared`] is gone or `stop` says so; `alive` is called at every tick.
    pub fn run(
        &mut self,
        commands: &Receiver<Command>,
        stop: &dyn Fn() -> bool,
        alive: &mut dyn FnMut(),
    ) {
        loop {
            let tick = Instant::now();
            self.tick(tick);
            alive();
            loop {
                if stop() {
                    self.shut_down();
                    return;
                }
                let left = TICK.saturating_sub(tick.elapsed());
                match commands.recv_timeout(left.min(Duration::from_millis(100))) {
                    Ok(command) => self.answer(command, Instant::now()),
                    Err(RecvTimeoutError::Timeout) if left.is_zero() => break,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        }
    }

    /// Carries a move forward, and takes a turn if it is time.
    pub fn tick(&mut self, now: Instant) {
        self.advance(now);
        if now >= self.next_turn {
            let began = Instant::now();
            self.take_turn(now);
            self.turn_took = began.elapsed();
            self.next_turn = now + self.config.turn_interval;
            self.publish();
        }
    }

    // --- a turn -------------------------------------------------------------------------------------

    fn take_turn(&mut self, now: Instant) {
        self.turn += 1;
        self.warnings.clear();
        self.host_ram = self.host.ram();
        self.discover();
        look_at_all(self.vms.values_mut());
        for vm in self.vms.values_mut() {
            vm.refresh(&self.config.workflow, now);
            if vm.is_known() && !vm.first_is_kept {
                vm.first_bytes = vm.size_bytes();
                vm.first_is_kept = true;
                let _ = self.history.put_baseline(&vm.found.vm, vm.first_bytes);
            }
        }
        self.look_at_store();
        if self.going.is_none() && !self.paused && self.config.mode == Mode::Act {
            self.back_store();
        }
        self.inputs = self.plan_inputs();
        self.decide(now);
        self.record();
    }

    fn discover(&mut self) {
        let (found, warnings) = self.host.vms();
        self.warnings.extend(warnings);
        let gone: Vec<String> = self
            .vms
            .iter()
            .filter(|(name, vm)| {
                !found
                    .iter()
                    .any(|found| found.vm == **name && found.pid == vm.found.pid)
            })
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            tracing::info!(vm = name, "the VM has ended");
            self.vms.remove(&name);
        }
        for found in found {
            if self.vms.contains_key(&found.vm) {
                continue;
            }
            self.welcome(found);
        }
    }

    fn welcome(&mut self, found: Found) {
        let rule = self.config.settings_for(&found.vm);
        let change = self.history.settings(&found.vm);
        let first = self.history.baseline(&found.vm);
        let opened = self.host.open(&found, &rule, &self.config);
        tracing::info!(vm = found.vm, pid = found.pid, "a VM was found");
        let name = found.vm.clone();
        let vm = Vm::new(found, opened, rule, change, first);
        self.vms.insert(name, vm);
    }

    fn look_at_store(&mut self) {
        match self.host.store() {
            Some(Ok(bytes)) => {
                self.store_bytes = bytes;
                if self.store_first_bytes.is_none() {
                    // An earlier daemon may have grown it already.
                    let first = self.history.baseline(STORE).unwrap_or(bytes);
                    let _ = self.history.put_baseline(STORE, first);
                    self.store_first_bytes = Some(first);
                }
            }
            Some(Err(error)) => self
                .warnings
                .push(format!("the page store: {}", moves::chain(&error))),
            None => self.store_bytes = 0,
        }
    }

    /// All memory that is divided.
    fn divided_bytes(&self) -> u64 {
        let found = || {
            let vms = self.vms.values().map(|vm| vm.first_bytes);
            let store = self.store_first_bytes.unwrap_or_default();
            // What VMs say of themselves cannot make a host larger than it is.
            vms.fold(store, u64::saturating_add).min(self.host_ram.0)
        };
        self.config.total_bytes.unwrap_or_else(found)
    }

    fn rules(&self) -> Rules {
        Rules {
            unit: pages(self.config.unit_bytes),
            step: self.config.step_bytes.map(pages),
            gain_min: self.config.gain_min,
            ..Rules::new(pages(self.divided_bytes().saturating_sub(self.store_bytes)))
        }
    }

    fn is_cached(&self) -> bool {
        matches!(self.config.workflow, Workflow::Cache { .. })
    }

    fn demands(&self) -> Vec<Demand> {
        let demand = |(name, vm): (&String, &Vm)| {
            let settings = vm.settings();
            let holding = vm.look.holding();
            // While it is traced through its cache, only the cache changes.
            let least = match self.is_cached() {
                true => {
                    let cache = holding.cache_bytes.min(CACHE_LEAST_BYTES);
                    settings.min_bytes.max(holding.direct_bytes + cache)
                }
                false => settings.min_bytes,
            };
            let divided = vm.can_be_divided() && (!self.is_cached() || vm.look.cache.is_some());
            let curve = vm.known.as_ref().filter(|_| divided);
            let (floor, ceiling) = if divided {
                let most = settings.max_bytes.min(self.most(vm));
                (least, most.max(least))
            } else {
                (holding.bytes(), holding.bytes())
            };
            Demand {
                vm: VmId(name.clone()),
                curve: curve.map(|known| recorded(&known.curve)),
                baseline: pages(settings.baseline_bytes),
                current: pages(holding.bytes()),
                floor: pages(floor),
                ceiling: pages(ceiling),
                max_loss: settings.max_loss,
                shares: settings.shares,
                working_set: vm.working_set.map(|set| used(set, holding)),
            }
        };
        self.vms.iter().map(demand).collect()
    }

    /// The most that a VM can hold, whatever it may.
    fn most(&self, vm: &Vm) -> u64 {
        match &self.config.workflow {
            Workflow::Cache { keep: true, .. } => u64::MAX,
            _ if vm.look.cache.is_none() => vm.found.ram_bytes,
            _ => vm.found.ram_bytes.max(vm.settings().baseline_bytes),
        }
    }

    fn plan_inputs(&self) -> Option<PlanInputs> {
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

    // --- deciding -----------------------------------------------------------------------------------

    fn decide(&mut self, now: Instant) {
        if self.going.is_some() {
            return;
        }
        let draft = self.next_draft(now);
        let cooling = self.cooldown_until.is_some_and(|until| now < until);
        if self.config.mode == Mode::Act
            && !self.paused
            && !cooling
            && self.turn >= FIRST_MOVE_TURN
            && let Some(draft) = &draft
        {
            let draft = draft.clone();
            self.begin(draft, By::Daemon, None, now);
            return;
        }
        self.propose(draft);
    }

    /// The next step of the workflow, if there is one.
    fn next_draft(&mut self, now: Instant) -> Option<Draft> {
        self.infeasible = None;
        if !self.self_ballooned
            && let Some(draft) = self.self_balloon()
        {
            self.self_ballooned = true;
            return Some(draft);
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
                due.then(|| self.shrink_into_caches(direct_ratio)).flatten()
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
                    let why = "No division is worth a move, so the caches' memory goes back.";
                    (!keep).then(|| self.give_back(why)).flatten()
                })
            }
            _ => None,
        }
    }

    /// A division by the policy.
    fn divide(&mut self) -> Option<Draft> {
        let inputs = self.inputs.clone()?;
        let (demands, rules) = (self.demands(), self.rules());
        if demands.iter().all(|demand| demand.curve.is_none()) {
            // Nobody knows what a move would cost.
            return None;
        }
        let allocation = match allocate(&demands, &rules, self.config.policy) {
            Ok(allocation) => allocation,
            Err(error) => {
                self.guarantee = matches!(error, PolicyError::Infeasible { .. });
                let error = PlanError::of_policy(error, &demands, PageSize::FOUR_KIB);
                self.infeasible = Some(format!("memory cannot be divided: {error}"));
                return None;
            }
        };
        let moves: Vec<_> = allocation
            .targets
            .iter()
            .filter_map(|target| {
                let vm = self.vms.get(&target.vm.0)?;
                let from = vm.look.holding();
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
                    predicted: target.relative.map(RelativeView::from),
                    before: target.relative_now.map(|now| now.expected),
                    baseline_ratio: curve.miss_ratio(demand.baseline).max(rules.miss_ratio_min),
                    ratio_min: rules.miss_ratio_min,
                    max_loss: demand.max_loss,
                    by_ratio: self
                        .vms
                        .get(&demand.vm.0)
                        .and_then(|vm| vm.known.as_ref())
                        .is_some_and(|known| known.source == CurveSource::Disk),
                })
            })
            .collect();
        let reason = format!(
            "Misses fall to {:.2} of those at the baselines (geometric mean over {} VMs, now {:.2}), and no VM loses more than it was promised.",
            allocation.geometric_mean,
            demands
                .iter()
                .filter(|demand| demand.curve.is_some())
                .count(),
            allocation.geometric_mean_now,
        );
        Some(Draft {
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

    /// How a VM holds so much memory in the present phase.
    fn split(&self, vm: &Vm, size_bytes: u64) -> Holding {
        let has = vm.look.holding();
        let direct_bytes = if self.is_cached() && self.phase != Phase::Whole {
            has.direct_bytes.min(size_bytes)
        } else if vm.look.cache.is_some() {
            let own = size_bytes.saturating_sub(has.cache_bytes.min(CACHE_LEAST_BYTES));
            own.min(vm.found.ram_bytes)
        } else {
            size_bytes
        };
        Holding {
            direct_bytes,
            cache_bytes: size_bytes - direct_bytes,
        }
    }

    fn shrink_into_caches(&self, direct_ratio: f64) -> Option<Draft> {
        let moves: Vec<_> = self
            .vms
            .iter()
            .filter(|(_, vm)| vm.can_be_divided() && vm.is_resizable() && vm.look.cache.is_some())
            .filter_map(|(name, vm)| {
                let from = vm.look.holding();
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a share of a size"
                )]
                let direct = (from.bytes() as f64 * direct_ratio) as u64;
                let direct_bytes = (direct - direct % SAME_BYTES).max(SAME_BYTES);
                let to = Holding {
                    direct_bytes,
                    cache_bytes: from.bytes().saturating_sub(direct_bytes),
                };
                (direct_bytes < from.direct_bytes).then(|| (name.clone(), from, to))
            })
            .collect();
        (!moves.is_empty()).then(|| Draft {
            kind: Kind::IntoCaches,
            inputs: None,
            plan: None,
            moves,
            promises: Vec::new(),
            reason: format!(
                "Memory goes into the caches under the VMs' disks, {:.0} % stays their own, so that what they use can be seen.",
                direct_ratio * 100.0
            ),
            takes_back: None,
        })
    }

    fn give_back(&self, why: &str) -> Option<Draft> {
        let moves: Vec<_> = self
            .vms
            .iter()
            .filter(|(_, vm)| vm.can_be_divided() && vm.is_resizable())
            .filter_map(|(name, vm)| {
                let from = vm.look.holding();
                let own = from.bytes().saturating_sub(CACHE_LEAST_BYTES);
                let direct_bytes = own.min(vm.found.ram_bytes);
                let to = Holding {
                    direct_bytes,
                    cache_bytes: from.bytes() - direct_bytes,
                };
                (from != to && from.cache_bytes > CACHE_LEAST_BYTES)
                    .then(|| (name.clone(), from, to))
            })
            .collect();
        (!moves.is_empty()).then(|| Draft {
            kind: Kind::GiveBack,
            inputs: None,
            plan: None,
            moves,
            promises: Vec::new(),
            reason: why.to_owned(),
            takes_back: None,
        })
    }

    /// VMs that shrink to what they use, \[M08\] §7.
    fn self_balloon(&self) -> Option<Draft> {
        let moves: Vec<_> = self
            .vms
            .iter()
            .filter(|(_, vm)| vm.rule.self_balloon == Some(true) && vm.settings().managed)
            .filter(|(_, vm)| vm.is_known() && vm.is_resizable())
            .filter_map(|(name, vm)| {
                let settings = vm.settings();
                let from = vm.look.holding();
                let unit = self.config.unit_bytes.max(1);
                let wanted = self.self_balloon_wants(vm)?;
                let to = Holding {
                    direct_bytes: wanted,
                    ..from
                };
                // Small steps back and forth help nobody.
                let step = (settings.baseline_bytes / 20).max(unit);
                (wanted.abs_diff(from.direct_bytes) >= step).then(|| (name.clone(), from, to))
            })
            .collect();
        if moves.is_empty() {
            return None;
        }
        let promises = moves.iter();
        let promises = promises.filter_map(|(name, _, to)| self.self_balloon_promise(name, *to));
        Some(Draft {
            kind: Kind::Divide,
            inputs: None,
            plan: None,
            promises: promises.collect(),
            moves,
            reason: "Each of these VMs gets its working set and a tenth; what it gives up backs the page store.".to_owned(),
            takes_back: None,
        })
    }

    /// What a self-ballooning VM's new size is checked against. Where it has no curve nothing is predicted: its misses are
    /// then compared with those before the move.
    fn self_balloon_promise(&self, name: &str, to: Holding) -> Option<Promise> {
        let vm = self.vms.get(name)?;
        let (rules, settings) = (self.rules(), vm.settings());
        let baseline = pages(settings.baseline_bytes);
        let known = vm.known.as_ref();
        let relative_at =
            |bytes| known.map(|known| relative(&known.curve, baseline, pages(bytes), &rules));
        let baseline_ratio = known.map_or(0.0, |known| known.curve.miss_ratio(baseline));
        Some(Promise {
            vm: name.to_owned(),
            predicted: relative_at(to.bytes()).map(RelativeView::from),
            before: relative_at(vm.size_bytes()).map(|now| now.expected),
            baseline_ratio: baseline_ratio.max(rules.miss_ratio_min),
            ratio_min: rules.miss_ratio_min,
            max_loss: settings.max_loss,
            by_ratio: known.is_some_and(|known| known.source == CurveSource::Disk),
        })
    }

    /// The size of a self-ballooning VM: its working set and a tenth, within its limits. A working set that is only a lower
    /// bound takes nothing from it.
    fn self_balloon_wants(&self, vm: &Vm) -> Option<u64> {
        let set = vm.working_set.as_ref()?;
        let settings = vm.settings();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a size and a tenth"
        )]
        let wanted = (set.bytes as f64 * (1.0 + SELF_BALLOON_ROOM)) as u64;
        let most = settings.baseline_bytes.max(settings.min_bytes);
        let wanted = wanted.min(most);
        let whole = wanted.checked_next_multiple_of(self.config.unit_bytes.max(1));
        let size = whole.unwrap_or(most).clamp(settings.min_bytes, most);
        Some(match set.bound {
            WorkingSetBound::Estimate | WorkingSetBound::AtMost => size,
            WorkingSetBound::AtLeast => size.max(vm.look.direct.actual_bytes),
        })
    }

    /// Puts a draft forward, in the place of the one before.
    fn propose(&mut self, draft: Option<Draft>) {
        let Some(draft) = draft else {
            self.withdraw();
            return;
        };
        if let Some((decision, old)) = &mut self.proposal {
            let sizes = |draft: &Draft| {
                let sizes = draft.moves.iter().map(|(vm, _, to)| (vm.clone(), *to));
                (draft.kind, sizes.collect::<Vec<_>>())
            };
            if sizes(old) == sizes(&draft) {
                decision.plan.clone_from(&draft.plan);
                decision.inputs.clone_from(&draft.inputs);
                *old = draft;
                return;
            }
        }
        self.withdraw();
        let decision = self.decision(&draft, By::Daemon, State::Proposed);
        if self.config.mode == Mode::Advise {
            self.keep(&decision);
            self.shared.tell(Event::Decision { id: decision.id });
        }
        self.proposal = Some((decision, draft));
    }

    fn withdraw(&mut self) {
        if let Some((mut decision, _)) = self.proposal.take()
            && self.history.decision(decision.id).is_some()
        {
            decision.state = State::Superseded;
            decision.ended_unix_ms = Some(unix_ms());
            self.keep(&decision);
        }
    }

    fn decision(&self, draft: &Draft, by: By, state: State) -> Decision {
        let steps = Move::begin(draft.moves.clone(), Instant::now()).steps();
        Decision {
            schema: SCHEMA,
            id: self.history.next_id(),
            unix_ms: unix_ms(),
            kind: draft.kind,
            by,
            mode: self.config.mode,
            state,
            reason: draft.reason.clone(),
            inputs: draft.inputs.clone(),
            plan: draft.plan.clone(),
            steps,
            checks: Vec::new(),
            takes_back: draft.takes_back,
            taken_back_by: None,
            ended_unix_ms: None,
        }
    }

    // --- moving -------------------------------------------------------------------------------------

    /// Begins a move; a proposal that it carries out keeps its number.
    fn begin(&mut self, draft: Draft, by: By, proposed: Option<Decision>, now: Instant) {
        let mut decision = match proposed {
            Some(proposed) => proposed,
            None => self.decision(&draft, by, State::Moving),
        };
        if self
            .proposal
            .as_ref()
            .is_some_and(|(of, _)| of.id != decision.id)
        {
            self.withdraw();
        }
        self.proposal = None;
        decision.state = State::Moving;
        decision.by = by;
        self.forget_earlier_targets();
        let under_way = Move::begin(draft.moves.clone(), now);
        decision.steps = under_way.steps();
        tracing::info!(decision = decision.id, kind = ?decision.kind, "memory is moved: {}", decision.reason);
        for (name, _, to) in &draft.moves {
            if let Some(vm) = self.vms.get_mut(name) {
                vm.target_bytes = Some(to.bytes());
            }
        }
        if self.is_cached() {
            self.enter(
                match draft.kind {
                    Kind::IntoCaches => Phase::Shrinking,
                    Kind::GiveBack => Phase::GivingBack,
                    Kind::Divide | Kind::Rollback => Phase::Moving,
                },
                now,
            );
        }
        self.keep(&decision);
        self.shared.tell(Event::Decision { id: decision.id });
        self.going = Some(Going {
            decision,
            promises: draft.promises,
            stage: Stage::Moving(under_way),
            began: now,
        });
        self.advance(now);
    }

    /// Tells balloons that nobody told anything since this daemon began to stay as they are: a target that an earlier one left
    /// unfinished must not be followed behind our back.
    fn forget_earlier_targets(&mut self) {
        for vm in self.vms.values_mut() {
            let untold = matches!(vm.look.direct.progress, Progress::Untold);
            if !(untold && vm.settings().managed && vm.is_known()) {
                continue;
            }
            if let Err(error) = vm.actuator.set_direct(vm.look.direct.actual_bytes) {
                tracing::warn!(vm = vm.found.vm, "{}", moves::chain(&error));
            }
            vm.look = vm.actuator.look();
        }
    }

    fn enter(&mut self, phase: Phase, now: Instant) {
        self.phase = phase;
        self.phase_since = now;
        let _ = self.history.put_phase(phase);
    }

    /// Carries what is under way one tick further.
    fn advance(&mut self, now: Instant) {
        let divided = self.divided_bytes().saturating_sub(self.store_bytes);
        let Some(going) = &mut self.going else {
            return;
        };
        match &mut going.stage {
            Stage::Moving(under_way) => {
                let mut held = held(&mut self.vms);
                let progressed = under_way.advance(&mut held, divided, now);
                drop(held);
                let steps = under_way.steps();
                let changed = going
                    .decision
                    .steps
                    .iter()
                    .map(|step| &step.state)
                    .ne(steps.iter().map(|step| &step.state));
                going.decision.steps = steps;
                let told = changed.then(|| going.decision.clone());
                if let Some(decision) = told {
                    self.keep(&decision);
                    self.shared.tell(Event::Decision { id: decision.id });
                }
                if progressed != Progressed::Going {
                    self.moved(progressed, now);
                }
            }
            Stage::Checking(since) => {
                let since = *since;
                for promise in &going.promises {
                    if let Some(vm) = self.vms.get_mut(&promise.vm) {
                        vm.look = vm.actuator.look();
                        vm.count(now);
                    }
                }
                if now.duration_since(since) >= self.config.check_after {
                    self.check(since, now);
                }
            }
        }
    }

    /// A move has come to its end.
    fn moved(&mut self, progressed: Progressed, now: Instant) {
        let Some(mut going) = self.going.take() else {
            return;
        };
        for step in &going.decision.steps {
            if let Some(vm) = self.vms.get_mut(&step.vm) {
                vm.target_bytes = None;
                if going.decision.kind != Kind::Divide {
                    vm.moved();
                }
            }
            if let Some(error) = &step.error {
                tracing::warn!(decision = going.decision.id, vm = step.vm, "{error}");
            }
        }
        let partly = progressed == Progressed::Partly;
        if going.decision.kind == Kind::Divide && !going.promises.is_empty() {
            going.decision.state = State::Checking;
            if partly {
                going.decision.reason.push_str(" Some VMs could not be moved as decided; what they did not give was not given to others.");
            }
            if self.is_cached() {
                self.enter(Phase::Checking, now);
            }
            self.keep(&going.decision);
            self.shared.tell(Event::Decision {
                id: going.decision.id,
            });
            going.stage = Stage::Checking(now);
            self.going = Some(going);
            return;
        }
        self.back_store();
        let state = if partly { State::Partly } else { State::Kept };
        if self.is_cached() {
            let phase = self.phase_by_holdings();
            self.enter(phase, now);
            if phase == Phase::Whole {
                self.gave_back = Some(now);
            }
        }
        if going.decision.kind == Kind::Rollback {
            for step in &going.decision.steps {
                if let Some(vm) = self.vms.get_mut(&step.vm) {
                    vm.broken = None;
                }
            }
        }
        if going.decision.kind == Kind::Divide {
            self.cooldown_until = Some(now + self.config.cooldown);
        }
        self.end(going.decision, state, None);
    }

    /// What self-ballooning VMs gave up backs the page store, once a check found that they can do without it: memory that
    /// the store has taken could not go back to them.
    fn back_store(&mut self) {
        let Some(first) = self.store_first_bytes else {
            return;
        };
        let given: u64 = self
            .vms
            .values()
            .filter(|vm| vm.rule.self_balloon == Some(true))
            .map(|vm| {
                // What it has, and what it is about to get back.
                let its = vm.look.reserved().bytes();
                let its = its.max(self.self_balloon_wants(vm).unwrap_or(0));
                vm.settings().baseline_bytes.saturating_sub(its)
            })
            .fold(0, u64::saturating_add);
        let capacity = first.saturating_add(given);
        if capacity.abs_diff(self.store_bytes) < SAME_BYTES {
            return;
        }
        match self.host.resize_store(capacity) {
            Ok(()) => self.store_bytes = self.store_bytes.max(capacity),
            Err(error) => self.warnings.push(format!(
                "the page store keeps its size: {}",
                moves::chain(&error)
            )),
        }
    }

    /// Judges a division by what was measured since.
    fn check(&mut self, since: Instant, now: Instant) {
        let Some(mut going) = self.going.take() else {
            return;
        };
        // At least two counts: they come with the turns.
        let length = now
            .duration_since(since)
            .max(self.config.turn_interval * 2 + TICK);
        let before = going.began.checked_sub(length).unwrap_or(going.began);
        let checks: Vec<Check> = going
            .promises
            .iter()
            .filter_map(|promise| {
                let vm = self.vms.get(&promise.vm)?;
                Some(judge(
                    promise,
                    vm.misses_between(before, going.began),
                    vm.misses_between(since, now),
                    self.config.tolerance,
                ))
            })
            .collect();
        let mut broken = Vec::new();
        for check in &checks {
            let told = (check.verdict == Verdict::Broken).then(|| check.why.clone());
            if let Some(why) = &told {
                tracing::warn!(decision = going.decision.id, vm = check.vm, "{why}");
                broken.push(format!("{}: {why}", check.vm));
            }
            if let Some(vm) = self.vms.get_mut(&check.vm) {
                vm.broken = told;
            }
        }
        going.decision.checks = checks;
        let moved = |step: &Step| step.state == StepState::Done;
        let all = going.decision.steps.iter().all(moved);
        if broken.is_empty() {
            self.taken_back = 0;
            self.cooldown_until = Some(now + self.config.cooldown);
            let state = if all { State::Kept } else { State::Partly };
            let by_policy = going.decision.inputs.is_some();
            self.end(going.decision, state, None);
            self.back_store();
            self.after_check(by_policy, now);
            return;
        }
        self.taken_back = (self.taken_back + 1).min(BACK_OFF_MAX);
        self.cooldown_until = Some(now + self.config.cooldown * 2_u32.pow(self.taken_back));
        let why = format!(
            " A promise was broken, so it is taken back: {}.",
            broken.join("; ")
        );
        if self.paused || (self.config.mode != Mode::Act && going.decision.by == By::Daemon) {
            let why = format!(
                "{why} It stays until somebody rolls it back: the daemon does not act now."
            );
            let by_policy = going.decision.inputs.is_some();
            self.end(going.decision, State::Stopped, Some(&why));
            self.after_check(by_policy, now);
            return;
        }
        let id = going.decision.id;
        let draft = self.draft_of_rollback(&going.decision, "Its check found a promise broken.");
        self.end(going.decision, State::RolledBack, Some(&why));
        if let Some(draft) = draft {
            self.begin(draft, By::Daemon, None, now);
            self.mark_taken_back(id);
        }
    }

    /// What follows a check in the workflow; a move that no policy decided leaves the phase to what the caches hold.
    fn after_check(&mut self, by_policy: bool, now: Instant) {
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
        if let Some(draft) = self.give_back(why) {
            if self.config.mode == Mode::Act {
                self.begin(draft, By::Daemon, None, now);
            } else {
                self.propose(Some(draft));
            }
        }
    }

    fn mark_taken_back(&mut self, id: u64) {
        let by = self.going.as_ref().map(|going| going.decision.id);
        if let Some(mut decision) = self.history.decision(id) {
            decision.taken_back_by = by;
            self.keep(&decision);
        }
    }

    fn end(&mut self, mut decision: Decision, state: State, why: Option<&str>) {
        decision.state = state;
        decision.ended_unix_ms = Some(unix_ms());
        decision.reason.push_str(why.unwrap_or_default());
        tracing::info!(decision = decision.id, state = ?state, "a decision has ended");
        self.keep(&decision);
        self.shared.tell(Event::Decision { id: decision.id });
    }

    /// A move back to what a decision found; `None` if there is nothing to move.
    fn draft_of_rollback(&self, decision: &Decision, why: &str) -> Option<Draft> {
        let moves: Vec<_> = decision
            .steps
            .iter()
            .filter_map(|step| {
                let vm = self.vms.get(&step.vm)?;
                let settings = vm.settings();
                if !settings.managed {
                    return None;
                }
                let from = vm.look.holding();
                // What was promised since holds.
                let most = settings
                    .max_bytes
                    .min(self.most(vm))
                    .max(settings.min_bytes);
                let size = step.from.size_bytes().clamp(settings.min_bytes, most);
                let to = match decision.kind {
                    // Sizes are taken back; how they are held is the phase's.
                    Kind::Divide => self.split(vm, size),
                    _ if size != step.from.size_bytes() => self.split(vm, size),
                    _ => Holding {
                        direct_bytes: step.from.direct_bytes,
                        cache_bytes: step.from.cache_bytes,
                    },
                };
                let same = to.direct_bytes.abs_diff(from.direct_bytes) < SAME_BYTES
                    && to.cache_bytes.abs_diff(from.cache_bytes) < SAME_BYTES;
                (!same).then(|| (step.vm.clone(), from, to))
            })
            .collect();
        (!moves.is_empty()).then(|| Draft {
            kind: Kind::Rollback,
            inputs: None,
            plan: None,
            moves,
            promises: Vec::new(),
            reason: format!("Decision {} is taken back. {why}", decision.id),
            takes_back: Some(decision.id),
        })
    }

    /// Whole where no cache holds more than its least.
    fn phase_by_holdings(&self) -> Phase {
        let empty = |vm: &Vm| vm.look.holding().cache_bytes <= CACHE_LEAST_BYTES;
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

    /// Stops a move where it is; a check is given up.
    fn stop(&mut self, why: &str) {
        let Some(mut going) = self.going.take() else {
            return;
        };
        if let Stage::Moving(under_way) = &mut going.stage {
            under_way.stop(&mut held(&mut self.vms));
            going.decision.steps = under_way.steps();
        }
        for vm in self.vms.values_mut() {
            vm.target_bytes = None;
        }
        if self.is_cached() {
            let phase = self.phase_by_holdings();
            self.enter(phase, Instant::now());
        }
        let why = format!(" {why}; what was moved stays.");
        self.end(going.decision, State::Stopped, Some(&why));
    }

    fn shut_down(&mut self) {
        self.stop("The daemon was shut down");
        let _ = self.history.flush();
    }

    // --- commands -----------------------------------------------------------------------------------

    /// Answers a command. Who asked may be gone.
    pub fn answer(&mut self, command: Command, now: Instant) {
        match command {
            Command::Apply(choice, reply) => drop(reply.send(self.apply(choice, now))),
            Command::Rollback(choice, reply) => drop(reply.send(self.roll_back(choice, now))),
            Command::Pause(reply) => {
                self.pause();
                drop(reply.send(Ok(())));
            }
            Command::Resume(reply) => {
                self.paused = false;
                let _ = self.history.put_paused(false);
                tracing::info!("resumed");
                drop(reply.send(Ok(())));
            }
            Command::Set(vm, change, reply) => drop(reply.send(self.set(&vm, change))),
            Command::Reload(reply) => drop(reply.send(self.reload())),
        }
        self.publish();
    }

    fn pause(&mut self) {
        self.paused = true;
        let _ = self.history.put_paused(true);
        self.stop("It was paused");
        tracing::warn!("paused: nothing is moved until resumed");
    }

    fn free_to_move(&self) -> Result<(), Refused> {
        if self.paused {
            return Err(Refused::new(
                RefusalKind::Conflict,
                "the daemon is paused: resume it first; nothing was moved",
            ));
        }
        match &self.going {
            None => Ok(()),
            Some(going) => Err(Refused::new(
                RefusalKind::Conflict,
                format!(
                    "decision {} is under way: wait for its end or pause; nothing was moved",
                    going.decision.id
                ),
            )),
        }
    }

    fn apply(&mut self, choice: Choice, now: Instant) -> Result<Decision, Refused> {
        self.free_to_move()?;
        let Some((decision, draft)) = self.proposal.clone() else {
            let (kind, why) = match &self.infeasible {
                Some(why) if self.guarantee => (RefusalKind::Guarantee, why.clone()),
                Some(why) => (RefusalKind::Conflict, why.clone()),
                None => (
                    RefusalKind::NotFound,
                    "nothing is proposed: no division is worth a move, or too little is known yet"
                        .to_owned(),
                ),
            };
            return Err(Refused::new(kind, format!("{why}; nothing was moved")));
        };
        if choice.decision.is_some_and(|id| id != decision.id) {
            return Err(Refused::new(
                RefusalKind::Conflict,
                format!(
                    "the proposal is now {}: look at it and apply that; nothing was moved",
                    decision.id
                ),
            ));
        }
        self.begin(draft, By::Operator, Some(decision), now);
        self.under_way()
    }

    fn under_way(&self) -> Result<Decision, Refused> {
        let going = self.going.as_ref().map(|going| going.decision.clone());
        let last = || self.history.decisions(None, None, 1).into_iter().next();
        going.or_else(last).ok_or_else(|| {
            Refused::new(
                RefusalKind::Busy,
                "the decision was carried out, but is not recorded",
            )
        })
    }

    fn roll_back(&mut self, choice: Choice, now: Instant) -> Result<Decision, Refused> {
        if self.paused {
            self.free_to_move()?;
        }
        let can = |decision: &Decision| {
            decision.kind != Kind::Rollback
                && decision.taken_back_by.is_none()
                && !matches!(
                    decision.state,
                    State::Proposed | State::Superseded | State::Failed | State::RolledBack
                )
        };
        let decision = match choice.decision {
            Some(id) => {
                let found = self.history.decision(id).ok_or_else(|| {
                    Refused::new(
                        RefusalKind::NotFound,
                        format!("there is no decision {id}; nothing was moved"),
                    )
                })?;
                if !can(&found) {
                    return Err(Refused::new(
                        RefusalKind::Conflict,
                        format!(
                            "decision {id} moved nothing that could be taken back, or was taken back already"
                        ),
                    ));
                }
                found
            }
            None => self
                .history
                .decisions(None, None, 100)
                .into_iter()
                .find(|decision| can(decision))
                .ok_or_else(|| {
                    Refused::new(
                        RefusalKind::NotFound,
                        "there is no decision that could be taken back",
                    )
                })?,
        };
        if let Some(going) = &self.going {
            if going.decision.id != decision.id {
                self.free_to_move()?;
            }
            self.stop("It is taken back by an operator");
        }
        let draft = self.draft_of_rollback(&decision, "An operator asked for it.");
        let Some(draft) = draft else {
            return Err(Refused::new(
                RefusalKind::NotFound,
                format!(
                    "the VMs have what they had before decision {}: nothing was moved",
                    decision.id
                ),
            ));
        };
        self.begin(draft, By::Operator, None, now);
        self.mark_taken_back(decision.id);
        // The daemon does not do at once again what was just taken back.
        self.cooldown_until = Some(now + self.config.cooldown);
        self.under_way()
    }

    fn set(&mut self, name: &str, change: SettingsChange) -> Result<VmSummary, Refused> {
        let bad = |what: String| {
            Refused::new(
                RefusalKind::BadRequest,
                format!("{what}; nothing was changed"),
            )
        };
        let Some(vm) = self.vms.get(name) else {
            return Err(Refused::new(
                RefusalKind::NotFound,
                format!("there is no VM {name}; nothing was changed"),
            ));
        };
        let old = if change.reset {
            SettingsChange::default()
        } else {
            vm.change
        };
        let new = SettingsChange {
            reset: false,
            min_bytes: change.min_bytes.or(old.min_bytes),
            max_bytes: change.max_bytes.or(old.max_bytes),
            baseline_bytes: change.baseline_bytes.or(old.baseline_bytes),
            shares: change.shares.or(old.shares),
            max_loss: change.max_loss.or(old.max_loss),
            managed: change.managed.or(old.managed),
        };
        let settings = vm.settings_with(&new);
        if settings.min_bytes > settings.max_bytes {
            return Err(bad(format!(
                "a least of {} bytes is above the most of {}",
                settings.min_bytes, settings.max_bytes
            )));
        }
        if settings.baseline_bytes == 0 || settings.shares == 0 {
            return Err(bad("baseline and shares are 1 or more".to_owned()));
        }
        if !(settings.max_loss.is_finite() && (0.0..=1000.0).contains(&settings.max_loss)) {
            return Err(bad(format!(
                "a loss of {}: expected 0 or more, as a share",
                settings.max_loss
            )));
        }
        if settings.baseline_bytes > SIZE_MAX || settings.max_bytes > SIZE_MAX {
            return Err(bad("a size above 1 PiB".to_owned()));
        }
        let before = vm.change;
        let needed_before = self.needed();
        let Some(vm) = self.vms.get_mut(name) else {
            return Err(bad(format!("there is no VM {name}")));
        };
        vm.change = new;
        // A promise is given only if all can be kept together.
        let demands = self.demands();
        let refused = match allocate(&demands, &self.rules(), self.config.policy) {
            Err(error @ PolicyError::Infeasible { needed, .. })
                if needed_before.is_none_or(|before| needed > before) =>
            {
                Some(PlanError::of_policy(error, &demands, PageSize::FOUR_KIB).to_string())
            }
            _ => None,
        };
        if let (Some(why), Some(vm)) = (refused, self.vms.get_mut(name)) {
            vm.change = before;
            return Err(Refused::new(
                RefusalKind::Guarantee,
                format!("with that, {why}; nothing was changed"),
            ));
        }
        let _ = self.history.put_settings(name, &new);
        tracing::info!(vm = name, ?new, "settings changed by hand");
        self.promises_changed(Some(name));
        self.next_turn = Instant::now();
        let vm = &self.vms[name];
        Ok(self.summary(name, vm))
    }

    /// What promises need where they do not fit; `None` where they do.
    fn needed(&self) -> Option<PageCount> {
        match allocate(&self.demands(), &self.rules(), self.config.policy) {
            Err(PolicyError::Infeasible { needed, .. }) => Some(needed),
            _ => None,
        }
    }

    /// What was proposed, or is being moved, rests on promises that hold no longer: of `vm`, or of all.
    fn promises_changed(&mut self, vm: Option<&str>) {
        self.withdraw();
        let concerned = self.going.as_ref().is_some_and(|going| match &going.stage {
            Stage::Moving(under_way) => vm.is_none_or(|vm| under_way.involves(vm)),
            Stage::Checking(_) => false,
        });
        if concerned {
            self.stop("What one of its VMs is promised was changed");
        }
    }

    fn reload(&mut self) -> Result<(), Refused> {
        let new = (self.reload)().map_err(|why| {
            tracing::error!("the configuration was not reloaded, the old one holds: {why}");
            Refused::new(
                RefusalKind::BadRequest,
                format!("{why}; the old configuration holds"),
            )
        })?;
        let restart = self.config.changes_needing_restart(&new);
        if !restart.is_empty() {
            tracing::warn!(
                "these take effect at the next start: {}",
                restart.join(", ")
            );
        }
        if new.workflow != self.config.workflow {
            self.stop("The workflow was changed");
        }
        let before: Vec<_> = self.vms.values().map(Vm::settings).collect();
        let was_acting = self.config.mode == Mode::Act;
        self.config = new;
        for (name, vm) in &mut self.vms {
            vm.rule = self.config.settings_for(name);
        }
        let stopped = was_acting && self.config.mode != Mode::Act;
        if stopped || self.vms.values().map(Vm::settings).ne(before) {
            self.promises_changed(None);
        }
        self.next_turn = Instant::now();
        tracing::info!("the configuration was reloaded");
        Ok(())
    }

    // --- showing ------------------------------------------------------------------------------------

    fn relative_now(&self, vm: &Vm, rules: &Rules) -> Option<RelativeView> {
        let known = vm.known.as_ref()?;
        let baseline = pages(vm.settings().baseline_bytes);
        let size = pages(vm.size_bytes());
        Some(relative(&known.curve, baseline, size, rules).into())
    }

    fn summary(&self, name: &str, vm: &Vm) -> VmSummary {
        let rules = self.rules();
        let settings = vm.settings();
        let holding = vm.look.holding();
        let relative = self.relative_now(vm, &rules);
        let promise = vm.known.as_ref().map(|known| {
            let baseline = pages(settings.baseline_bytes);
            let least = promise_size(&known.curve, baseline, settings.max_loss, &rules);
            bytes(least).max(settings.min_bytes)
        });
        let reclaimable = promise.map(|promise| holding.bytes().saturating_sub(promise));
        let (standing, why) = self.standing(vm, relative, reclaimable);
        VmSummary {
            vm: name.to_owned(),
            pid: vm.found.pid,
            accelerator: vm.found.accelerator.clone(),
            libvirt: vm.found.libvirt,
            standing,
            why,
            ram_bytes: vm.found.ram_bytes,
            direct_bytes: holding.direct_bytes,
            cache_bytes: holding.cache_bytes,
            size_bytes: holding.bytes(),
            target_bytes: vm.target_bytes,
            settings,
            working_set: vm.working_set,
            relative,
            reclaimable_bytes: reclaimable,
            promise_bytes: promise,
            curve_source: vm.known.as_ref().map(|known| known.source),
            references: vm
                .known
                .as_ref()
                .map_or(0, |known| known.curve.references()),
            curve_unix_ms: vm.known.as_ref().map(|known| known.unix_ms),
            trace: vm.trace.clone(),
            balloon: vm.balloon(),
            cache: vm.cache(),
        }
    }

    fn standing(
        &self,
        vm: &Vm,
        relative: Option<RelativeView>,
        reclaimable: Option<u64>,
    ) -> (Standing, String) {
        if let Some(why) = &vm.broken {
            return (Standing::Violating, why.clone());
        }
        let (Some(relative), Some(reclaimable)) = (relative, reclaimable) else {
            let why = vm.warnings.first().cloned();
            let why = why.unwrap_or_else(|| "its curve is not known yet".to_owned());
            return (Standing::Unknown, why);
        };
        let bound = 1.0 + vm.settings().max_loss;
        if relative.expected > bound + self.config.tolerance {
            let why = format!(
                "predicted to miss {:.2} times as often as at its baseline, promised {bound:.2} at most",
                relative.expected
            );
            (Standing::Violating, why)
        } else if relative.high > bound {
            let why = format!(
                "predicted to miss {:.2} times as often as at its baseline (up to {:.2}), promised {bound:.2}: not for certain",
                relative.expected, relative.high
            );
            (Standing::Tight, why)
        } else if reclaimable < self.config.unit_bytes {
            (
                Standing::Tight,
                "its promise is kept, and it can give nothing".to_owned(),
            )
        } else {
            (
                Standing::Safe,
                format!(
                    "its promise is kept even with {} MiB less",
                    reclaimable >> 20
                ),
            )
        }
    }

    fn record(&mut self) {
        let rules = self.rules();
        let now = unix_ms();
        let relatives: Vec<_> = self
            .vms
            .values()
            .map(|vm| self.relative_now(vm, &rules))
            .collect();
        let curves: Vec<_> = self
            .vms
            .iter()
            .map(|(name, vm)| curve_json(name, vm))
            .collect();
        let mut moments = Vec::new();
        let lost: Vec<_> = self.vms.values_mut().map(Vm::newly_lost).collect();
        for (index, (name, vm)) in self.vms.iter().enumerate() {
            let holding = vm.look.holding();
            moments.push(Moment {
                vm: name,
                sample: Sample {
                    unix_ms: now,
                    direct_bytes: holding.direct_bytes,
                    cache_bytes: holding.cache_bytes,
                    target_bytes: vm.target_bytes,
                    working_set_bytes: vm.working_set.as_ref().map(|set| set.bytes),
                    relative: relatives[index].map(|relative| relative.expected),
                    misses_per_second: vm.misses_per_second(),
                    overhead_ratio: vm.trace.as_ref().map(|trace| trace.overhead_ratio),
                    lost: lost[index],
                },
                heat: vm.new_heat().map(|row| (vm.heat_cell_bytes, row)),
                curve: curves[index].as_ref(),
            });
        }
        self.history.record_turn(&moments);
        self.warnings.extend(self.history.warnings());
    }

    fn publish(&mut self) {
        let snapshot = self.snapshot();
        self.shared.publish(snapshot);
    }

    fn snapshot(&mut self) -> Snapshot {
        let vms: Vec<_> = self
            .vms
            .iter()
            .map(|(name, vm)| self.summary(name, vm))
            .collect();
        let (total, available) = self.host_ram;
        let sum = |bytes: fn(&VmSummary) -> u64| vms.iter().map(bytes).fold(0, u64::saturating_add);
        let (direct, cache) = (sum(|vm| vm.direct_bytes), sum(|vm| vm.cache_bytes));
        let divided = self.divided_bytes();
        let reclaimable = vms.iter().filter(|vm| vm.settings.managed);
        let mut warnings = self.warnings.clone();
        warnings.extend(self.infeasible.clone());
        for (name, vm) in &self.vms {
            warnings.extend(
                vm.warnings
                    .iter()
                    .map(|warning| format!("{name}: {warning}")),
            );
        }
        let held = direct
            .saturating_add(cache)
            .saturating_add(self.store_bytes);
        if held > divided {
            warnings.push(format!(
                "the VMs hold {} MiB, {} MiB more than what is divided",
                held >> 20,
                (held - divided) >> 20
            ));
        }
        let memory = HostMemory {
            total_bytes: total,
            divided_bytes: divided,
            vms_direct_bytes: direct,
            vms_cache_bytes: cache,
            store_bytes: self.store_bytes,
            spare_bytes: divided
                .saturating_sub(direct)
                .saturating_sub(cache)
                .saturating_sub(self.store_bytes),
            reclaimable_bytes: reclaimable
                .filter_map(|vm| vm.reclaimable_bytes)
                .fold(0, u64::saturating_add),
            available_bytes: available,
        };
        let curves = self.vms.iter();
        let curves = curves.filter_map(|(name, vm)| Some((name.clone(), curve_json(name, vm)?)));
        let heat = self.vms.iter().filter(|(_, vm)| !vm.heat.is_empty());
        let heat = heat.map(|(name, vm)| {
            let view = HeatmapView {
                schema: SCHEMA,
                vm: name.clone(),
                cell_bytes: vm.heat_cell_bytes,
                rows: vm.heat.iter().cloned().collect(),
            };
            (name.clone(), Arc::new(view))
        });
        Snapshot {
            curves: curves.collect(),
            heat: heat.collect(),
            inputs: self.inputs.clone(),
            proposal: self.proposal.as_ref().map(|(decision, _)| decision.clone()),
            host: HostView {
                schema: SCHEMA,
                host: self.hostname.clone(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                mode: self.config.mode,
                paused: self.paused,
                phase: self.phase,
                since_unix_ms: self.since_unix_ms,
                now_unix_ms: unix_ms(),
                turn: self.turn,
                turn_interval_ms: u64::try_from(self.config.turn_interval.as_millis())
                    .unwrap_or(u64::MAX),
                turn_took_ms: self.turn_took.as_secs_f64() * 1e3,
                memory,
                vms,
                moving: self.going.as_ref().map(|going| going.decision.id),
                warnings,
                history_bytes: self.history.bytes(),
                daemon_resident_bytes: resident_bytes(),
            },
        }
    }
}

/// How much of its memory a VM uses, as far as a policy may rely on it: a working set that is only a lower bound gives no
/// memory away, so the VM then counts as using at least all that it holds.
fn used(set: WorkingSetView, holding: Holding) -> PageCount {
    pages(match set.bound {
        WorkingSetBound::Estimate | WorkingSetBound::AtMost => set.bytes,
        WorkingSetBound::AtLeast => set.bytes.max(holding.bytes()),
    })
}

/// A curve as decisions are made by it and recorded with it: few points and digits, so that a year of decisions has room. What is
/// rounded off is nothing beside a band.
fn recorded(curve: &MissRatioCurve) -> MissRatioCurve {
    let thinned = curve.thinned(RECORDED_POINTS);
    let rounded = |ratio: f64| (ratio * RECORDED_STEPS).round() / RECORDED_STEPS;
    let points = thinned.points().iter().map(|point| CurvePoint {
        size: point.size,
        miss_ratio: rounded(point.miss_ratio),
        low: rounded(point.low),
        high: rounded(point.high),
    });
    // Rounding keeps every order that makes points a curve.
    MissRatioCurve::new(points.collect(), curve.references()).unwrap_or(thinned)
}

/// A VM's curve as it is shown.
fn curve_json(name: &str, vm: &Vm) -> Option<CurveJson> {
    let known = vm.known.as_ref()?;
    let baseline = Some(pages(vm.settings().baseline_bytes));
    Some(CurveJson::new(
        name,
        PageSize::FOUR_KIB,
        baseline,
        &known.shown,
    ))
}

/// Looks at VMs, several at once.
fn look_at_all<'a>(vms: impl Iterator<Item = &'a mut Vm>) {
    let mut vms: Vec<_> = vms.collect();
    let each = vms.len().div_ceil(LOOKS_AT_ONCE).max(1);
    std::thread::scope(|scope| {
        for some in vms.chunks_mut(each) {
            scope.spawn(|| {
                for vm in some {
                    vm.look = vm.actuator.look();
                }
            });
        }
    });
}

/// What a move may take hold of.
fn held(vms: &mut BTreeMap<String, Vm>) -> BTreeMap<String, moves::Held<'_>> {
    let held = vms.iter_mut().map(|(name, vm)| {
        let held = moves::Held {
            actuator: &mut vm.actuator,
            look: &mut vm.look,
        };
        (name.clone(), held)
    });
    held.collect()
}

/// Resident memory of this process; 0 if the kernel does not say.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_ascii_whitespace().nth(1);
    let pages: u64 = pages
        .and_then(|pages| pages.parse().ok())
        .unwrap_or_default();
    pages.saturating_mul(rustix::param::page_size() as u64)
}
