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
    /// The placement with the spare hosts that it needs.
    pub(crate) fn of(problem: &Problem<'_>, load: Load, aim: Aim) -> Self {
        let hosts = 0..problem.fleet.hosts.len();
        let is_short = |&host: &usize| {
            !load.is_within(problem, host) || load.forbidden(problem, host).is_some()
        };
        let short = hosts.clone().filter(is_short).collect();
        let mut spare = Vec::new();
        let mut stranded_of = vec![Vec::new(); hosts.len()];
        if aim.survive_loss {
            let mut empty: Vec<usize> = hosts
                .clone()
                .filter(|&host| load.items_of[host].is_empty())
                .collect();
            empty.sort_by_key(|&host| problem.fleet.hosts[host].capacity[0]);
            let mut kept = match aim.goal {
                Goal::Fit => vec![true; hosts.len()],
                Goal::FewestHosts => kept(&load),
            };
            for (host, stranded_of) in stranded_of.iter_mut().enumerate() {
                *stranded_of = stranded(problem, &load, host, &kept);
            }
            let is_bad = |stranded_of: &[Vec<usize>]| stranded_of.iter().any(|vms| !vms.is_empty());
            while aim.goal == Goal::FewestHosts && is_bad(&stranded_of) {
                let Some(host) = empty.pop() else { break };
                kept[host] = true;
                spare.push(host);
                let in_danger = stranded_of.iter_mut().enumerate();
                for (host, vms) in in_danger.filter(|(_, vms)| !vms.is_empty()) {
                    *vms = stranded(problem, &load, host, &kept);
                }
            }
        }
        Self {
            load,
            spare,
            short,
            stranded: stranded_of,
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

/// The VMs of a host that find no place on the other hosts of `kept` if it is lost.
pub(crate) fn stranded(
    problem: &Problem<'_>,
    load: &Load,
    host: usize,
    kept: &[bool],
) -> Vec<usize> {
    let lost = largest_first(problem, load.items_of[host].clone());
    let mut rest = load.clone_without(problem, host);
    let mut stranded = Vec::new();
    for item in lost {
        let others = (0..kept.len())
            .filter(|&other| other != host && kept[other] && rest.has_room(problem, item, other));
        match roomiest(problem, &rest, item, others) {
            Some(other) => rest.put(problem, item, other),
            None => stranded.extend(&problem.items[item].vms),
        }
    }
    stranded
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
