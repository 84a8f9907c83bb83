//! The policy of VMware ESX, from curves and from sampled working sets (\[LS07\] §4.2, §6.5).
//!
//! Every VM starts with its baseline. A VM that does not need all of its baseline is a victim: by its curve, if no size
//! above the baseline misses less and some size below misses no more; by sampling, if its working set is smaller than
//! its baseline. The idle tax is the share of a victim's idle memory that can be taken. This memory is shared among the
//! VMs that miss less with more memory (by sampling: all that are not victims), in proportion to their shares and up to
//! their ceilings. Memory that no VM can use stays with its owner.
//!
//! If the host is too small for all baselines, memory that victims do not need is taken first, regardless of the tax,
//! and then memory of all VMs in proportion to what their bounds allow.

use crate::PolicyError;
use crate::candidate::{at_or_above, at_or_below};
use crate::policy::{Policy, PolicyOption, PolicyOptions, PolicyRow};
use crate::problem::{Problem, Solution, Vm};

pub(crate) static BY_CURVES: PolicyRow = PolicyRow {
    name: "esx",
    title: "ESX from curves",
    summary: "surplus by the curves, allocated in proportion to shares",
    options: &[PolicyOption::IdleTax],
    source: "[LS07] §4.2",
    from_working_sets: false,
    allocate: |problem, options| allocate(problem, options, false),
};

pub(crate) static BY_SAMPLES: PolicyRow = PolicyRow {
    name: "esx-sampling",
    title: "ESX from sampled working sets",
    summary: "surplus by sampled working sets, allocated in proportion to shares",
    options: &[PolicyOption::IdleTax],
    source: "[LS07] §6.5",
    from_working_sets: true,
    allocate: |problem, options| allocate(problem, options, true),
};

/// Misses that differ by less than this share of those at the baseline are considered equal.
const ALIKE: f64 = 0.01;

/// One VM's contribution to the allocation.
struct Party {
    base: u64,
    /// Memory of its baseline that it does not need.
    idle: u64,
    /// Whether it gains from more memory.
    gains: bool,
}

impl Policy {
    /// ESX's policy from curves; `idle_tax` is 0.0 to 1.0.
    #[must_use]
    pub const fn esx(idle_tax: f64) -> Self {
        Self::new(&BY_CURVES, with_tax(idle_tax))
    }

    /// ESX's policy from sampled working sets; `idle_tax` is 0.0 to 1.0.
    #[must_use]
    pub const fn esx_sampling(idle_tax: f64) -> Self {
        Self::new(&BY_SAMPLES, with_tax(idle_tax))
    }
}

const fn with_tax(idle_tax: f64) -> PolicyOptions {
    PolicyOptions {
        idle_tax,
        ..PolicyOptions::DEFAULT
    }
}

/// Allocates by curves, or by working sets if `sampled`.
fn allocate(
    problem: &Problem<'_>,
    options: &PolicyOptions,
    sampled: bool,
) -> Result<Solution, PolicyError> {
    let idle_tax = options.idle_tax;
    if !(0.0..=1.0).contains(&idle_tax) {
        return Err(crate::rule("idle_tax", &idle_tax, "between 0 and 1"));
    }
    let parties = 0..problem.vms.len();
    let parties: Vec<_> = parties
        .map(|vm| {
            if sampled {
                sampled_party(problem, vm)
            } else {
                curve_party(problem, vm)
            }
        })
        .collect();
    let mut sizes: Vec<_> = parties.iter().map(|party| party.base).collect();
    let idle: Vec<_> = parties.iter().map(|party| party.idle).collect();
    let taxed: Vec<_> = (0..parties.len())
        .map(|vm| {
            let base = parties[vm].base;
            let left = base - plimsoll_flow::PageCount(idle[vm]).scaled(idle_tax).0;
            base.saturating_sub(at_or_above(&problem.lists[vm], &problem.vms[vm].grid, left))
        })
        .collect();
    let sum = |sizes: &[u64]| sizes.iter().copied().map(u128::from).sum::<u128>();
    let total = u128::from(problem.rules.total.0);
    let taken = sum(&sizes);
    if taken > total {
        charge(problem, &mut sizes, &idle, taken - total);
        let taken = sum(&sizes);
        let lists = problem.lists.iter().zip(&sizes);
        let above: Vec<_> = lists.map(|(list, size)| size - list[0].from).collect();
        charge(problem, &mut sizes, &above, taken.saturating_sub(total));
    } else {
        let free = total - taken;
        let given = give(problem, &parties, &mut sizes, free + sum(&taxed));
        charge(problem, &mut sizes, &taxed, given.saturating_sub(free));
    }
    Ok(Solution {
        sizes,
        bound: None,
        best: false,
        search: None,
    })
}

