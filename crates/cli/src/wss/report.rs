//! What the estimators found, as a reader, a program or a picture wants it.

use std::fmt::Write as _;

use plimsoll_flow::{MissRatioCurve, PageCount, WorkingSet, WorkingSetBound};
use serde::Serialize;

use super::Origin;
use super::analysis::{Logging, Results, Settling};
use super::options::{EstimatorArgs, Method};
use super::steps::Step;
use crate::size::ByteSize;
use plimsoll_output::{Format, grouped};
use plimsoll_plot::{Axis, Chart, Look, Marker, Point, Series, Unit, encode};

const NO_WALKS: &str = "the log has no page walks";
const NO_REFERENCES: &str = "the log has no references: record with references=on";
const NO_MEMORY: &str = "give --memory, the size of the VM that made the trace";
const NO_INTERVAL: &str = "the run is shorter than an interval";

/// What an estimator found.
#[derive(Debug, Clone, Serialize)]
struct Finding {
    estimator: &'static str,
    working_set_pages: Option<u64>,
    working_set_bytes: Option<u64>,
    /// `estimate`, `at_least` or `at_most`.
    bound: Option<String>,
    /// Of 95 % confidence.
    low_pages: Option<u64>,
    high_pages: Option<u64>,
    /// The truth when it was found; for esx, that of the last interval alone.
    truth_pages: Option<u64>,
    /// What was found over the truth, less 1; without ε.
    error_ratio: Option<f64>,
    /// Step that it settled at, from 0, and instructions or references until its end.
    settled_step: Option<u64>,
    settled_at: Option<u64>,
    /// Why nothing was found.
    reason: Option<&'static str>,
}

impl Finding {
    fn none(estimator: &'static str, reason: &'static str) -> Self {
        Self {
            estimator,
            working_set_pages: None,
            working_set_bytes: None,
            bound: None,
            low_pages: None,
            high_pages: None,
            truth_pages: None,
            error_ratio: None,
            settled_step: None,
            settled_at: None,
            reason: Some(reason),
        }
    }

    /// With the truth, which `found` is compared with.
    fn beside(self, truth: Option<PageCount>, found: PageCount) -> Self {
        Self {
            truth_pages: truth.map(|truth| truth.0),
            error_ratio: truth
                .filter(|truth| truth.0 > 0)
                .map(|truth| found.0 as f64 / truth.0 as f64 - 1.0),
            ..self
        }
    }

    /// With limits of 95 % confidence.
    fn within(self, low: PageCount, high: PageCount) -> Self {
        Self {
            low_pages: Some(low.0),
            high_pages: Some(high.0),
            ..self
        }
    }
}

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
    fn new(estimator: &'static str, logging: &Logging) -> Self {
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

/// What an interval ended with, as JSON and CSV.
#[derive(Debug, Serialize)]
struct StepJson {
    step: u64,
    at: u64,
    touched_pages: Option<u64>,
    truth_pages: Option<u64>,
    prl_hot_pages: Option<u64>,
    prl_growth_pages: Option<u64>,
    pml_written_pages: Option<u64>,
    pml_cumulative_pages: Option<u64>,
    esx_pages: Option<u64>,
    esx_low_pages: Option<u64>,
    esx_high_pages: Option<u64>,
    esx_smoothed_pages: Option<u64>,
}

impl StepJson {
    const HEAD: &'static str = "step,at,touched_pages,truth_pages,prl_hot_pages,prl_growth_pages,\
        pml_written_pages,pml_cumulative_pages,esx_pages,esx_low_pages,esx_high_pages,esx_smoothed_pages";

    fn new(step: &Step) -> Self {
        let confidence = step.esx.map(|esx| esx.confidence());
        Self {
            step: step.number,
            at: step.at,
            touched_pages: step.truth.map(|truth| truth.touched.0),
            truth_pages: step.truth.map(|truth| truth.working_set.0),
            prl_hot_pages: step.prl.map(|prl| prl.hot.0),
            prl_growth_pages: step.prl.and_then(|prl| prl.growth),
            pml_written_pages: step.pml.map(|pml| pml.written.0),
            pml_cumulative_pages: step.pml.map(|pml| pml.cumulative.0),
            esx_pages: step.esx.map(|esx| esx.size.0),
            esx_low_pages: confidence.map(|(low, _)| low.0),
            esx_high_pages: confidence.map(|(_, high)| high.0),
            esx_smoothed_pages: step.esx.map(|esx| esx.smoothed.0),
        }
    }

    fn columns(&self) -> [Option<u64>; 12] {
        [
            Some(self.step),
            Some(self.at),
            self.touched_pages,
            self.truth_pages,
            self.prl_hot_pages,
            self.prl_growth_pages,
            self.pml_written_pages,
            self.pml_cumulative_pages,
            self.esx_pages,
            self.esx_low_pages,
            self.esx_high_pages,
            self.esx_smoothed_pages,
        ]
    }
}

#[derive(Debug, Serialize)]
struct Truth {
    intervals: u16,
    times: u16,
}

/// Everything as JSON.
#[derive(Debug, Serialize)]
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
    /// Whether only what lies between the guest's marks was looked at.
    marked: bool,
    /// Why the log ends early, if it does.
    cut: Option<&'a str>,
    /// Records lost when the log was taken, if it says.
    lost: Option<u64>,
    epsilon_pages: u64,
    truth: Truth,
    estimators: &'a [Finding],
    logging: Vec<LoggingJson>,
    /// Every which interval is among the steps.
    every: u64,
    steps: Vec<StepJson>,
}

