//! The servers that keep pages for virtual machines, as programs: a VM's disks with a cache under
//! them, and a page store that processes share.
//!
//! | module | content |
//! |---|---|
//! | [`disk`] | vhost-user disks of one VM: options, admin socket, miss-ratio curve, report, metrics |
//! | [`launch`] | QEMU's command line over such disks, and the disk daemon as its companion |
//! | [`hcache`] | page store: options, hit-ratio prediction for each client, report, metrics |
//!
//! A server's report is one type, which the server writes and the verbs read. Each server also feeds
//! a ghost list with what its clients evict and request, from which it predicts other sizes.
//!
//! Not here: the data paths (crates `disk`, `hcache`, `ring`) and the verbs that query a running
//! server (crate `cli`).
#![forbid(unsafe_code)]

pub mod disk;
pub mod hcache;
pub mod launch;

mod descriptors;
mod host_memory;
mod oom_score;
mod prediction;
mod socket_mode;
