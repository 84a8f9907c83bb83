//! The policies by name.
//!
//! [`POLICIES`] is the only list of them: `plimsoll plan --policy`, the daemon's `policy.name`, the laboratory's
//! experiments, recorded decisions and the REST API all take names, descriptions and options from it. A new policy is
//! a file with its [`PolicyRow`] and a line in the list.

use std::fmt;

use crate::policy::{Policy, PolicyOption, PolicyOptions, PolicyRow, Search};
use crate::{esx, isolated};

/// All policies, the default first.
pub static POLICIES: [&PolicyRow; 3] = [&isolated::ROW, &esx::BY_CURVES, &esx::BY_SAMPLES];

/// Names for a policy with fixed options.
pub static PRESETS: [Preset; 1] = [Preset {
    name: "optimal",
    summary: "isolated, always by the exact search, however long it takes",
    policy: Policy::isolated(Search::Optimal),
}];

/// All searches of isolated sharing, the default first.
pub static SEARCHES: [SearchRow; 6] = [
    SearchRow {
        name: "auto",
        summary: "optimal while that is quick, otherwise hull",
        search: Search::Auto,
    },
    SearchRow {
        name: "exhaustive",
        summary: "every allocation; at most three VMs",
        search: Search::Exhaustive,
    },
    SearchRow {
        name: "greedy",
        summary: "one unit at a time, from the smallest loss to the largest gain",
        search: Search::Greedy,
    },
    SearchRow {
        name: "annealing",
        summary: "simulated annealing; takes a seed",
        search: Search::Annealing { seed: 0 },
    },
    SearchRow {
        name: "optimal",
        summary: "exact, by dynamic programming",
        search: Search::Optimal,
    },
    SearchRow {
        name: "hull",
        summary: "on the curves' convex minorants, with a certified gap",
        search: Search::Hull,
    },
];

/// A name for a policy with fixed options.
pub struct Preset {
    /// The name, which differs from all policies' names.
    pub name: &'static str,
    /// Description in one line of help.
    pub summary: &'static str,
    /// The policy that it abbreviates; this policy is what is recorded.
    pub policy: Policy,
}

/// One search.
pub struct SearchRow {
    /// The name in configurations, options and recorded decisions.
    pub name: &'static str,
    /// Description in one line of help.
    pub summary: &'static str,
    /// The search, with its default seed if it takes one.
    pub search: Search,
}

/// Options as an operator writes them; `None` for the default.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GivenOptions<'a> {
    /// Name of a search.
    pub search: Option<&'a str>,
    /// Seed of that search.
    pub seed: Option<u64>,
    /// Share of the idle memory that is taken.
    pub idle_tax: Option<f64>,
}

/// Why a name with its options does not identify a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    /// No policy and no preset has this name.
    #[error("there is no policy '{0}'")]
    NoPolicy(String),
    /// No search has this name.
    #[error("there is no search '{0}'")]
    NoSearch(String),
    /// The policy or search does not take the option.
    #[error("{given_to} does not take it; only {takers} {}", if takers.contains(" and ") { "do" } else { "does" })]
    NotTaken {
        /// The option.
        option: PolicyOption,
        /// The policy or search, as `policy esx`.
        given_to: String,
        /// The policies or searches that take it.
        takers: String,
    },
}

impl Policy {
    /// The policy or preset called `name`, with these options.
    ///
    /// # Errors
    ///
    /// [`OptionError`]: a name that is not in the registry, or an option that the policy does not take.
    pub fn by_name(name: &str, given: GivenOptions<'_>) -> Result<Self, OptionError> {
        let preset = PRESETS.iter().find(|preset| preset.name == name);
        let row = POLICIES.into_iter().find(|row| row.name == name);
        let taken: &[_] = row.map_or(&[], |row| row.options);
        let refused = |option: PolicyOption, is_given: bool| {
            if !is_given || taken.contains(&option) {
                return Ok(());
            }
            let takers = POLICIES.iter().filter(|row| row.options.contains(&option));
            Err(OptionError::NotTaken {
                option,
                given_to: format!("policy {name}"),
                takers: joined(takers.map(|row| row.name)),
            })
        };
        if preset.is_none() && row.is_none() {
            return Err(OptionError::NoPolicy(name.to_owned()));
        }
        refused(PolicyOption::Search, given.search.is_some())?;
        refused(PolicyOption::IdleTax, given.idle_tax.is_some())?;
        let search = Search::by_name(given.search.unwrap_or(SEARCHES[0].name), given.seed)?;
        let idle_tax = given.idle_tax.unwrap_or(PolicyOptions::IDLE_TAX);
        let options = PolicyOptions { search, idle_tax };
        row.map(|row| Self::new(row, options))
            .or(preset.map(|preset| preset.policy))
            .ok_or_else(|| OptionError::NoPolicy(name.to_owned()))
    }
}

