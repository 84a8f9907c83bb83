//! The array programs of \[PRL\] §5.2, all estimators on the same run.
//!
//! A guest of ours runs under the page-log plugin and uses an array of known size; each run is recorded once, and every
//! estimator, buffer size and cost of draining reads the same records (`plimsoll wss`).

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use plimsoll_pagelog::machine::CostModel;
use plimsoll_rig::{GuestConfig, GuestImage, program};
use serde::Serialize;
use serde_json::Value;

use crate::page_log::page_log_of;
use plimsoll_observe::page_log::PageLogArgs;
use plimsoll_output::{Format, OutputArgs, csv_table};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::size::Interval;
use plimsoll_rig::Subject;
use plimsoll_rig::median;

/// Longest a guest may take beyond its workload's time.
const PATIENCE: Duration = Duration::from_secs(300);
/// Cost of draining an entry, in the model's own, for the table of missed addresses.
const DRAINS: [u32; 4] = [1, 3, 10, 100];
/// Entries of a logging buffer, for the same table; \[PRL\] table 1 has these two.
const BUFFERS: [u32; 2] = [512, 1024];

/// Run array programs under the page-log plugin and compare every estimator with the sizes of the arrays.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sizes of the array, in MB of 10^6 bytes
    #[arg(long, value_delimiter = ',', default_value = "100,400")]
    mb: Vec<u64>,
    /// Which passes read (R) and write (W), alternating or in two halves
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "rwrw,rrww,wwrr"
    )]
    arrays: Vec<Order>,
    /// Length of an interval, in million instructions
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    interval: u64,
    /// Minimum time of each half of a program, per 100 MB
    #[arg(long, default_value = "20s")]
    half: Interval,
    /// Keep the logs in this directory
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// Order of reads and writes of an array's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Order {
    /// Every second pass writes
    Rwrw,
    /// A half of reads, then one of writes
    Rrww,
    /// A half of writes, then one of reads
    Wwrr,
}

impl Order {
    fn name(self) -> &'static str {
        match self {
            Self::Rwrw => "RWRW",
            Self::Rrww => "RRWW",
            Self::Wwrr => "WWRR",
        }
    }
}

/// The result of one run. Sizes in MB of 10^6 bytes.
#[derive(Debug, Serialize)]
struct Row {
    array: &'static str,
    array_mb: f64,
    truth_mb: Option<f64>,
    prl_mb: Option<f64>,
    /// Estimate less the array.
    prl_error_mb: Option<f64>,
    prl_settled_step: Option<u64>,
    prl_settled_instructions: Option<u64>,
    pml_mb: Option<f64>,
    pml_settled_step: Option<u64>,
    /// Pages that PML logged in an interval: the least and the most.
    pml_least_mb: Option<f64>,
    pml_most_mb: Option<f64>,
    /// Of all samplings but those before the array was in use.
    esx_least_mb: Option<f64>,
    esx_median_mb: Option<f64>,
    esx_most_mb: Option<f64>,
    mrc_mb: Option<f64>,
    intervals: u64,
    instructions: u64,
    records: u64,
    log_bytes: u64,
    /// Times that the guest waited for the ring, and records lost.
    waits: u64,
    lost: u64,
    /// Of RRWW alone.
    missed: Vec<MissedAddresses>,
}

/// Missed addresses at one buffer size and cost of draining.
#[derive(Debug, Serialize)]
struct MissedAddresses {
    buffer_entries: u32,
    drain_cycles: u32,
    full_events: u64,
    missed: u64,
    missed_ratio: f64,
    host_cpu_ratio: f64,
    prl_error_mb: Option<f64>,
}

/// Runs the experiment.
///
/// # Errors
///
/// Why a guest did not run to its end, or its log is not whole.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let image = GuestImage::locate()?;
    let temporary = tempfile::tempdir()?;
    let folder = args.keep.as_deref().unwrap_or(temporary.path());
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot make '{}'", folder.display()))?;
    let mut rows = Vec::new();
    for &mb in &args.mb {
        for &order in &args.arrays {
            let row = row_of(args, &image, folder, order, mb)
                .with_context(|| format!("with {} over {mb} MB", order.name()))?;
            rows.push(row);
        }
    }
    let text = match args.output.format() {
        Format::Json => serde_json::to_string_pretty(&serde_json::json!({
            "schema": SCHEMA,
            "accelerator": "tcg",
            "interval_instructions": args.interval * 1_000_000,
            "rows": rows,
        }))?,
        Format::Csv => csv(&rows),
        _ => table(args, &rows),
    };
    args.output
        .write(format!("{}\n", text.trim_end()).as_bytes(), out)
}

