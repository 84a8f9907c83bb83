//! Estimators of working sets, from the registry.

use std::sync::{Mutex, MutexGuard, PoisonError};

use plimsoll_estimator::registry::{Feed, METHODS, Method, OptionValue, method};
use plimsoll_flow::{PageCount, PageSize, WorkingSetBound};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};

use crate::errors::{self, OrRaise as _};
use crate::options;
use crate::references;

/// The arguments of a [`WorkingSet`].
type Fields = (
    u64,
    String,
    Option<u64>,
    Option<u64>,
    Option<u64>,
    Option<u64>,
);

/// A working-set size in pages.
///
/// `bound` is "estimate", "at_least" or "at_most". `lower` and `upper` are the limits of the 95 % confidence interval,
/// None for an estimator that does not sample. `settled_interval` is the number of the interval, from 0, at whose end the
/// size was first constant, and `settled_pages` the size there; None if it has not settled, or the estimator does not
/// wait for that.
#[pyclass(frozen, get_all, eq, module = "plimsoll_mrc")]
#[derive(PartialEq)]
pub(crate) struct WorkingSet {
    size_pages: u64,
    bound: String,
    lower: Option<u64>,
    upper: Option<u64>,
    settled_interval: Option<u64>,
    settled_pages: Option<u64>,
}

#[pymethods]
impl WorkingSet {
    #[new]
    #[pyo3(signature = (size_pages, bound, lower=None, upper=None, settled_interval=None, settled_pages=None))]
    fn new(
        #[pyo3(from_py_with = options::whole)] size_pages: u64,
        bound: String,
        #[pyo3(from_py_with = options::whole_or_none)] lower: Option<u64>,
        #[pyo3(from_py_with = options::whole_or_none)] upper: Option<u64>,
        #[pyo3(from_py_with = options::whole_or_none)] settled_interval: Option<u64>,
        #[pyo3(from_py_with = options::whole_or_none)] settled_pages: Option<u64>,
    ) -> PyResult<Self> {
        let bounds = [
            WorkingSetBound::Estimate,
            WorkingSetBound::AtLeast,
            WorkingSetBound::AtMost,
        ]
        .map(WorkingSetBound::name);
        if !bounds.contains(&&*bound) {
            return Err(errors::option(format!(
                "bound: {bound:?}: expected {}",
                bounds.join(", ")
            )));
        }
        Ok(Self {
            size_pages,
            bound,
            lower,
            upper,
            settled_interval,
            settled_pages,
        })
    }

    /// For `pickle` and `copy`.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, Fields) {
        let set = slf.get();
        let fields = (
            set.size_pages,
            set.bound.clone(),
            set.lower,
            set.upper,
            set.settled_interval,
            set.settled_pages,
        );
        (slf.get_type(), fields)
    }

    fn __repr__(&self) -> String {
        let Self {
            size_pages, bound, ..
        } = self;
        format!("WorkingSet(size_pages={size_pages}, bound='{bound}')")
    }
}

/// An estimator of a working set that is fed pages, interval by interval.
///
/// `name` and `options` are those of `plimsoll wss --estimator`, with `_` for `-`; `working_set_estimators()` lists them,
/// with the pages that each is to be fed. Threads may share an estimator.
///
/// >>> estimator = WorkingSetEstimator("truth", window=2)
/// >>> for pages in [0, 1, 2], [1, 2, 3], [3]:
/// ...     _ = estimator.update(pages)
/// ...     print(estimator.end_interval())
/// {'touched_pages': 3, 'truth_pages': 3}
/// {'touched_pages': 3, 'truth_pages': 4}
/// {'touched_pages': 1, 'truth_pages': 3}
/// >>> estimator.working_set
/// WorkingSet(size_pages=3, bound='estimate')
#[pyclass(frozen, module = "plimsoll_mrc")]
pub(crate) struct WorkingSetEstimator {
    row: &'static Method,
    /// Size of the memory whose pages it is to be fed, if it has that.
    memory: Option<PageCount>,
    estimator: Mutex<Box<dyn plimsoll_estimator::working_set::WorkingSetEstimator>>,
}

