//! The admin socket of a disk server, both sides: lines of JSON, a request and its answer.
//!
//! | request | result |
//! |---|---|
//! | `{"command":"stat"}` | a [`Report`] |
//! | `{"command":"curve"}` | the curve as of `mrc -o json`; `null` if there is none |
//! | `{"command":"resize","cache_bytes":N}` | `null`; the cache then takes no more |
//! | `{"command":"enable"}` | `null`; a cache that switched itself off restarts, empty |
//!
//! An answer is `{"schema":1,"result":R}` or `{"schema":1,"error":"why","result":null}`, and either way the next request
//! may follow. A request that is not a line of at most 4 KiB within 10 s ends the connection, and so does a minute of
//! silence. At most [`CLIENTS_MAX`] connections are open at a time. Whoever may open the socket may do all of this.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use plimsoll_disk::Listener;
use plimsoll_output::exit::Unreachable;
use plimsoll_protocol::curve_json::{CurveJson, SCHEMA};
use plimsoll_protocol::disk_admin::{self, Answer, DiskAdminError};
use serde::de::DeserializeOwned;
use serde_json::Value;

pub use plimsoll_protocol::disk_admin::Request;

use super::report::Report;

/// Limit of concurrent connections.
pub const CLIENTS_MAX: usize = 16;
/// Longest request, with its line end.
const REQUEST_BYTES_MAX: usize = 4096;
/// How long a connection may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long a request may take from its first byte to its last, and an answer to be taken.
const TRANSFER_MAX: Duration = Duration::from_secs(10);
/// How long a daemon may take to answer a query.
const QUERY_MAX: Duration = Duration::from_secs(10);
/// How long it may take to carry out a change; dropping the pages of a large cache takes time.
const CHANGE_MAX: Duration = Duration::from_secs(60);

/// A server that answers requests.
pub trait Daemon: Send + Sync {
    /// The result of a request.
    ///
    /// # Errors
    ///
    /// Why there is none; the client gets it as text.
    fn answer(&self, request: Request) -> anyhow::Result<Value>;
}

/// An admin socket being served; it is removed when this is dropped.
#[derive(Debug)]
pub struct Admin {
    _listener: Listener,
}

impl Admin {
    /// Serves at `path`, for its owner alone, in a thread of its own that ends with the process. A socket
    /// that nobody serves is replaced.
    ///
    /// # Errors
    ///
    /// If `path` is something else, or another process listens there.
    pub fn serve(path: &Path, daemon: Arc<dyn Daemon>) -> anyhow::Result<Self> {
        let failed = || format!("cannot serve at {}", path.display());
        let listener = Listener::bind(path, 0o600).with_context(failed)?;
        let socket = listener.socket().with_context(failed)?;
        // The kernel shares this with the listener's own descriptor.
        socket.set_nonblocking(false).with_context(failed)?;
        let clients = Arc::new(AtomicUsize::new(0));
        let accept = move || {
            for stream in socket.incoming() {
                match stream {
                    Ok(stream) => welcome(stream, &clients, &daemon),
                    // For example out of descriptors, which may be closed soon.
                    Err(_) => thread::sleep(Duration::from_millis(100)),
                }
            }
        };
        let thread = thread::Builder::new().name("admin".into());
        thread.spawn(accept).with_context(failed)?;
        Ok(Self {
            _listener: listener,
        })
    }
}

/// Serves a connection in a thread of its own, if there are not too many.
fn welcome(mut stream: UnixStream, clients: &Arc<AtomicUsize>, daemon: &Arc<dyn Daemon>) {
    if clients.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
        clients.fetch_sub(1, Ordering::Relaxed);
        let _ = send(
            &mut stream,
            &failure(format!("there are {CLIENTS_MAX} connections already")),
        );
        return;
    }
    let (count, daemon) = (Arc::clone(clients), Arc::clone(daemon));
    let serve = move || {
        // A client that breaks the rules, or disconnects, does not affect others.
        let _ = converse(&mut stream, &*daemon);
        count.fetch_sub(1, Ordering::Relaxed);
    };
    let thread = thread::Builder::new().name("admin-client".into());
    if thread.spawn(serve).is_err() {
        clients.fetch_sub(1, Ordering::Relaxed);
    }
}

