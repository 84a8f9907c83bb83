//! All offline algorithms and all working-set estimators by name, one row each, used by the
//! command line, the benchmarks and the fuzz target.
//!
//! To add an algorithm, write its file and its row in `curves.rs` or `working_sets.rs`. Names of options are shared: two rows that
//! take an option of one name take it with the same type.
//!
//! ```
//! use plimsoll_estimator::registry::{OptionValue, Settings, algorithm};
//!
//! let mut settings = Settings::default();
//! settings.set("rate", OptionValue::Rate(0.1));
//! let built = algorithm("shards")?.build(&settings)?;
//! assert_eq!(built.label, "SHARDS at rate 1/10");
//! # Ok::<(), plimsoll_estimator::registry::BuildError>(())
//! ```

mod curves;
mod options;
mod working_sets;

pub use curves::{ALGORITHMS, Algorithm, BuiltEstimator, BuiltSizedEstimator, algorithm, options};
pub use options::{BuildError, OptionKind, OptionSpec, OptionValue, Settings};
pub use working_sets::{Feed, METHODS, Method, PlotLine, method};
