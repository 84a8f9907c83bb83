//! Guests on disks of `plimsoll disk serve`, as users run it: that what they read is right, whatever happens.
//!
//! Every test boots guests of its own under QEMU and says SKIPPED where it finds none to boot. The guests verify
//! every block they read, and the daemon (`--verify`) every page it serves from its cache. They run at most
//! two at a time, whatever the number of test threads.
#![forbid(unsafe_code)]

mod campaign;
mod contents;
mod crashes;
mod rig;
mod second_chance;
mod stress;
mod tracing;
mod user;
