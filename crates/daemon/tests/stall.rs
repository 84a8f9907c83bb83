//! Bounds on waiting, on a simulated host: the cost of a miss as measured, and the pressure of a VM's control group.

use plimsoll_daemon::config::{Config, VmRule};
use plimsoll_protocol::decision::{Decision, Kind, Mode, State, Verdict};
use plimsoll_protocol::vm::{MissCost, MissCostSource, Promise, VmSummary};

#[allow(dead_code, reason = "each test uses its part")]
#[path = "common/rig.rs"]
mod rig;
#[allow(dead_code, reason = "shared with the benchmarks")]
#[path = "common/simulated.rs"]
mod simulated;

use rig::{Rig, config, curve, search};

const ASSUMED: MissCost = MissCost {
    ms: 1.0,
    source: MissCostSource::Assumed,
};

/// A VM that may wait for 1 % of its vCPU time, of which it uses one second per second, beside one that gains from its
/// memory. It misses 5 times per second with 400 MiB or more, and 20 times with 256 MiB.
fn rig(config: Config, cost: MissCost) -> Rig {
    let rig = Rig::new(config);
    let truth = curve(&[(16, 0.9), (160, 0.5), (256, 0.2), (400, 0.05), (512, 0.05)]);
    let truth = truth
        .with_references_per_second(100.0)
        .with_vcpus(Some(1.0));
    rig.add(200, "idle", truth);
    rig.host.change("idle", |vm| {
        vm.references_per_second = 100;
        vm.miss_cost = cost;
    });
    rig.add(201, "search", search());
    rig
}

fn promised(max_stall: Option<f64>) -> Config {
    let mut config = config(Mode::Act);
    let promise = Promise {
        max_loss: None,
        max_misses_per_second: max_stall.is_none().then_some(20.0),
        max_stall,
    };
    let idle = VmRule {
        promise: Some(promise),
        ..VmRule::for_name("idle")
    };
    config.vms.insert(0, idle);
    config
}

fn idle(rig: &Rig) -> VmSummary {
    rig.snapshot().host.vms[0].clone()
}

/// The first decision that ended as kept.
fn kept(rig: &mut Rig) -> Decision {
    let is_kept = |decision: &Decision| decision.state == State::Kept;
    rig.until("it divides", |rig| rig.decisions().iter().any(is_kept));
    rig.decisions().into_iter().find(is_kept).unwrap()
}

#[test]
fn a_vm_gives_as_much_as_the_measured_cost_of_its_misses_allows() {
    let mut sizes = Vec::new();
    for cost in [
        MissCost {
            ms: 0.5,
            source: MissCostSource::DiskDaemon,
        },
        ASSUMED,
        MissCost {
            ms: 1.6,
            source: MissCostSource::BlockStatistics,
        },
    ] {
        let mut rig = rig(promised(Some(0.01)), cost);
        let decision = kept(&mut rig);
        let found = idle(&rig).miss_cost;
        assert_eq!(found.source, cost.source);
        assert!((found.ms - cost.ms).abs() < 0.01, "{found:?}");
        // 1 % of a vCPU is 10 ms per second.
        let check = decision
            .checks
            .iter()
            .find(|check| check.vm == "idle")
            .unwrap();
        let misses = check.misses.unwrap();
        assert_eq!(check.verdict, Verdict::Kept, "{check:?}");
        assert!(
            (misses.bound_per_second * cost.ms - 10.0).abs() < 0.2,
            "{misses:?}"
        );
        assert!(
            misses.measured_per_second.unwrap() * cost.ms < 10.2,
            "{misses:?}"
        );
        let stated = format!("a miss costs {cost}, {}.", cost.source.description());
        assert!(decision.reason.contains(&stated), "{}", decision.reason);
        sizes.push(rig.mib("idle"));
    }
    assert!(sizes[0] < sizes[1] && sizes[1] < sizes[2], "{sizes:?}");
    assert!((250..270).contains(&sizes[0]), "{sizes:?}");
}

#[test]
fn what_is_assumed_is_what_is_configured() {
    let mut config = promised(Some(0.01));
    config.miss_cost_ms = 0.5;
    let mut rig = rig(config, ASSUMED);
    kept(&mut rig);
    let found = idle(&rig).miss_cost;
    assert_eq!((found.ms, found.source), (0.5, MissCostSource::Assumed));
    assert!((250..270).contains(&rig.mib("idle")), "{}", rig.mib("idle"));
}

/// A loop in which the threads of `idle` wait for so much of the time once it has less than 400 MiB, until its first
/// decision with a check has ended.
fn stalled(max_stall: Option<f64>, share: f64) -> (Rig, Decision) {
    let mut rig = rig(
        promised(max_stall),
        MissCost {
            ms: 0.5,
            source: MissCostSource::DiskDaemon,
        },
    );
    rig.host
        .change("idle", |vm| vm.stalls_below = Some((400 << 20, share)));
    let checked = |decision: &Decision| !decision.checks.is_empty();
    rig.until("it is checked", |rig| rig.decisions().iter().any(checked));
    let decision = rig.decisions().into_iter().find(checked).unwrap();
    (rig, decision)
}

#[test]
fn a_vm_whose_threads_wait_for_memory_since_it_gave_some_gets_it_back() {
    for (max_stall, share, bound) in [(None, 0.2, 0.05), (Some(0.01), 0.02, 0.01)] {
        let (mut rig, decision) = stalled(max_stall, share);
        assert_eq!(decision.state, State::RolledBack, "{}", decision.reason);
        let check = decision
            .checks
            .iter()
            .find(|check| check.vm == "idle")
            .unwrap();
        let stall = check.stall.unwrap();
        assert_eq!(check.verdict, Verdict::Broken);
        assert_eq!((stall.before_ratio, stall.bound_ratio), (Some(0.0), bound));
        assert!((stall.measured_ratio - share).abs() < 0.01, "{stall:?}");
        let why = "its QEMU waited for memory of the host in ";
        assert!(decision.reason.contains(why), "{}", decision.reason);
        rig.until("it has its memory", |rig| rig.mib("idle") == 512);
        let taken_back = |decision: &Decision| decision.kind == Kind::Rollback;
        assert!(rig.decisions().iter().any(taken_back));
    }
}

#[test]
fn waiting_within_the_bound_or_of_a_vm_that_gave_nothing_takes_nothing_back() {
    let (rig, decision) = stalled(None, 0.04);
    assert_eq!(decision.state, State::Kept, "{}", decision.reason);
    assert!(rig.mib("idle") < 400);
    assert!((idle(&rig).memory_stall_ratio.unwrap() - 0.04).abs() < 0.01);
    // The VM that gains waits as much as it likes.
    let mut rig = self::rig(promised(None), ASSUMED);
    rig.host
        .change("search", |vm| vm.stalls_below = Some((u64::MAX, 0.5)));
    let decision = kept(&mut rig);
    let check = decision
        .checks
        .iter()
        .find(|check| check.vm == "search")
        .unwrap();
    assert_eq!(check.stall, None);
    assert_eq!(idle(&rig).memory_stall_ratio, None);
}
