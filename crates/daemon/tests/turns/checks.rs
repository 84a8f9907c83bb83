//! Checks after a move, and what follows from a promise that is broken.

use std::time::Duration;

use plimsoll_daemon::config::VmRule;
use plimsoll_daemon::shared::Command;
use plimsoll_flow::PageCount;
use plimsoll_protocol::decision::{Decision, Kind, Mode, State, Verdict};
use plimsoll_protocol::request::SettingsChange;
use plimsoll_protocol::vm::VmStatus;

use crate::dividing::{add_idle, config_with_idle};
use crate::rig::{MIB, Rig, config, curve, scan, search, web};
use crate::simulated::{Counts, Reports};

#[test]
fn a_promise_found_broken_is_made_good() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.add(200, "spare", scan());
    // Its curve shows no need, although it needs all its memory.
    rig.host.change("scan", |vm| {
        vm.truth = curve(&[(16, 0.9), (500, 0.8), (512, 0.1)]);
    });
    rig.until("it is taken back", |rig| {
        rig.decisions()
            .iter()
            .any(|decision| decision.state == State::RolledBack)
    });
    // Until it has its memory again.
    rig.until("it is seen", |rig| {
        let snapshot = rig.snapshot();
        let scan = snapshot.host.vms.iter().find(|vm| vm.vm == "scan").unwrap();
        scan.status == VmStatus::Violating
    });
    rig.until("it is back", |rig| rig.newest().state == State::Kept);
    for vm in ["web", "search", "scan"] {
        assert_eq!(rig.mib(vm), 512);
    }
    let decisions = rig.decisions();
    assert_eq!(decisions[0].kind, Kind::Rollback);
    assert_eq!(decisions[1].taken_back_by, Some(decisions[0].id));
    let check = decisions[1]
        .checks
        .iter()
        .find(|check| check.vm == "scan")
        .unwrap();
    assert_eq!(check.verdict, Verdict::Broken);
    assert!(decisions[1].reason.contains("A VM exceeded its limit"));
    // Nothing is taken from it for a while, and others are not kept from what they gain.
    rig.until("others go on", |rig| rig.mib("search") > 700);
    assert_eq!(rig.mib("scan"), 512);
}

#[test]
fn a_vm_that_gets_nothing_back_is_still_seen_to_exceed_its_limit() {
    let mut config = config(Mode::Act);
    config.headroom_bytes = Some(1 << 30);
    let mut rig = Rig::of_three(config);
    rig.add(200, "spare", scan());
    rig.host.change("scan", |vm| {
        vm.truth = curve(&[(16, 0.9), (500, 0.8), (512, 0.1)]);
    });
    rig.until("it is checked", |rig| {
        let newest = rig.decisions().into_iter().next();
        newest.is_some_and(|decision| decision.state == State::Checking)
    });
    rig.host.set_available(100 * MIB);
    rig.until("it is rolled back", |rig| {
        let newest = rig.newest();
        newest.kind == Kind::Rollback && newest.state.has_ended()
    });
    assert_eq!(rig.newest().state, State::Partly);
    assert!(rig.mib("scan") < 512);
    rig.pass(3);
    let snapshot = rig.snapshot();
    let scan = snapshot.host.vms.iter().find(|vm| vm.vm == "scan").unwrap();
    assert_eq!(scan.status, VmStatus::Violating, "{}", scan.why);
}

#[test]
fn misses_of_a_vm_that_gave_nothing_take_no_move_back() {
    let mut config = config(Mode::Act);
    config.vms.insert(
        0,
        VmRule {
            min_bytes: Some(512 * MIB),
            max_bytes: Some(512 * MIB),
            ..VmRule::for_name("tenant")
        },
    );
    let mut rig = Rig::of_three(config);
    rig.add(200, "tenant", web());
    rig.until("it is checked", |rig| {
        let newest = rig.decisions().into_iter().next();
        newest.is_some_and(|decision| decision.state == State::Checking)
    });
    // As a backup at night.
    rig.host.change("tenant", |vm| {
        vm.truth = curve(&[(16, 0.99), (1024, 0.98)]);
    });
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    let decision = rig.newest();
    assert_eq!(decision.state, State::Kept, "{}", decision.reason);
    let check = decision.checks.iter().find(|check| check.vm == "tenant");
    let check = check.unwrap();
    assert_eq!(check.verdict, Verdict::Unknown, "{check:?}");
    assert!(check.why.contains("took nothing from it"), "{}", check.why);
}

