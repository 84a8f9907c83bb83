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

/// A placement of items, how good it is, and what it needs besides.
#[derive(Debug, Clone)]
pub(crate) struct Solution {
    pub(crate) load: Load,
    pub(crate) spare: Vec<usize>,
    pub(crate) is_whole: bool,
}

impl Solution {
    /// The placement with the spare hosts that it needs.
    pub(crate) fn of(problem: &Problem<'_>, load: Load, aim: Aim) -> Self {
        let hosts = 0..problem.fleet.hosts.len();
        let mut is_whole = hosts
            .clone()
            .all(|host| load.is_within(problem, host) && load.forbidden(problem, host).is_none());
        let mut spare = Vec::new();
        if aim.survive_loss {
            let mut empty: Vec<usize> = hosts
                .clone()
                .filter(|&host| load.items_of[host].is_empty())
                .collect();
            empty.sort_by_key(|&host| problem.fleet.hosts[host].capacity[0]);
            let mut kept = kept(&load);
            if aim.goal == Goal::Fit {
                kept = vec![true; kept.len()];
            }
            let mut in_danger: Vec<usize> = hosts
                .filter(|&host| !stranded(problem, &load, host, &kept).is_empty())
                .collect();
            while !in_danger.is_empty() && aim.goal == Goal::FewestHosts {
                let Some(host) = empty.pop() else { break };
                kept[host] = true;
                spare.push(host);
                in_danger.retain(|&host| !stranded(problem, &load, host, &kept).is_empty());
            }
            is_whole &= in_danger.is_empty();
        }
        Self {
            load,
            spare,
            is_whole,
        }
    }

    /// Hosts that must run: those in use, and the spare ones.
    pub(crate) fn hosts(&self) -> usize {
        let used = self.load.items_of.iter().filter(|items| !items.is_empty());
        used.count() + self.spare.len()
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
