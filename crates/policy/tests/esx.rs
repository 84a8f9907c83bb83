//! The ESX policies on curves shaped as those behind the paper's Table 3.

mod common;

use common::{MIB, demand};
use plimsoll_flow::PageCount;
use plimsoll_policy::PolicyOptions;
use plimsoll_policy::{Allocation, Bound, Demand, Policy, PolicyError, Reason, Rules, allocate};

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

/// Sizes that miss less than the bound needs are alike for other policies, and here all but the least are idle.
#[test]
fn a_bound_on_misses_per_second_hides_no_idle_memory() {
    let points = [(64 * MIB, 0.019), (96 * MIB, 0.01), (128 * MIB, 0.001)];
    let idle = demand("idle", 512 * MIB, &points);
    let bounded = Demand {
        bound: Bound {
            max_loss: None,
            max_misses_per_second: Some(20.0),
        },
        curve: idle
            .curve
            .clone()
            .map(|curve| curve.with_references_per_second(1000.0)),
        ..idle.clone()
    };
    let busy = three(512, 700).remove(0);
    let rules = Rules {
        unit: PageCount(2 * MIB),
        ..Rules::new(PageCount(1024 * MIB))
    };
    let found =
        |idle: &Demand| mib(&allocate(&[idle.clone(), busy.clone()], &rules, CURVES).unwrap());
    assert!(found(&idle)[0] < 400, "{:?}", found(&idle));
    assert_eq!(found(&bounded), found(&idle));
}

/// Table 3 of \[LS07\], row by row.
mod table_3 {
    use super::*;

    // The paper's emulation takes all that is not needed, which is a tax of 1.
    const EMULATION: Policy = Policy::esx(1.0);

    #[test]
    fn emulation() {
        assert_eq!(divided(&three(336, 336), 4, EMULATION), [600, 600, 336]);
    }

    #[test]
    fn esx_server() {
        // A working set of 320 MiB, 62.5 of 100 pages: 320 + 4 (384 - 320) = 576 pages paid for by each VM.
        assert_eq!(divided(&three(336, 320), 4, SAMPLING), [576, 576, 384]);
        // Of 336 MiB, as the emulation found: 336 + 4 (394.7 - 336) = 570.7.
        assert_eq!(divided(&three(336, 336), 2, SAMPLING), [572, 570, 394]);
    }

    #[test]
    fn emulation_with_a_background_task() {
        assert_eq!(divided(&three(380, 830), 2, EMULATION), [578, 578, 380]);
    }

    #[test]
    fn esx_server_with_a_background_task() {
        assert_eq!(divided(&three(380, 830), 2, SAMPLING), [512, 512, 512]);
    }
}

/// rho of a VM of 512 MiB: `shares` / (P (f + k (1 - f))).
fn rho(shares: u32, size: u64, active: u64, idle_tax: f64) -> f64 {
    let idle = size.saturating_sub(active) as f64 / size as f64;
    let cost = (1.0 - idle) + idle / (1.0 - idle_tax);
    f64::from(shares) / (size as f64 * cost)
}

#[test]
fn nothing_is_left_to_reclaim_from_the_vm_with_the_fewest_shares_per_page() {
    let mut demands = three(336, 200);
    for (shares, tax) in [
        ([1, 1, 1], 0.75),
        ([1, 1, 3], 0.75),
        ([4, 2, 3], 0.5),
        ([1, 3, 2], 0.0),
        ([2, 2, 1], 0.9),
    ] {
        for (demand, shares) in demands.iter_mut().zip(shares) {
            demand.shares = shares;
            (demand.floor, demand.curve) = (PageCount(MIB), None);
        }
        let sizes = divided(&demands, 1, Policy::esx_sampling(tax));
        assert_eq!(sizes.iter().sum::<u64>(), 1536, "{shares:?} {sizes:?}");
        let active = [u64::MAX, u64::MAX, 200];
        for from in 0..3 {
            for to in 0..3 {
                // A VM with idle memory does not grow above its baseline.
                let full = to == 2 && sizes[to] == 512 || sizes[to] == 1024;
                let pays = rho(shares[from], sizes[from] - 1, active[from], tax);
                let offers = rho(shares[to], sizes[to] + 1, active[to], tax);
                assert!(full || from == to || pays >= offers, "{shares:?} {sizes:?}");
            }
        }
    }
}

