//! Several curves from one reading of a trace: one for each device, or for each interval of the trace's time.
//!
//! Devices have an estimator each, which sees the references that `--device` alone would leave. Intervals follow each
//! other, so that one estimator is made after another; each sees its interval's references alone, as if the trace began
//! with them: pages used before the interval miss at first. Intervals begin with the first reference; one without
//! references has no line. A reference whose time lies before its interval is counted in it, and reported.

use std::io::Write;

use anyhow::Context as _;
use clap::ValueEnum;
use plimsoll_estimator::registry::BuiltEstimator;
use plimsoll_estimator::{ByGroup, Estimator, group_threads};
use plimsoll_flow::{CurveError, MissRatioCurve, PageCount, PageSize, WorkingSet};
use plimsoll_output::exit::UsageError;
use plimsoll_output::{Format, bail_usage, csv_table, grouped, printable, table};
use plimsoll_plot::{Axis, Chart, HeatChart, Series, Unit, encode};
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::size::{ByteSize, Interval};
use plimsoll_source::{Grouping, Options};
use serde::Serialize;

use super::choice::EstimatorArgs;
use super::input::read;
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;

/// Maximum number of curves in one chart: as many as there are colours.
const CURVES_MAX: usize = 8;
/// Cells of a row of a heatmap.
const CELLS: u64 = 200;

/// What has a curve of its own. Flatten it into a verb's `Args`.
#[derive(Debug, clap::Args)]
pub struct SeveralArgs {
    /// Print a curve for each device, volume, tenant or client, from one reading (memory: that of an estimator for each)
    #[arg(long, conflicts_with = "every", value_name = "WHAT")]
    by: Option<By>,
    /// Print a curve for each interval of the trace's time: 1h, 30m, 10s
    #[arg(long, value_name = "TIME")]
    every: Option<Interval>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum By {
    /// The device, volume, tenant or client that the format records
    #[value(aliases = ["vm", "volume", "tenant", "client"])]
    Device,
}

impl SeveralArgs {
    /// Whether there is one curve alone.
    pub(super) fn is_one(&self) -> bool {
        self.by.is_none() && self.every.is_none()
    }

    /// Length of an interval of time.
    pub(super) fn every(&self) -> Option<Interval> {
        self.every
    }
}

/// The curve of a device or of an interval.
struct Part {
    name: String,
    /// Start of an interval since the trace's first reference.
    from_us: Option<u64>,
    references: u64,
    /// Of the whole curve, not of the selected points.
    working_set: Option<PageCount>,
    /// `None` if no reference was sampled.
    curve: Option<MissRatioCurve>,
}

impl Part {
    fn new(
        name: String,
        from_us: Option<u64>,
        references: u64,
        estimator: &mut dyn Estimator,
        view: &ViewArgs,
        page_size: PageSize,
    ) -> anyhow::Result<Self> {
        let curve = match estimator.curve() {
            Ok(curve) => Some(curve),
            Err(CurveError::Empty) => None,
            Err(error) => return Err(error.into()),
        };
        let size_for = |curve: &MissRatioCurve| curve.size_for(WorkingSet::MISS_RATIO);
        let working_set = curve.as_ref().and_then(size_for);
        let curve = curve.map(|curve| view.select(&curve, page_size));
        Ok(Self {
            name,
            from_us,
            references,
            working_set,
            curve: curve.transpose()?,
        })
    }
}

/// Everything that was read.
struct Several<'a> {
    trace: &'a TraceArgs,
    method: String,
    parts: Vec<Part>,
    /// Length of an interval.
    every: Option<Interval>,
    /// References counted in an interval after their own.
    late: u64,
    /// Number of bytes that the estimators took at most.
    memory_bytes: usize,
}

/// Reads the trace and prints its curves.
pub(super) fn run(
    args: &SeveralArgs,
    trace: &TraceArgs,
    estimator: &EstimatorArgs,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    if estimator.is_all() || estimator.stream().is_some() {
        bail_usage!(
            "--by and --every print curves of one estimator: name it, and leave out --stream"
        );
    }
    let make = || estimator.build_one(trace.page_bytes);
    let method = make()?.label;
    let several = Several {
        trace,
        method,
        parts: Vec::new(),
        every: args.every,
        late: 0,
        memory_bytes: 0,
    };
    let several = match args.every {
        Some(every) => several.by_interval(every, &make, view)?,
        None => several.by_device(&make, view)?,
    };
    several.write(view, out)
}

type Make<'a> = dyn Fn() -> anyhow::Result<BuiltEstimator> + Sync + 'a;

