//! The cache under a VM's disk, through the admin socket of its daemon.

use std::path::PathBuf;
use std::time::Duration;

use plimsoll_flow::VmId;
use plimsoll_protocol::disk_admin::{self, DiskAdminError};

use crate::endpoints::{ActuatorRow, Role};
use crate::progress::Part;
use crate::resize::BackgroundResize;
use crate::{ActuatorError, MemoryPart, Observation, Sent};

pub(crate) static ROW: ActuatorRow = ActuatorRow {
    name: "disk cache",
    summary: "the cache under the VM's disk, through its daemon's admin socket",
    role: Role::Cache,
    open: |endpoints| {
        let socket = endpoints.disk_admin.clone();
        Ok(socket
            .map(|socket| Box::new(DiskCache::new(&endpoints.vm, socket, endpoints.timeout)) as _))
    },
};

/// Longest resize: the daemon waits up to 10 s for dirty pages in its way.
const RESIZE_MAX: Duration = Duration::from_secs(15);

/// The cache under a VM's disk. A smaller capacity holds once the daemon confirms it; a larger one fills as the guest reads.
#[derive(Debug)]
pub struct DiskCache {
    what: String,
    socket: PathBuf,
    timeout: Duration,
    resize: BackgroundResize,
}

impl DiskCache {
    /// The cache of a VM whose daemon listens at `socket`; a query takes at most `timeout`. Nothing is sent yet.
    #[must_use]
    pub fn new(vm: &VmId, socket: PathBuf, timeout: Duration) -> Self {
        Self {
            what: format!("the cache under the disk of VM {vm}"),
            socket,
            timeout,
            resize: BackgroundResize::new(),
        }
    }
}

impl MemoryPart for DiskCache {
    fn poll(&mut self, failures: &mut Vec<ActuatorError>) -> Observation {
        failures.extend(self.resize.settle());
        let disk = match disk_admin::stat(&self.socket, self.timeout) {
            Ok(stat) => {
                self.resize.see(stat.cache_bytes);
                Some(stat)
            }
            Err(source) => {
                failures.push(ActuatorError::Query {
                    what: self.what.clone(),
                    source: source.into(),
                });
                None
            }
        };
        Observation { disk, guest: None }
    }

    fn part(&self) -> Part {
        self.resize.part(None)
    }

    /// Starts the resize; a later poll reports its outcome, at most 15 s later.
    fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        let (socket, what) = (self.socket.clone(), self.what.clone());
        let resize = move || {
            let resized = disk_admin::resize(&socket, target_bytes, RESIZE_MAX);
            resized.map_err(|source| ActuatorError::Set {
                what,
                target_bytes,
                sent: match source {
                    DiskAdminError::Unreachable { .. } | DiskAdminError::Refused { .. } => Sent::No,
                    _ => Sent::Maybe,
                },
                source: source.into(),
            })
        };
        self.resize.begin(&self.what, target_bytes, resize)
    }
}
