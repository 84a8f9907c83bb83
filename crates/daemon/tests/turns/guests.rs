//! Guests that report what they need, falsely or not at all, and that run short.

use std::sync::Arc;

use plimsoll_daemon::config::VmRule;
use plimsoll_daemon::host::HeldRam;
use plimsoll_daemon::shared::Command;
use plimsoll_flow::PageCount;
use plimsoll_protocol::decision::{Decision, Mode, StepState};
use plimsoll_protocol::vm::{Promise, VmStatus};

use crate::rig::{MIB, Rig, config, curve, scan, search, web};
use crate::simulated::{BalloonBehaviour, Counts, Lie, Reports, Statistic};

/// Waits until the newest allocation has ended, and returns it.
pub fn divided(rig: &mut Rig) -> Decision {
    rig.until("it divides", |rig| {
        let decisions = rig.decisions();
        let ended = |decision: &Decision| decision.state.has_ended() && !decision.steps.is_empty();
        decisions.iter().any(ended)
    });
    rig.newest()
}

#[test]
fn a_guest_keeps_what_it_cannot_give_and_slack() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host.change("scan", |vm| vm.used_bytes = 300 * MIB);
    divided(&mut rig);
    rig.pass(300);
    // A sixteenth of its RAM.
    assert!((364..400).contains(&rig.mib("scan")), "{}", rig.mib("scan"));
    assert_eq!(rig.host.vm("scan").unwrap().oom_kills, 0);
}

#[test]
fn the_last_statistics_stay_visible_with_their_age_when_nothing_answers() {
    let mut rig = Rig::of_three(config(Mode::Observe));
    rig.host.change("web", |vm| vm.reports = Reports::Nothing);
    rig.pass(30);
    let balloon = |rig: &Rig, name: &str| {
        let snapshot = rig.snapshot();
        let mut vms = snapshot.host.vms.iter();
        vms.find(|vm| vm.vm == name)
            .unwrap()
            .balloon
            .clone()
            .unwrap()
    };
    let before = balloon(&rig, "scan");
    assert!(before.guest_available_bytes.is_some());
    for name in ["scan", "web"] {
        rig.host.change(name, |vm| vm.answers = false);
    }
    rig.pass(300);
    let after = balloon(&rig, "scan");
    assert_eq!(after.guest_available_bytes, before.guest_available_bytes);
    assert!(after.statistics_age_ms >= before.statistics_age_ms);
    let never = balloon(&rig, "web");
    assert_eq!(
        (never.guest_available_bytes, never.statistics_age_ms),
        (None, None)
    );
}

#[test]
fn what_a_vm_gives_is_never_more_than_its_guest_can_give() {
    let mut config = config(Mode::Observe);
    config.vms[0].promise = Some(Promise::on_loss(10.0));
    let mut rig = Rig::of_three(config);
    rig.host.change("scan", |vm| vm.used_bytes = 300 * MIB);
    rig.host.change("web", |vm| vm.reports = Reports::Nothing);
    rig.host
        .change("search", |vm| vm.follows = BalloonBehaviour::Absent);
    rig.pass(30);
    let snapshot = rig.snapshot();
    let vm = |name: &str| {
        let mut vms = snapshot.host.vms.iter();
        vms.find(|vm| vm.vm == name).unwrap()
    };
    let scan = vm("scan");
    let kept_mib = scan.kept_bytes / MIB;
    assert!((364..400).contains(&kept_mib), "{kept_mib}");
    assert_eq!(scan.promise_bytes, Some(scan.kept_bytes));
    assert_eq!(scan.reclaimable_bytes, Some(512 * MIB - scan.kept_bytes));
    assert_eq!(scan.status, VmStatus::Safe);
    // Without statistics or a balloon nothing can be taken.
    for name in ["web", "search"] {
        assert_eq!(vm(name).reclaimable_bytes, Some(0), "{name}");
        assert_eq!(vm(name).status, VmStatus::Tight);
    }
    assert!(vm("web").why.contains("reports no statistics"));
}