/// A loop in which `scan` is idle, although it needs all its memory when it works, until its memory was moved; its misses
/// are counted so.
fn idle_until_moved(counts: Counts) -> Rig {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host.change("scan", |vm| {
        vm.truth = curve(&[(16, 0.9), (500, 0.8), (512, 0.001)]);
        vm.references_per_second = 0;
        vm.counts = counts;
    });
    rig.until("it moves", |rig| {
        let newest = rig.decisions().into_iter().next();
        newest.is_some_and(|decision| decision.state == State::Checking)
    });
    assert!(rig.mib("scan") < 200);
    rig
}

/// A VM whose job pauses when its memory was taken: that it missed before shows nothing of what it needs when it works.
#[test]
fn a_vm_that_pauses_while_its_move_is_checked_is_watched_until_it_works() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host.change("scan", |vm| {
        vm.truth = curve(&[(16, 0.9), (500, 0.8), (512, 0.01)]);
        vm.references_per_second = 1000;
        vm.counts = Counts::Faults;
    });
    rig.until("it begins to move", |rig| {
        let newest = rig.decisions().into_iter().next();
        newest.is_some_and(|decision| !decision.state.has_ended())
    });
    rig.host.change("scan", |vm| vm.references_per_second = 0);
    gets_memory_back_long_after(&mut rig);
}

/// Its check could not judge it.
fn gets_memory_back_long_after(rig: &mut Rig) {
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    assert_eq!(rig.newest().state, State::Kept);
    rig.pass(200);
    assert!(rig.mib("scan") < 200);
    awake(rig);
    rig.pass(60);
    assert_eq!(rig.mib("scan"), 512);
}

fn awake(rig: &Rig) {
    rig.host.change("scan", |vm| vm.references_per_second = 400);
}

#[test]
fn an_idle_vm_that_misses_since_it_gave_memory_gets_it_back() {
    for counts in [Counts::Faults, Counts::Reads] {
        let mut rig = idle_until_moved(counts);
        awake(&rig);
        rig.until("it ends", |rig| rig.newest().state.has_ended());
        rig.until("it is back", |rig| rig.mib("scan") == 512);
        let mut decisions = rig.decisions().into_iter();
        assert!(decisions.any(|decision| decision.state == State::RolledBack));
        println!("{counts:?}");
        gets_memory_back_long_after(&mut idle_until_moved(counts));
    }
}

#[test]
fn an_idle_vm_that_is_promised_a_number_of_misses_gets_memory_back_when_it_works() {
    let mut rig = idle_after_it_gave();
    rig.host.change("idle", |vm| vm.references_per_second = 400);
    rig.pass(60);
    assert_eq!(rig.mib("idle"), 512);
}

#[test]
fn a_vm_that_is_watched_is_judged_by_what_it_is_promised_now() {
    let mut rig = idle_after_it_gave();
    let change = SettingsChange {
        max_misses_per_second: Some(1000.0),
        ..SettingsChange::default()
    };
    let set = |reply| Command::Set("idle".to_owned(), change, reply);
    rig.ask(set).unwrap();
    rig.host.change("idle", |vm| vm.references_per_second = 400);
    rig.pass(60);
    assert!(rig.mib("idle") < 200);
}

/// A VM that gave memory while it was idle, and whose promise nobody could judge.
fn idle_after_it_gave() -> Rig {
    let mut rig = Rig::new(config_with_idle());
    add_idle(&rig);
    rig.add(201, "search", search());
    rig.host.change("idle", |vm| {
        // What was seen of it does not show what it needs when it works.
        vm.claimed = Some(vm.truth.clone());
        vm.truth = curve(&[(16, 0.9), (500, 0.8), (512, 0.001)]);
        vm.references_per_second = 0;
        vm.counts = Counts::Faults;
    });
    rig.until("it gives", |rig| rig.mib("idle") < 200);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    assert_eq!(rig.newest().state, State::Kept);
    rig.pass(30);
    assert!(rig.mib("idle") < 200);
    rig
}

#[test]
fn a_vm_whose_misses_nobody_counts_gives_nothing() {
    let mut config = config(Mode::Act);
    config.vms.push(VmRule {
        swap_bytes: Some(1 << 30),
        ..VmRule::for_name("scan")
    });
    let mut rig = Rig::of_three(config);
    rig.host.change("scan", |vm| {
        vm.reports = Reports::Nothing;
        vm.counts = Counts::Nobody;
    });
    rig.pass(300);
    assert_eq!(rig.mib("scan"), 512);
}

