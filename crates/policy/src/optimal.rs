//! The exact optimum, by dynamic programming around the relaxed solution.
//!
//! At the price of the relaxation ([`hull`](crate::hull)) every candidate has a loss: the difference from its VM's best
//! cost at that price. The cost of an allocation is the relaxation's bound plus the losses of its candidates plus the
//! price of the memory it leaves over. A search for allocations within some distance of the bound may therefore omit
//! every candidate whose loss alone exceeds the distance, which leaves few. The distance starts small and grows
//! fourfold until an allocation is found within it, which is the optimum, or until it reaches the best known
//! allocation, which then is the optimum.
//!
//! The dynamic program processes the VMs in turn and keeps, for each amount of memory taken so far, the lowest cost. A
//! state that takes more memory at no lower cost than another is dropped, and so is one that cannot end within the
//! distance. VMs with few, large candidates come first, those with fine-grained ones last.
//!
//! Source: \[Pisinger95\], except that the core is widened by the loss instead of one VM at a time.
//! Cost: depends on the gap between hull and curves, not on the memory size: two candidates per VM where curves are
//! smooth, and up to all candidates times all sizes where all curves are cliffs. [`Budget`] bounds it.

use crate::candidate::Candidate;
use crate::hull::{Relaxation, Selection, cost_of};

/// Differences below this are rounding errors.
const ROUNDING: f64 = 1e-11;

/// The first distance, as a share of the best known allocation's distance.
const FIRST: f64 = 1.0 / 65_536.0;

/// Factor by which the distance grows.
const GROWTH: f64 = 4.0;

/// Limits of the search.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// Partial allocations examined.
    pub(crate) steps: u64,
    /// Partial allocations stored: 8 bytes each, and up to 72 more for those of the newest VM.
    pub(crate) states: usize,
}

/// The result of a search.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) selection: Selection,
    /// Lower bound on the cost of every allocation; the allocation's own cost if it is the optimum.
    pub(crate) bound: f64,
    /// Whether the search was completed.
    pub(crate) complete: bool,
}

/// A candidate relative to its VM's best at the price.
#[derive(Debug, Clone, Copy)]
struct Alternative {
    candidate: u32,
    /// Pages in addition to the best's.
    pages: i64,
    /// Cost minus the best's.
    cost: f64,
    loss: f64,
}

/// A VM with more than one remaining candidate.
struct Core {
    vm: usize,
    ways: Vec<Alternative>,
}

/// Partial allocations of the same first VMs, rising in pages and falling in cost.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    pages: i64,
    cost: f64,
    from: u32,
    way: u32,
}

/// Searches for the optimum, given the relaxed solution and the best known allocation.
pub(crate) fn search(
    lists: &[Vec<Candidate>],
    relaxation: &Relaxation,
    known: Selection,
    budget: Budget,
) -> Outcome {
    let distance = known.cost - relaxation.bound;
    if distance <= ROUNDING {
        return Outcome {
            bound: known.cost,
            selection: known,
            complete: true,
        };
    }
    let cores = cores(lists, relaxation, distance);
    let mut steps = budget.steps;
    let mut excluded = 0.0;
    let mut within = (distance * FIRST).max(ROUNDING);
    loop {
        within = within.min(distance);
        let slack = i64::try_from(relaxation.slack).unwrap_or(i64::MAX);
        let mut search = Search {
            price: relaxation.price,
            slack,
            within: within + ROUNDING,
            steps,
            states: budget.states,
        };
        let Some(found) = search.run(&cores) else {
            return Outcome {
                selection: known,
                bound: relaxation.bound + excluded,
                complete: false,
            };
        };
        steps = search.steps;
        if let Some(ways) = found {
            let mut picks = relaxation.picks.clone();
            for (vm, candidate) in ways {
                picks[vm] = candidate;
            }
            let cost = cost_of(lists, &picks);
            let selection = if cost < known.cost {
                Selection { picks, cost }
            } else {
                known
            };
            return Outcome {
                bound: selection.cost,
                selection,
                complete: true,
            };
        }
        if within >= distance {
            // The search missed the known allocation only because of rounding.
            return Outcome {
                bound: known.cost,
                selection: known,
                complete: true,
            };
        }
        excluded = within;
        within *= GROWTH;
    }
}

/// The candidates that lose at most `distance`, of VMs that have more than one.
fn cores(lists: &[Vec<Candidate>], relaxation: &Relaxation, distance: f64) -> Vec<Core> {
    let picked = lists.iter().zip(&relaxation.picks).enumerate();
    let cores = picked.map(|(vm, (list, &at))| {
        let best = list[at];
        let ways = list.iter().enumerate().filter_map(|(candidate, option)| {
            let pages = signed(option.from) - signed(best.from);
            let cost = option.cost - best.cost;
            let loss = (cost + relaxation.price * pages as f64).max(0.0);
            (loss <= distance + ROUNDING).then(|| Alternative {
                candidate: u32::try_from(candidate).unwrap_or(u32::MAX),
                pages,
                cost,
                loss,
            })
        });
        Core {
            vm,
            ways: ways.collect(),
        }
    });
    cores.filter(|core| core.ways.len() > 1).collect()
}

