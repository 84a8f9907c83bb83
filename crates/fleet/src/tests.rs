//! Placements beside a naive twin that tries all of them, and fleets of known answers.

use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::fleet::{
    CollectedHost, FleetFile, Goal, HostDemands, IntervalDemand, MoveReason, VmDemands,
};
use proptest::prelude::*;

use crate::collect::set_aside;
use crate::fleet::{Fleet, FleetError, Host, Settings, Vm};
use crate::load::Problem;
use crate::place::{Aim, place, problem};
use crate::plan::{plan, report};
use crate::rules::Rules;
use crate::{bound, order};

const GIB: u64 = 1 << 30;
const HOUR_MS: u64 = 3_600_000;
const NOON_MS: u64 = 500_000 * HOUR_MS;

/// Hosts of so many GiB, and VMs with their host and their needs in GiB in two slots.
fn fleet(hosts: &[u32], vms: &[(usize, [u32; 2])]) -> Fleet {
    let host = |(number, gib): (usize, &u32)| Host {
        name: format!("host-{number}"),
        capacity: vec![gib * 1024, gib * 1024, u32::MAX, u32::MAX],
    };
    let vm = |(number, (host, need)): (usize, &(usize, [u32; 2]))| Vm {
        name: format!("vm-{number}"),
        uuid: None,
        host: *host,
        size_bytes: u64::from(need[0].max(need[1])) * GIB,
        need: vec![need[0] * 1024, need[1] * 1024, 0, 0],
        known_ratio: 1.0,
        processors_known: true,
        is_migrating: false,
    };
    Fleet {
        slots: 2,
        hosts: hosts.iter().enumerate().map(host).collect(),
        vms: vms.iter().enumerate().map(vm).collect(),
        notes: Vec::new(),
    }
}

fn aim(goal: Goal, survive_loss: bool) -> Aim {
    Aim {
        goal,
        survive_loss,
        exhaustive: true,
    }
}

/// Whether all VMs have what they need, with `host_of`.
fn is_within(fleet: &Fleet, host_of: &[usize]) -> bool {
    (0..fleet.hosts.len()).all(|host| {
        let capacity = fleet.hosts[host].capacity.iter().enumerate();
        capacity.into_iter().all(|(slot, &capacity)| {
            let there = (0..host_of.len()).filter(|&vm| host_of[vm] == host);
            let needs = there.map(|vm| u64::from(fleet.vms[vm].need[slot]));
            needs.sum::<u64>() <= u64::from(capacity)
        })
    })
}

fn cost(fleet: &Fleet, goal: Goal, host_of: &[usize]) -> (usize, u64) {
    let mut used: Vec<usize> = host_of.to_vec();
    used.sort_unstable();
    used.dedup();
    let moved = fleet.vms.iter().zip(host_of);
    let moved = moved.filter(|(vm, host)| vm.host != **host);
    let bytes = moved.map(|(vm, _)| vm.size_bytes).sum();
    match goal {
        Goal::Fit => (0, bytes),
        Goal::FewestHosts => (used.len(), bytes),
    }
}

/// The least cost of all placements that keep every need, and of those that `is_allowed`; by trying all.
fn naive(fleet: &Fleet, goal: Goal, is_allowed: impl Fn(&[usize]) -> bool) -> Option<(usize, u64)> {
    let (hosts, vms) = (fleet.hosts.len(), fleet.vms.len());
    let mut best = None;
    for mut number in 0..hosts.pow(u32::try_from(vms).unwrap()) {
        let mut host_of = vec![0; vms];
        for host in &mut host_of {
            *host = number % hosts;
            number /= hosts;
        }
        if is_within(fleet, &host_of) && is_allowed(&host_of) {
            let cost = cost(fleet, goal, &host_of);
            best = Some(best.map_or(cost, |best: (usize, u64)| best.min(cost)));
        }
    }
    best
}

fn small_fleets() -> impl Strategy<Value = Fleet> {
    let hosts = prop::collection::vec(4_u32..20, 1..5);
    let vms = prop::collection::vec((0_usize..4, [0_u32..9, 0_u32..9]), 0..7);
    (hosts, vms).prop_map(|(hosts, mut vms)| {
        for vm in &mut vms {
            vm.0 %= hosts.len();
        }
        fleet(&hosts, &vms)
    })
}

