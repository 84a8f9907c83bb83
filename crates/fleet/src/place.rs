//! A placement of a fleet's VMs.
//!
//! 1. *Repair.* From each host that cannot give its VMs what they need, or whose VMs rules forbid, as few bytes as possible
//!    are taken and put where most room is left; if there is none, another VM makes room. The fewest bytes are sought among all
//!    sets of up to three VMs, and one that is chosen greedily.
//! 2. *Empty.* With the goal of fewest hosts, one host in use after another is emptied onto the others in use, each VM where
//!    least room is left, if all its VMs find room. The best result of several orders of hosts is taken: least loaded first,
//!    smallest first, fewest bytes first.
//! 3. *Spare.* A host may be lost if its VMs then fit on the others, largest first, each where most room is left. If some
//!    host in use may not, hosts that were emptied are kept, the largest first, until all may; then those that help nothing go.
//!
//! A small fleet is then searched exhaustively (`exact`), within a number of steps. A VM finds its host in one pass over all, so a
//! fleet of n hosts and m VMs takes O(n m slots) for each of steps 1 to 3.

use plimsoll_protocol::fleet::Goal;

use crate::exact;
use crate::fleet::Fleet;
use crate::load::{Load, Problem};
use crate::rules::{Rules, RulesError};
pub use crate::solution::Aim;
use crate::solution::{Solution, kept, largest_first, roomiest};

/// Steps of an exhaustive search: a few seconds.
const SEARCH_STEPS: u64 = 20_000_000;
/// Maximum number of items of an exhaustive search: with more, its steps do not suffice.
const SEARCH_ITEMS_MAX: usize = 40;

/// Why nothing was planned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// The rules do not suit the fleet.
    #[error(transparent)]
    Rules(#[from] RulesError),
    /// Needs beyond 4 PiB or 4 million processors, or sizes beyond 16 EiB.
    #[error(
        "the VMs need more than 4 PiB or 4 million processors together, or have more than 16 EiB; those of {host:?} have and need most"
    )]
    TooLarge {
        /// The host.
        host: String,
    },
}

/// Where each VM should be.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// The host of each VM.
    pub host_of: Vec<usize>,
    /// Whether every VM has what it needs and rules are kept.
    pub fits: bool,
    /// Whether no placement is better.
    pub is_optimal: bool,
    /// Hosts without a VM that are kept for the loss of another.
    pub spare: Vec<usize>,
    /// For each host, the VMs that would find no place if it were lost; empty without `survive_loss`.
    pub stranded: Vec<Vec<usize>>,
    /// The VMs on hosts that cannot give them what they need, or that rules forbid there.
    pub unplaced: Vec<usize>,
}

/// Places the VMs of `fleet`.
///
/// # Errors
///
/// Any [`PlaceError`].
pub fn place(fleet: &Fleet, rules: &Rules, aim: Aim) -> Result<Placement, PlaceError> {
    Ok(placed(&problem(fleet, rules)?, aim))
}

/// The fleet and the rules as a problem.
pub(crate) fn problem<'a>(fleet: &'a Fleet, rules: &Rules) -> Result<Problem<'a>, PlaceError> {
    let total = fleet.total_need();
    let sizes = fleet.vms.iter().map(|vm| u128::from(vm.size_bytes));
    let is_large = sizes.sum::<u128>() > u128::from(u64::MAX);
    if is_large || total.iter().any(|&units| units > u64::from(u32::MAX)) {
        let mut of_host = vec![0_u128; fleet.hosts.len()];
        for vm in &fleet.vms {
            let needs = vm.need.iter().copied().map(u128::from);
            of_host[vm.host] += u128::from(vm.size_bytes) + needs.sum::<u128>();
        }
        let most = fleet.hosts.iter().zip(of_host).max_by_key(|(_, sum)| *sum);
        return Err(PlaceError::TooLarge {
            host: most.map_or_else(String::new, |(host, _)| host.name.clone()),
        });
    }
    Ok(Problem::new(fleet, &rules.resolve(fleet)?))
}

/// Places the items of `problem`.
pub(crate) fn placed(problem: &Problem<'_>, aim: Aim) -> Placement {
    let mut load = problem.load_now();
    repair(problem, &mut load);
    let mut solution = match aim.goal {
        Goal::Fit => Solution::of(problem, load, aim, &mut 0),
        Goal::FewestHosts => emptied(problem, &load, aim),
    };
    let mut is_optimal = false;
    if aim.exhaustive && problem.items.len() <= SEARCH_ITEMS_MAX {
        let (better, is_complete) = exact::search(problem, aim, &solution, SEARCH_STEPS);
        solution = better.unwrap_or(solution);
        is_optimal = is_complete;
    }
    placement(solution, problem, is_optimal)
}

