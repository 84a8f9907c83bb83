//! A plan as a table and as CSV.

use std::fmt::Write as _;

use plimsoll_protocol::plan::{PlanInputs, PlanJson, Suppression, TargetJson};
use plimsoll_protocol::vm::Relative;

use plimsoll_output::{Columns, Side, csv_table, or_empty, printable, short_percent as percent};
use plimsoll_protocol::size::ByteSize;

use crate::live::words::{counted, name_of};

const HEADS: [(&str, Side); 10] = [
    ("VM", Side::Left),
    ("baseline", Side::Right),
    ("now", Side::Right),
    ("target", Side::Right),
    ("change", Side::Right),
    ("misses now", Side::Right),
    ("then", Side::Right),
    ("band", Side::Right),
    ("bound", Side::Right),
    ("why", Side::Left),
];

pub(super) fn table(inputs: &PlanInputs, plan: &PlanJson) -> String {
    let mut table = String::new();
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(table, "{:<16}{}", "policy", method(plan));
    let _ = writeln!(
        table,
        "{:<16}{} for {}, in units of {}",
        "memory",
        size(plan.total_bytes),
        counted(plan.targets.len() as u64, "VM"),
        size(inputs.rules.unit_bytes)
    );
    table.push('\n');
    let mut columns = Columns::new(&HEADS);
    for target in &plan.targets {
        columns.row(row(target));
    }
    table.push_str(&columns.text());
    table.push('\n');
    let _ = writeln!(
        table,
        "{:<16}{} of the baselines' misses, now {}{}",
        "geometric mean",
        times(plan.geometric_mean),
        times(plan.geometric_mean_now),
        gap(plan)
    );
    let _ = writeln!(table, "{:<16}{}", "spare", size(plan.spare_bytes));
    if let Some(Suppression::Hysteresis { gain }) = plan.held {
        let _ = writeln!(
            table,
            "{:<16}nothing is moved: the best allocation would gain {}, less than {}",
            "held",
            percent(gain),
            percent(inputs.rules.gain_min)
        );
    }
    table.replace('\u{a0}', " ")
}

/// The policy, with the search that it took.
pub(super) fn method(plan: &PlanJson) -> String {
    match plan.search {
        Some(search) => format!("{}, {search} search", plan.policy),
        None => plan.policy.to_string(),
    }
}

fn row(target: &TargetJson) -> [String; HEADS.len()] {
    let expected = |relative: Option<Relative>| relative.map(|relative| times(relative.expected));
    let band = target
        .relative
        .filter(|relative| relative.low < relative.high);
    [
        printable(&target.vm),
        size(target.baseline_bytes),
        size(target.current_bytes),
        size(target.target_bytes),
        change(target.current_bytes, target.target_bytes),
        expected(target.relative_now).unwrap_or_else(|| "?".to_owned()),
        expected(target.relative).unwrap_or_else(|| "?".to_owned()),
        band.map_or_else(String::new, |relative| {
            format!("{}-{}", times(relative.low), times(relative.high))
        }),
        target.bounds(),
        target.reason.to_string(),
    ]
}

pub(super) fn change(from: u64, to: u64) -> String {
    match to.abs_diff(from) {
        0 => "-".to_owned(),
        by if to > from => format!("+{}", size(by)),
        by => format!("-{}", size(by)),
    }
}

fn gap(plan: &PlanJson) -> String {
    match plan.gap {
        None => String::new(),
        Some(0.0) => "; no allocation is better".to_owned(),
        Some(gap) => format!("; the best is at most {} lower", percent(gap)),
    }
}

/// A quotient of misses: `0.43x`.
pub(super) fn times(relative: f64) -> String {
    format!("{relative:.2}x")
}

pub(super) fn size(bytes: u64) -> String {
    ByteSize(bytes).rounded()
}

pub(super) fn csv(plan: &PlanJson) -> String {
    let now = |target: &TargetJson, of: fn(Relative) -> f64| or_empty(target.relative_now.map(of));
    let then = |target: &TargetJson, of: fn(Relative) -> f64| or_empty(target.relative.map(of));
    csv_table(
        &plan.targets,
        &[
            ("vm", &|target| target.vm.clone()),
            ("baseline_bytes", &|target| {
                target.baseline_bytes.to_string()
            }),
            ("current_bytes", &|target| target.current_bytes.to_string()),
            ("target_bytes", &|target| target.target_bytes.to_string()),
            ("relative_now", &|target| {
                now(target, |relative| relative.expected)
            }),
            ("relative", &|target| {
                then(target, |relative| relative.expected)
            }),
            ("low", &|target| then(target, |relative| relative.low)),
            ("high", &|target| then(target, |relative| relative.high)),
            ("max_loss", &|target| or_empty(target.max_loss)),
            ("reason", &|target| name_of(target.reason)),
            ("max_misses_per_second", &|target| {
                or_empty(target.max_misses_per_second)
            }),
        ],
    )
}
