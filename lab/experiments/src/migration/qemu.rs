//! A guest under QEMU, migrated by QEMU to a file in RAM and to another QEMU on this host.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use plimsoll_flow::Accelerator;
use plimsoll_rig::{AcceleratorChoice, GuestConfig, GuestError, GuestImage, Subject, try_wait_for};
use plimsoll_vm::{ConsoleEvent, Qmp, VmError, detect};
use serde_json::{Value, json};

use plimsoll_output::exit::with_causes;

use super::{Args, Figures, MIB, Row, add, row};

const TO_FILE: &str = "to a file";
const TO_QEMU: &str = "to another QEMU";
/// Memory of the guest besides the array.
const KERNEL_MIB: u64 = 96;
/// Maximum duration of a copy, and of the verification by its guest.
const COPY_TIMEOUT: Duration = Duration::from_secs(180);
/// Interval of polling a copy.
const LOOK: Duration = Duration::from_millis(10);
/// Longest round of a guest's workload that is used.
const ROUND_MAX: Duration = Duration::from_secs(2);
/// A bandwidth limit that never takes effect.
const BANDWIDTH_BYTES_S: u64 = 1 << 40;
/// QEMU's own default.
const STOP_MS: u64 = 300;
/// Rounds after which a copy may stop the guest as long as it takes.
const ROUNDS_MAX: u64 = 30;
const LONG_STOP_MS: u64 = 60_000;

/// Migrates a guest with both methods at each share of writes.
pub fn rows(args: &Args, writes: &[f64]) -> Vec<Row> {
    let mib = args.guest_size.0.div_ceil(MIB);
    let mut rows = Vec::new();
    let (image, under) = match GuestImage::locate() {
        Ok(image) => {
            let accelerator = detect().accelerator;
            (Ok(image), accelerator)
        }
        Err(error) => (Err(error), Accelerator::Tcg),
    };
    for &share in writes {
        let mut copies: [anyhow::Result<Vec<Figures>>; 2] = [Ok(Vec::new()), Ok(Vec::new())];
        for _ in 0..args.repeats {
            let both = match &image {
                Ok(image) => migrate_twice(args, image, under, mib, share),
                Err(error) => Err(anyhow::anyhow!("{error}")),
            };
            let both = match both {
                Ok(both) => both.map(Ok),
                Err(error) => [Err(anyhow::anyhow!("{error:#}")), Err(error)],
            };
            for (copies, copy) in copies.iter_mut().zip(both) {
                add(copies, || copy);
            }
        }
        for (way, copies) in [TO_FILE, TO_QEMU].into_iter().zip(copies) {
            let what = (share, mib * MIB / 4096);
            rows.push(row("qemu", way, what, &under.to_string(), copies));
        }
    }
    rows
}

/// Visits a ns between two times, a round's spread evenly over it; `None` if no round covers that time.
fn rate(subject: &mut Subject, from: Instant, to: Instant) -> Result<Option<f64>, GuestError> {
    let (mut visits, mut took_ns) = (0.0, 0.0);
    // Rounds last a quarter of a second at most, unless the host is busy.
    let begin = from.checked_sub(ROUND_MAX).unwrap_or(from);
    for round in subject.listen()?.rounds(begin, Instant::now()) {
        let inside = to
            .min(round.end)
            .saturating_duration_since(from.max(round.start));
        let length = round.end - round.start;
        if !inside.is_zero() {
            visits += round.visits as f64 * inside.as_secs_f64() / length.as_secs_f64();
            took_ns += inside.as_nanos() as f64;
        }
    }
    Ok((took_ns > 0.0).then(|| visits / took_ns))
}

/// Boots a guest and copies it, first to a file and then to another QEMU; both copies are started.
fn migrate_twice(
    args: &Args,
    image: &GuestImage,
    accelerator: Accelerator,
    mib: u64,
    share: f64,
) -> anyhow::Result<[Figures; 2]> {
    let workload = format!("workload=sequential mib={mib} write_ratio={share}");
    let config = GuestConfig {
        memory_mib: mib + KERNEL_MIB,
        accelerator: match accelerator {
            Accelerator::Kvm => AcceleratorChoice::Kvm,
            Accelerator::Tcg => AcceleratorChoice::Tcg,
        },
        ..GuestConfig::new("migrated", &workload)
    };
    let folder = tempfile::Builder::new()
        .prefix("plimsoll-")
        .tempdir_in("/dev/shm")?;
    let plain = folder
        .path()
        .to_str()
        .is_some_and(|path| !path.contains([' ', '\'']));
    ensure!(plain, "a folder in /dev/shm has a name no shell takes");
    let mut source = Subject::boot(image, &config)?;
    let pages = mib * MIB / 4096;

    let file = folder.path().join("vm");
    let store = format!("exec:cat > '{}'", file.display());
    let mut to_file = copy(args, &mut source, &store)?;
    let load = format!("exec:cat '{}'", file.display());
    let mut restored = destination(image, &config)?;
    receive(&mut restored, &load)?;
    judge(&mut to_file, &mut restored, pages);
    drop(restored);
    std::fs::remove_file(&file)?;
    source.guest.qmp()?.cont()?;

    let socket = format!("unix:{}", folder.path().join("socket").display());
    let mut moved = destination(image, &config)?;
    receive(&mut moved, &socket)?;
    let socket_file = folder.path().join("socket");
    try_wait_for("the socket of a QEMU", COPY_TIMEOUT, || {
        Ok(socket_file.exists().then_some(()))
    })?;
    let mut to_qemu = copy(args, &mut source, &socket)?;
    judge(&mut to_qemu, &mut moved, pages);
    Ok([to_file, to_qemu])
}

