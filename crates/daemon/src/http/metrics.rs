//! The daemon, its host and its VMs as OpenMetrics text, for Prometheus and its kin.
//!
//! Names begin with `plimsoll_`, are in base units, and end in `_total` where they count. What is a VM's has the label
//! `vm`. What is unknown is absent, never zero.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::decision::{Mode, Phase, State as Fate};
use plimsoll_protocol::openmetrics::{Exposition, Family, Kind, Labels};
use plimsoll_protocol::vm::{BalloonState, HostView, Standing, TraceState, TraceView, VmSummary};

use super::params::{NoParams, Params};
use super::{Desk, beside};
use crate::history::History;
use crate::shared::{Refused, Snapshot};

/// Most buckets of a curve.
const BUCKETS_MAX: u32 = 40;
/// The first bucket's bound. From one to the next but one it doubles.
const BUCKET_BYTES: u64 = 4 << 20;
/// Decisions that are read at a time to be counted, and at most.
const DECISIONS: usize = 100;
const DECISIONS_MAX: usize = 10_000;

/// A number of the host: name, meaning, value.
type OfHost = (&'static str, &'static str, fn(&HostView) -> Option<f64>);
/// A number of a VM.
type OfVm = (&'static str, &'static str, fn(&VmSummary) -> Option<f64>);
/// A number of a tracer.
type OfTrace = (&'static str, &'static str, fn(&TraceView) -> Option<f64>);

const HOST_GAUGES: [OfHost; 15] = [
    ("host_total_bytes", "All RAM of the host.", |h| {
        Some(float(h.memory.total_bytes))
    }),
    (
        "host_available_bytes",
        "What the kernel could give without swapping.",
        |h| Some(float(h.memory.available_bytes)),
    ),
    (
        "host_divided_bytes",
        "Total memory that Plimsoll allocates.",
        |h| Some(float(h.memory.divided_bytes)),
    ),
    (
        "host_reclaimable_bytes",
        "What could be taken from the VMs with every promise kept.",
        |h| Some(float(h.memory.reclaimable_bytes)),
    ),
    ("paused", "1 while moves are paused.", |h| {
        Some(f64::from(h.paused))
    }),
    ("moving", "Whether a move is under way.", |h| {
        Some(f64::from(h.moving.is_some()))
    }),
    ("warnings", "Warnings for the operator.", |h| {
        Some(count(h.warnings.len()))
    }),
    ("vms", "VMs found.", |h| Some(count(h.vms.len()))),
    ("turn_duration_seconds", "What the last turn took.", |h| {
        Some(h.turn_took_ms / 1000.0)
    }),
    ("turn_interval_seconds", "From one turn to the next.", |h| {
        Some(seconds(h.turn_interval_ms))
    }),
    ("turn_timestamp_seconds", "When the last turn ended.", |h| {
        Some(seconds(h.now_unix_ms))
    }),
    ("start_timestamp_seconds", "When the daemon started.", |h| {
        Some(seconds(h.since_unix_ms))
    }),
    (
        "daemon_resident_bytes",
        "Resident memory of the daemon.",
        |h| Some(float(h.daemon_resident_bytes)),
    ),
    ("history_kept", "Whether history is kept on disk.", |h| {
        Some(f64::from(h.history_bytes.is_some()))
    }),
    ("history_bytes", "History on disk.", |h| {
        h.history_bytes.map(float)
    }),
];

