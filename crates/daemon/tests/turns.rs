//! The whole loop on a simulated host: decisions, moves, checks and rollbacks, and the state after faults.

use std::sync::Arc;
use std::time::Duration;

use plimsoll_daemon::config::{Config, VmRule, Workflow};
use plimsoll_daemon::shared::Command;
use plimsoll_flow::{MissRatioCurve, PageCount, WorkingSet, WorkingSetBound};
use plimsoll_policy::{GivenOptions, Policy};
use plimsoll_protocol::decision::{Decision, Kind, Mode, Phase, State, StepState, Verdict};
use plimsoll_protocol::request::{Choice, RefusalKind, SettingsChange};
use plimsoll_protocol::vm::{Promise, VmStatus};

#[allow(dead_code, reason = "each test uses its part")]
#[path = "common/rig.rs"]
mod rig;
#[allow(dead_code, reason = "shared with the benchmarks")]
#[path = "common/simulated.rs"]
mod simulated;

use rig::{MIB, Rig, config, curve, search, web};
use simulated::{BalloonBehaviour, Lie, Reports, Statistic};

#[test]
fn memory_goes_from_who_needs_it_least_to_who_gains_most_and_promises_are_kept() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.until("it divides", |rig| {
        rig.decisions()
            .iter()
            .any(|decision| decision.state == State::Kept)
    });
    assert!(rig.mib("search") > 700, "{}", rig.mib("search"));
    assert!(rig.mib("scan") < 200, "{}", rig.mib("scan"));
    let decision = rig.newest();
    assert_eq!(decision.kind, Kind::Divide);
    assert_eq!(decision.checks.len(), 3);
    for check in &decision.checks {
        assert_eq!(check.verdict, Verdict::Kept, "{check:?}");
        let predicted = check.predicted.unwrap().expected;
        let measured = check.measured.unwrap();
        assert!((predicted - measured).abs() < 0.05, "{check:?}");
        assert!(measured <= 1.28, "{check:?}");
    }
    assert!(rig.host.most_bytes() <= 1536 * MIB);
    // The decision follows from its records.
    let recorded = rig.shared.history.decision(decision.id).unwrap();
    assert_eq!(
        recorded.inputs.unwrap().plan().unwrap(),
        recorded.plan.unwrap()
    );
    // And there is nothing more to do.
    let divisions = rig.decisions().len();
    rig.pass(300);
    assert_eq!(rig.decisions().len(), divisions);
}

#[test]
fn an_observer_moves_nothing_until_somebody_says_so_and_can_take_it_back() {
    let mut rig = Rig::of_three(config(Mode::Observe));
    rig.pass(200);
    assert_eq!(rig.decisions(), []);
    assert_eq!(rig.mib("search"), 512);
    let proposal = rig.snapshot().proposal.clone().unwrap();
    let decision = rig.apply().unwrap();
    assert_eq!(decision.id, proposal.id);
    rig.until("it is kept", |rig| rig.newest().state == State::Kept);
    assert!(rig.mib("search") > 700);
    let back = rig
        .ask(|reply| Command::Rollback(Choice::default(), reply))
        .unwrap();
    assert_eq!(back.takes_back, Some(decision.id));
    rig.until("it is back", |rig| rig.newest().state == State::Kept);
    for vm in ["web", "search", "scan"] {
        assert_eq!(rig.mib(vm), 512);
    }
    let taken = rig.shared.history.decision(decision.id).unwrap();
    assert_eq!(taken.taken_back_by, Some(back.id));
    assert!(rig.host.most_bytes() <= 1536 * MIB);
    let error = rig
        .ask(|reply| {
            Command::Rollback(
                Choice {
                    decision: Some(decision.id),
                },
                reply,
            )
        })
        .unwrap_err();
    assert_eq!(error.kind, RefusalKind::Conflict);
}

#[test]
fn an_adviser_records_what_it_would_do_once() {
    let mut rig = Rig::of_three(config(Mode::Advise));
    rig.pass(300);
    let decisions = rig.decisions();
    assert_eq!(decisions.len(), 1, "{decisions:#?}");
    assert_eq!(decisions[0].state, State::Proposed);
    assert_eq!(rig.mib("search"), 512);
}

