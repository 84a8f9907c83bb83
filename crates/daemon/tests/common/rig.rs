//! The loop on a simulated host, for tests that advance it a second at a time.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use plimsoll_daemon::clock::Clock;
use plimsoll_daemon::config::{Config, VmRule};
use plimsoll_daemon::history::History;
use plimsoll_daemon::shared::{Command, Reply, RequestRefusal, SharedState, Snapshot};
use plimsoll_daemon::turn::{TICK, Turns};
use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount};
use plimsoll_protocol::decision::{Decision, Mode};
use plimsoll_protocol::request::Choice;
use plimsoll_protocol::vm::Promise;
use tokio::sync::oneshot;

use crate::simulated::{SimulatedHost, SimulatedVm};

pub const MIB: u64 = 1 << 20;

/// A curve through points of MiB and miss ratio, with a step at each MiB between them.
pub fn curve(points: &[(u64, f64)]) -> MissRatioCurve {
    let mut steps = Vec::new();
    for pair in points.windows(2) {
        let ((from, high), (to, low)) = (pair[0], pair[1]);
        for mib in from..to {
            let share = (mib - from) as f64 / (to - from) as f64;
            let ratio = high + (low - high) * share;
            steps.push(CurvePoint::exact(PageCount(mib * 256), ratio));
        }
    }
    let (last, ratio) = points[points.len() - 1];
    steps.push(CurvePoint::exact(PageCount(last * 256), ratio));
    MissRatioCurve::new(steps, 100_000).unwrap()
}

/// Its misses rise a little with every megabyte less.
pub fn web() -> MissRatioCurve {
    curve(&[(16, 0.9), (512, 0.3), (1024, 0.25)])
}

/// More memory reduces its misses a lot.
pub fn search() -> MissRatioCurve {
    curve(&[(16, 0.95), (512, 0.6), (900, 0.05), (1024, 0.04)])
}

/// It reads sequentially: beyond its hot set memory does not help.
pub fn scan() -> MissRatioCurve {
    curve(&[(16, 0.9), (160, 0.5), (1024, 0.5)])
}

/// A loop on a simulated host, a second at a time.
pub struct Rig {
    pub host: SimulatedHost,
    pub turns: Turns<SimulatedHost>,
    pub shared: Arc<SharedState>,
    pub commands: Receiver<Command>,
    pub now: Instant,
}

pub fn config(mode: Mode) -> Config {
    Config {
        mode,
        turn_interval: Duration::from_secs(5),
        cooldown: Duration::from_secs(60),
        check_after: Duration::from_secs(20),
        history: None,
        vms: vec![VmRule {
            promise: Some(Promise::on_loss(0.25)),
            ..VmRule::for_name("*")
        }],
        ..Config::default()
    }
}

impl Rig {
    pub fn new(config: Config) -> Self {
        Self::with(
            config,
            SimulatedHost::default(),
            Arc::new(History::nowhere()),
        )
    }

    pub fn with(config: Config, host: SimulatedHost, history: Arc<History>) -> Self {
        let (sender, commands) = sync_channel(8);
        let shared = Arc::new(SharedState::new(
            Snapshot::before_the_first_turn(&config),
            sender,
            history,
            Clock::new({
                let host = host.clone();
                move || host.time()
            }),
        ));
        let now = Instant::now();
        let reload = Box::new(|| Err("there is none".to_owned()));
        let turns = Turns::new(config, reload, host.clone(), Arc::clone(&shared), now);
        Self {
            host,
            turns,
            shared,
            commands,
            now,
        }
    }

    /// Three VMs of 512 MiB that could have 1 GiB.
    pub fn of_three(config: Config) -> Self {
        let rig = Self::new(config);
        for (pid, (name, truth)) in [("web", web()), ("search", search()), ("scan", scan())]
            .into_iter()
            .enumerate()
        {
            rig.add(u32::try_from(pid).unwrap() + 100, name, truth);
        }
        rig
    }

    pub fn add(&self, pid: u32, name: &str, truth: MissRatioCurve) {
        let mut vm = SimulatedVm::new(pid, 1024 * MIB, truth);
        vm.direct_bytes = 512 * MIB;
        self.host.put(name, vm);
    }

    pub fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.turns.tick(self.now);
            self.host.pass(TICK);
            self.now += TICK;
        }
    }

    pub fn until(&mut self, what: &str, is: impl Fn(&Self) -> bool) {
        for _ in 0..2000 {
            if is(self) {
                return;
            }
            self.pass(1);
        }
        panic!("{what}: {:#?}", self.decisions());
    }

    pub fn ask<T: std::fmt::Debug>(
        &mut self,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, RequestRefusal> {
        let (reply, answer) = oneshot::channel();
        self.shared.command(command(reply)).unwrap();
        let command = self.commands.try_recv().unwrap();
        self.turns.answer(command, self.now);
        answer.blocking_recv().unwrap()
    }

    pub fn apply(&mut self) -> Result<Decision, RequestRefusal> {
        self.ask(|reply| Command::Apply(Choice::default(), reply))
    }

    pub fn decisions(&self) -> Vec<Decision> {
        self.shared.history.decisions(None, None, 100)
    }

    pub fn newest(&self) -> Decision {
        self.decisions().remove(0)
    }

    pub fn mib(&self, vm: &str) -> u64 {
        self.host.vm(vm).unwrap().size_bytes() / MIB
    }

    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.shared.snapshot()
    }
}
