//! A host with three VMs as its daemon tells of it; the name of one is an attack on the terminal.

use plimsoll_flow::{Accelerator, GroupKind, TraceMethod, WorkingSetBound};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::curve_json::{CurveJson, PointJson};
use plimsoll_protocol::decision::{
    Check, Decision, HoldingView, Initiator, Kind, Mode, Phase, State, Step, StepState, Verdict,
};
use plimsoll_protocol::group::{GroupSummary, GroupView, Groups, LeftOutGroups};
use plimsoll_protocol::vm::{
    BackendRefusal, BackendView, BalloonState, BalloonView, CacheView, CurveSource, HeatRow,
    HeatmapView, HistoryView, HostMemory, HostView, MissCost, Promise, Relative, Sample, Settings,
    TraceState, TraceView, VmStatus, VmSummary, VmView, WorkingSetView,
};

/// A name that clears the screen of who prints it raw.
pub const HOSTILE: &str = "db,\"\u{1b}[2J\u{7}\u{9b}1m";
/// A name of a VM that a user would write for a control group.
pub const MISNAMED: &str = "cgroup:x";
/// 2026-11-22 11:31:55 UTC.
pub const NOW_UNIX_MS: u64 = 1_795_347_115_000;

pub const MIB: u64 = 1 << 20;

fn trace() -> TraceView {
    TraceView {
        state: TraceState::Tracing,
        method: TraceMethod::Traps,
        error: None,
        pid: Some(4711),
        periods: 321,
        tracking_rate: 0.0625,
        tracked_pages: 8192,
        traps_per_second: 171.4,
        touches_per_second: 0.0,
        overhead_ratio: 0.0098,
        lost: 0,
        lost_lines: 0,
        restarts: 0,
        last_unix_ms: Some(NOW_UNIX_MS - 3000),
    }
}

/// A backend for private RAM: only write scans can attach.
fn backend(backend: TraceMethod) -> BackendView {
    let refusal = BackendRefusal {
        name: "not-shared-memory".to_owned(),
        why: "the VM's RAM is private memory".to_owned(),
        change: "share it".to_owned(),
    };
    let can = backend == TraceMethod::WriteScans;
    BackendView {
        backend,
        refusals: if can { vec![] } else { vec![refusal] },
    }
}

fn summary(vm: &str, status: VmStatus, why: &str, direct_mib: u64, cache_mib: u64) -> VmSummary {
    let size_bytes = (direct_mib + cache_mib) * MIB;
    VmSummary {
        vm: vm.to_owned(),
        pid: 1234,
        accelerator: Some(Accelerator::Tcg),
        uuid: None,
        refused_claims: 0,
        backends: TraceMethod::ALL.map(backend).into(),
        libvirt: false,
        status,
        why: why.to_owned(),
        stopped: None,
        ram_bytes: 512 * MIB,
        direct_bytes: direct_mib * MIB,
        cache_bytes: cache_mib * MIB,
        size_bytes,
        target_bytes: None,
        settings: Settings {
            min_bytes: 128 * MIB,
            max_bytes: 512 * MIB,
            baseline_bytes: 512 * MIB,
            shares: 100,
            promise: Promise::on_loss(0.25),
            managed: true,
        },
        working_set: Some(WorkingSetView {
            bytes: 161 * MIB,
            bound: WorkingSetBound::Estimate,
        }),
        misses: None,
        vcpu_seconds_per_second: None,
        miss_cost: MissCost::default(),
        memory_stall_ratio: None,
        relative: Some(Relative {
            expected: 1.03,
            low: 0.98,
            high: 1.08,
        }),
        reclaimable_bytes: Some(0),
        promise_bytes: Some(size_bytes),
        kept_bytes: 0,
        curve_source: Some(CurveSource::Trap),
        references: 123_456,
        curve_unix_ms: Some(NOW_UNIX_MS - 12_000),
        trace: Some(trace()),
        balloon: Some(BalloonView {
            actual_bytes: direct_mib * MIB,
            target_bytes: None,
            state: BalloonState::Idle,
            guest_available_bytes: Some(90 * MIB),
            statistics_age_ms: Some(4000),
        }),
        cache: None,
    }
}