/// A traced curve ends at the pages that were used. The guest cannot give the memory of its kernel and of idle processes, so
/// that its page cache has that much less.
#[test]
fn memory_that_a_guest_neither_uses_nor_can_give_counts_in_every_size() {
    let mut rig = Rig::new(config(Mode::Observe));
    rig.add(1, "web", curve(&[(16, 0.9), (80, 0.3), (100, 0.0)]));
    rig.host.change("web", |vm| vm.used_bytes = 400 * MIB);
    rig.pass(30);
    // Of the 512 MiB, 412 were not used and 112 are available, 56 of these unused: 300 to 356 are idle and cannot be given.
    let shown = |rig: &Rig, mib: u64| {
        let snapshot = rig.snapshot();
        let curve = snapshot.curves["web"].to_curve().unwrap();
        let point = curve.at(PageCount(mib * 256));
        (point.miss_ratio, point.low)
    };
    let is_near = |found: f64, expected: f64| (found - expected).abs() < 0.02;
    let (ratio, low) = shown(&rig, 436);
    assert!(is_near(ratio, 0.3) && low == 0.0, "{ratio} {low}");
    let (ratio, low) = shown(&rig, 380);
    assert!(is_near(ratio, 0.825) && is_near(low, 0.3), "{ratio} {low}");
    assert_eq!(shown(&rig, 456), (0.0, 0.0));
    // A guest that falls silent has not given it back.
    rig.host.change("web", |vm| vm.reports = Reports::Ended);
    rig.pass(60);
    assert!(is_near(shown(&rig, 436).0, 0.3));
}

#[test]
fn nothing_is_taken_from_a_guest_whose_reports_are_old_or_missing() {
    for reports in [Reports::Nothing, Reports::Ended] {
        let mut rig = Rig::of_three(config(Mode::Act));
        rig.host.change("scan", |vm| vm.reports = reports);
        rig.pass(600);
        assert_eq!(rig.mib("scan"), 512, "{reports:?}");
        assert!(rig.host.most_bytes() <= 1536 * MIB);
    }
    // One that falls silent while it is shrunk gets some back, and keeps that.
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Pace(4 * MIB));
    rig.until("it moves", |rig| rig.mib("scan") < 480);
    rig.host.change("scan", |vm| vm.reports = Reports::Ended);
    rig.pass(100);
    let has = rig.mib("scan");
    assert!((430..=512).contains(&has), "{has}");
    rig.pass(300);
    assert_eq!(rig.mib("scan"), has);
}

#[test]
fn nothing_is_taken_that_the_host_would_not_get() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host
        .change("scan", |vm| vm.held = Some(HeldRam::Locked));
    rig.pass(600);
    assert_eq!(rig.mib("scan"), 512);
    let snapshot = rig.snapshot();
    let scan = snapshot.host.vms.iter().find(|vm| vm.vm == "scan").unwrap();
    assert_eq!(scan.reclaimable_bytes, Some(0));
    let warnings = snapshot.host.warnings.join("\n");
    assert!(warnings.contains("because it is locked"), "{warnings}");
}

#[test]
fn a_guest_with_swap_gives_as_much_more() {
    let mut config = config(Mode::Act);
    config.vms.push(VmRule {
        swap_bytes: Some(1 << 30),
        ..VmRule::for_name("scan")
    });
    let mut rig = Rig::of_three(config);
    rig.host.change("scan", |vm| vm.reports = Reports::Nothing);
    rig.pass(300);
    assert!(rig.mib("scan") < 200, "{}", rig.mib("scan"));
}

