//! Read-only routes: the host, its VMs, decisions.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::answer::{Acknowledgement, ProposalView, VmsView};
use plimsoll_protocol::byte_curve::ByteCurve;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::decision::{Decision, DecisionsView};
use plimsoll_protocol::group::{GroupView, GroupsView};
use plimsoll_protocol::request::RefusalKind;
use plimsoll_protocol::vm::{HeatmapView, HistoryView, HostView, KeptCurve, KeptCurves, VmView};
use serde::Deserialize;
use utoipa::IntoParams;

use super::params::{NoParams, Params, PathValue, bad, find, find_group, not_found};
use super::{Answer, ApiState, beside};
use crate::clock;
use crate::history::group_id;
use crate::shared::RequestRefusal;

/// Default period of a history.
const HISTORY_MS: u64 = 3_600_000;
/// Default and maximum number of points of a history.
const POINTS: usize = 300;
const POINTS_MAX: usize = 2000;
/// Default and maximum number of decisions in a list.
const DECISIONS: usize = 20;
const DECISIONS_MAX: usize = 100;
/// How late a turn may be before the loop counts as stuck.
const LATE: Duration = Duration::from_mins(2);

/// The host and its VMs.
#[utoipa::path(get, path = "/v1/host", responses((status = 200, body = HostView)))]
pub(super) async fn host(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
) -> Json<HostView> {
    Json(desk.shared.snapshot().host.clone())
}

/// The VMs, by name.
#[utoipa::path(get, path = "/v1/vms", responses((status = 200, body = VmsView)))]
pub(super) async fn vms(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
) -> Json<VmsView> {
    Json(VmsView {
        schema: SCHEMA,
        vms: desk.shared.snapshot().host.vms.clone(),
    })
}

/// All details of a VM.
#[utoipa::path(get, path = "/v1/vms/{vm}", params(("vm" = String, Path, description = "Its name")), responses((status = 200, body = VmView)))]
pub(super) async fn vm(
    State(desk): State<Arc<ApiState>>,
    PathValue(vm): PathValue<String>,
    Params(NoParams {}): Params<NoParams>,
) -> Answer<VmView> {
    let snapshot = desk.shared.snapshot();
    let summary = find(&snapshot, &vm)?.clone();
    let curve = snapshot.curves.get(&vm).cloned();
    let baseline = summary.settings.baseline_bytes;
    let known = (curve.as_ref()).and_then(|json| ByteCurve::new(json).ok());
    Ok(Json(VmView {
        schema: SCHEMA,
        summary,
        curve,
        relative_points: known.map_or_else(Vec::new, |curve| curve.relative_points(baseline)),
    }))
}

/// A VM's curve.
#[utoipa::path(get, path = "/v1/vms/{vm}/curve", params(("vm" = String, Path, description = "Its name")), responses((status = 200, body = CurveJson)))]
pub(super) async fn curve(
    State(desk): State<Arc<ApiState>>,
    PathValue(vm): PathValue<String>,
    Params(NoParams {}): Params<NoParams>,
) -> Answer<CurveJson> {
    let snapshot = desk.shared.snapshot();
    find(&snapshot, &vm)?;
    let curve = snapshot.curves.get(&vm).cloned();
    let missing = || not_found(format!("the curve of {vm:?} is not available yet"));
    curve.map(Json).ok_or_else(missing)
}

/// Activity by region of a VM's RAM.
#[utoipa::path(get, path = "/v1/vms/{vm}/heatmap", params(("vm" = String, Path, description = "Its name")), responses((status = 200, body = HeatmapView)))]
pub(super) async fn heatmap(
    State(desk): State<Arc<ApiState>>,
    PathValue(vm): PathValue<String>,
    Params(NoParams {}): Params<NoParams>,
) -> Answer<HeatmapView> {
    let snapshot = desk.shared.snapshot();
    find(&snapshot, &vm)?;
    let heat = snapshot.heat.get(&vm).map(|heat| (**heat).clone());
    let missing = || {
        not_found(format!(
            "there is no heatmap of {vm:?}: nothing was recorded yet, or it is not traced"
        ))
    };
    heat.map(Json).ok_or_else(missing)
}

/// What a history is to hold.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Span {
    /// Start of the interval; default: an hour before its end.
    since_unix_ms: Option<u64>,
    /// End of the interval; default: now.
    until_unix_ms: Option<u64>,
    /// Maximum number of points, 1 to 2000; default: 300.
    #[param(minimum = 1, maximum = 2000)]
    points: Option<usize>,
}

/// An interval of the past.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Interval {
    /// Its start; default: an hour before its end.
    since_unix_ms: Option<u64>,
    /// Its end; default: now.
    until_unix_ms: Option<u64>,
}

