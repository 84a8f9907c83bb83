//! Nemeses of a tracer and its VM, one after the other at random times, against a guest that verifies its memory and
//! measures its own stalls.
//!
//! `PLIMSOLL_NEMESES_SEED` repeats a run, whose seed is printed; `PLIMSOLL_NEMESES` names the nemeses to be applied, instead
//! of all.

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use plimsoll_rig::host::Delays;
use plimsoll_rig::{PATIENCE, Subject, send, wait_for};
use plimsoll_skip::longer;
use plimsoll_vm::{ConsoleEvent, Qmp};
use rustix::process::Signal;
use serde_json::json;

use crate::nemesis::{
    Group, SAMPLE, STALL_MAX, beyond, boot_growing, enable, enable_snapshots, longest_stall, switch,
};
use crate::refusals::{can_swap, with_swap};
use crate::rig::{Attach, Outcome, PLIMSOLL, quiet_ground, with_backend};

/// Length of a run, in seconds.
const RUN_SECONDS: usize = 20;
/// What a tracer may give as its reason to end, or not to begin.
const REASONS: [&str; 3] = [
    "swap is on",
    "QEMU may need the VM's memory for itself",
    "another userfaultfd",
];

/// What happens to the tracer or its VM; everything is as before when `apply` returns.
struct Nemesis {
    name: &'static str,
    apply: fn(&mut Arena),
    /// Whether the VM stands still for a while also if nobody traces it.
    stops_vm: bool,
}

const NEMESES: [Nemesis; 9] = [
    Nemesis {
        name: "stop",
        apply: |arena| {
            arena.signal(Signal::STOP);
            arena.pause(1500);
            arena.signal(Signal::CONT);
        },
        stops_vm: false,
    },
    Nemesis {
        name: "kill",
        apply: |arena| arena.signal(Signal::KILL),
        stops_vm: false,
    },
    Nemesis {
        name: "interrupt",
        apply: |arena| arena.signal(Signal::INT),
        stops_vm: false,
    },
    Nemesis {
        name: "freeze",
        apply: |arena| {
            arena.freeze("1");
            arena.pause(1500);
            arena.freeze("0");
        },
        stops_vm: false,
    },
    Nemesis {
        name: "monitor",
        apply: |arena| {
            let _held = arena.monitor();
            arena.pause(2000);
        },
        stops_vm: false,
    },
    Nemesis {
        name: "plug",
        apply: Arena::plug,
        stops_vm: true,
    },
    Nemesis {
        name: "migration",
        apply: Arena::migrate,
        stops_vm: true,
    },
    Nemesis {
        name: "snapshot",
        apply: Arena::snapshot,
        stops_vm: true,
    },
    Nemesis {
        name: "swap",
        apply: |arena| {
            if let Some(swap) = &arena.swap {
                let swapping = with_swap(swap).args(["sleep", "0.3"]).status();
                assert!(swapping.unwrap().success());
            }
        },
        stops_vm: false,
    },
];

/// splitmix64.
struct Random(u64);

impl Random {
    /// A number below `end`.
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// Options of tracers that do not trap each access; each second tracer has one of them, the others trap.
const BACKENDS: [&str; 2] = ["--backend scan", FIRST_TOUCH];
const FIRST_TOUCH: &str = "--backend first-touch";

/// A VM with its tracer, and what the nemeses need.
struct Arena {
    subject: Subject,
    tracer: Option<Attach>,
    /// Its options.
    options: &'static str,
    group: Option<Group>,
    /// Where a swap file may be; `None` if none can be turned on.
    swap: Option<PathBuf>,
    random: Random,
    has_dimm: bool,
    /// How tracers ended, and how often.
    outcomes: BTreeMap<String, u32>,
}

impl Arena {
    fn pause(&mut self, most_ms: u64) {
        thread::sleep(Duration::from_millis(self.random.below(most_ms)));
    }

    fn signal(&self, signal: Signal) {
        if let Some(tracer) = &self.tracer {
            // It may have ended.
            let _ = send(tracer.pid(), signal);
        }
    }

    fn freeze(&self, state: &str) {
        if let Some(group) = &self.group {
            group.write("cgroup.freeze", state);
        }
    }

    fn monitor(&mut self) -> Qmp {
        self.subject.guest.qmp().unwrap()
    }

