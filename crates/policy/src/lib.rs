//! How a host's memory is divided among its VMs: curves in, targets out.
//!
//! All functions here are pure: the same demands and rules give the same targets on every machine, so that any
//! decision can be replayed from what was recorded of it.
//!
//! Isolated sharing (\[LS07\] §4.2) looks for the division with the least geometric mean of relative misses, that
//! is, the least sum of their logarithms: each VM picks one of its possible sizes, and together they must fit. A size is
//! possible within floor and ceiling if the upper edge of the misses there keeps the VM's promise, or if the VM is
//! entitled to it: no promise is broken by giving a VM its baseline, or its ceiling if that is less. Of divisions of one mean, one that moves
//! little memory is taken, and memory that serves nobody stays where it is, or spare.
#![forbid(unsafe_code)]

mod annealing;
mod choice;
mod esx;
mod exhaustive;
mod greedy;
mod ground;
mod hull;
mod optimal;
mod promise;
mod types;

use std::collections::HashSet;

use ground::{Decision, Ground};
use hull::Division;
use optimal::Budget;
use plimsoll_flow::PageCount;
pub use promise::{promise_size, relative};
pub use types::{
    Allocation, Demand, Held, Policy, PolicyError, Reason, Relative, Rules, Search, Target,
};

/// The most memory that is divided, in pages: beyond, a float is no longer exact.
const TOTAL_MAX: PageCount = PageCount(1 << 52);

/// What [`Search::Auto`] may spend on the optimum: some tens of milliseconds, and 20 MiB.
const AUTO: Budget = Budget {
    steps: 1 << 24,
    states: 1 << 18,
};

/// What [`Search::Optimal`] may: seconds, and 320 MiB.
const OPTIMAL: Budget = Budget {
    steps: 1 << 29,
    states: 1 << 22,
};

/// Divides the host's memory.
///
/// # Errors
///
/// Every [`PolicyError`]; nothing was decided.
pub fn allocate(
    demands: &[Demand],
    rules: &Rules,
    policy: Policy,
) -> Result<Allocation, PolicyError> {
    check(demands, rules, policy)?;
    let sampled = matches!(policy, Policy::EsxSampling { .. });
    let ground = Ground::new(demands, rules, sampled)?;
    let decision = match policy {
        Policy::Isolated(search) => isolated(&ground, search)?,
        Policy::Esx { idle_tax } | Policy::EsxSampling { idle_tax } => {
            esx::divide(&ground, idle_tax, sampled)
        }
    };
    Ok(ground.allocation(decision))
}

/// Looks for the division with the least geometric mean.
fn isolated(ground: &Ground<'_>, search: Search) -> Result<Decision, PolicyError> {
    let (lists, capacity) = (&ground.lists, ground.rules.total.0);
    let decided = |division: &Division, bound, best, search| Decision {
        sizes: ground.sizes(&division.picks),
        bound,
        best,
        search: Some(search),
    };
    Ok(match search {
        Search::Exhaustive => {
            if exhaustive::divisions(lists) > exhaustive::DIVISIONS_MAX {
                let expected = "one that leaves each VM fewer sizes, for every division is tried";
                return Err(rule("a unit", &ground.rules.unit, expected));
            }
            let division = exhaustive::search(lists, capacity);
            decided(&division, Some(division.cost), true, search)
        }
        Search::Greedy => Decision {
            sizes: greedy::search(lists, &ground.grids(), &ground.current(), capacity),
            bound: None,
            best: false,
            search: Some(search),
        },
        Search::Annealing { seed } => {
            let division = annealing::search(lists, ground.picks(), capacity, seed);
            decided(&division, None, false, search)
        }
        Search::Hull => {
            let relaxation = hull::relax(lists, capacity);
            let division = hull::round(lists, &relaxation);
            decided(&division, Some(relaxation.bound), false, search)
        }
        Search::Auto | Search::Optimal => {
            let relaxation = hull::relax(lists, capacity);
            let known = hull::round(lists, &relaxation);
            let budget = if search == Search::Auto {
                AUTO
            } else {
                OPTIMAL
            };
            let found = optimal::search(lists, &relaxation, known, budget);
            let search = match search {
                Search::Auto if !found.complete => Search::Hull,
                _ => Search::Optimal,
            };
            decided(&found.division, Some(found.bound), found.complete, search)
        }
    })
}

fn rule(what: &str, value: &impl ToString, expected: &'static str) -> PolicyError {
    PolicyError::Rule {
        what: what.into(),
        value: value.to_string(),
        expected,
    }
}

/// Refuses numbers that mean nothing.
fn check(demands: &[Demand], rules: &Rules, policy: Policy) -> Result<(), PolicyError> {
    let one = "1 page or more";
    let share = "0.0 or more, and finite";
    if rules.total.0 == 0 || rules.total > TOTAL_MAX {
        return Err(rule("a total", &rules.total, "1 to 2^52 pages"));
    }
    if rules.unit.0 == 0 {
        return Err(rule("a unit", &rules.unit, one));
    }
    if let Some(step) = rules.step.filter(|&step| step < rules.unit) {
        return Err(rule("a step", &step, "a unit or more"));
    }
    // Written so that a NaN fails, here and below.
    if !(rules.gain_min >= 0.0 && rules.gain_min.is_finite()) {
        return Err(rule("a least gain", &rules.gain_min, share));
    }
    if !(rules.miss_ratio_min > 0.0 && rules.miss_ratio_min <= 1.0) {
        let expected = "above 0.0, at most 1.0";
        return Err(rule("a least miss ratio", &rules.miss_ratio_min, expected));
    }
    if let Policy::Esx { idle_tax } | Policy::EsxSampling { idle_tax } = policy
        && !(0.0..=1.0).contains(&idle_tax)
    {
        return Err(rule("an idle memory tax", &idle_tax, "0.0 to 1.0"));
    }
    let mut seen = HashSet::new();
    for demand in demands {
        let vm = &demand.vm;
        if !seen.insert(vm) {
            return Err(PolicyError::Twice(vm.clone()));
        }
        if !(demand.max_loss >= 0.0 && demand.max_loss.is_finite()) {
            let what = format!("VM {vm}: a most loss");
            return Err(rule(&what, &demand.max_loss, share));
        }
        if demand.shares == 0 {
            return Err(rule(
                &format!("VM {vm}: shares"),
                &demand.shares,
                "1 or more",
            ));
        }
        if demand.floor > demand.ceiling {
            let what = format!("VM {vm}: a floor");
            return Err(rule(&what, &demand.floor, "its ceiling at most"));
        }
    }
    if policy == Policy::Isolated(Search::Exhaustive) && demands.len() > exhaustive::VMS_MAX {
        return Err(PolicyError::TooMany {
            vms: demands.len(),
            most: exhaustive::VMS_MAX,
        });
    }
    Ok(())
}
