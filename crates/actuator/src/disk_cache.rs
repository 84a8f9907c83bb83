//! The cache under a VM's disk, by the admin socket of its daemon.

use std::path::PathBuf;
use std::time::Duration;

use plimsoll_flow::VmId;
use plimsoll_protocol::disk_admin::{self, DiskAdminError, DiskStat};

use crate::follow::Part;
use crate::resizing::Resizing;
use crate::{ActuatorError, Sent};

/// Longest resize: the daemon waits up to 10 s for dirty pages in its way.
const RESIZE_MAX: Duration = Duration::from_secs(15);

/// The cache under a VM's disk. A smaller capacity holds when the daemon says so; a larger one is filled by the guest.
#[derive(Debug)]
pub struct DiskCache {
    what: String,
    socket: PathBuf,
    timeout: Duration,
    resizing: Resizing,
}

impl DiskCache {
    /// The cache of a VM whose daemon listens at `socket`, and answers a question within `timeout`. Nothing is asked yet.
    #[must_use]
    pub fn new(vm: &VmId, socket: PathBuf, timeout: Duration) -> Self {
        Self {
            what: format!("the cache under the disk of VM {vm}"),
            socket,
            timeout,
            resizing: Resizing::new(),
        }
    }

    /// Begins to set the capacity; [`look`](Self::look) tells what came of it, at most 15 s later.
    ///
    /// # Errors
    ///
    /// [`ActuatorError::Busy`]; [`ActuatorError::Set`] if no thread could be started.
    pub fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
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
        self.resizing.begin(&self.what, target_bytes, resize)
    }

    /// Asks the daemon how it does. What a resize came to, if it failed, is added to `failures`, and so is why the daemon
    /// cannot be asked: then `None`.
    pub fn look(&mut self, failures: &mut Vec<ActuatorError>) -> Option<DiskStat> {
        failures.extend(self.resizing.settle());
        match disk_admin::stat(&self.socket, self.timeout) {
            Ok(stat) => {
                self.resizing.see(stat.cache_bytes);
                Some(stat)
            }
            Err(source) => {
                failures.push(ActuatorError::Ask {
                    what: self.what.clone(),
                    source: source.into(),
                });
                None
            }
        }
    }

    /// What is known, by the last look.
    #[must_use]
    pub fn part(&self) -> Part {
        self.resizing.part(None)
    }
}
