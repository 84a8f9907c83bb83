//! The daemon, its host and its VMs as OpenMetrics text, for Prometheus and compatible systems.
//!
//! Names begin with `plimsoll_`, are in base units, and end in `_total` for counters. Metrics of a VM have the label
//! `vm`, its name, and `uuid` if it has one, which stays the same when it is renamed or migrated. Those of a control group have the
//! labels `group`, its name, and `kind`; there are as many groups as are watched at most. An unknown value is absent, never zero.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::{Arc, PoisonError};

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::decision::{Mode, Phase, State as Fate};
use plimsoll_protocol::families;
use plimsoll_protocol::group::GroupSummary;
use plimsoll_protocol::openmetrics::{Exposition, Family, Kind, Labels};
use plimsoll_protocol::vm::{BalloonState, HostView, TraceState, TraceView, VmStatus, VmSummary};
use plimsoll_vm::escaped;

use super::params::{NoParams, Params};
use super::{ApiState, beside};
use crate::demand;
use crate::history::History;
use crate::shared::{RequestRefusal, Snapshot};

/// Maximum number of buckets of a curve.
const BUCKETS_MAX: u32 = 40;
/// Upper bound of the first bucket. The bound doubles every two buckets.
const BUCKET_BYTES: u64 = 4 << 20;
/// Number of decisions read at a time to be counted, and in total.
const DECISIONS: usize = 100;
const DECISIONS_MAX: usize = 10_000;

/// A metric of the host: name, meaning, value.
type HostMetric = (&'static str, &'static str, fn(&HostView) -> Option<f64>);
/// A metric of a VM.
type VmMetric = (&'static str, &'static str, fn(&VmSummary) -> Option<f64>);
/// A metric of a control group.
type GroupMetric = (&'static str, &'static str, fn(&GroupSummary) -> Option<f64>);
/// A metric of a tracer.
type TraceMetric = (&'static str, &'static str, fn(&TraceView) -> Option<f64>);

const HOST_GAUGES: &[HostMetric] = families! { h =>
    host_total_bytes: Some(float(h.memory.total_bytes)), "All RAM of the host.";
    host_available_bytes: Some(float(h.memory.available_bytes)), "Memory that the kernel could allocate without swapping.";
    host_divided_bytes: Some(float(h.memory.divided_bytes)), "Total memory that Plimsoll allocates.";
    host_reclaimable_bytes: Some(float(h.memory.reclaimable_bytes)),
        "Memory that could be taken from the VMs within every VM's max_loss.";
    paused: Some(f64::from(h.paused)), "1 while moves are paused.";
    moving: Some(f64::from(h.moving.is_some())), "Whether a move is in progress.";
    warnings: Some(count(h.warnings.len())), "Warnings for the operator.";
    vms: Some(count(h.vms.len())), "VMs discovered.";
    groups: Some(count(h.groups.watched.len())), "Control groups that are watched.";
    groups_left_out: Some(float(h.groups.left_out.iter().map(|left| left.count).sum())),
        "Control groups that match the patterns and are not watched.";
    turn_duration_seconds: Some(h.turn_took_ms / 1000.0), "Duration of the last turn.";
    turn_interval_seconds: Some(seconds(h.turn_interval_ms)), "Interval between turns.";
    turn_timestamp_seconds: Some(seconds(h.now_unix_ms)), "End of the last turn.";
    start_timestamp_seconds: Some(seconds(h.since_unix_ms)), "Start of the daemon.";
    daemon_resident_bytes: Some(float(h.daemon_resident_bytes)), "Resident memory of the daemon.";
    history_kept: Some(f64::from(h.history_bytes.is_some())), "Whether history is kept on disk.";
    history_bytes: h.history_bytes.map(float), "History on disk.";
};

