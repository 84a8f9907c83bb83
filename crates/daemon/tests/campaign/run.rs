//! A run of a plan, second by second, under the rules of [`crate::rules`].

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use plimsoll_daemon::clock::Clock;
use plimsoll_daemon::config::Config;
use plimsoll_daemon::history::{History, Limits};
use plimsoll_daemon::shared::{Command, Reply, RequestRefusal, SharedState, Snapshot};
use plimsoll_daemon::turn::{TICK, Turns};
use plimsoll_flow::SplitMix;
use plimsoll_protocol::decision::{Decision, Mode};
use plimsoll_protocol::request::{Choice, SettingsChange};
use tempfile::TempDir;
use tokio::sync::oneshot;

use crate::plan::{Event, MIB, Numbers, Plan};
use crate::rules::{Finding, Rules};
use crate::simulated::{BalloonBehaviour, Reports, SimulatedHost, SimulatedVm};

/// Time within which, without faults, every VM has what it had: VMs that have more give it at 64 MiB a second, then the
/// others take it at that speed, at most 2 GiB each way; a guest that reports anew, twice the time of a stuck balloon.
pub const RETURN_MAX: Duration = Duration::from_secs(2 * 32 + 30);
/// Time without faults before: withheld memory is allocated again after a minute.
const CALM: u64 = 75;
/// RAM that is available on a host that is short, in MiB, and how long it is.
const SHORT_MIB: u64 = 900;
const SHORT: u64 = 180;
/// RAM of the host that is available without faults, in MiB.
const ENOUGH_MIB: u64 = 1 << 19;

/// What a run covered.
#[derive(Debug, Default, Clone, Copy)]
pub struct Covered {
    pub turns: u64,
    pub seconds: u64,
    pub settings: u64,
    pub decisions: u64,
    /// Runs at whose end the return of all memory was checked, and the longest time that took.
    pub returned: u64,
    pub longest_return_s: u64,
    /// Runs at whose end a decision was rolled back and that was checked.
    pub rolled_back: u64,
    /// Runs at whose end the host was short for a while.
    pub short: u64,
}

impl Covered {
    pub fn add(&mut self, other: &Self) {
        self.turns += other.turns;
        self.seconds += other.seconds;
        self.settings += other.settings;
        self.decisions += other.decisions;
        self.returned += other.returned;
        self.rolled_back += other.rolled_back;
        self.short += other.short;
        self.longest_return_s = self.longest_return_s.max(other.longest_return_s);
    }
}

struct Daemon {
    turns: Turns<SimulatedHost>,
    shared: Arc<SharedState>,
    commands: Receiver<Command>,
}

pub struct Run<'a> {
    plan: &'a Plan,
    /// The configuration, as it is read again.
    config: Arc<Mutex<Config>>,
    host: SimulatedHost,
    file: Option<PathBuf>,
    daemon: Option<Daemon>,
    now: Instant,
    second: u64,
    /// Number of processes so far.
    pids: u32,
    /// What the processes of each guest approach, in bytes.
    needs: Vec<u64>,
    rules: Rules,
    covered: Covered,
    /// Turns of daemons that were killed.
    turns_before: u64,
}

/// Runs a plan with these of its events; the finding is the first one.
pub fn run(plan: &Plan, events: &[(u64, Event)]) -> Result<Covered, (u64, Finding)> {
    let folder = plan
        .is_on_disk
        .then(|| tempfile::tempdir().expect("a folder"));
    let mut run = Run::begin(plan, folder.as_ref().map(TempDir::path));
    let ended = run.all(events).map_err(|finding| (run.second, finding));
    ended.map(|()| run.covered)
}

impl<'a> Run<'a> {
    /// The guests and the daemon start; its history is in this folder, if there is one.
    fn begin(plan: &'a Plan, folder: Option<&Path>) -> Self {
        let host = SimulatedHost::default();
        host.set_available(ENOUGH_MIB * MIB);
        host.take_settings();
        let mut run = Self {
            plan,
            config: Arc::new(Mutex::new(plan.config.clone())),
            now: host.now(),
            rules: Rules::new(plan, host.clone()),
            host,
            file: folder.map(|folder| folder.join("history.redb")),
            daemon: None,
            second: 0,
            pids: 0,
            needs: Vec::new(),
            covered: Covered::default(),
            turns_before: 0,
        };
        for (index, guest) in plan.guests.iter().enumerate() {
            run.needs.push(guest.direct_bytes / 10);
            run.start(index, guest.ram_bytes, false);
            run.host
                .change(&guest.name, |vm| vm.direct_bytes = guest.direct_bytes);
        }
        run.boot(Arc::new(History::nowhere()));
        run
    }

