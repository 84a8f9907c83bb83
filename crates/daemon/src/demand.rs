//! The memory that a VM needs, now and over time, to keep its own limit, and to keep a limit common to all VMs, by which those of
//! all hosts can be compared.

use std::collections::BTreeMap;

use plimsoll_flow::{MissRatioCurve, PageCount};
use plimsoll_policy::{Bound, Rules, promise_size};
use plimsoll_protocol::fleet::IntervalDemand;
use plimsoll_protocol::vm::{MissCost, Settings, VmSummary};

use crate::vm::{bytes, pages};

/// The promises: their names, and the bounds on the relative rise of misses above those at the VM's baseline.
pub const PROMISES: [(&str, f64); 3] = [("1%", 0.01), ("5%", 0.05), ("25%", 0.25)];

/// The smallest size at which each of [`PROMISES`] is kept by the upper limit of the curve's band; at most `baseline`.
pub fn demands(
    curve: &MissRatioCurve,
    baseline: PageCount,
    rules: &Rules,
) -> [PageCount; PROMISES.len()] {
    PROMISES.map(|(_, max_loss)| {
        let bound = Bound {
            max_loss: Some(max_loss),
            max_misses_per_second: None,
        };
        // A relative bound needs no rate, so there is a size.
        promise_size(curve, baseline, &bound, rules).unwrap_or(baseline)
    })
}

/// What decides what a VM needs, besides its curve.
#[derive(Debug, Clone, Copy)]
pub struct Needs<'a> {
    /// Its limits.
    pub settings: &'a Settings,
    /// How long it waits for a miss.
    pub cost: MissCost,
    /// What its guest cannot give.
    pub kept_bytes: u64,
}

impl<'a> Needs<'a> {
    /// What decides for a VM as it is now.
    pub fn of(summary: &'a VmSummary) -> Self {
        Self {
            settings: &summary.settings,
            cost: summary.miss_cost,
            kept_bytes: summary.kept_bytes,
        }
    }

    /// The smallest size within the limit and the minimum; the baseline if the curve cannot show that a bound is kept.
    pub fn by(&self, curve: &MissRatioCurve) -> PageCount {
        let baseline = pages(self.settings.baseline_bytes);
        let bound = self.settings.promise.bound(curve.vcpus(), self.cost);
        let rules = Rules::new(baseline.max(PageCount(1)));
        let size = promise_size(curve, baseline, &bound, &rules);
        size.unwrap_or(baseline).max(self.least())
    }

    /// The size without a curve.
    pub fn unknown(&self) -> PageCount {
        pages(self.settings.baseline_bytes).max(self.least())
    }

    fn least(&self) -> PageCount {
        pages(self.settings.min_bytes.max(self.kept_bytes))
    }

    /// The largest need of each interval of `interval_ms` from `since_unix_ms` on, by curves with their times.
    pub fn over_time(
        &self,
        curves: &[(u64, MissRatioCurve)],
        since_unix_ms: u64,
        interval_ms: u64,
    ) -> Vec<IntervalDemand> {
        let mut found: BTreeMap<u32, IntervalDemand> = BTreeMap::new();
        for (unix_ms, curve) in curves {
            let number = unix_ms
                .checked_sub(since_unix_ms)
                .map(|ms| ms / interval_ms);
            let Some(interval) = number.and_then(|number| u32::try_from(number).ok()) else {
                continue;
            };
            let need_bytes = bytes(self.by(curve));
            let vcpus = curve.vcpus();
            found
                .entry(interval)
                .and_modify(|demand| {
                    demand.curves += 1;
                    demand.need_bytes = demand.need_bytes.max(need_bytes);
                    let most = demand.vcpu_seconds_per_second.into_iter().chain(vcpus);
                    demand.vcpu_seconds_per_second = most.reduce(f64::max);
                })
                .or_insert(IntervalDemand {
                    interval,
                    curves: 1,
                    need_bytes,
                    vcpu_seconds_per_second: vcpus,
                });
        }
        found.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::CurvePoint;
    use plimsoll_protocol::vm::Promise;

    #[test]
    fn an_interval_needs_what_its_most_demanding_curve_does() {
        const MIB: u64 = 256;
        let settings = Settings {
            min_bytes: 150 << 20,
            max_bytes: 1 << 30,
            baseline_bytes: 512 << 20,
            shares: 1,
            promise: Promise::on_loss(0.05),
            managed: true,
        };
        let needs = Needs {
            settings: &settings,
            cost: MissCost::default(),
            kept_bytes: 0,
        };
        let curve = |mib| {
            let points = [(1, 0.9), (mib * MIB, 0.1)];
            let points = points.map(|(size, ratio)| CurvePoint::exact(PageCount(size), ratio));
            MissRatioCurve::new(points.to_vec(), 1000).unwrap()
        };
        // The first curve is older than the first interval.
        let curves = [
            (999, 400),
            (1000, 200),
            (1059, 300),
            (1060, 100),
            (1200, 200),
        ];
        let curves: Vec<_> = curves.map(|(at, mib)| (at, curve(mib))).into();
        let found = needs.over_time(&curves, 1000, 60);
        let found: Vec<_> = found
            .iter()
            .map(|one| (one.interval, one.curves, one.need_bytes >> 20))
            .collect();
        assert_eq!(found, [(0, 2, 300), (1, 1, 150), (3, 1, 200)]);
        assert_eq!(needs.unknown().0, 512 * MIB);
    }

    #[test]
    fn the_upper_limit_of_the_band_decides_and_not_the_estimate() {
        let point = |size, miss_ratio, high| CurvePoint {
            size: PageCount(size),
            miss_ratio,
            low: miss_ratio,
            high,
            misses: None,
        };
        // The estimate is the baseline's from 100 pages on.
        let points = vec![
            point(0, 1.0, 1.0),
            point(100, 0.2, 0.3),
            point(200, 0.2, 0.24),
            point(300, 0.2, 0.208),
            point(400, 0.2, 0.201),
            point(500, 0.2, 0.2),
        ];
        let curve = MissRatioCurve::new(points, 1_000_000).unwrap();
        let sizes = demands(&curve, PageCount(500), &Rules::new(PageCount(1000)));
        assert_eq!(sizes.map(|size| size.0), [400, 300, 200]);
    }
}