proptest! {
    #[test]
    fn a_small_fleet_is_placed_as_well_as_can_be(fleet in small_fleets(), fewest in any::<bool>(), forbid in any::<bool>()) {
        let goal = if fewest { Goal::FewestHosts } else { Goal::Fit };
        let mut text = String::new();
        if forbid && fleet.vms.len() > 2 {
            text = "[[apart]]\nvms=['vm-0','vm-1']\n[[on]]\nvms=['vm-2']\nhosts=['host-0']\n".to_owned();
        }
        let is_allowed = |host_of: &[usize]| text.is_empty() || (host_of[0] != host_of[1] && host_of[2] == 0);
        let rules = Rules::parse(&text).unwrap();
        let best = naive(&fleet, goal, is_allowed);
        let found = place(&fleet, &rules, aim(goal, false)).unwrap();
        prop_assert!(found.is_optimal);
        prop_assert_eq!(found.fits, best.is_some());
        if let Some(best) = best {
            prop_assert!(is_within(&fleet, &found.host_of) && is_allowed(&found.host_of));
            prop_assert_eq!(cost(&fleet, goal, &found.host_of), best);
            // No bound is above the best.
            let problem = problem(&fleet, &rules).unwrap();
            let least = naive(&fleet, Goal::Fit, is_allowed).unwrap().1;
            prop_assert!(bound::moved_bytes(&problem) <= least);
            if goal == Goal::FewestHosts {
                prop_assert!(bound::hosts(&fleet, false) <= best.0 as u64);
            }
        }
        // Each VM that comes has room and keeps rules, unless the plan says that there is none.
        let alone = Problem::new(&fleet, &rules.resolve(&fleet).unwrap().one_by_one());
        let order = order::order(&alone, &found.host_of, |_| MoveReason::Relief);
        let mut host_of: Vec<usize> = fleet.vms.iter().map(|vm| vm.host).collect();
        for (done, step) in order.moves.iter().enumerate() {
            prop_assert_eq!(host_of[step.vm], step.from);
            host_of[step.vm] = step.to;
            if done + order.at_once < order.moves.len() {
                let host = &fleet.hosts[step.to];
                for (slot, &capacity) in host.capacity.iter().enumerate() {
                    let there = (0..host_of.len()).filter(|&vm| host_of[vm] == step.to);
                    let need: u32 = there.map(|vm| fleet.vms[vm].need[slot]).sum();
                    prop_assert!(need <= capacity);
                }
                let breaks = || match step.vm {
                    0 => host_of[1] == step.to,
                    1 => host_of[0] == step.to,
                    vm => vm == 2 && step.to != 0,
                };
                prop_assert!(text.is_empty() || !breaks());
            }
        }
        prop_assert_eq!(host_of, found.host_of);
    }
}

#[test]
fn peaks_at_different_times_share_a_host() {
    let day_and_night = fleet(&[10, 10], &[(0, [8, 2]), (1, [2, 8])]);
    let found = place(
        &day_and_night,
        &Rules::default(),
        aim(Goal::FewestHosts, false),
    )
    .unwrap();
    assert_eq!(found.host_of[0], found.host_of[1]);
    let both_by_day = fleet(&[10, 10], &[(0, [8, 2]), (1, [8, 2])]);
    let found = place(
        &both_by_day,
        &Rules::default(),
        aim(Goal::FewestHosts, false),
    )
    .unwrap();
    assert_eq!(found.host_of, [0, 1]);
}

#[test]
fn a_vm_that_has_no_memory_yet_is_on_its_own_host() {
    let starting = fleet(&[8, 8], &[(1, [0, 0])]);
    let found = plan(&starting, &Rules::default(), aim(Goal::Fit, false), None).unwrap();
    assert_eq!(found.moves, []);
    assert_eq!(found.vms[0].host, "host-1");
}

#[test]
fn a_move_says_what_the_vms_of_its_target_must_give_before() {
    let mut three = fleet(&[16, 16], &[(1, [4, 4]), (1, [4, 4]), (0, [2, 2])]);
    for (vm, gib) in three.vms.iter_mut().zip([8, 6, 8]) {
        vm.size_bytes = gib * GIB;
    }
    let found = plan(
        &three,
        &Rules::default(),
        aim(Goal::FewestHosts, false),
        None,
    )
    .unwrap();
    let [step] = &found.moves[..] else {
        panic!("{found:?}");
    };
    assert_eq!((&*step.vm, step.shrink_first_bytes), ("vm-2", 6 * GIB));
    three.vms[0].size_bytes = 2 * GIB;
    let found = plan(
        &three,
        &Rules::default(),
        aim(Goal::FewestHosts, false),
        None,
    )
    .unwrap();
    assert_eq!(found.moves[0].shrink_first_bytes, 0);
}

