//! The exceptions of `plimsoll_mrc.errors`, one for each of our error types, with the same text.

use std::error::Error as _;
use std::io;

use plimsoll_estimator::PartialError;
use plimsoll_estimator::registry::BuildError;
use plimsoll_flow::{CurveError, PageSizeError};
use plimsoll_policy::registry::OptionError;
use plimsoll_protocol::curve_json::CurveJsonError;
use plimsoll_protocol::curve_size::BelowPage;
use plimsoll_protocol::plan::PlanError;
use plimsoll_protocol::size::QuantityError;
use plimsoll_source::SourceError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

mod python {
    use pyo3::import_exception;

    import_exception!(plimsoll_mrc.errors, CurveError);
    import_exception!(plimsoll_mrc.errors, EmptyError);
    import_exception!(plimsoll_mrc.errors, InfeasibleError);
    import_exception!(plimsoll_mrc.errors, OptionError);
    import_exception!(plimsoll_mrc.errors, PartialError);
    import_exception!(plimsoll_mrc.errors, PlanError);
    import_exception!(plimsoll_mrc.errors, ReferencesError);
    import_exception!(plimsoll_mrc.errors, TraceError);
    import_exception!(plimsoll_mrc.errors, TraceOpenError);
}

/// One of our errors as the exception that mirrors it.
pub(crate) trait OrRaise<T> {
    /// The value, or the exception.
    fn or_raise(self) -> PyResult<T>;
}

impl<T, E: Into<Raised>> OrRaise<T> for Result<T, E> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(|error| error.into().0)
    }
}

/// An exception.
pub(crate) struct Raised(PyErr);

/// Runs the handlers of signals that arrived, for work without the global interpreter lock.
///
/// # Errors
///
/// What a handler raises, such as `KeyboardInterrupt`.
pub(crate) fn signals() -> Result<(), Raised> {
    Python::attach(|py| py.check_signals()).map_err(Raised)
}

/// What is not a stream of page numbers.
pub(crate) fn references(text: String) -> PyErr {
    python::ReferencesError::new_err(text)
}

/// A curve that does not serve.
pub(crate) fn curve(text: String) -> PyErr {
    python::CurveError::new_err(text)
}

/// A value that an option does not accept.
pub(crate) fn option(text: String) -> PyErr {
    python::OptionError::new_err(text)
}

/// What is no partial state.
pub(crate) fn partial(text: String) -> PyErr {
    python::PartialError::new_err(text)
}

/// A plan without what it needs.
pub(crate) fn plan(text: String) -> PyErr {
    python::PlanError::new_err(text)
}

/// What Python code, such as the handler of a signal, raised.
impl From<PyErr> for Raised {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<BuildError> for Raised {
    fn from(error: BuildError) -> Self {
        Self(option(in_python(&error.to_string())))
    }
}

/// A text of the command line with the names that its options have in Python: `max_samples` for `--max-samples`.
pub(crate) fn in_python(text: &str) -> String {
    let mut parts = text.split("--");
    let mut all = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let is_in_name = |c: char| c.is_ascii_lowercase() || c == '-';
        let name_bytes = part.find(|c| !is_in_name(c)).unwrap_or(part.len());
        let (name, rest) = part.split_at(name_bytes);
        let follows_name = all.ends_with(|c: char| c != ' ' && c != '(');
        if name.is_empty() || follows_name {
            all.extend(["--", part]);
        } else {
            all.extend([&*name.replace('-', "_"), rest]);
        }
    }
    all
}

impl From<PartialError> for Raised {
    fn from(error: PartialError) -> Self {
        match error {
            PartialError::Curve(error) => error.into(),
            PartialError::Refused(_) | PartialError::NeedsStart { .. } => {
                Self(option(error.to_string()))
            }
            error => Self(partial(error.to_string())),
        }
    }
}

impl From<QuantityError> for Raised {
    fn from(error: QuantityError) -> Self {
        Self(option(error.to_string()))
    }
}

impl From<BelowPage> for Raised {
    fn from(error: BelowPage) -> Self {
        Self(option(error.to_string()))
    }
}

impl From<PageSizeError> for Raised {
    fn from(error: PageSizeError) -> Self {
        Self(option(error.to_string()))
    }
}

impl From<OptionError> for Raised {
    fn from(error: OptionError) -> Self {
        Self(option(match &error {
            OptionError::NotTaken { option, .. } => format!("{}: {error}", option.key()),
            _ => error.to_string(),
        }))
    }
}

impl From<CurveError> for Raised {
    fn from(error: CurveError) -> Self {
        Self(match error {
            CurveError::Empty => python::EmptyError::new_err(error.to_string()),
            error => python::CurveError::new_err(error.to_string()),
        })
    }
}

impl From<CurveJsonError> for Raised {
    fn from(error: CurveJsonError) -> Self {
        match error {
            CurveJsonError::Curve(error) => error.into(),
            error => Self(python::CurveError::new_err(error.to_string())),
        }
    }
}

/// Text that is no JSON of a curve.
impl From<serde_json::Error> for Raised {
    fn from(error: serde_json::Error) -> Self {
        Self(python::CurveError::new_err(error.to_string()))
    }
}

/// [`in_python`] for all of a text but the `foreign` parts of it, in their order: names and contents of files.
fn in_python_around(text: &str, foreign: &[&str]) -> String {
    let Some((&next, later)) = foreign.split_first() else {
        return in_python(text);
    };
    match text.split_once(next) {
        Some((before, after)) => {
            [&in_python(before), next, &in_python_around(after, later)].concat()
        }
        None => in_python_around(text, later),
    }
}

impl From<SourceError> for Raised {
    fn from(error: SourceError) -> Self {
        let text = error.to_string();
        let text = match &error {
            SourceError::OptionNotUsed { name, .. } => in_python_around(&text, &[name]),
            SourceError::Line { name, found, .. } | SourceError::UnknownFormat { name, found } => {
                in_python_around(&text, &[name, found])
            }
            // Name no options.
            _ => text,
        };
        let raised = match error {
            SourceError::Open { .. } => python::TraceOpenError::new_err(text),
            SourceError::NoSuchFormat { .. } => option(text),
            _ => python::TraceError::new_err(text),
        };
        // Python's own exception for the system's error, as `__cause__`.
        let cause = error
            .source()
            .and_then(|source| source.downcast_ref::<io::Error>());
        if let Some(cause) = cause {
            let copy = cause.raw_os_error().map_or_else(
                || io::Error::new(cause.kind(), cause.to_string()),
                io::Error::from_raw_os_error,
            );
            Python::attach(|py| raised.set_cause(py, Some(copy.into())));
        }
        Self(raised)
    }
}

impl From<PlanError> for Raised {
    fn from(error: PlanError) -> Self {
        let text = error.to_string();
        let PlanError::Infeasible(shortfall) = error else {
            return Self(plan(text));
        };
        let raised = python::InfeasibleError::new_err(text);
        let attributes = Python::attach(|py| {
            let value = raised.value(py);
            let least = PyDict::new(py);
            for minimum in shortfall.least {
                least.set_item(minimum.vm, minimum.bytes)?;
            }
            value.setattr("needed_bytes", shortfall.needed_bytes)?;
            value.setattr("total_bytes", shortfall.total_bytes)?;
            value.setattr("least_bytes", least)
        });
        Self(attributes.err().unwrap_or(raised))
    }
}
