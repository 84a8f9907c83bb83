//! Decisions in sentences: what was decided and why, what became of it, and what was measured.

use std::fmt::Write as _;

use plimsoll_output::{csv_table, per_second, printable};
use plimsoll_policy::PredictionUnit;
use plimsoll_protocol::decision::{Check, Decision, Initiator, Kind, State, Step, Verdict};

use crate::words::{local_time, name_of, percent, ratio, relative, size};

/// A decision in sentences: of one VM, or of all that it touches.
pub fn text(decision: &Decision, of: Option<&str>) -> String {
    let mut text = format!(
        "Decision {}, {}: {}, {}.\n",
        decision.id,
        local_time(decision.unix_ms),
        match decision.kind {
            Kind::Divide => "memory is reallocated".to_owned(),
            Kind::IntoCaches => "memory goes into the caches under the disks".to_owned(),
            Kind::GiveBack => "memory goes back to the VMs".to_owned(),
            Kind::Rollback => match decision.takes_back {
                Some(earlier) => format!("decision {earlier} is rolled back"),
                None => "an earlier decision is rolled back".to_owned(),
            },
        },
        match decision.by {
            Initiator::Daemon => format!("by the daemon in mode {}", name_of(decision.mode)),
            Initiator::Operator => "by an operator".to_owned(),
        },
    );
    let _ = writeln!(text, "  Why: {}", printable(&decision.reason));
    let concerns = |vm: &str| of.is_none_or(|of| of == vm);
    let targets = decision.plan.iter().flat_map(|plan| &plan.targets);
    let planned = |vm: &str| -> String {
        let target = targets.clone().find(|target| target.vm == vm);
        let predictions = target.into_iter().flat_map(|target| target.predictions());
        predictions
            .map(|prediction| format!(" By the curve, {prediction}."))
            .collect()
    };
    let limited = |vm: &str| {
        let mut demands = decision.inputs.iter().flat_map(|inputs| &inputs.demands);
        let demand = demands.find(|demand| demand.vm == vm)?;
        let ceiling_bytes = demand.ceiling_bytes?;
        (ceiling_bytes < demand.baseline_bytes).then(|| {
            let (ceiling, baseline) = (size(ceiling_bytes), size(demand.baseline_bytes));
            format!(" Its maximum of {ceiling} is below its baseline of {baseline}.")
        })
    };
    for step in decision.steps.iter().filter(|step| concerns(&step.vm)) {
        let limited = limited(&step.vm).unwrap_or_default();
        let _ = writeln!(text, "  {}{}{limited}", moved(step), planned(&step.vm));
    }
    for check in decision.checks.iter().filter(|check| concerns(&check.vm)) {
        let _ = writeln!(text, "  {}", checked(check));
    }
    let ended = match (decision.state, decision.ended_unix_ms) {
        (State::Proposed, _) => "It waits for `plimsoll apply`.".to_owned(),
        (State::Moving, _) => "Memory is being moved.".to_owned(),
        (State::Checking, _) => "Memory was moved; what came of it is being measured.".to_owned(),
        (State::Superseded, _) => "A newer proposal took its place.".to_owned(),
        (state, ended) => format!(
            "It ended{}: {}.",
            ended.map_or(String::new(), |ended| format!(" {}", local_time(ended))),
            match state {
                State::Kept => "done; every VM that could be measured stayed within its limit",
                State::RolledBack => "rolled back",
                State::Partly => "done in part",
                State::Failed => "nothing was moved",
                _ => "stopped; what was moved stays",
            }
        ),
    };
    let _ = write!(text, "  {ended}");
    if let Some(later) = decision.taken_back_by {
        let _ = write!(text, " Decision {later} takes it back.");
    }
    text.push('\n');
    text
}

/// What became of a VM's part in a move.
fn moved(step: &Step) -> String {
    let (from, to, now) = (step.from, step.to, step.now);
    let mut text = format!(
        "{}: {} -> {}",
        printable(&step.vm),
        size(from.size_bytes()),
        size(to.size_bytes()),
    );
    if from.cache_bytes > 0 || to.cache_bytes > 0 {
        let _ = write!(
            text,
            " (own {} -> {}, cache {} -> {})",
            size(from.direct_bytes),
            size(to.direct_bytes),
            size(from.cache_bytes),
            size(to.cache_bytes),
        );
    }
    let _ = write!(text, ", {}", name_of(step.state));
    if now != to {
        let _ = write!(text, "; has {} now", size(now.size_bytes()));
    }
    match &step.error {
        Some(error) => text + ": " + &printable(error),
        None => text + ".",
    }
}