const VM_GAUGES: [OfVm; 26] = [
    ("vm_ram_bytes", "Its RAM as it was started.", |vm| {
        Some(float(vm.ram_bytes))
    }),
    (
        "vm_direct_bytes",
        "Memory of its own: RAM less balloon.",
        |vm| Some(float(vm.direct_bytes)),
    ),
    (
        "vm_cache_bytes",
        "Capacity of the cache under its disk.",
        |vm| Some(float(vm.cache_bytes)),
    ),
    ("vm_size_bytes", "Both together.", |vm| {
        Some(float(vm.size_bytes))
    }),
    ("vm_target_bytes", "The size it is to have.", |vm| {
        vm.target_bytes.map(float)
    }),
    ("vm_min_bytes", "It never gets less.", |vm| {
        Some(float(vm.settings.min_bytes))
    }),
    ("vm_max_bytes", "It never gets more.", |vm| {
        Some(float(vm.settings.max_bytes))
    }),
    (
        "vm_baseline_bytes",
        "What its misses are measured by.",
        |vm| Some(float(vm.settings.baseline_bytes)),
    ),
    (
        "vm_promise_bytes",
        "Least size at which its promise is kept.",
        |vm| vm.promise_bytes.map(float),
    ),
    (
        "vm_reclaimable_bytes",
        "What it could give with its promise kept.",
        |vm| vm.reclaimable_bytes.map(float),
    ),
    (
        "vm_max_loss_ratio",
        "Most rise of its misses that it was promised.",
        |vm| Some(vm.settings.max_loss),
    ),
    ("vm_shares", "Its proportional right.", |vm| {
        Some(f64::from(vm.settings.shares))
    }),
    ("vm_managed", "Whether the daemon may move it.", |vm| {
        Some(f64::from(vm.settings.managed))
    }),
    (
        "vm_curve_references",
        "References behind its curve.",
        |vm| vm.curve_source.map(|_| float(vm.references)),
    ),
    (
        "vm_curve_timestamp_seconds",
        "When its curve was made.",
        |vm| vm.curve_unix_ms.map(seconds),
    ),
    (
        "vm_balloon_actual_bytes",
        "What its balloon leaves it.",
        |vm| {
            vm.balloon
                .as_ref()
                .map(|balloon| float(balloon.actual_bytes))
        },
    ),
    (
        "vm_balloon_target_bytes",
        "What its balloon was told to leave it.",
        |vm| {
            vm.balloon
                .as_ref()
                .and_then(|balloon| balloon.target_bytes)
                .map(float)
        },
    ),
    (
        "vm_balloon_stuck",
        "Whether its balloon does not move although it should.",
        |vm| {
            vm.balloon
                .as_ref()
                .map(|balloon| f64::from(balloon.state == BalloonState::Stuck))
        },
    ),
    (
        "vm_guest_available_bytes",
        "What the guest says is available to it.",
        |vm| {
            vm.balloon
                .as_ref()
                .and_then(|balloon| balloon.guest_available_bytes)
                .map(float)
        },
    ),
    (
        "vm_statistics_age_seconds",
        "Age of the guest's statistics.",
        |vm| {
            vm.balloon
                .as_ref()
                .and_then(|balloon| balloon.statistics_age_ms)
                .map(seconds)
        },
    ),
    (
        "vm_cache_used_bytes",
        "What the cache under its disk holds.",
        |vm| vm.cache.as_ref().map(|cache| float(cache.used_bytes)),
    ),
    (
        "vm_cache_disabled",
        "Whether that cache switched itself off.",
        |vm| {
            vm.cache
                .as_ref()
                .map(|cache| f64::from(cache.disabled.is_some()))
        },
    ),
    (
        "vm_relative_misses_ratio",
        "Predicted misses at its size over those at its baseline.",
        |vm| vm.relative.map(|relative| relative.expected),
    ),
    (
        "vm_relative_misses_low_ratio",
        "Lower edge of the same.",
        |vm| vm.relative.map(|relative| relative.low),
    ),
    (
        "vm_relative_misses_high_ratio",
        "Upper edge of the same: what promises are kept by.",
        |vm| vm.relative.map(|relative| relative.high),
    ),
    ("vm_traced", "Whether a tracer is at work.", |vm| {
        let trace = vm.trace.as_ref();
        Some(f64::from(
            trace.is_some_and(|trace| trace.state == TraceState::Tracing),
        ))
    }),
];

