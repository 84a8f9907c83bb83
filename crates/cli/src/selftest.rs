//! `plimsoll selftest`: traces a guest whose accesses are known, by every backend and under every accelerator of this host.
//!
//! Not here: the guest and its tracing (`plimsoll_observe::selftest`); what this host supports (`doctor`).

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::bail;
use plimsoll_flow::Accelerator;
use plimsoll_observe::selftest::{Outcome, Subject};
use plimsoll_output::exit::with_causes;
use plimsoll_output::{AtomicFile, TableOrJson, TableOrJsonArg, stop_flag};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_trap::BACKENDS;
use plimsoll_vm::{HostKernel, KvmSupport, QEMU, detect};
use serde::Serialize;

/// Trace a small known guest by every backend, under KVM and emulated, and compare with the truth.
///
/// Takes about two minutes for each accelerator. Starts the guests itself and touches no other VM. Needs root and QEMU. The
/// report (--report FILE) has no names of this host or its VMs, and can be sent to the developers.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    format: TableOrJsonArg,
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

/// A backend that does not work here is part of the report, not an error.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let file = args.report.as_deref().map(AtomicFile::create).transpose()?;
    let stop = stop_flag()?;
    let detection = detect();
    let mut accelerators = Vec::new();
    if detection.kvm != KvmSupport::None {
        accelerators.push((Accelerator::Kvm, detection.cpu_model.as_str()));
    }
    accelerators.push((Accelerator::Tcg, "qemu64,-cx16"));
    let mut runs = Vec::new();
    let is_table = matches!(args.format.output, TableOrJson::Table);
    if is_table {
        writeln!(out, "{}\n", detection.reason)?;
        writeln!(
            out,
            "{} error  overhead  by the guest  untraced  speed  lost",
            head("accelerator", "backend")
        )?;
    }
    for accelerator in accelerators {
        let mut guest = Subject::boot(accelerator, &stop)?;
        for row in BACKENDS {
            let traced = guest.trace(row);
            if stop.load(Ordering::Relaxed) {
                bail!("interrupted: the guest is ended, and there is no report");
            }
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
        file.persist()?;
    }
    if report.runs.iter().all(|run| run.result.is_none()) {
        bail!("no backend gave a result");
    }
    let results = report.runs.iter().filter_map(|run| run.result.as_ref());
    let mismatches: u64 = results.map(|outcome| outcome.mismatches).sum();
    if mismatches > 0 {
        bail!("a guest found {mismatches} pages wrong while it was traced; please report this");
    }
    Ok(())
}

/// The first columns of the table.
fn head(accelerator: &str, backend: &str) -> String {
    let names = BACKENDS.iter().map(|row| row.name().len());
    let width = names.max().unwrap_or(0);
    format!("{accelerator:<11}  {backend:<width$}")
}

impl Run {
    /// Its line of the table.
    fn line(&self) -> String {
        let head = head(&self.accelerator.to_string(), self.backend);
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
            "kvm          trap         1.23 %    1.01 %        0.95 %    2.00 %   0.98     0"
        );
        assert_eq!(
            head("accelerator", "backend").len(),
            head("kvm", "first-touch").len()
        );
        let line = run_of(Err("no rights")).line();
        assert_eq!(line, "kvm          trap         no rights");
    }
}
