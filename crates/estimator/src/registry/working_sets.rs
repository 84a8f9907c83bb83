//! The working-set estimators that are fed pages, one row each.

use std::num::{NonZeroU16, NonZeroU32};

use super::options::{Options, SEED, count, named, not_taken, share_of, spec, unknown};
use super::{BuildError, OptionKind, OptionSpec, OptionValue, Settings};
use crate::working_set::{
    Pml, PmlOptions, Prl, PrlOptions, Sampling, SamplingOptions, TouchedOptions, TouchedPages,
    WorkingSetEstimator,
};

/// Input of a working-set estimator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feed {
    /// Pages of all page walks, with the numbers used by the TLB.
    Walks,
    /// The same pages, numbered from 0 to the end of the memory.
    RamPages,
    /// Pages of all walks as drained from the buffers of page reference logging (PRL).
    LoggedWalks,
    /// Pages of first writes as drained from the buffers of page modification logging (PML).
    LoggedWrites,
}

impl Feed {
    /// One line of help.
    pub fn help(self) -> &'static str {
        match self {
            Self::Walks => "pages of all accesses, or of all page walks",
            Self::RamPages => "the same pages, numbered from 0 to the end of the memory",
            Self::LoggedWalks => "pages of page walks, as drained from the buffers of PRL",
            Self::LoggedWrites => "pages of first writes, as drained from the buffers of PML",
        }
    }
}

/// How a method's size is plotted over the intervals of a run.
#[derive(Debug, Clone, Copy)]
pub struct PlotLine {
    /// Name of the line.
    pub label: &'static str,
    /// Index of its column.
    pub column: usize,
    /// Indices of the columns of its lower and upper limit.
    pub band: Option<(usize, usize)>,
}

/// A row of the registry: an estimator of working sets that needs no curve.
#[derive(Debug, Clone, Copy)]
pub struct Method {
    /// The name on the command line.
    pub name: &'static str,
    /// One line of help.
    pub help: &'static str,
    /// The options that it takes.
    pub options: &'static [OptionSpec],
    /// Its input.
    pub feed: Feed,
    /// Whether it refers to the last interval alone instead of the whole run.
    pub of_last_interval: bool,
    /// The time to which its size refers, if it does not settle; `None` for a method whose size settles.
    pub reported: Option<&'static str>,
    /// Names of the columns of each interval's result.
    pub columns: &'static [&'static str],
    /// How it is plotted.
    pub plotted: PlotLine,
    /// The paper, by its key in `docs/papers.md`.
    pub source: &'static str,
    make: fn(&Options) -> Box<dyn WorkingSetEstimator>,
}

impl Method {
    /// The option with this name.
    ///
    /// # Errors
    ///
    /// [`BuildError::NotTaken`] if the method does not take it.
    pub fn option(&self, name: &str) -> Result<&'static OptionSpec, BuildError> {
        named(self.options, name).ok_or_else(|| {
            let takers = METHODS.iter();
            let takers = takers.filter(|row| named(row.options, name).is_some());
            let takers: Vec<_> = takers.map(|row| row.name).collect();
            BuildError::NotTaken {
                algorithm: self.name,
                option: name.to_owned(),
                reason: not_taken(self.options, &takers),
            }
        })
    }

    /// Builds the method. Settings that it does not take are ignored.
    ///
    /// # Errors
    ///
    /// [`BuildError::Missing`] if a required option was not given.
    ///
    /// # Panics
    ///
    /// If a value has another type than its option.
    pub fn build(&self, settings: &Settings) -> Result<Box<dyn WorkingSetEstimator>, BuildError> {
        let options = Options::new(self.name, self.options, settings)?;
        Ok((self.make)(&options))
    }
}

const OMEGA: OptionSpec = count(
    "omega",
    PrlOptions::DEFAULT.omega.get() as usize,
    "number of intervals without change after which the estimate is settled",
);

const TOLERANCE: OptionSpec = share_of(
    "tolerance",
    PrlOptions::DEFAULT.tolerance,
    "growth within omega intervals that is ignored; 0 is the paper's rule",
);

