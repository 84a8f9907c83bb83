//! Wire formats: the data that Plimsoll's programs exchange, with one type for writing and reading each.
//!
//! | module | what |
//! |---|---|
//! | [`vm`] | views of the host and its VMs |
//! | [`group`] | views of control groups |
//! | [`decision`] | decisions of the daemon, their reasons and results |
//! | [`request`] | requests to the daemon, and its refusals |
//! | [`plan`] | a policy's inputs and outputs |
//! | [`answer`] | the daemon's other answers |
//! | [`client`] | a client of the daemon |
//! | [`curve_json`] | a curve |
//! | [`byte_curve`] | a curve, validated, over sizes in bytes |
//! | [`trace`] | how a VM or a control group is traced, and what that shows |
//! | [`rightsize`] | the right size of a VM over time |
//! | [`fleet`] | what the VMs of many hosts need, and where they should run |
//! | [`tracer`] | the lines of `plimsoll attach -o json`, which the daemon reads |
//! | [`disk_admin`] | requests to a disk daemon, and its answers |
//! | [`path`] | paths and queries of requests to the daemon |
//! | [`openmetrics`] | the writer of all OpenMetrics texts |
//! | [`curve_size`] | sizes in pages or bytes, as users write them |
//! | [`size`] | sizes, rates and times as users write them |
//! | `subject` (feature `client`) | a VM or a control group, by the name that a user wrote |
#![forbid(unsafe_code)]

pub mod answer;
pub mod byte_curve;
#[cfg(feature = "client")]
pub mod client;
pub mod curve_json;
pub mod curve_size;
pub mod decision;
pub mod disk_admin;
pub mod fleet;
pub mod group;
pub mod openmetrics;
pub mod path;
pub mod plan;
pub mod request;
pub mod rightsize;
pub mod size;
#[cfg(feature = "client")]
pub mod subject;
pub mod trace;
pub mod tracer;
pub mod vm;

/// Version of all formats; a reader refuses any other.
pub use curve_json::SCHEMA;

/// The name that JSON gives a state; `-` for a value that is not a name.
pub fn name_of(value: impl serde::Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => "-".to_owned(),
    }
}

/// Socket for clients with write access.
pub const SOCKET: &str = "/run/plimsoll/plimsolld.sock";
/// Socket for clients with read-only access.
pub const SOCKET_READ_ONLY: &str = "/run/plimsoll/plimsolld-ro.sock";

/// Why an answer cannot be read, whose keys or schema are those of another version.
fn of_another_version(what: &str) -> String {
    let ours = env!("CARGO_PKG_VERSION");
    format!("{what}: this program has version {ours}; use that of the daemon's version")
}
