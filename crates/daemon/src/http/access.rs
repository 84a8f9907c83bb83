//! Access control of a socket.
//!
//! A Unix socket's permissions say who may come in. Over TCP a token or a client's certificate does, and a browser must
//! not be led here by a foreign page: a loopback door answers to names of the loopback alone (a foreign name that was
//! made to point here is refused), changes are taken from pages of this daemon alone, and no foreign page is told
//! that it may read an answer.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::uri::Authority;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use plimsoll_protocol::request::RefusalKind;
use subtle::ConstantTimeEq;
use tokio::time;

use crate::shared::Refused;

/// How long a request may take; longer than the turn loop may.
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

/// The rules of a door.
#[derive(Debug, Clone)]
pub(super) struct Access {
    /// Changes are refused.
    pub read_only: bool,
    /// What clients must show.
    pub token: Option<Arc<str>>,
    /// What kind of door.
    pub way: Way,
}

/// Ways to a door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// A Unix socket.
    Unix,
    /// TCP from this host alone.
    Loopback,
    /// TCP.
    Network,
}

/// Lets those requests through that may come in.
pub(super) async fn guard(State(access): State<Access>, request: Request, next: Next) -> Response {
    let mut response = match access.check(&request) {
        Ok(()) => time::timeout(REQUEST_MAX, next.run(request))
            .await
            .unwrap_or_else(|_| {
                let late = "the request took too long; what was asked for may still be done";
                Refused::new(RefusalKind::Busy, late).into_response()
            }),
        Err(refused) => refused.into_response(),
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
    fn check(&self, request: &Request) -> Result<(), Refused> {
        let headers = request.headers();
        let looks = matches!(*request.method(), Method::GET | Method::HEAD);
        if self.way == Way::Loopback && !host(headers).is_some_and(|host| is_loopback(&host)) {
            return Err(Refused::new(
                RefusalKind::BadRequest,
                "this address is served as localhost, 127.0.0.1 or [::1] alone, and the request names another host",
            ));
        }
        if let Some(token) = &self.token
            && !is_public(request.uri().path())
            && !shows(headers, token)
        {
            return Err(Refused::new(
                RefusalKind::Unauthorized,
                "the daemon's token is needed: 'Authorization: Bearer TOKEN', or the page's address with #token=TOKEN",
            ));
        }
        if self.read_only && !looks {
            return Err(Refused::new(
                RefusalKind::ReadOnly,
                "this socket only shows; nothing was changed",
            ));
        }
        if self.way != Way::Unix && !looks && is_foreign(headers) {
            return Err(Refused::new(
                RefusalKind::Unauthorized,
                "changes are taken from pages of this daemon alone; nothing was changed",
            ));
        }
        Ok(())
    }
}

/// What is served without a token: the page, which holds nothing but itself, and whether the daemon works.
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

/// The one host that a request names.
fn host(headers: &HeaderMap) -> Option<Authority> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next()?.to_str().ok()?.parse().ok()?;
    hosts.next().is_none().then_some(host)
}

fn is_loopback(host: &Authority) -> bool {
    let name = host.host();
    let address = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost")
        || address
            .parse()
            .is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Whether a browser sends this for a page of somebody else's.
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
