//! `plimsoll selftest`: traces a guest whose accesses are known, by every backend and under every accelerator of this host.
//!
//! The guest is part of this program (crate `plimsoll-kvm-guest`). It scans an array over and over, so its working set is the
//! array, and it measures by its own clock how long it stands still. What a backend finds and what it says it costs
//! are held against both.
//!
//! Not here: what this host supports (`doctor`).

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use plimsoll_flow::WorkingSetBound;
use plimsoll_observe::{ObservedPeriod, Observer, ObserverOptions};
use plimsoll_output::TableOrJson;
use plimsoll_output::exit::with_causes;
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_trap::{BACKENDS, BackendRow, Toucher, TraceConfig};
use plimsoll_vm::{
    Accelerator, BareGuest, BareGuestEvent, ConsoleEvent, HostKernel, KvmSupport, QEMU, QemuVm,
    Stalls, VmError, detect,
};
use serde::Serialize;

/// Size of the guest's array.
const ARRAY_MIB: u64 = 64;
const ARRAY_PAGES: u64 = ARRAY_MIB * 256;
const MEMORY_MIB: u64 = 128;
/// How long a guest may take to boot and populate its array.
const BOOT: Duration = Duration::from_secs(60);
/// Traced periods of a backend; in the first ones it finds its rate.
const PERIODS: usize = 6;
const PERIODS_SETTLING: usize = 2;
const PERIOD: Duration = Duration::from_secs(2);
/// How long the guest is observed untraced, before each backend and after it.
const UNTRACED: Duration = Duration::from_secs(2);

/// Trace a small known guest by every backend, under KVM and emulated, and compare with the truth.
///
/// Takes about two minutes for each accelerator. Starts the guests itself and touches no other VM. Needs root and QEMU. The
/// report (--report FILE) has no names of this host or its VMs, and can be sent to the developers.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Output format
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        default_value_t,
        value_name = "FORMAT"
    )]
    format: TableOrJson,
    /// Also write the report, as JSON, to this file
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// The report.
#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    version: &'static str,
    kernel: Option<String>,
    qemu: Option<String>,
    processor: Option<String>,
    /// How far KVM works here, with which CPU model, and why.
    kvm: KvmSupport,
    kvm_cpu_model: String,
    kvm_reason: String,
    runs: Vec<Run>,
}

/// What a backend found of a guest.
#[derive(Debug, Serialize)]
struct Run {
    accelerator: Accelerator,
    backend: &'static str,
    /// Why there is no result; `null` if there is one.
    refusal: Option<String>,
    result: Option<Outcome>,
}

/// What a backend found, and what that cost.
#[derive(Debug, Serialize)]
struct Outcome {
    /// Median of the relative errors of the working set; `null` if no period had an estimate.
    error_ratio: Option<f64>,
    /// Periods with an estimate, of those after the first ones.
    estimates: usize,
    periods: usize,
    /// Share of the vCPU's time that the tracer says it took.
    overhead_ratio: f64,
    /// Share of its time that the guest stood still more than untraced, by its own clock. Noise may make it negative.
    guest_overhead_ratio: f64,
    /// Share of its time that it stood still untraced: the noise of this host.
    untraced_stalled_ratio: f64,
    /// Visits per second in the traced time over those in the untraced time.
    speed_ratio: f64,
    /// Pages or accesses lost.
    lost: u64,
    /// Cost of a trap or fault, and whether it was measured on a vCPU of KVM.
    touch_cost_us: f64,
    touch_cost_by_kvm: bool,
    /// Pages that the guest found wrong.
    mismatches: u64,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// That no guest can be started, that the report cannot be written, and that a guest found a page wrong. A backend that
/// does not work here is part of the report.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let file = match &args.report {
        Some(path) => {
            Some(File::create(path).with_context(|| format!("cannot write '{}'", path.display()))?)
        }
        None => None,
    };
    let detection = detect();
    let mut accelerators = Vec::new();
    if detection.kvm != KvmSupport::None {
        accelerators.push((Accelerator::Kvm, detection.cpu_model.as_str()));
    }
    accelerators.push((Accelerator::Tcg, "qemu64,-cx16"));
    let mut runs = Vec::new();
    let is_table = matches!(args.format, TableOrJson::Table);
    if is_table {
        writeln!(out, "{}\n", detection.reason)?;
        writeln!(
            out,
            "accelerator  backend     error  overhead  by the guest  untraced  speed  lost"
        )?;
    }
    for accelerator in accelerators {
        let mut guest = Subject::boot(accelerator)?;
        for row in BACKENDS {
            let traced = guest.trace(row);
            let (result, refusal) = match traced {
                Ok(outcome) => (Some(outcome), None),
                Err(error) => (None, Some(with_causes(&*error))),
            };
            let run = Run {
                accelerator: accelerator.0,
                backend: row.name(),
                refusal,
                result,
            };
            if is_table {
                writeln!(out, "{}", run.line())?;
                out.flush()?;
            }
            runs.push(run);
        }
    }
    let report = Report {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        kernel: HostKernel::read(Path::new("/")).release,
        qemu: qemu_version(),
        processor: processor(),
        kvm: detection.kvm,
        kvm_cpu_model: detection.cpu_model,
        kvm_reason: detection.reason,
        runs,
    };
    if !is_table {
        serde_json::to_writer(&mut *out, &report)?;
        writeln!(out)?;
    }
    if let Some(mut file) = file {
        serde_json::to_writer_pretty(&mut file, &report)?;
        writeln!(file)?;
    }
    let results = report.runs.iter().filter_map(|run| run.result.as_ref());
    let mismatches: u64 = results.map(|outcome| outcome.mismatches).sum();
    if mismatches > 0 {
        bail!("a guest found {mismatches} pages wrong while it was traced; please report this");
    }
    Ok(())
}

