//! One curve as a table, CSV, JSON or a picture.

use std::fmt::Write as _;
use std::io::Write;
use std::num::NonZeroUsize;

use plimsoll_flow::{MissRatioCurve, PageCount, PageSize, WorkingSet};
use plimsoll_output::exit::UsageError;
use plimsoll_output::{Format, OutputArgs, bail_usage, grouped};
use plimsoll_plot::{Axis, Chart, Marker, Series, Unit, encode};

use crate::trace_args::TraceArgs;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::curve_size::CurveSize;
use plimsoll_protocol::size::ByteSize;

const POINTS_OF_TABLE: usize = 20;
const POINTS: usize = 1000;

/// Which points of a curve to print, and how. Flatten them into a verb's `Args`.
#[derive(Debug, clap::Args)]
pub struct ViewArgs {
    /// Maximum number of points, at least the two ends, placed where the curve changes [default: 20 in a table, else 1000]
    #[arg(long, conflicts_with = "sizes", value_name = "N")]
    points: Option<NonZeroUsize>,
    /// Print the ratio at exactly these sizes: pages, or bytes with a unit (1000,512M)
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    sizes: Vec<CurveSize>,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

impl ViewArgs {
    /// Refuses options of the output that do not go together.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        self.output.check()
    }

    /// Refuses options that choose points, which a comparison does itself.
    pub(super) fn check_compared(&self) -> anyhow::Result<()> {
        if !self.sizes.is_empty() || self.points.is_some() {
            bail_usage!("--compare takes its sizes from the trace: leave out --sizes and --points");
        }
        Ok(())
    }

    /// Prints the curve of so many references of a trace; `method` names the estimator.
    pub(super) fn write(
        &self,
        trace: &TraceArgs,
        method: String,
        references: u64,
        curve: &MissRatioCurve,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let report = Report {
            name: trace.stem(),
            method,
            references,
            page_size: trace.page_bytes,
            working_set: curve.size_for(WorkingSet::MISS_RATIO),
            curve: self.select(curve, trace.page_bytes)?,
        };
        let content = match self.output.format() {
            Format::Table => report.to_table().into_bytes(),
            Format::Csv => report.to_csv().into_bytes(),
            Format::Json => report.to_json()?.into_bytes(),
            picture => encode(report.to_chart().to_svg(), picture)?,
        };
        self.output.write(&content, out)
    }

    /// The number of points given, or a default.
    pub(super) fn points_or(&self, default: usize) -> usize {
        self.points.map_or(default, NonZeroUsize::get)
    }

    /// The sizes given, rising.
    ///
    /// # Errors
    ///
    /// A [`UsageError`] for one below a page.
    pub(super) fn sizes(&self, page_size: PageSize) -> anyhow::Result<Vec<PageCount>> {
        let sizes = self.sizes.iter().map(|size| size.to_pages(page_size));
        let sizes: Result<Vec<_>, _> = sizes.collect();
        let mut sizes = sizes.map_err(|error| UsageError(format!("--sizes: {error}")))?;
        sizes.sort_unstable();
        sizes.dedup();
        Ok(sizes)
    }

    /// Cuts the curve down to the selected points.
    pub(super) fn select(
        &self,
        curve: &MissRatioCurve,
        page_size: PageSize,
    ) -> anyhow::Result<MissRatioCurve> {
        if self.sizes.is_empty() {
            let default = match self.output.format() {
                Format::Table => POINTS_OF_TABLE,
                _ => POINTS,
            };
            return Ok(curve.thinned(self.points_or(default)));
        }
        Ok(curve.at_sizes(&self.sizes(page_size)?)?)
    }
}

/// A curve and its description in the table.
struct Report {
    name: String,
    method: String,
    /// References in the trace; the curve counts those that the estimator sampled.
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
            "miss ratio with its band"
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
