//! An example host that answers as a daemon does: for tests of clients and of the page, and for viewing both without
//! VMs.
//!
//! Its four VMs have invented curves. The policy derives sizes, bounds and decisions from them, as in a daemon.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use plimsoll_flow::{
    Accelerator, CurvePoint, MissRatioCurve, PageCount, PageSize, TraceMethod, VmId,
    WorkingSetBound,
};
use plimsoll_policy::{Bound, Demand, Policy, Rules, Search, promise_size, relative};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::decision::{
    Check, Decision, HoldingView, Initiator, Kind, Mode, Phase, State, Step, StepState, Verdict,
};
use plimsoll_protocol::group::{GroupSummary, Groups, LeftOutGroups};
use plimsoll_protocol::plan::PlanInputs;
use plimsoll_protocol::request::{Choice, Event, RefusalKind, SettingsChange};
use plimsoll_protocol::vm::{
    BackendView, BalloonState, BalloonView, CacheView, CurveSource, HeatRow, HeatmapView,
    HostMemory, HostView, MissCost, Promise, Relative, Sample, Settings, TraceState, TraceView,
    VmStatus, VmSummary, WorkingSetView,
};

use plimsoll_vm::GroupName;

use plimsoll_daemon::clock::{self, Clock};
use plimsoll_daemon::demand::demands;
use plimsoll_daemon::history::{History, TurnRecord};
use plimsoll_daemon::shared::{Command, Reply, RequestRefusal, SharedState, Snapshot};

const MIB: u64 = 1 << 20;
const PAGE: PageSize = PageSize::FOUR_KIB;
/// Maximum number of commands that may wait.
const COMMANDS: usize = 16;
/// Length of the example's past, and interval between its samples.
const PAST_MS: u64 = 3_600_000;
const MOMENT_MS: u64 = 30_000;
/// Cells and rows of a heatmap.
const CELLS: u32 = 64;
const ROWS: u32 = 60;

/// A VM of the example.
struct Guest {
    vm: &'static str,
    accelerator: Accelerator,
    direct_mib: u32,
    cache_mib: u32,
    max_loss: f64,
    working_set_mib: u32,
    /// Its miss ratio at this many MiB; `None` while it has no curve.
    misses: Option<fn(f64) -> f64>,
}

/// Path of the control group that has a curve.
const GROUP_PATH: &str = "/system.slice/nginx.service";
/// UUID of the VM "web"; the others have none.
const UUID: &str = "c7a5fdbd-edaf-9455-926a-d65c16db1809";
const RAM_MIB: u32 = 1024;
const BASELINE_MIB: u32 = 512;

const GUESTS: [Guest; 4] = [
    Guest {
        vm: "web",
        accelerator: Accelerator::Kvm,
        direct_mib: 448,
        cache_mib: 64,
        max_loss: 0.05,
        working_set_mib: 620,
        misses: Some(|mib| 0.02 + 0.9 * (-mib / 260.0).exp()),
    },
    Guest {
        vm: "search",
        accelerator: Accelerator::Kvm,
        direct_mib: 512,
        cache_mib: 0,
        max_loss: 0.25,
        working_set_mib: 300,
        misses: Some(|mib| 0.05 + 0.75 * (1.0 - (mib - 224.0) / 96.0).clamp(0.0, 1.0)),
    },
    Guest {
        vm: "scan",
        accelerator: Accelerator::Tcg,
        direct_mib: 384,
        cache_mib: 128,
        max_loss: 0.25,
        working_set_mib: 1000,
        misses: Some(|mib| 0.95 - mib * 0.000_02),
    },
    Guest {
        vm: "fresh",
        accelerator: Accelerator::Kvm,
        direct_mib: 512,
        cache_mib: 0,
        max_loss: 0.05,
        working_set_mib: 0,
        misses: None,
    },
];

