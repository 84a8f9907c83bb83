//! What no placement can do better.
//!
//! *Hosts.* Whatever is placed, the hosts in use have together at least the memory and the processors that all VMs need in any slot, and
//! so of any mixture of the two. For each of several mixtures the hosts that have most of it are the fewest that suffice; the
//! largest of these numbers is a lower bound. It lets VMs be divided among hosts, and forgets all rules. If any one host may be
//! lost, the others in use suffice, also without the one that has most. Cost: O(n log n) for n hosts.
//!
//! *Bytes.* VMs that rules forbid on their hosts must leave. After that, in any slot, a host with too little must lose VMs whose
//! needs make up for the excess; the cheapest are those of fewest bytes for what they need, the last one divided.

use crate::fleet::{Fleet, Host};
use crate::load::Problem;

/// Mixtures of memory and processors, from memory alone to processors alone.
const MIXTURES: u64 = 16;

/// The fewest hosts that have what all VMs need.
pub(crate) fn hosts(fleet: &Fleet, survive_loss: bool) -> u64 {
    // Memory and processors: the most of any slot, of which no less is needed and no more is there.
    let of_both = |amounts: &[u64]| {
        let (memory, processors) = amounts.split_at(fleet.slots);
        [memory, processors].map(|part| u128::from(part.iter().copied().max().unwrap_or_default()))
    };
    let need = of_both(&fleet.total_need());
    let capacity = |host: &Host| {
        let amounts: Vec<u64> = host.capacity.iter().copied().map(u64::from).collect();
        of_both(&amounts)
    };
    let capacities: Vec<[u128; 2]> = fleet.hosts.iter().map(capacity).collect();
    let fewest = |part: u64| {
        // A mixture in which the whole need of one counts as that of the other.
        let weights = [
            u128::from(part) * need[1].max(1),
            u128::from(MIXTURES - part) * need[0].max(1),
        ];
        let mixed = |[memory, processors]: [u128; 2]| memory * weights[0] + processors * weights[1];
        let mut left = mixed(need);
        let mut most: Vec<u128> = capacities.iter().copied().map(mixed).collect();
        most.sort_unstable_by(|a, b| b.cmp(a));
        let lost = usize::from(survive_loss);
        let needed = most.iter().skip(lost).take_while(|&&own| {
            let is_needed = left > 0;
            left = left.saturating_sub(own);
            is_needed
        });
        // Without any need a VM still is on a host.
        needed.count().max(1) + lost
    };
    match fleet.vms.is_empty() {
        true => 0,
        false => (0..=MIXTURES).map(fewest).max().unwrap_or_default() as u64,
    }
}

/// The fewest bytes that must be moved so that every VM has what it needs.
pub(crate) fn moved_bytes(problem: &Problem<'_>) -> u64 {
    let fleet = problem.fleet;
    let mut total = 0.0;
    let mut vms_of: Vec<Vec<usize>> = vec![Vec::new(); fleet.hosts.len()];
    for (item, own) in problem.items.iter().enumerate() {
        for &vm in &own.vms {
            let host = fleet.vms[vm].host;
            if problem.may_be_on(item, host) {
                vms_of[host].push(vm);
            } else {
                total += fleet.vms[vm].size_bytes as f64;
            }
        }
    }
    for (host, vms) in fleet.hosts.iter().zip(vms_of) {
        let mut most = 0.0_f64;
        for (slot, &capacity) in host.capacity.iter().enumerate() {
            let need = |vm: usize| u64::from(fleet.vms[vm].need[slot]);
            let used: u64 = vms.iter().map(|&vm| need(vm)).sum();
            let Some(mut excess) = used
                .checked_sub(u64::from(capacity) + 1)
                .map(|more| more + 1)
            else {
                continue;
            };
            let price = |vm: usize| fleet.vms[vm].size_bytes as f64 / need(vm) as f64;
            let mut cheapest: Vec<usize> = vms.iter().copied().filter(|&vm| need(vm) > 0).collect();
            cheapest.sort_by(|&a, &b| price(a).total_cmp(&price(b)));
            let mut bytes = 0.0;
            for vm in cheapest {
                let part = need(vm).min(excess);
                bytes += price(vm) * part as f64;
                excess -= part;
                if excess == 0 {
                    break;
                }
            }
            most = most.max(bytes);
        }
        total += most;
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a conversion that saturates; rounding must not raise a lower bound"
    )]
    let bytes = (total * (1.0 - 1e-9)) as u64;
    bytes
}
