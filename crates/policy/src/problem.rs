//! The allocation problem: the possible sizes of each VM, and the evaluation of a solution.
//!
//! Limits, bounds and the total always hold. They take precedence over the step limit: a VM below its bound is raised
//! at once, and a host that has become too small takes more than a step. A VM without a curve keeps its size, and gives
//! what exceeds its baseline only if the other VMs' bounds cannot be kept otherwise.

use plimsoll_flow::PageCount;

use crate::candidate::{self, Candidate, Grid, Misses, rate};
use crate::{Allocation, Demand, PolicyError, Reason, Rules, Search, Suppression, Target};

/// A gain below this share counts as none.
const GAIN_MIN: f64 = 1e-7;

/// One VM.
pub(crate) struct Vm<'a> {
    pub(crate) demand: &'a Demand,
    pub(crate) grid: Grid,
    /// `None` without a curve.
    pub(crate) misses: Option<Misses<'a>>,
    /// Whether the policy has the data it needs to move the VM.
    pub(crate) movable: bool,
    /// Whether the policy decides by a working set, and the VM's is not known.
    lacks_working_set: bool,
    /// All sizes that its limits and its bound allow, however far from the present one.
    pub(crate) all: Vec<Candidate>,
}

/// All VMs and the memory to allocate.
pub(crate) struct Problem<'a> {
    pub(crate) vms: Vec<Vm<'a>>,
    /// The sizes that each VM may be given in this turn; the smallest of all fit into the total.
    pub(crate) lists: Vec<Vec<Candidate>>,
    pub(crate) rules: &'a Rules,
}

/// The result of a policy, before hysteresis.
pub(crate) struct Solution {
    pub(crate) sizes: Vec<u64>,
    /// Lower bound on the sum of logarithms of relative misses of every allocation.
    pub(crate) bound: Option<f64>,
    /// Whether this is the optimum.
    pub(crate) best: bool,
    pub(crate) search: Option<Search>,
}

impl<'a> Problem<'a> {
    /// Prepares the problem; `sampled` if the policy uses sampled working sets instead of curves.
    pub(crate) fn new(
        demands: &'a [Demand],
        rules: &'a Rules,
        sampled: bool,
    ) -> Result<Self, PolicyError> {
        let current = demands.iter().map(|demand| demand.current.0 as f64);
        let sum = rules.total.0 as f64 + current.sum::<f64>();
        let vms = demands.iter().map(|demand| {
            let curve = demand.curve.as_ref();
            let bounded = curve
                .and_then(|curve| Misses::bounded(curve, demand.baseline, &demand.bound, rules));
            let misses = bounded.or_else(|| Some(Misses::new(curve?, demand.baseline, rules)));
            let grid = Grid::new(demand, rules.unit);
            let lacks_working_set = sampled && demand.working_set.is_none();
            let has_data = if sampled {
                !lacks_working_set
            } else {
                misses.is_some()
            };
            let movable = has_data && bounded.is_some() == curve.is_some();
            let all = match &bounded {
                Some(misses) => candidate::candidates(demand, misses, rules, &grid, sum),
                None => vec![without_curve(demand, rules, &grid, movable)],
            };
            Vm {
                demand,
                grid,
                misses,
                movable,
                lacks_working_set,
                all,
            }
        });
        let vms: Vec<_> = vms.collect();
        let lists = lists(&vms, rules)?;
        Ok(Self { vms, lists, rules })
    }

    pub(crate) fn grids(&self) -> Vec<Grid> {
        self.vms.iter().map(|vm| vm.grid).collect()
    }

    pub(crate) fn current(&self) -> Vec<u64> {
        self.vms.iter().map(|vm| vm.demand.current.0).collect()
    }

    /// The candidates that contain the present sizes, or the smallest if those do not fit.
    pub(crate) fn picks(&self) -> Vec<usize> {
        let lists = self.lists.iter().zip(&self.vms);
        let picks: Vec<_> = lists
            .map(|(list, vm)| {
                let current = vm.demand.current.0;
                let below = list.partition_point(|candidate| candidate.from <= current);
                below.saturating_sub(1)
            })
            .collect();
        let pages = self
            .lists
            .iter()
            .zip(&picks)
            .map(|(list, &at)| list[at].from);
        let pages: Vec<_> = pages.collect();
        if total_of(&pages) <= u128::from(self.rules.total.0) {
            picks
        } else {
            vec![0; picks.len()]
        }
    }

