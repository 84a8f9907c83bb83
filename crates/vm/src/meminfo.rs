//! Parses counters of `/proc/meminfo` and `/proc/vmstat`, of this host and of guests.

use std::fs;

use crate::VmError;

const MEMINFO: &str = "/proc/meminfo";

/// This host's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// All RAM (`MemTotal`).
    pub total_bytes: u64,
    /// RAM that is available without swapping (`MemAvailable`).
    pub available_bytes: u64,
}

impl HostMemory {
    /// Reads the present values; one that the kernel does not report is 0.
    ///
    /// # Errors
    ///
    /// [`VmError::File`] if `/proc/meminfo` cannot be read.
    pub fn read() -> Result<Self, VmError> {
        let text =
            fs::read_to_string(MEMINFO).map_err(|source| VmError::of_file(MEMINFO, source))?;
        let bytes = |name| bytes(&text, name).unwrap_or(0);
        Ok(Self {
            total_bytes: bytes("MemTotal"),
            available_bytes: bytes("MemAvailable"),
        })
    }
}

/// The number of a line `NAME: NUMBER` or `NAME NUMBER`.
pub(crate) fn count(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let is_named = words.next()?.trim_end_matches(':') == name;
        is_named.then(|| words.next()?.parse().ok()).flatten()
    })
}

/// A count of KiB, in bytes.
pub(crate) fn bytes(text: &str, name: &str) -> Option<u64> {
    count(text, name)?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_memory() {
        let memory = HostMemory::read().unwrap();
        assert!(memory.total_bytes >= memory.available_bytes, "{memory:?}");
        assert!(memory.available_bytes > 0, "{memory:?}");
    }

    #[test]
    fn a_name_must_match_as_a_whole() {
        let text =
            "MemTotalX: 1 kB\nMemTotal: 2 kB\npgfault 3\nHuge:\nLarge: 18446744073709551615 kB\n";
        assert_eq!(bytes(text, "MemTotal"), Some(2048));
        assert_eq!(count(text, "pgfault"), Some(3));
        assert_eq!(count(text, "Huge"), None);
        assert_eq!(bytes(text, "Large"), None);
    }
}