    /// Plugs a DIMM, or unplugs it if the guest lets it go.
    fn plug(&mut self) {
        let mut monitor = self.monitor();
        let object = json!({ "qom-type": "memory-backend-memfd", "id": "more", "size": 128 << 20, "share": true });
        let device = json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" });
        if !self.has_dimm {
            monitor.execute("object-add", object).unwrap();
            monitor.execute("device_add", device).unwrap();
            self.has_dimm = true;
            return;
        }
        // Refused while the guest has not answered the last request.
        let _ = monitor.execute("device_del", json!({ "id": "dimm" }));
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(100));
            if monitor
                .execute("object-del", json!({ "id": "more" }))
                .is_ok()
            {
                self.has_dimm = false;
                break;
            }
        }
    }

    /// Begins a migration that does not converge, and cancels it.
    fn migrate(&mut self) {
        let mut monitor = self.monitor();
        start_migration(&mut monitor, 4);
        self.pause(800);
        monitor.execute("migrate_cancel", json!(null)).unwrap();
        until_over(&mut monitor);
    }

    /// Takes a background snapshot.
    fn snapshot(&mut self) {
        let mut monitor = self.monitor();
        if self.options != FIRST_TOUCH {
            enable_snapshots(&mut monitor);
        } else if enable(&mut monitor, "background-snapshot").is_err() {
            // It keeps the RAM registered.
            *self
                .outcomes
                .entry("snapshot refused".to_owned())
                .or_default() += 1;
            return;
        }
        start_migration(&mut monitor, 1024);
        let status = until_over(&mut monitor);
        switch(&mut monitor, "background-snapshot", false).unwrap();
        *self
            .outcomes
            .entry(format!("snapshot {status}"))
            .or_default() += 1;
    }

    /// Waits until the VM is traced; starts a tracer if there is none any more.
    fn keep_traced(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "the VM is never traced");
            if self.tracer.is_none() {
                let drawn = self.random.below(2 * BACKENDS.len() as u64);
                let drawn = usize::try_from(drawn).unwrap();
                self.options = BACKENDS.get(drawn).copied().unwrap_or(SAMPLE);
            }
            let tracer = self.tracer.get_or_insert_with(|| {
                let mut command = Command::new("sh");
                command.args([
                    "-c",
                    "[ -z \"$1\" ] || echo 0 >\"$1\"; shift; exec \"$@\"",
                    "sh",
                ]);
                let group = self.group.as_ref();
                command.arg(
                    group
                        .map(|group| group.0.join("cgroup.procs"))
                        .unwrap_or_default(),
                );
                command.args([PLIMSOLL, "attach", &self.subject.pid(), "-o", "json"]);
                command.args(with_backend(self.options));
                command.args(["--period", "500ms"]);
                Attach::spawn(&mut command)
            });
            if tracer.has_ended() {
                let outcome = self.tracer.take().map(Attach::end);
                outcome.iter().for_each(|outcome| self.judge(outcome));
                continue;
            }
            if !tracer.lines_so_far().is_empty() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Fails unless a tracer ended for a reason that a nemesis gave it.
    fn judge(&mut self, outcome: &Outcome) {
        let text = &outcome.complaint;
        let is_known = match (outcome.code, outcome.signal) {
            (Some(0), None) => true,
            (Some(1), None) => REASONS.iter().any(|reason| text.contains(reason)),
            (None, Some(signal)) => signal == Signal::KILL.as_raw(),
            _ => false,
        };
        assert!(is_known, "{outcome:?}");
        let why = if text.contains("served no access") {
            "ended by its watchdog".to_owned()
        } else if let Some(reason) = REASONS.iter().find(|&&reason| text.contains(reason)) {
            (*reason).to_owned()
        } else {
            format!("code {:?}, signal {:?}", outcome.code, outcome.signal)
        };
        *self.outcomes.entry(why).or_default() += 1;
    }

    /// Applies a nemesis; returns the guest's longest stall from then until it has completed two more rounds.
    fn apply(&mut self, nemesis: &Nemesis) -> Duration {
        let (from, delays) = (Instant::now(), Delays::watch());
        (nemesis.apply)(self);
        let applied = Instant::now();
        self.subject.until("two more rounds", |log| {
            let rounds = log
                .0
                .iter()
                .filter(|(at, event)| *at > applied && matches!(event, ConsoleEvent::Round { .. }));
            rounds.count() >= 2
        });
        self.subject.assert_sound();
        let stall = self.subject.console().longest_stall(from, Instant::now());
        beyond(stall.unwrap_or_default(), delays)
    }
}

