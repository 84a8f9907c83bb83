//! The policy of VMware ESX, from curves and from sampled working sets (\[LS07\] §4.2, §6.6).
//!
//! Memory is reclaimed from the VM that pays the fewest shares for each page, where an idle page costs k times as much
//! as an active one: rho = S / (P (f + k (1 - f))), k = 1 / (1 - idle tax), for a VM of P pages, of which the share f is
//! active (min-funding revocation with adjusted shares per page, \[Waldspurger02\] §5.1, §5.2). What is computed is the
//! state in which this ends: all VMs have the same rho, except those at a limit of their sizes. With an idle tax of 0,
//! memory is in proportion to shares alone; with 1, no VM has idle memory while another uses all that it has.
//!
//! Active is, by its curve, the smallest size that misses no more than the baseline, or all if larger sizes miss less;
//! by sampling, the working set, or all if that is no smaller than the present size, within the sample's error. A VM
//! with idle memory is not given more than its baseline. A VM without measurements keeps its size.
//!
//! Departs from the source in S, the VM's shares times its baseline (as the product's default gives shares in
//! proportion to configured memory), so that VMs of equal shares at their baselines have the same rho.

use plimsoll_flow::Whole as _;

use crate::PolicyError;
use crate::candidate::{at_or_above, at_or_below};
use crate::policy::{Policy, PolicyOption, PolicyOptions, PolicyRow};
use crate::problem::{Problem, Solution, Vm};

pub(crate) static BY_CURVES: PolicyRow = PolicyRow {
    name: "esx",
    title: "ESX from curves",
    summary: "shares per page, idle pages by the curves taxed",
    options: &[PolicyOption::IdleTax],
    source: "[LS07] §4.2",
    from_working_sets: false,
    allocate: |problem, options| allocate(problem, options, false),
};

pub(crate) static BY_SAMPLES: PolicyRow = PolicyRow {
    name: "esx-sampling",
    title: "ESX from sampled working sets",
    summary: "shares per page, idle pages by sampled working sets taxed",
    options: &[PolicyOption::IdleTax],
    source: "[Waldspurger02] §5",
    from_working_sets: true,
    allocate: |problem, options| allocate(problem, options, true),
};

/// Misses that differ by less than this share of those at the baseline are considered equal.
const ALIKE: f64 = 0.01;

/// A sampled working set that falls short of the present size by less than this share is considered equal: the error
/// of 100 sampled pages (\[Waldspurger02\] §5.3).
const SAMPLING_ERROR: f64 = 0.1;

/// The least share of idle memory that is left untaxed, so that costs stay finite.
const UNTAXED_MIN: f64 = 1e-9;

/// Logarithm of a price at which every VM has its smallest size; at its inverse, the largest.
const LOG_PRICE_MAX: f64 = 120.0;

/// Number of bisection steps: enough for full precision.
const HALVINGS: u32 = 120;

/// What a VM pays, and the limits of its size in pages.
struct Party {
    /// Its shares.
    funds: f64,
    /// Pages that cost one each; above this number they cost `idle_cost` each.
    active: f64,
    idle_cost: f64,
    least: u64,
    most: u64,
}

impl Party {
    /// Its adjusted shares per page.
    fn rho(&self, size: u64) -> f64 {
        let size = size as f64;
        let idle = (size - self.active).max(0.0);
        self.funds / (size - idle + idle * self.idle_cost)
    }

    /// Its size at a price per page, that is, where `rho` is the price.
    fn size_at(&self, price: f64) -> u64 {
        let pays_for = self.funds / price;
        let idle = (pays_for - self.active).max(0.0);
        let size = pays_for - idle + idle / self.idle_cost;
        u64::whole(size.round()).clamp(self.least, self.most)
    }
}

impl Policy {
    /// ESX's policy from curves; `idle_tax` is 0.0 to 1.0.
    pub const fn esx(idle_tax: f64) -> Self {
        Self::new(&BY_CURVES, with_tax(idle_tax))
    }

    /// ESX's policy from sampled working sets; `idle_tax` is 0.0 to 1.0.
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
    let idle_cost = 1.0 / (1.0 - idle_tax).max(UNTAXED_MIN);
    let parties = (0..problem.vms.len()).map(|vm| party(problem, vm, idle_cost, sampled));
    let parties: Vec<_> = parties.collect();
    let total = u128::from(problem.rules.total.0);
    let sum = |sizes: &[u64]| sizes.iter().copied().map(u128::from).sum::<u128>();
    let sizes_at = |log_price: f64| -> Vec<u64> {
        let all = parties.iter().enumerate();
        all.map(|(vm, party)| {
            let size = party.size_at(log_price.exp());
            at_or_below(&problem.lists[vm], &problem.vms[vm].grid, size)
        })
        .collect()
    };
    // The lowest price at which all fits: at the highest, each VM has its smallest size.
    let (mut low, mut high) = (-LOG_PRICE_MAX, LOG_PRICE_MAX);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        if sum(&sizes_at(middle)) > total {
            low = middle;
        } else {
            high = middle;
        }
    }
    let mut sizes = sizes_at(high);
    // What rounding to the unit left goes to those that pay most for it.
    let next = |vm: usize| {
        let (list, grid) = (&problem.lists[vm], &problem.vms[vm].grid);
        at_or_above(list, grid, sizes[vm].saturating_add(1)).min(parties[vm].most)
    };
    let mut offers: Vec<_> = (0..parties.len()).map(|vm| (vm, next(vm))).collect();
    offers.sort_by(|&(a, to_a), &(b, to_b)| {
        let (a, b) = (parties[a].rho(to_a), parties[b].rho(to_b));
        b.total_cmp(&a)
    });
    for (vm, size) in offers {
        let left = total.saturating_sub(sum(&sizes));
        if size > sizes[vm] && u128::from(size - sizes[vm]) <= left {
            sizes[vm] = size;
        }
    }
    Ok(Solution {
        sizes,
        bound: None,
        best: false,
        search: None,
    })
}

fn party(problem: &Problem<'_>, vm: usize, idle_cost: f64, sampled: bool) -> Party {
    let (list, Vm { demand, grid, .. }) = (&problem.lists[vm], &problem.vms[vm]);
    let base = at_or_below(list, grid, demand.baseline.0);
    let active = if sampled {
        let idle_from = demand.current.scaled(1.0 - SAMPLING_ERROR);
        let used = demand.working_set.filter(|&used| used < idle_from);
        used.map(|used| used.0)
    } else {
        needed(&problem.vms[vm], base)
    };
    let (least, most) = (list[0].from, list[list.len() - 1].to);
    Party {
        funds: f64::from(demand.shares) * demand.baseline.0.max(1) as f64,
        active: active.map_or(f64::INFINITY, |pages| pages as f64),
        idle_cost,
        least,
        most: match active {
            Some(active) if active < base => base.max(least),
            _ => most,
        },
    }
}

/// The smallest size that misses no more than `base` does; `None` if a larger one misses less.
fn needed(vm: &Vm<'_>, base: u64) -> Option<u64> {
    let misses = vm.misses?;
    let expected = |size: u64| misses.expected(size);
    if expected(vm.all[vm.all.len() - 1].to) < 1.0 - ALIKE {
        return None;
    }
    // Not by the candidates: sizes that miss less than the bound needs are one.
    let size = misses.smallest_within(1.0 + ALIKE)?;
    (size <= vm.all[vm.all.len() - 1].to).then(|| at_or_above(&vm.all, &vm.grid, size).min(base))
}
