//! What-if queries, and replay of decisions from their records, by calling the policy again.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use plimsoll_flow::PageCount;
use plimsoll_policy::Prediction;
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::answer::ReplayView;
use plimsoll_protocol::byte_curve::ByteCurve;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::decision::Decision;
use plimsoll_protocol::plan::PlanInputs;
use plimsoll_protocol::request::{HostWhatIf, RefusalKind, VmWhatIf};
use plimsoll_protocol::size::ByteSize;
use plimsoll_protocol::vm::{Relative, VmStatus, VmSummary};
use serde::Deserialize;
use tokio::time;
use utoipa::IntoParams;

use super::params::{NoParams, Params, PathValue, bad, find};
use super::views::recorded;
use super::{Answer, ApiState, beside};
use crate::shared::RequestRefusal;
use crate::vm::why_unpredicted;

/// How long a computation may wait for others.
const TURN_MAX: Duration = Duration::from_secs(5);

/// Another size of a VM.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Size {
    /// Size of the VM: its own memory and its cache.
    size_bytes: u64,
}

/// Predicted misses of a VM at another size.
#[utoipa::path(get, path = "/v1/vms/{vm}/whatif", params(("vm" = String, Path, description = "Its name"), Size), responses((status = 200, body = VmWhatIf)))]
pub(super) async fn vm(
    State(desk): State<Arc<ApiState>>,
    PathValue(vm): PathValue<String>,
    Params(Size { size_bytes }): Params<Size>,
) -> Answer<VmWhatIf> {
    let snapshot = desk.shared.snapshot();
    let summary = find(&snapshot, &vm)?;
    Ok(Json(at_size(summary, snapshot.curves.get(&vm), size_bytes)))
}

/// Memory that the host loses.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Loss {
    /// Memory that the host would lose; below zero: gain, at most as much as its RAM.
    lose_bytes: i64,
}

/// Final allocation if the host lost (or gained) memory, after as many moves as the step limit requires.
#[utoipa::path(get, path = "/v1/whatif", params(Loss), responses((status = 200, body = HostWhatIf)))]
pub(super) async fn host(
    State(desk): State<Arc<ApiState>>,
    Params(Loss { lose_bytes }): Params<Loss>,
) -> Answer<HostWhatIf> {
    let snapshot = desk.shared.snapshot();
    let ram_bytes = snapshot.host.memory.total_bytes;
    if lose_bytes < 0 && lose_bytes.unsigned_abs() > ram_bytes {
        let ram = ByteSize(ram_bytes).rounded();
        return Err(bad(format!(
            "lose_bytes: expected a gain of at most the host's RAM of {ram}"
        )));
    }
    let inputs = snapshot.inputs.clone();
    let inputs = inputs.ok_or_else(|| {
        RequestRefusal::new(
            RefusalKind::NotFound,
            "there is no VM that could get another size",
        )
    })?;
    computed(&desk, move || with_less(inputs, lose_bytes))
        .await
        .map(Json)
}

/// Runs the policy again on the recorded inputs of a decision.
#[utoipa::path(get, path = "/v1/decisions/{id}/replay", params(("id" = u64, Path, description = "Its number")), responses((status = 200, body = ReplayView)))]
pub(super) async fn replay(
    State(desk): State<Arc<ApiState>>,
    PathValue(id): PathValue<u64>,
    Params(NoParams {}): Params<NoParams>,
) -> Answer<ReplayView> {
    let on_desk = Arc::clone(&desk);
    let decision = beside(Arc::clone(&desk.reads), move || recorded(&on_desk, id)).await??;
    computed(&desk, move || replayed(&decision))
        .await?
        .map(Json)
}

/// Computes when fewer than the maximum are in progress; a client that disconnects frees its permit only when its
/// computation has ended.
async fn computed<T: Send + 'static>(
    desk: &ApiState,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RequestRefusal> {
    let permit = time::timeout(TURN_MAX, Arc::clone(&desk.what_ifs).acquire_owned()).await;
    let Ok(permit) = permit else {
        let busy = "too many requests for an allocation at a time; try again";
        return Err(RequestRefusal::new(RefusalKind::Busy, busy));
    };
    beside(Arc::clone(&desk.reads), move || {
        let _permit = permit;
        work()
    })
    .await
}

fn at_size(summary: &VmSummary, curve: Option<&CurveJson>, size_bytes: u64) -> VmWhatIf {
    let known = curve.and_then(|json| ByteCurve::new(json).ok());
    let baseline = summary.settings.baseline_bytes;
    let relative_then = (known.as_ref()).and_then(|curve| curve.relative(size_bytes, baseline));
    let (status_then, why) = status(summary, known.as_ref(), relative_then, size_bytes);
    VmWhatIf {
        schema: SCHEMA,
        vm: summary.vm.clone(),
        size_bytes: summary.size_bytes,
        size_then_bytes: size_bytes,
        misses: summary.misses,
        misses_then: curve.and_then(|curve| curve.misses_at(size_bytes / curve.page_bytes.max(1))),
        vcpu_seconds_per_second: summary.vcpu_seconds_per_second,
        relative: summary.relative,
        relative_then,
        status_then,
        why,
    }
}

