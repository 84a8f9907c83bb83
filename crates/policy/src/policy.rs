//! A policy with its options, and the registry's entry of each policy.

use std::fmt;

use crate::PolicyError;
use crate::problem::{Problem, Solution};

/// One policy.
pub struct PolicyRow {
    /// The name in configurations, options and recorded decisions.
    pub name: &'static str,
    /// The name in sentences and tables.
    pub title: &'static str,
    /// Description in one line of help.
    pub summary: &'static str,
    /// The options that it takes.
    pub options: &'static [PolicyOption],
    /// The publication that describes it.
    pub source: &'static str,
    /// Whether it needs working sets ([`Demand::working_set`](crate::Demand::working_set)) instead of curves.
    pub from_working_sets: bool,
    /// Allocates the memory: one of its [`lists`](Problem::lists) to each VM, and in sum at most the total. Anything else
    /// is [`PolicyError::Mistake`], and nothing is allocated.
    pub(crate) allocate: fn(&Problem<'_>, &PolicyOptions) -> Result<Solution, PolicyError>,
}

/// An option that some policies or searches take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyOption {
    /// How the best allocation is searched for.
    Search,
    /// Idle tax, 0.0 to 1.0: an idle page costs 1 / (1 - tax) times as many shares as an active one.
    IdleTax,
    /// Seed of the random numbers; an option of searches.
    Seed,
}

/// The options of a policy; those that it does not take have their defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolicyOptions {
    /// How the best allocation is searched for.
    pub search: Search,
    /// Idle tax, 0.0 to 1.0: an idle page costs 1 / (1 - tax) times as many shares as an active one.
    pub idle_tax: f64,
}

/// How memory is allocated: a policy of the registry and its options.
#[derive(Clone, Copy)]
pub struct Policy {
    pub(crate) row: &'static PolicyRow,
    pub(crate) options: PolicyOptions,
}

/// How the best allocation is searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Search {
    /// [`Optimal`](Self::Optimal) as long as it fits into the time of a turn, otherwise [`Hull`](Self::Hull).
    #[default]
    Auto,
    /// Tries every allocation; at most three VMs.
    Exhaustive,
    /// Moves memory unit by unit from the VM that loses least to the VM that gains most.
    Greedy,
    /// Simulated annealing: worse allocations are accepted with falling probability.
    Annealing {
        /// Seed of the random numbers.
        seed: u64,
    },
    /// Exact, by dynamic programming. If that would take more than seconds, returns the best allocation found, with a
    /// certified gap above 0.0.
    Optimal,
    /// On the curves' convex minorants, with a certified gap.
    Hull,
}

impl PolicyOptions {
    /// ESX's default tax.
    pub const IDLE_TAX: f64 = 0.75;
    /// The default values of all options.
    pub const DEFAULT: Self = Self {
        search: Search::Auto,
        idle_tax: Self::IDLE_TAX,
    };
}

impl PolicyOption {
    /// Its key in configurations and recorded decisions.
    pub fn key(self) -> &'static str {
        match self {
            Self::Search => "search",
            Self::IdleTax => "idle_tax",
            Self::Seed => "seed",
        }
    }
}

impl Policy {
    pub(crate) const fn new(row: &'static PolicyRow, options: PolicyOptions) -> Self {
        Self { row, options }
    }

    /// Its row in the registry.
    pub fn row(&self) -> &'static PolicyRow {
        self.row
    }

    /// Its options.
    pub fn options(&self) -> &PolicyOptions {
        &self.options
    }

    /// Whether it takes this option.
    pub fn takes(&self, option: PolicyOption) -> bool {
        self.row.options.contains(&option)
    }
}

impl PartialEq for Policy {
    fn eq(&self, other: &Self) -> bool {
        self.row.name == other.row.name && self.options == other.options
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.row.name, self.options)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row.title)?;
        if self.takes(PolicyOption::IdleTax) {
            let percent = (self.options.idle_tax * 1e4).round() / 100.0;
            write!(f, ", idle tax {percent} %")?;
        }
        Ok(())
    }
}

impl Search {
    /// Seed of its random numbers, if it takes one.
    pub fn seed(self) -> Option<u64> {
        match self {
            Self::Annealing { seed } => Some(seed),
            _ => None,
        }
    }
}