#[test]
fn what_a_balloon_that_stands_still_does_not_free_is_given_to_nobody() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Never);
    rig.until("it ends", |rig| {
        rig.decisions()
            .iter()
            .any(|decision| decision.state == State::Partly)
    });
    assert_eq!(rig.mib("scan"), 512);
    assert!(rig.host.most_bytes() <= 1536 * MIB);
    let decision = rig.newest();
    let step = decision
        .steps
        .iter()
        .find(|step| step.vm == "scan")
        .unwrap();
    assert_eq!(step.state, StepState::Stuck);
    assert!(
        step.error.as_ref().unwrap().contains("has not changed"),
        "{step:?}"
    );
    // If it reacted now, it would lose nothing: its target is its present size.
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Pace(MIB));
    rig.pass(30);
    assert_eq!(rig.mib("scan"), 512);
}

#[test]
fn a_monitor_that_breaks_is_given_up_and_the_rest_goes_on() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Broken);
    rig.until("it ends", |rig| {
        rig.decisions()
            .iter()
            .any(|decision| decision.state == State::Partly)
    });
    let decision = rig.newest();
    let step = decision
        .steps
        .iter()
        .find(|step| step.vm == "scan")
        .unwrap();
    assert_eq!((step.state, rig.mib("scan")), (StepState::Failed, 512));
    assert!(
        step.error
            .as_ref()
            .unwrap()
            .contains("closed the connection")
    );
    assert!(rig.host.most_bytes() <= 1536 * MIB);
}

#[test]
fn a_vm_that_dies_in_the_middle_leaves_its_memory_to_nobody_by_mistake() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Pace(4 * MIB));
    rig.until("it moves", |rig| rig.mib("scan") < 500);
    rig.host.end("scan");
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    rig.pass(200);
    assert!(rig.host.most_bytes() <= 1536 * MIB);
    // Two VMs are left, and their sizes at discovery are allocated.
    assert!(
        rig.mib("web") + rig.mib("search") <= 1024,
        "{} {}",
        rig.mib("web"),
        rig.mib("search")
    );
    assert_eq!(rig.snapshot().host.vms.len(), 2);
}

#[test]
fn pause_stops_a_move_where_it_is() {
    let mut rig = Rig::of_three(config(Mode::Act));
    for vm in ["web", "search", "scan"] {
        rig.host
            .change(vm, |vm| vm.follows = BalloonBehaviour::Pace(2 * MIB));
    }
    rig.until("it moves", |rig| rig.mib("scan") < 480);
    rig.ask(Command::Pause).unwrap();
    let stands = ["web", "search", "scan"].map(|vm| rig.mib(vm));
    rig.pass(100);
    assert_eq!(["web", "search", "scan"].map(|vm| rig.mib(vm)), stands);
    assert_eq!(rig.newest().state, State::Stopped);
    assert!(rig.snapshot().host.paused);
    let refused = rig.apply().unwrap_err();
    assert_eq!(refused.kind, RefusalKind::Conflict);
    // Another daemon finds it paused.
    let history = Arc::clone(&rig.shared.history);
    let mut later = Rig::with(config(Mode::Act), rig.host.clone(), history);
    later.pass(100);
    assert_eq!(["web", "search", "scan"].map(|vm| later.mib(vm)), stands);
    later.ask(Command::Resume).unwrap();
    later.until("it goes on", |rig| rig.newest().state == State::Kept);
}

