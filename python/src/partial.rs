//! Partial states of slices as bytes, for any engine that distributes work.

use std::sync::{Mutex, PoisonError};

use plimsoll_estimator::Partial;
use plimsoll_estimator::registry::algorithm;
use plimsoll_flow::PageSize;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict};

use crate::curve::Curve;
use crate::errors::{OrRaise as _, Raised, signals};
use crate::options;
use crate::references;

/// What a slice of a stream contributes to the curve of the whole stream: a partial state, as bytes.
///
/// `refs` are the slice's references in any form that `Estimator.update` takes, an iterator such as `read_trace` included.
/// Estimators with partial states are `lru`, `shards` and `shards-max`. `start` is the number of references of the stream
/// before the slice: `shards` needs it at rates from 1/1024 on, and otherwise it only serves to check the order. Slices may
/// be mapped anywhere, in any order and more than once: the result depends on the arguments alone.
///
/// >>> parts = [map_batch([1, 2, 3], "lru"), map_batch([1, 2, 3], "lru")]
/// >>> finish(merge(parts)).at(3).ratio
/// 0.5
#[pyfunction]
#[pyo3(signature = (refs, estimator="shards", *, start=None, page_bytes=4096, **options))]
pub(crate) fn map_batch<'py>(
    refs: &Bound<'py, PyAny>,
    estimator: &str,
    #[pyo3(from_py_with = options::whole_or_none)] start: Option<u64>,
    #[pyo3(from_py_with = options::whole)] page_bytes: u64,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let row = algorithm(estimator).or_raise()?;
    let page_size = PageSize::new(page_bytes).or_raise()?;
    let settings = options::settings(options, page_size, |name| row.option(name))?;
    let of = row.slice(&settings).or_raise()?;
    let partial = Mutex::new(Partial::new(of, page_size, start).or_raise()?);
    references::observe(refs, &|pages| {
        let mut partial = partial.lock().unwrap_or_else(PoisonError::into_inner);
        partial.observe(pages);
        Ok(())
    })?;
    let partial = partial.into_inner().unwrap_or_else(PoisonError::into_inner);
    let py = refs.py();
    let bytes = py.detach(|| partial.into_bytes());
    Ok(PyBytes::new(py, &bytes))
}

/// One partial state from those of consecutive slices, given in the order of the stream: a list, or any iterable, of bytes.
///
/// Merging is associative: slices may be merged in any groups of neighbours.
#[pyfunction]
pub(crate) fn merge<'py>(parts: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let py = parts.py();
    let mut merged: Option<Partial> = None;
    for part in parts.try_iter()? {
        let part: PyBackedBytes = part?.extract()?;
        merged = Some(
            py.detach(|| match merged.take() {
                None => Partial::from_bytes_checked(&part, signals),
                Some(mut merged) => {
                    merged.append_checked(Partial::parse(&part)?, signals)?;
                    Ok(merged)
                }
            })
            .or_raise()?,
        );
        py.check_signals()?;
    }
    let merged = merged.ok_or_else(|| crate::errors::partial("there are no parts".to_owned()))?;
    let bytes = py.detach(|| merged.into_bytes());
    Ok(PyBytes::new(py, &bytes))
}

/// The curve of the stream of which all slices were merged: to the last bit that of the estimator itself.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "borrowed from Python")]
pub(crate) fn finish(py: Python<'_>, part: PyBackedBytes) -> PyResult<Curve> {
    let curve = py.detach(|| {
        let partial = Partial::from_bytes_checked(&part, signals)?;
        let curve = partial.curve_checked(signals)?;
        Ok::<_, Raised>((curve, partial.page_size()))
    });
    let (curve, page_size) = curve.or_raise()?;
    Ok(Curve::new(curve, page_size))
}
