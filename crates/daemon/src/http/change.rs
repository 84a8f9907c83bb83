//! Changes requested by clients: passed to the control loop, whose answer is returned.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use plimsoll_protocol::answer::{Acknowledgement, ChangedVm};
use plimsoll_protocol::decision::Decision;
use plimsoll_protocol::request::{Choice, RefusalKind, SettingsChange};
use serde::Deserialize;
use tokio::sync::oneshot;
use tokio::time;
use utoipa::ToSchema;

use super::params::{Body, NoParams, Params, PathValue, find};
use super::{Answer, ApiState};
use crate::shared::{Command, Reply, RequestRefusal};

/// The body of what needs none.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct EmptyBody {}

/// Carries out a proposal; the answer is the decision as it begins.
#[utoipa::path(post, path = "/v1/apply", request_body = Choice, responses((status = 200, body = Decision)))]
pub(super) async fn apply(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
    Body(choice): Body<Choice>,
) -> Answer<Decision> {
    let done = order(&desk, |reply| Command::Apply(choice, reply)).await;
    done.map(Json)
}

/// Undoes a decision; the answer is the decision that does so.
#[utoipa::path(post, path = "/v1/rollback", request_body = Choice, responses((status = 200, body = Decision)))]
pub(super) async fn roll_back(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
    Body(choice): Body<Choice>,
) -> Answer<Decision> {
    let done = order(&desk, |reply| Command::Rollback(choice, reply)).await;
    done.map(Json)
}

/// Stops all moves; a move in progress stops where it is.
#[utoipa::path(post, path = "/v1/pause", responses((status = 200, body = Acknowledgement)))]
pub(super) async fn pause(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
    Body(EmptyBody {}): Body<EmptyBody>,
) -> Answer<Acknowledgement> {
    order(&desk, Command::Pause).await?;
    Ok(Json(acknowledged(&desk)))
}

/// Allows moves again.
#[utoipa::path(post, path = "/v1/resume", responses((status = 200, body = Acknowledgement)))]
pub(super) async fn resume(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
    Body(EmptyBody {}): Body<EmptyBody>,
) -> Answer<Acknowledgement> {
    order(&desk, Command::Resume).await?;
    Ok(Json(acknowledged(&desk)))
}

/// Reads the configuration again; an invalid one is refused, and the previous one stays in force.
#[utoipa::path(post, path = "/v1/reload", responses((status = 200, body = Acknowledgement)))]
pub(super) async fn reload(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
    Body(EmptyBody {}): Body<EmptyBody>,
) -> Answer<Acknowledgement> {
    order(&desk, Command::Reload).await?;
    Ok(Json(Acknowledgement::DONE))
}

/// Changes a VM's limits.
#[utoipa::path(patch, path = "/v1/vms/{vm}", params(("vm" = String, Path, description = "Its name")), request_body = SettingsChange, responses((status = 200, body = ChangedVm)))]
pub(super) async fn set(
    State(desk): State<Arc<ApiState>>,
    PathValue(vm): PathValue<String>,
    Params(NoParams {}): Params<NoParams>,
    Body(change): Body<SettingsChange>,
) -> Answer<ChangedVm> {
    find(&desk.shared.snapshot(), &vm)?;
    let vm = order(&desk, |reply| Command::Set(vm, change, reply)).await?;
    Ok(Json(ChangedVm {
        acknowledgement: acknowledged(&desk),
        vm,
    }))
}

/// Acknowledges a change that outlives the daemon, if the history is on disk.
fn acknowledged(desk: &ApiState) -> Acknowledgement {
    let warnings = desk.shared.history.warnings();
    Acknowledgement {
        not_stored: (!warnings.is_empty()).then(|| warnings.join("; ")),
        ..Acknowledgement::DONE
    }
}

/// Passes a command to the turn loop and waits for its answer.
async fn order<T>(
    desk: &ApiState,
    command: impl FnOnce(Reply<T>) -> Command,
) -> Result<T, RequestRefusal> {
    let (reply, answer) = oneshot::channel();
    desk.shared.command(command(reply))?;
    let why = match time::timeout(desk.command_max, answer).await {
        Ok(Ok(answer)) => return answer,
        Ok(Err(_)) => "the daemon dropped the request, as it does when it shuts down",
        Err(_) => "the turn loop does not answer",
    };
    let message = format!("{why}; the request may still be carried out: check before repeating it");
    Err(RequestRefusal::new(RefusalKind::Busy, message))
}
