//! Results that are kept: one set per experiment, under docs/results.
//!
//! An experiment makes a [`ResultSet`]; [`KeepArgs::keep`] writes it as `NAME.json` (everything), `NAME.csv` (the
//! measurements), `NAME.md` (for readers) and its charts as SVG. [`report`] makes the overview of all sets.

mod papers;
mod progress;
pub mod report;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use plimsoll_output::write_file;
use plimsoll_plot::Chart;
use plimsoll_rig::median;
use serde::{Deserialize, Serialize};

pub use progress::Progress;

/// What a row of means over programs is of.
pub const MEAN: &str = "mean of the programs";
/// What measurements of a mean over unlike VMs begin with.
pub const GEOMETRIC_MEAN: &str = "geometric mean";

/// Version of the kept form.
const SCHEMA: u32 = 1;

/// Where an experiment's result goes.
#[derive(Debug, Clone, clap::Args)]
pub struct KeepArgs {
    /// Directory in which the result is kept as JSON, CSV, Markdown and SVG; without it, the Markdown is printed
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

/// The result of an experiment.
#[derive(Debug, Serialize, Deserialize)]
pub struct ResultSet {
    pub schema: u32,
    /// Stem of its files.
    pub name: String,
    pub title: String,
    /// How it was measured, in sentences.
    pub method: String,
    /// The command that measures it again.
    pub command: String,
    pub conditions: Conditions,
    /// How often everything was measured; each measurement has as many values.
    pub repetitions: u64,
    /// What changes from one repetition to the next.
    pub repetition: Repetition,
    pub measurements: Vec<Measurement>,
    pub charts: Vec<ChartFile>,
    /// What the result does not show, each a sentence.
    pub limits: Vec<String>,
    /// What the measurements were computed from; its shape is the experiment's own.
    pub raw: serde_json::Value,
}

/// What changes from one repetition of an experiment to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Repetition {
    /// The seed.
    Seed,
    /// The pair of windows that are compared.
    Pair,
}

impl Repetition {
    fn name(self) -> &'static str {
        match self {
            Self::Seed => "seed",
            Self::Pair => "pair",
        }
    }
}

/// The machine, and what else ran on it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Conditions {
    pub processor: String,
    pub processors: usize,
    /// Version of the host's kernel, without what its builder added.
    pub host_kernel: String,
    pub qemu: String,
    /// What executed the guests' instructions.
    pub accelerator: String,
    pub guest: String,
    /// Mean number of running tasks in the last minute: before the experiment, and after it.
    pub load: [f64; 2],
    pub version: String,
}

/// A figure, measured once in each repetition.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measurement {
    /// The table or figure that it answers: as `AET table 2`, or several, separated by `, `.
    pub item: String,
    /// What is measured; measurements with the same text make one table.
    pub what: String,
    /// The program, workload, method or setting: the row of its table.
    pub of: String,
    /// The column of its table; empty if this has one column of measurements.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub column: String,
    pub unit: Unit,
    /// By repetition; `null` where one could not be measured.
    pub values: Vec<Option<f64>>,
    /// What the paper reports, as text; empty for nothing comparable.
    pub paper: String,
    /// Why it differs from the paper, or what to know of it; may be empty.
    pub remark: String,
}

/// The unit of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// A share of 1.0, shown with four digits.
    Share,
    /// A share of 1.0, shown in percent.
    Percent,
    /// Bytes, shown in MiB.
    Bytes,
    Seconds,
    Microseconds,
    Count,
    /// A mean of counts, shown with two digits.
    Mean,
    /// A small ratio, shown with an exponent.
    Ratio,
    /// A value relative to another, shown with two digits: 1.00 is no change.
    Factor,
}

/// A chart of a set.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ChartFile {
    /// Name of the file, beside the set's own.
    pub file: String,
    pub caption: String,
}

impl Unit {
    fn text(self, value: f64) -> String {
        match self {
            Self::Share => format!("{value:.4}"),
            Self::Percent => format!("{:.2} %", value * 100.0),
            Self::Bytes => format!("{:.1} MiB", value / f64::from(1 << 20)),
            Self::Seconds => format!("{value:.2} s"),
            Self::Microseconds => format!("{} µs", plimsoll_output::grouped(value.round())),
            Self::Count => plimsoll_output::grouped(value.round()),
            Self::Ratio => format!("{value:.2e}"),
            Self::Mean | Self::Factor => format!("{value:.2}"),
        }
    }
}

