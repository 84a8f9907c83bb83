//! Options of the registry's rows, the values that a user gives them, and errors.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;

use plimsoll_flow::{PageCount, PageSize, rate_text};

use crate::EstimatorError;

/// The type of an option's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionKind {
    /// A sampling rate, above 0.0 and at most 1.0.
    Rate,
    /// A whole number, at least 1.
    Count,
    /// The seed of a random choice; ignored by algorithms without one.
    Seed,
    /// A size in pages.
    Size,
    /// A share, 0.0 or more.
    Share,
}

impl OptionKind {
    /// Placeholder of a value in help.
    pub fn value_name(self) -> &'static str {
        match self {
            Self::Rate => "RATE",
            Self::Count => "N",
            Self::Seed => "SEED",
            Self::Size => "SIZE",
            Self::Share => "SHARE",
        }
    }
}

/// The value of an option.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OptionValue {
    /// Value of [`OptionKind::Rate`].
    Rate(f64),
    /// Value of [`OptionKind::Count`].
    Count(NonZeroUsize),
    /// Value of [`OptionKind::Seed`].
    Seed(u64),
    /// Value of [`OptionKind::Size`].
    Size(PageCount),
    /// Value of [`OptionKind::Share`].
    Share(f64),
}

impl fmt::Display for OptionValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate(rate) => f.write_str(&rate_text(*rate)),
            Self::Count(count) => write!(f, "{count}"),
            Self::Seed(seed) => write!(f, "{seed}"),
            Self::Size(pages) => write!(f, "{pages} pages"),
            Self::Share(share) => write!(f, "{} %", share * 100.0),
        }
    }
}

/// An option that an algorithm takes.
#[derive(Debug, Clone, Copy)]
pub struct OptionSpec {
    /// The name, without leading dashes.
    pub name: &'static str,
    /// The type of its value.
    pub kind: OptionKind,
    /// The default value; `None` for a required option.
    pub default: Option<OptionValue>,
    /// One line of help, in a form that can follow a colon.
    pub help: &'static str,
}

/// Options given by a user, for any row that takes them.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Page size of the trace, by which defaults in bytes are converted to pages.
    page_size: PageSize,
    values: BTreeMap<&'static str, OptionValue>,
}

impl Settings {
    /// Returns settings without values, for a trace of that page size.
    pub fn new(page_size: PageSize) -> Self {
        Self {
            page_size,
            ..Self::default()
        }
    }

    /// Sets the value of an option.
    pub fn set(&mut self, name: &'static str, value: OptionValue) {
        self.values.insert(name, value);
    }

    /// The value of an option, if it was set.
    pub fn get(&self, name: &str) -> Option<OptionValue> {
        self.values.get(name).copied()
    }
}

/// Why an estimator of the registry was not built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// No row has this name.
    #[error("there is no estimator '{name}', only {known}")]
    Unknown {
        /// The name.
        name: String,
        /// All names.
        known: String,
    },
    /// The estimator does not take the option.
    #[error("--{option}: {algorithm} {reason}")]
    NotTaken {
        /// The estimator.
        algorithm: &'static str,
        /// The option.
        option: String,
        /// The rest of the sentence: why not, and which estimators do.
        reason: String,
    },
    /// A required option was not given.
    #[error("--estimator {algorithm} requires --{option} {}, the {help}", kind.value_name())]
    Missing {
        /// The algorithm.
        algorithm: &'static str,
        /// The option.
        option: &'static str,
        /// The type of its value.
        kind: OptionKind,
        /// Its description.
        help: &'static str,
    },
    /// The estimator must see a stream as a whole.
    #[error("{algorithm} has no partial states; {others} have")]
    Indivisible {
        /// The estimator.
        algorithm: &'static str,
        /// Those that have.
        others: String,
    },
    /// The algorithm rejects its options.
    #[error(transparent)]
    Refused(#[from] EstimatorError),
}

/// The options of one row: given values or defaults.
pub(super) struct Options<'a> {
    specs: &'static [OptionSpec],
    settings: &'a Settings,
}

