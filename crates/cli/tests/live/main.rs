//! Running VMs, traced by the program as users run it: what is found, and what is left behind.
//!
//! Every test boots guests of its own under QEMU and says SKIPPED where none can be traced. The
//! guests verify their memory as they go, so a page that tracing spoilt is told by the guest
//! itself. Tests that measure run one at a time, the others two, whatever the number of test threads.
#![forbid(unsafe_code)]

mod assessments;
mod bare;
mod baselines;
mod clock;
mod device_filter;
mod endings;
mod findings;
mod first_touch;
mod hostile;
mod libvirt;
mod limits;
mod migrate;
mod misses;
mod nemeses;
mod nemesis;
mod refusals;
mod rig;
mod scans;
