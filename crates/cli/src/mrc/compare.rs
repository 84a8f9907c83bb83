//! Compares estimators with the exact curve: error, speed and memory.
//!
//! The trace is read once. Each batch goes to every estimator in turn, and each is timed on its
//! own by the CPU time of the process (so threads count in full), curve included. Errors are taken at up to 1000 even sizes up
//! to the footprint; the largest error forgives sizes that are off by 1 %, or every
//! estimator that puts a loop's cliff one page beside its place would be wrong by the cliff's height.

use std::fmt::Write as _;
use std::io::Write;

use plimsoll_estimator::registry::BuiltEstimator;
use plimsoll_estimator::{Estimator, ExactLru};
use plimsoll_flow::{CurveError, MissRatioCurve, PageCount, PageSize};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::input::{curve_of, read};
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;
use plimsoll_output::{Format, csv_table, grouped, table};
use plimsoll_plot::{Axis, Chart, Point, Series, SeriesStyle, Unit, encode};
use plimsoll_protocol::size::ByteSize;

/// Sizes at which curves are compared.
const SIZES: u64 = 1000;
/// How far off a size may be without counting into the largest error.
const SLACK: f64 = 0.01;

/// An estimator with its curve, time and memory.
struct Entry {
    built: BuiltEstimator,
    cpu_seconds: f64,
    peak_bytes: usize,
    curve: Option<MissRatioCurve>,
}

impl Entry {
    fn new(built: BuiltEstimator) -> Self {
        Self {
            built,
            cpu_seconds: 0.0,
            peak_bytes: 0,
            curve: None,
        }
    }

    /// Runs the estimator and adds its CPU time.
    fn timed<T>(&mut self, work: impl FnOnce(&mut dyn Estimator) -> T) -> T {
        let start = cpu_seconds();
        let result = work(&mut *self.built.estimator);
        self.cpu_seconds += cpu_seconds() - start;
        self.peak_bytes = self.peak_bytes.max(self.built.estimator.memory_bytes());
        result
    }
}

/// CPU time of the process so far.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// A line of the table.
#[derive(Debug, Serialize)]
struct Row {
    estimator: String,
    /// Mean absolute error, 0.0 to 1.0; none without a curve.
    mean_absolute_error: Option<f64>,
    /// Largest error outside 1 % of a size.
    max_error: Option<f64>,
    /// How far the steepest cliff stands from its place, as a share of its size; none without a cliff.
    cliff_position_error: Option<f64>,
    /// Share of the sizes whose true ratio lies in the band; none if there is no band.
    band_coverage: Option<f64>,
    references_per_second: f64,
    peak_memory_bytes: usize,
}

/// The comparison as JSON.
#[derive(Debug, Serialize)]
struct Document<'a> {
    schema: u32,
    trace: &'a str,
    references: u64,
    footprint_pages: u64,
    estimators: &'a [Row],
}

/// Reads the trace into all of them and gives one table.
pub(super) fn run(
    trace: &TraceArgs,
    estimators: Vec<BuiltEstimator>,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    view.check_compared()?;
    let mut truth = ExactLru::new();
    let mut entries: Vec<_> = estimators.into_iter().map(Entry::new).collect();
    let mut source = trace.open()?;
    let references = read(&mut source, |batch| {
        truth.observe(batch.pages());
        for entry in &mut entries {
            entry.timed(|estimator| estimator.observe(batch.pages()));
        }
    })?;
    let exact = curve_of(trace, &mut truth, references)?;
    for entry in &mut entries {
        entry.curve = match entry.timed(|estimator| estimator.curve()) {
            Ok(curve) => Some(curve),
            // Nothing was sampled, which the line shows.
            Err(CurveError::Empty) => None,
            Err(error) => return Err(error.into()),
        };
    }
    let name = trace.stem();
    let comparison = Comparison {
        name: &name,
        references,
        footprint: PageCount(truth.distinct()),
        exact: &exact,
    };
    let rows: Vec<_> = entries.iter().map(|entry| comparison.row(entry)).collect();
    let content = match view.output.format() {
        Format::Table => comparison.to_table(&rows).into_bytes(),
        Format::Csv => to_csv(&rows).into_bytes(),
        Format::Json => comparison.to_json(&rows)?.into_bytes(),
        picture @ (Format::Svg | Format::Png) => encode(
            comparison.to_chart(trace.page_bytes, &entries).to_svg(),
            picture,
        )?,
    };
    view.output.write(&content, out)
}

/// What all are compared with.
struct Comparison<'a> {
    name: &'a str,
    references: u64,
    footprint: PageCount,
    exact: &'a MissRatioCurve,
}

