//! Traced curves compared with the complete references of the guest.
//!
//! The guest runs under the page-log plugin, which records every reference that misses a small filter of the most
//! recently used pages: from these the misses of every larger LRU memory follow exactly. At the same time it is traced
//! from outside, at one rate after the other, and each rate's curve is compared with the misses within the same time.
//!
//! A traced curve covers the references that reach past a hot set representing h pages, as shares of them. The
//! comparison uses, as in `lab curves`, shares of those that reach past 2 h.

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context as _;
use plimsoll_flow::{PageCount, PageSize, TraceMethod};
use plimsoll_rig::{GuestConfig, GuestImage};
use plimsoll_trap::{RateRule, TraceConfig};
use serde::Serialize;

use crate::page_log::{FullTrace, Misses};
use crate::tracing::trace;
use plimsoll_observe::even_sizes;
use plimsoll_output::{Format, OutputArgs};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::size::{ByteSize, Interval};
use plimsoll_rig::Subject;

/// Trace guests whose full reference trace is recorded, and compare the curves.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Workload of the guests, as keys of plimsoll-workload
    #[arg(long, default_values_t = default_workloads())]
    workload: Vec<String>,
    /// Memory of the guests, in MiB
    #[arg(long, default_value_t = 192)]
    memory_mib: u64,
    /// How long each guest is traced at each rate
    #[arg(long, default_value = "30s")]
    length: Interval,
    /// Length of a period
    #[arg(long, default_value = "10s")]
    period: Interval,
    /// Number of pages for which one traced page stands
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64,128")]
    scales: Vec<u32>,
    /// Pages of the hot set
    #[arg(long, default_value_t = 64)]
    hot_set: u32,
    #[command(flatten)]
    output: OutputArgs,
}

fn default_workloads() -> Vec<String> {
    [
        "zipf mib=96",
        "uniform mib=64",
        "sequential mib=48",
        "zipf alpha=0.6 mib=96 write_ratio=0.5",
    ]
    .map(|workload| format!("workload={workload}"))
    .to_vec()
}

/// The result at one rate.
#[derive(Debug, Serialize)]
struct Row {
    workload: String,
    /// One page in this many was watched.
    scale: u32,
    /// Number of pages that the hot set represented.
    hidden_pages: u64,
    traps: u64,
    overhead_ratio: f64,
    lost: u64,
    /// References of the guest meanwhile, filtered ones among them.
    references: u64,
    /// Of those, the ones that reach past twice the hot set.
    reaching: u64,
    /// Over sizes from twice the hot set on; `None` if it hides all.
    mean_absolute_error: Option<f64>,
    max_absolute_error: Option<f64>,
    max_at_pages: Option<u64>,
    /// Where 5 % of the reaching references miss: traced and true.
    traced_pages: Option<u64>,
    true_pages: Option<u64>,
}

/// Runs the experiment.
///
/// # Errors
///
/// Why a guest did not come up, could not be traced, or its log is not whole.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let image = GuestImage::locate()?;
    let mut rows = Vec::new();
    for workload in &args.workload {
        let guest = GuestConfig {
            memory_mib: args.memory_mib,
            ..GuestConfig::new("truth", workload)
        };
        rows.extend(rows_of(args, &image, guest).with_context(|| format!("with {workload}"))?);
    }
    let text = match args.output.format() {
        Format::Json => serde_json::to_string_pretty(&serde_json::json!({
            "schema": SCHEMA,
            "accelerator": "tcg",
            "rows": rows,
        }))?,
        Format::Csv => csv(&rows),
        _ => table(&rows),
    };
    args.output.write(text.trim_end().as_bytes(), out)?;
    Ok(())
}

fn rows_of(args: &Args, image: &GuestImage, mut guest: GuestConfig) -> anyhow::Result<Vec<Row>> {
    let references = FullTrace::of(&mut guest)?;
    let mut subject = Subject::boot(image, &guest)?;
    // Two passes at least, so that few references are a page's first.
    std::thread::sleep(Duration::from_secs(5));
    let mut rows = Vec::new();
    for &scale in &args.scales {
        let config = TraceConfig {
            period: args.period.get(),
            budget: None,
            scale,
            rate_rule: RateRule::Fixed,
            hot_set_pages: args.hot_set,
            ..TraceConfig::default()
        };
        let before = references.now();
        let limit = args.length.get().saturating_sub(args.period.get() / 2);
        let observed = trace(
            &subject.vm,
            (TraceMethod::Traps, &config),
            (limit, None),
            &AtomicBool::new(false),
            &mut |_| (),
        )?;
        let misses = Misses {
            before,
            after: references.now(),
        };
        rows.push(row(
            &guest.workload,
            scale,
            args.hot_set,
            &observed,
            &misses,
        ));
    }
    let wrong = subject.listen()?.mismatches();
    anyhow::ensure!(wrong == 0, "{wrong} pages of the guest were wrong");
    drop(subject);
    references.end()?;
    Ok(rows)
}

