//! The order of moves: when a VM comes, its host has room for it, and no rule forbids it there.
//!
//! A VM needs its share of its host until it has left, and others may have to be apart from it, so a move has to wait for others.
//! Where moves wait for each other in a circle, a VM goes to a third host first; if none can take it, the moves left are listed
//! as they are, and counted.

use plimsoll_protocol::fleet::MoveReason;

use crate::load::{Load, Problem};

/// A move of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) vm: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) reason: MoveReason,
}

/// The moves in order.
#[derive(Debug, Default)]
pub(crate) struct Order {
    pub(crate) moves: Vec<Move>,
    /// The last moves, which wait for each other.
    pub(crate) at_once: usize,
}

/// Orders the moves of VMs, each an item of `problem`, from where they are to `host_of`; `reason` is that of each VM. VMs that
/// belong together are parted while they move.
pub(crate) fn order(
    problem: &Problem<'_>,
    host_of: &[usize],
    reason: impl Fn(usize) -> MoveReason,
) -> Order {
    let fleet = problem.fleet;
    let mut load = problem.load_now();
    let mut order = Order::default();
    let mut go = |load: &mut Load, vm: usize, to: usize, reason: MoveReason| {
        let from = load.take(problem, vm).unwrap_or(to);
        load.put(problem, vm, to);
        order.moves.push(Move {
            vm,
            from,
            to,
            reason,
        });
    };
    let mut waiting: Vec<usize> = (0..fleet.vms.len())
        .filter(|&vm| host_of[vm] != fleet.vms[vm].host)
        .collect();
    // Large ones leave most room behind.
    waiting.sort_by_key(|&vm| std::cmp::Reverse(fleet.vms[vm].size_bytes));
    while !waiting.is_empty() {
        let before = waiting.len();
        waiting.retain(|&vm| {
            let has_room = load.has_room(problem, vm, host_of[vm]);
            if has_room {
                go(&mut load, vm, host_of[vm], reason(vm));
            }
            !has_room
        });
        if waiting.len() < before {
            continue;
        }
        // The smallest that has a third host goes there, once.
        let aside = waiting.iter().rev().find_map(|&vm| {
            let origin = fleet.vms[vm].host;
            let is_there = load.host_of[vm] == Some(origin);
            let mut others = (0..fleet.hosts.len()).filter(|&host| is_there && host != origin);
            let third = others.find(|&host| load.has_room(problem, vm, host));
            third.map(|host| (vm, host))
        });
        let Some((vm, host)) = aside else { break };
        go(&mut load, vm, host, MoveReason::Room);
    }
    for &vm in &waiting {
        go(&mut load, vm, host_of[vm], reason(vm));
    }
    order.at_once = waiting.len();
    order
}
