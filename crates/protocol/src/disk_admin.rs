//! Client of the admin socket of a disk daemon.
//!
//! A request and its answer are lines of JSON; [`Request`] lists the requests. The server is `plimsoll disk serve`.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::curve_json::{CurveJson, SCHEMA};
use crate::of_another_version;

/// Limit on the size of an answer: far above that of a curve of 10,000 points.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// A request to the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Request {
    /// Return statistics of the VM's disks.
    Stat,
    /// Return the curve.
    Curve,
    /// Change the memory of the cache.
    Resize {
        /// The new size in bytes.
        cache_bytes: u64,
    },
    /// Enable a cache that has disabled itself.
    Enable,
}

impl Request {
    /// Whether it changes anything; the others are queries.
    pub fn changes(self) -> bool {
        match self {
            Self::Stat | Self::Curve => false,
            Self::Resize { .. } | Self::Enable => true,
        }
    }
}

/// An answer as it is transmitted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Why there is no result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The requested data.
    #[serde(default)]
    pub result: Value,
}

/// Why a daemon did not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskAdminError {
    /// No server answers; nothing was requested that [changes](Request::changes) anything.
    #[error("no disk daemon answers at {}", socket.display())]
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// No answer to a change in time, or the connection broke: it may or may not have been carried out.
    #[error("no disk daemon answers at {}: the request may or may not have been carried out", socket.display())]
    Unanswered {
        /// The socket.
        socket: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The daemon refused; nothing was changed.
    #[error("the daemon refuses: {why}")]
    Refused {
        /// The daemon's message.
        why: String,
    },
    /// The answer could not be parsed: a change may or may not have been carried out.
    #[error("unexpected answer of the daemon: {what}")]
    Unknown {
        /// The error.
        what: String,
    },
}

/// Sends a request to a daemon and returns its answer; takes at most `timeout`.
///
/// # Errors
///
/// See [`DiskAdminError`].
pub fn ask<T: DeserializeOwned>(
    socket: &Path,
    request: Request,
    timeout: Duration,
) -> Result<T, DiskAdminError> {
    let deadline = Instant::now() + timeout;
    let stream = connect_within(socket, timeout).map_err(|source| DiskAdminError::Unreachable {
        socket: socket.to_owned(),
        source,
    })?;
    ask_over(stream, socket, request, deadline)
}

/// Sends a request over a connection that was opened at `socket`, and returns the answer; waits until `deadline`.
///
/// # Errors
///
/// See [`DiskAdminError`].
pub fn ask_over<T: DeserializeOwned>(
    mut stream: UnixStream,
    socket: &Path,
    request: Request,
    deadline: Instant,
) -> Result<T, DiskAdminError> {
    let unknown = |error: serde_json::Error| DiskAdminError::Unknown {
        what: error.to_string(),
    };
    let mut line = serde_json::to_vec(&request).map_err(unknown)?;
    line.push(b'\n');
    // If the daemon refuses a client at once, the connection may already be closed, with the reason still to be read.
    let left = deadline.saturating_duration_since(Instant::now());
    let _ = stream.set_write_timeout(Some(left.max(Duration::from_millis(1))));
    let _ = stream.write_all(&line);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let text = receive(&mut stream, deadline).map_err(|source| {
        let socket = socket.to_owned();
        match request.changes() {
            true => DiskAdminError::Unanswered { socket, source },
            false => DiskAdminError::Unreachable { socket, source },
        }
    })?;
    let answer: Answer = serde_json::from_slice(&text).map_err(unknown)?;
    if answer.schema != SCHEMA {
        return Err(DiskAdminError::Unknown {
            what: format!("schema {}, known is {SCHEMA}", answer.schema),
        });
    }
    match answer.error {
        Some(why) => Err(DiskAdminError::Refused { why }),
        // A daemon runs as long as its VM, so also those of earlier versions are asked.
        None => serde_json::from_value(answer.result).map_err(|error| DiskAdminError::Unknown {
            what: of_another_version(&error.to_string()),
        }),
    }
}

/// Queries a daemon's state and counters.
///
/// # Errors
///
/// See [`DiskAdminError`].
pub fn stat(socket: &Path, timeout: Duration) -> Result<DiskStat, DiskAdminError> {
    ask(socket, Request::Stat, timeout)
}

