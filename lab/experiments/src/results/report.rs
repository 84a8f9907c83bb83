//! The overview of all kept results: docs/results/README.md.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use anyhow::Context as _;
use plimsoll_output::write_file;

use super::papers::{Answer, ITEMS};
use super::{Measurement, ResultSet};

/// Make the overview of the results that experiments kept
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory of the results
    #[arg(long, value_name = "DIR", default_value = "docs/results")]
    results: PathBuf,
}

const INTRODUCTION: &str = "# Measured results\n\n\
    Made by `plimsoll lab report` from what the experiments kept here: of each a page (`.md`), its measurements by seed (`.csv`), and \
    everything with the data behind it (`.json`). Figures of single runs, made before results were kept, are in [single-runs.md](single-runs.md).\n";

/// Reads all sets and writes the overview.
///
/// # Errors
///
/// A set that cannot be read, or the file that cannot be written.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let folder = &args.results;
    let files = fs::read_dir(folder)
        .with_context(|| format!("cannot list '{}'", folder.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<Vec<_>>>()?;
    let mut sets = files
        .iter()
        .filter(|path| path.extension().is_some_and(|ending| ending == "json"))
        .map(|path| ResultSet::read(path))
        .collect::<anyhow::Result<Vec<_>>>()?;
    sets.sort_by(|one, other| one.name.cmp(&other.name));
    let path = folder.join("README.md");
    write_file(&path, overview(&sets).as_bytes())?;
    writeln!(out, "{}: {} sets of results", path.display(), sets.len())?;
    Ok(())
}

fn overview(sets: &[ResultSet]) -> String {
    let mut text = INTRODUCTION.to_owned();
    for set in sets {
        text.push_str(&format!(
            "\n## [{}]({}.md)\n\n{}; accelerator {}.\n\n| | measured | paper |\n|---|---|---|\n",
            set.title, set.name, set.conditions.guest, set.conditions.accelerator
        ));
        for (topic, rows) in topics(set) {
            let paper = rows.first().map_or("", |one| &one.paper);
            text.push_str(&format!("| {topic} | {} | {paper} |\n", headline(&rows)));
        }
        for chart in &set.charts {
            text.push_str(&format!("\n![{}]({})\n", chart.caption, chart.file));
        }
    }
    let kept = |item: &str| -> Vec<&ResultSet> {
        let names = |one: &Measurement| one.item.split(", ").any(|name| is_of(name, item));
        let of = |set: &&ResultSet| set.measurements.iter().any(names);
        sets.iter().filter(of).collect()
    };
    let mut rows = String::new();
    let mut counts = [0; 3];
    for one in &ITEMS {
        let (column, cell) = match &one.answer {
            Answer::Kept => match kept(one.item).as_slice() {
                [] => (2, "not measured yet".to_owned()),
                found => {
                    let links = found
                        .iter()
                        .map(|set| format!("[{}]({}.md)", set.name, set.name));
                    (0, links.collect::<Vec<_>>().join(", "))
                }
            },
            Answer::Document(file) => (1, format!("[{file}](../{file}), not kept by the lab")),
            Answer::Missing(reason) => (2, format!("not measured: {reason}")),
        };
        counts[column] += 1;
        rows.push_str(&format!("| {} | {} | {cell} |\n", one.item, one.what));
    }
    text.push_str(&format!(
        "\n## Tables and figures of the papers\n\nOf {}: {} measured and kept here, {} measured in whole or part in documents, {} not measured. The papers are \
         named in [papers.md](../papers.md).\n\n| | | |\n|---|---|---|\n{rows}",
        ITEMS.len(),
        counts[0],
        counts[1],
        counts[2]
    ));
    text
}

/// Whether `name`, which may be without its paper (as in `AET fig. 1, fig. 2`), is `item`.
fn is_of(name: &str, item: &str) -> bool {
    item == name
        || item
            .split_once(' ')
            .is_some_and(|(_, number)| number == name)
}

/// The measurements of a set by what they measure, in their order.
fn topics(set: &ResultSet) -> Vec<(&str, Vec<&Measurement>)> {
    let mut topics: Vec<(&str, Vec<&Measurement>)> = Vec::new();
    for one in &set.measurements {
        match topics.iter_mut().find(|(what, _)| *what == one.what) {
            Some((_, rows)) => rows.push(one),
            None => topics.push((&one.what, vec![one])),
        }
    }
    topics
}

/// Rows in one cell: the mean of the programs if there is one, with the range of the rows' medians.
fn headline(rows: &[&Measurement]) -> String {
    let Some((last, others)) = rows.split_last() else {
        return String::new();
    };
    let medians: Vec<f64> = (others.iter())
        .filter_map(|one| Some(one.spread()?[1]))
        .collect();
    if last.of != super::MEAN || medians.is_empty() {
        let cells = rows.iter().map(|one| format!("{}: {}", one.of, one.text()));
        return cells.collect::<Vec<_>>().join("; ");
    }
    let low = medians.iter().copied().fold(f64::INFINITY, f64::min);
    let high = medians.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mean = last.spread().map_or(f64::NAN, |spread| spread[1]);
    let unit = last.unit;
    format!(
        "{} in the mean of {} programs; {} to {}",
        unit.text(mean),
        others.len(),
        unit.text(low),
        unit.text(high)
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::example;
    use super::*;

    #[test]
    fn every_item_is_named_once_and_every_set_is_shown() {
        let mut names: Vec<_> = ITEMS.iter().map(|one| one.item).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ITEMS.len());
        let mut set = example("one");
        set.measurements[0].item = "AET table 1, table 3".to_owned();
        let text = overview(&[set]);
        assert!(text.contains("## [An example](one.md)"), "{text}");
        for item in ["AET table 1", "AET table 3"] {
            let row = text
                .lines()
                .find(|line| line.contains(&format!("| {item} |")));
            assert!(row.unwrap().contains("[one](one.md)"), "{row:?}");
        }
        let row = text.lines().find(|line| line.contains("| AET fig. 4 |"));
        assert!(row.unwrap().contains("not measured yet"), "{row:?}");
    }

    #[test]
    fn documents_that_are_named_exist() {
        let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        for one in &ITEMS {
            if let Answer::Document(file) = one.answer {
                assert!(docs.join(file).is_file(), "{file} of {}", one.item);
            }
        }
    }
}