/// The items of `problem` as they are, with what would happen if any one host were lost.
pub(crate) fn as_it_is(problem: &Problem<'_>) -> Placement {
    let aim = Aim {
        goal: Goal::Fit,
        survive_loss: true,
        exhaustive: false,
    };
    let mut steps = match problem.items.len() <= SEARCH_ITEMS_MAX {
        true => SEARCH_STEPS,
        false => 0,
    };
    let solution = Solution::of(problem, problem.load_now(), aim, &mut steps);
    placement(solution, problem, false)
}

/// The placement for callers.
fn placement(solution: Solution, problem: &Problem<'_>, is_optimal: bool) -> Placement {
    let mut host_of = vec![0; problem.fleet.vms.len()];
    for (item, host) in problem.items.iter().zip(&solution.load.host_of) {
        for &vm in &item.vms {
            host_of[vm] = host.unwrap_or(item.origin);
        }
    }
    let items = solution.short.iter();
    let items = items.flat_map(|&host| &solution.load.items_of[host]);
    let unplaced: Vec<usize> = items
        .flat_map(|&item| problem.items[item].vms.iter().copied())
        .collect();
    Placement {
        fits: unplaced.is_empty(),
        host_of,
        is_optimal,
        stranded: solution.stranded,
        spare: solution.spare,
        unplaced,
    }
}

/// The host that has least room left with the item; `None` if it fits on none.
fn fullest(
    problem: &Problem<'_>,
    load: &Load,
    item: usize,
    hosts: impl Iterator<Item = usize>,
) -> Option<usize> {
    let hosts = hosts.filter(|&host| load.fits(problem, item, host));
    let shares = hosts.map(|host| (load.share_with(problem, item, host), host));
    shares
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, host)| host)
}

/// Takes from each host what it cannot hold, and puts it where there is room. What fits nowhere stays.
fn repair(problem: &Problem<'_>, load: &mut Load) {
    let hosts = problem.fleet.hosts.len();
    let mut homeless = Vec::new();
    for host in 0..hosts {
        while let Some(item) = load.forbidden(problem, host) {
            load.take(problem, item);
            homeless.push(item);
        }
        homeless.extend(relieve(problem, load, host));
    }
    for item in largest_first(problem, homeless) {
        if load.fits(problem, item, problem.items[item].origin) {
            load.put(problem, item, problem.items[item].origin);
            continue;
        }
        let with_room = (0..hosts).filter(|&host| load.fits(problem, item, host));
        match roomiest(problem, load, item, with_room) {
            Some(host) => load.put(problem, item, host),
            None if make_room(problem, load, item) => {}
            None => load.put(problem, item, problem.items[item].origin),
        }
    }
}

/// Takes items from a host until it holds the others, of as few bytes as is found, and returns them.
fn relieve(problem: &Problem<'_>, load: &mut Load, host: usize) -> Vec<usize> {
    let capacity = &problem.fleet.hosts[host].capacity;
    let excess = load.used(host).iter().zip(capacity).enumerate();
    let excess: Vec<(usize, u32)> = excess
        .filter(|(_, (used, capacity))| used > capacity)
        .map(|(slot, (used, capacity))| (slot, used - capacity))
        .collect();
    if excess.is_empty() {
        return Vec::new();
    }
    let greedy = greedy_relief(problem, load, host);
    let bytes = |items: &[usize]| -> u64 {
        let sizes = items.iter().map(|&item| problem.items[item].size_bytes);
        sizes.sum()
    };
    let mut fewest_bytes = bytes(&greedy);
    let mut taken = greedy;
    let items = load.items_of[host].clone();
    let mut consider = |set: &[usize]| {
        let set_bytes = bytes(set);
        let suffices = || {
            excess.iter().all(|&(slot, excess)| {
                let needs = set.iter().map(|&item| problem.items[item].need[slot]);
                needs.sum::<u32>() >= excess
            })
        };
        if set_bytes < fewest_bytes && suffices() {
            fewest_bytes = set_bytes;
            taken = set.to_vec();
        }
    };
    for (at, &first) in items.iter().enumerate() {
        consider(&[first]);
        for (beyond, &second) in items.iter().enumerate().skip(at + 1) {
            consider(&[first, second]);
            for &third in &items[beyond + 1..] {
                consider(&[first, second, third]);
            }
        }
    }
    for &item in &taken {
        load.take(problem, item);
    }
    taken
}

