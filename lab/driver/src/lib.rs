//! A virtual machine's side of its disks, without the machine: a driver of vhost-user-blk devices in user space.
//!
//! It provides RAM and virtqueues to a daemon as QEMU does, keeps the region of requests in flight over the daemon's
//! death, and can violate the rules that every correct guest follows. It also implements the part of the guest's
//! module: a ring of notifications and the control disk (`guest/module/plimsoll_protocol.h`).
//!
//! For tests and benchmarks. Addresses and indices given to it are asserted; the daemon's messages are not trusted.
#![forbid(unsafe_code)]

mod config;
mod control;
mod driver;
mod error;
mod notices;
mod ram;
mod virtqueue;

pub use config::Config;
pub use control::{ControlDisk, OptionalPages};
pub use driver::{Driver, DriverOptions};
pub use error::FrontendError;
pub use notices::{NoticeRing, Record, RingOptions};
pub use ram::{Bank, PAGE_BYTES, Page, Ram, RamOptions};
pub use virtqueue::{Completion, Descriptor, Request, Segment, Status, Virtqueue};
