//! Miss ratios of eviction policies at chosen sizes, simulated on a sample of the pages.
//!
//! Such ratios are not a curve of steps: between two sizes nothing is known, and with a larger cache a policy may miss more.
//! They are therefore shown as points, in a form of their own.

use std::fmt::Write as _;

use plimsoll_estimator::simulation::SimulatedPoint;
use plimsoll_flow::{PageCount, PageSize};
use plimsoll_output::{csv_table, grouped, json_line, labelled};
use plimsoll_plot::{Chart, Figure, Series, SeriesStyle};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::size::ByteSize;
use serde::Serialize;

/// The points of all policies.
#[derive(Debug)]
pub struct SimulationReport {
    /// Name of the trace.
    pub name: String,
    /// Rate of the sample.
    pub rate: f64,
    /// References in the trace.
    pub references: u64,
    /// Of which sampled.
    pub sampled: u64,
    /// Distinct pages.
    pub footprint: PageCount,
    /// Bytes in a page.
    pub page_size: PageSize,
    /// The simulated sizes.
    pub sizes: Vec<PageCount>,
    /// Each policy with its ratio at each size.
    pub policies: Vec<(&'static str, Vec<SimulatedPoint>)>,
}

impl SimulationReport {
    fn bytes(&self, pages: PageCount) -> ByteSize {
        ByteSize(pages.to_bytes(self.page_size))
    }

    fn method(&self) -> String {
        match self.rate {
            1.0 => "every reference".to_owned(),
            rate => format!(
                "{} of the references, to a share {rate} of the pages; corrected by exact LRU",
                grouped(self.sampled as f64)
            ),
        }
    }
}

impl Figure for SimulationReport {
    fn table(&self) -> anyhow::Result<String> {
        let pages = format!(
            "{} to {} pages",
            grouped(self.references as f64),
            grouped(self.footprint.0 as f64)
        );
        let mut table = labelled(
            12,
            [
                ("trace", self.name.clone()),
                ("simulated", self.method()),
                ("references", pages),
                ("page", self.bytes(PageCount(1)).rounded()),
            ],
        );
        // Writing to a string cannot fail, here and below.
        let _ = write!(table, "\n{:>14}  {:>11}", "size (pages)", "size");
        for (name, _) in &self.policies {
            let _ = write!(table, "  {name:>10}");
        }
        table.push('\n');
        for (row, &size) in self.sizes.iter().enumerate() {
            let (pages, bytes) = (grouped(size.0 as f64), self.bytes(size).rounded());
            let _ = write!(table, "{pages:>14}  {bytes:>11}");
            for (_, points) in &self.policies {
                let _ = write!(table, "  {:>8.2} %", points[row].miss_ratio * 100.0);
            }
            table.push('\n');
        }
        Ok(table.replace('\u{a0}', " "))
    }

    fn csv(&self) -> anyhow::Result<String> {
        let policies = self.policies.iter();
        let rows =
            policies.flat_map(|(name, points)| points.iter().map(move |point| (name, point)));
        Ok(csv_table!(rows, |(name, point)| {
            "policy": name,
            "size_pages": point.size.0,
            "miss_ratio": point.miss_ratio,
        }))
    }

    fn json(&self) -> anyhow::Result<String> {
        let policies = self.policies.iter().map(|(policy, points)| PolicyJson {
            policy,
            points: points
                .iter()
                .map(|point| PointJson {
                    size_pages: point.size.0,
                    miss_ratio: point.miss_ratio,
                })
                .collect(),
        });
        let document = Document {
            schema: SCHEMA,
            trace: &self.name,
            page_bytes: self.page_size.bytes(),
            rate: self.rate,
            references: self.references,
            sampled_references: self.sampled,
            footprint_pages: self.footprint.0,
            policies: policies.collect(),
        };
        json_line(&document)
    }

    fn svg(&self) -> anyhow::Result<String> {
        let series = self.policies.iter().map(|(name, points)| {
            let points = points.iter().map(|point| {
                let bytes = self.bytes(point.size).0;
                (bytes as f64, point.miss_ratio)
            });
            Series::new(*name, SeriesStyle::Line, points)
        });
        let last = self.sizes.last().map_or(0, |&size| self.bytes(size).0);
        let title = format!("Miss ratios of {} by eviction policy", self.name);
        Ok(Chart::of_miss_ratios(title, self.method(), "Cache size", last, series).to_svg())
    }
}

/// The points as JSON.
#[derive(Debug, Serialize)]
struct Document<'a> {
    schema: u32,
    trace: &'a str,
    page_bytes: u64,
    rate: f64,
    references: u64,
    sampled_references: u64,
    footprint_pages: u64,
    policies: Vec<PolicyJson<'a>>,
}

#[derive(Debug, Serialize)]
struct PolicyJson<'a> {
    policy: &'a str,
    points: Vec<PointJson>,
}

#[derive(Debug, Serialize)]
struct PointJson {
    size_pages: u64,
    miss_ratio: f64,
}
