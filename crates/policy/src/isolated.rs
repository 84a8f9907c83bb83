//! Isolated sharing: minimises the geometric mean of relative misses while every VM keeps its loss bound.
//!
//! Each VM gets one of its candidate sizes, and the sum must fit. The searches differ in how they choose.
//!
//! Source: \[LS07\] §4.2 (docs/papers.md).

use crate::hull::Selection;
use crate::optimal::Budget;
use crate::policy::{Policy, PolicyOption, PolicyOptions, PolicyRow, Search};
use crate::problem::{Problem, Solution};
use crate::{PolicyError, annealing, exhaustive, greedy, hull, optimal, rule};

pub(crate) static ROW: PolicyRow = PolicyRow {
    name: "isolated",
    title: "isolated sharing",
    summary: "smallest geometric mean of relative misses with every VM within its max_loss",
    options: &[PolicyOption::Search],
    source: "[LS07] §4.2",
    from_working_sets: false,
    allocate,
};

/// Limits of [`Search::Auto`] for the exact search: some tens of milliseconds, and 20 MiB.
const AUTO: Budget = Budget {
    steps: 1 << 24,
    states: 1 << 18,
};

/// Limits of [`Search::Optimal`]: seconds, and 320 MiB.
const OPTIMAL: Budget = Budget {
    steps: 1 << 29,
    states: 1 << 22,
};

impl Policy {
    /// Isolated sharing with this search.
    pub const fn isolated(search: Search) -> Self {
        let options = PolicyOptions {
            search,
            ..PolicyOptions::DEFAULT
        };
        Self::new(&ROW, options)
    }
}

fn allocate(problem: &Problem<'_>, options: &PolicyOptions) -> Result<Solution, PolicyError> {
    let (lists, capacity, search) = (&problem.lists, problem.rules.total.0, options.search);
    let solution = |selection: &Selection, bound, best, search| Solution {
        sizes: problem.sizes(&selection.picks),
        bound,
        best,
        search: Some(search),
    };
    Ok(match search {
        Search::Exhaustive => {
            if lists.len() > exhaustive::VMS_MAX {
                return Err(PolicyError::TooMany {
                    vms: lists.len(),
                    most: exhaustive::VMS_MAX,
                });
            }
            if exhaustive::selections(lists) > exhaustive::SELECTIONS_MAX {
                let expected = "larger for this search, which tries every allocation";
                return Err(rule("the unit", &problem.rules.unit, expected));
            }
            let selection = exhaustive::search(lists, capacity);
            solution(&selection, Some(selection.cost), true, search)
        }
        Search::Greedy => Solution {
            sizes: greedy::search(lists, &problem.grids(), &problem.current(), capacity),
            bound: None,
            best: false,
            search: Some(search),
        },
        Search::Annealing { seed } => {
            let selection = annealing::search(lists, problem.picks(), capacity, seed);
            solution(&selection, None, false, search)
        }
        Search::Hull => {
            let relaxation = hull::relax(lists, capacity);
            let selection = hull::round(lists, &relaxation);
            solution(&selection, Some(relaxation.bound), false, search)
        }
        Search::Auto | Search::Optimal => {
            let relaxation = hull::relax(lists, capacity);
            let known = hull::round(lists, &relaxation);
            let budget = if search == Search::Auto {
                AUTO
            } else {
                OPTIMAL
            };
            let outcome = optimal::search(lists, &relaxation, known, budget);
            let search = match search {
                Search::Auto if !outcome.complete => Search::Hull,
                _ => Search::Optimal,
            };
            solution(
                &outcome.selection,
                Some(outcome.bound),
                outcome.complete,
                search,
            )
        }
    })
}
