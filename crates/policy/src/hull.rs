//! The allocation on the curves' convex minorants, with a bound on its distance from the optimum.
//!
//! If every VM's candidates were convex, a price of memory would determine the optimum: each VM takes the memory that
//! is worth its price, and the price is right when all memory is taken. On the lower convex hulls of the candidates
//! this yields a lower bound on the cost of every allocation (the Lagrangian relaxation), and an allocation that leaves
//! a little memory over. The remaining memory goes to the steps that reduce the cost most.
//!
//! Cost: one pass over the candidates, and `O(log)` per VM for each of some dozens of prices.

use crate::candidate::Candidate;

/// Maximum number of prices tried; each halves the interval of possible prices.
const PRICES_MAX: usize = 64;

/// Maximum number of rounds of spending the remaining memory.
const ROUNDS_MAX: usize = 64;

/// Solution of the relaxed problem.
#[derive(Debug)]
pub(crate) struct Relaxation {
    /// Each VM's candidate at the price: an optimal allocation of the memory that these candidates need.
    pub(crate) picks: Vec<usize>,
    /// Price of a page, in the logarithm of misses; 0.0 when memory is not scarce.
    pub(crate) price: f64,
    /// Pages that the picks leave over.
    pub(crate) slack: u64,
    /// Lower bound on the cost of every allocation.
    pub(crate) bound: f64,
    /// The next step on a hull, which did not fit: the VM and its candidate.
    next: Option<(usize, usize)>,
}

/// An allocation that fits.
#[derive(Debug, Clone)]
pub(crate) struct Selection {
    /// Each VM's candidate.
    pub(crate) picks: Vec<usize>,
    /// Sum of their costs.
    pub(crate) cost: f64,
}

impl Selection {
    pub(crate) fn new(lists: &[Vec<Candidate>], picks: Vec<usize>) -> Self {
        let cost = cost_of(lists, &picks);
        Self { picks, cost }
    }
}

/// Sum of the costs of `picks`.
pub(crate) fn cost_of(lists: &[Vec<Candidate>], picks: &[usize]) -> f64 {
    let costs = lists.iter().zip(picks).map(|(list, &at)| list[at].cost);
    costs.sum()
}

/// Pages that `picks` need at least; they fit into a `u64` if they are within the host's total.
pub(crate) fn pages_of(lists: &[Vec<Candidate>], picks: &[usize]) -> u64 {
    lists
        .iter()
        .zip(picks)
        .map(|(list, &at)| list[at].from)
        .sum()
}

/// The lower convex hulls of all VMs, concatenated.
struct Hulls {
    /// Start of each VM's hull; one more at the end.
    starts: Vec<usize>,
    /// The candidates on the hulls.
    corners: Vec<usize>,
    /// Fall of the cost per page on the way to each corner; infinite for a VM's first.
    steepness: Vec<f64>,
}

impl Hulls {
    fn new(lists: &[Vec<Candidate>]) -> Self {
        let mut hulls = Self {
            starts: vec![0],
            corners: Vec::new(),
            steepness: Vec::new(),
        };
        for list in lists {
            let start = hulls.corners.len();
            for (at, candidate) in list.iter().enumerate() {
                let steepness = loop {
                    if hulls.corners.len() == start {
                        break f64::INFINITY;
                    }
                    let last = hulls.corners.len() - 1;
                    let steepness = steepness(&list[hulls.corners[last]], candidate);
                    if steepness < hulls.steepness[last] {
                        break steepness;
                    }
                    hulls.corners.pop();
                    hulls.steepness.pop();
                };
                hulls.corners.push(at);
                hulls.steepness.push(steepness);
            }
            hulls.starts.push(hulls.corners.len());
        }
        hulls
    }

    fn vms(&self) -> usize {
        self.starts.len() - 1
    }

    /// The corner of each VM at `price`: the last one that is reached by steps steeper than the price.
    fn stand(&self, price: f64, stand: &mut [usize]) {
        for (vm, stand) in stand.iter_mut().enumerate() {
            let (start, end) = (self.starts[vm], self.starts[vm + 1]);
            let steps = &self.steepness[start + 1..end];
            *stand = start + steps.partition_point(|&steepness| steepness > price);
        }
    }
}

/// Fall of the cost per page between two candidates.
fn steepness(before: &Candidate, after: &Candidate) -> f64 {
    (before.cost - after.cost) / (after.from - before.from) as f64
}

