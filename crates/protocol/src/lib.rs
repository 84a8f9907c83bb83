//! What Plimsoll's daemons and their clients say to each other.
//!
//! | module | what |
//! |---|---|
//! | [`vm`] | the host and its VMs, as the daemon shows them |
//! | [`decision`] | what it decided, why, and what came of it |
//! | [`request`] | what it is asked, and how it refuses |
//! | [`plan`] | a policy's inputs and outputs |
//! | [`answer`] | what it answers besides |
//! | [`client`] | a client of it |
//! | [`curve_json`] | a curve |
//! | [`disk_admin`] | what a disk daemon is asked, and its answers as far as the others need them |
//! | [`openmetrics`] | what all OpenMetrics texts have in common |
//! | [`size`] | sizes, rates and times as people write them |
#![forbid(unsafe_code)]

pub mod answer;
pub mod client;
pub mod curve_json;
pub mod decision;
pub mod disk_admin;
pub mod openmetrics;
pub mod plan;
pub mod request;
pub mod size;
pub mod vm;

/// Version of all forms; a reader refuses any other.
pub use curve_json::SCHEMA;

/// Where the daemon serves whoever may change things.
pub const SOCKET: &str = "/run/plimsoll/plimsolld.sock";
/// Where it serves whoever may only look.
pub const SOCKET_READ_ONLY: &str = "/run/plimsoll/plimsolld-ro.sock";
