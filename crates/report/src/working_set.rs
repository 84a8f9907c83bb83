//! Working sets of a page log or a trace by each estimator.

use std::fmt::Write as _;

use anyhow::ensure;
use plimsoll_estimator::registry::METHODS;
use plimsoll_flow::PageCount;
use plimsoll_observe::wss::{EstimatorArgs, Finding, LoggingEffect, Origin, Results, Step};
use serde::{Serialize, Serializer};

use plimsoll_output::{Cell, csv_table, grouped, json_line, labelled, table};
use plimsoll_plot::{Axis, Chart, Figure, Marker, Point, Series, SeriesStyle, Unit};
use plimsoll_protocol::size::ByteSize;

/// What logging did and cost, as JSON.
#[derive(Debug, Serialize)]
struct LoggingJson {
    estimator: &'static str,
    walks: u64,
    logged: u64,
    missed_at_full: u64,
    missed_in_handler: u64,
    left_in_buffers: u64,
    full_events: u64,
    exits: u64,
    slowdown_ratio: f64,
    host_cpu_ratio: f64,
}

impl LoggingJson {
    fn new(estimator: &'static str, logging: &LoggingEffect) -> Self {
        let vm = &logging.vm;
        Self {
            estimator,
            walks: vm.walks,
            logged: vm.logged,
            missed_at_full: vm.missed_at_full,
            missed_in_handler: vm.missed_in_handler,
            left_in_buffers: vm.left,
            full_events: vm.full_events,
            exits: vm.exits,
            slowdown_ratio: vm.slowdown(),
            host_cpu_ratio: logging.host.load(),
        }
    }
}

/// The names of an interval's numbers: those of every method, whether it ran or not.
fn step_names() -> Vec<&'static str> {
    let columns = METHODS.iter().flat_map(|method| method.columns);
    ["step", "at"].iter().chain(columns).copied().collect()
}

/// The numbers of an interval, as many as [`step_names`].
fn step_numbers(step: &Step) -> Vec<Option<u64>> {
    let columns = step.columns.iter().flatten().copied();
    [Some(step.number), Some(step.at)]
        .into_iter()
        .chain(columns)
        .collect()
}

/// An interval as JSON.
struct StepJson<'a>(&'a Step);

impl Serialize for StepJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(step_names().into_iter().zip(step_numbers(self.0)))
    }
}

#[derive(Debug, Serialize)]
struct Truth {
    intervals: u16,
    times: u16,
}

/// Everything as JSON.
#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    name: &'a str,
    source: &'static str,
    machine: &'a str,
    page_bytes: u64,
    /// What `interval` and `at` count: instructions or references.
    unit: &'static str,
    interval: u64,
    intervals: u64,
    instructions: u64,
    references: Option<u64>,
    walks: u64,
    /// Whether only the section between the guest's marks was evaluated.
    marked: bool,
    /// Why the log ends early, if it does.
    cut: Option<&'a str>,
    /// Records lost when the log was recorded, if known.
    lost: Option<u64>,
    epsilon_pages: u64,
    truth: Truth,
    estimators: &'a [Finding],
    logging: Vec<LoggingJson>,
    /// Every which interval is among the steps.
    every: u64,
    steps: Vec<StepJson<'a>>,
}

/// The findings of a run with their origin.
#[derive(Debug)]
pub struct WorkingSetReport<'a> {
    name: String,
    origin: Origin,
    args: &'a EstimatorArgs,
    results: Results,
    findings: Vec<Finding>,
    /// Whether tables and CSV show each interval.
    has_steps: bool,
}

impl<'a> WorkingSetReport<'a> {
    /// The findings of a run of this name; with `has_steps` their state at the end of each interval.
    pub fn new(
        name: String,
        origin: Origin,
        args: &'a EstimatorArgs,
        results: Results,
        has_steps: bool,
    ) -> Self {
        Self {
            name,
            findings: results.findings(&origin, args),
            origin,
            args,
            results,
            has_steps,
        }
    }

    fn bytes(&self, pages: u64) -> String {
        ByteSize(PageCount(pages).to_bytes(self.origin.page_size)).rounded()
    }

