//! References in Python's memory: numpy arrays, Arrow data, and what converts to them.
//!
//! Contiguous 64-bit integers are read where they are. All others are widened in pieces. A number is the identity of
//! its page: signed numbers are taken by their 64 bits, so that -1 is the page 2^64 - 1.

use arrow_array::cast::AsArray as _;
use arrow_array::types::{
    Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, PrimitiveArray};
use arrow_schema::DataType;
use numpy::{
    PyArray1, PyArrayDescr, PyArrayDescrMethods as _, PyArrayMethods as _, PyUntypedArray,
    PyUntypedArrayMethods as _,
};
use plimsoll_flow::PageNumber;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyIterator, PyList, PySlice};
use pyo3_arrow::input::AnyArray;

use crate::errors;
use crate::sys::pages;

/// What receives references, from any thread, without the global interpreter lock. An error ends it.
pub(crate) type Observe<'a> = &'a (dyn Fn(&[PageNumber]) -> PyResult<()> + Sync);

/// Number of references between two checks for a signal; pieces that are widened are as long.
pub(crate) const PIECE: usize = 1 << 20;

/// Passes all references in `from` on: one batch, or each batch of an iterator.
///
/// # Errors
///
/// `ReferencesError` if it, or a batch of an iterator, is not of page numbers, and what the iterator or a signal
/// handler raises. References before that have been passed on.
pub(crate) fn observe(from: &Bound<'_, PyAny>, observe: Observe) -> PyResult<()> {
    match from.cast::<PyIterator>() {
        Ok(batches) if !is_arrow(from)? => {
            for batch in batches {
                observe_batch(&batch?, observe)?;
            }
            Ok(())
        }
        _ => observe_batch(from, observe),
    }
}

fn is_arrow(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    Ok(object.hasattr(intern!(py, "__arrow_c_array__"))?
        || object.hasattr(intern!(py, "__arrow_c_stream__"))?)
}

fn observe_batch(batch: &Bound<'_, PyAny>, observe: Observe) -> PyResult<()> {
    if let Ok(array) = batch.cast::<PyUntypedArray>() {
        return observe_numpy(array, observe);
    }
    // A pandas Series over numpy also offers Arrow, but by way of pyarrow.
    let py = batch.py();
    let dtype = batch.getattr_opt(intern!(py, "dtype"))?;
    let is_over_numpy = dtype.is_some_and(|dtype| dtype.is_instance_of::<PyArrayDescr>());
    if !is_over_numpy && is_arrow(batch)? {
        let array = batch.extract().map_err(|error| no_numbers(py, error))?;
        return observe_arrow(py, array, observe);
    }
    let array = py.import("numpy")?.call_method1("asarray", (batch,));
    let array = array.map_err(|error| no_numbers(py, error))?;
    let mut array = array.cast_into::<PyUntypedArray>()?;
    // Of integers of which some are 2^63 or more numpy makes floats.
    let is_rounded = matches!(array.dtype().kind(), b'f' | b'O') && !array.is_empty();
    let is_whole = |number: Bound<'_, PyAny>| number.is_exact_instance_of::<PyInt>();
    if is_rounded
        && let Ok(list) = batch.cast::<PyList>()
        && list.iter().all(is_whole)
    {
        let numpy = py.import("numpy")?;
        let exact = numpy.call_method1("asarray", (batch, "uint64"));
        let exact = exact.map_err(|_| {
            errors::references("page numbers are integers from 0 to 2^64 - 1".to_owned())
        })?;
        array = exact.cast_into()?;
    }
    if array.ndim() == 0 {
        return Err(errors::references(format!(
            "references are an array, a list, Arrow data or an iterator of these; this is of type {}",
            batch.get_type().name()?
        )));
    }
    observe_numpy(&array, observe)
}

/// What numpy or Arrow has no array for.
fn no_numbers(py: Python<'_>, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyValueError>(py) {
        errors::references(error.value(py).to_string())
    } else {
        error
    }
}