#[test]
fn a_host_is_relieved_by_the_fewest_bytes() {
    // 3 GiB too many: the VM of 4 alone does it.
    let fleet = fleet(&[16, 16], &[(0, [10, 10]), (0, [5, 5]), (0, [4, 4])]);
    let plan = plan(&fleet, &Rules::default(), aim(Goal::Fit, false), Some(1e9)).unwrap();
    let [step] = &plan.moves[..] else {
        panic!("{plan:?}");
    };
    assert_eq!((step.vm.as_str(), step.to.as_str()), ("vm-2", "host-1"));
    assert_eq!(step.reason, MoveReason::Relief);
    assert!((step.copy_s.unwrap() - 4.294_967_296).abs() < 1e-9);
    assert_eq!(plan.moved_bytes.planned, 4 * GIB);
    // 3 of its 4 GiB, divided, would do.
    assert_eq!(plan.moved_bytes.at_least >> 20, 3 * 1024 - 1);
    assert!(plan.fits && plan.is_optimal);
}

#[test]
fn after_any_loss_all_vms_have_a_place_or_the_plan_says_which_have_none() {
    // Three half-full hosts fit on two, but the loss of one of those needs the third.
    let vms = [(0, [4, 4]), (0, [4, 4]), (1, [4, 4]), (2, [4, 4])];
    let three = fleet(&[8, 8, 8], &vms);
    let found = plan(
        &three,
        &Rules::default(),
        aim(Goal::FewestHosts, true),
        None,
    )
    .unwrap();
    assert_eq!(
        (found.hosts_used.after, found.survives_loss),
        (3, Some(true))
    );
    assert_eq!(found.hosts_used.at_least, 3);
    assert_eq!(found.moves, []);
    let alone = plan(
        &three,
        &Rules::default(),
        aim(Goal::FewestHosts, false),
        None,
    )
    .unwrap();
    assert_eq!(alone.hosts_used.after, 2);
    // Two full hosts cannot stand for each other.
    let full = fleet(&[8, 8], &[(0, [8, 8]), (1, [8, 8])]);
    let found = plan(&full, &Rules::default(), aim(Goal::Fit, true), None).unwrap();
    assert_eq!((found.fits, found.survives_loss), (true, Some(false)));
    assert!(
        found
            .problems
            .iter()
            .any(|problem| problem.contains("If \"host-0\" is lost"))
    );
}

/// Whether VMs find places on hosts of `kept` if any one host is lost; by trying all.
fn any_may_be_lost(fleet: &Fleet, host_of: &[usize], kept: &[usize]) -> bool {
    (0..fleet.hosts.len()).all(|lost| {
        let homeless: Vec<usize> = (0..host_of.len())
            .filter(|&vm| host_of[vm] == lost)
            .collect();
        let others: Vec<usize> = kept.iter().copied().filter(|&host| host != lost).collect();
        let count = others.len().pow(u32::try_from(homeless.len()).unwrap());
        (0..count).any(|mut number| {
            let mut after = host_of.to_vec();
            for &vm in &homeless {
                after[vm] = others[number % others.len()];
                number /= others.len();
            }
            is_within(fleet, &after)
        })
    })
}

/// The least cost of all placements after which any host may be lost; by trying all.
fn naive_surviving(fleet: &Fleet, goal: Goal) -> Option<(usize, u64)> {
    let hosts = fleet.hosts.len();
    let sets =
        (0_usize..1 << hosts).map(|set| (0..hosts).filter(|host| set >> host & 1 == 1).collect());
    let sets: Vec<Vec<usize>> = sets.collect();
    let costs = sets.iter().filter_map(|kept| {
        let is_allowed = |host_of: &[usize]| {
            host_of.iter().all(|host| kept.contains(host)) && any_may_be_lost(fleet, host_of, kept)
        };
        let (_, bytes) = naive(fleet, Goal::Fit, is_allowed)?;
        let running = if goal == Goal::Fit { 0 } else { kept.len() };
        Some((running, bytes))
    });
    costs.min()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn a_small_fleet_that_survives_a_loss_is_placed_as_well_as_can_be(fleet in small_fleets(), fewest in any::<bool>()) {
        prop_assume!(fleet.vms.len() < 6);
        let goal = if fewest { Goal::FewestHosts } else { Goal::Fit };
        let found = plan(&fleet, &Rules::default(), aim(goal, true), None).unwrap();
        prop_assert!(found.is_optimal);
        let best = naive_surviving(&fleet, goal);
        prop_assert_eq!(found.fits && found.survives_loss == Some(true), best.is_some());
        if let Some((running, bytes)) = best {
            // By where VMs are in the end: one that makes room on the way moves twice.
            let is_elsewhere = |vm: &&Vm| {
                let last = found.moves.iter().rfind(|step| step.vm == vm.name);
                last.is_some_and(|step| step.to != fleet.hosts[vm.host].name)
            };
            let moved = fleet.vms.iter().filter(is_elsewhere);
            prop_assert_eq!(moved.map(|vm| vm.size_bytes).sum::<u64>(), bytes);
            if goal == Goal::FewestHosts {
                prop_assert_eq!(found.hosts_used.after, running as u64);
                prop_assert!(found.hosts_used.at_least <= running as u64);
            }
        }
    }
}

