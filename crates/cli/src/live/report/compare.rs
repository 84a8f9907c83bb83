//! `plimsoll report wss --compare`: one VM's working set by every method there is, side by side.
//!
//! Not here: the methods (`plimsoll_observe::compare`).

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use plimsoll_flow::Accelerator;
use plimsoll_vm::QemuVm;
use serde::Serialize;

use crate::live::SocketArg;
use plimsoll_observe::compare::{Answer, Options, ShrinkOptions, compare, truth_of_console};
use plimsoll_output::{Format, OutputArgs, bail_usage, csv_table, printable, stop_flag, table};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::size::{ByteSize, Interval, Rate};
use plimsoll_report::managed::refuse_managed;
use plimsoll_report::words::{known, maybe_size, percent, size};

/// Options of the comparison. Only with --compare.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "With --compare")]
#[group(conflicts_with_all = ["since", "points"])]
pub struct ComparisonArgs {
    /// Length of a round
    #[arg(long, value_name = "TIME", default_value = "30s", requires = "compare")]
    interval: Interval,
    /// Rounds of each estimator
    #[arg(long, value_name = "N", default_value_t = 3, requires = "compare", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Maximum share of the VM's CPU time for tracing or scanning
    #[arg(long, value_name = "SHARE", default_value = "1%", requires = "compare")]
    budget: Rate,
    /// Number of pages in a sample
    #[arg(long, value_name = "N", default_value_t = 100, requires = "compare", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    sample: u32,
    /// Shrink the VM by its balloon until it refaults, as Zballoond does; then restore its size. Refused while plimsolld manages the VM
    #[arg(long, requires = "compare")]
    shrink: bool,
    /// How long the VM is observed at each size
    #[arg(long, value_name = "TIME", default_value = "5s", requires = "shrink")]
    shrink_step: Interval,
    /// Smallest size to which the VM may be shrunk
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "64MiB",
        requires = "shrink"
    )]
    shrink_floor: ByteSize,
    /// Console log of a guest running plimsoll-workload, with its memory statistics and the true working set
    #[arg(long, value_name = "FILE", requires = "compare")]
    console: Option<PathBuf>,
    /// Page log of this VM (`plimsoll run --page-log`)
    #[arg(long, value_name = "FILE", requires = "compare")]
    page_log: Option<PathBuf>,
    /// Admin socket of the daemon under its disk [default: the one beside the disk's socket]
    #[arg(long, value_name = "SOCKET", requires = "compare")]
    disk: Option<PathBuf>,
    /// The true working set, if known [default: from the console log]
    #[arg(long, value_name = "SIZE", requires = "compare")]
    truth: Option<ByteSize>,
    /// Need of the guest's kernel (`plimsoll lab epsilon`); sizes of the whole VM are compared with the truth plus this
    #[arg(long, value_name = "SIZE", default_value = "0", requires = "compare")]
    epsilon: ByteSize,
}

impl ComparisonArgs {
    fn options(&self) -> Options {
        Options {
            interval: self.interval.get(),
            rounds: self.rounds,
            budget: self.budget.get(),
            sample_pages: usize::try_from(self.sample).unwrap_or(usize::MAX),
            shrink: self.shrink.then(|| ShrinkOptions {
                step: self.shrink_step.get(),
                floor_bytes: self.shrink_floor.0,
            }),
            console: self.console.clone(),
            page_log: self.page_log.clone(),
            disk: self.disk.clone(),
        }
    }

    /// The expected figure.
    fn expected(&self, answer: &Answer, truth: Option<u64>) -> Option<u64> {
        let kernel = if answer.whole_vm { self.epsilon.0 } else { 0 };
        truth.map(|truth| truth.saturating_add(kernel))
    }
}

/// An answer with its error.
#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    answer: Answer,
    /// The figure over the truth, less 1.
    error_ratio: Option<f64>,
}

/// Everything, as JSON.
#[derive(Debug, Serialize)]
struct Document<'a> {
    schema: u32,
    vm: &'a str,
    accelerator: Option<Accelerator>,
    memory_bytes: u64,
    interval_seconds: f64,
    rounds: u32,
    truth_bytes: Option<u64>,
    epsilon_bytes: u64,
    estimators: &'a [Row],
}

/// Compares the methods and writes what they found.
///
/// # Errors
///
/// That there is no such VM, or that plimsolld manages it and it is to be shrunk; what a method cannot do is stated in its row.
pub fn run(
    vm: &str,
    how: &ComparisonArgs,
    daemon: &SocketArg,
    output: &OutputArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    if output.format().is_picture() {
        bail_usage!("--compare has no picture: -o table, csv or json");
    }
    let options = how.options();
    if how.shrink {
        refuse_managed(daemon, vm, None)?;
    }
    let vm = plimsoll_vm::find(vm)?;
    let stop = stop_flag()?;
    let rows = rows(&vm, how, &options, daemon, &stop)?;
    // A guest that has ended took its console with it; the results stand.
    let truth = truth(how).unwrap_or_default();
    let content = match output.format() {
        Format::Csv => lines(&rows),
        Format::Json => {
            let document = Document {
                schema: SCHEMA,
                vm: &vm.id.0,
                accelerator: vm.accelerator,
                memory_bytes: vm.memory_bytes,
                interval_seconds: options.interval.as_secs_f64(),
                rounds: options.rounds,
                truth_bytes: truth,
                epsilon_bytes: how.epsilon.0,
                estimators: &rows,
            };
            serde_json::to_string(&document)? + "\n"
        }
        _ => text(&vm, how, truth, &rows),
    };
    output.write(content.as_bytes(), out)
}

