//! The host's hcache: a page store that all its clients share, so that its capacity is not attributed to any VM.

use std::path::PathBuf;
use std::time::Duration;

use plimsoll_ring::Error;
use plimsoll_vm::HostMemory;
use serde_json::Value;

use crate::endpoints::{ActuatorRow, Role};
use crate::progress::Part;
use crate::resize::BackgroundResize;
use crate::{ActuatorError, Delivery, MemoryPart, Observation};

pub(crate) static ROW: ActuatorRow = ActuatorRow {
    name: "hcache",
    summary: "the capacity of the host's page store, which belongs to no VM",
    role: Role::Store,
    open: |endpoints| {
        let socket = endpoints.hcache.clone();
        Ok(socket.map(|socket| Box::new(HcacheStore::new(socket, endpoints.timeout)) as _))
    },
};

/// Time limit of a resize: pages are dropped and others moved before it completes.
const RESIZE_MAX: Duration = Duration::from_secs(60);

/// The host's hcache.
#[derive(Debug)]
pub struct HcacheStore {
    what: String,
    socket: PathBuf,
    timeout: Duration,
    max_bytes: Option<u64>,
    resize: BackgroundResize,
}

impl HcacheStore {
    /// The store whose server listens at `socket`; a query takes at most `timeout`. Sends nothing yet.
    pub fn new(socket: PathBuf, timeout: Duration) -> Self {
        Self {
            what: format!("hcache at {}", socket.display()),
            socket,
            timeout,
            max_bytes: None,
            resize: BackgroundResize::new(),
        }
    }

    fn query(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let text = plimsoll_ring::stats(&self.socket, self.timeout)?;
        let report: Value = serde_json::from_str(&text)?;
        let store = &report["store"];
        let capacity_bytes = store["capacity_bytes"].as_u64();
        let capacity_bytes = capacity_bytes.ok_or("its statistics have no capacity_bytes")?;
        let host_bytes = HostMemory::read()?.total_bytes;
        if capacity_bytes > host_bytes {
            let what = "its statistics are refused: a capacity of";
            return Err(format!("{what} {capacity_bytes} bytes, the host has {host_bytes}").into());
        }
        self.max_bytes = store["max_capacity_bytes"].as_u64();
        self.resize.see(capacity_bytes);
        Ok(())
    }
}

impl MemoryPart for HcacheStore {
    fn poll(&mut self, failures: &mut Vec<ActuatorError>) -> Observation {
        failures.extend(self.resize.settle());
        if let Err(source) = self.query() {
            failures.push(ActuatorError::Query {
                what: self.what.clone(),
                source,
            });
        }
        Observation::default()
    }

    fn part(&self) -> Part {
        self.resize.part(self.max_bytes)
    }

    /// Starts the resize; a later poll reports its outcome, at most a minute later.
    fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        let (socket, what) = (self.socket.clone(), self.what.clone());
        let resize = move || {
            plimsoll_ring::resize(&socket, target_bytes, RESIZE_MAX).map_err(|source| {
                ActuatorError::Set {
                    what,
                    target_bytes,
                    sent: match source {
                        Error::Unreachable { .. } | Error::Refused { .. } => Delivery::No,
                        _ => Delivery::Maybe,
                    },
                    source: source.into(),
                }
            })
        };
        self.resize.begin(&self.what, target_bytes, resize)
    }
}