fn row_of(
    args: &Args,
    image: &GuestImage,
    folder: &Path,
    order: Order,
    mb: u64,
) -> anyhow::Result<Row> {
    let pages = mb * 1_000_000 / 4096;
    let half_ms = args.half.get().as_millis() * u128::from(mb) / 100;
    let mut guest = GuestConfig {
        memory_mib: mb * 1_000_000 / (1 << 20) + 112,
        ..GuestConfig::new(
            "arrays",
            &format!(
                "workload=arrays array={} pages={pages} step_ms={half_ms}",
                order.name()
            ),
        )
    };
    let path = folder.join(format!("{}-{mb}.pagelog", order.name().to_lowercase()));
    let options = PageLogArgs {
        page_log: Some(path.clone()),
        interval: Some(args.interval * 1_000_000),
        references: true,
        between_marks: true,
        ..PageLogArgs::default()
    };
    let log = page_log_of(&options, &mut guest)?;
    let recording = log.record();
    let mut subject = Subject::boot(image, &guest)?;
    subject.wait_for_end(Duration::from_millis(u64::try_from(2 * half_ms)?) + PATIENCE)?;
    let wrong = subject.listen()?.mismatches();
    anyhow::ensure!(wrong == 0, "{wrong} pages of the guest were wrong");
    drop(subject);
    let recorded = recording.end()?;

    let found = estimate(&path, &[])?;
    let array_mb = (pages * 4096) as f64 / 1e6;
    let of = |name: &str| Finding::of(&found, name);
    let (prl, pml) = (of("prl"), of("pml"));
    let steps = found["steps"].as_array().cloned().unwrap_or_default();
    let column = |name: &str| -> Vec<f64> {
        let values = steps.iter().filter_map(|step| step[name].as_u64());
        values.map(megabytes).collect()
    };
    let (written, sampled) = (column("pml_written_pages"), column("esx_pages"));
    // Of one program, as in [PRL] table 1: a log is read anew for each row.
    let missed = if order == Order::Rrww {
        missed(&path, array_mb)?
    } else {
        Vec::new()
    };
    Ok(Row {
        array: order.name(),
        array_mb,
        truth_mb: of("truth").mb,
        prl_mb: prl.mb,
        prl_error_mb: prl.mb.map(|mb| mb - array_mb),
        prl_settled_step: prl.settled_step,
        prl_settled_instructions: prl.settled_at,
        pml_mb: pml.mb,
        pml_settled_step: pml.settled_step,
        pml_least_mb: least(&written),
        pml_most_mb: most(&written),
        esx_least_mb: least(&sampled),
        esx_median_mb: (!sampled.is_empty()).then(|| median(sampled.clone())),
        esx_most_mb: most(&sampled),
        mrc_mb: of("mrc-past-filter").mb,
        intervals: found["intervals"].as_u64().unwrap_or_default(),
        instructions: found["instructions"].as_u64().unwrap_or_default(),
        records: recorded.records,
        log_bytes: recorded.bytes,
        waits: recorded.waits,
        lost: recorded.lost,
        missed,
    })
}

/// What PRL misses in a log, by the buffer's size and the cost of draining it.
fn missed(log: &Path, array_mb: f64) -> anyhow::Result<Vec<MissedAddresses>> {
    let mut missed = Vec::new();
    for buffer_entries in BUFFERS {
        for times in DRAINS {
            let drain_cycles = CostModel::default().entry_cycles * times;
            let (buffer, cycles) = (buffer_entries.to_string(), drain_cycles.to_string());
            let options = [
                "--estimator",
                "prl",
                "--buffer",
                &buffer,
                "--drain-cost",
                &cycles,
            ];
            let found = estimate(log, &options)?;
            let logging = &found["logging"][0];
            let count = |name: &str| logging[name].as_u64().unwrap_or_default();
            let all = count("missed_at_full") + count("missed_in_handler");
            missed.push(MissedAddresses {
                buffer_entries,
                drain_cycles,
                full_events: count("full_events"),
                missed: all,
                missed_ratio: all as f64 / count("walks").max(1) as f64,
                host_cpu_ratio: logging["host_cpu_ratio"].as_f64().unwrap_or_default(),
                prl_error_mb: Finding::of(&found, "prl").mb.map(|mb| mb - array_mb),
            });
        }
    }
    Ok(missed)
}

/// What an estimator found in a log.
struct Finding {
    mb: Option<f64>,
    settled_step: Option<u64>,
    settled_at: Option<u64>,
}