#[test]
fn hosts_without_vms_count_only_where_others_are_switched_off() {
    let pair = fleet(&[8, 8], &[(0, [1, 1])]);
    for (goal, running) in [(Goal::Fit, 1), (Goal::FewestHosts, 2)] {
        let used = plan(&pair, &Rules::default(), aim(goal, true), None);
        let used = used.unwrap().hosts_used;
        assert_eq!((used.after, used.at_least), (running, running), "{goal:?}");
    }
}

#[test]
fn spare_hosts_that_help_nothing_are_not_kept() {
    // The largest has no processors for the VM of the first.
    let mut three = fleet(&[20, 100, 20], &[(0, [10, 10])]);
    for (host, processors) in three.hosts.iter_mut().zip([16, 2, 16]) {
        host.capacity[2..].fill(processors * 1000);
    }
    three.vms[0].need[2..].fill(8000);
    for exhaustive in [false, true] {
        let aim = Aim {
            exhaustive,
            ..aim(Goal::FewestHosts, true)
        };
        let found = place(&three, &Rules::default(), aim).unwrap();
        assert_eq!((found.host_of, found.spare), (vec![0], vec![2]));
    }
}

#[test]
fn the_hosts_that_must_run_have_memory_and_processors_together_and_without_the_largest() {
    let mixed = fleet(&[16, 8, 8, 4], &[(0, [17, 0])]);
    assert_eq!(bound::hosts(&mixed, false), 2);
    // Without the largest of them, all others are needed.
    assert_eq!(bound::hosts(&mixed, true), 4);
    assert_eq!(bound::hosts(&fleet(&[8, 8], &[(0, [0, 0])]), true), 2);
    assert_eq!(bound::hosts(&fleet(&[8, 8], &[]), false), 0);
    // Two suffice for the memory, and two for the processors, but no two for both.
    let mut special = fleet(&[16, 16, 2, 2], &[(0, [20, 20])]);
    for (host, processors) in special.hosts.iter_mut().zip([2, 2, 16, 16]) {
        host.capacity[2..].fill(processors * 1000);
    }
    special.vms[0].need[2..].fill(20_000);
    assert_eq!(bound::hosts(&special, false), 3);
}

#[test]
fn a_bound_for_hosts_of_which_no_two_have_the_same_memory_takes_no_search() {
    let gib: Vec<u32> = vec![230; 1000];
    let vms: Vec<(usize, [u32; 2])> = (0..30_000).map(|vm| (vm % 1000, [4, 3])).collect();
    let mut fleet = fleet(&gib, &vms);
    for (host, own) in fleet.hosts.iter_mut().enumerate() {
        let less = u32::try_from(host).unwrap();
        own.capacity[..2].iter_mut().for_each(|mib| *mib -= less);
    }
    // 30000 VMs of 4 GiB; the largest 522 hosts have 119 927 GiB, one more 120 157.
    assert_eq!(bound::hosts(&fleet, false), 523);
}