/// What was found, and what a reader wants to know about it.
pub(super) struct Report<'a> {
    name: String,
    origin: Origin,
    args: &'a EstimatorArgs,
    results: Results,
    findings: Vec<Finding>,
}

impl<'a> Report<'a> {
    pub(super) fn new(
        name: String,
        origin: Origin,
        args: &'a EstimatorArgs,
        results: Results,
    ) -> Self {
        let mut report = Self {
            name,
            origin,
            args,
            results,
            findings: Vec::new(),
        };
        for (method, find) in [
            (Method::Truth, Self::truth as fn(&Self) -> Vec<Finding>),
            (Method::Prl, Self::prl),
            (Method::Pml, Self::pml),
            (Method::Esx, Self::esx),
            (Method::Mrc, Self::mrc),
        ] {
            if args.wants(method) {
                let found = find(&report);
                report.findings.extend(found);
            }
        }
        report
    }

    pub(super) fn to(&self, format: Format, steps: bool) -> anyhow::Result<Vec<u8>> {
        Ok(match format {
            Format::Table if steps => self.steps_table().into_bytes(),
            Format::Table => self.table().into_bytes(),
            Format::Csv if steps => self.steps_csv().into_bytes(),
            Format::Csv => self.csv().into_bytes(),
            Format::Json => (serde_json::to_string(&self.document())? + "\n").into_bytes(),
            picture @ (Format::Svg | Format::Png) => encode(self.chart().to_svg(), picture)?,
        })
    }

    /// The truth at the end of the run.
    fn last_truth(&self) -> Option<PageCount> {
        let last = self.results.steps.last()?;
        Some(last.truth?.working_set)
    }

    /// What is added to what prl finds.
    fn epsilon(&self) -> PageCount {
        self.args.epsilon(self.origin.page_size)
    }

    /// A size that was found, beside the truth then, and what is added to it.
    fn found(
        &self,
        estimator: &'static str,
        working_set: WorkingSet,
        settling: Option<Settling>,
        added: PageCount,
    ) -> Finding {
        let truth = match settling {
            Some(settling) => settling.truth,
            None => self.last_truth(),
        };
        let size = PageCount(working_set.size.0.saturating_add(added.0));
        Finding {
            working_set_pages: Some(size.0),
            working_set_bytes: Some(size.to_bytes(self.origin.page_size)),
            bound: Some(working_set.bound.to_string()),
            settled_step: settling.map(|settling| settling.settled.step),
            settled_at: settling.map(|settling| settling.at),
            reason: None,
            ..Finding::none(estimator, "")
        }
        .beside(truth, working_set.size)
    }

    fn truth(&self) -> Vec<Finding> {
        let name = "truth";
        vec![match self.last_truth() {
            Some(size) => {
                let bound = WorkingSetBound::Estimate;
                let truth = self.found(name, WorkingSet { size, bound }, None, PageCount(0));
                Finding {
                    truth_pages: None,
                    error_ratio: None,
                    ..truth
                }
            }
            None if self.results.has_walks => Finding::none(name, NO_INTERVAL),
            None => Finding::none(name, NO_WALKS),
        }]
    }

    fn prl(&self) -> Vec<Finding> {
        vec![match &self.results.prl {
            Some(prl) if prl.estimator.steps() > 0 => self.found(
                "prl",
                prl.estimator.working_set(),
                prl.settled,
                self.epsilon(),
            ),
            Some(_) => Finding::none("prl", NO_INTERVAL),
            None => Finding::none("prl", NO_WALKS),
        }]
    }

    fn pml(&self) -> Vec<Finding> {
        vec![match &self.results.pml {
            Some(pml) if pml.estimator.steps() > 0 => self.found(
                "pml",
                pml.estimator.working_set(),
                pml.settled,
                PageCount(0),
            ),
            Some(_) => Finding::none("pml", NO_INTERVAL),
            None => Finding::none("pml", NO_WALKS),
        }]
    }

