//! Demands for tests.
#![allow(dead_code, reason = "each test takes what it needs")]

use std::cmp::Ordering;

use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, VmId};
use plimsoll_policy::{Bound, Demand, Rules};
use proptest::prelude::*;

pub const MIB: u64 = 256;

/// An exact curve of (pages, miss ratio).
pub fn curve(points: &[(u64, f64)]) -> MissRatioCurve {
    let points = points
        .iter()
        .map(|&(size, ratio)| CurvePoint::exact(PageCount(size), ratio));
    MissRatioCurve::new(points.collect(), 1000).unwrap()
}

/// A VM whose present size is its baseline, any size allowed, and a `max_loss` of 25 %.
pub fn demand(name: &str, baseline: u64, points: &[(u64, f64)]) -> Demand {
    Demand {
        vm: VmId(name.into()),
        curve: Some(curve(points)),
        baseline: PageCount(baseline),
        current: PageCount(baseline),
        floor: PageCount(0),
        ceiling: PageCount(u64::MAX),
        bound: Bound::on_loss(0.25),
        shares: 1000,
        working_set: None,
    }
}

/// Rules with a unit of one page.
pub fn rules(total: u64) -> Rules {
    Rules {
        unit: PageCount(1),
        ..Rules::new(PageCount(total))
    }
}

/// Curves of few steps within 40 pages, with bands whose upper limit may rise; most have a rate.
pub fn any_curve() -> impl Strategy<Value = MissRatioCurve> {
    let step = (1_u64..8, 0.0..0.5_f64, 0.0..0.2_f64, any::<bool>());
    let rate = prop::option::weighted(0.8, 0.0..100.0_f64);
    (0_u64..6, prop::collection::vec(step, 1..8), rate).prop_map(|(first, steps, rate)| {
        let (mut size, mut ratio) = (first, 1.0);
        let points = steps.into_iter().map(|(way, fall, width, cliff)| {
            let point = PageCount(size);
            ratio *= if cliff { fall } else { 1.0 - 0.2 * fall };
            size += way;
            CurvePoint {
                size: point,
                miss_ratio: ratio,
                low: ratio * (1.0 - width),
                high: (ratio * (1.0 + width)).min(1.0),
                misses: None,
            }
        });
        let curve = MissRatioCurve::new(points.collect(), 1000).unwrap();
        curve.with_references_per_second(rate.unwrap_or(f64::NAN))
    })
}

prop_compose! {
    /// A bound on the rise of misses, on their number, on both or on neither.
    pub fn any_bound()(
        max_loss in prop::option::weighted(0.7, 0.0..0.6_f64),
        max_misses_per_second in prop::option::weighted(0.3, 0.0..60.0_f64),
    ) -> Bound {
        Bound { max_loss, max_misses_per_second }
    }
}

prop_compose! {
    /// A VM of up to 40 pages.
    pub fn any_demand(name: String)(
        curve in prop::option::weighted(0.9, any_curve()),
        baseline in 0_u64..24,
        moved in 0_u64..12,
        floor in 0_u64..8,
        room in 0_u64..40,
        bound in any_bound(),
        shares in 1_u32..5,
        working_set in prop::option::weighted(0.8, 0_u64..24),
    ) -> Demand {
        Demand {
            vm: VmId(name.clone()),
            curve,
            baseline: PageCount(baseline),
            current: PageCount((baseline + moved).saturating_sub(4)),
            floor: PageCount(floor),
            ceiling: PageCount(floor + room),
            bound,
            shares,
            working_set: working_set.map(PageCount),
        }
    }
}

/// Up to `most` VMs.
pub fn any_demands(most: usize) -> impl Strategy<Value = Vec<Demand>> {
    (1..=most).prop_flat_map(|vms| {
        (0..vms)
            .map(|vm| any_demand(format!("vm{vm}")))
            .collect::<Vec<_>>()
    })
}

prop_compose! {
    /// Rules for up to three or four VMs.
    pub fn any_rules()(
        total in 1_u64..80,
        unit in 1_u64..5,
        step in prop::option::weighted(0.3, 5_u64..12),
    ) -> Rules {
        Rules {
            unit: PageCount(unit),
            step: step.map(PageCount),
            ..Rules::new(PageCount(total))
        }
    }
}

/// The upper limit of the relative misses, computed independently.
pub fn high(demand: &Demand, rules: &Rules, size: u64) -> f64 {
    let curve = demand.curve.as_ref().unwrap();
    let least = rules.miss_ratio_min;
    let high = curve.at(PageCount(size)).high.max(least) / curve.at(demand.baseline).low.max(least);
    // Misses never rise with the size.
    match size.cmp(&demand.baseline.0) {
        Ordering::Less => high.max(1.0),
        Ordering::Equal => 1.0,
        Ordering::Greater => high.min(1.0),
    }
}

/// Whether a size breaks no loss bound and no limit.
pub fn allowed(demand: &Demand, rules: &Rules, size: u64) -> bool {
    let limits = demand.floor.0..=demand.ceiling.0;
    let entitled = size >= demand.baseline.min(demand.ceiling).0;
    limits.contains(&size)
        && (entitled || demand.curve.is_some() && keeps_bound(demand, rules, size))
}

/// Whether the upper limits of the band at a size keep the bound, computed independently. Below the curve's first point
/// only the absence of a bound does.
pub fn keeps_bound(demand: &Demand, rules: &Rules, size: u64) -> bool {
    let curve = demand.curve.as_ref().unwrap();
    if size < curve.points()[0].size.0 {
        return demand.bound == Bound::default();
    }
    let rise = demand
        .bound
        .max_loss
        .is_none_or(|loss| high(demand, rules, size) <= 1.0 + loss);
    let number = demand.bound.max_misses_per_second.is_none_or(|most| {
        let misses = curve.misses_per_second(PageCount(size));
        misses.is_some_and(|misses| misses.high <= most)
    });
    rise && number
}
