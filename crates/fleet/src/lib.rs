//! Many hosts: what their VMs need over time, and on which host each should run.
//!
//! | module | what |
//! |---|---|
//! | [`discovery`] | the daemons of a fleet, as Prometheus finds them |
//! | [`collect`] | their answers |
//! | [`archive`] | their past, as Parquet files |
//! | [`fleet`] | needs over time, on one clock, and the capacities of hosts |
//! | [`rules`] | which VMs belong together, which must not, and on which hosts they may be |
//! | [`place`] | a placement: repair, emptying of hosts, the loss of any one host |
//! | `solution` | whether a placement is whole, and its spare hosts |
//! | `load` | who is where, and whether a VM fits |
//! | `exact` | the best placement of a small fleet |
//! | `bound` | what no placement can do better |
//! | `order` | the order of the moves |
//! | [`plan`] | the result as JSON |
//!
//! A VM needs memory and processors in each of several intervals of a period, a day by default. It fits on a host if the needs
//! of the host's VMs together are within its capacity in every interval: the peaks of different VMs count together only if
//! they come at the same time, because plimsolld moves memory between the VMs of a host.
//!
//! Source: \[LS07\] §1, §4.1 (docs/papers.md) name consolidation as a use of curves. Departs from it in everything else.
//!
//! Not here: who moves VMs. The plan is for the platform's own mover.
#![forbid(unsafe_code)]

pub mod archive;
mod bound;
pub mod collect;
pub mod discovery;
mod exact;
pub mod fleet;
mod load;
mod order;
pub mod place;
pub mod plan;
pub mod rules;
mod solution;
#[cfg(test)]
mod tests;