/// All estimators of working sets that are fed pages. The first is the truth with which the others are compared.
pub const METHODS: &[Method] = &[
    Method {
        name: "truth",
        help: "Pages really touched",
        options: &[
            count(
                "window",
                TouchedOptions::DEFAULT.intervals.get() as usize,
                "window in intervals",
            ),
            count(
                "times",
                TouchedOptions::DEFAULT.times.get() as usize,
                "number of these intervals in which a page must have been accessed",
            ),
        ],
        feed: Feed::Walks,
        of_last_interval: false,
        reported: Some("at the end"),
        columns: &["touched_pages", "truth_pages"],
        plotted: PlotLine {
            label: "truth",
            column: 1,
            band: None,
        },
        source: "[Denning68]",
        make: |options| {
            Box::new(TouchedPages::new(TouchedOptions {
                intervals: options.small_count("window", NonZeroU16::MAX),
                times: options.small_count("times", NonZeroU16::MAX),
            }))
        },
    },
    Method {
        name: "prl",
        help: "Pages logged often by page reference logging",
        options: &[
            count(
                "tau",
                PrlOptions::DEFAULT.tau.get() as usize,
                "number of times a page is logged until it is hot",
            ),
            OMEGA,
            share_of(
                "warm-up",
                PrlOptions::DEFAULT.warm_up,
                "share of the pages logged within omega intervals that must be hot before the estimate settles",
            ),
            TOLERANCE,
            spec(
                "epsilon",
                OptionKind::Size,
                Some(OptionValue::Size(PrlOptions::DEFAULT.epsilon)),
                "additional need of the guest's kernel, added to the estimate",
            ),
        ],
        feed: Feed::LoggedWalks,
        of_last_interval: false,
        reported: None,
        columns: &["prl_hot_pages", "prl_growth_pages"],
        plotted: PlotLine {
            label: "prl: hot pages",
            column: 0,
            band: None,
        },
        source: "[PRL] §4.4",
        make: |options| {
            Box::new(Prl::new(PrlOptions {
                tau: options.small_count("tau", NonZeroU32::MAX),
                omega: options.small_count("omega", NonZeroU16::MAX),
                warm_up: options.share("warm-up"),
                tolerance: options.share("tolerance"),
                epsilon: options.size("epsilon"),
            }))
        },
    },
    Method {
        name: "pml",
        help: "Pages logged by page modification logging",
        options: &[OMEGA, TOLERANCE],
        feed: Feed::LoggedWrites,
        of_last_interval: false,
        reported: None,
        columns: &["pml_written_pages", "pml_cumulative_pages"],
        plotted: PlotLine {
            label: "pml: pages written so far",
            column: 1,
            band: None,
        },
        source: "[PRL] §3.4",
        make: |options| {
            Box::new(Pml::new(PmlOptions {
                omega: options.small_count("omega", NonZeroU16::MAX),
                tolerance: options.share("tolerance"),
            }))
        },
    },
    Method {
        name: "esx",
        help: "VMware's sampling of random pages",
        options: &[
            count(
                "sample-pages",
                SamplingOptions::DEFAULT.pages.get() as usize,
                "pages sampled in each interval",
            ),
            SEED,
            spec("memory", OptionKind::Size, None, "memory of the VM"),
        ],
        feed: Feed::RamPages,
        of_last_interval: true,
        reported: Some("last interval"),
        columns: &[
            "esx_pages",
            "esx_low_pages",
            "esx_high_pages",
            "esx_smoothed_pages",
        ],
        plotted: PlotLine {
            label: "esx: sampled, 95 %",
            column: 0,
            band: Some((1, 2)),
        },
        source: "[Waldspurger02] §5.3",
        make: |options| {
            let sampling = SamplingOptions {
                pages: options.small_count("sample-pages", NonZeroU32::MAX),
                seed: options.seed(),
            };
            Box::new(Sampling::new(sampling, options.size("memory")))
        },
    },
];

/// The row of [`METHODS`] with this name.
///
/// # Errors
///
/// [`BuildError::Unknown`] if there is none.
pub fn method(name: &str) -> Result<&'static Method, BuildError> {
    let mut rows = METHODS.iter();
    let names = METHODS.iter().map(|row| row.name);
    let row = rows.find(|row| row.name == name);
    row.ok_or_else(|| unknown(name, names))
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::{PageCount, PageNumber};

    #[test]
    fn every_method_fills_its_columns_and_has_a_size() {
        let mut settings = Settings::default();
        settings.set("memory", OptionValue::Size(PageCount(100)));
        let pages: Vec<_> = (0..50).map(PageNumber).collect();
        for method in METHODS {
            let mut estimator = method.build(&settings).unwrap();
            assert_eq!(estimator.working_set(), None, "{}", method.name);
            estimator.observe(&pages);
            assert_eq!(estimator.end_interval().len(), method.columns.len());
            assert!(estimator.working_set().is_some());
            assert!(method.plotted.column < method.columns.len());
        }
        let error = METHODS[3].build(&Settings::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--estimator esx requires --memory SIZE, the memory of the VM"
        );
    }

    #[test]
    fn a_name_or_an_option_that_is_not_there_is_refused_with_those_that_are() {
        assert_eq!(
            method("lru").unwrap_err().to_string(),
            "there is no estimator 'lru', only truth, prl, pml, esx"
        );
        let error = method("pml").unwrap().option("tau").unwrap_err();
        assert_eq!(error.to_string(), "--tau: pml does not take it; prl does");
    }
}
