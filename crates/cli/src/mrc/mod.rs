//! `plimsoll mrc`: the miss-ratio curve of a recorded trace.
//!
//! Reads the trace once, batch by batch, into the estimator asked for, and gives
//! the curve as a table, CSV, JSON or a picture. Memory is the estimator's alone.
//! `--compare` puts estimators beside the exact curve instead.

mod choice;
mod compare;
mod recorded;
mod report;

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;
use std::str::FromStr;

use plimsoll_estimator::Estimator;
use plimsoll_flow::{
    CurveError, MissRatioCurve, PageCount, PageSize, ReferenceBatch, Source, WorkingSet,
};
use plimsoll_source::Trace;

use crate::size::{ByteSize, QuantityError};
use crate::trace_args::{TraceArgs, reading_bar};
use choice::EstimatorArgs;
use plimsoll_output::{Format, OutputArgs, bail_usage};
use plimsoll_plot::encode;
use report::Report;

/// Print the miss-ratio curve of a recorded trace.
///
/// The miss ratio at a size is the share of references that an LRU memory of that
/// size would miss, first references included.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    estimator: EstimatorArgs,
    /// Compare with the exact curve: error, speed and memory of the estimator, or of all of them
    #[arg(long)]
    compare: bool,
    /// Print the curve of this part of a recorded stream of counters: FROM..TO, in references
    #[arg(long, value_name = "WINDOW")]
    window: Option<recorded::Window>,
    /// Maximum number of points, placed where the curve changes [default: 20 in a table, else 1000]
    #[arg(long, conflicts_with = "sizes", value_name = "N")]
    points: Option<NonZeroUsize>,
    /// Print the ratio at exactly these sizes: pages, or bytes with a unit (1000,512M)
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    sizes: Vec<CurveSize>,
    #[command(flatten)]
    output: OutputArgs,
}

const POINTS_OF_TABLE: usize = 20;
const POINTS: usize = 1000;

/// A size at which the curve is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CurveSize {
    /// In pages.
    Pages(PageCount),
    /// In bytes.
    Bytes(ByteSize),
}

impl CurveSize {
    /// The size in whole pages.
    #[must_use]
    pub fn to_pages(self, page_size: PageSize) -> PageCount {
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
/// A [`UsageError`](plimsoll_output::exit::UsageError) for options that do not go together; what the trace,
/// the estimator or the output file says; and that there was nothing to observe.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    args.check_files()?;
    let page_size = args.trace.page_bytes;
    if let Some(stream) = recorded::open(&args.trace.trace)? {
        return recorded::show(args, &stream, out);
    }
    if args.window.is_some() {
        bail_usage!(
            "--window: '{}' is no stream recorded by --stream",
            args.trace.trace.display()
        );
    }
    let contestants = args.estimator.contestants(page_size)?;
    if args.compare || args.estimator.is_all() {
        if args.estimator.stream().is_some() {
            bail_usage!("--stream: a comparison records nothing; leave out --compare");
        }
        return compare::run(args, contestants, out);
    }
    if let Some(path) = args.estimator.stream() {
        return recorded::record(args, path, out);
    }
    let mut trace = args.trace.open()?;
    // Just one: where there are several, they were compared.
    for mut contestant in contestants {
        let estimator = &mut *contestant.estimator;
        let references = read(&mut trace, |batch| estimator.observe(batch))?;
        let curve = args.curve_of(estimator, references)?;
        args.write(contestant.name, references, &curve, out)?;
    }
    Ok(())
}

/// Hands a trace's batches on to its end, with a bar; returns the number of references.
fn read(trace: &mut Trace, mut observe: impl FnMut(&ReferenceBatch)) -> anyhow::Result<u64> {
    let mut bar = reading_bar(trace.progress());
    let mut batch = ReferenceBatch::new();
    let mut references = 0;
    while trace.next_batch(&mut batch)? {
        observe(&batch);
        references += batch.len() as u64;
        bar.update(references);
    }
    Ok(references)
}

impl Args {
    /// Refuses to replace the trace by what is found out about it.
    fn check_files(&self) -> anyhow::Result<()> {
        let canonical = |path: &Path| path.canonicalize().ok().filter(|path| path.is_file());
        let trace = canonical(&self.trace.trace);
        for (option, path) in [
            ("--out", self.output.path()),
            ("--stream", self.estimator.stream()),
        ] {
            if trace.is_some() && path.and_then(canonical) == trace {
                bail_usage!("{option}: that is the trace, which would be lost");
            }
        }
        if self.output.path().is_some() && self.output.path() == self.estimator.stream() {
            bail_usage!("--stream and --out name one file: one of them would be lost");
        }
        Ok(())
    }

    /// Gives the curve of so many references in the form asked for; `method` says how it was found.
    fn write(
        &self,
        method: String,
        references: u64,
        curve: &MissRatioCurve,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let report = Report {
            name: self.name(),
            method,
            references,
            page_size: self.trace.page_bytes,
            working_set: curve.size_for(WorkingSet::MISS_RATIO),
            curve: self.select(curve)?,
        };
        let content = match self.output.format() {
            Format::Table => report.to_table().into_bytes(),
            Format::Csv => report.to_csv().into_bytes(),
            Format::Json => report.to_json()?.into_bytes(),
            picture @ (Format::Svg | Format::Png) => encode(report.to_chart().to_svg(), picture)?,
        };
        self.output.write(&content, out)
    }

    /// The estimator's curve, or why there is none.
    fn curve_of(
        &self,
        estimator: &mut dyn Estimator,
        references: u64,
    ) -> anyhow::Result<MissRatioCurve> {
        estimator.curve().map_err(|error| match error {
            CurveError::Empty if references > 0 => anyhow::anyhow!(
                "none of the trace's {references} references was sampled: a higher --rate sees more"
            ),
            error => {
                anyhow::Error::new(error).context(format!("no curve of '{}'", self.trace_name()))
            }
        })
    }

    /// What errors call the trace.
    fn trace_name(&self) -> String {
        match self.trace.trace.to_str() {
            Some("-") => "standard input".to_owned(),
            _ => self.trace.trace.display().to_string(),
        }
    }

    /// The trace's name without folder and ending.
    fn name(&self) -> String {
        if self.trace.trace == Path::new("-") {
            return self.trace_name();
        }
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
