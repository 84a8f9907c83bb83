//! The QEMU VMs that run now, and by which backends each can be traced.

use std::error::Error;

use plimsoll_trap::{Assessment, BackendSetting, Refusal, TraceConfig, why_unobserved};
use plimsoll_vm::{QemuVm, VmError, qemu_pids};

use super::{Chapter, Finding};
use crate::{ObserveError, assess, description};

/// Goes through the QEMU processes of this host.
pub fn examine() -> Chapter {
    let findings = match qemu_pids() {
        Ok(pids) if pids.is_empty() => vec![Finding::ok("VMs", "none running")],
        Ok(pids) => pids.into_iter().filter_map(assess_pid).collect(),
        Err(error) => vec![Finding::no("VMs", error.to_string(), "mount /proc")],
    };
    Chapter {
        title: "Running VMs".to_owned(),
        findings,
    }
}

/// Assesses a VM; `None` if it has just ended.
fn assess_pid(pid: u32) -> Option<Finding> {
    let refused = |error: &dyn Error| {
        let subject = format!("VM {pid}");
        Some(Finding::no(
            subject,
            error.to_string(),
            "run as root to inspect it",
        ))
    };
    let vm = match QemuVm::of_pid(pid) {
        Ok(vm) => vm,
        Err(VmError::NoSuchProcess { .. }) => return None,
        Err(error) => return refused(&error),
    };
    match assess(&vm, &TraceConfig::default()) {
        Ok(assessments) => Some(describe(&vm, &assessments)),
        Err(ObserveError::Vm {
            source: VmError::NoSuchProcess { .. },
            ..
        }) => None,
        Err(error) => refused(&error),
    }
}

/// Reports whether the default backend can observe a VM; if it cannot, why, and which others can.
fn describe(vm: &QemuVm, assessments: &[Assessment]) -> Finding {
    let subject = format!("VM {}", vm.id);
    let description = description::of_vm(vm);
    let first = assessments.first().and_then(|first| first.refusals.first());
    let Some(refusal) = first else {
        return Finding::ok(subject, description);
    };
    let others: Vec<_> = assessments
        .iter()
        .filter(|assessment| assessment.refusals.is_empty())
        .map(|assessment| assessment.row.name())
        .collect();
    let found = format!("{description}: {refusal}");
    if others.is_empty() {
        return Finding::no(subject, found, refusal.change());
    }
    // Where those that can attach give no curve, plimsolld has the same reason for not tracing it.
    let assessed = assessments
        .iter()
        .map(|found| (found.row, found.refusals.first().map(Refusal::to_string)));
    let found = why_unobserved(assessed, BackendSetting::Auto)
        .map_or(found, |why| format!("{description}: {why}"));
    let change = format!(
        "{}; --backend {} can attach",
        refusal.change(),
        others.join(", ")
    );
    Finding::limited(subject, found, change)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;
    use plimsoll_flow::{Accelerator, RamBacking, RamMapping, VmId};
    use plimsoll_trap::BACKENDS;

    fn vm(backings: &[RamBacking]) -> QemuVm {
        let ram = backings.iter().map(|backing| RamMapping {
            address: 1 << 30,
            len_bytes: (1 << 20) / backings.len() as u64,
            file_offset_bytes: 0,
            backing: backing.clone(),
        });
        QemuVm {
            pid: 7,
            start_ticks: 7,
            id: VmId("web".to_owned()),
            accelerator: Some(Accelerator::Tcg),
            memory_bytes: 1 << 20,
            ram: ram.collect(),
            ..QemuVm::default()
        }
    }

    /// Assessments in which the backends of `refused` cannot attach.
    fn assessments(refused: &[&str]) -> Vec<Assessment> {
        let assessment = |&row| Assessment {
            row,
            refusals: if refused.contains(&BACKENDS[0].name()) && refused.contains(&row.name()) {
                vec![Refusal::Locked]
            } else {
                vec![]
            },
        };
        BACKENDS.iter().map(assessment).collect()
    }

    #[test]
    fn the_verdict_is_that_of_the_default_backend_unless_another_can_attach() {
        use RamBacking::{Private, SharedMemfd};
        let describe =
            |refused: &[&str]| describe(&vm(&[SharedMemfd, Private]), &assessments(refused));
        let all: Vec<_> = BACKENDS.iter().map(|row| row.name()).collect();
        let fine = describe(&[]);
        assert_eq!(fine.subject, "VM web");
        assert_eq!(fine.verdict, Verdict::Ok);
        let description = "process 7, TCG, 1 MiB of shared memfd and private memory";
        assert_eq!(fine.found, description);
        let none = describe(&all);
        assert_eq!(none.verdict, Verdict::No);
        assert_eq!(none.found, format!("{description}: {}", Refusal::Locked));
        assert_eq!(none.advice, Some(Refusal::Locked.change()));
        let others = all.iter().filter(|&&name| name != "write-scan");
        let writes = describe(&others.copied().collect::<Vec<_>>());
        assert_eq!(writes.verdict, Verdict::Limited);
        let why = "no backend that gives a curve can observe it (trap, scan, first-touch, rwp, idle, damon: ";
        assert!(
            writes.found.starts_with(&format!("{description}: {why}")),
            "{}",
            writes.found
        );
        let advice = writes.advice.unwrap();
        assert!(
            advice.ends_with("; --backend write-scan can attach"),
            "{advice}"
        );
    }
}