impl Comparison<'_> {
    fn sizes(&self, from: PageCount) -> impl Iterator<Item = PageCount> + use<> {
        let footprint = self.footprint.0;
        let steps = footprint.min(SIZES);
        let sizes = (1..=steps).map(move |step| {
            let size = u128::from(footprint) * u128::from(step) / u128::from(steps);
            PageCount(u64::try_from(size).unwrap_or(u64::MAX))
        });
        sizes.filter(move |&size| size >= from)
    }

    fn row(&self, entry: &Entry) -> Row {
        let sizes = || self.sizes(entry.built.estimator.smallest_size());
        let curve = entry.curve.as_ref();
        let distance = |slack| curve?.distance_up_to(self.exact, sizes(), slack);
        Row {
            estimator: entry.built.label.clone(),
            mean_absolute_error: distance(0.0).map(|distance| distance.mean_absolute_error),
            max_error: distance(SLACK).map(|distance| distance.max_absolute_error),
            cliff_position_error: curve.and_then(|curve| curve.cliff_position_error(self.exact)),
            band_coverage: curve.and_then(|curve| curve.band_coverage(self.exact, sizes())),
            references_per_second: self.references as f64 / entry.cpu_seconds.max(1e-9),
            peak_memory_bytes: entry.peak_bytes,
        }
    }

    fn to_table(&self, rows: &[Row]) -> String {
        let mut table = format!(
            "{:<12}{}\n{:<12}{} to {} pages\n",
            "trace",
            self.name,
            "references",
            grouped(self.references as f64),
            grouped(self.footprint.0 as f64),
        );
        let cliff = self.exact.cliff().map_or("none".to_owned(), |cliff| {
            format!(
                "at {} pages, from {:.1} % to {:.1} % misses",
                grouped(cliff.size.0 as f64),
                cliff.from * 100.0,
                cliff.to * 100.0
            )
        });
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(table, "{:<12}{cliff}\n", "cliff");
        let share = |share: Option<f64>, digits: usize| match share {
            Some(share) => format!("{:.digits$} %", share * 100.0),
            None => "-".to_owned(),
        };
        table.push_str(&table!(rows, |row| {
            Left "estimator": row.estimator.as_str(),
            Right "MAE": share(row.mean_absolute_error, 3),
            Right "max err": share(row.max_error, 2),
            Right "cliff": share(row.cliff_position_error, 2),
            Right "in band": share(row.band_coverage, 1),
            Right "M refs/CPU s": format!("{:.1}", row.references_per_second / 1e6),
            Right "peak memory": ByteSize(row.peak_memory_bytes as u64).rounded(),
        }));
        table.push_str(
            "\nMAE and max err: against the exact curve, at even sizes up to the footprint; max err forgives\n\
             sizes off by 1 %. cliff: how far its place is off. in band: sizes whose true ratio is in it.\n",
        );
        table.replace('\u{a0}', " ")
    }

    fn to_json(&self, rows: &[Row]) -> anyhow::Result<String> {
        let document = Document {
            schema: 1,
            trace: self.name,
            references: self.references,
            footprint_pages: self.footprint.0,
            estimators: rows,
        };
        Ok(serde_json::to_string(&document)? + "\n")
    }

    fn to_chart(&self, page_size: PageSize, entries: &[Entry]) -> Chart {
        let until = self.footprint.to_bytes(page_size);
        let until = until.saturating_add(until / 25);
        let exact = Series {
            look: SeriesStyle::Truth,
            ..Series::of_curve("exact", self.exact, page_size, until)
        };
        let curves = entries.iter().filter_map(|entry| {
            let curve = entry.curve.as_ref().filter(|&curve| curve != self.exact)?;
            let name = &entry.built.label;
            let mut series = Series::of_curve(name, curve, page_size, until);
            series.points.retain(|point| point.x <= until as f64);
            // Bands over one another show nothing.
            series.points = series.points.iter().map(|p| Point::new(p.x, p.y)).collect();
            Some(series)
        });
        Chart {
            title: format!("Estimated miss-ratio curves of {}", self.name),
            subtitle: format!("{} references", grouped(self.references as f64)),
            x: Axis::new("Memory size", Unit::Bytes).up_to(until as f64),
            y: Axis::new("Miss ratio", Unit::Share).up_to(1.0),
            shades: Vec::new(),
            series: curves.chain([exact]).collect(),
            markers: Vec::new(),
        }
    }
}

fn to_csv(rows: &[Row]) -> String {
    csv_table!(rows, |row| {
        "estimator": row.estimator.as_str(),
        "mean_absolute_error": row.mean_absolute_error,
        "max_error": row.max_error,
        "cliff_position_error": row.cliff_position_error,
        "band_coverage": row.band_coverage,
        "references_per_second": row.references_per_second,
        "peak_memory_bytes": row.peak_memory_bytes,
    })
}
