//! How memory is allocated, or would be on another host.
//!
//! The picture is in `picture`: each VM's relative misses over its size, with its bound, before and after.

mod picture;

use plimsoll_flow::PageSize;
use plimsoll_output::{csv_table, json_line, labelled, printable, short_percent as percent, table};
use plimsoll_plot::Figure;
use plimsoll_protocol::plan::{PlanInputs, PlanJson, Suppression};
use plimsoll_protocol::vm::Relative;

use crate::words::{NO_VM, counted, name, name_of, ratio, relative, size};

/// A plan with the inputs from which it was made.
#[derive(Debug)]
pub struct PlanReport<'a> {
    /// The inputs.
    pub inputs: &'a PlanInputs,
    /// The plan.
    pub plan: &'a PlanJson,
}

impl Figure for PlanReport<'_> {
    fn table(&self) -> anyhow::Result<String> {
        let Self { inputs, plan } = self;
        let memory = format!(
            "{} for {}, in units of {}",
            size(plan.total_bytes),
            counted(plan.targets.len() as u64, "VM"),
            size(inputs.rules.unit_bytes)
        );
        let mut table = labelled(16, [("policy", method(plan)), ("memory", memory)]);
        table.push('\n');
        let expected = |at: Option<Relative>| at.map_or("?".to_owned(), |at| times(at.expected));
        table.push_str(&table!(&plan.targets, |target| {
            Left "VM": name(&target.vm),
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
        let mean = format!(
            "{} of the baselines' misses, now {}{}",
            times(plan.geometric_mean),
            times(plan.geometric_mean_now),
            gap(plan)
        );
        let mut sums = vec![("geometric mean", mean), ("spare", size(plan.spare_bytes))];
        if let Some(Suppression::Hysteresis { gain }) = plan.held {
            let held = format!(
                "nothing is moved: the best allocation would gain {}, less than {}",
                percent(gain),
                percent(inputs.rules.gain_min)
            );
            sums.push(("held", held));
        }
        Ok((table + &labelled(16, sums)).replace('\u{a0}', " "))
    }

    fn csv(&self) -> anyhow::Result<String> {
        Ok(csv_table!(&self.plan.targets, |target| {
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
        }))
    }

    fn json(&self) -> anyhow::Result<String> {
        json_line(self.plan)
    }

    fn svg(&self) -> anyhow::Result<String> {
        let (demands, rules, _) = self.inputs.read()?;
        let page_size = PageSize::new(self.inputs.page_bytes)?;
        Ok(picture::svg(&demands, &rules, self.plan, page_size))
    }
}

/// The policy, with the search that it took.
fn method(plan: &PlanJson) -> String {
    match plan.search {
        Some(search) => format!("{}, {search} search", plan.policy),
        None => plan.policy.to_string(),
    }
}

/// The band, if the curve has one there.
fn band(at: Relative) -> Option<String> {
    (at.low < at.high).then(|| format!("{}-{}", times(at.low), times(at.high)))
}

fn change(from: u64, to: u64) -> String {
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
fn times(relative: f64) -> String {
    format!("{relative:.2}x")
}

/// What each VM would have on a host of another size.
pub fn division(plan: &PlanJson) -> String {
    if plan.targets.is_empty() {
        return NO_VM.to_owned();
    }
    let table = table!(&plan.targets, |target| {
        Left "VM": name(&target.vm),
        Right "now": size(target.current_bytes),
        Right "then": size(target.target_bytes),
        Right "misses now": relative(target.relative_now.as_ref()),
        Right "misses then": relative(target.relative.as_ref()),
        Right "bound": target.bounds(),
        Left "why": name_of(target.reason),
    });
    format!(
        "{table}\nof {} in all, {} spare; geometric mean of the misses over those at the baselines: {} now, {} then\n",
        size(plan.total_bytes),
        size(plan.spare_bytes),
        ratio(plan.geometric_mean_now),
        ratio(plan.geometric_mean),
    )
}

/// The same as comma-separated values.
pub fn division_csv(plan: &PlanJson) -> String {
    csv_table!(&plan.targets, |target| {
        "vm": printable(&target.vm),
        "current_bytes": target.current_bytes,
        "target_bytes": target.target_bytes,
        "relative_now": target.relative_now.map(|at| at.expected),
        "relative": target.relative.map(|at| at.expected),
        "relative_high": target.relative.map(|at| at.high),
        "bound": target.max_loss.map(|loss| 1.0 + loss),
        "reason": name_of(target.reason),
        "max_misses_per_second": target.max_misses_per_second,
    })
}