#[test]
fn a_task_that_touches_much_and_reuses_nothing_deceives_sampling_alone() {
    // 2000 MiB read repeatedly: a working set above the baseline, but a flat curve.
    let demands = three(336, 830);
    assert_eq!(divided(&demands, 4, SAMPLING), [512, 512, 512]);
    let found = allocate(&demands, &rules(4), CURVES).unwrap();
    assert_eq!(mib(&found), [572, 572, 392]);
    let reasons: Vec<_> = found.targets.iter().map(|target| target.reason).collect();
    assert_eq!(reasons, [Reason::Gains, Reason::Gains, Reason::Gives]);
    let relative = found.targets[2].relative.unwrap();
    assert_eq!((relative.expected, relative.high), (1.0, 1.0));
    assert!(found.geometric_mean < 1.0 && found.gap.is_none() && found.search.is_none());
}

#[test]
fn shares_protect_idle_memory_and_buy_active_memory() {
    let mut demands = three(336, 336);
    // 336 + 4 (P - 336) <= 3 Q: all that it has.
    demands[2].shares = 3000;
    assert_eq!(divided(&demands, 4, SAMPLING), [512, 512, 512]);
    // Of two victims, the one with fewer shares pays first.
    demands[0].working_set = Some(PageCount(336 * MIB));
    let [web, search, database] = divided(&demands, 4, SAMPLING)[..] else {
        panic!("three VMs");
    };
    assert!(
        web < 512 && search > 512 && database == 512,
        "{web} {search}"
    );
    // Without a tax, memory is in proportion to shares, whether it is used or not.
    let mut demands = three(336, 336);
    for demand in &mut demands {
        (demand.floor, demand.curve) = (PageCount(0), None);
    }
    demands[0].shares = 2000;
    assert_eq!(
        divided(&demands, 4, Policy::esx_sampling(0.0)),
        [768, 384, 384]
    );
}

#[test]
fn a_vm_that_uses_all_of_what_was_left_to_it_gets_its_memory_back() {
    let mut demands = three(336, 384);
    demands[0].current = PageCount(576 * MIB);
    demands[1].current = PageCount(576 * MIB);
    demands[2].current = PageCount(384 * MIB);
    assert_eq!(divided(&demands, 4, SAMPLING), [512, 512, 512]);
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
    assert_eq!(divided(&demands, 4, CURVES), [572, 572, 392]);
}

#[test]
fn ceilings_leave_memory_to_the_others() {
    let mut demands = three(336, 336);
    demands[0].ceiling = PageCount(540 * MIB);
    // 336 + 4 (P - 336) = Q, and P + Q = 996.
    assert_eq!(divided(&demands, 4, CURVES), [540, 596, 400]);
    // What no VM can use stays with the victim.
    demands[1].ceiling = PageCount(532 * MIB);
    assert_eq!(divided(&demands, 4, CURVES), [540, 532, 464]);
    assert_eq!(divided(&demands, 4, Policy::esx(1.0)), [540, 532, 464]);
}

#[test]
fn free_memory_is_divided_like_all_other() {
    let demands = three(336, 336);
    let roomy = Rules {
        total: PageCount((1536 + 32) * MIB),
        ..rules(4)
    };
    let found = allocate(&demands, &roomy, SAMPLING).unwrap();
    assert_eq!(mib(&found), [588, 584, 396]);
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
fn a_host_too_small_for_all_baselines_takes_from_the_idle_first_if_all_is_taxed() {
    let demands = three(336, 336);
    let small = |mib: u64| Rules {
        total: PageCount(mib * MIB),
        ..rules(4)
    };
    for policy in [CURVES, SAMPLING] {
        let found = allocate(&demands, &small(1400), policy).unwrap();
        assert_eq!(mib(&found), [512, 508, 380], "{policy:?}");
    }
    for policy in [Policy::esx(1.0), Policy::esx_sampling(1.0)] {
        let found = allocate(&demands, &small(1400), policy).unwrap();
        assert_eq!(mib(&found), [532, 532, 336], "{policy:?}");
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
    assert_eq!(divided(&demands, 4, SAMPLING), [572, 572, 392]);
}

#[test]
fn sampling_keeps_promises_that_a_curve_shows() {
    let mut demands = three(480, 336);
    demands[2].bound = Bound::on_loss(0.1);
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
