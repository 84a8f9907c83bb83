//! Values as users write them: numbers, or text with the units of the command line.

use std::num::NonZeroUsize;

use plimsoll_estimator::registry::{BuildError, OptionKind, OptionSpec, OptionValue, Settings};
use plimsoll_flow::{PageCount, PageSize};
use plimsoll_protocol::curve_size::CurveSize;
use plimsoll_protocol::size::{ByteSize, PerSecond, Rate, Share};
use pyo3::IntoPyObjectExt as _;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::errors::{self, OrRaise as _};

/// A size of memory: bytes, or text like `512M`.
#[derive(Clone, Copy)]
pub(crate) struct Bytes(pub(crate) u64);

impl<'py> FromPyObject<'_, 'py> for Bytes {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match text(&value)? {
            Some(text) => text.parse().or_raise().map(|ByteSize(bytes)| Self(bytes)),
            None => number(&value, "bytes, or text like '512M'").map(Self),
        }
    }
}

/// A share of 0 or more: a number, or text like `5%`.
#[derive(Clone, Copy)]
pub(crate) struct ShareValue(pub(crate) f64);

impl<'py> FromPyObject<'_, 'py> for ShareValue {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match text(&value)? {
            Some(text) => text
                .parse()
                .or_raise()
                .map(|share: Share| Self(share.get())),
            None => number(&value, "a share, or text like '5%'").map(Self),
        }
    }
}

/// A number of events per second: a number, or text like `20/s`.
#[derive(Clone, Copy)]
pub(crate) struct PerSecondValue(pub(crate) f64);

impl<'py> FromPyObject<'_, 'py> for PerSecondValue {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match text(&value)? {
            Some(text) => text
                .parse()
                .or_raise()
                .map(|rate: PerSecond| Self(rate.get())),
            None => number(&value, "a number, or text like '20/s'").map(Self),
        }
    }
}

/// A number of pages, or text with a unit like `512M`.
pub(crate) fn size(value: &Bound<'_, PyAny>, page_size: PageSize) -> PyResult<PageCount> {
    match text(value)? {
        Some(text) => {
            let size: CurveSize = text.parse().or_raise()?;
            size.to_pages(page_size).or_raise()
        }
        None => number(value, "a whole number of pages, or text like '512M'").map(PageCount),
    }
}

/// The same, of each in a list. Text is refused, whose characters would be sizes.
pub(crate) fn sizes(value: &Bound<'_, PyAny>, page_size: PageSize) -> PyResult<Vec<PageCount>> {
    if text(value)?.is_some() {
        return Err(not("a list of sizes", value));
    }
    value
        .try_iter()?
        .map(|size| self::size(&size?, page_size))
        .collect()
}

/// A whole number, 0 or more.
pub(crate) fn whole(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    in_range(value, "a whole number from 0 to 2^64 - 1")
}

/// A list of whole numbers, or None.
pub(crate) fn wholes_or_none(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<usize>>> {
    in_range(value, "a list of whole numbers from 0 to 2^64 - 1")
}

/// The same, or None.
pub(crate) fn whole_or_none(value: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    (!value.is_none()).then(|| whole(value)).transpose()
}

/// A sampling rate: a number, or text like `1/100`.
pub(crate) fn rate(value: &Bound<'_, PyAny>) -> PyResult<f64> {
    match text(value)? {
        Some(text) => Ok(text.parse::<Rate>().or_raise()?.get()),
        None => number(value, "a rate, or text like '1/100'"),
    }
}

/// Reads the options of a row of a registry; `option` finds one by its name there, which has `-` where Python has `_`.
pub(crate) fn settings(
    given: Option<&Bound<'_, PyDict>>,
    page_size: PageSize,
    option: impl Fn(&str) -> Result<&'static OptionSpec, BuildError>,
) -> PyResult<Settings> {
    let mut settings = Settings::new(page_size);
    for (name, value) in given.into_iter().flatten() {
        let spec = option(&name.extract::<String>()?.replace('_', "-")).or_raise()?;
        let value = self::value(spec.kind, &value, page_size)
            .map_err(|error| errors::option(format!("{name}: {}", error.value(name.py()))))?;
        settings.set(spec.name, value);
    }
    Ok(settings)
}

/// Options by their names in Python.
pub(crate) fn described<'py>(
    py: Python<'py>,
    options: &[OptionSpec],
) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    for option in options {
        let entry = PyDict::new(py);
        entry.set_item("help", errors::in_python(option.help))?;
        entry.set_item("kind", option.kind.value_name().to_lowercase())?;
        let default = option.default.map(|value| match value {
            OptionValue::Rate(number) | OptionValue::Share(number) => number.into_py_any(py),
            OptionValue::Count(number) => number.into_py_any(py),
            OptionValue::Seed(number) | OptionValue::Size(PageCount(number)) => {
                number.into_py_any(py)
            }
        });
        entry.set_item("default", default.transpose()?)?;
        all.set_item(option.name.replace('-', "_"), entry)?;
    }
    Ok(all)
}

fn value(kind: OptionKind, value: &Bound<'_, PyAny>, page_size: PageSize) -> PyResult<OptionValue> {
    Ok(match kind {
        OptionKind::Rate => OptionValue::Rate(rate(value)?),
        OptionKind::Count => {
            let expected = "a whole number, at least 1";
            let count = NonZeroUsize::new(number(value, expected)?);
            OptionValue::Count(count.ok_or_else(|| not(expected, value))?)
        }
        OptionKind::Seed => OptionValue::Seed(number(value, "a whole number")?),
        OptionKind::Size => OptionValue::Size(size(value, page_size)?),
        OptionKind::Share => {
            let ShareValue(share) = value.extract()?;
            if !(0.0..f64::INFINITY).contains(&share) {
                return Err(not("a share of 0 or more", value));
            }
            OptionValue::Share(share)
        }
    })
}

fn text(value: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    value
        .cast::<PyString>()
        .ok()
        .map(|text| text.extract())
        .transpose()
}

fn number<'py, T: for<'a> FromPyObject<'a, 'py>>(
    value: &Bound<'py, PyAny>,
    expected: &str,
) -> PyResult<T> {
    value.extract().map_err(|_| not(expected, value))
}

/// The same, of which a value of another type is Python's own error.
fn in_range<'py, T: for<'a> FromPyObject<'a, 'py, Error = PyErr>>(
    value: &Bound<'py, PyAny>,
    expected: &str,
) -> PyResult<T> {
    value.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            not(expected, value)
        } else {
            error
        }
    })
}

fn not(expected: &str, value: &Bound<'_, PyAny>) -> PyErr {
    errors::option(expected_but_got(expected, value))
}

/// What is of another type than expected.
pub(crate) fn other_type(expected: &str, value: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(expected_but_got(expected, value))
}

fn expected_but_got(expected: &str, value: &Bound<'_, PyAny>) -> String {
    let found = value.repr().map(|text| text.to_string());
    format!("expected {expected}; got {}", found.unwrap_or_default())
}
