//! Descriptions of VMs, processes and control groups in a few words.

use plimsoll_flow::{Accelerator, RamMapping};
use plimsoll_protocol::size::ByteSize;
use plimsoll_vm::{MemoryGroup, MemoryProcess, QemuVm};

/// A VM's process, accelerator and RAM.
pub fn of_vm(vm: &QemuVm) -> String {
    let accelerator = match vm.accelerator {
        Some(Accelerator::Kvm) => "KVM",
        Some(Accelerator::Tcg) => "TCG",
        _ => "unknown accelerator",
    };
    // That of its start lacks what was plugged since.
    let mapped_bytes = vm.ram.iter().map(|ram| ram.len_bytes).sum();
    let size = match vm.ram.is_empty() {
        true => ByteSize(vm.memory_bytes),
        false => ByteSize(mapped_bytes),
    };
    let size = size.rounded();
    let backings = backings(&vm.ram);
    format!("process {}, {accelerator}, {size} of {backings}", vm.pid)
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

/// What a process has that is observed.
pub fn of_process(process: &MemoryProcess) -> String {
    let ram = &process.ram;
    let bytes = ram.mappings.iter().map(|mapping| mapping.len_bytes).sum();
    let mut text = format!(
        "{} in {} mappings",
        ByteSize(bytes).rounded(),
        ram.mappings.len()
    );
    if ram.left_out_bytes > 0 {
        let left_out = ByteSize(ram.left_out_bytes).rounded();
        text += &format!(" ({left_out} that are larger than the host's memory are left out)");
    }
    text
}

/// What a control group has that is observed.
pub fn of_group(group: &MemoryGroup) -> String {
    let charged = group.charged_bytes().map_or_else(
        || "all memory charged to groups".to_owned(),
        |bytes| format!("{} charged", ByteSize(bytes).rounded()),
    );
    let (groups, processes) = (group.inodes.len(), group.processes.len());
    let plural = |count| if count == 1 { "" } else { "s" };
    format!(
        "{charged}, {groups} group{}, {processes} process{}, {}",
        plural(groups),
        if processes == 1 { "" } else { "es" },
        group.version
    )
}