const VM_COUNTERS: [OfVm; 2] = [
    (
        "vm_cache_read_blocks",
        "Blocks read through the cache under its disk.",
        |vm| vm.cache.as_ref().map(|cache| float(cache.read_blocks)),
    ),
    ("vm_cache_hits", "Of them, from the cache.", |vm| {
        vm.cache.as_ref().map(|cache| float(cache.hits))
    }),
];

const TRACE_GAUGES: [OfTrace; 6] = [
    (
        "trace_overhead_ratio",
        "Time taken from the VM by its tracer, as a share of its CPU time.",
        |t| Some(t.overhead_ratio),
    ),
    (
        "trace_tracking_ratio",
        "Share of the VM's pages that is watched.",
        |t| Some(t.tracking_rate),
    ),
    ("trace_tracked_pages", "Pages watched.", |t| {
        Some(float(t.tracked_pages))
    }),
    (
        "trace_traps_per_second",
        "Traps per second in the last period; 0 with scans.",
        |t| Some(t.traps_per_second),
    ),
    (
        "trace_touches_per_second",
        "Pages per second that scans found touched in the last period; 0 with traps.",
        |t| Some(t.touches_per_second),
    ),
    (
        "trace_timestamp_seconds",
        "When the last period ended.",
        |t| t.last_unix_ms.map(seconds),
    ),
];

const TRACE_COUNTERS: [OfTrace; 4] = [
    (
        "trace_lost_references",
        "References that may be missing.",
        |t| Some(float(t.lost)),
    ),
    (
        "trace_lost_lines",
        "Reports of the tracer that could not be read.",
        |t| Some(float(t.lost_lines)),
    ),
    ("trace_periods", "Periods traced.", |t| {
        Some(float(t.periods))
    }),
    (
        "trace_restarts",
        "Times that the tracer was started anew.",
        |t| Some(float(t.restarts)),
    ),
];

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

const STANDINGS: [(Standing, &str); 4] = [
    (Standing::Safe, "safe"),
    (Standing::Tight, "tight"),
    (Standing::Violating, "violating"),
    (Standing::Unknown, "unknown"),
];

/// How decisions end.
const FATES: [(Fate, &str); 6] = [
    (Fate::Superseded, "superseded"),
    (Fate::Kept, "kept"),
    (Fate::RolledBack, "rolled-back"),
    (Fate::Partly, "partly"),
    (Fate::Failed, "failed"),
    (Fate::Stopped, "stopped"),
];

/// Decisions since the server's start, counted by how they ended.
#[derive(Debug)]
pub(super) struct Tally {
    ended: [u64; FATES.len()],
    /// The newest that was seen.
    newest: u64,
    /// Those that had not ended when they were seen.
    open: BTreeSet<u64>,
}

impl Tally {
    /// Counts those that end from now on.
    pub fn from_now_on(history: &History) -> Self {
        let recent = history.decisions(None, None, DECISIONS);
        let open = recent.iter().filter(|decision| !decision.state.has_ended());
        Self {
            ended: [0; FATES.len()],
            newest: recent.first().map_or(0, |decision| decision.id),
            open: open.map(|decision| decision.id).collect(),
        }
    }

    /// Counts what has ended since the last time.
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

/// All numbers, for Prometheus.
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = String, content_type = "application/openmetrics-text")))]
pub(super) async fn metrics(
    State(desk): State<Arc<Desk>>,
    Params(NoParams {}): Params<NoParams>,
) -> Result<impl IntoResponse, Refused> {
    let text = beside(Arc::clone(&desk.reads), move || {
        let ended = {
            let mut tally = desk.tally.lock().unwrap_or_else(PoisonError::into_inner);
            tally.update(&desk.shared.history);
            tally.ended
        };
        text(&desk.shared.snapshot(), ended)
    })
    .await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text))
}

/// The whole exposition.
pub(super) fn text(snapshot: &Snapshot, ended: [u64; FATES.len()]) -> String {
    let mut text = Exposition::new("plimsoll_");
    of_host(&mut text, &snapshot.host, ended);
    of_vms(&mut text, snapshot);
    text.finish()
}

