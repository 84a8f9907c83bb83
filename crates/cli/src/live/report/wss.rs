//! `plimsoll report wss`: working sets over time, or one VM's by every way there is.

use std::io::Write;

use anyhow::ensure;
use plimsoll_protocol::vm::{HistoryView, Sample};

use super::super::subject::Subject;
use super::super::words::{known, local_time, maybe_size, name, percent, ratio, size};
use super::{VmArgs, compare};
use plimsoll_output::{Format, OutputArgs, csv_table, printable, table};
use plimsoll_plot::{Axis, Chart, Series, SeriesStyle, Unit, encode};
use plimsoll_protocol::size::Interval;

/// Default number of points in tables, and in other outputs.
const TABLE_POINTS: u16 = 24;
const POINTS: u16 = 500;

/// Working sets over time, with sizes and misses; or, with --compare, one VM's by every available estimator.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    of: VmArgs,
    /// Period covered
    #[arg(long, value_name = "TIME", default_value = "1h")]
    since: Interval,
    /// Maximum number of points in time per VM, at most 2000 [default: 24 in a table, else 500]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=2000))]
    points: Option<u16>,
    /// Measure the running VM now by every available estimator, without the daemon: results, costs and times
    #[arg(long, requires = "vm", conflicts_with_all = ["since", "points"])]
    compare: bool,
    #[command(flatten)]
    how: compare::ComparisonArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let format = args.output.format();
    if let (true, Some(vm)) = (args.compare, &args.of.vm) {
        return compare::run(vm, &args.how, &args.of.socket, &args.output, out);
    }
    let daemon = args.of.daemon()?;
    let now_unix_ms = daemon.host()?.now_unix_ms;
    let since_ms = u64::try_from(args.since.get().as_millis()).unwrap_or(u64::MAX);
    let since_unix_ms = now_unix_ms.saturating_sub(since_ms);
    let points = args.points.unwrap_or(match format {
        Format::Table => TABLE_POINTS,
        _ => POINTS,
    });
    let mut histories = Vec::new();
    for key in args.of.keys_with_groups(&daemon)? {
        histories.push(daemon.ask_by(&key, |client, key| {
            Subject::ask_history(client, key, since_unix_ms, points.into())
        })?);
    }
    let content = match format {
        Format::Table => text(&histories).into_bytes(),
        Format::Csv => lines(&histories).into_bytes(),
        Format::Json => {
            let lines: Result<Vec<_>, _> = histories.iter().map(serde_json::to_string).collect();
            (lines?.join("\n") + "\n").into_bytes()
        }
        picture @ (Format::Svg | Format::Png) => encode(chart(&histories)?.to_svg(), picture)?,
    };
    args.output.write(&content, out)
}

fn text(histories: &[HistoryView]) -> String {
    let mut text = String::new();
    for history in histories {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&printable(&history.vm));
        text.push('\n');
        text.push_str(&table!(&history.samples, |sample| {
            Left "time": local_time(sample.unix_ms),
            Right "uses": maybe_size(sample.working_set_bytes),
            Right "size": size(had(sample)),
            Right "own": size(sample.direct_bytes),
            Right "cache": size(sample.cache_bytes),
            Right "target": sample.target_bytes.map(size),
            Right "x baseline": known(sample.relative, ratio),
            Right "misses/s": known(sample.misses_per_second, |rate| format!("{rate:.1}")),
            Right "overhead": known(sample.overhead_ratio, percent),
            Right "lost": sample.lost,
        }));
    }
    text
}

fn had(sample: &Sample) -> u64 {
    sample.direct_bytes.saturating_add(sample.cache_bytes)
}

fn lines(histories: &[HistoryView]) -> String {
    let rows = histories.iter().flat_map(|history| {
        let samples = history.samples.iter();
        samples.map(|sample| (&*history.vm, sample))
    });
    csv_table!(rows, |(vm, at)| {
        "vm": printable(vm),
        "unix_ms": at.unix_ms,
        "working_set_bytes": at.working_set_bytes,
        "direct_bytes": at.direct_bytes,
        "cache_bytes": at.cache_bytes,
        "target_bytes": at.target_bytes,
        "relative": at.relative,
        "misses_per_second": at.misses_per_second,
        "overhead_ratio": at.overhead_ratio,
        "lost": at.lost,
    })
}

fn chart(histories: &[HistoryView]) -> anyhow::Result<Chart> {
    let moments = || histories.iter().flat_map(|history| &history.samples);
    let first = moments().map(|sample| sample.unix_ms).min();
    ensure!(first.is_some(), "nothing was recorded in that time");
    let first = first.unwrap_or(0);
    let over_time = |name: String, look, history: &HistoryView, of: fn(&Sample) -> Option<u64>| {
        let points = history.samples.iter().filter_map(|sample| {
            let seconds = sample.unix_ms.saturating_sub(first) as f64 / 1000.0;
            of(sample).map(|bytes| (seconds, bytes as f64))
        });
        Series::new(name, look, points)
    };
    let mut series = Vec::new();
    for history in histories {
        let (label, alone) = match histories {
            [_] => ("working set".to_owned(), true),
            _ => (name(&history.vm), false),
        };
        let used = |sample: &Sample| sample.working_set_bytes;
        series.push(over_time(label, SeriesStyle::Line, history, used));
        if alone {
            let has = |sample: &Sample| Some(had(sample));
            let of = history;
            series.push(over_time("size".to_owned(), SeriesStyle::Steps, of, has));
            let cache = |sample: &Sample| (sample.cache_bytes > 0).then_some(sample.cache_bytes);
            series.push(over_time(
                "of it cache".to_owned(),
                SeriesStyle::Steps,
                of,
                cache,
            ));
        }
    }
    series.retain(|series| !series.points.is_empty());
    Ok(Chart {
        title: match histories {
            [history] => format!("Working set of {}", name(&history.vm)),
            all => format!("{} working sets", all.len()),
        },
        subtitle: format!("From {} on", local_time(first)),
        x: Axis::new("Time", Unit::Seconds),
        y: Axis::new("Memory", Unit::Bytes),
        shades: Vec::new(),
        series,
        markers: Vec::new(),
    })
}