impl<'a> Options<'a> {
    /// Those of the row called `name`.
    pub(super) fn new(
        name: &'static str,
        specs: &'static [OptionSpec],
        settings: &'a Settings,
    ) -> Result<Self, BuildError> {
        match missing(specs, settings) {
            None => Ok(Self { specs, settings }),
            Some(option) => Err(BuildError::Missing {
                algorithm: name,
                option: option.name,
                kind: option.kind,
                help: option.help,
            }),
        }
    }

    /// Page size of the trace.
    pub(super) fn page_size(&self) -> PageSize {
        self.settings.page_size
    }

    /// The value of an option of the row, which has been checked to have one.
    fn value(&self, name: &str) -> OptionValue {
        let default = || named(self.specs, name).and_then(|option| option.default);
        let value = self.settings.get(name).or_else(default);
        value.expect("rows read their own options")
    }

    pub(super) fn rate(&self) -> f64 {
        match self.value("rate") {
            OptionValue::Rate(rate) => rate,
            other => unreachable!("{other:?} for a rate"),
        }
    }

    pub(super) fn count(&self, name: &str) -> NonZeroUsize {
        match self.value(name) {
            OptionValue::Count(count) => count,
            other => unreachable!("{other:?} for a count"),
        }
    }

    /// A count, at most the largest number of its type.
    pub(super) fn small_count<T: TryFrom<NonZeroUsize>>(&self, name: &str, max: T) -> T {
        T::try_from(self.count(name)).unwrap_or(max)
    }

    pub(super) fn seed(&self) -> u64 {
        match self.value("seed") {
            OptionValue::Seed(seed) => seed,
            other => unreachable!("{other:?} for a seed"),
        }
    }

    pub(super) fn size(&self, name: &str) -> PageCount {
        match self.value(name) {
            OptionValue::Size(size) => size,
            other => unreachable!("{other:?} for a size"),
        }
    }

    pub(super) fn share(&self, name: &str) -> f64 {
        match self.value(name) {
            OptionValue::Share(share) => share,
            other => unreachable!("{other:?} for a share"),
        }
    }
}

pub(super) fn named(specs: &'static [OptionSpec], name: &str) -> Option<&'static OptionSpec> {
    specs.iter().find(|option| option.name == name)
}

/// The first required option that was not given.
pub(super) fn missing(
    specs: &'static [OptionSpec],
    settings: &Settings,
) -> Option<&'static OptionSpec> {
    let mut required = specs.iter().filter(|option| option.default.is_none());
    required.find(|option| settings.get(option.name).is_none())
}

/// The sentence after the name of a row that does not take an option, which `takers` do.
pub(super) fn not_taken(specs: &[OptionSpec], takers: &[&str]) -> String {
    if !takers.is_empty() {
        return format!("does not take it; {} does", takers.join(" or "));
    }
    let taken: Vec<_> = specs
        .iter()
        .map(|option| format!("--{}", option.name))
        .collect();
    match &*taken {
        [] => "takes no options".to_owned(),
        names => format!("takes only {}", names.join(", ")),
    }
}

pub(super) fn unknown(name: &str, known: impl Iterator<Item = &'static str>) -> BuildError {
    BuildError::Unknown {
        name: name.to_owned(),
        known: known.collect::<Vec<_>>().join(", "),
    }
}

pub(super) const fn rate(default: f64) -> OptionSpec {
    let default = Some(OptionValue::Rate(default));
    spec(
        "rate",
        OptionKind::Rate,
        default,
        "share of the pages to sample",
    )
}

pub(super) const fn spec(
    name: &'static str,
    kind: OptionKind,
    default: Option<OptionValue>,
    help: &'static str,
) -> OptionSpec {
    OptionSpec {
        name,
        kind,
        default,
        help,
    }
}

pub(super) const fn share_of(name: &'static str, default: f64, help: &'static str) -> OptionSpec {
    let default = Some(OptionValue::Share(default));
    spec(name, OptionKind::Share, default, help)
}

pub(super) const fn count(name: &'static str, default: usize, help: &'static str) -> OptionSpec {
    let default = Some(OptionValue::Count(NonZeroUsize::new(default).unwrap()));
    spec(name, OptionKind::Count, default, help)
}

pub(super) const SEED: OptionSpec = spec(
    "seed",
    OptionKind::Seed,
    Some(OptionValue::Seed(0)),
    "seed of the sampling",
);
