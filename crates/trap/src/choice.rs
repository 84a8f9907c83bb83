//! The choice of the backend that costs a VM least.
//!
//! The candidates are the backends whose row has a figure for the cost of a curve ([`BackendRow::curve_cost`]) and that can
//! attach to the VM ([`assess`](crate::assess)). The figure depends on the time of one observed touch, which a trial on
//! this host measures: on a vCPU of KVM if KVM runs the VM, otherwise on a thread. The candidate with the lowest cost
//! for the same error is chosen, or first touches if they hardly cost more.
//!
//! Where none of them can attach, as to private RAM, and for a process that is no VM and a control group, the first of the other
//! backends that gives a curve and can attach is chosen, otherwise the first that can attach.
//!
//! Not here: the figures, which are the rows' own, and how they were measured (docs/performance.md).

use std::fmt;
use std::time::Duration;

use plimsoll_flow::TraceMethod;

use crate::assess::Assessment;
use crate::backend::{BackendRow, Yield};
use crate::error::TrapError;
use crate::refusal::Refusal;
use crate::trial::TouchCost;

/// The mean absolute error of a curve for which backends are compared, from a 64th of the VM on.
pub const CURVE_ERROR: f64 = 0.08;
/// Factor by which the costs of two backends may differ from one trial to the next. First touches resolve smaller sizes than
/// traps and scans, and their cost grows neither with the VM's size nor with its speed.
const ALIKE: f64 = 1.5;

/// A backend as users choose it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendSetting {
    /// Whichever costs the VM least for the same error.
    Auto,
    /// This one.
    Method(TraceMethod),
}

impl BackendSetting {
    /// The name of [`Auto`](Self::Auto) in options and configuration.
    pub const AUTO: &'static str = "auto";
    /// What it means, as a sentence for help.
    pub const AUTO_HELP: &'static str = "Cheapest backend at equal error of the curve among those that can attach to this VM; usually first-touch";

    /// The name in options and configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => Self::AUTO,
            Self::Method(method) => method.name(),
        }
    }
}

impl fmt::Display for BackendSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What became of a candidate.
#[derive(Debug)]
pub enum Verdict {
    /// It can attach.
    Cost(CurveCost),
    /// It cannot attach to this VM.
    Refused(Refusal),
    /// Its trial on this host failed.
    Failed(TrapError),
    /// It can attach; what it would cost is not known.
    CanAttach,
}

/// The cost to a VM of a curve with an error of [`CURVE_ERROR`].
#[derive(Debug, Clone, Copy)]
pub struct CurveCost {
    /// One observed touch.
    pub touch: TouchCost,
    /// The curve of a period: time taken from the VM.
    pub curve: Duration,
}

/// A backend that was considered.
#[derive(Debug)]
pub struct Candidate {
    /// The backend.
    pub row: &'static BackendRow,
    /// What became of it.
    pub verdict: Verdict,
}

impl Candidate {
    /// Of an assessment; `trial` measures a touch where nothing is in the way.
    fn of(assessment: Assessment, trial: impl FnOnce(&BackendRow) -> Verdict) -> Self {
        let Assessment { row, refusals } = assessment;
        let refusal = refusals.into_iter().next();
        let verdict = refusal.map_or_else(|| trial(row), Verdict::Refused);
        Self { row, verdict }
    }

    /// What a curve costs, if it can attach.
    pub fn cost(&self) -> Option<CurveCost> {
        match self.verdict {
            Verdict::Cost(cost) => Some(cost),
            Verdict::Refused(_) | Verdict::Failed(_) | Verdict::CanAttach => None,
        }
    }
}

/// Why the candidate was chosen, or was not, without its name.
impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.verdict {
            Verdict::Cost(cost) => write!(
                f,
                "a curve within {CURVE_ERROR} takes {:.0} ms of this VM (a touch: {:.1} µs)",
                cost.curve.as_secs_f64() * 1e3,
                cost.touch.time.as_secs_f64() * 1e6,
            ),
            Verdict::Refused(refusal) => refusal.fmt(f),
            Verdict::Failed(error) => error.fmt(f),
            Verdict::CanAttach => f.write_str(self.row.sees),
        }
    }
}

/// The chosen backend, and every candidate.
#[derive(Debug)]
pub struct Choice {
    /// The backend chosen by its cost.
    pub row: &'static BackendRow,
    /// All candidates, in the order of the registry.
    pub candidates: Vec<Candidate>,
}