fn converse(stream: &mut UnixStream, daemon: &dyn Daemon) -> io::Result<()> {
    let mut begun = Vec::new();
    while let Some(line) = next_line(stream, &mut begun)? {
        let answer = match serde_json::from_slice(&line) {
            Ok(request) => match daemon.answer(request) {
                Ok(result) => Answer {
                    schema: SCHEMA,
                    error: None,
                    result,
                },
                Err(error) => failure(format!("{error:#}")),
            },
            Err(error) => failure(format!("invalid request: {error}")),
        };
        send(stream, &answer)?;
    }
    Ok(())
}

fn failure(why: String) -> Answer {
    Answer {
        schema: SCHEMA,
        error: Some(why),
        result: Value::Null,
    }
}

fn send(stream: &mut UnixStream, answer: &Answer) -> io::Result<()> {
    stream.set_write_timeout(Some(TRANSFER_MAX))?;
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Reads a line; `begun` holds what was received of it, and afterwards what was received of the next one. `None` at
/// the end.
fn next_line(stream: &mut UnixStream, begun: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    let mut deadline = (!begun.is_empty()).then(|| Instant::now() + TRANSFER_MAX);
    loop {
        if let Some(end) = begun.iter().position(|byte| *byte == b'\n') {
            let rest = begun.split_off(end + 1);
            return Ok(Some(std::mem::replace(begun, rest)));
        }
        if begun.len() >= REQUEST_BYTES_MAX {
            let why = format!("a request is a line of at most {REQUEST_BYTES_MAX} bytes");
            send(stream, &failure(why))?;
            return Err(io::ErrorKind::InvalidData.into());
        }
        let left = match deadline {
            Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            None => SILENCE_MAX,
        };
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut bytes = [0; REQUEST_BYTES_MAX];
        match stream.read(&mut bytes[begun.len()..])? {
            0 => return Ok(None),
            more => {
                let end = begun.len() + more;
                begun.extend_from_slice(&bytes[begun.len()..end]);
                deadline.get_or_insert_with(|| Instant::now() + TRANSFER_MAX);
            }
        }
    }
}

/// Requests a report, with the curve if `curve`.
///
/// # Errors
///
/// [`Unreachable`] if no daemon answers at `socket`; otherwise the daemon's own error.
pub fn report(socket: &Path, curve: bool) -> anyhow::Result<Report> {
    let mut report: Report = ask(socket, Request::Stat)?;
    anyhow::ensure!(
        report.schema == SCHEMA,
        "the daemon uses schema {}, this program {SCHEMA}",
        report.schema
    );
    if curve {
        report.curve = ask::<Option<CurveJson>>(socket, Request::Curve)?;
    }
    Ok(report)
}

/// Sends a request and returns its result.
///
/// # Errors
///
/// [`Unreachable`] if no daemon answers at `socket`; otherwise the daemon's own error.
pub fn ask<T: DeserializeOwned>(socket: &Path, request: Request) -> anyhow::Result<T> {
    let timeout = match request.changes() {
        true => CHANGE_MAX,
        false => QUERY_MAX,
    };
    disk_admin::ask(socket, request, timeout).map_err(|error| match error {
        DiskAdminError::Unreachable { .. } | DiskAdminError::Unanswered { .. } => {
            Unreachable(error.into()).into()
        }
        _ => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    /// Returns the request, and refuses to be enabled.
    struct Echo;

    impl Daemon for Echo {
        fn answer(&self, request: Request) -> anyhow::Result<Value> {
            anyhow::ensure!(request != Request::Enable, "it is not disabled");
            Ok(serde_json::to_value(request)?)
        }
    }

    fn served() -> (tempfile::TempDir, PathBuf, Admin) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin");
        let admin = Admin::serve(&path, Arc::new(Echo)).unwrap();
        (folder, path, admin)
    }

    fn answers(path: &Path, lines: &[u8]) -> String {
        let mut stream = UnixStream::connect(path).unwrap();
        stream.write_all(lines).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn requests_are_answered_in_turn_and_invalid_ones_with_an_error() {
        let (_folder, path, _admin) = served();
        let text = answers(
            &path,
            b"{\"command\":\"resize\",\"cache_bytes\":7}\nstat\n{\"command\":\"halt\"}\n\
              {\"command\":\"resize\"}\n{\"command\":\"resize\",\"cache_bytes\":-1}\n\xff\n\n\
              {\"command\":\"enable\"}\n{\"command\":\"stat\"}\n{\"command\":\"stat\"}",
        );
        let lines: Vec<_> = text.lines().collect();
        let done = "{\"schema\":1,\"result\":{\"cache_bytes\":7,\"command\":\"resize\"}}";
        assert_eq!(lines[0], done);
        for line in &lines[1..7] {
            let begin = "{\"schema\":1,\"error\":\"invalid request: ";
            assert!(line.starts_with(begin), "{line}");
        }
        assert!(lines[2].contains("unknown variant `halt`"), "{}", lines[2]);
        let refused = "{\"schema\":1,\"error\":\"it is not disabled\",\"result\":null}";
        assert_eq!(lines[7], refused);
        assert!(lines[8].contains("\"stat\""));
        // The last line had no end.
        assert_eq!(lines.len(), 9, "{text}");
    }

    #[test]
    fn a_line_without_end_is_cut_off() {
        let (_folder, path, _admin) = served();
        let mut stream = UnixStream::connect(&path).unwrap();
        // The answer may come before everything is sent.
        let _ = stream.write_all(&[b' '; REQUEST_BYTES_MAX]);
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.contains("a line of at most 4096 bytes"), "{text}");
        assert!(answers(&path, b"{\"command\":\"stat\"}\n").contains("\"stat\""));
    }

    #[test]
    fn several_are_served_at_once_but_no_crowd() {
        let (_folder, path, _admin) = served();
        let mut held: Vec<_> = (0..CLIENTS_MAX)
            .map(|_| BufReader::new(UnixStream::connect(&path).unwrap()))
            .collect();
        let mut line = String::new();
        for stream in held.iter_mut().rev() {
            stream
                .get_mut()
                .write_all(b"{\"command\":\"stat\"}\n")
                .unwrap();
            line.clear();
            stream.read_line(&mut line).unwrap();
            assert!(line.contains("\"stat\""), "{line}");
        }
        let error = ask::<Value>(&path, Request::Stat).unwrap_err().to_string();
        let refusal = "the daemon refuses: there are 16 connections already";
        assert_eq!(error, refusal);
        drop(held);
        // Their threads notice it soon.
        while ask::<Value>(&path, Request::Stat).is_err() {
            thread::yield_now();
        }
    }

    #[test]
    fn a_socket_is_its_owners_and_is_taken_over_only_from_the_dead() {
        let (folder, path, admin) = served();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = Admin::serve(&path, Arc::new(Echo)).unwrap_err();
        assert!(format!("{error:#}").contains("another process listens on it"));
        drop(admin);
        assert!(!path.exists());

        let left = folder.path().join("left");
        drop(UnixListener::bind(&left).unwrap());
        let error = ask::<Value>(&left, Request::Stat).unwrap_err();
        assert!(error.downcast_ref::<Unreachable>().is_some(), "{error:#}");
        let admin = Admin::serve(&left, Arc::new(Echo)).unwrap();
        ask::<Value>(&left, Request::Stat).unwrap();
        drop(admin);

        let file = folder.path().join("file");
        fs::write(&file, "text").unwrap();
        let error = Admin::serve(&file, Arc::new(Echo)).unwrap_err();
        assert!(format!("{error:#}").contains("not a socket"), "{error:#}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "text");
    }
}
