//! `mrc --object-sizes`: curves of objects over bytes, by requests and by requested bytes.

use std::fmt::Write as _;
use std::io::Write;

use anyhow::Context as _;
use plimsoll_estimator::SizedCurves;
use plimsoll_flow::{MissRatioCurve, PageCount, PageSize, WorkingSet};
use plimsoll_output::{Format, csv_table, grouped};
use plimsoll_plot::{Axis, Chart, Series, Unit, encode};
use plimsoll_protocol::size::ByteSize;
use plimsoll_source::Options;
use serde::Serialize;

use super::choice::EstimatorArgs;
use super::input::{read, unsampled};
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;

/// Reads the trace with its objects' sizes and prints both curves.
pub(super) fn run(
    trace: &TraceArgs,
    estimator: &EstimatorArgs,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut built = estimator.build_sized()?;
    let lru = &mut built.estimator;
    let mut source = trace.open_with(&Options {
        sizes: true,
        ..trace.options()
    })?;
    let references = read(&mut source, |batch| {
        lru.observe(batch.pages(), &batch.details().sizes_bytes);
    })?;
    let curves = lru.curves().map_err(|error| unsampled(error, references));
    let SizedCurves {
        by_requests,
        by_bytes,
    } = curves.with_context(|| format!("no curve of '{}'", trace.label()))?;
    let working_set = by_requests.size_for(WorkingSet::MISS_RATIO);
    let byte = byte();
    let by_requests = view.select(&by_requests, byte)?;
    let sizes: Vec<_> = by_requests
        .points()
        .iter()
        .map(|point| point.size)
        .collect();
    let report = Report {
        name: trace.stem(),
        method: built.label,
        references,
        sampled: lru.sampled_references(),
        footprint_bytes: lru.footprint_bytes(),
        working_set,
        by_bytes: by_bytes.at_sizes(&sizes)?,
        by_requests,
    };
    let content = match view.output.format() {
        Format::Table => report.to_table().into_bytes(),
        Format::Csv => report.to_csv().into_bytes(),
        Format::Json => report.to_json()?.into_bytes(),
        picture => encode(report.to_chart().to_svg(), picture)?,
    };
    view.output.write(&content, out)
}

/// Sizes of these curves are bytes.
fn byte() -> PageSize {
    PageSize::new(1).expect("a power of two")
}

/// Both curves at the same sizes.
struct Report {
    name: String,
    method: String,
    references: u64,
    sampled: u64,
    footprint_bytes: u64,
    working_set: Option<PageCount>,
    by_requests: MissRatioCurve,
    by_bytes: MissRatioCurve,
}

impl Report {
    fn rows(&self) -> impl Iterator<Item = PointJson> {
        let points = self.by_requests.points().iter();
        points
            .zip(self.by_bytes.points())
            .map(|(requests, bytes)| PointJson {
                size_bytes: requests.size.0,
                miss_ratio: requests.miss_ratio,
                low: requests.low,
                high: requests.high,
                byte_miss_ratio: bytes.miss_ratio,
                byte_low: bytes.low,
                byte_high: bytes.high,
            })
    }

    fn sampled(&self) -> String {
        match self.sampled {
            sampled if sampled == self.references => String::new(),
            sampled => format!(", of which {} sampled", grouped(sampled as f64)),
        }
    }

    fn to_table(&self) -> String {
        let working_set = match self.working_set {
            Some(size) => format!("{} (5 % of the requests miss)", ByteSize(size.0).rounded()),
            None => "none: more than 5 % miss at every size".to_owned(),
        };
        let mut table = format!(
            "{:<12}{}\n{:<12}{}\n{:<12}{}{}\n{:<12}{}\n{:<12}{working_set}\n\n{:>15}  {:>11}  {:>18}  {:>18}\n",
            "trace",
            self.name,
            "estimator",
            self.method,
            "references",
            grouped(self.references as f64),
            self.sampled(),
            "objects",
            ByteSize(self.footprint_bytes).rounded(),
            "working set",
            "size (bytes)",
            "size",
            "misses by requests",
            "misses by bytes",
        );
        for row in self.rows() {
            // Writing to a string cannot fail.
            let _ = writeln!(
                table,
                "{:>15}  {:>11}  {:>16.2} %  {:>16.2} %",
                grouped(row.size_bytes as f64),
                ByteSize(row.size_bytes).rounded(),
                row.miss_ratio * 100.0,
                row.byte_miss_ratio * 100.0
            );
        }
        table.replace('\u{a0}', " ")
    }

    fn to_csv(&self) -> String {
        csv_table!(self.rows(), |row| {
            "size_bytes": row.size_bytes,
            "miss_ratio": row.miss_ratio,
            "low": row.low,
            "high": row.high,
            "byte_miss_ratio": row.byte_miss_ratio,
            "byte_low": row.byte_low,
            "byte_high": row.byte_high,
        })
    }

    fn to_json(&self) -> anyhow::Result<String> {
        let document = Document {
            schema: 1,
            trace: &self.name,
            references: self.references,
            sampled_references: self.sampled,
            footprint_bytes: self.footprint_bytes,
            points: self.rows().collect(),
        };
        Ok(serde_json::to_string(&document)? + "\n")
    }

    fn to_chart(&self) -> Chart {
        let last = self.by_requests.points().last();
        let last = last.map_or(0, |point| point.size.0);
        let until = last.saturating_add(last / 25).saturating_add(1);
        let series = [
            ("by requests", &self.by_requests),
            ("by bytes", &self.by_bytes),
        ];
        let series = series.map(|(name, curve)| Series::of_curve(name, curve, byte(), until));
        Chart {
            title: format!("Miss-ratio curves of the objects of {}", self.name),
            subtitle: format!(
                "{} · {} references{}",
                self.method,
                grouped(self.references as f64),
                self.sampled()
            ),
            x: Axis::new("Cache size", Unit::Bytes).up_to(until as f64),
            y: Axis::new("Miss ratio", Unit::Share).up_to(1.0),
            shades: Vec::new(),
            series: series.into(),
            markers: Vec::new(),
        }
    }
}

/// Both curves as JSON.
#[derive(Debug, Serialize)]
struct Document<'a> {
    schema: u32,
    trace: &'a str,
    references: u64,
    sampled_references: u64,
    footprint_bytes: u64,
    points: Vec<PointJson>,
}

/// A size, with the ratios by requests and by bytes and the limits of their bands.
#[derive(Debug, Serialize)]
struct PointJson {
    size_bytes: u64,
    miss_ratio: f64,
    low: f64,
    high: f64,
    byte_miss_ratio: f64,
    byte_low: f64,
    byte_high: f64,
}
