//! Reading a trace into an estimator.

use plimsoll_estimator::Estimator;
use plimsoll_flow::{CurveError, MissRatioCurve, ReferenceBatch, Source as _};
use plimsoll_source::Trace;

use crate::trace_args::{TraceArgs, reading_bar};

/// Hands a trace's batches on to its end, with a bar; returns the number of references.
pub(super) fn read(
    trace: &mut Trace,
    mut observe: impl FnMut(&ReferenceBatch),
) -> anyhow::Result<u64> {
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

/// The curve of an estimator that read so many references of a trace, or why there is none.
pub(super) fn curve_of(
    trace: &TraceArgs,
    estimator: &mut dyn Estimator,
    references: u64,
) -> anyhow::Result<MissRatioCurve> {
    let curve = estimator.curve();
    curve.map_err(|error| no_curve(trace, error, references))
}

/// Why so many references of a trace have no curve.
pub(super) fn no_curve(trace: &TraceArgs, error: CurveError, references: u64) -> anyhow::Error {
    match error {
        CurveError::Empty if references > 0 => unsampled(error, references),
        error => unsampled(error, references).context(format!("no curve of '{}'", trace.label())),
    }
}

/// The error of so many references: without any in the sample, what to do.
pub(super) fn unsampled(error: CurveError, references: u64) -> anyhow::Error {
    match error {
        CurveError::Empty if references == 0 => {
            anyhow::anyhow!("the trace has no references, so there is no miss ratio")
        }
        CurveError::Empty => anyhow::anyhow!(
            "none of the trace's {references} references was sampled: a higher --rate sees more"
        ),
        error => error.into(),
    }
}
