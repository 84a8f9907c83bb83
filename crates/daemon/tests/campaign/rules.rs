//! What must hold of the daemon, whatever guests, disks, clocks and operators do.
//!
//! - Memory is given once: a target that raises what all VMs may take never raises it above the total, which is computed
//!   here from the VMs' first sizes and their RAM.
//! - Nothing is taken on stale data: a target below a VM's size needs an answered poll of this second, and a report of the
//!   guest that is at most 15 s old; from an honest guest it takes nothing that its processes use.
//! - A guest that reports that it kills processes is not shrunk on.
//! - No honest guest runs out of memory: one whose processes fill half of its slack in ten seconds or more gets memory back
//!   before an allocation fails, if it is to have more and there is some.
//! - Nothing is moved while the daemon is paused or does not act, nor of a VM that it may not move; but guests that it
//!   squeezed get memory back if they run short also when it does not act.
//! - Guests that run short get no more than their baselines, from nobody below his.
//! - Plans keep the limits of the VMs, and give none more than its RAM.
//! - Caches shrink while the host is short, and VMs give what is withheld; without faults all of it is allocated again.
//! - Each decision ends.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_actuator::slack_bytes;
use plimsoll_daemon::shared::{SharedState, Snapshot};
use plimsoll_protocol::decision::{Decision, Kind, Mode, State};
use plimsoll_protocol::vm::Settings;
use plimsoll_vm::ProcessId;

use crate::plan::{MIB, Plan};
use crate::simulated::{
    BalloonBehaviour, Lie, Reports, Setting, SimulatedHost, SimulatedVm, Statistic,
};

/// Longest age of a report by which memory is taken, and of what an honest guest can rely on, in s.
const REPORT_AGE_MAX_MS: u64 = 16_000;
/// Time within which the daemon has seen what a guest is and has reacted, in s.
const WATCH: u64 = 20;
/// Time within which a move has seen what a guest reports: two reports, and a look at them.
const NOTICE: u64 = 5;
/// Time after which a host that was short may still withhold memory, in s.
const WITHHELD: u64 = 130;
/// Longest time of a move, and of a decision by an operator, in s.
const MOVE_MAX: u64 = 30 * 60;
/// How the reason of a decision begins that returns memory to guests that run short.
const RELIEF: &str = "Guests get memory back";
/// What a cache keeps.
const CACHE_LEAST: u64 = 4 * MIB;
/// Sizes that differ by less are the same.
const SAME: u64 = 2 * MIB;

/// A rule that was broken.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// The rule.
    pub what: &'static str,
    /// By what.
    pub how: String,
}

impl Finding {
    pub fn new(what: &'static str) -> Self {
        Self::by(what, "")
    }