    /// The lines that describe the run.
    fn heads(&self) -> Vec<(&'static str, String)> {
        let (origin, results) = (&self.origin, &self.results);
        let mut source = format!("{}, {}", origin.kind, origin.machine);
        if let Some(memory) = origin.memory {
            let _ = write!(source, ", {} of memory", self.bytes(memory.0));
        }
        let mut run = format!(
            "{} intervals of {} {}",
            grouped(results.intervals as f64),
            grouped(origin.interval.get() as f64),
            origin.unit,
        );
        if results.marked {
            run.push_str(", from the guest's mark on");
        }
        let truth = self.args.truth();
        let mut heads = vec![
            ("run", self.name.clone()),
            ("source", source),
            ("intervals", run),
            (
                "truth",
                match (truth.times.get(), truth.intervals.get()) {
                    (1, all) => format!("pages touched within {all} intervals"),
                    (times, all) => format!("pages touched in {times} of {all} intervals"),
                },
            ),
        ];
        let epsilon = self.args.epsilon(self.origin.page_size);
        if epsilon.0 > 0 {
            heads.push((
                "kernel",
                format!("{} added to prl, not in its error", self.bytes(epsilon.0)),
            ));
        }
        if let Some(totals) = results.totals.filter(|totals| totals.lost > 0) {
            heads.push((
                "lost",
                format!(
                    "{} records when the log was taken",
                    grouped(totals.lost as f64)
                ),
            ));
        }
        if let Some(cut) = &results.cut {
            heads.push(("cut", cut.clone()));
        }
        heads
    }

    fn findings_table(&self) -> String {
        let mut table = labelled(12, self.heads());
        let hundredths = |share: f64| format!("{:.2} %", share * 100.0);
        table.push('\n');
        table.push_str(&table!(&self.findings, |finding| {
            Left "estimator": finding.estimator,
            Right "working set": match finding.working_set_pages.zip(finding.bound) {
                Some((pages, bound)) => bound.sign().to_owned() + &self.bytes(pages),
                None => "-".to_owned(),
            },
            Right "pages": finding.working_set_pages.map(|pages| grouped(pages as f64)),
            Right "error": finding.working_set_pages.map(|_| match finding.error_ratio {
                Some(error) => format!("{:+.2} %", error * 100.0),
                None => "-".to_owned(),
            }),
            Left "settled": match finding.working_set_pages {
                Some(_) => self.settled(finding),
                None => finding.reason.unwrap_or_default().to_owned(),
            },
        }));
        if self.results.logging().next().is_some() {
            table.push('\n');
            table.push_str(&table!(self.results.logging(), |(name, logging)| {
                Left "logging": name,
                Right "walks": grouped(logging.vm.walks as f64),
                Right "logged": grouped(logging.vm.logged as f64),
                Right "missed": grouped(logging.vm.missed() as f64),
                Right "share": {
                    let tried = (logging.vm.logged + logging.vm.missed()).max(1);
                    hundredths(logging.vm.missed() as f64 / tried as f64)
                },
                Right "full": grouped(logging.vm.full_events as f64),
                Right "slowdown": hundredths(logging.vm.slowdown()),
                Right "host CPU": hundredths(logging.host.load()),
            }));
        }
        table.replace('\u{a0}', " ")
    }

    /// When, or with what confidence.
    fn settled(&self, finding: &Finding) -> String {
        if let (Some(step), Some(at)) = (finding.settled_step, finding.settled_at) {
            let at = grouped(at as f64);
            return format!("interval {step}, after {at} {}", self.origin.unit);
        }
        let reported = finding.reported.unwrap_or("not within the run");
        match (finding.low_pages, finding.high_pages) {
            (Some(low), Some(high)) => {
                let (low, high) = (self.bytes(low), self.bytes(high));
                format!("{reported}; 95 %: {low} to {high}")
            }
            _ => reported.to_owned(),
        }
    }

    fn findings_csv(&self) -> String {
        csv_table!(&self.findings, |found| {
            "estimator": found.estimator,
            "working_set_pages": found.working_set_pages,
            "bound": found.bound.map(|bound| bound.to_string()),
            "low_pages": found.low_pages,
            "high_pages": found.high_pages,
            "truth_pages": found.truth_pages,
            "error_ratio": found.error_ratio,
            "settled_step": found.settled_step,
            "settled_at": found.settled_at,
            "reason": found.reason,
        })
    }