fn vms() -> Vec<VmSummary> {
    let mut mail = summary(
        "mail",
        VmStatus::Tight,
        "it can give nothing without missing more than promised",
        320,
        128,
    );
    mail.accelerator = Some(Accelerator::Kvm);
    mail.libvirt = true;
    mail.curve_source = Some(CurveSource::Disk);
    mail.target_bytes = Some(480 * MIB);
    mail.working_set = Some(WorkingSetView {
        bytes: 300 * MIB,
        bound: WorkingSetBound::AtLeast,
    });
    mail.cache = Some(CacheView {
        capacity_bytes: 128 * MIB,
        used_bytes: 100 * MIB,
        read_blocks: 1_200_000,
        hits: 900_000,
        disabled: None,
    });
    let mut web = summary("web", VmStatus::Safe, "it could give 120 MiB", 512, 0);
    web.reclaimable_bytes = Some(120 * MIB);
    web.promise_bytes = Some(392 * MIB);
    let mut hostile = summary(HOSTILE, VmStatus::Unknown, "\u{1b}]0;owned\u{7}", 448, 0);
    hostile.working_set = None;
    hostile.relative = None;
    hostile.reclaimable_bytes = None;
    hostile.promise_bytes = None;
    hostile.curve_source = None;
    hostile.trace = Some(TraceView {
        state: TraceState::Failed,
        error: Some("its RAM is private\u{1b}[31m".to_owned()),
        lost: 7,
        ..trace()
    });
    hostile.balloon = None;
    hostile.stopped = Some("paused\u{1b}[2J".to_owned());
    vec![hostile, mail, web]
}

pub fn host() -> HostView {
    let vms = vms();
    let sum = |of: fn(&VmSummary) -> u64| vms.iter().map(of).sum();
    HostView {
        schema: SCHEMA,
        host: "example".to_owned(),
        version: "0.1.0".to_owned(),
        mode: Mode::Advise,
        paused: false,
        phase: Phase::Whole,
        since_unix_ms: NOW_UNIX_MS - 3_600_000,
        now_unix_ms: NOW_UNIX_MS,
        turn: 120,
        turn_interval_ms: 30_000,
        turn_took_ms: 12.5,
        memory: HostMemory {
            total_bytes: 4096 * MIB,
            divided_bytes: 1536 * MIB,
            vms_direct_bytes: sum(|vm| vm.direct_bytes),
            vms_cache_bytes: sum(|vm| vm.cache_bytes),
            store_bytes: 0,
            spare_bytes: 128 * MIB,
            reclaimable_bytes: 120 * MIB,
            available_bytes: 1024 * MIB,
        },
        vms,
        groups: Groups {
            watched: groups(),
            left_out: vec![LeftOutGroups {
                why: "no more than 2 groups are watched at a time (groups.max)".to_owned(),
                count: 12,
                paths: vec!["/system.slice/cron.service".to_owned()],
            }],
        },
        moving: None,
        warnings: vec!["the history is off\u{1b}[5m".to_owned()],
        history_bytes: Some(3 * MIB),
        daemon_resident_bytes: 20 * MIB,
    }
}

/// A group with a curve, and one whose name attacks the terminal and that is not traced.
fn groups() -> Vec<GroupSummary> {
    let nginx = GroupSummary {
        group: "nginx.service".to_owned(),
        kind: GroupKind::Systemd,
        path: "/system.slice/nginx.service".to_owned(),
        cgroup_version: 2,
        charged_bytes: Some(300 * MIB),
        limit_bytes: Some(512 * MIB),
        working_set: Some(WorkingSetView {
            bytes: 180 * MIB,
            bound: WorkingSetBound::Estimate,
        }),
        curve_source: Some(CurveSource::FirstTouch),
        references: 123_456,
        curve_unix_ms: Some(NOW_UNIX_MS - 5000),
        trace: Some(TraceView {
            method: TraceMethod::IdlePages,
            ..trace()
        }),
        warnings: Vec::new(),
    };
    let odd = GroupSummary {
        group: "\u{1b}[2Jodd".to_owned(),
        kind: GroupKind::Other,
        path: "/user.slice/\u{1b}[2Jodd\n".to_owned(),
        working_set: None,
        curve_source: None,
        limit_bytes: None,
        trace: Some(TraceView {
            state: TraceState::Failed,
            error: Some("the kernel does not track idle pages\u{1b}[2J".to_owned()),
            ..trace()
        }),
        warnings: vec![
            "it is not traced: the kernel does not track idle pages\u{1b}[2J".to_owned(),
        ],
        ..nginx.clone()
    };
    vec![odd, nginx]
}

pub fn group(name: &str) -> Option<GroupView> {
    let mut groups = groups().into_iter();
    let summary = groups.find(|group| group.group == name || group.path == name)?;
    Some(GroupView {
        schema: SCHEMA,
        curve: summary.curve_source.map(|_| CurveJson {
            baseline_pages: None,
            ..curve(&summary.group)
        }),
        summary,
    })
}