impl Choice {
    /// Chooses among `assessments` of the VM that is process `pid`. Changes nothing in the VM.
    ///
    /// # Errors
    ///
    /// If none can attach: why the first candidate cannot.
    pub fn of(assessments: Vec<Assessment>, pid: u32) -> Result<Self, TrapError> {
        let (compared, others): (Vec<_>, Vec<_>) = assessments
            .into_iter()
            .partition(|found| found.row.curve_cost.is_some());
        let trial = |row: &BackendRow| match (row.curve_cost, row.trial_for(pid)) {
            (Some(curve_cost), Ok(touch)) => Verdict::Cost(CurveCost {
                touch,
                curve: curve_cost(touch.time),
            }),
            (None, Ok(_)) => Verdict::CanAttach,
            (_, Err(error)) => Verdict::Failed(error),
        };
        let compared = compared.into_iter();
        let candidates = compared.map(|found| Candidate::of(found, trial));
        Self::among(candidates.collect(), others).map_err(|candidates| {
            let first = candidates.into_iter().next();
            match first.map(|candidate| candidate.verdict) {
                Some(Verdict::Refused(refusal)) => refusal.into(),
                Some(Verdict::Failed(error)) => error,
                Some(Verdict::Cost(_) | Verdict::CanAttach) | None => Refusal::NoRam { pid }.into(),
            }
        })
    }

    /// Chooses among `assessments` of a process that is no VM, or of a control group. Changes nothing.
    ///
    /// # Errors
    ///
    /// [`TrapError::NoneCan`] if none can attach.
    pub fn of_any_memory(mut assessments: Vec<Assessment>) -> Result<Self, TrapError> {
        // Those that are not for such targets would only repeat that.
        let is_for_such = |found: &Assessment| {
            let mut refusals = found.refusals.iter();
            !refusals.any(|refusal| {
                matches!(
                    refusal,
                    Refusal::NotAVm { .. } | Refusal::ControlGroup { .. }
                )
            })
        };
        if assessments.iter().any(is_for_such) {
            assessments.retain(is_for_such);
        }
        Self::among(Vec::new(), assessments).map_err(|candidates| {
            let reasons = candidates.iter();
            let reasons = reasons.map(|candidate| format!("{}: {candidate}", candidate.row.name()));
            TrapError::NoneCan(reasons.collect::<Vec<_>>().join("; "))
        })
    }

    /// Chooses the cheapest of `candidates`, or first touches if they cost less than [`ALIKE`] times as much; if there is none, the first
    /// of `others` that can attach, those with curves before those without. All of them if none can.
    fn among(
        mut candidates: Vec<Candidate>,
        mut others: Vec<Assessment>,
    ) -> Result<Self, Vec<Candidate>> {
        let costs = candidates
            .iter()
            .filter_map(|candidate| Some((candidate.row, candidate.cost()?.curve)));
        let worth = |&(row, curve): &(&BackendRow, Duration)| match row.yields {
            Yield::FirstTouches => curve.div_f64(ALIKE),
            _ => curve,
        };
        if let Some((row, _)) = costs.min_by_key(worth) {
            return Ok(Self { row, candidates });
        }
        others.sort_by_key(|found| !found.row.gives_curve());
        let others = others.into_iter();
        candidates.extend(others.map(|found| Candidate::of(found, |_| Verdict::CanAttach)));
        let mut attachable = candidates
            .iter()
            .filter(|candidate| matches!(candidate.verdict, Verdict::CanAttach));
        match attachable.next().map(|candidate| candidate.row) {
            Some(row) => Ok(Self { row, candidates }),
            None => Err(candidates),
        }
    }
}

impl BackendRow {
    /// Measures a touch on this host as the VM that is process `pid` would feel it.
    ///
    /// # Errors
    ///
    /// That the backend does not work on this host.
    pub fn trial_for(&self, pid: u32) -> Result<TouchCost, TrapError> {
        TouchCost::measure(pid, self.trial)
    }
}