pub(super) const VM_GAUGES: &[VmMetric] = families! { vm =>
    vm_ram_bytes: Some(float(vm.ram_bytes)), "RAM that the VM was started with.";
    vm_direct_bytes: Some(float(vm.direct_bytes)), "RAM less balloon.";
    vm_cache_bytes: Some(float(vm.cache_bytes)), "Capacity of the cache under its disk.";
    vm_size_bytes: Some(float(vm.size_bytes)), "RAM less balloon, and cache, together.";
    vm_target_bytes: vm.target_bytes.map(float), "Target of the size.";
    vm_min_bytes: Some(float(vm.settings.min_bytes)), "Minimum size.";
    vm_max_bytes: Some(float(vm.settings.max_bytes)), "Maximum size.";
    vm_baseline_bytes: Some(float(vm.settings.baseline_bytes)), "Size against which the misses are measured.";
    vm_promise_bytes: vm.promise_bytes.map(float), "Minimum size within its bounds on misses.";
    vm_reclaimable_bytes: vm.reclaimable_bytes.map(float), "Memory that could be taken from it within its bounds on misses.";
    vm_max_loss_ratio: vm.settings.promise.max_loss, "Bound on the relative rise of its misses.";
    vm_max_misses_per_second: vm.settings.promise.max_misses_per_second, "Bound on its misses per second.";
    vm_max_stall_ratio: vm.settings.promise.max_stall, "Bound on the time that it waits for misses, over its vCPU time.";
    vm_miss_cost_seconds: Some(vm.miss_cost.ms * 1e-3), "Time that it waits for a miss, measured or assumed.";
    vm_memory_stall_ratio: vm.memory_stall_ratio,
        "Share of the time in which a thread of its QEMU waited for memory of the host.";
    vm_shares: Some(f64::from(vm.settings.shares)), "Weight of the VM in proportional sharing.";
    vm_managed: Some(f64::from(vm.settings.managed)), "Whether the daemon may move its memory.";
    vm_curve_references: vm.curve_source.map(|_| float(vm.references)), "References behind its curve.";
    vm_curve_timestamp_seconds: vm.curve_unix_ms.map(seconds), "Time of its curve.";
    vm_balloon_actual_bytes: vm.balloon.as_ref().map(|balloon| float(balloon.actual_bytes)),
        "RAM that its balloon leaves it.";
    vm_balloon_target_bytes: vm.balloon.as_ref().and_then(|balloon| balloon.target_bytes).map(float),
        "Target of its balloon.";
    vm_balloon_stuck: vm.balloon.as_ref().map(|balloon| f64::from(balloon.state == BalloonState::Stuck)),
        "Whether its balloon does not move although it should.";
    vm_guest_available_bytes: vm.balloon.as_ref().and_then(|balloon| balloon.guest_available_bytes).map(float),
        "Available memory as the guest reports it.";
    vm_statistics_age_seconds: vm.balloon.as_ref().and_then(|balloon| balloon.statistics_age_ms).map(seconds),
        "Age of the guest's statistics.";
    vm_cache_used_bytes: vm.cache.as_ref().map(|cache| float(cache.used_bytes)),
        "Used memory of the cache under its disk.";
    vm_cache_disabled: vm.cache.as_ref().map(|cache| f64::from(cache.disabled.is_some())),
        "Whether that cache switched itself off.";
    vm_misses_per_second: vm.misses.map(|misses| misses.misses_per_second),
        "Predicted misses at its size per second of wall time.";
    vm_misses_low_per_second: vm.misses.map(|misses| misses.misses_low_per_second),
        "Lower confidence limit of the same.";
    vm_misses_high_per_second: vm.misses.map(|misses| misses.misses_high_per_second),
        "Upper confidence limit of the same.";
    vm_vcpu_seconds_per_second: vm.vcpu_seconds_per_second,
        "CPU time of its vCPUs per second of wall time, by which to divide for misses per second of vCPU time.";
    vm_relative_misses_ratio: vm.relative.map(|relative| relative.expected),
        "Predicted misses at its size over those at its baseline.";
    vm_relative_misses_low_ratio: vm.relative.map(|relative| relative.low), "Lower confidence limit of the same.";
    vm_relative_misses_high_ratio: vm.relative.map(|relative| relative.high),
        "Upper confidence limit of the same, which must stay within max_loss.";
    vm_traced: Some(f64::from(vm.trace.as_ref().is_some_and(|trace| trace.state == TraceState::Tracing))),
        "Whether it is being traced.";
};