/// Queries the curve of a daemon; `None` if there is none (yet).
///
/// # Errors
///
/// See [`DiskAdminError`].
pub fn curve(socket: &Path, timeout: Duration) -> Result<Option<CurveJson>, DiskAdminError> {
    ask(socket, Request::Curve, timeout)
}

/// Changes the memory of a daemon's cache; complete when this returns, after seconds if many GiB are returned.
///
/// # Errors
///
/// See [`DiskAdminError`].
pub fn resize(socket: &Path, cache_bytes: u64, timeout: Duration) -> Result<(), DiskAdminError> {
    ask(socket, Request::Resize { cache_bytes }, timeout)
}

/// The fields of a daemon's report that are needed to observe and move a VM's memory. Counts start with the daemon;
/// pages and blocks are 4 KiB. A report without one of them is refused, because a missing counter must not read as 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "Report")]
pub struct DiskStat {
    /// Memory that the guest's kernel manages, in pages, as reported by its module; 0 if unknown.
    pub direct_pages: u64,
    /// Maximum size of the cache in bytes.
    pub cache_bytes: u64,
    /// Pages in the cache.
    pub cached_pages: u64,
    /// Why the cache has disabled itself, if it has.
    pub disabled: Option<String>,
    /// Whole blocks read by the guest.
    pub read_blocks: u64,
    /// Of them, served from the cache.
    pub hits: u64,
    /// Whether the guest's driver uses all disks, and the control disk if there is one: not while the VM boots, and never again
    /// once QEMU has lost one (docs/disk.md, Limits).
    pub disks_used: bool,
    /// Time that reads of which blocks came from storage took, added up; `None` if the daemon does not measure it.
    pub read_wait_ns: Option<u64>,
}

/// The parts of a daemon's report that are used.
#[derive(Deserialize)]
struct Report {
    machine: Machine,
}

#[derive(Deserialize)]
struct Machine {
    engine: Engine,
    ring: Ring,
    #[serde(default)]
    disks: Vec<Disk>,
}

#[derive(Deserialize)]
struct Disk {
    #[serde(default)]
    queues: u32,
    read_wait_ns: Option<u64>,
}

#[derive(Deserialize)]
struct Engine {
    cache_bytes: u64,
    cached_pages: u64,
    disabled: Option<String>,
    read_blocks: u64,
    hits: u64,
}

#[derive(Deserialize)]
struct Ring {
    control_used: Option<bool>,
    guest_memory_pages: u64,
}

impl From<Report> for DiskStat {
    fn from(report: Report) -> Self {
        let Machine {
            engine,
            ring,
            disks,
        } = report.machine;
        let waits = disks.iter().map(|disk| disk.read_wait_ns);
        let waited = waits.reduce(|sum, wait| Some(sum?.saturating_add(wait?)));
        Self {
            direct_pages: ring.guest_memory_pages,
            cache_bytes: engine.cache_bytes,
            cached_pages: engine.cached_pages,
            disabled: engine.disabled,
            read_blocks: engine.read_blocks,
            hits: engine.hits,
            disks_used: ring.control_used != Some(false)
                && disks.iter().all(|disk| disk.queues > 0),
            read_wait_ns: waited.flatten(),
        }
    }
}

/// Connects, or returns [`io::ErrorKind::WouldBlock`] if that takes longer than `timeout`, because the daemon hangs.
fn connect_within(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // Zero would mean no limit.
    let timeout = timeout.max(Duration::from_millis(1));
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    connect(&socket, &address)?;
    Ok(socket.into())
}