/// Falls from all at 64 MiB to a twentieth at 512 MiB.
fn curve(vm: &str) -> CurveJson {
    let point = |(size_mib, miss_ratio): (u64, f64)| PointJson {
        size_pages: size_mib * 256,
        miss_ratio,
        low: miss_ratio * 0.9,
        high: (miss_ratio * 1.1).min(1.0),
        misses: None,
    };
    let points = [
        (64, 0.9),
        (128, 0.62),
        (192, 0.4),
        (256, 0.22),
        (320, 0.12),
        (392, 0.06),
        (512, 0.05),
    ];
    CurveJson {
        schema: SCHEMA,
        vm: vm.to_owned(),
        page_bytes: 4096,
        references: 123_456,
        baseline_pages: Some(512 * 256),
        vcpu_seconds_per_second: None,
        uncertain_pages: 0,
        log_errors_permille: Vec::new(),
        points: points.map(point).to_vec(),
    }
}

/// A VM that is called [`MISNAMED`].
pub fn misnamed() -> VmSummary {
    summary(MISNAMED, VmStatus::Safe, "it could give nothing", 128, 0)
}

pub fn vm(name: &str) -> Option<VmView> {
    let mut vms = vms().into_iter().chain([misnamed()]);
    let summary = vms.find(|vm| vm.vm == name)?;
    Some(VmView {
        schema: SCHEMA,
        curve: summary.curve_source.map(|_| curve(name)),
        relative_points: Vec::new(),
        summary,
    })
}

pub fn history(vm: &str) -> HistoryView {
    let sample = |minute: u64| Sample {
        unix_ms: NOW_UNIX_MS - (30 - minute) * 60_000,
        direct_bytes: 512 * MIB,
        working_set_bytes: (minute > 2).then_some((100 + minute * 3) * MIB),
        working_set_bound: (minute > 2).then_some(match minute {
            10..20 => WorkingSetBound::AtLeast,
            _ => WorkingSetBound::Estimate,
        }),
        relative: Some(1.0 + minute as f64 / 500.0),
        overhead_ratio: Some(0.0098),
        ..Sample::default()
    };
    HistoryView {
        schema: SCHEMA,
        vm: vm.to_owned(),
        samples: (0..30).map(sample).collect(),
    }
}

pub fn heatmap(vm: &str) -> HeatmapView {
    let row = |period: u32| HeatRow {
        unix_ms: NOW_UNIX_MS - u64::from(30 - period) * 5000,
        // Half of it idle, a scan that moves on, and a place that is always busy.
        pages: (0..128)
            .map(|cell| match cell {
                10..14 => 1024,
                _ if cell / 4 == period => 512,
                _ => 0,
            })
            .collect(),
    };
    HeatmapView {
        schema: SCHEMA,
        vm: vm.to_owned(),
        cell_bytes: 4 * MIB,
        rows: (0..30).map(row).collect(),
    }
}

/// Decision 12 divided memory and was kept; 13 waits.
pub fn decisions() -> Vec<Decision> {
    let holding = |direct_mib, cache_mib| HoldingView {
        direct_bytes: direct_mib * MIB,
        cache_bytes: cache_mib * MIB,
    };
    let step = |vm: &str, from, to| Step {
        vm: vm.to_owned(),
        from,
        to,
        now: to,
        state: StepState::Done,
        error: None,
    };
    let check = |vm: &str, measured: Option<f64>, verdict| Check {
        vm: vm.to_owned(),
        predicted: Some(Relative {
            expected: 1.08,
            low: 1.02,
            high: 1.14,
        }),
        measured,
        by: "reads of its disk".to_owned(),
        bound: Some(1.25),
        misses: None,
        stall: None,
        verdict,
        why: "measured for 60 s".to_owned(),
    };
    let kept = Decision {
        schema: SCHEMA,
        id: 12,
        unix_ms: NOW_UNIX_MS - 600_000,
        kind: Kind::Divide,
        by: Initiator::Daemon,
        mode: Mode::Act,
        state: State::Kept,
        reason: "mail gains most by more; web loses least".to_owned(),
        inputs: None,
        plan: None,
        steps: vec![
            step("mail", holding(320, 64), holding(320, 128)),
            step("web", holding(512, 64), holding(512, 0)),
        ],
        checks: vec![
            check("mail", Some(0.81), Verdict::Kept),
            check("web", None, Verdict::Unknown),
        ],
        takes_back: None,
        taken_back_by: None,
        ended_unix_ms: Some(NOW_UNIX_MS - 480_000),
    };
    let waiting = Decision {
        id: 13,
        unix_ms: NOW_UNIX_MS - 30_000,
        mode: Mode::Advise,
        state: State::Proposed,
        reason: "web could give 64 MiB \u{1b}[2J".to_owned(),
        steps: vec![Step {
            now: holding(320, 128),
            state: StepState::Waiting,
            ..step("mail", holding(320, 128), holding(320, 160))
        }],
        checks: Vec::new(),
        ended_unix_ms: None,
        ..kept.clone()
    };
    vec![waiting, kept]
}
