//! `mrc --prefix`: the curve of requests whose blocks hit in order.

use std::io::Write;

use anyhow::Context as _;
use plimsoll_estimator::{PrefixLru, PrefixPages};
use plimsoll_output::bail_usage;
use plimsoll_source::{Grouping, Options};

use super::choice::EstimatorArgs;
use super::input::{curve_of, read};
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;

/// Reads the trace and prints its curve.
pub(super) fn run(
    trace: &TraceArgs,
    estimator: &EstimatorArgs,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    if estimator.is_exact_lru() && !estimator.is_default() {
        bail_usage!("--prefix with the estimator lru is exact: leave out its options");
    }
    let mut source = trace.open_with(&Options {
        groups: Some(Grouping::Request),
        ..trace.options()
    })?;
    let (method, references, curve) = if estimator.is_exact_lru() {
        let mut lru = PrefixLru::new();
        let references = read(&mut source, |batch| {
            lru.observe(batch.pages(), &batch.details().groups);
        })?;
        let curve = lru.curve();
        let curve = curve.with_context(|| format!("no curve of '{}'", trace.label()))?;
        ("exact LRU of prefixes".to_owned(), references, curve)
    } else {
        let mut built = estimator.build_one(trace.page_size())?;
        let mut prefixes = PrefixPages::new();
        let references = read(&mut source, |batch| {
            let pages = prefixes.number(batch.pages(), &batch.details().groups);
            built.estimator.observe(pages);
        })?;
        let curve = curve_of(trace, &mut *built.estimator, references)?;
        (format!("{} of prefixes", built.label), references, curve)
    };
    view.write(trace, method, references, &curve, out)
}
