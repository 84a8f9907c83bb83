//! `plimsoll mrc`: the miss-ratio curve of a recorded trace.
//!
//! Reads the trace once, batch by batch, into the estimator asked for, and gives
//! the curve as a table, CSV, JSON or a picture. Memory is the estimator's alone.

use std::fmt::Write as _;
use std::io::Write;
use std::num::NonZeroUsize;
use std::str::FromStr;

use clap::ValueEnum;
use plimsoll_estimator::{Aet, Estimator, ExactLru, Shards};
use plimsoll_flow::{CurveError, MissRatioCurve, PageCount, PageSize, ReferenceBatch, WorkingSet};
use plimsoll_source::Source;

use crate::bail_usage;
use crate::curve_json::CurveJson;
use crate::output::{Format, OutputArgs};
use crate::plot::{Axis, Chart, Marker, Series, Unit, grouped, svg_to_png};
use crate::progress_bar::ReadingBar;
use crate::size::{ByteSize, QuantityError, Rate};
use crate::trace_args::TraceArgs;

/// Print the miss-ratio curve of a recorded trace.
///
/// The miss ratio at a size is the share of references that an LRU memory of that
/// size would miss, first references included.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    trace: TraceArgs,
    /// How the curve is found
    #[arg(long, value_enum, default_value_t = Algorithm::Lru)]
    estimator: Algorithm,
    /// Share to sample: of pages for shards, of references for aet [default: shards 1/100, aet 1]
    #[arg(long)]
    rate: Option<Rate>,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Most points to give, set where the curve moves [default: 20 in a table, else 1000]
    #[arg(long, conflicts_with = "sizes", value_name = "N")]
    points: Option<NonZeroUsize>,
    /// Give the ratio at exactly these sizes: pages, or bytes with a unit (1000,512M)
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    sizes: Vec<CurveSize>,
    #[command(flatten)]
    output: OutputArgs,
}

/// How the curve is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Algorithm {
    /// Exact stack distances
    Lru,
    /// Exact distances of a sample of the pages, scaled up
    Shards,
    /// Reuse times turned into distances, of all references or of a sample
    Aet,
}

const SHARDS_RATE: f64 = 0.01;
const POINTS_OF_TABLE: usize = 20;
const POINTS: usize = 1000;
const PNG_SCALE: f32 = 2.0;

/// A size at which the curve is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CurveSize {
    Pages(PageCount),
    Bytes(ByteSize),
}

impl CurveSize {
    fn to_pages(self, page_size: PageSize) -> PageCount {
        match self {
            Self::Pages(pages) => pages,
            Self::Bytes(ByteSize(bytes)) => PageCount::from_bytes(bytes, page_size),
        }
    }
}

impl FromStr for CurveSize {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        match text.trim().parse() {
            Ok(pages) => Ok(Self::Pages(PageCount(pages))),
            Err(_) => text.parse().map(Self::Bytes),
        }
    }
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// A [`UsageError`](crate::exit::UsageError) for options that do not go together; what the trace,
/// the estimator or the output file says; and that there was nothing to observe.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let (mut estimator, method) = args.estimator()?;
    let mut trace = args.trace.open()?;
    let bar = ReadingBar::new(trace.progress());
    let mut batch = ReferenceBatch::new();
    let mut references = 0;
    while trace.next_batch(&mut batch)? {
        estimator.observe(&batch);
        references += batch.len() as u64;
        bar.update();
    }
    drop(bar);
    let curve = estimator.curve().map_err(|error| match error {
        CurveError::Empty if references > 0 => anyhow::anyhow!(
            "none of the trace's {references} references was sampled: a higher --rate sees more"
        ),
        error => anyhow::Error::new(error)
            .context(format!("no curve of '{}'", args.trace.trace.display())),
    })?;
    let report = Report {
        name: args.name(),
        method,
        references,
        page_size: args.trace.page_bytes,
        working_set: curve.size_for(WorkingSet::MISS_RATIO),
        curve: args.select(&curve)?,
    };
    let content = match args.output.format() {
        Format::Table => report.to_table().into_bytes(),
        Format::Csv => report.to_csv().into_bytes(),
        Format::Json => report.to_json()?.into_bytes(),
        Format::Svg => report.to_chart().to_svg().into_bytes(),
        Format::Png => svg_to_png(&report.to_chart().to_svg(), PNG_SCALE)?,
    };
    args.output.write(&content, out)
}

impl Args {
    /// Builds the estimator asked for, and names it.
    fn estimator(&self) -> anyhow::Result<(Box<dyn Estimator>, String)> {
        Ok(match (self.estimator, self.rate) {
            (Algorithm::Lru, None) => (Box::new(ExactLru::new()), "exact LRU".to_owned()),
            (Algorithm::Lru, Some(_)) => {
                bail_usage!("--rate: lru looks at every reference; shards and aet sample")
            }
            (Algorithm::Shards, rate) => {
                let rate = rate.or(Rate::new(SHARDS_RATE)).unwrap_or(Rate::ONE);
                let shards = Shards::new(rate.get(), self.seed)?;
                (Box::new(shards), format!("SHARDS at rate {rate}"))
            }
            (Algorithm::Aet, None) => (Box::new(Aet::new()), "AET".to_owned()),
            (Algorithm::Aet, Some(rate)) => {
                let aet = Aet::sampled(rate.get(), self.seed)?;
                (Box::new(aet), format!("AET at rate {rate}"))
            }
        })
    }

