//! Parameters of a request: path, query and body. All of them are untrusted.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use plimsoll_protocol::group::GroupSummary;
use plimsoll_protocol::request::RefusalKind;
use plimsoll_protocol::vm::VmSummary;
use plimsoll_vm::GroupName;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::shared::{RequestRefusal, Snapshot};

/// Maximum length of a body.
pub(super) const BODY_BYTES_MAX: usize = 64 << 10;
/// Similarity, 0.0 to 1.0, above which a name is suggested as the correction of another.
const ALIKE: f64 = 0.8;

pub(super) fn bad(message: impl Into<String>) -> RequestRefusal {
    RequestRefusal::new(RefusalKind::BadRequest, message)
}

pub(super) fn not_found(message: impl Into<String>) -> RequestRefusal {
    RequestRefusal::new(RefusalKind::NotFound, message)
}

/// A query; unknown keys are refused.
#[derive(Debug)]
pub(super) struct Params<T>(pub T);

/// The query of a request without parameters.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NoParams {}

impl<S: Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = RequestRefusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, RequestRefusal> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(params)) => Ok(Self(params)),
            Err(error) => Err(bad(format!("{}: {}", parts.uri.path(), error.body_text()))),
        }
    }
}

/// The part of a path that is a name or a number.
#[derive(Debug)]
pub(super) struct PathValue<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for PathValue<T> {
    type Rejection = RequestRefusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RequestRefusal> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(name)) => Ok(Self(name)),
            Err(error) => Err(bad(format!("{}: {}", parts.uri.path(), error.body_text()))),
        }
    }
}

/// A JSON body; none at all is `{}`.
#[derive(Debug)]
pub(super) struct Body<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = RequestRefusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, RequestRefusal> {
        let text = Bytes::from_request(request, state)
            .await
            .map_err(|error| bad(format!("the body: {}", error.body_text())))?;
        let text: &[u8] = if text.is_empty() { b"{}" } else { &text };
        serde_json::from_slice(text)
            .map(Self)
            .map_err(|error| bad(format!("the body: {error}; nothing was changed")))
    }
}

/// The VM called `name`.
pub(super) fn find<'a>(
    snapshot: &'a Snapshot,
    name: &str,
) -> Result<&'a VmSummary, RequestRefusal> {
    let vms = &snapshot.host.vms;
    let found = vms.iter().find(|vm| vm.vm == name);
    found.ok_or_else(|| no_vm(snapshot, name))
}

/// The control group with this path, or else this name, or else this identifier of its container or pod.
pub(super) fn find_group<'a>(
    snapshot: &'a Snapshot,
    name: &str,
) -> Result<&'a GroupSummary, RequestRefusal> {
    let watched = &snapshot.host.groups.watched;
    let by_path = watched.iter().find(|group| group.path == name);
    let by_name = || watched.iter().find(|group| group.group == name);
    let by_identifier = || {
        let mut watched = watched.iter();
        watched.find(|group| GroupName::is_meant(name, &group.path))
    };
    let found = by_path.or_else(by_name).or_else(by_identifier);
    found.ok_or_else(|| {
        let message = format!(
            "no control group {name:?} is watched; `plimsoll vms` and GET /v1/groups list those that are"
        );
        not_found(message)
    })
}

/// There is no VM called `name`.
pub(super) fn no_vm(snapshot: &Snapshot, name: &str) -> RequestRefusal {
    let group = name.strip_prefix("cgroup:").unwrap_or(name);
    if find_group(snapshot, group).is_ok() {
        let message = format!(
            "{name:?} is a control group, which is only observed: it has no balloon, no promise and no size that could be \
             changed or predicted; nothing was changed"
        );
        return RequestRefusal::new(RefusalKind::ObservedOnly, message);
    }
    let alike = |vm: &VmSummary| strsim::jaro_winkler(&vm.vm, name);
    let vms = snapshot.host.vms.iter();
    let nearest = vms.max_by(|a, b| alike(a).total_cmp(&alike(b)));
    let hint = match nearest {
        Some(vm) if alike(vm) >= ALIKE => format!("; did you mean {:?}?", vm.vm),
        _ => String::new(),
    };
    not_found(format!("no VM is called {name:?}{hint}"))
}