/// Why a VM is not observed, in a sentence; `None` if it can be. Of each backend, `assessed` has the first obstacle.
///
/// `setting` allows one backend, or those that give a curve of all accesses. The sentence has what is in the way of each of them,
/// and which of the others can be chosen by hand; if none can, what is in the way of all.
pub fn why_unobserved(
    assessed: impl Iterator<Item = (&'static BackendRow, Option<String>)>,
    setting: BackendSetting,
) -> Option<String> {
    let is_allowed = |row: &BackendRow| match setting {
        BackendSetting::Auto => row.gives_curve(),
        BackendSetting::Method(method) => row.method == method,
    };
    let of_vms = assessed.filter(|(row, _)| row.observes_vms());
    let (allowed, others): (Vec<_>, Vec<_>) = of_vms.partition(|(row, _)| is_allowed(row));
    if allowed.is_empty() || allowed.iter().any(|(_, obstacle)| obstacle.is_none()) {
        return None;
    }
    let by_hand = others.iter().filter(|(_, obstacle)| obstacle.is_none());
    let by_hand = by_hand.map(|(row, _)| {
        let shows = match (row.gives_curve(), row.sees_reads) {
            (true, _) => "",
            (false, true) => ", which gives no curve",
            (false, false) => ", which shows writes only",
        };
        format!("`attach --backend {}`{shows}", row.name())
    });
    let by_hand: Vec<_> = by_hand.collect();
    let (which, refused) = match (by_hand.is_empty(), setting) {
        (true, _) => ("no backend can observe it", [allowed, others].concat()),
        (false, BackendSetting::Auto) => ("no backend that gives a curve can observe it", allowed),
        (false, BackendSetting::Method(_)) => ("the chosen backend cannot observe it", allowed),
    };
    // Backends with one reason stand together.
    let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
    for (row, obstacle) in refused {
        let reason = obstacle.unwrap_or_default();
        match reasons.iter_mut().find(|(other, _)| *other == reason) {
            Some((_, names)) => names.push(row.name()),
            None => reasons.push((reason, vec![row.name()])),
        }
    }
    let reasons = reasons.into_iter();
    let reasons = reasons.map(|(reason, names)| format!("{}: {reason}", names.join(", ")));
    let reasons = reasons.collect::<Vec<_>>().join("; ");
    Some(match by_hand.is_empty() {
        true => format!("{which} ({reasons})"),
        false => format!(
            "{which} ({reasons}); it can be observed by hand with {}",
            by_hand.join(", or ")
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::BACKENDS;
    use crate::trial::Toucher;

    fn candidate(method: TraceMethod, curve_ms: Option<u64>) -> Candidate {
        let cost = |ms| {
            Verdict::Cost(CurveCost {
                touch: TouchCost {
                    time: Duration::from_micros(5),
                    toucher: Toucher::Thread,
                },
                curve: Duration::from_millis(ms),
            })
        };
        Candidate {
            row: BackendRow::of(method),
            verdict: curve_ms.map_or(Verdict::Refused(Refusal::UserfaultInUse), cost),
        }
    }

    #[test]
    fn the_cheapest_that_can_attach_is_chosen() {
        let (traps, scans) = (TraceMethod::Traps, TraceMethod::AccessedPageScans);
        for (trap_ms, scan_ms, expected) in [
            (Some(20), Some(30), traps),
            (Some(40), Some(30), scans),
            (None, Some(30), scans),
            (Some(20), None, traps),
        ] {
            let candidates = vec![candidate(traps, trap_ms), candidate(scans, scan_ms)];
            let choice = Choice::among(candidates, vec![]).unwrap();
            assert_eq!(choice.row.method, expected, "{trap_ms:?} {scan_ms:?}");
            assert_eq!(choice.candidates.len(), 2);
        }
    }

    #[test]
    fn of_costs_that_a_trial_hardly_tells_apart_first_touches_are_chosen() {
        let (traps, first_touches) = (TraceMethod::Traps, TraceMethod::FirstTouches);
        for (trap_ms, expected) in [(39, first_touches), (32, traps)] {
            let candidates = vec![
                candidate(traps, Some(trap_ms)),
                candidate(first_touches, Some(52)),
            ];
            let choice = Choice::among(candidates, vec![]).unwrap();
            assert_eq!(choice.row.method, expected, "{trap_ms}");
        }
    }

    #[test]
    fn a_vm_that_none_can_observe_is_refused_for_the_first_reason() {
        let refused = assessment(TraceMethod::Traps, vec![Refusal::UserfaultInUse]);
        let error = Choice::of(vec![refused], 1).unwrap_err();
        assert!(matches!(error, TrapError::Refused(Refusal::UserfaultInUse)));
        let error = Choice::of(vec![], 1).unwrap_err();
        assert!(matches!(error, TrapError::Refused(Refusal::NoRam { .. })));
    }

    fn assessment(method: TraceMethod, refusals: Vec<Refusal>) -> Assessment {
        Assessment {
            row: BackendRow::of(method),
            refusals,
        }
    }

    #[test]
    fn of_a_vm_with_private_ram_one_is_chosen_whose_cost_is_not_known() {
        let private = || {
            vec![Refusal::NotSharedMemory {
                backing: plimsoll_flow::RamBacking::Private,
            }]
        };
        let of = |idle: Vec<Refusal>| {
            let assessments = vec![
                assessment(TraceMethod::Traps, private()),
                assessment(TraceMethod::WriteScans, vec![]),
                assessment(TraceMethod::IdlePages, idle),
            ];
            Choice::of(assessments, 1).unwrap()
        };
        assert_eq!(of(vec![]).row.method, TraceMethod::IdlePages);
        let choice = of(vec![Refusal::Locked]);
        assert_eq!(choice.row.method, TraceMethod::WriteScans);
        assert_eq!(choice.candidates.len(), 3);
        let none = vec![
            assessment(TraceMethod::Traps, private()),
            assessment(TraceMethod::IdlePages, vec![Refusal::Locked]),
        ];
        let error = Choice::of(none, 1).unwrap_err();
        assert!(
            matches!(error, TrapError::Refused(Refusal::NotSharedMemory { .. })),
            "{error}"
        );
    }

    #[test]
    fn a_vm_that_is_not_observed_has_a_reason_and_what_can_be_chosen_by_hand() {
        let why = |setting, able: &[&str]| {
            let assessed = BACKENDS.iter().map(|&row| {
                let is_private = matches!(row.name(), "trap" | "scan" | "sample" | "first-touch");
                let obstacle = match is_private {
                    true => "its RAM is private",
                    false => "the kernel has none",
                };
                let is_able = able.contains(&row.name());
                (row, (!is_able).then(|| obstacle.to_owned()))
            });
            why_unobserved(assessed, setting)
        };
        let auto = BackendSetting::Auto;
        assert_eq!(why(auto, &["damon", "write-scan"]), None);
        assert_eq!(
            why(auto, &["write-scan"]).unwrap(),
            "no backend that gives a curve can observe it (trap, scan, first-touch: its RAM is private; rwp, idle, damon: the \
             kernel has none); it can be observed by hand with `attach --backend write-scan`, which shows writes only"
        );
        assert_eq!(
            why(auto, &[]).unwrap(),
            "no backend can observe it (trap, scan, first-touch, sample: its RAM is private; rwp, idle, damon, write-scan: the \
             kernel has none)"
        );
        let idle = BackendSetting::Method(TraceMethod::IdlePages);
        assert_eq!(why(idle, &["idle"]), None);
        assert_eq!(
            why(idle, &["sample", "damon"]).unwrap(),
            "the chosen backend cannot observe it (idle: the kernel has none); it can be observed by hand with `attach --backend \
             sample`, which gives no curve, or `attach --backend damon`"
        );
        // A control group's page cache is not a VM's.
        assert!(!why(auto, &["page-cache"]).unwrap().contains("page-cache"));
        assert_eq!(why_unobserved(std::iter::empty(), auto), None);
    }

    #[test]
    fn of_another_process_the_first_that_gives_a_curve_is_chosen() {
        let (scan, writes) = (TraceMethod::AccessedPageScans, TraceMethod::WriteScans);
        let not_a_vm = || vec![Refusal::NotAVm { pid: 7 }];
        let chosen =
            |assessments| Choice::of_any_memory(assessments).map(|choice| choice.row.method);
        let both = vec![assessment(writes, vec![]), assessment(scan, vec![])];
        assert_eq!(chosen(both).unwrap(), scan);
        let one = vec![
            assessment(writes, vec![]),
            assessment(scan, vec![Refusal::Locked]),
        ];
        assert_eq!(chosen(one).unwrap(), writes);
        let other = vec![assessment(scan, not_a_vm()), assessment(writes, vec![])];
        let choice = Choice::of_any_memory(other).unwrap();
        assert_eq!((choice.row.method, choice.candidates.len()), (writes, 1));
        let none = vec![
            assessment(TraceMethod::Traps, not_a_vm()),
            assessment(writes, vec![Refusal::UserfaultInUse]),
            assessment(scan, vec![Refusal::Locked, Refusal::UserfaultInUse]),
        ];
        let error = chosen(none).unwrap_err().to_string();
        let reasons = [
            format!("no backend can: scan: {}", Refusal::Locked),
            format!("; write-scan: {}; ", Refusal::UserfaultInUse),
        ];
        assert!(reasons.iter().all(|why| error.contains(why)), "{error}");
        assert!(!error.contains("trap: "), "{error}");
        let error = chosen(vec![assessment(writes, not_a_vm())]).unwrap_err();
        assert!(error.to_string().contains(": write-scan: "), "{error}");
    }

    #[test]
    fn only_backends_with_curves_have_a_cost_of_one_and_it_grows_with_the_touch() {
        for row in BACKENDS {
            let Some(cost) = row.curve_cost else { continue };
            assert!(row.gives_curve(), "{}", row.name());
            let us = Duration::from_micros;
            let (cheap, dear) = (cost(us(5)), cost(us(50)));
            assert!(cheap > Duration::ZERO && dear > cheap, "{}", row.name());
        }
    }
}
