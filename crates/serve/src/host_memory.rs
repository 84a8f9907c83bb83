//! The memory of this machine.

use std::fs;

use anyhow::Context as _;
use plimsoll_protocol::size::ByteSize;

const MEMINFO: &str = "/proc/meminfo";

/// All RAM of this machine (`MemTotal`).
///
/// # Errors
///
/// If the kernel does not report it.
pub fn host_memory() -> anyhow::Result<ByteSize> {
    let text = fs::read_to_string(MEMINFO).with_context(|| format!("cannot read {MEMINFO}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let kib = kib.with_context(|| format!("{MEMINFO} has no MemTotal"))?;
    Ok(ByteSize(kib << 10))
}

/// Refuses sizes, named by their options, that exceed this machine's memory.
///
/// # Errors
///
/// [`UsageError`](plimsoll_output::exit::UsageError) for the first of them, or if the memory is not known.
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
