//! Curves of the devices of a trace, or of the intervals of its time.

use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, PageSize};
use plimsoll_output::exit::UsageError;
use plimsoll_output::{grouped, json_line, labelled, printable, table};
use plimsoll_plot::{Axis, Chart, Figure, HeatChart, Series, Unit};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::curve_json::{CurveJson, CurvesBy};
use plimsoll_protocol::size::{ByteSize, Interval};
use serde::Serialize;

use super::{least_misses, may_have_working_set, points_csv};

/// Maximum number of curves in one chart: as many as there are colours.
const CURVES_MAX: usize = 8;
/// Cells of a row of a heatmap.
const CELLS: u64 = 200;

/// The curve of a device or of an interval.
#[derive(Debug)]
pub struct Part {
    /// The device, or the interval's start.
    pub name: String,
    /// Start of an interval since the trace's first reference.
    pub from_us: Option<u64>,
    /// Number of references.
    pub references: u64,
    /// Of the whole curve, not of the selected points.
    pub working_set: Option<PageCount>,
    /// The largest size of the whole curve.
    pub end: Option<CurvePoint>,
    /// The points selected; `None` if no reference was sampled.
    pub curve: Option<MissRatioCurve>,
}

impl Part {
    /// The start of an interval as its name: exact, so that no two intervals have the same.
    pub fn start(from_us: u64) -> String {
        match Interval::from_micros(from_us) {
            Some(from) => from.to_string(),
            None => "0s".to_owned(),
        }
    }
}

/// Everything that was read.
#[derive(Debug)]
pub struct SeveralReport {
    /// Name of the trace.
    pub name: String,
    /// The estimator with its settings.
    pub method: String,
    /// Bytes in a page.
    pub page_size: PageSize,
    /// At least one.
    pub parts: Vec<Part>,
    /// Length of an interval; `None` for devices.
    pub every: Option<Interval>,
    /// References counted in an interval after their own.
    pub late: u64,
    /// Number of bytes that the estimators took at most.
    pub memory_bytes: usize,
    /// Sizes whose ratios the table shows.
    pub sizes: Vec<PageCount>,
}

impl SeveralReport {
    fn by(&self) -> CurvesBy {
        match self.every {
            Some(_) => CurvesBy::Interval,
            None => CurvesBy::Device,
        }
    }

    fn references(&self) -> u64 {
        self.parts.iter().map(|part| part.references).sum()
    }

    fn bytes(&self, pages: PageCount) -> ByteSize {
        ByteSize(pages.to_bytes(self.page_size))
    }

    /// The largest size of all curves.
    fn until(&self) -> PageCount {
        let curves = self.parts.iter().filter_map(|part| part.curve.as_ref());
        let last = curves.filter_map(|curve| curve.points().last());
        last.map(|point| point.size)
            .max()
            .unwrap_or_default()
            .max(PageCount(1))
    }

    fn to_chart(&self, subtitle: String) -> anyhow::Result<Chart> {
        if self.parts.len() > CURVES_MAX {
            return Err(UsageError(format!(
                "a chart shows up to {CURVES_MAX} curves, and there are {} devices: choose one by --device, or -o csv or json",
                self.parts.len()
            ))
            .into());
        }
        let page_size = self.page_size;
        let until = Chart::end_beyond(self.until().to_bytes(page_size));
        let series = self.parts.iter().filter_map(|part| {
            let curve = part.curve.as_ref()?;
            Some(Series::of_curve(
                printable(&part.name),
                curve,
                page_size,
                until,
            ))
        });
        let title = format!("Miss-ratio curves of the devices of {}", self.name);
        Ok(Chart::of_miss_ratios(
            title,
            subtitle,
            "Memory size",
            until,
            series,
        ))
    }

    /// Misses by size and time: a dark cell misses much.
    fn to_heatmap(&self, every: Interval, subtitle: String) -> HeatChart {
        let until = self.until();
        let cell = |index: u64| PageCount(until.0.saturating_mul(2 * index + 1) / (2 * CELLS));
        let length = every.get().as_secs_f64();
        let mut rows = Vec::new();
        let mut end = 0.0;
        for part in &self.parts {
            let from = part.from_us.unwrap_or_default() as f64 / 1e6;
            if from > end {
                rows.push((from, vec![0.0]));
            }
            end = from + length;
            let cells = (0..CELLS).map(|index| {
                let curve = part.curve.as_ref();
                curve.map_or(0.0, |curve| curve.miss_ratio(cell(index)))
            });
            rows.push((end, cells.collect()));
        }
        HeatChart {
            title: format!("Misses of {} by memory size and time", self.name),
            subtitle: subtitle + " · darkest: all references miss",
            x: Axis::new("Memory size", Unit::Bytes),
            y: Axis::new("Time", Unit::Seconds),
            columns_to: self.bytes(until).0 as f64,
            rows,
        }
    }
}

