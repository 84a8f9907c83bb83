//! Curves as numpy arrays, Arrow data and JSON.

use std::sync::Arc;

use arrow_array::{ArrayRef, Float64Array, RecordBatch, StructArray, UInt64Array};
use arrow_schema::{DataType, Field};
use numpy::IntoPyArray as _;
use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, PageSize, WorkingSet};
use plimsoll_protocol::curve_json::CurveJson;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict, PyType};
use pyo3_arrow::error::PyArrowResult;
use pyo3_arrow::ffi::{ArrayIterator, to_stream_pycapsule};

use crate::errors::{self, OrRaise as _};
use crate::options;

/// A point of a curve: the miss ratio from `size_pages` on, and the limits of its 95 % band.
#[pyclass(frozen, get_all, eq, module = "plimsoll_mrc")]
#[derive(PartialEq)]
pub(crate) struct Point {
    size_pages: u64,
    ratio: f64,
    lower: f64,
    upper: f64,
}

#[pymethods]
impl Point {
    #[new]
    fn new(
        #[pyo3(from_py_with = options::whole)] size_pages: u64,
        ratio: f64,
        lower: f64,
        upper: f64,
    ) -> Self {
        Self {
            size_pages,
            ratio,
            lower,
            upper,
        }
    }

    /// For `pickle` and `copy`.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, (u64, f64, f64, f64)) {
        let point = slf.get();
        let fields = (point.size_pages, point.ratio, point.lower, point.upper);
        (slf.get_type(), fields)
    }

    fn __repr__(&self) -> String {
        let Self {
            size_pages,
            ratio,
            lower,
            upper,
        } = self;
        format!("Point(size_pages={size_pages}, ratio={ratio}, lower={lower}, upper={upper})")
    }
}

/// A miss-ratio curve: the share of references that miss in an LRU memory, by its size in pages.
///
/// Ratios do not rise with the size; between two sizes, that of the smaller one holds. `lower` and `upper` are the
/// limits of the 95 % confidence band, equal to `ratios` if the curve is exact. The arrays are read-only.
/// A curve is also a table for Arrow (`__arrow_c_stream__`) with the columns `size_pages`, `miss_ratio`, `low` and `high`.
///
/// >>> curve = Estimator("lru").update([1, 2, 3, 1, 2, 3]).curve()
/// >>> curve.sizes, curve.ratios
/// (array([0, 3], dtype=uint64), array([1. , 0.5]))
/// >>> curve.at(3)
/// Point(size_pages=3, ratio=0.5, lower=0.5, upper=0.5)
#[pyclass(frozen, eq, module = "plimsoll_mrc")]
pub(crate) struct Curve {
    pub(crate) curve: MissRatioCurve,
    pub(crate) page_size: PageSize,
    /// Memory of the VM while it was observed.
    pub(crate) baseline: Option<PageCount>,
    /// `sizes`, `ratios`, `lower` and `upper`.
    columns: PyOnceLock<[Py<PyAny>; 4]>,
}

impl PartialEq for Curve {
    fn eq(&self, other: &Self) -> bool {
        self.curve == other.curve && self.page_size == other.page_size
    }
}

impl Curve {
    pub(crate) fn new(curve: MissRatioCurve, page_size: PageSize) -> Self {
        Self {
            curve,
            page_size,
            baseline: None,
            columns: PyOnceLock::new(),
        }
    }

    fn with(&self, curve: MissRatioCurve) -> Self {
        Self {
            baseline: self.baseline,
            ..Self::new(curve, self.page_size)
        }
    }

    pub(crate) fn json(&self, vm: &str) -> CurveJson {
        CurveJson::new(vm, self.page_size, self.baseline, &self.curve)
    }

    fn sizes_of_points(&self) -> Vec<u64> {
        let points = self.curve.points().iter();
        points.map(|point| point.size.0).collect()
    }