fn observe_numpy(array: &Bound<'_, PyUntypedArray>, observe: Observe) -> PyResult<()> {
    let py = array.py();
    let dtype = array.dtype();
    // An empty list is an array of floats.
    if !matches!(dtype.kind(), b'u' | b'i') && !array.is_empty() {
        return Err(errors::references(format!(
            "page numbers are integers; this array is of dtype {dtype}"
        )));
    }
    let masked = py.import(intern!(py, "numpy.ma"))?;
    let is_masked = masked.call_method1(intern!(py, "is_masked"), (array,))?;
    if is_masked.is_truthy()? {
        return Err(errors::references(
            "some page numbers are masked".to_owned(),
        ));
    }
    if array.ndim() != 1 {
        let dimensions = array.ndim();
        return Err(errors::references(format!(
            "references are an array of one dimension; this one has {dimensions}"
        )));
    }
    let flags = array.getattr(intern!(py, "flags"))?;
    let is_direct = dtype.itemsize() == size_of::<u64>()
        && dtype.is_native_byteorder() == Some(true)
        && array.is_c_contiguous()
        && flags.getattr(intern!(py, "aligned"))?.is_truthy()?;
    let uint64 = intern!(py, "uint64");
    if is_direct {
        let numbers = array.call_method1(intern!(py, "view"), (uint64,))?;
        let numbers = numbers.cast::<PyArray1<u64>>()?.readonly();
        return observe_numbers(py, numbers.as_slice()?, observe);
    }
    let in_order = PyDict::new(py);
    in_order.set_item("order", "C")?;
    for start in (0..array.len()).step_by(PIECE) {
        let end = array.len().min(start + PIECE);
        let slice = PySlice::new(py, start.cast_signed(), end.cast_signed(), 1);
        let piece = array.get_item(slice)?;
        let numbers = piece.call_method(intern!(py, "astype"), (uint64,), Some(&in_order))?;
        let numbers = numbers.cast::<PyArray1<u64>>()?.readonly();
        observe_numbers(py, numbers.as_slice()?, observe)?;
    }
    Ok(())
}

fn observe_arrow(py: Python<'_>, array: AnyArray, observe: Observe) -> PyResult<()> {
    let mut chunks = array.into_reader()?;
    let of_stream = chunks.field();
    if !of_stream.data_type().is_integer() {
        return Err(errors::references(format!(
            "page numbers are integers; this Arrow data is of type {}",
            of_stream.data_type()
        )));
    }
    // The stream's owner may need the lock for its next chunk.
    while let Some(chunk) = py.detach(|| chunks.next()) {
        let chunk = chunk.map_err(|error| errors::references(error.to_string()))?;
        if chunk.null_count() > 0 {
            return Err(errors::references(format!(
                "{} of {} page numbers are null",
                chunk.null_count(),
                chunk.len()
            )));
        }
        for start in (0..chunk.len()).step_by(PIECE) {
            let piece = chunk.slice(start, PIECE.min(chunk.len() - start));
            observe_numbers(py, widened(&piece).values(), observe)?;
        }
    }
    Ok(())
}

/// An Arrow array as 64-bit numbers, without a copy if it has such.
fn widened(array: &ArrayRef) -> PrimitiveArray<UInt64Type> {
    macro_rules! widen {
        ($type:ty) => {
            array
                .as_primitive::<$type>()
                .unary(|number| i64::from(number).cast_unsigned())
        };
    }
    match array.data_type() {
        DataType::UInt64 => array.as_primitive::<UInt64Type>().clone(),
        DataType::Int64 => {
            let bits = array.as_primitive::<Int64Type>().values().inner();
            PrimitiveArray::new(bits.clone().into(), None)
        }
        DataType::UInt32 => widen!(UInt32Type),
        DataType::Int32 => widen!(Int32Type),
        DataType::UInt16 => widen!(UInt16Type),
        DataType::Int16 => widen!(Int16Type),
        DataType::UInt8 => widen!(UInt8Type),
        DataType::Int8 => widen!(Int8Type),
        other => unreachable!("{other} among integers"),
    }
}

fn observe_numbers(py: Python<'_>, numbers: &[u64], observe: Observe) -> PyResult<()> {
    for piece in numbers.chunks(PIECE) {
        py.detach(|| observe(pages(piece)))?;
        py.check_signals()?;
    }
    Ok(())
}
