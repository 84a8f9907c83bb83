//! Results as people, programs and pictures have them, for every program that shows them.
//!
//! | module | shows |
//! |---|---|
//! | [`host`], [`vm`] | a host with its VMs and control groups, and one of these in full |
//! | [`curves`], [`history`], [`heatmap`] | their curves, their past, and where in their RAM they are busy |
//! | [`decision`], [`promises`], [`rightsize`] | decisions, what became of their promises, and sizes that suffice |
//! | [`plan`] | allocations of memory |
//! | [`trace`] | curves of recorded traces, comparisons of estimators, simulated eviction policies |
//! | [`tracing`] | the periods of a trace of a running VM, its costs and its curve |
//! | [`working_set`] | working sets of a recorded run by each estimator |
//! | [`words`] | values of the daemon: sizes, states, names, and what is not known |
//!
//! [`daemon`] is the connection to plimsolld that has such answers, and [`managed`] refuses what plimsolld does itself.
//!
//! Names of VMs and sentences of the daemon may hold what somebody in a guest chose: every one goes through
//! `printable` before it gets to a terminal.
//!
//! Not here: how results are computed; the options of verbs.
#![forbid(unsafe_code)]

#[cfg(test)]
#[allow(dead_code, reason = "tests of other crates use the rest")]
#[path = "../tests/common/host.rs"]
mod example;

pub mod curves;
pub mod daemon;
pub mod decision;
pub mod heatmap;
pub mod history;
pub mod host;
pub mod managed;
pub mod plan;
pub mod promises;
pub mod rightsize;
pub mod trace;
pub mod tracing;
pub mod vm;
pub mod words;
pub mod working_set;