    fn by(what: &'static str, how: impl fmt::Debug) -> Self {
        let how = format!("{how:?}");
        Self { what, how }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Watched {
    /// Process, and its kills so far.
    process: (u32, u64),
    /// Second of the last fault, or of its end.
    fault: u64,
    /// Second at which memory was last taken.
    taken: Option<u64>,
    /// The decision that takes memory from it although it reports kills, and since which second.
    squeeze: Option<(u64, u64)>,
    /// Whether the daemon resized this process.
    is_resized: bool,
}

pub struct Rules {
    names: Vec<String>,
    host: SimulatedHost,
    shared: Option<Arc<SharedState>>,
    total_bytes: Option<u64>,
    headroom_bytes: u64,
    check_after: Duration,
    guests: Vec<Watched>,
    /// First size and RAM of VMs by what identifies them.
    firsts: BTreeMap<String, (u64, u64)>,
    /// The total at the last turn.
    limit_bytes: u64,
    turn: u64,
    /// As of the last second.
    before: Option<Arc<Snapshot>>,
    caches_before: u64,
    available_before: u64,
    /// The decision in progress, and its first second.
    moving: Option<(u64, u64)>,
    booted: u64,
    operator: Option<u64>,
    /// Last second at which it did not act, and at which the host was short.
    idle: u64,
    short: Option<u64>,
    pub settings: u64,
    pub decisions: u64,
}

impl Rules {
    pub fn new(plan: &Plan, host: SimulatedHost) -> Self {
        Self {
            names: plan.guests.iter().map(|guest| guest.name.clone()).collect(),
            host,
            shared: None,
            total_bytes: plan.config.total_bytes,
            headroom_bytes: plan.config.headroom_bytes.unwrap_or(0),
            check_after: plan.config.check_after,
            guests: vec![Watched::default(); plan.guests.len()],
            firsts: BTreeMap::new(),
            limit_bytes: 0,
            turn: 0,
            before: None,
            caches_before: 0,
            available_before: 0,
            moving: None,
            booted: 0,
            operator: None,
            idle: 0,
            short: None,
            settings: 0,
            decisions: 0,
        }
    }

    /// What the processes of an honest guest allocate in a second at most: half of its slack lasts for ten seconds.
    pub fn allocation_max(vm: &SimulatedVm) -> u64 {
        slack_bytes(vm.ram_bytes) / 20
    }

    fn second(&self) -> u64 {
        self.host.time().since_boot.as_secs()
    }

    pub fn booted(&mut self, shared: Arc<SharedState>) {
        (self.shared, self.booted, self.turn) = (Some(shared), self.second(), 0);
        self.idle = self.second();
    }

    pub fn killed(&mut self) {
        (self.shared, self.before, self.moving) = (None, None, None);
    }

    pub fn fault(&mut self, guest: usize) {
        self.guests[guest].fault = self.second();
    }

    pub fn operator_moves(&mut self, accepted: bool) {
        if accepted {
            self.operator = Some(self.second());
        }
    }

    fn snapshot(&self) -> Option<Arc<Snapshot>> {
        self.shared.as_ref().map(|shared| shared.snapshot())
    }

    fn limits(snapshot: &Snapshot, name: &str) -> Option<Settings> {
        let vm = snapshot.host.vms.iter().find(|vm| vm.vm == name);
        vm.map(|vm| vm.settings)
    }

    fn running(&self) -> impl Iterator<Item = (usize, SimulatedVm)> + '_ {
        let names = self.names.iter().enumerate();
        names.filter_map(|(index, name)| Some((index, self.host.vm(name)?)))
    }

    /// Whether a guest has been honest and has followed for a while.
    fn is_honest(&self, guest: usize, vm: &SimulatedVm) -> bool {
        let follows = matches!(vm.follows, BalloonBehaviour::Pace(pace) if pace >= 32 * MIB);
        let honest = vm.reports == Reports::True && follows && vm.answers && vm.disk_answers;
        honest && self.second() >= self.guests[guest].fault + WATCH
    }

    fn first(&self, name: &str, vm: &SimulatedVm) -> u64 {
        let first = self.firsts.get(vm.uuid.as_deref().unwrap_or(name));
        first.map_or(vm.ram_bytes, |(first, _)| *first)
    }

    /// Follows the VMs' first sizes as a turn does.
    fn follow_turn(&mut self) {
        let now_ms = u64::try_from(self.host.time().since_boot.as_millis()).unwrap_or(0);
        let running: Vec<_> = self.running().collect();
        for (index, vm) in &running {
            let (name, size) = (&self.names[*index], vm.size_bytes());
            let polled = vm.polled.is_some_and(|(at_ms, ..)| at_ms == now_ms);
            if !polled {
                continue;
            }
            let key = vm.uuid.clone().unwrap_or_else(|| name.clone());
            let (first, ram) = self.firsts.entry(key).or_insert((size, vm.ram_bytes));
            let plugged = vm.ram_bytes.saturating_sub(*ram);
            let unplugged = ram.saturating_sub(vm.ram_bytes);
            *first = match unplugged {
                0 => *first + plugged,
                _ => first.saturating_sub(unplugged).max(size.min(*first)),
            };
            *ram = vm.ram_bytes;
        }
        let firsts = running
            .iter()
            .map(|(index, vm)| self.first(&self.names[*index], vm));
        self.limit_bytes = self.total_bytes.unwrap_or(firsts.sum());
    }

    /// Watches for processes that were killed, before each second.
    pub fn watch_guests(&mut self) -> Result<(), Finding> {
        let second = self.second();
        let running: Vec<_> = self.running().collect();
        for (index, vm) in &running {
            let watched = &mut self.guests[*index];
            if watched.process.0 != vm.pid {
                *watched = Watched {
                    process: (vm.pid, vm.oom_kills),
                    fault: second,
                    ..Watched::default()
                };
            }
            let killed = vm.oom_kills > watched.process.1;
            watched.process.1 = vm.oom_kills;
            if killed && self.is_starved(*index, vm, &running) {
                return Err(Finding::by(
                    "an honest guest ran out of memory",
                    vm_text(vm),
                ));
            }
        }
        Ok(())
    }

    /// Whether the daemon could have given memory to a guest whose processes were killed.
    fn is_starved(&self, guest: usize, vm: &SimulatedVm, running: &[(usize, SimulatedVm)]) -> bool {
        let (second, name) = (self.second(), &self.names[guest]);
        let lately = |at: Option<u64>, within: u64| at.is_some_and(|at| second < at + within);
        let Some(snapshot) = self.snapshot() else {
            return false;
        };
        let limits = |name: &str| Self::limits(&snapshot, name);
        let Some(own) = limits(name) else {
            return false;
        };
        let slack = slack_bytes(vm.ram_bytes);
        let whole = own.baseline_bytes.min(vm.ram_bytes);
        let is_owed = vm.direct_bytes + slack < whole && vm.used_bytes + slack < whole;
        let acted = second >= self.idle + WATCH && self.turn > 8 && !lately(self.short, WITHHELD);
        if !(self.is_honest(guest, vm) && own.managed && is_owed && acted) {
            return false;
        }
        let reserved = self.host.known_reserved_bytes();
        // A host that was short withholds all but what it has beyond twice its headroom.
        let spare = (self.host.available_bytes()).saturating_sub(self.headroom_bytes * 2);
        let most = self.short.map_or(u64::MAX, |_| reserved + spare);
        let limit_bytes = self.limit_bytes.min(most);
        let free = limit_bytes.saturating_sub(reserved);
        let cached = vm.cache_bytes.unwrap_or(0);
        let baselines = running
            .iter()
            .filter_map(|(index, _)| limits(&self.names[*index]));
        let all_fit = baselines.map(|limits| limits.baseline_bytes).sum::<u64>() <= limit_bytes;
        let others_give = all_fit
            && running.iter().all(|(index, vm)| {
                let managed = limits(&self.names[*index]).is_some_and(|limits| limits.managed);
                self.is_honest(*index, vm) && managed
            });
        let was_taken = lately(self.guests[guest].taken, WATCH);
        free >= slack || cached >= CACHE_LEAST + slack || others_give || was_taken
    }

    pub fn tick_begins(&mut self) {
        self.before = self.snapshot();
        self.caches_before = self.caches();
        self.available_before = self.host.available_bytes();
    }

    /// What the caches of VMs that may be moved, and whose disks answer, can give.
    fn caches(&self) -> u64 {
        let Some(snapshot) = &self.before else {
            return 0;
        };
        let second = self.second();
        let can_give = self.running().filter_map(|(index, vm)| {
            let managed = Self::limits(snapshot, &self.names[index])?.managed;
            let known = second >= self.guests[index].fault + WATCH && vm.disk_answers;
            let bytes = vm.cache_bytes?.saturating_sub(CACHE_LEAST);
            (managed && known).then_some(bytes)
        });
        can_give.sum()
    }

    /// Judges what was set since the last call: in a tick, or by an operator's command.
    pub fn judge(&mut self, is_tick: bool) -> Result<(), Finding> {
        let (before, second) = (self.before.clone(), self.second());
        let limit = self.limit_bytes;
        let snapshot = self.snapshot();
        if let Some(snapshot) = &snapshot
            && snapshot.host.turn != self.turn
        {
            self.turn = snapshot.host.turn;
            self.follow_turn();
            self.judge_decision(snapshot, before.as_deref())?;
        }
        let limit = limit.max(self.limit_bytes);
        let mut is_cache_shrunk = false;
        for setting in self.host.take_settings() {
            self.settings += 1;
            is_cache_shrunk |= setting.is_cache && setting.target_bytes < setting.had_bytes;
            self.judge_setting(&setting, limit, second)?;
            if is_tick && let Some(before) = &before {
                self.judge_right(&setting, before)?;
            }
        }
        let Some(before) = before.filter(|_| is_tick) else {
            return Ok(());
        };
        let acts = before.host.mode == Mode::Act && !before.host.paused;
        if !acts {
            self.idle = second;
        }
        if self.available_before < self.headroom_bytes {
            self.short = Some(second);
            let had = self.caches_before;
            if acts && had > MIB && !is_cache_shrunk && second >= self.booted + WATCH {
                return Err(Finding::by(
                    "no cache shrinks although the host is short",
                    had,
                ));
            }
        }
        Ok(())
    }

    fn newest(&self) -> Option<Decision> {
        let history = &self.shared.as_ref()?.history;
        history.decisions(None, None, 1).into_iter().next()
    }

    fn judge_setting(&mut self, setting: &Setting, limit: u64, second: u64) -> Result<(), Finding> {
        let (had, has) = setting.reserved_bytes;
        if has > had && has > limit + MIB {
            let newest = self.newest().map(|newest| (newest.kind, newest.steps));
            let how = (setting, limit >> 20, has >> 20, newest);
            return Err(Finding::by("memory is given that is not there", how));
        }
        let index = self.names.iter().position(|name| *name == setting.vm);
        let (Some(index), Some(vm)) = (index, self.host.vm(&setting.vm)) else {
            return Ok(());
        };
        let changes = setting.target_bytes.abs_diff(setting.had_bytes) > MIB;
        self.guests[index].is_resized |= changes;
        self.judge_squeeze(setting, index, &vm)?;
        let takes = setting.target_bytes + MIB < setting.had_bytes
            && setting
                .before_bytes
                .is_none_or(|before| setting.target_bytes < before);
        if setting.is_cache || !takes {
            return Ok(());
        }
        self.guests[index].taken = Some(second);
        let silent = vm.reports == Reports::False(Statistic::Available, Lie::Missing)
            && second >= self.guests[index].fault + WATCH;
        let fresh = setting.polled_ms.is_some_and(|(polled, reported)| {
            polled < 1000 && reported.is_some_and(|age| age <= REPORT_AGE_MAX_MS)
        });
        if !fresh || silent {
            return Err(Finding::by("memory is taken on stale data", setting));
        }
        if self.is_honest(index, &vm) && setting.target_bytes < setting.used_bytes {
            return Err(Finding::by(
                "memory is taken that an honest guest uses",
                setting,
            ));
        }
        Ok(())
    }

    /// A guest whose processes are killed by its own reports, which come every two seconds, is not shrunk on by the same
    /// decision. Others may begin: what it has above its baseline is not its own.
    fn judge_squeeze(
        &mut self,
        setting: &Setting,
        guest: usize,
        vm: &SimulatedVm,
    ) -> Result<(), Finding> {
        let second = self.second();
        let takes = setting.target_bytes + MIB <= setting.had_bytes
            && setting
                .before_bytes
                .is_none_or(|before| setting.target_bytes < before);
        let has_told =
            vm.reports == Reports::Distress && second >= self.guests[guest].fault + WATCH;
        if setting.is_cache || !takes || !has_told {
            return Ok(());
        }
        let Some(newest) = self.newest() else {
            return Ok(());
        };
        let squeeze = self.guests[guest]
            .squeeze
            .filter(|(id, _)| *id == newest.id);
        let (_, first) = *self.guests[guest]
            .squeeze
            .insert(squeeze.unwrap_or((newest.id, second)));
        match second > first + NOTICE {
            true => Err(Finding::by(
                "memory is taken on and on from a guest that kills processes",
                (setting, newest.kind, newest.steps),
            )),
            false => Ok(()),
        }
    }

    /// Whether the daemon may set this at all.
    fn judge_right(&self, setting: &Setting, before: &Snapshot) -> Result<(), Finding> {
        if before.host.paused {
            return Err(Finding::by("memory is moved while it is paused", setting));
        }
        let operator = self
            .operator
            .is_some_and(|at| self.second() < at + 2 * MOVE_MAX);
        // Guests that a decision squeezed are watched by any daemon.
        let history = self.shared.as_ref().map(|shared| &shared.history);
        let decisions = history.map(|history| history.decisions(None, None, 4));
        // A proposal may be newer than the decision by which memory is moved.
        let moved = decisions
            .into_iter()
            .flatten()
            .find(|decision| decision.state != State::Proposed);
        let is_relief = moved.is_some_and(|decision| decision.reason.starts_with(RELIEF));
        // A target that is reset to what a VM has moves nothing.
        let moves = setting.target_bytes != setting.had_bytes;
        if before.host.mode != Mode::Act && moves && !operator && !is_relief {
            return Err(Finding::by(
                "memory is moved by a daemon that does not act",
                setting,
            ));
        }
        // One that has started since may have other settings.
        let running = self.host.vm(&setting.vm).map(|vm| vm.pid);
        let vms = before.host.vms.iter();
        let mut same = vms.filter(|vm| vm.vm == setting.vm && Some(vm.pid) == running);
        if same.any(|vm| !vm.settings.managed) {
            return Err(Finding::by(
                "memory of a VM is moved that nobody may move",
                setting,
            ));
        }
        Ok(())
    }

    /// Judges the decision in progress at the end of a turn.
    fn judge_decision(
        &mut self,
        snapshot: &Snapshot,
        before: Option<&Snapshot>,
    ) -> Result<(), Finding> {
        let second = self.second();
        let Some(id) = snapshot.host.moving else {
            self.moving = None;
            return Ok(());
        };
        if let Some((moving, since)) = self.moving
            && moving == id
        {
            let longest = MOVE_MAX + 7 * self.check_after.as_secs() + 60;
            return match second > since + longest {
                true => Err(Finding::by("a decision does not end", id)),
                false => Ok(()),
            };
        }
        self.moving = Some((id, second));
        self.decisions += 1;
        let history = self.shared.as_ref().map(|shared| &shared.history);
        let Some(decision) = history.and_then(|history| history.decision(id)) else {
            return Err(Finding::by("a decision in progress is not recorded", id));
        };
        let is_relief = decision.reason.starts_with(RELIEF);
        for step in &decision.steps {
            // It began before this turn, or in it.
            let limits = [Some(snapshot), before].into_iter().flatten();
            let limits = limits.filter_map(|snapshot| Self::limits(snapshot, &step.vm));
            let limits: Vec<_> = limits.collect();
            let (from, to) = (step.from.size_bytes(), step.to.size_bytes());
            // One that has ended meanwhile is judged by its settings alone.
            let ram = self.host.vm(&step.vm).map_or(u64::MAX, |vm| vm.ram_bytes);
            let is_kept = |limits: &Settings| match decision.kind {
                Kind::GiveBack if is_relief && step.to.direct_bytes > step.from.direct_bytes => {
                    step.to.direct_bytes <= limits.baseline_bytes.min(ram) + SAME
                }
                Kind::GiveBack if is_relief => to + SAME >= limits.baseline_bytes.min(from),
                Kind::Divide => {
                    // A cache that is not kept adds nothing to what it can have.
                    let most = ram.max(limits.baseline_bytes);
                    // A minimum above the maximum wins.
                    let largest = limits.max_bytes.max(limits.min_bytes);
                    to + SAME >= limits.min_bytes.min(from).min(most)
                        && to <= largest.max(from) + SAME
                }
                _ => true,
            };
            let index = self.names.iter().position(|name| *name == step.vm);
            let is_known = index.is_some_and(|index| second >= self.guests[index].fault + WATCH)
                && self.host.vm(&step.vm).is_some_and(|vm| vm.answers);
            let most = ram.saturating_add(SAME);
            if decision.kind == Kind::Divide && is_known && step.to.direct_bytes > most {
                let how = (&decision.reason, step, ram);
                return Err(Finding::by("a plan gives a VM more than its RAM", how));
            }
            if !limits.is_empty() && !limits.iter().any(is_kept) {
                let how = (&decision.reason, step, limits);
                return Err(Finding::by("a decision exceeds the limits of a VM", how));
            }
        }
        Ok(())
    }

    /// Judges a host that was short for a while, without other faults: it has enough, or the VMs have given all that is
    /// withheld from them. What a VM that may not be moved took beyond its baseline, the others do not owe.
    pub fn host_was_short(&self) -> Result<(), Finding> {
        let Some(snapshot) = self.snapshot() else {
            return Ok(());
        };
        let memory = &snapshot.host.memory;
        let held = self.running().map(|(index, vm)| {
            let limits = Self::limits(&snapshot, &self.names[index]);
            let fixed = limits.filter(|limits| !limits.managed);
            let most = fixed.map_or(u64::MAX, |limits| limits.baseline_bytes);
            vm.size_bytes().min(most)
        });
        let held: u64 = held.sum();
        let is_enough = self.host.available_bytes() + SAME >= self.headroom_bytes;
        match is_enough || held <= memory.divided_bytes + SAME {
            true => Ok(()),
            false => Err(Finding::by(
                "VMs keep memory that the host lacks",
                (memory, &snapshot.host.warnings, self.newest()),
            )),
        }
    }

    /// Judges a host that has had enough for a while: nothing is withheld.
    pub fn host_has_enough(&self) -> Result<(), Finding> {
        let memory = self.snapshot().map(|snapshot| snapshot.host.memory);
        match memory.filter(|memory| memory.divided_bytes + SAME < self.limit_bytes) {
            None => Ok(()),
            Some(memory) => Err(Finding::by(
                "memory is withheld although the host has enough",
                (memory, self.limit_bytes),
            )),
        }
    }

    /// Judges a rollback that has ended, without faults: if it is said to be complete, it is.
    pub fn rolled_back(&self, rollback: &Decision) -> Result<(), Finding> {
        if rollback.state != State::Kept {
            return Ok(());
        }
        for step in &rollback.steps {
            let size = self.host.vm(&step.vm).map(|vm| vm.size_bytes());
            if size.is_some_and(|size| size.abs_diff(step.to.size_bytes()) > SAME) {
                return Err(Finding::by(
                    "a VM does not have what it had after a rollback",
                    (size, step),
                ));
            }
        }
        Ok(())
    }

    /// The VMs that must have what they had after the daemon's end; `None` if there is not enough memory for that: others
    /// have taken some by themselves, or the configured total is less than what all had.
    pub fn to_be_returned(&self) -> Option<Vec<usize>> {
        let running: Vec<_> = self.running().collect();
        let resized = |index: usize| self.guests[index].is_resized;
        let wanted = running.iter().map(|(index, vm)| {
            let first = self.first(&self.names[*index], vm).min(vm.ram_bytes);
            if resized(*index) {
                first
            } else {
                first.max(vm.size_bytes())
            }
        });
        if wanted.sum::<u64>() > self.limit_bytes {
            return None;
        }
        let snapshot = self.snapshot()?;
        let managed =
            |name: &str| Self::limits(&snapshot, name).is_some_and(|limits| limits.managed);
        let all = running.iter().map(|(index, _)| *index);
        let indices: Vec<_> = all.filter(|index| resized(*index)).collect();
        let is_all = indices.iter().all(|index| managed(&self.names[*index]));
        is_all.then_some(indices)
    }

    /// What a VM has above what it had at first, and no decision gave it: it stays.
    fn kept(&self, name: &str, vm: &SimulatedVm) -> u64 {
        let above = vm.size_bytes().saturating_sub(self.first(name, vm));
        let process = ProcessId {
            pid: vm.pid,
            start_ticks: vm.start_ticks,
        };
        let mark = self.shared.as_ref().map(|shared| shared.history.mark(name));
        mark.map_or(0, |mark| mark.kept_above_bytes(process, above))
    }

    /// The daemon gives back what VMs had: what others gave them above that counts beside what is allocated.
    pub fn return_begins(&mut self) {
        let running = self.running();
        let kept = running.map(|(index, vm)| self.kept(&self.names[index], &vm));
        self.limit_bytes += kept.sum::<u64>();
    }

    fn lacks(&self, guest: usize) -> Option<String> {
        let name = &self.names[guest];
        let vm = self.host.vm(name)?;
        let first = self.first(name, &vm);
        let own = first.min(vm.ram_bytes).saturating_sub(CACHE_LEAST);
        let has_less = vm.direct_bytes + SAME < own;
        let has_more = vm.size_bytes() > first + self.kept(name, &vm) + CACHE_LEAST + SAME;
        (has_less || has_more).then(|| format!("{name} had {} MiB: {}", first >> 20, vm_text(&vm)))
    }

    pub fn are_returned(&self, guests: &[usize]) -> bool {
        guests.iter().all(|guest| self.lacks(*guest).is_none())
    }

    pub fn not_returned(&self, guests: &[usize]) -> Finding {
        let lacks: Vec<_> = guests
            .iter()
            .filter_map(|guest| self.lacks(*guest))
            .collect();
        let history = self.shared.as_ref().map(|shared| &shared.history);
        let newest = history.map(|history| history.decisions(None, None, 2));
        Finding::by(
            "a VM does not have what it had after the daemon's end",
            (lacks, newest),
        )
    }
}

fn vm_text(vm: &SimulatedVm) -> String {
    format!(
        "RAM {} MiB, own {}, cache {:?}, used {}, {:?}, {:?}",
        vm.ram_bytes >> 20,
        vm.direct_bytes >> 20,
        vm.cache_bytes.map(|bytes| bytes >> 20),
        vm.used_bytes >> 20,
        vm.reports,
        vm.follows
    )
}