fn signed(pages: u64) -> i64 {
    i64::try_from(pages).unwrap_or(i64::MAX)
}

/// One pass within one distance of the bound.
struct Search {
    price: f64,
    slack: i64,
    within: f64,
    steps: u64,
    states: usize,
}

impl Search {
    /// The best allocation within the distance, as (VM, candidate) for those that differ from the relaxed solution; an
    /// empty result if there is none; `None` if the budget is used up.
    #[expect(
        clippy::option_option,
        reason = "no answer, and the answer that there is none"
    )]
    fn run(&mut self, cores: &[Core]) -> Option<Option<Vec<(usize, usize)>>> {
        let mut stages: Vec<Core> = cores
            .iter()
            .map(|core| {
                let ways = core.ways.iter().filter(|way| way.loss <= self.within);
                Core {
                    vm: core.vm,
                    ways: ways.copied().collect(),
                }
            })
            .filter(|core| core.ways.len() > 1)
            .collect();
        // Coarse ones first.
        let grain = |core: &Core| {
            let steps = core.ways.windows(2).map(|two| two[1].pages - two[0].pages);
            steps.min().unwrap_or(0)
        };
        stages.sort_by_cached_key(|core| (std::cmp::Reverse(grain(core)), core.vm));
        // Minimum and maximum number of pages that the stages from each on can add.
        let mut rest = vec![(0_i64, 0_i64); stages.len() + 1];
        for (at, stage) in stages.iter().enumerate().rev() {
            let (least, most) = rest[at + 1];
            let (first, last) = (stage.ways[0].pages, stage.ways[stage.ways.len() - 1].pages);
            rest[at] = (least.saturating_add(first), most.saturating_add(last));
        }
        let mut states = vec![State::default()];
        let mut trail: Vec<Vec<(u32, u32)>> = Vec::with_capacity(stages.len());
        let mut remembered = 0_usize;
        let mut spare = Vec::new();
        for (at, stage) in stages.iter().enumerate() {
            let mut merged: Vec<State> = Vec::new();
            for (way, option) in stage.ways.iter().enumerate() {
                let looked = states.len() + merged.len();
                self.steps = self.steps.checked_sub(looked as u64)?;
                self.merge(&states, option, way, rest[at + 1], &merged, &mut spare);
                std::mem::swap(&mut merged, &mut spare);
                if remembered + merged.len() > self.states {
                    return None;
                }
            }
            remembered += merged.len();
            trail.push(merged.iter().map(|state| (state.from, state.way)).collect());
            states = merged;
        }
        // The last is the cheapest.
        let Some(last) = states.len().checked_sub(1) else {
            return Some(None);
        };
        if states[last].cost + self.price * self.slack as f64 > self.within {
            return Some(None);
        }
        let mut at = last;
        let mut ways = Vec::with_capacity(stages.len());
        for (stage, trail) in stages.iter().zip(&trail).rev() {
            let (from, way) = trail[at];
            ways.push((stage.vm, stage.ways[way as usize].candidate as usize));
            at = from as usize;
        }
        Some(Some(ways))
    }

    /// Merges `merged` and the `states` that go `way` into `into`. Omits states that take more pages without a lower
    /// cost and those that cannot end within the distance when the VMs that follow add `rest`.
    fn merge(
        &self,
        states: &[State],
        option: &Alternative,
        way: usize,
        rest: (i64, i64),
        merged: &[State],
        into: &mut Vec<State>,
    ) {
        into.clear();
        let way = u32::try_from(way).unwrap_or(u32::MAX);
        let most = self.slack.saturating_sub(rest.0);
        // Below this, memory is left over in any case.
        let full = self.slack.saturating_sub(rest.1);
        let mut others = merged.iter().peekable();
        let mut least = f64::INFINITY;
        for (from, state) in states.iter().enumerate() {
            let (pages, cost) = (state.pages + option.pages, state.cost + option.cost);
            if pages > most {
                break;
            }
            if cost + self.price * pages.max(full) as f64 > self.within {
                continue;
            }
            while let Some(other) = others.next_if(|other| {
                other.pages < pages || (other.pages == pages && other.cost <= cost)
            }) {
                if other.cost < least {
                    least = other.cost;
                    into.push(*other);
                }
            }
            if cost < least {
                least = cost;
                let from = u32::try_from(from).unwrap_or(u32::MAX);
                into.push(State {
                    pages,
                    cost,
                    from,
                    way,
                });
            }
        }
        for other in others {
            if other.cost < least {
                least = other.cost;
                into.push(*other);
            }
        }
    }
}