    fn esx(&self) -> Vec<Finding> {
        let last = self.results.steps.last();
        vec![match last.and_then(|step| step.esx) {
            Some(esx) => {
                let (bound, size) = (WorkingSetBound::Estimate, esx.size);
                let (low, high) = esx.confidence();
                let found = self.found("esx", WorkingSet { size, bound }, None, PageCount(0));
                // It tells of the last interval alone.
                let truth = last.and_then(|step| step.truth).map(|truth| truth.touched);
                found.beside(truth, size).within(low, high)
            }
            None if !self.results.has_walks => Finding::none("esx", NO_WALKS),
            None if self.origin.memory.is_none() => Finding::none("esx", NO_MEMORY),
            None => Finding::none("esx", NO_INTERVAL),
        }]
    }

    fn mrc(&self) -> Vec<Finding> {
        let (all, past) = ("mrc", "mrc-past-filter");
        let Some((curve, past_filter)) = &self.results.curves else {
            return [all, past]
                .map(|name| Finding::none(name, NO_REFERENCES))
                .into();
        };
        let of = |name, curve: Option<&MissRatioCurve>, none| {
            let size = curve.and_then(|curve| curve.size_for(WorkingSet::MISS_RATIO));
            let Some(size) = size else {
                return Finding::none(name, none);
            };
            // Smaller sizes are not told apart.
            let bound = if size <= self.results.filter {
                WorkingSetBound::AtMost
            } else {
                WorkingSetBound::Estimate
            };
            let size = PageCount(size.0.div_ceil(self.origin.frames_per_page));
            self.found(name, WorkingSet { size, bound }, None, PageCount(0))
        };
        vec![
            of(all, curve.as_ref().ok(), "more than 5 % miss at every size"),
            of(
                past,
                past_filter.as_ref(),
                "no page was used again after it left the filter",
            ),
        ]
    }

    fn bytes(&self, pages: u64) -> String {
        ByteSize(PageCount(pages).to_bytes(self.origin.page_size)).rounded()
    }

    /// The lines that say what was looked at.
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
        let epsilon = self.epsilon();
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

    fn table(&self) -> String {
        let mut table = String::new();
        // Writing to a string cannot fail, here and below.
        for (label, value) in self.heads() {
            let _ = writeln!(table, "{label:<12}{value}");
        }
        let _ = writeln!(
            table,
            "\n{:<16}{:>13}{:>14}{:>10}  settled",
            "estimator", "working set", "pages", "error"
        );
        for finding in &self.findings {
            let (Some(pages), Some(bound)) = (finding.working_set_pages, &finding.bound) else {
                let reason = finding.reason.unwrap_or_default();
                let _ = writeln!(table, "{:<16}{:>13}  {reason}", finding.estimator, "-");
                continue;
            };
            let sign = match &**bound {
                "at_least" => "≥ ",
                "at_most" => "≤ ",
                _ => "",
            };
            let error = finding.error_ratio.map_or_else(
                || "-".to_owned(),
                |error| format!("{:+.2} %", error * 100.0),
            );
            let _ = writeln!(
                table,
                "{:<16}{:>13}{:>14}{error:>10}  {}",
                finding.estimator,
                format!("{sign}{}", self.bytes(pages)),
                grouped(pages as f64),
                self.settled(finding)
            );
        }
        let logged = [
            ("prl", self.results.prl.as_ref().map(|found| found.logging)),
            ("pml", self.results.pml.as_ref().map(|found| found.logging)),
        ];
        let logged: Vec<_> = logged
            .into_iter()
            .filter_map(|(name, logging)| Some((name, logging?)))
            .collect();
        if !logged.is_empty() {
            let _ = writeln!(
                table,
                "\n{:<8}{:>14}{:>14}{:>12}{:>9}{:>12}{:>10}{:>10}",
                "logging", "walks", "logged", "missed", "share", "full", "slowdown", "host CPU"
            );
        }
        for (name, logging) in logged {
            let vm = &logging.vm;
            let missed = vm.missed();
            let tried = (vm.logged + missed).max(1);
            let _ = writeln!(
                table,
                "{name:<8}{:>14}{:>14}{:>12}{:>7.2} %{:>12}{:>8.2} %{:>8.2} %",
                grouped(vm.walks as f64),
                grouped(vm.logged as f64),
                grouped(missed as f64),
                missed as f64 / tried as f64 * 100.0,
                grouped(vm.full_events as f64),
                vm.slowdown() * 100.0,
                logging.host.load() * 100.0
            );
        }
        table.replace('\u{a0}', " ")
    }