/// Reads an answer up to its line end.
fn receive(stream: &mut UnixStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut bytes = [0; 16 << 10];
        match stream.read(&mut bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => text.extend_from_slice(&bytes[..read]),
            // The latter if no time is left.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) => {}
            Err(error) => return Err(error),
        }
        if text.ends_with(b"\n") {
            return Ok(text);
        }
        if text.len() > ANSWER_BYTES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("an answer has more than {ANSWER_BYTES_MAX} bytes"),
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::net::UnixListener;
    use std::thread;

    const TIMEOUT: Duration = Duration::from_secs(5);

    /// A daemon that sends `answer` to its only client, in two pieces, and then stops if that is not a complete line.
    fn daemon(answer: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("admin");
        let listener = UnixListener::bind(&socket).unwrap();
        let answer = answer.to_owned();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            BufReader::new(stream.try_clone().unwrap())
                .read_line(&mut String::new())
                .unwrap();
            let (first, rest) = answer.split_at(answer.len() / 2);
            stream.write_all(first.as_bytes()).unwrap();
            thread::sleep(Duration::from_millis(10));
            stream.write_all(rest.as_bytes()).unwrap();
            if !answer.ends_with('\n') && !answer.is_empty() {
                thread::sleep(TIMEOUT);
            }
        });
        (folder, socket)
    }

    fn told(answer: &str) -> Result<DiskStat, DiskAdminError> {
        let (_folder, socket) = daemon(answer);
        // One that does not end comes never.
        let patience = match answer.ends_with('\n') {
            true => TIMEOUT,
            false => Duration::from_millis(500),
        };
        stat(&socket, patience)
    }

    const REPORT: &str = "{\"schema\":1,\"new\":1,\"result\":{\"vm\":\"web\",\"machine\":{\"engine\":\
        {\"cache_bytes\":8192,\"cached_pages\":2,\"dirty_pages\":0,\"disabled\":null,\"read_blocks\":9,\"hits\":7,\
        \"colour\":[]},\"ring\":{\"lost\":3,\"guest_memory_pages\":9}}}}\n";

    #[test]
    fn unknown_fields_are_ignored_and_missing_counters_refused() {
        let expected = DiskStat {
            direct_pages: 9,
            cache_bytes: 8192,
            cached_pages: 2,
            read_blocks: 9,
            hits: 7,
            disks_used: true,
            ..DiskStat::default()
        };
        assert_eq!(told(REPORT).unwrap(), expected);
        for (part, with) in [
            ("\"lost\"", "\"control_used\":false,\"lost\""),
            (
                ",\"ring\"",
                ",\"disks\":[{\"queues\":1},{\"queues\":0}],\"ring\"",
            ),
        ] {
            let unused = REPORT.replace(part, with);
            assert!(!told(&unused).unwrap().disks_used, "{unused}");
        }
        for counter in ["hits", "cached_pages", "guest_memory_pages"] {
            let without = REPORT.replace(&format!("\"{counter}\""), "\"other\"");
            let error = told(&without).unwrap_err().to_string();
            assert!(
                error.contains(&format!("missing field `{counter}`")),
                "{error}"
            );
        }
    }

    #[test]
    fn what_is_no_answer_is_told_apart() {
        let engine = "{\"schema\":1,\"result\":{\"vm\":\"web\",\"machine\":{\"engine\":{\"cached_pages\":2}}}}\n";
        let message = |answer| told(answer).unwrap_err().to_string();
        assert!(message(engine).contains("missing field `cache_bytes`: this program has version"));
        assert!(message("{\"schema\":2,\"result\":null}\n").contains("schema 2, known is 1"));
        assert!(message("garbage\n").contains("unexpected answer"));
        let refused = "{\"schema\":1,\"error\":\"too large\"}\n";
        assert_eq!(message(refused), "the daemon refuses: too large");
        for cut_off in ["", "{\"schema\":1,"] {
            let (_folder, socket) = daemon(cut_off);
            let error = resize(&socket, 0, Duration::from_millis(500)).unwrap_err();
            assert!(
                error
                    .to_string()
                    .ends_with("may or may not have been carried out"),
                "{cut_off}: {error}"
            );
            // A query carries nothing out.
            let error = told(cut_off).unwrap_err();
            assert!(
                matches!(error, DiskAdminError::Unreachable { .. }),
                "{cut_off}: {error}"
            );
        }
        let nobody = stat(Path::new("/nonexistent"), TIMEOUT).unwrap_err();
        assert!(
            matches!(nobody, DiskAdminError::Unreachable { .. }),
            "{nobody}"
        );
    }

    #[test]
    fn a_daemon_that_accepts_nobody_does_not_keep_us() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("admin");
        let _listener = UnixListener::bind(&socket).unwrap();
        let mut waiting = Vec::new();
        while let Ok(stream) = connect_within(&socket, Duration::from_millis(1)) {
            waiting.push(stream);
        }
        let error = resize(&socket, 0, Duration::from_millis(20)).unwrap_err();
        assert!(
            matches!(error, DiskAdminError::Unreachable { .. }),
            "{error}"
        );
    }
}
