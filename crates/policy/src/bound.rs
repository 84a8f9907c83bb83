//! One VM's curve against its bound, for status displays.

use plimsoll_flow::{MissRatioCurve, PageCount};

use crate::candidate::Misses;
use crate::{Bound, Relative, Rules};

/// Misses at `size` divided by those at `baseline`, computed as in every policy; `None` for a `size` below `baseline` that
/// the curve does not resolve.
#[must_use]
pub fn relative(
    curve: &MissRatioCurve,
    baseline: PageCount,
    size: PageCount,
    rules: &Rules,
) -> Option<Relative> {
    Misses::new(curve, baseline, rules).relative(size.0)
}

/// The smallest size from which on the upper limit of the band keeps `bound`; at most `baseline`, to which a VM is
/// always entitled. `None` if the curve lacks the rate that the bound needs.
#[must_use]
pub fn promise_size(
    curve: &MissRatioCurve,
    baseline: PageCount,
    bound: &Bound,
    rules: &Rules,
) -> Option<PageCount> {
    let misses = Misses::bounded(curve, baseline, bound, rules)?;
    let kept = |size: PageCount| misses.keeps_at(size);
    // An upper limit need not fall with the ratio, so the bound must hold at all larger sizes too.
    let points = curve.points().iter().rev().map(|point| point.size);
    let mut least = baseline;
    for size in points
        .chain([PageCount(0)])
        .filter(|size| *size <= baseline)
    {
        if !kept(size) {
            break;
        }
        least = size;
    }
    Some(least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::{CurvePoint, LOG_ERRORS};

    fn point(size: u64, miss_ratio: f64, high: f64) -> CurvePoint {
        CurvePoint {
            size: PageCount(size),
            miss_ratio,
            low: miss_ratio,
            high,
            misses: None,
        }
    }

    #[test]
    fn a_promise_is_kept_from_the_size_where_its_upper_edge_keeps_it() {
        let points = vec![
            point(10, 0.6, 0.6),
            point(20, 0.44, 0.44),
            point(30, 0.42, 0.5),
            point(40, 0.4, 0.4),
        ];
        let curve = MissRatioCurve::new(points, 9).unwrap();
        let rules = Rules::new(PageCount(1000));
        let least = |loss| {
            let bound = Bound::on_loss(loss);
            promise_size(&curve, PageCount(50), &bound, &rules)
                .unwrap()
                .0
        };
        // The upper limit at 30 is 1.25 times 0.4, so its value at 20 does not matter.
        assert_eq!(least(0.2), 40);
        assert_eq!(least(0.26), 20);
        assert_eq!(least(0.6), 10);
        // All references that were observed miss 2.5 times as often, but below 10 pages there may be others.
        assert_eq!(least(2.0), 10);
        assert_eq!(relative(&curve, PageCount(50), PageCount(9), &rules), None);
        let relative = relative(&curve, PageCount(50), PageCount(35), &rules).unwrap();
        assert!((relative.expected - 1.05).abs() < 1e-9 && (relative.high - 1.25).abs() < 1e-9);
    }

    #[test]
    fn an_error_of_all_sizes_keeps_no_memory_from_others() {
        // Between 20 and 40 pages nothing is lost, however many misses there are.
        let points = [(10, 0.8), (20, 0.4), (30, 0.4), (40, 0.4)];
        let points = points.map(|(size, miss_ratio)| point(size, miss_ratio, 1.0));
        let rules = Rules::new(PageCount(1000));
        let least = |curve: &MissRatioCurve| {
            let bound = Bound::on_loss(0.05);
            promise_size(curve, PageCount(50), &bound, &rules).unwrap()
        };
        let curve = MissRatioCurve::new(points.to_vec(), 9).unwrap();
        assert_eq!(least(&curve), PageCount(50));
        let curve = curve.with_log_errors(vec![[900; LOG_ERRORS]; 4]);
        assert_eq!(least(&curve), PageCount(20));
    }

    #[test]
    fn a_vm_without_a_size_that_keeps_it_has_its_baseline() {
        let curve = MissRatioCurve::new(vec![point(10, 0.5, 0.9)], 9).unwrap();
        let rules = Rules::new(PageCount(1000));
        let least = promise_size(&curve, PageCount(15), &Bound::on_loss(0.1), &rules);
        assert_eq!(least, Some(PageCount(15)));
    }
}