    fn step_rows(&self) -> impl Iterator<Item = Vec<String>> + '_ {
        self.results
            .steps
            .iter()
            .map(|step| step_numbers(step).iter().map(Cell::cell).collect())
    }

    fn steps_csv(&self) -> String {
        let mut csv = step_names().join(",") + "\n";
        for row in self.step_rows() {
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(csv, "{}", row.join(","));
        }
        csv
    }

    fn steps_table(&self) -> String {
        let names = step_names();
        let rows: Vec<_> = self.step_rows().collect();
        // Columns that nobody filled are left out.
        let shown: Vec<_> = (0..names.len())
            .filter(|&column| rows.iter().any(|row| !row[column].is_empty()))
            .collect();
        let mut table = String::new();
        let heads = names
            .iter()
            .map(|name| name.trim_end_matches("_pages").replace('_', " "));
        let heads: Vec<_> = heads.collect();
        for &column in &shown {
            let _ = write!(table, "{:>16}", heads[column]);
        }
        table.push('\n');
        for row in &rows {
            for &column in &shown {
                let cell = match row[column].as_str() {
                    "" => "-",
                    cell => cell,
                };
                let _ = write!(table, "{cell:>16}");
            }
            table.push('\n');
        }
        table
    }

    fn document(&self) -> Document<'_> {
        let (origin, results) = (&self.origin, &self.results);
        let truth = self.args.truth();
        Document {
            schema: 1,
            name: &self.name,
            source: origin.kind,
            machine: &origin.machine,
            page_bytes: origin.page_size.bytes(),
            unit: origin.unit,
            interval: origin.interval.get(),
            intervals: results.intervals,
            instructions: results.instructions,
            references: results.has_references.then_some(results.accesses),
            walks: results.walks,
            marked: results.marked,
            cut: results.cut.as_deref(),
            lost: results.totals.map(|totals| totals.lost),
            epsilon_pages: self.args.epsilon(self.origin.page_size).0,
            truth: Truth {
                intervals: truth.intervals.get(),
                times: truth.times.get(),
            },
            estimators: &self.findings,
            logging: results
                .logging()
                .map(|(name, logging)| LoggingJson::new(name, logging))
                .collect(),
            every: results.steps.every(),
            steps: results.steps.iter().map(StepJson).collect(),
        }
    }

    fn chart(&self) -> Chart {
        let steps = || self.results.steps.iter();
        let bytes = |pages: PageCount| pages.to_bytes(self.origin.page_size) as f64;
        let drawn = |index: usize, look| {
            let plotted = METHODS[index].plotted;
            let points = steps().filter_map(|step| {
                let columns = &step.columns[index];
                let y = bytes(PageCount(columns[plotted.column]?));
                let limit = |column: usize| columns[column].map_or(y, |n| bytes(PageCount(n)));
                let (low, high) = plotted.band.map_or((y, y), |(l, h)| (limit(l), limit(h)));
                let x = step.number as f64;
                Some(Point { x, y, low, high })
            });
            Series {
                name: plotted.label.to_owned(),
                look,
                points: points.collect(),
            }
        };
        let mut series: Vec<_> = (1..METHODS.len())
            .map(|index| drawn(index, SeriesStyle::Line))
            .collect();
        if self.args.wants(METHODS[0].name) || series.iter().any(|s| !s.points.is_empty()) {
            series.push(drawn(0, SeriesStyle::Truth));
        }
        series.retain(|series| !series.points.is_empty());
        let markers = self.findings.iter().filter_map(|finding| {
            Some(Marker {
                x: finding.settled_step? as f64,
                label: format!(
                    "{} settled: {}",
                    finding.estimator,
                    self.bytes(finding.working_set_pages?)
                ),
            })
        });
        let title = format!("Working set of {}", self.name);
        let subtitle = format!(
            "{}, {} · intervals of {} {}",
            self.origin.kind,
            self.origin.machine,
            grouped(self.origin.interval.get() as f64),
            self.origin.unit
        );
        let x = Axis::new("Interval", Unit::Count);
        let y = Axis::new("Working set", Unit::Bytes);
        Chart {
            markers: markers.collect(),
            ..Chart::new(title, subtitle, [x, y], series)
        }
    }
}

impl Figure for WorkingSetReport<'_> {
    fn table(&self) -> anyhow::Result<String> {
        Ok(match self.has_steps {
            true => self.steps_table(),
            false => self.findings_table(),
        })
    }

    fn csv(&self) -> anyhow::Result<String> {
        Ok(match self.has_steps {
            true => self.steps_csv(),
            false => self.findings_csv(),
        })
    }

    fn json(&self) -> anyhow::Result<String> {
        json_line(&self.document())
    }

    fn svg(&self) -> anyhow::Result<String> {
        let chart = self.chart();
        let is_empty = chart.series.iter().all(|series| series.points.is_empty());
        ensure!(
            !is_empty,
            "there is no working set to draw: the table has the reasons"
        );
        Ok(chart.to_svg())
    }
}
