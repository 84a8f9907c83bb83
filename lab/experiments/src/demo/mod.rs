//! `plimsoll demo`: three VMs share a host's memory, and plimsolld allocates it among them.
//!
//! The servers of [`trio`](crate::trio) are measured with equal memory, and traced from outside by first touches. Then a daemon of the demonstration's own goes
//! through \[LS07\] fig. 6: memory goes into the caches under the VMs' disks, they are traced through them, memory is
//! allocated so that all together miss least and none more than a quarter above before, the bounds are checked, and the
//! caches' memory is returned. At the end the servers are measured again. They report their misses themselves.
//!
//! | file | contents |
//! |---|---|
//! | `daemon` | plimsolld with a configuration of its own |
//! | `telling` | explanations of what happens, in words and tables |
//!
//! Not here: figures over several policies (`lab divide`).

mod daemon;
mod telling;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use plimsoll_protocol::client::Client;
use plimsoll_protocol::decision::{Decision, Kind, Phase};
use plimsoll_rig::program;

use crate::trio::{BASELINE_MIB, ServerCounts, TRACED_MIB, Third, Trio};
use plimsoll_output::{stop_flag, write_file};
use plimsoll_protocol::size::Interval;

use daemon::{Daemon, Options};
use telling::Row;

/// Bound on the rise of a VM's misses, in percent.
const MAX_LOSS_PERCENT: u64 = 25;
/// How long an allocation is measured before the daemon judges it, in s.
const CHECK_S: u64 = 30;
/// How long each is traced from outside.
const OUTSIDE_TIME: Duration = Duration::from_secs(30);
/// Order of the servers' requests.
const SEED: u32 = 1;
/// Interval of polling the daemon.
const POLL: Duration = Duration::from_secs(1);
/// How long the daemon may take beyond tracing and checking.
const DAEMON_MAX: Duration = Duration::from_secs(600);
/// Decisions requested at a time; there are four.
const DECISIONS: usize = 20;

/// Boot three VMs and let plimsolld reallocate their memory; watch it on the web page.
///
/// Takes about six minutes with emulated guests. Fails if a guest reads a block that it had not written. Only
/// the VMs that it boots are resized.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory for decision, curves and picture; created if needed
    #[arg(long, value_name = "DIR", default_value = "target/demo")]
    out: PathBuf,
    /// Port of the web page on 127.0.0.1 [default: any free port]
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    port: u16,
    /// Keep everything running at the end, until Ctrl-C
    #[arg(long)]
    keep: bool,
    /// How long the VMs are traced through their caches
    #[arg(long, default_value = "60s", value_name = "TIME")]
    trace: Interval,
    /// How long to wait at most, before each measurement, until the servers have filled their memory
    #[arg(long, default_value = "100s", value_name = "TIME")]
    warmup: Interval,
    /// Length of each measurement
    #[arg(long, default_value = "30s", value_name = "TIME")]
    measure: Interval,
}

/// Runs the demo; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// No plimsolld beside this program; why a guest did not come up, gave up or read wrong data; the output of plimsolld
/// if it did not finish. Nothing is left running.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    fs::create_dir_all(&args.out).with_context(|| args.out.display().to_string())?;
    let stop = stop_flag()?;
    let program = program("plimsoll")?;
    let begin = Instant::now();
    telling::opening(out)?;
    let mut trio = Trio::boot(&program, Third::Scan, SEED, &stop)?;
    telling::booted(&trio, begin, out)?;
    let filling = trio.filling_first()?;
    let views = trio.observe(OUTSIDE_TIME, &stop)?;
    telling::outside(&trio, &views, begin, out)?;
    telling::before(out)?;
    telling::cold(&trio.warm(&filling, args.warmup.get(), &stop)?, out)?;
    let before = trio.measure(args.measure.get(), &stop)?;
    telling::table(&rows(&mut trio, &before)?, out)?;

    let daemon = Daemon::start(Options {
        port: args.port,
        trace_s: args.trace.get().as_secs().max(1),
        check_s: CHECK_S,
        direct_percent: TRACED_MIB * 100 / BASELINE_MIB,
        max_loss_percent: MAX_LOSS_PERCENT,
    })?;
    telling::daemon(&daemon.page(), MAX_LOSS_PERCENT, out)?;
    let client = daemon.client()?;
    let limit = args.trace.get() + Duration::from_secs(CHECK_S) + DAEMON_MAX;
    let decisions = follow(&mut trio, &client, begin, limit, &stop, out)
        .with_context(|| format!("plimsolld's log:\n{}", daemon.log()))?;
    let division = decisions
        .iter()
        .find(|decision| decision.kind == Kind::Divide);
    // A list omits the inputs of a decision.
    let division = division
        .map(|division| client.decision(division.id))
        .transpose()?;

    telling::after(out)?;
    let filling = trio.filling([TRACED_MIB << 20; 3])?;
    telling::cold(&trio.warm(&filling, args.warmup.get(), &stop)?, out)?;
    let after = trio.measure(args.measure.get(), &stop)?;
    let after = rows(&mut trio, &after)?;
    telling::compare(&before, &after, division.as_ref(), out)?;
    if let Some(division) = &division {
        save(&program, &args.out, division)?;
        telling::saved(&args.out, out)?;
    }
    if args.keep {
        telling::kept(&daemon.page(), out)?;
        while !stop.load(Ordering::Relaxed) {
            let passed = trio.pass(POLL, &stop);
            if !stop.load(Ordering::Relaxed) {
                passed?;
            }
        }
    }
    Ok(())
}

