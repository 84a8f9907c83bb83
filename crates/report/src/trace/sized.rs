//! Curves of objects over bytes, by requests and by requested bytes.

use std::fmt::Write as _;

use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, PageSize};
use plimsoll_output::{csv_table, grouped, json_line, labelled};
use plimsoll_plot::{Chart, Figure, Series};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::size::ByteSize;
use serde::Serialize;

use super::{counted, working_set};

/// Sizes of these curves are bytes.
fn byte() -> PageSize {
    PageSize::new(1).expect("a power of two")
}

/// Both curves at the same sizes.
#[derive(Debug)]
pub struct SizedReport {
    /// Name of the trace.
    pub name: String,
    /// The estimator with its settings.
    pub method: String,
    /// References in the trace.
    pub references: u64,
    /// Of which sampled.
    pub sampled: u64,
    /// Bytes of all objects.
    pub footprint_bytes: u64,
    /// By requests; of the whole curve, not of the points selected.
    pub working_set: Option<PageCount>,
    /// The largest size of the whole curve by requests.
    pub end: Option<CurvePoint>,
    /// Share of the requests.
    pub by_requests: MissRatioCurve,
    /// Share of the requested bytes.
    pub by_bytes: MissRatioCurve,
}

impl SizedReport {
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
}

impl Figure for SizedReport {
    fn table(&self) -> anyhow::Result<String> {
        let bytes = |size: PageCount| ByteSize(size.0).rounded();
        let misses = "of the requests miss";
        let working_set = working_set(self.working_set, self.end.as_ref(), bytes, misses);
        let (references, sampled) = counted(self.references, self.sampled);
        let mut table = labelled(
            12,
            [
                ("trace", self.name.clone()),
                ("estimator", self.method.clone()),
                ("references", references + &sampled),
                ("objects", ByteSize(self.footprint_bytes).rounded()),
                ("working set", working_set),
            ],
        );
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(
            table,
            "\n{:>15}  {:>11}  {:>18}  {:>18}",
            "size (bytes)", "size", "misses by requests", "misses by bytes",
        );
        for row in self.rows() {
            let _ = writeln!(
                table,
                "{:>15}  {:>11}  {:>16.2} %  {:>16.2} %",
                grouped(row.size_bytes as f64),
                ByteSize(row.size_bytes).rounded(),
                row.miss_ratio * 100.0,
                row.byte_miss_ratio * 100.0
            );
        }
        Ok(table.replace('\u{a0}', " "))
    }

    fn csv(&self) -> anyhow::Result<String> {
        Ok(csv_table!(self.rows(), |row| {
            "size_bytes": row.size_bytes,
            "miss_ratio": row.miss_ratio,
            "low": row.low,
            "high": row.high,
            "byte_miss_ratio": row.byte_miss_ratio,
            "byte_low": row.byte_low,
            "byte_high": row.byte_high,
        }))
    }

    fn json(&self) -> anyhow::Result<String> {
        let document = Document {
            schema: SCHEMA,
            trace: &self.name,
            references: self.references,
            sampled_references: self.sampled,
            footprint_bytes: self.footprint_bytes,
            points: self.rows().collect(),
        };
        json_line(&document)
    }

    fn svg(&self) -> anyhow::Result<String> {
        let last = self.by_requests.points().last();
        let last = last.map_or(0, |point| point.size.0);
        let until = Chart::end_beyond(last);
        let series = [
            ("by requests", &self.by_requests),
            ("by bytes", &self.by_bytes),
        ];
        let series = series.map(|(name, curve)| Series::of_curve(name, curve, byte(), until));
        let (references, sampled) = counted(self.references, self.sampled);
        let title = format!("Miss-ratio curves of the objects of {}", self.name);
        let subtitle = format!("{} · {references} references{sampled}", self.method);
        Ok(Chart::of_miss_ratios(title, subtitle, "Cache size", until, series).to_svg())
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
