//! The daemon's interface for clients: REST, events, metrics and the web page.
//!
//! | module | what |
//! |---|---|
//! | `listen` | sockets: whose they are, taking them over, TLS |
//! | `access` | who may do what: tokens, read-only doors, foreign pages of a browser |
//! | `look` | the host, its VMs, what was decided |
//! | `what_if` | what would be, and whether a decision follows from its records |
//! | `change` | what is handed to the turn loop |
//! | `events` | what happens, as it happens |
//! | `metrics` | all of it for Prometheus |
//! | `page` | the page's files |
//!
//! Everything is served in one thread by its own tokio runtime; what computes or reads the store is done in a few
//! others beside it. Clients are bounded in number, in what they send, and in the time that they take, at every door by
//! itself, so that those who only look cannot shut out those who act.
//!
//! [docs/api.md] tells clients the same.
//!
//! [docs/api.md]: https://github.com/plimsoll-vm/plimsoll/blob/main/docs/api.md

mod access;
mod change;
mod events;
#[cfg(test)]
#[path = "../../tests/common/example.rs"]
mod example;
mod listen;
mod look;
mod metrics;
mod openapi;
mod page;
mod params;
mod serve;

#[cfg(test)]
mod tests;
mod what_if;

pub use listen::ServeError;
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

use crate::shared::{Refused, Shared};
use metrics::Tally;

/// What a request gets: an answer or a refusal.
type Answer<T> = Result<Json<T>, Refused>;

/// Computations at a time that ask for an allocation anew.
const WHAT_IFS_MAX: usize = 2;
/// Those at a time that read the store.
const READS_MAX: usize = 4;
/// How long one waits for its turn among them.
const READ_WAIT_MAX: Duration = Duration::from_secs(5);
/// How long the turn loop may take to answer.
const COMMAND_MAX: Duration = Duration::from_secs(15);

/// What every request is answered from.
#[derive(Debug)]
struct Desk {
    shared: Arc<Shared>,
    /// Decisions counted by how they ended.
    tally: Mutex<Tally>,
    /// Permits of those that compute.
    what_ifs: Arc<Semaphore>,
    /// Permits of those that read the store or compute.
    reads: Arc<Semaphore>,
    /// Turns true when the server shuts down.
    stop: watch::Receiver<bool>,
    /// How long the turn loop may take to answer.
    command_max: Duration,
}

impl Desk {
    fn new(shared: Arc<Shared>, stop: watch::Receiver<bool>, command_max: Duration) -> Arc<Self> {
        Arc::new(Self {
            tally: Mutex::new(Tally::from_now_on(&shared.history)),
            what_ifs: Arc::new(Semaphore::new(WHAT_IFS_MAX)),
            reads: Arc::new(Semaphore::new(READS_MAX)),
            shared,
            stop,
            command_max,
        })
    }
}

impl IntoResponse for Refused {
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

/// Runs what computes or reads the store beside the thread that serves, a few at a time: who asks and leaves must not
/// leave work behind without end.
async fn beside<T: Send + 'static>(
    reads: Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Refused> {
    let waiting = reads.acquire_owned();
    let Ok(Ok(permit)) = tokio::time::timeout(READ_WAIT_MAX, waiting).await else {
        let busy = "too many ask at a time; nothing was changed, ask again";
        return Err(Refused::new(RefusalKind::Busy, busy));
    };
    let failed = "the daemon could not finish this; nothing was changed";
    let work = move || {
        let _permit = permit;
        work()
    };
    task::spawn_blocking(work)
        .await
        .map_err(|_| Refused::new(RefusalKind::Busy, failed))
}