#[test]
fn a_guest_that_runs_short_while_it_shrinks_gets_memory_back_and_its_part_ends() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Pace(4 * MIB));
    rig.until("it moves", |rig| rig.mib("scan") < 400);
    let decision = rig.newest().id;
    rig.host
        .change("scan", |vm| vm.used_bytes = vm.direct_bytes - 8 * MIB);
    rig.pass(20);
    let vm = rig.host.vm("scan").unwrap();
    assert!(vm.available_bytes() >= 40 * MIB, "{vm:?}");
    let decision = rig.shared.history.decision(decision).unwrap();
    let mut steps = decision.steps.iter();
    let step = steps.find(|step| step.vm == "scan").unwrap();
    assert_eq!(step.state, StepState::Short, "{step:?}");
    assert!(rig.host.most_bytes() <= 1536 * MIB);
}

#[test]
fn a_guest_that_fills_its_memory_while_it_is_shrunk_is_not_starved() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.until("it moves", |rig| rig.mib("scan") < 512);
    // As one that has just booted.
    for _ in 0..8 {
        rig.host.change("scan", |vm| vm.allocate(40 * MIB));
        rig.pass(1);
        let vm = rig.host.vm("scan").unwrap();
        assert_eq!(vm.oom_kills, 0, "{vm:?}");
    }
}

#[test]
fn a_guest_that_runs_short_after_a_move_gets_memory_back_at_once() {
    let mut rig = Rig::of_three(config(Mode::Act));
    divided(&mut rig);
    let had = rig.mib("scan");
    assert!(had < 200);
    for _ in 0..10 {
        rig.host.change("scan", |vm| {
            let more = vm.available_bytes().saturating_sub(20 * MIB);
            vm.allocate(more);
        });
        rig.pass(10);
        let vm = rig.host.vm("scan").unwrap();
        assert_eq!(vm.oom_kills, 0);
        assert!(vm.available_bytes() >= 32 * MIB || vm.direct_bytes >= 500 * MIB);
    }
    assert!(rig.mib("scan") > had + 200, "{}", rig.mib("scan"));
    assert!(rig.host.most_bytes() <= 1536 * MIB);
}

/// What its guest has available between two bursts does not last for the next one.
#[test]
fn nothing_more_is_taken_from_a_guest_that_ran_short_on_a_host_that_is_short() {
    const HEADROOM: u64 = 4 << 30;
    let mut config = config(Mode::Act);
    config.headroom_bytes = Some(HEADROOM);
    let mut rig = Rig::of_three(config);
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    rig.host.set_available(HEADROOM - 3000 * MIB);
    rig.host.change("scan", |vm| {
        let more = vm.available_bytes().saturating_sub(6 * MIB);
        vm.allocate(more);
    });
    rig.pass(2);
    let had = rig.mib("scan");
    rig.host
        .change("scan", |vm| vm.used_bytes = vm.used_bytes.min(20 * MIB));
    rig.pass(60);
    assert_eq!(rig.mib("scan"), had);
}

#[test]
fn a_guest_that_runs_short_takes_nothing_from_the_smallest_size_of_others() {
    let mut config = config(Mode::Act);
    let web_rule = VmRule {
        min_bytes: Some(700 * MIB),
        baseline_bytes: Some(256 * MIB),
        ..VmRule::for_name("web")
    };
    config.vms.insert(0, web_rule);
    let mut rig = Rig::new(config);
    rig.add(100, "web", web());
    rig.add(101, "scan", scan());
    rig.until("it divides", |rig| {
        rig.mib("scan") < 200 && rig.mib("web") > 800
    });
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    let had = rig.mib("scan");
    for _ in 0..20 {
        rig.host.change("scan", |vm| {
            let more = vm.available_bytes().saturating_sub(20 * MIB);
            vm.allocate(more);
        });
        rig.pass(10);
        assert!(rig.mib("web") >= 700, "{}", rig.mib("web"));
    }
    assert!(rig.mib("scan") > had + 50, "{had} {}", rig.mib("scan"));
}

/// Whether `scan`, which has little left, gets memory back as it allocates.
fn is_relieved(rig: &mut Rig) -> bool {
    let had = rig.mib("scan");
    assert!(had < 200, "{had}");
    rig.host.change("scan", |vm| {
        let more = vm.available_bytes().saturating_sub(20 * MIB);
        vm.allocate(more);
    });
    rig.pass(20);
    rig.mib("scan") > had
}

