//! `mrc --cache-policy`: miss ratios of eviction policies at chosen sizes, simulated on a sample of the pages.

use std::io::Write;

use anyhow::Context as _;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use plimsoll_estimator::simulation::{CACHE_POLICIES, CachePolicyRow, MiniSim, cache_policy};
use plimsoll_flow::PageCount;
use plimsoll_output::exit::UsageError;
use plimsoll_output::{Format, bail_usage};
use plimsoll_plot::Figure as _;
use plimsoll_report::trace::SimulationReport;

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
    let names: Vec<_> = args.cache_policy.iter().map(|row| row.name).collect();
    let twice = (1..names.len()).find(|&at| names[..at].contains(&names[at]));
    if let Some(twice) = twice {
        bail_usage!("--cache-policy: {} is named twice", names[twice]);
    }
    let (rate, seed) = estimator.sample(RATE)?;
    let mut simulation = MiniSim::new(rate, seed).map_err(|error| UsageError(error.to_string()))?;
    let mut source = trace.open()?;
    let references = read(&mut source, |batch| simulation.observe(batch.pages()))?;
    let sizes = match &*view.sizes(trace.page_size())? {
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
    if unresolved > 0 && rate < 1.0 {
        eprintln!(
            "plimsoll: {unresolved} of {} sizes are below {resolved} pages, where the sample is too small to distinguish policies from LRU; \
             for them give a higher --rate, at most 1",
            sizes.len()
        );
    }
    let report = SimulationReport {
        name: trace.stem(),
        rate,
        references,
        sampled: simulation.sampled(),
        footprint: simulation.footprint(),
        page_size: trace.page_size(),
        sizes,
        policies,
    };
    report.write(&view.output, out)
}

/// Even sizes up to the footprint.
fn even_sizes(footprint: PageCount, view: &ViewArgs) -> Vec<PageCount> {
    let default = match view.output.format() {
        Format::Table => SIZES_OF_TABLE,
        _ => SIZES,
    };
    // More sizes than pages would be the same again.
    let steps = (view.points_or(default) as u64).min(footprint.0.max(1));
    let sizes = footprint.even_steps(steps);
    let mut sizes: Vec<_> = sizes.filter(|size| size.0 > 0).collect();
    sizes.dedup();
    sizes
}
