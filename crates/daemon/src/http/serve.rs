//! The server: all listeners, in one thread.

use std::future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use axum::extract::DefaultBodyLimit;
use axum::http::{Method, Uri};
use axum::routing::get;
use axum::{Json, Router, middleware};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use plimsoll_protocol::request::RefusalKind;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime;
use tokio::sync::watch;
use tokio::task::{self, JoinSet};
use tokio::time;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::{TlsAcceptor, rustls};
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::{DefaultPredicate, NotForContentType, Predicate};

use super::access::{Access, guard};
use super::connections::{Connections, Peer};
use super::known::unless_known;
use super::listen::{self, Claim, GuardedListener, Listener, ServeError};
use super::logins::FailedLogins;
use super::params::BODY_BYTES_MAX;
use super::{ApiState, COMMAND_MAX, openapi, page};
use crate::config::ServeSettings;
use crate::shared::{RequestRefusal, SharedState};

/// Number of threads beside the one that serves.
const BESIDE_MAX: usize = 4;
/// Bytes of a connection's buffer: the maximum length of a request's head.
const BUFFER_BYTES: usize = 16 << 10;
/// How long a shutdown waits for answers in progress.
const GRACE: Duration = Duration::from_secs(3);
/// Pause after a failed accept: as a rule, file descriptors have run out.
const BREATH: Duration = Duration::from_millis(100);

/// Limits of clients.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Maximum number of a listener's clients; if there are as many, further connections wait.
    pub clients: usize,
    /// Maximum number of its connections without a permitted request; a further one displaces one of them.
    pub strangers: usize,
    /// Maximum time until the first permitted request, with the TLS handshake.
    pub admission: Duration,
    /// Maximum time without a request, and for a request's head.
    pub head: Duration,
    /// Maximum time for which a client may accept no data.
    pub write: Duration,
    /// Maximum time of the turn loop for an answer.
    pub command: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            clients: 128,
            strangers: 64,
            admission: Duration::from_secs(10),
            head: Duration::from_secs(30),
            write: Duration::from_secs(30),
            command: COMMAND_MAX,
        }
    }
}

/// A server that runs until it is stopped or dropped; its sockets are then removed.
#[derive(Debug)]
pub struct Server {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
    tcp: Option<SocketAddr>,
    _claims: Vec<Claim>,
}

impl Server {
    /// The address served over TCP, if any.
    pub fn tcp(&self) -> Option<SocketAddr> {
        self.tcp
    }

    /// Accepts no more requests, waits a few seconds for answers in progress, and ends.
    pub fn stop(self) {}
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves `shared` on the sockets of `settings`.
///
/// # Errors
///
/// Any [`ServeError`]; nothing is then served.
pub fn serve(shared: Arc<SharedState>, settings: &ServeSettings) -> Result<Server, ServeError> {
    serve_within(shared, settings, Limits::default())
}

pub(super) fn serve_within(
    shared: Arc<SharedState>,
    settings: &ServeSettings,
    limits: Limits,
) -> Result<Server, ServeError> {
    let (doors, claims) = listen::open(settings)?;
    let failed = |source| ServeError::Listen {
        at: settings.socket.display().to_string(),
        source,
    };
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BESIDE_MAX)
        .thread_name("http-beside")
        .build()
        .map_err(failed)?;
    let (stop, stopped) = watch::channel(false);
    let desk = ApiState::new(
        shared,
        stopped.clone(),
        limits.command,
        settings.curve_buckets,
        doors
            .iter()
            .find_map(|door| Some(door.validity.as_ref()?.end_unix_s())),
    );
    let mut tcp = None;
    let mut open = JoinSet::new();
    let logins = Arc::clone(&desk.logins);
    runtime.spawn(async move { logins.log().await });
    for GuardedListener {
        listener,
        access,
        validity,
    } in doors
    {
        let _inside = runtime.enter();
        if let Some(validity) = validity {
            runtime.spawn(validity.watch());
        }
        let listener = AsyncListener::new(listener).map_err(failed)?;
        tcp = listener.address().or(tcp);
        let router = router(&desk, access);
        open.spawn_on(
            admit(
                listener,
                router,
                Arc::clone(&desk.logins),
                limits,
                stopped.clone(),
            ),
            runtime.handle(),
        );
    }
    let thread = thread::Builder::new()
        .name("http".to_owned())
        .spawn(move || {
            runtime.block_on(open.join_all());
            runtime.shutdown_timeout(GRACE);
        })
        .map_err(failed)?;
    Ok(Server {
        stop,
        thread: Some(thread),
        tcp,
        _claims: claims,
    })
}

