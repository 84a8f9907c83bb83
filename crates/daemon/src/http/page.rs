//! The page's files, embedded in the program. (A debug build reads them from the checkout.)

use std::fmt::Write;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use plimsoll_protocol::request::RefusalKind;
use rust_embed::RustEmbed;

use super::params::PathValue;
use crate::shared::RequestRefusal;

#[derive(RustEmbed)]
#[folder = "../../web/assets"]
struct Files;

/// The page.
pub(super) async fn index(headers: HeaderMap) -> Result<Response, RequestRefusal> {
    file("index.html", &headers)
}

/// What the page loads.
pub(super) async fn asset(
    PathValue(path): PathValue<String>,
    headers: HeaderMap,
) -> Result<Response, RequestRefusal> {
    file(&path, &headers)
}

fn file(path: &str, headers: &HeaderMap) -> Result<Response, RequestRefusal> {
    let Some(file) = Files::get(path) else {
        let missing = format!("the page has no file {path:?}");
        return Err(RequestRefusal::new(RefusalKind::NotFound, missing));
    };
    let mut tag = String::from("\"");
    for byte in file.metadata.sha256_hash() {
        let _ = write!(tag, "{byte:02x}");
    }
    tag.push('"');
    let known = headers.get(header::IF_NONE_MATCH);
    let mut response = if known.is_some_and(|known| known.as_bytes() == tag.as_bytes()) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        let kind = [(header::CONTENT_TYPE, file.metadata.mimetype().to_owned())];
        (kind, Body::from(file.data)).into_response()
    };
    let headers = response.headers_mut();
    if let Ok(tag) = tag.parse() {
        headers.insert(header::ETAG, tag);
    }
    // Revalidated each time, so that a new daemon's page is used at once.
    headers.insert(
        header::CACHE_CONTROL,
        header::HeaderValue::from_static("no-cache"),
    );
    Ok(response)
}