    /// The trace's name without folder and ending.
    fn name(&self) -> String {
        let name = self.trace.trace.file_name().unwrap_or_default();
        let name = name.to_string_lossy();
        match name.split('.').next() {
            Some(stem) if !stem.is_empty() => stem.to_owned(),
            _ => name.into_owned(),
        }
    }

    /// Cuts the curve down to the points asked for.
    fn select(&self, curve: &MissRatioCurve) -> anyhow::Result<MissRatioCurve> {
        if self.sizes.is_empty() {
            let default = match self.output.format() {
                Format::Table => POINTS_OF_TABLE,
                _ => POINTS,
            };
            return Ok(curve.thinned(self.points.map_or(default, NonZeroUsize::get)));
        }
        let page_size = self.trace.page_bytes;
        let sizes = self.sizes.iter().map(|size| size.to_pages(page_size));
        let mut sizes: Vec<_> = sizes.collect();
        sizes.sort_unstable();
        sizes.dedup();
        Ok(curve.at_sizes(&sizes)?)
    }
}

/// A curve and what a reader wants to know about it.
struct Report {
    name: String,
    method: String,
    /// References in the trace; the curve counts those the estimator looked at.
    references: u64,
    page_size: PageSize,
    /// Of the whole curve, not of the points selected.
    working_set: Option<PageCount>,
    curve: MissRatioCurve,
}

impl Report {
    fn bytes(&self, pages: PageCount) -> ByteSize {
        ByteSize(pages.to_bytes(self.page_size))
    }

    /// How many of the references were sampled, if not all.
    fn sampled(&self) -> String {
        match self.curve.references() {
            seen if seen == self.references => String::new(),
            seen => format!(", of which {} sampled", grouped(seen as f64)),
        }
    }

    fn banded(&self) -> bool {
        let points = self.curve.points();
        points.iter().any(|point| point.low < point.high)
    }

    fn working_set(&self) -> String {
        match self.working_set {
            Some(size) => format!(
                "{} pages, {} (5 % misses)",
                grouped(size.0 as f64),
                self.bytes(size).rounded()
            ),
            None => "none: more than 5 % miss at every size".to_owned(),
        }
    }

    fn to_table(&self) -> String {
        let mut table = String::new();
        let heads = [
            ("trace", self.name.clone()),
            ("estimator", self.method.clone()),
            (
                "references",
                grouped(self.references as f64) + &self.sampled(),
            ),
            ("page", self.bytes(PageCount(1)).rounded()),
            ("working set", self.working_set()),
        ];
        for (label, value) in heads {
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(table, "{label:<12}{value}");
        }
        let banded = self.banded();
        let band_head = if banded { "       low      high" } else { "" };
        let _ = writeln!(
            table,
            "\n{:>14}  {:>11}  {:>10}{band_head}",
            "size (pages)", "size", "miss ratio"
        );
        for point in self.curve.points() {
            let _ = write!(
                table,
                "{:>14}  {:>11}  {:>8.2} %",
                grouped(point.size.0 as f64),
                self.bytes(point.size).rounded(),
                point.miss_ratio * 100.0
            );
            if banded {
                let (low, high) = (point.low * 100.0, point.high * 100.0);
                let _ = write!(table, "  {low:>6.2} %  {high:>6.2} %");
            }
            table.push('\n');
        }
        table.replace('\u{a0}', " ")
    }

    fn to_csv(&self) -> String {
        let mut csv = String::from("size_pages,miss_ratio,low,high\n");
        for point in self.curve.points() {
            let (size, ratio) = (point.size, point.miss_ratio);
            let _ = writeln!(csv, "{size},{ratio},{},{}", point.low, point.high);
        }
        csv
    }

    fn to_json(&self) -> anyhow::Result<String> {
        let curve = CurveJson::new(&self.name, self.page_size, None, &self.curve);
        Ok(serde_json::to_string(&curve)? + "\n")
    }

    fn to_chart(&self) -> Chart {
        let last = self
            .curve
            .points()
            .last()
            .map_or(0, |point| point.size.to_bytes(self.page_size));
        // Some room behind the last step shows that the curve stays where it is.
        let until = last
            .saturating_add(last / 25)
            .saturating_add(self.page_size.bytes());
        let name = if self.banded() {
            "miss ratio with its 95 % band"
        } else {
            ""
        };
        let curve = Series::of_curve(name, &self.curve, self.page_size, until);
        let markers = self.working_set.map(|size| Marker {
            x: self.bytes(size).0 as f64,
            label: format!("working set {} (5 %)", self.bytes(size).rounded()),
        });
        Chart {
            title: format!("Miss-ratio curve of {}", self.name),
            subtitle: format!(
                "{} · {} references{}",
                self.method,
                grouped(self.references as f64),
                self.sampled()
            ),
            x: Axis::new("Memory size", Unit::Bytes).up_to(until as f64),
            y: Axis::new("Miss ratio", Unit::Share).up_to(1.0),
            shades: Vec::new(),
            series: vec![curve],
            markers: markers.into_iter().collect(),
        }
    }
}
