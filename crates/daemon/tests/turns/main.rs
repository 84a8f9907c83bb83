//! The whole loop on a simulated host: decisions, moves, checks and rollbacks, and the state after faults.

mod checks;
mod dividing;
mod faults;
mod groups;
mod guests;
mod kept;
mod moves;
#[allow(dead_code, reason = "each test uses its part")]
#[path = "../common/rig.rs"]
mod rig;
mod self_ballooning;
#[allow(dead_code, reason = "shared with the benchmarks")]
#[path = "../common/simulated.rs"]
mod simulated;
mod sizes;
