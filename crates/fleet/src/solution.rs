//! A placement of items: whether it is whole, and the spare hosts that it needs.

use plimsoll_protocol::fleet::Goal;

use crate::load::{Load, Problem};

/// What a placement is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aim {
    /// The goal.
    pub goal: Goal,
    /// Whether any one host may be lost afterwards.
    pub survive_loss: bool,
    /// Whether a small fleet is searched exhaustively.
    pub exhaustive: bool,
}

/// A placement of items, and what is wrong with it.
#[derive(Debug, Clone)]
pub(crate) struct Solution {
    pub(crate) load: Load,
    /// Hosts without a VM that are kept for the loss of another.
    pub(crate) spare: Vec<usize>,
    /// Hosts that cannot give their VMs what they need, or on which rules forbid one.
    pub(crate) short: Vec<usize>,
    /// For each host, the VMs that would find no place if it were lost.
    pub(crate) stranded: Vec<Vec<usize>>,
}

impl Solution {
    /// The placement with the spare hosts that it needs. Whether a host may be lost, and with how few spare hosts, is searched
    /// exhaustively while `steps` last, which are counted down. Once none is left, more may survive than is found.
    pub(crate) fn of(problem: &Problem<'_>, load: Load, aim: Aim, steps: &mut u64) -> Self {
        let hosts = 0..problem.fleet.hosts.len();
        let is_short = |&host: &usize| {
            !load.is_within(problem, host) || load.forbidden(problem, host).is_some()
        };
        let short = hosts.clone().filter(is_short).collect();
        let mut solution = Self {
            load,
            spare: Vec::new(),
            short,
            stranded: vec![Vec::new(); hosts.len()],
        };
        if aim.survive_loss {
            solution.survive(problem, aim.goal, steps);
        }
        solution
    }

    /// Finds the spare hosts, and the VMs that would find no place.
    fn survive(&mut self, problem: &Problem<'_>, goal: Goal, steps: &mut u64) {
        let hosts = 0..self.stranded.len();
        let mut kept = match goal {
            Goal::Fit => vec![true; hosts.len()],
            Goal::FewestHosts => kept(&self.load),
        };
        for (host, vms) in self.stranded.iter_mut().enumerate() {
            *vms = stranded(problem, &self.load, host, &kept, steps);
        }
        let in_danger: Vec<usize> = hosts
            .clone()
            .filter(|&host| !self.stranded[host].is_empty())
            .collect();
        let mut empty: Vec<usize> = hosts.clone().filter(|&host| !kept[host]).collect();
        empty.sort_by_key(|&host| problem.fleet.hosts[host].capacity[0]);
        for &host in empty.iter().rev() {
            if self.stranded.iter().all(Vec::is_empty) {
                break;
            }
            kept[host] = true;
            self.spare.push(host);
            for &host in &in_danger {
                if !self.stranded[host].is_empty() {
                    self.stranded[host] = stranded(problem, &self.load, host, &kept, steps);
                }
            }
        }
        // Those go without which as much survives.
        let (load, stranded_of) = (&self.load, &self.stranded);
        self.spare.retain(|&host| {
            kept[host] = false;
            kept[host] = in_danger.iter().any(|&lost| {
                stranded(problem, load, lost, &kept, steps).len() > stranded_of[lost].len()
            });
            kept[host]
        });
        // One that is needed is the fewest; of more, fewer others may do.
        if self.spare.len() > 1 && self.stranded.iter().all(Vec::is_empty) {
            for &host in &self.spare {
                kept[host] = false;
            }
            let is_enough = |kept: &[bool], steps: &mut u64| {
                let mut lost = in_danger.iter();
                lost.all(|&host| stranded(problem, load, host, kept, steps).is_empty())
            };
            let fewer = 1..self.spare.len();
            let found = fewer
                .into_iter()
                .any(|count| choose(&mut kept, &empty, count, steps, &is_enough));
            if found {
                empty.retain(|&host| kept[host]);
                self.spare = empty;
            }
        }
    }

    /// Whether every VM has what it needs, rules are kept, and any host may be lost if that was asked for.
    pub(crate) fn is_whole(&self) -> bool {
        self.short.is_empty() && self.stranded.iter().all(Vec::is_empty)
    }

