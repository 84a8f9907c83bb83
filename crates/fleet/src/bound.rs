//! What no placement can do better.
//!
//! *Hosts.* Whatever is placed, the hosts in use have together at least what all VMs need in every slot. The fewest such
//! hosts, as an integer program over the kinds of hosts of equal capacity, are a lower bound: it lets VMs be divided among hosts, and forgets all
//! rules. If any one host may be lost, the others in use suffice, so there is one more.
//!
//! *Bytes.* VMs that rules forbid on their hosts must leave. After that, in any slot, a host with too little must lose VMs whose
//! needs make up for the excess; the cheapest are those of fewest bytes for what they need, the last one divided.

use std::collections::BTreeMap;

use microlp::{
    ComparisonOp, Error, OptimizationDirection, Problem as Program, SolutionStatus, SolveOutcome,
};

use crate::fleet::{Amounts, Fleet};
use crate::load::Problem;

/// The fewest hosts that have what all VMs need.
pub(crate) fn hosts(fleet: &Fleet, survive_loss: bool) -> u64 {
    let need = fleet.total_need();
    if need.iter().all(|&units| units == 0) {
        return u64::from(!fleet.vms.is_empty()) * (1 + u64::from(survive_loss));
    }
    let mut kinds: BTreeMap<&Amounts, i32> = BTreeMap::new();
    for host in &fleet.hosts {
        *kinds.entry(&host.capacity).or_default() += 1;
    }
    let mut program = Program::new(OptimizationDirection::Minimize);
    let variables: Vec<_> = kinds
        .values()
        .map(|&count| program.add_integer_var(1.0, (0, count)))
        .collect();
    // Slots in which all hosts have the same and less is needed ask for nothing more.
    let mut rows: BTreeMap<Vec<u32>, u64> = BTreeMap::new();
    for (slot, &need) in need.iter().enumerate() {
        let row = kinds.keys().map(|capacity| capacity[slot]).collect();
        let most = rows.entry(row).or_default();
        *most = need.max(*most);
    }
    for (row, need) in rows {
        let terms = variables
            .iter()
            .copied()
            .zip(row.into_iter().map(f64::from));
        program.add_constraint(terms.collect::<Vec<_>>(), ComparisonOp::Ge, need as f64);
    }
    let fewest = match program.solve() {
        Ok(SolveOutcome::Solution(solution)) if solution.status() == SolutionStatus::Optimal => {
            // A whole number but for rounding.
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a number of hosts"
            )]
            let hosts = (solution.objective() - 1e-6).ceil().max(0.0) as u64;
            hosts
        }
        // Not even all of them suffice.
        Err(Error::Infeasible) => fleet.hosts.len() as u64,
        // Nothing is claimed but that VMs are somewhere.
        Ok(_) | Err(_) => 1,
    };
    fewest + u64::from(survive_loss)
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
