//! Wire forms: what Plimsoll's programs exchange, each written and read by one type.
//!
//! | module | what |
//! |---|---|
//! | [`vm`] | views of the host and its VMs |
//! | [`decision`] | decisions of the daemon, their reasons and results |
//! | [`request`] | requests to the daemon, and its refusals |
//! | [`plan`] | a policy's inputs and outputs |
//! | [`answer`] | the daemon's other answers |
//! | [`client`] | a client of the daemon |
//! | [`curve_json`] | a curve |
//! | [`byte_curve`] | a curve, validated, over sizes in bytes |
//! | [`tracer`] | the lines of `plimsoll attach -o json`, which the daemon reads |
//! | [`disk_admin`] | requests to a disk daemon, and its answers |
//! | [`openmetrics`] | the writer of all OpenMetrics texts |
//! | [`curve_size`] | sizes in pages or bytes, in a person's spelling |
//! | [`size`] | sizes, rates and times in a person's spelling |
#![forbid(unsafe_code)]

pub mod answer;
pub mod byte_curve;
#[cfg(feature = "client")]
pub mod client;
pub mod curve_json;
pub mod curve_size;
pub mod decision;
pub mod disk_admin;
pub mod openmetrics;
pub mod plan;
pub mod request;
pub mod size;
pub mod tracer;
pub mod vm;

/// Version of all forms; a reader refuses any other.
pub use curve_json::SCHEMA;

/// Socket for clients that may change something.
pub const SOCKET: &str = "/run/plimsoll/plimsolld.sock";
/// Socket for clients that may only read.
pub const SOCKET_READ_ONLY: &str = "/run/plimsoll/plimsolld-ro.sock";
