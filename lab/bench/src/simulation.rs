//! Eviction policies simulated on samples of recorded traces, beside full simulation.
//!
//! Errors are mean absolute differences from the simulation of all references, at even sizes up to the footprint, and means over
//! seeds. Rates are those of reading a sample into memory and simulating one policy at all sizes.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use plimsoll_estimator::simulation::{CACHE_POLICIES, CachePolicyRow, MiniSim, SimulatedPoint};
use plimsoll_flow::{PageCount, ReferenceBatch, Source};
use plimsoll_source::{Options, open};

use crate::measure::{Clock, Watch, at_most};
use crate::{Cli, title};

/// Measure simulations of eviction policies on samples.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Traces
    #[arg(required = true)]
    traces: Vec<PathBuf>,
    /// Sizes of each curve
    #[arg(long, default_value_t = 50)]
    sizes: u64,
    /// Rates of the samples
    #[arg(long, value_delimiter = ',', default_value = "0.1,0.01")]
    rates: Vec<f64>,
}

/// Mean error of a policy on a trace, at most, at the largest rate.
const ERROR: f64 = 0.01;

pub(crate) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "Policies on samples: mean absolute error at {} sizes, million references a second",
            args.sizes
        ),
    )?;
    for path in &args.traces {
        let batches = batches(path)?;
        let references: usize = batches.iter().map(ReferenceBatch::len).sum();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !cli.wants(&name) {
            continue;
        }
        let whole = observed(1.0, 0, &batches)?;
        let footprint = whole.footprint().0;
        let steps = args.sizes.clamp(1, footprint);
        let sizes = (1..=steps).map(|step| PageCount(footprint * step / steps));
        let sizes: Vec<_> = sizes.collect();
        writeln!(
            out,
            "\n{name}: {references} references to {footprint} pages"
        )?;
        write!(out, "{:<12}{:>12}", "policy", "full, M/s")?;
        for rate in &args.rates {
            write!(out, "{:>14}{:>10}", format!("error at {rate}"), "M/s")?;
        }
        writeln!(out)?;
        for row in CACHE_POLICIES {
            let watch = Watch::start(Clock::Cpu);
            let truth = whole.points(row, &sizes)?;
            let speed = references as f64 / 1e6 / watch.seconds();
            write!(out, "{:<12}{speed:>12.2}", row.name)?;
            let mut first_error = None;
            for &rate in &args.rates {
                let (error, speed) = sampled(cli, rate, row, &batches, &sizes, &truth)?;
                write!(out, "{error:>14.4}{speed:>10.1}")?;
                first_error.get_or_insert(error);
            }
            let verdict = first_error.map(|error| at_most(error, ERROR, ""));
            writeln!(out, "  {}", verdict.unwrap_or_default())?;
            out.flush()?;
        }
    }
    Ok(())
}

fn batches(path: &Path) -> anyhow::Result<Vec<ReferenceBatch>> {
    let mut source = open(path, &Options::default()).with_context(|| path.display().to_string())?;
    let mut batches = Vec::new();
    loop {
        let mut batch = ReferenceBatch::new();
        if !source.next_batch(&mut batch)? {
            return Ok(batches);
        }
        batches.push(batch);
    }
}

fn observed(rate: f64, seed: u64, batches: &[ReferenceBatch]) -> anyhow::Result<MiniSim> {
    let mut simulation = MiniSim::new(rate, seed)?;
    for batch in batches {
        simulation.observe(batch.pages());
    }
    Ok(simulation)
}

/// Mean error over seeds, and the mean speed.
fn sampled(
    cli: &Cli,
    rate: f64,
    row: &CachePolicyRow,
    batches: &[ReferenceBatch],
    sizes: &[PageCount],
    truth: &[SimulatedPoint],
) -> anyhow::Result<(f64, f64)> {
    let (mut error, mut seconds) = (0.0, 0.0);
    let runs = cli.runs.max(1);
    for seed in 1..=runs {
        let watch = Watch::start(Clock::Cpu);
        let simulation = observed(rate, seed.into(), batches)?;
        let points = simulation.points(row, sizes)?;
        seconds += watch.seconds();
        let pairs = points.iter().zip(truth);
        let sum: f64 = pairs
            .map(|(point, truth)| (point.miss_ratio - truth.miss_ratio).abs())
            .sum();
        error += sum / sizes.len() as f64;
    }
    let references: usize = batches.iter().map(ReferenceBatch::len).sum();
    let runs = f64::from(runs);
    Ok((error / runs, references as f64 / 1e6 / (seconds / runs)))
}
