//! Misses and curve of a VM's disk: a thread that periodically queries the disk daemon.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use plimsoll_actuator::ask_disk_daemon;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::disk_admin::Request;
use plimsoll_protocol::vm::CurveSource;
use plimsoll_vm::PeerSocket;

use crate::clock::unix_ms;
use crate::host::{Feed, FeedReport, ObservedCurve};

/// Longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Age after which a curve that could not be renewed is discarded.
const STALE_MS: u64 = 60_000;

/// Asks a disk daemon for its curve.
#[derive(Debug)]
pub struct DiskFeed {
    read: Arc<Mutex<Read>>,
    /// Dropped, the thread ends.
    _end: Option<Sender<()>>,
}

#[derive(Debug, Default)]
struct Read {
    curve: Option<ObservedCurve>,
    error: Option<String>,
}

impl DiskFeed {
    /// Asks at `socket` from one `interval` to the next.
    #[must_use]
    pub fn new(socket: PeerSocket, interval: Duration) -> Self {
        let read = Arc::new(Mutex::new(Read::default()));
        let (end, ended) = mpsc::channel();
        let its = Arc::clone(&read);
        let ask = move || {
            loop {
                let answer =
                    ask_disk_daemon::<Option<CurveJson>>(&socket, Request::Curve, ANSWER_MAX);
                let mut read = its.lock().unwrap_or_else(PoisonError::into_inner);
                match answer {
                    // Its counts begin anew when the guest's memory changes: what was true before is not any more.
                    Ok((curve, _)) => {
                        let curve = curve.as_ref().map(ObservedCurve::read).transpose();
                        read.error = curve
                            .as_ref()
                            .err()
                            .map(|why| format!("invalid curve: {why}"));
                        read.curve = curve.ok().flatten();
                    }
                    Err(error) => {
                        read.error = Some(error.to_string());
                        let stale = |curve: &ObservedCurve| {
                            unix_ms().saturating_sub(curve.unix_ms) > STALE_MS
                        };
                        if read.curve.as_ref().is_some_and(stale) {
                            read.curve = None;
                        }
                    }
                }
                drop(read);
                if ended.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("disk-feed".into()).spawn(ask);
        if let Err(error) = thread {
            let mut read = read.lock().unwrap_or_else(PoisonError::into_inner);
            read.error = Some(format!("no thread could be started: {error}"));
        }
        Self {
            read,
            _end: Some(end),
        }
    }
}

impl Feed for DiskFeed {
    fn source(&self) -> CurveSource {
        CurveSource::Disk
    }

    fn seen(&mut self) -> FeedReport {
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        FeedReport {
            curve: read.curve.clone(),
            warning: read.error.clone(),
            ..FeedReport::default()
        }
    }

    fn forget(&mut self) {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.curve = None;
    }
}
