//! The sizes that a VM may be given, and what each costs.
//!
//! Only the steps of a curve matter: among all sizes with the same misses, the search needs only the smallest. A
//! [`Candidate`] is such a range of sizes. A VM's candidates rise in size and fall in cost, so the search for an
//! allocation selects one candidate per VM. Memory that the selection leaves over stays with the VMs that have it.

use std::ops::RangeInclusive;

use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount};

use crate::{Bound, Demand, Relative, Rules};

/// Cost of moving all of the host's memory, in the logarithm of misses: negligible beside any gain, but
/// sufficient to prefer the nearest among equal allocations.
pub(crate) const MOVE_COST: f64 = 1e-8;

/// A range of sizes at which a VM has the same misses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Candidate {
    /// The smallest, in pages; on the grid.
    pub(crate) from: u64,
    /// The largest; on the grid.
    pub(crate) to: u64,
    /// Logarithm of the misses over those at the baseline, plus the cost of moving there.
    pub(crate) cost: f64,
}

/// The grid of possible sizes of a VM: multiples of the unit, and the VM's own limits and sizes.
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

/// A VM's misses at each size, relative to its baseline, and its bound on them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Misses<'a> {
    curve: &'a MissRatioCurve,
    least: f64,
    baseline: PageCount,
    baseline_ratio: f64,
    max_loss: f64,
    max_misses_per_second: Option<f64>,
    /// Smaller shares than this count as this when allocations are compared.
    negligible: f64,
}

impl<'a> Misses<'a> {
    /// `None` if the curve lacks the rate that the bound needs.
    pub(crate) fn bounded(
        curve: &'a MissRatioCurve,
        baseline: PageCount,
        bound: &Bound,
        rules: &Rules,
    ) -> Option<Self> {
        let misses = Self::new(curve, baseline, rules);
        let negligible = match bound.max_misses_per_second {
            None => misses.least,
            Some(most) => match rate(curve)? {
                // Without references there are no misses.
                0.0 => 1.0,
                rate => (most / rate).clamp(misses.least, 1.0),
            },
        };
        Some(Self {
            max_loss: bound.max_loss.unwrap_or(f64::INFINITY),
            max_misses_per_second: bound.max_misses_per_second,
            negligible,
            ..misses
        })
    }

    pub(crate) fn new(curve: &'a MissRatioCurve, baseline: PageCount, rules: &Rules) -> Self {
        let least = rules.miss_ratio_min;
        Self {
            curve,
            least,
            baseline,
            baseline_ratio: curve.miss_ratio(baseline).max(least),
            max_loss: f64::INFINITY,
            max_misses_per_second: None,
            negligible: least,
        }
    }

    /// Whether the upper limits of the bands at this point of the curve keep the bound. None is kept at a size that the
    /// curve does not resolve.
    fn keeps(&self, point: &CurvePoint) -> bool {
        let is_bounded = self.max_loss < f64::INFINITY || self.max_misses_per_second.is_some();
        if is_bounded && !self.curve.resolves(point.size) {
            return false;
        }
        let number = self.max_misses_per_second.is_none_or(|most| {
            let misses = point.misses;
            misses.is_some_and(|misses| misses.high <= most)
        });
        let curve = self.curve;
        let high = || curve.quotient_high(point.size, self.baseline, self.least);
        number && (self.max_loss == f64::INFINITY || high() <= 1.0 + self.max_loss)
    }

    /// Whether the upper limits of the bands at `size` keep the bound.
    pub(crate) fn keeps_at(&self, size: PageCount) -> bool {
        self.keeps(&self.curve.at(size))
    }

    /// Misses at `size` over those at the baseline, as they count when allocations are compared.
    pub(crate) fn counted(&self, size: u64) -> f64 {
        let ratio = self.curve.miss_ratio(PageCount(size)).max(self.negligible);
        ratio / self.baseline_ratio.max(self.negligible)
    }

    /// `None` at a size below the baseline that the curve does not resolve.
    pub(crate) fn relative(&self, size: u64) -> Option<Relative> {
        let size = PageCount(size);
        let band = self.curve.quotient_band(size, self.baseline, self.least);
        (self.curve.resolves(size) || size >= self.baseline).then(|| Relative {
            expected: self.over_baseline(self.curve.miss_ratio(size)),
            low: *band.start(),
            high: *band.end(),
        })
    }

    /// Expected misses at `size` over those at the baseline; at a size that the curve does not resolve, as if all
    /// references missed.
    pub(crate) fn expected(&self, size: u64) -> f64 {
        self.over_baseline(self.curve.miss_ratio(PageCount(size)))
    }

    /// The smallest size at which they are at most `most`; `None` if they are more at every size.
    pub(crate) fn smallest_within(&self, most: f64) -> Option<u64> {
        let points = self.curve.points();
        let at = points.partition_point(|point| self.over_baseline(point.miss_ratio) > most);
        points.get(at).map(|point| point.size.0)
    }

    fn over_baseline(&self, ratio: f64) -> f64 {
        ratio.max(self.least) / self.baseline_ratio
    }