#[test]
fn vms_that_wait_for_each_other_go_by_a_third_host() {
    let rules = "[[on]]\nvms=['vm-0']\nhosts=['host-1']\n[[on]]\nvms=['vm-1']\nhosts=['host-0']\n";
    let rules = Rules::parse(rules).unwrap();
    let with_third = fleet(&[8, 8, 8], &[(0, [6, 6]), (1, [6, 6])]);
    let free = problem(&with_third, &Rules::default()).unwrap();
    let order = order::order(&free, &[1, 0], |_| MoveReason::Relief);
    let steps: Vec<_> = order.moves.iter().map(|step| step.to).collect();
    assert_eq!((steps, order.at_once), (vec![2, 1, 0], 0));
    let alone = fleet(&[8, 8], &[(0, [6, 6]), (1, [6, 6])]);
    let found = plan(&alone, &rules, aim(Goal::Fit, false), None).unwrap();
    assert_eq!(found.moves.len(), 2);
    assert_eq!(found.moves_without_order, 2);
    assert!(found.problems[0].contains("The last 2 moves wait for each other"));
}

#[test]
fn a_vm_on_its_way_is_on_no_host_that_rules_forbid_and_beside_no_vm_from_which_it_is_apart() {
    let vms = [(0, [7, 7]), (1, [7, 7]), (2, [1, 1]), (3, [1, 1])];
    let four = fleet(&[8; 4], &vms);
    let swap =
        "[[on]]\nvms=['vm-0']\nhosts=['host-0','host-1']\n[[on]]\nvms=['vm-1']\nhosts=['host-0']\n";
    let rules = Rules::parse(swap).unwrap();
    let found = plan(&four, &rules, aim(Goal::Fit, false), None).unwrap();
    // The two hosts with room may have neither.
    assert_eq!((found.fits, found.moves.len()), (true, 2));
    assert_eq!(found.moves_without_order, 2);
    let apart = "[[apart]]\nvms=['vm-0','vm-1']\n[[apart]]\nvms=['vm-1','vm-2']\n[[apart]]\nvms=['vm-0','vm-2']\n";
    let rules = Rules::parse(apart).unwrap().resolve(&four).unwrap();
    let problem = Problem::new(&four, &rules.one_by_one());
    let order = order::order(&problem, &[1, 0, 2, 3], |_| MoveReason::Relief);
    let steps: Vec<_> = order.moves.iter().map(|step| (step.vm, step.to)).collect();
    assert_eq!((steps, order.at_once), (vec![(1, 3), (0, 1), (1, 0)], 0));
}

#[test]
fn a_vm_moves_for_relief_if_a_rule_forbids_its_place() {
    let pair = fleet(&[16, 16], &[(0, [3, 3]), (0, [4, 4])]);
    let parted = fleet(&[16, 16], &[(0, [3, 3]), (1, [4, 4])]);
    for (fleet, rules) in [
        (&pair, "[[on]]\nvms=['vm-0']\nhosts=['host-1']\n"),
        (&pair, "[[apart]]\nvms=['vm-0','vm-1']\n"),
        (&parted, "[[together]]\nvms=['vm-0','vm-1']\n"),
    ] {
        let rules = Rules::parse(rules).unwrap();
        let found = plan(fleet, &rules, aim(Goal::Fit, false), None).unwrap();
        let reasons: Vec<_> = found.moves.iter().map(|step| step.reason).collect();
        assert_eq!(reasons, [MoveReason::Relief], "{rules:?}");
    }
}

#[test]
fn vms_that_belong_together_move_together_and_those_that_must_stay_do() {
    let rules =
        Rules::parse("[[together]]\nvms=['vm-0','vm-2']\n[[stay]]\nvms=['vm-1']\n").unwrap();
    let trio = fleet(&[8, 8], &[(0, [3, 3]), (0, [4, 4]), (1, [2, 2])]);
    let found = place(&trio, &rules, aim(Goal::Fit, false)).unwrap();
    // Together they need 5 of 8 GiB, so not beside the VM that stays.
    assert_eq!(found.host_of, [1, 0, 1]);
    // If its host is lost, a VM that stays runs elsewhere.
    let light = fleet(&[8, 8], &[(0, [3, 3]), (1, [2, 2])]);
    let stay = Rules::parse("[[stay]]\nvms=['*']\n").unwrap();
    let found = plan(&light, &stay, aim(Goal::FewestHosts, true), None).unwrap();
    assert_eq!((found.moves.len(), found.survives_loss), (0, Some(true)));
    let misspelt = Rules::parse("[[stay]]\nvms=['vm-7']\n").unwrap();
    let error = place(&trio, &misspelt, aim(Goal::Fit, false)).unwrap_err();
    assert_eq!(error.to_string(), "rule stay: no VM is called \"vm-7\"");
    assert!(Rules::parse("[[together]]\nvm=['a']").is_err());
}