    fn all(&mut self, events: &[(u64, Event)]) -> Result<(), Finding> {
        let mut events = events.iter().peekable();
        for second in 0..self.plan.seconds {
            while let Some((_, event)) = events.next_if(|(at, _)| *at <= second) {
                self.befall(event)?;
            }
            self.pass()?;
        }
        self.end()
    }

    /// Without faults, every VM gets back what it had.
    fn end(&mut self) -> Result<(), Finding> {
        for guest in 0..self.plan.guests.len() {
            self.befall(&Event::Heals(guest))?;
            self.befall(&Event::Needs(guest, 5))?;
            let reset = SettingsChange {
                reset: true,
                ..SettingsChange::default()
            };
            self.befall(&Event::Set(guest, reset))?;
        }
        self.befall(&Event::Reload(Mode::Act))?;
        self.befall(&Event::Resume)?;
        if self.plan.seed % 4 == 1 && !self.plan.has_caches {
            self.befall(&Event::Available(SHORT_MIB))?;
            for _ in 0..SHORT {
                self.pass()?;
            }
            self.rules.host_was_short()?;
            self.covered.short += 1;
        }
        self.befall(&Event::Available(ENOUGH_MIB))?;
        for _ in 0..CALM {
            self.pass()?;
        }
        self.rules.host_has_enough()?;
        if self.plan.seed.is_multiple_of(2) {
            self.roll_back_and_check()?;
        }
        self.return_and_check()?;
        self.covered.turns = self.turns_before + self.turn();
        self.covered.seconds = self.second;
        self.covered.settings = self.rules.settings;
        self.covered.decisions = self.rules.decisions;
        Ok(())
    }

    /// The newest decision is rolled back: its VMs have what it took from them or gave them.
    fn roll_back_and_check(&mut self) -> Result<(), Finding> {
        for _ in 0..60 {
            if self.snapshot().host.moving.is_none() {
                break;
            }
            self.pass()?;
        }
        let Ok(rollback) = self.ask(|reply| Command::Rollback(Choice::default(), reply))? else {
            return Ok(());
        };
        for _ in 0..RETURN_MAX.as_secs() {
            let decision = self.daemon().shared.history.decision(rollback.id);
            if let Some(ended) = decision.filter(|decision| decision.state.has_ended()) {
                self.covered.rolled_back += 1;
                return self.rules.rolled_back(&ended);
            }
            self.time_passes();
            self.tick()?;
        }
        Err(Finding::new("a rollback without faults does not end"))
    }

    /// The daemon ends: all VMs that it resized have what they had.
    fn return_and_check(&mut self) -> Result<(), Finding> {
        let Some(resized) = self.rules.to_be_returned() else {
            return Ok(());
        };
        drop(self.ask(Command::Pause)?);
        drop(self.ask(Command::Resume)?);
        self.rules.return_begins();
        let now = self.now;
        self.daemon().turns.begin_return(now);
        self.rules.judge(false)?;
        for seconds in 0..=RETURN_MAX.as_secs() {
            if self.rules.are_returned(&resized) {
                self.covered.returned += 1;
                self.covered.longest_return_s = seconds;
                return Ok(());
            }
            self.time_passes();
            self.guests_go_on()?;
            self.rules.tick_begins();
            let now = self.now;
            self.daemon().turns.goes_on_returning(now);
            self.rules.judge(true)?;
        }
        Err(self.rules.not_returned(&resized))
    }

