//! `mrc --object-sizes`: curves of objects over bytes, by requests and by requested bytes.

use std::io::Write;

use anyhow::Context as _;
use plimsoll_estimator::SizedCurves;
use plimsoll_flow::{PageSize, WorkingSet};
use plimsoll_plot::Figure as _;
use plimsoll_report::trace::SizedReport;
use plimsoll_source::{Column, Options};

use super::choice::EstimatorArgs;
use super::input::{read, unsampled};
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;

/// Reads the trace with its objects' sizes and prints both curves.
pub(super) fn run(
    trace: &TraceArgs,
    size_column: Option<&Column>,
    estimator: &EstimatorArgs,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut built = estimator.build_sized()?;
    let lru = &mut built.estimator;
    let mut source = trace.open_with(&Options {
        sizes: true,
        size_column: size_column.cloned(),
        ..trace.options()
    })?;
    let references = read(&mut source, |batch| {
        lru.observe(batch.pages(), &batch.details().sizes_bytes);
    })?;
    let curves = lru.curves().map_err(|error| unsampled(error, references));
    let SizedCurves {
        by_requests,
        by_bytes,
    } = curves.with_context(|| format!("no curve of '{}'", trace.label()))?;
    let working_set = by_requests.size_for(WorkingSet::MISS_RATIO);
    let end = by_requests.points().last().copied();
    // Sizes of these curves are bytes.
    let by_requests = view.select(&by_requests, PageSize::new(1)?)?;
    let sizes: Vec<_> = by_requests
        .points()
        .iter()
        .map(|point| point.size)
        .collect();
    let report = SizedReport {
        name: trace.stem(),
        method: built.label,
        references,
        sampled: lru.sampled_references(),
        footprint_bytes: lru.footprint_bytes(),
        working_set,
        end,
        by_bytes: by_bytes.at_sizes(&sizes)?,
        by_requests,
    };
    report.write(&view.output, out)
}
