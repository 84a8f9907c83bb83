//! What the VMs need over time, for planning with many hosts.

use std::sync::Arc;
use std::{fs, thread};

use axum::Json;
use axum::extract::State;
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::fleet::{
    HostDemands, INTERVAL_MIN_MS, INTERVALS_MAX, VmDemands, are_intervals_accepted,
};
use plimsoll_protocol::request::RefusalKind;
use plimsoll_protocol::vm::{MissCost, Promise, Settings};
use serde::Deserialize;
use utoipa::IntoParams;

use super::params::{Params, bad};
use super::{Answer, ApiState, beside};
use crate::demand::Needs;
use crate::shared::RequestRefusal;
use crate::vm::bytes;

/// Default length of an interval, and of all of them.
const INTERVAL_MS: u64 = 3_600_000;
const PAST_MS: u64 = 24 * INTERVAL_MS;

/// The intervals of needs.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Intervals {
    /// Start of the first interval; default: a day ago.
    since_unix_ms: Option<u64>,
    /// Length of an interval, 60000 or more. There are at most 10000 until now; default: an hour, or longer if there would be more.
    #[param(minimum = 60_000)]
    interval_ms: Option<u64>,
}

/// What each VM needed for its limit in each interval, by the curves of its history; VMs with a UUID that are not here any
/// more too.
#[utoipa::path(get, path = "/v1/demands", params(Intervals), responses((status = 200, body = HostDemands)))]
pub(super) async fn demands(
    State(desk): State<Arc<ApiState>>,
    Params(intervals): Params<Intervals>,
) -> Answer<HostDemands> {
    let now_unix_ms = desk.shared.clock.now().unix_ms;
    let since_unix_ms = intervals.since_unix_ms;
    let since_unix_ms = since_unix_ms.unwrap_or(now_unix_ms.saturating_sub(PAST_MS));
    let span_ms = now_unix_ms.saturating_sub(since_unix_ms);
    let longest = span_ms / INTERVALS_MAX + 1;
    let interval_ms = intervals.interval_ms.unwrap_or(INTERVAL_MS.max(longest));
    if !are_intervals_accepted(span_ms, interval_ms) {
        let message = format!(
            "interval_ms={interval_ms}: expected {INTERVAL_MIN_MS} or more, and at most {INTERVALS_MAX} intervals"
        );
        return Err(bad(message));
    }
    beside(Arc::clone(&desk.reads), move || {
        let history = &desk.shared.history;
        let over_time = |vm: &str, needs: &Needs<'_>| {
            let curves = history.valid_curves(vm, since_unix_ms);
            needs.over_time(&curves, since_unix_ms, interval_ms)
        };
        let snapshot = desk.shared.snapshot();
        if snapshot.host.turn == 0 {
            // Its VMs are not found yet: it must not be taken for a host without any.
            let starting = "the daemon has just started and has not looked for VMs yet; try again";
            return Err(RequestRefusal::new(RefusalKind::Busy, starting));
        }
        let mut vms: Vec<VmDemands> = Vec::new();
        for summary in &snapshot.host.vms {
            let needs = Needs::of(summary);
            vms.push(VmDemands {
                vm: summary.vm.clone(),
                uuid: summary.uuid.clone(),
                present: true,
                managed: summary.settings.managed,
                size_bytes: summary.size_bytes,
                unknown_need_bytes: bytes(needs.unknown()),
                intervals: over_time(&summary.vm, &needs),
            });
        }
        let present = snapshot.host.vms.iter().filter_map(|vm| vm.uuid.as_deref());
        let departed = history.departed(since_unix_ms, &present.collect::<Vec<_>>());
        for (uuid, baseline_bytes) in departed {
            let settings = Settings {
                min_bytes: 0,
                max_bytes: u64::MAX,
                baseline_bytes,
                shares: 1,
                promise: Promise::DEFAULT,
                managed: true,
            };
            let needs = Needs {
                settings: &settings,
                cost: MissCost::default(),
                kept_bytes: 0,
            };
            vms.push(VmDemands {
                vm: uuid.clone(),
                present: false,
                managed: true,
                size_bytes: 0,
                unknown_need_bytes: bytes(needs.unknown()),
                intervals: over_time(&uuid, &needs),
                uuid: Some(uuid),
            });
        }
        Ok(Json(HostDemands {
            schema: SCHEMA,
            host: snapshot.host.host.clone(),
            now_unix_ms,
            since_unix_ms,
            interval_ms,
            processors: processors(),
            total_bytes: snapshot.host.memory.total_bytes,
            vms,
        }))
    })
    .await?
}

/// The processors of the host, whichever of them this daemon may run on.
fn processors() -> Option<u32> {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").ok();
    let online = online.and_then(|list| count(&list));
    online.or_else(|| u32::try_from(thread::available_parallelism().ok()?.get()).ok())
}

/// The number of numbers in the kernel's list of ranges, as in `0-3,6`.
fn count(list: &str) -> Option<u32> {
    list.trim_end().split(',').try_fold(0_u32, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let [first, last] = [first, last].map(|number| number.parse::<u32>().ok());
        sum.checked_add(last?.checked_sub(first?)?.checked_add(1)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_by_the_kernels_list() {
        let counts = ["0", "0-1\n", "0-3,6,8-9\n", "", "x", "3-1", "0-4294967295"].map(count);
        assert_eq!(counts, [Some(1), Some(2), Some(7), None, None, None, None]);
        assert!(processors() >= u32::try_from(thread::available_parallelism().unwrap().get()).ok());
    }
}