/// Items that suffice to relieve a host, those first that take away most of the excess for their bytes.
fn greedy_relief(problem: &Problem<'_>, load: &Load, host: usize) -> Vec<usize> {
    let capacity = &problem.fleet.hosts[host].capacity;
    let mut used = load.used(host).clone();
    let mut rest = load.items_of[host].clone();
    let mut taken = Vec::new();
    let is_within = |used: &[u32]| used.iter().zip(capacity).all(|(used, most)| used <= most);
    while !is_within(&used) {
        // The part of the excess that an item takes away, as a sum over the slots with one.
        let relief = |item: usize| {
            let parts = used.iter().zip(capacity).zip(&problem.items[item].need);
            let parts = parts.filter(|((used, capacity), _)| used > capacity);
            let parts = parts.map(|((used, capacity), &need)| {
                let excess = used - capacity;
                f64::from(need.min(excess)) / f64::from(excess)
            });
            parts.sum::<f64>() / problem.items[item].size_bytes.max(1) as f64
        };
        let best = rest.iter().copied().enumerate();
        let Some((at, best)) = best.max_by(|a, b| relief(a.1).total_cmp(&relief(b.1))) else {
            break;
        };
        rest.swap_remove(at);
        taken.push(best);
        shift_down(&mut used, &problem.items[best].need);
    }
    // What the last ones have made unnecessary goes back, the largest first.
    taken.sort_by_key(|&item| std::cmp::Reverse(problem.items[item].size_bytes));
    taken.retain(|&item| {
        let with = used.iter().zip(&problem.items[item].need);
        let with: Vec<u32> = with.map(|(used, need)| used + need).collect();
        let goes_back = is_within(&with);
        if goes_back {
            used = with;
        }
        !goes_back
    });
    taken
}

fn shift_down(used: &mut [u32], need: &[u32]) {
    for (used, need) in used.iter_mut().zip(need) {
        *used -= need;
    }
}

/// Puts an item that fits nowhere on a host from which another, smaller one can go; false if there is none.
fn make_room(problem: &Problem<'_>, load: &mut Load, item: usize) -> bool {
    let hosts = problem.fleet.hosts.len();
    for host in 0..hosts {
        if !problem.may_be_on(item, host) || problem.share(item, host) > 1.0 {
            continue;
        }
        let mut others = load.items_of[host].clone();
        others.retain(|&other| problem.items[other].size_bytes < problem.items[item].size_bytes);
        others.sort_by_key(|&other| problem.items[other].size_bytes);
        for other in others {
            load.take(problem, other);
            if load.fits(problem, item, host) {
                let elsewhere = (0..hosts)
                    .filter(|&elsewhere| elsewhere != host && load.fits(problem, other, elsewhere));
                if let Some(elsewhere) = roomiest(problem, load, other, elsewhere) {
                    load.put(problem, other, elsewhere);
                    load.put(problem, item, host);
                    return true;
                }
            }
            load.put(problem, other, host);
        }
    }
    false
}

/// The best placement that emptying hosts in several orders finds.
fn emptied(problem: &Problem<'_>, load: &Load, aim: Aim) -> Solution {
    let hosts = &problem.fleet.hosts;
    let share = |host: usize| load.share(problem, host);
    let bytes = |host: usize| -> u64 {
        let sizes = load.items_of[host].iter();
        sizes.map(|&item| problem.items[item].size_bytes).sum()
    };
    let keys: [&dyn Fn(usize) -> (f64, f64); 3] = [
        &|host| (share(host), 0.0),
        &|host| (f64::from(hosts[host].capacity[0]), share(host)),
        &|host| (bytes(host) as f64, 0.0),
    ];
    let solutions = keys.map(|key| {
        let mut order: Vec<((f64, f64), usize)> = (0..hosts.len())
            .filter(|&host| !load.items_of[host].is_empty())
            .map(|host| (key(host), host))
            .collect();
        order.sort_by(|(a, _), (b, _)| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut load = load.clone();
        empty_hosts(problem, &mut load, order.iter().map(|(_, host)| *host));
        Solution::of(problem, load, aim, &mut 0)
    });
    let cost = |solution: &Solution| {
        let is_partial = !solution.is_whole();
        (is_partial, solution.hosts(), solution.moved_bytes(problem))
    };
    let best = solutions.into_iter().min_by_key(cost);
    best.expect("there are three")
}

/// Empties hosts in this order, each if all its items find room on the others in use.
fn empty_hosts(problem: &Problem<'_>, load: &mut Load, order: impl Iterator<Item = usize>) {
    let hosts = problem.fleet.hosts.len();
    let mut is_used = kept(load);
    for host in order {
        is_used[host] = false;
        let items = largest_first(problem, load.items_of[host].clone());
        let mut moved = Vec::new();
        for &item in &items {
            load.take(problem, item);
            let others = (0..hosts).filter(|&other| is_used[other]);
            let Some(other) = fullest(problem, load, item, others) else {
                load.put(problem, item, host);
                break;
            };
            load.put(problem, item, other);
            moved.push(item);
        }
        if moved.len() < items.len() {
            is_used[host] = true;
            for item in moved {
                load.take(problem, item);
                load.put(problem, item, host);
            }
        }
    }
}
