//! The cache under a VM's disk, through the admin socket of its daemon.

use std::time::{Duration, Instant};

use plimsoll_flow::VmId;
use plimsoll_protocol::disk_admin::{DiskAdminError, DiskStat, Request, ask_over};
use plimsoll_vm::{HostMemory, PeerSocket, ProcessId};
use serde::de::DeserializeOwned;

use crate::endpoints::{ActuatorRow, Role};
use crate::progress::Part;
use crate::resize::BackgroundResize;
use crate::{ActuatorError, Delivery, MemoryPart, Observation};

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

/// Time limit of a query: a turn may wait for the VM's monitor as well.
const QUERY_MAX: Duration = Duration::from_millis(700);
/// Time limit of a resize: a daemon returns many GiB in steps, between which it serves its disks.
const RESIZE_MAX: Duration = Duration::from_secs(15);

/// Sends a request to the daemon that listens at `socket`, if its peer is permitted; returns answer and process.
///
/// # Errors
///
/// See [`DiskAdminError`]; [`DiskAdminError::Unreachable`] also if another process listens.
pub fn ask_disk_daemon<T: DeserializeOwned>(
    socket: &PeerSocket,
    request: Request,
    timeout: Duration,
) -> Result<(T, ProcessId), DiskAdminError> {
    let deadline = Instant::now() + timeout;
    let connected = socket.connect(timeout);
    let (stream, process) = connected.map_err(|source| DiskAdminError::Unreachable {
        socket: socket.path.clone(),
        source,
    })?;
    let answer = ask_over(stream, &socket.path, request, deadline)?;
    Ok((answer, process))
}

/// Upper bound on the cache of this process: it reserves the address space of its largest capacity, and no cache is
/// larger than the host's RAM.
fn cache_bytes_max(process: ProcessId) -> u64 {
    let host_bytes = HostMemory::read().map_or(u64::MAX, |memory| memory.total_bytes);
    host_bytes.min(process.mapped_bytes().unwrap_or(0))
}

/// The cache under a VM's disk. A reduced capacity is in force once the daemon confirms it; an increased one fills as
/// the guest reads.
#[derive(Debug)]
pub struct DiskCache {
    what: String,
    socket: PeerSocket,
    timeout: Duration,
    resize: BackgroundResize,
}

impl DiskCache {
    /// The cache of a VM whose daemon listens at `socket`. A query takes at most `timeout`, and at most 700 ms. Sends
    /// nothing yet.
    pub fn new(vm: &VmId, socket: PeerSocket, timeout: Duration) -> Self {
        Self {
            what: format!("the cache under the disk of VM {vm}"),
            socket,
            timeout: timeout.min(QUERY_MAX),
            resize: BackgroundResize::new(),
        }
    }
}

impl DiskCache {
    fn query(&self) -> Result<DiskStat, ActuatorError> {
        let answer = ask_disk_daemon::<DiskStat>(&self.socket, Request::Stat, self.timeout);
        let (stat, process) = answer.map_err(|source| ActuatorError::Query {
            what: self.what.clone(),
            source: source.into(),
        })?;
        let limit_bytes = cache_bytes_max(process);
        if stat.cache_bytes > limit_bytes {
            return Err(ActuatorError::Claim {
                what: self.what.clone(),
                claimed_bytes: stat.cache_bytes,
                limit_bytes,
            });
        }
        Ok(stat)
    }
}

impl MemoryPart for DiskCache {
    fn poll(&mut self, failures: &mut Vec<ActuatorError>) -> Observation {
        failures.extend(self.resize.settle());
        let disk = match self.query() {
            Ok(stat) => {
                self.resize.see(stat.cache_bytes);
                Some(stat)
            }
            Err(error) => {
                failures.push(error);
                None
            }
        };
        Observation {
            disk,
            ..Observation::default()
        }
    }

    fn part(&self) -> Part {
        self.resize.part(None)
    }

    /// Starts the resize; a later poll reports its outcome, at most 15 s later.
    fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        let (socket, what) = (self.socket.clone(), self.what.clone());
        let resize = move || {
            let request = Request::Resize {
                cache_bytes: target_bytes,
            };
            let resized = ask_disk_daemon::<()>(&socket, request, RESIZE_MAX);
            resized.map(drop).map_err(|source| ActuatorError::Set {
                what,
                target_bytes,
                sent: match source {
                    DiskAdminError::Unreachable { .. } | DiskAdminError::Refused { .. } => {
                        Delivery::No
                    }
                    _ => Delivery::Maybe,
                },
                source: source.into(),
            })
        };
        self.resize.begin(&self.what, target_bytes, resize)
    }
}