#[test]
fn a_rule_may_name_vms_by_patterns_of_uuids_in_any_case_and_patterns_of_names_match_no_uuid() {
    let mut pair = fleet(&[8], &[(0, [1, 1]), (0, [1, 1])]);
    pair.vms[0].uuid = Some("dba1a24a-4061-4607-8bf4-a3963d0c5895".to_owned());
    pair.vms[1].name = "DB-1".to_owned();
    let stays = |name: &str| {
        let rules = Rules::parse(&format!("[[stay]]\nvms=['{name}']\n")).unwrap();
        rules.resolve(&pair).map(|resolved| resolved.stays).ok()
    };
    for name in [
        "dba1a24a-4061-4607-8bf4-a3963d0c5895",
        "DBA1A24A-4061-4607-8BF4-A3963D0C5895",
        "DBA1A24A-*",
        "dba1????-*-a3963d0c5895",
    ] {
        assert_eq!(stays(name), Some(vec![true, false]), "{name}");
    }
    assert_eq!(stays("D*"), Some(vec![false, true]));
    assert_eq!(stays("d*"), None);
    assert_eq!(stays("*-a3963d0c5895"), None);
}

fn vm(name: &str, uuid: Option<&str>, intervals: &[(u32, u64)]) -> VmDemands {
    VmDemands {
        vm: name.to_owned(),
        uuid: uuid.map(str::to_owned),
        present: true,
        managed: true,
        size_bytes: 4 * GIB,
        unknown_need_bytes: 3 * GIB,
        intervals: intervals
            .iter()
            .map(|&(interval, gib)| IntervalDemand {
                interval,
                curves: 6,
                need_bytes: gib * GIB,
                vcpu_seconds_per_second: Some(0.5),
            })
            .collect(),
    }
}

fn host(name: &str, clock_ahead_ms: i64, vms: Vec<VmDemands>) -> CollectedHost {
    CollectedHost {
        target: format!("http://{name}:7373"),
        clock_ahead_ms,
        demands: HostDemands {
            schema: SCHEMA,
            host: name.to_owned(),
            now_unix_ms: NOON_MS,
            since_unix_ms: NOON_MS,
            interval_ms: HOUR_MS,
            processors: Some(8),
            total_bytes: 64 * GIB,
            vms,
        },
    }
}

fn file(hosts: Vec<CollectedHost>) -> FleetFile {
    FleetFile {
        schema: SCHEMA,
        collected_unix_ms: NOON_MS,
        hosts,
        missing: Vec::new(),
    }
}

const SETTINGS: Settings = Settings {
    period_ms: 4 * HOUR_MS,
    reserve_ratio: 0.25,
    processors_ratio: Some(2.0),
};

fn memory_gib(fleet: &Fleet, vm: usize) -> Vec<u32> {
    let memory = fleet.vms[vm].need[..fleet.slots].iter();
    memory.map(|units| units / 1024).collect()
}

#[test]
fn needs_are_folded_into_a_period_on_one_clock() {
    // The sixth interval falls into the slot of the second; the third has no curve.
    let intervals = [(0, 1), (1, 2), (3, 1), (5, 5)];
    let of = |ahead| {
        let file = file(vec![host("a", ahead, vec![vm("x", None, &intervals)])]);
        Fleet::of(&file, &SETTINGS).unwrap()
    };
    assert_eq!(memory_gib(&of(0), 0), [1, 5, 5, 1]);
    assert_eq!(of(0).vms[0].known_ratio, 0.75);
    // By a clock that is an hour ahead, what it calls the second hour was the first.
    let ahead = i64::try_from(HOUR_MS).unwrap();
    assert_eq!(memory_gib(&of(ahead), 0), [5, 5, 1, 1]);
    // Each interval counts once, where most of it lies.
    for little in [-1_740_000, -1, 1, 1_740_000] {
        assert_eq!(memory_gib(&of(little), 0), [1, 5, 5, 1], "{little} ms");
    }
    assert_eq!(memory_gib(&of(1_860_000), 0), [5, 5, 1, 1]);
    let fleet = of(0);
    assert_eq!(fleet.hosts[0].memory_bytes(), 48 * GIB);
    assert_eq!(fleet.hosts[0].capacity[4], 16_000);
    assert_eq!(fleet.vms[0].need[4..], [500; 4]);
}

