//! plimsolld on real guests, as operators run it: what it sees, what it moves, and what faults leave behind.
//!
//! Every test runs in a process table of its own, so that its daemon finds its guests and no others: the VMs of the
//! machine that tests are never traced or moved. Most run one at a time, whatever the number of test threads, and they print
//! SKIPPED where there is nothing to boot. A test that fails shows what its daemon logged.
#![forbid(unsafe_code)]

mod acting;
mod caches;
mod faults;
mod hostile;
mod migrating;
mod monitors;
mod observing;
mod rig;
mod starts;
mod starving;
