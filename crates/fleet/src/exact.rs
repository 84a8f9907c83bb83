//! The best placement of a small fleet, by depth-first search with bounds.
//!
//! Items are placed one after another, the largest first, on their origins first. A branch ends if what is placed is already
//! as bad as the best placement found. Empty hosts of equal capacity that are no item's origin and in no rule are
//! interchangeable: only the first of them is tried.
//!
//! Cost: exponential; the number of steps is bounded, also of those that search whether a host may be lost, and beyond it nothing
//! is claimed.

use plimsoll_protocol::fleet::Goal;

use crate::load::{Load, Problem};
use crate::solution::{Aim, Solution, largest_first};

/// Hosts in use and bytes moved, in the order in which the goal counts them.
type Cost = (u64, u64);

struct Search<'p> {
    problem: &'p Problem<'p>,
    aim: Aim,
    order: Vec<usize>,
    /// Hosts that may stand for each other, by the number of the first.
    alike: Vec<usize>,
    best: Option<Solution>,
    best_cost: Option<Cost>,
    steps_left: u64,
}

/// Searches for a better whole placement than `known`. Returns it, if there is one, and whether the better of both is the best of
/// all, or there is no whole placement at all.
pub(crate) fn search(
    problem: &Problem<'_>,
    aim: Aim,
    known: &Solution,
    steps: u64,
) -> (Option<Solution>, bool) {
    let order = largest_first(problem, (0..problem.items.len()).collect());
    let mut search = Search {
        problem,
        aim,
        order,
        alike: alike(problem),
        best: None,
        best_cost: known.is_whole().then(|| cost(problem, aim, known)),
        steps_left: steps,
    };
    let mut load = problem.nowhere();
    let is_complete = search.descend(&mut load, 0, 0);
    (search.best, is_complete)
}

fn cost(problem: &Problem<'_>, aim: Aim, solution: &Solution) -> Cost {
    let hosts = match aim.goal {
        Goal::Fit => 0,
        Goal::FewestHosts => solution.hosts() as u64,
    };
    (hosts, solution.moved_bytes(problem))
}

/// For each host, the first that cannot be told from it; itself if it is anything's origin or rules name it.
fn alike(problem: &Problem<'_>) -> Vec<usize> {
    let hosts = &problem.fleet.hosts;
    let is_special = |host: usize| {
        let vms = problem.fleet.vms.iter();
        vms.map(|vm| vm.host).any(|origin| origin == host)
            || (0..problem.items.len()).any(|item| !problem.can_run_on(item, host))
    };
    let mut alike: Vec<usize> = Vec::new();
    for (host, own) in hosts.iter().enumerate() {
        let first = (0..host).find(|&other| {
            alike[other] == other && hosts[other].capacity == own.capacity && !is_special(other)
        });
        alike.push(first.filter(|_| !is_special(host)).unwrap_or(host));
    }
    alike
}

impl Search<'_> {
    /// Places the items from the `depth`-th on; false if the steps ran out.
    fn descend(&mut self, load: &mut Load, depth: usize, moved_bytes: u64) -> bool {
        let Some(left) = self.steps_left.checked_sub(1) else {
            return false;
        };
        self.steps_left = left;
        let at_least = match self.aim.goal {
            Goal::Fit => (0, moved_bytes),
            Goal::FewestHosts => (load.hosts_in_use() as u64, moved_bytes),
        };
        if self.best_cost.is_some_and(|best| at_least >= best) {
            return true;
        }
        let Some(&item) = self.order.get(depth) else {
            let steps = &mut self.steps_left;
            let solution = Solution::of(self.problem, load.clone(), self.aim, steps);
            let cost = cost(self.problem, self.aim, &solution);
            if solution.is_whole() && self.best_cost.is_none_or(|best| cost < best) {
                self.best_cost = Some(cost);
                self.best = Some(solution);
            }
            // Without steps, it may be better than was found.
            return self.steps_left > 0;
        };
        let origin = self.problem.items[item].origin;
        let others = (0..self.alike.len()).filter(|&host| host != origin);
        let mut tried_empty: Vec<usize> = Vec::new();
        for host in std::iter::once(origin).chain(others) {
            if !load.fits(self.problem, item, host) {
                continue;
            }
            if load.items_of[host].is_empty() {
                if tried_empty.contains(&self.alike[host]) {
                    continue;
                }
                tried_empty.push(self.alike[host]);
            }
            load.put(self.problem, item, host);
            let moved = moved_bytes + self.problem.moved_bytes(item, host);
            let is_complete = self.descend(load, depth + 1, moved);
            load.take(self.problem, item);
            if !is_complete {
                return false;
            }
        }
        true
    }
}
