//! Memory is divided by predictions: who gives, who gains, who decides that.

use std::time::Duration;

use plimsoll_daemon::config::{Config, VmRule, Workflow};
use plimsoll_daemon::shared::Command;
use plimsoll_flow::{CurvePoint, LOG_ERRORS, MissRatioCurve, PageCount};
use plimsoll_protocol::decision::{Decision, Kind, Mode, Phase, State, Verdict};
use plimsoll_protocol::request::{Choice, RefusalKind, SettingsChange};
use plimsoll_protocol::vm::{Promise, VmStatus};

use crate::rig::{MIB, Rig, config, curve, search};

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
fn promises_that_cannot_all_be_kept_are_refused() {
    let mut rig = Rig::of_three(Config {
        total_bytes: Some(1 << 30),
        ..config(Mode::Observe)
    });
    rig.pass(10);
    let change = SettingsChange {
        min_bytes: Some(1 << 30),
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
    let mut rig = Rig::of_three(config(Mode::Observe));
    rig.pass(10);
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
        // As in the configuration: 1000 %.
        SettingsChange {
            max_loss: Some(10.5),
            ..SettingsChange::default()
        },
        SettingsChange {
            min_bytes: Some(9 << 30),
            ..SettingsChange::default()
        },
        SettingsChange {
            max_bytes: Some(9 << 30),
            ..SettingsChange::default()
        },
        // More than its RAM, and it has no cache.
        SettingsChange {
            baseline_bytes: Some(1 << 40),
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

/// As by a rule for all VMs of which some are smaller.
#[test]
fn no_limit_of_a_rule_is_above_what_a_vm_can_have() {
    let mut config = config(Mode::Observe);
    config.vms.push(VmRule {
        min_bytes: Some(4 << 30),
        max_bytes: Some(8 << 30),
        baseline_bytes: Some(10 << 30),
        ..VmRule::for_name("*")
    });
    let mut rig = Rig::of_three(config);
    rig.host.change("web", |vm| vm.cache_bytes = Some(4 * MIB));
    rig.pass(20);
    let snapshot = rig.snapshot();
    let limits = |name: &str| {
        let mut vms = snapshot.host.vms.iter();
        let settings = vms.find(|vm| vm.vm == name).unwrap().settings;
        [
            settings.min_bytes,
            settings.max_bytes,
            settings.baseline_bytes,
        ]
        .map(|size| size / MIB)
    };
    assert_eq!(limits("search"), [1024; 3]);
    // Its cache can have the rest.
    assert_eq!(limits("web"), [4096, 8192, 10240]);
    let demands = &snapshot.demands["search"];
    assert_eq!(*demands, demands.map(|_| 1 << 30));
    let warnings = &snapshot.host.warnings;
    let named = "search: its rule asks for more than it can have: a minimum of 4096 MiB, a baseline of 10240 MiB; it has 1024 MiB of RAM, and 1024 MiB count";
    assert!(warnings.iter().any(|line| line == named), "{warnings:?}");
    let of_web = |line: &String| line.starts_with("web: its rule");
    assert!(!warnings.iter().any(of_web), "{warnings:?}");
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

/// A rule that promises `idle` up to 20 misses per second, before that for all VMs.
pub fn config_with_idle() -> Config {
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
pub fn add_idle(rig: &Rig) {
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
    assert_eq!((idle.vm.as_str(), idle.status), ("idle", VmStatus::Unknown));
    assert!(idle.why.contains("no rate"), "{}", idle.why);
}

#[test]
fn the_reason_names_a_vm_whose_band_exceeds_its_limit_at_its_maximum() {
    let mut config = config(Mode::Observe);
    config.vms.insert(
        0,
        VmRule {
            baseline_bytes: Some(256 * MIB),
            max_bytes: Some(224 * MIB),
            ..VmRule::for_name("web")
        },
    );
    config.total_bytes = Some(1200 * MIB);
    let mut rig = Rig::of_three(config.clone());
    let reason = |rig: &Rig| rig.snapshot().proposal.clone().unwrap().reason;
    rig.pass(30);
    let certain = reason(&rig);
    assert!(
        certain.contains("and each of these stays within its limit. "),
        "{certain}"
    );
    assert!(
        certain
            .starts_with("The VMs have 336 MiB more than the total to allocate. Misses fall to "),
        "{certain}"
    );
    // It hardly misses, as far as is known: the band of its few misses has no upper limit.
    let hardly_known = || {
        let point = CurvePoint {
            low: 0.0,
            high: 1.0,
            ..CurvePoint::exact(PageCount(4096), 0.0005)
        };
        MissRatioCurve::new(vec![point], 1000).unwrap()
    };
    rig.host
        .change("web", |vm| vm.claimed = Some(hardly_known()));
    rig.pass(30);
    let vague = reason(&rig);
    assert!(
        vague.contains("stays within its limit, except web (may exceed it). "),
        "{vague}"
    );
    let web = " web: planned 1.00 (band to 1000.00), above the limit of 1.25: its baseline, or a lower maximum, gives no less.";
    assert!(vague.contains(web), "{vague}");
    // With its baseline it misses as often as with its baseline, however often that is.
    config.vms[0].max_bytes = None;
    let mut rig = Rig::of_three(config);
    rig.host
        .change("web", |vm| vm.claimed = Some(hardly_known()));
    rig.pass(30);
    let kept = reason(&rig);
    assert!(
        kept.contains("and each of these stays within its limit. "),
        "{kept}"
    );
}

#[test]
fn a_rate_of_misses_that_is_hardly_known_keeps_no_memory_if_their_quotients_are_known() {
    let wide = |curve: &MissRatioCurve| {
        let points = curve.points().iter().map(|point| CurvePoint {
            low: point.miss_ratio * 0.5,
            high: (point.miss_ratio * 1.5).min(1.0),
            ..*point
        });
        curve.with_points(points.collect()).unwrap()
    };
    for is_known in [false, true] {
        let mut rig = Rig::of_three(config(Mode::Act));
        for vm in ["web", "search", "scan"] {
            rig.host.change(vm, |vm| {
                let curve = wide(&vm.truth);
                // That of all sizes is the same.
                let error = vec![[100; LOG_ERRORS]; curve.points().len()];
                let error = if is_known { error } else { Vec::new() };
                vm.claimed = Some(curve.with_log_errors(error));
            });
        }
        rig.pass(300);
        let has_moved = (rig.decisions().iter()).any(|decision| decision.state == State::Kept);
        assert_eq!(has_moved, is_known);
        assert_eq!(rig.mib("search") > 700, is_known, "{}", rig.mib("search"));
        assert_eq!(rig.mib("scan") < 200, is_known, "{}", rig.mib("scan"));
    }
}

#[test]
fn a_vm_whose_size_its_curve_does_not_resolve_has_no_status() {
    let mut rig = Rig::new(config_with_idle());
    add_idle(&rig);
    rig.host.change("idle", |vm| {
        let truth = curve(&[(600, 0.18), (1024, 0.001)]);
        vm.claimed = Some(truth.with_references_per_second(100.0));
    });
    rig.pass(30);
    let idle = rig.snapshot().host.vms[0].clone();
    assert_eq!(idle.status, VmStatus::Unknown);
    assert!(idle.why.contains("does not resolve"), "{}", idle.why);
    assert_eq!((idle.misses, idle.reclaimable_bytes), (None, Some(0)));
}

#[test]
fn a_configured_total_above_the_hosts_ram_gives_no_more_than_that() {
    let total = |total_bytes| {
        let config = Config {
            total_bytes,
            ..config(Mode::Observe)
        };
        let mut rig = Rig::of_three(config);
        rig.pass(6);
        let host = rig.snapshot().host.clone();
        let warned = |warning: &String| warning.contains("exceeds the host's RAM");
        (host.memory.divided_bytes, host.warnings.iter().any(warned))
    };
    // The simulated host has 1 TiB.
    assert_eq!(total(Some(2 << 40)), (1 << 40, true));
    assert_eq!(total(Some(1 << 31)), (1 << 31, false));
}

#[test]
fn a_headroom_that_the_host_cannot_have_withholds_nothing_and_is_named() {
    let with = |headroom_bytes| {
        let config = Config {
            headroom_bytes: Some(headroom_bytes),
            ..config(Mode::Act)
        };
        let mut rig = Rig::of_three(config);
        rig.host.set_available(100 << 30);
        rig.pass(6);
        let host = rig.snapshot().host.clone();
        let named = |warning: &&String| warning.contains("the configured headroom");
        let named = host.warnings.iter().find(named).cloned();
        let withheld = |warning: &&String| warning.contains("are withheld from the VMs");
        let withheld = host.warnings.iter().find(withheld).cloned();
        (named, withheld)
    };
    // The simulated host has 1 TiB.
    let cannot = "the configured headroom of 1048576 MiB cannot be kept with the host's RAM of 1048576 MiB: 32768 MiB are to stay available";
    assert_eq!(with(1 << 40), (Some(cannot.to_owned()), None));
    let (named, withheld) = with(600 << 30);
    let much = "is more than half of the host's RAM of 1048576 MiB: 614400 MiB are to stay";
    assert!(named.is_some_and(|named| named.contains(much)));
    let short = "it has 102400 MiB available and should keep 614400; ";
    assert!(withheld.is_some_and(|withheld| withheld.contains(short)));
    assert_eq!(with(1 << 30), (None, None));
}
