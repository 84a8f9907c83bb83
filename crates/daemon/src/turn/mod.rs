//! The control loop: discover VMs, take their curves, allocate, move, check, roll back.
//!
//! A *turn* reads all inputs and decides; between turns, once a second, a *tick* advances a move in progress and
//! answers commands. One thread does all of it. Nothing here waits for a guest: a balloon gets its target and is polled
//! later.
//!
//! ```text
//!  trap curves:   Whole ── divide ──> Moving ──> Checking ──> Whole
//!  [LS07] fig. 6: Whole ── into caches ──> Shrinking ──> Tracing ── divide ──> Moving ──> Checking
//!                   ^                                       ^                                │
//!                   └──────── GivingBack <── give back ─────┴── (caches are kept) <──────────┘
//! ```
//!
//! If a check finds a VM above its limit, the reallocation is rolled back.

mod act;
pub mod check;
mod commands;
mod decide;
mod discover;
mod exit;
mod group_limits;
mod groups;
mod host_relief;
mod relief;
mod views;
mod warm_up;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use plimsoll_actuator::Holding;
use plimsoll_protocol::decision::{Decision, Kind, Mode, Phase, State};
use plimsoll_protocol::plan::{PlanInputs, PlanJson};
use plimsoll_protocol::vm::Sample;

use discover::poll_all;
use exit::Returnable;
use groups::WatchedGroups;
use host_relief::HostRelief;
use relief::LoggedShortage;
use views::curve_json;
use warm_up::WarmUp;

use crate::config::{Config, Workflow};
use crate::history::{History, TurnRecord, group_id};
use crate::host::Host;
use crate::judgement::Promise;
use crate::moves::{Move, SAME_BYTES};
use crate::shared::{Command, SharedState};
use crate::vm::{Vm, bytes};

/// Interval between ticks.
pub const TICK: Duration = Duration::from_secs(1);
/// Memory that a cache under a disk keeps: the disk daemon needs at least this much for its metadata.
const CACHE_LEAST_BYTES: u64 = 4 << 20;
/// The first turn in which memory is moved: a check compares with the turns before.
const FIRST_MOVE_TURN: u64 = 4;
/// Warning until moving is resumed.
const BEGAN_ANEW: &str = "the history is lost: what VMs had before is unknown, and whether moving was paused, so it is paused; resume it if that is right";
/// The page store's name in the history; no VM can have it.
const STORE: &str = "\0store";

/// A move that could be started.
#[derive(Debug, Clone, PartialEq)]
struct PendingMove {
    kind: Kind,
    inputs: Option<PlanInputs>,
    plan: Option<PlanJson>,
    moves: Vec<(String, Holding, Holding)>,
    promises: Vec<Promise>,
    reason: String,
    takes_back: Option<u64>,
}

impl PendingMove {
    /// A move that no plan led to, without promises.
    fn new(kind: Kind, moves: Vec<(String, Holding, Holding)>, reason: impl Into<String>) -> Self {
        Self {
            kind,
            inputs: None,
            plan: None,
            moves,
            promises: Vec::new(),
            reason: reason.into(),
            takes_back: None,
        }
    }
}

/// A decision in progress.
struct ActiveDecision {
    decision: Decision,
    promises: Vec<Promise>,
    stage: Stage,
    /// Sizes of its VMs when its steps were last stored, in bytes.
    kept_sizes: Vec<u64>,
    /// Time of its start.
    began: Instant,
}

enum Stage {
    Moving(Move),
    Checking(WarmUp),
}

/// The control loop and its state.
pub struct Turns<H: Host> {
    config: Config,
    reload: Box<dyn FnMut() -> Result<Config, String> + Send>,
    host: H,
    history: Arc<History>,
    shared: Arc<SharedState>,
    vms: BTreeMap<String, Vm>,
    groups: WatchedGroups,
    paused: bool,
    phase: Phase,
    phase_since: Instant,
    active: Option<ActiveDecision>,
    proposal: Option<(Decision, PendingMove)>,
    cooldown_until: Option<Instant>,
    turn: u64,
    host_relief: HostRelief,
    /// What VMs may hold while they get back what they had.
    returnable: Option<Returnable>,
    /// Whether memory was moved since the start.
    has_moved: bool,
    /// Time at which VMs below their baselines were last polled between turns.
    guests_polled: Option<Instant>,
    logged_shortage: LoggedShortage,
    next_turn: Instant,
    turn_took: Duration,
    since_unix_ms: u64,
    warnings: Vec<String>,
    /// The policy's reason against an allocation.
    infeasible: Option<String>,
    /// Whether the reason is that the limits exceed the memory.
    guarantee: bool,
    inputs: Option<PlanInputs>,
    store_bytes: u64,
    /// RAM of the host: total, and what the kernel could provide without swapping.
    host_ram: (u64, u64),
    /// Whether the last pending decision was one of self-ballooning: others may come in between.
    self_ballooned: bool,
    /// Time at which memory was last returned from caches.
    gave_back: Option<Instant>,
    /// The page store's initial capacity, which is memory that does not belong to the VMs.
    store_first_bytes: Option<u64>,
    /// Called while a tick goes on for long: once for each VM that it waited for.
    progress: Box<dyn FnMut() + Send>,
}