const VM_COUNTERS: &[VmMetric] = families! { vm =>
    vm_cache_read_blocks: vm.cache.as_ref().map(|cache| float(cache.read_blocks)),
        "Blocks read through the cache under its disk.";
    vm_cache_hits: vm.cache.as_ref().map(|cache| float(cache.hits)), "Those served from the cache.";
    vm_refused_claims: Some(float(vm.refused_claims)),
        "Sizes reported by it or its disk daemon that the kernel rules out.";
};

const GROUP_GAUGES: &[GroupMetric] = families! { group =>
    group_charged_bytes: group.charged_bytes.map(float), "Memory charged to the control group and those below it.";
    group_limit_bytes: group.limit_bytes.map(float), "Its own limit of memory.";
    group_curve_references: group.curve_source.map(|_| float(group.references)), "References behind its curve.";
    group_curve_timestamp_seconds: group.curve_unix_ms.map(seconds), "Time of its curve.";
    group_traced: Some(f64::from(group.trace.as_ref().is_some_and(|trace| trace.state == TraceState::Tracing))),
        "Whether it is being traced.";
};

const TRACE_GAUGES: &[TraceMetric] = families! { t =>
    trace_overhead_ratio: Some(t.overhead_ratio),
        "Time taken by its tracer, as a share of the VM's CPU time; of a control group, of one CPU.";
    trace_tracking_ratio: Some(t.tracking_rate), "Share of its pages that is tracked.";
    trace_tracked_pages: Some(float(t.tracked_pages)), "Tracked pages.";
    trace_traps_per_second: Some(t.traps_per_second), "Traps per second in the last period; 0 with scans.";
    trace_touches_per_second: Some(t.touches_per_second),
        "Pages per second that scans found touched in the last period; 0 with traps.";
    trace_timestamp_seconds: t.last_unix_ms.map(seconds), "End of the last period.";
};

const TRACE_COUNTERS: &[TraceMetric] = families! { t =>
    trace_lost_references: Some(float(t.lost)), "References that may be missing.";
    trace_lost_lines: Some(float(t.lost_lines)), "Reports of the tracer that could not be read.";
    trace_periods: Some(float(t.periods)), "Periods traced.";
    trace_restarts: Some(float(t.restarts)), "Restarts of the tracer.";
};

const MODES: [(Mode, &str); 3] = [
    (Mode::Observe, "observe"),
    (Mode::Advise, "advise"),
    (Mode::Act, "act"),
];

const PHASES: [(Phase, &str); 6] = [
    (Phase::Whole, "whole"),
    (Phase::Shrinking, "shrinking"),
    (Phase::Tracing, "tracing"),
    (Phase::Moving, "moving"),
    (Phase::Checking, "checking"),
    (Phase::GivingBack, "giving-back"),
];

const STATUSES: [(VmStatus, &str); 4] = [
    (VmStatus::Safe, "safe"),
    (VmStatus::Tight, "tight"),
    (VmStatus::Violating, "violating"),
    (VmStatus::Unknown, "unknown"),
];

/// The results of decisions.
const FATES: [(Fate, &str); 6] = [
    (Fate::Superseded, "superseded"),
    (Fate::Kept, "kept"),
    (Fate::RolledBack, "rolled-back"),
    (Fate::Partly, "partly"),
    (Fate::Failed, "failed"),
    (Fate::Stopped, "stopped"),
];

/// Decisions since the server's start, counted by their result.
#[derive(Debug)]
pub(super) struct Tally {
    ended: [u64; FATES.len()],
    /// The newest decision read so far.
    newest: u64,
    /// Decisions that had not ended when they were last read.
    open: BTreeSet<u64>,
}