fn row(
    workload: &str,
    scale: u32,
    hot_set: u32,
    observed: &crate::tracing::TracingResult,
    misses: &Misses,
) -> Row {
    let reports = || {
        observed
            .periods
            .iter()
            .map(|traced| &traced.observed.period)
    };
    let seconds: f64 = reports().map(|report| report.length.as_secs_f64()).sum();
    let overhead: f64 = reports()
        .map(|report| report.overhead_ratio * report.length.as_secs_f64())
        .sum();
    let hidden_pages = u64::from(hot_set) * u64::from(scale);
    let first = PageCount(2 * hidden_pages);
    let reaching = misses.at(first);
    let mut row = Row {
        workload: workload.trim_start_matches("workload=").to_owned(),
        scale,
        hidden_pages,
        traps: reports().map(|report| report.traps.taken).sum(),
        overhead_ratio: overhead / seconds.max(f64::MIN_POSITIVE),
        lost: reports().map(|report| report.losses.lost()).sum(),
        references: misses.references(),
        reaching,
        mean_absolute_error: None,
        max_absolute_error: None,
        max_at_pages: None,
        traced_pages: None,
        true_pages: None,
    };
    let Some(curves) = &observed.curves else {
        return row;
    };
    let traced = &curves.lru;
    let traced_reaching = traced.miss_ratio(first);
    let last = PageCount(misses.after.distinct().0 + hidden_pages);
    if reaching == 0 || traced_reaching <= 0.0 || last <= first {
        return row;
    }
    let (mut sum, mut count) = (0.0, 0_u32);
    for size in even_sizes(first, last) {
        let truth = misses.at(size) as f64 / reaching as f64;
        let found = traced.miss_ratio(size) / traced_reaching;
        let error = (found - truth).abs();
        sum += error;
        count += 1;
        if row.max_absolute_error.is_none_or(|most| error > most) {
            row.max_absolute_error = Some(error);
            row.max_at_pages = Some(size.0);
        }
        if truth <= 0.05 {
            row.true_pages.get_or_insert(size.0);
        }
        if found <= 0.05 {
            row.traced_pages.get_or_insert(size.0);
        }
    }
    row.mean_absolute_error = Some(sum / f64::from(count));
    row
}

fn csv(rows: &[Row]) -> String {
    let mut text = String::from(
        "workload,scale,hidden_pages,traps,overhead_ratio,lost,references,reaching,\
         mean_absolute_error,max_absolute_error,max_at_pages,traced_pages,true_pages\n",
    );
    let or_none = |value: Option<String>| value.unwrap_or_default();
    for row in rows {
        text.push_str(&format!(
            "{},{},{},{},{:.6},{},{},{},{},{},{},{},{}\n",
            row.workload,
            row.scale,
            row.hidden_pages,
            row.traps,
            row.overhead_ratio,
            row.lost,
            row.references,
            row.reaching,
            or_none(row.mean_absolute_error.map(|error| format!("{error:.6}"))),
            or_none(row.max_absolute_error.map(|error| format!("{error:.6}"))),
            or_none(row.max_at_pages.map(|pages| pages.to_string())),
            or_none(row.traced_pages.map(|pages| pages.to_string())),
            or_none(row.true_pages.map(|pages| pages.to_string())),
        ));
    }
    text
}

fn table(rows: &[Row]) -> String {
    let size = |pages: u64| ByteSize(PageCount(pages).to_bytes(PageSize::FOUR_KIB)).rounded();
    let mut text = String::from(
        "TracedPeriod curves against the full reference trace of the same time, guests under TCG.\n\
         Errors: of the share of references that miss, of those that reach past twice the hot set.\n",
    );
    let mut workload = None;
    for row in rows {
        if workload != Some(&row.workload) {
            workload = Some(&row.workload);
            text.push_str(&format!(
                "\n{}\n   rate     hides     traps  overhead  lost    reaching  mean error  worst error        at  5 %: traced       true\n",
                row.workload
            ));
        }
        let percent = |error: Option<f64>| {
            error.map_or_else(|| "hidden".to_owned(), |error| format!("{error:.4}"))
        };
        let pages = |pages: Option<u64>| pages.map_or_else(|| "-".to_owned(), size);
        text.push_str(&format!(
            "{:>7}  {:>8}  {:>8}  {:>6.1} %  {:>4}  {:>10}  {:>10}  {:>11}  {:>8}  {:>11}  {:>9}\n",
            format!("1/{}", row.scale),
            size(row.hidden_pages),
            row.traps,
            row.overhead_ratio * 100.0,
            row.lost,
            row.reaching,
            percent(row.mean_absolute_error),
            percent(row.max_absolute_error),
            pages(row.max_at_pages),
            pages(row.traced_pages),
            pages(row.true_pages),
        ));
    }
    text
}