fn rows(trio: &mut Trio, counted: &[ServerCounts]) -> anyhow::Result<Vec<Row>> {
    let servers = trio.servers.iter_mut().zip(counted);
    servers
        .map(|(server, counted)| {
            let per_request = counted.per_request();
            Ok(Row {
                vm: server.name.to_owned(),
                bytes: server.direct_bytes()? + server.disk()?.cache_bytes,
                requests: counted.requests,
                misses_per_request: per_request
                    .with_context(|| format!("VM {} answered no request", server.name))?,
            })
        })
        .collect()
}

/// Reports the daemon's actions until the caches' memory is returned, or an allocation is rolled back. Returns its
/// decisions, newest first.
fn follow(
    trio: &mut Trio,
    client: &Client,
    begin: Instant,
    limit: Duration,
    stop: &AtomicBool,
    out: &mut dyn Write,
) -> anyhow::Result<Vec<Decision>> {
    let deadline = Instant::now() + limit;
    let mut phase = None;
    let mut told: Vec<Decision> = Vec::new();
    loop {
        let host = client.host()?;
        let decisions = client.decisions(None, None, Some(DECISIONS))?;
        for decision in decisions.iter().rev() {
            let earlier = told.iter().find(|earlier| earlier.id == decision.id);
            telling::decision(earlier, decision, begin, out)?;
        }
        told = decisions;
        if host.turn > 0 && phase != Some(host.phase) {
            telling::phase(host.phase, begin, out)?;
            phase = Some(host.phase);
        }
        let is_over = told.iter().any(|decision| {
            matches!(decision.kind, Kind::GiveBack | Kind::Rollback) && decision.state.has_ended()
        });
        if is_over {
            return Ok(told);
        }
        ensure!(
            Instant::now() < deadline,
            "plimsolld has not come to an end in {limit:?}"
        );
        if host.turn > 3 && host.phase == Phase::Whole && told.is_empty() {
            bail!("plimsolld moves nothing; it warns: {:?}", host.warnings);
        }
        trio.pass(POLL, stop)?;
    }
}

/// Writes the decision, the curves that led to it, and the picture of the plan.
fn save(program: &Path, folder: &Path, division: &Decision) -> anyhow::Result<()> {
    write_file(
        &folder.join("decision.json"),
        &serde_json::to_vec_pretty(division)?,
    )?;
    let inputs = division
        .inputs
        .as_ref()
        .context("a division without inputs")?;
    for demand in &inputs.demands {
        if let Some(curve) = &demand.curve {
            let file = folder.join(format!("{}.json", demand.vm));
            write_file(&file, &serde_json::to_vec_pretty(curve)?)?;
        }
    }
    let file = folder.join("inputs.json");
    write_file(&file, &serde_json::to_vec_pretty(inputs)?)?;
    let drawn = Command::new(program)
        .args(["plan", "--inputs"])
        .arg(&file)
        .arg("--out")
        .arg(folder.join("plan.png"))
        .output()
        .context("plimsoll plan")?;
    ensure!(
        drawn.status.success(),
        "plimsoll plan: {}",
        String::from_utf8_lossy(&drawn.stderr)
    );
    Ok(())
}