/// Solves the relaxed problem. The smallest candidates of all must fit.
pub(crate) fn relax(lists: &[Vec<Candidate>], capacity: u64) -> Relaxation {
    let hulls = Hulls::new(lists);
    let pages = |stand: &[usize]| -> u128 {
        let sizes = stand
            .iter()
            .zip(lists)
            .map(|(&corner, list)| u128::from(list[hulls.corners[corner]].from));
        sizes.sum()
    };
    let mut dear = hulls.starts[..hulls.vms()].to_vec();
    let mut cheap: Vec<_> = hulls.starts[1..].iter().map(|end| end - 1).collect();
    let mut price = 0.0;
    let mut next = None;
    if pages(&cheap) <= u128::from(capacity) {
        dear = cheap;
    } else {
        let steps = hulls.steepness.iter().copied();
        let (mut low, mut high) = (
            0.0,
            steps.filter(|step| step.is_finite()).fold(0.0, f64::max),
        );
        let mut stand = dear.clone();
        for _ in 0..PRICES_MAX {
            let between: usize = cheap
                .iter()
                .zip(&dear)
                .map(|(cheap, dear)| cheap - dear)
                .sum();
            let middle = f64::midpoint(low, high);
            if between <= hulls.vms() || middle <= low || middle >= high {
                break;
            }
            hulls.stand(middle, &mut stand);
            if pages(&stand) <= u128::from(capacity) {
                high = middle;
                dear.copy_from_slice(&stand);
            } else {
                low = middle;
                cheap.copy_from_slice(&stand);
            }
        }
        // The last steps, steepest first, until one does not fit; that step determines the price.
        let mut steps: Vec<_> = (0..hulls.vms())
            .flat_map(|vm| (dear[vm] + 1..=cheap[vm]).map(move |corner| (vm, corner)))
            .collect();
        steps.sort_by(|one, other| {
            let steeper = hulls.steepness[other.1].total_cmp(&hulls.steepness[one.1]);
            steeper.then(one.cmp(other))
        });
        let mut left = u128::from(capacity) - pages(&dear);
        for (vm, corner) in steps {
            let (before, after) = (hulls.corners[corner - 1], hulls.corners[corner]);
            let more = u128::from(lists[vm][after].from - lists[vm][before].from);
            if more > left {
                price = hulls.steepness[corner];
                next = Some((vm, after));
                break;
            }
            left -= more;
            dear[vm] = corner;
        }
    }
    let picks: Vec<_> = dear.iter().map(|&corner| hulls.corners[corner]).collect();
    let slack = capacity - pages_of(lists, &picks);
    Relaxation {
        bound: cost_of(lists, &picks) - price * slack as f64,
        picks,
        price,
        slack,
        next,
    }
}

/// An allocation derived from the relaxed one.
pub(crate) fn round(lists: &[Vec<Candidate>], relaxation: &Relaxation) -> Selection {
    let mut best = Selection::new(lists, relaxation.picks.clone());
    spend(lists, &mut best, relaxation.slack);
    // Alternatively, take the step that did not fit, and take the missing memory from the VM that loses least.
    let Some((vm, after)) = relaxation.next else {
        return best;
    };
    let mut other = Selection::new(lists, relaxation.picks.clone());
    let more = lists[vm][after].from - lists[vm][other.picks[vm]].from;
    let missing = more - relaxation.slack;
    let payers = (0..lists.len()).filter(|&payer| payer != vm);
    let ways = payers.filter_map(|payer| {
        let now = &lists[payer][other.picks[payer]];
        let left = now.from.checked_sub(missing)?;
        let to = largest_within(&lists[payer], left)?;
        Some((lists[payer][to].cost - now.cost, payer, to))
    });
    let least = ways.min_by(|one, other| one.0.total_cmp(&other.0));
    if let Some((_, payer, to)) = least {
        let freed = lists[payer][other.picks[payer]].from - lists[payer][to].from;
        other.picks[vm] = after;
        other.picks[payer] = to;
        other.cost = cost_of(lists, &other.picks);
        spend(lists, &mut other, freed - missing);
        if other.cost < best.cost {
            best = other;
        }
    }
    best
}

/// The last candidate that needs at most `pages`.
pub(crate) fn largest_within(list: &[Candidate], pages: u64) -> Option<usize> {
    list.partition_point(|candidate| candidate.from <= pages)
        .checked_sub(1)
}

/// Spends the remaining memory on the steps that reduce the cost most, for some rounds.
pub(crate) fn spend(lists: &[Vec<Candidate>], selection: &mut Selection, mut slack: u64) {
    for _ in 0..ROUNDS_MAX {
        let ways = lists.iter().zip(&selection.picks).enumerate();
        let ways = ways.filter_map(|(vm, (list, &at))| {
            let to = largest_within(list, list[at].from.saturating_add(slack))?;
            (to > at).then(|| (list[at].cost - list[to].cost, vm, to))
        });
        let Some((_, vm, to)) = ways.max_by(|one, other| one.0.total_cmp(&other.0)) else {
            break;
        };
        slack -= lists[vm][to].from - lists[vm][selection.picks[vm]].from;
        selection.picks[vm] = to;
    }
    selection.cost = cost_of(lists, &selection.picks);
}