impl Several<'_> {
    fn by_device(mut self, make: &Make, view: &ViewArgs) -> anyhow::Result<Self> {
        let mut source = self.trace.open_with(&Options {
            groups: Some(Grouping::Device),
            ..self.trace.options()
        })?;
        // The options have been checked by the first one.
        let mut all = ByGroup::new(|| make().expect("made before").estimator);
        read(&mut source, |batch| {
            all.observe(batch.pages(), &batch.details().groups);
        })?;
        let held_bytes = all.memory_bytes();
        let page_size = self.trace.page_bytes;
        let found = all.finish(|references, estimator| {
            // A device without references was in requests that made none.
            let part = (references > 0)
                .then(|| Part::new(String::new(), None, references, estimator, view, page_size));
            (part.transpose(), estimator.memory_bytes())
        });
        // Of those that are made in the end there is one at a time on each thread.
        let largest = found.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        self.memory_bytes = held_bytes + group_threads() * largest;
        for ((part, _), name) in found.into_iter().zip(source.groups()) {
            self.parts.extend(part?.map(|part| Part { name, ..part }));
        }
        self.parts
            .sort_by_key(|part| std::cmp::Reverse(part.references));
        Ok(self)
    }

    fn by_interval(
        mut self,
        every: Interval,
        make: &Make,
        view: &ViewArgs,
    ) -> anyhow::Result<Self> {
        let mut source = self.trace.open_with(&Options {
            times: true,
            ..self.trace.options()
        })?;
        let every_us = u64::try_from(every.get().as_micros()).unwrap_or(u64::MAX);
        let mut first_us = None;
        let mut number = 0;
        let mut built = make()?;
        let mut references = 0;
        let mut result = Ok(());
        read(&mut source, |batch| {
            let times = &batch.details().times_us;
            let mut pages = batch.pages();
            let mut times = times.as_slice();
            while let (Some(&time), true) = (times.first(), result.is_ok()) {
                let first = *first_us.get_or_insert(time);
                let interval = |time: u64| time.saturating_sub(first) / every_us;
                if interval(time) > number {
                    let estimator = &mut *built.estimator;
                    result = self.end_interval(number * every_us, references, estimator, view);
                    match make() {
                        Ok(next) => built = next,
                        Err(error) => result = Err(error),
                    }
                    (number, references) = (interval(time), 0);
                }
                let length = times.iter().take_while(|&&time| interval(time) <= number);
                let length = length.count();
                let (here, later) = times.split_at(length);
                let late = here
                    .iter()
                    .filter(|&&time| time < first || interval(time) < number);
                self.late += late.count() as u64;
                built.estimator.observe(&pages[..length]);
                references += length as u64;
                (times, pages) = (later, &pages[length..]);
            }
        })?;
        result?;
        self.end_interval(number * every_us, references, &mut *built.estimator, view)?;
        Ok(self)
    }

    fn end_interval(
        &mut self,
        from_us: u64,
        references: u64,
        estimator: &mut dyn Estimator,
        view: &ViewArgs,
    ) -> anyhow::Result<()> {
        if references == 0 {
            return Ok(());
        }
        self.memory_bytes = self.memory_bytes.max(estimator.memory_bytes());
        let name = start(from_us);
        let page_size = self.trace.page_bytes;
        let part = Part::new(name, Some(from_us), references, estimator, view, page_size)?;
        self.parts.push(part);
        Ok(())
    }

    fn what(&self) -> &'static str {
        match self.every {
            Some(_) => "interval",
            None => "device",
        }
    }

    fn references(&self) -> u64 {
        self.parts.iter().map(|part| part.references).sum()
    }

    fn write(&self, view: &ViewArgs, out: &mut dyn Write) -> anyhow::Result<()> {
        if self.parts.is_empty() {
            return Err(anyhow::Error::new(CurveError::Empty))
                .with_context(|| format!("no curve of '{}'", self.trace.label()));
        }
        let content = match view.output.format() {
            Format::Table => self.to_table(view)?.into_bytes(),
            Format::Csv => self.to_csv().into_bytes(),
            Format::Json => self.to_json()?.into_bytes(),
            picture => encode(self.to_picture()?, picture)?,
        };
        view.output.write(&content, out)
    }

    fn bytes(&self, pages: PageCount) -> ByteSize {
        ByteSize(pages.to_bytes(self.trace.page_bytes))
    }

    fn to_table(&self, view: &ViewArgs) -> anyhow::Result<String> {
        let mut table = format!(
            "{:<12}{}\n{:<12}{} for each of {} {}s, {} of memory\n{:<12}{}\n",
            "trace",
            self.trace.stem(),
            "estimator",
            self.method,
            self.parts.len(),
            self.what(),
            ByteSize(self.memory_bytes as u64).rounded(),
            "references",
            grouped(self.references() as f64),
        );
        if self.late > 0 {
            table.push_str(&format!(
                "{:<12}{} references, counted in the interval after their own\n",
                "late",
                grouped(self.late as f64)
            ));
        }
        let sizes = view.sizes(self.trace.page_bytes)?;
        let percent = |share: f64| format!("{:.2} %", share * 100.0);
        let what = self.what();
        table.push('\n');
        table.push_str(&table!(&self.parts, |part| {
            Left what: printable(&part.name),
            Right "references": grouped(part.references as f64),
            Right "working set (5 %)": match part.working_set {
                Some(size) => self.bytes(size).rounded(),
                None => "none".to_owned(),
            },
            Right "least misses": part.curve.as_ref().and_then(|curve| {
                Some(percent(curve.points().last()?.miss_ratio))
            }),
            Right "misses at these sizes": part.curve.as_ref().map(|curve| {
                let ratios = sizes.iter().map(|&size| curve.miss_ratio(size));
                let ratios: Vec<_> = ratios.map(|ratio| format!("{:>8}", percent(ratio))).collect();
                ratios.join("  ")
            }),
        }));
        Ok(table.replace('\u{a0}', " "))
    }

    fn to_csv(&self) -> String {
        let key = match self.every {
            Some(_) => "from_s",
            None => "device",
        };
        let rows = self.parts.iter().flat_map(|part| {
            let points = part.curve.iter().flat_map(MissRatioCurve::points);
            points.map(move |point| (part, point))
        });
        csv_table!(rows, |(part, point)| {
            key: match part.from_us {
                Some(from_us) => (from_us as f64 / 1e6).to_string(),
                None => printable(&part.name),
            },
            "references": part.references,
            "size_pages": point.size.0,
            "miss_ratio": point.miss_ratio,
            "low": point.low,
            "high": point.high,
        })
    }

    fn to_json(&self) -> anyhow::Result<String> {
        let parts = self.parts.iter().map(|part| PartJson {
            from_s: part.from_us.map(|from_us| from_us as f64 / 1e6),
            references: part.references,
            curve: part
                .curve
                .as_ref()
                .map(|curve| CurveJson::new(&part.name, self.trace.page_bytes, None, curve)),
        });
        let document = Document {
            schema: 1,
            trace: self.trace.stem(),
            by: self.what(),
            every_s: self.every.map(|every| every.get().as_secs_f64()),
            late_references: self.late,
            curves: parts.collect(),
        };
        Ok(serde_json::to_string(&document)? + "\n")
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

    fn to_picture(&self) -> anyhow::Result<String> {
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

    fn to_chart(&self, subtitle: String) -> anyhow::Result<Chart> {
        if self.parts.len() > CURVES_MAX {
            return Err(UsageError(format!(
                "a chart shows up to {CURVES_MAX} curves, and there are {} devices: choose one by --device, or -o csv or json",
                self.parts.len()
            ))
            .into());
        }
        let page_size = self.trace.page_bytes;
        let until = self.until().to_bytes(page_size);
        let until = until.saturating_add(until / 25);
        let series = self.parts.iter().filter_map(|part| {
            let curve = part.curve.as_ref()?;
            Some(Series::of_curve(
                printable(&part.name),
                curve,
                page_size,
                until,
            ))
        });
        Ok(Chart {
            title: format!("Miss-ratio curves of the devices of {}", self.trace.stem()),
            subtitle,
            x: Axis::new("Memory size", Unit::Bytes).up_to(until as f64),
            y: Axis::new("Miss ratio", Unit::Share).up_to(1.0),
            shades: Vec::new(),
            series: series.collect(),
            markers: Vec::new(),
        })
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
            title: format!("Misses of {} by memory size and time", self.trace.stem()),
            subtitle: subtitle + " · darkest: all references miss",
            x: Axis::new("Memory size", Unit::Bytes),
            y: Axis::new("Time", Unit::Seconds),
            columns_to: self.bytes(until).0 as f64,
            rows,
        }
    }
}

/// The start of an interval as its label: exact, so that no two intervals have the same.
fn start(from_us: u64) -> String {
    match Interval::from_micros(from_us) {
        Some(from) => from.to_string(),
        None => "0s".to_owned(),
    }
}

/// All curves as JSON.
#[derive(Debug, Serialize)]
struct Document {
    schema: u32,
    trace: String,
    by: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    every_s: Option<f64>,
    /// References counted in the interval after their own.
    late_references: u64,
    curves: Vec<PartJson>,
}

#[derive(Debug, Serialize)]
struct PartJson {
    #[serde(skip_serializing_if = "Option::is_none")]
    from_s: Option<f64>,
    /// All of them; the curve counts those that were sampled.
    references: u64,
    /// None if none was sampled. Its `vm` is the device, or the interval's start.
    curve: Option<CurveJson>,
}
