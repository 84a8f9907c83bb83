//! One VM, process or control group: which tracing backends can observe it, and what is in the way of the others.
//!
//! A backend needs the host as well, so each that could observe the target is also tried on memory of this process.

use std::time::Duration;

use anyhow::Context as _;
use plimsoll_protocol::vm::{BackendRefusal, BackendView};
use plimsoll_trap::{
    Assessment, BackendRow, BackendSetting, Refusal, Toucher, TraceConfig, TrapError,
    why_unobserved,
};
use plimsoll_vm::Target;

use super::{Chapter, Finding};
use crate::{assess, description, pid_of};
use plimsoll_output::exit::with_causes;

/// The assessment of a target.
#[derive(Debug)]
pub struct TargetAssessment {
    /// Its name.
    pub name: String,
    /// The target in a few words.
    pub title: String,
    /// Every backend, in the order of the registry.
    pub backends: Vec<BackendView>,
    /// What each backend observes, for those that can, and the cost of a touch.
    sees: Vec<String>,
    /// Whether it is a VM, which plimsolld traces by itself.
    is_vm: bool,
}

impl TargetAssessment {
    /// Assesses a target; changes nothing in it.
    ///
    /// # Errors
    ///
    /// Why its process cannot be read.
    pub fn of(target: &Target) -> anyhow::Result<Self> {
        let assessments = assess(target, &TraceConfig::default())?;
        let pid = pid_of(target);
        let views = assessments.into_iter().map(|found| view(found, pid));
        let (backends, sees) = views.unzip();
        let description = match target {
            Target::Vm(vm) => description::of_vm(vm),
            Target::Process(process) => description::of_process(process),
            Target::Group(group) => description::of_group(group),
        };
        Ok(Self {
            name: target.id().0,
            title: format!("{target}: {description}"),
            backends,
            sees,
            is_vm: target.vm().is_some(),
        })
    }

    /// A line for each backend that can observe the target, and for each reason why one cannot; and if plimsolld cannot trace a VM,
    /// the reason that it gives.
    pub fn chapter(&self) -> Chapter {
        let mut findings = Vec::new();
        for (backend, sees) in self.backends.iter().zip(&self.sees) {
            let name = backend.backend.name();
            if backend.refusals.is_empty() {
                findings.push(Finding::ok(name, sees));
            }
            let refusals = backend.refusals.iter();
            findings
                .extend(refusals.map(|refusal| Finding::no(name, &refusal.why, &refusal.change)));
        }
        let first = self.backends.iter().map(|view| {
            let refusal = view.refusals.first();
            let row = BackendRow::of(view.backend);
            (row, refusal.map(|refusal| refusal.why.clone()))
        });
        let first = first.filter(|_| self.is_vm);
        if let Some(why) = why_unobserved(first, BackendSetting::Auto) {
            let change = "change what keeps one of these backends from it, as above";
            findings.push(Finding::no("plimsolld", why, change));
        }
        Chapter {
            title: self.title.clone(),
            findings,
        }
    }
}

/// Finds a target by its name and assesses it.
///
/// # Errors
///
/// Why there is no such target, or why its process cannot be read.
pub fn examine(name: &str) -> anyhow::Result<TargetAssessment> {
    let found = Target::find(name)?;
    TargetAssessment::of(&found).with_context(|| format!("cannot assess {found}"))
}

/// A backend's view, and what it observes at which cost.
fn view(assessment: Assessment, pid: u32) -> (BackendView, String) {
    let Assessment { row, refusals } = assessment;
    let is_for_others = refusals.iter().any(|refusal| {
        matches!(
            refusal,
            Refusal::NotAVm { .. } | Refusal::ControlGroup { .. } | Refusal::NoControlGroup { .. }
        )
    });
    let refusals = refusals.iter().map(|refusal| BackendRefusal {
        name: refusal.name().to_owned(),
        why: refusal.to_string(),
        change: refusal.change(),
    });
    let mut refusals: Vec<_> = refusals.collect();
    let mut sees = row.sees.to_owned();
    let trial = (!is_for_others).then(|| row.trial_for(pid));
    match trial {
        None => {}
        Some(Ok(cost)) => {
            let of = match cost.toucher {
                Toucher::KvmVcpu => "KVM vCPU",
                Toucher::Thread => "thread",
            };
            let us = cost.time.as_secs_f64() * 1e6;
            if cost.time > Duration::ZERO {
                sees += &format!("; a touch costs {us:.1} us of a {of}");
            }
        }
        Some(Err(error)) => {
            let of_host = of_host(row, &error);
            if refusals.iter().all(|refusal| refusal.why != of_host.why) {
                refusals.push(of_host);
            }
        }
    }
    let view = BackendView {
        backend: row.method,
        refusals,
    };
    (view, sees)
}

/// Why a backend does not work on this host.
fn of_host(row: &BackendRow, error: &TrapError) -> BackendRefusal {
    match error {
        TrapError::Refused(refusal) => BackendRefusal {
            name: refusal.name().to_owned(),
            why: refusal.to_string(),
            change: refusal.change(),
        },
        other => BackendRefusal {
            name: "trial-failed".to_owned(),
            why: with_causes(other),
            change: format!("the backend needs {}", row.needs),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;
    use plimsoll_flow::TraceMethod;

    #[test]
    fn each_refusal_has_a_line_and_a_backend_without_one_is_fine() {
        let refusal = |why: &str| BackendRefusal {
            name: "locked".to_owned(),
            why: why.to_owned(),
            change: "unlock it".to_owned(),
        };
        let assessment = TargetAssessment {
            name: "web".to_owned(),
            title: "VM web".to_owned(),
            backends: vec![
                BackendView {
                    backend: TraceMethod::Traps,
                    refusals: vec![refusal("private"), refusal("locked")],
                },
                BackendView {
                    backend: TraceMethod::WriteScans,
                    refusals: vec![],
                },
            ],
            sees: vec!["references".to_owned(), "writes".to_owned()],
            is_vm: true,
        };
        let lines = assessment.chapter().findings;
        let lines: Vec<_> = lines
            .iter()
            .map(|line| (&*line.subject, line.verdict, &*line.found))
            .collect();
        assert_eq!(
            lines,
            [
                ("trap", Verdict::No, "private"),
                ("trap", Verdict::No, "locked"),
                ("write-scan", Verdict::Ok, "writes"),
                (
                    "plimsolld",
                    Verdict::No,
                    "no backend that gives a curve can observe it (trap: private); it can be observed by hand with \
                     `attach --backend write-scan`, which shows writes only"
                ),
            ]
        );
    }
}