fn of_host(text: &mut Exposition, host: &HostView, ended: [u64; FATES.len()]) {
    let labels: Labels<'_> = &[("version", &host.version), ("host", &host.host)];
    text.single(Kind::Info, ("build", "Version of the daemon."), labels, 1);
    for (name, help, value) in HOST_GAUGES {
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

fn of_vms(text: &mut Exposition, snapshot: &Snapshot) {
    let vms = &snapshot.host.vms;
    let help = "What runs a VM; an accelerator of \"tcg\" emulates.";
    let mut family = text.family(Kind::Info, "vm", help);
    for vm in vms {
        let accelerator = vm.accelerator.as_deref().unwrap_or("unknown");
        let labels: Labels<'_> = &[
            ("vm", &vm.vm),
            ("pid", &vm.pid),
            ("accelerator", &accelerator),
            ("libvirt", &vm.libvirt),
        ];
        family.sample(labels, 1);
    }
    for (kind, families) in [
        (Kind::Gauge, &VM_GAUGES[..]),
        (Kind::Counter, &VM_COUNTERS[..]),
    ] {
        for &(name, help, value) in families {
            let mut family = text.family(kind, name, help);
            for vm in vms {
                if let Some(value) = value(vm) {
                    family.sample(&[("vm", &vm.vm)], value);
                }
            }
        }
    }
    for (kind, families) in [
        (Kind::Gauge, &TRACE_GAUGES[..]),
        (Kind::Counter, &TRACE_COUNTERS[..]),
    ] {
        for &(name, help, value) in families {
            let mut family = text.family(kind, name, help);
            for vm in vms {
                if let Some(value) = vm.trace.as_ref().and_then(value) {
                    family.sample(&[("vm", &vm.vm)], value);
                }
            }
        }
    }
    let help = "Whether it meets its SLO; 1 for its standing.";
    let mut family = text.family(Kind::Gauge, "vm_standing", help);
    for vm in vms {
        for (standing, name) in STANDINGS {
            let labels: Labels<'_> = &[("vm", &vm.vm), ("standing", &name)];
            family.sample(labels, u8::from(standing == vm.standing));
        }
    }
    let help = "Working set by its curve; the label bound is estimate, at_least or at_most.";
    let mut family = text.family(Kind::Gauge, "vm_working_set_bytes", help);
    for vm in vms {
        if let Some(set) = &vm.working_set {
            let bound = set.bound.name();
            family.sample(&[("vm", &vm.vm), ("bound", &bound)], set.bytes);
        }
    }
    let curves = || {
        vms.iter()
            .filter_map(|vm| Some((vm, snapshot.curves.get(&vm.vm)?)))
    };
    // A window's references may fall as well as rise, so this is a gauge's histogram.
    let help = "References behind its curve by reuse distance; first references, and those beyond the curve, in +Inf.";
    let mut family = text.family(Kind::GaugeHistogram, "vm_reuse_distance_bytes", help);
    for (vm, curve) in curves() {
        buckets(&mut family, vm, curve);
    }
    let help = "References behind its curve that miss at every size: first ones, and those beyond the curve.";
    let mut family = text.family(Kind::Gauge, "vm_first_references", help);
    for (vm, curve) in curves() {
        let first = float(curve.references) - hits(curve, u64::MAX);
        family.sample(&[("vm", &vm.vm)], first);
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
        family.sample(&[("vm", &vm.vm), ("le", &le)], hits(curve, bound));
        if bound >= end {
            break;
        }
    }
    family.sample(&[("vm", &vm.vm), ("le", &"+Inf")], curve.references);
}

/// References that hit in a memory of `bytes`.
fn hits(curve: &CurveJson, bytes: u64) -> f64 {
    let pages = bytes / curve.page_bytes.max(1);
    let below = curve
        .points
        .partition_point(|point| point.size_pages <= pages);
    let ratio = below
        .checked_sub(1)
        .map_or(1.0, |at| curve.points[at].miss_ratio);
    (float(curve.references) * (1.0 - ratio)).round()
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
