//! The QEMU VMs that run now, and whether each can be traced.

use plimsoll_flow::{RamBacking, RamMapping};
use plimsoll_vm::{Accelerator, QemuVm, RamState, VmError, qemu_pids};

use super::{Chapter, Finding};
use plimsoll_protocol::size::ByteSize;

/// Goes through the QEMU processes of this host.
#[must_use]
pub fn examine() -> Chapter {
    let findings = match qemu_pids() {
        Ok(pids) if pids.is_empty() => vec![Finding::ok("VMs", "none running")],
        Ok(pids) => pids.into_iter().filter_map(look_at).collect(),
        Err(error) => vec![Finding::no("VMs", error.to_string(), "mount /proc")],
    };
    Chapter {
        title: "Running VMs",
        findings,
    }
}

/// Returns what stands in the way of tracing a VM; `None` if it has just ended.
fn look_at(pid: u32) -> Option<Finding> {
    let seen = QemuVm::of_pid(pid).and_then(|vm| Ok((vm.ram_states()?, vm)));
    match seen {
        Ok((states, vm)) => Some(describe(&vm, &states)),
        Err(VmError::NoSuchProcess { .. }) => None,
        Err(error) => Some(Finding::no(
            format!("VM {pid}"),
            error.to_string(),
            "run as root to inspect it",
        )),
    }
}

fn describe(vm: &QemuVm, states: &[RamState]) -> Finding {
    let subject = format!("VM {}", vm.id);
    let accelerator = match vm.accelerator {
        Some(Accelerator::Kvm) => "KVM",
        Some(Accelerator::Tcg) => "TCG",
        _ => "unknown accelerator",
    };
    let size = ByteSize(vm.memory_bytes).rounded();
    let backings = backings(&vm.ram);
    let found = format!("process {}, {accelerator}, {size} of {backings}", vm.pid);
    let shared = |ram: &RamMapping| {
        matches!(
            ram.backing,
            RamBacking::SharedMemfd | RamBacking::SharedTmpfs
        )
    };
    if !vm.ram.iter().any(shared) {
        return Finding::no(
            subject,
            found,
            "its RAM must be shared: start it with -object memory-backend-memfd,id=ram,\
             size=SIZE,share=on -machine memory-backend=ram",
        );
    }
    if states.iter().any(|state| state.locked) {
        return Finding::no(
            subject,
            found,
            "its RAM is locked: start it without -overcommit mem-lock=on",
        );
    }
    if states.iter().any(|state| state.userfaultfd) {
        return Finding::no(
            subject,
            found,
            "a userfaultfd stands on its RAM already: another tracer, a migration or a snapshot",
        );
    }
    if !vm.ram.iter().all(shared) {
        return Finding::limited(
            subject,
            found,
            "only the shared part of its RAM can be traced",
        );
    }
    Finding::ok(subject, found)
}

/// Names what stands behind the RAM, each kind once.
fn backings(ram: &[RamMapping]) -> String {
    let mut names: Vec<_> = ram.iter().map(|ram| ram.backing.to_string()).collect();
    names.dedup();
    if names.is_empty() {
        return "RAM that was not found in its address space".to_owned();
    }
    names.join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;
    use plimsoll_flow::VmId;

    fn verdict(backings: &[RamBacking], state: RamState) -> (Verdict, String) {
        let ram = backings.iter().map(|backing| RamMapping {
            address: 1 << 30,
            len_bytes: 1 << 20,
            file_offset_bytes: 0,
            backing: backing.clone(),
        });
        let vm = QemuVm {
            pid: 7,
            id: VmId("web".to_owned()),
            accelerator: Some(Accelerator::Tcg),
            memory_bytes: 1 << 20,
            ram: ram.collect(),
            vcpus: Vec::new(),
            qmp_socket: None,
            agent_socket: None,
            sockets: Vec::new(),
        };
        let finding = describe(&vm, &[RamState::default(), state]);
        assert_eq!(finding.subject, "VM web");
        (finding.verdict, finding.found)
    }

    #[test]
    fn only_ram_that_is_shared_free_and_unlocked_can_be_traced() {
        use RamBacking::{Private, SharedMemfd, SharedTmpfs};
        let free = RamState::default();
        let locked = RamState {
            locked: true,
            ..free
        };
        let watched = RamState {
            userfaultfd: true,
            ..free
        };
        let (fine, found) = verdict(&[SharedMemfd], free);
        assert_eq!(fine, Verdict::Ok);
        assert_eq!(found, "process 7, TCG, 1 MiB of shared memfd");
        assert_eq!(verdict(&[SharedTmpfs], free).0, Verdict::Ok);
        assert_eq!(verdict(&[SharedMemfd, Private], free).0, Verdict::Limited);
        for (backings, state) in [
            (&[Private][..], free),
            (&[], free),
            (&[SharedMemfd], locked),
            (&[SharedMemfd], watched),
        ] {
            assert_eq!(verdict(backings, state).0, Verdict::No);
        }
    }
}