impl<H: Host> Turns<H> {
    /// Continues where an earlier daemon ended, according to `history`. `reload` reads the configuration again.
    pub fn new(
        config: Config,
        reload: Box<dyn FnMut() -> Result<Config, String> + Send>,
        host: H,
        shared: Arc<SharedState>,
        now: Instant,
    ) -> Self {
        let history = Arc::clone(&shared.history);
        let since_unix_ms = shared.clock.now().unix_ms;
        let mut turns = Self {
            paused: history.paused(),
            phase: Phase::Whole,
            phase_since: now,
            config,
            reload,
            host,
            history,
            shared,
            vms: BTreeMap::new(),
            groups: WatchedGroups::default(),
            active: None,
            proposal: None,
            cooldown_until: None,
            turn: 0,
            host_relief: HostRelief::default(),
            returnable: None,
            has_moved: false,
            guests_polled: None,
            logged_shortage: LoggedShortage::default(),
            next_turn: now,
            turn_took: Duration::ZERO,
            since_unix_ms,
            warnings: Vec::new(),
            infeasible: None,
            guarantee: false,
            inputs: None,
            store_bytes: 0,
            host_ram: (u64::MAX, 0),
            self_ballooned: false,
            gave_back: None,
            store_first_bytes: None,
            progress: Box::new(|| ()),
        };
        turns.recover();
        turns
    }

    /// Calls `progress` at least once for each VM whose monitor a tick waits for, so that a watchdog sees that it goes on.
    pub fn report_progress(&mut self, progress: Box<dyn FnMut() + Send>) {
        self.progress = progress;
    }

    /// Decisions in progress of an earlier daemon are not continued: memory already moved stays, and they are reported.
    fn recover(&mut self) {
        if self.history.began_anew() {
            tracing::warn!("{BEGAN_ANEW}");
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
            decision.ended_unix_ms = Some(self.unix_ms());
            self.keep(&decision);
        }
        // VMs that were shrunk into their caches are still traced.
        if self.is_cached()
            && self
                .history
                .phase()
                .is_some_and(|phase| phase != Phase::Whole)
        {
            self.phase = Phase::Tracing;
        }
    }

    /// The time of day.
    fn unix_ms(&self) -> u64 {
        self.shared.clock.now().unix_ms
    }

    /// Stores a decision, on disk if possible; the history itself reports when it is not.
    fn keep(&self, decision: &Decision) {
        let _ = self.history.put_decision(decision);
    }

