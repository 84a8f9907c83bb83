//! The overview of all kept results: docs/results/README.md.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use plimsoll_output::write_file;
use plimsoll_rig::median;

use super::papers::{Answer, ITEMS};
use super::{GEOMETRIC_MEAN, Measurement, ResultSet, Unit, distinct};

/// Make the overview of the results that experiments kept, and the page and the measurements of each anew
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory of the results
    #[arg(long, value_name = "DIR", default_value = "docs/results")]
    results: PathBuf,
    /// File whose table of headlines is made anew, between its two marks
    #[arg(long, value_name = "FILE", default_value = "README.md")]
    readme: PathBuf,
}

/// Marks around the headlines, each on a line of its own.
const MARKS: [&str; 2] = [
    "<!-- measured: begin (plimsoll lab report) -->",
    "<!-- measured: end -->",
];

/// Sets, and the beginning of what is measured, of the headlines.
const HEADLINES: [(&str, &str); 9] = [
    (
        "aet",
        "AET against exact LRU on the same references, hot set 2048",
    ),
    ("aet", "Traced exact LRU against every reference"),
    (
        "aet",
        "Working set of a period (5 % misses) by exact LRU against every reference",
    ),
    ("aet", "Overhead, hot set 64, rate 1/128"),
    (
        "judge-programs",
        "Error of the memory at which the misses a second are a tenth of the pages touched in a second",
    ),
    ("divide", "Promises"),
    (
        "divide",
        "scan-with-task: isolated sharing, at most 25 % more misses, curves from caches",
    ),
    ("overhead", "Added CPU time of vCPU and tracer"),
    (
        "splits",
        "Change of disk I/O per page: Evicted pages come from guest memory",
    ),
];

const INTRODUCTION: &str = "# Measured results\n\n\
    Made by `plimsoll lab report` from what the experiments kept here: of each a page (`.md`), its measurements by seed (`.csv`), and \
    everything with the data behind it (`.json`). Figures of single runs, made before results were kept, are in [single-runs.md](single-runs.md).\n";

/// Reads all sets and writes their pages, their measurements and the overview.
///
/// # Errors
///
/// A set that cannot be read, or the file that cannot be written.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let folder = &args.results;
    let sets = kept_in(folder)?;
    for set in &sets {
        for (ending, text) in [("md", set.markdown()), ("csv", set.csv())] {
            let file = folder.join(format!("{}.{ending}", set.name));
            write_file(&file, text.as_bytes())?;
        }
    }
    let path = folder.join("README.md");
    write_file(&path, overview(&sets).as_bytes())?;
    let readme = fs::read_to_string(&args.readme)
        .with_context(|| format!("cannot read '{}'", args.readme.display()))?;
    let readme = with_headlines(&readme, &sets).with_context(|| {
        format!(
            "'{}' has not the two marks of the headlines",
            args.readme.display()
        )
    })?;
    write_file(&args.readme, readme.as_bytes())?;
    writeln!(out, "{}: {} sets of results", path.display(), sets.len())?;
    Ok(())
}

/// All sets of a directory, by name.
fn kept_in(folder: &Path) -> anyhow::Result<Vec<ResultSet>> {
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
    Ok(sets)
}

