//! The host's hcache: a store that all its clients share, so its capacity belongs to no VM.

use std::path::PathBuf;
use std::time::Duration;

use plimsoll_ring::Error;
use serde_json::Value;

use crate::follow::Part;
use crate::resizing::Resizing;
use crate::{ActuatorError, Sent};

/// Longest resize: pages are dropped and others moved before it is done.
const RESIZE_MAX: Duration = Duration::from_secs(60);

/// The host's hcache.
#[derive(Debug)]
pub struct HcacheStore {
    what: String,
    socket: PathBuf,
    timeout: Duration,
    max_bytes: Option<u64>,
    resizing: Resizing,
}

impl HcacheStore {
    /// The store whose server listens at `socket`, and answers a question within `timeout`. Nothing is asked yet.
    #[must_use]
    pub fn new(socket: PathBuf, timeout: Duration) -> Self {
        Self {
            what: format!("hcache at {}", socket.display()),
            socket,
            timeout,
            max_bytes: None,
            resizing: Resizing::new(),
        }
    }

    /// Begins to set the capacity; [`look`](Self::look) tells what came of it, at most a minute later.
    ///
    /// # Errors
    ///
    /// [`ActuatorError::Busy`]; [`ActuatorError::Set`] if no thread could be started.
    pub fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        let (socket, what) = (self.socket.clone(), self.what.clone());
        let resize = move || {
            plimsoll_ring::resize(&socket, target_bytes, RESIZE_MAX).map_err(|source| {
                ActuatorError::Set {
                    what,
                    target_bytes,
                    sent: match source {
                        Error::Unreachable { .. } | Error::Refused { .. } => Sent::No,
                        _ => Sent::Maybe,
                    },
                    source: source.into(),
                }
            })
        };
        self.resizing.begin(&self.what, target_bytes, resize)
    }

    /// Asks the server for its capacity. What a resize came to, if it failed, is told with what else went wrong.
    pub fn look(&mut self) -> Vec<ActuatorError> {
        let mut failures: Vec<_> = self.resizing.settle().into_iter().collect();
        if let Err(source) = self.ask() {
            failures.push(ActuatorError::Ask {
                what: self.what.clone(),
                source,
            });
        }
        failures
    }

    /// What is known, by the last look.
    #[must_use]
    pub fn part(&self) -> Part {
        self.resizing.part(self.max_bytes)
    }

    fn ask(&mut self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let text = plimsoll_ring::stats(&self.socket, self.timeout)?;
        let report: Value = serde_json::from_str(&text)?;
        let store = &report["store"];
        let capacity_bytes = store["capacity_bytes"].as_u64();
        let capacity_bytes = capacity_bytes.ok_or("its statistics do not say how large it is")?;
        self.max_bytes = store["max_capacity_bytes"].as_u64();
        self.resizing.see(capacity_bytes);
        Ok(())
    }
}