impl Figure for SeveralReport {
    fn table(&self) -> anyhow::Result<String> {
        let estimator = format!(
            "{} for each of {} {}s, {} of memory",
            self.method,
            self.parts.len(),
            self.by().name(),
            ByteSize(self.memory_bytes as u64).rounded()
        );
        let mut heads = vec![
            ("trace", self.name.clone()),
            ("estimator", estimator),
            ("references", grouped(self.references() as f64)),
        ];
        if self.late > 0 {
            let late = grouped(self.late as f64);
            let late = format!("{late} references, counted in the interval after their own");
            heads.push(("late", late));
        }
        let mut table = labelled(12, heads);
        let percent = |share: f64| format!("{:.2} %", share * 100.0);
        let what = self.by().name();
        table.push('\n');
        table.push_str(&table!(&self.parts, |part| {
            Left what: printable(&part.name),
            Right "references": grouped(part.references as f64),
            Right "working set (5 %)": match part.working_set {
                Some(size) => self.bytes(size).rounded(),
                None if part.curve.is_none() => "not sampled".to_owned(),
                None if may_have_working_set(part.end.as_ref()) => "unknown".to_owned(),
                None => "none".to_owned(),
            },
            Right "least misses": part.end.as_ref().map(least_misses),
            Right "misses at these sizes": part.curve.as_ref().map(|curve| {
                let ratios = self.sizes.iter().map(|&size| curve.miss_ratio(size));
                let ratios: Vec<_> = ratios.map(|ratio| format!("{:>8}", percent(ratio))).collect();
                ratios.join("  ")
            }),
        }));
        Ok(table.replace('\u{a0}', " "))
    }

    fn csv(&self) -> anyhow::Result<String> {
        let key = match self.every {
            Some(_) => "from_s",
            None => "device",
        };
        let points = self.parts.iter().flat_map(|part| {
            let name = match part.from_us {
                Some(from_us) => (from_us as f64 / 1e6).to_string(),
                None => printable(&part.name),
            };
            let points = part.curve.iter().flat_map(MissRatioCurve::points);
            points.map(move |point| ([name.clone(), part.references.to_string()], point))
        });
        Ok(points_csv([key, "references"], points))
    }

    fn json(&self) -> anyhow::Result<String> {
        let parts = self.parts.iter().map(|part| PartJson {
            name: &part.name,
            from_s: part.from_us.map(|from_us| from_us as f64 / 1e6),
            references: part.references,
            curve: part
                .curve
                .as_ref()
                .map(|curve| CurveJson::new(&part.name, self.page_size, None, curve)),
        });
        let document = Document {
            schema: SCHEMA,
            trace: &self.name,
            by: self.by(),
            every_s: self.every.map(|every| every.get().as_secs_f64()),
            late_references: self.late,
            curves: parts.collect(),
        };
        json_line(&document)
    }

    fn svg(&self) -> anyhow::Result<String> {
        let subtitle = format!(
            "{} · {} references",
            self.method,
            grouped(self.references() as f64)
        );
        match self.every {
            Some(every) => Ok(self.to_heatmap(every, subtitle).to_svg()),
            None => Ok(self.to_chart(subtitle)?.to_svg()),
        }
    }
}

/// All curves as JSON.
#[derive(Debug, Serialize)]
struct Document<'a> {
    schema: u32,
    trace: &'a str,
    by: CurvesBy,
    #[serde(skip_serializing_if = "Option::is_none")]
    every_s: Option<f64>,
    /// References counted in the interval after their own.
    late_references: u64,
    curves: Vec<PartJson<'a>>,
}

#[derive(Debug, Serialize)]
struct PartJson<'a> {
    /// The device, or the interval's start.
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    from_s: Option<f64>,
    /// All of them; the curve counts those that were sampled.
    references: u64,
    /// None if none was sampled. Its `vm` is `name`.
    curve: Option<CurveJson>,
}
