//! A blocking client of the daemon, over its Unix socket.
//!
//! Each request uses its own connection, so a restart of the daemon between two requests is not an error.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::runtime::{self, Runtime};
use tokio::time;

use crate::answer::{Acknowledgement, ChangedVm, ProposalView, ReplayView, VmsView};
use crate::curve_json::CurveJson;
use crate::decision::{Decision, DecisionsView};
use crate::fleet::{HostDemands, demands_path};
use crate::group::GroupView;
use crate::path::{encoded, of_vm, query};
use crate::request::{Choice, HostWhatIf, Refusal, RefusalKind, SettingsChange, VmWhatIf};
use crate::rightsize::RightsizeView;
use crate::vm::{HeatmapView, HistoryView, HostView, VmSummary, VmView};
use crate::{SCHEMA, SOCKET, SOCKET_READ_ONLY, of_another_version};

/// Time limit of a request: the daemon itself stops waiting for its turn loop after 15 s.
pub const TIME_OUT: Duration = Duration::from_secs(20);
/// Limit on the size of an answer.
pub const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Why there is no answer, or an incomplete one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No server answers, or access was denied. Nothing was requested.
    #[error("cannot reach plimsolld at {}", socket.display())]
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No answer in time. The request may or may not have been carried out.
    #[error("plimsolld has not answered {request} within {after:?}")]
    Unanswered {
        /// The request: method and path.
        request: String,
        /// How long was waited.
        after: Duration,
    },
    /// The daemon refused the request and gave a reason.
    #[error("{}", .0.message)]
    Refused(Refusal),
    /// The answer is malformed. The request may or may not have been carried out.
    #[error("no usable answer from plimsolld to {request}: {why}")]
    Protocol {
        /// The request: method and path.
        request: String,
        /// The error.
        why: String,
    },
}

impl ClientError {
    /// Whether the socket exists but may not be opened.
    pub fn is_permission_denied(&self) -> bool {
        matches!(self, Self::Unreachable { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }

    /// Kind of the daemon's refusal, if it refused.
    pub fn refusal_kind(&self) -> Option<RefusalKind> {
        match self {
            Self::Refused(refusal) => Some(refusal.kind),
            _ => None,
        }
    }
}

/// A daemon that has been reached.
///
/// Each request may fail with any [`ClientError`], and is refused if the VM, group or decision that it names does not exist.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    runtime: Runtime,
}

#[expect(
    clippy::missing_errors_doc,
    reason = "all requests have the errors that are described at the type"
)]
impl Client {
    /// Finds the daemon that serves at `socket`.
    ///
    /// # Errors
    ///
    /// [`ClientError::Unreachable`] if none does, or its socket may not be opened.
    pub fn connect(socket: &Path) -> Result<Self, ClientError> {
        let unreachable = |source| ClientError::Unreachable {
            socket: socket.to_owned(),
            source,
        };
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(unreachable)?;
        let client = Self {
            socket: socket.to_owned(),
            runtime,
        };
        client.runtime.block_on(client.open())?;
        Ok(client)
    }

