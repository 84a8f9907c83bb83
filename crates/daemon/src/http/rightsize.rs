//! The right size of a VM over time.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::rightsize::RightsizeView;
use serde::Deserialize;
use utoipa::IntoParams;

use super::params::{Params, PathValue, bad, find};
use super::{Answer, ApiState, beside};
use crate::demand::Needs;
use crate::rightsize::Rightsize;
use crate::vm::bytes;

/// Share of the curves whose needs are to fit, by default.
const PERCENTILE: f64 = 0.95;

/// The curves that are replayed.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Past {
    /// Start of the interval, which ends now.
    since_unix_ms: u64,
    /// Share of the curves whose smallest size within the bound is to fit, above 0 and at most 1; default: 0.95.
    #[param(exclusive_minimum = 0, maximum = 1)]
    percentile: Option<f64>,
}

/// The size that would have sufficed for most of an interval, and what would have happened with it.
#[utoipa::path(get, path = "/v1/vms/{vm}/rightsize", params(("vm" = String, Path, description = "Its name"), Past), responses((status = 200, body = RightsizeView)))]
pub(super) async fn rightsize(
    State(desk): State<Arc<ApiState>>,
    PathValue(vm): PathValue<String>,
    Params(past): Params<Past>,
) -> Answer<RightsizeView> {
    let percentile = past.percentile.unwrap_or(PERCENTILE);
    if !(percentile > 0.0 && percentile <= 1.0) {
        let message = format!("percentile={percentile}: expected above 0 and at most 1");
        return Err(bad(message));
    }
    beside(Arc::clone(&desk.reads), move || {
        let snapshot = desk.shared.snapshot();
        let summary = find(&snapshot, &vm)?;
        let curves = desk.shared.history.valid_curves(&vm, past.since_unix_ms);
        let found = Rightsize::of(&curves, &Needs::of(summary), percentile);
        let found = found.as_ref();
        let misses = found.and_then(|found| found.misses_per_second);
        Ok(Json(RightsizeView {
            schema: SCHEMA,
            since_unix_ms: past.since_unix_ms,
            percentile,
            curves: curves.len() as u64,
            days: found.map_or(0, |found| found.days),
            size_bytes: summary.size_bytes,
            right_bytes: found.map(|found| bytes(found.size)),
            confidence: found.and_then(|found| found.confidence),
            kept_ratio: found.map(|found| found.kept_ratio),
            kept_worst_day_ratio: found.map(|found| found.kept_worst_day_ratio),
            relative: found.and_then(|found| found.relative),
            misses_per_second: misses.map(|(then, _)| then),
            misses_at_baseline_per_second: misses.map(|(_, before)| before),
            vm,
        }))
    })
    .await?
}