    fn values(&self, value: impl Fn(&CurvePoint) -> f64) -> Vec<f64> {
        self.curve.points().iter().map(value).collect()
    }

    fn column(&self, py: Python<'_>, index: usize) -> PyResult<Py<PyAny>> {
        let columns = self.columns.get_or_try_init(py, || {
            let columns = [
                self.sizes_of_points().into_pyarray(py).into_any(),
                self.values(|point| point.miss_ratio)
                    .into_pyarray(py)
                    .into_any(),
                self.values(|point| point.low).into_pyarray(py).into_any(),
                self.values(|point| point.high).into_pyarray(py).into_any(),
            ];
            for column in &columns {
                column.call_method1("setflags", (false,))?;
            }
            PyResult::Ok(columns.map(Bound::unbind))
        })?;
        Ok(columns[index].clone_ref(py))
    }

    /// A thousand even sizes up to the largest.
    fn even_sizes(&self) -> PyResult<Vec<PageCount>> {
        let last = self.curve.points().last().map_or(0, |point| point.size.0);
        let steps = last.clamp(1, 1000);
        let size = |step| u128::from(last) * u128::from(step) / u128::from(steps);
        let sizes = (1..=steps).map(|step| u64::try_from(size(step)).map(PageCount));
        Ok(sizes.collect::<Result<_, _>>()?)
    }
}

#[pymethods]
impl Curve {
    /// Sizes in pages, rising: uint64.
    #[getter]
    fn sizes(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.column(py, 0)
    }

    /// Miss ratios from these sizes on, 0.0 to 1.0.
    #[getter]
    fn ratios(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.column(py, 1)
    }

    /// Lower limits of the 95 % band.
    #[getter]
    fn lower(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.column(py, 2)
    }

    /// Upper limits of the 95 % band.
    #[getter]
    fn upper(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.column(py, 3)
    }

    /// Number of references behind the curve; of those in the sample, if it is of a sample.
    #[getter]
    fn references(&self) -> u64 {
        self.curve.references()
    }

