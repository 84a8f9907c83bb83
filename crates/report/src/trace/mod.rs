//! Results of recorded traces: curves, alone, beside each other and as they come, and simulated eviction policies.

mod comparison;
mod curve;
mod followed;
mod several;
mod simulated;
mod sized;

use plimsoll_flow::CurvePoint;
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
