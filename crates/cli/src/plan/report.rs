//! A plan as a table and as CSV.

use std::fmt::Write as _;

use plimsoll_protocol::plan::{PlanInputs, PlanJson, Suppression};
use plimsoll_protocol::vm::Relative;

use plimsoll_output::{csv_table, printable, short_percent as percent, table};
use plimsoll_protocol::size::ByteSize;

use crate::live::words::{counted, name_of};

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
    let expected = |at: Option<Relative>| at.map_or("?".to_owned(), |at| times(at.expected));
    table.push_str(&table!(&plan.targets, |target| {
        Left "VM": printable(&target.vm),
        Right "baseline": size(target.baseline_bytes),
        Right "now": size(target.current_bytes),
        Right "target": size(target.target_bytes),
        Right "change": change(target.current_bytes, target.target_bytes),
        Right "misses now": expected(target.relative_now),
        Right "then": expected(target.relative),
        Right "band": target.relative.and_then(band),
        Right "bound": target.bounds(),
        Left "why": target.reason.to_string(),
    }));
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

/// The band, if the curve has one there.
fn band(at: Relative) -> Option<String> {
    (at.low < at.high).then(|| format!("{}-{}", times(at.low), times(at.high)))
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
    csv_table!(&plan.targets, |target| {
        "vm": target.vm.as_str(),
        "baseline_bytes": target.baseline_bytes,
        "current_bytes": target.current_bytes,
        "target_bytes": target.target_bytes,
        "relative_now": target.relative_now.map(|at| at.expected),
        "relative": target.relative.map(|at| at.expected),
        "low": target.relative.map(|at| at.low),
        "high": target.relative.map(|at| at.high),
        "max_loss": target.max_loss,
        "reason": name_of(target.reason),
        "max_misses_per_second": target.max_misses_per_second,
    })
}
