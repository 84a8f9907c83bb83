//! The ESX policies on curves shaped as those behind the paper's Table 3.

mod common;

use common::{MIB, demand};
use plimsoll_flow::PageCount;
use plimsoll_policy::PolicyOptions;
use plimsoll_policy::{Allocation, Demand, Policy, PolicyError, Reason, Rules, allocate};

/// Two VMs that miss less with every megabyte, and a database that needs `flat` MiB.
fn three(flat: u64, working_set: u64) -> Vec<Demand> {
    let slope = |fall: f64| -> Vec<_> {
        (32..=512)
            .map(|unit| (unit * 2 * MIB, 0.8 - fall * unit as f64))
            .collect()
    };
    let database = [(64 * MIB, 0.9), (flat * MIB, 0.4)];
    let vm = |name, points: &[_], working_set| Demand {
        floor: PageCount(128 * MIB),
        ceiling: PageCount(1024 * MIB),
        working_set: Some(PageCount(working_set * MIB)),
        ..demand(name, 512 * MIB, points)
    };
    vec![
        vm("web", &slope(0.0008), 700),
        vm("search", &slope(0.0014), 900),
        vm("tpch", &database, working_set),
    ]
}

fn rules(unit_mib: u64) -> Rules {
    Rules {
        unit: PageCount(unit_mib * MIB),
        ..Rules::new(PageCount(1536 * MIB))
    }
}

fn mib(allocation: &Allocation) -> Vec<u64> {
    let targets = allocation.targets.iter();
    targets.map(|target| target.size.0 / MIB).collect()
}

fn divided(demands: &[Demand], unit_mib: u64, policy: Policy) -> Vec<u64> {
    mib(&allocate(demands, &rules(unit_mib), policy).unwrap())
}

const CURVES: Policy = Policy::esx(PolicyOptions::IDLE_TAX);

const SAMPLING: Policy = Policy::esx_sampling(PolicyOptions::IDLE_TAX);

#[test]
fn all_that_a_database_does_not_need_is_divided() {
    let all = Policy::esx(1.0);
    assert_eq!(divided(&three(336, 336), 4, all), [600, 600, 336]);
}

#[test]
fn the_tax_leaves_a_quarter_of_it() {
    // As in the paper's emulation with the background task, and its ESX server without.
    assert_eq!(divided(&three(336, 830), 2, CURVES), [578, 578, 380]);
    assert_eq!(divided(&three(336, 336), 4, SAMPLING), [576, 576, 384]);
}

#[test]
fn a_task_that_touches_much_and_reuses_nothing_deceives_sampling_alone() {
    // 2000 MiB read repeatedly: a working set above the baseline, but a flat curve.
    let demands = three(336, 830);
    assert_eq!(divided(&demands, 4, SAMPLING), [512, 512, 512]);
    let found = allocate(&demands, &rules(4), CURVES).unwrap();
    assert_eq!(mib(&found), [576, 576, 384]);
    let reasons: Vec<_> = found.targets.iter().map(|target| target.reason).collect();
    assert_eq!(reasons, [Reason::Gains, Reason::Gains, Reason::Gives]);
    let relative = found.targets[2].relative.unwrap();
    assert_eq!((relative.expected, relative.high), (1.0, 1.0));
    assert!(found.geometric_mean < 1.0 && found.gap.is_none() && found.search.is_none());
}

#[test]
fn a_vm_that_would_gain_from_more_is_no_victim() {
    let mut demands = three(336, 336);
    // Flat around the baseline, with a cliff further up.
    let later = demand("x", 0, &[(336 * MIB, 0.4), (900 * MIB, 0.01)]);
    demands[2].curve = later.curve;
    assert_eq!(divided(&demands, 4, CURVES), [512, 512, 512]);
    // The cliff is out of its reach.
    demands[2].ceiling = PageCount(800 * MIB);
    assert_eq!(divided(&demands, 4, CURVES), [576, 576, 384]);
}

