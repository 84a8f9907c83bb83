//! The best allocation, exactly, by dynamic programming around the relaxed one.
//!
//! At the price of the relaxation ([`hull`](crate::hull)) every candidate has a loss: by how much it is worse than its
//! VM's best at that price. An allocation costs the relaxation's bound and the losses of its candidates and the price of the
//! memory it leaves. So whoever looks for allocations within some distance of the bound may leave out every candidate that
//! alone loses more, and that leaves few. The distance begins small and grows fourfold until an allocation is found within
//! it, which then is the best of all, or until it reaches the best known allocation, which then is.
//!
//! The programme itself goes VM by VM and keeps, for each amount of memory taken so far, the least cost; who takes more
//! memory at no less cost than another is dropped, and so is who cannot end within the distance. VMs with few coarse
//! candidates come first, those that can take any amount last.
//!
//! Source: \[Pisinger95\], whose core it widens by the loss instead of a VM at a time.
//! Cost: by the gap between hull and curves, not by the size: two candidates a VM where curves are smooth, and up to
//! all candidates times all sizes where all curves are cliffs. [`Budget`] bounds it.

use crate::candidate::Candidate;
use crate::hull::{Relaxation, Selection, cost_of};

/// Differences below this are rounding.
const ROUNDING: f64 = 1e-11;

/// The first distance, as a share of that of the best known allocation.
const FIRST: f64 = 1.0 / 65_536.0;

/// The distance grows by this.
const GROWTH: f64 = 4.0;

/// How much the search may do before it gives up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// Partial allocations examined.
    pub(crate) steps: u64,
    /// Partial allocations kept: 8 bytes each, and up to 72 more for those of the newest VM.
    pub(crate) states: usize,
}

/// The result of a search.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) selection: Selection,
    /// No allocation costs less: that of the allocation itself if it is the best.
    pub(crate) bound: f64,
    /// Whether the search came to its end.
    pub(crate) complete: bool,
}

/// A candidate beside its VM's best at the price.
#[derive(Debug, Clone, Copy)]
struct Way {
    candidate: u32,
    /// Pages more than the best.
    pages: i64,
    /// Cost beside the best's.
    cost: f64,
    loss: f64,
}

/// A VM that has more than one way.
struct Core {
    vm: usize,
    ways: Vec<Way>,
}

/// Partial allocations of the same first VMs, rising in pages and falling in cost.
#[derive(Debug, Clone, Copy)]
struct State {
    pages: i64,
    cost: f64,
    from: u32,
    way: u32,
}

/// Looks for the best allocation, given the relaxed one and the best that is known.
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
            // Rounding alone hid the known allocation from the search.
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
            (loss <= distance + ROUNDING).then(|| Way {
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

/// One pass within a distance of the bound.
struct Search {
    price: f64,
    slack: i64,
    within: f64,
    steps: u64,
    states: usize,
}

impl Search {
    /// The best allocation within the distance as (VM, candidate) of those that differ from the relaxed one, if there is
    /// one; `None` if the budget is used up.
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
        // Least and most pages that the stages from each on can add.
        let mut rest = vec![(0_i64, 0_i64); stages.len() + 1];
        for (at, stage) in stages.iter().enumerate().rev() {
            let (least, most) = rest[at + 1];
            let (first, last) = (stage.ways[0].pages, stage.ways[stage.ways.len() - 1].pages);
            rest[at] = (least.saturating_add(first), most.saturating_add(last));
        }
        let mut states = vec![State {
            pages: 0,
            cost: 0.0,
            from: 0,
            way: 0,
        }];
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

    /// Merges `merged` and the `states` that go `way` into `into`, and leaves out who is no better for more pages and
    /// who cannot end within the distance when the VMs that follow add `rest`.
    fn merge(
        &self,
        states: &[State],
        option: &Way,
        way: usize,
        rest: (i64, i64),
        merged: &[State],
        into: &mut Vec<State>,
    ) {
        into.clear();
        let way = u32::try_from(way).unwrap_or(u32::MAX);
        let most = self.slack.saturating_sub(rest.0);
        // Below this, memory is left in any case.
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