    /// Finds the daemon at [`SOCKET`], or at [`SOCKET_READ_ONLY`] if the former may not be opened.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub fn connect_to_read() -> Result<Self, ClientError> {
        Self::connect(Path::new(SOCKET)).or_else(|error| {
            if error.is_permission_denied() {
                Self::connect(Path::new(SOCKET_READ_ONLY))
            } else {
                Err(error)
            }
        })
    }

    /// The host and its VMs.
    pub fn host(&self) -> Result<HostView, ClientError> {
        self.get("/v1/host")
    }

    /// The VMs, by name.
    pub fn vms(&self) -> Result<Vec<VmSummary>, ClientError> {
        Ok(self.get::<VmsView>("/v1/vms")?.vms)
    }

    /// All details of a VM.
    pub fn vm(&self, vm: &str) -> Result<VmView, ClientError> {
        self.get(&of_vm(vm, ""))
    }

    /// A VM's curve; refused while it has none.
    pub fn curve(&self, vm: &str) -> Result<CurveJson, ClientError> {
        self.get(&of_vm(vm, "/curve"))
    }

    /// A VM's history in at most `points` points; the last hour by default.
    pub fn history(
        &self,
        vm: &str,
        since_unix_ms: Option<u64>,
        until_unix_ms: Option<u64>,
        points: Option<usize>,
    ) -> Result<HistoryView, ClientError> {
        self.get(&of_vm(vm, &history(since_unix_ms, until_unix_ms, points)))
    }

    /// All details of a control group, by its name or path.
    pub fn group(&self, group: &str) -> Result<GroupView, ClientError> {
        self.get(&of_group(group, ""))
    }

    /// A control group's history, as [`history`](Self::history) gives it.
    pub fn group_history(
        &self,
        group: &str,
        since_unix_ms: Option<u64>,
        until_unix_ms: Option<u64>,
        points: Option<usize>,
    ) -> Result<HistoryView, ClientError> {
        let rest = history(since_unix_ms, until_unix_ms, points);
        self.get(&of_group(group, &rest))
    }

    /// The right size of a VM by its curves since a time; `percentile` is above 0.0 and at most 1.0.
    pub fn rightsize(
        &self,
        vm: &str,
        since_unix_ms: u64,
        percentile: f64,
    ) -> Result<RightsizeView, ClientError> {
        let query = format!("/rightsize?since_unix_ms={since_unix_ms}&percentile={percentile}");
        self.get(&of_vm(vm, &query))
    }

    /// What the VMs need over time, in intervals of `interval_ms` from `since_unix_ms` on; refused if they are too short or too many.
    pub fn demands(
        &self,
        since_unix_ms: u64,
        interval_ms: u64,
    ) -> Result<HostDemands, ClientError> {
        self.get(&demands_path(since_unix_ms, interval_ms))
    }

    /// The activity of a VM by region of its RAM and time; refused if it is not traced.
    pub fn heatmap(&self, vm: &str) -> Result<HeatmapView, ClientError> {
        self.get(&of_vm(vm, "/heatmap"))
    }

    /// Predicted misses of a VM at another size.
    pub fn vm_what_if(&self, vm: &str, size_bytes: u64) -> Result<VmWhatIf, ClientError> {
        self.get(&of_vm(vm, &format!("/whatif?size_bytes={size_bytes}")))
    }

    /// Allocation if the host lost memory (negative: gained).
    pub fn host_what_if(&self, lose_bytes: i64) -> Result<HostWhatIf, ClientError> {
        self.get(&format!("/v1/whatif?lose_bytes={lose_bytes}"))
    }

    /// The proposal that [`apply`](Self::apply) would carry out, if any.
    pub fn proposal(&self) -> Result<Option<Decision>, ClientError> {
        Ok(self.get::<ProposalView>("/v1/plan")?.proposal)
    }

    /// At most `limit` decisions, newest first: those that affect `vm` and have a number below `before`.
    pub fn decisions(
        &self,
        vm: Option<&str>,
        before: Option<u64>,
        limit: Option<usize>,
    ) -> Result<Vec<Decision>, ClientError> {
        let query = query(&[
            ("vm", vm.map(encoded)),
            ("before", before.map(|id| id.to_string())),
            ("limit", limit.map(|limit| limit.to_string())),
        ]);
        Ok(self
            .get::<DecisionsView>(&format!("/v1/decisions{query}"))?
            .decisions)
    }

    /// A decision with its inputs and results.
    pub fn decision(&self, id: u64) -> Result<Decision, ClientError> {
        self.get(&format!("/v1/decisions/{id}"))
    }

    /// Whether a decision is reproduced from its recorded inputs; refused if it was not taken by a policy.
    pub fn replay(&self, id: u64) -> Result<ReplayView, ClientError> {
        self.get(&format!("/v1/decisions/{id}/replay"))
    }

    /// The decisions that affected a VM, newest first.
    pub fn explain(&self, vm: &str) -> Result<Vec<Decision>, ClientError> {
        Ok(self.get::<DecisionsView>(&of_vm(vm, "/explain"))?.decisions)
    }

    /// Applies a proposal; returns the decision at its start.
    pub fn apply(&self, choice: Choice) -> Result<Decision, ClientError> {
        self.change(Method::POST, "/v1/apply", &choice)
    }

    /// Rolls a decision back; returns the decision that does so.
    pub fn roll_back(&self, choice: Choice) -> Result<Decision, ClientError> {
        self.change(Method::POST, "/v1/rollback", &choice)
    }

    /// Stops all moves until [`resume`](Self::resume).
    pub fn pause(&self) -> Result<Acknowledgement, ClientError> {
        self.change(Method::POST, "/v1/pause", &EmptyBody {})
    }

    /// Reverses [`pause`](Self::pause).
    pub fn resume(&self) -> Result<Acknowledgement, ClientError> {
        self.change(Method::POST, "/v1/resume", &EmptyBody {})
    }

    /// Makes the daemon read its configuration again. An invalid one is refused, and the old one stays in force.
    pub fn reload(&self) -> Result<(), ClientError> {
        self.change::<_, Acknowledgement>(Method::POST, "/v1/reload", &EmptyBody {})
            .map(drop)
    }

    /// Changes a VM's limits.
    pub fn set(&self, vm: &str, change: &SettingsChange) -> Result<ChangedVm, ClientError> {
        self.change(Method::PATCH, &of_vm(vm, ""), change)
    }

    /// Sends a GET request to `path`, whose segments and query must be percent-encoded.
    pub fn get<A: DeserializeOwned>(&self, path: &str) -> Result<A, ClientError> {
        self.ask(Method::GET, path, Bytes::new())
    }

    /// Sends a request with a body to `path`.
    fn change<B: Serialize, A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &B,
    ) -> Result<A, ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| ClientError::Protocol {
            request: format!("{method} {path}"),
            why: format!("its body is none: {error}"),
        })?;
        self.ask(method, path, body.into())
    }

    fn ask<A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<A, ClientError> {
        let request = format!("{method} {path}");
        let protocol = |why: String| ClientError::Protocol {
            request: request.clone(),
            why,
        };
        let (status, answer) = self.runtime.block_on(async {
            time::timeout(TIME_OUT, self.converse(method, path, body))
                .await
                .unwrap_or_else(|_| {
                    Err(ClientError::Unanswered {
                        request: request.clone(),
                        after: TIME_OUT,
                    })
                })
        })?;
        if status.is_success() {
            read(&answer).map_err(protocol)
        } else {
            let refusal = serde_json::from_slice(&answer);
            Err(refusal.map_or_else(
                |_| protocol(format!("status {status} without a reason")),
                ClientError::Refused,
            ))
        }
    }

    /// Sends a request and reads its answer.
    async fn converse(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let said = format!("{method} {path}");
        let protocol = |why: String| ClientError::Protocol { request: said, why };
        let request = match Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
        {
            Ok(request) => request,
            Err(error) => return Err(protocol(error.to_string())),
        };
        let stream = TokioIo::new(self.open().await?);
        let exchange = async {
            let (mut sender, connection) = hyper::client::conn::http1::handshake(stream)
                .await
                .map_err(|error| error.to_string())?;
            let driver = tokio::spawn(connection);
            let answer = async {
                let answer = sender.send_request(request).await?;
                let status = answer.status();
                let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX);
                Ok((status, body.collect().await?.to_bytes()))
            };
            let answer: Result<_, Box<dyn Error + Send + Sync>> = answer.await;
            driver.abort();
            answer.map_err(|error| error.to_string())
        };
        exchange.await.map_err(protocol)
    }

    /// Opens a connection.
    async fn open(&self) -> Result<UnixStream, ClientError> {
        time::timeout(TIME_OUT, UnixStream::connect(&self.socket))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(|source| ClientError::Unreachable {
                socket: self.socket.clone(),
                source,
            })
    }
}