/// What was measured of a VM beside what was predicted.
fn checked(check: &Check) -> String {
    let predicted = |number: Option<String>| match number {
        Some(number) => format!("predicted {number}"),
        None => "nothing was predicted".to_owned(),
    };
    let measured = |number: Option<String>| match number {
        Some(number) => format!("measured {number} by {}", printable(&check.by)),
        None => "not measured".to_owned(),
    };
    // In the units of its limit.
    let mut found = Vec::new();
    if check.bound.is_some() || check.misses.is_none() {
        let predicted = predicted(
            check
                .predicted
                .as_ref()
                .map(|at| format!("{} of the misses at its baseline", relative(Some(at)))),
        );
        let measured = measured(check.measured.map(ratio));
        found.push(format!("{predicted}, {measured}"));
    }
    if let Some(misses) = check.misses {
        let number = |rate| format!("{} misses/s", per_second(rate));
        let predicted = predicted(misses.predicted_per_second.map(number));
        let measured = measured(misses.measured_per_second.map(number));
        found.push(format!("{predicted}, {measured}"));
    }
    let limit = match (check.bound, check.misses) {
        (Some(bound), None) => format!("limit {}", ratio(bound)),
        (bound, Some(misses)) => {
            let number = PredictionUnit::PerSecond.text(misses.bound_per_second);
            bound.map_or(format!("limit {number}"), |bound| {
                format!("limit {} and {number}", ratio(bound))
            })
        }
        (None, None) => "no limit".to_owned(),
    };
    let stall = check.stall.map_or_else(String::new, |stall| {
        format!(
            ", its QEMU waited for memory {} of the time; limit {}",
            percent(stall.measured_ratio),
            percent(stall.bound_ratio)
        )
    });
    let text = format!(
        "{}: {}; {limit}{stall}: {}. {}",
        printable(&check.vm),
        found.join("; "),
        match check.verdict {
            Verdict::Kept => "kept",
            Verdict::Broken => "BROKEN",
            Verdict::Unknown => "whether it was kept is not known",
        },
        printable(&check.why),
    );
    text.trim_end().to_owned()
}

/// Decisions as comma-separated values, a line for each VM that they touch.
pub fn csv(decisions: &[&Decision]) -> String {
    let rows = decisions.iter().flat_map(|decision| {
        let steps = decision.steps.iter();
        steps.map(|step| {
            let check = decision.checks.iter().find(|check| check.vm == step.vm);
            (*decision, step, check)
        })
    });
    csv_table!(rows, |(decision, step, check)| {
        "decision": decision.id,
        "unix_ms": decision.unix_ms,
        "kind": name_of(decision.kind),
        "by": name_of(decision.by),
        "state": name_of(decision.state),
        "vm": printable(&step.vm),
        "from_bytes": step.from.size_bytes(),
        "to_bytes": step.to.size_bytes(),
        "now_bytes": step.now.size_bytes(),
        "step": name_of(step.state),
        "predicted": check.and_then(|it| it.predicted).map(|at| at.expected),
        "measured": check.and_then(|it| it.measured),
        "bound": check.and_then(|it| it.bound),
        "verdict": check.map(|it| name_of(it.verdict)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_that_was_computed_is_rounded() {
        let check = serde_json::json!({
            "vm": "web", "predicted": null, "measured": null, "by": "reads", "bound": null, "stall": null,
            "misses": {"predicted_per_second": null, "measured_per_second": 3.0, "bound_per_second": 80.801_832_300_757_92},
            "verdict": "kept", "why": "",
        });
        let told = checked(&serde_json::from_value(check).unwrap());
        let said =
            "web: nothing was predicted, measured 3.0 misses/s by reads; limit 80.8/s: kept.";
        assert_eq!(told, said);
    }

    #[test]
    fn what_is_not_known_of_a_check_is_said_in_words() {
        let check = serde_json::json!({
            "vm": "web", "predicted": null, "measured": null, "by": "", "bound": null, "stall": null,
            "verdict": "unknown", "why": "",
        });
        let told = checked(&serde_json::from_value(check).unwrap());
        let expected =
            "web: nothing was predicted, not measured; no limit: whether it was kept is not known.";
        assert_eq!(told, expected);
    }

    #[test]
    fn a_maximum_below_the_baseline_is_explained() {
        let holding = |mib: u64| serde_json::json!({"direct_bytes": mib << 20, "cache_bytes": 0});
        let explained = |max_mib: u64| {
            let decision = serde_json::json!({
                "schema": 1, "id": 1, "unix_ms": 0, "kind": "divide", "by": "daemon", "mode": "act", "state": "kept",
                "reason": "It is better.", "plan": null, "checks": [], "takes_back": null, "taken_back_by": null,
                "ended_unix_ms": null,
                "steps": [{"vm": "web", "from": holding(512), "to": holding(256), "now": holding(256), "state": "done",
                    "error": null}],
                "inputs": {"schema": 1, "page_bytes": 4096,
                    "policy": {"name": "isolated", "search": {"name": "optimal"}},
                    "rules": {"total_bytes": 1 << 30, "unit_bytes": 4096, "step_bytes": null, "gain_min": 0.0,
                        "miss_ratio_min": 0.001},
                    "demands": [{"vm": "web", "curve": null, "baseline_bytes": 512 << 20, "current_bytes": 512 << 20,
                        "floor_bytes": 0, "ceiling_bytes": max_mib << 20, "max_loss": 0.25, "shares": 1,
                        "working_set_bytes": null}]},
            });
            text(&serde_json::from_value(decision).unwrap(), None)
        };
        let limited = explained(256);
        let why = " Its maximum of 256 MiB is below its baseline of 512 MiB.\n";
        assert!(limited.contains(why), "{limited}");
        assert!(!explained(512).contains("maximum"), "{}", explained(512));
    }
}