type Locked<'a> = MutexGuard<'a, Box<dyn plimsoll_estimator::working_set::WorkingSetEstimator>>;

impl WorkingSetEstimator {
    fn estimator(&self) -> Locked<'_> {
        // As in `Estimator::state`.
        self.estimator
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl WorkingSetEstimator {
    #[new]
    #[pyo3(signature = (name, *, page_bytes=4096, **options))]
    fn new(
        name: &str,
        #[pyo3(from_py_with = options::whole)] page_bytes: u64,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let row = method(name).or_raise()?;
        let page_size = PageSize::new(page_bytes).or_raise()?;
        let settings = options::settings(options, page_size, |name| row.option(name))?;
        let estimator = Mutex::new(row.build(&settings).or_raise()?);
        let memory = match (row.feed, settings.get("memory")) {
            (Feed::RamPages, Some(OptionValue::Size(memory))) => Some(memory),
            _ => None,
        };
        if memory == Some(PageCount(0)) {
            return Err(errors::option("memory: it has no pages".to_owned()));
        }
        Ok(Self {
            row,
            memory,
            estimator,
        })
    }

    /// Processes pages of the present interval, and returns the estimator. `pages` are as in `Estimator.update`; those of `esx`
    /// are numbered from 0 to the end of its `memory`.
    fn update<'py>(slf: Bound<'py, Self>, pages: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Self>> {
        let this = slf.get();
        references::observe(pages, &|pages| {
            if let Some(memory) = this.memory
                && let Some(page) = pages.iter().find(|page| page.0 >= memory.0)
            {
                return Err(errors::references(format!(
                    "page {} is beyond the memory of {memory} pages",
                    page.0
                )));
            }
            this.estimator().observe(pages);
            Ok(())
        })?;
        Ok(slf)
    }

    /// Ends an interval. Returns its results by name; None for one that is not known yet.
    fn end_interval<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let values = py.detach(|| self.estimator().end_interval());
        let results = PyDict::new(py);
        for (column, value) in self.row.columns.iter().zip(values) {
            results.set_item(column, value)?;
        }
        Ok(results)
    }

    /// The working set so far; None before the first interval ended.
    #[getter]
    fn working_set(&self, py: Python<'_>) -> Option<WorkingSet> {
        py.detach(|| {
            let estimator = self.estimator();
            let found = estimator.working_set()?;
            let (confidence, settled) = (estimator.confidence(), estimator.settled());
            Some(WorkingSet {
                size_pages: found.size.0,
                bound: found.bound.name().to_owned(),
                lower: confidence.map(|(low, _)| low.0),
                upper: confidence.map(|(_, high)| high.0),
                settled_interval: settled.map(|settled| settled.step),
                settled_pages: settled.map(|settled| settled.size.0),
            })
        })
    }

    /// The estimator's name.
    #[getter]
    fn name(&self) -> &'static str {
        self.row.name
    }

    fn __repr__(&self) -> String {
        format!("<WorkingSetEstimator {}>", self.row.name)
    }
}

/// The estimators of working sets: a dictionary of each by its name.
///
/// Of each, its `help`, the pages that it is to be fed (`feed`), `options` as in `estimators`, the names of the results of an
/// interval (`columns`), and the paper (`source`).
///
/// >>> working_set_estimators()["esx"]["options"]["memory"]["default"] is None
/// True
#[pyfunction]
pub(crate) fn working_set_estimators(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let rows = PyDict::new(py);
    for row in METHODS {
        let entry = PyDict::new(py);
        entry.set_item("help", errors::in_python(row.help))?;
        entry.set_item("feed", row.feed.help())?;
        entry.set_item("options", options::described(py, row.options)?)?;
        entry.set_item("columns", row.columns)?;
        entry.set_item("source", row.source)?;
        rows.set_item(row.name, entry)?;
    }
    Ok(rows)
}