#[test]
fn a_vm_that_moved_keeps_its_history_by_its_uuid() {
    const UUID: &str = "c7a5fdbd-edaf-9455-926a-d65c16db1809";
    let mut gone = vm(UUID, Some(UUID), &[(0, 6), (1, 2)]);
    gone.present = false;
    let here = vm("web", Some(UUID), &[(2, 1), (3, 1)]);
    let other = vm("web", None, &[(0, 1), (1, 1), (2, 1), (3, 1)]);
    let file = file(vec![
        host("a", 0, vec![gone, other]),
        host("b", 0, vec![here]),
    ]);
    let fleet = Fleet::of(&file, &SETTINGS).unwrap();
    assert_eq!(fleet.vms.len(), 2);
    assert_eq!(memory_gib(&fleet, 0), [1, 1, 1, 1]);
    assert_eq!(
        (fleet.vms[1].host, memory_gib(&fleet, 1)),
        (1, vec![6, 2, 1, 1])
    );
    assert_eq!(fleet.notes, [""; 0]);
}

#[test]
fn what_is_not_known_counts_as_much_and_is_said() {
    let unknown = vm("new", None, &[]);
    let mut fixed = vm("fixed", None, &[(0, 1)]);
    fixed.managed = false;
    let file = file(vec![host("a", 0, vec![unknown, fixed])]);
    let fleet = Fleet::of(&file, &SETTINGS).unwrap();
    assert_eq!(memory_gib(&fleet, 0), [3; 4]);
    // It cannot be resized, so it needs what it has.
    assert_eq!(memory_gib(&fleet, 1), [4; 4]);
    assert!(
        fleet.notes[0].contains("1 of 2 VMs have no curve"),
        "{:?}",
        fleet.notes
    );
}

#[test]
fn a_uuid_that_is_used_twice_is_named_on_one_host_and_on_two() {
    let notes = |hosts| Fleet::of(&file(hosts), &SETTINGS).unwrap().notes;
    let twin = |name| vm(name, Some("u"), &[(0, 1)]);
    let there = notes(vec![host("a", 0, vec![twin("x"), twin("y")])]);
    assert!(there[0].starts_with("VM \"y\" of \"a\" has the UUID of another VM there"));
    let both = notes(vec![
        host("a", 0, vec![twin("x")]),
        host("b", 0, vec![twin("x")]),
    ]);
    assert!(both[0].starts_with("VM \"x\" is on \"a\" and on \"b\""));
}

#[test]
fn a_vm_that_migrates_stays_on_both_hosts() {
    let moves = |rules: &str, goal| {
        let small = |name, uuid| vm(name, uuid, &[(0, 2)]);
        let file = file(vec![
            host("a", 0, vec![small("web", Some("u"))]),
            host("b", 0, vec![small("web", Some("u")), small("db", None)]),
            host("c", 0, Vec::new()),
        ]);
        let fleet = Fleet::of(&file, &SETTINGS).unwrap();
        let plan = plan(
            &fleet,
            &Rules::parse(rules).unwrap(),
            aim(goal, false),
            None,
        )
        .unwrap();
        assert!(plan.problems[0].contains("no move of it is planned until it is on one"));
        let moves = plan.moves.into_iter().map(|step| (step.vm, step.to));
        (plan.fits, moves.collect::<Vec<_>>())
    };
    let db_to_c = vec![("db".to_owned(), "c".to_owned())];
    assert_eq!(moves("", Goal::FewestHosts), (true, vec![]));
    assert_eq!(
        moves("[[apart]]\nvms=['web','db']\n", Goal::Fit),
        (true, db_to_c)
    );
    // Its group is where most of it is.
    assert_eq!(
        moves("[[together]]\nvms=['web','db']\n", Goal::Fit),
        (true, vec![])
    );
    assert_eq!(
        moves("[[on]]\nvms=['web']\nhosts=['c']\n", Goal::Fit),
        (false, vec![])
    );
}