/// From when until before when, by what was given.
fn limits(since_ms: Option<u64>, until_ms: Option<u64>) -> Result<(u64, u64), RequestRefusal> {
    let until_ms = until_ms.unwrap_or_else(clock::unix_ms);
    let since_ms = since_ms.unwrap_or(until_ms.saturating_sub(HISTORY_MS));
    match since_ms <= until_ms {
        true => Ok((since_ms, until_ms)),
        false => Err(bad("since_unix_ms is later than until_unix_ms")),
    }
}

/// The curves that are kept of a VM: one every ten minutes, and the last one before it left or the daemon ended.
#[utoipa::path(get, path = "/v1/vms/{vm}/curves", params(("vm" = String, Path, description = "Its name; the UUID of one that has left"), Interval), responses((status = 200, body = KeptCurves)))]
pub(super) async fn curves(
    State(desk): State<Arc<ApiState>>,
    PathValue(vm): PathValue<String>,
    Params(interval): Params<Interval>,
) -> Answer<KeptCurves> {
    let (since_ms, until_ms) = limits(interval.since_unix_ms, interval.until_unix_ms)?;
    beside(Arc::clone(&desk.reads), move || {
        let kept = desk.shared.history.curves(&vm, since_ms).into_iter();
        let kept = kept.take_while(|(unix_ms, _)| *unix_ms < until_ms);
        let curves: Vec<_> = kept
            .map(|(unix_ms, curve)| KeptCurve { unix_ms, curve })
            .collect();
        if curves.is_empty() && !desk.shared.history.is_known(&vm) {
            find(&desk.shared.snapshot(), &vm)?;
        }
        Ok(Json(KeptCurves {
            schema: SCHEMA,
            vm,
            curves,
        }))
    })
    .await?
}

/// A VM's history.
#[utoipa::path(get, path = "/v1/vms/{vm}/history", params(("vm" = String, Path, description = "Its name; the UUID of one that has left"), Span), responses((status = 200, body = HistoryView)))]
pub(super) async fn history(
    State(desk): State<Arc<ApiState>>,
    PathValue(vm): PathValue<String>,
    Params(span): Params<Span>,
) -> Answer<HistoryView> {
    let (since_ms, until_ms) = limits(span.since_unix_ms, span.until_unix_ms)?;
    let points = within("points", span.points, POINTS, POINTS_MAX)?;
    beside(Arc::clone(&desk.reads), move || {
        let history = &desk.shared.history;
        let samples = history.samples(&vm, since_ms, until_ms, points);
        if samples.is_empty() && !history.is_known(&vm) {
            find(&desk.shared.snapshot(), &vm)?;
        }
        Ok(Json(HistoryView {
            schema: SCHEMA,
            vm,
            samples,
        }))
    })
    .await?
}

/// The control groups that are watched, and those that are not.
#[utoipa::path(get, path = "/v1/groups", responses((status = 200, body = GroupsView)))]
pub(super) async fn groups(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
) -> Json<GroupsView> {
    Json(GroupsView {
        schema: SCHEMA,
        groups: desk.shared.snapshot().host.groups.clone(),
    })
}

/// All details of a control group.
#[utoipa::path(get, path = "/v1/groups/{group}", params(("group" = String, Path, description = "Its name or its path")), responses((status = 200, body = GroupView)))]
pub(super) async fn group(
    State(desk): State<Arc<ApiState>>,
    PathValue(group): PathValue<String>,
    Params(NoParams {}): Params<NoParams>,
) -> Answer<GroupView> {
    let snapshot = desk.shared.snapshot();
    let summary = find_group(&snapshot, &group)?.clone();
    Ok(Json(GroupView {
        schema: SCHEMA,
        curve: snapshot.group_curves.get(&summary.path).cloned(),
        summary,
    }))
}

/// A control group's history. It is kept by path: it remains when the group is removed, and continues when a group with the same path is created.
#[utoipa::path(get, path = "/v1/groups/{group}/history", params(("group" = String, Path, description = "Its name or its path"), Span), responses((status = 200, body = HistoryView)))]
pub(super) async fn group_history(
    State(desk): State<Arc<ApiState>>,
    PathValue(group): PathValue<String>,
    Params(span): Params<Span>,
) -> Answer<HistoryView> {
    let (since_ms, until_ms) = limits(span.since_unix_ms, span.until_unix_ms)?;
    let points = within("points", span.points, POINTS, POINTS_MAX)?;
    let found = find_group(&desk.shared.snapshot(), &group)
        .map(|found| (found.group.clone(), found.path.clone()));
    let (vm, path, missing) = match found {
        Ok((name, path)) => (name, path, None),
        Err(refusal) if group.starts_with('/') => (group.clone(), group, Some(refusal)),
        Err(refusal) => return Err(refusal),
    };
    beside(Arc::clone(&desk.reads), move || {
        let history = &desk.shared.history;
        let samples = history.samples(&group_id(&path), since_ms, until_ms, points);
        match missing {
            Some(refusal) if samples.is_empty() => Err(refusal),
            _ => Ok(Json(HistoryView {
                schema: SCHEMA,
                vm,
                samples,
            })),
        }
    })
    .await?
}

