//! Cost of a turn of the daemon: many simulated VMs, with new curves in each turn, decided and recorded.

use std::io::Write;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use plimsoll_daemon::clock;
use plimsoll_daemon::config::Config;
use plimsoll_daemon::history::{History, Limits};
use plimsoll_daemon::shared::{SharedState, Snapshot};
use plimsoll_daemon::turn::Turns;
use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount};
use plimsoll_protocol::decision::Mode;

use crate::measure::{Clock, Watch, at_most, median};

#[allow(dead_code, reason = "shared with the daemon's tests")]
#[path = "../../../crates/daemon/tests/common/simulated.rs"]
mod simulated;

use simulated::{SimulatedHost, SimulatedVm};

const VMS: u32 = 256;
const TURNS: u32 = 20;
/// Number of points of a curve, as a tracer reports it.
const POINTS: u64 = 1000;
/// Limits of the daemon: CPU time of a turn, and memory.
const TURN_MS_MAX: f64 = 200.0;
const MIB_A_VM_MAX: f64 = 2.0;

/// A curve that falls to nearly nothing at its knee, another one in every turn.
fn curve(vm: u32, turn: u32) -> MissRatioCurve {
    let knee = 0.1 + 0.8 * f64::from((vm * 37 + turn * 11) % 100) / 100.0;
    let sharp = f64::from(2 + vm % 17);
    let points = (1..=POINTS).map(|point| {
        let at = point as f64 / POINTS as f64;
        let ratio = 0.9 / (1.0 + (at / knee).powf(sharp)) + 0.01;
        CurvePoint {
            size: PageCount(point * 512),
            miss_ratio: ratio,
            low: ratio * 0.98,
            high: (ratio * 1.02).min(1.0),
            misses: None,
        }
    });
    let points: Vec<_> = points.collect();
    MissRatioCurve::new(points, 1_000_000).expect("the formula falls")
}

fn resident_mib() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_ascii_whitespace().nth(1);
    let pages: f64 = pages
        .and_then(|pages| pages.parse().ok())
        .unwrap_or(f64::NAN);
    pages * 4096.0 / f64::from(1 << 20)
}

/// Runs the benchmark.
pub(crate) fn run(out: &mut dyn Write) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let config = Config {
        mode: Mode::Act,
        turn_interval: Duration::from_secs(30),
        ..Config::default()
    };
    let limits = Limits::of(&config);
    let (history, _) = History::open(&folder.path().join("history.redb"), limits)?;
    let (sender, _commands) = sync_channel(8);
    let before = resident_mib();
    let shared = Arc::new(SharedState::new(
        Snapshot::before_the_first_turn(&config),
        sender,
        Arc::new(history),
        clock::Clock::of_host(),
    ));
    let host = SimulatedHost::default();
    for vm in 0..VMS {
        let mut its = SimulatedVm::new(vm + 1, 4 << 30, curve(vm, 0));
        its.direct_bytes = 1 << 30;
        host.put(&format!("vm{vm}"), its);
    }
    let mut now = Instant::now();
    let reload = Box::new(|| Err("there is none".to_owned()));
    let mut turns = Turns::new(config, reload, host.clone(), Arc::clone(&shared), now);
    let mut took_ms = Vec::new();
    for turn in 0..TURNS {
        for vm in 0..VMS {
            let new = curve(vm, turn);
            host.change(&format!("vm{vm}"), |vm| vm.claimed = Some(new));
        }
        let watch = Watch::start(Clock::Cpu);
        turns.tick(now);
        took_ms.push(watch.seconds() * 1e3);
        for _ in 0..30 {
            now += Duration::from_secs(1);
            host.pass(Duration::from_secs(1));
        }
    }
    let each = (resident_mib() - before) / f64::from(VMS);
    let turn = median(took_ms.clone());
    let worst = took_ms.iter().copied().fold(0.0, f64::max);
    writeln!(
        out,
        "A turn over {VMS} computed VMs, curves of {POINTS} points, history on disk ({TURNS} turns):\n"
    )?;
    writeln!(
        out,
        "CPU time, median   {turn:>8.1} ms   {}",
        at_most(turn, TURN_MS_MAX, " ms")
    )?;
    writeln!(out, "CPU time, worst    {worst:>8.1} ms")?;
    writeln!(
        out,
        "memory a VM        {each:>8.2} MiB  {}   (the simulation's own curves among it)",
        at_most(each, MIB_A_VM_MAX, " MiB")
    )?;
    Ok(())
}