    /// The curve's steps within `range`: first and last size, and the point that holds there.
    fn steps(
        &self,
        range: &RangeInclusive<u64>,
    ) -> impl Iterator<Item = (RangeInclusive<u64>, CurvePoint)> {
        let (low, high) = (*range.start(), *range.end());
        let points = self.curve.points();
        let first = points.partition_point(|point| point.size.0 <= low);
        let steps = (first..=points.len()).map(move |after| {
            let before = after.checked_sub(1).map(|at| points[at]);
            let from = before.map_or(0, |point| point.size.0).max(low);
            let to = points.get(after).map_or(u64::MAX, |next| next.size.0 - 1);
            let unresolved = CurvePoint::exact(PageCount(from), 1.0);
            (from..=to.min(high), before.unwrap_or(unresolved))
        });
        steps.take_while(move |(sizes, _)| *sizes.start() <= high)
    }
}

/// References per second behind the ratios of a curve; `None` for a curve without a rate.
pub(crate) fn rate(curve: &MissRatioCurve) -> Option<f64> {
    let points = curve.points();
    let missing = points.iter().find(|point| point.miss_ratio > 0.0);
    let point = missing.unwrap_or(&points[0]);
    let misses = point.misses?.expected;
    Some(if misses > 0.0 {
        misses / point.miss_ratio
    } else {
        0.0
    })
}

/// Minimum and maximum size that a VM may be given regardless of its misses.
pub(crate) fn limits(demand: &Demand, rules: &Rules) -> RangeInclusive<u64> {
    let most = demand.ceiling.0.min(rules.total.0.max(entitled(demand)));
    demand.floor.0..=most.max(demand.floor.0)
}

/// The size to which a VM is always entitled, whatever its misses there.
pub(crate) fn entitled(demand: &Demand) -> u64 {
    demand.baseline.min(demand.ceiling).max(demand.floor).0
}

/// The sizes that keep a VM's bound within its limits, as candidates that rise in size; never empty.
///
/// `all` is the sum of all VMs' present sizes and the total: an upper bound on the memory that can be moved.
pub(crate) fn candidates(
    demand: &Demand,
    misses: &Misses<'_>,
    rules: &Rules,
    grid: &Grid,
    all: f64,
) -> Vec<Candidate> {
    let range = limits(demand, rules);
    let (entitled, current) = (entitled(demand), demand.current.0);
    let mut runs: Vec<Candidate> = Vec::new();
    let mut hole = false;
    for (sizes, point) in misses.steps(&range) {
        let (first, last) = (*sizes.start(), *sizes.end());
        let first = if misses.keeps(&point) {
            first
        } else {
            first.max(entitled)
        };
        let (from, to) = (grid.at_or_above(first), grid.at_or_below(last));
        hole |= first > *sizes.start();
        if from > to {
            continue;
        }
        let ratio = point.miss_ratio.max(misses.negligible);
        match runs.last_mut() {
            Some(run) if run.cost == ratio && !hole => run.to = to,
            _ => {
                hole = false;
                runs.push(Candidate {
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
        run.cost = (run.cost / misses.baseline_ratio.max(misses.negligible)).ln() + MOVE_COST * way;
    }
    debug_assert!(!runs.is_empty());
    runs
}

/// The candidates that lie within `range`.
fn cut(candidates: &[Candidate], grid: &Grid, range: &RangeInclusive<u64>) -> Vec<Candidate> {
    let (low, high) = (*range.start(), *range.end());
    candidates
        .iter()
        .filter(|candidate| candidate.to >= low && candidate.from <= high)
        .map(|candidate| Candidate {
            from: grid.at_or_above(candidate.from.max(low)),
            to: grid.at_or_below(candidate.to.min(high)),
            cost: candidate.cost,
        })
        .filter(|candidate| candidate.from <= candidate.to)
        .collect()
}

/// The candidates that lie within `range`, without those that cost no less than a smaller one. If there is none, the
/// single size nearest to the range, above it if there is one.
pub(crate) fn within(
    candidates: &[Candidate],
    grid: &Grid,
    range: &RangeInclusive<u64>,
) -> Vec<Candidate> {
    let mut within = cut(candidates, grid, range);
    let mut least = f64::INFINITY;
    within.retain(|candidate| {
        let falls = candidate.cost < least;
        least = least.min(candidate.cost);
        falls
    });
    if !within.is_empty() {
        return within;
    }
    let high = *range.end();
    let above = candidates.iter().find(|candidate| candidate.to > high);
    let nearest = above.or(candidates.last()).map(|candidate| {
        let size = grid
            .at_or_above(candidate.from.max(high.saturating_add(1)))
            .min(candidate.to);
        Candidate {
            from: size,
            to: size,
            cost: candidate.cost,
        }
    });
    nearest.into_iter().collect()
}

/// The smallest size among the candidates that is `size` or above, else the largest of all.
pub(crate) fn at_or_above(candidates: &[Candidate], grid: &Grid, size: u64) -> u64 {
    let rest = &candidates[candidates.partition_point(|candidate| candidate.to < size)..];
    rest.first()
        .map_or(candidates[candidates.len() - 1].to, |candidate| {
            grid.at_or_above(size.max(candidate.from))
        })
}

/// The largest size among the candidates that is `size` or below, else the smallest of all.
pub(crate) fn at_or_below(candidates: &[Candidate], grid: &Grid, size: u64) -> u64 {
    let before = candidates.partition_point(|candidate| candidate.from <= size);
    before.checked_sub(1).map_or(candidates[0].from, |at| {
        grid.at_or_below(size.min(candidates[at].to))
    })
}