impl Run {
    /// Its line of the table.
    fn line(&self) -> String {
        let head = format!("{:<11}  {:<10}", self.accelerator.to_string(), self.backend);
        match (&self.result, &self.refusal) {
            (Some(found), _) => {
                let percent = |share: f64| format!("{:.2} %", share * 100.0);
                let error = found
                    .error_ratio
                    .map_or_else(|| "bound".to_owned(), percent);
                format!(
                    "{head} {error:>7}  {:>8}  {:>12}  {:>8}  {:>5.2}  {:>4}",
                    percent(found.overhead_ratio),
                    percent(found.guest_overhead_ratio),
                    percent(found.untraced_stalled_ratio),
                    found.speed_ratio,
                    found.lost,
                )
            }
            (None, refusal) => format!("{head}  {}", refusal.as_deref().unwrap_or_default()),
        }
    }
}

/// The guest with what it reported last.
struct Subject {
    guest: BareGuest,
    vm: QemuVm,
    latest: Reading,
}

/// What the guest had done and lost by the end of a round.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    visits: u64,
    stalls: Stalls,
    mismatches: u64,
}

/// What the guest did and lost in a time, as shares of it.
#[derive(Debug, Clone, Copy)]
struct Pace {
    seconds: f64,
    visits: f64,
    stalled: f64,
}

impl Pace {
    fn between(from: &Reading, to: &Reading) -> Self {
        let lost = |stalls: &Stalls| (stalls.time + stalls.long_time).as_secs_f64();
        Self {
            seconds: (to.at - from.at).as_secs_f64().max(1e-9),
            visits: (to.visits - from.visits) as f64,
            stalled: lost(&to.stalls) - lost(&from.stalls),
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            seconds: self.seconds + other.seconds,
            visits: self.visits + other.visits,
            stalled: self.stalled + other.stalled,
        }
    }
}

impl Subject {
    /// Boots a guest and waits until it runs.
    fn boot(on: (Accelerator, &str)) -> anyhow::Result<Self> {
        let name = format!("plimsoll-selftest-{}-{}", on.0, std::process::id());
        let settings = format!("workload=sequential mib={ARRAY_MIB} write_ratio=0.2 seconds=600");
        let guest = BareGuest::start(&name, on, MEMORY_MIB, &settings);
        let mut guest = guest.with_context(|| format!("cannot start {QEMU}"))?;
        let latest = next_round(&mut guest, Instant::now() + BOOT)
            .with_context(|| format!("a small guest under {} did not run", on.0))?;
        let vm: Result<_, VmError> = QemuVm::of_pid(guest.pid());
        Ok(Self {
            vm: vm?,
            guest,
            latest,
        })
    }

    /// The end of the first round that ends from now on.
    fn read(&mut self) -> anyhow::Result<Reading> {
        let now = Instant::now();
        let deadline = now + Duration::from_secs(30);
        while self.latest.at < now {
            self.latest = next_round(&mut self.guest, deadline)?;
        }
        Ok(self.latest)
    }