#[test]
fn a_guest_that_a_move_by_an_operator_squeezed_is_watched_by_every_daemon_but_a_paused_one() {
    let squeezed = || {
        let mut rig = Rig::of_three(config(Mode::Observe));
        rig.pass(60);
        rig.apply().unwrap();
        rig.until("it ends", |rig| rig.newest().state.has_ended());
        rig
    };
    assert!(is_relieved(&mut squeezed()));
    // From the first turn of the next daemon.
    let rig = squeezed();
    let history = Arc::clone(&rig.shared.history);
    let mut later = Rig::with(config(Mode::Observe), rig.host.clone(), history);
    later.pass(5);
    assert!(is_relieved(&mut later));
    let mut rig = squeezed();
    rig.ask(Command::Pause).unwrap();
    assert!(!is_relieved(&mut rig));
    // What another has squeezed is not its own.
    let mut rig = Rig::of_three(config(Mode::Observe));
    rig.pass(60);
    rig.host.change("scan", |vm| vm.direct_bytes = 128 * MIB);
    rig.pass(10);
    assert!(!is_relieved(&mut rig));
}

#[test]
fn a_guest_is_watched_although_the_daemon_of_its_disk_does_not_answer() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host.change("scan", |vm| vm.cache_bytes = Some(4 * MIB));
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    rig.host.change("scan", |vm| vm.disk_answers = false);
    rig.pass(10);
    assert!(is_relieved(&mut rig));
}

#[test]
fn a_guest_with_swap_that_thrashes_after_a_move_gets_memory_back() {
    let mut config = config(Mode::Act);
    // A disk of 150 reads a second.
    config.miss_cost_ms = 6.7;
    config.vms.push(VmRule {
        swap_bytes: Some(1 << 30),
        ..VmRule::for_name("scan")
    });
    let mut rig = Rig::of_three(config);
    rig.host.change("scan", |vm| {
        vm.counts = Counts::Faults;
        vm.references_per_second = 100;
    });
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    let had = rig.mib("scan");
    rig.host.change("scan", |vm| vm.references_per_second = 280);
    rig.pass(20);
    assert!(rig.mib("scan") > had, "{had}");
}

#[test]
fn a_balloon_that_gets_stuck_on_the_way_gets_a_tenth_back() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Pace(4 * MIB));
    rig.until("it moves", |rig| rig.mib("scan") < 400);
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Never);
    let stuck = rig.mib("scan");
    rig.until("it is stuck", |rig| {
        let decisions = rig.decisions();
        let steps = decisions.iter().flat_map(|decision| &decision.steps);
        let mut stuck = steps.filter(|step| step.state == StepState::Stuck);
        stuck.any(|step| step.vm == "scan")
    });
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Pace(64 * MIB));
    rig.pass(5);
    assert!(rig.mib("scan") >= stuck + 39, "{stuck} {}", rig.mib("scan"));
}

#[test]
fn a_guest_that_reports_falsely_harms_nobody_else() {
    for reports in [
        Reports::False(Statistic::Available, Lie::Max),
        Reports::False(Statistic::Available, Lie::Zero),
        Reports::Distress,
        Reports::Backwards,
        Reports::Nothing,
        Reports::Ended,
    ] {
        let mut rig = Rig::of_three(config(Mode::Act));
        rig.host.change("scan", |vm| vm.reports = reports);
        rig.pass(600);
        assert!(rig.mib("scan") <= 512, "{reports:?}");
        for (vm, truth) in [("web", web()), ("search", search())] {
            let at = |mib: u64| truth.miss_ratio(PageCount(mib * 256));
            let loss = at(rig.mib(vm)) / at(512);
            assert!(loss <= 1.25 + 1e-9, "{reports:?} {vm}: {loss}");
            assert_eq!(rig.host.vm(vm).unwrap().oom_kills, 0);
        }
        assert!(rig.host.most_bytes() <= 1536 * MIB);
    }
}
