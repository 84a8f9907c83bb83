//! `mrc --prefix`: the curve of requests whose blocks hit in order.

use std::io::Write;

use anyhow::Context as _;
use plimsoll_estimator::PrefixLru;
use plimsoll_output::bail_usage;
use plimsoll_source::{Grouping, Options};

use super::choice::EstimatorArgs;
use super::input::read;
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;

/// Reads the trace and prints its curve.
pub(super) fn run(
    trace: &TraceArgs,
    estimator: &EstimatorArgs,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    if !estimator.is_default() {
        bail_usage!("--prefix is exact: leave out --estimator and its options");
    }
    let mut source = trace.open_with(&Options {
        groups: Some(Grouping::Request),
        ..trace.options()
    })?;
    let mut lru = PrefixLru::new();
    let references = read(&mut source, |batch| {
        lru.observe(batch.pages(), &batch.details().groups);
    })?;
    let curve = lru.curve();
    let curve = curve.with_context(|| format!("no curve of '{}'", trace.label()))?;
    let method = "exact LRU of prefixes".to_owned();
    view.write(trace, method, references, &curve, out)
}
