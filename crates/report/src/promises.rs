//! What became of the promises that decisions made.
//!
//! A decision that moves memory promises each VM whose curve it used that its bounds hold afterwards. The check after
//! the move finds each promise kept or broken, or could not measure it; a promise is taken back if its move was undone.

use plimsoll_output::{csv_table, printable, table};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::decision::{Check, Decision, Kind, State, Verdict};
use plimsoll_protocol::vm::{Promise, VmSummary};
use serde::{Deserialize, Serialize};

use crate::words::{known, local_time, name, percent};

/// Name of the row for all VMs.
const ALL: &str = "all";

/// The promises of all VMs, as JSON has them.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct PromisesReport {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Promises made since then.
    pub since_unix_ms: u64,
    /// By name; also VMs that no longer run.
    pub vms: Vec<VmPromises>,
    /// Of all VMs.
    pub all: PromiseCounts,
}

/// The promises of a VM.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct VmPromises {
    /// The VM.
    pub vm: String,
    /// What it is promised now; `null` if it does not run.
    pub promise: Option<Promise>,
    /// What became of its promises.
    #[serde(flatten)]
    pub counts: PromiseCounts,
}

/// What became of promises.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromiseCounts {
    /// Promises made by decisions that moved memory.
    pub made: u64,
    /// Found kept by the check after the move.
    pub kept: u64,
    /// Found broken.
    pub broken: u64,
    /// Neither: the check had too little data, or did not take place.
    pub unknown: u64,
    /// Moves that were undone.
    pub taken_back: u64,
    /// How far above its limit the worst of those that were broken was measured, as a share of the limit; `null` if
    /// none was.
    pub worst_excess: Option<f64>,
    /// When the first of these promises was made.
    pub first_unix_ms: Option<u64>,
    /// When one was last found broken.
    pub last_broken_unix_ms: Option<u64>,
}

impl PromiseCounts {
    fn add(&mut self, decision: &Decision, check: Option<&Check>) {
        self.made += 1;
        match check.map(|check| check.verdict) {
            Some(Verdict::Kept) => self.kept += 1,
            Some(Verdict::Broken) => self.broken += 1,
            Some(Verdict::Unknown) | None => self.unknown += 1,
        }
        if decision.taken_back_by.is_some() || decision.state == State::RolledBack {
            self.taken_back += 1;
        }
        let made = decision.unix_ms;
        self.first_unix_ms = Some(self.first_unix_ms.map_or(made, |first| first.min(made)));
        if let Some(check) = check.filter(|check| check.verdict == Verdict::Broken) {
            self.worst_excess = excess(check)
                .into_iter()
                .chain(self.worst_excess)
                .reduce(f64::max);
            let ended = decision.ended_unix_ms.unwrap_or(made);
            let last = self.last_broken_unix_ms;
            self.last_broken_unix_ms = Some(last.map_or(ended, |last| last.max(ended)));
        }
    }
}

/// How far a measurement is above its limit, as a share of it.
fn excess(check: &Check) -> Option<f64> {
    let rise = check.measured.zip(check.bound);
    let misses = check.misses;
    let number =
        misses.and_then(|misses| Some((misses.measured_per_second?, misses.bound_per_second)));
    let stall = check.stall;
    let stall = stall.map(|stall| (stall.measured_ratio, stall.bound_ratio));
    let excesses = rise.into_iter().chain(number).chain(stall);
    let excesses = excesses.filter(|(_, bound)| *bound > 0.0);
    excesses
        .map(|(measured, bound)| measured / bound - 1.0)
        .reduce(f64::max)
}

/// Whether a decision moved memory by a policy, so that it promised something.
fn moved(decision: &Decision) -> bool {
    decision.kind == Kind::Divide
        && !matches!(
            decision.state,
            State::Proposed | State::Superseded | State::Failed | State::Moving | State::Checking
        )
}

/// The VMs to which a decision promised something.
fn promised(decision: &Decision) -> Vec<&str> {
    let targets = decision.plan.iter().flat_map(|plan| &plan.targets);
    let targets = targets.filter(|target| target.relative.is_some());
    let mut vms: Vec<_> = targets.map(|target| target.vm.as_str()).collect();
    vms.extend(decision.checks.iter().map(|check| check.vm.as_str()));
    vms.sort_unstable();
    vms.dedup();
    vms
}

impl PromisesReport {
    /// Counts the promises that `decisions` made, to `vms` and to others, or to the VM `of` alone.
    pub fn new(
        since_unix_ms: u64,
        vms: Vec<VmSummary>,
        decisions: &[Decision],
        of: Option<&str>,
    ) -> Self {
        let vms = vms.into_iter().map(|vm| VmPromises {
            vm: vm.vm,
            promise: Some(vm.settings.promise),
            counts: PromiseCounts::default(),
        });
        let mut report = Self {
            schema: SCHEMA,
            since_unix_ms,
            vms: vms.collect(),
            all: PromiseCounts::default(),
        };
        for decision in decisions.iter().filter(|decision| moved(decision)) {
            report.add(decision, of);
        }
        report.vms.sort_by(|a, b| a.vm.cmp(&b.vm));
        report
    }