impl Search {
    /// The search called `name`.
    ///
    /// # Errors
    ///
    /// [`OptionError`]: a name that is not in the registry, or a seed for a search that takes none.
    pub fn by_name(name: &str, seed: Option<u64>) -> Result<Self, OptionError> {
        let row = SEARCHES.iter().find(|row| row.name == name);
        let row = row.ok_or_else(|| OptionError::NoSearch(name.to_owned()))?;
        match (row.search, seed) {
            (Self::Annealing { .. }, Some(seed)) => Ok(Self::Annealing { seed }),
            (search, None) => Ok(search),
            _ => {
                let takers = SEARCHES.iter().filter(|row| row.search.seed().is_some());
                Err(OptionError::NotTaken {
                    option: PolicyOption::Seed,
                    given_to: format!("search {name}"),
                    takers: joined(takers.map(|row| row.name)),
                })
            }
        }
    }

    /// The name in configurations, options and recorded decisions.
    pub fn name(self) -> &'static str {
        let kind = std::mem::discriminant(&self);
        let mut rows = SEARCHES.iter();
        rows.find(|row| std::mem::discriminant(&row.search) == kind)
            .map_or("", |row| row.name)
    }
}

impl fmt::Display for Search {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self.seed() {
            Some(seed) => write!(f, " (seed {seed})"),
            None => Ok(()),
        }
    }
}

fn joined(names: impl Iterator<Item = &'static str>) -> String {
    names.collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_there_once_and_gives_its_policy() {
        let names: Vec<_> = POLICIES.iter().map(|row| row.name).collect();
        for (at, name) in names.iter().enumerate() {
            assert!(!names[..at].contains(name), "{name}");
            let policy = Policy::by_name(name, GivenOptions::default()).unwrap();
            assert_eq!(policy.row().name, *name);
            assert_eq!(*policy.options(), PolicyOptions::DEFAULT);
        }
        for preset in &PRESETS {
            assert!(!names.contains(&preset.name), "{}", preset.name);
            let policy = Policy::by_name(preset.name, GivenOptions::default());
            assert_eq!(policy, Ok(preset.policy));
        }
        for row in &SEARCHES {
            assert_eq!(row.search.name(), row.name);
            assert_eq!(Search::by_name(row.name, row.search.seed()), Ok(row.search));
        }
    }

    #[test]
    fn an_option_is_refused_where_it_is_not_taken() {
        let refusal = |name, given| Policy::by_name(name, given).unwrap_err().to_string();
        let search = GivenOptions {
            search: Some("hull"),
            ..GivenOptions::default()
        };
        let only = "does not take it; only isolated does";
        assert_eq!(refusal("esx", search), format!("policy esx {only}"));
        assert_eq!(refusal("optimal", search), format!("policy optimal {only}"));
        let tax = GivenOptions {
            idle_tax: Some(0.5),
            ..GivenOptions::default()
        };
        assert_eq!(
            refusal("isolated", tax),
            "policy isolated does not take it; only esx and esx-sampling do"
        );
        let seed = GivenOptions {
            seed: Some(1),
            ..search
        };
        assert_eq!(
            refusal("isolated", seed),
            "search hull does not take it; only annealing does"
        );
        assert_eq!(
            refusal("best", GivenOptions::default()),
            "there is no policy 'best'"
        );
    }
}
