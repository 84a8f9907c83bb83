//! VMs that shrink to their working sets by themselves.

use std::sync::Arc;

use plimsoll_daemon::config::VmRule;
use plimsoll_daemon::turn::TICK;
use plimsoll_flow::{MissRatioCurve, PageCount, WorkingSet, WorkingSetBound};
use plimsoll_policy::{GivenOptions, Policy};
use plimsoll_protocol::decision::{Decision, Kind, Mode, State, Verdict};

use crate::rig::{MIB, Rig, config, curve, web};

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
fn what_a_self_ballooning_vm_lent_the_page_store_goes_back_at_the_daemons_end() {
    for killed in [false, true] {
        let mut rig = self_ballooning(160, WorkingSetBound::Estimate, Some(small()));
        rig.host.change("web", |vm| vm.truth = small());
        rig.host.put_store(128 * MIB);
        rig.until("the store has what it gives", |rig| {
            rig.host.store_bytes() > 400 * MIB
        });
        assert!(rig.mib("web") < 200);
        if killed {
            let history = Arc::clone(&rig.shared.history);
            rig = Rig::with(config(Mode::Observe), rig.host.clone(), history);
            rig.pass(3);
        }
        rig.turns.begin_return(rig.now);
        while rig.turns.goes_on_returning(rig.now) {
            rig.host.pass(TICK);
            rig.now += TICK;
        }
        assert_eq!((rig.mib("web"), rig.host.store_bytes() / MIB), (512, 128));
        assert_eq!(rig.host.most_bytes(), 640 * MIB);
    }
}

#[test]
fn a_page_store_that_an_operator_enlarged_keeps_its_size_at_the_daemons_end() {
    let mut rig = self_ballooning(160, WorkingSetBound::AtLeast, Some(small()));
    rig.host.put_store(128 * MIB);
    rig.pass(30);
    rig.host.put_store(192 * MIB);
    rig.turns.begin_return(rig.now);
    assert!(!rig.turns.goes_on_returning(rig.now));
    assert_eq!(rig.host.store_bytes(), 192 * MIB);
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