#[test]
fn a_promise_found_broken_is_made_good() {
    let mut rig = Rig::of_three(config(Mode::Act));
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
        scan.standing == VmStatus::Violating
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
    // It is not repeated at once.
    rig.pass(60);
    assert_eq!(rig.decisions().len(), decisions.len());
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
fn the_papers_workflow_shrinks_traces_divides_and_gives_back() {
    let mut config = config(Mode::Act);
    config.workflow = Workflow::Cache {
        direct_ratio: 0.25,
        trace_for: Duration::from_secs(60),
        keep: false,
        every: Duration::from_secs(3600),
    };
    let mut rig = Rig::of_three(config);
    for vm in ["web", "search", "scan"] {
        rig.host.change(vm, |vm| vm.cache_bytes = Some(0));
    }
    rig.until("they are traced", |rig| {
        rig.snapshot().host.phase == Phase::Tracing
    });
    for vm in ["web", "search", "scan"] {
        let vm = rig.host.vm(vm).unwrap();
        assert_eq!(
            (vm.direct_bytes, vm.cache_bytes),
            (128 * MIB, Some(384 * MIB))
        );
    }
    rig.until("all is given back", |rig| {
        rig.snapshot().host.phase == Phase::Whole && rig.decisions().len() >= 3
    });
    let kinds: Vec<_> = rig
        .decisions()
        .iter()
        .map(|decision| decision.kind)
        .collect();
    assert_eq!(kinds, [Kind::GiveBack, Kind::Divide, Kind::IntoCaches]);
    assert!(
        rig.decisions()
            .iter()
            .all(|decision| decision.state == State::Kept)
    );
    assert!(rig.mib("search") > 700, "{:#?}", rig.decisions());
    for vm in ["web", "search", "scan"] {
        assert_eq!(rig.host.vm(vm).unwrap().cache_bytes, Some(4 * MIB));
    }
    assert!(rig.host.most_bytes() <= 1536 * MIB);
}

#[test]
fn a_daemon_that_was_killed_in_the_middle_is_followed_by_one_that_knows() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Pace(2 * MIB));
    rig.until("it moves", |rig| rig.mib("scan") < 480);
    let (host, history) = (rig.host.clone(), Arc::clone(&rig.shared.history));
    let id = rig.newest().id;
    drop(rig);
    let mut later = Rig::with(config(Mode::Observe), host, history);
    later.pass(10);
    let decision = later.shared.history.decision(id).unwrap();
    assert_eq!(decision.state, State::Stopped);
    assert!(decision.reason.contains("what was moved stays"));
    // Baselines are those of the beginning, not the half-moved sizes.
    let snapshot = later.snapshot();
    for vm in &snapshot.host.vms {
        assert_eq!(vm.settings.baseline_bytes, 512 * MIB, "{}", vm.vm);
    }
    later
        .ask(|reply| Command::Rollback(Choice { decision: Some(id) }, reply))
        .unwrap();
    later.until("it is back", |rig| rig.newest().state.has_ended());
    for vm in ["web", "search", "scan"] {
        assert_eq!(later.mib(vm), 512);
    }
}

#[test]
fn promises_that_cannot_all_be_kept_are_refused() {
    let mut rig = Rig::of_three(config(Mode::Observe));
    rig.pass(10);
    let change = SettingsChange {
        min_bytes: Some(2 << 30),
        max_bytes: Some(4 << 30),
        ..SettingsChange::default()
    };
    let refused = rig
        .ask(|reply| Command::Set("web".to_owned(), change, reply))
        .unwrap_err();
    assert_eq!(refused.kind, RefusalKind::Guarantee);
    assert!(
        refused.message.contains("nothing was changed"),
        "{}",
        refused.message
    );
    let change = SettingsChange {
        min_bytes: Some(300 * MIB),
        shares: Some(7),
        ..SettingsChange::default()
    };
    let vm = rig
        .ask(|reply| Command::Set("scan".to_owned(), change, reply))
        .unwrap();
    assert_eq!((vm.settings.min_bytes, vm.settings.shares), (300 * MIB, 7));
    rig.pass(10);
    let proposal = rig.snapshot().proposal.clone().unwrap();
    let step = proposal
        .steps
        .iter()
        .find(|step| step.vm == "scan")
        .unwrap();
    assert_eq!(step.to.size_bytes(), 300 * MIB);
    for change in [
        SettingsChange {
            shares: Some(0),
            ..SettingsChange::default()
        },
        SettingsChange {
            max_loss: Some(f64::NAN),
            ..SettingsChange::default()
        },
        SettingsChange {
            max_loss: Some(-0.1),
            ..SettingsChange::default()
        },
        SettingsChange {
            min_bytes: Some(9 << 30),
            ..SettingsChange::default()
        },
    ] {
        let refused = rig
            .ask(|reply| Command::Set("scan".to_owned(), change, reply))
            .unwrap_err();
        assert_eq!(refused.kind, RefusalKind::BadRequest, "{change:?}");
    }
    let refused = rig
        .ask(|reply| Command::Set("nobody".to_owned(), change, reply))
        .unwrap_err();
    assert_eq!(refused.kind, RefusalKind::NotFound);
}