    /// Starts the daemon.
    fn boot(&mut self, nowhere: Arc<History>) {
        let config = self.config();
        let history = match &self.file {
            Some(path) => {
                let opened = History::open(path, Limits::of(&config));
                Arc::new(opened.expect("no other daemon has it open").0)
            }
            None => nowhere,
        };
        let (sender, commands) = sync_channel(8);
        let clock_host = self.host.clone();
        let shared = Arc::new(SharedState::new(
            Snapshot::before_the_first_turn(&config),
            sender,
            history,
            Clock::new(move || clock_host.time()),
        ));
        let read = Arc::clone(&self.config);
        let reload =
            Box::new(move || Ok(read.lock().unwrap_or_else(PoisonError::into_inner).clone()));
        let turns = Turns::new(
            config,
            reload,
            self.host.clone(),
            Arc::clone(&shared),
            self.now,
        );
        self.rules.booted(Arc::clone(&shared));
        self.daemon = Some(Daemon {
            turns,
            shared,
            commands,
        });
    }

    fn config(&self) -> Config {
        self.config
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("it runs")
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        self.daemon.as_ref().expect("it runs").shared.snapshot()
    }

    fn turn(&self) -> u64 {
        self.snapshot().host.turn
    }

    /// A second.
    fn pass(&mut self) -> Result<(), Finding> {
        self.tick()?;
        self.time_passes();
        Ok(())
    }

    fn time_passes(&mut self) {
        self.host.pass(TICK);
        self.now += TICK;
        self.second += 1;
    }

    fn tick(&mut self) -> Result<(), Finding> {
        self.guests_go_on()?;
        let now = self.now;
        self.rules.tick_begins();
        self.daemon().turns.tick(now);
        self.rules.judge(true)
    }

    fn guests_go_on(&mut self) -> Result<(), Finding> {
        for (index, guest) in self.plan.guests.iter().enumerate() {
            let need = self.needs[index];
            let mut numbers = Numbers(SplitMix(self.plan.seed ^ self.second << 8 ^ index as u64));
            self.host.change(&guest.name, |vm| {
                let most = Rules::allocation_max(vm);
                if vm.used_bytes > need {
                    vm.used_bytes = need.max(vm.used_bytes.saturating_sub(8 * most));
                } else {
                    vm.allocate((need - vm.used_bytes).min(numbers.within(0, most)));
                }
            });
        }
        self.rules.watch_guests()
    }

