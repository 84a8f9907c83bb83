//! Serving a VM's disks over vhost-user, with a cache under them.

pub mod admin;
pub mod ghosts;
pub mod metrics;
pub mod options;
pub mod recorder;
pub mod report;
pub mod serve;
pub mod table;

pub(crate) mod state;
mod trouble;
mod victim_cache;

pub use options::{CacheArgs, DiskSpec};
pub use report::Report;
