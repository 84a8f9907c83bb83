//! `plimsolld`: the control loop, in which all stages meet.
//!
//! ```text
//! tracers (children) ─┐                                   ┌─> actuators (QMP, disk daemons, libvirt)
//! disk daemons ───────┼─> turn loop: curves ─> policy ────┤
//! /proc, libvirt ─────┘     │        ▲                    └─> check, roll back
//!                        snapshot  commands
//!                           ▼        │
//!                    HTTP: REST, metrics, page          history (redb)
//! ```
#![forbid(unsafe_code)]

mod background;
pub mod clock;
pub mod config;
pub mod demand;
pub mod discovery;
mod disk_feed;
pub mod groups;
pub mod guard;
pub mod history;
pub mod host;
pub mod http;
pub mod judgement;
pub mod log;
pub mod miss_cost;
pub mod moves;
pub mod observed;
mod polls;
pub mod qemu_host;
pub mod rightsize;
pub mod shared;
pub mod tracer;
pub mod turn;
pub mod vm;

/// Lets the example host of the unit tests refer to types by the crate's name, as its other users do.
#[cfg(test)]
extern crate self as plimsoll_daemon;