/// The routes of a listener.
fn router(desk: &Arc<ApiState>, access: Access) -> Router {
    openapi::routes()
        .split_for_parts()
        .0
        .route("/", get(page::index))
        .route("/assets/{*path}", get(page::asset))
        .route("/openapi.json", get(async || Json(openapi::openapi())))
        .fallback(async |uri: Uri| {
            let missing = format!("nothing is served at {:?}", uri.path());
            RequestRefusal::new(RefusalKind::NotFound, missing)
        })
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            let wrong = format!(
                "{:?} does not take {method}; nothing was changed",
                uri.path()
            );
            RequestRefusal::new(RefusalKind::BadRequest, wrong)
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(middleware::from_fn(unless_known))
        .layer(CompressionLayer::new().compress_when(is_worth_it()))
        .layer(middleware::from_fn_with_state(access, guard))
        .with_state(Arc::clone(desk))
}

/// Whether an answer is compressed. The page's files are not: everybody may request them, and compressing takes a
/// hundred times as long as sending them.
fn is_worth_it() -> impl Predicate {
    DefaultPredicate::new()
        .and(NotForContentType::const_new("text/html"))
        .and(NotForContentType::const_new("text/css"))
        .and(NotForContentType::const_new("text/javascript"))
}

/// A [`Listener`] in the runtime.
enum AsyncListener {
    Unix(UnixListener),
    Tcp(TcpListener, Option<TlsAcceptor>),
}

impl AsyncListener {
    fn new(listener: Listener) -> io::Result<Self> {
        Ok(match listener {
            Listener::Unix(listener) => Self::Unix(UnixListener::from_std(listener)?),
            Listener::Tcp(listener, tls) => Self::Tcp(TcpListener::from_std(listener)?, tls),
        })
    }

    fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp(listener, _) => listener.local_addr().ok(),
        }
    }

    /// The next connection.
    async fn accept(&self) -> io::Result<(Box<dyn Stream>, Option<TlsAcceptor>, Option<IpAddr>)> {
        Ok(match self {
            Self::Unix(listener) => (Box::new(listener.accept().await?.0), None, None),
            Self::Tcp(listener, tls) => {
                let (stream, address) = listener.accept().await?;
                stream.set_nodelay(true)?;
                (Box::new(stream), tls.clone(), Some(address.ip()))
            }
        })
    }
}

/// The stream of a connection.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Serves connections until the server stops.
async fn admit(
    listener: AsyncListener,
    router: Router,
    logins: Arc<FailedLogins>,
    limits: Limits,
    mut stop: watch::Receiver<bool>,
) {
    let graceful = GracefulShutdown::new();
    let mut tasks = JoinSet::new();
    let mut open = Connections::default();
    let mut accepted_at_once = 0;
    'accepting: loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = tasks.join_next() => continue,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let Ok((stream, tls, address)) = accepted else {
            time::sleep(BREATH).await;
            continue;
        };
        while open.admitted() >= limits.clients {
            tokio::select! {
                _ = tasks.join_next() => {}
                _ = stop.wait_for(|stop| *stop) => break 'accepting,
            }
        }
        let peer = Peer::new(address, Arc::clone(&logins));
        let conversation = converse(
            stream,
            tls,
            router.clone(),
            peer.clone(),
            graceful.watcher(),
            limits,
        );
        let until = peer.clone();
        let task = tasks.spawn(async move {
            let too_late = async {
                time::sleep(limits.admission).await;
                if until.is_admitted() {
                    future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = conversation => {}
                () = too_late => {}
            }
        });
        open.add(peer, task, limits.strangers);
        // Each connection is read from before others make it leave, and many are accepted at a time however busy these are.
        accepted_at_once += 1;
        if accepted_at_once >= limits.strangers / 2 {
            accepted_at_once = 0;
            task::yield_now().await;
        }
    }
    drop(listener);
    open.dismiss_strangers();
    let _ = time::timeout(GRACE, graceful.shutdown()).await;
}

/// Serves a connection to its end. An error affects only its client.
async fn converse(
    stream: Box<dyn Stream>,
    tls: Option<TlsAcceptor>,
    router: Router,
    peer: Peer,
    watcher: Watcher,
    limits: Limits,
) {
    let stream: Box<dyn Stream> = match tls {
        None => stream,
        Some(tls) => match tls.accept(stream).await {
            Ok(stream) => Box::new(stream),
            Err(error) => {
                if is_about_a_certificate(&error) {
                    peer.login_failed();
                }
                return;
            }
        },
    };
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(limits.write));
    let router = TowerToHyperService::new(router);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(
            TokioIo::new(Box::pin(stream)),
            service_fn(move |mut request| {
                request.extensions_mut().insert(peer.clone());
                router.call(request)
            }),
        );
    let _ = watcher.watch(connection).await;
}

/// Whether a handshake failed because the client's certificate is wrong or missing.
fn is_about_a_certificate(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref());
    matches!(
        error,
        Some(rustls::Error::NoCertificatesPresented | rustls::Error::InvalidCertificate(_))
    )
}
