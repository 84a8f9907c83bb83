//! `plimsoll report rightsize`: the smallest size of each VM within its limit, and the memory saved.

use std::io::Write;

use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::rightsize::RightsizeView;
use plimsoll_protocol::size::Interval;
use plimsoll_protocol::vm::{Relative, VmStatus, VmSummary};
use serde::{Deserialize, Serialize};

use super::super::words::{
    known, maybe_size, name, name_of, percent, ratio, relative, size, working_set,
};
use super::super::{Daemon, write_json};
use super::VmArgs;
use plimsoll_output::{TextFormat, TextFormatArg, csv_table, printable, table};

/// Smallest size of each VM within its bounds on misses, and the memory that would be saved.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    of: VmArgs,
    /// Replay the curves kept since then, instead of the present curve; a time such as 14d
    #[arg(long, value_name = "TIME")]
    since: Option<Interval>,
    /// With --since, percentage of the curves whose needs are to fit, 1 to 100
    #[arg(long, value_name = "N", default_value_t = 95, requires = "since", value_parser = clap::value_parser!(u8).range(1..=100))]
    percentile: u8,
    #[command(flatten)]
    form: TextFormatArg,
}

/// What `-o json` writes.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Rightsizes {
    schema: u32,
    vms: Vec<Rightsize>,
    /// Sum of what could be saved, in bytes.
    saves_bytes: u64,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Rightsize {
    vm: String,
    status: VmStatus,
    /// What it has.
    size_bytes: u64,
    /// Smallest size within its limit; `null` if there is no curve.
    right_bytes: Option<u64>,
    /// What would be saved; `null` if its curve is unknown, 0 if it needs more.
    saves_bytes: Option<u64>,
    /// What it needs more than it has; 0 if it has enough.
    lacks_bytes: Option<u64>,
    /// Misses at that size over those at the baseline.
    relative_then: Option<Relative>,
    /// 1.0 and what may be lost; `null` if it is not promised that.
    bound: Option<f64>,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let daemon = args.of.daemon()?;
    if let Some(since) = args.since {
        return over_time(args, since, &daemon, out);
    }
    let summaries = daemon.vms(args.of.vm.as_deref())?;
    let mut vms = Vec::new();
    for vm in &summaries {
        let then = match vm.promise_bytes {
            Some(bytes) => {
                let answer = daemon.ask_of(&vm.vm, |client, vm| client.vm_what_if(vm, bytes))?;
                answer.relative_then
            }
            None => None,
        };
        vms.push(of(vm, then));
    }
    let saves = vms.iter().filter_map(|vm| vm.saves_bytes);
    let report = Rightsizes {
        schema: SCHEMA,
        saves_bytes: saves.fold(0, u64::saturating_add),
        vms,
    };
    match args.form.output {
        TextFormat::Table => Ok(out.write_all(text(&report, &summaries).as_bytes())?),
        TextFormat::Csv => Ok(out.write_all(lines(&report).as_bytes())?),
        TextFormat::Json => write_json(&report, out),
    }
}

/// The right size over time of the VMs.
fn over_time(
    args: &Args,
    since: Interval,
    daemon: &Daemon,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let since_ms = u64::try_from(since.get().as_millis()).unwrap_or(u64::MAX);
    let since_unix_ms = daemon.host()?.now_unix_ms.saturating_sub(since_ms);
    let percentile = f64::from(args.percentile) / 100.0;
    let mut views = Vec::new();
    for vm in args.of.names(daemon)? {
        views.push(daemon.ask_of(&vm, |client, vm| {
            client.rightsize(vm, since_unix_ms, percentile)
        })?);
    }
    match args.form.output {
        TextFormat::Table => Ok(out.write_all(text_over_time(&views, args).as_bytes())?),
        TextFormat::Csv => Ok(out.write_all(lines_over_time(&views).as_bytes())?),
        TextFormat::Json => write_json(&views, out),
    }
}

fn text_over_time(views: &[RightsizeView], args: &Args) -> String {
    let rate = |rate: f64| format!("{rate:.1}");
    let table = table!(views, |view| {
        Left "VM": name(&view.vm),
        Right "has": size(view.size_bytes),
        Right "right": maybe_size(view.right_bytes),
        Right "curves": view.curves,
        Right "days": view.days,
        Right "confidence": known(view.confidence, percent),
        Right "within bound": known(view.kept_ratio, percent),
        Right "worst day": known(view.kept_worst_day_ratio, percent),
        Right "misses": known(view.relative, ratio),
        Right "misses/s": known(view.misses_per_second, rate),
        Right "at baseline": known(view.misses_at_baseline_per_second, rate),
    });
    format!(
        "{table}\nright: enough for {} % of the kept curves, by the upper confidence limit; confidence: share of the days that the others\n\
         predict. Had it been so: share of the curves within its bound, misses over those at its baseline, and a second.\n",
        args.percentile
    )
}

fn lines_over_time(views: &[RightsizeView]) -> String {
    csv_table!(views, |view| {
        "vm": printable(&view.vm),
        "since_unix_ms": view.since_unix_ms,
        "percentile": view.percentile,
        "size_bytes": view.size_bytes,
        "right_bytes": view.right_bytes,
        "curves": view.curves,
        "days": view.days,
        "confidence": view.confidence,
        "kept_ratio": view.kept_ratio,
        "kept_worst_day_ratio": view.kept_worst_day_ratio,
        "relative": view.relative,
        "misses_per_second": view.misses_per_second,
        "misses_at_baseline_per_second": view.misses_at_baseline_per_second,
    })
}

fn of(vm: &VmSummary, relative_then: Option<Relative>) -> Rightsize {
    let right = vm.promise_bytes;
    Rightsize {
        vm: vm.vm.clone(),
        status: vm.status,
        size_bytes: vm.size_bytes,
        right_bytes: right,
        saves_bytes: right.map(|right| vm.size_bytes.saturating_sub(right)),
        lacks_bytes: right.map(|right| right.saturating_sub(vm.size_bytes)),
        relative_then,
        bound: vm.settings.promise.max_loss.map(|loss| 1.0 + loss),
    }
}

fn text(report: &Rightsizes, summaries: &[VmSummary]) -> String {
    let table = table!(report.vms.iter().zip(summaries), |(right, vm)| {
        Left "VM": name(&right.vm),
        Left "status": name_of(right.status),
        Right "has": size(right.size_bytes),
        Right "uses": working_set(vm.working_set.as_ref()),
        Right "needs": maybe_size(right.right_bytes),
        Right "saves": maybe_size(right.saves_bytes),
        Right "lacks": right.lacks_bytes.filter(|lacks| *lacks > 0).map(size),
        Right "misses then": relative(right.relative_then.as_ref()),
        Right "bound": right.bound.map(ratio),
    });
    format!(
        "{table}\n{} could be saved in all. needs: smallest size within its limit, by the upper confidence limit;\n\
         misses then: over those at its baseline.\n",
        size(report.saves_bytes)
    )
}

fn lines(report: &Rightsizes) -> String {
    csv_table!(&report.vms, |vm| {
        "vm": printable(&vm.vm),
        "status": name_of(vm.status),
        "size_bytes": vm.size_bytes,
        "right_bytes": vm.right_bytes,
        "saves_bytes": vm.saves_bytes,
        "lacks_bytes": vm.lacks_bytes,
        "relative_then": vm.relative_then.map(|at| at.expected),
        "relative_then_high": vm.relative_then.map(|at| at.high),
        "bound": vm.bound,
    })
}