    /// What the guest does for a while.
    fn rest(&mut self) -> anyhow::Result<Pace> {
        let from = self.read()?;
        std::thread::sleep(UNTRACED);
        let to = self.read()?;
        Ok(Pace::between(&from, &to))
    }

    /// Traces it by a backend.
    fn trace(&mut self, row: &BackendRow) -> anyhow::Result<Outcome> {
        let config = TraceConfig {
            period: PERIOD,
            ..TraceConfig::default()
        };
        let before = self.rest()?;
        let options = ObserverOptions::default();
        let mut observer = Observer::attach(&self.vm, row.method, &config, &options)?;
        let stop = AtomicBool::new(false);
        let from = self.read()?;
        let periods = (0..PERIODS).map(|_| observer.period(&stop));
        let periods: Vec<ObservedPeriod> = periods.collect::<Result<_, _>>()?;
        let to = self.read()?;
        let cost = observer.touch_cost();
        observer.detach()?;
        let untraced = before.and(self.rest()?);
        let traced = Pace::between(&from, &to);

        let mut errors: Vec<f64> = periods[PERIODS_SETTLING..]
            .iter()
            .filter_map(|period| period.working_set)
            .filter(|set| set.bound == WorkingSetBound::Estimate)
            .map(|set| (set.size.0 as f64 / ARRAY_PAGES as f64 - 1.0).abs())
            .collect();
        errors.sort_by(f64::total_cmp);
        let overheads = periods.iter().map(|period| period.period.overhead_ratio);
        Ok(Outcome {
            error_ratio: errors.get(errors.len() / 2).copied(),
            estimates: errors.len(),
            periods: PERIODS - PERIODS_SETTLING,
            overhead_ratio: overheads.sum::<f64>() / PERIODS as f64,
            guest_overhead_ratio: traced.stalled / traced.seconds
                - untraced.stalled / untraced.seconds,
            untraced_stalled_ratio: untraced.stalled / untraced.seconds,
            speed_ratio: traced.visits
                / traced.seconds
                / (untraced.visits / untraced.seconds).max(1e-9),
            lost: periods
                .iter()
                .map(|period| period.period.losses.lost())
                .sum(),
            touch_cost_us: cost.time.as_secs_f64() * 1e6,
            touch_cost_by_kvm: cost.toucher == Toucher::KvmVcpu,
            mismatches: self.latest.mismatches,
        })
    }
}

/// The guest's next round; an error if there is none.
fn next_round(guest: &mut BareGuest, deadline: Instant) -> anyhow::Result<Reading> {
    loop {
        match guest.next(deadline) {
            BareGuestEvent::Line(
                at,
                ConsoleEvent::Round {
                    total_ops,
                    mismatches,
                    stalls: Some(stalls),
                    ..
                },
            ) => {
                return Ok(Reading {
                    at,
                    visits: total_ops,
                    stalls,
                    mismatches,
                });
            }
            BareGuestEvent::Line(_, ConsoleEvent::Error { message }) => bail!("{message}"),
            BareGuestEvent::Line(..) => {}
            BareGuestEvent::Silence => bail!("the guest printed nothing in time"),
            BareGuestEvent::Ended(why) => bail!("it ended: {why}"),
        }
    }
}

fn qemu_version() -> Option<String> {
    let output = std::process::Command::new(QEMU).arg("--version").output();
    let text = String::from_utf8(output.ok()?.stdout).ok()?;
    text.lines().next().map(str::to_owned)
}

/// The processor's name.
fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(": ").map(|(_, name)| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_of(result: Result<Outcome, &str>) -> Run {
        Run {
            accelerator: Accelerator::Kvm,
            backend: "trap",
            refusal: result.as_ref().err().map(|&why| why.to_owned()),
            result: result.ok(),
        }
    }

    #[test]
    fn a_line_has_error_and_cost_or_the_reason() {
        let outcome = Outcome {
            error_ratio: Some(0.0123),
            estimates: 4,
            periods: 4,
            overhead_ratio: 0.0101,
            guest_overhead_ratio: 0.0095,
            untraced_stalled_ratio: 0.02,
            speed_ratio: 0.98,
            lost: 0,
            touch_cost_us: 60.0,
            touch_cost_by_kvm: true,
            mismatches: 0,
        };
        let line = run_of(Ok(outcome)).line();
        assert_eq!(
            line,
            "kvm          trap        1.23 %    1.01 %        0.95 %    2.00 %   0.98     0"
        );
        let line = run_of(Err("no rights")).line();
        assert_eq!(line, "kvm          trap        no rights");
    }
}
