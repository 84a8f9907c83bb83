//! What only a trial can show: whether each tracing backend works, and whether a guest runs.
//!
//! Each tracing backend is tried on memory of this process, as a tracer uses it on a VM's. KVM counts as working
//! after a small guest has run under it; that takes some seconds where it does not.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use plimsoll_trap::{BACKENDS, BackendRow, Refusal, Toucher, TrapError};
use plimsoll_vm::{KvmSupport, QEMU, detect};

use super::{Chapter, Finding};
use plimsoll_output::exit::with_causes;

/// Tries what there is to try on this host.
pub fn examine() -> Chapter {
    Chapter {
        title: "Tried out".to_owned(),
        findings: BACKENDS
            .iter()
            .map(|row| backend(row))
            .chain([qemu(), kvm(Path::new("/dev/kvm"))])
            .collect(),
    }
}

fn backend(row: &BackendRow) -> Finding {
    let subject = format!("backend {}", row.name());
    match (row.trial)(Toucher::Thread) {
        Ok(Duration::ZERO) => Finding::ok(subject, "can be used; a touch takes no fault"),
        Ok(cost) => {
            let us = |cost: Duration| cost.as_secs_f64() * 1e6;
            // A host without KVM has no vCPU to measure on.
            let of_vcpu = (row.trial)(Toucher::KvmVcpu).ok();
            let of_vcpu = of_vcpu.map(|cost| format!(", {:.1} us of a KVM vCPU", us(cost)));
            let of_vcpu = of_vcpu.unwrap_or_default();
            Finding::ok(
                subject,
                format!("works; a touch costs {:.1} us{of_vcpu}", us(cost)),
            )
        }
        Err(error @ TrapError::Refused(Refusal::NoPrivilege { .. } | Refusal::NoAdmin { .. })) => {
            Finding::no(subject, with_causes(&error), "run as root")
        }
        Err(error) => {
            let advice = format!("needs {}", row.needs);
            Finding::no(subject, with_causes(&error), advice)
        }
    }
}

fn qemu() -> Finding {
    let subject = "QEMU";
    let advice = "install QEMU for x86-64 (Debian: qemu-system-x86) to start VMs here";
    match Command::new(QEMU).arg("--version").output() {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            let version = text.lines().next().unwrap_or_default();
            let version = version.trim_start_matches("QEMU emulator version ");
            Finding::ok(subject, version.to_owned())
        }
        Ok(output) => Finding::no(subject, format!("{QEMU}: {}", output.status), advice),
        Err(error) => Finding::no(subject, format!("{QEMU}: {error}"), advice),
    }
}

fn kvm(device: &Path) -> Finding {
    let subject = "KVM";
    let slow = "guests run by emulation, about ten times slower";
    if !device.exists() {
        return Finding::limited(subject, format!("no {}", device.display()), slow);
    }
    let detection = detect();
    match detection.kvm {
        KvmSupport::Full => Finding::ok(subject, detection.reason),
        KvmSupport::Programs | KvmSupport::None => {
            Finding::limited(subject, detection.reason, slow)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn a_host_without_kvm_still_runs_guests() {
        let finding = kvm(Path::new("/nonexistent/kvm"));
        assert_eq!(finding.verdict, Verdict::Limited);
        assert_eq!(finding.found, "no /nonexistent/kvm");
    }
}
