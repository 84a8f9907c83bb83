//! A store whose capacity is set by a call that may take seconds; the call runs in a thread of its own.

use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::Instant;

use crate::progress::{Part, Patience, Tracker};
use crate::{ActuatorError, Delivery};

/// Capacity of a store and its pending change.
#[derive(Debug)]
pub(crate) struct BackgroundResize {
    tracker: Tracker,
    running: Option<PendingCall>,
}

/// A call in progress.
#[derive(Debug)]
struct PendingCall {
    target_bytes: u64,
    ended: Receiver<Result<(), ActuatorError>>,
}

impl BackgroundResize {
    pub fn new() -> Self {
        Self {
            tracker: Tracker::new(Patience::default()),
            running: None,
        }
    }

    /// Starts a call; `what` is the name of the store.
    pub fn begin(
        &mut self,
        what: &str,
        target_bytes: u64,
        call: impl FnOnce() -> Result<(), ActuatorError> + Send + 'static,
    ) -> Result<(), ActuatorError> {
        if let Some(running) = &self.running {
            return Err(ActuatorError::Busy {
                what: what.to_owned(),
                target_bytes: running.target_bytes,
            });
        }
        let (end, ended) = channel();
        let run = move || drop(end.send(call()));
        thread::Builder::new()
            .name("resize".into())
            .spawn(run)
            .map_err(|source| ActuatorError::Set {
                what: what.to_owned(),
                target_bytes,
                sent: Delivery::No,
                source: source.into(),
            })?;
        self.running = Some(PendingCall {
            target_bytes,
            ended,
        });
        Ok(())
    }

    /// Records the outcome of a call that has ended; returns its error if it failed.
    pub fn settle(&mut self) -> Option<ActuatorError> {
        let running = self.running.take()?;
        let target_bytes = running.target_bytes;
        match running.ended.try_recv() {
            Err(TryRecvError::Empty) => {
                self.running = Some(running);
                None
            }
            Ok(Ok(())) => {
                self.tracker.tell(target_bytes, true, Instant::now());
                None
            }
            Ok(Err(error)) => {
                if error.sent() == Some(Delivery::Maybe) {
                    self.tracker.tell(target_bytes, false, Instant::now());
                }
                Some(error)
            }
            // The call does not panic; if it did, its effect would be unknown.
            Err(TryRecvError::Disconnected) => {
                self.tracker.tell(target_bytes, false, Instant::now());
                None
            }
        }
    }

    /// Records the capacity that the store reports.
    pub fn see(&mut self, capacity_bytes: u64) {
        self.tracker.see(capacity_bytes, Instant::now());
    }

    /// Size and progress at the last report.
    pub fn part(&self, max_bytes: Option<u64>) -> Part {
        let part = self.tracker.part(max_bytes, None, Instant::now());
        let Some(running) = &self.running else {
            return part;
        };
        // The call may already have completed.
        let target_bytes = running.target_bytes;
        Part {
            target_bytes: Some(target_bytes),
            in_doubt: true,
            reserved_bytes: part.reserved_bytes.max(target_bytes),
            progress: crate::Progress::Following {
                bytes_per_second: 0,
                left_bytes: part.actual_bytes.abs_diff(target_bytes),
            },
            ..part
        }
    }
}
