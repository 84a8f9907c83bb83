//! `docs/reference.md`: a table of each registry, written from its rows.

use std::fmt::Write as _;

use plimsoll_actuator::registry::ACTUATORS;
use plimsoll_estimator::live::LIVE_ESTIMATORS;
use plimsoll_estimator::registry::{ALGORITHMS, METHODS, OptionSpec};
use plimsoll_estimator::simulation::CACHE_POLICIES;
use plimsoll_hcache::EVICTION_POLICIES;
use plimsoll_policy::POLICIES;
use plimsoll_policy::registry::SEARCHES;
use plimsoll_source::Format;
use plimsoll_trap::BACKENDS;

/// Name of the file.
pub(super) const FILE: &str = "reference.md";

const HEAD: &str = "\
# Reference: what can be chosen, and what it costs

Written by `plimsoll generate reference docs` from the registries of the program; a test compares the two. Keys in brackets are
those of [papers.md](papers.md).
";

/// The page.
pub(super) fn page() -> String {
    let mut page = HEAD.to_owned();
    table(
        &mut page,
        "Tracing backends (`attach --backend`, `trace.backend`)",
        ["backend", "observes", "needs", "costs the VM", "cannot see"],
        BACKENDS
            .iter()
            .map(|row| [row.name(), row.sees, row.needs, row.costs, row.loses].map(str::to_owned)),
    );
    table(
        &mut page,
        "Live estimators (`attach --estimator` chooses between the first two)",
        ["estimator", "computes the curve from"],
        LIVE_ESTIMATORS
            .iter()
            .map(|row| [row.name, row.help].map(str::to_owned)),
    );
    table(
        &mut page,
        "Offline estimators (`mrc --estimator`)",
        [
            "estimator",
            "method",
            "options",
            "cost",
            "in slices (`--partial`)",
            "source",
        ],
        ALGORITHMS.iter().map(|row| {
            let options = options(row.options);
            let slices = if row.has_slices() { "yes" } else { "no" };
            [row.name, row.help, &options, row.cost, slices, row.source].map(str::to_owned)
        }),
    );
    table(
        &mut page,
        "Simulated eviction policies (`mrc --cache-policy`)",
        ["policy", "evicts", "source"],
        CACHE_POLICIES
            .iter()
            .map(|row| [row.name, row.help, row.source].map(str::to_owned)),
    );
    table(
        &mut page,
        "Working-set estimators (`wss --estimator`)",
        ["estimator", "counts", "options", "source"],
        METHODS.iter().map(|row| {
            let options = options(row.options);
            [row.name, row.help, &options, row.source].map(str::to_owned)
        }),
    );
    table(
        &mut page,
        "Trace formats (`--format`; grammars in [formats.md](formats.md))",
        ["format", "options", "written too"],
        Format::all().map(|format| {
            let options = format.options().iter();
            let options = options.filter(|option| option.is_of_commands());
            let options = options.map(|option| format!("`--{}`", option.name()));
            let written = if format.is_written() { "yes" } else { "no" };
            [
                format.name().to_owned(),
                options.collect::<Vec<_>>().join(", "),
                written.to_owned(),
            ]
        }),
    );
    table(
        &mut page,
        "Policies (`plan --policy`, `policy.name`)",
        ["policy", "allocates", "source"],
        POLICIES
            .iter()
            .map(|row| [row.name, row.summary, row.source].map(str::to_owned)),
    );
    table(
        &mut page,
        "Searches of the policy `isolated` (`plan --search`, `policy.search`)",
        ["search", "method"],
        SEARCHES
            .iter()
            .map(|row| [row.name, row.summary].map(str::to_owned)),
    );
    table(
        &mut page,
        "Eviction policies of hcache (`hcache serve --eviction`)",
        ["policy", "evicts", "cost", "source"],
        EVICTION_POLICIES
            .iter()
            .map(|row| [row.name, row.summary, row.cost, row.source].map(str::to_owned)),
    );
    table(
        &mut page,
        "Actuators",
        ["actuator", "changes"],
        ACTUATORS
            .iter()
            .map(|row| [row.name, row.summary].map(str::to_owned)),
    );
    page
}

/// Options of an algorithm with their defaults.
fn options(options: &[OptionSpec]) -> String {
    let options = options.iter().map(|option| {
        let default = option.default.map_or_else(
            || "required".to_owned(),
            |default| format!("default {default}"),
        );
        format!("`--{}` ({default})", option.name)
    });
    options.collect::<Vec<_>>().join(", ")
}

/// Appends a table under a heading.
fn table<const COLUMNS: usize>(
    page: &mut String,
    title: &str,
    head: [&str; COLUMNS],
    rows: impl Iterator<Item = [String; COLUMNS]>,
) {
    write!(page, "\n## {title}\n\n").expect("writing to a string");
    let mut line = |cells: &[&str]| {
        page.push('|');
        for cell in cells {
            write!(page, " {} |", cell.replace('|', "\\|")).expect("writing to a string");
        }
        page.push('\n');
    };
    line(&head);
    line(&["---"; COLUMNS]);
    for row in rows {
        line(&row.each_ref().map(String::as_str));
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_committed_page_is_that_of_the_registries() {
        let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference.md");
        let committed = std::fs::read_to_string(committed).unwrap();
        let advice = "run `plimsoll generate reference docs`";
        assert!(
            committed == page(),
            "docs/reference.md is out of date: {advice}"
        );
    }

    #[test]
    fn every_paper_on_the_page_is_in_the_list() {
        let papers = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/papers.md");
        let papers = std::fs::read_to_string(papers).unwrap();
        for bracketed in page().split('[').skip(1) {
            let (key, rest) = bracketed.split_once(']').unwrap();
            let is_link = rest.starts_with('(');
            assert!(
                is_link || papers.contains(&format!("\n| [{key}] |")),
                "{key}"
            );
        }
    }

    #[test]
    fn every_option_on_the_page_is_one_of_its_verb() {
        let verbs = crate::Cli::command();
        for section in page().split("\n## ").skip(1) {
            let quoted = || section.split('`').skip(1).step_by(2);
            let options = || {
                quoted()
                    .flat_map(|quoted| quoted.split(' '))
                    .filter_map(|word| word.strip_prefix("--"))
            };
            let Some(first) = quoted().find(|quoted| quoted.contains("--")) else {
                continue;
            };
            let words = first.split(' ').take_while(|word| !word.starts_with("--"));
            let mut words: Vec<_> = words.collect();
            if words.is_empty() {
                // Options that all verbs that read traces take.
                words = vec!["mrc"];
            }
            let verb = words
                .iter()
                .fold(&verbs, |verb, word| verb.find_subcommand(word).unwrap());
            for option in options() {
                let mut taken = verb.get_arguments().filter_map(clap::Arg::get_long);
                assert!(taken.any(|taken| taken == option), "{words:?} --{option}");
            }
        }
    }
}
