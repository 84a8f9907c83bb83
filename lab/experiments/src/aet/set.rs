//! The results as they are kept: measurements beside the paper's figures, and charts.

use plimsoll_flow::PageSize;
use plimsoll_plot::{Axis, Chart, Series, SeriesStyle, Unit as AxisUnit};
use plimsoll_rig::median;
use serde_json::json;

use super::measure::{PeriodRow, ProgramResult, Tracing};
use super::rate::{RateResult, TRAPS_PER_REFERENCE};
use crate::results::{Conditions, MEAN, Measurement, ResultSet, Unit};

const METHOD: &str = "Each program runs again and again in a guest of its own and is traced from outside by traps, at three settings one \
    after the other. Both models get the same trapped references. Meanwhile the page log's plugin counts every reference of the guest. \
    Errors against every reference are those of the share that misses, among the references that reach past twice what the hot set hides.";

const LIMITS: [&str; 3] = [
    "The guests are emulated: times and overheads are those of traps under TCG, and the plugin slows the guest further, so the overhead is a \
     smaller share of its time than without it. Counts and errors do not depend on this.",
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
    measured: &[ProgramResult],
    rates: &[RateResult],
) -> anyhow::Result<(ResultSet, Vec<(&'static str, Chart)>)> {
    let mut programs: Vec<&str> = Vec::new();
    for one in measured {
        if !programs.contains(&one.program.as_str()) {
            programs.push(&one.program);
        }
    }
    let mut rows = Rows {
        programs,
        measured,
        seeds: usize::try_from(seeds)?,
        made: Vec::new(),
    };
    errors(&mut rows);
    costs(&mut rows);
    rate_rules(&mut rows, rates);
    let mut charts = vec![
        ("curves", curves(measured)),
        ("working-sets", working_sets(measured)),
    ];
    charts.extend(rates.first().map(|one| ("rate", rate_chart(one))));
    let set = ResultSet {
        title: "AET on real programs".to_owned(),
        method: METHOD.to_owned(),
        command: "./dev lab aet".to_owned(),
        measurements: rows.made,
        limits: LIMITS.map(str::to_owned).to_vec(),
        raw: json!({ "programs": measured, "rates": rates }),
        ..ResultSet::new("aet", conditions, seeds)
    };
    Ok((set, charts))
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
    for (what, which, against) in [
        ("by AET against by exact LRU", 1, 0),
        ("by exact LRU against every reference", 0, 2),
        ("by AET against every reference", 1, 2),
    ] {
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
            let errors: Vec<f64> = (one.published.periods.iter())
                .filter_map(|row| {
                    let sizes = row.working_sets;
                    Some((sizes[which]? as f64 / sizes[against]? as f64 - 1.0).abs())
                })
                .collect();
            (!errors.is_empty()).then(|| median(errors))
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
            "1.3 to 17 %",
        ),
        |one| slowdown(&one.fixed),
    );
    rows.each(
        &topic(
            "AET table 5",
            "Overhead, hot set 2048, no sampling",
            Unit::Percent,
            "141 to 1160 %",
        ),
        |one| slowdown(&one.published),
    );
    let phases: [(&str, &str, fn(&PeriodRow) -> f64); 3] = [
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
    let rules: [(&str, &str, fn(&RateResult) -> &[PeriodRow]); 2] = [
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
            item: "AET fig. 1, fig. 2",
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

/// Curves of the first seed, one program above the other.
fn curves(measured: &[ProgramResult]) -> Chart {
    let mut series = Vec::new();
    let mut seen: Vec<&str> = Vec::new();
    for one in measured
        .iter()
        .filter(|one| !one.published.curves.is_empty())
    {
        if seen.contains(&one.program.as_str()) || seen.len() == 4 {
            continue;
        }
        seen.push(&one.program);
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
    Chart {
        title: "Miss-ratio curves: exact LRU, AET, and every reference".to_owned(),
        subtitle: "hot set 2048, no sampling; shares of the references past what the hot set hides; emulated (TCG)".to_owned(),
        x: Axis::new("memory", AxisUnit::Bytes),
        y: Axis::new("misses", AxisUnit::Share).up_to(1.0),
        shades: Vec::new(),
        series,
        markers: Vec::new(),
    }
}

/// Working sets of the first seed, program after program.
fn working_sets(measured: &[ProgramResult]) -> Chart {
    let mut series: Vec<Series> = [
        ("exact LRU", SeriesStyle::Dots),
        ("AET", SeriesStyle::Dots),
        ("every reference", SeriesStyle::Truth),
    ]
    .map(|(name, look)| Series::new(name, look, []))
    .into();
    let (mut seen, mut period): (Vec<&str>, f64) = (Vec::new(), 0.0);
    let mut markers = Vec::new();
    for one in measured {
        if seen.contains(&one.program.as_str()) {
            continue;
        }
        seen.push(&one.program);
        markers.push(plimsoll_plot::Marker {
            x: period,
            label: one.program.clone(),
        });
        for row in &one.published.periods {
            for (series, pages) in series.iter_mut().zip(row.working_sets) {
                if let Some(pages) = pages {
                    let bytes = PageSize::FOUR_KIB.bytes() * pages;
                    series
                        .points
                        .push(plimsoll_plot::Point::new(period, bytes as f64));
                }
            }
            period += 1.0;
        }
    }
    Chart {
        title: "Working sets by exact LRU, by AET, and of every reference".to_owned(),
        subtitle: "hot set 2048, no sampling; periods of 5 s, programs one after the other; emulated (TCG)".to_owned(),
        x: Axis::new("period", AxisUnit::Count),
        y: Axis::new("working set (5 % misses)", AxisUnit::Bytes),
        shades: Vec::new(),
        series,
        markers,
    }
}

/// One page in how many was tracked, by period.
fn rate_chart(rates: &RateResult) -> Chart {
    let scales = |rows: &[PeriodRow]| -> Vec<(f64, f64)> {
        (rows.iter().enumerate())
            .map(|(period, row)| (period as f64, f64::from(row.scale)))
            .collect()
    };
    Chart {
        title: format!("The rules for the tracking rate on {}", rates.program),
        subtitle: "driven by traps per reference, 1e-6 allowed; pages tracked for the whole period; emulated (TCG)".to_owned(),
        x: Axis::new("period", AxisUnit::Count),
        y: Axis::new("pages for each tracked one", AxisUnit::Count),
        shades: Vec::new(),
        series: vec![
            Series::new("linear", SeriesStyle::Steps, scales(&rates.linear)),
            Series::new("logarithmic", SeriesStyle::Steps, scales(&rates.log)),
        ],
        markers: Vec::new(),
    }
}