impl Finding {
    fn of(found: &Value, estimator: &str) -> Self {
        let all = found["estimators"]
            .as_array()
            .map_or(&[][..], Vec::as_slice);
        let one = all.iter().find(|one| one["estimator"] == estimator);
        let number = |name: &str| one.and_then(|one| one[name].as_u64());
        Self {
            mb: number("working_set_pages").map(megabytes),
            settled_step: number("settled_step"),
            settled_at: number("settled_at"),
        }
    }
}

/// Output of `plimsoll wss` for a log.
fn estimate(log: &Path, options: &[&str]) -> anyhow::Result<Value> {
    let mut wss = Command::new(program("plimsoll")?);
    wss.args(["wss", "-o", "json"]).args(options).arg(log);
    let output = wss
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run plimsoll wss")?;
    anyhow::ensure!(
        output.status.success(),
        "plimsoll wss failed: {}",
        output.status
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn megabytes(pages: u64) -> f64 {
    (pages * 4096) as f64 / 1e6
}

fn least(values: &[f64]) -> Option<f64> {
    values.iter().copied().min_by(f64::total_cmp)
}

fn most(values: &[f64]) -> Option<f64> {
    values.iter().copied().max_by(f64::total_cmp)
}

fn csv(rows: &[Row]) -> String {
    let mb = |value: Option<f64>| value.map(|mb| format!("{mb:.3}"));
    csv_table!(rows, |row| {
        "array": row.array,
        "array_mb": mb(Some(row.array_mb)),
        "truth_mb": mb(row.truth_mb),
        "prl_mb": mb(row.prl_mb),
        "prl_error_mb": mb(row.prl_error_mb),
        "prl_settled_step": row.prl_settled_step,
        "pml_mb": mb(row.pml_mb),
        "pml_least_mb": mb(row.pml_least_mb),
        "pml_most_mb": mb(row.pml_most_mb),
        "esx_least_mb": mb(row.esx_least_mb),
        "esx_median_mb": mb(row.esx_median_mb),
        "esx_most_mb": mb(row.esx_most_mb),
        "mrc_mb": mb(row.mrc_mb),
        "intervals": row.intervals,
        "instructions": row.instructions,
        "records": row.records,
        "log_bytes": row.log_bytes,
        "waits": row.waits,
        "lost": row.lost,
    })
}

fn table(args: &Args, rows: &[Row]) -> String {
    let mb = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |mb| format!("{mb:.2}"));
    let mut text = format!(
        "Array programs of [PRL] under TCG with the page-log plugin, sizes in MB of 10^6 bytes, intervals of {} M instructions\n\n\
         array      size    truth      PRL   error  settled      PML  (least to most)    sampling, median (least to most)  curve 5 %\n",
        args.interval
    );
    for row in rows {
        text.push_str(&format!(
            "{:<5} {:>9.2} {:>8} {:>8} {:>7}  {:>7} {:>8}  {:>16}  {:>34}  {:>9}\n",
            row.array,
            row.array_mb,
            mb(row.truth_mb),
            mb(row.prl_mb),
            mb(row.prl_error_mb),
            row.prl_settled_step
                .map_or_else(|| "never".to_owned(), |step| step.to_string()),
            mb(row.pml_mb),
            format!("({} to {})", mb(row.pml_least_mb), mb(row.pml_most_mb)),
            format!(
                "{} ({} to {})",
                mb(row.esx_median_mb),
                mb(row.esx_least_mb),
                mb(row.esx_most_mb)
            ),
            mb(row.mrc_mb),
        ));
    }
    text.push_str(
        "\nAddresses that PRL misses while the handler drains, by the cost of draining an entry\n\n\
         array      size  buffer  cycles  full events      missed    share  host CPU  PRL's error\n",
    );
    for row in rows {
        for missed in &row.missed {
            text.push_str(&format!(
                "{:<5} {:>9.2}  {:>6}  {:>6}  {:>11}  {:>10}  {:>5.2} %  {:>6.2} %  {:>11}\n",
                row.array,
                row.array_mb,
                missed.buffer_entries,
                missed.drain_cycles,
                missed.full_events,
                missed.missed,
                missed.missed_ratio * 100.0,
                missed.host_cpu_ratio * 100.0,
                mb(missed.prl_error_mb),
            ));
        }
    }
    text.push_str("\nThe guests and their logs\n\narray      size  intervals  M instructions     records  bytes/record  waits  lost\n");
    for row in rows {
        text.push_str(&format!(
            "{:<5} {:>9.2}  {:>9}  {:>14}  {:>10}  {:>12.2}  {:>5}  {:>4}\n",
            row.array,
            row.array_mb,
            row.intervals,
            row.instructions / 1_000_000,
            row.records,
            row.log_bytes as f64 / row.records.max(1) as f64,
            row.waits,
            row.lost,
        ));
    }
    text
}
