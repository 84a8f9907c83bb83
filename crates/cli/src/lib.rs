//! The command line of Plimsoll: one file per verb, and what verbs share.
//!
//! Each verb is a module with its `Args` and `run(&Args, &mut dyn Write)`, which
//! writes to the output it is handed, so that tests can read it. The program
//! `plimsoll` is only the table of verbs.
//!
//! Not here: any algorithm. A verb joins a source to an estimator and draws
//! what comes out.
#![forbid(unsafe_code)]

pub mod attach;
pub mod disk;
pub mod doctor;
pub mod generate;
pub mod hcache;
pub mod lab;
pub mod live;
pub mod mrc;
pub mod page_log;
pub mod plan;
pub mod run;
pub mod stat;
pub mod trace;
pub mod trace_args;
pub mod watch;
pub mod wss;

pub use plimsoll_protocol::{curve_json, openmetrics, size};