    /// When, or with what confidence.
    fn settled(&self, finding: &Finding) -> String {
        if let (Some(step), Some(at)) = (finding.settled_step, finding.settled_at) {
            let at = grouped(at as f64);
            return format!("interval {step}, after {at} {}", self.origin.unit);
        }
        if let (Some(low), Some(high)) = (finding.low_pages, finding.high_pages) {
            let (low, high) = (self.bytes(low), self.bytes(high));
            return format!("last interval; 95 %: {low} to {high}");
        }
        match finding.estimator {
            "prl" | "pml" => "not within the run".to_owned(),
            "truth" => "at the end".to_owned(),
            _ => "5 % misses".to_owned(),
        }
    }

    fn csv(&self) -> String {
        let mut csv = String::from(
            "estimator,working_set_pages,bound,low_pages,high_pages,truth_pages,error_ratio,\
             settled_step,settled_at,reason\n",
        );
        let number = |number: Option<u64>| number.map_or_else(String::new, |n| n.to_string());
        for finding in &self.findings {
            let _ = writeln!(
                csv,
                "{},{},{},{},{},{},{},{},{},{}",
                finding.estimator,
                number(finding.working_set_pages),
                finding.bound.as_deref().unwrap_or_default(),
                number(finding.low_pages),
                number(finding.high_pages),
                number(finding.truth_pages),
                finding
                    .error_ratio
                    .map_or_else(String::new, |error| error.to_string()),
                number(finding.settled_step),
                number(finding.settled_at),
                finding
                    .reason
                    .map_or_else(String::new, |reason| format!("\"{reason}\"")),
            );
        }
        csv
    }

    fn step_columns(&self) -> impl Iterator<Item = [String; 12]> + '_ {
        self.results.steps.iter().map(|step| {
            StepJson::new(step)
                .columns()
                .map(|column| column.map_or_else(String::new, |number| number.to_string()))
        })
    }

    fn steps_csv(&self) -> String {
        let mut csv = StepJson::HEAD.to_owned() + "\n";
        for columns in self.step_columns() {
            let _ = writeln!(csv, "{}", columns.join(","));
        }
        csv
    }

    fn steps_table(&self) -> String {
        let names: Vec<_> = StepJson::HEAD.split(',').collect();
        let rows: Vec<_> = self.step_columns().collect();
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
        let prl = results.prl.as_ref().map(|prl| ("prl", &prl.logging));
        let pml = results.pml.as_ref().map(|pml| ("pml", &pml.logging));
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
            epsilon_pages: self.epsilon().0,
            truth: Truth {
                intervals: truth.intervals.get(),
                times: truth.times.get(),
            },
            estimators: &self.findings,
            logging: prl
                .into_iter()
                .chain(pml)
                .map(|(name, logging)| LoggingJson::new(name, logging))
                .collect(),
            every: results.steps.every(),
            steps: results.steps.iter().map(StepJson::new).collect(),
        }
    }

    fn chart(&self) -> Chart {
        let steps = || self.results.steps.iter();
        let bytes = |pages: PageCount| pages.to_bytes(self.origin.page_size) as f64;
        let of = |name: &str, look, pages: &dyn Fn(&Step) -> Option<PageCount>| {
            let points = steps().filter_map(|step| Some((step.number as f64, bytes(pages(step)?))));
            Series::new(name, look, points)
        };
        let mut series = vec![
            of("prl: hot pages", Look::Line, &|step| Some(step.prl?.hot)),
            of("pml: pages written so far", Look::Line, &|step| {
                Some(step.pml?.cumulative)
            }),
        ];
        let sampled = steps().filter_map(|step| {
            let esx = step.esx?;
            let (low, high) = esx.confidence();
            Some(Point {
                x: step.number as f64,
                y: bytes(esx.size),
                low: bytes(low),
                high: bytes(high),
            })
        });
        series.push(Series {
            name: "esx: sampled, 95 %".to_owned(),
            look: Look::Line,
            points: sampled.collect(),
        });
        if self.args.wants(Method::Truth) || series.iter().any(|series| !series.points.is_empty()) {
            series.push(of("truth", Look::Truth, &|step| {
                Some(step.truth?.working_set)
            }));
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
        Chart {
            title: format!("Working set of {}", self.name),
            subtitle: format!(
                "{}, {} · intervals of {} {}",
                self.origin.kind,
                self.origin.machine,
                grouped(self.origin.interval.get() as f64),
                self.origin.unit
            ),
            x: Axis::new("Interval", Unit::Count),
            y: Axis::new("Working set", Unit::Bytes),
            shades: Vec::new(),
            series,
            markers: markers.collect(),
        }
    }
}