/// What `apply` would carry out.
#[utoipa::path(get, path = "/v1/plan", responses((status = 200, body = ProposalView)))]
pub(super) async fn plan(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
) -> Json<ProposalView> {
    let proposal = desk.shared.snapshot().proposal.clone();
    Json(ProposalView {
        schema: SCHEMA,
        proposal: proposal.map(|proposal| Decision {
            inputs: None,
            ..proposal
        }),
    })
}

/// Which decisions a list is to hold.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct DecisionFilter {
    /// Decisions that affect this VM; default: all.
    vm: Option<String>,
    /// Decisions with a lower number than this; default: the newest.
    before: Option<u64>,
    /// Maximum number of decisions, 1 to 100; default: 20.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<usize>,
}

/// Decisions, newest first, without their `inputs`.
#[utoipa::path(get, path = "/v1/decisions", params(DecisionFilter), responses((status = 200, body = DecisionsView)))]
pub(super) async fn decisions(
    State(desk): State<Arc<ApiState>>,
    Params(which): Params<DecisionFilter>,
) -> Answer<DecisionsView> {
    let limit = within("limit", which.limit, DECISIONS, DECISIONS_MAX)?;
    beside(Arc::clone(&desk.reads), move || {
        let vm = which.vm.as_deref();
        let found = desk.shared.history.decisions(vm, which.before, limit);
        Ok(Json(list(found)))
    })
    .await?
}

/// The decisions that affected a VM, newest first, without their `inputs`.
#[utoipa::path(get, path = "/v1/vms/{vm}/explain", params(("vm" = String, Path, description = "Its name")), responses((status = 200, body = DecisionsView)))]
pub(super) async fn explain(
    State(desk): State<Arc<ApiState>>,
    PathValue(vm): PathValue<String>,
    Params(NoParams {}): Params<NoParams>,
) -> Answer<DecisionsView> {
    beside(Arc::clone(&desk.reads), move || {
        let found = desk.shared.history.decisions(Some(&vm), None, DECISIONS);
        if found.is_empty() {
            find(&desk.shared.snapshot(), &vm)?;
        }
        Ok(Json(list(found)))
    })
    .await?
}

/// A decision with its inputs.
#[utoipa::path(get, path = "/v1/decisions/{id}", params(("id" = u64, Path, description = "Its number")), responses((status = 200, body = Decision)))]
pub(super) async fn decision(
    State(desk): State<Arc<ApiState>>,
    PathValue(id): PathValue<u64>,
    Params(NoParams {}): Params<NoParams>,
) -> Answer<Decision> {
    beside(Arc::clone(&desk.reads), move || {
        recorded(&desk, id).map(Json)
    })
    .await?
}

/// Whether the daemon works; refused (503) if its turns are late.
#[utoipa::path(get, path = "/healthz", responses((status = 200, body = Acknowledgement)))]
pub(super) async fn health(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
) -> Answer<Acknowledgement> {
    // In ms, as a snapshot gives it.
    let interval = Duration::from_millis(desk.shared.snapshot().host.turn_interval_ms);
    let age = desk.shared.age();
    if age > interval.saturating_mul(2).saturating_add(LATE) {
        let late = format!(
            "the last turn ended {} s ago, and one is due every {} s",
            age.as_secs(),
            interval.as_secs()
        );
        return Err(RequestRefusal::new(RefusalKind::Busy, late));
    }
    Ok(Json(Acknowledgement::DONE))
}

/// Decision number `id`: the one that waits, or a recorded one.
pub(super) fn recorded(desk: &ApiState, id: u64) -> Result<Decision, RequestRefusal> {
    let proposal = desk.shared.snapshot().proposal.clone();
    proposal
        .filter(|proposal| proposal.id == id)
        .or_else(|| desk.shared.history.decision(id))
        .ok_or_else(|| not_found(format!("there is no decision {id}, or no longer")))
}

fn list(decisions: Vec<Decision>) -> DecisionsView {
    DecisionsView {
        schema: SCHEMA,
        decisions,
    }
}

/// How many: `given`, or else `usual`; 1 to `most`.
fn within(
    key: &str,
    given: Option<usize>,
    usual: usize,
    most: usize,
) -> Result<usize, RequestRefusal> {
    let value = given.unwrap_or(usual);
    if (1..=most).contains(&value) {
        Ok(value)
    } else {
        Err(bad(format!("{key}={value}: expected 1 to {most}")))
    }
}
