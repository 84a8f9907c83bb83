//! Estimators by their rows of the registry.

use plimsoll_estimator::Estimator;
use plimsoll_estimator::registry::{OptionValue, Settings, algorithm};

/// Options that are set, by name; the others have their defaults.
pub(crate) type Set = &'static [(&'static str, OptionValue)];

/// The estimator of a row, with a seed.
///
/// # Panics
///
/// If there is no such row, or it refuses the options.
pub(crate) fn registered(row: &str, set: Set, seed: u64) -> Box<dyn Estimator> {
    let mut settings = Settings::default();
    settings.set("seed", OptionValue::Seed(seed));
    for &(name, value) in set {
        settings.set(name, value);
    }
    let row = algorithm(row).expect("a row of the registry");
    row.build(&settings).expect("options in range").estimator
}
