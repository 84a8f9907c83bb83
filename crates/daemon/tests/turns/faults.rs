//! Balloons that stand still, monitors that break or are silent, VMs that end, and a daemon that is stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use plimsoll_daemon::config::Workflow;
use plimsoll_daemon::history::ResizeMark;
use plimsoll_daemon::shared::Command;
use plimsoll_daemon::turn::TICK;
use plimsoll_protocol::decision::{Mode, Phase, State, StepState};
use plimsoll_protocol::request::{Choice, RefusalKind};
use plimsoll_vm::ProcessId;

use crate::rig::{MIB, Rig, config, web};
use crate::simulated::{BalloonBehaviour, Counts, Reports};

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
fn a_vm_that_is_paused_is_shown_as_that_until_it_goes_on() {
    let mut rig = Rig::of_three(config(Mode::Observe));
    let host = rig.host.clone();
    let stopped = |rig: &mut Rig| {
        rig.pass(30);
        let snapshot = rig.snapshot();
        let vms = snapshot.host.vms.iter();
        let stopped = vms.filter_map(|vm| Some((vm.vm.clone(), vm.stopped.clone()?)));
        stopped.collect::<Vec<_>>()
    };
    assert_eq!(stopped(&mut rig), []);
    host.change("web", |vm| vm.stopped = Some("paused"));
    let web = || ("web".to_owned(), "paused".to_owned());
    assert_eq!(stopped(&mut rig), [web()]);
    // What a monitor does not answer is not known.
    host.change("web", |vm| vm.answers = false);
    assert_eq!(stopped(&mut rig), []);
    host.change("web", |vm| vm.answers = true);
    assert_eq!(stopped(&mut rig), [web()]);
    host.change("web", |vm| vm.stopped = None);
    assert_eq!(stopped(&mut rig), []);
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
fn a_vm_that_starts_anew_in_the_middle_takes_no_part_in_the_move_of_the_one_before() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Pace(4 * MIB));
    rig.until("it moves", |rig| rig.mib("scan") < 500);
    let promised = rig.newest().plan.unwrap().targets.len();
    rig.add(200, "scan", web());
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    let decision = rig.newest();
    let step = decision.steps.iter().find(|step| step.vm == "scan");
    assert_eq!(step.unwrap().state, StepState::Gone);
    assert_eq!((promised, decision.checks.len()), (3, 2));
    assert_eq!(rig.mib("scan"), 512);
}

#[test]
fn a_target_that_may_not_have_arrived_keeps_no_memory_from_others() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host.change("search", |vm| {
        vm.follows = BalloonBehaviour::Pace(8 * MIB);
    });
    rig.until("it grows", |rig| rig.mib("search") > 560);
    rig.host
        .change("search", |vm| vm.follows = BalloonBehaviour::Broken);
    rig.until("it ends", |rig| {
        rig.decisions()
            .iter()
            .any(|decision| decision.state == State::Partly)
    });
    assert!(rig.mib("scan") < 300);
    // Its balloon works again, and has what it had by itself.
    rig.host.change("search", |vm| {
        vm.follows = BalloonBehaviour::Pace(64 * MIB);
        vm.direct_bytes = 512 * MIB;
        vm.target_bytes = Some(512 * MIB);
    });
    rig.turns.begin_return(rig.now);
    rig.pass(20);
    for vm in ["web", "search", "scan"] {
        assert_eq!(rig.mib(vm), 512, "{vm}");
    }
    assert!(rig.host.most_bytes() <= 1536 * MIB);
}

#[test]
fn a_vm_that_has_not_answered_since_the_start_counts_with_the_ram_that_was_plugged() {
    let mut rig = Rig::of_three(config(Mode::Observe));
    rig.host.change("web", |vm| vm.direct_bytes = vm.ram_bytes);
    rig.pass(10);
    rig.host.change("web", |vm| {
        vm.ram_bytes += 256 * MIB;
        vm.direct_bytes += 256 * MIB;
    });
    rig.pass(10);
    let (host, history) = (rig.host.clone(), Arc::clone(&rig.shared.history));
    drop(rig);
    host.change("web", |vm| vm.answers = false);
    let mut later = Rig::with(config(Mode::Act), host, history);
    later.until("memory is moved", |rig| {
        let newest = rig.decisions().into_iter().next();
        newest.is_some_and(|decision| decision.state.has_ended())
    });
    assert!(later.mib("scan") < 300);
    assert_eq!(later.host.most_bytes(), (1280 + 512 + 512) * MIB);
}

#[test]
fn a_target_of_a_cache_that_may_not_have_arrived_keeps_no_memory_from_its_vm() {
    let mut config = config(Mode::Act);
    config.workflow = Workflow::Cache {
        direct_ratio: 0.5,
        trace_for: Duration::from_secs(600),
        keep: true,
        every: Duration::from_secs(3600),
    };
    let mut rig = Rig::of_three(config);
    for vm in ["web", "search", "scan"] {
        rig.host.change(vm, |vm| vm.cache_bytes = Some(0));
    }
    let own = |rig: &Rig| rig.host.vm("web").unwrap().direct_bytes / MIB;
    rig.until("it shrinks", |rig| own(rig) < 500);
    rig.host.change("web", |vm| vm.disk_answers = false);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    assert!(own(&rig) < 500);
    // The daemon of its disk has started anew.
    rig.host.change("web", |vm| {
        vm.disk_answers = true;
        vm.cache_bytes = Some(4 * MIB);
    });
    rig.turns.begin_return(rig.now);
    rig.pass(30);
    assert_eq!(own(&rig), 508);
}

