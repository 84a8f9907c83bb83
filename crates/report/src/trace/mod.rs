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

/// How many of the references were sampled, if not all.
fn of_which(sampled: u64, references: u64) -> String {
    match sampled {
        all if all == references => String::new(),
        sampled => format!(", of which {} sampled", grouped(sampled as f64)),
    }
}
