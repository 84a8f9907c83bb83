//! Recorded traces as numpy arrays.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use numpy::{IntoPyArray as _, PyArray1};
use plimsoll_flow::{PageSize, ReferenceBatch, Source as _};
use plimsoll_source::{Options, open};
use pyo3::prelude::*;

use crate::errors::{self, OrRaise as _};
use crate::options;

/// The pages of a trace file: an iterator of numpy arrays of uint64, from `read_trace`.
///
/// Nothing but the present batch is kept in memory. After an exception, the trace is at its end.
#[pyclass(frozen, module = "plimsoll_mrc")]
pub(crate) struct Trace(Mutex<State>);

struct State {
    trace: plimsoll_source::Trace<'static>,
    batch: ReferenceBatch,
}

impl Trace {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Trace {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArray1<u64>>>> {
        let pages = py.detach(|| {
            let mut guard = self.state();
            let State { trace, batch } = &mut *guard;
            let more = trace.next_batch(batch)?;
            Ok::<Option<Vec<u64>>, plimsoll_source::SourceError>(
                more.then(|| batch.pages().iter().map(|page| page.0).collect()),
            )
        });
        Ok(pages.or_raise()?.map(|pages| pages.into_pyarray(py)))
    }

    /// The format, recognised or given.
    #[getter]
    fn format(&self, py: Python<'_>) -> &'static str {
        py.detach(|| self.state().trace.format().name())
    }

    /// Number of requests so far that made no reference because they neither read nor wrote.
    #[getter]
    fn skipped(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.state().trace.skipped())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("<Trace in format {}>", self.format(py))
    }
}

/// Opens a trace file, plain or compressed by bzip2, gzip, xz or zstd; "-" is standard input, `s3://BUCKET/KEY` an object of a store, found by the usual `AWS_` variables.
///
/// Formats and options are those of `plimsoll mrc`, and `row_groups`, a list of the only ones of a Parquet file to read, by their
/// numbers from 0. Without `format`, the file's name and first bytes decide.
///
/// >>> for pages in read_trace("loop.ids"):
/// ...     print(pages)
/// [1 2 3 1 2 3]
/// >>> Estimator("lru").update(read_trace("loop.ids")).curve().at(3).ratio
/// 0.5
#[pyfunction]
#[expect(
    clippy::needless_pass_by_value,
    clippy::too_many_arguments,
    reason = "named arguments in Python"
)]
#[pyo3(signature = (path, format=None, *, page_bytes=4096, page_column=None, key_column=None, row_groups=None, instructions=false, device=None, event=None))]
pub(crate) fn read_trace(
    py: Python<'_>,
    path: PathBuf,
    format: Option<&str>,
    #[pyo3(from_py_with = options::whole)] page_bytes: u64,
    page_column: Option<&str>,
    key_column: Option<&str>,
    #[pyo3(from_py_with = options::wholes_or_none)] row_groups: Option<Vec<usize>>,
    instructions: bool,
    device: Option<String>,
    event: Option<&str>,
) -> PyResult<Trace> {
    if page_column.is_some() && key_column.is_some() {
        return Err(errors::option(
            "page_column and key_column exclude each other".to_owned(),
        ));
    }
    let column = |column: Option<&str>| column.map(str::parse).transpose().map_err(errors::option);
    let options = Options {
        format: format.map(str::parse).transpose().or_raise()?,
        page_size: PageSize::new(page_bytes).or_raise()?,
        page_column: column(page_column)?,
        key_column: column(key_column)?,
        row_groups,
        instructions,
        device,
        block_event: event.map(str::parse).transpose().map_err(errors::option)?,
        ..Options::default()
    };
    let trace = py.detach(|| open(&path, &options)).or_raise()?;
    Ok(Trace(Mutex::new(State {
        trace,
        batch: ReferenceBatch::new(),
    })))
}
