//! Access control of a socket.
//!
//! The permissions of a Unix socket determine who may connect. Over TCP a token or a client's certificate is required,
//! and requests that a foreign web page makes through a browser are refused: a loopback listener accepts only host
//! names of the loopback interface (a foreign name that resolves to it is refused), changes are accepted only from
//! pages of this daemon, and no foreign page gets permission to read an answer (CORS).

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, Request, State};
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::uri::Authority;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use plimsoll_protocol::path::is_this_host;
use plimsoll_protocol::request::RefusalKind;
use subtle::ConstantTimeEq;
use tokio::time;

use super::connections::Peer;
use crate::shared::RequestRefusal;

/// Maximum duration of a request; longer than that of the turn loop.
const REQUEST_MAX: Duration = Duration::from_secs(30);

/// Headers for browsers in every answer.
const HEADERS: [(HeaderName, &str); 5] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
];

/// The access rules of a listener.
#[derive(Debug, Clone)]
pub(super) struct Access {
    /// Changes are refused.
    pub read_only: bool,
    /// The credentials that clients must present.
    pub token: Option<Arc<str>>,
    /// The kind of listener.
    pub way: ListenerKind,
}

/// Kinds of listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ListenerKind {
    /// A Unix socket.
    Unix,
    /// TCP on the loopback interface.
    Loopback,
    /// TCP.
    Network,
}

/// Passes on the requests that are permitted.
pub(super) async fn guard(
    State(access): State<Access>,
    Extension(peer): Extension<Peer>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = match access.check(&request) {
        Ok(()) => {
            if access.token.is_none() || !is_public(request.uri().path()) {
                peer.admit();
            }
            time::timeout(REQUEST_MAX, next.run(request))
                .await
                .unwrap_or_else(|_| {
                    let late = "the request took too long; it may still be carried out";
                    RequestRefusal::new(RefusalKind::Busy, late).into_response()
                })
        }
        Err(refused) => {
            if !access.knows(&request) {
                peer.login_failed();
            }
            refused.into_response()
        }
    };
    let unauthorized = response.status() == StatusCode::UNAUTHORIZED;
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    if unauthorized {
        headers.insert(
            header::WWW_AUTHENTICATE,
            HeaderValue::from_static("Bearer realm=\"plimsolld\""),
        );
    }
    response
}

impl Access {
    fn check(&self, request: &Request) -> Result<(), RequestRefusal> {
        let headers = request.headers();
        let looks = matches!(*request.method(), Method::GET | Method::HEAD);
        if self.way == ListenerKind::Loopback
            && !host(headers).is_some_and(|host| is_this_host(host.host()))
        {
            return Err(RequestRefusal::new(
                RefusalKind::BadRequest,
                "this address is served as localhost, 127.0.0.1 or [::1] alone, and the request names another host",
            ));
        }
        if !self.knows(request) {
            return Err(RequestRefusal::new(
                RefusalKind::Unauthorized,
                "the daemon's token is needed: 'Authorization: Bearer TOKEN', or the page's address with #token=TOKEN",
            ));
        }
        if self.read_only && !looks {
            return Err(RequestRefusal::new(
                RefusalKind::ReadOnly,
                "this socket only shows; nothing was changed",
            ));
        }
        if self.way != ListenerKind::Unix && !looks && is_foreign(headers) {
            return Err(RequestRefusal::new(
                RefusalKind::Unauthorized,
                "changes are taken from pages of this daemon alone; nothing was changed",
            ));
        }
        Ok(())
    }

    /// Whether a request shows the token, if it needs it.
    fn knows(&self, request: &Request) -> bool {
        let shows = |token: &Arc<str>| shows(request.headers(), token);
        is_public(request.uri().path()) || self.token.as_ref().is_none_or(shows)
    }
}

/// Paths served without a token: the page, which contains no data of the host, and the health check.
fn is_public(path: &str) -> bool {
    matches!(path, "/" | "/healthz") || path.starts_with("/assets/")
}

/// Whether `token` is correct; the comparison takes constant time.
fn shows(headers: &HeaderMap, token: &str) -> bool {
    let shown = headers.get(header::AUTHORIZATION);
    let Some((scheme, shown)) = shown
        .and_then(|shown| shown.to_str().ok())
        .and_then(|shown| shown.split_once(' '))
    else {
        return false;
    };
    scheme.eq_ignore_ascii_case("bearer")
        && bool::from(shown.trim().as_bytes().ct_eq(token.as_bytes()))
}

/// The single host name of a request.
fn host(headers: &HeaderMap) -> Option<Authority> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next()?.to_str().ok()?.parse().ok()?;
    hosts.next().is_none().then_some(host)
}

/// Whether a browser sends the request for a page of another origin.
fn is_foreign(headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return false;
    };
    let authority = origin.to_str().ok().and_then(|origin| {
        let (_, authority) = origin.split_once("://")?;
        authority.parse::<Authority>().ok()
    });
    authority.is_none() || authority != host(headers)
}
