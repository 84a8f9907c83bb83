//! The order of moves: when a VM comes, its host has room for it.
//!
//! A VM needs its share of its host until it has left, so a move has to wait for others. Where moves wait for each other in a
//! circle, a VM goes to a third host first; if none has room, the moves left are listed as they are, and counted.

use plimsoll_protocol::fleet::MoveReason;

use crate::fleet::Fleet;
use crate::place::Placement;

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
    /// The last moves, that need room at the same time.
    pub(crate) at_once: usize,
}

/// Orders the moves from where the VMs are to `placement`; `reason` is that of each VM.
pub(crate) fn order(
    fleet: &Fleet,
    placement: &Placement,
    reason: impl Fn(usize) -> MoveReason,
) -> Order {
    let mut used = vec![vec![0_u64; fleet.slots * 2]; fleet.hosts.len()];
    for vm in &fleet.vms {
        shift(&mut used[vm.host], &vm.need, true);
    }
    let mut now: Vec<usize> = fleet.vms.iter().map(|vm| vm.host).collect();
    let fits = |used: &[Vec<u64>], vm: usize, host: usize| {
        let capacity = &fleet.hosts[host].capacity;
        let need = &fleet.vms[vm].need;
        let with = used[host].iter().zip(need).zip(capacity);
        with.fold(true, |fits, ((used, &need), &capacity)| {
            fits & (used + u64::from(need) <= u64::from(capacity))
        })
    };
    let mut order = Order::default();
    let mut waiting: Vec<usize> = (0..fleet.vms.len())
        .filter(|&vm| placement.host_of[vm] != now[vm])
        .collect();
    // Large ones leave most room behind.
    waiting.sort_by_key(|&vm| std::cmp::Reverse(fleet.vms[vm].size_bytes));
    while !waiting.is_empty() {
        let before = waiting.len();
        waiting.retain(|&vm| {
            let (from, to) = (now[vm], placement.host_of[vm]);
            if !fits(&used, vm, to) {
                return true;
            }
            shift(&mut used[from], &fleet.vms[vm].need, false);
            shift(&mut used[to], &fleet.vms[vm].need, true);
            now[vm] = to;
            order.moves.push(Move {
                vm,
                from,
                to,
                reason: reason(vm),
            });
            false
        });
        if waiting.len() < before {
            continue;
        }
        // The smallest that has a third host goes there, once.
        let aside = waiting.iter().rev().find_map(|&vm| {
            let is_there_first = now[vm] == fleet.vms[vm].host;
            let mut others = (0..fleet.hosts.len()).filter(|&host| host != now[vm]);
            let third = others.find(|&host| is_there_first && fits(&used, vm, host));
            third.map(|host| (vm, host))
        });
        let Some((vm, host)) = aside else { break };
        shift(&mut used[now[vm]], &fleet.vms[vm].need, false);
        shift(&mut used[host], &fleet.vms[vm].need, true);
        order.moves.push(Move {
            vm,
            from: now[vm],
            to: host,
            reason: MoveReason::Room,
        });
        now[vm] = host;
    }
    order.at_once = waiting.len();
    order.moves.extend(waiting.into_iter().map(|vm| Move {
        vm,
        from: now[vm],
        to: placement.host_of[vm],
        reason: reason(vm),
    }));
    order
}

fn shift(used: &mut [u64], need: &[u32], is_added: bool) {
    for (used, &need) in used.iter_mut().zip(need) {
        *used = match is_added {
            true => *used + u64::from(need),
            false => *used - u64::from(need),
        };
    }
}