impl Measurement {
    /// Smallest value, median and largest; `None` without values.
    pub fn spread(&self) -> Option<[f64; 3]> {
        let mut values: Vec<f64> = self.values.iter().copied().flatten().collect();
        values.sort_by(f64::total_cmp);
        let (first, last) = (*values.first()?, *values.last()?);
        Some([first, median(values), last])
    }

    /// The spread as text: `median (smallest to largest)`, or the only value.
    pub fn text(&self) -> String {
        let missing = self.values.iter().filter(|value| value.is_none()).count();
        match self.spread() {
            None => "not measured".to_owned(),
            Some([value, ..]) if self.values.len() == 1 => self.unit.text(value),
            Some([low, middle, high]) => {
                let text = |value| self.unit.text(value);
                let without = match missing {
                    0 => String::new(),
                    count => format!("; {count} of {} without a value", self.values.len()),
                };
                format!(
                    "{} ({} to {}{without})",
                    text(middle),
                    text(low),
                    text(high)
                )
            }
        }
    }
}

impl Conditions {
    /// Describes this machine as it is now; [`ended`](Self::ended) completes it.
    ///
    /// # Errors
    ///
    /// The file of the kernel that cannot be read.
    pub fn begin(accelerator: &str, guest: &str) -> anyhow::Result<Self> {
        let read =
            |path: &str| fs::read_to_string(path).with_context(|| format!("cannot read '{path}'"));
        let processors = read("/proc/cpuinfo")?;
        let processor = processors
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
            .map_or("unknown", |(_, name)| name);
        let release = read("/proc/sys/kernel/osrelease")?;
        let qemu = plimsoll_vm::qemu_program()
            .and_then(|program| Command::new(program).arg("--version").output())
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        Ok(Self {
            processor: processor.to_owned(),
            processors: std::thread::available_parallelism()?.get(),
            host_kernel: release
                .trim()
                .split('-')
                .next()
                .unwrap_or_default()
                .to_owned(),
            qemu: qemu
                .ok()
                .and_then(|text| Some(text.lines().next()?.to_owned()))
                .unwrap_or_default(),
            accelerator: accelerator.to_owned(),
            guest: guest.to_owned(),
            load: [load()?, 0.0],
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }

    /// Records the load at the end.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin).
    pub fn ended(mut self) -> anyhow::Result<Self> {
        self.load[1] = load()?;
        Ok(self)
    }
}

/// The texts of a field, each once, in the order of the first of each.
fn distinct<'a>(measurements: &[&'a Measurement], field: fn(&Measurement) -> &str) -> Vec<&'a str> {
    let mut texts = Vec::new();
    for one in measurements {
        let text = field(one);
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    texts
}

/// A table of several columns; a cell without a value has its remark.
fn grid(measurements: &[&Measurement]) -> String {
    let columns = distinct(measurements, |one| &one.column);
    let mut text = format!("| | {} |\n", columns.join(" | "));
    text.push_str(&format!("| --- |{}\n", " --- |".repeat(columns.len())));
    for row in distinct(measurements, |one| &one.of) {
        let cells = columns.iter().map(|&column| {
            let mut those = measurements.iter();
            let cell = those.find(|one| one.of == row && one.column == column);
            cell.map_or_else(String::new, |one| match one.spread() {
                None if !one.remark.is_empty() => one.remark.clone(),
                _ => one.text(),
            })
        });
        text.push_str(&format!(
            "| {row} | {} |\n",
            cells.collect::<Vec<_>>().join(" | ")
        ));
    }
    text
}

fn load() -> anyhow::Result<f64> {
    let text = fs::read_to_string("/proc/loadavg").context("cannot read '/proc/loadavg'")?;
    let first = text.split(' ').next().unwrap_or_default();
    first
        .parse()
        .with_context(|| format!("no load in '{text}'"))
}

