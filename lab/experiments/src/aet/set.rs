//! The results as they are kept: measurements beside the paper's figures, and charts.

use plimsoll_flow::PageSize;
use plimsoll_plot::{Axis, Chart, Marker, Point, Series, SeriesStyle, Unit as AxisUnit};
use plimsoll_rig::median;
use serde::Serialize;

use super::measure::{PeriodRow, ProgramResult, Tracing};
use super::rate::{HOT_SETS, RateResult, SCALES, TRAPS_PER_REFERENCE};
use crate::results::{Conditions, MEAN, Measurement, Repetition, ResultSet, Unit};

const METHOD: &str = "Each program runs again and again in a guest of its own and is traced from outside by traps, at three settings one \
    after the other. Both models get the same trapped references. Meanwhile the page log's plugin counts every reference of the guest. \
    Errors against every reference are those of the share that misses, among the references that reach past twice what the hot set hides.";

const LIMITS: [&str; 6] = [
    "The guests are emulated: times and overheads are those of traps under TCG, and the plugin slows the guest further, so the overhead is a \
     smaller share of its time than without it.",
    "An emulated program makes tens to hundreds of times fewer references in a period than the paper's. Pages that it reuses after a longer time than it was \
     traced are resolved by neither model: there both curves are flat, and far from that of every reference, whose past is longer.",
    "2048 hot pages hide 8 MiB. Of a program that hardly reaches past them few references are traced, or no reuse at all; its errors are missing, or those of these few.",
    "The rules for the rate have nothing to do on a program whose traps per reference are within 1e-6 from the first period.",
    "SPEC CPU 2006 is not free software: the programs are others of the same kinds.",
    "Overhead is the tracer's own account of the time in traps and re-arming, which is compared with a guest's own stall counter in \
     docs/performance.md, not here.",
];

/// What is measured, and what the paper has.
struct Topic<'a> {
    item: &'a str,
    what: &'a str,
    unit: Unit,
    paper: &'a str,
}

/// All that was measured; each list has an entry, or one of each program, for each seed.
#[derive(Debug, Default, Serialize)]
pub struct Measured {
    pub programs: Vec<ProgramResult>,
    pub rates: Vec<RateResult>,
    /// A period at each hot set and rate.
    pub settings: Vec<Vec<PeriodRow>>,
    pub steps: Vec<Tracing>,
}

/// What was measured of all programs, and the measurements made of it.
struct Rows<'a> {
    programs: Vec<&'a str>,
    measured: &'a [ProgramResult],
    seeds: usize,
    made: Vec<Measurement>,
}

impl Rows<'_> {
    fn add(&mut self, topic: &Topic<'_>, of: &str, values: Vec<Option<f64>>) {
        self.made.push(Measurement {
            item: topic.item.to_owned(),
            what: topic.what.to_owned(),
            of: of.to_owned(),
            column: String::new(),
            unit: topic.unit,
            values,
            paper: topic.paper.to_owned(),
            remark: String::new(),
        });
    }

    /// Adds a value of each program, and their mean.
    fn each(&mut self, topic: &Topic<'_>, value: impl Fn(&ProgramResult) -> Option<f64>) {
        let mut sums = vec![(0.0, 0_u32); self.seeds];
        for program in self.programs.clone() {
            let of_it = self.measured.iter().filter(|one| one.program == program);
            let values: Vec<_> = of_it.map(&value).collect();
            for (sum, value) in sums.iter_mut().zip(&values) {
                if let Some(value) = value {
                    *sum = (sum.0 + value, sum.1 + 1);
                }
            }
            self.add(topic, program, values);
        }
        let mean = |(sum, count)| (count > 0).then(|| sum / f64::from(count));
        let means = sums.into_iter().map(mean).collect();
        self.add(topic, MEAN, means);
    }
}