/// Starts a QEMU that waits for a copy.
fn destination(image: &GuestImage, config: &GuestConfig) -> anyhow::Result<Subject> {
    let config = GuestConfig {
        extra_arguments: ["-incoming", "defer"].map(str::to_owned).into(),
        ..config.clone()
    };
    Subject::start(image, &config)
}

fn receive(running: &mut Subject, from: &str) -> anyhow::Result<()> {
    let mut qmp = running.guest.qmp()?;
    qmp.execute("migrate-incoming", json!({ "uri": from }))?;
    Ok(())
}

/// Lets a copy run and records its results.
fn judge(figures: &mut Figures, copy: &mut Subject, pages: u64) {
    match verified(copy, pages) {
        Ok(wrong_pages) => figures.wrong_pages = wrong_pages,
        Err(error) => figures.broken = Some(with_causes(error.as_ref())),
    }
}

/// Waits until a copy has visited as many pages as the array has and returns how many it found wrong.
fn verified(copy: &mut Subject, pages: u64) -> anyhow::Result<u64> {
    let deadline = Instant::now() + COPY_TIMEOUT;
    loop {
        let said = copy.listen().context("a copy does not run")?;
        let visits: u64 = said
            .0
            .iter()
            .filter_map(|(_, event)| match event {
                ConsoleEvent::Round { ops, .. } => Some(ops),
                _ => None,
            })
            .sum();
        // Part of the first round was in the guest that was copied.
        if visits >= 2 * pages {
            return Ok(said.mismatches());
        }
        ensure!(
            Instant::now() < deadline,
            "a copy visited {visits} of {pages} pages"
        );
        thread::sleep(LOOK);
    }
}

/// Measures a running guest, then has QEMU copy it to `to`; the guest is stopped after it.
fn copy(args: &Args, source: &mut Subject, to: &str) -> anyhow::Result<Figures> {
    let mut qmp = source.guest.qmp()?;
    let dirty_rate_mib_s = dirty_rate(&mut qmp)?;
    qmp.execute(
        "migrate-set-parameters",
        json!({ "max-bandwidth": BANDWIDTH_BYTES_S, "downtime-limit": STOP_MS }),
    )?;
    let begin = Instant::now();
    thread::sleep(args.window.get());
    let start = Instant::now();
    let before = rate(source, begin, start)?;
    qmp.execute("migrate", json!({ "uri": to }))?;
    let mut forced = 0;
    let state = loop {
        let state = qmp.execute("query-migrate", Value::Null)?;
        match state["status"].as_str() {
            Some("completed") => break state,
            Some("failed" | "cancelled") => bail!("QEMU could not migrate: {state}"),
            _ => {}
        }
        ensure!(
            start.elapsed() < COPY_TIMEOUT,
            "QEMU does not get done migrating"
        );
        if forced == 0 && number(&state["ram"]["dirty-sync-count"]) > ROUNDS_MAX {
            forced = 1;
            let parameters = json!({ "downtime-limit": LONG_STOP_MS });
            qmp.execute("migrate-set-parameters", parameters)?;
        }
        thread::sleep(LOOK);
    };
    let ram = &state["ram"];
    let stopped_ms = number(&state["downtime"]);
    let moving = Instant::now().checked_sub(Duration::from_millis(stopped_ms));
    Ok(Figures {
        operations_per_ns_before: before.context("no round in the window before a copy")?,
        operations_per_ns_during: rate(source, start, moving.unwrap_or(start))?,
        rounds: number(&ram["dirty-sync-count"]) as f64,
        pages_sent: (number(&ram["normal"]) + number(&ram["duplicate"])) as f64,
        took_ms: number(&state["total-time"]) as f64,
        stopped_ms: stopped_ms as f64,
        dirty_rate_mib_s,
        forced,
        ..Figures::default()
    })
}

/// Has QEMU estimate the guest's dirty rate, in MiB/s; `None` if it does not support the command.
///
/// By page sampling alone: QEMU 7.2 under TCG ends with a segmentation fault when queried by its bitmap or ring.
fn dirty_rate(qmp: &mut Qmp) -> anyhow::Result<Option<f64>> {
    let arguments = json!({ "calc-time": 1, "mode": "page-sampling" });
    match qmp.execute("calc-dirty-rate", arguments) {
        Err(VmError::QmpRefused { .. }) => return Ok(None),
        result => result?,
    };
    let deadline = Instant::now() + COPY_TIMEOUT;
    loop {
        let state = qmp.execute("query-dirty-rate", Value::Null)?;
        if state["status"] == "measured" {
            return Ok(state["dirty-rate"].as_f64());
        }
        ensure!(
            Instant::now() < deadline,
            "QEMU does not measure its dirty rate"
        );
        thread::sleep(LOOK);
    }
}

/// A count that QEMU reports; 0 if it is not a number.
fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}
