//! The native part of the Python package `plimsoll_mrc`: classes and functions over the registries of the stages.
//!
//! | module | Python | from |
//! |---|---|---|
//! | `estimator` | `Estimator`, `estimators` | `plimsoll_estimator::registry::ALGORITHMS` |
//! | `working_set` | `WorkingSetEstimator`, `working_set_estimators` | `plimsoll_estimator::registry::METHODS` |
//! | `curve` | `Curve`, `Point` | `plimsoll_flow::MissRatioCurve` |
//! | `simulation` | `Simulation`, `cache_policies`, `object_mrc` | `plimsoll_estimator::simulation::CACHE_POLICIES`, `plimsoll_estimator::SizedLru` |
//! | `trace` | `Trace`, `read_trace` | `plimsoll_source` |
//! | `partial` | `map_batch`, `merge`, `finish` | `plimsoll_estimator::Partial` |
//! | `plan` | `plan` | `plimsoll_protocol::plan` |
//!
//! `references` reads page numbers out of numpy arrays and Arrow data, `options` values as users write them, and
//! `errors` has the exceptions. Names, options and their help come from the registries, so that a new estimator,
//! policy or format needs no change here. The global interpreter lock is released while estimators, readers and
//! policies work.
//!
//! Not here: algorithms. Pictures and documentation are in Python (`python/plimsoll_mrc`).

mod curve;
mod errors;
mod estimator;
mod options;
mod partial;
mod plan;
mod references;
mod simulation;
mod sys;
mod trace;
mod working_set;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::curve::{Curve, Point};
    #[pymodule_export]
    use crate::estimator::{Estimator, estimators};
    #[pymodule_export]
    use crate::partial::{finish, map_batch, merge};
    #[pymodule_export]
    use crate::plan::plan;
    #[pymodule_export]
    use crate::simulation::{Simulation, cache_policies, object_mrc};
    #[pymodule_export]
    use crate::trace::{Trace, read_trace};
    #[pymodule_export]
    use crate::working_set::{WorkingSet, WorkingSetEstimator, working_set_estimators};

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name of a version")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