/// Makes the set, and its charts by name.
pub fn of(
    conditions: Conditions,
    seeds: u64,
    all: &Measured,
) -> anyhow::Result<(ResultSet, Vec<(&'static str, Chart)>)> {
    let measured = &all.programs;
    let programs = first_of_each(measured).map(|one| one.program.as_str());
    let mut rows = Rows {
        programs: programs.collect(),
        measured,
        seeds: usize::try_from(seeds)?,
        made: Vec::new(),
    };
    errors(&mut rows);
    costs(&mut rows);
    let only_programs = all.steps.is_empty();
    if !only_programs {
        rate_rules(&mut rows, &all.rates);
        fixed_settings(&mut rows, all);
        stepping(&mut rows, &all.steps);
    }
    let mut charts = vec![("curves", curves(measured))];
    let periods = first_of_each(measured).map(|one| (&*one.program, &*one.published.periods));
    // Nothing is compared where a model has no working set in any period.
    if periods.clone().any(|(_, rows)| {
        rows.iter()
            .any(|row| matches!(row.working_sets, [Some(_), Some(_), _]))
    }) {
        charts.push((
            "working-sets",
            working_sets("Working sets of programs", periods),
        ));
    }
    charts.extend(all.steps.first().map(|one| {
        let of = [("", &one.periods[..])];
        (
            "steps",
            working_sets("Working sets of a program in steps", of),
        )
    }));
    charts.extend(all.rates.first().map(|one| ("rate", rate_chart(one))));
    let (name, title, command) = if only_programs {
        let names = rows.programs.join(",");
        (
            "aet-programs",
            format!("AET on more real programs: {}", rows.programs.join(", ")),
            format!("./dev lab aet --only-programs --programs {names} --seeds {seeds}"),
        )
    } else {
        (
            "aet",
            "AET on real programs".to_owned(),
            "./dev lab aet".to_owned(),
        )
    };
    let set = ResultSet {
        title,
        method: METHOD.to_owned(),
        command,
        measurements: rows.made,
        limits: LIMITS.map(str::to_owned).to_vec(),
        raw: serde_json::to_value(all)?,
        ..ResultSet::new(name, conditions, (seeds, Repetition::Seed))
    };
    Ok((set, charts))
}

/// Working sets that are compared, by their index in a period's.
const COMPARISONS: [(&str, usize, usize); 3] = [
    ("by AET against by exact LRU", 1, 0),
    ("by exact LRU against every reference", 0, 2),
    ("by AET against every reference", 1, 2),
];

/// Median over periods of the relative error of one kind of working set against another; `None` if no period has both.
fn working_set_error(periods: &[PeriodRow], which: usize, against: usize) -> Option<f64> {
    let errors = periods.iter().filter_map(|row| {
        let sizes = row.working_sets;
        Some((sizes[which]? as f64 / sizes[against]? as f64 - 1.0).abs())
    });
    let errors: Vec<f64> = errors.collect();
    (!errors.is_empty()).then(|| median(errors))
}

/// Table 2: hot sets and rates.
fn fixed_settings(rows: &mut Rows<'_>, all: &Measured) {
    const PAPER: [[&str; SCALES.len()]; HOT_SETS.len()] = [
        ["15.8 %", "7.2 %", "4.2 %", "1.1 %"],
        ["15.6 %", "7.7 %", "3.9 %", "2.4 %"],
        ["15.1 %", "8.5 %", "3.6 %", "1.6 %"],
    ];
    let program = all.rates.first().map_or("", |one| &one.program);
    type Figure = fn(&PeriodRow) -> Option<f64>;
    let overhead: Figure = |row| {
        let share = row.overhead_ratio.min(0.999);
        Some(share / (1.0 - share))
    };
    let traps: Figure =
        |row| (row.references > 0).then(|| row.traps as f64 / row.references as f64);
    for (what, unit, figure, is_in_paper) in [
        (
            "Overhead by hot set and rate",
            Unit::Percent,
            overhead,
            true,
        ),
        (
            "Traps per reference by hot set and rate",
            Unit::Ratio,
            traps,
            false,
        ),
    ] {
        let settings = HOT_SETS.iter().zip(PAPER).flat_map(|(hot_set, papers)| {
            SCALES
                .iter()
                .zip(papers)
                .map(move |(scale, paper)| (hot_set, scale, paper))
        });
        for (number, (hot_set, scale, paper)) in settings.enumerate() {
            let topic = Topic {
                item: "AET table 2",
                what,
                unit,
                paper: if is_in_paper { paper } else { "" },
            };
            let of = format!("{program}, hot set {hot_set}, 1/{scale}");
            let values = all.settings.iter();
            let values = values.map(|rows| rows.get(number).and_then(figure));
            rows.add(&topic, &of, values.collect());
        }
    }
}

/// Figure 3: the program in steps.
fn stepping(rows: &mut Rows<'_>, steps: &[Tracing]) {
    for (what, which, against) in COMPARISONS {
        let what =
            format!("Working set of a program in steps {what}: median of the relative errors");
        let topic = Topic {
            item: "AET fig. 3",
            what: &what,
            unit: Unit::Percent,
            paper: "\"almost the same\"",
        };
        let errors = steps.iter();
        let errors = errors.map(|one| working_set_error(&one.periods, which, against));
        rows.add(&topic, "32 to 224 and back to 32 MiB", errors.collect());
    }
}

/// Figures 4 and 5: how far the models are from each other, and from the truth.
fn errors(rows: &mut Rows<'_>) {
    let topic = |what, paper| Topic {
        item: "AET fig. 4",
        what,
        unit: Unit::Share,
        paper,
    };
    rows.each(
        &topic(
            "AET against exact LRU on the same references, hot set 2048, no sampling: mean absolute error",
            "0.01 (mean of SPEC 2006)",
        ),
        |one| one.published.aet_lru_error,
    );
    rows.each(
        &topic(
            "AET against exact LRU on the same references, default settings: mean absolute error",
            "",
        ),
        |one| one.default.aet_lru_error,
    );
    rows.each(
        &topic("Traced exact LRU against every reference, hot set 2048, no sampling: mean absolute error", ""),
        |one| one.published.lru_error,
    );
    rows.each(
        &topic(
            "Traced AET against every reference, hot set 2048, no sampling: mean absolute error",
            "",
        ),
        |one| one.published.aet_error,
    );
    for (what, which, against) in COMPARISONS {
        let what = format!(
            "Working set of a period (5 % misses) {what}, hot set 2048, no sampling: median of the relative errors"
        );
        let topic = Topic {
            item: "AET fig. 5",
            what: &what,
            unit: Unit::Percent,
            paper: "\"some errors\"",
        };
        rows.each(&topic, |one| {
            working_set_error(&one.published.periods, which, against)
        });
    }
}

/// Tables 1, 3 and 5: traps, and what they take.
fn costs(rows: &mut Rows<'_>) {
    let topic = |item, what, unit, paper| Topic {
        item,
        what,
        unit,
        paper,
    };
    rows.each(
        &topic(
            "AET table 3",
            "Traps per reference, hot set 64, rate 1/128",
            Unit::Ratio,
            "5.0e-7 to 5.8e-5",
        ),
        |one| {
            let count =
                |of: fn(&PeriodRow) -> u64| -> u64 { one.fixed.periods.iter().map(of).sum() };
            let references = count(|row| row.references);
            (references > 0).then(|| count(|row| row.traps) as f64 / references as f64)
        },
    );
    rows.each(
        &topic(
            "AET table 1",
            "Overhead, hot set 64, rate 1/128",
            Unit::Percent,
            "1.3 to 11 % (table 3: to 17 %)",
        ),
        |one| slowdown(&one.fixed),
    );
    rows.each(
        &topic(
            "AET table 5",
            "Overhead, hot set 2048, no sampling",
            Unit::Percent,
            "41 to 1060 %",
        ),
        |one| slowdown(&one.published),
    );
    type Seconds = fn(&PeriodRow) -> f64;
    let phases: [(&str, &str, Seconds); 3] = [
        (
            "Share of the time with a hot set of 2048 and without sampling: traps with their context switches (phase 1)",
            "0.1 to 0.6 % without context switches",
            |row| row.fault_s,
        ),
        (
            "Share of the time with a hot set of 2048 and without sampling: re-arming (phase 2)",
            "0.2 to 0.8 %",
            |row| row.arm_s,
        ),
        (
            "Share of the time with a hot set of 2048 and without sampling: finding populated pages (phase 3)",
            "0 %",
            |row| row.collect_s,
        ),
    ];
    for (what, paper, seconds) in phases {
        rows.each(&topic("AET table 5", what, Unit::Percent, paper), |one| {
            let sum =
                |of: fn(&PeriodRow) -> f64| -> f64 { one.published.periods.iter().map(of).sum() };
            let length = sum(|row| row.length_s);
            (length > 0.0).then(|| sum(seconds) / length)
        });
    }
}

/// How much longer the program took: the tracer's share of the VM's time over the rest.
fn slowdown(tracing: &Tracing) -> Option<f64> {
    let length: f64 = tracing.periods.iter().map(|row| row.length_s).sum();
    let taken: f64 = (tracing.periods.iter())
        .map(|row| row.overhead_ratio * row.length_s)
        .sum();
    let share = (taken / length).min(0.999);
    (length > 0.0).then(|| share / (1.0 - share))
}

/// Figures 1 and 2: periods until a rule has reached its goal, and the overhead then.
fn rate_rules(rows: &mut Rows<'_>, rates: &[RateResult]) {
    type Periods = fn(&RateResult) -> &[PeriodRow];
    let rules: [(&str, &str, Periods); 2] = [
        ("linear rule", "10 periods", |one| &one.linear),
        ("logarithmic rule", "4 periods", |one| &one.log),
    ];
    for (rule, paper, periods) in rules {
        let reached = |one: &RateResult| {
            let is_cheap =
                |row: &PeriodRow| row.traps as f64 <= TRAPS_PER_REFERENCE * row.references as f64;
            periods(one).iter().position(is_cheap)
        };
        let program = rates.first().map_or("", |one| &one.program);
        let of = format!("{program}, {rule}");
        let topic = |what, paper, unit| Topic {
            item: "AET fig. 1, AET fig. 2",
            what,
            unit,
            paper,
        };
        rows.add(
            &topic(
                "Rate driven by traps per reference (1e-6), from 1/128: periods until it is reached",
                paper,
                Unit::Count,
            ),
            &of,
            rates.iter().map(|one| Some(reached(one)? as f64)).collect(),
        );
        let overheads = |one: &RateResult| -> Vec<f64> {
            periods(one).iter().map(|row| row.overhead_ratio).collect()
        };
        let goal = |one: &RateResult| {
            let rest: Vec<f64> = overheads(one).split_off(reached(one)?);
            (!rest.is_empty()).then(|| rest.iter().sum::<f64>() / rest.len() as f64)
        };
        rows.add(
            &topic(
                "Rate driven by traps per reference: overhead of the first period",
                "7.2 %",
                Unit::Percent,
            ),
            &of,
            rates
                .iter()
                .map(|one| overheads(one).first().copied())
                .collect(),
        );
        rows.add(
            &topic(
                "Rate driven by traps per reference: mean overhead since it is reached",
                if rule.starts_with("linear") {
                    "2.3 % of the whole run"
                } else {
                    "0.84 % of the whole run"
                },
                Unit::Percent,
            ),
            &of,
            rates.iter().map(goal).collect(),
        );
    }
}

/// Programs of which the curves are drawn.
const CURVES: usize = 3;

/// Curves of the first seed.
fn curves(measured: &[ProgramResult]) -> Chart {
    let mut series = Vec::new();
    for one in first_of_each(measured)
        .filter(|one| !one.published.curves.is_empty())
        .take(CURVES)
    {
        let names = [
            ("exact LRU", SeriesStyle::Steps),
            ("AET", SeriesStyle::Line),
            ("every reference", SeriesStyle::Truth),
        ];
        for (which, (name, look)) in names.into_iter().enumerate() {
            let points = (one.published.curves.iter()).map(|(pages, ratios)| {
                let bytes = PageSize::FOUR_KIB.bytes() * pages;
                (bytes as f64, ratios[which])
            });
            series.push(Series::new(
                format!("{}: {name}", one.program),
                look,
                points,
            ));
        }
    }
    let title = "Miss-ratio curves: exact LRU, AET, and every reference";
    let subtitle = "hot set 2048, no sampling; shares of the references past what the hot set hides; emulated (TCG)";
    let x = Axis::new("memory", AxisUnit::Bytes);
    let y = Axis::new("misses", AxisUnit::Share).up_to(1.0);
    Chart::new(title, subtitle, [x, y], series)
}

/// Working sets by period, group after group.
fn working_sets<'a>(
    title: &str,
    groups: impl IntoIterator<Item = (&'a str, &'a [PeriodRow])>,
) -> Chart {
    let mut found = ["exact LRU", "AET"].map(|name| Series::new(name, SeriesStyle::Dots, []));
    // One for each group, because a step holds until the next.
    let mut truth = Vec::new();
    let mut markers = Vec::new();
    let mut period = 0.0;
    for (label, rows) in groups {
        if !label.is_empty() {
            let label = label.to_owned();
            markers.push(Marker { x: period, label });
        }
        let name = if truth.is_empty() {
            "every reference"
        } else {
            ""
        };
        let mut of_group = Series::new(name, SeriesStyle::Truth, []);
        for row in rows {
            let series = found.iter_mut().chain([&mut of_group]);
            for (series, pages) in series.zip(row.working_sets) {
                let bytes = pages.map(|pages| PageSize::FOUR_KIB.bytes() * pages);
                let point = bytes.map(|bytes| Point::new(period, bytes as f64));
                series.points.extend(point);
            }
            period += 1.0;
        }
        truth.push(of_group);
    }
    let subtitle = "by exact LRU, by AET, and of every reference; hot set 2048, no sampling; periods of 5 s; emulated (TCG)";
    let x = Axis::new("period", AxisUnit::Count);
    let y = Axis::new("working set (5 % misses)", AxisUnit::Bytes);
    let series = found.into_iter().chain(truth);
    Chart {
        markers,
        ..Chart::new(title, subtitle, [x, y], series)
    }
}