fn truth(how: &ComparisonArgs) -> anyhow::Result<Option<u64>> {
    match (&how.truth, &how.console) {
        (Some(truth), _) => Ok(Some(truth.0)),
        (None, Some(console)) => truth_of_console(console),
        (None, None) => Ok(None),
    }
}

/// Runs each method. The truth is that of its time, as a guest's needs may change.
fn rows(
    vm: &QemuVm,
    how: &ComparisonArgs,
    options: &Options,
    daemon: &SocketArg,
    stop: &AtomicBool,
) -> anyhow::Result<Vec<Row>> {
    truth(how)?;
    let mut rows = Vec::new();
    let managed = |name: &str, pid| refuse_managed(daemon, name, Some(pid));
    compare(vm, options, &managed, stop, &mut |answer| {
        let truth = truth(how).unwrap_or_default();
        let expected = how.expected(&answer, truth).filter(|&bytes| bytes > 0);
        let error_ratio = answer
            .working_set
            .zip(expected)
            .map(|(found, expected)| found.bytes as f64 / expected as f64 - 1.0);
        rows.push(Row {
            answer,
            error_ratio,
        });
    });
    Ok(rows)
}

fn text(vm: &QemuVm, how: &ComparisonArgs, truth: Option<u64>, rows: &[Row]) -> String {
    let by = vm
        .accelerator
        .map_or_else(String::new, |by| format!(", {by}"));
    let mut text = format!("{}{by}, {}", printable(&vm.id.0), size(vm.memory_bytes));
    match truth {
        Some(truth) => text.push_str(&format!("; its working set is {}\n", size(truth))),
        None => text.push_str("; its working set is unknown\n"),
    }
    text.push_str(&table!(rows, |row| {
        Left "estimator": row.answer.estimator,
        Right "working set": figure(&row.answer),
        Left "95 %": band(&row.answer),
        Right "error": row.error_ratio.map(|error| format!("{:+.1} %", error * 100.0)),
        Right "took": format!("{:.1} s", row.answer.seconds),
        Right "our CPU": format!("{:.2} s", row.answer.cpu_seconds),
        Right "overhead": row.answer.overhead_ratio.map(percent),
        Left "": printable(&remarks(&row.answer)),
    }));
    text.push_str("\n+k: a size of the whole VM, the guest's kernel included");
    if truth.is_some() && how.epsilon.0 > 0 {
        text.push_str(&format!(
            "; compared with the working set and {}",
            size(how.epsilon.0)
        ));
    }
    text.push_str(
        ".\nour CPU: time of this program; overhead: share of the VM's own time, where that is measured.\n",
    );
    if vm.accelerator == Some(Accelerator::Tcg) {
        text.push_str("tcg: emulated; its times are not those of real hardware.\n");
    }
    text
}

/// The working set, marked where it is a bound or that of the whole VM.
fn figure(answer: &Answer) -> String {
    known(answer.working_set, |found| {
        let whole = if answer.whole_vm { " +k" } else { "" };
        format!("{}{}{whole}", found.bound.sign(), size(found.bytes))
    })
}

fn band(answer: &Answer) -> Option<String> {
    let found = answer.working_set?;
    let (low, high) = (found.low_bytes, found.high_bytes);
    (low.or(high)).map(|_| format!("{} to {}", maybe_size(low), maybe_size(high)))
}

/// The reason for which a figure is missing, and notes on it; otherwise what the method observes.
fn remarks(answer: &Answer) -> String {
    let missing = answer.not_available.as_ref();
    let missing = missing.map(|why| match answer.working_set {
        None => format!("not available: {why}"),
        Some(_) => why.clone(),
    });
    let remarks: Vec<String> = missing.into_iter().chain(answer.note.clone()).collect();
    match &remarks[..] {
        [] => answer.sees.to_owned(),
        remarks => remarks.join("; "),
    }
}

fn lines(rows: &[Row]) -> String {
    let set = |row: &Row| row.answer.working_set;
    let rounds =
        |row: &Row| -> Vec<_> { row.answer.rounds_bytes.iter().map(u64::to_string).collect() };
    let phrase = |phrase: &Option<String>| printable(phrase.as_deref().unwrap_or_default());
    csv_table!(rows, |row| {
        "estimator": row.answer.estimator,
        "working_set_bytes": set(row).map(|set| set.bytes),
        "bound": set(row).map(|set| set.bound.to_string()),
        "low_bytes": set(row).and_then(|set| set.low_bytes),
        "high_bytes": set(row).and_then(|set| set.high_bytes),
        "whole_vm": row.answer.whole_vm,
        "error_ratio": row.error_ratio,
        "seconds": row.answer.seconds,
        "cpu_seconds": row.answer.cpu_seconds,
        "overhead_ratio": row.answer.overhead_ratio,
        "rounds_bytes": rounds(row).join(" "),
        "not_available": phrase(&row.answer.not_available),
        "note": phrase(&row.answer.note),
    })
}