    fn ask<T: std::fmt::Debug>(
        &mut self,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<Result<T, RequestRefusal>, Finding> {
        let (reply, answer) = oneshot::channel();
        let now = self.now;
        let daemon = self.daemon();
        daemon
            .shared
            .command(command(reply))
            .expect("there is room");
        let command = daemon.commands.try_recv().expect("it was sent");
        daemon.turns.answer(command, now);
        let answer = answer.blocking_recv().expect("it is answered");
        self.rules.judge(false)?;
        Ok(answer)
    }

    /// Starts a guest, in place of one that runs.
    fn start(&mut self, index: usize, ram_bytes: u64, is_other: bool) {
        let guest = &self.plan.guests[index];
        self.pids += 1;
        let mut vm = SimulatedVm::new(self.pids, ram_bytes, guest.curve.clone());
        let since_boot = self.host.time().since_boot;
        vm.start_ticks = since_boot.as_secs() * 100;
        let before = self.host.vm(&guest.name).and_then(|vm| vm.uuid);
        let version = match is_other {
            true => self.pids,
            false => 0,
        };
        let uuid = || {
            before
                .filter(|_| !is_other)
                .unwrap_or(format!("{index}-{version}"))
        };
        vm.uuid = guest.has_uuid.then(uuid);
        vm.references_per_second = guest.references_per_second;
        vm.follows = BalloonBehaviour::Pace(guest.pace);
        vm.cache_bytes = self.plan.has_caches.then_some(0);
        vm.counts = guest.counts;
        self.needs[index] = self.needs[index].min(ram_bytes / 2);
        self.host.put(&guest.name, vm);
        self.rules.fault(index);
    }

    fn befall(&mut self, event: &Event) -> Result<(), Finding> {
        if let Some(guest) = event.guest()
            && !matches!(event, Event::Needs(..) | Event::Curve(..))
        {
            self.rules.fault(guest);
        }
        let plan = self.plan;
        let name = |guest: usize| plan.guests[guest].name.as_str();
        let host = self.host.clone();
        match event.clone() {
            Event::Reports(guest, reports) => host.change(name(guest), |vm| vm.reports = reports),
            Event::Balloon(guest, follows) => host.change(name(guest), |vm| {
                vm.follows = follows;
                if follows == BalloonBehaviour::Absent {
                    vm.target_bytes = None;
                }
            }),
            Event::Monitor(guest, answers) => host.change(name(guest), |vm| vm.answers = answers),
            Event::Disk(guest, answers) => host.change(name(guest), |vm| vm.disk_answers = answers),
            Event::Heals(guest) => host.change(name(guest), |vm| {
                vm.reports = Reports::True;
                vm.follows = BalloonBehaviour::Pace(plan.guests[guest].pace.max(64 * MIB));
                vm.answers = true;
                vm.disk_answers = true;
            }),
            Event::Ends(guest) => host.end(name(guest)),
            Event::Starts(guest, ram_mib, is_other) => self.start(guest, ram_mib * MIB, is_other),
            Event::Plugs(guest, mib) => host.change(name(guest), |vm| {
                // What it booted with cannot be unplugged.
                let ram = vm.ram_bytes.saturating_add_signed(mib * (1 << 20));
                let ram = ram.clamp(vm.boot_ram_bytes, vm.boot_ram_bytes + 512 * MIB);
                let unplugged = vm.ram_bytes.saturating_sub(ram);
                if unplugged <= vm.available_bytes() / 2 {
                    vm.direct_bytes =
                        vm.direct_bytes + ram.saturating_sub(vm.ram_bytes) - unplugged;
                    vm.ram_bytes = ram;
                }
            }),
            Event::Needs(guest, percent) => {
                self.needs[guest] = plan.guests[guest].direct_bytes / 100 * percent;
            }
            Event::Curve(guest, is_true, curve) => host.change(name(guest), |vm| match is_true {
                true => vm.truth = curve,
                false => vm.claimed = Some(curve),
            }),
            Event::Available(mib) => host.set_available(mib * MIB),
            Event::Stall(ms) => host.stall(Duration::from_millis(ms)),
            Event::Clock(seconds) => host.step_clock(seconds * 1000),
            Event::Pause => drop(self.ask(Command::Pause)?),
            Event::Resume => drop(self.ask(Command::Resume)?),
            Event::Set(guest, change) => {
                drop(self.ask(|reply| Command::Set(name(guest).to_owned(), change, reply))?);
            }
            Event::Apply => {
                let applied =
                    self.ask::<Decision>(|reply| Command::Apply(Choice::default(), reply))?;
                self.rules.operator_moves(applied.is_ok());
            }
            Event::RollBack => {
                let back =
                    self.ask::<Decision>(|reply| Command::Rollback(Choice::default(), reply))?;
                self.rules.operator_moves(back.is_ok());
            }
            Event::Reload(mode) => {
                self.config
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .mode = mode;
                drop(self.ask(Command::Reload)?);
            }
            Event::Restart => self.reboot(),
        }
        Ok(())
    }

    /// Kills the daemon and starts it again.
    fn reboot(&mut self) {
        self.turns_before += self.turn();
        let before = Arc::clone(&self.daemon().shared.history);
        // A file is closed with its last owner.
        let nowhere = match &self.file {
            Some(_) => Arc::new(History::nowhere()),
            None => Arc::clone(&before),
        };
        drop(before);
        self.daemon = None;
        self.rules.killed();
        self.boot(nowhere);
    }
}

#[test]
fn a_guest_that_is_starved_is_found_if_it_could_have_had_memory() {
    let mut plan = Plan::of_seed(0);
    plan.config = Config {
        mode: Mode::Act,
        turn_interval: TICK,
        ..Config::default()
    };
    let starved = |left: u64| {
        let mut run = Run::begin(&plan, None);
        for _ in 0..60 {
            run.pass()?;
        }
        let guest = &plan.guests[0];
        let size = |vm: &mut SimulatedVm| vm.direct_bytes = guest.direct_bytes / 8 * left;
        run.host.change(&guest.name, size);
        // A poll sees what is free.
        run.pass()?;
        run.host.change(&guest.name, |vm| vm.oom_kills += 1);
        run.pass()
    };
    let finding = starved(4).expect_err("half of its memory is free");
    assert_eq!(finding.what, "an honest guest ran out of memory");
    assert_eq!(starved(8), Ok(()), "it has all of its memory");
}
