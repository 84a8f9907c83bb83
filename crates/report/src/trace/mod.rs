//! Results of recorded traces: curves, alone, beside each other and as they come, and simulated eviction policies.

mod comparison;
mod curve;
mod followed;
mod several;
mod simulated;
mod sized;

use plimsoll_flow::{CurvePoint, PageCount, WorkingSet};
use plimsoll_output::{Cell, csv, grouped};

pub use comparison::ComparisonReport;
pub use curve::CurveReport;
pub use followed::FollowedReport;
pub use several::{Part, SeveralReport};
pub use simulated::SimulationReport;
pub use sized::SizedReport;

/// References, and how many of them were sampled, if not all.
fn counted(references: u64, sampled: u64) -> (String, String) {
    let of_which = match sampled {
        all if all == references => String::new(),
        sampled => format!(", of which {} sampled", grouped(sampled as f64)),
    };
    (grouped(references as f64), of_which)
}

/// Whether a curve that ends at this point, above 5 %, may have a working set all the same.
fn may_have_working_set(end: Option<&CurvePoint>) -> bool {
    end.is_some_and(|end| end.low <= WorkingSet::MISS_RATIO)
}

/// The working set of a curve that ends at a point; `written` are its sizes, and `misses` is what is counted.
fn working_set(
    size: Option<PageCount>,
    end: Option<&CurvePoint>,
    written: impl Fn(PageCount) -> String,
    misses: &str,
) -> String {
    match (size, end) {
        (Some(size), _) => format!("{} (5 % {misses})", written(size)),
        (None, Some(end)) if may_have_working_set(Some(end)) => format!(
            "unknown, probably above {}, where {:.2} % miss (at least {:.2} %)",
            written(end.size),
            end.miss_ratio * 100.0,
            end.low * 100.0
        ),
        (None, _) => "none: more than 5 % miss at every size".to_owned(),
    }
}

/// The ratio at the end of a curve, with the sign of a bound if fewer may miss, but not more.
fn least_misses(end: &CurvePoint) -> String {
    let is_bound = end.low < end.miss_ratio && end.high <= end.miss_ratio;
    let sign = if is_bound { "≤ " } else { "" };
    format!("{sign}{:.2} %", end.miss_ratio * 100.0)
}

/// Points of curves as comma-separated values, each after cells under the heads `keys`.
fn points_csv<'a, const KEYS: usize>(
    keys: [&str; KEYS],
    points: impl IntoIterator<Item = ([String; KEYS], &'a CurvePoint)>,
) -> String {
    let heads = keys.into_iter();
    let mut text = csv(heads.chain(["size_pages", "miss_ratio", "low", "high"]));
    for (key, point) in points {
        let ratios = [point.miss_ratio, point.low, point.high].map(|ratio| ratio.cell());
        text.push_str(&csv(key
            .into_iter()
            .chain([point.size.0.cell()])
            .chain(ratios)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(low: f64, miss_ratio: f64, high: f64) -> CurvePoint {
        CurvePoint {
            size: PageCount(3585),
            miss_ratio,
            low,
            high,
            misses: None,
        }
    }

    #[test]
    fn a_curve_of_which_too_little_is_known_has_an_unknown_working_set() {
        let of = |size: Option<u64>, end: CurvePoint| {
            let written = |size: PageCount| format!("{size} pages");
            working_set(size.map(PageCount), Some(&end), written, "misses")
        };
        let known = end(0.01, 0.02, 0.02);
        assert_eq!(of(Some(7), known), "7 pages (5 % misses)");
        let more = "none: more than 5 % miss at every size";
        assert_eq!(of(None, end(0.051, 0.06, 0.06)), more);
        let unknown = "unknown, probably above 3585 pages, where 27.18 % miss (at least 0.60 %)";
        assert_eq!(of(None, end(0.006, 0.2718, 0.2718)), unknown);
    }

    #[test]
    fn the_least_misses_are_a_bound_if_there_may_be_fewer_and_not_more() {
        assert_eq!(least_misses(&end(0.01, 0.25, 0.25)), "≤ 25.00 %");
        assert_eq!(least_misses(&end(0.25, 0.25, 0.25)), "25.00 %");
        assert_eq!(least_misses(&end(0.2, 0.25, 0.3)), "25.00 %");
    }
}
