//! A daemon that moves memory by curves from traps.

use std::fs;

use plimsoll_protocol::decision::{Initiator, Kind, State};
use plimsoll_protocol::request::{Choice, SettingsChange};
use plimsoll_protocol::vm::VmSummary;

use rustix::process::Signal;

use crate::rig::{
    Daemon, DaemonDirectory, MIB, alone, balloon_to, beside_another, boot, signal, wait,
    with_balloon,
};

/// One guest has more than its rule allows, until that is changed by hand.
const RULES: &str = "
    mode = \"act\"
    [policy]
    cooldown = \"5s\"
    [[vm]]
    name = \"rich\"
    max = \"176M\"
    [[vm]]
    name = \"poor\"
    max = \"128M\"
";

/// Waits until the guests have so many MiB: what is told of the host is of the last turn.
fn until_sizes(daemon: &Daemon<'_>, rich_mib: u64, poor_mib: u64) {
    daemon.until("the guests' sizes", |host| {
        let has = |name: &str, mib: u64| {
            let is = |vm: &VmSummary| vm.vm == name && vm.direct_bytes == mib * MIB;
            host.vms.iter().any(is)
        };
        has("rich", rich_mib) && has("poor", poor_mib)
    });
}

#[test]
fn a_guest_gives_what_it_does_not_need_until_it_is_taken_back_or_paused() {
    alone(|| {
        let [mut rich, mut poor] = boot([
            with_balloon("rich", 256, "workload=zipf mib=16"),
            with_balloon("poor", 256, "workload=zipf mib=32"),
        ]);
        balloon_to(&mut poor, 128);
        let place = DaemonDirectory::new();
        let daemon = place.start(RULES);
        let moved = daemon.until_state(State::Kept);
        assert_eq!((moved.kind, moved.by), (Kind::Divide, Initiator::Daemon));
        until_sizes(&daemon, 176, 128);
        let host = daemon.host();
        assert_eq!(host.memory.divided_bytes, 384 * MIB);
        assert_eq!(host.memory.spare_bytes, 80 * MIB);
        assert!(daemon.client().replay(moved.id).unwrap().agrees);

        // What is promised now binds a rollback too.
        let more = SettingsChange {
            max_bytes: Some(256 * MIB),
            // With this it lacks nothing now, so the daemon leaves it to us.
            baseline_bytes: Some(176 * MIB),
            ..SettingsChange::default()
        };
        daemon.client().set("rich", &more).unwrap();
        let taken = daemon
            .client()
            .roll_back(Choice {
                decision: Some(moved.id),
            })
            .unwrap();
        assert_eq!(
            (taken.kind, taken.by),
            (Kind::Rollback, Initiator::Operator)
        );
        daemon.until_decision("the end of a rollback", |decision| {
            decision.id == taken.id && decision.state == State::Kept
        });
        daemon.client().pause().unwrap();
        until_sizes(&daemon, 256, 128);
        let decision = daemon.client().decision(moved.id).unwrap();
        assert_eq!(decision.taken_back_by, Some(taken.id));

        // With its limit again, and beyond the cooldown, only the pause holds it.
        let reset = SettingsChange {
            reset: true,
            ..SettingsChange::default()
        };
        daemon.client().set("rich", &reset).unwrap();
        daemon.pass_turns(8);
        until_sizes(&daemon, 256, 128);
        assert_eq!(daemon.decisions()[0].id, taken.id);
        daemon.client().resume().unwrap();
        daemon.until_decision("the same division again", |decision| {
            decision.kind == Kind::Divide && decision.id > taken.id && decision.state == State::Kept
        });
        until_sizes(&daemon, 176, 128);
        rich.assert_goes_on();
        poor.assert_goes_on();

        // All of it is known to the next daemon.
        let (status, took) = daemon.end_by(Signal::TERM);
        assert_eq!(status.code(), Some(0));
        println!("ended in {took:?}");
        let daemon = place.start("");
        let kinds: Vec<_> = daemon.decisions().iter().map(|known| known.kind).collect();
        assert!(
            kinds.ends_with(&[Kind::Divide, Kind::Rollback, Kind::Divide]),
            "{kinds:?}"
        );
        let past = daemon.client().history("rich", None, None, None).unwrap();
        for size in [256, 176] {
            let had = |bytes| {
                past.samples
                    .iter()
                    .any(|sample| sample.direct_bytes == bytes)
            };
            assert!(had(size * MIB), "{size}: {past:?}");
        }
        let rich = daemon.vm("rich");
        assert_eq!(rich.direct_bytes, 176 * MIB);
        // That is what it was first found with: this daemon has no rules.
        assert_eq!(rich.settings.baseline_bytes, 256 * MIB);
    });
}

#[test]
fn a_configuration_with_which_no_daemon_starts_keeps_no_memory_from_a_guest() {
    beside_another(|| {
        let [mut rich] = boot([with_balloon("rich", 192, "workload=zipf mib=16")]);
        let place = DaemonDirectory::new();
        let daemon = place.start(RULES);
        daemon.until("the guest's size", |host| {
            host.vms.iter().any(|vm| vm.direct_bytes == 176 * MIB)
        });
        daemon.until_state(State::Kept);
        daemon.end_by(Signal::KILL);
        place.configure(
            "turn_intervall = \"1s\"\n[guard]\non_exit = \"give-back\"\n\
             [tcp]\nlisten = \"0.0.0.0:7373\"\ntoken_file = \"/nonexistent\"\n",
        );
        place.refused();
        // One that does not answer is named, and gets it the next time.
        signal(rich.guest.pid(), Signal::STOP);
        let said = place.give_back(5);
        signal(rich.guest.pid(), Signal::CONT);
        assert!(said.contains("rich: its monitor, or libvirt,"), "{said}");
        let said = place.give_back(0);
        for error in ["unknown key 'turn_intervall'", "in plain text"] {
            assert!(said.contains(error), "{said}");
        }
        let actual = rich.guest.qmp().unwrap().balloon_actual_bytes();
        assert_eq!(actual.unwrap(), 192 * MIB, "{said}");
        rich.assert_goes_on();
    });
}

/// The process that gives memory back if the daemon is killed.
fn helper_of(daemon: &Daemon<'_>) -> Option<u32> {
    let pid = daemon.pid();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let mut children = children.split_whitespace();
    let is_helper = |child: &&str| {
        // That of a dead process is empty.
        let line = fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains("--when-orphaned")
    };
    children.find(is_helper)?.parse().ok()
}

#[test]
fn memory_comes_back_from_a_killed_daemon_also_if_the_process_that_gives_it_back_was_killed() {
    beside_another(|| {
        let [mut rich] = boot([with_balloon("rich", 192, "workload=zipf mib=16")]);
        let place = DaemonDirectory::new();
        let daemon = place.start(&format!("{RULES}[guard]\non_exit = \"give-back\"\n"));
        daemon.until_state(State::Kept);
        let first = wait("a helper", || helper_of(&daemon));
        signal(first, Signal::KILL);
        wait("another helper", || {
            helper_of(&daemon).filter(|&helper| helper != first)
        });
        daemon.end_by(Signal::KILL);
        wait("the size that it had", || {
            let actual = rich.guest.qmp().unwrap().balloon_actual_bytes().unwrap();
            (actual == 192 * MIB).then_some(())
        });
        rich.assert_goes_on();
    });
}