/// A VM that takes no part in the allocation.
fn bystander(problem: &Problem<'_>, vm: usize) -> Party {
    Party {
        base: problem.lists[vm][0].from,
        idle: 0,
        gains: false,
    }
}

fn base(problem: &Problem<'_>, vm: usize) -> u64 {
    let Vm { demand, grid, .. } = &problem.vms[vm];
    at_or_below(&problem.lists[vm], grid, demand.baseline.0)
}

fn curve_party(problem: &Problem<'_>, vm: usize) -> Party {
    let Vm { misses, all, .. } = &problem.vms[vm];
    let Some(misses) = misses else {
        return bystander(problem, vm);
    };
    let base = base(problem, vm);
    let expected = |size: u64| misses.relative(size).expected;
    let gains = expected(all[all.len() - 1].to) < 1.0 - ALIKE;
    let flat = all.partition_point(|candidate| expected(candidate.from) > 1.0 + ALIKE);
    let needed = all.get(flat).map_or(base, |candidate| candidate.from);
    Party {
        base,
        idle: if gains {
            0
        } else {
            base.saturating_sub(needed)
        },
        gains,
    }
}

fn sampled_party(problem: &Problem<'_>, vm: usize) -> Party {
    let Some(working_set) = problem.vms[vm].demand.working_set else {
        return bystander(problem, vm);
    };
    let base = base(problem, vm);
    let idle = base.saturating_sub(working_set.0);
    Party {
        base,
        idle,
        gains: idle == 0,
    }
}

/// Distributes `pool` pages among the VMs that gain, by shares; returns the number of pages given.
fn give(problem: &Problem<'_>, parties: &[Party], sizes: &mut [u64], pool: u128) -> u128 {
    let room = |vm: usize| {
        let list = &problem.lists[vm];
        u128::from(list[list.len() - 1].to.saturating_sub(parties[vm].base))
    };
    let shares = |vm: usize| u128::from(problem.vms[vm].demand.shares);
    let mut open: Vec<_> = (0..parties.len()).filter(|&vm| parties[vm].gains).collect();
    let mut left = pool;
    let mut gets = vec![0_u128; parties.len()];
    // A VM with less room than its share gets only that room, and the rest is distributed again.
    loop {
        let all: u128 = open.iter().map(|&vm| shares(vm)).sum();
        let part = |vm: usize| left * shares(vm) / all.max(1);
        let (full, rest): (Vec<_>, Vec<_>) = open.iter().partition(|&&vm| room(vm) <= part(vm));
        if full.is_empty() {
            rest.iter().for_each(|&vm| gets[vm] = part(vm));
            break;
        }
        for &vm in &full {
            gets[vm] = room(vm);
        }
        left -= full.iter().map(|&vm| room(vm)).sum::<u128>();
        open = rest;
    }
    let mut given = 0;
    for (vm, party) in parties.iter().enumerate() {
        let wanted = party.base + u64::try_from(gets[vm]).unwrap_or(u64::MAX);
        let size = at_or_below(&problem.lists[vm], &problem.vms[vm].grid, wanted);
        if gets[vm] > 0 && size > party.base {
            given += u128::from(size - party.base);
            sizes[vm] = size;
        }
    }
    given
}

/// Takes at least `due` pages, in proportion to what each VM can give; less if they cannot give as much.
fn charge(problem: &Problem<'_>, sizes: &mut [u64], can: &[u64], due: u128) {
    let all: u128 = can.iter().copied().map(u128::from).sum();
    let parts = can
        .iter()
        .map(|&can| (due * u128::from(can)).div_ceil(all.max(1)));
    let parts: Vec<_> = parts.collect();
    let least: Vec<_> = sizes
        .iter()
        .zip(can)
        .map(|(size, can)| size - can)
        .collect();
    let mut left = due;
    // The first round takes the proportional shares, the second one what rounding to the unit left due.
    for round in 0..2 {
        for (vm, size) in sizes.iter_mut().enumerate() {
            let pages = if round == 0 {
                parts[vm].min(left)
            } else {
                left
            };
            if pages == 0 {
                continue;
            }
            let (list, grid) = (&problem.lists[vm], &problem.vms[vm].grid);
            let pages = u64::try_from(pages).unwrap_or(u64::MAX);
            let to = at_or_below(list, grid, size.saturating_sub(pages));
            let to = to.max(at_or_above(list, grid, least[vm])).min(*size);
            left = left.saturating_sub(u128::from(*size - to));
            *size = to;
        }
    }
}
