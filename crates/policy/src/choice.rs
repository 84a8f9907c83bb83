//! The sizes that a VM may be given, and what each costs.
//!
//! Only the steps of a curve matter: of all sizes at which a VM misses alike, the search needs the smallest. A
//! [`Choice`] is such a run of sizes. A VM's choices rise in size and fall in cost, so a division is good exactly
//! when it picks well among them, and memory that the picks leave over goes back to where it was.

use std::ops::RangeInclusive;

use plimsoll_flow::{MissRatioCurve, PageCount};

use crate::{Demand, Relative, Rules};

/// What moving all the host's memory costs, in the logarithm of misses: nothing beside any gain, yet
/// enough that of equal divisions a near one is taken.
pub(crate) const MOVE_COST: f64 = 1e-8;

/// Sizes at which a VM misses alike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Choice {
    /// The smallest, in pages; on the grid.
    pub(crate) from: u64,
    /// The largest; on the grid.
    pub(crate) to: u64,
    /// Logarithm of the misses over those at the baseline, and what the way there costs.
    pub(crate) cost: f64,
}

/// The sizes on which a VM's may end: multiples of the unit, and its own marks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    unit: u64,
    marks: [u64; 4],
}

impl Grid {
    pub(crate) fn new(demand: &Demand, unit: PageCount) -> Self {
        let mut marks = [
            demand.floor.0,
            demand.ceiling.0,
            demand.current.0,
            demand.baseline.0,
        ];
        marks.sort_unstable();
        Self {
            unit: unit.0,
            marks,
        }
    }

    /// The smallest size on the grid that is `size` or above; the largest number if there is none.
    pub(crate) fn at_or_above(&self, size: u64) -> u64 {
        let multiple = size.checked_next_multiple_of(self.unit);
        let mark = self.marks.iter().copied().find(|&mark| mark >= size);
        let multiple = multiple.unwrap_or(u64::MAX);
        mark.map_or(multiple, |mark| mark.min(multiple))
    }

    /// The largest size on the grid that is `size` or below.
    pub(crate) fn at_or_below(&self, size: u64) -> u64 {
        let multiple = size - size % self.unit;
        let mark = self.marks.iter().rev().copied().find(|&mark| mark <= size);
        mark.map_or(multiple, |mark| mark.max(multiple))
    }
}

/// What a VM misses at a size, beside its baseline.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Misses<'a> {
    curve: &'a MissRatioCurve,
    least: f64,
    baseline: f64,
}

impl<'a> Misses<'a> {
    pub(crate) fn new(curve: &'a MissRatioCurve, baseline: PageCount, rules: &Rules) -> Self {
        let least = rules.miss_ratio_min;
        Self {
            curve,
            least,
            baseline: curve.miss_ratio(baseline).max(least),
        }
    }

    pub(crate) fn relative(&self, size: u64) -> Relative {
        let point = self.curve.at(PageCount(size));
        Relative {
            expected: self.over_baseline(point.miss_ratio),
            low: self.over_baseline(point.low),
            high: self.over_baseline(point.high),
        }
    }

    fn over_baseline(&self, ratio: f64) -> f64 {
        ratio.max(self.least) / self.baseline
    }

    /// The curve's steps within `range`: first and last size, miss ratio, upper edge.
    fn steps(
        &self,
        range: &RangeInclusive<u64>,
    ) -> impl Iterator<Item = (RangeInclusive<u64>, f64, f64)> {
        let (low, high) = (*range.start(), *range.end());
        let points = self.curve.points();
        let first = points.partition_point(|point| point.size.0 <= low);
        let steps = (first..=points.len()).map(move |after| {
            let before = after.checked_sub(1).map(|at| points[at]);
            let from = before.map_or(0, |point| point.size.0).max(low);
            let to = points.get(after).map_or(u64::MAX, |next| next.size.0 - 1);
            let (ratio, edge) = before.map_or((1.0, 1.0), |point| (point.miss_ratio, point.high));
            (from..=to.min(high), ratio, edge)
        });
        steps.take_while(move |(sizes, ..)| *sizes.start() <= high)
    }
}

/// Least and most that a VM may be given whatever its misses.
pub(crate) fn limits(demand: &Demand, rules: &Rules) -> RangeInclusive<u64> {
    let most = demand.ceiling.0.min(rules.total.0.max(entitled(demand)));
    demand.floor.0..=most.max(demand.floor.0)
}

