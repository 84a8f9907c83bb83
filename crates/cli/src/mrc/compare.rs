//! `mrc --compare`: estimators beside the exact curve.
//!
//! The trace is read once; each estimator is timed on its own by the CPU time of the process, so threads count in full.

use std::io::Write;

use plimsoll_estimator::Comparison;
use plimsoll_estimator::registry::BuiltEstimator;
use plimsoll_observe::compare::cpu_time;
use plimsoll_plot::Figure as _;
use plimsoll_report::trace::ComparisonReport;

use super::input::{no_curve, read};
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;

/// Reads the trace into all of them and gives one table.
pub(super) fn run(
    trace: &TraceArgs,
    estimators: Vec<BuiltEstimator>,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    view.check_compared()?;
    let mut comparison = Comparison::new(estimators, cpu_time);
    let mut source = trace.open()?;
    let references = read(&mut source, |batch| comparison.observe(batch.pages()))?;
    let compared = comparison.finish();
    let report = ComparisonReport {
        name: trace.stem(),
        page_size: trace.page_size(),
        compared: compared.map_err(|error| no_curve(trace, error, references))?,
    };
    report.write(&view.output, out)
}
