//! Allocates a host's memory among its VMs: curves in, target sizes out.
//!
//! All functions here are pure: the same demands and rules give the same targets on every machine, so a decision can be
//! replayed from its recorded inputs.
//!
//! | module | content |
//! |---|---|
//! | [`registry`] | the policies by name |
//! | [`policy`] | a policy with its options |
//! | `isolated` | isolated sharing (\[LS07\] §4.2) and its searches: `exhaustive`, `greedy`, `annealing`, `optimal`, `hull` |
//! | `esx` | the policy of VMware ESX |
//! | `problem`, `candidate` | the sizes that limits and bounds leave each VM, which every policy chooses from |
//!
//! A size is possible within floor and ceiling if the curve resolves it and the upper limit of its band there keeps the
//! VM's [`Bound`], or if the VM is entitled to the size: giving a VM its baseline, or its ceiling if that is less, breaks no bound.
//! Among allocations of equal mean, one that moves little memory is chosen. Memory that no VM needs stays with its
//! owner, or unallocated.
#![forbid(unsafe_code)]

mod annealing;
mod bound;
mod candidate;
mod esx;
mod exhaustive;
mod greedy;
mod hull;
mod isolated;
#[cfg(feature = "serde")]
mod json;
mod optimal;
pub mod policy;
mod problem;
pub mod registry;
mod types;

use std::collections::HashSet;

pub use bound::{promise_size, relative};
use plimsoll_flow::PageCount;
pub use policy::{Policy, PolicyOption, PolicyOptions, PolicyRow, Search};
use problem::Problem;
pub use registry::{GivenOptions, POLICIES};
pub use types::{
    Allocation, Bound, Demand, PolicyError, Prediction, PredictionUnit, Reason, Relative, Rules,
    Suppression, Target,
};

/// Limit on the total, in pages: larger numbers are not exact in floating point.
const TOTAL_MAX: PageCount = PageCount(1 << 52);

/// Allocates the host's memory.
///
/// # Errors
///
/// Every [`PolicyError`]; nothing was decided.
pub fn allocate(
    demands: &[Demand],
    rules: &Rules,
    policy: Policy,
) -> Result<Allocation, PolicyError> {
    check(demands, rules)?;
    let problem = Problem::new(demands, rules, policy.row.from_working_sets)?;
    let solution = (policy.row.allocate)(&problem, &policy.options)?;
    problem.check_kept(&solution.sizes)?;
    Ok(problem.allocation(solution))
}

fn rule(what: &str, value: &impl ToString, expected: &'static str) -> PolicyError {
    PolicyError::Rule {
        what: what.into(),
        value: value.to_string(),
        expected,
    }
}

/// A size with its unit.
fn pages(size: PageCount) -> String {
    format!("{size} pages")
}

/// Checks that every number is within its range.
fn check(demands: &[Demand], rules: &Rules) -> Result<(), PolicyError> {
    let one = "at least 1 page";
    let share = "finite and at least 0";
    if rules.total.0 == 0 || rules.total > TOTAL_MAX {
        return Err(rule("the total", &rules.total, "between 1 and 2^52 pages"));
    }
    if rules.unit.0 == 0 {
        return Err(rule("the unit", &rules.unit, one));
    }
    if let Some(step) = rules.step.filter(|&step| step < rules.unit) {
        return Err(rule("the step", &pages(step), "at least one unit"));
    }
    // Written so that a NaN fails, here and below.
    if !(rules.gain_min >= 0.0 && rules.gain_min.is_finite()) {
        return Err(rule("gain_min", &rules.gain_min, share));
    }
    if !(rules.miss_ratio_min > 0.0 && rules.miss_ratio_min <= 1.0) {
        let expected = "above 0 and at most 1";
        return Err(rule("miss_ratio_min", &rules.miss_ratio_min, expected));
    }
    let mut seen = HashSet::new();
    for demand in demands {
        let vm = &demand.vm;
        if !seen.insert(vm) {
            return Err(PolicyError::Twice(vm.clone()));
        }
        let bounds = [
            ("max_loss", demand.bound.max_loss),
            ("max_misses_per_second", demand.bound.max_misses_per_second),
        ];
        for (name, bound) in bounds {
            if let Some(bound) = bound.filter(|bound| !(*bound >= 0.0 && bound.is_finite())) {
                return Err(rule(&format!("{name} of VM {vm}"), &bound, share));
            }
        }
        if demand.shares == 0 {
            return Err(rule(
                &format!("shares of VM {vm}"),
                &demand.shares,
                "at least 1",
            ));
        }
        if demand.floor > demand.ceiling {
            let what = format!("the minimum size of VM {vm}");
            return Err(rule(
                &what,
                &pages(demand.floor),
                "at most its maximum size",
            ));
        }
    }
    Ok(())
}