#[test]
fn a_vm_that_exaggerates_costs_others_no_more_than_their_bound() {
    let mut rig = Rig::of_three(config(Mode::Act));
    // As if all its memory were never enough.
    let greedy = curve(&[(16, 1.0), (1000, 0.9), (1024, 0.0001)]);
    rig.host.change("scan", |vm| vm.claimed = Some(greedy));
    rig.pass(600);
    assert!(!rig.decisions().is_empty());
    for (vm, truth) in [("web", web()), ("search", search())] {
        let at = |mib: u64| truth.miss_ratio(PageCount(mib * 256));
        let loss = at(rig.mib(vm)) / at(512);
        assert!(loss <= 1.25 + 1e-9, "{vm}: {loss}");
    }
    assert!(rig.mib("web") < 512);
}

#[test]
fn more_misses_per_second_than_promised_take_the_move_back() {
    let mut rig = Rig::new(config_with_idle());
    add_idle(&rig);
    rig.add(201, "search", search());
    rig.host.change("idle", |vm| {
        vm.truth = curve(&[(16, 0.9), (500, 0.8), (512, 0.001)]);
    });
    rig.until("it is rolled back", |rig| {
        let back =
            |decision: &Decision| decision.kind == Kind::Rollback && decision.state == State::Kept;
        rig.decisions().iter().any(back)
    });
    assert_eq!(rig.mib("idle"), 512);
    let broken = rig
        .decisions()
        .into_iter()
        .find(|decision| decision.state == State::RolledBack);
    let broken = broken.unwrap();
    assert!(
        broken.reason.contains("with a limit of 20.0/s"),
        "{}",
        broken.reason
    );
}

#[test]
fn who_waited_for_the_end_of_a_decision_sees_it_before_the_next_turn() {
    let mut config = config(Mode::Advise);
    config.turn_interval = Duration::from_secs(30);
    let mut rig = Rig::of_three(config);
    rig.until("it is proposed", |rig| rig.snapshot().proposal.is_some());
    let id = rig.apply().unwrap().id;
    rig.pass(1);
    assert_eq!(rig.snapshot().host.moving, Some(id));
    let mut turn = 0;
    let ended = |rig: &Rig| rig.shared.history.decision(id).unwrap().state.has_ended();
    while !ended(&rig) {
        turn = rig.snapshot().host.turn;
        rig.pass(1);
    }
    let host = &rig.snapshot().host;
    assert_eq!((host.turn, host.moving), (turn, None));
    let scan = host.vms.iter().find(|vm| vm.vm == "scan").unwrap();
    assert_eq!(scan.size_bytes / MIB, rig.mib("scan"));
}

/// Seconds from the end of the first move to the end of its check, with this many references per second of the VM that
/// gains; and the decision.
fn checked(references_per_second: u64, spoil: impl Fn(&Rig)) -> (u64, Decision) {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host.change("search", |vm| {
        vm.references_per_second = references_per_second;
    });
    let state = |rig: &Rig| rig.decisions().last().map(|decision| decision.state);
    rig.until("it moves", |rig| state(rig) == Some(State::Checking));
    spoil(&rig);
    let mut seconds = 0;
    while state(&rig) == Some(State::Checking) {
        rig.pass(1);
        seconds += 1;
    }
    (seconds, rig.decisions().remove(rig.decisions().len() - 1))
}

#[test]
fn a_check_begins_when_what_was_gained_is_filled_by_count() {
    // It gains some 350 MiB, and misses 2000 times per second.
    let (seconds, decision) = checked(40_000, |_| {});
    assert!((50..90).contains(&seconds), "{seconds}");
    let filled = "by then had filled what it gained: search ";
    assert!(decision.reason.contains(filled), "{}", decision.reason);
    assert!(
        !decision.reason.contains("the longest wait"),
        "{}",
        decision.reason
    );
    // A fifth of that does not fill it in five times the length of a measurement.
    let (seconds, decision) = checked(8000, |_| {});
    assert!((118..124).contains(&seconds), "{seconds}");
    assert!(
        decision.reason.contains("the longest wait"),
        "{}",
        decision.reason
    );
    // A VM that hardly misses fills nothing more.
    let (seconds, _) = checked(1000, |_| {});
    assert!((38..44).contains(&seconds), "{seconds}");
}

#[test]
fn a_vm_that_only_gave_memory_is_judged_while_others_fill() {
    let (seconds, decision) = checked(8000, |rig| {
        rig.host
            .change("scan", |vm| vm.truth = curve(&[(16, 0.95), (1024, 0.94)]));
    });
    assert!((18..44).contains(&seconds), "{seconds}");
    assert_eq!(decision.state, State::RolledBack, "{}", decision.reason);
}