    fn add(&mut self, decision: &Decision, of: Option<&str>) {
        for vm in promised(decision) {
            if of.is_some_and(|of| of != vm) {
                continue;
            }
            let check = decision.checks.iter().find(|check| check.vm == vm);
            self.all.add(decision, check);
            let at = self.vms.iter().position(|row| row.vm == vm);
            let at = at.unwrap_or_else(|| {
                self.vms.push(VmPromises {
                    vm: vm.to_owned(),
                    promise: None,
                    counts: PromiseCounts::default(),
                });
                self.vms.len() - 1
            });
            self.vms[at].counts.add(decision, check);
        }
    }

    /// The rows of a table, the one for all VMs last.
    fn rows(&self) -> impl Iterator<Item = (&str, Option<Promise>, &PromiseCounts)> {
        let vms = self.vms.iter();
        let vms = vms.map(|row| (row.vm.as_str(), row.promise, &row.counts));
        vms.chain([(ALL, None, &self.all)])
    }

    /// A row for each VM, with the terms explained.
    pub fn text(&self) -> String {
        let table = table!(self.rows(), |(vm, promise, counts)| {
            Left "VM": name(vm),
            Right "made": counts.made,
            Right "kept": counts.kept,
            Right "broken": counts.broken,
            Right "unknown": counts.unknown,
            Right "taken back": counts.taken_back,
            Right "worst": known(counts.worst_excess, |excess| format!("+{}", percent(excess))),
            Left "first": known(counts.first_unix_ms, local_time),
            Left "last broken": known(counts.last_broken_unix_ms, local_time),
            Left "promised now": promise.map(|promise| promise.to_string()),
        });
        format!(
            "{table}\nSince {}. made: promises of decisions that moved memory, one for each VM whose curve they used;\n\
             unknown: too little data to check; worst: how far above its limit.\n",
            local_time(self.since_unix_ms)
        )
    }

    /// A line of comma-separated values for each VM.
    pub fn csv(&self) -> String {
        csv_table!(self.rows(), |(vm, promise, counts)| {
            "vm": printable(vm),
            "made": counts.made,
            "kept": counts.kept,
            "broken": counts.broken,
            "unknown": counts.unknown,
            "taken_back": counts.taken_back,
            "worst_excess": counts.worst_excess,
            "first_unix_ms": counts.first_unix_ms,
            "last_broken_unix_ms": counts.last_broken_unix_ms,
            "max_loss": promise.and_then(|promise| promise.max_loss),
            "max_misses_per_second": promise.and_then(|promise| promise.max_misses_per_second),
            "max_stall": promise.and_then(|promise| promise.max_stall),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(measured: f64, verdict: Verdict) -> Check {
        serde_json::from_value(serde_json::json!({
            "vm": "web", "predicted": null, "measured": measured, "by": "a count", "bound": 1.25,
            "misses": {
                "predicted_per_second": null, "predicted_high_per_second": null,
                "measured_per_second": 30.0, "bound_per_second": 20.0,
            },
            "verdict": verdict, "why": "",
        }))
        .unwrap()
    }

    fn decision(id: u64, state: State, check: &Check) -> Decision {
        let json = serde_json::json!({
            "schema": 1, "id": id, "unix_ms": 1000 * id, "kind": "divide", "by": "daemon", "mode": "act",
            "state": state, "reason": "", "inputs": null, "plan": null, "steps": [], "checks": [check],
            "takes_back": null, "taken_back_by": null, "ended_unix_ms": 1000 * id + 500,
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn a_limit_broken_by_waiting_for_memory_of_the_host_has_an_excess() {
        let json = serde_json::json!({
            "vm": "web", "predicted": null, "measured": null, "by": "a count", "bound": 1.25,
            "stall": { "before_ratio": null, "measured_ratio": 0.15, "bound_ratio": 0.05 },
            "verdict": "broken", "why": "",
        });
        let excess = excess(&serde_json::from_value(json).unwrap()).unwrap();
        assert!((excess - 2.0).abs() < 1e-9, "{excess}");
    }

    #[test]
    fn promises_are_counted_with_the_worst_excess_and_the_last_time() {
        let decisions = [
            decision(4, State::Kept, &check(1.1, Verdict::Kept)),
            decision(3, State::RolledBack, &check(2.5, Verdict::Broken)),
            decision(2, State::RolledBack, &check(1.3, Verdict::Broken)),
            decision(1, State::Stopped, &check(1.3, Verdict::Unknown)),
            decision(5, State::Proposed, &check(9.0, Verdict::Broken)),
        ];
        let mut report = PromisesReport::new(0, Vec::new(), &decisions, None);
        for decision in decisions.iter().filter(|decision| moved(decision)) {
            report.add(decision, Some("mail"));
        }
        let counts = PromiseCounts {
            made: 4,
            kept: 1,
            broken: 2,
            unknown: 1,
            taken_back: 2,
            worst_excess: Some(1.0),
            first_unix_ms: Some(1000),
            last_broken_unix_ms: Some(3500),
        };
        assert_eq!(report.all, counts);
        assert_eq!(report.vms.len(), 1);
        assert_eq!(
            (report.vms[0].vm.as_str(), &report.vms[0].counts),
            ("web", &counts)
        );
        // The misses per second of the second one were 1.5 times their limit, more than its rise was.
        assert_eq!(excess(&check(1.3, Verdict::Broken)), Some(0.5));
    }
}