impl Tally {
    /// Counts decisions that end from now on.
    pub fn from_now_on(history: &History) -> Self {
        let recent = history.decisions(None, None, DECISIONS);
        let open = recent.iter().filter(|decision| !decision.state.has_ended());
        Self {
            ended: [0; FATES.len()],
            newest: recent.first().map_or(0, |decision| decision.id),
            open: open.map(|decision| decision.id).collect(),
        }
    }

    /// Counts decisions that ended since the last call.
    fn update(&mut self, history: &History) {
        let open = std::mem::take(&mut self.open);
        let seen = open.into_iter().filter_map(|id| history.decision(id));
        for decision in seen.collect::<Vec<_>>() {
            self.see(decision.id, decision.state);
        }
        let (known, mut before) = (self.newest, None);
        for _ in 0..DECISIONS_MAX / DECISIONS {
            let page = history.decisions(None, before, DECISIONS);
            let new = page.iter().take_while(|decision| decision.id > known);
            let new: Vec<_> = new.map(|decision| (decision.id, decision.state)).collect();
            for &(id, state) in &new {
                self.newest = self.newest.max(id);
                self.see(id, state);
            }
            before = new.last().map(|&(id, _)| id);
            if new.len() < DECISIONS {
                break;
            }
        }
    }

    fn see(&mut self, id: u64, state: Fate) {
        match FATES.iter().position(|&(fate, _)| fate == state) {
            Some(fate) => self.ended[fate] += 1,
            None => {
                self.open.insert(id);
            }
        }
    }
}

/// All metrics, for Prometheus.
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = String, content_type = "application/openmetrics-text")))]
pub(super) async fn metrics(
    State(desk): State<Arc<ApiState>>,
    Params(NoParams {}): Params<NoParams>,
) -> Result<impl IntoResponse, RequestRefusal> {
    let text = beside(Arc::clone(&desk.reads), move || {
        let ended = {
            let mut tally = desk.tally.lock().unwrap_or_else(PoisonError::into_inner);
            tally.update(&desk.shared.history);
            tally.ended
        };
        let doors = Doors {
            failed_logins: desk.logins.total(),
            certificate_end_unix_s: desk.certificate_end_unix_s,
        };
        text(&desk.shared.snapshot(), ended, doors, desk.curve_buckets)
    })
    .await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text))
}

/// What happens at the listeners.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Doors {
    pub failed_logins: u64,
    pub certificate_end_unix_s: Option<i64>,
}

/// The complete exposition, with the curves as histograms if `curve_buckets`.
pub(super) fn text(
    snapshot: &Snapshot,
    ended: [u64; FATES.len()],
    doors: Doors,
    curve_buckets: bool,
) -> String {
    let mut text = Exposition::new("plimsoll_");
    of_host(&mut text, &snapshot.host, ended);
    let failed = "Requests without the right token and connections without a valid client certificate, since the start.";
    let failed = ("failed_logins", failed);
    text.single(Kind::Counter, failed, &[], doors.failed_logins);
    if let Some(end) = doors.certificate_end_unix_s {
        let end_of = (
            "certificate_end_timestamp_seconds",
            "End of the server's certificate.",
        );
        text.single(Kind::Gauge, end_of, &[], end);
    }
    of_vms(&mut text, snapshot, curve_buckets);
    of_groups(&mut text, &snapshot.host.groups.watched);
    text.finish()
}

