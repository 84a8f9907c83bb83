//! Estimators of curves, from the registry.

use std::sync::{Mutex, MutexGuard, PoisonError};

use plimsoll_estimator::registry::{ALGORITHMS, Algorithm, BuiltEstimator, algorithm};
use plimsoll_flow::{PageSize, ReferenceBatch};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::curve::Curve;
use crate::errors::{self, OrRaise as _};
use crate::options;
use crate::references;

/// An estimator of a miss-ratio curve that is fed references batch by batch.
///
/// `name` and `options` are those of `plimsoll mrc --estimator`, with `_` for `-`; `estimators()` lists them. Sizes among
/// the options are pages, or text with a unit such as "512M". Threads may share an estimator: it is locked for about a
/// million references at a time.
///
/// >>> import numpy as np
/// >>> estimator = Estimator("shards", rate=0.1, seed=1)
/// >>> for start in range(0, 1_000_000, 100_000):
/// ...     batch = np.arange(start, start + 100_000) % 50_000
/// ...     _ = estimator.update(batch)
/// >>> estimator.references
/// 1000000
/// >>> round(estimator.curve().at(60_000).ratio, 3)
/// 0.05
#[pyclass(frozen, module = "plimsoll_mrc")]
pub(crate) struct Estimator {
    row: &'static Algorithm,
    page_size: PageSize,
    state: Mutex<State>,
}

struct State {
    built: BuiltEstimator,
    references: u64,
}

impl Estimator {
    fn state(&self) -> MutexGuard<'_, State> {
        // An estimator that panicked raised that already, and stays as it was.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a function with the state, without the global interpreter lock: whoever holds the state may want that.
    fn with<T: Send>(&self, py: Python<'_>, f: impl FnOnce(&mut State) -> T + Send) -> T {
        py.detach(|| f(&mut self.state()))
    }
}

#[pymethods]
impl Estimator {
    #[new]
    #[pyo3(signature = (name="shards", *, page_bytes=4096, **options))]
    fn new(
        name: &str,
        #[pyo3(from_py_with = options::whole)] page_bytes: u64,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let row = algorithm(name).or_raise()?;
        let page_size = PageSize::new(page_bytes).or_raise()?;
        let settings = options::settings(options, page_size, |name| row.option(name))?;
        let built = row.build(&settings).or_raise()?;
        Ok(Self {
            row,
            page_size,
            state: Mutex::new(State {
                built,
                references: 0,
            }),
        })
    }

    /// Processes the next references, and returns the estimator.
    ///
    /// `refs` are page numbers, in order: a numpy array of integers, Arrow data (`__arrow_c_array__` or
    /// `__arrow_c_stream__`, such as arrays of pyarrow and Series of Polars), a pandas Series, a list, or an iterator of
    /// these. Contiguous 64-bit integers are not copied. After an exception, the references before it have been counted.
    ///
    /// >>> Estimator("lru").update([1, 2, 3]).update(iter([[1, 2], [3]])).curve().at(3).ratio
    /// 0.5
    fn update<'py>(slf: Bound<'py, Self>, refs: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Self>> {
        let this = slf.get();
        references::observe(refs, &|pages| {
            let mut state = this.state();
            for batch in pages.chunks(ReferenceBatch::CAPACITY) {
                state.built.estimator.observe(batch);
            }
            state.references += pages.len() as u64;
            Ok(())
        })?;
        Ok(slf)
    }

    /// The curve of all references so far. More may follow.
    fn curve(&self, py: Python<'_>) -> PyResult<Curve> {
        let curve = self.with(py, |state| state.built.estimator.curve());
        Ok(Curve::new(curve.or_raise()?, self.page_size))
    }

    /// The estimator's name.
    #[getter]
    fn name(&self) -> &'static str {
        self.row.name
    }

    /// The name in tables, with the main setting: "SHARDS at rate 1/100".
    #[getter]
    fn label(&self, py: Python<'_>) -> String {
        self.with(py, |state| state.built.label.clone())
    }

    /// Number of references so far; a curve of a sampling estimator has fewer.
    #[getter]
    fn references(&self, py: Python<'_>) -> u64 {
        self.with(py, |state| state.references)
    }

    /// Bytes of memory that the estimator has allocated.
    #[getter]
    fn memory_bytes(&self, py: Python<'_>) -> usize {
        self.with(py, |state| state.built.estimator.memory_bytes())
    }

    /// The smallest size in pages that the curve resolves; below it only the band has a meaning.
    #[getter]
    fn smallest_size(&self, py: Python<'_>) -> u64 {
        self.with(py, |state| state.built.estimator.smallest_size().0)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        self.with(py, |state| {
            format!(
                "<Estimator {}: {}, {} references>",
                self.row.name, state.built.label, state.references
            )
        })
    }
}

/// The estimators of curves: a dictionary of each by its name.
///
/// Of each, its `help`, `options` (with `help`, `kind` and `default`, which is None for a required option), whether it
/// `is_exact`, its `cost` and the paper (`source`).
///
/// >>> sorted(estimators()["shards"]["options"])
/// ['rate', 'seed']
#[pyfunction]
pub(crate) fn estimators(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let rows = PyDict::new(py);
    for row in ALGORITHMS {
        let entry = PyDict::new(py);
        entry.set_item("help", errors::in_python(row.help))?;
        entry.set_item("options", options::described(py, row.options)?)?;
        entry.set_item("is_exact", row.is_exact)?;
        entry.set_item("cost", row.cost)?;
        entry.set_item("source", row.source)?;
        rows.set_item(row.name, entry)?;
    }
    Ok(rows)
}
