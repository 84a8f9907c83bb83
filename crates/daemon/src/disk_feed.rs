//! Misses and curve of a VM's disk: a thread that periodically queries the disk daemon.

use std::collections::VecDeque;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use plimsoll_actuator::ask_disk_daemon;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::disk_admin::Request;
use plimsoll_protocol::vm::CurveSource;
use plimsoll_vm::PeerSocket;

use crate::clock::Clock;
use crate::host::{Feed, FeedReport, ObservedCurve};

/// Longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Age after which a curve that could not be renewed is discarded.
const STALE: Duration = Duration::from_mins(1);
/// Time over which the use of vCPUs is averaged.
const VCPUS_WINDOW: Duration = Duration::from_mins(10);

/// Queries a disk daemon for its curve.
#[derive(Debug)]
pub struct DiskFeed {
    read: Arc<Mutex<Read>>,
    /// Ends the thread when dropped.
    _end: Option<Sender<()>>,
}

#[derive(Debug, Default)]
struct Read {
    curve: Option<ObservedCurve>,
    /// Time of the last answer, since boot.
    answered: Duration,
    error: Option<String>,
}

/// The vCPU time of the last minutes: about those of the disk daemon's counts.
#[derive(Debug, Default)]
struct VcpuMeter(VecDeque<(Duration, Duration)>);

impl VcpuMeter {
    /// vCPU seconds per second up to now, by the times since boot and of the vCPUs; `None` if that is not known.
    fn read(&mut self, now: Duration, used: Option<Duration>) -> Option<f64> {
        let Some(used) = used else {
            self.0.clear();
            return None;
        };
        while let Some((at, _)) = self.0.front()
            && now.saturating_sub(*at) > VCPUS_WINDOW
        {
            self.0.pop_front();
        }
        self.0.push_back((now, used));
        let (began, before) = self.0.front()?;
        let seconds = now.saturating_sub(*began).as_secs_f64();
        (seconds > 0.0).then(|| used.saturating_sub(*before).as_secs_f64() / seconds)
    }
}

impl DiskFeed {
    /// Queries the daemon at `socket` once per `interval`; `clock` measures the age of answers, `vcpu_time` is the CPU time
    /// that the VM's vCPUs have used.
    pub fn new(
        socket: PeerSocket,
        interval: Duration,
        clock: Clock,
        mut vcpu_time: impl FnMut() -> Option<Duration> + Send + 'static,
    ) -> Self {
        let read = Arc::new(Mutex::new(Read::default()));
        let mut vcpus = VcpuMeter::default();
        let (end, ended) = mpsc::channel();
        let its = Arc::clone(&read);
        let ask = move || {
            loop {
                let answer =
                    ask_disk_daemon::<Option<CurveJson>>(&socket, Request::Curve, ANSWER_MAX);
                let vcpus = vcpus.read(clock.now().since_boot, vcpu_time());
                let mut read = its.lock().unwrap_or_else(PoisonError::into_inner);
                match answer {
                    // Its counts restart when the guest's memory changes: earlier values are no longer valid.
                    Ok((curve, _)) => {
                        read.answered = clock.now().since_boot;
                        let observed = |curve| ObservedCurve::read(curve, read.answered);
                        let curve = curve.as_ref().map(observed).transpose();
                        read.error = curve
                            .as_ref()
                            .err()
                            .map(|why| format!("invalid curve: {why}"));
                        read.curve = curve.ok().flatten();
                        if let Some(observed) = &mut read.curve {
                            observed.curve = observed.curve.clone().with_vcpus(vcpus);
                        }
                    }
                    Err(error) => {
                        read.error = Some(error.to_string());
                        let age = clock.now().since_boot.saturating_sub(read.answered);
                        if age > STALE {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, PageSize};
    use plimsoll_protocol::SCHEMA;
    use plimsoll_protocol::curve_json::CurveJson;
    use plimsoll_vm::{AllowedUsers, Listener};

    use crate::clock::Time;

    /// A clock whose seconds since boot and whose time of day are set apart from each other.
    fn set_clock() -> (Clock, Arc<AtomicU64>, Arc<AtomicU64>) {
        let (boot_s, unix_ms) = (
            Arc::new(AtomicU64::new(1000)),
            Arc::new(AtomicU64::new(1 << 40)),
        );
        let (boot, unix) = (Arc::clone(&boot_s), Arc::clone(&unix_ms));
        let clock = Clock::new(move || Time {
            since_boot: Duration::from_secs(boot.load(Ordering::SeqCst)),
            unix_ms: unix.load(Ordering::SeqCst),
        });
        (clock, boot_s, unix_ms)
    }

    fn until(feed: &mut DiskFeed, what: &str, is: impl Fn(&FeedReport) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is(&feed.seen()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", feed.seen());
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn the_use_of_vcpus_is_that_of_the_last_minutes() {
        let mut meter = VcpuMeter::default();
        let mut read = |minute: u64, used_s: u64| {
            let now = Duration::from_mins(minute);
            meter.read(now, Some(Duration::from_secs(used_s)))
        };
        assert_eq!(read(100, 7), None);
        assert_eq!(read(105, 607), Some(2.0));
        assert_eq!(read(110, 907), Some(1.5));
        assert_eq!(read(115, 907), Some(0.5));
        assert_eq!(meter.read(Duration::from_mins(116), None), None);
    }

    #[test]
    fn a_step_of_the_time_of_day_keeps_no_curve_and_drops_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let curve = MissRatioCurve::new(vec![CurvePoint::exact(PageCount(2), 0.5)], 9).unwrap();
        let curve = CurveJson::new("a", PageSize::FOUR_KIB, None, &curve);
        let answer = serde_json::json!({ "schema": SCHEMA, "result": curve });
        thread::spawn(move || {
            // Its first client is the last one that it answers.
            let (mut stream, _) = listener.accept().unwrap();
            BufReader::new(&stream)
                .read_line(&mut String::new())
                .unwrap();
            writeln!(stream, "{answer}").unwrap();
        });
        let (clock, boot_s, unix_ms) = set_clock();
        let socket = PeerSocket {
            path: path.clone(),
            root: None,
            listener: Listener::Users(AllowedUsers::default()),
        };
        let mut feed = DiskFeed::new(socket, Duration::from_millis(10), clock, || None);
        until(&mut feed, "the curve", |seen| seen.curve.is_some());
        fs::remove_file(&path).unwrap();
        until(&mut feed, "the error", |seen| seen.warning.is_some());
        // An hour ahead: no second has passed.
        unix_ms.fetch_add(3_600_000, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(100));
        assert!(feed.seen().curve.is_some());
        // Two hours back, while the curve ages.
        unix_ms.fetch_sub(7_200_000, Ordering::SeqCst);
        boot_s.fetch_add(61, Ordering::SeqCst);
        until(&mut feed, "no curve", |seen| seen.curve.is_none());
    }
}
