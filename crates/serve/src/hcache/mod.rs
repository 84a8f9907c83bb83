//! Serving a page store to the processes of this machine.

pub mod ghosts;
pub mod load;
pub mod metrics;
mod miniatures;
pub mod report;
pub mod serve;
pub mod table;

pub use report::Report;
