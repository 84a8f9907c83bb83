//! The memory that a VM needs for promises by which all VMs of all hosts can be compared, whatever each is promised itself.

use plimsoll_flow::{MissRatioCurve, PageCount};
use plimsoll_policy::{Bound, Rules, promise_size};

/// The promises: their names, and the bounds on the relative rise of misses above those at the VM's baseline.
pub const PROMISES: [(&str, f64); 3] = [("1%", 0.01), ("5%", 0.05), ("25%", 0.25)];

/// The smallest size at which each of [`PROMISES`] is kept by the upper limit of the curve's band; at most `baseline`.
#[must_use]
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

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::CurvePoint;

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
