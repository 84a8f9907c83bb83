//! How many descriptors a server may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of open descriptors to its maximum: each queue of a disk takes three, each client of a store two. Returns
/// how many may be open, `None` for no limit.
pub(crate) fn allow_descriptors() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    // If that is refused, the earlier limit holds.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    );
    getrlimit(Resource::Nofile).current
}