fn of_host(text: &mut Exposition, host: &HostView, ended: [u64; FATES.len()]) {
    let labels: Labels<'_> = &[("version", &host.version), ("host", &host.host)];
    text.single(Kind::Info, ("build", "Version of the daemon."), labels, 1);
    for &(name, help, value) in HOST_GAUGES {
        if let Some(value) = value(host) {
            text.single(Kind::Gauge, (name, help), &[], value);
        }
    }
    let help = "Memory that Plimsoll allocates, by its holder.";
    let mut family = text.family(Kind::Gauge, "host_memory_bytes", help);
    for (holder, bytes) in [
        ("vms-direct", host.memory.vms_direct_bytes),
        ("vms-cache", host.memory.vms_cache_bytes),
        ("store", host.memory.store_bytes),
        ("spare", host.memory.spare_bytes),
    ] {
        family.sample(&[("holder", &holder)], bytes);
    }
    let help = "What the daemon may do; 1 for its mode.";
    let mut family = text.family(Kind::Gauge, "mode", help);
    for (mode, name) in MODES {
        family.sample(&[("mode", &name)], u8::from(mode == host.mode));
    }
    let help = "Phase of the host's workflow; 1 for the present one.";
    let mut family = text.family(Kind::Gauge, "phase", help);
    for (phase, name) in PHASES {
        family.sample(&[("phase", &name)], u8::from(phase == host.phase));
    }
    let turns = ("turns", "Turns since the start.");
    text.single(Kind::Counter, turns, &[], host.turn);
    let help = "Decisions since the start, by their final state.";
    let mut family = text.family(Kind::Counter, "decisions", help);
    for ((_, name), count) in FATES.into_iter().zip(ended) {
        family.sample(&[("state", &name)], count);
    }
}

/// Adds a sample of `vm`, with more labels than its own.
fn of_vm(family: &mut Family<'_>, vm: &VmSummary, labels: Labels<'_>, value: impl Display) {
    let mut all: Vec<(&str, &dyn Display)> = vec![("vm", &vm.vm)];
    if let Some(uuid) = &vm.uuid {
        all.push(("uuid", uuid));
    }
    all.extend_from_slice(labels);
    family.sample(&all, value);
}

fn of_vms(text: &mut Exposition, snapshot: &Snapshot, curve_buckets: bool) {
    let vms = &snapshot.host.vms;
    let help = "What runs a VM; an accelerator of \"tcg\" emulates.";
    let mut family = text.family(Kind::Info, "vm", help);
    for vm in vms {
        let accelerator = vm
            .accelerator
            .map_or_else(|| "unknown".to_owned(), |by| by.to_string());
        let labels: Labels<'_> = &[
            ("pid", &vm.pid),
            ("accelerator", &accelerator),
            ("libvirt", &vm.libvirt),
        ];
        of_vm(&mut family, vm, labels, 1);
    }
    for (kind, families) in [(Kind::Gauge, VM_GAUGES), (Kind::Counter, VM_COUNTERS)] {
        for &(name, help, value) in families {
            let mut family = text.family(kind, name, help);
            for vm in vms {
                if let Some(value) = value(vm) {
                    of_vm(&mut family, vm, &[], value);
                }
            }
        }
    }
    for (kind, families) in [(Kind::Gauge, TRACE_GAUGES), (Kind::Counter, TRACE_COUNTERS)] {
        for &(name, help, value) in families {
            let mut family = text.family(kind, name, help);
            for vm in vms {
                if let Some(value) = vm.trace.as_ref().and_then(value) {
                    of_vm(&mut family, vm, &[], value);
                }
            }
            for group in &snapshot.host.groups.watched {
                if let Some(value) = group.trace.as_ref().and_then(value) {
                    of_group(&mut family, group, &[], value);
                }
            }
        }
    }
    let help = "Whether it meets its SLO; 1 for its status.";
    let mut family = text.family(Kind::Gauge, "vm_status", help);
    for vm in vms {
        for (status, name) in STATUSES {
            let value = u8::from(status == vm.status);
            of_vm(&mut family, vm, &[("status", &name)], value);
        }
    }
    let help = "Working set by its curve; the label bound is estimate, at_least or at_most.";
    let mut family = text.family(Kind::Gauge, "vm_working_set_bytes", help);
    for vm in vms {
        if let Some(set) = &vm.working_set {
            let bound = set.bound.name();
            of_vm(&mut family, vm, &[("bound", &bound)], set.bytes);
        }
    }
    let help = "Smallest size at which its misses rise by no more than the promise, by the upper limit of its curve's band.";
    let mut family = text.family(Kind::Gauge, "vm_demand_bytes", help);
    for vm in vms {
        let demands = snapshot.demands.get(&vm.vm).into_iter().flatten();
        for ((promise, _), bytes) in demand::PROMISES.iter().zip(demands) {
            of_vm(&mut family, vm, &[("promise", promise)], bytes);
        }
    }
    let curves = || {
        vms.iter()
            .filter_map(|vm| Some((vm, snapshot.curves.get(&vm.vm)?)))
    };
    if curve_buckets {
        // The number of references in a window may rise and fall, so this is a gauge histogram.
        let help = "References behind its curve by reuse distance; first references, and those beyond the curve, in +Inf.";
        let mut family = text.family(Kind::GaugeHistogram, "vm_reuse_distance_bytes", help);
        for (vm, curve) in curves() {
            buckets(&mut family, vm, curve);
        }
    }
    let help = "References behind its curve that miss at every size: first ones, and those beyond the curve.";
    let mut family = text.family(Kind::Gauge, "vm_first_references", help);
    for (vm, curve) in curves() {
        let first = float(curve.references) - hits(curve, u64::MAX);
        of_vm(&mut family, vm, &[], first);
    }
}