/// The size that a VM may always have, however it misses there.
pub(crate) fn entitled(demand: &Demand) -> u64 {
    demand.baseline.min(demand.ceiling).max(demand.floor).0
}

/// Whether a promise of `max_loss` is kept by misses whose upper edge is `high` times those at the baseline.
pub(crate) fn keeps(high: f64, max_loss: f64) -> bool {
    high <= 1.0 + max_loss
}

/// The sizes that keep a VM's promise within its limits, as choices that rise in size; never empty.
///
/// `all` is the sum of what all VMs have and of what there is: the most that can be moved.
pub(crate) fn choices(
    demand: &Demand,
    misses: &Misses<'_>,
    rules: &Rules,
    grid: &Grid,
    all: f64,
) -> Vec<Choice> {
    let range = limits(demand, rules);
    let (entitled, current) = (entitled(demand), demand.current.0);
    let mut runs: Vec<Choice> = Vec::new();
    let mut hole = false;
    for (sizes, ratio, edge) in misses.steps(&range) {
        let (first, last) = (*sizes.start(), *sizes.end());
        let first = if keeps(misses.over_baseline(edge), demand.max_loss) {
            first
        } else {
            first.max(entitled)
        };
        let (from, to) = (grid.at_or_above(first), grid.at_or_below(last));
        hole |= first > *sizes.start();
        if from > to {
            continue;
        }
        let ratio = ratio.max(misses.least);
        match runs.last_mut() {
            Some(run) if run.cost == ratio && !hole => run.to = to,
            _ => {
                hole = false;
                runs.push(Choice {
                    from,
                    to,
                    cost: ratio,
                });
            }
        }
    }
    // So far the cost was the ratio itself.
    for run in &mut runs {
        let way = current.abs_diff(current.clamp(run.from, run.to)) as f64 / all;
        run.cost = (run.cost / misses.baseline).ln() + MOVE_COST * way;
    }
    debug_assert!(!runs.is_empty());
    runs
}

/// The choices that lie within `range`.
fn cut(choices: &[Choice], grid: &Grid, range: &RangeInclusive<u64>) -> Vec<Choice> {
    let (low, high) = (*range.start(), *range.end());
    choices
        .iter()
        .filter(|choice| choice.to >= low && choice.from <= high)
        .map(|choice| Choice {
            from: grid.at_or_above(choice.from.max(low)),
            to: grid.at_or_below(choice.to.min(high)),
            cost: choice.cost,
        })
        .filter(|choice| choice.from <= choice.to)
        .collect()
}

/// The choices that lie within `range` without those that cost no less than a smaller one; if there is none, the
/// single size nearest to it, above it if there is one.
pub(crate) fn within(choices: &[Choice], grid: &Grid, range: &RangeInclusive<u64>) -> Vec<Choice> {
    let mut within = cut(choices, grid, range);
    let mut least = f64::INFINITY;
    within.retain(|choice| {
        let falls = choice.cost < least;
        least = least.min(choice.cost);
        falls
    });
    if !within.is_empty() {
        return within;
    }
    let high = *range.end();
    let above = choices.iter().find(|choice| choice.to > high);
    let nearest = above.or(choices.last()).map(|choice| {
        let size = grid
            .at_or_above(choice.from.max(high.saturating_add(1)))
            .min(choice.to);
        Choice {
            from: size,
            to: size,
            cost: choice.cost,
        }
    });
    nearest.into_iter().collect()
}

/// The smallest size among the choices that is `size` or above, else the largest of all.
pub(crate) fn at_or_above(choices: &[Choice], grid: &Grid, size: u64) -> u64 {
    let rest = &choices[choices.partition_point(|choice| choice.to < size)..];
    rest.first()
        .map_or(choices[choices.len() - 1].to, |choice| {
            grid.at_or_above(size.max(choice.from))
        })
}

/// The largest size among the choices that is `size` or below, else the smallest of all.
pub(crate) fn at_or_below(choices: &[Choice], grid: &Grid, size: u64) -> u64 {
    let before = choices.partition_point(|choice| choice.from <= size);
    before.checked_sub(1).map_or(choices[0].from, |at| {
        grid.at_or_below(size.min(choices[at].to))
    })
}