    /// The sizes of an allocation: each VM stays as near to its present size as its candidate allows. If memory is
    /// short, the VMs with the most unused memory give first.
    pub(crate) fn sizes(&self, picks: &[usize]) -> Vec<u64> {
        let picked: Vec<_> = self
            .lists
            .iter()
            .zip(picks)
            .map(|(list, &at)| list[at])
            .collect();
        let wanted = self.vms.iter().zip(&picked);
        let mut sizes: Vec<_> = wanted
            .map(|(vm, candidate)| vm.demand.current.0.clamp(candidate.from, candidate.to))
            .collect();
        let mut over = total_of(&sizes).saturating_sub(u128::from(self.rules.total.0));
        let mut order: Vec<_> = (0..sizes.len()).collect();
        order.sort_by_key(|&vm| (std::cmp::Reverse(sizes[vm] - picked[vm].from), vm));
        for vm in order {
            let idle = sizes[vm] - picked[vm].from;
            let gives = u64::try_from(over).unwrap_or(u64::MAX).min(idle);
            if gives > 0 {
                let size = self.vms[vm].grid.at_or_below(sizes[vm] - gives);
                over = over.saturating_sub(u128::from(sizes[vm] - size));
                sizes[vm] = size;
            }
        }
        sizes
    }

    /// Whether every VM may keep its size.
    fn keeps(&self) -> bool {
        let current = self.current();
        let allowed = self.vms.iter().zip(&current);
        let mut allowed =
            allowed.map(|(vm, &size)| candidate::at_or_above(&vm.all, &vm.grid, size) == size);
        allowed.all(|allowed| allowed) && total_of(&current) <= u128::from(self.rules.total.0)
    }

    /// Sum of the logarithms of relative misses of all VMs with a curve, and their number.
    fn losses(&self, sizes: &[u64]) -> (f64, usize) {
        let known = self.vms.iter().zip(sizes);
        let known = known.filter_map(|(vm, &size)| Some(vm.misses?.counted(size).ln()));
        known.fold((0.0, 0), |(sum, vms), loss| (sum + loss, vms + 1))
    }

    /// Least sum of the logarithms of relative misses of the VMs with a curve that no search moves, and which a
    /// solution's bound does not contain.
    fn unbounded_loss(&self) -> f64 {
        let fixed = self.vms.iter().zip(&self.lists);
        let losses = fixed.filter_map(|(vm, list)| {
            let misses = vm.misses.filter(|_| !vm.movable)?;
            Some(misses.counted(list.last()?.to).ln())
        });
        losses.sum()
    }

    /// Checks what every policy must keep: each size is one that its VM may be given, and their sum is at most the total.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Mistake`].
    pub(crate) fn check_kept(&self, sizes: &[u64]) -> Result<(), PolicyError> {
        let mistake = |what: String| Err(PolicyError::Mistake(what));
        if sizes.len() != self.vms.len() {
            let vms = self.vms.len();
            return mistake(format!("{} sizes for {vms} VMs", sizes.len()));
        }
        for ((list, vm), &size) in self.lists.iter().zip(&self.vms).zip(sizes) {
            if candidate::at_or_below(list, &vm.grid, size) != size {
                return mistake(format!(
                    "VM {} {size} pages, which it may not have",
                    vm.demand.vm
                ));
            }
        }
        let (sum, total) = (total_of(sizes), self.rules.total.0);
        match sum <= u128::from(total) {
            true => Ok(()),
            false => mistake(format!("{sum} pages, and there are {total}")),
        }
    }

    /// Applies hysteresis to a solution and describes the result.
    pub(crate) fn allocation(&self, solution: Solution) -> Allocation {
        let current = self.current();
        let (now, known) = self.losses(&current);
        let (then, _) = self.losses(&solution.sizes);
        let mean = |sum: f64| (sum / known.max(1) as f64).exp();
        let gain = 1.0 - mean(then) / mean(now);
        let (mut sizes, mut held, mut best) = (solution.sizes, None, solution.best);
        if known > 0 && sizes != current && self.keeps() {
            if gain <= GAIN_MIN && solution.search.is_some() {
                sizes = current.clone();
            } else if gain.abs() < self.rules.gain_min {
                held = Some(Suppression::Hysteresis { gain });
                best = false;
                sizes = current.clone();
            }
        }
        let (sum, _) = self.losses(&sizes);
        let short = total_of(&current) > u128::from(self.rules.total.0);
        let targets = self.vms.iter().zip(&sizes).map(|(vm, &size)| Target {
            vm: vm.demand.vm.clone(),
            size: PageCount(size),
            relative: vm.misses.and_then(|misses| misses.relative(size)),
            relative_now: (vm.misses).and_then(|misses| misses.relative(vm.demand.current.0)),
            misses: (vm.demand.curve.as_ref())
                .and_then(|curve| curve.misses_per_second(PageCount(size))),
            reason: vm.reason(size, short),
        });
        let gap = solution.bound.map(|bound| match best {
            true => 0.0,
            false => {
                let least = bound + self.unbounded_loss() - candidate::MOVE_COST;
                (1.0 - mean(least - sum)).max(0.0)
            }
        });
        let spare = u128::from(self.rules.total.0).saturating_sub(total_of(&sizes));
        Allocation {
            targets: targets.collect(),
            geometric_mean: mean(sum),
            geometric_mean_now: mean(now),
            gap,
            spare: PageCount(u64::try_from(spare).unwrap_or(u64::MAX)),
            held,
            search: solution.search,
        }
    }
}