/// The programs with the first seed.
fn first_of_each(measured: &[ProgramResult]) -> impl Iterator<Item = &ProgramResult> + Clone {
    let is_first = |(at, one): &(usize, &ProgramResult)| {
        measured[..*at]
            .iter()
            .all(|before| before.program != one.program)
    };
    measured
        .iter()
        .enumerate()
        .filter(is_first)
        .map(|(_, one)| one)
}

/// One page in how many was tracked, by period.
fn rate_chart(rates: &RateResult) -> Chart {
    let scales = |rows: &[PeriodRow]| -> Vec<(f64, f64)> {
        (rows.iter().enumerate())
            .map(|(period, row)| (period as f64, f64::from(row.scale)))
            .collect()
    };
    let title = format!("The rules for the tracking rate on {}", rates.program);
    let subtitle = "driven by traps per reference, 1e-6 allowed; pages tracked for the whole period; emulated (TCG)";
    let x = Axis::new("period", AxisUnit::Count);
    let y = Axis::new("pages for each tracked one", AxisUnit::Count);
    let series = [
        Series::new("linear", SeriesStyle::Steps, scales(&rates.linear)),
        Series::new("logarithmic", SeriesStyle::Steps, scales(&rates.log)),
    ];
    Chart::new(title, subtitle, [x, y], series)
}
