//! Results of recorded traces: curves, alone, beside each other and as they come, and simulated eviction policies.

mod comparison;
mod curve;
mod followed;
mod several;
mod simulated;
mod sized;

use plimsoll_output::grouped;

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