impl Vm<'_> {
    /// The smallest size that its limits and its bound allow.
    fn least(&self) -> u64 {
        self.all[0].from
    }

    fn reason(&self, size: u64, short: bool) -> Reason {
        let Demand {
            current,
            floor,
            ceiling,
            ..
        } = self.demand;
        match size.cmp(&current.0) {
            std::cmp::Ordering::Equal if self.movable => Reason::Kept,
            std::cmp::Ordering::Equal if self.lacks_working_set => Reason::NoWorkingSet,
            std::cmp::Ordering::Equal if self.lacks_rate() => Reason::NoRate,
            std::cmp::Ordering::Equal => Reason::Unknown,
            _ if current < floor || current > ceiling => Reason::Limits,
            std::cmp::Ordering::Greater => Reason::Gains,
            std::cmp::Ordering::Less if short => Reason::HostShort,
            std::cmp::Ordering::Less if size == self.least() && size > floor.0 => {
                Reason::GivesToItsBound
            }
            std::cmp::Ordering::Less => Reason::Gives,
        }
    }

    /// Whether its bound cannot be checked on its curve.
    fn lacks_rate(&self) -> bool {
        self.demand.bound.max_misses_per_second.is_some()
            && self
                .demand
                .curve
                .as_ref()
                .is_some_and(|curve| rate(curve).is_none())
    }

    /// The range of sizes within one step of the present size.
    fn reach(&self, rules: &Rules) -> std::ops::RangeInclusive<u64> {
        let current = self.demand.current.0;
        match rules.step {
            None => 0..=u64::MAX,
            Some(step) => current.saturating_sub(step.0)..=current.saturating_add(step.0),
        }
    }
}

/// The sizes of a VM without a curve: any within its limits if it can be moved, otherwise its present size, or the size
/// it is entitled to if that is less.
fn without_curve(demand: &Demand, rules: &Rules, grid: &Grid, movable: bool) -> Candidate {
    let keep = demand.current.clamp(demand.floor, demand.ceiling).0;
    let (from, to) = if movable {
        let limits = candidate::limits(demand, rules);
        (*limits.start(), grid.at_or_below(*limits.end()))
    } else {
        (keep.min(candidate::entitled(demand)), keep)
    };
    Candidate {
        from,
        to,
        cost: 0.0,
    }
}

fn total_of(sizes: &[u64]) -> u128 {
    sizes.iter().copied().map(u128::from).sum()
}

/// The amount by which the smallest sizes of `lists` exceed the total.
fn lacking(lists: &[Vec<Candidate>], total: PageCount) -> u128 {
    let least: u128 = lists.iter().map(|list| u128::from(list[0].from)).sum();
    least.saturating_sub(u128::from(total.0))
}

/// The sizes that each VM may be given in this turn, with as few rules relaxed as possible.
fn lists(vms: &[Vm<'_>], rules: &Rules) -> Result<Vec<Vec<Candidate>>, PolicyError> {
    let fixed = |vm: &Vm<'_>, size: u64| {
        let at = vm.all.partition_point(|candidate| candidate.to < size);
        vec![Candidate {
            from: size,
            to: size,
            ..vm.all[at.min(vm.all.len() - 1)]
        }]
    };
    let keep = |vm: &Vm<'_>| candidate::at_or_above(&vm.all, &vm.grid, vm.demand.current.0);
    let cut = |from_step: bool| -> Vec<_> {
        let lists = vms.iter().map(|vm| {
            let reach = vm.reach(rules);
            let from = if from_step { *reach.start() } else { 0 };
            if vm.movable {
                candidate::within(&vm.all, &vm.grid, &(from..=*reach.end()))
            } else {
                fixed(vm, keep(vm))
            }
        });
        lists.collect()
    };
    let mut lists = cut(true);
    if lacking(&lists, rules.total) > 0 && rules.step.is_some() {
        lists = cut(false);
    }
    let mut order: Vec<_> = (0..vms.len()).filter(|&vm| !vms[vm].movable).collect();
    order.sort_by_key(|&vm| (std::cmp::Reverse(lists[vm][0].from - vms[vm].least()), vm));
    for vm in order {
        let lacking = u64::try_from(lacking(&lists, rules.total)).unwrap_or(u64::MAX);
        if lacking == 0 {
            break;
        }
        let left = lists[vm][0].from.saturating_sub(lacking);
        lists[vm] = fixed(
            &vms[vm],
            candidate::at_or_below(&vms[vm].all, &vms[vm].grid, left),
        );
    }
    if lacking(&lists, rules.total) == 0 {
        // No VM can have more than the total.
        for (list, vm) in lists.iter_mut().zip(vms) {
            if list.last().is_some_and(|last| last.to > rules.total.0) {
                *list = candidate::within(list, &vm.grid, &(0..=rules.total.0));
            }
        }
        return Ok(lists);
    }
    let least: Vec<_> = vms.iter().map(|vm| PageCount(vm.least())).collect();
    let needed = least
        .iter()
        .fold(0_u64, |sum, size| sum.saturating_add(size.0));
    Err(PolicyError::Infeasible {
        needed: PageCount(needed),
        total: rules.total,
        least,
    })
}
