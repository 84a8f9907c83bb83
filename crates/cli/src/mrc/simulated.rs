//! `mrc --cache-policy`: miss ratios of eviction policies at chosen sizes, simulated on a sample of the pages.
//!
//! Such ratios are not a curve of steps: between two sizes nothing is known, and with a larger cache a policy may miss more.
//! They are therefore printed as points, in a form of their own.

use std::fmt::Write as _;
use std::io::Write;

use anyhow::Context as _;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use plimsoll_estimator::simulation::{
    CACHE_POLICIES, CachePolicyRow, MiniSim, SimulatedPoint, cache_policy,
};
use plimsoll_flow::{PageCount, PageSize};
use plimsoll_output::exit::UsageError;
use plimsoll_output::{Format, csv_table, grouped};
use plimsoll_plot::{Axis, Chart, Series, SeriesStyle, Unit, encode};
use plimsoll_protocol::size::ByteSize;
use serde::Serialize;

use super::choice::EstimatorArgs;
use super::input::{read, unsampled};
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;

/// Rate of the sample, if none is given.
const RATE: f64 = 0.1;
/// Sizes in a table, and elsewhere, if none are given.
const SIZES_OF_TABLE: usize = 20;
const SIZES: usize = 100;

/// Which policies are simulated. Flatten it into a verb's `Args`.
#[derive(Debug, clap::Args)]
pub struct SimulationArgs {
    /// Simulate these eviction policies on a sample of the pages (--rate, default 0.1; 1 simulates every reference)
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "POLICIES",
        value_parser = policy_parser(),
        conflicts_with_all = ["by", "every", "compare", "stream", "window", "estimator"]
    )]
    cache_policy: Vec<&'static CachePolicyRow>,
}

fn policy_parser() -> impl TypedValueParser<Value = &'static CachePolicyRow> {
    let names = CACHE_POLICIES.map(|row| PossibleValue::new(row.name).help(row.help));
    PossibleValuesParser::new(names).try_map(|name| cache_policy(&name).ok_or("no such policy"))
}

impl SimulationArgs {
    /// Whether any policy is simulated.
    pub(super) fn is_given(&self) -> bool {
        !self.cache_policy.is_empty()
    }
}

/// Reads the trace and prints the policies' ratios.
pub(super) fn run(
    args: &SimulationArgs,
    trace: &TraceArgs,
    estimator: &EstimatorArgs,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let (rate, seed) = estimator.sample(RATE)?;
    let mut simulation = MiniSim::new(rate, seed).map_err(|error| UsageError(error.to_string()))?;
    let mut source = trace.open()?;
    let references = read(&mut source, |batch| simulation.observe(batch.pages()))?;
    let sizes = match &*view.sizes(trace.page_bytes)? {
        [] => even_sizes(simulation.footprint(), view),
        sizes => sizes.to_vec(),
    };
    let mut policies = Vec::new();
    for row in &args.cache_policy {
        let points = simulation.points(row, &sizes);
        let points = points.map_err(|error| unsampled(error, references));
        let points = points.with_context(|| format!("no ratios of '{}'", trace.label()))?;
        policies.push((row.name, points));
    }
    let resolved = simulation.resolved_from();
    let unresolved = sizes.iter().filter(|&&size| size < resolved).count();
    if unresolved > 0 {
        eprintln!(
            "plimsoll: {unresolved} of {} sizes are below {resolved} pages, where the sample is too small to distinguish policies from LRU; \
             for them give a higher --rate, at most 1",
            sizes.len()
        );
    }
    let report = Report {
        name: trace.stem(),
        rate,
        references,
        sampled: simulation.sampled(),
        footprint: simulation.footprint(),
        page_size: trace.page_bytes,
        sizes,
        policies,
    };
    let content = match view.output.format() {
        Format::Table => report.to_table().into_bytes(),
        Format::Csv => report.to_csv().into_bytes(),
        Format::Json => report.to_json()?.into_bytes(),
        picture => encode(report.to_chart().to_svg(), picture)?,
    };
    view.output.write(&content, out)
}

/// Even sizes up to the footprint.
fn even_sizes(footprint: PageCount, view: &ViewArgs) -> Vec<PageCount> {
    let default = match view.output.format() {
        Format::Table => SIZES_OF_TABLE,
        _ => SIZES,
    };
    // More sizes than pages would be the same again.
    let steps = (view.points_or(default) as u64).min(footprint.0.max(1));
    let size = |step| u128::from(footprint.0) * u128::from(step) / u128::from(steps);
    let sizes = (1..=steps).map(|step| PageCount(u64::try_from(size(step)).unwrap_or(u64::MAX)));
    let mut sizes: Vec<_> = sizes.filter(|size| size.0 > 0).collect();
    sizes.dedup();
    sizes
}

/// The points of all policies.
struct Report {
    name: String,
    rate: f64,
    references: u64,
    sampled: u64,
    footprint: PageCount,
    page_size: PageSize,
    sizes: Vec<PageCount>,
    policies: Vec<(&'static str, Vec<SimulatedPoint>)>,
}

impl Report {
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

    fn to_table(&self) -> String {
        let mut table = format!(
            "{:<12}{}\n{:<12}{}\n{:<12}{} to {} pages\n{:<12}{}\n\n{:>14}  {:>11}",
            "trace",
            self.name,
            "simulated",
            self.method(),
            "references",
            grouped(self.references as f64),
            grouped(self.footprint.0 as f64),
            "page",
            self.bytes(PageCount(1)).rounded(),
            "size (pages)",
            "size"
        );
        // Writing to a string cannot fail, here and below.
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
        table.replace('\u{a0}', " ")
    }

    fn to_csv(&self) -> String {
        let policies = self.policies.iter();
        let rows =
            policies.flat_map(|(name, points)| points.iter().map(move |point| (name, point)));
        csv_table!(rows, |(name, point)| {
            "policy": name,
            "size_pages": point.size.0,
            "miss_ratio": point.miss_ratio,
        })
    }

    fn to_json(&self) -> anyhow::Result<String> {
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
            schema: 1,
            trace: &self.name,
            page_bytes: self.page_size.bytes(),
            rate: self.rate,
            references: self.references,
            sampled_references: self.sampled,
            footprint_pages: self.footprint.0,
            policies: policies.collect(),
        };
        Ok(serde_json::to_string(&document)? + "\n")
    }

    fn to_chart(&self) -> Chart {
        let series = self.policies.iter().map(|(name, points)| {
            let points = points.iter().map(|point| {
                let bytes = self.bytes(point.size).0;
                (bytes as f64, point.miss_ratio)
            });
            Series::new(*name, SeriesStyle::Line, points)
        });
        let last = self.sizes.last().map_or(0, |&size| self.bytes(size).0);
        Chart {
            title: format!("Miss ratios of {} by eviction policy", self.name),
            subtitle: self.method(),
            x: Axis::new("Cache size", Unit::Bytes).up_to(last as f64),
            y: Axis::new("Miss ratio", Unit::Share).up_to(1.0),
            shades: Vec::new(),
            series: series.collect(),
            markers: Vec::new(),
        }
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