impl ResultSet {
    /// Returns a set without measurements.
    pub fn new(
        name: &str,
        conditions: Conditions,
        (repetitions, repetition): (u64, Repetition),
    ) -> Self {
        Self {
            schema: SCHEMA,
            name: name.to_owned(),
            title: String::new(),
            method: String::new(),
            command: String::new(),
            conditions,
            repetitions,
            repetition,
            measurements: Vec::new(),
            charts: Vec::new(),
            limits: Vec::new(),
            raw: serde_json::Value::Null,
        }
    }

    /// Reads a kept set.
    ///
    /// # Errors
    ///
    /// That the file cannot be read, or is not of this form.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let read = || -> anyhow::Result<Self> {
            let set: Self = serde_json::from_slice(&fs::read(path)?)?;
            anyhow::ensure!(set.schema == SCHEMA, "schema {}, not {SCHEMA}", set.schema);
            Ok(set)
        };
        read().with_context(|| format!("no results in '{}'", path.display()))
    }

    /// The set for readers.
    pub fn markdown(&self) -> String {
        let Conditions {
            processor,
            processors,
            host_kernel,
            qemu,
            accelerator,
            guest,
            load,
            version,
        } = &self.conditions;
        let mut text = format!(
            "# {}\n\n{}\n\n**Conditions.** {processors} x {processor}, Linux {host_kernel}, {qemu}, accelerator {accelerator}, {guest}; load {:.1} before, \
             {:.1} after; Plimsoll {version}; {}\n\n    {}\n",
            self.title,
            self.method,
            load[0],
            load[1],
            match (self.repetitions, self.repetition.name()) {
                (1, name) => format!("one {name}."),
                (count, name) => format!(
                    "{count} {name}s. Each cell is the median, with the smallest and the largest value."
                ),
            },
            self.command
        );
        let all: Vec<&Measurement> = self.measurements.iter().collect();
        for what in distinct(&all, |one| &one.what) {
            let rows = || self.measurements.iter().filter(|one| one.what == what);
            text.push_str(&format!("\n## {what}\n\n"));
            if let Some(first) = rows().next().filter(|one| !one.item.is_empty()) {
                text.push_str(&format!("{}\n\n", first.item));
            }
            if rows().any(|one| !one.column.is_empty()) {
                text.push_str(&grid(&rows().collect::<Vec<_>>()));
                continue;
            }
            let has_paper = rows().any(|one| !one.paper.is_empty());
            let columns = |one: [&str; 4]| match has_paper {
                true => format!("| {} |\n", one.join(" | ")),
                false => format!("| {} | {} | {} |\n", one[0], one[1], one[3]),
            };
            text.push_str(&columns(["", "measured", "paper", ""]));
            text.push_str(&columns(["---"; 4]));
            for one in rows() {
                text.push_str(&columns([&one.of, &one.text(), &one.paper, &one.remark]));
            }
        }
        for chart in &self.charts {
            text.push_str(&format!("\n![{}]({})\n", chart.caption, chart.file));
        }
        if !self.limits.is_empty() {
            text.push_str("\n## Limits\n\n");
            for limit in &self.limits {
                text.push_str(&format!("- {limit}\n"));
            }
        }
        text
    }

    fn values(&self) -> usize {
        self.measurements.iter().map(|one| one.values.len()).sum()
    }

    fn csv(&self) -> String {
        let mut text = format!(
            "item,what,of,column,unit,{},value\n",
            self.repetition.name()
        );
        for one in &self.measurements {
            for (number, value) in (1_u64..).zip(&one.values) {
                let unit = serde_json::to_value(one.unit).unwrap_or_default();
                let value = value.map(|value| value.to_string()).unwrap_or_default();
                text.push_str(&plimsoll_output::csv([
                    one.item.as_str(),
                    &one.what,
                    &one.of,
                    &one.column,
                    unit.as_str().unwrap_or_default(),
                    &number.to_string(),
                    &value,
                ]));
            }
        }
        text
    }
}