    /// Bytes in a page.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.page_size.bytes()
    }

    /// The point at a size: a number of pages, or text with a unit such as "512M". Below the smallest size, the ratio is 1.
    fn at(&self, size: &Bound<'_, PyAny>) -> PyResult<Point> {
        let point = self.curve.at(options::size(size, self.page_size)?);
        Ok(Point {
            size_pages: point.size.0,
            ratio: point.miss_ratio,
            lower: point.low,
            upper: point.high,
        })
    }

    /// The curve at exactly these sizes, which must rise: a list, of pages or text with units.
    ///
    /// >>> Estimator("lru").update([1, 2, 3, 1, 2, 3]).curve().at_sizes([1, 2, "12K", "1M"]).ratios
    /// array([1. , 1. , 0.5, 0.5])
    fn at_sizes(&self, sizes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let sizes = options::sizes(sizes, self.page_size)?;
        if sizes.is_empty() {
            return Err(no_sizes());
        }
        Ok(self.with(self.curve.at_sizes(&sizes).or_raise()?))
    }

    /// A curve of at most `points` points, at least 2, that follows this one.
    fn thinned(&self, #[pyo3(from_py_with = options::whole)] points: u64) -> Self {
        let points = usize::try_from(points).unwrap_or(usize::MAX);
        self.with(self.curve.thinned(points))
    }

    /// The smallest size in pages with at most this miss ratio, the working set at 5 %; None if there is none.
    #[pyo3(signature = (ratio=WorkingSet::MISS_RATIO), text_signature = "(self, ratio=0.05)")]
    fn size_for(&self, ratio: f64) -> PyResult<Option<u64>> {
        if ratio.is_nan() {
            return Err(errors::option(
                "a miss ratio is a number; got nan".to_owned(),
            ));
        }
        Ok(self.curve.size_for(ratio).map(|size| size.0))
    }

    /// The mean of the absolute differences from another curve of the same page size, at `sizes` (as in `at_sizes`), or at a thousand
    /// even sizes up to the largest of the other.
    #[pyo3(signature = (other, sizes=None))]
    fn mean_absolute_error(&self, other: &Self, sizes: Option<&Bound<'_, PyAny>>) -> PyResult<f64> {
        let (mine, others) = (self.page_bytes(), other.page_bytes());
        if mine != others {
            return Err(errors::curve(format!(
                "this curve has pages of {mine} bytes, the other of {others}"
            )));
        }
        let sizes = match sizes {
            Some(sizes) => options::sizes(sizes, self.page_size)?,
            None => other.even_sizes()?,
        };
        let distance = self.curve.distance(&other.curve, sizes);
        let distance = distance.ok_or_else(no_sizes)?;
        Ok(distance.mean_absolute_error)
    }

    /// The curve as JSON, as `plimsoll mrc -o json` writes it with all points, and `plimsoll plan` reads it.
    #[pyo3(signature = (vm="curve"))]
    fn to_json(&self, vm: &str) -> PyResult<String> {
        serde_json::to_string(&self.json(vm)).or_raise()
    }

    /// A curve from such JSON.
    ///
    /// >>> curve = Estimator("lru").update([1, 2, 3, 1, 2, 3]).curve()
    /// >>> Curve.from_json(curve.to_json()) == curve
    /// True
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        let json: CurveJson = serde_json::from_str(text).or_raise()?;
        let page_size = PageSize::new(json.page_bytes).or_raise()?;
        Ok(Self {
            baseline: json.baseline_pages.map(PageCount),
            ..Self::new(json.to_curve().or_raise()?, page_size)
        })
    }

    /// Draws the curve with its band on matplotlib axes, those of the current figure by default, and returns the axes.
    ///
    /// Sizes are in MiB. All curves on the axes end at the same size, beyond the last point of any. Other arguments are those of
    /// `Axes.step`.
    #[pyo3(signature = (ax=None, **kwargs))]
    fn plot<'py>(
        slf: &Bound<'py, Self>,
        ax: Option<Bound<'py, PyAny>>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let module = slf.py().import("plimsoll_mrc._plot")?;
        module.call_method("plot", (slf, ax), kwargs)
    }

    /// The curve as a stream of one record batch, for pandas, Polars, pyarrow and DuckDB.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyCapsule>>,
    ) -> PyArrowResult<Bound<'py, PyCapsule>> {
        let column = |values| -> ArrayRef { Arc::new(Float64Array::from(values)) };
        let table = RecordBatch::try_from_iter([
            (
                "size_pages",
                Arc::new(UInt64Array::from(self.sizes_of_points())) as ArrayRef,
            ),
            ("miss_ratio", column(self.values(|point| point.miss_ratio))),
            ("low", column(self.values(|point| point.low))),
            ("high", column(self.values(|point| point.high))),
        ])?;
        let of_table = DataType::Struct(table.schema().fields().clone());
        let field = Arc::new(Field::new("", of_table, false));
        let table: ArrayRef = Arc::new(StructArray::from(table));
        let stream = ArrayIterator::new([Ok(table)], field);
        to_stream_pycapsule(py, Box::new(stream), requested_schema)
    }

    /// For `pickle` and `copy`: `from_json` is called with the JSON.
    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyType>,))> {
        let text = slf.get().to_json("curve")?;
        let call = slf.py().import("operator")?.getattr("methodcaller")?;
        Ok((call.call1(("from_json", text))?, (slf.get_type(),)))
    }

    fn __len__(&self) -> usize {
        self.curve.points().len()
    }

    fn __repr__(&self) -> String {
        format!(
            "<Curve of {} references: {} points, {} bytes a page>",
            self.curve.references(),
            self.curve.points().len(),
            self.page_size.bytes()
        )
    }
}

fn no_sizes() -> PyErr {
    errors::option("sizes: there are none".to_owned())
}
