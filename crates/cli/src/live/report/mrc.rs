//! `plimsoll report mrc`: curves.

use std::io::Write;

use anyhow::ensure;

use super::super::daemon::curve_of;
use super::super::show;
use super::super::subject::Subject;
use super::super::words::{name, size};
use super::VmArgs;
use plimsoll_output::{Format, OutputArgs, csv_table, grouped, printable};
use plimsoll_plot::{Axis, Chart, Marker, Series, Unit, encode};

/// Miss-ratio curves: the share of references that miss at every size, with its band.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    of: VmArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let daemon = args.of.daemon()?;
    let keys = args.of.keys_with_groups(&daemon)?;
    let views: anyhow::Result<Vec<_>> = keys
        .iter()
        .map(|key| daemon.ask_by(key, Subject::ask))
        .collect();
    let views = views?;
    let content = match args.output.format() {
        Format::Table => text(&views)?.into_bytes(),
        Format::Csv => lines(&views)?.into_bytes(),
        Format::Json => {
            let curves = views.iter().filter_map(Subject::curve);
            let lines: Result<Vec<_>, _> = curves.map(serde_json::to_string).collect();
            lines?
                .join("\n")
                .into_bytes()
                .into_iter()
                .chain(*b"\n")
                .collect()
        }
        picture @ (Format::Svg | Format::Png) => encode(chart(&views)?.to_svg(), picture)?,
    };
    args.output.write(&content, out)
}

fn text(views: &[Subject]) -> anyhow::Result<String> {
    let mut text = String::new();
    for view in views {
        if !text.is_empty() {
            text.push('\n');
        }
        let vm = printable(view.name());
        match view.curve() {
            None => text.push_str(&format!("{vm}: its curve is not available yet\n")),
            Some(json) => {
                let references = grouped(json.references as f64);
                text.push_str(&format!("{vm}: {references} references\n"));
                text.push_str(&show::plot(&view.sizes(), &curve_of(json)?));
            }
        }
    }
    Ok(text)
}

fn lines(views: &[Subject]) -> anyhow::Result<String> {
    let mut rows = Vec::new();
    for view in views {
        let Some(json) = view.curve() else { continue };
        let curve = curve_of(json)?;
        let page_bytes = curve.page_size.bytes();
        let points = curve.misses.points().iter();
        rows.extend(points.map(|&point| (view.name(), page_bytes, point)));
    }
    Ok(csv_table!(rows, |(vm, page_bytes, point)| {
        "vm": printable(vm),
        "page_bytes": page_bytes,
        "size_pages": point.size.0,
        "miss_ratio": point.miss_ratio,
        "low": point.low,
        "high": point.high,
        "misses_per_second": point.misses.map(|misses| misses.expected),
        "misses_low_per_second": point.misses.map(|misses| misses.low),
        "misses_high_per_second": point.misses.map(|misses| misses.high),
    }))
}

fn chart(views: &[Subject]) -> anyhow::Result<Chart> {
    let mut series = Vec::new();
    let mut until_bytes = 0;
    let mut known = Vec::new();
    for view in views {
        let Some(json) = view.curve() else { continue };
        let curve = curve_of(json)?;
        until_bytes = until_bytes.max(view.sizes().until(&curve));
        known.push((view, curve));
    }
    ensure!(!known.is_empty(), "no curve is known yet");
    // Room for the last step.
    let until_bytes = until_bytes.saturating_add(until_bytes / 25);
    for (view, curve) in &known {
        let name = name(view.name());
        series.push(Series::of_curve(
            name,
            &curve.misses,
            curve.page_size,
            until_bytes,
        ));
    }
    let references: f64 = known
        .iter()
        .map(|(_, curve)| curve.misses.references() as f64)
        .sum();
    let (title, markers) = match &known[..] {
        [(view, _)] => {
            let markers = view.sizes().marks.into_iter().map(|(bytes, names)| Marker {
                x: bytes as f64,
                label: format!("{names} {}", size(bytes)),
            });
            (
                format!("Miss-ratio curve of {}", name(view.name())),
                markers.collect(),
            )
        }
        all => (format!("{} miss-ratio curves", all.len()), Vec::new()),
    };
    Ok(Chart {
        title,
        subtitle: format!("Live, with its band · {} references", grouped(references)),
        x: Axis::new("Memory", Unit::Bytes).up_to(until_bytes as f64),
        y: Axis::new("Miss ratio", Unit::Share).up_to(1.0),
        shades: Vec::new(),
        series,
        markers,
    })
}