/// A VM's prediction at a size, and its source.
fn status(
    summary: &VmSummary,
    curve: Option<&ByteCurve>,
    relative: Option<Relative>,
    size_bytes: u64,
) -> (VmStatus, String) {
    let settings = &summary.settings;
    let predicted = curve.map(|curve| {
        let size = PageCount::from_bytes(size_bytes, curve.page_size);
        let bound = (settings.promise).bound(curve.misses.vcpus(), summary.miss_cost);
        bound
            .predictions(relative, curve.misses.misses_per_second(size))
            .ok_or_else(|| why_unpredicted(&curve.misses, size))
    });
    let above = |value: fn(&Prediction) -> f64| {
        let above = |prediction: &&Prediction| value(prediction) > prediction.limit;
        let mut predictions = predicted.iter().flatten().flatten();
        predictions.find(above)
    };
    let (status, mut why) = match &predicted {
        None => (VmStatus::Unknown, "its curve is not known".to_owned()),
        Some(Err(why)) => (VmStatus::Unknown, (*why).to_owned()),
        Some(_) if let Some(it) = above(|prediction| prediction.expected) => (
            VmStatus::Violating,
            format!(
                "predicted to miss {}, limit {}",
                it.unit.misses(it.expected),
                it.unit.text(it.limit)
            ),
        ),
        Some(_) if let Some(it) = above(|prediction| prediction.high) => (
            VmStatus::Tight,
            format!(
                "within its promise as predicted, but not for certain: it may miss {}, promised {} at most",
                it.unit.misses(it.high),
                it.unit.text(it.limit)
            ),
        ),
        Some(_) => match summary.promise_bytes {
            Some(promise) if promise < size_bytes => (
                VmStatus::Safe,
                format!(
                    "it is within its limit, and would be with {} less",
                    ByteSize(size_bytes - promise).rounded()
                ),
            ),
            _ => (
                VmStatus::Tight,
                "its promise is kept, and it could give nothing".to_owned(),
            ),
        },
    };
    let (min, max) = (settings.min_bytes, settings.max_bytes);
    if size_bytes < min {
        why += &format!("; it never gets less than {}", ByteSize(min).rounded());
    } else if size_bytes < summary.kept_bytes {
        let kept = ByteSize(summary.kept_bytes).rounded();
        why += &format!("; its guest cannot give so much, and keeps {kept}");
    } else if size_bytes > max {
        why += &format!("; it never gets more than {}", ByteSize(max).rounded());
    }
    (status, why)
}

fn with_less(mut inputs: PlanInputs, lose_bytes: i64) -> HostWhatIf {
    let total = inputs.rules.total_bytes;
    inputs.rules.step_bytes = None;
    inputs.rules.total_bytes = if lose_bytes < 0 {
        total.saturating_add(lose_bytes.unsigned_abs())
    } else {
        total.saturating_sub(lose_bytes.unsigned_abs())
    };
    let plan = if inputs.rules.total_bytes == 0 {
        let all = ByteSize(total).rounded();
        Err(format!("of the {all} that are allocated, nothing is left"))
    } else {
        inputs.plan().map_err(|error| error.to_string())
    };
    let (plan, refusal) = match plan {
        Ok(plan) => (Some(plan), None),
        Err(why) => (None, Some(why)),
    };
    HostWhatIf {
        schema: SCHEMA,
        lose_bytes,
        plan,
        refusal,
    }
}

fn replayed(decision: &Decision) -> Result<ReplayView, RequestRefusal> {
    let id = decision.id;
    let Some(inputs) = &decision.inputs else {
        let none = format!("decision {id} was not taken by a policy: there is nothing to replay");
        return Err(RequestRefusal::new(RefusalKind::NotFound, none));
    };
    let (plan, agrees, why) = match inputs.plan() {
        Ok(plan) => {
            let agrees = decision.plan.as_ref() == Some(&plan);
            let why = if agrees {
                "the policy reproduces the recorded plan"
            } else {
                "the policy gives another plan: it was changed since, or the record was"
            };
            (Some(plan), agrees, why.to_owned())
        }
        Err(error) => (None, false, format!("the policy refuses: {error}")),
    };
    Ok(ReplayView {
        schema: SCHEMA,
        id,
        agrees,
        plan,
        why,
    })
}
