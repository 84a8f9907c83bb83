//! A VM's validated curve over sizes in bytes.

use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, PageSize};
use plimsoll_policy::{Rules, relative};

use crate::curve_json::{CurveJson, CurveJsonError};
use crate::vm::{Relative, RelativePoint};

/// A curve whose sizes are bytes.
#[derive(Debug, Clone)]
pub struct ByteCurve {
    /// The curve over pages.
    pub misses: MissRatioCurve,
    /// Bytes of a page.
    pub page_size: PageSize,
}

impl ByteCurve {
    /// Validates a curve.
    ///
    /// # Errors
    ///
    /// [`CurveJsonError`] for another schema, an invalid page size or invalid points.
    pub fn new(json: &CurveJson) -> Result<Self, CurveJsonError> {
        Ok(Self {
            misses: json.to_curve()?,
            page_size: PageSize::new(json.page_bytes)?,
        })
    }

    /// The curve at a size.
    pub fn at(&self, bytes: u64) -> CurvePoint {
        self.misses.at(PageCount::from_bytes(bytes, self.page_size))
    }

    /// Misses at a size over those expected at the baseline, computed as in policies: a ratio below
    /// [`Rules::MISS_RATIO_MIN`] is raised to it. `None` for a size below the baseline that the curve does not resolve.
    pub fn relative(&self, bytes: u64, baseline_bytes: u64) -> Option<Relative> {
        let [size, baseline] =
            [bytes, baseline_bytes].map(|bytes| PageCount::from_bytes(bytes, self.page_size));
        relative(&self.misses, baseline, size, &Rules::new(baseline))
    }

    /// [`relative`](Self::relative) at each size of the curve at which it is known.
    pub fn relative_points(&self, baseline_bytes: u64) -> Vec<RelativePoint> {
        let sizes = self.misses.points().iter().map(|point| point.size);
        let points = sizes.filter_map(|size| {
            let relative = self.relative(size.to_bytes(self.page_size), baseline_bytes)?;
            Some(RelativePoint {
                size_pages: size.0,
                relative,
            })
        });
        points.collect()
    }

    /// The size at which the curve ends.
    pub fn end_bytes(&self) -> u64 {
        let last = self.misses.points().last();
        last.map_or(0, |point| point.size.to_bytes(self.page_size))
    }

    /// About `count` sizes, at least 1, round and evenly spaced up to `until_bytes`, including `marks`; rising.
    pub fn sizes(&self, until_bytes: u64, count: u64, marks: &[u64]) -> Vec<u64> {
        let step = (until_bytes / count.max(1)).max(self.page_size.bytes());
        // Above 2^63 the step is used as it is.
        let step = step.checked_next_power_of_two().unwrap_or(step);
        let step = if until_bytes / step * 2 <= count {
            step / 2
        } else {
            step
        };
        let grid = (1..=count.saturating_mul(2))
            .map_while(|line| line.checked_mul(step))
            .take_while(|size| *size <= until_bytes);
        let mut sizes: Vec<u64> = grid.chain(marks.iter().copied()).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve_json::PointJson;

    /// Half of the references miss from 1 MiB on, an eighth from 4 MiB on.
    fn example() -> CurveJson {
        let point = |size_pages, miss_ratio| PointJson {
            size_pages,
            miss_ratio,
            low: miss_ratio * 0.5,
            high: miss_ratio * 1.5,
            misses: None,
        };
        CurveJson {
            schema: 1,
            vm: "web".to_owned(),
            page_bytes: 4096,
            references: 100,
            baseline_pages: Some(512),
            vcpu_seconds_per_second: None,
            uncertain_pages: 0,
            log_errors_permille: Vec::new(),
            points: vec![point(256, 0.5), point(1024, 0.125)],
        }
    }

    #[test]
    fn misses_are_relative_to_those_at_the_baseline() {
        let curve = ByteCurve::new(&example()).unwrap();
        let at = curve.relative(4 << 20, 2 << 20).unwrap();
        assert_eq!((at.expected, at.low, at.high), (0.25, 0.25 / 3.0, 0.75));
        assert_eq!(curve.relative(0, 2 << 20), None);
        assert_eq!(curve.relative(0, 0).unwrap().expected, 1.0);
        assert_eq!(curve.end_bytes(), 4 << 20);
        // At the curve's sizes, of which the first is below the baseline.
        let points = curve.relative_points(2 << 20);
        let points: Vec<_> = points
            .iter()
            .map(|point| (point.size_pages, Some(point.relative)))
            .collect();
        let [first, last] = [1, 4].map(|mib| curve.relative(mib << 20, 2 << 20));
        assert_eq!(points, [(256, first), (1024, last)]);
    }

    #[test]
    fn sizes_are_round_few_and_hold_the_marks() {
        let curve = ByteCurve::new(&example()).unwrap();
        let mib = |sizes: Vec<u64>| sizes.into_iter().map(|size| size >> 20).collect::<Vec<_>>();
        let sizes = curve.sizes(512 << 20, 12, &[100 << 20, 128 << 20]);
        assert_eq!(mib(sizes), [64, 100, 128, 192, 256, 320, 384, 448, 512]);
        assert_eq!(mib(curve.sizes(400 << 20, 12, &[])).len(), 12);
        for until in [0, 1, 4096, u64::MAX] {
            assert!(curve.sizes(until, 12, &[7]).len() <= 25, "{until}");
        }
    }
}