/// The text with the headlines between its marks; `None` without the marks.
fn with_headlines(text: &str, sets: &[ResultSet]) -> Option<String> {
    let (before, rest) = text.split_once(MARKS[0])?;
    let (_, after) = rest.split_once(MARKS[1])?;
    let mut table = String::from("| what | measured | paper | |\n|---|---|---|---|\n");
    for (name, begin) in HEADLINES {
        let set = sets.iter().find(|set| set.name == name);
        for (what, rows) in set.map(topics).into_iter().flatten() {
            if what.starts_with(begin) {
                let paper = rows.first().map_or("", |one| &one.paper);
                let page = format!("[{name}](docs/results/{name}.md)");
                table.push_str(&format!(
                    "| {what} | {} | {paper} | {page} |\n",
                    headline(&rows)
                ));
            }
        }
    }
    Some(format!(
        "{before}{}\n\n{table}\n{}{after}",
        MARKS[0], MARKS[1]
    ))
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
        let names = |one: &Measurement| one.item.split(", ").any(|name| name == item);
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

/// The measurements of a set by what they measure, in their order.
fn topics(set: &ResultSet) -> Vec<(&str, Vec<&Measurement>)> {
    let all: Vec<&Measurement> = set.measurements.iter().collect();
    let rows_of = |what| all.iter().filter(move |one| one.what == what).copied();
    let topics = distinct(&all, |one| &one.what).into_iter();
    topics.map(|what| (what, rows_of(what).collect())).collect()
}

/// Rows in one cell: of a table of several columns each row's median over these; one row as it is; of several the geometric means, if there are any, or counts with the sums in their remarks;
/// otherwise the range of their medians, after the mean of the programs if there is one.
fn headline(rows: &[&Measurement]) -> String {
    if rows.iter().any(|one| !one.column.is_empty()) {
        let names = distinct(rows, |one| &one.of);
        let medians = names.iter().filter_map(|&name| {
            let cells = rows.iter().filter(|one| one.of == name);
            let middles: Vec<f64> = cells.filter_map(|one| Some(one.spread()?[1])).collect();
            let is_measured = !middles.is_empty();
            is_measured.then(|| format!("{name}: {}", rows[0].unit.text(median(middles))))
        });
        return format!(
            "medians over {}: {}",
            distinct(rows, |one| &one.column).join("; "),
            medians.collect::<Vec<_>>().join("; ")
        );
    }
    let each: Vec<_> = if rows
        .iter()
        .all(|one| one.unit == Unit::Count && !one.remark.is_empty())
    {
        rows.iter()
            .map(|one| format!("{}: {}", one.of, one.remark))
            .collect()
    } else {
        let means = rows.iter().filter(|one| one.of.starts_with(GEOMETRIC_MEAN));
        means
            .map(|one| format!("{}: {}", one.of, one.text()))
            .collect()
    };
    if !each.is_empty() {
        return each.join("; ");
    }
    let (mean, others): (Vec<&Measurement>, Vec<&Measurement>) =
        rows.iter().partition(|one| one.of == super::MEAN);
    if let [one] = others[..] {
        return format!("{}: {}", one.of, one.text());
    }
    let medians = others.iter().filter_map(|one| Some(one.spread()?[1]));
    let count = medians.clone().count();
    let [low, high] = medians.fold([f64::INFINITY, f64::NEG_INFINITY], |[low, high], median| {
        [low.min(median), high.max(median)]
    });
    let Some(first) = others.first().filter(|_| low <= high) else {
        return "not measured".to_owned();
    };
    let text = |value| first.unit.text(value);
    let mean = mean.first().and_then(|one| Some(one.spread()?[1]));
    let mean = mean.map_or_else(String::new, |mean| format!("{} in the mean; ", text(mean)));
    format!("{mean}{} to {} in {} rows", text(low), text(high), count)
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
        set.measurements[0].item = "AET table 1, AET table 3".to_owned();
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
    fn overview_and_readme_are_those_of_the_kept_sets() {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        let sets = kept_in(&root.join("docs/results")).unwrap();
        let read = |file: &str| fs::read_to_string(root.join(file)).unwrap();
        let is_current = read("docs/results/README.md") == overview(&sets);
        assert!(is_current, "run 'plimsoll lab report'");
        let readme = read("README.md");
        let is_current = with_headlines(&readme, &sets).as_ref() == Some(&readme);
        assert!(is_current, "run 'plimsoll lab report'");
        for set in &sets {
            for (ending, text) in [("md", set.markdown()), ("csv", set.csv())] {
                let name = format!("{}.{ending}", set.name);
                assert!(read(&format!("docs/results/{name}")) == text, "{name}");
            }
        }
        assert_eq!(with_headlines("no marks", &sets), None);
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