    /// Runs until every [`SharedState`] is dropped or `stop` is set; `alive` is called at every tick, with whether memory
    /// was moved, by this daemon or by an earlier one.
    pub fn run(
        &mut self,
        commands: &Receiver<Command>,
        stop: &dyn Fn() -> bool,
        alive: &mut dyn FnMut(bool),
    ) {
        loop {
            let tick = Instant::now();
            self.tick(tick);
            (self.progress)();
            alive(self.has_resized());
            loop {
                if stop() {
                    self.shut_down();
                    return;
                }
                let left = TICK.saturating_sub(tick.elapsed());
                match commands.recv_timeout(left.min(Duration::from_millis(100))) {
                    Ok(command) => self.answer(command, Instant::now()),
                    Err(RecvTimeoutError::Timeout) if left.is_zero() => break,
                    Err(RecvTimeoutError::Timeout) => self.relieve_host(Instant::now()),
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        }
    }

    /// Advances a move, and runs a turn if it is due.
    pub fn tick(&mut self, now: Instant) {
        self.relieve_host(now);
        self.advance(now);
        self.relieve_guests(now);
        // Until its VMs were found, a host is not one without any.
        if now >= self.next_turn && (self.turn > 0 || self.host.has_discovered()) {
            let began = Instant::now();
            self.take_turn(now);
            self.turn_took = began.elapsed();
            self.next_turn = now + self.config.turn_interval;
            self.publish();
        }
    }

    fn take_turn(&mut self, now: Instant) {
        self.turn += 1;
        self.warnings.clear();
        self.host_ram = self.host.ram();
        self.warnings
            .extend(self.config.warnings_for_ram(self.host_ram.0));
        if self.history.began_anew() {
            self.warnings.push(BEGAN_ANEW.to_owned());
        }
        self.discover();
        poll_all(self.vms.values_mut());
        self.count_copies_once();
        self.share_group_limits();
        for vm in self.vms.values_mut() {
            vm.feel(self.host.pressure_of(&vm.found), now);
            vm.refresh(&self.config, now);
            if vm.settle(now) {
                let _ = self.history.put_baseline(&vm.found.vm, vm.first_bytes);
                if self.history.began_anew() && vm.first_bytes + SAME_BYTES < vm.ram_bytes() {
                    tracing::warn!(
                        vm = vm.found.vm,
                        "its balloon holds a part of its RAM, and history is lost: what it had before is unknown, and the {} MiB that it has count as its baseline",
                        vm.first_bytes >> 20
                    );
                }
            }
            if vm.is_known() && vm.first_is_kept && vm.follow_ram() {
                let _ = self.history.put_baseline(&vm.found.vm, vm.first_bytes);
                let _ = self.history.put_ram(&vm.found.vm, vm.ram_bytes());
            }
        }
        self.keep_balloons();
        self.recognise_restored();
        self.warn_of_unreturned();
        self.observe_groups();
        self.read_store();
        if self.active.is_none() && !self.paused && self.config.mode == Mode::Act {
            self.back_store();
        }
        self.limit_withheld();
        self.inputs = self.plan_inputs();
        self.decide(now);
        self.record(now);
    }

    fn record(&mut self, at: Instant) {
        let rules = self.rules();
        let now = self.unix_ms();
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
        let lost: Vec<_> = self
            .vms
            .values_mut()
            .map(|vm| vm.seen.newly_lost())
            .collect();
        for (index, (name, vm)) in self.vms.iter().enumerate() {
            let holding = vm.status.holding();
            moments.push(TurnRecord {
                vm: name,
                sample: Sample {
                    unix_ms: now,
                    direct_bytes: holding.direct_bytes,
                    cache_bytes: holding.cache_bytes,
                    target_bytes: vm.target_bytes,
                    working_set_bytes: vm.seen.working_set.map(|set| bytes(set.size)),
                    working_set_bound: vm.seen.working_set.map(|set| set.bound),
                    relative: relatives[index].map(|relative| relative.expected),
                    misses_per_second: vm.misses_per_second(at),
                    overhead_ratio: vm.seen.trace.as_ref().map(|trace| trace.overhead_ratio),
                    lost: lost[index],
                },
                heat: vm.seen.new_heat().map(|row| (vm.seen.heat_cell_bytes, row)),
                curve: curves[index].as_ref(),
            });
        }
        let of_groups = self.groups.groups.iter_mut().map(|group| {
            let lost = group.seen.newly_lost();
            (group_id(group.path()), group.sample(now, lost))
        });
        let of_groups: Vec<(String, Sample)> = of_groups.collect();
        moments.extend(of_groups.iter().map(|(id, sample)| TurnRecord {
            vm: id,
            sample: *sample,
            heat: None,
            curve: None,
        }));
        self.history.record_turn(&moments);
        self.warnings.extend(self.history.warnings());
    }

    /// Keeps the curves of VMs that are no longer observed from now on.
    fn keep_last_curves<'a>(&self, vms: impl Iterator<Item = (&'a String, &'a Vm)>) {
        let curves: Vec<_> = vms.filter_map(|(name, vm)| curve_json(name, vm)).collect();
        self.history.keep_last_curves(self.unix_ms(), &curves);
    }

    fn publish(&mut self) {
        let snapshot = self.snapshot();
        self.shared.publish(snapshot);
    }

    fn is_cached(&self) -> bool {
        matches!(self.config.workflow, Workflow::Cache { .. })
    }

    fn enter(&mut self, phase: Phase, now: Instant) {
        self.phase = phase;
        self.phase_since = now;
        let _ = self.history.put_phase(phase);
    }
}
