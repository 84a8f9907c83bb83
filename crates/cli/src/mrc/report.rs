//! Which points of a curve are shown, and where.

use std::io::Write;
use std::num::NonZeroUsize;

use plimsoll_estimator::Estimator;
use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount, PageSize, WorkingSet};
use plimsoll_output::exit::UsageError;
use plimsoll_output::{Format, OutputArgs, bail_usage};
use plimsoll_plot::Figure as _;
use plimsoll_protocol::curve_size::CurveSize;
use plimsoll_report::trace::CurveReport;

use crate::trace_args::TraceArgs;

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

/// What is shown of a curve, of which points were selected.
#[derive(Debug, Default)]
pub(super) struct Shown {
    /// Of the whole curve.
    pub(super) working_set: Option<PageCount>,
    /// The whole curve's largest size.
    pub(super) end: Option<CurvePoint>,
    pub(super) curve: Option<MissRatioCurve>,
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
        let report = CurveReport {
            name: trace.stem(),
            method,
            references,
            page_size: trace.page_size(),
            working_set: curve.size_for(WorkingSet::MISS_RATIO),
            end: curve.points().last().copied(),
            curve: self.select(curve, trace.page_size())?,
        };
        report.write(&self.output, out)
    }

    /// The number of points given, or a default.
    pub(super) fn points_or(&self, default: usize) -> usize {
        self.points.map_or(default, NonZeroUsize::get)
    }

    /// The sizes given, rising.
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

    /// What is shown of an estimator's curve; nothing if no reference was sampled.
    pub(super) fn of(
        &self,
        estimator: &mut dyn Estimator,
        page_size: PageSize,
    ) -> anyhow::Result<Shown> {
        let curve = match estimator.curve() {
            Ok(curve) => curve,
            Err(CurveError::Empty) => return Ok(Shown::default()),
            Err(error) => return Err(error.into()),
        };
        Ok(Shown {
            working_set: curve.size_for(WorkingSet::MISS_RATIO),
            end: curve.points().last().copied(),
            curve: Some(self.select(&curve, page_size)?),
        })
    }
}