impl KeepArgs {
    /// Writes the set to the directory, or its Markdown to `out`: also if the directory has one of the same name with more values,
    /// which that of a `--quick` run must not replace.
    ///
    /// # Errors
    ///
    /// The file that cannot be written; those before it are there.
    pub fn keep(
        &self,
        mut set: ResultSet,
        charts: Vec<(&str, Chart)>,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let Some(folder) = &self.keep else {
            out.write_all(set.markdown().as_bytes())?;
            return Ok(());
        };
        let json = folder.join(format!("{}.json", set.name));
        if json.exists() && ResultSet::read(&json)?.values() > set.values() {
            out.write_all(set.markdown().as_bytes())?;
            let path = json.display();
            writeln!(
                out,
                "\nnot kept: {path} has more values; remove it to keep these"
            )?;
            return Ok(());
        }
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create '{}'", folder.display()))?;
        for (name, chart) in charts {
            let file = format!("{}-{name}.svg", set.name);
            write_file(&folder.join(&file), chart.to_svg().as_bytes())?;
            set.charts.push(ChartFile {
                file,
                caption: chart.title,
            });
        }
        let path = |ending: &str| folder.join(format!("{}.{ending}", set.name));
        write_file(&path("csv"), set.csv().as_bytes())?;
        write_file(&path("md"), set.markdown().as_bytes())?;
        write_file(&json, (serde_json::to_string(&set)? + "\n").as_bytes())?;
        writeln!(
            out,
            "kept in {}: {} measurements, {} charts",
            path("md").display(),
            set.measurements.len(),
            set.charts.len()
        )?;
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A set with one measurement.
    pub(crate) fn example(name: &str) -> ResultSet {
        ResultSet {
            title: "An example".to_owned(),
            method: "By hand.".to_owned(),
            command: "plimsoll lab example".to_owned(),
            measurements: vec![Measurement {
                item: "AET table 2".to_owned(),
                what: "Overhead".to_owned(),
                of: "redis".to_owned(),
                column: String::new(),
                unit: Unit::Percent,
                values: vec![Some(0.03), None, Some(0.01)],
                paper: "1.1 to 15.8 %".to_owned(),
                remark: String::new(),
            }],
            limits: vec!["Nothing was measured.".to_owned()],
            ..ResultSet::new(
                name,
                Conditions::begin("tcg", "no guest").unwrap(),
                (3, Repetition::Seed),
            )
        }
    }

    #[test]
    fn measurements_with_columns_make_one_table_of_them() {
        let cell = |of: &str, column: &str, value, remark: &str| Measurement {
            item: String::new(),
            what: "Error".to_owned(),
            of: of.to_owned(),
            column: column.to_owned(),
            unit: Unit::Percent,
            values: vec![value],
            paper: String::new(),
            remark: remark.to_owned(),
        };
        let mut set = example("one");
        set.measurements = vec![
            cell("idle", "redis", Some(0.01), ""),
            cell("writes", "redis", None, "only reads"),
            cell("idle", "xz", Some(0.03), ""),
        ];
        let text = set.markdown();
        let table = "| | redis | xz |\n| --- | --- | --- |\n| idle | 1.00 % | 3.00 % |\n| writes | only reads |  |\n";
        assert!(text.contains(table), "{text}");
    }

    #[test]
    fn a_set_is_read_as_it_was_kept() {
        let folder = tempfile::tempdir().unwrap();
        let keep = KeepArgs {
            keep: Some(folder.path().join("results")),
        };
        keep.keep(example("one"), Vec::new(), &mut Vec::new())
            .unwrap();
        let path = |ending: &str| folder.path().join("results/one").with_extension(ending);
        let read = ResultSet::read(&path("json")).unwrap();
        assert_eq!(read.measurements[0].values, [Some(0.03), None, Some(0.01)]);
        let text = fs::read_to_string(path("md")).unwrap();
        assert!(
            text.contains(
                "| redis | 2.00 % (1.00 % to 3.00 %; 1 of 3 without a value) | 1.1 to 15.8 % |"
            ),
            "{text}"
        );
        assert_eq!(fs::read_to_string(path("csv")).unwrap().lines().count(), 4);

        let mut fewer = example("one");
        fewer.measurements[0].values.pop();
        let mut said = Vec::new();
        keep.keep(fewer, Vec::new(), &mut said).unwrap();
        assert!(String::from_utf8(said).unwrap().contains("not kept: "));
        assert_eq!(fs::read_to_string(path("md")).unwrap(), text);
        keep.keep(example("one"), Vec::new(), &mut Vec::new())
            .unwrap();

        fs::write(path("json"), "{}").unwrap();
        let error = ResultSet::read(&path("json")).unwrap_err();
        assert!(error.to_string().contains("one.json"), "{error}");
    }
}