    /// Hosts that must run: those in use, and the spare ones.
    pub(crate) fn hosts(&self) -> usize {
        self.load.hosts_in_use() + self.spare.len()
    }

    /// Bytes of all VMs that are not where they were.
    pub(crate) fn moved_bytes(&self, problem: &Problem<'_>) -> u64 {
        let placed = self.load.host_of.iter().enumerate();
        placed
            .filter_map(|(item, host)| Some(problem.moved_bytes(item, (*host)?)))
            .sum()
    }
}

pub(crate) fn kept(load: &Load) -> Vec<bool> {
    load.items_of
        .iter()
        .map(|items| !items.is_empty())
        .collect()
}

/// Items, those that need the largest share of their origin first.
pub(crate) fn largest_first(problem: &Problem<'_>, mut items: Vec<usize>) -> Vec<usize> {
    items.sort_by(|&a, &b| {
        let share = |item: usize| problem.share(item, problem.items[item].origin);
        share(b).total_cmp(&share(a)).then(a.cmp(&b))
    });
    items
}

/// Adds `count` of the hosts `from` to `kept` so that this `is_enough`. False if none are, or if the steps run out.
fn choose(
    kept: &mut [bool],
    from: &[usize],
    count: usize,
    steps: &mut u64,
    is_enough: &impl Fn(&[bool], &mut u64) -> bool,
) -> bool {
    if *steps == 0 || count == 0 {
        return *steps > 0 && is_enough(kept, steps);
    }
    from.iter().enumerate().any(|(at, &host)| {
        kept[host] = true;
        kept[host] = choose(kept, &from[at + 1..], count - 1, steps, is_enough);
        kept[host]
    })
}

/// The VMs of a host that find no place on the other hosts of `kept` if it is lost. Without `steps`, a place that exists may not
/// be found.
fn stranded(
    problem: &Problem<'_>,
    load: &Load,
    host: usize,
    kept: &[bool],
    steps: &mut u64,
) -> Vec<usize> {
    let lost = largest_first(problem, load.items_of[host].clone());
    let others = (0..kept.len()).filter(|&other| other != host && kept[other]);
    let others: Vec<usize> = others.collect();
    *steps = steps.saturating_sub(1 + lost.len() as u64);
    let mut rest = load.clone_without(problem, host);
    let mut stranded = Vec::new();
    for &item in &lost {
        let with_room = others.iter().copied();
        let with_room = with_room.filter(|&other| rest.has_room(problem, item, other));
        match roomiest(problem, &rest, item, with_room) {
            Some(other) => rest.put(problem, item, other),
            None => stranded.extend(&problem.items[item].vms),
        }
    }
    if !stranded.is_empty() && *steps > 0 {
        let mut rest = load.clone_without(problem, host);
        let is_homeless = |&item: &usize| {
            let mut others = others.iter();
            !others.any(|&other| rest.has_room(problem, item, other))
        };
        if !lost.iter().any(is_homeless) && have_places(problem, &mut rest, &lost, &others, steps) {
            stranded.clear();
        }
    }
    stranded
}

/// Whether the items find places on these hosts, each beside what is there and the others. False if the steps run out.
fn have_places(
    problem: &Problem<'_>,
    load: &mut Load,
    items: &[usize],
    hosts: &[usize],
    steps: &mut u64,
) -> bool {
    let Some((&item, others)) = items.split_first() else {
        return true;
    };
    *steps = steps.saturating_sub(1);
    hosts.iter().any(|&host| {
        if *steps == 0 || !load.has_room(problem, item, host) {
            return false;
        }
        load.put(problem, item, host);
        let found = have_places(problem, load, others, hosts, steps);
        load.take(problem, item);
        found
    })
}

/// Of hosts that have room for the item, the one that has most left with it.
pub(crate) fn roomiest(
    problem: &Problem<'_>,
    load: &Load,
    item: usize,
    hosts: impl Iterator<Item = usize>,
) -> Option<usize> {
    let shares = hosts.map(|host| (load.share_with(problem, item, host), host));
    shares
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, host)| host)
}