/// A counter that were 0 for a turn would count again from the start for who reads it.
#[test]
fn what_a_disk_counted_stays_known_while_its_daemon_does_not_answer() {
    let mut rig = Rig::of_three(config(Mode::Observe));
    rig.host.change("web", |vm| {
        vm.cache_bytes = Some(4 * MIB);
        vm.counts = Counts::Disk;
    });
    rig.pass(60);
    let of_web = |rig: &Rig| {
        let host = rig.snapshot().host.clone();
        host.vms.into_iter().find(|vm| vm.vm == "web").unwrap()
    };
    let before = of_web(&rig).cache.unwrap();
    assert!(before.read_blocks > 0, "{before:?}");
    rig.host.change("web", |vm| {
        vm.disk_answers = false;
        vm.reports = Reports::Nothing;
    });
    rig.pass(300);
    assert_eq!(of_web(&rig).cache.unwrap().read_blocks, before.read_blocks);
    // And nobody counts its misses any more.
    let past = rig.shared.history.samples("web", 0, u64::MAX, 1000);
    assert_eq!(past.last().unwrap().misses_per_second, None);
    assert!(past.iter().any(|sample| sample.misses_per_second.is_some()));
}

#[test]
fn a_cache_that_has_not_answered_since_the_start_counts_with_what_it_had() {
    let mut config = config(Mode::Act);
    config.workflow = Workflow::Cache {
        direct_ratio: 0.5,
        trace_for: Duration::from_secs(600),
        keep: true,
        every: Duration::from_secs(3600),
    };
    let mut rig = Rig::of_three(config.clone());
    for vm in ["web", "search", "scan"] {
        rig.host.change(vm, |vm| vm.cache_bytes = Some(0));
    }
    rig.until("they are traced", |rig| {
        rig.snapshot().host.phase == Phase::Tracing
    });
    let id = rig.newest().id;
    let (host, history) = (rig.host.clone(), Arc::clone(&rig.shared.history));
    drop(rig);
    host.change("web", |vm| vm.disk_answers = false);
    let mut later = Rig::with(config, host, history);
    later.pass(10);
    let choice = Choice { decision: Some(id) };
    later.ask(|reply| Command::Rollback(choice, reply)).unwrap();
    later.pass(60);
    assert_eq!(later.host.most_bytes(), 1536 * MIB);
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
fn silent_monitors_are_not_waited_for_one_after_another_when_memory_is_moved() {
    const SILENCE: Duration = Duration::from_millis(200);
    let mut rig = Rig::of_three(config(Mode::Act));
    for number in 0..60 {
        let name = format!("silent-{number}");
        rig.add(1000 + number, &name, web());
    }
    rig.pass(12);
    for number in 0..60 {
        let name = format!("silent-{number}");
        rig.host.change(&name, |vm| vm.silence = SILENCE);
    }
    let (mut longest, mut reported) = (Duration::ZERO, 0);
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    rig.turns.report_progress(Box::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    }));
    while rig.decisions().is_empty() {
        let began = Instant::now();
        rig.pass(1);
        longest = longest.max(began.elapsed());
        reported = calls.load(Ordering::Relaxed);
    }
    println!(
        "60 silent monitors: the longest tick took {longest:?}, {reported} reports of progress"
    );
    assert!(longest < SILENCE * 30, "{longest:?}");
    assert!(reported > 0);
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
fn requests_to_many_silent_monitors_keep_a_move_and_its_stop_waiting_for_some_seconds_only() {
    const SILENCE: Duration = Duration::from_millis(500);
    let mut rig = Rig::new(config(Mode::Observe));
    let names: Vec<String> = (0..30).map(|index| format!("vm-{index}")).collect();
    for (name, pid) in names.iter().zip(500..) {
        rig.add(pid, name, web());
    }
    rig.pass(10);
    // What an earlier daemon took of them.
    for name in &names {
        let vm = rig.host.vm(name).unwrap();
        let process = ProcessId {
            pid: vm.pid,
            start_ticks: vm.start_ticks,
        };
        let mark = ResizeMark {
            process: Some(process),
            ..ResizeMark::default()
        };
        let _ = rig.shared.history.put_mark(name, mark);
    }
    let change = |rig: &Rig, silence: Duration, set_silence: Duration| {
        for name in &names {
            rig.host.change(name, |vm| {
                vm.direct_bytes = 256 * MIB;
                vm.silence = silence;
                vm.set_silence = set_silence;
            });
        }
    };
    let took = |rig: &mut Rig, step: &dyn Fn(&mut Rig)| {
        let began = Instant::now();
        step(rig);
        rig.host.pass(TICK);
        rig.now += TICK;
        began.elapsed()
    };
    // They fall silent after their last answer.
    change(&rig, Duration::ZERO, SILENCE);
    let begin = took(&mut rig, &|rig| rig.turns.begin_return(rig.now));
    assert!(begin < Duration::from_secs(13), "{begin:?}");
    change(&rig, SILENCE, SILENCE);
    let tick = took(&mut rig, &|rig| {
        rig.turns.goes_on_returning(rig.now);
    });
    assert!(tick < Duration::from_secs(3), "{tick:?}");
    let stop = took(&mut rig, &|rig| drop(rig.ask(Command::Pause)));
    assert!(stop < Duration::from_secs(9), "{stop:?}");
    assert_eq!(rig.newest().state, State::Stopped);
    change(&rig, Duration::ZERO, Duration::ZERO);
    rig.turns.begin_return(rig.now);
    rig.until("all is back", |rig| {
        names.iter().all(|vm| rig.mib(vm) == 512)
    });
}
