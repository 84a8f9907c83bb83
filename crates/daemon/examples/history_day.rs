//! Measures the disk space of a day of history: 100 VMs, a turn every 30 s, a reallocation every 10 min.
//!
//! `cargo run --release -p plimsoll-daemon --example history_day`
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use plimsoll_daemon::history::{History, Limits, TurnRecord};
use plimsoll_flow::WorkingSetBound;
use plimsoll_protocol::curve_json::{CurveJson, PointJson};
use plimsoll_protocol::decision::{
    Decision, HoldingView, Initiator, Kind, Mode, State, Step, StepState,
};
use plimsoll_protocol::plan::{DemandJson, PlanInputs, Policy, RulesJson};
use plimsoll_protocol::vm::{HeatRow, Sample};

const VMS: usize = 100;
const TURNS: u64 = 24 * 120;
const TURN_MS: u64 = 30_000;
const BEGIN_MS: u64 = 1_800_000_000_000;
/// Cells of a heatmap, steps of a curve.
const CELLS: usize = 256;
const STEPS: u32 = 200;

fn main() -> anyhow::Result<()> {
    let path = std::env::args().nth(1);
    let path = path.unwrap_or_else(|| "/tmp/plimsoll-history-day.redb".to_owned());
    let limits = Limits {
        bytes_max: 256 << 20,
        keep: Duration::from_hours(7 * 24),
    };
    let (history, _) = History::open(path.as_ref(), limits)?;
    let mut noise = Noise(1);
    let names: Vec<String> = (0..VMS).map(|vm| format!("web-server-{vm:03}")).collect();
    let mut longest = Duration::ZERO;
    let begin = Instant::now();
    let mut ids = 0;
    for turn in 0..TURNS {
        let unix_ms = BEGIN_MS + turn * TURN_MS;
        let rows: Vec<HeatRow> = names.iter().map(|_| noise.heat(unix_ms)).collect();
        let curves: Vec<CurveJson> = names.iter().map(|name| noise.curve(name)).collect();
        let moments: Vec<TurnRecord<'_>> = (0..VMS)
            .map(|vm| TurnRecord {
                vm: &names[vm],
                sample: noise.sample(unix_ms),
                heat: Some((4 << 20, &rows[vm])),
                curve: Some(&curves[vm]),
            })
            .collect();
        let one = Instant::now();
        history.record_turn(&moments);
        if turn % 20 == 0 {
            ids += 1;
            for state in [State::Moving, State::Checking, State::Kept] {
                let _ = history.put_decision(&decision(ids, unix_ms, state, &names, &curves));
            }
        }
        longest = longest.max(one.elapsed());
    }
    let took = begin.elapsed();
    println!("warnings            {:?}", history.warnings());
    println!(
        "on disk             {:.1} MiB",
        mib(history.bytes().unwrap_or(0))
    );
    println!(
        "file's length       {:.1} MiB",
        mib(std::fs::metadata(&path)?.len())
    );
    println!("all turns           {took:.1?}, making them up included; longest {longest:.0?}");
    let one = Instant::now();
    let samples = history.samples(&names[7], 0, u64::MAX, 1000);
    println!("{} samples of a VM  {:.1?}", samples.len(), one.elapsed());
    let one = Instant::now();
    let decisions = history.decisions(None, None, 50);
    println!("{} decisions        {:.1?}", decisions.len(), one.elapsed());
    drop(history);
    let one = Instant::now();
    let (_, warnings) = History::open(path.as_ref(), limits)?;
    println!("opening anew        {:.1?} {warnings:?}", one.elapsed());
    std::fs::remove_file(&path)?;
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Numbers that do not compress.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.0 ^ (self.0 >> 33)
    }

    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn heat(&mut self, unix_ms: u64) -> HeatRow {
        let pages = (0..CELLS).map(|_| u32::from(self.next().to_le_bytes()[0]) * 4);
        HeatRow {
            unix_ms,
            pages: pages.collect(),
        }
    }

    fn sample(&mut self, unix_ms: u64) -> Sample {
        Sample {
            unix_ms,
            direct_bytes: 1 << 30,
            cache_bytes: 256 << 20,
            target_bytes: Some(5 << 28),
            working_set_bytes: Some(self.next() >> 34),
            working_set_bound: Some(WorkingSetBound::Estimate),
            relative: Some(self.share()),
            misses_per_second: Some(self.share() * 1000.0),
            overhead_ratio: Some(self.share() / 100.0),
            lost: 0,
        }
    }

    fn curve(&mut self, vm: &str) -> CurveJson {
        let references = self.next() >> 40;
        let points = (0..STEPS).map(|at| {
            let miss_ratio = (1.0 - (f64::from(at) + self.share()) / f64::from(STEPS + 1)).max(0.0);
            // As many digits as the daemon records of the inputs of a decision.
            let rounded = |ratio: f64| (ratio * 1e5).round() / 1e5;
            PointJson {
                size_pages: u64::from(at) * 4096 + (self.next() >> 54),
                miss_ratio: rounded(miss_ratio),
                low: rounded(miss_ratio * (1.0 - self.share() / 10.0)),
                high: rounded(miss_ratio * (1.0 + self.share() / 10.0)),
                misses: None,
            }
        });
        CurveJson {
            schema: plimsoll_protocol::SCHEMA,
            vm: vm.to_owned(),
            page_bytes: 4096,
            references,
            baseline_pages: Some(1 << 18),
            vcpu_seconds_per_second: None,
            uncertain_pages: 0,
            log_errors_permille: Vec::new(),
            points: points.collect(),
        }
    }
}

fn decision(
    id: u64,
    unix_ms: u64,
    state: State,
    names: &[String],
    curves: &[CurveJson],
) -> Decision {
    let demands = names.iter().zip(curves).map(|(vm, curve)| DemandJson {
        vm: vm.clone(),
        curve: Some(curve.clone()),
        baseline_bytes: 1 << 30,
        current_bytes: 1 << 30,
        floor_bytes: 1 << 28,
        ceiling_bytes: None,
        max_loss: Some(0.05),
        max_misses_per_second: None,
        shares: 1,
        working_set_bytes: None,
    });
    let holding = HoldingView::default();
    let steps = names.iter().map(|vm| Step {
        vm: vm.clone(),
        from: holding,
        to: holding,
        now: holding,
        state: StepState::Done,
        error: None,
    });
    Decision {
        schema: plimsoll_protocol::SCHEMA,
        id,
        unix_ms,
        kind: Kind::Divide,
        by: Initiator::Daemon,
        mode: Mode::Act,
        state,
        reason: "less misses together".to_owned(),
        inputs: Some(PlanInputs {
            schema: plimsoll_protocol::SCHEMA,
            page_bytes: 4096,
            policy: Policy::esx(0.75),
            rules: RulesJson {
                total_bytes: 100 << 30,
                unit_bytes: 4 << 20,
                step_bytes: None,
                gain_min: 0.02,
                miss_ratio_min: 0.001,
            },
            demands: demands.collect(),
        }),
        plan: None,
        steps: steps.collect(),
        checks: Vec::new(),
        takes_back: None,
        taken_back_by: None,
        ended_unix_ms: None,
    }
}