#[test]
fn memory_is_accounted_for_at_every_moment() {
    let mut rig = Rig::of_three(config(Mode::Act));
    for _ in 0..300 {
        rig.pass(1);
        let memory = rig.snapshot().host.memory;
        let sum = memory.vms_direct_bytes
            + memory.vms_cache_bytes
            + memory.store_bytes
            + memory.spare_bytes;
        assert_eq!(
            sum.max(memory.divided_bytes),
            memory.divided_bytes,
            "{memory:?}"
        );
    }
    assert!(rig.host.most_bytes() <= 1536 * MIB);
}

#[test]
fn plugged_memory_raises_ceiling_baseline_and_divided_memory() {
    let mut rig = Rig::new(config(Mode::Act));
    rig.add(100, "web", web());
    rig.host.change("web", |vm| vm.direct_bytes = vm.ram_bytes);
    rig.pass(100);
    let before = rig.snapshot().host.memory.divided_bytes;
    let settings = |rig: &Rig| {
        let vms = rig.snapshot().host.vms.clone();
        let vm = vms.into_iter().find(|vm| vm.vm == "web").unwrap();
        (
            vm.ram_bytes,
            vm.settings.max_bytes,
            vm.settings.baseline_bytes,
        )
    };
    let (ram, max, baseline) = settings(&rig);
    assert_eq!((ram, max), (1024 * MIB, 1024 * MIB));
    rig.host.change("web", |vm| {
        vm.ram_bytes += 256 * MIB;
        vm.direct_bytes += 256 * MIB;
    });
    rig.pass(10);
    assert_eq!(
        settings(&rig),
        (ram + 256 * MIB, max + 256 * MIB, baseline + 256 * MIB)
    );
    let divided = rig.snapshot().host.memory.divided_bytes;
    assert_eq!(divided, before + 256 * MIB);
    rig.pass(300);
    assert_eq!(rig.mib("web"), 1280);
    rig.host.change("web", |vm| vm.ram_bytes -= 256 * MIB);
    rig.pass(10);
    assert_eq!(settings(&rig), (ram, max, baseline));
}

#[test]
fn ram_that_is_plugged_while_no_daemon_runs_raises_the_baseline_too() {
    let mut rig = Rig::new(config(Mode::Act));
    rig.add(100, "web", web());
    rig.pass(10);
    let (host, history) = (rig.host.clone(), Arc::clone(&rig.shared.history));
    drop(rig);
    host.change("web", |vm| {
        vm.ram_bytes += 256 * MIB;
        vm.direct_bytes += 256 * MIB;
    });
    let mut later = Rig::with(config(Mode::Act), host, history);
    later.pass(10);
    let baseline = later.snapshot().host.vms[0].settings.baseline_bytes;
    assert_eq!(baseline, 768 * MIB);
}

#[test]
fn a_clock_that_is_set_does_not_keep_memory_from_being_returned() {
    let mut rig = Rig::of_three(config(Mode::Act));
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    assert!(rig.mib("scan") < 200);
    rig.host.step_clock(3_600_000);
    rig.turns.begin_return(rig.now);
    rig.until("all is back", |rig| rig.mib("scan") == 512);
}

/// The longest of some turns in ms, and the VMs that have curves at their end.
fn longest_turn(rig: &mut Rig) -> (f64, usize) {
    let mut longest_ms: f64 = 0.0;
    for _ in 0..4 {
        rig.pass(5);
        longest_ms = longest_ms.max(rig.snapshot().host.turn_took_ms);
    }
    let snapshot = rig.snapshot();
    let known = snapshot.host.vms.iter().filter(|vm| vm.references > 0);
    (longest_ms, known.count())
}

