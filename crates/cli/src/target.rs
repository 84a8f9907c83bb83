//! Descriptions of the processes and control groups that `attach` and `doctor` take beside VMs.

use plimsoll_protocol::size::ByteSize;
use plimsoll_vm::{MemoryGroup, MemoryProcess};

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