/// Begins to write the VM's state to nowhere, at `mib` MiB a second.
fn start_migration(monitor: &mut Qmp, mib: u64) {
    let parameters = json!({ "max-bandwidth": mib << 20 });
    monitor
        .execute("migrate-set-parameters", parameters)
        .unwrap();
    let uri = json!({ "uri": "exec:cat >/dev/null" });
    monitor.execute("migrate", uri).unwrap();
}

/// Waits until a migration is over; returns how.
fn until_over(monitor: &mut Qmp) -> String {
    wait_for("the end of a migration", PATIENCE, || {
        let answer = monitor.execute("query-migrate", json!(null)).unwrap();
        let status = answer["status"].as_str().unwrap_or_default().to_owned();
        ["completed", "failed", "cancelled"]
            .contains(&&*status)
            .then_some(status)
    })
}

#[test]
fn random_nemeses_hold_no_guest_and_spoil_nothing() {
    let Some(ground) = quiet_ground() else { return };
    let seed = env::var("PLIMSOLL_NEMESES_SEED").ok().map_or_else(
        || {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            u64::from(now.unwrap().subsec_nanos())
        },
        |seed| seed.parse().expect("PLIMSOLL_NEMESES_SEED"),
    );
    println!("PLIMSOLL_NEMESES_SEED={seed}");
    let wanted = env::var("PLIMSOLL_NEMESES").ok();
    let is_wanted = |nemesis: &&Nemesis| {
        let mut names = wanted.iter().flat_map(|names| names.split(' '));
        wanted.is_none() || names.any(|name| name == nemesis.name)
    };
    let nemeses: Vec<_> = NEMESES.iter().filter(is_wanted).collect();
    let folder = tempfile::tempdir().unwrap();
    let swap = folder.path().join("swap");
    let has_swap = nemeses.iter().any(|nemesis| nemesis.name == "swap");
    let mut arena = Arena {
        subject: boot_growing(&ground, "nemeses"),
        tracer: None,
        options: SAMPLE,
        group: Group::make(),
        swap: (has_swap && can_swap(&swap)).then_some(swap),
        random: Random(seed),
        has_dimm: false,
        outcomes: BTreeMap::new(),
    };
    let mut untraced = longest_stall(&mut arena.subject, || ());
    // What the guest stands still for without a tracer, by nemesis.
    let mut alone = BTreeMap::new();
    for nemesis in nemeses.iter().filter(|nemesis| nemesis.stops_vm) {
        alone.insert(nemesis.name, arena.apply(nemesis));
    }

    let mut stalls: BTreeMap<(&str, &str), Vec<Duration>> = BTreeMap::new();
    let end = Instant::now() + Duration::from_secs(longer(RUN_SECONDS) as u64);
    while Instant::now() < end {
        arena.keep_traced();
        arena.pause(700);
        let chosen = arena.random.below(nemeses.len() as u64);
        let nemesis = nemeses[usize::try_from(chosen).unwrap()];
        let stall = arena.apply(nemesis);
        let key = (nemesis.name, arena.options);
        stalls.entry(key).or_default().push(stall);
    }
    arena.keep_traced();
    if let Some(tracer) = arena.tracer.take() {
        tracer.interrupt();
        arena.judge(&tracer.end());
    }
    untraced = untraced.max(longest_stall(&mut arena.subject, || ()));
    println!("untraced {untraced:?}; {:?}", arena.outcomes);
    for ((name, options), stalls) in &stalls {
        let alone = alone.get(name).copied().unwrap_or_default();
        println!("{name}, {options}: longest stalls {stalls:?}, untraced {alone:?}");
        let most = stalls.iter().max().copied().unwrap_or_default();
        assert!(
            most <= STALL_MAX + untraced.max(alone),
            "{name}, {options}: {most:?}"
        );
    }
    arena.subject.assert_no_trap_is_left();
    arena.subject.assert_goes_on();
}
