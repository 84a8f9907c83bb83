//! Results of the estimators as table, CSV, JSON or picture.

use std::fmt::Write as _;

use plimsoll_estimator::registry::{METHODS, Method};
use plimsoll_flow::{MissRatioCurve, PageCount, WorkingSet, WorkingSetBound};
use serde::{Serialize, Serializer};

use super::Origin;
use super::analysis::{Logging, Results};
use super::options::{CURVE, EstimatorArgs};
use super::steps::Step;
use plimsoll_output::{Format, grouped};
use plimsoll_plot::{Axis, Chart, Look, Marker, Point, Series, Unit, encode};
use plimsoll_protocol::size::ByteSize;

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
    #[serde(serialize_with = "bound_name")]
    bound: Option<WorkingSetBound>,
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
    /// Where the size counts, if it does not settle.
    #[serde(skip)]
    reported: Option<&'static str>,
}

#[expect(clippy::ref_option, reason = "serde's signature")]
fn bound_name<S: Serializer>(
    bound: &Option<WorkingSetBound>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    bound.map(|bound| bound.to_string()).serialize(serializer)
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
            reported: None,
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
    steps: Vec<StepJson<'a>>,
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
        let wanted = METHODS.iter().filter(|method| args.wants(method.name));
        let mut findings: Vec<_> = wanted.map(|method| report.finding(method)).collect();
        if args.wants(CURVE) {
            findings.extend(report.curve_findings());
        }
        report.findings = findings;
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

    /// The truth at the end of the run; or what was touched in its last interval.
    fn last_truth(&self, of_last_interval: bool) -> Option<PageCount> {
        let columns = self.results.steps.last()?.columns.first()?;
        let column = if of_last_interval { 0 } else { 1 };
        columns[column].map(PageCount)
    }

    /// What is added to prl's size.
    fn epsilon(&self) -> PageCount {
        self.args.epsilon(self.origin.page_size)
    }

    /// A size, of which `assumed` was not measured, beside the truth at that time.
    fn found(
        &self,
        estimator: &'static str,
        working_set: WorkingSet,
        assumed: PageCount,
        truth: Option<PageCount>,
        reported: Option<&'static str>,
    ) -> Finding {
        let size = working_set.size;
        Finding {
            working_set_pages: Some(size.0),
            working_set_bytes: Some(size.to_bytes(self.origin.page_size)),
            bound: Some(working_set.bound),
            reason: None,
            reported,
            ..Finding::none(estimator, "")
        }
        .beside(truth, PageCount(size.0.saturating_sub(assumed.0)))
    }

    /// What a method of the registry found.
    fn finding(&self, method: &Method) -> Finding {
        let mut results = self.results.methods.iter();
        let Some(result) = results.find(|result| result.method.name == method.name) else {
            return match self.results.has_walks {
                true => Finding::none(method.name, NO_MEMORY),
                false => Finding::none(method.name, NO_WALKS),
            };
        };
        let Some(working_set) = result.estimator.working_set() else {
            return Finding::none(method.name, NO_INTERVAL);
        };
        let truth = match result.settled {
            Some(settling) => settling.truth,
            None if method.name == METHODS[0].name => None,
            None => self.last_truth(method.of_last_interval),
        };
        let assumed = result.estimator.assumed();
        let limits = result.estimator.confidence();
        Finding {
            low_pages: limits.map(|(low, _)| low.0),
            high_pages: limits.map(|(_, high)| high.0),
            settled_step: result.settled.map(|settling| settling.settled.step),
            settled_at: result.settled.map(|settling| settling.at),
            ..self.found(method.name, working_set, assumed, truth, method.reported)
        }
    }

    /// Where the miss-ratio curves reach 5 %.
    fn curve_findings(&self) -> Vec<Finding> {
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
            let truth = self.last_truth(false);
            let working_set = WorkingSet { size, bound };
            self.found(name, working_set, PageCount(0), truth, Some("5 % misses"))
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
            let (Some(pages), Some(bound)) = (finding.working_set_pages, finding.bound) else {
                let reason = finding.reason.unwrap_or_default();
                let _ = writeln!(table, "{:<16}{:>13}  {reason}", finding.estimator, "-");
                continue;
            };
            let sign = match bound {
                WorkingSetBound::AtLeast => "≥ ",
                WorkingSetBound::AtMost => "≤ ",
                WorkingSetBound::Estimate => "",
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
        let logged: Vec<_> = self.results.logging().collect();
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
        let reported = finding.reported.unwrap_or("not within the run");
        match (finding.low_pages, finding.high_pages) {
            (Some(low), Some(high)) => {
                let (low, high) = (self.bytes(low), self.bytes(high));
                format!("{reported}; 95 %: {low} to {high}")
            }
            _ => reported.to_owned(),
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
                finding
                    .bound
                    .map_or_else(String::new, |bound| bound.to_string()),
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

    fn step_rows(&self) -> impl Iterator<Item = Vec<String>> + '_ {
        self.results.steps.iter().map(|step| {
            let numbers = step_numbers(step).into_iter();
            let cell = |number: Option<u64>| number.map_or_else(String::new, |n| n.to_string());
            numbers.map(cell).collect()
        })
    }

    fn steps_csv(&self) -> String {
        let mut csv = step_names().join(",") + "\n";
        for row in self.step_rows() {
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
            epsilon_pages: self.epsilon().0,
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
            .map(|index| drawn(index, Look::Line))
            .collect();
        if self.args.wants(METHODS[0].name) || series.iter().any(|s| !s.points.is_empty()) {
            series.push(drawn(0, Look::Truth));
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
