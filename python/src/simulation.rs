//! Eviction policies besides LRU by simulation, and objects with sizes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use numpy::{IntoPyArray as _, PyArray1};
use plimsoll_estimator::SizedLru;
use plimsoll_estimator::simulation::{CACHE_POLICIES, MiniSim, cache_policy};
use plimsoll_flow::{PageSize, ReferenceBatch};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::curve::Curve;
use crate::errors::{self, OrRaise as _, signals};
use crate::options;
use crate::references::{self, PIECE};

/// Miss ratios of eviction policies at chosen sizes, by simulating small caches on a sample of the pages.
///
/// `cache_policies()` lists the policies. At `rate=1` every reference is simulated. Unlike a curve's, a policy's ratio may rise with the
/// size.
///
/// >>> simulation = Simulation(rate=1).update([1, 2, 3, 1, 2, 3])
/// >>> simulation.miss_ratios("fifo", [2, 3])
/// array([1. , 0.5])
/// >>> simulation.footprint_pages
/// 3
#[pyclass(frozen, module = "plimsoll_mrc")]
pub(crate) struct Simulation {
    page_size: PageSize,
    /// Shared with the calls of `miss_ratios` in progress, which do not lock it.
    state: Mutex<Arc<MiniSim>>,
}

impl Simulation {
    fn state(&self) -> MutexGuard<'_, Arc<MiniSim>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Simulation {
    #[new]
    #[pyo3(signature = (rate=0.1, *, seed=0, page_bytes=4096))]
    fn new(
        #[pyo3(from_py_with = options::rate)] rate: f64,
        #[pyo3(from_py_with = options::whole)] seed: u64,
        #[pyo3(from_py_with = options::whole)] page_bytes: u64,
    ) -> PyResult<Self> {
        let simulation = MiniSim::new(rate, seed);
        let simulation = simulation.map_err(|error| errors::option(error.to_string()))?;
        Ok(Self {
            page_size: PageSize::new(page_bytes).or_raise()?,
            state: Mutex::new(Arc::new(simulation)),
        })
    }

    /// Processes the next references, in any form that `Estimator.update` takes, and returns the simulation.
    fn update<'py>(slf: Bound<'py, Self>, refs: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Self>> {
        let this = slf.get();
        references::observe(refs, &|pages| {
            let mut state = this.state();
            let simulation = Arc::make_mut(&mut state);
            for batch in pages.chunks(ReferenceBatch::CAPACITY) {
                simulation.observe(batch);
            }
            Ok(())
        })?;
        Ok(slf)
    }

    /// The miss ratios of a policy at sizes in pages, or text such as "512M", in their order.
    fn miss_ratios<'py>(
        &self,
        py: Python<'py>,
        policy: &str,
        sizes: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<f64>>> {
        let row = cache_policy(policy).ok_or_else(|| {
            let known = CACHE_POLICIES.map(|row| row.name).join(", ");
            errors::option(format!("there is no policy '{policy}', only {known}"))
        })?;
        let sizes = options::sizes(sizes, self.page_size)?;
        let points = py.detach(|| {
            let simulation = Arc::clone(&self.state());
            simulation.points_checked(row, &sizes, signals)
        });
        let points = points.or_raise()?;
        let ratios: Vec<_> = points.iter().map(|point| point.miss_ratio).collect();
        Ok(ratios.into_pyarray(py))
    }

    /// Number of references so far.
    #[getter]
    fn references(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.state().references())
    }

    /// Number of distinct pages so far.
    #[getter]
    fn footprint_pages(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.state().footprint().0)
    }
}

/// The eviction policies that can be simulated: a dictionary of each by its name, with its `help` and the paper (`source`).
///
/// >>> list(cache_policies())
/// ['fifo', 'lru', 'arc', 's3-fifo', 'sieve', 'w-tinylfu']
#[pyfunction]
pub(crate) fn cache_policies(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let rows = PyDict::new(py);
    for row in CACHE_POLICIES {
        let entry = PyDict::new(py);
        entry.set_item("help", errors::in_python(row.help))?;
        entry.set_item("source", row.source)?;
        rows.set_item(row.name, entry)?;
    }
    Ok(rows)
}

/// The LRU curves of objects with sizes, by requests and by requested bytes. Sizes of the curves are bytes (pages of one byte).
///
/// `objects` and `sizes` are alike in length, and in any form that `Estimator.update` takes; they are copied once. `rate` is the
/// share of the objects to sample, chosen by `seed`.
///
/// >>> by_requests, by_bytes = object_mrc([1, 2, 2, 1], [100, 900, 900, 100])
/// >>> by_requests.at(900).ratio, by_bytes.at(900).ratio
/// (0.75, 0.55)
#[pyfunction]
#[pyo3(signature = (objects, sizes, *, rate=1.0, seed=0))]
pub(crate) fn object_mrc(
    py: Python<'_>,
    objects: &Bound<'_, PyAny>,
    sizes: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = options::rate)] rate: f64,
    #[pyo3(from_py_with = options::whole)] seed: u64,
) -> PyResult<(Curve, Curve)> {
    let lru = SizedLru::sampled(rate, seed);
    let mut lru = lru.map_err(|error| errors::option(error.to_string()))?;
    let [objects, sizes] = [objects, sizes].map(collected);
    let (objects, sizes) = (objects?, sizes?);
    if objects.len() != sizes.len() {
        return Err(errors::references(format!(
            "there are {} objects and {} sizes",
            objects.len(),
            sizes.len()
        )));
    }
    let sizes: Result<Vec<_>, _> = sizes.iter().map(|size| u32::try_from(size.0)).collect();
    let sizes =
        sizes.map_err(|_| errors::references("a size is 4 GiB or more, or negative".into()))?;
    for (objects, sizes) in objects.chunks(PIECE).zip(sizes.chunks(PIECE)) {
        py.detach(|| lru.observe(objects, sizes));
        py.check_signals()?;
    }
    let curves = py.detach(|| lru.curves_checked(signals)).or_raise()?;
    let byte = PageSize::new(1).or_raise()?;
    Ok((
        Curve::new(curves.by_requests, byte),
        Curve::new(curves.by_bytes, byte),
    ))
}

fn collected(from: &Bound<'_, PyAny>) -> PyResult<Vec<plimsoll_flow::PageNumber>> {
    let all = Mutex::new(Vec::new());
    references::observe(from, &|numbers| {
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend_from_slice(numbers);
        Ok(())
    })?;
    Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
}
