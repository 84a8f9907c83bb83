//! The memory of this machine.

use plimsoll_protocol::size::ByteSize;
use plimsoll_vm::HostMemory;

/// All RAM of this machine (`MemTotal`).
///
/// # Errors
///
/// If `/proc/meminfo` cannot be read.
pub fn host_memory() -> anyhow::Result<ByteSize> {
    Ok(ByteSize(HostMemory::read()?.total_bytes))
}

/// Refuses sizes, named by their options, that exceed this machine's memory.
///
/// # Errors
///
/// [`UsageError`](plimsoll_output::exit::UsageError) for the first of them, or if the memory is unknown.
pub fn check_sizes<const N: usize>(sizes: [(&str, ByteSize); N]) -> anyhow::Result<()> {
    let memory = host_memory()?;
    for (option, size) in sizes {
        if size > memory {
            let memory = memory.rounded();
            plimsoll_output::bail_usage!(
                "{option} {size} is more than this machine's memory, {memory}"
            );
        }
    }
    Ok(())
}