#[test]
fn five_hundred_silent_monitors_lengthen_no_turn_by_two_seconds() {
    // The time limit of a monitor.
    const SILENCE: Duration = Duration::from_secs(1);
    let with_monitors = |silence| {
        let rig = Rig::of_three(config(Mode::Observe));
        for number in 0..500 {
            let name = format!("silent-{number}");
            rig.add(1000 + number, &name, web());
            rig.host.change(&name, |vm| {
                vm.silence = silence;
                vm.claimed = None;
            });
        }
        rig
    };
    let mut answering = with_monitors(Duration::ZERO);
    let (answered_ms, _) = longest_turn(&mut answering);
    let (silent_ms, known) = longest_turn(&mut with_monitors(SILENCE));
    // All of them in the same turn.
    for number in 0..500 {
        let name = format!("silent-{number}");
        answering.host.change(&name, |vm| vm.silence = SILENCE);
    }
    let (falling_silent_ms, known_after) = longest_turn(&mut answering);
    println!(
        "500 monitors: longest turn {answered_ms:.0} ms if they answer, {silent_ms:.0} ms if not, {falling_silent_ms:.0} ms \
         when they fall silent"
    );
    assert!(silent_ms < answered_ms + 2000.0, "{silent_ms} ms");
    assert!(
        falling_silent_ms < answered_ms + 2000.0,
        "{falling_silent_ms} ms"
    );
    // Those that answer have curves as before.
    assert_eq!((known, known_after), (3, 3));
}

#[test]
fn a_process_id_that_is_used_again_is_another_vm() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.until("a target", |rig| {
        let vms = &rig.snapshot().host.vms;
        vms.iter()
            .any(|vm| vm.vm == "web" && vm.target_bytes.is_some())
    });
    rig.host.change("web", |vm| vm.start_ticks += 1);
    rig.pass(6);
    let vms = rig.snapshot().host.vms.clone();
    let web = vms.iter().find(|vm| vm.vm == "web").unwrap();
    assert_eq!(web.target_bytes, None);
}

#[test]
fn a_vm_nobody_may_move_keeps_what_it_has() {
    let mut config = config(Mode::Act);
    config.vms.insert(
        0,
        VmRule {
            managed: Some(false),
            ..VmRule::for_name("w*")
        },
    );
    let mut rig = Rig::of_three(config);
    rig.pass(300);
    assert_eq!(rig.mib("web"), 512);
    assert!(rig.mib("search") > 700);
}

/// A self-ballooning VM of 512 MiB whose tracer reports such a working set.
fn self_ballooning(mib: u64, bound: WorkingSetBound, claimed: Option<MissRatioCurve>) -> Rig {
    let mut config = config(Mode::Act);
    config.vms.push(VmRule {
        self_balloon: Some(true),
        ..VmRule::for_name("web")
    });
    let rig = Rig::new(config);
    rig.add(100, "web", web());
    rig.host.change("web", |vm| {
        vm.working_set = Some(WorkingSet {
            size: PageCount(mib * 256),
            bound,
        });
        vm.claimed = claimed;
    });
    rig
}

/// Above its hot set of 150 MiB memory does not help it.
fn small() -> MissRatioCurve {
    curve(&[(16, 0.9), (150, 0.1), (1024, 0.1)])
}

#[test]
fn a_self_ballooning_vm_keeps_a_tenth_above_its_working_set_and_is_checked() {
    for bound in [WorkingSetBound::Estimate, WorkingSetBound::AtMost] {
        let mut rig = self_ballooning(160, bound, Some(small()));
        rig.host.change("web", |vm| vm.truth = small());
        rig.until("it is kept", |rig| {
            rig.decisions()
                .iter()
                .any(|decision| decision.state == State::Kept)
        });
        assert!((176..=184).contains(&rig.mib("web")), "{}", rig.mib("web"));
        let checks = rig.newest().checks;
        assert_eq!(checks.len(), 1);
        assert_eq!(checks[0].verdict, Verdict::Kept, "{checks:?}");
        assert!(checks[0].predicted.is_some() && checks[0].measured.is_some());
    }
}