/// An example's daemon: its shared state, and the commands that it answers.
pub fn shared() -> (Arc<SharedState>, Receiver<Command>) {
    let now_ms = clock::unix_ms();
    let history = History::nowhere();
    for decision in decisions(now_ms) {
        history.put_decision(&decision);
    }
    let snapshot = snapshot(now_ms);
    for moment in 0..PAST_MS / MOMENT_MS {
        let at_ms = now_ms - PAST_MS + moment * MOMENT_MS;
        record(&history, at_ms, moment, &snapshot.curves);
    }
    let (sender, commands) = mpsc::sync_channel(COMMANDS);
    (
        Arc::new(SharedState::new(
            snapshot,
            sender,
            Arc::new(history),
            Clock::of_host(),
        )),
        commands,
    )
}

/// Answers commands, with a turn every `interval`, until all others that hold `shared` are gone.
///
/// An applied proposal is in progress for a turn and then kept. A rollback is done at once.
pub fn run(shared: &Arc<SharedState>, commands: &Receiver<Command>, interval: Duration) {
    let mut next_turn = Instant::now() + interval;
    while Arc::strong_count(shared) > 1 {
        let left = next_turn.saturating_duration_since(Instant::now());
        match commands.recv_timeout(left.min(Duration::from_millis(50))) {
            Ok(command) => answer(shared, command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if Instant::now() >= next_turn {
            next_turn += interval;
            turn(shared);
        }
    }
}

/// The host at that time: its first turn.
pub fn snapshot(now_unix_ms: u64) -> Snapshot {
    let curves: BTreeMap<_, _> = GUESTS
        .iter()
        .filter_map(|guest| {
            let json = CurveJson::new(guest.vm, PAGE, Some(pages(BASELINE_MIB)), &guest.curve()?);
            Some((guest.vm.to_owned(), json))
        })
        .collect();
    let rules = Rules::new(pages(RAM_MIB));
    let demands = GUESTS.iter().filter_map(|guest| {
        let sizes = demands(&guest.curve()?, pages(BASELINE_MIB), &rules);
        Some((guest.vm.to_owned(), sizes.map(|size| size.0 * PAGE.bytes())))
    });
    let mut vms: Vec<_> = GUESTS
        .iter()
        .map(|guest| guest.summary(now_unix_ms))
        .collect();
    vms.sort_by(|a, b| a.vm.cmp(&b.vm));
    let direct = vms.iter().map(|vm| vm.direct_bytes).sum();
    let cache = vms.iter().map(|vm| vm.cache_bytes).sum();
    let spare = 256 * MIB;
    let heat = GUESTS.iter().filter(|guest| guest.misses.is_some());
    Snapshot {
        host: HostView {
            schema: SCHEMA,
            host: "example".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            mode: Mode::Advise,
            paused: false,
            phase: Phase::Whole,
            since_unix_ms: now_unix_ms.saturating_sub(PAST_MS),
            now_unix_ms,
            turn: 120,
            turn_interval_ms: MOMENT_MS,
            turn_took_ms: 1.5,
            memory: HostMemory {
                total_bytes: 4096 * MIB,
                divided_bytes: direct + cache + spare,
                vms_direct_bytes: direct,
                vms_cache_bytes: cache,
                store_bytes: 0,
                spare_bytes: spare,
                reclaimable_bytes: vms.iter().filter_map(|vm| vm.reclaimable_bytes).sum(),
                available_bytes: 1400 * MIB,
            },
            vms,
            groups: groups(now_unix_ms),
            moving: None,
            warnings: vec![
                "this is an example: its VMs are invented, and nothing is moved".to_owned(),
            ],
            history_bytes: None,
            daemon_resident_bytes: 21 * MIB,
        },
        curves,
        group_curves: group_curves(),
        demands: demands.collect(),
        heat: heat
            .map(|guest| (guest.vm.to_owned(), Arc::new(guest.heatmap(now_unix_ms))))
            .collect(),
        inputs: inputs(),
        proposal: Some(proposal(now_unix_ms)),
    }
}

/// A group with a curve, one that its kernel cannot trace, and the account of one that is not watched.
fn groups(now_unix_ms: u64) -> Groups {
    let summary = |path: &str, is_traced: bool| {
        let GroupName { name, kind } = GroupName::of_path(path);
        GroupSummary {
            group: name,
            kind,
            path: path.to_owned(),
            cgroup_version: 2,
            charged_bytes: Some(300 * MIB),
            limit_bytes: is_traced.then_some(512 * MIB),
            working_set: is_traced.then_some(WorkingSetView {
                bytes: 180 * MIB,
                bound: WorkingSetBound::Estimate,
            }),
            curve_source: is_traced.then_some(CurveSource::FirstTouch),
            references: if is_traced { 52_000 } else { 0 },
            curve_unix_ms: is_traced.then_some(now_unix_ms),
            trace: Some(TraceView {
                state: match is_traced {
                    true => TraceState::Tracing,
                    false => TraceState::Failed,
                },
                method: TraceMethod::IdlePages,
                error: None,
                pid: None,
                periods: 7,
                tracking_rate: 0.02,
                tracked_pages: 1500,
                traps_per_second: 0.0,
                touches_per_second: 900.0,
                overhead_ratio: 0.009,
                lost: 0,
                lost_lines: 0,
                restarts: 0,
                last_unix_ms: Some(now_unix_ms),
            }),
            warnings: match is_traced {
                true => Vec::new(),
                false => vec!["it is not traced: its tracer ended".to_owned()],
            },
        }
    };
    Groups {
        watched: vec![
            summary(GROUP_PATH, true),
            summary("/system.slice/odd\u{1b}[2J<b>\n", false),
        ],
        left_out: vec![LeftOutGroups {
            why: "no more than 2 groups are watched at a time (groups.max)".to_owned(),
            count: 12,
            paths: vec!["/system.slice/cron.service".to_owned()],
        }],
    }
}

fn group_curves() -> BTreeMap<String, CurveJson> {
    let point = |(mib, miss_ratio): (u32, f64)| CurvePoint {
        size: pages(mib),
        miss_ratio,
        low: miss_ratio * 0.9,
        high: (miss_ratio * 1.1).min(1.0),
        misses: None,
    };
    let points = [(20, 0.8), (90, 0.4), (180, 0.05), (260, 0.01)].map(point);
    let curve = MissRatioCurve::new(points.to_vec(), 52_000).ok();
    let json = curve.map(|curve| CurveJson::new("nginx.service", PAGE, None, &curve));
    json.map(|json| (GROUP_PATH.to_owned(), json))
        .into_iter()
        .collect()
}

impl Guest {
    fn curve(&self) -> Option<MissRatioCurve> {
        let misses = self.misses?;
        let points = (1..=RAM_MIB / 8).map(|step| {
            let miss_ratio = misses(f64::from(step * 8));
            CurvePoint {
                size: pages(step * 8),
                miss_ratio,
                low: miss_ratio * 0.985,
                high: (miss_ratio * 1.015).min(1.0),
                misses: None,
            }
        });
        MissRatioCurve::new(points.collect(), 1_250_000).ok()
    }

    fn size(&self) -> PageCount {
        pages(self.direct_mib + self.cache_mib)
    }

    fn holding(&self) -> HoldingView {
        HoldingView {
            direct_bytes: bytes(self.direct_mib),
            cache_bytes: bytes(self.cache_mib),
        }
    }

    fn settings(&self) -> Settings {
        Settings {
            min_bytes: bytes(128),
            max_bytes: bytes(RAM_MIB),
            baseline_bytes: bytes(BASELINE_MIB),
            shares: 100,
            promise: Promise::on_loss(self.max_loss),
            managed: true,
        }
    }

    fn relative(&self, size: PageCount) -> Option<Relative> {
        relative(&self.curve()?, pages(BASELINE_MIB), size, &rules())
    }

    fn summary(&self, now_unix_ms: u64) -> VmSummary {
        let size_bytes = self.holding().size_bytes();
        let promise = self.curve().and_then(|curve| {
            let bound = Bound::on_loss(self.max_loss);
            promise_size(&curve, pages(BASELINE_MIB), &bound, &rules())
                .map(|size| size.to_bytes(PAGE))
        });
        let promise = promise.map(|bytes| bytes.max(self.settings().min_bytes));
        let reclaimable = promise.map(|promise| size_bytes.saturating_sub(promise));
        let (status, why) = match reclaimable {
            None => (
                VmStatus::Unknown,
                "its curve is not available yet".to_owned(),
            ),
            Some(reclaimable) if reclaimable < 4 * MIB => (
                VmStatus::Tight,
                "it is within its limit, and can give nothing".to_owned(),
            ),
            Some(reclaimable) => (
                VmStatus::Safe,
                format!(
                    "it stays within its limit even with {} MiB less",
                    reclaimable / MIB
                ),
            ),
        };
        let known = self.misses.is_some();
        VmSummary {
            vm: self.vm.to_owned(),
            pid: 4000 + self.direct_mib + self.cache_mib / 64,
            accelerator: Some(self.accelerator),
            uuid: (self.vm == "web").then(|| UUID.to_owned()),
            refused_claims: 0,
            backends: TraceMethod::ALL
                .into_iter()
                .map(|backend| BackendView {
                    backend,
                    refusals: Vec::new(),
                })
                .collect(),
            libvirt: false,
            status,
            why,
            stopped: None,
            ram_bytes: bytes(RAM_MIB),
            direct_bytes: self.holding().direct_bytes,
            cache_bytes: self.holding().cache_bytes,
            size_bytes,
            target_bytes: None,
            settings: self.settings(),
            working_set: known.then(|| WorkingSetView {
                bytes: bytes(self.working_set_mib),
                bound: if self.vm == "scan" {
                    WorkingSetBound::AtLeast
                } else {
                    WorkingSetBound::Estimate
                },
            }),
            misses: None,
            vcpu_seconds_per_second: None,
            miss_cost: MissCost::default(),
            memory_stall_ratio: None,
            relative: self.relative(self.size()),
            reclaimable_bytes: reclaimable,
            promise_bytes: promise,
            kept_bytes: bytes(64),
            curve_source: known.then_some(CurveSource::Trap),
            references: if known { 1_250_000 } else { 0 },
            curve_unix_ms: known.then_some(now_unix_ms.saturating_sub(4000)),
            trace: Some(TraceView {
                state: if known {
                    TraceState::Tracing
                } else {
                    TraceState::Starting
                },
                method: TraceMethod::Traps,
                error: None,
                pid: known.then_some(5000 + self.direct_mib),
                periods: if known { 720 } else { 0 },
                tracking_rate: 1.0 / 128.0,
                tracked_pages: u64::from(RAM_MIB) * 2,
                traps_per_second: 180.0,
                touches_per_second: 0.0,
                overhead_ratio: 0.0098,
                lost: u64::from(self.vm == "scan") * 3,
                lost_lines: 0,
                restarts: 0,
                last_unix_ms: known.then_some(now_unix_ms.saturating_sub(2000)),
            }),
            balloon: Some(BalloonView {
                actual_bytes: self.holding().direct_bytes,
                target_bytes: Some(self.holding().direct_bytes),
                state: BalloonState::Idle,
                guest_available_bytes: Some(bytes(self.direct_mib / 4)),
                statistics_age_ms: Some(1500),
            }),
            cache: (self.cache_mib > 0).then(|| CacheView {
                capacity_bytes: self.holding().cache_bytes,
                used_bytes: self.holding().cache_bytes / 10 * 9,
                read_blocks: 812_000,
                hits: 301_000,
                disabled: None,
            }),
        }
    }

    fn heatmap(&self, now_unix_ms: u64) -> HeatmapView {
        let cell = bytes(RAM_MIB / CELLS);
        let busy_cells = self.working_set_mib * CELLS / RAM_MIB;
        let row = |row: u32| HeatRow {
            unix_ms: now_unix_ms.saturating_sub(u64::from(ROWS - row) * 5000),
            pages: (0..CELLS)
                .map(|at| {
                    // A region whose use declines from its beginning on, and a spot that moves through it.
                    let moving = u32::from(at == row * busy_cells.max(1) / ROWS);
                    let still = busy_cells.saturating_sub(at) * 3000 / CELLS;
                    (still + moving * 4096).min(4096)
                })
                .collect(),
        };
        HeatmapView {
            schema: SCHEMA,
            vm: self.vm.to_owned(),
            cell_bytes: cell,
            rows: (0..ROWS).map(row).collect(),
        }
    }
}

fn rules() -> Rules {
    let sizes = GUESTS.iter().map(|guest| guest.size().0).sum();
    Rules {
        gain_min: 0.02,
        ..Rules::new(PageCount(sizes))
    }
}

/// The policy's input.
fn inputs() -> Option<PlanInputs> {
    let demands = GUESTS.map(|guest| Demand {
        vm: VmId(guest.vm.to_owned()),
        curve: guest.curve(),
        baseline: pages(BASELINE_MIB),
        current: guest.size(),
        floor: pages(128),
        ceiling: pages(RAM_MIB),
        bound: Bound::on_loss(guest.max_loss),
        shares: 100,
        working_set: None,
    });
    Some(PlanInputs::new(
        &demands,
        &rules(),
        Policy::isolated(Search::Auto),
        PAGE,
    ))
}

fn proposal(now_unix_ms: u64) -> Decision {
    let inputs = inputs();
    let plan = inputs.as_ref().and_then(|inputs| inputs.plan().ok());
    let targets = plan.iter().flat_map(|plan| &plan.targets);
    let moved = targets.filter(|target| target.target_bytes != target.current_bytes);
    let steps = moved.filter_map(|target| {
        let guest = GUESTS.iter().find(|guest| guest.vm == target.vm)?;
        let from = guest.holding();
        let direct_bytes = target.target_bytes.saturating_sub(from.cache_bytes);
        let to = HoldingView {
            direct_bytes,
            ..from
        };
        Some(step(&target.vm, from, to, StepState::Waiting))
    });
    Decision {
        steps: steps.collect(),
        inputs,
        plan,
        state: State::Proposed,
        ended_unix_ms: None,
        reason: "The VMs together are predicted to miss less often.".to_owned(),
        ..blank(4, now_unix_ms, Kind::Divide, Initiator::Daemon)
    }
}

/// A past in which one reallocation was kept and another was rolled back, and a proposal.
fn decisions(now_unix_ms: u64) -> Vec<Decision> {
    let [web, search, ..] = &GUESTS;
    let whole = |direct_mib| HoldingView {
        direct_bytes: bytes(direct_mib),
        cache_bytes: 0,
    };
    let check = |guest: &Guest, predicted: f64, measured: f64| {
        let bound = 1.0 + guest.max_loss;
        let kept = measured <= bound;
        let verdict = if kept { "kept" } else { "broken" };
        Check {
            vm: guest.vm.to_owned(),
            predicted: Some(Relative {
                expected: predicted,
                low: predicted * 0.95,
                high: predicted * 1.05,
            }),
            measured: Some(measured),
            by: "blocks read from storage".to_owned(),
            bound: Some(bound),
            misses: None,
            stall: None,
            verdict: if kept { Verdict::Kept } else { Verdict::Broken },
            why: format!(
                "its misses are {measured:.2} times those at its baseline, with a limit of {bound:.2}: {verdict}"
            ),
        }
    };
    let ago = |minutes: u64| now_unix_ms.saturating_sub(minutes * 60_000);
    let kept = Decision {
        steps: vec![step(
            "search",
            whole(576),
            search.holding(),
            StepState::Done,
        )],
        checks: vec![check(search, 1.02, 1.04)],
        ended_unix_ms: Some(ago(48)),
        reason: "Others gain more than search loses. Every VM stayed within its limit.".to_owned(),
        ..blank(1, ago(50), Kind::Divide, Initiator::Operator)
    };
    let broken = Decision {
        steps: vec![step("web", web.holding(), whole(384), StepState::Done)],
        checks: vec![check(web, 1.04, 1.31)],
        state: State::RolledBack,
        taken_back_by: Some(3),
        ended_unix_ms: Some(ago(28)),
        reason: "web was to give 128 MiB. Its promise was broken: taken back by decision 3."
            .to_owned(),
        ..blank(2, ago(31), Kind::Divide, Initiator::Daemon)
    };
    let rollback = Decision {
        steps: vec![step("web", whole(384), web.holding(), StepState::Done)],
        takes_back: Some(2),
        ended_unix_ms: Some(ago(27)),
        reason: "Decision 2 broke web's promise.".to_owned(),
        ..blank(3, ago(28), Kind::Rollback, Initiator::Daemon)
    };
    vec![kept, broken, rollback, proposal(now_unix_ms)]
}

fn blank(id: u64, unix_ms: u64, kind: Kind, by: Initiator) -> Decision {
    Decision {
        schema: SCHEMA,
        id,
        unix_ms,
        kind,
        by,
        mode: Mode::Advise,
        state: State::Kept,
        reason: String::new(),
        inputs: None,
        plan: None,
        steps: Vec::new(),
        checks: Vec::new(),
        takes_back: None,
        taken_back_by: None,
        ended_unix_ms: Some(unix_ms),
    }
}

fn step(vm: &str, from: HoldingView, to: HoldingView, state: StepState) -> Step {
    Step {
        vm: vm.to_owned(),
        from,
        to,
        now: if state == StepState::Done { to } else { from },
        state: state.to_owned(),
        error: None,
    }
}

/// Records a sample of all VMs.
fn record(history: &History, unix_ms: u64, moment: u64, curves: &BTreeMap<String, CurveJson>) {
    let moments = GUESTS.each_ref().map(|guest| {
        // Up and down by an eighth, in 16 samples.
        let wave = moment.abs_diff(moment / 16 * 16 + 8) * u64::from(guest.working_set_mib) / 64;
        let known = guest.misses.is_some();
        let relative = guest.relative(guest.size());
        TurnRecord {
            vm: guest.vm,
            sample: Sample {
                unix_ms,
                direct_bytes: guest.holding().direct_bytes,
                cache_bytes: guest.holding().cache_bytes,
                working_set_bytes: known.then(|| bytes(guest.working_set_mib) + wave * MIB),
                working_set_bound: known.then_some(WorkingSetBound::Estimate),
                relative: relative.map(|relative| relative.expected),
                misses_per_second: known.then_some(120.0),
                overhead_ratio: known.then_some(0.0098),
                ..Sample::default()
            },
            heat: None,
            curve: curves.get(guest.vm),
        }
    });
    history.record_turn(&moments);
}

/// Another turn: only the time has changed, and a move in progress is completed.
fn turn(shared: &SharedState) {
    let mut next = (*shared.snapshot()).clone();
    next.host.turn += 1;
    next.host.now_unix_ms = clock::unix_ms();
    record(
        &shared.history,
        next.host.now_unix_ms,
        next.host.turn,
        &next.curves,
    );
    if let Some(mut decision) = next
        .host
        .moving
        .take()
        .and_then(|id| shared.history.decision(id))
    {
        for step in &mut decision.steps {
            step.state = StepState::Done;
            step.now = step.to;
            set_holding(&mut next, &step.vm, step.to);
        }
        decision.state = State::Kept;
        decision.ended_unix_ms = Some(next.host.now_unix_ms);
        put(shared, &decision);
    }
    shared.publish(next);
}

fn answer(shared: &SharedState, command: Command) {
    let mut next = (*shared.snapshot()).clone();
    match command {
        Command::Apply(choice, to) => {
            let done = apply(shared, &mut next, choice);
            reply(shared, next, to, done);
        }
        Command::Rollback(choice, to) => {
            let done = roll_back(shared, &mut next, choice);
            reply(shared, next, to, done);
        }
        Command::Pause(to) => {
            next.host.paused = true;
            reply(shared, next, to, Ok(()));
        }
        Command::Resume(to) => {
            next.host.paused = false;
            reply(shared, next, to, Ok(()));
        }
        Command::Reload(to) => reply(shared, next, to, Ok(())),
        Command::Set(vm, change, to) => {
            let done = set(&mut next, &vm, &change);
            reply(shared, next, to, done);
        }
    }
}

/// Replies once what was done is published, as plimsolld does. The requester may have gone.
fn reply<T>(shared: &SharedState, next: Snapshot, to: Reply<T>, done: Result<T, RequestRefusal>) {
    shared.publish(next);
    drop(to.send(done));
}

fn set(
    next: &mut Snapshot,
    vm: &str,
    change: &SettingsChange,
) -> Result<VmSummary, RequestRefusal> {
    let Some(summary) = next.host.vms.iter_mut().find(|summary| summary.vm == vm) else {
        return Err(refused(RefusalKind::NotFound, "there is no such VM"));
    };
    if change.min_bytes > Some(bytes(RAM_MIB)) {
        let error = "a floor above the VM's RAM cannot be kept";
        return Err(refused(RefusalKind::Guarantee, error));
    }
    let settings = &mut summary.settings;
    settings.min_bytes = change.min_bytes.unwrap_or(settings.min_bytes);
    settings.max_bytes = change.max_bytes.unwrap_or(settings.max_bytes);
    settings.baseline_bytes = change.baseline_bytes.unwrap_or(settings.baseline_bytes);
    settings.shares = change.shares.unwrap_or(settings.shares);
    settings.promise = change.promise().unwrap_or(settings.promise);
    settings.managed = change.managed.unwrap_or(settings.managed);
    Ok(summary.clone())
}

fn apply(
    shared: &SharedState,
    next: &mut Snapshot,
    choice: Choice,
) -> Result<Decision, RequestRefusal> {
    if next.host.paused {
        let paused = "the daemon is paused; nothing was moved";
        return Err(refused(RefusalKind::Conflict, paused));
    }
    let wanted = |proposal: &mut Decision| choice.decision.is_none_or(|id| id == proposal.id);
    let Some(mut decision) = next.proposal.take_if(wanted) else {
        let none = "there is no such proposal; nothing was moved";
        return Err(refused(RefusalKind::Conflict, none));
    };
    decision.state = State::Moving;
    decision.by = Initiator::Operator;
    for step in &mut decision.steps {
        step.state = StepState::Shrinking;
    }
    next.host.moving = Some(decision.id);
    put(shared, &decision);
    Ok(decision)
}

fn roll_back(
    shared: &SharedState,
    next: &mut Snapshot,
    choice: Choice,
) -> Result<Decision, RequestRefusal> {
    let newest = || {
        let recent = shared.history.decisions(None, None, 10);
        let kept = recent
            .into_iter()
            .find(|decision| decision.state == State::Kept);
        kept.map(|decision| decision.id)
    };
    let id = choice.decision.or_else(newest);
    let found = id.and_then(|id| shared.history.decision(id));
    let Some(mut decision) = found.filter(|decision| decision.state == State::Kept) else {
        let none = "there is no such decision to take back; nothing was moved";
        return Err(refused(RefusalKind::Conflict, none));
    };
    let newest = shared.history.decisions(None, None, 1);
    let id = newest.first().map_or(1, |newest| newest.id + 1);
    let now = clock::unix_ms();
    let mut rollback = blank(id, now, Kind::Rollback, Initiator::Operator);
    rollback.takes_back = Some(decision.id);
    rollback.reason = "An operator took it back.".to_owned();
    for old in &decision.steps {
        rollback
            .steps
            .push(step(&old.vm, old.to, old.from, StepState::Done));
        set_holding(next, &old.vm, old.from);
    }
    decision.state = State::RolledBack;
    decision.taken_back_by = Some(id);
    put(shared, &decision);
    put(shared, &rollback);
    Ok(rollback)
}

fn put(shared: &SharedState, decision: &Decision) {
    shared.history.put_decision(decision);
    shared.tell(Event::Decision { id: decision.id });
}

fn set_holding(next: &mut Snapshot, vm: &str, holding: HoldingView) {
    if let Some(summary) = next.host.vms.iter_mut().find(|summary| summary.vm == vm) {
        summary.direct_bytes = holding.direct_bytes;
        summary.cache_bytes = holding.cache_bytes;
        summary.size_bytes = holding.size_bytes();
        summary.target_bytes = Some(holding.size_bytes());
    }
}

fn refused(kind: RefusalKind, why: &str) -> RequestRefusal {
    RequestRefusal::new(kind, why)
}

fn bytes(mib: u32) -> u64 {
    u64::from(mib) * MIB
}

fn pages(mib: u32) -> PageCount {
    PageCount(bytes(mib) / PAGE.bytes())
}
