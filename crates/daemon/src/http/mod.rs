//! The daemon's interface for clients: REST, events, metrics and the web page.
//!
//! | module | what |
//! |---|---|
//! | `listen` | sockets: ownership, takeover, TLS |
//! | `certificates` | the time in which the server's certificate is valid |
//! | `access` | access control: tokens, read-only listeners, foreign web pages in a browser |
//! | `connections` | connections of a listener, and which of them makes room for a new one |
//! | `logins` | failed logins: their count, and their addresses in the log |
//! | `views` | the host, its VMs, past decisions |
//! | `rightsize`, `demands` | what VMs need over time |
//! | `what_if` | what-if queries, and whether a decision follows from its records |
//! | `change` | commands passed to the turn loop |
//! | `events` | server-sent events |
//! | `metrics` | metrics for Prometheus |
//! | `known` | answers that a client has already |
//! | `page` | the page's files |
//!
//! One thread serves all listeners by its own tokio runtime; a few other threads do computations and read the store.
//! Clients are limited in number, in the size of requests and in time, separately at every listener, so that clients
//! that only read cannot lock out those that change something.
//!
//! [docs/api.md] documents the API for clients.
//!
//! [docs/api.md]: https://github.com/plimsoll-vm/plimsoll/blob/main/docs/api.md

mod access;
mod certificates;
mod change;
mod connections;
mod demands;
mod events;
#[cfg(test)]
#[path = "../../tests/common/example.rs"]
mod example;
mod known;
mod listen;
mod logins;
mod metrics;
mod openapi;
mod page;
mod params;
mod rightsize;
mod serve;
mod views;

#[cfg(test)]
mod tests;
mod what_if;

pub use listen::{ServeError, check};
pub use openapi::openapi;
pub use serve::{Server, serve};

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::request::{Refusal, RefusalKind};
use tokio::sync::{Semaphore, watch};
use tokio::task;

use crate::shared::{RequestRefusal, SharedState};
use logins::FailedLogins;
use metrics::Tally;

/// The response to a request: an answer or a refusal.
type Answer<T> = Result<Json<T>, RequestRefusal>;

/// Maximum number of concurrent computations of an allocation.
const WHAT_IFS_MAX: usize = 2;
/// Maximum number of concurrent reads of the store.
const READS_MAX: usize = 4;
/// Maximum time that a request waits for one of these.
const READ_WAIT_MAX: Duration = Duration::from_secs(5);
/// Maximum time of the turn loop for an answer.
const COMMAND_MAX: Duration = Duration::from_secs(15);

/// State used to answer requests.
#[derive(Debug)]
struct ApiState {
    shared: Arc<SharedState>,
    /// Whether the metrics contain the curves.
    curve_buckets: bool,
    /// Decisions counted by their result.
    tally: Mutex<Tally>,
    /// Requests and connections refused for want of credentials.
    logins: Arc<FailedLogins>,
    /// End of the server's certificate, in seconds of Unix time.
    certificate_end_unix_s: Option<i64>,
    /// Permits for computations.
    what_ifs: Arc<Semaphore>,
    /// Permits for computations and reads of the store.
    reads: Arc<Semaphore>,
    /// Becomes true when the server shuts down.
    stop: watch::Receiver<bool>,
    /// Maximum time of the turn loop for an answer.
    command_max: Duration,
}

impl ApiState {
    fn new(
        shared: Arc<SharedState>,
        stop: watch::Receiver<bool>,
        command_max: Duration,
        curve_buckets: bool,
        certificate_end_unix_s: Option<i64>,
    ) -> Arc<Self> {
        Arc::new(Self {
            curve_buckets,
            certificate_end_unix_s,
            logins: Arc::default(),
            tally: Mutex::new(Tally::from_now_on(&shared.history)),
            what_ifs: Arc::new(Semaphore::new(WHAT_IFS_MAX)),
            reads: Arc::new(Semaphore::new(READS_MAX)),
            shared,
            stop,
            command_max,
        })
    }
}

impl IntoResponse for RequestRefusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.kind.status());
        let refusal = Refusal {
            schema: SCHEMA,
            kind: self.kind,
            message: self.message,
        };
        let mut response = Json(refusal).into_response();
        *response.status_mut() = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        response
    }
}

/// Runs a computation or a read of the store outside the serving thread, a few at a time: clients that disconnect must
/// not leave unbounded work behind.
async fn beside<T: Send + 'static>(
    reads: Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RequestRefusal> {
    let waiting = reads.acquire_owned();
    let Ok(Ok(permit)) = tokio::time::timeout(READ_WAIT_MAX, waiting).await else {
        let busy = "too many requests at a time; nothing was changed, try again";
        return Err(RequestRefusal::new(RefusalKind::Busy, busy));
    };
    let failed = "the daemon could not finish this; nothing was changed";
    let work = move || {
        let _permit = permit;
        work()
    };
    task::spawn_blocking(work)
        .await
        .map_err(|_| RequestRefusal::new(RefusalKind::Busy, failed))
}