#[test]
fn shares_and_ceilings_say_who_gets_how_much() {
    let mut demands = three(336, 336);
    demands[0].shares = 3000;
    assert_eq!(divided(&demands, 4, CURVES), [608, 544, 384]);
    demands[0].ceiling = PageCount(540 * MIB);
    assert_eq!(divided(&demands, 4, CURVES), [540, 616, 380]);
    // What no VM can use stays with the victim.
    demands[1].ceiling = PageCount(532 * MIB);
    assert_eq!(divided(&demands, 4, CURVES), [540, 532, 464]);
}

#[test]
fn free_memory_is_given_before_any_is_taken() {
    let demands = three(336, 336);
    let roomy = Rules {
        total: PageCount((1536 + 32) * MIB),
        ..rules(4)
    };
    let found = allocate(&demands, &roomy, SAMPLING).unwrap();
    assert_eq!(mib(&found), [592, 592, 384]);
    let plenty = Rules {
        total: PageCount(4096 * MIB),
        ..rules(4)
    };
    let found = allocate(&demands, &plenty, SAMPLING).unwrap();
    assert_eq!(mib(&found), [1024, 1024, 512]);
    assert_eq!(found.spare, PageCount(1536 * MIB));
}

#[test]
fn nobody_without_need_takes_what_victims_have() {
    let idle = |name| Demand {
        working_set: Some(PageCount(100 * MIB)),
        ..demand(name, 512 * MIB, &[(200 * MIB, 0.4)])
    };
    let demands = [idle("a"), idle("b"), idle("c")];
    for policy in [CURVES, SAMPLING] {
        assert_eq!(divided(&demands, 4, policy), [512, 512, 512]);
    }
}

#[test]
fn a_host_too_small_for_all_baselines_takes_from_the_idle_first() {
    let demands = three(336, 336);
    let small = |mib: u64| Rules {
        total: PageCount(mib * MIB),
        ..rules(4)
    };
    for policy in [CURVES, SAMPLING] {
        let found = allocate(&demands, &small(1400), policy).unwrap();
        assert_eq!(mib(&found), [512, 512, 376], "{policy:?}");
        assert_eq!(found.targets[2].reason, Reason::HostShort);
        let tight = allocate(&demands, &small(1340), policy).unwrap();
        assert!(mib(&tight)[2] <= 336 && mib(&tight).iter().sum::<u64>() <= 1340);
        assert!(tight.targets.iter().all(|target| {
            target
                .relative
                .is_some_and(|relative| relative.high <= 1.25)
        }));
        let error = allocate(&demands, &small(600), policy).unwrap_err();
        assert!(matches!(error, PolicyError::Infeasible { .. }), "{error}");
    }
}

#[test]
fn who_was_not_measured_keeps_what_he_has() {
    let mut demands = three(336, 336);
    demands[2].working_set = None;
    demands[2].current = PageCount(400 * MIB);
    // The others may use half each of the memory that it does not have.
    assert_eq!(divided(&demands, 4, SAMPLING), [568, 568, 400]);
    let mut demands = three(336, 336);
    demands[2].curve = None;
    assert_eq!(divided(&demands, 4, CURVES), [512, 512, 512]);
    // Sampling needs no curve.
    assert_eq!(divided(&demands, 4, SAMPLING), [576, 576, 384]);
}

#[test]
fn sampling_keeps_promises_that_a_curve_shows() {
    let mut demands = three(480, 336);
    demands[2].max_loss = 0.1;
    assert_eq!(divided(&demands, 4, SAMPLING), [528, 528, 480]);
}

#[test]
fn steps_bound_what_is_given_and_taken() {
    let stepped = Rules {
        step: Some(PageCount(40 * MIB)),
        ..rules(4)
    };
    let found = allocate(&three(336, 336), &stepped, CURVES).unwrap();
    assert_eq!(mib(&found), [532, 532, 472]);
}