#[test]
fn a_lower_bound_of_a_working_set_takes_nothing_from_a_self_ballooning_vm() {
    let mut rig = self_ballooning(160, WorkingSetBound::AtLeast, Some(small()));
    rig.pass(300);
    assert_eq!((rig.mib("web"), rig.decisions()), (512, Vec::new()));
    // It is not an estimate for the policy that allocates by working sets either.
    let mut config = config(Mode::Act);
    config.policy = Policy::by_name("esx-sampling", GivenOptions::default()).unwrap();
    let sizes = |bound| {
        let mut rig = Rig::of_three(config.clone());
        for (name, mib, bound) in [
            ("web", 160, bound),
            ("search", 600, WorkingSetBound::Estimate),
        ] {
            rig.host.change(name, |vm| {
                vm.working_set = Some(WorkingSet {
                    size: PageCount(mib * 256),
                    bound,
                });
            });
        }
        rig.host.change("web", |vm| {
            vm.truth = small();
            vm.claimed = Some(small());
        });
        rig.pass(300);
        (rig.mib("web"), rig.mib("search"))
    };
    let (web, search) = sizes(WorkingSetBound::Estimate);
    assert!(web < 400 && search > 600, "{web} {search}");
    assert_eq!(sizes(WorkingSetBound::AtLeast), (512, 512));
}

#[test]
fn a_self_ballooning_vm_that_misses_more_than_promised_gets_its_memory_back() {
    for claimed in [Some(small()), None] {
        // Its tracer reports 160 MiB, but it misses more with every megabyte less.
        let mut rig = self_ballooning(160, WorkingSetBound::Estimate, claimed);
        rig.until("it is taken back", |rig| {
            let decisions = rig.decisions();
            let back = |decision: &Decision| decision.kind == Kind::Rollback;
            decisions
                .iter()
                .any(|decision| back(decision) && decision.state == State::Kept)
        });
        assert_eq!(rig.mib("web"), 512);
        let decisions = rig.decisions();
        let shrunk = decisions
            .iter()
            .find(|decision| decision.kind == Kind::Divide);
        let shrunk = shrunk.unwrap();
        assert_eq!(shrunk.state, State::RolledBack);
        assert_eq!(shrunk.checks[0].verdict, Verdict::Broken);
    }
}