/// Adds a sample of a control group.
fn of_group(
    family: &mut Family<'_>,
    group: &GroupSummary,
    labels: Labels<'_>,
    value: impl Display,
) {
    let mut all: Vec<(&str, &dyn Display)> = vec![("group", &group.group), ("kind", &group.kind)];
    all.extend_from_slice(labels);
    family.sample(&all, value);
}

fn of_groups(text: &mut Exposition, groups: &[GroupSummary]) {
    let help = "A control group that is watched.";
    let mut family = text.family(Kind::Info, "group", help);
    for group in groups {
        let path = escaped(&group.path);
        let labels: Labels<'_> = &[("path", &path), ("version", &group.cgroup_version)];
        of_group(&mut family, group, labels, 1);
    }
    for &(name, help, value) in GROUP_GAUGES {
        let mut family = text.family(Kind::Gauge, name, help);
        for group in groups {
            if let Some(value) = value(group) {
                of_group(&mut family, group, &[], value);
            }
        }
    }
    let help = "Working set by its curve; the label bound is estimate, at_least or at_most.";
    let mut family = text.family(Kind::Gauge, "group_working_set_bytes", help);
    for group in groups {
        if let Some(set) = &group.working_set {
            let bound = set.bound.name();
            of_group(&mut family, group, &[("bound", &bound)], set.bytes);
        }
    }
}

/// A curve as a histogram. Bounds are the same for all VMs and at all times, up to the larger of the VM's RAM and its
/// curve's last size.
fn buckets(family: &mut Family<'_>, vm: &VmSummary, curve: &CurveJson) {
    let last = curve.points.last();
    let last = last.map_or(0, |point| point.size_pages.saturating_mul(curve.page_bytes));
    let end = last.max(vm.ram_bytes);
    for index in 0..BUCKETS_MAX - 1 {
        let octave = BUCKET_BYTES << (index / 2);
        let bound = octave + octave / 2 * u64::from(index % 2);
        let le = format!("{bound}.0");
        of_vm(family, vm, &[("le", &le)], hits(curve, bound));
        if bound >= end {
            break;
        }
    }
    of_vm(family, vm, &[("le", &"+Inf")], curve.references);
}

/// The number of references that hit in a memory of `bytes`.
fn hits(curve: &CurveJson, bytes: u64) -> f64 {
    let pages = bytes / curve.page_bytes.max(1);
    (float(curve.references) * (1.0 - curve.miss_ratio(pages))).round()
}

#[expect(clippy::cast_precision_loss, reason = "a metric is a float")]
fn float(value: u64) -> f64 {
    value as f64
}

#[expect(clippy::cast_precision_loss, reason = "a metric is a float")]
fn count(value: usize) -> f64 {
    value as f64
}

fn seconds(ms: u64) -> f64 {
    float(ms) / 1000.0
}