/// The body of requests that take no parameters.
#[derive(Serialize)]
struct EmptyBody {}

/// The path of a control group's resource.
fn of_group(group: &str, rest: &str) -> String {
    format!("/v1/groups/{}{rest}", encoded(group))
}

/// The end of the path of a history.
fn history(
    since_unix_ms: Option<u64>,
    until_unix_ms: Option<u64>,
    points: Option<usize>,
) -> String {
    let query = query(&[
        ("since_unix_ms", since_unix_ms.map(|ms| ms.to_string())),
        ("until_unix_ms", until_unix_ms.map(|ms| ms.to_string())),
        ("points", points.map(|points| points.to_string())),
    ]);
    format!("/history{query}")
}

/// The part of every answer that shows whether the rest can be read.
#[derive(Deserialize)]
struct Head {
    schema: u32,
}

/// Reads an answer. Within a schema keys are only added, but a daemon of an earlier version has not those that were added since.
fn read<A: DeserializeOwned>(answer: &[u8]) -> Result<A, String> {
    match serde_json::from_slice(answer) {
        Ok(Head { schema }) if schema != SCHEMA => Err(of_another_version(&format!(
            "it has schema {schema}, and only {SCHEMA} can be read"
        ))),
        Ok(Head { .. }) => {
            serde_json::from_slice(answer).map_err(|error| of_another_version(&error.to_string()))
        }
        Err(_) => serde_json::from_slice(answer).map_err(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// The result of `ask` against a server that answers every request with `answer`, and the request it received.
    fn asked(
        answer: &'static [u8],
        ask: impl FnOnce(&Client) -> Result<(), ClientError>,
    ) -> (Result<(), ClientError>, String) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = thread::spawn(move || {
            // The first connection only checks whether a server is listening.
            drop(listener.accept().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = vec![0; 4096];
            let read = stream.read(&mut request).unwrap();
            // A client may close the connection before it has read everything.
            let _ = stream.write_all(answer);
            String::from_utf8_lossy(&request[..read]).into_owned()
        });
        let result = ask(&Client::connect(&socket).unwrap());
        (result, server.join().unwrap())
    }

    #[test]
    fn names_and_queries_arrive_as_they_were_meant() {
        let done = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{\"schema\":1}";
        let (result, request) = asked(done, |client| {
            let path = of_vm("a/b ?\u{fc}#\n", "");
            client
                .change::<_, Acknowledgement>(Method::PATCH, &path, &SettingsChange::default())
                .map(drop)
        });
        result.unwrap();
        let begin = "PATCH /v1/vms/a%2Fb%20%3F%C3%BC%23%0A HTTP/1.1\r\n";
        assert!(request.starts_with(begin), "{request}");
        assert!(request.ends_with("{\"reset\":false}"), "{request}");
        let (_, request) = asked(done, |client| {
            client.decisions(Some("a&b"), None, Some(3)).map(drop)
        });
        assert!(
            request.starts_with("GET /v1/decisions?vm=a%26b&limit=3 "),
            "{request}"
        );
    }

    #[test]
    fn a_refusal_is_told_apart_from_what_is_no_answer() {
        let refused = b"HTTP/1.1 422 x\r\nConnection: close\r\n\r\n{\"schema\":1,\"kind\":\"guarantee\",\"message\":\"no\"}";
        let error = asked(refused, |client| client.pause().map(drop))
            .0
            .unwrap_err();
        assert_eq!(error.refusal_kind(), Some(RefusalKind::Guarantee));
        assert_eq!(error.to_string(), "no");
        let none: [(&[u8], &str); 8] = [
            (
                b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{\"schema\":2}",
                "it has schema 2, and only 1 can be read: this program has version ",
            ),
            (
                b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n{\"schema\":1,\"not_stored\":true}",
                "use that of the daemon's version",
            ),
            (b"", "POST /v1/pause"),
            (b"SSH-2.0-OpenSSH_9.2\r\n", "POST /v1/pause"),
            (
                b"HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\nno",
                "status 500",
            ),
            (
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
                "missing field `schema`",
            ),
            (
                b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{\"sche",
                "POST /v1/pause",
            ),
            (
                b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
                "POST /v1/pause",
            ),
        ];
        for (answer, why) in none {
            let error = asked(answer, |client| client.pause().map(drop))
                .0
                .unwrap_err();
            assert!(matches!(error, ClientError::Protocol { .. }), "{error:?}");
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn nobody_there_is_unreachable() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let unreachable = || Client::connect(&socket).unwrap_err();
        assert!(matches!(unreachable(), ClientError::Unreachable { .. }));
        drop(UnixListener::bind(&socket).unwrap());
        let error = unreachable();
        assert!(matches!(error, ClientError::Unreachable { .. }));
        assert!(!error.is_permission_denied());
    }
}