#[test]
fn a_host_that_answers_nonsense_or_is_of_another_version_is_missing_and_the_others_are_there() {
    let of = |change: &dyn Fn(&mut HostDemands)| {
        let mut bad = host(
            "bad",
            0,
            vec![vm("x", None, &[(0, 1)]), vm("y", None, &[(0, 1)])],
        );
        change(&mut bad.demands);
        let mut file = file(vec![bad, host("good", 0, Vec::new())]);
        set_aside(&mut file);
        assert_eq!(
            file.hosts.last().map(|host| host.demands.host.as_str()),
            Some("good")
        );
        let missing = file.missing.into_iter().next();
        missing.map(|host| (host.target, host.why))
    };
    assert_eq!(of(&|_| {}), None);
    type Change = &'static dyn Fn(&mut HostDemands);
    let changes: [(Change, &str); 9] = [
        (&|bad| bad.schema += 1, "schema 2, not 1"),
        (&|bad| bad.total_bytes = u64::MAX, "bytes of RAM"),
        (&|bad| bad.processors = Some(0), "processors: 0"),
        (
            &|bad| bad.vms[0].intervals[0].need_bytes = u64::MAX,
            "VM \"x\" has or needs",
        ),
        (
            &|bad| bad.vms[1].size_bytes = u64::MAX,
            "VM \"y\" has or needs",
        ),
        (
            &|bad| bad.vms[1].unknown_need_bytes = u64::MAX,
            "VM \"y\" has or needs",
        ),
        (
            &|bad| bad.vms[0].intervals[0].vcpu_seconds_per_second = Some(1e300),
            "VM \"x\" has",
        ),
        (
            &|bad| bad.vms[0].intervals[0].vcpu_seconds_per_second = Some(-1.0),
            "VM \"x\" has",
        ),
        (
            &|bad| bad.vms.iter_mut().for_each(|vm| vm.size_bytes = 3 << 46),
            "its VMs have or need",
        ),
    ];
    for (change, expected) in changes {
        let (target, why) = of(change).unwrap();
        assert_eq!(target, "http://bad:7373");
        assert!(why.contains(expected), "{why}");
    }
}

#[test]
fn the_processors_of_a_host_are_unknown_if_those_of_all_its_vms_are() {
    let silent = |name: &str| {
        let mut silent = vm(name, None, &[(0, 1)]);
        silent.intervals[0].vcpu_seconds_per_second = None;
        silent
    };
    let file = file(vec![
        host("a", 0, vec![silent("x")]),
        host("b", 0, vec![silent("y"), vm("z", None, &[(0, 1)])]),
        host("c", 0, Vec::new()),
    ]);
    let report = report(&file, &Fleet::of(&file, &SETTINGS).unwrap()).unwrap();
    let ratios: Vec<_> = report
        .hosts
        .iter()
        .map(|host| host.processors_ratio)
        .collect();
    assert_eq!(ratios, [None, Some(0.5 / 16.0), Some(0.0)]);
}

#[test]
fn a_report_does_not_say_that_other_hosts_have_no_room() {
    let large = |name| vm(name, None, &[(0, 30)]);
    let file = file(vec![
        host("a", 0, vec![large("x"), large("y")]),
        host("b", 0, Vec::new()),
    ]);
    let report = report(&file, &Fleet::of(&file, &SETTINGS).unwrap()).unwrap();
    assert_eq!(
        report.problems[0],
        "\"a\" cannot give its VMs what they need: \"x\", \"y\" (`plimsoll fleet place` looks for room elsewhere)"
    );
}

#[test]
fn answers_that_do_not_go_together_are_refused() {
    let mut other = host("b", 0, Vec::new());
    other.demands.interval_ms = 600_000;
    let of = |hosts| Fleet::of(&file(hosts), &SETTINGS).unwrap_err();
    assert_eq!(of(Vec::new()), FleetError::NoHost);
    let error = of(vec![host("a", 0, Vec::new()), other]);
    assert!(matches!(error, FleetError::Intervals { .. }), "{error}");
    let error = of(vec![host("a", 0, Vec::new()), host("a", 0, Vec::new())]);
    assert!(matches!(error, FleetError::Twice { .. }), "{error}");
    let period = Settings {
        period_ms: HOUR_MS * 5 / 2,
        ..SETTINGS
    };
    let error = Fleet::of(&file(vec![host("a", 0, Vec::new())]), &period).unwrap_err();
    assert!(matches!(error, FleetError::Period { .. }), "{error}");
    // Sums that overflow stop the plan and nothing else.
    let mut mad = vm("x", None, &[(u32::MAX, 1)]);
    mad.intervals[0].need_bytes = u64::MAX;
    mad.intervals[0].vcpu_seconds_per_second = Some(f64::NAN);
    let mad = file(vec![host("a", i64::MIN, vec![mad.clone(), mad])]);
    let fleet = Fleet::of(&mad, &SETTINGS).unwrap();
    let error = place(&fleet, &Rules::default(), aim(Goal::Fit, true)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("those of \"a\" have and need most"), "{text}");
}