/// Waits until the newest allocation has ended, and returns it.
fn divided(rig: &mut Rig) -> Decision {
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

#[test]
fn a_host_that_runs_short_takes_from_caches_first_then_from_vms() {
    let mut config = config(Mode::Act);
    config.headroom_bytes = Some(1 << 30);
    config.workflow = Workflow::Cache {
        direct_ratio: 0.25,
        trace_for: Duration::from_secs(600),
        keep: true,
        every: Duration::from_secs(3600),
    };
    let mut rig = Rig::of_three(config);
    let names = ["web", "search", "scan"];
    for vm in names {
        rig.host.change(vm, |vm| vm.cache_bytes = Some(0));
    }
    rig.until("they are traced", |rig| {
        rig.snapshot().host.phase == Phase::Tracing
    });
    let caches = |rig: &Rig| {
        let sizes = names.map(|vm| rig.host.vm(vm).unwrap().cache_bytes.unwrap());
        sizes.iter().sum::<u64>() / MIB
    };
    let had = caches(&rig);
    rig.host.set_available((1 << 30) - 300 * MIB);
    rig.pass(1);
    assert!(caches(&rig) <= had - 300, "{had} {}", caches(&rig));
    for vm in names {
        assert_eq!(rig.host.vm(vm).unwrap().direct_bytes, 128 * MIB);
    }
    // It is not given out again until the host has had enough for a while.
    rig.host.set_available((1 << 30) + 100 * MIB);
    let left = caches(&rig);
    rig.pass(120);
    assert!(caches(&rig) <= left, "{left} {}", caches(&rig));
    // Tasks that wait for memory raise what is required.
    rig.host.stall(Duration::from_millis(200));
    rig.pass(1);
    assert!(caches(&rig) < left, "{left} {}", caches(&rig));
}

#[test]
fn vms_get_back_what_they_had_when_the_daemon_ends() {
    let mut rig = Rig::of_three(config(Mode::Act));
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    assert!(rig.mib("scan") < 200);
    // By this daemon, or by one that follows one that was killed.
    let history = Arc::clone(&rig.shared.history);
    let mut later = Rig::with(config(Mode::Observe), rig.host.clone(), history);
    later.pass(3);
    later.turns.begin_return(later.now);
    later.until("all is back", |rig| {
        ["web", "search", "scan"]
            .iter()
            .all(|vm| rig.mib(vm) == 512)
    });
    assert!(later.host.most_bytes() <= 1536 * MIB);
    // One that was never resized keeps its size, whatever that is.
    let mut rig = Rig::of_three(config(Mode::Observe));
    rig.pass(10);
    rig.host.change("web", |vm| vm.direct_bytes = 400 * MIB);
    rig.pass(10);
    rig.turns.begin_return(rig.now);
    rig.pass(20);
    assert_eq!(rig.mib("web"), 400);
}

/// A rule that promises `idle` up to 20 misses per second, before that for all VMs.
fn config_with_idle() -> Config {
    let mut config = config(Mode::Act);
    let idle = VmRule {
        promise: Some(Promise {
            max_loss: None,
            max_misses_per_second: Some(20.0),
            max_stall: None,
        }),
        ..VmRule::for_name("idle")
    };
    config.vms.insert(0, idle);
    config
}

/// Adds a VM of 100 references per second that misses 0.1 times per second with all of its memory, and 18 with 160 MiB.
fn add_idle(rig: &Rig) {
    let truth = curve(&[(16, 0.9), (160, 0.18), (200, 0.05), (512, 0.001)]);
    rig.add(200, "idle", truth.with_references_per_second(100.0));
    rig.host.change("idle", |vm| vm.references_per_second = 100);
}

#[test]
fn an_idle_vm_that_is_promised_a_number_of_misses_gives_what_it_does_not_use() {
    let mut rig = Rig::new(config_with_idle());
    add_idle(&rig);
    rig.add(201, "search", search());
    rig.until("it divides", |rig| {
        let kept = |decision: &Decision| decision.state == State::Kept;
        rig.decisions().iter().any(kept)
    });
    assert!(rig.mib("idle") < 200, "{}", rig.mib("idle"));
    let decision = rig.newest();
    let check = decision.checks.iter().find(|check| check.vm == "idle");
    let (check, misses) = check
        .and_then(|check| Some((check, check.misses?)))
        .unwrap();
    assert_eq!((check.verdict, check.bound), (Verdict::Kept, None));
    let (predicted, measured) = (
        misses.predicted_per_second.unwrap(),
        misses.measured_per_second.unwrap(),
    );
    assert!(
        (predicted - measured).abs() < 1.0 && measured <= 20.0,
        "{misses:?}"
    );
    assert!(
        decision.reason.contains(" idle: planned "),
        "{}",
        decision.reason
    );
    assert!(
        decision.reason.contains(" for a limit of 20.0/s"),
        "{}",
        decision.reason
    );
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
fn a_vm_without_a_rate_keeps_its_size_and_the_reason_is_stated() {
    let mut rig = Rig::new(config_with_idle());
    add_idle(&rig);
    rig.add(201, "search", search());
    rig.host.change("idle", |vm| {
        vm.claimed = Some(curve(&[(16, 0.9), (160, 0.18), (512, 0.001)]));
    });
    rig.pass(300);
    assert_eq!(rig.decisions(), []);
    let idle = rig.snapshot().host.vms[0].clone();
    assert_eq!(
        (idle.vm.as_str(), idle.standing),
        ("idle", VmStatus::Unknown)
    );
    assert!(idle.why.contains("no rate"), "{}", idle.why);
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
